"""Checkpoints: exact, without code, atomic; damaged ones are rejected; runs that start from one."""

import copy
import hashlib
import os
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import make_model
from refusals import refused
from safetensors.torch import load_file
from servers import make_instruct_folder
from small_runs import column
from test_resume import OFTEN, broken_off, check_same_end
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as OtherLinear
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten

from minigpt import GPT
from minigpt.checkpoints.find import BEST, LAST, PREVIOUS, find_checkpoint
from minigpt.checkpoints.format import FORMAT, contents, read, write
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.checkpoints.load import load_checkpoint, save_checkpoint
from minigpt.checkpoints.resume import find_resumed
from minigpt.data.tokenizer import ByteTokenizer, CharTokenizer, encode_prompt
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.extras.playground.export_html import model_name
from minigpt.runs.run_dir import PLAN, SUMMARY, read_summary
from minigpt.utils.errors import UserError

TOKENIZER = CharTokenizer("\n abcdeé€😀")
SETTINGS = {
    "Llama": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "n_kv_head": 1,
    },
    "post-norm": {
        "norm_position": "post",
        "qk_norm": True,
        "dropout": 0.3,
        "head_dim": 6,
        "n_inner": 20,
    },
    "tied": {"tie_embeddings": False},
}
SAVED: dict[str, Callable[[GPT], Any]] = {
    **dict.fromkeys(("GPT-2", "Llama", "post-norm"), lambda m: m),
    "compiled by block": lambda m: m.blocks.__setitem__(
        1, torch.compile(m.blocks[1], backend="eager")
    ),
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "data parallel": nn.DataParallel,
    "untied": lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.wte.weight.detach().flip(0))),
    "untied, with equal values": lambda m: setattr(
        m.lm_head, "weight", nn.Parameter(m.wte.weight.detach().clone())
    ),
    "tied": lambda m: setattr(m.lm_head, "weight", m.wte.weight),
    "with a hook": lambda m: m.blocks[0].register_forward_hook(lambda module, args, x: None),
    "in float64": lambda m: m.double(),
}


@pytest.mark.parametrize("how", SAVED)
def test_a_model_and_its_tokenizer_are_restored_exactly(tmp_path, how, capsys):
    model: Any = make_model(**SETTINGS.get(how, {}))
    changed = SAVED[how](model)
    saved = changed if isinstance(changed, nn.Module) else model
    save_checkpoint(saved, TOKENIZER, str(tmp_path / "new" / "a.safetensors"))
    warned = "a.safetensors does not hold the hooks of the model" in capsys.readouterr().err
    assert warned == (how == "with a hook")
    loaded, tokenizer = load_checkpoint(tmp_path / "new" / "a.safetensors")
    assert tokenizer.to_dict() == TOKENIZER.to_dict()
    assert tokenizer.decode(tokenizer.encode("a 😀\n€")) == "a 😀\n€"
    tokens = torch.randint(23, (2, 8))
    assert not loaded.training
    assert_close(loaded(tokens), model(tokens).float())
    assert_close([*loaded.parameters()], [x.float() for x in model.parameters()], rtol=0, atol=0)
    tied = model.lm_head.weight is model.wte.weight
    assert (loaded.lm_head.weight is loaded.wte.weight) == loaded.config.tie_embeddings == tied
    assert loaded.config.to_dict() == model.config.to_dict() | {"tie_embeddings": tied}
    stored = load_file(tmp_path / "new" / "a.safetensors")  # tied weights once
    sizes = [weight.numel() for weight in stored.values()]
    assert sum(sizes) == sum(weight.numel() for weight in model.parameters())


def test_a_model_that_is_saved_as_last_replaces_no_previous(tmp_path):
    (tmp_path / "previous.safetensors").write_text("precious")
    for _ in range(2):
        save_checkpoint(make_model(), TOKENIZER, tmp_path / "last.safetensors")
    assert (tmp_path / "previous.safetensors").read_text(encoding="utf-8") == "precious"


NOT_SAVED: dict[str, Callable[[GPT], Any]] = {
    "blocks.0.mlp.up is of class torch.": lambda m: setattr(
        m.blocks[0].mlp, "up", OtherLinear(16, 64)
    ),
    "blocks.0.mlp.up.weight is missing": lambda m: prune.l1_unstructured(
        m.blocks[0].mlp.up, "weight", 0.5
    ),
    "adapter is new": lambda m: m.add_module("adapter", nn.Linear(2, 2)),
    "wpe.weight is changed in kind, shape": lambda m: setattr(
        m.wpe, "weight", nn.Parameter(torch.zeros(9, 16))
    ),
    "blocks.1 is no longer shared": lambda m: m.blocks.__setitem__(1, copy.deepcopy(m.blocks[0])),
}


@pytest.mark.parametrize("message", NOT_SAVED)
def test_a_model_that_weights_and_config_do_not_describe_is_not_saved(tmp_path, message):
    model = make_model(layer_repeats=2)
    NOT_SAVED[message](model)
    message = f"^weights and a config cannot describe this model: model.{re.escape(message)}"
    refused(message, save_checkpoint, model, TOKENIZER, tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_when_saved(tmp_path):
    refused(
        r"vocab_size must be at least the tokenizer's 256, got 23",
        save_checkpoint,
        make_model(),
        ByteTokenizer(),
        tmp_path / "a.safetensors",
    )
    assert not any(tmp_path.iterdir())


def test_a_model_without_training_state_is_not_resumed(tmp_path):
    save_checkpoint(make_model(), TOKENIZER, tmp_path / LAST)
    for resume in (str(tmp_path), "auto"):
        refused(
            "holds a model without its run; use a checkpoint of a training run",
            find_resumed,
            resume,
            tmp_path,
            checkpoint(),
        )


DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
VALUES: dict[str, Any] = {
    "tensors": [
        torch.empty(0, 4),
        torch.rand(3, 5).t(),
        torch.rand(1).expand(4),
        torch.tensor(2.5),
    ],
    "dtypes": [torch.ones(3).to(getattr(torch, name)) for name in DTYPES.split()],
    "integer keys": {0: {"exp_avg": torch.rand(2)}, 7: {}, "x": 1, -3: [4]},
    "tuples": [(0.9, 0.95), ((1,), []), ()],
    "numbers": [0, -1, (1 << 63) - 1, 1e-300, 0.1, float("inf"), True, False, None],
    "keys with dots and dollars": {
        "a.b": torch.rand(1),
        "a": {"b": torch.rand(2)},
        "$tensor": "x",
        "$dict": [["y"]],
    },
    "texts": ['é\n😀\x00\x1b"', "\ud800", ""],
}


def test_every_kind_of_value_is_restored_with_its_type(tmp_path):
    write(checkpoint() | {"x": VALUES}, tmp_path / "a.safetensors")
    assert_same(read(tmp_path / "a.safetensors")["x"], VALUES)


def assert_same(one: Any, other: Any) -> None:
    leaves, containers = tree_flatten(one)
    others, expected = tree_flatten(other)
    assert containers == expected
    for leaf, its in zip(leaves, others, strict=True):
        assert type(leaf) is type(its)
        if isinstance(leaf, Tensor):
            assert_close(leaf, its, rtol=0, atol=0)
        else:
            assert leaf == its


@pytest.mark.parametrize("value", [Path("runs"), {(1, 2): 3}, [[{"a": print}]]], ids=repr)
def test_values_that_are_not_plain_data_are_refused_when_written(tmp_path, value):
    content = checkpoint() | {"callbacks": {"x": value}}
    refused(
        r"tensors and plain data only; callbacks\.x.* is of type",
        write,
        content,
        tmp_path / "a.safetensors",
    )
    assert not any(tmp_path.iterdir())


def test_a_file_of_another_format_is_rejected_with_both_numbers(tmp_path):
    content = checkpoint()
    content["minigpt"]["format"] = FORMAT + 1
    write(content, tmp_path / "a.safetensors")
    refused(
        rf"a\.safetensors .* it has format {FORMAT + 1}; .* reads format {FORMAT}",
        load_checkpoint,
        tmp_path / "a.safetensors",
    )


def test_a_path_or_a_run_folder_or_nothing_refers_to_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("train", find_checkpoint, None)
    runs = Path("runs")
    for age, name in ((30, f"z/{BEST}"), (10, f"m/{BEST}"), (20, f"a/{BEST}"), (0, f"m/{LAST}")):
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        (runs / name).touch()
        os.utime(runs / name, (1e9 - age, 1e9 - age))
    assert find_checkpoint(None) == find_checkpoint(runs / "m") == runs / "m" / BEST
    assert (
        find_checkpoint(runs / "m" / LAST)
        == find_checkpoint(runs / "m", last=True)
        == runs / "m" / LAST
    )
    (runs / "m" / BEST).unlink()
    assert find_checkpoint(str(runs / "m")) == runs / "m" / LAST
    refused("holds no", find_checkpoint, runs)


def test_nothing_refers_to_the_newest_run_also_in_a_sweep_and_there_to_the_best(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sweep = Path("runs/sweeps/now")
    bits = {"0": "2.5", "1": "1.5", "2": "null", "3": "2.0"}
    folders = [Path("runs/old"), Path("runs/sweeps/old/0"), *(sweep / name for name in bits)]
    for age, folder in enumerate(folders, -10):
        (folder / BEST).parent.mkdir(parents=True)
        (folder / BEST).touch()
        os.utime(folder / BEST, (1e9 + age, 1e9 + age))
        assert find_checkpoint(None) == folder / BEST
    (sweep / PLAN).touch()
    assert find_checkpoint(None) == sweep / "3" / BEST  # no run has ended
    refused(r"holds no checkpoints/best", find_checkpoint, sweep, last=True)
    for name, value in bits.items():
        (sweep / name / SUMMARY).write_text(f'{{"best_val_bits_per_byte": {value}}}')
    (sweep / "0" / SUMMARY).write_text("damaged")
    assert find_checkpoint(None) == find_checkpoint(sweep) == sweep / "1" / BEST
    (sweep / "1" / BEST).unlink()
    assert find_checkpoint(None) == sweep / "3" / BEST
    os.utime("runs/old" / Path(BEST))
    assert find_checkpoint(None) == "runs/old" / Path(BEST)


def test_a_flipped_bit_is_detected_wherever_it_matters(tmp_path):
    path = tmp_path / "a.safetensors"
    write(checkpoint(), path)
    good = path.read_bytes()
    expected = read(path)
    header = int.from_bytes(good[:8], "little") + 8
    places = [
        *range(8),
        *torch.randint(header, (180,)).tolist(),
        *torch.randint(header, len(good), (90,)).tolist(),
    ]
    for i, place in enumerate(places):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << i % 8]) + good[place + 1 :])
        if place < header:
            with suppress(UserError):
                # The bit is in `"format": "pt"` or in the padding
                assert_same(read(path), expected)
        else:
            refused("its checksum is wrong; use an older checkpoint", read, path)


def test_auto_resumes_from_the_newest_undamaged_checkpoint(tmp_path, capsys):
    run = checkpoint()
    run["minigpt"]["config"] |= {"data": {}, "schedule": {}, "trainer": {}, "max_steps": 40}
    find = partial(find_resumed, "auto", tmp_path, run)
    assert find() == (None, 0, {}, False)
    older = checkpoint()["minigpt"] | {"config": run["minigpt"]["config"]}
    del older["model"]["embed_norm"]  # a setting that the version before did not have
    for step in (10, 20, 30):
        write(run | {"minigpt": older, "global_step": step}, tmp_path / LAST, keeps_previous=True)
    write(run | {"global_step": 10}, tmp_path / BEST)
    assert find() == (tmp_path / LAST, 30, {}, False)
    assert capsys.readouterr().err == ""
    (tmp_path / LAST).write_bytes((tmp_path / LAST).read_bytes()[:-9])
    assert find() == (tmp_path / PREVIOUS, 20, {}, False)
    warning = f"{tmp_path / LAST} is not a complete .*; resuming from {tmp_path / PREVIOUS}"
    assert re.fullmatch(f"warning: {warning}\n", capsys.readouterr().err)
    (tmp_path / PREVIOUS).write_bytes(b"")
    assert find() == (tmp_path / BEST, 10, {}, False)
    (tmp_path / BEST).write_bytes(b"")
    refused(r"no checkpoint in .* can be resumed; .*last\.safetensors is not a complete", find)


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    write(checkpoint(), path)
    before = path.read_bytes()
    larger = checkpoint() | {"big": torch.rand(100_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # bytes in a file
    try:
        with pytest.raises(OSError, match=rf"File too large: '{path}'"):
            write(larger, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def checkpoint() -> dict[str, Any]:
    model = make_model()
    run = {"seed": 7, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, "data": None}
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return {
        "state_dict": weights,
        **contents(model.config, TOKENIZER, config=run, corpus_sha256="ab12"),
    }


UNCHANGED = ["max_steps=1", "optimizer.lr=1e-30", "schedule.warmup_steps=0"]


def test_finetuning_a_folder_of_transformers_starts_from_its_loss_and_lowers_it(train, gpt2_folder):
    run = train(f"init_from={gpt2_folder}", *UNCHANGED)
    ids = torch.from_numpy(find_corpus(run.folder / BEST).tokens("val")[:].astype("int64"))
    windows = ids[: (len(ids) - 1) // 32 * 32 + 1].unfold(0, 33, 32)  # (N, T + 1)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
    with torch.no_grad():
        logits = theirs(windows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    # The last window, which is shorter, is left out here
    assert run.loss == pytest.approx(expected.item(), abs=2e-3)
    digest = hashlib.sha256((gpt2_folder / "model.safetensors").read_bytes()).hexdigest()
    source = {"source": str(gpt2_folder), "revision": None, "sha256": {"model.safetensors": digest}}
    provenance = read(run.folder / BEST)["minigpt"]["provenance"]
    assert run.summary["init_from"] == provenance["init_from"] == source
    more = [*UNCHANGED, "max_steps=20", "optimizer.lr=1e-2"]
    tuned = train(f"init_from={gpt2_folder}", *more, folder=run.folder.with_name("tuned"))
    assert tuned.loss < run.loss - 1


def test_a_run_starts_from_another_run_with_its_tokenizer_at_step_0(train, trained):
    first = trained("tokenizer=bpe", "tokenizer.vocab_size=300")
    second = train(f"init_from={first}", *UNCHANGED)
    assert second.loss == pytest.approx(read_summary(first)["best_val_loss"], abs=1e-5)
    assert read(second.folder / LAST)["global_step"] == 1
    tokenizers = [load_checkpoint(folder)[1].to_dict() for folder in (first, second.folder)]
    assert tokenizers[0] == tokenizers[1]


def test_a_run_keeps_the_start_and_end_tokens_of_a_folder_and_needs_no_embedding_of_its_padding(
    train, tmp_path
):
    given = {"bos_token": "<|endoftext|>", "add_bos_token": True, "ends": [2, 1, 4]}
    folder = make_instruct_folder(tmp_path / "a", **given)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.add_special_tokens({"pad_token": "<pad>"})  # without a new embedding
    theirs.save_pretrained(folder)
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.pad_token_id == find_pretrained(str(folder)).config.vocab_size
    run = train(f"init_from={folder}", "max_steps=1", "model.block_size=16")
    model, tokenizer = load_checkpoint(run.folder)
    for text in ("Hello", "a<|im_end|>b"):
        assert encode_prompt(tokenizer, text).tolist() == theirs(text).input_ids
    assert (tokenizer.start.tolist(), tokenizer.end_ids) == ([0], [2, 1, 4])
    assert encode_prompt(tokenizer, "<pad>").max() < tokenizer.vocab_size == model.config.vocab_size


def test_a_chat_template_changes_no_token_files_of_a_text_and_stays_in_the_run(
    train, once, tmp_path
):
    chatty = once("instruct", make_instruct_folder)
    plain = shutil.copytree(chatty, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    prepared = find_corpus(train(f"init_from={plain}", "max_steps=1").folder / BEST)
    assert prepared.tokenizer.chat is None
    files = [prepared.train.files[0], prepared.val.files[0]]
    bins = [f"data.train_bin={files[0]}", f"data.val_bin={files[1]}", "data.path=null"]
    expected = transformers.AutoTokenizer.from_pretrained(chatty).chat_template
    for name, settings in (("text", []), ("bins", bins)):
        run = train(f"init_from={chatty}", "max_steps=1", *settings, folder=tmp_path / name)
        assert load_checkpoint(run.folder)[1].chat["template"] == expected
        found = find_corpus(run.folder / BEST)
        assert [found.train.files[0], found.val.files[0]] == files


def test_the_block_size_can_be_cropped_and_dropout_set(train, trained):
    first = trained("max_steps=2", "model.position=learned", "model.dropout=0.1")
    run = train(f"init_from={first}", "max_steps=1", "model.block_size=8", "model.dropout=0.2")
    model, _ = load_checkpoint(run.folder)
    assert (model.config.block_size, model.config.dropout) == (8, 0.2)
    start = find_pretrained(str(first))
    tokens = torch.arange(8)[None]
    assert start.config.dropout == 0
    with torch.no_grad():
        assert torch.equal(start.load()(tokens), start.load(model.config)(tokens))


def test_a_run_resumes_without_the_source_of_its_weights(train, gpt2_folder, tmp_path, capsys):
    source = shutil.copytree(gpt2_folder, tmp_path / "source")
    whole = train(f"init_from={source}", *OFTEN, folder=tmp_path / "whole")
    auto = broken_off(whole.folder, 7, tmp_path / "auto")
    shutil.rmtree(source)
    (auto / "checkpoints/previous.safetensors").write_bytes((auto / LAST).read_bytes())
    (auto / LAST).write_bytes(b"damaged")
    resumed = train(f"init_from={tmp_path}/another", *OFTEN, "resume=auto", folder=auto)
    warning = (
        f"init_from changed from {source} to {tmp_path}/another; the weights of the checkpoint"
    )
    assert warning in capsys.readouterr().err
    check_same_end(whole.folder, auto)
    # Of the weights that the run started from
    assert resumed.summary["init_from"] == whole.summary["init_from"]


def test_finetuning_has_no_warmup_and_of_a_model_of_hugging_face_a_low_rate(
    train, trained, gpt2_folder, tmp_path
):
    def rates(*line):
        short = ["max_steps=2", "log_every=1", "eval_every=2"]
        run = train(*line, *short, folder=tmp_path / " ".join(line)[-40:])
        return column(run.folder, "learning_rate")

    own = trained("max_steps=2")
    assert rates(f"init_from={gpt2_folder}") == [3e-5, 1.5e-5]  # linear, to 0
    assert rates(f"init_from={own}") == [3e-3, 1.5e-3]
    given = ["optimizer=adamw", "schedule=constant", "schedule.warmup_steps=1"]
    assert rates(f"init_from={gpt2_folder}", *given) == [1.5e-3, 3e-3]
    constant = ["optimizer.lr=1e-4", "schedule=constant"]
    assert rates(f"init_from={gpt2_folder}", *constant) == [1e-4, 1e-4]


def test_a_preparation_uses_the_tokenizer_of_the_model(call, text, gpt2_folder, tmp_path):
    data = ["data=text", f"data.path={text}", f"data.folder={tmp_path}/data"]
    prepared = call("prepare.py", *data, f"init_from={gpt2_folder}")
    assert "vocabulary       293 ids" in prepared.stdout, prepared.stderr
    (ids,) = (tmp_path / "data/tokens").glob("*/train.bin")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt2_folder)
    written = torch.frombuffer(bytearray(ids.read_bytes()), dtype=torch.uint16)
    assert written.tolist() == tokenizer(text.read_text(encoding="utf-8")[:18_000]).input_ids


def test_a_model_in_the_cache_of_the_hub_is_found_offline(gpt2_folder, tmp_path, monkeypatch):
    commit = "0123456789012345678901234567890123456789"
    model = tmp_path / "hub/models--someone--tiny"
    shutil.copytree(gpt2_folder, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(commit, encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for source in ("someone/tiny", "someone/tiny@main", f"someone/tiny@{commit}"):
        found = find_pretrained(source)
        assert (found.source, found.revision, model_name(found)) == (source, commit, source)
        expected = load_file(gpt2_folder / "model.safetensors")["transformer.wte.weight"]
        assert torch.equal(found.load().wte.weight, expected)
    refused(
        "someone/other does not exist, and cannot be downloaded", find_pretrained, "someone/other"
    )


@pytest.mark.network
def test_gpt2_of_the_hub_equals_that_of_transformers():
    ours = find_pretrained("gpt2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("gpt2").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("gpt2")
    prompt = "ROMEO: But, soft! what light through yonder window breaks?"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert ours.tokenizer.encode(prompt).tolist() == ids[0].tolist()
    with torch.no_grad():
        assert_close(ours.load()(ids), theirs(ids).logits, rtol=0, atol=1e-4)
