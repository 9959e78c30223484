"""Fault injection into real runs: `make faults` runs many trials, `test_faults.py` a few.

A fault is a function that runs one trial in an empty folder: start `scripts/train.py`, inject the
fault, and raise `AssertionError` if the run does not recover.
"""

from . import disks, processes, server

FAULTS = [*processes.FAULTS, *disks.FAULTS, *server.FAULTS]  # in the order of the table
