// The text: every token in one list of which only some rows are in the page, coloured by the selected row or column;
// and the search.
{
  const { el, t } = R,
    HEIGHT = 20;
  let list,
    found = new Set(),
    weights = null,
    weightsOf = "",
    box,
    note,
    hits = [],
    at = -1,
    told = "";
  // k: keys, with what the selected query reads; q: queries, with what they give to the selected key
  const side = () => R.state.side;
  const count = () => (side() === "k" ? R.place().N : R.place().T);
  const name = n => (side() === "k" ? R.keyToken(R.state.place, n) : R.rowToken(R.state.place, n));
  const chosen = () => (side() === "k" ? R.state.j : R.state.i);
  const draw = () => {
    if (!list || !list.node.clientHeight) return;
    found = new Set(hits.slice(0, 20000));
    list.draw();
  };
  const make = n =>
    el(
      "div",
      { role: "option", "data-at": n },
      el("span", { class: "num soft" }, String(n)),
      el("bdi", { class: "token" }, name(n)),
      el("span", { class: "track s" }, el("span", { class: "mark" })),
    );
  const dress = (node, at) => {
    const w = weights ? weights[at] : NaN;
    node.lastChild.firstChild.style.width = w > 0 ? `${100 * Math.max(0, 1 + Math.log2(w) / R.LOG_SPAN)}%` : "0%";
    node.title = !weights ? "" : w < 0 ? t("map.masked") : R.weightText(w, 4);
    node.className = "tokenrow";
    if (at === chosen()) node.classList.add("here", side());
    node.classList.toggle("found", found.has(at));
    node.classList.toggle("out", w < 0);
  };
  const load = async () => {
    const path =
      side() === "k"
        ? `/row-weights/${R.state.place}/${R.state.head}/${R.state.i}`
        : `/column-weights/${R.state.place}/${R.state.head}/${R.state.j}`;
    if (path === weightsOf) return;
    weightsOf = path;
    try {
      const found = source.decodeWeights(await source.bytes(path));
      if (weightsOf === path) {
        weights = found;
        draw();
      }
    } catch {
      if (weightsOf === path) weights = null;
    }
  };
  const goTo = n => {
    list.show(n);
    draw();
  };
  const run = () => {
    const found = panels.search(R.meta.texts[side() === "k" ? R.place().k_text : R.place().q_text], box.value);
    hits = R.hits = found || [];
    at = -1;
    const n = hits.length.toLocaleString("en");
    note.textContent = !found
      ? t("panel.bad_pattern")
      : box.value
        ? t(hits.length === 1 ? "live.hit" : "live.hits", { n })
        : "";
    draw();
    R.map.redraw();
  };
  R.nextHit = by => {
    if (!hits.length) return;
    at = (at + by + hits.length) % hits.length;
    note.textContent = t("live.hit_of", { n: at + 1, of: hits.length.toLocaleString("en") });
    R.set(side() === "k" ? { j: hits[at] } : { i: hits[at] });
    R.map.reveal(R.state.i, R.state.j);
  };
  R.focusSearch = () => {
    box.focus();
    box.select();
  };
  R.tokenPanel = () => {
    weightsOf = told = "";
    weights = null;
    const words = { class: "tokens", id: "tokens", ariaLabel: t("live.text") };
    list = R.ui.rows({ ...words, height: HEIGHT, count, make, dress });
    const room = list.node;
    room.addEventListener("click", e => {
      const node = e.target.closest(".tokenrow");
      if (node) {
        const n = Number(node.dataset.at);
        R.set(side() === "k" ? { j: n } : { i: n });
        R.map.reveal(R.state.i, R.state.j);
      }
    });
    room.addEventListener("keydown", e => {
      const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[e.key];
      if (!by) return;
      e.preventDefault();
      const n = clip(chosen() + by, count());
      R.set(side() === "k" ? { j: n } : { i: n });
      goTo(n);
    });
    const box0 = box ? box.value : "";
    box = el("input", {
      type: "search",
      id: "search",
      placeholder: t("live.search"),
      ariaLabel: t("live.search"),
      value: box0,
      spellcheck: false,
      oninput: run,
      onkeydown: e => {
        if (e.key === "Enter") {
          R.nextHit(e.shiftKey ? -1 : 1);
          e.preventDefault();
        }
        if (e.key === "Escape") box.blur();
      },
    });
    note = el("span", { class: "soft num", id: "hits", role: "status" });
    const choose = (value, label) =>
      R.button(
        {
          class: `small side-${value}`,
          "data-side": value,
          title: t(`${label}_title`),
          onclick: () => R.set({ side: value }),
        },
        t(label),
      );
    return el(
      "section",
      { class: "card text", ariaLabel: t("live.text") },
      el("div", { class: "controls" }, choose("k", "live.side_keys"), choose("q", "live.side_queries")),
      el(
        "div",
        { class: "controls searchline" },
        box,
        R.button({ class: "small", ariaLabel: t("live.before"), onclick: () => R.nextHit(-1) }, "↑"),
        R.button({ class: "small", ariaLabel: t("live.after"), onclick: () => R.nextHit(1) }, "↓"),
        note,
      ),
      room,
    );
  };
  R.tokenUpdate = changed => {
    for (const node of document.querySelectorAll("[data-side]"))
      node.setAttribute("aria-pressed", node.dataset.side === side());
    if (changed.has("side") || changed.has("place")) {
      list.clear();
      if (box.value) run();
    }
    load();
    const now = `${side()} ${chosen()}`;
    if (now !== told) goTo(chosen());
    else draw();
    told = now;
  };
}
