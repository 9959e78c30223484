"""Hostile checkpoint files are rejected with one line, in bounded time and memory, and execute nothing."""

import io
import json
import math
import select
import socketserver
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from small_runs import SCRIPTS
from torch import Tensor

from minigpt.checkpoints.format import checksum, write
from minigpt.checkpoints.load import contents, load_checkpoint
from minigpt.checkpoints.validation_split import validation_batches
from minigpt.config import GPTConfig
from minigpt.data.tokenizer import BPETokenizer, CharTokenizer
from minigpt.model import GPT
from minigpt.utils.cli import UserError

ALPHABET = "\n abcdeé€😀"
MEMORY, SECONDS = 300 << 20, 5  # per file, beyond the imports
WORDS, CHARMAP = {"type": "BPE", "vocab": {"a": 0}, "merges": []}, {"type": "Precompiled", "precompiled_charsmap": ""}
BPE = BPETokenizer("bpe", [bytes([i]) for i in range(256)], {"<|endoftext|>": 256}).to_dict()
SIZE = (len(ALPHABET), 16)  # of the embedding
HUGE = 10**15


def good() -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=len(ALPHABET), n_layer=2, n_head=2, n_embd=16))
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {
        "state_dict": weights,
        **contents(model.config, CharTokenizer(ALPHABET), config={"seed": 7}, corpus_sha256="ab12"),
    }


def file(values: Any, tensors: dict[str, Tensor], **metadata: str) -> bytes:
    """Return a safetensors file with a correct checksum; `values` is the JSON text, or its parsed values."""
    text = values if isinstance(values, str) else json.dumps(values)
    return save(tensors, {"format": "pt", "minigpt": text, "crc32": checksum(text, tensors)} | metadata)


def changed(*path: str, value: Any = None, **metadata: str) -> bytes:
    """Return a good file in which the value at a path of keys is another; `...` removes it, and a tensor is stored."""
    content = good()
    weights = content["state_dict"] | {"model.lm_head.weight": torch.empty(0)}
    tensors = {name: weight for name, weight in weights.items() if weight.numel()}
    content["state_dict"] = {name: {"$tensor": name} for name in tensors}
    content["state_dict"]["model.lm_head.weight"] = {"$tensor": "model.wte.weight"}  # they are tied
    if isinstance(value, Tensor):
        tensors[path[-1]], value = value, {"$tensor": path[-1]}
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    elif path:
        place[path[-1]] = value
    return file(content, tensors, **metadata)


def beside(json_text: str) -> bytes:
    """Return a good file with one more value, as JSON."""
    marked = changed("x", value="PLACE")
    start = int.from_bytes(marked[:8], "little") + 8
    inner = json.loads(marked[8:start])["__metadata__"]["minigpt"].replace('"PLACE"', json_text)
    weights = good()["state_dict"]
    return file(inner, {name: weight for name, weight in weights.items() if name != "model.lm_head.weight"})


def model(**claims: Any) -> bytes:
    return changed("minigpt", "model", value=good()["minigpt"]["model"] | claims)


def tokenizer(values: Any) -> bytes:
    return changed("minigpt", "tokenizer", value=values)


def tokenizer_json(separator: int | None = None, **changes: Any) -> bytes:
    """Return a file with a tokenizer of Hugging Face with one id; changes are of the keys of tokenizer.json."""
    content = {"version": "1.0", "decoder": {"type": "Fuse"}, "model": WORDS} | changes
    return tokenizer({"name": "huggingface", "json": json.dumps(content), "separator": separator})


def weight(value: Any, name: str = "model.wte.weight") -> bytes:
    return changed("state_dict", name, value=value)


def header(content: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file with the given header: bytes, or values to encode as JSON."""
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(written) if length is None else length).to_bytes(8, "little") + written + data


class Executed:
    """An object that unpickles as a function call."""

    def __reduce__(self) -> Any:
        return exec, ("open('canary', 'w')",)


def torch_saved() -> bytes:
    saved = io.BytesIO()
    torch.save(good() | {"x": Executed()}, saved)
    return saved.getvalue()


def zip_bomb() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 26))
    return packed.getvalue()


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


INCOMPLETE, DAMAGED = "is not a complete checkpoint in safetensors format: ", "its checksum is wrong"
MODEL, NOT_FINITE = "does not hold a model", "its weights are NaN or infinite"


def hostile_files() -> Iterator[tuple[str, str, bytes]]:
    """Yield the name of a file, a part of the error that it causes (empty if it is harmless), and its content."""
    yield from other_kinds()
    yield from damaged_files()
    yield from hostile_json()
    yield from impossible_models()
    yield from hostile_tokenizers()
    yield from odd_weights()
    calls = {"_target_": "os.system", "a": "touch canary", "b": "${oc.env:HOME}"}
    yield "a configuration that calls", "", changed("config", value=calls)
    yield "a good file", "", changed()


def other_kinds() -> Iterator[tuple[str, str, bytes]]:
    yield "a checkpoint of torch.save", INCOMPLETE, torch_saved()
    yield "a zip bomb", INCOMPLETE, zip_bomb()
    yield "an empty file", INCOMPLETE, b""


def damaged_files() -> Iterator[tuple[str, str, bytes]]:
    """Yield files that safetensors refuses, of each kind one, and files with a wrong checksum."""
    yield "a header beyond the file", INCOMPLETE, header({}, length=1000)
    yield "a header of 100 MB of a good file", INCOMPLETE, header(changed()[8:].ljust(100 << 20))
    yield "a header of nested lists", INCOMPLETE, header(nested(100_000).encode())
    yield "a wrong checksum", DAMAGED, changed(crc32="00000000")
    huge = {"x": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 8]}}
    yield "a tensor of 10^15 numbers", INCOMPLETE, header(huge, bytes(8))
    yield "a tensor of 10^15 rows of nothing", "", changed("x", value=torch.empty(0, HUGE))
    yield "ten thousand tensors", INCOMPLETE, file({}, {f"{i}": torch.empty(0) for i in range(10_000)})


def hostile_json() -> Iterator[tuple[str, str, bytes]]:
    for text in ("", "{}", '{"minigpt": {}}'):
        yield f"JSON that is {text!r}", INCOMPLETE, file(text, {"x": torch.ones(2)})
    yield "100,000 nested lists", INCOMPLETE, beside(nested(100_000))
    yield "1000 nested tuples", INCOMPLETE, beside('{"$tuple":[' * 1000 + "]}" * 1000)
    yield "a million lists", "", beside(f"[{'[],' * 1_000_000}[]]")
    yield "a number beyond floats", "", beside("1e999")
    for digits, error in ((4000, ""), (1_000_000, INCOMPLETE)):
        yield f"an integer of {digits} digits", error, beside("9" * digits)
    for marker in ('{"$tensor": "x"}', '{"$dict": [[[], 1]]}'):
        yield f"a marker {marker}", INCOMPLETE, beside(marker)
    yield "no marker", "", beside('{"$class": "os"}')
    yield "a list of weights", INCOMPLETE, changed("state_dict", value=["x"])
    yield "weights that are a tensor", INCOMPLETE, changed("state_dict", value=torch.ones(2))


def impossible_models() -> Iterator[tuple[str, str, bytes]]:
    yield "no format", "has format None", changed("minigpt", "format", value=...)
    for key in ("model", "tokenizer"):
        yield f"no {key}", MODEL, changed("minigpt", key, value=...)
    dictionaries = {"_target_": "os.system"}, {"$tensor": "model.wte.weight"}
    values = {
        "n_layer": [10**9, 10**4000, 40_000, "${oc.env:HOME}", *dictionaries],
        "block_size": [1 << 60, 1 << 20],
        "head_dim": [1 << 20],
        "n_inner": [1 << 62],
        "vocab_size": [1 << 62, 3],
        "dropout": [math.nan],
        "smear": [1 << 40, 60_000],
        "norm": ["__import__('os').system('true')", "x" * 1_000_000],
        "__class__": ["x"],
    }
    for name, claims in values.items():
        for claim in claims:
            yield f"{name} {claim!r:.50}", MODEL, model(**{name: claim})
    yield "a table of a million positions", MODEL, model(position="rope", block_size=1 << 20, head_dim=1024)


def hostile_tokenizers() -> Iterator[tuple[str, str, bytes]]:
    yield "a tokenizer of another size", MODEL, tokenizer({"name": "byte"})
    yield "a tokenizer that is a function", MODEL, tokenizer({"name": {"_target_": "os.system"}})
    yield "a regular expression", MODEL, tokenizer(BPE | {"pattern": "(a+)+$"})
    yield "an unknown encoding", MODEL, tokenizer(BPE | {"name": "(a+)+$"})
    for separator in (1 << 62, 3, {"$tensor": "model.wpe.weight"}):  # 3 is the id of another token
        yield f"an end of text {separator}", MODEL, tokenizer(BPE | {"special": {"<|endoftext|>": separator}})
    tokens = {"one twice": BPE["tokens"] + " AA==", "not base64": "\x1b]0;x\x07 é", "a list": ["AA=="]}
    for name, value in {**tokens, "a million spaces": " " * 1_000_000}.items():
        yield f"tokens: {name}", MODEL, tokenizer(BPE | {"tokens": value})
    for alphabet in ("aa", ["a", "b"]):
        yield f"an alphabet {alphabet!r}", MODEL, tokenizer({"name": "char", "alphabet": alphabet})
    yield "a tokenizer.json", "", tokenizer_json()
    yield "a tokenizer.json without a model", MODEL, tokenizer_json(model={})
    yield "a tokenizer.json with a huge id", MODEL, tokenizer_json(model=WORDS | {"vocab": {"a": (1 << 32) - 1}})
    yield "a tokenizer.json that panics", MODEL, tokenizer_json(normalizer=CHARMAP)
    yield "a separator that is no id", MODEL, tokenizer_json(separator=9)


def odd_weights() -> Iterator[tuple[str, str, bytes]]:
    yield "missing weights", MODEL, changed("state_dict", "model.wpe.weight", value=...)
    for number in (math.nan, math.inf):
        yield f"weights {number}", NOT_FINITE, weight(torch.full((8, 16), number), "model.wpe.weight")
    yield "weights of another size", MODEL, weight(torch.tensor(1.0))
    yield "weights that are a text", MODEL, weight("x")
    yield "unexpected weights", MODEL, weight(torch.ones(2), "model.__class__")
    yield "complex weights", "'ComplexFloat'", weight(torch.ones(*SIZE, dtype=torch.complex64))
    yield "weights of 16 bits", "", weight(torch.ones(*SIZE, dtype=torch.float16))


CHILD = """
import contextlib, io, json, resource, runpy, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import matplotlib.pyplot, minigpt.checkpoints.load, minigpt.sample_cli
import minigpt.interpret.attention_plots, minigpt.interpret.heads
import minigpt.checkpoints.validation_split
memory, script, good, *files = sys.argv[1:]
for index, file in enumerate([good, *files]):
    sys.argv = [script, file, "--prompt", "aa", *(["--max-new-tokens", "2"] if script.endswith("sample.py") else [])]
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
def test_a_script_rejects_hostile_files_with_one_line(tmp_path: Path):
    """It takes limited memory and CPU time per file, and samples from harmless files."""
    expected = {}
    for number, (name, error, content) in enumerate(hostile_files()):
        assert name not in expected
        expected[name] = error, f"{number}.safetensors"
        (tmp_path / f"{number}.safetensors").write_bytes(content)
    good_file = expected["a good file"][1]
    for script in ("sample.py", "attention.py"):
        if script == "attention.py":  # reads them with the same function: one file per error
            by_error = {error: name for name, (error, _) in expected.items() if error}
            expected = {name: expected[name] for name in by_error.values()}
        files = [file for _, file in expected.values()]
        command = [sys.executable, "-c", CHILD, str(MEMORY), str(SCRIPTS / script), good_file, *files]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        results = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(results) == len(files), (list(expected)[len(results)], done.returncode, done.stderr[-2000:])
        for (name, (error, _)), (code, stderr, seconds) in zip(expected.items(), results, strict=True):
            assert seconds < SECONDS, name
            assert code == (2 if error else 0), (name, stderr)
            if error:
                line, end = stderr[:-1], stderr[-1:]
                assert line.startswith("error: "), (name, stderr)
                assert error in line, (name, stderr)
                assert line.isprintable(), (name, stderr)
                assert (len(line) < 2000, end) == (True, "\n"), (name, stderr)
    assert not (tmp_path / "canary").exists()


def test_a_configuration_inside_a_checkpoint_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No `_target_` is called, the server that it names gets no request, and no file is written."""
    monkeypatch.chdir(tmp_path)
    content = good()
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/evil.txt"
        data = {
            "_target_": "os.system",
            "folder": f"{tmp_path}/data",
            "source": "download",
            "name": "../evil",
            "url": url,
        }
        data |= {"sha256": "${oc.env:HOME}", "characters": 9, "path": "touch canary", "field": "text"}
        data |= {"val_path": None, "split": "fraction", "val_fraction": 0.1}
        for bins, error in ((None, "are not in"), (url, "is not a file"), ([url], "is not a file")):
            tokenizer = {"_target_": "os.system", "name": "touch canary"}
            content["minigpt"]["config"] = {"data": data | {"train_bin": bins, "val_bin": bins}, "tokenizer": tokenizer}
            write(content, tmp_path / "a.safetensors")
            with pytest.raises(UserError, match=error):
                validation_batches(tmp_path / "a.safetensors", load_checkpoint(tmp_path / "a.safetensors")[0])
        assert not select.select([server], [], [], 0)[0]
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
