"""Errors are one line on stderr, with an exit code that distinguishes bad input from a failed run."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from minigpt.utils.cli import cli_entrypoint, explain
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.signals import REQUEUE_SIGNAL, Interrupted, raise_on_signal
from minigpt.utils.terminal import did_you_mean, warn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("MINIGPT_TRACEBACK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def failing(error):
    @cli_entrypoint
    def program():
        raise error

    return program


CASES = [
    (UserError("n_head=3 is odd"), "error: n_head=3 is odd", 2),
    (RunError("the loss is nan"), "error: the loss is nan", 1),
    (KeyboardInterrupt(), "interrupted", 130),
    (Interrupted(signal.SIGTERM), "SIGTERM", 143),
    (
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/big/last.safetensors"),
        "/big/last.safetensors: no space left",
        1,
    ),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "no space left", 1),
    (OSError(errno.EACCES, os.strerror(errno.EACCES), "/root/runs"), "/root/runs: permission denied", 2),
    (MemoryError(), "out of memory", 1),
    (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero", 1),
    (KeyError("n_head"), "KeyError: 'n_head'", 1),
    (ValueError(), "ValueError", 1),
]


@pytest.mark.parametrize(("error", "output", "code"), CASES, ids=lambda value: type(value).__name__)
def test_an_error_is_one_line_on_stderr_and_an_exit_code(capsys, error, output, code):
    with pytest.raises(SystemExit) as ended:
        failing(error)()
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert output in err
    assert "Traceback" not in err
    assert explain(error) == (err.rstrip("\n"), code)


@pytest.mark.parametrize(
    "error",
    [
        UserError("one\ntwo\n\tthree"),
        RunError("one\n\ntwo\nthree\n"),
        RuntimeError("one\r\ntwo\nthree"),
        OSError(errno.EACCES, "Permission denied", "one\ntwo\nthree"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_message_of_several_lines_becomes_one(capsys, error):
    with pytest.raises(SystemExit):
        failing(error)()
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert all(word in line for word in ("one", "two", "three"))


def test_only_an_unexpected_error_mentions_how_to_see_its_traceback():
    assert "MINIGPT_TRACEBACK=1" in explain(IndexError("tuple index out of range"))[0]
    assert not any("MINIGPT_TRACEBACK" in explain(error)[0] for error, _, _ in CASES[:8])


@pytest.mark.parametrize("error", [UserError("x"), RuntimeError("x"), KeyboardInterrupt()], ids=repr)
def test_the_traceback_is_shown_on_demand(monkeypatch, error):
    monkeypatch.setenv("MINIGPT_TRACEBACK", "1")
    with pytest.raises(type(error)) as raised:
        failing(error)()
    assert raised.value is error


def test_a_program_that_succeeds_returns_what_it_returns(capsys):
    assert cli_entrypoint(lambda a, *, b: a + b)(1, b=2) == 3
    assert capsys.readouterr() == ("", "")


def test_a_program_may_choose_its_own_exit_code(capsys):
    with pytest.raises(SystemExit) as ended:
        failing(SystemExit(7))()
    assert ended.value.code == 7
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "ranks"), [(UserError("bad input"), [0]), (RunError("lost"), [0, 1]), (Interrupted(signal.SIGTERM), [0])]
)
def test_an_error_of_all_ranks_is_printed_by_rank_zero(monkeypatch, capsys, error, ranks):
    output = []
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(SystemExit):
            failing(error)()
        output += [rank] * capsys.readouterr().err.count("\n")
    assert output == ranks


def test_a_warning_is_printed_by_rank_zero(monkeypatch, capsys):
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        warn("the text is short")
    assert capsys.readouterr() == ("", "warning: the text is short\n")


# Names that were nearly right.


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_step", "max_steps"),
        ("optimizer.lrr", "optimizer.lr"),
        ("learning_rate", None),
        ("n_head", "model.n_head"),
        ("zzz", None),
        ("", None),
        ("optimizer.lr", None),
    ],
)
def test_the_closest_known_name_is_named_or_none(name, meant):
    known = ["max_steps", "model.n_head", "model.n_embd", "optimizer.lr", "seed"]
    assert did_you_mean(name, known) == (f" (did you mean {meant}?)" if meant else "")


def test_where_nothing_is_known_nothing_is_suggested():
    assert did_you_mean("max_steps", []) == ""


@pytest.mark.parametrize(
    ("override", "output"),
    [
        ("optimizer.lrr=1e-3", ["optimizer.lrr", "did you mean optimizer.lr?"]),
        ("max_step=3", ["max_step", "did you mean max_steps?"]),
        ("model=bab", ["model=bab", "did you mean baby?", "gpt2_xl, nano"]),
        ("max_steps", ["override max_steps", "key=value"]),
        ("lr=1e-3", ["lr does not exist (did you mean optimizer.lr?)"]),
        ("tokenizer.vocab_size=512", ["tokenizer.vocab_size does not exist here; it belongs to tokenizer=bpe"]),
        ("frobnicate=1", ["frobnicate does not exist;"]),
        ("model=true", ["Config group override must be a string"]),
    ],
)
def test_a_mistyped_override_is_explained_by_what_there_is(override, output):
    with (
        initialize_config_dir(str(ROOT / "configs"), version_base="1.3"),
        pytest.raises(Exception, match=r".") as raised,
    ):
        compose("train", overrides=[override])
    message, code = explain(raised.value)
    assert code == 2
    assert message.startswith("error: ")
    assert "\n" not in message
    for part in output:
        assert part in message


# A closed pipe.


def run_into(stdout, body):
    program = f"from minigpt.utils.cli import cli_entrypoint\n@cli_entrypoint\ndef main():\n    {body}\nmain()\n"
    # Python buffers what it prints into a pipe or file, unless contents otherwise.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("body", ["for i in range(100_000): print(i)", "print('a few words')"], ids=["much", "little"])
def test_a_closed_pipe_is_no_error(closed_pipe, body):
    done = run_into(closed_pipe, body)
    assert done.stderr == ""
    assert done.returncode == 0


def test_an_error_is_printed_even_if_stdout_is_closed(closed_pipe):
    done = run_into(closed_pipe, "print('a few words'); raise MemoryError")
    assert done.returncode == 1
    assert "out of memory" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk_is_an_error_in_one_line():
    with open("/dev/full", "w") as full:
        done = run_into(full, "print('a few words')")
    assert done.returncode == 1
    assert "no space left" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_printed_line_has_no_control_characters_and_a_bounded_length(capsys):
    evil = "a\x1b]0;owned\x07\x9b2J\u202e b\x7f"
    with pytest.raises(SystemExit):
        failing(UserError(evil))()
    warn(evil)
    output = capsys.readouterr().err
    assert output == "".join(f"{kind}: a\\x1b]0;owned\\x07\\x9b2J\\u202e b\\x7f\n" for kind in ("error", "warning"))
    line, _ = explain(UserError("x" * 1_000_000))
    assert line.endswith("x …")
    assert len(line) < 2000


def test_a_signal_is_not_swallowed_by_except_exception():
    with pytest.raises(Interrupted), raise_on_signal(), suppress(Exception):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.skipif(not REQUEUE_SIGNAL, reason="there is no SIGUSR1")
@pytest.mark.parametrize(("started", "stderr"), [(False, ""), (True, "interrupted by SIGUSR1\n")])
def test_a_preempted_run_exits_with_the_requeue_code_also_before_it_starts(started, stderr):
    program = (
        "import os; from minigpt.utils.cli import *; from minigpt.utils.signals import *; exit_on_requeue_signal()"
    )
    act = "os.kill(os.getpid(), REQUEUE_SIGNAL)"
    body = f"\n    with raise_on_signal(): {act}" if started else f" {act}"
    program += f"\n@cli_entrypoint\ndef main():{body}\nmain()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, stderr)


@pytest.mark.parametrize(("cause", "code"), [(KeyboardInterrupt(), 130), (Interrupted(signal.SIGTERM), 143)])
def test_a_signal_during_the_import_of_an_extension_module_is_a_signal(cause, code):
    """pybind11 raises an ImportError from any exception in the initialization of its module."""
    error = ImportError("initialization failed")
    error.__cause__ = cause
    assert explain(error) == explain(cause)
    assert explain(error)[1] == code
