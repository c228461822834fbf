/** Tokenizers, and the texts of a GPT: generation, scores and attention. It runs in Node, too. */

const ALTERNATIVES = 10;
const CHUNK = 32; // tokens that are read at once
const SYMBOLS = { " ": "␣", "\n": "↵", "\t": "⇥" };

/** Returns a text in quotation marks, with visible spaces and line breaks. */
function makeVisible(text) {
  return `“${text.replace(/[ \n\t]/g, (character) => SYMBOLS[character])}”`;
}

/** Tokens that are texts: characters, or strings of any length. */
class TextTokenizer {
  constructor(data) {
    Object.assign(this, data);
    this.ids = new Map(this.tokens.map((token, id) => [token, id]));
    this.lengths = [...new Set(this.tokens.map((token) => token.length))].sort((a, b) => b - a);
  }

  /** Returns the id of the longest token that fits at each position of a text. */
  encode(text) {
    const ids = [];
    for (let i = 0; i < text.length; i += this.tokens[ids.at(-1)].length) {
      const length = this.lengths.find((n) => n && this.ids.has(text.substr(i, n)));
      if (!length) throw new Error(unknownCharacter(text.codePointAt(i)));
      ids.push(this.ids.get(text.substr(i, length)));
    }
    return ids;
  }

  bytes(id) {
    return new TextEncoder().encode(this.tokens[id]);
  }
}

function unknownCharacter(code) {
  const number = code.toString(16).toUpperCase().padStart(4, "0");
  const character = makeVisible(String.fromCodePoint(code));
  return `The model does not know ${character} (U+${number}): remove this character.`;
}

/** Tokens that are bytes of UTF-8: single ones, or those of a byte-pair encoding. */
class ByteTokenizer {
  constructor(data) {
    Object.assign(this, data);
    const pairs = this.merges?.map((pair) => (Array.isArray(pair) ? pair.join(" ") : pair));
    this.ids = new Map(this.tokens.map((token, id) => [token, id]));
    this.ranks = pairs && new Map(pairs.map((pair, rank) => [pair, rank]));
  }

  encode(text) {
    const words = text.match(this.is_split ? WORDS : /.+/gsu) ?? [];
    return words.flatMap((word) => this.encodeWord(word));
  }

  /** Merges the pair of the lowest rank until there is none (Sennrich et al. 2016). */
  encodeWord(word) {
    const parts = Array.from(new TextEncoder().encode(word), (byte) => this.byte_characters[byte]);
    if (this.ignore_merges && this.ids.has(parts.join(""))) return [this.ids.get(parts.join(""))];
    while (true) {
      const ranks = parts.slice(1).map((part, i) => this.rank(parts[i], part));
      const lowest = ranks.reduce((a, b) => Math.min(a, b), Infinity);
      if (lowest === Infinity) return parts.map((part) => this.ids.get(part));
      const i = ranks.indexOf(lowest);
      parts.splice(i, 2, parts[i] + parts[i + 1]);
    }
  }

  rank(a, b) {
    const rank = this.ranks ? this.ranks.get(`${a} ${b}`) : this.ids.get(a + b); // as tiktoken
    return rank ?? Infinity;
  }

  bytes(id) {
    return Uint8Array.from(this.tokens[id], (character) => this.byte_characters.indexOf(character));
  }
}

// GPT-2's pre-tokenization: contractions, words, numbers, other characters, whitespace.
const WORDS =
  /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

/** Returns a run, {model, config, tokenizer}, from the data that __main__.py writes. */
function loadRun(data) {
  const Tokenizer = data.tokenizer.byte_characters ? ByteTokenizer : TextTokenizer;
  const tokenizer = new Tokenizer(data.tokenizer);
  const model = new GPT(data.config, readWeights(data));
  return { name: data.name, config: data.config, model, tokenizer };
}

// A text is a list of tokens, {id, start, logprob, likely}: the model saw the text from token `start`
// on, `logprob` is the logarithm of its probability, null if it is not computed, and `likely` lists
// the most likely tokens, [id, probability] each.

/**
 * Adds tokens to a text, with the same contexts as folio/inference/generate.py, and the missing
 * probabilities of its tokens. Yields after each token that the model has read.
 */
function* generate(run, tokens, params, random) {
  const promptLength = tokens.length;
  const isEnd = () => tokens.length > 1 && tokens.at(-1).id === run.tokenizer.end; // or the start
  while (tokens.length < promptLength + params.max_new_tokens && !isEnd()) {
    const index = tokens.length;
    const start = contextStart(index, run.config.block_size, promptLength);
    for (const [next, logits] of readContext(run, tokens, start, index)) {
      if (next === index) {
        tokens.push(makeToken(sampleNext(logits, params, random), start, logits));
      } else if (tokens[next].logprob === null) {
        tokens[next] = makeToken(tokens[next].id, start, logits);
      }
      yield;
    }
  }
}

/** Adds the probabilities of all tokens but the first, like folio/inference/scoring.py. */
function* score(run, tokens) {
  const last = tokens.length - 1;
  const size = Math.min(run.config.block_size, last);
  for (let index = 1; index <= last; ) {
    const start = contextStart(index, size, 0);
    const first = Math.min(start, last - size);
    run.model.cached = [];
    for (const [next, logits] of readContext(run, tokens, first, first + size)) {
      if (next === index) tokens[index++] = makeToken(tokens[next].id, first, logits);
      yield;
    }
  }
}

/** Yields each index whose prediction is not in the cache, and the logits for it. */
function* readContext({ model, tokenizer }, tokens, start, end) {
  const ids = tokens.slice(start, end).map((token) => token.id);
  const first = ids.findIndex((id, i) => id !== model.cached[i]);
  for (let i = first < 0 ? ids.length - 1 : first; i < ids.length; ) {
    for (const state of model.trunk(ids.slice(0, i + CHUNK), i)) {
      i++;
      yield [start + i, model.head(state).subarray(0, tokenizer.tokens.length)];
    }
  }
}

function makeToken(id, start, logits) {
  const probabilities = new Float64Array(logits);
  softmax(probabilities);
  const ids = rank(logits, ALTERNATIVES);
  const logprob = logits[id] - logits[ids[0]] + Math.log(probabilities[ids[0]]); // never -Infinity
  return { id, start, logprob, likely: ids.map((other) => [other, probabilities[other]]) };
}

/** Returns the most likely ids, the most likely first. */
function rank(logits, count) {
  const lowest = logits.slice().sort().at(-count) ?? -Infinity;
  const ids = [...logits.keys()].filter((id) => logits[id] >= lowest);
  return ids.sort((a, b) => logits[b] - logits[a]).slice(0, count);
}

/** Returns the first token that the model sees when it predicts token `index` of a text. */
function contextStart(index, size, promptLength) {
  const appended = index - Math.max(promptLength, size); // to a full context
  if (appended <= 0) return Math.max(0, index - size);
  const stride = Math.max(1, Math.floor(size / 2)); // tokens that a full context drops
  return index - (size - stride + 1 + ((appended - 1) % stride));
}

/** Draws an id. `random` returns numbers in [0, 1). */
function sampleNext(logits, { temperature, top_k, top_p }, random) {
  if (temperature < 1e-5) return rank(logits, 1)[0]; // greedy
  const kept = rank(logits, top_k || logits.length);
  const probabilities = Float64Array.from(kept, (id) => logits[id] / temperature);
  softmax(probabilities);
  let count = 0; // of the most likely tokens whose probabilities sum to top_p
  for (let sum = 0; sum < top_p && count < kept.length; count++) sum += probabilities[count];
  let rest = random() * probabilities.subarray(0, count).reduce((a, b) => a + b);
  let drawn = 0;
  for (; drawn < count - 1 && rest >= probabilities[drawn]; drawn++) rest -= probabilities[drawn];
  return kept[drawn];
}

/** Returns a generator of pseudorandom numbers in [0, 1): mulberry32, by Tommy Ettinger. */
function makeRandom(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}
