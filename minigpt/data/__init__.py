"""Texts to batches of token ids."""
