"""The archives that `torch.save` writes, read as far as they are plain data and no further.

An archive is a zip file of unpacked records: a pickle, and the numbers of every tensor. Of pickle's instructions this
knows those that dictionaries, lists, texts, numbers and tensors need, and refuses a file with any other. So nothing
that a file names is looked up, a tensor has the numbers that are there, and time and memory go with the file's size.
"""

import pickletools
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_MOST = 1 << 18  # instructions: five times those of GPT-2 XL with its optimizer
_DEEPEST = 64  # containers in containers
_SHARED = 8  # values of a tuple that may be used again, as two groups of weights have the same betas
_DIMENSIONS = 8  # of a tensor
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
_PLAIN = {dict, list, tuple, str, int, float, bool, type(None), Tensor}
_DICT, _TENSOR = "collections OrderedDict", "torch._utils _rebuild_tensor_v2"


class Refused(Exception):
    """The archive holds more than plain data."""


class Damaged(Exception):
    """A record is not what was written: its checksum is another."""


@dataclass(frozen=True)
class _Name:
    """What a pickle calls by its name."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """The numbers of one or several tensors, (N,)."""

    numbers: Tensor


def load(path: Path, *, device: str | torch.device = "cpu") -> Any:
    """What was saved: dictionaries, lists, tuples, texts, numbers, and tensors, which come to a device.

    Raises:
        Refused: it holds something else, or more than its size.
        Damaged: a checksum is wrong.
        ValueError, LookupError, EOFError, BadZipFile …: it is no such archive.
    """
    with zipfile.ZipFile(path) as archive:
        return _Archive(archive, path.stat().st_size, device).content()


class _Archive:
    """An open archive: its records, and the storages that were read."""

    def __init__(self, archive: zipfile.ZipFile, size: int, device: str | torch.device) -> None:
        self.archive, self.device = archive, device
        self.storages: dict[str, Tensor] = {}
        records = archive.infolist()
        packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
        if packed or sum(record.file_size for record in records) > size:
            raise Refused("it unpacks to more than it is")
        self.records = {record.filename: record for record in records}
        pickles = [name for name in self.records if name.endswith("/data.pkl")]
        if len(pickles) != 1 or len(self.records) < len(records):
            raise ValueError("it has not one pickle, and every other record once")
        self.folder = pickles[0].removesuffix("data.pkl")
        if f"{self.folder}byteorder" in self.records and self.record("byteorder").decode() != sys.byteorder:
            raise Refused("its numbers have another order of bytes")

    def content(self) -> Any:
        """What the pickle builds."""
        content = self._run(self.record("data.pkl"))
        _check_plain(content)
        return content

    def record(self, name: str) -> bytes:
        """The content of a record, once its checksum was found right."""
        record = self.records[self.folder + name]
        try:
            content = self.archive.read(record)
        except zipfile.BadZipFile as error:
            if "CRC" in str(error):
                raise Damaged(record.filename) from error
            raise
        if len(content) != record.file_size:
            raise EOFError(f"{record.filename} is cut short")
        return content

    def _run(self, pickle: bytes) -> Any:
        """Carry out the instructions of a pickle, of which each puts a value on the stack or changes the last ones."""
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: dict[int, Any] = {}
        value: Any
        for number, (instruction, value, _) in enumerate(pickletools.genops(pickle)):
            if number == _MOST:
                raise Refused(f"its pickle has more than {_MOST:,} instructions")
            match instruction.name:
                case "PROTO":
                    pass
                case "NONE" | "NEWTRUE" | "NEWFALSE":
                    stack.append(_CONSTANTS[instruction.name])
                case "BININT" | "BININT1" | "BININT2" | "BINFLOAT" | "BINUNICODE":
                    stack.append(value)
                case "LONG1" if value.bit_length() < 64:
                    stack.append(value)
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_TUPLE":
                    stack.append(())
                case "MARK":
                    marks.append(stack)
                    stack = []
                case "TUPLE":
                    items, stack = stack, marks.pop()
                    stack.append(tuple(items))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    items = [stack.pop() for _ in range(int(instruction.name[-1]))]
                    stack.append(tuple(reversed(items)))
                case "APPEND":
                    item = stack.pop()
                    _a(list, stack[-1]).append(item)
                case "APPENDS":
                    items, stack = stack, marks.pop()
                    _a(list, stack[-1]).extend(items)
                case "SETITEM":
                    item, key = stack.pop(), stack.pop()
                    _put(stack[-1], [key, item])
                case "SETITEMS":
                    items, stack = stack, marks.pop()
                    _put(stack[-1], items)
                case "BINPUT" | "LONG_BINPUT":
                    memo[value] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(_again(memo[value]))
                case "GLOBAL":
                    stack.append(_Name(value))
                case "BINPERSID":
                    stack.append(self._storage(stack.pop()))
                case "REDUCE":
                    arguments, name = stack.pop(), stack.pop()
                    stack.append(_called(_a(_Name, name).name, _a(tuple, arguments)))
                case "BUILD":  # versions of modules, which torch hangs on a dictionary of weights
                    if _a(dict, stack.pop()).keys() != {"_metadata"}:
                        raise Refused("attributes of an object")
                case "STOP":
                    (content,) = stack
                    return content
                case other:
                    raise Refused(f"pickle's {other}")
        raise EOFError("the pickle has no end")

    def _storage(self, described: Any) -> _Storage:
        """The numbers that ("storage", kind, record, device, count) stands for."""
        match described:
            case ("storage", _Name(kind), str(key), str(), int(count)) if kind in _STORAGES:
                dtype = _STORAGES[kind]
            case _:
                raise Refused("something else than the numbers of a tensor beside its pickle")
        if key not in self.storages:
            content = bytearray(self.record(f"data/{key}"))
            numbers = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
            self.storages[key] = numbers.to(self.device)
        if self.storages[key].numel() != count or self.storages[key].dtype != dtype:
            raise ValueError(f"its record {key} has not {count} numbers of {dtype}")
        return _Storage(self.storages[key])


def _called(name: str, arguments: tuple[Any, ...]) -> Any:
    """What the two functions return that the pickle of plain data calls."""
    if name == _DICT and not arguments:
        return {}
    if name != _TENSOR:
        raise Refused(name)
    storage, offset, size, stride = arguments[:4]
    numbers = _a(_Storage, storage).numbers
    if min(_a(int, value) for value in (offset, *_a(tuple, size), *_a(tuple, stride))) < 0 or len(size) > _DIMENSIONS:
        raise ValueError("sizes that no tensor has")
    # Whoever asks a tensor for its size makes room for it, so none is larger than what is there.
    if prod(size) > numbers.numel():
        raise Refused("a tensor that is larger than its numbers")
    return numbers.as_strided(size, stride, offset)  # which looks at the bounds


def _a(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where {kind.__name__} is meant")
    return value


def _put(target: Any, items: list[Any]) -> None:
    """Keys and values in turn. A key is a text or a small number, for to hash a tuple can take forever."""
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int):
            raise Refused(f"{type(key).__name__} as a key")
        _a(dict, target)[key] = value


def _again(value: Any) -> Any:
    """A value that is used again. What holds others is not, for ten that hold the one before twice are a thousand."""
    small = isinstance(value, tuple) and len(value) <= _SHARED and not any(map(_children, value))
    if isinstance(value, dict | list | tuple) and not small:
        raise Refused("a container in two places")
    return value


def _check_plain(content: Any) -> None:
    """Raises Refused for other values, and containers that lie too deep to be printed or compared."""
    level = [content]
    for _ in range(_DEEPEST):
        if not {type(value) for value in level} <= _PLAIN:
            raise Refused("a value of another kind")
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise Refused(f"more than {_DEEPEST} containers in one another")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
