"""Measure minigpt on a CUDA GPU, part by part. Every row is appended to a file as soon as it is
measured.

  python scripts/bench/gpu.py recipes gpt2   # two parts
  python scripts/bench/gpu.py --rehearse     # tiny models on a CPU; its figures mean nothing

Parts, and the minutes that they may take on an H100 (estimates, not measured):

  recipes   6  time to nanoGPT's loss and best loss per seed; nanogpt_gpu beside a bare loop
  gpt2      5  tokens/s and MFU of GPT-2 over batch sizes, beside a bare loop
  sampling  2  GPT-2 in bfloat16: share of the memory bound, beside transformers
  memory    2  peak memory of GPT-2's sizes, with and without activation checkpointing
  minutes   7  minutes=1 and minutes=5 of tiny shakespeare and of --text: loss and times
  threads   3  the CPU beside the GPU: tokens/s of small models over the number of threads

The most important rows of a part come first. A row that fails is printed and recorded with what it
has measured, and the others are measured all the same; then the exit code is 1. Without a network
set MINIGPT_DATA_DIR to a folder with tinyshakespeare.txt.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bare_minigpt import synchronize
from bare_nanogpt import RECIPES as BASELINES
from common import TRAIN, launch, machine, metrics, run_bare, seconds, summary, table, text_file
from sampling import in_transformers, minigpt_tokens, transformers_tokens
from time_to_loss import crossing, nanogpt_estimate, run_baseline, run_recipe, spread

from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.training.gpu_peaks import PEAK_FLOPS
from minigpt.utils.checks import POSITIVE_INT, one_of
from minigpt.utils.cli import cli_entrypoint, error_text
from minigpt.utils.errors import UserError, require

LOSS = (
    1.4655  # nanoGPT's GPU recipe, mean of five runs; source: configs/experiment/nanogpt_gpu.yaml
)
# Rehearsals train a model that a CPU trains in seconds; these override the values of every run.
TINY = [
    "model.n_layer=1",
    "model.layer_repeats=1",
    "model.n_head=2",
    "model.n_embd=16",
    "model.n_inner=null",
    "model.block_size=16",
]
TINY += [
    "model.vocab_size=512",
    "trainer=cpu",
    "compile=false",
    "callbacks.samples.max_new_tokens=5",
    "callbacks.originality.characters=50",
]
# A run does no more than train: no samples, no snapshots, and no text at its end.
ONLY_TRAINING = [
    "callbacks.samples.max_new_tokens=1",
    "callbacks.snapshots=null",
    "callbacks.originality=null",
]
# 124M parameters with nanoGPT's vocabulary size, for any text. Speed is that of the last 30 steps.
GPT2 = ["model.vocab_size=50304", "model.bias=false", "data.eval_batch_size=8", "eval_batches=1"]


class Session:
    """The device, the settings of all runs, and the file of rows.

    Args:
        folder: for the runs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.rehearse, self.folder, self.text, self.failed = args.rehearse, folder, args.text, False
        self.seeds = range(1337, 1337 + args.seeds)
        self.device = torch.device("cpu" if args.rehearse else "cuda")
        self.name = "REHEARSAL on a CPU" if args.rehearse else torch.cuda.get_device_name()
        self.file = args.out or Path(f"runs/bench/gpu{'-rehearsal' if args.rehearse else ''}.jsonl")
        self.settings = ["trainer=gpu", *ONLY_TRAINING]
        if args.rehearse:
            self.text = folder / "text.txt"
            self.text.write_text(
                "".join(f"{i}: ROMEO: What light, {i * i % 97}.\n" for i in range(800)),
                encoding="utf-8",
            )
            self.settings = [*TINY, f"data.path={self.text}", f"data.folder={folder}/data"]

    @contextmanager
    def row(self, part: str, label: str) -> Iterator[dict[str, Any]]:
        """Append the row that the block fills in, or its exception; a model that is too large is
        not a failure.
        """
        values: dict[str, Any] = {}
        print(f"{part}: {label} …", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            yield values
        except Exception as error:
            values["error"] = error_text(error)
            self.failed |= "out of memory" not in values["error"]
            print(f"{part}: {label}: {values['error']}", file=sys.stderr, flush=True)
        row = {"part": part, "row": label, **values, "minutes": (time.perf_counter() - start) / 60}
        row |= {
            "machine": f"{self.name}, {machine()}, torch {torch.__version__}",
            "command": " ".join(sys.argv),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def train(self, name: str, *settings: str, env: dict[str, str] | None = None) -> Path:
        """Train with scripts/train.py; return the run folder."""
        launch([sys.executable, TRAIN, *settings, f"hydra.run.dir={self.folder}/{name}"], env=env)
        return self.folder / name

    def timed(self, work: Callable[[], object], times: int = 3) -> float:
        """Return the median seconds of calling `work`, after a first call that compiles."""

        def finished() -> None:
            work()
            synchronize(self.device)

        finished()
        return seconds(finished, times)


def recipes(session: Session) -> None:
    """Time the recipes to LOSS, and compare the speed of nanoGPT's recipe with that of a bare
    loop.
    """
    time_to_loss(session, "fast_gpu")
    nanogpt(session)
    time_to_loss(session, "best_gpu")


def time_to_loss(session: Session, recipe: str) -> None:
    """Train a recipe with every seed."""
    short = ["max_steps=20", "eval_every=5", "log_every=5"] if session.rehearse else []
    for seed in session.seeds:
        with session.row("recipes", recipe) as row:
            run = session.folder / f"{recipe}-{seed}"
            result = run_recipe(recipe, seed, run, [*session.settings, *short])
            curve = result.pop("curve")
            reached = crossing(curve, LOSS)
            row |= result | {
                "best loss": min(point["loss"] for point in curve),
                "tokens/s": steady_speed(run),
            }
            row[f"train s to {LOSS}"] = reached["seconds"] if reached else "not reached"
            row["estimate"] = nanogpt_estimate(run)


def nanogpt(session: Session) -> None:
    """Train nanoGPT's recipe with minigpt, and in a bare loop."""
    every, device = 10 if session.rehearse else 100, session.device.type
    settings = [*session.settings, f"max_steps={3 * every}", f"eval_every={every}"]
    with session.row("recipes", f"nanogpt_gpu, {3 * every} steps, and a bare loop") as row:
        row["tokens/s"] = steady_speed(
            session.train("nanogpt", "experiment=nanogpt_gpu", *settings)
        )
        first, *_, last = run_baseline(
            "baseline", session.seeds[0], [*settings, f"device={device}"]
        )["curve"]
        per_step = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
        row["bare tokens/s"] = BASELINES[device].batch * BASELINES[device].block / per_step
        row["ratio"] = row["tokens/s"] / row["bare tokens/s"]


def gpt2(session: Session) -> None:
    """Train GPT-2 with growing batches of sequences of 1,024 tokens, beside a bare loop."""
    peak = 1e12 if session.rehearse else PEAK_FLOPS.get(session.name, float("nan"))
    for batch in (2,) if session.rehearse else (16, 32, 64):
        settings = [
            "model=gpt2",
            "compile=true",
            "max_steps=40",
            "eval_every=40",
            *GPT2,
            *session.settings,
        ]
        with session.row("gpt2", f"batch {batch}") as row:
            bare = run_bare(*settings, f"data.batch_size={batch}")
            speed, flops = bare["steady_tokens_per_second"], bare["flops_per_token"]
            row |= {
                "bare tokens/s": speed,
                "bare MFU": speed * flops / peak,
                "peak GB": bare["peak_gb"],
            }
            row["tokens/s"] = steady_speed(
                session.train(f"gpt2-{batch}", *settings, f"data.batch_size={batch}")
            )
            row["MFU"] = row["tokens/s"] * flops / peak
        if "error" in row:
            break  # a larger batch does not fit either


def sampling(session: Session) -> None:
    """Generate with random weights of the size of GPT-2 in bfloat16, with minigpt and with
    transformers.
    """
    n, bandwidth = 8 if session.rehearse else 256, copied_bytes(session)
    values = {
        "block_size": 1024,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "vocab_size": 50257,
        "bias": False,
    }
    values |= {"n_layer": 1, "n_embd": 24, "vocab_size": 512} if session.rehearse else {}
    model = GPT(GPTConfig(**values)).eval().to(session.device, torch.bfloat16)
    weights = 2 * model.config.num_params(positions=False)  # bytes
    # Bytes of keys and values, on average
    cache = 2 * 2 * values["n_layer"] * values["n_embd"] * n / 2
    for streams in (1, 64):
        with session.row("sampling", f"{streams} streams") as row:
            speed = n * streams / session.timed(lambda s=streams: minigpt_tokens(model, n, s))
            row |= {"copied GB/s": bandwidth / 1e9, "tokens/s": speed}
            row["share of the memory bound"] = speed * (weights / streams + cache) / bandwidth
    for streams in (1, 64) if find_spec("transformers") else ():
        with session.row("sampling", f"{streams} streams, transformers") as row:
            theirs = in_transformers(model.config).to(session.device, torch.bfloat16)
            taken = session.timed(
                lambda m=theirs, s=streams: transformers_tokens(m, n, s, static=True)
            )
            row["tokens/s"] = n * streams / taken


def copied_bytes(session: Session) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(
        1 << (20 if session.rehearse else 30), dtype=torch.uint8, device=session.device
    )
    target = torch.zeros_like(source)
    return 2 * len(source) / session.timed(lambda: target.copy_(source), times=10)


def memory(session: Session) -> None:
    """Measure the peak of torch's allocator in three training steps of 8 sequences."""
    for preset in (
        ("gpt2",) if session.rehearse else ("gpt2", "gpt2_xl", "gpt2_large", "gpt2_medium")
    ):
        for blocks in ("null", "1"):
            with session.row("memory", f"{preset}, checkpoint_blocks={blocks}") as row:
                settings = [
                    f"model={preset}",
                    "data.batch_size=8",
                    "max_steps=3",
                    f"checkpoint_blocks={blocks}",
                ]
                row["peak GB"] = run_bare(*settings, *GPT2, *session.settings)["peak_gb"]


def minutes(session: Session) -> None:
    """Train for a given time; the size of the model is that of the plan, also in a rehearsal."""
    settings = (
        ["trainer=cpu", "callbacks.originality.characters=50"]
        if session.rehearse
        else ["trainer=gpu"]
    )
    texts = {} if session.rehearse else {"tiny shakespeare": []}
    if session.text:
        texts[session.text.name] = ["data=text", f"data.path={session.text.resolve()}"]
    for given in (0.4,) if session.rehearse else (1, 5):
        for text, data in texts.items():
            with session.row("minutes", f"minutes={given}, {text}") as row:
                folder = f"data.folder={session.folder}/data"
                run = session.train(
                    f"minutes{given}-{text}", f"minutes={given}", folder, *settings, *data
                )
                names = (
                    "best_val_loss",
                    "best_val_bits_per_byte",
                    "params",
                    "steps",
                    "seconds",
                    "wall_seconds",
                )
                row |= {name: summary(run)[name] for name in names}


def threads(session: Session) -> None:
    """Train small models on the CPU with 1, 2, 4 … threads, and with the default number."""
    counts = [None, *(1 << i for i in range((os.cpu_count() or 1).bit_length()))]
    for recipe in ("fast_cpu",) if session.rehearse else ("fast_cpu", "nanogpt_cpu"):
        for count in counts[: 1 if session.rehearse else None]:
            with session.row("threads", f"{recipe}, {count or 'default'}") as row:
                steps = 20 if session.rehearse else 150
                settings = [f"experiment={recipe}", *session.settings, "trainer=cpu"]
                settings += [f"max_steps={steps}", f"eval_every={steps}", "eval_batches=1"]
                run = session.train(
                    f"{recipe}-{count}",
                    *settings,
                    env={"OMP_NUM_THREADS": str(count)} if count else {},
                )
                row |= {
                    "tokens/s": summary(run)["tokens_per_second"],
                    "device": summary(run)["device"],
                }


def steady_speed(run: Path) -> float:
    """Return the tokens/s of a run after its first row of metrics, whose steps compile."""
    rows = [row for row in metrics(run) if row["seconds"]]
    tokens, seconds = (float(rows[-1][key]) - float(rows[0][key]) for key in ("tokens", "seconds"))
    return tokens / seconds


def tables(file: Path) -> str:
    """Format the rows of a file, one table per part and machine, with medians and ranges of equal
    labels.
    """
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault((row.pop("machine"), row.pop("part")), {}).setdefault(
            row.pop("row"), []
        ).append(row)
    lines = []
    for (machine_name, part), labels in groups.items():
        keys = dict.fromkeys(
            key for rows in labels.values() for row in rows for key in row if key != "command"
        )
        cells = [
            [label, *(cell([row.get(key) for row in rows]) for key in keys)]
            for label, rows in labels.items()
        ]
        lines += [f"{machine_name}:", "", table([part, *keys], cells), ""]
    return "\n".join(lines)


def cell(values: list[Any]) -> str:
    """Return the median and range of numbers, or the distinct texts."""
    found = [value for value in values if value is not None]
    if any(isinstance(value, str) for value in found):
        return ", ".join(dict.fromkeys(map(str, found)))
    return spread(found, 0 if min(found) >= 1000 else 3) if found else ""


PARTS = {part.__name__: part for part in (recipes, gpt2, sampling, memory, minutes, threads)}


@cli_entrypoint
def main() -> None:
    """Measure the parts; print the tables of all rows in the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny models on a CPU, to test this script"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="of the recipes (default: %(default)s)"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="another text for minutes")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON lines (default: runs/bench/gpu.jsonl)"
    )
    args = parser.parse_args()
    for part in args.parts:
        require("PART", part, *one_of(PARTS))
    require("--seeds", args.seeds, *POSITIVE_INT)
    if not args.rehearse and not torch.cuda.is_available():
        raise UserError("found no CUDA GPU; set --rehearse to test the benchmark on a CPU")
    if not args.rehearse:
        text_file()  # checks that it is tiny shakespeare
    with tempfile.TemporaryDirectory() as folder:
        session = Session(args, Path(folder))
        for part in args.parts or PARTS:
            PARTS[part](session)
    print(tables(session.file))
    print(f"wrote {session.file}")
    sys.exit(session.failed)


if __name__ == "__main__":
    main()
