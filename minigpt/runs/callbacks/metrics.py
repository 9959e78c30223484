"""Measure a run: losses, speed and MFU for the loggers, figures for `summary.json`; stop it if the loss is NaN."""

import sys
import time
from math import isfinite, log
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from tqdm import tqdm

from minigpt.checkpoints.find import BEST
from minigpt.distributed.process_group import gather_objects
from minigpt.model.ops import local_shard
from minigpt.runs.callbacks.checkpoint_callback import CheckpointCallback
from minigpt.runs.callbacks.progress_bar import Progress
from minigpt.runs.metrics_csv import read_metrics
from minigpt.runs.run_config import RunConfig
from minigpt.runs.run_dir import METRICS, SAMPLES, append_log, short_path, update_latest_link
from minigpt.training.cpu_threads import ThreadBalancer
from minigpt.utils.errors import NonFiniteLoss
from minigpt.utils.files import sync
from minigpt.utils.terminal import sanitize_line, warn

# Dense bfloat16 peaks of NVIDIA's data sheets, or float16 without bfloat16, FLOPs per second, by the name that the
# driver returns. Figures that a sheet gives with sparsity are halved.
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,  # https://resources.nvidia.com/en-us-blackwell-architecture
    "NVIDIA H200": 989e12,  # https://www.nvidia.com/en-us/data-center/h200/
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM; https://www.nvidia.com/en-us/data-center/h100/
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756e12,  # https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper
    "NVIDIA A100-SXM4-40GB": 312e12,  # https://www.nvidia.com/en-us/data-center/a100/
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,  # https://www.nvidia.com/en-us/data-center/l40s/
    "NVIDIA L40": 181e12,  # https://www.nvidia.com/en-us/data-center/l40/
    "NVIDIA L4": 121e12,  # https://www.nvidia.com/en-us/data-center/l4/
    "NVIDIA A10": 125e12,  # https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    "NVIDIA GeForce RTX 4090": 165e12,  # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    "NVIDIA GeForce RTX 3090": 71e12,  # https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf
    "Tesla V100-SXM2-16GB": 125e12,  # https://www.nvidia.com/en-us/data-center/v100/
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "Tesla T4": 65e12,  # https://www.nvidia.com/en-us/data-center/tesla-t4/
}

MIN_CHANGED = 0.5  # share of weights in low precision that the first steps must change


class MetricsCallback(L.Callback):
    """Log metrics every `log_every` steps and at every validation.

    Losses are means over the steps since the last row and over all ranks. Speeds exclude validation and sampling.
    `started` is `time.perf_counter()` when the run started.

    Raises:
        NonFiniteLoss: the loss or the gradient is NaN or infinite, on every rank at the same step. A CPU checks the norm of
            the gradient at every step; a GPU, where reading it would wait, the losses of a row.
    """

    def __init__(self, run: RunConfig, block_size: int, *, started: float) -> None:
        self.log_every, self.max_steps, self.started = run.log_every, run.max_steps, started
        sequences = run.data.batch_size * run.trainer.accumulate_grad_batches
        self.tokens_per_step = sequences * block_size
        self.seconds = self._logged_seconds = 0.0  # of training: until now, and until the last row
        self._clock: float | None = (
            None  # end of `seconds`; None before training and during validation
        )
        self._linked = False  # whether `latest` points at the run
        self._losses: list[torch.Tensor] = []  # of the batches since the last row
        self._resumed_losses: list[list[float]] = []  # the same per rank, from a checkpoint
        self._progress: Progress | None = None  # of rank 0
        self._given_threads, self._deterministic = run.threads, run.trainer.deterministic
        self._threads = ThreadBalancer(fixed=True)  # until the training starts
        self._thread_changes: list[list[int]] = []  # step, number from the next one on
        self._first: dict[torch.Tensor, torch.Tensor] = {}  # values of parameters in low precision

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run logs the same next row as an uninterrupted one."""
        self._update_seconds()
        return {
            "seconds": self.seconds,
            "wall_seconds": time.perf_counter() - self.started,
            "losses": gather_objects(torch.stack(self._losses).tolist() if self._losses else []),
            "logged_seconds": self._logged_seconds,
            "thread_changes": self._thread_changes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self._logged_seconds = state_dict["seconds"], state_dict["logged_seconds"]
        self._resumed_losses = state_dict["losses"]
        self._thread_changes = state_dict.get("thread_changes", [])
        self.started -= state_dict["wall_seconds"]

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        for logger in trainer.loggers:
            logger.save()
        for name in (
            METRICS,
            SAMPLES,
        ):  # after a power failure, no checkpoint is newer than its logs
            sync(Path(trainer.default_root_dir) / name)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._resumed_losses:  # with another number of ranks, each rank takes the mean
            dtype = torch.promote_types(pl_module.dtype, torch.float32)  # of a loss
            losses = torch.tensor(
                self._resumed_losses, device=pl_module.device, dtype=dtype
            )  # (ranks, batches)
            same = len(losses) == trainer.world_size
            self._losses = list(losses[trainer.global_rank] if same else losses.mean(0))
        if self._given_threads:
            torch.set_num_threads(
                self._given_threads
            )  # Lightning has changed it, if there are several processes
        fixed = (
            self._given_threads
            or self._deterministic
            or trainer.world_size > 1
            or pl_module.device.type != "cpu"
        )
        self._threads = ThreadBalancer(fixed=bool(fixed))
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            for line in banner(trainer, pl_module, self.tokens_per_step):
                append_log(folder, line)
            self._progress = Progress(self.max_steps, folder, step=trainer.global_step)
        self._warmup = pl_module.schedule.keywords.get("warmup_steps", 0)
        if self._warmup >= self.max_steps:
            warn(
                f"schedule.warmup_steps={self._warmup} is not below max_steps={self.max_steps}: "
                "no step has the peak learning rate"
            )
        dtype = next(pl_module.parameters()).dtype
        if trainer.global_step <= self._warmup:
            self._first = {  # not of embeddings, whose rows can be without a gradient
                p: local_shard(p.detach()).to("cpu", copy=True)
                for p in pl_module.model.blocks.parameters()
                if p.requires_grad and torch.finfo(p.dtype).bits < 32
            }
        rates = [
            max(*group.get("betas", ()), group.get("momentum", 0.0), 0.0)
            for group in trainer.optimizers[0].param_groups
        ]
        if lost := [rate for rate in rates if 1 - rate < torch.finfo(dtype).eps / 4]:
            warn(
                f"a decay rate of {lost[0]} of the optimizer rounds to 1 in "
                f"{str(dtype).removeprefix('torch.')}; use trainer.precision=auto"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        # The number of what Lightning's own callbacks log themselves, such as LearningRateMonitor
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step + 1
        self._clock = self._clock or time.perf_counter()
        self._threads.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        threads = torch.get_num_threads()
        change = self._threads.end()
        if torch.get_num_threads() != threads:
            self._thread_changes.append([trainer.global_step, torch.get_num_threads()])
        if change:
            with tqdm.external_write_mode(file=sys.stderr):  # beside the progress bar
                append_log(
                    Path(trainer.default_root_dir), f"step {trainer.global_step:,}: {change}"
                )
        self._losses.append(outputs["loss"])  # divided by accumulate_grad_batches
        step, accumulate = trainer.global_step, trainer.accumulate_grad_batches
        if (batch_idx + 1) % accumulate:
            return
        if trainer.is_global_zero and not self._linked:  # from now on the run has metrics to show
            update_latest_link(Path(trainer.default_root_dir))
            self._linked = True
        if pl_module.device.type == "cpu" and pl_module.diverged:
            raise NonFiniteLoss(
                float(sum(self._losses[-accumulate:])), step, pl_module.learning_rate
            )
        if step % self.log_every == 0 or step == self.max_steps:
            self._log_training(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if pl_module.device.type != "cpu":
            torch.accelerator.synchronize()  # wait for the steps since the last row
        self._update_seconds()
        self._clock = None
        if self._first and trainer.global_step > self._warmup:
            changed = [local_shard(p.detach()).cpu() != first for p, first in self._first.items()]
            share = sum(int(each.sum()) for each in changed) / sum(map(torch.numel, changed))
            self._first = {}
            if share < MIN_CHANGED:
                warn(
                    f"at step {trainer.global_step}, {share:.1%} of the weights of the blocks have changed, and the "
                    f"others rounded to their old values; raise the learning rate, or use trainer.precision=auto"
                )

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._progress:
            self._progress.log_validation(batch_idx + 1, int(trainer.num_val_batches[0]))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        loss, val = float(trainer.callback_metrics["val_loss"]), trainer.datamodule.corpus.val  # type: ignore[attr-defined]
        if not isfinite(loss):
            raise NonFiniteLoss(loss, trainer.global_step, pl_module.learning_rate)
        self._log(
            trainer,
            {"val_loss": loss, "val_bits_per_byte": loss / log(2) / (val.bytes / val.tokens)},
        )

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._progress:
            self._progress.bar.close()

    on_exception = on_train_end

    def summary(self, trainer: L.Trainer, pl_module: Any) -> dict[str, Any]:
        """Return the figures of the run for `summary.json`."""
        folder = Path(trainer.default_root_dir)
        columns = read_metrics(folder / METRICS) if (folder / METRICS).exists() else {}
        saved = trainer.checkpoint_callback
        losses = (
            saved.best if isinstance(saved, CheckpointCallback) else []
        )  # whose checkpoints are left
        losses = losses or [(loss, step) for step, loss in columns.get("val_loss", [])]
        best_val_loss, best_step = min(losses, default=(None, None))
        # A run that could not resume is where its rows end; a callback may log a step that then fails.
        steps = trainer.global_step or max(
            (points[-1][0] for points in columns.values()), default=0
        )
        tokens = steps * self.tokens_per_step
        return {
            "best_val_loss": best_val_loss,
            "best_val_bits_per_byte": dict(columns.get("val_bits_per_byte", [])).get(
                best_step or 0
            ),
            "best_step": best_step,
            "steps": steps,
            "tokens": tokens,
            "params": pl_module.model.num_params(),
            "flops": tokens * pl_module.model.config.flops_per_token(),
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

    def _update_seconds(self) -> None:
        if self._clock is not None:
            now = time.perf_counter()
            self.seconds += now - self._clock
            self._clock = now

    def _log(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)
        if self._progress:
            self._progress.log(metrics, trainer.global_step)

    def _log_training(self, trainer: L.Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        by_step = (
            torch.stack(self._losses).view(-1, trainer.accumulate_grad_batches).sum(1)
        )  # since the last row
        losses: list[float] = trainer.strategy.reduce(
            by_step, reduce_op="mean"
        ).tolist()  # waits for a GPU
        self._update_seconds()
        self._losses.clear()
        for logged_step, loss in enumerate(losses, step - len(losses) + 1):
            if not isfinite(loss):
                raise NonFiniteLoss(loss, logged_step, pl_module.learning_rate)
        tokens_per_second = (
            len(losses) * self.tokens_per_step / (self.seconds - self._logged_seconds)
        )
        flops = tokens_per_second * pl_module.model.config.flops_per_token()
        metrics = {
            "tokens": step * self.tokens_per_step,
            "seconds": round(self.seconds, 3),
            "train_loss": sum(losses) / len(losses),
            "learning_rate": pl_module.learning_rate,
            "grad_norm": float(pl_module.grad_norm),
            "tokens_per_second": round(tokens_per_second, 1),
            "flops_per_second": flops,
        }
        if (peak := PEAK_FLOPS.get(device_name(pl_module.device))) is not None:
            metrics["mfu"] = flops / (peak * trainer.world_size)
        self._log(trainer, metrics)
        self._logged_seconds = self.seconds


def banner(trainer: L.Trainer, pl_module: Any, tokens_per_step: int) -> list[str]:
    """Return lines that describe the run before it trains, one name and value per line."""
    corpus, model = trainer.datamodule.corpus, pl_module.model  # type: ignore[attr-defined]
    config, steps = model.config, trainer.max_steps - trainer.global_step
    n_tokens, n_train, tokenizer = (
        steps * tokens_per_step,
        corpus.train.tokens,
        corpus.tokenizer.to_dict()["name"],
    )
    shape = ", ".join(
        f"{name} {getattr(config, name)}" for name in ("n_layer", "n_head", "n_embd", "block_size")
    )
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    resumed = (
        f" from step {trainer.global_step:,} at learning rate {rate:.3g}"
        if trainer.global_step
        else ""
    )
    epochs, each = f"{n_tokens / n_train:.2f} epochs", config.flops_per_token()
    flops = f"{n_tokens * each:.3g} FLOPs ({each:.3g} per token)"
    ranks = f"{trainer.world_size} × " if trainer.world_size > 1 else ""
    rows = {
        "model": f"{model.num_params():,} parameters: {shape}",
        "data": f"{corpus.name}, {n_train:,} training tokens; tokenizer {tokenizer}, "
        f"vocab_size {config.vocab_size:,}; "
        f"validation on {100 * corpus.val.tokens / (corpus.val.tokens + n_train):.3g} % of the tokens",
        "training": f"{steps:,} steps{resumed}, {n_tokens:,} tokens ({epochs}), {flops}",
        "device": f"{ranks}{device_name(pl_module.device)}, precision {trainer.precision}",
        "run folder": str(short_path(Path(trainer.default_root_dir))),
    }
    return [f"{name:12}{sanitize_line(value)}" for name, value in rows.items()]


def device_name(device: torch.device, threads: int | None = None) -> str:
    """Return the GPU's name, or the device type with the number of threads for a CPU (None: the present number)."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"cpu, {threads or torch.get_num_threads()} threads"
        if device.type == "cpu"
        else device.type
    )
