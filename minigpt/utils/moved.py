"""Names of earlier versions: in files of users, command lines, checkpoints and sweeps."""

from typing import Any

from minigpt.utils.errors import UserError

# Functions and classes, in a `_target_`
MOVED = {
    "minigpt.optim.adamw": "minigpt.training.optim.adamw",
    "minigpt.optim.muon": "minigpt.training.optim.muon",
    "minigpt.schedules.constant": "minigpt.training.schedules.constant",
    "minigpt.schedules.cosine": "minigpt.training.schedules.cosine",
    "minigpt.schedules.linear": "minigpt.training.schedules.linear",
    "minigpt.runs.callbacks.samples.Samples": "minigpt.runs.callbacks.samples.SamplesCallback",
}
# Settings of a run, which the command line and files give
RENAMED = {"originality": "callbacks.originality.characters"}


def current(value: Any) -> Any:
    """Return the present name of what has moved, also of `module:name`; another value as it is."""
    return MOVED.get(value.replace(":", "."), value) if isinstance(value, str) else value


def rename_settings(cfg: Any) -> None:
    """Move the settings of `RENAMED` in a DictConfig to their present keys.

    Raises:
        UserError: a setting would have no effect, because the run is without its group.
    """
    from omegaconf import OmegaConf, open_dict  # not where a checkpoint is loaded

    for key in RENAMED.keys() & cfg.keys():
        with open_dict(cfg):
            value = cfg.pop(key)
        group = RENAMED[key].rpartition(".")[0]
        if OmegaConf.select(cfg, group) is not None:
            OmegaConf.update(cfg, RENAMED[key], value, force_add=True)
        elif value is not None and "callbacks" in cfg:  # scripts/prepare.py has none
            raise UserError(f"{key} is {RENAMED[key]}, but this run is without {group}; remove it")
