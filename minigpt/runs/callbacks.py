"""What happens beside training: measuring, sampling, plotting. Checkpoints are in `keeping`."""

import time
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from minigpt.checkpoints.find import BEST
from minigpt.checkpoints.format import read
from minigpt.checkpoints.models import load_checkpoint
from minigpt.data.tokenizer import Tokenizer, encode_prompt
from minigpt.generation import check_settings, generate
from minigpt.interpret.heads import attention_maps, token_texts
from minigpt.interpret.plots import plot_maps
from minigpt.model import GPT
from minigpt.runs.checkpointing import AfterCheckpoint
from minigpt.runs.loggers import Progress, Wandb
from minigpt.runs.run_dir import METRICS, SAMPLES, append_log, read_metrics, short_path
from minigpt.training import of_all_ranks
from minigpt.utils.cli import explain
from minigpt.utils.errors import UserError
from minigpt.utils.files import sync
from minigpt.utils.terminal import sanitize_line, warn

# Dense bfloat16 peaks of NVIDIA's data sheets, FLOPs per second, by the name that the driver gives. Where a sheet
# gives the figure with sparsity, it is halved.
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
}

_SPIKE = 6.0  # standard deviations above the usual loss


class MetricsCallback(Callback):
    """Measures every `log_every` steps and at every validation, and tells the loggers.

    Losses are means over the steps since the last time and over all ranks. Speeds leave out the time
    spent on validation and sampling.
    """

    def __init__(self, *, log_every: int, tokens_per_step: int, began: float) -> None:
        self.log_every, self.tokens_per_step = log_every, tokens_per_step
        self.seconds = 0.0  # of training
        self.began = began  # on the clock of time.perf_counter, less what earlier attempts took
        self._clock = self._logged_seconds = 0.0
        self._logged_step = 0
        self._paused = False
        self._losses: list[Tensor] = []  # of the batches since the last row
        self._resumed: list[Tensor] = []  # the same of every rank, in the checkpoint that training goes on from
        self._usual = LossSpikeDetector()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._resumed:  # with another number of ranks each has the losses of all, on the mean
            same = len(self._resumed) == trainer.world_size
            losses = self._resumed[trainer.global_rank] if same else torch.stack(self._resumed).mean(0)
            self._losses = list(losses.to(pl_module.device))
        if trainer.is_global_zero:
            for line in banner(trainer, pl_module, self.tokens_per_step):
                append_log(Path(trainer.default_root_dir), line)
        self._clock = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """What makes the next row of a run that goes on the one that it would have been."""
        if not self._paused:
            self._stop_clock()
        return {
            "seconds": self.seconds,
            "wall_seconds": time.perf_counter() - self.began,
            "losses": of_all_ranks(torch.stack(self._losses).cpu() if self._losses else torch.zeros(0)),
            "logged_step": self._logged_step,
            "logged_seconds": self._logged_seconds,
            "usual": vars(self._usual).copy(),
        }

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self._logged_seconds = state_dict["seconds"], state_dict["logged_seconds"]
        self._resumed, self._logged_step = state_dict["losses"], state_dict["logged_step"]
        self._usual = LossSpikeDetector(**state_dict["usual"])
        self.began -= state_dict.get("wall_seconds", 0.0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._losses.append(outputs["loss"])  # Lightning divided it by the number of batches in a step
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        step = trainer.global_step
        if step % self.log_every == 0 or step == trainer.max_steps:
            self._log(trainer, pl_module, step)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self._stop_clock()
            self._paused = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit":
            return
        metrics = {name: float(trainer.callback_metrics[name]) for name in ("val_loss", "val_bits_per_byte")}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.ready
        for logger in trainer.loggers:
            if isinstance(logger, Progress):
                logger.validating(progress, int(trainer.num_val_batches[0]))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._paused:  # by validation, sampling and checkpoints
            self._paused, self._clock = False, time.perf_counter()

    def summary(self, trainer: L.Trainer, pl_module: Any) -> dict[str, Any]:
        """What the run came to: figures for `summary.json`."""
        folder = Path(trainer.default_root_dir)
        columns = read_metrics(folder / METRICS) if (folder / METRICS).exists() else {}
        best_step, best_val_loss = min(columns.get("val_loss", []), key=lambda point: point[1], default=(None, None))
        tokens = trainer.global_step * self.tokens_per_step
        return {
            "best_val_loss": best_val_loss,
            "best_val_bits_per_byte": dict(columns.get("val_bits_per_byte", [])).get(best_step or 0),
            "best_step": best_step,
            "steps": trainer.global_step,
            "stopped_early": bool(early_stopping(trainer)),
            "tokens": tokens,
            "params": pl_module.model.num_params(),
            "flops": tokens * pl_module.model.flops_per_token(),
            "seconds": round(self.seconds, 3),
            "wall_seconds": round(time.perf_counter() - self.began, 3),
            "tokens_per_second": round(tokens / self.seconds, 1) if self.seconds else None,
            "precision": str(trainer.precision),
            "device": device_name(pl_module.device),
            "world_size": trainer.world_size,
            "checkpoint": BEST if (folder / BEST).exists() else None,
        }

    def _stop_clock(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now

    def _log(self, trainer: L.Trainer, pl_module: Any, step: int) -> None:
        steps = step - self._logged_step
        by_step = torch.stack(self._losses).view(steps, -1).sum(1)
        losses: list[float] = trainer.strategy.reduce(by_step, reduce_op="mean").tolist()  # waits for the device
        self._stop_clock()
        self._losses.clear()
        spikes: dict[str, float] = {}
        for at, loss in enumerate(losses, self._logged_step + 1):
            if not isfinite(loss):
                raise pl_module.diverged(loss, at)
            if excess := self._usual.excess(loss):
                spikes["loss_spike"] = max(loss, spikes.get("loss_spike", loss))
                usual = f"{excess:.0f} standard deviations above the {self._usual.mean:.3f} of late"
                warn(f"a loss spike at step {at}: {loss:.3f}, {usual} (learning rate {pl_module.learning_rate:.3g})")
            self._usual.take(loss)
        seconds = self.seconds - self._logged_seconds
        tokens_per_second = steps * self.tokens_per_step / seconds
        flops = tokens_per_second * pl_module.model.flops_per_token()
        metrics = {
            "tokens": step * self.tokens_per_step,
            "seconds": round(self.seconds, 3),
            "train_loss": sum(losses) / steps,
            "learning_rate": pl_module.learning_rate,
            "grad_norm": float(pl_module.grad_norm),
            "tokens_per_second": round(tokens_per_second, 1),
            "flops_per_second": flops,
            **spikes,
        }
        peak = peak_flops(pl_module.device)
        if peak is not None:
            metrics["mfu"] = flops / (peak * trainer.world_size)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)
        self._logged_step, self._logged_seconds = step, self.seconds


@dataclass
class LossSpikeDetector:
    """What the loss of a step is of late: mean and variance, each new step weighing 5 %."""

    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0

    def excess(self, loss: float) -> float:
        """Standard deviations above the mean, of a spike; 0 of a loss that is none."""
        if self.steps < 50:  # before there is anything to compare with
            return 0.0
        excess = (loss - self.mean) / self._deviation()
        return excess if excess > _SPIKE else 0.0

    def take(self, loss: float) -> None:
        """Count a step in; of a spike no more than would have been none, lest it hide the next."""
        if self.excess(loss):
            loss = self.mean + _SPIKE * self._deviation()
        self.steps += 1
        weight = max(0.05, 1 / self.steps)
        change = loss - self.mean
        self.mean += weight * change
        self.variance = (1 - weight) * (self.variance + weight * change * change)

    def _deviation(self) -> float:
        return max(self.variance, 1e-12) ** 0.5


def banner(trainer: L.Trainer, pl_module: Any, tokens_per_step: int) -> list[str]:
    """What is about to be trained: a name and a value per line."""
    corpus, model = trainer.datamodule.corpus, pl_module.model  # type: ignore[attr-defined]
    config, steps = model.config, trainer.max_steps - trainer.global_step
    n_tokens, n_train, tokenizer = steps * tokens_per_step, corpus.train.tokens, corpus.tokenizer.to_dict()["name"]
    resumed = f" from step {trainer.global_step:,} on" if trainer.global_step else ""
    ranks = f"{trainer.world_size} × " if trainer.world_size > 1 else ""
    rows = {
        "model": f"{model.num_params():,} parameters: n_layer {config.n_layer}, n_head {config.n_head}, "
        f"n_embd {config.n_embd}, block_size {config.block_size}",
        "data": f"{corpus.name}, {n_train:,} training tokens; tokenizer {tokenizer}, vocab_size {config.vocab_size:,}",
        "training": f"{steps:,} steps{resumed}, {n_tokens:,} tokens ({n_tokens / n_train:.2f} epochs), "
        f"{n_tokens * model.flops_per_token():.3g} FLOPs",
        "device": f"{ranks}{device_name(pl_module.device)}, precision {trainer.precision}",
        "run folder": str(short_path(Path(trainer.default_root_dir))),
    }
    return [f"{name:12}{sanitize_line(value)}" for name, value in rows.items()]


def early_stopping(trainer: L.Trainer) -> str:
    """Why early stopping ended a training before its last step; empty where it did not."""
    if trainer.global_step >= trainer.max_steps or not trainer.should_stop:
        return ""
    reasons = [callback.stopping_reason_message for callback in trainer.early_stopping_callbacks]
    return next((reason.partition(" Signaling")[0] for reason in reasons if reason), "")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of device and, of a CPU, the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


def peak_flops(device: torch.device) -> float | None:
    """The bfloat16 peak of a known GPU; None for another, and for a CPU."""
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


class Samples(AfterCheckpoint):
    """Appends a sample to `samples.txt` at every validation, and sends it to Weights & Biases."""

    def __init__(self, *, prompt: str, max_new_tokens: int, temperature: float, top_k: int | None, seed: int) -> None:
        self.prompt = prompt
        self.options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "seed": seed,
        }
        check_settings(**self.options)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.tokenizer: Tokenizer = trainer.datamodule.corpus.tokenizer  # type: ignore[attr-defined]
        self.prompt_ids = torch.as_tensor(encode_prompt(self.tokenizer, self.prompt)).long()
        self.file = Path(trainer.default_root_dir) / SAMPLES

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the sample that a killed run had no time for after its checkpoint."""
        resumed, folder = trainer.ckpt_path, self.file.parent
        if not resumed or not trainer.is_global_zero or Path(resumed).resolve().parent.parent != folder.resolve():
            return
        columns = read_metrics(folder / METRICS) if (folder / METRICS).exists() else {}
        step = int(read(Path(resumed), device="cpu")["global_step"])
        written = self.file.read_text(encoding="utf-8", errors="replace") if self.file.exists() else ""
        if step in (losses := dict(columns.get("val_loss", []))) and f"── step {step}, " not in written:
            model, _ = load_checkpoint(resumed, device=trainer.strategy.root_device)
            self._write(trainer, model, step, losses[step])

    def show(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._write(trainer, pl_module.model, trainer.global_step, float(trainer.callback_metrics["val_loss"]))

    def _write(self, trainer: L.Trainer, model: GPT, step: int, loss: float) -> None:
        # Sharded weights are gathered by all ranks, so all ranks sample.
        text = self.prompt + sample_text(model, self.tokenizer, self.prompt_ids, **self.options)
        if not trainer.is_global_zero:
            return
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(f"── step {step}, validation loss {loss:.4f} ──\n{text.strip()}\n\n")
        for logger in trainer.loggers:
            if isinstance(logger, Wandb):
                logger.log_html("samples", text)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        sync(self.file)


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: Tensor, **options: Any) -> str:
    """One continuation of a prompt as text."""
    # A compiled model would be compiled anew for every length of the text.
    with torch.compiler.set_stance("force_eager"):
        try:
            return tokenizer.decode(generate(model, prompt, **options)[0].tokens)
        except Exception as error:  # no reason to lose a run
            warn(f"sampling failed: {explain(error)[0].removeprefix('error: ')}")
            return ""


class AttentionMaps(AfterCheckpoint):
    """Draws what every head attends to in one text, at every validation, to `attention/` and Weights & Biases.

    Args:
        text: what to look at; None is the beginning of the validation split.
        max_tokens: of the text, and `block_size` at most.
    """

    def __init__(self, *, text: str | None = None, max_tokens: int = 64) -> None:
        if text == "" or max_tokens < 1:
            what = f"max_tokens={max_tokens}" if max_tokens < 1 else "text=''"
            raise UserError(f"callbacks.attention.{what} is not possible; there must be a token to look at")
        self.text, self.max_tokens = text, max_tokens

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        corpus, block_size = trainer.datamodule.corpus, pl_module.model.config.block_size  # type: ignore[attr-defined]
        ids = corpus.tokens("val") if self.text is None else corpus.tokenizer.encode(self.text)
        self.tokens = torch.as_tensor(ids[: min(self.max_tokens, block_size)].astype("int64"))
        self.texts = token_texts(corpus.tokenizer, self.tokens)
        self.folder = Path(trainer.default_root_dir) / "attention"

    def show(self, trainer: L.Trainer, pl_module: Any) -> None:
        # Sharded weights are gathered by all ranks, so all ranks look. Hooks would have a compiled model compiled anew.
        with torch.compiler.set_stance("force_eager"):
            weights, _ = attention_maps(pl_module.model, self.tokens.to(pl_module.device))
        if not trainer.is_global_zero:
            return
        step, loss = trainer.global_step, float(trainer.callback_metrics["val_loss"])
        self.folder.mkdir(exist_ok=True)
        picture = self.folder / f"step-{step}.png"
        plot_maps(picture, weights, self.texts, title=f"step {step}, validation loss {loss:.4f}")
        for logger in trainer.loggers:
            if isinstance(logger, Wandb):
                logger.log_image("attention", images=[str(picture)], step=step)


class Profile(Callback):
    """Records some steps with torch's profiler: a table of the dearest operations, and a trace."""

    def __init__(self, *, wait: int, steps: int) -> None:
        self.wait, self.steps = wait, steps

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        plan = torch.profiler.schedule(wait=self.wait - 1, warmup=1, active=self.steps, repeat=1)
        self.profiler = torch.profiler.profile(schedule=plan, on_trace_ready=partial(self._write, trainer))
        self.profiler.start()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.profiler.step()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.profiler.stop()

    @staticmethod
    def _write(trainer: L.Trainer, profiler: torch.profiler.profile) -> None:
        if not trainer.is_global_zero:
            return
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=40)
        folder = Path(trainer.default_root_dir)
        (folder / "profile.txt").write_text(table, encoding="utf-8")
        profiler.export_chrome_trace(str(folder / "trace.json"))
        print(table)
