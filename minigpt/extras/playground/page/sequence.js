// The text that a model has read; of another text, it reads only the part from the first difference on.

import {scoreToken} from "./sampling.js";

export class Sequence {
  constructor(model) {
    this.model = model;
    this.ids = [];
    this.predictions = [];  // {logprob, rank, top} of each id
    this.maps = null;  // the attention weights of each head, one row per id
    this.logits = null;  // after the last id
  }

  // Return how many first ids need not be read again. Beyond the block, the cache holds the newer ones alone.
  shared(ids) {
    const first = this.ids.findIndex((id, i) => id !== ids[i]), count = first < 0 ? this.ids.length : first;
    const isLost = count < this.ids.length && this.ids.length > this.model.config.block_size;
    return isLost ? 0 : count;
  }

  // Read other ids, from the first difference on.
  async replace(ids, turn, withMaps = false) {
    const shared = withMaps && !this.maps ? 0 : this.shared(ids);
    this.predictions.length = shared;
    if (!shared || shared < this.ids.length) this.rewind(Math.max(0, shared - 1));  // read one again, for its logits
    if (withMaps && !this.maps) this.record();
    for (const id of ids.slice(this.ids.length)) {
      this.append(id);
      await turn();
    }
  }

  append(id) {
    const at = this.ids.push(id) - 1;
    if (at === this.model.config.block_size) this.maps = this.model.record = null;  // from here on the window moves
    this.predictions[at] ??= at ? scoreToken(this.logits, id) : {logprob: null, rank: 0, top: []};
    this.logits = this.model.step(id);
  }

  rewind(count) {
    if (count) this.model.rewind(count);
    else this.model.reset();
    this.ids.length = count;
    this.maps?.forEach(rows => { rows.length = count; });
  }

  record() {
    const {n_layer, n_head} = this.model.config, maps = Array.from({length: n_layer * n_head}, () => []);
    this.model.record = (layer, head, weights) => maps[layer * n_head + head].push(Float32Array.from(weights));
    this.maps = maps;
  }
}
