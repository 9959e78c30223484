"""A callback that plots attention maps at every validation.

It runs before the checkpoint is saved, and all ranks compute the maps, because they gather sharded
weights together.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback

from minigpt.extras.interpret.heads import attention_maps
from minigpt.extras.interpret.token_pieces import token_pieces
from minigpt.runs.callbacks.samples import only_a_warning, title, wandb_loggers
from minigpt.utils.checks import POSITIVE_INT
from minigpt.utils.errors import require
from minigpt.utils.terminal import unescape


class AttentionMaps(Callback):
    """Plot the attention of every head for one text to `attention/` and Weights & Biases at every
    validation.

    Args:
        text: None is the beginning of the validation split.
        max_tokens: of the text; at most `block_size` are used.
    """

    def __init__(self, *, text: str | None = None, max_tokens: int = 64) -> None:
        require(
            "callbacks.attention.text",
            text,
            lambda text: text != "",
            "a text with at least one token, or null",
        )
        require("callbacks.attention.max_tokens", max_tokens, *POSITIVE_INT)
        self.text, self.max_tokens = text and unescape(text), max_tokens

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        corpus, block_size = trainer.datamodule.corpus, pl_module.model.config.block_size  # type: ignore[attr-defined]
        ids = corpus.tokens("val") if self.text is None else corpus.tokenizer.encode(self.text)
        # (T,)
        self.tokens = torch.as_tensor(ids[: min(self.max_tokens, block_size)].astype("int64"))
        self.texts = token_pieces(corpus.tokenizer, self.tokens.tolist())
        self.folder = Path(trainer.default_root_dir) / "attention"

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        with only_a_warning(f"AttentionMaps failed at step {trainer.global_step}"):
            weights = attention_maps(pl_module.model, self.tokens.to(pl_module.device))
            if trainer.is_global_zero:
                from minigpt.extras.interpret.attention_plots import plot_maps  # imports matplotlib

                self.folder.mkdir(exist_ok=True)
                picture = self.folder / f"step-{trainer.global_step}.png"
                plot_maps(picture, weights, self.texts, title=title(trainer))
                for wandb in wandb_loggers(trainer):
                    wandb.log_image("attention", images=[str(picture)], step=trainer.global_step)
