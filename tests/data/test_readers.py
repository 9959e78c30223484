"""Readers, against gzip, zstandard, pyarrow, json; cut points, against tokenizers' patterns."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import sys
import tarfile
import zipfile
from unittest.mock import patch

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
import zstandard
from corpora import documents, prepare, random_texts, rows, texts_on_disk
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

from minigpt.data import readers
from minigpt.data.readers import (
    cut_point,
    read_documents,
    read_files,
    read_texts,
    text_chunks,
)
from minigpt.data.tokenizer import PATTERNS
from minigpt.extras.corpora import compressed
from minigpt.utils.errors import UserError

COMPRESSED = "_COMPRESSED_BYTES"
UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
TEXT = "To be, or not to be:\r\nthat is the question. Ünï©ödé 漢字 😀\n\n"
AS_READ = TEXT.replace("\r\n", "\n")
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def read_with_blocks(size, read):
    with patch.object(readers, "_BLOCK_BYTES", size), patch.object(compressed, COMPRESSED, size):
        return list(read())


def refusal(file, field="text", block=1 << 20):
    with pytest.raises(UserError) as error:
        read_with_blocks(block, lambda: read_documents(file, field))
    assert str(file) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("block", [1, 1 << 20])
@pytest.mark.parametrize("packed", COMPRESS)
def test_every_line_of_json_lines_is_a_document_and_concatenated_frames_are_one_file(
    tmp_path, block, packed
):
    written = [TEXT, "", "two\rlines", "a\u2028b\x85c", "ascii", "😀" * 10]
    lines = [json.dumps({"story": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(written)]
    lines.append(r'{"story": "a\ud800b\udc00c\ud83d\ude00d\udc00\ud800é"}')
    lone = "a\ufffdb\ufffdc😀d\ufffd\ufffdé"  # surrogates
    texts = [AS_READ, "", "two\nlines", *written[3:], lone]
    file = tmp_path / f"{['a.jsonl', 'a.ndjson', 'a.jsonlines'][len(packed) % 3]}{packed}"
    for content in (
        "\n".join(lines),
        "\r\n".join(lines),
        "\n\n  \n" + "\n \n\n".join(lines) + "\n",
    ):
        parts = (content[:9], "", content[9:50], content[50:], "")
        file.write_bytes(b"".join(COMPRESS[packed](part.encode()) for part in parts))
        assert read_with_blocks(block, lambda: read_documents(file, "story")) == [
            (text, True) for text in texts
        ]


def test_a_line_that_is_no_json_or_has_no_text_raises_with_its_number_and_the_fields_with_text(
    tmp_path,
):
    fields = "; the fields with text are"
    for line, problem in {
        '{"title": "a", "body": "b", "year": 7}': f"no text in field text{fields} title, body;",
        '"text"': "no text in field text; there is no field with text;",
        '{"text": 7, "body": "b"}': f"field text holds int, not text{fields} body;",
        "{": "not JSON",
        "[" * 100_000: "not JSON",
    }.items():
        (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
        assert f"line 3: {problem}" in refusal(tmp_path / "a.jsonl")


INDICES = (pa.int8(), pa.int16(), pa.int32(), pa.uint8())
KINDS = [pa.string(), pa.large_string(), pa.string_view()]
KINDS += [pa.dictionary(index, pa.string()) for index in INDICES]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_row_of_parquet_is_a_document(tmp_path, kind):
    texts = [TEXT, "", "two\rlines", *(f"row {i % 100}" for i in range(1000))]
    table = {"id": range(len(texts)), "story": pa.array(texts).cast(kind)}
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table(table), file, row_group_size=300)
    expected = [AS_READ, "", "two\nlines", *texts[3:]]
    assert list(read_documents(file, "story")) == [(text, True) for text in expected]
    for field in ("text", "id"):
        problem = f"no text in column {field}; the columns with text are story;"
        assert problem in refusal(file, field)


def test_categories_of_pandas_are_texts(tmp_path):
    texts = [f"text {i % 300}" for i in range(900)]
    file = tmp_path / "a.parquet"
    pd.DataFrame({"text": pd.Categorical(texts)}).to_parquet(file, row_group_size=400)
    assert pq.read_schema(file).field("text").type.index_type == pa.int16()
    assert documents(read_files([file], "text")) == texts


def test_rows_with_null_are_left_out_and_counted_once_in_all_formats(tmp_path, capsys):
    texts = ["one", None, "", None, "two"]
    files = [tmp_path / "a.jsonl", tmp_path / "a.parquet"]
    files[0].write_text(rows(texts), encoding="utf-8")
    pq.write_table(pa.table({"text": texts}), files[1])
    for _ in range(2):  # as a preparation reads several times
        assert documents(read_files(files, "text")) == ["one", "", "two"] * 2
    warning = f"warning: 4 rows of {files[0]} … have null instead of a text and are left out\n"
    assert capsys.readouterr().err == warning
    assert documents(read_files(files[1:], "text")) == ["one", "", "two"]
    assert "warning: 2 rows of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("suffix", "dialect"), [(".csv", "excel"), (".tsv", "excel-tab"), (".CSV.gz", "excel")]
)
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_every_row_of_a_table_is_a_document(tmp_path, suffix, dialect, block):
    texts = [
        TEXT,
        "",
        'with "quotes", commas\tand tabs',
        "a\u2028b",
        "é" * (200_000 if block > 1 else 2),
    ]
    content = io.StringIO()
    csv.writer(content, dialect).writerows([["id", "story"], *enumerate(texts)])
    file = tmp_path / f"a{suffix}"
    compress = COMPRESS[".gz" if suffix.endswith(".gz") else ""]
    file.write_bytes(compress(f"\ufeff{content.getvalue()}\r\n".encode()))
    found = read_with_blocks(block, lambda: read_documents(file, "story"))
    assert found == [(text, True) for text in [AS_READ, *texts[1:]]]
    problem = "line 5: no text in column text; the columns with text are id, story;"
    assert f"{file}, {problem}" in refusal(file)


def test_a_row_of_a_table_with_another_number_of_cells_or_open_quotes_raises_with_its_line(
    tmp_path,
):
    file = tmp_path / "a.csv"
    for row in ("only one", "one, two, three", '"a" b,c', '"open'):
        file.write_text(f"id,text\n1,fine\n{row}\n", encoding="utf-8")
        assert re.search("a.csv, near line [23]: .*as .txt the file is one text", refusal(file))


@pytest.mark.parametrize("packed", [".gz", ".zst", ".bz2", ".xz"])
def test_a_damaged_or_uncompressed_file_with_a_compressed_suffix_raises(tmp_path, packed):
    file = tmp_path / f"a.txt{packed}"
    whole = COMPRESS[packed](" ".join(map(str, range(5000))).encode())
    half = len(whole) // 2
    corrupted = whole[:half] + bytes([whole[half] ^ 0x55]) + whole[half + 1 :]
    for content in (
        b"",
        b"plain text",
        whole + b"plain text after it",
        whole[:half],
        whole + whole[:half],
        corrupted,
    ):
        file.write_bytes(content)
        refusal(file)  # damaged, or not text


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_zeros_after_a_compressed_frame_are_padding(tmp_path, block):
    file = tmp_path / "a.txt.gz"
    frames = [gzip.compress(b"To be, "), bytes(100), gzip.compress(b"or not"), bytes(1000)]
    file.write_bytes(b"".join(frames))
    with gzip.open(file) as reference:
        assert reference.read() == b"To be, or not"
    found = read_with_blocks(block, lambda: read_documents(file, "text"))
    assert documents(found) == ["To be, or not"]


def test_damaged_and_compressed_parquet_raises(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["abcdefgh"]}), file, compression="none", use_dictionary=False)
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole.replace(b"abcdefgh", b"abc\xffefgh")):
        file.write_bytes(content)
        refusal(file)
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(whole))
    refusal(tmp_path / "a.parquet.gz")


@settings(max_examples=100, deadline=None)
@given(
    UNICODE,
    st.sampled_from([b"\0", b"\xe4hnlich", b"\xf0\x9f\x98", b"\xc0\xaf"]),
    UNICODE.filter(lambda text: not text or text[0].isascii()),
    st.integers(1, 9),
    st.sampled_from(sorted(COMPRESS)),
)
def test_a_zero_byte_and_invalid_utf8_raise_with_the_offset(
    tmp_path_factory, before, bad, after, block, packed
):
    content = before.encode() + bad + after.encode()
    offset = len(before.encode())
    if bad != b"\0":
        with pytest.raises(UnicodeDecodeError) as reference:
            content.decode()
        offset = reference.value.start
    file = tmp_path_factory.mktemp("latin") / f"a.txt{packed}"
    file.write_bytes(COMPRESS[packed](content))
    line = "" if bad == b"\0" else f", in line {content[:offset].count(bytes([10])) + 1}"
    assert f"offset {offset:,}{line};" in refusal(file, block=block)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["", "<|endoftext|>", r"\n\n", r"\t", "aa", "END"]),
    st.lists(st.text("aEND<|\n\r é9 漢😀", max_size=20), max_size=5),
    st.integers(1, 30),
    st.sampled_from(["a.txt", "a.py", "a", "a.md.gz", "a.TXT.ZST"]),
)
@example("", ["\ufeffa\ufeff"], 1, "a.txt")  # a byte order mark
@example("<|endoftext|>", ["One day.\n", "\nTwo dogs.\n", "\n"], 1, "a.txt")  # as in TinyStories
def test_a_text_is_one_document_or_those_between_separators_without_the_line_breaks_around_them(
    tmp_path_factory, separator, parts, block, name
):
    actual = separator.replace(r"\n", "\n").replace(r"\t", "\t")
    text = actual.join(parts)
    file = tmp_path_factory.mktemp("blocks") / name
    file.write_bytes(COMPRESS.get(file.suffix.lower(), bytes)(text.encode()))
    found = documents(read_with_blocks(block, lambda: read_documents(file, "text", separator)))
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if separator:
        assert found == split_documents(text, actual)
    else:
        assert found == [text]


def split_documents(text, separator):
    return list(filter(None, (part.strip("\n") for part in text.split(separator))))


@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from(["<|>", r"\n\n", r"\n", r"\n#\n", "aa", "aba", "a"]),
    st.lists(
        st.text("ab#<|> \n", max_size=9) | st.sampled_from(["\n" * 40, "b" * 40, "<" * 40]),
        max_size=20,
    ),
    st.integers(1, 9),
    st.integers(1, 12),
)
@example("<|>", ["b<|>", "\n" * 40, "b"], 9, 1)  # line breaks before a document …
@example("<|>", ["b", "\n" * 40, "<|>b"], 9, 1)  # … after it …
@example("<|>", ["b", "\n" * 40, "b"], 9, 1)  # … and in it
def test_documents_are_those_of_a_split_wherever_blocks_and_chunks_end(
    separator, parts, block, chunk
):
    text = "".join(parts)
    blocks = [text[begin : begin + block] for begin in range(0, len(text), block)]
    with patch.multiple(readers, _BLOCK_BYTES=2 * chunk, _MAX_CHUNK_CHARS=chunk, _CUT_WINDOW=chunk):
        chunks = list(text_chunks(blocks, separator))
    assert all(chunk.text for chunk in chunks)
    assert documents(chunks) == split_documents(text, separator.replace(r"\n", "\n"))


@pytest.mark.parametrize("text", ["\nb", "b\n", "b\nb"])
def test_a_megabyte_of_line_breaks_is_no_border_of_documents(tmp_path, text):
    parts = ["One day.", text.replace("\n", "\n" * (5 << 18)), "The end."]
    (tmp_path / "val.txt").write_text("Another one.")
    own = {"separator": "<|>", "val_path": f"{tmp_path}/val.txt"}
    corpus = prepare("<|>".join(parts), tmp_path, "byte", **own)
    assert texts_on_disk(corpus)[0] == "\n".join(part.strip("\n") for part in parts)
    assert corpus.train.documents == 3


def test_what_would_be_trained_on_as_noise_is_refused_with_a_way_out(tmp_path):
    file = tmp_path / "rows.json"
    for content in ("To be".encode("utf-16"), codecs.BOM_UTF16_BE + "To be".encode("utf-16-be")):
        file.write_bytes(content)
        assert "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8" in refusal(file)
    for text in (' [\n "a", "b"]', '["a"]', "[1]"):
        file.write_text(text, encoding="utf-8")
        problem = "rows.json holds JSON, whose syntax would be trained on; make it .jsonl"
        assert problem in refusal(file)
    source = '{\n  "name": "a package"\n}'
    file.write_text(source)
    assert documents(read_documents(file, "text")) == [source]


SEVERAL = (
    '[{"text": "a"}]',
    ' [\n {\n  "text": "a"}]',
    '{"text": "a"}\n{"text": "b"}\n',
    '\ufeff{"text": "a"}\r\n\r\n{"text": "b"}\r\n',
    '{\n  "text": "a"\n}\n{\n  "text": "b"\n}\n',  # as jq prints it
)


@pytest.mark.parametrize("name", ["a.json", "a.txt", "a.md", "a", "a.log", "a.txt.gz"])
def test_rows_of_json_under_another_name_are_refused(tmp_path, name):
    file = tmp_path / name
    for text in SEVERAL:
        file.write_bytes(COMPRESS[file.suffix if file.suffix == ".gz" else ""](text.encode()))
        problem = "holds JSON, whose syntax would be trained on; make it .jsonl, with an object"
        assert f"{file} {problem}" in refusal(file)
        # As a text
        assert documents(read_documents(file, "text", "<|endoftext|>"))[0].strip()[0] in "[{"


@pytest.mark.parametrize("text", [*SEVERAL, '{"text": "one row"}', '["a", "b"]'])
def test_rows_of_json_on_standard_input_are_refused(text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    message = "--score=- holds JSON, whose syntax would be trained on"
    refused(message, lambda: list(read_texts("-", "--score")))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[",
        "",
        "{\n}\n{\n}",
        "[ACT I] {aside}",
        "[1] a footnote\n[2] another\n",
        "{Enter} [Exit]\n{Enter}",
        "[[link]] text",
        "[x](y)\n[z](w)",
        '["so to speak"] he said',
        "{{template}}",
        '{ "quoted" }',
        "{'a': 1}",
        "{\n\\bf x\n}\n{\n\\it y\n}",
        '{\n"Hello!"\n}\n{\n"Bye!"\n}',
        '["Ann", 10:00] Hello',
    ],
)
def test_a_text_that_begins_with_a_bracket_is_a_text(tmp_path, text):
    for name in ("a.txt", "a.py", "a"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert documents(read_documents(tmp_path / name, "text")) == [text]


def archives(folder):
    text = folder / "inside.txt"
    text.write_text("To be, or not to be")
    with tarfile.open(folder / "tar", "w") as tar:
        tar.add(text)
    with zipfile.ZipFile(folder / "zip", "w") as archive:
        archive.write(text)
    pq.write_table(pa.table({"text": ["To be"]}), folder / "table")
    return {
        "gzip; end its name with .gz": gzip.compress(b"To be"),
        "bzip2; end its name with .bz2": bz2.compress(b"To be"),
        "xz; end its name with .xz": lzma.compress(b"To be"),
        "zstd; end its name with .zst": zstandard.compress(b"To be"),
        "a zip archive or an office document; unpack it: unzip": (folder / "zip").read_bytes(),
        "a tar archive; unpack it: tar -xf": (folder / "tar").read_bytes(),
        "Parquet; end its name with .parquet": (folder / "table").read_bytes(),
        "a PDF document; convert it: pdftotext": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
        "a 7-Zip archive; unpack it: 7z x": b"7z\xbc\xaf\x27\x1c\0\x04",
        "UTF-32; convert it: iconv -f UTF-32": "To be".encode("utf-32"),
    }


def test_another_format_is_named_with_its_way_to_text(tmp_path):
    for kind, content in archives(tmp_path).items():
        (tmp_path / "a.txt").write_bytes(content)
        assert f"a.txt is {kind}" in refusal(tmp_path / "a.txt")


def test_a_long_line_of_json_lines_is_read_in_linear_time(tmp_path, monkeypatch):
    # Each block is split once: a line of many blocks is not joined with each
    read = []
    decode = readers._decode
    lines = [f'{{"text": "{text}"}}\r\n' for text in ("é" * 5000, r"b\r\n", "")]

    class Block(str):
        def __radd__(self, before):
            read.append(len(before))
            return before + str(self)

    monkeypatch.setattr(readers, "_decode", lambda *args: map(Block, decode(*args)))
    file = tmp_path / "a.jsonl"
    file.write_bytes("".join(lines).encode())
    found = read_with_blocks(10, lambda: read_documents(file, "text"))
    assert documents(found) == ["é" * 5000, "b\n", ""]
    assert sum(read) == 0


def test_a_text_is_cut_where_it_can_be_cut_or_else_at_the_maximum_length(monkeypatch):
    monkeypatch.setattr(readers, "_MAX_CHUNK_CHARS", 1000)
    lines = [f"{i}: a line of some words.\n" for i in range(50)]
    found = read_with_blocks(100, lambda: text_chunks(lines))
    assert len(found) > 10
    assert all(chunk.text.endswith("\n") for chunk in found)
    found = read_with_blocks(100, lambda: text_chunks(["1" * 100] * 35))
    assert "".join(chunk.text for chunk in found) == "1" * 3500
    assert [chunk.first for chunk in found] == [True] + [False] * (len(found) - 1)
    assert max(len(chunk.text) for chunk in found) < 1200


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_match_the_same_before_and_after_a_cut(name):
    pattern = regex.compile(PATTERNS[name])
    cuts = 0
    for seen, unseen in zip(random_texts(2000), random_texts(2000, seed=1), strict=True):
        cut = cut_point(seen)  # a text is cut before the rest is read
        text = seen + unseen
        assert 0 <= cut < len(seen) or cut == 0
        assert pattern.findall(text) == pattern.findall(text[:cut]) + pattern.findall(text[cut:])
        cuts += cut > 0
    assert cuts > 200
