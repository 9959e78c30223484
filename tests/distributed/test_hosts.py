"""Runs on several hosts without a shared disk, started with torchrun on each, and the loss of one of them."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from conftest import ROOT, wait_until
from hosts import Hosts, needs_hosts, start_hosts

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
    """Start hosts, each with its own copy of the text."""
    with ExitStack() as stack:

        def start(n: int) -> Hosts:
            hosts = stack.enter_context(start_hosts(n, tmp_path))
            for folder in hosts.folders:
                shutil.copy(text, folder / "fox.txt")
            return hosts

        yield start


STATIC = ["--nnodes={n}", "--node-rank={host}", "--master-addr=a"]
ELASTIC = ["--nnodes=1:{n}", "--max-restarts=10", "--rdzv-backend=c10d", "--rdzv-endpoint=c:29500"]
SOONER = os.environ.get("MINIGPT_TEST_TIMEOUTS") != "default"  # not after 30 s each
ELASTIC += ["--rdzv-conf=last_call_timeout=5,keep_alive_interval=2"] if SOONER else []


def start_host(hosts: Hosts, host: int, overrides: list[str], options: list[str], ranks: int = 1) -> Any:
    """Start `scripts/train.py` with torchrun on a host."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    torchrun += [option.format(n=len(hosts.names), host=host) for option in options]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": paths}
    command = [*torchrun, str(ROOT / "scripts/train.py"), *overrides, *SETTINGS]
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


def wait_for(file: Path, launchers: list[Any]) -> None:
    wait_until(lambda: file.exists() or any(launcher.poll() is not None for launcher in launchers))
    assert file.exists()


def errors(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(("error", "warning"))]


def losses(folder: Path) -> dict[str, list[tuple[int, float]]]:
    columns = read_metrics(folder / "metrics.csv")
    return {name: columns[name] for name in ("train_loss", "val_loss", "grad_norm")}


def assert_close(one: Path, other: Path, rel: float) -> None:
    for name, points in losses(one).items():
        assert points == [pytest.approx(point, rel=rel) for point in losses(other)[name]]


def one_process(settings: list[str]) -> list[str]:
    return [setting for setting in settings if not setting.startswith(("trainer=", "trainer.accelerator"))]


def files(folder: Path) -> set[str]:
    """Return the files and folders beside the text and the data."""
    return {path.name for path in folder.iterdir()} - {"fox.txt", "data"}


CASES = {
    "ddp with muon-2x2": (2, 2, [*DDP, *MUON, "ema_decay=0.9", "data.batch_size=10"], 1e-6),  # 3, 3, 2, 2 sequences
    # Matrices are orthogonalized in bfloat16, whose rounding grows with the learning rate.
    "fsdp with muon-4x1": (4, 1, [*FSDP, "optimizer=muon", "optimizer.lr=0.002", "ema_decay=0.9"], 1e-3),
}


@pytest.mark.parametrize(("n_hosts", "ranks", "settings", "rel"), CASES.values(), ids=CASES)
def test_hosts_give_the_losses_of_one_process_and_the_first_holds_the_run(
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
    overrides = [*small, *settings, *TRAINING, "hydra.run.dir=run"]
    first, *others = finish(torchrun(hosts, ranks, overrides), code=0)
    assert errors(first) == []
    assert f"device      {n_hosts * ranks} × cpu" in first
    train(*one_process(settings), *TRAINING, *SETTINGS[2:], folder=tmp_path / "one")
    assert_close(hosts.folders[0] / "run", tmp_path / "one", rel)
    tokens = [file.read_bytes() for file in sorted((hosts.folders[0] / "data").glob("tokens/*/*.bin"))]
    for host, printed in enumerate(others, 1):
        assert "step" not in printed
        assert files(hosts.folders[host]) == (set() if "trainer=fsdp" in settings else {"run"})
        own = sorted((hosts.folders[host] / "data").glob("tokens/*/*.bin"))
        assert [file.read_bytes() for file in own] == tokens
    for host in range(n_hosts):
        assert hosts.sent_bytes(host) > PARAMETERS * 4 * STEPS  # gradients of every step


def test_hosts_with_different_texts_or_without_one_do_not_start(
    start: Callable[[int], Hosts], small: list[str]
) -> None:
    hosts = start(2)
    (hosts.folders[1] / "fox.txt").write_text("another text " * 100)
    overrides = [*small, *DDP, "hydra.run.dir=run"]
    first, second = finish(torchrun(hosts, 1, overrides), code=1)  # of torchrun
    (line,) = errors(first)
    assert line.startswith("error: all hosts need the same text: host a has fox.txt of checksum ")
    assert " but host b has fox.txt of checksum " in line
    assert errors(second) == []
    assert "exitcode  : 2" in second
    (hosts.folders[1] / "fox.txt").unlink()
    first, second = finish(torchrun(hosts, 2, overrides), code=1)
    assert [line.partition(";")[0] for line in errors(first)] == ["error: host b: data.path=fox.txt does not exist"]
    assert errors(second) == []
    assert "exitcode  : 2" in second
    assert [files(folder) for folder in hosts.folders] == [set(), set()]


def rank_pid(hosts: Hosts, host: int, rank: int) -> int:
    variable = f"\0RANK={rank}\0".encode()
    (pid,) = (pid for pid in hosts.processes(host) if variable in Path(f"/proc/{pid}/environ").read_bytes())
    return pid


def kill_host(hosts: Hosts, host: int) -> None:
    for pid in hosts.processes(host):
        os.kill(pid, signal.SIGKILL)


def test_a_slow_network_and_a_host_with_pauses_change_no_number(
    start: Callable[[int], Hosts], small: list[str]
) -> None:
    hosts = start(2)
    fast, slow = (hosts.folders[0] / name for name in ("fast", "slow"))
    overrides = [*small, *DDP, *TRAINING]
    finish(torchrun(hosts, 1, [*overrides, "hydra.run.dir=fast"]), code=0)
    hosts.limit_bandwidth(20_000_000)
    launchers = torchrun(hosts, 1, [*overrides, "hydra.run.dir=slow"])
    wait_for(slow / "metrics.csv", launchers)
    pid, paused = rank_pid(hosts, 1, 1), 0
    while launchers[1].poll() is None:
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
                paused += 1
            time.sleep(0.2)
    finish(launchers, code=0)
    assert paused > 2
    assert losses(slow) == losses(fast)


# Hosts, ranks per host, settings, the fault, and what every host prints of it.
FAULTS: dict[str, tuple[int, int, list[str], Callable[[Hosts], None], list[str]]] = {
    "link down": (2, 1, DDP, lambda hosts: hosts.disconnect(1), ["rank 1 (host b)", "rank 0 (host a)"]),
    "one of four ranks": (
        *(2, 2, FSDP, lambda hosts: os.kill(rank_pid(hosts, 1, 3), signal.SIGKILL)),
        ["rank 3 (host b)", "rank 3 (host b)"],
    ),
    "first host": (3, 1, DDP, lambda hosts: kill_host(hosts, 0), ["", "rank 0 (host a)", "rank 0 (host a)"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_loses_a_host_ends_with_its_name_and_resumes(
    start: Callable[[int], Hosts], small: list[str], train: Callable[..., Any], tmp_path: Path, fault: str
) -> None:
    n_hosts, ranks, settings, inject, lost = FAULTS[fault]
    hosts = start(n_hosts)
    run, overrides = hosts.folders[0] / "run", [*small, "data.batch_size=12", "eval_every=20", *settings]
    overrides += ["collective_timeout=10"] if SOONER else []
    launchers = torchrun(hosts, ranks, [*overrides, "max_steps=1000000", "hydra.run.dir=run"])
    wait_for(run / LAST, launchers)
    inject(hosts)
    for printed, ranks_lost in zip(finish(launchers, code=1), lost, strict=True):
        expected = [f"error: {ranks_lost} ended or lost the network"] if ranks_lost else []
        assert [line.partition(" after step ")[0] for line in errors(printed) if "warmup" not in line] == expected
    if fault != "first host":
        summary = read_summary(run)
        assert (summary["status"], summary["reason"].partition(" ended")[0]) == ("failed", lost[0])
    kept = [(folder / "run" / LAST).exists() for folder in hosts.folders]
    assert kept == [True, *[settings == DDP] * (n_hosts - 1)]

    for host in range(n_hosts):
        hosts.reconnect(host)
    shutil.copytree(run, tmp_path / "one")
    longer = f"max_steps={max(read(folder / 'run' / LAST)['global_step'] for folder in hosts.folders[:1]) + 20}"
    finish(torchrun(hosts, ranks, [*overrides, longer, "hydra.run.dir=run", "resume=auto"]), code=0)
    finish(torchrun(hosts, ranks, [*overrides, longer, "hydra.run.dir=uninterrupted"]), code=0)
    uninterrupted = hosts.folders[0] / "uninterrupted"
    if n_hosts * ranks == 2:
        assert losses(run) == losses(uninterrupted)
        weights = (read(folder / LAST)["state_dict"].values() for folder in (run, uninterrupted))
        assert all(map(torch.equal, *weights))
    else:  # DDP regroups gradients after the first step of a process, and a sum of more than two depends on its order
        assert_close(run, uninterrupted, 1e-12 if settings == DDP else 1e-3)
    single = [*one_process(settings), "data.batch_size=12", "eval_every=20", *SETTINGS[2:]]
    train(*single, longer, "resume=auto", folder=tmp_path / "one")
    assert_close(tmp_path / "one", uninterrupted, 1e-6 if settings == DDP else 1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_continues_without_lost_hosts_and_with_those_that_come_back(
    start: Callable[[int], Hosts], small: list[str], train: Callable[..., Any], tmp_path: Path, strategy: str
) -> None:
    """Kill one host, cut the link of another, bring both back, and with DDP kill the host of rank 0.

    `MINIGPT_TEST_SEED` draws other steps, and `MINIGPT_TEST_STEPS` sets how many there are.
    """
    steps = int(os.environ.get("MINIGPT_TEST_STEPS", "150"))
    draw = random.Random(int(os.environ.get("MINIGPT_TEST_SEED", "0")))
    hosts = start(3)
    hosts.limit_bandwidth(10_000_000)  # a step takes about 0.1 s
    settings = [*small, f"trainer={strategy}", "data.batch_size=12", f"max_steps={steps}", "eval_every=10"]
    elastic = [*settings, "trainer.accelerator=cpu", "resume=auto", "hydra.run.dir=run"]
    elastic += ["+callbacks.slow._target_=hosts.SlowAlone"]
    elastic += ["collective_timeout=10"] if SOONER else []
    launchers = {host: start_host(hosts, host, elastic, ELASTIC) for host in (2, 1, 0)}
    # Torchrun meets on c, and the checkpoints of FSDP are on a.
    killed, cut = draw.sample([0, 1], 2) if strategy == "ddp" else (1, 1)

    def survive(fault: Callable[[], None], step: int) -> None:
        """Cause a fault after a step, and wait until the training has restarted and made another step."""
        wait_until(lambda: max(map(last_step, hosts.folders)) >= step)
        before, began = sum(map(starts, hosts.folders)), time.monotonic()
        fault()
        wait_until(lambda: sum(map(starts, hosts.folders)) > before)
        restarted = time.time()
        files = [folder / "run/metrics.csv" for folder in hosts.folders]
        wait_until(lambda: any(file.exists() and file.stat().st_mtime > restarted for file in files))
        print(f"{fault.__name__} after step {step}: {time.monotonic() - began:.0f} s")  # shown by pytest -s

    def kill_one() -> None:
        kill_host(hosts, killed)

    def cut_link() -> None:
        hosts.disconnect(cut)

    def come_back() -> None:
        kill_host(hosts, cut)  # after a minute without the network its torchrun would end the rendezvous of all hosts
        launchers[cut].wait(SECONDS)
        hosts.reconnect(cut)
        for host in {killed, cut}:
            if launchers[host].poll() is not None:
                launchers[host] = start_host(hosts, host, elastic, ELASTIC)

    def kill_rank_zero() -> None:
        kill_host(hosts, 0)

    apart = [kill_one, cut_link, come_back, kill_rank_zero]
    for i, fault in enumerate(apart if strategy == "ddp" else [kill_one, come_back, cut_link, come_back]):
        survive(fault, steps // 15 + i * steps // 7 + draw.randrange(steps // 10))
    printed = finish(list(launchers.values()), code=0)
    run = hosts.folders[strategy == "ddp"] / "run"  # of rank 0 at the end
    train(*settings[len(small) + 1 :], *SETTINGS[2:], folder=tmp_path / "one")
    assert [step for step, _ in losses(run)["train_loss"]] == list(range(1, steps + 1)), printed
    expected = read(tmp_path / "one" / LAST)["state_dict"]
    for name, weight in read(run / LAST)["state_dict"].items():
        assert (weight - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def starts(folder: Path) -> int:
    """Return how often rank 0 began to train on a host."""
    log = folder / "run/log.txt"
    return log.read_text().count("\ntraining ") if log.exists() else 0


def last_step(folder: Path) -> int:
    """Return the last step in the metrics of a host."""
    metrics = folder / "run/metrics.csv"
    return read_metrics(metrics)["train_loss"][-1][0] if metrics.exists() else 0
