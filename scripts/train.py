"""Train a GPT: compose the configuration, build the parts, fit, sample, and report.

python scripts/train.py --help lists what can be set.
"""

import os
import signal
import sys

if __name__ == "__main__":  # if a signal comes during the imports
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from minigpt.utils.signals import requeue_at_once

    requeue_at_once()

import re
import shlex
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from minigpt.runs.processes import shared_arguments
from minigpt.runs.run_dir import short_path
from minigpt.runs.train import train_in
from minigpt.sweeps.sweeper import with_deferred
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.overrides import quote_override

os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on, and `one_line` says them


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train one run, or one job of a sweep, whose errors the sweep reports; returns the best validation loss."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return train_in(folder, cfg)
    return cli_entrypoint(train_in)(folder, cfg, resume_command=resume_command(folder))


def resume_command(folder: Path) -> str:
    """The command that resumes this run."""
    kept = [argument for argument in sys.argv[1:] if not argument.startswith(("resume=", "hydra.run.dir="))]
    where = str(short_path(folder))
    where = where if re.fullmatch(r"[\w./-]+", where) else quote_override(where)
    python = str(short_path(Path(sys.executable)))
    return shlex.join([python, sys.argv[0], *kept, f"hydra.run.dir={where}", "resume=auto"])


@cli_entrypoint
def start() -> None:
    """Hand Hydra the command line."""
    sys.argv[1:] = shared_arguments(sys.argv[1:])
    with_deferred(main)()


if __name__ == "__main__":
    start()
