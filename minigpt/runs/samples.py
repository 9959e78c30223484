"""Callbacks that log a sample and attention maps at every validation, and the final sample of a run."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from minigpt.data.pieces import token_pieces
from minigpt.data.tokenizer import Tokenizer, encode_prompt
from minigpt.generation import generate
from minigpt.generation_settings import check_settings
from minigpt.interpret.heads import attention_maps
from minigpt.model import GPT
from minigpt.runs.run_dir import SAMPLES
from minigpt.runs.wandb_logger import wandb_loggers
from minigpt.utils.checks import POSITIVE_INT
from minigpt.utils.cli import error_text
from minigpt.utils.errors import require
from minigpt.utils.terminal import warn


class OutputCallback(Callback):
    """Base of callbacks that log output of the model at every validation; an error in them is a warning.

    They run before the checkpoint is saved, so that a resumed run neither lacks nor repeats an output.
    """

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        try:
            self.log_output(trainer, pl_module)
        except Exception as error:
            warn(f"{type(self).__name__} failed at step {trainer.global_step}: {error_text(error)}")

    def log_output(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compute the output on all ranks, because sharded weights are gathered by all; write it on rank 0."""
        raise NotImplementedError


class Samples(OutputCallback):
    """Append a sample to `samples.txt` at every validation, and send it to Weights & Biases.

    Args:
        settings: of `generate`: max_new_tokens, temperature, top_k, seed.
    """

    def __init__(self, *, prompt: str, **settings: Any) -> None:
        self.prompt, self.settings = prompt, settings
        check_settings(key=lambda name: f"callbacks.samples.{name}", **settings)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.tokenizer: Tokenizer = trainer.datamodule.corpus.tokenizer  # type: ignore[attr-defined]
        self.prompt_ids = torch.as_tensor(encode_prompt(self.tokenizer, self.prompt)).long()  # (T,)
        self.file = Path(trainer.default_root_dir) / SAMPLES

    def log_output(self, trainer: L.Trainer, pl_module: Any) -> None:
        text = self.prompt + sample_text(pl_module.model, self.tokenizer, self.prompt_ids, **self.settings)
        if trainer.is_global_zero:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(f"── {_title(trainer)} ──\n{text.strip()}\n\n")
            for wandb in wandb_loggers(trainer):
                wandb.log_html("samples", text)


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: Tensor, **settings: Any) -> str:
    """Return one continuation of a prompt (T,) as text."""
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # else it compiles again for every length
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        torch.set_deterministic_debug_mode(0)  # on a GPU the draw has a sum that is not deterministic
        return tokenizer.decode(generate(model, prompt, **settings)[0].tokens)


def final_sample(model: GPT, tokenizer: Tokenizer, *, seed: int) -> str:
    """Return the sample that a run prints at its end; empty, with a warning, if sampling fails."""
    start = torch.as_tensor(encode_prompt(tokenizer, "")).long()
    try:
        return sample_text(model, tokenizer, start, max_new_tokens=400, temperature=0.8, seed=seed)
    except Exception as error:  # the run itself succeeded
        warn(f"the final sample failed: {error_text(error)}")
        return ""


class AttentionMaps(OutputCallback):
    """Plot the attention of every head for one text to `attention/` and Weights & Biases at every validation.

    Args:
        text: None is the beginning of the validation split.
        max_tokens: of the text; at most `block_size` are used.
    """

    def __init__(self, *, text: str | None = None, max_tokens: int = 64) -> None:
        require("callbacks.attention.text", text, lambda text: text != "", "a text with at least one token, or null")
        require("callbacks.attention.max_tokens", max_tokens, *POSITIVE_INT)
        self.text, self.max_tokens = text, max_tokens

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        corpus, block_size = trainer.datamodule.corpus, pl_module.model.config.block_size  # type: ignore[attr-defined]
        ids = corpus.tokens("val") if self.text is None else corpus.tokenizer.encode(self.text)
        self.tokens = torch.as_tensor(ids[: min(self.max_tokens, block_size)].astype("int64"))  # (T,)
        self.texts = token_pieces(corpus.tokenizer, self.tokens.tolist())
        self.folder = Path(trainer.default_root_dir) / "attention"

    def log_output(self, trainer: L.Trainer, pl_module: Any) -> None:
        with torch.compiler.set_stance("force_eager"):  # hooks would make a compiled model compile again
            weights = attention_maps(pl_module.model, self.tokens.to(pl_module.device))
        if trainer.is_global_zero:
            from minigpt.interpret.plots import plot_maps  # imports matplotlib

            self.folder.mkdir(exist_ok=True)
            picture = self.folder / f"step-{trainer.global_step}.png"
            plot_maps(picture, weights, self.texts, title=_title(trainer))
            for wandb in wandb_loggers(trainer):
                wandb.log_image("attention", images=[str(picture)], step=trainer.global_step)


def _title(trainer: L.Trainer) -> str:
    return f"step {trainer.global_step}, validation loss {float(trainer.callback_metrics['val_loss']):.4f}"
