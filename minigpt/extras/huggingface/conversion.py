"""Conversion of Hugging Face's configurations and weights to ours: names, transposed matrices,
halves of heads.

A `Family` describes one class of transformers by two tables: keys of `config.json`, and names of
modules. A value in a `config.json` that `GPTConfig` cannot express is an error that names it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minigpt.model.config import GPTConfig
from minigpt.utils.checks import one_of
from minigpt.utils.errors import UserError, require

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A class of transformers; "ours" are names, values and weights of minigpt, "theirs" those of
    the class.
    """

    architecture: str  # name of the class
    keys: Values  # their configuration key by our name
    implied: Values  # our values that every model of the class has
    defaults: Values  # their values of keys that a config.json may lack
    activations: Mapping[str, str]  # our activation by their name
    # Their modules by our name, separated by spaces; our weight is the concatenation of theirs. *
    # is the layer number.
    modules: Mapping[str, str]
    # Their values without which the class computes something else
    required: Values = field(default_factory=dict)
    # Their key by another name of it in a config.json
    aliases: Values = field(default_factory=dict)
    transposed: bool = (
        False  # the matrices of the blocks are stored as (in, out), by transformers' Conv1D
    )
    swapped_halves: bool = (
        False  # the rotary embedding turns the other way, which swapped halves of each head undo
    )


_GELU_TANH = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
_UNGATED = {**_GELU_TANH, "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
_GATED = {"silu": "swiglu", "swish": "swiglu"}

_GPT2 = Family(
    architecture="GPT2LMHeadModel",
    keys={
        **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd", "n_inner")},
        "block_size": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        "tie_embeddings": "tie_word_embeddings",
    },
    implied={"norm": "layernorm", "position": "learned", "bias": True},
    defaults={
        **{"vocab_size": 50257, "n_positions": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768},
        **{
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},  # for exports
    },
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    activations=_UNGATED,
    modules={
        "wte": "transformer.wte",
        "wpe": "transformer.wpe",
        "blocks.*.norm_1": "transformer.h.*.ln_1",
        "blocks.*.attention.qkv": "transformer.h.*.attn.c_attn",
        "blocks.*.attention.out": "transformer.h.*.attn.c_proj",
        "blocks.*.norm_2": "transformer.h.*.ln_2",
        "blocks.*.mlp.up": "transformer.h.*.mlp.c_fc",
        "blocks.*.mlp.down": "transformer.h.*.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    aliases={
        **{
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
        "max_position_embeddings": "n_positions",  # n_ctx has no effect
    },
    transposed=True,
)

_KEYS = {
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "head_dim": "head_dim",
    "n_inner": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tie_embeddings": "tie_word_embeddings",
    "rope_base": "rope.rope_theta",
    "rope_factor": "rope.factor",
    "rope_low_freq_factor": "rope.low_freq_factor",
    "rope_high_freq_factor": "rope.high_freq_factor",
    "rope_original_block_size": "rope.original_max_position_embeddings",
}
_IMPLIED = {"norm": "rmsnorm", "position": "rope"}
_NO_BIAS = {**_IMPLIED, "bias": False}
_DEFAULTS = {
    **{
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    },
    **{"num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    **{"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    **{
        "rope.rope_theta": 10000.0,
        "rope.factor": 1.0,
        "rope.low_freq_factor": 1.0,
        "rope.high_freq_factor": 4.0,
    },
    "rope.original_max_position_embeddings": 8192,  # has no effect with a factor of 1
}
_DEFAULTS_QWEN = {
    **{
        **_DEFAULTS,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
    },
    "num_key_value_heads": 32,
}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LAYER = "model.layers.*."
_ATTENTION = _LAYER + "self_attn."
_MODULES = {
    "wte": "model.embed_tokens",
    "blocks.*.norm_1": _LAYER + "input_layernorm",
    "blocks.*.attention.qkv": f"{_ATTENTION}q_proj {_ATTENTION}k_proj {_ATTENTION}v_proj",
    "blocks.*.attention.q_norm": _ATTENTION + "q_norm",
    "blocks.*.attention.k_norm": _ATTENTION + "k_norm",
    "blocks.*.attention.out": _ATTENTION + "o_proj",
    "blocks.*.norm_2": _LAYER + "post_attention_layernorm",
    "blocks.*.mlp.up": f"{_LAYER}mlp.gate_proj {_LAYER}mlp.up_proj",
    "blocks.*.mlp.down": _LAYER + "mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
_LLAMA = Family(
    architecture="LlamaForCausalLM",
    keys={**_KEYS, "bias": "mlp_bias"},
    implied=_IMPLIED,
    defaults=_DEFAULTS,
    activations=_GATED,
    modules=_MODULES,
)
_QWEN2 = replace(
    _LLAMA,
    architecture="Qwen2ForCausalLM",
    keys=_KEYS,
    implied={**_NO_BIAS, "qkv_bias": True},
    defaults=_DEFAULTS_QWEN,
    required={"use_sliding_window": False},
)
FAMILIES = {  # by their model_type
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": replace(
        _QWEN2,
        architecture="Qwen3ForCausalLM",
        implied={**_NO_BIAS, "qk_norm": True, "qk_norm_weights": True},
        defaults={**_DEFAULTS_QWEN, "head_dim": 128},
        required={"use_sliding_window": False, "attention_bias": False},
    ),
    "arcee": replace(
        _LLAMA,
        architecture="ArceeForCausalLM",
        defaults={
            **{**_DEFAULTS, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
            **{"hidden_size": 2560, "intermediate_size": 18432, "max_position_embeddings": 4096},
        },
        activations=_UNGATED,
        modules={**_MODULES, "blocks.*.mlp.up": _LAYER + "mlp.up_proj"},
    ),
    "nanochat": replace(
        _LLAMA,
        architecture="NanoChatForCausalLM",
        keys={**_KEYS, "logit_softcap": "final_logit_softcapping"},
        implied={**_NO_BIAS, "norm": "rmsnorm_noscale", "qk_norm": True, "embed_norm": True},
        defaults={
            **{**_DEFAULTS, "hidden_act": "relu2", "final_logit_softcapping": 15.0},
            **{"vocab_size": 50304, "hidden_size": 768, "intermediate_size": 8192},
            **{"num_hidden_layers": 12, "num_attention_heads": 6},
        },
        required={"attention_bias": False},
        activations=_UNGATED,
        modules={
            **_MODULES,
            "blocks.*.mlp.up": _LAYER + "mlp.fc1",
            "blocks.*.mlp.down": _LAYER + "mlp.fc2",
        },
        swapped_halves=True,
    ),
    "starcoder2": replace(
        _LLAMA,
        architecture="Starcoder2ForCausalLM",
        keys={**_KEYS, "bias": "use_bias", "norm_eps": "norm_epsilon"},
        implied={**_IMPLIED, "norm": "layernorm"},
        defaults={
            **{
                **_DEFAULTS,
                "norm_epsilon": 1e-5,
                "hidden_act": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
            },
            **{
                "vocab_size": 49152,
                "hidden_size": 3072,
                "intermediate_size": 12288,
                "max_position_embeddings": 4096,
            },
            **{
                "num_hidden_layers": 30,
                "num_attention_heads": 24,
                "num_key_value_heads": 2,
                "use_bias": True,
            },
        },
        activations=_UNGATED,
        modules={
            **_MODULES,
            "blocks.*.mlp.up": _LAYER + "mlp.c_fc",
            "blocks.*.mlp.down": _LAYER + "mlp.c_proj",
        },
        required={"use_bias": True, "sliding_window": None},  # its norms always have biases
    ),
}


# The class of `modeling_minigpt.py`, whose configuration and weights are ours.
OWN_TYPE = "minigpt"
OWN = Family(
    "MiniGPTForCausalLM",
    keys={},
    implied={},
    defaults={},
    activations={},
    modules={"wte": "model.wte"},
)
_OF_TRANSFORMERS = (
    *("model_type", "architectures", "auto_map", "tie_word_embeddings", "dtype", "torch_dtype"),
    *("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)


def read_config(values: Values) -> tuple[GPTConfig, Family]:
    """Return the architecture of a `config.json` and its class, which may be our own; raise
    UserError as below.
    """
    if values.get("model_type") != OWN_TYPE:
        return config_to_ours(values), FAMILIES[values["model_type"]]
    config = GPTConfig.from_dict(
        {key: value for key, value in values.items() if key not in _OF_TRANSFORMERS}
    )
    tied = values.get("tie_word_embeddings", config.tie_embeddings)
    require(
        "tie_word_embeddings",
        tied,
        lambda v: v == config.tie_embeddings,
        str(config.tie_embeddings),
    )
    return replace(config, dropout=0.0, ngram_dropout=0.0), OWN


def config_to_ours(values: Values) -> GPTConfig:
    """Convert the values of a `config.json`.

    Raises:
        UserError: the class is not one of `FAMILIES`, has a value that `GPTConfig` cannot express,
            or two values of one setting.
    """
    require("model_type", values.get("model_type"), *one_of(FAMILIES))
    family = FAMILIES[values["model_type"]]
    given: dict[str, Any] = {}
    for key, value in values.items():
        _set_once(given, family.aliases.get(key, key), value)
    theirs = {**family.defaults, **values, **given, **_rope_values(values)}
    theirs["layer_types"] = set(values.get("layer_types") or {"full_attention"})
    required = {
        "is_causal": True,
        "quantization_config": None,
        "layer_types": {"full_attention"},
        **family.required,
    }
    # One setting of ours is for the biases of attention and MLP
    if family.keys.get("bias") == "mlp_bias":
        required["attention_bias"] = theirs["mlp_bias"]
    for key, wanted in required.items():
        if theirs.get(key, wanted) != wanted:
            raise UserError(f"{key} must be {wanted}, got {theirs[key]}")
    ours = {**{name: theirs[key] for name, key in family.keys.items()}, **family.implied}
    require(family.keys["activation"], ours["activation"], *one_of(family.activations))
    return GPTConfig(**{**ours, "activation": family.activations[ours["activation"]]})


def config_to_theirs(config: GPTConfig, model_type: str) -> dict[str, Any]:
    """Return the values of `config.json` of a class; our values that the class has no key for are
    left out.
    """
    family = FAMILIES[model_type]
    values = {
        **family.defaults,
        **{key: getattr(config, ours) for ours, key in family.keys.items()},
        **family.required,
    }
    names = [theirs for theirs, ours in family.activations.items() if ours == config.activation]
    values[family.keys["activation"]] = names[0] if names else None
    if "mlp_bias" in family.keys.values():
        values["attention_bias"] = values["mlp_bias"] = config.bias or config.has_qkv_bias
    rope = {
        key.removeprefix("rope."): values.pop(key)
        for key in list(values)
        if key.startswith("rope.")
    }
    if rope:
        values["rope_theta"] = rope.pop("rope_theta")
        values["rope_scaling"] = {"rope_type": "llama3", **rope} if config.rope_scaling else None
    return {"model_type": model_type, "architectures": [family.architecture], **values}


def weight_to_ours(
    name: str, family: Family, config: GPTConfig, theirs: dict[str, Tensor]
) -> Tensor:
    """Return a weight of ours, in float32, from their tensors, which are removed; raise UserError
    if one is missing.
    """
    names = _tensor_names(name, family)
    if missing := [part for part in names if part not in theirs]:
        raise UserError(f"the weight {missing[0]} is missing")
    tensors = [theirs.pop(part).float() for part in names]
    if family.swapped_halves and ".qkv." in name:
        tensors[:2] = [_swap_halves(tensor, config) for tensor in tensors[:2]]
    weight = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    return weight.t().contiguous() if family.transposed and name.startswith("blocks.") else weight


def weight_to_theirs(
    name: str, weight: Tensor, family: Family, config: GPTConfig
) -> dict[str, Tensor]:
    """Return their tensors by name from a weight of ours."""
    names = _tensor_names(name, family)
    weight = weight.t() if family.transposed and name.startswith("blocks.") else weight
    q, kv = (
        config.n_head * config.head_width,
        (config.n_kv_head or config.n_head) * config.head_width,
    )
    parts = list(weight.split((q, kv, kv)) if len(names) == 3 else weight.chunk(len(names)))
    if family.swapped_halves and ".qkv." in name:
        parts[:2] = [_swap_halves(part, config) for part in parts[:2]]
    return dict(
        zip(
            names,
            (part.clone(memory_format=torch.contiguous_format) for part in parts),
            strict=True,
        )
    )


def _rope_values(values: Values) -> dict[str, Any]:
    """Return the parameters of the rotary embedding as `rope.KEY`; versions of transformers have
    other places.
    """
    found: dict[str, Any] = {}
    top = {key: values.get(key) for key in ("rope_theta", "partial_rotary_factor", _LLAMA3[-1])}
    for place in (top, values.get("rope_scaling") or {}, values.get("rope_parameters") or {}):
        for key, value in place.items():
            _set_once(found, "rope_type" if key == "type" else key, value)
    kind = found.setdefault("rope_type", "default")
    require("rope_type", kind, *one_of(("default", "llama3")))
    if unknown := sorted(
        found.keys() - {"rope_type", "rope_theta", "partial_rotary_factor", *_LLAMA3}
    ):
        raise UserError(f"rope_parameters must have no {unknown[0]}, got {found[unknown[0]]!s:.80}")
    require("partial_rotary_factor", found.get("partial_rotary_factor", 1), lambda v: v == 1, "1")
    keys = [
        *(["rope_theta"] if "rope_theta" in found else []),
        *(_LLAMA3 if kind == "llama3" else []),
    ]
    return {f"rope.{key}": found[key] for key in keys}


def _set_once(found: dict[str, Any], key: str, value: Any) -> None:
    """Set a key to a value that is not None; raise UserError if it has another value already."""
    if value is not None and found.setdefault(key, value) != value:
        raise UserError(f"{key} must have one value, got {found[key]} and {value}")


def _tensor_names(name: str, family: Family) -> list[str]:
    """Return the names of their tensors that make up a weight of ours."""
    if family is OWN:
        return [f"model.{name}"]
    block = re.match(r"blocks\.(\d+)\.", name)
    name = name.replace(block[0], "blocks.*.") if block else name
    module, _, leaf = name.rpartition(".")
    # The weights of QK-norm are parameters of ours, and modules of theirs
    if name in family.modules:
        module, leaf = name, "weight"
    theirs = family.modules[module].replace("*", block[1] if block else "")
    return [f"{part}.{leaf}" for part in theirs.split()]


def _swap_halves(x: Tensor, config: GPTConfig) -> Tensor:
    """Swap the halves of each head in the rows of x: (H·D, C), or (H·D,)."""
    return x.unflatten(0, (-1, 2, config.head_width // 2)).flip(1).flatten(0, 2)
