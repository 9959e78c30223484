"""Processes that end: killed, asked to end, killed between two files, one rank of two, two in one folder."""

import os
import signal
import time
from pathlib import Path
from random import Random

from minigpt.checkpoints.find import BEST, LAST, PREVIOUS
from minigpt.checkpoints.models import load_checkpoint

from . import Fault, Trial
from .tools import EVAL_EVERY, STEPS, Run, goes_on, operations, reference, same

TWO_RANKS = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")
ENDLESS = ("max_steps=1000000", "eval_every=1000000")


def wait_a_while(run: Run, rng: Random) -> bool:
    """Let a run come to any moment of its life; False if it has ended."""
    step = rng.randrange(STEPS)  # 0: while it prepares
    share = rng.random()
    run.until(run.folder.exists)
    run.until_step(step)
    time.sleep(share * (0.2 if step else 1))
    return run.poll() is None


def killed_anywhere(place: Path, rng: Random) -> str | None:
    """SIGKILL at any moment from the first file operation of a run to its end."""
    run = Run(place / "run")
    alive = wait_a_while(run, rng)
    run.kill()
    goes_on(place / "run")
    return None if alive else "after its end"


def killed_in_a_write(place: Path, rng: Random) -> str | None:
    """SIGKILL while one of the checkpoints is being written."""
    nth, delay = rng.randrange(STEPS // EVAL_EVERY), rng.uniform(0, 0.01)
    run = Run(place / "run")
    run.until_step(nth * EVAL_EVERY)
    run.until(lambda: len(partials(run.folder)) > 0, every=0)
    time.sleep(delay)
    run.kill()
    hit = partials(run.folder)
    goes_on(run.folder)
    return "with half a checkpoint beside it" if hit else None


def partials(folder: Path) -> list[str]:
    """Names of the checkpoints that are being written."""
    try:
        return [
            file for file in os.listdir(folder / "checkpoints") if file.startswith((".last.", ".tmp"))
        ]  # .tmp* is safetensors'
    except FileNotFoundError:
        return []


def killed_between_files(place: Path, rng: Random) -> None:
    """SIGKILL right before any one of the file operations that a run makes in its folder."""
    run = Run(place / "run", struck=(rng.randint(1, operations()), signal.SIGKILL))
    assert run.wait() == 128 + signal.SIGKILL, run.stderr
    goes_on(run.folder)


def asked_to_end(signum: signal.Signals, *, starting: bool, place: Path, rng: Random) -> str | None:
    """A signal at any moment: the run says so in one line at most, ends with the code that tells it, and goes on."""
    reference()
    moment = rng.uniform(0.5, 5)  # before that the interpreter itself starts
    run = Run(place / "run", cold=starting)
    if starting:
        time.sleep(moment)
    else:
        wait_a_while(run, rng)
    run.signal(signum)
    code = run.wait(20)
    if code == 0:
        same(run.folder, reference())
        return "after its end"
    assert code == (75 if signum == signal.SIGUSR1 else 128 + signum), f"exit code {code}, and on stderr: {run.stderr}"
    assert len(run.said) <= 1, f"more than a line on stderr: {run.stderr}"
    goes_on(run.folder)
    return None


def asked_twice(place: Path, rng: Random) -> str:
    """Ctrl-C, and another one soon after: the run ends at once, and what is on disk can be loaded."""
    run = Run(place / "run")
    wait_a_while(run, rng)
    run.signal(signal.SIGINT)
    time.sleep(rng.uniform(0, 0.02))
    run.signal(signal.SIGINT)
    pressed = time.monotonic()
    code = run.wait(20)
    took = time.monotonic() - pressed
    assert took < 3, f"it took {took:.1f} s to end"
    assert code in (0, 130), f"exit code {code}, and on stderr: {run.stderr}"
    for name in (LAST, PREVIOUS, BEST):
        if (run.folder / name).exists():
            load_checkpoint(run.folder / name)
    if code:
        assert len(run.said) <= 1, f"more than a line on stderr: {run.stderr}"
        goes_on(run.folder)
    return f"ended in {'less' if took < 1 else 'more'} than a second"


def one_rank_killed(place: Path, rng: Random) -> str:
    """SIGKILL of either of two processes that train one model: the other ends too, soon, and the run goes on."""
    took = float((reference(*TWO_RANKS) / "took").read_text())
    moment, first = rng.uniform(0.3, 1) * took, rng.random() < 0.5
    run = Run(place / "run", *TWO_RANKS, cold=True)
    time.sleep(moment)
    others = [pid for pid in run.survivors() if pid != run.pid]
    victim = run.pid if first or not others else others[0]
    if run.poll() is None:
        os.kill(victim, signal.SIGKILL)
    struck = time.monotonic()
    code = run.wait(60)
    while (left := run.survivors()) and time.monotonic() - struck < 60:
        time.sleep(0.1)
    if left:
        run.kill()
        raise AssertionError(f"a process of the run outlived it by a minute; it said: {run.stderr}")
    if code == 0:
        same(run.folder, reference(*TWO_RANKS))
        return "after its end"
    assert "Traceback" not in run.stderr, run.stderr
    goes_on(run.folder, *TWO_RANKS, cold=True)
    return "rank 0" if victim == run.pid else "rank 1"


def two_in_one_folder(place: Path, rng: Random) -> None:
    """A run that is given the folder of one at work is refused in a line, and the first ends as ever."""
    first = Run(place / "run")
    assert first.until_step(rng.randrange(1, STEPS - 2 * EVAL_EVERY)), first.stderr
    first.signal(signal.SIGSTOP)  # or it might be done before the second looks
    second = Run(place / "run", *rng.choice(((), ("resume=auto",))))
    code = second.wait()
    first.signal(signal.SIGCONT)
    assert code == 2, second.stderr
    assert len(second.said) == 1, second.stderr
    assert "another run works in" in second.said[0], second.stderr
    assert first.wait() == 0, first.stderr
    same(place / "run", reference())


def _asked(signum: signal.Signals, starting: bool = False) -> Trial:
    return lambda place, rng: asked_to_end(signum, starting=starting, place=place, rng=rng)


FAULTS = [
    Fault("SIGKILL at any moment", killed_anywhere, 50),
    Fault("SIGKILL while a checkpoint is written", killed_in_a_write, 50),
    Fault("SIGKILL before any one file operation", killed_between_files, 40),
    Fault("SIGTERM at any moment", _asked(signal.SIGTERM), 20),
    Fault("SIGINT at any moment", _asked(signal.SIGINT), 20),
    Fault("SIGUSR1 at any moment, as of a scheduler", _asked(signal.SIGUSR1), 20, quick=0),
    Fault("SIGTERM while it starts", _asked(signal.SIGTERM, starting=True), 6, quick=0),
    Fault("SIGINT while it starts", _asked(signal.SIGINT, starting=True), 6, quick=0),
    Fault("SIGUSR1 while it starts", _asked(signal.SIGUSR1, starting=True), 6, quick=0),
    Fault("Ctrl-C twice", asked_twice, 8),
    Fault("SIGKILL of one of two ranks", one_rank_killed, 10, quick=0),
    Fault("two runs in one folder", two_in_one_folder, 6),
]
