"""The command line of a run: quoted overrides, and one command line for all ranks."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minigpt.checkpoints.find import follow_latest
from minigpt.runs.run_config import LITERAL_TEXTS, escape_references
from minigpt.utils.errors import UserError
from minigpt.utils.extras import from_extras
from minigpt.utils.hydra_errors import written_as
from minigpt.utils.moved import RENAMED
from minigpt.utils.scripts import ROOT

SETTABLE = ("block_size", "dropout", "ngram_dropout")  # the values of `model` beside init_from
# Keys whose values are taken literally, not in Hydra's syntax. In a sweep, commas separate several
# of the first.
_PATHS = (
    "data.path",
    "data.val_path",
    "data.train_bin",
    "data.val_bin",
    "data.folder",
    "init_from",
    "resume",
    "code",
)
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "data.dataset")
_TEXTS = (
    *LITERAL_TEXTS,
    "logger.wandb.name",
    "logger.wandb.notes",
    "logger.wandb.group",
    "logger.wandb.project",
    "logger.wandb.entity",
    "logger.wandb.id",
)
# What an override such as ~logger or logger=null stands for; the other groups always have a choice.
_WITHOUT = {
    "callbacks": "callbacks=none",
    "logger": "logger=none",
    "experiment": "~experiment",
    "debug": "~debug",
}


def complete_overrides(
    overrides: Sequence[str], groups: Sequence[str] = ("model", "tokenizer")
) -> list[str]:
    """Return the overrides of a run as Hydra takes them.

    Paths and texts are quoted. A link such as `runs/latest` becomes the run that it points at: it
    moves when a new run starts. The groups are added that `init_from=`, `data.train_bin=` and a
    plan select.
    """
    sweeps = not {"-m", "--multirun"}.isdisjoint(overrides)
    complete = [_checked(literal(override, sweeps)) for override in overrides]
    if "model" in groups:  # no file of configs/ has the earlier name of a setting of a run
        complete = [f"++{each}" if each.partition("=")[0] in RENAMED else each for each in complete]
    parts = [override.partition("=") for override in complete]
    given = {key.lstrip("+"): value for key, _, value in parts if value[:1] != "{"}
    not_null = {key: each for key, each in given.items() if each.lower() not in ("null", "")}
    # A plan may be of a new model
    if is_planned(not_null):
        complete += from_extras("planned_overrides")(given)
    # Weights come with their architecture and tokenizer, token files with their tokenizer
    if "init_from" in not_null:
        complete += [f"{group}=pretrained" for group in groups if group not in given]
        settable = [f"model.{name}" for name in SETTABLE]
        fixed = [name for name in given if name.startswith("model.") and name not in settable]
        if fixed and "model" not in given:
            raise UserError(
                f"{fixed[0]} is that of init_from; only {', '.join(settable)} can be set"
            )
        if "model" in groups and "experiment" not in given:
            complete += _finetuning(given, complete)
    elif "data.train_bin" in not_null and "tokenizer" not in given:
        complete.append("tokenizer=prepared")
    # Flags and their values first: Hydra takes overrides in one place only.
    return sorted(complete, key=lambda each: each[:1] != "-" and ("=" in each or each[:1] == "~"))


def is_planned(settings: Any) -> bool:
    """Return whether settings, those of a DictConfig or by key, are to be completed by a plan."""
    return settings.get("minutes") is not None


def _finetuning(given: Mapping[str, str], complete: Sequence[str]) -> list[str]:
    """Return the overrides that `init_from=` adds.

    No warmup, and for a model of Hugging Face a low rate: a small model of minigpt learns most at
    the rate of its training.
    """
    low_rate = "optimizer=adamw_finetune"
    possible = [] if "optimizer" in given else [low_rate]
    if given.get("schedule", "linear") in ("constant", "cosine", "linear") and not any(
        "warmup_steps" in override for override in complete
    ):
        possible.append("schedule.warmup_steps=0")
    # A run that resumes has those it began with: the source of its weights may be gone.
    folder = given.get("hydra.run.dir", "").strip("'\"")
    recorded = Path(folder, ".hydra/overrides.yaml")
    if folder and recorded.exists():
        began_with = recorded.read_text("utf-8").splitlines()
        return [override for override in possible if f"- {override}" in began_with]
    source = given["init_from"].strip("'\"")
    is_id = re.fullmatch(r"(?!runs/|\.)[\w.-]+(/[\w.-]+)?(@.*)?", source)
    if (is_id and not os.path.exists(source)) or Path(source, "config.json").is_file():
        return possible
    return [override for override in possible if override != low_rate]


def _checked(override: str) -> str:
    """Return an override that leaves a group without a choice as Hydra takes it, else as it is.

    Raises:
        UserError: Hydra would refuse it in many lines, or accept it without an effect, or the
            group needs a choice.
    """
    key, equals, value = override.partition("=")
    flag = re.fullmatch(r"--(?!(cfg|config-\w+|info|package|experimental-rerun)$)(\w[\w.]*)", key)
    if flag and (equals or "_" in key):
        raise UserError(
            f"{override} is not a flag; settings have no dashes: "
            f"write {written_as(flag[2])}={value or '…'}"
        )
    group = key.removeprefix("~")
    if not group or (key == group and value.lower() not in ("null", "[]", "{}")):
        return override
    choices = sorted(file.stem for file in (ROOT / "configs" / group).glob("*.yaml"))
    if choices and group not in _WITHOUT:
        raise UserError(
            f"{override} leaves a run without {group}; "
            f"write {group}= with one of {', '.join(choices)}"
        )
    return _WITHOUT.get(group, override)


def literal(override: str, sweeps: bool) -> str:
    """Quote the value of a setting that takes a path or a text, where it needs it.

    A `~` in paths is expanded. None, as Python and the agent of Weights & Biases write it, is null,
    but in a prompt.

    Args:
        sweeps: whether commas separate paths over which to sweep, unless there is a file of the
            whole name.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    # What is no path and no text stays as it is
    key, _, value = override.partition("=")
    name = key.lstrip("+")
    if value == "None" and name != "callbacks.samples.prompt":
        return f"{key}=null"
    if name in _PATHS and value[:1] == "[":  # a list
        override = re.sub(r"([\[,]\s*)~/", lambda found: f"{found[1]}{Path.home()}/", override)
    if name not in (*_PATHS, *_FOLDERS, *_TEXTS) or value.lower() in ("", "null"):
        return override
    # A value in Hydra's syntax: a quoted text is taken out of its quotes, a list is left to Hydra.
    # Unlike Path.exists, os.path.exists raises no error if the value is too long.
    may_be_list = name in _PATHS and not os.path.exists(value)
    if value[0] in "'\"" or (may_be_list and re.match(r"\[|choice\(", value)):
        with suppress(HydraException):
            parsed: object = OverridesParser.create().parse_override(override).value()
            if isinstance(parsed, str):
                return f"{key}={_quoted(name, parsed, sweeps=False)}"
            return override
    # Any other value is literal
    several = may_be_list and sweeps
    values = re.split(r"\s*,\s*", value) if several else [value]
    return f"{key}={','.join(_quoted(name, each, sweeps=several) for each in values)}"


def _quoted(name: str, value: str, *, sweeps: bool) -> str:
    if name in LITERAL_TEXTS:
        value = escape_references(value)
    if name not in _TEXTS:
        value = os.path.expanduser(value)
    if name in ("resume", "init_from", "hydra.run.dir", "hydra.sweep.dir"):
        value = follow_latest(value)
    if name in ("resume", "init_from"):
        path = Path(value)
        value = str(path if path.resolve() == path.absolute() else path.resolve())
    # In a sweep, what is quoted already stays so
    as_given = r"null|'.*'|\".*\"" if sweeps else ""
    return value if re.fullmatch(as_given, value) else quote_path(value)


def quote_override(value: object) -> str:
    """Quote a value for a Hydra override."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(str(value), Quote.single).with_quotes()


def quote_path(path: object) -> str:
    """Quote a path for a Hydra override if Hydra would take it for something else."""
    plain = r"(?i:(?!(null|true|false|nan|inf)$)([a-z_/]|\.\.?/)[a-z0-9_./-]*)"
    return str(path) if re.fullmatch(plain, str(path)) else quote_override(path)
