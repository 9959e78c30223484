"""Sweeps: their points, with a fake launcher, and one sweep in real processes: killed, interrupted and resumed."""

import csv
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from matplotlib import image
from omegaconf import DictConfig, OmegaConf, open_dict
from small_runs import CONFIGS, SCRIPTS, small_run, wait_until, wandb_records

from minigpt.runs.run_dir import read_summary, write_summary
from minigpt.sweeps.results import BITS, COMPLETED, LOSS_NAMES, NATS, SKIPPED, read_plan, read_sweep, write_plan
from minigpt.sweeps.sweeper import Grid
from minigpt.utils.errors import UserError

TIMED = ("seconds", "tokens_per_second", "flops_per_second", "mfu")  # columns that no two runs share


def curve(folder: Path) -> list[dict[str, str]]:
    """`metrics.csv`, but for the columns of time."""
    rows = rows_of(folder / "metrics.csv")
    return [{name: value for name, value in row.items() if name not in TIMED} for row in rows]


# Points of a sweep, with the real Hydra and sweeper, and a launcher that only records its jobs.


class Engine:
    """Record every job, and write its validation curve: `loss(settings, step)`; NaN is a failure.

    Args:
        jobs: that end; the next is killed: before it writes a file, before its last validation, or before its summary.
    """

    def __init__(self, loss: Callable[[dict[str, str], int], float] = lambda *_: 1.0, jobs: int = 999) -> None:
        self.loss, self.jobs, self.damage = loss, jobs, jobs % 3
        self.batches: list[list[list[str]]] = []
        self.launches: list[dict[str, int]] = []  # of each launch, the step at which each job was to end

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> None:
        self.batches.append([list(overrides) for overrides in job_overrides])
        self.launches.append({})
        for point, overrides in zip(self.points, job_overrides, strict=True):
            settings = dict(override.partition("=")[::2] for override in overrides)
            every, last = int(settings.get("eval_every", 1)), int(settings.get("max_steps", 1))
            self.launches[-1][point.folder.name] = end = int(settings.get("pause_at", last))
            self.jobs -= 1
            if (killed := self.jobs < 0) and self.damage == 0:
                raise KeyboardInterrupt
            steps = list(range(every, end + (self.damage == 2 or not killed), every))
            losses = {step: loss for step in steps if not math.isnan(loss := self.loss(settings, step))}
            nats = math.log(2) * (2 if settings.get("tokenizer") == "char" else 1)  # per bit per byte
            rows = [f"{step},{loss},{loss / nats}\n" for step, loss in losses.items()]
            (point.folder / ".hydra").mkdir(parents=True, exist_ok=True)
            (point.folder / "metrics.csv").write_text("".join(["step,val_loss,val_bits_per_byte\n", *rows]))
            (point.folder / "summary.json").unlink(missing_ok=True)
            if killed:
                raise KeyboardInterrupt
            best = min(losses.values(), default=math.inf)
            status = "failed" if len(losses) < len(steps) else "paused" if end < last else "completed"
            totals = {"steps": max(losses, default=0), LOSS_NAMES[NATS]: best, LOSS_NAMES[BITS]: best / nats}
            write_summary(point.folder, {"status": status, **totals})
            self.on_end(point, "")

    @property
    def by_folder(self) -> dict[str, DictConfig]:
        """The configurations of the jobs as they compose them, in order."""
        composed = {}
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            for overrides in itertools.chain(*self.batches):
                config = compose("train", [*self.config.hydra.overrides.hydra, *overrides], return_hydra_config=True)
                folder = Path(config.hydra.run.dir)
                assert (folder / "summary.json").exists()
                assert folder == Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)  # of Hydra's own launcher
                with open_dict(config):
                    del config["hydra"]
                composed[folder.name] = config
        return composed

    @property
    def configs(self) -> list[DictConfig]:
        return list(self.by_folder.values())


@pytest.fixture
def plan(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Sweep without training: `plan("seed=1,2")` returns the sweeper after its sweep."""
    for name in ("report", "publish"):  # the plot takes longer than the rest
        monkeypatch.setattr(f"minigpt.sweeps.report.{name}", lambda *_: None)

    def sweep(*arguments: str, engine: Engine | None = None, folder: Path = tmp_path / "sweep") -> Any:
        quoted = str(folder).replace("'", r"\'")
        overrides = [f"data.path={text}", f"data.folder={tmp_path}/data", "model.block_size=16"]
        overrides += [f"hydra.sweep.dir='{quoted}'", *arguments]
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            config = hydra.compose_config("train", overrides, run_mode=RunMode.MULTIRUN)
            context = HydraContext(config_loader=hydra.config_loader, callbacks=None)  # type: ignore[arg-type]
            sweeper: Any = Plugins.instance().instantiate_sweeper(
                config=config, hydra_context=context, task_function=lambda _: None
            )
            sweeper.engine = engine or Engine()
            sweeper.engine.config = config
            sweeper.sweep(list(config.hydra.overrides.task))
        return sweeper

    return sweep


def values_of(sweeper: Any) -> list[dict[str, str]]:
    return [dict(point.overrides) for point in sweeper.points]


LONG = "a/../b" * 50
AXES = {
    "values": ["optimizer.betas=[0.9,0.95],[0.8,0.9]", "model.n_kv_head=1", "callbacks.samples={seed:1}"],
    "groups and values that they set": ["trainer=cpu,auto", "tokenizer=char", "trainer.gradient_clip_val=null,1"],
    "settings that are added or forced": ["+trainer.benchmark=true", "++optimizer.lr=1,2"],
    "numbers": ["optimizer.weight_decay=0,0.0,1e-8,1_000"],
    "strings": [f"callbacks.samples.prompt='1: the','1-the',\"it's\",'x=1,y','7',7,'null','[fox]',{LONG}1,{LONG}2"],
    "interpolations": ["model.dropout=${optimizer.weight_decay},0.2", "experiment=nanogpt_cpu"],
}


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_a_point_is_checked_as_the_job_composes_it(plan, axes):
    sweeper = plan(*axes)
    ran = [point for point in sweeper.points if point.status != SKIPPED]
    assert len(ran) > 1
    names, composed_by_jobs = [point.folder.name for point in ran], sweeper.engine.by_folder
    assert len(set(names)) == len(names)
    assert all(len(name.encode()) < 200 and re.fullmatch(r"[\w.,=+-]+", name) for name in names)
    assert set(names) == composed_by_jobs.keys()
    for point in ran:
        checked, composed = sweeper.compose(point.overrides), composed_by_jobs[point.folder.name]
        assert plain(checked) == plain(composed), point.overrides
        assert repr(plain(checked)) == repr(plain(composed)), point.overrides  # 1 is not 1.0, nor is it true


def plain(config: DictConfig) -> Any:
    """The configuration unresolved, and the part that a model is built from resolved."""
    parts = OmegaConf.to_container(OmegaConf.create({**config, "callbacks": None, "logger": None}), resolve=True)
    return OmegaConf.to_container(config, resolve=False), parts


REPEATED = {
    "a group and dicts of it": ["optimizer=muon", "optimizer={lr:0.01},{lr:0.02}"],
    "a dict of a group and the group": ["optimizer={lr:0.01}", "optimizer=adamw,muon"],
    "two dicts of a group": ["model={n_head:2,n_embd:64}", "model={n_embd:32},{n_layer:1}"],
    "a dict after a value that it holds": ["model.n_embd=32", "model={n_embd:64,n_layer:1},{n_layer:2}"],
    "a value after a dict that holds it": ["model={n_embd:64,n_layer:1},{n_layer:2}", "model.n_embd=32"],
    "a deleted and an added value": ["~callbacks.samples.seed", "+callbacks.samples.seed=3,4"],
    "values, of which the last wins": ["seed=1,2", "seed=3,4", "model.dropout=0.1", "++model.dropout=0.3"],
    "a choice, of which the last wins": ["schedule=cosine,linear", "schedule=constant", "seed=1,2"],
    "an added group and its settings": ["+optimizer@second=adamw,muon", "++second={lr:3}", "++second.betas=3"],
}


def composed_by_hydra(sweeper: Any, line: Sequence[str]) -> list[Any]:
    """The distinct configurations of the single command lines that a line with several values stands for."""
    swept = [re.findall(r"(?:\{.*?\}|[^,{])+", override.partition("=")[2]) or [""] for override in line]
    keys, configs = [override.partition("=")[0] for override in line], []
    task = [override for override in sweeper.cfg.hydra.overrides.task if override not in line]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for values in itertools.product(*swept):
            single = [f"{key}={value}" if value else key for key, value in zip(keys, values, strict=True)]
            configs.append(plain_or_error(compose, "train", [*task, *single]))
    return [config for i, config in enumerate(configs) if config not in configs[:i]]


def plain_or_error(function: Callable[..., DictConfig], *args: Any) -> Any:
    try:
        return OmegaConf.to_container(function(*args), resolve=False)
    except HydraException as error:
        return str(error)


@pytest.mark.parametrize(
    "line",
    [pytest.param(REPEATED[name], id=name, marks=[pytest.mark.slow] * (i % 2)) for i, name in enumerate(REPEATED)],
)
def test_a_point_composes_as_the_single_command_line_with_its_values(plan, line):
    sweeper = plan(*line)
    expected = composed_by_hydra(sweeper, line)
    assert len(expected) > 1
    assert [plain(sweeper.compose(point.overrides))[0] for point in sweeper.points] == expected
    jobs = {name: plain(config)[0] for name, config in sweeper.engine.by_folder.items()}
    assert [jobs[point.folder.name] for point in sweeper.points] == expected
    read = read_sweep(sweeper.folder)
    assert len({tuple(point.overrides.items()) for point in read}) == len(expected)  # a report separates them, too


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_generated_sweeps_compose_as_single_command_lines(plan, monkeypatch, seed):
    for name in ("batches", "_report"):  # compose only
        monkeypatch.setattr(Grid, name, lambda _: ())
    pool = ["optimizer=adamw,muon", "optimizer=muon", "model=nano,baby", "schedule=cosine,linear", "seed=1,2"]
    pool += ["optimizer={lr:1},{lr:2,weight_decay:3}", "optimizer.lr=4,5", "++optimizer.lr=6", "++optimizer={new:1}"]
    pool += ["model={n_head:2,n_embd:32},{n_head:4}", "model={n_embd:48}", "model.n_head=8,16", "~model.n_head"]
    pool += ["callbacks.samples=null,{seed:1}", "++callbacks.samples.seed=2,3", "~callbacks.samples.seed", "debug=fast"]
    pool += ["+callbacks.samples.new=1,2", "++callbacks.samples.new=3", "+optimizer@second=adamw,muon", "~schedule"]
    line = random.Random(seed).choices(pool, k=random.Random(seed).randint(2, 4))
    try:
        sweeper = plan(*line, "log_every=10,20")
    except HydraException:  # of the line without its settings with several values
        return
    axes = [list(axis.sweep_string_iterator()) for axis in sweeper.axes.values()]
    points = [dict(zip(sweeper.axes, values, strict=True)) for values in itertools.product(*axes)]
    found = [plain_or_error(sweeper.compose, values) for values in points]
    expected = composed_by_hydra(sweeper, [*line, "log_every=10,20"])
    assert all(config in expected for config in found), line
    assert all(config in found for config in expected if not isinstance(config, str)), line


@pytest.mark.parametrize(
    "line",
    [
        ["model.n_head=2,4", "model={n_head:8}"],
        ["callbacks.samples={seed:1},{seed:2}", "callbacks.samples=null", "seed=1,2"],
    ],
)
def test_a_setting_whose_values_have_no_effect_is_refused(plan, line):
    with pytest.raises(UserError, match=rf"^{line[0].partition('=')[0]} has the same effect with all its values"):
        plan(*line)


@pytest.mark.parametrize(("given", "expected"), [([], "eval_batches=null"), (["eval_batches=3"], "eval_batches=3")])
def test_the_plans_of_a_sweep_validate_on_the_same_text(plan, given, expected):
    """Without a value that is given, each plan would choose a part."""
    (jobs,) = plan("minutes=1", "seed=1,2", *given).engine.batches
    assert [[text for text in job if "eval_batches" in text] for job in jobs] == [[expected]] * 2


def test_a_setting_that_another_replaces_is_not_swept(plan):
    with pytest.raises(UserError, match="a sweep needs a setting with several values"):
        plan("model.dropout=0.0,0.1", "++model.dropout=0.2")


def test_the_product_of_all_axes_runs_in_the_order_given_in_all_notations_of_hydra(plan):
    sweeper = plan("seed=range(2,0,-1)", "schedule=glob(c*)", "callbacks.samples.seed='é',3")
    expected = list(itertools.product("21", ("constant", "cosine"), ("'é'", "3")))
    assert [tuple(values.values()) for values in values_of(sweeper)] == expected
    assert sweeper.points[0].folder == sweeper.folder / "seed=2,schedule=constant,callbacks.samples.seed=-é-"


def test_the_command_line_overrides_the_sweep_file_and_the_last_of_equal_settings_wins(plan):
    sweeper = plan("+sweep=heads_by_width", "model.n_embd=32,64", "model.n_head=3,5", "model.n_head=2", "seed=1")
    assert values_of(sweeper) == [{"model.n_embd": "32"}, {"model.n_embd": "64"}]
    assert {config.model.n_head for config in sweeper.engine.configs} == {2}
    assert {config.max_steps for config in sweeper.engine.configs} == {300}  # the file's


def test_impossible_points_are_skipped_with_the_reason_and_the_rest_runs(plan, capsys):
    sweeper = plan("model.n_head=2,3", "optimizer=adamw,adamv", "model.block_size=16,16000")
    keys = ("model.n_head", "optimizer", "model.block_size")
    reasons = {tuple(point.overrides[key] for key in keys): point.reason for point in sweeper.points}
    assert len(reasons) == 8
    assert [key for key, reason in reasons.items() if not reason] == [("2", "adamw", "16")]
    assert "model.n_embd must be divisible by model.n_head=3, got 128" in reasons["3", "adamw", "16"]
    assert "optimizer=adamv does not exist (did you mean adamw?)" in reasons["2", "adamv", "16"]
    assert "model.block_size + 1 = 16001" in reasons["2", "adamw", "16000"]
    assert [len(batch) for batch in sweeper.engine.batches] == [1]
    output = capsys.readouterr().err
    assert (output.count("skipped: "), output.count("1 of 8 to run")) == (7, 1)
    skipped = [point for point in read_sweep(sweeper.folder) if point.status == SKIPPED]
    assert [point.folder.exists() for point in skipped] == [False] * 7


def test_a_resumed_sweep_runs_new_points_whatever_the_notation_and_the_logging(plan, tmp_path):
    first, latest = tmp_path / "first", tmp_path / "latest"
    before = plan("optimizer.lr=0.001,1e-3,0.01", folder=first).points
    assert [point.reason for point in before] == ["", "same configuration as another point", ""]
    assert latest.resolve() == first
    after = plan("optimizer.lr=choice(0.1,1e-2,1e-3)", "logger=tensorboard", "resume=auto", folder=latest)
    assert [config.optimizer.lr for config in after.engine.configs] == [0.1]  # and nothing else ran
    kept = {(point.identity, point.folder.name) for point in after.points}
    assert {(point.identity, point.folder.name) for point in before if not point.reason} < kept
    assert [point.status for point in after.points] == [COMPLETED] * 3
    assert latest.resolve() == first
    assert (first / "lr=0.1" / "summary.json").exists()


def test_a_sweep_is_extended_by_some_of_its_values_and_other_seeds(plan):
    """The points that it holds already stay in the sweep, and one without a seed is that of the default seed."""
    first = plan("model.n_head=2,4", "model.n_embd=32,64")
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("summary.json")}
    further = plan("model.n_head=2", "model.n_embd=64,128", "seed=1337,1338", "resume=auto")
    assert [(config.model.n_embd, config.seed) for config in further.engine.configs] == [
        *((128, 1337), (128, 1338), (64, 1338)),  # the longest first
    ]
    keys = ("model.n_head", "model.n_embd", "seed")
    points = [point.overrides for point in read_sweep(further.folder)]
    assert sorted(tuple(point[key] for key in keys if key in point) for point in points) == [
        *(("2", "128", "1337"), ("2", "128", "1338"), ("2", "32"), ("2", "64", "1337"), ("2", "64", "1338")),
        *(("4", "32"), ("4", "64")),
    ]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_another_sweep_does_not_use_the_folder_of_a_sweep(plan, tmp_path):
    Path(plan("seed=1,2").folder, "seed=2/summary.json").unlink()  # to be run again by the same command
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sweep/**")}
    for arguments, expected in (
        (["seed=1,2"], "holds a sweep already; resume it with resume=auto, or choose another folder"),
        (["model.n_head=2,4", "resume=auto"], "holds another sweep, which differs in model.n_head;"),
        (["seed=1,2", "max_steps=9", "resume=auto"], "holds another sweep, which differs in max_steps=9;"),
    ):
        with pytest.raises(UserError, match=re.escape(expected)):
            plan(*arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sweep/**")} == before


def test_a_sweep_may_have_any_folder_and_any_tags_and_names_for_weights_and_biases(plan, tmp_path):
    name = "it's a b, c=[$HOME] é"
    tags = "['{}']".format(name.replace("'", r"\'"))
    sweeper = plan("seed=1,2", "logger=wandb", f"logger.wandb.tags={tags}", folder=tmp_path / name)
    for config, seed in zip(sweeper.engine.configs, (1, 2), strict=True):
        assert (tmp_path / name / f"seed={seed}" / "summary.json").exists()
        given = config.logger.wandb
        assert (given.tags, given.name, given.group) == ([name, "sweep"], f"seed={seed}", name)
    (config, _) = plan("seed=1,2", "logger=wandb", "logger.wandb.group=mine", "logger.wandb.name=same").engine.configs
    assert (config.logger.wandb.group, config.logger.wandb.name) == ("mine", "same")


VALLEY = ["optimizer.lr=tag(log,interval(1e-4,1e-1))", "model.n_layer=range(1,9,2)", "optimizer=adamw,muon"]
VALLEY += ["hydra/sweeper=optuna", "hydra.sweeper.batch=3"]


def valley(settings: dict[str, str], _: int) -> float:
    """A loss whose lowest point is lr=0.01 with five layers and muon."""
    miss = abs(math.log10(float(settings["optimizer.lr"])) + 2) + abs(int(settings["model.n_layer"]) - 5) / 4
    return 1 + miss + (settings["optimizer"] != "muon")


@pytest.mark.slow
def test_a_search_runs_n_trials_within_the_bounds_and_improves(plan, tmp_path):
    sweeper = plan(*VALLEY, "hydra.sweeper.n_trials=30", engine=Engine(valley))
    assert [len(batch) for batch in sweeper.engine.batches] == [3] * 10
    values = values_of(sweeper)
    assert all(1e-4 <= float(value["optimizer.lr"]) <= 1e-1 for value in values)
    assert {value["model.n_layer"] for value in values} == {"1", "3", "5", "7"}
    assert {value["optimizer"] for value in values} == {"adamw", "muon"}
    losses = [point.loss(NATS) for point in read_sweep(sweeper.folder)]
    assert statistics.mean(losses[-10:]) < statistics.mean(losses[:10]) - 0.3

    again = plan(*VALLEY, "hydra.sweeper.n_trials=9", engine=Engine(valley), folder=tmp_path / "again")
    assert values_of(again) == values[:9]
    more = ["hydra.sweeper.n_trials=12", "resume=auto"]
    further = plan(*VALLEY, *more, engine=Engine(valley), folder=tmp_path / "again")
    assert values_of(further) == values[:12]
    assert [len(batch) for batch in further.engine.batches] == [3]  # nine of twelve had ended


@pytest.mark.slow
def test_a_search_over_tokenizers_minimizes_bits_per_byte(plan):
    """By nats per token bytes would be best: 1.5 of them against 2, of characters that are twice as long."""
    engine = Engine(lambda settings, _: {"byte": 1.5, "char": 2.0}[settings["tokenizer"]])
    axes = ["hydra/sweeper=optuna", "tokenizer=byte,char", "seed=range(1,100)"]
    sweeper = plan(*axes, "hydra.sweeper.n_trials=24", engine=engine)
    assert [value["tokenizer"] for value in values_of(sweeper)][-10:].count("char") >= 8


def test_a_search_does_not_count_impossible_points(plan, tmp_path, capsys):
    search = ["hydra/sweeper=optuna", "hydra.sweeper.batch=4"]
    axes = ["model.n_head=range(1,9)", "optimizer.lr=interval(0.1,0.2)"]
    sweeper = plan(*search, *axes, "hydra.sweeper.n_trials=6")
    assert [len(batch) for batch in sweeper.engine.batches] == [4, 2]
    assert {point.overrides["model.n_head"] for point in sweeper.points} <= set("1248")  # they divide n_embd
    with pytest.raises(UserError, match=r"no point of the search is possible: .* must be divisible"):
        plan(*search, "model.n_head=3,5", "hydra.sweeper.n_trials=1", folder=tmp_path / "none")
    plan(*search, "model.n_head=2,3", "hydra.sweeper.n_trials=2", folder=tmp_path / "fewer")
    assert "the search ends after 1 runs: 40 tries found no other possible point" in capsys.readouterr().err


BAD_INPUT = {
    "tokenizer=char,bpe tokenizer.vocab_size=512": "tokenizer.vocab_size does not exist here; it belongs to "
    "tokenizer=bpe",
    "model.n_hed=2,4": "model.n_hed does not exist (did you mean model.n_head?)",
    "model.n_embd=31,33": "no point of the sweep is possible: model.n_embd must be divisible by model.n_head=2, got 31",
    "seed=range(3,3)": "the sweep is empty: seed has no values",
    "seed=3": "a sweep needs a setting with several values, such as model.n_head=2,4,8",
    "seed=1,2 hydra.launcher.n_jobs=0": "hydra.launcher.n_jobs must be an integer ≥ 1, or null, got 0",
    "seed=1,2 hydra/sweeper=basic": "hydra/sweeper must be grid or optuna, got hydra._internal",
    "seed=1,2 hydra.sweeper.prune=true eval_every=20": "eval_every must be < 5 (max_steps / 4) with "
    "hydra.sweeper.prune=true, got 20",
    "seed=1,2 +sweep=wandb": "configs/sweep/wandb.yaml is for W&B's own agent",
    "seed=1,2 logger=wandb +logger.wandb.id=fox": "logger.wandb.id must be null in a sweep, whose runs have one each, "
    "got fox",
    "seed=1,2 +sweep=heads": "sweep=heads does not exist; sweep= takes heads_by_width, search",
    "seed=1,2 hydra/launcher=submitit_slurm trainer=ddp trainer.devices=2": "trainer.devices must be 1 with "
    "hydra/launcher=submitit_slurm, got 2",
    "seed=1,2 hydra.sweep.dir=other": "other is not empty and holds no sweep; choose another folder with",
}


@pytest.mark.parametrize("arguments", BAD_INPUT)
def test_an_impossible_sweep_prints_one_line_and_writes_nothing(call, tmp_path, arguments):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    refused = call("train.py", *arguments.split(), "-m")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.fullmatch(f"error: .*{re.escape(BAD_INPUT[arguments])}.*\n", refused.stderr)
    assert {path.name for path in tmp_path.iterdir()} <= {"other", "data"}
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("package", "choice"), [("optuna", "hydra/sweeper=optuna"), ("submitit", "hydra/launcher=submitit_local")]
)
def test_a_missing_optional_package_is_an_error_with_the_install_command(call, monkeypatch, package, choice):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    refused = call("train.py", "seed=1,2", choice, "-m")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert f'{choice} needs {package}; pip install -e ".[{package}]"' in refused.stderr
    assert not Path("runs").exists()


# One sweep in processes of its own.

GATE = """
import os, time
from pathlib import Path
from lightning.pytorch.callbacks import Callback

class Gate(Callback):
    def __init__(self, folder):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer, *_):
        name = Path(trainer.default_root_dir).name
        hold, held = self.folder / name, self.folder / f"{name}.held"
        if trainer.global_step >= 12 and hold.exists():
            if not held.exists():
                held.with_suffix(".new").write_text(str(os.getpid()))
                held.with_suffix(".new").rename(held)
            end = time.monotonic() + float(hold.read_text())
            while hold.exists() and time.monotonic() < end:
                time.sleep(0.05)
"""
GOOD = [f"n_embd=32,lr=0.001,seed={seed}" for seed in (1, 2, 3, 4)]
DIVERGING = [f"n_embd=32,lr=1e+30,seed={seed}" for seed in (1, 2, 3, 4)]


class RealSweep:
    """A sweep in processes of its own, which can be resumed."""

    def __init__(self, root: Path, text: Path) -> None:
        self.root, self.gate = root, root / "gate"
        self.command = [sys.executable, str(SCRIPTS / "train.py"), "-m", *small_run(text, root / "data")]
        self.command += ["model.n_embd=31,32", "optimizer.lr=1e-3,1e30"]
        self.command += ["+callbacks.gate._target_=gate_of_tests.Gate", f"+callbacks.gate.folder={self.gate}"]
        (root / "gate_of_tests.py").write_text(GATE)

    @property
    def folder(self) -> Path:
        return (self.root / "runs" / "sweeps" / "latest").resolve()

    def run(
        self, *arguments: str, held: dict[str, float] | None = None, act: Callable[[], None] = lambda: None
    ) -> tuple[int, str, str]:
        """Start it, act while it runs, and return its exit code, stdout and stderr; no process may be left.

        Args:
            held: runs that wait from step 12 on, that many seconds per step.
        """
        shutil.rmtree(self.gate, ignore_errors=True)
        self.gate.mkdir()
        for name, seconds in (held or {}).items():
            (self.gate / name).write_text(str(seconds))
        env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.root), env.get("PYTHONPATH")]))
        env |= {"WANDB_MODE": "offline", "HOME": str(self.root)}
        self.out, self.err = self.root / "out.txt", self.root / "err.txt"
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(
                [*self.command, *arguments], cwd=self.root, env=env, stdout=out, stderr=err, start_new_session=True
            )
        try:
            act()
            code = self.process.wait(300)
            wait_until(lambda: not members(self.process.pid), 60)
        finally:
            self.process.kill()
            self.process.wait()
            for pid in members(self.process.pid):
                os.kill(pid, signal.SIGKILL)
        return code, self.out.read_text(), self.err.read_text()

    def resume(self, *arguments: str, **options: Any) -> tuple[int, str, str]:
        return self.run("resume=auto", f"hydra.sweep.dir=runs/sweeps/{self.folder.name}", *arguments, **options)

    def wait(self, file: Path) -> str:
        wait_until(lambda: file.exists() or self.process.poll() is not None)
        assert file.exists(), self.err.read_text()
        return file.read_text()

    def wait_for(self, run: str) -> int:
        """Wait until a run is held; return its process."""
        return int(self.wait(self.gate / f"{run}.held"))

    def run_three_seeds_and_kill_a_worker(self) -> tuple[int, str, str]:
        first, second, third, _ = GOOD

        def act() -> None:
            pid = self.wait_for(first)
            assert self.wait_for(second) != pid  # at the same time
            os.kill(pid, signal.SIGKILL)
            self.wait(self.folder / third / "summary.json")  # by another process, for one is dead and one held
            (self.gate / second).unlink()

        return self.run("seed=1,2,3", "hydra.launcher.n_jobs=2", held=dict.fromkeys(GOOD[:2], 3600.0), act=act)


def members(session: int) -> list[int]:
    """The live processes of a session, on systems with /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def rows_of(table: Path) -> list[dict[str, str]]:
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


def logs_of(folder: Path, names: Sequence[str]) -> list[str]:
    return [(folder / name / "log.txt").read_text() for name in names]


def statuses_of(folder: Path, names: Sequence[str]) -> list[str]:
    return [read_summary(folder / name)["status"] for name in names]


@pytest.mark.slow
def test_a_sweep_reports_every_point_when_runs_fail_and_a_worker_is_killed(text, tmp_path, train):
    sweep = RealSweep(tmp_path, text)
    code, out, err = sweep.run_three_seeds_and_kill_a_worker()
    folder, lines, ran = sweep.folder, err.splitlines(), [*GOOD[:3], *DIVERGING[:3]]
    killed = "its process was killed (SIGKILL), possibly out of memory"
    assert code == 1, err
    assert (folder.parent / "latest").readlink() == Path(folder.name)
    assert {path.name for path in folder.iterdir()} == {*ran, *(f"sweep.{end}" for end in ("csv", "json", "md", "png"))}
    assert statuses_of(folder, ran) == ["failed", "completed", "completed", "failed", "failed", "failed"]
    assert read_summary(folder / GOOD[0]) == {"status": "failed", "reason": killed}
    assert (folder / GOOD[0] / "checkpoints" / "last.safetensors").exists()
    assert image.imread(folder / "sweep.png").std() > 0.02

    # stderr has skipped points, the number of runs, one line per run, the failure, and no output of jobs.
    assert sum("skipped: model.n_embd must be divisible by model.n_head=2, got 31" in line for line in lines) == 6
    assert lines[6:8] == ["6 of 12 to run", "2 at a time with OMP_NUM_THREADS=1"]
    results = dict(re.fullmatch(r"\d/6 (\S+) (.*)", line).groups() for line in lines[8:14])
    assert results.keys() == set(ran)
    assert re.fullmatch(rf"failed, val loss \d\.\d{{4}} after \d+ s: {re.escape(killed)}", results[GOOD[0]])
    assert all(re.fullmatch(r"completed, val loss \d\.\d{4} after \d+ s", results[name]) for name in GOOD[1:3])
    assert all(results[name].startswith("failed: the loss is nan at step") for name in DIVERGING[:3])
    assert lines[14:] == ["error: 4 of 12 runs failed; the table has the reasons"]

    # stdout has the table, sweep.csv too, and sweep.json every point.
    first, *others = rows_of(folder / "sweep.csv")
    assert (first["seeds"], first["status"], first["reason"]) == ("3", "2 completed, 1 failed", killed)
    assert sorted(row["status"] for row in others) == ["failed", "skipped", "skipped"]
    assert re.search(r"1\* +32 +0\.001 +\d\.\d{4} \(3 runs\) .* 2 completed, 1 failed", out)
    assert out.startswith("No run has completed with a loss, so nothing can be compared.")
    assert "number" not in out  # a word of the text, and of the samples
    plan = json.loads((folder / "sweep.json").read_text())["points"]
    assert [point["status"] for point in plan] == ["skipped"] * 6 + statuses_of(folder, ran)

    # The output of a job is in its log.
    (log,) = logs_of(folder, GOOD[1:2])
    assert [log.count(line) for line in ("step 10/20", "step 20/20", "validation loss")] == [1, 1, 1]
    assert all(log.splitlines()[-1].startswith("error: the loss is nan") for log in logs_of(folder, DIVERGING[:3]))

    # A run of a sweep equals the same run outside of it.
    alone = train("optimizer.lr=1e-3", "seed=2")
    assert curve(folder / GOOD[1]) == curve(alone.folder) != curve(folder / GOOD[2])
    assert (folder / GOOD[1] / "samples.txt").read_text() == (alone.folder / "samples.txt").read_text()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.slow
def test_an_interrupted_and_a_killed_sweep_resume_and_complete(text, tmp_path, train):
    sweep = RealSweep(tmp_path, text)
    sweep.run_three_seeds_and_kill_a_worker()
    folder, held = sweep.folder, {GOOD[0]: 1.0}
    further = ["seed=range(1,5)", "hydra.launcher.n_jobs=1"]
    files = [path for name in GOOD[1:3] for path in (folder / name).rglob("*") if path.is_file()]
    times = {path: path.stat().st_mtime_ns for path in files}
    assert len(files) > 12

    def interrupt() -> None:  # Ctrl-C in a terminal
        sweep.wait_for(GOOD[0])
        os.killpg(sweep.process.pid, signal.SIGINT)

    code, out, err = sweep.resume(*further, held=held, act=interrupt)
    assert code == 128 + signal.SIGINT
    resume = f"to resume, run the same command with hydra.sweep.dir=runs/sweeps/{folder.name} resume=auto"
    assert err.splitlines()[-2:] == [resume, "interrupted by SIGINT"]
    points = {point.folder.name: point for point in read_sweep(folder)}
    assert [points[name].status for name in GOOD] == ["interrupted", COMPLETED, COMPLETED, "waiting"]
    assert read_summary(folder / GOOD[0])["steps"] > 11
    assert "interrupted" in out  # the table is shown all the same

    def kill() -> None:  # as when out of memory; workers save and exit
        sweep.wait_for(GOOD[0])
        (folder / GOOD[0] / "summary.json").unlink(missing_ok=True)
        sweep.process.kill()

    code, _, _ = sweep.resume(*further, held=held, act=kill)
    assert code == -signal.SIGKILL
    assert statuses_of(folder, GOOD[:1]) == ["interrupted"]

    wandb = ["logger=wandb", "logger.wandb.tags=[fox]", "+logger.wandb.config={host:mine}"]
    code, _, err = sweep.resume(*further, *wandb)
    assert code == 1, err
    assert "6 of 16 to run\n1 at a time" in err
    assert statuses_of(folder, GOOD) == [COMPLETED] * 4
    assert {path: path.stat().st_mtime_ns for path in files} == times  # completed runs are not touched
    first = rows_of(folder / "sweep.csv")[0]
    assert (first["seeds"], first["status"]) == ("4", COMPLETED)

    # A resumed run equals an uninterrupted one.
    alone = train("optimizer.lr=1e-3", "seed=1")
    assert curve(folder / GOOD[0]) == curve(alone.folder)
    assert logs_of(folder, GOOD[:1])[0].count("step 10/20") == 1  # it went on, and did not begin anew

    # Weights & Biases has a run per job, and one for the summary.
    for name in (GOOD[0], GOOD[3], DIVERGING[0]):
        (started,) = (record["run"] for record in wandb_records(folder / name) if record["type"] == "run")
        assert (started["display_name"], started["run_group"]) == (name, folder.name)
        assert started["tags"] == ["fox", "sweep"]
    (started,) = (record["run"] for record in wandb_records(folder) if record["type"] == "run")
    assert (started["run_group"], set(started["tags"])) == (folder.name, {"fox", "sweep", "summary"})
    assert "The lowest loss is" in json.dumps(wandb_records(folder))  # the answer, in its summary
    (offline,) = (folder / "wandb").glob("offline-run-*")
    (table,) = offline.rglob("*.table.json")
    rows = rows_of(folder / "sweep.csv")
    assert json.loads(table.read_text())["data"] == [list(row.values()) for row in rows]
    (plot,) = offline.rglob("*.png")
    assert plot.read_bytes() == (folder / "sweep.png").read_bytes()


@pytest.mark.parametrize("line", ["hydra.sweeper.prune=true", "hydra/sweeper=optuna"])
def test_pruning_and_searches_refuse_points_that_validate_on_different_texts(plan, line):
    with pytest.raises(UserError, match=r"need one validation text for all points, got all .* bytes; all .* bytes"):
        plan(line, "data.val_fraction=0.1,0.3", "eval_every=10")


def test_a_point_whose_configuration_changed_is_not_counted_twice(plan):
    sweeper = plan("seed=1,2")
    points = read_plan(sweeper.folder)[1]
    write_plan(sweeper.folder, sweeper.fixed, [replace(point, identity=f"old{point.seed}") for point in points])
    with pytest.raises(UserError, match=r"holds \{'seed': '1'\} of another configuration; choose another folder"):
        plan("seed=1,2", "resume=auto")


def test_a_sweep_resumes_with_its_settings_in_their_order(plan):
    sweeper = plan("seed=1,2", "minutes=1", "model.n_embd=32", "model={n_embd:64}")
    plan("seed=1,2", "minutes=1", "model.n_embd=32", "model={n_embd:64}", "resume=auto")
    assert "eval_batches=null" not in read_plan(sweeper.folder)[0]  # which was not typed
    with pytest.raises(UserError, match=r"holds another sweep, which differs in the order of settings; use its"):
        plan("seed=1,2", "minutes=1", "model={n_embd:64}", "model.n_embd=32", "resume=auto")
