"""Hostile and mutated files are refused with one line, in bounded time, and execute nothing."""

import io
import json
import math
import select
import socketserver
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from models import make_model
from refusals import refused
from safetensors.torch import save
from small_runs import SCRIPTS
from torch import Tensor

from minigpt.checkpoints.format import checksum, contents, write
from minigpt.checkpoints.load import load_checkpoint
from minigpt.data.tokenizer import BPETokenizer, CharTokenizer
from minigpt.extras.corpora.run_corpus import validation_batches

ALPHABET = "\n abcdeé€😀"
MEMORY = 300 << 20  # per file, beyond the imports
SECONDS = 5  # of CPU time
WORDS = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
CHARMAP = {"type": "Precompiled", "precompiled_charsmap": ""}
BPE = BPETokenizer("bpe", [bytes([i]) for i in range(256)], {"<|endoftext|>": 256}).to_dict()
SIZE = (len(ALPHABET), 16)  # of the embedding
HUGE = 10**15
HOLDERS = [{"_target_": "os.system"}, {"$tensor": "model.wte.weight"}]
INCOMPLETE = "is not a complete checkpoint in safetensors format: "
MODEL = "does not hold a model"


def good() -> dict[str, Any]:
    model = make_model(std=None, block_size=8, vocab_size=len(ALPHABET))
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    made_by = {"config": {"seed": 7}, "corpus_sha256": "ab12"}
    return {"state_dict": weights, **contents(model.config, CharTokenizer(ALPHABET), **made_by)}


def file(text: str, tensors: dict[str, Tensor], **metadata: str) -> bytes:
    written = {"format": "pt", "minigpt": text, "crc32": checksum(text, tensors)}
    return save(tensors, written | metadata)


def changed(*path: str, value: Any = None, beside: str = "0", **metadata: str) -> bytes:
    """Return a good file in which the value at a path of keys is another.

    Args:
        value: `...` removes it, and a tensor is stored.
        beside: JSON of one more value.
    """
    content = good()
    tensors = dict(content["state_dict"])
    del tensors["model.lm_head.weight"]  # they are tied
    content["state_dict"] = {name: {"$tensor": name} for name in tensors}
    content["state_dict"]["model.lm_head.weight"] = {"$tensor": "model.wte.weight"}
    if isinstance(value, Tensor):
        tensors[path[-1]] = value
        value = {"$tensor": path[-1]}
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    elif path:
        place[path[-1]] = value
    return file(f'{json.dumps(content)[:-1]}, "beside": {beside}}}', tensors, **metadata)


def tokenizer(values: Any) -> bytes:
    return changed("minigpt", "tokenizer", value=values)


def tokenizer_json(separator: int | None = None, **changes: Any) -> bytes:
    content = {"version": "1.0", "decoder": {"type": "Fuse"}, "model": WORDS} | changes
    return tokenizer({"name": "huggingface", "json": json.dumps(content), "separator": separator})


def weight(value: Any, name: str = "model.wte.weight") -> bytes:
    return changed("state_dict", name, value=value)


def header(written: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(written) if length is None else length).to_bytes(8, "little") + written + data


class Executed:
    """An object that unpickles as a function call."""

    def __reduce__(self) -> Any:
        return exec, ("open('canary', 'w')",)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def hostile_files() -> Iterator[tuple[str, str, bytes]]:
    # Yield the name of a file, a part of its error (empty if it is harmless), and its content
    pickled = io.BytesIO()
    bomb = io.BytesIO()
    torch.save(good() | {"x": Executed()}, pickled)
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 26))
    yield "a checkpoint of torch.save", INCOMPLETE, pickled.getvalue()
    yield "a zip bomb", INCOMPLETE, bomb.getvalue()
    yield "an empty file", INCOMPLETE, b""
    yield "a header beyond the file", INCOMPLETE, header(b"{}", length=1000)
    yield "a header of 100 MB of a good file", INCOMPLETE, header(changed()[8:].ljust(100 << 20))
    yield "a header of nested lists", INCOMPLETE, header(nested(100_000).encode())
    huge = {"x": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 8]}}
    yield "a tensor of 10^15 numbers", INCOMPLETE, header(json.dumps(huge).encode(), bytes(8))
    yield "a tensor of 10^15 rows of nothing", "", changed("x", value=torch.empty(0, HUGE))
    tensors = {f"{i}": torch.empty(0) for i in range(10_000)}
    yield "ten thousand tensors", INCOMPLETE, file("{}", tensors)
    yield "a wrong checksum", "its checksum is wrong", changed(crc32="00000000")
    yield "a good file", "", changed()
    calls = {"_target_": "os.system", "a": "touch canary", "b": "${oc.env:HOME}"}
    yield "a configuration that calls", "", changed("config", value=calls)
    yield from hostile_json()
    yield from impossible_models()
    yield from hostile_tokenizers()

    yield "missing weights", MODEL, changed("state_dict", "model.wpe.weight", value=...)
    nan = weight(torch.full((8, 16), math.nan), "model.wpe.weight")
    yield "weights NaN", "its weights are NaN or infinite", nan
    yield "weights of another size", MODEL, weight(torch.tensor(1.0))
    yield "weights that are a text", MODEL, weight("x")
    yield "unexpected weights", MODEL, weight(torch.ones(2), "model.__class__")
    yield "complex weights", "'ComplexFloat'", weight(torch.ones(*SIZE, dtype=torch.complex64))
    yield "weights of 16 bits", "", weight(torch.ones(*SIZE, dtype=torch.float16))


def hostile_json() -> Iterator[tuple[str, str, bytes]]:
    for text in ("", '{"minigpt": {}}'):
        yield f"JSON that is {text!r}", INCOMPLETE, file(text, {"x": torch.ones(2)})
    values = {
        INCOMPLETE: {
            "100,000 nested lists": nested(100_000),
            "1000 nested tuples": '{"$tuple":[' * 1000 + "]}" * 1000,
            "an integer of a million digits": "9" * 1_000_000,
            "a tensor that is missing": '{"$tensor": "x"}',
            "a key that is a list": '{"$dict": [[[], 1]]}',
        },
        "": {
            "100,000 lists": f"[{'[],' * 100_000}[]]",
            "a number beyond floats": "1e999",
            "an integer of 4000 digits": "9" * 4000,
            "no marker": '{"$class": "os"}',
        },
    }
    for error, named in values.items():
        for name, value in named.items():
            yield name, error, changed(beside=value)
    yield "a list of weights", INCOMPLETE, changed("state_dict", value=["x"])
    yield "weights that are a tensor", INCOMPLETE, changed("state_dict", value=torch.ones(2))


def impossible_models() -> Iterator[tuple[str, str, bytes]]:
    yield "no format", "has format None", changed("minigpt", "format", value=...)
    yield "no model", MODEL, changed("minigpt", "model", value=...)
    yield "no tokenizer", MODEL, changed("minigpt", "tokenizer", value=...)
    values: dict[str, list[Any]] = {
        "n_layer": [10**4000, 40_000, "${oc.env:HOME}", *HOLDERS],
        "block_size": [1 << 60, 1 << 20],
        "head_dim": [1 << 20],
        "n_inner": [1 << 62],
        "vocab_size": [1 << 62, 3],
        "dropout": [math.nan],
        "smear": [60_000],
        "norm": ["__import__('os').system('true')", "x" * 1_000_000],
        "__class__": ["x"],
    }
    # A table of a million positions
    claims: list[dict[str, Any]] = [{"position": "rope", "block_size": 1 << 20, "head_dim": 1024}]
    for name, claimed in values.items():
        claims += [{name: claim} for claim in claimed]
    settings = good()["minigpt"]["model"]
    for claim in claims:
        yield f"{claim!r:.60}", MODEL, changed("minigpt", "model", value=settings | claim)


def hostile_tokenizers() -> Iterator[tuple[str, str, bytes]]:
    described = {
        "of another size": {"name": "byte"},
        "that is a function": {"name": {"_target_": "os.system"}},
        "with a regular expression": BPE | {"pattern": "(a+)+$"},
        "of an unknown encoding": BPE | {"name": "(a+)+$"},
        "with a huge end of text": BPE | {"special": {"<|endoftext|>": 1 << 62}},
        "with an end of text that is another token": BPE | {"special": {"<|endoftext|>": 3}},
        "with a token twice": BPE | {"tokens": BPE["tokens"] + " AA=="},
        "of tokens that are not base64": BPE | {"tokens": "\x1b]0;x\x07 é"},
        "of a list of tokens": BPE | {"tokens": ["AA=="]},
        "of a million spaces": BPE | {"tokens": " " * 1_000_000},
        "with a character twice": {"name": "char", "alphabet": "aa"},
        "with a list of characters": {"name": "char", "alphabet": ["a", "b"]},
    }
    for name, values in described.items():
        yield f"a tokenizer {name}", MODEL, tokenizer(values)
    yield "a tokenizer.json", "", tokenizer_json()
    yield "a tokenizer.json without a model", MODEL, tokenizer_json(model={})
    last_id = tokenizer_json(model=WORDS | {"vocab": {"a": (1 << 32) - 1}})
    yield "a tokenizer.json with a huge id", MODEL, last_id
    yield "a tokenizer.json that panics", MODEL, tokenizer_json(normalizer=CHARMAP)
    yield "a separator that is no id", MODEL, tokenizer_json(separator=9)


CHILD = """
import contextlib, io, json, resource, runpy, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
memory, script, good, *files = sys.argv[1:]
for index, file in enumerate([good, *files]):
    options = []
    if script.endswith("sample.py"):
        options = ["--max-new-tokens", "2"]
    sys.argv = [script, file, "--prompt", "aa", *options]
    began, code, out, err = time.process_time(), 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    if index:
        print(json.dumps([code, err.getvalue(), time.process_time() - began]), flush=True)
    else:  # everything is imported by now
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + int(memory)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the size of a process")
@pytest.mark.parametrize(
    "script", ["sample.py", pytest.param("attention.py", marks=pytest.mark.slow)]
)
def test_a_script_rejects_hostile_files_with_one_line(
    script: str, launch: Callable[..., Any], tmp_path: Path
):
    # It takes limited memory and CPU time per file, and samples from harmless files
    found = list(hostile_files())
    if script == "attention.py":  # reads them with the same function: one file per error
        found = list({error: (name, error, content) for name, error, content in found}.values())
    for number, (_, _, content) in enumerate([*found, ("", "", changed())]):
        (tmp_path / f"{number}.safetensors").write_bytes(content)
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    *files, intact = (f"{number}.safetensors" for number in range(len(found) + 1))
    done = launch(
        f"{tmp_path}/child.py",
        str(MEMORY),
        str(SCRIPTS / script),
        intact,
        *files,
        cwd=tmp_path,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    ended = (done.returncode, done.stderr[-2000:])
    assert len(results) == len(files), (found[len(results)][0], *ended)
    for (name, error, _), (code, stderr, seconds) in zip(found, results, strict=True):
        assert seconds < SECONDS, name
        assert code == (2 if error else 0), (name, stderr)
        if error:
            line = stderr.removesuffix("\n")
            assert line.startswith("error: "), (name, stderr)
            assert error in line, (name, stderr)
            assert line.isprintable(), (name, stderr)
            assert len(line) < 2000, (name, stderr)
            assert stderr == f"{line}\n", (name, stderr)
    assert not (tmp_path / "canary").exists()


def test_a_configuration_inside_a_checkpoint_is_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # No `_target_` is called, the server that it names gets no request, and no file is written
    monkeypatch.chdir(tmp_path)
    content = good()
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/evil.txt"
        called = {"_target_": "os.system", "name": "touch canary"}
        data = called | {"source": "download", "name": "../evil", "url": url, "field": "text"}
        data |= {"folder": f"{tmp_path}/data", "path": "touch canary", "val_path": None}
        data |= {"sha256": "${oc.env:HOME}", "characters": 9, "split": "fraction"}
        data |= {"val_fraction": 0.1}
        for bins, error in ((None, "are not in"), (url, "is not a file"), ([url], "is not a file")):
            named = data | {"train_bin": bins, "val_bin": bins}
            content["minigpt"]["config"] = {"data": named, "tokenizer": called}
            checkpoint = tmp_path / "a.safetensors"
            write(content, checkpoint)
            refused(error, validation_batches, checkpoint, load_checkpoint(checkpoint)[0])
        assert not select.select([server], [], [], 0)[0]
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("inputs", [500, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_accepts_a_mutated_input_or_refuses_it_with_one_line(name: str, inputs: int):
    counts = fuzz.fuzz(name, int(inputs * fuzz.READERS[name][0]), seed=1)
    assert min(counts["accepted"], counts["refused"]) > 0
