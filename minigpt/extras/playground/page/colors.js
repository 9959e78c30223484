// The colors of probabilities and attention weights: stops from 0 to 1, in the light and in the dark scheme.

const PALETTES = {
  probability: { // warm is surprising, cool is expected; people with any common color blindness can tell them apart
    light: ["#e2622f", "#f4b183", "#f3efe6", "#a9d0ec", "#5ba6dd"],
    dark: ["#bb4717", "#7c3a1c", "#2b2c31", "#1f4d70", "#1f71ad"],
  },
  attention: {
    light: ["#ffffff", "#d3c4ff", "#a384f7", "#6a3fd1", "#38158a"],
    dark: ["#191b20", "#412f88", "#6e4ecb", "#a78dff", "#efe9ff"],
  },
};
const LOWEST = -3;  // the scale of probabilities ends at 10⁻³

export const scheme = matchMedia("(prefers-color-scheme: dark)");

// Return the place of a probability in its palette, given the natural logarithm of the probability.
export const expected = logprob => Math.min(1, Math.max(0, 1 - logprob / Math.LN10 / LOWEST));

// Return a background and the color of text on it; their contrast is at least 4.58.
export function color(palette, x) {
  const stops = PALETTES[palette][scheme.matches ? "dark" : "light"];
  const at = Math.min(x, 0.99999) * (stops.length - 1), low = Math.floor(at);
  const rgb = [1, 3, 5].map(k => {
    const [a, b] = [stops[low], stops[low + 1]].map(stop => parseInt(stop.slice(k, k + 2), 16));
    return Math.round(a + (b - a) * (at - low));
  });
  const [r, g, b] = rgb.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return {background: `rgb(${rgb})`, color: luminance > 0.179 ? "#000" : "#fff"};
}

export function paint(element, style) {
  element.style.background = style?.background ?? "";
  element.style.color = style?.color ?? "";
}
