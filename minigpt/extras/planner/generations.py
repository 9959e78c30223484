"""Train several models one after another, each of which also learns from the one before.

A model that reads its text many times learns it by heart. A new model that predicts the
probabilities of the one before, beside the text, overfits later and reaches a lower loss. All are
trained in one run: the best checkpoint is of one model.

Sources: Born-Again Neural Networks, https://arxiv.org/abs/1805.04770; Pre-training under infinite
compute, https://arxiv.org/abs/2509.14786

Shapes: N tokens of the training split, B batch, T block_size, V vocab.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from minigpt.checkpoints.format import Saved
from minigpt.data.batches import Batches
from minigpt.model.evaluation import evaluation
from minigpt.model.gpt import GPT
from minigpt.runs.callbacks.resume_state import EMACallback
from minigpt.utils.checks import FRACTION, POSITIVE_INT
from minigpt.utils.errors import UserError, require

MOST_PROBABILITIES = 1 << 30  # of two bytes each, that a model predicts for the next one


class Generations(L.Callback):
    """Start a new model several times, at equal distances, each with its own warm-up and decay.

    Args:
        count: of models.
        weight: of the probabilities of the model before; the text has the rest.
    """

    def __init__(self, *, count: int, weight: float) -> None:
        require("callbacks.generations.count", count, *POSITIVE_INT)
        require("callbacks.generations.weight", weight, *FRACTION)
        self.count = count
        self.weight = weight
        self.generation = 0
        self.teacher: dict[str, Tensor] = {}  # weights of the model before
        # (N, V): its probabilities of the token after each, on its device
        self.predicted: Tensor | None = None

    def state_dict(self) -> dict[str, object]:
        return {"generation": self.generation, "teacher": self.teacher}

    def on_load_checkpoint(self, trainer: object, pl_module: object, checkpoint: Saved) -> None:
        state = checkpoint["callbacks"].get(self.state_key, self.state_dict())
        self.generation = state["generation"]
        self.teacher = dict(state["teacher"])

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        data = trainer.datamodule
        require(
            "init_from", data.run.init_from, lambda v: v is None, "null with callbacks.generations"
        )
        tokens = len(data.corpus.tokens("train")) * pl_module.model.config.vocab_size
        stops = any(isinstance(each, EarlyStopping) for each in trainer.callbacks)
        known = data.corpus.is_text and trainer.world_size == 1 and not stops
        require(
            "callbacks.generations.count",
            self.count,
            lambda n: n == 1 or (known and tokens <= MOST_PROBABILITIES),
            "1 with conversations, several devices or early stopping, and where the tokens of the "
            f"training split times vocab_size, {tokens:,}, exceed {MOST_PROBABILITIES:,}",
        )
        require(
            "max_steps",
            pl_module.max_steps,
            lambda n: n > self.count * data.run.schedule.get("warmup_steps", 0),
            "above callbacks.generations.count × schedule.warmup_steps",
        )
        pl_module.schedule = partial(
            restarting, pl_module.schedule, self.count, max_steps=pl_module.max_steps
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps = pl_module.schedule.keywords["max_steps"]  # as planned
        if (
            model_of(pl_module.planned_step(trainer.global_step), self.count, self.steps)
            < self.generation
        ):
            raise UserError(
                f"the checkpoint is of model {self.generation + 1} of its chain, and step "
                f"{trainer.global_step} would be of an earlier one; resume with its max_steps and "
                "callbacks.generations.count"
            )

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: tuple[Tensor, Tensor], batch_idx: int
    ) -> None:
        generation = model_of(pl_module.planned_step(trainer.global_step), self.count, self.steps)
        batches: Batches = trainer.train_dataloader
        if generation > self.generation:
            self._begin(generation, trainer, pl_module)
        if not self.teacher:
            return
        if self.predicted is None:
            with torch.random.fork_rng(devices=[]):  # a resumed run would draw other dropout masks
                teacher = GPT(pl_module.model.config).to(pl_module.device)
            teacher.load_state_dict(self.teacher)
            self.predicted = predict(teacher, torch.from_numpy(batches.tokens[:].astype(np.int64)))
        # Of the batch, the probabilities that the text and the model before it give.
        accumulate = trainer.accumulate_grad_batches
        index = trainer.global_step * accumulate + batch_idx % accumulate
        tokens, targets = batch
        # (B,): few bytes, for which a GPU need not be waited for
        starts = torch.from_numpy(batches.starts(np.array([index]))[0]).to(
            tokens.device, non_blocking=True
        )
        places = starts[:, None] + torch.arange(tokens.size(1), device=tokens.device)  # (B, T)
        expected = self.predicted[places].float().mul_(self.weight)
        pl_module.expected = expected.scatter_add_(
            2, targets[..., None], expected.new_full(targets.shape, 1 - self.weight)[..., None]
        )  # (B, T, V)

    def _begin(self, generation: int, trainer: Any, module: Any) -> None:
        # The model before, or the average of its weights.
        averages = [each for each in trainer.callbacks if isinstance(each, EMACallback)]
        for each in averages:
            each.ema.swap()
        self.teacher = {name: each.clone() for name, each in module.model.state_dict().items()}
        self.predicted = None
        # A new one, with new averages and moments.
        torch.manual_seed(trainer.datamodule.run.seed + generation)
        module.model.load_state_dict(GPT(module.model.config).state_dict())
        trainer.optimizers[0].state.clear()
        for each in averages:
            each.on_train_start(trainer, module)
        self.generation = generation


def restarting(schedule: Callable[..., float], count: int, step: float, *, max_steps: int) -> float:
    """Return the factor of a schedule that runs `count` times in `max_steps`, one after another."""
    length = max_steps / count
    return schedule(step - model_of(step, count, max_steps) * length, max_steps=length)


def model_of(step: float, count: int, max_steps: int) -> int:
    """Return which model, from 0 on, a step trains; the last one also after its end."""
    return min(count - 1, int(step * count / max_steps))


@torch.no_grad()
def predict(model: GPT, tokens: Tensor) -> Tensor:
    """Predict the token after each of a text (N,), N ≥ T, from at least T / 2 before if there are.

    Returns:
        Probabilities (N, V), in float16, on the device of the model.
    """
    T = model.config.block_size
    half = max(1, T // 2)
    starts = torch.arange(0, len(tokens) - T + half, half).clamp_(max=len(tokens) - T)
    predicted = model.wte.weight.new_empty(
        len(tokens), model.config.vocab_size, dtype=torch.float16
    )
    with evaluation(model):
        # Up to 64 windows at a time, whose logits and probabilities take at most 160 MB
        for some in starts.split(max(1, min(64, (1 << 24) // (T * predicted.size(1))))):
            windows = tokens[some[:, None] + torch.arange(T)]  # (B, T)
            logits = model(windows.to(predicted.device))  # (B, T, V)
            probabilities = logits.float().softmax(dim=-1).half()
            for start, window in zip(some.tolist(), probabilities, strict=True):
                kept = T - half if start else 0  # the window before has the rest
                predicted[start + kept : start + T] = window[kept:]
    return predicted
