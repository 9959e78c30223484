"""`scripts/sample.py` with folders of transformers, against transformers' own text and losses."""

import pytest
from sampled import error, samples
from servers import make_instruct_folder
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def started(once):
    """A folder whose tokenizer adds a start token, and whose texts end at two of its tokens."""
    options = {"bos_token": "<|endoftext|>", "add_bos_token": True, "ends": [2, 1, 4]}
    return once("started", lambda path: make_instruct_folder(path, **options))


def load(folder):
    """Return the model and the tokenizer of a folder, as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def greedy(model, ids):
    """Return the ids (1, T) that transformers generates after these ids (1, T)."""
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 3}
    return model.generate(ids, **options)[:, ids.size(1) :]


FLAGS = ["--temperature", 0, "--max-new-tokens", 12]


def test_a_model_of_hugging_face_continues_and_scores_the_ids_of_its_tokenizer(
    started, sample, tmp_path
):
    model, tokenizer = load(started)
    for text in ("", "Hello the number", "a<|im_end|>\nb<|endoftext|>c"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        (expected,) = greedy(model, ids).tolist()
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        for flags in (("--prompt", text), ("--prompt-file", "text.txt")):
            (one,) = samples(sample(started, *flags, "--json", *FLAGS))
            assert (one["prompt"], one["tokens"]) == (text, expected)
        if text:
            (found,) = samples(sample(started, "--score", "text.txt", "--json"))
            loss = model(ids, labels=ids).loss.item()
            assert found["token_ids"] == ids[0, 1:].tolist()
            assert found["nats_per_token"] == pytest.approx(loss, abs=1e-5)
            assert found["bytes"] == len(text)
    lines = sample(started, "--max-new-tokens", 1).stderr.splitlines()
    assert lines[-2] == "no prompt: starting from '<|endoftext|>'"


def test_each_end_token_of_a_folder_ends_a_sample(started, sample):
    flags = ["--json", "--max-new-tokens", 150, "--num-samples", 30, "--temperature", 3]
    lasts = set()
    for one in samples(sample(started, "--prompt", "Hello", *flags)):
        assert not {1, 2, 4} & {*one["tokens"][:-1]}
        assert one["reason"] == ("stop" if one["tokens"][-1] in (1, 2, 4) else "length")
        lasts.add(one["tokens"][-1])
    assert lasts >= {1, 2, 4}


def test_a_chat_answers_the_prompt_with_the_template_of_the_folder(sample, tmp_path):
    folder = make_instruct_folder(tmp_path / "instruct")
    model, tokenizer = load(folder)
    messages = [{"role": "user", "content": "Hello\n"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt"}
    ids = tokenizer.apply_chat_template(messages, **options)["input_ids"]
    answer = tokenizer.decode(greedy(model, ids)[0], skip_special_tokens=True)
    flags = [folder, "--prompt", "Hello\n", *FLAGS]
    assert sample(*flags, "--chat").stdout == f"{answer}\n"
    raw = sample(*flags)
    assert raw.stdout.startswith("Hello\n")
    assert "has a chat template, which is not applied to the prompt; set --chat" in raw.stderr
    (folder / "chat_template.jinja").unlink()
    assert error(sample(folder, "--chat")).startswith("error: --chat needs a chat template, and ")
