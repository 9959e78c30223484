"""Readers, against gzip, zstandard, pyarrow and json; cut points, against the tokenizers' patterns."""

import gzip
import json
import re
from contextlib import contextmanager

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
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": lambda content: zstandard.ZstdCompressor().compress(content)}


@contextmanager
def blocks_of(size):
    """Set the bytes that are read at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK_BYTES", size)
        patch.setattr(readers, "_COMPRESSED_BYTES", size)
        yield


@pytest.fixture(params=[1, 7, 1 << 20], ids=lambda size: f"blocks of {size}")
def block(request):
    with blocks_of(request.param):
        yield


def refusal(file, field="text"):
    with pytest.raises(UserError) as error:
        list(read_documents(file, field))
    assert str(file) in str(error.value)
    return str(error.value)


def texts_of(file, field="text"):
    return documents(read_documents(file, field))


def find(path):
    return find_files(str(path), "data.path")


def write_parquet(file, table, **options):
    pq.write_table(pa.table(table), file, **options)
    return file


# Find files


@pytest.fixture
def write_all(tmp_path):
    """Write files, and a folder with a suffix of texts."""

    def write(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("a")
        (tmp_path / "folder.txt").mkdir()
        return [tmp_path / name for name in names]

    return write


def test_a_folder_gives_its_sorted_files_of_known_suffixes_that_are_not_hidden(tmp_path, write_all):
    known = ["B.TXT", "a.md", "deep/d.parquet", "deep/er/c.jsonl", "e.txt.gz", "f.md.zst", "g.jsonl.GZ"]
    write_all("x.pdf", "y.gz", "noname", "z.txt.bak", ".hidden.txt", ".git/a.md", "deep/.cache/b.txt", *known)
    assert find(tmp_path) == [tmp_path / name for name in known]
    assert find(tmp_path / ".git") == [tmp_path / ".git/a.md"]  # a hidden folder that is named


def test_a_name_or_a_pattern_gives_the_files_that_match_it_sorted(tmp_path, monkeypatch, write_all):
    a, b, c, d, hidden, odd = write_all("a.txt", "b.txt", "c.py", "deep/er/d.txt", ".hidden.txt", "[odd] *name?.text")
    for file in (a, c, hidden, odd):
        assert find(file) == [file]
    assert find(f"{tmp_path}/*.txt") == [a, b]
    assert find(f"{tmp_path}/**/*.txt") == [a, b, d]
    assert find(f"{tmp_path}/[bc].*") == [b, c]
    monkeypatch.setenv("HOME", str(tmp_path / "deep"))
    assert find("~/er/d.txt") == find("~/*/*.txt") == find("~") == [d]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("missing.txt", "does not exist"), ("missing/*.txt", "matches no file"), ("pictures", "has no file")],
)
def test_a_path_without_files_raises_with_the_path(tmp_path, name, problem):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(b"a")
    with pytest.raises(UserError, match=re.escape(f"data.path={tmp_path / name} {problem}")):
        find(tmp_path / name)


# Formats


@pytest.mark.parametrize("packed", COMPRESS)
def test_every_line_of_json_lines_is_a_document(tmp_path, block, packed):
    texts = [TEXT, "", "two\nlines", "a\u2028b\x85c", "ascii", "😀" * 10]
    lines = [json.dumps({"id": i, "story": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    lines.append(r'{"story": "a\ud800b\udc00c\ud83d\ude00d\udc00\ud800é"}')
    texts.append("a\ufffdb\ufffdc😀d\ufffd\ufffdé")  # lone surrogates
    file = tmp_path / f"a.jsonl{packed}"
    for content in ("\n".join(lines), "\r\n".join(lines), "\n\n  \n" + "\n \n\n".join(lines) + "\n"):
        file.write_bytes(COMPRESS[packed](content.encode()))
        found = list(read_documents(file, "story"))
        assert [chunk.text for chunk in found] == texts
        assert all(chunk.first for chunk in found)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('{"title": "a", "body": "b", "year": 7}', ["title", "body"]),
        ('{"title": "a", "text": ["b"]}', ["title"]),
        ('"text"', ["no field"]),
        ("{", ["not JSON"]),
        ("[" * 100_000, ["not JSON"]),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_a_line_that_is_no_json_or_has_no_text_raises_with_its_number_and_the_fields_with_text(tmp_path, line, names):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
    message = refusal(tmp_path / "a.jsonl")
    assert "line 3:" in message
    assert "year" not in message
    assert all(name in message for name in names)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_every_row_of_parquet_is_a_document(tmp_path, kind):
    texts = [TEXT, "", "two\nlines"] + [f"row {i}" for i in range(1000)]
    file = write_parquet(
        tmp_path / "a.parquet", {"id": range(1003), "story": pa.array(texts).cast(kind)}, row_group_size=300
    )
    found = list(read_documents(file, "story"))
    assert [chunk.text for chunk in found] == texts
    assert all(chunk.first for chunk in found)


def test_a_column_without_text_raises_with_the_columns_with_text(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"title": ["a", "b"], "body": ["c", "d"], "other": [1, 2]})
    for field in ("text", "other"):
        message = refusal(file, field)
        assert "title, body" in message
        assert field in message
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
def test_a_truncated_empty_uncompressed_or_corrupted_file_with_a_compressed_suffix_raises(tmp_path, packed):
    text = " ".join(map(str, range(5000))).encode()
    compress = gzip.compress if packed == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    file, whole = tmp_path / f"a.txt{packed}", compress(text)
    half = len(whole) // 2
    corrupted = whole[:half] + bytes([whole[half] ^ 0x55]) + whole[half + 1 :]
    for content in (b"", b"plain text", whole + b"plain text after it", whole[:half], whole + whole[:half], corrupted):
        file.write_bytes(content)
        refusal(file)  # damaged, or not text


def test_damaged_and_compressed_parquet_raises(tmp_path):
    table, options = {"text": ["abcdefgh", *map(str, range(9))]}, {"compression": "none", "use_dictionary": False}
    whole = write_parquet(tmp_path / "a.parquet", table, **options).read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1], whole.replace(b"abcdefgh", b"abc\xffefgh")):
        (tmp_path / "a.parquet").write_bytes(content)
        refusal(tmp_path / "a.parquet")
    for packed in (".gz", ".zst"):
        (tmp_path / f"a.parquet{packed}").write_bytes(COMPRESS[packed](whole))
        refusal(tmp_path / f"a.parquet{packed}")


# Files that are not text


BAD = [b"\0", b"\xff", b"\xe4hnlich", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf"]


@settings(max_examples=120, deadline=None)
@given(
    UNICODE,
    st.sampled_from(BAD),
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
    with blocks_of(block):
        assert f"offset {offset:,};" in refusal(file)


@settings(max_examples=100, deadline=None)
@given(UNICODE, st.integers(1, 9), st.sampled_from(["a.txt", "a.py", "a", "a.md.gz", "a.TXT.ZST"]))
@example("\ufeffa\ufeff", 1, "a.txt")
@example("", 1, "a.md.gz")
@example(TEXT * 20, 1 << 20, "a.TXT.ZST")
def test_a_text_file_is_one_document_whatever_its_blocks_and_without_a_byte_order_mark(
    tmp_path_factory, text, block, name
):
    file = tmp_path_factory.mktemp("blocks") / name
    file.write_bytes(COMPRESS.get(file.suffix.lower(), bytes)(text.encode()))
    with blocks_of(block):
        assert texts_of(file) == [text.removeprefix("\ufeff")]


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["<|endoftext|>", r"\n\n", r"\t", "aa", "END"]),
    st.lists(st.text("aEND<|\n\r é9 ", max_size=20), max_size=5),
    st.integers(1, 30),
)
@example("<|endoftext|>", ["One day.\n", "\nTwo dogs.\n", "\n"], 1)  # as in TinyStories
@example("END", ["a b\n", "\nc"], 2)
def test_a_separator_divides_a_text_into_documents_without_the_line_breaks_around_them(separator, parts, size):
    actual = separator.replace(r"\n", "\n").replace(r"\t", "\t")
    text = actual.join(parts)
    with blocks_of(2 * size):
        found = list(text_chunks([text[i : i + size] for i in range(0, len(text), size)], separator))
    stripped = [part.strip("\r\n") for part in text.split(actual)]
    assert documents(found) == [part for part in stripped if part]


# Chunks


def test_a_text_without_a_cut_point_is_cut_at_the_maximum_length(monkeypatch):
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(readers, "_MAX_CHUNK_CHARS", 1000)
    lines = [f"{i}: a line of some words.\n" for i in range(50)]
    found = list(text_chunks(lines))
    assert len(found) > 10
    assert all(chunk.text.endswith("\n") for chunk in found)  # where there is one, it is cut there
    found = list(text_chunks(["1" * 100] * 35))
    assert "".join(chunk.text for chunk in found) == "1" * 3500
    assert [chunk.first for chunk in found] == [True] + [False] * (len(found) - 1)
    assert max(len(chunk.text) for chunk in found) < 1200


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_match_the_same_before_and_after_a_cut(name):
    pattern, cuts = regex.compile(PATTERNS[name]), 0
    for seen, unseen in zip(random_texts(4000), random_texts(4000, seed=1), strict=True):
        cut, text = cut_point(seen), seen + unseen  # a text is cut before the rest is read
        assert 0 <= cut < len(seen) or cut == 0
        assert pattern.findall(text) == pattern.findall(text[:cut]) + pattern.findall(text[cut:])
        cuts += cut > 0
    assert cuts > 400


@pytest.mark.parametrize(("text", "cut"), [("one two\nthree four", 8), ("one two three", 7), ("!\nthree", 2), ("", 0)])
def test_a_text_is_cut_after_a_line_break_or_before_a_space(text, cut):
    assert cut_point(text) == cut
