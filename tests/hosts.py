"""Hosts on one machine: network namespaces with an address and a host name of their own, joined by
a switch.

`with start_hosts(2, folder) as hosts:` needs root and iproute2. Processes of a host see its network
alone; all hosts share the disk of the machine.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from small_runs import wait_until

from minigpt.runs.callbacks.shutdown import GracefulShutdown

needs_hosts = pytest.mark.skipif(
    os.name != "posix"
    or os.geteuid() != 0
    or not all(map(shutil.which, ("ip", "nsenter", "unshare"))),
    reason="needs root, iproute2 and util-linux: apt-get install iproute2 util-linux",
)

# In namespaces of mounts and of the host name; nothing of it stays after the process.
_ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


class Hosts:
    """Up to 26 hosts, named `a`, `b`, …; a host is given by its number, from 0."""

    def __init__(self, n: int, folder: Path) -> None:
        self.names = [chr(ord("a") + host) for host in range(n)]
        self.addresses = [f"10.83.0.{host + 1}" for host in range(n)]
        self.folder = folder
        self._table = folder / "etc_hosts"
        self._switch, *self._namespaces = [
            f"minigpt-{os.getpid()}-{name}" for name in ("switch", *self.names)
        ]

    def run(
        self, host: int, command: Sequence[str], env: Mapping[str, str] = {}, **options: Any
    ) -> Any:
        """Start a command on a host; options are those of `subprocess.Popen`."""
        # `ip netns exec` would hide /sys/fs/cgroup of SLURM
        network = f"--net=/run/netns/{self._namespaces[host]}"
        start = ["nsenter", network, "unshare", "--uts", "--mount", "sh", "-c", _ENTER]
        return subprocess.Popen(
            [*start, str(self._table), self.names[host], *command],
            env={**os.environ, **env},
            **options,
        )

    def kill(self, host: int) -> None:
        _kill(self._namespaces[host])

    def set_link(self, host: int, state: str) -> None:
        """Take the link of a host "down", or "up"."""
        _ip("-n", self._switch, "link", "set", "dev", self.names[host], state)

    def _start(self) -> None:
        self._table.write_text(
            "127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, self.addresses, self.names)),
            encoding="utf-8",
        )
        for namespace in (self._switch, *self._namespaces):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host, namespace in enumerate(self._namespaces):
            peer = ["type", "veth", "peer", "name", "eth0", "netns", namespace]
            link = ["add", "name", self.names[host], "master", "bridge"]
            _ip("-n", self._switch, "link", *link, *peer)
            self.set_link(host, "up")
            _ip("-n", namespace, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")

    def _stop(self) -> None:
        for namespace in (*self._namespaces, self._switch):
            if namespace in _ip("netns", "list"):
                _kill(namespace)
                _ip("netns", "del", namespace)


@contextmanager
def start_hosts(n: int, folder: Path) -> Iterator[Hosts]:
    hosts = Hosts(n, folder)
    try:
        hosts._start()
        yield hosts
    finally:
        hosts._stop()


class Slow(Callback):
    """Take a tenth of a second for every step, and longer for those of fewer than three ranks."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(0.1 if trainer.world_size >= 3 else 1.5)


class Hold(Callback):
    """Hold a new run after its sixth step until a signal ends it."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.new = trainer.global_step == 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        (shutdown,) = (each for each in trainer.callbacks if isinstance(each, GracefulShutdown))
        if self.new and trainer.global_step == 6:
            wait_until(lambda: shutdown.received)


def _ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], capture_output=True, encoding="utf-8", check=True
    ).stdout


def _kill(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
