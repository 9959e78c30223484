"""Exported models in transformers: logits, loss and greedy text are equal."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
import torch
from corpora import random_texts
from exported import LLAMA, SCALED, random_model
from exported import MODELS as OTHERS
from safetensors.torch import load_file, save_file

from minigpt import GPT, generate, load_checkpoint
from minigpt.checkpoints.export_huggingface import MODELING, export_folder, export_model, modeling_code
from minigpt.checkpoints.find import BEST
from minigpt.checkpoints.huggingface_conversion import FAMILIES
from minigpt.checkpoints.init_from import find_pretrained, load_folder
from minigpt.checkpoints.load import save_checkpoint
from minigpt.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from minigpt.utils.errors import UserError

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(20)[None]
NANOCHAT = {**LLAMA, "norm": "rmsnorm_noscale", "activation": "relu2", "qk_norm": True, "embed_norm": True}
MUP = {"parametrization": "mup", "base_n_embd": 24, "base_head_dim": 4}
CLASSES = {
    **dict.fromkeys(("GPT-2", "GPT-2, untied", "nanoGPT, without biases"), "GPT2LMHeadModel"),
    **dict.fromkeys(("Llama", "Llama, one key-value head", "Llama, a wider head"), "LlamaForCausalLM"),
    **{"Llama 3, scaled rope": "LlamaForCausalLM", "Qwen3": "Qwen3ForCausalLM", "NanoChat": "NanoChatForCausalLM"},
}
WITHOUT_TEXT = ("one position", "one rotary position")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (CLASSES.get(name, ""), values) for name, values in OTHERS.items() if name not in WITHOUT_TEXT},
    "GPT-2 under mup": ("GPT2LMHeadModel", MUP),
    "nano, the default": ("Starcoder2ForCausalLM", {"position": "rope", "bias": False, "rope_base": 300.0}),
    "nano with a gated MLP": ("MiniGPTForCausalLM", {"position": "rope", "bias": False, "activation": "swiglu"}),
    "heads that do not divide the width": ("MiniGPTForCausalLM", {**LLAMA, "n_embd": 36, "n_head": 8, "head_dim": 6}),
    "Llama with biases": ("LlamaForCausalLM", {**LLAMA, "bias": True}),
    "Llama under mup": ("LlamaForCausalLM", {**LLAMA, **SCALED, **MUP}),
    "Llama with normalized embeddings": ("LlamaForCausalLM", {**LLAMA, "embed_norm": True}),
    "Qwen2": ("Qwen2ForCausalLM", {**LLAMA, "qkv_bias": True, "n_kv_head": 2}),
    "Qwen3 without weights of QK-norm": ("Qwen3ForCausalLM", {**LLAMA, "qk_norm": True}),
    "Qwen3 under mup": ("Qwen3ForCausalLM", {**LLAMA, **MUP, "qk_norm": True}),
    "Arcee": ("ArceeForCausalLM", {**LLAMA, "activation": "relu2"}),
    "Arcee, untied": ("ArceeForCausalLM", {**NANOCHAT, "qk_norm": False, "tie_embeddings": False}),
    "NanoChat under mup": ("MiniGPTForCausalLM", {**NANOCHAT, **MUP}),
}


def in_transformers(model: GPT, folder: Path) -> Any:
    """Export a model, and load it with transformers."""
    values, weights = export_model(model)
    folder.mkdir(exist_ok=True)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(values | special))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / MODELING).write_text(modeling_code())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code="auto_map" in values)
    assert type(theirs).__name__ == values["architectures"][0]
    return theirs.eval()


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_gives_the_same_logits_loss_and_greedy_text(name: str, tmp_path: Path) -> None:
    architecture, values = MODELS[name]
    ours = random_model(**values)
    theirs = in_transformers(ours, tmp_path).train()  # there is no dropout
    assert type(theirs).__name__.startswith(architecture)
    assert theirs.get_input_embeddings().weight.shape == ours.wte.weight.shape
    T = ours.config.block_size
    tokens = torch.randint(0, 101, (3, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)
        torch.testing.assert_close(ours(tokens), expected.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours(tokens[:, :-1], tokens[:, 1:]), expected.loss, rtol=0, atol=1e-5)
    text = theirs.generate(tokens[:1, :4], max_new_tokens=T - 4, do_sample=False)
    (sample,) = generate(ours, tokens[0, :4], max_new_tokens=T - 4, temperature=0)
    assert sample.tokens == text[0, 4:].tolist()
    if not type(theirs).__name__.startswith("MiniGPT"):  # loaded and exported again, it has equal bits
        theirs.save_pretrained(tmp_path / "theirs")
        config, weights = export_model(load_folder(tmp_path / "theirs"))
        written = load_file(tmp_path / "model.safetensors")
        assert weights.keys() == written.keys()
        assert all(torch.equal(weights[key], written[key]) for key in weights)
        assert config.items() <= json.loads((tmp_path / "config.json").read_text()).items()


def test_a_head_that_its_user_untied_is_exported_and_other_changes_are_refused(tmp_path: Path) -> None:
    ours, tokens = random_model(), torch.arange(40)[None]
    ours.lm_head.weight = torch.nn.Parameter(ours.wte.weight.detach().flip(0))
    with torch.no_grad():
        torch.testing.assert_close(in_transformers(ours, tmp_path)(tokens).logits, ours(tokens), rtol=0, atol=1e-4)
    ours.blocks[0].mlp.activation = torch.sin
    with pytest.raises(UserError, match=r"model\.blocks\.0\.mlp\.activation is changed"):
        export_model(ours)


def test_a_model_of_its_own_class_ignores_padding_and_continues_beyond_its_context(tmp_path: Path) -> None:
    ours = random_model(position="none", smear=1, block_size=16)
    theirs = in_transformers(ours, tmp_path)
    tokens = torch.arange(9)[None]
    left = theirs(torch.cat((tokens.new_zeros(1, 5), tokens), 1), attention_mask=torch.tensor([[0] * 5 + [1] * 9]))
    right = theirs(torch.cat((tokens, tokens.new_zeros(1, 5)), 1), attention_mask=torch.tensor([[1] * 9 + [0] * 5]))
    with torch.no_grad():
        torch.testing.assert_close(left.logits[:, 5:], ours(tokens), rtol=0, atol=1e-4)
        torch.testing.assert_close(right.logits[:, :9], ours(tokens), rtol=0, atol=1e-4)
    assert theirs.generate(tokens, max_new_tokens=20, do_sample=False).shape == (1, 29)


def test_the_arguments_of_a_model_of_its_own_class_are_supported_or_refused(tmp_path: Path) -> None:
    theirs = in_transformers(random_model(smear=1, block_size=16), tmp_path)
    tokens = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = theirs(tokens, attention_mask=mask, labels=tokens)
    for options in (
        {"position_ids": positions},
        {"use_cache": True, "return_dict": True, "output_attentions": False, "past_key_values": None},
        {"num_items_in_batch": 16, "logits_to_keep": 3},
        {"logits_to_keep": torch.tensor([6, 7, 8])},
    ):
        found = theirs(tokens, attention_mask=mask, labels=tokens, **options)
        kept = whole.logits[:, -3:] if "logits_to_keep" in options else whole.logits
        assert torch.equal(found.logits, kept)
        torch.testing.assert_close(found.loss, whole.loss)  # of 16 labels
    holes, short = mask.clone(), mask[:, 1:]
    holes[1, 4] = 0
    for refused, message in (
        ({"position_ids": torch.arange(9)[None]}, "position_ids must count the tokens of each row from 0"),
        ({"attention_mask": holes}, "attention_mask must have zeros on the left and on the right only"),
        ({"attention_mask": short}, r"attention_mask must be \(2, 9\), got \(2, 8\)"),
        ({"output_hidden_states": True}, "MiniGPTForCausalLM does not support output_hidden_states"),
        ({"return_dict": False}, "MiniGPTForCausalLM does not support return_dict=False"),
        ({"token_type_ids": tokens, "past_key_values": object()}, "does not support past_key_values, token_type_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            theirs(tokens, **{"attention_mask": mask, **refused})
    alone = theirs.generate(tokens[:1, 4:], max_new_tokens=12, do_sample=False)
    for options in ({}, {"num_beams": 1, "use_cache": False}):
        padded = theirs.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, **options)
        assert torch.equal(padded[:1, 4:], alone)
    assert theirs.generate(tokens, attention_mask=mask, max_new_tokens=12, num_beams=3, do_sample=False).size(1) == 21
    with pytest.raises(ValueError, match="not support output_hidden_states"):
        theirs.generate(tokens, output_hidden_states=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="position_ids"):
        theirs.generate(tokens, attention_mask=mask, position_ids=mask.cumsum(1))
    given = {"attention_mask": mask, "position_ids": positions, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(theirs.generate(tokens, **given), padded)  # beyond the 16 tokens of a block
    theirs.config.output_attentions = True
    with pytest.raises(ValueError, match="not support output_attentions"):
        theirs(tokens)


def export_of(tokenizer: Tokenizer, folder: Path, **values: Any) -> tuple[GPT, str]:
    """Export a model with random weights and a tokenizer; return it and the name of its class."""
    model = random_model(vocab_size=tokenizer.vocab_size, **values)
    save_checkpoint(model, tokenizer, folder.with_suffix(".safetensors"))
    return model, export_folder(find_pretrained(folder.with_suffix(".safetensors")), folder)


FAMILY_MODELS = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen2": {**LLAMA, "qkv_bias": True},
    "qwen3": {**LLAMA, "qk_norm": True},
    "arcee": {**LLAMA, "activation": "relu2"},
    "nanochat": {**NANOCHAT, "logit_softcap": 2.0},
    "starcoder2": {"position": "rope"},
}


@pytest.mark.parametrize("family", FAMILY_MODELS)
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_the_tokenizer_of_an_exported_class_gives_the_ids_of_tokenizer_json(
    tmp_path: Path, name: str, family: str
) -> None:
    """transformers takes the steps of Qwen2's tokenizer for every model of type qwen2."""
    tokenizer = HuggingFaceTokenizer(tokenizer_content(name), 0)
    model, architecture = export_of(tokenizer, tmp_path / "model", **FAMILY_MODELS[family])
    expected = "llama" if (family, name) == ("qwen2", "gpt2") else family
    assert architecture == FAMILIES[expected].architecture
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    reference = tokenizers.Tokenizer.from_str(tokenizer.json)
    for text in ["in 1234567 of 2024", "x<|endoftext|>y\n\n  z", "cafe\u0301 12 345", *random_texts(30)]:
        text = text.replace("\ud800", "")
        assert theirs(text)["input_ids"] == reference.encode(text).ids
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS), rtol=0, atol=1e-4)


def tokenizer_content(name: str) -> str:
    """Return a tokenizer.json of the steps of Qwen2, or with digits in threes as Llama 3."""
    tokenizer = transformers.Qwen2Tokenizer()._tokenizer
    tokenizer.add_special_tokens(["<|endoftext|>"])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the number 123 123 456 456 of 2024 2024 " * 9], trainer)
    content = tokenizer.to_str()
    return content if name == "qwen2" else content.replace("|\\\\p{N}|", "|\\\\p{N}{1,3}|")


def test_an_end_token_that_the_tokenizer_does_not_mark_special_is_exported(tmp_path: Path) -> None:
    content = json.loads(tokenizer_content("qwen2"))
    content["added_tokens"] = []
    export_of(HuggingFaceTokenizer(json.dumps(content), 0), tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == 0


@pytest.mark.parametrize("values", [{}, {"position": "rope", "smear": 1}, {**LLAMA, "tie_embeddings": False}])
def test_the_card_counts_the_parameters_of_the_folder(tmp_path: Path, values: dict[str, Any]) -> None:
    export_of(ByteTokenizer(), tmp_path / "model", n_layer=4, layer_repeats=4, **values)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert f" with {theirs.num_parameters():,} parameters" in (tmp_path / "model/README.md").read_text()


def test_the_modeling_file_needs_no_minigpt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minigpt", None)  # an import of it fails
    monkeypatch.setitem(sys.modules, "modeling", module := ModuleType("modeling"))
    exec(modeling_code(), module.__dict__)
    assert issubclass(module.MiniGPTForCausalLM, transformers.PreTrainedModel)


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_an_exported_run_works_in_transformers(
    train: Callable[..., Any], call: Callable[..., Any], tmp_path: Path, tokenizer: str
) -> None:
    size = ["tokenizer.vocab_size=300"] if tokenizer == "bpe" else []
    run = train(f"tokenizer={tokenizer}", *size, "max_steps=10")
    folder, weights = tmp_path / "exports" / "tiny", tmp_path / "weights.safetensors"
    exported = call("export.py", str(run.folder), "--to", "huggingface", "--out", str(folder))
    assert exported.stdout.splitlines()[-1] == f"to upload it: hf upload tiny {folder}", exported.stderr
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == names | {"README.md"}
    model, encoding = load_checkpoint(run.folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "7: the quick brown fox\n"
    assert theirs(text).input_ids == encoding.encode(text).tolist()
    pipeline = transformers.pipeline("text-generation", model=str(folder))
    (answer,) = pipeline("the quick", max_new_tokens=7, do_sample=False)
    (sample,) = generate(model, encoding.encode("the quick"), max_new_tokens=7, temperature=0)
    assert answer["generated_text"] == "the quick" + encoding.decode(sample.tokens)
    assert len(pipeline("the quick")[0]["generated_text"]) > len("the quick")
    card = (folder / "README.md").read_text()
    assert f"best_val_loss: {run.loss}" in card
    assert "n_embd: 32" in card

    assert call("export.py", str(run.folder), "--to", "safetensors", "--out", str(weights)).returncode == 0
    alone, its_tokenizer = load_checkpoint(weights)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))
    assert its_tokenizer.to_dict() == encoding.to_dict()
    assert weights.stat().st_size < (run.folder / BEST).stat().st_size / 2


def test_what_cannot_be_exported_is_one_line(call: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    for arguments, message in (
        (["--to", "huggingface", "--out", "full"], "error: --out must be a path that does not exist yet, got full"),
        (["--to", "huggingface", "--out", "new"], "error: no run with a checkpoint in runs/"),
        (["full", "--to", "huggingface", "--out", "new"], "error: full holds no checkpoints/best.safetensors"),
        (["--to", "safetensors", "--out", "new", "--weights", "float16"], "error: --weights must be left out without"),
    ):
        refused = call("export.py", *arguments)
        assert refused.returncode == 2
        (line,) = refused.stderr.splitlines()
        assert line.startswith(message)
    assert not (tmp_path / "new").exists()
