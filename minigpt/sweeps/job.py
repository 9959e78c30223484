"""One run of a sweep, as a worker process or a cluster node executes it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from tqdm import tqdm

from minigpt.runs.overrides import quote_override
from minigpt.runs.run_dir import LOG, SUMMARY, read_summary, write_failure
from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import RunError
from minigpt.utils.signals import Interrupted, handle_signals

_busy = threading.Lock()  # held while this worker runs a job


@dataclass(frozen=True)
class Job:
    """A picklable call that trains one run and returns its best validation loss.

    Output goes to `log.txt` in the run folder. A run on several devices is a process of its own.

    Args:
        config: configuration of the sweep.
        state: Hydra's singletons in the process of the sweep.

    Raises:
        RunError: the run failed; its folder holds the reason.
    """

    context: HydraContext
    config: DictConfig
    function: TaskFunction
    script: Path
    overrides: Sequence[str]
    number: int
    state: Any

    def __call__(self) -> float | None:
        setup_globals()
        Singleton.set_state(self.state)
        config = self.context.config_loader.load_sweep_config(self.config, list(self.overrides))
        config.hydra.job.id = config.hydra.job.num = self.number
        folder = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY).unlink(missing_ok=True)  # of an earlier attempt
        with _busy, _output_to(folder / LOG):
            try:
                if config.trainer.devices != 1:
                    return self._run_process(folder, config.hydra.overrides.task)
                return run_job(
                    self.function, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.context
                ).return_value  # raises the error of a failed run
            except (Exception, Interrupted) as error:
                print(explain(error)[0], file=sys.stderr)
                reason = error_text(error)
                if not (folder / SUMMARY).exists():  # it failed before it could write one
                    write_failure(folder, reason)
                raise RunError(reason) from None

    def checkpoint(self) -> Any:
        """Return the job that submitit queues when this one is preempted: the same, resumed."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(replace(self, overrides=[*self.overrides, "resume=auto"]))

    def _run_process(self, folder: Path, overrides: Sequence[str]) -> float | None:
        command = [sys.executable, str(self.script), *overrides, f"hydra.run.dir={quote_override(folder.absolute())}"]
        process = subprocess.Popen(command)
        # The SIGTERM that ends a sweep goes to the process group: here, wait for the process to end.
        with handle_signals([signal.SIGTERM], lambda *_: None):
            code = process.wait()
        if code:
            raise RunError(f"its process ended with exit code {code}; see {folder / LOG}")
        return read_summary(folder)["best_val_loss"]


def init_worker(parent: int) -> None:
    """Put a worker process into a process group, and end it when its parent is gone."""
    os.setpgid(0, 0)  # Ctrl-C goes to the group of the parent, which then signals this one
    # tqdm's default lock is a semaphore that a killed worker would leave behind.
    tqdm.set_lock(threading.RLock())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGTERM)  # ends a run with a checkpoint, and an import at once
        with _busy:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Append the output of this process, and of those that it starts, to a file."""
    sys.stdout.flush(), sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    try:
        with open(file, "ab") as opened:
            os.dup2(opened.fileno(), 1)
            os.dup2(opened.fileno(), 2)
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for number, descriptor in enumerate(saved, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
