// The backend of a page that holds one text with its tokens and attention weights, and no model.

import {start} from "./app.js";

class SavedBackend {
  constructor(data) {
    this.data = data;
    this.models = [data.description.name];
    this.weights = new Uint16Array(Uint8Array.from(atob(data.weights), byte => byte.charCodeAt(0)).buffer);
  }

  async describe() { return this.data.description; }

  async history() { return this.data.history; }

  async score() { return this.data.tokens; }

  // Return the weights of the whole text. The lower triangles are stored row by row.
  async attention(_, ids, layer, head) {
    const {description: {n_head}, tokens} = this.data, T = tokens.length, weights = new Float32Array(T * T);
    const heads = head === null ? [...Array(n_head).keys()] : [head];
    for (const h of heads) {
      let at = (layer * n_head + h) * T * (T + 1) / 2;
      for (let i = 0; i < T; i++) {
        for (let j = 0; j <= i; j++) weights[i * T + j] += this.weights[at++] / 65535 / heads.length;
      }
    }
    return weights;
  }
}

start(new SavedBackend(JSON.parse(document.getElementById("data").textContent)));
