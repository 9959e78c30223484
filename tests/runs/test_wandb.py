"""Weights & Biases with its real client: offline runs, and servers that do not answer as they should."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from robustness.faults.server import serve
from small_runs import wandb_records

from minigpt.runs.wandb_logger import sync_command, wandb_logger
from minigpt.utils.cli import explain
from minigpt.utils.errors import UserError
from minigpt.utils.signals import Interrupted


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of W&B but those of a test."""
    # WANDB_SERVICE is of the client's process, which a test may end.
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


@pytest.mark.usefixtures("logged_out")
def test_an_offline_run_holds_curves_config_samples_and_summary(train: Callable[..., Any], capfd: Any) -> None:
    folder = train("logger=wandb", "logger.wandb.tags=[fox]").folder
    (output,) = (line for line in capfd.readouterr().err.splitlines() if "wandb" in line)
    assert output.endswith(f"wandb sync {folder}/wandb")

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


class End(Callback):
    """Ends a run at its seventh step, by an error or by a signal."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7 and self.how == "error":
            raise RuntimeError("lost")
        if batch_idx == 7:
            os.kill(os.getpid(), signal.Signals[self.how])


@pytest.mark.usefixtures("logged_out")
@pytest.mark.parametrize(
    ("how", "code"), [("error", 1), ("SIGUSR1", 75), pytest.param("SIGTERM", 143, marks=pytest.mark.slow)]
)
def test_a_run_that_does_not_complete_is_not_finished_there(
    train: Callable[..., Any], tmp_path: Path, how: str, code: int
) -> None:
    ending = ["+callbacks.end._target_=test_wandb.End", f"+callbacks.end.how={how}", "callbacks.samples=null"]
    with pytest.raises((RuntimeError, Interrupted)) as ended:
        train("logger=wandb", *ending)
    assert explain(ended.value)[1] == code
    records = wandb_records(tmp_path / "run")
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [code]
    assert any(record["type"] == "preempting" for record in records) == (how == "SIGUSR1")


OPTIONS: dict[str, Any] = {"project": "p", "name": None, "timeout": 10}


@pytest.mark.usefixtures("logged_out")
@pytest.mark.parametrize("how", [{"mode": "offline"}, {"offline": True}])
def test_options_of_the_command_line_are_honored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")  # which the command line overrides
    for given in ({"id": "fox-run-1", "resume": "must"}, {}):  # the id is that of the folder, if none is given
        logger = wandb_logger(tmp_path, **OPTIONS, **how, **given)
        assert logger
        settings = logger.experiment.settings
        assert (settings.run_id, settings.resume, settings.mode) == (
            "fox-run-1",
            given.get("resume", "allow"),
            "offline",
        )
        logger.finish({})


@pytest.mark.usefixtures("logged_out")
@pytest.mark.parametrize("option", ["save_dir", "dir", "log_model", "settings", "version"])
def test_an_option_that_cannot_be_honored_is_refused_in_one_line(tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match=rf"^logger\.wandb\.{option} is not an option; it takes .*, tags.*"):
        wandb_logger(tmp_path, **OPTIONS, **{option: "x"})


@pytest.mark.usefixtures("logged_out")
@pytest.mark.parametrize("wrong", [{"mode": "sometimes"}, {"mode": "offline", "resume": "x"}, {"id": "a/b"}])
def test_a_wrong_value_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^Weights & Biases cannot start: [^\n]*$"):
        wandb_logger(tmp_path, **OPTIONS, **wrong)


def test_the_printed_command_finds_all_parts_of_all_runs_of_a_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "it's a sweep"
    for run in ("lr=0.1", "lr=0.2,n=1", "."):
        for second in (1, 2):
            folder = sweep / run / f"wandb/offline-run-20260101_00000{second}-abc"
            folder.mkdir(parents=True)
            (folder / "run-abc.wandb").touch()
    for folder, parts in ((sweep, 2), (sweep / "lr=0.1", 2)):
        assert would_sync(sync_command(folder), tmp_path) == parts
    (sweep / "sweep.json").touch()
    assert would_sync(sync_command(sweep), tmp_path) == 6


def would_sync(command: str, cwd: Path) -> int:
    command = command.replace("wandb sync", f"{sys.executable} -m wandb sync --dry-run")
    output = subprocess.run(command, shell=True, cwd=cwd, capture_output=True, text=True, check=True).stderr
    return output.count("offline-run-")


@pytest.mark.slow
@pytest.mark.usefixtures("logged_out")
def test_rows_are_uploaded_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)

    def log(part: range, **options: Any) -> None:
        logger = wandb_logger(tmp_path, **OPTIONS, **options)
        assert logger
        for step in part:
            logger.log_metrics({"loss": 1.0}, step)
        logger.finish({})
        time.sleep(1.1)  # the names of parts have seconds

    def sync(*arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "wandb", "sync", *arguments], cwd=tmp_path, check=True)

    def steps(run: str) -> list[int]:
        return [row["trainer/global_step"] for _, row in sorted(server.history[run].items())]

    with serve() as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        log(range(4), id="fox", offline=True)
        log(range(4, 7), offline=True)
        sync(*shlex.split(sync_command(tmp_path))[2:])
        assert steps("fox") == [*range(7)]
        server.fault = "error"  # an outage
        log(range(7, 9), mode="online")
        server.fault = None
        assert steps("fox") == [*range(7)]
        sync("--include-online", "--include-synced", f"{tmp_path}/wandb")
        assert steps("fox") != [*range(9)]  # W&B appends the rows that the server has already; docs/reliability.md
        sync("--include-online", "--include-synced", "--id", "new", f"{tmp_path}/wandb")
        assert steps("new") == [*range(9)]


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
