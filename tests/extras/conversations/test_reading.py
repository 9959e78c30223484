"""Conversations of files and data sets of every kind, against ChatML that is written here."""

import csv
import gzip
import io
import json
import re
import sys
from functools import cache

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import values
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from refusals import refused
from small_runs import one_line

from minigpt.data.prepare import load_corpus
from minigpt.data.tokenizer import BPETokenizer, ByteTokenizer, from_dict
from minigpt.extras.conversations.encoding import (
    IN_ANSWER,
    KINDS,
    TurnEncoder,
    add_chat,
    chat_of,
    encode_chat,
)
from minigpt.extras.conversations.reader import ConversationReader

TURNS = [
    ("system", "Be brief."),
    ("user", 'Why, "why"?\n\nAnd how, é漢😀'),
    ("assistant", "So."),
]
MORE = [*TURNS, ("user", "And?"), ("assistant", "\n  And so\n")]
PLAIN = [{"role": role, "content": content} for role, content in TURNS]
SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt"}
NAMES = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def chatml(turns):
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def as_messages(turns):
    return [{"role": role, "content": content} for role, content in turns]


@cache
def tokenizer_of(name):
    tokenizer = ByteTokenizer() if name == "byte" else BPETokenizer.train([chatml(MORE)], 260)
    add_chat(tokenizer, chat_of(None))
    return from_dict(json.loads(json.dumps(tokenizer.to_dict())))


def written(tokenizer, ids):
    # With the names of special tokens
    names = {i: name.encode() for name, i in tokenizer.special.items()}
    sizes = [names.get(i) or tokenizer.token_bytes[i] for i in ids]
    return b"".join(sizes).decode()


def read(row, name="byte", *, is_built=False):
    """Return what is written of a row, its answers, and the ids."""
    tokenizer = tokenizer_of(name)
    marked = ConversationReader(tokenizer if is_built else None, None)(row, "row").text
    turns = TurnEncoder(tokenizer).encode(marked)
    ids = (turns // KINDS).tolist()
    learned = turns % KINDS == IN_ANSWER
    edges = np.flatnonzero(np.diff(learned, prepend=False, append=False)).reshape(-1, 2)
    answers = [written(tokenizer, ids[start:end]) for start, end in edges]
    return written(tokenizer, ids), answers, ids


ROWS = {
    "messages": ({"messages": as_messages(MORE)}, MORE),
    "content as parts": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": t} for t in ("a", "", "b\n")],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            ]
        },
        [("user", "ab\n"), ("assistant", "c")],
    ),
    "ShareGPT": (
        {"id": "x", "conversations": [{"from": SHAREGPT[r], "value": c} for r, c in MORE]},
        MORE,
    ),
    "conversations with roles": ({"conversations": as_messages(TURNS)}, TURNS),
    "Alpaca": ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
    "Alpaca, empty input": ({"instruction": "Add.", "input": "", "output": "3"}, "Add."),
    "Alpaca, no input": ({"instruction": "Add.", "output": "3", "text": "all of it"}, "Add."),
    "Alpaca with a system message": (
        {"system": "Be brief.", "instruction": "Add.", "output": "3"},
        [TURNS[0], ("user", "Add."), ("assistant", "3")],
    ),
    "ShareGPT with a system message beside it": (
        {"system": "Be brief.", "conversations": as_messages(TURNS[1:])},
        TURNS,
    ),
    "a system message twice": ({"system": "Hi.", "messages": as_messages(TURNS)}, TURNS),
    "null columns": (
        {
            "conversations": None,
            "instruction": None,
            "tools": None,
            "messages": [
                {**message, "name": None, "tool_calls": None, "from": None, "weight": None}
                for message in as_messages(MORE)
            ],
        },
        MORE,
    ),
    "no tools": ({"messages": as_messages(TURNS), "tools": [], "functions": {}}, TURNS),
    "an answer first": ({"messages": as_messages(MORE[2:])}, MORE[2:]),
    "two answers": ({"messages": as_messages([*MORE, *MORE[-1:]])}, [*MORE, *MORE[-1:]]),
    "a question last": ({"messages": as_messages(MORE[:-1])}, MORE[:-1]),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_kind_give_their_turns_of_which_answers_are_learned(kind):
    row, expected = ROWS[kind]
    turns = [("user", expected), ("assistant", "3")] if isinstance(expected, str) else expected
    text, answers, _ = read(row)
    assert text == chatml(turns)
    assert answers == [f"{content}<|im_end|>" for role, content in turns if role == "assistant"]


def test_an_answer_of_weight_0_is_not_learned():
    weights = {2: 0, 4: 1}
    row = [each | {"weight": weights.get(i)} for i, each in enumerate(as_messages(MORE))]
    text, answers, _ = read({"messages": row})
    assert text == chatml(MORE)
    assert answers == [f"{MORE[4][1]}<|im_end|>"]


TEXTS = st.one_of(
    st.text(), st.lists(st.sampled_from([*NAMES, "\ufdd2", "\ud800", "a"])).map("".join)
)
CHATS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), max_size=5)


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("name", ["byte", "bpe"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=CHATS, answer=TEXTS.filter(str.strip))
@example([("user", "".join(NAMES))], "<|im_end|>a<|endoftext|>\n<|im_start|>user\n")
@example([("user", "\ufdd0\ufdd1\ufdd4"), ("system", "a\ud800\ud83d\ude00")], "\ufdd2b\ufdd3\udcff")
def test_whatever_is_in_messages_is_ordinary_text(name, is_built, turns, answer):
    turns = [turn for turn in turns if turn[0] != "assistant" or turn[1].strip()]
    messages = as_messages([*turns, ("assistant", answer)])
    text, answers, ids = read({"messages": messages}, name, is_built=is_built)
    # Noncharacters that are kept for marks, and half characters, are replacement characters
    as_read = [(each["role"], replaced(each["content"])) for each in messages]
    assert text == chatml(as_read)
    assert answers == [f"{content}<|im_end|>" for role, content in as_read if role == "assistant"]
    special = tokenizer_of(name).special
    counts = {each: ids.count(i) for each, i in special.items()}
    n = len(messages)
    assert counts == {NAMES[0]: n, NAMES[1]: n} | dict.fromkeys(special.keys() - NAMES[:2], 0)
    prompt = encode_chat(tokenizer_of(name), as_messages(as_read[:-1]))
    assert ids[: len(prompt)] == prompt
    assert written(tokenizer_of(name), prompt) == f"{chatml(as_read[:-1])}<|im_start|>assistant\n"


def replaced(text):
    joined = json.loads(json.dumps(text))  # two surrogates may be a character
    return "".join("\ufffd" if re.match("[\ufdd0-\ufdef\ud800-\udfff]", c) else c for c in joined)


TABLE = [{"instruction": f'Say "{i}",\n漢', "input": None, "output": f"{i}."} for i in range(1, 4)]
WRITTEN = [[("user", f'Say "{i}",\n漢'), ("assistant", f"{i}.")] for i in range(1, 4)]


def json_lines(rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def csv_of(rows, delimiter):
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def parquet_of(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


CHATS_OF_TABLE = [{"messages": as_messages(turns)} for turns in WRITTEN]
FILES = {
    "a.jsonl": json_lines(TABLE),
    "a.ndjson": json_lines(CHATS_OF_TABLE).replace(b"\n", b"\n\n"),
    "a.json": json.dumps(TABLE).encode(),
    "b.json": b"\xef\xbb\xbf" + json.dumps(TABLE, indent=2).encode(),
    "c.json": json_lines(CHATS_OF_TABLE),
    "a.csv": csv_of(TABLE, ","),
    "a.tsv": csv_of(TABLE, "\t"),
    "a.parquet": parquet_of(TABLE),
    "b.parquet": parquet_of(CHATS_OF_TABLE),
    "a.jsonl.gz": gzip.compress(json_lines(TABLE)),
    "a.json.gz": gzip.compress(json.dumps(CHATS_OF_TABLE).encode()),
    "-": json.dumps(CHATS_OF_TABLE).encode(),
}


def prepare(folder, **changes):
    """Return what is written in the training split, and the answers of it."""
    data = values("text") | values("conversations") | {"folder": str(folder / "data")} | changes
    corpus = load_corpus(data, {"name": "byte"})
    ids = corpus.tokens("train")[:]
    learned = ids[corpus.kinds("train") == IN_ANSWER]
    return written(corpus.tokenizer, ids.tolist()), written(corpus.tokenizer, learned.tolist())


EXPECTED = ("".join(map(chatml, WRITTEN)), "1.<|im_end|>2.<|im_end|>3.<|im_end|>")


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_are_read(tmp_path, name, monkeypatch):
    monkeypatch.setenv("MINIGPT_STDIN_FILE", "")  # removed after the test, whatever was set
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FILES[name]), encoding="utf-8"))
    (tmp_path / "a.jsonl").write_bytes(FILES["a.jsonl"])
    path = name if name == "-" else str(tmp_path / name)
    if name != "-":
        (tmp_path / name).write_bytes(FILES[name])
    assert prepare(tmp_path, path=path, val_path=str(tmp_path / "a.jsonl")) == EXPECTED


def test_a_data_set_of_hugging_face_is_read_with_its_validation_split(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "chats" / "data"
    folder.mkdir(parents=True)
    for split, rows in (("train", CHATS_OF_TABLE), ("validation", CHATS_OF_TABLE[:1])):
        (folder / f"{split}-00000-of-00001.parquet").write_bytes(parquet_of(rows))
    given = {"source": "huggingface", "dataset": str(folder.parent), "val_split": "validation"}
    assert prepare(tmp_path, **given) == EXPECTED


OK = PLAIN[-1]
REFUSED = {
    "a text": ("Hi", "must have messages, conversations, or instruction and output, got 'Hi'"),
    "other keys": ({"prompt": "a", "completion": "b"}, "output, got 'prompt, completion'"),
    "messages as a text": ({"messages": "[]"}, r"the messages must be a list, got '\[\]'$"),
    "a message as a text": ({"messages": ["a"]}, "message 1 must have a role and a content that a"),
    "no content": ({"messages": [OK, {"role": "user"}]}, "message 2 must have a role and a con"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}, OK]},
        "message 1 must have a role and a content that are texts, got .*'image'",
    ),
    "a part without a text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}, OK]},
        "message 1 must have a role and a content that are texts, got .*None",
    ),
    "no answer": ({"messages": PLAIN[:2]}, "must have a message of the role assistant, from whi"),
    "no messages": ({"conversations": []}, "must have a message of the role assistant, from whi"),
    "an empty answer": (
        {"messages": [OK, {"role": "assistant", "content": " \n"}]},
        "message 2 is an empty answer; leave it out",
    ),
    "an empty output": ({"instruction": "a", "output": ""}, "message 2 is an empty answer; leave"),
    "other roles": ({"messages": [{"role": "bot", "content": "a"}]}, "to learn, got bot$"),
    "half a weight": (
        {"messages": [OK | {"weight": 0.5}]},
        "weight of message 1 must be 0 or 1, g",
    ),
    "earlier turns": (
        {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        "history is not supported; leave such conversations out",
    ),
    "a number as a system message": (
        {"system": 3, "conversations": [OK]},
        "the system message must have a role and a content that are texts",
    ),
    "a number": ({"instruction": "a", "output": 3}, "message 2 must have a role and a content th"),
    "tools": ({"messages": PLAIN, "tools": [{}]}, "tools is not supported; leave such conversat"),
    "a call of a tool": (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
        "tool_calls is not supported; leave such conversations out",
    ),
    "a role that the template lacks": (
        {"messages": [{"role": "tool", "content": "3"}, OK]},
        "the chat template does not take these messages: a role must be system, user or assist",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_is_no_conversation_to_learn_from_is_refused_with_its_place(tmp_path, name):
    row, pattern = REFUSED[name]
    good = {"messages": PLAIN}
    file = tmp_path / "my.jsonl"
    file.write_bytes(json_lines([good, row]))
    refused(f"^{file}, line 2: .*{pattern}", prepare, tmp_path, path=str(file))


def test_a_field_that_is_named_must_be_in_every_row(tmp_path):
    file = tmp_path / "my.jsonl"
    file.write_bytes(json_lines([{"messages": PLAIN, "chosen": PLAIN}]))
    pattern = "line 1: a conversation must have chosn, got 'messages, chosen'"
    refused(pattern, prepare, tmp_path, path=str(file), field="chosn")


def test_a_single_conversation_is_not_split(tmp_path):
    file = tmp_path / "my.jsonl"
    file.write_bytes(json_lines([{"messages": PLAIN}]))
    pattern = "with so few set another data.val_fraction"
    refused(pattern, prepare, tmp_path, path=str(file), split="fraction")


def test_the_place_of_a_row_is_that_of_its_file(tmp_path):
    rows = [*TABLE, {"instruction": "a", "input": None, "output": ""}]
    for name, content, place in (
        ("a.json", json.dumps(rows).encode(), "item 4"),
        ("b.json", json_lines(rows), "line 4"),
        ("a.csv", csv_of(rows, ","), "line 8"),
        ("a.parquet", parquet_of(rows), "row 4"),
    ):
        (tmp_path / name).write_bytes(content)
        pattern = f"{name}, {place}: message 2 is an empty answer; leave it out"
        refused(pattern, prepare, tmp_path, path=str(tmp_path / name))
    (tmp_path / "b.json").write_text("[{]")
    refused("b.json is not JSON", prepare, tmp_path, path=str(tmp_path / "b.json"))


def test_prose_as_conversations_is_one_line(tmp_path, call):
    (tmp_path / "prose.txt").write_text("Once upon a time\nthere was a cat.\n")
    line = one_line(call("train.py", "data=conversations", "data.path=prose.txt"))
    assert line.startswith("error: prose.txt, line 1: not JSON (Expecting value")
