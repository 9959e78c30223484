"""The comparison of samples with the training text: its figures, its index, and runs."""

import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from corpora import corpus_of, folder_of, prepare, rows, stories
from pydivsufsort import divsufsort
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minigpt.checkpoints.find import BEST
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.extras.huggingface.tokenizer_json import HuggingFaceTokenizer
from minigpt.extras.interpret import originality, originality_callback
from minigpt.extras.interpret.originality import (
    BORDER,
    INDEX,
    NGRAMS,
    Index,
    build_index,
    validation_texts,
)
from minigpt.extras.playground.history import read_samples
from minigpt.sampling.generation import stream
from minigpt.utils.errors import UserError

BPE = {"name": "bpe", "vocab_size": 300}


def random_text(seed: int, length: int, alphabet: str) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=length))


def index_of(*documents: str) -> Index:
    text = BORDER.join(document.encode() for document in documents)
    return Index(text, divsufsort(text), True)


def expected_figures(texts: list[str], documents: list[str]) -> dict[str, object]:
    """The shares of n-grams that no document has, and the longest match, by brute force."""
    new = {}
    for n in NGRAMS:
        ngrams = [text[i : i + n] for text in texts for i in range(len(text) - n + 1)]
        lacking = [is_new(ngram, documents) for ngram in ngrams]
        new[str(n)] = pytest.approx(sum(lacking) / len(ngrams)) if ngrams else None
    found = [match for text in texts for match in matches(text, documents)]
    return {"new": new, "longest": max((j - i for i, j in found), default=0)}


def is_new(text: str, documents: list[str]) -> bool:
    return all(text not in document for document in documents)


def matches(text: str, documents: list[str]) -> list[tuple[int, int]]:
    found = []
    for i in range(len(text)):
        for j in range(i + 1, len(text) + 1):
            if is_new(text[i:j], documents):
                break
            found.append((i, j))
    return found


@pytest.fixture
def count_builds(monkeypatch):
    """Return a list that grows by one with every index that is built."""
    built = []

    def sort(text):
        built.append(len(text))
        return divsufsort(text)

    monkeypatch.setattr(originality, "divsufsort", sort)
    return built


@pytest.mark.parametrize("alphabet", ["ab", "abé漢😀"])
def test_every_figure_is_that_of_a_search_in_every_training_document(alphabet):
    documents = [random_text(seed, 500, alphabet) for seed in range(3)]
    first, second, third = documents
    new = random_text(4, 60, alphabet)
    text = new + second[200:245] + new[:30] + third[40:60]
    texts = [text, first[-30:] + second[:30], first[100:137], "", "b"]
    found = originality.originality(index_of(*documents), *texts)
    assert {"new": found["new"], "longest": found["longest"]} == expected_figures(texts, documents)
    assert found["longest"] >= 45
    maximal = []
    for sample, text in enumerate(texts):
        spans = matches(text, documents)
        longest = [
            (i, j) for i, j in spans if j - i >= 20 and not {(i - 1, j), (i, j + 1)} & {*spans}
        ]
        maximal += [(sample, i, j) for i, j in longest]
    assert [(span["sample"], span["start"], span["end"]) for span in found["spans"]] == maximal
    assert (1, 0, 60) not in maximal
    for span in found["spans"]:
        around = span["before"] + texts[span["sample"]][span["start"] : span["end"]] + span["after"]
        assert any(around in document for document in documents)


def test_nothing_is_new_in_samples_that_are_copied():
    training = random_text(0, 5000, "abcdefgh")
    for length in (400, 40):
        copies = [training[at : at + length] for at in range(0, 4000, 83)]
        found = originality.originality(index_of(training), *copies)
        assert (found["new"], found["longest"]) == (dict.fromkeys(map(str, NGRAMS), 0), length)


def test_a_text_whose_only_match_spans_two_documents_is_new():
    found = originality.originality(
        index_of("x" * 30 + "0123456789", "abcdefghij" + "y" * 30), "23456789abcdefgh"
    )
    assert (found["new"]["10"], found["longest"], found["spans"]) == (1, 8, [])


def test_a_character_that_a_sample_lacks_the_end_of_is_not_counted():
    index = index_of("привет, мир, и снова привет всем")
    found = originality.originality(index, "привет, мир".encode()[:-1].decode(errors="replace"))
    assert (found["new"]["5"], found["longest"]) == (0, 10)


def test_the_text_after_a_span_begins_with_a_whole_character():
    index = index_of("и снова привет всем, я")
    text = "и снова привет всем, щ"  # its last character begins with the byte of я
    (span,) = originality.originality(index, text)["spans"]
    assert (span["end"], span["after"]) == (21, "я")


def test_short_and_new_texts():
    index = index_of("abc")
    assert originality.originality(index, "")["new"] == dict.fromkeys(map(str, NGRAMS))
    found = originality.originality(index, "xyzxyz")
    assert (found["new"]["5"], found["new"]["10"]) == (1, None)
    assert (found["longest"], found["spans"]) == (0, [])


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
    content = file.read_bytes()
    for damaged in (b"damaged", content[:64], content[:-5], content[:-64], content + b"12345"):
        file.write_bytes(damaged)
        assert build_index(corpus).suffixes.tolist() == expected
        assert file.read_bytes() == content
    monkeypatch.setattr(originality, "MAX_INDEXED", 100)
    for _ in range(2):  # built, and read
        part = build_index(corpus)
        assert (part.text, part.is_whole) == (index.text[:100], False)


@pytest.mark.parametrize("tokenizer", ["char", "byte", BPE], ids=str)
def test_the_documents_of_token_files_are_apart_and_their_index_is_recognized(
    tmp_path, tokenizer, count_builds
):
    texts = [f"{text}\n{text[::-1]}" for text in stories(60)]
    corpus = prepare(
        rows(texts), tmp_path, tokenizer, name="a.jsonl", split="fraction", val_fraction=0.3
    )
    n = corpus.train.documents
    assert n > 30
    index = build_index(corpus)
    assert index.text.split(BORDER) == [text.encode() for text in texts[:n]]
    assert validation_texts(corpus, 10**6) == texts[n:]
    assert (
        "".join(validation_texts(corpus, 500))
        == "".join(texts[n:])[: 500 - len(validation_texts(corpus, 500)) + 1]
    )
    for between in ("", "\n"):
        both = texts[0][-15:] + between + texts[1][:15]
        assert originality.originality(index, both)["longest"] < len(both)
    again = build_index(corpus)
    assert (again.text, again.suffixes.tolist(), again.is_whole) == (
        index.text,
        index.suffixes.tolist(),
        True,
    )
    assert len(count_builds) == 1
    (folder_of(corpus) / "train.starts").unlink(missing_ok=True)
    (folder_of(corpus) / INDEX).unlink()
    if tokenizer == BPE:
        assert build_index(corpus).text == index.text
    else:  # of an earlier version
        with pytest.raises(
            UserError,
            match=f"{folder_of(corpus)}/train.starts is missing or damaged; remove {tmp_path}",
        ):
            build_index(corpus)


def test_documents_that_a_tokenizer_does_not_separate_are_not_compared(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = HuggingFaceTokenizer(backend.to_str()).to_dict()
    corpus = prepare(rows(stories(40)), tmp_path, tokenizer, name="a.jsonl")
    with pytest.raises(UserError, match="the tokenizer separates no documents"):
        build_index(corpus)


def test_a_kept_index_of_another_text_or_of_an_earlier_version_is_not_taken(tmp_path, count_builds):
    lines = rows(stories(40))
    corpora = [
        prepare(lines.replace("fox", word), tmp_path, BPE, name=f"{word}.jsonl")
        for word in ("fox", "cat")
    ]
    first, second = map(build_index, corpora)
    files = [folder_of(corpus) / INDEX for corpus in corpora]
    assert len(first.text) == len(second.text)
    files[1].write_bytes(files[0].read_bytes())
    assert build_index(corpora[1]).text == second.text
    joined = first.text.replace(BORDER, b"")
    files[0].write_bytes(joined + divsufsort(joined).tobytes())
    assert build_index(corpora[0]).text == first.text
    assert len(count_builds) == 4
    assert [build_index(corpus).text for corpus in corpora] == [first.text, second.text]
    assert len(count_builds) == 4


def test_token_files_of_another_tool_are_compared_and_nothing_is_written_beside_them(tmp_path):
    texts = stories(30)
    files = {"train_bin": tmp_path / "theirs/train.bin", "val_bin": tmp_path / "theirs/val.bin"}
    files["train_bin"].parent.mkdir()
    tokenizer = prepare(rows(texts), tmp_path, BPE, name="a.jsonl").tokenizer
    for file, part in zip(files.values(), (texts[:20], texts[20:]), strict=True):
        ids = [np.append(tokenizer.encode(text), tokenizer.separator) for text in part]
        np.concatenate(ids).astype(np.uint16).tofile(file)
    (tmp_path / "theirs/meta.json").write_text('{"vocab_size": 300}')
    corpus = corpus_of(
        None, tmp_path, tokenizer.to_dict(), **{key: str(file) for key, file in files.items()}
    )
    assert corpus.train.bytes == 0
    assert build_index(corpus).text.split(BORDER) == [*(text.encode() for text in texts[:20]), b""]
    assert validation_texts(corpus, 10**6) == [*texts[20:], ""]
    assert {path.name for path in (tmp_path / "theirs").iterdir()} == {
        "train.bin",
        "val.bin",
        "meta.json",
    }


def test_several_who_need_an_index_wait_for_one(tmp_path, monkeypatch, count_builds):
    corpus = prepare(rows(stories(30)), tmp_path, BPE, name="a.jsonl")
    all_lack_it = threading.Barrier(4)
    read = originality._read
    looked = threading.local()

    def look(*args):
        found = read(*args)
        if not hasattr(looked, "once"):
            looked.once = all_lack_it.wait(30)
        return found

    monkeypatch.setattr(originality, "_read", look)
    with ThreadPoolExecutor(4) as pool:  # each has a lock of its own, as processes have
        indexes = [*pool.map(build_index, [corpus] * 4)]
    assert len({index.text for index in indexes}) == 1
    assert len(count_builds) == 1


def test_the_command_underlines_copies_and_does_without_the_corpus(train, call, tmp_path):
    run = train("max_steps=150", "eval_every=150", "optimizer.lr=1e-2").folder
    documents = build_index(find_corpus(run / BEST)).text.decode().split("\ufffd")
    capped = ["--num-samples", "4", "--max-new-tokens", "90", "--temperature", "0.3"]
    plain = call("sample.py", str(run), *capped).stdout
    plain = plain[plain.index("── sample 1") :]  # without the output of the training
    compared = call("sample.py", str(run), *capped, "--originality")
    output = re.sub(r"\x1b\[2?4m", "", compared.stdout)
    assert output == plain
    copies = re.findall(r"\x1b\[4m(.*?)\x1b\[24m", compared.stdout, re.DOTALL)
    assert copies
    assert all(copy in documents[0] for copy in copies)
    # The samples are compared one by one
    samples = re.split(r"(?:^|\n)── sample \d ──\n", output.removesuffix("\n"))[1:]
    assert [len(sample) for sample in samples] == [90] * 4
    expected = expected_figures(samples, documents)
    (line,) = re.findall(r"^samples +(.*)$", compared.stderr, re.MULTILINE)
    *shares, longest = line.split()
    new = [share.expected for share in expected["new"].values()]
    assert [float(share.rstrip("%")) / 100 for share in shares] == pytest.approx(new, abs=0.00051)
    assert int(longest) == expected["longest"]
    # Without the corpus
    (tmp_path / "data").rename(tmp_path / "moved")
    originality._load.cache_clear()  # as in a new process
    without = call("sample.py", str(run), *capped, "--originality")
    assert (without.returncode, without.stdout) == (0, plain)
    assert "--originality is ignored" in without.stderr


def test_a_folder_of_hugging_face_has_no_text_to_compare_with(call, gpt2_folder):
    result = call(
        "sample.py", str(gpt2_folder), "--originality", "--device", "cpu", "--max-new-tokens", "3"
    )
    assert result.returncode == 0
    ignored = f"--originality is ignored: {gpt2_folder} is no run of minigpt, whose text is known\n"
    assert ignored in result.stderr


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


@pytest.mark.parametrize(
    "tokenizer",
    ["byte", pytest.param("bpe tokenizer.vocab_size=300", marks=pytest.mark.slow)],
)
def test_a_run_draws_so_many_characters_of_any_alphabet(train, tmp_path, compared, tokenizer):
    # Also of documents that are shorter than a sample
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
    # Asked by the earlier name of the setting, with ids that are no characters
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
