"""The points of a sweep, as they are read from run folders."""

import json
import math
import re

import pytest
from sweep_folders import run_folder

from minigpt.runs.run_dir import lock_run_dir
from minigpt.sweeps.results import NATS, read_sweep
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
