"""Training on conversations: losses of transformers, ranks, whole runs, and answers by heart."""

import json
import math
from itertools import islice
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import transformers
from checkpoints.test_resume import broken_off, check_same_end
from corpora import values
from models import draw_weights, make_model, save_tokenizer
from ranks import train_on_ranks
from refusals import refused
from servers import make_instruct_folder, serving
from small_runs import column, composed, rows, small_run
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
from minigpt.runs.run_config import RunConfig
from minigpt.runs.trainer import TokenDataModule
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


def batches_of(corpus, block_size, *overrides, rank=0, world_size=1):
    """Return the training batches of a rank as the trainer gets them."""
    module = TokenDataModule(corpus, RunConfig.from_hydra(composed(*overrides)), block_size)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    ranks = {"global_rank": rank, "world_size": world_size}
    module.trainer = SimpleNamespace(**ranks, strategy=strategy, global_step=0)
    return module.train_dataloader()


def labeled(theirs, messages):
    """Return the ids and labels (-100: no target) of a conversation, by transformers alone."""
    text = theirs.apply_chat_template(messages, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            options = {"tokenize": False, "add_generation_prompt": True}
            begin = len(theirs.apply_chat_template(messages[:i], **options))
            spans.append((begin, text.index(theirs.eos_token, begin) + len(theirs.eos_token)))
    encoding = theirs(text, return_offsets_mapping=True, add_special_tokens=False)
    labels = [-100] * len(encoding.input_ids)
    for i, (start, _) in enumerate(encoding.offset_mapping):
        if any(begin <= start < end for begin, end in spans):
            labels[i] = encoding.input_ids[i]
    return encoding.input_ids, labels


@pytest.mark.parametrize(("name", "make"), [("instruct", make_instruct_folder), ("own", make_gpt2)])
def test_loss_and_gradient_are_those_of_transformers_with_labels_of_answers(
    name, make, once, text, tmp_path
):
    folder = once(name, make)
    # Their windows: whole conversations while they fit into 141 tokens
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = theirs.chat_template or PLAIN
    corpus = prepared(
        text, tmp_path, find_pretrained(folder).tokenizer.to_dict(), val_path=str(text)
    )
    block_size = 140
    windows = [([], [])]
    for row in CONVERSATIONS:
        ids, labels = labeled(theirs, row["messages"])
        if len(windows[-1][0]) + len(ids) > block_size + 1:
            windows.append(([], []))
        windows[-1][0].extend(ids)
        windows[-1][1].extend([-100, *labels[1:]])
    size = block_size + 1
    ids = [found + [0] * (size - len(found)) for found, _ in windows]
    labels = [found + [-100] * (size - len(found)) for _, found in windows]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = model(torch.tensor(ids), labels=torch.tensor(labels)).loss
    expected.backward()
    # Ours, all in one batch
    ours = find_pretrained(folder).load()
    (batch,) = batches_of(corpus, block_size, f"data.batch_size={len(windows)}", "max_steps=1")
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
    # Answers decode to their text
    space = "" if name == "instruct" else " "
    expected = [f"{space}{answer}\ufffd" for answer in answers_of(CONVERSATIONS)]
    assert read_documents(corpus, "train", 10**6).decode(errors="replace") == "".join(expected)


def gradient(corpus, accumulate, world_size):
    """Return the gradient of the first step, which is the mean over ranks."""
    model = make_model(vocab_size=258, block_size=64).double()
    module = LanguageModel(model, optimizer=None, schedule=max, max_steps=2)
    size = [f"data.batch_size={12 // accumulate}", "max_steps=2"]
    settings = [*size, f"trainer.accumulate_grad_batches={accumulate}"]
    loss = torch.zeros(())
    for rank in range(world_size):
        batches = batches_of(corpus, 64, *settings, rank=rank, world_size=world_size)
        for batch in islice(batches, accumulate):
            loss = loss + module.training_step(batch, 0) / accumulate / world_size
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_a_step_has_the_gradient_of_its_mean_loss_per_target_however_targets_are_shared(
    text, tmp_path
):
    corpus = prepared(text, tmp_path, {"name": "byte"})
    ((tokens, targets, weight),) = islice(
        batches_of(corpus, 64, "data.batch_size=12", "max_steps=2"), 1
    )
    assert weight == 1
    model = make_model(vocab_size=258, block_size=64).double()
    nats = torch.nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    loss = nats / (targets != -100).sum()
    loss.backward()
    expected = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for accumulate, world_size in ((1, 1), (3, 1), (1, 5), (2, 4)):
        assert_close(gradient(corpus, accumulate, world_size), expected)


SIZES = ["data=conversations", "tokenizer=byte", "model.block_size=128", "max_steps=8"]
SIZES += ["eval_every=4", "log_every=1"]


@pytest.mark.xdist_group("processes")
def test_two_ranks_and_accumulated_batches_train_as_one(train, text, tmp_path):
    # The validation split has fewer windows than there are ranks
    precise = [*SIZES, "trainer.precision=64-true", "max_steps=2", "eval_every=1"]
    val = write_rows(tmp_path / "val.jsonl", CONVERSATIONS[:1])
    precise += [f"data.val_path={val}"]
    one = train(*precise).folder
    runs = {
        "ranks": ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"],
        "accumulated": ["trainer.accumulate_grad_batches=2", "data.batch_size=4"],
    }
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
    settings = [*SIZES, f"data.val_path={file}", "data.batch_size=1", "max_steps=120"]
    settings += ["eval_every=60", "optimizer.lr=0.01", "schedule.warmup_steps=5"]
    settings += ["model.block_size=160", "callbacks.samples.max_new_tokens=60"]
    settings += ["callbacks.samples.temperature=0"]
    if start == "instruct":
        settings = [each for each in settings if not each.startswith(("model.", "tokenizer"))]
        settings.append(f"init_from={once('instruct', make_instruct_folder)}")
    run = tmp_path / "heart"
    minigpt.train([*small_run(file, tmp_path / "data", *settings), f"hydra.run.dir={run}"])
    capfd.readouterr()
    question, answer, _, last_answer = [each["content"] for each in HEART["messages"]]
    # Samples of the run, scripts/sample.py, and OpenAI's API
    assert (run / "samples.txt").read_text(encoding="utf-8").endswith(f"\n{answer}\n\n")
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
    exported = call("export.py", str(run), "--to", "huggingface", "--out", str(out))
    assert exported.returncode == 0, exported.stderr
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    for n, expected in ((1, answer), (3, last_answer)):
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = theirs.apply_chat_template(HEART["messages"][:n], **options)
        ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0]
        found = theirs.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert found == expected
    # The template is that of the start, and of the export
    chat = load_checkpoint(run)[1].chat
    if start == "instruct":
        assert chat == find_pretrained(once("instruct", make_instruct_folder)).tokenizer.chat
    assert find_pretrained(out).tokenizer.chat["template"] == chat["template"]


TAMPERED: dict[str, Any] = {
    "a list": [],
    "a text": "template",
    "no marks": {"template": "", "tokens": {}},
    "a number": {"template": 1, "tokens": {}, "marks": []},
    "tokens in a list": {"template": "", "tokens": ["a"], "marks": []},
    "a number as a token": {"template": "", "tokens": {"eos_token": 1}, "marks": []},
    "a number as a mark": {"template": "", "tokens": {}, "marks": [1]},
    "more marks than ids": {"template": "", "tokens": {}, "marks": ["<a>", "<b>", "<c>"]},
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
    validated = conversed.summary["validated"]
    assert f" windows of 128 tokens with {n_bytes} bytes of answers" in validated
    # Of the same file, a text has other bytes, and another description
    both = write_rows(tmp_path / "both.jsonl", [{"text": "a" * 99, **row} for row in CONVERSATIONS])
    bytes_of = {"name": "byte"}
    same = [
        prepared(both, tmp_path, bytes_of, split="fraction", format=each) for each in (None, "chat")
    ]
    assert len({corpus.validated_part(8, 1, None) for corpus in same}) == 2
    assert len({corpus.sha256 for corpus in same}) == 2


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
    assert n + corpus.val.documents == len(CONVERSATIONS)
    for split, found in (("training", CONVERSATIONS[:n]), ("validation", CONVERSATIONS[n:])):
        answers = answers_of(found)
        n_bytes = len("".join(answers).encode())
        # With an end after each answer, which has no bytes
        learned = f"{n_bytes + len(answers):,} tokens, {n_bytes:,} bytes of answers"
        assert figures[split].startswith(f"{len(found)} conversations, {learned}, ")
    answers = answers_of(CONVERSATIONS)
    n_bytes = len("".join(answers).encode())
    assert figures["bytes"] == f"per token  {n_bytes / (n_bytes + len(answers)):.3f}"
