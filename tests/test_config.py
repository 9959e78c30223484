"""Configurations: invalid values raise before anything is built, imported or written."""

import re
from typing import Any

import pytest
import yaml
from small_runs import CONFIGS, composed

from minigpt.config import GPTConfig
from minigpt.runs.config_checks import check_run
from minigpt.utils.errors import UserError

INT = "an integer ≥ 1"
BAD_VALUES = [
    *((name, value, INT) for name in ("vocab_size", "n_layer", "n_head", "n_embd") for value in (0, -3, 2.5)),
    *(("block_size", value, "an integer in [1, 1048576]") for value in (0, -3, 2.5, 1048577)),
    *(("n_layer", value, INT) for value in (True, "12", None)),
    *((name, value, f"{INT}, or null") for name in ("n_kv_head", "head_dim", "n_inner") for value in (0, 1.5)),
    *((name, value, "true or false") for name in ("bias", "qk_norm") for value in (1, None, "no")),
    ("qkv_bias", 1, "true or false, or null"),
    *(("ngram", value, "0, or an integer ≥ 2") for value in (1, -2, 2.5)),
    *((name, 0, INT) for name in ("ngram_buckets", "ngram_dim")),
    *(("smear", value, "an integer ≥ 0") for value in (-1, 0.5, True, None)),
    ("ngram_dropout", 1.0, "in [0, 1)"),
    *(("dropout", value, "in [0, 1)") for value in (1, 1.0, -0.1, float("nan"), "0.1", None)),
    *(("rope_base", value, "a finite number > 0") for value in (0, -1.0, float("inf"), float("nan"))),
    *((name, 0, "a finite number > 0") for name in ("norm_eps", "rope_low_freq_factor", "rope_high_freq_factor")),
    *(("rope_factor", value, "a finite number ≥ 1") for value in (0.5, float("inf"), None)),
    ("rope_high_freq_factor", 1.0, "above model.rope_low_freq_factor=1.0"),
    ("rope_original_block_size", 0, INT),
    ("logit_softcap", 0, "a finite number > 0, or null"),
    ("norm", "batchnorm", "one of layernorm, rmsnorm, rmsnorm_noscale"),
    ("position", "alibi", "one of learned, rope, none"),
    ("activation", "GELU", "one of gelu, gelu_tanh, relu, relu2, swiglu"),
    ("norm_position", "sandwich", "one of pre, post"),
    ("parametrization", "muP", "one of standard, mup"),
    *((name, value, INT) for name in ("base_n_embd", "base_head_dim") for value in (0, 64.0, None)),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD_VALUES)
def test_an_invalid_value_raises_with_its_key_and_the_valid_values(name: str, value: Any, expected: str):
    with pytest.raises(UserError, match=f"^{re.escape(f'model.{name} must be {expected}, got {value}')}$"):
        GPTConfig(**{name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"qk_norm_weights": True}, "model.qk_norm must be true with model.qk_norm_weights=true, got False"),
        (
            {"n_embd": 100, "n_head": 8},
            "model.n_embd must be divisible by model.n_head=8, got 100; use a multiple of 8, or set model.head_dim",
        ),
        ({"n_kv_head": 24}, "model.n_head must be divisible by model.n_kv_head=24, got 12"),
        ({"position": "rope", "n_embd": 36}, "model.head_dim must be even with model.position=rope, got 3"),
        ({"position": "rope", "head_dim": 5}, "model.head_dim must be even with model.position=rope, got 5"),
    ],
)
def test_values_that_do_not_fit_each_other_raise_with_what_does(values: dict[str, Any], message: str):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        GPTConfig(**values)


def test_swiglu_has_about_as_many_parameters_as_gelu_and_a_hidden_width_that_is_a_multiple_of_eight():
    for n_embd in (64, 100, 128, 384, 768, 1600):
        width = GPTConfig(n_embd=n_embd, n_head=1, activation="swiglu").inner_width
        assert width % 8 == 0
        assert 0 <= 3 * width - 2 * 4 * n_embd < 3 * 8
        assert GPTConfig(n_embd=n_embd, n_head=1).inner_width == 4 * n_embd
    assert GPTConfig(activation="swiglu", n_inner=50).inner_width == 50


def test_a_configuration_equals_the_one_rebuilt_from_its_dictionary():
    config = GPTConfig(n_layer=3, n_kv_head=4, dropout=0.25, position="rope", activation="swiglu", bias=False)
    assert GPTConfig.from_dict(config.to_dict()) == config
    assert yaml.safe_load(yaml.safe_dump(config.to_dict())) == config.to_dict()


def test_a_stored_configuration_is_validated_like_a_new_one():
    with pytest.raises(UserError, match="n_layr, n_windows"):
        GPTConfig.from_dict({"n_layer": 2, "n_windows": 3, "n_layr": 2})
    with pytest.raises(UserError, match=r"model.dropout must be in .*, got 2"):
        GPTConfig.from_dict({"dropout": 2})


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
def test_every_file_in_configs_is_a_valid_run(group: str, choice: str):
    init_from = ["init_from=gpt2", "tokenizer=pretrained"] if choice == "pretrained" else []
    check_run(composed(f"{group}={choice}", *init_from))


LIMITS = ["seed=0", "optimizer.weight_decay=0", "schedule.warmup_steps=0", "pause_at=1000"]
LIMITS += ["trainer.gradient_clip_val=null", "model.vocab_size=65", "model.n_kv_head=2"]


def test_a_run_with_a_value_at_its_limit_is_accepted():
    for override in LIMITS:
        check_run(composed(override))


BAD_OVERRIDES = {
    INT: "max_steps=0 max_steps=2.5 max_steps=null eval_every=0 log_every=0 data.batch_size=0 data.eval_batch_size=-2 "
    "trainer.accumulate_grad_batches=0 model.vocab_size=0",
    f"{INT}, or null": "pause_at=0",
    "a multiple of eval_every=250 and at most max_steps=1000, or null": "pause_at=300 pause_at=1250",
    "an integer ≥ 0": "seed=-1 seed=1.5 seed=18446744073709551616 data.overfit_batches=-1 schedule.warmup_steps=-1",
    "a finite number > 0": "optimizer.lr=0 optimizer.lr=inf optimizer.lr=fast",
    "a finite number > 0, or null": "trainer.gradient_clip_val=0",
    "a finite number ≥ 0": "optimizer.weight_decay=-0.1",
    "two numbers in [0, 1)": "optimizer.betas=[0.9] optimizer.betas=0.9 optimizer.betas=null",
    "in (0, 1)": "data.val_fraction=0 data.val_fraction=1",
    "in [0, 1]": "schedule.final_lr_frac=-1",
    "a local path or a list of them, or null": "data.train_bin=[] data.val_bin=s3://a/b.bin",
    "divisible by model.n_head=4": "model.n_embd=101",
}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.betas=[2.0, 0.99]", "two numbers in [0, 1)"),
        *((override, expected) for expected, overrides in BAD_OVERRIDES.items() for override in overrides.split()),
    ],
)
def test_an_invalid_run_configuration_raises_with_the_overridden_key(override: str, expected: str):
    key, _, value = override.partition("=")
    message = f"{key} must be {expected}, got {'None' if value == 'null' else value}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}(;|$)"):
        check_run(composed(override))
