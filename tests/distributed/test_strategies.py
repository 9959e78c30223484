"""DDP and FSDP2 on CPU processes, compared with one process."""

from pathlib import Path

import pytest
from ranks import train_on_ranks
from small_runs import column

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read

# The last batch of the 125 windows of the validation split has one, so that a rank has none.
SETTINGS = ["log_every=1", "data.eval_batch_size=62"]
# Batches of 4 and 3 sequences.
MUON = ["optimizer=muon", "ema_decay=0.9", "trainer.accumulate_grad_batches=2", "data.batch_size=7"]
# How a run is spread, its other settings, and a relative tolerance: rounding, and of bfloat16.
RUNS = {
    "ddp": (["trainer=ddp"], [*MUON, "trainer.precision=64-true"], 1e-6),
    "compressed": (["trainer=ddp", "trainer.strategy.compress=true"], [], 1e-3),
    "sharded": (["trainer=fsdp"], MUON, 1e-3),
    "gathered": (["trainer=fsdp", "trainer.strategy.reshard_after_forward=false"], MUON, 1e-3),
    "recomputed": (["trainer=fsdp", "checkpoint_blocks=1"], [], 1e-4),
    "shared": (["trainer=fsdp"], [*MUON, "model.layer_repeats=2"], 1e-3),
    "reduced": (["trainer=fsdp"], ["trainer.precision=bf16-mixed"], 1e-3),
}
pytestmark = pytest.mark.xdist_group("processes")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("ddp", "sharded") else pytest.mark.slow) for name in RUNS]
)
def test_two_ranks_train_as_one(name, small, trained, tmp_path):
    spread, settings, tolerance = RUNS[name]
    spread = [*spread, "trainer.accelerator=cpu", "trainer.devices=2", f"hydra.run.dir={tmp_path}/two/${{now:%f}}"]
    train_on_ranks([[*small, *SETTINGS, *settings, *spread]])
    (two,), one = (tmp_path / "two").glob("[0-9]*"), trained(*SETTINGS, *settings)  # at the microsecond of rank 0
    assert losses(two) == pytest.approx(losses(one), rel=tolerance)
    assert name != "compressed" or losses(two) != pytest.approx(losses(one), rel=1e-8)  # rounded
    found = read(two / LAST)["state_dict"]
    for key, expected in read(one / LAST)["state_dict"].items():
        assert (found[key] - expected).norm() <= 30 * tolerance * expected.norm(), key


def losses(folder: Path) -> list[float]:
    return column(folder, "train_loss") + column(folder, "val_loss")
