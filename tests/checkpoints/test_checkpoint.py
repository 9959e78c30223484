"""Checkpoints are restored exactly, execute no code, are written atomically, and damaged files are rejected."""

import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from minigpt import GPT, GPTConfig
from minigpt.checkpoints import format
from minigpt.checkpoints.find import BEST, LAST, PREVIOUS, find_checkpoint
from minigpt.checkpoints.format import FORMAT, MAX_HEADER_BYTES, checksum, read, write
from minigpt.checkpoints.models import load_checkpoint, save_checkpoint
from minigpt.checkpoints.resume import contents, find_resumed
from minigpt.data.tokenizer import CharTokenizer
from minigpt.runs.trainer import CheckpointIO
from minigpt.utils.errors import UserError
from minigpt.utils.signals import Interrupted

ALPHABET = "\n abcdeé€😀"
ARCHITECTURES = {
    "gpt2": {},
    "llama": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
        "n_kv_head": 1,
    },
    "post-norm": {"norm_position": "post", "qk_norm": True, "dropout": 0.3, "head_dim": 6, "n_inner": 20},
}


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_model_and_tokenizer_are_restored_exactly(tmp_path: Path, settings: dict[str, Any]):
    model = make(**settings)
    write(checkpoint(model), tmp_path / "a.safetensors")
    loaded, tokenizer = load_checkpoint(tmp_path / "a.safetensors")
    assert loaded.config == model.config
    for (name, one), (other_name, other) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)
    tokens = torch.randint(len(ALPHABET), (2, 8))
    assert torch.equal(loaded(tokens), model.eval()(tokens))
    assert not loaded.training
    assert tokenizer.vocab_size == len(ALPHABET)
    assert tokenizer.encode("bade😀é").tolist() == CharTokenizer.of(ALPHABET).encode("bade😀é").tolist()
    assert tokenizer.decode(tokenizer.encode("a 😀\n€")) == "a 😀\n€"


@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled"])
def test_a_model_of_another_training_loop_is_saved_and_loaded(tmp_path: Path, wrap: Callable[..., Any]):
    model, tokenizer = make(tie_embeddings=True), CharTokenizer.of(ALPHABET)
    save_checkpoint(wrap(model), tokenizer, str(tmp_path / "new" / "mine.safetensors"))
    loaded, again = load_checkpoint(tmp_path / "new" / "mine.safetensors")
    tokens = again.encode("bad é€😀")[None]
    assert torch.equal(loaded(tokens), model.eval()(tokens))
    assert loaded.lm_head.weight is loaded.wte.weight
    assert loaded.config == model.config
    assert again.to_dict() == tokenizer.to_dict()


@pytest.mark.parametrize("settings", [{"tie_embeddings": True}, ARCHITECTURES["llama"]])
def test_other_tools_read_the_weights_and_a_gpt_is_built_from_them(tmp_path: Path, settings: dict[str, Any]):
    model = make(**settings)
    write(checkpoint(model) | {"optimizer_states": [{"state": {0: {"exp_avg": torch.rand(3)}}}]}, tmp_path / BEST)
    tensors = load_file(tmp_path / BEST)
    assert "optimizer.0.state.0.exp_avg" in tensors
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    assert sum(weight.numel() for weight in weights.values()) == model.num_params()  # tied weights are stored once
    other = GPT(model.config)
    assert set(other.load_state_dict(weights, strict=False).missing_keys) <= {"lm_head.weight"}
    tokens = torch.randint(len(ALPHABET), (2, 8))
    assert torch.equal(other.eval()(tokens), model.eval()(tokens))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_when_saved(tmp_path: Path):
    with pytest.raises(UserError, match=r"vocab_size must be at least the tokenizer's 11, got 10"):
        save_checkpoint(make(), CharTokenizer.of(f"{ALPHABET}f"), tmp_path / "mine.safetensors")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mine.safetensors", LAST])
def test_a_model_without_training_state_is_not_resumed(tmp_path: Path, name: str):
    save_checkpoint(make(), CharTokenizer.of(ALPHABET), tmp_path / name)
    reason = "holds a model without its run; use a checkpoint of a training run"
    with pytest.raises(UserError, match=rf"^{tmp_path / name} {reason}$"):
        find_resumed(str(tmp_path / name), tmp_path, checkpoint(make()))
    if name == LAST:
        with pytest.raises(UserError, match=rf"^resume=auto: no checkpoint in .* can be resumed; .*{name} {reason}$"):
            find_resumed("auto", tmp_path, checkpoint(make()))


def test_configuration_progress_and_optimizer_state_are_kept(tmp_path: Path):
    content = checkpoint(make()) | {"global_step": 250, "optimizer_states": [{"lr": 0.1, "exp_avg": torch.rand(3)}]}
    write(content, tmp_path / "a.safetensors")
    again = read(tmp_path / "a.safetensors")
    assert again["minigpt"]["config"] == {"seed": 7, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, "data": None}
    assert again["minigpt"]["corpus_sha256"] == "ab12"
    assert again["global_step"] == 250
    assert torch.equal(again["optimizer_states"][0]["exp_avg"], content["optimizer_states"][0]["exp_avg"])


DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
SHARED = torch.rand(2, 3)
VALUES: dict[str, Any] = {
    "a scalar": torch.tensor(2.5, dtype=torch.float64),
    "no elements": torch.empty(0, 4),
    "a transposed tensor": torch.rand(3, 5).t(),
    "a broadcast tensor": torch.rand(1).expand(4),
    "parts of one tensor": list(torch.rand(4, 2).unbind()),
    "shared memory": [SHARED, {"again": SHARED.view(2, 3)}],
    "every dtype": [torch.ones(3).to(getattr(torch, name)) for name in DTYPES],
    "integer keys": {0: {"exp_avg": torch.rand(2)}, 7: {}, "x": 1, -3: [4]},
    "tuples": [(0.9, 0.95), ((1,), []), ()],
    "numbers": [0, -1, (1 << 63) - 1, 1e-300, 0.1, float("inf"), True, False, None],
    "keys with dots and dollars": {"a.b": torch.rand(1), "a": {"b": torch.rand(2)}, "$tensor": "x", "$dict": [["y"]]},
    "texts": ['é\n😀\x00\x1b"', "\ud800", ""],
    "nothing": {},
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


def test_tensors_that_share_memory_share_it_after_reading(tmp_path: Path):
    write(checkpoint(make(tie_embeddings=True)), tmp_path / "a.safetensors")
    weights = read(tmp_path / "a.safetensors")["state_dict"]
    assert weights["model.lm_head.weight"] is weights["model.wte.weight"]


@pytest.mark.parametrize("value", [Path("runs"), {1, 2}, b"bytes", {(1, 2): 3}, [[{"a": print}]]], ids=repr)
def test_values_that_are_not_plain_data_are_refused_when_written(tmp_path: Path, value: Any):
    with pytest.raises(UserError, match=r"tensors and plain data only; callbacks\.x.* is of type"):
        write(checkpoint(make()) | {"callbacks": {"x": value}}, tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())


def test_more_metadata_than_can_be_read_is_refused_when_written(tmp_path: Path):
    with pytest.raises(UserError, match="its header is larger than"):
        write(checkpoint(make()) | {"x": "a" * MAX_HEADER_BYTES}, tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())


def test_lightning_writes_and_reads_the_same_file(tmp_path: Path):
    content = checkpoint(make())
    CheckpointIO().save_checkpoint(content, tmp_path / "a.safetensors")
    write(content, tmp_path / "b.safetensors")
    again = CheckpointIO().load_checkpoint(tmp_path / "b.safetensors")
    assert again["minigpt"] == content["minigpt"] == read(tmp_path / "a.safetensors")["minigpt"]
    with pytest.raises(UserError):
        CheckpointIO().load_checkpoint(hostile(tmp_path / "c.safetensors", tmp_path / "canary"), weights_only=False)


def test_a_checkpoint_in_one_folder_loads_from_another(tmp_path: Path):
    write(checkpoint(make()), tmp_path / "run" / LAST)
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert load_checkpoint(moved)[0].config == make().config


@pytest.mark.parametrize("plain", [False, True], ids=["zipped", "a plain pickle"])
def test_pickles_are_rejected_and_do_not_execute(tmp_path: Path, plain: bool):
    canary = tmp_path / "canary"
    path = hostile(tmp_path / "a.safetensors", canary, plain)
    with pytest.raises(UserError, match=r"a\.safetensors is not a safetensors file but a pickle of torch\.save"):
        load_checkpoint(path)
    assert not canary.exists()
    if plain:
        pickle.loads(path.read_bytes())
    else:
        torch.load(path.rename(tmp_path / "a.ckpt"), weights_only=False)  # by another name: it reads safetensors too
    assert canary.exists()  # the file is indeed hostile


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.7, 0.99])
def test_a_truncated_file_is_rejected(tmp_path: Path, share: float):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"a\.safetensors is not a complete checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time there was a text file.\n",
        "To be, or not to be: that is the question.\n",
        "{'step': 3}\n",
        "step,loss\n10,3.4\n",
        *("", "\n", "{}", "(an aside)\n", ".hidden\n", "G\n", "e = mc²\n", "0\n", "q\n"),
    ],
)
def test_a_text_file_is_rejected(tmp_path: Path, text: str):
    path = tmp_path / "a.safetensors"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.safetensors is not a"):
        load_checkpoint(path)


def test_a_file_that_begins_with_any_byte_is_rejected(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    for first in range(256):
        path.write_bytes(bytes([first]) + b"\x80\x02}q\x00.")
        with pytest.raises(UserError, match=r"a\.safetensors is not a"):
            read(path)


def test_a_zip_archive_is_rejected(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing to see")
    with pytest.raises(UserError, match=r"a\.safetensors is not a"):
        load_checkpoint(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"minigpt": "{}"}, {"format": "pt", "minigpt": "[3]"}])
def test_safetensors_files_of_other_programs_are_rejected(tmp_path: Path, metadata: dict[str, str] | None):
    tensors = {"model.wte.weight": torch.ones(2)}
    if metadata and "minigpt" in metadata:
        metadata["crc32"] = checksum(metadata["minigpt"], sorted(tensors.items()))
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    with pytest.raises(UserError, match=r"a\.safetensors is not a checkpoint of minigpt"):
        load_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize("number", [FORMAT + 1, 0, None, "1"])
def test_a_file_of_another_format_is_rejected_with_both_numbers(tmp_path: Path, number: Any):
    content = checkpoint(make())
    content["minigpt"]["format"] = number
    write(content, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=rf"a\.safetensors has format {number}; .* reads format {FORMAT}"):
        load_checkpoint(tmp_path / "a.safetensors")


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def put(value: Any, *keys: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop("state_dict"), "minigpt"),
        (drop("minigpt"), "minigpt"),
        (drop("minigpt", "model"), "model"),
        (drop("minigpt", "tokenizer"), "tokenizer"),
        (drop("state_dict", "model.wte.weight"), "wte.weight"),
        (put(torch.ones(2), "state_dict", "model.extra"), "extra"),
        (put(torch.ones(3, 3), "state_dict", "model.wte.weight"), "wte.weight"),
        (put("text", "state_dict", "model.wte.weight"), "wte.weight"),
        (put([1.0], "state_dict"), "minigpt"),
        (put({3: torch.ones(1)}, "state_dict"), "model"),
        (put(8, "minigpt", "model", "n_windows"), "n_windows"),
        (put(-1, "minigpt", "model", "n_layer"), "n_layer must be"),
        (put([], "minigpt", "model"), "model"),
        (put(None, "minigpt", "tokenizer"), "model"),
        (put("sentencepiece", "minigpt", "tokenizer", "name"), "sentencepiece"),
        (put("ba", "minigpt", "tokenizer", "alphabet"), "alphabet"),
        (put(3, "minigpt", "tokenizer", "alphabet"), "alphabet"),
    ],
)
def test_a_file_whose_parts_do_not_make_a_model_is_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], named: str
):
    content = checkpoint(make())
    change(content)
    write(content, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=rf"(?s)a\.safetensors .*{named}"):
        load_checkpoint(tmp_path / "a.safetensors")


def test_a_run_folder_refers_to_its_best_checkpoint(tmp_path: Path):
    best, last = touch(tmp_path / BEST), touch(tmp_path / LAST)
    assert find_checkpoint(last) == last
    assert find_checkpoint(tmp_path) == find_checkpoint(str(tmp_path)) == best
    best.unlink()
    assert find_checkpoint(tmp_path) == last


def test_no_path_refers_to_the_best_checkpoint_of_the_newest_run(tmp_path: Path):
    old, new, other = (touch(tmp_path / name / BEST) for name in ("z", "m", "a"))
    for age, file in ((30, old), (10, new), (20, other)):
        os.utime(file, (1e9 - age, 1e9 - age))
    assert find_checkpoint(None, runs=tmp_path) == new


def test_a_missing_checkpoint_is_an_error_with_its_path(tmp_path: Path):
    with pytest.raises(UserError, match="train"):
        find_checkpoint(None, runs=tmp_path)
    with pytest.raises(UserError, match="absent does not exist"):
        find_checkpoint(tmp_path / "absent")
    with pytest.raises(UserError, match=f"{tmp_path} holds no"):
        find_checkpoint(tmp_path)
    with pytest.raises(UserError, match="absent does not exist"):
        load_checkpoint(tmp_path / "absent")


def test_write_creates_the_folder_and_leaves_one_file(tmp_path: Path):
    path = tmp_path / "run" / BEST
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = make()
        write(checkpoint(model), path)
        assert torch.equal(load_checkpoint(path)[0].wte.weight, model.wte.weight)
    assert list(path.parent.iterdir()) == [path]


def test_the_last_checkpoint_becomes_previous(tmp_path: Path):
    for step in (10, 20, 30):
        write(checkpoint(make()) | {"global_step": step}, tmp_path / LAST)
    assert read(tmp_path / LAST)["global_step"] == 30
    assert read(tmp_path / PREVIOUS)["global_step"] == 20
    assert {file.name for file in (tmp_path / LAST).parent.iterdir()} == {"last.safetensors", "previous.safetensors"}


def test_last_and_previous_are_never_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rename, met = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        target = rename(self, target)
        met.append((tmp_path / PREVIOUS).exists() and (tmp_path / LAST).samefile(tmp_path / PREVIOUS))
        return target

    monkeypatch.setattr(Path, "replace", replace)
    for step in (10, 20, 30):
        write(checkpoint(make()) | {"global_step": step}, tmp_path / LAST)
    assert met == [False] * 5  # one name at first, then two


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_is_detected_wherever_it_matters(tmp_path: Path, bit: int):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    good, expected = path.read_bytes(), read(path)
    header = int.from_bytes(good[:8], "little") + 8
    for place in [*range(8), *torch.randint(header, (60,)).tolist(), *torch.randint(header, len(good), (30,)).tolist()]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
        if place >= header:
            with pytest.raises(UserError, match="is damaged: its checksum is wrong; use an older checkpoint"):
                read(path)
            continue
        try:
            content = read(path)
        except UserError:
            continue
        assert_same(content, expected)  # the bit is in `"format": "pt"` or in the padding


def test_a_file_can_be_read_by_everyone_whom_the_umask_allows(tmp_path: Path):
    (tmp_path / "a").touch()
    write(checkpoint(make()), tmp_path / "b")
    assert (tmp_path / "b").stat().st_mode == (tmp_path / "a").stat().st_mode


def test_auto_resumes_from_the_newest_undamaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = checkpoint(make())
    run["minigpt"]["config"] |= {"data": {}, "schedule": {}, "trainer": {}, "max_steps": 40}
    find = partial(find_resumed, "auto", tmp_path, run)
    assert find() == (None, 0, {})
    for step in (10, 20, 30):
        write(run | {"global_step": step}, tmp_path / LAST)
    write(run | {"global_step": 10}, tmp_path / BEST)
    assert find() == (tmp_path / LAST, 30, {})
    assert capsys.readouterr().err == ""

    last = (tmp_path / LAST).read_bytes()
    for harm in (last[:-9], b"", last[:-9] + b"x" + last[-8:]):
        (tmp_path / LAST).write_bytes(harm)
        assert find() == (tmp_path / PREVIOUS, 20, {})
        stderr = capsys.readouterr().err
        assert stderr.startswith(f"warning: {tmp_path / LAST} is")
        assert stderr.endswith(f"resuming from {tmp_path / PREVIOUS}\n")
    (tmp_path / PREVIOUS).write_bytes(b"")
    assert find() == (tmp_path / BEST, 10, {})
    (tmp_path / BEST).write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be resumed; .*last\.safetensors is damaged"):
        find()


@pytest.mark.parametrize("claim", [{"n_layer": 1 << 40}, {"n_embd": 1 << 20}, {"n_inner": 1 << 50}, {"ngram": 1 << 30}])
def test_a_model_larger_than_its_file_is_not_built(tmp_path: Path, claim: dict[str, int]):
    content = checkpoint(make())
    content["minigpt"]["model"].update(claim)
    write(content, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors .* parameters, but the file has"):
        load_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), Interrupted(2), MemoryError()], ids=repr)
def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    before = path.read_bytes()

    def fail(tensors: Any, file: Path, metadata: Any) -> None:
        save_file(tensors, file, metadata)
        raise error

    monkeypatch.setattr(format, "save_file", fail)
    with pytest.raises(type(error)):
        write(checkpoint(make()) | {"big": torch.rand(1000)}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_os_error_and_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # bytes in a file
    try:
        with pytest.raises(OSError, match=rf"File too large: '{path}'"):
            write(checkpoint(make()) | {"big": torch.rand(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_of_the_same_name_is_left_alone(tmp_path: Path):
    kept = touch(tmp_path / "a.safetensors" / "kept")
    with pytest.raises(OSError, match=r"a\.safetensors"):
        write(checkpoint(make()), tmp_path / "a.safetensors")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [kept]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


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
    return {"state_dict": weights, **contents(model.config, CharTokenizer.of(ALPHABET), run, "ab12", {})}


class Touch:
    """An object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return open, (self.file, "w")


def hostile(path: Path, canary: Path, plain: bool = False) -> Path:
    """Write a pickle that creates the canary when it is loaded."""
    content = checkpoint(make()) | {"callbacks": Touch(canary)}
    if plain:
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    return path


def touch(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file
