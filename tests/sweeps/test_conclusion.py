"""The conclusion of a sweep: its last line, its answer in sweep.json, and the ledger of sweeps."""

import json
import math
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime
from pathlib import Path

import pytest
from engine import Engine
from filelock import FileLock
from small_runs import table
from sweep_folders import points_of, run_folder

from minigpt.extras.research.conclusion import append_to_ledger, conclusion
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import report
from minigpt.sweeps.results import Point, read_plan, write_plan
from minigpt.sweeps.verdicts import verdicts
from minigpt.utils.errors import RunError

HEADER = "time,folder,question,verdict,difference,interval,seeds,seconds"
SEEDS = ["1", "2", "3"]


def found(points):
    return conclusion(Path("sweep"), ranked(points))


def noisy(effects):
    """A loss by setting and seed, with noise of a hundredth."""
    noise = {"1": 0.0, "2": 0.01, "3": 0.005}
    return lambda value, seed: effects[value] + noise[seed] * (1 + len(value) % 2)


@pytest.fixture
def sweep(plan, monkeypatch):
    """Sweep with its report, over losses by n_head and seed; NaN is a failure."""
    monkeypatch.setattr("minigpt.sweeps.report.report", report)

    def run(losses, *arguments, jobs=999, kind=Engine, **options):
        engine = kind(
            lambda settings, _: losses[settings["model.n_head"]][int(settings["seed"]) - 1], jobs
        )
        line = [f"model.n_head={','.join(losses)}", "seed=1,2,3", *arguments]
        return plan(*line, engine=engine, **options)

    return run


def test_the_question_is_the_best_value_of_the_first_setting_against_the_first_value():
    effects = {"a": 2.0, "bb": 1.5, "c": 1.0, "dd": 3.0}
    answered = found(points_of({"x": [*effects], "seed": SEEDS}, noisy(effects)))
    assert answered["question"] == "x: c against a"
    assert (answered["verdict"], answered["seeds"], answered["failed"]) == ("better", 3, 0)
    assert answered["difference"] == pytest.approx(-1)
    assert 0 < answered["interval"] < 0.1
    assert (answered["folder"], answered["unit"]) == ("sweep", "nats per token")
    assert (answered["seconds"], answered["reason"]) == (12, "")
    # The baseline is the best, and the first of two settings
    shape = {"x": ["a", "bb", "c"], "y": ["u", "v"], "seed": SEEDS}
    effects = {"a": 1.0, "bb": 1.7, "c": 1.5}
    points = points_of(shape, lambda x, y, seed: noisy(effects)(x, seed) - (y == "v"))
    answered = found(points)
    assert (answered["question"], answered["verdict"]) == ("x: c against a", "worse")
    # An incomplete grid compares rows
    rows = found([point for point in points if point.overrides["x"] + point.overrides["y"] != "cu"])
    assert rows["question"] == "x=a, y=v against x=a, y=u"
    assert json.loads(json.dumps(rows)) == rows


def test_the_answer_to_a_later_setting_is_not_that_to_the_first_whose_other_value_failed():
    shape = {"x": ["a", "bb"], "y": ["u", "v"], "seed": SEEDS}
    status = {"status": lambda x, y, seed: "failed" if x == "bb" else "completed"}
    effects = {"a": 1.0, "bb": 1.0}
    points = points_of(shape, lambda x, y, seed: noisy(effects)(x, seed) - (y == "v"), **status)
    assert [each["setting"] for each in verdicts(ranked(points))] == ["y"]
    answered = found(points)
    assert (answered["question"], answered["verdict"]) == ("x: bb against a", "failed")
    assert (answered["difference"], answered["failed"]) == (None, 6)


def test_one_seed_has_a_difference_without_an_interval_and_is_unclear():
    answered = found(points_of({"x": ["a", "b"]}, lambda x: {"a": 2.0, "b": 1.5}[x]))
    assert (answered["difference"], answered["interval"]) == (-0.5, None)
    assert (answered["verdict"], answered["seeds"]) == ("unclear", 1)


@pytest.mark.parametrize(
    ("shape", "values", "expected"),
    [
        ({"x": ["a", "b"]}, {"status": "failed"}, ("x: b against a", "failed", 1)),
        ({"x": ["a", "b"]}, {"status": "crashed"}, ("x: b against a", "failed", 1)),
        ({"x": ["a", "b"]}, {"status": "running"}, ("x: b against a", "none", 0)),
        ({"x": ["a", "b"]}, {"status": "paused"}, ("x: b against a", "none", 0)),
        ({"x": ["a", "b", "c"]}, {"status": "failed"}, ("x: c against a", "better", 1)),
        ({"y": ["b"]}, {}, (None, "none", 0)),
    ],
)
def test_nothing_is_compared_where_runs_failed_or_are_missing(shape, values, expected):
    def loss(value, _):
        return {"a": 2.0, "b": 1.5, "c": 1.0}[value]

    status = values.get("status", "completed")
    points = points_of(
        {**shape, "seed": ["1"]},
        loss,
        status=lambda value, _: status if value == "b" else "completed",
    )
    answered = found(points)
    if expected[1] == "better":  # with one seed
        expected = (expected[0], "unclear", expected[2])
    assert tuple(answered[key] for key in ("question", "verdict", "failed")) == expected
    assert (answered["difference"] is None) == (expected[1] != "unclear")


@pytest.mark.usefixtures("no_plot")
def test_a_sweep_ends_with_its_conclusion_as_a_line_of_json(sweep, capsys, tmp_path):
    losses = {"2": (2.0, 2.1, 2.2), "4": (1.5, 1.61, 1.7)}
    sweeper = sweep(losses)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["question"], line["verdict"]) == ("model.n_head: 4 against 2", "better")
    assert line["difference"] == pytest.approx(-1.49 / 3)
    assert Path(line["folder"]) == sweeper.folder
    report([sweeper.folder])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    # The answer is in the list of points, which older versions wrote without
    file = sweeper.folder / "sweep.json"
    listed = json.loads(file.read_text(encoding="utf-8"))
    (only,) = listed["answer"]
    keys = ("verdict", "difference", "interval", "seeds")
    assert [only[key] for key in keys] == [line[key] for key in keys]
    assert (only["setting"], only["value"], only["baseline"]) == ("model.n_head", "4", "2")
    del listed["answer"], listed["looks"]
    file.write_text(json.dumps(listed), encoding="utf-8")
    before = file.read_bytes()
    report([sweeper.folder])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    assert file.read_bytes() == before  # also if a sweep is running
    sweep(losses, "resume=auto")
    assert json.loads(file.read_text(encoding="utf-8"))["answer"] == [only]
    lines = table(tmp_path / "ledger.csv")
    assert [each["verdict"] for each in lines] == ["better"] * 2


@pytest.mark.usefixtures("no_plot")
def test_a_sweep_that_runs_or_was_interrupted_has_no_old_answer_and_no_line_in_the_ledger(
    sweep, capsys, tmp_path
):
    losses = {"2": (2.0, 2.1, 2.2), "4": (1.5, 1.61, 1.7)}
    with pytest.raises(KeyboardInterrupt):
        sweep(losses, jobs=4)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["verdict"], line["difference"]) == ("failed", None)  # a run was killed
    assert not (tmp_path / "ledger.csv").exists()
    file = tmp_path / "sweep/sweep.json"
    assert json.loads(file.read_text(encoding="utf-8"))["answer"] == []

    answers = []

    class Reading(Engine):
        def launch(self, *arguments, **options):
            answers.append(json.loads(file.read_text(encoding="utf-8"))["answer"])
            super().launch(*arguments, **options)

    sweep(losses, "resume=auto", kind=Reading)
    assert answers == [None]
    assert len(table(tmp_path / "ledger.csv")) == 1


@pytest.mark.usefixtures("no_plot")
def test_each_finished_sweep_has_a_line_in_the_ledger_also_if_it_failed(sweep, tmp_path, capsys):
    losses = {"2": (2.0, 2.1, 2.2), "4": (1.5, 1.61, 1.7)}
    started = datetime.now().astimezone().replace(microsecond=0)
    sweep(losses, folder=tmp_path / "sweeps/first")
    with pytest.raises(RunError, match="3 of 6 runs failed"):
        sweep({**losses, "4": (math.nan,) * 3}, folder=tmp_path / "sweeps/é, second")
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["verdict"], line["failed"]) == ("failed", 3)
    text = (tmp_path / "sweeps/ledger.csv").read_text(encoding="utf-8")
    assert (text.splitlines()[0], text.count("\n")) == (HEADER, 3)
    first, second = table(tmp_path / "sweeps/ledger.csv")
    assert (first["folder"], second["folder"]) == ("first", "é, second")
    assert (first["question"], second["question"]) == ("model.n_head: 4 against 2",) * 2
    assert (first["verdict"], second["verdict"]) == ("better", "failed")
    assert float(first["difference"]) == pytest.approx(-1.49 / 3)
    assert (second["difference"], second["interval"], first["seeds"]) == ("", "", "3")
    assert started <= datetime.fromisoformat(first["time"]) <= datetime.now().astimezone()


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("content", ["name,value\n1,2\n", "\n", f"{HEADER},more\n", None])
def test_a_ledger_that_is_not_ours_or_not_writable_is_left_alone(sweep, tmp_path, capsys, content):
    file = tmp_path / "ledger.csv"
    if content is None:
        file.mkdir()
    else:
        file.write_text(content, encoding="utf-8")
    sweep({"2": (2.0, 2.1, 2.2), "4": (1.5, 1.61, 1.7)})
    assert "ledger.csv has no line for this sweep: it " in capsys.readouterr().err
    assert content is None or file.read_text(encoding="utf-8") == content
    assert read_plan(tmp_path / "sweep")[1][0].status == "completed"


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / ".ledger.csv.lock").mkdir()
    points = points_of({"x": ["a", "b"]}, lambda x: {"a": 2.0, "b": 1.5}[x])
    append_to_ledger(tmp_path / "sweep", ranked(points))
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path}/ledger.csv has no line ")


def test_lines_of_sweeps_that_end_at_once_stay_whole(tmp_path):
    points = points_of({"x": ["a", "b"]}, lambda x: {"a": 2.0, "b": 1.5}[x])
    compared = ranked(points)

    def append(number):
        append_to_ledger(tmp_path / f"{number}", compared)

    with ThreadPoolExecutor(8) as pool, FileLock(tmp_path / ".ledger.csv.lock"):
        waiting = [pool.submit(append, number) for number in range(40)]
        # As while another sweep writes
        assert not wait(waiting, timeout=0.2).done
        assert not (tmp_path / "ledger.csv").exists()
    lines = table(tmp_path / "ledger.csv")
    assert {line["folder"] for line in lines} == {str(number) for number in range(40)}
    assert (len(lines), {line["question"] for line in lines}) == (40, {"x: b against a"})


@pytest.mark.parametrize(
    "before", ["", HEADER, f"\ufeff{HEADER}\r\n", f"{HEADER}\n2026-01-01T00:00:00+00:00,cut"]
)
def test_a_ledger_that_another_program_wrote_last_gets_whole_lines(tmp_path, before):
    file = tmp_path / "ledger.csv"
    file.write_bytes(before.encode())
    points = points_of({"x": ["a\n,b", "'\""]}, lambda x: len(x))
    append_to_ledger(tmp_path / "sweep", ranked(points))
    text = file.read_bytes().decode()
    assert text.startswith(before)
    assert text.count(HEADER) == 1
    last = table(file)[-1]
    assert (last["folder"], last["verdict"]) == ("sweep", "unclear")
    assert "\n" not in last["question"]


@pytest.mark.usefixtures("no_plot")
def test_text_of_a_file_is_escaped_in_the_last_line(tmp_path, capsys):
    evil = "\x1b[31m\u202e\udcff\n"
    values = {}
    for i, value in enumerate(("a", evil)):
        values[value] = run_folder(tmp_path / f"{i}", losses=(2.0 + i,))
    given = [(folder, {"x": value}) for value, folder in values.items()]
    write_plan(tmp_path, [], [Point(*each, settings=each[1]) for each in given])
    report([tmp_path])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["question"] == f"x: {evil} against a"
