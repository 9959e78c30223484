"""`scripts/sample.py --score`: the likelihood of texts, in total and per token."""

import codecs
import math
import re
from pathlib import Path

import pytest
import torch
from corpora import corpus_of, on_disk, rows
from sampled import samples

from minigpt.checkpoints.load import load_checkpoint
from minigpt.data.tokenizer import encode_prompt
from minigpt.sampling.generation import score

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
