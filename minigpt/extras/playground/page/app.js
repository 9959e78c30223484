// The page: a text that is both prompt and output, a second text to compare it with, their tokens and their losses.

import {AttentionPanel} from "./attention.js";
import {color, scheme} from "./colors.js";
import {find, make, percent, plural, showStatus} from "./dom.js";
import {HistoryPanel} from "./history.js";
import {compareLosses} from "./losses.js";
import {OriginalityPanel} from "./originality.js";
import {readSettings, showRanges} from "./settings.js";
import {TextPane, joined, writable} from "./text.js";
import {Timeline} from "./timeline.js";
import {TokenPanel} from "./tokens.js";
import {Undo} from "./undo.js";

const TYPING_MS = 300;  // from the last key press to the scoring of the text
const PAUSE_MS = 1000;  // text that is typed without such a pause is one step of undo
const DOUBLE_CLICK_MS = 300;  // the second click does not stop what the first one started

// Start the page with the backend of server.js or browser.js, or with a promise of it.
export async function start(backend) {
  try {
    globalThis.backend = await backend;  // also for the console of the browser
    await new Page(globalThis.backend).load();
  } catch (error) {
    showStatus(error.message, true);
  }
}

class Page {
  constructor(backend) {
    this.backend = backend;
    this.first = new TextPane(find("first"), {onEdit: () => this.edited(), onSelect: i => this.select(this.first, i)});
    this.second = new TextPane(find("second"), {onSelect: i => this.select(this.second, i)});
    this.token = new TokenPanel(find("token"), (...choice) => this.replace(...choice));
    this.attention = new AttentionPanel(find("attention"), backend, {
      onShade: weights => this.shade(weights),
      onChoose: () => this.history.refresh(),
    });
    this.timeline = new Timeline(find("time"), backend, {
      onMove: () => this.travel(),
      onEnd: () => this.rescore(),
      onHistory: () => this.history.refresh(),
    });
    this.history = new HistoryPanel(find("history"), this.timeline, this.attention);
    this.originality = new OriginalityPanel(find("originality"), backend, this.first);
    this.states = new Undo();
    this.lastEdit = -Infinity;
    this.work = null;  // an AbortController while something is generated or scored
    this.generating = false;
    this.scored = null;  // the name of the model that has scored the text
    this.comparison = null;  // {model: another one}, or {}: the continuation of the text by the same model
    this.listen();
  }

  // The name of the run, with the step that the time machine shows.
  get model() {
    const {step} = this.timeline;
    return find("model").value + (step === null ? "" : `@${step}`);
  }

  listen() {
    const {backend} = this;
    for (const id of ["model", "other"]) find(id).append(...backend.models.map(name => make("option", {}, name)));
    for (const label of document.querySelectorAll(".picker")) label.hidden = backend.models.length < 2;
    find("originality").parentElement.hidden = !backend.originality;
    find("model").addEventListener("change", () => this.load());
    find("other").addEventListener("change", ({target: {value}}) => this.compare(value ? {model: value} : null));
    find("close").addEventListener("click", () => this.compare(null));
    find("form").addEventListener("submit", event => {
      event.preventDefault();
      if (!this.generating) this.generate();
      else if (performance.now() - this.started > DOUBLE_CLICK_MS) this.work.abort();
    });
    find("ask").addEventListener("click", () => this.generate({isQuestion: true}));
    find("undo").addEventListener("click", () => this.goBack("undo"));
    this.first.field.addEventListener("beforeinput", () => { this.unedited = this.snapshot(); });
    document.addEventListener("keydown", event => this.press(event));
    scheme.addEventListener("change", () => {
      this.second.paint();
      this.shade(this.first.shading);
    });
    for (const panel of document.querySelectorAll("details")) {
      panel.addEventListener("toggle", () => this.toggled(panel));
    }
    showRanges();
    this.shade(null);
    this.setGenerating(false);
  }

  press(event) {
    const command = event.ctrlKey || event.metaKey, key = event.key.toLowerCase();
    if (event.key === "Escape" && this.generating) this.work.abort();
    if (!command || event.target.closest("fieldset") && key !== "enter") return;
    if (key === "enter" && !this.generating) this.generate({isQuestion: event.shiftKey && !find("ask").hidden});
    else if (key === "y" || key === "z" && event.shiftKey) this.goBack("redo");
    else if (key === "z") this.goBack("undo");
    else if (key !== "enter") return;
    event.preventDefault();
  }

  toggled(panel) {
    this[panel.lastElementChild.id].visible = panel.open;
    this.select(this.first, this.first.selected);
  }

  // Load the chosen model, and score the text with it.
  async load() {
    const model = find("model").value;
    this.attention.setModel(null);
    this.timeline.watch(model);
    if (this.comparison && !this.comparison.model) this.compare(null);
    this.first.set([], this.first.text);  // removes the colors of the other model
    find("facts").textContent = "";
    find("losses").replaceChildren();
    await this.run(async signal => {
      const description = await this.backend.describe(model);
      if (model !== find("model").value) return;
      find("facts").textContent = description.facts;
      for (const element of document.querySelectorAll(".chat")) element.hidden = !description.chat;
      this.attention.setModel(description);
      await this.score(signal);
    });
  }

  // ── the text ──────────────────────────────────────────────────────────────────────────────────────────────────

  edited() {
    if (performance.now() - this.lastEdit > PAUSE_MS) this.remember(this.unedited);
    this.lastEdit = performance.now();
    this.first.keepUnchanged();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.rescore(), TYPING_MS);
  }

  // Score a text that changed, with the model that it is compared with too.
  rescore() {
    return this.run(async signal => {
      const {comparison} = this;
      if (comparison?.model) await this.scoreOther(signal).catch(() => {});  // the other model may lack a character
      await this.score(signal);
      if (comparison && !comparison.model) await this.continueText(signal);
    });
  }

  // Read the text as the model of another step does, and write its continuation beside it.
  travel() {
    this.attention.rename(this.model);
    this.history.refresh();
    this.compare({});
  }

  async continueText(signal) {
    find("second-name").textContent = `Continued by ${this.model}`;
    const prompt = await this.prompt(signal);
    await this.write(this.second, this.model, prompt, readSettings(), signal);
  }

  async score(signal) {
    const {model} = this;
    this.showTokens(await this.backend.score(model, this.first.text, signal));
    this.scored = model;
    showStatus("");
    await this.showLosses(signal);
  }

  // Show the tokens of the text, unless the tokenizer has changed the text.
  showTokens(tokens) {
    if (joined(tokens) === this.first.text) this.first.set(tokens);
  }

  async scoreOther(signal) {
    const {model} = this.comparison, {text} = this.first;
    find("second-name").textContent = `Text of ${model}`;
    this.second.set([], text);
    this.second.set(await this.backend.score(model, text, signal));
  }

  // Return the tokens before the cursor.
  async prompt(signal) {
    const known = this.scored === this.model ? this.first.tokensBeforeCursor() : null;
    return known ? this.whole(known, signal) : this.backend.score(this.model, this.first.textBeforeCursor, signal);
  }

  // Return the tokens of a question with the text before the cursor, up to the start of its answer.
  question(signal) { return this.backend.chat(this.model, this.first.textBeforeCursor, signal); }

  // Return tokens, or other ones of their text if the last one has bytes of the next character.
  async whole(tokens, signal) {
    const last = tokens.slice(-8), rest = text => text.match(/\ufffd*$/)[0].length;  // more than a character
    if (!last.length) return tokens;
    const decoded = await this.backend.decode(this.model, last.map(({id}) => id), signal);
    return rest(decoded) > rest(joined(last)) ? this.backend.score(this.model, joined(tokens), signal) : tokens;
  }

  // ── generation ────────────────────────────────────────────────────────────────────────────────────────────────

  // Continue the text before the cursor, or answer it, or if there is a token to choose, continue the tokens before and
  // this one.
  async generate({before = null, chosen = null, isQuestion = false} = {}) {
    if (!find("form").reportValidity()) return;
    const settings = {...readSettings(), chat: isQuestion}, unedited = this.snapshot(), {model} = this;
    this.setGenerating(true);
    showStatus("Generating …");
    let count = 0, seconds = 0;
    const onToken = () => {
      count += 1;
      seconds = (performance.now() - this.started) / 1000;
    };
    const succeeded = await this.run(async signal => {
      const prompt = chosen ? this.whole(before, signal) : isQuestion ? this.question(signal) : this.prompt(signal);
      const tokens = chosen ? [...await prompt, chosen] : await prompt;
      const other = this.comparison?.model;
      if (!chosen) this.scored = model;
      const jobs = [this.write(this.first, this.model, tokens, settings, signal, onToken)];
      if (other) jobs.push(this.writeOther(other, joined(tokens), settings, signal));
      for (const {reason} of await Promise.allSettled(jobs)) if (reason) throw reason;
    });
    if (this.first.text !== unedited.text) this.remember(unedited);
    this.setGenerating(false);
    if (succeeded) showStatus(`${plural(count, "token")}, ${Math.round(count / seconds || 0)} tokens/s`);
    const {text, tokens} = this.first, isScored = joined(tokens) === text && this.scored === this.model;  // not stopped
    await (isScored ? this.run(signal => this.showLosses(signal)) : this.rescore());
  }

  // Generate tokens after those of a prompt, and show them in a pane.
  write(pane, model, prompt, settings, signal, onToken) {
    const generated = this.backend.generate(model, prompt.map(({id}) => id), settings, signal);
    return pane.write(prompt, generated, {onToken, isCurrent: () => this.work.signal === signal});
  }

  async writeOther(model, prompt, settings, signal) {
    try {
      const tokens = await this.backend.score(model, prompt, signal);
      await this.write(this.second, model, tokens, settings, signal);
    } catch (error) {
      throw new Error(`${model}: ${error.message}`);
    }
  }

  // Replace a token by an alternative, and continue from there.
  replace(index, alternative) {
    const {tokens} = this.first;
    this.generate({before: tokens.slice(0, index), chosen: writable({...tokens[index], ...alternative})});
  }

  setGenerating(generating) {
    const panels = document.querySelector("aside");
    if (panels.contains(document.activeElement)) this.first.field.focus({preventScroll: true});
    if (generating && document.activeElement === find("ask")) find("generate").focus();
    panels.toggleAttribute("inert", generating);
    this.generating = this.first.field.readOnly = generating;
    if (generating) this.started = performance.now();
    this.select(this.first, this.first.selected);
    find("model").disabled = find("other").disabled = find("close").disabled = generating;
    find("ask").disabled = generating;
    find("undo").disabled = generating || !this.states.possible;
  }

  // Abort the task that runs, and run another with an AbortSignal. If it fails, show its error and return false.
  async run(task) {
    this.work?.abort();
    clearTimeout(this.timer);
    const work = this.work = new AbortController();
    try {
      await task(work.signal);
      return true;
    } catch (error) {
      if (!work.signal.aborted) showStatus(error.message, true);
      return work.signal.aborted;
    }
  }

  // ── undo and comparison ───────────────────────────────────────────────────────────────────────────────────────

  snapshot() {
    return {text: this.first.text, tokens: this.first.tokens, model: this.model};
  }

  remember(snapshot) {
    this.states.remember(snapshot);
    this.lastEdit = -Infinity;
    find("undo").disabled = false;
  }

  // Undo or redo a change of the text.
  goBack(direction) {
    const state = this.generating ? null : this.states[direction](this.snapshot());
    if (state) this.restore(state);
  }

  restore({text, tokens, model}) {
    this.lastEdit = -Infinity;
    find("undo").disabled = !this.states.possible;
    const known = model === this.model ? tokens : [];  // another model has other token ids
    this.first.set(known, text.slice(joined(known).length));
    showStatus("");
    this.rescore();
  }

  compare(comparison) {
    this.comparison = comparison;
    find("other").value = comparison?.model ?? "";
    find("second").hidden = !comparison;
    this.rescore();
  }

  // ── tokens, colors and losses ──────────────────────────────────────────────────────────────────────────────────

  select(pane, index) {
    if (pane === this.second && index === null) [pane, index] = [this.first, this.first.selected];
    if (pane === this.first && index !== null) this.second.clicked = null;
    this.token.show(pane.tokens, index, pane === this.first && !this.generating);
    if (pane === this.second) return;
    this.attention.update(pane.tokens, index);
    this.originality.select(index);
    const atEnd = pane.cursor === pane.text.length;
    find("generate").textContent = this.generating ? "Stop" : atEnd ? "Generate" : "Generate from the cursor";
  }

  shade(weights) {
    this.first.shade(weights);
    const palette = weights ? "attention" : "probability";
    const stops = Array.from({length: 21}, (_, i) => color(palette, i / 20).background);
    find("ramp").style.background = `linear-gradient(to right, ${stops})`;
    find("low").textContent = weights ? "attention 0" : `probability ≤ ${percent(0.001)}`;
    find("high").textContent = weights ? "1" : percent(1);
  }

  // Show the loss of each model on each text.
  async showLosses(signal) {
    const {comparison, model} = this, readers = [{model, pane: this.first}];
    if (comparison?.model) readers.push({model: comparison.model, pane: this.second});
    const table = await compareLosses(this.backend, readers, signal);
    signal.throwIfAborted();
    find("losses").replaceChildren(table);
    this.originality.update(find("model").value, this.first.text);
  }
}
