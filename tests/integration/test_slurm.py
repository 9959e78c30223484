"""Runs and sweeps on a real SLURM of two hosts, which is started in a temporary folder."""

import os
import re
import shutil
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from tempfile import TemporaryDirectory

import pytest
import torch
from hosts import needs_hosts, start_hosts
from ranks import train_on_ranks
from small_runs import ROOT, wait_until

from minigpt import load_checkpoint
from minigpt.runs.run_dir import read_summary
from minigpt.sweeps.results import COMPLETED, NATS, read_sweep

DAEMONS = ("munged", "slurmctld", "slurmd")
pytestmark = [
    pytest.mark.slow,
    needs_hosts,
    pytest.mark.skipif(
        not all(map(shutil.which, DAEMONS)), reason="needs SLURM: apt-get install slurm-wlm munge"
    ),
]

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
                lambda: finish(start("sinfo", "-h", "-N", "-o", "%T")).split() == ["idle", "idle"]
            )
            yield start


def finish(process, code=0):
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == code, printed
    return printed


@pytest.mark.ci
def test_a_sweep_is_one_array_job_and_its_table_lists_failed_runs(cluster, small, tmp_path):
    swept = ["hydra.mode=MULTIRUN", "hydra/launcher=submitit_slurm", "hydra.launcher.n_jobs=1"]
    swept += ["max_steps=10", "optimizer.lr=1e-3,1e30"]
    printed = finish(cluster(*TRAIN, *small, *swept, cwd=tmp_path), code=1)
    assert printed.splitlines()[-1].startswith("error: 1 of 2 runs failed")
    completed, failed = read_sweep((tmp_path / "runs/sweeps/latest").resolve())
    assert (completed.status, failed.status) == (COMPLETED, "failed")
    assert "the loss is nan" in failed.reason
    assert re.search(rf"1 +0\.001 +{completed.loss(NATS):.4f} ", printed)
    first, second = sorted((completed.folder.parent / ".submitit").glob("*_[0-9]"))
    job = first.name.removesuffix("_0")
    assert second.name == f"{job}_1"
    jobs = finish(cluster("scontrol", "show", "job", job))
    assert set(re.findall(r"ArrayTaskThrottle=(\d)", jobs)) == {"1"}


def test_preempted_jobs_of_a_sweep_are_requeued_and_resume(cluster, small, trained, tmp_path):
    swept = ["hydra.mode=MULTIRUN", "hydra/launcher=submitit_slurm", "seed=7,8"]
    sweep = cluster(*TRAIN, *small, *HELD, *swept, cwd=tmp_path)
    checkpoints = (
        "runs/sweeps/[0-9]*/*/checkpoints/last.safetensors"  # not through the link `latest` too
    )
    wait_until(lambda: len(list(tmp_path.glob(checkpoints))) == 2 or sweep.poll() is not None)
    finish(cluster("scancel", "--signal=USR2", "--user=root"))  # submitit's preemption signal
    finish(sweep)
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
    job = finish(
        cluster("sbatch", "--parsable", "--ntasks=2", "--nodes=2", "--export=ALL", str(file))
    ).strip()
    wait_until(lambda: not finish(cluster("squeue", "-h", "-j", job)).strip())
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
    job = finish(
        cluster("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", str(file))
    ).strip()
    wait_until(lambda: (folder / "metrics.csv").exists())
    finish(cluster("scancel", "--signal=USR1", job))
    wait_until(lambda: not finish(cluster("squeue", "-h", "-j", job)).strip())
    log = Path(f"{folder}.log").read_text(encoding="utf-8")
    summary = read_summary(folder)
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("completed", 20, 2), log
    assert log.count("interrupted by SIGUSR1") == 1
    train_on_ranks([[*ranks, "trainer.devices=2", f"hydra.run.dir={tmp_path}/uninterrupted"]])
    assert_equal_weights(folder, tmp_path / "uninterrupted")
