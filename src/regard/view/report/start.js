// Unpacks the arrays, draws the page, and opens the view that the URL names.

const unpack = async () => {
  const text = document.getElementById("arrays").textContent.trim(), raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) bytes[n] = raw.charCodeAt(n);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const whole = await new Response(stream).arrayBuffer();
  Object.assign(R.arrays, readArrays(R.meta.arrays, whole));
};

R.frame = () => {
  const page = document.getElementById("page"), { el, t } = R;
  page.replaceChildren();
  document.title = `regard: ${R.meta.title}`;
  const tab = view => el("button", { class: "tab", type: "button", role: "tab", "data-view": view.name, onclick: () => R.set({ view: view.name }) }, t(view.title));
  const option = (name, value, label) => el("option", { value, selected: R.state[name] === value }, label);
  const languages = { en: "English", zh: "简体中文" };
  const choose = (name, options) => el("select", { ariaLabel: t(`core.${name}`), id: name, onchange: e => R.set({ [name]: e.target.value }) }, ...options);
  page.append(
    el("header", {},
      el("div", { class: "line" },
        el("h1", {}, el("span", { class: "name" }, "regard"), " ", el("span", { class: "title" }, R.meta.title)),
        el("div", { class: "switches" },
          choose("lang", Object.keys(R.meta.strings).map(x => option("lang", x, languages[x] || x))),
          choose("theme", ["auto", "light", "dark"].map(x => option("theme", x, t(`core.theme_${x}`)))))),
      el("ul", { class: "facts" }, ...R.meta.sources.flatMap((source, n) => Object.entries(source.metadata).map(([name, value]) =>
        el("li", {}, R.meta.sources.length > 1 ? `${"①②"[n]} · ` : "", el("span", { class: "soft" }, `${R.word(`metadata.${name}`, name)} `), el("b", {}, String(value))))))),
    el("nav", { role: "tablist", ariaLabel: t("core.views") }, ...R.views.map(tab)),
    el("main", { id: "views" }, ...R.views.map(view => {
      view.node = el("section", { id: `view-${view.name}`, class: "view", hidden: true, role: "tabpanel" });
      view.fresh = true;
      return view.node;
    })),
    el("footer", {}, el("p", { class: "soft" }, t("core.caution")), el("p", { class: "soft" }, t("core.keys"))));
};

R.show = changed => {
  const open = R.views.find(view => view.name === R.state.view) || R.views[0];
  for (const view of R.views) view.node.hidden = view !== open;
  for (const tab of document.querySelectorAll(".tab")) {
    const here = tab.dataset.view === open.name;
    tab.setAttribute("aria-selected", here);
    tab.tabIndex = here ? 0 : -1;
  }
  for (const name of ["lang", "theme"]) document.getElementById(name).value = R.state[name];
  if (open.fresh) {
    open.fresh = false;
    open.mount(open.node);
  }
  open.update(changed);
};

const step = key => { // [ and ] change the view; other keys are handled by the view
  const at = R.views.findIndex(view => view.name === R.state.view), n = R.views.length;
  const to = { "[": at - 1, "]": at + 1 }[key];
  if (to === undefined) return false;
  R.set({ view: R.views[(to + n) % n].name });
  document.querySelector(`.tab[data-view="${R.state.view}"]`).focus();
  return true;
};

const start = async () => {
  await unpack();
  R.math = makeMath(R.meta, R.arrays);
  R.defaults = { ...R.state };
  Object.assign(R.state, readHash());
  bounded();
  look();
  R.frame();
  R.show(new Set(["start"]));
  new ResizeObserver(R.redraw).observe(document.getElementById("page"));
  system.addEventListener("change", () => { look(); R.draw(new Set(["theme"])); });
  addEventListener("hashchange", () => R.set({ ...R.defaults, ...readHash() }));
  addEventListener("keydown", e => {
    if (e.altKey || e.ctrlKey || e.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) return;
    if (e.key === "Escape") R.hideTip();
    if (step(e.key)) e.preventDefault();
    if (e.target.classList.contains("tab") && /^Arrow(Left|Right)$/.test(e.key)) step(e.key === "ArrowLeft" ? "[" : "]");
  });
  R.ready = performance.now();
  document.documentElement.dataset.ready = "yes";
};
window.R = R;
start().catch(error => {
  document.getElementById("page").append(R.el("p", { class: "bad" }, `${error}`));
  throw error;
});
