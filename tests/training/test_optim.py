"""AdamW compared with torch's, and schedules with nanoGPT's formula and straight lines."""

import copy
import math
import re

import pytest
import torch
from models import make_model
from torch.testing import assert_close

from minigpt.training.optim import adamw
from minigpt.training.schedules import constant, cosine, linear


def test_adamw_equals_torchs_with_decay_on_matrices_alone_and_leaves_frozen_weights():
    # The gradient of key biases is rounding error, and Adam would enlarge it.
    ours = make_model(smear=2).double()
    ours.blocks[0].requires_grad_(False)
    theirs = copy.deepcopy(ours)
    groups = {0.3: [], 0.0: []}
    for name, weight in theirs.named_parameters():
        groups[0.0 if re.search(r"norm|bias|smear", name) else 0.3].append(weight)
    decayed = [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()]
    reference = torch.optim.AdamW(decayed, lr=0.01, betas=(0.8, 0.95), foreach=False, fused=False)
    optimizer = adamw(ours, lr=0.01, betas=[0.8, 0.95], weight_decay=0.3)
    tokens, targets = torch.randint(23, (2, 3, 8))
    for _ in range(5):
        for network, step in ((ours, optimizer), (theirs, reference)):
            step.zero_grad()
            network(tokens, targets).backward()
            step.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(a, b, atol=1e-9, rtol=1e-7)


def test_adamw_takes_a_decay_rate_of_0():
    optimizer = adamw(make_model(), lr=0.01, betas=[0, 0.99], weight_decay=0.0)
    assert optimizer.defaults["betas"] == (0.0, 0.99)


@pytest.mark.parametrize(
    ("max_steps", "warmup_steps", "final"),
    [(1000, 100, 0.1), (50, 0, 0.0), (20, 19, 0.5), (5, 100, 0.1)],
)
def test_schedules_rise_in_a_line_and_fall_as_nanogpts_or_in_a_line(
    max_steps: int, warmup_steps: int, final: float
):
    lengths = {"max_steps": max_steps, "warmup_steps": warmup_steps}
    for step in range(max_steps + 5 if warmup_steps < max_steps else max_steps):
        found = [schedule(step, **lengths, final_lr_frac=final) for schedule in (cosine, linear)]
        found.append(constant(step, **lengths))
        if step < warmup_steps:
            expected = [(step + 1) / (warmup_steps + 1)] * 3
        else:  # get_lr of nanoGPT's train.py for a peak of 1
            ratio = min(1, (step - warmup_steps) / (max_steps - warmup_steps))
            falling = (0.5 * (1 + math.cos(math.pi * ratio)), 1 - ratio)
            expected = [*(final + factor * (1 - final) for factor in falling), 1]
        assert found == pytest.approx(expected)
