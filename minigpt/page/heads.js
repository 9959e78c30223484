// The control that picks an attention head and silences heads.
// Layers and heads count from 0 in the code and from 1 for readers; head null is the mean of the heads of a layer.

import {make} from "./dom.js";

export const headName = ([layer, head]) => `layer ${layer + 1}, ${head === null ? "mean" : `head ${head + 1}`}`;

export class HeadPicker {
  chosen = [0, null];  // one of #heads if there are any
  silenced = [];  // some of #heads
  #heads = []; #buttons = []; #columns = 1;

  constructor(root, {onChoose, onSilence}) {
    Object.assign(this, {onChoose, onSilence});
    this.grid = make("div", {class: "heads", role: "radiogroup", "aria-label": "Attention head"});
    this.silence = make("button", {type: "button"});
    this.restore = make("button", {type: "button"}, "Restore all");
    root.append(this.grid, make("div", {class: "actions"}, this.silence, this.restore));
    this.grid.addEventListener("keydown", event => this.#move(event));
    this.silence.addEventListener("click", () => this.#toggle());
    this.restore.addEventListener("click", () => {
      this.#setSilenced([]);
      this.#buttons[this.#heads.indexOf(this.chosen)].focus();  // the button that had the focus is hidden now
    });
    this.#draw();
  }

  setModel(description) {
    const {n_layer, n_head} = description ?? {n_layer: 0, n_head: 0};
    const label = text => make("span", {"aria-hidden": true}, text), cells = [label("Layer"), label("Head")];
    [this.#heads, this.#buttons, this.#columns] = [[], [], n_head + 1];
    for (let layer = 0; layer < n_layer; layer++) {
      cells.push(label(String(layer + 1)));
      for (const head of [null, ...Array(n_head).keys()]) {
        const i = this.#heads.push([layer, head]) - 1;
        const button = make("button", {type: "button", role: "radio"}, head === null ? "mean" : String(head + 1));
        button.addEventListener("click", () => this.#choose(i));
        this.#buttons.push(button);
        cells.push(button);
      }
    }
    this.grid.replaceChildren(...n_layer ? cells : []);
    this.grid.style.setProperty("--heads", n_head);
    [this.chosen, this.silenced] = [this.#heads[0] ?? [0, null], []];
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

  #toggle() {
    const others = this.silenced.filter(head => head !== this.chosen);
    this.#setSilenced(others.length < this.silenced.length ? others : [...others, this.chosen]);
  }

  #setSilenced(heads) {
    this.silenced = heads;
    this.#draw();
    this.onSilence();
  }

  #draw() {
    this.#heads.forEach((head, i) => {
      const button = this.#buttons[i], silenced = this.silenced.includes(head);
      button.ariaChecked = head === this.chosen;
      button.ariaLabel = headName(head) + (silenced ? ", silenced" : "");
      button.tabIndex = head === this.chosen ? 0 : -1;
      button.classList.toggle("silenced", silenced);
    });
    const mean = this.chosen[1] === null, verb = this.silenced.includes(this.chosen) ? "Restore" : "Silence";
    this.silence.disabled = mean;
    this.silence.textContent = mean ? "Choose a head to silence it" : `${verb} ${headName(this.chosen)}`;
    this.restore.hidden = !this.silenced.length;
  }
}
