"""Every fault, in the order of the table."""

from . import processes

FAULTS = [*processes.FAULTS]
