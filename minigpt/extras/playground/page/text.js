// A text with colored tokens: a textarea, and under its transparent letters the same text with one span per token.

import {color, expected, paint} from "./colors.js";
import {make} from "./dom.js";

export const joined = tokens => tokens.map(token => token.text).join("");

// Return a token as a textarea shows it, without carriage returns.
export const writable = token => ({...token, text: token.text.replaceAll("\r", "")});

export class TextPane {
  // onEdit: called when the user types. onSelect: called when another token is selected.
  constructor(root, {onEdit = () => {}, onSelect}) {
    this.root = root.querySelector(".scroll");
    this.layer = root.querySelector(".tokens");
    this.field = root.querySelector("textarea");
    this.rest = make("span");  // text without tokens
    this.layer.append(this.rest, "\u200b");  // gives an empty last line its height
    this.tokens = [];
    this.spans = [];
    this.ends = [];  // the offset of the end of each token
    this.cursor = 0;  // that of the field, which Chromium 150 moves to the start while the focus is elsewhere
    this.hovered = this.clicked = this.shading = null;
    this.onSelect = onSelect;
    this.field.addEventListener("input", () => {
      this.clicked = this.hovered = null;
      this.cursor = this.field.selectionStart;
      onEdit();
    });
    this.field.addEventListener("pointermove", event => this.hover(this.indexAt(event)));
    this.field.addEventListener("pointerleave", () => this.hover(null));
    this.field.addEventListener("click", event => { this.clicked = this.indexAt(event); });
    this.field.addEventListener("keydown", () => { this.clicked = this.hovered = null; });
    document.addEventListener("selectionchange", () => {
      if (document.activeElement !== this.field) return;
      this.cursor = this.field.selectionStart;
      this.mark();
    });
    this.field.addEventListener("focus", () => {
      if (this.cursor !== this.field.selectionStart) this.moveCursor(this.cursor);
    });
  }

  get text() { return this.field.value; }

  // The text before the cursor; a cursor within a character, or behind bytes that are none yet, is at its start.
  get textBeforeCursor() {
    const {text, cursor} = this, isWithin = text.codePointAt(cursor - 1) > 0xffff;  // between its two UTF-16 units
    return text.slice(0, cursor - isWithin).replace(/\ufffd+$/, "");
  }

  // Return the tokens before the cursor, or null if it is within a token. The last one may have bytes of the character
  // behind the cursor.
  tokensBeforeCursor() {
    const {length} = this.textBeforeCursor, count = length && this.ends.indexOf(length) + 1;
    return length && !count ? null : this.tokens.slice(0, count);
  }

  // Return the token under the pointer, else the one that was clicked, else the one before the cursor.
  get selected() {
    const cursor = this.field.readOnly ? 0 : this.cursor;
    const before = cursor ? this.ends.findIndex((end, i) => cursor <= end && this.tokens[i].text) : -1;
    const index = this.hovered ?? this.clicked ?? before;
    return index in this.tokens ? index : null;
  }

  // Show tokens, and after them the text that has no tokens yet.
  set(tokens, rest = "") {
    const changed = tokens.findIndex((token, i) => token !== this.tokens[i]);
    let same = 0;
    while (same < tokens.length && tokens[same].text === this.tokens[same]?.text) same++;
    this.spans.splice(same).forEach(span => span.remove());
    this.ends.length = same;
    this.add(tokens.slice(same));
    this.rest.textContent = rest;
    this.tokens = tokens;
    const text = joined(tokens) + rest;
    if (this.text !== text) {
      this.field.value = text;  // moves the cursor to the end
      this.cursor = text.length;
    }
    if (changed >= 0) this.paint(changed);
    this.mark();
  }

  moveCursor(offset) {
    this.cursor = offset;
    this.field.setSelectionRange(offset, offset);
  }

  // Show the tokens of a prompt and those that an iterator generates after it. Showing takes at most a third of the time.
  async write(prompt, generated, {onToken = () => {}, isCurrent}) {
    const tokens = [...prompt];
    let timer = 0, pause = 16;
    this.follow(() => this.set([...tokens]));
    const show = () => {
      const start = performance.now();
      this.follow(() => this.append(tokens.slice(this.tokens.length)));
      timer = 0;
      pause = Math.max(16, 2 * (performance.now() - start));
    };
    try {
      for await (const token of generated) {
        tokens.push(writable(token));
        onToken();
        timer ||= setTimeout(show, pause);
      }
    } finally {
      clearTimeout(timer);
      if (isCurrent()) this.follow(() => this.set(tokens));  // else something else is written there
    }
  }

  // Show more tokens, which the field gets later: to write its text again each time would take longer and longer.
  append(tokens) {
    const from = this.spans.length;
    this.add(tokens);
    this.tokens.push(...tokens);
    this.paint(from);
  }

  add(tokens) {
    const spans = tokens.map(({text}) => make("span", {class: "token"}, text));
    for (const {text} of tokens) this.ends.push((this.ends.at(-1) ?? 0) + text.length);
    this.spans.push(...spans);
    this.rest.before(...spans);
  }

  // Show the tokens up to the first change of the text, and the rest without colors.
  keepUnchanged() {
    let kept = 0;
    const {text, tokens, ends} = this;
    while (kept < tokens.length && text.startsWith(tokens[kept].text, ends[kept] - tokens[kept].text.length)) kept++;
    this.set(tokens.slice(0, kept), text.slice(ends[kept - 1] ?? 0));
  }

  // Color the first tokens by attention weights, or with null each token by its probability.
  shade(weights) {
    this.shading = weights;
    this.paint();
  }

  paint(from = 0) {
    for (let i = from; i < this.spans.length; i++) {
      const {logprob} = this.tokens[i], weight = this.shading?.[i];
      const style = this.shading ? weight !== undefined && color("attention", Math.sqrt(weight))
        : logprob !== null && color("probability", expected(logprob));
      paint(this.spans[i], style || null);
    }
  }

  // Underline the tokens of spans {start, end}, offsets in the text.
  underline(spans) {
    this.spans.forEach((element, i) => {
      const end = this.ends[i], start = end - this.tokens[i].text.length;
      element.classList.toggle("copied", spans.some(span => span.start < end && start < span.end));
    });
  }

  hover(index) {
    if (index === this.hovered) return;
    this.hovered = index;
    this.mark();
  }

  mark() {
    const {selected} = this;
    this.layer.querySelector(".selected")?.classList.remove("selected");
    this.spans[selected]?.classList.add("selected");
    this.onSelect(selected);
  }

  indexAt({clientX, clientY}) {
    const span = document.elementsFromPoint(clientX, clientY).find(element => element.parentElement === this.layer);
    const index = this.spans.indexOf(span);
    return index < 0 ? null : index;
  }

  // Change the text, and keep its end in view if it was.
  follow(change) {
    const atEnd = this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight < 60;
    change();
    if (atEnd) this.root.scrollTop = this.root.scrollHeight;
  }
}
