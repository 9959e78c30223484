"""Format errors of Hydra and OmegaConf as one line."""

import re
from collections.abc import Iterator
from typing import Any

from minigpt.utils.scripts import ROOT
from minigpt.utils.terminal import did_you_mean


def explain_hydra(error: BaseException) -> str:
    """Return one line for an error of Hydra, whose own messages have several lines."""
    cause, text = error.__cause__, str(error)
    if (override := getattr(error, "override", None)) is not None:
        return f"cannot parse the override {override}; write key=value, with '…' around special characters"
    missing = re.search(r"Could not find '([\w./@-]+)/([^'/]*)'", text)
    if missing and (options := re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)):
        group, choice = missing.groups()
        meant = did_you_mean(choice, options)
        return f"{group}={choice} does not exist{meant}; {group}= takes {', '.join(options)}"
    if unknown := re.search(r"Could not (?:override|delete|append) '([^']+)'", text):
        name, settings = unknown[1], _settings()
        group = name.partition(".")[0]
        if chosen := [choice for choice, keys in settings.items() if name in keys and choice.startswith(f"{group}=")]:
            return f"{name} does not exist here; it belongs to {', '.join(chosen)}"
        known = {choice.partition("=")[0] for choice in settings}.union(*settings.values())
        known = {key for key in known if not key.startswith((".", "hydra.sweeper.params.", "sweep."))}
        return f"{name} does not exist{did_you_mean(name, known)}; --help lists them"
    full_key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    detail = " ".join(str(cause or error).split()).split(" full_key:")[0]
    where = f"{full_key}: " if full_key else ""
    return where + re.sub(r" See https?://.*", "", detail)


def _settings() -> dict[str, list[str]]:
    """Return the dotted settings of each file in `configs/`, by GROUP=CHOICE."""
    import yaml  # a dependency of Hydra

    found, configs = {}, ROOT / "configs"
    for file in sorted(configs.rglob("*.yaml")):
        group, text = file.parent.relative_to(configs).as_posix(), file.read_text(encoding="utf-8")
        inside = group in (".", "hydra/help") or "@package _global_" in text
        found[f"{group}={file.stem}"] = list(_keys(yaml.load(text, yaml.CSafeLoader), "" if inside else f"{group}."))
    return found


def _keys(node: Any, prefix: str) -> Iterator[str]:
    for key in node if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(node[key], f"{prefix}{key}.")
