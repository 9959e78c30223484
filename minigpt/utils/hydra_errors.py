"""Errors of Hydra in one line: a mistyped or misplaced setting, an unknown choice, an override that it cannot parse."""

import re
from collections.abc import Iterator
from typing import Any

from minigpt.utils.scripts import ROOT, shell_quote
from minigpt.utils.terminal import did_you_mean

# Settings of other programs for training, by their names there.
_ELSEWHERE = {
    **{
        "device": "trainer",
        "dataset": "data",
        "learning_rate": "optimizer.lr",
        "max_iters": "max_steps",
    },
    **{"eval_interval": "eval_every", "eval_iters": "eval_batches", "log_interval": "log_every"},
    **{
        "warmup_iters": "schedule.warmup_steps",
        "grad_clip": "trainer.gradient_clip_val",
        "dtype": "trainer.precision",
    },
    **{
        "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
        "out_dir": "hydra.run.dir",
    },
    **{"epochs": "max_steps", "max_epochs": "max_steps", "batch_size": "data.batch_size"},
}


def explain_hydra(error: BaseException) -> str:
    """Return one line for an error of Hydra, whose own messages have several lines."""
    cause, text = error.__cause__, str(error)
    if (override := getattr(error, "override", None)) is not None:
        key, equals, value = override.partition("=")
        full = re.sub(
            r"(^|[\[({])[\s,]*,|,(?=\s*([,\])}]|$))", r"\1", value
        )  # without commas beside which is no value
        if full != value:
            return f"{override} has a comma without a value beside it; write {shell_quote(f'{key}={full}')}"
        # In single quotes a shell replaces nothing, and in double quotes it passes on those of Hydra.
        quoted = (
            shell_quote(f'{key}="{value}"')
            if re.search(r"[$`!]", value)
            else f"\"{key}='{value}'\""
        )
        written = "key=value" if not equals or re.search(r"['\"\\]", value) else quoted
        return f"cannot parse the override {override}; in a shell, write {written}"
    if isinstance(error, RecursionError):
        return "a defaults list names its own file; give a file that extends a built-in one another name"
    missing = re.search(r"Could not find '([\w./@-]+)/([^'/]*)'", text)
    if missing and (options := re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)):
        group, choice = missing.groups()
        meant = did_you_mean(choice, options)
        return f"{group}={choice} does not exist{meant}; {group}= takes {', '.join(options)}"
    if unknown := re.search(r"Could not (?:override|delete|append) '([^']+)'", text):
        name, settings = unknown[1], _settings()
        group = name.partition(".")[0]
        if chosen := [
            choice for choice in settings.get(name, ()) if choice.startswith(f"{group}=")
        ]:
            return f"{name} does not exist here; it belongs to {', '.join(chosen)}"
        if name in _ELSEWHERE:
            return f"{name} does not exist; write {_ELSEWHERE[name]}=…"
        return f"{name} does not exist{did_you_mean(name, settings)}; --help lists them"
    full_key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    detail = " ".join(str(cause or error).split()).split(" full_key:")[0]
    where = f"{full_key}: " if full_key else ""
    return where + re.sub(r" See https?://.*", "", detail)


def written_as(name: str) -> str:
    """Return the setting that a name of another program, or the last part of a setting, stands for; else the name."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    found = [key for key in _settings() if key.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else name


def _settings() -> dict[str, list[str]]:
    """Return the groups and dotted settings in `configs/`, without those of sweeps, and GROUP=CHOICE of their files."""
    import yaml  # a dependency of Hydra

    found, configs = dict[str, list[str]](), ROOT / "configs"
    for file in sorted(configs.rglob("*.yaml")):
        group, text = file.parent.relative_to(configs).as_posix(), file.read_text(encoding="utf-8")
        found.setdefault(group, [])
        inside = group in (".", "hydra/help") or "@package _global_" in text
        for key in _keys(yaml.load(text, yaml.CSafeLoader), "" if inside else f"{group}."):
            found.setdefault(key, []).append(f"{group}={file.stem}")
    return {
        key: files
        for key, files in found.items()
        if not key.startswith((".", "hydra.sweeper.params.", "sweep."))
    }


def _keys(node: Any, prefix: str) -> Iterator[str]:
    for key in node if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(node[key], f"{prefix}{key}.")
