"""With `minutes=`, a recipe and the model of `init_from=` are trained as they are, for a time."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from refusals import refused
from small_runs import column, composed, small_run

import minigpt
from minigpt.data.prepare import load_corpus
from minigpt.extras.planner import measured_steps, planned_run, timed_recipe
from minigpt.extras.planner import plan as planning
from minigpt.extras.planner.planned_sizes import given_settings, planned_overrides
from minigpt.extras.planner.swept_plans import swept_overrides
from minigpt.model.config import GPTConfig
from minigpt.runs.overrides import complete_overrides
from minigpt.training.language_model import LanguageModel


def a_recipe(**changes):
    sizes = {"max_steps": 1000, "eval_every": 250, "schedule": {"warmup_steps": 100}}
    return OmegaConf.create({**sizes, **changes})


def test_what_counts_steps_is_in_proportion_to_those_that_the_time_allows():
    def length(seconds, *given, **changes):
        settings = timed_recipe.recipe_length(a_recipe(**changes), set(given), 0.5, 0.0001, seconds)
        return [*settings.values()]

    assert length(200.1) == [400, 100, 40]
    assert length(1500.1) == [3000, 750, 300]
    # What is given stays, and of steps at most so many are taken
    assert length(200.1, "eval_every", "schedule.warmup_steps") == [400]
    assert length(200.1, "max_steps") == [400, 100, 40]
    assert length(1500.1, "max_steps") == [1000, 250, 100]
    # A schedule of one's own may have no warmup, and a recipe be validated in the end alone
    assert length(200.1, schedule={}) == [400, 100]
    assert length(200.1, eval_every=3000) == [400, 1200, 40]


def test_steps_and_validations_fill_the_time_of_a_recipe():
    random = np.random.default_rng(0)
    for _ in range(500):
        recipe = a_recipe(
            max_steps=int(random.integers(1, 300)), eval_every=int(random.integers(1, 300))
        )
        step, validation = 10 ** random.uniform(-3, 1, 2)
        seconds = step + validation + random.exponential(300)
        given = {"eval_every"} if random.random() < 0.5 else set()
        settings = timed_recipe.recipe_length(recipe, given, step, validation, seconds)
        steps = settings["max_steps"]
        every = settings.get("eval_every", recipe.eval_every)

        def validations(steps, every=every):
            return -(-steps // every)

        def taken(steps, step=step, validation=validation, validations=validations):
            return steps * step + validations(steps) * validation

        assert steps >= 1
        assert taken(steps) <= seconds * (1 + 1e-9)
        if given:
            assert taken(steps + 1) > seconds * (1 - 1e-9)
        else:
            # At most as many as the recipe has, and as a share of the time allows
            assert validations(steps) <= validations(recipe.max_steps, recipe.eval_every)
            assert validations(steps) == 1 or validations(steps) * validation <= 0.05 * seconds
            assert seconds - taken(steps) <= step + 0.05 * seconds


@pytest.fixture
def timed(text, tmp_path, monkeypatch):
    """Plan on a machine of constant speed, by a clock of its own: `timed("experiment=fast_cpu")`
    returns what `time_recipe` does.
    """
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now

    def made(*overrides, seconds=100, speed=1e9, compiling=0.0, model=None):
        cfg = composed(*small_run(text, tmp_path, *overrides)[:3], "minutes=1", *overrides)
        corpus = load_corpus(cfg.data, cfg.tokenizer)
        config = model or GPTConfig(**{**cfg.model, "vocab_size": 100})

        def step_seconds(cfg, corpus, *, seconds, config, settle=False):
            clock.now += seconds + compiling
            return planning.tokens_per_step(cfg) * config.flops_per_token() / speed

        for module in (planning, timed_recipe):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(timed_recipe, "step_seconds", step_seconds)
        given = given_settings(overrides)
        deadline = clock.now + seconds
        return timed_recipe.time_recipe(cfg, corpus, config, given, deadline=deadline)

    return made


FAST = ["experiment=fast_cpu", "callbacks.originality=null", "minutes=1"]


def test_the_time_changes_the_steps_of_a_recipe_alone(timed):
    plan = timed(*FAST)
    steps = plan["settings"]["max_steps"]
    assert {*plan["settings"]} == {"max_steps", "eval_every", "schedule.warmup_steps"}
    assert (plan["expected_val_loss"], plan["of_steps"]) == (None, 1900)
    (line,) = plan["lines"]
    words = (
        r"plan        max_steps [\d,]+, eval_every \d+, .*; steps of [\d.]+ ms; without .* 1,900"
    )
    assert re.match(words, line)
    faster = timed(*FAST, speed=2e9)["settings"]["max_steps"]
    longer = timed(*FAST, seconds=195)["settings"]["max_steps"]  # 5 s are for the start
    assert faster / steps == pytest.approx(2, rel=0.1)
    assert longer / steps == pytest.approx(2, rel=0.1)


def test_the_text_that_is_drawn_and_large_weights_take_some_of_the_time(timed):
    steps = timed(*FAST)["settings"]["max_steps"]
    drawing = timed(FAST[0], FAST[2])["settings"]["max_steps"]  # 10 s of 90
    assert 0.85 < drawing / steps < 0.95
    wide = GPTConfig(vocab_size=50_000, block_size=128, n_layer=1, n_head=1, n_embd=1000)
    small = timed(*FAST, model=wide, speed=1e12)
    lasts = small["settings"]["max_steps"] * float(re.search(r"of ([\d.]+) ms", str(small))[1])
    assert lasts / 1000 < 90 - 1e-7 * wide.num_params()


def test_steps_of_a_model_are_measured_in_its_own_size(timed):
    narrow = GPTConfig(vocab_size=100, block_size=64, n_layer=1, n_head=1, n_embd=32)
    deep = GPTConfig(vocab_size=100, block_size=64, n_layer=9, n_head=1, n_embd=32)
    weights = ["model=pretrained", "init_from=there", FAST[1]]
    plans = [timed(*weights, model=model, speed=1e8) for model in (narrow, deep)]
    narrow_steps, deep_steps = (plan["settings"]["max_steps"] for plan in plans)
    assert narrow_steps > 2 * deep_steps > 0


def test_compilation_is_part_of_the_time(timed):
    compiled = [*FAST, "compile=true"]
    plan = timed(*compiled)
    assert ", compiled;" in plan["lines"][0]
    assert "compile" not in plan["settings"]
    # The compilation for the measurement, the one after it, and that of the run
    shorter = timed(*compiled, seconds=160, compiling=20)
    steps = [each["settings"]["max_steps"] for each in (plan, shorter)]
    assert steps[1] == pytest.approx(steps[0], rel=0.1)
    too_short = r"minutes=1 end before the first step, of .* s; give more minutes, or validate on "
    refused(rf"{too_short}.*, or set compile=false$", timed, *compiled, compiling=40)
    refused(rf"{too_short}a part with eval_batches=…$", timed, *FAST, seconds=5)


@pytest.mark.parametrize(("busy", "settle", "steps"), [(0, 0, 4), (0, 1, 6), (1, 0, 4), (1, 1, 13)])
def test_steps_are_measured_with_the_threads_that_have_cores(
    text, tmp_path, monkeypatch, busy, settle, steps
):
    taken = []

    class Balancer:
        most = 2

        def __init__(self, **settings):
            torch.set_num_threads(2)

        def start(self):
            taken.append(torch.get_num_threads())

        def end(self):
            if busy and len(taken) == 6:  # as `ThreadBalancer` does after three and three steps
                torch.set_num_threads(1)

    monkeypatch.setattr(measured_steps, "ThreadBalancer", Balancer)
    monkeypatch.setattr(measured_steps, "SLOW", math.inf)
    cfg = composed(*small_run(text, tmp_path, "trainer.precision=32-true"))
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    before = torch.get_num_threads()
    try:
        measured_steps.step_seconds(cfg, corpus, seconds=1e-9, settle=bool(settle))
    finally:
        torch.set_num_threads(before)
    assert len(taken) == steps
    assert taken[6:] == [1] * len(taken[6:])


class Lost(LanguageModel):
    def training_step(self, batch, batch_idx):
        return 1 / 0 if batch_idx == 7 else super().training_step(batch, batch_idx)


def test_a_recipe_is_trained_as_without_minutes_but_for_the_planned_steps_also_if_it_resumes(
    text, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(timed_recipe, "step_seconds", lambda *_, **__: 1.0)
    sizes = small_run(text, tmp_path / "data", "experiment=sprint_cpu", "seed=5")
    settings = [each for each in sizes if not each.startswith("eval_every")]
    command = [*settings, "max_steps=80", "minutes=1", f"hydra.run.dir={tmp_path}/timed"]
    with monkeypatch.context() as patch:
        patch.setattr("minigpt.runs.fit.LanguageModel", Lost)
        with pytest.raises(ZeroDivisionError):
            minigpt.train(command)
    plan = json.loads((tmp_path / "timed/plan.json").read_text(encoding="utf-8"))
    planned = plan["settings"]
    assert 7 < planned["max_steps"] < 60
    assert plan["lines"][0] in capsys.readouterr().err
    # What the recipe, the user and the plan set is in the configuration
    config = OmegaConf.load(tmp_path / "timed/.hydra/config.yaml")
    assert {key: OmegaConf.select(config, key) for key in planned} == planned
    assert config.optimizer._target_ == "minigpt.training.optim.muon"
    assert (config.model.smear, config.ema_decay, config.eval_batches) == (2, None, None)
    # It resumes to the planned steps, and is the run that has them without minutes
    summary = minigpt.train([*command, "resume=auto"])
    assert (summary["steps"], "expected_val_loss" in summary) == (planned["max_steps"], False)
    same = [f"{key}={value}" for key, value in planned.items()]
    minigpt.train([*settings, *same, f"hydra.run.dir={tmp_path}/plain"])
    for name in ("train_loss", "val_loss"):
        assert column(tmp_path / "timed", name) == column(tmp_path / "plain", name)
    # Other steps that are given take the place of the planned ones
    more = planned["max_steps"] + 2
    assert minigpt.train([*command, f"max_steps={more}", "resume=auto"])["steps"] == more
    # A run without a plan is not timed when it resumes
    again = [*command[:-1], f"hydra.run.dir={tmp_path}/plain", "resume=auto"]
    refused("plain holds a run without a plan; resume it with minutes=null$", minigpt.train, again)


def test_weights_are_trained_for_some_minutes(trained, text, tmp_path):
    run = trained()
    given = ["max_steps=3", "minutes=5", f"init_from={run}", f"hydra.run.dir={tmp_path}/run"]
    small = small_run(text, tmp_path / "data", *given)
    summary = minigpt.train([each for each in small if each != "max_steps=20"])
    config = OmegaConf.load(tmp_path / "run/.hydra/config.yaml")
    assert (summary["steps"], config.schedule.warmup_steps) == (3, 0)
    assert config.optimizer._target_ == "minigpt.training.optim.adamw"
    assert summary["params"] == minigpt.load_checkpoint(run)[0].num_params()


def test_groups_of_a_planned_model_are_selected_only_without_a_recipe():
    def groups(*line):
        complete = complete_overrides(line)
        return [each for each in complete if each.startswith(("model=", "optimizer="))]

    planned = ["model=planned", "optimizer=muon_fast"]
    for minutes in ("minutes=1", "++minutes=1", "+minutes=1"):
        assert groups(minutes) == groups(minutes, "experiment=null") == planned
        assert groups(minutes, "optimizer=adamw") == ["optimizer=adamw", "model=planned"]
        assert groups(minutes, "experiment=fast_cpu") == []
        assert groups(minutes, "init_from=runs/some") == ["model=pretrained"]
    # Of a sweep over both, each point selects its own
    assert planned_overrides({"experiment": "null,fast_cpu"}) == []


def test_each_run_of_a_sweep_plans_the_steps_of_its_recipe_itself(text, tmp_path, monkeypatch):
    made = iter(range(100, 200))

    def time_recipe(*args, deadline):
        settings = {"max_steps": next(made), "schedule.warmup_steps": 3, "eval_every": 50}
        return {"settings": settings, "expected_val_loss": None, "lines": [], "of_steps": 80}

    monkeypatch.setattr(timed_recipe, "time_recipe", time_recipe)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/sweep.json").write_text("{}")
    for line, steps in {
        "seed=1": 100,
        "seed=2": 101,
        "seed=1 resume=auto": 100,
        "seed=1 resume=auto max_steps=90": 90,
        "seed=2 max_steps=80": 102,  # at most, as many as the recipe has
        "seed=2 schedule=cosine": 103,  # with the warmup of the recipe
    }.items():
        folder = tmp_path / "sweep" / line[:6]
        folder.mkdir(exist_ok=True)
        overrides = ["minutes=1", "experiment=sprint_cpu", *line.split()]
        cfg = composed(f"data.path={text}", f"data.folder={tmp_path}/data", *overrides)
        settings, _ = planned_run.plan_overrides(cfg, folder, overrides, 0.0)
        assert (settings.get("max_steps", cfg.max_steps), line) == (steps, line)
        assert settings["schedule.warmup_steps"] == 3


def test_only_plans_of_new_models_are_made_to_validate_the_whole_split():
    def validated(*line, eval_batches=None):
        overrides = {each.partition("=")[0]: each for each in line}
        cfg = SimpleNamespace(eval_batches=eval_batches)
        return swept_overrides(overrides, cfg).get("eval_batches")

    whole = "eval_batches=null"
    for line in ("seed=1,2", "experiment=null,fast_cpu", "++experiment=choice(fast_cpu, null)"):
        assert validated("minutes=1", line) == whole
        assert validated("minutes=1", line, "eval_batches=4") == "eval_batches=4"
        assert validated("minutes=1", line, eval_batches=4) is None
    for line in ("experiment=fast_cpu", "experiment=a,finetune_cpu", "init_from=runs/null/a,b"):
        assert validated("minutes=1", line) is None
    assert validated("minutes=1", "init_from=runs/a", "experiment=null") is None
