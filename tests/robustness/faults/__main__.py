"""Run fault injection, print the table of results, and write its rows into docs/reliability.md.

MINIGPT_FAULTS_TRAINER=gpu runs it on a CUDA GPU.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same number of threads in every run, for bitwise equality

import platform
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from . import Fault, Skipped
from .all import FAULTS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reliability.md"
TABLE_BEGIN, TABLE_END = "<!-- start of the table that make faults writes -->", "<!-- end of the table -->"
HEADINGS = ("fault", "trials", "recovered", "failed", "notes")


@dataclass
class Outcome:
    """Results of all trials of one fault."""

    fault: Fault
    recovered: int = 0
    failed: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    time_ratios: list[float] = field(default_factory=list)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        notes = [f"{count} {note}" for note, count in sorted(self.notes.items())]
        if self.time_ratios:
            notes.append(f"{median(self.time_ratios):.3f} × the training time without the fault (median)")
        trials = self.recovered + self.failed
        return (self.fault.name, str(trials), str(self.recovered), str(self.failed), ", ".join(notes))


def main() -> None:
    """Parse the command line, run the trials, print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.faults", description=__doc__)
    parser.add_argument("--only", metavar="NAME", default="", help="faults whose name contains NAME")
    parser.add_argument("--trials", type=int, help="trials per fault (default: of each fault); writes no rows")
    parser.add_argument("--quick", action="store_true", help="the trials of the test suite; writes no rows")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the trials (default: %(default)s)")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only.lower() in fault.name.lower()]
    if not chosen:
        parser.error(f"--only must be part of one of these names: {'; '.join(f.name for f in FAULTS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes inherit an ignored SIGINT
    trials = {fault: fault.quick_trials if options.quick else options.trials or fault.trials for fault in chosen}
    outcomes = [run_trials(fault, count, options.seed) for fault, count in trials.items() if count]
    table = Table(*HEADINGS)
    for outcome in outcomes:
        table.add_row(*outcome.cells)
    Console().print(table)
    if not (options.trials or options.quick):
        write_rows(outcomes, options.seed)
    raise SystemExit(any(outcome.failed for outcome in outcomes))


def run_trials(fault: Fault, trials: int, seed: int) -> Outcome:
    """Run two trials at a time, or one if the fault is exclusive; the folder of a failed trial is kept and printed."""
    outcome = Outcome(fault)

    def run_trial(number: int) -> None:
        workdir = Path(tempfile.mkdtemp(prefix="minigpt-fault-"))
        try:
            note = fault(workdir, f"{seed} {number}")
        except Skipped as reason:
            outcome.notes[f"skipped: {reason}"] += 1
        except Exception as error:
            outcome.failed += 1
            print(f"FAILED: {fault.name}, trial {number}, {workdir}: {type(error).__name__}: {error}", flush=True)
            return
        else:
            outcome.recovered += 1
            outcome.notes.update([note] if isinstance(note, str) else [])
            outcome.time_ratios.extend([note] if isinstance(note, float) else [])
        shutil.rmtree(workdir, ignore_errors=True)

    with ThreadPoolExecutor(1 if fault.exclusive else 2) as pool:
        list(pool.map(run_trial, range(trials)))
    print(*outcome.cells, sep="  |  ", flush=True)
    return outcome


def write_rows(outcomes: Iterable[Outcome], seed: int) -> None:
    """Replace rows in the table of the page by name; rows without a fault of that name are removed."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(TABLE_BEGIN)
    table, _, after = rest.partition(TABLE_END)
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("|")}
    rows |= {out.fault.name: f"| {' | '.join([*out.cells, f'{date.today()}, {seed}'])} |" for out in outcomes}
    head = [f"| {' | '.join(cells)} |" for cells in ((*HEADINGS, "date, seed"), ["---"] * (len(HEADINGS) + 1))]
    found = [rows[fault.name] for fault in FAULTS if fault.name in rows]
    PAGE.write_text("\n".join([before + TABLE_BEGIN, f"{machine}:", "", *head, *found, TABLE_END + after]), "utf-8")


if __name__ == "__main__":
    main()
