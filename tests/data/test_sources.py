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
    for processes, problem in (("2", "cannot be read by several processes"), ("1", "is empty;")):
        monkeypatch.setenv("WORLD_SIZE", processes)
        with pytest.raises(UserError, match=rf"data\.path=- .*{problem}"):
            find(path="-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    for _ in range(2):
        source, _ = find(path="-")
        assert texts_of(source) == [content.decode().replace("\r\n", "\n")]
        assert (source.name, source.sha256) == ("stdin", sha256(content))
    read = f"from minigpt.data.sources import spool_stdin; from pathlib import Path; print(spool_stdin(Path('{ROOT}')))"
    child = subprocess.run([sys.executable, "-c", read], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    copy = tmp_path / f"data/stdin-{sha256(content)[:16]}.txt"
    assert child.stdout.decode().strip() == str(copy)


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
