"""Start one training run: compose and check its configuration, lock its folder, import what it needs."""

import gc
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from minigpt.distributed.process_group import join_ranks, shared_errors
from minigpt.run_config import RunConfig, check_hydra
from minigpt.runs import run_dir
from minigpt.runs.overrides import complete_overrides
from minigpt.runs.parts import load_parts
from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import UserError
from minigpt.utils.extras import from_extras
from minigpt.utils.scripts import ROOT
from minigpt.utils.signals import Interrupted, raise_on_signal
from minigpt.utils.terminal import is_rank_zero, sanitize_line


def train(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train in this process, as `python scripts/train.py OVERRIDES` does; for notebooks.

    Returns:
        The contents of `summary.json`, and the run folder as `folder`.

    Raises:
        UserError: an input or a setting is wrong, or (its subclass RunError) the run failed.
    """
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not is_list or not all(isinstance(each, str) and each[:1] != "-" for each in overrides):
        raise UserError(f'train takes a list of overrides such as ["max_steps=300"], without flags, got {overrides!r}')
    try:
        return _train(overrides)
    except Exception as error:
        if explain(error)[1] != 2 or isinstance(error, UserError):
            raise
        raise UserError(error_text(error)) from error  # of Hydra


def _train(overrides: Sequence[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig

    overrides = complete_overrides(overrides)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=overrides, return_hydra_config=True)
    folder = Path(cfg.hydra.run.dir).absolute()
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(cfg)
        del cfg.hydra
    train_in(folder, cfg)
    return {"folder": str(folder), **run_dir.read_summary(folder)}


def train_in(folder: Path, cfg: DictConfig, *, resume_command: str | None = None) -> float | None:
    """Lock a run folder, train in it, and return the best validation loss, nats per token.

    Args:
        resume_command: printed when a signal ends the run.
    """
    started = time.perf_counter()
    _find_own_modules(cfg)
    from hydra.core.hydra_config import HydraConfig

    with raise_on_signal(), ExitStack() as stack:
        join_ranks()
        with shared_errors():
            stack.enter_context(run_dir.lock_run_dir(folder, resume=cfg.resume == "auto"))
        try:
            with shared_errors():
                check_hydra(HydraConfig.get())
                task = HydraConfig.get().overrides.task  # without the overrides of Hydra itself
                corpus = None
                if cfg.minutes is not None:
                    sized = RunConfig.from_hydra(from_extras("with_possible_sizes")(cfg, task))
                    corpus = load_parts(sized, folder=folder)[0]
                    with fast_imports():  # of heavy packages, after every setting is checked
                        plan_run = from_extras("plan_run")
                    cfg = plan_run(cfg, folder, corpus, task, started)
                run = RunConfig.from_hydra(cfg)
                parts = load_parts(run, folder=folder, corpus=corpus)
            with fast_imports():
                from minigpt.runs.fit import fit
            return fit(run, folder, *parts, composed=OmegaConf.to_yaml(cfg), overrides=task, started=started)
        except (Interrupted, KeyboardInterrupt):
            if resume_command and (folder / "checkpoints").is_dir() and is_rank_zero():
                print(f"resume with: {sanitize_line(resume_command)}", file=sys.stderr)
            raise


def _find_own_modules(cfg: DictConfig) -> None:
    """Let modules of the working folder be imported if a `_target_` names one that is not installed."""
    packages = re.findall(r"_target_: (\w+)", OmegaConf.to_yaml(cfg))
    if os.getcwd() not in sys.path and any(find_spec(package) is None for package in packages):
        sys.path.append(os.getcwd())


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import in 0.6 of the time: without garbage collection, and torchmetrics without its optional packages.

    The plots of torchmetrics, which minigpt does not use, cannot be drawn in this process.
    """
    gc.disable()
    try:
        optional: Any = import_module("lightning_utilities.core.imports").RequirementCache
        optional.available = False  # torchmetrics would import transformers and matplotlib, for metrics of no run
        scipy = sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]  # and scipy.signal
        try:
            import_module("torchmetrics")
        finally:
            del optional.available
            if scipy is None:
                del sys.modules["scipy"]
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation, which is rarely collected
        gc.enable()
