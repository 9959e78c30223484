// The selected token: its probability, and the most likely alternatives, each of which can replace it.

import {make, percent, visible} from "./dom.js";

export class TokenPanel {
  // onReplace(index, alternative): replaces a token by an alternative and continues.
  constructor(root, onReplace) {
    this.root = root;
    this.onReplace = onReplace;
    this.show([], null);
  }

  show(tokens, index, canReplace = true) {
    const token = tokens[index] ?? null, key = `${index} ${canReplace}`;
    if (token === this.token && key === this.key) return;  // keeps the focus
    [this.token, this.key] = [token, key];
    if (!token) {
      const hint = "Colors show the probability of each token. Point at a token, or move the cursor behind it, to see "
        + "what the model expected; choose an alternative to continue from it.";
      this.root.replaceChildren(make("h2", {}, "No token selected"), make("p", {class: "soft"}, hint));
      return;
    }
    const heading = make("h2", {}, `Token ${index + 1} `, make("code", {}, visible(token.text)));
    const facts = token.logprob === null ? "not predicted: it is the first"
      : `probability ${percent(Math.exp(token.logprob))}, rank ${token.rank + 1}, `
        + `surprisal ${(-token.logprob / Math.LN2).toFixed(2)} bits`;
    const rows = token.top.map((alternative, rank) => this.row(alternative, rank, index, canReplace));
    if (token.logprob !== null && token.rank >= rows.length) rows.push(this.row(token, token.rank, index, false));
    this.root.replaceChildren(heading, make("p", {class: "soft"}, facts), make("ol", {class: "alternatives"}, ...rows));
  }

  row(alternative, rank, index, canReplace) {
    const {id, text, logprob} = alternative, p = Math.exp(logprob), bar = make("span", {class: "bar"});
    bar.style.width = `${100 * p}%`;
    const button = make("button", {type: "button"}, bar, make("span", {class: "rank"}, String(rank + 1)),
      make("code", {}, visible(text)), make("span", {class: "percent"}, percent(p)));
    const isWhole = text !== "" && !text.includes("\ufffd");  // else a part of a character, or a special token
    button.disabled = !canReplace || !isWhole || id === this.token.id;
    if (id === this.token.id) button.setAttribute("aria-current", "true");
    button.title = `surprisal ${(-logprob / Math.LN2).toFixed(2)} bits${button.disabled ? "" : "; continue from here"}`;
    button.addEventListener("click", () => this.onReplace(index, {...alternative, rank}));
    return make("li", {}, button);
  }
}
