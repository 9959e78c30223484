"""Plan a run for `minutes=`: its size, steps, batch, regularization and rates, from the text, the
time and the machine.

The plan is made of ordinary settings, which are written to the configuration of the run. Its
formulas are fits to runs on CPUs, which docs/recipes.md shows.
"""

import re
import time
from dataclasses import dataclass
from math import exp, inf, log2, log10
from typing import Any

from omegaconf import DictConfig, OmegaConf

from minigpt.data.token_files import Corpus
from minigpt.extras.planner.generations import MOST_PROBABILITIES
from minigpt.extras.planner.measured_steps import step_seconds
from minigpt.extras.planner.ngram_model import evenly_spaced, ngram_losses
from minigpt.extras.planner.planned_sizes import planned_heads, without
from minigpt.runs.fit import FINAL_SECONDS, FINAL_SHARE
from minigpt.runs.run import load_parts
from minigpt.runs.run_config import RunConfig
from minigpt.utils.errors import UserError

# (n_layer, n_embd); a step of each takes up to twice the time of the one before
SIZES = (
    *(
        (1, 64),
        (2, 64),
        (2, 96),
        (2, 128),
        (2, 192),
        (2, 256),
        (3, 256),
        (3, 384),
        (4, 384),
        (4, 512),
        (6, 512),
    ),
    *((6, 640), (6, 768), (8, 896), (12, 768), (12, 1024)),
)
LEAST_VAL_BYTES = 1000
# Settings that the formula of the loss was fitted over, and those that do not change what is
# trained.
FITTED = re.compile(
    r"minutes|max_steps|model\.(n_layer|n_embd|layer_repeats)|seed|(eval|log)_(every|batches)|resume"
    r"|data(\.(?!batch_size|overfit_batches).*)?|logger.*|originality"
    r"|callbacks\.(checkpoint|samples|snapshots|attention|originality).*"
    r"|trainer(\.(accelerator|devices|deterministic))?|tokenizer.*"
    r"|compile|threads|checkpoint_blocks|collective_timeout"
)
COUNTED_TOKENS, SCORED_TOKENS = (
    1_000_000,
    100_000,
)  # of the training and the validation split, by the n-gram model
LONGEST_NGRAM = 8
MEASURED_TOKENS = 2_500_000  # of a training whose windows and tables are measured for all sizes
LEAST_STEPS = 150  # that the time should allow; with at least 4 windows per step
MEASURING = 0.005  # of the time at most, to measure a size
COMPILED_MINUTES = 10  # of the run, from which on compiled steps are measured
COMPILED_GAIN = 1.05  # speed that compilation must gain
MOST_REPEATS = 3  # of the layers
MOST_MODELS = 4  # of a chain
MODEL_BEFORE = 0.8  # weight of the probabilities of the model before
# Time of a step of the Trainer, with the EMA and metrics, relative to one that is measured
TRAINER = 1.05
OVERHEAD = (
    5.0  # seconds for the start of the Trainer, the last sample, its originality and the curves
)
EMA_STEPS = 1e7  # that an average in single precision can follow
VALIDATING, MOST_VALIDATIONS = 0.05, 10  # share of the time and number of validations, at most

Settings = dict[str, Any]  # by key, such as "model.n_embd"


@dataclass(frozen=True)
class Text:
    """What a plan needs to know of a text."""

    tokens: int  # of the training split
    val_tokens: int
    ngram: int  # length of the n-grams that predict the validation split best
    distinct_ngrams: int  # of this length, in the counted tokens
    ngram_loss: float  # of predicting the validation split from them, in nats per token
    vocab_size: int


def make_plan(
    cfg: DictConfig, corpus: Corpus, given: set[str], *, deadline: float
) -> dict[str, Any]:
    """Choose the settings that are not `given`; return them, the expected loss if it is known, and
    lines about both.

    Args:
        given: keys of settings and config groups that the user chose, such as "model.n_embd" or
            "optimizer".
        deadline: `time.perf_counter()` when the run should end.

    Raises:
        UserError: the text is too short to plan for, or the time for a step; or the plan is
            invalid.
    """
    text = read_text(corpus)
    budget = seconds_left(cfg, deadline)
    step, settings = fastest_learner(cfg, corpus, given, text, budget)
    trial = updated(cfg, settings)
    settings |= without(given, repeats(trial, given, text, budget / step * tokens_per_step(trial)))
    trial = updated(cfg, settings)
    longer = min(2.0, 3 * MEASURING * budget)
    step = TRAINER * step_seconds(trial, corpus, seconds=longer)
    drawing = drawing_seconds(trial, step, budget)
    count = chain(trial, given, text, budget / step * tokens_per_step(trial))[1]
    if count > 1:
        settings["callbacks.generations"] = {
            "_target_": "minigpt.extras.planner.generations.Generations",
            "count": count,
            "weight": MODEL_BEFORE,
        }
        trial = updated(trial, settings)
    fills_time = step * most_steps(trial, given, text) > budget
    if "compile" not in given and fills_time and cfg.minutes >= COMPILED_MINUTES:
        compiled = TRAINER * compiled_step_seconds(trial, corpus, seconds=longer)
        if compiled * COMPILED_GAIN < step:
            settings["compile"], step = True, compiled
    seconds = deadline - time.perf_counter() - OVERHEAD - drawing
    settings |= without(given, length(trial, given, text, step, seconds))
    if (trial := updated(cfg, settings)).max_steps < 1:
        part = ["validate on a part with eval_batches=…"] if "eval_batches" in given else []
        raise too_short(trial, step, *part)
    # Before the plan is written, which a resumed run reads again.
    load_parts(RunConfig.from_hydra(trial), corpus=corpus)
    unfitted = sorted(key for key in given if not FITTED.fullmatch(key))
    unfitted += [f"max_steps below {LEAST_STEPS}"] if trial.max_steps < LEAST_STEPS else []
    if unfitted:
        expected, loss = (
            None,
            f"unknown: the formula of the loss was not fitted to runs with {', '.join(unfitted)}",
        )
    else:
        expected = expected_loss(trial, text)
        loss = f"validation loss {expected[0]:.2f} ± {expected[1]:.2f}"
    return {
        "settings": settings,
        "expected_val_loss": expected,
        "lines": [*explain(trial, text, step), f"expected    {loss}"],
        "pace": {
            "planned_steps": trial.max_steps,
            "most_steps": most_steps(trial, given, text),
            "validation": validation_seconds(trial, 1, validated_tokens(trial, text.val_tokens)),
            "seconds": seconds,
            "until": 60 * cfg.minutes - OVERHEAD - drawing,
        },
    }


def seconds_left(cfg: DictConfig, deadline: float) -> float:
    """Return the time until the run should end; raise UserError if there is none."""
    seconds = deadline - time.perf_counter()
    if seconds <= 0:
        raise UserError(
            f"minutes={cfg.minutes:g} end before the text is prepared; give more minutes"
        )
    return seconds


def drawing_seconds(cfg: DictConfig, step: float, budget: float) -> float:
    """Return the time of the text that is drawn after the training: drawing takes as long as
    training on it.
    """
    characters = OmegaConf.select(cfg, "callbacks.originality.characters") or 0
    return min(
        characters * step / tokens_per_step(cfg),
        max(FINAL_SECONDS, FINAL_SHARE * budget),
    )


def too_short(cfg: DictConfig, step: float, *advice: str) -> UserError:
    """Return the error of a plan without a step."""
    others = "".join(f", or {each}" for each in advice)
    return UserError(
        f"minutes={cfg.minutes:g} end before the first step, of {step:.2f} s; give more "
        f"minutes{others}"
    )


def fastest_learner(
    cfg: DictConfig, corpus: Corpus, given: set[str], text: Text, budget: float
) -> tuple[float, Settings]:
    """Return the seconds of a step and the settings of the size that learns most in the time.

    Sizes are measured from the smallest on, until the expected loss rises.
    """
    candidates: list[
        tuple[float, float, Settings]
    ] = []  # with reducible loss, and seconds of a step
    for size in SIZES:
        settings = without(given, shape(cfg, given, text, *size) | windows(text, MEASURED_TOKENS))
        trial = updated(cfg, settings)
        if candidates and (
            settings == candidates[-1][-1] or parameters(trial) > 1e6 + 0.6 * text.tokens
        ):
            continue  # the settings that are given leave one size, or it is too large
        step = step_seconds(
            updated(trial, {"compile": False}), corpus, seconds=min(1.0, MEASURING * budget)
        )
        tokens, count = chain(trial, given, text, budget / step * tokens_per_step(trial))
        loss = reducible_loss(parameters(trial), tokens, text, count)
        candidates.append((loss, step, settings))
        if candidates[-1][0] > min(loss for loss, *_ in candidates):
            break
    return min(candidates, key=lambda candidate: candidate[0])[1:]


def read_text(corpus: Corpus) -> Text:
    """Count the n-grams of a text, in up to a million tokens of it; raise UserError if it is too
    short.
    """
    if corpus.val.bytes < LEAST_VAL_BYTES:
        raise UserError(
            f"minutes=… needs {LEAST_VAL_BYTES:,} bytes of validation text, "
            f"but the split has {corpus.val.bytes:,} bytes; "
            "use a longer text or a larger data.val_fraction, or leave minutes out"
        )
    train, val = corpus.tokens("train"), corpus.tokens("val")
    counted, scored = evenly_spaced(train, COUNTED_TOKENS), evenly_spaced(val, SCORED_TOKENS)
    longest = min(LONGEST_NGRAM, len(counted), len(scored))
    losses, distinct = ngram_losses(counted, scored, corpus.tokenizer.vocab_size, longest)
    best = losses.index(min(losses))
    return Text(
        len(train),
        len(val),
        best + 1,
        distinct[best],
        losses[best],
        corpus.tokenizer.vocab_size,
    )


def compiled_step_seconds(cfg: DictConfig, corpus: Corpus, *, seconds: float) -> float:
    """Return `step_seconds` of the compiled model; infinity without a C++ compiler."""
    from torch._dynamo.exc import TorchDynamoException  # imports the compiler of torch

    try:
        return step_seconds(updated(cfg, {"compile": True}), corpus, seconds=seconds)
    except TorchDynamoException:
        return inf


def shape(cfg: DictConfig, given: set[str], text: Text, n_layer: int, n_embd: int) -> Settings:
    """Return the settings of a size, which do not depend on the speed."""
    n_layer = cfg.model.n_layer // cfg.model.layer_repeats if "model.n_layer" in given else n_layer
    n_embd, n_head = planned_heads(cfg.model, given, n_embd)
    dropout = 0.5 - 0.3 * log10(text.tokens / 45_000) + 0.2 * log10(n_layer * n_embd**2 / 18_000)
    return {
        "model.n_layer": n_layer * cfg.model.layer_repeats,
        "model.n_embd": n_embd,
        "model.n_head": n_head,
        "model.ngram": text.ngram if text.ngram > 1 else 0,
        "model.ngram_dropout": round(min(0.5, max(0.0, dropout)), 2),
        "optimizer.ngram_weight_decay": round(min(1.0, text.tokens / 1e6) ** -0.5, 2),
    }


def windows(text: Text, tokens: float, possible: float = inf) -> Settings:
    """Return windows, and tables for their n-grams, of a training on `tokens`; the time allows
    `possible` tokens.
    """
    longest = min(1024, text.tokens - 1, text.val_tokens - 1)  # a window needs the next token too
    block_size = power_of_two(min(max(128, 256 * (tokens / 1.6e6) ** 0.45), longest))
    per_step = min(2048, 2048 * (text.tokens / 1e6) ** 0.33, possible / LEAST_STEPS)
    rows = text.distinct_ngrams / 3 * max(1, min(tokens, text.tokens) / COUNTED_TOKENS) ** 0.5
    batch_size, buckets = max(4, round(per_step / block_size)), max(8192, power_of_two(rows))
    return {
        "model.block_size": block_size,
        "data.batch_size": batch_size,
        "model.ngram_buckets": buckets,
    }


def repeats(cfg: DictConfig, given: set[str], text: Text, possible: float) -> Settings:
    """Return repeats of layers, windows and tables; without repeats the time allows training on
    `possible` tokens.

    A layer that is used n times is taken for n layers, except that the model does not overfit
    earlier.
    """
    most = 1 if {"model", "model.n_layer", "model.layer_repeats"} & given else MOST_REPEATS
    chains = {n: chain(cfg, given, text, possible / n) for n in range(1, most + 1)}
    n = min(
        chains, key=lambda n: reducible_loss(n * parameters(cfg), chains[n][0], text, chains[n][1])
    )
    return {"model.n_layer": n * cfg.model.n_layer, "model.layer_repeats": n} | windows(
        text, chains[n][0], possible / n
    )


def chain(cfg: DictConfig, given: set[str], text: Text, possible: float) -> tuple[float, int]:
    """Return the tokens from which each model of a chain learns, and how many models there are.

    Args:
        possible: tokens of a training on which the time allows to train.
    """
    useful = useful_tokens(cfg, given, text)
    if (
        {"max_steps", "callbacks", "callbacks.generations"} & given
        or useful < LEAST_STEPS * tokens_per_step(cfg)
        or text.tokens * text.vocab_size > MOST_PROBABILITIES
    ):
        return min(useful, possible), 1
    models = max(1, min(MOST_MODELS, int(possible / useful + 0.25)))
    return min(useful, possible / models), models


def length(cfg: DictConfig, given: set[str], text: Text, step: float, seconds: float) -> Settings:
    """Return the settings of a run of `seconds` whose steps take `step` seconds each."""
    count = models(cfg)
    # Each model but the last predicts the text for the next one, from two windows per token
    seconds -= 2 * (count - 1) * validation_seconds(cfg, step, text.tokens)
    most = most_steps(cfg, given, text)
    whole = validation_seconds(cfg, step, text.val_tokens)
    per_batch = cfg.data.eval_batch_size * cfg.model.block_size
    # The share of the validation split that a validation reads
    part = min(1.0, (cfg.eval_batches or inf) * per_batch / text.val_tokens)
    least = 1 if "eval_batches" in given else 2
    validations = int(min(MOST_VALIDATIONS, max(least, VALIDATING * seconds / (part * whole))))
    validations = max(count, validations - validations % count)
    if "eval_batches" not in given:
        part = min(1.0, VALIDATING * seconds / (validations * whole))
    steps = (
        most
        if "max_steps" in given
        else min(most, int((seconds - validations * part * whole) / step))
    )
    if count > 1:  # each model ends with a validation
        steps -= steps % validations
    each = steps / count  # of a model
    averaged = min(max(2, 0.05 * each), EMA_STEPS)
    rates = [x for x in ("lr", "adam_lr") if x in cfg.optimizer]
    scale = (800 / min(800, max(100, each))) ** 0.5  # few steps need higher learning rates
    return {
        "max_steps": steps,
        "eval_every": max(1, -(-steps // validations)),
        "eval_batches": None if part == 1 else max(1, int(part * text.val_tokens / per_batch)),
        "ema_decay": round(
            1 - 1 / averaged, 3 + int(log10(averaged))
        ),  # 1 - decay has three digits
        "schedule.warmup_steps": min(100, int(each / 100)),
        **{f"optimizer.{x}": float(f"{scale * cfg.optimizer[x]:.3g}") for x in rates},
    }


def validation_seconds(cfg: DictConfig, step: float, tokens: float) -> float:
    """Return the time of a validation on so many tokens: a third of a step is forward."""
    return 0.3 * step * tokens / tokens_per_step(cfg)


def validated_tokens(cfg: DictConfig, val_tokens: int) -> float:
    """Return the tokens of a validation split that a validation reads."""
    read = (cfg.eval_batches or inf) * cfg.data.eval_batch_size * cfg.model.block_size
    return min(val_tokens, read)


def most_steps(cfg: DictConfig, given: set[str], text: Text) -> int:
    """Return the steps of a run that no time limits; the best checkpoint is from earlier."""
    useful = 1.5 * models(cfg) * useful_tokens(cfg, set(), text) / tokens_per_step(cfg)
    return int(cfg.max_steps) if "max_steps" in given else max(1, int(useful))


def reducible_loss(parameters: int, tokens: float, text: Text, models: int = 1) -> float:
    """Return the reducible loss: powers of parameters and tokens
    (https://arxiv.org/abs/2203.15556).

    Args:
        models: of a chain, of which each learns from so many tokens.
    """
    # Repeats: https://arxiv.org/abs/2305.16264
    fresh = 2 * text.tokens * (1 - exp(-tokens / (2 * text.tokens)))
    fresh *= 1 + 0.15 * log2(models)
    return 2.5 * parameters**-0.3 + 240 * max(1, fresh) ** -0.5


def useful_tokens(cfg: DictConfig, given: set[str], text: Text) -> float:
    """Return after how many tokens a training begins to overfit, or its steps end; a larger model
    overfits earlier.
    """
    tokens = 10 * (text.tokens / 1e6) ** 0.3 * (parameters(cfg) / 4e5) ** -0.2 * text.tokens
    return min(tokens, cfg.max_steps * tokens_per_step(cfg)) if "max_steps" in given else tokens


def expected_loss(cfg: DictConfig, text: Text) -> tuple[float, float]:
    """Return the expected loss of a run, in nats per token, and half of its 90 % interval."""
    tokens = min(
        useful_tokens(cfg, set(), text), cfg.max_steps / models(cfg) * tokens_per_step(cfg)
    )
    reducible = reducible_loss(cfg.model.layer_repeats * parameters(cfg), tokens, text, models(cfg))
    loss = (0.7 + 0.5 * reducible * min(1, text.tokens / 1e6) ** 0.3) * text.ngram_loss
    # A model learns from more text than is counted
    loss *= max(1, min(tokens, text.tokens) / COUNTED_TOKENS) ** -0.1
    return loss, 0.15 * loss


def explain(cfg: DictConfig, text: Text, step: float) -> list[str]:
    """Return the lines that describe a plan."""
    sizes = ", ".join(
        f"{x} {cfg.model[x]}" for x in ("n_layer", "layer_repeats", "n_embd", "block_size", "ngram")
    )
    epochs, most = (
        n / text.tokens
        for n in (cfg.max_steps * tokens_per_step(cfg), useful_tokens(cfg, set(), text))
    )
    chained = f"; {models(cfg)} models one after another" if models(cfg) > 1 else ""
    return [
        f"plan        {sizes}; {cfg.max_steps:,} steps of {1000 * step:.1f} "
        f"ms{', compiled' if cfg.compile else ''}{chained}",
        f"why         {epochs:.1f} epochs of {text.tokens:,} tokens; such a model overfits "
        f"after about {most:.1f}; "
        f"n-grams of up to {text.ngram} tokens predict the text best",
    ]


def updated(cfg: DictConfig, settings: Settings) -> DictConfig:
    """Return a copy of a configuration with other settings."""
    cfg = cfg.copy()
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


def tokens_per_step(cfg: DictConfig) -> int:
    """Return the tokens of an optimizer step."""
    return int(cfg.data.batch_size * cfg.trainer.accumulate_grad_batches * cfg.model.block_size)


def parameters(cfg: DictConfig) -> int:
    """Return the number of parameters of the matrices in the blocks."""
    return int(12 * cfg.model.n_layer // cfg.model.layer_repeats * cfg.model.n_embd**2)


def models(cfg: DictConfig) -> int:
    """Return how many models are trained one after another."""
    return int(OmegaConf.select(cfg, "callbacks.generations.count") or 1)


def power_of_two(value: float) -> int:
    """Return the nearest power of two that is not above `value`, at least 1."""
    return 1 << int(log2(max(1, value)))
