"""What lies on disk, or cannot: damaged checkpoints, full and read-only disks, a clock that went back."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from minigpt.checkpoints.find import BEST, LAST, PREVIOUS, find_checkpoint
from minigpt.checkpoints.format import read, write
from minigpt.checkpoints.models import load_checkpoint
from minigpt.utils.errors import UserError

from . import Fault, Skipped, Trial
from .tools import EVAL_EVERY, STEPS, Run, goes_on, reference, same, text

ROWS_AT_EVERY_STEP = "log_every=1"  # for metrics.csv to outgrow a page of memory, of which the small disks are made


def flip_a_bit(file: Path, rng: Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def cut_the_tail(file: Path, rng: Random) -> None:
    os.truncate(file, rng.randrange(max(1, file.stat().st_size)))


def empty(file: Path, rng: Random) -> None:
    os.truncate(file, 0)


def swap(file: Path, rng: Random) -> None:
    others = ["metrics.csv", "samples.txt", ".hydra/config.yaml", "checkpoints"]
    other = file.parents[1] / rng.choice(others)
    file.unlink()
    if other.is_dir():
        archive = shutil.make_archive(str(file.parents[2] / "other"), "zip", other)  # not into what it packs
        Path(archive).rename(file)
    else:
        shutil.copy(other, file)


HARMS = {"a bit flipped": flip_a_bit, "the tail cut": cut_the_tail, "emptied": empty, "another kind of file": swap}


def harmed(harm: str) -> Trial:
    """The last checkpoint of a run that was killed is damaged: the one before it serves."""

    def trial(place: Path, rng: Random) -> str | None:
        folder = killed(place / "run", rng)
        good = read_step(folder / LAST)
        HARMS[harm](folder / LAST, rng)
        try:
            noticed = read_step(folder / LAST) != good
        except UserError:
            noticed = True
        goes_on(folder, warns=f"warning: {folder / LAST} " if noticed else "")
        return None if noticed else "in bytes that mean nothing"

    return trial


def all_harmed(place: Path, rng: Random) -> None:
    """No checkpoint is whole: the run says so in a line, and touches nothing."""
    folder = killed(place / "run", rng)
    for name in (LAST, PREVIOUS, BEST):
        HARMS[rng.choice(("the tail cut", "emptied", "another kind of file"))](folder / name, rng)
    before = contents(folder)
    run = Run(folder, "resume=auto")
    assert run.wait() == 2, run.stderr
    assert len(run.said) == 1, run.stderr
    assert "no checkpoint in" in run.said[0], run.stderr
    assert contents(folder) == before, "the refused run changed the folder"


def killed(folder: Path, rng: Random, *overrides: str) -> Path:
    """A run that was killed when it had all three checkpoints."""
    run = Run(folder, *overrides)
    after = rng.randrange(2 * EVAL_EVERY, STEPS - EVAL_EVERY + 1)
    run.until(lambda: (folder / PREVIOUS).exists() and read_step(folder / PREVIOUS) >= after - EVAL_EVERY)
    run.kill()
    return folder


def no_number(place: Path, rng: Random) -> str | None:
    """Some characters of the text make the loss no number: the run stops at the first, and can go past all of them."""
    letters = list(text().read_text())
    for at in rng.sample(range(int(0.85 * len(letters))), 40):  # of the training split
        letters[at] = "§"
    (place / "odd.txt").write_text("".join(letters))
    settings = (f"data.path={place}/odd.txt", "model.tie_embeddings=false")
    folder = killed(place / "run", rng, *settings)
    content, (_, tokenizer) = read(folder / LAST), load_checkpoint(folder / LAST)
    for weights in ("state_dict", "unaveraged"):
        content[weights]["model.wte.weight"][tokenizer.encode("§")] = 3e38  # the sum of such a row is infinite
    write(content, folder / LAST)
    shutil.copytree(folder, place / "other", symlinks=True)

    run = Run(folder, *settings, "resume=auto")
    if (code := run.wait()) == 0:
        return "no such character was met"
    assert code == 1, f"exit code {code}: {run.stderr}"
    told = re.fullmatch(r"error: the loss became \w+ at step (\d+) \(learning rate [\d.e-]+\); .*", *run.said)
    assert told, run.stderr
    assert read_step(folder / LAST) < int(told[1])
    load_checkpoint(folder / LAST)  # which looks whether its weights are numbers
    for either in (folder, place / "other"):  # to stop in between changes nothing
        run = Run(either, *settings, "resume=auto", "on_divergence=skip")
        assert run.wait() == 0, run.stderr
        assert f" at step {told[1]} " in run.said[0], run.stderr
    same(folder, place / "other")
    return None


def read_step(file: Path) -> int:
    return int(read(file)["global_step"])


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file that a run wrote, but for what Hydra says of the attempt."""
    files = (file for file in folder.rglob("*") if file.is_file() and ".hydra" not in file.parts)
    return {file: file.read_bytes() for file in files}


@contextmanager
def disk(place: Path, options: str) -> Iterator[Path]:
    """A small disk of its own."""
    folder = place / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, check=False, capture_output=True).returncode:
        raise Skipped("needs the right to mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def full_for_tokens(place: Path, rng: Random) -> None:
    """The disk is full when token files are made."""
    with disk(place, f"size={rng.randrange(1, 12) * 4}k") as small:
        run = Run(place / "run", f"data.folder={small}/data")
        says_it_is_full(run)
        remount(small, "size=1m")
        goes_on_here(place / "run", f"data.folder={small}/data")


def full_for_a_checkpoint(place: Path, rng: Random) -> str | None:
    """The disk is full when the first, second or third checkpoint is written."""
    size = (reference() / LAST).stat().st_size
    with disk(place, f"size={int(rng.uniform(0.1, 2.8) * size / 1024)}k") as small:
        run = Run(small / "run")
        says_it_is_full(run)
        kept = [name for name in (LAST, PREVIOUS, BEST) if (small / "run" / name).exists()]
        for name in kept:
            read(small / "run" / name)
        remount(small, f"size={8 * size}")
        goes_on(small / "run")
    return f"with {len(kept)} checkpoints" if kept else None


def full_for_a_row(place: Path, rng: Random) -> None:
    """The disk becomes full while the run goes, but for the pages that its files have begun."""
    reference(ROWS_AT_EVERY_STEP)
    with disk(place, "size=64m") as small:
        run = Run(small / "run", ROWS_AT_EVERY_STEP)
        run.until_step(rng.randrange(1, STEPS - EVAL_EVERY))
        fill(small / "filler")
        says_it_is_full(run)
        (small / "filler").unlink()
        goes_on(small / "run", ROWS_AT_EVERY_STEP)


def fill(file: Path) -> None:
    """Write until nothing more fits."""
    with open(file, "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass


def says_it_is_full(run: Run) -> None:
    """The run ends with one clear line."""
    code = run.wait()
    assert code, "the disk was not full"
    assert len(run.said) == 1, run.stderr
    assert "no space left on device" in run.said[0], run.stderr
    assert "Traceback" not in run.stderr
    assert code == 1 or "token files cannot be written" in run.said[0], f"exit code {code}: {run.stderr}"


def goes_on_here(folder: Path, *overrides: str) -> None:
    """As `goes_on`, with settings that change where things lie and not what comes of the run."""
    run = Run(folder, *overrides, "resume=auto")
    assert run.wait() == 0, run.stderr
    same(folder, reference())


def read_only_data(place: Path, rng: Random) -> None:
    """Token files on a disk that cannot be written are read; where there are none, a line says so."""
    reference()
    with disk(place, "size=4m") as other:
        missing = rng.random() < 0.5
        if not missing:
            made = Run(place / "made", f"data.folder={other}/data", "max_steps=1", cold=False)
            assert made.wait() == 0, made.stderr
        remount(other, "ro")
        run = Run(place / "run", f"data.folder={other}/data")
        code = run.wait()
        if missing:
            assert code == 2, run.stderr
            assert len(run.said) == 1, run.stderr
            assert "read-only file system" in run.said[0], run.stderr
        else:
            assert code == 0, run.stderr
            same(place / "run", reference())


def no_home(place: Path, rng: Random) -> None:
    """HOME is nowhere, or cannot be written."""
    with disk(place, "size=1m,ro") as other:
        home = rng.choice(["/proc/nonexistent", str(other)])
        env = {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", "XDG_CONFIG_HOME": f"{home}/.config"}
        run = Run(place / "run", cold=True, env=env)
        code = run.wait()
        assert code == 0, run.stderr
        assert "Traceback" not in run.stderr, run.stderr  # matplotlib says which folder it takes instead
        same(place / "run", reference())


def clock_set_back(place: Path, rng: Random) -> None:
    """What a run wrote lies in the future: it goes on from its newest checkpoint by step, not by date."""
    folder = killed(place / "run", rng)
    for file in folder.rglob("*"):
        ahead = time.time() + rng.uniform(0, 1e8)
        os.utime(file, (ahead, ahead))
    goes_on(folder)
    other = Run(place / "another")
    assert other.wait() == 0, other.stderr
    assert (place / "latest").resolve() == place / "another", "latest is not the run that began last"
    assert read_step(find_checkpoint(place / "run", last=True)) == STEPS


FAULTS = [
    *(Fault(f"last.safetensors: {harm}", harmed(harm), 20, quick=int(harm == "a bit flipped")) for harm in HARMS),
    Fault("all checkpoints damaged", all_harmed, 8),
    Fault("a loss that is no number", no_number, 20, quick=0),
    Fault("disk full: token files", full_for_tokens, 6),
    Fault("disk full: a checkpoint", full_for_a_checkpoint, 8, quick=0),
    Fault("disk full: anything", full_for_a_row, 8),
    Fault("read-only data folder", read_only_data, 4, quick=0),
    Fault("HOME nowhere or read-only", no_home, 4, quick=0),
    Fault("clock set back", clock_set_back, 4, quick=0),
]
