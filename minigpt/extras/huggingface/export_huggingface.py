"""Write a model and its tokenizer as a Hugging Face folder, for transformers and every program that
reads its folders.

The class is the one of `FAMILIES` that computes the same. What a class lacks is folded into the
weights where that is exact, and parameters that a model lacks are zeros (biases) or ones (norms). A
model that no class computes gets a `modeling_minigpt.py`, which is the code of `minigpt.model.gpt`
in one file.
"""

import ast
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml  # a dependency of Hydra
from torch import Tensor

import minigpt
from minigpt.checkpoints.find import run_folder
from minigpt.checkpoints.format import MINIGPT, read, save_tensors
from minigpt.checkpoints.init_from import Pretrained
from minigpt.checkpoints.load import saved_config
from minigpt.extras.huggingface.conversion import (
    FAMILIES,
    OWN,
    OWN_TYPE,
    config_to_ours,
    config_to_theirs,
    weight_to_theirs,
)
from minigpt.extras.huggingface.pretrained import CONFIG, WEIGHTS
from minigpt.extras.huggingface.tokenizer_json import GENERATION, equals_qwen2, tokenizer_files
from minigpt.model.changes import empty_model
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.model.ops import rms_norm
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json, write_json
from minigpt.utils.terminal import sanitize_line

MODELING = "modeling_minigpt.py"
_SOURCES = (
    *("utils/errors", "utils/checks", "model/config", "model/ops", "model/attention"),
    *("model/embeddings", "model/gpt"),
    "extras/huggingface/modeling_minigpt",
)
# Settings by which a class may differ from a model: our value and that of the class, which has more
# parameters. They are exported as zeros (biases) or ones (norms), which have no effect.
_ADDED = {
    "bias": (False, True),
    "qkv_bias": (False, True),
    "qk_norm_weights": (False, True),
    "norm": ("rmsnorm_noscale", "rmsnorm"),
}
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [minigpt]
---

# {name}

A {architecture} with {params:,} parameters and a context of {block_size:,} tokens, exported by
minigpt.
{warning}
```python
from transformers import pipeline

generate = pipeline("text-generation", model={name!r}{options})
print(generate("ROMEO:")[0]["generated_text"])
```
"""
_WARNING = """
No class of transformers computes this model: `trust_remote_code=True` executes
`modeling_minigpt.py` of this folder.
Read the file first if you do not trust its author.
"""
_FIGURES = (  # of summary.json; losses are in nats per token
    *(
        "best_val_loss",
        "best_val_bits_per_byte",
        "best_step",
        "steps",
        "tokens",
        "seconds",
        "device",
    ),
    *("corpus", "corpus_sha256", "init_from", "seed", "command", "commit"),
)


def export_folder(pretrained: Pretrained, folder: Path) -> str:
    """Write a Hugging Face folder, which must not exist; return the name of its class."""
    model, tokenizer = pretrained.load(), pretrained.tokenizer
    types = FAMILIES.keys() - (set() if equals_qwen2(tokenizer) else {"qwen2"})
    values, weights = export_model(model, types)
    architecture: str = values["architectures"][0]
    start, ends = tokenizer.start.tolist(), tokenizer.end_ids
    end = ends if len(ends) > 1 else tokenizer.end_token
    # An empty prompt starts as with minigpt; null, because the classes have other defaults.
    special = {"bos_token_id": start[0] if len(start) == 1 else None, "eos_token_id": end}
    files = {
        CONFIG: values | special | {"pad_token_id": None, "dtype": "float32"},
        GENERATION: special | _generation(pretrained, learned="n_positions" in values),
        **tokenizer_files(tokenizer),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        (partial := Path(temporary, folder.name)).mkdir()
        for name, content in files.items():
            write_json(partial / name, content)
        save_tensors(weights, partial / WEIGHTS)
        if "auto_map" in values:
            (partial / MODELING).write_text(modeling_code(), encoding="utf-8")
        params = sum(weight.numel() for weight in weights.values())
        (partial / "README.md").write_text(
            _model_card(sanitize_line(folder.name), architecture, params, pretrained),
            encoding="utf-8",
        )
        partial.rename(folder)
    return architecture


def _generation(pretrained: Pretrained, *, learned: bool) -> dict[str, Any]:
    """Return the defaults of `generate` and of the pipeline for a model, with which they work for
    every prompt.

    Args:
        learned: the class has learned positions, and none beyond the block: a prompt that fills it
            gets one token.
    """
    size, tokenizer = pretrained.config.block_size, pretrained.tokenizer
    without_token = [
        i for i in range(pretrained.config.vocab_size) if i not in tokenizer.token_bytes
    ]
    return {
        **({"max_length": size + 1} if learned else {"max_new_tokens": (size + 1) // 2}),
        **({"suppress_tokens": without_token} if without_token else {}),
        **{"pad_token_id": tokenizer.end_token, "do_sample": True, "temperature": 0.8},
    }


def export_model(
    model: GPT, types: Collection[str] = FAMILIES
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the values of `config.json` and the weights by their names, with one of `types` as the
    model_type.
    """
    config, weights = saved_config(model), model.state_dict()
    if config.layer_repeats > 1:  # no class shares weights: every layer has a copy
        config, weights = (
            replace(config, layer_repeats=1),
            {name: x.clone() for name, x in weights.items()},
        )
    for source, tensors in ((config, weights), _fold(config, weights)):
        if found := _find_class(_canonical(source), types):
            values, target = found
            return values, _their_weights(values["model_type"], target, tensors)
    if fixed := {name for name, _ in model.named_buffers()} - {"rotary", *weights}:
        raise UserError(
            f"the exported code does not compute {min(fixed)}; make it a persistent buffer"
        )
    module = Path(MODELING).stem
    values = {
        "model_type": OWN_TYPE,
        "architectures": [OWN.architecture],
        "auto_map": {
            "AutoConfig": f"{module}.MiniGPTConfig",
            "AutoModelForCausalLM": f"{module}.MiniGPTForCausalLM",
        },
        "tie_word_embeddings": config.tie_embeddings,
        **config.to_dict(),
    }
    if config.tie_embeddings:
        del weights["lm_head.weight"]
    return values, {f"model.{name}": x for name, x in weights.items()}


def modeling_code() -> str:
    """Return the code of the model as one file, which imports torch and transformers alone."""
    parts = [
        f'"""The model of this folder: minigpt {minigpt.__version__} in one file, made by its '
        f'export."""\n'
    ]
    for source in _SOURCES:
        text = (Path(minigpt.__file__).parent / f"{source}.py").read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            imported = str(node.module) if isinstance(node, ast.ImportFrom) else ""
            of_minigpt = imported.startswith("minigpt")
            if of_minigpt and imported.removeprefix("minigpt.").replace(".", "/") not in _SOURCES:
                raise UserError(
                    f"{source}.py imports {imported}, which is not in _SOURCES of the export"
                )
            type_checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            docstring = isinstance(node, ast.Expr) and node.lineno == 1
            if of_minigpt or type_checking or docstring:
                lines[node.lineno - 1 : node.end_lineno] = [""] * (
                    (node.end_lineno or 0) - node.lineno + 1
                )
        parts.append("\n".join(lines).strip("\n") + "\n")
    return "\n\n".join(parts)


def _find_class(
    config: GPTConfig, types: Collection[str]
) -> tuple[dict[str, Any], GPTConfig] | None:
    """Find the class that computes a canonical architecture; return its `config.json` and its
    architecture.

    Of several, it is the first of those with the fewest parameters that the model lacks.
    """
    found: list[tuple[int, dict[str, Any], GPTConfig]] = []
    for model_type in (name for name in FAMILIES if name in types):
        values = config_to_theirs(config, model_type)
        # Llama and Arcee refuse a width that the heads do not divide, even with a head_dim.
        if "mlp_bias" in values and config.n_embd % config.n_head:
            continue
        try:
            target = _canonical(config_to_ours(values))
        except UserError:
            continue
        theirs = asdict(target)
        different = {
            name: (ours, theirs[name])
            for name, ours in asdict(config).items()
            if ours != theirs[name]
        }
        if all(_ADDED.get(name) == pair for name, pair in different.items()):
            found.append((target.num_params(), values, target))
    return min(found, key=lambda each: each[0])[1:] if found else None


def _canonical(config: GPTConfig) -> GPTConfig:
    """Return a configuration without null values, and with defaults for values that a class of
    `FAMILIES` ignores.
    """
    # In every class: none has n-grams or mup.
    unused = [
        "dropout",
        "ngram_dropout",
        "ngram_buckets",
        "ngram_dim",
        "base_n_embd",
        "base_head_dim",
    ]
    if config.position != "rope":
        unused += ["rope_base", "rope_factor"]
    if config.position != "rope" or config.rope_scaling is None:
        unused += ["rope_low_freq_factor", "rope_high_freq_factor", "rope_original_block_size"]
    return replace(
        config,
        n_kv_head=config.n_kv_head or config.n_head,
        head_dim=config.head_width,
        n_inner=config.inner_width,
        qkv_bias=config.has_qkv_bias,
        **{name: getattr(GPTConfig, name) for name in unused},
    )


def _fold(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[GPTConfig, Mapping[str, Tensor]]:
    """Fold the factors of mup, and the norm of embeddings that depend on the token alone, into the
    weights.
    """
    weights = dict(weights)
    if config.parametrization == "mup":
        norms = [name for name in weights if name.startswith("final_norm.")]
        for name in norms or ["lm_head.weight"]:
            weights[name] = weights[name] / config.width_ratio
        scale = (config.attention_scale or 1.0) * config.head_width**0.5
        for i in range(config.n_layer):
            prefix = f"blocks.{i}.attention."
            if config.qk_norm:
                weights[f"{prefix}q_norm"] = (
                    weights.get(f"{prefix}q_norm", torch.ones(config.head_width)) * scale
                )
            else:
                for name in [name for name in weights if name.startswith(f"{prefix}qkv.")]:
                    q, kv = weights[name].tensor_split([config.n_head * config.head_width])
                    weights[name] = torch.cat((q * scale, kv))
        tied = config.tie_embeddings and norms != []
        config = replace(
            config, parametrization="standard", qk_norm_weights=config.qk_norm, tie_embeddings=tied
        )
    if config.embed_norm and config.position != "learned" and not config.ngram and not config.smear:
        weights["wte.weight"] = rms_norm(weights["wte.weight"], eps=config.norm_eps)
        config = replace(config, embed_norm=False, tie_embeddings=False)
    return config, weights


def _their_weights(
    model_type: str, target: GPTConfig, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of a class by their names, from ours and those that the model lacks."""
    exported: dict[str, Tensor] = {}
    for name, empty in empty_model(target).state_dict().items():
        if name == "lm_head.weight" and target.tie_embeddings:
            continue
        weight = (
            weights[name]
            if name in weights
            else torch.full(empty.shape, float(not name.endswith("bias")))
        )
        exported |= weight_to_theirs(name, weight, FAMILIES[model_type], target)
    return exported


def _model_card(name: str, architecture: str, params: int, pretrained: Pretrained) -> str:
    """Return the card of a model, README.md, with the figures and the recipe of its run if it has
    one.
    """
    remote_code = architecture.startswith("MiniGPT")
    card = _CARD.format(
        name=name,
        architecture=architecture,
        params=params,
        block_size=pretrained.config.block_size,
        warning=_WARNING if remote_code else "",
        options=", trust_remote_code=True" if remote_code else "",
    )
    if not pretrained.model:  # of Hugging Face
        return card
    summary: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):  # a checkpoint outside its run folder, or a damaged file
        summary = read_json(run_folder(pretrained.path) / "summary.json")
    sections = {
        "Training": {key: summary[key] for key in _FIGURES if key in summary},
        "Recipe": read(pretrained.path)[MINIGPT].get("config", {}),
    }
    for title, values in sections.items():
        card += f"\n## {title}\n\n```yaml\n{yaml.safe_dump(values, sort_keys=False)}```\n"
    return card
