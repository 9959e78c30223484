// The page: one text that is the prompt and the output, and the settings.

const WORK_MS = 40;  // of generation between two updates of the page

const find = id => document.getElementById(id);
const data = JSON.parse(find("data").textContent);
const model = new GPT(data.config, readWeights(find("weights").textContent, data.tensors, data.format));
const tokenizer = new Tokenizer(data.tokenizer);
find("weights").remove();  // the text is not needed any more

let running = false, stopped = false;
let before = "";  // the text before the last generation

function settings() {
  const [count, seed, temperature, topK, topP, minP] = ["tokens", "seed", "temperature", "top-k", "top-p", "min-p"]
    .map(id => find(id).valueAsNumber);
  return {count, seed, temperature, topK: topK || null, topP, minP};  // NaN: an empty field
}

// Yield the tokens that follow a prompt, and null after each token of the prompt, so that the caller can pause.
function* generate(prompt, {count, seed, ...sampling}) {
  const random = new Random(seed), context = prompt.slice(-data.config.block_size);
  model.reset();
  for (const token of context.slice(0, -1)) {
    model.forward(token);
    yield null;
  }
  for (let i = 0, token = context.at(-1); i < count; i++) {
    token = draw(model.step(token), sampling, random);
    if (token === data.tokenizer.stop) return;
    yield token;
  }
}

// Generate, and update the page every WORK_MS milliseconds.
async function run() {
  const text = find("text"), decode = tokenizer.decoder();
  before = text.value;
  stopped = false;
  const tokens = generate(tokenizer.encode(before), settings());
  show(true, "Reading the prompt …");
  find("speed").textContent = "";
  let count = 0, seconds = 0, done = false;
  while (!stopped && !done) {
    await new Promise(resolve => setTimeout(resolve));
    const start = performance.now();
    let added = "";
    for (let now = start; !stopped && !done && now - start < WORK_MS;) {
      const next = tokens.next(), end = performance.now();
      done = next.done;
      if (!done && next.value !== null) {
        added += decode(next.value);
        count += 1;
        seconds += (end - now) / 1000;
      }
      now = end;
    }
    append(text, done || stopped ? added + decode() : added);
    if (count) {
      find("status").textContent = "";
      find("speed").textContent = `${count} tokens, ${Math.round(count / seconds)} tokens/s`;
    }
  }
  show(false, done ? "Done." : "Stopped.");
}

function append(text, added) {
  const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  text.setRangeText(added, text.value.length, text.value.length, "end");
  if (atEnd) text.scrollTop = text.scrollHeight;
}

function show(generating, status, isError = false) {
  running = generating;
  find("generate").textContent = generating ? "Stop" : "Generate";
  find("text").readOnly = generating;
  find("undo").disabled = generating || find("text").value === before;
  find("status").textContent = status;
  find("status").classList.toggle("error", isError);
}

find("form").addEventListener("submit", event => {
  event.preventDefault();
  stopped = true;
  if (!running) run().catch(error => show(false, error.message, true));
});
find("undo").addEventListener("click", () => {
  find("text").value = before;
  find("text").focus();
  show(false, "");
});
find("text").addEventListener("input", () => { find("undo").disabled = true; });  // which would undo the input too
document.addEventListener("keydown", event => {
  if (event.key === "Escape") stopped = true;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();  // a field or button would submit the form too
    if (!running) find("form").requestSubmit();
  }
});
for (const input of document.querySelectorAll("input[type=range]")) {
  const update = () => { input.parentElement.querySelector("output").value = input.value; };
  input.addEventListener("input", update);
  update();
}
