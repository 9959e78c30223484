"""The attention panel of a page with a model in headless Chromium, by mouse and keyboard."""

from itertools import pairwise

import pytest
import torch
from readers import Keys, Reader
from sites import CHARACTERS, MODELS
from small_runs import wait_until
from torch import Tensor

from minigpt.extras.interpret.heads import attention_maps

PROMPT = "To be, or not"
# Stops of the colors of attention weights
DARK = ["191b20", "412f88", "6e4ecb", "a78dff", "efe9ff"]
# Record the requests for weights in `calls`. The first of `delays` is how many ms the next takes.
RECORD = """
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


@pytest.fixture
def panel(in_file: Reader) -> Reader:
    """The page with a text and its attention."""
    reader = in_file
    reader.resize(1280)
    reader.run(RECORD)
    reader.write(PROMPT)
    reader.open("Attention")
    reader.wait_for_weights()
    wait_until(lambda: reader.run("return calls.length") == 1)
    return reader


def maps(text: str = PROMPT) -> Tensor:
    return attention_maps(MODELS["small"], CHARACTERS.encode(text))


def requests(reader: Reader) -> list[tuple[str, int, int | None]]:
    """The text, layer and head of each request for weights."""
    calls = reader.run("return calls.map(call => [call.ids, call.layer, call.head])")
    return [(CHARACTERS.decode(ids), layer, head) for ids, layer, head in calls]


def highest(weights: Tensor) -> list[str]:
    """The weights of a token that its list has."""
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
        checked = panel.find_all(".heads [aria-checked='true']")
        assert [button.accessible_name for button in checked] == [name]
    assert len(panel.find_all(".heads [tabindex='0']")) == 1
    panel.wait_for_weights()
    assert requests(panel)[-1] == (PROMPT, 0, 1)

    # The tokens with the highest weights are listed and shaded
    weights = maps()
    heads = {"layer 2, head 1": weights[1, 0], "layer 1, mean": weights[0].mean(0)}
    for name, of_head in heads.items():
        panel.choose_head(name)
        panel.hover(panel.tokens()[10])
        rows = panel.attended()
        top = of_head[10].topk(len(rows)).indices.tolist()
        assert [row[0] for row in rows] == highest(of_head[10])
        assert [row[2] for row in rows] == [PROMPT[i].replace(" ", "␣") for i in top]
        distances = [f"{10 - i} back" for i in top]
        assert [row[3].replace("itself", "0 back") for row in rows] == distances
        assert panel.find(".list caption").text == f"n attends to ({name})"
    wait_until(lambda: len(panel.backgrounds()[10]) == 3)
    shades = [sum(color) for color in panel.backgrounds()[:11]]
    ordered = [shades[i] for i in of_head[10].argsort()[-11:]]
    assert all(after - before <= 6 for before, after in pairwise(ordered))
    assert all(len(color) == 4 for color in panel.backgrounds()[11:])  # transparent
    known = (requests(panel), panel.run("return drawn"))
    for i in (11, 0, 4):
        panel.hover(panel.tokens()[i])
        marker = panel.find(".marker").rect
        canvas = panel.find("canvas").rect
        assert marker["y"] - canvas["y"] == pytest.approx(canvas["height"] * i / 13, abs=1)
        assert marker["width"] == pytest.approx(canvas["width"] * (i + 1) / 13, abs=1)
    assert (requests(panel), panel.run("return drawn")) == known
    contexts = {row[3]: row[1] for row in panel.attended()}
    # Ten characters before the token, nine after it
    assert contexts["itself"] == "      To be, or not"


def test_the_map_has_the_colors_of_the_weights_and_names_them(panel: Reader) -> None:
    weights = maps()[0, 1]
    T = len(PROMPT)
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
    label = "Map of the attention weights of layer 1, head 2, 13 queries by 13 keys"
    assert canvas.get_attribute("aria-label") == label
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
    panel.run("delays.push(600, 0)")
    panel.find(".heads [aria-label='layer 1, head 1']").click()
    wait_until(lambda: panel.run("return calls.length") == 2)
    panel.choose_head("layer 2, head 2")
    panel.hover(panel.tokens()[9])
    wait_until(lambda: panel.run("return calls[1].aborted"))  # when its time is over
    assert [row[0] for row in panel.attended()] == highest(weights[9])
    panel.run("globalThis.failure = 'lost'")
    panel.choose_head("layer 1, head 1")
    wait_until(lambda: panel.find("#attention .error").text == "lost")
    panel.hover(panel.tokens()[3])
    assert panel.attended() == []
    assert not panel.find("canvas").is_displayed()
    panel.run("failure = ''")
    panel.choose_head("layer 1, head 1")
    panel.hover(panel.tokens()[4])
    assert panel.attended() != []
    assert panel.find("#attention .error").text == ""
