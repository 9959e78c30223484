"""DDP and FSDP2 on two CPU processes, compared with one process."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import train_on_ranks
from small_runs import column, small_run

import minigpt
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read

# Batches of 4 and 3 sequences.
MUON = ["optimizer=muon", "ema_decay=0.9", "trainer.accumulate_grad_batches=2", "data.batch_size=7"]
DOUBLE, REDUCED = "trainer.precision=64-true", "trainer.precision=bf16-mixed"
# Each with the run in one process that it must equal, and a relative tolerance: rounding, and of bfloat16.
RUNS = {
    "ddp": (["trainer=ddp", *MUON, DOUBLE], [*MUON, DOUBLE], 1e-6),
    "compressed": (["trainer=ddp", "trainer.strategy.compress=true"], [], 1e-3),
    "sharded": (["trainer=fsdp", *MUON], MUON, 1e-3),
    "gathered": (["trainer=fsdp", *MUON, "trainer.strategy.reshard_after_forward=false"], MUON, 1e-3),
    "recomputed": (["trainer=fsdp", "checkpoint_blocks=1"], [], 1e-4),
    "shared": (["trainer=fsdp", *MUON, "model.layer_repeats=2"], [*MUON, "model.layer_repeats=2"], 1e-3),
    "reduced": (["trainer=fsdp", REDUCED], [REDUCED], 1e-3),
}
QUICK = ("ddp", "sharded")


@pytest.fixture(scope="module")
def base(text: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The folder of all runs, and their settings."""
    folder = tmp_path_factory.mktemp("strategies")
    # The last batch of the 125 windows of the validation split has one, so that a rank has none.
    settings = [*small_run(text, folder / "data"), "callbacks.samples=null", "log_every=1", "data.eval_batch_size=62"]
    return SimpleNamespace(folder=folder, settings=settings)


@pytest.fixture(scope="module")
def on_two(base: SimpleNamespace) -> Path:
    return train_on_two(base, {name: RUNS[name][0] for name in QUICK})


@pytest.fixture(scope="module")
def others_on_two(base: SimpleNamespace) -> Path:
    return train_on_two(base, {name: overrides for name, (overrides, *_) in RUNS.items() if name not in QUICK})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_validation_on_ranks_is_that_of_one_whatever_the_last_batch_has(
    base: SimpleNamespace, tmp_path: Path, strategy: str, ranks: int
) -> None:
    runs = [[*base.settings, "eval_every=1", "max_steps=1", f"data.eval_batch_size={size}"] for size in (3, 4, 5)]
    resumed = [*runs[0], "resume=auto", "max_steps=2"]
    remainders = {n: {125 % size % n for size in (3, 4, 5)} for n in (2, 3)}
    assert remainders == {2: {0, 1}, 3: {0, 1, 2}}
    folders = [f"hydra.run.dir={tmp_path}/{i}" for i in (0, 1, 2, 0)]
    ddp = [f"trainer={strategy}", "trainer.accelerator=cpu", f"trainer.devices={ranks}"]
    train_on_ranks([[*run, *ddp, at] for run, at in zip([*runs, resumed], folders, strict=True)], ranks)
    minigpt.train([*resumed, f"hydra.run.dir={tmp_path}/one"])
    expected = column(tmp_path / "one", "val_loss")
    assert column(tmp_path / "0", "val_loss") == pytest.approx(expected, rel=1e-5)
    for name in ("1", "2"):
        assert column(tmp_path / name, "val_loss") == pytest.approx(expected[:1], rel=1e-5)


def train_on_two(base: SimpleNamespace, runs: dict[str, list[str]]) -> Path:
    two = [*base.settings, "trainer.accelerator=cpu", "trainer.devices=2"]
    train_on_ranks([[*two, *overrides, f"hydra.run.dir={base.folder}/{name}"] for name, overrides in runs.items()])
    return Path(base.folder)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RUNS])
def test_two_ranks_train_as_one(
    base: SimpleNamespace, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    on_two = request.getfixturevalue("on_two" if name in QUICK else "others_on_two")
    _, overrides, tolerance = RUNS[name]
    minigpt.train([*base.settings, *overrides, f"hydra.run.dir={tmp_path}"])
    assert losses(on_two / name) == pytest.approx(losses(tmp_path), rel=tolerance)
    assert name != "compressed" or losses(on_two / name) != pytest.approx(losses(tmp_path), rel=1e-8)  # rounded
    for key, expected in read(tmp_path / LAST)["state_dict"].items():
        found = read(on_two / name / LAST)["state_dict"][key]
        assert (found - expected).norm() <= 30 * tolerance * expected.norm(), key


def losses(folder: Path) -> list[float]:
    return column(folder, "train_loss") + column(folder, "val_loss")
