"""A few trials of every fault that is quick to try; `make faults` tries all of them, often."""

from pathlib import Path

import pytest
from faults import Fault, Skipped
from faults.all import FAULTS


@pytest.mark.parametrize(
    ("fault", "number"),
    [pytest.param(fault, number, id=f"{fault.name} {number}") for fault in FAULTS for number in range(fault.quick)],
)
def test_a_run_survives(fault: Fault, number: int, tmp_path: Path) -> None:
    try:
        fault(tmp_path, number)
    except Skipped as reason:
        pytest.skip(str(reason))
