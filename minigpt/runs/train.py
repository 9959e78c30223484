"""One training run: compose, seed, data, model, Trainer, fit, sample, report."""

import gc
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from minigpt import __version__
from minigpt.runs import run_dir
from minigpt.runs.config_checks import load_parts
from minigpt.runs.exchange import call_on_rank_zero, check_same_corpus, shared_errors
from minigpt.runs.processes import complete_overrides
from minigpt.utils.cli import error_text
from minigpt.utils.errors import UserError
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.scripts import ROOT
from minigpt.utils.signals import Interrupted, raise_on_signal
from minigpt.utils.terminal import sanitize_line


def train(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train in this process, as `python scripts/train.py OVERRIDES` does; for notebooks.

    Returns:
        The contents of `summary.json`, and the run folder as `folder`.

    Raises:
        UserError: an input or a setting is wrong, or (its subclass RunError) the run failed.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig

    overrides = complete_overrides(overrides)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=overrides, return_hydra_config=True)
    folder = Path(cfg.hydra.run.dir).absolute()
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(cfg)
        del cfg["hydra"]
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    for name, content in (("config", cfg), ("overrides", OmegaConf.create(overrides))):
        OmegaConf.save(content, folder / ".hydra" / f"{name}.yaml")
    train_in(folder, cfg)
    return {"folder": str(folder), **run_dir.read_summary(folder)}


def train_in(folder: Path, cfg: DictConfig, *, resume_command: str | None = None) -> float | None:
    """Lock a run folder, train in it, and return the best validation loss, nats per token.

    Args:
        resume_command: printed when a signal ends the run.
    """
    with raise_on_signal(), ExitStack() as stack:
        with shared_errors():
            stack.enter_context(run_dir.lock_run_dir(folder, resume=cfg.resume == "auto"))
        try:
            return fit(cfg, folder)
        except (Interrupted, KeyboardInterrupt):
            if resume_command and (folder / "checkpoints").is_dir() and is_rank_zero():
                print(f"resume with: {sanitize_line(resume_command)}", file=sys.stderr)
            raise


def fit(cfg: DictConfig, folder: Path) -> float | None:
    """Build every part that the config names, train, sample and write the summary; see `train_in`."""
    started = time.perf_counter()
    with shared_errors():
        corpus, config, pretrained = load_parts(cfg, folder=folder)
    check_same_corpus(corpus.name, corpus.sha256)
    cfg.model = config.to_dict()  # null values resolved

    # Heavy packages are imported here, after every setting is checked.
    with fast_imports():
        import torch

        from minigpt.checkpoints.find import BEST
        from minigpt.checkpoints.models import load_checkpoint
        from minigpt.checkpoints.resume import contents, find_resumed
        from minigpt.data.sources import CHECKSUM_CACHE
        from minigpt.model import GPT
        from minigpt.runs.history import plot_curves
        from minigpt.runs.lightning_workarounds import is_resume_error
        from minigpt.runs.lost_ranks import LostRanks
        from minigpt.runs.metrics import MetricsCallback, early_stopping_reason
        from minigpt.runs.resume_state import ResumeState
        from minigpt.runs.samples import final_sample
        from minigpt.runs.trainer import TokenDataModule, build_trainer
        from minigpt.runs.wandb_logger import wandb_loggers
        from minigpt.training import LanguageModel

    torch.manual_seed(cfg.seed)
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    origin = provenance() | {"init_from": None}
    saved = contents(config, corpus.tokenizer, resolved, corpus.sha256, origin)

    def find() -> tuple[str, int, dict[str, Any], dict[str, Any] | None]:
        path, step, before = find_resumed(cfg.resume, folder, saved)
        auto = cfg.resume == "auto" and path is not None
        return str(path or ""), step, before, run_dir.completed_summary(folder, step, cfg.max_steps) if auto else None

    resume, step, before, done = call_on_rank_zero(find)
    if done:
        if is_rank_zero():
            where = f"{run_dir.short_path(folder)} is complete at step {step} of {cfg.max_steps}"
            print(sanitize_line(f"{where}, best validation loss {done.get('best_val_loss')}; nothing to do"))
        return done.get("best_val_loss")
    if pretrained:  # `saved` refers to `origin`
        checksum_cache = Path(cfg.data.folder) / CHECKSUM_CACHE
        origin["init_from"] = before.get("init_from") if resume else pretrained.provenance(checksum_cache)
    run_dir.truncate_logs(folder, step)

    metrics, state, ranks = MetricsCallback(cfg, started=started), ResumeState(saved), LostRanks()
    with shared_errors():
        model = pretrained.load(config).train() if pretrained and not resume else GPT(config)
        model.checkpoint_blocks = cfg.checkpoint_blocks
        module = LanguageModel(
            model,
            optimizer=partial_from_config(cfg.optimizer),
            schedule=partial_from_config(cfg.schedule),
            max_steps=cfg.max_steps,
            compile=cfg.compile,
        )
        trainer = build_trainer(cfg, folder, metrics, state, ranks)
        trainer.precision_plugin.convert_module(module)  # Lightning does after it loads a checkpoint into the module
    torch.manual_seed(cfg.seed + trainer.global_rank)  # a dropout mask per rank

    status, reason, sample = "failed", "", ""
    try:
        for logger in trainer.loggers:
            logger.log_hyperparams(resolved)
        trainer.fit(module, TokenDataModule(corpus, cfg), ckpt_path=resume or None)
        if trainer.is_global_zero or trainer.checkpoint_callback is None:  # sharded weights need all ranks
            best = folder / BEST  # as sample.py loads it
            model = load_checkpoint(best, device=trainer.strategy.root_device)[0] if best.exists() else module.model
            sample = final_sample(model, corpus.tokenizer, seed=cfg.seed)
        status, reason = "completed", early_stopping_reason(trainer)
    except (Interrupted, KeyboardInterrupt, SystemExit):  # submitit ends a job with SystemExit
        status = "interrupted"
        raise
    except Exception as error:
        if resume and not state.training_began and is_resume_error(error):
            error = UserError(f"{resume} does not hold a run of minigpt ({type(error).__name__}: {error})")
        error = ranks.explain(error)
        reason = error_text(error)
        raise error
    finally:
        summary = metrics.summary(trainer, module) | {
            "status": status,
            "reason": reason,
            "stopped_early": status == "completed" and reason != "",
            "seed": cfg.seed,
            "eval_batches": cfg.eval_batches,
            "corpus": corpus.name,
            "corpus_sha256": corpus.sha256,
            "tokenizer": corpus.tokenizer.to_dict()["name"],
            **origin,
        }
        has_metrics = (folder / run_dir.METRICS).exists()
        if trainer.is_global_zero and (has_metrics or summary["steps"]):
            if has_metrics:
                plot_curves(folder)
            run_dir.write_summary(folder, summary)
            for wandb in wandb_loggers(trainer):
                wandb.finish(summary)
    if trainer.is_global_zero:
        run_dir.print_results(folder, sample, summary)
    return summary["best_val_loss"]


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import in 0.6 of the time: without garbage collection, and torchmetrics without transformers and matplotlib.

    The plots of torchmetrics, which minigpt does not use, cannot be drawn in this process.
    """
    gc.disable()
    try:
        optional: Any = import_module("lightning_utilities.core.imports").RequirementCache
        optional.available = False  # torchmetrics would import both if installed, for metrics of no run
        try:
            import_module("torchmetrics")
        finally:
            del optional.available
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation, which is rarely collected
        gc.enable()


def provenance() -> dict[str, Any]:
    """Return the provenance of a run: command, host, versions and git commit."""
    command, described = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"], None
    if (ROOT / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):  # git may be missing
            described = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    versions = {"minigpt": __version__, "python": platform.python_version()}
    return {
        "command": " ".join(sys.argv),
        "host": platform.node(),
        "versions": versions | {name: version(name) for name in ("torch", "lightning")},
        "commit": described and described.removesuffix("-dirty"),
        "dirty": described and described.endswith("-dirty"),
    }


def partial_from_config(node: DictConfig) -> Callable[..., Any]:
    """Bind the values of a config node to its `_target_`; a call of Hydra's own partial takes 0.5 ms."""
    from hydra.utils import get_method

    values: Any = OmegaConf.to_container(node, resolve=True)
    return partial(get_method(values.pop("_target_")), **values)
