"""Pages with only the panels, whose data comes from a model in PyTorch."""

import json
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from silence import silence

from minigpt.interpret.heads import attention_maps
from minigpt.model import GPT

MODULES = ("dom", "colors", "heads", "map", "attention", "history")
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src-elem 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>panels</title>
<style>STYLE
  #columns { display: flex; flex-wrap: wrap; gap: 1rem; align-items: start; }
  #columns > * { flex: 1 1 20rem; min-width: 0; max-width: 100%; }
  section { padding: 1rem; border: 1px solid var(--line); border-radius: .75rem; background: var(--card); }
  #panel { flex: 0 1 24rem !important; }
  #text { font: 1rem/1.8 var(--mono); white-space: break-spaces; overflow-wrap: anywhere; }
</style>
<div id="columns"><div><section id="text"></section><br><section id="history"></section></div>
<section id="panel"></section></div>
<script type="application/json" id="data">DATA</script>
<script>
SCRIPT
const data = JSON.parse(find("data").textContent), calls = [], delays = [], shades = [], silencings = [];
const backend = {
  async attention(model, ids, layer, head, silenced, signal) {
    const call = {ids, layer, head, silenced};
    calls.push(call);
    await new Promise(resolve => setTimeout(resolve, delays.shift() ?? 0));
    call.aborted = signal.aborted;
    const weights = data.weights[JSON.stringify([ids, layer, head, silenced])];
    if (!weights) throw new Error("the weights are not in the data");
    return Float32Array.from(weights.flat());
  },
  async history(model) { return data.histories[model]; },
};
if (!data.saved) backend.generate = async function* () {};
let tokens = [], spans = [], selected = null;
function shade(weights) {
  shades.push(weights && [...weights]);
  spans.forEach((span, i) => paint(span, i < weights?.length ? color("attention", Math.sqrt(weights[i])) : null));
}
const panel = new AttentionPanel(find("panel"), backend,
  {onShade: shade, onSilence: () => silencings.push(panel.silenced)});
function select(i) {
  selected = i;
  panel.update(tokens, i);
}
function write(ids) {
  tokens = ids.map(id => ({id, text: data.texts[id]}));
  spans = tokens.map((token, i) => {
    const span = make("span", {}, token.text);
    span.addEventListener("pointerenter", () => select(i));
    return span;
  });
  find("text").replaceChildren(...spans);
  select(null);
}
panel.setModel(data.model);
panel.visible = true;
</script>
</html>
"""


def all_weights(model: GPT, ids: Sequence[int], silenced: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
    """The attention weights of every head, by the arguments of the data source."""
    with silence(model, silenced):
        weights = attention_maps(model, torch.tensor(ids))
    found = {}
    for layer in range(model.config.n_layer):
        for head in [None, *range(model.config.n_head)]:
            key = json.dumps([list(ids), layer, head, [list(pair) for pair in silenced]], separators=(",", ":"))
            found[key] = (weights[layer].mean(0) if head is None else weights[layer, head]).tolist()
    return found


def write_page(
    path: Path,
    model: GPT,
    texts: Sequence[str],
    weights: Iterable[dict[str, Any]],
    *,
    histories: dict[str, Any] | None = None,
    saved: bool = False,
) -> Path:
    """Write a page whose tokens have the given texts."""
    names = ("n_layer", "n_head", "block_size")
    data = {
        "model": {"name": "tiny"} | {name: getattr(model.config, name) for name in names},
        "texts": texts,
        "weights": {key: rows for part in weights for key, rows in part.items()},
        "histories": histories or {},
        "saved": saved,
    }
    folder = resources.files("minigpt.page")
    modules = [folder.joinpath(f"{name}.js").read_text("utf-8") for name in MODULES]
    script = re.sub(r"(?m)^import .*\n|^export ", "", "".join(modules))
    style = folder.joinpath("style.css").read_text("utf-8")
    text = json.dumps(data).replace("<", "\\u003c")
    parts = {"STYLE": style, "SCRIPT": script, "DATA": text}
    path.write_text(re.sub("STYLE|SCRIPT|DATA", lambda match: parts[match[0]], PAGE), encoding="utf-8")
    return path
