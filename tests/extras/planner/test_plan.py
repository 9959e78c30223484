"""`minutes=`: the plan is made of settings, keeps those that the user gives, and is that of a resumed run."""

import json
import math
import re
import time
from contextlib import nullcontext

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from small_runs import column, composed

import minigpt
from minigpt.data.prepare import load_corpus
from minigpt.extras.planner import plan as planning
from minigpt.extras.planner.planned_sizes import (
    given_settings,
    planned_heads,
    with_possible_sizes,
)
from minigpt.model.config import GPTConfig
from minigpt.runs.overrides import complete_overrides
from minigpt.runs.run import load_parts
from minigpt.runs.run_config import RunConfig
from minigpt.training.language_model import LanguageModel
from minigpt.utils.errors import UserError


@pytest.fixture
def mine(text, tmp_path):
    return [
        f"data.path={text}",
        f"data.folder={tmp_path}/data",
        "data=text",
        "trainer=cpu",
        "minutes=1",
    ]


@pytest.fixture
def plan(mine, monkeypatch):
    """Plan for a machine of constant speed: `plan("max_steps=7")` returns what `make_plan` does."""

    def made(*overrides, seconds=100, flops_per_second=1e10, compiled=1.0):
        def step_seconds(cfg, corpus, seconds):
            config = GPTConfig(**{**cfg.model, "vocab_size": 100})
            eager = planning.tokens_per_step(cfg) * config.flops_per_token() / flops_per_second
            return eager / compiled if cfg.compile else eager

        monkeypatch.setattr(planning, "step_seconds", step_seconds)
        cfg = composed(*complete_overrides([*mine, *overrides]))
        corpus, deadline = load_corpus(cfg.data, cfg.tokenizer), time.perf_counter() + seconds
        return planning.make_plan(cfg, corpus, given_settings(overrides), deadline=deadline)

    return made


@pytest.fixture
def cfg():
    return composed(*complete_overrides(["minutes=1"]))


def a_text(**changes):
    known = {
        "tokens": 1_000_000,
        "val_tokens": 100_000,
        "ngram": 5,
        "distinct_ngrams": 100_000,
        "ngram_loss": 1.6,
    }
    return planning.Text(**known | changes)


def test_whole_numbers_in_any_notation_are_integers_for_a_plan():
    given = ["minutes=1", "model.n_embd=64.0", "model.layer_repeats=2.0", "data.batch_size=8e0"]
    cfg = composed(*complete_overrides(given))
    sizes = with_possible_sizes(cfg, given).model
    assert (
        repr([cfg.model.n_embd, cfg.data.batch_size, sizes.n_embd, sizes.n_layer])
        == "[64, 8, 64, 2]"
    )


def test_a_planned_run_is_a_run_with_the_settings_of_its_plan_also_if_it_resumes(
    mine, tmp_path, monkeypatch, capsys
):
    class Lost(LanguageModel):
        def training_step(self, batch, batch_idx):
            return 1 / 0 if batch_idx == 15 else super().training_step(batch, batch_idx)

    class Damaging(LanguageModel):
        def on_train_end(self):
            (tmp_path / "planned/plan.json").write_text("{")

    monkeypatch.setattr(planning, "LEAST_STEPS", 20)  # so that a loss is expected
    sizes = ["model.n_layer=1", "model.n_embd=30"]  # 30 is no multiple of nano's n_head
    short = [
        *mine,
        *sizes,
        "originality=null",
        "callbacks.samples=null",
        "max_steps=20",
        "eval_every=10",
    ]
    command = [*short, f"hydra.run.dir={tmp_path}/planned"]
    with monkeypatch.context() as patch:
        patch.setattr("minigpt.runs.fit.LanguageModel", Lost)
        with pytest.raises(ZeroDivisionError):
            minigpt.train(command)
    before = (tmp_path / "planned/plan.json").read_text(encoding="utf-8")
    settings, expected, lines = json.loads(before).values()
    printed = capsys.readouterr().err
    assert all(line in printed for line in lines)
    config = OmegaConf.load(tmp_path / "planned/.hydra/config.yaml")
    assert {key: OmegaConf.select(config, key) for key in settings} == settings
    with monkeypatch.context() as patch:
        patch.setattr("minigpt.runs.fit.LanguageModel", Damaging)
        summary = minigpt.train([*command, "resume=auto"])
    (tmp_path / "planned/plan.json").write_text(before, encoding="utf-8")
    assert (summary["steps"], summary["expected_val_loss"]) == (20, expected)
    assert 0 < expected[1] < expected[0]
    assert (
        f"expected         {expected[0]:.2f} ± {expected[1]:.2f}, reached"
        in capsys.readouterr().out
    )

    numbers = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    groups = ["minutes=null", "model=planned", "optimizer=muon_fast"]
    minigpt.train([*short, *groups, *numbers, f"hydra.run.dir={tmp_path}/plain"])
    for name in ("train_loss", "val_loss"):
        assert column(tmp_path / "planned", name) == column(tmp_path / "plain", name)
    # Which the plan had chosen
    minigpt.train([*command, "resume=auto", "max_steps=21", "ema_decay=0.5"])
    assert (tmp_path / "planned/plan.json").read_text(encoding="utf-8") == before
    assert OmegaConf.load(tmp_path / "planned/.hydra/config.yaml").ema_decay == 0.5
    (tmp_path / "planned/plan.json").write_text(before[:-9], encoding="utf-8")
    with pytest.raises(UserError, match=r"plan\.json is damaged .*remove it to plan again"):
        minigpt.train([*command, "resume=auto", "max_steps=22"])


# Settings that the user gives, and those for which no loss is expected.
GIVEN = {
    "model.n_embd=40": "",
    "max_steps=7 data.batch_size=5 model.n_layer=1 model.n_embd=32": "data.batch_size, max_steps below 150",
    "optimizer.lr=0.01 ema_decay=0.9 schedule.warmup_steps=3": "ema_decay, optimizer.lr, schedule.warmup_steps",
    "model=nano": "model",
    "optimizer=adamw": "optimizer",
    "max_steps=149": "max_steps below 150",
    "max_steps=150 seed=3 eval_every=7 trainer=cpu": "",
}


def test_runs_of_a_sweep_that_differ_in_their_seed_alone_share_a_plan(mine, tmp_path, monkeypatch):
    made = iter(range(100, 200))
    plan = {"settings": {}, "expected_val_loss": None, "lines": []}
    monkeypatch.setattr(
        planning, "make_plan", lambda *_, **__: {**plan, "settings": {"max_steps": next(made)}}
    )
    (tmp_path / "sweep.json").write_text("{}")
    steps = {}
    for line in (
        "seed=1",
        "seed=2",
        "seed=2 model.dropout=0.1",
        "seed=3 logger=tensorboard",
        "seed=1 resume=auto",
    ):
        cfg = composed(*complete_overrides([*mine, *line.split()]))
        (folder := tmp_path / line[:6]).mkdir(exist_ok=True)
        steps[line] = planning.plan_run(cfg, folder, None, line.split(), 0.0).max_steps
    assert [*steps.values()] == [100, 100, 101, 100, 100]


@pytest.mark.parametrize("given", GIVEN)
def test_what_the_user_gives_stays_and_a_loss_is_expected_only_where_its_formula_was_fitted(
    plan, given
):
    planned, keys = plan(*given.split()), {setting.partition("=")[0] for setting in given.split()}
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
    slow, *better = (
        plan(seconds=60, flops_per_second=1e11),
        plan(seconds=600, flops_per_second=1e11),
    )
    for planned in (*better, plan(seconds=60, flops_per_second=1e12)):
        assert planned["settings"]["model.n_embd"] > slow["settings"]["model.n_embd"]
        assert planned["expected_val_loss"] < slow["expected_val_loss"]
    drawing, none = (
        plan(f"originality={n}", seconds=60)["settings"]["max_steps"] for n in (300_000, "null")
    )
    assert 0 < drawing < 0.9 * none  # the time includes the text that is drawn in the end


SIZES_GIVEN = [
    *(
        "model.n_head=3",
        "model.n_embd=90",
        "model.n_embd=96 model.n_head=3",
        "model={n_head:5,dropout:0.1}",
    ),
    *("model.head_dim=24", "model.head_dim=24 model.n_head=5", "model.head_dim=6 model.n_embd=45"),
    *("model.n_kv_head=3", "model.n_kv_head=3 model.n_embd=90", "model.n_kv_head=3 model.n_head=6"),
    *("model.layer_repeats=3", "model.layer_repeats=3 model.n_layer=6", "model.n_layer=3"),
    *("model.position=learned model.n_embd=45", "++model.n_head=7", "model.n_embd=2", "model=baby"),
]


def test_a_long_run_is_compiled_if_that_is_faster(plan):
    slow, long = {"flops_per_second": 1e7, "seconds": 600}, "minutes=10"
    eager, compiled = plan(long, **slow), plan(long, compiled=1.5, **slow)
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
    assert (
        plan(*fixed, compiled=1.5, seconds=600, flops_per_second=speed)["settings"]["compile"]
        is True
    )
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
    assert 0 < planning.step_seconds(cfg, corpus, seconds=0.1) < planning.inf
    with inductor.patch("cpp.cxx", (None, str(tmp_path / "missing"))):
        assert planning.compiled_step_seconds(cfg, corpus, seconds=0.1) == planning.inf


def test_heads_are_about_32_wide():
    model = {"n_head": 4, "n_kv_head": None, "head_dim": None, "position": "rope"}
    heads = [
        planned_heads({**model, "n_embd": n}, {"model.n_embd"}, 64)[1]
        for n in (30, 40, 90, 96, 128, 200)
    ]
    assert heads == [1, 1, 3, 3, 4, 5]
    assert planned_heads(model | {"n_embd": 1}, set(), 96) == (96, 3)


@pytest.mark.parametrize("given", SIZES_GIVEN)
def test_a_plan_around_given_sizes_is_an_architecture(mine, given):
    """Each size of a plan has the given values and even heads, and none is refused before the plan is made."""
    overrides = complete_overrides([*mine, *given.split()])
    cfg, given = composed(*overrides), given_settings(overrides)
    before = cfg.copy()
    load_parts(RunConfig.from_hydra(with_possible_sizes(cfg, overrides)))
    assert cfg == before
    for size in planning.SIZES:
        settings = planning.without(given, planning.shape(cfg, given, a_text(), *size))
        model = planning.updated(cfg, settings).model
        config = GPTConfig(**{**model, "vocab_size": 100})
        assert config.head_width % 2 == 0 or config.position != "rope"
        assert (
            config.head_width == 32
            or config.n_head == 1
            or given & {f"model.{x}" for x in model}
            or "model" in given
        )
        assert all(
            model[key[6:]] == cfg.model[key[6:]] for key in given if key.startswith("model.")
        )
        assert model == cfg.model or "model" not in given


REFUSED = {
    "model.n_embd=45": "model.n_embd must be a multiple of 2, got 45; use one, or set model.head_dim too",
    "model.n_embd=90 model.n_kv_head=2": "model.n_embd must be a multiple of 4, got 90",
    "model.n_embd=128 model.n_head=3": "model.n_embd must be divisible by model.n_head=3, got 128",
    "model.n_head=0": "model.n_head must be an integer ≥ 1, got 0",
    "model.n_kv_head=0": "model.n_kv_head must be an integer ≥ 1, or null, got 0",
    "model.layer_repeats=0": "model.layer_repeats must be an integer ≥ 1, got 0",
    "model.layer_repeats=2 model.n_layer=3": "model.n_layer must be divisible by model.layer_repeats=2, got 3",
    "model.head_dim=7": "model.head_dim must be even with model.position=rope, got 7",
    "model=nano model.n_head=3": "model.n_embd must be divisible by model.n_head=3, got 128",
}


@pytest.mark.parametrize(("given", "message"), REFUSED.items(), ids=REFUSED)
def test_sizes_that_no_plan_can_have_are_refused(mine, given, message):
    overrides = complete_overrides([*mine, *given.split()])
    with pytest.raises((UserError, HydraException), match=re.escape(message)):
        load_parts(RunConfig.from_hydra(with_possible_sizes(composed(*overrides), overrides)))


def test_the_expected_loss_follows_the_n_grams_of_the_text_and_the_training(cfg):
    def expected(steps=1000, **changes):
        cfg.max_steps = steps
        return planning.expected_loss(cfg, a_text(**changes))[0]

    assert expected(ngram_loss=3.0) == pytest.approx(2 * expected(ngram_loss=1.5))
    assert expected(1000) > expected(2000) > expected(4000)
    # Learns from more of it
    assert expected(4000, tokens=10_000_000) < 0.95 * expected(4000, tokens=1_000_000)
    assert expected(10**9) == expected(10**8)  # more steps overfit
    shallow, cfg.model.n_layer = expected(), 2 * cfg.model.n_layer
    deep, cfg.model.layer_repeats = expected(), 2
    assert expected() == deep < shallow  # a layer that is used twice counts as two


def test_a_text_sets_its_ngrams_windows_and_regularization(cfg):
    def of(**changes):
        return planning.shape(cfg, set(), a_text(**changes), 2, 96)

    small, large = of(tokens=50_000), of(tokens=50_000_000)
    assert small["model.ngram_dropout"] > large["model.ngram_dropout"] == 0
    assert small["optimizer.ngram_weight_decay"] > large["optimizer.ngram_weight_decay"] == 1
    # of 1 token, no n-gram predicts better than frequencies
    assert [of(ngram=n)["model.ngram"] for n in (1, 2, 7)] == [0, 2, 7]
    windows = planning.windows
    texts = (
        (50_000, 10**6),
        (10**9, 10**6),
        (10**9, 10**8),
        (10**6, 10**8),
    )  # tokens of the text, and of the training
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


@pytest.mark.parametrize("val_tokens", [2_000, 100_000, 100_000_000])
@pytest.mark.parametrize("seconds", [10, 600, 40_000])
@pytest.mark.parametrize("batches", [None, 5])
def test_steps_and_validations_fill_the_time(cfg, val_tokens, seconds, batches):
    text, given, step = (
        a_text(tokens=10**10, val_tokens=val_tokens),
        {"eval_batches"} if batches else set(),
        0.02,
    )
    cfg.eval_batches = batches
    settings = planning.length(cfg, given, text, step, seconds)
    validations = -(-settings["max_steps"] // settings["eval_every"])
    part = (
        (batches or settings["eval_batches"] or 10**7)
        * cfg.data.eval_batch_size
        * cfg.model.block_size
    )
    validating = validations * min(part, val_tokens) / planning.tokens_per_step(cfg) * step / 3
    assert 0.9 * seconds < settings["max_steps"] * step + validating < 1.05 * seconds
    assert (1 if batches else 2) <= validations <= 11


def test_a_long_validation_that_is_given_is_the_only_one(cfg):
    cfg.eval_batches = None
    settings = planning.length(
        cfg, {"eval_batches"}, a_text(tokens=10**10, val_tokens=10**7), 0.02, 600
    )
    assert settings["max_steps"] <= settings["eval_every"]


def test_a_small_text_is_not_repeated_without_end_but_makes_the_model_deeper(cfg):
    text = a_text(tokens=50_000)
    useful = planning.useful_tokens(cfg, set(), text)

    def planned(possible, *given):
        settings = planning.repeats(cfg, set(given), text, possible)
        assert settings["model.n_layer"] == cfg.model.n_layer * settings["model.layer_repeats"]
        return settings["model.layer_repeats"]

    assert [planned(share * useful) for share in (0.01, 1, 2, 3, 1000)] == [1, 1, 2, 3, 3]
    assert [
        planned(1000 * useful, key) for key in ("model", "model.n_layer", "model.layer_repeats")
    ] == [1, 1, 1]
    steps = planning.length(cfg, set(), text, 0.02, 10_000)["max_steps"]
    assert 1 < steps * planning.tokens_per_step(cfg) / text.tokens < 20
    cfg.max_steps = 4  # which takes the time only when repeated
    assert planned(8 * planning.tokens_per_step(cfg), "max_steps") == 2
    cfg.data.batch_size = 1_000_000  # more than is useful, in one step
    assert planning.length(cfg, set(), text, 0.02, 10_000)["max_steps"] == 1


ONE_SIZE = ["model.n_layer=1", "model.n_embd=32"]


def test_a_text_of_any_length_has_a_plan_of_windows_that_it_has_or_one_line(plan, text, tmp_path):
    val, words = tmp_path / "val.txt", text.read_text(encoding="utf-8")
    val.write_text(words[:1000], encoding="utf-8")
    for n, block_size in {1: None, 2: 1, 7: 4, 119: 64, 129: 128}.items():
        (tmp_path / "mine.txt").write_text(words[:n], encoding="utf-8")
        given = [f"data.path={tmp_path}/mine.txt", f"data.val_path={val}", *ONE_SIZE]
        refused = pytest.raises(UserError, match="the training split has 1 tokens")
        with refused if n < 2 else nullcontext():
            settings = plan(*given)["settings"]
            assert settings["model.block_size"] == block_size
            assert settings["model.ngram"] <= n
            assert 0 < settings["optimizer.lr"] < math.inf


@pytest.mark.slow
def test_a_run_that_is_planned_for_two_characters_trains(mine, text, tmp_path):
    (tmp_path / "mine.txt").write_text("ox")
    texts = [f"data.path={tmp_path}/mine.txt", f"data.val_path={text}"]
    given = [*mine, *texts, *ONE_SIZE, "originality=null", "max_steps=2"]
    summary = minigpt.train([*given, "callbacks.samples=null", f"hydra.run.dir={tmp_path}/run"])
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    assert 0 < summary["best_val_loss"] < math.inf


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
        assert planning.length(cfg, {"max_steps"}, a_text(), 0.01, 100)[
            "optimizer.lr"
        ] == pytest.approx(2 * lr)


def test_a_plan_that_is_refused_is_not_written_for_the_runs_that_share_it(
    mine, tmp_path, monkeypatch
):
    (tmp_path / "sweep/0").mkdir(parents=True)
    (tmp_path / "sweep/sweep.json").write_text("{}")
    planned_length, wrong = planning.length, {}
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
            minigpt.train(
                [*mine, "model.n_layer=1", "model.n_head=1", f"hydra.run.dir={tmp_path}/sweep/0"]
            )
        assert [*(tmp_path / "sweep").glob(".plan-*.json")] == []


def test_too_little_text_or_time_and_several_processes_are_errors(
    plan, mine, tmp_path, monkeypatch
):
    (tmp_path / "short.txt").write_text("to be or not to be\n" * 100, encoding="utf-8")
    with pytest.raises(
        UserError,
        match=r"minutes=… needs 1,000 bytes of validation text, but .* has 190 bytes; use",
    ):
        plan(f"data.path={tmp_path}/short.txt")
    with pytest.raises(
        UserError, match=r"minutes=1 end before the first step, of \d+\.\d+ s; give more minutes"
    ):
        plan(seconds=4)  # less than a plan keeps for the start and the sample
    monkeypatch.setattr(planning, "launcher_sizes", lambda: (1, 2))
    with pytest.raises(UserError, match="minutes plans for one process; set max_steps instead"):
        minigpt.train([*mine, f"hydra.run.dir={tmp_path}/run"])


def test_a_sweep_finds_the_plan_that_it_made_when_functions_had_other_names(
    mine, tmp_path, monkeypatch
):
    """The name of a shared plan is a checksum of settings, among them names that moved since."""
    (tmp_path / "sweep/0").mkdir(parents=True)
    (tmp_path / "sweep/sweep.json").write_text("{}")
    hashed = []

    def sha256(values):
        hashed.append(values)
        raise UserError("enough")

    monkeypatch.setattr(planning, "sha256_json", sha256)
    with pytest.raises(UserError, match="enough"):
        minigpt.train([*mine, f"hydra.run.dir={tmp_path}/sweep/0"])
    targets = {key: value for key, value in hashed[0].items() if key.endswith("_target_")}
    assert targets["optimizer._target_"] == "minigpt.optim.muon"
    assert targets["schedule._target_"].startswith("minigpt.schedules.")
