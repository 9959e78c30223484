"""Errors of Hydra and OmegaConf as one line."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minigpt.utils.terminal import did_you_mean

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def explain_hydra(error: BaseException) -> tuple[str, int]:
    """Return one line and the exit code for an error of Hydra, whose own messages have several lines."""
    cause = error.__cause__
    text = str(error)
    if (override := getattr(error, "override", None)) is not None:
        return f"error: cannot parse the override {override}; write key=value, with '…' around special characters", 2
    if missing := re.search(r"Could not find '([\w./@-]+)/([^'/]*)'", text):
        group, choice = missing.groups()
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        if options:
            takes = ", ".join(options)
            return f"error: {group}={choice} does not exist{did_you_mean(choice, options)}; {group}= takes {takes}", 2
    if unknown := re.search(r"Could not (?:override|delete|append) '([^']+)'", text):
        name = unknown[1]
        if chosen := _choices_with(name):
            return f"error: {name} does not exist here; it belongs to {', '.join(chosen)}", 2
        return f"error: {name} does not exist{did_you_mean(name, _known_settings())}; --help lists them", 2
    full_key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    detail = " ".join(str(cause or error).split()).split(" full_key:")[0]
    where = f"{full_key}: " if full_key else ""
    return f"error: {where}{re.sub(r' See https?://.*', '', detail)}", 2


def _known_settings() -> set[str]:
    """Every group and dotted setting in `configs/`."""
    known: set[str] = set()
    for file in _CONFIGS.rglob("*.yaml"):
        known |= {file.parent.relative_to(_CONFIGS).as_posix()} | set(_settings_of(file))
    # Not the parameters of sweeps, nor the file for W&B's agent.
    return {name for name in known - {"."} if not name.startswith(("hydra.sweeper.params.", "sweep."))}


def _choices_with(name: str) -> list[str]:
    """The choices that have a setting, such as tokenizer=bpe for tokenizer.vocab_size."""
    group = name.partition(".")[0]
    files = sorted((_CONFIGS / group).glob("*.yaml"))
    return [f"{group}={file.stem}" for file in files if name in _settings_of(file)]


def _settings_of(file: Path) -> Iterator[str]:
    import yaml  # a dependency of Hydra

    group, text = file.parent.relative_to(_CONFIGS).as_posix(), file.read_text(encoding="utf-8")
    inside = group in (".", "hydra/help") or "@package _global_" in text
    return _keys(yaml.load(text, yaml.CSafeLoader), "" if inside else f"{group}.")


def _keys(node: Any, prefix: str) -> Iterator[str]:
    for key in node if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(node[key], f"{prefix}{key}.")
