// The weights in the page: all tensors, one after the other, in base64, from minigpt/extras/playground/export_html.py.

// Return Float32Arrays by name. tensors: [name, shape] of each. format: that of the matrices; vectors are float32.
export function readWeights(base64, tensors, format) {
  const text = atob(base64), bytes = new Uint8Array(text.length), halves = format === "float16" && floatsOfHalves();
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  let offset = 0;
  const take = (type, count) => {
    const start = offset;
    offset += count * type.BYTES_PER_ELEMENT;
    return new type(bytes.buffer.slice(start, offset));  // a copy, because the start may not be a multiple of 4
  };
  return Object.fromEntries(tensors.map(([name, [rows, columns]]) => {
    const size = rows * (columns ?? 1);
    if (columns === undefined || format === "float32") return [name, take(Float32Array, size)];
    const stored = take(Uint16Array, size), values = new Float32Array(size);
    for (let i = 0; i < size; i++) values[i] = halves[stored[i]];
    return [name, values];
  }));
}

// The value of each float16 by its bits.
function floatsOfHalves() {
  return Float32Array.from({length: 1 << 16}, (_, bits) => {
    const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = (bits & 1023) / 1024;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  });
}
