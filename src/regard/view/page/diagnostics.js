// Diagnostics: row sums, weight on forbidden keys, and what the head attends to; over all rows, or over a stated
// sample.

{
  const { el, t, num, exact } = R,
    { soft, card, cards, curve, bars, line, run, table, tr } = R.ui,
    MOST = 1024,
    OFFSETS = 64;
  let bar = null,
    audit = null,
    body = null,
    metrics = null,
    status = null,
    of = "";

  const emptyMeasures = (p, h) => {
    const { T, N } = R.meta.places[p],
      step = Math.max(1, Math.ceil(T / MOST)),
      rows = Array.from({ length: Math.ceil(T / step) }, (_, n) => n * step),
      n = rows.length;
    return {
      p,
      h,
      rows,
      T,
      residual: new Float64Array(n),
      out: new Float64Array(n).fill(NaN),
      entropy: new Float64Array(n),
      columns: new Float64Array(N),
      offsets: new Float64Array(Math.min(OFFSETS, N)),
      counts: new Float64Array(Math.min(OFFSETS, N)),
      empty: 0,
      broken: 0,
      above: 0,
      ahead: 0,
      nowhere: 0,
    };
  };
  const measureRow = (x, n) => {
    const { p, h } = x,
      i = x.rows[n],
      row = R.math.row(p, h, i),
      out = R.math.out(p, h, i),
      a = R.math.qPosition(p, i);
    if (!row.n) {
      x.empty++;
      return;
    }
    x.residual[n] = row.sum + row.sink - 1;
    x.entropy[n] = row.n > 1 ? row.entropy / Math.log(row.n) : 0;
    if (!Number.isFinite(row.sum)) x.broken++;
    if (out) {
      const z = R.math.mixed(p, h, row.weights);
      x.out[n] = z ? panels.furthest(z, out) : NaN;
    }
    row.weights.forEach((w, j) => {
      const b = R.math.kPosition(p, j),
        d = a - b;
      x.columns[j] += w;
      if (w > 1 + 1e-6) x.above++;
      if (d < 0) x.ahead += w;
      if (b < 0) x.nowhere += w;
      if (d >= 0 && d < x.offsets.length && row.scores[j] !== -Infinity) {
        x.offsets[d] += w;
        x.counts[d]++;
      }
    });
  };
  const largestError = values => values.reduce((a, v) => (Number.isNaN(v) ? a : Math.max(a, Math.abs(v))), 0);
  const charts = x => {
    const { p, rows, T } = x,
      n = rows.length,
      name = k => R.rowName(p, rows[k]),
      ends = { low: "0", high: String(T - 1) },
      go = k => R.set({ i: rows[k], view: "row" });
    const profile = x.offsets.map((v, d) => (x.counts[d] ? v / x.counts[d] : 0)),
      known = x.out.some(v => !Number.isNaN(v)),
      heavy = panels.topOf(x.columns.length, j => x.columns[j], 5);
    const count = v => String(v),
      zero = (label, v, tip) =>
        R.tipped(
          el(
            "div",
            { class: "fact" },
            el("span", { class: "soft" }, t(label)),
            el("b", { class: `num ${v === 0 ? "good" : "bad"}` }, v === 0 ? "0" : num(v)),
          ),
          () => t(tip),
        );
    return [
      el(
        "p",
        {},
        el(
          "b",
          { class: `badge ${n === T ? "exact" : "pooled"}` },
          n === T ? t("diagnostics.all_rows", { n }) : t("diagnostics.sampled", { n, T }),
        ),
      ),
      cards(
        card(t("diagnostics.worst_row"), num(largestError(x.residual)), t("row.residual_is")),
        card(t("diagnostics.worst_out"), known ? num(largestError(x.out)) : "–", t("diagnostics.out_is")),
        zero("diagnostics.broken", x.broken, "diagnostics.broken_is"),
        zero("diagnostics.above", x.above, "diagnostics.above_is"),
        zero("diagnostics.nowhere", x.nowhere, "diagnostics.nowhere_is"),
        card(t("diagnostics.empty"), count(x.empty), t("diagnostics.empty_is")),
        card(t("diagnostics.ahead"), R.percent(x.ahead / n), t("diagnostics.ahead_is")),
      ),
      el(
        "div",
        { class: "split" },
        el(
          "div",
          { class: "card" },
          el("h2", {}, t("diagnostics.sums")),
          bars(x.residual, {
            label: t("diagnostics.residual"),
            ...ends,
            text: k => `${name(k)}\n${exact(x.residual[k])}`,
          }),
          known
            ? curve(x.out, {
                label: t("diagnostics.out"),
                kind: "v",
                ...ends,
                pick: go,
                text: k => `${name(k)}\n${exact(x.out[k])}`,
              })
            : soft(t("cell.no_out")),
          soft(t("diagnostics.leak")),
        ),
        el(
          "div",
          { class: "card" },
          el("h2", {}, t("diagnostics.habits")),
          curve(profile, {
            label: t("diagnostics.profile"),
            kind: "k",
            steps: true,
            low: "0",
            high: String(profile.length - 1),
            text: d => t("diagnostics.at_offset", { d, share: R.percent(profile[d]), n: x.counts[d] }),
          }),
          curve(x.entropy, {
            label: t("diagnostics.entropy"),
            top: 1,
            ...ends,
            pick: go,
            text: k => `${name(k)}\n${num(x.entropy[k])}`,
          }),
          curve(x.columns, {
            label: t("diagnostics.columns"),
            kind: "k",
            low: "0",
            high: String(x.columns.length - 1),
            text: j => `${R.keyName(p, j)}\n${num(x.columns[j])}`,
            pick: j => R.set({ j, view: "cell" }),
          }),
          el("h3", {}, t("diagnostics.heavy")),
          ...heavy.map(j =>
            line(R.keyName(p, j), R.percent(x.columns[j] / (n - x.empty)), x.columns[j] / x.columns[heavy[0]], {
              kind: "k",
              pick: () => R.set({ j, view: "cell" }),
            }),
          ),
        ),
      ),
    ];
  };

  // ---- every metric: this head's value, and its rank among all heads
  const metricsTable = () => {
    const { place: p, head: h } = R.state,
      rows = Object.entries(R.meta.metrics).flatMap(([name, { of, unit }]) => {
        const value = of[p]?.[h],
          all = of
            .flat()
            .filter(v => Number.isFinite(v))
            .sort((a, b) => b - a);
        if (!Number.isFinite(value)) return [];
        const chart = R.ui.svg("svg", {
            viewBox: "0 0 100 10",
            preserveAspectRatio: "none",
            class: "standing",
            role: "img",
            "aria-label": R.word(`metric.${name}`, name),
          }),
          low = all[all.length - 1],
          wide = all[0] - low || 1;
        const tick = (v, y1, y2, kind) => {
          const x = 1 + (98 * (v - low)) / wide;
          return R.ui.svg("line", { x1: x, x2: x, y1, y2, class: kind });
        };
        chart.append(...all.map(v => tick(v, 3, 7, "each")), tick(value, 0, 10, "this"));
        return [
          tr([
            el("b", {}, R.word(`metric.${name}`, name)),
            unit === "share" ? R.percent(value) : num(value),
            t("diagnostics.rank", { n: all.filter(v => v > value).length + 1, of: all.length }),
            chart,
            num(low),
            num(all[0]),
          ]),
        ];
      });
    return el(
      "div",
      { class: "card" },
      el("h2", {}, t("diagnostics.metrics", { head: R.headName(p, h) })),
      table(
        [
          t("diagnostics.metric"),
          t("cell.value"),
          t("diagnostics.rank_name"),
          t("diagnostics.all_heads"),
          t("diagnostics.least"),
          t("diagnostics.most"),
        ],
        rows,
        t("diagnostics.metrics", { head: R.headName(p, h) }),
      ),
    );
  };

  R.view({
    name: "diagnostics",
    title: "diagnostics.title",
    mount: node => {
      bar = R.ui.bar("diagnostics", false);
      status = el("p", { class: "soft", role: "status" });
      audit = el("div");
      body = el("div", { id: "diagnostics-body" });
      metrics = el("div");
      of = "";
      node.replaceChildren(bar.node, audit, status, body, metrics);
    },
    update: changed => {
      const { place: p, head: h } = R.state,
        key = `${p} ${h} ${R.theme()}`;
      bar.update();
      if (key === of) return;
      of = key;
      audit.replaceChildren(R.ui.verdict(R.place().audit) ?? soft(t("cell.no_audit")));
      metrics.replaceChildren(metricsTable());
      if (!R.math.has(p, h)) {
        run(
          "diagnostics",
          0,
          () => {},
          () => {},
        );
        status.textContent = "";
        body.replaceChildren(R.notExact(p, h));
        return;
      }
      const x = emptyMeasures(p, h);
      run(
        "diagnostics",
        x.rows.length,
        n => measureRow(x, n),
        (n, done) => {
          status.textContent = done ? "" : t("text.working", { n, of: x.rows.length });
          if (done) body.replaceChildren(...charts(x));
        },
      );
    },
  });
}
