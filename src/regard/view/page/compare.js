// Compare A and B: two heads, layers, prompts, models or kernels, or one head's q and k under another mechanism.
{
  const { el, t } = R;
  const MECHANISMS = {
    window: 16,
    alibi: 0.25,
    softcap: 5,
    temperature: 2,
    noscale: null,
    nobias: null,
    nosink: null,
    linear: null,
  };
  let plots,
    a,
    b,
    rest,
    how = "difference",
    strip,
    stripLabel,
    most,
    badge,
    notes,
    headings,
    mechanism,
    amount,
    legends,
    drawn = "";
  const view = { i0: 0, i1: 1, j0: 0, j1: 1 };
  const B = () => R.state.b || { place: R.state.place, head: R.state.head };
  const spec = () => {
    const [name, value] = R.state.m.split(":"),
      n = Number(value);
    if (!(name in MECHANISMS)) return null;
    return {
      window: { window: Math.max(1, Math.round(n)) },
      alibi: { alibi: n, nobias: true },
      softcap: { softcap: n > 0 ? n : null },
      temperature: { temperature: n > 0 ? n : 1 },
      noscale: { scale: 1 },
      nobias: { nobias: true },
      nosink: { nosink: true },
      linear: { linear: true },
    }[name];
  };
  const fieldA = () => fields.get(R.state.place, R.state.head);
  const fieldB = () => fields.get(B().place, B().head, R.math.has(B().place, B().head) ? spec() : null);
  const same = () => ({ T: Math.min(fieldA().T, fieldB().T), N: Math.min(fieldA().N, fieldB().N) });
  const plainScale = () => (R.state.scale === "lift" ? "log" : R.state.scale);
  const thirdScale = () => (how === "ratio" ? "ratio" : R.state.scale === "linear" ? "signed" : "signedlog");
  const third = () => fields.pair(fieldA(), fieldB(), how);
  // A and B both show the rows and columns that both have, at the same zoom
  const cut = field => {
    const { T, N } = same();
    return { ...field, T, N };
  };

  const value = (p, h, s, i, j) => {
    if (!R.math.has(p, h)) {
      const field = fields.small(p, h),
        [x, y] = field.size;
      return Math.max(0, field.cell(Math.floor(i / x), Math.floor(j / y), { stat: R.state.stat, scale: "linear" }));
    }
    return s ? R.math.other(p, h, i, s).weights[j] : R.math.row(p, h, i).weights[j];
  };
  const label = (i, j) => {
    const other = B(),
      u = value(R.state.place, R.state.head, null, i, j),
      v = value(other.place, other.head, spec(), i, j);
    const rows = [...new Set([R.rowName(R.state.place, i), R.rowName(other.place, i)])].join(" | "),
      keys = [...new Set([R.keyName(R.state.place, j), R.keyName(other.place, j)])].join(" | ");
    return [
      `${t("map.query")} ${rows}`,
      `${t("map.key")} ${keys}`,
      `A ${R.exact(u)}`,
      `B ${R.exact(v)}`,
      `A − B ${R.num(u - v)}`,
      `log₂ A / B ${u === v ? 0 : R.num(Math.log2(u / v))}`,
    ].join("\n");
  };

  // ---- Jensen-Shannon divergence of each row, in bits: 0 means equal, 1 means no overlap
  const divergence = (x, y) => {
    const total = row => row.reduce((sum, w) => sum + Math.max(w, 0), 0);
    const [s, u] = [total(x), total(y)];
    if (!(s > 0) || !(u > 0)) return s > 0 || u > 0 ? 1 : 0;
    const shares = (row, sum) => Float64Array.from(row, w => Math.max(w, 0) / sum);
    return panels.divergence(shares(x, s), shares(y, u));
  };
  const rows = () => {
    const A = fieldA(),
      C = fieldB(),
      { T, N } = same(),
      from = [],
      found = [];
    if (!A.exact || !C.exact) {
      const size = Math.max(A.size[0], C.size[0]),
        wide = Math.max(A.size[1], C.size[1]),
        look = { stat: "mass", scale: "linear", sinks: true },
        part = { i0: 0, i1: T, j0: 0, j1: N };
      A.work(part, 1e4);
      C.work(part, 1e4);
      const x = A.blocks(part, size, wide, look),
        y = C.blocks(part, size, wide, look);
      for (let I = 0; I < x.rows; I++) {
        from.push(I * size);
        found.push(
          divergence(x.values.subarray(I * x.cols, (I + 1) * x.cols), y.values.subarray(I * y.cols, (I + 1) * y.cols)),
        );
      }
      return { from, found, size };
    }
    for (let i = 0; i < T; i++) {
      if (!A.have[i] || !C.have[i]) continue;
      from.push(i);
      found.push(divergence(A.at(i).subarray(0, N), C.at(i).subarray(0, N)));
    }
    return { from, found, size: 1 };
  };
  const drawStrip = () => {
    const { from, found, size } = rows(),
      { shape } = plots[2].state(),
      pen = strip.getContext("2d"),
      dpr = devicePixelRatio || 1;
    if (!shape) return;
    strip.width = 40 * dpr;
    strip.height = Math.round((shape.top + shape.height + 2) * dpr);
    strip.style.width = "40px";
    strip.style.height = `${strip.height / dpr}px`;
    const y = i => (shape.top + ((i - view.i0) / (view.i1 - view.i0)) * shape.height) * dpr;
    pen.fillStyle = R.css("--hint");
    pen.fillRect(0, shape.top * dpr, strip.width, shape.height * dpr);
    pen.fillStyle = R.css("--z");
    found.forEach((d, n) => {
      const i = from[n];
      if (i + size <= view.i0 || i >= view.i1) return;
      const top = Math.max(y(i), shape.top * dpr);
      pen.fillRect(0, top, Math.max(1, strip.width * Math.min(1, d)), Math.max(1, y(i + size) - top));
    });
    const mean = found.length ? found.reduce((s, d) => s + d, 0) / found.length : 0,
      order = found
        .map((_, n) => n)
        .sort((n, m) => found[m] - found[n])
        .slice(0, 6);
    most.replaceChildren(
      el("h3", {}, t("compare.rows")),
      el("p", { class: "soft" }, t("compare.mean", { mean: R.num(mean, 3), n: found.length })),
      ...order.map(n =>
        R.button(
          {
            class: "small wide",
            onclick: () => {
              R.set({ i: from[n] });
              plots[2].reveal(from[n], R.state.j);
            },
          },
          el("span", { class: "num z" }, R.num(found[n], 3)),
          " ",
          el("span", { class: "token q" }, R.rowName(R.state.place, from[n])),
        ),
      ),
    );
    stripLabel.textContent = t("compare.strip", { mean: R.num(mean, 3) });
    strip.setAttribute("aria-label", stripLabel.textContent);
    R.divergences = { from, found };
  };
  let later = null;
  const drawnOne = found => {
    R.badge(badge, found);
    clearTimeout(later);
    later = setTimeout(() => {
      if (strip.isConnected) drawStrip();
    }, 30);
  };
  const paint = () => plots.forEach(plot => plot.paint());
  const nameB = () =>
    R.headName(B().place, B().head) +
    (spec() ? ` · ${t(`mechanism.${R.state.m.split(":")[0]}`)} ${R.state.m.split(":")[1] || ""}` : "");

  const defaults = () => {
    // another head of the same place, if possible an embedded one; the other recording if there are two
    const { place, head } = R.state,
      source = R.meta.places[place].source,
      twin = R.meta.places.findIndex(x => x.source !== source && x.name === R.meta.places[place].name);
    if (twin >= 0) return { place: twin, head };
    const found = R.exactHeads().find(([p, h]) => p !== place || h !== head) || [place, head];
    return { place: found[0], head: found[1] };
  };
  R.view({
    name: "compare",
    title: "compare.title",
    mount(node) {
      if (!R.state.b) R.state.b = defaults();
      Object.assign(view, { i0: 0, j0: 0, i1: same().T, j1: same().N });
      a = R.headSelect(
        "compare-a",
        () => [R.state.place, R.state.head],
        (place, head) => R.set({ place, head }),
      );
      b = R.headSelect(
        "compare-b",
        () => [B().place, B().head],
        (place, head) => R.set({ b: { place, head } }),
      );
      rest = R.lookControls("compare", ["log", "linear"]);
      badge = el("span", { class: "badge", id: "compare-badge", role: "status" });
      notes = el("p", { class: "soft", id: "compare-note" });
      strip = el("canvas", { class: "strip", role: "img" });
      stripLabel = el("p", { class: "soft", id: "compare-strip" });
      most = el("div", { class: "card aside" });
      legends = [el("div"), el("div"), el("div")];
      headings = [el("h3", {}), el("h3", {}), el("h3", {})];
      const withAmount = name => (name === "" || MECHANISMS[name] === null ? name : `${name}:${MECHANISMS[name]}`);
      const mechanisms = ["", ...Object.keys(MECHANISMS)].map(x => [x, t(`mechanism.${x || "none"}`)]);
      mechanism = R.select("compare-mechanism", mechanisms, "", name => R.set({ m: withAmount(name) }));
      amount = el("input", {
        type: "number",
        id: "compare-amount",
        min: 0,
        step: "any",
        ariaLabel: t("compare.amount"),
        onchange: e => {
          const v = Number(e.target.value);
          if (v >= 0 && v < 1e6) R.set({ m: `${R.state.m.split(":")[0]}:${v}` });
        },
      });
      const act = {
        view,
        mark: () => ({ i: R.state.i, j: R.state.j }),
        pick: (i, j) => R.set({ i, j }),
        open: () => R.set({ view: "map" }),
        label,
        names: { row: i => R.rowName(R.state.place, i), col: j => R.keyName(R.state.place, j) },
        moved: paint,
        side: 600,
      };
      plots = [
        arrayHeat({
          ...act,
          field: () => cut(fieldA()),
          scale: plainScale,
          alt: () => `A: ${R.headName(R.state.place, R.state.head)}`,
        }),
        arrayHeat({
          ...act,
          field: () => cut(fieldB()),
          scale: plainScale,
          alt: () => `B: ${nameB()}`,
          names: { row: i => R.rowName(B().place, i), col: j => R.keyName(B().place, j) },
        }),
        arrayHeat({ ...act, field: third, scale: thirdScale, alt: () => t(`compare.${how}`), drawn: drawnOne }),
      ];
      R.plots.compare = plots;
      const pickHow = name => {
        how = name;
        R.redraw();
      };
      const hows = ["difference", "ratio"].map(x => [x, t(`compare.${x}`)]);
      const choose = R.select("compare-how", hows, how, pickHow);
      node.append(
        el(
          "div",
          { class: "controls" },
          el("span", { class: "controls" }, el("b", {}, "A"), a.node),
          el("span", { class: "controls" }, el("b", {}, "B"), b.node),
          R.button(
            {
              id: "compare-swap",
              onclick: () =>
                R.set({ place: B().place, head: B().head, b: { place: R.state.place, head: R.state.head } }),
            },
            t("compare.swap"),
          ),
        ),
        el(
          "div",
          { class: "controls" },
          R.labelled(t("compare.mechanism"), mechanism),
          amount,
          R.labelled(t("compare.show"), choose),
          ...rest.node,
          R.button({ onclick: () => plots[0].whole() }, t("map.fit")),
        ),
        el("div", { class: "controls" }, badge),
        notes,
        el(
          "div",
          { class: "three" },
          ...plots.map((plot, n) =>
            el(
              "div",
              { class: "panel" },
              headings[n],
              n === 2
                ? el("div", { class: "withstrip" }, el("div", { class: "plotbox" }, plot.canvas), strip)
                : el("div", { class: "plotbox" }, plot.canvas),
              legends[n],
              n === 2 ? stripLabel : null,
            ),
          ),
          most,
        ),
        figures.buttons("compare", () =>
          Object.assign(
            plots.map(plot => plot.canvas),
            {
              scales: [plainScale(), plainScale(), thirdScale()],
              extra: say => ({
                b_place: R.meta.places[B().place].name,
                b_head: B().head,
                b_source: R.meta.sources.length > 1 ? R.source(B().place).title : null,
                b_mechanism: spec()
                  ? `${say(`mechanism.${R.state.m.split(":")[0]}`)} ${R.state.m.split(":")[1] || ""}`.trim()
                  : say("mechanism.none"),
                third: say(`compare.${how}`),
              }),
            },
          ),
        ),
      );
    },
    update(changed) {
      if (!R.state.b) R.state.b = defaults();
      if (
        ["place", "head", "b", "start"].some(x => changed.has(x)) &&
        (view.i1 > same().T || view.j1 > same().N || changed.has("start"))
      )
        Object.assign(view, { i0: 0, j0: 0, i1: same().T, j1: same().N });
      a.fill();
      b.fill();
      rest.fill();
      const exact = R.math.has(B().place, B().head),
        [name, n] = R.state.m.split(":");
      mechanism.value = exact && name in MECHANISMS ? name : "";
      mechanism.disabled = !exact;
      amount.hidden = !exact || MECHANISMS[name] == null;
      amount.value = n ?? "";
      headings[0].replaceChildren("A: ", el("span", { class: "token" }, R.headName(R.state.place, R.state.head)));
      headings[1].replaceChildren("B: ", el("span", { class: "token" }, nameB()));
      headings[2].textContent = t(`compare.${how}`);
      const { T, N } = same(),
        other = R.meta.places[B().place],
        mine = R.place(),
        part = T < Math.max(mine.T, other.T) || N < Math.max(mine.N, other.N);
      notes.textContent = [
        R.state.m && exact ? t("compare.what_if") : "",
        part ? t("compare.part", { rows: T, columns: N }) : "",
        other.source !== mine.source ? t("compare.rows_by_number") : "",
      ]
        .filter(x => x)
        .join(" ");
      notes.hidden = !notes.textContent;
      const now = `${R.state.scale} ${R.theme()} ${R.state.lang} ${how}`;
      if (now !== drawn || !legends[0].childElementCount) {
        [plainScale(), plainScale(), thirdScale()].forEach((scale, x) =>
          legends[x].replaceChildren(R.legend(scale, t(`scale.${scale}.means`))),
        );
      }
      drawn = now;
      const only = [...changed].every(x => x === "i" || x === "j");
      if (only && plots[0].state().picture) plots.forEach(plot => plot.draw());
      else paint();
    },
  });
}
