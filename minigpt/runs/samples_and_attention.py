"""Callbacks that log a sample or attention maps at every validation, and the final sample of a run.

They run before the checkpoint is saved, so that a resumed run neither lacks nor repeats an output. All ranks compute an
output, because they gather sharded weights together; rank 0 writes it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from tqdm import tqdm

from minigpt.data.detokenizer import token_pieces
from minigpt.data.token_files import Corpus
from minigpt.data.tokenizer import Tokenizer, encode_prompt
from minigpt.generation import stream
from minigpt.generation_settings import check_settings
from minigpt.interpret.heads import attention_maps
from minigpt.model import GPT
from minigpt.runs.run_dir import ORIGINALITY_HEADER, SAMPLES
from minigpt.runs.wandb_logger import wandb_loggers
from minigpt.utils.checks import POSITIVE_INT
from minigpt.utils.cli import error_text
from minigpt.utils.errors import RunError, require
from minigpt.utils.scripts import usage
from minigpt.utils.terminal import unescape, warn

DRAWN_TOKENS = 400  # of each sample that is compared with the training text
DRAWN_SHARE = 0.01  # tokens drawn per token trained on: on a CPU, one that is drawn takes as long as 6 to 14 of those
MAX_INDEXED = 20e6  # bytes of a training text: an index of more takes longer than the rest


class Samples(Callback):
    """Append a sample to `samples.txt` at every validation, and send it to Weights & Biases.

    Args:
        max_new_tokens: None is 200, or fewer in a short training: `DRAWN_SHARE` of the tokens between validations.
        settings: of `generate`: temperature, top_k, seed.
    """

    def __init__(self, *, prompt: str, max_new_tokens: int | None, **settings: Any) -> None:
        self.prompt, self.max_new_tokens, self.settings = unescape(prompt), max_new_tokens, settings
        given = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        check_settings(key=lambda name: f"callbacks.samples.{name}", **given, **settings)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.tokenizer: Tokenizer = trainer.datamodule.corpus.tokenizer  # type: ignore[attr-defined]
        encode_prompt(self.tokenizer, self.prompt)  # a character that the tokenizer lacks is an error before training
        cfg = trainer.datamodule.cfg  # type: ignore[attr-defined]
        trained = trainer.val_check_interval * cfg.data.batch_size * cfg.model.block_size  # between validations
        self.settings["max_new_tokens"] = self.max_new_tokens or max(16, min(200, int(trained * DRAWN_SHARE)))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        with only_a_warning(f"Samples failed at step {trainer.global_step}"):
            text = sample_text(pl_module.model, self.tokenizer, self.prompt, **self.settings)
            if trainer.is_global_zero:
                with open(Path(trainer.default_root_dir) / SAMPLES, "a", encoding="utf-8") as file:
                    file.write(f"── {_title(trainer)} ──\n{text.strip()}\n\n")
                for wandb in wandb_loggers(trainer):
                    wandb.log_html("samples", text)


def final_originality(
    model: GPT, corpus: Corpus, sample: str, folder: Path, *, characters: int, seed: int, seconds: float
) -> dict[str, Any] | None:
    """Draw some text; compare it, the final sample and the validation text with the training text, in `samples.txt`.

    Args:
        characters: at most; fewer if drawing them takes longer than `seconds`.

    Returns:
        By the name of the text, the shares of new n-grams and the longest match; None, with a warning, if that fails.
    """
    with only_a_warning("the originality of the text is not known"):
        from minigpt.interpret import originality

        end = time.perf_counter() + seconds
        if corpus.train.bytes > MAX_INDEXED:
            raise RunError(f"the training text has more than 20 MB; compare with {usage('sample')} --originality")
        index, per_token = originality.build_index(corpus), corpus.train.bytes / corpus.train.tokens
        count = -(-characters // max(1, int(DRAWN_TOKENS * per_token)))
        settings: Any = {"max_new_tokens": DRAWN_TOKENS, "temperature": 0.8, "seed": seed, "num_samples": count}
        draws = draw(model, corpus.tokenizer.start, seconds=end - time.perf_counter(), **settings)
        text = "".join(map(corpus.tokenizer.decode, draws))[:characters]
        texts = {
            "final_sample": sample,
            "generated_text": text,
            "validation_text": originality.validation_text(corpus, len(text)),
        }
        compared = {name: originality.originality(index, text) for name, text in texts.items()}
        with open(folder / SAMPLES, "a", encoding="utf-8") as file:
            file.write(f"{ORIGINALITY_HEADER}\n{originality.format_table(compared)}\n\n")
        figures = {}
        for name, row in compared.items():  # names of JSON and of W&B are texts
            new = {str(n): share for n, share in row["new"].items()}
            figures[name] = {"new": new, "longest": row["longest"]}
        return figures
    return None


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: str, *, seconds: float = inf, **settings: Any) -> str:
    """Return a prompt and one continuation of it, as `draw` does."""
    return prompt + tokenizer.decode(draw(model, encode_prompt(tokenizer, prompt), seconds=seconds, **settings)[0])


def draw(model: GPT, prompt: Any, *, seconds: float, max_new_tokens: int, **settings: Any) -> list[list[int]]:
    """Return the ids that `generate` draws after those of a prompt (T,), but stop after so many seconds."""
    end, drawn, mode = time.perf_counter() + seconds, list[list[int]](), torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)  # on a GPU the draw has a sum that is not deterministic
    try:
        with torch.compiler.set_stance("force_eager"):  # otherwise the model compiles again for every length
            steps: Any = stream(model, torch.as_tensor(prompt).long(), max_new_tokens=max_new_tokens, **settings)
            hidden = True if seconds == inf else None  # beside the bar of the training, and unless on a terminal
            for step in tqdm(steps, "sampling", max_new_tokens, leave=False, disable=hidden, unit=" tokens"):
                drawn.append(step.tokens)
                if time.perf_counter() > end:
                    break
            steps.close()  # leaves the model in its mode
    finally:
        torch.set_deterministic_debug_mode(mode)
    return [list(ids) for ids in zip(*drawn, strict=True)]  # per sample


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
