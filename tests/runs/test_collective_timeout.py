"""How long the ranks of a training wait for each other."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, nn

from minigpt.runs.collective_timeout import CollectiveTimeout


@pytest.fixture
def options(tmp_path):
    """The options of a process group of one rank."""
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options
    distributed.destroy_process_group()


def test_ranks_wait_longer_only_while_they_save(options):
    callback, trainer, model = CollectiveTimeout(60), Any, nn.Linear(1000, 1000)
    minute, saving = timedelta(minutes=1), timedelta(seconds=60 + 16 * 1_001_000 / 1e6)
    callback.on_train_batch_start(trainer, model, None, 0)
    assert options._timeout == minute
    callback.on_save_checkpoint(trainer, model, {})
    assert options._timeout == pytest.approx(saving, abs=timedelta(milliseconds=1))
    callback.on_train_batch_start(trainer, model, None, 1)
    assert options._timeout == minute
