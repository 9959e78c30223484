"""One training run: build every part that a configuration names, fit, sample, and write what the run folder holds."""

import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from minigpt.runs import run_dir as run
from minigpt.runs.config_checks import check_run
from minigpt.utils.cli import explain
from minigpt.utils.errors import Diverged, UserError
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.signals import Interrupted, raise_on_signal
from minigpt.utils.terminal import sanitize_line, warn

ROOT = Path(__file__).resolve().parents[2]
RESUME_ERRORS = (LookupError, TypeError, ValueError, AttributeError)  # what Lightning raises for a foreign checkpoint
MAX_SKIPPED_STEPS = 10  # before on_divergence=skip gives up


def train(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train in this process, as `python scripts/train.py OVERRIDES` does; for notebooks.

    Returns:
        What `summary.json` holds, and the run folder as `folder`.

    Raises:
        UserError: bad input or configuration, or (as RunError) the run failed.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from minigpt.runs.processes import resolve_links

    overrides = resolve_links(list(overrides))
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
    return {"folder": str(folder), **run.read_summary(folder)}


def train_in(folder: Path, cfg: DictConfig, *, resume_command: str | None = None) -> float | None:
    """Train into a run folder.

    Args:
        resume_command: printed when a signal ends the run.

    Returns:
        The best validation loss, nats per token.
    """
    began, left_out = time.perf_counter(), set[int]()  # batches
    with raise_on_signal(), run.lock_run_dir(folder, again=cfg.resume == "auto"):
        check_run(cfg)
        while True:
            try:
                return fit(cfg, folder, left_out, began)
            except Diverged as error:
                if cfg.on_divergence == "stop":
                    raise
                skip(error, left_out, cfg.trainer.accumulate_grad_batches)
            except (Interrupted, KeyboardInterrupt):
                if resume_command and (folder / "checkpoints").is_dir() and is_rank_zero():
                    print(f"resume with: {sanitize_line(resume_command)}", file=sys.stderr)
                raise


def skip(error: Diverged, left_out: set[int], accumulate: int) -> None:
    """Leave out the batches of the step that diverged, too."""
    from minigpt.data.batches import past

    if len(left_out) >= MAX_SKIPPED_STEPS * accumulate:
        raise error
    warn(f"{error.what}; going back to the last checkpoint, and past the batches of this step")
    left_out.update(past(range((error.step - 1) * accumulate, error.step * accumulate), left_out).tolist())


def fit(cfg: DictConfig, folder: Path, left_out: set[int], began: float) -> float | None:
    """Build every part, train, and write the summary.

    Args:
        left_out: batches that training skips.
        began: `time.perf_counter()` when the run began.
    """
    from minigpt.runs.config_checks import build_corpus_and_config

    tokens, config = build_corpus_and_config(cfg)

    # Heavy packages are imported here, after everything that a user can get wrong is checked.
    import torch
    from hydra.utils import instantiate

    from minigpt.checkpoints.find import BEST
    from minigpt.checkpoints.models import load_checkpoint
    from minigpt.checkpoints.resume import check_same, contents, find_resumed
    from minigpt.data.tokenizer import encode_prompt
    from minigpt.model import GPT
    from minigpt.runs.callbacks import MetricsCallback, early_stopping, sample_text
    from minigpt.runs.datamodule import TokenDataModule
    from minigpt.runs.loggers import MetricsCSV, Progress, finish
    from minigpt.runs.shutdown import GracefulShutdown
    from minigpt.runs.trainer import build_trainer
    from minigpt.training import LanguageModel

    data = TokenDataModule(
        tokens,
        block_size=config.block_size,
        batch_size=cfg.data.batch_size,
        eval_batch_size=cfg.data.eval_batch_size,
        n_batches=cfg.max_steps * cfg.trainer.accumulate_grad_batches,
        n_eval_batches=cfg.eval_batches,
        overfit_batches=cfg.data.overfit_batches,
        seed=cfg.seed,
        left_out=left_out,
    )

    torch.manual_seed(cfg.seed)
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    origin = provenance()
    kept = contents(config, tokens.tokenizer, resolved, tokens.sha256, origin)
    resume = (find_resumed("auto", folder) if left_out else None) or find_resumed(cfg.resume, folder)
    step = 0
    if resume is not None:
        step = check_same(resume, kept, may_be_done=cfg.resume == "auto")
        if cfg.resume == "auto" and not left_out and (done := run.finished_message(folder, step, cfg.max_steps)):
            if is_rank_zero():
                print(sanitize_line(done[0]))
            return done[1]
    run.truncate_logs(folder, step)
    model = GPT(config)
    module = LanguageModel(
        model,
        optimizer=partial_from_config(cfg.optimizer),
        schedule=partial_from_config(cfg.schedule),
        max_steps=cfg.max_steps,
        bytes_per_token=tokens.val_bytes_per_token,
        contents=kept,
        ema_decay=cfg.ema_decay,
        compile=cfg.compile,
    )
    tokens_per_step = cfg.data.batch_size * cfg.trainer.accumulate_grad_batches * config.block_size
    meter = MetricsCallback(log_every=cfg.log_every, tokens_per_step=tokens_per_step, began=began)
    extra = instantiate_group(cfg.logger)
    trainer = build_trainer(
        instantiate(cfg.trainer, _convert_="all"),
        max_steps=cfg.max_steps,
        eval_every=cfg.eval_every,
        callbacks=[meter, GracefulShutdown(folder, agree_every=cfg.log_every), *instantiate_group(cfg.callbacks)],
        loggers=[MetricsCSV(folder / run.METRICS), Progress(cfg.max_steps, folder / run.LOG), *extra],
        folder=folder,
    )
    torch.manual_seed(cfg.seed + trainer.global_rank)  # every rank its own dropout

    status, reason, sample = "failed", "", ""
    try:
        for logger in extra:
            logger.log_hyperparams(resolved)
        trainer.fit(module, data, ckpt_path=resume)
        if (folder / BEST).exists():  # what sample.py will load
            model = load_checkpoint(folder / BEST, device=module.device)[0]
        start = torch.as_tensor(encode_prompt(tokens.tokenizer, "")).long()
        sample = sample_text(model, tokens.tokenizer, start, max_new_tokens=400, temperature=0.8, seed=cfg.seed)
        status = "completed"
        if why := early_stopping(trainer):
            reason = f"stopped early at step {trainer.global_step} of {cfg.max_steps}: {why}"
    except (Interrupted, KeyboardInterrupt, SystemExit):  # the last of which submitit ends a job with
        status = "interrupted"
        raise
    except Exception as error:
        if resume is not None and not module.begun and isinstance(error, RESUME_ERRORS):
            error = UserError(f"{resume} does not hold a run of minigpt ({type(error).__name__}: {error})")
        reason = explain(error)[0].removeprefix("error: ")
        raise error
    finally:
        summary = meter.summary(trainer, module) | {
            "status": status,
            "reason": reason,
            "seed": cfg.seed,
            "eval_batches": cfg.eval_batches,
            "corpus": tokens.name,
            "corpus_sha256": tokens.sha256,
            "tokenizer": tokens.tokenizer.to_dict()["name"],
            **origin,
        }
        if trainer.is_global_zero:
            run.write_summary(folder, summary)
            for logger in extra:
                finish(logger, summary)
    if trainer.is_global_zero:
        run.print_results(folder, sample, summary, sampler=ROOT / "scripts/sample.py")
    return summary["best_val_loss"]


def provenance() -> dict[str, Any]:
    """What a run was made by: command, host, versions, and the commit of a checkout."""
    import lightning
    import torch

    from minigpt import __version__

    def git(*arguments: str) -> str | None:
        if not (ROOT / ".git").exists():
            return None
        command = ["git", "-C", str(ROOT), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    changes = git("status", "--porcelain", "--untracked-files=no")
    versions = {"minigpt": __version__, "python": platform.python_version()}
    return {
        "command": " ".join(sys.argv),
        "host": platform.node(),
        "versions": versions | {"torch": str(torch.__version__), "lightning": str(lightning.__version__)},
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def instantiate_group(group: DictConfig) -> list[Any]:
    """What a group builds; one that is null is switched off."""
    from hydra.utils import instantiate

    return [part for part in instantiate(group, _convert_="all").values() if part is not None]


def partial_from_config(node: DictConfig) -> Callable[..., Any]:
    """The function that a node names, with the node's values set. Hydra's own partial takes 0.5 ms per call."""
    from hydra.utils import get_method

    values: Any = OmegaConf.to_container(node, resolve=True)
    return partial(get_method(values.pop("_target_")), **values)
