"""Try faults as often as their rows say, print the table, and write its rows into docs/reliability.md."""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # runs that are compared compute alike

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
BEGIN, END = "<!-- make faults writes from here -->", "<!-- to here -->"
HEADINGS = ("fault", "tried", "survived", "lost", "of them")


@dataclass
class Outcome:
    """What came of the trials of one fault."""

    fault: Fault
    survived: int = 0
    lost: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    ratios: list[float] = field(default_factory=list)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        notes = [f"{times} {note}" for note, times in sorted(self.notes.items())]
        if self.ratios:
            notes.append(f"{median(self.ratios):.3f} of the seconds that training takes otherwise (median)")
        return (self.fault.name, str(self.survived + self.lost), str(self.survived), str(self.lost), ", ".join(notes))


def main() -> None:
    """Parse what to try, try it, tell."""
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.faults", description=__doc__)
    parser.add_argument("--only", metavar="NAME", default="", help="faults whose name contains this")
    parser.add_argument("--times", type=int, help="trials of each, instead of what its row says")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only.lower() in fault.name.lower()]
    if not chosen:
        parser.error(f"no fault has {options.only!r} in its name; there are: {'; '.join(f.name for f in FAULTS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # runs of a program in the background would ignore it
    outcomes = [try_often(fault, options.times or fault.times, options.seed) for fault in chosen]
    table = Table(*HEADINGS)
    for outcome in outcomes:
        table.add_row(*outcome.cells)
    Console().print(table)
    if not options.times:
        write(outcomes, options.seed)
    raise SystemExit(any(outcome.lost for outcome in outcomes))


def try_often(fault: Fault, times: int, seed: int) -> Outcome:
    """Two trials at a time, if none is timed; of one that is lost the folder stays, and is named."""
    outcome = Outcome(fault)

    def one(number: int) -> None:
        place = Path(tempfile.mkdtemp(prefix="minigpt-fault-"))
        try:
            note = fault(place, f"{seed} {number}")
        except Skipped as reason:
            outcome.notes[f"skipped: {reason}"] += 1
        except Exception as error:
            outcome.lost += 1
            print(f"LOST: {fault.name}, trial {number}, {place}: {type(error).__name__}: {error}", flush=True)
            return
        else:
            outcome.survived += 1
            outcome.notes.update([note] if isinstance(note, str) else [])
            outcome.ratios.extend([note] if isinstance(note, float) else [])
        shutil.rmtree(place, ignore_errors=True)

    with ThreadPoolExecutor(1 if fault.alone else 2) as pool:
        list(pool.map(one, range(times)))
    print(*outcome.cells, sep="  |  ", flush=True)
    return outcome


def write(outcomes: Iterable[Outcome], seed: int) -> None:
    """Put rows into the table of the page, in place of those of their name; those of no fault go."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("|")}
    rows |= {out.fault.name: f"| {' | '.join([*out.cells, f'{date.today()}, {seed}'])} |" for out in outcomes}
    head = [f"| {' | '.join(cells)} |" for cells in ((*HEADINGS, "day, seed"), ["---"] * (len(HEADINGS) + 1))]
    found = [rows[fault.name] for fault in FAULTS if fault.name in rows]
    PAGE.write_text("\n".join([before + BEGIN, f"{machine}:", "", *head, *found, END + after]), encoding="utf-8")


if __name__ == "__main__":
    main()
