"""The model: its configuration, attention, blocks, and whether a model was changed. Needs torch alone."""
