"""Training: the LightningModule, optimizers, schedules, EMA, precision and CPU threads."""
