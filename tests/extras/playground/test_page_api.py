"""The API of the page through a real server, against the functions of minigpt behind it."""

import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from models import make_model, write_run
from servers import BYTES, CHATML, make_instruct_folder, make_run, serving

from minigpt import GPT, generate, load_checkpoint, save_checkpoint
from minigpt.checkpoints.find import BEST, find_snapshots
from minigpt.data.tokenizer import ByteTokenizer
from minigpt.extras.conversations.encoding import CHATML as OWN
from minigpt.extras.conversations.encoding import add_chat
from minigpt.extras.interpret import originality
from minigpt.extras.interpret.heads import attention_maps
from minigpt.extras.interpret.learning import learning_curves
from minigpt.extras.interpret.snapshots import snapshot_path
from minigpt.extras.playground.history import read_history, run_status
from minigpt.runs.run_dir import lock_run_dir
from minigpt.sampling.generation import score

JSON = {"Content-Type": "application/json"}
TEXT = "To bé, or not to be: that is the quéstion"  # above the block size


@pytest.fixture(scope="module")
def model(run: Path) -> GPT:
    return load_checkpoint(run)[0]


def post(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    return http.post(f"/api/{path}", json={"model": "tiny", **body})


def lines(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_the_models_are_described(http: httpx.Client, tmp_path: Path, gpt2_folder: Path) -> None:
    tiny = http.get("/api/models/tiny").json()
    sizes = "parameters: 2 layers, 2 heads, width 16, a context of 32 tokens, tokenizer byte"
    assert sizes in tiny.pop("facts")
    assert tiny == {"name": "tiny", "n_layer": 2, "n_head": 2, "block_size": 32, "chat": False}
    assert http.get(f"/api/models/{gpt2_folder.name}").json()["block_size"] == 32
    with serving([make_run(tmp_path / "runs" / "7", n_head=4)]) as server:
        assert httpx.get(f"{server.url}/api/models/runs%2F7").json()["n_head"] == 4


def test_a_scored_text_has_the_likelihood_of_every_token(http: httpx.Client, model: GPT) -> None:
    ids = list(TEXT.encode())[:32]
    tokens = post(http, "score", text=bytes(ids).decode()).json()["tokens"]
    assert [token["id"] for token in tokens] == ids
    assert "".join(token["text"] for token in tokens) == bytes(ids).decode()
    # With the byte that completes it
    assert {token["text"] for token in tokens if token["id"] > 127} == {"", "é"}
    assert (tokens[0]["logprob"], tokens[0]["top"]) == (None, [])
    rated = score(model, ids[1:], ids[:1], n_top=10)
    logprobs = [token["logprob"] for token in tokens[1:]]
    assert logprobs == pytest.approx(rated.logprobs.tolist(), abs=1e-4)
    assert [token["rank"] for token in tokens[1:]] == rated.ranks.tolist()
    for token, top in zip(tokens[1:], rated.top, strict=True):
        for other, (i, value) in zip(token["top"], top, strict=True):
            assert (other["id"], other["text"]) == (i, bytes([i]).decode(errors="replace"))
            assert other["logprob"] == pytest.approx(value, abs=1e-4)
    assert post(http, "score", ids=ids).json()["tokens"] == tokens
    assert post(http, "score", text="").json() == {"tokens": []}
    cut = post(http, "score", ids=[97, 195]).json()["tokens"]
    assert [token["text"] for token in cut] == ["a", "\ufffd"]
    assert len(post(http, "score", text=TEXT).json()["tokens"]) == len(TEXT.encode()) > 32


def test_generated_tokens_are_those_of_generate(http: httpx.Client, model: GPT) -> None:
    prompt = list(TEXT.encode())[:5]  # ends within a character
    options = {"temperature": 0.9, "top_k": 200, "top_p": 0.98, "min_p": 0.001}
    tokens = lines(post(http, "generate", ids=prompt, max_tokens=60, seed=5, **options))
    (sample,) = generate(model, prompt, max_new_tokens=60, seed=5, logprobs=True, **options)
    assert [token["id"] for token in tokens] == sample.tokens
    assert [token["logprob"] for token in tokens] == pytest.approx(sample.logprobs, abs=1e-4)
    text = bytes(prompt + sample.tokens).decode(errors="replace")
    assert "To b" + "".join(token["text"] for token in tokens) == text
    for token in tokens:
        values = [top["logprob"] for top in token["top"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 10
    start = lines(post(http, "generate", ids=[], max_tokens=3))
    assert [token["id"] for token in start] == generate(model, [10], max_new_tokens=3)[0].tokens


def test_the_end_of_text_token_ends_a_sample_and_is_not_part_of_it(
    http: httpx.Client, gpt2_folder: Path
) -> None:
    lengths = set[int]()
    body = {"model": gpt2_folder.name, "max_tokens": 30, "temperature": 3}
    for seed in range(40):
        tokens = lines(post(http, "generate", **body, seed=seed))
        assert 0 not in [token["id"] for token in tokens]
        lengths.add(len(tokens))
        if min(lengths) < 30 == max(lengths):
            return
    raise AssertionError(lengths)


def test_a_question_has_the_tokens_of_the_chat_template(once: Callable[..., Path]) -> None:
    options = {"bos_token": "<|endoftext|>", "add_bos_token": True, "ends": [2, 1, 4]}
    begun = {**options, "chat_template": "{{ bos_token }}" + CHATML}
    folders = [
        once("instruct", make_instruct_folder),
        once("started", lambda path: make_instruct_folder(path, **options)),
        once("begun", lambda path: make_instruct_folder(path, **begun)),
    ]
    transformers = pytest.importorskip("transformers")
    with serving(folders) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for folder in folders:
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            assert http.get(f"/api/models/{folder.name}").json()["chat"]
            for question in ("Hello ", "", "a<|im_end|>\n"):
                messages = [{"role": "user", "content": question}]
                read = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
                body = {"model": folder.name, "text": question}
                tokens = post(http, "chat", **body).json()["tokens"]
                assert [token["id"] for token in tokens] == read
                shown = "".join(token["text"] for token in tokens)
                prefix = "<|endoftext|>" if folder.name == "begun" else ""
                assert prefix + shown == theirs.decode(read)
                again = post(http, "score", model=folder.name, text=shown).json()["tokens"]
                assert [token["id"] for token in again] == theirs(shown).input_ids
                assert (again == tokens) == (folder.name != "started")


def test_a_special_token_ends_an_answer_and_else_is_shown_by_its_name(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    add_chat(tokenizer, OWN)
    assert dict(tokenizer.special) == {"<|im_start|>": 256, "<|im_end|>": 257}
    model = make_model(**BYTES | {"vocab_size": 258, "block_size": 64, "seed": 3})
    run = write_run(tmp_path / "chat", model, tokenizer)
    # Names in the question are ordinary text
    read = [256, *b"user\n<|im_end|>", 257, 10, 256, *b"assistant\n"]
    options: dict[str, Any] = {"temperature": 3.0}
    samples = generate(model, [read] * 40, max_new_tokens=60, stop=[257], **options)
    seed = next(i for i, sample in enumerate(samples) if 256 in sample.tokens)
    expected = samples[seed].tokens
    with serving([run]) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        asked = post(http, "chat", model="chat", text="<|im_end|>").json()["tokens"]
        assert [token["id"] for token in asked] == read
        body: dict[str, Any] = {"model": "chat", "ids": read, "max_tokens": 60, "seed": seed}
        tokens = lines(post(http, "generate", **body, **options))
        assert [token["id"] for token in tokens] == [i for i in expected if i != 257]
        named = [token["text"] for token in tokens if token["id"] == 256]
        assert named == ["<|im_start|>"] * expected.count(256)
        answer = lines(post(http, "generate", **body, **options, chat=True))
        assert answer == tokens[: expected.index(256)]


def test_a_question_to_a_model_without_a_template_is_refused(http: httpx.Client) -> None:
    refused = post(http, "chat", text="Hello")
    assert refused.status_code == 400
    message = "model must be one with a chat template, got tiny"
    assert refused.json()["error"]["message"] == message


def matrix(content: bytes) -> torch.Tensor:
    weights = torch.frombuffer(bytearray(content), dtype=torch.float32)
    return weights.view(math.isqrt(len(weights)), -1)


def test_attention_is_that_of_the_last_block_of_tokens(http: httpx.Client, model: GPT) -> None:
    ids = list(TEXT.encode())
    maps = attention_maps(model, torch.tensor(ids[-32:]))
    for layer in range(2):
        response = post(http, "attention", ids=ids, layer=layer, head=1)
        assert response.headers["Content-Type"] == "application/octet-stream"
        torch.testing.assert_close(matrix(response.content), maps[layer, 1])
        mean = matrix(post(http, "attention", ids=ids, layer=layer).content)
        torch.testing.assert_close(mean, maps[layer].mean(dim=0))
    assert matrix(post(http, "attention", ids=[7], layer=0, head=0).content).tolist() == [[1]]


def test_the_history_is_that_of_the_run(http: httpx.Client, gpt2_folder: Path) -> None:
    assert http.get("/api/history/tiny").json() == {
        "train_loss": [[1, 5.5]],
        "val_loss": [[2, 5.25]],
        "samples": [{"step": 2, "text": "ROMEO:\n\nhm"}],
        "steps": [],
        "status": "",
    }
    assert http.get(f"/api/history/{gpt2_folder.name}").json() == {"steps": [], "status": ""}


def test_the_page_and_its_files_are_served_without_a_key(run: Path) -> None:
    with serving([run], key="secret") as server, httpx.Client(base_url=server.url) as http:
        sources = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
        for path, kind in (("/", "html"), ("/index.html", "html"), ("/server.js", "javascript")):
            headers = http.get(path).raise_for_status().headers
            assert headers["Content-Type"].startswith(f"text/{kind}")
            assert headers["Cache-Control"] == "no-cache"
            assert headers["Content-Security-Policy"].startswith(sources)
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        for path in ("/__init__.py", "/../server.py", "/%2e%2e/server.py", "/none.js"):
            assert http.get(path).status_code == 404
        key = {"Authorization": "Bearer secret"}
        for path in ("/v1/models", "/api/models/tiny", "/api/history/tiny", "/api/nothing"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers=key).status_code in (200, 404)
        assert http.post("/api/score", json={"model": "tiny", "text": "a"}).status_code == 401


def test_every_request_is_logged_without_its_text_and_key(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving([run], key="secret", access_log=True) as server:
        headers = {"Authorization": "Bearer secret"}
        httpx.get(f"{server.url}/v1/models", headers=headers)
        httpx.get(f"{server.url}/v1/models")
        body = {"model": "tiny", "prompt": "private", "max_tokens": 7, "n": 2}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        httpx.get(f"{server.url}/%0a%1b[31m")
    logged = capfd.readouterr().out
    expected = ["/v1/models 200", "/v1/models 401", "/v1/completions 200", "/%0A%1B%5B31m 404"]
    found = re.sub(r'.*"\w+ (\S+) HTTP/1.1" (\d+).*', r"\1 \2", logged)
    assert found.splitlines() == expected
    assert not re.search("private|secret", logged)


# Add the snapshot of a step with other random weights than the run's; return its model
def add_snapshot(run: Path, step: int) -> GPT:
    model = make_model(seed=step + 1, **BYTES)
    save_checkpoint(model, ByteTokenizer(), snapshot_path(run, step))
    return model


def assert_scored_by(model: GPT, http: httpx.Client, name: str) -> None:
    ids = list(b"to be")
    scored = post(http, "score", model=name, ids=ids).json()["tokens"][1:]
    logprobs = [token["logprob"] for token in scored]
    assert logprobs == pytest.approx(score(model, ids[1:], ids[:1]).logprobs.tolist(), abs=1e-4)


def test_the_name_of_a_run_with_a_step_is_a_snapshot(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny")
    models = {step: add_snapshot(run, step) for step in (0, 7)}
    snapshot_path(run, 9).write_bytes(b"damaged")
    with serving([run]) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        assert http.get("/api/history/tiny").json() == {"steps": [0, 7, 9], "status": ""}
        for step, model in models.items():
            assert_scored_by(model, http, f"tiny@{step}")
        tokens = lines(post(http, "generate", model="tiny@7", ids=[1], max_tokens=5))
        (sample,) = generate(models[7], [1], max_new_tokens=5)
        assert [token["id"] for token in tokens] == sample.tokens
        assert http.get("/v1/models/tiny@7").json()["id"] == "tiny@7"
        for name in ("tiny@8", "tiny@", "other@7", "tiny@-7"):
            missing = post(http, "score", model=name, ids=[1])
            assert missing.status_code == 404
            listed = "tiny has no snapshot of step 8; it has those of 0, 7, 9"
            assert (listed in missing.text) == (name == "tiny@8")
        damaged = post(http, "score", model="tiny@9", ids=[1])
        assert (damaged.status_code, "is not a complete checkpoint" in damaged.text) == (500, True)


def test_a_run_that_trains_is_served_with_its_newest_weights(tmp_path: Path) -> None:
    run = tmp_path / "new"
    with lock_run_dir(run):
        (run / "metrics.csv").write_text("step,train_loss,val_loss\n1,5.5,\n")
        first = add_snapshot(run, 0)
        with serving([run]) as server, httpx.Client(base_url=server.url, timeout=30) as http:
            assert http.get("/api/history/new").json()["status"] == "running"
            assert_scored_by(first, http, "new")
            best = make_model(seed=9, **BYTES)
            save_checkpoint(best, ByteTokenizer(), run / BEST)
            assert_scored_by(best, http, "new")
            # As cp -p does: an older file, in place
            shutil.copy2(snapshot_path(run, 0), run / BEST)
            assert_scored_by(first, http, "new")
            save_checkpoint(best, ByteTokenizer(), tmp_path / "best")
            replace(run / BEST, tmp_path / "best")
            assert_scored_by(best, http, "new")
    (run / "summary.json").write_text('{"status": "failed", "reason": "the loss is NaN"}')
    assert run_status(run) == "failed: the loss is NaN"


# Replace a file by a copy of another one that has its time of modification
def replace(file: Path, other: Path) -> None:
    copied = Path(shutil.copy2(other, file.with_name("copied")))
    times = file.stat()
    os.utime(copied, ns=(times.st_atime_ns, times.st_mtime_ns))
    copied.replace(file)


def test_a_text_is_compared_with_the_training_text_and_snapshots_are_measured(
    train: Any, tmp_path: Path, text: Path
) -> None:
    folder = train("callbacks.snapshots.count=3", "max_steps=5").folder
    copied = text.read_text(encoding="utf-8")[50:120]
    with serving([folder]) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        half = json.dumps({"model": "run", "text": f"\ud800zz{copied}"})  # of a character
        found = http.post("/api/originality", content=half, headers=JSON).json()
        assert [(span["start"], span["end"]) for span in found["text"]["spans"]] == [(3, 73)]
        assert found["text"]["longest"] == 70
        assert found["validation"].keys() == {"new", "longest"}
        measured = http.get("/api/learning/run").json()
        assert measured == json.loads(json.dumps(learning_curves(folder)))
        assert [snapshot["step"] for snapshot in measured] == [0, 1, 5]
        assert post(http, "originality", model="run", text="a" * 20_001).status_code == 400
        replace(snapshot_path(folder, 5), snapshot_path(folder, 0))
        assert http.get("/api/learning/run").json() == [*measured[:2], {**measured[0], "step": 5}]
        (tmp_path / "data").rename(tmp_path / "moved")
        for file in (*find_snapshots(folder).values(), folder / BEST):
            replace(file, file)
        compared = post(http, "originality", model="run", text="a")
        for answer in (compared, http.get("/api/learning/run")):
            assert answer.status_code == 400
            assert "the token files of the run are not in" in answer.json()["error"]["message"]


def test_requests_share_the_index_that_is_built_and_leave_the_server_free(
    train: Any, monkeypatch: pytest.MonkeyPatch, text: Path
) -> None:
    folder = train("callbacks.snapshots=null", "max_steps=1").folder
    sort = originality.divsufsort
    builds = list[bytes]()
    finish = threading.Event()

    def slowly(content: bytes) -> Any:
        builds.append(content)
        assert finish.wait(60)
        return sort(content)

    monkeypatch.setattr(originality, "divsufsort", slowly)
    originality._load.cache_clear()
    with serving([folder]) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/api/models/run").status_code == 200  # it is loaded
        for length in range(50, 60):  # edits, of which each ends the request before
            edited = {"model": "run", "text": text.read_text(encoding="utf-8")[:length]}
            with suppress(httpx.ReadTimeout):
                http.post("/api/originality", json=edited, timeout=0.02)
        assert http.get("/api/history/run").status_code == 200  # in a thread
        assert post(http, "score", model="run", text="fox").status_code == 200
        finish.set()
        found = http.post("/api/originality", json=edited).json()
    assert found["text"]["longest"] == 59
    assert len(builds) == 1


def test_the_history_of_a_run_has_its_losses_and_samples(finished: Any) -> None:
    history: Any = read_history(finished.folder)
    assert [step for step, _ in history["train_loss"]] == [5, 10, 15, 20]
    assert [step for step, _ in history["val_loss"]] == [10, 20]
    assert history["val_loss"][-1][1] == pytest.approx(finished.summary["best_val_loss"], abs=1e-4)
    assert [sample["step"] for sample in history["samples"]] == [10, 20]
    written = (finished.folder / "samples.txt").read_text(encoding="utf-8")
    for sample in history["samples"]:
        assert sample["text"] in written
        assert "──" not in sample["text"]


def test_a_long_curve_is_thinned_and_keeps_its_end(tmp_path: Path) -> None:
    rows = [f"{step},{'nan' if step == 7 else 1 / step}" for step in range(1, 12_346)]
    # A killed run
    content = "\n".join(["step,train_loss", *rows, "123"])
    (tmp_path / "metrics.csv").write_text(content, encoding="utf-8")
    history: Any = read_history(tmp_path)
    assert 400 < len(history["train_loss"]) <= 500
    assert history["train_loss"][-1] == [12_345, 1 / 12_345]
    assert (history["val_loss"], history["samples"]) == ([], [])
    assert "NaN" not in json.dumps(history)


def test_a_folder_without_metrics_has_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path) is None
    for damaged in ("step,train_loss\nx,y\n", f'step,train_loss\n1,"{"1" * 200_000}"\n'):
        (tmp_path / "metrics.csv").write_text(damaged, encoding="utf-8")
        assert read_history(tmp_path) is None
