// How much of a text is copied: the share of n-grams that the training text lacks, and underlined spans that it has.

import {make, percent} from "./dom.js";

export class OriginalityPanel {
  #visible = false; #asked = []; #text = ""; #spans = []; #request = new AbortController();

  // pane: the text whose spans are underlined.
  constructor(root, backend, pane) {
    Object.assign(this, {backend, pane});
    this.table = make("div");
    this.context = make("p", {class: "context"});
    this.error = make("p", {class: "error", role: "alert"});
    root.append(this.error, this.table, this.context);
  }

  set visible(visible) {
    this.#visible = visible;
    if (visible) this.#compare();
    else {
      this.#request.abort();
      this.#show([]);
    }
  }

  // Compare another text with the training text of a run, or the same with another.
  update(run, text) {
    this.#asked = [run, text];
    if (this.#visible) this.#compare();
  }

  // Show where the span with a token stands in the training text.
  select(index) {
    if (!this.#visible) return;
    const end = this.pane.ends[index], span = this.#spans.find(({start, end: last}) => start < end && end <= last);
    const hint = this.#spans.length ? "Point at an underlined span to see where it stands in the training text." : "";
    this.context.replaceChildren(...span
      ? [make("span", {class: "soft"}, `… ${span.before}`), make("u", {}, this.#text.slice(span.start, span.end)),
        make("span", {class: "soft"}, `${span.after} …`)]
      : [hint]);
  }

  async #compare() {
    const [run, text] = this.#asked;
    this.#request.abort();
    const {signal} = this.#request = new AbortController();
    if (!text) return this.#show([]);
    try {
      const {text: found, validation} = await this.backend.originality(run, text, signal);
      const offsets = [0];  // of characters, in UTF-16
      for (const character of text) offsets.push(offsets.at(-1) + character.length);
      this.#text = text;
      this.#show(found.spans.map(span => ({...span, start: offsets[span.start], end: offsets[span.end]})));
      this.table.replaceChildren(figures(found, validation));
      this.error.textContent = found.whole ? "" : "Only the first 100 MB of the training text were searched.";
    } catch ({message}) {
      if (!signal.aborted) this.#show([], message);
    }
  }

  #show(spans, error = "") {
    this.#spans = spans;
    this.pane.underline(spans);
    this.table.replaceChildren();
    this.error.textContent = error;
    this.select(this.pane.selected);
  }
}

function figures(found, validation) {
  const line = (tag, cells) => make("tr", {}, ...cells.map(cell => make(tag, {}, cell)));
  const share = value => value === null ? "–" : percent(value);
  const rows = Object.keys(found.new).map(n => [`new ${n}-grams`, share(found.new[n]), share(validation.new[n])]);
  rows.push(["longest copy", String(found.longest), String(validation.longest)]);
  return make("table", {}, make("caption", {}, "N-grams and copies are of characters."),
    make("thead", {}, line("th", ["", "this text", "validation text"])),
    make("tbody", {}, ...rows.map(row => line("td", row))));
}
