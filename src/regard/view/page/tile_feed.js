// The feed of `regard view`: the server, which is asked for the facts, and then for tiles and numbers.

R.LOG_SPAN = 20;
Object.assign(R.SCALES.log, { low: "2⁻²⁰", at: w => (w <= 0 ? 0 : 1 + Math.log2(w) / R.LOG_SPAN) });
Object.assign(R.state, {
  tab: "cell",
  side: "k",
  sortBy: "layers",
  pins: "",
  diff: "",
  filterBy: "entropy",
  least: "",
});

R.views.unshift({
  // the map stands before the heads
  name: "map",
  title: "map.title",
  node: null,
  mount(node) {
    node.append(R.el("div", { class: "workspace" }, R.tokenPanel(), R.mapPanel(), R.inspectorPanel()));
  },
  update(changed) {
    R.mapUpdate(changed);
    R.tokenUpdate(changed);
    R.inspectorUpdate();
  },
});

const audits = new Map();
const audited = async () => {
  // the audit takes seconds at 131,072 tokens: it is asked for after the first pictures
  const p = R.state.place;
  if (!audits.has(p)) audits.set(p, source.json(`/audit/${p}`));
  const audit = await audits.get(p).catch(error => ({ findings: [error.message] })),
    node = document.getElementById("audit");
  if (p !== R.state.place || !node) return;
  node.className = audit.sound ? "good" : "bad";
  node.textContent = audit.sound
    ? R.t("live.sound", { rows: audit.rows, of: audit.of.toLocaleString("en"), residual: R.num(audit.residual, 2) })
    : audit.findings.join("; ");
};
const help = open => {
  const node = document.getElementById("help");
  if (open && !node.open) node.showModal();
  else if (!open) node.close();
};
const helpDialog = () => {
  const { el, t } = R,
    line = text => text.split("\t").map((x, n) => el(n ? "dd" : "dt", { class: n ? "" : "num" }, x));
  return el(
    "dialog",
    {
      id: "help",
      ariaLabel: t("live.help"),
      onclick: e => {
        if (e.target.id === "help") help(false);
      },
    },
    el("h2", {}, t("live.help")),
    el("dl", { class: "keys" }, ...t("live.help_keys").split("\n").flatMap(line)),
    el("p", {}, t("live.help_reading")),
    el("p", { class: "soft" }, t("live.help_error")),
    R.button({ id: "help-close", onclick: () => help(false) }, t("live.close")),
  );
};
const both = (letter, act) => ({ [letter]: act, [letter.toUpperCase()]: act });

const feed = {
  load: async () => {
    if (!source.hasToken()) {
      document.getElementById("page").append(R.el("p", { class: "card" }, R.t("live.no_token")));
      return false;
    }
    const facts = await source.json("/meta");
    Object.assign(R.meta, {
      title: facts.title,
      sources: facts.sources,
      texts: facts.texts,
      places: facts.places,
      metricNames: facts.metrics,
      notKept: facts.not_kept,
    });
    const position = (p, n, name) => {
      const x = R.meta.places[p][name];
      return x ? x[n] : n;
    };
    R.math = { qPosition: (p, i) => position(p, i, "q_positions"), kPosition: (p, j) => position(p, j, "k_positions") };
    Object.assign(R.state, { place: 0, head: R.meta.places[0].heads[0], i: R.meta.places[0].T - 1, j: 0 });
    source.on(
      () => R.map.redraw(),
      error => {
        const badge = document.getElementById("badge");
        if (!badge || error.status === 429) return;
        badge.textContent = error.message;
        badge.className = "badge bad";
      },
    );
    return true;
  },
  switches: () => [
    R.button({ class: "small", id: "help-open", ariaLabel: R.t("live.help"), onclick: () => help(true) }, "?"),
  ],
  facts: () => [],
  footer: () => {
    const { T, N, rule, kernel } = R.place();
    return [
      R.el("span", { class: "soft" }, `${T.toLocaleString("en")} × ${N.toLocaleString("en")} · ${rule} · ${kernel}`),
      " ",
      R.el("span", { id: "audit" }),
    ];
  },
  more: () => [helpDialog()],
  shown: changed => {
    if (["start", "lang", "place"].some(x => changed.has(x))) setTimeout(audited, changed.has("start") ? 2500 : 0);
  },
  keys: {
    "[": () => R.stepHead(-1),
    "]": () => R.stepHead(1),
    "/": () => R.focusSearch(),
    "?": () => help(true),
    Escape: () => help(false),
    ...both("m", () => R.set({ stat: R.state.stat === "max" ? "mass" : "max" })),
    ...both("b", () => R.pin()),
    ...both("d", () => R.set({ diff: R.state.diff ? "" : "1" })),
    n: () => R.nextHit(1),
    N: () => R.nextHit(-1),
    p: () => R.nextHit(-1),
    P: () => R.nextHit(-1),
  },
};
window.source = source;
