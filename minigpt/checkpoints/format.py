"""What a checkpoint holds, and why loading one runs no code: one safetensors file.

Tensors are stored by dotted name: weights (`model.wte.weight`), optimizer state
(`optimizer.0.state.3.exp_avg`), random state (`rng.0.torch`). Everything else (`contents`, progress
of the Trainer) is one JSON text in the metadata, where `{"$tensor": NAME}` refers to a tensor.
Reading builds tensors and plain containers only: a file cannot execute code. A checksum verifies
it. https://github.com/huggingface/safetensors
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minigpt.checkpoints.find import LAST, PREVIOUS
from minigpt.data.tokenizer import Tokenizer
from minigpt.model.config import GPTConfig
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write, sync

FORMAT = 2
MINIGPT = "minigpt"  # the key of the model, the tokenizer and the run, beside the keys of Lightning
# Of tensor names; of other keys, the key itself.
_PREFIXES = {"state_dict": "", "optimizer_states": "optimizer"}

Saved: TypeAlias = dict[str, Any]  # a checkpoint or a part of it: plain containers and tensors


def contents(model: GPTConfig, tokenizer: Tokenizer, **state: object) -> Saved:
    """Return what a checkpoint holds beside the keys of Lightning.

    Args:
        state: for a checkpoint to resume from: `config`, the resolved configuration as plain
            containers; `corpus_sha256`, of the text; `corpus_provenance`, of its token files;
            `provenance`, the command, host, versions and commit.
    """
    return {
        MINIGPT: {
            "format": FORMAT,
            "model": model.to_dict(),
            "tokenizer": tokenizer.to_dict(),
            **state,
        }
    }


def read(path: Path) -> Saved:
    """Read a checkpoint; raise UserError if it is damaged or another kind of file."""
    with explain_errors(f"{path} is not a complete checkpoint in safetensors format"):
        # mmap would keep a replaced file on disk.
        with safe_open(path, framework="pt", backend="pread") as file:
            metadata = file.metadata() or {}
            tensors = file.get_tensors()
        text = metadata[MINIGPT]
        if metadata.get("crc32") != checksum(text, tensors):
            raise UserError("its checksum is wrong; use an older checkpoint")
        saved = json.loads(text, object_hook=lambda value: _unpack(tensors, value))
        number = saved[MINIGPT].get("format")
        if number != FORMAT:
            raise UserError(
                f"it has format {number}; this version of minigpt reads format {FORMAT}"
            )
        return {**saved, "state_dict": dict(saved["state_dict"])}


def text_settings(path: Path) -> dict[str, str]:
    """Return `field`, `separator` and `folder` of the data group of a checkpoint's run.

    Its tensors are not read. A model without a run has the defaults.
    """
    settings = {"field": "text", "separator": "", "folder": "data"}
    with explain_errors(f"the run config of {path} cannot be read"):
        if path.is_dir():  # of Hugging Face
            return settings
        with safe_open(path, framework="pt", backend="pread") as file:
            saved = json.loads(file.metadata()[MINIGPT])
        data = saved[MINIGPT].get("config", {}).get("data", {})
        return settings | {key: data[key] for key in settings if isinstance(data.get(key), str)}


@contextmanager
def explain_errors(problem: str) -> Iterator[None]:
    """Raise UserError for every error that a file of another program can cause.

    Its message is the problem and the reason.
    """
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{problem}: {kind}{' '.join(str(error).split()):.300}") from error


def write(saved: Mapping[str, object], path: Path, *, keeps_previous: bool = False) -> None:
    """Write a checkpoint atomically.

    Args:
        keeps_previous: the `last` checkpoint of a run that it replaces becomes `previous`.

    Raises:
        UserError: a value is neither a tensor nor plain data.
        OSError: the file cannot be written.
    """
    # Separate the tensors from the rest, which becomes one JSON text.
    tensors: dict[str, Tensor] = {}
    names: dict[object, str] = {}
    text = json.dumps(
        {key: _pack(value, _PREFIXES.get(key, key), tensors, names) for key, value in saved.items()}
    )
    # Write and sync a temporary file; name an error of the disk as Python does.
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        try:
            save_tensors(tensors, unfinished, {MINIGPT: text, "crc32": checksum(text, tensors)})
        except SafetensorError as error:
            code = re.search(r"\(os error (\d+)\)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        if keeps_previous and path.match(LAST) and path.exists():
            hardlink_or_copy(path, path.with_name(Path(PREVIOUS).name))
    sync(path.parent)


def hardlink_or_copy(file: Path, other: Path) -> None:
    """Give a checkpoint a second name; copy it if the file system has no hard links."""
    with atomic_write(other) as unfinished:
        try:
            unfinished.hardlink_to(file)
        except OSError:
            shutil.copyfile(file, unfinished)


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of the JSON text and of the tensors, in order of their names.

    It covers their names, dtypes, shapes and bytes.
    """
    crc = zlib.crc32(text.encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def save_tensors(tensors: dict[str, Tensor], file: Path, metadata: Mapping[str, str] = {}) -> None:
    """Write a safetensors file."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, {"format": "pt", **metadata})
    # save_file ignores the umask: https://github.com/safetensors/safetensors/issues/782
    file.chmod(mode)


def _pack(value: object, name: str, tensors: dict[str, Tensor], names: dict[object, str]) -> object:
    """Convert a value to plain data; collect its tensors on the CPU.

    Their names are kept by memory: tied weights are stored once.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Tensor):
        memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if memory not in names:
            while name in tensors:
                name += "_"
            names[memory] = name
            tensors[name] = value.detach().cpu().contiguous()
        return {"$tensor": names[memory]}
    if isinstance(value, list | tuple):
        packed = [_pack(item, f"{name}.{i}", tensors, names) for i, item in enumerate(value)]
        return packed if isinstance(value, list) else {"$tuple": packed}
    if not isinstance(value, dict) or not all(isinstance(key, str | int) for key in value):
        raise UserError(
            "a checkpoint holds tensors and plain data only; "
            f"{name} is of type {type(value).__name__}"
        )
    items = {
        key: _pack(item, f"{name}.{key}".lstrip("."), tensors, names) for key, item in value.items()
    }
    is_plain = all(isinstance(key, str) and not key.startswith("$") for key in items)
    return items if is_plain else {"$dict": list(items.items())}


def _unpack(tensors: Mapping[str, Tensor], value: Saved) -> object:
    match value:
        case {"$tensor": str(name)}:
            return tensors[name]
        case {"$tuple": list(items)}:
            return tuple(items)
        case {"$dict": list(items)}:
            return dict(items)
    return value
