// The attention of a head: the map of its weights, and the tokens that the selected token attends to most.

import {color, paint, scheme} from "./colors.js";
import {make, visible} from "./dom.js";
import {HeadPicker, headName} from "./heads.js";
import {WeightMap} from "./map.js";

const DELAY_MS = 250;  // from a change of the text to the fetch: a text that is being generated fetches nothing
const LISTED = 6, MIN_LISTED = 0.0005;  // the number of tokens in the list, and the lowest weight
const BEFORE = 10, AFTER = 9;  // characters of context in the list

export class AttentionPanel {
  #model = null; #visible = false; #tokens = []; #selected = null;
  #fetched = null;  // {key, start, length, head, weights} of a window of the text, or null
  #key = ""; #ids = ""; #fetching = new AbortController();  // those of the last request
  #shaded = false;

  constructor(root, backend, {onShade, onChoose}) {
    Object.assign(this, {backend, onShade});
    this.picker = new HeadPicker(root, () => {
      this.#forget();
      this.#refresh();
      onChoose();
    });
    this.map = new WeightMap((query, key) => this.#nameCell(query, key));
    this.list = make("div", {class: "list"});
    this.error = make("p", {class: "error", role: "alert"});
    this.body = make("div", {class: "weights"}, this.map.element, this.list);
    root.classList.add("attention");
    root.append(this.error, this.body);
    this.map.element.hidden = true;
    scheme.addEventListener("change", () => { this.#drawMap(); this.#draw(); });
  }

  get head() { return this.picker.chosen; }

  setModel(description) {
    [this.#model, this.#fetched, this.#tokens, this.#selected] = [description, null, [], null];
    this.#forget();
    this.picker.setModel(description);
    this.#refresh();
  }

  // Use another model of the same shape.
  rename(name) {
    if (this.#model) this.#model = {...this.#model, name};
  }

  // A hidden panel fetches and shades nothing.
  set visible(visible) {
    this.#visible = visible;
    if (!visible) this.#forget();
    this.#refresh();
  }

  update(tokens, selected) {
    [this.#tokens, this.#selected] = [tokens, selected];
    this.#refresh();
  }

  set #busy(busy) { this.body.setAttribute("aria-busy", busy); }

  #refresh() {
    if (this.#visible && this.#model) this.#request();
    this.#draw();
  }

  // Forget a request that runs or has failed, so that the next one repeats it.
  #forget() {
    if (this.#key === this.#fetched?.key) return;
    this.#fetching.abort();
    this.#key = "";
    this.#busy = false;
  }

  // Fetch the weights, unless the last request was for the same.
  #request() {
    const start = this.#start(), ids = this.#tokens.slice(start, start + this.#model.block_size).map(token => token.id);
    const text = `${start} ${ids}`, key = JSON.stringify([this.#model.name, text, this.head]);
    if (key === this.#key) return;
    this.#fetching.abort();
    this.#fetching = new AbortController();
    this.error.textContent = "";
    if (text !== this.#ids) this.#fetched = null;
    const delay = this.#ids && text !== this.#ids ? DELAY_MS : 0, isNew = ids.length > 0 && key !== this.#fetched?.key;
    [this.#key, this.#ids, this.#busy] = [key, text, isNew];
    if (isNew) this.#fetch(key, start, ids, this.head, delay, this.#fetching.signal);
  }

  // Return the start of the window that the model reads: that of the last window, or for a token before it, one with at
  // least half a block before that token, if the text is long enough.
  #start() {
    const {block_size} = this.#model, half = Math.ceil(block_size / 2);
    const last = Math.max(0, this.#tokens.length - block_size);
    if (this.#selected === null || this.#selected >= last) return last;
    return Math.max(0, Math.floor(this.#selected / half) - 1) * half;
  }

  async #fetch(key, start, ids, head, delay, signal) {
    let fetched = null, error = "";
    try {
      await new Promise(resolve => setTimeout(resolve, delay));
      if (signal.aborted) return;
      const weights = await this.backend.attention(this.#model.name, ids, ...head, signal);
      fetched = {key, start, length: ids.length, head, weights};
    } catch ({message}) {
      error = message;
    }
    if (signal.aborted) return;
    [this.#fetched, this.error.textContent, this.#busy] = [fetched, error, false];
    this.#drawMap();
    this.#draw();
  }

  #drawMap() {
    if (this.#fetched) this.map.draw(this.#fetched.weights, this.#fetched.length, headName(this.#fetched.head));
  }

  // Show everything but the map, which takes longer: this is called whenever another token is selected.
  #draw() {
    const query = this.#query(), shown = query !== null, weights = shown ? this.#weights(query) : null;
    this.map.element.hidden = !this.#tokens.length || this.error.textContent !== "";
    this.map.mark(query);
    const hint = this.#selected === null ? "Select a token of the text to see what it attends to." : "";
    this.list.replaceChildren(shown ? attendedTokens(this.#tokens, weights, this.#fetched.head) : hint);
    if (shown || this.#shaded) this.onShade(weights);
    this.#shaded = shown;
  }

  // Return the row of the selected token in the map, or null.
  #query() {
    return this.#visible && this.#fetched && this.#selected !== null ? this.#selected - this.#fetched.start : null;
  }

  // Return the weights of the selected token for each token up to it.
  #weights(query) {
    const {length, weights} = this.#fetched, row = new Float32Array(this.#selected + 1);
    row.set(weights.subarray(query * length, query * length + query + 1), this.#selected - query);
    return row;
  }

  #nameCell(query, key) {
    if (!this.#fetched) return "";
    const {start, length, weights} = this.#fetched;
    const [from, to] = [query, key].map(i => `${visible(this.#tokens[start + i].text)} (${start + i + 1})`);
    return `${from} → ${to}: ${weights[query * length + key].toFixed(3)}`;
  }
}

// A table of the tokens with the highest weights, each with its context.
function attendedTokens(tokens, weights, head) {
  const selected = weights.length - 1, highest = [...weights.keys()].filter(i => weights[i] >= MIN_LISTED)
    .sort((a, b) => weights[b] - weights[a] || b - a).slice(0, LISTED);
  const inLine = (start, end) =>
    [...tokens.slice(Math.max(0, start), end).map(token => token.text).join("").replace(/[\n\t]/g, visible)];
  const rows = highest.map(i => {
    const before = inLine(i - BEFORE, i).slice(-BEFORE).join("").padStart(BEFORE);  // so that the tokens are aligned
    const after = inLine(i + 1, i + 1 + AFTER).slice(0, AFTER).join("");
    const token = make("b", {}, visible(tokens[i].text)), distance = i === selected ? "itself" : `${selected - i} back`;
    paint(token, color("attention", Math.sqrt(weights[i])));
    return [weights[i].toFixed(3), make("code", {}, before, token, after), distance];
  });
  const line = (tag, cells) => make("tr", {}, ...cells.map(cell => make(tag, {}, cell)));
  return make("table", {},
    make("caption", {}, make("code", {}, visible(tokens[selected].text)), ` attends to (${headName(head)})`),
    make("thead", {}, line("th", ["weight", "token", "distance"])),
    make("tbody", {}, ...rows.map(row => line("td", row))));
}
