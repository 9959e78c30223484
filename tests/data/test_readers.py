"""Readers, against gzip, zstandard, pyarrow and json; cut points, against the tokenizers' patterns."""

import gzip
import json
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigpt.data import readers
from minigpt.data.readers import cut_point, find_files, read_documents, text_chunks
from minigpt.data.tokenizer import PATTERNS, BPETokenizer
from minigpt.utils.errors import UserError

UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
TEXT = "To be, or not to be:\r\nthat is the question. Ünï©ödé 漢字 😀\n\n"
PROSE = st.lists(
    st.one_of(
        st.sampled_from(
            [" ", "  ", "\n", "\n\n", "\r\n", "\t", "'", "'s", "'LL", "’", "!", "...", "/", "\xa0", "\u2028"]
        ),
        st.sampled_from(["a", "B", "ß", "é", "e\u0301", "ǅ", "漢", "字", "。", "ا", "ʰ", "\x1c", "\x85", "😀"]),
        st.text("0123456789٣½", min_size=1, max_size=5),
        st.text("abcXYZst", min_size=1, max_size=8),
    ),
    max_size=40,
).map("".join)

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": lambda content: zstandard.ZstdCompressor().compress(content)}


@pytest.fixture(params=[1, 7, 1 << 20], ids=lambda size: f"blocks of {size}")
def block(request, monkeypatch):
    """Set the bytes that are read at a time."""
    monkeypatch.setattr(readers, "_BLOCK_BYTES", request.param)
    return request.param


def texts_of(file, field="text"):
    """Return the documents of a file, joined from their chunks."""
    texts = []
    for chunk in read_documents(file, field):
        if chunk.first:
            texts.append("")
        texts[-1] += chunk.text
    return texts


def refusal(file, field="text"):
    with pytest.raises(UserError) as error:
        list(read_documents(file, field))
    assert str(file) in str(error.value)
    return str(error.value)


def write_parquet(file, table, **options):
    pq.write_table(pa.table(table), file, **options)
    return file


# Find files


def test_a_file_is_found_whatever_its_name(tmp_path):
    for name in ("a.txt", "notes", ".hidden", "[odd] *name?.text"):
        (tmp_path / name).write_text("a")
        assert find_files(str(tmp_path / name)) == [tmp_path / name]


def test_a_folder_gives_its_sorted_files_of_known_suffixes_that_are_not_hidden(tmp_path):
    known = ["B.TXT", "a.md", "deep/er/c.jsonl", "deep/d.parquet", "e.txt.gz", "f.md.zst", "g.jsonl.GZ"]
    hidden = [".hidden.txt", ".git/a.md", "deep/.cache/b.txt"]
    other = ["x.pdf", "y.gz", "noname", "z.txt.bak", "deep/b.PDF"]
    for name in known + hidden + other:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    (tmp_path / "folder.txt").mkdir()
    assert find_files(str(tmp_path)) == sorted(tmp_path / name for name in known)


def test_a_folder_below_a_hidden_one_is_read(tmp_path):
    (tmp_path / ".data").mkdir()
    (tmp_path / ".data/a.txt").write_text("a")
    assert find_files(str(tmp_path / ".data")) == [tmp_path / ".data/a.txt"]


def test_a_pattern_gives_the_files_that_match_it_sorted(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "deep/er/d.txt", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    (tmp_path / "folder.txt").mkdir()
    assert find_files(f"{tmp_path}/*.txt") == [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert find_files(f"{tmp_path}/**/*.txt") == sorted(tmp_path / name for name in ("a.txt", "b.txt", "deep/er/d.txt"))
    assert find_files(f"{tmp_path}/[bc].*") == [tmp_path / "b.txt", tmp_path / "c.md"]
    (tmp_path / "e.py").write_text("a")
    assert find_files(f"{tmp_path}/*.py") == [tmp_path / "e.py"]  # of any kind


def test_find_files_expands_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    assert find_files("~/a.txt") == find_files("~/*.txt") == find_files("~") == [tmp_path / "a.txt"]


@pytest.mark.parametrize("name", ["missing.txt", "missing/*.txt", "empty", "pictures"])
def test_a_path_without_files_raises_with_the_path(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(b"a")
    with pytest.raises(UserError) as error:
        find_files(str(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)


# Formats


@pytest.mark.parametrize("packed", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".py", ""])
def test_a_text_file_is_one_document(tmp_path, block, kind, packed):
    file = tmp_path / f"a{kind}{packed}"
    file.write_bytes(COMPRESS[packed](TEXT.encode() * 20))
    assert texts_of(file) == [TEXT * 20]


@pytest.mark.parametrize("packed", COMPRESS)
def test_an_empty_file_is_an_empty_document(tmp_path, packed):
    file = tmp_path / f"a.txt{packed}"
    file.write_bytes(COMPRESS[packed](b""))
    assert list(read_documents(file, "text")) == [("", True)]


@pytest.mark.parametrize("packed", COMPRESS)
def test_every_line_of_json_lines_is_a_document(tmp_path, block, packed):
    texts = [TEXT, "", "two\nlines", "a\u2028b\x85c", "ascii", "😀" * 10]
    lines = [json.dumps({"id": i, "story": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    file = tmp_path / f"a.jsonl{packed}"
    for content in ("\n".join(lines), "\n".join(lines) + "\n", "\r\n".join(lines), "\n\n  \n" + "\n \n\n".join(lines)):
        file.write_bytes(COMPRESS[packed](content.encode()))
        found = list(read_documents(file, "story"))
        assert [chunk.text for chunk in found] == texts
        assert all(chunk.first for chunk in found)


def test_an_empty_file_of_json_lines_has_no_document(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert texts_of(tmp_path / "a.jsonl") == []


def test_lone_surrogates_in_json_become_replacement_characters(tmp_path):
    (tmp_path / "a.jsonl").write_text(r'{"text": "a\ud800b\udc00c\ud83d\ude00d\udc00\ud800é"}')
    assert texts_of(tmp_path / "a.jsonl") == ["a\ufffdb\ufffdc😀d\ufffd\ufffdé"]


@pytest.mark.parametrize("packed", COMPRESS)
@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('{"title": "a", "body": "b", "year": 7}', ["title", "body"]),
        ('{"title": "a", "text": null, "body": "b"}', ["title", "body"]),
        ('{"title": "a", "text": ["b"]}', ["title"]),
        ('{"year": 7}', ["no field"]),
        ('["text"]', ["no field"]),
        ('"text"', ["no field"]),
    ],
)
def test_a_missing_field_raises_with_the_line_and_the_fields_with_text(tmp_path, block, line, names, packed):
    file = tmp_path / f"a.jsonl{packed}"
    file.write_bytes(COMPRESS[packed](('{"text": "fine"}\n\n' + line).encode()))
    message = refusal(file)
    assert "line 3:" in message
    assert "year" not in message
    assert all(name in message for name in names)


@pytest.mark.parametrize("line", ["{", "not JSON", '{"text": "a"} {"text": "b"}', "[" * 100_000], ids=lambda x: x[:9])
def test_invalid_json_raises_with_the_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n \n\n' + line + '\n{"text": "b"}\n')
    assert "line 4:" in refusal(tmp_path / "a.jsonl")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_every_row_of_parquet_is_a_document(tmp_path, kind):
    texts = [TEXT, "", "two\nlines"] + [f"row {i}" for i in range(1000)]
    file = write_parquet(
        tmp_path / "a.parquet", {"id": range(1003), "story": pa.array(texts).cast(kind)}, row_group_size=300
    )
    found = list(read_documents(file, "story"))
    assert [chunk.text for chunk in found] == texts
    assert all(chunk.first for chunk in found)


@pytest.mark.parametrize(
    "column",
    [pa.array([1, 2]), pa.array([["a"], ["b", "c"]]), pa.array([{"string": "a"}, {"string": "b"}])],
    ids=lambda column: str(column.type),
)
def test_a_column_without_text_raises_with_the_columns_with_text(tmp_path, column):
    file = write_parquet(tmp_path / "a.parquet", {"title": ["a", "b"], "body": ["c", "d"], "other": column})
    for field in ("text", "other"):
        message = refusal(file, field)
        assert "title, body" in message
        assert field in message


def test_a_parquet_file_without_text_raises(tmp_path):
    assert "no column" in refusal(write_parquet(tmp_path / "a.parquet", {"year": [1]}))


# Compression


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_concatenated_compressed_frames_are_one_file(tmp_path, block, kind):
    parts = ["one ", "", "zwei ", TEXT, "", "trois"]
    file = tmp_path / f"a.txt{kind}"
    file.write_bytes(b"".join(COMPRESS[kind](part.encode()) for part in parts))
    assert texts_of(file) == ["".join(parts)]


def test_a_zstandard_frame_with_a_large_window_and_no_size_is_read(tmp_path):
    content = b"".join(b"%d little words\n" % i for i in range(20_000))
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28, write_content_size=0)
    (tmp_path / "a.txt.zst").write_bytes(zstandard.ZstdCompressor(compression_params=parameters).compress(content))
    assert texts_of(tmp_path / "a.txt.zst") == [content.decode()]


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_a_truncated_compressed_file_raises(tmp_path, kind, packed):
    row = json.dumps({"text": TEXT}) + "\n"
    whole = COMPRESS[packed](row.encode())
    file = tmp_path / f"a{kind}{packed}"
    for content, starts in ((whole, 1), (whole * 2, len(whole) + 1)):
        for length in range(starts, len(content), 5 if len(content) == len(whole) else 23):
            file.write_bytes(content[:length])
            assert packed.strip(".")[:2] in refusal(file)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_an_uncompressed_file_with_a_compressed_suffix_raises(tmp_path, packed):
    file = tmp_path / f"a.txt{packed}"
    for content in (b"plain text", COMPRESS[packed](b"a") + b"plain text after it"):
        file.write_bytes(content)
        refusal(file)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_corrupted_compressed_file_raises(tmp_path, packed):
    text = " ".join(map(str, range(5000))).encode()
    compress = gzip.compress if packed == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    file, whole = tmp_path / f"a.txt{packed}", compress(text)
    for place in range(20, len(whole), len(whole) // 40):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        refusal(file)  # damaged, or not text


def test_a_damaged_parquet_file_raises(tmp_path):
    good = write_parquet(tmp_path / "good.parquet", {"text": [f"row {i} {TEXT}" for i in range(2000)]})
    whole, file = good.read_bytes(), tmp_path / "a.parquet"
    for length in (0, 1, 4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        refusal(file)
    zeros = bytes(len(whole) // 3)
    file.write_bytes(whole[:100] + zeros + whole[100 + len(zeros) :])
    refusal(file)


def test_parquet_with_invalid_utf8_raises(tmp_path):
    good = write_parquet(tmp_path / "a.parquet", {"text": ["abcdefgh"]}, compression="none", use_dictionary=False)
    good.write_bytes(good.read_bytes().replace(b"abcdefgh", b"abc\xffefgh"))
    refusal(good)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_compressed_parquet_file_raises(tmp_path, packed):
    good = write_parquet(tmp_path / "good.parquet", {"text": ["a"]})
    file = tmp_path / f"a.parquet{packed}"
    file.write_bytes(COMPRESS[packed](good.read_bytes()))
    assert packed in refusal(file)


# Files that are not text


@settings(max_examples=60, deadline=None)
@given(st.data(), UNICODE, UNICODE, st.integers(1, 9), st.sampled_from(sorted(COMPRESS)))
def test_a_binary_file_raises_with_the_offset_of_its_zero_byte(tmp_path_factory, data, before, after, block, packed):
    file = tmp_path_factory.mktemp("zero") / f"a.txt{packed}"
    file.write_bytes(COMPRESS[packed](before.encode() + b"\0" + after.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK_BYTES", block)
        assert f"offset {len(before.encode()):,};" in refusal(file)


@settings(max_examples=100, deadline=None)
@given(
    UNICODE,
    st.sampled_from(
        [b"\xff", b"\xe4", b"\xe4hnlich", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\xe6\xbca", b"\x80"]
    ),
    UNICODE.filter(lambda text: not text or text[0].isascii()),
    st.integers(1, 9),
    st.sampled_from(sorted(COMPRESS)),
)
def test_invalid_utf8_raises_with_the_offset(tmp_path_factory, before, bad, after, block, packed):
    content = before.encode() + bad + after.encode()
    with pytest.raises(UnicodeDecodeError) as reference:
        content.decode()
    file = tmp_path_factory.mktemp("latin") / f"a.txt{packed}"
    file.write_bytes(COMPRESS[packed](content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK_BYTES", block)
        assert f"offset {reference.value.start:,};" in refusal(file)


@settings(max_examples=60, deadline=None)
@given(UNICODE, st.integers(1, 9), st.sampled_from(sorted(COMPRESS)))
@example("\ufeffa\ufeff", 1, "")
@example("\ufeffa\ufeff", 9, ".gz")
def test_characters_across_blocks_are_decoded_and_a_byte_order_mark_is_removed(tmp_path_factory, text, block, packed):
    file = tmp_path_factory.mktemp("blocks") / f"a.txt{packed}"
    file.write_bytes(COMPRESS[packed](text.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK_BYTES", block)
        assert texts_of(file) == [text.removeprefix("\ufeff")]


def test_utf16_raises(tmp_path):
    (tmp_path / "a.txt").write_bytes("Hello".encode("utf-16"))
    refusal(tmp_path / "a.txt")


# Chunks


@given(st.lists(PROSE), st.integers(2, 60))
def test_chunks_concatenate_to_the_text_and_only_one_is_first(blocks, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK_BYTES", block)
        found = list(text_chunks(blocks))
    assert "".join(chunk.text for chunk in found) == "".join(blocks)
    assert [chunk.first for chunk in found] == [True] + [False] * (len(found) - 1)
    assert all(chunk.text for chunk in found) or found == [("", True)]


def test_a_long_text_comes_in_several_chunks(tmp_path):
    text = "".join(f"{i}: a line of some words.\n" for i in range(150_000))
    (tmp_path / "a.txt").write_text(text)
    found = list(read_documents(tmp_path / "a.txt", "text"))
    assert "".join(chunk.text for chunk in found) == text
    assert len(found) > 3
    assert [chunk.first for chunk in found] == [True] + [False] * (len(found) - 1)


def test_a_text_without_a_cut_point_is_cut_at_the_maximum_length(monkeypatch):
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(readers, "_MAX_CHUNK_CHARS", 1000)
    found = list(text_chunks(["1" * 100] * 35))
    assert "".join(chunk.text for chunk in found) == "1" * 3500
    assert [chunk.first for chunk in found] == [True] + [False] * (len(found) - 1)
    assert max(len(chunk.text) for chunk in found) < 1200


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=200, deadline=None)
@given(seen=PROSE, unseen=PROSE)
def test_patterns_match_the_same_before_and_after_a_cut(name, seen, unseen):
    cut, pattern = cut_point(seen), regex.compile(PATTERNS[name])
    text = seen + unseen  # a text is cut before the rest is read
    assert 0 <= cut < len(seen) or cut == 0
    assert pattern.findall(text) == pattern.findall(text[:cut]) + pattern.findall(text[cut:])


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("one two\nthree four", 8),
        ("one two three", 7),
        ("one\n\ntwo", 0),
        ("one  two", 0),
        ("one 2 three", 0),
        ("!\nthree", 2),
        ("one \ntwo", 0),
        ("\none", 0),
        ("one\n", 0),
        ("", 0),
    ],
)
def test_a_text_is_cut_after_a_line_break_or_before_a_space(text, cut):
    assert cut_point(text) == cut


@settings(max_examples=60, deadline=None)
@given(st.lists(PROSE, min_size=1), st.integers(2, 60))
def test_a_chunked_text_has_the_ids_of_the_whole_text(blocks, block):
    tokenizer = trained()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK_BYTES", block)
        found = list(text_chunks(blocks))
    ids = [i for chunk in found for i in tokenizer.encode(chunk.text).tolist()]
    assert ids == tokenizer.encode("".join(blocks)).tolist()


@cache
def trained():
    text = Path(__file__).read_text(encoding="utf-8") + "\n\n\n  a\n b's aa XYZ 123 ... \n" * 50
    return BPETokenizer.train([text], 600)
