"""The callback that plots attention maps during training."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import column
from tiny_models import ALPHABET, make_model

from minigpt.data.tokenizer import CharTokenizer
from minigpt.model import GPT
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


def set_up(folder: Path, model: GPT, **options: Any) -> tuple[AttentionMaps, SimpleNamespace, SimpleNamespace]:
    """The callback after `setup`, and stand-ins for the Trainer and the module."""
    tokenizer = CharTokenizer.of(ALPHABET)
    corpus = SimpleNamespace(
        tokenizer=tokenizer, tokens=lambda split: tokenizer.encode({"val": "What\nROMEO: a" * 9}[split])
    )
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(corpus=corpus),
        default_root_dir=folder,
        is_global_zero=True,
        global_step=30,
        callback_metrics={"val_loss": torch.tensor(2.0)},
        loggers=[],
    )
    module = SimpleNamespace(model=model, device=torch.device("cpu"))
    callback = AttentionMaps(**options)
    callback.setup(trainer, module, "fit")  # type: ignore[arg-type]
    return callback, trainer, module


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, "What\nROMEO: aWha"),
        ({"max_tokens": 3}, "Wha"),
        ({"text": "O EOM"}, "O EOM"),
        ({"text": "at" * 20}, "at" * 8),
    ],
)
def test_the_text_is_the_option_or_the_beginning_of_the_validation_split(
    options: dict[str, Any], texts: str, tmp_path: Path
) -> None:
    assert "".join(set_up(tmp_path, make_model(), **options)[0].texts) == texts


def test_plotting_maps_does_not_recompile_a_compiled_model(tmp_path: Path) -> None:
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = make_model().eval()
    model.compile(backend=backend)
    tokens = torch.randint(len(ALPHABET), (2, 16))
    model(tokens)
    before = len(graphs)
    assert before > 0
    callback, trainer, module = set_up(tmp_path, model)
    callback.on_validation_end(trainer, module)  # type: ignore[arg-type]
    assert (tmp_path / "attention" / "step-30.png").exists()
    model(tokens)
    assert len(graphs) == before


@pytest.mark.parametrize("options", [{"text": ""}, {"max_tokens": 0}])
def test_an_empty_text_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"callbacks\.attention\.{next(iter(options))} must be "):
        AttentionMaps(**options)
