"""The Lightning Trainer of a run."""

import ctypes
import logging
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from minigpt.checkpoints.format import read, write
from minigpt.runs.checkpointing import AfterCheckpoint
from minigpt.runs.processes import started_together
from minigpt.training import FIRST_RANK
from minigpt.utils.errors import UserError
from minigpt.utils.ranks import is_rank_zero

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_PR_SET_PDEATHSIG = 1  # of prctl.h


def build_trainer(
    options: Mapping[str, Any],
    *,
    max_steps: int,
    eval_every: int,
    callbacks: Sequence[L.Callback],
    loggers: Sequence[Logger],
    folder: Path,
) -> L.Trainer:
    """A Lightning Trainer from `configs/trainer/`, whose only clock is optimizer steps.

    Raises:
        UserError: the device is not there, or Lightning refuses an option.
    """
    _quieten()
    _keep_freed_memory()
    _end_with_the_first()
    options = dict(options)
    accumulate = options.pop("accumulate_grad_batches")
    accelerator, precision = options.pop("accelerator"), options.pop("precision")
    if (started := started_together()) and options["devices"] == 1 and options["strategy"] == "auto":
        options["num_nodes"], options["devices"] = started
        options["strategy"] = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    present: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "gpu": _any_gpu,
        "mps": torch.backends.mps.is_available,
    }
    if accelerator in present and not present[accelerator]():
        raise UserError(f"trainer.accelerator={accelerator}: this machine has none; use trainer=auto or trainer=cpu")
    if precision == "auto":
        on_cuda = accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available()
        precision = "bf16-mixed" if on_cuda and torch.cuda.is_bf16_supported() else "32-true"
    plugins: list[Any] = [CheckpointIO()]
    if SLURMEnvironment.detect() or (started and "TORCHELASTIC_RUN_ID" not in os.environ):
        plugins.append(SLURMEnvironment(auto_requeue=False))  # `EndInOrder` and the job's script see to that
    torch.backends.cuda.matmul.allow_tf32 = True  # what stays in fp32 on a GPU; a CPU is not concerned
    try:
        trainer = L.Trainer(
            **options,
            accelerator=accelerator,
            precision=precision,
            accumulate_grad_batches=accumulate,
            max_steps=max_steps,
            max_epochs=-1,
            val_check_interval=min(eval_every, max_steps) * accumulate,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            callbacks=list(callbacks),
            logger=list(loggers),
            plugins=plugins,
            default_root_dir=folder,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_checkpointing=any(
                isinstance(callback, Checkpoint) for callback in callbacks
            ),  # else Lightning adds one
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
    except Exception as error:  # Lightning raises a dozen kinds for an option that it does not like
        raise UserError(f"the trainer cannot be built: {error}") from error
    trainer.callbacks.sort(  # type: ignore[attr-defined]
        key=lambda callback: isinstance(callback, AfterCheckpoint)
    )  # Lightning: checkpoints last
    return trainer


def _quieten() -> None:
    """Silence Lightning's advice, which is for authors of training loops, but not what a callback is asked for."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("callbacks.model_summary", "profilers.profiler"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module="lightning")


def _keep_freed_memory() -> None:
    """Have the C library hold on to what a step frees, for the next step takes as much.

    glibc hands activations back to the system as they are freed, and every step would fault a thousand pages
    in again: 5 % of a step of the smallest model on a CPU. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)


def _end_with_the_first() -> None:
    """Have the system end a process that the first rank started when the first ends, however it does.

    Gloo and NCCL notice it at the next exchange, but a process that waits for the first to meet it waits half an hour.
    """
    if is_rank_zero():
        os.environ[FIRST_RANK] = str(os.getpid())  # until the others were started
    elif sys.platform == "linux" and FIRST_RANK in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.environ[FIRST_RANK] != str(os.getppid()):  # it has ended before
            os._exit(1)


def _any_gpu() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available()


class CheckpointIO(TorchCheckpointIO):
    """Lightning writes and reads its checkpoints through here."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object | None = None
    ) -> None:
        write(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read(Path(path), device="cpu")


class FSDPStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, which would read checkpoints with torch.load."""

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the weights and the optimizer state into their shards; return the rest of the checkpoint."""
        from torch.distributed.checkpoint import state_dict  # slow to import
        from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

        assert self.model is not None
        content = read(Path(self.broadcast(checkpoint_path)))
        (optimizer,), (state,) = self.optimizers, content["optimizer_states"]
        options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state_dict.set_model_state_dict(self.model, content.pop("state_dict"), options=options)
        state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, self.model)
        state_dict.set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state, options=options)
        return content
