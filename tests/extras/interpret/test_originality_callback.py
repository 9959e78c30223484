"""The text that a run draws at its end, to report how much of it is copied."""

import numpy as np
import pytest
from corpora import rows, stories

from minigpt.extras.interpret import originality, originality_callback
from minigpt.extras.playground.history import read_samples
from minigpt.sampling.generation import stream

SHORT = ["max_steps=1", "eval_every=1", "callbacks.snapshots=null"]


@pytest.fixture
def compared(monkeypatch):
    """Return a list that grows by the texts of every comparison."""
    texts = []
    compare = originality.originality

    def compare_and_note(index, *parts):
        texts.append(parts)
        return compare(index, *parts)

    monkeypatch.setattr(originality, "originality", compare_and_note)
    return texts


@pytest.mark.parametrize("tokenizer", ["byte", "bpe tokenizer.vocab_size=300"], ids=str)
def test_a_run_draws_so_many_characters_of_any_alphabet(train, tmp_path, compared, tokenizer):
    """Also of documents that are shorter than a sample."""
    letters = str.maketrans("abcdefghijklmnopqrstuvwxyz", "абцдефгхийклмнопярстувшчыз")
    texts = rows([text.translate(letters) for text in stories(80)])
    (tmp_path / "cyrillic.jsonl").write_text(texts, encoding="utf-8")
    line = [f"data.path={tmp_path}/cyrillic.jsonl", "data.val_fraction=0.5", *SHORT]
    drawn = "callbacks.originality.characters=900"
    train(*line, drawn, *f"tokenizer={tokenizer}".split(), "data.eval_batch_size=1")
    _, generated, validation = compared
    assert sum(map(len, generated)) == 900
    assert sum(map(len, validation)) + len(validation) - 1 == 900  # with what separates documents
    assert len(validation) > 5


def test_a_run_on_token_files_of_another_tool_draws_few_samples_at_once(
    train, tmp_path, compared, monkeypatch, capsys
):
    text = "".join(stories(100)).encode()
    for name, part in (("train", text[:3000]), ("val", text[3000:4000])):
        np.frombuffer(part, np.uint8).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    files = [f"data.{name}_bin={tmp_path}/{name}.bin" for name in ("train", "val")]
    line = ["data.path=null", "tokenizer=byte", *files, *SHORT]
    line.append("callbacks.originality.characters=1000")
    widths = []

    def watch(*args, **settings):
        widths.append(settings.get("num_samples", 1))
        return stream(*args, **settings)

    monkeypatch.setattr("minigpt.runs.callbacks.samples.stream", watch)
    monkeypatch.setattr(originality_callback, "DRAWN_TOKENS", 10)
    train(*line, folder=tmp_path / "a")
    assert widths[:3] == [1, 50, 50]  # the first is the final sample
    assert sum(map(len, compared[1])) == 1000
    monkeypatch.setattr(originality_callback, "MAX_INDEXED_BYTES", 2999)
    assert train(*line, folder=tmp_path / "b").summary["originality"] is None
    unknown = "the originality of the text is not known: the training text has more than 20 MB"
    assert unknown in capsys.readouterr().err


def test_a_run_reports_how_much_it_copies(train, capsys):
    """Asked by the earlier name of the setting, with ids that are no characters."""
    line = ["max_steps=10", "callbacks.samples.max_new_tokens=20", "model.vocab_size=512"]
    run = train("originality=500", *line)
    assert "\ufffd" not in (run.folder / "samples.txt").read_text(encoding="utf-8")
    summary = run.summary["originality"]
    assert list(summary) == ["final_sample", "generated_text", "validation_text"]
    new = summary["generated_text"]["new"]
    assert 0 <= new["5"] <= new["10"] <= 1
    longest = f"longest copy     {summary['generated_text']['longest']} characters"
    assert longest in capsys.readouterr().out
    samples = dict(read_samples(run.folder))
    assert list(samples) == [10]
    assert "originality" not in samples[10]
    none = train("originality=null", *line, folder=run.folder.with_name("none"))
    assert none.summary["originality"] is None
