"""The time machine of the page: snapshots of a run, a run that trains, what was learned when."""

import json
import re
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import write_run
from readers import Keys, Reader
from servers import serving
from sites import (
    CHARACTERS,
    LEARNED,
    MODELS,
    PROMPT,
    STEPS,
    continuation,
    logprobs,
    loss_of,
    random_model,
)
from small_runs import wait_until

from minigpt import GPT, save_checkpoint
from minigpt.checkpoints.find import BEST
from minigpt.extras.interpret.heads import attention_maps
from minigpt.extras.interpret.snapshots import snapshot_path
from minigpt.runs.run_dir import lock_run_dir, write_failure

TRAINED = "the trained model"


def slide(reader: Reader, *keys: str) -> None:
    wait_until(lambda: reader.find("#time").is_displayed())
    reader.find("#time [type=range]").send_keys(*keys)


def place(reader: Reader) -> str:
    """What the time machine says that it shows."""
    return reader.find("#time output").text


def wait_for_loss(reader: Reader, name: str, text: str = PROMPT, model: GPT | None = None) -> None:
    """Wait until the page shows one loss, that of the text for a model."""
    expected = {name: [loss_of(model or MODELS[name], text)]}
    wait_until(lambda: reader.losses() == expected)


def wait_for_continuation(
    reader: Reader, name: str, text: str = PROMPT, model: GPT | None = None
) -> None:
    """Wait until the second pane shows how a model continues a text."""
    expected = continuation(model or MODELS[name], text)
    wait_until(lambda: reader.token_text("#second") == expected)
    assert reader.find("#second-name").text == f"Continued by {name}"


# Record in `seen` what the output shows, which changes often.
RECORD = """
    globalThis.seen = [];
    const output = document.querySelector("#time output"), {setInterval} = window;
    window.setInterval = (function_, ms) => setInterval(function_, ms / 5);
    new MutationObserver(() => seen.push(output.value)).observe(output, {childList: true});
"""


@pytest.mark.parametrize(
    "reader", ["file", pytest.param("server", marks=pytest.mark.slow)], indirect=True
)
def test_the_slider_and_play_show_how_each_snapshot_reads_and_continues_the_text(
    reader: Reader,
) -> None:
    reader.write(PROMPT)
    assert place(reader) == TRAINED
    assert not reader.find("#time [type=checkbox]").is_displayed()  # nothing to follow
    reader.open("Attention")
    reader.choose_head("layer 2, head 1")
    ids = torch.as_tensor(CHARACTERS.encode(PROMPT))
    keys = (Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.END)
    for key, step in zip(keys, (*STEPS, None), strict=True):
        slide(reader, key)
        assert place(reader) == (TRAINED if step is None else f"step {step:,}")
        assert reader.find("#time [type=range]").get_attribute("aria-valuetext") == place(reader)
        name = "small" if step is None else f"small@{step}"
        wait_for_loss(reader, name)
        wait_for_continuation(reader, name)
        reader.hover(reader.tokens()[7])
        weights = attention_maps(MODELS[name], ids)[1, 0, 7].sort(descending=True).values[:6]
        expected = pytest.approx(weights[weights >= 0.0005].tolist(), abs=1e-3)
        wait_until(lambda: [float(row[0]) for row in reader.attended()] == expected)  # noqa: B023
        with torch.no_grad():
            logits = MODELS[name](ids[None, :7])[0, -1]
        rank = int((logits > logits[ids[7]]).sum()) + 1
        wait_until(lambda: f"rank {rank}, surprisal" in reader.find("#token").text)  # noqa: B023
    reader.open("Attention")  # closes it
    order = logprobs(MODELS["small"], PROMPT).argsort()

    def warmth() -> list[int]:
        """Of the tokens, the least likely first: red above blue in their backgrounds."""
        colors = reader.backgrounds()[1:]
        return [colors[i][0] - colors[i][2] for i in order]

    wait_until(lambda: is_falling(warmth()))
    reader.run(RECORD)
    play = reader.find("#time button")
    reader.run("arguments[0].click(); seen.push(arguments[0].getAttribute('aria-label'))", play)
    wait_until(lambda: play.accessible_name == "Play the training")
    passed = list(dict.fromkeys(reader.run("return seen")))
    assert passed == ["Pause", *(f"step {step:,}" for step in STEPS), TRAINED]
    wait_for_loss(reader, "small")
    wait_for_continuation(reader, "small")


def is_falling(values: list[int]) -> bool:
    return values == sorted(values, reverse=True)


def test_one_writes_and_undoes_at_a_step_as_elsewhere(in_file: Reader) -> None:
    reader = in_file
    name = "small@10"
    reader.write(PROMPT)
    slide(reader, Keys.HOME, Keys.ARROW_RIGHT)
    wait_for_continuation(reader, name)
    reader.generate()
    written = continuation(MODELS[name], PROMPT)
    assert reader.text == written
    reader.write("!")
    wait_for_loss(reader, name, f"{written}!")
    wait_for_continuation(reader, name, f"{written}!")
    reader.press(Keys.CONTROL, "z")
    assert reader.text == written
    wait_for_loss(reader, name, written)
    slide(reader, Keys.END)
    reader.find("#undo").click()  # back to a text that the model of a step has read
    assert reader.text == PROMPT
    wait_for_loss(reader, "small")
    wait_for_continuation(reader, "small")
    reader.find("#close").click()
    assert not reader.find("#second").is_displayed()


def curves(reader: Reader, label: str) -> SimpleNamespace:
    """The legend of a plot, the places of the points of each line, and that of its mark."""
    legend, lines, mark = reader.run(
        """
        const named = plot => plot.getAttribute("aria-label").startsWith(arguments[0]);
        const plot = [...document.querySelectorAll(".plot")].find(named);
        const numbers = point => point.split(",").map(Number);
        const places = line => line.getAttribute("points").split(" ").map(numbers);
        const legend = [...plot.previousSibling.children].map(name => name.textContent);
        return [legend, [...plot.querySelectorAll("polyline")].map(places),
            plot.querySelector(".mark")?.getAttribute("x1") ?? null];""",
        label,
    )
    return SimpleNamespace(legend=legend, lines=torch.tensor(lines), mark=mark and float(mark))


def test_the_curves_of_a_file_have_a_mark_at_the_step_and_name_the_chosen_head(
    in_file: Reader,
) -> None:
    reader = in_file
    reader.resize(390)
    reader.open("Training")
    wait_until(lambda: len(reader.find_all("#history svg")) == 4)
    assert reader.run("return document.documentElement.scrollWidth") <= 390
    assert curves(reader, "loss by kind of token").legend == list(LEARNED[0]["kinds"])
    plots = {"loss by kind of token": [[*snapshot["kinds"].values()] for snapshot in LEARNED]}
    heads = {"previous": "attention to the previous token", "induction": "induction score"}
    for name, label in heads.items():
        plots[label] = [[*chain(*snapshot[name])] for snapshot in LEARNED]
    for label, values in plots.items():
        heights = curves(reader, label).lines[..., 1].flatten()
        both = torch.stack([heights, torch.tensor(values).T.flatten()])
        assert torch.corrcoef(both)[0, 1] == pytest.approx(-1, abs=1e-4)
    assert reader.find_all(".mark") == []
    slide(reader, Keys.HOME, Keys.ARROW_RIGHT)
    wait_until(lambda: len(reader.find_all(".mark")) == 3)
    for label in plots:
        plot = curves(reader, label)
        assert plot.lines[:, 1, 0].tolist() == pytest.approx([plot.mark] * len(plot.lines))
    assert reader.find(".mark").value_of_css_property("stroke-dasharray") != "none"
    reader.open("Attention")
    reader.choose_head("layer 2, head 1")
    wait_until(lambda: curves(reader, "induction score").legend == ["layer 2, head 1"])


@pytest.mark.slow
@pytest.mark.ci
def test_the_page_follows_a_run_until_it_fails_also_past_an_outage_of_its_server(
    browser: Any, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "live", random_model(), CHARACTERS)
    models = {}
    (folder / BEST).unlink()  # before the first validation
    (folder / ".lock").touch()

    def add_snapshot(step: int) -> None:
        models[step] = random_model(step + 1)
        save_checkpoint(models[step], CHARACTERS, snapshot_path(folder, step))

    add_snapshot(0)
    add_snapshot(10)
    with ExitStack() as run:
        run.enter_context(lock_run_dir(folder, resume=True))
        with serving([folder]) as server:
            reader = Reader(browser, f"{server.url}/")
            reader.shorten()
            reader.write(PROMPT)
            wait_until(lambda: place(reader) == "the best model so far (running)")
            wait_for_loss(reader, "live", model=models[10])
            follow = reader.find("#time [type=checkbox]")
            follow.click()
            wait_until(lambda: place(reader) == "step 10 (running)")
            add_snapshot(20)
            wait_until(lambda: place(reader) == "step 20 (running)")
            wait_for_loss(reader, "live@20", model=models[20])
            wait_for_continuation(reader, "live@20", model=models[20])
            assert browser.get_log("browser") == []
        wait_until(lambda: place(reader) == "step 20 (the server does not answer)")
        add_snapshot(30)
        with serving([folder], port=server.port):
            wait_until(lambda: place(reader) == "step 30 (running)")
            wait_for_continuation(reader, "live@30", model=models[30])
            assert follow.is_selected()
            slide(reader, Keys.HOME)
            assert not follow.is_selected()
            write_failure(folder, "the disk is full")
            run.close()
            wait_until(lambda: place(reader) == "step 0 (failed: the disk is full)")
            assert not follow.is_displayed()
    lost = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET")
    errors = [entry["message"] for entry in browser.get_log("browser")]
    assert [error for error in errors if not re.search("|".join(lost), error)] == []


# Pauses are short; `waiting` holds those that have not ended, `places` what the output showed.
HURRIED = """
    const {setTimeout, clearTimeout} = window, output = document.querySelector("#time output");
    Object.assign(window, {waiting: new Set(), most: 0, places: []});
    window.setTimeout = (call, ms, ...given) => {
        if (!(ms >= 1000)) return setTimeout(call, ms, ...given);
        const id = setTimeout(() => { waiting.delete(id); call(); }, ms / 100);
        most = Math.max(most, waiting.add(id).size);
        return id;
    };
    window.clearTimeout = id => { waiting.delete(id); clearTimeout(id); };
    new MutationObserver(() => places.push(output.value)).observe(output, {childList: true});
"""
# Each answer is that to one poll; a request that hangs ends only if the page gives it up.
ANSWERS = """
    const [answers] = arguments, fetched = window.fetch;
    window.fetch = (url, options) => {
        if (!url.includes("history/")) return fetched(url, options);
        const answer = answers.shift();
        if (answer === "hang") return new Promise((_, reject) => {
            options.signal.addEventListener("abort", () => reject(options.signal.reason));
        });
        if (answer === "offline") return Promise.reject(new TypeError("Failed to fetch"));
        return Promise.resolve(new Response(...answer));
    };
    window.left = answers;
    places.length = 0;
"""


def answer(status: int, content: object) -> list[object]:
    return [json.dumps(content), {"status": status}]


def test_a_poll_that_fails_is_repeated_until_the_run_is_over_or_the_key_is_wrong(
    at_server: Reader,
) -> None:
    reader = at_server
    running = answer(200, {"steps": [0, 10], "status": "running"})
    stopped = answer(503, {"error": {"message": "the server was stopped"}})
    over = answer(200, {"steps": [0, 10, 20], "status": "completed"})
    no_key = answer(401, {"error": {"message": "no key"}})
    page = ["<html>", {"status": 502}]
    failed = ["offline", running, "hang", "offline", page, stopped, running]
    lost = "the server does not answer"
    best = "the best model so far"
    statuses = ["running", lost, "the server answers with status 502", "the server was stopped"]
    first = [f"{TRAINED} ({lost})", *(f"{best} ({status})" for status in (*statuses, "running"))]
    reader.run(HURRIED)
    reader.run("window.asked = 0; window.prompt = () => { asked += 1; return null; };")
    ended = "return places.at(-1) === arguments[0] && !left.length && !waiting.size"
    for model, last, shown, asked in (
        ("other", over, TRAINED, 0),
        ("shifted", no_key, f"{TRAINED} (no key)", 1),
    ):
        reader.run(ANSWERS, [*failed, last])
        reader.choose("#model", model)
        wait_until(lambda: reader.run(ended, shown))  # noqa: B023
        expected = [*first, shown]
        assert [text for text, _ in groupby(reader.run("return places"))] == expected
        assert reader.run("return most") == 1  # a pause, or the time limit of a poll
        assert reader.run("return asked") == asked
    reader.browser.get_log("browser")
