// Make elements, and name what they show.

export const find = id => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const SYMBOLS = {"\n": "⏎", "\t": "⇥", " ": "␣", "": "∅"};

// A token with its invisible characters shown.
export const visible = text => SYMBOLS[text] ?? text.replace(/[\n\t]|^ | $/g, character => SYMBOLS[character]);

export const percent = p => p >= 0.9995 ? "100 %" : `${Number((100 * p).toPrecision(p < 0.0001 ? 1 : 3))} %`;

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
