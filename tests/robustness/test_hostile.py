"""No checkpoint does more than hold a model: whatever is in it, it is refused in a line, at once, and runs nothing."""

import _codecs
import io
import json
import math
import pickle
import re
import select
import socketserver
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import _utils

from minigpt.checkpoints.checkpoint import contents, load_checkpoint
from minigpt.checkpoints.validation_split import validation_batches
from minigpt.config import GPTConfig
from minigpt.data.tokenizer import BPETokenizer, CharTokenizer
from minigpt.model import GPT
from minigpt.utils.cli import UserError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ALPHABET = "\n abcdeé€😀"
MEMORY, SECONDS = 300 << 20, 5  # of one file, beyond the imports
BPE = BPETokenizer("bpe", [bytes([i]) for i in range(256)], {"<|endoftext|>": 256}).to_dict()


class Call:
    """What unpickles as the result of a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


class Attributes:
    """What unpickles as a dictionary with attributes of its own."""

    def __init__(self, **attributes: Any) -> None:
        self.attributes = attributes

    def __reduce__(self) -> Any:
        return OrderedDict, (), self.attributes


class Persistent:
    """What stands in a pickle for something beside it."""

    def __init__(self, named: Any) -> None:
        self.named = named


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.named if isinstance(value, Persistent) else None


def pickled(content: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file, 2).dump(content)
    return file.getvalue()


def archive(data: bytes, records: dict[str, bytes] | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as opened:
        for name, content in {"archive/data.pkl": data, "archive/data/9": bytes(64), **(records or {})}.items():
            opened.writestr(zipfile.ZipInfo(name), content, opened.compression)  # of 1980: the hour would be in it
    return file.getvalue()


def storage(count: int = 16, kind: Any = torch.FloatStorage, key: Any = "9") -> Persistent:
    return Persistent(("storage", kind, key, "cpu", count))


def tensor(size: Any, stride: Any, offset: Any = 0, numbers: Any = None) -> Call:
    numbers = numbers or storage()
    return Call(_utils._rebuild_tensor_v2, numbers, offset, size, stride, False, OrderedDict())


SIZE = (len(ALPHABET), 16)  # of the embedding


def good() -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=len(ALPHABET), n_layer=2, n_head=2, n_embd=16))
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {"state_dict": weights, **contents(model.config, CharTokenizer.of(ALPHABET), {"seed": 7}, "ab12", {})}


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def beside(value: Any) -> bytes:
    """A file whose part of ours is in order, and a value beside it."""
    return archive(pickled({"minigpt": {"format": 1}, "state_dict": {}, "x": value}))


def model(claims: dict[Any, Any]) -> bytes:
    content = good()
    content["minigpt"]["model"] |= claims
    return saved(content)


def tokenizer(values: Any) -> bytes:
    content = good()
    content["minigpt"]["tokenizer"] = values
    return saved(content)


def weight(value: Any, name: str = "model.wte.weight") -> bytes:
    content = good()
    content["state_dict"][name] = value
    return saved(content)


def claimed(size: Any, stride: Any, **claims: Any) -> bytes:
    """A file with one tensor that says that it is of a size, and a model of such a size."""
    ours = good()["minigpt"]
    ours["model"] |= claims
    return archive(pickled({"minigpt": ours, "state_dict": {"model.x": tensor(size, stride)}}))


def raw(code: bytes) -> bytes:
    return archive(b"\x80\x02" + code)


def doubled(times: int) -> bytes:
    """Instructions for a tuple that holds the one before twice, so many times over."""
    return b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(times))


def listed(times: int) -> bytes:
    """The same of lists, of which each is filled once all are there."""
    made = b"".join(b"]q" + bytes([i]) for i in range(times))
    filled = b"".join(
        b"h" + bytes([i]) + b"(h" + bytes([i + 1]) + b"h" + bytes([i + 1]) + b"e" for i in range(times - 1)
    )
    return b"(" + made + filled + b"t"


def hexed(times: int) -> Call:
    value = Call(_codecs.encode, "a" * 16, "latin1")
    for _ in range(times):
        value = Call(_codecs.encode, value, "hex")
    return value


def ours(code: bytes) -> bytes:
    """A file whose format is what some instructions build."""
    return raw(b"}(X\x07\x00\x00\x00minigpt}X\x06\x00\x00\x00format" + code + b"sX\x0a\x00\x00\x00state_dict}u.")


def holding_itself() -> Any:
    content = good()
    content["minigpt"]["model"]["n_layer"] = content
    return content


def records() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(saved(good()))) as opened:
        return {record.filename: opened.read(record) for record in opened.infolist()}


def rewritten(extra: dict[str, bytes], prefix: str = "") -> bytes:
    """A good file, with other records too."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in (*records().items(), *extra.items()):
            opened.writestr(prefix + name, content)
    return file.getvalue()


def twice() -> bytes:
    """A file with two pickles of one name: the first harmless, the second not."""
    evil = pickled({"minigpt": {"format": 1}, "state_dict": {}, "x": Call(bytearray, 1 << 40)})
    file = io.BytesIO(rewritten({"archive/data.pkX": evil}))
    return file.getvalue().replace(b"archive/data.pkX", b"archive/data.pkl")


def lying(offset: int, form: str, value: int) -> bytes:
    """A good file in whose first central directory entry a field is another."""
    whole = bytearray(saved(good()))
    struct.pack_into(form, whole, whole.index(b"PK\x01\x02") + offset, value)
    return bytes(whole)


def bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr(zipfile.ZipInfo("archive/data.pkl"), pickled(bytes(1 << 26)), zipfile.ZIP_DEFLATED)
    return file.getvalue()


def overlapping() -> bytes:
    """Many entries of the directory name the same numbers."""
    content = archive(pickled({"x": [1]}), {"archive/data/0": bytes(1 << 20)})
    begin, end = content.index(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    entry = content[content.rindex(b"PK\x01\x02") : end]
    entries = [entry.replace(b"archive/data/0", b"archive/data/%c" % (i + 65)) for i in range(26)]
    tail = bytearray(content[end:])
    struct.pack_into("<HHI", tail, 8, 29, 29, end - begin + 26 * len(entry))
    return content[:end] + b"".join(entries) + bytes(tail)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(SIZE), 0.1, 0, torch.qint8)


NAN = torch.full((8, 16), math.nan)
PLAIN, WHOLE, OURS = "more than plain data", "not a whole checkpoint", "does not hold a model"
HUGE = 10**15
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    # The allow-list of torch's own reader.
    "bytearray of 2 GB": (lambda: beside(Call(bytearray, 2 << 30)), PLAIN),
    "bytes that double": (lambda: beside(hexed(40)), PLAIN),
    "a codec": (lambda: beside(Call(_codecs.encode, "a" * 100_000, "punycode")), PLAIN),
    "a tensor of 2 GB": (lambda: beside(Call(torch.Tensor, 1 << 29)), PLAIN),
    "a storage of 2 GB": (lambda: beside(Call(torch.UntypedStorage, 2 << 30)), PLAIN),
    "a parameter": (lambda: beside(Call(_utils._rebuild_parameter, tensor((2,), (1,)), True, OrderedDict())), PLAIN),
    "a size": (lambda: beside(torch.Size([2])), PLAIN),
    "a device": (lambda: beside(torch.device("cpu")), PLAIN),
    "a type": (lambda: beside(torch.float32), PLAIN),
    "a set": (lambda: beside({1, 2}), PLAIN),
    "a counter": (lambda: beside(Counter("aab")), PLAIN),
    "a complex number": (lambda: beside(1j), PLAIN),
    "an ordered dictionary of pairs": (lambda: beside(Call(OrderedDict, [("a", 1)])), PLAIN),
    "a name alone": (lambda: beside(OrderedDict), PLAIN),
    "attributes": (lambda: beside(Attributes(items=torch.Tensor)), PLAIN),
    "no attributes": (lambda: beside(Attributes(_metadata={}, get=bytearray)), PLAIN),
    "a subclass": (
        lambda: beside(
            Call(torch._tensor._rebuild_from_type_v2, _utils._rebuild_tensor_v2, torch.Tensor, (), {"numel": bytearray})
        ),
        PLAIN,
    ),
    "a wrapper": (
        lambda: beside(
            Call(
                _utils._rebuild_wrapper_subclass,
                torch.Tensor,
                torch.float32,
                (HUGE,),
                (1,),
                0,
                torch.strided,
                "cpu",
                False,
            )
        ),
        PLAIN,
    ),
    "a sparse tensor": (lambda: weight(torch.eye(*SIZE).to_sparse()), PLAIN),
    "a quantized tensor": (lambda: weight(quantized()), PLAIN),
    "a meta tensor": (lambda: weight(torch.empty(*SIZE, device="meta")), PLAIN),
    "a complex tensor": (lambda: weight(torch.ones(*SIZE, dtype=torch.complex64)), PLAIN),
    # Functions that it does not have.
    "a shell": (lambda: beside(Call(exec, "open(canary, 'w')")), PLAIN),
    "an attribute of an attribute": (lambda: beside(Call(getattr, "text", "format")), PLAIN),
    "an import": (lambda: raw(b"cos\nsystem\nX\x01\x00\x00\x00a\x85R."), PLAIN),
    "an import under Python 2's name": (lambda: raw(b"c__builtin__\neval\nX\x01\x00\x00\x00a\x85R."), PLAIN),
    "an import from the stack": (lambda: raw(b"\x8c\x02os\x8c\x06system\x93."), PLAIN),
    "an instance": (lambda: raw(b"(X\x01\x00\x00\x00aios\nsystem\n."), PLAIN),
    "an extension": (lambda: raw(b"\x82\x01."), PLAIN),
    "a text as a function": (lambda: raw(b"X\x01\x00\x00\x00a)R."), WHOLE),
    "a tensor as a function": (lambda: beside(Call(torch.relu_, tensor((2,), (1,)))), PLAIN),
    # What stands beside the pickle.
    "a persistent text": (lambda: beside(Persistent("storage")), PLAIN),
    "a persistent number": (lambda: beside(Persistent(3)), PLAIN),
    "a persistent nothing": (lambda: beside(Persistent(())), PLAIN),
    "a persistent module": (lambda: beside(Persistent(("module", OrderedDict, "x.py", "import os"))), PLAIN),
    "a storage elsewhere": (lambda: beside(storage(key="../../etc/passwd")), WHOLE),
    "a storage alone": (lambda: beside(storage()), PLAIN),
    "a storage of another kind": (lambda: beside(tensor((2,), (1,), numbers=storage(kind=OrderedDict))), PLAIN),
    "a storage of fewer numbers": (lambda: beside(tensor((2,), (1,), numbers=storage(1 << 40))), WHOLE),
    "a storage of numbers below 0": (lambda: beside(tensor((2,), (1,), numbers=storage(-1))), WHOLE),
    "a storage of two types": (
        lambda: beside([tensor((2,), (1,)), tensor((2,), (1,), numbers=storage(kind=torch.IntStorage))]),
        WHOLE,
    ),
    # Tensors.
    "a tensor of 10^15": (lambda: beside(tensor((HUGE,), (1,))), PLAIN),
    "a tensor of one number 10^15 times": (lambda: beside(tensor((HUGE,), (0,))), PLAIN),
    "a tensor of 10^15 nothings": (lambda: beside(tensor((HUGE, 0), (0, 0))), ""),
    "a tensor of many dimensions": (lambda: beside(tensor((1 << 62,) * 1000, (0,) * 1000)), WHOLE),
    "a tensor beyond its storage": (lambda: beside(tensor((4,), (1,), offset=1 << 40)), WHOLE),
    "a tensor before its storage": (lambda: beside(tensor((4,), (1,), offset=-4)), WHOLE),
    "a tensor that goes backwards": (lambda: beside(tensor((4,), (-1,), offset=8)), WHOLE),
    "a tensor of a size below 0": (lambda: beside(tensor((-4,), (1,))), WHOLE),
    "a tensor of half a size": (lambda: beside(tensor((1.5,), (1,))), WHOLE),
    "a tensor of steps too far": (lambda: beside(tensor((2, 2), (1 << 62, 1 << 62))), WHOLE),
    "a tensor without numbers": (lambda: beside(tensor((2,), (1,), numbers=[1.0, 2.0])), WHOLE),
    # Pickles that unfold.
    "a key that takes forever": (lambda: raw(b"}" + doubled(60) + b"K\x01s."), PLAIN),
    "tuples that unfold": (lambda: ours(doubled(60)), PLAIN),
    "lists that unfold": (lambda: raw(listed(60) + b"."), PLAIN),
    "a list that holds itself": (lambda: raw(b"]q\x00h\x00a."), PLAIN),
    "a dictionary that holds itself": (lambda: saved(holding_itself()), PLAIN),
    "a tuple as a key": (lambda: beside({(1, 2): 3}), PLAIN),
    "a list in lists": (lambda: beside(json.loads("[" * 100 + "]" * 100)), PLAIN),
    "a million tuples": (lambda: raw(b")" + b"\x85" * 1_000_000 + b"."), PLAIN),
    "a key in a thousand tuples": (lambda: raw(b"})" + b"\x85" * 200_000 + b"K\x01s."), PLAIN),
    "a million dictionaries": (lambda: raw(b"(" + b"}" * 1_000_000 + b"t."), PLAIN),
    "a number of 255 bytes": (lambda: beside(1 << 2000), PLAIN),
    "a number of a million bytes": (lambda: raw(b"\x8b" + struct.pack("<i", 1 << 20) + bytes(1 << 20) + b"."), PLAIN),
    "a text of 4 GB": (lambda: raw(b"X\xff\xff\xff\xffa."), WHOLE),
    "a value again that is none": (lambda: raw(b"h\x07."), WHOLE),
    "an empty stack": (lambda: raw(b"0."), PLAIN),
    "marks that are none": (lambda: raw(b"t."), WHOLE),
    "no end": (lambda: raw(b"}" * 10), WHOLE),
    "frames": (lambda: archive(pickle.dumps({"a": 1}, protocol=5)), PLAIN),
    # Archives.
    "a bomb": (bomb, "unpacks to more than it is"),
    "a bomb in a bomb": (lambda: archive(bomb()), PLAIN),
    "records that lie in one another": (overlapping, "unpacks to more than it is"),
    "a record that is larger than the file": (lambda: lying(24, "<I", 0xFFFFFFF0), "unpacks to more than it is"),
    "a record of zip64 without one": (lambda: lying(24, "<I", 0xFFFFFFFF), "unpacks to more than it is"),
    "a record that begins elsewhere": (lambda: lying(42, "<I", 0x7FFFFFFF), WHOLE),
    "a record that is shorter than it says": (lambda: lying(20, "<I", 3), "is damaged"),
    "a record under a key": (lambda: lying(8, "<H", 1), WHOLE),
    "two pickles of one name": (twice, WHOLE),
    "two pickles": (lambda: rewritten({"other/data.pkl": pickled({})}), WHOLE),
    "records outside": (lambda: rewritten({"../../outside": b"x", "/tmp/outside": b"x", "C:\\outside": b"x"}), ""),
    "all records outside": (lambda: rewritten({}, prefix="../../"), ""),
    "fifty thousand records": (lambda: rewritten({f"archive/{i}": b"" for i in range(50_000)}), ""),
    "an archive of Python's": (lambda: archive(b"", {"__main__.py": b"open(canary, 'w')"}), WHOLE),
    # Models.
    **{
        f"{name} {value!r}": (lambda name=name, value=value: model({name: value}), OURS)
        for name, value in [
            ("n_layer", 10**9),
            ("n_layer", 40_000),
            ("n_layer", True),
            ("n_layer", "2"),
            ("n_layer", [2]),
            ("n_layer", {"_target_": "os.system"}),
            ("n_layer", "${oc.env:HOME}"),
            ("n_layer", torch.tensor(2)),
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
            (3, 4),
        ]
    },
    "a table of a million positions": (
        lambda: model({"position": "rope", "block_size": 1 << 20, "head_dim": 1024}),
        OURS,
    ),
    "a model of one number": (lambda: claimed((HUGE,), (0,), n_embd=1 << 14), PLAIN),
    "many names of the same numbers": (
        lambda: archive(
            pickled(
                {
                    "minigpt": good()["minigpt"] | {"model": good()["minigpt"]["model"] | {"n_embd": 2048}},
                    "state_dict": {
                        f"model.{i}": tensor((1 << 18,), (1,), numbers=storage(1 << 18)) for i in range(500)
                    },
                }
            ),
            {"archive/data/9": bytes(1 << 20)},
        ),
        OURS,
    ),
    # Tokenizers.
    "a tokenizer of another size": (lambda: tokenizer({"name": "byte"}), OURS),
    "a tokenizer that is a list": (lambda: tokenizer(["char"]), OURS),
    "a tokenizer that is a function": (lambda: tokenizer({"name": {"_target_": "os.system"}}), OURS),
    "a regular expression": (lambda: tokenizer(BPE | {"pattern": "(a+)+$"}), OURS),
    "an unknown encoding": (lambda: tokenizer(BPE | {"name": "(a+)+$"}), OURS),
    "a huge vocabulary": (lambda: tokenizer(BPE | {"special": {"<|endoftext|>": 1 << 62}}), OURS),
    "an id below 0": (lambda: tokenizer(BPE | {"special": {"<|endoftext|>": -1}}), OURS),
    "an id that is a tensor": (lambda: tokenizer(BPE | {"special": {"<|endoftext|>": torch.tensor(3)}}), OURS),
    "an id of two": (lambda: tokenizer(BPE | {"special": {"<|endoftext|>": 3}}), OURS),
    "a token twice": (lambda: tokenizer(BPE | {"tokens": BPE["tokens"] + " AA=="}), OURS),
    "tokens that are none": (lambda: tokenizer(BPE | {"tokens": "\x1b]0;x\x07 é"}), OURS),
    "tokens that are a list": (lambda: tokenizer(BPE | {"tokens": ["AA=="]}), OURS),
    "nothing but spaces": (lambda: tokenizer(BPE | {"tokens": " " * 1_000_000}), OURS),
    "an alphabet twice": (lambda: tokenizer({"name": "char", "alphabet": "aa"}), OURS),
    "an alphabet of nothing": (lambda: tokenizer({"name": "char", "alphabet": ""}), OURS),
    "an alphabet of a list": (lambda: tokenizer({"name": "char", "alphabet": ["a", "b"]}), OURS),
    # Weights.
    "weights that are no number": (lambda: weight(NAN, "model.wpe.weight"), "no finite numbers"),
    "weights that are infinite": (lambda: weight(NAN.nan_to_num(math.inf), "model.wpe.weight"), "no finite numbers"),
    "weights of another size": (lambda: weight(torch.tensor(1.0)), OURS),
    "weights that are a text": (lambda: weight("x"), OURS),
    "weights that are not asked for": (lambda: weight(torch.ones(2), "model.__class__"), OURS),
    "weights of whole numbers": (lambda: weight(torch.ones(*SIZE, dtype=torch.int64)), ""),
    "weights of half the digits": (lambda: weight(torch.ones(*SIZE, dtype=torch.float16)), ""),
    "a configuration that calls": (
        lambda: saved(good() | {"config": {"_target_": "os.system", "a": "touch canary", "b": "${oc.env:HOME}"}}),
        "",
    ),
    "a good one": (lambda: saved(good()), ""),
}
LOADED = [name for name, (_, said) in FILES.items() if not said and not name.startswith("a tensor")]

CHILD = """
import json, resource, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import minigpt.checkpoints.checkpoint
import minigpt.utils.cli
import torch
folder, memory = Path(sys.argv[1]), int(sys.argv[2])
minigpt.checkpoints.checkpoint.load_checkpoint(folder / "good.safetensors")  # everything is imported by now
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + memory
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for file in sorted(folder.glob("[0-9]*.safetensors"), key=lambda file: int(file.stem)):
    began, said, code = time.process_time(), "", 0
    try:
        model, tokenizer = minigpt.checkpoints.checkpoint.load_checkpoint(file)
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64))
        tokenizer.decode(tokenizer.encode("a"))
    except BaseException as error:
        said, code = minigpt.utils.cli.explain(error)
    print(json.dumps([said, code, time.process_time() - began]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files, numbered, and a good one."""
    folder = tmp_path_factory.mktemp("hostile")
    for number, (build, _) in enumerate(FILES.values()):
        (folder / f"{number}.safetensors").write_bytes(build())
    (folder / "good.safetensors").write_bytes(saved(good()))
    return folder


@pytest.fixture(scope="module")
def verdicts(folder: Path) -> dict[str, tuple[str, int, float]]:
    """What a process with little memory says of each file: its line, its exit code, its seconds."""
    command = [sys.executable, "-c", CHILD, str(folder), str(MEMORY)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(FILES), (list(FILES)[len(lines)], done.returncode, done.stderr[-2000:])
    return dict(zip(FILES, lines, strict=True))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to know the size of a process")
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_in_a_line_or_is_harmless(
    name: str, verdicts: dict[str, tuple[str, int, float]], folder: Path
):
    said, code, seconds = verdicts[name]
    assert seconds < SECONDS
    if name in LOADED:
        assert (said, code) == ("", 0)
    else:
        assert code == 2, said
        assert said.startswith("error: ")
        assert FILES[name][1] in said
        assert len(said) < 2000
        assert said.isprintable()
    assert not (folder / "canary").exists()


CALLED = """
import contextlib, io, json, resource, runpy, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import matplotlib.pyplot, minigpt.checkpoints.checkpoint, minigpt.console
import minigpt.interpret.plots, minigpt.interpret.page, minigpt.interpret.head_stats
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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to know the size of a process")
@pytest.mark.parametrize("script", ["sample.py", "attention.py"])
def test_a_program_refuses_a_hostile_file_in_a_line(script: str, folder: Path):
    files = [name for name in FILES if name not in LOADED]
    command = [sys.executable, "-c", CALLED, str(2 * MEMORY), str(SCRIPTS / script)]
    command += [str(folder / f"{list(FILES).index(name)}.safetensors") for name in (*files, "a good one")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    *refused, (code, _) = map(json.loads, done.stdout.splitlines())
    assert code == 0
    for name, (code, said) in zip(files, refused, strict=True):
        assert (code, said.count("\n")) == (2, 1), (name, said)
        assert "Traceback" not in said
    assert not (folder / "canary").exists()


RESUMED = ["a shell", "bytes that double", "a key that takes forever", "tuples that unfold", "a bomb"]


@pytest.mark.parametrize("name", RESUMED)
def test_training_does_not_go_on_from_a_hostile_file(
    name: str, train: Callable[..., SimpleNamespace], folder: Path, tmp_path: Path
):
    with pytest.raises(UserError, match=r"\.safetensors is not a"):
        train(f"resume={folder}/{list(FILES).index(name)}.safetensors")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.slow
def test_a_training_that_was_to_go_on_from_a_hostile_file_ends_in_a_line(
    launch: Callable[..., Any], folder: Path, tmp_path: Path
):
    file = folder / f"{list(FILES).index('a shell')}.safetensors"
    ended = launch("train.py", f"resume={file}", f"hydra.run.dir={tmp_path}/run", cwd=tmp_path)
    assert ended.returncode == 2
    assert re.fullmatch(rf"error: {file} is not a checkpoint.*\n", ended.stderr)
    assert not list(tmp_path.rglob("canary"))


def test_a_configuration_inside_a_checkpoint_is_data(launch: Callable[..., Any], tmp_path: Path):
    """What a checkpoint says of the text that it was trained on is looked up, not carried out."""
    content = good()
    content["minigpt"]["config"] = {
        "data": {"_target_": "os.system", "folder": "data", "source": "${oc.env:HOME}", "train_bin": None}
        | dict.fromkeys(("data_path", "path", "val_path", "name"), "touch canary")
        | {"split": "fraction", "val_fraction": 0.1},
        "tokenizer": {"_target_": "os.system", "name": "touch canary"},
    }
    (tmp_path / "a.safetensors").write_bytes(saved(content))
    drawn = ["--prompt", "aa", "--ablation", "v.png"]
    ended = launch("attention.py", "a.safetensors", *drawn, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "canary").exists()


def test_a_checkpoint_has_nothing_fetched(tmp_path: Path):
    """The server that it names is asked for nothing, and no file is written where it says."""
    content = good()
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/evil.txt"
        named = {"source": "download", "name": "../evil", "url": url, "sha256": "0" * 64, "characters": 9}
        paths = dict.fromkeys(("path", "val_path", "train_bin", "val_bin"))
        settings = {"field": "text", "split": "fraction", "val_fraction": 0.1, "shard_tokens": 1000, "processes": 1}
        data = {"folder": str(tmp_path / "data"), **named, **paths, **settings}
        content["minigpt"]["config"] = {"data": data, "tokenizer": {"name": "char"}}
        (tmp_path / "a.safetensors").write_bytes(saved(content))
        with pytest.raises(UserError, match="are not in"):
            validation_batches(tmp_path / "a.safetensors", load_checkpoint(tmp_path / "a.safetensors")[0])
        assert not select.select([server], [], [], 0)[0]
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
