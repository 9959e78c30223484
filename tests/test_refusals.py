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
    "train.py resume=RUN": "is at step 20 of 20; raise max_steps to continue",
    "train.py resume=RUN pause_at=10": "is at step 20 of 10; raise pause_at to continue",
    "train.py resume=RUN max_steps=30 model.n_embd=64": "in model.n_embd (32 in the checkpoint, 64 now)",
    "train.py resume=RUN max_steps=30 tokenizer=byte": "the tokenizer (char ",
    "train.py resume=RUN max_steps=30 tokenizer=byte data.path=RUN/summary.json": "the corpus (",
    "train.py resume=RUN max_steps=30 optimizer=muon": "optimizer._target_ (minigpt.optim.adamw in the checkpoint, ",
    "train.py resume=RUN max_steps=30 data.batch_size=4": "data.batch_size (8 in the checkpoint, 4 now)",
    "train.py resume=RUN max_steps=30 trainer.accumulate_grad_batches=2": "accumulate_grad_batches (1 in the checkp",
    "train.py resume=RUN max_steps=30 data.val_fraction=0.2": "data.val_fraction (0.1 in the checkpoint, 0.2 now)",
    "train.py resume=RUN max_steps=30 data.split=document data.separator=lazy": "data.split (fraction in the ch",
    "train.py resume=RUN max_steps=30 eval_batches=3": "eval_batches (None in the checkpoint, 3 now)",
    "train.py resume=RUN eval_batches=3 data.eval_batch_size=9": "data.eval_batch_size (64 in the checkpoint, 9 now)",
    "train.py resume=missing": "missing does not exist; give a run folder or a checkpoint file",
    "train.py callbacks.checkpoint.save_top_k=0": "save_top_k must be an integer ≥ 1, got 0",
    "train.py callbacks=attention callbacks.attention.text=''": "callbacks.attention.text must be a text with at least",
    "train.py init_from=RUN model.n_layer=3": "model.n_layer is that of init_from; only model.block_size, model.dropou",
    "train.py init_from=RUN model=nano model.block_size=15": "model.n_layer must be 2, as in init_from=",
    "train.py init_from=RUN model.block_size=33": "model.block_size must be an integer in [1, 16], got 33",
    "train.py init_from=RUN tokenizer=char": "tokenizer must be one of pretrained, got char; a run with init_from has",
    "train.py init_from=null model=pretrained": "model=pretrained and tokenizer=pretrained need init_from=",
    "train.py init_from=no/such/model": "no/such/model does not exist; give a run folder, a checkpoint, or a folder or",
    # train.py -m, sweep_report.py
    # prepare.py
    # sample.py
    # attention.py, export.py
    "attention.py RUN": "--prompt must have at least 2 tokens, got 0",
    "attention.py RUN --prompt 'the quick brown f'": "--prompt must have at most block_size=16 tokens, got 17; set",
    "attention.py RUN --prompt the --head 3 --out a.png": "--head must be an integer in [1, 2], got 3",
    "attention.py RUN --prompt the --layer 0 --out a.png": "--layer must be an integer in [1, 2], got 0",
    "attention.py RUN --prompt the --out no/a.png": "--out must be in a folder that exists",
    "attention.py RUN --prompt the --out a.txt": "--out must be a file in .png, .pdf, .svg format, got a.txt",
    "attention.py RUN --prompt the --ablation .": "--ablation must be a file in .png, .pdf, .svg format, got .",
    "attention.py RUN --prompt the --out a.png --ablation ./a.png": "--out, --ablation must be different files",
    "export.py --to huggingface --out .": "--out must be a path that does not exist yet, got .",
    "export.py --to huggingface --out new": "no run with a checkpoint in runs/",
    "export.py . --to huggingface --out new": ". holds no checkpoints/best.safetensors",
    "export.py --to safetensors --out new --weights float16": "--weights must be left out without --to html",
    "export.py --to safetensors --out new --snapshots": "--snapshots must be left out without --to html",
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
