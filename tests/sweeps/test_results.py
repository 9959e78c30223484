"""The points of a sweep, as they are read from folders; which diverged, and which are a row."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from small_runs import composed
from sweep_folders import run_folder

from minigpt.runs.run_config import use_outside_values
from minigpt.runs.run_dir import lock_run_dir
from minigpt.sweeps.answer import answer
from minigpt.sweeps.point_settings import relevant_settings
from minigpt.sweeps.ranking import numbers, ranked
from minigpt.sweeps.results import NATS, Point, has_diverged, read_sweep
from minigpt.utils.errors import UserError


@pytest.mark.parametrize("missing", [None, "summary.json", "metrics.csv"])
def test_a_point_has_the_measurements_of_its_run_from_either_file(tmp_path, capsys, missing):
    bits = 1 / math.log(2)  # of the best validation, with two bytes per token
    measured = {"losses": (3.0, 2.0, 2.5), "bytes_per_token": 2.0, "params": 50, "speed": 128.0}
    folder = run_folder(tmp_path / "0", "seed=1", best_val_bits_per_byte=bits, **measured)
    with open(folder / "metrics.csv", "a", encoding="utf-8") as file:
        file.write("40,2560,0.3,1.")  # a line that is not complete yet
    if missing:
        (folder / missing).unlink()
    (point,) = read_sweep(tmp_path)
    expected = {
        "steps": 30,
        "tokens": 1920,
        "flops": 6 * 50 * 1920,
        "seconds": 15.0,
        "tokens_per_second": 128.0,
    }
    expected |= {"best_val_loss": 2.0, "best_val_bits_per_byte": bits}
    assert point.totals == pytest.approx(
        expected | ({} if missing == "summary.json" else {"params": 50})
    )
    assert point.status == ("crashed" if missing == "summary.json" else "completed")
    assert list(point.curve) == (
        [] if missing == "metrics.csv" else [(640, 3.0), (1280, 2.0), (1920, 2.5)]
    )
    assert capsys.readouterr().err == ""


def test_a_run_whose_folder_is_locked_is_running(tmp_path):
    run_folder(tmp_path / "0", status="interrupted")
    with lock_run_dir(tmp_path / "0", resume=True):
        (point,) = read_sweep(tmp_path)
        assert (point.status, point.loss(NATS)) == ("running", 2.0)
    (point,) = read_sweep(tmp_path)
    # Of the previous attempt, until the new one writes a summary
    assert point.status == "interrupted"


DAMAGE = {
    "metrics.csv": [b"\0\xff\xfe\n\0\n", b"step,tokens\n1,inf\n"],
    "summary.json": [b'{"status": "comp', b"[1, 2]", b"[" * 100_000],
    ".hydra/overrides.yaml": [b"- " * 2000 + b"x", b"&a [*a, *a]", b"a: b", b"- a: b"],
    ".hydra/config.yaml": [
        b"[1, 2]",
        b"a: &a [[]]\nb: [*a, *a]",
        b"a: !!python/object/apply:os.system [exit]",
    ],
}


@pytest.mark.parametrize(
    ("file", "damage"), [(file, damage) for file in DAMAGE for damage in DAMAGE[file]]
)
def test_a_damaged_file_is_reported_and_the_rest_is_shown(tmp_path, capsys, file, damage):
    for seed in "12":
        run_folder(tmp_path / seed, f"seed={seed}")
    (tmp_path / "1" / file).write_bytes(damage)
    points = read_sweep(tmp_path)
    assert re.fullmatch(
        rf"warning: .*/1/{re.escape(file)} is not readable .*\n", capsys.readouterr().err
    )
    assert [point.loss(NATS) for point in points] == [2.0, 2.0]
    assert [point.status for point in points] == [
        "crashed" if file == "summary.json" else "completed",
        "completed",
    ]
    assert [len(point.curve) for point in points] == [0 if file == "metrics.csv" else 2, 2]
    assert [point.overrides for point in points] == [
        {} if "overrides" in file else {"seed": "1"},
        {"seed": "2"},
    ]
    assert [point.settings for point in points] == [
        {} if "config" in file else {"seed": 1},
        {"seed": 2},
    ]


def planned(**claim):
    entry = {
        "folder": "0",
        "overrides": {"a": "1"},
        "status": "waiting",
        "reason": "",
        "settings": {},
        "params": 1,
    }
    return json.dumps({"fixed": [], "settings": {}, "points": [entry | claim]})


@pytest.mark.parametrize(
    "damage", ["{", '{"points": []}', planned(folder="../0"), planned(overrides=[1])]
)
def test_a_damaged_plan_is_an_error_with_the_next_step(tmp_path, damage):
    run_folder(tmp_path / "0")
    (tmp_path / "sweep.json").write_text(planned(), encoding="utf-8")
    assert read_sweep(tmp_path)[0].status == "completed"
    (tmp_path / "sweep.json").write_text(damage, encoding="utf-8")
    with pytest.raises(UserError, match=r"sweep\.json is damaged .*; remove it"):
        read_sweep(tmp_path)


def noisy_losses(rng, rows, level):
    """Training losses around `level`, with the noise of batches of 1 to 4 windows of 32 tokens,
    measured at 4 to 10 %.

    Every third run has the heavy tails of Student's t with 3 degrees of freedom, every third those
    of a log-normal.
    """
    tails = (
        rng.normal,
        lambda size: rng.standard_t(3, size) / 3**0.5,
        lambda size: rng.lognormal(0, 0.5, size) - 1,
    )
    return level * np.maximum(1 + rng.uniform(0.03, 0.11) * tails[rng.integers(3)](size=rows), 0.1)


def healthy_run(rng, kind):
    # Training and validation losses of a run that fell from ln 65, in a few rows or in many
    rows = int(rng.choice([1, 2, 3, 10, 40, 100, 400]))
    at = np.arange(1, rows + 1) / rows
    level = rng.uniform(1.4, 3.0) + (math.log(65) - 1.4) * np.exp(-rng.uniform(4, 40) * at)
    validated = level * (np.linspace(1, 1.8, rows) if kind == "overfits" else 1)
    trained = noisy_losses(
        rng, rows, level * np.linspace(1, 0.05, rows) if kind == "overfits" else level
    )
    if kind == "spikes and comes back" and rows >= 40:
        start = rng.integers(rows * 9 // 10 - 2)
        trained[start : start + rows // 20] *= 3
        validated[start : start + rows // 20] *= 3
    trained[0] *= 0.5 if kind == "has a low first row" else 1
    trained[rows // 2] *= math.nan if kind == "has a row without a number" and rows > 3 else 1
    return trained, validated


def diverged_run(rng, kind):
    # Losses that fell to 1.5 to 2.2 and rose to ln 65 or more, or exploded from the start
    rows = int(rng.choice([60, 150, 400]))
    at = np.arange(1, rows + 1) / rows
    start = {"early": rng.uniform(0.1, 0.15), "late": rng.uniform(0.91, 0.94)}.get(
        kind, rng.uniform(0.2, 0.8)
    )
    low = rng.uniform(1.5, 2.2) + 2 * np.exp(-6 * at / start)
    high = math.log(65) if kind == "early" else rng.uniform(4, 8)
    level = np.where(at > start, 4.17 * 1.5 ** (8 * at) if kind == "explodes" else high, low)
    trained = noisy_losses(rng, rows, level)
    trained[at > start] = math.nan if kind == "is NaN" else trained[at > start]
    return trained, np.where(np.isnan(trained), math.nan, level)


HEALTHY = (
    "falls",
    "overfits",
    "spikes and comes back",
    "has a low first row",
    "has a row without a number",
)


@pytest.mark.parametrize("n_validations", [0, 1, 8])
def test_of_1000_noisy_runs_none_diverged_and_of_300_that_did_all(n_validations):
    """No validation, one at the end, or eight of them.

    Single rows of most healthy runs are 20 % above their lowest.
    """
    rng = np.random.default_rng(0)
    single_rows = 0

    def diverged(kind, run):
        nonlocal single_rows
        trained, validated = run(rng, kind)
        single_rows += trained[-1] > 1.2 * min(trained)
        every = max(1, len(trained) // max(1, n_validations))
        shown = validated[::-1][::every][:n_validations][::-1]
        return has_diverged(
            np.nan_to_num(trained, nan=1e9).tolist(), np.nan_to_num(shown, nan=1e9).tolist()
        )

    for i in range(1000):
        kind = HEALTHY[i % len(HEALTHY)]
        assert not diverged(kind, healthy_run), (kind, i)
    assert single_rows > 200
    kinds = ("early", "late", "in between", "explodes", "is NaN")
    for i in range(300):
        kind = kinds[i % len(kinds)]
        assert diverged(kind, diverged_run), (kind, i)


@pytest.mark.parametrize(
    ("trained", "validated", "expected"),
    [
        ([4.2], [4.2], False),
        (
            [4.0],
            [2.0, 5.0],
            True,
        ),  # one row, the mean over all steps, because log_every exceeds them
        ([4.2, 2.5, 6.0], [2.5, 6.0], True),
        ([4.2, 2.0, 1.5], [2.0, 2.8], False),  # it overfits
        ([4.2, 2.5, 3.4], [2.6, 2.5], False),  # a noisy row
        ([4.2, 2.5, 9.0], [], False),  # two rows do not tell their noise
        ([4.2, 3.2, 2.8, 2.7, 2.6, 6.0, 6.1, 6.0, 6.2, 6.0], [], True),
        ([4.2, 3.2, 2.8, 2.7, 2.6, 2.5, 2.4, 2.4, 2.3, 6.0], [2.4, 6.0], True),
        ([], [2.0], False),
    ],
)
def test_a_few_rows_diverged_if_the_validation_loss_rose_too(trained, validated, expected):
    assert has_diverged(trained, validated) is expected


@pytest.mark.usefixtures("no_plot")
def test_a_run_diverged_by_its_losses_of_both_kinds(tmp_path):
    for name, last in (("falls", 1.5), ("rises", 6.0)):
        lines = [f"{step},{4 - step / 10 if step < 20 else last}," for step in range(1, 40)]
        lines = ["step,train_loss,val_loss", "20,,2.1", *lines, f"40,,{last}\n"]
        folder = run_folder(tmp_path / name, f"x={name}")
        (folder / "metrics.csv").write_text("\n".join(lines), encoding="utf-8")
    assert [point.diverged for point in read_sweep(tmp_path)] == [False, True]


def test_rows_of_noisy_runs_are_compared_and_those_of_diverged_ones_are_not(tmp_path):
    rng = np.random.default_rng(1)
    levels = {"1e-3": 2.0, "2e-3": 2.6, "9e-3": 4.0}
    for i, (rate, seed) in enumerate(itertools.product(levels, (1, 2, 3))):
        # The training losses begin at 2.5 and are noisy
        level = np.full(200, levels[rate])
        level[:20] = 2.5
        trained = noisy_losses(rng, 200, level)
        trained[-1] = 1.3 * trained.min()
        # The folder
        validated = levels[rate] + seed / 100
        overrides = (f"optimizer.lr={rate}", f"seed={seed}")
        folder = run_folder(tmp_path / f"{i}", *overrides, losses=(validated,))
        lines = [f"{step},{loss}," for step, loss in enumerate(trained, 1)]
        lines = ["step,train_loss,val_loss", *lines, f"200,,{validated}\n"]
        (folder / "metrics.csv").write_text("\n".join(lines), encoding="utf-8")
    points = read_sweep(tmp_path)
    assert [point.diverged for point in points] == [False] * 6 + [True] * 3
    text = " ".join(answer(ranked(points)))
    assert "1e-3 is better than 2e-3 by 0.6000" in text
    assert "1 row diverged: not compared." in text


def seeds_of(row):
    return [point.seed for point in row.points]


def shown(points):
    return [(row.overrides, seeds_of(row), row.losses) for row in ranked(points).rows]


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
        heads = "2.0" if steps == 40 else "2"  # one number in two notations
        folder = run_folder(tmp_path / name, f"model.n_head={heads}")
        settings = {
            "model": {"n_head": 2},
            "max_steps": steps,
            "resume": path,
            "pause_at": int(name),
            "seed": 1,
        }
        (folder / ".hydra/config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    found = [overrides for overrides, _, _ in shown(read_sweep(tmp_path))]
    for overrides in found:
        overrides.pop("model.n_head", None)
    expected = [{"max_steps": "20"}, {"max_steps": "40"}, {"max_steps": "20", "resume": "runs/a"}]
    assert found == expected


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
    "another start": {"resume": "runs/a"},
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
        expected = OmegaConf.to_container(OmegaConf.merge(cfg, {"seed": 0}), resolve=True)
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
    of_rate = {row.value("optimizer.lr"): seeds_of(row) for row in ranked(points).rows}
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
    assert [seeds_of(row) for row in ranked(points).rows] == [["0"], ["1"], ["2", "3"]]
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
