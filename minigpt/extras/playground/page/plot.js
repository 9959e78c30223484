// A plot of lines over the steps of a training, in SVG.

import {make} from "./dom.js";

const HEIGHT = 240;  // pixels; the width is that of the page, so that texts keep their size

// Return a legend and a plot, which is drawn again when its width changes.
//
// lines: {kind: a CSS class, text: in the legend unless empty, points: [x, y], dots: whether to draw each point}.
// names: the texts of x = 0, 1, …; null: x is a step. mark: the x of a vertical line, unless negative.
export function linePlot({label, lines, names = null, mark = -1}) {
  const named = lines.filter(line => line.text);
  const legend = make("p", {class: "legend"}, ...named.map(line => make("span", {class: line.kind}, line.text)));
  const summary = `${label}: ${named.map(line => line.text).join(", ")}`;
  const plot = make("div", {class: "plot", role: "img", "aria-label": summary});
  const draw = () => {
    if (plot.clientWidth) plot.replaceChildren(drawLines(label, lines, names, mark, plot.clientWidth));
  };
  new ResizeObserver(draw).observe(plot);
  return make("div", {}, legend, plot);
}

function drawLines(label, lines, names, mark, width) {
  const left = 44, right = width - 14, top = 30, bottom = HEIGHT - 26;
  const points = lines.flatMap(line => line.points), values = points.map(([, value]) => value);
  const last = Math.max(1, ...points.map(([x]) => x)), lowest = Math.min(...values), highest = Math.max(...values);
  const tick = roundTick((highest - lowest) / 6), low = Math.floor(lowest / tick);
  const x = axis(0, last, roundTick(80 * last / width), left, right);
  const y = axis(low * tick, Math.max(low + 1, Math.ceil(highest / tick)) * tick, tick, bottom, top);
  const every = Math.ceil((names?.length ?? 0) * 44 / width);
  const xTicks = names?.map((text, i) => [x.place(i), text]).filter((_, i) => i % every === 0) ?? x.ticks;
  const parts = [
    svg("text", {x: 0, y: 12}, label),
    svg("text", {x: 0, y: bottom + 20}, "step"),
    ...xTicks.map(([at, text]) => svg("text", {x: Math.max(at, left), y: bottom + 20, "text-anchor": "middle"}, text)),
    ...y.ticks.flatMap(([at, text]) => [svg("line", {x1: left, x2: right, y1: at, y2: at}),
      svg("text", {x: left - 8, y: at, "text-anchor": "end", "dominant-baseline": "central"}, text)]),
  ];
  for (const {kind, dots, points} of lines) {
    const places = points.map(([step, value]) => [x.place(step), y.place(value)]);
    parts.push(svg("polyline", {class: kind, points: places.join(" ")}));
    if (dots) parts.push(...places.map(([cx, cy]) => svg("circle", {cx, cy, r: 3})));
  }
  if (mark >= 0) parts.push(svg("line", {class: "mark", x1: x.place(mark), x2: x.place(mark), y1: top, y2: bottom}));
  return svg("svg", {width, height: HEIGHT}, ...parts);
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
