"""Fixtures of the tests of data."""

import pytest
from corpora import values

from minigpt.data import sources


@pytest.fixture
def find(tmp_path):

    def find_(*names, **changes):
        data = values() | {"folder": str(tmp_path / "data")}
        for layer in (*map(values, names), changes):
            data |= layer
        return (*sources.find_sources(data), None)[:2]

    return find_
