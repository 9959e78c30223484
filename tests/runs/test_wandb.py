"""Weights & Biases with its real client: offline runs, and servers that do not answer as they should."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from html import escape

import pytest
from hydra.errors import InstantiationException
from robustness.faults.server import serve
from small_runs import composed, rows, wandb_records

from minigpt.extras.playground.history import read_samples
from minigpt.runs.run_dir import read_summary
from minigpt.runs.trainer import instantiate_group
from minigpt.runs.wandb_logger import sync_command
from minigpt.utils.signals import Interrupted

UNKNOWN = ("save_dir", "dir", "settings")  # of Lightning's logger, and of wandb.init, that the run sets


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    """No settings of W&B but those of a test."""
    # WANDB_SERVICE is of the client's process, which a test may end.
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def end(monkeypatch, how):
    """End runs at their 13th step."""
    hook = "minigpt.language_model.LanguageModel.on_train_batch_start"
    monkeypatch.setattr(hook, lambda module, batch, batch_idx: how() if batch_idx == 12 else None)


def contents(records, kind):
    return [record[kind] for record in records if record["type"] == kind]


@pytest.mark.usefixtures("logged_out")
def test_an_offline_run_holds_curves_config_samples_summary_and_how_it_ended(train, tmp_path, capfd, monkeypatch):
    end(monkeypatch, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train("logger=wandb", "callbacks.samples.max_new_tokens=20")
    (output,) = (line for line in capfd.readouterr().err.splitlines() if "wandb" in line)
    assert output.endswith(f"wandb sync {tmp_path}/run/wandb")
    records = wandb_records(tmp_path / "run")
    (metric,) = contents(records, "metric")
    assert (metric["glob_name"], metric["step_metric"]) == ("*", "trainer/global_step")  # the x axis of every curve
    history = [row["item"] for row in contents(records, "history")]
    metrics = rows(tmp_path / "run")
    for name in ("train_loss", "val_loss", "val_bits_per_byte", "learning_rate", "grad_norm", "tokens"):
        curve = {row["trainer/global_step"]: row[name] for row in history if name in row}
        assert curve == {int(row["step"]): pytest.approx(float(row[name])) for row in metrics if row[name]}
    ((_, text),) = read_samples(tmp_path / "run")
    (sample,) = tmp_path.glob("run/wandb/latest-run/files/media/html/samples_*.html")
    assert escape(text) in sample.read_text()
    assert '"n_embd"' in json.dumps(contents(records, "config"))
    summary = read_summary(tmp_path / "run")
    for wanted in (summary["corpus_sha256"], "best_val_loss", "failed"):
        assert wanted in json.dumps(contents(records, "summary"))
    assert [record["exit_code"] for record in contents(records, "exit")] == [1]
    assert not contents(records, "preempting")


@pytest.mark.usefixtures("logged_out")
def test_a_run_that_is_requeued_is_the_same_run_there_and_its_curves_do_not_overlap(train, tmp_path, monkeypatch):
    end(monkeypatch, lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(Interrupted):
        train("logger=wandb")
    time.sleep(1.1)  # the names of parts have seconds
    train("logger=wandb", "resume=auto")
    names = sorted(file.name.rpartition("-")[2] for file in (tmp_path / "run/wandb").glob("offline-run-*"))
    assert (len(names), len(set(names))) == (2, 1)
    first, second = (wandb_records(tmp_path / "run", part) for part in (0, 1))
    rows = [row["item"] for row in contents(first + second, "history")]
    assert [row["trainer/global_step"] for row in rows if "tokens" in row] == [5, 10, 15, 20]
    assert [record["exit_code"] for record in contents(first + second, "exit")] == [75, 0]
    assert (len(contents(first, "preempting")), len(contents(second, "preempting"))) == (1, 0)


def logger_of(folder, *options):
    """Return the logger of a run with these options."""
    given = (option.replace("wandb.", "logger.wandb.", 1) for option in options)
    (logger,) = instantiate_group("logger", composed("logger=wandb", f"logger.wandb.folder={folder}", *given).logger)
    return logger


@pytest.mark.usefixtures("logged_out")
def test_options_of_the_command_line_are_honored(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")  # which the command line overrides
    more = ["wandb.project=p", "wandb.entity=e", "wandb.group=g", "wandb.tags=[t]", "wandb.name=n", "wandb.timeout=20"]
    for given in ([*more, "+wandb.id=fox-run-1", "+wandb.resume=must"], []):  # the id is that of the folder
        logger = logger_of(os.path.relpath(tmp_path), "+wandb.mode=offline", *given)
        found = logger.experiment.settings
        assert (found.run_id, found.resume, found.mode) == ("fox-run-1", "must" if given else "allow", "offline")
        names = found.project, found.entity, found.run_group, found.run_tags, found.run_name
        assert names == (("p", "e", "g", ("t",), "n") if given else ("minigpt", None, None, (), tmp_path.name))
        waits = found.init_timeout, found.login_timeout, found.finish_timeout
        assert waits == pytest.approx((6, 6, 20) if given else (3, 3, 10))
        logger.finish({})
        monkeypatch.chdir(tmp_path.parent)  # wandb's own process stays where it was
    assert contents(wandb_records(tmp_path, -1), "exit")


@pytest.mark.usefixtures("logged_out")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *((f"+wandb.{name}=x", rf"logger\.wandb\.{name} is not an option; it takes .*, tags.*") for name in UNKNOWN),
        ("+wandb.mode=off", r"logger\.wandb\.mode or WANDB_MODE must be one of online, offline, disabled, .*, got off"),
        ("+wandb.mode=offline +wandb.resume=x", "Weights & Biases cannot start: [^\n]*$"),
    ],
)
def test_an_option_that_cannot_be_honored_is_refused_in_one_line(tmp_path, wrong, message):
    with pytest.raises(InstantiationException) as refused:
        logger_of(tmp_path, *wrong.split())
    assert re.match(message, str(refused.value.__cause__))


def test_the_printed_command_finds_all_parts_of_all_runs_of_a_sweep(tmp_path):
    sweep = tmp_path / "it's a sweep"
    for run in ("lr=0.1", "lr=0.2,n=1", "."):
        for second in (1, 2):
            folder = sweep / run / f"wandb/offline-run-20260101_00000{second}-abc"
            folder.mkdir(parents=True)
            (folder / "run-abc.wandb").touch()
    for parts in (2, 6):
        command = sync_command(sweep).replace("wandb sync", f"{sys.executable} -m wandb sync --dry-run")
        output = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert output.stderr.count("offline-run-") == parts
        (sweep / "sweep.json").touch()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nobody", "hang", "error"])
def test_a_dead_server_neither_stops_a_run_nor_loses_its_curves(launch, tmp_path, fault):
    with serve() as server:
        server.fault = fault
        port = 9 if fault == "nobody" else server.server_port
        env = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0" * 40}
        result = launch("train.py", "logger=wandb", f"hydra.run.dir={tmp_path}/run", env=env)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "wandb sync" in result.stderr
    assert len(rows(tmp_path / "run")) == 6
    assert contents(wandb_records(tmp_path / "run"), "history")
