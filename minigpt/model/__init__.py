"""The model: configuration, attention, blocks, and whether a model was changed. Torch alone."""
