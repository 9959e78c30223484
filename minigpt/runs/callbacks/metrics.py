"""Measure a run: losses, speed and MFU for the loggers, and figures for `summary.json`.

A NaN or infinite loss or gradient, which is found here, ends the run.
"""

import time
from math import isfinite, log
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from minigpt.checkpoints.find import BEST
from minigpt.distributed.process_group import gather_objects
from minigpt.model.ops import local_shard
from minigpt.runs.callbacks.checkpoint_callback import CheckpointCallback
from minigpt.runs.callbacks.progress_bar import Progress
from minigpt.runs.lightning_workarounds import is_optimizer_step
from minigpt.runs.metrics_csv import read_metrics
from minigpt.runs.run_config import RunConfig
from minigpt.runs.run_dir import METRICS, SAMPLES, append_log, short_path, update_latest_link
from minigpt.training.cpu_threads import ThreadBalancer
from minigpt.training.gpu_peaks import PEAK_FLOPS, device_name
from minigpt.training.language_model import LanguageModel
from minigpt.utils.errors import NonFiniteLoss
from minigpt.utils.files import sync
from minigpt.utils.terminal import sanitize_line, warn


class MetricsCallback(L.Callback):
    """Log metrics every `log_every` steps and at every validation.

    Losses are means over the steps since the last row and over all ranks. Speeds exclude validation
    and sampling. `started` is `time.perf_counter()` when the run started. `summary` returns the
    figures for `summary.json`.

    Raises:
        NonFiniteLoss: the loss or the gradient is NaN or infinite, on every rank at the same step.
            A CPU checks the norm of the gradient at every step; a GPU, where reading it would wait,
            the losses of a row.
    """

    def __init__(self, run: RunConfig, block_size: int, *, started: float) -> None:
        self.run = run
        self.tokens_per_step = (
            run.data.batch_size * run.trainer.accumulate_grad_batches * block_size
        )
        self.started = started
        # Seconds of training, the same at the last row, and the time from which they are counted:
        # None before training and during validation.
        self.seconds = self._logged_seconds = 0.0
        self._clock: float | None = None
        # The losses of the batches since the last row, and the same per rank, from a checkpoint
        self._losses: list[torch.Tensor] = []
        self._resumed_losses: list[list[float]] = [[]]
        # The number of threads of a CPU, and [step, number from the next one on] of its changes
        self._threads = ThreadBalancer(fixed=True)  # until the training starts
        self._thread_changes: list[list[int]] = []
        self.progress: Progress | None = None  # of rank 0

    def state_dict(self) -> dict[str, object]:
        # With it, the next row of a resumed run is that of an uninterrupted one.
        self.update_seconds()
        return {
            "seconds": self.seconds,
            "wall_seconds": time.perf_counter() - self.started,
            "losses": gather_objects(torch.stack(self._losses).tolist() if self._losses else []),
            "logged_seconds": self._logged_seconds,
            "thread_changes": self._thread_changes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds = state_dict["seconds"]
        self._logged_seconds = state_dict["logged_seconds"]
        self._resumed_losses = state_dict["losses"]
        self._thread_changes = state_dict.get("thread_changes", [])
        self.started -= state_dict["wall_seconds"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: object, checkpoint: object) -> None:
        for logger in trainer.loggers:
            logger.save()
        for name in (METRICS, SAMPLES):  # after a power failure, no checkpoint is newer than these
            sync(Path(trainer.default_root_dir) / name)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        # The losses of the batches since the last row; with another number of ranks than before,
        # each rank takes the mean.
        losses = torch.tensor(
            self._resumed_losses,  # (ranks, batches)
            device=pl_module.device,
            dtype=torch.promote_types(pl_module.dtype, torch.float32),
        )
        same = len(losses) == trainer.world_size
        self._losses = list(losses[trainer.global_rank] if same else losses.mean(0))
        # Lightning has changed the number of threads, if there are several processes.
        if self.run.threads:
            torch.set_num_threads(self.run.threads)
        self._threads = ThreadBalancer(
            fixed=bool(
                self.run.threads
                or self.run.trainer.deterministic
                or trainer.world_size > 1
                or pl_module.device.type != "cpu"
            )
        )
        # Show what is trained, and the progress from here.
        self._first_step = trainer.global_step + 1
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            append_log(folder, _banner(trainer, pl_module, self.tokens_per_step))
            self.progress = Progress(self.run.max_steps, folder, step=trainer.global_step)
        # Warn of a warmup that never ends.
        self._warmup = self.run.schedule.get("warmup_steps", 0)
        if self._warmup >= self.run.max_steps:
            warn(
                f"schedule.warmup_steps={self._warmup} is not below max_steps="
                f"{self.run.max_steps}: no step has the peak learning rate"
            )
        # Keep weights in low precision as they are before the end of the warmup; not embeddings,
        # whose rows can lack a gradient.
        self._first = {
            p: local_shard(p.detach()).to("cpu", copy=True)
            for p in pl_module.model.blocks.parameters()
            if p.requires_grad
            and torch.finfo(p.dtype).bits < 32
            and trainer.global_step <= self._warmup
        }
        # Warn of averages in the optimizer that never change.
        dtype = next(pl_module.parameters()).dtype
        rates = [
            max(0.0, *group.get("betas", ()), group.get("momentum", 0.0))
            for group in trainer.optimizers[0].param_groups
        ]
        rounded = [rate for rate in rates if 1 - rate < torch.finfo(dtype).eps / 4]
        if rounded:
            warn(
                f"a decay rate of {rounded[0]} of the optimizer rounds to 1 in "
                f"{str(dtype).removeprefix('torch.')}; use trainer.precision=auto"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: object, batch: object, batch_idx: int
    ) -> None:
        # The number of what Lightning's own callbacks log themselves, such as LearningRateMonitor
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step + 1
        self._clock = self._clock or time.perf_counter() - self.seconds
        self._threads.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # Balance the threads.
        threads = torch.get_num_threads()
        change = self._threads.end()
        if torch.get_num_threads() != threads:
            self._thread_changes.append([step, torch.get_num_threads()])
        if change and self.progress:
            self.progress.print(f"step {step:,}: {change}")
        # Measure the step.
        self._losses.append(outputs["loss"])  # divided by accumulate_grad_batches
        if not is_optimizer_step(trainer, batch_idx):
            return
        if self.progress and step == self._first_step:  # from now on the run has metrics to show
            update_latest_link(Path(trainer.default_root_dir))
        if pl_module.device.type == "cpu" and pl_module.has_nonfinite_gradient:
            loss = sum(self._losses[-trainer.accumulate_grad_batches :])
            raise NonFiniteLoss(float(loss), step, pl_module.learning_rate)
        if step % self.run.log_every == 0 or step == pl_module.max_steps:
            self._log_training(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type != "cpu":
            torch.accelerator.synchronize()  # wait for the steps since the last row
        self.update_seconds()
        self._clock = None
        if self._first and trainer.global_step > self._warmup:
            changed = [local_shard(p.detach()).cpu() != first for p, first in self._first.items()]
            share = sum(int(each.sum()) for each in changed) / sum(map(torch.numel, changed))
            self._first = {}
            if share < 0.5:  # the first steps change more in a precision that suffices
                warn(
                    f"at step {trainer.global_step}, {share:.1%} of the weights of the blocks have "
                    "changed, and the others rounded to their old values; raise the learning rate, "
                    "or use trainer.precision=auto"
                )

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: object,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.progress:
            self.progress.log_validation(batch_idx + 1, int(trainer.num_val_batches[0]))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        loss = float(trainer.callback_metrics["val_loss"])
        if not isfinite(loss):
            raise NonFiniteLoss(loss, trainer.global_step, pl_module.learning_rate)
        val = trainer.datamodule.corpus.val  # type: ignore[attr-defined]
        self._log(
            trainer,
            {"val_loss": loss, "val_bits_per_byte": loss / log(2) / (val.bytes / val.targets)},
        )

    def on_train_end(self, *_: object, **__: object) -> None:
        if self.progress:
            self.progress.bar.close()

    on_exception = on_train_end

    def summary(self, trainer: L.Trainer, module: LanguageModel) -> dict[str, Any]:
        folder = Path(trainer.default_root_dir)
        columns = read_metrics(folder / METRICS) if (folder / METRICS).exists() else {}
        # The best of the validations whose checkpoints are left, or else of all
        checkpoints = trainer.checkpoint_callback
        losses = checkpoints.best if isinstance(checkpoints, CheckpointCallback) else []
        losses = losses or [(loss, step) for step, loss in columns.get("val_loss", [])]
        best_val_loss, best_step = min(losses, default=(None, None))
        bits_per_byte = dict(columns.get("val_bits_per_byte", []))
        # A run that could not resume is where its rows end; a callback may log a step that fails.
        steps = trainer.global_step or max((row[-1][0] for row in columns.values()), default=0)
        tokens = steps * self.tokens_per_step
        return {
            "best_val_loss": best_val_loss,
            "best_val_bits_per_byte": bits_per_byte.get(best_step or 0),
            "best_step": best_step,
            "steps": steps,
            "tokens": tokens,
            "params": module.model.num_params(),
            "flops": tokens * module.model.config.flops_per_token(),
            "seconds": round(self.seconds, 3),
            "wall_seconds": round(time.perf_counter() - self.started, 3),
            "tokens_per_second": round(tokens / self.seconds, 1) if self.seconds else None,
            "precision": str(trainer.precision),
            # Lightning has moved the model to the CPU.
            "device": device_name(trainer.strategy.root_device, self._threads.most),
            "thread_changes": self._thread_changes,
            "world_size": trainer.world_size,
            "checkpoint": BEST if (folder / BEST).exists() else None,
        }

    def update_seconds(self) -> None:
        """Update `seconds`; on a GPU, steps that it has not finished yet do not count."""
        if self._clock is not None:
            self.seconds = time.perf_counter() - self._clock

    def _log_training(self, trainer: L.Trainer, module: LanguageModel) -> None:
        # (steps, batches) -> (steps,)
        by_step = torch.stack(self._losses).view(-1, trainer.accumulate_grad_batches).sum(1)
        # Reading the losses waits for a GPU, before the clock is read.
        losses: list[float] = trainer.strategy.reduce(by_step, reduce_op="mean").tolist()
        self.update_seconds()
        self._losses.clear()
        for loss_step, loss in enumerate(losses, trainer.global_step - len(losses) + 1):
            if not isfinite(loss):
                raise NonFiniteLoss(loss, loss_step, module.learning_rate)
        tokens_per_second = (
            len(losses) * self.tokens_per_step / (self.seconds - self._logged_seconds)
        )
        self._logged_seconds = self.seconds
        flops = tokens_per_second * module.model.config.flops_per_token()
        metrics = {
            "tokens": trainer.global_step * self.tokens_per_step,
            "seconds": round(self.seconds, 3),
            "train_loss": sum(losses) / len(losses),
            "learning_rate": module.learning_rate,
            "grad_norm": float(module.grad_norm),  # type: ignore[arg-type]
            "tokens_per_second": round(tokens_per_second, 1),
            "flops_per_second": flops,
        }
        peak = PEAK_FLOPS.get(device_name(module.device))
        if peak is not None:
            metrics["mfu"] = flops / (peak * trainer.world_size)
        self._log(trainer, metrics)

    def _log(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)
        if self.progress:
            self.progress.log(metrics, trainer.global_step)


def _banner(trainer: L.Trainer, module: LanguageModel, tokens_per_step: int) -> str:
    corpus = trainer.datamodule.corpus  # type: ignore[attr-defined]
    config = module.model.config
    n_train = corpus.train.tokens
    learned = "" if corpus.is_text else f", {corpus.train.targets:,} of them in answers"
    # Tokens, of conversations with those that fill windows
    epoch = n_train if corpus.is_text else len(corpus.windows("train", config.block_size)) - 1
    start = trainer.global_step
    steps = trainer.max_steps - start
    n_tokens = steps * tokens_per_step
    per_token = config.flops_per_token()
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    resumed = f" from step {start:,} at learning rate {rate:.3g}" if start else ""
    ranks = f"{trainer.world_size} × " if trainer.world_size > 1 else ""
    rows = {
        "model": f"{module.model.num_params():,} parameters: n_layer {config.n_layer}, "
        f"n_head {config.n_head}, n_embd {config.n_embd}, block_size {config.block_size}",
        "data": f"{corpus.name}, {n_train:,} training tokens{learned}; "
        f"tokenizer {corpus.tokenizer.to_dict()['name']}, vocab_size {config.vocab_size:,}; "
        "validation on "
        f"{100 * corpus.val.tokens / (corpus.val.tokens + n_train):.3g} % of the tokens",
        "training": f"{steps:,} steps{resumed}, {n_tokens:,} tokens "
        f"({n_tokens / epoch:.2f} epochs), "
        f"{n_tokens * per_token:.3g} FLOPs ({per_token:.3g} per token)",
        "device": f"{ranks}{device_name(module.device)}, precision {trainer.precision}",
        "run folder": str(short_path(Path(trainer.default_root_dir))),
    }
    return "\n".join(f"{name:12}{sanitize_line(value)}" for name, value in rows.items())
