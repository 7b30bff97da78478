// Explain one cell: the sentence, one query, one key, ten steps; each number comes from the recording, or is computed
// from it on this page.

{
  const { el, t, num, exact } = R,
    { soft, mono, card, cards, strip, bars, line, others, table, tr } = R.ui;
  const STEPS = 10;
  let bar = null,
    body = null,
    reading = null,
    arcs = null,
    shown = 0,
    everything = false,
    beforeRotation = false,
    // shown: the step that is open, 0 for none; everything: whether all are open; beforeRotation: whether q and k are
    // shown as they were before the rotation
    block = 4;

  const here = () => ({ p: R.state.place, h: R.state.head, i: R.state.i, j: R.state.j, place: R.place() });
  const formula = (text, lit) =>
    el(
      "p",
      { class: "formula num" },
      ...text.split(/(\S+)/).map(part => (part === lit ? el("b", { class: "s" }, part) : part)),
    );
  const eq = text => el("span", { class: "equation" }, text);
  const fact = (name, value) =>
    el("li", {}, el("span", { class: "soft" }, `${t(name)} `), el("b", { class: "token" }, String(value)));
  const maskReason = cell => (cell.visible ? "" : R.why(cell.why));

  const makers = [
    // 1 location of the cell
    ({ p, h, i, j, place }, cell) => {
      const rule = R.math.rule(p, i),
        G = place.G;
      return [
        el("p", {}, t("cell.where", { query: R.rowName(p, i), key: R.keyName(p, j) })),
        el(
          "ul",
          { class: "facts" },
          fact("cell.place", place.name || place.label),
          fact("cell.head", t("cell.of", { n: h, last: place.H - 1 })),
          fact("cell.group", t("cell.of", { n: R.math.group(p, h), last: G - 1 })),
          fact("cell.q_position", R.math.qPosition(p, i)),
          fact("cell.k_position", R.math.kPosition(p, j)),
          fact("cell.kernel", rule.kernel ?? place.kernel),
          fact("cell.dtype", place.dtype),
          place.key_kind === "keys" ? null : fact("cell.keys_are", place.key_kind),
          fact("cell.mask", rule.mask.text ?? rule.text ?? ""),
        ),
        place.H > G ? soft(t("cell.shared", { group: R.math.group(p, h), heads: place.H / G })) : null,
        cell.visible ? null : el("p", { class: "bad" }, t("cell.is_masked", { why: maskReason(cell) })),
        soft(t("cell.axes")),
      ];
    },
    // 2 query, key and value
    ({ p, h, i, j, place }) => {
      const q = R.math.q(p, h, i),
        k = R.math.k(p, h, j),
        v = R.math.v(p, h, j),
        turn = place.rotary;
      const [a, b] = [R.math.qPosition(p, i), R.math.kPosition(p, j)],
        old = beforeRotation && turn;
      const toggle = turn
        ? el(
            "div",
            { class: "controls" },
            R.button(
              {
                id: "cell-rotary",
                ariaPressed: String(beforeRotation),
                onclick: () => {
                  beforeRotation = !beforeRotation;
                  draw();
                },
              },
              t("cell.before_rotary"),
            ),
            el("span", { class: "soft" }, t(beforeRotation ? "cell.unrotated" : "cell.rotated")),
          )
        : soft(t(/latents/.test(place.key_kind) ? "cell.latents" : "cell.no_rotary"));
      const table = turn
        ? el(
            "details",
            {},
            el("summary", {}, t("cell.angles", { n: turn.inv_freq.length, layout: t(`cell.layout_${turn.layout}`) })),
            el(
              "pre",
              { class: "num", tabIndex: 0 },
              panels
                .pairs(turn)
                .map(([c, d, f], n) =>
                  t("cell.angle", { n, dims: `${c}, ${d}`, q: num(a * f), k: num(b * f), apart: num((a - b) * f) }),
                )
                .join("\n"),
            ),
          )
        : null;
      return [
        toggle,
        strip(t("cell.q_of", { token: R.rowName(p, i) }), "q", old ? panels.unrotated(q, a, turn) : q),
        strip(t("cell.k_of", { token: R.keyName(p, j) }), "k", old ? panels.unrotated(k, b, turn) : k),
        v ? strip(t("cell.v_of", { token: R.keyName(p, j) }), "v", v) : soft(t("cell.no_v")),
        table,
        howQWasComputed(p, h, i),
      ];
    },
    // 3 products q_m k_m, dim by dim
    ({ place }, cell) => {
      const sum = panels.running(cell.products),
        top = panels.largest(cell.products, 3),
        rest = cell.dot - top.reduce((a, d) => a + cell.products[d], 0);
      const said = top.map(d => t("cell.term", { v: num(cell.products[d]), d })).join(" + ");
      const waves = place.rotary ? panels.byFrequency(cell.products, place.rotary) : null;
      return [
        formula("q · k = Σ_m q_m k_m", "q_m"),
        bars(cell.products, {
          label: t("cell.products"),
          line: sum,
          low: t("panel.dim", { d: 0 }),
          high: t("panel.dim", { d: place.D - 1 }),
          text: d =>
            `${t("panel.dim", { d })}\nq_m k_m ${exact(cell.products[d])}\n${t("cell.running")} ${exact(sum[d])}`,
        }),
        soft(t("cell.line_is_running")),
        el(
          "p",
          {},
          mono(
            `${said} + ${t("cell.rest", { v: num(rest), n: cell.products.length - top.length })} = ${num(cell.dot)}`,
          ),
        ),
        waves
          ? bars(
              waves.map(w => w.sum),
              {
                label: t("cell.by_frequency"),
                low: t("cell.fast"),
                high: t("cell.slow"),
                text: n =>
                  [
                    t("cell.pair", { n, dims: waves[n].dims.join(", ") }),
                    t("cell.turns", { f: num(waves[n].inv_freq) }),
                    exact(waves[n].sum),
                  ].join("\n"),
              },
            )
          : null,
      ];
    },
    // 4 the score, step by step
    ({ p, i }, cell) => {
      const rule = R.math.rule(p, i),
        link = (name, how, v) => tr([el("b", {}, t(name)), how, mono(exact(v), "s")]);
      return [
        formula("s = softcap( scale · q·k ) + bias, then mask", "scale"),
        table(
          [t("cell.link"), t("cell.how"), t("cell.value")],
          [
            link("cell.dot", "q · k", cell.dot),
            link("cell.scaled", `× ${exact(cell.scale)}`, cell.scaled),
            cell.softcap === null
              ? tr([t("cell.softcap"), t("cell.none"), "="])
              : link("cell.softcap", eq(`${exact(cell.softcap)} · tanh( s / ${exact(cell.softcap)} )`), cell.capped),
            rule.bias
              ? link(
                  "cell.bias",
                  el("span", { class: "token" }, `+ ${exact(cell.bias)} · ${rule.bias.text}`),
                  cell.unmasked,
                )
              : tr([t("cell.bias"), t("cell.none"), "="]),
            tr([
              el("b", {}, t("cell.masked")),
              cell.visible ? t("cell.sees") : el("b", { class: "bad" }, maskReason(cell)),
              mono(exact(cell.score), "s"),
            ]),
          ],
          t("cell.chain"),
        ),
      ];
    },
    // 5 the softmax of the row, and the same block by block
    ({ p, h, i, j, place }, cell) => {
      const row = R.math.row(p, h, i),
        m = row.max,
        b = R.math.sink(p, h, i),
        top = panels.topOf(place.N, n => row.weights[n], 8);
      const total =
        row.scores.reduce((a, s) => (s === -Infinity ? a : a + Math.exp(s - m)), 0) +
        (b === null ? 0 : Math.exp(b - m));
      if (!row.n) return [el("p", {}, t("cell.sees_nothing"))];
      const list = top.includes(j) || !cell.visible ? top : [...top, j],
        shown = list.reduce((a, n) => a + row.weights[n], 0);
      const form = Math.exp(cell.score - m) / total;
      return [
        formula("p = exp( s − lse )", "lse"),
        cards(
          card(eq("m = max s"), exact(m)),
          card(eq("Σ exp( s − m )"), exact(total)),
          card(t("cell.lse"), exact(row.lse), t("cell.lse_is")),
          b === null ? null : card(t("cell.sink"), t("cell.sink_value", { b: num(b), share: num(row.sink) })),
          card("Σ p", exact(row.sum + row.sink)),
        ),
        el(
          "p",
          {},
          t("cell.two_forms"),
          " ",
          mono(`exp(${num(cell.score)} − ${num(m)}) / ${num(total)} = ${num(form, 9)}`, "equation"),
          " · ",
          mono(`exp(${num(cell.score)} − ${num(cell.denominator)}) = ${num(cell.weight, 9)}`, "equation"),
        ),
        el("h3", {}, t("cell.competitors", { n: row.n })),
        ...list.map(n =>
          line(R.keyName(p, n), num(row.weights[n]), row.weights[n] / (row.weights[row.top] || 1), {
            here: n === j,
            tip: `${R.keyName(p, n)}\ns ${exact(row.scores[n])}\np ${exact(row.weights[n])}`,
            pick: () => R.set({ j: n }),
          }),
        ),
        row.n > list.length ? others(row.n - list.length, Math.max(0, row.sum - shown)) : null,
        online(p, h, i, row, b),
      ];
    },
    // 6 the weighted sum of the values
    ({ p, h, i, j, place }) => {
      const row = R.math.row(p, h, i);
      if (!R.math.v(p, h, 0)) return [el("p", {}, t("cell.no_v"))];
      const size = new Float64Array(place.N).map((_, n) =>
        row.weights[n] ? row.weights[n] * panels.summary(R.math.v(p, h, n)).norm : 0,
      );
      const top = panels.topOf(place.N, n => size[n], 8),
        z = R.math.mixed(p, h, row.weights),
        out = R.math.out(p, h, i),
        weightedValue = R.math.v(p, h, j).map(x => x * row.weights[j]);
      const rest = row.weights.reduce((a, w, n) => a + (w > 0 && !top.includes(n) ? w : 0), 0),
        n = row.weights.filter(w => w > 0).length - top.length;
      const sums = [],
        sum = new Float64Array(place.E);
      for (const key of top)
        sums.push(panels.summary(sum.map((x, d) => (sum[d] = x + row.weights[key] * R.math.v(p, h, key)[d]))).norm);
      return [
        formula("z = Σ_j p_j v_j", "v_j"),
        el("h3", {}, t("cell.by_size")),
        ...top.map((key, at) =>
          line(R.keyName(p, key), num(size[key]), size[key] / size[top[0]], {
            kind: "v",
            here: key === j,
            pick: () => R.set({ j: key }),
            more: t("cell.so_far", { norm: num(sums[at]) }),
            tip: `${R.keyName(p, key)}\np ${exact(row.weights[key])}\n‖p v‖ ${exact(size[key])}`,
          }),
        ),
        n > 0 ? others(n, rest) : null,
        strip(t("cell.gives", { token: R.keyName(p, j) }), "v", weightedValue),
        strip(t("cell.z"), "z", z),
        out ? el("p", {}, t("cell.against_out"), " ", mono(num(panels.furthest(z, out)))) : soft(t("cell.no_out")),
      ];
    },
    // 7 output projection and residual stream
    ({ p, h, i }) => R.ui.after(p, h, i),
    // 8 cost, 9 check, 10 what if
    ({ p, h, i }) => R.ui.cost(p, h, i),
    ({ p, h, i, j }) => R.ui.check(p, h, i, j),
    ({ p, h, i, j }) => R.ui.whatIf(p, h, i, j),
  ];

  // how the model computed this q, step by step, if the page contains its explanation
  const howQWasComputed = (p, h, i) => {
    const x = R.ui.explained(p, i);
    return x && x.head === h && x.q?.length > 1
      ? el(
          "details",
          {},
          el("summary", {}, t("cell.made_by", { n: x.q.length })),
          ...x.q.map(step =>
            el(
              "div",
              {},
              formula(step.equation),
              strip(t("cell.q_step", { step: R.word(`step.${step.name}`, step.name) }), "q", step.values),
            ),
          ),
        )
      : null;
  };
  const online = (p, h, i, row, b) => {
    const values = R.math.v(p, h, 0) ? n => R.math.v(p, h, n) : null,
      rounds = panels.online(row.scores, values, R.place().E, block, b);
    const sizes = [1, 2, 4, 16, 64, 256].map(n => [n, String(n)]);
    const pick = n => {
      block = Number(n);
      draw();
    };
    const choose = R.select("cell-block", sizes, block, pick, { ariaLabel: t("cell.block") });
    const part = rounds.length > 12 ? [...rounds.slice(0, 6), null, ...rounds.slice(-5)] : rounds,
      end = rounds[rounds.length - 1];
    const rows = part.map(x =>
      x === null
        ? tr([t("cell.rounds", { n: rounds.length - 11 })])
        : tr([
            x.from === null ? t("cell.the_sink") : `${x.from} … ${x.to}`,
            num(x.m, 6),
            num(x.l, 6),
            num(x.lse, 9),
            x.z ? num(panels.summary(x.z).norm, 6) : "–",
          ]),
    );
    return el(
      "details",
      {
        class: "online",
        open: online.open,
        ontoggle: e => {
          online.open = e.target.open;
        },
      },
      el("summary", {}, t("cell.online")),
      el("div", { class: "controls" }, R.labelled(t("cell.block"), choose)),
      table([t("cell.keys"), "m", "l", "m + ln l", "‖o / l‖"], rows, t("cell.online")),
      el("p", {}, t("cell.ends_in", { mine: num(end.lse, 9), kernel: num(row.denominator, 9) })),
    );
  };

  // ---- the view: the sentence, and the steps, of which one at a time is open
  const go = n => {
    everything = false;
    shown = Math.min(STEPS, Math.max(0, n));
    reveal();
    const summary = body.children[shown - 1]?.querySelector("summary");
    summary?.focus({ preventScroll: true });
    summary?.scrollIntoView({ block: "nearest", behavior: "instant" });
  };
  const all = () => {
    everything = !everything;
    shown = 0;
    reveal();
  };
  const reveal = () => {
    [...body.children].forEach((node, n) => {
      node.open = everything || n + 1 === shown;
    });
  };
  const opened = (node, n) => {
    if (everything || node.open === (n === shown)) return;
    shown = node.open ? n : shown === n ? 0 : shown;
    reveal();
  };
  const draw = () => {
    const at = here();
    bar.update();
    if (!R.math.has(at.p, at.h)) {
      reading.replaceChildren();
      arcs = null;
      body.replaceChildren(R.notExact(at.p, at.h));
      return;
    }
    const cell = R.math.cell(at.p, at.h, at.i, at.j),
      strip = R.ui.reading.strip(at.p, at.h, at.i, at.j),
      heads = R.ui.reading.heads(at.p, at.h, at.i);
    reading.replaceChildren(...[strip?.node, heads].filter(Boolean));
    arcs = strip?.draw;
    arcs?.();
    body.replaceChildren(
      ...makers.map((make, n) => {
        const title = el("h2", {}, el("span", { class: "n" }, String(n + 1)), " ", t(`cell.step_${n + 1}`));
        return el(
          "details",
          {
            class: "card step",
            id: `cell-step-${n + 1}`,
            open: everything || n + 1 === shown,
            ontoggle: e => {
              if (e.target.id === `cell-step-${n + 1}`) opened(e.target, n + 1);
            },
          },
          el("summary", {}, title),
          ...make(at, cell),
        );
      }),
    );
  };
  const said = (p, h, i, j) =>
    t("cell.says", {
      query: R.rowName(p, i),
      key: R.keyName(p, j),
      weight: num(R.math.has(p, h) ? R.math.weights(p, h, i)[j] : NaN),
    });

  R.view({
    name: "cell",
    title: "cell.title",
    mount: node => {
      bar = R.ui.bar("cell");
      body = el("div", { class: "steps" });
      reading = el("div", { class: "reading" });
      const sentence = el("p", { id: "cell-says", class: "says" });
      node.replaceChildren(
        sentence,
        reading,
        bar.node,
        body,
        el(
          "div",
          { class: "controls" },
          R.button(
            { id: "cell-all", onclick: all },
            t("cell.show_all"),
          ),
          el("span", { class: "soft" }, t("cell.keyboard")),
        ),
      );
      R.ui.sentence = () => {
        sentence.textContent = said(R.state.place, R.state.head, R.state.i, R.state.j);
      };
    },
    update: changed => {
      if (changed.size === 1 && changed.has("size")) return arcs?.();
      draw();
      R.ui.sentence();
    },
  });
  addEventListener("keydown", e => {
    if (
      R.state.view !== "cell" ||
      e.altKey ||
      e.ctrlKey ||
      e.metaKey ||
      /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)
    )
      return;
    const to = { n: shown + 1, p: shown - 1 }[e.key];
    if (to !== undefined) go(to);
    if (e.key === "0") all();
  });
}
