"""Checkpoints are restored exactly, execute no code, are written atomically, and damaged files are rejected."""

import copy
import os
import re
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from minigpt import GPT, GPTConfig
from minigpt.checkpoints import format
from minigpt.checkpoints.find import BEST, LAST, PREVIOUS, find_checkpoint
from minigpt.checkpoints.format import FORMAT, read, write
from minigpt.checkpoints.load import contents, load_checkpoint, save_checkpoint
from minigpt.checkpoints.resume import find_resumed
from minigpt.data.tokenizer import CharTokenizer
from minigpt.utils.errors import UserError
from minigpt.utils.signals import Interrupted

ALPHABET = "\n abcdeé€😀"
LLAMA = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
ARCHITECTURES = {
    "gpt2": {},
    "llama": {**LLAMA, "tie_embeddings": False, "n_kv_head": 1},
    "post-norm": {"norm_position": "post", "qk_norm": True, "dropout": 0.3, "head_dim": 6, "n_inner": 20},
}


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_model_and_tokenizer_are_restored_exactly(tmp_path: Path, settings: dict[str, Any]):
    model, tokenizer = make(**settings), CharTokenizer(ALPHABET)
    save_checkpoint(model, tokenizer, str(tmp_path / "new" / "a.safetensors"))
    loaded, again = load_checkpoint(tmp_path / "new" / "a.safetensors")
    assert (loaded.config, loaded.training) == (model.config, False)
    assert_same(loaded.state_dict(), model.state_dict())
    assert (loaded.lm_head.weight is loaded.wte.weight) == model.config.tie_embeddings
    tokens = torch.randint(len(ALPHABET), (2, 8))
    assert torch.equal(loaded(tokens), model.eval()(tokens))
    assert again.to_dict() == tokenizer.to_dict()
    assert again.decode(again.encode("a 😀\n€")) == "a 😀\n€"


def test_other_tools_read_the_weights_also_of_a_compiled_model(tmp_path: Path):
    model, tokenizer = make(tie_embeddings=True).eval(), CharTokenizer(ALPHABET)
    save_checkpoint(torch.compile(model), tokenizer, tmp_path / "mine.safetensors")
    tokens = tokenizer.encode("bad é€😀")[None]
    tensors = load_file(tmp_path / "mine.safetensors")
    assert sum(weight.numel() for weight in tensors.values()) == model.num_params()  # tied weights are stored once
    other = GPT(model.config)
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert other.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    assert torch.equal(other.eval()(tokens), model(tokens))


def compile_blocks(model: GPT) -> GPT:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    return model


def set_head(model: GPT, weight: nn.Parameter) -> GPT:
    model.lm_head.weight = weight
    return model


def with_hook(model: GPT) -> GPT:
    model.blocks[0].register_forward_hook(lambda module, args, x: None)
    return model


SAVED: dict[str, Callable[[], nn.Module]] = {
    "compiled by block": lambda: compile_blocks(make()),
    "compiled": lambda: torch.compile(compile_blocks(make()), backend="eager"),
    "data parallel": lambda: nn.DataParallel(make()),
    "untied": lambda: set_head(model := make(), nn.Parameter(model.wte.weight.detach().flip(0))),
    "untied, with equal values": lambda: set_head(model := make(), nn.Parameter(model.wte.weight.detach().clone())),
    "tied": lambda: set_head(model := make(tie_embeddings=False), model.wte.weight),
    "with a hook": lambda: with_hook(make()),
    "frozen": lambda: make().requires_grad_(False),
    "in float64": lambda: make().double(),
    "in bfloat16 before": lambda: make(position="rope").bfloat16().float(),
}


@pytest.mark.parametrize("how", SAVED)
def test_what_is_saved_is_loaded_with_the_same_logits(tmp_path: Path, how: str, capsys: Any):
    model: Any = SAVED[how]().eval()
    save_checkpoint(model, CharTokenizer(ALPHABET), tmp_path / "a.safetensors")
    assert ("a.safetensors does not hold the hooks of the model" in capsys.readouterr().err) == (how == "with a hook")
    loaded, _ = load_checkpoint(tmp_path / "a.safetensors")
    model, tokens = getattr(model, "module", model), torch.randint(len(ALPHABET), (2, 8))
    assert_close(loaded(tokens), model(tokens).float())
    assert (loaded.lm_head.weight is loaded.wte.weight) == (model.lm_head.weight is model.wte.weight)
    assert loaded.config.tie_embeddings == (model.lm_head.weight is model.wte.weight)


class Doubled(nn.Linear):
    """As LoRA, but with the names and shapes of a linear layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


NOT_SAVED: dict[str, tuple[Callable[[GPT], Any], str]] = {
    "another class": (
        lambda m: m.set_submodule("blocks.1.mlp.up", Doubled(16, 64)),
        "model.blocks.1.mlp.up is of class test_checkpoint.Doubled, not Linear",
    ),
    "a parametrization": (
        lambda m: parametrizations.weight_norm(m.blocks[0].mlp.down),
        "model.blocks.0.mlp.down is of class torch.nn.utils.parametrize.ParametrizedLinear, not Linear",
    ),
    "pruning": (
        lambda m: prune.l1_unstructured(m.blocks[0].mlp.up, "weight", 0.5),
        "model.blocks.0.mlp.up.weight is missing",
    ),
    "a new module": (lambda m: m.add_module("adapter", nn.Linear(2, 2)), "model.adapter is new"),
    "a longer table of positions": (lambda m: setattr(m, "wpe", nn.Embedding(9, 16)), "model.wpe.num_embeddings is"),
    "a parameter of another shape": (
        lambda m: setattr(m.wpe, "weight", nn.Parameter(torch.zeros(9, 16))),
        "model.wpe.weight is changed in kind, shape or value",
    ),
    "a replaced method": (lambda m: setattr(m.blocks[0].mlp, "forward", nn.Identity()), "model.blocks.0.mlp.forward"),
    "an attribute": (lambda m: setattr(m.blocks[1].attention, "scale", 0.1), "model.blocks.1.attention.scale is"),
    "fewer blocks": (lambda m: m.blocks.pop(1), "model.blocks.1 is missing"),
    "a subclass": (
        lambda m: setattr(m, "__class__", type("Mine", (GPT,), {})),
        "model is of class test_",
    ),
}


@pytest.mark.parametrize("how", NOT_SAVED)
def test_a_model_that_weights_and_config_do_not_describe_is_not_saved(tmp_path: Path, how: str):
    change, message = NOT_SAVED[how]
    model = make()
    change(model)
    with pytest.raises(UserError, match=f"^weights and a config cannot describe this model: {re.escape(message)}"):
        save_checkpoint(model, CharTokenizer(ALPHABET), tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())


def test_shared_blocks_that_are_no_longer_shared_are_not_saved(tmp_path: Path):
    model = make(layer_repeats=2)
    model.blocks[1] = copy.deepcopy(model.blocks[0])
    with pytest.raises(UserError, match=r"model\.blocks\.1 is no longer shared"):
        save_checkpoint(model, CharTokenizer(ALPHABET), tmp_path / "a.safetensors")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_when_saved(tmp_path: Path):
    with pytest.raises(UserError, match=r"vocab_size must be at least the tokenizer's 11, got 10"):
        save_checkpoint(make(), CharTokenizer("".join(sorted(f"{ALPHABET}f"))), tmp_path / "mine.safetensors")
    assert not any(tmp_path.iterdir())


def test_a_model_without_training_state_is_not_resumed(tmp_path: Path):
    save_checkpoint(make(), CharTokenizer(ALPHABET), tmp_path / LAST)
    reason = f"{tmp_path / LAST} holds a model without its run; use a checkpoint of a training run"
    for resume, message in ((str(tmp_path), reason), ("auto", f"resume=auto: no checkpoint in .* {reason}")):
        with pytest.raises(UserError, match=f"^{message}$"):
            find_resumed(resume, tmp_path, checkpoint(make()))


DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
SHARED = torch.rand(2, 3)
VALUES: dict[str, Any] = {
    "a scalar": torch.tensor(2.5, dtype=torch.float64),
    "no elements": torch.empty(0, 4),
    "a transposed tensor": torch.rand(3, 5).t(),
    "a broadcast tensor": torch.rand(1).expand(4),
    "shared memory": [SHARED, {"again": SHARED.view(2, 3)}],
    "every dtype": [torch.ones(3).to(getattr(torch, name)) for name in DTYPES],
    "integer keys": {0: {"exp_avg": torch.rand(2)}, 7: {}, "x": 1, -3: [4]},
    "tuples": [(0.9, 0.95), ((1,), []), ()],
    "numbers": [0, -1, (1 << 63) - 1, 1e-300, 0.1, float("inf"), True, False, None],
    "keys with dots and dollars": {"a.b": torch.rand(1), "a": {"b": torch.rand(2)}, "$tensor": "x", "$dict": [["y"]]},
    "texts": ['é\n😀\x00\x1b"', "\ud800", ""],
}


@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_value_is_restored_with_its_type(tmp_path: Path, name: str):
    write(checkpoint(make()) | {"x": VALUES[name]}, tmp_path / "a.safetensors")
    assert_same(read(tmp_path / "a.safetensors")["x"], VALUES[name])


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("value", [Path("runs"), {(1, 2): 3}, [[{"a": print}]]], ids=repr)
def test_values_that_are_not_plain_data_are_refused_when_written(tmp_path: Path, value: Any):
    with pytest.raises(UserError, match=r"tensors and plain data only; callbacks\.x.* is of type"):
        write(checkpoint(make()) | {"callbacks": {"x": value}}, tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())


def test_a_file_of_another_format_is_rejected_with_both_numbers(tmp_path: Path):
    content = checkpoint(make())
    content["minigpt"]["format"] = FORMAT + 1
    write(content, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=rf"a\.safetensors .* it has format {FORMAT + 1}; .* reads format {FORMAT}"):
        load_checkpoint(tmp_path / "a.safetensors")


def test_a_path_or_a_run_folder_or_nothing_refers_to_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="train"):
        find_checkpoint(None)
    runs = Path("runs")
    for age, name in ((30, f"z/{BEST}"), (10, f"m/{BEST}"), (20, f"a/{BEST}"), (0, f"m/{LAST}")):
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        (runs / name).touch()
        os.utime(runs / name, (1e9 - age, 1e9 - age))
    assert find_checkpoint(None) == find_checkpoint(runs / "m") == runs / "m" / BEST
    assert find_checkpoint(runs / "m" / LAST) == runs / "m" / LAST
    (runs / "m" / BEST).unlink()
    assert find_checkpoint(str(runs / "m")) == runs / "m" / LAST
    for path, message in ((runs / "absent", "absent does not exist"), (runs, "holds no")):
        with pytest.raises(UserError, match=message):
            find_checkpoint(path)


def test_the_last_checkpoint_becomes_previous(tmp_path: Path):
    for step in (10, 20, 30):
        write(checkpoint(make()) | {"global_step": step}, tmp_path / LAST)
    assert [read(tmp_path / name)["global_step"] for name in (LAST, PREVIOUS)] == [30, 20]
    assert {file.name for file in (tmp_path / LAST).parent.iterdir()} == {"last.safetensors", "previous.safetensors"}
    (tmp_path / "touched").touch()
    assert (tmp_path / LAST).stat().st_mode == (tmp_path / "touched").stat().st_mode  # as the umask allows


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_is_detected_wherever_it_matters(tmp_path: Path, bit: int):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    good, expected = path.read_bytes(), read(path)
    header = int.from_bytes(good[:8], "little") + 8
    for place in [*range(8), *torch.randint(header, (60,)).tolist(), *torch.randint(header, len(good), (30,)).tolist()]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
        if place >= header:
            with pytest.raises(UserError, match="its checksum is wrong; use an older checkpoint"):
                read(path)
            continue
        try:
            content = read(path)
        except UserError:
            continue
        assert_same(content, expected)  # the bit is in `"format": "pt"` or in the padding


def test_auto_resumes_from_the_newest_undamaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = checkpoint(make())
    run["minigpt"]["config"] |= {"data": {}, "schedule": {}, "trainer": {}, "max_steps": 40}
    find = partial(find_resumed, "auto", tmp_path, run)
    assert find() == (None, 0, {}, False)
    older = checkpoint(make())["minigpt"] | {"config": run["minigpt"]["config"]}
    del older["model"]["embed_norm"]  # a setting that the version before did not have
    for step in (10, 20, 30):
        write(run | {"minigpt": older, "global_step": step}, tmp_path / LAST)
    write(run | {"global_step": 10}, tmp_path / BEST)
    assert find() == (tmp_path / LAST, 30, {}, False)
    assert capsys.readouterr().err == ""

    last = (tmp_path / LAST).read_bytes()
    for harm in (last[:-9], b"", last[:-9] + b"x" + last[-8:]):
        (tmp_path / LAST).write_bytes(harm)
        assert find() == (tmp_path / PREVIOUS, 20, {}, False)
        stderr = capsys.readouterr().err
        assert stderr.startswith(f"warning: {tmp_path / LAST} is not a complete checkpoint")
        assert stderr.endswith(f"resuming from {tmp_path / PREVIOUS}\n")
    (tmp_path / PREVIOUS).write_bytes(b"")
    assert find() == (tmp_path / BEST, 10, {}, False)
    (tmp_path / BEST).write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be resumed; .*last\.safetensors is not a complete"):
        find()


def test_an_interrupt_or_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    before, larger = path.read_bytes(), checkpoint(make()) | {"big": torch.rand(100_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # bytes in a file
    try:
        with pytest.raises(OSError, match=rf"File too large: '{path}'"):
            write(larger, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def interrupt(tensors: Any, file: Path, metadata: Any) -> None:
        save_file(tensors, file, metadata)
        raise Interrupted(2)

    monkeypatch.setattr(format, "save_file", interrupt)
    with pytest.raises(Interrupted):
        write(larger, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def make(**settings: Any) -> GPT:
    shape = {"block_size": 8, "vocab_size": len(ALPHABET), "n_layer": 2, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**{**shape, **settings}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def checkpoint(model: GPT) -> dict[str, Any]:
    """Return what Lightning would write: the weights of the module, and what a run adds."""
    run = {"seed": 7, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, "data": None}
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tokenizer = CharTokenizer(ALPHABET)
    return {"state_dict": weights, **contents(model.config, tokenizer, config=run, corpus_sha256="ab12")}
