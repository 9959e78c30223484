"""`scripts/sample.py`: stdout, stderr, JSON, prompts, scores, errors, folders of transformers."""

import codecs
import math
import os
import random
import re
import sys
from functools import partial
from pathlib import Path
from select import select

import numpy as np
import pytest
import torch
from corpora import corpus_of, on_disk, rows
from processes import Script
from sampled import BLOCK_SIZE, chain, error, samples, write_to
from servers import make_instruct_folder
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
from minigpt.runs.callbacks.samples import SamplesCallback, sample_text
from minigpt.sampling.generation import generate, score
from minigpt.sampling.sample_cli import read_prompt
from minigpt.training.precision import find_device


@pytest.mark.xdist_group("processes")
def test_text_is_streamed_in_complete_characters(saves, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    flags = ["--device", "cpu", saves["multibyte"], "--max-new-tokens", "10000000"]
    options = {"output": tmp_path / "printed", "prepare": partial(write_to, pipe)}
    process = Script("sample.py", *flags, **options)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert process.wait_for(lambda: select([reader], [], [], 0)[0]), process.stderr
    os.set_blocking(reader, True)
    text = b""
    for _ in range(100):
        read = os.read(reader, 1 << 16)
        text += read
        text.decode()
        assert text != read or len(read) < 4096  # not buffered
    assert process.poll() is None
    assert ("é€𝄞" * 200).startswith(text.decode()[:500])
    os.close(reader)  # as `head` does
    assert process.wait() == 0
    logged = f"sampling from {saves['multibyte']} on cpu\nno prompt: starting from '\\n'\n"
    assert process.stderr == logged


def test_control_characters_are_escaped_for_a_terminal_and_kept_for_a_pipe(sample, tmp_path):
    text = "a你\x1b]0;owned\x07\r\x9b2J\u202eb"
    signs = "a你␛]0;owned␇␍⟨U+009B⟩2J⟨U+202E⟩b"
    tokenizer = CharTokenizer("".join(sorted(set(f"\n{text}"))))
    model = chain(tokenizer, tokenizer.encode("".join(dict.fromkeys(f"\n{text}"))))
    path = tmp_path / text / "x.safetensors"
    save_checkpoint(model, tokenizer, path)
    flags = [path, "--prompt", "a", "--max-new-tokens", len(text) - 1, "--temperature", 0]
    assert sample(*flags).stdout == f"{text}\n"
    assert sample(*flags, terminal="stdout").stdout == f"{signs}\n"
    result = sample(path, "--device", text, terminal="stderr")
    assert all(character.isprintable() or character == "\n" for character in result.stderr)


def test_a_prompt_is_read_from_a_file_or_stdin_and_what_is_not_read_is_logged(
    saves, sample, tmp_path
):
    prompt = "a café, the quick brown fox\njumps over a dog at noon"
    flags = [saves["char"], "--max-new-tokens", 20]
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    typed = sample(*flags, "--prompt", prompt)
    assert typed.stdout == sample(*flags, "--prompt-file", "prompt.txt").stdout
    marked = codecs.BOM_UTF8 + prompt.encode()
    assert typed.stdout == sample(*flags, "--prompt-file", "-", stdin=marked).stdout
    end = sample(*flags, "--prompt", prompt[-BLOCK_SIZE:])
    assert typed.stderr.splitlines()[1] == "the prompt has 52 tokens; only the last 32 are read"
    assert typed.stdout == prompt[:-BLOCK_SIZE] + end.stdout
    empty = sample(saves["separated"], "--prompt-file", "-")
    assert f"no prompt: starting from '{SEPARATOR}'" in empty.stderr


def test_a_closed_standard_input_is_one_error_line(saves, call, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for option in ("--prompt-file", "--score"):
        result = call("sample.py", str(saves["char"]), option, "-")
        assert result.returncode == 2
        assert f"{option} must be a file, as stdin is closed, got -" in result.stderr


def test_an_unreadable_text_is_one_error_line(saves, sample):
    Path("other.jsonl").write_text('{"story": "a fox"}', encoding="utf-8")
    no_field = "no text in field text; the fields with text are story; set data.field="
    for option in ("--prompt-file", "--score"):
        for file, stdin, problem in (
            ("none.txt", b"", "does not exist"),
            ("-", "café".encode("latin-1"), "is not UTF-8 text: bad byte at offset 3"),
            ("other.jsonl", b"", no_field),
            ("-", b"a Zebra", "the tokenizer has no id for 'Z'"),
        ):
            assert problem in error(sample(saves["char"], option, file, stdin=stdin))
    assert "must be a non-empty text" in error(sample(saves["char"], "--score", "-"))


def test_line_breaks_tabs_and_backslashes_can_be_typed_in_every_shell(saves, sample):
    flags = [saves["letters"], "--temperature", 0]  # after z comes a line break
    (one,) = samples(sample(*flags, "--prompt", r"\nab", "--stop", r"\n", "--json"))
    assert (one["prompt"], one["text"]) == ("\nab", "cdefghijklmnopqrstuvwxyz\n")
    assert one["reason"] == "stop"
    flags = [saves["bpe"], "--json", "--max-new-tokens", 1]
    typed = sample(*flags, "--prompt", "a\\tb\\\\n\\é\udcff")
    assert samples(typed)[0]["prompt"] == "a\tb\\n\\é\ufffd"  # of half a character
    assert r"\n is a line break" in typed.stderr
    assert samples(sample(*flags, "--prompt-file", "-", stdin=rb"a\tb"))[0]["prompt"] == r"a\tb"


@pytest.mark.parametrize("name", ["char", "bpe"])
def test_samples_are_those_of_generate_with_the_same_settings_and_json_has_one_line_for_each(
    name, saves, sample
):
    settings = {"num_samples": 2, "seed": 3, "max_new_tokens": 12, "temperature": 1.5, "top_k": 20}
    settings |= {"top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    given = [saves[name], "--prompt", "a fox"]
    for setting, value in settings.items():
        given += [f"--{setting.replace('_', '-')}", value]
    found = samples(sample(*given, "--json"))
    model, tokenizer = load_checkpoint(saves[name])
    expected = generate(model, tokenizer.encode("a fox"), logprobs=True, **settings)
    text = ""
    for i, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        assert set(one) == {"prompt", "text", "tokens", "logprobs", "reason", "tokens_per_second"}
        assert (one["prompt"], one["reason"], one["tokens"]) == ("a fox", "length", other.tokens)
        assert one["text"] == tokenizer.decode(one["tokens"])
        assert one["logprobs"] == pytest.approx(other.logprobs)
        assert one["tokens_per_second"] > 0
        text += f"── sample {i} ──\na fox{one['text']}\n"
    changes = "--temperature=1 --top-k=2 --top-p=0.5 --min-p=0.3 --repetition-penalty=9 --seed=4"
    for change in changes.split():
        assert samples(sample(*given, "--json", change))[0]["tokens"] != found[0]["tokens"], change
    printed = sample(*given)
    assert printed.stdout == text
    assert printed.stderr.startswith(f"sampling from {saves[name]} on cpu\n24 tokens in ")


def test_the_sample_of_a_validation_is_that_of_its_settings(finished, sample):
    last = finished.folder / "checkpoints/last.safetensors"
    drawn = sample(last, "--max-new-tokens", 20).stdout
    written = (finished.folder / "samples.txt").read_text(encoding="utf-8")
    title, text = re.findall(r"── (.*) ──\n([^─]*)", written)[-1]
    assert title.startswith("step 20, validation loss ")
    assert text == f"{drawn.strip()}\n\n"
    assert SamplesCallback(prompt=r"1:\n", max_new_tokens=20).prompt == "1:\n"


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
    nats = []
    for dtype in ("float32", "bfloat16", "float16"):
        flags = ["--dtype", dtype, "--json"]
        drawn = sample(saves["letters"], *flags, "--prompt", "ab", "--max-new-tokens", 4)
        assert samples(drawn)[0]["text"] == "cdef"
        text = b"the quick brown fox" * 5
        (found,) = samples(sample(saves["char"], *flags, "--score", "-", stdin=text))
        nats.append(found["nats_per_token"])
    assert len(set(nats)) == 3
    assert nats == pytest.approx([nats[0]] * 3, rel=0.05)


def test_output_ends_after_a_stop_string_within_a_token_or_over_several(saves, sample):
    for prompt, stop, text, tokens in (
        ("a", "d", "cd", [256]),
        ("b", "x", "x", [257]),  # x and the first byte of a character
        ("a", "ebx", "cdebx", [256, ord("b"), 257]),  # over several
    ):
        flags = [saves["odd"], "--prompt", prompt, "--stop", stop]
        assert sample(*flags).stdout == f"{prompt}{text}\n"
        (one,) = samples(sample(*flags, "--json"))
        assert (one["text"], one["reason"], one["tokens"]) == (text, "stop", tokens)
        assert len(one["logprobs"]) == len(tokens)
    assert sample(saves["multibyte"], "--max-new-tokens", 4).stdout == "é\ufffd\n"


def test_special_tokens_can_be_typed_and_the_separator_of_documents_ends_a_sample(saves, sample):
    model, tokenizer = load_checkpoint(saves["separated"])
    flags = ["--json", "--temperature", 0, "--max-new-tokens", 9]
    for prompt, text in (("a", "bc"), (SEPARATOR, "abc"), (f"b{SEPARATOR}", "abc")):
        (one,) = samples(sample(saves["separated"], "--prompt", prompt, *flags))
        assert (one["text"], one["reason"]) == (text, "stop")
        assert one["tokens"][-1] == int(tokenizer.separator[0])
    tokenizer.separated = False  # the corpus has none
    save_checkpoint(model, tokenizer, Path("plain.safetensors"))
    (one,) = samples(sample("plain.safetensors", "--prompt", "a", "--stop", SEPARATOR, *flags))
    assert (one["text"], one["reason"]) == ("bc", "stop")
    for name, stop in (("plain.safetensors", f"b{SEPARATOR}"), (saves["char"], "END")):
        refused = error(sample(name, "--stop", stop))
        assert "--stop must be a text that the tokenizer can produce, got " in refused
    plain = sample("plain.safetensors", "--prompt", f"{SEPARATOR}a", *flags)
    assert f"{SEPARATOR} in the prompt is encoded as ordinary text" in plain.stderr


def test_a_document_is_encoded_whole_by_a_tokenizer_that_does_not_split_at_cuts(tmp_path):
    class Prefixed(ByteTokenizer):
        splits_at_cuts = False

        def encode(self, text):
            return super().encode(f"\0{text}")

    file = tmp_path / "long.txt"
    file.write_text("to be " * 400_000, encoding="utf-8")
    assert len([*read_texts(str(file), "file")]) > 1
    ids = read_prompt(Prefixed(), None, str(file), {})[1]
    assert (len(ids), ids.count(0)) == (6 * 400_000 + 1, 1)


def test_the_fastest_device_of_the_machine_is_the_default(monkeypatch):
    for cuda, mps, wanted in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=cuda: there)
        monkeypatch.setattr("torch.backends.mps.is_available", lambda there=mps: there)
        assert find_device("auto") == wanted


def test_a_long_prompt_without_a_place_to_cut_is_tokenized_in_the_parts_of_training(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(readers, "_MAX_CHUNK_CHARS", 1000)
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 1000)
    text = "".join(random.Random(0).choices("etaoinshrdlu", k=20_000))
    tokenizer = BPETokenizer.train([text], 400)
    file = tmp_path / "long.txt"
    file.write_text(text, encoding="utf-8")
    settings = {"field": "text", "separator": "<|endoftext|>"}
    chunks = read_texts(str(file), "--prompt-file", **settings)
    expected = np.concatenate([tokenizer.encode(chunk.text) for chunk in chunks]).tolist()
    assert expected != tokenizer.encode(text).tolist()  # a merge spans two parts
    assert read_prompt(tokenizer, None, str(file), settings) == (text, expected)


TEXT = "a fox, a café.\n"


@pytest.mark.parametrize("name", ["char", "bpe", "separated"])
def test_a_score_is_the_log_likelihood_of_the_text_also_in_a_table(name, saves, sample):
    (found,) = samples(sample(saves[name], "--score", "-", "--json", stdin=TEXT.encode()))
    model, tokenizer = load_checkpoint(saves[name])
    ids = tokenizer.encode(TEXT).tolist()
    rated = score(model, ids, tokenizer.start.tolist())
    ranks = rated.ranks.tolist()
    values = {"tokens": len(ids), "bytes": 16, "nats": rated.nats}
    values["nats_per_token"] = rated.nats / len(ids)
    values["bits_per_byte"] = rated.nats / math.log(2) / 16
    per_token = {"token_ids": ids, "logprobs": rated.logprobs.tolist(), "ranks": ranks}
    assert found == values | per_token
    result = sample(saves[name], "--score", "-", stdin=TEXT.encode())
    output = dict(re.split(r"  +", line, maxsplit=1) for line in result.stdout.splitlines())
    for key, value in values.items():
        assert float(output[key.replace("_", " ")]) == pytest.approx(value, abs=1e-4)
    assert output["top-1 accuracy"].startswith(f"{ranks.count(0)} of {len(ids)} tokens ")


@pytest.mark.parametrize("name", ["char", "bpe"])
def test_a_score_is_of_the_text_after_the_prompt(name, saves, sample):
    model, tokenizer = load_checkpoint(saves[name])
    ids = tokenizer.encode(TEXT).tolist()
    Path("prompt.txt").write_text("a dog, a café", encoding="utf-8")
    nats = []
    given = (("--prompt", "the ", "the "), ("--prompt-file", "prompt.txt", "a dog, a café"))
    for flag, value, prompt in given:
        before = tokenizer.encode(prompt).tolist()
        result = sample(saves[name], "--score", "-", "--json", flag, value, stdin=TEXT.encode())
        (found,) = samples(result)
        with torch.no_grad():  # the texts are shorter than the block
            logits = model(torch.tensor([[*before, *ids]]))[0, len(before) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(ids)), ids]
        assert found["logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert (found["tokens"], found["bytes"]) == (len(ids), 16)
        nats.append(found["nats"])
    assert nats[0] != pytest.approx(nats[1])


def test_a_score_and_a_prompt_read_files_as_training_does(saves, sample, tmp_path):
    (tmp_path / "texts/deep").mkdir(parents=True)
    text = tmp_path / "texts/a.md"
    text.write_bytes(codecs.BOM_UTF8 + TEXT.encode())
    lines = rows([TEXT, "", "the lazy dog", "a fox"])
    (tmp_path / "texts/deep/b.jsonl").write_text(lines, encoding="utf-8")
    _, tokenizer = load_checkpoint(saves["separated"])
    for path in ("texts", "**/*.jsonl"):
        corpus = corpus_of(text, tmp_path, tokenizer.to_dict(), val_path=str(tmp_path / path))
        ids = on_disk(corpus)[1]
        (found,) = samples(sample(saves["separated"], "--score", path, "--json"))
        assert (found["token_ids"], found["bytes"]) == (ids, corpus.val.bytes)
        bits = found["nats"] / math.log(2) / corpus.val.bytes
        assert found["bits_per_byte"] == pytest.approx(bits)
        flags = ["--json", "--max-new-tokens", 1]
        (one,) = samples(sample(saves["separated"], "--prompt-file", path, *flags))
        assert encode_prompt(tokenizer, one["prompt"]).tolist() == ids


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def greedy(model, ids):
    # Return the ids (1, T) that transformers generates after these ids (1, T)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 3}
    return model.generate(ids, **options)[:, ids.size(1) :]


FLAGS = ["--temperature", 0, "--max-new-tokens", 12]


@pytest.fixture(scope="module")
def started(once):
    """A folder whose tokenizer adds a start token, and whose texts end at two of its tokens."""
    options = {"bos_token": "<|endoftext|>", "add_bos_token": True, "ends": [2, 1, 4]}
    return once("started", lambda path: make_instruct_folder(path, **options))


def test_a_model_of_hugging_face_continues_and_scores_the_ids_of_its_tokenizer(
    started, sample, tmp_path
):
    model, tokenizer = load(started)
    for text in ("", "Hello the number", "a<|im_end|>\nb<|endoftext|>c"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        (expected,) = greedy(model, ids).tolist()
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        for flags in (("--prompt", text), ("--prompt-file", "text.txt")):
            (one,) = samples(sample(started, *flags, "--json", *FLAGS))
            assert (one["prompt"], one["tokens"]) == (text, expected)
        if text:
            (found,) = samples(sample(started, "--score", "text.txt", "--json"))
            loss = model(ids, labels=ids).loss.item()
            assert found["token_ids"] == ids[0, 1:].tolist()
            assert found["nats_per_token"] == pytest.approx(loss, abs=1e-5)
            assert found["bytes"] == len(text)
    lines = sample(started, "--max-new-tokens", 1).stderr.splitlines()
    assert lines[-2] == "no prompt: starting from '<|endoftext|>'"


def test_each_end_token_of_a_folder_ends_a_sample(started, sample):
    flags = ["--json", "--max-new-tokens", 150, "--num-samples", 30, "--temperature", 3]
    lasts = set()
    for one in samples(sample(started, "--prompt", "Hello", *flags)):
        assert not {1, 2, 4} & {*one["tokens"][:-1]}
        assert one["reason"] == ("stop" if one["tokens"][-1] in (1, 2, 4) else "length")
        lasts.add(one["tokens"][-1])
    assert lasts >= {1, 2, 4}


def test_a_chat_answers_the_prompt_with_the_template_of_the_folder(sample, tmp_path):
    folder = make_instruct_folder(tmp_path / "instruct")
    model, tokenizer = load(folder)
    messages = [{"role": "user", "content": "Hello\n"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt"}
    ids = tokenizer.apply_chat_template(messages, **options)["input_ids"]
    answer = tokenizer.decode(greedy(model, ids)[0], skip_special_tokens=True)
    flags = [folder, "--prompt", "Hello\n", *FLAGS]
    assert sample(*flags, "--chat").stdout == f"{answer}\n"
    raw = sample(*flags)
    assert raw.stdout.startswith("Hello\n")
    assert "has a chat template, which is not applied to the prompt; set --chat" in raw.stderr
    (folder / "chat_template.jinja").unlink()
    assert error(sample(folder, "--chat")).startswith("error: --chat needs a chat template, and ")
