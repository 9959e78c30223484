// The backend of a page that holds a model, which runs in the page.

import {start} from "./app.js";
import {GPT} from "./model.js";
import {Random, draw} from "./sampling.js";
import {Sequence} from "./sequence.js";
import {Tokenizer} from "./tokenizer.js";
import {readWeights} from "./weights.js";

const WORK_MS = 40;  // between two turns of the event loop
const MAX_IDLE = 3;  // sequences of a model that are kept

class BrowserBackend {
  // base64: a line for the weights of the model, and one for each snapshot. A model is named as its run is, and a
  // snapshot has @ and its step after that.
  constructor(data, base64) {
    const {name} = data.description;
    this.data = data;
    this.models = [name];
    this.tokenizer = new Tokenizer(data.tokenizer);
    this.unused = [...Array(data.config.vocab_size).keys()].filter(id => !this.tokenizer.has(id));
    const snapshots = data.history.steps.map(step => `${name}@${step}`);
    this.base64 = new Map([name, ...snapshots].map((key, i) => [key, base64[i]]));
    this.weights = new Map();
    this.idle = [];
  }

  async describe() { return this.data.description; }

  async history() { return this.data.history; }

  async learned() { return this.data.learned; }

  async decode(model, ids) { return this.tokenizer.decode(ids); }

  async score(model, text, signal) {
    const ids = typeof text === "string" ? this.tokenizer.parse(text) : text;
    return this.use(model, ids, async sequence => {
      await sequence.replace(ids, turns(signal));
      const decode = this.tokenizer.decoder(), last = ids.length - 1;
      return ids.map((id, i) => this.token(id, decode(id) + (i === last ? decode() : ""), sequence.predictions[i]));
    });
  }

  // Return the tokens of a question, up to the start of its answer.
  async chat(model, text, signal) {
    return this.score(model, this.tokenizer.ask(text), signal);
  }

  async *generate(model, ids, {max_tokens, seed, chat, ...sampling}, signal) {
    const {start, stop} = this.data.tokenizer, context = (ids.length ? ids : start).slice(-this.data.config.block_size);
    const random = new Random(seed), decode = this.tokenizer.decoder(), turn = turns(signal);
    const sequence = this.take(model, context);
    ids.forEach(id => decode(id));  // the prompt may end within a character
    try {
      await sequence.replace(context, turn);
      for (let left = max_tokens - 1; left >= 0; left--) {
        const id = draw(sequence.logits, this.unused, sampling, random);
        if (id === stop || chat && this.tokenizer.names.has(id)) return;
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

  async attention(model, ids, layer, head, signal) {
    const {n_head, block_size} = this.data.config, context = ids.slice(-block_size), T = context.length;
    const heads = head === null ? [...Array(n_head).keys()] : [head], mean = new Float32Array(T * T);
    return this.use(model, context, async sequence => {
      await sequence.replace(context, turns(signal), true);
      for (const h of heads) {
        sequence.maps[layer * n_head + h].forEach((row, i) => row.forEach((weight, j) => {
          mean[i * T + j] += weight / heads.length;
        }));
      }
      return mean;
    });
  }

  newModel(name = this.models[0]) {
    if (!this.weights.has(name)) {
      this.weights.set(name, readWeights(this.base64.get(name), this.data.tensors, this.data.format));
      this.base64.delete(name);  // frees the memory of the text
    }
    return new GPT(this.data.config, this.weights.get(name));
  }

  // Take a sequence, which no other request uses until it is put back; if possible one that begins like ids.
  take(model, ids) {
    const shared = this.idle.map(sequence => sequence.name === model ? sequence.shared(ids) : 0);
    const most = Math.max(0, ...shared);
    if (most) return this.idle.splice(shared.indexOf(most), 1)[0];
    return Object.assign(new Sequence(this.newModel(model)), {name: model});
  }

  give(sequence) {
    const same = [...this.idle.filter(({name}) => name === sequence.name), sequence].slice(-MAX_IDLE);
    this.idle = [...this.idle.filter(({name}) => name !== sequence.name), ...same];
  }

  async use(model, ids, task) {
    const sequence = this.take(model, ids);
    try {
      return await task(sequence);
    } finally {
      this.give(sequence);
    }
  }

  token(id, completed, {logprob, rank, top}) {
    const text = this.data.tokenizer.reads_special && this.tokenizer.names.get(id) || completed;
    return {id, text, logprob, rank, top: top.map(other => ({...other, text: this.tokenizer.decode([other.id])}))};
  }
}

// Return a function to await after each token; it lets the page work, and throws once the signal is aborted.
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
start(new BrowserBackend(JSON.parse(document.getElementById("data").textContent), weights.textContent.split("\n")));
weights.remove();
