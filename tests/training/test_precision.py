"""What a device determines: precisions, compilation, and the number of CPU threads."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from extras.playground.test_engine import serve
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from models import make_model, write_run
from small_runs import composed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from minigpt import GPT, GPTConfig, load_checkpoint
from minigpt.extras.playground.engine import Engine, SampleRequest
from minigpt.runs.trainer import partial_from_config
from minigpt.sampling.sample_cli import decoding_threads
from minigpt.training import cpu_threads as module
from minigpt.training.cpu_threads import ThreadBalancer, cpu_threads
from minigpt.training.language_model import LanguageModel
from minigpt.training.precision import half_dtype, training_precision


def test_a_precision_that_a_cpu_lacks_is_replaced_with_a_warning(train, capsys):
    assert train("trainer.precision=16-mixed", "max_steps=1").summary["precision"] == "bf16-mixed"
    warning = "trainer.precision=16-mixed needs a GPU; this run is bf16-mixed"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(("supported", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_automatic_precision_is_bfloat16_where_the_device_has_it(
    train, monkeypatch, supported, precision
):
    def half(device):
        return torch.bfloat16 if supported and device.type == "cpu" else None

    monkeypatch.setattr("minigpt.training.precision.half_dtype", half)
    max_steps = f"max_steps={40 if supported else 1}"
    run = train("trainer.precision=auto", "optimizer.lr=1e-2", max_steps, "eval_every=40")
    assert run.summary["precision"] == precision
    assert run.loss < 2.5 or not supported


@pytest.mark.parametrize(
    ("capability", "rocm", "precision"),
    [
        ((6, 1), None, "32-true"),  # GTX 10
        ((7, 0), None, "16-mixed"),  # V100
        ((7, 5), None, "16-mixed"),  # T4, RTX 20
        ((8, 0), None, "bf16-mixed"),  # A100
        ((9, 0), None, "bf16-mixed"),  # H100
        ((9, 4), "6.4", "bf16-mixed"),  # MI300
    ],
)
def test_automatic_precision_of_a_gpu_is_its_faster_16_bit_type(
    monkeypatch, capability, rocm, precision
):
    # With replaced capabilities, of which torch's functions read whether a GPU has bfloat16
    gpu = SimpleNamespace(major=capability[0], minor=capability[1])
    for name, value in {
        "cuda.is_available": lambda: True,
        "cuda.current_device": lambda: 0,
        "cuda.get_device_properties": lambda device=None: gpu,
        "cuda._check_bf16_tensor_supported": lambda device: True,  # emulated on every GPU
        "version.hip": rocm,
        "accelerator.current_accelerator": lambda check_available: torch.device("cuda"),
    }.items():
        monkeypatch.setattr(f"torch.{name}", value)
    half_dtype.cache_clear()
    assert training_precision("auto") == precision
    half_dtype.cache_clear()


SMALL = {"block_size": 4, "vocab_size": 256, "n_layer": 1, "n_head": 4, "n_embd": 32}


def language_model(recipe, *overrides, **settings):
    make = partial_from_config("optimizer", composed(f"experiment={recipe}", *overrides).optimizer)
    model = GPT(GPTConfig(**SMALL | settings))
    settings = {"optimizer": make, "max_steps": 10}
    return LanguageModel(model, schedule=lambda step, max_steps: 1.0, **settings)


@pytest.mark.parametrize("name", ["adamw", "muon_fast"])
def test_a_step_in_bfloat16_keeps_weights_gradients_and_state_in_float32(name):
    module = language_model("fast_gpu", f"optimizer={name}", position="rope", qk_norm=True)
    model = module.model
    ids = torch.zeros(3, 4, dtype=torch.long)
    optimizer = module.make_optimizer(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, ids)
    loss.backward()
    optimizer.step()
    found = {p.grad.dtype for p in model.parameters()} | {p.dtype for p in model.parameters()}
    for values in optimizer.state.values():
        found |= {value.dtype for value in values.values()}
    assert found == {torch.float32}


@pytest.mark.parametrize("name", ["adamw", "muon_fast"])
def test_with_16_mixed_gradients_are_clipped_after_the_loss_scale_is_removed(name):
    # In a fused step, torch would remove it after clipping. Lightning has it for GPUs alone
    module = language_model("fast_gpu", f"optimizer={name}")
    ids = torch.randint(256, (3, 4))
    module.model(ids, ids).backward()
    expected = nn.utils.get_total_norm([p.grad for p in module.model.parameters()])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    mixed = MixedPrecision("16-mixed", "cpu")
    trainer = Trainer(accelerator="cpu", max_steps=1, plugins=mixed, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(ids, ids), batch_size=3))
    assert float(module.grad_norm) == pytest.approx(float(expected), rel=0.02)


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_loss(train, finished):
    from torch._dynamo.utils import counters

    torch.compiler.reset()  # what other tests have compiled
    counters.clear()
    compiled = train("compile=true")
    assert counters["stats"]["unique_graphs"] == 1  # validation is not compiled
    assert compiled.loss == pytest.approx(finished.summary["best_val_loss"], abs=1e-4)
    assert isinstance(load_checkpoint(compiled.folder)[0], GPT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpoint_blocks"), [("best_gpu", None), ("nanogpt_gpu", 1)])
def test_a_model_compiles_without_graph_breaks_and_once(monkeypatch, name, checkpoint_blocks):
    # Training and validation of whole and of padded batches, twice, with a GPU's attention
    monkeypatch.setattr("minigpt.model.attention._MAX_EXPLICIT", 0)
    sizes = SMALL | {"n_layer": 3}  # which layer_repeats divides
    module = language_model(name, **dict(composed(f"experiment={name}").model) | sizes)
    model = module.model
    ids = torch.randint(256, (4, 4))
    model.checkpoint_blocks = checkpoint_blocks
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    optimizer = module.make_optimizer(model)
    padded = ids.where(torch.arange(4) < 2, -100)
    for cycle in range(2):
        once = torch._dynamo.config.patch(error_on_recompile=cycle > 0)
        with once, torch.autocast("cpu", torch.bfloat16):
            module.training_step((ids, ids), 0).backward()
            module.configure_gradient_clipping(optimizer, 1.0)
            optimizer.step()
            module.eval()
            with torch.no_grad():
                for rows in (4, 3):
                    model(ids[:rows], padded[:rows], reduction="sum")
            module.train()


class Machine:
    """Clocks of a machine that shares its cores fairly.

    Each operation of a step waits for its slowest thread.
    """

    def __init__(self, cores: int, *, seconds: float = 0.02, serial: float = 0.0) -> None:
        self.cores = cores
        self.busy = 0
        self.quota = float("inf")
        self.work = seconds * cores  # CPU seconds of a step
        self.serial = serial  # seconds of it without threads
        self.wall = self.cpu = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.cpu

    def step(self) -> None:
        threads = torch.get_num_threads()
        # cores
        got = min(threads, self.quota, self.cores * threads / max(self.cores, threads + self.busy))
        # Threads wait for one that has no core
        seconds = self.work / got * (4 if got < threads else 1)
        self.wall += seconds + self.serial
        self.cpu += seconds * got + self.serial


@pytest.fixture
def machine(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("OMP_", "MKL_", "GOMP_", "KMP_")):
            monkeypatch.delenv(name)

    def start(cores: int, *, fixed: bool = False, **options: float):
        started = Machine(cores, **options)
        torch.set_num_threads(cores)
        monkeypatch.setattr(module, "time", started)
        return started, ThreadBalancer(fixed=fixed)

    with cpu_threads(None):
        yield start


def run(
    machine: Machine, balancer: ThreadBalancer, seconds: float
) -> tuple[list[tuple[float, int]], list[str]]:
    """Take steps for some seconds.

    Returns:
        The changes, (second, threads from then on), and the lines for the log.
    """
    changes = []
    lines = []
    begin = machine.wall
    while machine.wall < begin + seconds:
        before = torch.get_num_threads()
        balancer.start()
        machine.step()
        lines += filter(None, [balancer.end()])
        threads = torch.get_num_threads()
        if threads != before:
            changes.append((machine.wall - begin, threads))
    return changes, lines


@pytest.mark.parametrize(("cores", "seconds"), [(2, 0.002), (16, 0.02), (2, 1.5), (16, 1.5)])
def test_a_run_beside_a_busy_process_uses_fewer_threads_and_all_again_when_it_ends(
    machine, cores, seconds
):
    computer, balancer = machine(cores, seconds=seconds)
    assert run(computer, balancer, max(20, 50 * seconds)) == ([], [])
    computer.busy = 1
    ((second, threads),), (line,) = run(computer, balancer, 50)
    assert second < max(2, 30 * seconds)
    assert threads == cores - 1
    assert re.fullmatch(
        rf"{threads} threads? instead of {cores}, which had ({cores - 1}|1)\.\d cores", line
    )
    computer.busy = 0
    ((second, threads),), lines = run(computer, balancer, 75)
    assert second < 60
    assert (threads, lines) == (cores, [f"{cores} threads again"])


def test_threads_become_fewer_until_each_has_a_core(machine):
    computer, balancer = machine(8)
    computer.busy = 4
    changes, lines = run(computer, balancer, 50)
    assert [threads for _, threads in changes] == [5, 4]
    assert lines == ["4 threads instead of 8, which had 5.3 cores"]


def test_more_threads_are_tried_after_a_minute_and_then_more_rarely(machine):
    computer, balancer = machine(2, seconds=0.1)
    for _ in range(2):
        computer.busy = 1
        changes, _ = run(computer, balancer, 1000)
        tries = [second for second, threads in changes if threads == 2]
        assert [threads for _, threads in changes] == [1, *[2, 1] * len(tries)]
        assert np.diff([0, *tries]).tolist() == pytest.approx([60, 120, 240, 480], abs=5)
        computer.busy = 0
        run(computer, balancer, 2000)
        assert torch.get_num_threads() == 2


def test_many_threads_become_as_many_as_a_container_may_use(machine):
    computer, balancer = machine(64)
    computer.quota = 3.5
    run(computer, balancer, 30)
    assert torch.get_num_threads() == 3


def test_steps_that_fewer_threads_do_not_make_faster_keep_their_threads(machine):
    computer, balancer = machine(8, serial=0.01)
    changes, lines = run(computer, balancer, 50)
    assert [threads for _, threads in changes] == [5, 4, 3, 8]
    assert lines == []
    computer.serial = 0.0
    computer.busy = 4
    run(computer, balancer, 60)
    assert torch.get_num_threads() == 4


def test_validation_compilation_and_a_sleeping_computer_change_nothing(machine):
    computer, balancer = machine(4)
    for i in range(1200):
        if i % 100 == 50:  # between two steps
            computer.wall += 5
            computer.cpu += 5
        balancer.start()
        computer.step()
        if i in (0, 1, 2, 500):  # within a step, on one core
            computer.wall += 20
            computer.cpu += 20
        if i == 1000:
            computer.wall += 3600
        assert balancer.end() == ""


@pytest.mark.parametrize(
    "given", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "fixed"]
)
def test_a_given_number_of_threads_stays(machine, monkeypatch, given):
    if given != "fixed":
        monkeypatch.setenv(given, "2")
    computer, balancer = machine(2, fixed=given == "fixed")
    computer.busy = 2
    assert run(computer, balancer, 100) == ([], [])
    assert given == "fixed" or decoding_threads(make_model(), 1) is None


@pytest.mark.usefixtures("machine")
def test_few_samples_of_a_small_model_are_decoded_by_one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # as if it was not set
    small = make_model(n_embd=64)
    large = make_model(n_embd=384, n_head=2)
    assert [decoding_threads(small, rows) for rows in (1, 3, 4)] == [1, 1, None]
    assert decoding_threads(large, 1) is None


def test_the_number_of_threads_is_that_of_the_configuration_during_a_run_alone(train):
    before = torch.get_num_threads()
    summary = train("threads=3", "max_steps=1").summary
    assert (summary["device"], summary["thread_changes"]) == ("cpu, 3 threads", [])
    assert torch.get_num_threads() == before


class Waiting:
    """Clocks of a process that gets one core.

    Its steps take half a second with one thread, else two.
    """

    cpu = wall = 0.0

    def perf_counter(self) -> float:
        self.wall += 0.5 if torch.get_num_threads() == 1 else 2
        return self.wall

    def process_time(self) -> float:
        self.cpu += 0.5 if torch.get_num_threads() == 1 else 2
        return self.cpu


def test_a_run_logs_and_records_its_changes_also_if_it_resumes(machine, train, monkeypatch):
    machine(2)
    monkeypatch.setattr(module, "time", Waiting())
    assert train("max_steps=20", "pause_at=10").summary["thread_changes"] == [[6, 1]]
    run = train("max_steps=20", "resume=auto")
    assert run.summary["thread_changes"] == [[6, 1], [16, 1]]
    assert run.summary["device"] == "cpu, 2 threads"
    log = (run.folder / "log.txt").read_text(encoding="utf-8")
    lines = [line for line in log.splitlines() if "instead" in line]
    assert lines == [f"step {step}: 1 thread instead of 2, which had 1.0 cores" for step in (9, 19)]
    assert torch.get_num_threads() == 2


def test_samples_on_a_terminal_and_of_the_server_use_fewer_threads_too(
    machine, call, monkeypatch, capfd, tmp_path
):
    machine(2)
    monkeypatch.setattr(module, "time", Waiting())
    line = "1 thread instead of 2, which had 1.0 cores"
    run = write_run(tmp_path / "run", make_model(vocab_size=256))
    flags = "--num-samples 4 --max-new-tokens 40 --device cpu"
    assert line in call("sample.py", str(run), *flags.split()).stderr.splitlines()[-1]
    torch.set_num_threads(2)
    monkeypatch.setattr(module, "time", Waiting())

    async def tokens(engine: Engine) -> int:
        return len([token async for token in engine.generate(SampleRequest([1], 40))])

    assert serve(make_model(), tokens) == 40
    assert line in capfd.readouterr().err.splitlines()
