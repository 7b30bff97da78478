// A field holds the weights of one head, and pools them for any zoom. The rows of an embedded head are computed
// exactly, in slices of a few milliseconds; a head that is not embedded has only the blocks of its thumbnail.
// field.blocks(view, a, b, look) returns one number for each block of a x b cells: MASKED where no query of the block
// may attend to a key of it.

const MASKED = -2,
  HIDDEN = -3,
  fields = (() => {
    const WHOLE = 1 << 24; // number of cells up to which a whole pattern is cached
    const MOST_ROWS = 1024; // number of rows that are sampled from a larger pattern
    const FIRST = 4; // number of first positions that count as sinks
    const kept = new Map();
    const look = () => ({ stat: R.state.stat, scale: R.state.scale, sinks: R.state.sinks });
    const sinks = new Map(); // place -> for each column, 1 if its position is one of the first ones
    const sinkColumns = p => {
      if (!sinks.has(p))
        sinks.set(
          p,
          Uint8Array.from({ length: R.meta.places[p].N }, (_, j) => {
            const at = R.math.kPosition(p, j);
            return at >= 0 && at < FIRST ? 1 : 0;
          }),
        );
      return sinks.get(p);
    };

    // rows in the order 0, n/2, n/4, 3n/4, ...: a coarse picture appears at once and is refined
    const coarseFirst = (from, to) => {
      const order = [],
        seen = new Set();
      for (let step = 2 ** Math.ceil(Math.log2(Math.max(to - from, 1))); step >= 1; step /= 2) {
        for (let i = from; i < to; i += step)
          if (!seen.has(i)) {
            seen.add(i);
            order.push(i);
          }
      }
      return order;
    };

    const exact = (p, h, spec) => {
      const { T, N } = R.meta.places[p],
        whole = T * N <= WHOLE;
      const values = whole ? new Float32Array(T * N) : null,
        have = new Uint8Array(T),
        n = new Uint32Array(T),
        sink = new Float32Array(T),
        first = new Float32Array(T),
        spread = new Float32Array(T);
      const firsts = sinkColumns(p);
      const row = i => {
        const found = spec ? R.math.other(p, h, i, spec) : R.math.row(p, h, i);
        const into = whole ? values.subarray(i * N, (i + 1) * N) : new Float32Array(N);
        let hidden = 0,
          entropy = 0;
        for (let j = 0; j < N; j++) {
          const w = found.weights[j];
          into[j] = found.scores[j] === -Infinity ? MASKED : w;
          if (firsts[j]) hidden += w;
          if (w > 0) entropy -= w * Math.log(w);
        }
        n[i] = found.n;
        sink[i] = found.sink;
        first[i] = hidden + found.sink;
        if (found.sink > 0) entropy -= found.sink * Math.log(found.sink);
        spread[i] = found.n > 1 ? entropy / Math.log(found.n + (found.sink > 0 ? 1 : 0)) : 0;
        return into;
      };
      const at = i => (whole ? values.subarray(i * N, (i + 1) * N) : row(i));
      let job = null;
      const work = (view, time) => {
        // computes rows for some milliseconds; returns true when every row of the view is computed
        const key = `${view.i0} ${view.i1}`;
        if (!job || job.key !== key)
          job = { key, at: 0, order: coarseFirst(view.i0, view.i1).slice(0, whole ? undefined : MOST_ROWS) };
        const stop = performance.now() + time;
        while (job.at < job.order.length) {
          const i = job.order[job.at++];
          if (!have[i]) {
            if (whole || job.at <= MOST_ROWS) row(i);
            have[i] = 1;
          }
          if (performance.now() > stop) return job.at >= job.order.length;
        }
        return true;
      };
      const blocks = (view, a, b, { stat, scale, sinks }) => {
        const rows = Math.ceil((view.i1 - view.i0) / a),
          cols = Math.ceil((view.j1 - view.j0) / b),
          found = new Float32Array(rows * cols).fill(MASKED);
        const sum = new Float64Array(cols),
          most = new Float64Array(cols),
          cells = new Uint32Array(cols),
          lift = scale === "lift";
        const hide = sinks ? new Uint8Array(N) : firsts;
        let before = -1;
        for (let I = 0; I < rows; I++) {
          let some = 0,
            known = false;
          sum.fill(0);
          most.fill(-1);
          cells.fill(0);
          for (let i = view.i0 + I * a, end = Math.min(i + a, view.i1); i < end; i++) {
            if (!have[i]) continue;
            known = true;
            if (!n[i] && !first[i]) continue; // a row that sees no key is left out of the mean
            some++;
            const w = at(i),
              by = (sinks ? 1 : first[i] < 1 ? 1 / (1 - first[i]) : 0) * (lift ? n[i] : 1);
            for (let j = view.j0; j < view.j1; j++) {
              if (w[j] === MASKED) continue;
              const J = Math.floor((j - view.j0) / b),
                x = hide[j] ? 0 : w[j] * by;
              cells[J]++;
              sum[J] += x;
              if (!(x <= most[J])) most[J] = x;
            }
          }
          const out = found.subarray(I * cols, (I + 1) * cols);
          if (!known) {
            // not computed yet: use the rows above
            if (before >= 0) out.set(found.subarray(before * cols, (before + 1) * cols));
            continue;
          }
          before = I;
          for (let J = 0; J < cols; J++) {
            if (cells[J]) out[J] = stat === "max" ? most[J] : lift ? sum[J] / cells[J] : sum[J] / some;
            if (cells[J] && b === 1 && hide[view.j0 + J]) out[J] = HIDDEN;
          }
        }
        return { rows, cols, values: found };
      };
      const sampled = view => {
        let m = 0;
        for (let i = view.i0; i < view.i1; i++) m += have[i];
        return m / Math.max(1, view.i1 - view.i0);
      };
      return {
        p,
        h,
        T,
        N,
        exact: true,
        size: [1, 1],
        work,
        blocks,
        at,
        have,
        n,
        first,
        spread,
        sampled,
        spec: spec || null,
      };
    };

    // the number of pairs that the mask allows in each block of the thumbnail; Python counted them, once for all heads
    // or for each head
    const open = (p, h, blocks) => {
      const all = R.arrays[R.meta.places[p].visible],
        at = all.length > blocks ? R.meta.places[p].heads.indexOf(h) * blocks : 0;
      return all.subarray(at, at + blocks);
    };
    const thumb = (p, h) => {
      const { T, N, heads } = R.meta.places[p],
        side = 64,
        a = Math.max(1, Math.ceil(T / side)),
        b = Math.max(1, Math.ceil(N / side));
      const rows = Math.ceil(T / a),
        cols = Math.ceil(N / b),
        from = heads.indexOf(h) * rows * cols,
        pairs = open(p, h, rows * cols);
      const octaves = R.meta.thumbs.octaves,
        decode = byte => (byte === 0 ? 0 : 2 ** (octaves * ((byte - 1) / 254 - 1)));
      const value = { mass: R.arrays[`p${p}.mass`], max: R.arrays[`p${p}.max`] };
      const cell = (I, J, { stat, scale }) => {
        const at = I * cols + J;
        if (!pairs[at]) return MASKED;
        const w = decode(value[stat][from + at]);
        if (scale !== "lift") return w;
        let n = 0;
        for (let K = 0; K < cols; K++) n += pairs[I * cols + K];
        return stat === "max" ? (w * n) / (Math.min((I + 1) * a, T) - I * a) : (w * n) / pairs[at];
      };
      const blocks = (view, _a, _b, how) => {
        // the thumbnail's own blocks, one number for each cell or block of the view
        const R_ = Math.ceil((view.i1 - view.i0) / _a),
          C = Math.ceil((view.j1 - view.j0) / _b),
          found = new Float32Array(R_ * C);
        for (let I = 0; I < R_; I++)
          for (let J = 0; J < C; J++)
            found[I * C + J] = cell(Math.floor((view.i0 + I * _a) / a), Math.floor((view.j0 + J * _b) / b), how);
        return { rows: R_, cols: C, values: found };
      };
      return {
        p,
        h,
        T,
        N,
        exact: a * b === 1,
        size: [a, b],
        blocks,
        cell,
        work: () => true,
        sampled: () => 1,
        spec: null,
        rows,
        cols,
      };
    };

    // two fields of one shape, or of the part that both have: A - B, or log2(A / B)
    const pair = (A, B, how) => {
      const T = Math.min(A.T, B.T),
        N = Math.min(A.N, B.N);
      const blocks = (view, a, b, look) => {
        const plain = { ...look, scale: "linear" },
          x = A.blocks(view, a, b, plain),
          y = B.blocks(view, a, b, plain),
          values = new Float32Array(x.values.length);
        for (let n = 0; n < values.length; n++) {
          const u = x.values[n],
            v = y.values[n];
          if (u < -1 && v < -1) {
            values[n] = u;
            continue;
          }
          const one = Math.max(u, 0),
            other = Math.max(v, 0);
          if (Number.isNaN(u) || Number.isNaN(v)) values[n] = NaN;
          else if (how === "difference") values[n] = one - other;
          else values[n] = one === other ? 0 : one === 0 ? -Infinity : other === 0 ? Infinity : Math.log2(one / other);
        }
        return { rows: x.rows, cols: x.cols, values };
      };
      const size = [Math.max(A.size[0], B.size[0]), Math.max(A.size[1], B.size[1])];
      return {
        T,
        N,
        exact: A.exact && B.exact,
        size,
        blocks,
        A,
        B,
        work: (view, time) => {
          const x = A.work(view, time / 2),
            y = B.work(view, time / 2);
          return x && y;
        },
        sampled: view => Math.min(A.sampled(view), B.sampled(view)),
      };
    };

    const thumbs = new Map();
    const small = (p, h) => {
      const key = `${p} ${h}`;
      if (!thumbs.has(key)) thumbs.set(key, thumb(p, h));
      return thumbs.get(key);
    };
    const get = (p, h, spec = null) => {
      const key = `${p} ${h} ${JSON.stringify(spec)}`;
      if (!kept.has(key)) kept.set(key, R.math.has(p, h) ? exact(p, h, spec) : small(p, h));
      const found = kept.get(key);
      kept.delete(key); // the newest last; only a few are cached
      kept.set(key, found);
      for (const old of kept.keys())
        if (kept.size > 6) kept.delete(old);
        else break;
      return found;
    };

    const image = ({ rows, cols, values }, scale) => {
      // numbers in the colours of a scale
      const { ramp, at } = R.SCALES[scale];
      return R.picture(rows, cols, ramp, n =>
        values[n] === MASKED ? null : values[n] === HIDDEN ? "hidden" : at(values[n]),
      );
    };
    return { get, small, pair, image, look, FIRST };
  })();
