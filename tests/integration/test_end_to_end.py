"""The scripts together, errors before any import, encodings; an imitation of Windows."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from processes import PRELOADED, Script
from refusals import refused
from small_runs import ROOT, SCRIPTS, one_line, small_run, table, wait_until

import minigpt
from minigpt.checkpoints.find import LAST, find_checkpoint, follow_latest
from minigpt.runs.overrides import literal, quote_override, quote_path
from minigpt.runs.run_dir import read_summary
from minigpt.utils import scripts
from minigpt.utils.scripts import shell_join


def test_train_then_sample(call, tmp_path):
    trained = call("train.py", "max_steps=2", "eval_every=1")
    assert trained.returncode == 0, trained.stderr
    assert "Traceback" not in trained.stderr
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert (tmp_path / "runs" / "latest").resolve() == folder
    (again,) = re.findall(r"^sample again +(.*)$", trained.stdout, re.MULTILINE)
    python, script, *arguments = again.split()
    assert (tmp_path / python, Path(script)) == (Path(sys.executable), ROOT / "scripts/sample.py")
    assert call("sample.py", *arguments).returncode == 0
    newest = call("sample.py", "--prompt", "1: the", "--max-new-tokens", "30")
    assert len(newest.stdout) == len("1: the") + 30 + 1
    assert "best.safetensors" in newest.stderr


def read_json(file):
    return json.loads(file.read_text(encoding="utf-8"))


DDP = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_signal_saves_a_checkpoint_and_ends_two_processes(small, tmp_path):
    folder = tmp_path / "run"
    long = ["max_steps=1000000", "eval_every=1000000", f"hydra.run.dir={folder}"]
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *small, *DDP, *long]
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
        wait_until(lambda: (folder / "metrics.csv").exists() or process.poll() is not None)
        process.terminate()  # a scheduler's SIGTERM reaches the first process
        stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 128 + signal.SIGTERM
    *_, resume, last = stderr.strip().splitlines()
    assert last == "interrupted by SIGTERM"
    summary = read_json(folder / "summary.json")
    assert summary["status"] == "interrupted"
    assert summary["steps"] > 0
    assert (folder / "curves.png").exists()
    steps = summary["steps"] + 1
    again = [*shlex.split(resume.removeprefix("resume with: ")), f"max_steps={steps}"]
    resumed = subprocess.run(again, capture_output=True, encoding="utf-8", check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert read_json(folder / "summary.json")["steps"] == steps


def test_a_wrong_setting_is_one_line_before_torch_is_imported(small, tmp_path):
    python = [sys.executable, "-X", "importtime"]
    command = [*python, str(ROOT / "scripts" / "train.py"), *small, "model.n_embd=101"]
    options = {"cwd": tmp_path, "capture_output": True, "encoding": "utf-8"}
    ended = subprocess.run(command, check=False, **options)
    assert ended.returncode == 2
    (line,) = (line for line in ended.stderr.splitlines() if not line.startswith("import time:"))
    assert line.startswith("error: model.n_embd must be divisible by model.n_head=2, got 101")
    assert "minigpt.model.config" in ended.stderr
    heavy = r"\| +(torch|lightning|wandb|matplotlib|numpy|scipy)(\.|$)"
    assert not re.search(heavy, ended.stderr, re.MULTILINE)


def test_a_traceback_is_shown_on_request(call, monkeypatch):
    monkeypatch.setenv("MINIGPT_TRACEBACK", "1")
    refused("max_steps must be", call, "train.py", "max_steps=0")


def test_help_is_written_for_people(call):
    shown = call("train.py", "--help", small=False).stdout
    for group in {path.name for path in (ROOT / "configs").iterdir() if path.is_dir()} - {"hydra"}:
        assert re.search(rf"^ *{group}: .+", shown, re.MULTILINE), group


def test_a_separator_is_typed_as_in_the_warning_that_proposes_it(call, tmp_path):
    (tmp_path / "my.txt").write_text("One story.\n<|endoftext|>\n" * 20, encoding="utf-8")
    proposed = call("prepare.py", "data=text", "data.path=my.txt").stderr
    (separator,) = shlex.split(re.findall(r"data\.separator=\S+", proposed)[0])
    prepared = call("prepare.py", "data=text", "data.path=my.txt", separator)
    assert "18 documents, 180 bytes" in prepared.stdout
    assert "2 documents, 20 bytes, 21 tokens (9.633 %)" in prepared.stdout
    assert separator not in prepared.stderr


def test_prepared_token_files_are_trained_on_without_their_text_and_without_naming_their_tokenizer(
    call, tmp_path
):
    lines = "".join(f"{i} is a line. " for i in range(999))
    (tmp_path / "my.txt").write_text(lines, encoding="utf-8")
    settings = ["data=text", "data.path=my.txt", "tokenizer=bpe", "tokenizer.vocab_size=270"]
    call("prepare.py", *settings)
    (tmp_path / "my.txt").unlink()
    (folder,) = (path for path in (tmp_path / "data/tokens").iterdir() if path.is_dir())
    settings = [f"data.{split}_bin={folder}/{split}.bin" for split in ("train", "val")]
    assert call("train.py", *settings, "hydra.run.dir=run", "max_steps=1").returncode == 0
    summary = read_json(tmp_path / "run/summary.json")
    assert summary["tokenizer"] == "bpe"
    assert summary["corpus_sha256"] == read_json(folder / "meta.json")["sha256"]


def test_training_finds_prepared_token_files(call, tmp_path):
    documents = [json.dumps({"body": f"{i} is a line. " * 20}) for i in range(99)]
    (tmp_path / "my.jsonl").write_text("\n".join(documents), encoding="utf-8")
    settings = ["data=text", "data.path=my.jsonl", "data.field=body", "data.split=document"]
    settings += ["tokenizer=byte"]
    prepared = call("prepare.py", *settings)
    output = dict(line.split(maxsplit=1) for line in prepared.stdout.splitlines())
    assert sum(int(output[split].split()[0]) for split in ("training", "validation")) == 99
    assert not (tmp_path / "runs").exists()
    (folder,) = (path for path in (tmp_path / "data" / "tokens").iterdir() if path.is_dir())
    made = folder.stat().st_mtime_ns
    short = ["data.folder=data", "max_steps=1", "schedule.warmup_steps=0"]
    assert "warning" not in call("train.py", *settings, *short).stderr.lower()
    assert folder.stat().st_mtime_ns == made
    (tmp_path / "one.jsonl").write_text('{"body": "a line", "text": "another"}')
    score = call("sample.py", "--score", "one.jsonl", "--json")  # by default the field of the run
    assert json.loads(score.stdout)["bytes"] == len("a line"), score.stderr


def test_minigpt_lists_the_scripts_without_importing_a_dependency():
    imports = "import sys; from minigpt.__main__ import main"
    program = f"{imports}; main(); print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", program, "--help"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert not {"hydra", "matplotlib", "numpy", "omegaconf", "torch", "wandb"} & set(
        listed.stderr.split()
    )
    usage, _, *lines = listed.stdout.splitlines()
    assert usage.startswith("usage: minigpt COMMAND")
    names = {file.stem.replace("_", "-") for file in (ROOT / "scripts").glob("[!_]*.py")}
    assert {line.split()[0] for line in lines} == names


def test_minigpt_prints_its_version():
    command = [sys.executable, "-m", "minigpt", "--version"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert printed.stdout == f"minigpt {version('minigpt')}\n"


def test_every_message_names_a_command_of_the_clone_or_of_the_package(
    monkeypatch: pytest.MonkeyPatch,
):
    assert scripts.usage("sweep_report") == "python scripts/sweep_report.py"
    monkeypatch.setattr(scripts, "INSTALLED", True)
    assert scripts.usage("sweep_report") == "minigpt sweep-report"


TEXT = "Où est l’été ? Где же лето? 😀\n" * 400


def test_help_of_every_script_is_shown_in_ascii(tmp_path):
    options = {"cwd": tmp_path, "env": {"PYTHONIOENCODING": "ascii"}}
    files = SCRIPTS.glob("[!_]*.py")
    scripts = [
        Script(file.name, "--help", output=tmp_path / file.stem, **options) for file in files
    ]
    assert len(scripts) > 5
    for script in scripts:
        assert (script.wait(), script.stderr) == (0, "")
        assert "--help" in script.stdout or "usage" in script.stdout
    assert any(r"\u2026" in script.stdout for script in scripts)  # … of the help


@pytest.mark.slow
def test_a_sweep_into_a_terminal_of_ascii_writes_its_files_in_utf_8(launch, tmp_path):
    (tmp_path / "лето.txt").write_text(TEXT, encoding="utf-8")
    swept = ["hydra.mode=MULTIRUN", "hydra/launcher=basic", "seed=1,2", "hydra.sweep.dir=été"]
    env = {"PYTHONIOENCODING": "ascii"}
    ended = launch("train.py", "data.path=лето.txt", "max_steps=2", *swept, cwd=tmp_path, env=env)
    assert ended.returncode == 0, ended.stderr
    assert r"answer   \xe9t\xe9/sweep.md" in ended.stdout
    assert all(byte < 128 for file in tmp_path.glob("process-*") for byte in file.read_bytes())
    folder = tmp_path / "été"
    assert (folder / "sweep.png").stat().st_size > 0
    assert (folder / "sweep.md").read_text(encoding="utf-8").startswith("# été\n")
    runs = [run["folder"] for run in table(folder / "runs.csv")]
    assert runs == [f"{folder}/seed={seed}" for seed in (1, 2)]
    for seed in (1, 2):
        log = (folder / f"seed={seed}" / "log.txt").read_text(encoding="utf-8")
        assert f"run folder  été/seed={seed}\n" in log
        assert "лето.txt" in log


def test_a_program_that_trains_completes_where_stdout_lacks_characters_of_the_sample(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "лето.txt").write_text(TEXT, encoding="utf-8")
    printed = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", printed)
    run = small_run("лето.txt", tmp_path / "data", "max_steps=2", "hydra.run.dir=лето")
    assert minigpt.train(run)["status"] == "completed"
    printed.flush()
    assert rb"run folder       \u043b\u0435\u0442\u043e" in printed.buffer.getvalue()
    assert json.loads((tmp_path / "лето/summary.json").read_text(encoding="utf-8"))["steps"] == 2


def test_a_program_without_standard_streams_trains(tmp_path, monkeypatch, text):
    # As pythonw and services of Windows start one
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    run = small_run(text, tmp_path / "data", "max_steps=2", f"hydra.run.dir={tmp_path}/run")
    assert minigpt.train(run)["steps"] == 2
    assert (sys.stdout, sys.stderr) == (None, None)


SIGBREAK = 21  # Ctrl-Break in the imitation
HOLD = "+callbacks.hold._target_=hold.Hold"


@pytest.fixture
def on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Let processes that start from here imitate Windows in a folder, which is returned
    folder = tmp_path / "work"
    folder.mkdir()
    paths = [ROOT / "tests/windows", ROOT / "tests/sweeps"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("IMITATED_FOLDER", str(folder))
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    return folder


@pytest.fixture
def start(
    on_windows: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Script]]:
    # Start a script in a process that is forked from one that imitates Windows
    server: Any = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
    started = []

    def run(script: str, *arguments: str) -> Script:
        if script == "train.py":
            arguments = (*small_run(text, Path("data"), *arguments),)
        output = on_windows.parent / f"out{len(started)}"
        started.append(Script(script, *arguments, output=output, cwd=on_windows))
        return started[-1]

    yield run
    for script in started:
        script.kill()
    server._stop()


def run_to_end(script: Script, code: int = 0) -> SimpleNamespace:
    assert script.wait() == code, script.stderr
    assert "Traceback" not in script.stdout + script.stderr
    return SimpleNamespace(stdout=script.stdout, stderr=script.stderr)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.xdist_group("processes")
def test_runs_sweeps_and_scripts_work_on_an_imitated_windows(
    start: Callable[..., Script], on_windows: Path
) -> None:
    # A run, Ctrl-C, its resume, and samples of it: there is no link, but it is the newest.
    trained = start("train.py", "max_steps=100000")
    assert trained.wait_for(lambda: [*on_windows.glob(f"runs/*/{LAST}")]), trained.stderr
    os.killpg(trained.pid, signal.SIGINT)
    run_to_end(trained, 128 + signal.SIGINT)
    (run,) = (on_windows / "runs").iterdir()
    steps = read_summary(run)["steps"]
    assert steps >= 10
    same_run = ["hydra.run.dir=runs/latest", "resume=auto", "callbacks.samples.max_new_tokens=5"]
    resumed = run_to_end(start("train.py", f"max_steps={steps + 10}", *same_run))
    assert "step 10/" not in resumed.stderr
    assert (read_summary(run)["status"], read_summary(run)["steps"]) == ("completed", steps + 10)
    for named in ([], ["runs/latest"]):
        options = ("--prompt", "7: ", "--max-new-tokens", "5", "--seed", "1")
        assert run_to_end(start("sample.py", *named, *options)).stdout.startswith("7: ")

    # A sweep of two seeds in a worker process, Ctrl-Break, its resume without a new worker, and its
    # report.
    (on_windows / "runs/sweeps").mkdir()
    (on_windows / "runs/sweeps/hold").write_text("seed=2", encoding="utf-8")
    swept = ["-m", "seed=1,2", HOLD]
    stopped = start("train.py", *swept, "hydra.launcher.n_jobs=1")
    assert stopped.wait_for((on_windows / "runs/sweeps/held").exists), stopped.stderr
    os.killpg(stopped.pid, SIGBREAK)  # on Windows, too, it goes to the workers of the same console
    run_to_end(stopped, 128 + SIGBREAK)
    (sweep,) = (each for each in (on_windows / "runs/sweeps").iterdir() if each.is_dir())
    ends = [read_summary(sweep / f"seed={seed}") for seed in (1, 2)]
    found = [(end["status"], end["steps"]) for end in ends]
    assert found == [("completed", 20), ("interrupted", 12)]
    (on_windows / "runs/sweeps/hold").unlink()
    swept += ["hydra/launcher=basic", "hydra.sweep.dir=runs/sweeps/latest", "resume=auto"]
    assert "completed" in run_to_end(start("train.py", *swept)).stdout
    # The worker ignored Ctrl-Break, until its parent ended it: a second signal would have cost the
    # checkpoint.
    log = (sweep / "seed=2/log.txt").read_text(encoding="utf-8")
    assert "interrupted by SIGTERM" in log
    assert "8 steps from step 12 at" in log
    (sweep / "sweep.csv").unlink()
    run_to_end(start("sweep_report.py"))
    (row,) = table(sweep / "sweep.csv")
    assert (row["seeds"], row["status"]) == ("2", "completed")

    # A run that is refused while its lock is held, exports, and the server.
    refused = run_to_end(start("train.py", "data.path=missing.txt"), 2)
    line = one_line(SimpleNamespace(returncode=2, **vars(refused)))
    assert line.startswith("error: data.path=missing.txt does not")
    files = (on_windows / "runs").glob("*/*")
    left = [file.name for file in files if not {run, sweep.parent} & {*file.parents}]
    assert left == [".lock"]  # which filelock removes on Windows
    run_to_end(start("export.py", str(run), "--to", "html", "--out", "page.html"))
    run_to_end(start("export.py", str(sweep), "--to", "huggingface", "--out", "hf"))
    assert (on_windows / "hf/config.json").exists()
    server = start("serve.py", "runs/latest", "--port", "0")
    assert server.wait_for(lambda: "is the page" in server.stderr), server.stderr
    url = re.findall(r"http://\S+", server.stderr)[0]
    assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == [run.name]
    os.killpg(server.pid, signal.SIGINT)
    run_to_end(server, 128 + signal.SIGINT)
    assert not [
        file for file in on_windows.rglob("*") if file.is_symlink() or ".partial" in file.name
    ]


def test_printed_commands_are_quoted_for_cmd_and_powershell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    plain = [r".venv\Scripts\python.exe", "scripts/train.py", r"data.path=C:\a\b.txt"]
    plain += ["max_steps=5", "--seed", "-1.5e-3"]
    assert shell_join(*plain) == " ".join(plain)
    # A comma makes an array in PowerShell, and & ends a command in cmd.
    for word in ("seed=1,2", r"hydra.run.dir='runs\a b'", "a&b", "", "(x)", "a;b"):
        assert shell_join(word) == f'"{word}"'
    assert shell_join('say "hi"') == subprocess.list2cmdline(['say "hi"']) == r'"say \"hi\""'


def test_paths_of_windows_are_overrides_of_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = OverridesParser.create().parse_override
    paths = [r"C:\Users\x y\runs", r"runs\2026", "C:\\a\\", r"D:\it's\$x"]
    for path in [*paths, r"\\server\share\a,b"]:
        assert parse(f"hydra.run.dir={quote_path(path)}").value() == path
        assert parse(f"hydra.run.dir={quote_override(path)}").value() == path
        assert parse(literal(f"data.path={path}", sweeps=False)).value() == path
    monkeypatch.setenv("HOME", r"C:\Users\x")
    assert literal("data.path=['~/a',b]", sweeps=False) == "data.path=['~/a',b]"
    assert literal("data.path=[~/a,~/b]", sweeps=False) == r"data.path=[C:\Users\x/a,C:\Users\x/b]"


def test_latest_is_the_newest_run_or_sweep_where_there_is_no_link(tmp_path: Path) -> None:
    assert follow_latest(f"{tmp_path}/latest") == f"{tmp_path}/latest"
    files = ("new/.hydra/overrides.yaml", "swept/sweep.json", "old/.hydra/overrides.yaml")
    for age, file in enumerate(files):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
        os.utime(tmp_path / file, (1e9 - age,) * 2)
    (tmp_path / "mine").mkdir()  # of the user, and the newest
    for given in (f"{tmp_path}/latest", f"{tmp_path}/latest/"):
        assert follow_latest(given) == f"{tmp_path}/new"
    assert follow_latest(f"{tmp_path}/old") == f"{tmp_path}/old"
    (tmp_path / "new/.hydra/overrides.yaml").unlink()
    assert follow_latest(f"{tmp_path}/latest") == f"{tmp_path}/swept"
    (tmp_path / "swept/seed=1/.hydra").mkdir(parents=True)
    (tmp_path / "swept/seed=1/.hydra/overrides.yaml").touch()
    # Which is no job of the sweep
    assert follow_latest(f"{tmp_path}/swept/latest") == f"{tmp_path}/swept/latest"
    (tmp_path / "latest").symlink_to("removed")
    missing = "latest does not exist; give a run folder or a checkpoint file"
    refused(missing, find_checkpoint, tmp_path / "latest")


FORBIDDEN = {
    "os.symlink('file', 'link')": "PermissionError",
    "open('a:b', 'w')": "OSError",
    "open('file'), os.remove('file')": "PermissionError",
    "open('file'), os.replace('other', 'file')": "PermissionError",
    "open('file'), shutil.rmtree('.')": "PermissionError",
    "mapped('file'), os.rename('file', 'new')": "PermissionError",
    "mapped('file'), open('file', 'w')": "PermissionError",
    "os.rename('other', 'file')": "FileExistsError",
    "os.replace('other', 'file'), os.remove('file'), open('a,b=c.d', 'w')": "",
}


def test_the_imitation_of_windows_refuses_what_windows_refuses(on_windows: Path) -> None:
    program = f"""
import mmap, os, shutil, signal, sys
def mapped(name):
    with open(name) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
for command in {[*FORBIDDEN]}:
    for name in ("file", "other"):
        with open(name, "w") as file:
            file.write(name)
    try:
        kept = eval(command)
        print()
    except OSError as error:
        print(type(error).__name__)
    kept = None
import minigpt.utils.signals as ours
assert hasattr(signal, "SIGUSR1") and sys.platform == "linux"
assert not hasattr(ours.signal, "SIGUSR1") and not hasattr(ours.os, "EX_TEMPFAIL")
assert ours.signal.SIGBREAK
exec("from os import getpgid", vars(ours))
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=on_windows, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert result.stdout.splitlines() == [*FORBIDDEN.values()], result.stderr
    assert "ImportError: cannot import name 'getpgid'" in result.stderr
