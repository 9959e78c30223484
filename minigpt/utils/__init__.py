"""Errors, files and text for terminals."""
