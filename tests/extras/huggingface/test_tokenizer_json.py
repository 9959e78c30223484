"""tokenizer.json, against the packages tokenizers, transformers and tiktoken."""

import json
import random
import sys
from functools import cache
from pathlib import Path

import pytest
import rustbpe
import tiktoken
import tokenizers
from corpora import ROOT, on_disk, prepare, random_texts, rows
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minigpt.data import readers
from minigpt.data.tokenizer import (
    PATTERNS,
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    encode_prompt,
    from_dict,
)
from minigpt.extras.huggingface.tokenizer_json import (
    HuggingFaceTokenizer,
    load_tokenizer,
    tokenizer_files,
)
from minigpt.utils.errors import UserError

TEXT_ALONE = {"add_special_tokens": False, "truncation": False, "padding": False}


def texts(count, seed=0):
    return [text.replace("\ud800", "") for text in random_texts(count, seed)]


@cache
def corpus():
    code = [file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("minigpt/model/*.py"))]
    # No special token becomes a token of its text
    return code + [text for text in texts(1000) if "<" not in text]


@cache
def samples():
    return ["", *texts(200, seed=1), *corpus()[:2], " a , b . it 's\n"]


# A tokenizer, and tiktoken's encoding: of cl100k_base and o200k_base with few tokens
@cache
def encoding_of(name):
    if name == "gpt2":
        try:
            known = BPETokenizer.from_tiktoken(name, Path())
        except UserError:
            pytest.skip("gpt2 is not in the cache of tiktoken")
        return from_dict(known.to_dict()), tiktoken.get_encoding(name)
    if name in ("cl100k_base", "o200k_base"):
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(corpus()), vocab_size=3000, pattern=PATTERNS[name])
        ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
        special = {SEPARATOR: 3005, "<|endofprompt|>": 3024}
        options = {"mergeable_ranks": ranks, "special_tokens": special}
        encoding = tiktoken.Encoding(name, pat_str=PATTERNS[name], **options)
        ours = BPETokenizer(name, sorted(ranks, key=ranks.__getitem__), special)
        return from_dict(ours.to_dict()), encoding
    if name == "char":
        return CharTokenizer("".join(sorted(set("".join(samples()))))), None
    return ByteTokenizer() if name == "byte" else BPETokenizer.train(corpus(), 3000), None


def theirs(tokenizer):
    loaded = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_files(tokenizer)["tokenizer.json"]))
    loaded.encode_special_tokens = True
    return loaded


def test_a_piece_that_is_a_token_is_one_id_even_if_no_merges_lead_to_it():
    tokens = [bytes([byte]) for byte in range(256)] + [b"abcd"]
    tokenizer = BPETokenizer("bpe", tokens, {SEPARATOR: 257})
    for text, ids in (("abcd", [256]), ("abcde", list(b"abcde"))):
        assert theirs(tokenizer).encode(text).ids == tokenizer.encode(text).tolist() == ids


@pytest.mark.parametrize("name", ["char", "byte", "bpe", "gpt2", "cl100k_base", "o200k_base"])
def test_a_written_tokenizer_has_equal_ids_and_texts_here_and_in_transformers(tmp_path, name):
    ours, encoding = encoding_of(name)
    again = load_tokenizer(save(ours, tmp_path))
    rng = random.Random(0)
    is_bpe = isinstance(ours, BPETokenizer)
    assert (again.vocab_size, again.token_bytes) == (ours.vocab_size, dict(ours.token_bytes))
    ends = ours.separator.tolist()
    assert again.separator.tolist() == (ends if is_bpe else [])
    if encoding:
        assert (encoding.n_vocab, [encoding.eot_token]) == (ours.vocab_size, ends)
    types = ({}, {"model_type": "gpt2"}, {"model_type": "llama"})
    for model in types if name == "bpe" else (None,):
        loaded = AutoTokenizer.from_pretrained(save(ours, tmp_path, model))
        assert (loaded.is_fast, loaded.eos_token) == (True, SEPARATOR if is_bpe else None)
        for text in samples():
            ids = ours.encode(text).tolist()
            assert again.encode(text).tolist() == loaded(text)["input_ids"] == ids
            assert encoding is None or encoding.encode_ordinary(text) == ids
            assert loaded.decode(ids) == ours.decode(ids) == text
            drawn = rng.choices(ids, k=5) if ids else []  # not always UTF-8
            assert loaded.decode(drawn) == ours.decode(drawn)
            ended = [*ids, *ends]
            assert loaded.decode(ended, skip_special_tokens=True) == ours.decode(ended)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
def test_every_character_is_split_as_by_tiktoken(name):
    ours, encoding = encoding_of(name)
    written = theirs(ours)
    for first in range(0, 0x110000, 0x1000):
        # Ideographs, syllables, private use
        step = 16 if 0x4000 <= first < 0xD000 or first >= 0x20000 else 1
        points = [i for i in range(first, first + 0x1000, step) if not 0xD800 <= i < 0xE000]
        characters = map(chr, points)
        text = "".join(f"x{c}1{c}{c} {c}\n'{c}S.{c}\u0301" for c in characters)
        assert written.encode(text).ids == encoding.encode_ordinary(text)


def build(pre_tokenizer, decoder, normalizer=None, alphabet=None, **options):
    tokenizer = tokenizers.Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    if normalizer:
        tokenizer.normalizer = normalizer
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>", *bytes_] if alphabet else [SEPARATOR]
    letters = {"initial_alphabet": alphabet or pre_tokenizers.ByteLevel.alphabet()}
    letters |= {"special_tokens": special, "show_progress": False}
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=1500, **letters))
    return tokenizer


# Return one of Qwen's shape, with the template, truncation and padding that Llama 3 has
def qwen():
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = pre_tokenizers.Sequence([split, level])
    tokenizer = build(steps, decoders.ByteLevel(), normalizers.NFC())
    begin = "<|im_start|>"
    think = AddedToken("<think>", normalized=False)
    tokenizer.add_tokens([AddedToken(begin, special=True), think, AddedToken("   ")])
    special = [(begin, tokenizer.token_to_id(begin))]
    template = processors.TemplateProcessing(f"{begin} $A", special_tokens=special)
    trimmed = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([trimmed, template])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    return tokenizer


def sentencepiece():  # of the shape of Llama 2, with a space before the text
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return build(
        pre_tokenizers.Split("▁", "merged_with_next"),
        decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        list(map(chr, range(32, 127))),
        **{"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"},
    )


# Return a tokenizer.json; "words" is of GPT-2's shape, with words after line breaks
@cache
def content_of(name):
    if name == "llama2":
        content = json.loads(sentencepiece().to_str())
        content["added_tokens"] = content["added_tokens"][:3]  # not those of bytes
    elif name == "qwen":
        content = json.loads(qwen().to_str())
        content["model"]["ignore_merges"] = True
    else:
        tokenizer = build(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
        words = ["\nfrom", "\nimport"] if name == "words" else []
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
        content = json.loads(tokenizer.to_str())
    return json.dumps(content, indent=2)


def write_folder(folder, content, config=None, model=None):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    for file, values in (("tokenizer_config.json", config), ("config.json", model)):
        if values is not None:
            (folder / file).write_text(json.dumps(values), encoding="utf-8")
    return folder


def save(tokenizer, folder, model=None):
    files = tokenizer_files(tokenizer)
    content = json.dumps(files["tokenizer.json"])
    return write_folder(folder, content, files["tokenizer_config.json"], model)


@pytest.mark.parametrize("name", ["gpt2", "qwen", "words", "llama2"])
def test_a_tokenizer_that_is_read_is_that_of_transformers_and_is_written_as_it_was(
    tmp_path, name, monkeypatch
):
    content = content_of(name)
    rng = random.Random(0)
    ours = load_tokenizer(write_folder(tmp_path, content, {"eos_token": {"content": SEPARATOR}}))
    options = {"tokenizer_file": f"{tmp_path}/tokenizer.json", "split_special_tokens": True}
    reference = PreTrainedTokenizerFast(**options)
    assert ours.vocab_size == max(tokenizers.Tokenizer.from_str(content).get_vocab().values()) + 1
    for text in ["", " ", "a", "\n", *texts(120, seed=2)]:
        ids = reference(text, **TEXT_ALONE)["input_ids"]
        assert ours.encode(text).tolist() == ids
        shown = ours.decode(ids).removeprefix(" " if name == "llama2" else "")
        assert shown == reference.decode(ids, skip_special_tokens=True)
        assert name in ("qwen", "llama2") or shown == text  # which normalize
        if name != "llama2":
            drawn = rng.choices(range(ours.vocab_size), k=rng.randrange(1, 9))
            assert ours.decode(drawn) == reference.decode(drawn, skip_special_tokens=True)
    files = tokenizer_files(ours)
    assert files["tokenizer.json"] == json.loads(content)
    assert files["tokenizer_config.json"]["eos_token"] == (None if name == "llama2" else SEPARATOR)
    assert load_tokenizer(save(ours, tmp_path)).to_dict() == ours.to_dict()
    assert from_dict(json.loads(json.dumps(ours.to_dict()))).to_dict() == ours.to_dict()
    # Long documents are read and encoded in chunks where that gives the same ids.
    assert ours.splits_at_cuts == (name in ("gpt2", "qwen"))
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 512)
    text = "".join([text for text in corpus() if len(text) > 2000][:4])
    cut = int(len(text) * 0.9)
    documents = [text[:cut], text[cut:]]
    ids = [reference(part, **TEXT_ALONE)["input_ids"] for part in documents]
    for file, content in (("a.txt", text), ("a.jsonl", rows(documents))):
        assert on_disk(prepare(content, tmp_path / "data", ours.to_dict(), name=file)) == ids


def test_merges_are_not_dropped_at_random(tmp_path):
    content = json.loads(content_of("gpt2"))
    text = corpus()[0]
    ids = tokenizers.Tokenizer.from_str(content_of("gpt2")).encode(text).ids
    content["model"]["dropout"] = 0.9  # each time another merge
    ours = load_tokenizer(write_folder(tmp_path, json.dumps(content)))
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path)(text, **TEXT_ALONE)["input_ids"] != ids
    for tokenizer in (ours, from_dict(ours.to_dict() | {"json": json.dumps(content)})):
        assert [tokenizer.encode(text).tolist() for _ in range(3)] == [ids] * 3
        written = PreTrainedTokenizerFast.from_pretrained(save(tokenizer, tmp_path / "written"))
        assert written(text, **TEXT_ALONE)["input_ids"] == ids


def test_the_separator_is_the_end_of_text(tmp_path):
    id_of = tokenizers.Tokenizer.from_str(content_of("qwen")).token_to_id
    start = id_of("<|im_start|>")  # of the template
    for config, model, ends in (
        ({"eos_token": "<think>"}, {"eos_token_id": 97}, ["<think>"]),
        ({"eos_token": {"content": "<|im_start|>"}}, {}, ["<|im_start|>"]),
        ({"eos_token": "<|no such token|>"}, {"eos_token_id": [0, 97]}, [SEPARATOR]),
        ({}, {"eos_token_id": 10**9}, []),
    ):
        tokenizer = load_tokenizer(write_folder(tmp_path, content_of("qwen"), config, model))
        ids = [id_of(token) for token in ends]
        assert tokenizer.separator.tolist() == ids
        assert tokenizer.start.tolist() == [start]
        read = encode_prompt(tokenizer, "".join(ends) + "Once").tolist()
        assert read == [start, *ids, *tokenizer.encode("Once").tolist()]


# Return a tokenizer.json whose post-processor adds special tokens to a text, $A
def with_template(single, content=None):
    tokenizer = tokenizers.Tokenizer.from_str(content or content_of("llama2"))
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>", "<|im_start|>")]
    special = [pair for pair in special if pair[0] in single]
    tokenizer.post_processor = processors.TemplateProcessing(single, special_tokens=special)
    return tokenizer.to_str()


# Return a tokenizer.json whose special tokens take the spaces around them
def stripping(content):
    values = json.loads(content)
    for token in values["added_tokens"]:
        token |= {"lstrip": True, "rstrip": True}
    return json.dumps(values)


NAMED = {"bos_token": "<s>", "unk_token": "<unk>"}
NAMED |= {"eos_token": {"__type": "AddedToken", "content": "</s>"}}
WORD = {"content": "zu", "lstrip": False, "rstrip": True, "normalized": True, "special": False}
WORD |= {"single_word": False}
ENDING = {"2": WORD | {"content": "</s>", "special": True}}
MORE = {"extra_special_tokens": ["<a>"], "pad_token": "<pad>", "added_tokens_decoder": {"7": WORD}}


def started():
    return with_template("<s> $A")


# A tokenizer.json, its tokenizer_config.json, and the ids before a text and after it
IMPORTED = {
    "a start token": (started, NAMED, [1], []),
    "a start token, bytes": (
        lambda: with_template("<|im_start|> $A", content_of("qwen")),
        {},
        None,
        [],
    ),
    "a start token that nothing else names": (started, {}, [1], []),
    "both": (lambda: with_template("<s> $A </s>"), NAMED, [1], [2]),
    "an end token": (lambda: with_template("$A </s>"), NAMED, [], [2]),
    "none, though the configuration has one": (
        lambda: content_of("llama2"),
        NAMED | {"add_bos_token": True},
        [],
        [],
    ),
    "special tokens as text": (started, NAMED | {"split_special_tokens": True}, [1], []),
    "tokens of the configuration": (
        lambda: json.dumps(json.loads(started()) | {"added_tokens": []}),
        NAMED,
        [1],
        [],
    ),
    "tokens that strip spaces": (lambda: stripping(started()), NAMED, [1], []),
    "an end token that strips spaces": (
        started,
        NAMED | {"added_tokens_decoder": ENDING},
        [1],
        [],
    ),
    "more tokens of the configuration": (lambda: content_of("gpt2"), MORE, [], []),
}


@pytest.mark.parametrize("name", IMPORTED)
def test_the_ids_of_a_prompt_and_of_a_scored_text_are_those_of_transformers(tmp_path, name):
    content, config, before, after = IMPORTED[name]
    folder = write_folder(tmp_path, content(), config)
    theirs = AutoTokenizer.from_pretrained(folder)
    imported = load_tokenizer(folder, 2000)
    if before is None:
        before = [theirs.convert_tokens_to_ids("<|im_start|>")]
    for ours in (imported, from_dict(json.loads(json.dumps(imported.to_dict())))):
        assert (list(ours.prefix), list(ours.suffix)) == (before, after)
        special = ["a</s>", "<s>a </s> b<unk>", "x<|im_start|>y", "<a> <pad>zu<think>"]
        for text in ["a", " a", *special, *texts(30, seed=3)]:
            ids = theirs(text).input_ids
            # Which goes on
            assert encode_prompt(ours, text).tolist() == ids[: len(ids) - len(after)]
            assert [*ours.prefix, *ours.parse(text).tolist(), *ours.suffix] == ids
            plain = theirs(text, split_special_tokens=True, add_special_tokens=False)
            assert ours.encode(text).tolist() == plain.input_ids
        first = (before or ours.separator.tolist() or [0])[0]
        start = theirs.bos_token_id if "bos_token" in config else first
        assert encode_prompt(ours, "").tolist() == [start]


def test_a_prompt_starts_and_ends_with_the_tokens_of_the_folder(tmp_path):
    ids = {"bos_token_id": 7, "eos_token_id": [8, 9]}
    own = {"bos_token_id": 5, "eos_token_id": 6}
    named = {"eos_token": SEPARATOR}
    beyond = {"eos_token_id": [8, 10**9, 7]}
    for config, model, generation, start, ends in (
        ({"bos_token": "\nfrom"}, {"bos_token_id": 7}, None, ["\nfrom"], []),
        ({}, ids, None, [7], [8, 9]),
        ({}, ids, own, [5], [6]),
        (named, {"eos_token_id": 9}, beyond, [SEPARATOR], [SEPARATOR, 8, 7]),
    ):
        folder = write_folder(tmp_path, content_of("words"), config, model)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if generation:
            (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
        ours = load_tokenizer(folder)
        known = ours.backend.get_vocab()
        for tokenizer in (ours, from_dict(json.loads(json.dumps(ours.to_dict())))):
            assert tokenizer.start.tolist() == [known.get(each, each) for each in start]
            assert tokenizer.end_ids == [known.get(each, each) for each in ends]


def test_a_tokenizer_of_an_older_checkpoint_is_read_and_written_as_it_was():
    older = {"name": "huggingface", "json": started(), "separator": 2}
    older["json"] = from_dict(older).json
    tokenizer = from_dict(older)
    assert tokenizer.to_dict() == older
    assert (tokenizer.end_ids, tokenizer.start.tolist()) == ([2], [1])


def test_an_ordinary_token_that_a_prompt_starts_with_stays_in_texts(tmp_path):
    letters = CharTokenizer("\n ab")
    (start,) = letters.start.tolist()
    first = load_tokenizer(save(letters, tmp_path, {"bos_token_id": start}))
    ours = load_tokenizer(save(first, tmp_path, {"bos_token_id": start}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = letters.encode("a\nb").tolist()
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a\nb"
    assert first.start.tolist() == ours.start.tolist() == [start]


def test_special_tokens_without_an_embedding_are_left_out(tmp_path):
    theirs = tokenizers.Tokenizer.from_str(content_of("gpt2"))
    theirs.add_special_tokens(["<pad>"])
    folder = write_folder(tmp_path, theirs.to_str(), {"pad_token": "<pad>", "eos_token": SEPARATOR})
    ours = load_tokenizer(folder, 1500)
    assert (ours.vocab_size, load_tokenizer(folder).vocab_size) == (1500, 1501)
    ids = [*ours.encode("a<pad>").tolist(), *ours.separator]
    assert encode_prompt(ours, f"a<pad>{SEPARATOR}").tolist() == ids
    theirs.add_tokens(["word"])  # in any text
    # Which is refused
    assert load_tokenizer(write_folder(folder, theirs.to_str()), 1500).vocab_size > 1500


def test_damaged_files_and_a_missing_package_are_one_line(tmp_path, monkeypatch):
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    exponential = split | {"pattern": {"Regex": "(a|aa)+$"}}
    content = json.dumps(json.loads(content_of("gpt2")) | {"pre_tokenizer": exponential})
    with pytest.raises(UserError, match=r"^[^\n]*tokenizer\.json[^\n]{,400}$"):
        HuggingFaceTokenizer(content).encode("a" * 60 + "b")
    with pytest.raises(UserError, match=r"json is missing; write it with .*save_pretrained"):
        load_tokenizer(tmp_path)
    for text in ("[]", "[" * 100_000, "\udcff"):
        with pytest.raises(UserError, match=r"^[^\n]*damaged[^\n]*$"):
            from_dict({"name": "huggingface", "json": text, "separator": None})
        (tmp_path / "tokenizer.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match="damaged"):
            load_tokenizer(tmp_path)
    for config, model in (([], {}), ({}, {"eos_token_id": []})):
        with pytest.raises(UserError, match="is damaged"):
            load_tokenizer(write_folder(tmp_path, content_of("gpt2"), config, model))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs tokenizers; pip install -e .\.\[huggingface\]"):
        load_tokenizer(tmp_path)
