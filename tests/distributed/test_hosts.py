"""Runs on several hosts that share a disk, started with torchrun or by SLURM; the loss of some."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import pytest
import torch
from hosts import Hosts, needs_hosts, start_hosts
from ranks import train_on_ranks
from small_runs import ROOT, wait_until

from minigpt import load_checkpoint
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.distributed.process_group import LOST_RANK
from minigpt.runs.metrics_csv import read_metrics
from minigpt.runs.run_dir import read_summary
from minigpt.sweeps.results import COMPLETED, NATS, read_sweep

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


DAEMONS = ("munged", "slurmctld", "slurmd")

CONF = """
ClusterName=tests
SlurmctldHost=a(10.83.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=batch_sched_delay=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
NodeName=a,b NodeAddr=10.83.0.[1-2] CPUs={cpus} RealMemory=2000 State=UNKNOWN
"""
MUNGE = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}
TRAIN = [sys.executable, str(ROOT / "scripts" / "train.py")]
# A run is held after a step, until a signal ends it, and has a checkpoint from which it resumes.
HELD = ["max_steps=20", "eval_every=5", "+callbacks.hold._target_=hosts.Hold"]


@pytest.fixture(scope="module")
def cluster():
    # SLURM on two hosts: a function that starts a command on one, by default on the controller
    if not all(map(shutil.which, DAEMONS)):
        pytest.skip("needs SLURM: apt-get install slurm-wlm munge")
    with TemporaryDirectory(
        prefix="slurm", ignore_cleanup_errors=True
    ) as name:  # the limit for a socket is 107 bytes
        folder = Path(name)
        (folder / "slurm.conf").write_text(
            CONF.format(folder=folder, cpus=os.cpu_count()), encoding="utf-8"
        )
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        env = {"SLURM_CONF": f"{folder}/slurm.conf", "PYTHONPATH": str(ROOT / "tests")}
        with start_hosts(2, folder) as hosts:

            def start(*command, host=0, **options):
                return hosts.run(
                    host,
                    command,
                    env,
                    **{"stdout": PIPE, "stderr": STDOUT, "text": True, **options},
                )

            munged = [
                "munged",
                "--force",
                *(f"--{option}={folder}/munge.{end}" for option, end in MUNGE.items()),
            ]
            for host, command in (
                (0, munged),
                (0, ["slurmctld", "-c"]),
                (0, ["slurmd"]),
                (1, ["slurmd"]),
            ):
                assert start(*command, host=host, stdout=DEVNULL, stderr=DEVNULL).wait(60) == 0
            wait_until(
                lambda: (
                    printed_by(start("sinfo", "-h", "-N", "-o", "%T")).split() == ["idle", "idle"]
                )
            )
            yield start


def printed_by(process, code=0):
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == code, printed
    return printed


@pytest.mark.ci
def test_a_sweep_is_one_array_job_and_its_table_lists_failed_runs(cluster, small, tmp_path):
    swept = ["hydra.mode=MULTIRUN", "hydra/launcher=submitit_slurm", "hydra.launcher.n_jobs=1"]
    swept += ["max_steps=10", "optimizer.lr=1e-3,1e30"]
    printed = printed_by(cluster(*TRAIN, *small, *swept, cwd=tmp_path), code=1)
    assert printed.splitlines()[-1].startswith("error: 1 of 2 runs failed")
    completed, failed = read_sweep((tmp_path / "runs/sweeps/latest").resolve())
    assert (completed.status, failed.status) == (COMPLETED, "failed")
    assert "the loss is nan" in failed.reason
    assert re.search(rf"1 +0\.001 +{completed.loss(NATS):.4f} ", printed)
    first, second = sorted((completed.folder.parent / ".submitit").glob("*_[0-9]"))
    job = first.name.removesuffix("_0")
    assert second.name == f"{job}_1"
    jobs = printed_by(cluster("scontrol", "show", "job", job))
    assert set(re.findall(r"ArrayTaskThrottle=(\d)", jobs)) == {"1"}


def test_preempted_jobs_of_a_sweep_are_requeued_and_resume(cluster, small, trained, tmp_path):
    swept = ["hydra.mode=MULTIRUN", "hydra/launcher=submitit_slurm", "seed=7,8"]
    sweep = cluster(*TRAIN, *small, *HELD, *swept, cwd=tmp_path)
    checkpoints = (
        "runs/sweeps/[0-9]*/*/checkpoints/last.safetensors"  # not through the link `latest` too
    )
    wait_until(lambda: len(list(tmp_path.glob(checkpoints))) == 2 or sweep.poll() is not None)
    printed_by(cluster("scancel", "--signal=USR2", "--user=root"))  # submitit's preemption signal
    printed_by(sweep)
    (run, _) = read_sweep((tmp_path / "runs/sweeps/latest").resolve())
    logs = [
        file.read_text(encoding="utf-8")
        for file in (run.folder.parent / ".submitit").glob("*/*.out")
    ]
    assert [log.count("Starting") for log in logs] == [2, 2]
    assert_equal_weights(run.folder, trained(*HELD[:2], "seed=7"))


def assert_equal_weights(*runs):
    assert all(map(torch.equal, *(load_checkpoint(run)[0].state_dict().values() for run in runs)))


def test_a_batch_job_of_two_tasks_trains_once_without_srun_and_on_two_ranks_with_it(
    cluster, small, trained, tmp_path
):
    file = tmp_path / "job.sh"
    ddp = "trainer=ddp trainer.accelerator=cpu"
    runs = [f"{tmp_path}/one", f"srun {ddp} {tmp_path}/two", f"srun --ntasks=1 {tmp_path}/step"]
    lines = []
    for run in runs:
        *start, folder = run.split()
        options = [word for word in start if not word.startswith("trainer")]
        lines.append(
            " ".join(
                [*options, *TRAIN, *small, *(start[len(options) :]), f"hydra.run.dir={folder}"]
            )
        )
    file.write_text(
        "\n".join(["#!/bin/bash", f"#SBATCH --output={file}.log", *lines]), encoding="utf-8"
    )
    job = printed_by(
        cluster("sbatch", "--parsable", "--ntasks=2", "--nodes=2", "--export=ALL", str(file))
    ).strip()
    wait_until(lambda: not printed_by(cluster("squeue", "-h", "-j", job)).strip())
    log = Path(f"{file}.log").read_text(encoding="utf-8")
    assert [read_summary(tmp_path / name).get("world_size") for name in ("one", "two", "step")] == [
        1,
        2,
        1,
    ], log
    assert_equal_weights(tmp_path / "one", trained())
    assert_equal_weights(tmp_path / "step", trained())


JOB_SCRIPT = """#!/bin/bash
#SBATCH --requeue --open-mode=append --output={folder}.log
srun {train} resume=auto hydra.run.dir={folder}
[ $? = 75 ] && scontrol requeue $SLURM_JOB_ID
"""


def test_a_preempted_job_on_two_hosts_is_requeued_and_its_result_equals_an_uninterrupted_run(
    cluster, small, tmp_path
):
    folder = tmp_path / "run"
    file = tmp_path / "job.sh"
    ranks = [*small, *HELD[:2], "trainer=ddp", "trainer.accelerator=cpu"]
    file.write_text(
        JOB_SCRIPT.format(train=" ".join([*TRAIN, *ranks, HELD[2]]), folder=folder),
        encoding="utf-8",
    )
    job = printed_by(
        cluster("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", str(file))
    ).strip()
    wait_until(lambda: (folder / "metrics.csv").exists())
    printed_by(cluster("scancel", "--signal=USR1", job))
    wait_until(lambda: not printed_by(cluster("squeue", "-h", "-j", job)).strip())
    log = Path(f"{folder}.log").read_text(encoding="utf-8")
    summary = read_summary(folder)
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("completed", 20, 2), log
    assert log.count("interrupted by SIGUSR1") == 1
    train_on_ranks([[*ranks, "trainer.devices=2", f"hydra.run.dir={tmp_path}/uninterrupted"]])
    assert_equal_weights(folder, tmp_path / "uninterrupted")
