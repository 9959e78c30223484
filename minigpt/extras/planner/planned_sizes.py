"""What is around a plan before it is made: groups, settings that it keeps, and possible sizes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from minigpt.model.config import RULES
from minigpt.runs.run_config import advice_for_text, flat, normalize
from minigpt.utils.checks import POSITIVE, or_null
from minigpt.utils.errors import require

HEAD_WIDTH = 64
RECIPES = ("experiment", "init_from")  # what gives a model that is trained as it is
PLANNED_GROUPS = {"model": "planned", "optimizer": "muon_fast"}  # of `minutes=`
PLANNED_OR_NULL = ("eval_batches", "ema_decay")  # settings that users turn off with null


def planned_overrides(given: Mapping[str, str]) -> list[str]:
    """Return the groups that `minutes=` selects beside the given overrides: none for a model that
    `experiment=` or `init_from=` gives, at some points of a sweep at least.
    """
    if any(given.get(key, "null").lower() not in ("null", "") for key in RECIPES):
        return []
    return [f"{group}={choice}" for group, choice in PLANNED_GROUPS.items() if group not in given]


def with_possible_sizes(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a run configuration with sizes that a plan could choose around the overrides, for
    checks.

    Whole numbers in `cfg`, from which the plan is made too, become integers.

    Raises:
        UserError: a run with `minutes=` cannot have these settings; or as `planned_heads`.
    """
    normalize(cfg)
    advice = advice_for_text(cfg, "minutes", cfg.minutes)
    require("minutes", cfg.minutes, *or_null(POSITIVE), advice)
    require("pause_at", cfg.get("pause_at"), lambda step: step is None, "null with minutes")
    require(
        "trainer.devices",
        OmegaConf.select(cfg, "trainer.devices", default=1),
        lambda n: n == 1,
        "1 with minutes, which plans for one device",
    )
    given = given_settings(overrides)
    if is_recipe(cfg, given):
        require(
            "resume",
            cfg.get("resume"),
            lambda start: start in (None, "auto"),
            "null or auto with the minutes of a recipe",
            "set max_steps instead",
        )
        return cfg
    if "model" in given:
        return cfg
    cfg, layer_repeats = cfg.copy(), cfg.model.layer_repeats
    n_embd, n_head = planned_heads(cfg.model, given, 64)
    require("model.layer_repeats", layer_repeats, *RULES["layer_repeats"])
    sizes = {"n_embd": n_embd, "n_head": n_head, "n_layer": layer_repeats, "block_size": 1}
    cfg.model.update({name: size for name, size in sizes.items() if f"model.{name}" not in given})
    return cfg


def is_recipe(cfg: DictConfig, given: Collection[str]) -> bool:
    """Return whether the time plans the length of a run alone: its model is given."""
    return "experiment" in given or cfg.get("init_from") is not None


def planned_heads(model: Mapping[str, Any], given: Collection[str], n_embd: int) -> tuple[int, int]:
    """Return the width and the number of heads of a plan for a width of about `n_embd`, with those
    that are given.

    The heads have an even width, which rotary embedding needs, of about 64.

    Raises:
        UserError: a given value is invalid, or no number of heads divides the given width.
    """
    for name in ("n_embd", "n_head", "n_kv_head", "head_dim"):
        require(f"model.{name}", model[name], *RULES[name])
    width_given, heads_given = (f"model.{name}" in given for name in ("n_embd", "n_head"))
    n_embd, groups = model["n_embd"] if width_given else n_embd, model["n_kv_head"] or 1
    n_head = round(n_embd / (model["head_dim"] or HEAD_WIDTH)) // groups * groups or groups
    n_head = model["n_head"] if heads_given else n_head
    if model["head_dim"] is None and not width_given:
        n_embd = -(-n_embd // (2 * n_head)) * 2 * n_head
    elif model["head_dim"] is None and not heads_given:
        least = groups * (2 if model["position"] == "rope" else 1)
        require(
            "model.n_embd",
            n_embd,
            lambda n: n % least == 0,
            f"a multiple of {least}",
            "use one, or set model.head_dim too",
        )
        possible = [
            n for n in range(groups, n_embd + 1, groups) if n_embd % (n * least // groups) == 0
        ]
        n_head = min(possible, key=lambda n: abs(n_embd / n - HEAD_WIDTH))
    return n_embd, n_head


def given_settings(overrides: Sequence[str]) -> set[str]:
    """Return the keys of the settings and groups that overrides give.

    Not the groups that `minutes=` selects, nor null unless a plan would choose another value.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides([*overrides])
    given = flat({override.key_or_group: override.value() for override in parsed})
    return {
        key
        for key, value in given
        if key in PLANNED_OR_NULL or (value is not None and PLANNED_GROUPS.get(key) != value)
    }


def without(given: set[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings whose key and config group are not given; a given corpus has the batch
    size of the plan.
    """
    given = given - {"data"}
    return {
        key: value for key, value in settings.items() if not {key, key.partition(".")[0]} & given
    }
