"""Runs that start from the weights of another run, or of a Hugging Face folder."""

import hashlib
import shutil

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from small_runs import column
from test_resume import OFTEN, broken_off, check_same_end
from torch.testing import assert_close

from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.extras.playground.export_html import model_name
from minigpt.runs.run_dir import read_summary

transformers = pytest.importorskip("transformers")
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
