"""Checkpoints: what a file holds, saving and loading a model, finding a file, resuming."""
