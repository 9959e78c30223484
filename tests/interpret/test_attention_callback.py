"""The callback that plots attention maps during training."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import column
from tiny_models import ALPHABET, make_model

from minigpt.data.tokenizer import CharTokenizer
from minigpt.runs.samples_and_attention import AttentionMaps
from minigpt.utils.errors import UserError


def test_plotting_maps_does_not_change_the_training(
    train: Callable[..., Any], finished: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    plotted = train("callbacks=attention", "logger=wandb")
    assert sorted(path.name for path in (plotted.folder / "attention").iterdir()) == ["step-10.png", "step-20.png"]
    assert not (finished.folder / "attention").exists()
    assert (plotted.folder / "samples.txt").exists()  # from the default callbacks
    for name in ("train_loss", "val_loss"):
        assert column(plotted.folder, name) == column(finished.folder, name)
    uploaded = [path.name for path in plotted.folder.glob("wandb/offline-run-*/files/media/images/*.png")]
    assert len([name for name in uploaded if name.startswith("attention_")]) == 2


def test_the_text_is_the_option_or_the_beginning_of_the_validation_split(tmp_path: Path) -> None:
    tokenizer = CharTokenizer(ALPHABET)
    corpus = SimpleNamespace(tokenizer=tokenizer, tokens=lambda split: tokenizer.encode({"val": "What\nROMEO"}[split]))
    trainer: Any = SimpleNamespace(datamodule=SimpleNamespace(corpus=corpus), default_root_dir=tmp_path)
    module: Any = SimpleNamespace(model=make_model())
    for options, texts in (({"max_tokens": 3}, "Wha"), ({"text": "O EOM"}, "O EOM"), ({"text": "at" * 20}, "at" * 8)):
        callback = AttentionMaps(**options)
        callback.setup(trainer, module, "fit")
        assert "".join(callback.texts) == texts


def test_an_empty_text_is_an_error() -> None:
    with pytest.raises(UserError, match=r"callbacks\.attention\.text must be "):
        AttentionMaps(text="")
