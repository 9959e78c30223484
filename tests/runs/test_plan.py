"""`minutes=`: the plan is made of settings, keeps those that the user gives, and is that of a resumed run."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from small_runs import SCRIPTS, column, composed

import minigpt
from minigpt.config import GPTConfig
from minigpt.data.prepare import load_corpus
from minigpt.runs.config_checks import load_parts
from minigpt.runs.overrides import complete_overrides, given_settings
from minigpt.runs.plan import (
    FITTED,
    SIZES,
    Text,
    expected_loss,
    length,
    make_plan,
    repeats,
    shape,
    updated,
    useful_tokens,
    windows,
    without,
)
from minigpt.runs.planned_sizes import planned_heads, with_possible_sizes
from minigpt.utils.errors import UserError


@pytest.fixture
def mine(text, tmp_path):
    return [f"data.path={text}", f"data.folder={tmp_path}/data", "data=text", "trainer=cpu", "minutes=1"]


@pytest.fixture
def short(mine):
    """A small run whose number of steps does not depend on the machine."""
    return [*mine, "model.n_layer=1", "model.n_embd=30", "max_steps=20"]  # 30 is no multiple of nano's n_head


def plan(overrides, *given, seconds=100):
    cfg = composed(*complete_overrides(overrides))
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    return make_plan(cfg, corpus, set(given), deadline=time.perf_counter() + seconds)


def a_text(**changes):
    known = {"tokens": 1_000_000, "val_tokens": 100_000, "ngram": 5, "distinct_ngrams": 100_000, "ngram_loss": 1.6}
    return Text(**known | changes)


def test_a_planned_run_is_a_run_with_the_settings_of_its_plan(short, tmp_path, capsys):
    summary = minigpt.train([*short, f"hydra.run.dir={tmp_path}/planned"])
    printed = capsys.readouterr()
    written = json.loads((tmp_path / "planned/plan.json").read_text())
    settings = written["settings"]
    assert summary["steps"] == 20
    assert settings["eval_every"] <= 20  # follows from the steps that are given
    assert written["expected_val_loss"] is None  # of so few steps
    assert "expected_val_loss" not in summary
    assert "expected" not in printed.out
    assert all(line in printed.err for line in written["lines"])
    config = OmegaConf.load(tmp_path / "planned/.hydra/config.yaml")
    assert {key: OmegaConf.select(config, key) for key in settings} == settings

    numbers = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    groups = ["minutes=null", "model=planned", "optimizer=muon_fast"]
    minigpt.train([*short, *groups, *numbers, f"hydra.run.dir={tmp_path}/plain"])
    for name in ("train_loss", "val_loss"):
        assert column(tmp_path / "planned", name) == column(tmp_path / "plain", name)


@pytest.mark.slow
def test_an_interrupted_run_continues_with_its_plan(short, tmp_path):
    steps = ["max_steps=150", "eval_every=25"]
    command = [sys.executable, str(SCRIPTS / "train.py"), *short, *steps, f"hydra.run.dir={tmp_path}/run"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert any(line.startswith("step 25/") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    before = (tmp_path / "run/plan.json").read_text()
    more = ["resume=auto", "ema_decay=0.5"]  # a setting that the plan had chosen
    subprocess.run([*command, *more], check=True, capture_output=True, timeout=300)
    assert (tmp_path / "run/plan.json").read_text() == before
    assert OmegaConf.load(tmp_path / "run/.hydra/config.yaml").ema_decay == 0.5
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 150
    expected = json.loads(before)["expected_val_loss"]
    assert summary["expected_val_loss"] == expected
    assert 0 < expected[1] < expected[0]


@pytest.mark.parametrize(
    "given",
    [
        {"model.n_embd": 40},
        {"model.n_head": 3},
        {"max_steps": 7, "data.batch_size": 5, "model.n_layer": 1, "model.n_embd": 32},
        {"optimizer.lr": 0.01, "ema_decay": 0.9, "schedule.warmup_steps": 3},
        {"model.layer_repeats": 2},
    ],
)
def test_what_the_user_gives_stays(mine, given):
    settings = plan([*mine, *(f"{key}={value}" for key, value in given.items())], *given)["settings"]
    assert not settings.keys() & given.keys()
    n_embd, n_head = (given.get(key) or settings[key] for key in ("model.n_embd", "model.n_head"))
    assert n_embd % n_head == 0
    assert {"model.n_embd", "model.n_head"} & given.keys() or n_embd / n_head == 32 or n_head == 1


@pytest.mark.parametrize(("group", "choice"), [("model", "nano"), ("optimizer", "adamw")])
def test_a_group_that_the_user_gives_stays(mine, group, choice):
    planned = plan([*mine, f"{group}={choice}"], group)
    assert not [key for key in planned["settings"] if key.startswith(f"{group}.")]
    assert planned["expected_val_loss"] is None
    assert planned["lines"][-1].endswith(f"unknown: the formula of the loss was not fitted to runs with {group}")


SIZES_GIVEN = [
    *(["model.n_head=3"], ["model.n_embd=90"], ["model.n_embd=96", "model.n_head=3"], ["model={n_head:5,dropout:0.1}"]),
    *(["model.head_dim=24"], ["model.head_dim=24", "model.n_head=5"], ["model.head_dim=6", "model.n_embd=45"]),
    *(["model.n_kv_head=3"], ["model.n_kv_head=3", "model.n_embd=90"], ["model.n_kv_head=3", "model.n_head=6"]),
    *(["model.layer_repeats=3"], ["model.layer_repeats=3", "model.n_layer=6"], ["model.n_layer=3"]),
    *(["model.position=learned", "model.n_embd=45"], ["++model.n_head=7"], ["model.n_embd=2"], ["model=baby"]),
]


@pytest.mark.parametrize("overrides", SIZES_GIVEN, ids=" ".join)
def test_a_plan_around_given_sizes_is_an_architecture(mine, overrides):
    """Each size of a plan has the given values and even heads, and none is refused before the plan is made."""
    overrides = complete_overrides([*mine, *overrides])
    cfg, given = composed(*overrides), given_settings(overrides)
    before = cfg.copy()
    load_parts(with_possible_sizes(cfg, overrides))
    assert cfg == before
    for size in SIZES:
        model = updated(cfg, without(given, shape(cfg, given, a_text(), *size))).model
        config = GPTConfig(**{**model, "vocab_size": 100})
        assert config.head_width % 2 == 0 or config.position != "rope"
        assert all(model[key[6:]] == cfg.model[key[6:]] for key in given if key.startswith("model."))
        assert model == cfg.model or "model" not in given


def test_heads_of_a_given_width_are_about_32_wide():
    model = {"n_head": 4, "n_kv_head": None, "head_dim": None, "position": "rope"}
    widths = (30, 40, 90, 96, 128, 200)
    heads = [planned_heads({**model, "n_embd": width}, {"model.n_embd"}, 64)[1] for width in widths]
    assert heads == [1, 1, 3, 3, 4, 5]


REFUSED = {
    "model.n_embd=45": "model.n_embd must be a multiple of 2, got 45; use one, or set model.head_dim too",
    "model.n_embd=90 model.n_kv_head=2": "model.n_embd must be a multiple of 4, got 90",
    "model.n_embd=128 model.n_head=3": "model.n_embd must be divisible by model.n_head=3, got 128",
    "model.n_embd=6 model.n_head=2": "model.head_dim must be even with model.position=rope, got 3",
    "model.n_head=0": "model.n_head must be an integer ≥ 1, got 0",
    "model.n_head=4 model.n_kv_head=3": "model.n_head must be divisible by model.n_kv_head=3, got 4",
    "model.layer_repeats=2 model.n_layer=3": "model.n_layer must be divisible by model.layer_repeats=2, got 3",
    "model.head_dim=7": "model.head_dim must be even with model.position=rope, got 7",
    "model.norm=none": "model.norm must be one of",
    "model.n_hed=3": "n_hed",
    "model=nano model.n_head=3": "model.n_embd must be divisible by model.n_head=3, got 128",
}


@pytest.mark.parametrize(("given", "message"), REFUSED.items(), ids=REFUSED)
def test_sizes_that_no_plan_can_have_are_refused(mine, given, message):
    overrides = complete_overrides([*mine, *given.split()])
    with pytest.raises((UserError, HydraException), match=re.escape(message)):
        load_parts(with_possible_sizes(composed(*overrides), overrides))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"optimizer": "adamw", "optimizer.lr": 1e-5}, "optimizer, optimizer.lr"),
        pytest.param({"max_steps": 20}, "max_steps below 150", marks=pytest.mark.slow),
        ({"max_steps": 150, "model.n_layer": 2, "data.path": "x", "seed": 3, "eval_every": 7, "trainer": "cpu"}, ""),
    ],
)
def test_a_loss_is_expected_only_of_runs_that_its_formula_was_fitted_to(mine, given, reason):
    small = ["model.n_embd=32", "model.n_layer=1", "max_steps=150"]
    overrides = [f"{key}={value}" for key, value in given.items() if key != "data.path"]
    made = plan([*mine, *small, *overrides], "model.n_embd", "model.n_layer", "max_steps", *given)
    assert (made["expected_val_loss"] is None) == bool(reason)
    assert made["lines"][-1].endswith(reason or f"± {(made['expected_val_loss'] or [0, 0])[1]:.2f}")
    others = ["model", "model.block_size", "data.batch_size", "ema_decay", "schedule", "trainer.precision", "debug"]
    assert not any(FITTED.fullmatch(key) for key in [*others, "callbacks.early_stopping", "a_setting_of_the_future"])


def test_the_expected_loss_follows_the_n_grams_of_the_text_and_the_training():
    cfg = composed(*complete_overrides(["minutes=1"]))

    def expected(steps=1000, **changes):
        cfg.max_steps = steps
        return expected_loss(cfg, a_text(**changes))[0]

    assert expected(ngram_loss=3.0) == pytest.approx(2 * expected(ngram_loss=1.5))
    assert expected(1000) > expected(2000) > expected(4000)
    assert expected(4000, tokens=10_000_000) < 0.95 * expected(4000, tokens=1_000_000)  # learns from more of it
    assert expected(10**9) == expected(10**8)  # more steps overfit
    shallow, cfg.model.n_layer = expected(), 2 * cfg.model.n_layer
    deep, cfg.model.layer_repeats = expected(), 2
    assert expected() == deep < shallow  # a layer that is used twice counts as two


def test_a_text_sets_its_ngrams_windows_and_regularization():
    cfg = composed(*complete_overrides(["minutes=1"]))
    small, large = (shape(cfg, set(), a_text(tokens=n), 2, 96) for n in (50_000, 50_000_000))
    assert small["model.ngram_dropout"] > large["model.ngram_dropout"] == 0
    assert small["optimizer.ngram_weight_decay"] > large["optimizer.ngram_weight_decay"] == 1
    assert shape(cfg, set(), a_text(ngram=1), 2, 96)["model.ngram"] == 0  # no n-gram predicts better than frequencies
    assert shape(cfg, set(), a_text(ngram=7), 2, 96)["model.ngram"] == 7
    texts = (50_000, 10**6), (10**9, 10**6), (10**9, 10**8), (10**6, 10**8)  # tokens of the text, and of the training
    rows = [windows(a_text(tokens=n), trained)["model.ngram_buckets"] for n, trained in texts]
    assert rows[0] == rows[1] == rows[3] < rows[2]  # the tables hold the n-grams that the training reads
    blocks = [windows(a_text(), tokens)["model.block_size"] for tokens in (1e5, 1e6, 1e7, 1e8)]
    assert blocks == [128, 128, 512, 1024]
    assert windows(a_text(val_tokens=40), 1e7)["model.block_size"] == 32
    short = windows(a_text(), 1e5, 1e5)  # fewer tokens per step rather than fewer steps
    assert 1e5 / short["data.batch_size"] / short["model.block_size"] == pytest.approx(150, rel=0.05)
    assert windows(a_text(), 1e5)["data.batch_size"] == 16  # unless the steps are given, and the time allows more


@pytest.mark.parametrize("val_tokens", [2_000, 100_000, 100_000_000])
@pytest.mark.parametrize("seconds", [10, 600, 40_000])
def test_steps_and_validations_fill_the_time(val_tokens, seconds):
    cfg, step = composed(*complete_overrides(["minutes=1"])), 0.02
    settings = length(cfg, set(), a_text(tokens=10**10, val_tokens=val_tokens), step, seconds)
    validations = -(-settings["max_steps"] // settings["eval_every"])
    tokens = cfg.data.batch_size * cfg.model.block_size
    windows = val_tokens / cfg.model.block_size
    share = 1 if settings["eval_batches"] is None else settings["eval_batches"] * cfg.data.eval_batch_size / windows
    validating = validations * min(1, share) * val_tokens / tokens * step / 3
    assert 0.9 * seconds < settings["max_steps"] * step + validating < 1.05 * seconds
    assert 2 <= validations <= 11


def test_validations_of_a_part_that_is_given_fill_the_time():
    cfg, text, step = composed(*complete_overrides(["minutes=1"])), a_text(tokens=10**10, val_tokens=10**7), 0.02
    per_step, per_batch = (n * cfg.model.block_size for n in (cfg.data.batch_size, cfg.data.eval_batch_size))
    for cfg.eval_batches, scored in ((None, 10**7), (5, 5 * per_batch), (10**7, 10**7)):
        settings = length(cfg, {"eval_batches"}, text, step, 600)
        validations = -(-settings["max_steps"] // settings["eval_every"])
        seconds = step * (settings["max_steps"] + validations * scored / per_step / 3)
        assert 540 < seconds < 630
        assert validations == (10 if scored == 5 * per_batch else 1)


def test_few_steps_have_higher_rates():
    cfg = composed(*complete_overrides(["minutes=1"]))
    short, long = (length(cfg, set(), a_text(tokens=10**10), 0.02, seconds) for seconds in (4, 400))
    rates = {key: OmegaConf.select(cfg, key) for key in ("optimizer.lr", "optimizer.adam_lr")}
    assert {key: long[key] for key in rates} == rates
    assert short["optimizer.lr"] / short["optimizer.adam_lr"] == pytest.approx(2, rel=0.01)
    assert 1.5 < short["optimizer.lr"] / rates["optimizer.lr"] < 3


def test_a_small_text_is_not_repeated_without_end():
    cfg, text = composed(*complete_overrides(["minutes=1"])), a_text(tokens=50_000)
    steps = length(cfg, set(), text, 0.02, 10_000)["max_steps"]
    assert 1 < steps * cfg.data.batch_size * cfg.model.block_size / text.tokens < 20
    cfg.data.batch_size = 1_000_000  # more than is useful, in one step
    assert length(cfg, set(), text, 0.02, 10_000)["max_steps"] == 1


def test_time_in_which_a_small_text_would_overfit_makes_the_model_deeper():
    cfg, text = composed(*complete_overrides(["minutes=1"])), a_text(tokens=50_000)
    useful = useful_tokens(cfg, set(), text)

    def planned(possible, *given):
        settings = repeats(cfg, set(given), text, possible)
        assert settings["model.n_layer"] == cfg.model.n_layer * settings["model.layer_repeats"]
        return settings["model.layer_repeats"]

    assert [planned(share * useful) for share in (0.01, 1, 2, 3, 1000)] == [1, 1, 2, 3, 3]
    assert [planned(1000 * useful, key) for key in ("model", "model.n_layer", "model.layer_repeats")] == [1, 1, 1]
    cfg.max_steps = 4  # which takes the time only when repeated
    assert planned(8 * cfg.data.batch_size * cfg.model.block_size, "max_steps") == 2


def test_too_little_text_is_an_error(mine, tmp_path):
    (tmp_path / "short.txt").write_text("to be or not to be\n" * 100)
    with pytest.raises(UserError, match=r"minutes=… needs 1,000 bytes of validation text, but .* has 190 bytes; use"):
        plan([*mine, f"data.path={tmp_path}/short.txt"])


def test_no_time_for_a_step_is_an_error(mine):
    with pytest.raises(UserError, match=r"minutes=1 end before the first step, of \d+\.\d+ s; give more minutes"):
        plan(mine, seconds=4)  # less than a plan keeps for the start and the sample


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["minutes=0"], "minutes must be a finite number > 0, or null, got 0"),
        (["minutes=1e-4"], "minutes=0.0001 end before the text is prepared; give more minutes"),
        (["experiment=fast_cpu"], "minutes plans a new model, but experiment=fast_cpu sets one; remove one of the two"),
        (["trainer.devices=2"], "trainer.devices must be 1 with minutes, which plans for one device, got 2"),
    ],
)
def test_bad_input_is_one_line(call, mine, overrides, message, tmp_path):
    result = call("train.py", *mine, *overrides, f"hydra.run.dir={tmp_path}/run", small=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not Path(tmp_path, "run").exists()
