"""Sources of the data group, with Hydra, real files, and `datasets`."""

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from minigpt.data import prepare as preparation
from minigpt.data import sources
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.files import checksums

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
TRAIN = [f"Once upon a time there was a fox number {i}. Ünï 漢字 😀\n\nThe end." for i in range(40)]
VAL = ["A story to validate on.", "", "And another story: é漢."]


@pytest.fixture(autouse=True)
def nothing_from_outside(tmp_path, monkeypatch):
    """Disable the hub and use a cache of the test, also if `datasets` was imported before."""
    monkeypatch.delenv("MINIGPT_DATA_DIR", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub/datasets"))
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub/datasets"))


@pytest.fixture
def configured(tmp_path):
    """Compose the groups data and tokenizer as a script does."""

    def configure(*overrides):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = compose("train", overrides=[f"data.folder={tmp_path}/data", *overrides])
        return OmegaConf.to_container(cfg.data, resolve=True), OmegaConf.to_container(cfg.tokenizer, resolve=True)

    return configure


@pytest.fixture
def find(configured):
    return lambda *overrides: (*sources.find_sources(configured(*overrides)[0]), None)[:2]


@pytest.fixture
def stories(tmp_path):
    """A folder with the layout of a hub data set."""
    folder = tmp_path / "stories"
    for split, texts in (("train", TRAIN), ("validation", VAL)):
        write_stories(folder, split, texts)
    return folder


def write_stories(folder, split, texts):
    (folder / "data").mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(texts)), "text": texts, "title": ["a title"] * len(texts)})
    pq.write_table(table, folder / f"data/{split}-00000-of-00001.parquet")


def documents(source):
    """Return the texts of a source, joined from their chunks."""
    texts = []
    for text, first in source.read():
        if first:
            texts.append("")
        texts[-1] += text
    return texts


def sha256(content):
    return hashlib.sha256(content).hexdigest()


# The user's own files


@pytest.mark.parametrize("name", ["a.txt", "a.md", "My notes!", "a.TXT", "b.c.txt"])
def test_a_source_of_one_text_file_has_its_checksum(find, tmp_path, name):
    (tmp_path / name).write_text("some text é\r\n", encoding="utf-8", newline="")
    source, val = find("data=text", f"data.path='{tmp_path / name}'")
    assert documents(source) == ["some text é\r\n"]
    assert source.sha256 == sha256("some text é\r\n".encode()) == sources.corpus_sha256([source])
    assert val is None
    assert documents(source) == documents(source)  # again and again


def test_the_documents_of_a_folder_are_in_the_order_of_its_files(find, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("of b")
    (folder / "a.md").write_text("of a")
    (folder / "c.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    source, _ = find("data=text", f"data.path={folder}")
    assert documents(source) == ["of a", "of b", "one", "two"]
    assert source.name == "texts"
    pattern, _ = find("data=text", f"data.path='{folder}/*.txt'")
    assert documents(pattern) == ["of b"]
    assert pattern.sha256 == sha256(b"of b")


def test_a_separate_validation_text_is_a_second_source(find, tmp_path):
    (tmp_path / "a.txt").write_text("to train on")
    (tmp_path / "b.txt").write_text("to validate on")
    for overrides in (("data=text", f"data.path={tmp_path}/a.txt"), ("data=plays",)):
        source, val = find(*overrides, f"data.val_path={tmp_path}/b.txt")
        assert documents(val) == ["to validate on"]
        assert val.sha256 == sha256(b"to validate on")
        both = sources.corpus_sha256([source, val])
        assert both not in (source.sha256, val.sha256)
        (tmp_path / "b.txt").write_text("another text")
        assert sources.corpus_sha256(find(*overrides, f"data.val_path={tmp_path}/b.txt")) != both
        (tmp_path / "b.txt").write_text("to validate on")


@pytest.mark.parametrize("setting", ["data.path", "data.val_path"])
def test_a_missing_text_raises_with_its_key_and_path(find, tmp_path, setting):
    (tmp_path / "a.txt").write_text("a")
    missing = tmp_path / "missing.txt"
    with pytest.raises(UserError) as error:
        find("data=text", f"data.path={tmp_path}/a.txt", f"{setting}={missing}")
    assert str(error.value).startswith(f"{setting}={missing}")


def test_a_null_path_raises(find):
    with pytest.raises(UserError, match=r"data\.path=…"):
        find("data=text")


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.jsonl.GZ"])
def test_another_field_gives_another_checksum(find, tmp_path, name):
    import gzip

    content = b'{"title": "a title", "body": "a body"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    title, _ = find("data=text", f"data.path={tmp_path / name}", "data.field=title")
    body, _ = find("data=text", f"data.path={tmp_path / name}", "data.field=body")
    assert (documents(title), documents(body)) == (["a title"], ["a body"])
    assert title.sha256 != body.sha256


def test_every_change_of_a_folder_gives_another_checksum(find, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    seen = set()

    def changed():
        source, _ = find("data=text", f"data.path={folder}")
        again, _ = find("data=text", f"data.path={folder}")
        assert source.sha256 == again.sha256
        new = source.sha256 not in seen
        seen.add(source.sha256)
        return new

    (folder / "a.txt").write_text('{"text": "one"}')
    assert changed()
    (folder / "b.txt").write_text("two")
    assert changed()
    (folder / "b.txt").write_text("owt")
    assert changed()
    (folder / "b.txt").rename(folder / "0.txt")  # another order
    assert changed()
    (folder / "a.txt").rename(folder / "a.jsonl")  # read in another way
    assert changed()
    (folder / "c.txt").symlink_to(folder / "0.txt")  # the same text twice
    assert changed()
    (folder / "c.txt").unlink()
    (folder / "c.txt").symlink_to(folder / "a.jsonl")
    assert changed()


def test_the_checksum_does_not_depend_on_the_folder(find, tmp_path):
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        for name in ("a.txt", "b.md"):
            (folder / name).write_text(name)
    one, two = (find("data=text", f"data.path={tmp_path}/{name}")[0] for name in ("one", "two"))
    assert one.sha256 == two.sha256


def test_checksums_are_cached_until_the_file_is_written(tmp_path):
    file, cache = tmp_path / "a.txt", tmp_path / "data/checksums.json"
    file.write_bytes(b"first")
    assert checksums([file], cache) == [sha256(b"first")]
    kept = json.loads(cache.read_text())
    assert list(kept.values()) == [sha256(b"first")]
    cache.write_text(json.dumps(dict.fromkeys(kept, "remembered")))
    assert checksums([file], cache) == ["remembered"]  # from the cache
    times = file.stat()
    file.write_bytes(b"later")  # same size and time
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert checksums([file], cache) == [sha256(b"later")]
    cache.write_text("damaged")
    assert checksums([file], cache) == [sha256(b"later")]
    assert [path.name for path in cache.parent.iterdir()] == ["checksums.json"]


def test_repeated_and_linked_files_each_get_a_checksum(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.txt").symlink_to(tmp_path / "a.txt")
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt", "a.txt")]
    assert checksums(files, tmp_path / "cache") == [sha256(content) for content in (b"a", b"b", b"a", b"a")]


def test_checksums_work_without_a_writable_cache(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a")
    assert checksums([tmp_path / "a.txt"], tmp_path / "a.txt/cache") == [sha256(b"a")]


# Standard input


@pytest.fixture
def stdin(monkeypatch):
    """Replace the standard input of this process: `stdin(b"a text")`."""
    monkeypatch.setenv("MINIGPT_STDIN_FILE", "")  # removed after the test, whatever was set

    def give(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


def test_standard_input_is_read_once_and_shared_with_child_processes(find, tmp_path, stdin):
    content = "from a pipe: é漢😀\r\n".encode() * 100_000  # several blocks
    stdin(content)
    for _ in range(2):
        source, _ = find("data=text", "data.path=-")
        assert documents(source) == [content.decode()]
        assert (source.name, source.sha256) == ("stdin", sha256(content))
    script = [sys.executable, str(ROOT / "scripts/prepare.py"), "data=text", "data.path=-", f"data.folder={tmp_path}/b"]
    child = subprocess.run(script, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True)
    assert "corpus           stdin" in child.stdout
    (meta,) = (tmp_path / "b/tokens").glob("stdin-*/meta.json")
    assert json.loads(meta.read_text())["sha256"] == sha256(content)
    assert [file.name for file in (tmp_path / "data").iterdir() if file.name != "checksums.json"] == [
        f"stdin-{sha256(content)[:16]}.txt"
    ]


def test_standard_input_with_a_known_checksum_gets_its_name(find, stdin):
    stdin(b"known")
    source, _ = find("data.path=-", "data.name=mine", f"data.sha256={sha256(b'known')}")
    assert source.name == "mine"


def test_standard_input_without_a_text_raises(find, tmp_path, stdin, monkeypatch):
    stdin(b"")
    with pytest.raises(UserError, match=r"^data\.path=- .* is empty;"):
        find("data=text", "data.path=-")
    monkeypatch.setattr(sys, "stdin", None)  # as pythonw has it
    with pytest.raises(UserError, match=r"^data\.path=- "):
        find("data=text", "data.path=-")
    monkeypatch.setattr(sys, "stdin", open(os.openpty()[1]))  # noqa: SIM115
    with pytest.raises(UserError, match=r"^data\.path=- .* is a terminal;"):
        find("data=text", "data.path=-")
    sys.stdin.close()
    stdin(b"binary\0")
    with pytest.raises(UserError, match=r"stdin-.*\.txt is not text"):
        documents(find("data=text", "data.path=-")[0])


@pytest.mark.parametrize("count", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_standard_input_with_several_processes_raises(find, stdin, monkeypatch, count):
    stdin(b"a text")
    monkeypatch.setenv(count, "2")
    with pytest.raises(UserError, match=r"^data\.path=- .* several processes"):
        find("data=text", "data.path=-")
    monkeypatch.setenv(count, "1")
    assert documents(find("data=text", "data.path=-")[0]) == ["a text"]


# Plays


def test_each_play_is_one_document(find):
    source, val = find("data=plays")
    texts = documents(source)
    assert len(texts) == 38
    assert val is None
    assert min(map(len, texts)) > 50_000
    assert len(set(texts)) == 38
    assert any("HAMLET:\nTo be, or not to be" in text for text in texts)
    assert all(text.endswith("\n\n") and "**" not in text for text in texts)
    assert find("data=plays")[0].sha256 == source.sha256


# Data sets of a hub


def test_a_local_data_set_is_read_with_its_validation_split(find, stories):
    source, val = find("data=tinystories", f"data.dataset={stories}")
    assert documents(source) == TRAIN
    assert documents(val) == VAL
    assert source.sha256 != val.sha256
    assert source.name == "tinystories"
    titles, _ = find("data=tinystories", f"data.dataset={stories}", "data.field=title")
    assert documents(titles) == ["a title"] * len(TRAIN)
    assert titles.sha256 != source.sha256
    for other in ("data.subset=other", "data.revision=other"):
        assert find("data=tinystories", f"data.dataset={stories}", other)[0].sha256 != source.sha256


def test_a_data_set_without_a_validation_split_is_one_source(find, stories, tmp_path):
    assert find("data=openwebtext", f"data.dataset={stories}")[1] is None
    (tmp_path / "b.txt").write_text("to validate on")
    _, val = find("data=tinystories", f"data.dataset={stories}", f"data.val_path={tmp_path}/b.txt")
    assert documents(val) == ["to validate on"]


def test_a_local_data_set_is_not_changed_and_its_checksum_is_stable(find, stories):
    before = sorted(stories.rglob("*"))
    first = [source.sha256 for source in find("data=tinystories", f"data.dataset={stories}")]
    assert sorted(stories.rglob("*")) == before
    assert [source.sha256 for source in find("data=tinystories", f"data.dataset={stories}")] == first
    write_stories(stories, "train", [*TRAIN, "one more"])
    changed, _ = find("data=tinystories", f"data.dataset={stories}")
    assert changed.sha256 != first[0]
    assert documents(changed) == [*TRAIN, "one more"]


def test_a_local_data_set_is_tokenized_once(configured, stories):
    data, tokenizer = configured("data=tinystories", f"data.dataset={stories}", "tokenizer=byte")
    corpus = preparation.load_corpus(data, tokenizer)
    decode = corpus.tokenizer.decode
    assert decode(corpus.tokens("train")[:]) == "\n".join(TRAIN)
    assert decode(corpus.tokens("val")[:]) == "\n".join(text for text in VAL if text)
    assert corpus.train.bytes == len("".join(TRAIN).encode())
    (train,), (val,) = corpus.train.shards, corpus.val.shards
    files = {file: file.stat().st_mtime_ns for file in (train.file, val.file)}
    again = preparation.load_corpus(data, tokenizer)
    assert (*again.train.shards, *again.val.shards) == (train, val)
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert again.sha256 == corpus.sha256


def test_a_missing_column_raises_with_the_columns_with_text(find, stories):
    for column in ("story", "id"):
        source, _ = find("data=tinystories", f"data.dataset={stories}", f"data.field={column}")
        with pytest.raises(UserError) as error:
            documents(source)
        assert f"data.dataset={stories}" in str(error.value)
        assert f"column {column};" in str(error.value)
        assert "text are text, title;" in str(error.value)


def test_a_missing_split_raises_with_its_name(find, stories):
    source, _ = find("data=tinystories", f"data.dataset={stories}", "data.train_split=exam")
    with pytest.raises(UserError, match="exam"):
        documents(source)


@pytest.mark.parametrize("damage", ["cut short", "damaged"])
def test_a_damaged_data_set_raises(find, stories, damage):
    file = stories / "data/train-00000-of-00001.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:-200] if damage == "cut short" else content[:10] + bytes(600) + content[610:])
    source, _ = find("data=tinystories", f"data.dataset={stories}")
    with pytest.raises((UserError, RunError), match=str(stories)):
        documents(source)


def test_an_empty_data_set_folder_raises(find, tmp_path):
    (tmp_path / "nothing").mkdir()
    source, _ = find("data=tinystories", f"data.dataset={tmp_path}/nothing")
    with pytest.raises(UserError, match="nothing"):
        documents(source)


def test_an_unreachable_data_set_gives_a_one_line_error(tmp_path):
    """Runs in a child process, so that `datasets` is imported with HF_HUB_OFFLINE set."""
    code = (
        "from minigpt.data import sources; from minigpt.utils.errors import RunError, UserError\n"
        "data = dict(dataset='nobody/nothing', subset=None, revision=None, field='text', name='x')\n"
        "try: next(sources._stream(data, 'train'))\n"
        "except (RunError, UserError) as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT, check=True
    )
    (line,) = done.stdout.splitlines()
    assert "data.dataset=nobody/nothing" in line
    assert done.stderr == ""
