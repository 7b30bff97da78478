// The inspectors of the selected row, column and cell: numbers in fp64 from the server, the strongest first.
{
  const { el, t, num } = R,
    { line, curve } = R.ui;
  let body,
    tabs,
    turn = null,
    drawn = "";
  const cache = new Map();
  const ask = async (path, signal) => {
    if (cache.has(path)) return cache.get(path);
    const found = await source.json(path, signal);
    cache.set(path, found);
    if (cache.size > 60) cache.delete(cache.keys().next().value);
    return found;
  };
  const go = (i, j) => {
    R.set({ i, j });
    R.map.reveal(i, j);
  };
  const fact = (name, value, kind = "") => [el("dt", { class: "soft" }, name), el("dd", { class: kind }, value)];
  const thousands = n => Number(n).toLocaleString("en");
  const steps = (values, name, label) =>
    curve(values, {
      label,
      steps: true,
      text: k => `${name(k)}: ${num(values[k], 3)}`,
      low: name(0),
      high: name(values.length - 1),
    });
  // the strongest cells of a row or a column, and the rest; `says` and `others` are keys of sentences
  const listed = (found, says, whose, others, go, lines) => [
    el("p", { class: "says" }, t(says, { n: thousands(found.seen) }), " ", whose),
    ...lines.map(({ name, weight, here, to }) =>
      line(name, num(weight), weight / lines[0].weight, { pick: () => go(to), here }),
    ),
    found.others
      ? el("p", { class: "soft" }, t(others, { n: thousands(found.others), mass: num(found.rest, 4) }))
      : null,
  ];
  const row = found => {
    const p = R.state.place,
      whose = el("bdi", { class: "q token" }, R.rowName(p, found.i)),
      lines = found.top.map(x => ({ name: R.keyName(p, x.j), weight: x.weight, here: x.j === R.state.j, to: x.j }));
    return [
      ...listed(found, "live.row_says", whose, "live.others", j => go(found.i, j), lines),
      el(
        "dl",
        {},
        ...fact(
          t("map.row_sum"),
          found.sink ? t("map.row_sum_sink", { sum: num(found.sum, 6), sink: num(found.sink, 3) }) : num(found.sum, 8),
          "num",
        ),
        ...fact("lse", num(found.lse, 7), "num"),
        ...fact(
          t("live.entropy"),
          `${num(found.entropy, 4)} · ${t("live.effective", { n: num(Math.exp(found.entropy), 3) })}`,
          "num",
        ),
      ),
      found.cumulative.length > 1
        ? steps(
            found.cumulative.map(x => x[1]),
            k => thousands(found.cumulative[k][0]),
            t("live.cumulative"),
          )
        : null,
      found.distance.length > 1 ? steps(found.distance, k => thousands(2 ** k - 1), t("live.distance")) : null,
    ];
  };
  const column = found => {
    const p = R.state.place,
      whose = el("bdi", { class: "k token" }, R.keyName(p, found.j)),
      lines = found.top.map(x => ({ name: R.rowName(p, x.i), weight: x.weight, here: x.i === R.state.i, to: x.i }));
    return [
      ...listed(found, "live.column_says", whose, "live.other_readers", i => go(i, found.j), lines),
      el(
        "dl",
        {},
        ...fact(t("live.received"), num(found.sum, 6), "num"),
        ...fact(t("live.mean_received"), num(found.mean, 4), "num"),
      ),
    ];
  };
  const cell = found => {
    const p = R.state.place,
      masked = found.reasons.length > 0,
      order = found.products
        .map((v, d) => [d, v])
        .sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]))
        .slice(0, 6),
      most = Math.abs(order[0]?.[1]) || 1;
    const step = (name, formula, value) => [
      el("dt", {}, el("span", { class: "soft" }, name), " ", el("span", { class: "num" }, formula)),
      el("dd", { class: "num" }, value),
    ];
    return [
      el(
        "p",
        { class: "says" },
        el("bdi", { class: "q token" }, R.rowName(p, found.i)),
        " → ",
        el("bdi", { class: "k token" }, R.keyName(p, found.j)),
      ),
      el(
        "p",
        { class: "big" },
        el("b", { class: "num s", id: "cell-weight" }, masked ? t("map.masked") : num(found.weight, 10)),
        " ",
        masked
          ? null
          : el("span", { class: "soft" }, t("map.rank_of", { rank: thousands(found.rank), n: thousands(found.seen) })),
      ),
      masked ? el("p", {}, found.reasons.map(x => t(`why.${x.why}`, { mask: x.mask })).join(t("and"))) : null,
      el(
        "dl",
        { class: "chain" },
        ...step(t("live.dot"), "q·k", num(found.dot, 7)),
        ...step(t("live.scaled"), `× ${num(found.scale, 5)}`, num(found.scaled, 7)),
        ...(found.softcap
          ? step("softcap", `${num(found.softcap, 4)} tanh(s / ${num(found.softcap, 4)})`, num(found.capped, 7))
          : []),
        ...(found.bias ? step("bias", "+", num(found.bias, 7)) : []),
        ...step(t("map.score"), "s", num(found.score, 8)),
        ...step(t("live.denominator"), "L", num(found.denominator, 8)),
        ...step(t("map.weight"), "exp(s − L)", masked ? "0" : num(found.weight, 8)),
      ),
      el("h3", {}, t("live.products", { n: found.products.length })),
      ...order.map(([d, v]) => line(`${d}`, num(v), v / most)),
      el("p", { class: "soft" }, `${t("live.kernel")} ${found.kernel}`),
    ];
  };
  const KINDS = {
    cell: [() => `/cell/${R.state.place}/${R.state.head}/${R.state.i}/${R.state.j}`, cell],
    row: [() => `/row/${R.state.place}/${R.state.head}/${R.state.i}`, row],
    column: [() => `/column/${R.state.place}/${R.state.head}/${R.state.j}`, column],
  };
  R.inspectorPanel = () => {
    drawn = "";
    body = el("div", { id: "inspector", class: "inspector", role: "tabpanel" });
    tabs = el(
      "div",
      { class: "tabs", role: "tablist" },
      ...Object.keys(KINDS).map(x =>
        R.button({ class: "tab", role: "tab", id: `tab-${x}`, onclick: () => R.set({ tab: x }) }, t(`live.tab_${x}`)),
      ),
    );
    return el("aside", { class: "card inspect", ariaLabel: t("live.inspectors") }, tabs, body);
  };
  R.inspectorUpdate = async () => {
    for (const x of Object.keys(KINDS))
      document.getElementById(`tab-${x}`).setAttribute("aria-selected", x === R.state.tab);
    const [path, draw] = KINDS[R.state.tab],
      now = `${path()} ${R.state.lang} ${R.state.i} ${R.state.j}`;
    if (now === drawn) return;
    drawn = now;
    if (turn) turn.abort();
    turn = new AbortController();
    try {
      const found = await ask(path(), turn.signal);
      if (drawn === now) {
        body.replaceChildren(...draw(found).flat().filter(Boolean));
        body.dataset.shows = path();
      }
    } catch (error) {
      if (error.name !== "AbortError" && drawn === now) {
        drawn = "";
        body.replaceChildren(el("p", { class: "bad" }, error.message));
      }
    }
  };
}
