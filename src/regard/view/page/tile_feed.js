// The feed of `regard view`: the server, which is asked for the facts, and then for tiles and numbers.

R.LOG_SPAN = 20;
Object.assign(R.SCALES.log, { low: "2⁻²⁰", at: w => (w <= 0 ? 0 : 1 + Math.log2(w) / R.LOG_SPAN) });
Object.assign(R.state, {
  tab: "cell",
  side: "k",
  pins: "",
  diff: "",
});

R.view({
  name: "map",
  title: "map.title",
  mount(node) {
    node.append(R.el("div", { class: "workspace" }, R.tokenPanel(), R.mapPanel(), R.inspectorPanel()));
  },
  update(changed) {
    R.mapUpdate(changed);
    R.tokenUpdate(changed);
    R.inspectorUpdate();
  },
});

// ---- the atlas: pictures and metrics of the heads arrive in parts
const overviews = new Map(); // place and head -> the decoded blocks
const loadHeads = async () => {
  const all = R.heads(),
    names = Object.keys(R.meta.metrics);
  while (overviews.size < all.length) {
    const buffer = await source.bytes(`/heads/${overviews.size}`),
      view = new DataView(buffer);
    let at = 8;
    for (let n = view.getUint32(0, true); n > 0; n--) {
      const [p, h] = all[overviews.size];
      names.forEach((name, x) => {
        R.meta.metrics[name].of[p][R.meta.places[p].heads.indexOf(h)] = view.getFloat32(at + 4 * x, true);
      });
      const blocks = source.decode(buffer, at + 4 * names.length);
      overviews.set(`${p} ${h}`, blocks);
      at += 4 * names.length + blocks.size;
    }
    R.draw(new Set(["heads"]));
  }
};
let heads = null;
R.atlas({
  intro: () => {
    heads = heads || loadHeads().catch(error => document.getElementById("view-atlas").append(error.message));
    const rest = R.meta.notKept ? ` ${R.t("live.not_kept", { n: R.meta.notKept })}` : "";
    return R.t("live.heads_intro", { rows: 64 }) + rest;
  },
  scale: x => (x === "lift" ? "log" : x),
  paint: (canvas, p, h) => {
    const found = overviews.get(`${p} ${h}`);
    if (!found) return false;
    const { ramp, at } = R.SCALES[R.state.scale === "lift" ? "log" : R.state.scale],
      plane = found[R.state.stat];
    R.picture(found.rows, found.cols, ramp, n => (plane[n] < 0 ? null : at(plane[n])), canvas);
    return true;
  },
  pick: (place, head, pin) => {
    R.hideTip();
    if (pin) R.pin(place, head);
    else R.set({ place, head, view: "map" });
  },
  chosen: { x: "entropy", y: "previous_token" },
  open: true,
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
      metrics: Object.fromEntries(
        facts.metrics.map(m => [m, { of: facts.places.map(x => x.heads.map(() => NaN)) }]),
      ),
      notKept: facts.not_kept,
    });
    const position = (p, n, name) => {
      const x = R.meta.places[p][name];
      return x ? x[n] : n;
    };
    R.math = { qPosition: (p, i) => position(p, i, "q_positions"), kPosition: (p, j) => position(p, j, "k_positions") };
    const { heads, T } = R.meta.places[0];
    Object.assign(R.state, { metric: facts.metrics[0], place: 0, head: heads[0], i: T - 1, j: 0 });
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
