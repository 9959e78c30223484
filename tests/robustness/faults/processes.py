"""Faults in processes: killed, interrupted, killed between two file operations, a rank killed."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from random import Random

from processes import live_processes
from small_runs import wait_until

from minigpt.runs.run_dir import read_summary

from .tools import EVAL_EVERY, STEPS, Fault, Run, assert_resumes, assert_same_run, reference

TWO_RANKS = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")


def wait_until_random_time(run: Run, rng: Random) -> bool:
    """Wait until a random time of a run; returns False if the run has ended."""
    step = rng.randrange(STEPS)  # 0: before training starts
    share = rng.random()
    run.wait_for(run.folder.exists)
    run.wait_for_step(step)
    time.sleep(share * (0.2 if step else 1))
    return run.poll() is None


def kill_at_random_time(workdir: Path, rng: Random) -> str | None:
    run = Run(workdir / "run")
    alive = wait_until_random_time(run, rng)
    run.kill()
    assert_resumes(workdir / "run")
    return None if alive else "after the run had ended"


def kill_before_file_operation(workdir: Path, rng: Random) -> None:
    operations = int((reference() / "operations").read_text(encoding="utf-8"))
    run = Run(workdir / "run", signal_at=(rng.randint(1, operations), signal.SIGKILL))
    run.end(128 + signal.SIGKILL)
    assert_resumes(run.folder)


def interrupt(signum: signal.Signals, startup: bool, workdir: Path, rng: Random) -> str | None:
    """Send a signal: the run prints at most one line, exits with its code, and resumes."""
    reference()
    run = Run(workdir / "run", cold_start=startup)
    if startup:
        time.sleep(rng.uniform(0.5, 5))  # before 0.5 s the interpreter itself is starting
    else:
        wait_until_random_time(run, rng)
    run.signal(signum)
    code = run.wait()
    if (run.folder / "summary.json").exists() and read_summary(run.folder)["status"] == "completed":
        assert_same_run(run.folder, reference())
        return "after the run had ended"
    assert code == (75 if signum == signal.SIGUSR1 else 128 + signum), (
        f"exit code {code}; stderr: {run.stderr}"
    )
    assert len(run.messages) <= 1, f"more than one line on stderr: {run.stderr}"
    assert_resumes(run.folder)
    return None


def close_terminal(workdir: Path, rng: Random) -> str | None:
    reference()
    master, slave = os.openpty()
    run = Run(workdir / "run", terminal=os.ttyname(slave))
    wait_until_random_time(run, rng)
    os.close(master)
    run.signal(signal.SIGHUP)  # of the shell
    code = run.wait()
    os.close(slave)
    if code == 0:
        assert_same_run(run.folder, reference())
        return "after the run had ended"
    assert code == 128 + signal.SIGHUP, f"exit code {code}"
    if (run.folder / "summary.json").exists():
        assert read_summary(run.folder)["status"] == "interrupted"
    assert_resumes(run.folder)
    return None


def interrupt_twice(workdir: Path, rng: Random) -> str:
    """Press Ctrl-C twice: the run exits, and resumes.

    How fast it exits is a note, because machines may be busy.
    """
    run = Run(workdir / "run")
    wait_until_random_time(run, rng)
    run.signal(signal.SIGINT)
    time.sleep(rng.uniform(0, 0.02))
    run.signal(signal.SIGINT)
    start = time.monotonic()
    code = run.wait()
    seconds = time.monotonic() - start
    assert code in (0, 130), f"exit code {code}; stderr: {run.stderr}"
    if code:
        assert len(run.messages) <= 1, f"more than one line on stderr: {run.stderr}"
        assert_resumes(run.folder)
    return f"exited in {'less' if seconds < 1 else 'more'} than 1 s"


def kill_one_rank(workdir: Path, rng: Random) -> str:
    kill_first = rng.random() < 0.5
    run = Run(workdir / "run", *TWO_RANKS, cold_start=True)
    wait_until_random_time(run, rng)
    children = [pid for pid in live_processes(run.pid) if pid != run.pid]
    victim = run.pid if kill_first or not children else children[0]
    try:
        if run.poll() is None:
            os.kill(victim, signal.SIGKILL)
        code = run.wait()
        wait_until(lambda: not live_processes(run.pid))
    finally:
        run.kill()
    if code == 0:
        assert_same_run(run.folder, reference(*TWO_RANKS))
        return "after the run had ended"
    assert "Traceback" not in run.stderr, run.stderr
    assert_resumes(run.folder, *TWO_RANKS, cold_start=True)
    return "rank 0" if victim == run.pid else "rank 1"


def start_second_run(workdir: Path, rng: Random) -> None:
    first = Run(workdir / "run")
    assert first.wait_for_step(rng.randrange(1, STEPS - 2 * EVAL_EVERY)), first.stderr
    first.signal(signal.SIGSTOP)  # it could finish before the second run checks the lock
    second = Run(workdir / "run", *rng.choice(((), ("resume=auto",))))
    try:
        second.end(2)
    finally:
        first.signal(signal.SIGCONT)
    (message,) = second.messages
    assert "another run uses" in message
    first.end()
    assert_same_run(workdir / "run", reference())


FAULTS = [
    Fault("SIGKILL at a random time", kill_at_random_time, 50, "slow"),
    Fault("SIGKILL before a random file operation", kill_before_file_operation, 40, "fast"),
    Fault("SIGTERM at a random time", partial(interrupt, signal.SIGTERM, False), 20, "ci"),
    Fault("SIGINT at a random time", partial(interrupt, signal.SIGINT, False), 20, "slow"),
    Fault("SIGUSR1 (preemption) at a random time", partial(interrupt, signal.SIGUSR1, False), 20),
    Fault("SIGHUP (closed terminal) at a random time", close_terminal, 20, "ci"),
    Fault("SIGTERM during startup", partial(interrupt, signal.SIGTERM, True), 6),
    Fault("SIGINT during startup", partial(interrupt, signal.SIGINT, True), 6),
    Fault("SIGUSR1 (preemption) during startup", partial(interrupt, signal.SIGUSR1, True), 6),
    Fault("Ctrl-C twice", interrupt_twice, 8, "slow"),
    Fault("SIGKILL of one of two ranks", kill_one_rank, 10),
    Fault("two runs in one run folder", start_second_run, 6, "slow"),
]
