"""Build the Lightning Trainer of a run, its data module, and what reads and writes its files."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning.pytorch as L
import torch
from hydra.utils import instantiate
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.utils._pytree import tree_map_only

from minigpt.checkpoints.format import write
from minigpt.checkpoints.resume import read_unaveraged
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.token_files import Corpus
from minigpt.distributed.strategies import DDP
from minigpt.runs.callbacks.collective_timeout import CollectiveTimeout
from minigpt.runs.callbacks.resume_state import EMACallback
from minigpt.runs.callbacks.shutdown import GracefulShutdown
from minigpt.runs.lightning_workarounds import number_by_step, set_up_process
from minigpt.runs.metrics_csv import append_metrics
from minigpt.runs.run_config import Node, RunConfig
from minigpt.runs.run_dir import METRICS
from minigpt.training.precision import training_precision
from minigpt.utils.cli import IMPORTED_FROM
from minigpt.utils.errors import UserError, require
from minigpt.utils.extras import from_extras
from minigpt.utils.ranks import TORCHRUN, launcher_sizes, rank_variables
from minigpt.utils.terminal import warn


def build_trainer(run: RunConfig, folder: Path, *callbacks: L.Callback) -> L.Trainer:
    """Build a Trainer whose budget is optimizer steps, with the loggers of the config.

    Args:
        callbacks: come before those of the config.

    Raises:
        UserError: Lightning rejects an option, or the device is missing.
    """
    set_up_process()
    # Samples are from the averages, which the EMA callback swaps out. The checkpoint of a shutdown
    # is from after the update of the EMA. Lightning puts Checkpoint callbacks last.
    callbacks += (
        CollectiveTimeout(run.collective_timeout),
        *instantiate_group("callbacks", run.callbacks),
        *([] if run.ema_decay is None else [EMACallback(run.ema_decay)]),
        GracefulShutdown(sync_every=run.log_every),
    )
    # The number of processes is the launcher's, and the strategy that of several processes
    options = _instantiate("trainer", vars(run.trainer))
    if started := launcher_sizes():
        options["num_nodes"], per_node = started
        if options["devices"] in (1, "auto"):
            options["devices"] = per_node
        if options["strategy"] == "auto":
            options["strategy"] = DDP()
    else:
        # Variables of Lightning's ranks on several hosts are ignored, so a host would wait for the
        # others forever.
        require(
            "trainer.num_nodes",
            run.trainer.num_nodes,
            lambda nodes: nodes == 1,
            "1",
            "start ranks on several hosts with torchrun or srun",
        )
    if options["precision"] == "auto":
        options["precision"] = training_precision(options["accelerator"])
    # Lightning would set false anew, for which torch imports its compiler
    if not options["deterministic"] and not torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = None
    # Not Lightning's choice by a few variables; GracefulShutdown ends a run of SLURM with the code
    # for a requeue.
    environment = TorchElasticEnvironment if rank_variables() == TORCHRUN else LightningEnvironment
    try:
        trainer = L.Trainer(
            **options,
            max_steps=run.pause_at or run.max_steps,
            max_epochs=-1,
            # In batches
            val_check_interval=min(run.eval_every, run.max_steps)
            * run.trainer.accumulate_grad_batches,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            callbacks=list(callbacks),
            logger=MetricsCSV(folder),
            plugins=[CheckpointIO(), environment()],
            default_root_dir=folder,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_checkpointing=any(
                isinstance(each, L.callbacks.Checkpoint) for each in callbacks
            ),
            enable_model_summary=False,
            use_distributed_sampler=False,
            # FSDP2 would keep gathered weights that training cannot use; gloo has none either
            inference_mode=False,
        )
    except Exception as error:  # Lightning raises a dozen kinds for an option that it rejects
        raise UserError(f"the trainer cannot be built: {error}") from error
    # What Lightning sets up differently
    number_by_step(trainer)
    # Set at import, by any variable of ranks
    L.utilities.rank_zero_only.__dict__["rank"] = trainer.global_rank
    if options["precision"] == "16-mixed" and trainer.precision != "16-mixed":
        warn(f"trainer.precision=16-mixed needs a GPU; this run is {trainer.precision}")
    # Last, because W&B starts a run
    trainer.loggers = [*trainer.loggers, *instantiate_group("logger", run.logger)]
    return trainer


def instantiate_group(name: str, group: Node) -> list[Any]:
    """Instantiate the objects of a config group, whose name is that in errors; skip null values."""
    return [part for part in _instantiate(name, group).values() if part is not None]


def _instantiate(name: str, group: Node) -> Node:
    # References are resolved already: a `${` that is left is text. Hydra resolves twice, and each
    # time halves the backslashes before a `${`.
    return instantiate(
        tree_map_only(
            str, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\1\1\\\\\\${", text), {name: group}
        ),
        _convert_="all",
    )[name]


def partial_from_config(name: str, node: Mapping[str, object]) -> Callable[..., Any]:
    """Bind the values of a config group to its `_target_`; Hydra's own partial takes 0.5 ms."""
    values = dict(node)
    target = values.pop("_target_")
    # What the caller passes after a model or a step
    known = {"max_steps": 1} if name == "schedule" else {}
    try:
        function = resolve_name(str(target))
        signature(function).bind(None, **known, **values)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"{name}._target_={target}: {error}; {IMPORTED_FROM}, arguments from {name}.…"
        ) from error
    return partial(function, **values)


class TokenDataModule(L.LightningDataModule):
    """Training and validation batches of one rank."""

    trainer: L.Trainer

    def __init__(self, corpus: Corpus, run: RunConfig, block_size: int) -> None:
        super().__init__()
        self.corpus = corpus
        self.run = run
        self.block_size = block_size
        self.max_steps = run.max_steps
        self.tokens_per_batch = run.data.batch_size * block_size

    def train_dataloader(self) -> Any:
        require(
            "data.batch_size",
            self.run.data.batch_size,
            lambda size: size >= self.trainer.world_size,
            f"≥ {self.trainer.world_size}, the number of processes",
        )
        tokens = self.corpus.windows("train", self.block_size)
        accumulate = self.run.trainer.accumulate_grad_batches
        batches = Batches(
            tokens,
            WindowOrder(len(tokens), self.block_size, self.run.seed, moves=self.corpus.is_text),
            batch_size=self.run.data.batch_size,
            first=lambda: self.trainer.global_step * accumulate,
            stop=self.max_steps * accumulate,
            repeat=self.run.data.overfit_batches,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            device=self.trainer.strategy.root_device,
        )
        if self.corpus.is_text or accumulate * self.trainer.world_size == 1:
            return batches
        return from_extras("WeightedBatches")(batches, accumulate)

    def val_dataloader(self) -> ValidationBatches:
        return ValidationBatches(
            self.corpus.windows("val", self.block_size),
            block_size=self.block_size,
            batch_size=self.run.data.eval_batch_size,
            n_batches=self.run.eval_batches,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            device=self.trainer.strategy.root_device,
        )


class MetricsCSV(L.loggers.Logger):
    """Append metrics to `metrics.csv`; Lightning's CSVLogger removes the file of a resumed run."""

    # Callbacks of Lightning write to save_dir/name/version, which is the run folder.
    name = version = save_dir = ""

    def __init__(self, folder: Path) -> None:
        self.save_dir = str(folder)

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        pass

    @L.utilities.rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        append_metrics(Path(self.save_dir) / METRICS, metrics, step)


class CheckpointIO(L.plugins.TorchCheckpointIO):
    """Write and read the checkpoints of the Trainer as `minigpt.checkpoints.format` does."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        write(checkpoint, Path(path), keeps_previous=True)

    def load_checkpoint(self, path: str | Path, *args: object, **kwargs: object) -> dict[str, Any]:
        return read_unaveraged(Path(path))
