"""Workarounds for Lightning, for the start of several processes and for the C library, each with its reason.

Checked against Lightning 2.6.6, glibc 2.36 and Linux 6.
"""

import ctypes
import logging
import os
import platform
import signal
import sys
import warnings
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback

from minigpt.utils.terminal import is_rank_zero

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_PR_SET_PDEATHSIG = 1  # of prctl.h
_RANK_ZERO_PID = "MINIGPT_RANK_ZERO_PID"  # environment variable


class LightningWorkarounds(Callback):
    """Workarounds that need a hook of the Trainer."""

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        os.environ.pop(_RANK_ZERO_PID, None)  # other processes that start from here are not ranks

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Validate after the last step too: Lightning validates only where eval_every divides the batch number."""
        if batch_idx + 1 == trainer.num_training_batches:
            trainer.val_check_batch = batch_idx + 1


def fix_loop_state(checkpoint: dict[str, Any]) -> None:
    """Correct the loop counters of a checkpoint before Lightning restores them.

    A run is one epoch of max_steps, so with a larger max_steps the last batch of the checkpoint is not the last any
    more. A validation that was due and unfinished restarts at its first batch if its counters are those of a start.
    """
    loops = checkpoint["loops"]["fit_loop"]
    loops["epoch_loop.batch_progress"]["is_last_batch"] = False
    if checkpoint.get("validation_due"):
        started = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        for counters in ("total", "current"):
            loops["epoch_loop.val_loop.batch_progress"][counters] |= started


def is_resume_error(error: Exception) -> bool:
    """Whether an error is that of Lightning or torch with an unsuitable checkpoint; memory and network are others."""
    wrong_weights = isinstance(error, RuntimeError) and "loading state_dict" in str(error)
    return wrong_weights or isinstance(error, LookupError | TypeError | ValueError | AttributeError)


def silence_lightning() -> None:
    """Silence Lightning's advice to authors of training loops, but not model summaries and profiles."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("callbacks.model_summary", "profilers.profiler"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module="lightning")


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, which allocates as much again.

    By default it returns activations to the system, and each step faults a thousand pages in: 5 % of a step of the
    smallest model on a CPU.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)


def end_with_rank_zero() -> None:
    """Make the system kill the ranks that rank 0 started when rank 0 ends for any reason.

    Gloo and NCCL notice at the next collective, but a rank that waits in the rendezvous waits for half an hour.
    """
    if is_rank_zero():
        os.environ[_RANK_ZERO_PID] = str(os.getpid())  # inherited by the other ranks
    elif sys.platform == "linux" and _RANK_ZERO_PID in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.environ[_RANK_ZERO_PID] != str(os.getppid()):  # it has ended already
            os._exit(1)
