"""The workarounds for the start of a run leave Lightning and torch as they are without them."""

import subprocess
import sys
from pathlib import Path

from small_runs import ROOT

# In a new process, where nothing has imported torch's compiler
START = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from minigpt.runs.lightning_workarounds import fast_imports
with fast_imports():
    import lightning.pytorch as L
import torch
def compiler_is_imported():
    return "torch._dynamo.eval_frame" in sys.modules
"""


def check(program: str, folder: Path) -> None:
    options = {"cwd": folder, "capture_output": True, "encoding": "utf-8", "check": False}
    result = subprocess.run([sys.executable, "-c", START + program], **options)
    assert result.returncode == 0, result.stderr


def test_a_training_without_compilation_does_not_import_the_compiler(
    small: list[str], tmp_path: Path
):
    for optimizer in ("adamw", "muon"):
        check(
            f"""
import minigpt
minigpt.train([*{small}, "optimizer={optimizer}", "hydra.run.dir={optimizer}"])
assert not compiler_is_imported()
""",
            tmp_path,
        )


def test_the_compiler_is_the_same_when_it_is_used_later(tmp_path: Path):
    program = """
@torch.compiler.disable
def in_graph():
    return torch.compiler.is_compiling()
def step(x):
    return x + 1 if in_graph() else x - 1
assert in_graph() is False and step(torch.zeros(())) == -1
assert not compiler_is_imported()
module = L.LightningModule()
from lightning.pytorch.utilities.compile import OptimizedModule, from_compiled
assert not isinstance(module, OptimizedModule)
compiled = torch.compile(module, backend="eager")
assert compiler_is_imported()
assert isinstance(compiled, OptimizedModule) and from_compiled(compiled) is module
assert torch.compile(step, backend="eager")(torch.zeros(())) == -1
import torch._dynamo.config
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
"""
    check(program, tmp_path)


def test_a_submodule_of_the_compiler_can_be_imported_first(tmp_path: Path):
    program = """
import torch._dynamo.exc
from torch._dynamo import OptimizedModule
from torch._dynamo.eval_frame import OptimizedModule as original
assert OptimizedModule is original and torch._dynamo.exc.TorchDynamoException
"""
    check(program, tmp_path)
