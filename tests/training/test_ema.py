"""Averages of the weights: their formula, in checkpoints, and of shards."""

import pytest
import torch
from refusals import refused
from small_runs import composed

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.runs.run_config import check_run
from minigpt.training.ema import EMA


def test_checkpoints_hold_the_ema_weights(trained):
    same = ["max_steps=4", "trainer.accumulate_grad_batches=2"]
    plain = read(trained(*same) / LAST)
    content = read(trained(*same, "ema_decay=0.9") / LAST)
    assert content["ema_updates"] == 4  # one per optimizer step
    for name, average in content["state_dict"].items():
        assert not torch.equal(average, content["unaveraged"][name]), name
        # The EMA changes no training
        assert torch.equal(plain["state_dict"][name], content["unaveraged"][name])


@pytest.mark.parametrize(
    ("dtype", "decay", "updates", "rounds"),
    # In bfloat16, steps of 0.001 of the way would round to nothing.
    [(torch.float32, 0.5, 0, 1), (torch.bfloat16, 0.999, 100_000, 100)],
)
def test_the_ema_follows_its_formula_and_is_kept_by_a_swap(dtype, decay, updates, rounds):
    weight = torch.nn.Parameter(torch.ones(1, dtype=dtype))
    average = EMA([weight], decay)
    average.updates = updates
    expected = 1.0
    values = [2.0, 5.0, 3.0, -1.0, 4.0, 0.5, 7.0, 9.0] * rounds
    for t, value in enumerate(values, start=updates + 1):
        weight.data.fill_(value)
        average.update()
        used = min(decay, (1 + t) / (10 + t))
        expected = used * expected + (1 - used) * value
        average.swap()  # as a validation between two steps
        assert weight.item() == pytest.approx(expected, rel=1e-5)
        average.swap()
        assert (weight.item(), weight.dtype) == (value, dtype)


def test_an_average_of_shards_in_half_precision_is_refused():
    half = ["trainer=fsdp", "trainer.precision=bf16-true", "ema_decay=0.9"]
    message = r"trainer\.precision must be another than bf16-true and 16-true with trainer="
    refused(message, check_run, composed(*half))
    check_run(composed(*half, "ema_decay=null"))
