// The table of the losses of models on texts.

import {make} from "./dom.js";

// Return the mean loss in nats per token and in bits per byte, or null if no token has a prediction.
export function loss(tokens) {
  const predicted = tokens.filter(token => token.logprob !== null);
  if (!predicted.length) return null;
  const nats = -predicted.reduce((sum, token) => sum + token.logprob, 0);
  const bytes = new TextEncoder().encode(predicted.map(token => token.text).join("")).length;
  return {nats: nats / predicted.length, bits: nats / Math.LN2 / bytes};
}

// columns: names of the texts. rows: [name of a model, its tokens of each text].
export function lossTable(columns, rows) {
  const body = rows.map(([name, ...texts]) => {
    const losses = texts.map(loss).map(found => found ? `${found.nats.toFixed(3)} (${found.bits.toFixed(3)})` : "–");
    return make("tr", {}, make("th", {scope: "row"}, name), ...losses.map(text => make("td", {}, text)));
  });
  const head = ["Loss: nats per token (bits per byte)", ...columns].map(name => make("th", {scope: "col"}, name));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
}
