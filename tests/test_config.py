"""Configurations: invalid values raise before anything is built, imported or written."""

import re
from functools import cache
from itertools import zip_longest

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from small_runs import CONFIGS, composed

from minigpt.config import GPTConfig
from minigpt.runs.config_checks import check_run
from minigpt.utils.errors import UserError

INT, POSITIVE = "an integer ≥ 1", "a finite number > 0"
MODEL = {
    INT: "n_layer=0 n_layer=-3 n_layer=2.5 n_layer=true n_layer=null n_layer='12' vocab_size=0 n_head=0 n_embd=0 "
    "layer_repeats=0 ngram_buckets=0 ngram_dim=0 rope_original_block_size=0 base_n_embd=64.0 base_head_dim=0",
    "an integer in [1, 1048576]": "block_size=0 block_size=1048577",
    f"{INT}, or null": "n_kv_head=0 head_dim=0 n_inner=1.5",
    "true or false": "bias=1 bias=null qk_norm='no' qk_norm_weights=0 tie_embeddings=1 embed_norm=1",
    "true or false, or null": "qkv_bias=1",
    "0, or an integer ≥ 2": "ngram=1 ngram=-2 ngram=2.5",
    "an integer ≥ 0": "smear=-1 smear=true",
    "in [0, 1)": "dropout=1 dropout=-0.1 dropout=.nan dropout='0.1' dropout=null ngram_dropout=1.0",
    POSITIVE: "rope_base=0 rope_base=.inf rope_base=.nan norm_eps=0 rope_low_freq_factor=0 rope_high_freq_factor=0",
    f"{POSITIVE}, or null": "logit_softcap=0",
    "a finite number ≥ 1": "rope_factor=0.5 rope_factor=.inf",
    "above model.rope_low_freq_factor=1.0": "rope_high_freq_factor=1.0",
    "one of layernorm, rmsnorm, rmsnorm_noscale": "norm=batchnorm",
    "one of learned, rope, none": "position=alibi",
    "one of gelu, gelu_tanh, relu, relu2, swiglu": "activation=GELU",
    "one of pre, post": "norm_position=sandwich",
    "one of standard, mup": "parametrization=muP",
    "divisible by model.layer_repeats=3": "layer_repeats=3,n_layer=4",
    "divisible by model.n_head=8": "n_head=8,n_embd=100",
    "divisible by model.n_kv_head=3": "n_kv_head=3,n_head=4",
    "even with model.position=rope": "position=rope,n_embd=36,head_dim=3 position=rope,head_dim=5",
    "true with model.qk_norm_weights=true": "qk_norm_weights=true,qk_norm=false",
}
RUN = {
    INT: "max_steps=0 max_steps=2.5 max_steps=null eval_every=0 log_every=0 data.batch_size=0 data.eval_batch_size=-2 "
    "optimizer.newton_schulz_steps=0 trainer.accumulate_grad_batches=0",
    f"{INT}, or null": "pause_at=0 eval_batches=0 checkpoint_blocks=0 data.threads=0 originality=0",
    "a multiple of eval_every=250 and at most max_steps=1000, or null": "pause_at=300 pause_at=1250",
    "an integer ≥ 0": "seed=-1 seed=1.5 seed=18446744073709551616 data.overfit_batches=-1 schedule.warmup_steps=-1",
    POSITIVE: "collective_timeout=0 optimizer.lr=0 optimizer.lr=.inf optimizer.lr=fast optimizer.adam_lr=0",
    f"{POSITIVE}, or null": "trainer.gradient_clip_val=0 minutes=0",
    "a finite number ≥ 0": "optimizer.weight_decay=-0.1 optimizer.ngram_weight_decay=-1",
    "two numbers in [0, 1)": "optimizer.betas=[0.9] optimizer.betas=null optimizer.betas=[2.0,0.99]",
    "in [0, 1)": "optimizer.momentum=1",
    "in (0, 1)": "data.val_fraction=0 data.val_fraction=1",
    "in (0, 1), or null": "ema_decay=1",
    "in [0, 1]": "schedule.final_lr_frac=-1",
    "true or false": "trainer.strategy.compress=1",
    "a local path or a list of them, or null": "data.train_bin=[] data.val_bin=s3://a/b.bin",
    "one of files, download, plays, huggingface": "data.source=ftp",
    "one of fraction, document": "data.split=half",
    "a text, or null": "data.separator=1 data.separator=''",
    "an integer ≥ 257": "tokenizer.vocab_size=256",
    "a run folder, a checkpoint, or a folder or id of Hugging Face, or null": "init_from=1 init_from=''",
    "auto, a run folder, a checkpoint, or null": "resume=1",
}
CASES = [
    *((expected, f"model.{value.replace(',', ' model.')}") for expected in MODEL for value in MODEL[expected].split()),
    *((expected, value) for expected in RUN for value in RUN[expected].split()),
]


@cache
def run() -> DictConfig:
    return composed("optimizer=muon", "trainer=ddp", "tokenizer=bpe")


@pytest.mark.parametrize(("expected", "overrides"), CASES)
def test_an_invalid_value_raises_with_its_key_and_the_valid_values(expected: str, overrides: str):
    given = OmegaConf.from_dotlist(overrides.split())
    key = overrides.split()[-1].partition("=")[0]
    message = f"{key} must be {expected}, got {OmegaConf.select(given, key)}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}(;|$)"):
        check_run(OmegaConf.merge(run(), given))


def test_a_run_with_a_value_at_its_limit_is_accepted():
    limits = "seed=0 optimizer.weight_decay=0 schedule.warmup_steps=0 pause_at=1000 trainer.gradient_clip_val=null"
    for override in [*limits.split(), "model.vocab_size=65", "model.n_kv_head=2", "model.block_size=1048576"]:
        check_run(OmegaConf.merge(run(), OmegaConf.from_dotlist([override])))


def test_swiglu_has_about_as_many_parameters_as_gelu_and_a_hidden_width_that_is_a_multiple_of_eight():
    for n_embd in (64, 100, 768):
        width = GPTConfig(n_embd=n_embd, n_head=1, activation="swiglu").inner_width
        assert width % 8 == 0
        assert 0 <= 3 * width - 2 * 4 * n_embd < 3 * 8


def test_a_configuration_equals_the_one_rebuilt_from_its_dictionary_which_is_checked():
    config = GPTConfig(n_layer=3, n_kv_head=4, dropout=0.25, position="rope", activation="swiglu", bias=False)
    assert GPTConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    for unknown, message in (({"n_windows": 3, "n_layr": 2}, "n_layr, n_windows"), ({"dropout": 2}, "in .*, got 2")):
        with pytest.raises(UserError, match=message):
            GPTConfig.from_dict(unknown)


def choices(group: str) -> list[str]:
    names = sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))
    return [f"{group}={name}" for name in names if name != "pretrained"]  # that of experiment=finetune_gpt2


SHARED = [*map(choices, ("model", "optimizer", "schedule", "trainer", "data", "tokenizer", "callbacks", "logger"))]


@pytest.mark.parametrize(
    "overrides", [*zip_longest(*SHARED), *zip(choices("experiment")), *zip(choices("debug"))], ids=str
)
def test_every_file_in_configs_is_a_valid_run(overrides: tuple[str | None, ...]):
    check_run(composed(*filter(None, overrides)))
