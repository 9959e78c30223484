"""The models of the page's tests, and the runs and the file that hold them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_model, write_run
from readers import MAX_TOKENS

from minigpt import GPT, generate, save_checkpoint
from minigpt.checkpoints.find import find_snapshots
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.data.tokenizer import CharTokenizer
from minigpt.extras.interpret.snapshots import snapshot_path
from minigpt.extras.playground.export_html import export_html
from minigpt.sampling.generation import score

CHARACTERS = CharTokenizer("\n" + "".join(map(chr, range(32, 127))))
# With other ids, and without the tilde
SHIFTED = CharTokenizer("\t\n" + "".join(map(chr, range(32, 126))))
PROMPT = "To be, or not to be"


# A model of characters with random weights
def random_model(seed: int = 0, **settings: Any) -> GPT:
    shape = {"vocab_size": 96, "block_size": 64, "n_embd": 32, "position": "rope"}
    return make_model(seed=seed, std=0.3, **{**shape, **settings})


STEPS = (0, 10, 2000)
MODELS = {
    "small": random_model(),
    "other": random_model(1, n_layer=3, n_head=4),
    "shifted": random_model(2),
    **{f"small@{step}": random_model(step + 100) for step in STEPS},
}
HOSTILE = "</script><!--<script><img src=x onerror=\"document.title='broken'\">"
LOSSES = [[step, 1 + 3 * math.exp(-step / 300)] for step in range(10, 1710, 10)]
HISTORY: dict[str, Any] = {
    "train_loss": LOSSES,
    "val_loss": [[step, loss + 0.2] for step, loss in LOSSES[16::17]],
    "samples": [
        {"step": step, "text": f"sample of step {step} {HOSTILE}"} for step, _ in LOSSES[16::17]
    ],
}
KINDS = ("inside words", "spaces and line breaks", "other")
LEARNED: list[dict[str, Any]] = [
    {
        "step": step,
        "kinds": dict(zip(KINDS, (4 - 1.5 * i, 3 - i**2 / 2, 3.5), strict=True)),
        "previous": [[0.1, 0.2 * i], [0.3 + 0.1 * i, 0.05]],
        "induction": [[0.0, 0.01 * i], [0.4 * i, 0.02]],
    }
    for i, step in enumerate(STEPS)
]


# Write a run with snapshots, also as a page, one with a history, and one with other ids
def write_site(folder: Path) -> None:
    for name in ("small", "other", "shifted"):
        write_run(folder / name, MODELS[name], SHIFTED if name == "shifted" else CHARACTERS)
    for step in STEPS:
        save_checkpoint(MODELS[f"small@{step}"], CHARACTERS, snapshot_path(folder / "small", step))
    (folder / "other/metrics.csv").write_text("step,train_loss,val_loss\n1,4.5,\n2,4.25,4.3\n")
    (folder / "other/samples.txt").write_text(
        "── step 2, validation loss 4.3000 ──\nTo be\n\n", encoding="utf-8"
    )
    parts = {"snapshots": find_snapshots(folder / "small"), "learned": LEARNED}
    run = find_pretrained(str(folder / "small"))
    export_html(run, folder / "small.html", "float32", HISTORY, **parts)


# A prompt and what `generate` adds to it with the defaults of the page
def continuation(
    model: GPT, prompt: str, tokenizer: CharTokenizer = CHARACTERS, **settings: Any
) -> str:
    values = {"temperature": 0.8, "seed": 1337, "max_new_tokens": MAX_TOKENS, **settings}
    (sample,) = generate(model, tokenizer.encode(prompt), **values)
    return prompt + tokenizer.decode(sample.tokens)


# The log-probability of every character but the first
def logprobs(model: GPT, text: str) -> torch.Tensor:
    ids = CHARACTERS.encode(text).tolist()
    return score(model, ids[1:], ids[:1]).logprobs


# The loss of a text as the page shows it
def loss_of(model: GPT, text: str) -> Any:
    return pytest.approx(-logprobs(model, text).mean().item(), abs=2e-3)
