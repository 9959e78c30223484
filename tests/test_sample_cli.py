"""`scripts/sample.py`: stdout and stderr, JSON, scores, errors."""

import codecs
import gzip
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
import torch
import zstandard
from corpora import corpus_of, on_disk, rows
from pyarrow import parquet
from servers import make_instruct_folder
from small_runs import SCRIPTS

from minigpt.checkpoints.load import load_checkpoint, save_checkpoint
from minigpt.config import GPTConfig
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer, encode_prompt
from minigpt.device import find_device
from minigpt.generation import Step, score, stream
from minigpt.model import GPT
from minigpt.sample_cli import print_samples, read_prompt

SCRIPT = SCRIPTS / "sample.py"
ALPHABET = "".join(sorted("\n .,abcdefghijklmnopqrstuvwxyzé"))
BLOCK_SIZE = 32
WHOLE = "é€𝄞"  # characters of two, three and four bytes, no byte of which is in two of them


def trained(tokenizer: Tokenizer, seed: int = 0) -> GPT:
    """A model of random weights, large enough that every earlier token changes the logits."""
    torch.manual_seed(seed)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "tie_embeddings": False}
    model = GPT(GPTConfig(block_size=BLOCK_SIZE, vocab_size=tokenizer.vocab_size, **shape))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    return model


def chain(tokenizer: Tokenizer, follows: dict[int, int]) -> GPT:
    """A model that predicts one next token per token."""
    size = tokenizer.vocab_size
    shape = {"n_layer": 1, "n_head": 1, "head_dim": 2, "n_inner": 1, "n_embd": size, "tie_embeddings": False}
    model = GPT(GPTConfig(block_size=BLOCK_SIZE, vocab_size=size, position="none", bias=False, **shape))
    with torch.no_grad():
        for weight in (model.blocks[0].attention.out.weight, model.blocks[0].mlp.down.weight, model.lm_head.weight):
            weight.zero_()
        model.wte.weight.copy_(torch.eye(size))
        for before, after in follows.items():
            model.lm_head.weight[after, before] = 5.0
    return model


def in_turn(ids: Any) -> dict[int, int]:
    return {int(one): int(ids[(i + 1) % len(ids)]) for i, one in enumerate(ids)}


def saved(path: Path, model: GPT, tokenizer: Tokenizer) -> str:
    save_checkpoint(model, tokenizer, path)
    return str(path)


def printed(found: list[dict[str, Any]]) -> str:
    """The output for several samples without --json."""
    return "".join(f"── sample {i + 1} ──\n{one['prompt']}{one['text']}\n" for i, one in enumerate(found))


@pytest.fixture(scope="session")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of every kind of tokenizer."""
    folder = tmp_path_factory.mktemp("saves")
    char, byte = CharTokenizer(ALPHABET), ByteTokenizer()
    texts = ["the quick brown fox jumps over the lazy dog. " * 20, "wem gehört der café? " * 20]
    bpe, separated = BPETokenizer.train(texts, 280), BPETokenizer.train(texts, 280)
    separated.separated = True
    end = int(separated.separator[0])
    a, b, c = (int(separated.encode(letter)[0]) for letter in "abc")
    odd = BPETokenizer("bpe", [bytes([i]) for i in range(256)] + [b"cde", b"x\xc3"], {SEPARATOR: 258})
    models = {
        "char": (trained(char), char),
        "bpe": (trained(bpe), bpe),
        "multibyte": (chain(byte, in_turn([10, *WHOLE.encode()]) | {WHOLE.encode()[-1]: WHOLE.encode()[0]}), byte),
        "letters": (chain(char, in_turn(char.encode("\nabcdefghijklmnopqrstuvwxyz"))), char),
        "separated": (chain(separated, {a: b, b: c, c: end, end: a}), separated),
        "odd": (chain(odd, {ord("a"): 256, 256: ord("b"), ord("b"): 257, 257: ord("a")}), odd),
    }
    return {name: saved(folder / f"{name}.safetensors", *both) for name, both in models.items()}


@pytest.fixture
def sample(call: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Run the script in this process, in an empty folder: `sample(path, "--seed", 1, stdin=b"")`."""

    def run(*arguments: Any, stdin: bytes = b"", terminal: str = "") -> SimpleNamespace:
        """Run the script; `terminal` names the streams that are terminals."""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        for name in terminal.split():
            monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
        return call("sample.py", "--device", "cpu", *map(str, arguments))

    return run


def error(result: Any) -> str:
    """The error line; only the line with the checkpoint's name may precede it."""
    *before, line = result.stderr.splitlines()
    assert all(one.startswith("sampling from ") for one in before), result.stderr
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    return line


def samples(result: Any) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert result.returncode == 0, result.stderr
    return [json.loads(line, parse_constant=refuse) for line in result.stdout.splitlines()]


# Streams and processes


def test_text_is_streamed_in_complete_characters(saves, tmp_path):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, str(SCRIPT), "--device", "cpu", saves["multibyte"], "--max-new-tokens", "10000000"]
    with open(tmp_path / "stderr", "wb") as stderr:
        process = subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=stderr)
    text = os.read(process.stdout.fileno(), 1 << 16)
    assert len(text) < 4096  # not buffered
    for _ in range(100):
        text += os.read(process.stdout.fileno(), 1 << 16)
        text.decode()
    assert process.poll() is None
    assert (WHOLE * 200).startswith(text.decode()[:500])
    assert len(text) >= 200
    process.stdout.close()  # as `head` does
    assert process.wait(300) == 0
    assert (tmp_path / "stderr").read_text().splitlines() == [
        f"sampling from {saves['multibyte']} on cpu",
        "no prompt: starting from '\\n'",
    ]


def test_stdout_holds_only_the_text_and_stderr_the_speed(saves, sample):
    ran = sample(saves["letters"], "--prompt", "abc", "--max-new-tokens", 5)
    assert (ran.returncode, ran.stdout) == (0, "abcdefgh\n")
    first, speed = ran.stderr.splitlines()
    assert first == f"sampling from {saves['letters']} on cpu"
    assert re.fullmatch(r"5 tokens in \d+\.\d\d s, [\d,]+ tokens/s", speed)


def test_ctrl_c_prints_one_line_and_exits_with_code_130(saves, sample, monkeypatch):
    def interrupted(*arguments: Any, **options: Any) -> Iterator[Step]:
        yield from islice(stream(*arguments, **options), 5)
        raise KeyboardInterrupt

    monkeypatch.setattr("minigpt.sample_cli.stream", interrupted)
    result = sample(saves["letters"], "--prompt", "abc", "--num-samples", 2)
    assert (result.returncode, result.stdout) == (130, "── sample 1 ──\nabcdefgh")
    assert result.stderr.splitlines()[1:] == ["interrupted"]


# Control characters


OWNED = "a你\x1b]0;owned\x07\r\x9b2J\u202eb"


@pytest.fixture
def obeyed(tmp_path: Path) -> str:
    """A checkpoint in a folder with control characters in its name, whose model generates the same text."""
    tokenizer = CharTokenizer("".join(sorted(set(f"\n{OWNED}"))))
    follows = in_turn(tokenizer.encode("".join(dict.fromkeys(f"\n{OWNED}"))))
    return saved(tmp_path / OWNED / "x.safetensors", chain(tokenizer, follows), tokenizer)


@pytest.mark.parametrize(
    ("flags", "stdin"),
    [
        (["--max-new-tokens", "12", "--num-samples", "2"], b""),
        (["--max-new-tokens", "12", "--prompt", OWNED], b""),
        (["--device", OWNED], b""),
    ],
    ids=["samples", "prompt", "error"],
)
def test_no_control_character_reaches_a_terminal(flags, stdin, obeyed, sample):
    result = sample(obeyed, *flags, stdin=stdin, terminal="stdout stderr")
    text = result.stdout + result.stderr
    assert all(character.isprintable() or character == "\n" for character in text), text
    assert "你" in text  # as it is
    assert "Traceback" not in text


def test_control_characters_are_escaped_for_a_terminal_and_kept_for_a_pipe(obeyed, sample):
    text, signs = "a你\x1b]0;owned\x07\r\x9b", "a你␛]0;owned␇␍⟨U+009B⟩"
    arguments = [obeyed, "--prompt", "a", "--max-new-tokens", len(text) - 1, "--temperature", 0]
    assert sample(*arguments).stdout == f"{text}\n"
    assert sample(*arguments, terminal="stdout").stdout == f"{signs}\n"


def test_characters_missing_in_the_encoding_of_stdout_are_escaped(saves, monkeypatch):
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    options: dict[str, Any] = {"max_new_tokens": 1, "num_samples": 2, "stop": []}
    print_samples(*load_checkpoint(saves["multibyte"]), ("é你", [1, 2]), options, as_json=False, compare=None)
    assert latin.buffer.getvalue().startswith("\\u2500\\u2500 sample 1 \\u2500\\u2500\né\\u4f60".encode("latin-1"))


# Prompts


@pytest.mark.parametrize(("name", "beginning"), [("multibyte", r"'\n'"), ("separated", "'<|endoftext|>'")])
def test_the_start_token_of_an_empty_prompt_is_logged(name, beginning, saves, sample):
    for flags in ([], ["--prompt-file", "-"]):
        output = sample(saves[name], "--max-new-tokens", 3, *flags).stderr.splitlines()
        assert output[1] == f"no prompt: starting from {beginning}"
        assert len(output) == 3


def test_a_prompt_is_read_from_a_file_or_stdin(saves, sample, tmp_path):
    prompt = "a café,\nat noon"
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    typed = sample(saves["char"], "--prompt", prompt)
    assert typed.stdout.startswith(prompt)
    assert typed.stdout == sample(saves["char"], "--prompt-file", "prompt.txt").stdout
    assert typed.stdout == sample(saves["char"], "--prompt-file", "-", stdin=prompt.encode()).stdout


@pytest.mark.parametrize("option", ["--prompt-file", "--score"])
@pytest.mark.parametrize(
    ("file", "output"),
    [
        ("none.txt", "{option}=none.txt does not exist"),
        ("empty", "{option}=empty has no file with suffix .txt, "),
        ("~nobody-of-this-name/text.txt", "{option}=~nobody-of-this-name/text.txt does not exist"),
        ("latin.txt", "latin.txt is not UTF-8 text: bad byte at offset 3"),
        ("-", "{option}=- is not UTF-8 text: bad byte at offset 3"),
        ("broken.txt.gz", "broken.txt.gz is not a complete .gz file"),
        ("other.jsonl", "other.jsonl, line 1: no text in field text; the fields with text are story; set data.field="),
    ],
)
def test_an_unreadable_text_file_is_one_error_line(option, file, output, saves, sample, tmp_path):
    latin = "café".encode("latin-1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(latin)
    (tmp_path / "broken.txt.gz").write_bytes(gzip.compress(b"a fox")[:-4])
    (tmp_path / "other.jsonl").write_text('{"story": "a fox"}')
    result = error(sample(saves["char"], option, file, stdin=latin))
    assert result.startswith(f"error: {output.format(option=option)}")


@pytest.mark.parametrize("how", ["--prompt", "--prompt-file", "--score"])
def test_characters_missing_in_the_alphabet_are_named(how, saves, sample, tmp_path):
    (tmp_path / "text.txt").write_text("a Zebra, 7 …")
    output = error(sample(saves["char"], how, "a Zebra, 7 …" if how == "--prompt" else "text.txt"))
    assert output.startswith("error: the tokenizer has no id for '7', 'Z', '…'; its alphabet is the 31 characters ")


def test_truncation_of_a_long_prompt_is_logged(saves, sample):
    prompt = "the quick brown fox jumps over the lazy dog, and sleeps."
    whole = sample(saves["char"], "--prompt", prompt)
    end = sample(saves["char"], "--prompt", prompt[-BLOCK_SIZE:])
    assert whole.stderr.splitlines()[1] == "the prompt has 56 tokens; only the last 32 are read"
    assert "only the last" not in end.stderr
    assert whole.stdout == prompt[:-BLOCK_SIZE] + end.stdout


def test_a_lone_surrogate_in_a_prompt_becomes_the_replacement_character(saves, sample):
    for name in ("multibyte", "bpe"):
        (one,) = samples(sample(saves[name], "--prompt", "a\udcffb", "--max-new-tokens", 4, "--json"))
        assert (one["prompt"], len(one["tokens"])) == ("a\ufffdb", 4)
    output = error(sample(saves["char"], "--prompt", "a\udcffb"))
    assert output.startswith("error: the tokenizer has no id for '\ufffd'; ")


# Samples


@pytest.mark.parametrize("name", ["char", "bpe", "multibyte"])
def test_json_has_one_line_per_sample_with_the_printed_text(name, saves, sample):
    flags = [saves[name], "--prompt", "a fox", "--max-new-tokens", 25, "--num-samples", 2, "--seed", 3]
    found = samples(sample(*flags, "--json"))
    assert len(found) == 2
    assert sample(*flags).stdout == printed(found)
    _, tokenizer = load_checkpoint(saves[name])
    for one in found:
        assert set(one) == {"prompt", "text", "tokens", "logprobs", "reason", "tokens_per_second"}
        assert (one["prompt"], one["reason"], len(one["tokens"])) == ("a fox", "length", 25)
        assert one["text"] == tokenizer.decode(one["tokens"])
        assert one["tokens_per_second"] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_weights_give_text_and_nearly_the_score_of_float32(dtype, saves, sample):
    (one,) = samples(sample(saves["letters"], "--dtype", dtype, "--prompt", "ab", "--max-new-tokens", 4, "--json"))
    assert one["text"] == "cdef"
    flags = [saves["char"], "--score", "-", "--json"]
    small, exact = (
        samples(sample(*flags, "--dtype", name, stdin=b"the quick brown fox" * 5))[0]["nats_per_token"]
        for name in (dtype, "float32")
    )
    assert 0 < abs(small - exact) < 0.05 * exact


def test_an_incomplete_last_character_is_the_replacement_character(saves, sample):
    flags = [saves["multibyte"], "--max-new-tokens", 4]
    assert sample(*flags).stdout == "é\ufffd\n"
    (one,) = samples(sample(*flags, "--json"))
    assert one["text"] == "é\ufffd"


# Stopping


def test_output_ends_after_a_stop_string_within_a_token_or_over_several(saves, sample):
    over_several = ("a", "ebx", "cdebx", [256, ord("b"), 257])  # 257 is x and the first byte of a character
    for prompt, stop, text, tokens in (("a", "d", "cd", [256]), ("b", "x", "x", [257]), over_several):
        flags = [saves["odd"], "--prompt", prompt, "--stop", stop]
        assert sample(*flags).stdout == f"{prompt}{text}\n"
        (one,) = samples(sample(*flags, "--json"))
        assert (one["text"], one["reason"], one["tokens"], len(one["logprobs"])) == (text, "stop", tokens, len(tokens))


def test_line_breaks_tabs_and_backslashes_can_be_typed_in_every_shell(saves, sample):
    flags = [saves["letters"], "--temperature", 0]  # after z comes a line break
    (one,) = samples(sample(*flags, "--prompt", r"\nab", "--stop", r"\n", "--json"))
    assert (one["prompt"], one["text"]) == ("\nab", "cdefghijklmnopqrstuvwxyz\n")
    assert one["reason"] == "stop"
    typed = sample(saves["bpe"], "--prompt", r"a\tb\\n\é", "--json", "--max-new-tokens", 1)
    assert samples(typed)[0]["prompt"] == "a\tb\\n\\é"
    note = r"--prompt: \n is a line break, \t a tab, \\ a backslash; --prompt-file takes a text as it is"
    assert typed.stderr.splitlines()[1] == note
    exact = sample(saves["bpe"], "--prompt-file", "-", "--json", "--max-new-tokens", 1, stdin=rb"a\tb")
    assert samples(exact)[0]["prompt"] == r"a\tb"
    assert note not in exact.stderr


def test_a_stop_string_that_the_tokenizer_cannot_produce_is_refused(saves, sample):
    output = error(sample(saves["char"], "--stop", "END"))
    assert output.startswith(
        "error: --stop must be a text that the tokenizer can produce, got 'END': the tokenizer has no"
    )
    assert sample(saves["bpe"], "--stop", "END", "--max-new-tokens", 1).returncode == 0


def test_special_tokens_can_be_typed(saves, sample):
    flags = ["--json", "--temperature", 0, "--max-new-tokens", 9]
    (one,) = samples(sample(saves["separated"], "--prompt", SEPARATOR, *flags))
    assert one["text"] == "abc"
    (one,) = samples(sample(saves["separated"], "--prompt", f"b{SEPARATOR}", *flags))
    assert one["text"] == "abc"
    model, tokenizer = load_checkpoint(saves["separated"])
    tokenizer.separated = False  # the corpus has none
    saved(Path("plain.safetensors"), model, tokenizer)
    (one,) = samples(sample("plain.safetensors", "--prompt", "a", "--stop", SEPARATOR, *flags))
    assert (one["text"], one["reason"]) == ("bc", "stop")
    refused = error(sample("plain.safetensors", "--prompt", "a", "--stop", f"b{SEPARATOR}", *flags))
    assert refused.startswith("error: --stop must be a text that the tokenizer can produce, got ")
    plain = sample("plain.safetensors", "--prompt", f"{SEPARATOR}a", *flags)
    assert plain.stderr.splitlines()[1] == f"{SEPARATOR} in the prompt is encoded as ordinary text"


def test_a_sample_ends_after_the_separator_of_documents(saves, sample):
    (one,) = samples(sample(saves["separated"], "--prompt", "a", "--json"))
    _, tokenizer = load_checkpoint(saves["separated"])
    assert (one["text"], one["reason"], one["tokens"][-1]) == ("bc", "stop", int(tokenizer.separator[0]))


# Scores

TEXT = "a fox, a café.\n"


@pytest.mark.parametrize("name", ["char", "bpe", "multibyte", "separated"])
def test_a_score_is_the_log_likelihood_of_the_text(name, saves, sample):
    (found,) = samples(sample(saves[name], "--score", "-", "--json", stdin=TEXT.encode()))
    model, tokenizer = load_checkpoint(saves[name])
    ids = tokenizer.encode(TEXT).tolist()
    rated = score(model, ids, tokenizer.start.tolist())
    values = {"token_ids": ids, "logprobs": rated.logprobs.tolist(), "ranks": rated.ranks.tolist()}
    values |= {"tokens": len(ids), "bytes": 16, "nats": rated.nats, "nats_per_token": rated.nats / len(ids)}
    assert found == values | {"bits_per_byte": rated.nats / math.log(2) / 16}


def test_a_score_is_printed_as_a_table(saves, sample, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    result = sample(saves["char"], "--score", "text.txt")
    (found,) = samples(sample(saves["char"], "--score", "text.txt", "--json"))
    assert result.returncode == 0
    assert result.stderr == f"sampling from {saves['char']} on cpu\n"
    output = dict(re.split(r"  +", line, maxsplit=1) for line in result.stdout.splitlines())
    for name in ("tokens", "bytes", "nats", "nats_per_token", "bits_per_byte"):
        assert float(output.pop(name.replace("_", " "))) == pytest.approx(found[name], abs=1e-4)
    first = sum(rank == 0 for rank in found["ranks"])
    assert output == {"top-1 accuracy": f"{first} of 15 tokens ({first / 15:.1%})"}


DOCUMENTS = ["a fox, a café.\n", "", "the lazy dog", "a fox"]
FILES = {
    "a.jsonl": rows(DOCUMENTS).encode(),
    "a.jsonl.gz": gzip.compress(rows(DOCUMENTS).encode()),
    "a.txt": codecs.BOM_UTF8 + TEXT.encode(),
    "a.txt.gz": gzip.compress(codecs.BOM_UTF8 + TEXT.encode()),
    "a.md.zst": zstandard.ZstdCompressor().compress(TEXT.encode()),
    "texts/a.txt": TEXT.encode(),
    "texts/deep/b.jsonl": rows(DOCUMENTS).encode(),
}


@pytest.mark.parametrize("path", [*list(FILES)[:5], "a.parquet", "texts", "**/*.jsonl"])
@pytest.mark.parametrize("name", ["char", "multibyte", "separated"])
def test_a_score_and_a_prompt_read_files_as_training_does(name, path, saves, sample, tmp_path):
    for file, content in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), tmp_path / "a.parquet")
    _, tokenizer = load_checkpoint(saves[name])
    corpus = corpus_of(tmp_path / "a.txt", tmp_path / "data", tokenizer.to_dict(), val_path=str(tmp_path / path))
    (found,) = samples(sample(saves[name], "--score", path, "--json"))
    assert found["token_ids"] == on_disk(corpus)[1]
    assert found["bytes"] == corpus.val.bytes
    assert found["bits_per_byte"] == pytest.approx(found["nats"] / math.log(2) / corpus.val.bytes)
    (one,) = samples(sample(saves[name], "--prompt-file", path, "--json", "--max-new-tokens", 1))
    assert encode_prompt(tokenizer, one["prompt"]).tolist() == on_disk(corpus)[1]


def test_a_separator_within_a_document_of_a_prompt_is_ordinary_text(saves, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"a{SEPARATOR}b"}))
    _, tokenizer = load_checkpoint(saves["separated"])
    text, ids = read_prompt(tokenizer, None, str(tmp_path / "a.jsonl"), {"field": "text", "separator": ""})
    assert (text, ids) == (f"a{SEPARATOR}b", tokenizer.encode(text).tolist())


def test_a_byte_order_mark_on_stdin_is_left_out(saves, sample):
    texts = (codecs.BOM_UTF8 + TEXT.encode(), TEXT.encode())
    marked, plain = (sample(saves["char"], "--score", "-", stdin=text).stdout for text in texts)
    assert marked == plain != ""
    assert sample(saves["letters"], "--prompt-file", "-", stdin=codecs.BOM_UTF8 + b"abc").stdout.startswith("abcd")


# Invalid input


BAD_FLAGS = {
    "--max-new-tokens 0": "--max-new-tokens must be an integer ≥ 1, got 0",
    "--temperature nan": "--temperature must be a finite number ≥ 0, got nan",
    "--top-k 0": "--top-k must be an integer ≥ 1, got 0",
    "--top-p 1.01": "--top-p must be in (0, 1], got 1.01",
    "--min-p 2": "--min-p must be in [0, 1], got 2.0",
    "--repetition-penalty 0": "--repetition-penalty must be in [0.01, 100], got 0.0",
    "--seed -1": "--seed must be an integer ≥ 0, got -1",
    "--stop=": "--stop must be a list of non-empty strings and token ids, got ['']",
    "--prompt a --prompt-file -": "--prompt and --prompt-file exclude each other; give one of them",
    "--score -": "--score must be a non-empty text",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_a_bad_setting_is_one_error_line(flags, saves, sample):
    assert error(sample(saves["char"], *flags.split())) == f"error: {BAD_FLAGS[flags]}"


def test_settings_are_checked_without_importing_torch():
    code = "import runpy, sys\ntry:\n    runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit as end:\n"
    code += "    print(end.code, sorted({'torch', 'numpy', 'lightning', 'hydra', 'tiktoken'} & {*sys.modules}))"
    command = [sys.executable, "-c", f"import sys; sys.argv = {[str(SCRIPT), '--top-p', '2']}\n{code}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "2 []\n"
    assert ran.stderr == "error: --top-p must be in (0, 1], got 2.0\n"


def test_the_fastest_device_of_the_machine_is_the_default(saves, sample, monkeypatch):
    fastest = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    output = sample(saves["char"], "--device", "auto", "--max-new-tokens", 2)
    assert output.returncode == 0
    assert re.fullmatch(rf"sampling from .* on {fastest}(:0)?", output.stderr.splitlines()[0])
    for cuda, mps, wanted in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=cuda: there)
        monkeypatch.setattr("torch.backends.mps.is_available", lambda there=mps: there)
        assert find_device("auto") == wanted


def test_an_unavailable_device_is_refused(saves, sample, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    for device in ("cuda", "mps", "nonsense"):
        output = error(sample(saves["char"], f"--device={device}"))
        assert re.match(rf"error: --device must be one of .*\bcpu\b.*, got {device}".strip() + "$", output)


def test_a_chat_answers_the_prompt_with_the_template_of_the_folder(
    sample: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_instruct_folder(tmp_path / "instruct")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hello\n"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, ids.size(1) :]
    settings = ("--temperature", 0, "--max-new-tokens", 30)
    answered = sample(folder, "--chat", "--prompt", "Hello\n", *settings)
    assert answered.stdout == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    raw = sample(folder, "--prompt", "Hello\n", *settings)
    assert raw.stdout.startswith("Hello\n")
    assert "has a chat template, which is not applied to the prompt; set --chat" in raw.stderr
    (folder / "chat_template.jinja").unlink()
    for refused, message in (
        ([], "--chat needs a chat template, and "),
        (["--score", "-"], "--chat cannot be combined"),
    ):
        found = sample(folder, "--chat", *refused)
        assert found.returncode == 2
        assert found.stderr.splitlines()[-1].startswith(f"error: {message}")
