"""Conversations: rows, a chat template, tokens with a mask of the answers, packed windows."""
