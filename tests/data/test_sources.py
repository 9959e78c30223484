"""Where texts come from: files, folders, pipes, the hub, and tiny shakespeare."""

import io
import json
import os
import re
import socket
import subprocess
import sys
from glob import glob
from pathlib import Path
from unittest.mock import patch

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import (
    ROOT,
    Hub,
    corpus_of,
    documents,
    serving,
    sha256,
    texts_of,
    texts_on_disk,
    values,
    write_files,
)
from refusals import refused

from minigpt.checkpoints.format import contents, write
from minigpt.data import readers, sources
from minigpt.data.prepare import load_corpus
from minigpt.data.readers import find_files, read_texts
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.model.config import GPTConfig
from minigpt.runs.run_dir import PLAN
from minigpt.sweeps.report import RUNS
from minigpt.sweeps.report import TEXT as TEXT_REPORT
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.ranks import SRUN


@pytest.fixture
def find(tmp_path):
    # Find the training and the validation source (or None) of files in configs/data/
    def find_(*names, **changes):
        data = values() | {"folder": str(tmp_path / "data")}
        for layer in (*map(values, names), changes):
            data |= layer
        return (*sources.find_sources(data), None)[:2]

    return find_


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
    # Return a function that makes the path of a pipe, as the shell makes of <(printf TEXT)
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
    pattern = r"^data\.path=/dev/fd/\d+ is closed or a terminal; pipe a text into it"
    refused(pattern, find, path=f"/dev/fd/{terminal}")
    with patch("sys.stdin", None):
        refused("which is closed or a terminal; pipe a text into it", find, path="-")


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
    # Token files are found by them
    texts = {"a.txt": b"a", "b.md": b"b", "c.jsonl": b'{"text": "a"}\n{"text": "b"}'}
    write_files(tmp_path, texts)
    sums = [sha256(content) for content in texts.values()]
    assert find(path=str(tmp_path / "a.txt"))[0].sha256 == sums[0]
    identity = json.dumps(["text", [".txt", ".md", ".jsonl"], sums], sort_keys=True)
    assert find(path=str(tmp_path))[0].sha256 == sha256(identity.encode())


def files_of(path):
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
    assert files_of(tmp_path) == [tmp_path / name for name in known]
    for name in ("a.md", "x.pdf", ".hidden.txt", "[odd] *name?.text"):
        assert files_of(tmp_path / name) == [tmp_path / name]
    assert files_of(f"{tmp_path}/**/*.md") == [tmp_path / "a.md"]
    assert files_of(f"{tmp_path}/[ae].*") == [tmp_path / "a.md", tmp_path / "e.txt.gz"]
    monkeypatch.setenv("HOME", str(tmp_path / "deep"))
    assert files_of("~/er/c.jsonl") == files_of("~/*/*.jsonl") == [tmp_path / "deep/er/c.jsonl"]
    for name, problem in {
        "no.txt": "does not exist",
        "*.tsv": "matches no file",
        "folder.txt": "has no file",
    }.items():
        refused(re.escape(f"data.path={tmp_path / name} {problem}"), files_of, tmp_path / name)


def test_files_of_a_folder_that_are_skipped_are_counted(tmp_path, capsys):
    write_files(tmp_path, dict.fromkeys(("a.txt", "b.html", "c.html", "LICENSE", ".hidden"), "a"))
    files_of(tmp_path)
    warning = f"3 files of {tmp_path} are skipped (.html, no suffix); a pattern such as"
    assert warning in capsys.readouterr().err
    files_of(tmp_path / "a.txt")
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
    assert [file.read_text(encoding="utf-8") for file in files_of(f"{texts}/*/deep/*.txt")] == [
        "deep"
    ]


@pytest.mark.parametrize(
    "pattern", ["**/*.txt", "a/**/*.txt", "*/**/c/*.txt", "a/b/**", "**/b/**/*", "**", "a**/*.txt"]
)
def test_a_pattern_gives_the_files_of_glob(tmp_path, monkeypatch, pattern):
    names = "x.txt a/x.txt a/b/y.txt a/b/c/z.txt ab/c/z.txt a/.h/x.txt .h/x.txt a/b/.h.txt"
    write_files(tmp_path, dict.fromkeys(names.split(), "a"))
    monkeypatch.chdir(tmp_path)
    paths = map(Path, glob(pattern, recursive=True))
    expected = sorted(path for path in paths if path.is_file())
    assert files_of(pattern) == expected
    assert files_of(tmp_path / pattern) == [tmp_path / file for file in expected]


def test_a_broken_link_is_told_apart_from_a_missing_file(tmp_path, capsys):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    message = r"data\.path=.*a\.txt is a broken link to .*gone\.txt; give a file that exists"
    refused(message, files_of, tmp_path / "a.txt")
    for path in (tmp_path, tmp_path / "*.txt"):
        message = r"no file.*; 1 files of .* are skipped \(broken link, FIFO or device\)$"
        refused(message, files_of, path)
    (tmp_path / "b.txt").write_text("b")
    assert files_of(tmp_path) == files_of(tmp_path / "*.txt") == [tmp_path / "b.txt"]
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
        assert {os.path.relpath(file, tmp_path) for file in files_of(path)} == {*texts}
        n_skipped = len(output) + (2 if "*" not in path else 0)  # metrics.csv and sweep.json
        warning = f" {n_skipped} files of {path} are skipped (of earlier commands)"
        assert warning in capsys.readouterr().err
    assert files_of("data") == [Path(name) for name in texts[1:4]]
    for path in ("runs/x/samples.txt", output[6], "**/tinyshakespeare.txt", "runs/*/samples.txt"):
        assert len(files_of(path)) == 1
    refused(
        r"=runs/x has no file with suffix.*; 4 files of runs/x are skipped \(of earlier",
        files_of,
        "runs/x",
    )


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
    refused(r"=data/R\*\.md matches no file.*\(of earlier commands\)", files_of, "data/R*.md")
    assert files_of("data/README.md") == [Path("data/README.md")]


LITTLE = b"a little text\nin two lines\n"


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.delenv("MINIGPT_DATA_DIR", raising=False)
    with serving(LITTLE, monkeypatch) as server:
        server.settings = {
            "name": "little",
            "url": f"{server.url}/little.txt",
            "sha256": sha256(LITTLE),
            "characters": 1000,
            "folder": tmp_path / "data",
        }
        yield server


@pytest.fixture(scope="module")
def plays():
    texts = documents(sources.find_sources(values(**values("plays")))[0].read())
    assert len(set(texts)) == 38
    return "".join(texts)


def test_the_text_is_searched_in_folder_then_shared_folder_then_url(
    tmp_path, monkeypatch, server, capsys
):
    folder = tmp_path / "data"
    shared = tmp_path / "shared"
    monkeypatch.setenv("MINIGPT_DATA_DIR", str(shared))
    write_files(tmp_path, dict.fromkeys(("data/little.txt", "shared/little.txt"), LITTLE))
    assert sources.find_text(server.settings) == folder / "little.txt"
    (folder / "little.txt").unlink()
    assert sources.find_text(server.settings) == shared / "little.txt"
    assert (server.requests, capsys.readouterr().err) == (0, "")
    (shared / "little.txt").write_bytes(LITTLE.upper())  # a wrong checksum
    server.faults += [503]  # the download is retried
    for _ in range(2):  # then from the folder
        assert sources.find_text(server.settings).read_bytes() == LITTLE
    assert server.requests == 2
    assert str(shared / "little.txt") in capsys.readouterr().err
    (folder / "little.txt").write_bytes(b"of the user")
    for _ in range(2):
        assert sources.find_text(server.settings).read_bytes() == LITTLE
    assert (folder / "little.txt").read_bytes() == b"of the user"
    assert server.requests == 3


def occupy(path, kind):
    if kind == "folder":
        path.mkdir()
        (path / "notes.md").write_text("of the user")
        return lambda: (path / "notes.md").read_text(encoding="utf-8")
    path.symlink_to("unmounted/disk.txt")
    return lambda: os.readlink(path)


@pytest.mark.parametrize("kind", ["folder", "broken link"])
def test_nothing_of_the_user_is_replaced_by_a_download_or_the_stand_in(
    tmp_path, server, kind, plays
):
    folder = tmp_path / "data"
    settings = server.settings | {"source": "download"}
    folder.mkdir()
    names = ("little.txt", "little-stand-in.txt", "checksums.json")
    read = {name: occupy(folder / name, kind) for name in names}
    before = {name: of_user() for name, of_user in read.items()}
    for requests in (1, 1):  # the second run has the text
        corpus = corpus_of(None, **settings)
        assert ("".join(texts_on_disk(corpus)), corpus.name) == (LITTLE.decode(), "little")
        assert server.requests == requests
    (folder / f"little-{sha256(LITTLE)[:12]}.txt").unlink()
    server.faults += [404] * 6
    for _ in range(2):
        corpus = corpus_of(None, **settings)
        assert "".join(texts_on_disk(corpus)) == plays[:1000]
        assert corpus.name.startswith("little-stand-in-")
    copy = f"little-{sha256(LITTLE)[:12]}.txt"
    read[copy] = occupy(folder / copy, kind)
    refused(
        f"^{folder / copy} must be free, or have the checksum of its name;",
        sources.find_text,
        server.settings,
    )
    assert {name: of_user() for name, of_user in read.items()} == before | {copy: read[copy]()}
    assert server.requests == 7


def test_a_download_that_keeps_failing_is_replaced_by_the_stand_in(tmp_path, server, capsys, plays):
    server.faults += [404, LITTLE[:9], LITTLE.upper()]
    corpus = corpus_of(None, **server.settings | {"folder": tmp_path, "source": "download"})
    assert server.requests == 3
    assert re.search("warning: .*little .*stand-in", capsys.readouterr().err)
    assert "".join(texts_on_disk(corpus)) == plays[:1000]
    assert corpus.name == "little-stand-in"  # its losses are not little's


def test_speeches_continue_after_a_stage_direction_which_is_removed_like_headings(plays):
    # Macbeth, between: _Exit Servant_
    assert "Get thee to bed.\nIs this a dagger which I see before me," in plays
    # Another speaker, another speech
    assert "Call Philostrate.\n\nPHILOSTRATE:\nHere, mighty Theseus.\n\n" in plays
    assert not re.search(r"^(Exeunt|Exit|Re-enter|SCENE|ACT)\b", plays, flags=re.MULTILINE)


TRAIN = [f"Once upon a time there was a fox number {i}. Ünï 漢字 😀\n\nThe end." for i in range(40)]
HUB = ("openwebtext", "tinystories")
UNREACHED = r"^data\.dataset=me/plays could not be reached \([^\n]*set data\.path=…$"
VAL = ["A story to validate on.", "", "And another story: é漢."]


@pytest.fixture
def stories(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub/datasets"))
    (tmp_path / "stories/data").mkdir(parents=True)
    for split, texts in (("train", TRAIN), ("validation", VAL)):
        write_stories(tmp_path / "stories", split, texts)
    return tmp_path / "stories"


def write_stories(folder, split, texts):
    table = pa.table({"id": range(len(texts)), "text": texts, "title": ["a title"] * len(texts)})
    pq.write_table(table, folder / f"data/{split}-00000-of-00001.parquet")


def test_a_folder_with_the_layout_of_a_hub_is_read_with_its_validation_split_if_it_has_one(
    find, stories, tmp_path
):
    source, val = find(*HUB, dataset=str(stories))
    assert (texts_of(source), texts_of(val), source.name) == (TRAIN, VAL, "tinystories")
    for other in ("revision", "field"):
        assert find(*HUB, dataset=str(stories), **{other: "other"})[0].sha256 != source.sha256
    write_stories(stories, "train", [*TRAIN, "one more"])
    changed, val_again = find(*HUB, dataset=str(stories))
    assert (changed.sha256 != source.sha256, val_again.sha256) == (True, val.sha256)
    assert find("openwebtext", dataset=str(stories))[1] is None
    message = "cannot be read: BuilderConfig 'other' not found"
    refused(message, find, *HUB, dataset=str(stories), subset="other")


def test_the_checksum_of_a_folder_is_that_of_the_rows_that_are_read(
    find, stories, tmp_path, monkeypatch
):
    # Not of its path, nor of other files in it
    source, val = find(*HUB, dataset=str(stories))
    (stories / "README.md").write_text("# Stories")
    (stories / ".cache").write_text("hidden")
    monkeypatch.chdir(tmp_path)
    for path in (str(stories), "stories", "./stories/"):
        same, same_val = find(*HUB, dataset=path)
        assert (same.sha256, texts_of(same)) == (source.sha256, TRAIN)
        assert (same_val.sha256, texts_of(same_val)) == (val.sha256, VAL)
    write_stories(stories, "validation", ["other rows"])
    same, changed = find(*HUB, dataset=path)
    assert same.sha256 == source.sha256
    assert changed.sha256 != val.sha256


def test_a_text_file_of_a_folder_with_the_layout_of_a_hub_is_one_document(find, stories):
    folder = stories.parent / "texts"
    write_files(folder, {"train_1.txt": "One day.\r\n\r\nTwo dogs.\n", "train_2.txt": "The end."})
    (source, _) = find("openwebtext", dataset=str(folder))
    assert texts_of(source) == ["One day.\n\nTwo dogs.\n", "The end."]


def test_null_of_a_hub_is_left_out_and_counted_and_every_line_end_is_a_line_break(
    find, stories, capsys
):
    write_stories(stories, "train", ["a\rb\r\nc", None, "", None])
    source, _ = find("openwebtext", dataset=str(stories))
    for _ in range(2):
        assert texts_of(source) == ["a\nb\nc", ""]
    warning = f"2 rows of data.dataset={stories} have null instead of a text and are left out"
    assert capsys.readouterr().err == f"warning: {warning}\n"


def parquet(texts):
    content = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), content)
    return content.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    # A server with the interface of the hub, which the clients take for it, and empty caches
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub/hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub/datasets")
    hub = Hub()
    with hub.serve():
        point_at(hub.url, monkeypatch)
        yield hub


def point_at(url, monkeypatch):
    # Do what HF_ENDPOINT does before these modules are imported
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)


@pytest.fixture
def offline(monkeypatch):
    def offline_():
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    return offline_


@pytest.mark.parametrize("card", [{"README.md": b"# Plays"}, {}], ids=["card", "none"])
def test_a_data_set_of_the_hub_is_its_commit(find, hub, card, capsys):
    files = {"validation.parquet": parquet(["val"]), **card}
    first = hub.commit(files | {"train.parquet": parquet(["one", "two"])})
    source, val = find(*HUB, dataset="me/plays")
    assert (texts_of(source), texts_of(val)) == (["one", "two"], ["val"])
    assert f"is read at commit {first}; data.revision={first} fixes it\n" in capsys.readouterr().err
    hub.commit(files | {"train.parquet": parquet(["changed"])})
    changed, _ = find(*HUB, dataset="me/plays")
    assert texts_of(changed) == ["changed"]
    assert texts_of(source) == ["one", "two"]  # the commit that its checksum is of
    assert changed.sha256 != source.sha256
    assert find(*HUB, dataset="me/plays", revision=first)[0].sha256 == source.sha256
    hub.commit(hub.commits[first], branch="v1")
    assert find(*HUB, dataset="me/plays", revision="v1")[0].sha256 == source.sha256


def test_without_a_network_a_data_set_is_the_commit_last_seen_and_read_from_the_cache_if_there(
    find, hub, offline, monkeypatch
):
    files = {"train.parquet": parquet(["one"]), "README.md": b"# Plays"}
    first = hub.commit(files)
    source, _ = find("openwebtext", dataset="me/plays")
    with monkeypatch.context() as patched:
        patched.setenv("HF_DATASETS_OFFLINE", "1")
        patched.delattr(huggingface_hub, "errors")  # no module has imported it in a new process
        assert find("openwebtext", dataset="me/plays")[0].sha256 == source.sha256
    datasets.load_dataset("me/plays")
    second = hub.commit(files | {"train.parquet": parquet(["two"])})
    changed, _ = find("openwebtext", dataset="me/plays")
    offline()
    assert find("openwebtext", dataset="me/plays")[0].sha256 == changed.sha256
    with pytest.raises(RunError, match=UNREACHED):
        texts_of(changed)  # not the other commit, which is in the cache
    cached, _ = find("openwebtext", dataset="me/plays", revision=first)
    assert (texts_of(cached), cached.sha256, first != second) == (["one"], source.sha256, True)


def test_an_unknown_data_set_or_revision_and_a_hub_that_is_down_are_one_line(
    find, hub, offline, monkeypatch
):
    hub.commit({"train.parquet": parquet(["one"]), "README.md": b"# Plays"})
    plays = {"dataset": "me/plays"}
    for changes in ({"dataset": "me/nothing"}, plays | {"revision": "v9"}, {"dataset": "a b"}):
        with pytest.raises(UserError, match=r"^data\.dataset=.* cannot be read: ") as error:
            find("openwebtext", **changes)
        assert error.value.exit_code == 2
    point_at("http://127.0.0.1:9", monkeypatch)
    for _ in range(2):
        with pytest.raises(RunError, match=UNREACHED):
            find("openwebtext", **plays)
        offline()


def test_the_corpus_of_a_checkpoint_is_found(stories, tmp_path):
    own = {"folder": str(tmp_path / "data"), "dataset": str(stories), "val_fraction": 0.2}
    data = values() | values("openwebtext") | own
    corpus = load_corpus(data, {"name": "char"})
    model = GPTConfig(vocab_size=corpus.tokenizer.vocab_size)
    own = {"config": {"data": data}, "corpus_sha256": corpus.sha256}
    content = contents(model, corpus.tokenizer, **own)
    write(content | {"state_dict": {}}, tmp_path / "last.safetensors")
    load_corpus(data | {"val_fraction": 0.5}, {"name": "char"})  # another split of the same text
    assert find_corpus(tmp_path / "last.safetensors").val == corpus.val


def test_a_run_does_not_resume_on_its_token_files_if_another_data_set_is_given(
    train, stories, tmp_path
):
    given = ("data=openwebtext", "data.path=null", "data.val_split=validation", "tokenizer=byte")
    train(*given, f"data.dataset={stories}", "max_steps=1")
    refused(
        "is not searched, because other settings select the text",
        train,
        *given,
        f"data.dataset={tmp_path}/another",
        "max_steps=2",
        "resume=auto",
    )


def test_a_data_set_that_is_unreachable_or_without_a_column_or_split_is_one_line(find, stories):
    for changes, problem in (
        (
            {"field": "id"},
            rf"^data\.dataset={stories}, row 1: column id holds int, not text; .* text, title;",
        ),
        (
            {"field": "body"},
            rf"^data\.dataset={stories}, row 1: no text in column body; .*text are text, title;",
        ),
        ({"train_split": "exam"}, "exam"),
        ({"dataset": "nobody/nothing"}, r"^data\.dataset=nobody/nothing [^\n]*$"),
    ):
        with pytest.raises(UserError, match=problem):
            texts_of(find(*HUB, **{"dataset": str(stories)} | changes)[0])
