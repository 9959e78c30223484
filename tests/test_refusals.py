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
    # prepare.py
    # sample.py
    # attention.py, export.py
    # serve.py
    # minigpt
    "__main__.py sweep_report": "minigpt sweep_report does not exist (did you mean sweep-report?); ",
    "__main__.py sample --top-k 0": "--top-k must be an integer ≥ 1, got 0",
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
