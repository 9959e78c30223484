"""A few trials of every fault that is quick to inject; `make faults` runs many trials of all faults."""

from pathlib import Path

import pytest
from faults import Fault, Skipped
from faults.all import FAULTS


@pytest.mark.parametrize(
    ("fault", "seed"),
    [pytest.param(fault, seed, id=f"{fault.name} {seed}") for fault in FAULTS for seed in range(fault.quick_trials)],
)
def test_a_run_recovers_from_a_fault(fault: Fault, seed: int, tmp_path: Path) -> None:
    try:
        fault(tmp_path, seed)
    except Skipped as reason:
        pytest.skip(str(reason))
