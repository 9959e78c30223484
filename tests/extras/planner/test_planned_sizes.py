"""Sizes around those that the user gives: each is an architecture, or one line refuses it."""

import re

import pytest
from hydra.errors import HydraException

from minigpt.extras.planner import plan as planning
from minigpt.extras.planner.planned_sizes import (
    given_settings,
    planned_heads,
    with_possible_sizes,
)
from minigpt.model.config import GPTConfig
from minigpt.runs.run import load_parts
from minigpt.runs.run_config import RunConfig
from minigpt.utils.errors import UserError

TEXT = planning.Text(1_000_000, 100_000, ngram=5, distinct_ngrams=100_000, ngram_loss=1.6)
GIVEN = """
    model.n_head=3
    model.n_embd=90
    model.n_embd=96 model.n_head=3
    model={n_head:5,dropout:0.1}
    model.head_dim=24
    model.head_dim=24 model.n_head=5
    model.head_dim=6 model.n_embd=45
    model.n_kv_head=3
    model.n_kv_head=3 model.n_embd=90
    model.n_kv_head=3 model.n_head=6
    model.layer_repeats=3
    model.layer_repeats=3 model.n_layer=6
    model.n_layer=3
    model.position=learned model.n_embd=45
    ++model.n_head=7
    model.n_embd=2
    model=baby
"""
REFUSED = {
    "model.n_embd=45": "model.n_embd must be a multiple of 2, got 45; use one, "
    "or set model.head_dim too",
    "model.n_embd=90 model.n_kv_head=2": "model.n_embd must be a multiple of 4, got 90",
    "model.n_embd=128 model.n_head=3": "model.n_embd must be divisible by model.n_head=3, got 128",
    "model.n_head=0": "model.n_head must be an integer ≥ 1, got 0",
    "model.n_kv_head=0": "model.n_kv_head must be an integer ≥ 1, or null, got 0",
    "model.layer_repeats=0": "model.layer_repeats must be an integer ≥ 1, got 0",
    "model.layer_repeats=2 model.n_layer=3": "model.n_layer must be divisible by "
    "model.layer_repeats=2, got 3",
    "model.head_dim=7": "model.head_dim must be even with model.position=rope, got 7",
    "model=nano model.n_head=3": "model.n_embd must be divisible by model.n_head=3, got 128",
    "minutes=-1": "minutes must be a finite number > 0, or null, got -1",
    "minutes=abc": "minutes must be a finite number > 0, or null, got abc",
    "minutes='5'": "got 5; it is a text; write minutes=5 in a shell, or minutes: 5 in a file",
    "trainer.devices=2": "trainer.devices must be 1 with minutes, which plans for one device",
}


def test_whole_numbers_in_any_notation_are_integers_for_a_plan(planned):
    given = ["minutes=1", "model.n_embd=64.0", "model.layer_repeats=2.0", "data.batch_size=8.0"]
    cfg = planned(*given)
    sizes = with_possible_sizes(cfg, given).model
    numbers = [cfg.model.n_embd, cfg.data.batch_size, sizes.n_embd, sizes.n_layer]
    assert repr(numbers) == "[64, 8, 64, 2]"


def test_heads_are_about_32_wide():
    model = {"n_head": 4, "n_kv_head": None, "head_dim": None, "position": "rope"}
    for n_embd, n_head in {30: 1, 40: 1, 90: 3, 96: 3, 128: 4, 200: 5}.items():
        assert planned_heads({**model, "n_embd": n_embd}, {"model.n_embd"}, 64)[1] == n_head
    assert planned_heads(model | {"n_embd": 1}, set(), 96) == (96, 3)


@pytest.mark.parametrize("line", filter(None, map(str.strip, GIVEN.splitlines())))
def test_a_plan_around_given_sizes_is_an_architecture(mine, planned, line):
    """With the given values and even heads; none is refused before the plan is made."""
    overrides = [*mine, *line.split()]
    cfg = planned(*overrides)
    given = given_settings(overrides)
    before = cfg.copy()
    load_parts(RunConfig.from_hydra(with_possible_sizes(cfg, overrides)))
    assert cfg == before
    for size in planning.SIZES:
        settings = planning.without(given, planning.shape(cfg, given, TEXT, *size))
        model = planning.updated(cfg, settings).model
        config = GPTConfig(**{**model, "vocab_size": 100})
        assert config.head_width % 2 == 0 or config.position != "rope"
        free = not given & {"model", *(f"model.{name}" for name in model)}
        assert config.head_width == 32 or config.n_head == 1 or not free
        for key in given:
            if key.startswith("model."):
                assert model[key[6:]] == cfg.model[key[6:]]
        assert model == cfg.model or "model" not in given


@pytest.mark.parametrize(("line", "message"), REFUSED.items(), ids=REFUSED)
def test_settings_that_no_plan_can_have_are_refused(mine, planned, line, message):
    overrides = [*mine, *line.split()]
    with pytest.raises((UserError, HydraException), match=re.escape(message)):
        load_parts(RunConfig.from_hydra(with_possible_sizes(planned(*overrides), overrides)))
