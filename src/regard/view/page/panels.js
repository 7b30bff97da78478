// Numbers of the panels, computed from the results of math.js. It uses no DOM, so that node can run it.

const panels = (() => {
  // ---- rotary: pairs of dims, each rotated by position * inv_freq; the same layouts as regard.positions.rotate
  const pairs = rotary =>
    rotary.inv_freq.map((f, n) =>
      rotary.layout === "half" ? [n, n + rotary.inv_freq.length, f] : [2 * n, 2 * n + 1, f],
    );
  const unrotated = (x, position, rotary) => {
    const found = Float64Array.from(x),
      factor = rotary.factor ?? 1;
    for (const [a, b, f] of pairs(rotary)) {
      const cos = Math.cos(position * f),
        sin = Math.sin(position * f);
      found[a] = (x[a] * cos + x[b] * sin) / factor;
      found[b] = (x[b] * cos - x[a] * sin) / factor;
    }
    return found;
  };
  // the products of a dot product, summed by rotary pair: the contribution of each frequency
  const byFrequency = (products, rotary) =>
    pairs(rotary).map(([a, b, f], n) => ({ pair: n, dims: [a, b], inv_freq: f, sum: products[a] + products[b] }));

  const running = values => {
    let total = 0;
    return Float64Array.from(values, v => (total += v));
  };
  const largest = (values, n, size = Math.abs) => topOf(values.length, d => size(values[d]), n);
  // indices of the n largest of `count` numbers above 0, the largest first, without sorting them all
  const topOf = (count, value, n) => {
    const found = [];
    for (let j = 0; j < count; j++) {
      const v = value(j);
      if (!(v > 0) || (found.length === n && v <= value(found[n - 1]))) continue;
      let at = found.length;
      while (at > 0 && value(found[at - 1]) < v) at--;
      found.splice(at, 0, j);
      if (found.length > n) found.pop();
    }
    return found;
  };
  const summary = x => ({
    min: x.reduce((a, b) => Math.min(a, b)),
    max: x.reduce((a, b) => Math.max(a, b)),
    norm: Math.sqrt(x.reduce((a, b) => a + b * b, 0)),
  });

  // ---- softmax block by block, with a running maximum m, sum l and output o; after the last block they are those of
  // the whole row values(j) -> v_j or null; sink: its logit or null, the last term
  const online = (scores, values, E, block, sink = null) => {
    const seen = [];
    for (let j = 0; j < scores.length; j++) if (scores[j] !== -Infinity) seen.push(j);
    const found = [];
    let m = -Infinity,
      l = 0,
      o = values ? new Float64Array(E) : null;
    const take = (terms, from, to) => {
      const top = terms.reduce((a, [s]) => Math.max(a, s), m),
        fade = top === -Infinity ? 0 : Math.exp(m - top);
      l *= fade;
      if (o) o = o.map(x => x * fade);
      for (const [s, j] of terms) {
        const e = Math.exp(s - top);
        l += e;
        if (o && j !== null)
          values(j).forEach((x, d) => {
            o[d] += e * x;
          });
      }
      m = top;
      found.push({ from, to, m, l, lse: m + Math.log(l), z: o && o.map(x => x / l) });
    };
    for (let n = 0; n < seen.length; n += block) {
      const part = seen.slice(n, n + block);
      take(
        part.map(j => [scores[j], j]),
        part[0],
        part[part.length - 1],
      );
    }
    if (sink !== null) take([[sink, null]], null, null);
    return found;
  };

  // ---- one row of weights
  const falling = weights =>
    Float64Array.from(weights.filter(w => w > 0))
      .sort()
      .reverse();
  const keysFor = (sorted, share) => {
    // how many of the largest weights make up a share of the total
    const all = sorted.reduce((a, b) => a + b, 0);
    let total = 0;
    for (let n = 0; n < sorted.length; n++) if ((total += sorted[n]) >= share * all * (1 - 1e-12)) return n + 1;
    return sorted.length;
  };
  // mass by distance, in bins that double: 0, 1, 2-3, 4-7, ...; earlier keys have positive distances, later ones
  // negative
  const byDistance = (weights, distance) => {
    const bins = new Map();
    for (let j = 0; j < weights.length; j++) {
      if (weights[j] === 0) continue;
      const d = distance(j),
        size = Math.abs(d),
        level = size < 1 ? 0 : Math.floor(Math.log2(size)) + 1,
        key = d < 0 ? -level : level;
      const bin = bins.get(key) || {
        level: key,
        low: level ? 2 ** (level - 1) : 0,
        high: level ? 2 ** level - 1 : 0,
        mass: 0,
        keys: 0,
      };
      bin.mass += weights[j];
      bin.keys += 1;
      bins.set(key, bin);
    }
    return [...bins.values()].sort((a, b) => a.level - b.level);
  };
  const meanDistance = (weights, distance) => weights.reduce((sum, w, j) => (w ? sum + w * distance(j) : sum), 0);
  const entropy = (weights, extra = 0) => [...weights, extra].reduce((h, w) => (w > 0 ? h - w * Math.log(w) : h), 0);
  const divergence = (a, b) => {
    // Jensen-Shannon, in bits: 0 means equal, 1 means no overlap
    let d = 0;
    for (let j = 0; j < a.length; j++) {
      const m = (a[j] + b[j]) / 2;
      if (a[j] > 0) d += (a[j] / 2) * Math.log2(a[j] / m);
      if (b[j] > 0) d += (b[j] / 2) * Math.log2(b[j] / m);
    }
    return d;
  };
  const apart = (a, b) => Math.sqrt(a.reduce((sum, x, d) => sum + (x - b[d]) ** 2, 0));
  const furthest = (a, b) => a.reduce((top, x, d) => Math.max(top, Math.abs(x - b[d])), 0);

  // the slope of ALiBi for head h of H; regard.biases.alibi_slopes
  const alibiSlope = (H, h) => {
    const n = 2 ** Math.floor(Math.log2(H));
    return h < n ? 2 ** ((-8 * (h + 1)) / n) : 2 ** ((-4 * (2 * (h - n) + 1)) / n);
  };

  // tokens to lines of about `width` characters: [first, last + 1); a newline in a token ends its line
  const wide = token => [...token].reduce((n, c) => n + (c.codePointAt(0) >= 0x1100 ? 2 : 1), 0);
  const lines = (tokens, width) => {
    const found = [];
    let first = 0,
      used = 0;
    tokens.forEach((token, j) => {
      const size = Math.min(wide(token), width) + 1;
      if (used && used + size > width) {
        found.push([first, j]);
        first = j;
        used = 0;
      }
      used += size;
      if (/[\n⏎Ċ]|‹0A›/.test(token)) {
        found.push([first, j + 1]);
        first = j + 1;
        used = 0;
      }
    });
    if (first < tokens.length) found.push([first, tokens.length]);
    return found;
  };
  // tokens at which a text or a /pattern/flags begins, also across tokens, without regard to case unless there are
  // flags; a pattern with ^ or $ is compared with each token; null if it is not valid
  const joined = new WeakMap();
  const search = (tokens, asked) => {
    if (!asked) return [];
    const pattern = asked.match(/^\/(.+)\/([iu]*)$/),
      text = pattern ? pattern[1] : asked.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"),
      found = [];
    let rule;
    try {
      rule = new RegExp(text, `g${pattern?.[2] || "iu"}`);
    } catch {
      return null;
    }
    if (pattern && /[\^$]/.test(text)) return tokens.flatMap((token, j) => (token.search(rule) >= 0 ? [j] : []));
    if (!joined.has(tokens)) {
      const starts = new Uint32Array(tokens.length + 1);
      tokens.forEach((token, n) => {
        starts[n + 1] = starts[n] + token.length;
      });
      joined.set(tokens, { starts, whole: tokens.join("") });
    }
    const { starts, whole } = joined.get(tokens);
    let token = 0;
    for (const { index } of whole.matchAll(rule)) {
      while (token + 1 < tokens.length && starts[token + 1] <= index) token++;
      if (found[found.length - 1] !== token) found.push(token);
      if (found.length > 1e5) break;
    }
    return found;
  };

  return {
    pairs,
    unrotated,
    byFrequency,
    running,
    largest,
    topOf,
    summary,
    online,
    falling,
    keysFor,
    byDistance,
    meanDistance,
    entropy,
    divergence,
    apart,
    furthest,
    alibiSlope,
    wide,
    lines,
    search,
  };
})();

if (typeof module !== "undefined") module.exports = { ...module.exports, panels };
