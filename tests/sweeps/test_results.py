"""A sweep folder and its report: points, rows, the table, the plot."""

import itertools
import json
import math
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from scipy import stats
from small_runs import composed, table

from minigpt.runs.run_config import use_outside_values
from minigpt.runs.run_dir import lock_run_dir
from minigpt.sweeps.answer import answer
from minigpt.sweeps.point_settings import relevant_settings
from minigpt.sweeps.ranking import highest_converged, pareto_front, ranked
from minigpt.sweeps.report import print_table, report, write_runs, write_table
from minigpt.sweeps.results import NATS, Point, has_diverged, read_sweep, write_plan
from minigpt.sweeps.sweep_plots import sweep_figure
from minigpt.utils.errors import UserError

TOKENS = 64  # per step
FILES = {"sweep.csv", "sweep.md", "sweep.png", "runs.csv"}


def run_folder(
    folder, *overrides, losses=(3.0, 2.0), bytes_per_token=None, params=1000, speed=100.0, **summary
):
    """Write the folder of a run: a validation every 10 steps; no summary if its status is None."""
    (folder / ".hydra").mkdir(parents=True)
    # YAML, too
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(list(overrides)), encoding="utf-8")
    given = (override.lstrip("+").partition("=") for override in overrides)
    settings = {key: int(value) if value.isdecimal() else value for key, _, value in given}
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    steps = 10 * len(losses)
    lines = [
        "step,tokens,seconds,train_loss,val_loss,val_bits_per_byte,tokens_per_second,flops_per_second"
    ]
    for step, loss in zip(range(10, steps + 1, 10), losses, strict=True):
        tokens, bits = (
            step * TOKENS,
            loss / math.log(2) / bytes_per_token if bytes_per_token else "",
        )
        lines.append(
            f"{step},{tokens},{tokens / speed},{loss + 0.1},,,{speed},{6 * params * speed}"
        )
        lines.append(f"{step},,,,{loss},{bits},,")
    if losses:
        (folder / "metrics.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    values = {
        "status": "completed",
        "best_val_loss": min(losses, default=None),
        "params": params,
        "steps": steps,
    }
    values |= {
        "tokens": steps * TOKENS,
        "flops": 6 * params * steps * TOKENS,
        "seconds": steps * TOKENS / speed,
    }
    values |= {"tokens_per_second": speed, **summary}
    if values["status"]:
        (folder / "summary.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def grid(folder):
    losses = [2.0, 2.2, 2.5, 2.7, 1.5, 1.9, 3.0, 4.0]
    for i, (size, rate, seed) in enumerate(itertools.product((32, 64), ("1e-3", "1e-2"), (1, 2))):
        overrides = (f"model.n_embd={size}", f"optimizer.lr={rate}", f"seed={seed}", "max_steps=20")
        known = {
            "losses": (5.0, losses[i]),
            "params": 100 * size,
            "bytes_per_token": 2 / math.log(2),
        }
        run_folder(folder / f"{i}", *overrides, **known)
    return folder


def points_of(shape, loss, **values):
    """Points in memory: `shape` names settings and their values, `loss` is a function of them."""
    points = []
    for chosen in itertools.product(*shape.values()):
        best = loss(*chosen)
        totals = {"params": 1000, "flops": 1e9, "seconds": 1.0, "tokens_per_second": 10.0}
        totals |= (
            {}
            if best is None
            else {"best_val_loss": best, "best_val_bits_per_byte": best / math.log(2)}
        )
        totals |= {
            name: value(*chosen) if callable(value) else value for name, value in values.items()
        }
        status, curve = (
            totals.pop("status", "completed"),
            () if best is None else ((100, best + 1), (200, best)),
        )
        overrides = dict(zip(shape, chosen, strict=True))
        points.append(
            Point(Path("sweep", f"{len(points)}"), overrides, status, totals=totals, curve=curve)
        )
    return points


@pytest.fixture
def printed(capsys):
    def show(points):
        capsys.readouterr()
        print_table(ranked(points))
        return capsys.readouterr().out

    return show


@pytest.fixture
def no_plot(monkeypatch):
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, path, **options: Path(path).write_text("plot", encoding="utf-8"),
    )


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
    assert [row.loss for row in ranked(points)] == [1.0, 2.0, 10**30, None]
    assert (points[2].totals["flops"], points[2].reason) == (6 * 1000 * 640, "3")


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
    """Training and validation losses of a run that fell from ln 65, in a few rows or in many."""
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
    """Losses that fell to 1.5 to 2.2 and rose to ln 65 or more, or exploded from the start."""
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
    """No validation, one at the end, or eight of them. Single rows of most healthy runs are 20 % above their lowest."""
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

    assert [
        kind for i in range(1000) if diverged(kind := HEALTHY[i % len(HEALTHY)], healthy_run)
    ] == []
    assert single_rows > 200
    kinds = ("early", "late", "in between", "explodes", "is NaN")
    assert [
        kind for i in range(300) if not diverged(kind := kinds[i % len(kinds)], diverged_run)
    ] == []


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
def test_rows_of_noisy_runs_are_compared_and_those_of_diverged_ones_are_not(tmp_path):
    rng = np.random.default_rng(1)
    for i, (rate, seed) in enumerate(itertools.product(("1e-3", "2e-3", "9e-3"), (1, 2, 3))):
        level = (
            np.full(200, 4.0) if rate == "9e-3" else np.full(200, {"1e-3": 2.0, "2e-3": 2.6}[rate])
        )
        level[:20] = 2.5
        trained = noisy_losses(rng, 200, level)
        trained[-1] = 1.3 * trained.min()
        run_folder(
            tmp_path / f"{i}",
            f"optimizer.lr={rate}",
            f"seed={seed}",
            losses=(level[-1] + seed / 100,),
        )
        lines = [
            "step,train_loss,val_loss",
            *(f"{step},{loss}," for step, loss in enumerate(trained, 1)),
        ]
        (tmp_path / f"{i}/metrics.csv").write_text(
            "\n".join([*lines, f"200,,{level[-1] + seed / 100}\n"]), encoding="utf-8"
        )
    points = read_sweep(tmp_path)
    assert [point.diverged for point in points] == [False] * 6 + [True] * 3
    text = " ".join(answer(ranked(points)))
    assert "1e-3 is better than 2e-3 by 0.6000" in text
    assert "1 row diverged: not compared." in text


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


def intervals(losses):
    """Half of the interval of a mean over seeds, and of a difference of two means; losses (rows, seeds)."""
    (rows, seeds), of_row, of_seed = losses.shape, losses.mean(1, keepdims=True), losses.mean(0)
    noise = np.sum((losses - of_row - of_seed + losses.mean()) ** 2) / ((rows - 1) * (seeds - 1))
    parts = np.array([of_seed.var(ddof=1), (rows - 1) * noise / rows])
    freedom = parts.sum() ** 2 / np.sum(parts**2 / [seeds - 1, (rows - 1) * (seeds - 1)])
    margin = (
        stats.studentized_range.ppf(0.99, rows, (rows - 1) * (seeds - 1)) * (noise / seeds) ** 0.5
    )
    return stats.t.ppf(0.975, max(freedom, 1)) * (parts.sum() / seeds) ** 0.5, margin


def test_table_and_csv_rank_rows_by_the_mean_over_seeds(tmp_path, printed):
    failed = ("model.n_embd=96", "optimizer.lr=1e-2", "max_steps=20")
    run_folder(
        grid(tmp_path) / "8", *failed, losses=(), status="failed", reason='out of\n"memory", c'
    )
    output = printed(read_sweep(tmp_path))
    header, _, *lines = [" ".join(line.split()) for line in output.splitlines()[2:9]]
    # max_steps is shared
    assert header == "# n_embd lr val loss from the best bits/byte params status"
    means, interval, margin = (
        (1.7, 2.1, 2.6, 3.5),
        *intervals(np.array([(1.5, 1.9), (2.0, 2.2), (2.5, 2.7), (3, 4)])),
    )
    texts = [f"{mean:.4f} ± {interval:.4f} (2 runs)" for mean in means]
    differences = [f"+{mean - 1.7:.4f} ± {margin:.4f}" for mean in means]
    assert lines == [
        f"1 64 1e-3 {texts[0]} – 0.8500 6,400 completed",
        f"2 32 1e-3 {texts[1]} {differences[1]}, tied 1.0500 3,200 completed",
        f"3 32 1e-2 {texts[2]} {differences[2]}, tied 1.3000 3,200 completed",
        f"4 64 1e-2 {texts[3]} {differences[3]}, tied 1.7500 6,400 completed",
        "96 1e-2 – – – 1,000 failed",
    ]
    assert '\nn_embd=96, lr=1e-2: failed: out of "memory", c\n' in output
    assert f"best     {texts[0]}: n_embd=64, lr=1e-3\n" in output

    write_table(tmp_path / "table.csv", ranked(read_sweep(tmp_path)))
    *rows, last = table(tmp_path / "table.csv")
    settings = [
        (row["rank"], row["model.n_embd"], row["optimizer.lr"], row["seeds"]) for row in rows
    ]
    assert settings[:2] == [("1", "64", "1e-3", "2"), ("2", "32", "1e-3", "2")]
    expected = {
        "val_loss": means,
        "val_bits_per_byte": np.divide(means, 2),
        "interval": [interval] * 4,
    }
    expected |= {"difference": np.subtract(means, 1.7), "difference_interval": [0, *[margin] * 3]}
    for name, values in expected.items():
        assert [float(row[name]) for row in rows] == pytest.approx(values)
    assert float(rows[0]["flops"]) == pytest.approx(6 * 6400 * 20 * TOKENS)
    assert (last["rank"], last["val_loss"], last["reason"]) == ("", "", 'out of\n"memory", c')


def shown(points):
    """The settings, seeds and losses of each row."""
    return [
        (row.overrides, [point.seed for point in row.points], row.losses) for row in ranked(points)
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
    (line,) = panels_of(points, along="optimizer.lr")[0].lines[:1]
    assert list(line.get_xdata()) == [0.003, 0.01]


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
    rows, resolved = {}, {}
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
    for seed, rate in enumerate(("0.002", "0.2", "0.002")):
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
        row.value("optimizer.lr"): [point.seed for point in row.points] for row in ranked(points)
    }
    assert of_rate == {"0.002": ["0", "2"], "0.2": ["1"]}
    assert {row.label() for row in ranked(points)} == {"lr=0.002", "lr=0.2"}


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
    assert [[point.seed for point in row.points] for row in ranked(points)] == [
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
    rows = ranked(read_sweep(tmp_path))
    (sentence,) = answer(rows)
    assert re.match(rf"\S+/0 and \S+/1 {message}", sentence)
    assert {row.margin for row in rows} == {None}


def test_texts_of_training_compare_if_the_validation_text_is_one(tmp_path):
    for name in ("0", "1"):
        run_folder(tmp_path / name, f"data.path={name}", validated="all", corpus_sha256=name)
    assert answer(ranked(read_sweep(tmp_path)))[0].startswith("The lowest mean loss is 2.0000")


def test_rows_of_unequal_seeds_rank_alike_in_both_units_and_every_run_has_a_line(tmp_path):
    losses = {
        "a": (1.0, 3.0, 5.0),
        "b": (1.1, 3.1),
        "c": (1.2, 3.2, 5.2),
    }  # b has not the seed of the highest losses
    for name, seeds in losses.items():
        for seed, loss in enumerate(seeds):
            run_folder(
                tmp_path / f"{name}{seed}",
                f"x={name}",
                f"seed={seed}",
                losses=(loss,),
                bytes_per_token=2,
            )
    rows = ranked(read_sweep(tmp_path))
    for row in rows:
        for point in row.points:
            point.totals["best_val_bits_per_byte"] = point.totals["best_val_loss"] / 2
    write_table(tmp_path / "table.csv", rows)
    write_runs(tmp_path / "runs.csv", rows)
    lines = table(tmp_path / "table.csv")
    assert [(line["x"], line["seeds"]) for line in lines] == [("a", "3"), ("b", "2"), ("c", "3")]
    assert [float(line["val_bits_per_byte"]) for line in lines] == pytest.approx([1.5, 1.55, 1.6])
    runs = [
        (line["x"], int(line["seed"]), float(line["val_loss"]), line["folder"])
        for line in table(tmp_path / "runs.csv")
    ]
    assert runs == [
        (x, seed, loss, f"{tmp_path}/{x}{seed}")
        for x in "abc"
        for seed, loss in enumerate(losses[x])
    ]


@pytest.mark.usefixtures("no_plot")
def test_a_sweep_over_tokenizers_is_ranked_by_bits_per_byte_everywhere(tmp_path, capsys):
    runs = {"bpe": (3.0, (4.0, 3.3, 3.6)), "char": (1.0, (1.9, 1.6)), "byte": (1.25, (2.5, 2.1))}
    for name, (bytes_per_token, losses) in runs.items():
        run_folder(
            tmp_path / name, f"tokenizer={name}", losses=losses, bytes_per_token=bytes_per_token
        )
    report([tmp_path])
    output = capsys.readouterr().out
    lines = [line.split()[:4] for line in output.splitlines() if "completed" in line]
    bits = [f"{min(losses) / math.log(2) / size:.4f}" for size, losses in runs.values()]
    assert [(name, loss) for _, name, *loss in lines] == [
        ("bpe", ["3.3000", bits[0]]),
        ("char", ["1.6000", bits[1]]),
        ("byte", ["2.1000", bits[2]]),
    ]
    _, curves, params, _ = panels_of(read_sweep(tmp_path))
    assert params.get_ylabel() == "best validation loss (bits per byte)"
    np.testing.assert_allclose(
        curves.lines[0].get_ydata(), np.array([4.0, 3.3, 3.6]) / math.log(2) / 3.0
    )


@pytest.mark.usefixtures("no_plot")
def test_files_of_a_report_are_written_before_anything_is_printed(tmp_path, monkeypatch):
    run_folder(tmp_path / "0", "seed=1")
    closed = StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    with pytest.raises(ValueError, match="closed file"):
        report([tmp_path])
    assert {file.name for file in tmp_path.glob("*.*")} == FILES


@pytest.mark.usefixtures("no_plot")
def test_the_answer_is_printed_also_where_files_cannot_be_written(tmp_path, capsys):
    run_folder(tmp_path / "0", "seed=1")
    with pytest.raises(NotADirectoryError):
        report([tmp_path], out=tmp_path / "0/summary.json/out")
    assert "\nbest     2.0000: " in capsys.readouterr().out


@pytest.mark.usefixtures("no_plot")
def test_losses_over_different_parts_of_the_validation_split_are_not_ranked(tmp_path, capsys):
    parts = [
        f"{part} of text {text}"
        for part in ("4 of 80 windows", "all 400 bytes")
        for text in ("ab", "cd")
    ]
    for n, part in enumerate(parts):
        run_folder(tmp_path / f"{n}", f"n={n}", validated=part)
    report([tmp_path])
    output = capsys.readouterr().out
    found = "; ".join(f"{n}: {part}" for n, part in enumerate(parts))
    assert (
        f"different texts ({found}), so their losses are not comparable; eval_batches=null val"
        in output
    )
    assert "best " not in output
    assert [(row["rank"], row["val_loss"]) for row in table(tmp_path / "sweep.csv")] == [
        ("", "2.0")
    ] * 4


RUNS = {  # by learning rate: the status and the best loss of each seed
    "completed": [("completed", 3.0), ("completed", 3.2), ("completed", 3.1)],
    "failed": [("completed", 2.0), ("completed", 2.1), ("failed", None)],
    "running": [
        ("completed", 1.9),
        ("running", 1.7),
        ("completed", 1.8),
    ],  # validated, but not at its end
    "unknown": [("completed", 2.7), ("completed", None), ("completed", 2.7)],
    "repeated": [("completed", 4.0), ("skipped", None)],  # never to run
    "diverged": [("failed", None), ("failed", None), ("failed", None)],
}


def test_a_row_whose_runs_did_not_all_complete_is_marked_and_does_not_win(printed):
    points = [
        Point(
            Path(f"{rate}{seed}"),
            {"lr": rate, "seed": str(seed)},
            status,
            totals={"best_val_loss": loss},
        )
        for rate, runs in RUNS.items()
        for seed, (status, loss) in enumerate(runs)
    ]
    output = printed(points)
    assert [" ".join(line.split()).split(" –")[0] for line in output.splitlines()[4:11]] == [
        "1 completed 3.1000 (3 runs)",
        "2 repeated 4.0000",
        "3* running 1.8000 (3 runs)",
        "4* failed 2.0500 (2 of 3 runs)",
        "5* unknown 2.7000 (2 of 3 runs)",
        "repeated",
        "diverged",
    ]
    assert "best     3.1000 (3 runs): lr=completed\n" in output
    assert "provisional" not in printed(points[:3])
    # Also where no row has completed
    assert "\n1* 2.0500" in re.sub(" +", " ", printed(points[3:6]))


@pytest.mark.usefixtures("no_plot")
def test_text_of_a_file_reaches_no_terminal_as_an_escape_sequence_and_markdown_as_text(
    tmp_path, capsys
):
    evil = "\x1b[31m\x07\x9b1m\u202e<img src=x>![a](b)|`c`"
    for name, reason in (("0", evil), ("1\x1b[2J", "")):
        run_folder(
            tmp_path / name,
            f"text={evil}{name}",
            f"{evil}=1{name}",
            status=f"failed{evil}",
            reason=reason,
        )
    (tmp_path / "1\x1b[2J/metrics.csv").write_text(f"step,val_loss\n1,{evil}\n", encoding="utf-8")
    code = f"!!python/object/apply:os.system [touch {tmp_path}/canary]"
    (run_folder(tmp_path / "2") / ".hydra/overrides.yaml").write_text(code, encoding="utf-8")
    report([tmp_path])
    with pytest.raises(UserError) as raised:
        report([tmp_path], along=evil)
    out, err = capsys.readouterr()
    assert r"\x1b[31m\x07\x9b1m\u202e" in out
    text = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    for output in (out, err, str(raised.value), text):
        assert [c for c in output if not c.isprintable() and c != "\n"] == []
    assert r"\<img src=x\>!\[a\](b)\|\`c\`0" in text
    assert not re.search(r"(?<!\\)[<`]|(?<!\\)\[a", text)
    assert not (tmp_path / "canary").exists()
    # A file keeps what it is
    assert f"{evil}0" in {row["text"] for row in table(tmp_path / "sweep.csv")}


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12))
def test_the_pareto_front_holds_all_points_that_none_dominates(points):
    dominated = {a for a in points for b in points if a != b and a[0] >= b[0] and a[1] >= b[1]}
    assert pareto_front(points) == sorted({*points} - dominated)


def panels_of(points, **options):
    """The panels: swept settings, learning curves, loss over parameters, loss over FLOPs."""
    return sweep_figure(ranked(points), title="sweep", **options).axes[:4]


def test_a_plot_shows_the_losses_near_the_median_and_all_if_most_are_equal():
    assert highest_converged([2.0, 2.1, 2.2, 2.4, 9.0]) == 2.4
    assert highest_converged([2.0, 2.0, 2.3]) == 2.3


def test_two_numeric_settings_are_a_heat_map_with_the_best_cell_in_bold():
    losses = {
        ("4", "1e-2"): None,
        ("2", "1e-2"): 1.2,
        ("4", "1e-3"): 0.4,
        ("2", "1e-3"): 0.2,
        ("10", "1e-3"): 1.0,
    }
    shape = {"n_layer": ["4", "2", "10"], "lr": ["1e-2", "1e-3"]}
    panel = panels_of(
        points_of(shape, lambda *at: losses.get(at, 2.0), status=lambda *at: f"{at[0]} layers")
    )[0]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("n_layer", "lr")
    np.testing.assert_allclose(
        panel.images[0].get_array().filled(np.nan), [[0.2, 0.4, 1.0], [1.2, np.nan, 2.0]]
    )
    assert [text.get_text() for text in panel.texts if text.get_weight() == "bold"] == [
        "0.2000\n2 layers"
    ]


def test_one_numeric_setting_is_a_line_with_the_interval_over_seeds():
    def loss(rate, seed):
        return 1 + abs(math.log10(float(rate)) + 3) + int(seed) / 10

    shape = {"optimizer.lr": ["1e-2", "1e-4", "1e-3"], "seed": ["1", "2", "3"]}
    panel, *_ = panels_of(points_of(shape, loss))
    assert panel.get_xscale() == "log"
    assert panel.get_title() == "best validation loss, mean and 95 % interval over seeds"
    line, _, (bars,) = panel.containers[0]
    np.testing.assert_allclose(line.get_xydata(), [[1e-4, 2.2], [1e-3, 1.2], [1e-2, 2.2]])
    interval = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5  # rows differ by their settings alone
    np.testing.assert_allclose([np.ptp(bar[:, 1]) for bar in bars.get_segments()], 2 * interval)


def test_along_a_setting_there_is_a_line_per_combination_of_the_others_best_first():
    def loss(width, rate):
        return 4 - math.log10(int(width)) + abs(math.log2(float(rate) * int(width) / 0.064))

    shape = {"model.n_embd": ["32", "128", "64"], "optimizer.lr": ["5e-4", "1e-3", "2e-3", "4e-3"]}
    panel = panels_of(points_of(shape, loss), along="optimizer.lr")[0]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == [
        "n_embd=128",
        "n_embd=64",
        "n_embd=32",
    ]
    for (line, *_), (width, best) in zip(
        panel.containers, [("128", 5e-4), ("64", 1e-3), ("32", 2e-3)], strict=True
    ):
        assert line.get_xdata()[np.argmin(line.get_ydata())] == best
        assert min(line.get_ydata()) == loss(width, best)


def test_other_sweeps_are_the_best_rows_by_name():
    points = points_of(
        {"act": ["relu", "gelu"], "n": "ab"}, lambda act, n: len(act) + (n == "b") / 2
    )
    panel = panels_of(points)[0]
    assert panel.get_xlabel() == "best validation loss (nats per token)"
    shown = zip(panel.texts, panel.get_yticklabels(), strict=True)
    names = [(name.get_text(), loss.get_text()) for name, loss in shown]
    assert names[:2] == [("act=relu, n=a", "4.0000"), ("act=gelu, n=a", "4.0000")]


def test_a_single_point_of_which_nothing_is_known_can_be_plotted_and_printed(printed):
    known = {"params": None, "flops": None, "status": "waiting", "tokens_per_second": None}
    points = points_of({"max_steps": ["5"]}, lambda steps: None, **known)
    assert not any(panel.get_ylabel() for panel in panels_of(points))
    assert "best" not in printed(points).partition("\n\n")[2]


def test_text_of_a_user_is_not_read_as_a_formula(tmp_path, recwarn):
    for i, path in enumerate(("$x^$", r"$\foo", "日本\n")):
        run_folder(tmp_path / "$1 $2" / f"{i}", f"data.path={path}")
    report([tmp_path / "$1 $2"])
    assert (tmp_path / "$1 $2" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert not recwarn  # of characters that the font lacks


@pytest.mark.usefixtures("no_plot")
def test_several_sweeps_are_ranked_together_by_all_settings_that_differ(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, layers, loss in (("a", "2", 2.0), ("b", "4", 1.0)):
        fixed = [f"n_layer={layers}", "max_steps=20", "+note="]
        folder = run_folder(tmp_path / name / "0", "lr=1", *fixed, losses=(loss,)).parent
        settings = {"lr": 1, "n_layer": int(layers), "max_steps": 20, "note": ""}
        write_plan(folder, fixed, [Point(folder / "0", {"lr": "1"}, settings=settings)])
    run_folder(
        tmp_path / "c/0",
        "dropout=0.1",
        "max_steps=20",
        "+note=",
        "logger=wandb",
        "resume=auto",
        losses=(1.5,),
    )
    folders = [
        tmp_path / "a",
        tmp_path / "b",
        tmp_path / "c",
        tmp_path / "a/0",
    ]  # a run of them twice
    report(folders)
    assert list(Path.cwd().iterdir()) == []
    output = capsys.readouterr().out
    assert output.endswith("set --out FOLDER to write the table and the plot of several folders\n")
    assert [line.split()[:5] for line in output.splitlines() if "completed" in line] == [
        ["1", "1", "4", "default", "1.0000"],
        ["2", "default", "default", "0.1", "1.5000"],
        ["3", "1", "2", "default", "2.0000"],
    ]
    report(folders, out=Path("out"))
    assert {path.name for path in Path("out").iterdir()} == FILES
    assert [Path(row["folder"]).parts[-2:] for row in table("out/runs.csv")] == [
        ("b", "0"),
        ("c", "0"),
        ("a", "0"),
    ]
    assert Path("out/sweep.md").read_text(encoding="utf-8").startswith("# 4 sweeps\n")
    report([tmp_path / "a/0", tmp_path / "c/0"], out=Path("runs"))
    assert Path("runs/sweep.md").read_text(encoding="utf-8").startswith("# 2 runs\n")


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_of_80_columns_has_a_line_per_row(columns, monkeypatch, printed):
    """The table drops what the files have too, and breaks no header."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    shape = {"model.n_head": "248", "model.n_embd": ["64", "128", "256"], "seed": "123"}
    points = points_of(
        shape, lambda head, embd, seed: 1.5 + int(head) / 100 - int(embd) / 1000 + int(seed) / 500
    )
    header, _, *lines = re.sub(r"\x1b\[[\d;]*m", "", printed(points)).split("\n\n")[1].splitlines()
    assert len(lines) == 9
    assert max(map(len, [header, *lines])) <= columns
    assert re.split("  +", header.strip())[:5] == [
        "#",
        "n_head",
        "n_embd",
        "val loss",
        "from the best",
    ]
    assert ("status" in header) == (columns == 200)


def test_the_plots_of_mixed_runs_have_room_for_their_titles_and_no_legend_without_a_line():
    many = dict.fromkeys(
        ("model.activation", "model.norm_position", "optimizer", "tokenizer", "schedule"), "ab"
    )
    figure = sweep_figure(
        ranked(points_of(many, lambda *values: 2 + values.count("a"), params=10)), title="mixed"
    )
    figure.draw_without_rendering()
    swept, curves, params, _ = figure.axes
    left, right = (panel.title.get_window_extent() for panel in (swept, curves))
    assert left.x1 < right.x0
    # The front is one point
    assert [text.get_text() for text in params.get_legend().get_texts()] == ["best 2.0000"]


def test_a_report_along_a_setting_to_another_folder_does_not_change_the_sweep(
    tmp_path, monkeypatch
):
    plotted = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **_: (path.touch(), plotted.append(figure))
    )
    grid(tmp_path / "sweep")
    write_plan(tmp_path / "sweep", [], read_sweep(tmp_path / "sweep"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").iterdir()}
    report([tmp_path / "sweep"], out=tmp_path / "a/b", along="n_embd")
    assert {path.name for path in (tmp_path / "a/b").iterdir()} == FILES
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").iterdir()} == before
    assert plotted[0].axes[0].get_xlabel() == "model.n_embd"
    for rate in ("1", "2"):
        run_folder(tmp_path / "two" / rate, f"optimizer.lr={rate}", f"other.lr={rate}")
    for name, meant in (("lr", ""), ("optimizer.lt", r" \(did you mean optimizer\.lr\?\)")):
        with pytest.raises(UserError, match=rf"{meant}; use one of: optimizer\.lr, other\.lr"):
            report([tmp_path / "two"], along=name)
