"""Hosts on one machine: network namespaces with an address and a host name of their own, joined by a switch.

`with start_hosts(2, folder) as hosts:` needs root and iproute2. Processes of a host see its network alone, and run in
`hosts.disk`, a folder that all hosts share.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

needs_hosts = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare"))),
    reason="needs root, iproute2 and util-linux: apt-get install iproute2 util-linux",
)

# In namespaces of mounts and of the host name; nothing of it stays after the process.
_ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && cd "$2" && shift 2 && exec "$@"'


class Hosts:
    """Up to 26 hosts, named `a`, `b`, …; a host is given by its number, from 0."""

    def __init__(self, n: int, folder: Path) -> None:
        self.names = [chr(ord("a") + host) for host in range(n)]
        self.addresses = [f"10.83.0.{host + 1}" for host in range(n)]
        self.disk, self._table = folder / "disk", folder / "etc_hosts"
        self._namespaces = [f"minigpt-{os.getpid()}-{name}" for name in self.names]
        self._switch = f"minigpt-{os.getpid()}-switch"

    def run(self, host: int, command: Sequence[str], env: Mapping[str, str] = {}, **options: Any) -> Any:
        """Start a command on a host, in `disk`; options are those of `subprocess.Popen`."""
        network = f"--net=/run/netns/{self._namespaces[host]}"  # `ip netns exec` would hide /sys/fs/cgroup of SLURM
        start = ["nsenter", network, "unshare", "--uts", "--mount", "sh", "-c", _ENTER]
        place = [str(self._table), self.names[host], str(self.disk)]
        return subprocess.Popen([*start, *place, *command], env={**os.environ, **env}, **options)

    def processes(self, host: int) -> list[int]:
        """Return the ids of the live processes of a host."""
        return [int(pid) for pid in _ip("netns", "pids", self._namespaces[host]).split()]

    def disconnect(self, host: int) -> None:
        """Take the link of a host down."""
        _ip("-n", self._switch, "link", "set", "dev", self.names[host], "down")

    def reconnect(self, host: int) -> None:
        _ip("-n", self._switch, "link", "set", "dev", self.names[host], "up")

    def sent_bytes(self, host: int) -> int:
        """Return the number of bytes that a host has sent."""
        statistics = _ip("-n", self._namespaces[host], "-s", "link", "show", "eth0")
        return int(re.search(r"TX: .*\n\s*(\d+)", statistics)[1])  # type: ignore[index]

    def limit_bandwidth(self, bits_per_second: int) -> None:
        """Limit what each host sends."""
        for namespace in self._namespaces:
            rate = ["rate", str(bits_per_second), "burst", "256kb", "latency", "100ms"]
            subprocess.run(["tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate], check=True)

    def _start(self) -> None:
        self._table.write_text("127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, self.addresses, self.names)))
        self.disk.mkdir()
        for namespace in (self._switch, *self._namespaces):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for name, namespace, address in zip(self.names, self._namespaces, self.addresses, strict=True):
            peer = ["type", "veth", "peer", "name", "eth0", "netns", namespace]
            _ip("-n", self._switch, "link", "add", "name", name, "master", "bridge", *peer)
            _ip("-n", self._switch, "link", "set", "dev", name, "up")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")

    def _stop(self) -> None:
        present = _ip("netns", "list")
        for namespace in (*self._namespaces, self._switch):
            if namespace in present:
                for pid in _ip("netns", "pids", namespace).split():
                    subprocess.run(["kill", "-KILL", pid], stderr=subprocess.DEVNULL, check=False)  # it may have ended
                _ip("netns", "del", namespace)


@contextmanager
def start_hosts(n: int, folder: Path) -> Iterator[Hosts]:
    """Start `n` hosts with their disk in `folder`; kill their processes and remove them at the end."""
    hosts = Hosts(n, folder)
    try:
        hosts._start()
        yield hosts
    finally:
        hosts._stop()


class SlowAlone(Callback):
    """Take half a second for every step of a host alone, which would end before others come back."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(0.5 * (trainer.world_size == 1))


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
