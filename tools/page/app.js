/** The page: its controls, the text with its colors, and the selected token. */

const SLICE_MS = 40; // of work between two updates of the page
const SYMBOLS = { " ": "␣", "\n": "↵", "\t": "⇥" };
const byId = (id) => document.getElementById(id);
const range = (count) => [...Array(count).keys()];
const percent = (share) => (share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(1)}%`);
const decoder = () => new TextDecoder("utf-8", { ignoreBOM: true });

const data = JSON.parse(byId("runs").textContent);
const runs = []; // those that were used
let text; // {run, tokens, promptLength, labels, decoder}
let selected = null; // index of a token of the text
let work = null; // the generator that is running

/** Runs a generator, and calls show() from time to time. Newer work ends it, and so does Stop. */
async function runSteps(steps, show) {
  work = steps;
  byId("stop").disabled = false;
  while (work === steps) {
    const end = performance.now() + SLICE_MS;
    while (work && performance.now() < end) if (steps.next().done) stop();
    show();
    await new Promise((resolve) => setTimeout(resolve));
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
    const ids = tokenizer.encode(byId("text").value || (isScore ? "" : tokenizer.start));
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
  const scored = text.tokens.filter((token) => token.logprob !== null);
  const loss = -scored.reduce((sum, token) => sum + token.logprob, 0) / scored.length;
  const size = scored.reduce((sum, { id }) => sum + text.run.tokenizer.bytes(id).length, 0);
  byId("status").textContent =
    `loss ${loss.toFixed(4)}, perplexity ${Math.exp(loss).toPrecision(5)}, bits per byte ` +
    `${((loss * scored.length) / Math.LN2 / size).toFixed(4)}, over ${scored.length} tokens`;
}

function continueText() {
  const { run, tokens } = text;
  const names = ["temperature", "top_k", "top_p", "max_new_tokens"];
  const controls = Object.fromEntries(names.map((name) => [name, byId(name).valueAsNumber]));
  const seed = byId("seed").value || Math.floor(Math.random() * 2 ** 32);
  const [length, start] = [tokens.length, performance.now()];
  runSteps(generate(run, tokens, controls, makeRandom(Number(seed))), () => {
    showText();
    const count = tokens.length - length;
    const speed = Math.round((1000 * count) / (performance.now() - start));
    byId("status").textContent = `${count} tokens, ${speed} tokens/s, seed ${seed}`;
  });
}

/** Continues the text from another token in place of the selected one. */
function branch(id, probability) {
  const { run, tokens, promptLength } = text;
  const other = { ...tokens[selected], id, logprob: Math.log(probability) };
  openText(run, [...tokens.slice(0, selected), other], Math.min(promptLength, selected));
  continueText();
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
  const { run, tokens, labels } = text;
  const box = byId("tokens");
  const isAtEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 30;
  for (const { id } of tokens.slice(labels.length)) {
    const bytes = id === run.tokenizer.end ? new Uint8Array() : run.tokenizer.bytes(id);
    const piece = text.decoder.decode(bytes, { stream: true });
    const label = byId("token").content.firstElementChild.cloneNode(true);
    label.firstChild.value = labels.length;
    label.firstChild.ariaLabel = visible(id);
    label.append(piece);
    if (!piece) label.dataset.mark = "·";
    if (piece.includes("\n")) label.dataset.mark = "↵";
    label.classList.toggle("prompt", labels.length < text.promptLength);
    labels.push(label);
    box.append(label);
  }
  if (isAtEnd) box.scrollTop = box.scrollHeight;
  showColors();
}

/** Colors the tokens by probability, or by what the selected token reads from them. */
function showColors() {
  const isAttention = byId("color").value === "attention";
  byId("output").classList.toggle("by-attention", isAttention);
  for (const id of ["layer", "head"]) byId(id).parentElement.hidden = !isAttention;
  if (isAttention) {
    showAttention();
    return;
  }
  byId("legend").textContent = "100% 10% ≤1%";
  setShades(text.tokens.map(({ logprob }) => Math.min(1, -logprob / Math.log(100))));
}

function showAttention() {
  const { run, tokens } = text;
  const index = selected;
  byId("legend").textContent = "0% 50% 100%";
  setShades([]);
  if (index === null || work) return;
  const start = Math.max(tokens[index].start, index + 1 - run.config.block_size);
  const chosen = (id, items) => (byId(id).value === "mean" ? items : [items[byId(id).value]]);
  runSteps(readContext(run, tokens, start, index + 1), () => {
    if (work) return;
    const rows = chosen("layer", run.model.attention).flatMap((heads) => chosen("head", heads));
    const mean = (i) => rows.reduce((sum, row) => sum + row[i] / rows.length, 0);
    const shares = range(index + 1 - start).map(mean);
    const highest = Math.max(...shares);
    byId("legend").textContent = `0% ${percent(highest / 2)} ${percent(highest)}`;
    setShades(tokens.map((_, i) => (shares[i - start] ?? 0) / (highest || 1)));
  });
}

/** Sets how dark each token is, from 0 to 1. */
function setShades(shares) {
  text.labels.forEach((label, i) => {
    const share = `${100 * (shares[i] ?? 0)}%`;
    if (label.dataset.share === share) return; // a long text would make this slow
    label.dataset.share = share;
    label.style.setProperty("--share", share);
  });
}

/** Selects a token, and shows its probability and what else was likely. */
function select(index) {
  selected = index;
  const { id, logprob, likely } = text.tokens[index];
  const chance = logprob === null ? "not predicted" : percent(Math.exp(logprob));
  byId("title").textContent = `${visible(id)} ${chance}`;
  const buttons = likely.map(([other, probability]) => {
    const button = document.createElement("button");
    button.textContent = `${visible(other)} ${percent(probability)}`;
    button.addEventListener("click", () => branch(other, probability));
    return button;
  });
  byId("likely").replaceChildren(...buttons);
  showColors();
}

/** Returns the text of a token with visible spaces and line breaks. */
function visible(id) {
  const piece = decoder().decode(text.run.tokenizer.bytes(id));
  return `“${Array.from(piece, (character) => SYMBOLS[character] ?? character).join("")}”`;
}

function setOptions(id, values) {
  byId(id).replaceChildren(...values.map((value) => new Option(value)));
}

/** Says what the chosen model is. The text stays, so that it can be compared. */
function showRun() {
  const { name, facts } = data[byId("run").selectedIndex];
  byId("facts").textContent = facts;
  document.title = `${name} – folio`;
}

const names = data.map((run) => run.name);
setOptions("run", names);
showRun();
openText(data[0], [], 0);
showColors();
byId("run").addEventListener("change", showRun);
byId("form").addEventListener("submit", submit);
byId("stop").addEventListener("click", stop);
byId("tokens").addEventListener("change", (event) => select(Number(event.target.value)));
for (const id of ["color", "layer", "head"]) byId(id).addEventListener("change", showColors);
