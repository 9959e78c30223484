"""Which device and which precision a model trains and samples in. Depends on torch alone."""

from functools import cache

import torch

from minigpt.utils.errors import require


def training_precision(accelerator: str) -> str:
    """Return Lightning's precision for `trainer.precision=auto` and the accelerator of a run."""
    gpu = None if accelerator == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    return "bf16-mixed" if has_bfloat16(gpu or torch.device("cpu")) else "32-true"


def find_device(name: str) -> str:
    """Return the device of this name, "auto" being the fastest; raise UserError if this machine does not have it."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    types = [kind for kind, is_available in available.items() if is_available]  # the fastest first
    names = ["auto", *types, *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    require("--device", name, names.__contains__, f"one of {', '.join(names)}")
    return types[0] if name == "auto" else name


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Return whether a CUDA GPU or an x86 CPU has instructions for bfloat16, which is faster there than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    supported = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(supported.get("avx512_bf16") or supported.get("amx_bf16"))
