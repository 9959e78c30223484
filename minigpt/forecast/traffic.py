"""Communication of a training step on many devices: bytes sent, seconds, and what overlaps with computation.

Source: ring all-reduce, https://arxiv.org/abs/1802.05799
"""

from math import ceil, log2

from minigpt.forecast.memory import Parallelism, Sizes

BUCKET_BYTES = 25 << 20  # of gradients: the default of DistributedDataParallel
HOP_SECONDS = 5e-6  # latency from a device to the next; assumed


def step_time(sizes: Sizes, spread: Parallelism, compute: float) -> dict[str, float]:
    """Return the seconds of a step by part, and the bytes `sent` per device; `compute` is seconds per device and step.

    Bytes go around a ring, which an all-reduce passes twice, a gather or reduce-scatter once. DDP sends gradients once
    per step, during the backward pass; one bucket waits for the first gradients, and those of the embeddings are
    complete at its end. FSDP gathers blocks ahead of both passes of every batch and scatters their gradients in
    float32; the weights outside the blocks do not overlap with computation.
    """
    n, batches = spread.devices, spread.batches
    all_reduced = sizes.weights * (1.0 if spread.compress else 2.0)
    ring, tree = float(n - 1), 2 * log2(n)  # hops: NCCL gathers around rings, and reduces along trees
    if spread.strategy == "fsdp":
        gathers, outside = 1 + spread.reshard_after_forward, batches * 2.0 * (sizes.weights - sizes.blocks)
        size = outside + batches * sizes.blocks * (gathers / (1 + sizes.bfloat16) + 1)
        hops, late, window = ring * batches * (sizes.n_layer * (gathers + 1) + 2), outside / size, compute
    elif spread.strategy == "diloco":
        size, hops, late, window = all_reduced / spread.outer_every, tree / spread.outer_every, 1.0, 0.0
    else:
        early = sizes.weights - sizes.embeddings
        buckets = ceil(early / BUCKET_BYTES)
        size, hops = all_reduced, tree * (buckets + 1)
        late = (sizes.embeddings + early / buckets) / sizes.weights  # fraction that does not overlap
        window = compute / batches * 2 / 3 * (1 - 1 / buckets)  # seconds with which the rest overlaps
    sent = (n - 1) / n * size
    bandwidth = spread.node_bandwidth if n <= spread.per_node else spread.network_bandwidth
    communication = sent / bandwidth + hops * HOP_SECONDS
    exposed = late * communication + max(0, (1 - late) * communication - window)
    return {"communication": communication, "exposed": exposed, "step": compute + exposed, "sent": sent}
