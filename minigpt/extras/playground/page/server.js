// The page of scripts/serve.py: the models run on the server.

import {start} from "./app.js";

class ServerBackend {
  constructor(models) {
    this.models = models;
  }

  describe = model => json(`models/${encodeURIComponent(model)}`);
  history = (model, signal) => json(`history/${encodeURIComponent(model)}`, undefined, signal);
  learned = model => json(`learning/${encodeURIComponent(model)}`);

  originality = (model, text, signal) => json("originality", {model, text}, signal);

  async score(model, text, signal) {
    return (await json("score", {model, text}, signal)).tokens;
  }

  // Return the tokens of a question, up to the start of its answer.
  async chat(model, text, signal) {
    return (await json("chat", {model, text}, signal)).tokens;
  }

  async decode(model, ids, signal) {
    return (await json("score", {model, ids}, signal)).tokens.map(({text}) => text).join("");
  }

  async attention(model, ids, layer, head, signal) {
    const response = await request("attention", {model, ids, layer, head}, signal);
    return new Float32Array(await response.arrayBuffer());  // little-endian, like every processor that runs a browser
  }

  async *generate(model, ids, settings, signal) {
    try {
      const response = await request("generate", {model, ids, ...settings}, signal);
      const decoder = new TextDecoder();
      let rest = "";  // the beginning of an incomplete line
      for await (const part of parts(response.body)) {
        const lines = (rest + decoder.decode(part, {stream: true})).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          const token = JSON.parse(line);
          if (token.error) throw new Error(token.error);
          yield token;
        }
        await frame();
      }
    } catch (error) {
      if (error.name === "TypeError") throw new Error("the connection to the server was lost");
      if (error.name !== "AbortError") throw error;
    }
  }
}

// Let the browser handle events and render a frame: a stream that always has data would keep it from both.
const frame = () => new Promise(resolve => {
  requestAnimationFrame(() => setTimeout(resolve));
  setTimeout(resolve, 100);  // of a page that is not seen, no frame is rendered
});

async function json(...given) {
  return (await request(...given)).json();
}

async function* parts(stream) {  // Safari cannot iterate over a stream
  const reader = stream.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    await reader.cancel().catch(() => {});  // ends the request if the caller stops early
  }
}

// Send a request to the API, and ask the user for the key if the server requires one. An error with `isRefusal` is an
// answer that the same request gets again.
async function request(path, body, signal) {
  const key = sessionStorage.getItem("key");
  const headers = {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
  const options = body ? {method: "POST", body: JSON.stringify(body)} : {};
  const response = await fetch(`api/${path}`, {...options, headers, signal}).catch(error => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  });
  if (response.status === 401) {
    const known = sessionStorage.getItem("key");  // another request may have asked meanwhile
    const question = `${key ? "That key is wrong. " : ""}Key of the server (its --api-key or MINIGPT_API_KEY)`;
    const given = known === key ? window.prompt(question) : known;
    if (given) {
      setKey(given);
      return request(path, body, signal);
    }
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => null);  // of a proxy, it is a page
    const message = answer?.error?.message ?? `the server answers with status ${response.status}`;
    throw Object.assign(new Error(message), {isRefusal: [400, 401, 403, 404].includes(response.status)});
  }
  return response;
}

const setKey = key => sessionStorage.setItem("key", key.replace(/[^!-~]/g, ""));  // headers hold ASCII only

async function connect() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key) {
    setKey(key);
    history.replaceState(null, "", location.pathname);  // removes the key from the address
  }
  const models = (await json("../v1/models")).data.map(({id}) => id);
  if (!models.length) throw new Error("the server has no model left; restart it with a run");
  return new ServerBackend(models);
}

addEventListener("hashchange", () => location.reload());
start(connect());
