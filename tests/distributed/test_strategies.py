"""DDP, FSDP2 and DiLoCo on two CPU processes, compared with one process and with a loop in plain torch."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import column, composed, small_run
from ranks import train_on_ranks
from torch import Tensor

import minigpt
from minigpt import GPT
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.data.batches import Batches, WindowOrder
from minigpt.data.prepare import load_corpus
from minigpt.runs.config_checks import check_run, partial_from_config
from minigpt.utils.errors import UserError

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
DILOCO = ["trainer=diloco", "trainer.strategy.outer_every=4", "schedule=constant"]
STEPS, EVAL_EVERY, OUTER_EVERY, OUTER_LR, OUTER_MOMENTUM = 20, 10, 4, 0.7, 0.8


@pytest.fixture(scope="module")
def base(text: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The folder of all runs, and their settings."""
    folder = tmp_path_factory.mktemp("strategies")
    settings = [*small_run(text, folder / "data"), "callbacks.samples=null", "log_every=1"]
    return SimpleNamespace(folder=folder, settings=settings)


@pytest.fixture(scope="module")
def on_two(base: SimpleNamespace) -> Path:
    """The QUICK runs on two ranks, and those of DiLoCo: whole, and stopped after ten steps and resumed."""
    diloco = {
        "diloco": [*DILOCO, DOUBLE],
        "whole": DILOCO,
        "stopped": [*DILOCO, "max_steps=10"],
        "resumed": [*DILOCO, f"resume={base.folder}/stopped"],
    }
    return train_on_two(base, {name: RUNS[name][0] for name in QUICK} | diloco)


@pytest.fixture(scope="module")
def others_on_two(base: SimpleNamespace, on_two: Path) -> Path:
    others = {name: overrides for name, (overrides, *_) in RUNS.items() if name not in QUICK}
    return train_on_two(base, others | {"rounded": [*DILOCO, "trainer.strategy.compress=true"]})


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


def test_diloco_equals_a_loop_over_workers_in_plain_torch(on_two: Path, base: SimpleNamespace) -> None:
    cfg = composed(*base.settings, *DILOCO)
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    checkpoint = read(on_two / "diloco" / LAST)
    torch.manual_seed(cfg.seed)
    model = GPT(minigpt.GPTConfig(**{**cfg.model, "vocab_size": corpus.tokenizer.vocab_size})).double()
    workers = [copy.deepcopy(model) for _ in range(2)]
    optimizers = [partial_from_config(cfg.optimizer)(worker) for worker in workers]
    order = WindowOrder(corpus.train.tokens, cfg.model.block_size, cfg.seed)
    options: Any = {"batch_size": cfg.data.batch_size, "first": lambda: 0, "stop": STEPS, "repeat": None}
    options |= {"world_size": 2, "device": torch.device("cpu")}
    batches = [iter(Batches(corpus.tokens("train"), order, rank=rank, **options)) for rank in range(2)]
    rates = column(on_two / "diloco", "learning_rate")
    assert len(rates) == STEPS  # log_every=1
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(STEPS):
        for worker, optimizer, own in zip(workers, optimizers, batches, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rates[step]
            optimizer.zero_grad()
            worker(*next(own)).backward()
            torch.nn.utils.clip_grad_norm_(worker.parameters(), cfg.trainer.gradient_clip_val)
            optimizer.step()
        if (step + 1) % OUTER_EVERY == 0 or (step + 1) % EVAL_EVERY == 0:
            outer_step(list(model.parameters()), [list(worker.parameters()) for worker in workers], momentum)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(checkpoint["state_dict"][f"model.{name}"], weight, msg=name)


@torch.no_grad()
def outer_step(shared: list[Any], workers: list[list[Any]], momentum: list[Tensor]) -> None:
    """Algorithm 1 of https://arxiv.org/abs/2311.08105, with Nesterov momentum as PyTorch defines it."""
    for i, p in enumerate(shared):
        change = p - sum(worker[i] for worker in workers) / len(workers)
        momentum[i] = OUTER_MOMENTUM * momentum[i] + change
        p -= OUTER_LR * (change + OUTER_MOMENTUM * momentum[i])
        for worker in workers:
            worker[i].copy_(p)


def test_diloco_resumes_bit_for_bit(on_two: Path) -> None:
    whole, resumed = (read(on_two / name / LAST)["state_dict"] for name in ("whole", "resumed"))
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


@pytest.mark.slow
def test_compressed_changes_of_diloco_are_rounded(others_on_two: Path) -> None:
    whole, rounded = (read(others_on_two / name / LAST)["state_dict"] for name in ("whole", "rounded"))
    for name, weight in whole.items():
        assert 0 < (rounded[name] - weight).norm() <= 0.01 * weight.norm(), name


@pytest.mark.slow
def test_a_worker_may_leave_and_come_back(on_two: Path, base: SimpleNamespace, tmp_path: Path) -> None:
    alone = [*base.settings, *DILOCO, "trainer.accelerator=cpu", "trainer.devices=1", f"resume={on_two}/stopped"]
    train_on_ranks([[*alone, "max_steps=15", f"hydra.run.dir={tmp_path}/alone"]], ranks=1)
    back = [*base.settings, *DILOCO, "trainer.accelerator=cpu", "trainer.devices=2", f"resume={tmp_path}/alone"]
    train_on_ranks([[*back, f"hydra.run.dir={tmp_path}/back"]])
    summary = json.loads((tmp_path / "back/summary.json").read_text())
    assert (summary["steps"], summary["world_size"]) == (STEPS, 2)
    assert summary["best_val_loss"] < losses(on_two / "stopped")[-1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ema_decay=0.9", "ema_decay must be null with trainer=diloco, got 0.9"),
        ("trainer.strategy.outer_lr=0", "trainer.strategy.outer_lr must be a finite number > 0, got 0"),
    ],
)
def test_settings_that_diloco_cannot_have_are_refused(base: SimpleNamespace, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_run(composed(*base.settings, *DILOCO, override))


def losses(folder: Path) -> list[float]:
    return column(folder, "train_loss") + column(folder, "val_loss")
