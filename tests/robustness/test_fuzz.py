"""Fuzz every reader briefly, and longer among the slow tests."""

import fuzz
import pytest


@pytest.mark.parametrize("inputs", [500, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_accepts_a_mutated_input_or_refuses_it_with_one_line(name: str, inputs: int):
    counts = fuzz.fuzz(name, int(inputs * fuzz.READERS[name][0]), seed=1)
    assert min(counts["accepted"], counts["refused"]) > 0
