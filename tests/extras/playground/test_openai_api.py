"""The HTTP API through real servers: OpenAI's client, and raw requests."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, product
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from servers import BrokenEngine, SmallEngine, make_instruct_folder, make_run, serving
from small_runs import ROOT, wait_until

from minigpt import generate, load_checkpoint
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.sampling.generation import score

SETTINGS = {"temperature": 0.9, "top_p": 0.95}
OURS = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
KEYS = {"message", "type", "param", "code"}  # of an error
HELLO = [{"role": "user", "content": "Hello"}]
EMPTY = {"role": "assistant", "content": None}
IMAGE = {"type": "image_url", "image_url": "x"}


@pytest.fixture(scope="module")
def url(http: httpx.Client) -> str:
    return str(http.base_url).rstrip("/")


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


# What `generate` returns
def texts(run: Path, prompts: list[str], **options: Any) -> list[str]:
    model, tokenizer = load_checkpoint(run)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    samples = generate(model, ids, tokenizer=tokenizer, **options)
    return [tokenizer.decode(sample.tokens) for sample in samples]


def post(http: httpx.Client, path: str = COMPLETIONS, **body: Any) -> Any:
    return http.post(path, json={"model": "tiny", **body})


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl")
def test_the_commands_of_the_documentation_for_curl_work(url: str) -> None:
    page = (ROOT / "docs/playground.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?m)^curl (?:.*\\\n)*.*$", page)
    assert len(commands) == 2
    for command, kind in zip(commands, ("list", "text_completion"), strict=True):
        line = command.replace("http://127.0.0.1:8000", url).replace("2026-01-31_12-00-00", "tiny")
        answer = subprocess.run(line, shell=True, capture_output=True, check=True).stdout
        assert json.loads(answer)["object"] == kind


def test_completions_equal_those_of_generate(client: openai.OpenAI, run: Path) -> None:
    prompts = ["ROMEO:", "But soft"]
    result = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=40, n=2, seed=7, **SETTINGS, extra_body=OURS
    )
    expected = texts(run, prompts, max_new_tokens=40, num_samples=2, seed=7, **SETTINGS, **OURS)
    assert [choice.text for choice in result.choices] == expected
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in result.choices} == {"length"}
    usage = {"prompt_tokens": 14, "completion_tokens": 160, "total_tokens": 174}
    assert result.usage.to_dict() == usage


def test_a_stream_has_the_text_of_the_whole_response_in_whole_characters(
    client: openai.OpenAI, run: Path
) -> None:
    options = {"model": "tiny", "prompt": "é", "max_tokens": 60, "seed": 3}
    *pieces, usage = client.completions.create(
        **options, n=2, stream=True, stream_options={"include_usage": True}
    )
    for i, expected in enumerate(texts(run, ["é"], max_new_tokens=60, num_samples=2, seed=3)):
        own = [chunk.choices[0] for chunk in pieces if chunk.choices[0].index == i]
        assert "".join(choice.text for choice in own) == expected
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
        assert len(own) > 20
    assert (usage.choices, usage.usage.completion_tokens) == ([], 120)


def test_a_stream_never_sends_a_stop_string_or_its_beginning(
    client: openai.OpenAI, run: Path
) -> None:
    cut = 0
    for seed in range(6):
        options: Any = {"model": "tiny", "prompt": "A", "max_tokens": 40, "logprobs": 0}
        (text,) = texts(run, ["A"], max_new_tokens=40, seed=seed)
        if not (found := re.search(r"[ -~]{2,4}", text)):  # in one token per byte
            continue
        before = text.partition(found[0])[0]
        whole = client.completions.create(**options, seed=seed, stop=found[0]).choices[0]
        assert (whole.text, whole.finish_reason) == (before, "stop")
        assert all(offset < len(before) for offset in whole.logprobs.text_offset)
        stops = [found[0], found[0] + "x", "x" * 50]
        stream = client.completions.create(**options, seed=seed, stop=stops, stream=True)
        choices = [chunk.choices[0] for chunk in stream]
        assert "".join(choice.text for choice in choices) == before
        assert choices[-1].finish_reason == "stop"
        streamed = chain.from_iterable(one.logprobs.tokens for one in choices)
        assert list(streamed) == whole.logprobs.tokens
        cut += 1
    assert cut > 2


def test_the_tokens_of_an_echoed_prompt_have_the_logprobs_of_score(
    client: openai.OpenAI, run: Path
) -> None:
    prompt = "To be, or not"
    model, tokenizer = load_checkpoint(run)
    ids = tokenizer.encode(prompt).tolist()
    rated = score(model, ids[1:], ids[:1])
    for n in (0, 1):
        options: Any = {"prompt": [ids], "max_tokens": n, "logprobs": 2, "echo": True}
        choice = client.completions.create(model="tiny", temperature=0, **options).choices[0]
        logprobs = choice.logprobs
        assert choice.text.startswith(prompt)
        assert logprobs.text_offset == list(range(len(prompt) + n))
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
        values = logprobs.token_logprobs[1 : len(ids)]
        assert values == pytest.approx(rated.logprobs.tolist(), abs=1e-4)
        for value, rank, top in zip(values, rated.ranks, logprobs.top_logprobs[1:], strict=n == 0):
            assert (value == max(top.values())) == (rank == 0)
            assert len(top) in (2, 3)


def test_tokens_and_offsets_rebuild_the_text(http: httpx.Client, run: Path) -> None:
    asked = {"prompt": "é", "max_tokens": 30, "logprobs": 0, "seed": 5, "echo": True}
    (choice,) = post(http, **asked).json()["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 32
    assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        # A character may follow the replacement character of bytes that are none.
        assert token.startswith("bytes:") or token in choice["text"][offset : offset + 2]
    streamed = post(http, **asked, stream=True).text.split("\n\n")[:-2]
    parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in streamed]
    tokens = chain.from_iterable(part["logprobs"]["tokens"] for part in parts)
    assert list(tokens) == logprobs["tokens"]
    assert "".join(part["text"] for part in parts) == choice["text"]
    (sample,) = generate(load_checkpoint(run)[0], [97, 195], max_new_tokens=5, seed=5)
    for n in (0, 5):  # after a prompt that ends within a character
        (choice,) = post(http, prompt=[97, 195], max_tokens=n, seed=5, echo=True).json()["choices"]
        assert choice["text"] == bytes([97, 195, *sample.tokens[:n]]).decode(errors="replace")


def test_a_chat_continues_the_messages(
    client: openai.OpenAI, http: httpx.Client, run: Path
) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    (expected,) = texts(run, ["Be brief.\nHello"], max_new_tokens=12, seed=1)
    options: Any = {"model": "tiny", "messages": messages, "max_completion_tokens": 12, "seed": 1}
    choice = client.chat.completions.create(**options, logprobs=True, top_logprobs=2).choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert choice.finish_reason == "length"
    read = bytes(chain.from_iterable(token.bytes for token in choice.logprobs.content))
    assert read.decode(errors="replace") == expected
    assert {len(token.top_logprobs) for token in choice.logprobs.content} == {2}
    chunks = client.chat.completions.create(**options, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert {delta.role for delta in deltas[1:]} == {None}
    assert "".join(delta.content for delta in deltas) == expected
    streamed = post(http, CHAT, messages=HELLO, max_tokens=3, stream=True).text
    assert re.fullmatch(r"(data: \{.*\}\n\n)+data: \[DONE\]\n\n", streamed)


def test_a_chat_with_an_instruct_model_applies_its_template(once: Callable[..., Path]) -> None:
    folder = once("instruct", make_instruct_folder)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    pretrained = find_pretrained(str(folder))
    model = pretrained.load()
    chat: Any = [{"role": "user", "content": "Hello "}, EMPTY | {"content": "a\n"}, *HELLO]
    read = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    sampling: Any = {"max_new_tokens": 200, "tokenizer": pretrained.tokenizer, "temperature": 2.0}
    reasons = set()
    with serving([folder]) as server, httpx.Client(base_url=server.url) as http:
        body: Any = {"model": "instruct", "temperature": 2.0, "max_tokens": 200}
        for seed in range(3):
            (sample,) = generate(model, read, stop=[0, 1, 2], seed=seed, **sampling)
            answer = post(http, CHAT, messages=chat, seed=seed, **body).json()
            (choice,) = answer["choices"]
            assert choice["message"]["content"] == sample.text
            assert choice["finish_reason"] == sample.reason
            assert answer["usage"]["prompt_tokens"] == len(read)
            reasons.add(sample.reason)
        assert "stop" in reasons
        # A stop string can be a special token
        (sample,) = generate(model, [3], stop=[1, 2], seed=0, **sampling)
        stopped = post(http, prompt=[3], stop="<|im_start|>", seed=0, **body).json()
        assert stopped["choices"][0]["text"] == sample.text


def test_the_tokens_that_are_read_are_those_of_the_tokenizer_of_the_folder(
    once: Callable[..., Path],
) -> None:
    options = {"bos_token": "<|endoftext|>", "add_bos_token": True, "ends": [2, 1, 4]}
    folder = once("started", lambda path: make_instruct_folder(path, **options))
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    pretrained = find_pretrained(str(folder))
    model = pretrained.load()
    sampling: Any = {"max_new_tokens": 60, "seed": 4, "tokenizer": pretrained.tokenizer}
    with serving([folder]) as server, httpx.Client(base_url=server.url) as http:
        for text in ("Hello", "a<|im_end|>\nb", ""):
            ids = theirs(text).input_ids
            (sample,) = generate(model, ids, stop=[1, 2, 4], **sampling)
            body: dict[str, Any] = {"model": "started", "prompt": text, "max_tokens": 60, "seed": 4}
            answer = post(http, **body).json()
            (choice,) = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == (sample.text, sample.reason)
            assert answer["usage"]["prompt_tokens"] == len(ids)
            echoed = post(http, **body, echo=True, logprobs=0).json()["choices"][0]
            assert echoed["text"] == text + sample.text
            if text:  # the start token has none
                assert echoed["logprobs"]["text_offset"][:3] == [0, 0, 1]
            scored = post(http, "/api/score", model="started", text=text).json()["tokens"]
            assert [token["id"] for token in scored] == (ids if text else [])
            assert "".join(token["text"] for token in scored) == text
        # The template adds none
        read = theirs.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
        answer = post(http, CHAT, model="started", messages=HELLO, max_tokens=1).json()
        assert answer["usage"]["prompt_tokens"] == len(read)


def test_models_are_listed_and_loaded_by_name(client: openai.OpenAI, gpt2_folder: Path) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", gpt2_folder.name]
    assert client.models.retrieve("tiny").owned_by == "minigpt"
    options: Any = {"prompt": "the quick", "max_tokens": 5}
    assert client.completions.create(model=gpt2_folder.name, **options).usage.prompt_tokens == 2
    for name in ("../tiny", "/etc/passwd", "gpt"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
        with pytest.raises(openai.NotFoundError) as raised:
            client.completions.create(model=name, prompt="a")
        assert raised.value.code == "model_not_found"


REFUSED = [
    (COMPLETIONS, {"max_tokens": -3}, "max_tokens must be an integer in [0, 65536], got -3"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature must be in [0, 100], got hot"),
    (COMPLETIONS, {"n": 129}, "n must be an integer in [1, 128], got 129"),
    (COMPLETIONS, {"n": 65, "prompt": ["a", "b"]}, "n × prompts must be at most 128, got 130"),
    (COMPLETIONS, {"stop": ["a"] * 5}, "stop must be a non-empty string or a list of up to 4, got"),
    (COMPLETIONS, {"logprobs": True}, "logprobs must be an integer in [0, 20], got True"),
    (
        COMPLETIONS,
        {"prompt": None},
        "prompt must be a text, token ids, or a list of them, got None",
    ),
    (
        COMPLETIONS,
        {"prompt": [256]},
        "prompt: a prompt must be a non-empty sequence of token ids in [0, 256)",
    ),
    (COMPLETIONS, {"prompt": "a" * 65537}, "prompt must have at most 65,536 tokens, got 65,537"),
    (COMPLETIONS, {"frequency_penalty": 0.5}, "frequency_penalty is not supported with this value"),
    (COMPLETIONS, {"best_of": 2}, "best_of must be 1, got 2"),
    (COMPLETIONS, {"top_k": -2}, "top_k must be an integer ≥ -1, got -2"),
    (COMPLETIONS, {"top_p": 1.5}, "top_p must be in [0, 1], got 1.5"),
    (COMPLETIONS, {"max_tokens": 8.5}, "max_tokens must be an integer in [0, 65536], got 8.5"),
    (
        COMPLETIONS,
        {"seed": 2**63},
        f"seed must be an integer ≥ -1, got {2**63}; the largest is {2**63 - 1}",
    ),
    (COMPLETIONS, {"repeat_penalty": 1.1}, "repeat_penalty must be 1, got 1.1"),
    (
        COMPLETIONS,
        {"stream_options": {"other": True}},
        "stream_options must be include_usage, include_obfuscation or",
    ),
    (
        CHAT,
        {"reasoning_effort": "high", "messages": HELLO},
        'reasoning_effort must be "none", got high',
    ),
    (CHAT, {"verbosity": "low", "messages": HELLO}, 'verbosity must be "medium", got low'),
    (COMPLETIONS, {"model": 3}, "model must be a name of GET /v1/models, got 3"),
    (
        COMPLETIONS,
        {"model": "no\ud800"},
        "the model 'no\\ud800' does not exist; GET /v1/models lists all",
    ),
    (COMPLETIONS, {"model": "tiny@" + "1" * 5000}, "tiny has no snapshot of step 111"),
    (
        COMPLETIONS,
        {"model": "tiny@\u0661"},
        "tiny has no snapshot of step \u0661; it has those of none",
    ),
    (
        COMPLETIONS,
        {"stream_options": {"include_usage": "yes"}},
        "stream_options must be include_usage,",
    ),
    (CHAT, {"messages": []}, "messages must be a list of messages of text, got []"),
    (
        CHAT,
        {"messages": [HELLO[0] | {"content": [IMAGE]}]},
        "messages must be a list of messages of text",
    ),
    (
        CHAT,
        {"messages": [HELLO[0] | {"content": None}]},
        "messages must be a list of messages of text",
    ),
    (
        CHAT,
        {"messages": [EMPTY | {"tool_calls": [{"id": "a"}]}]},
        "messages must be a list of messages of text",
    ),
    ("/api/score", {"text": 3}, "text must be a text, got 3"),
    (
        "/api/score",
        {"text": "a" * 32_769},
        "the text must be at most 32,768 tokens long, got 32,769 tokens",
    ),
    (
        "/api/score",
        {"ids": [1, 256]},
        "a prompt must be a non-empty sequence of token ids in [0, 256)",
    ),
    ("/api/generate", {"max_tokens": 0}, "max_tokens must be an integer in [1, 65536], got 0"),
    ("/api/attention", {"ids": [1]}, "layer must be an integer ≥ 0, got None"),
    ("/api/attention", {"ids": [1], "layer": 2}, "layer must be an integer in [0, 1], got 2"),
    (
        "/api/attention",
        {"ids": [1], "layer": 0, "head": 2},
        "head must be an integer in [0, 1], or null, got 2",
    ),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
def test_a_bad_setting_is_named(
    path: str, body: dict[str, Any], message: str, http: httpx.Client
) -> None:
    given = {"model": "tiny"} | ({"prompt": "a"} if path == COMPLETIONS else {}) | body
    response = http.post(path, content=json.dumps(given), headers=JSON)
    is_missing = re.search("does not exist|no snapshot", message)
    assert response.status_code == (404 if is_missing else 400)
    error = response.json()["error"]
    assert error["message"].startswith(message)
    assert "\n" not in error["message"]
    assert error["type"]
    if path.startswith("/v1/"):
        assert error["param"] == next(iter(body))


def test_harmless_settings_of_clients_and_neutral_values_are_accepted(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    unset = dict.fromkeys(["suffix", "stop", "seed", "stream", "logprobs"])
    settings = {"user": "me", "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0}
    assert post(http, prompt="a", max_tokens=1, logit_bias={}, **settings, **unset).is_success
    chat = {"tools": [], "tool_choice": "auto", "metadata": {"a": "b"}, "store": False}
    chat |= {"response_format": {"type": "text"}, "modalities": ["text"]}
    assert post(http, CHAT, messages=HELLO, max_tokens=1, **chat).is_success
    neutral: Any = {"repeat_penalty": 1.0, "typical_p": 1, "skip_special_tokens": True}
    answer = post(http, prompt="a", max_tokens=1, logprobs=False, **neutral).json()
    assert answer["choices"][0]["logprobs"] is None
    options: Any = {"reasoning_effort": "none", "verbosity": "medium", "tool_choice": "none"}
    options["extra_body"] = {"function_call": "none", "tool_calls": []}
    options["stream_options"] = {"include_usage": True, "include_obfuscation": False}
    options["messages"] = [*HELLO, EMPTY]
    chunks = client.chat.completions.create(model="tiny", max_tokens=3, stream=True, **options)
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [3]
    usage = {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    for empty in (EMPTY, {"role": "assistant"}, EMPTY | {"tool_calls": [], "function_call": None}):
        answer = post(http, CHAT, messages=[*HELLO, empty], max_tokens=8).json()
        assert answer["usage"] == usage


@pytest.mark.parametrize(
    "off", [{"top_k": 0}, {"top_k": -1}, {"top_p": 0}, {"top_p": 0.0, "top_k": -1.0}]
)
def test_a_filter_is_off_with_the_values_of_other_servers(
    http: httpx.Client, run: Path, off: dict[str, Any]
) -> None:
    (expected,) = texts(run, ["ROMEO:"], max_new_tokens=20, seed=2, temperature=1.5)
    options = {"max_tokens": 20, "seed": 2, "temperature": 1.5, **off}
    (choice,) = post(http, prompt="ROMEO:", **options).json()["choices"]
    assert choice["text"] == expected
    lines = post(http, "/api/generate", ids=list(b"ROMEO:"), **options).text.splitlines()
    assert "".join(json.loads(line)["text"] for line in lines) == expected


def test_whole_numbers_may_be_floats(http: httpx.Client) -> None:
    whole = {"max_tokens": 8, "n": 2, "seed": 7, "top_k": 20, "logprobs": 2, "best_of": 1}
    floats = {key: float(value) for key, value in whole.items()}
    found = post(http, prompt=[[82.0, 79.0], [77.0]], **floats).json()["choices"]
    assert found == post(http, prompt=[[82, 79], [77]], **whole).json()["choices"]
    found = post(http, "/api/attention", ids=[82.0, 79.0], layer=1.0, head=0.0).content
    assert found == post(http, "/api/attention", ids=[82, 79], layer=1, head=0).content


def test_minus_one_is_a_random_seed(http: httpx.Client) -> None:
    drawn = [post(http, prompt="a", seed=-1, max_tokens=20).json()["choices"] for _ in range(3)]
    assert len({choice["text"] for (choice,) in drawn}) == 3


# JSON of any type, and what parsers and encoders do not take.
VALUES = [f'"tiny@{"1" * 5000}"', "9" * 400, "9" * 5000, f"[{'9' * 400}]"]
VALUES += [str(2**63 - 1), str(2**64)]
VALUES += ["[" * 900 + "]" * 900, "[" * 3000 + "]" * 3000, '{"a":' * 900 + "1" + "}" * 900]
LISTED = r"""
null true 0 -1 1.5 1e400 NaN Infinity [] {} [[]] [{}] [null] [1] [-1] [1,"a"] [true] {"a":1}
"" "a" "\ud800" "\udc00\ud800a" "a\u0000" "tiny@\ud800" [""] ["\ud800"]
{"\ud800":NaN} {"type":"\ud800"} {"include_usage":"\ud800"} {"include_usage":true}
[{"role":"user","content":"\ud800"}] [{"role":"\ud800","content":"a"}] [{"role":"","content":[]}]
[{"role":"user","content":[{"type":"text","text":"\ud800"}]}] [{"role":"user","content":[[]]}]
"""
SETTINGS_OF_BOTH = r"""
model stop seed n stream stream_options max_tokens temperature top_k top_p min_p repetition_penalty
logit_bias logprobs best_of modalities response_format tools metadata \ud800
"""
VALUES += LISTED.split()
COMMON = SETTINGS_OF_BOTH.split()
FIELDS = {
    COMPLETIONS: ({"prompt": '"a"', "max_tokens": "2"}, [*COMMON, "prompt", "echo", "suffix"]),
    CHAT: (
        {"messages": json.dumps(HELLO), "max_tokens": "2"},
        [*COMMON, "messages", "top_logprobs"],
    ),
    "/api/score": ({"text": '"a"'}, ["model", "text", "ids"]),
    "/api/generate": (
        {"ids": "[97]", "max_tokens": "2"},
        ["model", "ids", "max_tokens", "seed", "top_k"],
    ),
    "/api/attention": ({"ids": "[97]", "layer": "0"}, ["model", "ids", "layer", "head"]),
    "/api/originality": ({"text": '"a"'}, ["model", "text"]),
}
EVERY: list[tuple[str, ...]] = []
for path, (_, names) in FIELDS.items():
    EVERY += product([path], names, VALUES, ["tiny", "instruct"])
ODD_NAMES = ["tiny@" + "1" * 5000, "tiny@%ED%A0%80", "%ED%A0%80", "%00", "tiny@%D9%A1", "@", ""]


@pytest.mark.parametrize(
    "cases", [EVERY[::83], pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_no_value_is_a_failure_of_the_server(
    cases: list[Any], run: Path, once: Callable[..., Path]
) -> None:
    with (
        serving([run, once("instruct", make_instruct_folder)]) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for path, name, value, model in cases:
            for flags in ({}, {"stream": "true"}) if path.startswith("/v1") else ({},):
                fields = {"model": json.dumps(model), **FIELDS[path][0], **flags, name: value}
                body = ", ".join(f'"{key}": {content}' for key, content in fields.items())
                response = http.post(path, content=f"{{{body}}}", headers=JSON)
                case = (path, name, value[:99], response.text)
                assert response.status_code in (200, 400, 404), case
                if response.status_code == 200:
                    assert '"error"' not in response.text, case
                else:
                    assert response.json()["error"].keys() == KEYS
        for path, name in product(("/v1", "/api"), ODD_NAMES):
            assert http.get(f"{path}/models/{name}").status_code in (400, 404)


CLIENTS = "(the base URL of a client ends with /v1)"
WRONG_PATHS = {
    "//v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/v1/chat/completions": CHAT,
    "/v1//chat//completions": CHAT,
    "/completions": COMPLETIONS,
    "/v1/chat/completions/completions": COMPLETIONS,
    "/models": "/v1/models",
    "//v1/models/a/b": "/v1/models/a/b",
    "//api/score": "/api/score",
    "//health": "/health",
}


def test_a_wrong_address_is_an_error_that_names_the_right_one(url: str, http: httpx.Client) -> None:
    ways = {path: f"; use {right} {CLIENTS}" for path, right in WRONG_PATHS.items()}
    ways |= {"/v1/embeddings": "", "/v2/nothing": ""}
    for method, (path, use) in product(("GET", "POST"), ways.items()):
        response = http.request(method, f"{url}{path}", json={"model": "tiny"})
        assert response.status_code == 404
        assert response.json()["error"]["message"] == f"{method} {path} does not exist{use}"


def test_every_http_error_is_json(http: httpx.Client) -> None:
    for status, response in [
        (404, http.get("/v2/nothing")),
        (405, http.get(COMPLETIONS)),
        (413, http.post(COMPLETIONS, content=b" " * (1 << 20) + b"{}", headers=JSON)),
        (415, http.post(COMPLETIONS, content=b"{}", headers={"Content-Type": "text/plain"})),
        (400, http.post(COMPLETIONS, content=b"{", headers=JSON)),
        (400, http.post(COMPLETIONS, content=b"\xff\xfe", headers=JSON)),
        (400, http.post(COMPLETIONS, content=b"[" * 200_000, headers=JSON)),
    ]:
        assert response.status_code == status, response.text
        assert response.json()["error"].keys() == KEYS
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in response.headers


OWN_HOSTS = ["localhost", "[::1]:8000", "127.0.0.1:1", "LOCALHOST:8000"]
FOREIGN_HOSTS = ["example.com", "127.0.0.1.example.com", "localhost.example.com:8000"]
FOREIGN_HOSTS += ["192.168.0.1", ""]
# Before a path, as an address, and with characters that libraries of URLs interpret
FOREIGN_HOSTS += ["127.0.0.1:8000/../../secret.html?", "[::1]evil.com", "127.0.0.1/x"]
FOREIGN_HOSTS += ["localhost#", "a@localhost"]


def test_the_host_must_be_that_of_the_server(http: httpx.Client) -> None:
    for host in OWN_HOSTS:
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200
    own = "Host must be a loopback address or 127.0.0.1, got"
    for host in FOREIGN_HOSTS:
        refused = http.get("/v1/models", headers={"Host": host})
        assert refused.status_code == 403
        assert refused.json()["error"]["message"].startswith(own)


ASKED_METHOD = "Access-Control-Request-Method"
ASKED_HEADERS = "Access-Control-Request-Headers"


def test_other_web_sites_are_refused_unless_allowed(
    run: Path, url: str, http: httpx.Client
) -> None:
    assert http.get("/health", headers={"Origin": url}).status_code == 200
    for origin in ("https://example.com", "null", url.replace("127.0.0.1", "localhost"), f"{url}0"):
        for method in ("GET", "POST", "OPTIONS"):
            refused = http.request(method, COMPLETIONS, headers={"Origin": origin}, json={})
            assert refused.status_code == 403
            assert "Access-Control-Allow-Origin" not in refused.headers
    allowed = {"Origin": "http://localhost:3000"}
    with (
        serving([run], origins=["http://localhost:3000"], key="secret") as server,
        httpx.Client() as client,
    ):
        asked = {ASKED_METHOD: "POST", ASKED_HEADERS: "Authorization"}
        preflight = client.options(f"{server.url}{CHAT}", headers=allowed | asked)
        assert preflight.status_code == 200
        assert preflight.headers["Access-Control-Allow-Headers"] == "Authorization"
        other = asked | {"Origin": "https://example.com"}
        refused = client.options(f"{server.url}{CHAT}", headers=other)
        assert refused.status_code == 400
        assert "Access-Control-Allow-Origin" not in refused.headers
        for key, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            response = client.get(f"{server.url}/v1/models", headers=allowed | key)
            assert response.status_code == status
            assert response.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"


INSTALLED = ["chrome-extension://abcdefghijklmnop", "moz-extension://0b5a-11"]
INSTALLED += ["app://obsidian.md", "tauri://localhost"]


def test_extensions_of_the_browser_and_apps_may_use_the_server(http: httpx.Client) -> None:
    asked = {ASKED_METHOD: "POST", ASKED_HEADERS: "content-type"}
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    for origin in INSTALLED:
        headers = {"Origin": origin}
        preflight = http.options(CHAT, headers=headers | asked)
        for response in (preflight, http.post(CHAT, json=body, headers=headers)):
            assert response.status_code == 200
            assert response.headers["Access-Control-Allow-Origin"] == origin
        assert http.get("/v1/models", headers=headers | {"Host": "a.com"}).status_code == 403
        site = origin.partition("://")[2]
        for other in (
            f"https://{site}",
            f"https://x/{origin}",
            f"x{origin}",
            f"{origin} https://x",
        ):
            assert http.get("/v1/models", headers={"Origin": other}).status_code == 403
            assert http.options(CHAT, headers={"Origin": other} | asked).status_code == 400


def test_the_key_is_required(run: Path) -> None:
    wrong = ["", "Bearer", "secret", "Basic secret", "Bearer wrong", "Bearer secrets"]
    with (
        serving([run], key="secret", host="0.0.0.0") as server,
        httpx.Client(base_url=server.url) as http,
    ):

        def ask(**headers: Any) -> httpx.Response:
            return http.get("/v1/models", headers=headers)

        for value in [*wrong, "Bearer sécret"]:
            response = ask(Authorization=value.encode())
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret").models.list().data
        assert http.get("/health").json() == {"status": "ok"}
        for value in ("bearer secret", "BEARER secret", "Bearer  secret"):
            assert ask(Authorization=value).status_code == 200
        for origin in ("app://obsidian.md", "moz-extension://a"):  # needs the key too
            assert ask(Origin=origin).status_code == 401
        for host, status in (("192.168.0.7:8000", 200), ("example.com", 403)):
            assert ask(Authorization="Bearer secret", Host=host).status_code == status


def test_too_many_requests_are_told_to_try_again_and_samples_of_a_client_that_disconnects_end(
    run: Path,
) -> None:
    with (
        serving([run], engine=SmallEngine) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        refused = post(client, prompt="a", n=4, max_tokens=10)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert SmallEngine.n_open() == 0
        endless = {"model": "tiny", "prompt": "a", "n": 2, "max_tokens": 60_000}
        with client.stream("POST", COMPLETIONS, json=endless | {"stream": True}) as response:
            assert next(response.iter_lines())
        wait_until(lambda: SmallEngine.n_open() == 0)
        with pytest.raises(httpx.ReadTimeout):
            client.post(COMPLETIONS, json=endless, timeout=httpx.Timeout(60, read=0.3))
        wait_until(lambda: SmallEngine.n_open() == 0)


def test_a_server_that_ends_cuts_off_requests_after_a_second(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "tiny", "max_tokens": 60_000}
    with (
        serving([run], engine=SmallEngine) as server,
        ThreadPoolExecutor() as pool,
        ExitStack() as streams,
    ):
        received = []
        streamed = {"prompt": "a", "stream": True}
        for path, settings in ((COMPLETIONS, streamed), ("/api/generate", {})):
            asked = httpx.stream("POST", f"{server.url}{path}", json=body | settings)
            received.append(streams.enter_context(asked).iter_lines())
            next(received[-1])
        sent = pool.submit(httpx.post, f"{server.url}{COMPLETIONS}", json=body | {"prompt": "a"})
        wait_until(lambda: SmallEngine.n_open() == 3)
        server.stop()
        assert "Cancel 3 running task(s)" in capfd.readouterr().err
        assert sent.result().status_code == 503
        error = sent.result().json()
        assert error["error"]["message"] == "the server was stopped"
        last = [list(filter(None, lines))[-1] for lines in received]
        assert last == [f"data: {json.dumps(error)}", '{"error": "the server was stopped"}']
        assert SmallEngine.n_open() == 0


def test_a_failure_of_the_server_is_an_error_without_its_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = make_run(tmp_path / "gone")
    with serving([make_run(tmp_path / "broken"), gone], engine=BrokenEngine) as server:
        best = gone / "checkpoints" / "best.safetensors"
        best.rename(tmp_path / "kept")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
        message = "the server failed; its terminal shows the error"
        with pytest.raises(openai.InternalServerError, match=message):
            client.completions.create(model="broken", prompt="a")
        stream = client.completions.create(model="broken", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="the server failed"):
            list(stream)
        failed = httpx.post(f"{server.url}/api/generate", json={"model": "broken", "max_tokens": 9})
        assert json.loads(failed.text.splitlines()[-1]) == {"error": message}
        with pytest.raises(openai.InternalServerError, match="gone cannot be loaded: "):
            client.completions.create(model="gone", prompt="a")
        (tmp_path / "kept").rename(best)
        assert httpx.get(f"{server.url}/api/models/gone").status_code == 200
    assert capfd.readouterr().err == "error: the model's logits are NaN\n" * 3
