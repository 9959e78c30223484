"""DDP and FSDP2 on CPU processes, compared with one process; Muon and memory of shards."""

import ctypes
import os
import platform
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes  # noqa: F401  # its fork server has imported everything
import pytest
import torch
from processes import Script
from ranks import train_on_ranks
from small_runs import column, small_run
from torch import Tensor, distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close
from training.test_optim import ADAM, OPTIONS

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.distributed.muon_ranks import Replicas, Shards
from minigpt.distributed.process_group import LOST_RANK, _set_as_torchrun, first_error
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.runs.run_dir import read_summary
from minigpt.training.optim import OneRank, adamw, muon
from minigpt.utils.errors import RunError
from minigpt.utils.ranks import SRUN, TORCHRUN

# The last batch of the 125 windows of the validation split has one, so that a rank has none.
SETTINGS = ["max_steps=6", "eval_every=3", "log_every=1", "data.eval_batch_size=62"]
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
SLOW = ["gathered", "recomputed", "shared", "reduced"]
TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]
FAILS = ["trainer=ddp", *TWO, "+callbacks.fail._target_=ranks.Fail"]
OWN = (
    f"rank 1 on host {platform.node()}: RuntimeError: a bad batch (MINIGPT_TRACEBACK=1 shows where)"
)
pytestmark = pytest.mark.xdist_group("processes")


def overrides(name: str, text: Path, folder: Path) -> list[str]:
    # Return the overrides of a run on two ranks; its folder is at the microsecond of rank 0
    spread, settings, _ = RUNS[name]
    place = f"hydra.run.dir={folder}/{name}/${{now:%f}}"
    return small_run(text, folder / "data", *SETTINGS, *settings, *spread, *TWO, place)


def check_as_one(name: str, folder: Path, trained: Callable[..., Path]) -> None:
    _, settings, tolerance = RUNS[name]
    (two,) = (folder / name).glob("[0-9]*")
    one = trained(*SETTINGS, *settings)
    assert losses(two) == pytest.approx(losses(one), rel=tolerance)
    assert name != "compressed" or losses(two) != pytest.approx(losses(one), rel=1e-8)  # rounded
    found = read(two / LAST)["state_dict"]
    for key, expected in read(one / LAST)["state_dict"].items():
        assert (found[key] - expected).norm() <= 30 * tolerance * expected.norm(), key


@pytest.fixture(scope="module")
def together(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    runs = [overrides(name, text, folder) for name in ("ddp", "sharded")]
    fails = [*FAILS, "+callbacks.fail.killed=false", f"hydra.run.dir={folder}/failed"]
    train_on_ranks([*runs, small_run(text, folder / "data", *fails)], codes=[1, 1])
    return folder


@pytest.mark.parametrize("name", ["ddp", "sharded"])
def test_two_ranks_train_as_one(name, together, trained):
    check_as_one(name, together, trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("compressed", marks=pytest.mark.ci), *SLOW])
def test_two_ranks_train_as_one_also_otherwise(name, text, trained, tmp_path):
    train_on_ranks([overrides(name, text, tmp_path)])
    check_as_one(name, tmp_path, trained)


def test_the_own_error_of_a_rank_is_the_reason(together):
    summary = read_summary(together / "failed")
    assert (summary["status"], summary["reason"], summary["steps"]) == ("failed", OWN, 3)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_run_resumes_with_any_strategy_as_if_it_had_not_paused(
    train, trained, tmp_path, optimizer
):
    # With blocks and embeddings that have several names, and averages of the weights
    model = ["model.layer_repeats=2", "model.tie_embeddings=true", "ema_decay=0.9"]
    steps = ["max_steps=8", "eval_every=2", "log_every=1", "schedule.warmup_steps=1"]
    same = [*model, *steps, f"optimizer={optimizer}", "resume=auto"]
    whole = trained(*same)
    for strategy, pause_at in (("auto", 2), ("fsdp", 4), ("fsdp", 6), ("ddp", "null")):
        spread = [] if strategy == "auto" else [f"trainer={strategy}", "trainer.accelerator=cpu"]
        run = train(*same, *spread, f"pause_at={pause_at}").folder
    assert losses(run) == pytest.approx(losses(whole), rel=1e-6)
    found = read(run / LAST)
    for kind in ("state_dict", "unaveraged"):
        weights = read(whole / LAST)[kind]
        assert found[kind].keys() == weights.keys()
        for name, expected in weights.items():
            assert_close(found[kind][name], expected, rtol=1e-5, atol=1e-6, msg=f"{kind} {name}")


@pytest.mark.slow
def test_the_reason_names_a_lost_rank_that_was_killed(small, tmp_path):
    run = [*small, *FAILS, "+callbacks.fail.killed=true", f"hydra.run.dir={tmp_path}/run"]
    train_on_ranks([run], codes=[1, 128 + signal.SIGKILL])
    assert read_summary(tmp_path / "run")["reason"].endswith(f"; {LOST_RANK}")


@pytest.mark.parametrize(
    "text",
    [
        "[/gloo/transport/tcp/pair.cc:538] Connection closed by peer",
        "Application timeout caused pair closure",
    ],
)
def test_the_errors_of_gloo_name_a_lost_rank(text, tmp_path):
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        error = first_error(RuntimeError(text))
    finally:
        distributed.destroy_process_group()
    assert (type(error), str(error)) == (RunError, f"{text}; {LOST_RANK}")


@pytest.mark.slow
def test_the_own_error_of_a_rank_that_lightning_started_is_the_reason(
    launch, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    fails = [*FAILS, "+callbacks.fail.killed=false", f"hydra.run.dir={tmp_path}/run"]
    ended = launch("train.py", *fails, cold_start=True)
    assert (ended.returncode, f"error: {OWN}" in ended.stderr.splitlines()) == (1, True)
    assert read_summary(tmp_path / "run")["reason"] == OWN


@pytest.mark.slow
def test_ranks_of_srun_train_as_one(small, trained, tmp_path):
    # Without --ntasks-per-node, in a job with more tasks, and with variables of its script
    spread = ["trainer=ddp", "trainer.accelerator=cpu", f"hydra.run.dir={tmp_path}/two"]
    group = {
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NAME": "interactive",
    }
    with socket.socket() as free:
        free.bind(("", 0))
        group |= {"WORLD_SIZE": "4", "RANK": "0", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = []
    for rank in "01":
        env = group | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        output = tmp_path / f"rank{rank}"
        ranks.append(Script("train.py", *small, *SETTINGS, *spread, output=output, env=env))
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(trained(*SETTINGS)), rel=1e-6)


@pytest.mark.parametrize("nodes", ["a7", "a[7-9]", "a[7,9],b1", "a7,a[8-9]"])
def test_the_first_host_of_a_step_is_where_its_ranks_meet(nodes, monkeypatch):
    for name in (*SRUN, *TORCHRUN, "GROUP_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.setenv(name, "1")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in zip(SRUN, ["3", "4", "1", "1", "2", nodes], strict=True):
        monkeypatch.setenv(name, value)
    _set_as_torchrun()
    found = {name: os.environ[name] for name in TORCHRUN if name != "MASTER_PORT"}
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert found == {**ranks, "MASTER_ADDR": "a7", "TORCHELASTIC_RUN_ID": "srun"}
    port = os.environ.pop("MASTER_PORT")
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    _set_as_torchrun()
    assert os.environ["MASTER_PORT"] != port


def losses(folder: Path) -> list[float]:
    return column(folder, "train_loss") + column(folder, "val_loss")


MUON_OPTIONS = ADAM | OPTIONS
# Keys and values of a width of their own, an MLP of three matrices, rows that the ranks do not
# divide, ranks that own no matrix of a stack, and ranks that hold no row of a matrix.
SMALL = {
    "vocab_size": 11,
    "block_size": 4,
    "n_layer": 2,
    "n_head": 5,
    "n_kv_head": 1,
    "n_embd": 10,
    "ngram": 2,
}
CONFIG = GPTConfig(**SMALL, activation="swiglu")
GPT2 = GPTConfig(
    vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, tie_embeddings=True
)


def start(ranks: int, function: Callable[..., None], folder: Path, *arguments: object) -> None:
    given = (function, ranks, folder, *arguments)
    multiprocessing.start_processes(join, given, nprocs=ranks, start_method="forkserver")


def join(
    rank: int, function: Callable[..., None], ranks: int, folder: Path, *arguments: object
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    function(folder / str(rank), *arguments)
    distributed.destroy_process_group()


def shard(model: GPT) -> GPT:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return model


def test_shares_and_shards_are_updated_as_on_one_rank(tmp_path):
    start(3, train_both, tmp_path)
    one = trained(GPT(CONFIG))
    for rank in range(3):
        assert_close(torch.load(tmp_path / str(rank)), {"replicas": one, "shards": one})


def train_both(file: Path) -> None:
    world = distributed.group.WORLD
    replicas = trained(GPT(CONFIG), Replicas(world))
    torch.save({"replicas": replicas, "shards": trained(shard(GPT(CONFIG)), Shards(world))}, file)


def trained(model: GPT, ranks: OneRank | None = None) -> dict[str, Tensor]:
    # The whole weights after three steps with drawn gradients, in float64
    generator = torch.Generator().manual_seed(0)

    def drawn(p: Tensor) -> Tensor:
        whole = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if isinstance(p, DTensor):
            whole = distribute_tensor(whole, p.device_mesh, p.placements)
        return whole

    parameters = dict(model.double().named_parameters())
    for p in parameters.values():
        p.data.copy_(drawn(p))
    optimizer = muon(model, **MUON_OPTIONS)
    optimizer.ranks = ranks or OneRank()
    for _ in range(3):
        for p in parameters.values():
            p.grad = drawn(p)
        optimizer.step()
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in parameters.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "adamw"), (4, "muon")])
def test_each_rank_holds_its_share_of_gpt2(ranks, optimizer, tmp_path):
    start(ranks, measure_memory, tmp_path, optimizer)
    # Of the size of the weights; Muon has 1 of matrices
    ideal = 124e6 * 4 * (1 + {"adamw": 2, "muon": 2 - 85e6 / 124e6}[optimizer]) / ranks
    for rank in range(ranks):
        used = int((tmp_path / str(rank)).read_text(encoding="utf-8"))
        assert 0.98 * ideal <= used <= 1.15 * ideal


def measure_memory(file: Path, optimizer: str) -> None:
    with torch.device("meta"):
        model = GPT(GPT2)
    shard(model)
    before = resident_bytes()
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    adam = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
    few = MUON_OPTIONS | {"newton_schulz_steps": 1}
    made: Any = muon(model, **few) if optimizer == "muon" else adamw(model, **adam)
    if optimizer == "muon":
        with pytest.raises(TypeError, match="set Muon"):
            made.step()
        made.ranks = Shards(distributed.group.WORLD)
    made.step()
    made.zero_grad()
    file.write_text(f"{resident_bytes() - before}", encoding="utf-8")


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024
