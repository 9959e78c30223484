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

// Return a table with the losses of models, {model, own: the pane whose tokens it has scored}, on texts, [name, pane] each.
export async function compareLosses(backend, models, texts, signal) {
  const rows = [];
  for (const {model, own} of models) {
    const cells = [];
    for (const [, pane] of texts) {
      const score = () => backend.score(model, pane.text, signal).catch(() => []);  // it may lack a character
      const found = loss(pane === own ? pane.tokens : await score());
      cells.push(make("td", {}, found ? `${found.nats.toFixed(3)} (${found.bits.toFixed(3)})` : "–"));
    }
    rows.push(make("tr", {}, make("th", {scope: "row"}, model), ...cells));
  }
  const head = ["Loss: nats per token (bits per byte)", ...texts.map(([name]) => name)];
  const columns = make("tr", {}, ...head.map(name => make("th", {scope: "col"}, name)));
  return make("table", {}, make("thead", {}, columns), make("tbody", {}, ...rows));
}
