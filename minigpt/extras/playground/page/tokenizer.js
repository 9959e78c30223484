// The tokenizers of minigpt/data/tokenizer.py: characters, bytes and byte-pair encodings.

const QUESTION = "\ufdd1", MARKS = /[\ufdd0-\ufdd4]/g;  // of minigpt/extras/conversations

export class Tokenizer {
  // values: the tokenizer's to_dict; `start`: the ids of an empty text; `pattern`: splits a text before the merges;
  // `reads_special`: names of special tokens in a text are these; `chat`: a question, whose text is QUESTION, and the
  // start of an answer.
  constructor(values) {
    this.values = values;
    this.special = new Map(Object.entries(values.special));
    this.names = new Map([...this.special].map(([name, id]) => [id, name]));
    const longest = [...this.special.keys()].sort((a, b) => b.length - a.length);
    const escaped = longest.map(name => name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    this.named = new RegExp(`(${escaped.join("|") || "(?!)"})`, "g");
    if (values.name === "char") {
      this.tokens = [...values.alphabet].map(utf8);
      this.ids = new Map([...values.alphabet].map((character, id) => [character, id]));
    } else if (values.name === "byte") {
      this.tokens = Array.from({length: 256}, (_, byte) => String.fromCharCode(byte));
    } else {
      this.pattern = toRegExp(values.pattern);
      this.tokens = values.tokens.split(" ").map(token => token === "-" ? null : atob(token));
      this.ids = new Map(this.tokens.map((token, id) => [token, id]));
    }
  }

  // Return the ids of a text to continue or to score.
  parse(text) { return this.values.reads_special ? this.split(text, part => part) : this.encode(text); }

  // Return the ids of a question, in which names of special tokens are ordinary text, and of the start of its answer.
  ask(question) {
    return this.split(this.values.chat, part => part.replaceAll(QUESTION, () => question).replace(MARKS, ""));
  }

  split(text, fill) {
    return text.split(this.named).flatMap(part => this.special.get(part) ?? this.encode(fill(part)));
  }

  // Return the ids of a text; throw an Error for characters without an id.
  encode(text) {
    if (this.values.name === "byte") return Array.from(utf8(text), byte => byte.charCodeAt(0));
    if (this.values.name !== "char") {
      const wellFormed = text.replace(/\p{Surrogate}/gu, "\ufffd");  // of lone ones, as in toWellFormed of 2023
      return (wellFormed.match(this.pattern) ?? []).flatMap(piece => this.merge(utf8(piece)));
    }
    const unknown = [...new Set(text)].filter(character => !this.ids.has(character));
    if (unknown.length) throw new Error(`the model was trained without ${JSON.stringify(unknown).slice(1, -1)}`);
    return Array.from(text, character => this.ids.get(character));
  }

  has(id) {
    return this.names.has(id) || (this.tokens[id] ?? null) !== null;
  }

  // Return a function that maps the next id to the text that it completes; at the end, call it without an id.
  decoder() {
    const decoder = new TextDecoder("utf-8", {ignoreBOM: true});
    return id => {
      if (id === undefined) return decoder.decode();
      const token = this.names.has(id) ? "" : this.tokens[id] ?? utf8("\ufffd");
      return decoder.decode(Uint8Array.from(token, byte => byte.charCodeAt(0)), {stream: true});
    };
  }

  // Decode ids that follow no others.
  decode(ids) {
    const decode = this.decoder();
    return ids.map(id => decode(id)).join("") + decode();
  }

  // Merge the pair whose token has the lowest id, until no pair is a token.
  merge(bytes) {
    if (this.ids.has(bytes)) return [this.ids.get(bytes)];
    const parts = [...bytes], pair = i => this.ids.get(parts[i] + parts[i + 1]) ?? Infinity;
    const ranks = parts.map((_, i) => i + 1 < parts.length ? pair(i) : Infinity);  // of each pair (i, i + 1)
    for (;;) {
      let best = 0;
      for (let i = 1; i < ranks.length; i++) if (ranks[i] < ranks[best]) best = i;
      if (ranks[best] === Infinity) return parts.map(part => this.ids.get(part));
      parts.splice(best, 2, parts[best] + parts[best + 1]);
      ranks.splice(best + 1, 1);
      ranks[best] = best + 1 < parts.length ? pair(best) : Infinity;
      if (best > 0) ranks[best - 1] = pair(best - 1);
    }
  }
}

// Translate a pattern of tiktoken. Possessive quantifiers become ordinary ones, with which these patterns match the
// same; \s has a few other characters in JavaScript; groups that ignore the case are missing in older browsers.
function toRegExp(pattern) {
  const anyCase = letter => `[${letter}${letter.toUpperCase()}${letter === "s" ? "ſ" : ""}]`;
  const source = pattern
    .replace(/([+*?}])\+/g, "$1")
    .replaceAll("\\s", "\\p{White_Space}")
    .replaceAll("\\S", "\\P{White_Space}")
    .replace(/\(\?i:(.*?)\)/g, (_, group) => `(?:${group.replace("[sdmt]", "s|d|m|t").replace(/[a-z]/g, anyCase)})`);
  return new RegExp(source, "gu");
}

// UTF-8 with one character per byte, which can be the key of a Map; lone surrogates become the replacement character.
function utf8(text) {
  return Array.from(new TextEncoder().encode(text), byte => String.fromCharCode(byte)).join("");
}
