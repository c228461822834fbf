/** The page: its controls, the text with its colors, and the selected token. */

const SLICE_MS = 80; // of work between two updates of the page
const byId = (id) => document.getElementById(id);
const range = (count) => [...Array(count).keys()];
const percent = (share) => (share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(1)}%`);
const decoder = () => new TextDecoder("utf-8", { ignoreBOM: true });

const data = JSON.parse(byId("runs").textContent);
const runs = []; // those that were used
let text; // {run, tokens, promptLength, labels, decoder}
let selected = null; // index of a token of the text
let work = null; // the generator that is running
let attending = null; // the last one for attention, which anything else may end

/**
 * Runs a generator, and calls show() from time to time. Newer work ends it, and so does Stop.
 * Half of the time is left to the browser, because long texts take long to lay out.
 */
async function runSteps(steps, show) {
  work = steps;
  byId("stop").disabled = false;
  for (let pause = 0; work === steps; ) {
    const end = performance.now() + Math.max(SLICE_MS, pause);
    while (work && performance.now() < end) if (steps.next().done) stop();
    const start = performance.now();
    show();
    await new Promise((resolve) => setTimeout(resolve));
    pause = performance.now() - start;
  }
}

function stop() {
  work = null;
  byId("stop").disabled = true;
}

// Actions

/** Generates from the prompt, or scores the text. */
function submit(event) {
  event.preventDefault();
  byId("message").textContent = "";
  const number = byId("run").selectedIndex;
  runs[number] ??= loadRun(data[number]);
  const { tokenizer, model } = runs[number];
  const isScore = event.submitter?.value === "score";
  try {
    const given = byId("text").value;
    const ids = given || isScore ? tokenizer.encode(given) : tokenizer.start;
    if (isScore && ids.length < 2) throw new Error("A score needs a text of two tokens or more.");
    const tokens = ids.map((id) => ({ id, start: 0, logprob: null, likely: [] }));
    model.cached = [];
    openText(runs[number], tokens, isScore ? 0 : tokens.length);
  } catch (error) {
    byId("message").textContent = error.message;
    return;
  }
  byId("output").scrollIntoView({ block: "nearest" });
  if (isScore) runSteps(score(text.run, text.tokens), showScore);
  else continueText();
}

function showScore() {
  showText();
  const { run, tokens } = text;
  const scored = tokens.filter((token) => token.logprob !== null);
  const count = `${scored.length.toLocaleString("en")} tokens`;
  if (scored.length < tokens.length - 1) {
    showStatus(`${count} of ${(tokens.length - 1).toLocaleString("en")}`);
    return;
  }
  const loss = -scored.reduce((sum, token) => sum + token.logprob, 0) / scored.length;
  const size = scored.reduce((sum, { id }) => sum + run.tokenizer.bytes(id).length, 0);
  const bits = (loss * scored.length) / Math.LN2 / size;
  const perplexity = Number(Math.exp(loss).toPrecision(5));
  showStatus(
    `loss ${loss.toFixed(4)}, perplexity ${perplexity}, bits per byte ${bits.toFixed(4)}, ${count}`,
  );
}

function continueText() {
  const { run, tokens } = text;
  const names = ["temperature", "top_k", "top_p", "max_new_tokens"];
  const params = Object.fromEntries(names.map((name) => [name, byId(name).valueAsNumber]));
  const seed = byId("seed").value || Math.floor(Math.random() * 2 ** 32);
  const [length, start] = [tokens.length, performance.now()];
  runSteps(generate(run, tokens, params, makeRandom(Number(seed))), () => {
    showText();
    const count = tokens.length - length;
    const speed = Math.round((1000 * count) / (performance.now() - start));
    const [tokensShown, speedShown] = [count, speed].map((value) => value.toLocaleString("en"));
    showStatus(`${tokensShown} tokens, ${speedShown} tokens/s, seed ${seed}`);
  });
}

function showStatus(status) {
  byId("status").textContent = `${text.run.name}: ${status}`;
}

/** Continues the text from a different token in place of the selected one. */
function branch(id, probability) {
  if (!byId("form").reportValidity()) return;
  byId("message").textContent = "";
  const { run, tokens, promptLength } = text;
  const index = selected;
  const other = { ...tokens[index], id, logprob: Math.log(probability) };
  openText(run, [...tokens.slice(0, index), other], Math.min(promptLength, index));
  continueText();
  text.labels[index].control.click();
}

// The text

/** Begins a text with tokens, the first of which are the prompt. */
function openText(run, tokens, promptLength) {
  text = { run, tokens, promptLength, labels: [], decoder: decoder() };
  selected = null;
  byId("tokens").replaceChildren();
  byId("title").textContent = "";
  byId("likely").replaceChildren();
  setOptions("layer", ["mean", ...range(run.config.n_layer)]);
  setOptions("head", ["mean", ...range(run.config.n_head)]);
}

/** Adds new tokens to the page. They are radio buttons, so that arrow keys move the selection. */
function showText() {
  const { run, tokens, labels, promptLength } = text;
  const box = byId("tokens");
  const isAtEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 30;
  for (const { id } of tokens.slice(labels.length)) {
    const bytes = id === run.tokenizer.end ? new Uint8Array() : run.tokenizer.bytes(id);
    const piece = text.decoder.decode(bytes, { stream: true });
    const label = byId("token").content.firstElementChild.cloneNode(true);
    label.control.value = labels.length;
    label.control.ariaLabel = describe(id);
    label.append(piece);
    if (!piece) label.dataset.mark = "·";
    if (piece.includes("\n")) label.dataset.mark = "↵";
    label.classList.toggle("prompt", labels.length < promptLength);
    labels.push(label);
    box.append(label);
  }
  if (isAtEnd && promptLength) box.scrollTop = box.scrollHeight; // a score begins at the top
  showColors();
}

/** Colors the tokens by probability, or by what the selected token reads from them. */
function showColors() {
  const isAttention = byId("color").value === "attention";
  byId("output").classList.toggle("by-attention", isAttention);
  for (const id of ["layer", "head"]) byId(id).parentElement.hidden = !isAttention;
  if (work === attending) stop();
  if (isAttention) {
    showAttention();
    return;
  }
  byId("legend").textContent = "100% 10% ≤1%";
  const shade = (logprob) => (logprob === null ? null : Math.min(1, -logprob / Math.log(100)));
  setShades(text.tokens.map((token) => shade(token.logprob)));
}

function showAttention() {
  const { run, tokens } = text;
  const index = selected;
  byId("legend").textContent = work ? "shown at the end" : "select a token";
  setShades([]);
  if (index === null || work) return;
  const start = Math.max(tokens[index].start, index + 1 - run.config.block_size);
  const chosen = (id, items) => (byId(id).value === "mean" ? items : [items[byId(id).value]]);
  attending = readContext(run, tokens, start, index + 1);
  runSteps(attending, () => {
    if (work) return;
    const rows = chosen("layer", run.model.attention).flatMap((heads) => chosen("head", heads));
    const mean = (i) => rows.reduce((sum, row) => sum + row[i] / rows.length, 0);
    const shares = range(index + 1 - start).map(mean);
    const highest = Math.max(...shares);
    byId("legend").textContent = `0% ${percent(highest / 2)} ${percent(highest)}`;
    setShades(tokens.map((_, i) => (shares[i - start] ?? 0) / (highest || 1)));
  });
}

/** Sets how strongly each token is colored, from 0 to 1; null: there is no value. */
function setShades(shares) {
  text.labels.forEach((label, i) => {
    const share = shares[i] === null ? "" : `${100 * (shares[i] ?? 0)}%`;
    if (label.dataset.share === share) return; // a long text would make this slow
    label.dataset.share = share;
    label.style.setProperty("--share", share);
  });
}

/** Selects a token, and shows its probability and what else was likely. */
function select(index) {
  selected = index;
  text.labels[index].control.focus(); // Safari does not focus what is clicked
  const { id, logprob, likely } = text.tokens[index];
  const chance = logprob === null ? "(not predicted)" : percent(Math.exp(logprob));
  byId("title").textContent = `${describe(id)} ${chance}`;
  const buttons = likely.map(([other, probability]) => {
    const button = document.createElement("button");
    button.textContent = `${describe(other)} ${percent(probability)}`;
    button.addEventListener("click", () => branch(other, probability));
    return button;
  });
  byId("likely").replaceChildren(...buttons);
  byId("likely").scrollIntoView({ block: "nearest" });
  showColors();
}

/** Returns the text of a token, or the hexadecimal digits of bytes that are not text. */
function describe(id) {
  const bytes = text.run.tokenizer.bytes(id);
  const piece = decoder().decode(bytes);
  if (!piece.includes("\ufffd")) return makeVisible(piece);
  return Array.from(bytes, (byte) => `<${byte.toString(16).toUpperCase()}>`).join("");
}

function setOptions(id, values) {
  byId(id).replaceChildren(...values.map((value) => new Option(value)));
}

/** Says what the chosen model is. The text stays, so that it can be compared. */
function showRun() {
  const { name, facts } = data[byId("run").selectedIndex];
  byId("facts").textContent = facts;
  byId("message").textContent = "";
  document.title = `${name} – folio`;
}

const names = data.map((run) => run.name);
setOptions("run", names);
openText(data[0], [], 0);
window.addEventListener("pageshow", () => {
  showRun(); // the browser may have restored the fields
  showColors();
});
byId("run").addEventListener("change", showRun);
byId("form").addEventListener("submit", submit);
byId("stop").addEventListener("click", () => {
  stop();
  showColors();
});
byId("tokens").addEventListener("change", (event) => select(Number(event.target.value)));
for (const id of ["color", "layer", "head"]) byId(id).addEventListener("change", showColors);
