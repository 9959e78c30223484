"""The files of a path or a pattern: sorted, each once, and without those of earlier commands."""

import os
import re
import socket
from glob import glob
from pathlib import Path

import pytest
from corpora import ROOT, documents, sha256, write_files
from refusals import refused

from minigpt.data import readers
from minigpt.data.readers import find_files, read_texts
from minigpt.runs.run_dir import PLAN
from minigpt.sweeps.report import RUNS
from minigpt.sweeps.report import TEXT as TEXT_REPORT


def find(path):
    return find_files(str(path), "data.path")


def test_a_folder_a_name_or_a_pattern_gives_its_files_sorted(tmp_path, monkeypatch):
    known = [
        "B.TXT",
        "a.md",
        "deep/d.parquet",
        "deep/er/c.jsonl",
        "e.txt.gz",
        "f.md.zst",
        "g.jsonl.GZ",
    ]
    others = [
        "x.pdf",
        "y.gz",
        "t.csv",
        "z.txt.bak",
        "[odd] *name?.text",
        ".hidden.txt",
        ".git/a.md",
        "deep/.cache/b.txt",
    ]
    write_files(tmp_path, dict.fromkeys(known + others, "a"))
    (tmp_path / "folder.txt").mkdir()
    assert find(tmp_path) == [tmp_path / name for name in known]
    for name in ("a.md", "x.pdf", ".hidden.txt", "[odd] *name?.text"):
        assert find(tmp_path / name) == [tmp_path / name]
    assert find(f"{tmp_path}/**/*.md") == [tmp_path / "a.md"]
    assert find(f"{tmp_path}/[ae].*") == [tmp_path / "a.md", tmp_path / "e.txt.gz"]
    monkeypatch.setenv("HOME", str(tmp_path / "deep"))
    assert find("~/er/c.jsonl") == find("~/*/*.jsonl") == [tmp_path / "deep/er/c.jsonl"]
    for name, problem in {
        "no.txt": "does not exist",
        "*.tsv": "matches no file",
        "folder.txt": "has no file",
    }.items():
        refused(re.escape(f"data.path={tmp_path / name} {problem}"), find, tmp_path / name)


def test_files_of_a_folder_that_are_skipped_are_counted(tmp_path, capsys):
    write_files(tmp_path, dict.fromkeys(("a.txt", "b.html", "c.html", "LICENSE", ".hidden"), "a"))
    find(tmp_path)
    warning = f"3 files of {tmp_path} are skipped (.html, no suffix); a pattern such as"
    assert warning in capsys.readouterr().err
    find(tmp_path / "a.txt")
    assert capsys.readouterr().err == ""


def test_linked_folders_are_followed_without_end_and_a_file_is_read_once(tmp_path):
    texts = tmp_path / "texts"
    elsewhere = tmp_path / "elsewhere"
    write_files(tmp_path, {"texts/real/a.txt": "real", "elsewhere/deep/a.txt": "deep"})
    links = {
        "z": elsewhere,
        "again": elsewhere,
        "real/up": texts,
        "real/self": texts / "real",
        "deep": elsewhere / "deep",
        "real/b.txt": texts / "real/a.txt",
        "c.txt": elsewhere / "deep/a.txt",
    }
    for name, target in links.items():
        (texts / name).symlink_to(target)
    (elsewhere / "deep/down").symlink_to(texts)
    both = [os.path.realpath(elsewhere / "deep/a.txt"), os.path.realpath(texts / "real/a.txt")]
    patterns = [f"{texts}{ending}" for ending in ("", "/**/*.txt", "/**", "/**/**/[ab].txt")]
    for path in (*patterns, [str(texts), f"{texts}/real"]):
        found = find_files(path, "data.path")
        assert sorted(os.path.realpath(file) for file in found) == both
    # Below again and z
    assert [file.read_text(encoding="utf-8") for file in find(f"{texts}/*/deep/*.txt")] == ["deep"]


@pytest.mark.parametrize(
    "pattern", ["**/*.txt", "a/**/*.txt", "*/**/c/*.txt", "a/b/**", "**/b/**/*", "**", "a**/*.txt"]
)
def test_a_pattern_gives_the_files_of_glob(tmp_path, monkeypatch, pattern):
    names = "x.txt a/x.txt a/b/y.txt a/b/c/z.txt ab/c/z.txt a/.h/x.txt .h/x.txt a/b/.h.txt"
    write_files(tmp_path, dict.fromkeys(names.split(), "a"))
    monkeypatch.chdir(tmp_path)
    paths = map(Path, glob(pattern, recursive=True))
    expected = sorted(path for path in paths if path.is_file())
    assert find(pattern) == expected
    assert find(tmp_path / pattern) == [tmp_path / file for file in expected]


def test_a_broken_link_is_told_apart_from_a_missing_file(tmp_path, capsys):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    message = r"data\.path=.*a\.txt is a broken link to .*gone\.txt; give a file that exists"
    refused(message, find, tmp_path / "a.txt")
    for path in (tmp_path, tmp_path / "*.txt"):
        message = r"no file.*; 1 files of .* are skipped \(broken link, FIFO or device\)$"
        refused(message, find, path)
    (tmp_path / "b.txt").write_text("b")
    assert find(tmp_path) == find(tmp_path / "*.txt") == [tmp_path / "b.txt"]
    assert capsys.readouterr().err.count("1 files of") == 2


def test_fifos_and_sockets_in_a_folder_are_skipped_and_never_opened(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo("fifo.txt")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket.md")
        for path in (tmp_path, tmp_path / "*"):
            assert documents(read_texts(str(path), "data.path")) == ["a"]
            warning = r"2 files of .* \(broken link, FIFO or device\)"
            assert re.search(warning, capsys.readouterr().err)


def test_the_output_of_runs_and_preparations_is_no_text_of_a_folder(tmp_path, capsys, monkeypatch):
    output = [
        "runs/x/log.txt",
        "runs/x/samples.txt",
        "runs/x/wandb/files/a.md",
        "runs/s/sweep.md",
        "runs/s/0/log.txt",
        "data/tinyshakespeare.txt",
        "data/stdin-0123456789abcdef.txt",
        "data/tokens/a.txt",
        "data/tiktoken/b.md",
        "data/tinyshakespeare-stand-in-0123456789ab.txt",
        "data/stdin-0123456789abcdef-0123456789ab.txt",
    ]
    texts = [
        "a.txt",
        "data/mine.txt",
        "data/stdin-my-notes.txt",
        "data/tokens.txt",
        "log.txt",
        "samples.txt",
        "other/tokens/a.txt",
        "runs/notes.md",
    ]
    others = ["runs/x/.hydra/a", "runs/x/metrics.csv", "runs/s/sweep.json", "other/.hydra/b"]
    write_files(tmp_path, dict.fromkeys([*output, *texts, *others], "a"))
    monkeypatch.chdir(tmp_path)
    for path in (".", "**/*.[tm][xd]*", str(tmp_path)):
        assert {os.path.relpath(file, tmp_path) for file in find(path)} == {*texts}
        n_skipped = len(output) + (2 if "*" not in path else 0)  # metrics.csv and sweep.json
        warning = f" {n_skipped} files of {path} are skipped (of earlier commands)"
        assert warning in capsys.readouterr().err
    assert find("data") == [Path(name) for name in texts[1:4]]
    for path in ("runs/x/samples.txt", output[6], "**/tinyshakespeare.txt", "runs/*/samples.txt"):
        assert len(find(path)) == 1
    message = r"=runs/x has no file with suffix.*; 4 files of runs/x are skipped \(of earlier"
    refused(message, find, "runs/x")


def test_a_run_resumes_on_a_folder_that_holds_its_own_output(train, text, tmp_path, capsys):
    (tmp_path / "my.txt").write_bytes(text.read_bytes())
    options = (f"data.path={tmp_path}", "eval_every=5", "callbacks.samples.max_new_tokens=3")
    first = train(*options, "max_steps=5").summary
    second = train(*options, "max_steps=10", "resume=auto").summary
    assert second["steps"] == 10
    assert second["corpus_sha256"] == first["corpus_sha256"] == sha256(text.read_bytes())
    assert {file.name for file in (tmp_path / "run").glob("*.txt")} == {"log.txt", "samples.txt"}
    assert f" files of {tmp_path} are skipped (of earlier commands)" in capsys.readouterr().err
    for of_sweeps in ({PLAN}, {RUNS, TEXT_REPORT}):
        assert of_sweeps in readers._RUN_MARKS


def test_the_readme_of_a_clone_is_no_text_of_its_data_folder(monkeypatch):
    monkeypatch.chdir(ROOT)
    refused(r"=data/R\*\.md matches no file.*\(of earlier commands\)", find, "data/R*.md")
    assert find("data/README.md") == [Path("data/README.md")]
