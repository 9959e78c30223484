"""Plan the length of a run for `minutes=` beside `experiment=` or `init_from=`.

The model is trained as it is given: the time changes the number of steps alone, and in proportion
the settings that count steps.
"""

import time
from typing import Any

from omegaconf import DictConfig

from minigpt.data.token_files import Corpus
from minigpt.extras.planner.measured_steps import step_seconds
from minigpt.extras.planner.plan import (
    MEASURING,
    OVERHEAD,
    TRAINER,
    VALIDATING,
    Settings,
    drawing_seconds,
    seconds_left,
    too_short,
    updated,
    validated_tokens,
    validation_seconds,
)
from minigpt.model.config import GPTConfig

# Seconds per parameter to load weights, and load them again for the last sample; seconds of a
# validation for its sample and its checkpoint, and those per parameter
STARTING = 1e-7
SAVING, SAVING_PARAMETER = 0.1, 3e-8


def time_recipe(
    cfg: DictConfig,
    corpus: Corpus,
    config: GPTConfig,
    given: set[str],
    *,
    deadline: float,
) -> dict[str, Any]:
    """Return a plan as `make_plan` does, and the steps of the recipe; no loss is expected.

    Args:
        config: the architecture, which may be that of weights.
        given: keys of settings that the user chose, such as "eval_every".
        deadline: `time.perf_counter()` when the run should end.

    Raises:
        UserError: the time is too short for a step.
    """
    # Measure steps; the compiler finds most of its work done when it compiles a model again
    budget = seconds_left(cfg, deadline)
    sized = updated(cfg, {"model.block_size": config.block_size})
    longer = min(4.0, 6 * MEASURING * budget)
    if cfg.compile:
        step_seconds(sized, corpus, seconds=0.0, config=config)
    begun = time.perf_counter()
    step = TRAINER * step_seconds(sized, corpus, seconds=longer, config=config, settle=True)
    drawing = drawing_seconds(sized, step, budget)
    seconds = deadline - time.perf_counter() - OVERHEAD - drawing
    if cfg.compile:
        seconds -= time.perf_counter() - begun
    # Choose the length
    seconds -= STARTING * config.num_params()
    validation = validation_seconds(sized, step, validated_tokens(sized, corpus.val.tokens))
    validation += SAVING + SAVING_PARAMETER * config.num_params()
    settings = recipe_length(cfg, given, step, validation, seconds)
    if settings["max_steps"] < 1:
        advice = ["set compile=false"] if cfg.compile else []
        raise too_short(cfg, step, "validate on a part with eval_batches=…", *advice)
    changed = ", ".join(f"{key.rpartition('.')[2]} {n:,}" for key, n in settings.items())
    return {
        "settings": settings,
        "expected_val_loss": None,
        "lines": [
            f"plan        {changed}; steps of {1000 * step:.1f} ms"
            f"{', compiled' if cfg.compile else ''}; without minutes= {cfg.max_steps:,} steps"
        ],
        "of_steps": cfg.max_steps,
        "pace": {
            "planned_steps": settings["max_steps"],
            "most_steps": cfg.max_steps if "max_steps" in given else None,
            "validation": validation / step,
            "seconds": 60 * cfg.minutes - OVERHEAD - drawing,
            "until": 60 * cfg.minutes - OVERHEAD - drawing,
        },
    }


def recipe_length(
    cfg: DictConfig,
    given: set[str],
    step: float,
    validation: float,
    seconds: float,
) -> Settings:
    """Return the settings that count steps, of a run of `seconds`.

    Those that are not given are in proportion to the steps of the recipe, with fewer validations
    if they would take too long.

    Args:
        step: seconds of a step, as `validation` of a validation.
    """
    if "eval_every" in given:
        steps = steps_within(seconds, step, validation, cfg.eval_every)
        validations = 1
    else:
        possible = int(VALIDATING * seconds / validation)
        validations = max(1, min(-(-cfg.max_steps // cfg.eval_every), possible))
        steps = int((seconds - validations * validation) / step)
    if "max_steps" in given:
        steps = min(steps, cfg.max_steps)
    settings = {
        "max_steps": steps,
        "eval_every": max(-(-cfg.eval_every * steps // cfg.max_steps), -(-steps // validations)),
    }
    if "warmup_steps" in cfg.schedule:
        warmup = cfg.schedule.warmup_steps
        settings["schedule.warmup_steps"] = round(warmup * steps / cfg.max_steps)
    return {key: n for key, n in settings.items() if key == "max_steps" or key not in given}


def steps_within(
    seconds: float, step: float, validation: float, every: int, *, done: int = 0
) -> int:
    """Return how many steps fit in a time, with a validation after `every` steps and the last.

    Args:
        step: seconds of a step, as `validation` of a validation.
        done: steps since the last validation.
    """
    # Whole cycles of steps and a validation, and in the rest some steps before the last one
    cycle = every * step + validation
    seconds += done * step
    cycles = max(0, int(seconds // cycle))
    rest = seconds - cycles * cycle - validation
    return cycles * every + max(0, int(rest / step)) - done
