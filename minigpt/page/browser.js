// The backend of a page that holds a model, which runs in the page.

import {start} from "./app.js";
import {GPT} from "./model.js";
import {Random, draw, rate} from "./sampling.js";
import {Tokenizer} from "./tokenizer.js";
import {readWeights} from "./weights.js";

const WORK_MS = 40;  // between two turns of the event loop
const MAX_IDLE = 2;  // sequences kept for the next request: with and without silenced heads

class BrowserBackend {
  constructor(data, base64) {
    this.data = data;
    this.models = [data.name];
    this.tokenizer = new Tokenizer(data.tokenizer);
    this.weights = readWeights(base64, data.tensors, data.format);
    this.idle = [];
    this.maps = {};  // the attention weights of the last text and layer
  }

  async describe() {
    const {name, facts, config: {n_layer, n_head, block_size}} = this.data;
    return {name, facts, n_layer, n_head, block_size};
  }

  async history() { return this.data.history; }

  async score(_, text, silenced = [], signal) {
    const ids = typeof text === "string" ? this.tokenizer.encode(text) : text, sequence = this.take(silenced);
    try {
      await sequence.replace(ids, turns(signal));
    } finally {
      this.give(sequence);
    }
    const decode = this.tokenizer.decoder(), last = ids.length - 1;
    return ids.map((id, i) => this.token(id, decode(id) + (i === last ? decode() : ""), sequence.predictions[i]));
  }

  async *generate(_, ids, {max_tokens, seed, ...sampling}, silenced = [], signal) {
    const {start, stop} = this.data.tokenizer, context = (ids.length ? ids : start).slice(-this.data.config.block_size);
    const random = new Random(seed), decode = this.tokenizer.decoder(), turn = turns(signal);
    const sequence = this.take(silenced);
    ids.forEach(id => decode(id));  // may end within a character
    try {
      await sequence.replace(context, turn);
      for (let left = max_tokens - 1; left >= 0; left--) {
        const id = draw(sequence.logits, sampling, random);
        if (id === stop) return;
        sequence.append(id);
        yield this.token(id, decode(id) + (left ? "" : decode()), sequence.predictions.at(-1));
        await turn();
      }
    } catch (error) {
      if (!signal?.aborted) throw error;
    } finally {
      this.give(sequence);
    }
  }

  async attention(_, ids, layer, head, silenced = [], signal) {
    const {n_head, block_size} = this.data.config, context = ids.slice(-block_size), size = context.length ** 2;
    const key = JSON.stringify([context, layer, silenced]);
    if (this.maps.key !== key) this.maps = {key, weights: await this.mapsOf(context, layer, silenced, turns(signal))};
    const heads = head === null ? [...Array(n_head).keys()] : [head], mean = new Float32Array(size);
    for (const h of heads) for (let i = 0; i < size; i++) mean[i] += this.maps.weights[h * size + i] / heads.length;
    return mean;
  }

  // The attention weights of all heads of a layer, (H, T, T).
  async mapsOf(context, layer, silenced, turn) {
    const model = this.newModel(silenced), T = context.length, maps = new Float32Array(model.H * T * T);
    let query = 0;
    model.record = (l, head, weights) => { if (l === layer) maps.set(weights, (head * T + query) * T); };
    for (; query < T; query++) {
      model.forward(context[query]);
      await turn();
    }
    return maps;
  }

  newModel(silenced = []) {
    return Object.assign(new GPT(this.data.config, this.weights), {silenced});
  }

  // A sequence that no other request uses until it is given back.
  take(silenced) {
    const key = JSON.stringify(silenced);
    const found = this.idle.findLast(({model}) => JSON.stringify(model.silenced) === key);
    this.idle = this.idle.filter(sequence => sequence !== found);
    return found ?? new Sequence(this.newModel(silenced));
  }

  give(sequence) { this.idle = [...this.idle, sequence].slice(-MAX_IDLE); }

  token(id, text, {logprob, rank, top}) {
    return {id, text, logprob, rank, top: top.map(other => ({...other, text: this.tokenizer.decode([other.id])}))};
  }
}

// The tokens that a model has read, and what it predicted.
class Sequence {
  constructor(model) {
    this.model = model;
    this.ids = [];
    this.predictions = [];  // {logprob, rank, top} of each id
    this.logits = null;  // after the last id
  }

  append(id) {
    const at = this.ids.push(id) - 1;
    this.predictions[at] ??= at ? rate(this.logits, id) : {logprob: null, rank: 0, top: []};
    this.logits = this.model.step(id);
  }

  // Read other ids, from the first one on that differs.
  async replace(ids, turn) {
    const other = this.ids.findIndex((id, i) => id !== ids[i]), shared = other < 0 ? this.ids.length : other;
    this.predictions.length = shared;
    if (shared < this.ids.length) {
      // The last shared one is read again, for its logits. In a full window, earlier keys and values are overwritten.
      this.ids.length = this.ids.length > this.model.config.block_size ? 0 : Math.max(0, shared - 1);
      if (this.ids.length) this.model.rewind(this.ids.length);
      else this.model.reset();
    }
    for (const id of ids.slice(this.ids.length)) {
      this.append(id);
      await turn();
    }
  }
}

// Return a function to await after each token: it lets the page work, and throws when the signal is aborted.
function turns(signal) {
  let start = performance.now();
  return async () => {
    if (performance.now() - start > WORK_MS) {
      await new Promise(resolve => setTimeout(resolve));
      start = performance.now();
    }
    signal?.throwIfAborted();
  };
}

const weights = document.getElementById("weights");
start(new BrowserBackend(JSON.parse(document.getElementById("data").textContent), weights.textContent));
weights.remove();  // the text is not needed any more
