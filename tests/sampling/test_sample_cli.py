"""`scripts/sample.py`: stdout and stderr, JSON, scores, errors."""

import codecs
import io
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import corpus_of, on_disk, rows
from models import make_model
from servers import make_instruct_folder
from small_runs import SCRIPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from minigpt.checkpoints.load import load_checkpoint, save_checkpoint
from minigpt.data import readers
from minigpt.data.readers import read_texts
from minigpt.data.tokenizer import (
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    encode_prompt,
)
from minigpt.runs.callbacks.samples import sample_text
from minigpt.sampling.generation import generate, score
from minigpt.sampling.sample_cli import read_prompt
from minigpt.training.precision import find_device

SCRIPT = SCRIPTS / "sample.py"
BLOCK_SIZE = 32
WHOLE = "é€𝄞"  # characters of two, three and four bytes, no byte of which is in two of them
TEXT = "a fox, a café.\n"


def chain(tokenizer, ids, again=0):
    """A model that predicts the next of these ids after each, and after the last that with index `again`."""
    size = tokenizer.vocab_size
    shape = {
        "n_layer": 1,
        "n_head": 1,
        "head_dim": 2,
        "n_inner": 1,
        "n_embd": size,
        "tie_embeddings": False,
    }
    model = make_model(
        std=0, block_size=BLOCK_SIZE, vocab_size=size, position="none", bias=False, **shape
    )
    with torch.no_grad():
        model.wte.weight.copy_(torch.eye(size))
        model.lm_head.weight[[*ids[1:], ids[again]], [*ids]] = 5.0
    return model


@pytest.fixture(scope="session")
def saves(tmp_path_factory):
    """Checkpoints of every kind of tokenizer."""
    folder = tmp_path_factory.mktemp("saves")
    char, byte = CharTokenizer("".join(sorted("\n .,abcdefghijklmnopqrstuvwxyzé"))), ByteTokenizer()
    texts = ["the quick brown fox jumps over the lazy dog. " * 20, "wem gehört der café? " * 20]
    bpe, separated = BPETokenizer.train(texts, 280), BPETokenizer.train(texts, 280)
    separated.separated = True
    odd = BPETokenizer(
        "bpe", [bytes([i]) for i in range(256)] + [b"cde", b"x\xc3"], {SEPARATOR: 258}
    )
    drawn = {"std": 0.3, "block_size": BLOCK_SIZE, "n_embd": 32, "tie_embeddings": False}
    models = {
        "char": (make_model(vocab_size=char.vocab_size, **drawn), char),
        "bpe": (make_model(vocab_size=bpe.vocab_size, **drawn), bpe),
        "padded": (make_model(vocab_size=512, **drawn), char),
        "multibyte": (chain(byte, [10, *WHOLE.encode()], again=1), byte),
        "letters": (chain(char, char.encode("\nabcdefghijklmnopqrstuvwxyz")), char),
        "separated": (
            chain(separated, [*separated.encode("abc"), *separated.separator]),
            separated,
        ),
        "odd": (chain(odd, [ord("a"), 256, ord("b"), 257]), odd),
    }
    for name, both in models.items():
        save_checkpoint(*both, folder / f"{name}.safetensors")
    return {name: str(folder / f"{name}.safetensors") for name in models}


@pytest.fixture
def sample(call, monkeypatch):
    def run(*arguments, stdin=b"", terminal=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        for name in terminal.split():
            monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
        return call("sample.py", "--device", "cpu", *map(str, arguments))

    return run


def error(result):
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert re.fullmatch(r"(sampling from .*\n)?.*\n", result.stderr)
    return result.stderr.splitlines()[-1]


def samples(result):
    assert result.returncode == 0, result.stderr
    assert "NaN" not in result.stdout  # which is not JSON
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_text_is_streamed_in_complete_characters(saves, tmp_path):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cpu",
        saves["multibyte"],
        "--max-new-tokens",
        "10000000",
    ]
    with open(tmp_path / "stderr", "wb") as stderr:
        process = subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=stderr)
    text = b""
    for _ in range(100):
        text += (read := os.read(process.stdout.fileno(), 1 << 16))
        text.decode()
        assert text != read or len(read) < 4096  # not buffered
    assert process.poll() is None
    assert (WHOLE * 200).startswith(text.decode()[:500])
    process.stdout.close()  # as `head` does
    assert process.wait(300) == 0
    logged = f"sampling from {saves['multibyte']} on cpu\nno prompt: starting from '\\n'\n"
    assert (tmp_path / "stderr").read_text(encoding="utf-8") == logged


def test_control_characters_are_escaped_for_a_terminal_and_kept_for_a_pipe(sample, tmp_path):
    text, signs = "a你\x1b]0;owned\x07\r\x9b2J\u202eb", "a你␛]0;owned␇␍⟨U+009B⟩2J⟨U+202E⟩b"
    tokenizer = CharTokenizer("".join(sorted(set(f"\n{text}"))))
    model = chain(tokenizer, tokenizer.encode("".join(dict.fromkeys(f"\n{text}"))))
    save_checkpoint(model, tokenizer, path := tmp_path / text / "x.safetensors")
    flags = [path, "--prompt", "a", "--max-new-tokens", len(text) - 1, "--temperature", 0]
    assert sample(*flags).stdout == f"{text}\n"
    assert sample(*flags, terminal="stdout").stdout == f"{signs}\n"
    result = sample(path, "--device", text, terminal="stderr")
    assert all(character.isprintable() or character == "\n" for character in result.stderr)


def test_a_prompt_is_read_from_a_file_or_stdin_and_what_is_not_read_is_logged(
    saves, sample, tmp_path
):
    prompt = "a café, the quick brown fox\njumps over a dog at noon"
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    typed = sample(saves["char"], "--prompt", prompt)
    assert typed.stdout == sample(saves["char"], "--prompt-file", "prompt.txt").stdout
    marked = codecs.BOM_UTF8 + prompt.encode()
    assert typed.stdout == sample(saves["char"], "--prompt-file", "-", stdin=marked).stdout
    end = sample(saves["char"], "--prompt", prompt[-BLOCK_SIZE:])
    assert typed.stderr.splitlines()[1] == "the prompt has 52 tokens; only the last 32 are read"
    assert typed.stdout == prompt[:-BLOCK_SIZE] + end.stdout
    assert (
        f"no prompt: starting from '{SEPARATOR}'"
        in sample(saves["separated"], "--prompt-file", "-").stderr
    )


def test_an_unreadable_text_is_one_error_line(saves, sample):
    Path("other.jsonl").write_text('{"story": "a fox"}', encoding="utf-8")
    for option in ("--prompt-file", "--score"):
        for file, stdin, problem in (
            ("none.txt", b"", "does not exist"),
            ("-", "café".encode("latin-1"), "is not UTF-8 text: bad byte at offset 3"),
            (
                "other.jsonl",
                b"",
                "no text in field text; the fields with text are story; set data.field=",
            ),
            ("-", b"a Zebra", "the tokenizer has no id for 'Z'"),
        ):
            assert problem in error(sample(saves["char"], option, file, stdin=stdin))
    assert "must be a non-empty text" in error(sample(saves["char"], "--score", "-"))


def test_line_breaks_tabs_and_backslashes_can_be_typed_in_every_shell(saves, sample):
    flags = [saves["letters"], "--temperature", 0]  # after z comes a line break
    (one,) = samples(sample(*flags, "--prompt", r"\nab", "--stop", r"\n", "--json"))
    assert (one["prompt"], one["text"], one["reason"]) == (
        "\nab",
        "cdefghijklmnopqrstuvwxyz\n",
        "stop",
    )
    flags = [saves["bpe"], "--json", "--max-new-tokens", 1]
    typed = sample(*flags, "--prompt", "a\\tb\\\\n\\é\udcff")
    assert samples(typed)[0]["prompt"] == "a\tb\\n\\é\ufffd"  # of half a character
    assert r"\n is a line break" in typed.stderr
    assert samples(sample(*flags, "--prompt-file", "-", stdin=rb"a\tb"))[0]["prompt"] == r"a\tb"


@pytest.mark.parametrize("name", ["char", "bpe"])
def test_samples_are_those_of_generate_with_the_same_settings_and_json_has_one_line_for_each(
    name, saves, sample
):
    flags = "--num-samples 2 --seed 3 --max-new-tokens 25 --temperature 1.5 --top-k 20 --top-p 0.9 --min-p 0.01"
    given = [saves[name], "--prompt", "a fox", *flags.split(), "--repetition-penalty", "1.1"]
    found, text = samples(sample(*given, "--json")), ""
    model, tokenizer = load_checkpoint(saves[name])
    settings = {
        "num_samples": 2,
        "seed": 3,
        "max_new_tokens": 25,
        "temperature": 1.5,
        "top_k": 20,
        "top_p": 0.9,
    }
    expected = generate(
        model,
        tokenizer.encode("a fox"),
        min_p=0.01,
        repetition_penalty=1.1,
        logprobs=True,
        **settings,
    )
    for i, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        assert set(one) == {"prompt", "text", "tokens", "logprobs", "reason", "tokens_per_second"}
        assert (one["prompt"], one["reason"], one["tokens"]) == ("a fox", "length", other.tokens)
        assert one["text"] == tokenizer.decode(one["tokens"])
        assert one["logprobs"] == pytest.approx(other.logprobs)
        assert one["tokens_per_second"] > 0
        text += f"── sample {i} ──\na fox{one['text']}\n"
    for setting in (
        "--temperature=1",
        "--top-k=2",
        "--top-p=0.5",
        "--min-p=0.3",
        "--repetition-penalty=9",
        "--seed=4",
    ):
        assert samples(sample(*given, "--json", setting))[0]["tokens"] != expected[0].tokens, (
            setting
        )
    printed = sample(*given)
    assert printed.stdout == text
    assert printed.stderr.startswith(f"sampling from {saves[name]} on cpu\n50 tokens in ")


def test_the_sample_of_a_validation_is_that_of_its_settings(trained, sample):
    settings = {"prompt": r"'1:\n'", "max_new_tokens": 30, "top_k": 5, "seed": 3}
    run = trained(*(f"callbacks.samples.{name}={value}" for name, value in settings.items()))
    flags = ["--prompt", r"1:\n", "--max-new-tokens", 30, "--top-k", 5, "--seed", 3]
    drawn = sample(run / "checkpoints/last.safetensors", *flags).stdout
    title, text = re.findall(
        r"── (.*) ──\n([^─]*)", (run / "samples.txt").read_text(encoding="utf-8")
    )[-1]
    assert title.startswith("step 20, validation loss ")
    assert text == f"{drawn.strip()}\n\n"


def test_a_sample_of_a_training_ends_with_its_document_as_those_of_the_script(saves, sample):
    model, tokenizer = load_checkpoint(saves["separated"])
    assert sample_text(model, tokenizer, "", max_new_tokens=10, temperature=0) == "abc"
    assert sample(saves["separated"], "--max-new-tokens", 10, "--temperature", 0).stdout == "abc\n"


def test_neither_the_script_nor_a_training_draws_ids_without_a_token(saves, sample):
    model, tokenizer = load_checkpoint(saves["padded"])
    text = sample_text(model, tokenizer, "a fox", max_new_tokens=60, temperature=0.8, seed=3)
    assert set(text) <= set(tokenizer.alphabet)
    flags = "--prompt", "a fox", "--max-new-tokens", 60, "--temperature", 0.8, "--seed", 3
    assert sample(saves["padded"], *flags).stdout == f"{text}\n"


def test_smaller_weights_give_text_and_nearly_the_score_of_float32(saves, sample):
    nats = {}
    for dtype in ("float32", "bfloat16", "float16"):
        (one,) = samples(
            sample(
                saves["letters"],
                "--dtype",
                dtype,
                "--prompt",
                "ab",
                "--max-new-tokens",
                4,
                "--json",
            )
        )
        assert one["text"] == "cdef"
        scored = sample(
            saves["char"],
            "--score",
            "-",
            "--json",
            "--dtype",
            dtype,
            stdin=b"the quick brown fox" * 5,
        )
        nats[dtype] = samples(scored)[0]["nats_per_token"]
    assert len(set(nats.values())) == 3
    assert list(nats.values()) == pytest.approx([nats["float32"]] * 3, rel=0.05)


def test_output_ends_after_a_stop_string_within_a_token_or_over_several(saves, sample):
    over_several = (
        "a",
        "ebx",
        "cdebx",
        [256, ord("b"), 257],
    )  # 257 is x and the first byte of a character
    for prompt, stop, text, tokens in (
        ("a", "d", "cd", [256]),
        ("b", "x", "x", [257]),
        over_several,
    ):
        flags = [saves["odd"], "--prompt", prompt, "--stop", stop]
        assert sample(*flags).stdout == f"{prompt}{text}\n"
        (one,) = samples(sample(*flags, "--json"))
        assert (one["text"], one["reason"], one["tokens"], len(one["logprobs"])) == (
            text,
            "stop",
            tokens,
            len(tokens),
        )
    assert sample(saves["multibyte"], "--max-new-tokens", 4).stdout == "é\ufffd\n"


def test_special_tokens_can_be_typed_and_the_separator_of_documents_ends_a_sample(saves, sample):
    model, tokenizer = load_checkpoint(saves["separated"])
    flags = ["--json", "--temperature", 0, "--max-new-tokens", 9]
    for prompt, text in (("a", "bc"), (SEPARATOR, "abc"), (f"b{SEPARATOR}", "abc")):
        (one,) = samples(sample(saves["separated"], "--prompt", prompt, *flags))
        assert (one["text"], one["reason"], one["tokens"][-1]) == (
            text,
            "stop",
            int(tokenizer.separator[0]),
        )
    tokenizer.separated = False  # the corpus has none
    save_checkpoint(model, tokenizer, Path("plain.safetensors"))
    (one,) = samples(sample("plain.safetensors", "--prompt", "a", "--stop", SEPARATOR, *flags))
    assert (one["text"], one["reason"]) == ("bc", "stop")
    for name, stop in (("plain.safetensors", f"b{SEPARATOR}"), (saves["char"], "END")):
        assert "--stop must be a text that the tokenizer can produce, got " in error(
            sample(name, "--stop", stop)
        )
    plain = sample("plain.safetensors", "--prompt", f"{SEPARATOR}a", *flags)
    assert f"{SEPARATOR} in the prompt is encoded as ordinary text" in plain.stderr


@pytest.mark.parametrize("name", ["char", "bpe", "separated"])
def test_a_score_is_the_log_likelihood_of_the_text_also_in_a_table(name, saves, sample):
    (found,) = samples(sample(saves[name], "--score", "-", "--json", stdin=TEXT.encode()))
    model, tokenizer = load_checkpoint(saves[name])
    ids = tokenizer.encode(TEXT).tolist()
    rated = score(model, ids, tokenizer.start.tolist())
    values = {
        "tokens": len(ids),
        "bytes": 16,
        "nats": rated.nats,
        "nats_per_token": rated.nats / len(ids),
    }
    values["bits_per_byte"] = rated.nats / math.log(2) / 16
    assert found == values | {
        "token_ids": ids,
        "logprobs": rated.logprobs.tolist(),
        "ranks": rated.ranks.tolist(),
    }
    result = sample(saves[name], "--score", "-", stdin=TEXT.encode())
    output = dict(re.split(r"  +", line, maxsplit=1) for line in result.stdout.splitlines())
    for key, value in values.items():
        assert float(output[key.replace("_", " ")]) == pytest.approx(value, abs=1e-4)
    assert output["top-1 accuracy"].startswith(
        f"{rated.ranks.tolist().count(0)} of {len(ids)} tokens "
    )


@pytest.mark.parametrize("name", ["char", "bpe"])
def test_a_score_is_of_the_text_after_the_prompt(name, saves, sample):
    model, tokenizer = load_checkpoint(saves[name])
    ids, nats = tokenizer.encode(TEXT).tolist(), {}
    Path("prompt.txt").write_text("a dog, a café", encoding="utf-8")
    given = (("--prompt", "the ", "the "), ("--prompt-file", "prompt.txt", "a dog, a café"))
    for flag, value, prompt in given:
        before = tokenizer.encode(prompt).tolist()
        result = sample(saves[name], "--score", "-", "--json", flag, value, stdin=TEXT.encode())
        (found,) = samples(result)
        with torch.no_grad():  # the texts are shorter than the block
            logprobs = model(torch.tensor([[*before, *ids]]))[0].log_softmax(-1)[
                len(before) - 1 : -1
            ]
        expected = logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert found["logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert (found["tokens"], found["bytes"]) == (len(ids), 16)
        nats[flag] = found["nats"]
    assert nats["--prompt"] != pytest.approx(nats["--prompt-file"])


def test_a_score_and_a_prompt_read_files_as_training_does(saves, sample, tmp_path):
    (tmp_path / "texts/deep").mkdir(parents=True)
    (tmp_path / "texts/a.md").write_bytes(codecs.BOM_UTF8 + TEXT.encode())
    (tmp_path / "texts/deep/b.jsonl").write_text(
        rows([TEXT, "", "the lazy dog", "a fox"]), encoding="utf-8"
    )
    _, tokenizer = load_checkpoint(saves["separated"])
    for path in ("texts", "**/*.jsonl"):
        corpus = corpus_of(
            tmp_path / "texts/a.md", tmp_path, tokenizer.to_dict(), val_path=str(tmp_path / path)
        )
        (found,) = samples(sample(saves["separated"], "--score", path, "--json"))
        assert (found["token_ids"], found["bytes"]) == (on_disk(corpus)[1], corpus.val.bytes)
        assert found["bits_per_byte"] == pytest.approx(
            found["nats"] / math.log(2) / corpus.val.bytes
        )
        (one,) = samples(
            sample(saves["separated"], "--prompt-file", path, "--json", "--max-new-tokens", 1)
        )
        assert encode_prompt(tokenizer, one["prompt"]).tolist() == on_disk(corpus)[1]


@pytest.fixture(scope="module")
def started(once):
    """A folder whose tokenizer adds a start token, and whose texts end at two of its tokens; model and tokenizer."""
    options = {"bos_token": "<|endoftext|>", "add_bos_token": True, "ends": [2, 1, 4]}
    folder = once("started", lambda path: make_instruct_folder(path, **options))
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    return folder, model.eval(), tokenizer


def test_a_model_of_hugging_face_continues_and_scores_the_ids_of_its_tokenizer(
    started, sample, tmp_path
):
    folder, model, tokenizer = started
    for text in ("", "Hello the number", "a<|im_end|>\nb<|endoftext|>c"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=3)[
            0, ids.size(1) :
        ].tolist()
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        for flags in (("--prompt", text), ("--prompt-file", "text.txt")):
            (one,) = samples(
                sample(folder, *flags, "--json", "--temperature", 0, "--max-new-tokens", 30)
            )
            assert (one["prompt"], one["tokens"]) == (text, expected)
        if text:
            (found,) = samples(sample(folder, "--score", "text.txt", "--json"))
            loss = model(ids, labels=ids).loss.item()
            assert found["token_ids"] == ids[0, 1:].tolist()
            assert (found["nats_per_token"], found["bytes"]) == (
                pytest.approx(loss, abs=1e-5),
                len(text),
            )
    assert sample(folder).stderr.splitlines()[-2] == "no prompt: starting from '<|endoftext|>'"


def test_each_end_token_of_a_folder_ends_a_sample(started, sample):
    lasts = set()
    flags = [
        started[0],
        "--prompt",
        "Hello",
        "--json",
        "--max-new-tokens",
        400,
        "--num-samples",
        40,
        "--temperature",
        3,
    ]
    for one in samples(sample(*flags)):
        assert not {1, 2, 4} & {*one["tokens"][:-1]}
        assert one["reason"] == ("stop" if one["tokens"][-1] in (1, 2, 4) else "length")
        lasts.add(one["tokens"][-1])
    assert lasts >= {1, 2, 4}


def test_a_document_is_encoded_whole_by_a_tokenizer_that_does_not_split_at_cuts(tmp_path):
    class Prefixed(ByteTokenizer):
        splits_at_cuts = False

        def encode(self, text):
            return super().encode(f"\0{text}")

    (file := tmp_path / "long.txt").write_text("to be " * 400_000, encoding="utf-8")
    assert len([*read_texts(str(file), "file")]) > 1
    ids = read_prompt(Prefixed(), None, str(file), {})[1]
    assert (len(ids), ids.count(0)) == (6 * 400_000 + 1, 1)


def test_the_fastest_device_of_the_machine_is_the_default(monkeypatch):
    for cuda, mps, wanted in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=cuda: there)
        monkeypatch.setattr("torch.backends.mps.is_available", lambda there=mps: there)
        assert find_device("auto") == wanted


def test_a_chat_answers_the_prompt_with_the_template_of_the_folder(sample, tmp_path):
    folder = make_instruct_folder(tmp_path / "instruct")
    tokenizer, model = (
        kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    messages = [{"role": "user", "content": "Hello\n"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    expected = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)[
        0, ids.size(1) :
    ]
    flags = (folder, "--prompt", "Hello\n", "--temperature", 0, "--max-new-tokens", 30)
    assert (
        sample(*flags, "--chat").stdout
        == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    )
    raw = sample(*flags)
    assert raw.stdout.startswith("Hello\n")
    assert "has a chat template, which is not applied to the prompt; set --chat" in raw.stderr
    (folder / "chat_template.jinja").unlink()
    assert error(sample(folder, "--chat")).startswith("error: --chat needs a chat template, and ")


def test_a_long_prompt_without_a_place_to_cut_is_tokenized_in_the_parts_of_training(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(readers, "_MAX_CHUNK_CHARS", 1000)
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 1000)
    text = "".join(random.Random(0).choices("etaoinshrdlu", k=50_000))
    tokenizer = BPETokenizer.train([text], 400)
    file = tmp_path / "long.txt"
    file.write_text(text, encoding="utf-8")
    settings = {"field": "text", "separator": "<|endoftext|>"}
    chunks = read_texts(str(file), "--prompt-file", **settings)
    expected = np.concatenate([tokenizer.encode(chunk.text) for chunk in chunks]).tolist()
    assert expected != tokenizer.encode(text).tolist()  # a merge spans two parts
    assert read_prompt(tokenizer, None, str(file), settings) == (text, expected)
