"""A run resumes on the text that it began with, or on its token files."""

import shutil

import pytest
from corpora import corpus_of, folder_of
from refusals import refused
from test_resume import OFTEN, check_same_end

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read, write
from minigpt.runs.run_dir import read_summary


def test_a_run_whose_documents_were_cut_elsewhere_by_an_earlier_version_is_not_resumed(
    train, tmp_path, text
):
    (tmp_path / "texts").mkdir()
    for name, size in (("a_intro.txt", 400), ("b_book.txt", 9000)):
        (tmp_path / "texts" / name).write_bytes(text.read_bytes()[:size])
    texts = f"data.path={tmp_path}/texts"
    last = train(texts, "max_steps=1").folder / LAST
    train(texts, "max_steps=2", "resume=auto")
    content = read(last)
    del content["minigpt"]["corpus_provenance"]["cut"]  # the earlier version cut at 400
    write(content, last)
    was = (
        r"cut between the splits \(at the start of a document in the checkpoint, within a document"
    )
    refused(was, train, texts, "max_steps=3", "resume=auto")


@pytest.fixture
def textless(train, trained, text, tmp_path):
    """Return the settings that resume a run that paused, whose text is gone."""
    same = [f"data.path={tmp_path}/mine.txt", *OFTEN]
    shutil.copy(text, tmp_path / "mine.txt")
    train(*same, "pause_at=7")
    (tmp_path / "mine.txt").unlink()
    return [*same, "resume=auto"]


def test_a_run_resumes_without_its_text_on_its_token_files_also_given_as_files(
    train, trained, textless, tmp_path, capsys
):
    (meta,) = tmp_path.glob("data/tokens/*/meta.json")
    bins = [f"data.{split}_bin={meta.parent}/{split}.bin" for split in ("train", "val")]
    as_files = shutil.copytree(tmp_path / "run", tmp_path / "files")
    train(*textless[1:], *bins, folder=as_files)
    check_same_end(trained(*OFTEN), as_files)
    capsys.readouterr()
    resumed = train(*textless)
    assert "mine.txt does not exist: resuming on the token files in " in capsys.readouterr().err
    check_same_end(trained(*OFTEN), resumed.folder)
    whole = read_summary(trained(*OFTEN))
    for name in ("corpus_sha256", "validated", "tokenizer"):
        assert resumed.summary[name] == whole[name]
    more = ["max_steps=21", f"resume={resumed.folder}"]
    further = train(*textless[:-1], *more, folder=tmp_path / "further")
    assert further.summary["corpus_sha256"] == whole["corpus_sha256"]


def test_only_the_token_files_of_the_run_replace_its_text(train, textless, tmp_path):
    for change in ("tokenizer=byte", "data.val_fraction=0.2", "data.path=typo.txt"):
        missing = "typo.txt" if "typo" in change else "mine.txt"
        pattern = rf"data\.path=.*{missing} does not exist; .*other settings select the text"
        refused(pattern, train, *textless, change)
    pattern = r"mine\.txt does not exist; give a file, .* such as '\S*', or a list \[a.txt,b.txt\]$"
    refused(pattern, train, *textless, folder=tmp_path / "new")
    (meta,) = tmp_path.glob("data/tokens/*/meta.json")
    meta.write_bytes(meta.read_bytes().replace(b'"val_fraction": 0.1', b'"val_fraction": 0.11'))
    pattern = r"does not exist; .*; or restore its token files: .* has none of the run"
    refused(pattern, train, *textless)


def test_token_files_of_another_split_are_refused_whatever_the_settings_are(
    train, trained, text, tmp_path
):
    folder = folder_of(corpus_of(text, tmp_path, val_fraction=0.2))
    bins = [f"data.{split}_bin={folder}/{split}.bin" for split in ("train", "val")]
    pattern = r"data\.val_fraction \(0\.1 in the checkpoint, 0\.2 now\)"
    refused(pattern, train, *bins, "max_steps=21", f"resume={trained()}")
