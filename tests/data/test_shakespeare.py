"""The search for tiny shakespeare, and the stand-in without a network."""

import re
import stat

import pytest
from corpora import SHAKESPEARE, corpus_of, documents, needs_shakespeare, serving, sha256, texts_on_disk, values

from minigpt.data import sources

LITTLE = b"a little text\nin two lines\n"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of LITTLE, without MINIGPT_DATA_DIR, proxies and waits between the attempts of a download."""
    monkeypatch.delenv("MINIGPT_DATA_DIR", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    (tmp_path / "server").mkdir()
    (tmp_path / "server/little.txt").write_bytes(LITTLE)
    with serving(tmp_path / "server") as server:
        yield server


def little(server):
    """Return the settings of the corpus "little", whose text is LITTLE."""
    return {"name": "little", "url": f"{server.url}/little.txt", "sha256": sha256(LITTLE), "characters": 1000}


def find(folder, server):
    return sources.find_text(little(server) | {"folder": folder})


def warnings(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


# The search.


def test_the_text_is_searched_in_folder_then_shared_folder_then_url(tmp_path, monkeypatch, server, capsys):
    folder, shared = tmp_path / "data", tmp_path / "shared"
    monkeypatch.setenv("MINIGPT_DATA_DIR", str(shared))
    for file in (folder / "little.txt", shared / "little.txt"):
        file.parent.mkdir()
        file.write_bytes(LITTLE)
    assert find(folder, server) == folder / "little.txt"
    (folder / "little.txt").unlink()
    assert find(folder, server) == shared / "little.txt"
    (shared / "little.txt").unlink()
    assert server.requests == 0
    server.faults += [503]  # the download is retried
    for _ in range(2):  # then from the folder
        assert find(folder, server).read_bytes() == LITTLE
    (folder / "new").touch()
    assert stat.S_IMODE((folder / "little.txt").stat().st_mode) == stat.S_IMODE((folder / "new").stat().st_mode)
    assert server.requests == 2
    assert warnings(capsys) == []


def test_a_copy_with_a_wrong_checksum_is_skipped_with_one_warning(tmp_path, monkeypatch, server, capsys):
    monkeypatch.setenv("MINIGPT_DATA_DIR", str(tmp_path))
    (tmp_path / "little.txt").write_bytes(LITTLE.upper())
    assert find(tmp_path / "data", server).read_bytes() == LITTLE
    (warning,) = warnings(capsys)
    assert str(tmp_path / "little.txt") in warning


def test_a_download_that_keeps_failing_is_replaced_by_the_stand_in(tmp_path, server, capsys, plays):
    server.faults += [404, "cut", LITTLE.upper()]
    corpus = corpus_of(None, tmp_path, source="download", **little(server))
    assert server.requests == 3
    assert [path.name for path in tmp_path.glob("*.txt")] == ["little-stand-in.txt"]
    (warning,) = warnings(capsys)
    assert "little" in warning
    assert "stand-in" in warning
    text = plays[:1000]
    assert corpus.sha256 == sha256(text.encode())
    assert "".join(texts_on_disk(corpus)) == text
    assert corpus.name == "little-stand-in"  # its losses are not little's


# The stand-in.


@pytest.fixture(scope="module")
def plays():
    """All 38 plays, as a corpus has them."""
    texts = documents(sources.find_sources(values(**values("plays")))[0].read())
    assert len(set(texts)) == 38
    assert min(map(len, texts)) > 50_000
    return "".join(texts)


@needs_shakespeare
def test_the_stand_in_keeps_the_lines_that_it_shares_with_tiny_shakespeare(plays):
    spoken = [line for line in SHAKESPEARE.read_text().splitlines() if line and not line.endswith(":")]
    known = set(plays.splitlines())
    assert sum(line in known for line in spoken) / len(spoken) > 0.99


def test_speeches_continue_after_a_stage_direction_which_is_removed_like_headings(plays):
    assert "Get thee to bed.\nIs this a dagger which I see before me," in plays  # Macbeth, between: _Exit Servant_
    assert "Call Philostrate.\n\nPHILOSTRATE:\nHere, mighty Theseus.\n\n" in plays  # another speaker, another speech
    assert "I think I hear them. Stand, ho! Who's there?\n\nHORATIO:\nFriends to this ground.\n" in plays
    assert not re.search(r"^(Exeunt|Exit|Re-enter|SCENE|ACT)\b", plays, flags=re.MULTILINE)
    assert "lists. A pavilion by the side of it" not in plays  # the second paragraph of a heading in Pericles
    assert "A lively flourish of Trumpets" not in plays  # a numbered list in Henry VIII
    assert "dispersedly" not in plays  # in The Tempest, in a bracket that is never closed
