// The row view: the keys that one query attends to, and the distribution of its weights; a slider over all rows,
// including decoding steps.

{
  const { el, t, num, exact } = R,
    { soft, card, cards, curve, line, others } = R.ui;
  let bar = null,
    body = null,
    slider = null,
    step = null,
    many = 10;
  const SHARES = [0.5, 0.9, 0.99];

  const stats = (p, h, i, row) => {
    const place = R.meta.places[p],
      n = row.n,
      sorted = panels.falling(row.weights),
      distanceTo = j => R.math.qPosition(p, i) - R.math.kPosition(p, j);
    let first = 0,
      seen = 0; // weight of the first four visible keys
    for (let j = 0; j < place.N && seen < 4; j++)
      if (row.scores[j] !== -Infinity) {
        first += row.weights[j];
        seen++;
      }
    return cards(
      card(t("row.sees"), t("row.of_keys", { n, N: place.N })),
      card(t("row.entropy"), num(row.entropy), t("row.entropy_is")),
      card(t("row.normalized"), n > 1 ? num(row.entropy / Math.log(n)) : "–", t("row.normalized_is")),
      card(t("row.effective"), num(Math.exp(row.entropy)), t("row.effective_is")),
      card(t("row.sink"), R.percent(first), t("row.sink_is")),
      R.math.sink(p, h, i) === null ? null : card(t("row.learned_sink"), R.percent(row.sink)),
      card(t("row.max"), num(row.max)),
      card("lse", num(row.lse, 6)),
      card(t("row.distance"), num(panels.meanDistance(row.weights, distanceTo))),
      ...SHARES.map(share =>
        card(t("row.keys_for", { share: R.percent(share) }), String(panels.keysFor(sorted, share))),
      ),
      card(t("row.residual"), num(row.sum + row.sink - 1), t("row.residual_is")),
    );
  };
  const keys = (p, row) => {
    const list = panels.topOf(row.weights.length, j => row.weights[j], many),
      shown = list.reduce((a, j) => a + row.weights[j], 0);
    let total = 0;
    return [
      el("h3", {}, t("row.top")),
      el(
        "div",
        { class: "controls" },
        R.labelled(
          t("row.how_many"),
          R.select(
            "row-many",
            [10, 25, 50, 100].map(n => [n, String(n)]),
            many,
            n => {
              many = Number(n);
              draw();
            },
          ),
        ),
      ),
      ...list.map(j => {
        total += row.weights[j];
        return line(R.keyName(p, j), num(row.weights[j]), row.weights[j] / row.weights[list[0]], {
          here: j === R.state.j,
          more: t("row.together", { share: R.percent(total) }),
          tip: `${R.keyName(p, j)}\ns ${exact(row.scores[j])}\np ${exact(row.weights[j])}`,
          pick: () => R.set({ j, view: "cell" }),
        });
      }),
      row.n > list.length ? others(row.n - list.length, Math.max(0, row.sum - shown)) : null,
    ];
  };
  const cumulative = row => {
    const sorted = panels.falling(row.weights),
      most = 200,
      sums = panels.running(sorted),
      n = Math.min(most, sorted.length);
    const at = d => Math.min(sorted.length - 1, n < 2 ? 0 : Math.round((d / (n - 1)) * (sorted.length - 1)));
    return curve(
      Float64Array.from({ length: n }, (_, d) => sums[at(d)]),
      {
        label: t("row.cumulative"),
        top: 1,
        low: "1",
        high: String(sorted.length),
        text: d => t("row.cumulative_at", { n: at(d) + 1, share: R.percent(sums[at(d)]) }),
      },
    );
  };
  const distances = (p, i, row) => {
    const bins = panels.byDistance(row.weights, j => R.math.qPosition(p, i) - R.math.kPosition(p, j));
    const name = bin => {
      const side = bin.level < 0 ? "−" : "";
      return bin.low === bin.high ? `${side}${bin.low}` : `${side}${bin.low}–${bin.high}`;
    };
    return curve(
      bins.map(bin => bin.mass),
      {
        label: t("row.by_distance"),
        steps: true,
        names: bins.map(name),
        text: n => t("row.bin", { name: name(bins[n]), share: R.percent(bins[n].mass), n: bins[n].keys }),
      },
    );
  };
  const decode = (p, i) => {
    // the index of the call: 0 is the prefill, later calls follow
    let first = 0;
    const n = R.meta.places[p].steps.findIndex(rows => i < (first += rows));
    return n > 0 ? t("row.decode", { n }) : t("row.prefill");
  };
  const draw = () => {
    const { place: p, head: h, i } = R.state;
    bar.update();
    slider.max = R.place().T - 1;
    slider.value = i;
    step.textContent = t("row.at", { i, last: R.place().T - 1, step: decode(p, i) });
    if (!R.math.has(p, h)) {
      body.replaceChildren(R.notExact(p, h));
      return;
    }
    const row = R.math.row(p, h, i);
    body.replaceChildren(
      stats(p, h, i, row),
      ...(row.n
        ? [
            el(
              "div",
              { class: "split" },
              el("div", { class: "card" }, ...keys(p, row)),
              el("div", { class: "card" }, cumulative(row), distances(p, i, row), soft(t("row.pick_key"))),
            ),
          ]
        : [el("p", {}, t("cell.sees_nothing"))]),
    );
  };
  R.view({
    name: "row",
    title: "row.title",
    mount: node => {
      bar = R.ui.bar("row", false);
      slider = el("input", {
        type: "range",
        id: "row-slider",
        min: 0,
        step: 1,
        ariaLabel: t("row.slider"),
        oninput: e => R.set({ i: Number(e.target.value) }),
      });
      step = el("span", { class: "soft num", role: "status", id: "row-at" });
      body = el("div", { id: "row-body" });
      node.replaceChildren(bar.node, el("div", { class: "controls wide" }, slider, step), body);
    },
    update: changed => {
      if (!(changed.size === 1 && changed.has("size"))) draw();
    },
  });
}
