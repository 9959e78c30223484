"""Functions and classes that a user's file, a checkpoint or a sweep names by an earlier place."""

from typing import Any

MOVED = {
    "minigpt.optim.adamw": "minigpt.training.optim.adamw",
    "minigpt.optim.muon": "minigpt.training.optim.muon",
    "minigpt.schedules.constant": "minigpt.training.schedules.constant",
    "minigpt.schedules.cosine": "minigpt.training.schedules.cosine",
    "minigpt.schedules.linear": "minigpt.training.schedules.linear",
    "minigpt.runs.callbacks.samples.Samples": "minigpt.runs.callbacks.samples.SamplesCallback",
}


_EARLIER = {present: earlier for earlier, present in MOVED.items()}


def current(value: Any) -> Any:
    """Return the present name of what has moved, also of `module:name`; another value as it is."""
    return MOVED.get(value.replace(":", "."), value) if isinstance(value, str) else value


def earlier(value: Any) -> Any:
    """Return the earlier name of what has moved, for checksums that must stay the same."""
    return _EARLIER.get(value, value) if isinstance(value, str) else value
