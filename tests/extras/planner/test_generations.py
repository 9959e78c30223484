"""A chain of models learns from the text and from the model before, and resumes as it was."""

from functools import partial

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from models import make_model
from small_runs import column, rows, small_run
from torch.nn import functional as F

import minigpt
from minigpt import GPT, load_checkpoint
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.data.batches import WindowOrder
from minigpt.extras.planner.generations import predict, restarting
from minigpt.training.schedules import cosine, linear
from minigpt.utils.errors import UserError

CHAIN = (
    "callbacks=generations", "callbacks.generations.count=2", "callbacks.samples=null",
    "schedule.warmup_steps=2",
)  # fmt: skip


def test_the_schedule_runs_once_for_every_model():
    for schedule in (linear, cosine):
        decay = partial(schedule, warmup_steps=2, final_lr_frac=0.1)
        chain = [restarting(decay, 3, step, max_steps=30) for step in range(30)]
        assert chain == pytest.approx([decay(step, max_steps=10) for step in range(10)] * 3)


@pytest.mark.parametrize("length", [16, 17, 39, 40])
def test_every_token_is_predicted_from_half_a_window_at_least(length):
    torch.manual_seed(0)
    model = make_model(block_size=16).double()
    tokens = torch.randint(model.config.vocab_size, (length,))
    predicted = predict(model, tokens).double()  # (N, V)
    for i in range(length):
        fewest = min(i + 1, 8)
        contexts = [tokens[i + 1 - n : i + 1] for n in range(fewest, min(i + 1, 16) + 1)]
        with torch.no_grad():
            each = [model.eval()(context[None])[0, -1].softmax(-1) for context in contexts]
        closest = min((predicted[i] - p).abs().max().item() for p in each)
        assert closest < 1e-3, i  # float16


class Keep(L.Callback):
    """Keep what the last step learned from, and how many steps its moments are of."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        Keep.expected = pl_module.expected
        Keep.steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}


def test_a_new_model_learns_from_the_text_and_from_the_average_of_the_one_before(text, tmp_path):
    run = tmp_path / "run"
    settings = small_run(
        text, tmp_path, *CHAIN, "callbacks.generations.weight=0.75", "ema_decay=0.9",
        "log_every=1", "seed=3", "optimizer=adamw", f"hydra.run.dir={run}",
        "+callbacks.keep._target_=test_generations.Keep",
    )  # fmt: skip
    minigpt.train([*settings, "pause_at=10"])
    assert Keep.expected is None
    teacher, tokenizer = load_checkpoint(run / LAST)  # the average
    minigpt.train([*settings, "resume=auto", "pause_at=null"])
    # What it learned from, at the last step
    ids = torch.from_numpy(tokenizer.encode(text.read_text())[:18_000].astype(np.int64))
    order = WindowOrder(len(ids), 16, seed=3)  # of the training split

    def places(step):
        return torch.from_numpy(order.starts(step * 8 + np.arange(8)))[:, None] + torch.arange(16)

    predicted = predict(teacher, ids).float()
    of_text = F.one_hot(ids[places(19) + 1], teacher.config.vocab_size)
    torch.testing.assert_close(Keep.expected, 0.75 * predicted[places(19)] + 0.25 * of_text)
    assert Keep.steps == {10}  # its own
    # Its first loss
    torch.manual_seed(3 + 1)
    with torch.no_grad():
        logits = GPT(teacher.config)(ids[places(10)]).flatten(0, 1)  # (B·T, V)
    of_teacher = -(predicted[places(10)].flatten(0, 1) * logits.log_softmax(-1)).sum(-1).mean()
    of_text = F.cross_entropy(logits, ids[places(10) + 1].flatten())
    loss = column(run, "train_loss")[10]
    assert loss == pytest.approx(0.25 * of_text.item() + 0.75 * of_teacher.item(), rel=1e-4)


def test_a_chain_resumes_as_it_was(text, tmp_path):
    settings = small_run(
        text, tmp_path, *CHAIN, "ema_decay=0.9", "eval_every=5", "model.dropout=0.2"
    )
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    minigpt.train([*settings, f"hydra.run.dir={whole}"])
    for pause in (5, 10, 15, "null"):  # before, at and after the second model begins
        resumed = ["resume=auto"] if (parts / LAST).exists() else []
        minigpt.train([*settings, f"hydra.run.dir={parts}", f"pause_at={pause}", *resumed])
    expected = read(whole / LAST)["state_dict"]
    saved = read(parts / LAST)["state_dict"]
    assert expected.keys() == saved.keys()
    assert all(torch.equal(expected[name], saved[name]) for name in expected)
    assert column(whole, "train_loss") == column(parts, "train_loss")
    assert column(whole, "val_loss") == column(parts, "val_loss")


def test_one_model_is_a_run_without_the_callback(text, tmp_path):
    settings = small_run(text, tmp_path, "callbacks.samples=null", "schedule.warmup_steps=2")
    plain = tmp_path / "plain"
    chain = tmp_path / "chain"
    minigpt.train([*settings, f"hydra.run.dir={plain}"])
    minigpt.train([*settings, *CHAIN, "callbacks.generations.count=1", f"hydra.run.dir={chain}"])
    assert rows(plain) == rows(chain)


def test_a_chain_of_other_steps_or_models_does_not_resume(text, tmp_path):
    run = tmp_path / "run"
    settings = small_run(text, tmp_path, *CHAIN)
    minigpt.train([*settings, f"hydra.run.dir={run}"])
    with pytest.raises(UserError, match="the checkpoint is of model 2 of its chain, and step 20"):
        minigpt.train([*settings, "max_steps=60", f"resume={run}", f"hydra.run.dir={run}2"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["max_steps=4"], "max_steps must be above callbacks.generations.count × schedule.warmup"),
        (
            [
                "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping",
                "+callbacks.stop.monitor=val_loss",
            ],
            "callbacks.generations.count must be 1 with conversations, several devices or early",
        ),
        (["callbacks.generations.count=0"], "callbacks.generations.count must be an integer ≥ 1"),
        (["callbacks.generations.weight=1"], r"callbacks.generations.weight must be in \[0, 1\)"),
    ],
)
def test_invalid_settings_are_refused(settings, message, text, tmp_path):
    run = small_run(text, tmp_path, *CHAIN, f"hydra.run.dir={tmp_path}/run", *settings)
    with pytest.raises(UserError, match=message):
        minigpt.train(run)
