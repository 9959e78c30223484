// The table of the losses of models on texts.

import {make} from "./dom.js";

// Return the mean loss in nats per token and in bits per byte, or null if no token has a prediction.
function loss(tokens) {
  const predicted = tokens.filter(token => token.logprob !== null);
  if (!predicted.length) return null;
  const nats = -predicted.reduce((sum, token) => sum + token.logprob, 0);
  const bytes = new TextEncoder().encode(predicted.map(token => token.text).join("")).length;
  return {nats: nats / predicted.length, bits: nats / Math.LN2 / bytes};
}

// Return a table with the loss of each model on each text; readers: {model, pane: with the tokens it has scored}.
export async function compareLosses(backend, readers, signal) {
  const rows = [];
  for (const {model, pane: own} of readers) {
    const cells = [];
    for (const {pane} of readers) {
      const score = () => backend.score(model, pane.text, signal).catch(() => []);  // it may lack a character
      const found = loss(pane === own ? pane.tokens : await score());
      cells.push(make("td", {}, found ? `${found.nats.toFixed(3)} (${found.bits.toFixed(3)})` : "–"));
    }
    rows.push(make("tr", {}, make("th", {scope: "row"}, model), ...cells));
  }
  const names = readers.map(({model}) => readers.length > 1 ? `Text of ${model}` : "Text");
  const head = ["Loss: nats per token (bits per byte)", ...names].map(name => make("th", {scope: "col"}, name));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}
