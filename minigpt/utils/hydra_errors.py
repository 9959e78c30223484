"""Errors of Hydra in one line.

A mistyped or misplaced setting, an unknown choice, or an override that it cannot parse.
"""

import re
from collections.abc import Iterator

from minigpt.utils.scripts import ROOT, shell_quote
from minigpt.utils.terminal import did_you_mean

# Settings of other programs for training, by their names there.
_ELSEWHERE = {
    "device": "trainer",
    "dataset": "data",
    "learning_rate": "optimizer.lr",
    "max_iters": "max_steps",
    "eval_interval": "eval_every",
    "eval_iters": "eval_batches",
    "log_interval": "log_every",
    "warmup_iters": "schedule.warmup_steps",
    "grad_clip": "trainer.gradient_clip_val",
    "dtype": "trainer.precision",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "out_dir": "hydra.run.dir",
    "epochs": "max_steps",
    "max_epochs": "max_steps",
    "batch_size": "data.batch_size",
}


def explain_hydra(error: BaseException) -> str:
    """Return one line for an error of Hydra, whose own messages have several lines."""
    # A command line that it cannot parse, and files that extend each other.
    override = getattr(error, "override", None)
    if override is not None:
        return _explain_override(override)
    if isinstance(error, RecursionError):
        return (
            "a defaults list names its own file; "
            "give a file that extends a built-in one another name"
        )

    # An unknown choice of a group, or an unknown setting.
    text = str(error)
    missing = re.search(r"Could not find '([\w./@-]+)/([^'/]*)'", text)
    options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
    if missing and options:
        group, choice = missing.groups()
        return (
            f"{group}={choice} does not exist{did_you_mean(choice, options)}; "
            f"{group}= takes {', '.join(options)}"
        )
    unknown = re.search(r"Could not (?:override|delete|append) '([^']+)'", text)
    if unknown:
        name = unknown[1]
        settings = _settings()
        group = f"{name.partition('.')[0]}="
        chosen = [choice for choice in settings.get(name, ()) if choice.startswith(group)]
        if chosen:
            return f"{name} does not exist here; it belongs to {', '.join(chosen)}"
        if name in _ELSEWHERE:
            return f"{name} does not exist; write {_ELSEWHERE[name]}=…"
        return f"{name} does not exist{did_you_mean(name, settings)}; --help lists them"

    # Any other.
    cause = error.__cause__
    full_key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    detail = " ".join(str(cause or error).split()).split(" full_key:")[0]
    where = f"{full_key}: " if full_key else ""
    return where + re.sub(r" See https?://.*", "", detail)


def _explain_override(override: str) -> str:
    key, equals, value = override.partition("=")
    # Without commas beside which is no value.
    full = re.sub(r"(^|[\[({])[\s,]*,|,(?=\s*([,\])}]|$))", r"\1", value)
    if full != value:
        written = shell_quote(f"{key}={full}")
        return f"{override} has a comma without a value beside it; write {written}"
    # In single quotes a shell replaces nothing, and in double quotes it passes on those of Hydra.
    single = shell_quote(f'{key}="{value}"')
    quoted = single if re.search(r"[$`!]", value) else f"\"{key}='{value}'\""
    written = "key=value" if not equals or re.search(r"['\"\\]", value) else quoted
    return f"cannot parse the override {override}; in a shell, write {written}"


def written_as(name: str) -> str:
    """Return the setting for a name of another program or the last part of its name."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    found = [key for key in _settings() if key.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else name


def _settings() -> dict[str, list[str]]:
    """Return the groups and dotted settings in `configs/`, with GROUP=CHOICE of their files."""
    import yaml  # a dependency of Hydra

    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        group = file.parent.relative_to(ROOT / "configs").as_posix()
        text = file.read_text(encoding="utf-8")
        found.setdefault(group, [])
        inside = group in (".", "hydra/help") or "@package _global_" in text
        for key in _keys(yaml.load(text, yaml.CSafeLoader), "" if inside else f"{group}."):
            found.setdefault(key, []).append(f"{group}={file.stem}")
    hidden = (".", "hydra.sweeper.params.", "sweep.")
    return {key: files for key, files in found.items() if not key.startswith(hidden)}


def _keys(node: object, prefix: str) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")
