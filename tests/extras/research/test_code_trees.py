"""Versions of the code that `code=` names: written once, trained with in processes."""

import json
import math
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from clones import FOLDERS, take_code_from
from processes import Script
from refusals import refused
from small_runs import rows, small_run, wait_until

from minigpt.extras.research import code_trees
from minigpt.extras.research.code_trees import code_tree, version_of
from minigpt.runs.code_version import code_sha256


def test_a_version_is_written_once_and_edits_and_commits_change_nothing(clone, tmp_path):
    first = clone.git("rev-parse", "HEAD")
    tree = code_tree("main", tmp_path)
    clone.edit("minigpt/model/gpt.py", "std = 0.02", "std = 0.03")
    second = clone.commit("second")
    assert code_tree("main", tmp_path) == tree
    expected = {"code": "main", "commit": first, "dirty": False}
    assert version_of(tree) == {**expected, "code_sha256": code_sha256(tree)}
    assert "std = 0.02" in (tree / "minigpt/model/gpt.py").read_text(encoding="utf-8")
    assert not list(tree.parent.glob("tmp*"))
    # Another name is another folder, also of what would be one file name
    names = ("second", "main~0", "main^0", "main^{commit}")
    trees = {code_tree(name, tmp_path) for name in names}
    assert len(trees) == 4
    assert {version_of(each)["commit"] for each in trees} == {second}
    assert {code_sha256(each) for each in trees} == {code_sha256(clone.root)}


def test_the_working_tree_has_uncommitted_and_untracked_files_that_git_does_not_ignore(
    clone, tmp_path
):
    clone.edit("configs/train.yaml", "max_steps: 1000", "max_steps: 7")
    (clone.root / "mine.py").write_text("x = 1\n", encoding="utf-8")
    (clone.root / "minigpt/table.json").write_text("[]", encoding="utf-8")
    (clone.root / "minigpt/key.secret").write_text("sesame", encoding="utf-8")
    (clone.root / "minigpt/utils/ranks.py").unlink()
    # A sweep in the clone whose folder git does not ignore is no part of the next one
    sweep = clone.root / "sweep"
    tree = code_tree(".", sweep)
    found = {file.relative_to(tree).as_posix() for file in tree.rglob("*") if file.is_file()}
    expected = {".gitignore", "mine.py", "code.json", "code.diff"}
    for folder in FOLDERS:
        files = (clone.root / folder).rglob("*")
        expected |= {file.relative_to(clone.root).as_posix() for file in files if file.is_file()}
    assert found == expected - {"minigpt/key.secret"}
    version = version_of(tree)
    assert (version["code"], version["dirty"]) == (".", True)
    assert version["code_sha256"] == code_sha256(clone.root)
    assert "+max_steps: 7" in (tree / "code.diff").read_text(encoding="utf-8")
    assert not (code_tree(".", clone.root / "other") / "sweep").exists()


@pytest.mark.parametrize(
    ("prepare", "code", "message"),
    [
        ("", "nosuch", "code must be a revision of git in .*, got nosuch$"),
        ("", "--help", "code must be a revision of git in .*, got --help$"),
        ("", "main:minigpt", "code must be a revision of git in .*, got main:minigpt"),
        ("shallow", "main~1", "this clone is shallow, git fetch --unshallow gets the rest"),
        ("no git", "main", "needs git, which does not start"),
        ("no history", "main", "needs a clone of the repository with its git history"),
        ("installed", "main", "needs a clone of the repository with its git history"),
        ("no commit", ".", "code must be a revision of git"),
    ],
)
def test_what_is_no_version_gets_one_line_and_writes_nothing(
    clone, tmp_path, monkeypatch, prepare, code, message
):
    match prepare:
        case "shallow":
            clone.commit("second")
            root = tmp_path / "shallow"
            clone.git("clone", "-q", "--depth=1", f"file://{clone.root}", str(root))
            monkeypatch.setattr(code_trees, "ROOT", root)
        case "no git":
            monkeypatch.setenv("PATH", "")
        case "no history":
            shutil.rmtree(clone.root / ".git")
        case "installed":
            monkeypatch.setattr(code_trees, "INSTALLED", True)
        case "no commit":
            shutil.rmtree(clone.root / ".git")
            clone.git("init", "-q")
    refused(message, code_tree, code, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_from_which_no_process_can_import_is_refused(clone, tmp_path):
    folder = tmp_path / f"10{os.pathsep}00"
    refused(f"code=main needs a folder without {os.pathsep}", code_tree, "main", folder)
    assert not folder.exists()


def test_a_run_trains_with_the_code_of_an_earlier_version_that_lacks_its_settings(clone, train):
    # Without the record of code, as before there was one; all logits are 0 at its start
    clone.edit("minigpt/model/gpt.py", "else 0.02", "else 0.0")
    clone.edit("minigpt/runs/fit.py", "**code_in_place()[0],", '"commit": None, "dirty": None,')
    clone.edit("minigpt/runs/run_config.py", '    "code": checks', '    "kode": checks')
    clone.edit("configs/train.yaml", "code: null", "kode: null")
    commit = clone.commit("second")
    clone.edit("minigpt/runs/fit.py", "def fit(", "def gone(")  # not in place
    run = train("code=second", "max_steps=5", "eval_every=5", "log_every=1", "seed=3")
    assert float(rows(run.folder)[0]["train_loss"]) == pytest.approx(math.log(40))  # characters
    tree = code_tree("second", run.folder)
    expected = {"code": "second", "commit": commit, "dirty": False}
    expected["code_sha256"] = code_sha256(tree)
    assert {name: run.summary[name] for name in expected} == expected
    assert (tree / "minigpt/model/gpt.py").is_file()
    assert json.loads((tree / "code.json").read_text(encoding="utf-8")) == expected


# Of earlier versions, which do not write their code
TRAINS = (
    "(folder / '.hydra').mkdir(parents=True, exist_ok=True)",
    "(folder / '.hydra/config.yaml').write_text(str(time.time_ns()))",
    "(folder / 'summary.json').write_text(json.dumps({'commit': None, 'best_val_loss': 1.5}))",
)


def files(folder):
    found = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in found}


def earlier_run(folder):
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/config.yaml").write_text("seed: 1", encoding="utf-8")
    summary = {"commit": "1f5c", "dirty": False, "best_val_loss": 2.0}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that ended, which init has not taken yet
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("resume", ["null", "auto"])
@pytest.mark.parametrize("status", [0, 2])
def test_a_run_that_a_version_does_not_change_stays_with_the_files_of_the_user(
    clone, train, tmp_path, resume, status
):
    run = earlier_run(tmp_path / "run")
    (run / "code").mkdir()
    (run / "code/.gitignore").write_text("mine", encoding="utf-8")
    before = files(run)
    clone.script(f"sys.exit({status})")
    if status:
        refused("code=.: its process ended with exit code 2", train, "code=.", f"resume={resume}")
    else:
        assert train("code=.", f"resume={resume}").loss == 2.0
    assert files(run) == before


def test_a_version_that_does_not_start_leaves_nothing_and_is_written_again(clone, train, tmp_path):
    clone.script("sys.exit(2)")
    refused("its process ended with exit code 2", train, "code=.")
    assert not (tmp_path / "run").exists()
    # Killed before its run began, it leaves its code
    code_tree(".", tmp_path / "run")
    clone.script(*TRAINS)
    run = train("code=.")
    assert run.loss == 1.5
    assert version_of(code_tree(".", run.folder))["code_sha256"] == run.summary["code_sha256"]


def test_a_run_that_resumes_with_other_code_has_the_checksums_of_all(clone, train, tmp_path):
    clone.script(*TRAINS)
    clone.commit("one")
    one = code_sha256(clone.root)
    clone.edit("minigpt/model/gpt.py", "std = 0.02", "std = 0.03")
    clone.commit("two")
    two = code_sha256(clone.root)
    for names, expected in (
        (["one", "one"], [one]),
        (["one", "two", "one"], [one, two]),
        (["", "two"], ["unknown", two]),
    ):
        folder = tmp_path / "-".join(["run", *names])
        if names[0] == "":
            earlier_run(folder)
        else:
            train(f"code={names[0]}", folder=folder)
        for name in names[1:]:
            run = train(f"code={name}", "resume=auto", folder=folder)
        assert run.summary["code_sha256"].split() == expected
    # Killed before it wrote its summary, a run had the code that its folder has
    folder = tmp_path / "run-one-one"
    (folder / "summary.json").unlink()
    assert train("code=one", "resume=auto", folder=folder).summary["code_sha256"] == one


def test_a_version_that_is_killed_has_a_reason(clone, train):
    clone.script(*TRAINS, "os.kill(os.getpid(), signal.SIGKILL)")
    refused(r"code=\.: its process was killed \(SIGKILL\), possibly out of memory", train, "code=.")


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends it with its parent")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "sweeps"),
    [
        pytest.param(signal.SIGKILL, [], marks=LINUX),
        pytest.param(signal.SIGTERM, [], marks=pytest.mark.ci),
        (signal.SIGTERM, ["-m", "hydra/launcher=basic", "seed=1,2"]),
    ],
)
def test_the_process_of_a_version_ends_with_the_run(clone, text, tmp_path, signum, sweeps):
    pid = tmp_path / "pid"
    clone.script(*TRAINS, f"Path({str(pid)!r}).write_text(str(os.getpid()))", "time.sleep(300)")
    kind = "sweep" if sweeps else "run"
    folder = f"hydra.{kind}.dir={tmp_path}/{kind}"
    process = Script(
        "train.py",
        *sweeps,
        *small_run(text, tmp_path / "data", "code=.", folder),
        output=tmp_path / "out",
        prepare=partial(take_code_from, clone.root),
    )
    assert process.wait_for(lambda: pid.exists() and pid.read_text("utf-8")), process.stderr
    process.signal(signum)
    assert process.wait() == 128 + signum
    wait_until(lambda: not alive(int(pid.read_text("utf-8"))))
