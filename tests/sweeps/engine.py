"""Sweep without training: a fake launcher, and a sweeper that uses it."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from small_runs import CONFIGS

from minigpt.runs.run_dir import write_summary
from minigpt.sweeps.results import (
    BITS,
    LOSS_NAMES,
    NATS,
)


class Engine:
    """Record every job, and write its validation curve: `loss(settings, step)`; NaN is a failure.

    Args:
        jobs: that end; the next is killed: before it writes a file, before its last validation, or
            before its summary.
    """

    def __init__(self, loss=lambda *_: 1.0, jobs=999):
        self.loss, self.jobs, self.damage = loss, jobs, jobs % 3
        self.batches: list[Sequence[Sequence[str]]] = []
        self.launches: list[
            dict[str, int]
        ] = []  # of each launch, the step at which each job was to end

    def launch(self, job_overrides, initial_job_idx):
        self.batches.append(job_overrides)
        self.launches.append({})
        for point, overrides in zip(self.points, job_overrides, strict=True):
            settings = dict(override.partition("=")[::2] for override in overrides)
            every, last = (int(float(settings.get(key, 1))) for key in ("eval_every", "max_steps"))
            self.launches[-1][point.folder.name] = end = int(settings.get("pause_at", last))
            self.jobs -= 1
            if (killed := self.jobs < 0) and self.damage == 0:
                raise KeyboardInterrupt
            steps = list(range(every, end + (self.damage == 2 or not killed), every))
            losses = {
                step: loss for step in steps if not math.isnan(loss := self.loss(settings, step))
            }
            # Per bit per byte
            nats = math.log(2) * (2 if settings.get("tokenizer") == "char" else 1)
            lines = [f"{step},{loss},{loss / nats}\n" for step, loss in losses.items()]
            (point.folder / ".hydra").mkdir(parents=True, exist_ok=True)
            (point.folder / "metrics.csv").write_text(
                "".join(["step,val_loss,val_bits_per_byte\n", *lines]), encoding="utf-8"
            )
            (point.folder / "summary.json").unlink(missing_ok=True)
            if killed:
                raise KeyboardInterrupt
            best = min(losses.values(), default=math.inf)
            status = (
                "failed" if len(losses) < len(steps) else "paused" if end < last else "completed"
            )
            totals = {
                "steps": max(losses, default=0),
                LOSS_NAMES[NATS]: best,
                LOSS_NAMES[BITS]: best / nats,
            }
            text = hashlib.sha256(Path(settings["data.path"]).read_bytes()).hexdigest()
            write_summary(point.folder, {"status": status, "corpus_sha256": text, **totals})
            self.on_end(point, "")

    @property
    def by_folder(self):
        """The configurations of the jobs as they compose them."""
        composed = {}
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            for overrides in itertools.chain(*self.batches):
                config = compose(
                    "train",
                    [*self.config.hydra.overrides.hydra, *overrides],
                    return_hydra_config=True,
                )
                folder = Path(config.hydra.run.dir)
                assert (folder / "summary.json").exists()
                # Of Hydra's own launcher
                assert folder == Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
                with open_dict(config):
                    del config["hydra"]
                composed[folder.name] = config
        return composed

    @property
    def configs(self):
        return [*self.by_folder.values()]
