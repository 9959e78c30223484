"""DiLoCo compared with DDP: the loss after the same tokens, and the time and bytes of a step on a slow link (root)."""

import argparse
import sys
from pathlib import Path
from typing import Any

from common import metrics
from forecast import run, seconds_per_step, train_on_hosts, training, transmitted, two_hosts

WORKERS, BATCH = (2, 4), 12  # sequences per worker and step
MBIT, DELAY = 10, 0.05  # Mbit/s; seconds in each direction
LINK_STEPS = {"ddp": 10, "diloco": 100}
DILOCO = ["trainer=diloco", "trainer.strategy.compress=true"]


def diloco(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure model=nano on tiny shakespeare; the loss of DDP is that of one device with the batches of all workers."""
    rows = []
    for seed in range(1337, 1337 + args.rounds):
        settings, row = [f"seed={seed}", "eval_batches=null", "model.dropout=0", "trainer.precision=auto"], {}
        for n in WORKERS:
            one, out = folder / f"one{n}_{seed}", folder / f"diloco{n}_{seed}"
            run([sys.executable, *training(one, args.steps, n * BATCH), "trainer=cpu", *settings])
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
            run([sys.executable, *torchrun, *training(out, args.steps, n * BATCH), *DILOCO, *settings])
            row |= {f"{n} workers, ddp: loss": last_loss(one), f"{n} workers, diloco: loss": last_loss(out)}
            row[f"{n} workers: ratio of the losses"] = last_loss(out) / last_loss(one)
        link = f"{MBIT} Mbit/s and {1e3 * DELAY:g} ms"
        with two_hosts(DELAY) as hosts:
            for strategy, steps in LINK_STEPS.items():
                out = folder / f"{strategy}{seed}"
                before = transmitted("forecast-0", "forecast-0")
                chosen = DILOCO if strategy == "diloco" else ["trainer=ddp"]
                train_on_hosts(hosts, MBIT, [*training(out, steps), *chosen])
                sent = transmitted("forecast-0", "forecast-0") - before
                row[f"{strategy}, {link}: s per step"] = seconds_per_step(out)
                row[f"{strategy}, {link}: MB sent per device and step"] = sent / steps / 1e6
        names = [f"{strategy}, {link}: s per step" for strategy in LINK_STEPS]
        row[f"{link}: ratio of the times"] = row[names[0]] / row[names[1]]
        rows.append(row)
    return rows


def last_loss(run_folder: Path) -> float:
    """The validation loss at the last step."""
    return [float(row["val_loss"]) for row in metrics(run_folder) if row["val_loss"]][-1]
