"""How long ranks wait for each other, and the thread that answers when a rank is lost."""

import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from minigpt.distributed import lost_ranks

# On a busy host, the process of the store does not run for 6 s, and Python takes 4 s to end.
SCRIPT = """
import signal, subprocess, sys, threading, time
from torch.distributed import TCPStore
from minigpt.distributed.lost_ranks import LostRanks

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(4)

serve = "import time; from torch.distributed import TCPStore; store = TCPStore('127.0.0.1', 0, is_master=True, "
serve += "wait_for_workers=False); print(store.port, flush=True); time.sleep(60)"
server = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
slow, ranks = Slow(), LostRanks(timeout=30)
ranks.rank, ranks.store = 0, TCPStore("127.0.0.1", int(server.stdout.readline()))
ranks.answering = threading.Thread(target=ranks._answer, args=(ranks.store.clone(),), daemon=True)
server.send_signal(signal.SIGSTOP)
ranks.answering.start()
time.sleep(2)  # it asks after one
later = f"sleep 6; kill -CONT {server.pid}; sleep 5; kill {server.pid}"
subprocess.Popen(["sh", "-c", later], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
ranks.close()
"""


@pytest.mark.slow
def test_a_run_whose_store_answers_late_ends_in_order() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_ranks_wait_for_the_timeout_from_the_first_step_on_and_longer_only_while_they_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[timedelta] = []
    monkeypatch.setattr(lost_ranks, "set_timeout", waits.append)
    callback: Any = lost_ranks.LostRanks(timeout=60)
    trainer, model = SimpleNamespace(), nn.Linear(1000, 1000)
    for batch in (0, 1):
        callback.on_train_batch_start(trainer, model, None, batch)
    callback.on_save_checkpoint(trainer, model, {})
    callback.on_train_batch_start(trainer, model, None, 2)
    minute, saving = timedelta(minutes=1), timedelta(seconds=60 + 16 * 1_001_000 / 1e6)
    assert waits == [minute, saving, minute]
