"""Extras of minigpt: each is a package of its own, which the core reaches by name and does
without.
"""
