// Make elements, and format what they show.

export const find = id => document.getElementById(id);

export function showStatus(text, isError = false) {
  find("status").textContent = text;
  find("status").classList.toggle("error", isError);
}

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const SYMBOLS = {"\n": "⏎", "\t": "⇥", " ": "␣", "": "∅"};

// Return a token with symbols in place of its invisible characters.
export const visible = text => SYMBOLS[text] ?? text.replace(/[\n\t]|^ | $/g, character => SYMBOLS[character]);

export const percent = p => p >= 0.9995 ? "100 %" : `${Number((100 * p).toPrecision(p < 0.0001 ? 1 : 3))} %`;

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
