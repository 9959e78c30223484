"""Exported models in transformers: logits, loss and greedy text are equal."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
import torch
from corpora import random_texts
from exported import CHARACTERS, LLAMA, MUP, random_model
from exported import MODELS as OTHERS
from safetensors.torch import load_file
from torch.testing import assert_close

from minigpt import GPT, generate, load_checkpoint
from minigpt.checkpoints.find import BEST
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.checkpoints.load import save_checkpoint
from minigpt.data.tokenizer import ByteTokenizer, Ids, Tokenizer
from minigpt.extras.huggingface.conversion import FAMILIES
from minigpt.extras.huggingface.export_huggingface import export_folder, export_model, modeling_code
from minigpt.extras.huggingface.pretrained import load_folder
from minigpt.extras.huggingface.tokenizer_json import HuggingFaceTokenizer, tokenizer_files
from minigpt.runs.run_dir import read_summary
from minigpt.utils.errors import UserError

transformers = pytest.importorskip("transformers")
HEADS = {"n_head": 8, "head_dim": 6}
# By a name that begins with that of the class, if it is one of transformers
MODELS: dict[str, dict[str, Any]] = {
    **{name: values for name, values in OTHERS.items() if name != "one position"},
    "GPT-2 under mup": MUP,
    "Starcoder2, the default": {"position": "rope", "bias": False, "rope_base": 300.0},
    "MiniGPT with a gated MLP": {"position": "rope", "bias": False, "activation": "swiglu"},
    "MiniGPT with heads that do not divide the width": LLAMA | {"n_embd": 36, **HEADS},
    "Llama with biases": {**LLAMA, "bias": True},
    "Llama with normalized embeddings": {**LLAMA, "embed_norm": True},
    "Qwen2": {**LLAMA, "qkv_bias": True, "n_kv_head": 2},
    "Qwen3 without weights of QK-norm": {**LLAMA, "qk_norm": True},
    "Arcee": {**LLAMA, "activation": "relu2"},
}
CLASSES = [family.architecture for family in FAMILIES.values()] + ["MiniGPTForCausalLM"]


def in_transformers(model: GPT, folder: Path, tokenizer: Tokenizer = CHARACTERS) -> Any:
    saved = folder / "model.safetensors"
    save_checkpoint(model, tokenizer, saved)
    architecture = export_folder(find_pretrained(str(saved)), folder / "model")
    own = architecture == "MiniGPTForCausalLM"
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(folder / "model", trust_remote_code=own)
    assert type(theirs).__name__ == architecture
    return theirs.eval()


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_gives_the_same_logits_loss_and_greedy_text(name, tmp_path):
    ours = random_model(**MODELS[name])
    theirs = in_transformers(ours, tmp_path).train()  # there is no dropout
    architecture = type(theirs).__name__
    # With a tokenizer that is not Qwen2's, a Qwen2 is a Llama
    first = re.sub("[ ,].*|-", "", name).replace("Qwen2", "Llama")
    assert architecture.startswith(first) or not any(known.startswith(first) for known in CLASSES)
    assert theirs.get_input_embeddings().weight.shape == ours.wte.weight.shape
    card = (tmp_path / "model/README.md").read_text(encoding="utf-8")
    assert f" with {theirs.num_parameters():,} parameters" in card
    T = ours.config.block_size
    n = min(T - 4, 12)
    tokens = torch.randint(0, 101, (3, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)
        assert_close(ours(tokens), expected.logits, rtol=0, atol=1e-4)
        assert_close(ours(tokens[:, :-1], tokens[:, 1:]), expected.loss, rtol=0, atol=1e-5)
    greedy = {"do_sample": False, "suppress_tokens": None}
    text = theirs.generate(tokens[:1, :4], max_new_tokens=n, **greedy)
    (sample,) = generate(ours, tokens[0, :4], max_new_tokens=n, temperature=0)
    assert sample.tokens == text[0, 4:].tolist()
    theirs.save_pretrained(tmp_path / "theirs")  # loaded and exported again, it has equal bits
    config, weights = export_model(load_folder(tmp_path / "theirs"))
    assert_close(weights, load_file(tmp_path / "model/model.safetensors"), rtol=0, atol=0)
    written = json.loads((tmp_path / "model/config.json").read_text(encoding="utf-8"))
    assert config.items() <= written.items()


def test_a_model_that_its_user_changed_is_refused_unless_its_head_was_untied():
    ours = random_model()
    ours.lm_head.weight = torch.nn.Parameter(ours.wte.weight.detach().flip(0))
    assert torch.equal(export_model(ours)[1]["lm_head.weight"], ours.lm_head.weight)
    ours.blocks[0].mlp.activation = torch.sin
    with pytest.raises(UserError, match=r"model\.blocks\.0\.mlp\.activation is changed"):
        export_model(ours)


def test_parts_that_an_export_lacks_are_refused(monkeypatch):
    package = "minigpt.extras.huggingface.export_huggingface"

    class Lowercase(ByteTokenizer):
        def encode(self, text: str) -> Ids:
            return super().encode(text.lower())

    with pytest.raises(UserError, match="cannot describe a Lowercase"):
        tokenizer_files(Lowercase())
    with monkeypatch.context() as patch:
        patch.setattr(f"{package}._SOURCES", ["model/config", "model/gpt"])
        missing = r"imports minigpt\.utils\.checks, which is not in _SOURCES"
        with pytest.raises(UserError, match=missing):
            modeling_code()
    model = random_model(ngram=2)
    model.register_buffer("slopes", torch.ones(2), persistent=False)
    # As if every model had it
    monkeypatch.setattr(f"{package}.saved_config", lambda model: model.config)
    with pytest.raises(UserError, match="does not compute slopes"):
        export_model(model)


def test_a_model_of_its_own_class_ignores_padding_and_supports_an_argument_or_refuses_it(tmp_path):
    ours = random_model(smear=1, block_size=16)
    theirs = in_transformers(ours, tmp_path)
    tokens = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = theirs(tokens, attention_mask=mask, labels=tokens)
    right = theirs(tokens, attention_mask=mask.flip(1))
    with torch.no_grad():
        assert_close(whole.logits[:1, 4:], ours(tokens[:1, 4:]), rtol=0, atol=1e-4)
        assert_close(right.logits[:1, :5], ours(tokens[:1, :5]), rtol=0, atol=1e-4)
    options = {"use_cache": True, "num_items_in_batch": 16, "logits_to_keep": 3}
    options |= {"position_ids": positions, "labels": tokens}
    found = theirs(tokens, attention_mask=mask, **options)
    assert torch.equal(found.logits, whole.logits[:, -3:])
    assert_close(found.loss, whole.loss)  # of 16 labels
    holes = mask.clone()
    holes[1, 4] = 0
    zeros = "attention_mask must have zeros on the left and on the right only"
    count = "position_ids must count the tokens of each row from 0"
    hidden = "MiniGPTForCausalLM does not support output_hidden_states"
    for refused, message in (
        ({"position_ids": torch.arange(9)[None]}, count),
        ({"attention_mask": holes}, zeros),
        ({"attention_mask": mask[:, 1:]}, r"attention_mask must be \(2, 9\), got \(2, 8\)"),
        ({"output_hidden_states": True}, hidden),
    ):
        with pytest.raises(ValueError, match=message):
            theirs(tokens, **{"attention_mask": mask, **refused})
    greedy = {"max_new_tokens": 12, "do_sample": False}  # beyond the 16 tokens of a block
    alone = theirs.generate(tokens[:1, 4:], **greedy)
    assert torch.equal(theirs.generate(tokens, attention_mask=mask, **greedy)[:1, 4:], alone)


def test_an_export_of_its_own_class_is_read_without_its_code(tmp_path, call):
    settings = {"smear": 2, "ngram": 3, "ngram_buckets": 50, "dropout": 0.1}
    ours = random_model(**settings, qk_norm=True, qk_norm_weights=True)
    in_transformers(ours, tmp_path)
    folder = tmp_path / "model"
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    (folder / "modeling_minigpt.py").write_text(code, encoding="utf-8")
    pretrained = find_pretrained(str(folder))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(pretrained.load()(tokens), ours(tokens))
    assert pretrained.config == replace(ours.config, dropout=0.0)
    for text in ("Hello", ""):
        flags = ("--prompt", text, "--json", "--max-new-tokens", "30", "--device", "cpu")
        both = [call("sample.py", f"{folder}{end}", *flags).stdout for end in ("", ".safetensors")]
        tokens, expected = (json.loads(printed)["tokens"] for printed in both)
        assert tokens == expected
    assert not (tmp_path / "ran").exists()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    unknown = "unknown model setting new_setting; made by another version of minigpt?"
    for values, message in (
        ({"new_setting": 3}, unknown),
        ({"smear": -1}, "smear must be "),
        ({"smear": 0}, "unexpected weights: model.smear."),
        ({"tie_word_embeddings": False}, "tie_word_embeddings must be True, got False"),
        ({"n_layer": 3}, "the weight model.blocks.2."),
        ({"n_embd": 64}, "size mismatch"),
    ):
        (folder / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
        result = call("sample.py", str(folder))
        assert (result.returncode, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert message in line


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "MiniGPT"])
def test_an_export_generates_tokens_alone_for_every_prompt_that_fits(name, tmp_path):
    settings = {"GPT-2": {"activation": "gelu_tanh"}, "Llama": LLAMA, "MiniGPT": {"smear": 1}}[name]
    ours = random_model(**settings, vocab_size=2000)  # most ids have no token
    theirs = in_transformers(ours, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    pipeline = transformers.pipeline("text-generation", model=theirs, tokenizer=tokenizer)
    T = ours.config.block_size
    for length in (1, T - 1, T) if name == "GPT-2" else (1, T, 2 * T):
        (answer,) = pipeline("a" * length)
        expected = max(T + 1, length) if name == "GPT-2" else length + 20
        assert len(answer["generated_text"]) == expected
    greedy = {"do_sample": False}
    for settings in (greedy, {"do_sample": True, "temperature": 5.0}, {"num_beams": 2, **greedy}):
        ids = theirs.generate(torch.tensor([[1]]), max_new_tokens=12, **settings)
        assert ids.max() < CHARACTERS.vocab_size
    free = theirs.generate(torch.tensor([[1]]), max_new_tokens=12, suppress_tokens=None)
    assert free.max() >= CHARACTERS.vocab_size
    assert pipeline.model.generate(max_new_tokens=1)[0, :1].tolist() == CHARACTERS.start.tolist()


@pytest.mark.parametrize("name", ["GPT-2", "MiniGPT"])
def test_a_stop_string_ends_the_text_of_an_export(name, tmp_path):
    settings = {"GPT-2": {"activation": "gelu_tanh"}, "MiniGPT": {"smear": 1}}[name]
    theirs = in_transformers(random_model(**settings), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("ab", return_tensors="pt").input_ids
    options = {"do_sample": False, "max_new_tokens": 15}
    text = tokenizer.decode(theirs.generate(ids, **options)[0])
    stop = text[8:10]
    found = theirs.generate(ids, **options, stop_strings=[stop], tokenizer=tokenizer)
    assert tokenizer.decode(found[0]) == text[: text.index(stop, 2) + 2]


# Return a tokenizer.json of the steps of Qwen2, or with digits in threes as Llama 3
def tokenizer_content(name: str) -> str:
    tokenizer = transformers.Qwen2Tokenizer()._tokenizer
    tokenizer.add_special_tokens(["<|endoftext|>"])
    options = {"initial_alphabet": tokenizers.pre_tokenizers.ByteLevel.alphabet()}
    options |= {"special_tokens": ["<|endoftext|>"], "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, **options)
    tokenizer.train_from_iterator(["the number 123 123 456 456 of 2024 2024 " * 9], trainer)
    content = tokenizer.to_str()
    return content if name == "qwen2" else content.replace("|\\\\p{N}|", "|\\\\p{N}{1,3}|")


LIKE_QWEN2 = ["Qwen2", "Qwen3"]
OTHERS_OF_HUB = ["GPT-2", "Llama", "Arcee", "NanoChat", "Starcoder2, the default"]
PAIRS = [("gpt2", family) for family in LIKE_QWEN2 + OTHERS_OF_HUB]
PAIRS += [("qwen2", family) for family in LIKE_QWEN2]
SLOW_PAIRS = [pytest.param("qwen2", family, marks=pytest.mark.slow) for family in OTHERS_OF_HUB]


# transformers takes the steps of Qwen2's tokenizer for every model of type qwen2
@pytest.mark.parametrize(("name", "family"), [*PAIRS, *SLOW_PAIRS])
def test_the_tokenizer_of_an_exported_class_is_that_of_tokenizer_json(tmp_path, name, family):
    tokenizer = HuggingFaceTokenizer(tokenizer_content(name), 0)
    model = random_model(**MODELS[family], vocab_size=tokenizer.vocab_size)
    tokens = torch.arange(20)[None]
    exported = in_transformers(model, tmp_path, tokenizer)
    with torch.no_grad():
        assert_close(exported(tokens).logits, model(tokens), rtol=0, atol=1e-4)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    reference = tokenizers.Tokenizer.from_str(tokenizer.json)
    texts = ["in 1234567 of 2024", "x<|endoftext|>y\n\n  z", "cafe\u0301 12 345"]
    for text in [*texts, *random_texts(30)]:
        text = text.replace("\ud800", "")
        assert theirs(text)["input_ids"] == reference.encode(text).ids


def test_the_modeling_file_needs_no_minigpt(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "minigpt"]:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    module = ModuleType("modeling")
    monkeypatch.setitem(sys.modules, "modeling", module)
    exec(modeling_code(), module.__dict__)
    assert issubclass(module.MiniGPTForCausalLM, transformers.PreTrainedModel)


def test_an_exported_run_works_in_transformers(trained, call, tmp_path):
    run = trained("tokenizer=bpe", "tokenizer.vocab_size=300")
    folder = tmp_path / "exports" / "tiny"
    weights = tmp_path / "weights.safetensors"
    exported = call("export.py", str(run), "--to", "huggingface", "--out", str(folder))
    assert exported.stdout.endswith(f"\nto upload it: hf upload tiny {folder}\n"), exported.stderr
    model, encoding = load_checkpoint(run)
    text = "7: the quick brown fox\n"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs(text).input_ids == encoding.encode(text).tolist()
    pipeline = transformers.pipeline("text-generation", model=str(folder))
    (answer,) = pipeline("the quick", max_new_tokens=7, do_sample=False)
    (sample,) = generate(model, encoding.encode("the quick"), max_new_tokens=7, temperature=0)
    assert answer["generated_text"] == "the quick" + encoding.decode(sample.tokens)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"best_val_loss: {read_summary(run)['best_val_loss']}" in card

    assert call("export.py", str(run), "--to", "safetensors", "--out", str(weights)).returncode == 0
    alone, its_tokenizer = load_checkpoint(weights)
    assert_close(alone.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert its_tokenizer.to_dict() == encoding.to_dict()
    assert weights.stat().st_size < (run / BEST).stat().st_size / 2


def test_a_folder_of_hugging_face_is_exported_with_its_weights(call, gpt2_folder, tmp_path):
    exported = call("export.py", str(gpt2_folder), "--to", "huggingface", "--out", "copy")
    assert exported.returncode == 0
    weights = load_file(tmp_path / "copy/model.safetensors")
    assert_close(weights, load_file(gpt2_folder / "model.safetensors"), rtol=0, atol=0)
    assert "A GPT2LMHeadModel with " in (tmp_path / "copy/README.md").read_text(encoding="utf-8")
