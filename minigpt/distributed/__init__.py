"""Processes and devices of a run: ranks, process group, strategies, checkpoints of sharded weights."""
