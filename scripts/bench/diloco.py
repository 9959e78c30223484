"""DiLoCo compared with DDP: the loss after the same tokens, and the time and bytes of a step on a slow link (root)."""

import argparse
import sys
from pathlib import Path
from typing import Any

from common import metrics
from forecast import run, seconds_per_step, train_on_hosts, training, transmitted, two_hosts

WORKERS = (2, 4)
MBIT, DELAY = 10, 0.05  # Mbit/s; seconds in each direction
STRATEGIES = {"ddp": ["trainer=ddp"], "diloco": ["trainer=diloco", "trainer.strategy.compress=true"]}
LINK_STEPS = {"ddp": 10, "diloco": 100}


def diloco(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure model=nano on tiny shakespeare; the loss of DDP is that of one device."""
    rows = []
    for seed in range(1337, 1337 + args.rounds):
        settings = [f"seed={seed}", "eval_batches=null", "model.dropout=0", "trainer.precision=auto"]
        one = folder / f"one{seed}"
        run([sys.executable, *training(one, args.steps), "trainer=cpu", *settings])
        row = {"ddp: loss": last_loss(one)}
        for n in WORKERS:
            out = folder / f"diloco{n}_{seed}"
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
            run([sys.executable, *torchrun, *training(out, args.steps), *STRATEGIES["diloco"], *settings])
            row |= {f"{n} workers: loss": last_loss(out), f"{n} workers: ratio": last_loss(out) / row["ddp: loss"]}
        link = f"{MBIT} Mbit/s and {1e3 * DELAY:g} ms"
        with two_hosts(DELAY) as hosts:
            for strategy, steps in LINK_STEPS.items():
                out = folder / f"{strategy}{seed}"
                before = transmitted("forecast-0", "forecast-0")
                train_on_hosts(hosts, MBIT, [*training(out, steps), *STRATEGIES[strategy]])
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
