"""Sweep without training: a fake launcher that writes the files of runs."""

import hashlib
import math
from pathlib import Path

from minigpt.runs.run_dir import write_summary
from minigpt.sweeps.results import BITS, LOSS_NAMES, NATS


class Engine:
    """Record every job, and write its validation curve: `loss(settings, step)`; NaN is a failure.

    Args:
        jobs: that end; the next is killed: before it writes a file, before its last validation, or
            before its summary.

    Attributes:
        batches: overrides of the jobs of each launch.
        launches: of each launch, the step at which each job was to end, by its folder.
        ran: settings of the points of all jobs.
    """

    def __init__(self, loss=lambda *_: 1.0, jobs=999):
        self.loss = loss
        self.jobs = jobs
        self.damage = jobs % 3
        self.batches = []
        self.launches = []
        self.ran = []

    def launch(self, job_overrides, initial_job_idx):
        self.batches.append(job_overrides)
        self.launches.append({})
        self.ran += [point.settings for point in self.points]
        for point, overrides in zip(self.points, job_overrides, strict=True):
            settings = dict(override.partition("=")[::2] for override in overrides)
            last = int(float(settings.get("max_steps", 1)))
            end = int(settings.get("pause_at", last))
            self.launches[-1][point.folder.name] = end
            self._run(point.folder, settings, end, last)
            self.on_end(point, "")

    def _run(self, folder, settings, end, last):
        self.jobs -= 1
        killed = self.jobs < 0
        if killed and self.damage == 0:
            raise KeyboardInterrupt
        # The validation curve
        every = int(settings.get("eval_every", 1))
        steps = range(every, end + (self.damage == 2 or not killed), every)
        losses = {step: self.loss(settings, step) for step in steps}
        losses = {step: loss for step, loss in losses.items() if not math.isnan(loss)}
        nats = math.log(2) * (2 if settings.get("tokenizer") == "char" else 1)  # per bit per byte
        lines = [f"{step},{loss},{loss / nats}\n" for step, loss in losses.items()]
        text = "".join(["step,val_loss,val_bits_per_byte\n", *lines])
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)
        (folder / "metrics.csv").write_text(text, encoding="utf-8")
        (folder / "summary.json").unlink(missing_ok=True)
        if killed:
            raise KeyboardInterrupt
        # The summary
        status = "paused" if end < last else "completed"
        best = min(losses.values(), default=math.inf)
        summary = {
            "status": "failed" if len(losses) < len(steps) else status,
            "corpus_sha256": hashlib.sha256(Path(settings["data.path"]).read_bytes()).hexdigest(),
            "steps": max(losses, default=0),
            LOSS_NAMES[NATS]: best,
            LOSS_NAMES[BITS]: best / nats,
        }
        write_summary(folder, summary)
