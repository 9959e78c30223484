"""Weights & Biases as on a machine on which nobody has logged in."""

import os

import pytest
import wandb


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    """No settings of W&B but those of a test, in a folder of its own."""
    # WANDB_SERVICE is of the client's process, which a test may end.
    for name in {*os.environ} - {"WANDB_SERVICE"}:
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    # These take 0.3 s per run
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")
    monkeypatch.setenv("WANDB_X_DISABLE_META", "true")
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # the client has read the variables that were
    yield
    wandb.teardown()
