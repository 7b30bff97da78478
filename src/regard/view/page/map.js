// The map of one head: the pattern at any zoom, with marginals, masked cells hatched, and a badge that says whether it
// is exact.
{
  const { el, t } = R;
  let plot,
    badge,
    legend,
    readout,
    caption,
    mini,
    head,
    rest,
    view,
    drawn = "",
    sinks;
  // place -> the visible part of its map; the heads of a place share it, so that they can be compared
  const views = new Map();

  R.badge = (badge, { a, b, progress, field }) => {
    const size = field.exact ? [a, b] : field.size;
    const words = [t(field.exact ? "map.badge_exact" : "map.badge_thumb")];
    if (size[0] * size[1] > 1) words.push(t("map.badge_pooled", { a: size[0], b: size[1] }));
    if (progress < 1) words.push(t("map.badge_sampled", { share: R.percent(progress, 2) }));
    if (!R.state.sinks && field.exact) words.push(t("map.badge_renormalized"));
    badge.textContent = words.join(" · ");
    badge.className = `badge ${words.length === 1 && field.exact ? "exact" : "pooled"}`;
  };
  const words = (i, j) => {
    const { place: p, head: h } = R.state,
      lines = [`${t("map.query")} ${R.rowName(p, i)}`, `${t("map.key")} ${R.keyName(p, j)}`];
    const why = R.math.why(p, h, i, j);
    if (why.length) return [...lines, `${t("map.masked")}: ${R.why(why)}`].join("\n");
    if (!R.math.has(p, h)) {
      const field = fields.get(p, h),
        [a, b] = field.size,
        w = field.cell(Math.floor(i / a), Math.floor(j / b), { stat: R.state.stat, scale: "log" });
      return [...lines, t(`map.block_${R.state.stat}`, { a, b, weight: R.num(w, 2) })].join("\n");
    }
    const row = R.math.row(p, h, i);
    return [
      ...lines,
      `${t("map.weight")} ${R.exact(row.weights[j])}`,
      `${t("map.score")} ${R.exact(row.scores[j])}`,
    ].join("\n");
  };
  const showReadout = () => {
    const { place: p, head: h, i, j } = R.state,
      rows = [];
    const line = (name, value, kind = "") =>
      rows.push(el("dt", { class: "soft" }, name), el("dd", { class: kind }, value));
    line(t("map.query"), R.rowName(p, i), "q token");
    line(t("map.key"), R.keyName(p, j), "k token");
    const why = R.math.why(p, h, i, j);
    if (why.length) line(t("map.masked"), R.why(why));
    if (R.math.has(p, h)) {
      const row = R.math.row(p, h, i);
      line(t("map.weight"), R.exact(row.weights[j]), "num s");
      line(t("map.score"), R.exact(row.scores[j]), "num s");
      line(
        t("map.rank"),
        why.length
          ? "–"
          : t("map.rank_of", { rank: 1 + row.weights.reduce((n, w) => n + (w > row.weights[j]), 0), n: row.n }),
        "num",
      );
      line(
        t("map.row_sum"),
        row.sink ? t("map.row_sum_sink", { sum: R.num(row.sum, 6), sink: R.num(row.sink, 3) }) : R.num(row.sum, 8),
        "num",
      );
    }
    readout.replaceChildren(
      el("dl", {}, ...rows),
      R.math.has(p, h) ? R.button({ id: "map-explain", onclick: open }, t("map.explain")) : R.notExact(p, h),
    );
  };
  const open = () => {
    if (R.math.has(R.state.place, R.state.head)) R.set({ view: "cell" });
  };
  const recipe = say => {
    const { a, b, progress } = plot.state(),
      field = fields.get(R.state.place, R.state.head),
      size = field.exact ? [a, b] : field.size;
    return {
      reduction: size[0] * size[1] === 1 ? say("recipe.every_cell") : say("recipe.blocks", { a: size[0], b: size[1] }),
      source: say(field.exact ? "recipe.exact" : "recipe.thumbnail"),
      shown: say("recipe.part", { i0: view.i0, i1: view.i1 - 1, j0: view.j0, j1: view.j1 - 1 }),
      ...(progress < 1 ? { rows_sampled: R.percent(progress) } : {}),
    };
  };

  let whole = null,
    wholeOf = "";
  const picture = () => {
    // of the whole pattern
    const { place: p, head: h } = R.state,
      field = fields.small(p, h),
      now = `${p} ${h} ${R.state.stat} ${R.state.scale} ${R.theme()}`;
    if (now !== wholeOf)
      whole = fields.image(
        field.blocks({ i0: 0, i1: field.T, j0: 0, j1: field.N }, ...field.size, { ...fields.look(), sinks: true }),
        R.state.scale,
      );
    wholeOf = now;
    return whole;
  };

  const current = () => {
    const p = R.state.place,
      { T, N } = R.place();
    if (!views.has(p)) views.set(p, { i0: 0, i1: T, j0: 0, j1: N });
    return views.get(p);
  };
  R.view({
    name: "map",
    title: "map.title",
    mount(node) {
      view = { ...current() };
      head = R.headSelect(
        "map-head",
        () => [R.state.place, R.state.head],
        (place, h) => R.set({ place, head: h }),
      );
      rest = R.lookControls("map");
      badge = el("span", { class: "badge", id: "map-badge", role: "status" });
      legend = el("div", { class: "legendbox" });
      sinks = el("p", { class: "z", id: "map-sinks-note" });
      caption = el("p", { class: "soft recipe", id: "map-recipe" });
      readout = el("div", { id: "map-cell" });
      plot = arrayHeat({
        view,
        side: 900,
        marginals: true,
        around: () => plot.canvas.closest(".mapsplit"),
        beside: 276,
        field: () => fields.get(R.state.place, R.state.head),
        scale: () => R.state.scale,
        mark: () => ({ i: R.state.i, j: R.state.j }),
        pick: (i, j) => R.set({ i, j }),
        open,
        label: words,
        drawn: found => R.badge(badge, found),
        names: { row: i => R.rowName(R.state.place, i), col: j => R.keyName(R.state.place, j) },
        alt: () =>
          t("map.alt", { head: R.headName(R.state.place, R.state.head), rows: R.place().T, columns: R.place().N }),
        moved: () => {
          views.set(R.state.place, { ...view });
          plot.paint();
          mini.draw();
          showCaption();
        },
      });
      mini = miniature(plot, { size: () => [R.place().T, R.place().N], picture, wide: 128, tall: 2 });
      R.plots.map = plot;
      const press = (id, label, act) =>
        R.button({ id: `map-${id}`, ariaLabel: t(`map.${id}`), title: t(`map.${id}`), onclick: act }, label);
      const center = () => [
        Math.min(Math.max(R.state.i, view.i0), view.i1),
        Math.min(Math.max(R.state.j, view.j0), view.j1),
      ];
      node.append(
        el(
          "div",
          { class: "controls" },
          el("label", {}, t("map.head"), " "),
          head.node,
          ...rest.node,
          el(
            "span",
            { class: "controls" },
            press("in", "+", () => plot.zoom(0.5, ...center())),
            press("out", "−", () => plot.zoom(2, ...center())),
            press("whole", t("map.fit"), () => plot.whole()),
          ),
        ),
        el("div", { class: "controls" }, badge, legend),
        sinks,
        el(
          "div",
          { class: "mapsplit" },
          el("div", { class: "plotbox" }, plot.canvas),
          el(
            "aside",
            { class: "card aside" },
            readout,
            el("h3", {}, t("map.overview")),
            mini.canvas,
            el("p", { class: "soft" }, t("map.rows_columns")),
            el("p", { class: "soft" }, t("map.marginals")),
          ),
        ),
        caption,
        figures.buttons("map", () => Object.assign([plot.canvas], { extra: recipe, scales: [R.state.scale] })),
      );
    },
    update(changed) {
      if (changed.has("place") || changed.has("start") || changed.has("lang")) Object.assign(view, current());
      head.fill();
      rest.fill();
      if (changed.has("i") || changed.has("j")) plot.reveal(R.state.i, R.state.j);
      const only = [...changed].every(x => x === "i" || x === "j");
      if (only && plot.state().picture) plot.draw();
      else plot.paint();
      const now = `${R.state.scale} ${R.theme()} ${R.state.lang}`;
      if (now !== drawn || !legend.childElementCount)
        legend.replaceChildren(R.legend(R.state.scale, t(`scale.${R.state.scale}.means`)));
      drawn = now;
      sinks.hidden = R.state.sinks;
      sinks.textContent = t(R.math.has(R.state.place, R.state.head) ? "map.sinks_hidden" : "map.sinks_kept", {
        n: fields.FIRST,
      });
      mini.draw();
      showReadout();
      showCaption();
    },
  });
  const showCaption = () => {
    caption.textContent = figures.words(recipe);
  };
}
