"""Imports go one way, in the order of `ORDER`; modules have names of their own and at most 350 lines."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from small_runs import ROOT

ORDER = [
    *("utils", "config", "data", "core", "page", "checkpoints", "interpret"),
    *("distributed", "runs", "sweeps", "serve", "scripts"),
]
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for folder in ("minigpt", "hydra_plugins", "scripts")
    for file in (ROOT / folder).rglob("*.py")
    if file.name != "__init__.py"
}
MODEL_FILES = (
    *("attention", "model", "ops", "optim", "schedules", "ema", "generation", "sampling"),
    *("structure", "decoder", "fast_decoder"),
)


def package_of(module: str) -> str:
    """The step of `ORDER` that a module belongs to; flat files are the core, except config."""
    top, *rest = module.split(".")
    if top != "minigpt":
        return "scripts"
    return rest[0] if len(rest) > 1 or rest[0] == "config" else "core"


def imports(file: Path) -> set[str]:
    """Every module that a file imports, also inside functions and for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_own_package_and_those_before_it(module: str) -> None:
    place = ORDER.index(package_of(module))
    later = {name for name in imports(MODULES[module]) & MODULES.keys() if ORDER.index(package_of(name)) > place}
    assert not later


def test_no_modules_import_each_other() -> None:
    graph = {module: imports(file) & MODULES.keys() for module, file in MODULES.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)  # raises CycleError for a cycle


@pytest.mark.parametrize("name", MODEL_FILES)
def test_model_files_import_torch_alone(name: str) -> None:
    heavy = {"lightning", "hydra", "omegaconf", "wandb", "numpy", "tiktoken", "matplotlib"}
    assert not {module.partition(".")[0] for module in imports(MODULES[f"minigpt.{name}"])} & heavy


def test_no_module_has_more_than_350_lines() -> None:
    lengths = {module: len(file.read_text(encoding="utf-8").splitlines()) for module, file in MODULES.items()}
    assert {module: length for module, length in lengths.items() if length > 350} == {}


def test_a_run_imports_no_package_that_it_does_not_use_before_its_first_step(small: list[str], tmp_path: Path) -> None:
    """Nor does the model need Lightning or Hydra, or an empty one, as sampling builds it, the compiler of torch."""
    program = f"""
import runpy, sys
import {", ".join(f"minigpt.{name}" for name in MODEL_FILES)}
assert not {{"lightning", "pytorch_lightning", "lightning_fabric", "hydra", "omegaconf", "wandb"}} & {{*sys.modules}}
from minigpt.structure import GPTConfig, empty_model
assert empty_model(GPTConfig(vocab_size=65)).wte.weight.is_meta
assert "torch._dynamo" not in sys.modules
sys.argv = ["train.py", *{small}, "resume=missing.safetensors"]  # ends after the imports
try:
    runpy.run_path("{ROOT}/scripts/train.py", run_name="__main__")
finally:
    print(*sys.modules)
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "missing.safetensors does not exist" in result.stderr
    found = {name.partition(".")[0] for name in result.stdout.split()}
    assert {"torch", "lightning"} <= found
    unused = {"datasets", "huggingface_hub", "joblib", "matplotlib", "optuna", "pandas", "pooch", "scipy"}
    assert not found & {*unused, "sklearn", "submitit", "tensorboard", "tokenizers", "transformers", "wandb"}
