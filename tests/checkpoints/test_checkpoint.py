"""Checkpoints come back exactly, run nothing, say what is wrong with a file, and are written whole or not at all."""

import io
import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from minigpt.checkpoints.checkpoint import (
    BEST,
    LAST,
    PREVIOUS,
    check_same,
    contents,
    find_checkpoint,
    find_resumed,
    load_checkpoint,
    read,
    save_checkpoint,
    write,
)
from minigpt.config import GPTConfig
from minigpt.data.tokenizer import CharTokenizer
from minigpt.model import GPT
from minigpt.runs.trainer import CheckpointIO
from minigpt.utils.errors import UserError
from minigpt.utils.signals import Interrupted

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's, of files that are none

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
def test_model_and_tokenizer_come_back_exactly(tmp_path: Path, settings: dict[str, Any]):
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
def test_a_model_of_a_loop_of_ones_own_is_saved_and_loaded(tmp_path: Path, wrap: Callable[..., Any]):
    model, tokenizer = make(tie_embeddings=True), CharTokenizer.of(ALPHABET)
    save_checkpoint(wrap(model), tokenizer, str(tmp_path / "new" / "mine.safetensors"))
    loaded, again = load_checkpoint(tmp_path / "new" / "mine.safetensors")
    tokens = again.encode("bad é€😀")[None]
    assert torch.equal(loaded(tokens), model.eval()(tokens))
    assert loaded.head.weight is loaded.wte.weight
    assert loaded.config == model.config
    assert again.to_dict() == tokenizer.to_dict()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_when_saved(tmp_path: Path):
    with pytest.raises(UserError, match=r"vocab_size must be at least the 11 ids of the tokenizer, got 10"):
        save_checkpoint(make(), CharTokenizer.of(f"{ALPHABET}f"), tmp_path / "mine.safetensors")
    assert not any(tmp_path.iterdir())


def test_a_run_does_not_resume_from_a_model_without_a_run(tmp_path: Path):
    save_checkpoint(make(), CharTokenizer.of(ALPHABET), tmp_path / "mine.safetensors")
    assert find_resumed(str(tmp_path / "mine.safetensors"), tmp_path) == tmp_path / "mine.safetensors"
    with pytest.raises(
        UserError, match=r"resume=.*mine.safetensors holds a model and no run; resume from a checkpoint of"
    ):
        check_same(tmp_path / "mine.safetensors", checkpoint(make()))


def test_what_made_a_model_is_kept_beside_it(tmp_path: Path):
    content = checkpoint(make()) | {"global_step": 250, "optimizer_states": [{"lr": 0.1, "exp_avg": torch.rand(3)}]}
    write(content, tmp_path / "a.safetensors")
    again = read(tmp_path / "a.safetensors")
    assert again["minigpt"]["config"] == {"seed": 7, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, "data": None}
    assert again["minigpt"]["corpus_sha256"] == "ab12"
    assert again["global_step"] == 250
    assert torch.equal(again["optimizer_states"][0]["exp_avg"], content["optimizer_states"][0]["exp_avg"])


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


@pytest.mark.parametrize("place", ["whole file", "beside the weights", "in our part", "a plain pickle"])
def test_code_in_a_file_is_not_run(tmp_path: Path, place: str):
    canary = tmp_path / "canary"
    path = hostile(tmp_path / "a.safetensors", canary, place)
    with pytest.raises(UserError, match=r"a\.safetensors"):
        load_checkpoint(path)
    assert not canary.exists()
    if place == "a plain pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert canary.exists()  # it was loaded


def test_classes_in_a_file_are_not_looked_up(tmp_path: Path):
    content = checkpoint(make())
    content["callbacks"] = {"path": Path("runs")}
    write(content, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors .* plain data"):
        load_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, share: float):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"a\.safetensors is not a"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time there was a text file.\n",
        "To be, or not to be: that is the question.\n",
        "{'step': 3}\n",
        "step,loss\n10,3.4\n",
        "\n",
        *("(an aside)\n", ".hidden\n", "Just a note.\n", "G\n", "e = mc²\n", "0\n", "q\n"),
    ],
)
def test_a_text_file_is_named(tmp_path: Path, text: str):
    path = tmp_path / "a.safetensors"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.safetensors is not a"):
        load_checkpoint(path)


def test_a_file_that_begins_with_any_byte_is_named(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    for first in range(256):
        path.write_bytes(bytes([first]) + b"\x80\x02}q\x00.")
        with pytest.raises(UserError, match=r"a\.safetensors is not a"):
            read(path)


def test_a_file_with_a_wrong_byte_loads_or_is_named(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    torch.save({"minigpt": {"format": 1}, "state_dict": {"w": torch.ones(3)}}, path)
    whole = path.read_bytes()
    refused = 0
    for i in range(400):  # where the pickle is; of wrong bytes in the weights nothing can be seen
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x20]) + whole[i + 1 :])
        try:
            read(path)
        except UserError as error:
            refused += "a.safetensors" in str(error)
    assert refused > 50


@pytest.mark.parametrize("text", ["", "{}", "Once upon a time there was a text file."])
def test_a_file_under_the_name_of_another_format_is_named(tmp_path: Path, text: str):
    path = tmp_path / "a.safetensors"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.safetensors is not a"):
        load_checkpoint(path)


def test_an_archive_that_is_not_a_checkpoint_is_named(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing to see")
    with pytest.raises(UserError, match=r"a\.safetensors is not a"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "content",
    [{"weight": torch.ones(2)}, torch.ones(2), [1, 2], None, {"minigpt": 3, "state_dict": {}}],
    ids=["a state dict", "a tensor", "a list", "nothing", "a number in our place"],
)
def test_a_torch_file_of_something_else_is_named(tmp_path: Path, content: Any):
    torch.save(content, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors is not a checkpoint of minigpt"):
        load_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize("number", [2, 0, None, "1"])
def test_a_file_of_another_format_says_which_format_is_read(tmp_path: Path, number: Any):
    content = checkpoint(make())
    content["minigpt"]["format"] = number
    write(content, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=rf"a\.safetensors has format {number}; .* reads format 1"):
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
        (put([1.0], "state_dict"), "model"),
        (put({3: torch.ones(1)}, "state_dict"), "model"),
        (put(8, "minigpt", "model", "n_windows"), "n_windows"),
        (put(-1, "minigpt", "model", "n_layer"), "n_layer=-1"),
        (put([], "minigpt", "model"), "model"),
        (put(None, "minigpt", "tokenizer"), "model"),
        (put("sentencepiece", "minigpt", "tokenizer", "name"), "sentencepiece"),
        (put("ba", "minigpt", "tokenizer", "alphabet"), "alphabet"),
        (put(3, "minigpt", "tokenizer", "alphabet"), "alphabet"),
    ],
)
def test_a_file_whose_parts_do_not_make_a_model_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], named: str
):
    content = checkpoint(make())
    change(content)
    write(content, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=rf"(?s)a\.safetensors .*{named}"):
        load_checkpoint(tmp_path / "a.safetensors")


def test_a_file_means_itself_and_a_run_folder_its_best(tmp_path: Path):
    best, last = touch(tmp_path / BEST), touch(tmp_path / LAST)
    assert find_checkpoint(last) == last
    assert find_checkpoint(tmp_path) == find_checkpoint(str(tmp_path)) == best
    best.unlink()
    assert find_checkpoint(tmp_path) == last


def test_nothing_means_the_best_of_the_newest_run(tmp_path: Path):
    old, new, other = (touch(tmp_path / name / BEST) for name in ("z", "m", "a"))
    for age, file in ((30, old), (10, new), (20, other)):
        os.utime(file, (1e9 - age, 1e9 - age))
    assert find_checkpoint(None, runs=tmp_path) == new


def test_where_there_is_no_checkpoint_the_place_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="train"):
        find_checkpoint(None, runs=tmp_path)
    with pytest.raises(UserError, match="absent does not exist"):
        find_checkpoint(tmp_path / "absent")
    with pytest.raises(UserError, match=f"{tmp_path} holds no"):
        find_checkpoint(tmp_path)
    with pytest.raises(UserError, match="absent does not exist"):
        load_checkpoint(tmp_path / "absent")


def test_writing_makes_the_folder_and_leaves_one_file(tmp_path: Path):
    path = tmp_path / "run" / BEST
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = make()
        write(checkpoint(model), path)
        assert torch.equal(load_checkpoint(path)[0].wte.weight, model.wte.weight)
    assert list(path.parent.iterdir()) == [path]


def test_the_last_checkpoint_before_the_last_is_kept(tmp_path: Path):
    for step in (10, 20, 30):
        write(checkpoint(make()) | {"global_step": step}, tmp_path / LAST)
    assert read(tmp_path / LAST)["global_step"] == 30
    assert read(tmp_path / PREVIOUS)["global_step"] == 20
    assert {file.name for file in (tmp_path / LAST).parent.iterdir()} == {"last.safetensors", "previous.safetensors"}


def test_the_last_and_the_one_before_it_are_never_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
def test_a_bit_that_flipped_is_noticed_wherever_it_matters(tmp_path: Path, bit: int):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    good, expected = path.read_bytes(), fingerprint(read(path))
    noticed = 0
    for place in torch.randint(len(good), (60,)).tolist():
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
        try:
            assert fingerprint(read(path)) == expected  # in what fills records up to a round size, say
        except UserError:
            noticed += 1
    assert noticed > 30


def fingerprint(content: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_auto_goes_on_from_the_newest_checkpoint_that_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert find_resumed("auto", tmp_path) is None
    for step in (10, 20, 30):
        write(checkpoint(make()) | {"global_step": step}, tmp_path / LAST)
    write(checkpoint(make()) | {"global_step": 10}, tmp_path / BEST)
    assert find_resumed("auto", tmp_path) == tmp_path / LAST
    assert capsys.readouterr().err == ""

    last = (tmp_path / LAST).read_bytes()
    for harm in (last[:-9], b"", last[: len(last) // 2] + b"x" + last[len(last) // 2 + 1 :]):
        (tmp_path / LAST).write_bytes(harm)
        assert find_resumed("auto", tmp_path) == tmp_path / PREVIOUS
        said = capsys.readouterr().err
        assert said.startswith(f"warning: {tmp_path / LAST} is")
        assert said.endswith(f"going on from {tmp_path / PREVIOUS}\n")
    (tmp_path / PREVIOUS).write_bytes(b"")
    assert find_resumed("auto", tmp_path) == tmp_path / BEST
    (tmp_path / BEST).write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read; .*last\.safetensors is damaged"):
        find_resumed("auto", tmp_path)


def test_an_archive_that_unpacks_to_more_than_it_is_is_not_unpacked(tmp_path: Path):
    write(checkpoint(make()), tmp_path / "a.safetensors")
    with (
        zipfile.ZipFile(tmp_path / "a.safetensors") as archive,
        zipfile.ZipFile(tmp_path / "b.safetensors", "w") as bomb,
    ):
        for record in archive.infolist():
            bomb.writestr(record.filename, archive.read(record))
        bomb.writestr("archive/data/999", bytes(1 << 24), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match=r"b\.safetensors .* unpacks to more than it is"):
        read(tmp_path / "b.safetensors")


@pytest.mark.parametrize("claim", [{"n_layer": 1 << 40}, {"n_embd": 1 << 20}, {"n_inner": 1 << 50}, {"ngram": 1 << 30}])
def test_a_model_that_the_file_does_not_hold_is_not_made(tmp_path: Path, claim: dict[str, int]):
    content = checkpoint(make())
    content["minigpt"]["model"].update(claim)
    write(content, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors .* weights, and it holds"):
        load_checkpoint(tmp_path / "a.safetensors")


class Unpicklable:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), Interrupted(2), MemoryError()], ids=repr)
def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, error: BaseException):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    before = path.read_bytes()
    with pytest.raises(type(error)):
        write(checkpoint(make()) | {"big": torch.rand(1000), "bad": Unpicklable(error)}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_for_which_there_is_no_room_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    write(checkpoint(make()), path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # bytes in a file
    try:
        with pytest.raises((OSError, RuntimeError)):
            write(checkpoint(make()) | {"big": torch.rand(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path):
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
    """What Lightning would write: the module's weights, and our part."""
    run = {"seed": 7, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, "data": None}
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return {"state_dict": weights, **contents(model.config, CharTokenizer.of(ALPHABET), run, "ab12", {})}


class Touch:
    """An object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return open, (self.file, "w")


def hostile(path: Path, canary: Path, place: str = "whole file") -> Path:
    """A file that, unpickled without care, creates the canary."""
    content: Any = checkpoint(make())
    if place in ("whole file", "a plain pickle"):
        content = Touch(canary)
    elif place == "beside the weights":
        content["callbacks"] = {"x": Touch(canary)}
    else:
        content["minigpt"]["tokenizer"]["alphabet"] = Touch(canary)
    if place == "a plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    return path


def touch(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file
