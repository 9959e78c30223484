"""Sources of the data group: files, folders, pipes and lists of them."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from corpora import ROOT, documents, sha256, texts_of, write_files
from refusals import refused

from minigpt.data.readers import read_texts
from minigpt.utils.ranks import SRUN


def test_a_source_has_the_checksum_of_its_file_or_of_all_and_documents_in_their_order(
    find, tmp_path
):
    folder = tmp_path / "My texts!"
    rows = '{"text": "one"}\n{"text": "two"}\n'
    write_files(folder, {"b.txt": "of b", "a.md": "of a", "c.jsonl": rows})
    source, val = find(path=str(folder))
    assert texts_of(source) == ["of a", "of b", "one", "two"]
    assert (source.name, val) == ("My-texts", None)
    assert find(path=f"{folder}/*.txt")[0].sha256 == sha256(b"of b")
    (tmp_path / "a.jsonl").write_text('{"title": "a title", "body": "a body"}\n')
    title, _ = find(path=f"{tmp_path}/a.jsonl", field="title")
    body, _ = find(path=f"{tmp_path}/a.jsonl", field="body")
    assert (texts_of(title), texts_of(body)) == (["a title"], ["a body"])
    assert title.sha256 != body.sha256


def test_every_change_of_a_folder_gives_another_checksum_wherever_it_is(find, tmp_path):
    one = '{"text": "one"}'
    found = set()
    for i, files in enumerate(
        [
            {"a.txt": one},
            {"a.txt": one, "b.txt": "two"},
            {"a.txt": one, "b.txt": "owt"},
            {"a.txt": one, "0.txt": "owt"},
            {"a.jsonl": one, "0.txt": "owt"},
        ]
    ):
        for place in ("here", "there"):
            write_files(tmp_path / f"{place}{i}", files)
            found.add(find(path=f"{tmp_path}/{place}{i}")[0].sha256)
        assert len(found) == i + 1


def test_standard_input_is_read_once_and_shared_with_child_processes(find, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGPT_STDIN_FILE", "")  # removed after the test, whatever was set
    content = "from a pipe: é漢😀\r\n".encode() * 20_000  # several blocks
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of a batch job, whose script is one process
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a pod of Kubeflow
    for name in (*SRUN, "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for variable, processes, problem in (
        ("SLURM_STEP_NUM_TASKS", "2", "cannot be read by several processes"),
        ("MINIGPT_RANK_ZERO_PID", "1", "cannot be read by several processes"),
        ("WORLD_SIZE", "1", "is empty;"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, processes)
            for path in ("-", "/dev/stdin"):
                refused(rf"data\.path={path} .*{problem}", find, path=path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    for path in ("-", "/dev/stdin"):
        source, _ = find(path=path)
        assert texts_of(source) == [content.decode().replace("\r\n", "\n")]
        assert (source.name, source.sha256) == ("stdin", sha256(content))
    copy = tmp_path / f"data/stdin-{sha256(content)[:16]}.txt"
    assert spooled_in_child("-") == copy


def spooled_in_child(path):
    """Return what a child process, such as a rank, reads for a path; it has no such pipe."""
    imports = "from minigpt.extras.corpora.standard_input import spool; from pathlib import Path"
    program = f"{imports}; print(spool('{path}', '', Path('{ROOT}')), end='')"
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    return Path(subprocess.run([sys.executable, "-c", program], check=True, **options).stdout)


@pytest.fixture
def pipe():
    """Return a function that makes the path of a pipe, as the shell makes of <(printf TEXT)."""
    ends = []

    def pipe_(text):
        read, write_ = os.pipe()
        ends.append(read)
        os.write(write_, text.encode())
        os.close(write_)
        return f"/dev/fd/{read}"

    with patch.dict(os.environ):
        yield pipe_
    for end in ends:
        os.close(end)


def test_a_pipe_is_read_once_and_has_the_checksum_of_its_text(find, pipe, tmp_path):
    path = pipe("To be\r\n")
    source, val = find(path=path, val_path=pipe("or not"))
    for _ in range(2):
        assert (texts_of(source), texts_of(val)) == (["To be\n"], ["or not"])
    assert (source.name, source.sha256) == ("stdin", sha256(b"To be\r\n"))
    assert val.sha256 == sha256(b"or not")
    assert spooled_in_child(path).read_bytes() == b"To be\r\n"
    refused(r"^data\.path=/dev/fd/\d+ is empty; pipe a text into it$", find, path=pipe(""))
    pattern = r"^data\.path=/dev/fd/\d+ cannot be read by several processes; save"
    with patch.dict(os.environ, MINIGPT_RANK_ZERO_PID="1", LOCAL_RANK="1", WORLD_SIZE="2"):
        refused(pattern, find, path=pipe("x"))
    terminal, _ = os.openpty()
    pattern = r"^data\.path=/dev/fd/\d+ is a terminal; pipe a text into it"
    refused(pattern, find, path=f"/dev/fd/{terminal}")


def test_a_copy_of_a_pipe_that_was_edited_is_neither_read_for_it_nor_replaced(find, pipe, tmp_path):
    edited = tmp_path / f"data/stdin-{sha256(b'To be')[:16]}.txt"
    for _ in range(2):  # the second finds the copy
        edited.parent.mkdir(exist_ok=True)
        edited.write_text("Not to be")
        source, _ = find(path=pipe("To be"))
        assert (texts_of(source), source.sha256) == (["To be"], sha256(b"To be"))
        assert edited.read_text(encoding="utf-8") == "Not to be"
        assert len([*edited.parent.glob("stdin-*")]) == 2


def test_the_prompt_and_the_scored_text_may_be_a_pipe(pipe):
    assert documents(read_texts(pipe("To be\r\n"), "--score")) == ["To be\n"]


def test_a_list_of_paths_is_read_in_its_order(find, tmp_path, pipe):
    texts = {"b.txt": "of b", "a.txt": "of a", "more/c.md": "of c", "more/d.txt": "of d"}
    write_files(tmp_path, texts)
    paths = [f"{tmp_path}/b.txt", f"{tmp_path}/more", f"{tmp_path}/*.txt"]
    source, val = find(path=paths, val_path=[pipe("piped")])
    assert texts_of(source) == ["of b", "of c", "of d", "of a"]
    assert texts_of(val) == ["piped"]
    assert source.name == "b.txt-more-" + tmp_path.name
    assert find(path=[f"{tmp_path}/b.txt"])[0].sha256 == sha256(b"of b")
    paths = [f"{tmp_path}/b.txt", f"{tmp_path}/no.txt"]
    refused(r"data\.path=.*no\.txt does not exist", find, path=paths)


def test_a_corpus_has_the_name_of_its_file_or_of_the_fixed_part_of_its_pattern(
    find, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, dict.fromkeys(("plays/old/a.txt", "odd [1].txt"), "a"))
    names = {
        "**/*.txt": "text",
        "plays/**/*.txt": "plays",
        "plays/*/a.txt": "a.txt",
        "./plays": "plays",
        ".": "text",
        "odd [1].txt": "odd-1-.txt",
        f"{tmp_path}/*/*/*": tmp_path.name,
    }
    for path, name in names.items():
        assert find(path=path)[0].name == name


def test_checksums_of_ordinary_texts_stay_what_they_were(find, tmp_path):
    """Token files are found by them."""
    texts = {"a.txt": b"a", "b.md": b"b", "c.jsonl": b'{"text": "a"}\n{"text": "b"}'}
    write_files(tmp_path, texts)
    sums = [sha256(content) for content in texts.values()]
    assert find(path=str(tmp_path / "a.txt"))[0].sha256 == sums[0]
    identity = json.dumps(["text", [".txt", ".md", ".jsonl"], sums], sort_keys=True)
    assert find(path=str(tmp_path))[0].sha256 == sha256(identity.encode())
