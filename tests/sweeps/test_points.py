"""Points of a sweep: each composes as Hydra composes the command line with its values."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from small_runs import CONFIGS

from minigpt.sweeps.composition import Composer
from minigpt.sweeps.results import COMPLETED, SKIPPED, Point, read_sweep
from minigpt.sweeps.sweeper import SAME
from minigpt.utils.errors import UserError


def singles(sweeper, line):
    """The distinct configurations of single command lines: a line with values between `|`."""
    axes = []
    for override in line:
        key, sep, values = override.partition("=")
        axes.append([f"{key}{sep}{value}" for value in values.split("|")])
    swept = [override.replace("|", ",") for override in line]
    task = [override for override in sweeper.arguments if override not in swept]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return list(
            dict.fromkeys(
                plain(compose, "train", [*task, *single]) for single in itertools.product(*axes)
            )
        )


def plain(function, *args):
    # What a function composes, as JSON, in which 1 is not 1.0, nor true; or its error
    try:
        return json.dumps(OmegaConf.to_container(function(*args)), sort_keys=True)
    except HydraException as error:
        return str(error)


def composed_job(sweeper, overrides):
    """The configuration of a job, as its own process composes it."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        line = [*sweeper.cfg.hydra.overrides.hydra, *overrides]
        config = compose("train", line, return_hydra_config=True)
    folder = Path(config.hydra.run.dir)
    assert (folder / "summary.json").exists()
    # Of Hydra's own launcher
    assert folder == Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
    return config


def without_hydra(config):
    with open_dict(config):
        del config["hydra"]
    return config


LONG = "a/../b" * 50


LINES = {
    "lists, dicts and one value": [
        "optimizer.betas=[0.9,0.95]|[0.8,0.9]",
        "model.n_kv_head=1",
        "callbacks.samples={seed:1}",
    ],
    "a group and values that it sets or lacks": [
        "trainer=cpu|auto",
        "trainer.gradient_clip_val=null|1",
        "+trainer.benchmark=true",
        "tokenizer=char",
    ],
    "strings": [f"data.field='1: the'|1-the|\"it's\"|'x=1,y'|'7'|7|'null'|'[fox]'|{LONG}1|{LONG}2"],
    "dicts after a group, and a value after a dict that holds it": [
        "optimizer=muon",
        "optimizer={lr:0.01}|{lr:0.02}",
        "model={n_embd:64,n_layer:1}|{n_layer:2}",
        "model.n_embd=32",
    ],
    "values and choices, of which the last wins": [
        "seed=1|2",
        "seed=3|4",
        "model.dropout=0.1",
        "++model.dropout=0.3",
        "schedule=cosine|linear",
        "schedule=constant",
    ],
    "numbers": ["++optimizer.weight_decay=0|0.0|1e-8|1_000"],
    "interpolations, a deleted and an added value": [
        "model.dropout=${optimizer.weight_decay}|0.2",
        "experiment=nanogpt_cpu",
        "~callbacks.samples.seed",
        "+callbacks.samples.seed=3",
    ],
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_point_composes_as_the_single_command_line_with_its_values(plan, line):
    sweeper = plan(*(override.replace("|", ",") for override in line))
    points = [point for point in sweeper.points if point.reason != SAME]
    expected = singles(sweeper, line)
    assert [
        plain(lambda *line: sweeper.composer.compose(*line)[0], point.overrides) for point in points
    ] == expected  # which is checked
    names = [point.folder.name for point in points]
    assert len(set(names)) == len(names)
    assert all(len(name.encode()) < 200 and re.fullmatch(r"[\w.,=+-]+", name) for name in names)
    # The first and the last job compose it, too
    by_folder = dict(zip(names, expected, strict=True))
    jobs = [*itertools.chain(*sweeper.engine.batches)]
    assert len(jobs) == sum(point.status != SKIPPED for point in points)
    for overrides in (jobs[0], jobs[-1]):
        config = composed_job(sweeper, overrides)
        assert by_folder[Path(config.hydra.run.dir).name] == plain(without_hydra, config)
    read = read_sweep(sweeper.folder)
    # A report separates them, too
    assert len({tuple(point.overrides.items()) for point in read}) == len(read)


def test_a_sweep_over_groups_takes_none(plan):
    without, with_ = plan("callbacks=null,default").engine.ran
    assert {value for key, value in without.items() if key.startswith("callbacks.")} == {None}
    assert with_["callbacks.checkpoint.save_top_k"] == 1


def test_the_product_of_all_axes_runs_in_the_order_given_in_all_notations_of_hydra(plan):
    sweeper = plan("seed=range(2,0,-1)", "schedule=glob(c*)", "callbacks.samples.seed='é',3")
    expected = [*itertools.product("21", ("constant", "cosine"), ("'é'", "3"))]
    assert [(*point.overrides.values(),) for point in sweeper.points] == expected
    assert (
        sweeper.points[0].folder
        == sweeper.folder / "seed=2,schedule=constant,callbacks.samples.seed=é"
    )


def test_the_command_line_overrides_the_sweep_file_and_the_last_of_equal_settings_wins(plan):
    sweeper = plan(
        "+sweep=heads_by_width",
        "model.n_embd=32,64",
        "model.n_head=3,5",
        "model.n_head=2",
        "seed=1",
    )
    assert [point.overrides for point in sweeper.points] == [
        {"model.n_embd": "32"},
        {"model.n_embd": "64"},
    ]
    ran = sweeper.engine.ran
    assert [(each["model.n_head"], each["max_steps"]) for each in ran] == [(2, 300)] * 2


def test_a_grid_is_composed_once_per_choice_and_its_points_are_not_compared_in_pairs(
    plan, monkeypatch
):
    called = Counter()

    def count(name, function):
        return lambda *args: called.update([name]) or function(*args)

    compose = count("composed", ConfigLoaderImpl.load_sweep_config)
    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", compose)
    monkeypatch.setattr(Point, "identity", property(count("compared", Point.identity.fget)))
    line = ["schedule=cosine,linear", "seed=range(1,13)", "model.n_head=2"]
    assert len(plan(*line).points) == 24
    assert called["composed"] == 2
    assert called["compared"] < 10 * 24


def test_a_setting_whose_values_have_no_effect_is_refused(plan):
    with pytest.raises(UserError, match=r"^model\.n_head has the same effect with all its values"):
        plan("model.n_head=2,4", "model={n_head:8}")


def test_a_name_that_is_too_long_for_a_file_system_is_cut_at_a_character_and_stays_unique(
    plan, tmp_path
):
    fields = [
        "text",
        "é" * 110,
        *(f"{'訓練' * 60}{end}" for end in "ab"),
        "𠀋" * 61 + "e",
        "e𠀋" * 61,
        "🎉" * 200,
    ]
    quoted = ",".join(f"'{field}'" for field in fields)
    line = [f"data.field={quoted}"]
    points = plan(*line).points
    names = [point.folder.name for point in points]
    assert names[:2] == [f"field={value}" for value in fields[:2]]
    assert len({*names}) == 7
    for name, point in zip(names, points, strict=True):
        value = point.settings["data.field"].replace("🎉", "-")  # as all but letters and digits
        assert len(name) <= 120  # a name of W&B has 128
        assert len(name.encode()) <= 255
        assert re.fullmatch(rf"field=(text|-|{value[:8]}[{re.escape(value)}]{{50,}}.*)", name)
    assert {file.name for file in (tmp_path / "sweep").iterdir() if file.is_dir()} == {*names}
    assert [point.status for point in read_sweep(tmp_path / "sweep")] == [COMPLETED] * 7
    resumed = plan(*line, "resume=auto")
    assert (resumed.engine.launches, [point.folder.name for point in resumed.points]) == ([], names)


def test_a_sweep_may_have_any_folder_and_leaves_the_names_for_weights_and_biases_to_its_user(
    plan, tmp_path
):
    name = "it's a b, c=[$HOME] é"
    sweeper = plan("seed=1,2", "logger=wandb", "logger.wandb.name=same", folder=tmp_path / name)
    config = composed_job(sweeper, sweeper.engine.batches[0][1])
    assert (config.logger.wandb.name, config.logger.wandb.group) == ("same", None)
    assert sweeper.points[1].folder == tmp_path / name / "seed=2"


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
VALID = [
    "seed=1 seed=2 ++seed=3 model.n_embd=64 optimizer.lr=1e-3",
    "model.n_layer=3 model=baby model={n_layer:2,n_head:1} model.n_head=4 optimizer=muon "
    "optimizer.momentum=0.9",
    "+model.mine=1 +mine.deep.er={a:[1,{b:null}]} +mine.deep.er.c=x ++model.dropout=0.1 "
    "++other=1e4",
    "~callbacks.samples ~model.n_head ~optimizer.lr=0.003 ~seed=1337",
    "optimizer.betas=[0.9,0.95] +mine=[1,2] +mine=[3] data=[text,tinystories]",
    "model.dropout=${optimizer.weight_decay} seed=${oc.env:HOME} data.field=${now:%Y}",
    "data.field='a:b' model.norm=\"x,y\" schedule.warmup_steps='7' data.separator='\\n'",
    "data.path=null seed=??? max_steps=1_000 ema_decay=.5 compile=yes",
    "experiment=[mine,sprint_cpu] mine.number=3 schedule.extra=[]",
    "experiment=mine +logger@second=wandb second.wandb.project=x mine.null_too=1",
    "experiment=of_hydra ~choices hydra={job:{num:3}}",
]
INVALID = [
    "+callbacks=attention",
    "model.n_heads=3",
    "seed=1 +seed=1",
    "seed.deep=1",
    "~mine",
    "~optimizer.lr=0.1",
    "++model=baby",
    "seed@other=1",
    "seed=1,2 model=nano,baby",
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

    return expected, lambda line: composer.compose_line(line)[0], master


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


@pytest.mark.parametrize("line", [*VALID, *INVALID])
def test_a_configuration_is_what_hydra_composes(composers, line):
    expected, composer, _ = composers
    given = line.split()
    composed = outcome(expected, given)
    assert (len(composed) == 2 and isinstance(composed[0], list)) == (line in VALID)
    assert outcome(composer, given) == composed


def test_a_time_that_is_resolved_between_two_points_is_that_of_the_later_ones(composers):
    _, composer, master = composers
    line = ["data.field=${now:%Y}"]
    before = composer(line)
    assert before.data.field.isdecimal()
    resolved = OmegaConf.get_cache(before)["now"]
    OmegaConf.set_cache(master, {"now": dict.fromkeys(resolved, "1999")})
    assert composer(line).data.field == "1999"


@pytest.mark.slow
def test_the_configuration_of_any_command_line_is_what_hydra_composes(composers):
    expected, composer, _ = composers
    rng = random.Random(0)
    overrides = [override for line in VALID for override in line.split()]
    for _ in range(100):
        line = rng.sample(overrides, k=rng.randint(2, 5))
        line += rng.sample(INVALID, k=1)[0].split() if rng.random() < 0.1 else []
        assert outcome(composer, line) == outcome(expected, line), line
