"""Which device and which precision a model trains and samples in. Depends on torch alone."""

from functools import cache

import torch

from minigpt.model.ops import CPU
from minigpt.utils.errors import require

# As Lightning names them.
PRECISIONS = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed", None: "32-true"}


def training_precision(accelerator: str) -> str:
    """Return Lightning's precision for `trainer.precision=auto` and the accelerator of a run."""
    gpu = torch.accelerator.current_accelerator(True) if accelerator != "cpu" else None
    return PRECISIONS[half_dtype(gpu or torch.device("cpu"))]


def find_device(name: str) -> str:
    """Return the device of this name, of "auto" the fastest.

    Raises:
        UserError: this machine does not have it.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    types = [kind for kind, is_available in available.items() if is_available]  # the fastest first
    names = ["auto", *types, *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    require("--device", name, names.__contains__, f"one of {', '.join(names)}")
    return types[0] if name == "auto" else name


@cache
def half_dtype(device: torch.device) -> torch.dtype | None:
    """Return the 16-bit type in which a device multiplies matrices faster than in float32, or None.

    bfloat16 on CUDA GPUs and x86 CPUs with instructions for it; float16 on CUDA GPUs with tensor
    cores for float16 alone, such as T4 and V100.
    """
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return torch.float16 if torch.cuda.get_device_capability(device) >= (7, 0) else None
    has_bfloat16 = device.type == "cpu" and (CPU.get("avx512_bf16") or CPU.get("amx_bf16"))
    return torch.bfloat16 if has_bfloat16 else None
