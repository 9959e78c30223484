"""Write one checkpoint file from all ranks at once: each writes its rows of every tensor at their place in the file.

No rank holds what the others do. The file system must be one that all ranks share.
"""

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from minigpt.checkpoints.format import MINIGPT, checksum, pack, replace_checkpoint

# https://github.com/huggingface/safetensors#format
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_parallel(content: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint as `format.write` does; all ranks must call it.

    Args:
        content: with DTensors sharded by rows, as in FSDP2; other tensors and values are those of rank 0.

    Raises:
        OSError: the file cannot be written, or is not on a file system that all ranks share.
    """
    text, tensors = pack(content)
    rank = distributed.get_rank()
    with replace_checkpoint(path) if rank == 0 else nullcontext(path) as unfinished:
        sent: list[Any] = [None]
        if rank == 0:
            header, offsets = _header(tensors, text, crc="0" * 8)
            unfinished.write_bytes(header)
            sent = [(str(unfinished), len(header), offsets)]
        distributed.broadcast_object_list(sent)
        name, start, offsets = sent[0]
        with open(name, "rb+") as file:
            for key, offset in offsets.items():
                if rank == 0 or isinstance(tensors[key], DTensor):
                    rows, before = _own_rows(tensors[key], rank)
                    file.seek(start + offset + before)
                    file.write(rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        distributed.barrier()
        if rank == 0:
            with safe_open(unfinished, framework="pt") as written:  # one tensor at a time
                crc = checksum(text, ((key, written.get_tensor(key)) for key in sorted(written.keys())))
            with open(unfinished, "rb+") as file:
                file.write(_header(tensors, text, crc=crc)[0])
                os.fsync(file.fileno())


def _header(tensors: Mapping[str, Tensor], text: str, *, crc: str) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of the file, and the offset of each tensor after them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", MINIGPT: text, "crc32": crc}}
    offsets, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # aligned
        offsets[name], end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, offsets


def _own_rows(tensor: Tensor, rank: int) -> tuple[Tensor, int]:
    """Return the rows of this rank, and the number of bytes before them; FSDP2 splits as torch.chunk."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    share = -(-tensor.size(0) // tensor.device_mesh.size())
    before = min(rank * share, tensor.size(0)) * (tensor.numel() // max(1, tensor.size(0))) * tensor.element_size()
    return tensor.to_local().detach(), before
