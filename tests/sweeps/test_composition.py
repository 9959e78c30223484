"""Configurations of points: those of Hydra's own composition, whatever the command line."""

import random

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from small_runs import CONFIGS

from minigpt.sweeps.composition import Composer

MINE = """# @package _global_
defaults: [{override /model: baby}]
schedule: {warmup_steps: 7, extra: [1, "${seed}", {deep: "???"}]}
mine: {number: 1e3, name: "${hydra:job.name}", also: "${optimizer.lr}", null_too: null}
"""
OF_HYDRA = """# @package _global_
name_of_job: ${hydra.job.name}
choices: ${hydra.runtime.choices}
number: ${hydra[job][num]}
"""
LINES = [
    "seed=1 seed=2 ++seed=3 model.n_embd=64 optimizer.lr=1e-3",
    "model.n_layer=3 model=baby model={n_layer:2,n_head:1} model.n_head=4 optimizer=muon "
    "optimizer.momentum=0.9",
    "+model.mine=1 +mine.deep.er={a:[1,{b:null}]} +mine.deep.er.c=x ++model.dropout=0.1 "
    "++other=1e4",
    "~callbacks.samples ~model.n_head ~optimizer.lr=0.003 ~seed=1337",
    "~seed ~logger ~experiment ~data=shakespeare_char",
    "optimizer.betas=[0.9,0.95] +mine=[1,2] +mine=[3] data=[text,tinystories]",
    "model.dropout=${optimizer.weight_decay} seed=${oc.env:HOME} data.field=${now:%Y}",
    "data.field='a:b' model.norm=\"x,y\" schedule.warmup_steps='7' data.separator='\\n'",
    "data.path=null seed=??? max_steps=1_000 ema_decay=.5 compile=yes",
    "experiment=[mine,sprint_cpu] mine.number=3 schedule.extra=[]",
    "experiment=mine +logger@second=wandb second.wandb.project=x mine.null_too=1",
    "trainer=cpu +trainer.benchmark=true callbacks=early_stopping",
    "experiment=of_hydra ~choices hydra={job:{num:3}}",
    "hydra.job.name=other seed=1",
]
INVALID = [
    "+callbacks=attention",
    "model.n_heads=3",
    "model=nanoo seed=1",
    "seed=1 +seed=1",
    "seed.deep=1",
    "~mine",
    "~optimizer.lr=0.1",
    "~model=baby",
    "model=null",
    "++model=baby",
    "seed@other=1",
    "seed=1,2 model=nano,baby",
    "seed=[1 model.n_embd=1",
]


@pytest.fixture(scope="module")
def composers(tmp_path_factory):
    """Return Hydra's composition without its own node, ours, and the configuration of the sweep."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "experiment").mkdir()
    (folder / "experiment/mine.yaml").write_text(MINE, encoding="utf-8")
    (folder / "experiment/of_hydra.yaml").write_text(OF_HYDRA, encoding="utf-8")
    overrides = [f"hydra.searchpath=[file://{folder}]", "hydra.sweep.dir=x", "seed=range(1,9)"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        master = hydra.compose_config("train", overrides, run_mode=RunMode.MULTIRUN)
        composer = Composer(hydra.config_loader, master)

        def expected(line):
            config = hydra.config_loader.load_sweep_config(master, line)
            with open_dict(config):
                del config["hydra"]
            return config

        yield expected, lambda line: composer.compose_line(line)[0], master


def described(node):
    """All of a node of a configuration: its value with its type, its metadata and its flags."""
    described_node = [
        type(node),
        vars(node._metadata),
        node._get_flag("struct"),
        node._get_flag("readonly"),
    ]
    if isinstance(node, DictConfig) and isinstance(node._content, dict):
        return [*described_node, [(key, described(node._get_node(key))) for key in node._content]]
    if isinstance(node, ListConfig) and isinstance(node._content, list):
        return [*described_node, [described(each) for each in node._content]]
    return [*described_node, type(node._value()), repr(node._value())]


def outcome(function, line):
    """What a function composes, in detail; or the types and texts of its errors."""
    try:
        config = function(line)
    except Exception as error:
        errors = []
        while error:
            errors.append((type(error), str(error)))
            error = error.__cause__
        return errors
    return [described(config), OmegaConf.to_yaml(config)]


@pytest.mark.parametrize("line", [*LINES, *INVALID])
def test_a_configuration_is_what_hydra_composes(composers, line):
    expected, composer, _ = composers
    given = line.split()
    composed = outcome(expected, given)
    assert (len(composed) == 2 and isinstance(composed[0], list)) == (line in LINES)
    assert outcome(composer, given) == composed


def test_a_time_that_is_resolved_between_two_points_is_that_of_the_later_ones(composers):
    _, composer, master = composers
    line = ["data.field=${now:%Y}"]
    before = composer(line)
    assert before.data.field.isdecimal()
    OmegaConf.set_cache(master, {"now": dict.fromkeys(OmegaConf.get_cache(before)["now"], "1999")})
    assert composer(line).data.field == "1999"


@pytest.mark.slow
def test_the_configuration_of_any_command_line_is_what_hydra_composes(composers):
    expected, composer, _ = composers
    rng = random.Random(0)
    overrides = [override for line in LINES for override in line.split()]
    for _ in range(100):
        line = rng.sample(overrides, k=rng.randint(2, 5))
        line += rng.sample(INVALID, k=1)[0].split() if rng.random() < 0.1 else []
        assert outcome(composer, line) == outcome(expected, line), line
