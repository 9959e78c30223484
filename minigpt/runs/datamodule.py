"""The LightningDataModule of a corpus."""

from typing import Any

import lightning.pytorch as L
from omegaconf import DictConfig

from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.token_files import Corpus
from minigpt.utils.errors import require


class TokenDataModule(L.LightningDataModule):
    """Training and validation batches of one rank, as the run configuration `cfg` sets them."""

    def __init__(self, corpus: Corpus, cfg: DictConfig) -> None:
        super().__init__()
        self.corpus, self.cfg = corpus, cfg

    def train_dataloader(self) -> Batches:
        trainer: Any = self.trainer
        cfg, n = self.cfg, trainer.world_size
        require("data.batch_size", cfg.data.batch_size, lambda size: size % n == 0, f"divisible by the {n} processes")
        return Batches(
            self.corpus.tokens("train"),
            WindowOrder(self.corpus.train.tokens, cfg.model.block_size, cfg.seed),
            batch_size=cfg.data.batch_size,
            first=lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            stop=cfg.max_steps * cfg.trainer.accumulate_grad_batches,
            repeat=cfg.data.overfit_batches,
            **self._rank(),
        )

    def val_dataloader(self) -> ValidationBatches:
        return ValidationBatches(
            self.corpus.tokens("val"),
            block_size=self.cfg.model.block_size,
            batch_size=self.cfg.data.eval_batch_size,
            n_batches=self.cfg.eval_batches,
            **self._rank(),
        )

    def _rank(self) -> dict[str, Any]:
        trainer: Any = self.trainer
        device = trainer.strategy.root_device
        return {"rank": trainer.global_rank, "world_size": trainer.world_size, "device": device}
