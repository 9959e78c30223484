"""Weights & Biases with its real client: offline runs, and servers that do not answer as they should."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wandb_records
from robustness.faults.server import serve


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of W&B but those of a test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


@pytest.mark.usefixtures("logged_out")
def test_an_offline_run_holds_curves_config_samples_and_summary(train: Callable[..., Any], capfd: Any) -> None:
    folder = train("logger=wandb", "logger.wandb.tags=[fox]").folder
    (output,) = (line for line in capfd.readouterr().err.splitlines() if "wandb" in line)
    (offline,) = (folder / "wandb").glob("offline-run-*")
    assert output.endswith(f"wandb sync {offline}")

    everything = wandb_records(folder)
    contents = json.dumps(everything)
    history = [record["history"] for record in everything if record["type"] == "history"]
    assert len(history) >= 4
    for name in ("train_loss", "val_loss", "val_bits_per_byte", "learning_rate", "grad_norm", "tokens_per_second"):
        assert any(name in json.dumps(row) for row in history), name
    summary = json.loads((folder / "summary.json").read_text())
    for wanted in ("best_val_loss", summary["corpus_sha256"], "samples", "n_embd", "fox", "completed"):
        assert wanted in contents, wanted


@pytest.mark.slow
@pytest.mark.usefixtures("logged_out")
def test_a_run_that_resumes_is_the_same_run_there_and_its_curves_do_not_overlap(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for more in ("max_steps=10", "resume=auto"):
        done = launch("train.py", "logger=wandb", f"hydra.run.dir={folder}", more)
        assert done.returncode == 0, done.stderr
    first, second = sorted((folder / "wandb").glob("offline-run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    steps = [
        record["history"]["item"]["trainer/global_step"]
        for part in (0, 1)
        for record in wandb_records(folder, part)
        if record["type"] == "history" and "tokens" in record["history"]["item"]
    ]
    assert steps == [5, 10, 15, 20]


@pytest.fixture(params=["nobody", "hang", "error"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that does not answer as it should, and a key for it."""
    with serve() as http:
        http.fault = request.param
        port = 9 if request.param == "nobody" else http.server_port
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_a_dead_server_neither_stops_a_run_nor_loses_its_curves(launch: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = launch("train.py", "logger=wandb", f"hydra.run.dir={folder}")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "wandb sync" in result.stderr
    assert (folder / "metrics.csv").read_text().count("\n") == 7
    assert any(record["type"] == "history" for record in wandb_records(folder))


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_starting_offline_takes_no_longer_than_its_timeout(tmp_path: Path) -> None:
    options = f"folder={str(tmp_path)!r}, project='p', entity=None, name=None, group=None, tags=[], timeout=10"
    script = "import time, wandb; from minigpt.runs.wandb_logger import wandb_logger; start = time.monotonic()\n"
    script += f"wandb_logger({options}).finish({{}}); print(time.monotonic() - start)"
    start = time.monotonic()
    waited = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert float(waited) < 10
    assert time.monotonic() - start < 60  # nor does the process hang when it ends
