"""Weights & Biases: online with a key and a server that answers, else offline, and never a reason to stop a run."""

import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import WandbLogger

from minigpt.runs.run_dir import PLAN
from minigpt.utils.checks import one_of, or_null
from minigpt.utils.cli import error_text
from minigpt.utils.errors import UserError, require
from minigpt.utils.terminal import is_rank_zero, sanitize_line, warn

_PART = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")  # the folder of one process: its start, the id of its run
# Arguments of wandb.init that are set here, or that would make a run other than that of the folder.
_NOT_OPTIONS = {"dir", "settings", "anonymous", "resume_from", "fork_from", "force", "reinit"}


class Wandb(WandbLogger):
    """Lightning's logger, which continues the run without W&B when W&B's client process dies."""

    lost = False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        with self.ignore_lost_client():
            super().log_metrics(metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        with self.ignore_lost_client():
            super().log_hyperparams(*args, **kwargs)

    def log_html(self, name: str, text: str) -> None:
        """Log a text as HTML, because tables and artifacts make the client wait for the server."""
        import wandb

        self.log_metrics({name: wandb.Html(f"<pre>{escape(text)}</pre>", data_is_not_path=True)})

    def finish(self, summary: Mapping[str, Any], exit_code: int = 0) -> None:
        """Send the summary and end the run, which the next job of a sweep would reuse otherwise.

        W&B shows a run as finished or failed by the exit code, and as preempted if it will be requeued.
        """
        import wandb

        with self.ignore_lost_client():
            self.experiment.summary.update(dict(summary))
            if exit_code == os.EX_TEMPFAIL:
                self.experiment.mark_preempting()
            self.experiment.finish(exit_code)
        if self.lost:  # else wandb would connect to its client at exit
            with suppress(Exception):
                wandb.teardown()

    @contextmanager
    def ignore_lost_client(self) -> Iterator[None]:
        """Turn any error into one warning per run."""
        try:
            yield
        except Exception as error:  # its type depends on how the client ended
            if not self.lost:
                warn(f"Weights & Biases is lost ({error_text(error)}); metrics.csv holds all metrics")
            self.lost = True


def wandb_logger(folder: str | Path, *, name: str | None, timeout: float, **options: Any) -> Wandb | None:
    """Start or resume the W&B run of a run folder; None on all ranks but 0.

    Args:
        name: of the run; None is the name of the folder.
        timeout: seconds that training waits for the server at most.
        options: of `wandb.init`. Without `id`, it is that of the run which the folder holds.

    Raises:
        UserError: an option is unknown, or W&B cannot start, not even offline.
    """
    if not is_rank_zero():
        return None
    # wandb's error reports wait for an unresponsive server, for 20 s at exit.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import requests
    import wandb

    folder, known = Path(folder), inspect.signature(wandb.init).parameters.keys() - _NOT_OPTIONS
    for option in options.keys() - known:
        advice = "its files are in hydra.run.dir, and checkpoints are not uploaded"
        raise UserError(f"logger.wandb.{option} is not an option; it takes {', '.join(sorted(known))}; {advice}")
    share = 0.3 * timeout  # of login and start each; the rest is for wandb's own process
    settings = wandb.Settings(init_timeout=share, login_timeout=share, finish_timeout=timeout, console="off")
    parts = sorted(part.groups() for file in folder.glob("wandb/*") if (part := _PART.fullmatch(file.name)))
    where = os.path.abspath(folder)  # wandb's own process can have another working directory
    options = {"resume": "allow", "dir": where, "name": name or folder.name} | options
    options["id"] = str(options.get("id") or (parts[-1][1] if parts else "")) or None
    mode: Any = options.pop("mode", None) or os.environ.get("WANDB_MODE") or None
    require("logger.wandb.mode or WANDB_MODE", mode, *or_null(one_of(("online", "offline", "disabled", "shared"))))
    if not mode:
        has_key = os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(wandb.setup().settings.base_url)
        mode = "online" if has_key else "offline"
    try:
        try:
            run = wandb.init(mode=mode, settings=settings, **options)
        except wandb.errors.Error:  # no server, or a wrong key
            if mode == "offline":
                raise
            wandb.teardown()  # its client would still use the id
            mode = "offline"
            run = wandb.init(mode=mode, settings=settings, **options)
    except (wandb.errors.Error, ValueError) as error:
        raise UserError(f"Weights & Biases cannot start: {' '.join(str(error).split())}") from error
    if mode == "offline":
        print(sanitize_line(f"Weights & Biases is offline; upload later with: {sync_command(folder)}"), file=sys.stderr)
    run.define_metric("*", step_metric="trainer/global_step")
    return Wandb(experiment=run)


def sync_command(folder: Path) -> str:
    """Return the command that uploads all offline parts of a run, or of the runs of a sweep, in their order."""
    start = shlex.quote(str(folder))
    jobs = f" {start}/*/wandb" if (folder / PLAN).exists() else ""
    return f"wandb sync {start}/wandb{jobs}"


def wandb_loggers(trainer: L.Trainer) -> list[Wandb]:
    """Return the W&B loggers of a Trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, Wandb)]
