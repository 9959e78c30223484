"""Run fault injection, print the table of results, and write its rows into docs/reliability.md.

MINIGPT_FAULTS_TRAINER=gpu runs it on a CUDA GPU.
"""

import argparse
import os

# The same number of threads in every run, for bitwise equality
os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import shutil
import signal
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import median

from . import FAULTS
from .tools import Fault, Skipped, shared

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reliability.md"
TABLE_BEGIN = "<!-- start of the table that make faults writes -->"
TABLE_END = "<!-- end of the table -->"
HEADINGS = ("fault", "trials", "recovered", "failed", "notes")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    add = parser.add_argument
    add("--only", metavar="NAME", default="", help="faults whose name contains NAME")
    add("--trials", type=int, help="trials per fault (default: of each fault); writes no rows")
    add("--quick", action="store_true", help="the trials of the test suite; writes no rows")
    add("--seed", type=int, default=0, help="random seed of the trials (default: %(default)s)")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only.lower() in fault.name.lower()]
    if not chosen:
        names = "; ".join(fault.name for fault in FAULTS)
        parser.error(f"--only must be part of one of these names: {names}")
    if options.quick:
        chosen = [fault for fault in chosen if fault.suite != "none"]
    # Background processes inherit an ignored SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shared()  # before the threads of trials, which share it
    rows = []
    for fault in chosen:
        trials = 1 if options.quick else options.trials or fault.trials
        rows.append(run_trials(fault, trials, options.seed))
        print(*rows[-1], sep="  |  ", flush=True)
    if not (options.trials or options.quick):
        write_rows(rows, options.seed)
    raise SystemExit(any(failed != "0" for _, _, _, failed, _ in rows))


def run_trials(fault: Fault, trials: int, seed: int) -> tuple[str, ...]:
    """Run two trials at a time, or one if the fault is exclusive; return the cells of the row.

    The folder of a failed trial is kept and printed.
    """
    results = Counter[str]()
    notes = Counter[str]()
    time_ratios = []

    def run_trial(number: int) -> None:
        workdir = Path(tempfile.mkdtemp(prefix="minigpt-fault-"))
        try:
            note = fault(workdir, f"{seed} {number}")
            results["recovered"] += 1
            if isinstance(note, float):
                time_ratios.append(note)
            elif note:
                notes[note] += 1
        except Skipped as reason:
            notes[f"skipped: {reason}"] += 1
        except Exception as error:
            results["failed"] += 1
            where = f"{fault.name}, trial {number}, {workdir}"
            print(f"FAILED: {where}: {type(error).__name__}: {error}", flush=True)
            return
        shutil.rmtree(workdir, ignore_errors=True)

    with ThreadPoolExecutor(1 if fault.exclusive else 2) as pool:
        list(pool.map(run_trial, range(trials)))
    texts = [f"{count} {note}" for note, count in sorted(notes.items())]
    if time_ratios:
        texts.append(f"{median(time_ratios):.3f} × the training time without the fault (median)")
    counts = (results.total(), results["recovered"], results["failed"])
    return (fault.name, *map(str, counts), ", ".join(texts))


def write_rows(measured: list[tuple[str, ...]], seed: int) -> None:
    system = f"{platform.system()} {platform.machine()}"
    machine = f"{system}, {os.cpu_count()} cores, Python {platform.python_version()}:"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(TABLE_BEGIN)
    table, _, after = rest.partition(TABLE_END)
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("|")}
    rows |= {cells[0]: table_row(*cells, f"{date.today()}, {seed}") for cells in measured}
    head = [table_row(*HEADINGS, "date, seed"), table_row(*["---"] * (len(HEADINGS) + 1))]
    found = [rows[fault.name] for fault in FAULTS if fault.name in rows]
    lines = [before + TABLE_BEGIN, machine, "", *head, *found, TABLE_END + after]
    PAGE.write_text("\n".join(lines), encoding="utf-8")


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
