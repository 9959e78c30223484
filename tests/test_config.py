"""Configurations: what cannot work is named before anything is built, imported or written."""

import importlib.metadata
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import minigpt
from minigpt.config import GPTConfig
from minigpt.runs.config_checks import check_run
from minigpt.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"

WHOLE = "a whole number of at least 1"
BAD_VALUES = [
    *(
        (name, value, WHOLE)
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
        for value in (0, -3)
    ),
    *((name, 2.5, WHOLE) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")),
    ("n_layer", True, WHOLE),
    ("n_layer", "12", WHOLE),
    ("n_layer", None, WHOLE),
    *((name, value, f"{WHOLE}, or null") for name in ("n_kv_head", "head_dim", "n_inner") for value in (0, 1.5)),
    *((name, value, "true or false") for name in ("bias", "qk_norm") for value in (1, None, "no")),
    *((name, 1, "true or false") for name in ("tie_embeddings", "embed_norm")),
    *(("ngram", value, "0, or a whole number of at least 2") for value in (1, -2, 2.5)),
    *((name, 0, WHOLE) for name in ("ngram_buckets", "ngram_dim")),
    *(("smear", value, "a whole number of at least 0") for value in (-1, 0.5, True, None)),
    *(("dropout", value, "from 0 up to, but not including, 1") for value in (1, 1.0, -0.1, float("nan"), "0.1", None)),
    *(("rope_base", value, "a number above 0") for value in (0, -1.0, float("inf"), float("nan"))),
    ("norm", "batchnorm", "layernorm or rmsnorm or rmsnorm_noscale"),
    ("position", "alibi", "learned or rope or none"),
    ("position", None, "learned or rope or none"),
    ("activation", "GELU", "gelu or relu or relu2 or swiglu"),
    ("norm_position", "sandwich", "pre or post"),
    ("parametrization", "muP", "standard or mup"),
    *((name, value, WHOLE) for name in ("base_n_embd", "base_head_dim") for value in (0, 64.0, None)),
]


@pytest.mark.parametrize(("name", "value", "takes"), BAD_VALUES)
def test_an_impossible_value_is_named_with_what_the_setting_takes(name: str, value: Any, takes: str):
    with pytest.raises(UserError) as caught:
        GPTConfig(**{name: value})
    assert f"{name}={value}" in str(caught.value)
    assert takes in str(caught.value)


def test_a_width_that_the_heads_do_not_divide_says_which_multiple_to_use():
    with pytest.raises(UserError, match=r"n_embd=100 .* n_head=8; use a multiple of 8, or set head_dim"):
        GPTConfig(n_embd=100, n_head=8)


def test_a_head_width_of_its_own_frees_the_width_from_the_number_of_heads():
    assert GPTConfig(n_embd=100, n_head=8, head_dim=16).head_width == 16


@pytest.mark.parametrize("n_kv_head", [5, 24])
def test_key_value_heads_that_do_not_divide_the_heads_are_named(n_kv_head: int):
    with pytest.raises(UserError, match=f"n_head=12 .* n_kv_head={n_kv_head}"):
        GPTConfig(n_kv_head=n_kv_head)


def test_rope_names_an_odd_head_width():
    with pytest.raises(UserError, match=r"position=rope .* even head width, not 3"):
        GPTConfig(position="rope", n_embd=12, n_head=4)
    with pytest.raises(UserError, match=r"position=rope .* even head width, not 5"):
        GPTConfig(position="rope", head_dim=5)
    assert GPTConfig(n_embd=12, n_head=4).head_width == 3


def test_swiglu_has_about_as_many_weights_as_the_plain_mlp_and_a_width_that_is_a_multiple_of_eight():
    for n_embd in (64, 100, 128, 384, 768, 1600):
        width = GPTConfig(n_embd=n_embd, n_head=1, activation="swiglu").inner_width
        assert width % 8 == 0
        assert 0 <= 3 * width - 2 * 4 * n_embd < 3 * 8
        assert GPTConfig(n_embd=n_embd, n_head=1).inner_width == 4 * n_embd
    assert GPTConfig(activation="swiglu", n_inner=50).inner_width == 50


def test_a_configuration_comes_back_from_its_dictionary():
    config = GPTConfig(n_layer=3, n_kv_head=4, dropout=0.25, position="rope", activation="swiglu", bias=False)
    assert GPTConfig.from_dict(config.to_dict()) == config
    assert yaml.safe_load(yaml.safe_dump(config.to_dict())) == config.to_dict()


def test_a_stored_configuration_is_checked_like_a_new_one():
    with pytest.raises(UserError, match="n_layr, n_windows"):
        GPTConfig.from_dict({"n_layer": 2, "n_windows": 3, "n_layr": 2})
    with pytest.raises(UserError, match="dropout=2"):
        GPTConfig.from_dict({"dropout": 2})


def test_a_checked_configuration_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        GPTConfig().n_layer = 0  # type: ignore[misc]


def test_the_defaults_are_the_gpt2_preset():
    preset = yaml.safe_load((CONFIGS / "model/gpt2.yaml").read_text(encoding="utf-8"))
    assert preset.pop("vocab_size") is None
    defaults = GPTConfig().to_dict()
    assert defaults.pop("vocab_size") == 50257
    assert preset == defaults


CHOICES = [
    (group, file.stem)
    for group in ("model", "optimizer", "schedule", "trainer", "experiment", "debug")
    for file in sorted((CONFIGS / group).glob("*.yaml"))
]


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_in_configs_makes_a_run_that_can_work(group: str, choice: str):
    check_run(composed(f"{group}={choice}"))


@pytest.mark.parametrize(
    "override",
    [
        "seed=0",
        "trainer.gradient_clip_val=null",
        "optimizer.weight_decay=0",
        "schedule.warmup_steps=0",
        "model.vocab_size=65",
        "model.n_kv_head=2",
    ],
)
def test_a_run_with_a_setting_at_its_edge_is_accepted(override: str):
    check_run(composed(override))


@pytest.mark.parametrize(
    ("override", "takes"),
    [
        ("seed=-1", "at least 0"),
        ("seed=1.5", "whole number"),
        ("seed=18446744073709551616", "whole number"),
        ("max_steps=0", "at least 1"),
        ("max_steps=2.5", "whole number"),
        ("max_steps=null", "whole number"),
        ("eval_every=0", "at least 1"),
        ("log_every=0", "at least 1"),
        ("data.batch_size=0", "at least 1"),
        ("data.eval_batch_size=-2", "at least 1"),
        ("data.val_fraction=0", "between 0 and 1"),
        ("data.val_fraction=1", "between 0 and 1"),
        ("optimizer.lr=-1", "above 0"),
        ("optimizer.lr=0", "above 0"),
        ("optimizer.lr=nan", "above 0"),
        ("optimizer.lr=inf", "above 0"),
        ("optimizer.lr=fast", "above 0"),
        ("optimizer.weight_decay=-0.1", "at least 0"),
        ("schedule.warmup_steps=-1", "at least 0"),
        ("trainer.accumulate_grad_batches=0", "at least 1"),
        ("trainer.gradient_clip_val=0", "above 0, or null"),
    ],
)
def test_a_run_that_cannot_work_is_refused_by_the_name_that_was_typed(override: str, takes: str):
    with pytest.raises(UserError, match=re.escape(override.replace("=null", "=None"))) as caught:
        check_run(composed(override))
    assert takes in str(caught.value)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optimizer.betas=[2.0,0.99]", "betas"),
        ("optimizer.betas=[0.9]", "betas"),
        ("optimizer.betas=0.9", "betas"),
        ("optimizer.betas=null", "betas"),
        ("schedule.final_lr_frac=-1", "final"),
    ],
)
def test_what_the_optimizer_and_the_schedule_cannot_take_is_refused_before_the_run(override: str, named: str):
    with pytest.raises(UserError, match=named):
        check_run(composed(override))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.n_embd=100", "model.n_head=8"], "n_embd=100"),
        (["model.dropout=1"], "dropout=1"),
        (["model.vocab_size=0"], "vocab_size=0"),
        (["model.activation=selu"], "activation=selu"),
    ],
)
def test_a_run_whose_model_is_impossible_is_refused(overrides: list[str], named: str):
    with pytest.raises(UserError, match=named):
        check_run(composed(*overrides))


def test_a_model_setting_that_does_not_exist_is_refused_by_name():
    with pytest.raises(UserError, match="n_heads"):
        check_run(composed("+model.n_heads=4"))


@pytest.mark.parametrize("room", ["minigpt", "minigpt.config"])
def test_importing_what_checks_a_configuration_imports_nothing_heavy(room: str):
    assert not imported_by(room) & {"torch", "lightning", "numpy", "hydra", "matplotlib", "wandb"}


def test_the_package_says_its_version():
    assert minigpt.__version__ == importlib.metadata.version("minigpt")


def test_the_model_can_be_used_without_lightning_and_hydra():
    rooms = [f"minigpt.{name}" for name in ("attention", "model", "optim", "generation")]
    packages = imported_by(*rooms)
    assert "torch" in packages
    assert not packages & {"lightning", "pytorch_lightning", "lightning_fabric", "hydra", "omegaconf", "wandb"}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides))


def imported_by(*rooms: str) -> set[str]:
    """The top-level packages that a fresh Python holds after importing the rooms."""
    code = f"import sys, {', '.join(rooms)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(answer.stdout.split())
