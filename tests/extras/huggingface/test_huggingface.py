"""Models of transformers, loaded from their folders: logits, loss and greedy text are equal."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import draw_weights
from tolerance import assert_near, terms_of
from torch.testing import assert_close

from minigpt import GPTConfig, generate
from minigpt.extras.huggingface.conversion import FAMILIES, config_to_ours
from minigpt.extras.huggingface.pretrained import load_folder
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
MODELS: dict[str, dict[str, Any]] = {  # by a name that begins with that of their class
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


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    family = name.partition(" ")[0]
    kind = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    model = kind(getattr(transformers, f"{family}Config")(**MODELS[name]))
    draw_weights(model)
    return model.eval()


@torch.no_grad()
def check_logits(folder: Path, theirs: Any) -> None:
    assert_close(load_folder(folder)(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_gives_the_same_logits_loss_and_greedy_text(name, tmp_path):
    theirs = random_model(name)
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
    other = random_model("Llama with one key-value head")
    other.save_pretrained(tmp_path, max_shard_size="10kB")
    random_model("Llama").bfloat16().save_pretrained(tmp_path / "new", max_shard_size="20kB")
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
    missing = "index.json is missing; weights must be safetensors, because a .bin file can"
    check_refused(tmp_path, missing)


def test_a_model_saved_without_its_head_is_read(tmp_path):
    # On the Hub, its weights have names without `transformer.`, and no head
    theirs = random_model("GPT2")
    theirs.transformer.save_pretrained(tmp_path)
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


def test_n_ctx_of_gpt_2_has_no_effect_as_in_transformers(tmp_path):
    theirs = random_model("GPT2")
    theirs.save_pretrained(tmp_path)
    change_config(tmp_path, {"n_ctx": 24})
    assert transformers.AutoConfig.from_pretrained(tmp_path).n_positions == 72
    assert load_folder(tmp_path).config.block_size == 72
    check_logits(tmp_path, theirs)


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
    random_model("Llama").save_pretrained(tmp_path)
    change_config(tmp_path, {"rope_parameters": None, **values})
    check_refused(tmp_path, "cannot be loaded: ", message)


def change_config(folder: Path, values: dict[str, Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | values
    file.write_text(json.dumps(config), encoding="utf-8")


def check_refused(folder: Path, *parts: str) -> None:
    with pytest.raises(UserError) as error:
        load_folder(folder)
    assert all(part in str(error.value) for part in parts), error.value
    assert "\n" not in str(error.value)
