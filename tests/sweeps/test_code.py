"""Sweeps over code, and the code of runs in sweeps and in reports."""

import json
import shutil

import pytest
from engine import Engine
from refusals import refused
from small_runs import rows, table
from sweep_folders import run_folder

from minigpt.runs.code_version import code_in_place, code_sha256
from minigpt.runs.run_dir import read_summary, write_summary
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import report, table_of_rows
from minigpt.sweeps.results import COMPLETED, read_sweep


class Recording(Engine):
    """Write the code of each run as a run does; of older versions, none."""

    records = True

    def _run(self, folder, settings, end, last):
        super()._run(folder, settings, end, last)
        (version,) = (point.code for point in self.points if point.folder == folder)
        if not self.records:
            version = {"commit": "1f5c", "dirty": False}
        write_summary(folder, {**read_summary(folder), **version})


def losses(settings, step):
    return 2.0 if settings["code"] in ("main", "null") else 1.5 + float(settings["seed"]) / 100


def test_code_is_a_setting_whose_rows_are_named_as_typed_with_the_short_commit(
    clone, plan, printed
):
    commit = clone.git("rev-parse", "HEAD")
    clone.edit("minigpt/model/gpt.py", "std = 0.02", "std = 0.03")
    sweeper = plan("code=main,.", "seed=1,2", engine=Recording(losses))
    points = read_sweep(sweeper.folder)
    assert [point.text("code") for point in points] == ["main", "main", ".", "."]
    assert {point.code["commit"] for point in points} == {commit}
    checksums = [point.code["code_sha256"] for point in points]
    tree = code_sha256(clone.root)
    assert checksums[2:] == [tree] * 2
    assert checksums[0] == checksums[1] != tree
    found = ranked(points)
    assert [row.label() for row in found.rows] == ["code=.", "code=main"]
    lines = printed(points).splitlines()
    shown = [" ".join(line.split()[1:3]) for line in lines if line[:1] in ("1", "2")]
    assert shown == [f". ({commit[:8]}+{tree[:6]})", f"main ({commit[:8]})"]
    header, cells = table_of_rows(found)
    values = [dict(zip(header, line, strict=True)) for line in cells]
    assert [(row["code"], row["commit"]) for row in values] == [(".", commit), ("main", commit)]


def test_the_same_code_under_two_names_is_two_rows(clone, plan):
    sweeper = plan("code=HEAD,.", "seed=1", engine=Recording())
    (one, other) = read_sweep(sweeper.folder)
    assert one.code["code_sha256"] == other.code["code_sha256"]
    assert [row.label() for row in ranked([one, other]).rows] == ["code=HEAD", "code=."]


def test_points_that_are_impossible_or_the_same_as_others_are_of_no_other_code(clone, plan):
    sweeper = plan("model.n_head=3,4", "max_steps=10,1e1", "seed=1", engine=Recording())
    table = ranked(read_sweep(sweeper.folder))
    assert [*table.short_names] == ["model.n_head"]
    assert {row.status for row in table.rows} == {"completed", "skipped"}


@pytest.mark.parametrize("arguments", [("code=main,nosuch", "seed=1"), ("code=x", "seed=1,2")])
def test_a_revision_that_git_does_not_know_ends_the_sweep_before_it_writes(
    clone, plan, tmp_path, arguments
):
    refused("code must be a revision of git", plan, *arguments)
    assert list((tmp_path / "sweep").iterdir()) == []


def test_a_sweep_resumes_with_the_versions_that_it_wrote(clone, plan):
    plan("code=main,.", "seed=1", engine=Recording(losses))
    clone.edit("minigpt/model/gpt.py", "std = 0.02", "std = 0.03")
    clone.commit("second")
    engine = Recording(losses)
    sweeper = plan("code=main,.", "seed=1,2", "resume=auto", engine=engine)
    assert [settings["seed"] for settings in engine.ran] == [2, 2]
    assert len({point.code["code_sha256"] for point in sweeper.points}) == 1
    # What is added is written now
    sweeper = plan("code=main,.,second", "seed=1", "resume=auto", engine=Recording(losses))
    assert [point.code["code_sha256"] for point in sweeper.points].count(
        code_sha256(clone.root)
    ) == 1


@pytest.mark.parametrize("dirty", [False, True])
def test_a_sweep_whose_code_changed_is_refused_or_resumes_with_that_of_its_beginning(
    clone, plan, dirty
):
    commit = clone.git("rev-parse", "HEAD")
    if dirty:
        clone.edit("minigpt/model/ops.py", "import", "import  ")
    began = code_in_place()[0]["code_sha256"]
    with pytest.raises(KeyboardInterrupt):
        plan("seed=1,2", engine=Recording(lambda *_: 2.0, jobs=1))
    clone.edit("minigpt/model/gpt.py", "std = 0.02", "std = 0.03")
    clone.commit("second")
    error = refused("holds runs of other code", plan, "seed=1,2", "resume=auto")
    assert (f"or resume with code={commit}" in str(error)) == (not dirty)
    if not dirty:
        engine = Recording()
        sweeper = plan("seed=1,2", f"code={commit}", "resume=auto", engine=engine)
        assert [settings["seed"] for settings in engine.ran] == [2]
        points = read_sweep(sweeper.folder)
        assert {point.code["code_sha256"] for point in points} == {began}
        assert [row.n_seeds for row in ranked(points).rows] == [2]
        # And in place again, once the clone has that code
        clone.git("reset", "-q", "--hard", "first")
        code_in_place.cache_clear()
        engine = Recording()
        plan("seed=1,2,3", "resume=auto", engine=engine)
        assert [settings["seed"] for settings in engine.ran] == [3]


def test_a_sweep_of_an_older_version_resumes_and_its_runs_are_of_unknown_code(clone, plan):
    engine = Recording(lambda *_: 2.0)
    engine.records = False
    folder = plan("seed=1,2", engine=engine).folder
    file = folder / "sweep.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["settings"]["code"]
    for point in content["points"]:
        del point["code"]
    file.write_text(json.dumps(content), encoding="utf-8")
    engine = Recording(lambda *_: 2.0)
    plan("seed=1,2,3", "resume=auto", engine=engine)
    assert [settings["seed"] for settings in engine.ran] == [3]
    points = read_sweep(folder)
    assert [point.status for point in points] == [COMPLETED] * 3
    labels = [row.label() for row in ranked(points).rows]
    assert labels == ["code=unknown", f"code={clone.git('rev-parse', 'HEAD')[:8]}"]


def versions(folder, *known, losses=(2.0, 1.9, 1.8, 1.7)):
    """Sweeps of two runs each, with seeds that all share, of versions of the code."""
    for i, version in enumerate(known):
        for seed in (1, 2):
            loss = losses[i] + seed / 100
            run = folder / f"{i}" / f"{seed}"
            run_folder(run, f"seed={seed}", losses=(3.0, loss), **version)
    return sorted(folder.iterdir())


def test_runs_of_different_code_are_rows_of_their_own_in_a_report_of_several_folders(
    tmp_path, capsys, no_plot
):
    known = [
        {"commit": "a" * 40, "dirty": False, "code_sha256": "1" * 64},
        {"commit": "b" * 40, "dirty": False, "code_sha256": "2" * 64},
        {"commit": "b" * 40, "dirty": True, "code_sha256": "3" * 64},
        {"commit": "c" * 40, "dirty": False},
    ]
    found = report(versions(tmp_path, *known))
    labels = ["code=unknown", "code=bbbbbbbb+333333", "code=bbbbbbbb", "code=aaaaaaaa"]
    assert [row.label() for row in found.rows] == labels
    assert [row.n_seeds for row in found.rows] == [2] * 4
    assert "aaaaaaaa is better" not in capsys.readouterr().out


def test_runs_of_one_version_are_one_row_whatever_their_commit(tmp_path, no_plot):
    known = [
        {"commit": "a" * 40, "dirty": False, "code_sha256": "1" * 64},
        {"commit": "b" * 40, "dirty": True, "code_sha256": "1" * 64},
    ]
    folders = versions(tmp_path, *known)
    shutil.rmtree(folders[1] / "1")
    shutil.rmtree(folders[0] / "2")
    found = report(folders)
    assert [(row.label(), row.n_seeds) for row in found.rows] == [("all runs", 2)]


def test_a_run_that_did_not_end_has_the_code_that_it_began_with(train, tmp_path):
    folder = train("max_steps=2", "eval_every=2", folder=tmp_path / "runs/1").folder
    train("max_steps=2", "eval_every=2", "seed=2", folder=tmp_path / "runs/2")
    (folder / "summary.json").unlink()
    points = read_sweep(tmp_path / "runs")
    assert [point.status for point in points] == ["crashed", COMPLETED]
    assert points[0].code == points[1].code
    (row,) = ranked(points).rows
    assert row.label() == "all runs"


def test_one_name_of_two_versions_has_their_checksums(tmp_path, no_plot):
    known = [
        {"code": "main", "commit": "a" * 40, "dirty": False, "code_sha256": "1" * 64},
        {"code": "main", "commit": "b" * 40, "dirty": False, "code_sha256": "2" * 64},
    ]
    folders = versions(tmp_path, *known)
    for file in tmp_path.rglob("config.yaml"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**settings, "code": "main"}), encoding="utf-8")
    labels = [row.label() for row in report(folders).rows]
    assert labels == ["code=main (22222222)", "code=main (11111111)"]


@pytest.mark.slow
def test_real_runs_of_the_same_code_are_equal_and_a_version_that_does_not_start_has_a_reason(
    clone, call, tmp_path
):
    clone.edit("scripts/train.py", "import hydra\n", "import hydra, nosuch\n")
    clone.commit("broken")
    clone.git("checkout", "-q", "first")
    code_in_place.cache_clear()
    swept = call("train.py", "-m", "code=first,.,broken", "seed=1,2", "hydra.sweep.dir=sweep")
    assert swept.returncode == 1, swept.stderr
    points = read_sweep(tmp_path / "sweep")
    for first, here in zip(points[:2], points[2:4], strict=True):
        assert rows(first.folder) == rows(here.folder)
        assert first.loss("nats per token") == here.loss("nats per token")
    reason = "code=broken: ModuleNotFoundError: No module named 'nosuch'"
    reasons = {row["code"]: row["reason"] for row in table(tmp_path / "sweep/runs.csv")}
    assert reasons == {"first": "", ".": "", "broken": reason}
