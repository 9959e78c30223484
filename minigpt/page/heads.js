// A picker of an attention head, with the heads that are silenced.
// Layers and heads count from 0 in the code and from 1 for readers; head null is the mean of the heads of a layer.

import {make} from "./dom.js";

export const headName = ([layer, head]) => `layer ${layer + 1}, ${head === null ? "mean" : `head ${head + 1}`}`;
const same = a => b => a[0] === b[0] && a[1] === b[1];

export class HeadPicker {
  chosen = [0, null];
  silenced = [];
  #heads = []; #buttons = []; #columns = 1;

  // canSilence: whether the model can be run again with some heads silenced.
  constructor(root, canSilence, {onChoose, onSilence}) {
    Object.assign(this, {onChoose, onSilence});
    this.grid = make("div", {class: "heads", role: "radiogroup", "aria-label": "Attention head"});
    this.silence = make("button", {type: "button"});
    this.restore = make("button", {type: "button"}, "Restore all");
    root.append(this.grid);
    if (canSilence) root.append(make("div", {class: "actions"}, this.silence, this.restore));

    this.grid.addEventListener("keydown", event => this.#move(event));
    this.silence.addEventListener("click", () => this.#setSilenced(this.silenced.some(same(this.chosen))
      ? this.silenced.filter(head => !same(head)(this.chosen)) : [...this.silenced, this.chosen]));
    this.restore.addEventListener("click", () => {
      this.#setSilenced([]);
      (this.silence.disabled ? this.#buttons[this.#at] : this.silence).focus();  // the focused button is hidden
    });
    this.setModel(null);
  }

  setModel(description) {
    const {n_layer, n_head} = description ?? {n_layer: 0, n_head: 0};
    const columns = [null, ...Array(n_head).keys()], layers = [...Array(n_layer).keys()];
    this.#heads = layers.flatMap(layer => columns.map(head => [layer, head]));
    this.#buttons = this.#heads.map(([, head], i) => {
      const button = make("button", {type: "button", role: "radio"}, head === null ? "mean" : String(head + 1));
      button.addEventListener("click", () => this.#choose(i));
      return button;
    });
    this.#columns = columns.length;
    const rows = layers.flatMap(layer => [make("span", {"aria-hidden": true}, String(layer + 1)),
      ...this.#buttons.slice(layer * columns.length, (layer + 1) * columns.length)]);
    const titles = ["Layer", "Head"].map(title => make("span", {"aria-hidden": true}, title));
    this.grid.replaceChildren(...titles, ...rows);
    this.grid.style.setProperty("--heads", n_head);
    this.grid.hidden = !n_layer;
    [this.chosen, this.silenced] = [[0, null], []];
    this.#draw();
  }

  get #at() { return this.#heads.findIndex(same(this.chosen)); }

  #choose(i) {
    this.chosen = this.#heads[i];
    this.#draw();
    this.onChoose();
  }

  #setSilenced(heads) {
    this.silenced = heads;
    this.#draw();
    this.onSilence();
  }

  #move(event) {
    const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns, ArrowDown: this.#columns}[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const count = this.#heads.length, i = (this.#at + step + count) % count;
    this.#buttons[i].focus();
    this.#choose(i);
  }

  #draw() {
    this.#heads.forEach((head, i) => {
      const chosen = same(head)(this.chosen), silenced = this.silenced.some(same(head)), button = this.#buttons[i];
      button.setAttribute("aria-checked", chosen);
      button.setAttribute("aria-label", headName(head) + (silenced ? ", silenced" : ""));
      button.tabIndex = chosen ? 0 : -1;
      button.classList.toggle("silenced", silenced);
    });
    const silenced = this.silenced.some(same(this.chosen)), mean = this.chosen[1] === null;
    this.silence.disabled = mean;
    this.silence.textContent = mean ? "Silence a head" : `${silenced ? "Restore" : "Silence"} ${headName(this.chosen)}`;
    this.restore.hidden = !this.silenced.length;
  }
}
