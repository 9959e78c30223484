"""Fuzz every reader briefly."""

import fuzz
import pytest


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_accepts_a_mutated_input_or_refuses_it_with_one_line(name: str):
    counts = fuzz.fuzz(name, int(2000 * fuzz.READERS[name][0]), seed=1)
    assert min(counts["accepted"], counts["refused"]) > 0
