"""Names of earlier versions: in files of users, command lines, checkpoints and sweeps."""

from typing import Any

# Functions and classes, in a `_target_`
MOVED = {
    "minigpt.optim.adamw": "minigpt.training.optim.adamw",
    "minigpt.optim.muon": "minigpt.training.optim.muon",
    "minigpt.schedules.constant": "minigpt.training.schedules.constant",
    "minigpt.schedules.cosine": "minigpt.training.schedules.cosine",
    "minigpt.schedules.linear": "minigpt.training.schedules.linear",
    "minigpt.runs.callbacks.samples.Samples": "minigpt.runs.callbacks.samples.SamplesCallback",
}
# Settings of a run, which the command line and files give; `normalize` in runs/run_config.py moves
# their values
RENAMED = {"originality": "callbacks.originality.characters"}


def current(value: Any) -> Any:
    """Return the present name of what has moved, also of `module:name`; another value as it is."""
    return MOVED.get(value.replace(":", "."), value) if isinstance(value, str) else value
