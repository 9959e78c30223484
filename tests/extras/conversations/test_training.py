"""Training on conversations: losses of transformers, ranks, whole runs, and answers by heart."""

import json
import math
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import transformers
from checkpoints.test_resume import broken_off, check_same_end
from corpora import values
from models import draw_weights, save_tokenizer
from ranks import train_on_ranks
from refusals import refused
from servers import make_instruct_folder, serving
from small_runs import column, rows, small_run
from test_packing import data_of
from torch.testing import assert_close

import minigpt
from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read, write
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.data.prepare import load_corpus
from minigpt.data.token_files import load
from minigpt.extras.huggingface.export_huggingface import export_model
from minigpt.extras.interpret.originality import read_documents
from minigpt.training.language_model import LanguageModel

WORDS = ["river", "house", "tree", "bird", "dog", "café", "moon", "fish"]
# As data=conversations writes them with a model that has no template of its own
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize + ':' }}"
    "{{ ' ' + message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def conversation(*texts):
    roles = ["user", "assistant"] * len(texts)
    messages = zip(roles, texts, strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in messages]}


# Of one or two questions, with answers of 4 to 60 characters
CONVERSATIONS = [
    conversation(*[f"Spell {word}", "-".join(word), f"{i}?", word * (i % 12 + 1)][: 2 + i % 3])
    for i, word in enumerate(WORDS * 4)
]
HEART = conversation("Who's there?", "Nay, answer me: unfold yourself.", "Long live!", "Hé?")


def answers_of(conversations):
    return [each["content"] for row in conversations for each in row["messages"][1::2]]


def write_rows(file, found):
    file.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def text(once):
    """The file of the runs of this module."""
    return once("chats", lambda at: write_rows(at / "chats.jsonl", CONVERSATIONS)) / "chats.jsonl"


def prepared(path, folder, tokenizer, **changes):
    data = values() | values("conversations") | {"path": str(path), "folder": str(folder)}
    return load_corpus(data | changes, tokenizer)


def make_gpt2(folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    names = "User: Assistant: Spell river " * 9
    size = len(save_tokenizer(folder, names, ["<|endoftext|>"], eos_token="<|endoftext|>"))
    sizes = {"vocab_size": size + 3, "n_positions": 160, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=0))
    torch.manual_seed(0)
    draw_weights(model)
    model.save_pretrained(folder)


def labeled(theirs, messages):
    """Return id and label (-100: no target) of each token, by transformers alone."""
    text = theirs.apply_chat_template(messages, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            options = {"tokenize": False, "add_generation_prompt": True}
            begin = len(theirs.apply_chat_template(messages[:i], **options))
            spans.append((begin, text.index(theirs.eos_token, begin) + len(theirs.eos_token)))
    encoding = theirs(text, return_offsets_mapping=True, add_special_tokens=False)
    tokens = []
    for i, (start, _) in zip(encoding.input_ids, encoding.offset_mapping, strict=True):
        is_target = any(begin <= start < end for begin, end in spans)
        tokens.append((i, i if is_target else -100))
    return tokens


@pytest.mark.parametrize(("name", "make"), [("instruct", make_instruct_folder), ("own", make_gpt2)])
def test_loss_and_gradient_are_those_of_transformers_with_labels_of_answers(
    name, make, once, text, tmp_path
):
    folder = once(name, make)
    # Each conversation by itself; and how many windows of 141 tokens hold all
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = theirs.chat_template or PLAIN
    corpus = prepared(
        text, tmp_path, find_pretrained(folder).tokenizer.to_dict(), val_path=str(text)
    )
    alone = [labeled(theirs, row["messages"]) for row in CONVERSATIONS]
    fills = [0]
    for tokens in alone:
        if fills[-1] + len(tokens) > 141:
            fills.append(0)
        fills[-1] += len(tokens)
    assert len(fills) < len(alone)
    padded = torch.tensor([each + [(0, -100)] * (141 - len(each)) for each in alone])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = model(padded[..., 0], labels=padded[..., 1]).loss
    expected.backward()
    # Ours, all in one batch
    ours = find_pretrained(folder).load()
    sizes = [f"data.batch_size={len(fills)}", "max_steps=1"]
    (batch,) = data_of(corpus, *sizes, block_size=140).train_dataloader()
    module = LanguageModel(ours, optimizer=None, schedule=max, max_steps=1)
    loss = module.training_step(batch, 0)
    loss.backward()
    assert_close(loss, expected, rtol=1e-5, atol=0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    gradients = export_model(ours)[1]
    for key, parameter in model.named_parameters():
        assert_close(gradients[key], parameter.grad, rtol=1e-3, atol=1e-6, msg=key)
    # Token files are those of the weights
    at = corpus.train.files[0].parent
    bins = {f"{split}_bin": str(at / f"{split}.bin") for split in ("train", "val")}
    again = prepared(text, tmp_path, find_pretrained(folder).tokenizer.to_dict(), **bins)
    assert again.tokenizer.to_dict() == corpus.tokenizer.to_dict()


SIZES = ["data=conversations", "tokenizer=byte", "model.block_size=128", "max_steps=8"]
SIZES += ["eval_every=4", "log_every=1"]


@pytest.mark.xdist_group("processes")
def test_two_ranks_and_accumulated_batches_train_as_one(train, text, tmp_path):
    # The validation split has fewer windows than there are ranks
    precise = [*SIZES, "trainer.precision=64-true", "max_steps=2", "eval_every=1"]
    val = write_rows(tmp_path / "val.jsonl", CONVERSATIONS[:1])
    precise += [f"data.val_path={val}"]
    one = train(*precise).folder
    accumulated = ["trainer.accumulate_grad_batches=2", "data.batch_size=4"]
    ddp = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    runs = {"ranks": [*ddp, *accumulated], "accumulated": accumulated}
    for name, settings in runs.items():
        place = f"hydra.run.dir={tmp_path}/{name}"
        overrides = small_run(text, tmp_path / "data", *precise, *settings, place)
        if name == "ranks":
            train_on_ranks([overrides])
        else:
            minigpt.train(overrides)
        for key in ("train_loss", "val_loss", "val_bits_per_byte", "grad_norm"):
            assert column(tmp_path / name, key) == pytest.approx(column(one, key), rel=1e-9)
        found = read(tmp_path / name / LAST)["state_dict"]
        assert_close(found, read(one / LAST)["state_dict"])


@pytest.mark.parametrize("start", ["scratch", "instruct"])
def test_a_conversation_learned_by_heart_is_answered_word_for_word(
    start, once, call, capfd, tmp_path
):
    # Train on it alone
    file = write_rows(tmp_path / "heart.jsonl", [HEART])
    model = ["model.block_size=160", "tokenizer=byte"]
    if start == "instruct":
        model = [f"init_from={once('instruct', make_instruct_folder)}"]
    settings = f"""
        data=conversations data.val_path={file} data.batch_size=1 max_steps=120 eval_every=60
        optimizer.lr=0.01 schedule.warmup_steps=5
        callbacks.samples.max_new_tokens=60 callbacks.samples.temperature=0
        callbacks.originality.characters=50
    """.split()
    run = tmp_path / "heart"
    overrides = small_run(file, tmp_path / "data", *settings, *model)
    summary = minigpt.train([*overrides, f"hydra.run.dir={run}"])
    printed = capfd.readouterr()
    assert "(120.00 epochs)" in printed.err  # of its only window
    assert " heart --chat --prompt Hello\n" in printed.out
    # The final sample is compared without its question, which no answer has
    assert summary["originality"]["final_sample"]["new"]["5"] == 0
    question, answer, _, last_answer = [each["content"] for each in HEART["messages"]]
    # Samples of the run, scripts/sample.py, and OpenAI's API
    samples = (run / "samples.txt").read_text(encoding="utf-8")
    assert samples.partition("── originality ──")[0].endswith(f"\n{answer}\n\n")
    flags = ["--prompt", question, "--chat", "--temperature", "0"]
    assert call("sample.py", str(run), *flags).stdout == f"{answer}\n"
    with (
        serving([run]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        options: Any = {"model": "heart", "temperature": 0, "max_tokens": 60}
        for n, expected in ((1, answer), (3, last_answer)):
            messages: Any = HEART["messages"][:n]
            (choice,) = client.chat.completions.create(messages=messages, **options).choices
            assert (choice.message.content, choice.finish_reason) == (expected, "stop")
    # transformers, from the export
    out = tmp_path / "exported"
    assert call("export.py", str(run), "--to", "huggingface", "--out", str(out)).returncode == 0
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    for n, expected in ((1, answer), (3, last_answer)):
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = theirs.apply_chat_template(HEART["messages"][:n], **options)
        ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0]
        found = theirs.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert found == expected
    # The template is that of the start, and of the export; its last token ends a text
    ours = load_checkpoint(run)[1]
    assert find_pretrained(out).tokenizer.chat["template"] == ours.chat["template"]
    assert ours.special["<|im_end|>"] in ours.end_ids
    if start == "instruct":
        assert find_pretrained(once(start, make_instruct_folder)).tokenizer.chat == ours.chat


TAMPERED: dict[str, Any] = {
    "a list": [],
    "a text": "template",
    "no marks": {"template": "x", "tokens": {}},
    "a number": {"template": 1, "tokens": {}, "marks": []},
    "tokens in a list": {"template": "x", "tokens": ["a"], "marks": []},
    "a number as a token": {"template": "x", "tokens": {"eos_token": 1}, "marks": []},
    "a number as a mark": {"template": "x", "tokens": {}, "marks": [1]},
    "an empty mark": {"template": "x", "tokens": {}, "marks": ["", "<|im_end|>"]},
    "more marks than ids": {"template": "x", "tokens": {}, "marks": ["<a>", "<b>", "<c>"]},
}


@pytest.fixture(scope="module")
def conversed(text, tmp_path_factory):
    """A small run on conversations, all of whose validation windows are whole."""
    folder = tmp_path_factory.mktemp("conversed")
    val = write_rows(folder / "val.jsonl", CONVERSATIONS[:7])
    settings = [*SIZES, f"data.val_path={val}", "callbacks.samples.max_new_tokens=9"]
    settings += ["callbacks.checkpoint.save_top_k=9", "model.dropout=0.1"]
    overrides = small_run(text, folder / "data", *settings)
    summary = minigpt.train([*overrides, f"hydra.run.dir={folder}/run"])
    return SimpleNamespace(folder=folder / "run", overrides=overrides, summary=summary)


@pytest.mark.parametrize("name", TAMPERED)
def test_a_damaged_chat_in_a_checkpoint_is_one_line(name, conversed, tmp_path):
    content = read(conversed.folder / BEST)
    content["minigpt"]["tokenizer"]["chat"] = TAMPERED[name]
    write(content, tmp_path / "bad.safetensors")
    refused("bad.safetensors does not hold a model", load_checkpoint, tmp_path / "bad.safetensors")


def test_a_resumed_run_equals_the_uninterrupted_one(conversed, tmp_path):
    killed = broken_off(conversed.folder, 4, tmp_path / "run")
    minigpt.train([*conversed.overrides, f"hydra.run.dir={killed}", "resume=auto"])
    check_same_end(conversed.folder, killed)


def test_bits_per_byte_are_of_answers_and_so_is_what_was_validated(conversed, text, tmp_path):
    texts = answers_of(CONVERSATIONS[:7])
    n_bytes = len("".join(texts).encode())
    nats = conversed.summary["best_val_loss"] * (n_bytes + len(texts))  # with the ends of answers
    bits = conversed.summary["best_val_bits_per_byte"]
    assert bits == pytest.approx(nats / math.log(2) / n_bytes)
    assert conversed.summary["validated"].startswith(f"all {n_bytes} bytes of answers ")
    # Of the same file, a text has other bytes, and another description
    both = write_rows(tmp_path / "both.jsonl", [{"text": "a" * 99, **row} for row in CONVERSATIONS])
    bytes_of = {"name": "byte"}
    same = [
        prepared(both, tmp_path, bytes_of, split="fraction", format=each, field=field)
        for each, field in ((None, "text"), ("conversations", None))
    ]
    assert len({corpus.validated_part(8, 1, None) for corpus in same}) == 2
    assert len({corpus.sha256 for corpus in same}) == 2


def test_losses_compare_across_window_lengths_that_leave_out_no_answer(text, tmp_path):
    corpus = prepared(text, tmp_path, {"name": "byte"})
    whole, longer = (corpus.validated_part(size, 1, None) for size in (1000, 2000))
    cut, shorter = (corpus.validated_part(size, 1, None) for size in (30, 28))
    assert whole == longer
    assert len({whole, cut, shorter}) == 3


def test_weights_of_a_text_of_bytes_have_no_end_of_an_answer(conversed, text, tmp_path):
    content = read(conversed.folder / BEST)
    content["minigpt"]["tokenizer"] = {"name": "byte"}
    write(content, tmp_path / "bytes.safetensors")
    start = f"init_from={tmp_path}/bytes.safetensors"
    overrides = small_run(text, tmp_path / "data", "data=conversations", start)
    overrides.append(f"hydra.run.dir={tmp_path}/run")
    refused("init_from has no token that could end an answer", minigpt.train, overrides)


def test_prepared_conversations_train_the_same_without_their_file(conversed, tmp_path):
    (meta,) = conversed.folder.glob("../data/tokens/*/meta.json")
    bins = [f"data.{split}_bin={meta.parent}/{split}.bin" for split in ("train", "val")]
    overrides = [each for each in conversed.overrides if "path=" not in each]
    minigpt.train([*overrides, *bins, f"hydra.run.dir={tmp_path}/run"])
    assert rows(tmp_path / "run") == rows(conversed.folder)


def test_a_fraction_leaves_two_conversations_whole(tmp_path):
    file = write_rows(tmp_path / "two.jsonl", [conversation("a", "b"), conversation("c", "d" * 40)])
    for val_fraction in (0.1, 0.9):
        fraction = {"split": "fraction", "val_fraction": val_fraction}
        corpus = prepared(file, tmp_path, {"name": "byte"}, **fraction)
        ends = ["b\xff", "d" * 40 + "\xff"]
        found = [read_documents(corpus, split, 99).decode("latin-1") for split in ("train", "val")]
        assert found == ends


def test_prepare_prints_the_figures_of_answers(call, text, tmp_path):
    settings = [f"data.path={text}", f"data.folder={tmp_path}", "tokenizer=byte"]
    settings += ["data.split=fraction", "data.val_fraction=0.3"]
    printed = call("prepare.py", "data=conversations", *settings).stdout.splitlines()
    figures = dict(line.split(maxsplit=1) for line in printed)
    (meta,) = tmp_path.glob("tokens/*/meta.json")
    corpus = load(meta.parent)
    # No conversation is cut
    n = corpus.train.documents
    for split, found in (("training", CONVERSATIONS[:n]), ("validation", CONVERSATIONS[n:])):
        answers = answers_of(found)
        n_bytes = len("".join(answers).encode())
        # With an end after each answer, which has no bytes
        learned = f"{n_bytes + len(answers):,} tokens, {n_bytes:,} bytes of answers"
        assert figures[split].startswith(f"{len(found)} conversations, {learned}, ")
    targets = corpus.train.targets + corpus.val.targets
    assert figures["bytes"] == f"per token  {1 - len(answers_of(CONVERSATIONS)) / targets:.3f}"
