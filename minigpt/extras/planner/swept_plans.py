"""What `minutes=` changes in a sweep: the part that is validated, and the answer."""

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig

from minigpt.sweeps.results import Point


def swept_overrides(overrides: Mapping[str, str], cfg: DictConfig) -> dict[str, str]:
    """Return the overrides of a sweep by name, with one that lets all plans validate alike.

    Otherwise each plan would choose another part of the validation split.
    """
    given = {name.lstrip("+") for name in overrides}
    if "eval_batches" in given or cfg.eval_batches is not None:
        return dict(overrides)
    return {**overrides, "eval_batches": "eval_batches=null"}


def steps_note(points: Sequence[Point]) -> str:
    """Return a sentence about the steps of completed runs that were planned, or nothing."""
    steps = [point.totals["steps"] for point in points if "steps" in point.totals]
    if not steps:
        return ""
    texts = dict.fromkeys(f"{step:,.0f}" for step in (min(steps), max(steps)))
    return f"minutes= planned {' to '.join(texts)} steps: rows are compared at equal time."
