"""Run a model in evaluation mode and without compiled code, also in several threads at once.

Depends on torch alone.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

# How many evaluations run: of each module that was in training mode before, and of all by None.
_EVALUATIONS = Counter[nn.Module | None]()
_SETTINGS = ExitStack()  # restores the settings of the process
_LOCK = threading.Lock()


@contextmanager
def evaluation(model: nn.Module | None = None) -> Iterator[None]:
    """Run a model in evaluation mode, and without cuDNN's attention, which plans for every length.

    Evaluations of one model may overlap, in several threads and any order: the last one restores
    the modes and the settings. These are of all threads, so another thread must not train the same
    model meanwhile, or call its `train()` or `eval()`; it may train another model.
    """
    modules = [] if model is None else list(model.modules())
    # The first evaluation sets the modes and the settings.
    with _LOCK:
        in_training = [m for m in modules if m.training or m in _EVALUATIONS]
        # cuDNN plans the attention of each shape: on an H200, a step of GPT-2 took 46 ms at a new
        # length, else 3 ms.
        if not _EVALUATIONS[None] and torch.backends.cuda.cudnn_sdp_enabled():
            _SETTINGS.callback(torch.backends.cuda.enable_cudnn_sdp, True)
            torch.backends.cuda.enable_cudnn_sdp(False)
        _EVALUATIONS.update([None, *in_training])
        for module in in_training:
            module.training = False
    try:
        with uncompiled():
            yield
    finally:
        # The last evaluation restores them.
        with _LOCK:
            _EVALUATIONS.subtract([None, *in_training])
            for module in in_training:
                module.training = not _EVALUATIONS[module]
                if module.training:
                    del _EVALUATIONS[module]
            if not _EVALUATIONS[None]:
                _SETTINGS.close()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Call compiled modules and functions without their compiled code, in this thread alone.

    `torch.compiler.set_stance` acts on all threads. So the private object that holds torch's stance
    is replaced, once, by one that is "force_eager" in the threads within this context. Where torch
    has no such object, compiled code runs, which is right too.
    """
    stance: Any = _Stance(None)  # of no effect
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler:  # else nothing is compiled
        with _LOCK:
            stance = getattr(compiler, "_stance", None)
            if not isinstance(stance, _Stance):
                stance = vars(compiler)["_stance"] = _Stance(stance)
    stance.depth += 1
    try:
        yield
    finally:
        stance.depth -= 1


class _Stance(threading.local):
    """A stance of torch's compiler that is `force_eager` in threads that call `uncompiled`."""

    depth = 0  # of the calls of this thread

    def __init__(self, of_process: object) -> None:
        self.of_process = of_process

    def __getattr__(self, name: str) -> object:
        return "force_eager" if name == "stance" and self.depth else getattr(self.of_process, name)
