// The time machine: a slider over the snapshots of a run, which ends with the trained model. A run that trains is
// looked at again and again.

import {make} from "./dom.js";

const PLAY_MS = 900;  // from a step to the next
const POLL_MS = 2000;
const MAX_POLL_MS = 30_000;  // each poll that fails doubles the pause, up to this
const TIMEOUT_MS = 60_000;  // of a poll: after a laptop slept, its connection may never end

export class Timeline {
  history = null; error = "";  // of the run
  learned = []; learnError = "";  // the measurements of its snapshots
  #model = null; #steps = []; #status = ""; #timer = null; #watch = null; #next = null; #measured = 0;

  // onMove(): called when another step is chosen. onHistory(): called when something new is known. onEnd(): called when
  // a run has ended, so that its trained model is another one.
  constructor(root, backend, {onMove, onHistory, onEnd}) {
    Object.assign(this, {root, backend, onMove, onHistory, onEnd});
    this.play = make("button", {type: "button"});
    this.range = make("input", {type: "range", min: 0, "aria-label": "Step of the training"});
    this.output = make("output");
    this.follow = make("input", {type: "checkbox"});
    root.append(this.play, this.range, this.output, make("label", {}, this.follow, " follow"));
    this.range.addEventListener("input", () => { this.#pause(); this.follow.checked = false; this.#move(); });
    this.play.addEventListener("click", () => this.#timer ? this.#pause() : this.#start());
    this.follow.addEventListener("change", () => { if (this.follow.checked) this.#goTo(this.#steps.length - 1); });
    this.#draw();
  }

  // The chosen step, or null for the trained model.
  get step() { return this.#steps[this.range.valueAsNumber] ?? null; }

  // Show the trained model of a run, then what is new, as long as it trains.
  watch(model) {
    Object.assign(this, {history: null, error: "", learned: [], learnError: ""});
    [this.#model, this.#steps, this.#status, this.#measured] = [model, [], "", 0];
    this.#pause();
    clearTimeout(this.#next);
    this.#watch = {};  // until another one
    this.#poll(POLL_MS);
  }

  // Look at the run, and after a pause again if it trains, or if the server did not answer and may do so later.
  async #poll(pause) {
    const watch = this.#watch, controller = new AbortController();
    const timer = setTimeout(() => controller.abort(), TIMEOUT_MS);
    const found = await this.backend.history(this.#model, controller.signal).catch(error => ({error}));
    clearTimeout(timer);
    if (watch !== this.#watch) return;
    const {error = null} = found, isAgain = error && !error.isRefusal;
    const message = error?.name === "AbortError" ? "the server does not answer" : error?.message ?? "";
    const status = isAgain ? this.#status : "";  // the history in a file has none
    this.#update(error ? {...this.history, status} : {status, ...found}, message);
    if (!isAgain && this.#status !== "running") return;
    this.#next = setTimeout(() => this.#poll(isAgain ? Math.min(2 * pause, MAX_POLL_MS) : POLL_MS), pause);
  }

  // Fetch the measurements of the snapshots, unless they are there.
  async learn() {
    const watch = this.#watch, {length} = this.#steps;
    if (length < 2 || length <= this.#measured) return;
    this.#measured = length;
    const found = await this.backend.learned(this.#model).catch(({message}) => ({message}));
    if (watch !== this.#watch) return;
    Object.assign(this, found.message ? {learnError: found.message} : {learned: found, learnError: ""});
    this.onHistory();
  }

  #update(history, error) {
    const {step} = this, before = this.#steps.length;
    const hasEnded = this.#status === "running" && history.status !== "running";
    const isNew = !error || error !== this.error;  // else a screen reader would read it again
    if (this.error && !error) this.#measured = 0;  // what failed with the polls is fetched again
    Object.assign(this, {history, error});
    [this.#steps, this.#status] = [history.steps ?? [], history.status];
    this.range.max = this.#steps.length;
    this.range.value = this.#steps.includes(step) ? this.#steps.indexOf(step) : this.#steps.length;
    if (this.follow.checked && this.#steps.length > before) this.#goTo(this.#steps.length - 1);
    this.follow.checked &&= this.#status === "running";
    this.#draw();
    if (isNew) this.onHistory();
    if (hasEnded && this.step === null) this.onEnd();
  }

  #start() {
    this.#timer = setInterval(() => {
      this.#goTo(this.range.valueAsNumber + 1);
      if (this.step === null) this.#pause();
    }, PLAY_MS);
    this.#goTo(this.step === null ? 0 : this.range.valueAsNumber + 1);
  }

  #pause() {
    clearInterval(this.#timer);
    this.#timer = null;
    this.#draw();
  }

  #goTo(place) {
    this.range.value = place;
    this.#move();
  }

  #move() {
    this.#draw();
    this.onMove();
  }

  #draw() {
    const isRunning = this.#status === "running", name = this.step?.toLocaleString("en");
    this.root.hidden = this.#steps.length < 2;
    this.play.textContent = this.#timer ? "⏸" : "▶";
    this.play.setAttribute("aria-label", this.#timer ? "Pause" : "Play the training");
    const shown = name ? `step ${name}` : isRunning ? "the best model so far" : "the trained model";
    this.range.setAttribute("aria-valuetext", shown);
    const status = this.error || this.#status, ending = ["", "completed"].includes(status) ? "" : ` (${status})`;
    this.output.value = shown + ending;
    this.follow.parentElement.hidden = !isRunning;
  }
}
