"""A part of the fuzzing that `python tests/robustness/fuzz.py` does, and that its own judgement is sound."""

import random
from pathlib import Path

import fuzz
import pytest


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_refuses_what_is_odd_in_a_line_or_takes_it(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fuzz, "READERS", {name: fuzz.READERS[name]})
    (reader,) = fuzz.fuzz(2000, seed=1).values()
    assert reader.crashes == []
    assert reader.counts["refused"] + reader.counts["accepted"] >= 20


def test_a_crash_is_seen(tmp_path: Path):
    def crash() -> None:
        raise IndexError("odd")

    reader = fuzz.Reader(1, lambda chance, folder: crash)
    assert fuzz._outcome(reader, random.Random(0), tmp_path, 7) == "crashed"
    assert reader.crashes[0].startswith("7: error: IndexError: odd")
