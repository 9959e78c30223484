"""Muon on several ranks, with replicas (DDP) and shards (FSDP2), as on one; shards' memory."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes  # noqa: F401  # its fork server has imported everything
import pytest
import torch
from torch import Tensor, distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close
from training.test_muon import ADAM, OPTIONS

from minigpt.distributed.muon_ranks import Replicas, Shards
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.training.optim import OneRank, adamw, muon

MUON = ADAM | OPTIONS
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
pytestmark = pytest.mark.xdist_group("processes")


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
    """The whole weights after three steps with drawn gradients, in float64."""
    generator = torch.Generator().manual_seed(0)

    def drawn(p: Tensor) -> Tensor:
        whole = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if isinstance(p, DTensor):
            whole = distribute_tensor(whole, p.device_mesh, p.placements)
        return whole

    parameters = dict(model.double().named_parameters())
    for p in parameters.values():
        p.data.copy_(drawn(p))
    optimizer = muon(model, **MUON)
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
    few = MUON | {"newton_schulz_steps": 1}
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
