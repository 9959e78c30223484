"""Rows of a table: which runs are one row, and which rows compare."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from small_runs import composed
from sweep_folders import run_folder

from minigpt.runs.run_config import use_outside_values
from minigpt.sweeps.answer import answer
from minigpt.sweeps.point_settings import relevant_settings
from minigpt.sweeps.ranking import numbers, ranked
from minigpt.sweeps.results import NATS, Point, read_sweep


def shown(points):
    """The settings, seeds and losses of each row."""
    return [
        (row.overrides, [point.seed for point in row.points], row.losses)
        for row in ranked(points).rows
    ]


def test_runs_are_one_row_if_their_configurations_are_equal_and_defaults_have_their_values(
    tmp_path,
):
    for i, rate in enumerate(
        ("optimizer.lr=1e-2", "optimizer.lr=0.01", "++optimizer.lr=0.01", "model.n_head=2")
    ):
        folder = run_folder(tmp_path / f"{i}", rate, losses=(2.0 + i,))
        settings = {
            "optimizer": {"lr": 0.01 if i < 3 else 0.003},
            "model": {"n_head": 2},
            "seed": i,
            "resume": None,
        }
        (folder / ".hydra/config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    points = read_sweep(tmp_path)
    assert shown(points) == [
        ({"optimizer.lr": "1e-2"}, ["0", "1", "2"], [2.0, 3.0, 4.0]),
        ({"optimizer.lr": "0.003"}, ["3"], [5.0]),
    ]
    assert numbers(ranked(points).rows, "optimizer.lr") == [0.003, 0.01]


def test_equal_overrides_with_different_configurations_are_different_rows(tmp_path):
    for name, steps, path in (("0", 20, None), ("1", 40, None), ("2", 20, "runs/a")):
        # In two ways
        folder = run_folder(tmp_path / name, f"model.n_head={'2.0' if steps == 40 else '2'}")
        settings = {
            "model": {"n_head": 2},
            "max_steps": steps,
            "resume": path,
            "pause_at": int(name),
            "seed": 1,
        }
        (folder / ".hydra/config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    expected = [{"max_steps": "20"}, {"max_steps": "40"}, {"max_steps": "20", "resume": "runs/a"}]
    assert [
        {k: v for k, v in row[0].items() if k != "model.n_head"}
        for row in shown(read_sweep(tmp_path))
    ] == expected


VARIANTS = {
    "a default": {},
    "another seed": {"seed": 2},
    "another rate": {"optimizer.lr": 0.2},
    "a rate of the environment": {"optimizer.lr": "${oc.decode:${oc.env:LR}}"},
    "the same rate": {"optimizer.lr": 0.002},
    "the same rate and another seed": {"optimizer.lr": "${oc.decode:${oc.env:LR}}", "seed": 2},
    "the rate of the optimizer elsewhere": {
        "optimizer.lr": 0.002,
        "schedule.rate": "${optimizer.lr}",
    },
    "its value there": {"optimizer.lr": 0.002, "schedule.rate": 0.002},
    "its value there of the environment": {
        "optimizer.lr": 0.002,
        "schedule.rate": "${oc.decode:${oc.env:LR}}",
    },
    "steps of snapshots": {"callbacks.snapshots.max_steps": 1000},
    "other steps of snapshots": {"callbacks.snapshots.max_steps": 500},
    "other steps": {"max_steps": 500},
    "other steps and those of snapshots": {"max_steps": 500, "callbacks.snapshots.max_steps": 500},
    "a file of the environment and the seed": {"data.path": "${oc.env:LR}/${seed}.txt"},
    "the same file": {"data.path": "0.002/${seed}.txt"},
    "the same file of another seed": {"data.path": "0.002/${seed}.txt", "seed": 2},
    "a list": {"optimizer.betas": [0.9, "${oc.decode:${oc.env:LR}}"]},
    "the same list": {"optimizer.betas": [0.9, 0.002]},
    "a pause": {"pause_at": 250},
    "a rate of the pause": {"pause_at": 250, "optimizer.lr": "${pause_at}"},
    "a rate of another pause": {"pause_at": 500, "optimizer.lr": "${pause_at}"},
    "a logger": {"logger.rate": 0.1},
    "a rate of the logger": {"logger.rate": 0.2, "optimizer.lr": "${logger.rate}"},
}


def test_runs_are_one_row_if_and_only_if_their_resolved_settings_without_the_seed_are_equal(
    monkeypatch,
):
    monkeypatch.setenv("LR", "0.002")
    default = composed()
    rows = {}
    resolved = {}
    for name, change in VARIANTS.items():
        cfg = default.copy()
        for key, value in change.items():
            OmegaConf.update(cfg, key, value, force_add=True)
        same_seed = OmegaConf.merge(cfg, {"seed": 0})
        expected = OmegaConf.to_container(same_seed, resolve=True)
        resolved[name] = {
            key: value for key, value in expected.items() if key not in ("logger", "pause_at")
        }
        use_outside_values(cfg)
        point = Point(Path(name), {}, settings=relevant_settings(cfg))
        rows[name] = (point.row, point.seed)
    for one, other in itertools.combinations(VARIANTS, 2):
        assert (rows[one][0] == rows[other][0]) == (resolved[one] == resolved[other]), (one, other)
    assert {seed for _, seed in rows.values()} == {"1337", "2"}


def test_what_is_of_one_run_splits_no_row_and_no_password_is_written(monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "secret")
    kept = {
        "folder": "${hydra:runtime.output_dir}/x",
        "time": "${now:%S}",
        "key": "${oc.env:HUB_TOKEN}",
    }
    given = {
        "callbacks": kept,
        "logger": {"key": "${oc.env:NAME_OF_NONE}"},
        "tokens": "${oc.env:HUB_TOKENS,3}",
    }
    cfg = OmegaConf.create({**given, "text": r"\${oc.env:HOME}", "seed": "${oc.decode:'4'}"})
    use_outside_values(cfg)
    expected = {**given, "text": r"\${oc.env:HOME}", "tokens": "3", "seed": 4}
    assert OmegaConf.to_container(cfg) == expected
    point = Point(Path("0"), {}, settings=relevant_settings(cfg))
    assert (point.unrecorded, "secret" in repr(point)) == ([], False)


def test_rates_of_the_environment_are_those_that_a_run_was_trained_with(
    train, tmp_path, monkeypatch
):
    for seed, rate in enumerate(("0.002", "0.2")):
        monkeypatch.setenv("LR", rate)
        given = [
            "optimizer.lr='${oc.decode:${oc.env:LR}}'",
            f"seed={seed}",
            "max_steps=1",
            "eval_every=1",
        ]
        train(*given, folder=tmp_path / f"runs/{seed}")
    points = read_sweep(tmp_path / "runs")
    of_rate = {
        row.value("optimizer.lr"): [point.seed for point in row.points]
        for row in ranked(points).rows
    }
    assert of_rate == {"0.002": ["0"], "0.2": ["1"]}
    assert {row.label() for row in ranked(points).rows} == {"lr=0.002", "lr=0.2"}


def test_runs_of_older_versions_do_not_record_the_environment_and_are_averaged_with_no_other(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("LR", "0.2")  # not necessarily that of the runs
    for seed, lr in enumerate(
        ("${oc.decode:${oc.env:LR}}", "${oc.decode:${oc.env:LR}}", "${rate}", 0.5)
    ):
        folder = run_folder(tmp_path / f"{seed}", f"seed={seed}")
        settings = {"optimizer": {"lr": lr}, "rate": 0.5, "seed": seed}
        (folder / ".hydra/config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    points = read_sweep(tmp_path)
    assert [[point.seed for point in row.points] for row in ranked(points).rows] == [
        ["0"],
        ["1"],
        ["2", "3"],
    ]
    warnings = capsys.readouterr().err.splitlines()
    assert [Path(line.split()[1]).name for line in warnings] == ["0", "1"]
    assert all(
        line.endswith("holds no value of optimizer.lr, so it is a row of its own")
        for line in warnings
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses": (1.5,)}, "have the same settings and seed, but different losses"),
        (
            {"init_from": {"sha256": {"last": "ab"}}, "seed": 2},
            "have the same settings, but another training text or",
        ),
        (
            {"resumed_from": "a/last, step 5", "seed": 2},
            "have the same settings, but another training text or",
        ),
        (
            {"corpus_sha256": "cd", "seed": 2},
            "have the same settings, but another training text or other weights",
        ),
    ],
)
def test_runs_of_a_row_that_contradict_each_other_are_named_and_nothing_is_compared(
    tmp_path, change, message
):
    known = {"corpus_sha256": "ab", "validated": "all"}
    run_folder(tmp_path / "0", "n=1", "seed=1", losses=(2.0,), **known)
    run_folder(
        tmp_path / "1",
        "n=1",
        f"seed={change.pop('seed', 1)}",
        **{"losses": (2.0,), **known, **change},
    )
    run_folder(tmp_path / "2", "n=2", "seed=1", losses=(1.0,), **known)
    table = ranked(read_sweep(tmp_path))
    (sentence,) = answer(table)
    assert re.match(rf"\S+/0 and \S+/1 {message}", sentence)
    assert {row.margin for row in table.rows} == {None}


def test_texts_of_training_compare_if_the_validation_text_is_one(tmp_path):
    for name in ("0", "1"):
        run_folder(tmp_path / name, f"data.path={name}", validated="all", corpus_sha256=name)
    assert answer(ranked(read_sweep(tmp_path)))[0].startswith("The lowest mean loss is 2.0000")


def test_what_is_not_a_finite_loss_is_not_the_best_loss(tmp_path):
    run_folder(tmp_path / "0", "lr=1", losses=(2.0, math.nan), best_val_loss=math.nan)
    run_folder(tmp_path / "1", "lr=9", losses=(math.inf,))
    run_folder(
        tmp_path / "2",
        "lr=2",
        losses=(1.0,),
        best_val_loss="low",
        flops="many",
        seconds=None,
        reason=3,
    )
    # An integer of more than 64 bits is compared, too
    run_folder(tmp_path / "3", "lr=3", best_val_loss=10**30)
    points = read_sweep(tmp_path)
    assert [point.loss(NATS) for point in points] == [2.0, None, 1.0, 10**30]
    assert [row.loss for row in ranked(points).rows] == [1.0, 2.0, 10**30, None]
    assert (points[2].totals["flops"], points[2].reason) == (6 * 1000 * 640, "3")
