"""The overrides and settings that identify a run: by name, without those that change no result."""

import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from minigpt.runs.run_config import flat, use_outside_values
from minigpt.utils.files import sha256_json
from minigpt.utils.moved import current

MAX_NAME_CHARS = 120
MAX_NAME_BYTES = 255  # as file systems take them
# Also in old sweeps
_REPORTED = re.compile(r"originality|callbacks\.(originality|expectation|pace)\b")
_DICT = re.compile(r"(?<!\$)\{")  # in an override


def by_name(overrides: Sequence[str]) -> dict[str, str]:
    """Map names to overrides, in order: the key, and `key#2` where a key acts again.

    Of two values the last acts. Hydra merges dicts, and a group takes a choice and dicts, so all of
    these stay.
    """
    acting: list[str] = []
    for override in overrides:
        key = override.partition("=")[0]
        if re.match(r"(\+\+)?[^+~]", key) and not _DICT.search(override):
            replaced = (key, key.removeprefix("++"))
            acting = [
                old for old in acting if _DICT.search(old) or old.partition("=")[0] not in replaced
            ]
        acting.append(override)
    keys = [override.partition("=")[0] for override in acting]
    earlier = [keys[:i].count(key) for i, key in enumerate(keys)]
    names = [f"{key}#{n + 1}" if n else key for key, n in zip(keys, earlier, strict=True)]
    return dict(zip(names, acting, strict=True))


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Map dotted settings to their last part where that is unique."""
    leaves = [name.rpartition(".")[2] for name in names]
    return {
        name: leaf if leaves.count(leaf) == 1 else name
        for name, leaf in zip(names, leaves, strict=True)
    }


def folder_name(values: Mapping[str, str], taken: Collection[str]) -> str:
    """Return a name for the folder of a run with these overrides, which is not taken yet."""
    short = short_names(list(values))
    name = ",".join(f"{short[key]}={value}" for key, value in values.items()).replace("'", "")
    name = re.sub(r"[^\w.,=+-]+", "-", name)
    if len(name) <= MAX_NAME_CHARS and len(name.encode()) <= MAX_NAME_BYTES and name not in taken:
        return name
    # Of 8 digits, two would be equal in 1 % of the grids of 10,000 points.
    suffix = f"-{sha256_json([values, len(taken)])[:16]}"
    start = name[: MAX_NAME_CHARS - len(suffix)].encode()[: MAX_NAME_BYTES - len(suffix)]
    return start.decode(errors="ignore") + suffix


def is_relevant(override: str) -> bool:
    """Return whether an override, or a setting, changes what a run computes.

    So does `resume=` with a path.
    """
    irrelevant = r"[+~]*(pause_at|logger)([./@=].*)?|resume=(None|null|auto)"
    return not re.fullmatch(irrelevant, override, re.DOTALL)


def relevant_settings(settings: Any) -> dict[str, object]:
    """Return the settings that change what a run computes, by dotted key.

    Of references, only those to values from outside the configuration are resolved. Callbacks that
    report results change none.

    Args:
        settings: a configuration of Hydra, or a plain dict.
    """
    if OmegaConf.is_config(settings):
        settings = pickle.loads(pickle.dumps(settings))  # 1 ms; settings.copy() takes 4
        use_outside_values(settings)
        settings = OmegaConf.to_container(settings)
    return {
        key: current(value)
        for key, value in flat(settings)
        if is_relevant(f"{key}={value}") and not _REPORTED.match(key)
    }
