"""The model card of an exported model: README.md of its folder."""

from contextlib import suppress
from typing import Any

import yaml  # a dependency of Hydra

from minigpt.checkpoints.find import run_folder
from minigpt.checkpoints.format import MINIGPT, read
from minigpt.checkpoints.pretrained import Pretrained
from minigpt.utils.files import read_json

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [minigpt]
---

# {name}

A {architecture} with {params:,} parameters and a context of {block_size:,} tokens, exported by minigpt.
{warning}
```python
from transformers import pipeline

generate = pipeline("text-generation", model={name!r}{options})
print(generate("ROMEO:")[0]["generated_text"])
```
"""
_WARNING = """
No class of transformers computes this model: `trust_remote_code=True` executes `modeling_minigpt.py` of this folder.
Read the file first if you do not trust its author.
"""
_FIGURES = {
    "validation loss": "{best_val_loss:.4f} nats per token, {best_val_bits_per_byte:.4f} bits per byte",
    "steps": "{steps:,}, {tokens:,} tokens; the lowest loss is at step {best_step:,}",
    "corpus": "{corpus}, SHA-256 `{corpus_sha256}`",
    "initial weights": "{init_from[source]}, revision {init_from[revision]}",
    "training time": "{seconds:,.1f} s on {device}",
    "seed": "{seed}",
    "command": "`{command}`",
    "commit": "`{commit}`",
}


def model_card(name: str, architecture: str, model: Pretrained) -> str:
    """Return the card of a model, with the recipe and the figures of its run if it has one."""
    own = architecture.startswith("MiniGPT")
    card = _CARD.format(
        name=name,
        architecture=architecture,
        params=model.config.num_params(),
        block_size=model.config.block_size,
        warning=_WARNING if own else "",
        options=", trust_remote_code=True" if own else "",
    )
    if not model.model:  # of Hugging Face
        return card
    summary: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a checkpoint outside its run folder, or a damaged file
        summary = dict(read_json(run_folder(model.path) / "summary.json"))
    card += "\n## Training\n\n| | |\n|---|---|\n"
    for key, text in _FIGURES.items():
        with suppress(LookupError, TypeError, ValueError):  # of a run that was interrupted, or of an older version
            card += f"| {key} | {text.format(**summary)} |\n"
    recipe = read(model.path)[MINIGPT].get("config", {})
    return f"{card}\n## Recipe\n\n```yaml\n{yaml.safe_dump(recipe, sort_keys=False)}```\n"
