"""Continue the run that `run.py` has started: prepare the model and the Trainer, train and report.

Read `fit`, then `train_and_report`. This is where torch and Lightning are first imported. The
Trainer is built in `trainer.py`; what it repeats is the `LanguageModel` of
`minigpt/training/language_model.py`.
"""

import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from minigpt import __version__
from minigpt.checkpoints.find import BEST
from minigpt.checkpoints.format import MINIGPT, Saved, contents
from minigpt.checkpoints.init_from import Pretrained
from minigpt.checkpoints.load import load_checkpoint
from minigpt.checkpoints.resume import find_resumed
from minigpt.data.token_files import Corpus
from minigpt.distributed.process_group import first_error, gather_objects, shared_errors
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.runs import run_dir
from minigpt.runs.callbacks.metrics import MetricsCallback
from minigpt.runs.callbacks.resume_state import ResumeState
from minigpt.runs.callbacks.samples import only_a_warning, sample_text, wandb_loggers
from minigpt.runs.code_version import code_in_place, code_label, write_patch
from minigpt.runs.curves import plot_curves
from minigpt.runs.lightning_workarounds import (
    end_with_rank_zero,
    is_resume_error,
)
from minigpt.runs.run_config import RunConfig
from minigpt.runs.trainer import TokenDataModule, build_trainer, partial_from_config
from minigpt.training.language_model import LanguageModel
from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import UserError
from minigpt.utils.ranks import is_rank_zero, launcher_sizes
from minigpt.utils.signals import REQUEUE_EXIT_CODE, Interrupted
from minigpt.utils.terminal import sanitize_line, warn

FINAL_TOKENS = 400  # of the sample that ends a run
FINAL_SECONDS = 10  # of what follows a training, at most
FINAL_SHARE = 0.05  # the same, as a share of the training


def fit(
    run: RunConfig,
    folder: Path,
    corpus: Corpus,
    config: GPTConfig,
    pretrained: Pretrained | None,
    *,
    composed: Mapping[str, str],
    started: float,
) -> float | None:
    """Find the checkpoint to resume from, build the model and the Trainer, train and report.

    Args:
        folder: of the run, locked.
        composed: files of `.hydra`, by name: the configuration, and the overrides of which it is
            composed.
        started: `time.perf_counter()` when the run started.

    Returns:
        The best validation loss, nats per token.
    """
    # Where to start
    saved = contents(
        config,
        corpus.tokenizer,
        config=run.settings | {"model": config.to_dict()},  # null values resolved
        provenance={},
        corpus_sha256=corpus.sha256,
        corpus_provenance=dict(corpus.provenance),
    )
    checkpoint, step, before, done = find_checkpoint_of_ranks(run, folder, saved)
    if done:
        if is_rank_zero():
            print(
                sanitize_line(
                    f"{run_dir.short_path(folder)} is complete at step {step} of {run.max_steps}, "
                    f"best validation loss {done.get('best_val_loss')}; nothing to do"
                )
            )
        return done.get("best_val_loss")
    # What its checkpoints and its summary hold beside the training
    provenance = run_provenance(run, pretrained, checkpoint, step, before)
    described: run_dir.Summary = {
        **provenance,
        "seed": run.seed,
        "eval_batches": run.eval_batches,
        "tokenizer": corpus.tokenizer.to_dict()["name"],
        "corpus": corpus.name,
        "corpus_sha256": corpus.sha256,
        "validated": corpus.validated_part(
            config.block_size,
            run.data.eval_batch_size,
            run.eval_batches,
        ),
    }
    # The files of the folder, as they were at that step; Hydra would write .hydra too, but before
    # the folder is the run's own.
    reached = run_dir.previous_summary(folder)  # which is removed now
    if is_rank_zero():
        (folder / ".hydra").mkdir(exist_ok=True)
        for name, text in composed.items():
            (folder / ".hydra" / name).write_text(text, encoding="utf-8")
        run_dir.truncate_logs(folder, step)
        patch = code_in_place()[1]
        if patch:
            write_patch(folder, patch)
    # The model and the Trainer
    state = ResumeState({MINIGPT: saved[MINIGPT] | {"provenance": provenance}})
    metrics = MetricsCallback(run, config.block_size, started=started)
    torch.manual_seed(run.seed)
    with shared_errors():
        start = None if checkpoint else pretrained
        model = start.load(config).train() if start else GPT(config)
        model.checkpoint_blocks = run.checkpoint_blocks
        module = LanguageModel(
            model,
            optimizer=partial_from_config("optimizer", run.optimizer),
            schedule=partial_from_config("schedule", run.schedule),
            max_steps=run.max_steps,
            compile=run.compile,
        )
        trainer = build_trainer(run, folder, state, metrics)
        # Lightning does so after it loads a checkpoint into the module
        trainer.precision_plugin.convert_module(module)
    for logger in trainer.loggers:
        if isinstance(logger, L.loggers.TensorBoardLogger):
            # Hide what a killed run logged after the checkpoint
            logger._kwargs["purge_step"] = step + 1
    torch.manual_seed(run.seed + trainer.global_rank)  # a dropout mask per rank
    # The training
    return train_and_report(
        trainer,
        module,
        TokenDataModule(corpus, run, config.block_size),
        state,
        metrics,
        folder=folder,
        checkpoint=checkpoint,
        reached=reached,
        described=described,
    )


def find_checkpoint_of_ranks(
    run: RunConfig, folder: Path, saved: Saved
) -> tuple[Path | None, int, Saved, run_dir.Summary | None]:
    """Return what `find_resumed` does and the summary of a complete run, the same on all ranks."""
    found: object = None

    def warn_and_log(message: str) -> None:
        if is_rank_zero():
            run_dir.append_log(folder, sanitize_line(f"warning: {message}"))

    with shared_errors():
        if launcher_sizes() is None or is_rank_zero():  # Lightning's own processes all search
            path, step, before, changed = find_resumed(run.resume, folder, saved, warn_and_log)
            done = None
            if run.resume == "auto" and path:
                done = run_dir.completed_summary(folder, step, run.max_steps, changed=changed)
            if done and done.get("checkpoint") and not (folder / BEST).exists():
                warn(
                    f"{run_dir.short_path(folder / BEST)} of step "
                    f"{done.get('best_step')} is missing"
                )
            found = path, step, before, done
    return gather_objects(found)[0]


def run_provenance(
    run: RunConfig,
    pretrained: Pretrained | None,
    checkpoint: Path | None,
    step: int,
    before: Saved,
) -> dict[str, object]:
    """Return where a run comes from: command, host, versions, code, and what it starts from.

    Args:
        checkpoint: that it resumes from, with its `step` and the provenance `before`; without one,
            `before` is empty.
    """
    provenance: dict[str, object] = {
        "command": " ".join(sys.argv),
        "host": platform.node(),
        "versions": {
            "minigpt": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "lightning": version("lightning"),
        },
        **code_in_place()[0],
        "init_from": before.get("init_from") if pretrained else None,
        "resumed_from": before.get("resumed_from"),
    }
    if pretrained and not checkpoint:
        provenance["init_from"] = pretrained.provenance(run.data.folder)
    if checkpoint and run.resume != "auto":
        provenance["resumed_from"] = f"{checkpoint}, step {step}"
    if checkpoint and run.resume == "auto":
        # Steps of several versions of the code are those of none
        checksums = [*str(before.get("code_sha256", "unknown")).split(), provenance["code_sha256"]]
        provenance["code_sha256"] = " ".join(map(str, dict.fromkeys(checksums)))
        if len(set(checksums)) > 1 and is_rank_zero():
            warn(f"the run began with other code ({code_label(before)}); it resumes with this")
    return provenance


def train_and_report(
    trainer: L.Trainer,
    module: LanguageModel,
    data: TokenDataModule,
    state: ResumeState,
    metrics: MetricsCallback,
    *,
    folder: Path,
    checkpoint: Path | None,
    reached: run_dir.Summary,
    described: run_dir.Summary,
) -> float | None:
    """Train from a checkpoint or from step 0, and sample; write the results, however it ends.

    Args:
        folder: of the run.
        reached: the summary of the run until it resumed.
        described: what the summary holds beside the training.

    Returns:
        The best validation loss, nats per token.
    """
    # Until the training ends
    outcome: run_dir.Summary = {"status": "interrupted", "reason": "", "stopped_early": False}
    exit_code = 0
    try:
        # The training; ranks that are started for it end with rank 0
        for logger in trainer.loggers:
            logger.log_hyperparams(state.contents[MINIGPT]["config"])
        with end_with_rank_zero(trainer.strategy.launcher):
            trainer.fit(module, data, ckpt_path=checkpoint)
        outcome |= ending(trainer, module.max_steps)
        # The sample, which a run that paused does without. Of a run without checkpoints, all ranks
        # gather the weights for it.
        sample = ""
        if outcome["status"] != "paused" and (
            trainer.is_global_zero or not trainer.checkpoint_callback
        ):
            with only_a_warning("the final sample failed"):
                seconds = max(FINAL_SECONDS, FINAL_SHARE * metrics.seconds)
                sample = sample_best(trainer, module, data, folder, seconds)
    except (Interrupted, KeyboardInterrupt, SystemExit) as error:
        # SystemExit: submitit has requeued the job
        exit_code = REQUEUE_EXIT_CODE if isinstance(error, SystemExit) else explain(error)[1]
        raise
    except Exception as error:
        # The error that the run reports, on ranks and from a checkpoint
        if checkpoint and not state.training_began and is_resume_error(error):
            error = UserError(
                f"{checkpoint} does not hold a run of minigpt ({type(error).__name__}: {error})"
            )
        error = first_error(error)
        outcome |= {"status": "failed", "reason": error_text(error)}
        exit_code = explain(error)[1]
        raise error
    finally:
        # A run that could not resume has what it had reached
        if checkpoint and not state.training_began:
            outcome = reached | outcome
        summary = write_results(trainer, module, metrics, outcome | described, exit_code)
    if trainer.is_global_zero:
        lines = [line for callback in reports(trainer) for line in callback.lines(summary)]
        flags = ("--seed", "1") if data.corpus.is_text else ("--chat", "--prompt", "Hello")
        run_dir.print_results(folder, sample, summary, lines, flags)
    return summary["best_val_loss"]


def ending(trainer: L.Trainer, max_steps: int) -> run_dir.Summary:
    """Return how a training ended without an error.

    Completed, stopped early with a reason, or paused at `pause_at`.
    """
    step = trainer.global_step
    outcome: run_dir.Summary = {
        "status": "paused" if trainer.max_steps <= step < max_steps else "completed",
        "reason": "",
        "stopped_early": False,
    }
    if trainer.should_stop and step < max_steps:
        others = [
            type(callback).__name__
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if not type(callback).__module__.startswith("minigpt.")
        ]
        messages = [each.stopping_reason_message for each in trainer.early_stopping_callbacks]
        message = next(filter(None, messages), f"ended by a callback: {', '.join(others)}")
        outcome |= {
            "status": "completed",
            "reason": f"stopped early at step {step} of {max_steps}: "
            + message.partition(" Signaling")[0],
            "stopped_early": True,
        }
    return outcome


def sample_best(
    trainer: L.Trainer,
    module: LanguageModel,
    data: TokenDataModule,
    folder: Path,
    seconds: float,
) -> str:
    """Return a sample of the best checkpoint, which sample.py loads, after callbacks have used it.

    All end after so many seconds, but for a model whose sharded weights all ranks gather together.
    """
    best = folder / BEST
    model = module.model
    if best.exists():
        model, _ = load_checkpoint(best, device=trainer.strategy.root_device)
    callbacks = reports(trainer) if best.exists() else []
    if trainer.is_global_zero:
        drawn = [f"{FINAL_TOKENS} tokens", *(each.draws for each in callbacks if each.draws)]
        run_dir.append_log(folder, f"sampling    {' and '.join(drawn)}; at most {seconds:,.0f} s")
    # The sample takes half of the time at most
    end = time.perf_counter() + seconds
    prompt, ids = data.corpus.sample_prompt("")
    sample = sample_text(
        model,
        data.corpus.tokenizer,
        prompt,
        ids,
        seconds=seconds / 2 if best.exists() or trainer.world_size == 1 else float("inf"),
        temperature=0.8,
        seed=data.run.seed,
        max_new_tokens=FINAL_TOKENS,
    )
    for callback in callbacks:
        with only_a_warning(f"{type(callback).__name__} failed"):
            drawn_text = sample.removeprefix(prompt)
            callback.on_sampled(model, data.corpus, drawn_text, folder, end - time.perf_counter())
    return sample


def reports(trainer: Any) -> list[Any]:
    """Return the callbacks that add to the results of a run: by a method, as they are extras."""
    return [callback for callback in trainer.callbacks if hasattr(callback, "on_sampled")]


def write_results(
    trainer: L.Trainer,
    module: LanguageModel,
    metrics: MetricsCallback,
    summary: run_dir.Summary,
    exit_code: int,
) -> run_dir.Summary:
    """Write the summary and curves of a run that has something to show; finish its W&B run.

    Args:
        summary: what it holds beside the figures of `metrics`, among that how the training ended.
        exit_code: of the process; W&B shows a training that is complete as finished all the same.

    Returns:
        The whole summary.
    """
    folder = Path(trainer.default_root_dir)
    try:
        results: run_dir.Summary = metrics.summary(trainer, module)
        for callback in reports(trainer):
            results |= callback.results()
        summary = results | summary
        has_metrics = (folder / run_dir.METRICS).exists()
        if trainer.is_global_zero and (has_metrics or summary["steps"]):
            run_dir.write_summary(folder, summary)
            if has_metrics:
                plot_curves(folder, summary)
    finally:
        for logger in wandb_loggers(trainer):
            logger.finish(summary, 0 if summary["status"] == "completed" else exit_code)
    return summary
