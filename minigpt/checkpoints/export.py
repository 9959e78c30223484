"""A model for others: its weights as safetensors, with what rebuilds it beside them."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minigpt.config import GPTConfig
from minigpt.data import tokenizer as tokenizers
from minigpt.data.tokenizer import Tokenizer
from minigpt.model import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(model: GPT, tokenizer: Tokenizer, file: Path, *, dtype: str = "float32") -> None:
    """Write the weights by name, one of those that are tied; model values and tokenizer are JSON in the metadata."""
    weights = {name: weight.detach().to("cpu", DTYPES[dtype]).contiguous() for name, weight in model.named_parameters()}
    told = {"format": "pt", "model": json.dumps(model.config.to_dict()), "tokenizer": json.dumps(tokenizer.to_dict())}
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as partial:
        save_file(weights, partial, metadata=told)


def load_export(file: Path) -> tuple[GPT, Tokenizer]:
    """The model, ready to evaluate and in float32, and the tokenizer of such a file.

    Raises:
        UserError: it is no such file, or its weights are not those of its model.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            told = opened.metadata() or {}
            weights = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
        config = GPTConfig.from_dict(json.loads(told["model"]))
        tokenizer = tokenizers.from_dict(json.loads(told["tokenizer"]))
        if config.num_params() != sum(weight.numel() for weight in weights.values()):  # before a model is made
            raise UserError("its weights are not those of its model")
        model = GPT(config)
        if names := {name for name, _ in model.named_parameters()} ^ weights.keys():
            raise UserError(f"one of the two lacks {min(names)}")
        model.load_state_dict(weights, strict=False)  # what is tied is there once
    except (SafetensorError, UserError, KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UserError(f"{file} does not hold a model of minigpt ({type(error).__name__}: {error})") from error
    return model.eval(), tokenizer
