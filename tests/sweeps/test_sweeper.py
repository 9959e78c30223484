"""Sweeps: their points, with a fake launcher, and sweeps in processes of their own."""

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import numpy as np
import optuna
import pytest
from filelock import FileLock
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf, open_dict
from processes import Script, live_processes
from small_runs import CONFIGS, one_line, rows, small_run, table, wait_until, wandb_records

from minigpt.extras.search.search import short_text
from minigpt.runs.run_dir import is_locked, read_summary, write_summary
from minigpt.sweeps.composition import Composer
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import (
    BITS,
    COMPLETED,
    LOSS_NAMES,
    NATS,
    SKIPPED,
    Point,
    read_plan,
    read_sweep,
)
from minigpt.sweeps.sweeper import SAME, announced
from minigpt.utils.errors import RunError, UserError


class Engine:
    """Record every job, and write its validation curve: `loss(settings, step)`; NaN is a failure.

    Args:
        jobs: that end; the next is killed: before it writes a file, before its last validation, or
            before its summary.
    """

    def __init__(self, loss=lambda *_: 1.0, jobs=999):
        self.loss, self.jobs, self.damage = loss, jobs, jobs % 3
        self.batches: list[Sequence[Sequence[str]]] = []
        self.launches: list[
            dict[str, int]
        ] = []  # of each launch, the step at which each job was to end

    def launch(self, job_overrides, initial_job_idx):
        self.batches.append(job_overrides)
        self.launches.append({})
        for point, overrides in zip(self.points, job_overrides, strict=True):
            settings = dict(override.partition("=")[::2] for override in overrides)
            every, last = (int(float(settings.get(key, 1))) for key in ("eval_every", "max_steps"))
            self.launches[-1][point.folder.name] = end = int(settings.get("pause_at", last))
            self.jobs -= 1
            if (killed := self.jobs < 0) and self.damage == 0:
                raise KeyboardInterrupt
            steps = list(range(every, end + (self.damage == 2 or not killed), every))
            losses = {
                step: loss for step in steps if not math.isnan(loss := self.loss(settings, step))
            }
            # Per bit per byte
            nats = math.log(2) * (2 if settings.get("tokenizer") == "char" else 1)
            lines = [f"{step},{loss},{loss / nats}\n" for step, loss in losses.items()]
            (point.folder / ".hydra").mkdir(parents=True, exist_ok=True)
            (point.folder / "metrics.csv").write_text(
                "".join(["step,val_loss,val_bits_per_byte\n", *lines]), encoding="utf-8"
            )
            (point.folder / "summary.json").unlink(missing_ok=True)
            if killed:
                raise KeyboardInterrupt
            best = min(losses.values(), default=math.inf)
            status = (
                "failed" if len(losses) < len(steps) else "paused" if end < last else "completed"
            )
            totals = {
                "steps": max(losses, default=0),
                LOSS_NAMES[NATS]: best,
                LOSS_NAMES[BITS]: best / nats,
            }
            text = hashlib.sha256(Path(settings["data.path"]).read_bytes()).hexdigest()
            write_summary(point.folder, {"status": status, "corpus_sha256": text, **totals})
            self.on_end(point, "")

    @property
    def by_folder(self):
        """The configurations of the jobs as they compose them."""
        composed = {}
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            for overrides in itertools.chain(*self.batches):
                config = compose(
                    "train",
                    [*self.config.hydra.overrides.hydra, *overrides],
                    return_hydra_config=True,
                )
                folder = Path(config.hydra.run.dir)
                assert (folder / "summary.json").exists()
                # Of Hydra's own launcher
                assert folder == Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
                with open_dict(config):
                    del config["hydra"]
                composed[folder.name] = config
        return composed

    @property
    def configs(self):
        return [*self.by_folder.values()]


@pytest.fixture
def plan(text, tmp_path, monkeypatch):
    """Sweep without training: `plan("seed=1,2")` returns the sweeper after its sweep."""
    for name in ("report", "publish"):  # the plot takes longer than the rest
        monkeypatch.setattr(f"minigpt.sweeps.report.{name}", lambda *_: None)
    compose, composed = Composer.compose, {}

    def compose_once(composer, values):
        line = (os.environ.get("LR"), *composer.overrides(values))
        return (
            composed[line]
            if line in composed
            else composed.setdefault(line, compose(composer, values))
        )

    monkeypatch.setattr(Composer, "compose", compose_once)

    def sweep(*arguments, engine=None, folder=tmp_path / "sweep"):
        quoted = str(folder).replace("'", r"\'")
        overrides = [f"data.path={text}", f"data.folder={tmp_path}/data", "model.block_size=16"]
        overrides += [f"hydra.sweep.dir='{quoted}'", *arguments]
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            config = hydra.compose_config("train", overrides, run_mode=RunMode.MULTIRUN)
            context = HydraContext(config_loader=hydra.config_loader, callbacks=None)
            instantiate = Plugins.instance().instantiate_sweeper
            sweeper = instantiate(
                config=config, hydra_context=context, task_function=lambda _: None
            )
            sweeper.engine = engine or Engine()
            sweeper.engine.config = config
            sweeper.arguments = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            sweeper.sweep(sweeper.arguments)
        return sweeper

    return sweep


def singles(sweeper, line):
    """The distinct configurations of the single command lines that a line with values between `|` stands for."""
    axes = [
        [f"{key}{sep}{value}" for value in values.split("|")]
        for key, sep, values in (s.partition("=") for s in line)
    ]
    swept = [override.replace("|", ",") for override in line]
    task = [override for override in sweeper.arguments if override not in swept]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return list(
            dict.fromkeys(
                plain(compose, "train", [*task, *single]) for single in itertools.product(*axes)
            )
        )


def plain(function, *args):
    """What a function composes, as JSON, in which 1 is not 1.0, nor true; or its error."""
    try:
        return json.dumps(OmegaConf.to_container(function(*args)), sort_keys=True)
    except HydraException as error:
        return str(error)


LONG = "a/../b" * 50
LINES = {
    "lists, dicts and one value": [
        *(
            "optimizer.betas=[0.9,0.95]|[0.8,0.9]",
            "model.n_kv_head=1",
            "callbacks.samples={seed:1}",
        ),
    ],
    "a group and values that it sets or lacks": [
        *(
            "trainer=cpu|auto",
            "trainer.gradient_clip_val=null|1",
            "+trainer.benchmark=true",
            "tokenizer=char",
        ),
    ],
    "strings": [f"data.field='1: the'|1-the|\"it's\"|'x=1,y'|'7'|7|'null'|'[fox]'|{LONG}1|{LONG}2"],
    "a value after a dict that holds it": [
        "model={n_embd:64,n_layer:1}|{n_layer:2}",
        "model.n_embd=32",
    ],
    "a deleted and an added value": ["~callbacks.samples.seed", "+callbacks.samples.seed=3|4"],
    "values, of which the last wins": [
        "seed=1|2",
        "seed=3|4",
        "model.dropout=0.1",
        "++model.dropout=0.3",
    ],
    "numbers": ["++optimizer.weight_decay=0|0.0|1e-8|1_000"],
    "interpolations": ["model.dropout=${optimizer.weight_decay}|0.2", "experiment=nanogpt_cpu"],
    "a group and dicts of it": ["optimizer=muon", "optimizer={lr:0.01}|{lr:0.02}"],
    "a choice, of which the last wins": ["schedule=cosine|linear", "schedule=constant", "seed=1|2"],
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_point_composes_as_the_single_command_line_with_its_values(plan, line):
    sweeper = plan(*(override.replace("|", ",") for override in line))
    points = [point for point in sweeper.points if point.reason != SAME]
    expected = singles(sweeper, line)
    assert [
        plain(lambda *line: sweeper.composer.compose(*line)[0], point.overrides) for point in points
    ] == expected  # which is checked
    names = [point.folder.name for point in points]
    assert len(set(names)) == len(names)
    assert all(len(name.encode()) < 200 and re.fullmatch(r"[\w.,=+-]+", name) for name in names)
    jobs = {
        name: plain(lambda config: config, config)
        for name, config in sweeper.engine.by_folder.items()
    }
    assert jobs == {
        point.folder.name: config
        for point, config in zip(points, expected, strict=True)
        if point.status != SKIPPED
    }
    read = read_sweep(sweeper.folder)
    # A report separates them, too
    assert len({tuple(point.overrides.items()) for point in read}) == len(read)


def test_a_sweep_over_groups_takes_none(plan, tmp_path):
    without, with_ = plan("callbacks=null,default").engine.configs
    assert ([*without.callbacks.values()], with_.callbacks.checkpoint.save_top_k) == ([None] * 3, 1)
    without, with_ = plan("debug=None,fast", folder=tmp_path / "debug").engine.configs
    assert (without.max_steps, with_.max_steps) == (1000, 5)


def test_a_large_grid_announces_how_many_points_are_checked_also_when_it_resumes(
    plan, capsys, tmp_path
):
    def announced():
        return [line for line in capsys.readouterr().err.splitlines() if "to check" in line]

    grid = ["seed=range(3)", "optimizer.lr=1,2,3,4,5,6,7"]
    plan(*grid)
    assert announced() == ["21 points to check, about 1 s"]
    plan(*grid, "resume=auto")  # those of the folder, and those of the command
    assert announced() == ["21 points to check, about 1 s"] * 2
    plan("seed=1,2", folder=tmp_path / "small")
    assert announced() == []


def test_how_many_points_are_left_to_check_is_printed_again_and_again(capsys):
    assert [*announced(iter(range(600)), 600)] == [*range(600)]
    lines = [f"{n} points to check, about {s} s" for n, s in ((600, 13), (350, 8), (100, 3))]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_grid_is_composed_once_per_choice_and_its_points_are_not_compared_in_pairs(
    plan, monkeypatch
):
    composed, compared = [], []
    compose, identity = ConfigLoaderImpl.load_sweep_config, Point.identity.fget
    monkeypatch.setattr(
        ConfigLoaderImpl, "load_sweep_config", lambda *args: composed.append(1) or compose(*args)
    )
    monkeypatch.setattr(
        Point, "identity", property(lambda point: compared.append(1) or identity(point))
    )
    line = ["schedule=cosine,linear", "seed=range(1,13)", "model.n_head=2"]
    assert len(plan(*line).points) == 24
    assert len(composed) == 2
    assert len(compared) < 10 * 24


def test_a_grid_of_too_many_points_is_refused_before_its_values_are_listed(plan):
    with pytest.raises(
        UserError,
        match=r"^hydra\.sweeper\.max_points must be at least 5976000, the points of the grid, ",
    ):
        plan("seed=range(1,1001)", "model.n_head=range(1,84)", "optimizer.lr=range(1,73)")
    with pytest.raises(
        UserError,
        match=r"got 10000; set it, give fewer values, or search with hydra/sweeper=optuna$",
    ):
        plan("seed=range(1000000000000)", "model.n_head=2,4")
    assert len(plan("seed=1,2", "model.n_head=2,4", "hydra.sweeper.max_points=4.0").points) == 4


def test_a_setting_whose_values_have_no_effect_is_refused(plan):
    with pytest.raises(UserError, match=r"^model\.n_head has the same effect with all its values"):
        plan("model.n_head=2,4", "model={n_head:8}")


def test_the_plans_of_a_sweep_validate_on_the_same_text_and_resume_with_settings_in_their_order(
    plan, tmp_path
):
    line = ["seed=1,2", "minutes=1", "model.n_embd=32", "model={n_embd:64}"]
    sweeper, given = plan(*line), plan(*line, "eval_batches=3", folder=tmp_path / "given")
    for (jobs,), expected in ((sweeper.engine.batches, "null"), (given.engine.batches, "3")):
        assert [[text for text in job if "eval_batches" in text] for job in jobs] == [
            [f"eval_batches={expected}"]
        ] * 2
    plan(*line, "resume=auto")
    assert "eval_batches=null" not in read_plan(sweeper.folder)[0]  # which was not typed
    with pytest.raises(
        UserError, match=r"holds a sweep that differs in model\.n_embd \(64 there, 32 now\); choose"
    ):
        plan(*line[:2], *line[:1:-1], "resume=auto")


def test_the_product_of_all_axes_runs_in_the_order_given_in_all_notations_of_hydra(plan):
    sweeper = plan("seed=range(2,0,-1)", "schedule=glob(c*)", "callbacks.samples.seed='é',3")
    expected = [*itertools.product("21", ("constant", "cosine"), ("'é'", "3"))]
    assert [(*point.overrides.values(),) for point in sweeper.points] == expected
    assert (
        sweeper.points[0].folder
        == sweeper.folder / "seed=2,schedule=constant,callbacks.samples.seed=é"
    )


def test_the_command_line_overrides_the_sweep_file_and_the_last_of_equal_settings_wins(plan):
    sweeper = plan(
        "+sweep=heads_by_width",
        "model.n_embd=32,64",
        "model.n_head=3,5",
        "model.n_head=2",
        "seed=1",
    )
    assert [point.overrides for point in sweeper.points] == [
        {"model.n_embd": "32"},
        {"model.n_embd": "64"},
    ]
    assert {(config.model.n_head, config.max_steps) for config in sweeper.engine.configs} == {
        (2, 300)
    }


def test_impossible_points_are_skipped_with_the_reason_and_the_rest_runs(plan, capsys):
    sweeper = plan("optimizer=adamw,adamv", "model.block_size=16,16000")
    ran, *others = sweeper.points
    assert [len(batch) for batch in sweeper.engine.batches] == [1]
    assert (ran.reason, ran.folder.exists()) == ("", True)
    assert "model.block_size + 1 = 16001" in others[0].reason
    assert all(
        "optimizer=adamv does not exist (did you mean adamw?)" in point.reason
        for point in others[1:]
    )
    assert capsys.readouterr().err.count("skipped: ") == 3
    assert [(point.status, point.folder.exists()) for point in read_sweep(sweeper.folder)[1:]] == [
        (SKIPPED, False)
    ] * 3


def test_a_sweep_resumes_with_new_points_whatever_the_notation_and_the_logging(plan, tmp_path):
    first, latest = tmp_path / "first", tmp_path / "latest"
    before = plan("optimizer.lr=0.001,1e-3,0.01", folder=first).points
    assert [point.reason for point in before] == ["", "same configuration as another point", ""]
    after = plan(
        "optimizer.lr=choice(0.1,1e-2,1e-3)", "logger=tensorboard", "resume=auto", folder=latest
    )
    assert [config.optimizer.lr for config in after.engine.configs] == [0.1]  # and nothing else ran
    kept = {(point.identity, point.folder.name) for point in after.points}
    assert {(point.identity, point.folder.name) for point in before if not point.reason} < kept
    assert [point.status for point in after.points] == [COMPLETED] * 3
    assert latest.resolve() == first


def test_a_number_in_another_notation_is_the_same_point(plan):
    before = plan("max_steps=1e3,2e3,1000", "data.batch_size=4.0").points
    assert [point.reason for point in before] == ["", "", SAME]
    assert [point.settings["max_steps"] for point in before] == [1000, 2000, 1000]
    after = plan("max_steps=2000,3000", "data.batch_size=4", "resume=auto")
    # The other point is completed
    assert [config.max_steps for config in after.engine.configs] == [3000]
    read = read_sweep(after.folder)
    assert {repr(point.value("max_steps")) for point in read if point.status == COMPLETED} == {
        "1000",
        "2000",
        "3000",
    }
    assert {repr(point.value("data.batch_size")) for point in read} == {"4"}


def test_a_sweep_is_extended_by_some_of_its_values_and_other_seeds(plan):
    plan("model.n_head=2,4", "model.n_embd=32,64")
    further = plan("model.n_head=2", "model.n_embd=64,128", "seed=1337,1338", "resume=auto")
    longest_first = [(128, 1337), (128, 1338), (64, 1338)]
    assert [
        (config.model.n_embd, config.seed) for config in further.engine.configs
    ] == longest_first
    points = [[*point.overrides.values()] for point in read_plan(further.folder)[1]]
    ran_before = [["2", "32"], ["2", "64", "1337"], ["4", "32"], ["4", "64"]]
    assert sorted(points) == sorted(
        [["2", "128", "1337"], ["2", "128", "1338"], ["2", "64", "1338"], *ran_before]
    )


def test_another_sweep_does_not_use_the_folder_of_a_sweep(plan, tmp_path):
    sweeper = plan("seed=1,2")
    Path(sweeper.folder, "seed=2/summary.json").unlink()  # to be run again by the same command
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sweep/**")}
    for arguments, expected in (
        (
            ["seed=1,2"],
            "holds a sweep already; resume it with resume=auto, or choose another folder",
        ),
        (["model.n_head=2,4", "resume=auto"], "holds a sweep that differs in model.n_head;"),
        (
            ["seed=1,2", "max_steps=9", "resume=auto"],
            "holds a sweep that differs in max_steps (1000 there, 9 now);",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(expected)):
            plan(*arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sweep/**")} == before


def test_a_sweep_with_a_rate_of_the_environment_resumes_at_this_rate_alone(
    plan, tmp_path, monkeypatch
):
    line = ["optimizer.lr='${oc.decode:${oc.env:LR}}'", "resume=auto"]
    monkeypatch.setenv("LR", "0.002")
    plan(*line, "seed=1,2")
    sweeper = plan(*line, "seed=1,2,3")
    (job,) = sweeper.engine.configs
    assert (job.seed, job.optimizer.lr) == (3, 0.002)
    (row,) = ranked(read_sweep(sweeper.folder))
    assert [point.value("optimizer.lr") for point in row.points] == [0.002] * 3
    monkeypatch.setenv("LR", "0.2")
    with pytest.raises(
        UserError, match=r"sweep that differs in optimizer\.lr \(0\.002 there, 0\.2 now\); choose"
    ):
        plan(*line, "seed=1,2,3,4")
    monkeypatch.setenv("LR", "0.002")
    old = json.loads((plan_file := sweeper.folder / "sweep.json").read_text(encoding="utf-8"))
    old["settings"]["optimizer.lr"] = "${oc.decode:${oc.env:LR}}"  # of an older version
    plan_file.write_text(json.dumps(old), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"differs in optimizer\.lr \(\$\{oc\.decode:\S+ there, 0\.002 now"
    ):
        plan(*line, "seed=1,2,3,4")


def test_a_sweep_locks_its_folder_until_its_report_is_written(plan, tmp_path, monkeypatch):
    folder, locked = tmp_path / "sweep", []

    class Watched(Engine):
        def launch(self, job_overrides, initial_job_idx):
            locked.append(is_locked(folder))
            assert [point.status for point in read_sweep(folder)] == [
                "waiting"
            ] * 2  # others read it meanwhile
            super().launch(job_overrides, initial_job_idx)

    monkeypatch.setattr(
        "minigpt.sweeps.report.report", lambda folders: locked.append(is_locked(*folders))
    )
    plan("seed=1,2", engine=Watched())
    with pytest.raises(KeyboardInterrupt):
        plan("seed=1,2,3", "resume=auto", engine=Engine(jobs=0))
    assert (locked, is_locked(folder)) == ([True] * 3, False)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    message = r"^another sweep uses \S+/sweep; wait for it, or choose another folder with hydra\.sweep\.dir="
    with FileLock(folder / ".lock"), pytest.raises(UserError, match=message):
        plan("seed=1,2,3", "resume=auto")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("names", [{".lock", "metrics.csv"}, {"metrics.csv"}])
def test_a_refused_sweep_leaves_the_lock_of_a_run_and_none_of_its_own(plan, tmp_path, names):
    (tmp_path / "sweep").mkdir()
    for name in names:
        (tmp_path / "sweep" / name).touch()
    with pytest.raises(UserError, match="is not empty and holds no sweep"):
        plan("seed=1,2")
    assert {file.name for file in (tmp_path / "sweep").iterdir()} == names


@pytest.mark.parametrize("line", [[], ["seed=1,2", "-m"]], ids=["run", "sweep"])
def test_a_disk_without_locks_is_one_line(call, line, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    key = "hydra.sweep.dir" if line else "hydra.run.dir"
    error = one_line(call("train.py", *line, f"{key}=mine"))
    assert re.fullmatch(r"error: \S*mine/\.lock: no locks available; choose another folder", error)


def test_another_text_under_the_same_name_is_not_resumed(plan, text, tmp_path):
    line = ["seed=1,2", f"data.path={tmp_path}/mine.txt"]
    (tmp_path / "mine.txt").write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    plan(*line)
    (tmp_path / "mine.txt").write_text(
        text.read_text(encoding="utf-8").replace("fox", "cat"), encoding="utf-8"
    )
    with pytest.raises(
        UserError, match=r"seed=1 was trained on another text or from other weights; choose another"
    ):
        plan(*line, "resume=auto")


def test_the_seed_of_a_run_is_its_own_however_it_was_given(plan, tmp_path):
    plan("model.n_head=2,4", "seed=5")
    sweeper = plan("model.n_head=2,4", "seed=6", "resume=auto")
    assert [[point.seed for point in row.points] for row in ranked(read_sweep(sweeper.folder))] == [
        ["6", "5"]
    ] * 2
    (row,) = ranked(read_sweep(plan("++seed=1,2", folder=tmp_path / "added").folder))
    assert [point.seed for point in row.points] == ["1", "2"]


def test_runs_that_begin_from_different_checkpoints_are_different_points_also_if_they_resume(
    plan, tmp_path
):
    def lines(*arguments, jobs=9):
        with contextlib.suppress(KeyboardInterrupt):  # of the job after these
            plan("resume=a,b,c", *arguments, engine=(engine := Engine(jobs=jobs)))
        return [[text for text in job if text.startswith("resume=")] for job in engine.batches[0]]

    assert lines(jobs=1) == [["resume=a"], ["resume=b"], ["resume=c"]]
    (checkpoints := tmp_path / "sweep/resume=b/checkpoints").mkdir(parents=True)
    (checkpoints / "last.safetensors").touch()
    assert lines("resume=auto") == [["resume=b", "resume=auto"], ["resume=c"]]
    rows = ranked(read_sweep(tmp_path / "sweep"))
    assert [row.overrides for row in rows] == [{"resume": "a"}, {"resume": "b"}, {"resume": "c"}]


def test_a_sweep_may_have_any_folder_and_leaves_the_names_for_weights_and_biases_to_its_user(
    plan, tmp_path
):
    name = "it's a b, c=[$HOME] é"
    sweeper = plan("seed=1,2", "logger=wandb", "logger.wandb.name=same", folder=tmp_path / name)
    config = sweeper.engine.configs[1]
    assert (config.logger.wandb.name, config.logger.wandb.group) == ("same", None)
    assert sweeper.points[1].folder == tmp_path / name / "seed=2"


def test_a_name_that_is_too_long_for_a_file_system_is_cut_at_a_character_and_stays_unique(
    plan, tmp_path
):
    fields = [
        "text",
        "é" * 110,
        *(f"{'訓練' * 60}{end}" for end in "ab"),
        "𠀋" * 61 + "e",
        "e𠀋" * 61,
        "🎉" * 200,
    ]
    quoted = ",".join(f"'{field}'" for field in fields)
    line = [f"data.field={quoted}"]
    points = plan(*line).points
    names = [point.folder.name for point in points]
    assert names[:2] == [f"field={value}" for value in fields[:2]]
    assert len({*names}) == 7
    for name, point in zip(names, points, strict=True):
        value = point.settings["data.field"].replace("🎉", "-")  # as all but letters and digits
        assert len(name) <= 120  # a name of W&B has 128
        assert len(name.encode()) <= 255
        assert re.fullmatch(rf"field=(text|-|{value[:8]}[{re.escape(value)}]{{50,}}.*)", name)
    assert {file.name for file in (tmp_path / "sweep").iterdir() if file.is_dir()} == {*names}
    assert [point.status for point in read_sweep(tmp_path / "sweep")] == [COMPLETED] * 7
    resumed = plan(*line, "resume=auto")
    assert (resumed.engine.launches, [point.folder.name for point in resumed.points]) == ([], names)


def test_a_sweep_with_names_that_no_file_system_takes_resumes(plan, tmp_path):
    """Older versions planned them, and failed at the first launch."""
    line = ["data.field=text,other", "seed=1,2"]
    plan(*line)
    file, long = tmp_path / "sweep/sweep.json", "訓" * 119
    for i, name in enumerate(("field=other,seed=1", "field=other,seed=2")):
        file.write_text(
            file.read_text(encoding="utf-8").replace(name, f"{long}{i}"), encoding="utf-8"
        )
    resumed = plan(*line, "resume=auto")
    assert [config.seed for config in resumed.engine.configs] == [1, 2]
    assert [point.status for point in read_sweep(tmp_path / "sweep")] == [COMPLETED] * 4
    assert plan(*line, "resume=auto").engine.launches == []


@pytest.mark.parametrize(
    "given", ["WANDB_RUN_ID", "+hydra.job.env_set.WANDB_RUN_ID=fox", "+logger.wandb.id=fox"]
)
def test_a_sweep_refuses_an_id_of_weights_and_biases_for_all_its_runs(plan, monkeypatch, given):
    if given == "WANDB_RUN_ID":
        monkeypatch.setenv(given, "fox")
    expected = "^logger.wandb.id or WANDB_RUN_ID must be null in a sweep, whose runs have one each, got fox"
    with pytest.raises(UserError, match=expected):
        plan("seed=1,2", "logger=wandb", *([given] if "=" in given else []))
    if given == "WANDB_RUN_ID":
        plan("seed=1,2")  # without W&B


@pytest.mark.parametrize("line", ["hydra.sweeper.prune=true", "hydra/sweeper=optuna"])
def test_pruning_and_searches_refuse_points_that_validate_on_different_texts(plan, line):
    with pytest.raises(
        UserError,
        match=r"need one validation text for all points, got all .* bytes of text \w+; all .* bytes of",
    ):
        plan(line, "data.val_fraction=0.1,0.3", "eval_every=10")


@pytest.mark.slow
def test_a_search_runs_n_trials_within_the_bounds_and_minimizes_bits_per_byte(plan):
    """By nats per token bytes would be best: 1.5 of them less against 1 less of characters that are twice as long."""

    def valley(settings, _):
        miss = (
            abs(math.log10(float(settings["optimizer.lr"])) + 2)
            + abs(int(settings["model.n_layer"]) - 5) / 4
        )
        return (3 + miss) * {"byte": 1.0, "char": 1.5}[settings["tokenizer"]]

    line = [
        "optimizer.lr=tag(log,interval(1e-4,1e-1))",
        "model.n_layer=range(1,9,2)",
        "tokenizer=byte,char",
    ]
    line += ["hydra/sweeper=optuna", "hydra.sweeper.batch=3"]
    sweeper = plan(*line, "hydra.sweeper.n_trials=30", engine=Engine(valley))
    assert [len(batch) for batch in sweeper.engine.batches] == [3] * 10
    values = [point.overrides for point in sweeper.points]
    assert all(1e-4 <= float(value["optimizer.lr"]) <= 1e-1 for value in values)
    assert {value["model.n_layer"] for value in values} == {"1", "3", "5", "7"}
    assert [value["tokenizer"] for value in values][-10:].count("char") >= 8
    losses = [point.loss(BITS) for point in read_sweep(sweeper.folder)]
    assert statistics.mean(losses[-10:]) < statistics.mean(losses[:10]) - 0.3


LUCKY = {
    "1": (1.0, 9.0, 5.0),
    "2": (3.0, 3.5, 4.0),
    "3": (2.0, 9.0, math.nan),
    "4": (4.0, 4.0, 4.2),
}


def test_a_trial_of_a_search_is_all_its_seeds_and_their_mean_loss_is_its_value(plan, tmp_path):
    def loss(settings, _):
        return LUCKY[settings["model.n_layer"]][int(settings["seed"])]

    line = [
        "hydra/sweeper=optuna",
        "model.n_layer=range(1,5)",
        "hydra.sweeper.n_trials=4",
        "resume=auto",
    ]
    told = []
    tell = optuna.study.Study.tell

    def tell_and_record(study, trial, values=None, state=None):
        told.append((trial.params, values, state))
        return tell(study, trial, values, state=state)

    with (
        patch.object(optuna.study.Study, "tell", tell_and_record),
        pytest.raises(RunError, match="1 of 12 runs failed"),
    ):
        plan(*line, "seed=0,1,2", engine=(engine := Engine(loss)))
    assert [len(batch) for batch in engine.batches] == [6, 6]  # two trials of three seeds at a time
    assert {tuple(params) for params, *_ in told} == {("model.n_layer",)}
    values = {
        str(params["model.n_layer"] + 1): value for params, value, state in told if state is None
    }
    # In bits per byte
    assert values == {name: pytest.approx(mean(LUCKY[name]) / math.log(2)) for name in "124"}
    failed = [
        params["model.n_layer"] + 1
        for params, _, state in told
        if state == optuna.trial.TrialState.FAIL
    ]
    assert failed == [3]
    rows = ranked(read_sweep(tmp_path / "sweep"))
    assert [(row.overrides["model.n_layer"], row.n_seeds) for row in rows] == [
        ("2", 3),
        ("4", 3),
        ("1", 3),
        ("3", 2),
    ]


def test_an_interrupted_search_with_seeds_resumes_with_the_same_points(plan, tmp_path):
    def loss(settings, _):
        return abs(math.log10(float(settings["optimizer.lr"])) + 2) + int(settings["seed"])

    line = [
        "hydra/sweeper=optuna",
        "optimizer.lr=tag(log,interval(1e-4,1e-1))",
        "seed=1,2",
        "hydra.sweeper.n_trials=3",
    ]
    whole = plan(*line, engine=Engine(loss)).points
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        plan(*line, engine=Engine(loss, 5), folder=folder)
    points = plan(*line, "resume=auto", engine=Engine(loss), folder=folder).points
    assert [(point.overrides, point.status) for point in points] == [
        (p.overrides, p.status) for p in whole
    ]
    assert [point.seed for point in whole] == ["1", "2"] * 3


def test_the_file_of_a_search_searches(plan):
    sweeper = plan("+sweep=search", "hydra.sweeper.n_trials=3")
    assert [len(batch) for batch in sweeper.engine.batches] == [2, 1]
    assert set(sweeper.points[0].overrides) == {"optimizer.lr", "model.n_layer", "model.n_embd"}


def test_an_interval_of_integers_draws_them(plan):
    line = [
        "model.n_layer=interval(1,3)",
        "model.n_inner=tag(log,int(interval(16,64)))",
        "model.n_kv_head=interval(1,4)",
    ]
    line += [
        "model.dropout=interval(0,0.9)",
        "optimizer.weight_decay=int(interval(0,3))",
        "optimizer.lr=interval(1,3)",
    ]
    sweeper = plan("hydra/sweeper=optuna", *line, "hydra.sweeper.n_trials=8")
    assert len(sweeper.points) == 8
    drawn = {name: {point.overrides[name] for point in sweeper.points} for name in sweeper.axes}
    assert drawn["model.n_layer"] <= {"1", "2", "3"}
    assert drawn["model.n_kv_head"] <= {"1", "2", "4"}
    assert drawn["optimizer.weight_decay"] <= {"0", "1", "2", "3"}
    assert all(16 <= int(value) <= 64 for value in drawn["model.n_inner"])
    assert all("." in value for value in drawn["model.dropout"] | drawn["optimizer.lr"])


@pytest.mark.parametrize(
    ("low", "high", "log", "most_digits"),
    [
        (0.999, 0.99999, False, 7),
        (0.999, 0.99999, True, 7),
        (1e-4, 1e-1, True, 4),
        (0.0, 1.0, False, 4),
        (-1.0, 1.0, False, 5),
        (0.1, 0.2, False, 5),
        (100.0, 101.0, False, 7),
        (1e-12, 1.001e-12, False, 8),
        (5e-324, 1e-320, True, 16),
        (1e-300, 1e300, True, 4),
        (1e15, 1e15 + 64, False, 17),
        (-1.2345678, -1.2345677, False, 17),
    ],
)
def test_numbers_of_a_search_have_the_digits_of_their_interval_and_never_leave_it(
    low, high, log, most_digits
):
    rng = np.random.default_rng(0)
    ends = np.log((low, high)) if log else (low, high)
    drawn = np.exp(rng.uniform(*ends, 200)) if log else rng.uniform(*ends, 200)
    drawn = [low, high, *np.clip(drawn, low, high).tolist()]
    texts = [short_text(value, low, high, log=log) for value in drawn]
    assert all(low <= float(text) <= high for text in texts)
    width = [value * math.log(high / low) if log else high - low for value in drawn]
    drawn_as = zip(texts, drawn, width, strict=True)
    assert all(abs(float(text) - value) <= 5e-4 * w for text, value, w in drawn_as)
    assert len({*texts}) >= 0.8 * len({*drawn})
    digits = [len(text.partition("e")[0].lstrip("-0.").replace(".", "")) for text in texts]
    assert max(digits[2:]) <= most_digits


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [
        (3e-4, 3e-3, True),
        (1e-4, 1e-2, True),
        (0.1, 0.2, False),
        (0.0, 0.3, False),
        (0.8, 0.99, False),
        (10.0, 300.0, False),
    ],
)
def test_numbers_of_most_searches_have_four_digits_as_those_of_older_versions(low, high, log):
    rng = np.random.default_rng(0)
    ends = np.log((low, high)) if log else (low, high)
    drawn = (np.exp(rng.uniform(*ends, 1000)) if log else rng.uniform(*ends, 1000)).tolist()
    assert [short_text(value, low, high, log=log) for value in drawn] == [f"{v:.4g}" for v in drawn]


def test_a_search_over_a_narrow_interval_has_all_its_trials(plan):
    search = ["hydra/sweeper=optuna", "hydra.sweeper.batch=15", "hydra.sweeper.n_trials=15"]
    points = plan(*search, "ema_decay=interval(0.999,0.99999)").points
    used = [point.settings["ema_decay"] for point in points]
    assert len({*used}) == 15
    assert all(0.999 <= value <= 0.99999 for value in used)
    assert used == [float(point.overrides["ema_decay"]) for point in points]


@pytest.mark.parametrize(
    "bad", ["interval(2,1)", "tag(log,interval(0,1))", "interval(0,inf)", "interval(-1e308,1e308)"]
)
def test_an_interval_without_numbers_is_refused(plan, bad):
    expected = f"optimizer.lr must be interval(low,high) with finite low <= high, and low > 0 with log, got {bad}"
    with pytest.raises(UserError, match=re.escape(expected)):
        plan("hydra/sweeper=optuna", f"optimizer.lr={bad}")


def test_a_search_does_not_count_impossible_points(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("minigpt.extras.search.search.MAX_TRIES_PER_TRIAL", 4)
    search = ["hydra/sweeper=optuna", "hydra.sweeper.batch=2"]
    sweeper = plan(
        *search,
        "model.n_head=range(1,9)",
        "optimizer.lr=interval(0.1,0.2)",
        "hydra.sweeper.n_trials=3",
    )
    assert [len(batch) for batch in sweeper.engine.batches] == [2, 1]
    # They divide n_embd
    assert {point.overrides["model.n_head"] for point in sweeper.points} <= set("1248")
    with pytest.raises(
        UserError, match=r"no point of the search is possible: .* must be divisible"
    ):
        plan(*search, "model.n_head=3,5", "hydra.sweeper.n_trials=1", folder=tmp_path / "none")
    plan(*search, "model.n_head=2,3", "hydra.sweeper.n_trials=2", folder=tmp_path / "fewer")
    assert (
        "the search ends after 1 trials: 8 tries found no other possible point"
        in capsys.readouterr().err
    )


def test_a_missing_optional_package_is_an_error_with_the_install_command(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)  # as if it were not installed
    line = one_line(call("train.py", "seed=1,2", "hydra/launcher=submitit_local", "-m"))
    assert 'hydra/launcher=submitit_local needs submitit; pip install -e ".[submitit]"' in line
    assert not Path("runs").exists()


@pytest.fixture
def start(text, tmp_path):
    """Start a sweep in the folder `sweep`: `start("seed=1,2", held="seed=1")`, with a run that `hold.Hold` holds."""
    sweeps = []

    def run(*arguments, held=""):
        (tmp_path / "held").unlink(missing_ok=True)
        (tmp_path / "hold").write_text(held, encoding="utf-8")
        env = {
            "WANDB_MODE": "offline",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(Path(__file__).parent),
        }
        line = [
            *small_run(text, tmp_path / "data", *arguments),
            "+callbacks.hold._target_=hold.Hold",
        ]
        line += ["hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep"]
        sweeps.append(Script("train.py", *line, output=tmp_path / "out", cwd=tmp_path, env=env))
        if held:
            assert sweeps[-1].wait_for((tmp_path / "held").exists), sweeps[-1].stderr
        return sweeps[-1]

    yield run
    for sweep in sweeps:
        sweep.kill()


def ended(sweep):
    """Wait until a sweep and all its processes have ended."""
    code = sweep.wait()
    wait_until(lambda: not live_processes(sweep.pid))
    return code


@pytest.mark.slow
def test_a_sweep_reports_every_point_when_runs_fail_and_a_worker_is_killed(start, tmp_path, train):
    folder, rates = tmp_path / "sweep", ("0.001", "1e+30")
    good, bad = ([f"n_embd=32,lr={rate},seed={seed}" for seed in (1, 2)] for rate in rates)
    line = ["model.n_embd=31,32", "optimizer.lr=1e-3,1e30", "seed=1,2", "hydra.launcher.n_jobs=2"]
    sweep = start(*line, held=good[0])
    os.kill(int((tmp_path / "held").read_text(encoding="utf-8")), signal.SIGKILL)
    assert ended(sweep) == 1, sweep.stderr
    killed = "its process was killed (SIGKILL), possibly out of memory"
    files = {f"sweep.{ending}" for ending in ("csv", "json", "md", "png")} | {"runs.csv", ".lock"}
    assert {path.name for path in folder.iterdir()} == {*good, *bad, *files}
    assert read_summary(folder / good[0]) == {"status": "failed", "reason": killed}
    points = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["points"]
    assert [point["status"] for point in points] == ["skipped"] * 4 + [
        "failed",
        "completed",
        "failed",
        "failed",
    ]

    # stderr has skipped points, the number of runs, one line per run, the failure, and no output of
    # jobs.
    lines = sweep.stderr.splitlines()
    assert lines[4:6] == ["4 of 8 to run", "2 at a time with OMP_NUM_THREADS=1"]
    results = dict(re.fullmatch(r"\d/4 (\S+) (.*)", line).groups() for line in lines[6:10])
    assert re.fullmatch(
        rf"failed, val loss \d\.\d{{4}} after \d+ s of training: {re.escape(killed)}",
        results[good[0]],
    )
    assert re.fullmatch(r"completed, val loss \d\.\d{4} after \d+ s of training", results[good[1]])
    assert all(results[name].startswith("failed: the loss is nan at step") for name in bad)
    assert lines[10:] == ["error: 3 of 8 runs failed; the table has the reasons"]

    # The output of a job is in its log, and a run of a sweep equals the same run outside of it.
    assert (folder / good[1] / "log.txt").read_text(encoding="utf-8").count("step 20/20") == 1
    assert rows(folder / good[1]) == rows(train("optimizer.lr=1e-3", "seed=2").folder)


@pytest.mark.slow
def test_a_second_sweep_is_refused_and_a_run_that_is_trained_by_hand_meanwhile_is_kept(
    start, launch, tmp_path, train
):
    folder, line = tmp_path / "sweep", ["seed=1,2,3", "hydra.launcher.n_jobs=1"]
    sweep = start(*line, held="seed=1")
    for more in ([], ["resume=auto"]):
        second = launch(
            "train.py", *line, *more, "hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep", cwd=tmp_path
        )
        assert one_line(second).startswith(
            "error: another sweep uses sweep; wait for it, or choose another folder"
        )
    reported = launch("sweep_report.py", "sweep", cwd=tmp_path)
    assert (reported.returncode, reported.stderr) == (0, "")
    by_hand = train("seed=2", folder=folder / "seed=2").summary
    os.kill(int((tmp_path / "held").read_text(encoding="utf-8")), signal.SIGTERM)
    assert ended(sweep) == 1, sweep.stderr
    assert [point.status for point in read_sweep(folder)] == ["interrupted", COMPLETED, COMPLETED]
    assert read_summary(folder / "seed=2").items() <= by_hand.items()
    assert [row["status"] for row in table(folder / "runs.csv")] == [
        "interrupted",
        COMPLETED,
        COMPLETED,
    ]


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_and_an_interrupted_sweep_resume_and_complete(start, tmp_path, train):
    folder, line = tmp_path / "sweep", ["hydra.launcher.n_jobs=1", "resume=auto"]
    killed = start("seed=1,2", *line, held="seed=2")
    killed.signal(signal.SIGKILL)  # as when out of memory; workers save and exit
    assert ended(killed) == 128 + signal.SIGKILL
    assert [point.status for point in read_sweep(folder)] == [COMPLETED, "interrupted"]
    files = {
        path: path.stat().st_mtime_ns for path in (folder / "seed=1").rglob("*") if path.is_file()
    }

    interrupted = start("seed=range(1,4)", *line, held="seed=2")
    os.killpg(interrupted.pid, signal.SIGINT)  # Ctrl-C in a terminal
    assert ended(interrupted) == 128 + signal.SIGINT
    resume = "to resume, run the same command with hydra.sweep.dir=sweep resume=auto"
    assert interrupted.stderr.splitlines()[-2:] == [resume, "interrupted by SIGINT"]
    assert [point.status for point in read_sweep(folder)] == [COMPLETED, "interrupted", "waiting"]
    assert "interrupted" in interrupted.stdout  # the table is shown all the same

    wandb = ["logger=wandb", "logger.wandb.tags=[fox]", "+logger.wandb.config={host:mine}"]
    sweep = start("seed=range(1,4)", *line, *wandb)
    assert ended(sweep) == 0, sweep.stderr
    assert {
        path: path.stat().st_mtime_ns for path in files
    } == files  # completed runs are not touched
    assert [(row["seeds"], row["status"]) for row in table(folder / "sweep.csv")] == [
        ("3", COMPLETED)
    ]
    # A resumed run equals an uninterrupted one
    assert rows(folder / "seed=2") == rows(train("seed=2").folder)
    assert (folder / "seed=2" / "log.txt").read_text(encoding="utf-8").count(
        "step 10/20"
    ) == 1  # and did not begin anew

    # Weights & Biases has a run per job, and one for the summary.
    for name, tags in {"seed=2": [], "seed=3": [], "": ["summary"]}.items():
        (started,) = (
            record["run"] for record in wandb_records(folder / name) if record["type"] == "run"
        )
        assert (started["display_name"], started["run_group"]) == (name or "sweep summary", "sweep")
        assert set(started["tags"]) == {"fox", "sweep", *tags}
    # The answer, in its summary
    assert "The lowest mean loss is" in json.dumps(wandb_records(folder))
    assert "upload later with: wandb sync sweep/wandb sweep/*/wandb" in sweep.stderr
    logged = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in (folder / "wandb").rglob("*.table.json")
    ]
    rows_of, runs_of = sorted(logged, key=lambda each: "folder" in each["columns"])
    seeds, *of_run = (
        rows_of["columns"].index("seeds"),
        *map(runs_of["columns"].index, ("seed", "val_loss")),
    )
    losses = [[seed, read_summary(folder / f"seed={seed}")["best_val_loss"]] for seed in (1, 2, 3)]
    assert [[line[i] for i in of_run] for line in runs_of["data"]] == losses  # numbers
    assert rows_of["data"][0][seeds] == 3
