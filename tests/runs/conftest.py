"""Fixtures of the tests of runs."""

import pytest


@pytest.fixture
def train(train, monkeypatch):
    """Train as the fixture of all tests does, with a short sample at the end."""
    monkeypatch.setattr("minigpt.runs.fit.FINAL_TOKENS", 20)
    return train
