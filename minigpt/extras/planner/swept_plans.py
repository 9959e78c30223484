"""What `minutes=` changes in a sweep: the part that is validated, and the answer."""

import re
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig

from minigpt.extras.planner.planned_sizes import RECIPES
from minigpt.sweeps.results import Point


def swept_overrides(overrides: Mapping[str, str], cfg: DictConfig) -> dict[str, str]:
    """Return the overrides of a sweep by name, with one that lets all plans validate alike.

    Otherwise the plan of each new model would choose another part of the validation split. Recipes
    keep theirs, if no point has a new model.
    """
    given = {name.lstrip("+"): text for name, text in overrides.items()}
    values = [re.split(r"[=,()\s]+", given.get(key, "null").lower()) for key in RECIPES]
    has_new_models = all("null" in possible for possible in values)
    if "eval_batches" in given or cfg.eval_batches is not None or not has_new_models:
        return dict(overrides)
    return {**overrides, "eval_batches": "eval_batches=null"}


def steps_note(points: Sequence[Point]) -> str:
    """Return a sentence about the steps of completed runs that were planned, or nothing."""
    steps = [point.totals["steps"] for point in points if "steps" in point.totals]
    if not steps:
        return ""
    texts = dict.fromkeys(f"{step:,.0f}" for step in (min(steps), max(steps)))
    minutes = {str(point.settings["minutes"]) for point in points}
    rows = "rows of equal minutes" if len(minutes) > 1 else "rows"
    return f"minutes= planned {' to '.join(texts)} steps: {rows} are compared at equal time."
