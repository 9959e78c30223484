"""Batches: each window once per epoch, independent of the number of ranks and of the first step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import composed

from minigpt.data import batches as module
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder, permute
from minigpt.data.token_files import Corpus, Split
from minigpt.data.tokenizer import CharTokenizer
from minigpt.runs.run_config import RunConfig
from minigpt.runs.trainer import TokenDataModule

CPU = torch.device("cpu")


def positions(n):  # tokens equal to their positions, so that a batch shows which windows it has
    return np.arange(n, dtype=np.uint32)


def batches(n=1000, *, block_size=8, seed=0, first=0, **changes):
    options = {"batch_size": 4, "rank": 0, "world_size": 1, "stop": 100, "repeat": 0} | changes
    return Batches(
        positions(n), WindowOrder(n, block_size, seed), first=lambda: first, device=CPU, **options
    )


def validation(n, **changes):
    options = {"block_size": 8, "batch_size": 3, "rank": 0, "world_size": 1} | changes
    return ValidationBatches(positions(n), device=CPU, **options)


def starts(batches):
    return [tokens[:, 0].tolist() for tokens, _ in batches]


def test_permute_gives_uncorrelated_permutations():
    keys = np.random.default_rng(0).integers(0, 1 << 64, (20, 4), dtype=np.uint64)
    for n in (1, 2, 3, 15, 16, 17, 65_537, 10_000):
        orders = [permute(np.arange(n), n, key) for key in keys]
        assert (np.sort(orders) == np.arange(n)).all()
    for order, other in zip(orders, orders[1:] + orders[:1], strict=True):
        assert (np.diff(order) == 1).mean() < 0.01  # by chance one in 10,000
        for uncorrelated in (np.arange(n), other):
            assert (order == uncorrelated).mean() < 0.01
            # Five standard deviations of the correlation of n independent draws.
            assert abs(np.corrcoef(order, uncorrelated)[0, 1]) < 5 / np.sqrt(n)


def epochs_of(order, number):
    return order.starts(np.arange(number * order.n_windows)).reshape(number, order.n_windows)


def counts_of(epochs, n, block_size):
    """Count how often each token is a target in each epoch, (epochs, n)."""
    counts = np.zeros((len(epochs), n), dtype=int)
    for row, starts in zip(counts, epochs, strict=True):
        np.add.at(row, starts[:, None] + np.arange(1, block_size + 1), 1)
    return counts


def test_all_orders_of_a_few_windows_are_equally_likely():
    # By their place in the text
    windows = epochs_of(WindowOrder(21, 8, seed=0), 3000).argsort().argsort()
    assert windows.shape == (3000, 3)
    deviation = np.sqrt(3000 / 3 * (1 - 1 / 3))  # of a count, when all are equally likely
    for position in range(3):
        assert abs(np.bincount(windows[:, position], minlength=3) - 1000).max() < 4.5 * deviation


def test_epochs_differ_in_order_and_offset_and_a_huge_text_needs_no_list_of_windows():
    epochs = epochs_of(WindowOrder(100_000, 64, seed=0), 20)
    assert len({tuple(row.argsort(kind="stable")) for row in epochs}) == 20
    for window in (20, 700, 1540):  # all but those near the ends
        assert len(set(np.sort(epochs)[:, window] % 64)) > 10
    huge = WindowOrder(10**12, 1024, seed=0).starts(np.arange(10_000) + 10**6)
    assert len(np.unique(huge)) == 10_000
    assert 0 <= huge.min() < 10**10 < 10**12 - 10**10 < huge.max() < 10**12 - 1024


@given(st.integers(1, 64), st.integers(1, 2000), st.integers(1, 9), st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_each_epoch_has_every_token_but_the_first_as_a_target(block_size, more, batch_size, seed):
    n = block_size + more
    windows = WindowOrder(n, block_size, seed).n_windows
    given = {"block_size": block_size, "batch_size": batch_size, "seed": seed}
    run = batches(n, stop=-(-3 * windows // batch_size), **given)
    read = np.concatenate(starts(run))[: 3 * windows].reshape(3, windows)  # in the order of reading
    assert read.min() >= 0
    assert read.max() < n - block_size  # the last target is the token after the window
    counts = counts_of(read, n, block_size)
    assert counts[:, 0].max() == 0
    assert counts[:, 1:].min() == 1 or windows == 2
    twice = counts[:, 1:].sum(axis=1) - (n - 1)
    assert (twice >= block_size / 2).all()  # so many offsets
    assert (twice < 1.5 * block_size).all()


@pytest.mark.parametrize(
    ("n", "block_size", "most"),
    # Near an end, where two windows may overlap at 8 places: 9/8. In a short text the ends are
    # everywhere.
    [
        (20_000, 128, 9 / 8),
        (3071, 64, 9 / 8),
        (3071, 1024, 2.1),
        (360, 128, 2.1),
        (3072, 1024, 2.1),
        (130, 128, 2),
    ],
)
def test_over_epochs_all_targets_are_about_equally_frequent(n, block_size, most):
    epochs = epochs_of(WindowOrder(n, block_size, seed=1), 1000)
    counts = counts_of(epochs, n, block_size)[:, 1:].mean(axis=0)
    assert counts.min() >= 1
    # Standard deviations of a mean of ones and twos
    assert counts.max() <= most + 5 * 0.5 / np.sqrt(1000)


def test_batches_from_a_step_equal_those_of_a_run_from_the_start_and_repeat(monkeypatch):
    monkeypatch.setattr(module, "_ROWS_PER_LOOKUP", 32)  # eight batches at a time
    whole = starts(batches(stop=30))
    for k in (7, 8, 9, 30):
        assert starts(batches(stop=30, first=k)) == whole[k:]
    assert starts(batches(stop=30, seed=1)) != whole
    for repeat in (1, 3):
        repeated = starts(batches(repeat=repeat, first=5, stop=20))
        assert repeated == [whole[i % repeat] for i in range(5, 20)]


@pytest.mark.parametrize(("world_size", "sizes"), [(4, [3] * 4), (5, [3, 3, 2, 2, 2])])
def test_ranks_read_disjoint_parts_of_the_single_rank_batch_and_weights_correct_their_means(
    world_size, sizes
):
    spread = {"batch_size": 12, "world_size": world_size}
    shares = [batches(rank=rank, **spread) for rank in range(world_size)]
    for whole, *parts in zip(starts(batches(batch_size=12)), *map(starts, shares), strict=True):
        assert [len(part) for part in parts] == sizes
        assert sorted(start for part in parts for start in part) == sorted(whole)
        weighted = [share.weight * np.mean(part) for share, part in zip(shares, parts, strict=True)]
        assert np.mean(weighted) == pytest.approx(np.mean(whole))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 16), st.integers(2, 300), st.integers(1, 9))
def test_validation_scores_every_target_once_on_any_number_of_ranks(block_size, n, batch_size):
    for world_size in (1, 2, 3):
        counts = set()
        scored = []
        for rank in range(world_size):
            given = {"block_size": block_size, "batch_size": batch_size, "world_size": world_size}
            share = validation(n, rank=rank, **given)
            read = list(share)
            counts |= {len(share), len(read)}
            for tokens, targets in read:
                assert tokens.shape == targets.shape == (len(tokens), block_size)
                assert len(tokens) > 0  # kernels and compiled models may refuse an empty batch
                inside = targets != -100
                assert torch.equal(targets[inside], tokens[inside] + 1)
                counted = tokens[:, :1] + torch.arange(block_size)
                assert torch.equal(tokens[inside], counted[inside])
                assert not (tokens[inside.any(dim=1), 0] % block_size).any()  # adjacent windows
                scored += targets[inside].tolist()
        assert len(counts) == 1  # a rank with one batch more would wait for the others
        assert sorted(scored) == list(range(1, n))


def test_a_maximum_of_batches_is_spread_evenly_over_the_validation_split():
    for n_batches, expected in (
        (1, [0, 32, 64]),
        (2, [0, 16, 32, 48, 64, 80]),
        (9, [*range(0, 96, 8)]),
    ):
        share = validation(97, n_batches=n_batches)
        assert [start for batch in starts(share) for start in batch] == expected


def test_a_trainer_gets_the_batches_of_its_settings_from_its_step(tmp_path):
    positions(500).astype(np.uint16).tofile(tmp_path / "train.bin")
    split = Split([tmp_path / "train.bin"], 500, 500, 1)
    data = ["data.batch_size=4", "data.overfit_batches=3", "data.eval_batch_size=5"]
    steps = ["trainer.accumulate_grad_batches=5", "eval_batches=2", "max_steps=4", "seed=3"]
    run = RunConfig.from_hydra(composed(*data, *steps))
    corpus = Corpus("mine", "", CharTokenizer("".join(map(chr, range(500)))), split, split)
    module = TokenDataModule(corpus, run, block_size=8)
    strategy = SimpleNamespace(root_device=CPU)
    module.trainer = SimpleNamespace(world_size=2, global_rank=1, strategy=strategy, global_step=2)
    expected = batches(500, seed=3, rank=1, world_size=2, first=10, stop=20, repeat=3)
    assert starts(module.train_dataloader()) == starts(expected)
    validated = validation(500, batch_size=5, n_batches=2, rank=1, world_size=2)
    assert starts(module.val_dataloader()) == starts(validated)
