"""A sample at every validation, and the final sample of a run.

The callback runs before the checkpoint is saved, so that a resumed run neither lacks nor repeats an
output. All ranks compute it, because they gather sharded weights together; rank 0 writes it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch
from tqdm import tqdm

from minigpt.data.tokenizer import Ids, Tokenizer, encode_prompt
from minigpt.model.gpt import GPT
from minigpt.runs.run_dir import SAMPLES
from minigpt.sampling.generation import Sample, stream
from minigpt.sampling.settings import check_settings
from minigpt.utils.cli import error_text
from minigpt.utils.terminal import unescape, warn


class SamplesCallback(L.Callback):
    """Append a sample to `samples.txt` at every validation, and send it to Weights & Biases.

    Args:
        max_new_tokens: None is 200, or fewer in a short training: 1 % of the tokens between
            validations.
        settings: of `generate`: temperature, top_k, seed.
    """

    def __init__(self, *, prompt: str, max_new_tokens: int | None, **settings: Any) -> None:
        self.prompt = unescape(prompt)
        self.settings = (
            {"max_new_tokens": max_new_tokens} if max_new_tokens is not None else {}
        ) | settings
        check_settings(key=lambda name: f"callbacks.samples.{name}", **self.settings)

    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:
        self.tokenizer: Tokenizer = trainer.datamodule.corpus.tokenizer
        # A character that the tokenizer lacks is an error before training.
        self.start = trainer.datamodule.corpus.sample_prompt(self.prompt)
        # On a CPU, a token that is drawn takes as long as 6 to 14 that are trained on.
        trained = trainer.val_check_interval * trainer.datamodule.tokens_per_batch
        self.settings.setdefault("max_new_tokens", max(16, min(200, int(trained * 0.01))))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        with only_a_warning(f"Samples failed at step {trainer.global_step}"):
            text = sample_text(pl_module.model, self.tokenizer, *self.start, **self.settings)
            if trainer.is_global_zero:
                with open(f"{trainer.default_root_dir}/{SAMPLES}", "a", encoding="utf-8") as file:
                    file.write(f"── {title(trainer)} ──\n{text.strip()}\n\n")
                for wandb in wandb_loggers(trainer):
                    wandb.log_html("samples", text)


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    ids: Ids | None = None,
    *,
    seconds: float = float("inf"),
    **settings: Any,
) -> str:
    """Return a prompt and one continuation of it, as `draw_samples` does.

    Args:
        ids: of the prompt, by default those of its text.
    """
    ids = encode_prompt(tokenizer, prompt) if ids is None else ids
    return prompt + draw_samples(model, tokenizer, ids, seconds=seconds, **settings)[0].text


def draw_samples(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: object,
    *,
    seconds: float,
    max_new_tokens: int,
    num_samples: int = 1,
    **settings: Any,
) -> list[Sample]:
    """Return what `generate` draws after the ids of a prompt (T,), but stop after so many seconds.

    A sample ends with its document, as those of sample.py.
    """
    end = time.perf_counter() + seconds
    samples = [Sample() for _ in range(num_samples)]
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)  # on a GPU the draw has a sum that is not deterministic
    try:
        steps = stream(
            model,
            torch.as_tensor(prompt).long(),
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            tokenizer=tokenizer,
            stop=tokenizer.end_ids,
            **settings,
        )
        for step in tqdm(
            steps,
            "sampling",
            max_new_tokens,
            leave=False,
            # Beside the bar of the training, and unless on a terminal
            disable=True if seconds == float("inf") else None,
            unit=" tokens",
        ):
            for i, sample in enumerate(samples):
                sample.append(step, i)
            if time.perf_counter() > end:
                break
    finally:
        torch.set_deterministic_debug_mode(mode)
    return samples


@contextmanager
def only_a_warning(failure: str) -> Iterator[None]:
    """Print an error as a warning: a run can do without its samples and pictures."""
    try:
        yield
    except Exception as error:
        warn(f"{failure}: {error_text(error)}")


def wandb_loggers(trainer: L.Trainer) -> list[Any]:
    """Return the W&B loggers of a Trainer: by their method, because their module imports W&B."""
    return [logger for logger in trainer.loggers if hasattr(logger, "log_html")]


def title(trainer: L.Trainer) -> str:
    """Return the step and the validation loss."""
    return (
        f"step {trainer.global_step}, "
        f"validation loss {float(trainer.callback_metrics['val_loss']):.4f}"
    )
