"""Batches: each window once per epoch, independent of the number of ranks and of the first step."""

from itertools import islice

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from minigpt import GPT, GPTConfig
from minigpt.data import batches as module
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder, permute
from minigpt.data.shards import local_shard
from minigpt.data.token_files import Corpus, Split
from minigpt.data.tokenizer import CharTokenizer
from minigpt.runs.trainer import TokenDataModule
from minigpt.utils.errors import UserError

CPU = torch.device("cpu")


def positions(n):
    """Return tokens equal to their positions, so that a batch shows which windows it has."""
    return np.arange(n, dtype=np.uint32)


def keys(seed):
    return np.random.default_rng(seed).integers(0, 1 << 64, 4, dtype=np.uint64)


def batches(n=1000, *, block_size=8, seed=0, batch_size=4, rank=0, world_size=1, first=0, stop=100, repeat=0):
    order = WindowOrder(n, block_size, seed)
    return Batches(
        positions(n),
        order,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        first=lambda: first,
        stop=stop,
        repeat=repeat,
        device=CPU,
    )


def starts(batches):
    """Return the first token of each window, per batch."""
    return [tokens[:, 0].tolist() for tokens, _ in batches]


# A permutation of range(n).


@given(st.integers(1, 3000), st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4))
def test_permute_is_a_bijection(n, keys):
    image = permute(np.arange(n), n, np.array(keys, dtype=np.uint64))
    assert np.array_equal(np.sort(image), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 1023, 1024, 1025, 65_536, 65_537])
def test_permute_is_a_bijection_around_powers_of_two(n):
    assert np.array_equal(np.sort(permute(np.arange(n), n, keys(n))), np.arange(n))


def test_permutations_of_different_keys_are_uncorrelated():
    n = 10_000
    orders = [permute(np.arange(n), n, keys(seed)) for seed in range(20)]
    for order, other in zip(orders, orders[1:] + orders[:1], strict=True):
        assert (order == other).mean() < 0.01  # by chance one in 10,000
        assert (np.diff(order) == 1).mean() < 0.01
        # Five standard deviations of the correlation of n independent draws.
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / np.sqrt(n)
        assert abs(np.corrcoef(order, other)[0, 1]) < 5 / np.sqrt(n)


# Windows.


@given(st.integers(1, 64), st.integers(1, 2000), st.integers(0, 2**32), st.integers(0, 5))
def test_an_epoch_covers_the_text_with_adjacent_windows(block_size, more, seed, epoch):
    n_tokens = block_size + more
    order = WindowOrder(n_tokens, block_size, seed)
    found = np.sort(order.starts(epoch * order.n_windows + np.arange(order.n_windows)))
    assert (np.diff(found) == block_size).all()  # no overlap, no gap
    assert 0 <= found[0] < block_size
    end = found[-1] + block_size + 1  # the last target is the token after the window
    assert end <= n_tokens
    assert n_tokens - (end - 1 - found[0]) <= 2 * block_size  # skipped at both ends


@pytest.mark.parametrize("n_tokens", [9, 10, 15, 16, 17, 24, 25])
def test_a_text_barely_longer_than_a_block_is_read_to_both_ends(n_tokens):
    order = WindowOrder(n_tokens, 8, seed=0)
    found = order.starts(np.arange(200 * order.n_windows))
    assert found.min() == 0
    assert n_tokens - 1 <= found.max() + 8 + 1 <= n_tokens


def test_epochs_differ_in_order_and_offset():
    order = WindowOrder(100_000, 64, seed=0)
    epochs = order.starts(np.arange(20 * order.n_windows)).reshape(20, order.n_windows)
    offsets = epochs.min(axis=1)
    windows = (epochs - offsets[:, None]) // 64
    assert len(set(offsets)) > 10
    assert len({tuple(window) for window in windows}) == 20


@pytest.mark.parametrize("n_windows", [2, 3, 4, 7])
def test_all_orders_of_a_few_windows_are_equally_likely(n_windows):
    epochs = 3000
    order = WindowOrder((n_windows + 1) * 8, 8, seed=0)
    assert order.n_windows == n_windows
    windows = order.starts(np.arange(epochs * n_windows)).reshape(epochs, n_windows) // 8
    for position in range(n_windows):
        counts = np.bincount(windows[:, position], minlength=n_windows)
        deviation = np.sqrt(epochs / n_windows * (1 - 1 / n_windows))  # of a count, when all are equally likely
        assert abs(counts - epochs / n_windows).max() < 4.5 * deviation


def test_window_starts_can_be_indexed_in_any_shape_and_order():
    order = WindowOrder(1000, 8, seed=0)
    index = np.random.default_rng(0).integers(0, 1000, (5, 7))  # of several epochs
    one_by_one = [int(order.starts(np.array([i]))[0]) for i in index.flat]
    assert order.starts(index).shape == (5, 7)
    assert order.starts(index).ravel().tolist() == one_by_one


def test_the_order_of_a_huge_text_needs_no_list_of_windows():
    n_tokens, block_size = 10**12, 1024
    order = WindowOrder(n_tokens, block_size, seed=0)
    found = order.starts(np.arange(10_000) + 10**6)
    assert len(np.unique(found)) == 10_000
    assert found.min() >= 0
    assert found.max() + block_size + 1 <= n_tokens
    counts, _ = np.histogram(found, bins=10, range=(0, n_tokens))
    assert abs(counts - 1000).max() < 150  # five standard deviations of an even spread


# Batches.


@given(st.integers(1, 16), st.integers(1, 400), st.integers(1, 9), st.integers(0, 1000))
@settings(deadline=None)
def test_each_window_is_read_once_per_epoch(block_size, more, batch_size, seed):
    n = block_size + more
    windows = WindowOrder(n, block_size, seed).n_windows
    run = batches(n, block_size=block_size, batch_size=batch_size, seed=seed, stop=-(-3 * windows // batch_size))
    read = np.concatenate([tokens.numpy() for tokens, _ in run])  # rows in the order of reading
    for epoch in range(3):
        rows = read[epoch * windows : (epoch + 1) * windows]
        assert len(np.unique(rows)) == rows.size == windows * block_size


def test_targets_are_the_tokens_shifted_by_one():
    text = np.random.default_rng(0).integers(0, 65, 500).astype(np.uint16)
    options = {"rank": 0, "world_size": 1, "first": lambda: 0, "stop": 30, "repeat": 0, "device": CPU}
    run = Batches(text, WindowOrder(500, 16, seed=1), batch_size=5, **options)
    places = batches(500, block_size=16, seed=1, batch_size=5, stop=30)
    for (tokens, targets), first in zip(run, starts(places), strict=True):
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.tolist() == [text[i : i + 16].tolist() for i in first]
        assert targets.tolist() == [text[i + 1 : i + 17].tolist() for i in first]


@pytest.mark.parametrize("k", [1, 7, 8, 9, 29, 30])
def test_batches_from_step_k_equal_those_of_a_run_from_the_start(monkeypatch, k):
    monkeypatch.setattr(module, "_ROWS_PER_LOOKUP", 32)  # eight batches at a time
    whole = starts(batches(stop=30))
    assert len(whole) == 30
    assert starts(batches(stop=30, first=k)) == whole[k:]


def test_batches_depend_on_the_seed_alone():
    torch.manual_seed(1)
    np.random.seed(1)
    first = starts(batches(seed=5))
    run = batches(seed=5)
    assert starts(islice(run, 10)) == first[:10]
    assert starts(run) == first  # read again from the start
    assert starts(batches(seed=6)) != first


def test_a_longer_run_begins_with_the_batches_of_a_shorter_one():
    assert starts(batches(stop=2000))[:50] == starts(batches(stop=50))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_read_disjoint_parts_of_the_single_rank_batch(world_size):
    alone = starts(batches(batch_size=12))
    ranks = [starts(batches(batch_size=12, rank=rank, world_size=world_size)) for rank in range(world_size)]
    for whole, *shares in zip(alone, *ranks, strict=True):
        assert {len(share) for share in shares} == {12 // world_size}
        assert sorted(start for share in shares for start in share) == sorted(whole)


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("first", [0, 5])
def test_repeat_cycles_through_the_first_batches(repeat, first):
    once = starts(batches())[:repeat]
    assert starts(batches(repeat=repeat, first=first, stop=20)) == [once[i % repeat] for i in range(first, 20)]


# Validation.


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 16), st.integers(2, 300), st.integers(1, 9))
def test_validation_scores_every_target_once_on_any_number_of_ranks(block_size, n, batch_size):
    for world_size in (1, 2, 3):
        counts, scored = set(), []
        for rank in range(world_size):
            options = {"block_size": block_size, "batch_size": batch_size, "rank": rank, "world_size": world_size}
            share = ValidationBatches(positions(n), **options, device=CPU)
            read = list(share)
            assert len(share) == len(read)
            counts.add(len(read))
            for tokens, targets in read:
                assert tokens.shape == targets.shape == (len(tokens), block_size)
                inside = targets != -100
                assert torch.equal(targets[inside], tokens[inside] + 1)
                assert torch.equal(tokens[inside], (tokens[:, :1] + torch.arange(block_size))[inside])
                assert not (tokens[:, 0] % block_size).any()  # adjacent windows
                scored += targets[inside].tolist()
        assert len(counts) == 1  # a rank with one batch more would wait for the others
        assert sorted(scored) == list(range(1, n))


def test_padding_of_the_last_window_does_not_change_the_loss():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=50, n_layer=1, n_head=2, n_embd=16))
    share = ValidationBatches(positions(50), block_size=8, batch_size=3, rank=0, world_size=1, device=CPU)
    found = sum(model(*batch, reduction="sum").item() for batch in share)
    windows = [torch.arange(start, min(start + 9, 50)) for start in range(0, 49, 8)]
    assert len(windows[-1]) == 2
    expected = sum(model(window[None, :-1], window[None, 1:], reduction="sum").item() for window in windows)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("n_batches", "expected"), [(1, [0, 32, 64]), (2, [0, 16, 32, 48, 64, 80]), (9, range(0, 96, 8))]
)
def test_a_maximum_of_batches_is_spread_evenly_over_the_validation_split(n_batches, expected):
    options = {"block_size": 8, "batch_size": 3, "rank": 0, "world_size": 1, "device": CPU}
    share = ValidationBatches(positions(97), **options, n_batches=n_batches)
    assert [start for batch in starts(share) for start in batch] == list(expected)


def test_validation_batches_are_deterministic():
    share = ValidationBatches(positions(100), block_size=8, batch_size=3, rank=0, world_size=1, device=CPU)
    assert starts(share) == starts(share)


# In a Trainer.


class Recorder(L.LightningModule):
    """Record the windows of each training step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read = []

    def training_step(self, batch, batch_idx):
        self.read.append(batch[0][:, 0].tolist())
        return self.weight * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def token_data(folder, **changes):
    positions(500).astype(np.uint16).tofile(folder / "train.bin")
    (folder / "val.bin").touch()
    corpus = Corpus(
        name="mine",
        sha256="",
        tokenizer=CharTokenizer.of(map(chr, range(500))),
        dtype="uint16",
        train=Split([local_shard(folder / "train.bin")], 500, 500, 1),
        val=Split([local_shard(folder / "val.bin")], 0, 0, 0),
        provenance={},
    )
    data = {"batch_size": 4, "overfit_batches": 0, **changes}
    cfg = {"data": data, "model": {"block_size": 8}, "trainer": {"accumulate_grad_batches": 1}}
    return TokenDataModule(corpus, OmegaConf.create(cfg | {"max_steps": 20, "seed": 3}))


def trainer(folder, max_steps):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(
        accelerator="cpu", max_steps=max_steps, default_root_dir=folder, enable_model_summary=False, **quiet
    )


def test_a_resumed_trainer_reads_the_batches_of_an_uninterrupted_one(tmp_path):
    begun, resumed = Recorder(), Recorder()
    begin = trainer(tmp_path, 7)
    begin.fit(begun, token_data(tmp_path))
    begin.save_checkpoint(tmp_path / "after_seven.safetensors")
    trainer(tmp_path, 20).fit(resumed, token_data(tmp_path), ckpt_path=tmp_path / "after_seven.safetensors")
    assert begun.read + resumed.read == starts(batches(500, block_size=8, seed=3, stop=20))
    assert len(resumed.read) == 13


def test_a_trainer_with_overfit_batches_repeats_them(tmp_path):
    recorder = Recorder()
    trainer(tmp_path, 5).fit(recorder, token_data(tmp_path, overfit_batches=2))
    first, second = starts(batches(500, block_size=8, seed=3, stop=2))
    assert recorder.read == [first, second, first, second, first]


def test_the_mean_over_ranks_of_weighted_means_is_the_mean_over_a_batch_that_they_share_unevenly():
    shares = [batches(batch_size=12, rank=rank, world_size=5) for rank in range(5)]
    values = [np.array(next(iter(starts_of_rank))) for starts_of_rank in map(starts, shares)]
    assert [len(share) for share in values] == [3, 3, 2, 2, 2]
    weighted = [share.weight * mine.mean() for share, mine in zip(shares, values, strict=True)]
    assert np.mean(weighted) == pytest.approx(np.mean(starts(batches(batch_size=12))[0]))


def test_a_batch_with_fewer_windows_than_processes_raises(tmp_path):
    module = token_data(tmp_path, batch_size=1)
    module.trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match=r"data\.batch_size must be ≥ 2, the number of processes, got 1"):
        module.train_dataloader()
