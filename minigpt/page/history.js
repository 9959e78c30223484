// The history of the training: the loss curves, and the samples of each validation.

import {make} from "./dom.js";

const CURVES = {train_loss: "training loss", val_loss: "validation loss"};
const PLOT_HEIGHT = 240;  // pixels; the width is that of the page, so that texts keep their size

// Fill `root` with the curves and the samples of a model, or with a line of text if there are none.
export async function showHistory(root, backend, model) {
  const content = make("div", {class: "history"});
  root.replaceChildren(content);  // a late response for another model is then lost with its element
  try {
    const history = await backend.history(model), names = Object.keys(CURVES).filter(name => history?.[name].length);
    if (names.length) content.append(...curves(history, names));
    else content.append(make("p", {class: "soft"}, "This run has no readable metrics.csv."));
    if (history?.samples.length) content.append(...sampleViewer(history.samples));
  } catch ({message}) {
    content.append(make("p", {class: "error", role: "alert"}, message));
  }
}

function curves(history, names) {
  const legend = make("p", {class: "legend"}, ...names.map(name => {
    const [step, loss] = history[name].at(-1);
    return make("span", {class: name}, `${CURVES[name]} ${loss.toFixed(3)} at step ${step.toLocaleString("en")}`);
  }));
  const last = [...legend.children].map(({textContent}) => textContent).join(", ");
  const plot = make("div", {class: "plot", role: "img", "aria-label": `Curves that end with ${last}`});
  const draw = () => { if (plot.clientWidth) plot.replaceChildren(plotCurves(history, names, plot.clientWidth)); };
  new ResizeObserver(draw).observe(plot);
  return [legend, plot];
}

function plotCurves(history, names, width) {
  const left = 44, right = width - 14, top = 30, bottom = PLOT_HEIGHT - 26;
  const points = names.flatMap(name => history[name]), losses = points.map(([, loss]) => loss);
  const lastStep = Math.max(1, ...points.map(([step]) => step));
  const lowest = Math.min(...losses), highest = Math.max(...losses);
  const tick = roundTick((highest - lowest) / 6), low = Math.floor(lowest / tick);
  const x = axis(0, lastStep, roundTick(80 * lastStep / width), left, right);
  const y = axis(low * tick, Math.max(low + 1, Math.ceil(highest / tick)) * tick, tick, bottom, top);
  const parts = [
    svg("text", {x: 0, y: 12}, "loss (nats per token)"),
    svg("text", {x: 0, y: bottom + 20}, "step"),
    ...x.ticks.map(([at, text]) => svg("text", {x: at, y: bottom + 20, "text-anchor": "middle"}, text)),
    ...y.ticks.flatMap(([at, text]) => [svg("line", {x1: left, x2: right, y1: at, y2: at}),
      svg("text", {x: left - 8, y: at, "text-anchor": "end", "dominant-baseline": "central"}, text)]),
  ];
  for (const name of names) {
    const places = history[name].map(([step, loss]) => [x.place(step), y.place(loss)]);
    parts.push(svg("polyline", {class: name, points: places.join(" ")}));
    if (name === "val_loss") parts.push(...places.map(([cx, cy]) => svg("circle", {cx, cy, r: 3})));
  }
  return svg("svg", {width, height: PLOT_HEIGHT}, ...parts);
}

// Return the least of … 0.1, 0.2, 0.5, 1, 2, 5, 10, 20 … that is at least a distance.
function roundTick(distance) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(distance, 1e-4)));
  return unit * [1, 2, 5, 10].find(factor => factor * unit >= distance);
}

// Return a function from values to places, and the places and texts of the ticks.
function axis(low, high, tick, start, end) {
  const place = value => start + (end - start) * (value - low) / (high - low);
  const decimals = Math.max(0, -Math.floor(Math.log10(tick) + 1e-9));
  const format = {minimumFractionDigits: decimals, maximumFractionDigits: decimals};
  const ticks = Array.from({length: Math.floor((high - low) / tick + 1e-6) + 1}, (_, i) => low + i * tick);
  return {place, ticks: ticks.map(value => [place(value), value.toLocaleString("en", format)])};
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function sampleViewer(samples) {
  const last = samples.length - 1, output = make("output"), text = make("pre", {tabindex: 0, "aria-label": "Sample"});
  const range = make("input", {type: "range", min: 0, max: last, value: last});
  const show = () => {
    const sample = samples[range.valueAsNumber];
    output.value = range.ariaValueText = `step ${sample.step.toLocaleString("en")}`;
    text.textContent = sample.text;
  };
  range.addEventListener("input", show);
  show();
  return [make("label", {}, "Sample ", output, ...last ? [range] : []), text];
}
