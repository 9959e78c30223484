"""The recipes are what they say: their sizes, nanoGPT's values, and parts that can be exchanged."""

from typing import Any

import pytest
import torch
from conftest import CONFIGS
from hydra import compose, initialize_config_dir

from minigpt.config import GPTConfig
from minigpt.model import GPT

CHARACTERS = 65  # of tiny shakespeare
RECIPES = sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))


def recipe(name: str, *overrides: str) -> Any:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=[f"experiment={name}", *overrides])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_no_larger_than_nanogpts(name: str):
    """At most the 0.81M trainable numbers of nanoGPT's recipe for a CPU; the positions of a GPU's come on top."""
    cfg = recipe(name)
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**cfg.model, "vocab_size": CHARACTERS}))
    if name.endswith("_cpu"):
        assert model.num_params() <= 810_000
    else:
        assert model.num_params(positions=False) <= 10_650_000


def test_nanogpts_recipe_for_a_cpu_has_its_published_values():
    """The command of nanoGPT's README for a MacBook, and the defaults of its train.py and train_shakespeare_char.py."""
    cfg = recipe("nanogpt_cpu")
    model = {key: cfg.model[key] for key in ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")}
    assert model == {"block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128, "dropout": 0.0, "bias": False}
    assert (cfg.data.batch_size, cfg.max_steps, cfg.trainer.gradient_clip_val) == (12, 2000, 1.0)
    assert cfg.optimizer == {
        "_target_": "minigpt.optim.adamw",
        "lr": 1e-3,
        "betas": [0.9, 0.99],
        "weight_decay": 0.1,
    }
    assert cfg.schedule == {"_target_": "minigpt.optim.cosine", "warmup_steps": 100, "final": 0.1}


@pytest.mark.parametrize("name", RECIPES)
def test_another_optimizer_and_schedule_replace_those_of_a_recipe_whole(name: str):
    cfg = recipe(name, "optimizer=adamw", "schedule=constant")
    assert set(cfg.optimizer) == {"_target_", "lr", "betas", "weight_decay"}
    assert cfg.optimizer.lr == 3e-3
    assert set(cfg.schedule) == {"_target_", "warmup_steps"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(train, name: str):
    """Made small, on a CPU: every part of it acts together."""
    assert train(f"experiment={name}", "compile=false", "max_steps=20").loss < 4.0


def test_the_fast_recipe_trains_with_adamw(train):
    assert train("experiment=fast_cpu", "optimizer=adamw", "schedule=constant", "schedule.warmup_steps=0").loss < 3.5
