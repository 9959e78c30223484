"""Sweeps: their points, with a fake launcher, and one sweep in real processes: killed, interrupted and resumed."""

import csv
import itertools
import json
import math
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import small_run
from filelock import FileLock
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import ConfigCompositionException
from hydra.types import HydraContext, RunMode
from matplotlib import image
from omegaconf import DictConfig, OmegaConf, open_dict
from wandb_records import records

from minigpt.data.prepare import load_corpus
from minigpt.runs.run_dir import read_metrics
from minigpt.sweeps.results import COMPLETED, SKIPPED, read_sweep

ROOT = Path(__file__).resolve().parents[2]
CONFIGS, TRAIN = ROOT / "configs", ROOT / "scripts" / "train.py"
TIMED = ("seconds", "tokens_per_second", "flops_per_second", "mfu")  # columns that no two runs share


def curve(folder: Path) -> list[dict[str, str]]:
    """`metrics.csv`, but for the columns of time."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name not in TIMED} for row in csv.DictReader(file)]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


# Points of a sweep, with the real Hydra and sweeper, and a launcher that only records its jobs.


class Engine:
    """Record every job and write a summary with the `loss` of its settings.

    Args:
        bytes_per_token: by tokenizer.
    """

    def __init__(
        self, loss: Callable[[dict[str, str]], float] = lambda _: 1.0, bytes_per_token: dict[str, float] | None = None
    ) -> None:
        self.loss, self.bytes_per_token, self.batches = loss, bytes_per_token or {}, list[list[list[str]]]()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        self.batches.append([list(overrides) for overrides in job_overrides])
        for overrides in job_overrides:
            settings = dict(override.split("=", 1) for override in overrides)
            folder = Path(self.config.hydra.sweep.dir, settings["hydra.sweep.subdir"].strip("'"))
            (folder / ".hydra").mkdir(parents=True)
            loss, size = self.loss(settings), self.bytes_per_token.get(settings.get("tokenizer", ""), 1.0)
            result = {"status": "completed", "best_val_loss": loss}
            result["best_val_bits_per_byte"] = loss / math.log(2) / size
            (folder / "summary.json").write_text(json.dumps(result))
        return [JobReturn(status=JobStatus.COMPLETED) for _ in job_overrides]

    @property
    def by_folder(self) -> dict[str, DictConfig]:
        """The configurations of the jobs, in order."""
        composed = {}
        for overrides in itertools.chain(*self.batches):
            config = self.loader.load_sweep_config(self.config, overrides)
            folder = config.hydra.sweep.subdir
            with open_dict(config):
                del config["hydra"]
            composed[folder] = config
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
            sweeper.engine.loader, sweeper.engine.config = hydra.config_loader, config
            sweeper.sweep(list(config.hydra.overrides.task))
        return sweeper

    return sweep


def values_of(sweeper: Any) -> list[dict[str, str]]:
    return [dict(point.overrides) for point in sweeper.points]


AXES = {
    "values": ["optimizer.betas=[0.9,0.95],[0.8,0.9]", "model.n_kv_head=null,1"],
    "groups": ["model=nano,baby", "tokenizer=char,byte"],
    "a group and values that it sets": ["trainer=cpu,auto", "trainer.gradient_clip_val=null,1"],
    "settings that are added or forced": ["+trainer.benchmark=true,false", "++optimizer.lr=1,2"],
    "numbers": ["optimizer.weight_decay=0,0.0,1e-8,1_000,.5"],
    "strings": ["callbacks.samples.prompt='1: the','\"fox\"',\"it's\",'x=1,y','7',7,true,'null','[fox]'"],
    "parts of a group": ["callbacks.samples={seed:1},{top_k:2},{seed:3}", "seed=1,2"],
    "interpolations": ["model.dropout=${optimizer.weight_decay},0.2", "experiment=nanogpt_cpu"],
}


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_a_point_is_checked_as_the_job_composes_it(plan: Callable[..., Any], axes: list[str]) -> None:
    engine = Engine()
    sweeper = plan(*axes, engine=engine)
    ran = [point for point in sweeper.points if point.status != SKIPPED]
    assert len(ran) > 1
    composed_by_jobs = engine.by_folder
    assert {point.folder.name for point in ran} == composed_by_jobs.keys()
    for point in ran:
        checked, composed = sweeper.compose(point.overrides), composed_by_jobs[point.folder.name]
        assert plain(checked) == plain(composed), point.overrides
        assert repr(plain(checked)) == repr(plain(composed)), point.overrides  # 1 is not 1.0, nor is it true


def plain(config: DictConfig) -> Any:
    """The configuration unresolved, and the part that a model is built from resolved."""
    parts = OmegaConf.to_container(OmegaConf.create({**config, "callbacks": None, "logger": None}), resolve=True)
    return OmegaConf.to_container(config, resolve=False), parts


def test_the_product_of_all_axes_runs_in_the_order_that_they_were_given(plan: Callable[..., Any]) -> None:
    engine = Engine()
    sweeper = plan("seed=2,1", "optimizer.lr=0.1,0.2", "model.dropout=0.3,0.2", engine=engine)
    expected = [(seed, rate, dropout) for seed in (2, 1) for rate in (0.1, 0.2) for dropout in (0.3, 0.2)]
    assert [(config.seed, config.optimizer.lr, config.model.dropout) for config in engine.configs] == expected
    assert [tuple(map(float, values.values())) for values in values_of(sweeper)] == expected
    assert sweeper.points[0].folder == sweeper.folder / "seed=2,lr=0.1,dropout=0.3"
    assert all((point.folder / "summary.json").exists() for point in sweeper.points)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("seed=range(3)", ["0", "1", "2"]),
        ("seed=choice(5,3,8)", ["5", "3", "8"]),
        ("experiment=glob(nanogpt_*)", sorted(path.stem for path in CONFIGS.glob("experiment/nanogpt_*.yaml"))),
    ],
)
def test_values_expand_as_in_hydra(plan: Callable[..., Any], axis: str, expected: list[str]) -> None:
    key = axis.partition("=")[0]
    assert values_of(plan(axis)) == [{key: value} for value in expected]


def test_the_command_line_overrides_the_sweep_file_and_the_last_of_equal_settings_wins(
    plan: Callable[..., Any],
) -> None:
    sweeper = plan("+sweep=heads_by_width", "model.n_embd=32,64", "model.n_head=3,5", "model.n_head=2")
    assert values_of(sweeper) == [{"model.n_embd": "32"}, {"model.n_embd": "64"}]
    assert {config.model.n_head for config in sweeper.engine.configs} == {2}
    assert {config.max_steps for config in sweeper.engine.configs} == {300}  # the file's


def test_impossible_points_are_skipped_with_the_reason_and_the_rest_runs(
    plan: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sweeper = plan("model.n_head=2,3", "optimizer=adamw,adamv", "max_steps=0,20", "model.dropout=0,2")
    keys = ("model.n_head", "optimizer", "max_steps", "model.dropout")
    reasons = {tuple(point.overrides[key] for key in keys): point.reason for point in sweeper.points}
    assert len(reasons) == 16
    assert [key for key, reason in reasons.items() if not reason] == [("2", "adamw", "20", "0")]
    assert "model.n_embd must be divisible by model.n_head=3, got 128" in reasons["3", "adamw", "20", "0"]
    assert "optimizer=adamv does not exist (did you mean adamw?)" in reasons["2", "adamv", "20", "0"]
    assert "max_steps must be an integer ≥ 1, got 0" in reasons["2", "adamw", "0", "0"]
    assert "model.dropout must be in [0, 1), got 2" in reasons["2", "adamw", "20", "2"]
    assert [len(batch) for batch in sweeper.engine.batches] == [1]
    output = capsys.readouterr().err
    assert output.count("skipped: ") == 15
    assert "1 of 16 to run" in output
    skipped = [point for point in read_sweep(sweeper.folder) if point.status == SKIPPED]
    assert len(skipped) == 15
    assert not any(point.folder.exists() for point in skipped)


def test_points_that_share_a_corpus_load_it_once(plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(data: Any, tokenizer: Any) -> Any:
        loaded.append(tokenizer.name)
        return load_corpus(data, tokenizer)

    monkeypatch.setattr("minigpt.data.prepare.load_corpus", load)
    sweeper = plan("tokenizer=char,byte", "optimizer.lr=0.1,0.2,0.3")
    assert len(sweeper.points) == 6
    assert sorted(loaded) == ["byte", "char"]


def test_a_setting_that_no_point_has_is_an_error_at_once(plan: Callable[..., Any]) -> None:
    with pytest.raises(ConfigCompositionException, match="n_heads"):
        plan("model.n_heads=2,4")


def test_a_text_too_short_for_a_point_skips_that_point(plan: Callable[..., Any]) -> None:
    sweeper = plan("model.block_size=16,16000")
    assert [point.status for point in sweeper.points] == [COMPLETED, SKIPPED]
    assert "model.block_size + 1 = 16001" in sweeper.points[1].reason


def test_a_configuration_runs_once(plan: Callable[..., Any]) -> None:
    sweeper = plan("optimizer.lr=0.001,1e-3,0.01")
    assert [config.optimizer.lr for config in sweeper.engine.configs] == [0.001, 0.01]
    assert [point.reason for point in sweeper.points] == ["", "same configuration as another point", ""]


def test_folder_names_are_safe_whatever_the_values_hold(plan: Callable[..., Any]) -> None:
    long = "x" * 300
    sweeper = plan(f"""callbacks.samples.prompt='a/../b','a b','é',"q'q",'a-b',{long}1,{long}2""")
    names = [point.folder.name for point in sweeper.points]
    assert len(set(names)) == 7
    assert names[2].strip("-") == "prompt=-é"
    assert all(len(name.encode()) < 200 and re.fullmatch(r"[\w.,=+-]+", name) for name in names)
    assert all((sweeper.folder / name / "summary.json").exists() for name in names)  # where the job went


def test_settings_with_equal_last_parts_keep_their_full_names(plan: Callable[..., Any]) -> None:
    sweeper = plan("optimizer.weight_decay=0.1", "callbacks.samples.seed=1,2", "seed=3,4")
    assert sweeper.points[0].folder.name == "callbacks.samples.seed=1,seed=3"


def test_the_identity_of_a_point_ignores_notation_and_logging(plan: Callable[..., Any], tmp_path: Path) -> None:
    def identities(*arguments: str, folder: str) -> list[str]:
        return [point.identity for point in plan(*arguments, folder=tmp_path / folder).points]

    first = identities("seed=1,2", "optimizer.lr=1e-3,1e-2", folder="a")
    assert len(set(first)) == 4
    again = identities("optimizer.lr=0.001,0.01", "seed=choice(2,1)", "logger=tensorboard", "resume=auto", folder="b")
    assert set(again) == set(first)
    assert again != first
    other = identities("seed=1,2", "max_steps=20,21", "callbacks=default,early_stopping", folder="c")
    assert len(set(other)) == 8  # neither a setting nor a group leaves a run what it is


def test_a_resumed_sweep_runs_new_points_and_keeps_the_folders(plan: Callable[..., Any]) -> None:
    before = {point.identity: point.folder for point in plan("seed=1,2", "optimizer.lr=1e-3,1e-2").points}
    engine = Engine()
    after = plan("seed=3,2,1", "optimizer.lr=0.001,0.01", "resume=auto", engine=engine)
    assert [config.seed for config in engine.configs] == [3, 3]  # and nothing else ran
    assert len(after.points) == 6
    assert before.items() <= {point.identity: point.folder for point in after.points}.items()
    assert [point.status for point in after.points] == [COMPLETED] * 6


def test_the_latest_sweep_can_be_resumed_by_its_link(plan: Callable[..., Any], tmp_path: Path) -> None:
    plan("seed=1,2", folder=tmp_path / "first")
    assert (tmp_path / "latest").resolve() == tmp_path / "first"
    further = plan("seed=1,2,3", "resume=auto", folder=tmp_path / "latest")
    assert [len(batch) for batch in further.engine.batches] == [1]
    assert (tmp_path / "latest").resolve() == tmp_path / "first"
    assert (tmp_path / "first" / "seed=3" / "summary.json").exists()


@pytest.mark.parametrize("name", ["it's", "a b, c=[$HOME] é"])
def test_a_sweep_may_have_any_folder_and_any_tags(plan: Callable[..., Any], tmp_path: Path, name: str) -> None:
    folder, engine = tmp_path / name, Engine()
    quoted = name.replace("'", r"\'")
    sweeper = plan("seed=1,2", "logger=wandb", f"logger.wandb.tags=['{quoted}']", folder=folder, engine=engine)
    assert sweeper.folder == folder
    for config, seed in zip(engine.configs, (1, 2), strict=True):
        assert (folder / f"seed={seed}" / "summary.json").exists()
        assert config.logger.wandb.tags == [name, "sweep"]
        assert (config.logger.wandb.name, config.logger.wandb.group) == (f"seed={seed}", name)


def test_names_set_for_weights_and_biases_are_kept(plan: Callable[..., Any]) -> None:
    engine = Engine()
    plan("seed=1,2", "logger=wandb", "logger.wandb.group=mine", "logger.wandb.name=same", engine=engine)
    assert [(config.logger.wandb.group, config.logger.wandb.name) for config in engine.configs] == [
        ("mine", "same")
    ] * 2


def test_the_longest_runs_start_first(plan: Callable[..., Any]) -> None:
    engine = Engine()
    plan("model.n_embd=64,128", "max_steps=10,20", "trainer.accumulate_grad_batches=1,8", engine=engine)
    sizes = [(c.model.n_embd, c.max_steps, c.trainer.accumulate_grad_batches) for c in engine.configs]
    largest = [(128, 20, 8), (128, 10, 8), (64, 20, 8), (128, 20, 1)]
    assert sizes[:3] == largest[:3]
    assert sizes[-1] == (64, 10, 1)


SEARCH = ["hydra/sweeper=optuna", "optimizer.lr=tag(log,interval(1e-4,1e-1))", "model.n_layer=range(1,9,2)"]
SEARCH += ["optimizer=adamw,muon", "hydra.sweeper.batch=3"]


def valley(settings: dict[str, str]) -> float:
    """A loss whose lowest point is lr=0.01 with five layers and muon."""
    miss = abs(math.log10(float(settings["optimizer.lr"])) + 2) + abs(int(settings["model.n_layer"]) - 5) / 4
    return 1 + miss + (settings["optimizer"] != "muon")


def test_a_search_runs_n_trials_within_the_bounds_and_improves(plan: Callable[..., Any], tmp_path: Path) -> None:
    engine = Engine(valley)
    sweeper = plan(*SEARCH, "hydra.sweeper.n_trials=30", engine=engine)
    assert [len(batch) for batch in engine.batches] == [3] * 10
    values = values_of(sweeper)
    rates = [float(value["optimizer.lr"]) for value in values]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert sum(rate < 1e-2 for rate in rates) > 8  # an even choice of magnitudes would be even of 1e-4 … 1e-1
    assert {value["model.n_layer"] for value in values} == {"1", "3", "5", "7"}
    assert {value["optimizer"] for value in values} == {"adamw", "muon"}
    losses = [point.val_loss for point in read_sweep(sweeper.folder)]
    assert statistics.mean(losses[-10:]) < statistics.mean(losses[:10]) - 0.3

    again = plan(*SEARCH, "hydra.sweeper.n_trials=9", engine=Engine(valley), folder=tmp_path / "again")
    assert values_of(again) == values[:9]
    other = plan(*SEARCH, "hydra.sweeper.n_trials=3", "hydra.sweeper.seed=2", folder=tmp_path / "other")
    assert values_of(other) != values[:3]

    rest = Engine(valley)
    further = plan(*SEARCH, "hydra.sweeper.n_trials=12", "resume=auto", engine=rest, folder=tmp_path / "again")
    assert values_of(further) == values[:12]
    assert [len(batch) for batch in rest.batches] == [3]  # nine of twelve had ended


@pytest.mark.slow
def test_a_search_over_tokenizers_minimizes_bits_per_byte(plan: Callable[..., Any]) -> None:
    """By nats per token bytes would be best: 1.5 of them against 2, of tokens that are twice as long."""
    engine = Engine(lambda settings: {"byte": 1.5, "bpe": 2.0}[settings["tokenizer"]], {"byte": 1.0, "bpe": 2.0})
    axes = ["tokenizer=byte,bpe", "seed=range(1,100)", "++tokenizer.vocab_size=300", "hydra.sweeper.n_trials=24"]
    chosen = [value["tokenizer"] for value in values_of(plan("hydra/sweeper=optuna", *axes, engine=engine))]
    assert chosen[-10:].count("bpe") >= 8


@pytest.mark.slow
def test_a_search_does_not_count_impossible_points(plan: Callable[..., Any]) -> None:
    engine = Engine()
    search = ["hydra/sweeper=optuna", "model.n_embd=range(30,40)", "model.n_head=2,4", "optimizer.lr=interval(0.1,0.2)"]
    sweeper = plan(*search, "hydra.sweeper.n_trials=6", "hydra.sweeper.batch=4", engine=engine)
    assert [len(batch) for batch in engine.batches] == [4, 2]
    assert len({point.identity for point in sweeper.points}) == 6
    assert all(int(value["model.n_embd"]) % int(value["model.n_head"]) == 0 for value in values_of(sweeper))


@pytest.mark.slow
def test_a_search_ends_if_fewer_points_than_n_trials_exist(plan: Callable[..., Any]) -> None:
    engine = Engine()
    plan("hydra/sweeper=optuna", "seed=1,2", "hydra.sweeper.n_trials=3", engine=engine)
    assert sum(map(len, engine.batches)) == 2


@pytest.fixture
def command(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call train.py as the command line does, but in this process: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, settings: Sequence[str] = small) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(TRAIN), "-m", *settings, *arguments])
        code = 0
        try:
            runpy.run_path(str(TRAIN), run_name="__main__")
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.mark.slow
def test_a_completed_sweep_is_reported_again(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    sweep = ["tokenizer=char,missing", "max_steps=1", "hydra.sweep.dir=sweep"]
    code, out, err = command(*sweep, "hydra/launcher=basic")
    assert code == 0, err
    assert "skipped: tokenizer=missing does not exist" in err
    folder = tmp_path / "sweep/tokenizer=char"
    assert json.loads((folder / "summary.json").read_text())["status"] == COMPLETED
    (bits,) = read_metrics(folder / "metrics.csv")["val_bits_per_byte"]
    assert float(rows_of(tmp_path / "sweep/sweep.csv")[0]["val_bits_per_byte"]) == pytest.approx(bits[1])

    again, table, err = command(*sweep, "hydra/launcher=submitit_local", "resume=auto")
    assert (again, table) == (0, out[out.index("runs in") :]), err
    assert "0 of 2 to run" in err


BAD_INPUT = {
    "tokenizer=char,bpe tokenizer.vocab_size=512": "tokenizer.vocab_size does not exist here; it belongs to "
    "tokenizer=bpe",
    "model=nano,baby optimizer.lrr=1": "optimizer.lrr does not exist (did you mean optimizer.lr?)",
    "model.n_hed=2,4": "model.n_hed does not exist (did you mean model.n_head?)",
    "modell=nano,baby": "modell does not exist (did you mean model?)",
    "model.n_embd=31,33": "no point of the sweep is possible: model.n_embd must be divisible by model.n_head=2, got 31",
    "optimizer=adamv,adamx": "no point of the sweep is possible: optimizer=adamv does not exist (did you mean adamw?)",
    "seed=range(3,3)": "the sweep is empty: seed has no values",
    "seed=3": "a sweep needs a setting with several values, such as model.n_head=2,4,8",
    "seed=1,2 hydra.launcher.n_jobs=0": "hydra.launcher.n_jobs must be an integer ≥ 1, or null, got 0",
    "seed=1,2 hydra.launcher.n_jobs=many": "hydra.launcher.n_jobs must be an integer ≥ 1, or null, got many",
    "seed=1,2 hydra.launcher.threads=-1": "hydra.launcher.threads must be an integer ≥ 1, or null, got -1",
    "seed=1,2 hydra/launcher=joblab": "hydra/launcher=joblab does not exist (did you mean joblib?)",
    "seed=1,2 hydra/sweeper=optuna hydra.sweeper.n_trials=0": "hydra.sweeper.n_trials must be an integer ≥ 1, got 0",
    "seed=1,2 hydra/sweeper=optuna hydra.sweeper.batch=1.5": "hydra.sweeper.batch must be an integer ≥ 1, got 1.5",
    "model.n_embd=31,33 hydra/sweeper=optuna hydra.sweeper.n_trials=2": "no point of the search is possible",
    "seed=1,2 +sweep=wandb": "configs/sweep/wandb.yaml is for W&B's own agent",
    "seed=1,2 +sweep=heads": "sweep=heads does not exist; sweep= takes heads_by_width, search",
    "seed=1,[2": "cannot parse the override seed=1,[2",
    "seed=1,2 data.path=missing.txt": "data.path=missing.txt does not exist",
    "seed=1,2 hydra.sweep.dir=other": "other is not empty and holds no sweep; choose another folder with",
    "seed=1,2 hydra.sweep.dir=note.txt": "note.txt",
    "seed=1,2 hydra.sweep.dir=note.txt/sweep": "note.txt",
}


@pytest.mark.parametrize("arguments", BAD_INPUT)
def test_an_impossible_sweep_prints_one_line_and_writes_nothing(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    (tmp_path / "note.txt").write_text("mine")
    code, out, err = command(*arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert BAD_INPUT[arguments] in err
    assert {path.name for path in tmp_path.iterdir()} <= {"other", "note.txt", "data"}
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("hidden", "arguments", "expected"),
    [
        ("optuna", "hydra/sweeper=optuna", 'hydra/sweeper=optuna needs: pip install -e ".[optuna]"'),
        (
            "submitit",
            "hydra/launcher=submitit_local",
            'hydra/launcher=submitit_local needs: pip install -e ".[submitit]"',
        ),
    ],
)
def test_a_missing_optional_package_is_an_error_with_the_install_command(
    command: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hidden: str,
    arguments: str,
    expected: str,
) -> None:
    monkeypatch.setitem(sys.modules, hidden, None)  # as if it were not installed
    code, out, err = command("seed=1,2", arguments)
    assert code == 2
    assert expected in err.splitlines()[-1]
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert {path.name for path in tmp_path.iterdir()} <= {"data"}


# One sweep in processes of its own, in four stages: a worker is killed; it is interrupted; its parent is killed; it
# completes. Each stage resumes a copy of the folder of the stage before.

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
STAGE_AXES = ["model.n_embd=31,32", "optimizer.lr=1e-3,1e30"]
GOOD = [f"n_embd=32,lr=0.001,seed={seed}" for seed in (1, 2, 3, 4)]
DIVERGING = [f"n_embd=32,lr=1e+30,seed={seed}" for seed in (1, 2, 3, 4)]


@dataclass
class Stage:
    """A sweep in a process of its own. The runs in `held` wait from step 12 on, that many seconds per step."""

    root: Path
    text: Path
    number: int
    arguments: Sequence[str]
    held: dict[str, float]

    @property
    def folder(self) -> Path:
        return self.root / str(self.number)

    @property
    def gate(self) -> Path:
        return self.root / "gate"

    @property
    def sweep(self) -> Path:
        return (self.folder / "runs" / "sweeps" / "latest").resolve()

    def run(self, act: Callable[["Stage"], None]) -> dict[str, Any]:
        """Run it, act on it while it runs, and return its exit code, output and remaining processes."""
        self.folder.mkdir()
        arguments = [*STAGE_AXES, *self.arguments]
        if self.number > 1:
            shutil.copytree(self.root / str(self.number - 1) / "runs", self.folder / "runs", symlinks=True)
            arguments += ["resume=auto", f"hydra.sweep.dir=runs/sweeps/{self.sweep.name}"]
        shutil.rmtree(self.gate, ignore_errors=True)
        self.gate.mkdir()
        for name, seconds in self.held.items():
            (self.gate / name).write_text(str(seconds))
        (self.root / "gate_of_tests.py").write_text(GATE)
        arguments += ["+callbacks.gate._target_=gate_of_tests.Gate", f"+callbacks.gate.folder={self.gate}"]
        command = [sys.executable, str(TRAIN), "-m", *small_run(self.text, self.root / "data"), *arguments]
        env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.root), env.get("PYTHONPATH")]))
        env |= {"WANDB_MODE": "offline", "HOME": str(self.root)}
        with open(self.folder / "out.txt", "w") as out, open(self.folder / "err.txt", "w") as err:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=out, stderr=err, start_new_session=True
            )
        try:
            act(self)
            code = self.process.wait(300)
            began = time.monotonic()
            while members(self.process.pid) and time.monotonic() - began < 60:
                time.sleep(0.1)
            left = len(members(self.process.pid))
        finally:
            self.process.kill()
            self.process.wait()
            for pid in members(self.process.pid):
                os.kill(pid, signal.SIGKILL)
        out, err = ((self.folder / name).read_text() for name in ("out.txt", "err.txt"))
        return {"code": code, "out": out, "err": err, "left": left, "sweep": str(self.sweep)}

    def wait(self, file: Path) -> str:
        deadline = time.monotonic() + 300
        while not file.exists():
            assert time.monotonic() < deadline, (self.folder / "err.txt").read_text()
            assert self.process.poll() is None, (self.folder / "err.txt").read_text()
            time.sleep(0.02)
        return file.read_text()

    def wait_for(self, run: str) -> int:
        """Wait until a run is held; return its process."""
        return int(self.wait(self.gate / f"{run}.held"))


def members(session: int) -> list[int]:
    """The live processes of a session, on systems with /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def stage_result(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SimpleNamespace]:
    """Run the stages up to one, once for all pytest workers, and return the result of that one."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "stage_result"

    def begin(stage: Stage) -> None:
        first, second, third, _ = GOOD
        pid = stage.wait_for(first)
        assert stage.wait_for(second) != pid  # at the same time
        os.kill(pid, signal.SIGKILL)
        stage.wait(stage.sweep / third / "summary.json")  # by another process, for one is dead and one held
        (stage.gate / second).unlink()

    def send(signum: int, *, group: bool) -> Callable[[Stage], None]:
        def act(stage: Stage) -> None:
            stage.wait_for(GOOD[0])
            (os.killpg if group else os.kill)(stage.process.pid, signum)

        return act

    further = ["seed=range(1,5)", "hydra.launcher.n_jobs=1"]
    stages: dict[int, tuple[list[str], dict[str, float], Callable[[Stage], None]]] = {
        1: (["seed=1,2,3", "hydra.launcher.n_jobs=2"], dict.fromkeys(GOOD[:2], 3600.0), begin),
        2: (further, {GOOD[0]: 1.0}, send(signal.SIGINT, group=True)),  # Ctrl-C in a terminal
        3: (further, {GOOD[0]: 1.0}, send(signal.SIGKILL, group=False)),  # as when out of memory
        4: ([*further, "logger=wandb", "logger.wandb.tags=[fox]"], {}, lambda _: None),
    }

    def run_until(until: int) -> SimpleNamespace:
        root.mkdir(exist_ok=True)
        with FileLock(root / "lock"):
            for number in range(1, until + 1):
                result = root / f"{number}.json"
                if not result.exists():
                    arguments, held, act = stages[number]
                    shutil.rmtree(root / str(number), ignore_errors=True)
                    stage = Stage(root, base_text(text, root), number, arguments, held)
                    result.write_text(json.dumps(stage.run(act)))
            known = json.loads((root / f"{until}.json").read_text())
        return SimpleNamespace(**{**known, "sweep": Path(known["sweep"])})

    return run_until


def base_text(text: Path, root: Path) -> Path:
    """The text at a path that is the same in all pytest workers, because it is part of a run's identity."""
    if not (root / text.name).exists():
        shutil.copy(text, root)
    return root / text.name


def rows_of(table: Path) -> list[dict[str, str]]:
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_runs_the_possible_points_and_exits_with_1_if_a_run_failed(stage_result: Callable[..., Any]) -> None:
    result = stage_result(1)
    assert result.code == 1
    assert result.left == 0
    assert result.err.splitlines()[-1] == "error: 4 of 12 runs failed; the table has the reasons"
    assert {path.name for path in result.sweep.iterdir() if path.is_dir()} == {*GOOD[:3], *DIVERGING[:3]}
    statuses = [summary(result.sweep / name)["status"] for name in (*GOOD[:3], *DIVERGING[:3])]
    assert statuses == ["failed", "completed", "completed", "failed", "failed", "failed"]
    assert {path.name for path in result.sweep.iterdir() if path.is_file()} == {"sweep.csv", "sweep.json", "sweep.png"}
    latest = result.sweep.parent / "latest"
    assert latest.is_symlink()
    assert latest.readlink() == Path(result.sweep.name)
    assert image.imread(result.sweep / "sweep.png").std() > 0.02


def test_a_killed_worker_ends_only_its_own_run_and_the_reason_names_the_signal(
    stage_result: Callable[..., Any],
) -> None:
    result = stage_result(1)
    reason = "its process was killed (SIGKILL), possibly out of memory"
    assert summary(result.sweep / GOOD[0]) == {"status": "failed", "reason": reason}
    assert any(GOOD[0] in line and reason in line for line in result.err.splitlines())
    assert f"n_embd=32, lr=0.001: 2 completed, 1 failed: {reason}" in result.out
    assert any(reason in row["reason"] for row in rows_of(result.sweep / "sweep.csv"))
    assert (result.sweep / GOOD[0] / "checkpoints" / "last.safetensors").exists()


def test_stderr_lists_skipped_points_and_ended_runs(stage_result: Callable[..., Any]) -> None:
    lines = stage_result(1).err.splitlines()
    assert sum("skipped: model.n_embd must be divisible by model.n_head=2, got 31" in line for line in lines) == 6
    assert "6 of 12 to run, 2 at a time with OMP_NUM_THREADS=1" in lines
    ended = [line for line in lines if re.match(r"\d/6 ", line)]
    assert {line.split()[1] for line in ended} == {*GOOD[:3], *DIVERGING[:3]}
    assert ended[-1].startswith("6/6 ")
    assert len([line for line in ended if re.search(r"completed, val loss \d\.\d{4} after \d+ s$", line)]) == 2
    assert len([line for line in ended if "failed: the loss is nan at step" in line]) == 3
    assert len(lines) == 6 + 1 + 6 + 1, lines  # skipped, number of runs, ends, failure: no output of jobs


def test_stdout_and_sweep_csv_hold_the_ranked_table(stage_result: Callable[..., Any]) -> None:
    result = stage_result(1)
    losses = [summary(result.sweep / name)["best_val_loss"] for name in GOOD[1:3]]
    ((_, reached),) = read_metrics(result.sweep / GOOD[0] / "metrics.csv")["val_loss"]
    over = [reached, *losses]
    first, *others = rows_of(result.sweep / "sweep.csv")
    assert (first["rank"], first["model.n_embd"], first["optimizer.lr"], first["seeds"]) == ("1", "32", "0.001", "3")
    assert float(first["val_loss"]) == pytest.approx(statistics.mean(over))
    assert float(first["spread"]) == pytest.approx(statistics.stdev(over))
    assert first["status"] == "2 completed, 1 failed"
    assert [(row["rank"], row["val_loss"]) for row in others] == [("", "")] * 3
    assert sorted(row["status"] for row in others) == ["failed", "skipped", "skipped"]
    assert f"{statistics.mean(over):.4f} ± {statistics.stdev(over):.4f} (3 runs)" in result.out
    assert "the loss is nan at step" in result.out
    assert "model.n_embd must be divisible by model.n_head=2, got 31" in result.out
    assert "Traceback" not in result.out + result.err
    assert "number" not in result.out  # a word of the text, and of the samples
    plan = json.loads((result.sweep / "sweep.json").read_text())["points"]
    assert [point["status"] for point in plan] == ["skipped"] * 6 + ["failed", *["completed"] * 2, *["failed"] * 3]


def test_the_output_of_a_job_is_in_its_log(stage_result: Callable[..., Any]) -> None:
    result = stage_result(1)
    for name in GOOD[1:3]:
        log = (result.sweep / name / "log.txt").read_text()
        assert [f"step {step}/20" in log for step in (10, 20)] == [True, True]
        assert log.count("validation loss") == 1
        assert f"run folder       runs/sweeps/{result.sweep.name}/{name}\n" in log
    for name in DIVERGING[:3]:
        *_, last = (result.sweep / name / "log.txt").read_text().splitlines()
        assert last.startswith("error: the loss is nan at step")
        assert summary(result.sweep / name)["reason"].startswith("the loss is nan at step")


def test_a_run_of_a_sweep_equals_the_same_run_outside_of_it(
    stage_result: Callable[..., Any], train: Callable[..., Any]
) -> None:
    result = stage_result(1)
    alone = train("optimizer.lr=1e-3", "seed=2")
    assert curve(result.sweep / GOOD[1]) == curve(alone.folder)
    assert len(curve(alone.folder)) == 6
    assert (result.sweep / GOOD[1] / "samples.txt").read_text() == (alone.folder / "samples.txt").read_text()
    own = {"seconds", "wall_seconds", "tokens_per_second", "command", "folder"}
    assert {key: value for key, value in summary(result.sweep / GOOD[1]).items() if key not in own} == {
        key: value for key, value in alone.summary.items() if key not in own
    }
    assert curve(result.sweep / GOOD[2]) != curve(alone.folder)


@pytest.mark.slow
def test_a_signal_ends_a_sweep_cleanly(stage_result: Callable[..., Any]) -> None:
    result = stage_result(2)
    assert result.code == 128 + signal.SIGINT
    assert result.left == 0
    assert result.err.splitlines()[-1] == "interrupted by SIGINT"
    where = f"runs/sweeps/{result.sweep.name}"
    assert result.err.splitlines()[-2] == f"to resume, run the same command with hydra.sweep.dir={where} resume=auto"
    assert "Traceback" not in result.err
    points = {point.folder.name: point for point in read_sweep(result.sweep)}
    assert points[GOOD[0]].status == "interrupted"
    assert points[GOOD[0]].step >= 10
    assert summary(result.sweep / GOOD[0])["steps"] > 11
    assert points[GOOD[3]].status == "waiting"
    assert not (result.sweep / GOOD[3]).exists()
    assert [points[name].status for name in GOOD[1:3]] == [COMPLETED, COMPLETED]
    assert "interrupted" in result.out  # the table is shown all the same
    assert "waiting" in (result.sweep / "sweep.csv").read_text()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.slow
def test_workers_save_and_exit_when_their_parent_is_killed(stage_result: Callable[..., Any]) -> None:
    result = stage_result(3)
    assert result.code == -signal.SIGKILL
    assert result.left == 0
    assert summary(result.sweep / GOOD[0])["status"] == "interrupted"


@pytest.mark.slow
def test_a_resumed_sweep_does_not_touch_completed_runs(stage_result: Callable[..., Any]) -> None:
    before, after = stage_result(1).sweep, stage_result(4).sweep
    for name in GOOD[1:3]:
        files = [path.relative_to(before) for path in (before / name).rglob("*") if path.is_file()]
        assert len(files) > 6
        for file in files:
            assert (after / file).stat().st_mtime_ns == (before / file).stat().st_mtime_ns, file


@pytest.mark.slow
def test_a_resumed_run_of_a_sweep_equals_an_uninterrupted_one(
    stage_result: Callable[..., Any], train: Callable[..., Any]
) -> None:
    result = stage_result(4)
    alone = train("optimizer.lr=1e-3", "seed=1")
    assert curve(result.sweep / GOOD[0]) == curve(alone.folder)
    assert (result.sweep / GOOD[0] / "samples.txt").read_text() == (alone.folder / "samples.txt").read_text()
    assert summary(result.sweep / GOOD[0])["best_val_loss"] == alone.summary["best_val_loss"]
    assert summary(result.sweep / GOOD[0])["status"] == COMPLETED
    assert (result.sweep / GOOD[0] / "log.txt").read_text().count(
        "step 10/20"
    ) == 1  # it went on, and did not begin anew


@pytest.mark.slow
def test_a_resumed_sweep_runs_new_points_and_retries_failed_ones(stage_result: Callable[..., Any]) -> None:
    result = stage_result(4)
    assert result.code == 1
    assert result.left == 0
    assert result.err.splitlines()[-1] == "error: 4 of 16 runs failed; the table has the reasons"
    assert "6 of 16 to run, 1 at a time" in result.err
    assert [summary(result.sweep / name)["status"] for name in GOOD] == [COMPLETED] * 4
    for name in DIVERGING[:3]:
        assert (result.sweep / name / "log.txt").read_text().count("the loss is nan") == 2
    assert (result.sweep / DIVERGING[3] / "log.txt").read_text().count("the loss is nan") == 1
    first = rows_of(result.sweep / "sweep.csv")[0]
    assert (first["seeds"], first["status"]) == ("4", COMPLETED)
    assert {path.name for path in result.sweep.iterdir() if path.is_dir()} == {*GOOD, *DIVERGING, "wandb"}


@pytest.mark.slow
def test_weights_and_biases_has_a_run_per_job_and_one_for_the_summary(stage_result: Callable[..., Any]) -> None:
    result = stage_result(4)
    for name in (GOOD[0], GOOD[3], DIVERGING[0]):
        (started,) = (record["run"] for record in records(result.sweep / name) if record["type"] == "run")
        assert (started["display_name"], started["run_group"]) == (name, result.sweep.name)
        assert started["tags"] == ["fox", "sweep"]
    everything = records(result.sweep)
    (started,) = (record["run"] for record in everything if record["type"] == "run")
    assert started["run_group"] == result.sweep.name
    assert {"fox", "sweep", "summary"} == set(started["tags"])
    shown = json.dumps([record for record in everything if record["type"] == "history"])
    assert "table-file" in shown
    assert "image-file" in shown
    (offline,) = (result.sweep / "wandb").glob("offline-run-*")
    (table,) = offline.rglob("*.table.json")
    content = json.loads(table.read_text())
    with open(result.sweep / "sweep.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert content["columns"] == header
    assert content["data"] == rows
    (plot,) = offline.rglob("*.png")
    assert plot.read_bytes() == (result.sweep / "sweep.png").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["seed=1,2,3"], "holds a sweep already; resume it with resume=auto, or choose another folder"),
        (
            ["model.n_head=2,4", "resume=auto"],
            "holds another sweep, which differs in model.n_head, model.n_head=2, seed;",
        ),
        (["seed=1,2,3", "model.dropout=0.1", "resume=auto"], "holds another sweep, which differs in model.dropout=0.1"),
    ],
)
def test_another_sweep_does_not_use_the_folder_of_a_sweep(
    stage_result: Callable[..., Any], command: Callable[..., tuple[int, str, str]], arguments: list[str], expected: str
) -> None:
    sweep = stage_result(1).sweep
    before = {path: path.stat().st_mtime_ns for path in sweep.rglob("*")}
    root = sweep.parents[3]
    gate = ["+callbacks.gate._target_=gate_of_tests.Gate", f"+callbacks.gate.folder={root}/gate"]
    settings = [*small_run(root / "fox.txt", root / "data"), *STAGE_AXES, *gate]
    code, out, err = command(*arguments, f"hydra.sweep.dir={sweep}", settings=settings)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert expected in err
    assert {path: path.stat().st_mtime_ns for path in sweep.rglob("*")} == before
