"""Weights & Biases: online with a key and a server that answers, else offline.

It is never a reason to stop a run.
"""

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from secrets import token_hex
from typing import Any

import requests
import wandb
from lightning.pytorch.loggers import WandbLogger

from minigpt.runs.run_dir import PLAN, short_path
from minigpt.utils.checks import one_of, or_null
from minigpt.utils.cli import error_text
from minigpt.utils.errors import UserError, require
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.scripts import shell_quote
from minigpt.utils.signals import REQUEUE_EXIT_CODE
from minigpt.utils.terminal import log, warn

_FOLDER = "wandb/folder.txt"  # the path of the run folder, to which the id of the run belongs
_PARTS = "wandb/*run-*/run-*.wandb"  # of a run, one per job


class Wandb(WandbLogger):
    """Lightning's logger, which continues the run without W&B when W&B's client process dies."""

    lost = False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        with self._ignore_lost_client():
            super().log_metrics(metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        with self._ignore_lost_client():
            super().log_hyperparams(*args, **kwargs)

    def log_html(self, name: str, text: str) -> None:
        # Tables and artifacts would make the client wait for the server.
        self.log_metrics({name: wandb.Html(f"<pre>{escape(text)}</pre>", data_is_not_path=True)})

    def finish(self, summary: Mapping[str, object], exit_code: int = 0) -> None:
        # Send the summary and end the run, which the next job of a sweep would reuse otherwise. W&B
        # shows it as finished or failed by the exit code, and as preempted if it will be requeued.
        with self._ignore_lost_client():
            self.experiment.summary.update(dict(summary))
            if exit_code == REQUEUE_EXIT_CODE:
                self.experiment.mark_preempting()
            self.experiment.finish(exit_code)
        # Else wandb would connect to its client at exit. A run of the user would end, too.
        with suppress(Exception):
            ours = {None, self.experiment}
            if self.lost and {wandb.run, wandb.setup().most_recent_active_run} <= ours:
                wandb.teardown()

    @contextmanager
    def _ignore_lost_client(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # its type depends on how the client ended
            if not self.lost:
                warn(
                    f"Weights & Biases is lost ({error_text(error)}); metrics.csv holds all metrics"
                )
            self.lost = True


def wandb_logger(folder: str | Path, *, timeout: float, **options: Any) -> Wandb | None:
    """Start or resume the W&B run of a run folder; None on all ranks but 0, and if W&B is disabled.

    Args:
        timeout: seconds that training waits for the server at most.
        options: of `wandb.init`. Those that are None are as W&B's variables and settings files say,
            if they do.

    Raises:
        UserError: an option is unknown, or W&B cannot start, not even offline.
    """
    if not is_rank_zero():
        return None
    # W&B would take an empty variable for a value.
    for name, value in dict(os.environ).items():
        if name.startswith("WANDB_") and not value:
            del os.environ[name]
    # Check the options: those of wandb.init, without what is set here, or would make a run other
    # than that of the folder.
    known = inspect.signature(wandb.init).parameters.keys() - {
        "dir",
        "settings",
        "anonymous",
        "resume_from",
        "fork_from",
        "force",
        "reinit",
    }
    for option in options.keys() - known:
        raise UserError(
            f"logger.wandb.{option} is not an option; it takes {', '.join(sorted(known))}; "
            "its files are in hydra.run.dir, and checkpoints are not uploaded"
        )
    require(
        "logger.wandb.mode or WANDB_MODE",
        options.get("mode") or os.environ.get("WANDB_MODE") or None,
        *or_null(one_of(("online", "offline", "disabled", "shared"))),
    )
    # W&B's error reports wait for an unresponsive server, for 20 s at exit. A client may run.
    if "WANDB_SERVICE" not in os.environ:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    # Start the run.
    folder = Path(os.path.abspath(folder))  # wandb's own process can have another working directory
    try:
        active = wandb.run or wandb.setup().most_recent_active_run  # of the user, in this process
        settings = _settings(folder, timeout, active, options)
        if settings.mode == "disabled":  # wandb would end the global run of the user
            return None
        wandb_run = _start(settings, active, options)
    except Exception as error:  # of wandb, of pydantic, of wandb's own process
        raise UserError(f"Weights & Biases cannot start: {' '.join(str(error).split())}") from error
    with suppress(OSError):  # wandb writes elsewhere if it cannot write here
        (folder / _FOLDER).write_bytes(os.fsencode(folder.resolve()))
    if wandb_run.offline:
        log(f"Weights & Biases is offline; upload later with: {sync_command(short_path(folder))}")
    wandb_run.define_metric("*", step_metric="trainer/global_step")
    return Wandb(experiment=wandb_run)


def _settings(
    folder: Path, timeout: float, active: wandb.Run | None, options: dict[str, Any]
) -> wandb.Settings:
    # Minigpt's defaults, replaced by W&B's files, its variables, and `options`, of which those that
    # are settings are taken out. `active` is a run of the user that continues, if any.
    session = wandb.setup().settings  # of files, and of variables as they were when W&B started
    has_key = (
        os.environ.get("WANDB_API_KEY")
        or session.api_key
        or session.identity_token_file
        or requests.utils.get_netrc_auth(session.base_url)
    )
    sweep = next((each for each in (folder, folder.parent) if (each / PLAN).exists()), None)
    settings = wandb.Settings(
        mode="online" if has_key and not (active and active.offline) else "offline",
        project="minigpt",
        run_name=folder.name,
        run_group=sweep.name if sweep else None,
        run_id=_own_id(folder) or token_hex(4),
        resume="allow",
        console="off",
        silent=True,
    )
    settings.update_from_settings(session)
    # The key would replace that of a login of the user.
    settings.update_from_env_vars(
        {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    )
    # The id can be that of the active run: the id of WANDB_RUN_ID.
    run_id = token_hex(4) if active and active.id == settings.run_id else settings.run_id
    settings.update_from_dict(  # without those that are None
        {
            "mode": options.pop("mode", None),
            "run_id": str(options.pop("id", None) or run_id),
            "run_tags": options.pop("tags", None),
            "init_timeout": 0.3 * timeout,
            "login_timeout": 0.3 * timeout,  # the rest is for wandb's own process
            "finish_timeout": timeout,
            "root_dir": str(folder),
            "use_dot_wandb": False,
            "reinit": "create_new" if active else "default",
        }
    )
    if sweep:
        kinds = ("sweep", "summary") if sweep == folder else ("sweep",)
        settings.run_tags = (*(settings.run_tags or ()), *kinds)
    return settings


def _own_id(folder: Path) -> str | None:
    # None if the folder has no W&B run, or is a copy of another. One that was moved keeps its id,
    # on another host too. The parts of the run in a copy are marked as uploaded, because they
    # belong to the original. They are in the order of their start.
    parts = sorted(
        folder.glob(_PARTS),
        key=lambda part: part.parent.name.removeprefix("offline-"),
    )
    run_id = parts[-1].stem.removeprefix("run-") if parts else None
    record = folder / _FOLDER
    original = Path(os.fsdecode(record.read_bytes())) if record.exists() else folder
    is_other = os.path.isdir(original) and not original.samefile(folder)
    if is_other and f"run-{run_id}.wandb" in (part.name for part in original.glob(_PARTS)):
        for part in parts:
            part.with_suffix(".wandb.synced").touch()
        return None
    return run_id


def _start(settings: wandb.Settings, active: object, options: Mapping[str, Any]) -> wandb.Run:
    # Silent, but only here; the variable would silence runs of the user.
    wandb.termsetup(settings, None)
    try:
        return wandb.init(settings=settings, **options)
    except wandb.errors.Error:  # no server answers, or the key is wrong
        if settings.mode == "offline":
            raise
        settings.mode = "offline"
        if active:  # its client still uses the id
            settings.run_id = token_hex(4)
        else:
            wandb.teardown()
            os.environ.pop("WANDB_SERVICE", None)
        return wandb.init(settings=settings, **options)
    finally:
        wandb.termsetup(wandb.setup().settings, None)


def sync_command(folder: Path) -> str:
    """Return the command that uploads the offline parts of a run, or of a sweep, in their order."""
    start = shell_quote(str(folder))
    jobs = f" {start}/*/wandb" if (folder / PLAN).exists() else ""
    return f"wandb sync {start}/wandb{jobs}"
