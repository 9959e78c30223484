"""Snapshots of real runs, and what was learned at each."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, LAST, find_snapshots
from minigpt.checkpoints.format import read
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.extras.interpret.heads import attention_maps, induction_scores
from minigpt.extras.interpret.learning import KINDS, learning_curves, token_kinds
from minigpt.extras.interpret.snapshots import log_spaced
from minigpt.model.gpt import GPT
from minigpt.utils.errors import UserError

STEPS = [0, *range(1, 11), 12, 13, 15, 17, 20]  # round(20 ** (i / 22)) for i up to 22, and 0


def weights(state):
    # Return weights, or those of a file, in bfloat16, in which snapshots are
    state = read(state)["state_dict"] if isinstance(state, Path) else state
    return {name.removeprefix("model."): tensor.bfloat16() for name, tensor in state.items()}


def equal(first, second):
    first = weights(first)
    second = weights(second)
    same_names = first.keys() == second.keys()
    return same_names and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("last", "count"), [(1, 2), (2, 3), (20, 24), (1_000_000, 24), (1_000_000, 2)]
)
def test_snapshots_are_from_the_first_to_the_last_step(last, count):
    steps = sorted(log_spaced(last, count))
    assert (steps[0], steps[-1], len(steps) <= count) == (0, last, True)
    ratios = [b / a for a, b in pairwise(steps[8:])]
    assert ratios == pytest.approx([last ** (1 / 22)] * len(ratios), rel=0.02 if last > 20 else 0.2)


def test_a_run_keeps_the_weights_of_the_first_the_last_and_steps_between(train, tmp_path):
    given = ["ema_decay=0.9", "data.batch_size=4", "trainer.accumulate_grad_batches=2"]
    given += ["callbacks.checkpoint.save_top_k=2"]  # with step-10.safetensors
    folder = train(*given).folder
    without = train(*given, "callbacks.snapshots=null", folder=tmp_path / "none").folder
    files = find_snapshots(folder)
    assert list(files) == STEPS
    assert read(files[20])["state_dict"]["model.lm_head.weight"].dtype == torch.bfloat16
    model, tokenizer = load_checkpoint(folder, step=10)
    torch.manual_seed(1337)
    assert equal(files[0], GPT(model.config).state_dict())
    assert equal(files[10], model.state_dict())
    assert tokenizer.to_dict() == load_checkpoint(folder)[1].to_dict()
    for step in (10, 20):
        file = f"checkpoints/step-{step}.safetensors"
        assert equal(files[step], folder / file)  # the averages
        kept, plain = (read(one / file)["state_dict"] for one in (folder, without))
        # Snapshots change no training
        assert all(torch.equal(kept[name], plain[name]) for name in kept)
    assert not equal(files[17], files[20])
    assert not find_snapshots(without)
    with pytest.raises(UserError, match="has no snapshot of step 11; it has those of 0, 1, 2, 3"):
        load_checkpoint(folder / BEST, step=11)


def test_a_resumed_run_has_the_same_snapshots(train, trained):
    whole = find_snapshots(trained("ema_decay=0.9"))
    folder = train("ema_decay=0.9", "pause_at=10").folder
    assert list(find_snapshots(folder)) == [step for step in STEPS if step <= 10]
    (folder / "checkpoints/snapshots/step-14.safetensors").write_bytes(b"of another schedule")
    train("ema_decay=0.9", "resume=auto")
    resumed = find_snapshots(folder)
    assert list(resumed) == list(whole) == STEPS
    assert all(equal(resumed[step], whole[step]) for step in STEPS)


def test_snapshots_are_limited_by_their_number_and_size(train, finished, tmp_path):
    assert equal(find_snapshots(finished.folder)[20], finished.folder / LAST)  # without averages
    size = finished.summary["params"] * 2 / 1e6
    limits = {
        f"max_mb={3.5 * size:g}": [0, 1, 20],
        f"max_mb={1.5 * size:.3g}": [],
        "count=2": [0, 20],
    }
    for i, (limit, expected) in enumerate(limits.items()):
        folder = train(f"callbacks.snapshots.{limit}", folder=tmp_path / str(i)).folder
        assert list(find_snapshots(folder)) == expected


def test_a_snapshot_that_cannot_be_written_is_only_a_warning(train, tmp_path, capsys):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/snapshots").write_text("a file")
    (tmp_path / "run/.lock").touch()  # a run was there
    assert train("max_steps=1", "eval_every=1", "resume=auto").loss
    assert "step-0.safetensors cannot be written" in capsys.readouterr().err


def test_kinds_of_tokens():
    def kinds(texts):
        return "".join("fisco"[kind] for kind in token_kinds(texts))

    # "O" alone is a word like others; "it's" is two words
    assert kinds("\nROMEO: O it's") == "scccccosfsfiof"
    assert kinds(["The", " qu", "ick", "  ", "ROM", "EO", "", "99"]) == "ffisccoo"


def test_losses_and_scores_are_those_of_each_snapshot(trained):
    folder = trained()
    curves = learning_curves(folder)
    assert [point["step"] for point in curves] == list(find_snapshots(folder))
    val = torch.from_numpy(find_corpus(folder / BEST).tokens("val")[:].astype("int64"))
    for point in (curves[0], curves[-1]):
        model, tokenizer = load_checkpoint(folder, step=point["step"])
        T = model.config.block_size
        n = min(len(val) - 1, 4096 // T * T)
        windows = [(val[i : i + T], val[i + 1 : i + 1 + T]) for i in range(0, n, T)]
        with torch.no_grad():
            losses = torch.cat(
                [
                    F.cross_entropy(model(x[None, : len(y)])[0], y, reduction="none")
                    for x, y in windows
                ]
            )
        kinds = torch.tensor(
            token_kinds([tokenizer.decode([i]) for i in val[1 : 1 + len(losses)].tolist()])
        )
        expected = {
            name: losses[kinds == i].mean().item()
            for i, name in enumerate(KINDS)
            if (kinds == i).any()
        }
        assert point["kinds"] == pytest.approx(expected, abs=1e-4)
        maps = attention_maps(model, val[:T])  # (L, H, T, T)
        previous = torch.stack([maps[..., i, i - 1] for i in range(1, T)]).mean(0)
        assert_close(torch.tensor(point["previous"]), previous)
        assert_close(
            torch.tensor(point["induction"]), induction_scores(model, tokenizer.vocab_size)
        )


def test_damaged_snapshots_are_left_out_and_a_missing_corpus_is_reported(train, tmp_path):
    folder = train("callbacks.snapshots.count=3", "max_steps=2").folder
    _, damaged, last = find_snapshots(folder).values()
    damaged.write_bytes(b"damaged")
    assert [point["step"] for point in learning_curves(folder)] == [0, 2]
    (tmp_path / "data").rename(tmp_path / "moved")
    last.touch()
    with pytest.raises(UserError, match="the token files of the run are not in"):
        learning_curves(folder)
