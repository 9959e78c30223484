"""Optimizers on several ranks: Muon with replicas (DDP) and shards (FSDP2) as on one rank, and the memory of shards."""

import ctypes
import re
from pathlib import Path

import pytest
import torch
from test_muon import ADAM, OPTIONS
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close

from minigpt.config import GPTConfig
from minigpt.model import GPT
from minigpt.ops import local_shard
from minigpt.optim import adamw, muon

# Keys and values of a width of their own, an MLP of three matrices, rows that the ranks do not divide, ranks that own
# no matrix of a stack, and ranks that hold no row of a matrix.
RANKS, STEPS = 3, 3
MUON = ADAM | OPTIONS
CONFIG = GPTConfig(
    vocab_size=11, block_size=4, n_layer=2, n_head=5, n_kv_head=1, n_embd=10, activation="swiglu", ngram=2
)


def test_shares_and_shards_are_updated_as_on_one_rank(tmp_path: Path) -> None:
    multiprocessing.spawn(update_on_ranks, (RANKS, tmp_path), nprocs=RANKS)
    expected = trained(GPT(CONFIG))
    for way in ("replicas", "shards"):
        found = torch.load(tmp_path / way)
        for name, weight in expected.items():
            assert_close(found[name], weight, msg=lambda text, name=name, way=way: f"{way}, {name}: {text}")


def update_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    sharded = GPT(CONFIG)
    for block in sharded.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (ranks,)))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
    for way, model in (("replicas", GPT(CONFIG)), ("shards", sharded)):
        weights = trained(model, replicas=distributed.group.WORLD if way == "replicas" else None)
        if rank == 0:
            torch.save(weights, folder / way)
    distributed.destroy_process_group()


def trained(model: GPT, replicas: distributed.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """The whole weights after steps with drawn gradients, in float64."""
    generator = torch.Generator().manual_seed(0)
    model.double()
    for p in model.parameters():
        fill(p, torch.randn(p.shape, generator=generator, dtype=torch.float64))
    optimizer = muon(model, **MUON)
    optimizer.replicas = replicas
    for _ in range(STEPS):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            fill(p.grad, torch.randn(p.shape, generator=generator, dtype=torch.float64))
        optimizer.step()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "adamw"), (4, "muon")])
def test_each_rank_holds_its_share_of_gpt2(ranks: int, optimizer: str, tmp_path: Path) -> None:
    multiprocessing.spawn(measure_memory, (ranks, optimizer, tmp_path), nprocs=ranks)
    buffers = {"adamw": 2, "muon": 2 - 85e6 / 124e6}[optimizer]  # of the size of the weights; Muon has 1 of matrices
    ideal = 124e6 * 4 * (1 + buffers) / ranks
    for rank in range(ranks):
        held, resident = map(int, (tmp_path / str(rank)).read_text().split())
        assert held == pytest.approx(ideal, rel=0.02)
        assert resident <= 1.15 * ideal


GPT2 = GPTConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, tie_embeddings=True)


def measure_memory(rank: int, ranks: int, optimizer: str, folder: Path) -> None:
    """Write the bytes of weights and optimizer state of a rank, and by how much its resident memory grew for them."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    with torch.device("meta"):
        model = GPT(GPT2)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = resident_bytes()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            local_shard(p).zero_()
            p.grad = torch.zeros_like(p)
    make = (
        muon(model, **MUON | {"newton_schulz_steps": 1})
        if optimizer == "muon"
        else adamw(model, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    )
    make.step()
    make.zero_grad()
    states = [value for state in make.state.values() for value in state.values() if value.dim()]
    held = sum(local_shard(values).nbytes for values in [*model.parameters(), *states])
    (folder / str(rank)).write_text(f"{held} {resident_bytes() - before}")
    distributed.destroy_process_group()


def resident_bytes() -> int:
    """Resident anonymous memory, after freed memory is returned to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024


@torch.no_grad()
def fill(values: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(values, DTensor):
        whole = distribute_tensor(whole, values.device_mesh, values.placements)
    values.copy_(whole)
