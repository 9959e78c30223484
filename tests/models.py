"""Small GPTs with random weights, run folders that hold them, and overlapping calls of one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minigpt import GPT, GPTConfig, save_checkpoint
from minigpt.checkpoints.find import BEST
from minigpt.data.tokenizer import ByteTokenizer, Tokenizer

SIZES = {"vocab_size": 23, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}


def make_model(*, std: float | None = 0.2, seed: int = 0, **settings: Any) -> GPT:
    """Return a model of `SIZES` and settings in evaluation mode.

    Args:
        std: draw every weight with this standard deviation, norm weights around 1: so large that
            every part changes the logits, which the initial weights (None) hardly do.
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**SIZES, **settings})).eval()
    if std is not None:
        draw_weights(model, std)
    return model


def draw_weights(model: nn.Module, std: float = 0.2) -> None:
    """Make every parameter random and nonzero, weights of norms (GPT-2: ln) around 1, others 0."""
    for name, parameter in model.named_parameters():
        mean = 1.0 if ("norm" in name or ".ln_" in name) and not name.endswith("bias") else 0.0
        nn.init.normal_(parameter, mean=mean, std=std)


def overlap(model: nn.Module, *calls: Callable[[], Any]) -> list[Any]:
    """Return the results of two calls of a model.

    The second begins while the first computes, and ends after it.
    """
    first = list[int]()
    first_began, second_began, first_ended = (threading.Event() for _ in range(3))

    def meet(module: nn.Module, args: Any) -> None:
        if not first or threading.get_ident() in first:
            first.append(threading.get_ident())
            first_began.set()
            second_began.wait(60)
        else:
            second_began.set()
            first_ended.wait(60)

    hook = model.get_submodule("blocks.0").register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(calls[0])]
        first_began.wait(60)
        results.append(pool.submit(calls[1]))
        results[0].exception()
        first_ended.set()
        found = [result.result() for result in results]
    hook.remove()
    return found


def write_run(folder: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """Write the run folder of a model, by default one of bytes; return the folder."""
    (folder / "checkpoints").mkdir(parents=True)
    save_checkpoint(model, tokenizer or ByteTokenizer(), folder / BEST)
    return folder


def save_tokenizer(folder: Path, text: str, special: list[str], **options: Any) -> Any:
    """Train a BPE of 300 ids, save it as transformers does, and return it."""
    from tokenizers import Tokenizer as Theirs
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Theirs(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    saved.save_pretrained(folder)
    return saved
