"""Imports go one way, in the order of `ORDER`."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ["utils", "config", "data", "core", "page", "checkpoints", "interpret", "runs", "sweeps", "serve", "scripts"]
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for folder in ("minigpt", "hydra_plugins", "scripts")
    for file in (ROOT / folder).rglob("*.py")
    if file.name != "__init__.py"
}
MODEL_FILES = ("attention", "model", "ops", "optim", "schedules", "ema", "generation", "sampling", "kv_decoder", "int8")


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


def test_a_run_imports_no_package_that_it_does_not_use_before_its_first_step(small: list[str], tmp_path: Path) -> None:
    arguments = [*small, "resume=missing.safetensors"]  # ends after the imports
    command = [sys.executable, "-X", "importtime", str(ROOT / "scripts/train.py"), *arguments]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stderr
    assert "missing.safetensors does not exist" in output
    found = set(re.findall(r"\| +(\w+)$", output, re.MULTILINE))
    assert {"torch", "lightning"} <= found
    unused = {"datasets", "huggingface_hub", "joblib", "matplotlib", "optuna", "pandas", "pooch", "scipy"}
    assert not found & {*unused, "sklearn", "submitit", "tensorboard", "tokenizers", "transformers", "wandb"}


def test_an_empty_model_is_built_without_the_compiler_of_torch() -> None:
    code = """
import sys
from minigpt.checkpoints.models import GPTConfig, empty_model
assert empty_model(GPTConfig(vocab_size=65)).wte.weight.is_meta
print("torch._dynamo" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "False\n"
