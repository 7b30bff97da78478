// The frame of the page: header, tabs, views, footer and keyboard; it opens what the address names. A feed gives
//   load(): fetches what the page draws, fills R.meta and R.math; false where there is nothing to show
//   switches(), facts(), footer(): nodes of the header and of the footer; more(): nodes after it
//   shown(changed): called after a view is drawn; keys: key -> function
R.frame = () => {
  const page = document.getElementById("page"),
    { el, t } = R;
  page.replaceChildren();
  document.title = `regard: ${R.meta.title}`;
  const tab = view =>
    el(
      "button",
      { class: "tab", type: "button", role: "tab", "data-view": view.name, onclick: () => R.set({ view: view.name }) },
      t(view.title),
    );
  const languages = { en: "English", zh: "简体中文" };
  const choose = (name, options) => R.chooser(name, options, { ariaLabel: t(`core.${name}`) });
  const section = view => {
    view.node = el("section", { id: `view-${view.name}`, class: "view", hidden: true, role: "tabpanel" });
    view.fresh = true;
    return view.node;
  };
  page.append(
    el(
      "header",
      {},
      el(
        "div",
        { class: "line" },
        el("h1", {}, el("span", { class: "name" }, "regard"), " ", el("bdi", { class: "title" }, R.meta.title)),
        el(
          "div",
          { class: "switches" },
          ...feed.switches(),
          choose(
            "lang",
            Object.keys(R.meta.strings).map(x => [x, languages[x] || x]),
          ),
          choose(
            "theme",
            ["auto", "light", "dark"].map(x => [x, t(`core.theme_${x}`)]),
          ),
        ),
      ),
      ...feed.facts(),
    ),
    el("nav", { role: "tablist", ariaLabel: t("core.views") }, ...R.views.map(tab)),
    el("main", { id: "views" }, ...R.views.map(section)),
    el("footer", {}, ...feed.footer()),
    ...feed.more(),
  );
};

R.show = changed => {
  const open = R.views.find(view => view.name === R.state.view) || R.views[0];
  for (const view of R.views) view.node.hidden = view !== open;
  for (const tab of document.querySelectorAll("nav .tab")) {
    const here = tab.dataset.view === open.name;
    tab.setAttribute("aria-selected", here);
    tab.tabIndex = here ? 0 : -1;
  }
  for (const name of ["lang", "theme"]) document.getElementById(name).value = R.state[name];
  if (open.fresh) {
    open.fresh = false;
    open.mount(open.node);
    changed.add("size");
  }
  open.update(changed);
  feed.shown(changed);
};

R.stepView = by => {
  const at = R.views.findIndex(view => view.name === R.state.view),
    n = R.views.length;
  R.set({ view: R.views[(at + by + n) % n].name });
  document.querySelector(`.tab[data-view="${R.state.view}"]`).focus();
};
const pressed = e => {
  if (e.key === "Escape") R.hideTip();
  if (
    e.altKey ||
    e.ctrlKey ||
    e.metaKey ||
    /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName) ||
    (e.target.closest?.("dialog") && e.key !== "Escape")
  )
    return;
  if (e.target.dataset?.view && /^Arrow(Left|Right)$/.test(e.key)) R.stepView(e.key === "ArrowLeft" ? -1 : 1);
  const act = feed.keys[e.key];
  if (!act) return;
  if (e.key !== "Escape") e.preventDefault();
  act();
};

const start = async () => {
  look();
  if ((await feed.load()) === false) {
    document.documentElement.dataset.ready = "no";
    return;
  }
  R.defaults = { ...R.state };
  Object.assign(R.state, readHash());
  bounded();
  look();
  R.frame();
  R.show(new Set(["start"]));
  new ResizeObserver(R.redraw).observe(document.getElementById("page"));
  addEventListener("resize", R.redraw);
  system.addEventListener("change", () => {
    look();
    R.draw(new Set(["theme"]));
  });
  addEventListener("hashchange", () => R.set({ ...R.defaults, ...readHash() }));
  addEventListener("keydown", pressed);
  R.ready = performance.now();
  document.documentElement.dataset.ready = "yes";
};
window.R = R;
start().catch(error => {
  document
    .getElementById("page")
    .append(
      R.el(
        "p",
        { class: "card bad" },
        error.status === 403 ? R.t("live.no_token") : `${error.status ? error.message : error}`,
      ),
    );
  document.documentElement.dataset.ready = "failed";
  if (!error.status) throw error;
});
