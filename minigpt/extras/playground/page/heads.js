// The control that picks an attention head.
// Layers and heads count from 0 in the code and from 1 for readers; head null is the mean of the heads of a layer.

import {make} from "./dom.js";

export const headName = ([layer, head]) => `layer ${layer + 1}, ${head === null ? "mean" : `head ${head + 1}`}`;

export class HeadPicker {
  chosen = [0, null];  // one of #heads if there are any
  #heads = []; #buttons = []; #columns = 1;

  // onChoose(): called when another head is chosen.
  constructor(root, onChoose) {
    this.onChoose = onChoose;
    this.grid = make("div", {class: "heads", role: "radiogroup", "aria-label": "Attention head"});
    root.append(this.grid);
    this.grid.addEventListener("keydown", event => this.#move(event));
  }

  setModel(description) {
    const {n_layer, n_head} = description ?? {n_layer: 0, n_head: 0};
    const label = text => make("span", {"aria-hidden": true}, text), cells = [label("Layer"), label("Head")];
    [this.#heads, this.#buttons, this.#columns] = [[], [], n_head + 1];
    for (let layer = 0; layer < n_layer; layer++) {
      cells.push(label(String(layer + 1)));
      for (const head of [null, ...Array(n_head).keys()]) {
        const i = this.#heads.push([layer, head]) - 1;
        const attributes = {type: "button", role: "radio", "aria-label": headName([layer, head])};
        const button = make("button", attributes, head === null ? "mean" : String(head + 1));
        button.addEventListener("click", () => this.#choose(i));
        this.#buttons.push(button);
        cells.push(button);
      }
    }
    this.grid.replaceChildren(...n_layer ? cells : []);
    this.grid.style.setProperty("--heads", n_head);
    this.chosen = this.#heads[0] ?? [0, null];
    this.#draw();
  }

  #choose(i) {
    this.chosen = this.#heads[i];
    this.#draw();
    this.onChoose();
  }

  #move(event) {
    const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns, ArrowDown: this.#columns}[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const count = this.#heads.length, i = (this.#heads.indexOf(this.chosen) + step + count) % count;
    this.#buttons[i].focus();
    this.#choose(i);
  }

  #draw() {
    this.#heads.forEach((head, i) => {
      const button = this.#buttons[i];
      button.setAttribute("aria-checked", head === this.chosen);
      button.tabIndex = head === this.chosen ? 0 : -1;
    });
  }
}
