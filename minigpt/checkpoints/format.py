"""What a checkpoint holds, and why loading one runs no code: one safetensors file of tensors and JSON.

Tensors are stored by dotted name: weights (`model.wte.weight`), optimizer state (`optimizer.0.state.3.exp_avg`),
random state (`rng.0.torch`). Everything else (`contents`, progress of the Trainer) is one JSON text in the
metadata, where `{"$tensor": NAME}` refers to a tensor. Reading builds tensors and plain containers only: a file
cannot execute code. A checksum verifies it. https://github.com/huggingface/safetensors
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
_PREFIXES = {
    "state_dict": "",
    "optimizer_states": "optimizer",
}  # of tensor names; of other keys, the key itself


def contents(model: GPTConfig, tokenizer: Tokenizer, **run: Any) -> dict[str, Any]:
    """Return what a checkpoint holds beside the keys of Lightning.

    Args:
        run: for a checkpoint to resume from: `config`, the resolved configuration as plain containers; `corpus_sha256`,
            of the text; `corpus_provenance`, of its token files; `provenance`, the command, host, versions and commit.
    """
    return {
        MINIGPT: {
            "format": FORMAT,
            "model": model.to_dict(),
            "tokenizer": tokenizer.to_dict(),
            **run,
        }
    }


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint as plain containers and tensors; raise UserError if it is damaged or another kind of file."""
    with explain_errors(f"{path} is not a complete checkpoint in safetensors format"):
        with safe_open(
            path, framework="pt", backend="pread"
        ) as file:  # mmap would keep a replaced file on disk
            metadata, tensors = file.metadata() or {}, file.get_tensors()
        text = metadata[MINIGPT]
        if metadata.get("crc32") != checksum(text, tensors):
            raise UserError("its checksum is wrong; use an older checkpoint")
        content = json.loads(text, object_hook=lambda value: _unpack(tensors, value))
        if (number := content[MINIGPT].get("format")) != FORMAT:
            raise UserError(
                f"it has format {number}; this version of minigpt reads format {FORMAT}"
            )
        return {**content, "state_dict": dict(content["state_dict"])}


def text_settings(path: Path) -> dict[str, str]:
    """Return `field`, `separator` and `folder` of the data group of a checkpoint's run, without reading its tensors.

    A model without a run has the defaults.
    """
    settings = {"field": "text", "separator": "", "folder": "data"}
    with explain_errors(f"the run config of {path} cannot be read"):
        if path.is_dir():  # of Hugging Face
            return settings
        with safe_open(path, framework="pt", backend="pread") as file:
            data = json.loads(file.metadata()[MINIGPT])[MINIGPT].get("config", {}).get("data", {})
        given = {key: data[key] for key in settings if isinstance(data.get(key), str)}
    return settings | given


@contextmanager
def explain_errors(problem: str) -> Iterator[None]:
    """Raise UserError with the problem and its reason for everything that a file of another program can cause."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{problem}: {kind}{' '.join(str(error).split()):.300}") from error


def write(content: Mapping[str, Any], path: Path, *, keeps_previous: bool = False) -> None:
    """Write a checkpoint atomically.

    Args:
        keeps_previous: the `last` checkpoint of a run that it replaces becomes `previous`.

    Raises:
        UserError: the content has values other than tensors and plain data.
        OSError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}
    text = json.dumps(
        {
            key: _pack(value, _PREFIXES.get(key, key), tensors, names)
            for key, value in content.items()
        }
    )
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        try:
            save_tensors(tensors, unfinished, {MINIGPT: text, "crc32": checksum(text, tensors)})
        except SafetensorError as error:
            if code := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
            raise
        with open(unfinished, "rb+") as saved:
            os.fsync(saved.fileno())
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
    """Return the CRC-32 of the JSON text and of the name, dtype, shape and bytes of each tensor, in order of names."""
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
    file.chmod(
        mode
    )  # save_file ignores the umask: https://github.com/safetensors/safetensors/issues/782


def _pack(value: Any, name: str, tensors: dict[str, Tensor], names: dict[Any, str]) -> Any:
    """Convert a value to plain data; collect tensors, and their names by memory: tied weights are stored once."""
    match value:
        case Tensor():
            memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            if memory not in names:
                while name in tensors:
                    name += "_"
                names[memory], tensors[name] = name, value.detach()
            return {"$tensor": names[memory]}
        case dict() if all(isinstance(key, str | int) for key in value):
            items = {
                key: _pack(item, f"{name}.{key}".lstrip("."), tensors, names)
                for key, item in value.items()
            }
            plain = all(isinstance(key, str) and not key.startswith("$") for key in items)
            return items if plain else {"$dict": list(items.items())}
        case list() | tuple():
            packed = [_pack(item, f"{name}.{i}", tensors, names) for i, item in enumerate(value)]
            return packed if isinstance(value, list) else {"$tuple": packed}
        case None | str() | int() | float():
            return value
    raise UserError(
        f"a checkpoint holds tensors and plain data only; {name} is of type {type(value).__name__}"
    )


def _unpack(tensors: Mapping[str, Tensor], value: dict[str, Any]) -> Any:
    match value:
        case {"$tensor": str(name)}:
            return tensors[name]
        case {"$tuple": list(items)}:
            return tuple(items)
        case {"$dict": list(items)}:
            return dict(items)
    return value
