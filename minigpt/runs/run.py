"""Start one training run: compose and check its configuration, lock its folder, load its text.

Read `train`, `train_in` and `load_parts`. `fit.py` continues from there, down to `trainer.py` and
`minigpt/training/language_model.py`. It is a module of its own because it imports torch and
Lightning, and errors of the configuration are raised before that.
"""

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import env_override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.basecontainer import BaseContainer

from minigpt.distributed.process_group import (
    PATIENCE,
    gather_objects,
    join_ranks,
    own_ranks,
    set_timeout,
    shared_errors,
)
from minigpt.model.config import GPTConfig
from minigpt.runs import run_dir
from minigpt.runs.code_version import STAMP, code_in_place, is_other_code
from minigpt.runs.lightning_workarounds import fast_imports, start_ranks_with
from minigpt.runs.overrides import SETTABLE, complete_overrides, is_planned, quote_override
from minigpt.runs.run_config import RunConfig, check_hydra, use_outside_values
from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import UserError, require
from minigpt.utils.extras import from_extras
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.scripts import search_path
from minigpt.utils.signals import Interrupted, raise_on_signal
from minigpt.utils.terminal import escape_unencodable, notebook, sanitize_line

if TYPE_CHECKING:
    from minigpt.checkpoints.init_from import Pretrained
    from minigpt.data.token_files import Corpus

_one_run = threading.RLock()  # seeds, Hydra and flags of torch are of the process


def train(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train in this process, as `python scripts/train.py OVERRIDES` does.

    A notebook shows the curves and the progress. Of several threads, one trains after the other.
    With several devices, other processes are started that train with the same overrides; they do
    not run the program that calls this function.

    Returns:
        The contents of `summary.json`, and the run folder as `folder`.

    Raises:
        UserError: an input or a setting is wrong, or (its subclass RunError) the run failed.
    """
    if (
        not isinstance(overrides, Sequence)
        or isinstance(overrides, str)
        or not all(isinstance(each, str) and each[:1] != "-" for each in overrides)
    ):
        raise UserError(
            'train takes a list of overrides such as ["max_steps=300"], without flags, '
            f"got {overrides!r}"
        )
    try:
        # A program without a console has no streams, and a notebook shows stderr in red.
        with (
            _one_run,
            own_ranks(),
            own_hydra(),
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(sys.stdout or nowhere),
            redirect_stderr(sys.stdout if notebook() else sys.stderr or nowhere),
        ):
            escape_unencodable()
            join_ranks()
            overrides = complete_overrides(overrides)
            with initialize_config_dir(search_path(overrides), version_base="1.3"):
                cfg = compose("train", overrides=overrides, return_hydra_config=True)
            with env_override(cfg.hydra.job.env_set):
                return train_composed(cfg, overrides)
    except BaseException as error:
        # A notebook keeps the frames of the last error, and with them the model.
        if notebook() and (
            hasattr(error, "_render_traceback_") or "OutOfMemory" in type(error).__name__
        ):
            traceback.clear_frames(error.__traceback__)
        if explain(error)[1] != 2 or isinstance(error, UserError):
            raise
        raise UserError(error_text(error)) from error  # of Hydra


@run_dir.remove_unused_folders()
def train_composed(cfg: DictConfig, overrides: Sequence[str] | None = None) -> dict[str, Any]:
    """Train with a configuration whose node `hydra` is removed; return what `train` does.

    Args:
        overrides: those of `train`, from which other ranks compose the same.
    """
    folder = run_dir.make_folder(cfg.hydra.run).absolute()
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(cfg)
        del cfg.hydra
    train_in(
        folder,
        cfg,
        [] if overrides is None else [*overrides, f"hydra.run.dir={quote_override(folder)}"],
    )
    set_timeout(PATIENCE)  # while rank 0 draws the final sample
    return gather_objects({"folder": str(folder), **run_dir.read_summary(folder)})[0]


@contextmanager
def own_hydra() -> Iterator[None]:
    """Use Hydra as in a new process, and leave that of the caller as it was."""
    Plugins.instance()  # is kept, because it searches for a while
    before = (Singleton._instances, BaseContainer._resolvers)
    Singleton._instances = {
        kind: one
        for kind, one in Singleton._instances.items()
        if kind.__name__ not in ("GlobalHydra", "HydraConfig")  # of a run
    }
    BaseContainer._resolvers = {**BaseContainer._resolvers}
    try:
        yield
    finally:
        Singleton._instances, BaseContainer._resolvers = before


def train_in(
    folder: Path,
    cfg: DictConfig,
    overrides: Sequence[str] = (),
    *,
    resume_command: str | None = None,
) -> float | None:
    """Lock a run folder, train in it, and return the best validation loss, nats per token.

    Args:
        overrides: of other ranks that Lightning starts; by default it runs this program again, with
            its arguments.
        resume_command: printed when a signal ends the run; by default the call of `train` with
            these overrides, if any.
    """
    started = time.perf_counter()
    # Modules of the working folder can be imported if a `_target_` names one that is not installed;
    # not __main__, which has no spec.
    packages = {*re.findall(r"_target_: (\w+)", OmegaConf.to_yaml(cfg))} - sys.modules.keys()
    if os.getcwd() not in sys.path and any(find_spec(package) is None for package in packages):
        sys.path.append(os.getcwd())
    other_code = is_other_code(cfg.get("code"))
    with raise_on_signal(), ExitStack() as stack:
        with shared_errors():
            if is_rank_zero() and not other_code:
                stack.enter_context(run_dir.lock_run_dir(folder, resume=cfg.resume == "auto"))
        try:
            if other_code:
                loss: float | None = from_extras("train_with_code")(folder, cfg)
                return loss
            # Settings, text and architecture, before torch is imported; those of a plan first
            with shared_errors():
                check_hydra(HydraConfig.get())
                task = HydraConfig.get().overrides.task  # without the overrides of Hydra itself
                corpus = None
                if is_planned(cfg):
                    plan, corpus = from_extras("plan_overrides")(cfg, folder, task, started)
                    for key, value in plan.items():
                        OmegaConf.update(cfg, key, value, force_add=True)
                run = RunConfig.from_hydra(cfg)
                use_outside_values(cfg)
                parts = load_parts(run, folder=folder, corpus=corpus)
            # The training, in the ranks that it starts too
            with fast_imports():
                from minigpt.runs.fit import fit
                from minigpt.training.cpu_threads import cpu_threads
            if overrides:
                start_ranks_with(overrides, OmegaConf.to_yaml(cfg), stack)
            with cpu_threads(run.threads):
                return fit(
                    run,
                    folder,
                    *parts,
                    composed={
                        "config.yaml": OmegaConf.to_yaml(cfg),
                        "overrides.yaml": OmegaConf.to_yaml(task),
                        STAMP: json.dumps(code_in_place()[0]),
                    },
                    started=started,
                )
        except (Interrupted, KeyboardInterrupt):
            # A completed run lacks only its final sample; the process of another code leaves it to
            # that which started it
            if (
                (overrides or resume_command)
                and (other_code or cfg.get("code") is None)
                and is_rank_zero()
                and (folder / "checkpoints").is_dir()
                and not run_dir.completed_summary(folder, cfg.max_steps, cfg.max_steps)
            ):
                print(
                    "resume with:",
                    sanitize_line(resume_command or f"train({[*overrides, 'resume=auto']})"),
                    file=sys.stderr,
                )
            raise


def load_parts(
    run: RunConfig,
    once: Callable[..., Any] = lambda load, *args: load(*args),
    *,
    folder: Path | None = None,
    corpus: "Corpus | None" = None,
) -> "tuple[Corpus, GPTConfig, Pretrained | None]":
    """Return the corpus of a run, its architecture, and the model of `init_from`, if any.

    Args:
        once: calls a function; a sweep replaces it to call each once.
        folder: of the run. A run that resumes has its architecture and tokenizer from its own
            checkpoint, so that the source of its weights may be gone.
        corpus: if it is loaded.

    Raises:
        UserError: the text or the model is missing, or they do not fit each other or the settings.
    """
    from minigpt.data.prepare import load_corpus  # imports numpy

    # Points of a sweep share a corpus
    def load(tokenizer: Mapping[str, object]) -> "Corpus":
        try:
            return once(load_corpus, run.settings["data"], tokenizer)
        except UserError as error:
            if run.resume is None:
                raise
            find_resumed = from_extras("find_resumed_corpus")
            return find_resumed(run.settings, folder, error)  # the text may be gone

    # A new model takes its vocabulary from the text, a pretrained one brings its tokenizer
    pretrained = None
    if run.init_from is None:
        corpus = corpus or load(run.tokenizer)
        ids = corpus.tokenizer.vocab_size
        require(
            "model.vocab_size",
            run.model.get("vocab_size"),
            lambda size: size is None or size >= ids,
            f"at least the tokenizer's {ids}",
            "use null",
        )
        config = GPTConfig(**{**run.model, "vocab_size": run.model.get("vocab_size") or ids})
    else:
        from minigpt.checkpoints.init_from import find_start

        pretrained = once(find_start, run.init_from, run.resume, folder)
        source = pretrained.config
        given = {name: value for name, value in run.model.items() if value is not None}
        config = GPTConfig.from_dict({**source.to_dict(), **given})
        require(
            "model.block_size",
            config.block_size,
            lambda size: size <= source.block_size,
            f"an integer in [1, {source.block_size}]",
            f"init_from={run.init_from} has no more",
        )
        for name, value in given.items():
            if name not in SETTABLE:
                require(
                    f"model.{name}",
                    value,
                    [getattr(source, name)].__contains__,
                    f"{getattr(source, name)}, as in init_from={run.init_from}",
                    "remove it",
                )
        if run.settings["data"].get("format"):  # which no corpus shows of a tokenizer of bytes
            from_extras("chat_of")(pretrained.tokenizer)
        corpus = load(pretrained.tokenizer.to_dict())
    # Both fit each other
    corpus.check_length(config.block_size)
    return corpus, config, pretrained
