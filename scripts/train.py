"""Train a GPT: python scripts/train.py [GROUP=CHOICE] [SETTING=VALUE] ...   (--help lists them)

The run itself is `minigpt/runs/run.py`.
"""

import os
import signal
import sys
import warnings

if __name__ == "__main__":  # a signal during the imports below ends the process at once
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from minigpt.utils.signals import exit_on_requeue_signal

    exit_on_requeue_signal()

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from minigpt.distributed.process_group import gather_objects, join_ranks, shared_errors
from minigpt.runs.overrides import complete_overrides, quote_path
from minigpt.runs.run import train_in
from minigpt.runs.run_dir import command, remove_unused_folders, short_path, write_failure
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError
from minigpt.utils.scripts import search_path, usage
from minigpt.utils.terminal import replace_dead_output

os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
OmegaConf.register_new_resolver("usage", usage, replace=True)  # for --help: configs/hydra/help/

# Hydra warns that it reruns a configuration, as a job of a sweep does
warnings.filterwarnings("ignore", module=r"hydra\.main")


def main(cfg: DictConfig) -> float | None:
    """Train one run, or one job of a sweep; return the best validation loss."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:  # the sweep reports errors of its jobs
        # Its ranks would run the whole sweep; those of a rerun, with which other launchers start a
        # job, run the job.
        if cfg.trainer.devices != 1 and "--experimental-rerun" not in sys.argv:
            got = f"1 with hydra/launcher=basic, got {cfg.trainer.devices}; leave the launcher out"
            write_failure(folder, f"trainer.devices must be {got}")
            raise UserError(f"trainer.devices must be {got}")
        return train_in(folder, cfg)
    return cli_entrypoint(train_in)(folder, cfg, resume_command=resume_command(folder))


def resume_command(folder: Path) -> str:
    """Return the command that resumes this run."""
    arguments = [
        argument
        for argument in sys.argv[1:]
        if not argument.startswith(("resume=", "hydra.run.dir="))
    ]
    return command(
        "train", *arguments, f"hydra.run.dir={quote_path(short_path(folder))}", "resume=auto"
    )


@cli_entrypoint
@remove_unused_folders()
def start() -> None:
    """Run Hydra with rank 0's command line; nobody has to read the output of a training."""
    replace_dead_output(ends_script=False)
    join_ranks()
    with shared_errors():
        arguments = complete_overrides(sys.argv[1:])
    sys.argv[1:] = gather_objects(arguments)[0]
    setup_globals()  # Hydra's resolvers, which a rerun lacks
    path = search_path(sys.argv[1:])
    hydra.main(version_base="1.3", config_path=path, config_name="train")(main)()


if __name__ == "__main__":
    start()
