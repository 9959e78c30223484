"""Exchange objects and checkpoints between the ranks of a training run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree


def gather_objects(mine: Any) -> list[Any]:
    """Return every rank's object, by rank, with tensors on the CPU; all ranks must call it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [mine]
    objects: list[Any] = [None] * distributed.get_world_size()
    mine = pytree.tree_map_only(Tensor, Tensor.cpu, mine)  # else all are unpickled on the GPUs that they come from
    distributed.all_gather_object(objects, mine)
    return objects


def broadcast_checkpoint(read: Callable[[], Any]) -> Any:
    """Read a checkpoint on rank 0 and send it to all ranks, tensor by tensor, so that only its host needs the file."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return read()
    content = read() if distributed.get_rank() == 0 else None
    shapes = [pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), content)]
    distributed.broadcast_object_list(shapes)
    if distributed.get_rank() > 0:
        content = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), shapes[0])
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    for tensor in pytree.tree_leaves(content):
        if isinstance(tensor, Tensor):
            on_device = tensor.reshape(-1).view(torch.uint8).to(device)
            distributed.broadcast(on_device, 0)
            tensor.copy_(on_device.cpu().view(tensor.dtype).view(tensor.shape))
    return content
