"""Benchmark data: tokenization, tokenizer training, the start on a large corpus, batches of a huge one."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, launch, ours, seconds, text_file, write_gigabyte

from minigpt.data.tokenizer import BPETokenizer, CharTokenizer

PREPARE = ROOT / "scripts" / "prepare.py"
MEGABYTES = 400  # of text for GPT-2's encoding
BATCHES = 300


def data(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return one row per round and one column per figure; 2 GB are prepared in the first round only."""
    text = text_file().read_text(encoding="utf-8")
    middle, giga = folder / "middle.txt", folder / "giga.txt"
    middle.write_text(text * (MEGABYTES * 1_000_000 // len(text)), encoding="utf-8")
    write_gigabyte(giga)
    from_giga = [f"data.path={giga}", f"data.folder={folder}", "data.val_fraction=0.0001"]
    launch([sys.executable, PREPARE, *from_giga])
    launch([*ours(folder / "warm"), "max_steps=1"])
    rows = []
    for i in range(args.rounds):
        row = characters(text) | {"bpe training, 4096 ids s": seconds(lambda: BPETokenizer.train([text], 4096))}
        row |= gpt2(middle, folder / f"gpt2-{i}")
        for name, settings in (("tiny", []), ("1 GB", from_giga)):
            run = folder / f"{name}{i}"
            command = [*ours(run), *settings, "max_steps=1", "log_every=1"]
            row[f"first step, {name} s"] = launch(command, watch=run / "metrics.csv").seconds
        row["first step, 1 GB later by s"] = row["first step, 1 GB s"] - row["first step, tiny s"]
        for name, tokens in (("1 MB", 10**6 // 2), ("1 GB", 10**9 // 2), ("1 TB", 10**12 // 2)):
            row[f"batch, {name} ms"] = batch(folder / f"{name}.bin", tokens)
        if i == 0:
            twice = folder / "twice"
            twice.mkdir()
            for copy in ("a.txt", "b.txt"):
                os.link(giga, twice / copy)
            settings = ["data=text", f"data.path={twice}", f"data.folder={folder}", "tokenizer=gpt2"]
            ran = launch([sys.executable, PREPARE, *settings])
            row |= {"gpt2, 2 GB s": ran.seconds, "gpt2, 2 GB, memory MB": ran.own_mb}
        rows.append(row)
    return rows


def characters(text: str) -> dict[str, float]:
    """Measure char tokenization on one core against the loop of nanoGPT's prepare.py."""
    tokenizer = CharTokenizer.of(text)
    ids = {character: i for i, character in enumerate(tokenizer.alphabet)}
    ours_s = seconds(lambda: tokenizer.encode(text), times=20)
    loop_s = seconds(lambda: np.array([ids[character] for character in text], dtype=np.uint16))
    megabytes = len(text.encode()) / 1e6
    return {"char MB/s": megabytes / ours_s, "char, loop MB/s": megabytes / loop_s, "char: ratio": loop_s / ours_s}


def gpt2(file: Path, folder: Path) -> dict[str, float]:
    """Measure GPT-2's encoding: tiktoken in one process, and prepare.py with all cores."""
    program = (
        "import sys, time, numpy, tiktoken; encoding = tiktoken.get_encoding('gpt2');"
        "text = open(sys.argv[1], encoding='utf-8').read(); start = time.perf_counter();"
        "[numpy.array(encoding.encode_ordinary(text[i:i + 1000000]), dtype=numpy.uint16)"
        " for i in range(0, len(text), 1000000)]; print(time.perf_counter() - start)"
    )
    alone = float(launch([sys.executable, "-c", program, file]).output)
    settings = ["data=text", f"data.path={file}", f"data.folder={folder}", "tokenizer=gpt2"]
    ours_s = launch([sys.executable, PREPARE, *settings]).seconds
    return {"gpt2, tiktoken s": alone, "gpt2, preparation from launch s": ours_s, "gpt2: ratio": alone / ours_s}


def batch(file: Path, n_tokens: int) -> float:
    """Return the median milliseconds per training batch of 12 windows of 64 tokens, read from a sparse file."""
    import torch

    from minigpt.data.batches import Batches, WindowOrder
    from minigpt.data.shards import local_shard
    from minigpt.data.token_files import Tokens

    file.touch()
    os.truncate(file, 2 * n_tokens)
    batches = Batches(
        Tokens([local_shard(file)], "uint16", 65),
        WindowOrder(n_tokens, 64, seed=0),
        batch_size=12,
        rank=0,
        world_size=1,
        first=lambda: 0,
        stop=BATCHES,
        repeat=0,
        device=torch.device("cpu"),
    )
    read = iter(batches)
    return 1000 * seconds(lambda: next(read), times=BATCHES)
