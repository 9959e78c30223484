// The map of the weights of an attention head: rows are queries, columns are keys, colors are square roots of weights.

import {color} from "./colors.js";
import {make} from "./dom.js";

const AXES = "Each row is a query, each column a key.";
const MAX_CRISP = 400;  // rows, about as many as pixels on the screen; a larger map is smoothed, so that no row is lost

export class WeightMap {
  // nameCell(query, key): returns the caption while the pointer is over a weight.
  constructor(nameCell) {
    this.canvas = make("canvas", {role: "img"});
    this.marker = make("div", {class: "marker"});
    this.caption = make("figcaption", {class: "soft"}, AXES);
    this.element = make("figure", {}, make("div", {class: "map"}, this.canvas, this.marker), this.caption);
    this.canvas.addEventListener("pointermove", ({offsetX, offsetY}) => {
      const last = this.canvas.width - 1, cell = this.canvas.clientWidth / this.canvas.width;
      const [key, query] = [offsetX, offsetY].map(offset => Math.min(last, Math.floor(offset / cell)));
      this.caption.textContent = key <= query && nameCell(query, key) || AXES;
    });
    this.canvas.addEventListener("pointerleave", () => { this.caption.textContent = AXES; });
  }

  // Draw weights (length, length), row by row.
  draw(weights, length, name) {
    const image = new ImageData(length, length), pixels = new Uint32Array(image.data.buffer);
    const palette = Uint32Array.from({length: 256}, (_, i) => {
      const [red, green, blue] = color("attention", i / 255).background.match(/\d+/g);
      return 255 << 24 | blue << 16 | green << 8 | red;
    });
    for (let query = 0; query < length; query++) {
      for (let at = query * length; at <= query * length + query; at++) {
        pixels[at] = palette[Math.min(255, Math.round(255 * Math.sqrt(weights[at])))];
      }
    }
    this.canvas.width = this.canvas.height = length;
    this.canvas.getContext("2d").putImageData(image, 0, 0);
    this.canvas.classList.toggle("smooth", length > MAX_CRISP);
    const label = `Map of the attention weights of ${name}, ${length} queries by ${length} keys`;
    this.canvas.setAttribute("aria-label", label);
  }

  // Mark the row of a query, or no row if it is null.
  mark(query) {
    const cell = 100 / this.canvas.width, {style} = this.marker;
    this.marker.hidden = query === null;
    [style.top, style.width, style.height] = [query * cell, (query + 1) * cell, cell].map(share => `${share}%`);
  }
}
