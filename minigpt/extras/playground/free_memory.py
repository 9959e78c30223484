"""How much memory the requests to the server may share."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

_ASSUMED_MEMORY = 8 << 30  # bytes, on Windows, whose standard library cannot read it


def memory(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, or that this machine or container has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if sys.platform == "win32":
        return _ASSUMED_MEMORY
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups 2 and 1
        with suppress(OSError, ValueError):  # "max": no limit
            total = min(total, int(Path("/sys/fs/cgroup", limit).read_text(encoding="utf-8")))
    return total
