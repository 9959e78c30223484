"""The search for tiny shakespeare, and the stand-in without a network."""

import os
import re

import pytest
from corpora import corpus_of, documents, serving, sha256, texts_on_disk, values, write_files
from refusals import refused

from minigpt.data import sources

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
    """Put something of the user at a path; return a function that reads it."""
    if kind == "folder":
        path.mkdir()
        (path / "notes.md").write_text("of the user")
        return lambda: (path / "notes.md").read_text(encoding="utf-8")
    if kind == "broken link":
        path.symlink_to("unmounted/disk.txt")
        return lambda: os.readlink(path)
    path.write_text('{"little.txt": "of the user"}')
    return path.read_text


@pytest.mark.parametrize("kind", ["edited text", "folder", "broken link"])
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
    pattern = f"^{folder / copy} must be free, or have the checksum of its name;"
    refused(pattern, sources.find_text, server.settings)
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
