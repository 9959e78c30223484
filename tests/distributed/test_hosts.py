"""Runs on several hosts that share a disk, started with torchrun on each, and the loss of some of them."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from hosts import Hosts, needs_hosts, start_hosts
from small_runs import ROOT, wait_until

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.runs.run_dir import read_metrics, read_summary

SECONDS = 300  # for a run, or its end after a fault; collectives alone wait for 30 minutes
STEPS, PARAMETERS = 50, 26_016
SETTINGS = ["data.path=fox.txt", "data.folder=data", "log_every=1", "schedule=constant", "schedule.warmup_steps=5"]
TRAINING = [f"max_steps={STEPS}", "eval_every=25", "trainer.accumulate_grad_batches=2"]
DDP = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.precision=64-true"]
FSDP = ["trainer=fsdp", "trainer.accelerator=cpu"]
MUON = ["optimizer=muon", "optimizer.lr=0.02"]
pytestmark = [needs_hosts, pytest.mark.slow]


@pytest.fixture
def start(tmp_path: Path, text: Path) -> Iterator[Callable[[int], Hosts]]:
    """Start hosts with the text on their disk."""
    with ExitStack() as stack:

        def start(n: int) -> Hosts:
            hosts = stack.enter_context(start_hosts(n, tmp_path))
            shutil.copy(text, hosts.disk / "fox.txt")
            return hosts

        yield start


STATIC = ["--nnodes={n}", "--node-rank={host}", "--master-addr=a"]
ELASTIC = ["--nnodes=1:{n}", "--max-restarts=10", "--rdzv-backend=c10d", "--rdzv-endpoint=c:29500"]
ELASTIC += ["--rdzv-conf=last_call_timeout=5,keep_alive_interval=2"]  # by default 30 s


def start_host(hosts: Hosts, host: int, overrides: list[str], options: list[str], ranks: int = 1) -> Any:
    """Start `scripts/train.py` with torchrun on a host."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    torchrun += [option.format(n=len(hosts.names), host=host) for option in options]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": paths}
    command = [*torchrun, str(ROOT / "scripts/train.py"), *overrides, *SETTINGS, "collective_timeout=10"]
    with NamedTemporaryFile("w", dir=hosts.disk.parent, delete=False) as log:  # a pipe could be full
        launcher = hosts.run(host, command, env, stdout=log, stderr=subprocess.STDOUT)
    launcher.log = Path(log.name)
    return launcher


def torchrun(hosts: Hosts, ranks_per_host: int, overrides: list[str]) -> list[Any]:
    """Start a training on all hosts."""
    return [start_host(hosts, host, overrides, STATIC, ranks_per_host) for host in range(len(hosts.names))]


def finish(launchers: list[Any], code: int) -> list[str]:
    """Wait until all launchers exit with a code, except killed ones; return what each printed."""
    for launcher in launchers:
        launcher.wait(SECONDS)
    printed = [launcher.log.read_text() for launcher in launchers]
    assert {launcher.returncode for launcher in launchers} - {-signal.SIGKILL} == {code}, "\n".join(printed)
    return printed


def losses(folder: Path) -> dict[str, list[tuple[int, float]]]:
    columns = read_metrics(folder / "metrics.csv")
    return {name: columns[name] for name in ("train_loss", "val_loss", "grad_norm")}


def assert_close(one: Path, other: Path, rel: float) -> None:
    for name, points in losses(one).items():
        assert points == [pytest.approx(point, rel=rel) for point in losses(other)[name]]


def one_process(settings: list[str]) -> list[str]:
    return [setting for setting in settings if not setting.startswith(("trainer=", "trainer.accelerator"))]


CASES = {
    "ddp with muon-2x2": (2, 2, [*DDP, *MUON, "ema_decay=0.9", "data.batch_size=10"], 1e-6),  # 3, 3, 2, 2 sequences
    # Matrices are orthogonalized in bfloat16, whose rounding grows with the learning rate.
    "fsdp with muon-4x1": (4, 1, [*FSDP, "optimizer=muon", "optimizer.lr=0.002", "ema_decay=0.9"], 1e-3),
}


@pytest.mark.parametrize(("n_hosts", "ranks", "settings", "rel"), CASES.values(), ids=CASES)
def test_hosts_give_the_losses_of_one_process(
    start: Callable[[int], Hosts],
    small: list[str],
    train: Callable[..., Any],
    tmp_path: Path,
    n_hosts: int,
    ranks: int,
    settings: list[str],
    rel: float,
) -> None:
    hosts = start(n_hosts)
    first, *others = finish(torchrun(hosts, ranks, [*small, *settings, *TRAINING, "hydra.run.dir=run"]), code=0)
    assert f"device      {n_hosts * ranks} × cpu" in first
    assert not any("error" in printed or "step" in printed for printed in others)
    train(*one_process(settings), *TRAINING, *SETTINGS[2:], folder=tmp_path / "one")
    assert_close(hosts.disk / "run", tmp_path / "one", rel)
    for host in range(n_hosts):
        assert hosts.sent_bytes(host) > PARAMETERS * 4 * STEPS  # gradients of every step


def kill_host(hosts: Hosts, host: int) -> None:
    for pid in hosts.processes(host):
        os.kill(pid, signal.SIGKILL)


FAULTS: dict[str, tuple[int, int, list[str], Callable[[Hosts], None]]] = {
    "cut link": (2, 1, DDP, lambda hosts: hosts.disconnect(1)),
    "host of rank 0": (2, 2, FSDP, lambda hosts: kill_host(hosts, 0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_loses_a_host_ends_and_resumes(start: Callable[[int], Hosts], small: list[str], fault: str) -> None:
    n_hosts, ranks, settings, inject = FAULTS[fault]
    hosts = start(n_hosts)
    run, overrides = hosts.disk / "run", [*small, "data.batch_size=12", "eval_every=20", *settings]
    launchers = torchrun(hosts, ranks, [*overrides, "max_steps=1000000", "hydra.run.dir=run"])
    wait_until(lambda: (run / LAST).exists() or any(launcher.poll() is not None for launcher in launchers))
    inject(hosts)
    printed = finish(launchers, code=1)
    lost = "; a rank may have ended or lost the network; see the logs of the others, and resume with resume=auto"
    assert re.search(rf"^error: .+{lost}$", printed[1], flags=re.MULTILINE)
    assert "exitcode  : 1" in printed[1]  # the summary of torchrun
    if fault == "cut link":  # rank 0 is alive
        summary = read_summary(run)
        assert (summary["status"], lost in summary["reason"]) == ("failed", True)

    for host in range(n_hosts):
        hosts.reconnect(host)
    longer = f"max_steps={read(run / LAST)['global_step'] + 20}"
    finish(torchrun(hosts, ranks, [*overrides, longer, "hydra.run.dir=run", "resume=auto"]), code=0)
    finish(torchrun(hosts, ranks, [*overrides, longer, "hydra.run.dir=uninterrupted"]), code=0)
    uninterrupted = hosts.disk / "uninterrupted"
    if n_hosts * ranks == 2:
        assert losses(run) == losses(uninterrupted)
        weights = (read(folder / LAST)["state_dict"].values() for folder in (run, uninterrupted))
        assert all(map(torch.equal, *weights))
    else:  # a sum of more than two depends on its order
        assert_close(run, uninterrupted, 1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_continues_without_lost_hosts_and_with_those_that_come_back(
    start: Callable[[int], Hosts], small: list[str], train: Callable[..., Any], tmp_path: Path, strategy: str
) -> None:
    """Kill one host, cut the link of another, bring both back, and kill the host of rank 0.

    `MINIGPT_TEST_SEED` draws other steps, and `MINIGPT_TEST_STEPS` sets how many there are.
    """
    steps = int(os.environ.get("MINIGPT_TEST_STEPS", "300"))
    draw = random.Random(int(os.environ.get("MINIGPT_TEST_SEED", "0")))
    hosts = start(3)
    hosts.limit_bandwidth(10_000_000)  # a step takes about 0.1 s
    run = hosts.disk / "run"
    settings = [*small, f"trainer={strategy}", "data.batch_size=12", f"max_steps={steps}", "eval_every=10"]
    elastic = [*settings, "trainer.accelerator=cpu", "resume=auto", "hydra.run.dir=run"]
    elastic += ["+callbacks.slow._target_=hosts.SlowAlone"]
    launchers = {host: start_host(hosts, host, elastic, ELASTIC) for host in (2, 1, 0)}
    killed, cut = draw.sample([0, 1], 2)  # torchrun meets on c

    def survive(fault: Callable[[], None], step: int) -> None:
        """Cause a fault after a step, and wait until the training has restarted and made another step."""
        wait_until(lambda: last_step(run) >= step)
        before, began = starts(run), time.monotonic()
        fault()
        wait_until(lambda: starts(run) > before)
        restarted = time.time()
        wait_until(lambda: (run / "metrics.csv").exists() and (run / "metrics.csv").stat().st_mtime > restarted)
        print(f"{fault.__name__} after step {step}: {time.monotonic() - began:.0f} s")  # shown by pytest -s

    def kill_one() -> None:
        kill_host(hosts, killed)

    def cut_link() -> None:
        hosts.disconnect(cut)

    def come_back() -> None:
        kill_host(hosts, cut)  # after a minute without the network its torchrun would end the rendezvous of all hosts
        launchers[cut].wait(SECONDS)
        hosts.reconnect(cut)
        for host in (killed, cut):
            if launchers[host].poll() is not None:
                launchers[host] = start_host(hosts, host, elastic, ELASTIC)

    def kill_rank_zero() -> None:
        kill_host(hosts, 0)  # torchrun orders hosts by name

    for i, fault in enumerate([kill_one, cut_link, come_back, kill_rank_zero]):
        survive(fault, steps // 15 + i * steps // 7 + draw.randrange(steps // 10))
    printed = finish(list(launchers.values()), code=0)
    train(*settings[len(small) + 1 :], *SETTINGS[2:], folder=tmp_path / "one")
    assert [step for step, _ in losses(run)["train_loss"]] == list(range(1, steps + 1)), printed
    expected = read(tmp_path / "one" / LAST)["state_dict"]
    for name, weight in read(run / LAST)["state_dict"].items():
        assert (weight - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def starts(run: Path) -> int:
    """Return how often rank 0 began to train."""
    return (run / "log.txt").read_text().count("\ntraining ") if (run / "log.txt").exists() else 0


def last_step(run: Path) -> int:
    """Return the last step in the metrics."""
    return read_metrics(run / "metrics.csv")["train_loss"][-1][0] if (run / "metrics.csv").exists() else 0
