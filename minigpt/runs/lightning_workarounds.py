"""Workarounds for Lightning and torch, for the start of several processes and for the C library.

Each has its reason. Checked against Lightning 2.6.6, torch 2.13, glibc 2.36 and Linux 6. Nothing
heavy is imported here, because `fast_imports` comes before Lightning.
"""

import ctypes
import gc
import logging
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from minigpt.utils.errors import require
from minigpt.utils.ranks import RANK_ZERO_PID, is_rank_zero

COMPILER = "torch._dynamo"


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import in 0.4 of the time.

    Leave out garbage collection, the optional parts of torchmetrics and, until it is used, torch's
    compiler. The plots of torchmetrics, which minigpt does not use, cannot be made in this process.
    """
    gc.disable()
    try:
        import_module("torch")  # uses its compiler in no other way than Lightning
        sys.modules.setdefault(COMPILER, LazyCompiler(COMPILER))
        # It would import transformers, matplotlib and scipy, for metrics of no run.
        optional = import_module("lightning_utilities.core.imports").RequirementCache
        optional.available = False
        scipy = sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]  # not importable
        try:
            import_module("torchmetrics")
        finally:
            del optional.available
            if scipy is None:
                del sys.modules["scipy"]
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation, which is rarely collected
        gc.enable()


class _IsCompiled(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(
            instance, getattr(sys.modules.get(f"{COMPILER}.eval_frame"), "OptimizedModule", ())
        )


class LazyCompiler(ModuleType):
    """Stand for `torch._dynamo` until more is used of it than without compilation.

    Its import takes 1 s. Lightning and the optimizers of torch import it always.
    """

    class OptimizedModule(metaclass=_IsCompiled):
        """The class of compiled modules, for `isinstance`."""

    def graph_break(self) -> None:
        """Do nothing, as outside of a compilation."""

    def disable(self, function: Callable[..., object], *args: object, **options: object) -> object:
        # The function is not compiled if the compiler is in use when it is called.
        if not hasattr(function, "__code__"):
            return self.__getattr__("disable")(function, *args, **options)

        @wraps(function)
        def call(*values: object, **keywords: object) -> object:
            if sys.modules.get(COMPILER) is self:
                return function(*values, **keywords)
            return self.__getattr__("disable")(function, *args, **options)(*values, **keywords)

        return call

    def __getattr__(self, name: str) -> Any:
        # A submodule needs the package. A search through all modules does not, nor an import from
        # this one.
        reader = sys._getframe(1).f_globals.get("__name__")
        if name.startswith("__") and (name, reader) != ("__path__", "importlib._bootstrap"):
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        return getattr(import_module(COMPILER), name)


def set_up_process() -> None:
    """Silence Lightning, keep freed memory, and use TensorFloat-32 for fp32 products on a GPU."""
    import torch

    # Lightning's advice is for authors of training loops; but model summaries and profiles are not.
    for name, level in (
        ("fabric", logging.ERROR),
        ("pytorch", logging.ERROR),
        ("pytorch.callbacks.model_summary", logging.INFO),
        ("pytorch.profilers.profiler", logging.INFO),
    ):
        logging.getLogger(f"lightning.{name}").setLevel(level)
    warnings.filterwarnings("ignore", module="lightning")
    # The next step allocates as much again. By default glibc returns activations to the system, and
    # each step faults a thousand pages in: 5 % of a step of the smallest model on a CPU.
    if platform.libc_ver()[0] == "glibc":
        for threshold in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
            ctypes.CDLL(None).mallopt(threshold, 1 << 30)
    torch.backends.cuda.matmul.allow_tf32 = True


def is_optimizer_step(trainer: Any, batch_idx: int) -> bool:
    """Whether a batch ends an optimizer step; Lightning calls its hooks for all that accumulate."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def is_resume_error(error: Exception) -> bool:
    """Whether an error is that of Lightning or torch with an unsuitable checkpoint.

    Errors of memory and network are others.
    """
    return isinstance(error, LookupError | TypeError | ValueError | AttributeError) or (
        isinstance(error, RuntimeError) and "loading state_dict" in str(error)
    )


def number_by_step(trainer: Any) -> None:
    """Number what callbacks log by optimizer step, as the other metrics.

    Lightning counts from 0, or batches, and takes the number from a metric named step.
    """
    log = trainer._logger_connector.log_metrics

    def log_by_step(metrics: Mapping[str, object], step: int | None = None) -> None:
        log({name: each for name, each in metrics.items() if name != "step"}, trainer.global_step)

    trainer._logger_connector.log_metrics = log_by_step


@contextmanager
def end_with_rank_zero(launcher: object) -> Iterator[None]:
    """Make the system kill the ranks that rank 0 starts in this context when rank 0 ends.

    Gloo and NCCL notice at the next collective, but a rank that waits in the rendezvous waits for
    half an hour.

    Args:
        launcher: Lightning's, of the ranks.
    """
    if is_rank_zero():
        os.environ[RANK_ZERO_PID] = str(os.getpid())  # inherited by the other ranks
    elif sys.platform == "linux" and RANK_ZERO_PID in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl.h
        if os.environ[RANK_ZERO_PID] != str(os.getppid()):  # it has ended already
            os._exit(1)
    try:
        yield
    except BaseException:
        processes = getattr(launcher, "procs", [])
        while processes:
            processes.pop().kill()
        raise
    finally:
        # Lightning kills this process when one of those in its list fails.
        getattr(launcher, "procs", []).clear()
        if is_rank_zero():
            os.environ.pop(RANK_ZERO_PID, None)  # other processes that start here are not ranks


def start_ranks_with(overrides: Sequence[str], composed: str, stack: ExitStack) -> None:
    """Let Lightning start ranks that call `train`, and not the program of the user.

    Args:
        overrides: of the ranks.
        composed: their configuration as YAML.
        stack: undoes it when it closes.
    """
    launchers: Any = import_module("lightning.pytorch.strategies.launchers.subprocess_script")
    program = (
        f"import sys; sys.path = {sys.path}; import minigpt; from minigpt.utils.cli import "
        f"cli_entrypoint; cli_entrypoint(minigpt.train)({[*overrides]})"
    )
    stack.callback(setattr, launchers, "_hydra_subprocess_cmd", launchers._hydra_subprocess_cmd)

    def rank_command(local_rank: int) -> tuple[list[str], None]:
        require(
            "_target_",
            "__main__",
            lambda name: f"_target_: {name}." not in composed,
            "of a module",
            "move it to where the other ranks can import it",
        )
        return [sys.executable, "-c", program], None

    launchers._hydra_subprocess_cmd = rank_command
