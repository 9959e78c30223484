"""Faults in data and disks: a corrupt checkpoint, full and read-only disks, a missing home."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from minigpt.checkpoints.find import BEST, LAST, PREVIOUS
from minigpt.checkpoints.format import read
from minigpt.utils.errors import UserError

from .tools import (
    EVAL_EVERY,
    STEPS,
    Fault,
    Run,
    Skipped,
    assert_resumes,
    assert_same_run,
    reference,
)

# metrics.csv must outgrow one memory page, the unit in which a tmpfs fills up
LOG_EVERY_STEP = "log_every=1"
# What a run can do without
LACKING = (
    "Samples failed at step|.*/snapshots/step-[0-9]+.safetensors cannot be written|"
    "the originality of"
)


def corrupt_last(workdir: Path, rng: Random) -> str | None:
    run = Run(workdir / "run")
    last = run.folder / LAST
    previous = run.folder / PREVIOUS
    after = rng.randrange(EVAL_EVERY, STEPS - 2 * EVAL_EVERY + 1)
    run.wait_for(lambda: previous.exists() and read_step(previous) >= after)
    run.kill()
    (run.folder / "summary.json").unlink(missing_ok=True)  # of a run that ended first
    step = read_step(last)
    content = bytearray(last.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    last.unlink()  # a run killed between a link and a renaming has one file under two names
    last.write_bytes(content)
    try:
        detected = read_step(last) != step
    except UserError:
        detected = True
    assert_resumes(run.folder, warning=f"warning: {last} " if detected else "")
    return None if detected else "in unused bytes"


def read_step(file: Path) -> int:
    return int(read(file)["global_step"])


@contextmanager
def tmpfs(workdir: Path, options: str) -> Iterator[Path]:
    folder = workdir / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    able = os.geteuid() == 0 and shutil.which("mount")
    if not able or subprocess.run(mount, check=False, capture_output=True).returncode:
        raise Skipped("needs the permission to mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def full_for_token_files(workdir: Path, rng: Random) -> None:
    with tmpfs(workdir, f"size={rng.randrange(1, 12) * 4}k") as disk:
        assert_disk_full(Run(workdir / "run", f"data.folder={disk}/data"))
        remount(disk, "size=1m")
        Run(workdir / "run", f"data.folder={disk}/data", "resume=auto").end()
        assert_same_run(workdir / "run", reference())


def full_for_checkpoint(workdir: Path, rng: Random) -> str | None:
    size = (reference() / LAST).stat().st_size
    with tmpfs(workdir, f"size={int(rng.uniform(0.1, 2.8) * size / 1024)}k") as disk:
        assert_disk_full(Run(disk / "run"))
        written = [name for name in (LAST, PREVIOUS, BEST) if (disk / "run" / name).exists()]
        for name in written:
            read(disk / "run" / name)
        remount(disk, f"size={8 * size}")
        assert_resumes(disk / "run")
    return f"with {len(written)} checkpoints" if written else None


def full_during_training(workdir: Path, rng: Random) -> None:
    reference(LOG_EVERY_STEP)
    with tmpfs(workdir, "size=64m") as disk:
        run = Run(disk / "run", LOG_EVERY_STEP)
        run.wait_for_step(rng.randrange(1, STEPS - EVAL_EVERY))
        with suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while filler.write(bytes(1 << 20)):
                pass
        assert_disk_full(run)
        (disk / "filler").unlink()
        assert_resumes(disk / "run", LOG_EVERY_STEP)


def assert_disk_full(run: Run) -> None:
    """Assert that a run exits with one line on the full disk, after warnings of what it lacks."""
    code = run.wait()
    assert code, "the disk was not full"
    *warnings, error = run.messages
    assert all(re.match(f"warning: ({LACKING})", warning) for warning in warnings), run.stderr
    assert "no space left on device" in error, run.stderr
    assert "Traceback" not in run.stderr
    assert code == 1 or "token files cannot be written" in error, f"exit code {code}: {run.stderr}"


def read_only_data(workdir: Path, rng: Random) -> None:
    reference()
    with tmpfs(workdir, "size=4m") as disk:
        missing = rng.random() < 0.5
        if not missing:
            Run(workdir / "prepared", f"data.folder={disk}/data", "max_steps=1").end()
        remount(disk, "ro")
        run = Run(workdir / "run", f"data.folder={disk}/data")
        run.end(2 if missing else 0)
        if missing:
            (message,) = run.messages
            assert "read-only file system" in message
        else:
            assert_same_run(workdir / "run", reference())


def no_home(workdir: Path, rng: Random) -> None:
    with tmpfs(workdir, "size=1m,ro") as disk:
        home = rng.choice(["/proc/nonexistent", str(disk)])
        caches = {"XDG_CACHE_HOME": f"{home}/.cache", "XDG_CONFIG_HOME": f"{home}/.config"}
        run = Run(workdir / "run", cold_start=True, env={"HOME": home, **caches})
        run.end()
        # Matplotlib prints its temporary cache folder
        assert "Traceback" not in run.stderr, run.stderr
        assert_same_run(workdir / "run", reference())


FAULTS = [
    Fault("last.safetensors: bit flip", corrupt_last, 20, "slow"),
    Fault("disk full: token files", full_for_token_files, 6, "slow"),
    Fault("disk full: checkpoint", full_for_checkpoint, 8),
    Fault("disk full: during training", full_during_training, 8, "slow"),
    Fault("read-only data folder", read_only_data, 4),
    Fault("HOME missing or read-only", no_home, 4),
]
