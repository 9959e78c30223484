"""A sweep through a real SLURM of one node, which this file starts with its state in a folder of its own."""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from minigpt.sweep import COMPLETED, read_sweep

DAEMONS = ("munged", "slurmctld", "slurmd")
pytestmark = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, ("sbatch", *DAEMONS))),
    reason="needs root and SLURM: apt-get install slurm-wlm munge",
)

CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=2000 State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A SLURM that commands find by SLURM_CONF; it ends with the test."""
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # short, for a socket's name may have 107 letters
    with socket.socket() as one, socket.socket() as two:
        for free in (one, two):
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in (one, two)]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf = CONF.format(host=socket.gethostname(), folder=folder, ports=ports, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(conf)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    options = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    files = [f"--{option}={folder}/munge.{name}" for option, name in options.items()]
    try:
        for command in (["munged", "--force", *files], ["slurmctld", "-c"], ["slurmd"]):
            subprocess.run(command, check=True, capture_output=True, timeout=30)
        deadline = time.monotonic() + 30
        while "idle" not in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout:
            if time.monotonic() > deadline:
                log = "".join(file.read_text()[-500:] for file in folder.glob("slurm*.log"))
                pytest.fail(f"SLURM does not come up: {log}")
            time.sleep(0.3)
        yield folder
    finally:
        for name in ("slurmd", "slurmctld", "munge"):
            with suppress(OSError, ValueError):
                os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


def test_the_jobs_of_a_sweep_are_one_array_and_a_failing_one_is_in_the_table(
    slurm: Path, launch: Callable[..., Any], tmp_path: Path
) -> None:
    cluster = ["hydra/launcher=submitit_slurm", "hydra.launcher.n_jobs=1"]
    swept = launch("train.py", "hydra.mode=MULTIRUN", "max_steps=10", "optimizer.lr=1e-3,1e30", *cluster, cwd=tmp_path)
    assert swept.returncode == 1, swept.stderr
    assert swept.stderr.splitlines()[-1] == "error: 1 of 2 runs failed; the table says why"
    good, bad = read_sweep((tmp_path / "runs" / "sweeps" / "latest").resolve())
    assert (good.status, bad.status) == (COMPLETED, "failed")
    assert "the loss became nan" in bad.reason
    assert "the loss became nan" in swept.stdout
    assert re.search(rf"1 +0\.001 +{good.val_loss:.4f} ", swept.stdout)
    folders = [
        path.name for path in (good.folder.parent / ".submitit").iterdir() if re.fullmatch(r"\d+_\d+", path.name)
    ]
    assert sorted(name.partition("_")[2] for name in folders) == ["0", "1"]
    assert len({name.partition("_")[0] for name in folders}) == 1
    known = subprocess.run(["scontrol", "show", "jobs"], capture_output=True, text=True, check=True).stdout
    assert sorted(re.findall(r"ArrayTaskId=(\d)", known)) == ["0", "1"]
    assert set(re.findall(r"ArrayTaskThrottle=(\d)", known)) == {"1"}
