"""The model card of an exported model: README.md of its folder."""

from collections.abc import Mapping
from typing import Any

from minigpt.checkpoints.find import run_folder
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

generate = pipeline("text-generation", model="{name}"{options})
print(generate("ROMEO:")[0]["generated_text"])
```
"""
_WARNING = """
No class of transformers computes this model: `trust_remote_code=True` executes `modeling_minigpt.py` of this folder.
Read the file first if you do not trust its author.
"""


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
    run = run_folder(model.path) if model.path.is_file() else model.path
    if (run / "summary.json").is_file():
        rows = "\n".join(f"| {key} | {value} |" for key, value in _figures(read_json(run / "summary.json")).items())
        card += f"\n## Training\n\n| | |\n|---|---|\n{rows}\n"
    recipe = run / ".hydra/config.yaml"
    if recipe.is_file():
        card += f"\n## Recipe\n\n```yaml\n{recipe.read_text(encoding='utf-8')}```\n"
    return card


def _figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the card."""
    found = {
        "validation loss": "{best_val_loss:.4f} nats per token, {best_val_bits_per_byte:.4f} bits per byte",
        "at step": "{best_step:,} of {steps:,} ({tokens:,} tokens)",
        "corpus": "{corpus}, SHA-256 `{corpus_sha256}`",
        "initial weights": "{init_from}",
        "training time": "{seconds:,.1f} s on {device}",
        "seed": "{seed}",
        "command": "`{command}`",
        "commit": "`{commit}`",
    }
    if summary["init_from"] is None:
        del found["initial weights"]
    return {name: text.format(**summary) for name, text in found.items()}
