"""What the scripts refuse: one clear line on stderr, exit code 2, nothing on stdout, and nothing half-written.

A row is a command line in an empty folder with the files of `odd_files`, and a part of its error. In a command line,
RUN is the folder of a small run of `train.py`, TEXT its text, and GPT2 the folder of a model of Hugging Face.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import one_line

REFUSED = {
    # train.py: settings and data
    "train.py model=nanoo": "model=nanoo does not exist (did you mean nano?); model= takes baby,",
    "train.py data.path=latin.txt": "latin.txt is not UTF-8 text: bad byte at offset 3",
    "train.py data.path=short.txt": "a window needs model.block_size + 1 = 17",
    "train.py data.folder=latin.txt/data": "not a directory",
    "train.py callbacks.samples.top_k=0": "callbacks.samples.top_k must be an integer",
    "train.py callbacks.samples.prompt=Zebra": "the tokenizer has no id for 'Z'",
    # train.py: resume, init_from, plans
    # train.py -m, sweep_report.py
    "train.py tokenizer=char,bpe tokenizer.vocab_size=512 -m": "does not exist here; it belongs to tokenizer=bpe",
    "train.py model.n_hed=2,4 -m": "model.n_hed does not exist (did you mean model.n_head?)",
    "train.py model.n_embd=31,33 -m": "no point of the sweep is possible: model.n_embd must be divisible by",
    "train.py seed=range(3,3) -m": "the sweep is empty: seed has no values",
    "train.py seed=3 -m": "a sweep needs a setting with several values, such as model.n_head=2,4,8",
    "train.py seed=1,2 hydra.launcher.n_jobs=0 -m": "hydra.launcher.n_jobs must be an integer ≥ 1, or null, got 0",
    "train.py seed=1,2 hydra/sweeper=basic -m": "hydra/sweeper must be grid or optuna, got hydra._internal",
    "train.py seed=1,2 hydra.sweeper.prune=true eval_every=20 -m": "eval_every must be < 5 (max_steps / 4) with",
    "train.py seed=1,2 +sweep=wandb -m": "configs/sweep/wandb.yaml is for W&B's own agent",
    "train.py seed=1,2 +sweep=heads -m": "sweep=heads does not exist; sweep= takes heads_by_width, search",
    "train.py seed=1,2 logger=wandb +logger.wandb.id=fox -m": "logger.wandb.id must be null in a sweep, whose runs",
    "train.py seed=1,2 hydra/launcher=submitit_slurm trainer=ddp trainer.devices=2 -m": "devices must be 1 with",
    "train.py seed=1,2 hydra.sweep.dir=. -m": ". is not empty and holds no sweep; choose another folder with",
    "sweep_report.py latin.txt": "latin.txt is not a folder; give the folder of a sweep, such as runs/sweeps/latest",
    "sweep_report.py .": "holds no runs; give the folder of a sweep",
    "sweep_report.py RUN --along=lr": "--along=lr must be one numeric setting in which the runs differ; use one",
    "sweep_report.py RUN --out=latin.txt": "latin.txt: file exists; choose another folder",
    # prepare.py
    # sample.py
    # attention.py, export.py
    # serve.py
}
PLACES = {"RUN": "trained", "TEXT": "text", "GPT2": "gpt2_folder"}


@pytest.fixture
def odd_files(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    (tmp_path / "short.txt").write_text("too short")


@pytest.mark.parametrize("command", REFUSED)
def test_bad_input_is_one_line_and_leaves_nothing(
    command: str, odd_files: None, call: Callable[..., Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    expected = REFUSED[command]
    for name, fixture in PLACES.items():
        if name in command:
            place = request.getfixturevalue(fixture)
            command = command.replace(name, str(place() if fixture == "trained" else place))
    script, *arguments = shlex.split(command)
    before = {path.name for path in tmp_path.iterdir()}
    line = one_line(call(script, *arguments))
    assert line.startswith("error: ")
    assert expected in line
    assert {path.name for path in tmp_path.iterdir()} - before <= {"data", "runs"}
    assert not [path for path in (tmp_path / "runs").glob("*") if path.is_dir()]
