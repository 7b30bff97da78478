// The text: every token in one list of which only some rows are in the page, coloured by the selected row or column;
// and the search.
{
  const { el, t } = R,
    HEIGHT = 20;
  let room,
    inner,
    weights = null,
    weightsOf = "",
    nodes = [],
    box,
    note,
    hits = [],
    at = -1,
    most = 1,
    told = "",
    joined = null;
  // k: keys, with what the selected query reads; q: queries, with what they give to the selected key
  const side = () => R.state.side;
  const count = () => (side() === "k" ? R.place().N : R.place().T);
  const name = n => (side() === "k" ? R.keyToken(R.state.place, n) : R.rowToken(R.state.place, n));
  const chosen = () => (side() === "k" ? R.state.j : R.state.i);
  const draw = () => {
    if (!room || !room.clientHeight) return;
    const first = Math.max(0, Math.floor(room.scrollTop / HEIGHT) - 3),
      n = Math.ceil(room.clientHeight / HEIGHT) + 6,
      total = count();
    inner.style.height = `${total * HEIGHT}px`;
    while (nodes.length < n) {
      const node = el(
        "div",
        { class: "tokenrow", role: "option" },
        el("span", { class: "num soft" }),
        el("bdi", { class: "token" }),
        el("span", { class: "track s" }, el("span", { class: "mark" })),
      );
      nodes.push(node);
      inner.append(node);
    }
    const found = new Set(hits.slice(0, 20000));
    nodes.forEach((node, k) => {
      const at = first + k;
      node.hidden = k >= n || at >= total;
      if (node.hidden) return;
      node.style.top = `${at * HEIGHT}px`;
      node.dataset.at = at;
      const [index, token, track] = node.children,
        w = weights ? weights[at] : NaN;
      index.textContent = at;
      if (token.textContent !== name(at)) token.textContent = name(at);
      track.firstChild.style.width = w > 0 ? `${100 * Math.max(0, 1 + Math.log2(w) / R.LOG_SPAN)}%` : "0%";
      node.title = !weights ? "" : w < 0 ? t("map.masked") : R.weightText(w, 4);
      node.className = "tokenrow";
      if (at === chosen()) node.classList.add("here", side());
      node.classList.toggle("found", found.has(at));
      node.classList.toggle("out", w < 0);
    });
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
    const middle = n * HEIGHT - room.clientHeight / 2;
    if (n * HEIGHT < room.scrollTop || n * HEIGHT > room.scrollTop + room.clientHeight - HEIGHT)
      room.scrollTop = Math.max(0, middle);
    draw();
  };

  // ---- search: plain text across tokens, or /a regular expression/ in them
  const text = () => {
    const id = side() === "k" ? R.place().k_text : R.place().q_text;
    if (joined && joined.id === id) return joined;
    const pieces = R.meta.texts[id],
      starts = new Uint32Array(pieces.length + 1);
    for (let n = 0; n < pieces.length; n++) starts[n + 1] = starts[n] + pieces[n].length;
    const whole = pieces.join("");
    return (joined = { id, starts, whole, lower: whole.toLowerCase() });
  };
  const search = query => {
    const { starts, whole, lower } = text(),
      found = [];
    let token = 0;
    const add = position => {
      while (token + 1 < starts.length - 1 && starts[token + 1] <= position) token++;
      if (found[found.length - 1] !== token) found.push(token);
    };
    const pattern = query.match(/^\/(.+)\/$/);
    if (pattern) {
      let rule;
      try {
        rule = new RegExp(pattern[1], "giu");
      } catch (error) {
        return { error: error.message };
      }
      for (const hit of whole.matchAll(rule)) {
        add(hit.index);
        if (found.length > 1e5) break;
      }
    } else if (query && lower.length === whole.length)
      for (let p = lower.indexOf(query.toLowerCase()); p >= 0; p = lower.indexOf(query.toLowerCase(), p + 1)) add(p);
    else if (query) for (let p = whole.indexOf(query); p >= 0; p = whole.indexOf(query, p + 1)) add(p);
    return { found };
  };
  const run = () => {
    const since = performance.now(),
      { found, error } = search(box.value);
    R.searchTook = performance.now() - since;
    hits = R.hits = found || [];
    at = -1;
    note.textContent = error
      ? error
      : box.value
        ? t(hits.length === 1 ? "live.hit" : "live.hits", { n: hits.length.toLocaleString("en") })
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
    nodes = [];
    weightsOf = told = "";
    weights = null;
    inner = el("div", { class: "tokenlines" });
    room = el(
      "div",
      { class: "tokens", id: "tokens", tabIndex: 0, role: "listbox", ariaLabel: t("live.text"), onscroll: draw },
      inner,
    );
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
      joined = null;
      if (box.value) run();
    }
    load();
    const now = `${side()} ${chosen()}`;
    if (now !== told) goTo(chosen());
    else draw();
    told = now;
  };
}
