"""Training in a program of the user: its environment, Hydra, threads and signals; its own parts."""

import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import hydra
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from refusals import refused
from small_runs import column, rows

from minigpt.utils.ranks import TORCHRUN
from minigpt.utils.signals import END_SIGNALS

SHORT = ["max_steps=2", "log_every=1"]
LEFT_BEHIND = {
    "Kubeflow": "RANK=1 WORLD_SIZE=2 MASTER_ADDR=no.invalid MASTER_PORT=1",
    "Lightning": "LOCAL_RANK=1 NODE_RANK=1 WORLD_SIZE=2",
    "torchrun": "TORCHELASTIC_RUN_ID=none GROUP_RANK=1 RANK=two",
    "sbatch": "SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_JOB_NAME=a SLURM_PROCID=0",
    "salloc": "SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_JOB_NAME=interactive",
    "a step of one task": """
        SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_JOB_NAME=a
        SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NODELIST=a""",
}


@pytest.mark.parametrize("program", LEFT_BEHIND)
def test_a_process_that_is_no_rank_trains_alone_whatever_its_environment_has_of_ranks(
    program, train, trained, monkeypatch, capsys
):
    # As if Lightning had been imported with these variables
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    given = dict(variable.split("=") for variable in LEFT_BEHIND[program].split())
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = train("trainer.strategy=ddp", *SHORT)
    names = ", ".join(name for name in (*TORCHRUN, "NODE_RANK", "GROUP_RANK") if name in given)
    warned = f"warning: {names} ignored: without " in capsys.readouterr().err
    assert warned == ("SLURM_NTASKS" not in given)
    assert rows(run.folder) == rows(trained("trainer.strategy=ddp", *SHORT))
    assert {name: os.environ.get(name) for name in before} == before
    assert "MASTER_PORT" in before or "MASTER_PORT" not in os.environ
    refused("already holds a run", train)


def test_training_leaves_hydra_of_the_program_as_it_was(train, trained, tmp_path, monkeypatch):
    """As in a program of Hydra, or a notebook after `hydra.initialize`."""
    monkeypatch.setattr(BaseContainer, "_resolvers", dict(BaseContainer._resolvers))
    (tmp_path / "mine.yaml").write_text("a: ${now:x}")
    hydra.initialize_config_dir(str(tmp_path), version_base=None)
    OmegaConf.register_new_resolver("now", lambda pattern: "of the user", replace=True)
    try:
        cfg = hydra.compose("mine", return_hydra_config=True)
        cfg.hydra.runtime.output_dir = "of the user"
        HydraConfig.instance().set_config(cfg)
        ours = (GlobalHydra.instance().hydra, dict(BaseContainer._resolvers))
        assert rows(train(*SHORT).folder) == rows(trained(*SHORT))
        refused("max_steps must be", train, "max_steps=-1", folder=tmp_path / "refused")
        assert (GlobalHydra.instance().hydra, BaseContainer._resolvers) == ours
        assert HydraConfig.get().runtime.output_dir == "of the user"
        assert hydra.compose("mine").a == "of the user"
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    train(*SHORT, folder=tmp_path / "without")
    assert not HydraConfig.initialized()


class Wait(Callback):
    """Wait long enough for another run to begin."""

    trains = 0
    most = 0

    def on_train_start(self, trainer, pl_module):
        Wait.trains += 1
        Wait.most = max(Wait.most, Wait.trains)
        time.sleep(0.3)

    def on_train_end(self, trainer, pl_module):
        Wait.trains -= 1


def test_runs_of_two_threads_train_one_after_the_other(train, trained, tmp_path):
    seeds = ("seed=1337", "seed=7")

    def run(seed):
        own = [*SHORT, "+callbacks.wait._target_=test_train_in_program.Wait"]
        return rows(train(seed, *own, folder=tmp_path / seed).folder)

    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(run, seeds)]
    assert Wait.most == 1
    assert found == [rows(trained(seed, *SHORT)) for seed in seeds]


class Fail(Callback):
    def __init__(self, error):
        self.error = pkgutil.resolve_name(error)

    def setup(self, *args, **kwargs):
        raise self.error


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ZeroDivisionError", None])
def test_training_leaves_signal_handlers_of_the_program_as_they_were(train, error):
    def mine(*_):
        raise KeyboardInterrupt

    given = {signum: signal.signal(signum, mine) for signum in END_SIGNALS}
    target = "+callbacks.fail._target_=test_train_in_program.Fail"
    fails = [target, f"+callbacks.fail.error=builtins:{error}"] if error else []
    try:
        with pytest.raises((SystemExit, ZeroDivisionError)) if error else nullcontext():
            train("max_steps=2", *fails)
        assert {signal.getsignal(signum) for signum in END_SIGNALS} == {mine}
    finally:
        for handler in given.items():
            signal.signal(*handler)


TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
PROGRAM = """
import json, os, sys
import minigpt

print("the program runs")
names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
before = {name: os.environ.get(name) for name in names}
results = []
for overrides in json.loads(sys.stdin.read()):
    try:
        results.append(minigpt.train(overrides))
    except minigpt.utils.errors.UserError as error:
        results.append(str(error))
    assert before == {name: os.environ.get(name) for name in before}
print(json.dumps(results))
"""


@pytest.mark.slow
def test_a_program_trains_several_runs_on_two_ranks_and_runs_once(small, trained, tmp_path):
    """Also after a run on one, and after one that fails; with arguments and input of its own."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    seeds = [["seed=7"], TWO, ["optimizer.lr=1e30", *TWO], ["seed=7", *TWO], []]
    given = json.dumps([[*small, *overrides] for overrides in seeds])
    command = [sys.executable, "program.py", "--an=argument"]
    options = {"cwd": tmp_path, "capture_output": True, "encoding": "utf-8", "timeout": 300}
    result = subprocess.run(command, input=given, check=False, **options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the program runs") == 1
    first, second, failed, third, last = json.loads(result.stdout.splitlines()[-1])
    assert "the loss is nan" in failed
    for found, seed, size in ((first, 7, 1), (second, 1337, 2), (third, 7, 2), (last, 1337, 1)):
        assert found["world_size"] == size
        expected = column(trained(f"seed={seed}"), "val_loss")
        assert column(Path(found["folder"]), "val_loss") == pytest.approx(expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_taken_port_is_named(devices, train, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", f"{port}")
        pattern = rf"^MASTER_PORT must be a free port, got {port}; set this"
        refused(pattern, train, *TWO[:2], f"trainer.devices={devices}")


def test_a_notebook_may_define_a_callback_and_an_optimizer_for_one_rank(
    train, monkeypatch, tmp_path
):
    """The module of a notebook, and of a script, is __main__ and has no spec."""
    ended = []

    class Mine(Callback):
        def on_train_end(self, trainer, pl_module):
            ended.append((trainer.global_step, type(trainer.optimizers[0])))

    def make(model, **_):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "Mine", Mine, raising=False)
    monkeypatch.setattr(main, "make", make, raising=False)
    monkeypatch.chdir(tmp_path)  # from which modules are imported
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = "+callbacks.mine._target_=__main__.Mine"
    train(mine, "optimizer._target_=__main__.make", "max_steps=2")
    assert ended == [(2, torch.optim.SGD)]
    pattern = "_target_ must be of a module, got __main__; move it to where"
    refused(pattern, train, mine, *TWO, folder=tmp_path / "two")
