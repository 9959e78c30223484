"""End a run that lost a rank, because its process was killed or its host lost its network, with a line that names it.

Collectives alone raise an error with an address at a neighbor of the lost rank, and on other ranks after 30 minutes. So
every rank has a connection to rank 0, whose other end the kernel checks, also while Python is busy. When one closes,
rank 0 sends the lost ranks to the others, and a rank that is still in a collective after `WAIT_SECONDS` exits.
"""

import json
import os
import platform
import signal
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from secrets import compare_digest, token_hex
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback

from minigpt.runs.collectives import gather_objects
from minigpt.runs.run_dir import short_path, write_failure
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.terminal import log

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a network is lost after 30 s
SETTLE_SECONDS = 3  # in which the ranks of a host end
WAIT_SECONDS = 10
_LOOPBACK = "127.0.0.1"
_OVER = "over"  # sent at the end of the training


class LostRanks(Callback):
    """Watch the ranks of a training."""

    connections: dict[int, socket.socket] = {}  # to all ranks on rank 0, and to rank 0

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if trainer.world_size == 1:
            return
        self.trainer, self.rank = trainer, trainer.global_rank
        self.lost: list[int] = []  # on rank 0, in the order of their loss
        self.verdict: Future[list[int]] = Future()
        self.ended = threading.Event()  # the main thread left the training
        several = trainer.num_nodes > 1
        server = _listen(several) if self.rank == 0 else None
        mine = platform.node(), server.getsockname()[1] if server else 0, token_hex()
        self.hosts, (port, *_), (token, *_) = zip(*gather_objects(mine), strict=True)
        if server:
            self.connections = _accept(server, token, trainer.world_size - 1)
        else:
            address = os.environ["MASTER_ADDR"] if several else _LOOPBACK
            self.connections = {0: socket.create_connection((address, port))}
            self._send(f"{token} {self.rank}")
        for rank, connection in self.connections.items():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():  # macOS has other names for them
                if hasattr(socket, option):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            threading.Thread(target=self._follow, args=(rank, connection), daemon=True).start()

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.connections:
            self.ended.set()
            self._send(_OVER)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, Exception):  # a signal, which all ranks receive
            self.teardown(trainer, pl_module, "fit")

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise for an error in training: one that names the lost ranks, if there are any."""
        if not self.connections:
            return error
        self.ended.set()
        if self.rank == 0 and isinstance(error, UserError):
            return error
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the ranks of a host after the first
        try:
            lost = self.verdict.result(WAIT_SECONDS)
        except TimeoutError:  # the error is of this rank alone
            if isinstance(error, UserError):
                error.of_all_ranks = False
            return error
        if isinstance(error, UserError):
            return error
        explained = RunError(self._describe(lost))
        explained.of_all_ranks = not self._prints(lost)
        return explained

    def _follow(self, rank: int, connection: socket.socket) -> None:
        """Wait until the training ends or a connection closes; on rank 0, send the lost ranks to the others."""
        try:
            message = connection.makefile(encoding="utf-8").readline().strip()
        except OSError:  # the other end does not answer
            message = ""
        if message == _OVER:
            return
        if self.rank == 0:
            self.lost.append(rank)
            if self.lost[0] != rank:
                return  # the thread of the first one reports this one too
            time.sleep(SETTLE_SECONDS)
            lost = sorted(self.lost)
            self._send(json.dumps(lost))
        else:
            lost = json.loads(message or "[0]")
        self.verdict.set_result(lost)
        if not self.ended.wait(WAIT_SECONDS):
            self._exit(lost)

    def _exit(self, lost: list[int]) -> None:
        """End the process although its main thread is in a collective; checkpoints are renamed when complete."""
        reason = self._describe(lost)
        if self.rank == 0:
            write_failure(Path(self.trainer.default_root_dir), reason)
        if self._prints(lost):
            log(f"error: {reason}")
        os._exit(RunError.exit_code)

    def _describe(self, lost: list[int]) -> str:
        ranks = ", ".join(f"rank {rank} (host {self.hosts[rank]})" for rank in lost)
        where = f"after step {self.trainer.global_step} of {self.trainer.max_steps}"
        folder = short_path(self.trainer.default_root_dir)
        return f"{ranks} ended or lost the network {where}; resume with resume=auto hydra.run.dir={folder}"

    def _prints(self, lost: list[int]) -> bool:
        """Whether this is the first rank of its host that is left."""
        per_host = self.trainer.num_devices
        first = self.rank - self.rank % per_host
        return self.rank == min({*range(first, first + per_host)} - {*lost})

    def _send(self, message: str) -> None:
        for connection in self.connections.values():
            with suppress(OSError):  # it is lost
                connection.sendall(f"{message}\n".encode())


def _listen(several_hosts: bool) -> socket.socket:
    if several_hosts and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("" if several_hosts else _LOOPBACK, 0))


def _accept(server: socket.socket, token: str, n: int) -> dict[int, socket.socket]:
    """Accept the connections of `n` ranks; other programs do not have the token."""
    connections: dict[int, socket.socket] = {}
    server.settimeout(WAIT_SECONDS)
    while len(connections) < n:
        connection = server.accept()[0]
        with suppress(OSError, ValueError):
            connection.settimeout(WAIT_SECONDS)
            given, rank = connection.makefile(encoding="utf-8").readline().split()
            connection.settimeout(None)
            if compare_digest(given, token):
                connections[int(rank)] = connection
    return connections
