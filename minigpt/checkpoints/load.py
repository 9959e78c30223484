"""Load a model and its tokenizer from a checkpoint, and save them from any training loop."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from minigpt.checkpoints.find import find_checkpoint
from minigpt.checkpoints.format import MINIGPT, contents, explain_errors, read, write
from minigpt.data.tokenizer import Tokenizer, from_dict
from minigpt.model.changes import empty_model, find_change, original, unwrap
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.utils.errors import UserError, require
from minigpt.utils.terminal import warn

PREFIX = "model."  # the attribute of the LightningModule that is the model
COMPILED = "_orig_mod."  # in the names of weights in a module that torch.compile wraps
SIZE_MARGIN = 1 << 20  # parameters; a model this small is built whatever the size of its file is
ROPE_TABLE_MARGIN = 1 << 25  # elements


def load_checkpoint(
    path: str | Path, *, device: str | torch.device = "cpu", step: int | None = None
) -> tuple[GPT, Tokenizer]:
    """Load the model, in evaluation mode, and the tokenizer of a checkpoint.

    Args:
        path: a checkpoint file, or a run folder (its best checkpoint).
        step: load the snapshot of this step of the run instead.

    Raises:
        UserError: there is no checkpoint, or the file does not hold a model.
    """
    path = find_checkpoint(path, step=step)
    saved = read(path)
    with explain_errors(f"{path} does not hold a model of minigpt"):
        config = GPTConfig.from_dict(saved[MINIGPT]["model"])
        tokenizer = from_dict(saved[MINIGPT]["tokenizer"])
        weights = {
            name[len(PREFIX) :]: tensor
            for name, tensor in saved["state_dict"].items()
            if name.startswith(PREFIX)
        }
        check_vocabulary(config, tokenizer)
        check_size(config, len(weights), path.stat().st_size)
        model = build_model(config, weights)
    return model.to(device).eval(), tokenizer


def save_checkpoint(model: GPT, tokenizer: Tokenizer, path: str | Path) -> None:
    """Save a model and its tokenizer atomically, for `load_checkpoint` and the scripts.

    A run cannot resume from it. The model may be compiled as a whole or block by block, be wrapped
    by DDP, and have hooks, which are not saved.

    Raises:
        UserError: the model is not one that `load_checkpoint` builds, or the tokenizer has more ids
            than the model.
    """
    model = unwrap(model)
    config = saved_config(model)
    if "forward hook" in (find_change(model) or ""):
        warn(f"{path} does not hold the hooks of the model")
    check_vocabulary(config, tokenizer)
    weights = {
        PREFIX + name.replace(COMPILED, ""): tensor
        for name, tensor in original(model).state_dict().items()
    }
    write(contents(config, tokenizer) | {"state_dict": weights}, Path(path))


def saved_config(model: GPT) -> GPTConfig:
    """Return the config with which the weights of a model give the same model, except for hooks.

    A head that its user tied or untied changes `tie_embeddings`.

    Raises:
        UserError: the model has any other change.
    """
    if change := find_change(model, for_saving=True):
        raise UserError(
            f"weights and a config cannot describe this model: {change}; merge the change into "
            f"the weights, or load its weights into GPT(model.config) and save that"
        )
    return replace(model.config, tie_embeddings=model.lm_head.weight is model.wte.weight)


def build_model(config: GPTConfig, weights: Mapping[str, torch.Tensor]) -> GPT:
    """Build a float32 model around `weights` without a copy.

    Positions beyond its block size are dropped.

    Raises:
        RuntimeError: the weights do not fit.
        UserError: they are NaN or infinite.
    """
    model = empty_model(config)
    weights = dict(weights)
    if config.position == "learned":
        weights["wpe.weight"] = weights["wpe.weight"][: config.block_size].clone()
    model.load_state_dict(weights, assign=True)
    model.float()
    if config.tie_embeddings:
        model.lm_head.weight = model.wte.weight
    for weight in model.parameters():
        # 40 times as fast as `isfinite` of the weight, and without a copy.
        if not all(extreme.isfinite() for extreme in weight.aminmax()):
            raise UserError("its weights are NaN or infinite")
    return model


def check_vocabulary(config: GPTConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError if the tokenizer has more ids than the model."""
    require(
        "model.vocab_size",
        config.vocab_size,
        lambda value: value >= tokenizer.vocab_size,
        f"at least the tokenizer's {tokenizer.vocab_size}",
    )


def check_size(config: GPTConfig, tensors: int, size: int) -> None:
    """Raise UserError if files of `size` bytes are too small for the model, before it is built."""
    params = config.num_params()
    layers = config.n_layer + config.smear
    # The elements of the rotary table, which no file holds.
    table = config.block_size * config.head_width if config.position == "rope" else 0
    if params > size + SIZE_MARGIN or table > size + ROPE_TABLE_MARGIN or layers > tensors:
        raise UserError(
            f"its model has {config.n_layer:,} layers, {params:,} parameters and a context of "
            f"{config.block_size:,} tokens, but the file has {tensors:,} weights of {size:,} bytes"
        )
