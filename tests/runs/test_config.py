"""Configurations: invalid values raise before anything is built, imported or written."""

import re
from functools import cache
from itertools import zip_longest

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from refusals import refused
from small_runs import CONFIGS, composed

from minigpt.model.config import GPTConfig
from minigpt.runs.run_config import RunConfig, check_run

# Settings, of which the last is refused.
MODEL = """
    n_layer=0 n_layer=2.5 n_layer=true n_layer=null n_layer='12' vocab_size=0 n_head=0 n_embd=0
    layer_repeats=0 ngram_buckets=0 ngram_dim=0 rope_original_block_size=0 base_n_embd=64.5
    base_head_dim=0 block_size=1048577 n_kv_head=0 head_dim=0 n_inner=1.5 bias=1 bias=null
    qk_norm='no' qk_norm_weights=0 tie_embeddings=1 embed_norm=1 qkv_bias=1 ngram=1 ngram=-2
    smear=-1 dropout=1 dropout=-0.1 dropout=.nan ngram_dropout=1.0 rope_base=0 rope_base=.inf
    norm_eps=0 rope_low_freq_factor=0 rope_high_freq_factor=1.0 logit_softcap=0 rope_factor=0.5
    rope_factor=.inf norm=batchnorm position=alibi activation=GELU norm_position=sandwich
    parametrization=muP layer_repeats=3,n_layer=4 n_head=8,n_embd=100 n_kv_head=3,n_head=4
    position=rope,n_embd=36,head_dim=3 qk_norm_weights=true,qk_norm=false
"""
RUN = """
    max_steps=0 max_steps=null eval_every=0 log_every=0 data.batch_size=0 data.eval_batch_size=-2
    optimizer.newton_schulz_steps=0 trainer.accumulate_grad_batches=0 pause_at=0 pause_at=300
    pause_at=1250 eval_batches=0 checkpoint_blocks=0 data.threads=0 threads=0
    callbacks.originality.characters=0 seed=-1
    seed=1.5 seed=18446744073709551616 data.overfit_batches=-1 schedule.warmup_steps=-1
    collective_timeout=0 optimizer.lr=0 optimizer.lr=fast optimizer.adam_lr=0
    trainer.gradient_clip_val=0 optimizer.weight_decay=-0.1 optimizer.momentum=1
    optimizer.ngram_weight_decay=-1 optimizer.betas=[0.9] optimizer.betas=null
    optimizer.betas=[2.0,0.99] data.val_fraction=0 data.val_fraction=1 ema_decay=1
    schedule.final_lr_frac=-1 trainer.strategy.compress=1 data.train_bin=[]
    data.val_bin=s3://a/b.bin data.source=ftp data.split=half data.separator=1 data.separator=''
    tokenizer.vocab_size=256 init_from=1 init_from='' resume=1 compile=maybe
"""
CASES = [*(f"model.{case.replace(',', ' model.')}" for case in MODEL.split()), *RUN.split()]


@cache
def run() -> DictConfig:
    return composed("optimizer=muon", "trainer=ddp", "tokenizer=bpe")


@pytest.mark.parametrize("overrides", CASES)
def test_an_invalid_value_raises_with_its_key_and_the_valid_values(overrides: str):
    given = OmegaConf.from_dotlist(overrides.split())
    key = overrides.split()[-1].partition("=")[0]
    refused(
        f"^{key} must be .+, got {re.escape(str(OmegaConf.select(given, key)))}(;|$)",
        check_run,
        OmegaConf.merge(run(), given),
    )


def test_a_run_with_a_value_at_its_limit_is_accepted():
    limits = """seed=0 optimizer.weight_decay=0 schedule.warmup_steps=0 pause_at=1000
        trainer.gradient_clip_val=null model.vocab_size=65 model.n_kv_head=2
        model.block_size=1048576"""
    for override in limits.split():
        check_run(OmegaConf.merge(run(), OmegaConf.from_dotlist([override])))


WHOLE = {
    "max_steps": "1e4",
    "eval_every": "5e1",
    "pause_at": "1e2",
    "seed": "1e18",
    "threads": "2.0",
    "callbacks.originality.characters": "1e3",
    "data.batch_size": "4.0",
    "data.overfit_batches": "0.0",
    "model.n_layer": "2.0",
    "model.n_kv_head": "1e0",
    "model.ngram": "3.0",
    "model.block_size": "6.4e1",
    "trainer.devices": "2.0",
    "trainer.accumulate_grad_batches": "2.",
    "schedule.warmup_steps": "1e1",
    "callbacks.checkpoint.save_top_k": "3.0",
    "callbacks.samples.max_new_tokens": "2e2",
    "callbacks.samples.top_k": "5e1",
    "callbacks.snapshots.count": "1e1",
}


def test_a_whole_number_in_any_notation_is_the_same_integer():
    others = ["optimizer.lr=1.0", "model.dropout=0.0", "minutes=null", "ema_decay=null"]
    runs = []
    for numbers in (WHOLE, {key: int(float(value)) for key, value in WHOLE.items()}):
        cfg = composed(*others, *(f"{key}={value}" for key, value in numbers.items()))
        run = RunConfig.from_hydra(cfg, in_job=False)
        runs.append((repr(run), OmegaConf.to_yaml(cfg)))
    assert runs[0] == runs[1]
    assert (run.settings["optimizer"]["lr"], run.settings["model"]["dropout"]) == (1.0, 0.0)
    assert "'lr': 1.0" in runs[0][0]  # what may be a fraction stays as it is
    assert f"'seed': {10**18}" in runs[0][0]
    for key in WHOLE:
        refused(
            rf"^{key} must be [^;]*, got 1\.5$",
            check_run,
            OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{key}=1.5"])),
        )


def test_a_run_has_typed_parts_and_keeps_the_settings_that_a_user_added():
    run = RunConfig.from_hydra(composed("+data.mine=1", "data.batch_size=4"), in_job=False)
    assert (run.data.batch_size, run.trainer.num_nodes) == (4, 1)
    assert run.settings["data"]["mine"] == 1


def test_swiglu_has_about_as_many_parameters_as_gelu_and_a_width_that_is_a_multiple_of_eight():
    for n_embd in (64, 100, 768):
        width = GPTConfig(n_embd=n_embd, n_head=1, activation="swiglu").inner_width
        assert width % 8 == 0
        assert 0 <= 3 * width - 2 * 4 * n_embd < 3 * 8


def test_a_configuration_equals_the_one_rebuilt_from_its_dictionary_which_is_checked():
    config = GPTConfig(
        n_layer=3, n_kv_head=4, dropout=0.25, position="rope", activation="swiglu", bias=False
    )
    assert GPTConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    for unknown, message in (
        ({"n_windows": 3, "n_layr": 2}, "n_layr, n_windows"),
        ({"dropout": 2}, "in .*, got 2"),
    ):
        refused(message, GPTConfig.from_dict, unknown)


def choices(group: str) -> list[str]:
    names = sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))
    # That of experiment=finetune_gpt2
    return [f"{group}={name}" for name in names if name != "pretrained"]


SHARED = [
    *map(
        choices,
        ("model", "optimizer", "schedule", "trainer", "data", "tokenizer", "callbacks", "logger"),
    )
]


@pytest.mark.parametrize(
    "overrides",
    [*zip_longest(*SHARED), *zip(choices("experiment")), *zip(choices("debug"))],
    ids=str,
)
def test_every_file_in_configs_is_a_valid_run(overrides: tuple[str | None, ...]):
    check_run(composed(*filter(None, overrides)))
