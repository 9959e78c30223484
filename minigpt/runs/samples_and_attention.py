"""Callbacks that log a sample or attention maps at every validation, and the final sample of a run.

They run before the checkpoint is saved, so that a resumed run neither lacks nor repeats an output. All ranks compute an
output, because they gather sharded weights together; rank 0 writes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback

from minigpt.data.detokenizer import token_pieces
from minigpt.data.token_files import Corpus
from minigpt.data.tokenizer import Tokenizer, encode_prompt
from minigpt.generation import generate
from minigpt.generation_settings import check_settings
from minigpt.interpret.heads import attention_maps
from minigpt.model import GPT
from minigpt.runs.run_dir import ORIGINALITY_HEADER, SAMPLES
from minigpt.runs.wandb_logger import wandb_loggers
from minigpt.utils.checks import POSITIVE_INT
from minigpt.utils.cli import error_text
from minigpt.utils.errors import require
from minigpt.utils.terminal import unescape, warn

DRAWN_TOKENS = 400  # of each sample that is compared with the training text


class Samples(Callback):
    """Append a sample to `samples.txt` at every validation, and send it to Weights & Biases.

    Args:
        settings: of `generate`: max_new_tokens, temperature, top_k, seed.
    """

    def __init__(self, *, prompt: str, **settings: Any) -> None:
        self.prompt, self.settings = unescape(prompt), settings
        check_settings(key=lambda name: f"callbacks.samples.{name}", **settings)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.tokenizer: Tokenizer = trainer.datamodule.corpus.tokenizer  # type: ignore[attr-defined]
        encode_prompt(self.tokenizer, self.prompt)  # a character that the tokenizer lacks is an error before training

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        with only_a_warning(f"Samples failed at step {trainer.global_step}"):
            text = sample_text(pl_module.model, self.tokenizer, self.prompt, **self.settings)
            if trainer.is_global_zero:
                with open(Path(trainer.default_root_dir) / SAMPLES, "a", encoding="utf-8") as file:
                    file.write(f"── {_title(trainer)} ──\n{text.strip()}\n\n")
                for wandb in wandb_loggers(trainer):
                    wandb.log_html("samples", text)


def final_originality(
    model: GPT, corpus: Corpus, sample: str, folder: Path, *, characters: int, seed: int
) -> dict[str, Any] | None:
    """Draw some text; compare it, the final sample and the validation text with the training text, in `samples.txt`.

    Returns:
        By the name of the text, the shares of new n-grams and the longest match; None, with a warning, if that fails.
    """
    with only_a_warning("the originality of the text is not known"):
        from minigpt.interpret import originality

        start, count = corpus.tokenizer.start.tolist(), -(-characters // DRAWN_TOKENS)  # at least as many characters
        draws = generate(model, start, max_new_tokens=DRAWN_TOKENS, num_samples=count, temperature=0.8, seed=seed)
        texts = {
            "final_sample": sample,
            "generated_text": "".join(corpus.tokenizer.decode(draw.tokens) for draw in draws)[:characters],
            "validation_text": originality.validation_text(corpus, characters),
        }
        index = originality.build_index(corpus)
        compared = {name: originality.originality(index, text) for name, text in texts.items()}
        with open(folder / SAMPLES, "a", encoding="utf-8") as file:
            file.write(f"{ORIGINALITY_HEADER}\n{originality.format_table(compared)}\n\n")
        figures = {}
        for name, row in compared.items():  # names of JSON and of W&B are texts
            new = {str(n): share for n, share in row["new"].items()}
            figures[name] = {"new": new, "longest": row["longest"]}
        return figures
    return None


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: str, **settings: Any) -> str:
    """Return a prompt and one continuation of it."""
    prompt_ids = torch.as_tensor(encode_prompt(tokenizer, prompt)).long()  # (T,)
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)  # on a GPU the draw has a sum that is not deterministic
    try:
        with torch.compiler.set_stance("force_eager"):  # otherwise the model compiles again for every length
            return prompt + tokenizer.decode(generate(model, prompt_ids, **settings)[0].tokens)
    finally:
        torch.set_deterministic_debug_mode(mode)


class AttentionMaps(Callback):
    """Plot the attention of every head for one text to `attention/` and Weights & Biases at every validation.

    Args:
        text: None is the beginning of the validation split.
        max_tokens: of the text; at most `block_size` are used.
    """

    def __init__(self, *, text: str | None = None, max_tokens: int = 64) -> None:
        require("callbacks.attention.text", text, lambda text: text != "", "a text with at least one token, or null")
        require("callbacks.attention.max_tokens", max_tokens, *POSITIVE_INT)
        self.text, self.max_tokens = text and unescape(text), max_tokens

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        corpus, block_size = trainer.datamodule.corpus, pl_module.model.config.block_size  # type: ignore[attr-defined]
        ids = corpus.tokens("val") if self.text is None else corpus.tokenizer.encode(self.text)
        self.tokens = torch.as_tensor(ids[: min(self.max_tokens, block_size)].astype("int64"))  # (T,)
        self.texts = token_pieces(corpus.tokenizer, self.tokens.tolist())
        self.folder = Path(trainer.default_root_dir) / "attention"

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        with only_a_warning(f"AttentionMaps failed at step {trainer.global_step}"):
            with torch.compiler.set_stance("force_eager"):  # hooks would make a compiled model compile again
                weights = attention_maps(pl_module.model, self.tokens.to(pl_module.device))
            if trainer.is_global_zero:
                from minigpt.interpret.attention_plots import plot_maps  # imports matplotlib

                self.folder.mkdir(exist_ok=True)
                picture = self.folder / f"step-{trainer.global_step}.png"
                plot_maps(picture, weights, self.texts, title=_title(trainer))
                for wandb in wandb_loggers(trainer):
                    wandb.log_image("attention", images=[str(picture)], step=trainer.global_step)


@contextmanager
def only_a_warning(failure: str) -> Iterator[None]:
    """Print an error as a warning: a run can do without its samples and pictures."""
    try:
        yield
    except Exception as error:
        warn(f"{failure}: {error_text(error)}")


def _title(trainer: L.Trainer) -> str:
    return f"step {trainer.global_step}, validation loss {float(trainer.callback_metrics['val_loss']):.4f}"
