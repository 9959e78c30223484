"""The plan of a run as overrides: made once, kept in `plan.json`, read where the run resumes.

The runs of a sweep that differ in their seed alone share the plan of a new model. Where only steps
are planned, or versions of the code are compared, each run makes its own plan. Measured step times
have noise. A shared plan would give all seeds of a row the same error, and the intervals, which are
estimated from the differences between seeds, would not include it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from omegaconf import DictConfig, OmegaConf

from minigpt.checkpoints.find import checkpoints_of
from minigpt.data.token_files import Corpus
from minigpt.extras.planner.planned_sizes import (
    given_settings,
    is_recipe,
    with_possible_sizes,
    without,
)
from minigpt.model.config import GPTConfig
from minigpt.runs.lightning_workarounds import fast_imports
from minigpt.runs.run import load_parts
from minigpt.runs.run_config import RunConfig
from minigpt.runs.run_dir import PLAN, append_log, short_path
from minigpt.sweeps.point_settings import relevant_settings
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json, sha256_json, write_json
from minigpt.utils.moved import MOVED
from minigpt.utils.ranks import launcher_sizes

RUN_PLAN = "plan.json"
_EARLIER = {present: earlier for earlier, present in MOVED.items()}


def plan_overrides(
    cfg: DictConfig, folder: Path, overrides: Sequence[str], started: float
) -> tuple[dict[str, Any], Corpus]:
    """Return the settings of the plan of a run by key, without those given, and its corpus.

    Args:
        cfg: of the run, which is normalized.
        folder: of the run; it may hold the plan of the run that resumes.
        started: `time.perf_counter()` when the run started, from which its minutes count.

    Raises:
        UserError: the run has settings for which no plan is made, or the plan is damaged.
    """
    # Check every setting before heavy packages are imported
    sized = RunConfig.from_hydra(with_possible_sizes(cfg, overrides))
    given = given_settings(overrides)
    if cfg.data.get("format") and not is_recipe(cfg, given):
        raise UserError(
            "minutes=… plans no new model of conversations; set experiment=… or init_from=… too"
        )
    corpus, config, _ = load_parts(sized, folder=folder)
    if launcher_sizes():
        raise UserError("minutes plans for one process; set max_steps instead")
    # Find the plan, or make it
    file = folder / RUN_PLAN
    arguments = (cfg, folder, corpus, config, given, started + 60 * cfg.minutes)
    if cfg.resume == "auto" and file.exists():
        plan = _read_plan(file)
    elif _is_shared(cfg, folder, given):
        shared = folder.resolve().with_name(f".plan-{_checksum(cfg)[:16]}.json")
        with FileLock(f"{shared}.lock"):
            if not shared.exists():
                write_json(shared, _new_plan(*arguments))
        plan = _read_plan(shared)
    else:
        plan = _new_plan(*arguments)
    # Write it, and what it expects to the results of the run
    write_json(file, plan)
    for line in plan["lines"]:
        append_log(folder, line)
    settings = without(_kept(cfg, given, plan), plan["settings"])
    if plan["expected_val_loss"]:
        loss, margin = plan["expected_val_loss"]
        settings["callbacks.expectation"] = {
            "_target_": "minigpt.extras.planner.expectation.Expectation",
            "loss": loss,
            "margin": margin,
        }
    if "max_steps" in settings and "pace" in plan:  # else the steps are given
        settings["callbacks.pace"] = {
            "_target_": "minigpt.extras.planner.pace.Pace",
            **plan["pace"],
        }
    return settings, corpus


def _is_shared(cfg: DictConfig, folder: Path, given: set[str]) -> bool:
    has_own = is_recipe(cfg, given) or cfg.get("code") is not None
    return not has_own and (folder.resolve().parent / PLAN).exists()


def _new_plan(
    cfg: DictConfig,
    folder: Path,
    corpus: Corpus,
    config: GPTConfig,
    given: set[str],
    deadline: float,
) -> Any:
    with fast_imports():
        from minigpt.extras.planner.plan import make_plan
        from minigpt.extras.planner.timed_recipe import time_recipe
    if not is_recipe(cfg, given):
        return make_plan(cfg, corpus, given, deadline=deadline)
    if cfg.resume == "auto" and checkpoints_of(folder):
        raise UserError(
            f"{short_path(folder)} holds a run without a plan; resume it with minutes=null"
        )
    return time_recipe(cfg, corpus, config, given, deadline=deadline)


def _kept(cfg: DictConfig, given: set[str], plan: Any) -> set[str]:
    """Return the given keys whose values take the place of those of a plan.

    Not null, beside which earlier versions planned a value that a run resumes with. The steps of a
    recipe are at most those from which it was planned, but a run that resumes may have others.
    """
    kept = {
        key
        for key in given
        if key not in plan["settings"] or OmegaConf.select(cfg, key) is not None
    }
    if "of_steps" in plan:
        kept -= {"schedule"}  # with it, the warmup is that of the recipe
    if plan.get("of_steps") == cfg.max_steps:
        kept -= {"max_steps"}
    return kept


def _read_plan(file: Path) -> Any:
    try:
        return read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); remove it to plan again") from error


def _checksum(cfg: DictConfig) -> str:
    """Return the checksum of what runs with one plan share, all but the seed.

    With names and settings as in earlier versions, whose sweeps find their plans by it.
    """
    settings = relevant_settings(cfg)
    settings.pop("code", None)  # a run with another version of the code has its own plan
    for key, value in settings.items():
        if isinstance(value, str):
            settings[key] = _EARLIER.get(value, value)
    characters = OmegaConf.select(cfg, "callbacks.originality.characters")
    return sha256_json({**settings, "originality": characters, "seed": None})
