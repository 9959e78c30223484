"""What was learned at each snapshot, against PyTorch and by hand."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, find_snapshots
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.extras.interpret.heads import attention_maps, induction_scores
from minigpt.extras.interpret.learning import KINDS, learning_curves, token_kinds
from minigpt.utils.errors import UserError


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
