"""Plan a run for `minutes=`: its sizes, steps, batch, regularization and rates."""
