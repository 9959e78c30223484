"""Errors are one line on stderr, with an exit code; files are written at once."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
from corpora import sha256
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from small_runs import ROOT, composed

from minigpt.utils.cli import cli_entrypoint, explain
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.files import PARTIAL, atomic_write, checksums
from minigpt.utils.ranks import RANK_ZERO_PID, is_rank_zero, rank_variables
from minigpt.utils.signals import Interrupted, raise_on_signal
from minigpt.utils.terminal import warn


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("MINIGPT_TRACEBACK", raising=False)


def failing(error):
    @cli_entrypoint
    def program():
        raise error

    return program


# Of an extension module that a signal interrupted
IMPORT_ERROR = ImportError("initialization failed")
IMPORT_ERROR.__cause__ = Interrupted(signal.SIGTERM)
SHOWN = "(MINIGPT_TRACEBACK=1 shows where)"
FULL = "no space left on device; free some space, or choose another folder"
EVIL = "a\x1b]0;owned\x07\x9b2J\u202e b\x7f"
SEEN = r"a\x1b]0;owned\x07\x9b2J\u202e b\x7f"
CASES = [
    (UserError(EVIL), f"error: {SEEN}", 2),
    (RunError("the loss is nan"), "error: the loss is nan", 1),
    (KeyboardInterrupt(), "interrupted", 130),
    (Interrupted(signal.SIGTERM), "interrupted by SIGTERM", 143),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/big/last"), f"error: /big/last: {FULL}", 1),
    (
        OSError(errno.EACCES, "Permission denied", "a\nb"),
        "error: a b: permission denied; choose another folder",
        2,
    ),
    (
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        f"error: BrokenPipeError: [Errno 32] Broken pipe {SHOWN}",
        1,
    ),
    (
        MemoryError(),
        "error: out of memory; lower data.batch_size (or --num-samples), or choose a smaller model",
        1,
    ),
    (IMPORT_ERROR, "interrupted by SIGTERM", 143),
    (UserError("x" * 1_000_000), f"error: {'x' * 993} …", 2),
    (
        ZeroDivisionError("division by zero"),
        f"error: ZeroDivisionError: division by zero {SHOWN}",
        1,
    ),
]


@pytest.mark.parametrize(("error", "output", "code"), CASES, ids=lambda value: type(value).__name__)
def test_an_error_is_one_line_on_stderr_and_an_exit_code(capsys, error, output, code):
    with pytest.raises(SystemExit) as ended:
        failing(error)()
    assert ended.value.code == code
    assert capsys.readouterr() == ("", f"{output}\n")


def test_a_program_returns_its_value():
    assert cli_entrypoint(lambda a, *, b: a + b)(1, b=2) == 3


@pytest.mark.parametrize(
    ("error", "ranks"),
    [(UserError("bad input"), 1), (RunError("lost"), 2), (Interrupted(signal.SIGTERM), 1)],
)
def test_an_error_of_all_ranks_is_printed_by_rank_zero(monkeypatch, capsys, error, ranks):
    monkeypatch.setenv(RANK_ZERO_PID, "1")
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit):
            failing(error)()
    assert capsys.readouterr().err.count("\n") == ranks


def test_a_warning_is_a_printable_line_by_rank_zero(monkeypatch, capsys):
    monkeypatch.setenv(RANK_ZERO_PID, "1")
    for rank in "012":
        monkeypatch.setenv("LOCAL_RANK", rank)
        warn(EVIL)
    assert capsys.readouterr() == ("", f"warning: {SEEN}\n")


KINDS = {
    "torchrun": {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    },
    "srun": {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "host[7-8]",
    },
    "Lightning": {"LOCAL_RANK": "1", "MINIGPT_RANK_ZERO_PID": "1"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_is_a_rank_only_with_all_variables_of_its_kind(kind, monkeypatch):
    for name, value in KINDS[kind].items():
        monkeypatch.setenv(name, value)
    assert not is_rank_zero()
    for name in KINDS[kind]:
        with monkeypatch.context() as patch:
            patch.delenv(name)
            assert is_rank_zero(), f"without {name}"


def test_a_step_of_one_task_and_a_process_that_rank_zero_starts_are_no_ranks(monkeypatch):
    # As `srun --pty bash`; and whatever a callback of a training on several devices starts
    changed = {"SLURM_STEP_NUM_TASKS": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**KINDS["srun"], **KINDS["Lightning"], **changed}.items():
        monkeypatch.setenv(name, value)
    assert rank_variables() == ()


MISTYPED = {
    "optimizer.lrr=1e-3": "optimizer.lrr does not exist (did you mean optimizer.lr?); --help",
    "frobnicate=1": "frobnicate does not exist;",
    "max_steps": "cannot parse the override max_steps; in a shell, write key=value",
    "model=true": "Config group override must be a string",
}


@pytest.mark.parametrize("override", MISTYPED)
def test_a_mistyped_override_is_explained_by_what_there_is(override):
    with pytest.raises(Exception, match=r".") as raised:
        composed(override)
    message, code = explain(raised.value)
    assert code == 2
    assert MISTYPED[override] in message


def test_an_error_of_a_function_that_hydra_calls_is_not_explained_as_one_of_hydra():
    with pytest.raises(InstantiationException) as raised:
        instantiate({"_target_": "statistics.mean", "data": []})
    message = f"error: StatisticsError: mean requires at least one data point {SHOWN}"
    assert explain(raised.value) == (message, 1)


def run(body, **streams):
    imports = "from minigpt.utils.cli import *; from minigpt.utils.signals import *"
    program = (
        f"{imports}; exit_on_requeue_signal()\n@cli_entrypoint\ndef main():\n    {body}\nmain()\n"
    )
    # Python buffers what it prints into a pipe or a file, unless this variable is set.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=env, stderr=subprocess.PIPE, encoding="utf-8", **streams
    )
    return done.returncode, done.stderr


def test_characters_that_the_encoding_of_stdout_lacks_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    cli_entrypoint(print)("… Δ é")
    assert written.getvalue() == rb"\u2026 \u0394 \xe9" + os.linesep.encode()


def test_a_closed_pipe_is_no_error_and_hides_none():
    reader, writer = os.pipe()
    os.close(reader)
    assert run("for i in range(100_000): print(i)", stdout=writer) == (0, "")
    assert run("print('x' * 1_000_000); os._exit(3)", stdout=writer) == (0, "")
    lost = run("print('a few words'); raise ValueError('lost')", stdout=writer)
    assert lost == (1, f"error: ValueError: lost {SHOWN}\n")
    os.close(writer)
    assert run("print('no stream')", preexec_fn=partial(os.close, 1)) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk_is_an_error_in_one_line():
    with open("/dev/full", "w", encoding="utf-8") as full:
        assert run("print('a few words')", stdout=full) == (1, f"error: {FULL}\n")


@pytest.mark.parametrize(
    ("start", "stderr"), [("", ""), ("with raise_on_signal(): ", "interrupted by SIGUSR1\n")]
)
def test_a_preempted_run_exits_with_the_requeue_code_also_before_it_starts(start, stderr):
    assert run(f"{start}os.kill(os.getpid(), REQUEUE_SIGNAL)") == (75, stderr)


def test_a_signal_is_not_swallowed_by_except_exception():
    with pytest.raises(Interrupted), raise_on_signal(), suppress(Exception):
        signal.raise_signal(signal.SIGTERM)


def test_processes_with_one_id_write_a_file_at_once_and_it_is_that_of_one_of_them(tmp_path):
    # As those of two containers do that share a data folder
    file = tmp_path / "file"
    with atomic_write(file) as one:
        one.write_text("one")
        with atomic_write(file) as other:
            assert fnmatch(other.name, f".file.{PARTIAL}")
            other.write_text("oth")  # half of it
            one.write_text("one whole")
    assert file.read_text(encoding="utf-8") == "one whole"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "name", ["a" * 255, "訓" * 85, "𠀋" * 63], ids=["1 byte", "3 bytes", "4 bytes"]
)
def test_a_file_of_the_longest_name_is_written(tmp_path, name):
    with atomic_write(tmp_path / name) as partial:
        partial.write_text("fox")
    (file,) = tmp_path.iterdir()
    assert (file.name, file.read_text(encoding="utf-8")) == (name, "fox")


def test_checksums_are_cached_until_the_file_is_written(tmp_path):
    file = tmp_path / "a.txt"
    folder = tmp_path / "data"
    cache = folder / "checksums.json"
    file.write_bytes(b"first")
    assert checksums([file], folder) == [sha256(b"first")]
    kept = json.loads(cache.read_text(encoding="utf-8"))
    assert list(kept.values()) == [sha256(b"first")]
    cache.write_text(json.dumps(dict.fromkeys(kept, "remembered")), encoding="utf-8")
    assert checksums([file], folder) == ["remembered"]  # from the cache
    times = file.stat()
    file.write_bytes(b"later")  # same size and time
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert checksums([file], folder) == [sha256(b"later")]
    cache.write_text("damaged")
    assert checksums([file], folder) == [sha256(b"later")]
    assert checksums([file], file) == [sha256(b"later")]  # which cannot be written
