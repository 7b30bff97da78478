// Asks the server for the facts, draws the frame, and opens what the address names.

R.LOG_SPAN = 20;
Object.assign(R.SCALES.log, { low: "2⁻²⁰", at: w => w <= 0 ? 0 : 1 + Math.log2(w) / R.LOG_SPAN });
Object.assign(R.state, { tab: "cell", side: "k", sortBy: "layers", pins: "", diff: "", filterBy: "entropy", least: "", scatterX: "entropy", scatterY: "previous_token" });

R.view({
  name: "map", title: "map.title",
  mount(node) { node.append(el3()); },
  update(changed) { R.mapUpdate(changed); R.tokenUpdate(changed); R.inspectorUpdate(); },
});
R.views.reverse(); // the map stands before the heads
const el3 = () => R.el("div", { class: "workspace" }, R.tokenPanel(), R.mapPanel(), R.inspectorPanel());

R.frame = () => {
  const page = document.getElementById("page"), { el, t } = R;
  page.replaceChildren();
  document.title = `regard: ${R.meta.title}`;
  const tab = view => el("button", { class: "tab", type: "button", role: "tab", "data-view": view.name, onclick: () => R.set({ view: view.name }) }, t(view.title));
  const choose = (name, options) => el("select", { ariaLabel: t(`core.${name}`), id: name, onchange: e => R.set({ [name]: e.target.value }) }, ...options.map(([value, label]) => el("option", { value, selected: R.state[name] === value }, label)));
  page.append(
    el("header", {}, el("div", { class: "line" }, el("h1", {}, el("span", { class: "name" }, "regard"), " ", el("bdi", { class: "title" }, R.meta.title)),
      el("div", { class: "switches" }, el("button", { type: "button", class: "small", id: "help-open", ariaLabel: t("live.help"), onclick: () => help(true) }, "?"), choose("lang", [["en", "English"], ["zh", "简体中文"]]), choose("theme", ["auto", "light", "dark"].map(x => [x, t(`core.theme_${x}`)]))))),
    el("nav", { role: "tablist", ariaLabel: t("core.views") }, ...R.views.map(tab)),
    el("main", { id: "views" }, ...R.views.map(view => { view.node = el("section", { id: `view-${view.name}`, class: "view", hidden: true, role: "tabpanel" }); view.fresh = true; return view.node; })),
    el("footer", { class: "soft" }, el("span", {}, `${R.place().T.toLocaleString("en")} × ${R.place().N.toLocaleString("en")} · ${R.place().rule} · ${R.place().kernel}`), " ",
      el("span", { id: "audit" })),
    el("dialog", { id: "help", ariaLabel: t("live.help"), onclick: e => { if (e.target.id === "help") help(false); } }, el("h2", {}, t("live.help")), el("dl", { class: "keys" }, ...t("live.help_keys").split("\n").flatMap(line => line.split("\t").map((x, n) => el(n ? "dd" : "dt", { class: n ? "" : "num" }, x)))), el("p", {}, t("live.help_reading")), el("p", { class: "soft" }, t("live.help_error")),
      el("button", { type: "button", id: "help-close", onclick: () => help(false) }, t("live.close"))));
};
const audits = new Map();
const audited = async () => { // the audit takes seconds at 131,072 tokens: it is asked for after the first pictures
  const p = R.state.place;
  if (!audits.has(p)) audits.set(p, source.json(`/audit/${p}`));
  const audit = await audits.get(p).catch(error => ({ findings: [error.message] })), node = document.getElementById("audit");
  if (p !== R.state.place || !node) return;
  node.className = audit.sound ? "good" : "bad";
  node.textContent = audit.sound ? R.t("live.sound", { rows: audit.rows, of: audit.of.toLocaleString("en"), residual: R.num(audit.residual, 2) }) : audit.findings.join("; ");
};
const help = open => { const node = document.getElementById("help"); if (open && !node.open) node.showModal(); else if (!open) node.close(); };

R.show = changed => {
  const open = R.views.find(view => view.name === R.state.view) || R.views[0];
  for (const view of R.views) view.node.hidden = view !== open;
  for (const tab of document.querySelectorAll("nav .tab")) {
    tab.setAttribute("aria-selected", tab.dataset.view === open.name);
    tab.tabIndex = tab.dataset.view === open.name ? 0 : -1;
  }
  for (const name of ["lang", "theme"]) document.getElementById(name).value = R.state[name];
  if (open.fresh) { open.fresh = false; open.mount(open.node); changed.add("size"); }
  open.update(changed);
  if (["start", "lang", "place"].some(x => changed.has(x))) setTimeout(audited, changed.has("start") ? 2500 : 0);
};

const keys = e => {
  if (e.altKey || e.ctrlKey || e.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName) || e.target.closest?.("dialog") && e.key !== "Escape") return;
  const stepHead = by => { const all = R.meta.places.flatMap((x, p) => x.heads.map(h => [p, h])), at = all.findIndex(([p, h]) => p === R.state.place && h === R.state.head), [place, head] = all[(at + by + all.length) % all.length]; R.set({ place, head }); };
  const act = { "[": () => stepHead(-1), "]": () => stepHead(1), m: () => R.set({ stat: R.state.stat === "max" ? "mass" : "max" }), M: () => R.set({ stat: R.state.stat === "max" ? "mass" : "max" }), b: () => R.pin(), B: () => R.pin(), d: () => R.set({ diff: R.state.diff ? "" : "1" }), D: () => R.set({ diff: R.state.diff ? "" : "1" }), "/": () => R.focusSearch(), "?": () => help(true),
    n: () => R.nextHit(1), N: () => R.nextHit(-1), p: () => R.nextHit(-1), P: () => R.nextHit(-1), Escape: () => { R.hideTip(); help(false); } }[e.key];
  if (!act) return;
  if (e.key !== "Escape") e.preventDefault();
  act();
};

const start = async () => {
  look();
  const page = document.getElementById("page");
  if (!source.hasToken()) { page.append(R.el("p", { class: "card" }, R.t("live.no_token"))); document.documentElement.dataset.ready = "no"; return; }
  const facts = await source.json("/meta");
  Object.assign(R.meta, { title: facts.title, sources: facts.sources, texts: facts.texts, places: facts.places, metricNames: facts.metrics, notKept: facts.not_kept });
  const position = (p, n, name) => { const x = R.meta.places[p][name]; return x ? x[n] : n; };
  R.math = { qPosition: (p, i) => position(p, i, "q_positions"), kPosition: (p, j) => position(p, j, "k_positions") };
  Object.assign(R.state, { place: 0, head: R.meta.places[0].heads[0], i: R.meta.places[0].T - 1, j: 0 });
  R.defaults = { ...R.state };
  Object.assign(R.state, readHash());
  bounded();
  look();
  source.on(() => R.map.redraw(), error => { const badge = document.getElementById("badge"); if (badge && error.status !== 429) { badge.textContent = error.message; badge.className = "badge bad"; } });
  R.frame();
  R.show(new Set(["start", "size"]));
  new ResizeObserver(R.redraw).observe(document.getElementById("views"));
  addEventListener("resize", R.redraw);
  system.addEventListener("change", () => { look(); R.draw(new Set(["theme"])); });
  addEventListener("hashchange", () => R.set({ ...readHash() }));
  addEventListener("keydown", keys);
  document.documentElement.dataset.ready = "yes";
};
window.R = R;
window.source = source;
start().catch(error => {
  document.getElementById("page").append(R.el("p", { class: "card bad" }, error.status === 403 ? R.t("live.no_token") : `${error.message}`));
  document.documentElement.dataset.ready = "failed";
});
