"""Versions of the code that `code=` names: written once, trained with in processes."""

import json
import math
import shutil

import pytest
from clones import FOLDERS
from refusals import refused
from small_runs import rows

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
