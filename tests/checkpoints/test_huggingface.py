"""Models of transformers with random weights, loaded from their folders: logits, loss and greedy text are equal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerance import assert_near, terms_of

from minigpt import GPTConfig, generate
from minigpt.checkpoints.huggingface_conversion import FAMILIES, config_to_ours
from minigpt.checkpoints.init_from import _weight_files, load_folder
from minigpt.utils.errors import UserError

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 72, "head_dim": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPE = {"rope_type": "default", "rope_theta": 777.0}
TOKENS = torch.arange(20)[None]
GPT2 = {"vocab_size": 101, "n_positions": 72, "n_embd": 32, "n_layer": 2, "n_head": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", GPT2),
    "GPT-2 with erf and an inner width": ("GPT2", {**GPT2, "activation_function": "gelu", "n_inner": 40}),
    "Llama": ("Llama", {**SMALL, **HEADS, "rope_parameters": ROPE}),
    "Llama with one key-value head": ("Llama", {**SMALL, **HEADS, "num_key_value_heads": 1}),
    "Llama with tied embeddings": ("Llama", {**SMALL, **HEADS, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "Llama with biases": ("Llama", {**SMALL, **HEADS, "attention_bias": True, "mlp_bias": True}),
    "Llama 3 with scaled rope": ("Llama", {**SMALL, **HEADS, "rope_parameters": LLAMA3}),
    "Llama with wide heads": ("Llama", {**SMALL, **HEADS, "head_dim": 12}),
    "Qwen2": ("Qwen2", {**SMALL, **HEADS}),
    "Qwen3": ("Qwen3", {**SMALL, **HEADS, "head_dim": 16}),
    "Arcee": ("Arcee", {**SMALL, **HEADS}),
    "NanoChat": ("NanoChat", {**SMALL, **HEADS}),
    "Starcoder2": ("Starcoder2", {**SMALL, **HEADS, "hidden_act": "gelu"}),
    "NanoChat without a soft cap": ("NanoChat", {**SMALL, **HEADS, "final_logit_softcapping": None}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_gives_the_same_logits_loss_and_greedy_text(name: str, tmp_path: Path) -> None:
    theirs = random_model(*MODELS[name])
    theirs.save_pretrained(tmp_path)
    ours = load_folder(tmp_path)
    tokens = torch.randint(0, ours.config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)
        assert_near(ours(tokens), expected.logits, terms=terms_of(ours.config))
        torch.testing.assert_close(ours(tokens[:, :-1], tokens[:, 1:]), expected.loss, rtol=0, atol=1e-5)
    text = theirs.generate(tokens[:1, :8], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    (sample,) = generate(ours, tokens[0, :8], max_new_tokens=64, temperature=0)
    assert sample.tokens == text[0, 8:].tolist()


def test_shards_are_read_as_float32_unless_there_is_a_single_file(tmp_path: Path) -> None:
    """transformers leaves the index behind when it saves one file over shards."""
    random_model(*MODELS["Llama"]).bfloat16().save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours, tokens = load_folder(tmp_path), torch.arange(20)[None]
    assert {weight.dtype for weight in ours.parameters()} == {torch.float32}
    other = random_model(*MODELS["Llama with one key-value head"])
    other.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(load_folder(tmp_path)(tokens), other(tokens).logits, rtol=0, atol=1e-4)


def test_the_shards_are_those_that_the_index_names(tmp_path: Path) -> None:
    stale = random_model("Llama", {**SMALL, **HEADS, "num_key_value_heads": 1})
    stale.save_pretrained(tmp_path, max_shard_size="10kB")
    others = list(tmp_path.glob("model-*.safetensors"))
    random_model(*MODELS["Llama"]).save_pretrained(tmp_path / "new", max_shard_size="20kB")
    for file in (tmp_path / "new").iterdir():
        file.replace(tmp_path / file.name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(load_folder(tmp_path)(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)
    index = tmp_path / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values())
    assert {file.name for file in _weight_files(tmp_path)} == named
    content = index.read_text()
    for damaged, message in (("[]", "index.json is damaged: "), (content.replace("-00001", "-00099"), "is missing")):
        index.write_text(damaged)
        with pytest.raises(UserError, match=message):
            load_folder(tmp_path)
    index.unlink()
    with pytest.raises(UserError, match=r"index\.json is missing, and the shards in .* are of several models"):
        load_folder(tmp_path)
    for file in others:
        file.unlink(missing_ok=file.name in named)
    with torch.no_grad():
        torch.testing.assert_close(load_folder(tmp_path)(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)


def test_a_model_saved_without_its_head_is_read(tmp_path: Path) -> None:
    """The weights of gpt2 on the Hub have names without `transformer.`, and no head."""
    theirs = random_model(*MODELS["GPT-2"])
    theirs.transformer.save_pretrained(tmp_path)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_folder(tmp_path)(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_the_scaling_of_rope_is_read_where_any_version_of_transformers_writes_it(place: str) -> None:
    values = json.loads(transformers.LlamaConfig(**SMALL, **HEADS).to_json_string(use_diff=False))
    del values["rope_parameters"]
    rope = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    config = config_to_ours({**values, "rope_theta": 500.0, place: rope})
    assert config.rope_base == 500
    assert config.rope_scaling == (4.0, 1.0, 4.0, 32)


NESTED = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": 1.0, "rope_parameters": ROPE}, "rope_theta must have one value, got 1.0 and 777.0"),
        ({"rope_scaling": NESTED, "rope_parameters": ROPE}, "rope_type must have one value, got llama3 and default"),
        ({"rope_scaling": NESTED, "rope_parameters": {**NESTED, "factor": 8.0}}, "factor must have one value, got 4.0"),
        (
            {"original_max_position_embeddings": 64, "rope_scaling": NESTED},
            "original_max_position_embeddings must have one value, got 64 and 32",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "rope_type must have one value, got linear and"),
        ({"rope_parameters": {"full_attention": ROPE}}, "rope_parameters must have no full_attention, got {"),
        ({"rope_parameters": {**NESTED, "partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1, got 0.5"),
        ({"model_type": "gpt2", **GPT2, "hidden_size": 64}, "n_embd must have one value, got 32 and 64"),
        ({"model_type": "gpt2", **GPT2, "n_ctx": 1024}, "n_positions must have one value, got 72 and 1024"),
    ],
)
def test_two_values_of_one_setting_are_refused(values: dict[str, Any], message: str) -> None:
    llama = {} if "model_type" in values else {"model_type": "llama", **SMALL, **HEADS}
    with pytest.raises(UserError) as error:
        config_to_ours({**llama, **values})
    assert message in str(error.value)


def test_equal_values_of_one_setting_and_other_names_are_read() -> None:
    everywhere = {"rope_theta": 500.0, "original_max_position_embeddings": 32, "rope_parameters": LLAMA3}
    config = config_to_ours({"model_type": "llama", **SMALL, **HEADS, **everywhere, "rope_scaling": NESTED})
    assert (config.rope_base, config.rope_scaling) == (500, (4.0, 1.0, 4.0, 32))
    names = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 40}
    ours, theirs = config_to_ours({"model_type": "gpt2", "vocab_size": 9, **names}), transformers.GPT2Config(**names)
    assert (ours.n_embd, ours.n_layer, ours.n_head) == (theirs.n_embd, theirs.n_layer, theirs.n_head) == (64, 3, 2)
    assert ours.block_size == theirs.n_positions == 40


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_configuration_of_transformers_is_read_from_its_json(family: str) -> None:
    theirs = transformers.AutoConfig.for_model(family)
    ours = config_to_ours(json.loads(theirs.to_json_string(use_diff=False)))
    assert isinstance(ours, GPTConfig)
    assert (ours.n_layer, ours.n_head, ours.n_embd) == (
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.hidden_size,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "bert"}, f"model_type must be one of {', '.join(FAMILIES)}, got bert"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None, got {'bits': 4}"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type must be one of default, llama3, got linear"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, swish, got gelu"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window must be False, got True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be {'full_attention'}, got {"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor"),
        ({"head_dim": 7}, "model.head_dim must be even with model.position=rope, got 7"),
        ({"num_hidden_layers": 1}, "unexpected weights: model.layers.1."),
        ({"num_hidden_layers": 10**12}, "its model has 1,000,000,000,000 layers"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from the embeddings; set tie_word_embeddings to false"),
    ],
)
def test_a_value_that_the_model_or_the_weights_contradict_is_named(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    random_model(*MODELS["Llama"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    if "rope_scaling" in values:
        del config["rope_parameters"]
    file.write_text(json.dumps({**config, **values}))
    with pytest.raises(UserError, match="cannot be loaded: ") as error:
        load_folder(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("model-00001-of-*.safetensors", "the weight model."),
        ("model-*.safetensors", "model.safetensors is missing; weights must be safetensors, because a .bin file can"),
    ],
)
def test_a_missing_file_of_weights_is_one_line(tmp_path: Path, lost: str, message: str) -> None:
    random_model(*MODELS["Llama"]).save_pretrained(tmp_path, max_shard_size="20kB")
    for file in tmp_path.glob(lost):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(UserError) as error:
        load_folder(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def random_model(name: str, values: dict[str, Any]) -> Any:
    """Return a model of transformers with random weights, all parameters nonzero."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(
        getattr(transformers, f"{name}Config")(**values)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return model.eval()
