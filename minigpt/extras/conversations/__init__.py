"""Conversations: read, rendered by a chat template, tokenized with a mask of the answers, packed."""
