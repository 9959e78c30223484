"""A plan keeps the settings that the user gives, fills the time, and trains as a run."""

import json
import math
import re
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from math import log

import numpy as np
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from refusals import refused
from small_runs import column

import minigpt
from minigpt.data.prepare import load_corpus
from minigpt.extras.planner import plan as planning
from minigpt.extras.planner import planned_run
from minigpt.extras.planner.measured_steps import step_seconds
from minigpt.extras.planner.ngram_model import ngram_losses
from minigpt.extras.planner.planned_sizes import (
    given_settings,
    planned_heads,
    with_possible_sizes,
)
from minigpt.model.config import GPTConfig
from minigpt.runs.run import load_parts
from minigpt.runs.run_config import RunConfig
from minigpt.training.language_model import LanguageModel
from minigpt.utils.errors import UserError


@pytest.fixture
def plan(mine, planned, monkeypatch):
    """Plan for a machine of constant speed: `plan("max_steps=7")` returns what `make_plan` does."""

    def made(*overrides, seconds=100, flops_per_second=1e10, compiled=1.0):
        def step_seconds(cfg, corpus, seconds):
            config = GPTConfig(**{**cfg.model, "vocab_size": 100})
            eager = planning.tokens_per_step(cfg) * config.flops_per_token() / flops_per_second
            return eager / compiled if cfg.compile else eager

        monkeypatch.setattr(planning, "step_seconds", step_seconds)
        cfg = planned(*mine, *overrides)
        corpus = load_corpus(cfg.data, cfg.tokenizer)
        deadline = time.perf_counter() + seconds
        return planning.make_plan(cfg, corpus, given_settings(overrides), deadline=deadline)

    return made


def a_text(**changes):
    known = {
        "tokens": 1_000_000,
        "val_tokens": 100_000,
        "ngram": 5,
        "distinct_ngrams": 100_000,
        "ngram_loss": 1.6,
        "vocab_size": 65,
    }
    return planning.Text(**known | changes)


# Settings that the user gives, and those for which no loss is expected.
GIVEN = {
    "model.n_embd=40": "",
    "max_steps=7 data.batch_size=5 model.n_embd=32": "data.batch_size, max_steps below 150",
    "optimizer.lr=0.01 ema_decay=0.9": "ema_decay, optimizer.lr",
    "model=nano": "model",
    "optimizer=adamw": "optimizer",
    "max_steps=149": "max_steps below 150",
    "eval_batches=null": "",
    "ema_decay=null": "ema_decay",
    "max_steps=150 seed=3 eval_every=7 trainer=cpu": "",
}


@pytest.mark.parametrize("given", GIVEN)
def test_what_the_user_gives_stays_and_a_loss_is_expected_only_where_its_formula_was_fitted(
    plan, given
):
    planned = plan(*given.split())
    keys = {setting.partition("=")[0] for setting in given.split()}
    assert not [key for key in planned["settings"] if {key, key.partition(".")[0]} & keys]
    if GIVEN[given]:
        assert planned["expected_val_loss"] is None
        assert planned["lines"][-1].endswith(
            f"the formula of the loss was not fitted to runs with {GIVEN[given]}"
        )
    else:
        assert planned["lines"][-1].endswith(
            "validation loss {:.2f} ± {:.2f}".format(*planned["expected_val_loss"])
        )
    others = [
        "model.block_size",
        "schedule",
        "trainer.precision",
        "debug",
        "callbacks.early_stopping",
        "a_future_setting",
    ]
    assert not any(map(planning.FITTED.fullmatch, others))


def test_more_time_and_a_faster_machine_give_a_larger_model_and_a_lower_loss(plan, monkeypatch):
    monkeypatch.setattr(planning, "read_text", lambda corpus: a_text())
    slow = plan(seconds=60, flops_per_second=1e11)
    for seconds, speed in ((600, 1e11), (60, 1e12)):
        better = plan(seconds=seconds, flops_per_second=speed)
        assert better["settings"]["model.n_embd"] > slow["settings"]["model.n_embd"]
        assert better["expected_val_loss"] < slow["expected_val_loss"]


def test_the_time_includes_the_text_that_is_drawn_in_the_end(plan, monkeypatch):
    monkeypatch.setattr(planning, "read_text", lambda corpus: a_text())
    setting = "callbacks.originality.characters"
    drawing = plan(f"{setting}=300_000", seconds=60)["settings"]["max_steps"]
    none = plan(f"{setting}=null", seconds=60)["settings"]["max_steps"]
    assert 0 < drawing < 0.9 * none


def test_a_long_run_is_compiled_if_that_is_faster(plan):
    slow = {"flops_per_second": 1e7, "seconds": 600}
    long = "minutes=10"
    eager = plan(long, **slow)
    compiled = plan(long, compiled=1.5, **slow)
    assert "compile" not in eager["settings"]
    assert compiled["settings"]["compile"] is True
    assert 1.4 < compiled["settings"]["max_steps"] / eager["settings"]["max_steps"] < 1.6
    assert ", compiled" in compiled["lines"][0]
    fixed = [long, "model.n_layer=1", "model.n_embd=64", "model.layer_repeats=1"]
    most, milliseconds = re.search(
        r"; ([\d,]+) steps of ([\d.]+) ms", plan(*fixed, seconds=600)["lines"][0]
    ).groups()
    # All steps would take 720 s
    speed = 1e10 * int(most.replace(",", "")) * float(milliseconds) / 1000 / 720
    fits = plan(*fixed, compiled=1.5, seconds=600, flops_per_second=speed)
    assert fits["settings"]["compile"] is True
    too_short = plan("minutes=9", compiled=1.5, **slow)
    fewer_steps_than_fit = plan(
        long, "max_steps=300", compiled=1.5, flops_per_second=1e12, seconds=600
    )
    given = plan(long, "compile=false", compiled=1.5, **slow)
    hardly_faster = plan(long, compiled=1.03, **slow)
    assert not any(
        "compile" in made["settings"]
        for made in (too_short, fewer_steps_than_fit, given, hardly_faster)
    )


@pytest.mark.xdist_group("compiled")
@pytest.mark.slow
def test_without_a_compiler_a_long_run_is_not_compiled(cfg, text, tmp_path):
    from torch._inductor import config as inductor

    cfg.data.update(path=str(text), folder=str(tmp_path))
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    cfg.model.update(n_layer=1, n_embd=32, n_head=1, block_size=8)
    assert 0 < step_seconds(cfg, corpus, seconds=0.1) < planning.inf
    with inductor.patch("cpp.cxx", (None, str(tmp_path / "missing"))):
        assert planning.compiled_step_seconds(cfg, corpus, seconds=0.1) == planning.inf


def test_the_expected_loss_follows_the_n_grams_of_the_text_and_the_training(cfg):
    def expected(steps=1000, **changes):
        cfg.max_steps = steps
        return planning.expected_loss(cfg, a_text(**changes))[0]

    assert expected(ngram_loss=3.0) == pytest.approx(2 * expected(ngram_loss=1.5))
    assert expected(1000) > expected(2000) > expected(4000)
    # Learns from more of it
    assert expected(4000, tokens=10_000_000) < 0.95 * expected(4000, tokens=1_000_000)
    assert expected(10**9) == expected(10**8)  # more steps overfit
    shallow = expected()
    cfg.model.n_layer *= 2
    deep = expected()
    cfg.model.layer_repeats = 2
    assert expected() == deep < shallow  # a layer that is used twice counts as two


def test_a_text_sets_its_ngrams_windows_and_regularization(cfg):
    def of(**changes):
        return planning.shape(cfg, set(), a_text(**changes), 2, 96)

    small = of(tokens=50_000)
    large = of(tokens=50_000_000)
    assert small["model.ngram_dropout"] > large["model.ngram_dropout"] == 0
    assert small["optimizer.ngram_weight_decay"] > large["optimizer.ngram_weight_decay"] == 1
    # of 1 token, no n-gram predicts better than frequencies
    assert [of(ngram=n)["model.ngram"] for n in (1, 2, 7)] == [0, 2, 7]
    windows = planning.windows
    # Tokens of the text, and of the training
    texts = ((50_000, 10**6), (10**9, 10**6), (10**9, 10**8), (10**6, 10**8))
    rows = [windows(a_text(tokens=n), trained)["model.ngram_buckets"] for n, trained in texts]
    # The tables hold the n-grams that the training reads
    assert rows[0] == rows[1] == rows[3] < rows[2]
    blocks = [windows(a_text(), tokens)["model.block_size"] for tokens in (1e5, 1e6, 1e7, 1e8)]
    assert blocks == [128, 128, 512, 1024]
    assert windows(a_text(val_tokens=40), 1e7)["model.block_size"] == 32
    short = windows(a_text(), 1e5, 1e5)  # fewer tokens per step rather than fewer steps
    assert 1e5 / short["data.batch_size"] / short["model.block_size"] == pytest.approx(
        150, rel=0.05
    )
    # Unless the steps are given, and the time allows more
    assert windows(a_text(), 1e5)["data.batch_size"] == 16


def test_a_text_that_is_read_too_often_is_learned_by_several_models(cfg):
    text = a_text()
    useful = planning.useful_tokens(cfg, set(), text)
    found = [planning.chain(cfg, set(), text, n * useful) for n in (0.5, 1.7, 2.1, 3.5, 99)]
    assert found == [(useful / 2, 1), (useful, 1), (useful, 2), (useful, 3), (useful, 4)]
    # Not beside callbacks that end a training, nor if what a model predicts takes too much memory
    assert planning.chain(cfg, {"callbacks"}, text, 9 * useful)[1] == 1
    assert planning.chain(cfg, set(), a_text(vocab_size=50_257), 9 * useful)[1] == 1
    # Each ends with a validation.
    cfg = planning.updated(cfg, {"callbacks.generations": {"count": 3}})
    settings = planning.length(cfg, set(), text, step=0.1, seconds=600)
    assert settings["max_steps"] % (3 * settings["eval_every"]) == 0


@pytest.mark.parametrize("val_tokens", [2_000, 100_000, 100_000_000])
@pytest.mark.parametrize("seconds", [10, 600, 40_000])
@pytest.mark.parametrize("batches", [None, 5])
def test_steps_and_validations_fill_the_time(cfg, val_tokens, seconds, batches):
    text = a_text(tokens=10**10, val_tokens=val_tokens)
    cfg.eval_batches = batches
    given = {"eval_batches"} if batches else set()
    settings = planning.length(cfg, given, text, 0.02, seconds)
    validations = -(-settings["max_steps"] // settings["eval_every"])
    part = batches or settings["eval_batches"] or 10**7
    part *= cfg.data.eval_batch_size * cfg.model.block_size
    validating = validations * min(part, val_tokens) / planning.tokens_per_step(cfg) * 0.02 / 3
    assert 0.9 * seconds < settings["max_steps"] * 0.02 + validating < 1.05 * seconds
    assert (1 if batches else 2) <= validations <= 11


def test_a_long_validation_that_is_given_is_the_only_one(cfg):
    cfg.eval_batches = None
    text = a_text(tokens=10**10, val_tokens=10**7)
    settings = planning.length(cfg, {"eval_batches"}, text, 0.02, 600)
    assert settings["max_steps"] <= settings["eval_every"]


def test_a_small_text_is_not_repeated_without_end_but_makes_the_model_deeper(cfg):
    text = a_text(tokens=50_000)
    useful = planning.useful_tokens(cfg, set(), text)

    def planned(possible, *given):
        settings = planning.repeats(cfg, set(given), text, possible)
        assert settings["model.n_layer"] == cfg.model.n_layer * settings["model.layer_repeats"]
        return settings["model.layer_repeats"]

    assert [planned(share * useful) for share in (0.01, 1, 2, 3, 1000)] == [1, 1, 1, 1, 3]
    for key in ("model", "model.n_layer", "model.layer_repeats"):
        assert planned(1000 * useful, key) == 1
    steps = planning.length(cfg, set(), text, 0.02, 10_000)["max_steps"]
    assert 1 < steps * planning.tokens_per_step(cfg) / text.tokens < 20
    cfg.max_steps = 4  # which takes the time only when repeated
    assert planned(8 * planning.tokens_per_step(cfg), "max_steps") == 2
    cfg.data.batch_size = 1_000_000  # more than is useful, in one step
    assert planning.length(cfg, set(), text, 0.02, 10_000)["max_steps"] == 1


def test_a_text_of_any_length_has_a_plan_of_windows_that_it_has_or_one_line(plan, text, tmp_path):
    words = text.read_text(encoding="utf-8")
    (tmp_path / "val.txt").write_text(words[:1000], encoding="utf-8")
    given = [f"data.path={tmp_path}/mine.txt", f"data.val_path={tmp_path}/val.txt"]
    given += ["model.n_layer=1", "model.n_embd=32"]
    for n, block_size in {1: None, 2: 1, 7: 4, 119: 64, 129: 128}.items():
        (tmp_path / "mine.txt").write_text(words[:n], encoding="utf-8")
        too_short = pytest.raises(UserError, match="the training split has 1 tokens")
        with too_short if n < 2 else nullcontext():
            settings = plan(*given)["settings"]
            assert settings["model.block_size"] == block_size
            assert settings["model.ngram"] <= n
            assert 0 < settings["optimizer.lr"] < math.inf


def test_a_planned_average_is_over_a_twentieth_of_the_steps(cfg):
    for steps in (100, 2200, 399_999, 400_000, 1_234_567, 10**8, 10**18):
        cfg.max_steps = steps
        decay = planning.length(cfg, {"max_steps"}, a_text(), 1e-30, 100)["ema_decay"]
        # A longer average would stay as it is in single precision.
        assert 1 / (1 - decay) == pytest.approx(min(10**7, steps / 20), rel=0.01)
        assert (0 < decay < 1, len(str(decay)) <= 9) == (True, True)


def test_a_planned_rate_is_that_of_the_recipe_however_small_it_is(cfg):
    cfg.max_steps = 200
    for lr in (0.02, 3e-4, 2e-7):
        cfg.optimizer.lr = lr
        settings = planning.length(cfg, {"max_steps"}, a_text(), 0.01, 100)
        assert settings["optimizer.lr"] == pytest.approx(2 * lr)


def test_too_little_text_or_time_is_an_error(plan, tmp_path):
    (tmp_path / "short.txt").write_text("to be or not to be\n" * 100, encoding="utf-8")
    short = r"minutes=… needs 1,000 bytes of validation text, but .* has 190 bytes; use"
    refused(short, plan, f"data.path={tmp_path}/short.txt")
    slow = r"minutes=1 end before the first step, of \d+\.\d+ s; give more minutes"
    refused(slow, plan, seconds=4)  # less than a plan keeps for the start and the sample


TEXT = planning.Text(
    1_000_000, 100_000, ngram=5, distinct_ngrams=100_000, ngram_loss=1.6, vocab_size=65
)
SIZES_GIVEN = """
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
    "experiment=sprint_cpu resume=runs/a": "resume must be null or auto with the minutes of a "
    "recipe, got runs/a; set max_steps instead",
}


def test_whole_numbers_in_any_notation_are_integers_for_a_plan(planned):
    given = ["minutes=1", "model.n_embd=64.0", "model.layer_repeats=2.0", "data.batch_size=8.0"]
    cfg = planned(*given)
    sizes = with_possible_sizes(cfg, given).model
    numbers = [cfg.model.n_embd, cfg.data.batch_size, sizes.n_embd, sizes.n_layer]
    assert repr(numbers) == "[64, 8, 64, 2]"


def test_heads_are_about_64_wide():
    model = {"n_head": 4, "n_kv_head": None, "head_dim": None, "position": "rope"}
    for n_embd, n_head in {30: 1, 40: 1, 90: 1, 96: 2, 128: 2, 200: 4}.items():
        assert planned_heads({**model, "n_embd": n_embd}, {"model.n_embd"}, 64)[1] == n_head
    assert planned_heads(model | {"n_embd": 1}, set(), 96) == (96, 2)


@pytest.mark.parametrize("line", filter(None, map(str.strip, SIZES_GIVEN.splitlines())))
def test_a_plan_around_given_sizes_is_an_architecture(mine, planned, line):
    # With the given values and even heads; none is refused before the plan is made
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


def witten_bell(train, val, vocab_size, longest):
    losses = []
    distinct = []
    probabilities = [1 / vocab_size] * len(val)
    for n in range(1, longest + 1):
        followers = defaultdict(Counter)
        for i in range(n - 1, len(train)):
            followers[tuple(train[i - n + 1 : i])][train[i]] += 1
        for i in range(n - 1, len(val)):
            seen = followers.get(tuple(val[i - n + 1 : i]), Counter())
            if total := seen.total():
                probabilities[i] = (seen[val[i]] + len(seen) * probabilities[i]) / (
                    total + len(seen)
                )
        losses.append(-sum(map(log, probabilities[longest - 1 :])) / (len(val) - longest + 1))
        distinct.append(sum(map(len, followers.values())))
    return losses, distinct


@pytest.mark.parametrize("vocab_size", [5, 300, 200_000])
def test_ngram_losses_are_those_of_the_formula(vocab_size):
    random = np.random.default_rng(0)
    train, val = (random.zipf(1.5, n) % vocab_size for n in (3000, 700))
    expected_losses, expected_counts = witten_bell(train.tolist(), val.tolist(), vocab_size, 5)
    losses, distinct = ngram_losses(train.astype(np.uint32), val.astype(np.uint32), vocab_size, 5)
    assert distinct == expected_counts
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)


QUIET = ["callbacks.samples=null", "callbacks.originality=null", "callbacks.snapshots=null"]


class Lost(LanguageModel):
    def training_step(self, batch, batch_idx):
        return 1 / 0 if batch_idx == 7 else super().training_step(batch, batch_idx)


def test_a_planned_run_is_a_run_with_the_settings_of_its_plan_also_if_it_resumes(
    mine, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(planning, "LEAST_STEPS", 10)  # so that a loss is expected
    # 30 is no multiple of the n_head of nano
    short = [*mine, *QUIET, "model.n_layer=1", "model.n_embd=30", "max_steps=10", "eval_every=5"]
    command = [*short, "minutes=0.2", f"hydra.run.dir={tmp_path}/planned"]
    file = tmp_path / "planned/plan.json"
    with monkeypatch.context() as patch:
        patch.setattr("minigpt.runs.fit.LanguageModel", Lost)
        with pytest.raises(ZeroDivisionError):
            minigpt.train(command)
    # The plan is in a file, in the log and in the configuration
    before = file.read_text(encoding="utf-8")
    plan = json.loads(before)
    assert list(plan) == ["settings", "expected_val_loss", "lines", "pace"]
    printed = capsys.readouterr().err
    assert all(line in printed for line in plan["lines"])
    config = OmegaConf.load(tmp_path / "planned/.hydra/config.yaml")
    assert {key: OmegaConf.select(config, key) for key in plan["settings"]} == plan["settings"]
    # The run resumes with it, and reports the loss that it expects
    summary = minigpt.train([*command, "resume=auto"])
    assert file.read_text(encoding="utf-8") == before
    assert (summary["steps"], summary["expected_val_loss"]) == (10, plan["expected_val_loss"])
    loss, margin = plan["expected_val_loss"]
    assert 0 < margin < loss
    reached = f"{loss:.2f} ± {margin:.2f}, reached {summary['best_val_loss']:.3f}"
    assert f"\nexpected         {reached}\ntime " in capsys.readouterr().out
    # It is the run that has these settings without a plan
    settings = [f"{key}={value}".replace("None", "null") for key, value in plan["settings"].items()]
    groups = ["minutes=null", "model=planned", "optimizer=muon_fast"]
    minigpt.train([*short, *groups, *settings, f"hydra.run.dir={tmp_path}/plain"])
    for name in ("train_loss", "val_loss"):
        assert column(tmp_path / "planned", name) == column(tmp_path / "plain", name)
    # A setting that is given takes the place of the planned one
    file.write_text(json.dumps({**plan, "expected_val_loss": None}), encoding="utf-8")
    summary = minigpt.train([*command, "resume=auto", "max_steps=11", "ema_decay=0.5"])
    assert "expected_val_loss" not in summary
    assert OmegaConf.load(tmp_path / "planned/.hydra/config.yaml").ema_decay == 0.5
    file.write_text(before[:-9], encoding="utf-8")
    with pytest.raises(UserError, match=r"plan\.json is damaged .*remove it to plan again"):
        minigpt.train([*command, "resume=auto", "max_steps=22"])


@pytest.fixture
def sweep(tmp_path):
    # The folder of a run in a sweep
    (tmp_path / "sweep/0").mkdir(parents=True)
    (tmp_path / "sweep/sweep.json").write_text("{}")
    return tmp_path / "sweep/0"


def test_runs_of_a_sweep_that_differ_in_their_seed_alone_share_a_plan(
    mine, planned, sweep, monkeypatch
):
    made = iter(range(100, 200))

    def make_plan(*args, deadline):
        settings = {"max_steps": next(made)}
        return {"settings": settings, "expected_val_loss": [2.0, 0.5], "lines": []}

    monkeypatch.setattr(planning, "make_plan", make_plan)
    for line, steps in {
        "seed=1": 100,
        "seed=2": 100,
        "seed=2 model.dropout=0.1": 101,
        "seed=3 callbacks.originality.characters=500": 102,  # whose drawing takes time
        "seed=1 resume=auto": 100,
        # What is measured of a version has noise, which is that of each run
        "seed=4 code=main": 103,
        "seed=5 code=main": 104,
    }.items():
        folder = sweep.with_name(line[:6])
        folder.mkdir(exist_ok=True)
        cfg = planned(*mine, *line.split())
        settings, _ = planned_run.plan_overrides(cfg, folder, line.split(), 0.0)
        assert settings["max_steps"] == steps
        assert settings["callbacks.expectation"]["loss"] == 2.0


def test_a_run_resumes_with_the_plan_of_an_earlier_version_that_chose_beside_null(
    mine, planned, sweep
):
    plan = {"settings": {"eval_batches": 12, "max_steps": 7}, "expected_val_loss": None}
    (sweep / "plan.json").write_text(json.dumps(plan | {"lines": []}), encoding="utf-8")
    line = ["eval_batches=null", "resume=auto"]
    settings, _ = planned_run.plan_overrides(planned(*mine, *line), sweep, line, 0.0)
    assert settings == plan["settings"]


def test_a_device_that_is_missing_is_an_error_of_one_line(cfg, text, tmp_path):
    cfg.data.update(path=str(text), folder=str(tmp_path))
    cfg.trainer.accelerator = "abacus"
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    refused("^the trainer cannot be built: ", step_seconds, cfg, corpus, seconds=0.1)


def test_a_sweep_finds_the_plan_that_it_made_when_settings_had_other_names(
    mine, planned, monkeypatch
):
    # The name of a shared plan is a checksum of settings, as earlier versions named them
    hashed = []
    monkeypatch.setattr(planned_run, "sha256_json", hashed.append)
    for line in ([], ["callbacks.originality.characters=500"], ["callbacks=none"]):
        planned_run._checksum(planned(*mine, *line))
    for settings in hashed:
        assert settings["optimizer._target_"] == "minigpt.optim.muon"
        assert settings["schedule._target_"].startswith("minigpt.schedules.")
        assert not [key for key in settings if key.startswith("callbacks.originality")]
        assert "code" not in settings
    assert [settings["originality"] for settings in hashed] == [20_000, 500, None]


def test_a_plan_that_is_refused_is_not_written_for_the_runs_that_share_it(mine, sweep, monkeypatch):
    planned_length = planning.length
    wrong = {}
    monkeypatch.setattr(planning, "step_seconds", lambda *_, **__: 0.01)
    monkeypatch.setattr(planning, "length", lambda *args: planned_length(*args) | wrong)
    for key, value, message in (
        ("ema_decay", 1.0, r"^ema_decay must be .*, got 1\.0"),
        ("model.n_embd", 33, r"^model\.head_dim must be even with model\.position=rope, got 33"),
        ("model.block_size", 10**6, "^the training split has 18000 tokens, but a window needs"),
    ):
        wrong.clear()
        wrong[key] = value
        with pytest.raises(UserError, match=message):
            minigpt.train([*mine, "model.n_layer=1", "model.n_head=1", f"hydra.run.dir={sweep}"])
        assert [*sweep.parent.glob(".plan-*.json")] == []


def test_several_processes_have_no_plan(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(planned_run, "launcher_sizes", lambda: (1, 2))
    with pytest.raises(UserError, match="minutes plans for one process; set max_steps instead"):
        minigpt.train([*mine, f"hydra.run.dir={tmp_path}/run"])
