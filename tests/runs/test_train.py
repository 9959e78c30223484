"""Training as a user sees it: real Trainer, real configurations, a small text; in programs, too."""

import inspect
import itertools
import json
import os
import pkgutil
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import hydra
import matplotlib.image
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, Trainer
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from refusals import refused
from small_runs import column, rows

import minigpt
from minigpt import GPT, generate, load_checkpoint
from minigpt.checkpoints.find import BEST, LAST, PREVIOUS
from minigpt.checkpoints.format import read
from minigpt.extras.playground.history import read_samples
from minigpt.runs.callbacks.collective_timeout import CollectiveTimeout
from minigpt.runs.run_config import TRAINER_OPTIONS, check_run
from minigpt.runs.trainer import build_trainer
from minigpt.sampling.generation import stream
from minigpt.utils.ranks import TORCHRUN
from minigpt.utils.signals import END_SIGNALS


def test_a_run_folder_holds_everything_about_its_run(finished):
    folder = finished.folder
    summary = finished.summary
    results = {"metrics.csv", "curves.png", "samples.txt", "summary.json", "log.txt"}
    if summary["dirty"]:
        results.add("code.diff")
    assert {file.name for file in folder.iterdir()} == {*results, "checkpoints", ".hydra", ".lock"}
    files = {"best.safetensors", "last.safetensors", "previous.safetensors", "snapshots"}
    assert {file.name for file in (folder / "checkpoints").iterdir()} == files
    assert column(folder, "step") == [5, 10, 10, 15, 20, 20]
    assert summary["best_val_loss"] == min(column(folder, "val_loss"))
    losses = column(folder, "train_loss")
    assert losses[-1] < losses[0]
    assert matplotlib.image.imread(folder / "curves.png").shape[:2] == (720, 960)
    recorded = OmegaConf.load(folder / ".hydra/overrides.yaml")  # without those of Hydra
    assert (recorded[0][:10], recorded[-1]) == ("data.path=", "callbacks.samples.max_new_tokens=20")
    content = read(folder / LAST)
    kept = content["minigpt"]
    assert content["global_step"] == kept["config"]["max_steps"] == 20
    assert kept["corpus_sha256"] == summary["corpus_sha256"]
    names = {"command", "host", "versions", "init_from", "resumed_from"}
    names |= {"code", "commit", "dirty", "code_sha256"}
    assert kept["provenance"] == {name: summary[name] for name in names}
    refused("already holds a run", minigpt.train, [f"hydra.run.dir={folder}"])
    assert OmegaConf.load(folder / ".hydra/overrides.yaml") == recorded


def test_a_run_prints_what_it_will_do_and_its_results(finished):
    folder = finished.folder
    summary = finished.summary
    text = (folder / "log.txt").read_text(encoding="utf-8")
    lines = text.splitlines()
    printed = finished.stderr.splitlines()
    assert lines == [line for line in printed if not line.startswith("warning")]
    first = ["model", "data", "training", "device", "run"]
    assert [line.split()[0] for line in lines[:5]] == first
    model, tokenizer = load_checkpoint(folder)
    tokens = 20 * 8 * 16
    per_token = model.config.flops_per_token()
    for part in (
        f"{sum(p.numel() for p in model.parameters()):,} parameters",
        f"18,000 training tokens; tokenizer char, vocab_size {tokenizer.vocab_size}; ",
        "; validation on 10 % of the tokens",
        f"20 steps, {tokens:,} tokens ({tokens / 18_000:.2f} epochs)",
        f"{per_token * tokens:.3g} FLOPs ({per_token:.3g} per token)",
        "block_size 16",
        f"{summary['device']}, precision 32-true",
    ):
        assert part in text
    results = f"""
validation loss  {summary["best_val_loss"]:.4f} at step 20
time             {summary["wall_seconds"]:,.1f} s, training {summary["seconds"]:,.1f} s
run folder       {folder}
curves           {folder}/curves.png
best checkpoint  {folder}/checkpoints/best.safetensors
"""
    assert results in finished.stdout


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(train, finished, tmp_path):
    size = f"model.vocab_size={load_checkpoint(finished.folder)[1].vocab_size}"  # the default
    same = column(train(size, "max_steps=5").folder, "train_loss")
    other = column(train("seed=8", "max_steps=5", folder=tmp_path / "8").folder, "train_loss")
    assert same == column(finished.folder, "train_loss")[:1] != other


class Remove(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, *args):
        shutil.rmtree(self.folder, ignore_errors=True)


def test_a_run_holds_its_token_files_open(train, trained, tmp_path):
    target = "+callbacks.remove._target_=test_train.Remove"
    run = train(target, f"+callbacks.remove.folder={tmp_path}/data/tokens")
    assert not (tmp_path / "data/tokens").exists()
    assert rows(run.folder) == rows(trained())


def test_samples_are_drawn_with_their_settings(trained, finished):
    default = {"prompt": "", "max_new_tokens": 20, "temperature": 0.8, "top_k": None, "seed": 1337}
    given = {"prompt": "fox", "max_new_tokens": 60, "temperature": 2.5, "top_k": 15, "seed": 3}
    other = trained(*(f"callbacks.samples.{name}={value}" for name, value in given.items()))

    def drawn(file, *, prompt, **settings):
        model, tokenizer = load_checkpoint(file)
        tokens = torch.from_numpy(tokenizer.encode(prompt or "\n").astype("int64"))
        return (prompt + tokenizer.decode(generate(model, tokens, **settings)[0].tokens)).strip()

    for folder, settings, less in ((finished.folder, default, given), (other, given, default)):
        samples = dict(read_samples(folder))
        last = drawn(folder / LAST, **settings)
        assert samples == {10: drawn(folder / PREVIOUS, **settings), 20: last}
        for name, value in less.items():
            assert drawn(folder / LAST, **{**settings, name: value}) != last, name
    final = drawn(finished.folder / BEST, **{**default, "max_new_tokens": 20})
    assert finished.stdout.startswith(f"{final}\n")


def test_what_follows_a_training_is_announced_and_ends_after_its_share_of_the_time(
    train, monkeypatch, capsys
):
    def slowly(*args, **settings):
        for step in stream(*args, **settings):
            time.sleep(0.02)
            yield step

    monkeypatch.setattr("minigpt.runs.callbacks.samples.stream", slowly)
    monkeypatch.setattr("minigpt.runs.fit.FINAL_SECONDS", 0.6)
    monkeypatch.setattr("minigpt.runs.fit.FINAL_TOKENS", 300)
    run = train("callbacks.originality.characters=2000", "max_steps=5")
    out, err = capsys.readouterr()
    what = "300 tokens and 2,000 characters, to see how much is copied; at most 1 s"
    assert f"sampling    {what}\n" in err
    assert len(out.partition("\nvalidation loss")[0]) < 100  # of at most 15 tokens
    found = run.summary["originality"].keys()
    assert {"final_sample", "generated_text", "validation_text"} == found
    assert load_checkpoint(run.folder)[0].config.block_size == 16


def test_a_sample_of_a_short_training_is_short_unless_its_length_is_given(train, tmp_path):
    for max_steps, tokens in ((20, 25), (4, 16)):  # of 8 windows of 16 tokens
        line = ["callbacks.samples.seed=1", "eval_every=20", f"max_steps={max_steps}"]
        ((_, sample),) = read_samples(train(*line, folder=tmp_path / f"{tokens}").folder)
        assert abs(len(sample) - tokens) < 3  # spaces at the ends are dropped


def test_one_batch_can_be_overfitted(train):
    small = ["optimizer.lr=1e-2", "data.batch_size=2", "max_steps=100", "eval_every=100"]
    assert column(train("debug=overfit", *small).folder, "train_loss")[-1] < 0.1


def test_null_clips_no_gradient(train, tmp_path):
    large = train("trainer.gradient_clip_val=1e9", "max_steps=3", folder=tmp_path / "large").folder
    null = train("trainer.gradient_clip_val=null", "max_steps=3").folder
    assert column(large, "train_loss") == column(null, "train_loss")
    assert max(column(null, "grad_norm")) > 1.1


@pytest.mark.slow
def test_the_debug_preset_that_profiles_writes_a_table_and_a_trace_of_the_training(train):
    run = train("debug=profile", "max_steps=25", "data.eval_batch_size=1", "eval_every=10")
    table = (run.folder / "fit-profile.txt").read_text(encoding="utf-8")
    # The rows are the 20 operations that took longest; of these two, every other one is a part.
    assert "run_training_batch" in table
    assert "SingleDeviceStrategy.backward" in table
    assert "validation_step" not in table
    (trace,) = run.folder.glob("fit-profile*.pt.trace.json")
    assert trace.stat().st_size > 10_000


@pytest.mark.parametrize("override", ["~callbacks.checkpoint", "callbacks.checkpoint=null"])
def test_checkpoints_can_be_disabled(train, capsys, override):
    ran = train(override, "max_steps=1")
    assert ran.summary["checkpoint"] is None
    assert not list(ran.folder.glob("checkpoints/*.safetensors"))
    assert "best checkpoint" not in capsys.readouterr().out


def test_a_callback_that_stops_a_training_is_the_reason_why_it_ended(train, monkeypatch, capsys):
    elapsed = itertools.count()  # seconds, one more at every step
    monkeypatch.setattr("lightning.pytorch.callbacks.Timer.time_elapsed", lambda *_: next(elapsed))
    timer = "+callbacks.timer._target_=lightning.pytorch.callbacks.Timer"
    line = [timer, "+callbacks.timer.duration={seconds: 3}", "max_steps=6", "eval_every=6"]
    summary = train(*line).summary
    assert (summary["steps"], summary["status"], summary["stopped_early"]) == (3, "completed", True)
    assert summary["reason"] == "stopped early at step 3 of 6: ended by a callback: Timer"
    assert f"\n{summary['reason']}\n" in capsys.readouterr().out
    train(*line, "resume=auto")
    assert "is complete at step 3 of 6" in capsys.readouterr().out
    line[1] = "+callbacks.timer.duration={days: 1}"
    assert train(*line, "resume=auto").summary["steps"] == 6


def test_callbacks_of_lightning_log_and_write_into_the_run_folder(train, caplog):
    names = ("LearningRateMonitor", "ModelCheckpoint", "ModelSummary")
    own = [f"+callbacks.{name}._target_=lightning.pytorch.callbacks.{name}" for name in names]
    folder = train(*own, "eval_every=20").folder
    rates = column(folder, "lr-AdamW/pg1")
    assert (len(rates), rates[4::5]) == (20, column(folder, "learning_rate"))
    (file,) = (folder / "checkpoints").glob("epoch=*.ckpt")
    assert read(file)["global_step"] == 20
    assert {path.parent.name for path in folder.glob("*/*")} == {"checkpoints", ".hydra"}
    assert "Total params" in caplog.text


def test_settings_that_change_no_loss_reach_what_they_set(train, monkeypatch):
    built = []

    def build(*parts):
        built.append(build_trainer(*parts))
        return built[0]

    monkeypatch.setattr("minigpt.runs.fit.build_trainer", build)
    monkeypatch.setattr(GPT, "compile", lambda model: setattr(model, "compiled", True))
    settings = ["compile=true", "checkpoint_blocks=2", "collective_timeout=45"]
    train(*settings, "model.vocab_size=128", "max_steps=1")
    model = built[0].lightning_module.model
    assert (model.compiled, model.checkpoint_blocks, model.config.vocab_size) == (True, 2, 128)
    (callback,) = (each for each in built[0].callbacks if isinstance(each, CollectiveTimeout))
    assert callback.timeout.total_seconds() == 45


def test_options_of_the_trainer_that_are_accepted_work(train, caplog):
    options = ("benchmark=true", "detect_anomaly=true", "num_nodes=1", "profiler=simple")
    given = ("trainer.deterministic=true", *(f"+trainer.{option}" for option in options))
    assert train(*given, "max_steps=2", "callbacks.samples.max_new_tokens=9").summary["steps"] == 2
    assert "run_training_batch" in caplog.text
    assert torch.are_deterministic_algorithms_enabled()  # also after the samples
    torch.use_deterministic_algorithms(False)


def test_every_other_option_of_the_trainer_is_refused_in_one_line():
    options = set(inspect.signature(Trainer.__init__).parameters) - {"self", *TRAINER_OPTIONS}
    assert len(options) > 25
    check_run(OmegaConf.create({"trainer": {"accelerator": "cpu"}}))
    for option in options:
        pattern = rf"^trainer\.{option} is not an option; [^\n]+ eval_batches$"
        refused(pattern, check_run, {"trainer": {option: 0}})


def test_a_run_may_validate_on_a_part_of_the_split(train, finished, capsys):
    run = train("data.eval_batch_size=8", "max_steps=10", "eval_batches=2")
    assert "on 2 batches of the split" in capsys.readouterr().out
    assert run.summary["eval_batches"] == 2
    model, _ = load_checkpoint(run.folder)
    windows = -(-(len(finished.val) - 1) // 16)
    starts = [i * windows // 16 * 16 for i in range(16)]
    assert run.summary["validated"].startswith(f"16 of {windows} windows of 16 tokens in ")
    x = torch.stack([finished.val[start : start + 17] for start in starts])
    with torch.no_grad():
        assert model(x[:, :-1], x[:, 1:]).item() == pytest.approx(run.loss, rel=1e-5)


def test_a_warmup_as_long_as_the_run_is_a_warning(train, tmp_path, capsys):
    for warmup in (1, 2):
        train("max_steps=2", f"schedule.warmup_steps={warmup}", folder=tmp_path / f"{warmup}")
        warning = "schedule.warmup_steps=2 is not below max_steps=2"
        assert (warning in capsys.readouterr().err) == (warmup == 2)


@pytest.mark.parametrize(
    ("precision", "rate", "warmup", "step"),
    [
        ("bf16-true", 1e-5, 3, 10),
        ("bf16-true", 1e-5, 10, 20),  # the first validation is in the warmup
        ("bf16-true", 1e-3, 3, None),
        ("32-true", 1e-5, 3, None),
    ],
)
def test_weights_that_rounding_keeps_as_they_were_are_a_warning(
    train, capsys, precision, rate, warmup, step
):
    settings = [
        f"trainer.precision={precision}",
        f"optimizer.lr={rate}",
        f"schedule.warmup_steps={warmup}",
        "optimizer.betas=[0.9,0.999]",
        "callbacks.checkpoint.save_top_k=2",
        "callbacks.snapshots=null",
        "seed=7",
    ]
    folder = train(*settings).folder
    err = capsys.readouterr().err
    pattern = r"warning: at step (\d+), ([\d.]+)% of the weights of the blocks have changed, .*auto"
    rounds = "warning: a decay rate of 0.999 of the optimizer rounds to 1 in bfloat16"
    assert (rounds in err) == (precision == "bf16-true")
    warned = re.findall(pattern + "\n", err)
    assert len(warned) == err.count("have changed")
    model, _ = load_checkpoint(folder / f"checkpoints/step-{step or 10}.safetensors")
    torch.manual_seed(7)
    initial = GPT(model.config).to(torch.float32 if precision == "32-true" else torch.bfloat16)
    pairs = zip(model.blocks.parameters(), initial.blocks.parameters(), strict=True)
    changed = torch.cat([(new != old).flatten() for new, old in pairs]).float().mean().item()
    if step is None:
        assert changed > 0.9
    else:
        assert changed < 0.4
        assert warned == [(str(step), f"{100 * changed:.1f}")]


SHORT = ["max_steps=2", "log_every=1"]
LEFT_BEHIND = {
    "Kubeflow": "RANK=1 WORLD_SIZE=2 MASTER_ADDR=no.invalid MASTER_PORT=1",
    "Lightning": "LOCAL_RANK=1 NODE_RANK=1 WORLD_SIZE=2",
    "torchrun": "TORCHELASTIC_RUN_ID=none GROUP_RANK=1 RANK=two",
    "sbatch": "SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_JOB_NAME=a SLURM_PROCID=0",
    "salloc": "SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_JOB_NAME=interactive",
    "a step of one task": """
        SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_JOB_NAME=a
        SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NODELIST=a""",
}


@pytest.mark.parametrize("program", LEFT_BEHIND)
def test_a_process_that_is_no_rank_trains_alone_whatever_its_environment_has_of_ranks(
    program, train, trained, monkeypatch, capsys
):
    # As if Lightning had been imported with these variables
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    given = dict(variable.split("=") for variable in LEFT_BEHIND[program].split())
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = train("trainer.strategy=ddp", *SHORT)
    names = ", ".join(name for name in (*TORCHRUN, "NODE_RANK", "GROUP_RANK") if name in given)
    warned = f"warning: {names} ignored: without " in capsys.readouterr().err
    assert warned == ("SLURM_NTASKS" not in given)
    assert rows(run.folder) == rows(trained("trainer.strategy=ddp", *SHORT))
    assert {name: os.environ.get(name) for name in before} == before
    assert "MASTER_PORT" in before or "MASTER_PORT" not in os.environ
    refused("already holds a run", train)


def test_training_leaves_hydra_of_the_program_as_it_was(train, trained, tmp_path, monkeypatch):
    # As in a program of Hydra, or a notebook after `hydra.initialize`
    monkeypatch.setattr(BaseContainer, "_resolvers", dict(BaseContainer._resolvers))
    (tmp_path / "mine.yaml").write_text("a: ${now:x}")
    hydra.initialize_config_dir(str(tmp_path), version_base=None)
    OmegaConf.register_new_resolver("now", lambda pattern: "of the user", replace=True)
    try:
        cfg = hydra.compose("mine", return_hydra_config=True)
        cfg.hydra.runtime.output_dir = "of the user"
        HydraConfig.instance().set_config(cfg)
        ours = (GlobalHydra.instance().hydra, dict(BaseContainer._resolvers))
        assert rows(train(*SHORT).folder) == rows(trained(*SHORT))
        refused("max_steps must be", train, "max_steps=-1", folder=tmp_path / "refused")
        assert (GlobalHydra.instance().hydra, BaseContainer._resolvers) == ours
        assert HydraConfig.get().runtime.output_dir == "of the user"
        assert hydra.compose("mine").a == "of the user"
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    train(*SHORT, folder=tmp_path / "without")
    assert not HydraConfig.initialized()


class Wait(Callback):
    """Wait long enough for another run to begin."""

    trains = []

    def on_train_start(self, trainer, pl_module):
        Wait.trains.append("starts")
        time.sleep(0.1)

    def on_train_end(self, trainer, pl_module):
        Wait.trains.append("ends")


def test_runs_of_two_threads_train_one_after_the_other(train, trained, tmp_path):
    seeds = ("seed=1337", "seed=7")

    def run(seed):
        own = [*SHORT, "+callbacks.wait._target_=test_train.Wait"]
        return rows(train(seed, *own, folder=tmp_path / seed).folder)

    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(run, seeds)]
    assert Wait.trains == ["starts", "ends"] * 2
    assert found == [rows(trained(seed, *SHORT)) for seed in seeds]


class Fail(Callback):
    def __init__(self, error):
        self.error = pkgutil.resolve_name(error)

    def setup(self, *args, **kwargs):
        raise self.error


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ZeroDivisionError", None])
def test_training_leaves_signal_handlers_of_the_program_as_they_were(train, error):
    def mine(*_):
        raise KeyboardInterrupt

    given = {signum: signal.signal(signum, mine) for signum in END_SIGNALS}
    target = "+callbacks.fail._target_=test_train.Fail"
    fails = [target, f"+callbacks.fail.error=builtins:{error}"] if error else []
    try:
        with pytest.raises((SystemExit, ZeroDivisionError)) if error else nullcontext():
            train("max_steps=2", *fails)
        assert {signal.getsignal(signum) for signum in END_SIGNALS} == {mine}
    finally:
        for handler in given.items():
            signal.signal(*handler)


TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
PROGRAM = """
import json, os, sys
import minigpt

print("the program runs")
names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
before = {name: os.environ.get(name) for name in names}
results = []
for overrides in json.loads(sys.stdin.read()):
    try:
        results.append(minigpt.train(overrides))
    except minigpt.utils.errors.UserError as error:
        results.append(str(error))
    assert before == {name: os.environ.get(name) for name in before}
print(json.dumps(results))
"""


@pytest.mark.slow
def test_a_program_trains_several_runs_on_two_ranks_and_runs_once(small, trained, tmp_path):
    # Also after a run on one, and after one that fails; with arguments and input of its own
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    seeds = [["seed=7"], TWO, ["optimizer.lr=1e30", *TWO], ["seed=7", *TWO], []]
    given = json.dumps([[*small, *overrides] for overrides in seeds])
    command = [sys.executable, "program.py", "--an=argument"]
    options = {"cwd": tmp_path, "capture_output": True, "encoding": "utf-8", "timeout": 300}
    result = subprocess.run(command, input=given, check=False, **options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the program runs") == 1
    first, second, failed, third, last = json.loads(result.stdout.splitlines()[-1])
    assert "the loss is nan" in failed
    for found, seed, size in ((first, 7, 1), (second, 1337, 2), (third, 7, 2), (last, 1337, 1)):
        assert found["world_size"] == size
        expected = column(trained(f"seed={seed}"), "val_loss")
        assert column(Path(found["folder"]), "val_loss") == pytest.approx(expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_taken_port_is_named(devices, train, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", f"{port}")
        pattern = rf"^MASTER_PORT must be a free port, got {port}; set this"
        refused(pattern, train, *TWO[:2], f"trainer.devices={devices}")


def make(model, **_):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Mine(Callback):
    ended = []

    def on_train_end(self, trainer, pl_module):
        self.ended.append((trainer.global_step, type(trainer.optimizers[0])))


def test_a_notebook_may_define_a_callback_and_an_optimizer_for_one_rank(
    train, monkeypatch, tmp_path
):
    # The module of a notebook, and of a script, is __main__ and has no spec
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "Mine", Mine, raising=False)
    monkeypatch.setattr(main, "make", make, raising=False)
    monkeypatch.chdir(tmp_path)  # from which modules are imported
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = "+callbacks.mine._target_=__main__.Mine"
    train(mine, "optimizer._target_=__main__.make", "max_steps=2")
    assert Mine.ended == [(2, torch.optim.SGD)]
    pattern = "_target_ must be of a module, got __main__; move it to where"
    refused(pattern, train, mine, *TWO, folder=tmp_path / "two")
