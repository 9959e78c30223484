"""Imports go one way, in the order of `ORDER`, and nothing heavy is imported that is not used."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from small_runs import ROOT

import minigpt

ORDER = [
    *("utils", "data", "model", "training", "checkpoints", "distributed", "sampling", "runs"),
    *("sweeps", "extras", "scripts"),
]
READ = {
    "train": 5325,
    "sample": 2690,
}  # statements of the modules that a script imports, extras aside
SIZES = {"core": 7005, "extras": 2880}  # statements of Python
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for folder in ("minigpt", "hydra_plugins", "scripts")
    for file in (ROOT / folder).rglob("*.py")
    if file.name != "__init__.py"
}


def place_of(module: str) -> int:
    """The place in `ORDER` of a module's package; what starts a script is one."""
    top, package, *_ = module.split(".")
    return ORDER.index(package if top == "minigpt" and package in ORDER else "scripts")


def imports(file: Path) -> set[str]:
    """Every module that a file imports, also inside functions and for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def statements(file: Path) -> int:
    return sum(
        isinstance(node, ast.stmt) for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )


def test_a_module_imports_from_its_own_package_and_those_before_it_and_not_in_circles():
    graph = {module: imports(file) & MODULES.keys() for module, file in MODULES.items()}
    later = {
        (one, other)
        for one, used in graph.items()
        for other in used
        if place_of(other) > place_of(one)
    }
    assert not later
    # Raises CycleError for a cycle
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_the_core_and_what_a_run_and_a_sample_need_of_it_are_not_longer_than_they_were():
    graph = {module: imports(file) & MODULES.keys() for module, file in MODULES.items()}
    found = {script: {f"scripts.{script}"} for script in READ}
    for modules in found.values():
        while (
            more := {used for one in modules for used in graph[one] if ".extras." not in used}
            - modules
        ):
            modules |= more
    found["core"] = {
        module for module in MODULES if module.startswith("minigpt.") and ".extras." not in module
    }
    found["extras"] = {
        module for module in MODULES if ".extras." in module and module != "minigpt.utils.extras"
    }
    sizes = {name: sum(statements(MODULES[module]) for module in found[name]) for name in found}
    assert {name for name, most in (READ | SIZES).items() if sizes[name] > most} == set(), sizes


def test_a_run_and_its_samples_need_no_extra(train, monkeypatch: pytest.MonkeyPatch):
    """No module of the core imports one, as the test above says, and none is reached by its name."""
    monkeypatch.setattr("minigpt.utils.extras.resolve_name", None)
    monkeypatch.setitem(sys.modules, "minigpt.extras.interpret.snapshots", None)
    folder = train(
        "callbacks.samples.max_new_tokens=5", "callbacks.snapshots=null", "originality=null"
    ).folder
    model, _ = minigpt.load_checkpoint(folder)
    assert len(minigpt.generate(model, [1], max_new_tokens=3)[0].tokens) == 3


def test_a_run_imports_no_package_that_it_does_not_use_before_its_first_step(
    small: list[str], tmp_path: Path
):
    of_torch = [
        module
        for module, file in MODULES.items()
        if "orch alone." in file.read_text(encoding="utf-8")
    ]
    assert {"minigpt.model.gpt", "minigpt.training.optim", "minigpt.sampling.generation"} <= {
        *of_torch
    }
    packages = {name.partition(".")[0] for module in of_torch for name in imports(MODULES[module])}
    assert packages - sys.stdlib_module_names == {"minigpt", "torch"}
    program = f"""
import runpy, sys
import {", ".join(of_torch)}
assert not {{"lightning", "pytorch_lightning", "lightning_fabric", "hydra", "omegaconf", "wandb"}} & {{*sys.modules}}
from minigpt.model.changes import GPTConfig, empty_model
assert empty_model(GPTConfig(vocab_size=65)).wte.weight.is_meta
assert "torch._dynamo" not in sys.modules
sys.argv = ["train.py", *{small}, "resume=missing.safetensors"]  # ends after the imports
try:
    runpy.run_path("{ROOT}/scripts/train.py", run_name="__main__")
finally:
    print(*sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert "missing.safetensors does not exist" in result.stderr
    found = {name.partition(".")[0] for name in result.stdout.split()}
    unused = {"datasets", "huggingface_hub", "joblib", "matplotlib", "optuna", "pandas", "scipy"}
    assert not found & {
        *unused,
        "sklearn",
        "submitit",
        "tensorboard",
        "tokenizers",
        "transformers",
        "wandb",
    }
