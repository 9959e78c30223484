"""The LightningDataModule of a corpus: training and validation batches of one rank."""

from typing import Any

import lightning.pytorch as L

from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.token_files import Corpus
from minigpt.utils.errors import require


class TokenDataModule(L.LightningDataModule):
    """Training and validation batches of one rank.

    Args:
        block_size: window length, tokens.
        batch_size, eval_batch_size: windows per batch over all ranks.
        n_batches: training batches of the run. n_eval_batches: of a validation; None is all.
        overfit_batches: train on this many batches over and over; 0 trains on all.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        block_size: int,
        batch_size: int,
        eval_batch_size: int,
        n_batches: int,
        seed: int,
        overfit_batches: int = 0,
        n_eval_batches: int | None = None,
    ) -> None:
        super().__init__()
        self.corpus, self.block_size = corpus, block_size
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.n_batches, self.overfit_batches, self.n_eval_batches = n_batches, overfit_batches, n_eval_batches
        self.order = WindowOrder(corpus.train.tokens, block_size, seed)

    def train_dataloader(self) -> Batches:
        trainer: Any = self.trainer
        n = trainer.world_size
        require("data.batch_size", self.batch_size, lambda size: size % n == 0, f"divisible by the {n} processes")
        return Batches(
            self.corpus.tokens("train"),
            self.order,
            batch_size=self.batch_size,
            first=lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            stop=self.n_batches,
            repeat=self.overfit_batches,
            **self._rank(),
        )

    def val_dataloader(self) -> ValidationBatches:
        return ValidationBatches(
            self.corpus.tokens("val"),
            block_size=self.block_size,
            batch_size=self.eval_batch_size,
            n_batches=self.n_eval_batches,
            **self._rank(),
        )

    def _rank(self) -> dict[str, Any]:
        trainer: Any = self.trainer
        device = trainer.strategy.root_device
        return {"rank": trainer.global_rank, "world_size": trainer.world_size, "device": device}
