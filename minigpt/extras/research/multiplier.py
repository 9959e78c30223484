"""The compute at which one value of a setting reaches the loss of another."""

from typing import Any

from minigpt.sweeps.ranking import Table


def compute_shares(table: Table, name: str, baseline: str, value: str) -> dict[str, Any]:
    """Return the shares of the FLOPs and seconds; None where they are unknown."""
    return {"flops": None, "seconds": None, "text": ""}
