"""Train a chain of models, each of which also learns from the one before."""
