"""Readers, against gzip, zstandard, pyarrow and json; cut points, against the tokenizers' patterns."""

import codecs
import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
import zstandard
from corpora import documents, random_texts
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigpt.data import readers
from minigpt.data.readers import cut_point, find_files, read_documents, text_chunks
from minigpt.data.tokenizer import PATTERNS
from minigpt.utils.errors import UserError

UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
TEXT = "To be, or not to be:\r\nthat is the question. Ünï©ödé 漢字 😀\n\n"
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def read_with_blocks(size, read):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK_BYTES", size)
        patch.setattr(readers, "_COMPRESSED_BYTES", size)
        return list(read())


def refusal(file, field="text", block=1 << 20):
    with pytest.raises(UserError) as error:
        read_with_blocks(block, lambda: read_documents(file, field))
    assert str(file) in str(error.value)
    return str(error.value)


def find(path):
    return find_files(str(path), "data.path")


def test_a_folder_a_name_or_a_pattern_gives_its_files_sorted(tmp_path, monkeypatch):
    known = ["B.TXT", "a.md", "deep/d.parquet", "deep/er/c.jsonl", "e.txt.gz", "f.md.zst", "g.jsonl.GZ"]
    others = ["x.pdf", "y.gz", "z.txt.bak", "[odd] *name?.text", ".hidden.txt", ".git/a.md", "deep/.cache/b.txt"]
    for file in [tmp_path / name for name in known + others]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a")
    (tmp_path / "folder.txt").mkdir()
    assert find(tmp_path) == [tmp_path / name for name in known]
    for name in ("a.md", "x.pdf", ".hidden.txt", "[odd] *name?.text"):
        assert find(tmp_path / name) == [tmp_path / name]
    assert find(f"{tmp_path}/**/*.md") == [tmp_path / "a.md"]
    assert find(f"{tmp_path}/[ae].*") == [tmp_path / "a.md", tmp_path / "e.txt.gz"]
    monkeypatch.setenv("HOME", str(tmp_path / "deep"))
    assert find("~/er/c.jsonl") == find("~/*/*.jsonl") == [tmp_path / "deep/er/c.jsonl"]
    for name, problem in {"no.txt": "does not exist", "*.csv": "matches no file", "folder.txt": "has no file"}.items():
        with pytest.raises(UserError, match=re.escape(f"data.path={tmp_path / name} {problem}")):
            find(tmp_path / name)


@pytest.mark.parametrize("block", [1, 1 << 20])
@pytest.mark.parametrize("packed", COMPRESS)
def test_every_line_of_json_lines_is_a_document_and_concatenated_frames_are_one_file(tmp_path, block, packed):
    texts = [TEXT, "", "two\nlines", "a\u2028b\x85c", "ascii", "😀" * 10]
    lines = [json.dumps({"id": i, "story": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    lines.append(r'{"story": "a\ud800b\udc00c\ud83d\ude00d\udc00\ud800é"}')
    texts.append("a\ufffdb\ufffdc😀d\ufffd\ufffdé")  # lone surrogates
    file = tmp_path / f"a.jsonl{packed}"
    for content in ("\n".join(lines), "\r\n".join(lines), "\n\n  \n" + "\n \n\n".join(lines) + "\n"):
        parts = content[:9], "", content[9:50], content[50:], ""
        file.write_bytes(b"".join(COMPRESS[packed](part.encode()) for part in parts))
        assert read_with_blocks(block, lambda: read_documents(file, "story")) == [(text, True) for text in texts]


def test_a_line_that_is_no_json_or_has_no_text_raises_with_its_number_and_the_fields_with_text(tmp_path):
    for line, problem in {
        '{"title": "a", "body": "b", "year": 7}': "no text in field text; the fields with text are title, body;",
        '"text"': "no text in field text; there is no field with text;",
        "{": "not JSON",
        "[" * 100_000: "not JSON",
    }.items():
        (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
        assert f"line 3: {problem}" in refusal(tmp_path / "a.jsonl")


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_every_row_of_parquet_is_a_document(tmp_path, kind):
    texts = [TEXT, "", "two\nlines", None, *(f"row {i}" for i in range(1000))]
    table, file = {"id": range(len(texts)), "story": pa.array(texts).cast(kind)}, tmp_path / "a.parquet"
    pq.write_table(pa.table(table), file, row_group_size=300)
    assert list(read_documents(file, "story")) == [(text or "", True) for text in texts]
    for field in ("text", "id"):
        assert f"no text in column {field}; the columns with text are story;" in refusal(file, field)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_damaged_or_uncompressed_file_with_a_compressed_suffix_raises(tmp_path, packed):
    file, whole = tmp_path / f"a.txt{packed}", COMPRESS[packed](" ".join(map(str, range(5000))).encode())
    half = len(whole) // 2
    corrupted = whole[:half] + bytes([whole[half] ^ 0x55]) + whole[half + 1 :]
    for content in (b"", b"plain text", whole + b"plain text after it", whole[:half], whole + whole[:half], corrupted):
        file.write_bytes(content)
        refusal(file)  # damaged, or not text


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
def test_a_zero_byte_and_invalid_utf8_raise_with_the_offset(tmp_path_factory, before, bad, after, block, packed):
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
    text, file = actual.join(parts), tmp_path_factory.mktemp("blocks") / name
    file.write_bytes(COMPRESS.get(file.suffix.lower(), bytes)(text.encode()))
    found = documents(read_with_blocks(block, lambda: read_documents(file, "text", separator)))
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    parts = [part for one in text.split(actual) if (part := one.strip("\n"))] if separator else [text]
    assert found == parts


def test_what_would_be_trained_on_as_noise_is_refused_with_a_way_out(tmp_path):
    wide, rows = tmp_path / "wide.txt", tmp_path / "rows.json"
    for name in ("utf-16", "utf-16-be"):
        wide.write_bytes("To be".encode(name) if name == "utf-16" else codecs.BOM_UTF16_BE + "To be".encode(name))
        assert "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8" in refusal(wide)
    for text in ('[{"text": "a"}]', ' [\n "a", "b"]', '{"text": "a"}\n{"text": "b"}\n'):
        rows.write_text(text)
        assert "holds several JSON values, whose syntax would be trained on; make it JSON Lines, .jsonl" in refusal(
            rows
        )
    rows.write_text('{\n  "name": "a package"\n}')  # as a file of source code
    assert documents(read_documents(rows, "text")) == [rows.read_text()]


def test_files_of_a_folder_that_are_skipped_are_counted(tmp_path, capsys):
    for name in ("a.txt", "b.html", "c.html", "LICENSE", ".hidden"):
        (tmp_path / name).write_text("a")
    find(tmp_path)
    assert f"3 files of {tmp_path} are skipped (.html, no suffix); a pattern such as" in capsys.readouterr().err
    find(tmp_path / "a.txt")
    assert capsys.readouterr().err == ""


def test_a_long_line_of_json_lines_is_read_in_linear_time(tmp_path, monkeypatch):
    """Each block is split once: a line of many blocks is not joined with each."""
    read, rows = [], [{"text": "é" * 5000}, {"text": "b\r\n"}, {"text": ""}]
    decode = readers._decode

    class Block(str):
        def __radd__(self, before):
            read.append(len(before))
            return before + str(self)

    monkeypatch.setattr(readers, "_decode", lambda *args: map(Block, decode(*args)))
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\r\n" for row in rows), newline="")
    assert documents(read_with_blocks(10, lambda: read_documents(file, "text"))) == [row["text"] for row in rows]
    assert sum(read) == 0


def test_a_text_is_cut_where_it_can_be_cut_or_else_at_the_maximum_length(monkeypatch):
    monkeypatch.setattr(readers, "_MAX_CHUNK_CHARS", 1000)
    found = read_with_blocks(100, lambda: text_chunks(f"{i}: a line of some words.\n" for i in range(50)))
    assert len(found) > 10
    assert all(chunk.text.endswith("\n") for chunk in found)
    found = read_with_blocks(100, lambda: text_chunks(["1" * 100] * 35))
    assert "".join(chunk.text for chunk in found) == "1" * 3500
    assert [chunk.first for chunk in found] == [True] + [False] * (len(found) - 1)
    assert max(len(chunk.text) for chunk in found) < 1200


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_match_the_same_before_and_after_a_cut(name):
    pattern, cuts = regex.compile(PATTERNS[name]), 0
    for seen, unseen in zip(random_texts(2000), random_texts(2000, seed=1), strict=True):
        cut, text = cut_point(seen), seen + unseen  # a text is cut before the rest is read
        assert 0 <= cut < len(seen) or cut == 0
        assert pattern.findall(text) == pattern.findall(text[:cut]) + pattern.findall(text[cut:])
        cuts += cut > 0
    assert cuts > 200
