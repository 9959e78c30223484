"""Fuzz every reader of untrusted files: python tests/robustness/fuzz.py --inputs 100000

Valid files are mutated from a seed, and passed to the reader that a script would use. A reader
accepts an input, or refuses it with an error that is printed as one line with exit code 2; anything
else is a crash.
"""

import argparse
import copy
import io
import json
import math
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from minigpt.checkpoints.format import checksum, contents, write
from minigpt.checkpoints.load import load_checkpoint
from minigpt.data import token_files as corpus
from minigpt.data import tokenizer as tokenizers
from minigpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from minigpt.extras.corpora import token_bins
from minigpt.extras.huggingface.tokenizer_json import HuggingFaceTokenizer, tokenizer_files
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.sweeps import results as sweep
from minigpt.utils.cli import explain

DEEP = 100_000
NUMBERS = [0, -1, 1, 2, 3.5, 1 << 31, 1 << 63, -(1 << 63), 10**30, math.nan, math.inf, -math.inf]
TEXTS = ["", "x", "\x00", "\x1b[2J", "é", "\ud800", "𝄞", "../../x", "nan", "1e999"]
TEXTS += ["${oc.env:HOME}", "x" * 10_000]
HOLDERS = [[], {}, [[]], [1, 2], ["a", "b"], {"a": 1}, {"": {}}, {"_target_": "os.system"}]
ODD: list[Any] = [None, True, False, *NUMBERS, *TEXTS, *HOLDERS]
BYTES = [b"\x00", b"\xff", b"\x80", b"\n", b",", b"{", b"[", b'"', b"\\", b"-", b"9", b"e", b"."]
BYTES += [b"'", b":", b"PK"]


def fuzz(name: str, inputs: int, seed: int = 0) -> Counter[str]:
    """Pass mutated inputs to a reader. Count those that it accepts and refuses.

    Raises:
        AssertionError: the reader crashed.
    """
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(inputs):
            chance = random.Random(f"{seed} {name} {number}")
            try:
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    READERS[name][1](chance, Path(folder))
                counts["accepted"] += 1
            except BaseException as error:
                line, code = explain(error)
                crash = f"{name}, input {number}: {line:.300}"
                assert (code, line.isprintable()) == (2, True), crash
                counts["refused"] += 1
    return counts


def mutate(chance: random.Random, values: Any) -> Any:
    """Copy a structure, and replace, remove or add one to three values."""
    values = copy.deepcopy(values)
    for _ in range(chance.randint(1, 3)):
        places = list(_places(values))
        if not places:
            return chance.choice(ODD)
        holder, key = chance.choice(places)
        kind = chance.random()
        if kind < 0.7:
            holder[key] = copy.deepcopy(chance.choice(ODD))
        elif kind < 0.8:
            del holder[key]
        elif kind < 0.9 and isinstance(holder, dict):
            holder[chance.choice(["", "x", "_target_", "\x1b"])] = chance.choice(ODD)
        elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] + chance.choice([-1, 1, 1 << 40])
        else:
            holder[key] = copy.deepcopy(chance.choice(places)[0])
    return values


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = ()
    if isinstance(values, dict):
        keys = list(values)
    elif isinstance(values, list):
        keys = range(len(values))
    for key in keys:
        yield values, key
        yield from _places(values[key])


def mutate_bytes(chance: random.Random, content: bytes) -> bytes:
    """Replace, insert, remove or duplicate some bytes."""
    content = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content) + 1)
        kind = chance.random()
        if kind < 0.4:
            content[at : at + 1] = bytes([chance.randrange(256)])
        elif kind < 0.7:
            content[at:at] = chance.choice(BYTES) * chance.choice([1, 1, 1, 40])
        elif kind < 0.85:
            del content[at : at + chance.choice([1, 2, 30])]
        elif kind < 0.95:
            content[at:at] = content[at : at + chance.choice([4, 64])]
        else:
            del content[at:]
    return bytes(content)


def as_json(chance: random.Random, values: Any) -> bytes:
    """Return JSON with odd values or odd bytes."""
    kind = chance.random()
    written = json.dumps(mutate(chance, values) if kind < 0.7 else values).encode()
    if kind > 0.99:
        return b"[" * DEEP + b"]" * DEEP
    return written if kind < 0.7 else mutate_bytes(chance, written)


# Checkpoints.

ALPHABET = "\n abcdeé€"
TOKENS = [*(bytes([i]) for i in range(256)), b"ab", None]
MADE = (
    CharTokenizer(ALPHABET),
    ByteTokenizer(),
    BPETokenizer("bpe", TOKENS, {"<|endoftext|>": 257}),
    HuggingFaceTokenizer(json.dumps(tokenizer_files(ByteTokenizer())["tokenizer.json"]), 0),
)
TOKENIZERS = [made.to_dict() for made in MADE]


@cache
def _checkpoint() -> bytes:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=4, vocab_size=len(ALPHABET), n_layer=1, n_head=1, n_embd=4))
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    content = {"state_dict": weights, "global_step": 3}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.safetensors")
        write(content | contents(model.config, CharTokenizer(ALPHABET), config={}), file)
        return file.read_bytes()


def checkpoint(chance: random.Random, folder: Path) -> None:
    """Mutate the bytes of a checkpoint, its header, or its JSON (with a correct checksum)."""
    path = folder / "a.safetensors"
    whole = _checkpoint()
    kind = chance.random()
    path.write_bytes(whole)
    start = 8 + int.from_bytes(whole[:8], "little")
    if kind < 0.3:
        path.write_bytes(mutate_bytes(chance, whole))
    elif kind < 0.6:
        header = json.loads(whole[8:start])
        header = as_json(chance, header) if kind < 0.5 else mutate_bytes(chance, whole[8:start])
        path.write_bytes(len(header).to_bytes(8, "little") + header + whole[start:])
    else:
        with safe_open(path, framework="pt") as file:
            text = file.metadata()["minigpt"]
            tensors = file.get_tensors()
        text = as_json(chance, json.loads(text)).decode("utf-8", "replace")
        save_file(tensors, path, {"minigpt": text, "crc32": checksum(text, tensors)})
    model, tokenizer = load_checkpoint(path)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64))
    tokenizer.decode(tokenizer.encode("a"))


def tokenizer(chance: random.Random, folder: Path) -> None:
    """Mutate the description of a tokenizer."""
    values = mutate(chance, chance.choice(TOKENIZERS))
    text = "".join(chance.choice(" abé€\n\x00\ud800𝄞") for _ in range(9))
    made = tokenizers.from_dict(values)
    made.decode(made.encode(text))
    made.decode_bytes([0, made.vocab_size - 1, made.vocab_size, -1])
    tokenizers.from_dict(made.to_dict())


# Token files.

META = {
    "format": corpus.FORMAT,
    "name": "x",
    "sha256": "ab",
    "dtype": "uint16",
    "train": {"documents": 1, "bytes": 1500, "tokens": 1500},
    "val": {"documents": 1, "bytes": 40, "tokens": 40},
    "provenance": {"duplicates": 0},
    "tokenizer": TOKENIZERS[0],
}


def meta(chance: random.Random, folder: Path) -> None:
    """Mutate the meta.json of token files."""
    (folder / "train.bin").write_bytes(bytes(3000))
    (folder / "val.bin").write_bytes(bytes(80))
    (folder / "meta.json").write_bytes(as_json(chance, META))
    _use(corpus.load(folder))


def bins(chance: random.Random, folder: Path) -> None:
    """Mutate token files of other tools."""
    files = [folder / "train.bin", folder / "val.bin"]
    for file in files:
        content = np.arange(chance.randrange(60), dtype=np.uint16).tobytes()
        file.write_bytes(mutate_bytes(chance, content) if chance.random() < 0.9 else b"")
    made = tokenizers.from_dict(chance.choice(TOKENIZERS))
    named = {"train_bin": str(files[0]), "val_bin": [str(files[1])]}
    _use(token_bins.load_bins(named, made, folder / "known.json"))


def _use(read: corpus.Corpus) -> None:
    read.check_length(4)
    assert read.val.bytes / read.val.tokens >= 0
    for split in ("train", "val"):
        tokens = read.tokens(split)
        tokens[0:8]
        tokens[np.arange(len(tokens) - 5, len(tokens))[None]]


# Run folders and sweeps.

ROWS = "step,tokens,seconds,train_loss,val_loss,tokens_per_second,flops_per_second\n"
ROWS += "5,640,0.1,3.2,3.1,6400,1e9\n"
ENDED = {"status": "completed", "reason": ""}
SUMMARY = {**ENDED, "best_val_loss": 1.5, "steps": 5, "params": 99, "seconds": 1.0}
POINT = {"folder": "run", "overrides": {"optimizer.lr": "0.1"}, **ENDED, "identity": "ab"}
POINT |= {"params": 99, "max_steps": 5}
OTHER_POINT = POINT | {"folder": "other", "overrides": {"optimizer.lr": "0.2"}}
PLAN = {"fixed": ["seed=1"], "points": [POINT, OTHER_POINT]}
OVERRIDES = b"- optimizer.lr=0.1\n- model.n_layer=2\n"
ODD_YAML = [
    b"!!python/object/apply:os.system [x]\n",
    b"&a [*a]\n",
    b"- &a [*a, *a]\n",
    b"? [a]: b\n",
]


def run_folder(chance: random.Random, folder: Path) -> None:
    """Mutate the metrics and summary of a run, and its overrides or the plan of its sweep."""
    from minigpt.sweeps.answer import answer
    from minigpt.sweeps.ranking import ranked
    from minigpt.sweeps.report import print_table, table_of_rows, write_csv

    run = folder / "run"
    plan = folder / "sweep.json"
    (run / ".hydra").mkdir(parents=True, exist_ok=True)
    (run / "metrics.csv").write_bytes(mutate_bytes(chance, ROWS.encode()))
    (run / "summary.json").write_bytes(as_json(chance, SUMMARY))
    plan.unlink(missing_ok=True)
    if chance.random() < 0.6:
        plan.write_bytes(as_json(chance, PLAN))
    else:
        content = chance.choice([mutate_bytes(chance, OVERRIDES), *ODD_YAML])
        deep = b"[" * 5000  # the parser takes its time
        (run / ".hydra" / "overrides.yaml").write_bytes(content if chance.random() < 0.99 else deep)
    table = ranked(sweep.read_sweep(folder))
    assert answer(table)
    write_csv(folder / "table.csv", *table_of_rows(table))
    with redirect_stdout(io.StringIO()) as out:
        print_table(table)
    assert all(character.isprintable() or character == "\n" for character in out.getvalue())


# With their shares of all inputs
READERS: dict[str, tuple[float, Callable[[random.Random, Path], None]]] = {
    "checkpoint": (0.13, checkpoint),
    "tokenizer": (0.38, tokenizer),
    "meta.json": (0.15, meta),
    "token files": (0.15, bins),
    "run folder": (0.19, run_folder),
}


def main() -> None:
    """Fuzz every reader, and print the counts of its inputs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, (share, _) in READERS.items():
        counts = fuzz(name, max(1, int(args.inputs * share)), args.seed)
        print(f"{name}: {counts['accepted']} accepted, {counts['refused']} refused", flush=True)


if __name__ == "__main__":
    main()
