"""A callback that holds a run of a sweep until it gets a signal; worker processes import it."""

import os
import time
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from minigpt.runs.callbacks.shutdown import GracefulShutdown
from minigpt.utils.files import atomic_write


class Hold(Callback):
    """Hold a run from step 12 on, and write its process into `held`.

    The file `hold` beside the sweep names it.
    """

    def on_train_batch_end(self, trainer, *_):
        run = Path(trainer.default_root_dir)
        hold = run.parents[1] / "hold"
        held = run.parents[1] / "held"
        if (
            trainer.global_step >= 12
            and hold.exists()
            and hold.read_text(encoding="utf-8") == run.name
        ):
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            (shutdown,) = (each for each in callbacks if isinstance(each, GracefulShutdown))
            with atomic_write(held) as partial:
                partial.write_text(str(os.getpid()), encoding="utf-8")
            while shutdown.received is None:
                time.sleep(0.05)
