"""Memory, communication and time of a training step on many devices: plain formulas, and counts on torch's meta device.

Sources: ring all-reduce, https://arxiv.org/abs/1802.05799; sharding, https://arxiv.org/abs/2304.11277; DiLoCo,
https://arxiv.org/abs/2311.08105.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from minigpt.config import GPTConfig
from minigpt.model import GPT

FLOAT32 = 4  # bytes; of weights, gradients and optimizer state also with precision bf16-mixed
BUCKET_BYTES = 25 << 20  # of gradients: the default of DistributedDataParallel
OUTER_EVERY = 20  # optimizer steps between two all-reduces of DiLoCo: the default of trainer=diloco


@dataclass(frozen=True)
class Sizes:
    """Bytes of a replica; activations and logits are those of one sequence of `block_size` tokens."""

    weights: int
    blocks: int  # the weights inside the `n_layer` blocks
    embeddings: int  # the weights whose gradients are complete only at the end of the backward pass
    n_layer: int
    optimizer: int
    ema: int
    casts: int  # copies of the weights in bfloat16, which autocast makes and autograd saves
    activations: int
    logits: int  # log-probabilities, and the gradients of the loss by them and by the logits


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes. Bandwidths are of one direction in bytes per second, latencies in seconds.

    Latencies are per step inside a node and between nodes, of NCCL's cost model for the protocol Simple:
    https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc
    """

    devices: int
    per_node: int
    node_bandwidth: float  # from a device to the others of its node
    network_bandwidth: float  # from a node to the others
    ring_latency: tuple[float, float] = (3.4e-6, 9.6e-6)
    tree_latency: tuple[float, float] = (28e-6, 50e-6)

    def seconds(self, size: float, calls: int, *, passes: int) -> float:
        """Return the time of sending `size` bytes in `calls` collectives; `passes` as in `ring_bytes`.

        The latency of an all-reduce is that of a ring or of a tree, whichever is lower: NCCL has both.
        """
        nodes = ceil(self.devices / self.per_node)
        bandwidth = self.network_bandwidth if nodes > 1 else self.node_bandwidth
        near, far = self.ring_latency
        latency = passes * ((self.devices - nodes) * near + (nodes - 1) * far)
        if passes == 2:
            near, far = self.tree_latency
            latency = min(latency, 2 * ((self.devices / nodes - 1) * near + (nodes - 1).bit_length() * far))
        return ring_bytes(size, self.devices, passes=passes) / bandwidth + calls * latency


def ring_bytes(size: float, devices: int, *, passes: int) -> float:
    """Return what each device sends: an all-reduce has 2 passes around the ring, a gather or reduce-scatter 1."""
    return passes * (devices - 1) / devices * size


def step_time(
    sizes: Sizes, cluster: Cluster, compute: float, strategy: str, *, batches: int = 1, outer_every: int = OUTER_EVERY
) -> dict[str, float]:
    """Return the seconds of a step by part, and the bytes `sent` per device.

    All-reduces of DDP overlap with the backward pass, except one bucket, which waits for the first gradients, and the
    embeddings, whose gradients are complete at its end. FSDP gathers blocks ahead of both passes.

    Args:
        compute: seconds that a device computes per step; the forward pass is a third of them.
        batches: accumulated per step. DDP sends gradients once per step, FSDP in every batch.
    """
    n, outside = cluster.devices, sizes.weights - sizes.blocks
    forward, backward = compute / batches / 3, compute / batches * 2 / 3
    if n == 1:
        sent = communication = exposed = 0.0
    elif strategy == "fsdp":  # gathers blocks for both passes and the weights outside them once, scatters gradients
        block, rest = cluster.seconds(sizes.blocks, sizes.n_layer, passes=1), cluster.seconds(outside, 1, passes=1)
        sent = batches * ring_bytes(3 * sizes.blocks + 2 * outside, n, passes=1)
        communication = batches * (3 * block + 2 * rest)
        exposed = batches * (2 * rest + max(0, block - forward) + max(0, 2 * block - backward))
    elif strategy == "diloco":
        sent = ring_bytes(sizes.weights, n, passes=2) / outer_every
        communication = exposed = cluster.seconds(sizes.weights, 1, passes=2) / outer_every
    else:
        early = sizes.weights - sizes.embeddings
        buckets = ceil(early / BUCKET_BYTES)
        first, last = cluster.seconds(early, buckets, passes=2), cluster.seconds(sizes.embeddings, 1, passes=2)
        sent, communication = ring_bytes(sizes.weights, n, passes=2), first + last
        exposed = last + max(first / buckets, first - backward * (1 - 1 / buckets))
    parts = {"compute": compute, "communication": communication, "exposed": exposed}
    return parts | {"step": compute + exposed, "sent": sent}


def memory(sizes: Sizes, devices: int, batch: int, strategy: str, *, accumulate: bool = False) -> dict[str, float]:
    """Return the bytes per device by part, and their `peak`; `batch` is sequences per device.

    DDP holds gradients in its buckets. Without it they are freed after each optimizer step, unless several batches
    accumulate, and are made while activations are freed: the peak has the larger of both.
    """
    shards = devices if strategy == "fsdp" else 1
    # FSDP2 holds the weights outside the blocks whole, and of the blocks the current and the next one.
    gathered = sizes.weights - sizes.blocks * max(0, 1 - 2 / sizes.n_layer)
    parts = {
        "weights": sizes.weights / shards,
        "gathered weights": gathered if shards > 1 else 0,
        "gradients": sizes.weights / shards,
        "optimizer state": sizes.optimizer / shards,
        "outer weights and momentum": 2 * sizes.weights if strategy == "diloco" else 0,
        "average of the weights": sizes.ema,
        "weights in bfloat16": sizes.casts,
        "activations": batch * sizes.activations,
        "logits": batch * sizes.logits,
    }
    freed = not accumulate and (strategy == "diloco" or devices == 1)
    shared = min(parts["gradients"], parts["activations"] + parts["logits"]) if freed else 0
    return {name: size for name, size in parts.items() if size} | {"peak": sum(parts.values()) - shared}


def largest_batch(sizes: Sizes, devices: int, strategy: str, limit: float, *, accumulate: bool = False) -> int:
    """Return the most sequences per device whose peak is at most `limit` bytes; 0 if none fits."""

    def peak(batch: int) -> float:
        return memory(sizes, devices, batch, strategy, accumulate=accumulate)["peak"]

    return bisect_right(range(1, 1 + int(limit // (sizes.activations + sizes.logits))), limit, key=peak)


def count_sizes(
    config: GPTConfig, make_optimizer: Callable[[GPT], Optimizer], *, bfloat16: bool, ema: bool = False
) -> Sizes:
    """Count the bytes of a model, its optimizer and its activations, without allocating them.

    Args:
        bfloat16: precision is bf16-mixed, not 32-true.
        ema: an average of the weights is held.
    """
    with torch.device("meta"):
        model = GPT(config).to("meta")
    one, two = (saved_bytes(model, batch, bfloat16=bfloat16) for batch in (1, 2))
    log_probs = FLOAT32 * config.block_size * config.vocab_size
    # Muon holds one momentum per weight, AdamW two moment estimates.
    groups = make_optimizer(model).param_groups
    states = [(1 if group.get("kind") == "muon" else 2, group["params"]) for group in groups]
    late = [model.wte.weight, *([model.wpe.weight] if config.position == "learned" else [])]
    weights = FLOAT32 * model.num_params()
    return Sizes(
        weights=weights,
        blocks=FLOAT32 * sum(p.numel() for p in model.blocks.parameters()),
        embeddings=FLOAT32 * sum(p.numel() for p in late),
        n_layer=config.n_layer,
        optimizer=FLOAT32 * sum(moments * p.numel() for moments, params in states for p in params),
        ema=weights if ema else 0,
        casts=2 * one - two if bfloat16 else 0,  # what does not depend on the batch
        activations=two - one - log_probs,
        logits=3 * log_probs,
    )


def saved_bytes(model: GPT, batch: int, *, bfloat16: bool) -> int:
    """Return the bytes of the storages that autograd saves for `batch` sequences, without parameters and buffers."""
    ids = torch.zeros(batch, model.config.block_size, dtype=torch.long, device="meta")
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # kept alive, so that no other takes its address
        return tensor

    with GPUKernels(bfloat16), saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids)
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


class GPUKernels(TorchFunctionMode):
    """Call functions on meta tensors as a CUDA GPU would: flash attention, fused dropout, autocast to bfloat16.

    Autocast: https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
    """

    def __init__(self, bfloat16: bool) -> None:
        super().__init__()
        self.bfloat16 = bfloat16

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:  # saves queries, keys, values, outputs and log-sum-exp
            q, k, v, _, dropout, causal = args
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(q, k, v, dropout, causal, scale=kwargs["scale"])[0]
        if func is F.dropout:  # saves one byte per element
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        if func is F.rms_norm:  # without a kernel for meta tensors; saves as much as layer_norm
            return torch.layer_norm(args[0].float(), args[1], kwargs["weight"])
        if self.bfloat16 and func is F.linear:
            args = [None if tensor is None else tensor.bfloat16() for tensor in args]
        elif func in (F.cross_entropy, Tensor.square):
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)
