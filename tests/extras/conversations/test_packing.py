"""Windows of conversations against a packer of plain Python, and the batches that read them."""

import tempfile
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from small_runs import composed

from minigpt.data.batches import IGNORE_INDEX, Batches, WindowOrder
from minigpt.data.token_files import Split
from minigpt.data.tokenizer import CharTokenizer
from minigpt.extras.conversations.corpus import ConversationCorpus
from minigpt.extras.conversations.encoding import (
    IN_ANSWER,
    IN_CONTEXT,
    KINDS,
    STARTS_CONVERSATION,
    STARTS_QUESTION,
)
from minigpt.runs.run_config import RunConfig
from minigpt.runs.trainer import TokenDataModule

CPU = torch.device("cpu")
# So many that the id of each token is its place
TOKENIZER = CharTokenizer("".join(map(chr, range(2000))))
# Of a conversation: the tokens of a question and of its answer
TURNS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7)), min_size=1, max_size=4)
# Of 7, 9, 12 and 28 tokens
MANY = [[(3, 4)], [(2, 2), (2, 3)], [(1, 6), (4, 1)], [(1, 1), (9, 2), (2, 13)]] * 5
BLOCK_SIZE = 12


def make_corpus(folder, train, val=()):
    """Write the token files of conversations, lists of turns."""
    splits = []
    for name, conversations in (("train", train), ("val", val or train)):
        kinds = []
        for turns in conversations:
            start = STARTS_CONVERSATION
            for question, answer in turns:
                kinds += [start, *[IN_CONTEXT] * (question - 1), *[IN_ANSWER] * answer]
                start = STARTS_QUESTION
        file = Path(folder) / f"{name}.bin"
        (np.arange(len(kinds)) * KINDS + kinds).astype(np.uint16).tofile(file)
        n_targets = kinds.count(IN_ANSWER)
        splits.append(Split([file], len(kinds), n_targets, len(conversations), n_targets))
    return ConversationCorpus("mine", "", TOKENIZER, *splits)


def expected_rows(conversations, block_size):
    """Return (tokens, targets) of every window, as the docstring of the packer describes them."""
    # Where windows begin and end, and which tokens are answers
    windows = []
    answers = set()
    free = 0  # tokens for which the last window has room
    place = 0
    for turns in conversations:
        ends = list(accumulate(map(sum, turns), initial=place))[1:]
        for end, (_, answer) in zip(ends, turns, strict=True):
            answers |= {*range(end - answer, end)}
        while ends:
            whole = ends[-1] - place
            if whole <= free:
                windows[-1][1] = ends[-1]
                free -= whole
                taken = len(ends)
            else:
                fitting = [end for end in ends if end - place <= block_size + 1]
                taken = max(1, len(fitting))
                windows.append([place, min(ends[taken - 1], place + block_size + 1)])
                free = block_size + 1 - whole if taken == len(ends) else 0
            place = ends[taken - 1]
            del ends[:taken]
    # Their tokens, with repetitions of the first one
    rows = []
    for begin, end in windows:
        if answers & {*range(begin, end)}:
            ids = [*range(begin, end), *[begin] * (block_size + 1 - (end - begin))]
            is_target = [i < end - begin and ids[i] in answers for i in range(1, block_size + 1)]
            targets = np.where(is_target, ids[1:], IGNORE_INDEX).tolist()
            rows.append((ids[:-1], targets))
    return rows


def rows_of(batch):
    tokens, targets = batch[:2]
    assert tokens.dtype == targets.dtype == torch.int64
    return [*zip(tokens.tolist(), targets.tolist(), strict=True)]


def data_of(corpus, *overrides, block_size=BLOCK_SIZE, rank=0, world_size=1, step=0):
    """Return the batches of a rank as the trainer gets them."""
    module = TokenDataModule(corpus, RunConfig.from_hydra(composed(*overrides)), block_size)
    ranks = {"global_rank": rank, "world_size": world_size, "global_step": step}
    module.trainer = SimpleNamespace(**ranks, strategy=SimpleNamespace(root_device=CPU))
    return module


@settings(deadline=None, max_examples=150)
@given(st.lists(TURNS, min_size=1, max_size=9), st.integers(1, 24), st.integers(0, 9))
def test_every_epoch_reads_each_window_of_the_rules_once(conversations, block_size, seed):
    expected = expected_rows(conversations, block_size)
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(folder, conversations)
        if not expected:
            refused("no answer of the training split begins", corpus.check_length, block_size)
            return
        tokens = corpus.windows("train", block_size)
        order = WindowOrder(len(tokens), block_size, seed, moves=False)
        ranks = {"rank": 0, "world_size": 1, "device": CPU}
        steps = {"first": lambda: 0, "stop": 3, "repeat": 0}
        epochs = [*Batches(tokens, order, batch_size=len(expected), **ranks, **steps)]
    assert [sorted(rows_of(epoch)) for epoch in epochs] == [sorted(expected)] * 3
    # What follows from the rules: conversations that fit are whole, and no answer is read twice
    seen = [place for _, targets in expected for place in targets if place >= 0]
    assert tokens.windows.n_targets.sum() == len(seen) == len({*seen})
    n_long = 0
    end = 0
    for turns in conversations:
        end += sum(map(sum, turns))
        own = {*range(end - sum(map(sum, turns)), end)}
        if len(own) <= block_size + 1:
            answers = sum(answer for _, answer in turns)
            assert sorted(len(own & {*row[1]}) for row in expected)[-1:] == [answers] or not answers
        n_long += len(own) > block_size + 1
    assert tokens.windows.n_long == n_long


def test_answers_that_are_cut_are_counted(tmp_path, capsys):
    # Five last answers of 13 tokens after 2, of which a window of 13 has 11; and one after 30
    corpus = make_corpus(tmp_path, [*MANY, [(30, 5)]], MANY[:2])
    corpus.check_length(BLOCK_SIZE)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "warning: 6 of 21 training conversations are longer than model.block_size + 1 = 13 tokens: "
        "they are cut before questions, and 15 of 165 tokens of answers are left out"
    )


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("repeat", [0, 2])
def test_any_number_of_ranks_reads_the_same_windows_also_after_resuming(
    tmp_path, accumulated, repeat
):
    corpus = make_corpus(tmp_path, MANY)
    sizes = ["data.batch_size=5", "max_steps=9", f"data.overfit_batches={repeat}", "seed=4"]
    sizes.append(f"trainer.accumulate_grad_batches={accumulated}")
    whole = [*data_of(corpus, *sizes).train_dataloader()]
    n_targets = [int((targets >= 0).sum()) for _, targets, *_ in whole]
    assert len({*n_targets}) > 1  # so that weights differ
    every = expected_rows(MANY, BLOCK_SIZE)
    rows = [row for batch in whole for row in rows_of(batch)]
    assert sorted(rows[: len(every)]) == sorted(every) or repeat
    if repeat:
        assert rows[: len(rows) - 10] == rows[10:]
    for world_size, step in ((1, 4), (2, 0), (5, 7)):
        loaders = [
            data_of(corpus, *sizes, rank=rank, world_size=world_size, step=step).train_dataloader()
            for rank in range(world_size)
        ]
        first = step * accumulated
        batches = [*zip(*loaders, strict=True)]
        assert len(batches) == len(whole) - first
        for i, shares in enumerate(batches, first):
            of_ranks = [row for share in shares for row in rows_of(share)]
            assert sorted(of_ranks) == sorted(rows_of(whole[i]))
            total = sum(n_targets[i - i % accumulated :][:accumulated])
            for _, targets, _, *weights in shares:  # without one if it would always be 1
                own = int((targets >= 0).sum())
                (weight,) = weights or [1.0]
                assert weight == pytest.approx(own * world_size * accumulated / total)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("n", "kept"), [(None, range(7)), (1, [0, 1, 3, 5]), (9, range(7))])
def test_validation_reads_each_window_once_on_any_number_of_ranks(tmp_path, world_size, n, kept):
    corpus = make_corpus(tmp_path, MANY, MANY[:6])
    every = expected_rows(MANY[:6], BLOCK_SIZE)
    limit = "null" if n is None else n
    overrides = [f"eval_batches={limit}", "data.eval_batch_size=4"]
    loaders = [
        data_of(corpus, *overrides, rank=rank, world_size=world_size).val_dataloader()
        for rank in range(world_size)
    ]
    found = []
    for batch in chain.from_iterable(zip(*loaders, strict=True)):  # equally many of each rank
        found += [row for row in rows_of(batch) if max(row[1]) >= 0]
    assert sorted(found) == sorted(every[i] for i in kept)


def test_a_single_window_is_every_batch_and_validates_on_more_ranks_than_windows(tmp_path):
    corpus = make_corpus(tmp_path, [[(2, 3)]])
    corpus.check_length(BLOCK_SIZE)
    (row,) = expected_rows([[(2, 3)]], BLOCK_SIZE)
    found = []
    for rank in range(3):
        data = data_of(corpus, "data.batch_size=3", "max_steps=2", rank=rank, world_size=3)
        for batch in (*data.train_dataloader(), *data.val_dataloader()):
            found += rows_of(batch)
    assert [max(targets) < 0 for _, targets in found].count(True) == 2  # padding of two ranks
    assert found.count(row) == 7
