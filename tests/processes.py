"""Scripts in processes that are forked from one with all imports done.

They start in half a second instead of ten.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from small_runs import SCRIPTS
from tqdm import tqdm

# The fork server must not initialize CUDA, or its forks could not.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_forkserver = multiprocessing.get_context("forkserver")
_IMPORTS = [
    "torch._dynamo",
    "matplotlib.pyplot",
    "hydra.main",
    "minigpt.training.language_model",
    "minigpt.training.optim",
    "minigpt.training.ema",
]
PRELOADED = ["quick", *_IMPORTS, "minigpt.runs.run", "minigpt.runs.callbacks.samples"]
_forkserver.set_forkserver_preload(PRELOADED)


class Script:
    """A process of a script in its own session, with its output in files.

    Args:
        script: the name of a file in scripts/.
        output: its standard output and errors are in files of this name with the endings `.out` and
            `.err`.
        cold_start: start a new interpreter, as a user does, instead of a fork of one with all
            imports done.
        prepare: called in a forked process before the script.
    """

    def __init__(
        self,
        script: str,
        *arguments: str,
        output: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] = {},
        cold_start: bool = False,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.files = [output.with_suffix(ending) for ending in (".out", ".err")]
        for file in self.files:
            file.unlink(missing_ok=True)
        command = [str(SCRIPTS / script), *arguments]
        env = {**os.environ, **env}
        env.pop("WANDB_SERVICE", None)  # the client of this process
        self.encoding = env.get("PYTHONIOENCODING", "utf-8")
        self._process: Any = None
        if cold_start:
            with open(self.files[0], "ab") as out, open(self.files[1], "ab") as err:
                streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
                options: Any = {"cwd": cwd, "env": env, "start_new_session": True, **streams}
                self._popen = subprocess.Popen([sys.executable, *command], **options)
            self.pid = self._popen.pid
        else:
            options = (command, self.files, cwd or Path.cwd(), env, prepare)
            _start_server()
            self._process = _forkserver.Process(target=_run_forked, args=options)
            self._process.start()
            self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code as in a shell, 128 + signal if killed; None while the process is alive."""
        code = self._process.exitcode if self._process else self._popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, seconds: float = 300) -> int:
        """Wait for the exit code; on timeout kill the process and fail the test."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                late = f"the process did not exit within {seconds:g} s"
                raise AssertionError(f"{late}; stderr: {self.stderr}")
            time.sleep(0.01)
        return code

    def wait_for(self, condition: Callable[[], Any], *, poll_seconds: float = 0.01) -> bool:
        """Wait for a condition; returns False if the process exited first."""
        deadline = time.monotonic() + 300
        while not condition():
            if self.poll() is not None:
                return False
            assert time.monotonic() < deadline, "timeout after 300 s"
            time.sleep(poll_seconds)
        return True

    def signal(self, signum: int) -> None:
        """Send a signal to the process if it is alive."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        for pid in [self.pid, *live_processes(self.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    @property
    def stdout(self) -> str:
        return self._read(self.files[0])

    @property
    def stderr(self) -> str:
        return self._read(self.files[1])

    def _read(self, file: Path) -> str:
        return file.read_text(self.encoding, errors="replace") if file.exists() else ""


def close_output() -> None:
    """Let this process write to a pipe whose reader has gone; an argument `prepare` of `Script`."""
    reader, writer = os.pipe()
    os.close(reader)
    for stream in (1, 2):
        os.dup2(writer, stream)


def live_processes(session: int) -> list[int]:
    """Return the processes of a session, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has exited
            state, _, _, of = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def wait_for_imports() -> None:
    """Wait until the fork server has imported everything."""
    _start_server()
    imports = _forkserver.Process(target=int)
    imports.start()
    imports.join()


@lru_cache
def _start_server() -> None:
    """Start the fork server where it finds the modules of tests."""
    with patch.dict(os.environ, PYTHONPATH=str(SCRIPTS.parent / "tests")):
        forkserver.ensure_running()


def _run_forked(
    command: list[str],
    output: list[Path],
    cwd: Path,
    env: dict[str, str],
    prepare: Callable[[], None] | None,
) -> None:
    """Run a script in a forked process, with session, streams and arguments as from a shell."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    # The default lock is shared between processes; a killed process leaves warnings
    tqdm.set_lock(threading.RLock())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, file in enumerate(output, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.argv = command
    if prepare:
        prepare()
    encoding = env.get("PYTHONIOENCODING", "utf-8")
    # Of the kind of its file, pipe or terminal
    sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding, "backslashreplace", closefd=False)
    try:
        runpy.run_path(command[0], run_name="__main__")
    # As an interpreter exits: a forked process would join its children, and leave out the rest
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
