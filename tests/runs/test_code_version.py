"""Which code a run trains with: commit, checksum, uncommitted changes."""

import shutil
import subprocess

import pytest
from clones import Clone

from minigpt.runs import code_version
from minigpt.runs.code_version import code_in_place, code_label, code_sha256, write_patch


def test_the_code_of_a_clean_clone_is_its_commit(clone):
    commit = clone.git("rev-parse", "HEAD")
    version, patch = code_in_place()
    expected = {"code": None, "commit": commit, "dirty": False}
    assert version == {**expected, "code_sha256": code_sha256(clone.root)}
    assert (patch, code_label(version)) == ("", commit[:8])


def test_uncommitted_changes_are_a_patch_which_makes_them_again(clone, tmp_path):
    before = code_in_place()[0]
    # Changed, added, removed, renamed, staged; not UTF-8, with Windows' ends of lines
    clone.edit("minigpt/model/gpt.py", "std = 0.02", "std = 0.03")
    (clone.root / "minigpt/model/mine.py").write_bytes(b"# \xff\r\nx = 1\r\n")
    (clone.root / "configs/experiment/mine.yaml").write_text("max_steps: 1\n", encoding="utf-8")
    (clone.root / "minigpt/utils/ranks.py").unlink()
    clone.git("mv", "minigpt/data/batches.py", "minigpt/data/windows.py")
    # What is no code, and what git ignores
    (clone.root / "corpus.txt").write_text("to be", encoding="utf-8")
    (clone.root / "minigpt/key.secret").write_text("sesame", encoding="utf-8")
    state = clone.git("status", "--porcelain")
    objects = clone.git("count-objects", "-v")
    version, patch = code_in_place()
    assert (version["commit"], version["dirty"]) == (before["commit"], True)
    assert version["code_sha256"] != before["code_sha256"]
    assert code_label(version) == f"{before['commit'][:8]}+{version['code_sha256'][:6]}"
    # Nothing is written into the clone
    assert clone.git("status", "--porcelain") == state
    assert clone.git("count-objects", "-v") == objects
    # The patch makes the code of the commit that of the clone
    clone.git("worktree", "add", "-q", str(tmp_path / "again"), before["commit"])
    write_patch(tmp_path, patch)
    apply = ["git", "apply", "--binary", str(tmp_path / "code.diff")]
    subprocess.run(apply, cwd=tmp_path / "again", check=True)
    for folder in ("minigpt", "configs"):
        different = ["diff", "-r", "-x", "*.secret", "-x", "__pycache__"]
        folders = [clone.root / folder, tmp_path / "again" / folder]
        subprocess.run([*different, *folders], check=True)
    assert not (tmp_path / "again/corpus.txt").exists()
    assert "sesame" not in patch


@pytest.mark.parametrize(
    ("file", "differs"),
    [
        ("minigpt/model/gpt.py", True),
        ("minigpt/extras/planner/plan.py", True),
        ("minigpt/model/.ipynb_checkpoints/gpt.py", False),
        ("scripts/train.py", False),
        ("configs/train.yaml", False),
        ("README.md", False),
    ],
)
def test_the_checksum_is_that_of_the_package(clone, file, differs):
    before = code_sha256(clone.root)
    (clone.root / file).parent.mkdir(exist_ok=True)
    with open(clone.root / file, "a", encoding="utf-8") as opened:
        opened.write("# a comment\n")
    assert (code_sha256(clone.root) != before) == differs


def test_an_installed_package_has_the_checksum_of_its_clone(clone, tmp_path):
    # As a wheel, with configs and scripts inside the package
    shutil.copytree(clone.root / "minigpt", tmp_path / "installed")
    for folder in ("scripts", "configs"):
        shutil.copytree(clone.root / folder, tmp_path / "installed" / folder)
    assert code_sha256(tmp_path / "installed") == code_sha256(clone.root)


@pytest.mark.parametrize("missing", ["history", "git", "commits"])
def test_without_git_the_commit_is_unknown_and_the_checksum_is_not(clone, monkeypatch, missing):
    checksum = code_sha256(clone.root)
    if missing == "git":
        monkeypatch.setenv("PATH", "")
    else:
        shutil.rmtree(clone.root / ".git")
    if missing == "commits":
        clone.git("init", "-q")
    code_in_place.cache_clear()
    version, patch = code_in_place()
    expected = {"code": None, "commit": None, "dirty": None, "code_sha256": checksum}
    assert (version, patch) == (expected, "")
    assert code_label(version) == checksum[:8]


@pytest.mark.parametrize("most", [1000, 200])  # of the patch, and of what it would be of
def test_large_changes_are_listed_instead(clone, monkeypatch, most):
    monkeypatch.setattr(code_version, "MAX_PATCH_BYTES", most)
    (clone.root / "minigpt/model/mine.py").write_text("x = 1\n" * 500, encoding="utf-8")
    code_in_place.cache_clear()
    version, patch = code_in_place()
    assert version["dirty"]
    assert patch.split() == [
        *("minigpt/model/mine.py", "|", "500", "+" * len(patch.split()[3])),
        *["1", "file", "changed,", "500", "insertions(+)"],
    ]


def test_code_that_is_not_recorded_is_unknown():
    assert code_label({"commit": "1f5cc489aaaa", "dirty": False}) == "unknown"


@pytest.mark.parametrize(
    "settings",
    [
        ["core.splitIndex=true"],  # writes into the clone
        ["core.autocrlf=true", "core.safecrlf=true"],  # refuses ends of lines
        ["diff.noprefix=true", "diff.relative=true", "diff.context=0"],
        ["diff.code.textconv=true"],  # shows nothing of a file
    ],
)
def test_settings_of_git_change_neither_the_version_nor_the_patch(clone, settings):
    clone.edit("minigpt/model/gpt.py", "std = 0.02", "std = 0.03")
    (clone.root / ".git/info/attributes").write_text("*.py diff=code\n", encoding="utf-8")
    found = code_in_place()
    assert "std = 0.03" in found[1]
    for setting in settings:
        clone.git("config", *setting.split("="))
    code_in_place.cache_clear()
    files = sorted((clone.root / ".git").iterdir())
    assert code_in_place() == found
    assert sorted((clone.root / ".git").iterdir()) == files


def test_the_repository_of_a_hook_or_a_shell_is_not_that_of_the_code(clone, tmp_path, monkeypatch):
    found = code_in_place()
    other = Clone(tmp_path / "other")
    other.commit("second")
    monkeypatch.setenv("GIT_DIR", str(other.root / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other.root))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.root / ".git/index"))
    code_in_place.cache_clear()
    assert code_in_place() == found


@pytest.mark.parametrize("name", ["a:b", 'a"b', "é a\\b"])
def test_a_clone_may_have_any_name(clone, tmp_path, monkeypatch, name):
    clone.edit("minigpt/model/gpt.py", "std = 0.02", "std = 0.03")
    found = code_in_place()
    clone.root.rename(tmp_path / name)
    monkeypatch.setattr(code_version, "ROOT", tmp_path / name)
    code_in_place.cache_clear()
    assert code_in_place() == found


def test_files_of_editors_and_of_runs_are_no_code(clone):
    before = code_in_place()
    # A lock of Emacs is a link to nowhere; a run and a sweep whose folders git does not ignore
    (clone.root / "minigpt/model/.#gpt.py").symlink_to("me@host.1")
    for folder in ("out", "sweep/seed=1"):
        for file in (".hydra/config.yaml", "wandb/run/files/config.yaml"):
            path = clone.root / folder / file
            path.parent.mkdir(parents=True)
            path.write_text("seed: 1\n", encoding="utf-8")
    (clone.root / "code.json").write_text("[]", encoding="utf-8")
    code_in_place.cache_clear()
    assert code_in_place() == before
    # Others are, whatever their names mean to git
    names = ["minigpt/:(glob)x.py", "minigpt/a[1]*.py", 'minigpt/"\n.py', "out.py"]
    for name in names:
        (clone.root / name).touch()
    code_in_place.cache_clear()
    assert code_in_place()[1].count("new file") == len(names)


def test_the_checksum_is_that_of_any_ends_of_lines(clone):
    before = code_sha256(clone.root)
    file = clone.root / "minigpt/model/gpt.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert code_sha256(clone.root) == before
