"""A fake CUDA GPU: its tensors have a shape, a dtype and a device, but no values.

An operation on tensors of two devices raises. The host reads ones. Backward passes need a real GPU.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from minigpt import GPT, GPTConfig

CUDA = torch.device("cuda", 0)
_CUDA, _META = 1, 14  # of c10/core/DeviceType.h


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Make every new tensor a fake one, also of CUDA, on a machine with or without CUDA."""
    (library,) = Path(torch.__file__).with_name("lib").glob("libc10.[sd]*")
    guards = (ctypes.c_void_p * 15).in_dll(ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE")
    missing = guards[_CUDA] is None
    if missing:  # in a torch for the CPU; that of meta tensors does nothing
        guards[_CUDA] = guards[_META]
    # Constants would be copied to a real GPU.
    with patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), _HostReads():
                yield
        finally:
            if missing:
                guards[_CUDA] = None


def model_on_gpu(dtype: torch.dtype = torch.float32, **config: Any) -> GPT:
    """Build a model on the CPU and move it to the fake GPU."""
    with unset_fake_temporarily():
        model = GPT(GPTConfig(**config)).to(dtype)
    model.to(CUDA)
    if model.config.tie_embeddings:  # fake parameters are new objects
        model.lm_head.weight = model.wte.weight
    return model


@contextmanager
def autocast() -> Iterator[None]:
    """Enable autocast for CUDA, which `torch.autocast` does only if there is a GPU."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()  # of fake tensors


class _HostReads(TorchFunctionMode):
    """Read ones from fake tensors; check that copies to the GPU that do not wait for it are from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        if function in (Tensor.tolist, Tensor.item):
            return np.ones(tuple(x.shape), int).tolist()
        if function in (Tensor.__bool__, Tensor.__int__, Tensor.__float__):
            return {"__bool__": True, "__int__": 1, "__float__": 1.0}[function.__name__]
        if function is Tensor.pin_memory:
            self.pinned.append(x)
            return x
        if function is Tensor.to and kwargs and kwargs.get("non_blocking") and not x.is_cuda:
            assert any(x is pinned for pinned in self.pinned)
        return function(*args, **(kwargs or {}))
