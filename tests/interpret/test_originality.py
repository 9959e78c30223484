"""The comparison with the training text, against a search by brute force; the index, the command and the summary."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydivsufsort import divsufsort
from small_runs import composed

from minigpt.data.prepare import load_corpus
from minigpt.interpret import originality
from minigpt.interpret.originality import INDEX, NGRAMS, Index, build_index
from minigpt.runs.run_dir import SAMPLES, read_samples


def random_text(seed: int, length: int, alphabet: str) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=length))


@pytest.mark.parametrize("alphabet", ["ab", "abé漢😀"])
def test_every_figure_is_that_of_a_search_in_the_training_text(alphabet: str) -> None:
    training = random_text(0, 3000, alphabet)
    text = random_text(1, 200, alphabet) + training[700:745] + random_text(2, 60, alphabet) + training[40:60]
    index = Index(training.encode(), divsufsort(training.encode()), True)
    found = originality.originality(index, text)
    for n in NGRAMS:
        ngrams = [text[i : i + n] for i in range(len(text) - n + 1)]
        assert found["new"][n] == pytest.approx(sum(ngram not in training for ngram in ngrams) / len(ngrams))
    ends = [max(k for k in range(i + 2) if text[i + 1 - k : i + 1] in training) for i in range(len(text))]
    assert found["longest"] == max(ends) >= 45
    maximal = [
        (i, j)
        for i in range(len(text))
        for j in range(i + 20, len(text) + 1)
        if text[i:j] in training
        and (i == 0 or text[i - 1 : j] not in training)
        and (j == len(text) or text[i : j + 1] not in training)
    ]
    assert [(span["start"], span["end"]) for span in found["spans"]] == maximal
    for span in found["spans"]:
        copied = text[span["start"] : span["end"]]
        assert span["before"] + copied + span["after"] in training


def test_short_and_new_texts() -> None:
    index = Index(b"abc", divsufsort(b"abc"), True)
    assert originality.originality(index, "")["new"] == dict.fromkeys(NGRAMS)
    found = originality.originality(index, "xyzxyz")
    assert (found["new"][5], found["new"][10], found["longest"], found["spans"]) == (1, None, 0, [])


def test_the_index_is_built_once_and_again_if_it_does_not_fit(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = composed(*small)
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    index = build_index(corpus)
    assert index.text.decode() == corpus.tokenizer.decode(corpus.tokens("train")[:].tolist())
    assert index.suffixes.tolist() == sorted(range(len(index.text)), key=lambda i: index.text[i:])
    (file,) = (tmp_path / "data/tokens").glob(f"*/{INDEX}")
    written = file.stat().st_mtime_ns
    assert build_index(corpus).suffixes.tolist() == index.suffixes.tolist()
    assert file.stat().st_mtime_ns == written
    file.write_bytes(b"damaged")
    assert build_index(corpus).suffixes.tolist() == index.suffixes.tolist()
    monkeypatch.setattr(originality, "MAX_INDEXED", 100)
    part = build_index(corpus)
    assert (part.text, part.is_whole) == (index.text[:100], False)


def test_a_run_reports_how_much_it_copies(
    train: Callable[..., SimpleNamespace], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("originality=500")
    summary = json.loads((run.folder / "summary.json").read_text())["originality"]
    assert list(summary) == ["final_sample", "generated_text", "validation_text"]
    assert 0 <= summary["generated_text"]["new"]["5"] <= summary["generated_text"]["new"]["10"] <= 1
    assert f"longest copy     {summary['generated_text']['longest']} characters" in capsys.readouterr().out
    text = (run.folder / SAMPLES).read_text(encoding="utf-8")
    assert text.count("── originality ──") == 1
    assert [step for step, _ in read_samples(run.folder)] == [10, 20]
    assert all("originality" not in sample for _, sample in read_samples(run.folder))
    assert train("max_steps=1", folder=run.folder.with_name("none")).summary["originality"] is None


def test_the_command_underlines_copies_and_does_without_the_corpus(
    train: Callable[..., SimpleNamespace],
    call: Callable[..., SimpleNamespace],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = train("originality=100", "max_steps=200", "eval_every=200", "optimizer.lr=1e-2").folder
    capfd.readouterr()
    options = (str(folder), "--max-new-tokens", "300", "--num-samples", "2", "--temperature", "0")
    plain, compared = call("sample.py", *options), call("sample.py", *options, "--originality")
    texts = [part.partition(" ──\n")[2] for part in plain.stdout.split("── sample ")[1:]]
    shown = compared.stdout.replace("\x1b[4m", "").replace("\x1b[24m", "")
    assert all(text.strip() in shown for text in texts)
    (meta,) = (tmp_path / "data/tokens").glob("*/meta.json")
    training = (meta.parent / INDEX).read_bytes()
    for part in compared.stdout.split("\x1b[4m")[1:]:
        assert part.partition("\x1b[24m")[0].encode() in training
    assert "\x1b[4m" in compared.stdout
    assert "new n-grams of characters" in compared.stderr
    refused = call("sample.py", str(folder), "--originality", "--json")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    (tmp_path / "data").rename(tmp_path / "moved")
    originality._load.cache_clear()  # as in a new process
    without = call("sample.py", *options, "--originality")
    assert (without.returncode, without.stdout) == (0, plain.stdout)
    assert "--originality is ignored" in without.stderr
