"""Overrides of planned runs, and their configuration."""

import math
from functools import cache

import pytest
from small_runs import CONFIGS, composed

from minigpt.extras.planner import pace
from minigpt.runs.overrides import complete_overrides

compose_once = cache(composed)


@pytest.fixture
def mine(text, tmp_path):
    return [
        f"data.path={text}",
        f"data.folder={tmp_path}/data",
        "data=text",
        "trainer=cpu",
        "minutes=1",
    ]


@pytest.fixture(scope="session")
def planned():
    """Compose as `planned("minutes=1", "model.n_head=3")`: files once, values on a copy."""

    def compose(*overrides):
        files = []
        values = []
        for override in complete_overrides(overrides):
            key = override.partition("=")[0].lstrip("+")
            kind = files if (CONFIGS / key).is_dir() else values
            kind.append(override.lstrip("+"))
        cfg = compose_once(*sorted(files)).copy()
        cfg.merge_with_dotlist(values)
        return cfg

    return compose


@pytest.fixture
def cfg(planned):
    return planned("minutes=1")


@pytest.fixture(autouse=True)
def _keep_the_planned_steps(monkeypatch):
    """However slow the machine of the tests is; not in test_pace.py, which has its own clock."""
    monkeypatch.setattr(pace, "MEASURED", math.inf)
