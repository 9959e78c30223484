"""The comparison with the training text, against a search by brute force; the index, the command and the summary."""

import random
import re

import pytest
from pydivsufsort import divsufsort

from minigpt.checkpoints.find import BEST
from minigpt.extras.interpret import originality
from minigpt.extras.interpret.originality import INDEX, NGRAMS, Index, build_index
from minigpt.extras.interpret.run_corpus import find_corpus
from minigpt.extras.playground.history import read_samples


def random_text(seed: int, length: int, alphabet: str) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=length))


@pytest.mark.parametrize("alphabet", ["ab", "abé漢😀"])
def test_every_figure_is_that_of_a_search_in_the_training_text(alphabet):
    training = random_text(0, 1500, alphabet)
    text = random_text(1, 100, alphabet) + training[700:745] + random_text(2, 30, alphabet) + training[40:60]
    index = Index(training.encode(), divsufsort(training.encode()), True)
    found = originality.originality(index, text)
    for n in NGRAMS:
        ngrams = [text[i : i + n] for i in range(len(text) - n + 1)]
        assert found["new"][str(n)] == pytest.approx(sum(ngram not in training for ngram in ngrams) / len(ngrams))
    spans = [(i, j) for i in range(len(text)) for j in range(i + 1, len(text) + 1) if text[i:j] in training]
    assert found["longest"] == max(j - i for i, j in spans) >= 45
    maximal = [(i, j) for i, j in spans if j - i >= 20 and not {(i - 1, j), (i, j + 1)} & {*spans}]
    assert [(span["start"], span["end"]) for span in found["spans"]] == maximal
    for span in found["spans"]:
        copied = text[span["start"] : span["end"]]
        assert span["before"] + copied + span["after"] in training


def test_short_and_new_texts():
    index = Index(b"abc", divsufsort(b"abc"), True)
    assert originality.originality(index, "")["new"] == dict.fromkeys(map(str, NGRAMS))
    found = originality.originality(index, "xyzxyz")
    assert (found["new"]["5"], found["new"]["10"], found["longest"], found["spans"]) == (1, None, 0, [])


def test_the_index_is_built_once_and_again_if_it_does_not_fit(train, tmp_path, monkeypatch):
    corpus = find_corpus(train("max_steps=1").folder / BEST)
    index = build_index(corpus)
    assert index.text.decode() == corpus.tokenizer.decode(corpus.tokens("train")[:].tolist())
    expected = sorted(range(len(index.text)), key=lambda i: index.text[i:])
    assert index.suffixes.tolist() == expected
    (file,) = (tmp_path / "data/tokens").glob(f"*/{INDEX}")
    written = file.stat().st_mtime_ns
    assert build_index(corpus).suffixes.tolist() == expected
    assert file.stat().st_mtime_ns == written
    file.write_bytes(b"damaged")
    assert build_index(corpus).suffixes.tolist() == expected
    monkeypatch.setattr(originality, "MAX_INDEXED", 100)
    for _ in range(2):  # built, and read
        part = build_index(corpus)
        assert (part.text, part.is_whole) == (index.text[:100], False)


def test_a_run_reports_how_much_it_copies(train, capsys):
    run = train("originality=500", "callbacks.samples.max_new_tokens=20", "model.vocab_size=512")
    assert "\ufffd" not in (run.folder / "samples.txt").read_text(encoding="utf-8")  # ids that are no characters
    summary = run.summary["originality"]
    assert list(summary) == ["final_sample", "generated_text", "validation_text"]
    assert 0 <= summary["generated_text"]["new"]["5"] <= summary["generated_text"]["new"]["10"] <= 1
    assert f"longest copy     {summary['generated_text']['longest']} characters" in capsys.readouterr().out
    assert [step for step, sample in read_samples(run.folder) if "originality" not in sample] == [10, 20]
    assert train("max_steps=1", folder=run.folder.with_name("none")).summary["originality"] is None


def test_the_command_underlines_copies_and_does_without_the_corpus(train, call, tmp_path):
    options = (str(train("max_steps=150", "eval_every=150", "optimizer.lr=1e-2").folder), "--max-new-tokens", "200")
    options += ("--temperature", "0")
    call("sample.py", *options)  # its output has that of the training
    plain, compared = call("sample.py", *options), call("sample.py", *options, "--originality")
    assert plain.stdout.strip() in re.sub(r"\x1b\[2?4m", "", compared.stdout)
    (meta,) = (tmp_path / "data/tokens").glob("*/meta.json")
    training = (meta.parent / INDEX).read_bytes()
    copies = re.findall(r"\x1b\[4m(.*?)\x1b\[24m", compared.stdout, re.DOTALL)
    assert copies
    assert all(copy.encode() in training for copy in copies)
    assert "new n-grams of characters" in compared.stderr
    (tmp_path / "data").rename(tmp_path / "moved")
    originality._load.cache_clear()  # as in a new process
    without = call("sample.py", *options, "--originality")
    assert (without.returncode, without.stdout) == (0, plain.stdout)
    assert "--originality is ignored" in without.stderr


def test_a_folder_of_hugging_face_has_no_text_to_compare_with(call, gpt2_folder):
    result = call("sample.py", str(gpt2_folder), "--originality", "--device", "cpu", "--max-new-tokens", "3")
    assert result.returncode == 0
    ignored = f"--originality is ignored: {gpt2_folder} is no run of minigpt, whose text is known\n"
    assert ignored in result.stderr
