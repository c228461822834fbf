/**
 * A trained GPT: model.py in JavaScript, its names in its order, with a KV cache. It runs in Node, too.
 *
 * The numbers of a token, (C,), are a Float32Array; those of T tokens are a list, T x (C,).
 * Shapes: C = n_embd, H = n_head, D = C / H (head size), V = vocab_size.
 */
class GPT {
  /** `config` has the fields of GPTConfig, `weights` the Float32Arrays of a state_dict. */
  constructor(config, weights) {
    const size = config.block_size * config.n_embd;
    const perLayer = (create) => Array.from({ length: config.n_layer }, create);
    this.config = config;
    this.weights = weights;
    this.cached = []; // the ids whose keys and values are in the cache
    this.keys = perLayer(() => new Float32Array(size));
    this.values = perLayer(() => new Float32Array(size));
    this.attention = perLayer(() => []); // weights of the newest token, (positions,) for each head
  }

  /** The module `name` on several tokens, which read each weight once: T x (K,) -> T x (N,). */
  linear(name, xs) {
    const weight = this.weights[`${name}.weight`]; // (N, K)
    const bias = this.weights[`${name}.bias`];
    const K = xs[0].length;
    const N = weight.length / K;
    const ys = xs.map(() => new Float32Array(N));
    let n = 0;
    for (; n + 7 < N; n += 8) {
      xs.forEach((x, t) => {
        let [s0, s1, s2, s3, s4, s5, s6, s7] = [0, 0, 0, 0, 0, 0, 0, 0];
        for (let k = 0; k < K; k++) {
          const value = x[k];
          s0 += value * weight[n * K + k]; // eight rows at once are twice as fast as one
          s1 += value * weight[(n + 1) * K + k];
          s2 += value * weight[(n + 2) * K + k];
          s3 += value * weight[(n + 3) * K + k];
          s4 += value * weight[(n + 4) * K + k];
          s5 += value * weight[(n + 5) * K + k];
          s6 += value * weight[(n + 6) * K + k];
          s7 += value * weight[(n + 7) * K + k];
        }
        ys[t].set([s0, s1, s2, s3, s4, s5, s6, s7], n);
      });
    }
    ys.forEach((y, t) => {
      for (let i = n; i < N; i++) y[i] = dot(weight, i * K, xs[t], 0, K);
      if (bias) add(y, bias);
    });
    return ys;
  }

  /** Causal self-attention of a layer on the tokens from position `start` on: T x (C,) each. */
  causalSelfAttention(layer, xs, start) {
    const name = `transformer.h.${layer}.attn`;
    const ys = this.linear(`${name}.c_attn`, xs).map((qkv, t) =>
      this.attend(layer, qkv, start + t),
    );
    return this.linear(`${name}.c_proj`, ys);
  }

  /** Stores the key and the value of a token; returns what it reads up to it: (3 C,) -> (C,). */
  attend(layer, qkv, position) {
    const { n_embd: C, n_head, norm, qk_norm, window } = this.config;
    const [keys, values] = [this.keys[layer], this.values[layer]];
    const D = C / n_head;
    const [q, k, v] = [0, 1, 2].map((i) => qkv.subarray(i * C, (i + 1) * C));
    for (const heads of [q, k]) {
      if (qk_norm) normalize(heads, D, norm);
      if (this.config.position === "rotary") this.rotate(heads, position);
    }
    keys.set(k, position * C);
    values.set(v, position * C);
    const first = window ? Math.max(0, position + 1 - window) : 0;
    const y = new Float32Array(C);
    for (let head = 0; head < n_head; head++) {
      const weights = new Float32Array(position + 1);
      for (let s = first; s <= position; s++) {
        weights[s] = dot(q, head * D, keys, s * C + head * D, D) / Math.sqrt(D);
      }
      softmax(weights.subarray(first));
      for (let s = first; s <= position; s++) {
        for (let i = head * D; i < (head + 1) * D; i++) y[i] += weights[s] * values[s * C + i];
      }
      this.attention[layer][head] = weights;
    }
    return y;
  }

  mlp(layer, xs) {
    const ys = this.linear(`transformer.h.${layer}.mlp.c_fc`, xs);
    const activation = ACTIVATIONS[this.config.activation];
    return this.linear(`transformer.h.${layer}.mlp.c_proj`, ys.map(activation));
  }

  /** Adds the attention and the MLP of a layer to the tokens, T x (C,). */
  block(layer, xs, start) {
    const name = `transformer.h.${layer}`;
    addEach(xs, this.causalSelfAttention(layer, this.norm(`${name}.ln_1`, xs), start));
    addEach(xs, this.mlp(layer, this.norm(`${name}.ln_2`, xs)));
  }

  /** Returns the logits of the token after a hidden state: (C,) -> (V,). */
  head(x) {
    const name = this.config.tie_weights ? "transformer.wte" : "lm_head";
    return this.linear(name, [x])[0];
  }

  /**
   * Returns the hidden states, after the final norm, of a context's tokens from position `start` on:
   * T x (C,). Those before must be in the cache.
   */
  trunk(idx, start) {
    const xs = idx.slice(start).map((_, t) => this.localContext(idx, start + t));
    for (let layer = 0; layer < this.config.n_layer; layer++) this.block(layer, xs, start);
    if (idx.some((id, position) => id !== this.cached[position])) this.cached = idx;
    return this.norm("transformer.ln_f", xs);
  }

  /** Returns the embedding of the token at a position, (C,). */
  embed(idx, position) {
    const { n_embd: C, ngrams } = this.config;
    const { "transformer.wte.weight": wte, "transformer.wpe.weight": wpe } = this.weights;
    const x = wte.slice(idx[position] * C, (idx[position] + 1) * C);
    if (wpe) add(x, wpe.subarray(position * C, (position + 1) * C));
    const width = Math.floor(C / (ngrams - 1)); // of the embedding of an n-gram
    for (let n = 2; n <= ngrams; n++) {
      const table = this.weights[`transformer.context.ngrams.${n}.weight`];
      const row = this.ngramId(idx, position, n, table.length / width) * width;
      add(x.subarray((n - 2) * width), table.subarray(row, row + width));
    }
    return x;
  }

  /** The module `name`, LayerNorm or RMSNorm: T x (C,) -> T x (C,). */
  norm(name, xs) {
    const weight = this.weights[`${name}.weight`];
    const bias = this.weights[`${name}.bias`];
    return xs.map((x) => {
      const y = x.slice();
      normalize(y, y.length, this.config.norm);
      return y.map((value, i) => value * weight[i] + (bias ? bias[i] : 0));
    });
  }

  /** Rotates the queries or keys of all heads of one token, (C,), in place. */
  rotate(x, position) {
    const D = x.length / this.config.n_head;
    for (let i = 0; i < D / 2; i++) {
      const frequency = Math.fround(10000 ** Math.fround((-2 * i) / D));
      const angle = Math.fround(position * frequency); // rounded as in model.py
      const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
      for (let j = i; j < x.length; j += D) {
        const [a, b] = [x[j], x[j + D / 2]];
        x[j] = a * cos - b * sin;
        x[j + D / 2] = b * cos + a * sin;
      }
    }
  }

  /** Returns the embedding of a token with its n-grams, plus the smeared ones before it: (C,). */
  localContext(idx, position) {
    const x = this.embed(idx, position);
    const C = x.length;
    const smear = this.weights["transformer.context.smear.weight"];
    for (let back = 1; back <= Math.min(this.config.smear, position); back++) {
      const preceding = this.embed(idx, position - back);
      for (let i = 0; i < C; i++) x[i] += preceding[i] * smear[(back - 1) * C + i];
    }
    return x;
  }

  /** Returns the row of the n-gram that ends at a position. Id 0 precedes the first token. */
  ngramId(idx, position, n, rows) {
    let id = 0;
    for (let i = position - n + 1; i <= position; i++) {
      id = (id * this.config.vocab_size + (idx[i] ?? 0)) % rows;
    }
    return id;
  }
}

// norm and activation

/** Normalizes each `size` numbers of x, in place. */
function normalize(x, size, norm) {
  const isLayerNorm = norm === "layernorm"; // else rmsnorm
  for (let start = 0; start < x.length; start += size) {
    const row = x.subarray(start, start + size);
    const mean = isLayerNorm ? row.reduce((a, b) => a + b) / size : 0;
    for (let i = 0; i < size; i++) row[i] -= mean;
    const epsilon = isLayerNorm ? 1e-5 : 2 ** -23; // as in PyTorch
    scale(row, 1 / Math.sqrt(dot(row, 0, row, 0, size) / size + epsilon));
  }
}

/** With the error function to 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26). */
function gelu(x) {
  const z = Math.abs(x) / Math.SQRT2;
  const t = 1 / (1 + 0.3275911 * z);
  let sum = 0;
  for (const c of [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592]) {
    sum = (sum + c) * t;
  }
  return (x + Math.abs(x) * (1 - sum * Math.exp(-z * z))) / 2;
}

function geluTanh(x) {
  return (x / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

/** x: a gate and a value, (2 N,) -> (N,). */
function swiglu(x) {
  const value = x.subarray(x.length / 2);
  return x.slice(0, value.length).map((gate, i) => (gate / (1 + Math.exp(-gate))) * value[i]);
}

const ACTIVATIONS = {
  gelu: (x) => x.map(gelu),
  gelu_tanh: (x) => x.map(geluTanh),
  relu: (x) => x.map((value) => Math.max(value, 0)),
  relu2: (x) => x.map((value) => Math.max(value, 0) ** 2),
  swiglu,
};

// Numbers

/** Returns the dot product of `count` numbers of a from index i on, and of b from j on. */
function dot(a, i, b, j, count) {
  let sum = 0;
  for (let k = 0; k < count; k++) sum += a[i + k] * b[j + k];
  return sum;
}

/** Adds y to the first numbers of x. */
function add(x, y) {
  for (let i = 0; i < y.length; i++) x[i] += y[i];
}

/** Adds each of the ys to one of the xs. */
function addEach(xs, ys) {
  for (let t = 0; t < xs.length; t++) add(xs[t], ys[t]);
}

function scale(x, factor) {
  for (let i = 0; i < x.length; i++) x[i] *= factor;
}

/** Replaces logits by probabilities. */
function softmax(x) {
  const highest = x.reduce((a, b) => Math.max(a, b));
  for (let i = 0; i < x.length; i++) x[i] = Math.exp(x[i] - highest);
  scale(x, 1 / x.reduce((a, b) => a + b));
}

// Weights, as tools/page/__main__.py writes them

/** Returns {name: Float32Array}. `weights` lists [name, rows, base64]. */
function readWeights({ weights }) {
  return Object.fromEntries(
    weights.map(([name, rows, base64]) => [name, parseInt8(parseBase64(base64), rows)]),
  );
}

function parseBase64(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes.buffer;
}

/** The scale of each row as float32, and then the rows. */
function parseInt8(buffer, rows) {
  const scales = new Float32Array(buffer, 0, rows);
  const numbers = new Float32Array(new Int8Array(buffer, scales.byteLength));
  const columns = numbers.length / rows;
  return numbers.map((number, i) => number * scales[Math.floor(i / columns)]);
}
