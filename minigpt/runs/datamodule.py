"""The corpus as batches for the Trainer."""

from typing import Any

import lightning.pytorch as L

from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.token_files import Corpus
from minigpt.utils.errors import UserError


class TokenDataModule(L.LightningDataModule):
    """Hands the corpus to Lightning: `batch_size` windows a batch over all ranks."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        block_size: int,
        batch_size: int,
        eval_batch_size: int,
        n_batches: int,
        seed: int,
        overfit_batches: int,
        left_out: set[int],
        n_eval_batches: int | None = None,
    ) -> None:
        super().__init__()
        self.corpus, self.block_size = corpus, block_size
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.n_batches, self.overfit_batches, self.n_eval_batches = n_batches, overfit_batches, n_eval_batches
        self.order = WindowOrder(corpus.train.tokens, block_size, seed)
        self.left_out = left_out  # batches of the order that training goes past, here and where it goes on from

    def state_dict(self) -> dict[str, Any]:
        """Kept in checkpoints."""
        return {"left_out": sorted(self.left_out)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.left_out |= set(state_dict["left_out"])

    def train_dataloader(self) -> Batches:
        trainer = self._trainer()
        if self.batch_size % trainer.world_size:
            raise UserError(
                f"data.batch_size={self.batch_size} does not divide among {trainer.world_size} processes; "
                f"use a multiple of {trainer.world_size}"
            )
        return Batches(
            self.corpus.tokens("train"),
            self.order,
            batch_size=self.batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            first=lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            stop=self.n_batches,
            repeat=self.overfit_batches,
            device=trainer.strategy.root_device,
        )

    def val_dataloader(self) -> ValidationBatches:
        trainer = self._trainer()
        return ValidationBatches(
            self.corpus.tokens("val"),
            block_size=self.block_size,
            batch_size=self.eval_batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            device=trainer.strategy.root_device,
            n_batches=self.n_eval_batches,
        )

    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None
        return self.trainer
