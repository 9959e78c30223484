"""Runs and sweeps on a real SLURM of one and of two nodes, which is started in a temporary folder."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from hosts import needs_hosts, start_hosts
from small_runs import ROOT, wait_until

from minigpt import load_checkpoint
from minigpt.runs.run_dir import read_metrics
from minigpt.sweeps.results import COMPLETED, NATS, read_sweep

DAEMONS = ("munged", "slurmctld", "slurmd")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, ("sbatch", *DAEMONS))),
        reason="needs root and SLURM: apt-get install slurm-wlm munge",
    ),
]

CONF = """
ClusterName=tests
SlurmctldHost={first}({address})
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


NODE = "NodeName={name} NodeAddr={address} CPUs={cpus} RealMemory=2000 State=UNKNOWN\n"


@contextmanager
def start_slurm(addresses: dict[str, str], start: Callable[..., Any]) -> Iterator[None]:
    """Start SLURM on nodes, the first of which is its controller; its commands read SLURM_CONF.

    Args:
        start: starts a command on a node, given by its number, and returns the process.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # a short path: the limit for a socket is 107 characters
    with socket.socket() as one, socket.socket() as two:
        for free in (one, two):
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in (one, two)]
    (folder / "state").mkdir()
    first, cpus = next(iter(addresses)), os.cpu_count()
    conf = CONF.format(first=first, address=addresses[first], folder=folder, ports=ports)
    nodes = (NODE.format(name=name, address=address, cpus=cpus) for name, address in addresses.items())
    (folder / "slurm.conf").write_text(conf + "".join(nodes))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    options = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    files = [f"--{option}={folder}/munge.{name}" for option, name in options.items()]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            daemons = [(0, ["munged", "--force", *files]), (0, ["slurmctld", "-c"])]
            daemons += [(node, ["slurmd"]) for node in range(len(addresses))]
            for node, command in daemons:
                assert start(node, command, stderr=subprocess.DEVNULL).wait(30) == 0
            sinfo, idle = ["sinfo", "-h", "-N", "-o", "%T"], [b"idle"] * len(addresses)
            wait_until(lambda: start(0, sinfo, stdout=subprocess.PIPE).communicate()[0].split() == idle, seconds=60)
            yield
    finally:
        for file in (*folder.glob("slurm*.pid"), folder / "munge.pid"):
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """SLURM on one node."""
    with start_slurm({socket.gethostname(): "127.0.0.1"}, lambda _, *args, **options: Popen(*args, **options)):
        yield


@pytest.mark.usefixtures("slurm")
def test_a_sweep_is_one_array_job_and_its_table_lists_failed_runs(launch: Callable[..., Any], tmp_path: Path) -> None:
    cluster = ["hydra/launcher=submitit_slurm", "hydra.launcher.n_jobs=1"]
    swept = launch("train.py", "hydra.mode=MULTIRUN", "max_steps=10", "optimizer.lr=1e-3,1e30", *cluster, cwd=tmp_path)
    assert swept.returncode == 1, swept.stderr
    assert swept.stderr.splitlines()[-1].startswith("error: 1 of 2 runs failed")
    completed, failed = read_sweep((tmp_path / "runs" / "sweeps" / "latest").resolve())
    assert (completed.status, failed.status) == (COMPLETED, "failed")
    assert "the loss is nan" in failed.reason
    assert "the loss is nan" in swept.stdout
    assert re.search(rf"1 +0\.001 +{completed.loss(NATS):.4f} ", swept.stdout)
    first, second = sorted((completed.folder.parent / ".submitit").glob("*_[0-9]"))
    job = first.name.removesuffix("_0")
    assert second.name == f"{job}_1"
    jobs = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    assert sorted(re.findall(r"ArrayTaskId=(\d)", jobs)) == ["0", "1"]
    assert set(re.findall(r"ArrayTaskThrottle=(\d)", jobs)) == {"1"}


@pytest.mark.usefixtures("slurm")
def test_preempted_jobs_of_a_sweep_are_requeued_and_resume(
    small: list[str], launch: Callable[..., Any], tmp_path: Path
) -> None:
    longer = ["max_steps=4000", "eval_every=500"]  # SLURM takes seconds to deliver a signal
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *small, *longer, "hydra.mode=MULTIRUN", "seed=7,8"]
    with open(tmp_path / "sweep.log", "wb") as log:
        sweep = subprocess.Popen([*command, "hydra/launcher=submitit_slurm"], cwd=tmp_path, stdout=log, stderr=log)
    try:
        checkpoints = "runs/sweeps/[0-9]*/*/checkpoints/last.safetensors"  # not through the link `latest` too
        wait_until(lambda: len(list(tmp_path.glob(checkpoints))) == 2 or sweep.poll() is not None)
        subprocess.run(["scancel", "--signal=USR2", "--user=root"], check=True)  # submitit's preemption signal
        assert sweep.wait(300) == 0, (tmp_path / "sweep.log").read_text()
    finally:
        sweep.kill()
    (run, _) = read_sweep((tmp_path / "runs" / "sweeps" / "latest").resolve())
    logs = [file.read_text() for file in (run.folder.parent / ".submitit").glob("*/*.out")]
    assert [log.count("Starting") for log in logs] == [2, 2]
    launch("train.py", *longer, "seed=7", f"hydra.run.dir={tmp_path}/uninterrupted")
    assert_equal_weights(run.folder, tmp_path / "uninterrupted")


def assert_equal_weights(*runs: Path) -> None:
    assert all(map(torch.equal, *(load_checkpoint(run)[0].state_dict().values() for run in runs)))


JOB_SCRIPT = """#!/bin/bash
#SBATCH --requeue --open-mode=append --output={folder}.log
srun {python} {script} {small} resume=auto hydra.run.dir={folder}
[ $? = 75 ] && scontrol requeue $SLURM_JOB_ID
"""


@pytest.mark.usefixtures("slurm")
def test_a_preempted_job_is_requeued_and_its_result_equals_an_uninterrupted_run(
    small: list[str], launch: Callable[..., Any], tmp_path: Path
) -> None:
    folder, longer = tmp_path / "run", ["max_steps=800", "eval_every=400"]
    file = tmp_path / "job.sh"
    script, settings = ROOT / "scripts" / "train.py", " ".join([*small, *longer])
    file.write_text(JOB_SCRIPT.format(python=sys.executable, script=script, small=settings, folder=folder))
    sbatch = ["sbatch", "--parsable", "--ntasks=2", "--ntasks-per-node=2", str(file)]
    job = subprocess.run(sbatch, capture_output=True, text=True, check=True).stdout.strip()

    def log() -> str:
        return Path(f"{folder}.log").read_text() if Path(f"{folder}.log").exists() else ""

    def state() -> str:
        return subprocess.run(["squeue", "-h", "-o", "%T", "-j", job], capture_output=True, text=True).stdout.strip()

    wait_until(lambda: (folder / "metrics.csv").exists())
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_until(lambda: "interrupted by SIGUSR1" in log())
    wait_until(lambda: not state())
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("completed", 800, 2), log()
    assert log().count("interrupted") == 1
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    launch("train.py", *two, *longer, f"hydra.run.dir={tmp_path}/uninterrupted")
    assert_equal_weights(folder, tmp_path / "uninterrupted")


@needs_hosts
def test_srun_trains_on_two_nodes(small: list[str], train: Callable[..., Any], tmp_path: Path) -> None:
    settings = ["trainer.precision=64-true", "log_every=1"]
    with start_hosts(2, tmp_path) as hosts, start_slurm(dict(zip("ab", hosts.addresses, strict=True)), hosts.run):
        script = str(ROOT / "scripts/train.py")
        srun = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, script, *small, *settings]
        command = hosts.run(0, [*srun, "data.folder=data", "trainer=ddp", "trainer.accelerator=cpu"])
        assert command.wait(300) == 0
    (run,) = hosts.disk.glob("runs/[0-9]*")  # one folder for all processes
    one = train(*settings)
    assert json.loads((run / "summary.json").read_text())["world_size"] == 4
    losses = [read_metrics(folder / "metrics.csv")["train_loss"] for folder in (run, one.folder)]
    assert losses[0] == [pytest.approx(point, rel=1e-6) for point in losses[1]]
