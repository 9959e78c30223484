"""Memory and time of a training step on many devices: plain formulas, and counts on torch's meta device.

Ring all-reduce: https://arxiv.org/abs/1802.05799; sharding: https://arxiv.org/abs/2304.11277
"""

from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from minigpt.model import GPT

FLOAT32 = 4  # bytes
BUCKET_BYTES = 25 << 20  # of gradients: the default of DistributedDataParallel
HOP_SECONDS = 5e-6  # latency from a device to the next; assumed


class Sizes:
    """Bytes of a model on the meta device and its optimizer, and the activations and logits of one sequence.

    Args:
        bfloat16: precision is bf16-mixed, not 32-true. Weights, gradients and optimizer state are in float32 in both.
        ema: an average of the weights is held; it counts as optimizer state.
    """

    def __init__(self, model: GPT, optimizer: Optimizer, *, bfloat16: bool, ema: bool = False) -> None:
        config, groups = model.config, optimizer.param_groups
        one, two = (saved_bytes(model, batch, bfloat16=bfloat16) for batch in (1, 2))
        log_probs = FLOAT32 * config.block_size * config.vocab_size
        moments = {p: 1 if group.get("kind") == "muon" else 2 for group in groups for p in group["params"]}
        self.n_layer, self.bfloat16 = config.n_layer, bfloat16
        self.weights = FLOAT32 * model.num_params()
        self.blocks = FLOAT32 * sum(p.numel() for p in model.blocks.parameters())
        self.embeddings = FLOAT32 * config.vocab_size * config.n_embd  # of tokens; the head has as many weights
        self.optimizer = FLOAT32 * sum(n * p.numel() for p, n in moments.items()) + ema * self.weights
        self.activations = two - one - log_probs  # parameters and their copies do not depend on the batch
        self.logits = 3 * log_probs  # log-probabilities, and the gradients of the loss by them and by the logits


@dataclass(frozen=True)
class Parallelism:
    """How a run is spread over devices. Bandwidths are of one direction in bytes per second."""

    strategy: str  # fsdp, diloco, or any other for DDP
    devices: int
    per_node: int
    node_bandwidth: float  # from a device to the others of its node
    network_bandwidth: float  # from a node to the others
    batches: int = 1  # accumulated per step
    compress: bool = False  # this and the others are options of `minigpt.runs.strategies`
    reshard_after_forward: bool = True
    outer_every: int = 20


def step_time(sizes: Sizes, spread: Parallelism, compute: float) -> dict[str, float]:
    """Return the seconds of a step by part, and the bytes `sent` per device; `compute` is seconds per device and step.

    Bytes go around a ring, which an all-reduce passes twice, a gather or reduce-scatter once. DDP sends gradients once
    per step, during the backward pass; one bucket waits for the first gradients, and those of the embeddings are
    complete at its end. FSDP gathers blocks ahead of both passes of every batch and scatters their gradients in
    float32; the weights outside the blocks do not overlap with computation.
    """
    n, batches = spread.devices, spread.batches
    ring, tree = float(n - 1), 2 * log2(n)  # hops: NCCL gathers around rings, and reduces along trees
    if spread.strategy == "fsdp":
        gathers, outside = 1 + spread.reshard_after_forward, batches * 2.0 * (sizes.weights - sizes.blocks)
        size = outside + batches * sizes.blocks * (gathers / (1 + sizes.bfloat16) + 1)
        hops, late, window = ring * batches * (sizes.n_layer * (gathers + 1) + 2), outside / size, compute
    elif spread.strategy == "diloco":
        size, hops, late, window = 2 * sizes.weights / spread.outer_every, tree / spread.outer_every, 1.0, 0.0
    else:
        early = sizes.weights - sizes.embeddings
        buckets = ceil(early / BUCKET_BYTES)
        size, hops = sizes.weights * (1.0 if spread.compress else 2.0), tree * (buckets + 1)
        late = (sizes.embeddings + early / buckets) / sizes.weights  # fraction that does not overlap
        window = compute / batches * 2 / 3 * (1 - 1 / buckets)  # seconds with which the rest overlaps
    sent = (n - 1) / n * size
    bandwidth = spread.node_bandwidth if n <= spread.per_node else spread.network_bandwidth
    communication = sent / bandwidth + hops * HOP_SECONDS
    exposed = late * communication + max(0, (1 - late) * communication - window)
    return {"communication": communication, "exposed": exposed, "step": compute + exposed, "sent": sent}


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
    """Return the bytes of the storages that autograd saves for `batch` sequences; the model is on the meta device."""
    ids = torch.zeros(batch, model.config.block_size, dtype=torch.long, device="meta")
    saved: dict[int, Tensor] = {}  # by storage

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with GPUKernels(bfloat16), saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


class GPUKernels(TorchFunctionMode):
    """Save what a CUDA GPU would: flash attention, and https://docs.pytorch.org/docs/stable/amp.html in bfloat16."""

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
        elif func is F.cross_entropy:
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)
