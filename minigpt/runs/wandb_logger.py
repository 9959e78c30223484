"""Weights & Biases: online with a key and a server that answers, else offline, and never a reason to stop a run."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import WandbLogger

from minigpt.utils.cli import error_text
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import is_rank_zero, sanitize_line, warn


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

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the summary and end the run, which the next job of a sweep would reuse otherwise."""
        import wandb

        with self.ignore_lost_client():
            self.experiment.summary.update(dict(summary))
            self.experiment.finish()
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
        options: of `wandb.init`.

    Raises:
        UserError: W&B cannot start, not even offline.
    """
    if not is_rank_zero():
        return None
    # wandb's error reports wait for an unresponsive server, for 20 s at exit.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import requests
    import wandb

    share = 0.3 * timeout  # of login and start each; the rest is for wandb's own process
    settings = wandb.Settings(init_timeout=share, login_timeout=share, finish_timeout=timeout, console="off")
    previous = sorted(Path(folder, "wandb").glob("*run-*-*"), key=lambda path: path.name.rpartition("run-")[2])
    run_id = previous[-1].name.rpartition("-")[2] if previous else None
    options |= {"id": run_id, "resume": "allow", "dir": str(folder), "name": name or Path(folder).name}
    has_key = os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(wandb.setup().settings.base_url)
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
    try:
        run = wandb.init(mode=mode, settings=settings, **options)
    except (wandb.errors.CommError, wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        if mode == "offline":
            raise UserError(f"Weights & Biases cannot start: {error}") from error
        mode = "offline"
        run = wandb.init(mode=mode, settings=settings, **options)
    if mode == "offline":
        command = f"wandb sync {Path(run.dir).parent}"
        print(sanitize_line(f"Weights & Biases is offline; send the run later with: {command}"), file=sys.stderr)
    run.define_metric("*", step_metric="trainer/global_step")
    return Wandb(experiment=run)


def wandb_loggers(trainer: L.Trainer) -> list[Wandb]:
    """Return the W&B loggers of a Trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, Wandb)]
