"""One trial of every fault that is quick to inject; `make faults` runs many trials of all faults."""

import signal
from pathlib import Path
from typing import Any

import pytest
from robustness.faults import FAULTS
from robustness.faults.tools import Fault, Skipped

from minigpt.runs.shutdown import GracefulShutdown
from minigpt.utils.signals import END_SIGNALS, Interrupted, handle_signals, raise_interrupted


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.slow] if fault.suite == "slow" else [], id=fault.name)
        for fault in FAULTS
        if fault.suite != "none"
    ],
)
def test_a_run_recovers_from_a_fault(fault: Fault, tmp_path: Path) -> None:
    try:
        fault(tmp_path, 0)
    except Skipped as reason:
        pytest.skip(str(reason))


def test_only_a_second_signal_ends_a_run_at_once() -> None:
    """In a process, a run with short steps ends as fast after the first."""
    trainer: Any = None
    with handle_signals(END_SIGNALS, raise_interrupted):
        GracefulShutdown(sync_every=1).on_train_start(trainer, None)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
