// Scores, weights and mask reasons of any embedded head, computed from the recording. It uses no DOM, so that node can
// run it.
//
// s_ij = softcap(scale q_i . k_j) + bias_ij where the mask allows i to attend to j, else -Infinity;   p_ij = exp(s_ij -
// L_i) L_i is the kernel's lse; if there is a sink, L_i = ln(exp(lse_i) + exp(sink)). Sums are computed in float64.

// returns the arrays by name, from the page's block of bytes, in which the first bytes of all numbers of an array
// precede the second ones;
// bf16 values are the upper halves of float32 numbers
const readArrays = (table, bytes) => {
  const TYPES = { f32: Float32Array, f64: Float64Array, u8: Uint8Array, i32: Int32Array, bf16: Uint16Array },
    found = {};
  for (const { name, type, offset, count } of table) {
    const x = new TYPES[type](count),
      size = x.BYTES_PER_ELEMENT,
      into = new Uint8Array(x.buffer);
    for (let b = 0; b < size; b++) {
      const plane = new Uint8Array(bytes, offset + b * count, count);
      for (let n = 0, to = b; n < count; n++, to += size) into[to] = plane[n];
    }
    found[name] = type === "bf16" ? new Float32Array(Uint32Array.from(x, half => half << 16).buffer) : x;
  }
  return found;
};

const makeMath = (meta, arrays) => {
  const places = meta.places,
    CACHE_BYTES = 48e6; // bytes of the cached rows
  const array = (p, name) => arrays[`p${p}.${name}`];
  const group = (p, h) => Math.floor(h / (places[p].H / places[p].G));
  const has = (p, h) => array(p, `q${h}`) !== undefined;
  const rule = (p, i) => {
    const of = array(p, "rule");
    return places[p].rules[of === undefined ? 0 : of[i]];
  };
  const vector = (x, i, n) => (x === undefined ? null : x.subarray(i * n, (i + 1) * n));
  const q = (p, h, i) => vector(array(p, `q${h}`), i, places[p].D);
  const k = (p, h, j) => vector(array(p, `k${group(p, h)}`), j, places[p].D);
  const v = (p, h, j) => vector(array(p, `v${group(p, h)}`), j, places[p].E);
  const out = (p, h, i) => vector(array(p, `out${h}`), i, places[p].E);
  const lse = (p, h, i) => {
    const x = array(p, `lse${h}`);
    return x === undefined ? NaN : x[i];
  };
  const sink = (p, h, i) => {
    const x = rule(p, i).sink;
    return x === null || x === undefined ? null : x[h];
  };
  const denominator = (p, h, i) => {
    const a = lse(p, h, i),
      b = sink(p, h, i);
    if (b === null) return a;
    const top = Math.max(a, b);
    return top === -Infinity ? top : top + Math.log(Math.exp(a - top) + Math.exp(b - top));
  };

  // ---- masks: ranges of columns for each row, or bits where there would be too many ranges; one plane for all heads
  // or one per head.
  // Terms are combined by a tree of all/any
  const bit = ({ ranges, width, bits, heads }, p, h, i, j) => {
    const { T, N } = places[p],
      row = (heads > 1 ? h : 0) * T + i;
    if (bits) {
      const x = arrays[bits],
        at = row * N + j;
      return ((x[Math.floor(at / 8)] >> (at % 8)) & 1) === 1;
    }
    const x = arrays[ranges];
    for (let at = row * width; at < (row + 1) * width; at += 2) if (j >= x[at] && j < x[at + 1]) return true;
    return false;
  };
  const present = (p, i, j) => !places[p].present || bit(places[p].present, p, 0, i, j);
  const allows = (tree, p, h, i, j) => {
    if (tree.all) return tree.all.every(x => allows(x, p, h, i, j));
    if (tree.any) return tree.any.some(x => allows(x, p, h, i, j));
    return bit(tree, p, h, i, j);
  };
  const visible = (p, h, i, j) => present(p, i, j) && allows(rule(p, i).mask, p, h, i, j);
  // the same for a whole row: 1 where the query may attend to the key
  const bitRow = ({ ranges, width, bits, heads }, p, h, i) => {
    const { T, N } = places[p],
      found = new Uint8Array(N),
      row = (heads > 1 ? h : 0) * T + i,
      x = arrays[bits || ranges];
    if (bits) for (let j = 0, at = row * N; j < N; j++, at++) found[j] = (x[Math.floor(at / 8)] >> (at % 8)) & 1;
    else for (let at = row * width; at < (row + 1) * width; at += 2) found.fill(1, x[at], Math.max(x[at], x[at + 1]));
    return found;
  };
  const treeRow = (tree, p, h, i) => {
    const parts = tree.all || tree.any;
    if (!parts) return bitRow(tree, p, h, i);
    const [first, ...rest] = parts.map(x => treeRow(x, p, h, i));
    for (const x of rest)
      for (let j = 0; j < first.length; j++) first[j] = tree.all ? first[j] & x[j] : first[j] | x[j];
    return first;
  };
  const seen = (p, h, i) => {
    const found = treeRow(rule(p, i).mask, p, h, i);
    if (places[p].present)
      bitRow(places[p].present, p, 0, i).forEach((x, j) => {
        found[j] &= x;
      });
    return found;
  };
  const against = (tree, p, h, i, j) => {
    if (allows(tree, p, h, i, j)) return [];
    const inner = tree.all || tree.any;
    return inner
      ? inner.flatMap(x => against(x, p, h, i, j))
      : [{ key: `why.${tree.why}`, values: { mask: tree.text } }];
  };
  const why = (p, h, i, j) =>
    present(p, i, j)
      ? against(rule(p, i).mask, p, h, i, j)
      : [{ key: kPosition(p, j) < 0 ? "why.padding" : "why.absent", values: {} }];

  // ---- biases: by offset of positions, or cell by cell
  const bias = (p, h, i, j) => {
    const b = rule(p, i).bias;
    if (!b) return 0;
    if (b.kind === "dense") return arrays[b.arrays[h]][i * places[p].N + j];
    return arrays[b.array][(b.heads > 1 ? h : 0) * b.count + qPosition(p, i) - kPosition(p, j) - b.low];
  };
  const qPosition = (p, i) => {
    const x = array(p, "q_positions");
    return x === undefined ? i : x[i];
  };
  const kPosition = (p, j) => {
    const x = array(p, "k_positions");
    return x === undefined ? j : x[j];
  };

  const dot = (a, b, n) => {
    let s = 0;
    for (let d = 0; d < n; d++) s += a[d] * b[d];
    return s;
  };
  const cap = (s, c) => (c === null || c === undefined ? s : c * Math.tanh(s / c));
  const dotAt = (p, h, i, j) => dot(q(p, h, i), k(p, h, j), places[p].D);

  // ---- rows, computed once and cached
  const kept = new Map();
  let bytes = 0;
  const keep = (key, row) => {
    kept.set(key, row);
    bytes += row.weights.byteLength * 2;
    for (const [old, x] of kept) {
      if (bytes <= CACHE_BYTES || old === key) break;
      kept.delete(old);
      bytes -= x.weights.byteLength * 2;
    }
    return row;
  };
  const row = (p, h, i) => {
    const key = `${p} ${h} ${i}`;
    return kept.get(key) || keep(key, computed(p, h, i));
  };
  const computed = (p, h, i) => {
    const { N, D } = places[p],
      r = rule(p, i),
      Q = q(p, h, i),
      K = array(p, `k${group(p, h)}`);
    const scores = new Float64Array(N).fill(-Infinity),
      weights = new Float64Array(N),
      L = denominator(p, h, i);
    const b = sink(p, h, i),
      share = b === null ? 0 : L === -Infinity ? 0 : Math.exp(b - L);
    const open = seen(p, h, i),
      scored = r.bias ? j => bias(p, h, i, j) : () => 0;
    let n = 0,
      sum = 0,
      mean = 0,
      max = -Infinity,
      top = -1;
    for (let j = 0; j < N; j++) {
      if (!open[j]) continue;
      let s = 0;
      for (let d = 0, at = j * D; d < D; d++, at++) s += Q[d] * K[at];
      s = cap(s * r.scale, r.softcap) + scored(j);
      const w = L === -Infinity ? 0 : Math.exp(s - L);
      scores[j] = s;
      weights[j] = w;
      n++;
      sum += w;
      if (w > 0) mean += w * s;
      if (s > max || Number.isNaN(s)) {
        max = s;
        top = j;
      }
    }
    const entropy = n ? L - mean - (share ? share * b : 0) : 0;
    return { scores, weights, lse: lse(p, h, i), denominator: L, sink: share, n, sum, max, top, entropy };
  };
  const scores = (p, h, i) => row(p, h, i).scores;
  const weights = (p, h, i) => row(p, h, i).weights;

  // ---- one cell, step by step
  const cell = (p, h, i, j) => {
    const { D } = places[p],
      r = rule(p, i),
      Q = q(p, h, i),
      K = k(p, h, j),
      products = new Float64Array(D);
    for (let d = 0; d < D; d++) products[d] = Q[d] * K[d];
    const raw = products.reduce((a, b) => a + b, 0),
      scaled = raw * r.scale,
      capped = cap(scaled, r.softcap),
      b = bias(p, h, i, j);
    const seen = visible(p, h, i, j),
      L = denominator(p, h, i),
      score = seen ? capped + b : -Infinity;
    return {
      products,
      dot: raw,
      scale: r.scale,
      scaled,
      softcap: r.softcap ?? null,
      capped,
      bias: b,
      unmasked: capped + b,
      score,
      visible: seen,
      why: why(p, h, i, j),
      lse: lse(p, h, i),
      denominator: L,
      weight: seen && L !== -Infinity ? Math.exp(score - L) : 0,
    };
  };

  // ---- the same q and k under another mechanism: a new softmax, because no kernel computed it
  // spec: {scale, temperature, softcap, window, alibi: slope, nobias, nomask, nosink, linear}; what it leaves out is
  // taken from the recording
  const other = (p, h, i, spec) => {
    const { N, D } = places[p],
      r = rule(p, i),
      Q = q(p, h, i),
      K = array(p, `k${group(p, h)}`);
    const scale = (spec.scale ?? r.scale) / (spec.temperature ?? 1),
      c = spec.softcap === undefined ? r.softcap : spec.softcap;
    const scores = new Float64Array(N).fill(-Infinity),
      weights = new Float64Array(N),
      at = qPosition(p, i),
      open = seen(p, h, i);
    let max = -Infinity,
      n = 0;
    for (let j = 0; j < N; j++) {
      const away = at - kPosition(p, j);
      if (!(spec.nomask ? present(p, i, j) : open[j]) || (spec.window && away >= spec.window)) continue;
      if (spec.linear) {
        // phi(x) = elu(x) + 1, divided by its sum
        let s = 0;
        for (let d = 0, m = j * D; d < D; d++, m++) s += phi(Q[d]) * phi(K[m]);
        scores[j] = s;
      } else {
        scores[j] =
          cap(dot(Q, K.subarray(j * D, j * D + D), D) * scale, c) +
          (spec.nobias ? 0 : bias(p, h, i, j)) -
          (spec.alibi ?? 0) * Math.abs(away);
      }
      if (scores[j] > max) max = scores[j];
      n++;
    }
    const b = spec.linear || spec.nosink ? null : sink(p, h, i),
      top = b === null ? max : Math.max(max, b);
    let sum = b === null ? 0 : Math.exp(b - top);
    for (let j = 0; j < N; j++) {
      if (scores[j] === -Infinity) continue;
      weights[j] = spec.linear ? scores[j] : Math.exp(scores[j] - top);
      sum += weights[j];
    }
    for (let j = 0; j < N && sum > 0; j++) weights[j] /= sum;
    const L = spec.linear ? Math.log(sum) : top === -Infinity ? top : top + Math.log(sum);
    return { scores, weights, n, max, denominator: L, sink: b === null || sum === 0 ? 0 : Math.exp(b - L) };
  };
  const phi = x => (x > 0 ? x + 1 : Math.exp(x));

  // ---- z of a row, from weights and values
  const mixed = (p, h, weights) => {
    const { N, E } = places[p],
      V = array(p, `v${group(p, h)}`),
      z = new Float64Array(E);
    if (V === undefined) return null;
    for (let j = 0; j < N; j++) {
      if (weights[j] === 0) continue;
      for (let e = 0, at = j * E; e < E; e++, at++) z[e] += weights[j] * V[at];
    }
    return z;
  };

  return {
    has,
    group,
    rule,
    q,
    k,
    v,
    out,
    lse,
    sink,
    denominator,
    present,
    visible,
    seen,
    why,
    bias,
    qPosition,
    kPosition,
    dot: dotAt,
    row,
    scores,
    weights,
    cell,
    other,
    mixed,
  };
};

if (typeof module !== "undefined") module.exports = { makeMath, readArrays };
