"""Models of transformers that are loaded, and ours exported: logits, loss and text are equal."""

import json
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import exported
import pytest
import tokenizers
import torch
from corpora import random_texts
from exported import CHARACTERS, LLAMA, random_model
from models import draw_weights
from safetensors.torch import load_file
from small_runs import one_line
from tolerance import assert_near, terms_of
from torch.testing import assert_close

from minigpt import GPT, GPTConfig, generate, load_checkpoint
from minigpt.checkpoints.find import BEST
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.checkpoints.load import save_checkpoint
from minigpt.data.tokenizer import ByteTokenizer, Ids, Tokenizer
from minigpt.extras.huggingface.conversion import FAMILIES, config_to_ours
from minigpt.extras.huggingface.export_huggingface import export_folder, export_model, modeling_code
from minigpt.extras.huggingface.pretrained import load_folder
from minigpt.extras.huggingface.tokenizer_json import HuggingFaceTokenizer, tokenizer_files
from minigpt.runs.run_dir import read_summary
from minigpt.utils.errors import UserError

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SMALL |= {"max_position_embeddings": 72}
NESTED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NESTED |= {"original_max_position_embeddings": 32}
LLAMA3 = {**NESTED, "rope_theta": 500.0}
ROPE = {"rope_type": "default", "rope_theta": 777.0}
TOKENS = torch.arange(20)[None]
GPT2 = {"vocab_size": 101, "n_positions": 72, "n_embd": 32, "n_layer": 2, "n_head": 4}
THEIRS: dict[str, dict[str, Any]] = {  # by a name that begins with that of their class
    "GPT2": GPT2,
    "GPT2 with erf and an inner width": {**GPT2, "activation_function": "gelu", "n_inner": 40},
    "Llama": {**SMALL, "rope_parameters": ROPE},
    "Llama with one key-value head": {**SMALL, "num_key_value_heads": 1},
    "Llama with tied embeddings": {**SMALL, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    "Llama with biases": {**SMALL, "attention_bias": True, "mlp_bias": True},
    "Llama with scaled rope": {**SMALL, "rope_parameters": LLAMA3},
    **dict.fromkeys(("Qwen2", "Arcee", "NanoChat"), SMALL),
    "Qwen3 with wide heads": {**SMALL, "head_dim": 16},
    "Starcoder2": {**SMALL, "hidden_act": "gelu"},
    "NanoChat without a soft cap": {**SMALL, "final_logit_softcapping": None},
}
HEADS = {"n_head": 8, "head_dim": 6}
# By a name that begins with that of the class, if it is one of transformers
# Others have the same class and the same settings
SAME = {"one position", "smear", "Llama 3, scaled rope", "Llama, a wider head"}
MODELS: dict[str, dict[str, Any]] = {
    **{name: values for name, values in exported.MODELS.items() if name not in SAME},
    "GPT-2 under mup": exported.MUP,
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
    monkeypatch.setattr(f"{package}._SOURCES", ["model/config", "model/gpt"])
    with pytest.raises(
        UserError, match=r"imports minigpt\.utils\.checks, which is not in _SOURCES"
    ):
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
    for refused, message in (
        ({"position_ids": torch.arange(9)[None]}, "position_ids must count the tokens of each row"),
        ({"attention_mask": holes}, "attention_mask must have zeros on the left and on the right"),
        ({"attention_mask": mask[:, 1:]}, r"attention_mask must be \(2, 9\), got \(2, 8\)"),
        ({"output_hidden_states": True}, "CausalLM does not support output_hidden_states"),
    ):
        with pytest.raises(ValueError, match=message):
            theirs(tokens, **{"attention_mask": mask, **refused})
    greedy = {"max_new_tokens": 12, "do_sample": False}  # beyond the 16 tokens of a block
    alone = theirs.generate(tokens[:1, 4:], **greedy)
    assert torch.equal(theirs.generate(tokens, attention_mask=mask, **greedy)[:1, 4:], alone)


def test_an_export_of_its_own_class_is_read_without_its_code(tmp_path, call):
    settings = {"smear": 2, "ngram": 3, "qk_norm": True, "qk_norm_weights": True}
    ours = random_model(**settings, ngram_buckets=50, dropout=0.1)
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
    for values, message in (
        ({"new_setting": 3}, "unknown model setting new_setting; made by another version of min"),
        ({"smear": -1}, "smear must be "),
        ({"smear": 0}, "unexpected weights: model.smear."),
        ({"tie_word_embeddings": False}, "tie_word_embeddings must be True, got False"),
        ({"n_layer": 3}, "the weight model.blocks.2."),
        ({"n_embd": 64}, "size mismatch"),
    ):
        (folder / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
        assert message in one_line(call("sample.py", str(folder)))


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "MiniGPT"])
def test_an_export_generates_tokens_alone_up_to_a_stop_string_for_every_prompt_that_fits(
    name, tmp_path
):
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
    ids = tokenizer("ab", return_tensors="pt").input_ids
    text = tokenizer.decode(theirs.generate(ids, max_new_tokens=15, **greedy)[0])
    stopped = {"stop_strings": [text[8:10]], "tokenizer": tokenizer}
    found = theirs.generate(ids, max_new_tokens=15, **greedy, **stopped)
    assert tokenizer.decode(found[0]) == text[: text.index(text[8:10], 2) + 2]


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


PAIRS = [("gpt2", "Qwen2"), ("gpt2", "Qwen3"), ("gpt2", "Llama"), ("qwen2", "Qwen2")]
EXPORTED = ("Qwen2", "Qwen3", "GPT-2", "Llama", "Arcee", "NanoChat", "Starcoder2, the default")
OTHER_PAIRS = [pair for pair in product(("gpt2", "qwen2"), EXPORTED) if pair not in PAIRS]
SLOW_PAIRS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHER_PAIRS]


@pytest.mark.parametrize(("name", "family"), PAIRS + SLOW_PAIRS)
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
    both = [load_file(folder / "model.safetensors") for folder in (tmp_path / "copy", gpt2_folder)]
    assert_close(*both, rtol=0, atol=0)
    assert "A GPT2LMHeadModel with " in (tmp_path / "copy/README.md").read_text(encoding="utf-8")


def their_model(name: str) -> Any:
    torch.manual_seed(0)
    family = name.partition(" ")[0]
    kind = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    model = kind(getattr(transformers, f"{family}Config")(**THEIRS[name]))
    draw_weights(model)
    return model.eval()


@torch.no_grad()
def check_logits(folder: Path, theirs: Any) -> None:
    assert_close(load_folder(folder)(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", THEIRS)
def test_a_model_of_transformers_gives_the_same_logits_loss_and_greedy_text(name, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path)
    ours = load_folder(tmp_path)
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, ours.config.vocab_size, (3, 40), generator=rng)
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)
        assert_near(ours(tokens), expected.logits, terms=terms_of(ours.config))
        assert_close(ours(tokens[:, :-1], tokens[:, 1:]), expected.loss, rtol=0, atol=1e-5)
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones(1, 40)  # a token that is also the padding is read
    text = theirs.generate(tokens[:1], attention_mask=mask, max_new_tokens=32, **greedy)
    (sample,) = generate(ours, tokens[0], max_new_tokens=32, temperature=0)
    assert sample.tokens == text[0, 40:].tolist()


def test_the_shards_are_those_that_the_index_names_unless_there_is_a_single_file(tmp_path):
    other = their_model("Llama with one key-value head")
    other.save_pretrained(tmp_path, max_shard_size="10kB")
    their_model("Llama").bfloat16().save_pretrained(tmp_path / "new", max_shard_size="20kB")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path / "new", dtype=torch.float32)
    for file in (tmp_path / "new").iterdir():
        file.replace(tmp_path / file.name)
    check_logits(tmp_path, theirs)
    index = tmp_path / "model.safetensors.index.json"
    content = index.read_text(encoding="utf-8")
    index.write_text(content.replace("-00001", "-00099"), encoding="utf-8")
    check_refused(tmp_path, "No such file or directory: ", "model-00099-of-")
    # Which transformers leaves behind when it saves one file over shards
    index.write_text(content, encoding="utf-8")
    other.save_pretrained(tmp_path)
    check_logits(tmp_path, other)
    for file in [index, *tmp_path.glob("*.safetensors")]:
        file.rename(file.with_suffix(".bin"))
    check_refused(tmp_path, "index.json is missing; weights must be safetensors, because a .bin")


def test_a_model_saved_without_its_head_is_read(tmp_path):
    # On the Hub, its weights have names without `transformer.`, and no head
    theirs = their_model("GPT2")
    theirs.transformer.save_pretrained(tmp_path)
    check_logits(tmp_path, theirs)


def test_n_ctx_of_gpt_2_has_no_effect_as_in_transformers(tmp_path):
    theirs = their_model("GPT2")
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"n_ctx": 24}), encoding="utf-8")
    assert transformers.AutoConfig.from_pretrained(tmp_path).n_positions == 72
    assert load_folder(tmp_path).config.block_size == 72
    check_logits(tmp_path, theirs)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_setting_that_a_config_lacks_is_the_default_of_the_class(model_type):
    def sizes(values: dict[str, Any]) -> GPTConfig:
        config = config_to_ours(values)
        n_kv_head = config.n_kv_head or config.n_head
        return replace(config, n_kv_head=n_kv_head, head_dim=config.head_width)

    theirs = transformers.AutoConfig.for_model(model_type).to_dict()
    assert sizes({"model_type": model_type}) == sizes(theirs)
    for missing in set(theirs) - {"model_type"}:  # as a file that AutoConfig reads
        values = {key: value for key, value in theirs.items() if key != missing}
        read = transformers.AutoConfig.for_model(**values).to_dict()
        assert sizes(values) == sizes(read), missing


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_settings_are_read_by_each_name_that_a_version_of_transformers_writes(place):
    values = {"model_type": "llama", **SMALL, "rope_theta": 500.0}
    values |= {"original_max_position_embeddings": 32}
    for everywhere in ({}, {"rope_parameters": LLAMA3, "rope_scaling": NESTED}):
        config = config_to_ours(values | {place: NESTED} | everywhere)
        assert (config.rope_base, config.rope_scaling) == (500, (4.0, 1.0, 4.0, 32))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "bert"}, f"model_type must be one of {', '.join(FAMILIES)}, got bert"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None, got {'bits': 4}"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_type must be one of default, llama3, got linear",
        ),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, swish, got gelu"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types must be {'full_attention'}, got {",
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor"),
        (
            {"rope_parameters": {**NESTED, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1, got 0.5",
        ),
        ({"num_hidden_layers": 1}, "unexpected weights: model.layers.1."),
        ({"num_hidden_layers": 3}, "the weight model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 10**12}, "its model has 1,000,000,000,000 layers"),
        (
            {"tie_word_embeddings": True},
            "lm_head.weight differs from the embeddings; set tie_word_embeddings to false",
        ),
        (
            {"rope_theta": 1.0, "rope_parameters": ROPE},
            "rope_theta must have one value, got 1.0 and 777.0",
        ),
    ],
)
def test_a_value_that_the_weights_or_another_contradict_is_named(tmp_path, values, message):
    their_model("Llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    changed = config | {"rope_parameters": None} | values
    (tmp_path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    check_refused(tmp_path, "cannot be loaded: ", message)


def check_refused(folder: Path, *parts: str) -> None:
    with pytest.raises(UserError) as error:
        load_folder(folder)
    assert all(part in str(error.value) for part in parts), error.value
    assert "\n" not in str(error.value)
