// The filters and the draw of minigpt/sampling/filters.py, and the scores of tokens as in minigpt/sampling/generation.py. The random
// numbers are those of torch, so a seed gives the same samples.

const N_TOP = 10;

// Draw a token id from logits (V); `unused`: ids without a token, which are never drawn.
//
// temperature: 0 takes the first of equal maxima. top_k: number of tokens, or null. top_p, min_p: as in minigpt.
// random: numbers in [0, 1).
export function draw(logits, unused, {temperature, top_k, top_p, min_p}, random) {
  const V = logits.length;
  logits = logits.slice();
  for (const id of unused) logits[id] = -Infinity;
  let most = -Infinity, p = new Float64Array(V), total = 0, cumulative = 0, last = 0;
  for (let i = 0; i < V; i++) most = Math.max(most, logits[i]);
  if (!Number.isFinite(most)) throw new Error("the logits are NaN or infinite");
  if (temperature === 0) return logits.indexOf(most);
  for (let i = 0; i < V; i++) p[i] = Math.exp((logits[i] - most) / temperature);  // relative to the largest probability
  if (top_k !== null || top_p < 1) p = keepLikeliest(p, top_k ?? V, top_p);
  for (let i = 0; i < V; i++) total += p[i] = p[i] < min_p ? 0 : p[i];
  for (let i = 0, target = random.next() * total; i < V && cumulative <= target; i++) {
    cumulative += p[i];
    if (p[i] > 0) last = i;
  }
  return last;
}

// Score a token id by logits (V): its log-probability in nats, its rank, and the most likely ids, in order.
export function scoreToken(logits, id) {
  let most = -Infinity, total = 0, rank = 0, least = -Infinity;  // least: the lowest logit of `top` once it is full
  const top = [];
  for (let i = 0; i < logits.length; i++) {
    const value = logits[i];
    most = Math.max(most, value);
    if (value > logits[id]) rank++;
    if (value <= least) continue;
    let at = top.length;
    while (at > 0 && logits[top[at - 1]] < value) at--;
    top.splice(at, 0, i);
    if (top.length > N_TOP) top.pop();
    if (top.length === N_TOP) least = logits[top[N_TOP - 1]];
  }
  for (let i = 0; i < logits.length; i++) total += Math.exp(logits[i] - most);
  const logprob = i => logits[i] - most - Math.log(total);
  return {logprob: logprob(id), rank, top: top.map(i => ({id: i, logprob: logprob(i)}))};
}

// Keep the topK largest, and of these the fewest whose sum is at least topP of theirs; set all others to 0.
function keepLikeliest(p, topK, topP) {
  const descending = p.slice().sort().reverse().subarray(0, topK);
  const target = topP * descending.reduce((a, b) => a + b, 0);
  let count = 0;
  for (let sum = 0; count < descending.length && (count === 0 || sum < target); count++) sum += descending[count];
  const least = descending[count - 1];
  let ties = count - descending.indexOf(least);  // of equal probabilities, the lowest ids are kept
  return p.map(value => value > least || value === least && ties-- > 0 ? value : 0);
}

// The Mersenne Twister MT19937, and the float32 numbers that torch.rand derives from it.
// Source: Matsumoto and Nishimura, 1998, https://doi.org/10.1145/272991.272995
export class Random {
  constructor(seed) {
    this.state = new Uint32Array(624);
    this.state[0] = seed;
    for (let i = 1; i < 624; i++) {
      this.state[i] = Math.imul(1812433253, this.state[i - 1] ^ this.state[i - 1] >>> 30) + i;
    }
    this.index = 624;
  }

  next() {
    if (this.index === 624) this.refill();
    let y = this.state[this.index++];
    y ^= y >>> 11;
    y ^= y << 7 & 0x9d2c5680;
    y ^= y << 15 & 0xefc60000;
    y ^= y >>> 18;
    return (y & 0xffffff) / 0x1000000;  // 24 bits
  }

  refill() {
    const {state} = this;
    for (let i = 0; i < 624; i++) {
      const y = state[i] & 0x80000000 | state[(i + 1) % 624] & 0x7fffffff;
      state[i] = state[(i + 397) % 624] ^ y >>> 1 ^ (y & 1 ? 0x9908b0df : 0);
    }
    this.index = 0;
  }
}
