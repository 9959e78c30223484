"""What `scripts/sample.py` prints, and models that predict a chain of tokens."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from models import make_model

from minigpt import GPT
from minigpt.data.tokenizer import Tokenizer

BLOCK_SIZE = 32


def chain(tokenizer: Tokenizer, ids: Sequence[int], again: int = 0) -> GPT:
    """Return a model that predicts the next of these ids after each.

    After the last, it predicts that with index `again`.
    """
    size = tokenizer.vocab_size
    shape = {"n_layer": 1, "n_head": 1, "head_dim": 2, "n_inner": 1, "n_embd": size}
    plain = {"position": "none", "bias": False, "tie_embeddings": False}
    model = make_model(std=0, block_size=BLOCK_SIZE, vocab_size=size, **shape, **plain)
    with torch.no_grad():
        model.wte.weight.copy_(torch.eye(size))
        model.lm_head.weight[[*ids[1:], ids[again]], [*ids]] = 5.0
    return model


def error(result: Any) -> str:
    """Return the error line of a script that printed nothing else, and exited with code 2."""
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert re.fullmatch(r"(sampling from .*\n)?.*\n", result.stderr)
    return result.stderr.splitlines()[-1]


def samples(result: Any) -> list[dict[str, Any]]:
    """Return the JSON lines of a script."""
    assert result.returncode == 0, result.stderr
    assert "NaN" not in result.stdout  # which is not JSON
    return [json.loads(line) for line in result.stdout.splitlines()]


def write_to(pipe: Path) -> None:
    """Let this process print to a named pipe; an argument `prepare` of `Script`, with `partial`."""
    os.dup2(os.open(pipe, os.O_WRONLY), 1)
