"""The conclusion of a sweep for scripts: a line of JSON, and a line in the ledger of all sweeps.

`ledger.csv` is beside the folders of the sweeps, which append to it as they end.
"""

import csv
import io
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from minigpt.runs.run_dir import short_path
from minigpt.sweeps.ranking import Table, points_of
from minigpt.sweeps.results import CRASHED
from minigpt.sweeps.verdicts import verdicts
from minigpt.utils.terminal import sanitize_line, warn

LEDGER = "ledger.csv"
COLUMNS = (
    "time",
    "folder",
    "question",
    "verdict",
    "difference",
    "interval",
    "seeds",
    "seconds",
)


def last_line(folder: Path | None, table: Table) -> str:
    """Return the conclusion of a sweep as one line of JSON.

    Args:
        folder: of the sweep; None for several.
    """
    return json.dumps(conclusion(folder, table))


def conclusion(folder: Path | None, table: Table) -> dict[str, Any]:
    """Return what a sweep found. These are its keys:

    - `folder`: of the sweep; None for several.
    - `question`: such as "optimizer.lr: 0.01 against 0.001": of the first swept setting, the value
      of the lowest loss against the first value. An incomplete grid compares rows; None if there is
      one row.
    - `verdict`: "better", "worse" or "unclear"; "failed" if they are not compared because runs
      failed or diverged, and "none" if it is for another reason.
    - `difference`, `interval`, `unit`: as of `verdicts`; None if nothing is compared.
    - `seeds`: the least number of seeds of the two.
    - `seconds`: of training, of all runs together.
    - `failed`: how many runs failed.
    - `reason`: why losses do not compare, or runs failed, were skipped or diverged; else empty.

    All comparisons are in `sweep.json`.
    """
    answer = verdicts(table)
    points = points_of(table.rows)
    n_failed = sum(point.status in ("failed", CRASHED) for point in points)
    # The first setting, or rows, and its best value other than that of the baseline. If its other
    # values failed, the answer to another question would be taken for that to this one.
    first = next(iter(table.short_names), "")
    of_setting = [each for each in answer if each["setting"] in (first, "")]
    headline = min(of_setting, key=lambda each: each["difference"], default=None)
    diverged = any(row.diverged and row not in table.compared for row in table.rows)
    failed = (n_failed or diverged) and not table.incomparable
    found = headline or {"verdict": "failed" if failed else "none"}
    reasons = [table.incomparable, *(row.reason for row in table.rows)]
    if diverged:
        reasons.append("a run diverged")
    return {
        "folder": None if folder is None else str(short_path(folder)),
        "question": _question(table, headline),
        "verdict": found["verdict"],
        "difference": found.get("difference"),
        "interval": found.get("interval"),
        "unit": table.unit,
        "seeds": found.get("seeds", table.baseline.n_seeds),
        "seconds": round(sum(point.totals.get("seconds", 0) for point in points), 1),
        "failed": n_failed,
        "reason": "; ".join(dict.fromkeys(filter(None, reasons))),
    }


def _question(table: Table, headline: Mapping[str, Any] | None) -> str | None:
    if headline:
        prefix = f"{headline['setting']}: " if headline["setting"] else ""
        return f"{prefix}{headline['value']} against {headline['baseline']}"
    # Nothing is compared: the first setting, and all its other values.
    for name in table.short_names:
        baseline = table.baseline.value(name)
        values = dict.fromkeys(row.value(name) for row in table.rows)
        values.pop(baseline)
        if values:
            return f"{name}: {', '.join(values)} against {baseline}"
    return None


def append_to_ledger(folder: Path, table: Table) -> None:
    """Append the conclusion of a sweep to the ledger beside its folder.

    A ledger that cannot be written is a warning.
    """
    file = folder.resolve().parent / LEDGER
    found = conclusion(folder, table)
    found["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
    found["folder"] = folder.resolve().name
    try:
        with FileLock(file.with_name(f".{LEDGER}.lock"), timeout=10):  # lines stay whole
            _append(file, [found[name] for name in COLUMNS])
    except OSError as error:
        warn(f"{file} has no line for this sweep: {error}")


def _append(file: Path, values: list[object]) -> None:
    header = _csv_line(COLUMNS)
    before = ""
    if file.exists():
        if not file.is_file():
            raise OSError("it is not a file")
        # Another program may have added a mark of the encoding, or ended without a line break.
        before = file.read_text(encoding="utf-8-sig", errors="replace")
    if before and before.splitlines()[0] != header.strip():
        raise OSError("it has another header; rename it")
    start = "" if before.endswith("\n") else "\n"
    with open(file, "a", newline="", encoding="utf-8", errors="backslashreplace") as opened:
        opened.write((start if before else header) + _csv_line(values))


def _csv_line(values: tuple[str, ...] | list[object]) -> str:
    text = io.StringIO()
    cells = [sanitize_line(value) if isinstance(value, str) else value for value in values]
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
