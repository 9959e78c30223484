"""Checkpoints: what a file holds (format.py), saving and loading a model, finding a file, rules for resuming."""
