"""Forecasts compared with runs on a CPU: peak memory, sent bytes, and step time on a limited link.

Bytes and time need root and Linux, because they are measured in network namespaces: gloo sends with TCP, whose headers
are in the measured bytes, but not in the predicted ones.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from select import select
from typing import Any

import torch
from common import ONLY_TRAINING, ROOT, TRAIN, metrics, text_file
from peak_memory import ADAMW

from minigpt.config import GPTConfig
from minigpt.forecast.memory import Parallelism, Sizes, memory
from minigpt.forecast.traffic import step_time
from minigpt.model import GPT
from minigpt.optim import adamw
from minigpt.utils.errors import UserError

PEAK_MEMORY = ROOT / "scripts/bench/peak_memory.py"
LLAMA = {"bias": False, "norm": "rmsnorm", "position": "rope", "activation": "swiglu"}
MODELS = {  # values of GPTConfig, and sequences
    "0.8M": ({"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 65, "bias": False}, 12),
    "10.6M": ({"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65, **LLAMA}, 4),
    "23.2M": ({"n_layer": 6, "n_head": 8, "n_embd": 512, "block_size": 256, "vocab_size": 8192}, 4),
}
STEPS, STRATEGIES = 40, ("ddp", "fsdp", "diloco")
TIMED = {"n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 64}  # 25M parameters: four buckets
TIMED_BATCH, TIMED_STEPS, MBITS = 4, 8, (100, 200, 400)
CHARACTERS = 65  # of tiny shakespeare


def forecast(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure memory, bytes and time; return one row per round."""
    rows = []
    for i in range(args.rounds):
        here = folder / str(i)
        rows.append(peak_memory() | sent_bytes(here) | step_times(here))
    return rows


def peak_memory() -> dict[str, float]:
    """Compare the peak memory of one device, and of two with DDP and FSDP, for every model."""
    row = {}
    for name, (values, batch) in MODELS.items():
        for strategy in ("", "ddp", "fsdp"):
            devices = 2 if strategy else 1
            parts = memory(sizes_of(values), Parallelism(strategy, devices, devices, 1, 1), batch)
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if strategy else []
            command = [sys.executable, *torchrun, str(PEAK_MEMORY), json.dumps(values), str(batch), strategy]
            measured = float(run(command).splitlines()[-1])
            row |= compared(f"{name}, {strategy or 'one device'}: peak MB", parts["peak"] / 1e6, measured / 1e6)
    return row


def sent_bytes(folder: Path, strategies: Sequence[str] = STRATEGIES, *, precision: str = "32-true") -> dict[str, float]:
    """Compare the bytes per step of two processes on one host, in the second half of a run.

    gloo reduces and scatters gradients of FSDP by an all-reduce, which sends twice as much as NCCL's ring.
    """
    values = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "bias": False, "position": "rope"}
    sizes, row = sizes_of(values | {"vocab_size": CHARACTERS}, bfloat16=precision == "bf16-mixed"), {}
    path = os.pathsep.join([str(ROOT / "scripts/bench"), *filter(None, [os.environ.get("PYTHONPATH")])])
    for strategy in strategies:
        with namespace("forecast-lo") as inside:
            start = [*inside, "env", f"PYTHONPATH={path}", sys.executable, "-m", "torch.distributed.run"]
            out = folder / strategy
            count = ["+callbacks.sent._target_=sent_bytes.SentBytes", f"+callbacks.sent.out={out}.json"]
            settings = [f"trainer={strategy}", f"trainer.precision={precision}", *count]
            run([*start, "--standalone", "--nproc-per-node=2", *training(out, 2 * STEPS), *settings])
        half, whole = json.loads(Path(f"{out}.json").read_text())
        predicted = step_time(sizes, Parallelism(strategy, 2, 2, 1, 1), 0)["sent"]
        predicted += sizes.weights / 2 if strategy == "fsdp" else 0  # of gloo
        measured = (whole - half) / STEPS / 2
        row |= compared(f"model=nano, {strategy}: MB sent per device and step", predicted / 1e6, measured / 1e6)
    return row


def step_times(folder: Path) -> dict[str, float]:
    """Compare the time per step of two hosts.

    Compute is measured, before and after: the speed of a shared machine changes.
    """
    shape = [f"model.{name}={value}" for name, value in TIMED.items()]
    sizes = sizes_of(TIMED | {"vocab_size": CHARACTERS, "bias": False, "position": "rope"})
    with two_hosts() as hosts:
        compute = seconds_alone(folder / "alone", shape)
        row = {}
        for mbit in MBITS:
            out = folder / f"link{mbit}"
            train_on_hosts(hosts, mbit, [*training(out, TIMED_STEPS, 2 * TIMED_BATCH), "trainer=ddp", *shape])
            before, compute = compute, seconds_alone(folder / f"alone{mbit}", shape)
            spread = Parallelism("ddp", 2, 1, mbit * 1e6 / 8, mbit * 1e6 / 8)
            predicted = step_time(sizes, spread, (before + compute) / 2)["step"]
            row[f"{mbit} Mbit/s: compute s per step"] = (before + compute) / 2
            row |= compared(f"{mbit} Mbit/s, ddp: s per step", predicted, seconds_per_step(out))
    return row


@contextmanager
def two_hosts(delay: float = 0) -> Iterator[list[list[str]]]:
    """Join two network namespaces; yield for each the command that runs a program in it.

    Args:
        delay: seconds from one to the other. Not every kernel has `netem`, so threads hold the packets back.
    """
    names = ["forecast-0", "forecast-1"]
    with ExitStack() as stack:
        hosts = [stack.enter_context(namespace(name)) for name in names]
        if delay:
            stack.enter_context(delayed_link(names, delay))
        else:
            ip("link", "add", names[0], "type", "veth", "peer", names[1])
        for i, name in enumerate(names):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
        yield hosts


@contextmanager
def delayed_link(names: Sequence[str], delay: float) -> Iterator[None]:
    """Add two network devices; what one sends arrives at the other after `delay` seconds."""
    from fcntl import ioctl  # not on Windows

    attach, ethernet_without_header = 0x400454CA, 0x1002  # TUNSETIFF; IFF_TAP | IFF_NO_PI
    ended = threading.Event()
    with ExitStack() as stack:
        taps = [stack.enter_context(open("/dev/net/tun", "r+b", buffering=0)) for _ in names]
        for tap, name in zip(taps, names, strict=True):
            ioctl(tap, attach, struct.pack("16sH", name.encode(), ethernet_without_header))

        def forward(source: Any, target: Any) -> None:
            packets: deque[tuple[float, bytes]] = deque()
            while not ended.is_set():
                wait = packets[0][0] - time.monotonic() if packets else 0.1
                if select([source], [], [], max(0, wait))[0]:
                    packets.append((time.monotonic() + delay, source.read(1 << 16)))
                while packets and packets[0][0] <= time.monotonic():
                    target.write(packets.popleft()[1])

        threads = [threading.Thread(target=forward, args=ends) for ends in (taps, taps[::-1])]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def train_on_hosts(hosts: Sequence[Sequence[str]], mbit: int, train: Sequence[str]) -> None:
    """Train with one process per host over a link of `mbit` Mbit/s."""
    commands = []
    for i, inside in enumerate(hosts):
        rate = ["rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms"]
        run(["tc", "-n", f"forecast-{i}", "qdisc", "replace", "dev", f"forecast-{i}", "root", "tbf", *rate])
        start = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={i}", "--nproc-per-node=1"]
        start += ["--master-addr=10.77.0.1", "--master-port=29500"]
        commands.append([*inside, "env", f"GLOO_SOCKET_IFNAME=forecast-{i}", sys.executable, *start, *train])
    together(commands)


def seconds_alone(folder: Path, shape: Sequence[str]) -> float:
    """Return the mean seconds per step of two runs on one device each, at the same time."""
    runs = [folder / "0", folder / "1"]
    together([[sys.executable, *training(run, TIMED_STEPS, TIMED_BATCH), "trainer=cpu", *shape] for run in runs])
    return sum(map(seconds_per_step, runs)) / len(runs)


def compared(name: str, predicted: float, measured: float) -> dict[str, float]:
    """Return the cells of a comparison."""
    return {f"{name}, predicted": predicted, f"{name}, measured": measured, f"{name}, ratio": predicted / measured}


def sizes_of(values: Mapping[str, Any], *, bfloat16: bool = False) -> Sizes:
    """Return the sizes of a model with AdamW."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**values)).to("meta")
    return Sizes(model, adamw(model, **ADAMW), bfloat16=bfloat16)


def training(folder: Path, steps: int, batch: int = 12) -> list[str]:
    """Return arguments of Python that train on tiny shakespeare and, until the end, communicate only gradients."""
    settings = [f"max_steps={steps}", f"eval_every={steps}", f"log_every={max(1, steps // 5)}", "eval_batches=1"]
    trainer = ["trainer.accelerator=cpu", "trainer.precision=32-true"]
    data = [f"data.path={text_file()}", f"data.batch_size={batch}"]
    return [str(TRAIN), *ONLY_TRAINING, *settings, *trainer, *data, f"hydra.run.dir={folder}"]


def seconds_per_step(folder: Path) -> float:
    """Return the seconds per step of a run after its first row of metrics."""
    rows = [row for row in metrics(folder) if row["seconds"]]
    first, last = ((int(row["step"]), float(row["seconds"])) for row in (rows[0], rows[-1]))
    return (last[1] - first[1]) / (last[0] - first[0])


@contextmanager
def namespace(name: str) -> Iterator[list[str]]:
    """Add a network namespace with a loopback device; yield the command that runs a program in it."""
    if os.geteuid() != 0:
        raise UserError("the benchmark forecast adds network namespaces, which needs root")
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", name]
    finally:
        ip("netns", "delete", name)


def transmitted(name: str, device: str) -> int:
    """Return the bytes that a device of a namespace has sent."""
    (found,) = json.loads(run(["ip", "-n", name, "-json", "-statistics", "link", "show", "dev", device]))
    return int(found["stats64"]["tx"]["bytes"])


def ip(*arguments: str) -> None:
    """Run ip."""
    run(["ip", *arguments])


def run(command: Sequence[str]) -> str:
    """Run a command and return its output."""
    return together([command])[0]


def together(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run commands at the same time, with one thread each, and return their outputs."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise UserError(f"{' '.join(process.args)} exited with code {process.returncode}: {errors[-5000:]}")
    return [output for output, _ in outputs]
