// The history of a training: the loss curves, what was learned when, and the samples of each validation.

import {make} from "./dom.js";
import {headName} from "./heads.js";
import {linePlot} from "./plot.js";

const CURVES = {train_loss: "training loss", val_loss: "validation loss"};

export class HistoryPanel {
  #visible = false; #samples = "";

  // timeline: with a history, which may be null, and the measurements of snapshots. attention: with the chosen head,
  // whose lines are emphasized.
  constructor(root, timeline, attention) {
    Object.assign(this, {timeline, attention});
    this.plots = make("div", {class: "history"});
    this.viewer = make("div", {class: "history"});
    root.append(this.plots, this.viewer);
  }

  set visible(visible) {
    this.#visible = visible;
    this.refresh();
  }

  refresh() {
    if (!this.#visible) return;
    const {history, learned, error, learnError, step} = this.timeline;
    this.timeline.learn();
    const names = Object.keys(CURVES).filter(name => history?.[name]?.length);
    const hint = make("p", {class: "soft"}, "This run has no readable metrics.csv.");
    this.plots.replaceChildren(names.length ? lossPlot(history, names) : hint,
      ...[error, learnError].filter(Boolean).map(text => make("p", {class: "error", role: "alert"}, text)),
      ...learned.length > 1 ? learnedPlots(learned, step, this.attention.head) : []);
    const samples = history?.samples ?? [], key = JSON.stringify(samples);
    if (key !== this.#samples) this.viewer.replaceChildren(...samples.length ? sampleViewer(samples) : []);
    this.#samples = key;
  }
}

function lossPlot(history, names) {
  return linePlot({label: "loss (nats per token)", lines: names.map(name => {
    const [step, loss] = history[name].at(-1);
    const text = `${CURVES[name]} ${loss.toFixed(3)} at step ${step.toLocaleString("en")}`;
    return {kind: name, text, points: history[name], dots: name === "val_loss"};
  })});
}

// learned: {step, kinds: losses by name, previous and induction: scores of heads by layer, or null} of each snapshot.
function learnedPlots(learned, step, [layer, head]) {
  const mark = learned.findIndex(snapshot => snapshot.step === step);
  const plot = (label, lines) => linePlot({label, lines, mark, names: learned.map(({step}) => String(step))});
  const line = (kind, text, value) => ({kind, text, points: learned.map((snapshot, x) => [x, value(snapshot)])});
  const kinds = Object.keys(learned[0].kinds).map((name, i) => line(`kind-${i}`, name, ({kinds}) => kinds[name]));
  const scores = name => learned[0][name].flatMap((heads, l) => heads.map((_, h) => {
    const isChosen = l === layer && (head === null || h === head), text = isChosen ? headName([l, h]) : "";
    return line(isChosen ? "val_loss" : "train_loss", text, snapshot => snapshot[name][l][h]);
  }));
  const plots = {previous: "attention to the previous token, per head", induction: "induction score, per head"};
  return [plot("loss by kind of token", kinds),
    ...Object.entries(plots).filter(([name]) => learned[0][name]).map(([name, label]) => plot(label, scores(name)))];
}

function sampleViewer(samples) {
  const last = samples.length - 1, output = make("output"), text = make("pre", {tabindex: 0, "aria-label": "Sample"});
  const range = make("input", {type: "range", min: 0, max: last, value: last});
  const show = () => {
    const sample = samples[range.valueAsNumber];
    output.value = `step ${sample.step.toLocaleString("en")}`;
    range.setAttribute("aria-valuetext", output.value);
    text.textContent = sample.text;
  };
  range.addEventListener("input", show);
  show();
  return [make("label", {}, "Sample ", output, ...last ? [range] : []), text];
}
