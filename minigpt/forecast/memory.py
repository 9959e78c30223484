"""Memory of a training step per device: bytes counted on torch's meta device, and what each strategy shards.

Source of the sharding: FSDP, https://arxiv.org/abs/2304.11277
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from minigpt.model import GPT

FLOAT32 = 4  # bytes


class Sizes:
    """Bytes of a model on the meta device and its optimizer, and the activations and logits of one sequence.

    Args:
        bfloat16: precision is bf16-mixed, not 32-true. Weights, gradients and optimizer state are in float32 in both.
        ema: an average of the weights is held; it counts as optimizer state.
    """

    def __init__(self, model: GPT, optimizer: Optimizer, *, bfloat16: bool, ema: bool = False) -> None:
        config, groups = model.config, optimizer.param_groups
        one, two = (saved_bytes(model, batch, bfloat16=bfloat16) for batch in (1, 2))
        moments = {p: 1 if group.get("kind") == "muon" else 2 for group in groups for p in group["params"]}
        self.n_layer, self.bfloat16 = config.n_layer, bfloat16
        self.weights = FLOAT32 * model.num_params()
        self.blocks = FLOAT32 * sum(p.numel() for p in model.blocks.parameters())
        self.embeddings = FLOAT32 * config.vocab_size * config.n_embd  # of tokens; the head has as many weights
        self.optimizer = FLOAT32 * sum(n * p.numel() for p, n in moments.items()) + ema * self.weights
        self.activations = two - one  # parameters and their copies do not depend on the batch
        # Log-probabilities, and the gradients of the loss with respect to them and to the logits.
        self.logits = 3 * FLOAT32 * config.block_size * config.vocab_size


@dataclass(frozen=True)
class Parallelism:
    """How a run is spread over devices. Bandwidths are of one direction in bytes per second."""

    strategy: str  # fsdp, diloco, or any other for DDP
    devices: int
    per_node: int
    node_bandwidth: float  # from a device to the others of its node
    network_bandwidth: float  # from a node to the others
    batches: int = 1  # accumulated per step
    compress: bool = False  # this and the others are options of `minigpt.distributed.strategies`
    reshard_after_forward: bool = True
    outer_every: int = 20


def memory(sizes: Sizes, spread: Parallelism, batch: int) -> dict[str, float]:
    """Return the bytes per device by part, and their `peak`; `batch` is sequences per device.

    Weights include the copies in bfloat16 that autocast makes, and what FSDP2 gathers: the weights outside the blocks,
    and the current and the next block. Gradients that neither DDP nor FSDP holds, nor several batches accumulate, are
    made while activations are freed: the peak has the larger of both.
    """
    shards, copies = 1, sizes.bfloat16 * (sizes.blocks + sizes.embeddings) / 2
    if spread.strategy == "fsdp":
        shards, held = spread.devices, min(1, 2 / sizes.n_layer) if spread.reshard_after_forward else 1
        copies = sizes.weights - sizes.blocks + sizes.bfloat16 * sizes.embeddings / 2
        copies += held * sizes.blocks / (1 + sizes.bfloat16)
    outer = 2 * sizes.weights if spread.strategy == "diloco" else 0
    parts = {
        "weights": sizes.weights / shards + copies,
        "gradients": sizes.weights / shards,
        "optimizer state": sizes.optimizer / shards + outer,
        "activations": batch * sizes.activations,
        "logits": batch * sizes.logits,
    }
    freed = spread.batches == 1 and (spread.strategy == "diloco" or spread.devices == 1)
    shared = min(parts["gradients"], parts["activations"] + parts["logits"]) if freed else 0
    return parts | {"peak": sum(parts.values()) - shared}


def saved_bytes(model: GPT, batch: int, *, bfloat16: bool) -> int:
    """Return the bytes of the storages that autograd saves to differentiate the logits of `batch` sequences."""
    ids = torch.zeros(batch, model.config.block_size, dtype=torch.long, device="meta")
    saved: dict[int, Tensor] = {}  # by storage

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with GPUKernels(bfloat16), saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


class GPUKernels(TorchFunctionMode):
    """Save what kernels of a CUDA GPU would: flash attention, and autocast to bfloat16."""

    def __init__(self, bfloat16: bool) -> None:
        super().__init__()
        self.bfloat16 = bfloat16

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:  # saves queries, keys, values, outputs and log-sum-exp
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3], is_causal=True)[0]
        if func is F.rms_norm:  # without a kernel for meta tensors; saves as much as layer_norm
            return torch.layer_norm(args[0].float(), args[1], kwargs["weight"])
        if self.bfloat16 and func is F.linear:
            args = [None if tensor is None else tensor.bfloat16() for tensor in args]
        return func(*args, **kwargs)
