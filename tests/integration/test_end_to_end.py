"""The scripts together: train, prepare, sample, signals; errors before any import; encodings."""

import io
import json
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from processes import Script
from refusals import refused
from small_runs import ROOT, SCRIPTS, small_run, wait_until

import minigpt
from minigpt.utils import scripts


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
