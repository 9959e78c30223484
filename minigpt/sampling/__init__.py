"""Sampling: from a prompt to text."""
