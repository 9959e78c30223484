"""Readers, against gzip, zstandard, pyarrow and json; cut points, against the tokenizers' patterns."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import re
import socket
import sys
import tarfile
import zipfile

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
import zstandard
from corpora import ROOT, documents, prepare, random_texts, sha256, texts_on_disk
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

from minigpt.data import readers
from minigpt.data.readers import (
    cut_point,
    find_files,
    read_documents,
    read_files,
    read_texts,
    text_chunks,
)
from minigpt.data.tokenizer import PATTERNS
from minigpt.runs.run_dir import PLAN
from minigpt.sweeps.report import RUNS
from minigpt.sweeps.report import TEXT as TEXT_REPORT
from minigpt.utils.errors import UserError

UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
TEXT = "To be, or not to be:\r\nthat is the question. Ünï©ödé 漢字 😀\n\n"
AS_READ = TEXT.replace("\r\n", "\n")
COMPRESS = {
    **{
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    },
    **{".bz2": bz2.compress, ".xz": lzma.compress},
}


def read_with_blocks(size, read):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK_BYTES", size)
        patch.setattr("minigpt.extras.corpora.compressed._COMPRESSED_BYTES", size)
        return list(read())


def refusal(file, field="text", block=1 << 20):
    with pytest.raises(UserError) as error:
        read_with_blocks(block, lambda: read_documents(file, field))
    assert str(file) in str(error.value)
    return str(error.value)


def find(path):
    return find_files(str(path), "data.path")


def test_a_folder_a_name_or_a_pattern_gives_its_files_sorted(tmp_path, monkeypatch):
    known = [
        "B.TXT",
        "a.md",
        "deep/d.parquet",
        "deep/er/c.jsonl",
        "e.txt.gz",
        "f.md.zst",
        "g.jsonl.GZ",
    ]
    others = [
        "x.pdf",
        "y.gz",
        "t.csv",
        "z.txt.bak",
        "[odd] *name?.text",
        ".hidden.txt",
        ".git/a.md",
        "deep/.cache/b.txt",
    ]
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
    for name, problem in {
        "no.txt": "does not exist",
        "*.tsv": "matches no file",
        "folder.txt": "has no file",
    }.items():
        refused(re.escape(f"data.path={tmp_path / name} {problem}"), find, tmp_path / name)


@pytest.mark.parametrize("block", [1, 1 << 20])
@pytest.mark.parametrize("packed", COMPRESS)
def test_every_line_of_json_lines_is_a_document_and_concatenated_frames_are_one_file(
    tmp_path, block, packed
):
    texts = [TEXT, "", "two\rlines", "a\u2028b\x85c", "ascii", "😀" * 10]
    lines = [
        json.dumps({"id": i, "story": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)
    ]
    lines.append(r'{"story": "a\ud800b\udc00c\ud83d\ude00d\udc00\ud800é"}')
    texts.append("a\ufffdb\ufffdc😀d\ufffd\ufffdé")  # lone surrogates
    texts[0], texts[2] = AS_READ, "two\nlines"
    file = tmp_path / f"{['a.jsonl', 'a.ndjson', 'a.jsonlines'][len(packed) % 3]}{packed}"
    for content in (
        "\n".join(lines),
        "\r\n".join(lines),
        "\n\n  \n" + "\n \n\n".join(lines) + "\n",
    ):
        parts = content[:9], "", content[9:50], content[50:], ""
        file.write_bytes(b"".join(COMPRESS[packed](part.encode()) for part in parts))
        assert read_with_blocks(block, lambda: read_documents(file, "story")) == [
            (text, True) for text in texts
        ]


def test_a_line_that_is_no_json_or_has_no_text_raises_with_its_number_and_the_fields_with_text(
    tmp_path,
):
    for line, problem in {
        '{"title": "a", "body": "b", "year": 7}': "no text in field text; the fields with text are title, body;",
        '"text"': "no text in field text; there is no field with text;",
        '{"text": 7, "body": "b"}': "field text holds int, not text; the fields with text are body;",
        "{": "not JSON",
        "[" * 100_000: "not JSON",
    }.items():
        (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
        assert f"line 3: {problem}" in refusal(tmp_path / "a.jsonl")


KINDS = (pa.string(), pa.large_string(), pa.string_view())
INDICES = (pa.int8(), pa.int16(), pa.int32(), pa.uint8())


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pa.dictionary(index, pa.string()) for index in INDICES)], ids=str
)
def test_every_row_of_parquet_is_a_document(tmp_path, kind):
    texts = [TEXT, "", "two\rlines", *(f"row {i % 100}" for i in range(1000))]
    table, file = (
        {"id": range(len(texts)), "story": pa.array(texts).cast(kind)},
        tmp_path / "a.parquet",
    )
    pq.write_table(pa.table(table), file, row_group_size=300)
    assert list(read_documents(file, "story")) == [
        (text, True) for text in [AS_READ, "", "two\nlines", *texts[3:]]
    ]
    for field in ("text", "id"):
        assert f"no text in column {field}; the columns with text are story;" in refusal(
            file, field
        )


def test_categories_of_pandas_are_texts(tmp_path):
    texts, file = [f"text {i % 300}" for i in range(900)], tmp_path / "a.parquet"
    pd.DataFrame({"text": pd.Categorical(texts)}).to_parquet(file, row_group_size=400)
    assert pq.read_schema(file).field("text").type.index_type == pa.int16()
    assert documents(read_files([file], "text")) == texts


def test_rows_with_null_are_left_out_and_counted_once_in_all_formats(tmp_path, capsys):
    texts, files = ["one", None, "", None, "two"], [tmp_path / "a.jsonl", tmp_path / "a.parquet"]
    files[0].write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
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
    file.write_bytes(
        COMPRESS[".gz" if suffix.endswith(".gz") else ""](
            f"\ufeff{content.getvalue()}\r\n".encode()
        )
    )
    assert read_with_blocks(block, lambda: read_documents(file, "story")) == [
        (t, True) for t in [AS_READ, *texts[1:]]
    ]
    assert (
        f"{file}, line 5: no text in column text; the columns with text are id, story;"
        in refusal(file)
    )


def test_a_row_of_a_table_with_another_number_of_cells_or_open_quotes_raises_with_its_line(
    tmp_path,
):
    file = tmp_path / "a.csv"
    for row in ("only one", "one, two, three", '"a" b,c', '"open'):
        file.write_text(f"id,text\n1,fine\n{row}\n", encoding="utf-8")
        assert re.search("a.csv, near line [23]: .*as .txt the file is one text", refusal(file))


@pytest.mark.parametrize("packed", [".gz", ".zst", ".bz2", ".xz"])
def test_a_damaged_or_uncompressed_file_with_a_compressed_suffix_raises(tmp_path, packed):
    file, whole = (
        tmp_path / f"a.txt{packed}",
        COMPRESS[packed](" ".join(map(str, range(5000))).encode()),
    )
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
    file.write_bytes(
        gzip.compress(b"To be, ") + bytes(100) + gzip.compress(b"or not") + bytes(1000)
    )
    with gzip.open(file) as reference:
        assert reference.read() == b"To be, or not"
    assert (
        "".join(documents(read_with_blocks(block, lambda: read_documents(file, "text"))))
        == "To be, or not"
    )


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
    text, file = actual.join(parts), tmp_path_factory.mktemp("blocks") / name
    file.write_bytes(COMPRESS.get(file.suffix.lower(), bytes)(text.encode()))
    found = documents(read_with_blocks(block, lambda: read_documents(file, "text", separator)))
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    parts = (
        [part for one in text.split(actual) if (part := one.strip("\n"))] if separator else [text]
    )
    assert found == parts


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
    text, actual = "".join(parts), separator.replace(r"\n", "\n")
    blocks = [text[begin : begin + block] for begin in range(0, len(text), block)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("_BLOCK_BYTES", 2 * chunk),
            ("_MAX_CHUNK_CHARS", chunk),
            ("_CUT_WINDOW", chunk),
        ):
            patch.setattr(readers, name, value)
        chunks = list(readers.text_chunks(blocks, separator))
    assert all(chunk.text for chunk in chunks)
    assert documents(chunks) == [
        stripped for one in text.split(actual) if (stripped := one.strip("\n"))
    ]


@pytest.mark.parametrize("text", ["\nb", "b\n", "b\nb"])
def test_a_megabyte_of_line_breaks_is_no_border_of_documents(tmp_path, text):
    parts = ["One day.", text.replace("\n", "\n" * (5 << 18)), "The end."]
    (tmp_path / "val.txt").write_text("Another one.")
    corpus = prepare(
        "<|>".join(parts), tmp_path, "byte", separator="<|>", val_path=f"{tmp_path}/val.txt"
    )
    assert texts_on_disk(corpus)[0] == "\n".join(part.strip("\n") for part in parts)
    assert corpus.train.documents == 3


def test_what_would_be_trained_on_as_noise_is_refused_with_a_way_out(tmp_path):
    wide, rows = tmp_path / "wide.txt", tmp_path / "rows.json"
    for name in ("utf-16", "utf-16-be"):
        wide.write_bytes(
            "To be".encode(name) if name == "utf-16" else codecs.BOM_UTF16_BE + "To be".encode(name)
        )
        assert "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8" in refusal(wide)
    for text in (' [\n "a", "b"]', '["a"]', "[1]"):
        rows.write_text(text, encoding="utf-8")
        assert "rows.json holds JSON, whose syntax would be trained on; make it .jsonl" in refusal(
            rows
        )
    rows.write_text('{\n  "name": "a package"\n}')  # as a file of source code
    assert documents(read_documents(rows, "text")) == [rows.read_text(encoding="utf-8")]


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
        assert (
            f"{file} holds JSON, whose syntax would be trained on; make it .jsonl, with an object"
            in refusal(file)
        )
        # As a text
        assert documents(read_documents(file, "text", "<|endoftext|>"))[0].strip()[0] in "[{"


@pytest.mark.parametrize("text", [*SEVERAL, '{"text": "one row"}', '["a", "b"]'])
def test_rows_of_json_on_standard_input_are_refused(text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    with pytest.raises(UserError, match="--score=- holds JSON, whose syntax would be trained on"):
        list(read_texts("-", "--score"))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "{",
            "[",
            "",
            "{\n}\n{\n}",
            "[ACT I] {aside}",
            "[1] a footnote\n[2] another\n",
            "{Enter} [Exit]\n{Enter}",
        ),
        *(
            "[[link]] text",
            "[x](y)\n[z](w)",
            '["so to speak"] he said',
            "{{template}}",
            '{ "quoted" }',
            "{'a': 1}",
        ),
        *("{\n\\bf x\n}\n{\n\\it y\n}", '{\n"Hello!"\n}\n{\n"Bye!"\n}', '["Ann", 10:00] Hello'),
    ],
)
def test_a_text_that_begins_with_a_bracket_is_a_text(tmp_path, text):
    for name in ("a.txt", "a.py", "a"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert documents(read_documents(tmp_path / name, "text")) == [text]


def archives(folder):
    """Files that hold a text in another format, by what their error says."""
    text = folder / "inside.txt"
    text.write_text("To be, or not to be")
    with tarfile.open(folder / "tar", "w") as tar:
        tar.add(text)
    with zipfile.ZipFile(folder / "zip", "w") as archive:
        archive.write(text)
    packed = {"gzip; end its name with .gz": ".gz", "bzip2; end its name with .bz2": ".bz2"}
    packed |= {"xz; end its name with .xz": ".xz", "zstd; end its name with .zst": ".zst"}
    found = {kind: COMPRESS[suffix](b"To be") for kind, suffix in packed.items()}
    pq.write_table(pa.table({"text": ["To be"]}), folder / "table")
    return found | {
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


def test_files_of_a_folder_that_are_skipped_are_counted(tmp_path, capsys):
    for name in ("a.txt", "b.html", "c.html", "LICENSE", ".hidden"):
        (tmp_path / name).write_text("a")
    find(tmp_path)
    assert (
        f"3 files of {tmp_path} are skipped (.html, no suffix); a pattern such as"
        in capsys.readouterr().err
    )
    find(tmp_path / "a.txt")
    assert capsys.readouterr().err == ""


def test_linked_folders_are_followed_without_end_and_a_file_is_read_once(tmp_path):
    texts, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for folder in (texts / "real", elsewhere / "deep"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(folder.name, encoding="utf-8")
    links = {
        "z": elsewhere,
        "again": elsewhere,
        "real/up": texts,
        "real/self": texts / "real",
        "deep": elsewhere / "deep",
    }
    links |= {"real/b.txt": texts / "real/a.txt", "c.txt": elsewhere / "deep/a.txt"}
    for name, target in links.items():
        (texts / name).symlink_to(target)
    (elsewhere / "deep/down").symlink_to(texts)
    for path in (
        texts,
        f"{texts}/**/*.txt",
        f"{texts}/**",
        f"{texts}/**/**/[ab].txt",
        [str(texts), f"{texts}/real"],
    ):
        files = find_files(path if isinstance(path, list) else str(path), "data.path")
        assert sorted(os.path.realpath(file) for file in files) == sorted(
            os.path.realpath(file) for file in (texts / "real/a.txt", elsewhere / "deep/a.txt")
        )
    # Below again and z
    assert [file.read_text(encoding="utf-8") for file in find(f"{texts}/*/deep/*.txt")] == ["deep"]


@pytest.mark.parametrize(
    "pattern", ["**/*.txt", "a/**/*.txt", "*/**/c/*.txt", "a/b/**", "**/b/**/*", "**", "a**/*.txt"]
)
def test_a_pattern_gives_the_files_of_glob(tmp_path, monkeypatch, pattern):
    for name in (
        "x.txt",
        "a/x.txt",
        "a/b/y.txt",
        "a/b/c/z.txt",
        "ab/c/z.txt",
        "a/.h/x.txt",
        ".h/x.txt",
        "a/b/.h.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    monkeypatch.chdir(tmp_path)
    expected = sorted(
        file for file in map(readers.Path, readers.glob(pattern, recursive=True)) if file.is_file()
    )
    assert find(pattern) == expected
    assert find(tmp_path / pattern) == [tmp_path / file for file in expected]


def test_a_broken_link_is_told_apart_from_a_missing_file(tmp_path, capsys):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    refused(
        r"data\.path=.*a\.txt is a broken link to .*gone\.txt; give a file that exists",
        find,
        tmp_path / "a.txt",
    )
    for path in (tmp_path, tmp_path / "*.txt"):
        refused(
            r"no file.*; 1 files of .* are skipped \(broken link, FIFO or device\)$", find, path
        )
    (tmp_path / "b.txt").write_text("b")
    assert find(tmp_path) == find(tmp_path / "*.txt") == [tmp_path / "b.txt"]
    assert capsys.readouterr().err.count("1 files of") == 2


def test_fifos_and_sockets_in_a_folder_are_skipped_and_never_opened(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo("fifo.txt")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket.md")
        for path in (tmp_path, tmp_path / "*"):
            assert documents(read_texts(str(path), "data.path")) == ["a"]
            assert "2 files of" in (warning := capsys.readouterr().err)
            assert "(broken link, FIFO or device)" in warning


def test_the_output_of_runs_and_preparations_is_no_text_of_a_folder(tmp_path, capsys, monkeypatch):
    output = [
        "runs/x/log.txt",
        "runs/x/samples.txt",
        "runs/x/wandb/files/a.md",
        "runs/s/sweep.md",
        "runs/s/0/log.txt",
    ]
    output += [
        "data/tinyshakespeare.txt",
        "data/stdin-0123456789abcdef.txt",
        "data/tokens/a.txt",
        "data/tiktoken/b.md",
    ]
    output += [
        "data/tinyshakespeare-stand-in-0123456789ab.txt",
        "data/stdin-0123456789abcdef-0123456789ab.txt",
    ]
    texts = [
        "a.txt",
        "data/mine.txt",
        "data/stdin-my-notes.txt",
        "data/tokens.txt",
        "log.txt",
        "samples.txt",
        "other/tokens/a.txt",
        "runs/notes.md",
    ]
    for name in [
        *output,
        *texts,
        "runs/x/.hydra/a",
        "runs/x/metrics.csv",
        "runs/s/sweep.json",
        "other/.hydra/b",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    monkeypatch.chdir(tmp_path)
    for path in (".", "**/*.[tm][xd]*", str(tmp_path)):
        assert {os.path.relpath(file, tmp_path) for file in find(path)} == {*texts}
        n_skipped = len(output) + (2 if "*" not in path else 0)  # metrics.csv and sweep.json
        assert (
            f" {n_skipped} files of {path} are skipped (of earlier commands)"
            in capsys.readouterr().err
        )
    assert find("data") == [readers.Path(name) for name in texts[1:4]]
    for path in ("runs/x/samples.txt", output[6], "**/tinyshakespeare.txt", "runs/*/samples.txt"):
        assert len(find(path)) == 1
    refused(
        r"=runs/x has no file with suffix.*; 4 files of runs/x are skipped \(of earlier",
        find,
        "runs/x",
    )


def test_a_run_resumes_on_a_folder_that_holds_its_own_output(train, text, tmp_path, capsys):
    (tmp_path / "my.txt").write_bytes(text.read_bytes())
    options = (f"data.path={tmp_path}", "eval_every=5", "callbacks.samples.max_new_tokens=3")
    first = train(*options, "max_steps=5").summary
    second = train(*options, "max_steps=10", "resume=auto").summary
    assert (
        (second["steps"], second["corpus_sha256"])
        == (10, first["corpus_sha256"])
        == (10, sha256(text.read_bytes()))
    )
    assert {file.name for file in (tmp_path / "run").glob("*.txt")} == {"log.txt", "samples.txt"}
    assert f" files of {tmp_path} are skipped (of earlier commands)" in capsys.readouterr().err
    assert ({PLAN} in readers._RUN_MARKS, {RUNS, TEXT_REPORT} in readers._RUN_MARKS) == (
        True,
        True,
    )  # of sweeps


def test_the_readme_of_a_clone_is_no_text_of_its_data_folder(monkeypatch):
    monkeypatch.chdir(ROOT)
    refused(r"=data/R\*\.md matches no file.*\(of earlier commands\)", find, "data/R*.md")
    assert find("data/README.md") == [readers.Path("data/README.md")]


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
    file.write_text(
        "".join(f"{json.dumps(row, ensure_ascii=False)}\r\n" for row in rows),
        newline="",
        encoding="utf-8",
    )
    assert documents(read_with_blocks(10, lambda: read_documents(file, "text"))) == [
        rows[0]["text"],
        "b\n",
        "",
    ]
    assert sum(read) == 0


def test_a_text_is_cut_where_it_can_be_cut_or_else_at_the_maximum_length(monkeypatch):
    monkeypatch.setattr(readers, "_MAX_CHUNK_CHARS", 1000)
    found = read_with_blocks(
        100, lambda: text_chunks(f"{i}: a line of some words.\n" for i in range(50))
    )
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
