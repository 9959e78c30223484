"""Fuzz every reader briefly, and check that the fuzzer reports crashes."""

import random
from pathlib import Path

import fuzz
import pytest


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_accepts_a_mutated_input_or_refuses_it_with_one_line(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fuzz, "READERS", {name: fuzz.READERS[name]})
    (reader,) = fuzz.fuzz(2000, seed=1).values()
    assert reader.crashes == []
    assert reader.counts["refused"] + reader.counts["accepted"] >= 20


def test_a_crash_is_reported(tmp_path: Path):
    def crash() -> None:
        raise IndexError("odd")

    reader = fuzz.Reader(1, lambda chance, folder: crash)
    assert fuzz._outcome(reader, random.Random(0), tmp_path, 7) == "crashed"
    assert reader.crashes[0].startswith("7: error: IndexError: odd")
