"""The thread that answers when a rank is lost."""

import subprocess
import sys

import pytest

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
