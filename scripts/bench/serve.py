"""The server under load: clients that stream completions at once, compared with scripts/sample.py."""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, TRAIN, launch

CLIENTS = (1, 4, 16, 64)
N_TOKENS, N_REQUESTS = 400, 3  # per request, and per client


def serve(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure completions of the model of experiment=fast_cpu, which is trained for a few steps."""
    run = folder / "run"
    launch([sys.executable, TRAIN, "experiment=fast_cpu", "max_steps=20", *args.overrides, f"hydra.run.dir={run}"])
    rows = []
    for _ in range(args.rounds):
        row: dict[str, Any] = {}
        with server(run) as port:
            asyncio.run(load(port, 1, n_requests=1))  # loads the model
            for clients in CLIENTS:
                row |= asyncio.run(load(port, clients))
        for samples in (1, 16):
            name = f"{samples} client{'s'[: samples > 1]}"
            row[f"sample.py, {samples} sample{'s'[: samples > 1]}: tokens/s"] = speed = sampling_speed(run, samples)
            row[f"{name}: over sample.py"] = row[f"{name}: tokens/s"] / speed
        rows.append(row)
    return rows


@contextmanager
def server(run: Path) -> Iterator[int]:
    """Serve a run in its own process; yield the port."""
    command = [sys.executable, ROOT / "scripts" / "serve.py", run, "--port", "0", "--device", "cpu", "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            yield next(int(found[1]) for line in process.stderr if (found := re.search(r"http://[\d.]+:(\d+)", line)))
        finally:
            process.terminate()


async def load(port: int, clients: int, n_requests: int = N_REQUESTS) -> dict[str, float]:
    """Return the measurements of clients that each send some requests, one after another."""

    async def client(seed: int) -> list[list[float]]:
        return [await request(port, seed * n_requests + i) for i in range(n_requests)]

    start = time.perf_counter()
    times = [times for requests in await asyncio.gather(*map(client, range(clients))) for times in requests]
    seconds, name = time.perf_counter() - start, f"{clients} client{'s'[: clients > 1]}"
    first = [times[1] - times[0] for times in times]
    per_token = [(times[-1] - times[1]) / (len(times) - 2) for times in times]
    return {
        f"{name}: tokens/s": sum(len(times) - 1 for times in times) / seconds,
        f"{name}: first token ms, p50": 1e3 * statistics.median(first),
        f"{name}: first token ms, p99": 1e3 * percentile(first, 99),
        f"{name}: per token ms, p50": 1e3 * statistics.median(per_token),
        f"{name}: per token ms, p99": 1e3 * percentile(per_token, 99),
    }


async def request(port: int, seed: int) -> list[float]:
    """Stream a completion; return the time when it was requested, and those of its tokens."""
    body = {"model": "run", "prompt": "\n", "max_tokens": N_TOKENS, "seed": seed, "temperature": 0.8, "stream": True}
    content = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = [time.perf_counter()]
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n{content}".encode())
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    assert len(times) == 1 + N_TOKENS, f"the server sent {len(times) - 1} tokens"
    return times


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that this percentage of the values does not exceed."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def sampling_speed(run: Path, samples: int) -> float:
    """Return the tokens/s that scripts/sample.py prints."""
    options = ["--device", "cpu", "--prompt", "\n", "--max-new-tokens", N_TOKENS, "--num-samples", samples]
    command = [sys.executable, ROOT / "scripts" / "sample.py", run, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return float(re.findall(r"([\d,]+) tokens/s", done.stderr)[-1].replace(",", ""))
