"""Faults in data and disks: a corrupt checkpoint, a NaN loss, full and read-only disks, a missing home."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from minigpt.checkpoints.find import BEST, LAST, PREVIOUS
from minigpt.checkpoints.format import read, write
from minigpt.checkpoints.load import load_checkpoint
from minigpt.utils.errors import UserError

from .tools import EVAL_EVERY, STEPS, Fault, Run, Skipped, assert_resumes, assert_same_run, reference, training_text

LOG_EVERY_STEP = "log_every=1"  # metrics.csv must outgrow one memory page, the unit in which a tmpfs fills up


def flip_bit(file: Path, rng: Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.unlink()  # a run killed between a link and a renaming has one file under two names
    file.write_bytes(content)


def corrupt_last(workdir: Path, rng: Random) -> str | None:
    """Corrupt the last checkpoint of a killed run: the run resumes from the previous one."""
    folder = killed_run(workdir / "run", rng)
    step = read_step(folder / LAST)
    flip_bit(folder / LAST, rng)
    try:
        detected = read_step(folder / LAST) != step
    except UserError:
        detected = True
    assert_resumes(folder, warning=f"warning: {folder / LAST} " if detected else "")
    return None if detected else "in unused bytes"


def killed_run(folder: Path, rng: Random, *overrides: str) -> Path:
    """The folder of a run that was killed after it had written all three checkpoints."""
    run = Run(folder, *overrides)
    after = rng.randrange(2 * EVAL_EVERY, STEPS - EVAL_EVERY + 1)
    run.wait_for(lambda: (folder / PREVIOUS).exists() and read_step(folder / PREVIOUS) >= after - EVAL_EVERY)
    run.kill()
    return folder


def nan_loss(workdir: Path, rng: Random) -> str | None:
    """Make the loss NaN at some batches: the run stops at the first, and the last good checkpoint stays."""
    letters = list(training_text().read_text())
    for at in rng.sample(range(int(0.85 * len(letters))), 40):  # in the training split
        letters[at] = "§"
    (workdir / "poisoned.txt").write_text("".join(letters))
    settings = (f"data.path={workdir}/poisoned.txt", "model.tie_embeddings=false")
    folder = killed_run(workdir / "run", rng, *settings)
    content, (_, tokenizer) = read(folder / LAST), load_checkpoint(folder / LAST)
    for weights in ("state_dict", "unaveraged"):
        content[weights]["model.wte.weight"][tokenizer.encode("§")] = 3e38  # the sum over the row is infinite
    write(content, folder / LAST)

    run = Run(folder, *settings, "resume=auto")
    if (code := run.wait()) == 0:
        return "with no poisoned batch after the checkpoint"
    assert code == 1, f"exit code {code}: {run.stderr}"
    stopped = re.fullmatch(r"error: the loss is \w+ at step (\d+) \(learning rate [\d.e-]+\); .*", *run.messages)
    assert stopped, run.stderr
    assert read_step(folder / LAST) < int(stopped[1])
    load_checkpoint(folder / LAST)  # checks that its weights are finite
    return None


def read_step(file: Path) -> int:
    return int(read(file)["global_step"])


@contextmanager
def tmpfs(workdir: Path, options: str) -> Iterator[Path]:
    """Mount a small disk."""
    folder = workdir / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, check=False, capture_output=True).returncode:
        raise Skipped("needs the permission to mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def full_for_token_files(workdir: Path, rng: Random) -> None:
    """The disk is full when token files are written."""
    with tmpfs(workdir, f"size={rng.randrange(1, 12) * 4}k") as disk:
        run = Run(workdir / "run", f"data.folder={disk}/data")
        assert_disk_full(run)
        remount(disk, "size=1m")
        run = Run(workdir / "run", f"data.folder={disk}/data", "resume=auto")
        run.end()
        assert_same_run(workdir / "run", reference())


def full_for_checkpoint(workdir: Path, rng: Random) -> str | None:
    """The disk is full when the first, second or third checkpoint is written."""
    size = (reference() / LAST).stat().st_size
    with tmpfs(workdir, f"size={int(rng.uniform(0.1, 2.8) * size / 1024)}k") as disk:
        run = Run(disk / "run")
        assert_disk_full(run)
        written = [name for name in (LAST, PREVIOUS, BEST) if (disk / "run" / name).exists()]
        for name in written:
            read(disk / "run" / name)
        remount(disk, f"size={8 * size}")
        assert_resumes(disk / "run")
    return f"with {len(written)} checkpoints" if written else None


def full_during_training(workdir: Path, rng: Random) -> None:
    """The disk becomes full during training."""
    reference(LOG_EVERY_STEP)
    with tmpfs(workdir, "size=64m") as disk:
        run = Run(disk / "run", LOG_EVERY_STEP)
        run.wait_for_step(rng.randrange(1, STEPS - EVAL_EVERY))
        fill_disk(disk / "filler")
        assert_disk_full(run)
        (disk / "filler").unlink()
        assert_resumes(disk / "run", LOG_EVERY_STEP)


def fill_disk(file: Path) -> None:
    """Write to a file until the disk is full."""
    with suppress(OSError), open(file, "wb", buffering=0) as filler:
        while filler.write(bytes(1 << 20)):
            pass


def assert_disk_full(run: Run) -> None:
    """Assert that a run exits with one line on the full disk, after warnings of what it can do without."""
    code = run.wait()
    assert code, "the disk was not full"
    *warnings, error = run.messages
    lacking = "Samples failed at step|.*/snapshots/step-[0-9]+.safetensors cannot be written|the originality of"
    assert all(re.match(f"warning: ({lacking})", warning) for warning in warnings), run.stderr
    assert "no space left on device" in error, run.stderr
    assert "Traceback" not in run.stderr
    assert code == 1 or "token files cannot be written" in error, f"exit code {code}: {run.stderr}"


def read_only_data(workdir: Path, rng: Random) -> None:
    """The data folder is read-only: existing token files are used; without any, the run exits with one line."""
    reference()
    with tmpfs(workdir, "size=4m") as disk:
        missing = rng.random() < 0.5
        if not missing:
            prepared = Run(workdir / "prepared", f"data.folder={disk}/data", "max_steps=1")
            prepared.end()
        remount(disk, "ro")
        run = Run(workdir / "run", f"data.folder={disk}/data")
        run.end(2 if missing else 0)
        if missing:
            (message,) = run.messages
            assert "read-only file system" in message
        else:
            assert_same_run(workdir / "run", reference())


def no_home(workdir: Path, rng: Random) -> None:
    """HOME is missing or read-only."""
    with tmpfs(workdir, "size=1m,ro") as disk:
        home = rng.choice(["/proc/nonexistent", str(disk)])
        env = {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", "XDG_CONFIG_HOME": f"{home}/.config"}
        run = Run(workdir / "run", cold_start=True, env=env)
        run.end()
        assert "Traceback" not in run.stderr, run.stderr  # matplotlib prints its temporary cache folder
        assert_same_run(workdir / "run", reference())


FAULTS = [
    Fault("last.safetensors: bit flip", corrupt_last, 20, "fast"),
    Fault("NaN loss", nan_loss, 20),
    Fault("disk full: token files", full_for_token_files, 6, "slow"),
    Fault("disk full: checkpoint", full_for_checkpoint, 8),
    Fault("disk full: during training", full_during_training, 8, "slow"),
    Fault("read-only data folder", read_only_data, 4),
    Fault("HOME missing or read-only", no_home, 4),
]
