"""Fixtures of sweeps: one that sweeps without training, the printed table, no plot."""

import os
from pathlib import Path

import pytest
from engine import Engine
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from small_runs import CONFIGS
from sweep_folders import read_table

from minigpt.sweeps.composition import Composer
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import print_table


@pytest.fixture
def plan(text, tmp_path, monkeypatch):
    """Sweep without training: `plan("seed=1,2")` returns the sweeper after its sweep."""
    # The plot takes longer than the rest
    monkeypatch.setattr("minigpt.sweeps.report.publish", lambda *_: None)
    monkeypatch.setattr("minigpt.sweeps.report.report", read_table)
    compose = Composer.compose
    composed = {}

    def compose_once(composer, values):
        line = (os.environ.get("LR"), *composer.overrides(values))
        return (
            composed[line]
            if line in composed
            else composed.setdefault(line, compose(composer, values))
        )

    monkeypatch.setattr(Composer, "compose", compose_once)

    def sweep(*arguments, engine=None, folder=tmp_path / "sweep"):
        quoted = str(folder).replace("'", r"\'")
        overrides = [f"data.path={text}", f"data.folder={tmp_path}/data", "model.block_size=16"]
        overrides += [f"hydra.sweep.dir='{quoted}'", *arguments]
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            config = hydra.compose_config("train", overrides, run_mode=RunMode.MULTIRUN)
            context = HydraContext(config_loader=hydra.config_loader, callbacks=None)
            instantiate = Plugins.instance().instantiate_sweeper
            sweeper = instantiate(
                config=config, hydra_context=context, task_function=lambda _: None
            )
            sweeper.engine = engine or Engine()
            sweeper.engine.config = config
            sweeper.arguments = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            sweeper.sweep(sweeper.arguments)
        return sweeper

    return sweep


@pytest.fixture
def printed(capsys):
    def show(points):
        capsys.readouterr()
        print_table(ranked(points))
        return capsys.readouterr().out

    return show


@pytest.fixture
def no_plot(monkeypatch):
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, path, **options: Path(path).write_text("plot", encoding="utf-8"),
    )
