"""Keep the time of `minutes=`: plan the rest of a training again when its steps take another time.

The learning rate follows the progress of the training. A change of the number of steps keeps the
progress that is reached, and spreads the rest over the steps that are left. The changes are
recorded in `plan.json`: a run that resumes repeats them, and equals the uninterrupted one.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from minigpt.checkpoints.format import Saved
from minigpt.extras.planner.planned_run import RUN_PLAN
from minigpt.extras.planner.timed_recipe import steps_within
from minigpt.runs.callbacks.metrics import MetricsCallback
from minigpt.runs.callbacks.resume_state import resumes_own_run
from minigpt.runs.lightning_workarounds import is_optimizer_step
from minigpt.training.language_model import LanguageModel
from minigpt.utils.files import read_json, write_json

MEASURED = 0.03  # share of the training over which its steps are measured
TOLERANCE = 0.03  # share of the training by which it may end early or late without a change
SETTLING_STEPS = 3  # first ones, which allocate memory and compile, and are not measured

# [step, step of the first plan with the same progress, number of steps from then on], in order
Changes = Sequence[Sequence[float]]


class Pace(L.Callback):
    """End a training in time: with fewer steps if they have become slower, with more if faster.

    Args:
        planned_steps: of the run, before any change.
        most_steps: of the run, after which it overfits, or which are given; None: no limit.
        validation: the time of a validation, in steps.
        seconds: of the training, at most.
        until: seconds from the start of the run to the end of the training, at most.
        changes: of the run that resumes.
    """

    def __init__(
        self,
        *,
        planned_steps: int,
        most_steps: int | None,
        validation: float,
        seconds: float,
        until: float,
        changes: Changes = (),
    ) -> None:
        self.planned_steps = planned_steps
        self.most_steps = most_steps or 1 << 40  # more than there will be
        self.validation = validation
        self.seconds = seconds
        self.until = until
        self.changes = [list(change) for change in changes]
        self._left: float | None = None  # seconds of the training, of a checkpoint

    def state_dict(self) -> dict[str, object]:
        return {"left": self._end - time.perf_counter(), "changes": self.changes}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: object, checkpoint: Saved) -> None:
        state = checkpoint["callbacks"].get(self.state_key)
        if state and resumes_own_run(trainer):
            self._left = state["left"]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # The plan whose number of steps changes
        self._file = Path(trainer.default_root_dir, RUN_PLAN)
        self._plan = read_json(self._file)
        # The schedule of the first plan; more batches than it has; validations at the same steps,
        # also if the run resumes with fewer steps than `eval_every`
        pl_module.schedule = partial(pl_module.schedule, max_steps=self.planned_steps)
        pl_module.planned_step = partial(planned_step, self.planned_steps, self.changes)
        trainer.datamodule.max_steps = self.most_steps
        self._eval_every = min(trainer.datamodule.run.eval_every, self.planned_steps)
        trainer.val_check_interval = self._eval_every * trainer.accumulate_grad_batches

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (self._metrics,) = (
            callback for callback in trainer.callbacks if isinstance(callback, MetricsCallback)
        )
        now = time.perf_counter()
        if self._left is None:
            # What came before the training has taken its time, but not that of another run
            begun = now if trainer.global_step else self._metrics.started
            self._left = min(self.seconds, self.until - (now - begun))
        self._end = now + self._left
        # No changes before those that are recorded
        self._proposed = pl_module.max_steps
        self._settled = max(
            trainer.global_step + SETTLING_STEPS, *(change[0] for change in self.changes), 0
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: object, batch: object, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not is_optimizer_step(trainer, batch_idx) or step == pl_module.max_steps:
            return
        # Measure steps, without the validations between them.
        self._metrics.update_seconds()
        trained = self._metrics.seconds
        if step <= self._settled:
            self._measured_from = step, trained
            return
        before, seconds = self._measured_from
        if trained - seconds < MEASURED * self.seconds:
            return
        self._measured_from = step, trained
        # How many are left; the time is in steps.
        each = (trained - seconds) / (step - before)
        left = (self._end - time.perf_counter()) / each
        more = steps_within(
            left, 1, self.validation, self._eval_every, done=step % self._eval_every
        )
        proposed = min(self.most_steps, step + max(1, more))
        # Change it to what the last two measurements agree on.
        steps = sorted((self._proposed, proposed, pl_module.max_steps))[1]
        self._proposed = proposed
        if abs(steps - pl_module.max_steps) * each > TOLERANCE * self.seconds:
            self._change(trainer, pl_module, step, steps, each)

    def _change(
        self, trainer: Any, module: LanguageModel, step: int, steps: int, each: float
    ) -> None:
        line = (
            f"plan        steps of {1000 * each:.1f} ms: {steps:,} instead of "
            f"{module.max_steps:,} from step {step:,} on"
        )
        # Write it first: a run that is killed now has this plan when it resumes.
        reached = planned_step(self.planned_steps, self.changes, step)
        self.changes.append([step, reached, steps])
        self._plan["settings"]["max_steps"] = steps
        self._plan["pace"]["changes"] = self.changes
        self._plan["lines"].append(line)
        write_json(self._file, self._plan)
        # The schedule has the changes; these have the number.
        module.max_steps = steps
        trainer.fit_loop.epoch_loop.max_steps = steps
        if self._metrics.progress:
            self._metrics.progress.bar.total = steps
            self._metrics.progress.print(line)


def planned_step(planned_steps: int, changes: Changes, step: int) -> float:
    """Return the step of the first plan that has the progress of a step of the run.

    It is linear between changes, continuous, and `planned_steps` at the end of the run.
    """
    earlier = [change for change in changes if change[0] < step]
    begin, reached, end = earlier[-1] if earlier else (0, 0, planned_steps)
    return reached + (step - begin) * ((planned_steps - reached) / (end - begin))
