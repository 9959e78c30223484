"""The parts of `python scripts/bench/gpu.py`: each measures rows of its tables in a `Session`.

Whole runs and bare loops are processes of their own, so that one that is out of memory leaves the others alone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from bare_minigpt import synchronize
from bare_nanogpt import RECIPES as BASELINES
from common import BARE_MINIGPT, ONLY_TRAINING, ROOT, TRAIN, launch, metrics, seconds, summary
from hydra import compose, initialize_config_dir
from peak_memory import ADAMW, peak_bytes
from sampling import in_transformers, minigpt_tokens, transformers_tokens
from session import Session, Table
from time_to_loss import crossing, run_baseline, run_recipe
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.config import GPTConfig
from minigpt.forecast.memory import Parallelism, Sizes, memory
from minigpt.model import GPT
from minigpt.optim import adamw
from minigpt.utils.errors import RunError

LOSS = 1.4655  # nanoGPT's GPU recipe, mean of five runs; source: configs/experiment/nanogpt_gpu.yaml
TO_LOSS, FROM_LAUNCH = f"training s to {LOSS}", f"s from launch to {LOSS}"
RECIPES = ("fast_gpu", "best_gpu", "nanogpt_gpu")
NANOGPT = "nanoGPT's recipe, bare loop"
# 124M parameters with nanoGPT's vocabulary size, for any text. Speed is that of the last 30 steps.
GPT2 = ["model=gpt2", "model.vocab_size=50304", "model.bias=false", "compile=true", "max_steps=40", "eval_every=40"]
GPT2 += ["data.eval_batch_size=8", "eval_batches=1", *ONLY_TRAINING]
BATCHES = (8, 16, 32, 64, 128, 256)  # sequences of 1,024 tokens
RECIPE_OF = {"nano": "nanogpt_cpu", "baby": "nanogpt_gpu"}
LOOPS = {  # name: settings of the bare loop
    "eager": ["compile=false"],
    "compiled": ["compile=true"],
    "CUDA graphs": ["compile=true", "+mode=reduce-overhead"],
}
SUFFIXES = {None: "", 1: ", checkpoint_blocks=1"}
PRESETS = ("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl")
STREAMS = (1, 64)


def check_scripts(session: Session) -> None:
    """Train 50 steps of every recipe, resume it, and run the other scripts on the first run."""
    for recipe in RECIPES[: 1 if session.rehearse else None]:
        run = session.folder / recipe
        short = [f"experiment={recipe}", *session.settings, "max_steps=50", "eval_every=25", "log_every=5"]
        short += ["callbacks.checkpoint.save_top_k=2", "eval_batches=1"]
        with session.row("check", f"{recipe}: 50 steps") as row:
            train(run, short)
            losses = [float(line["train_loss"]) for line in metrics(run) if line["train_loss"]]
            if not (all(map(isfinite, losses)) and losses[-1] < losses[0]):
                raise RunError(f"the losses do not fall: {losses}")
            row["result"] = f"training loss {losses[0]:.3f} to {losses[-1]:.3f}"
        with session.row("check", f"{recipe}: resumed at step 25") as row:
            compare_resumed(row, run, short)
    run, out = session.folder / "fast_gpu", session.folder / "out"
    commands: dict[str, list[object]] = {
        "sample.py": [run, "--num-samples", 3, "--max-new-tokens", 50, "--device", session.device.type],
        "attention.py": [run, "--prompt", "ROMEO: What light", "--truncate", "--out", f"{out}.png"],
        "export.py": [run, "--to", "huggingface", "--out", out],
    }
    for script, arguments in commands.items():
        with session.row("check", script) as row:
            launch([sys.executable, ROOT / "scripts" / script, *arguments])
            row["result"] = "done"
    with session.row("check", "sweep of two jobs") as row:
        settings = ["experiment=fast_gpu", *session.settings, "max_steps=20", "eval_every=20", "eval_batches=2"]
        launch([sys.executable, TRAIN, "-m", "seed=1,2", *settings, f"hydra.sweep.dir={session.folder}/sweep"])
        runs = sorted(file.parent for file in session.folder.glob("sweep/*/summary.json"))
        row["result"] = "validation losses " + ", ".join(f"{summary(run)['best_val_loss']:.3f}" for run in runs)


def compare_resumed(row: dict[str, Any], run: Path, settings: Sequence[str]) -> None:
    """Resume a run from step 25. If its end differs, does a repeated run differ too, and a deterministic one?"""

    def differing(name: str, *more: str, other: Path = run) -> list[str]:
        train(other.with_name(f"{run.name}-{name}"), [*settings, *more])
        return different_tensors(other.with_name(f"{run.name}-{name}") / LAST, other / LAST)

    step_25, exact = "resume={}/checkpoints/step-25.safetensors", "+trainer.deterministic=true"
    found = differing("resumed", step_25.format(run))
    row["result"] = f"{len(found)} tensors differ ({', '.join(found[:3])} …)" if found else "equal bit for bit"
    if found:
        row["result"] += f", {len(differing('repeated'))} if the run is repeated"
        train(whole := run.with_name(f"{run.name}-exact"), [*settings, exact])
        again = differing("exact-resumed", exact, step_25.format(whole), other=whole)
        row["result"] += f", {len(again)} if it is resumed with {exact}"


def different_tensors(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors of weights, optimizer and random states that differ between two checkpoints."""
    found = []
    for part in ("state_dict", "optimizer_states", "rng"):
        (left, spec), (right, other_spec) = (tree_flatten_with_path(read(file)[part]) for file in (one, other))
        if spec != other_spec:
            return [f"{part} has other names"]
        pairs = zip(left, right, strict=True)
        found += [part + keystr(path) for (path, a), (_, b) in pairs if isinstance(a, Tensor) and not torch.equal(a, b)]
    return found


def compare_recipes(session: Session) -> None:
    """Time the recipes to LOSS, and the speed of nanoGPT's recipe, whose loss is published."""
    short = ["max_steps=20", "eval_every=5", "log_every=5"] if session.rehearse else []
    for seed in session.seeds:
        for recipe in ("best_gpu",) if session.rehearse else ("fast_gpu", "best_gpu"):
            with session.row("recipes", recipe) as row:
                run = session.folder / f"{recipe}-{seed}"
                row |= run_recipe(recipe, seed, run, [*session.settings, *short])
                row["best loss"] = min(point["loss"] for point in row["curve"])
                row["tokens/s"] = steady_speed(run)
                reached = crossing(row["curve"], LOSS)
                row[TO_LOSS] = reached["seconds"] if reached else "not reached"
                row[FROM_LAUNCH] = reached["seconds"] + row["startup s"] if reached else "not reached"
    with session.row("recipes", NANOGPT) as row:
        every, settings = (10, [f"data.path={session.text}"]) if session.rehearse else (100, [])
        device, settings = session.device.type, [*settings, f"max_steps={3 * every}", f"eval_every={every}"]
        baseline = run_baseline("baseline", session.seeds[0], [*settings, f"device={device}"])
        first, last = baseline["curve"][0], baseline["curve"][-1]
        seconds = (last["seconds"] - first["seconds"]) / (2 * every)  # per step
        row |= {"params": baseline["params"], "train s": f"{5000 * seconds:.1f} (5,000 steps at this speed)"}
        row["tokens/s"] = BASELINES[device].batch * BASELINES[device].block / seconds


def measure_gpt2(session: Session) -> None:
    """Train GPT-2 with growing batches until the memory is full, beside a bare loop that is also profiled."""
    measured = []
    for batch in (2,) if session.rehearse else BATCHES:
        settings = [*GPT2, *session.settings, f"data.batch_size={batch}"]
        with session.row("gpt2", str(batch)) as row:
            bare = run_bare(*settings, "+profile=true")
            speed, flops = bare["tokens/s"], bare["flops_per_token"]
            row |= {"bare": bare, "bare tokens/s": speed, "bare MFU": session.mfu(speed * flops)}
            row["bare peak GB"] = bare["peak_bytes"] / 1e9 if "peak_bytes" in bare else None
            run = session.folder / f"gpt2-{batch}"
            train(run, settings)
            row["tokens/s"] = steady_speed(run)
            row["MFU"] = session.mfu(row["tokens/s"] * flops)
            row["overhead ms per step"] = 1e3 * bare["tokens"] / bare["steps"] * (1 / row["tokens/s"] - 1 / speed)
            measured.append(row)
        if "error" in row:
            break
    if measured:
        for operation in max(measured, key=lambda row: row["bare tokens/s"])["bare"]["operations"]:
            session.add("kernels", operation.pop("operation")[:70].replace("|", "/"), operation)


def compare_graphs(session: Session) -> None:
    """Compare the speed of small models: eager, compiled and with CUDA graphs in a bare loop, and whole runs."""
    for model in list(RECIPE_OF)[: 1 if session.rehearse else None]:
        steps = 20 if session.rehearse else 200
        settings = [f"experiment={RECIPE_OF[model]}", *session.settings, f"max_steps={steps}", f"eval_every={steps}"]
        settings += ["eval_batches=1", f"log_every={steps // 10}", *ONLY_TRAINING]
        for name in ("CUDA graphs",) if session.rehearse else LOOPS:
            with session.row("graphs", f"{model}, bare loop, {name}") as row:
                row |= run_bare(*settings, *LOOPS[name])
        for name in ("eager",) if session.rehearse else ("eager", "compiled"):
            with session.row("graphs", f"{model}, minigpt, {name}") as row:
                run = session.folder / f"{model}-{name}"
                train(run, [*settings, *LOOPS[name]])
                row["tokens/s"], row["first steps s"] = steady_speed(run), float(metrics(run)[0]["seconds"])


def measure_sampling(session: Session) -> None:
    """Generate with random weights of the size of GPT-2 in bfloat16, with minigpt and with transformers."""
    n, size = (8, 1 << 20) if session.rehearse else (256, 1 << 32)
    values = {"block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "bias": False}
    values |= {"n_layer": 1, "n_embd": 24, "vocab_size": 512} if session.rehearse else {}
    model = GPT(GPTConfig(**values)).eval()
    theirs = in_transformers(model).to(session.device, torch.bfloat16) if find_spec("transformers") else None
    model = model.to(session.device, torch.bfloat16)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=session.device) for _ in range(2))
    bandwidth = 2 * size / timed(lambda: target.copy_(source), session, times=10)
    weights = 2 * model.config.num_params(positions=False)  # bytes
    for streams in STREAMS:
        with session.row("sampling", f"{streams} streams") as row:
            row["copied GB/s"] = bandwidth / 1e9
            row["tokens/s"] = n * streams / timed(lambda s=streams: minigpt_tokens(model, n, s), session)
            row["share of the memory bound"] = row["tokens/s"] * weights / streams / bandwidth
            row["transformers tokens/s"] = "not installed"
            if theirs is not None:
                taken = timed(lambda s=streams: transformers_tokens(theirs, n, s, static=True), session)
                row["transformers tokens/s"] = n * streams / taken
                row["ratio"] = row["tokens/s"] * taken / n / streams


def measure_memory(session: Session) -> None:
    """Compare the peak memory of three training steps in bfloat16 with the forecast."""
    for preset in PRESETS[: 1 if session.rehearse else None]:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            cfg = compose("train", overrides=[f"model={preset}", "model.vocab_size=50304", *session.settings])
        config = GPTConfig(**cfg.model)
        with torch.device("meta"):
            model = GPT(config).to("meta")
        for checkpoint_blocks, suffix in SUFFIXES.items():
            model.checkpoint_blocks = checkpoint_blocks
            sizes = Sizes(model, adamw(model, **ADAMW), bfloat16=True)
            for batch in (1, 8):
                with session.row("memory", f"{preset}, batch {batch}{suffix}") as row:
                    row["predicted GB"] = memory(sizes, Parallelism("", 1, 1, 1, 1), batch)["peak"] / 1e9
                    options: Any = {"bfloat16": True, "checkpoint_blocks": checkpoint_blocks}
                    row["measured GB"] = peak_bytes(config, batch, device=session.device.type, **options) / 1e9
                    row["ratio"] = row["predicted GB"] / row["measured GB"]


def inject_faults(session: Session) -> None:
    """Run the quick half of fault injection, and losses that are NaN, on the device."""
    trials = [["--only", "SIGTERM at", "--trials", "1"]]
    if not session.rehearse:
        trials = [["--quick"], ["--only", "NaN loss", "--trials", "3"]]
    for options in trials:
        command = [sys.executable, "-m", "tests.robustness.faults", *options]
        environment = os.environ | {"MINIGPT_FAULTS_TRAINER": "cpu" if session.rehearse else "gpu"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        rows = [cells for line in done.stdout.splitlines() if len(cells := line.split("  |  ")) == 5]
        for name, trials_, recovered, failed, notes in rows:
            with session.row("faults", name) as row:
                row |= {"trials": int(trials_), "recovered": int(recovered), "notes": notes}
                if int(failed):
                    reasons = [line for line in done.stdout.splitlines() if line.startswith(f"FAILED: {name},")]
                    raise RunError(" ".join(reasons))
        if not rows:
            with session.row("faults", " ".join(options)):
                raise RunError(done.stderr[-500:])


def train(run: Path, settings: Sequence[str]) -> None:
    """Train with scripts/train.py."""
    launch([sys.executable, TRAIN, *settings, f"hydra.run.dir={run}"])


def run_bare(*settings: str) -> dict[str, Any]:
    """Run the bare loop; return its measurements, its steps and tokens/s after the first steps."""
    result: dict[str, Any] = json.loads(launch([sys.executable, BARE_MINIGPT, *settings]).output.splitlines()[-1])
    steps = next(int(setting.partition("=")[2]) for setting in settings if setting.startswith("max_steps="))
    later = 1 - result["first_steps"] / steps  # share of the steps
    speed = later * result["tokens"] / (result["seconds"] - result["first_seconds"])
    return result | {"steps": steps, "tokens/s": speed, "first steps s": result["first_seconds"]}


def steady_speed(run: Path) -> float:
    """Return the tokens/s of a run after its first row of metrics, whose steps compile."""
    rows = [row for row in metrics(run) if row["seconds"]]
    tokens, seconds = (float(rows[-1][key]) - float(rows[0][key]) for key in ("tokens", "seconds"))
    return tokens / seconds


def timed(work: Callable[[], object], session: Session, times: int = 3) -> float:
    """Return the median seconds of calling `work`, after a first call that compiles."""

    def finished() -> None:
        work()
        synchronize(session.device)

    finished()
    return seconds(finished, times)


PARTS = {
    "check": check_scripts,
    "recipes": compare_recipes,
    "gpt2": measure_gpt2,
    "graphs": compare_graphs,
    "sampling": measure_sampling,
    "memory": measure_memory,
    "faults": inject_faults,
}
CHECKED = [f"{recipe}: {what}" for recipe in RECIPES for what in ("50 steps", "resumed at step 25")]
LOOP_NAMES = [*(f"bare loop, {name}" for name in LOOPS), "minigpt, eager", "minigpt, compiled"]
TABLES = {
    "check": Table(
        "check",
        [*CHECKED, "sample.py", "attention.py", "export.py", "sweep of two jobs"],
        {"result": 0, "seconds": 1},
    ),
    "recipes": Table(
        "recipes",
        ["fast_gpu", "best_gpu", NANOGPT],
        {"params": 0, "startup s": 1, "first steps s": 1, "train s": 1, TO_LOSS: 1, FROM_LAUNCH: 1, "best loss": 4}
        | {"estimate": 4, "tokens/s": 0},
    ),
    "gpt2": Table(
        "gpt2",
        [str(batch) for batch in BATCHES],
        {"tokens/s": 0, "MFU": 3, "bare tokens/s": 0, "bare MFU": 3, "overhead ms per step": 2, "bare peak GB": 1},
    ),
    "kernels": Table("gpt2", [], {"ms per step": 3, "share": 3, "calls per step": 0}),
    "graphs": Table(
        "graphs",
        [f"{model}, {loop}" for model in RECIPE_OF for loop in LOOP_NAMES],
        {"tokens/s": 0, "first steps s": 1},
    ),
    "sampling": Table(
        "sampling",
        [f"{streams} streams" for streams in STREAMS],
        {"tokens/s": 0, "share of the memory bound": 2, "copied GB/s": 0, "transformers tokens/s": 0, "ratio": 2},
    ),
    "memory": Table(
        "memory",
        [f"{preset}, batch {batch}{suffix}" for preset in PRESETS for suffix in SUFFIXES.values() for batch in (1, 8)],
        {"predicted GB": 2, "measured GB": 2, "ratio": 2},
    ),
    "faults": Table("faults", ["quick half"], {"trials": 0, "recovered": 0, "notes": 0}),
}
