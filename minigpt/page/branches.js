// The generated texts as a tree: each is a child of the one with which it shares the longest beginning.

import {make} from "./dom.js";
import {loss} from "./losses.js";

export class Branches {
  // onOpen(branch), onCompare(branch): called when the user chooses one.
  constructor(root, {onOpen, onCompare}) {
    Object.assign(this, {root, onOpen, onCompare});
    this.all = [];  // {text, tokens, model, start: offset of the text that the parent lacks, children}
    this.show(null);
  }

  add(text, tokens, model) {
    let branch = this.all.find(other => other.text === text);
    if (!branch) {
      branch = {text, start: 0, children: [], parent: null};
      for (const other of this.all) {
        const shared = commonLength(other.text, text);
        if (shared > branch.start) Object.assign(branch, {start: shared, parent: other});
      }
      branch.parent?.children.push(branch);
      this.all.push(branch);
    }
    Object.assign(branch, {tokens, model});
  }

  // text: the text that is shown.
  show(text) {
    const list = branches => make("ul", {class: "branches"}, ...branches.map(branch => {
      const {nats} = loss(from(branch.tokens, branch.start)) ?? {};
      const snippet = branch.text.slice(branch.start, branch.start + 60);
      const open = make("button", {type: "button"}, make("code", {}, snippet.replaceAll("\n", "⏎")),
        make("small", {}, `${branch.model}${nats === undefined ? "" : `, ${nats.toFixed(2)} nats per token`}`));
      const compare = make("button", {type: "button", "aria-label": `Compare with ${snippet}`}, "Compare");
      if (branch.text === text) open.setAttribute("aria-current", "true");
      compare.disabled = branch.text === text;
      open.addEventListener("click", () => this.onOpen(branch));
      compare.addEventListener("click", () => this.onCompare(branch));
      return make("li", {}, make("div", {}, open, compare), ...(branch.children.length ? [list(branch.children)] : []));
    }));
    const roots = this.all.filter(branch => !branch.parent);
    const hint = "Every generated text stays here. Generate from the cursor, or choose an alternative of a token.";
    this.root.replaceChildren(roots.length ? list(roots) : make("p", {class: "soft"}, hint));
  }
}

function commonLength(a, b) {
  let length = 0;
  while (length < a.length && length < b.length && a[length] === b[length]) length++;
  return length;
}

// Return the tokens that begin at an offset of the text or after it.
function from(tokens, offset) {
  let start = 0;
  return tokens.filter(({text}) => (start += text.length) > offset);
}
