// The forward pass of minigpt/model/gpt.py for one sequence, token by token, with a cache of keys and values.
//
// Shapes: C n_embd, D head width, H query heads, K key-value heads, T block_size, V vocab. Matrices are (out, in), row by
// row.

// The values of GPTConfig that this file computes, as JSON: a list of them, or null for all. The export refuses others.
export const SUPPORTED = {
  "activation": ["gelu", "gelu_tanh", "relu", "relu2", "swiglu"],
  "norm": ["layernorm", "rmsnorm", "rmsnorm_noscale"],
  "norm_position": ["pre", "post"],
  "parametrization": ["standard", "mup"],
  "position": ["learned", "rope", "none"],
  "base_head_dim": null, "base_n_embd": null, "bias": null, "block_size": null, "dropout": null, "embed_norm": null,
  "head_dim": null, "layer_repeats": null, "logit_softcap": null, "n_embd": null, "n_head": null, "n_inner": null,
  "n_kv_head": null, "n_layer": null, "ngram": null, "ngram_buckets": null, "ngram_dim": null, "ngram_dropout": null,
  "norm_eps": null, "qk_norm": null, "qk_norm_weights": null, "qkv_bias": null, "rope_base": null, "rope_factor": null,
  "rope_high_freq_factor": null, "rope_low_freq_factor": null, "rope_original_block_size": null, "smear": null,
  "tie_embeddings": null, "vocab_size": null
};

export class GPT {
  // config: the values of GPTConfig. weights: Float32Arrays by name; of tensors that are shared, by the first name.
  constructor(config, weights) {
    this.config = config;
    this.weights = weights;
    this.H = config.n_head;
    this.K = config.n_kv_head ?? config.n_head;
    this.D = config.head_dim ?? config.n_embd / config.n_head;
    const mup = config.parametrization === "mup";
    this.attentionScale = mup ? Math.sqrt(config.base_head_dim) / this.D : 1 / Math.sqrt(this.D);
    this.widthRatio = mup ? config.n_embd / config.base_n_embd : 1;
    this.frequency = config.position === "rope" ? rotaryFrequency(config, this.D) : null;
    this.layers = Array.from({length: config.n_layer}, (_, i) => this.newLayer(i));
    this.finalNorm = this.newNorm("final_norm");
    this.head = {weight: weights["lm_head.weight"] ?? weights["wte.weight"], y: new Float32Array(config.vocab_size)};
    this.ngramOut = config.ngram ? this.newLinear("ngrams.out", config.n_embd) : null;
    this.record = null;  // called with the layer, the head and the attention weights of the current token, unless null
    this.reset();
  }

  // Empty the cache.
  reset() {
    this.tokens = [];  // in the cache
    this.embeddings = [];  // their embeddings, for smear
  }

  // Keep the first n tokens in the cache, which must be the first of the text: of at most T tokens.
  rewind(n) {
    this.tokens.length = n;
    if (this.config.smear) this.embeddings.length = n;
  }

  // Append a token and return the logits (V) of the next one, which the following call overwrites.
  step(token) {
    const {config} = this;
    let x = this.forward(token);
    if (config.norm_position === "pre") x = this.norm(x, this.finalNorm);
    const logits = linear(this.head, x.map(value => value / this.widthRatio));
    const cap = config.logit_softcap;
    if (cap !== null) logits.forEach((value, i) => { logits[i] = cap * Math.tanh(value / cap); });
    return logits;
  }

  // Append a token and return the output (C) of the last block.
  //
  // Beyond T tokens, the newer half of the window is read again from position 0, as in minigpt/sampling/fast/fast_decoder.py.
  forward(token) {
    const {config} = this, T = config.block_size;
    if (this.tokens.length === T) {
      const kept = this.tokens.slice(T - Math.max(1, Math.floor(T / 2)) + 1);
      this.reset();
      kept.forEach(earlier => this.forward(earlier));
    }
    const position = this.tokens.length;
    const rotation = this.frequency && rotationAt(position, this.frequency);
    const x = this.embed(token, position);
    this.tokens.push(token);
    const pre = config.norm_position === "pre";
    for (const layer of this.layers) {
      add(x, this.attend(layer, pre ? this.norm(x, layer.norm1) : x, position, rotation));
      if (!pre) x.set(this.norm(x, layer.norm1));
      const up = linear(layer.up, pre ? this.norm(x, layer.norm2) : x);
      add(x, linear(layer.down, activate(up, config.activation)));
      if (!pre) x.set(this.norm(x, layer.norm2));
    }
    return x;
  }

  embed(token, position) {
    const {config, weights} = this, C = config.n_embd;
    const x = weights["wte.weight"].slice(token * C, (token + 1) * C);
    if (config.ngram) add(x, linear(this.ngramOut, this.embedNgrams(token)));
    if (config.smear) {
      const previous = this.embeddings, own = x.slice();
      for (let back = 1; back <= Math.min(config.smear, previous.length); back++) {  // last: previous token
        const factor = weights[`smear.${config.smear - back}`], before = previous[previous.length - back];
        for (let i = 0; i < C; i++) x[i] += factor[i] * before[i];
      }
      previous.push(own);
    }
    if (config.position === "learned") add(x, weights["wpe.weight"].subarray(position * C, (position + 1) * C));
    return config.embed_norm ? normalize(x, config.norm_eps) : x;
  }

  // Return the concatenated embeddings of the last 2 … ngram tokens; each n-gram is hashed into a table.
  embedNgrams(token) {
    const {ngram, ngram_dim: width, ngram_buckets: buckets, vocab_size: padding} = this.config;
    const table = this.weights["ngrams.table.weight"], x = new Float32Array((ngram - 1) * width);
    let hash = BigInt(token);  // the products exceed 2⁵³
    for (let n = 1; n < ngram; n++) {
      const before = this.tokens[this.tokens.length - n] ?? padding;
      hash = (hash * 2654435761n + BigInt(before) + 1n) % 2147483647n;
      const row = Number(hash % BigInt(buckets)) + (n - 1) * buckets;
      x.set(table.subarray(row * width, (row + 1) * width), (n - 1) * width);
    }
    return x;
  }

  // Compute the attention from the token at `position` to those in the cache.
  attend(layer, x, position, rotation) {
    const {H, K, D} = this, T = this.config.block_size;
    const qkv = linear(layer.qkv, x);  // H + 2K heads
    for (let head = 0; head < H + K; head++) {
      const part = qkv.subarray(head * D, (head + 1) * D);
      if (this.config.qk_norm) part.set(normalize(part, this.config.norm_eps, head < H ? layer.qNorm : layer.kNorm));
      if (rotation) rotate(part, rotation);
    }
    layer.keys = store(layer.keys, qkv.subarray(H * D, (H + K) * D), position, T);
    layer.values = store(layer.values, qkv.subarray((H + K) * D), position, T);
    const {keys, values} = layer, S = position + 1;
    const y = new Float32Array(H * D), weights = new Float64Array(S);
    for (let head = 0; head < H; head++) {
      const q = head * D, kv = Math.floor(head * K / H) * D;
      let most = -Infinity, total = 0;
      for (let s = 0; s < S; s++) {
        const k = s * K * D + kv;
        let score = 0;
        for (let d = 0; d < D; d++) score += qkv[q + d] * keys[k + d];
        weights[s] = score * this.attentionScale;
        most = Math.max(most, weights[s]);
      }
      for (let s = 0; s < S; s++) total += weights[s] = Math.exp(weights[s] - most);
      for (let s = 0; s < S; s++) weights[s] /= total;
      if (this.record) this.record(layer.index, head, weights);
      for (let s = 0; s < S; s++) {
        const weight = weights[s], v = s * K * D + kv;
        for (let d = 0; d < D; d++) y[q + d] += weight * values[v + d];
      }
    }
    return linear(layer.out, y);
  }

  norm(x, {weight, bias}) {
    return normalize(x, this.config.norm_eps, weight, bias, this.config.norm === "layernorm");
  }

  newLayer(index) {
    const {config, H, K, D} = this, nBlocks = config.n_layer / config.layer_repeats;  // the same ones again and again
    const prefix = `blocks.${index % nBlocks}.`, attention = `${prefix}attention.`;
    const upWidth = this.weights[`${prefix}mlp.up.weight`].length / config.n_embd;
    return {
      index,
      norm1: this.newNorm(`${prefix}norm_1`),
      qkv: this.newLinear(`${attention}qkv`, (H + 2 * K) * D),
      qNorm: this.weights[`${attention}q_norm`],
      kNorm: this.weights[`${attention}k_norm`],
      out: this.newLinear(`${attention}out`, config.n_embd),
      norm2: this.newNorm(`${prefix}norm_2`),
      up: this.newLinear(`${prefix}mlp.up`, upWidth),
      down: this.newLinear(`${prefix}mlp.down`, config.n_embd),
      keys: new Float32Array(0),  // K·D values per position
      values: new Float32Array(0),
    };
  }

  newNorm(name) {
    return {weight: this.weights[`${name}.weight`], bias: this.weights[`${name}.bias`]};
  }

  newLinear(name, width) {
    return {...this.newNorm(name), y: new Float32Array(width)};
  }
}

// Return y = W x + b, which the next call overwrites. Four rows are computed at a time, so that each x[j] is loaded
// once for four products; that is twice as fast as one row at a time.
function linear({weight, bias, y}, x) {
  const n = x.length, rows = y.length;
  let i = 0;
  for (; i + 3 < rows; i += 4) {
    const first = i * n, second = first + n, third = second + n, fourth = third + n;
    let a = 0, b = 0, c = 0, d = 0;
    for (let j = 0; j < n; j++) {
      const value = x[j];
      a += weight[first + j] * value;
      b += weight[second + j] * value;
      c += weight[third + j] * value;
      d += weight[fourth + j] * value;
    }
    y[i] = a;
    y[i + 1] = b;
    y[i + 2] = c;
    y[i + 3] = d;
  }
  for (; i < rows; i++) {
    let sum = 0;
    for (let j = 0; j < n; j++) sum += weight[i * n + j] * x[j];
    y[i] = sum;
  }
  if (bias) add(y, bias);
  return y;
}

function add(x, y) {
  for (let i = 0; i < x.length; i++) x[i] += y[i];
}

// Apply LayerNorm if `centered`, else RMSNorm.
function normalize(x, eps, weight, bias, centered = false) {
  const n = x.length, y = new Float32Array(n);
  let mean = 0, square = 0;
  if (centered) for (let i = 0; i < n; i++) mean += x[i] / n;
  for (let i = 0; i < n; i++) square += (x[i] - mean) ** 2 / n;
  const factor = 1 / Math.sqrt(square + eps);
  for (let i = 0; i < n; i++) y[i] = (x[i] - mean) * factor * (weight ? weight[i] : 1) + (bias ? bias[i] : 0);
  return y;
}

const ACTIVATIONS = {
  gelu: x => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  gelu_tanh: x => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  relu: x => Math.max(x, 0),
  relu2: x => Math.max(x, 0) ** 2,
  swiglu: x => x / (1 + Math.exp(-x)),  // SiLU, which is applied to the first half
};

function activate(x, name) {
  const width = name === "swiglu" ? x.length / 2 : x.length, activation = ACTIVATIONS[name];
  for (let i = 0; i < width; i++) x[i] = activation(x[i]) * (name === "swiglu" ? x[width + i] : 1);
  return x.subarray(0, width);
}

// The error is below 1.5e-7. Source: Abramowitz and Stegun, Handbook of Mathematical Functions, formula 7.1.26.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - series * Math.exp(-x * x));
}

// Return the frequencies (D/2) of minigpt.model.attention.rotary_table, with Llama 3's scaling.
function rotaryFrequency(config, D) {
  const low = config.rope_low_freq_factor, high = config.rope_high_freq_factor;
  return Float64Array.from({length: D / 2}, (_, i) => {
    const frequency = config.rope_base ** (-2 * i / D);
    const turns = config.rope_original_block_size * frequency / (2 * Math.PI);  // in the original context
    const kept = Math.min(Math.max((turns - low) / (high - low), 0), 1);
    return frequency * (kept + (1 - kept) / config.rope_factor);
  });
}

function rotationAt(position, frequency) {
  const angle = frequency.map(value => position * value);
  return {cos: angle.map(Math.cos), sin: angle.map(Math.sin)};
}

// Rotate the pairs (i, i + D/2) in place.
function rotate(x, {cos, sin}) {
  const half = x.length / 2;
  for (let i = 0; i < half; i++) {
    const a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = a * sin[i] + b * cos[i];
  }
}

// Write values to a slot of a cache of at most T slots, and return the cache, which grows by doubling.
function store(cache, values, slot, T) {
  const n = values.length;
  if ((slot + 1) * n > cache.length) {
    const larger = new Float32Array(Math.min(Math.max(64 * n, 2 * cache.length), T * n));
    larger.set(cache);
    cache = larger;
  }
  cache.set(values, slot * n);
  return cache;
}
