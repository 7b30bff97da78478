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
let asking = null;
const askHeads = () => {
  asking =
    asking ||
    loadHeads()
      .catch(error => document.getElementById("view-atlas").append(error.message))
      .finally(() => {
        asking = null;
      });
};
R.atlas({
  intro: () => {
    askHeads();
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
    else {
      const peak = overviews.get(`${place} ${head}`)?.peaks[0];
      R.set({ place, head, view: "map", ...(peak ? { i: peak.i, j: peak.j } : {}) });
    }
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

// ---- a run that goes on: its places and overviews arrive, and until the reader chooses something the page shows the
// most notable weight of what is there
let chosen = false,
  version = 0;
const opening = ({ notable: [place, head, i, j] }) => ({ place, head, i, j });
const take = facts => {
  const { metrics } = R.meta;
  Object.assign(R.meta, {
    title: facts.title,
    sources: facts.sources,
    texts: facts.texts,
    places: facts.places,
    notKept: facts.not_kept,
  });
  for (const m of facts.metrics)
    facts.places.slice(metrics[m].of.length).forEach(x => metrics[m].of.push(x.heads.map(() => NaN)));
  version = facts.progress.version;
};
const follow = async () => {
  const now = await source.json("/progress").catch(() => null);
  if (!now) return; // the server has ended
  if (now.version !== version) {
    const before = R.meta.places,
      facts = await source.json("/meta");
    if (before.some((x, p) => x.T !== facts.places[p]?.T)) return location.reload();
    take(facts);
    R.draw(new Set(["places"]));
    if (R.state.view === "atlas") askHeads();
  }
  const note = document.getElementById("running");
  note.textContent = now.expected
    ? R.t("live.running", { n: R.meta.places.length, of: now.expected })
    : now.measuring
      ? R.t("live.measuring")
      : "";
  if (!chosen) {
    R.set(opening(now));
    chosen = false;
  }
  if (now.expected || now.measuring) setTimeout(follow, 1000);
};
R.on(() => {
  chosen = true;
});
const markChosen = () => (chosen = true);
for (const kind of ["pointerdown", "keydown", "wheel"]) addEventListener(kind, markChosen, { passive: true });

const feed = {
  load: async () => {
    if (!source.hasToken()) {
      document.getElementById("page").append(R.el("p", { class: "card" }, R.t("live.no_token")));
      return false;
    }
    const facts = await source.json("/meta");
    R.meta.metrics = Object.fromEntries(facts.metrics.map(m => [m, { of: [] }]));
    take(facts);
    const position = (p, n, name) => {
      const x = R.meta.places[p][name];
      return x ? x[n] : n;
    };
    R.math = { qPosition: (p, i) => position(p, i, "q_positions"), kPosition: (p, j) => position(p, j, "k_positions") };
    Object.assign(R.state, { metric: facts.metrics[0], ...opening(facts.progress) });
    if (/[LH]\d|[ijz]=/.test(location.hash)) chosen = true;
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
      " ",
      R.el("span", { id: "running", class: "soft", role: "status" }),
    ];
  },
  more: () => [helpDialog()],
  shown: changed => {
    if (changed.has("start")) follow();
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
