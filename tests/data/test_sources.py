"""Sources of the data group, with real files and `datasets`."""

import io
import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from unittest.mock import patch

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import ROOT, documents, sha256, values

from minigpt.checkpoints.format import contents, write
from minigpt.config import GPTConfig
from minigpt.data import sources
from minigpt.data.prepare import load_corpus
from minigpt.data.readers import read_texts
from minigpt.extras.interpret.run_corpus import find_corpus
from minigpt.utils.errors import UserError
from minigpt.utils.files import PARTIAL, atomic_write, checksums

TRAIN = [f"Once upon a time there was a fox number {i}. Ünï 漢字 😀\n\nThe end." for i in range(40)]
HUB = ("openwebtext", "tinystories")
VAL = ["A story to validate on.", "", "And another story: é漢."]


@pytest.fixture
def find(tmp_path):
    """Find the training and the validation source (or None) of files in configs/data/, each over the one before."""

    def find_(*names, **changes):
        data = values() | {"folder": str(tmp_path / "data")}
        for layer in (*map(values, names), changes):
            data |= layer
        return (*sources.find_sources(data), None)[:2]

    return find_


@pytest.fixture
def stories(tmp_path, monkeypatch):
    """A folder with the layout of a hub data set, without a hub."""
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


def texts_of(source):
    return documents(source.read())


def test_a_source_has_the_checksum_of_its_file_or_of_all_and_documents_in_their_order(find, tmp_path):
    folder = tmp_path / "My texts!"
    folder.mkdir()
    (folder / "b.txt").write_text("of b")
    (folder / "a.md").write_text("of a")
    (folder / "c.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    source, val = find(path=str(folder))
    assert texts_of(source) == ["of a", "of b", "one", "two"]
    assert (source.name, val) == ("My-texts", None)
    assert find(path=f"{folder}/*.txt")[0].sha256 == sha256(b"of b")
    (tmp_path / "a.jsonl").write_text('{"title": "a title", "body": "a body"}\n')
    title, body = (find(path=str(tmp_path / "a.jsonl"), field=field)[0] for field in ("title", "body"))
    assert (texts_of(title), texts_of(body)) == (["a title"], ["a body"])
    assert title.sha256 != body.sha256


def test_every_change_of_a_folder_gives_another_checksum_wherever_it_is(find, tmp_path):
    one, found = '{"text": "one"}', []
    changes = {"a.txt": one}, {"b.txt": "two"}, {"b.txt": "owt"}, {"0.txt": "owt"}
    for i, files in enumerate([*({"a.txt": one} | change for change in changes), {"0.txt": "owt", "a.jsonl": one}]):
        for folder in (tmp_path / f"here{i}", tmp_path / f"there{i}"):
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_text(content)
            found.append(find(path=str(folder))[0].sha256)
    assert found[::2] == found[1::2]
    assert len(set(found)) == 5


def test_processes_with_one_id_write_a_file_at_once_and_it_is_that_of_one_of_them(tmp_path):
    """As those of two containers do that share a data folder."""
    file = tmp_path / "file"
    with atomic_write(file) as one:
        one.write_text("one")
        with atomic_write(file) as other:
            assert fnmatch(other.name, f".file.{PARTIAL}")
            other.write_text("oth")  # half of it
            one.write_text("one whole")
    assert file.read_text() == "one whole"
    assert list(tmp_path.iterdir()) == [file]


def test_checksums_are_cached_until_the_file_is_written(tmp_path):
    file, folder = tmp_path / "a.txt", tmp_path / "data"
    cache = folder / "checksums.json"
    file.write_bytes(b"first")
    assert checksums([file], folder) == [sha256(b"first")]
    kept = json.loads(cache.read_text())
    assert list(kept.values()) == [sha256(b"first")]
    cache.write_text(json.dumps(dict.fromkeys(kept, "remembered")))
    assert checksums([file], folder) == ["remembered"]  # from the cache
    times = file.stat()
    file.write_bytes(b"later")  # same size and time
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert checksums([file], folder) == [sha256(b"later")]
    cache.write_text("damaged")
    assert checksums([file], folder) == [sha256(b"later")]
    assert checksums([file], file) == [sha256(b"later")]  # which cannot be written


def test_standard_input_is_read_once_and_shared_with_child_processes(find, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGPT_STDIN_FILE", "")  # removed after the test, whatever was set
    content = "from a pipe: é漢😀\r\n".encode() * 20_000  # several blocks
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of a batch job, whose script is one process
    for variable, processes, problem in (
        ("WORLD_SIZE", "2", "cannot be read by several processes"),
        ("SLURM_STEP_NUM_TASKS", "2", "cannot be read by several processes"),
        ("WORLD_SIZE", "1", "is empty;"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, processes)
            for path in ("-", "/dev/stdin"):
                with pytest.raises(UserError, match=rf"data\.path={path} .*{problem}"):
                    find(path=path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    for path in ("-", "/dev/stdin"):
        source, _ = find(path=path)
        assert texts_of(source) == [content.decode().replace("\r\n", "\n")]
        assert (source.name, source.sha256) == ("stdin", sha256(content))
    read = f"from minigpt.data.sources import spool; from pathlib import Path; print(spool('-', '', Path('{ROOT}')))"
    child = subprocess.run([sys.executable, "-c", read], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    copy = tmp_path / f"data/stdin-{sha256(content)[:16]}.txt"
    assert child.stdout.decode().strip() == str(copy)


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
    source, val = find(path=pipe("To be\r\n"), val_path=pipe("or not"))
    for _ in range(2):
        assert (texts_of(source), texts_of(val)) == (["To be\n"], ["or not"])
    assert (source.name, source.sha256, val.sha256) == ("stdin", sha256(b"To be\r\n"), sha256(b"or not"))
    with pytest.raises(UserError, match=r"^data\.path=/dev/fd/\d+ is empty; pipe a text into it$"):
        find(path=pipe(""))
    with patch.dict(os.environ, WORLD_SIZE="2"):
        with pytest.raises(UserError, match=r"^data\.path=/dev/fd/\d+ cannot be read by several processes; save"):
            find(path=pipe("x"))
    terminal, _ = os.openpty()
    with pytest.raises(UserError, match=r"^data\.path=/dev/fd/\d+ is a terminal; pipe a text into it"):
        find(path=f"/dev/fd/{terminal}")


def test_the_prompt_and_the_scored_text_may_be_a_pipe(pipe):
    assert documents(read_texts(pipe("To be\r\n"), "--score")) == ["To be\n"]


def test_a_list_of_paths_is_read_in_its_order(find, tmp_path, pipe):
    for name in ("b.txt", "a.txt", "more/c.md", "more/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"of {name[-5]}")
    source, val = find(path=[f"{tmp_path}/b.txt", f"{tmp_path}/more", f"{tmp_path}/*.txt"], val_path=[pipe("piped")])
    assert texts_of(source) == ["of b", "of c", "of d", "of a"]
    assert texts_of(val) == ["piped"]
    assert source.name == "b.txt-more-" + tmp_path.name
    assert find(path=[f"{tmp_path}/b.txt"])[0].sha256 == sha256(b"of b")
    with pytest.raises(UserError, match=r"data\.path=.*no\.txt does not exist"):
        find(path=[f"{tmp_path}/b.txt", f"{tmp_path}/no.txt"])


def test_a_corpus_has_the_name_of_its_file_or_of_the_fixed_part_of_its_pattern(find, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("plays/old/a.txt", "odd [1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    names = {"**/*.txt": "text", "plays/**/*.txt": "plays", "plays/*/a.txt": "a.txt", "./plays": "plays", ".": "text"}
    for path, name in (names | {"odd [1].txt": "odd-1-.txt", f"{tmp_path}/*/*/*": tmp_path.name}).items():
        assert find(path=path)[0].name == name


def test_checksums_of_ordinary_texts_stay_what_they_were(find, tmp_path):
    """Token files are found by them."""
    for name in ("a.txt", "b.md", "c.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n{"text": "b"}' if name == "c.jsonl" else name)
    sums = [sha256((tmp_path / name).read_bytes()) for name in ("a.txt", "b.md", "c.jsonl")]
    assert find(path=str(tmp_path / "a.txt"))[0].sha256 == sums[0]
    identity = json.dumps(["text", [".txt", ".md", ".jsonl"], sums], sort_keys=True)
    assert find(path=str(tmp_path))[0].sha256 == sha256(identity.encode())


def test_a_data_set_of_a_hub_is_read_with_its_validation_split_if_it_has_one(find, stories, tmp_path):
    source, val = find(*HUB, dataset=str(stories))
    assert (texts_of(source), texts_of(val), source.name) == (TRAIN, VAL, "tinystories")
    for other in ("subset", "revision", "field"):
        assert find(*HUB, dataset=str(stories), **{other: "other"})[0].sha256 != source.sha256
    write_stories(stories, "train", [*TRAIN, "one more"])
    assert find(*HUB, dataset=str(stories))[0].sha256 != source.sha256
    assert find("openwebtext", dataset=str(stories))[1] is None
    with patch("datasets.load_dataset", return_value=[{"body": "a row"}]) as load:
        source, _ = find(*HUB, dataset="a/b", subset="c", revision="d", train_split="e", field="body")
        assert texts_of(source) == ["a row"]
    load.assert_called_once_with("a/b", "c", split="e", revision="d", streaming=True)


def test_the_corpus_of_a_checkpoint_is_found(stories, tmp_path):
    data = values() | values("openwebtext") | {"folder": str(tmp_path / "data"), "dataset": str(stories)}
    data |= {"val_fraction": 0.2}
    corpus = load_corpus(data, {"name": "char"})
    model, run = GPTConfig(vocab_size=corpus.tokenizer.vocab_size), {"data": data}
    content = contents(model, corpus.tokenizer, config=run, corpus_sha256=corpus.sha256)
    write(content | {"state_dict": {}}, tmp_path / "last.safetensors")
    load_corpus(data | {"val_fraction": 0.5}, {"name": "char"})  # another split of the same text
    assert find_corpus(tmp_path / "last.safetensors").val == corpus.val


def test_a_data_set_that_is_unreachable_or_without_a_column_or_split_is_one_line(find, stories):
    for changes, problem in (
        ({"field": "id"}, rf"^data\.dataset={stories}: .* column id; .*text are text, title;"),
        ({"train_split": "exam"}, "exam"),
        ({"dataset": "nobody/nothing"}, r"^data\.dataset=nobody/nothing [^\n]*$"),
    ):
        source, _ = find(*HUB, **{"dataset": str(stories)} | changes)
        with pytest.raises(UserError, match=problem):
            texts_of(source)
