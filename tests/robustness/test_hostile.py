"""Hostile checkpoint files are rejected with one line, in bounded time and memory, and execute nothing."""

import io
import json
import math
import pickle
import re
import select
import socketserver
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from minigpt.checkpoints.format import MAX_HEADER_BYTES, checksum, write
from minigpt.checkpoints.models import load_checkpoint
from minigpt.checkpoints.resume import contents
from minigpt.checkpoints.validation_split import validation_batches
from minigpt.config import GPTConfig
from minigpt.data.tokenizer import BPETokenizer, CharTokenizer
from minigpt.model import GPT
from minigpt.utils.cli import UserError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
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
    return {"state_dict": weights, **contents(model.config, CharTokenizer.of(ALPHABET), {"seed": 7}, "ab12", {})}


def file(values: Any, tensors: dict[str, Tensor], **metadata: str) -> bytes:
    """Return a safetensors file with a correct checksum; `values` is the JSON text, or its parsed values."""
    text = values if isinstance(values, str) else json.dumps(values)
    return save(tensors, {"format": "pt", "minigpt": text, "crc32": checksum(text, sorted(tensors.items()))} | metadata)


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


def text(json_text: str) -> bytes:
    return file(json_text, {"x": torch.ones(2)})


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


def header(content: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    """Return a file with the given header: bytes, or values to encode as JSON."""
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(written) if length is None else length).to_bytes(8, "little") + written + data


def entry(**changes: Any) -> bytes:
    """Return a file with one tensor of two numbers, whose entry in the header is changed."""
    fields = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return header({"x": {key: value for key, value in fields.items() if value is not ...}})


def entries(*offsets: tuple[int, int]) -> bytes:
    tensors = {f"x{i}": {"dtype": "F32", "shape": [2], "data_offsets": pair} for i, pair in enumerate(offsets)}
    return header(tensors, bytes(16))


class Call:
    """An object that unpickles as a function call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


EXECUTE = Call(exec, "open('canary', 'w')")


def torch_saved() -> bytes:
    saved = io.BytesIO()
    torch.save(good() | {"x": EXECUTE}, saved)
    return saved.getvalue()


def zip_bomb() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 26))
    return packed.getvalue()


def shared(claims: dict[str, Any]) -> bytes:
    """Return a file in which five hundred weights are one tensor."""
    content = good()
    content["minigpt"]["model"] |= claims
    content["state_dict"] = {f"model.{i}": {"$tensor": "x"} for i in range(500)}
    return file(content, {"x": torch.zeros(1 << 18)})


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


NAN = torch.full((8, 16), math.nan)
PICKLE, INCOMPLETE = "is not a safetensors file but a pickle", "is not a complete checkpoint"
OTHER, LARGE, DAMAGED = "is not a checkpoint of minigpt", "its header is larger than", "is damaged: its checksum"
MODEL = "does not hold a model"
FULL = MAX_HEADER_BYTES - 16384  # bytes of JSON in the largest header
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    # Other kinds of files.
    "a checkpoint of torch.save": (torch_saved, PICKLE),
    **{f"a pickle of protocol {n}": (lambda n=n: pickle.dumps({"x": EXECUTE}, n), PICKLE) for n in (2, 4, 5)},
    "a pickle of protocol 0": (lambda: pickle.dumps({"x": EXECUTE}, 0), INCOMPLETE),
    "a zip bomb": (zip_bomb, PICKLE),
    "a text": (lambda: b"Once upon a time there was a text file.\n", INCOMPLETE),
    "a long text": (lambda: b"All work and no play. " * 100_000, INCOMPLETE),
    "an empty file": (lambda: b"", INCOMPLETE),
    "seven bytes": (lambda: bytes(7), INCOMPLETE),
    "zeros": (lambda: bytes(1 << 20), INCOMPLETE),
    # Headers.
    "a header beyond the file": (lambda: header({}, b"", 1000), INCOMPLETE),
    "a header of 2^63 bytes": (lambda: header({}, length=1 << 63), INCOMPLETE),
    "a header of -1 bytes": (lambda: header({}, length=(1 << 64) - 1), INCOMPLETE),
    "a header of 100 MB": (lambda: header(b"[" * (100 << 20)), LARGE),
    "a header of 100 MB of a good file": (lambda: header(changed()[8:].ljust(100 << 20)), LARGE),
    "a header that is not JSON": (lambda: header(b"{x}"), INCOMPLETE),
    "a header that is not UTF-8": (lambda: header(b'{"\xff": 1}'), INCOMPLETE),
    "a header of a list": (lambda: header([]), INCOMPLETE),
    "a header of nested lists": (lambda: header(nested(100_000).encode()), INCOMPLETE),
    "a header of NaN": (lambda: header({"x": math.nan}), INCOMPLETE),
    "an empty header": (lambda: header({}, b""), OTHER),
    "metadata of numbers": (lambda: header({"__metadata__": {"minigpt": 3}}, b""), INCOMPLETE),
    "metadata of a list": (lambda: header({"__metadata__": ["minigpt"]}, b""), INCOMPLETE),
    "bytes after the tensors": (lambda: changed() + bytes(8), INCOMPLETE),
    "no bytes": (lambda: entry()[:-8], INCOMPLETE),
    # Tensors.
    **{f"a tensor without {key}": (lambda key=key: entry(**{key: ...}), INCOMPLETE) for key in ("dtype", "shape")},
    "a tensor without offsets": (lambda: entry(data_offsets=...), INCOMPLETE),
    **{
        f"a tensor of dtype {dtype}": (lambda dtype=dtype: entry(dtype=dtype), INCOMPLETE)
        for dtype in ("F33", "F64", "U8", "", 3, None, ["F32"], "F" * 1000)
    },
    **{
        f"a tensor of shape {shape}": (lambda shape=shape: entry(shape=shape), INCOMPLETE)
        for shape in ([-2], [2.0], [HUGE], [1 << 62, 4], [1 << 32, 1 << 32], [10**30], "2", None, [True], [[2]], [3])
    },
    **{
        f"offsets {pair}": (lambda pair=pair: entry(data_offsets=pair), INCOMPLETE)
        for pair in ([8, 0], [-8, 0], [0, 1 << 40], [0, 1 << 64], [4, 12], [0.0, 8.0], [0], [0, 8, 8], "08")
    },
    "overlapping tensors": (lambda: entries((0, 8), (0, 8)), INCOMPLETE),
    "partly overlapping tensors": (lambda: entries((0, 8), (4, 12)), INCOMPLETE),
    "a gap between tensors": (lambda: entries((0, 4), (8, 16)), INCOMPLETE),
    "a tensor of many dimensions": (lambda: entry(shape=[1] * 1000 + [2]), OTHER),
    "a tensor of 10^15 rows of nothing": (
        lambda: changed("x", value=torch.empty(0, HUGE)),
        "",
    ),
    "a name twice": (lambda: header(entry()[8:-8].replace(b"}}", b'}, "x": {}}')), INCOMPLETE),
    "fifty thousand tensors": (lambda: file({}, {f"{i}": torch.empty(0) for i in range(50_000)}), OTHER),
    "complex weights": (lambda: weight(torch.ones(*SIZE, dtype=torch.complex64)), "complex tensors"),
    "weights of 8 bits": (lambda: weight(torch.ones(SIZE).to(torch.float8_e4m3fn)), ""),
    "weights of 4 bits": (lambda: weight(torch.ones(SIZE, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)), INCOMPLETE),
    # JSON.
    **{
        f"JSON that is {json_text[:20]!r}": (lambda json_text=json_text: text(json_text), OTHER)
        for json_text in ("", "x", "{", "[]", "[3]", "3", "null", "NaN", '"text"', "{}", '{"minigpt": {}}')
    },
    **{f"{depth} nested lists": (lambda depth=depth: beside(nested(depth)), OTHER) for depth in (100, 900, 100_000)},
    "100 nested dictionaries": (lambda: beside('{"x":' * 100 + "1" + "}" * 100), OTHER),
    "100 nested tuples": (lambda: beside('{"$tuple":[' * 100 + "]}" * 100), OTHER),
    "a million lists": (lambda: beside(f"[{'[],' * 1_000_000}[]]"), ""),
    "the largest text": (lambda: beside(f'"{"x" * FULL}"'), ""),
    "two hundred thousand dictionaries": (lambda: beside(f"[{'{},' * 200_000}{{}}]"), ""),
    "an integer of 30 digits": (lambda: beside("9" * 30), ""),
    "an integer of 4,000 digits": (lambda: beside("9" * 4000), ""),
    "an integer of a million digits": (lambda: beside("9" * 1_000_000), ""),
    "a number beyond floats": (lambda: beside("1e999"), ""),
    "a key twice": (lambda: beside('1, "state_dict": {}, "minigpt": 3'), OTHER),
    "half a surrogate pair": (lambda: beside('"\\ud800"'), ""),
    **{
        f"a marker {json_text}": (lambda json_text=json_text: beside(json_text), OTHER)
        for json_text in (
            '{"$tensor": "x"}',
            '{"$tensor": "__metadata__"}',
            '{"$dict": [[[], 1]]}',
            '{"$dict": [[{}, 1]]}',
            '{"$dict": [[1, 2, 3]]}',
            '{"$dict": [1]}',
            '{"$dict": ["x"]}',
        )
    },
    **{
        f"no marker {json_text}": (lambda json_text=json_text: beside(json_text), "")
        for json_text in (
            '{"$dict": [[1.5, 1], [{"$tensor": "model.wte.weight"}, 2]]}',
            '{"$tensor": 3}',
            '{"$tensor": ["x"]}',
            '{"$tuple": 3}',
            '{"$dict": {}}',
            '{"$class": "os"}',
        )
    },
    **{
        f"without {path[-1]}": (lambda path=path: changed(*path, value=...), named)
        for path, named in (
            (("minigpt",), OTHER),
            (("state_dict",), OTHER),
            (("minigpt", "format"), "has format None"),
            (("minigpt", "model"), MODEL),
            (("minigpt", "tokenizer"), MODEL),
            (("state_dict", "model.wpe.weight"), MODEL),
        )
    },
    **{
        f"{key} {value!r}": (lambda key=key, value=value: changed(key, value=value), OTHER)
        for key in ("minigpt", "state_dict")
        for value in (3, None, "text", ["x"], True)
    },
    "weights that are a tensor": (lambda: changed("state_dict", value=torch.ones(2)), OTHER),
    "no checksum": (lambda: changed(crc32=""), DAMAGED),
    "a wrong checksum": (lambda: changed(crc32="00000000"), DAMAGED),
    # Models.
    **{
        f"{name} {value!r:.50}": (lambda name=name, value=value: model(**{name: value}), MODEL)
        for name, value in [
            ("n_layer", 10**9),
            ("n_layer", 40_000),
            ("n_layer", True),
            ("n_layer", "2"),
            ("n_layer", [2]),
            ("n_layer", {"_target_": "os.system"}),
            ("n_layer", "${oc.env:HOME}"),
            ("n_layer", {"$tensor": "model.wte.weight"}),
            ("n_layer", 10**30),
            ("n_layer", 10**4000),
            ("rope_base", 10**400),
            ("block_size", 1 << 60),
            ("block_size", 1 << 20),
            ("head_dim", -1),
            ("head_dim", 1 << 20),
            ("n_embd", math.nan),
            ("n_embd", 16.0),
            ("n_head", 0),
            ("n_kv_head", 3),
            ("n_inner", 1 << 62),
            ("vocab_size", 1 << 62),
            ("vocab_size", 3),
            ("dropout", math.nan),
            ("dropout", math.inf),
            ("rope_base", math.inf),
            ("smear", 1 << 40),
            ("smear", 60_000),
            ("ngram", 1 << 40),
            ("base_n_embd", 0),
            ("norm", "__import__('os').system('true')"),
            ("activation", "../../x"),
            ("norm", ["layernorm"]),
            ("norm", "x" * 1_000_000),
            ("_target_", "os.system"),
            ("__class__", "x"),
            ("3", 4),
        ]
    },
    "a table of a million positions": (lambda: model(position="rope", block_size=1 << 20, head_dim=1024), MODEL),
    "many weights that are one tensor": (lambda: shared({"n_embd": 2048}), MODEL),
    # Tokenizers.
    "a tokenizer of another size": (lambda: tokenizer({"name": "byte"}), MODEL),
    "a tokenizer that is a list": (lambda: tokenizer(["char"]), MODEL),
    "a tokenizer that is a function": (lambda: tokenizer({"name": {"_target_": "os.system"}}), MODEL),
    "a regular expression": (lambda: tokenizer(BPE | {"pattern": "(a+)+$"}), MODEL),
    "an unknown encoding": (lambda: tokenizer(BPE | {"name": "(a+)+$"}), MODEL),
    "a huge vocabulary": (lambda: tokenizer(BPE | {"special": {"<|endoftext|>": 1 << 62}}), MODEL),
    "an id below 0": (lambda: tokenizer(BPE | {"special": {"<|endoftext|>": -1}}), MODEL),
    "an id that is a tensor": (
        lambda: tokenizer(BPE | {"special": {"<|endoftext|>": {"$tensor": "model.wpe.weight"}}}),
        MODEL,
    ),
    "an id twice": (lambda: tokenizer(BPE | {"special": {"<|endoftext|>": 3}}), MODEL),
    "a token twice": (lambda: tokenizer(BPE | {"tokens": BPE["tokens"] + " AA=="}), MODEL),
    "tokens that are not base64": (lambda: tokenizer(BPE | {"tokens": "\x1b]0;x\x07 é"}), MODEL),
    "tokens that are a list": (lambda: tokenizer(BPE | {"tokens": ["AA=="]}), MODEL),
    "only spaces": (lambda: tokenizer(BPE | {"tokens": " " * 1_000_000}), MODEL),
    "a tokenizer.json": (tokenizer_json, ""),
    "a tokenizer.json without a model": (lambda: tokenizer_json(model={}), MODEL),
    "a tokenizer.json with a huge id": (lambda: tokenizer_json(model=WORDS | {"vocab": {"a": (1 << 32) - 1}}), MODEL),
    "a tokenizer.json that panics": (lambda: tokenizer_json(normalizer=CHARMAP), MODEL),
    "a separator that is no id": (lambda: tokenizer_json(separator=9), MODEL),
    "an alphabet twice": (lambda: tokenizer({"name": "char", "alphabet": "aa"}), MODEL),
    "an empty alphabet": (lambda: tokenizer({"name": "char", "alphabet": ""}), MODEL),
    "an alphabet of a list": (lambda: tokenizer({"name": "char", "alphabet": ["a", "b"]}), MODEL),
    # Weights.
    "NaN weights": (lambda: weight(NAN, "model.wpe.weight"), "its weights are NaN or infinite"),
    "infinite weights": (
        lambda: weight(NAN.nan_to_num(math.inf), "model.wpe.weight"),
        "its weights are NaN or infinite",
    ),
    "weights of another size": (lambda: weight(torch.tensor(1.0)), MODEL),
    "weights that are a text": (lambda: weight("x"), MODEL),
    "unexpected weights": (lambda: weight(torch.ones(2), "model.__class__"), MODEL),
    "weights of integers": (lambda: weight(torch.ones(*SIZE, dtype=torch.int64)), "Only Tensors of floating point"),
    "weights of 16 bits": (lambda: weight(torch.ones(*SIZE, dtype=torch.float16)), ""),
    "a configuration that calls": (
        lambda: changed("config", value={"_target_": "os.system", "a": "touch canary", "b": "${oc.env:HOME}"}),
        "",
    ),
    "a good one": (changed, ""),
}
LOADED = [name for name, (_, expected) in FILES.items() if not expected]

CHILD = """
import json, resource, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import minigpt.utils.cli
from minigpt.checkpoints.models import load_checkpoint
import torch
folder, memory = Path(sys.argv[1]), int(sys.argv[2])
load_checkpoint(folder / "good.safetensors")  # everything is imported by now
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + memory
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for file in sorted(folder.glob("[0-9]*.safetensors"), key=lambda file: int(file.stem)):
    began, line, code = time.process_time(), "", 0
    try:
        model, tokenizer = load_checkpoint(file)
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64))
        tokenizer.decode(tokenizer.encode("a"))
    except BaseException as error:
        line, code = minigpt.utils.cli.explain(error)
    print(json.dumps([line, code, time.process_time() - began]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all files, numbered, and a good one."""
    folder = tmp_path_factory.mktemp("hostile")
    for number, (build, _) in enumerate(FILES.values()):
        (folder / f"{number}.safetensors").write_bytes(build())
    (folder / "good.safetensors").write_bytes(changed())
    return folder


@pytest.fixture(scope="module")
def verdicts(folder: Path) -> dict[str, tuple[str, int, float]]:
    """Load every file in a process with limited memory; return its error line, exit code and CPU seconds."""
    command = [sys.executable, "-c", CHILD, str(folder), str(MEMORY)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(FILES), (list(FILES)[len(lines)], done.returncode, done.stderr[-2000:])
    return dict(zip(FILES, lines, strict=True))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the size of a process")
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_rejected_with_one_line_or_is_harmless(
    name: str, verdicts: dict[str, tuple[str, int, float]], folder: Path
):
    error, code, seconds = verdicts[name]
    assert seconds < SECONDS
    if name in LOADED:
        assert (error, code) == ("", 0)
    else:
        assert code == 2, error
        assert error.startswith("error: ")
        assert FILES[name][1] in error
        assert len(error) < 2000
        assert error.isprintable()
    assert not (folder / "canary").exists()


CALLED = """
import contextlib, io, json, resource, runpy, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import matplotlib.pyplot, minigpt.checkpoints.models, minigpt.console
import minigpt.interpret.plots, minigpt.interpret.page, minigpt.interpret.heads
import minigpt.checkpoints.validation_split
memory, script, *files = sys.argv[1:]
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(memory)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for file in files:
    sys.argv = [script, file, "--prompt", "aa", *(["--max-new-tokens", "2"] if script.endswith("sample.py") else [])]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, err.getvalue()]), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the size of a process")
@pytest.mark.parametrize("script", ["sample.py", "attention.py"])
def test_a_script_rejects_hostile_files_with_one_line(script: str, folder: Path):
    files = [name for name in FILES if name not in LOADED]
    command = [sys.executable, "-c", CALLED, str(2 * MEMORY), str(SCRIPTS / script)]
    command += [str(folder / f"{list(FILES).index(name)}.safetensors") for name in (*files, "a good one")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    *refused, (code, _) = map(json.loads, done.stdout.splitlines())
    assert code == 0
    for name, (code, stderr) in zip(files, refused, strict=True):
        assert (code, stderr.count("\n")) == (2, 1), (name, stderr)
        assert "Traceback" not in stderr
    assert not (folder / "canary").exists()


RESUMED = [
    "a checkpoint of torch.save",
    "a zip bomb",
    "a header of 100 MB",
    "100000 nested lists",
    'a marker {"$dict": [1]}',
]


@pytest.mark.parametrize("name", RESUMED)
def test_training_does_not_resume_from_a_hostile_file(
    name: str, train: Callable[..., SimpleNamespace], folder: Path, tmp_path: Path
):
    with pytest.raises(UserError, match=r"\.safetensors is not a"):
        train(f"resume={folder}/{list(FILES).index(name)}.safetensors")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.slow
def test_resuming_from_a_hostile_file_is_one_line(launch: Callable[..., Any], folder: Path, tmp_path: Path):
    file = folder / f"{list(FILES).index('a checkpoint of torch.save')}.safetensors"
    ended = launch("train.py", f"resume={file}", f"hydra.run.dir={tmp_path}/run", cwd=tmp_path)
    assert ended.returncode == 2
    assert re.fullmatch(rf"error: {file} is not a safetensors file.*\n", ended.stderr)
    assert not list(tmp_path.rglob("canary"))


def test_a_configuration_inside_a_checkpoint_is_data(launch: Callable[..., Any], tmp_path: Path):
    """The corpus that a checkpoint names is looked up; no `_target_` is called."""
    content = good()
    content["minigpt"]["config"] = {
        "data": {"_target_": "os.system", "folder": "data", "source": "${oc.env:HOME}", "train_bin": None}
        | dict.fromkeys(("data_path", "path", "val_path", "name"), "touch canary")
        | {"split": "fraction", "val_fraction": 0.1},
        "tokenizer": {"_target_": "os.system", "name": "touch canary"},
    }
    write(content, tmp_path / "a.safetensors")
    drawn = ["--prompt", "aa", "--ablation", "v.png"]
    ended = launch("attention.py", "a.safetensors", *drawn, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "canary").exists()


def test_a_checkpoint_causes_no_download(tmp_path: Path):
    """The server that it names gets no request, and no file is written to the folder that it names."""
    content = good()
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/evil.txt"
        named = {"source": "download", "name": "../evil", "url": url, "sha256": "0" * 64, "characters": 9}
        paths = dict.fromkeys(("path", "val_path", "train_bin", "val_bin"))
        settings = {"field": "text", "split": "fraction", "val_fraction": 0.1, "processes": 1}
        data = {"folder": str(tmp_path / "data"), **named, **paths, **settings}
        content["minigpt"]["config"] = {"data": data, "tokenizer": {"name": "char"}}
        write(content, tmp_path / "a.safetensors")
        with pytest.raises(UserError, match="are not in"):
            validation_batches(tmp_path / "a.safetensors", load_checkpoint(tmp_path / "a.safetensors")[0])
        for bins in (url, [url], f"simplecache::{url}"):
            data |= {"train_bin": bins, "val_bin": bins}
            write(content, tmp_path / "a.safetensors")
            with pytest.raises(UserError, match="are not fetched"):
                validation_batches(tmp_path / "a.safetensors", load_checkpoint(tmp_path / "a.safetensors")[0])
        assert not select.select([server], [], [], 0)[0]
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
