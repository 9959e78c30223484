"""All faults, in the order of the table."""

from . import disks, processes, server

FAULTS = [*processes.FAULTS, *disks.FAULTS, *server.FAULTS]
