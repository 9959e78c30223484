"""The command line of a run: quoted overrides, and one command line for all processes of torchrun or srun."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minigpt.checkpoints.find import follow_latest
from minigpt.distributed.process_group import gather_objects, join_ranks, shared_errors
from minigpt.runs.run_config import LITERAL_TEXTS, escape_references
from minigpt.utils.errors import UserError
from minigpt.utils.hydra_errors import written_as
from minigpt.utils.scripts import ROOT

PLANNED_GROUPS = {"model": "planned", "optimizer": "muon_fast"}  # of `minutes=`
# Keys whose values are taken literally, not in Hydra's syntax; in a sweep, commas separate several of the first.
_PATHS = (
    "data.path",
    "data.val_path",
    "data.train_bin",
    "data.val_bin",
    "data.folder",
    "init_from",
    "resume",
)
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "data.dataset")
_TEXTS = (
    *LITERAL_TEXTS,
    *(f"logger.wandb.{name}" for name in ("name", "notes", "group", "project", "entity", "id")),
)
# What an override such as ~logger or logger=null stands for; the other groups always have a choice.
_WITHOUT = {
    "callbacks": "callbacks=none",
    "logger": "logger=none",
    "experiment": "~experiment",
    "debug": "~debug",
}
SETTABLE = ("block_size", "dropout", "ngram_dropout")  # the values of `model` beside init_from


def complete_overrides(
    overrides: Sequence[str], groups: Sequence[str] = ("model", "tokenizer")
) -> list[str]:
    """Return the overrides of a run as Hydra takes them, with the groups that other settings select.

    These are `init_from=`, `minutes=` and `data.train_bin=`.

    Paths and texts are quoted. A link such as `runs/latest` becomes the run that it points at: it moves when a new run
    starts.
    """
    sweeps = not {"-m", "--multirun"}.isdisjoint(overrides)
    complete = [_checked(literal(override, sweeps)) for override in overrides]
    given = {
        key: value
        for key, _, value in (override.partition("=") for override in complete)
        if value[:1] != "{"
    }
    if is_set(given, "minutes"):
        for key in ("experiment", "init_from"):
            if is_set(given, key):
                raise UserError(
                    f"minutes plans a new model, but {key}={given[key]} sets one; remove one of the two"
                )
        complete += [
            f"{group}={choice}" for group, choice in PLANNED_GROUPS.items() if group not in given
        ]
    if is_set(given, "init_from"):
        complete += [f"{group}=pretrained" for group in groups if group not in given]
        settable = [f"model.{name}" for name in SETTABLE]
        fixed = [name for name in given if name.startswith("model.") and name not in settable]
        if fixed and "model" not in given:
            raise UserError(
                f"{fixed[0]} is that of init_from; only {', '.join(settable)} can be set"
            )
        if "model" in groups and "experiment" not in given:
            complete += _finetuning(
                given, has_warmup=any("warmup_steps" in override for override in complete)
            )
    elif is_set(given, "data.train_bin") and "tokenizer" not in given:
        complete.append("tokenizer=prepared")
    # Flags and their values first: Hydra takes overrides in one place only.
    return sorted(complete, key=lambda each: each[:1] != "-" and ("=" in each or each[:1] == "~"))


def _finetuning(given: Mapping[str, str], *, has_warmup: bool) -> list[str]:
    """Return the overrides that `init_from=` adds: no warmup, and for a model of Hugging Face a low rate.

    A small model of minigpt learns most at the rate of its training. A run that resumes has those that it began with,
    because the source of its weights may be gone.
    """
    source, run = (given.get(key, "").strip("'\"") for key in ("init_from", "hydra.run.dir"))
    known = given.get("schedule", "linear") in ("constant", "cosine", "linear")
    low_rate, no_warmup = "optimizer=adamw_finetune", "schedule.warmup_steps=0"
    possible = ([] if "optimizer" in given else [low_rate]) + (
        [no_warmup] if known and not has_warmup else []
    )
    if run and (recorded := Path(run, ".hydra/overrides.yaml")).exists():
        began_with = recorded.read_text("utf-8").splitlines()
        return [override for override in possible if f"- {override}" in began_with]
    is_id = re.fullmatch(r"(?!runs/|\.)[\w.-]+(/[\w.-]+)?(@.*)?", source) and not os.path.exists(
        source
    )
    is_huggingface = is_id or Path(source, "config.json").is_file()
    return [override for override in possible if is_huggingface or override != low_rate]


def _checked(override: str) -> str:
    """Return an override that leaves a group without a choice as Hydra takes it, and any other as it is.

    Raises:
        UserError: Hydra would refuse it in many lines, or accept it without an effect, or the group needs a choice.
    """
    key, equals, value = override.partition("=")
    flag = re.fullmatch(r"--(?!(cfg|config-\w+|info|package|experimental-rerun)$)(\w[\w.]*)", key)
    if flag and (equals or "_" in key):
        raise UserError(
            f"{override} is not a flag; settings have no dashes: write {written_as(flag[2])}={value or '…'}"
        )
    group = key.removeprefix("~")
    if not group or (key == group and value.lower() not in ("null", "[]", "{}")):
        return override
    choices = sorted(file.stem for file in (ROOT / "configs" / group).glob("*.yaml"))
    if choices and group not in _WITHOUT:
        raise UserError(
            f"{override} leaves a run without {group}; write {group}= with one of {', '.join(choices)}"
        )
    return _WITHOUT.get(group, override)


def literal(override: str, sweeps: bool) -> str:
    """Quote the value of a setting that takes a path or a text, where it needs it; expand `~` in paths.

    None, as Python and the agent of Weights & Biases write it, is null, but in a prompt.

    Args:
        sweeps: whether commas separate paths over which to sweep, unless there is a file of the whole name.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = override.partition("=")
    name = key.lstrip("+")
    if value == "None" and name != "callbacks.samples.prompt":
        return f"{key}=null"
    if name in _PATHS and value[:1] == "[":  # a list
        override = re.sub(r"([\[,]\s*)~/", lambda found: f"{found[1]}{Path.home()}/", override)
    if name not in (*_PATHS, *_FOLDERS, *_TEXTS) or value.lower() in ("", "null"):
        return override
    may_be_list = name in _PATHS and not os.path.exists(
        value
    )  # unlike Path.exists, no error if it is too long
    several = may_be_list and sweeps
    values = re.split(r"\s*,\s*", value) if several else [value]
    if value[0] in "'\"" or (may_be_list and re.match(r"\[|choice\(", value)):  # in Hydra's syntax
        with suppress(HydraException):
            parsed: Any = OverridesParser.create().parse_override(override).value()
            if not isinstance(parsed, str):  # a list, or values of a sweep
                return override
            values, several = [parsed], False
    if name in LITERAL_TEXTS:
        values = [escape_references(text) for text in values]
    if name not in _TEXTS:
        values = [os.path.expanduser(path) for path in values]
    if name in ("resume", "init_from", "hydra.run.dir", "hydra.sweep.dir"):
        values = [follow_latest(path) for path in values]
    if name in ("resume", "init_from"):
        values = [
            str(path.resolve() if path.resolve() != path.absolute() else path)
            for path in map(Path, values)
        ]
    as_given = re.compile(r"null|'.*'|\".*\"" if several else "")
    return f"{key}={','.join(each if as_given.fullmatch(each) else quote_path(each) for each in values)}"


def is_set(given: Mapping[str, str], key: str) -> bool:
    """Return whether the overrides give a setting another value than null."""
    return given.get(key, "null").lower() not in ("null", "")


def given_settings(overrides: Sequence[str]) -> set[str]:
    """Return the keys of the settings and groups that overrides give, but for the groups that `minutes=` selects."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = set()
    for override in OverridesParser.create().parse_overrides([*overrides]):
        key, value = override.key_or_group, override.value()
        if isinstance(value, dict):
            given |= {f"{key}.{name}" for name in value}
        elif PLANNED_GROUPS.get(key) != value:
            given.add(key)
    return given


def quote_override(value: object) -> str:
    """Quote a value for a Hydra override."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(str(value), Quote.single).with_quotes()


def quote_path(path: object) -> str:
    """Quote a path for a Hydra override if Hydra would take it for something else."""
    plain = r"(?i:(?!(null|true|false|nan|inf)$)([a-z_/]|\.\.?/)[a-z0-9_./-]*)"
    return str(path) if re.fullmatch(plain, str(path)) else quote_override(path)


def shared_arguments(arguments: list[str]) -> list[str]:
    """Return rank 0's command line, for all ranks."""
    join_ranks()
    with shared_errors():
        arguments = complete_overrides(arguments)
    return gather_objects(arguments)[0]
