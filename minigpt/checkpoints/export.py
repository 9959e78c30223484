"""Write a model and its tokenizer as a Hugging Face folder, for transformers and every program that reads its folders.

The class is the one of `FAMILIES` that computes the same: values that a class lacks are folded into the weights where
that is exact, and parameters that a model lacks are zeros (biases) or ones (norms). A model that no class computes gets
a `modeling_minigpt.py`, which is the code of `minigpt.model` in one file.
"""

import ast
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import minigpt
from minigpt.checkpoints.format import save_tensors
from minigpt.checkpoints.huggingface import (
    CONFIG,
    FAMILIES,
    WEIGHTS,
    Family,
    config_from,
    is_transposed,
    swap_halves,
    tensor_names,
)
from minigpt.checkpoints.model_card import model_card
from minigpt.checkpoints.models import empty_model
from minigpt.checkpoints.pretrained import Pretrained
from minigpt.config import GPTConfig
from minigpt.data.tokenizer import HuggingFaceTokenizer
from minigpt.data.tokenizer_json import tokenizer_files
from minigpt.model import GPT
from minigpt.ops import rms_norm
from minigpt.utils.errors import UserError
from minigpt.utils.files import write_json

MODELING = "modeling_minigpt.py"
_SOURCES = ("utils/errors", "utils/checks", "config", "ops", "attention", "model", "checkpoints/modeling_minigpt")
_ADDED = {  # parameters that a class has in addition, and zeros or ones disable: our value, its value
    "bias": (False, True),
    "qkv_bias": (False, True),
    "qk_norm_weights": (False, True),
    "norm": ("rmsnorm_noscale", "rmsnorm"),
}
Weights = Mapping[str, Tensor]


def export_folder(pretrained: Pretrained, folder: Path) -> str:
    """Write a Hugging Face folder, which must not exist; return the name of its class."""
    model, tokenizer = pretrained.load(), pretrained.tokenizer
    # AutoTokenizer uses the tokenizer class of Qwen2 for model_type qwen2; a Llama with biases computes the same.
    qwen2 = set() if isinstance(tokenizer, HuggingFaceTokenizer) else {"qwen2"}
    values, weights = export_model(model, FAMILIES.keys() - qwen2)
    architecture: str = values["architectures"][0]
    special = {"bos_token_id": None, "eos_token_id": tokenizer.end_token}  # null: the classes have other defaults
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        (partial := Path(temporary, folder.name)).mkdir()
        write_json(partial / CONFIG, values | special | {"pad_token_id": None, "dtype": "float32"})
        sampling = {"pad_token_id": tokenizer.end_token, "do_sample": True, "temperature": 0.8}
        sampling["max_length"] = model.config.block_size
        write_json(partial / "generation_config.json", special | sampling)
        for name, content in tokenizer_files(tokenizer).items():
            write_json(partial / name, content)
        save_tensors(weights, partial / WEIGHTS)
        if "auto_map" in values:
            (partial / MODELING).write_text(modeling_code(), encoding="utf-8")
        card = model_card(folder.name, architecture, pretrained)
        (partial / "README.md").write_text(card, encoding="utf-8")
        partial.rename(folder)
    return architecture


def export_model(model: GPT, types: Collection[str] = FAMILIES) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the values of `config.json` and the weights by their names, with one of `types` as the model_type."""
    config, weights = model.config, model.state_dict()
    for source, tensors in ((config, weights), _fold(config, weights)):
        if found := _find_class(_canonical(source), types):
            values, target = found
            return values, _their_weights(target, tensors, FAMILIES[values["model_type"]])
    tied = config.tie_embeddings
    values = {
        "model_type": "minigpt",
        "architectures": ["MiniGPTForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{Path(MODELING).stem}.MiniGPTConfig",
            "AutoModelForCausalLM": f"{Path(MODELING).stem}.MiniGPTForCausalLM",
        },
        "tie_word_embeddings": tied,
        **config.to_dict(),
    }
    kept = {f"model.{name}": x for name, x in weights.items() if not (tied and name == "lm_head.weight")}
    return values, kept


def modeling_code() -> str:
    """Return the code of the model as one file, which imports torch and transformers alone."""
    parts = [f'"""The model of this folder: minigpt {minigpt.__version__} in one file, made by its export."""\n']
    for source in _SOURCES:
        text = (Path(minigpt.__file__).parent / f"{source}.py").read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            of_minigpt = isinstance(node, ast.ImportFrom) and str(node.module).startswith("minigpt")
            type_checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            docstring = isinstance(node, ast.Expr) and node.lineno == 1
            if of_minigpt or type_checking or docstring:
                lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
        parts.append("\n".join(lines).strip("\n") + "\n")
    return "\n\n".join(parts)


def _find_class(config: GPTConfig, types: Collection[str]) -> tuple[dict[str, Any], GPTConfig] | None:
    """Return the values of `config.json` for the class nearest to a canonical architecture, and that of the class."""
    candidates: list[tuple[int, int, dict[str, Any], GPTConfig]] = []
    for model_type in (name for name in FAMILIES if name in types):
        values = _their_values(config, model_type, FAMILIES[model_type])
        try:
            target = _canonical(config_from(values))
        except UserError:
            continue
        theirs = asdict(target)
        different = {name: (ours, theirs[name]) for name, ours in asdict(config).items() if ours != theirs[name]}
        # Llama and Arcee refuse a width that the heads do not divide, even with a head_dim.
        refused = "mlp_bias" in values and config.n_embd % config.n_head
        if not refused and all(_ADDED.get(name) == pair for name, pair in different.items()):
            candidates.append((len(different), len(candidates), values, target))
    return min(candidates)[2:] if candidates else None


def _canonical(config: GPTConfig) -> GPTConfig:
    """Return a configuration that is equal for equal models: no dropout, null values filled in, unused ones default."""
    unused: tuple[str, ...] = ()
    if config.position != "rope" or config.rope_factor == 1:
        unused += ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_block_size")
    if config.position != "rope":
        unused += ("rope_base",)
    if not config.ngram:
        unused += ("ngram_buckets", "ngram_dim")
    if config.parametrization == "standard":
        unused += ("base_n_embd", "base_head_dim")
    return replace(
        config,
        n_kv_head=config.n_kv_head or config.n_head,
        head_dim=config.head_width,
        n_inner=config.inner_width,
        qkv_bias=config.has_qkv_bias,
        dropout=0.0,
        ngram_dropout=0.0,
        **{name: getattr(GPTConfig, name) for name in unused},
    )


def _their_values(config: GPTConfig, model_type: str, family: Family) -> dict[str, Any]:
    """Return the values of a class for `config.json`; values without a key are dropped."""
    values = {**family.defaults, **{key: getattr(config, ours) for ours, key in family.keys.items()}, **family.required}
    names = [theirs for theirs, ours in family.activations.items() if ours == config.activation]
    values[family.keys["activation"]] = names[0] if names else None
    if "mlp_bias" in family.keys.values():
        values["attention_bias"] = config.bias
    rope = {key.removeprefix("rope."): values.pop(key) for key in list(values) if key.startswith("rope.")}
    if rope:
        values["rope_theta"] = rope.pop("rope_theta")
        values["rope_scaling"] = {"rope_type": "llama3", **rope} if config.rope_factor != 1 else None
    return {"model_type": model_type, "architectures": [family.architecture], **values}


def _fold(config: GPTConfig, weights: Weights) -> tuple[GPTConfig, Weights]:
    """Fold the factors of mup, and the norm of embeddings that depend on the token alone, into the weights."""
    weights = dict(weights)
    if config.parametrization == "mup":
        norms = [name for name in weights if name.startswith("final_norm.")]
        for name in norms or ["lm_head.weight"]:
            weights[name] = weights[name] / config.width_ratio
        scale = (config.attention_scale or 1.0) * config.head_width**0.5
        one = torch.ones(config.head_width)
        for i in range(config.n_layer):
            prefix = f"blocks.{i}.attention."
            if config.qk_norm:
                weights[f"{prefix}q_norm"] = weights.get(f"{prefix}q_norm", one) * scale
                weights.setdefault(f"{prefix}k_norm", one)
            else:
                for name in [name for name in weights if name.startswith(f"{prefix}qkv.")]:
                    q, kv = weights[name].tensor_split([config.n_head * config.head_width])
                    weights[name] = torch.cat((q * scale, kv))
        tied = config.tie_embeddings and norms != []
        config = replace(config, parametrization="standard", qk_norm_weights=config.qk_norm, tie_embeddings=tied)
    if config.embed_norm and config.position != "learned" and not config.ngram and not config.smear:
        weights["wte.weight"] = rms_norm(weights["wte.weight"], eps=config.norm_eps)
        config = replace(config, embed_norm=False, tie_embeddings=False)
    return config, weights


def _their_weights(target: GPTConfig, weights: Weights, family: Family) -> dict[str, Tensor]:
    """Return the weights of a class by their names, from ours and those that the model lacks."""
    q, kv = target.n_head * target.head_width, (target.n_kv_head or target.n_head) * target.head_width
    exported: dict[str, Tensor] = {}
    for name, empty in empty_model(target).state_dict().items():
        if name == "lm_head.weight" and target.tie_embeddings:
            continue
        weight = weights[name] if name in weights else torch.full(empty.shape, float(not name.endswith("bias")))
        names = tensor_names(name, family)
        weight = weight.T if is_transposed(name, weight, family) else weight
        parts = list(weight.split((q, kv, kv)) if len(names) == 3 else weight.chunk(len(names)))
        if family.swapped_halves and ".qkv." in name:
            parts[:2] = [swap_halves(part, target) for part in parts[:2]]
        exported |= dict(zip(names, (part.clone(memory_format=torch.contiguous_format) for part in parts), strict=True))
    return exported
