"""One training run: its folder, its Trainer, its callbacks and loggers."""
