"""The panels of the page in headless Chromium: attention, originality, and a run over its steps."""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain, groupby, pairwise
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
from torch import Tensor

from minigpt import GPT, save_checkpoint
from minigpt.checkpoints.find import BEST
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.extras.interpret.heads import attention_maps
from minigpt.extras.interpret.originality import build_index, originality
from minigpt.extras.interpret.snapshots import snapshot_path
from minigpt.runs.run_dir import lock_run_dir, write_failure

TEXT = "To be, or not"
TRAINED = "the trained model"
# Stops of the colors of attention weights
DARK = ["191b20", "412f88", "6e4ecb", "a78dff", "efe9ff"]
# Record the requests for weights in `calls`, and count in `drawn` how often the map is drawn.
# The first of `delays` is how many ms the next request takes; with `failure`, it fails.
RECORD_WEIGHTS = """
const attention = backend.attention;
[globalThis.calls, globalThis.delays, globalThis.drawn] = [[], [], 0];
backend.attention = async function(model, ids, layer, head, signal) {
  const call = {ids, layer, head, aborted: false};
  calls.push(call);
  await new Promise(resolve => setTimeout(resolve, delays.shift() ?? 0));
  call.aborted = signal.aborted;
  if (globalThis.failure) throw new Error(failure);
  return attention.call(this, model, ids, layer, head, signal);
};
const {putImageData} = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.putImageData = function(...image) {
  drawn++;
  putImageData.apply(this, image);
};
"""


# The page with a text and its attention
@pytest.fixture
def panel(in_file: Reader) -> Reader:
    reader = in_file
    reader.resize(1280)
    reader.run(RECORD_WEIGHTS)
    reader.write(TEXT)
    reader.open("Attention")
    reader.wait_for_weights()
    wait_until(lambda: reader.run("return calls.length") == 1)
    return reader


def maps(text: str = TEXT) -> Tensor:
    return attention_maps(MODELS["small"], CHARACTERS.encode(text))


# The weights of a token that its list has
def highest(weights: Tensor) -> list[str]:
    top = weights.sort(descending=True).values[:6].tolist()
    return [f"{weight:.3f}" for weight in top if weight >= 0.0005]


def test_heads_are_picked_by_arrow_keys_and_their_weights_are_listed_and_shaded(
    panel: Reader,
) -> None:
    # Heads are one tab stop
    panel.press(Keys.TAB)
    for key, name in (
        (Keys.ARROW_RIGHT, "layer 1, head 1"),
        (Keys.ARROW_RIGHT, "layer 1, head 2"),
        (Keys.ARROW_RIGHT, "layer 2, mean"),
        (Keys.ARROW_UP, "layer 1, mean"),
        (Keys.ARROW_LEFT, "layer 2, head 2"),
        (Keys.ARROW_DOWN, "layer 1, head 2"),
    ):
        panel.press(key)
        assert panel.browser.switch_to.active_element.accessible_name == name
        (checked,) = panel.find_all(".heads [aria-checked='true']")
        assert checked.accessible_name == name
    assert len(panel.find_all(".heads [tabindex='0']")) == 1
    panel.wait_for_weights()
    asked = {"ids": CHARACTERS.encode(TEXT).tolist(), "layer": 0, "head": 1, "aborted": False}
    assert panel.run("return calls.at(-1)") == asked

    # The tokens with the highest weights are listed and shaded
    weights = maps()
    heads = {"layer 2, head 1": weights[1, 0], "layer 1, mean": weights[0].mean(0)}
    for name, of_head in heads.items():
        panel.choose_head(name)
        panel.hover(panel.tokens()[10])
        rows = panel.attended()
        top = of_head[10].topk(len(rows)).indices.tolist()
        assert [row[0] for row in rows] == highest(of_head[10])
        assert [row[2] for row in rows] == [TEXT[i].replace(" ", "␣") for i in top]
        distances = [f"{10 - i} back" for i in top]
        assert [row[3].replace("itself", "0 back") for row in rows] == distances
        assert panel.find(".list caption").text == f"n attends to ({name})"
    wait_until(lambda: len(panel.backgrounds()[10]) == 3)
    shades = [sum(color) for color in panel.backgrounds()[:11]]
    ordered = [shades[i] for i in of_head[10].argsort()[-11:]]
    assert all(after - before <= 6 for before, after in pairwise(ordered))
    assert all(len(color) == 4 for color in panel.backgrounds()[11:])  # transparent
    known = panel.run("return drawn")
    for i in (11, 0, 4):
        panel.hover(panel.tokens()[i])
        marker = panel.find(".marker").rect
        canvas = panel.find("canvas").rect
        assert marker["y"] - canvas["y"] == pytest.approx(canvas["height"] * i / 13, abs=1)
        assert marker["width"] == pytest.approx(canvas["width"] * (i + 1) / 13, abs=1)
    assert panel.run("return drawn") == known
    contexts = {row[3]: row[1] for row in panel.attended()}
    # Ten characters before the token, nine after it
    assert contexts["itself"] == "      To be, or not"


def test_the_map_has_the_colors_of_the_weights_and_names_them(panel: Reader) -> None:
    weights = maps()[0, 1]
    T = len(TEXT)
    panel.choose_head("layer 1, head 2")
    read = (
        f"const copy = new OffscreenCanvas({T}, {T}).getContext('2d');"
        "copy.drawImage(document.querySelector('canvas'), 0, 0);"
        f"return [...copy.getImageData(0, 0, {T}, {T}).data]"
    )
    stops = torch.tensor([list(bytes.fromhex(color)) for color in DARK]).float()
    panel.prefer("dark")
    wait_until(lambda: panel.run(read)[:3] == stops[-1].tolist())  # attends to itself
    pixels = torch.tensor(panel.run(read)).view(T, T, 4)
    place = weights.sqrt() * (len(stops) - 1)
    low = place.long().clamp(max=len(stops) - 2)
    expected = stops[low].lerp(stops[low + 1], (place - low)[..., None])  # (T, T, 3)
    causal = torch.ones(T, T).tril().bool()
    assert (pixels[..., :3] - expected)[causal].abs().max() <= 2  # 256 colors, rounded
    assert torch.equal(pixels[..., 3] == 255, causal)  # nothing is drawn for later tokens
    canvas = panel.find("canvas")
    assert "layer 1, head 2, 13 queries by 13 keys" in canvas.get_attribute("aria-label")
    cell = canvas.size["width"] / T
    panel.hover(canvas, round(-4 * cell), round(cell))  # of the center: query 7, key 2
    caption, weight = panel.find("figcaption").text.split(": ")
    assert caption == "o (8) → ␣ (3)"
    assert float(weight) == pytest.approx(weights[7, 2].item(), abs=1.1e-3)
    panel.hover(canvas, round(4 * cell), round(-4 * cell))  # a key after the query
    assert panel.find("figcaption").text == "Each row is a query, each column a key."


@pytest.mark.slow
def test_an_outdated_request_is_ignored_and_a_failed_one_is_repeated_when_the_head_is_picked_again(
    panel: Reader,
) -> None:
    weights = maps()[1, 1]
    # An outdated request
    panel.run("delays.push(600, 0)")
    panel.find(".heads [aria-label='layer 1, head 1']").click()
    wait_until(lambda: panel.run("return calls.length") == 2)
    panel.choose_head("layer 2, head 2")
    panel.hover(panel.tokens()[9])
    wait_until(lambda: panel.run("return calls[1].aborted"))  # when its time is over
    assert [row[0] for row in panel.attended()] == highest(weights[9])
    # A failed one
    panel.run("globalThis.failure = 'lost'")
    panel.choose_head("layer 1, head 1")
    wait_until(lambda: panel.find("#attention .error").text == "lost")
    panel.hover(panel.tokens()[3])
    assert panel.attended() == []
    assert not panel.find("canvas").is_displayed()
    # The same head again
    panel.run("failure = ''")
    panel.choose_head("layer 1, head 1")
    panel.hover(panel.tokens()[4])
    assert panel.attended() != []
    assert panel.find("#attention .error").text == ""


@pytest.mark.slow
def test_the_copied_part_is_underlined_and_counted_while_the_panel_is_open(
    browser: Any, train: Callable[..., SimpleNamespace]
) -> None:
    run = train("max_steps=5").folder
    index = build_index(find_corpus(run / BEST))
    with serving([run]) as server:
        reader = Reader(browser, f"{server.url}/")
        reader.write(f"zoo {index.text.decode()[1000:1060]} zoo")
        reader.open("Originality")
        found = originality(index, reader.text)
        (span,) = found["spans"]
        copied = reader.text[span["start"] : span["end"]]
        wait_until(lambda: "".join(reader.texts("#first .copied")) == copied)
        shown = reader.texts("#originality tbody td:nth-child(2)")
        assert shown[-1] == str(found["longest"])
        reader.hover(reader.tokens()[span["start"] + 10])
        # Where it stands in the training text
        before, part, after = reader.texts("#originality .context > *")
        assert part == copied
        assert before.removeprefix("… ") + part + after.removesuffix(" …") in index.text.decode()
        reader.open("Originality")
        wait_until(lambda: reader.texts("#first .copied") == [])


def slide(reader: Reader, *keys: str) -> None:
    wait_until(lambda: reader.find("#time").is_displayed())
    reader.find("#time [type=range]").send_keys(*keys)


# What the time machine says that it shows
def place(reader: Reader) -> str:
    return reader.find("#time output").text


# Wait until the page shows one loss, that of the text for a model
def wait_for_loss(reader: Reader, name: str, text: str = PROMPT, model: GPT | None = None) -> None:
    expected = {name: [loss_of(model or MODELS[name], text)]}
    wait_until(lambda: reader.losses() == expected)


# Wait until the second pane shows how a model continues a text
def wait_for_continuation(
    reader: Reader, name: str, text: str = PROMPT, model: GPT | None = None
) -> None:
    expected = continuation(model or MODELS[name], text)
    wait_until(lambda: reader.token_text("#second") == expected)
    assert reader.find("#second-name").text == f"Continued by {name}"


# Record in `seen` what the output shows, which changes often.
RECORD_STEPS = """
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
    reader.open("Attention")  # closes it
    order = logprobs(MODELS["small"], PROMPT).argsort()

    def is_warm_where_unlikely() -> bool:
        colors = reader.backgrounds()[1:]
        warmth = [colors[i][0] - colors[i][2] for i in order]  # red above blue
        return warmth == sorted(warmth, reverse=True)

    wait_until(is_warm_where_unlikely)
    reader.run(RECORD_STEPS)
    play = reader.find("#time button")
    reader.run("arguments[0].click(); seen.push(arguments[0].getAttribute('aria-label'))", play)
    wait_until(lambda: play.accessible_name == "Play the training")
    passed = list(dict.fromkeys(reader.run("return seen")))
    assert passed == ["Pause", *(f"step {step:,}" for step in STEPS), TRAINED]
    wait_for_continuation(reader, "small")


def test_one_writes_and_undoes_at_a_step_as_elsewhere(in_file: Reader) -> None:
    reader = in_file
    name = "small@10"
    reader.write(PROMPT)
    slide(reader, Keys.HOME, Keys.ARROW_RIGHT)
    wait_for_continuation(reader, name)
    reader.generate()
    written = continuation(MODELS[name], PROMPT)
    assert reader.text == written
    wait_for_loss(reader, name, written)
    slide(reader, Keys.END)
    reader.find("#undo").click()  # back to a text that the model of a step has read
    wait_for_continuation(reader, "small")
    reader.find("#close").click()
    assert not reader.find("#second").is_displayed()


# The legend of a plot, the places of the points of each line, and that of its mark
def curves(reader: Reader, label: str) -> SimpleNamespace:
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
    models = {step: random_model(step + 1) for step in (0, 10, 20, 30)}
    (folder / BEST).unlink()  # before the first validation
    (folder / ".lock").touch()

    def add_snapshot(step: int) -> None:
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
    for entry in browser.get_log("browser"):
        assert re.search("|".join(lost), entry["message"])


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
    over = answer(200, {"steps": [0, 10, 20], "status": "completed"})
    stopped = answer(503, {"error": {"message": "the server was stopped"}})
    no_key = answer(401, {"error": {"message": "no key"}})
    failed = ["offline", running, "hang", "offline", ["<html>", {"status": 502}], stopped, running]
    lost = "the server does not answer"
    statuses = ["running", lost, "the server answers with status 502", "the server was stopped"]
    shown = [f"the best model so far ({status})" for status in (*statuses, "running")]
    reader.run(HURRIED)
    reader.run("window.asked = 0; window.prompt = () => { asked += 1; return null; };")
    ended = "return places.at(-1) === arguments[0] && !left.length && !waiting.size"
    for model, answers, expected, asked in (
        ("other", [*failed, over], [f"{TRAINED} ({lost})", *shown, TRAINED], 0),
        ("shifted", [running, no_key], [shown[0], f"{TRAINED} (no key)"], 1),
    ):
        reader.run(ANSWERS, answers)
        reader.choose("#model", model)
        wait_until(lambda: reader.run(ended, expected[-1]))  # noqa: B023
        assert [text for text, _ in groupby(reader.run("return places"))] == expected
        assert reader.run("return most") == 1  # a pause, or the time limit of a poll
        assert reader.run("return asked") == asked
    reader.browser.get_log("browser")
