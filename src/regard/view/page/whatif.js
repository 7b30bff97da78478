// The last steps of a cell's explanation: output projection, cost, check, and the same q and k under other mechanisms.

{
  const { el, t, num, exact } = R,
    { soft, mono, card, cards, strip, line, table, tr } = R.ui;

  // ---- 7 output projection: only an explanation of this query contains W_O and the residual stream
  R.ui.after = (p, h, i) => {
    const x = R.ui.explained(p, i),
      place = R.meta.places[p],
      out = R.math.out(p, h, i);
    const slot = el("p", {}, t("cell.slot", { from: h * place.E, to: (h + 1) * place.E - 1, of: place.H * place.E }));
    const z = out ? strip(t("cell.kernel_z", { head: h }), "z", out) : null;
    if (!x || !x.shares?.length) return [slot, z, soft(t("cell.no_projection"))];
    const top = x.shares.reduce((a, s) => Math.max(a, Math.abs(s)), 0) || 1;
    return [
      slot,
      z,
      el("h3", {}, t("cell.shares")),
      ...x.shares.map((share, n) =>
        line(t("cell.head_n", { n }), R.percent(share), share / top, {
          kind: "z",
          here: n === h,
          tip: exact(share),
          pick: () => R.set({ head: n }),
        }),
      ),
      x.head === h ? strip(t("cell.head_out", { head: h }), "z", x.head_out) : null,
      strip(t("cell.out"), "z", x.out),
      x.residual?.length ? strip(t("cell.residual"), "", x.residual) : null,
    ];
  };
  // the explanation in the page, if it is of this query
  R.ui.explained = (p, i) => {
    const x = R.meta.explanation;
    return x && x.place === R.meta.places[p].name && x.query === i ? x : null;
  };

  // every tensor of the layer, if the page contains an explanation: shape, mean, deviation and time
  R.ui.tensors = (p, i) => {
    const x = R.ui.explained(p, i);
    return !x?.tensors?.length
      ? null
      : el(
          "div",
          { id: "cell-tensors" },
          table(
            [t("cell.stage"), t("cell.shape"), t("cell.mean"), t("cell.std"), t("cell.ms")],
            x.tensors.map(one =>
              tr([
                el("b", {}, one.name),
                mono(one.shape.join(" × ")),
                mono(num(one.mean)),
                mono(num(one.std)),
                mono(one.seconds === null ? "" : num(1e3 * one.seconds)),
              ]),
            ),
            t("cell.tensors"),
          ),
          soft(t("cell.tensors_say")),
        );
  };

  // ---- 8 cost: numbers and units computed by Python
  R.ui.cost = (p, h, i) => {
    const cost = R.meta.places[p].cost,
      row = R.math.row(p, h, i),
      place = R.meta.places[p];
    const tensors = R.ui.tensors(p, i);
    const seen = soft(t("cell.row_reads", { n: row.n, N: place.N, G: place.G, D: place.D, E: place.E }));
    if (!cost) return [seen, soft(t("cell.no_cost")), tensors];
    const number = v =>
      typeof v === "number" ? (Number.isInteger(v) ? v.toLocaleString(R.state.lang) : num(v)) : String(v);
    const flat = Object.entries(cost).filter(([, v]) => typeof v !== "object"),
      inner = Object.entries(cost).filter(([, v]) => v && typeof v === "object");
    return [
      seen,
      tensors,
      cards(...flat.map(([name, v]) => card(R.word(`cost.${name}`, name), number(v)))),
      ...inner.map(([name, all]) => {
        const values = Object.entries(all),
          top = Math.max(...values.map(([, v]) => v)) || 1;
        return el(
          "div",
          {},
          el("h3", {}, R.word(`cost.${name}`, name)),
          ...values.map(([kind, v]) => line(R.word(`cost.${kind}`, kind), number(v), v / top, { kind: "k" })),
        );
      }),
    ];
  };

  // ---- 9 check: numbers that must agree, and their differences
  R.ui.check = (p, h, i, j) => {
    const row = R.math.row(p, h, i),
      out = R.math.out(p, h, i),
      z = out ? R.math.mixed(p, h, row.weights) : null,
      place = R.meta.places[p];
    if (!row.n) return [el("p", {}, t("cell.sees_nothing"))];
    const own = R.math.other(p, h, i, {}),
      wrong = Math.abs(row.sum + row.sink - 1),
      verdict = R.ui.verdict(place.audit);
    return [
      el("p", {}, t("cell.check_says")),
      table(
        [t("cell.compared"), t("cell.apart")],
        [
          tr([t("cell.check_sum"), mono(num(wrong))]),
          tr([t("cell.check_lse"), mono(num(Math.abs(own.denominator - row.denominator)))]),
          tr([t("cell.check_weight"), mono(num(Math.abs(own.weights[j] - row.weights[j])))]),
          z
            ? tr([t("cell.check_out"), mono(num(panels.furthest(z, out)))])
            : tr([t("cell.check_out"), t("cell.no_out")]),
        ],
        t("cell.step_9"),
      ),
      verdict ?? soft(t("cell.no_audit")),
    ];
  };
  R.ui.verdict = audit => {
    // the result of the audit of the recording at this place
    if (!audit || typeof audit.sound !== "boolean") return null;
    const bound = (name, error, allowed) =>
      error === null || error === undefined
        ? null
        : tr([t(name), mono(num(error), error <= allowed ? "good" : "bad"), mono(num(allowed))]);
    return el(
      "div",
      { class: "audit" },
      el(
        "p",
        {},
        el("b", { class: audit.sound ? "good" : "bad" }, t(audit.sound ? "cell.audit_good" : "cell.audit_bad")),
        " ",
        el("span", { class: "soft" }, t("cell.audit_rows", { n: audit.rows, of: audit.of })),
      ),
      ...(audit.findings ?? []).map(x => el("p", { class: "bad finding" }, String(x))),
      table(
        [t("cell.compared"), t("cell.apart"), t("cell.allowed")],
        [
          bound("cell.audit_sums", audit.residual, audit.allowed),
          bound("cell.audit_out", audit.output, audit.output_allowed),
        ].filter(x => x),
        t("cell.audit"),
      ),
    );
  };

  // ---- 10 the same q and k under another mechanism: each with its own parameter
  const dials = { temperature: 2, window: null, alibi: null, softcap: 5 };
  let chosen = "temperature";
  const specs = (p, h) => {
    const place = R.meta.places[p];
    dials.window ??= Math.max(1, Math.round(place.N / 4));
    dials.alibi ??= panels.alibiSlope(place.H, h);
    return {
      temperature: {
        spec: { temperature: dials.temperature },
        dial: range("temperature", -3, 3, 0.1, Math.log2(dials.temperature), x => 2 ** x),
      },
      window: { spec: { window: dials.window }, dial: range("window", 1, place.N, 1, dials.window, x => x) },
      alibi: {
        spec: { alibi: dials.alibi, nobias: true },
        dial: range("alibi", -12, 1, 0.25, Math.log2(dials.alibi), x => 2 ** x),
      },
      softcap: {
        spec: { softcap: dials.softcap },
        dial: range("softcap", -2, 7, 0.25, Math.log2(dials.softcap), x => 2 ** x),
      },
      noscale: { spec: { scale: 1 } },
      linear: { spec: { linear: true, nobias: true } },
    };
  };
  const range = (name, min, max, step, value, of) =>
    el("input", {
      type: "range",
      min,
      max,
      step,
      value,
      id: `whatif-${name}`,
      ariaLabel: t(`whatif.${name}`),
      oninput: e => {
        dials[name] = of(Number(e.target.value));
        chosen = name;
        fill();
      },
    });
  let fill = () => {};
  R.ui.whatIf = (p, h, i, j) => {
    const row = R.math.row(p, h, i),
      z = R.math.v(p, h, 0) ? R.math.mixed(p, h, row.weights) : null,
      place = R.meta.places[p];
    if (!row.n) return [el("p", {}, t("cell.sees_nothing"))];
    const box = el("div", { class: "whatif" }),
      all = specs(p, h),
      cells = {};
    const results = found => {
      const top = panels.topOf(place.N, n => found.weights[n], 1)[0],
        other = z ? R.math.mixed(p, h, found.weights) : null;
      return [
        num(found.weights[j]),
        top === undefined ? "–" : `${R.keyName(p, top)} · ${num(found.weights[top])}`,
        num(Math.exp(panels.entropy(found.weights, found.sink)), 3),
        num(panels.divergence([...row.weights, row.sink], [...found.weights, found.sink]), 3),
        other ? num(panels.apart(other, z) / (panels.summary(z).norm || 1), 3) : "–",
      ];
    };
    const names = Object.keys(all),
      head = ["mechanism", "dial", "p", "top", "effective", "divergence", "z"].map(x => t(`whatif.${x}`));
    const rows = names.map(name => {
      const pick = R.button(
        {
          class: "small",
          "data-whatif": name,
          onclick: () => {
            chosen = name;
            fill();
          },
        },
        t(`whatif.${name}`),
      );
      cells[name] = {
        pick,
        dial: el("span", { class: "num" }),
        values: Array.from({ length: 5 }, (_, n) => el("td", { class: n === 1 ? "num token" : "num" })),
      };
      return el(
        "tr",
        {},
        el("td", {}, pick),
        el("td", { class: "dial" }, all[name].dial ?? "", cells[name].dial),
        ...cells[name].values,
      );
    });
    const asIs = el(
      "tr",
      { class: "asis" },
      el("td", {}, el("b", {}, t("whatif.recorded"))),
      el("td", {}),
      ...results(row).map(x => el("td", { class: "num" }, x)),
    );
    fill = () => {
      const now = specs(p, h);
      for (const name of names) {
        const found = R.math.other(p, h, i, now[name].spec);
        if (name in dials) cells[name].dial.textContent = num(dials[name], 3);
        cells[name].pick.setAttribute("aria-pressed", String(name === chosen));
        results(found).forEach((x, n) => {
          cells[name].values[n].textContent = x;
        });
        if (name === chosen) box.replaceChildren(...pair(p, row, found, j, name));
      }
    };
    fill();
    return [
      el("p", {}, el("b", { class: "badge pooled" }, t("whatif.badge")), " ", t("whatif.says")),
      table(head, [asIs, ...rows], t("cell.step_10")),
      box,
    ];
  };
  const pair = (p, row, found, j, name) => {
    // what changes, key by key
    const { N } = R.meta.places[p],
      keys = panels.topOf(N, n => Math.max(row.weights[n], found.weights[n]), 8),
      top = Math.max(...keys.map(n => Math.max(row.weights[n], found.weights[n]))) || 1;
    if (!keys.includes(j)) keys.push(j);
    return [
      el("h3", {}, t("whatif.changes", { name: t(`whatif.${name}`) })),
      ...keys.map(n =>
        el(
          "div",
          { class: "pair" },
          line(R.keyName(p, n), num(row.weights[n]), row.weights[n] / top, {
            here: n === j,
            pick: () => R.set({ j: n }),
          }),
          line(t("whatif.then"), num(found.weights[n]), found.weights[n] / top, { kind: "z" }),
        ),
      ),
    ];
  };
}
