"""The script that analyzes attention heads, from the command line."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import image
from tiny_models import ALPHABET, make_model, svg_texts

from minigpt.checkpoints.load import load_checkpoint, save_checkpoint
from minigpt.data.tokenizer import CharTokenizer

COLUMNS = ["entropy", "distance", "previous", "self", "first", "induction", "Δloss"]


@pytest.fixture
def shell(call: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Run the script in a folder that holds `model.safetensors`: three layers of two heads."""
    save_checkpoint(make_model(), CharTokenizer(ALPHABET), tmp_path / "model.safetensors")
    return partial(call, "attention.py")


BAD_INPUT = {
    "no prompt": ([], "--prompt must have at least 2 tokens, got 0"),
    "long prompt": (
        ["--prompt", "WhatWhatWhatWhatW"],
        "--prompt must have at most block_size=16 tokens, got 17; set --truncate",
    ),
    "head 3": (["--prompt", "What", "--head", "3"], "--head must be an integer in [1, 2], got 3"),
    "no folder": (["--prompt", "What", "--out", "no/a.png"], "--out must be in a folder that exists"),
    "a format": (["--prompt", "What", "--out", "a.txt"], "--out must be a file in .png, .pdf, .svg format, got a.txt"),
    "one name twice": (["--prompt", "What", "--ablation", "attention.png"], "--out, --ablation must be different"),
    "no corpus": (["--prompt", "What", "--ablation", "v.png"], "model.safetensors holds a model without its run; use"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_prints_one_line_and_writes_nothing(
    arguments: list[str], message: str, shell: Callable[..., Any], tmp_path: Path
) -> None:
    result = shell("model.safetensors", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_truncate_keeps_the_end_of_a_long_prompt(shell: Callable[..., Any], tmp_path: Path) -> None:
    long, end = "ROMEO" * 4 + "\nWhat", "OROMEOROMEO\nWhat"
    flags = ["--truncate", "--layer", "1", "--head", "1"]
    assert shell("model.safetensors", "--prompt", long, *flags, "--out", "cut.svg").returncode == 0
    assert shell("model.safetensors", "--prompt", end, *flags, "--out", "end.svg").returncode == 0
    assert svg_texts(tmp_path / "cut.svg") == svg_texts(tmp_path / "end.svg")
    assert svg_texts(tmp_path / "cut.svg").count("⏎") == 2  # one per axis


def test_maps_are_written_to_the_run_folder_or_beside_a_single_checkpoint(
    shell: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "best.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "prompt.txt").write_text("What")
    typed = shell("model.safetensors", "--prompt", "What", "--out", "typed.png")
    for run, folder in (("run", "run/"), ("model.safetensors", "")):
        result = shell(run, "--prompt-file", "prompt.txt")
        assert result.returncode == 0
        assert result.stderr.splitlines()[1] == f"wrote {folder}attention.png"
        assert result.stdout == typed.stdout


def test_a_trained_model_is_analyzed(
    train: Callable[..., Any], launch: Callable[..., Any], shell: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    trained = train(folder=tmp_path / "runs" / "first")
    flags = ["--prompt", "1: the\nfox", "--out", "a.png", "--ablation", "v.svg"]
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}  # lists the imports
    result = launch("attention.py", *flags, cwd=tmp_path, env=environment)  # the newest run
    assert result.returncode == 0, result.stderr
    assert "minigpt.interpret.heads" in result.stderr
    assert not re.search(r"\| +(lightning|wandb|hydra|matplotlib.pyplot)$", result.stderr, re.MULTILINE)
    assert [line for line in result.stderr.splitlines() if not line.startswith("import time:")] == [
        "loaded runs/first/checkpoints/best.safetensors",
        "wrote a.png",
        "wrote v.svg",
    ]
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["layer", "head", *COLUMNS, "name"]
    assert image.imread(tmp_path / "a.png").shape[0] > 400

    # The loss with all heads is the validation loss of the run.
    assert any(f"{trained.loss:.4f} with all" in text for text in svg_texts(tmp_path / "v.svg"))
    model, tokenizer = load_checkpoint(trained.folder)
    ids = tokenizer.encode(text.read_text())[18_000:]
    windows = torch.as_tensor(np.stack([ids[i : i + 17] for i in range(0, 2000 - 16, 16)])).long()
    with torch.no_grad():
        model.blocks[1].attention.out.weight[:, 16:] = 0  # layer 2, head 2
        expected = float(model(windows[:, :-1], windows[:, 1:])) - trained.loss
    assert float(rows[3].split()[8]) == pytest.approx(expected, abs=6e-4)

    # Missing token files are an error and are not written again.
    (tmp_path / "data").rename(tmp_path / "gone")
    result = shell(str(trained.folder), "--prompt", "fox", "--out", "again.png", "--ablation", "again.svg")
    assert result.returncode == 2
    assert "cannot be read: the token files of the run are not in " in result.stderr.splitlines()[-1]
    assert not (tmp_path / "again.svg").exists()
    assert not (tmp_path / "data").exists()


def test_ablation_reads_the_token_files_of_nanogpt(
    train: Callable[..., Any], shell: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    ids = np.frombuffer(text.read_bytes(), "uint8").astype("uint16")
    for name, part in (("train", ids[:18_000]), ("val", ids[18_000:])):
        part.tofile(tmp_path / f"{name}.bin")
    bins = [f"data.{name}_bin={tmp_path}/{name}.bin" for name in ("train", "val")]
    trained = train("data.path=null", "tokenizer=byte", *bins, folder=tmp_path / "run")
    flags = [str(trained.folder), "--prompt", "fox", "--out", "a.png", "--ablation", "v.svg"]
    files = sorted(tmp_path.rglob("*"))
    assert shell(*flags).returncode == 0
    assert any(f"{trained.loss:.4f} with all" in text for text in svg_texts(tmp_path / "v.svg"))
    assert sorted(tmp_path.rglob("*")) == sorted([*files, tmp_path / "a.png", tmp_path / "v.svg"])
