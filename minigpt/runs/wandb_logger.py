"""Weights & Biases: online with a key and a reachable server, else offline, and never a reason to stop a run."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from minigpt.utils.cli import explain
from minigpt.utils.errors import UserError
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.terminal import sanitize_line, warn


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
        """Show a text as it is. Tables and artifacts make the client wait for the server when they start."""
        import wandb

        self.log_metrics({name: wandb.Html(f"<pre>{escape(text)}</pre>", data_is_not_path=True)})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the summary and end the run."""
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
                reason = explain(error)[0].removeprefix("error: ")
                warn(f"Weights & Biases is lost ({reason}); metrics.csv holds all metrics")
            self.lost = True


def wandb_logger(
    *,
    folder: str | Path,
    project: str,
    entity: str | None,
    name: str | None,
    group: str | None,
    tags: list[str],
    timeout: float,
) -> Logger | None:
    """Start or resume the W&B run of a run folder; None on all ranks but 0.

    Args:
        timeout: seconds that training waits for the server at most.
        folder, project, entity, name, group, tags: of `wandb.init`; a folder that holds a W&B run resumes it.

    Raises:
        UserError: W&B cannot start, not even offline.
    """
    if not is_rank_zero():
        return None
    # wandb's error reports wait for an unresponsive server, for 20 s at exit.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    settings = wandb.Settings(
        init_timeout=timeout * 0.5,
        login_timeout=timeout * 0.5,
        finish_timeout=timeout,
        silent=True,
        console="off",
    )
    previous = sorted(Path(folder, "wandb").glob("*run-*-*"), key=lambda path: path.name.rpartition("run-")[2])
    options: dict[str, Any] = {
        "id": previous[-1].name.rpartition("-")[2] if previous else None,
        "resume": "allow",
        "dir": str(folder),
        "project": project,
        "entity": entity,
        "name": name or Path(folder).name,
        "group": group,
        "tags": tags,
    }
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if _is_reachable(timeout * 0.3) else "offline")
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


def finish(logger: Logger, summary: Mapping[str, Any]) -> None:
    """Send the summary to W&B and end its run: the next job of a sweep must not reuse it."""
    if isinstance(logger, Wandb):
        logger.finish(summary)


def _is_reachable(timeout: float) -> bool:
    """Whether there is a key for W&B's server, and the server answers."""
    import requests
    import wandb

    server = wandb.setup().settings.base_url
    if not (os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(server)):
        return False
    try:
        return requests.head(server, timeout=timeout).status_code < 500
    except requests.RequestException:
        return False
