"""Imports go one way, in the order of `ORDER`."""

import ast
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
