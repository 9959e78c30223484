"""Runs on several hosts that share a disk, started with torchrun on each; the loss of some."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from hosts import Hosts, needs_hosts, start_hosts
from small_runs import ROOT, wait_until

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.distributed.process_group import LOST_RANK
from minigpt.runs.metrics_csv import read_metrics
from minigpt.runs.run_dir import read_summary

SECONDS = 300  # for a run, or its end after a fault; collectives alone wait for 30 minutes
SETTINGS = ["log_every=1", "schedule=constant", "schedule.warmup_steps=5"]
DDP = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.precision=64-true"]
FSDP = ["trainer=fsdp", "trainer.accelerator=cpu"]
TRAINING = [
    "optimizer=muon",
    "ema_decay=0.9",
    "trainer.accumulate_grad_batches=2",
    "max_steps=50",
    "eval_every=25",
]
# For two hosts with two processes each.
DOCUMENTED = re.findall(
    r"^torchrun (.+) scripts/train.py",
    (ROOT / "docs/scaling.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
ELASTIC = (
    "--nnodes=1:3 --max-restarts=10 --rdzv-backend=c10d --rdzv-endpoint=c:29500"
    " --rdzv-conf=last_call_timeout=5,keep_alive_interval=2"  # by default 30 s
)
pytestmark = [needs_hosts, pytest.mark.slow]


def torchrun(hosts: Hosts, host: int, options: str, overrides: list[str]) -> Any:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": paths}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options.split(),
        str(ROOT / "scripts/train.py"),
    ]
    # A pipe could be full
    with NamedTemporaryFile("w", encoding="utf-8", dir=hosts.folder, delete=False) as log:
        options = {"cwd": hosts.folder, "stdout": log, "stderr": subprocess.STDOUT}
        launcher = hosts.run(host, [*command, *overrides, "collective_timeout=10"], env, **options)
    launcher.log = Path(log.name)
    return launcher


def on_all(hosts: Hosts, ranks: int, overrides: list[str]) -> list[Any]:
    more = f"--nnodes=2 --nproc-per-node={ranks}"
    options = [f"{given} {more}".replace("HOST", "a") for given in DOCUMENTED]
    return [torchrun(hosts, host, each, overrides) for host, each in enumerate(options)]


def finish(launchers: list[Any], code: int) -> list[str]:
    # Wait until all launchers exit with a code, except killed ones; return what each printed
    for launcher in launchers:
        launcher.wait(SECONDS)
    printed = [launcher.log.read_text(encoding="utf-8") for launcher in launchers]
    codes = {launcher.returncode for launcher in launchers} - {-signal.SIGKILL}
    assert codes == {code}, "\n".join(printed)
    return printed


def assert_same_losses(run: Path, one: Path, rel: float) -> None:
    ours, expected = (read_metrics(folder / "metrics.csv") for folder in (run, one))
    for name in ("train_loss", "val_loss", "grad_norm"):
        assert ours[name] == [pytest.approx(point, rel=rel) for point in expected[name]], name


@pytest.mark.ci
def test_hosts_give_the_losses_of_one_process(small, train, tmp_path):
    # Of 3, 3, 2 and 2 sequences
    settings = [*TRAINING, "optimizer.lr=0.02", "data.batch_size=10", *SETTINGS]
    with start_hosts(2, tmp_path) as hosts:
        first, *others = finish(on_all(hosts, 2, [*small, *DDP, *settings]), code=0)
    assert "device      4 × cpu" in first
    assert not any("error" in printed or "step" in printed for printed in others)
    (run,) = tmp_path.glob("runs/[0-9]*")  # one folder for all processes
    assert_same_losses(run, train(*settings, *DDP[2:], folder=tmp_path / "one").folder, 1e-6)


@pytest.mark.parametrize(
    ("spread", "cut", "rel"), [(DDP, True, 1e-6), (FSDP, False, 1e-3)], ids=["cut", "killed"]
)
def test_a_run_that_loses_a_host_ends_and_resumes(small, train, tmp_path, spread, cut, rel):
    run = tmp_path / "run"
    settings = ["data.batch_size=12", "eval_every=5", *SETTINGS]
    overrides = [*small, *settings, *spread, f"hydra.run.dir={run}", "resume=auto"]
    with start_hosts(2, tmp_path) as hosts:
        launchers = on_all(hosts, 1, [*overrides, "max_steps=1000000"])

        def ended() -> bool:
            return any(launcher.poll() is not None for launcher in launchers)

        wait_until(lambda: (run / LAST).exists() or ended())
        if cut:
            hosts.set_link(1, "down")
        else:
            hosts.kill(0)  # of rank 0
        printed = finish(launchers, code=1)
        assert re.search(rf"^error: .+; {LOST_RANK}$", printed[1], flags=re.MULTILINE)
        assert "exitcode  : 1" in printed[1]  # the summary of torchrun
        if cut:  # rank 0 is alive
            summary = read_summary(run)
            assert (summary["status"], LOST_RANK in summary["reason"]) == ("failed", True)
        hosts.set_link(1, "up")
        longer = f"max_steps={read(run / LAST)['global_step'] + 10}"
        finish(on_all(hosts, 1, [*overrides, longer]), code=0)
    one = train(*settings, *spread[2:], longer, folder=tmp_path / "one").folder
    assert_same_losses(run, one, rel)


def test_a_run_continues_without_lost_hosts_and_with_those_that_come_back(small, train, tmp_path):
    run = tmp_path / "run"
    settings = ["data.batch_size=12", "max_steps=100", "eval_every=10", *SETTINGS]
    slow = ["resume=auto", f"hydra.run.dir={run}", "+callbacks.slow._target_=hosts.Slow"]
    elastic = [*small, *settings, *FSDP, *slow]

    def starts() -> int:
        return (run / "log.txt").read_text(encoding="utf-8").count("\ntraining ")

    with start_hosts(3, tmp_path) as hosts:
        launchers = {host: torchrun(hosts, host, ELASTIC, elastic) for host in range(3)}

        def survive(fault: Callable[[int], None], *numbers: int) -> None:
            wait_until((run / LAST).exists)
            before = starts()
            for host in numbers:
                fault(host)
            wait_until(lambda: starts() > before)
            restarted = time.time()
            wait_until(lambda: (run / "metrics.csv").stat().st_mtime > restarted)

        def come_back(host: int) -> None:
            # After a minute without the network its torchrun would end the rendezvous of all hosts
            hosts.kill(host)
            launchers[host].wait(SECONDS)
            hosts.set_link(host, "up")
            launchers[host] = torchrun(hosts, host, ELASTIC, elastic)

        survive(hosts.kill, 1)
        survive(lambda host: hosts.set_link(host, "down"), 0)  # of rank 0; torchrun meets on host 2
        survive(come_back, 0, 1)
        printed = finish(list(launchers.values()), code=0)
    one = train(*settings, folder=tmp_path / "one").folder
    steps = [step for step, _ in read_metrics(run / "metrics.csv")["train_loss"]]
    assert steps == [*range(1, 101)], printed
    expected = read(one / LAST)["state_dict"]
    for name, weight in read(run / LAST)["state_dict"].items():
        assert (weight - expected[name]).norm() <= 1e-4 * expected[name].norm(), name
