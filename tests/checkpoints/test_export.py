"""Weights for others: what is written is the model, and comes back as it was."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minigpt import GPT, GPTConfig
from minigpt.checkpoints.checkpoint import save_checkpoint
from minigpt.checkpoints.export import export, load_export
from minigpt.data.tokenizer import CharTokenizer
from minigpt.utils.errors import UserError

TOKENIZER = CharTokenizer.of("a line of text\n")


def make(**settings) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(block_size=8, vocab_size=TOKENIZER.vocab_size, n_layer=2, n_head=2, n_embd=16, **settings)
    return GPT(config).eval()


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": False, "norm": "rmsnorm", "position": "rope"}])
def test_a_model_comes_back_as_it_was(tmp_path: Path, settings):
    model = make(**settings)
    export(model, TOKENIZER, tmp_path / "new" / "model.safetensors")
    loaded, tokenizer = load_export(tmp_path / "new" / "model.safetensors")
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens), model(tokens))
    assert tokenizer.to_dict() == TOKENIZER.to_dict()
    weights = load_file(tmp_path / "new" / "model.safetensors")  # as any other program reads it
    assert sum(weight.numel() for weight in weights.values()) == model.num_params()


def test_weights_are_written_in_the_type_that_was_asked_for(tmp_path: Path):
    model = make()
    export(model, TOKENIZER, tmp_path / "small.safetensors", dtype="bfloat16")
    weights = load_file(tmp_path / "small.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["wte.weight"], model.wte.weight.bfloat16())


def test_the_script_writes_what_a_checkpoint_holds(tmp_path: Path, monkeypatch, capsys):
    model = make()
    monkeypatch.chdir(tmp_path)
    script = Path(__file__).resolve().parents[2] / "scripts" / "export.py"
    for given, file, written in (
        ("mine.safetensors", "mine.safetensors", "model.safetensors"),
        ("models/mine.safetensors", "models/mine.safetensors", "models/model.safetensors"),
        ("run", "run/checkpoints/last.safetensors", "run/model.safetensors"),
        ("run/checkpoints/last.safetensors", "run/checkpoints/last.safetensors", "run/model.safetensors"),
        ("run --out other", "run/checkpoints/last.safetensors", "other"),
    ):
        save_checkpoint(model, TOKENIZER, file)
        monkeypatch.setattr(sys, "argv", [str(script), *given.split()])
        runpy.run_path(str(script), run_name="__main__")
        assert capsys.readouterr().out == f"wrote {written} from {file}\n"
        loaded, _ = load_export(tmp_path / written)
        assert all(map(torch.equal, loaded.parameters(), model.parameters()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda told, weights: told.pop("model"), "KeyError"),
        (lambda told, weights: told.update(model="[]"), "does not hold a model"),
        (lambda told, weights: told.update(model=json.dumps({"n_layer": 10**9})), "does not hold a model"),
        (lambda told, weights: weights.pop("wte.weight"), "its weights are not those of its model"),
        (lambda told, weights: weights.update(other=weights.pop("wte.weight")), "lacks other"),
    ],
)
def test_a_file_that_holds_no_model_is_named(tmp_path: Path, change, says):
    file = tmp_path / "model.safetensors"
    export(make(), TOKENIZER, file)
    weights = load_file(file)
    told = {"model": json.dumps(make().config.to_dict()), "tokenizer": json.dumps(TOKENIZER.to_dict())}
    change(told, weights)
    save_file(weights, file, metadata=told)
    with pytest.raises(UserError, match=says):
        load_export(file)


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path):
    (tmp_path / "text").write_text("no weights")
    with pytest.raises(UserError, match="does not hold a model"):
        load_export(tmp_path / "text")
