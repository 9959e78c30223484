"""Weights & Biases with its real client: offline runs, servers that do not answer, options."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from html import escape

import pytest
import wandb
from hydra.errors import InstantiationException
from PIL import Image
from robustness.faults.server import serve
from small_runs import composed, rows, wandb_records

from minigpt.extras.playground.history import read_samples
from minigpt.runs.run_dir import PLAN, read_summary
from minigpt.runs.trainer import instantiate_group
from minigpt.runs.wandb_logger import sync_command, wandb_logger
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import publish
from minigpt.sweeps.results import Point
from minigpt.utils.signals import Interrupted


def end(monkeypatch, step, how):
    hook = "minigpt.training.language_model.LanguageModel.on_train_batch_start"
    monkeypatch.setattr(hook, lambda module, batch, i: how() if i == step else None)


def wait_for_a_new_second():
    # The names of parts have seconds
    time.sleep(1.01 - time.time() % 1)


def contents(records, kind):
    return [record[kind] for record in records if record["type"] == kind]


@pytest.mark.usefixtures("logged_out")
def test_an_offline_run_holds_curves_config_samples_summary_and_how_each_job_ended(
    train, tmp_path, capfd, monkeypatch
):
    # A run that is requeued, and then fails: it is the same run, and its curves do not overlap
    line = ["logger=wandb", "callbacks.samples.max_new_tokens=20"]
    end(monkeypatch, 12, lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(Interrupted):
        train(*line)
    printed = capfd.readouterr().err.partition("resume with:")[0].splitlines()
    (output,) = (text for text in printed if "wandb" in text)
    assert output.endswith("wandb sync run/wandb")
    wait_for_a_new_second()
    end(monkeypatch, 17, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(*line, "resume=auto")
    # Both jobs are parts of one run
    parts = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert (len(parts), len({part.name.rpartition("-")[2] for part in parts})) == (2, 1)
    first, second = (wandb_records(tmp_path / "run", part) for part in (0, 1))
    both = first + second
    assert [record["exit_code"] for record in contents(both, "exit")] == [75, 1]
    assert (len(contents(first, "preempting")), len(contents(second, "preempting"))) == (1, 0)
    # Each curve is that of metrics.csv, over optimizer steps
    for metric in contents(both, "metric"):
        assert (metric["glob_name"], metric["step_metric"]) == ("*", "trainer/global_step")
    history = [row["item"] for row in contents(both, "history")]
    metrics = rows(tmp_path / "run")
    for name in ("train_loss", "val_loss", "val_bits_per_byte", "learning_rate", "grad_norm"):
        curve = [(row["trainer/global_step"], row[name]) for row in history if name in row]
        expected = [(int(row["step"]), float(row[name])) for row in metrics if row[name]]
        assert curve == [(step, pytest.approx(value)) for step, value in expected]
    assert [row["trainer/global_step"] for row in history if "tokens" in row] == [5, 10, 15]
    # The sample, the configuration and the summary
    ((_, text),) = read_samples(tmp_path / "run")
    (sample,) = parts[0].glob("files/media/html/samples_*.html")
    assert escape(text) in sample.read_text(encoding="utf-8")
    assert '"n_embd"' in json.dumps(contents(first, "config"))
    summary = read_summary(tmp_path / "run")
    for wanted in (summary["corpus_sha256"], "best_val_loss", "failed"):
        assert wanted in json.dumps(contents(second, "summary"))


@pytest.mark.usefixtures("logged_out")
def test_a_run_of_the_user_goes_on_beside_those_of_minigpt_which_have_their_own_settings(
    train, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_RUN_ID", "users")  # taken, then
    variables = {name for name in os.environ if name.startswith("WANDB_")}
    mine = wandb.init(mode="offline", dir=tmp_path, project="mine", name="mine", config={"rate": 7})
    wandb.log({"before": 1})
    # A run, and the summary of a sweep
    short = ["logger=wandb", "max_steps=2", "callbacks.snapshots=null"]
    train(*short, "logger.wandb.project=fox", folder=tmp_path / "run")
    assert wandb.run is mine
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / PLAN).touch()
    Image.new("RGB", (1, 1)).save(tmp_path / "sweep/sweep.png")
    noted = composed("logger=wandb", r"+logger.wandb.notes='of \${seed}'")
    points = [Point(tmp_path / "sweep/0", {"lr": "0.1"}, "completed")]
    publish(tmp_path / "sweep", ranked(points), noted.logger.wandb)
    after = {name for name in os.environ if name.startswith("WANDB_")}
    assert after - variables == {"WANDB_SERVICE"}
    wandb.log({"after": 2})
    mine.finish()
    # The files of that of the user
    records = wandb_records(tmp_path)
    first, second = [record["item"] for record in contents(records, "history")]
    assert (first["before"], second["after"]) == (1, 2)
    (run,) = contents(records, "run")
    assert (run["run_id"], run["project"], run["display_name"]) == ("users", "mine", "mine")
    assert "n_embd" not in json.dumps([run, contents(records, "config")])
    assert [record["exit_code"] for record in contents(records, "exit")] == [0]
    # Those of minigpt
    expected = {
        "run": ("fox", "run", "", "train_loss"),
        "sweep": ("minigpt", "sweep summary", "of ${seed}", "answer"),
    }
    ids = {"users"}
    for folder, (project, name, notes, logged) in expected.items():
        records = wandb_records(tmp_path / folder)
        (run,) = contents(records, "run")
        assert (run["project"], run["display_name"], run.get("notes", "")) == (project, name, notes)
        assert len(contents(records, "exit")) == 1
        assert logged in json.dumps([contents(records, "history"), contents(records, "summary")])
        ids.add(run["run_id"])
    assert len(ids) == 3


@pytest.mark.usefixtures("logged_out")
@pytest.mark.parametrize("reinit", ["default", "create_new"])
def test_a_dead_server_beside_a_run_of_the_user_makes_a_run_offline_and_leaves_that_of_the_user(
    tmp_path, monkeypatch, reinit
):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    mine = wandb.init(mode="offline", dir=tmp_path, reinit=reinit)
    logger = wandb_logger(tmp_path / "run", timeout=1, mode="online", id="fox")
    assert logger.experiment.offline
    logger.lost = True  # which ends the client, if no run of the user has it
    logger.finish({})
    mine.log({"after": 2})  # an error if it is finished
    assert mine.summary["after"] == 2
    mine.finish()


@pytest.mark.usefixtures("logged_out")
def test_the_id_of_a_run_belongs_to_one_folder(tmp_path):
    def start(folder, **options):
        logger = wandb_logger(tmp_path / folder, timeout=10, **options)
        logger.finish({})
        return logger.experiment.id

    first = start("runs/a", id="fox*[a]")
    assert first == "fox*[a]"
    shutil.copytree(tmp_path / "runs/a", tmp_path / "runs/copy", symlinks=True)
    assert start("runs/a") == first
    wait_for_a_new_second()
    copied = start("runs/copy")
    assert copied != first
    assert [start("runs/copy"), start("runs/a")] == [copied, first]
    # A copy uploads its own parts only.
    command = [
        sys.executable,
        "-m",
        "wandb",
        "sync",
        "--dry-run",
        str(tmp_path / "runs/copy/wandb"),
    ]
    output = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stderr
    assert (output.count(f"run-{copied}"), output.count("fox")) == (2, 0)

    (tmp_path / "runs").rename(tmp_path / "moved")
    assert [start("moved/a"), start("moved/copy")] == [first, copied]
    (tmp_path / "mount").symlink_to("moved")  # as another host has another path
    assert [start("mount/a"), start("moved/a"), start("mount/copy")] == [first, first, copied]
    (tmp_path / "moved/a").rename(tmp_path / "moved/b")
    assert start("moved/a") not in (first, copied)  # a new run where the other was
    assert start("moved/b") == first
    (tmp_path / "moved/b/wandb/folder.txt").unlink()  # as before there was one
    assert start("moved/b") == first


def test_the_printed_command_finds_all_parts_of_all_runs_of_a_sweep(tmp_path):
    sweep = tmp_path / "it's a sweep"
    for run in ("lr=0.1", "lr=0.2,n=1", "."):
        for second in (1, 2):
            folder = sweep / run / f"wandb/offline-run-20260101_00000{second}-abc"
            folder.mkdir(parents=True)
            (folder / "run-abc.wandb").touch()
    (sweep / PLAN).touch()
    dry = f"{sys.executable} -m wandb sync --dry-run"
    command = sync_command(sweep).replace("wandb sync", dry)
    options = {"shell": True, "cwd": tmp_path, "capture_output": True, "encoding": "utf-8"}
    assert subprocess.run(command, check=True, **options).stderr.count("offline-run-") == 6


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


pytestmark = pytest.mark.usefixtures("logged_out")
# Options of Lightning's logger, and of wandb.init, that the run sets
UNKNOWN = ("save_dir", "dir", "settings")


def logger_of(folder, *options):
    given = (option.replace("wandb.", "logger.wandb.", 1) for option in options)
    (logger,) = instantiate_group(
        "logger", composed("logger=wandb", f"logger.wandb.folder={folder}", *given).logger
    )
    return logger


def start_and_finish(folder, *options):
    logger = logger_of(folder, *options)
    logger.finish({})
    return logger.experiment.settings


def test_options_of_the_command_line_are_honored(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")  # which the command line overrides
    more = ["project=p", "entity=e", "group=g", "tags=[t]", "name=n", "timeout=20"]
    given = [f"wandb.{option}" for option in more] + ["+wandb.id=fox-run-1", "+wandb.resume=must"]
    default = ("minigpt", None, None, None, tmp_path.name)
    for options, resume, names, seconds in (
        (given, "must", ("p", "e", "g", ("t",), "n"), (6, 6, 20)),
        ([], "allow", default, (3, 3, 10)),  # the id is that of the folder
    ):
        logger = logger_of(os.path.relpath(tmp_path), "+wandb.mode=offline", *options)
        found = logger.experiment.settings
        assert (found.run_id, found.resume, found.mode) == ("fox-run-1", resume, "offline")
        shown = (found.project, found.entity, found.run_group, found.run_tags, found.run_name)
        assert shown == names
        waits = (found.init_timeout, found.login_timeout, found.finish_timeout)
        assert waits == pytest.approx(seconds)
        logger.finish({})
        monkeypatch.chdir(tmp_path.parent)  # wandb's own process stays where it was
    assert contents(wandb_records(tmp_path, -1), "exit")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(
            (f"+wandb.{name}=x", rf"logger\.wandb\.{name} is not an option; it takes .*, tags.*")
            for name in UNKNOWN
        ),
        (
            "+wandb.mode=off",
            r"logger\.wandb\.mode or WANDB_MODE must be one of online, offline, .*, got off",
        ),
        ("+wandb.mode=offline +wandb.resume=x", "Weights & Biases cannot start: [^\n]*$"),
    ],
)
def test_an_option_that_cannot_be_honored_is_refused_in_one_line(tmp_path, wrong, message):
    with pytest.raises(InstantiationException) as refused:
        logger_of(tmp_path, *wrong.split())
    assert re.match(message, str(refused.value.__cause__))


def test_variables_of_wandb_act_unless_the_command_line_says_otherwise(tmp_path, monkeypatch):
    def names(folder, *options):
        found = start_and_finish(tmp_path / folder, *options)
        fields = "run_name project entity run_group run_job_type run_notes run_tags run_id"
        return tuple(getattr(found, field) for field in fields.split())

    # These count as not set
    for name in ["MODE", "PROJECT", "NAME", "TAGS", "RUN_ID", "BASE_URL", "SILENT", "RUN_GROUP"]:
        monkeypatch.setenv(f"WANDB_{name}", "")
    (tmp_path / "wandb").mkdir()
    # Of `wandb init`
    (tmp_path / "wandb/settings").write_text("[default]\nproject = of-file\nentity = of-file\n")
    assert names("file")[:-1] == ("file", "of-file", "of-file", None, None, None, None)
    variables = "NAME=n PROJECT=p ENTITY=e RUN_GROUP=g JOB_TYPE=j NOTES=o TAGS=a,b RUN_ID=fox"
    for variable in variables.split():  # though the client runs
        monkeypatch.setenv(*f"WANDB_{variable}".split("="))
    assert names("variables") == ("n", "p", "e", "g", "j", "o", ("a", "b"), "fox")
    (record,) = contents(wandb_records(tmp_path / "variables"), "run")
    written = [
        "display_name",
        "project",
        "entity",
        "run_group",
        "job_type",
        "notes",
        "tags",
        "run_id",
    ]
    assert [record[name] for name in written] == [*"npegjo", ["a", "b"], "fox"]
    given = """
        wandb.name=N wandb.project=P wandb.entity=E wandb.group=G
        +wandb.job_type=J +wandb.notes=O wandb.tags=[c] +wandb.id=3
    """
    assert names("line", *given.split()) == ("N", "P", "E", "G", "J", "O", ("c",), "3")
    # The id of the variable, not that of the folder
    assert names("line", "wandb.tags=[]")[6:] == ((), "fox")
    # Others, and those that are ignored
    other = f"""
        RESUME=must CONSOLE=wrap SILENT=false HOST=h
        DIR={tmp_path}/elsewhere USE_DOT_WANDB=true INIT_TIMEOUT=99
    """
    for variable in other.split():
        monkeypatch.setenv(*f"WANDB_{variable}".split("="))
    found = start_and_finish(tmp_path / "other")
    assert (found.resume, found.console, found.silent, found.host) == ("must", "wrap", False, "h")
    assert (found.wandb_dir, found.init_timeout) == (str(tmp_path / "other/wandb"), 3)
    assert start_and_finish(tmp_path / "other", "+wandb.resume=never").resume == "never"


@pytest.mark.parametrize("mode", ["offline", "disabled"])
@pytest.mark.parametrize("source", ["file", "variable"])
def test_wandb_offline_and_disabled_overrule_a_key_and_contact_no_server(
    tmp_path, monkeypatch, mode, source
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        (tmp_path / "wandb").mkdir()
        if source == "file":  # as `wandb offline` and `wandb disabled` write it
            (tmp_path / "wandb/settings").write_text(
                f"[default]\nmode = {mode}\n", encoding="utf-8"
            )
        else:
            monkeypatch.setenv("WANDB_MODE", mode)
        logger = wandb_logger(tmp_path / "run", timeout=10)
        assert (tmp_path / "run/wandb").exists() == (mode == "offline")
        assert (logger is not None) == (mode == "offline")
        if logger:
            assert logger.experiment.offline
            logger.finish({})
        with pytest.raises(BlockingIOError):  # nobody waits
            server.accept()


def test_runs_of_a_sweep_have_its_group_and_tag_whatever_its_name(tmp_path, monkeypatch):
    name = "it's a b, c=[$HOME] é"
    sweep = tmp_path / name
    job = sweep / "seed=1"
    job.mkdir(parents=True)
    (sweep / PLAN).touch()

    def names(folder, **options):
        logger = wandb_logger(folder, timeout=10, **options)
        logger.finish({})
        found = logger.experiment.settings
        return found.run_name, found.run_group, found.run_tags

    assert names(job, tags=[name]) == ("seed=1", name, (name, "sweep"))
    assert names(sweep, tags=[name])[1:] == (name, (name, "sweep", "summary"))
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    monkeypatch.setenv("WANDB_TAGS", "fox")
    assert names(job) == ("seed=1", "mine", ("fox", "sweep"))
    assert names(job, tags=[], group="yours", name="same") == ("same", "yours", ("sweep",))
