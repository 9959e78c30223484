"""The rows that `python scripts/bench/gpu.py` measures, and their tables, in the form of docs/gpu.md."""

import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import machine
from common import table as markdown
from time_to_loss import spread

from minigpt.runs.metrics import PEAK_FLOPS
from minigpt.utils.cli import error_text
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write

NOT_MEASURED = "not measured"
# A model that a CPU trains in seconds; these override the values of every run.
TINY = ["model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.n_inner=null", "model.block_size=16"]
TINY += ["model.vocab_size=512", "trainer=cpu", "compile=false", "callbacks.samples.max_new_tokens=5", "originality=50"]


class Table(NamedTuple):
    """A table of a part: its rows before anything is measured, and the digits of each column."""

    part: str
    rows: Sequence[str]
    columns: Mapping[str, int]


class Session:
    """Measurements that are written to `out`/results.json and `out`/tables.md whenever a row is added.

    Args:
        folder: for the runs.
        parts: to be measured; earlier rows of other parts stay.
    """

    def __init__(
        self, out: Path, folder: Path, parts: Sequence[str], tables: Mapping[str, Table], *, seeds: int, rehearse: bool
    ) -> None:
        self.out, self.folder, self.tables, self.rehearse = out, folder, tables, rehearse
        self.seeds, self.device = range(1337, 1337 + seeds), torch.device("cpu" if rehearse else "cuda")
        self.settings, self.text, self.failed = ["trainer=gpu"], folder / "text.txt", False
        self.name = "a CPU" if rehearse else torch.cuda.get_device_name()
        if rehearse:
            self.text.write_text("".join(f"{i}: ROMEO: What light, {i * i % 97}.\n" for i in range(800)))
            self.settings = [*TINY, f"data.path={self.text}", f"data.folder={folder}/data"]
        file = out / "results.json"
        self.results: dict[str, Any] = {"rehearsal": rehearse, "parts": {}}
        if file.exists():
            self.results = json.loads(file.read_text(encoding="utf-8"))
            if self.results["rehearsal"] != rehearse:
                raise UserError(
                    f"{file} has rows of {'a measurement' if rehearse else 'a rehearsal'}; set another --out"
                )
        self.results["parts"] |= {
            part: {
                "machine": f"{self.name}, {machine()}, torch {torch.__version__}",
                "command": f"python scripts/bench/gpu.py {part}{' --rehearse' if rehearse else ''} --seeds {seeds}",
                "rows": {name: [] for name, table in tables.items() if table.part == part},
            }
            for part in parts
        }
        self.write()

    def add(self, table: str, label: str, values: dict[str, Any]) -> None:
        """Add a row to a table, and write the files."""
        self.results["parts"][self.tables[table].part]["rows"][table].append({"row": label, **values})
        self.write()

    def write(self) -> None:
        """Write all rows."""
        self.out.mkdir(parents=True, exist_ok=True)
        text = format_tables(self.results, self.tables)
        for name, content in (("results.json", json.dumps(self.results, indent=1) + "\n"), ("tables.md", text)):
            with atomic_write(self.out / name) as partial:
                partial.write_text(content, encoding="utf-8")

    @contextmanager
    def row(self, table: str, label: str) -> Iterator[dict[str, Any]]:
        """Add the row that the block fills in, with its seconds; print an exception and add it as its error."""
        values: dict[str, Any] = {}
        print(f"{table}: {label} …", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            yield values
        except Exception as error:
            values["error"] = self.fail(f"{table}: {label}", error)
        values["seconds"] = time.perf_counter() - start
        self.add(table, label, values)
        gc.collect()
        torch.cuda.empty_cache()

    def fail(self, what: str, error: Exception) -> str:
        """Print an exception; return it as one line. It is a failure unless a model is too large."""
        line = error_text(error)
        self.failed |= "out of memory" not in line
        print(f"{what}: {line}", file=sys.stderr, flush=True)
        return line

    def mfu(self, flops: float) -> float | None:
        """Return the share of the GPU's peak; None if that is unknown."""
        peak = 1e12 if self.rehearse else PEAK_FLOPS.get(self.name)
        return flops / peak if peak else None


def format_tables(results: Mapping[str, Any], tables: Mapping[str, Table]) -> str:
    """Return all tables; cells without a figure are `NOT_MEASURED`."""
    lines = ["REHEARSAL on a CPU with tiny models: the figures mean nothing.", ""] if results["rehearsal"] else []
    for name, table in tables.items():
        part = results["parts"].get(table.part, {})
        rows = part.get("rows", {}).get(name, [])
        labels = dict.fromkeys([*([] if part else table.rows), *(row["row"] for row in rows)])
        command = part.get("command", f"python scripts/bench/gpu.py {table.part}")
        lines += [f"`{command}`, {part.get('machine', NOT_MEASURED)}:", ""]
        cells = []
        for label in labels:
            some = [row for row in rows if row["row"] == label]
            cells.append([label, *(cell(some, *column) for column in table.columns.items())])
        lines += [markdown([name, *table.columns], cells, aligned=False), ""]
    return "\n".join(lines)


def cell(rows: Sequence[Mapping[str, Any]], key: str, digits: int) -> str:
    """Return the median and range of a value over the rows of all seeds, or its text."""
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        errors = " ".join(row["error"] for row in rows if "error" in row)
        return "out of memory" if "out of memory" in errors else "failed" if errors else NOT_MEASURED
    if any(isinstance(value, str) for value in values):
        texts = (value if isinstance(value, str) else spread([value], digits) for value in values)
        return ", ".join(dict.fromkeys(texts))
    return spread(values if len(set(values)) > 1 else values[:1], digits)
