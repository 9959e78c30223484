"""Texts in formats and from sources that need packages of their own."""
