"""AdamW compared with torch's, and schedules with nanoGPT's formula and straight lines."""

import copy
import math
import re
from functools import partial
from itertools import pairwise

import pytest
import torch
from models import make_model
from torch.testing import assert_close

from minigpt.optim import adamw
from minigpt.schedules import constant, cosine, linear


def test_adamw_equals_torchs_with_decay_on_matrices_alone_and_leaves_frozen_weights():
    ours = make_model(smear=2).double()  # the gradient of key biases is rounding error, and Adam would enlarge it
    ours.blocks[0].requires_grad_(False)
    theirs = copy.deepcopy(ours)
    groups = {0.3: [], 0.0: []}
    for name, weight in theirs.named_parameters():
        groups[0.0 if re.search(r"norm|bias|smear", name) else 0.3].append(weight)
    decayed = [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()]
    reference = torch.optim.AdamW(decayed, lr=0.01, betas=(0.8, 0.95), foreach=False, fused=False)
    optimizer = adamw(ours, lr=0.01, betas=(0.8, 0.95), weight_decay=0.3)
    tokens, targets = torch.randint(23, (2, 3, 8))
    for _ in range(5):
        for network, step in ((ours, optimizer), (theirs, reference)):
            step.zero_grad()
            network(tokens, targets).backward()
            step.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(a, b, atol=1e-9, rtol=1e-7)
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(optimized) == len(set(optimized))
    assert set(optimized) == {p for p in ours.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("max_steps", "warmup_steps", "final"), [(1000, 100, 0.1), (50, 0, 0.0), (20, 19, 0.5), (7, 3, 1.0)]
)
def test_cosine_equals_nanogpts_schedule(max_steps: int, warmup_steps: int, final: float):
    def nanogpt(step: int) -> float:
        """Compute get_lr of nanoGPT's train.py for a peak of 1."""
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if step > max_steps:
            return final
        ratio = (step - warmup_steps) / (max_steps - warmup_steps)
        return final + 0.5 * (1 + math.cos(math.pi * ratio)) * (1 - final)

    schedule = partial(cosine, max_steps=max_steps, warmup_steps=warmup_steps, final_lr_frac=final)
    steps = range(max_steps + 5)
    assert [schedule(step) for step in steps] == pytest.approx([nanogpt(step) for step in steps])


def test_linear_decays_by_equal_amounts_to_its_final_value():
    values = [linear(step, max_steps=110, warmup_steps=10, final_lr_frac=0.2) for step in range(10, 111)]
    assert values[0] == pytest.approx(1)
    assert values[-1] == pytest.approx(0.2)
    assert [a - b for a, b in pairwise(values)] == pytest.approx([0.8 / 100] * 100)
    assert linear(500, max_steps=110, warmup_steps=10, final_lr_frac=0.2) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", [partial(cosine, final_lr_frac=0.1), partial(linear, final_lr_frac=0.1), constant])
def test_warm_up_rises_by_equal_amounts_to_the_peak_or_the_end_of_the_run(schedule: partial[float]):
    values = [schedule(step, max_steps=100, warmup_steps=4) for step in range(5)]
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule(0, max_steps=100, warmup_steps=0) == 1
    values = [schedule(step, max_steps=5, warmup_steps=100) for step in range(5)]
    assert values == pytest.approx([(step + 1) / 101 for step in range(5)])
    assert [constant(step, max_steps=20, warmup_steps=4) for step in range(4, 30)] == [1] * 26
