"""Checkpoints: the file format, saving and loading a model, finding a file, and the rules for resuming."""
