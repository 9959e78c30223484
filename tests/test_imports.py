"""Imports go one way, in the order of `ORDER`, and nothing heavy is imported that is not used."""

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest
from small_runs import ROOT

ORDER = [
    *("utils", "data", "model", "training", "checkpoints", "distributed", "sampling", "runs"),
    *("sweeps", "extras", "scripts"),
]
READ = {"train": 5431, "sample": 2749}  # statements that a script imports, extras aside
SIZES = {"core": 7173, "extras": 4787}  # statements of Python
# What makes a reader read a line twice. Its length is limited by ruff.
DENSE = {
    "core": {"a, b = x, y": 15, "walrus": 15, "nested comprehension": 0, "Any": 110},
    "tests": {"a, b = x, y": 5, "walrus": 10, "nested comprehension": 0},
}
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for folder in ("minigpt", "hydra_plugins", "scripts")
    for file in (ROOT / folder).rglob("*.py")
    if file.name != "__init__.py"
}
TREES = {module: ast.parse(file.read_text(encoding="utf-8")) for module, file in MODULES.items()}
TESTS = [ast.parse(file.read_bytes()) for file in (ROOT / "tests").rglob("*.py")]
CORE = {name for name in MODULES if name.startswith("minigpt.") and ".extras." not in name}


def place_of(module: str) -> int:
    """The place in `ORDER` of a module's package; what starts a script is one."""
    top, package, *_ = module.split(".")
    return ORDER.index(package if top == "minigpt" and package in ORDER else "scripts")


def imports(module: str) -> set[str]:
    """Every module that a module imports, also inside functions and for type checkers only."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


GRAPH = {module: imports(module) & MODULES.keys() for module in MODULES}


def statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def test_a_module_imports_from_its_own_package_and_those_before_it_and_not_in_circles():
    pairs = [(one, other) for one, used in GRAPH.items() for other in used]
    assert not [(one, other) for one, other in pairs if place_of(other) > place_of(one)]
    order = TopologicalSorter(GRAPH).static_order()  # raises CycleError for a cycle
    assert len(list(order)) == len(MODULES)


def test_the_core_and_what_a_run_and_a_sample_need_of_it_are_not_longer_than_they_were():
    found = {"core": CORE, "extras": {name for name in MODULES if ".extras." in name}}
    for script in READ:
        modules = set()
        new = {f"scripts.{script}"}
        while new:
            modules |= new
            used = set().union(*(GRAPH[module] for module in new))
            new = {module for module in used if ".extras." not in module} - modules
        found[script] = modules
    lengths = {name: statements(tree) for name, tree in TREES.items()}
    sizes = {name: sum(map(lengths.get, modules)) for name, modules in found.items()}
    assert {name for name, most in (READ | SIZES).items() if sizes[name] > most} == set(), sizes


def test_functions_and_modules_of_the_core_are_short():
    sizes = {module: statements(TREES[module]) for module in CORE}
    assert {module: size for module, size in sizes.items() if size > 250} == {}
    for module in CORE:
        for node in ast.walk(TREES[module]):
            if isinstance(node, ast.FunctionDef):
                assert statements(node) - 1 <= 35, f"{module}.{node.name}"


@pytest.mark.parametrize("part", DENSE)
def test_lines_of_the_core_and_of_tests_do_one_thing(part):
    found = Counter()
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    trees = TESTS if part == "tests" else [TREES[module] for module in CORE]
    for node in chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            found["a, b = x, y"] += any(isinstance(left, ast.Tuple) for left in node.targets)
        elif isinstance(node, comprehensions):
            inner = [each for child in ast.iter_child_nodes(node) for each in ast.walk(child)]
            nested = any(isinstance(each, comprehensions) for each in inner)
            found["nested comprehension"] += nested
        found["walrus"] += isinstance(node, ast.NamedExpr)
        found["Any"] += isinstance(node, ast.Name) and node.id == "Any"
    assert {kind for kind, most in DENSE[part].items() if found[kind] > most} == set(), found


def test_there_are_few_packages_and_no_modules_beside_them():
    package = ROOT / "minigpt"
    assert {file.name for file in package.glob("*.py")} == {"__init__.py", "__main__.py"}
    own = [file for file in package.rglob("__init__.py") if file.parent != package]
    assert len(own) <= 20
    for file in own:  # empty, or a docstring
        assert statements(ast.parse(file.read_text(encoding="utf-8"))) <= 1, file


def test_a_run_imports_no_package_that_it_does_not_use_before_its_first_step(
    small: list[str], tmp_path: Path
):
    of_torch = {name for name, file in MODULES.items() if b"orch alone." in file.read_bytes()}
    known = {"minigpt.model.gpt", "minigpt.training.optim", "minigpt.sampling.generation"}
    assert known <= of_torch
    packages = {name.partition(".")[0] for module in of_torch for name in imports(module)}
    assert packages - sys.stdlib_module_names == {"minigpt", "torch"}
    program = f"""
import runpy, sys
import {", ".join(of_torch)}
heavy = {{"lightning", "pytorch_lightning", "lightning_fabric", "hydra", "omegaconf", "wandb"}}
assert not heavy & {{*sys.modules}}
from minigpt.model.changes import GPTConfig, empty_model
assert empty_model(GPTConfig(vocab_size=65)).wte.weight.is_meta
assert "torch._dynamo" not in sys.modules
sys.argv = ["train.py", *{small}, "resume=missing.safetensors"]  # ends after the imports
try:
    runpy.run_path("{ROOT}/scripts/train.py", run_name="__main__")
finally:
    print(*sys.modules)
"""
    options = {"cwd": tmp_path, "capture_output": True, "encoding": "utf-8", "check": False}
    result = subprocess.run([sys.executable, "-c", program], **options)
    assert "missing.safetensors does not exist" in result.stderr
    found = {name.partition(".")[0] for name in result.stdout.split()}
    unused = """datasets huggingface_hub joblib matplotlib optuna pandas scipy
        sklearn submitit tensorboard tokenizers transformers wandb"""
    assert not found & {*unused.split()}
