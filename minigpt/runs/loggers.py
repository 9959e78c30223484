"""Where measurements go: a CSV file, the terminal, Weights & Biases. All are Lightning loggers."""

import csv
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger, WandbLogger
from tqdm import tqdm

from minigpt.runs.run_dir import append_log
from minigpt.utils.cli import explain
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write, sync
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.terminal import sanitize_line, warn

COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "train_loss",
    "loss_spike",
    "val_loss",
    "val_bits_per_byte",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "flops_per_second",
    "mfu",
)


class _PlainLogger(Logger):
    """A Lightning logger of the run folder, without a name and a version of its own.

    Callbacks of Lightning write to save_dir/name/version: that is the run folder.
    """

    name = version = ""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    @property
    def save_dir(self) -> str:
        return str(self.file.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class MetricsCSV(_PlainLogger):
    """Appends a row to `metrics.csv` for every measurement, flushed, so that a killed run keeps its curve.

    What callbacks log beside `COLUMNS` gets a column when it first appears.
    """

    columns: Sequence[str] = ()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.columns or not self.file.exists() or not metrics.keys() <= set(self.columns):
            self._add_columns(metrics)
        with open(self.file, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns).writerow({"step": step, **metrics})

    def _add_columns(self, names: Iterable[str]) -> None:
        rows: list[dict[str, str]] = []
        known: Sequence[str] = COLUMNS
        if self.file.exists():
            with open(self.file, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows, known = list(reader), reader.fieldnames or COLUMNS
        self.columns = list(dict.fromkeys([*known, *names]))
        with atomic_write(self.file) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)

    @rank_zero_only
    def save(self) -> None:
        """Called before a checkpoint, which is not to outlast the curve that led there."""
        sync(self.file)


class Progress(_PlainLogger):
    """A progress bar on stderr in a terminal; elsewhere, and in the log file, one line per validation."""

    def __init__(self, max_steps: int, file: Path) -> None:
        super().__init__(file)
        self.max_steps, self.terminal = max_steps, sys.stderr.isatty()
        self.shown: dict[str, str] = {}
        self.bar: tqdm[Any] | None = None
        self.drawn = 0.0  # seconds, when the bar was last drawn during validation

    def _open_bar(self) -> "tqdm[Any]":
        if self.bar is None:
            self.bar = tqdm(
                total=self.max_steps,
                disable=not self.terminal,
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} steps {bar} {desc} {remaining} left",
            )
        return self.bar

    def _line(self) -> str:
        return ", ".join(self.shown[key] for key in ("loss", "val", "speed", "validating") if key in self.shown)

    @rank_zero_only
    def validating(self, batch: int, batches: int) -> None:
        """Show how far a validation is, at most ten times per second."""
        if not self.terminal or time.monotonic() - self.drawn < 0.1:
            return
        self.drawn = time.monotonic()
        self.shown["validating"] = f"validating {batch}/{batches}"
        self._open_bar().set_description_str(self._line())

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step, bar = step or 0, self._open_bar()
        self.shown.pop("validating", None)
        if "train_loss" in metrics:
            self.shown["loss"] = f"loss {metrics['train_loss']:.3f}"
            self.shown["speed"] = f"{metrics['tokens_per_second']:,.0f} tokens/s"
        if "val_loss" in metrics:
            self.shown["val"] = f"val {metrics['val_loss']:.4f}"
        if "val_loss" in metrics:
            append_log(self.file.parent, f"step {step}/{self.max_steps}  {self._line()}", show=not self.terminal)
        bar.set_description_str(self._line(), refresh=False)
        bar.update(step - bar.n)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class Wandb(WandbLogger):
    """Weights & Biases, whose client is a process of its own: if that dies, the run goes on without it."""

    lost = False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        with self.going_on():
            super().log_metrics(metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        with self.going_on():
            super().log_hyperparams(*args, **kwargs)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand over the summary and end."""
        import wandb

        with self.going_on():
            self.experiment.summary.update(dict(summary))
            self.experiment.finish()
        if self.lost:  # or wandb would try to reach its client when the process ends
            with suppress(Exception):
                wandb.teardown()

    def log_html(self, name: str, text: str) -> None:
        """Show a text as it is. Neither tables nor artifacts will do: to begin one, the client asks its server."""
        import wandb

        self.log_metrics({name: wandb.Html(f"<pre>{escape(text)}</pre>", data_is_not_path=True)})

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Say once that the client is lost, if it is."""
        try:
            yield
        except Exception as error:  # of what kind depends on how the client ended
            if not self.lost:
                reason = explain(error)[0].removeprefix("error: ")
                warn(f"Weights & Biases is lost ({reason}); metrics.csv has what it misses")
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
    """A Weights & Biases run: online when a key is there and the server answers, otherwise offline.

    Whatever the server does, training waits for it no longer than `timeout` seconds. A folder that has a run already
    goes on with it: steps that are taken again come out the same, and lie on the curves that are there.
    None on all ranks but the first.
    """
    if not is_rank_zero():
        return None
    # wandb's reports about itself wait for a server that hangs, for 20 s when the process ends.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    settings: dict[str, Any] = {
        "init_timeout": timeout * 0.5,
        "login_timeout": timeout * 0.5,
        "finish_timeout": timeout,
        "silent": True,
        "console": "off",
    }
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if _reachable(timeout * 0.3) else "offline")
    before = sorted(Path(folder, "wandb").glob("*run-*-*"), key=lambda path: path.name.rpartition("run-")[2])
    options: dict[str, Any] = {
        "id": before[-1].name.rpartition("-")[2] if before else None,
        "resume": "allow",
        "dir": str(folder),
        "project": project,
        "entity": entity,
        "name": name or Path(folder).name,
        "group": group,
        "tags": tags,
    }
    try:
        run = wandb.init(mode=mode, settings=wandb.Settings(**settings), **options)
    except (wandb.errors.CommError, wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        if mode == "offline":
            raise UserError(f"Weights & Biases cannot start: {error}") from error
        mode = "offline"
        run = wandb.init(mode=mode, settings=wandb.Settings(**settings), **options)
    if mode == "offline":
        said = f"Weights & Biases is offline; send the run later with: wandb sync {Path(run.dir).parent}"
        print(sanitize_line(said), file=sys.stderr)
    run.define_metric("*", step_metric="trainer/global_step")
    return Wandb(experiment=run)


def finish(logger: Logger, summary: Mapping[str, Any]) -> None:
    """Hand a logger the summary, and end its run: the next job of a sweep must not reuse it."""
    if isinstance(logger, Wandb):
        logger.finish(summary)


def _reachable(timeout: float) -> bool:
    """Whether there is a key for the server of Weights & Biases, and the server answers."""
    import requests
    import wandb

    server = wandb.setup().settings.base_url
    if not (os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(server)):
        return False
    try:
        return requests.head(server, timeout=timeout).status_code < 500
    except requests.RequestException:
        return False
