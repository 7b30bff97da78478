// The text view: select a span of the text to see what it attends to, or what attends to it; a search marks matches.

{
  const { el, t, num, exact } = R,
    { soft, line, run } = R.ui,
    HEIGHT = 30,
    LETTER = 8;
  let bar = null,
    panes = [],
    status = null,
    list = null,
    overview = null,
    jump = true,
    found = null,
    legend = null,
    marked = [],
    hits = new Set(),
    searchedSide = "q",
    at = -1;
  // side q: the weights that the span gives to keys; k: the weights that queries give to the span
  const now = { side: "q", from: 0, to: 0, relative: false, values: null, key: "" };

  const place = () => R.place();
  const one = () => place().q_text === place().k_text;
  const tokensOf = which => R.meta.texts[which === "q" ? place().q_text : place().k_text];
  const rowOf = token => token - place().q_first;
  const usable = (side, token) => (side === "q" ? rowOf(token) >= 0 && rowOf(token) < place().T : token < place().N);

  // ---- weights: the mean weights of the selected queries on each key, or the weight of each query on the selected
  // keys
  const compute = () => {
    const { place: p, head: h } = R.state,
      { T, N } = place(),
      key = [p, h, now.side, now.from, now.to].join();
    if (key === now.key) return;
    now.key = key;
    if (!R.math.has(p, h)) {
      now.values = null;
      return paint();
    }
    const out = now.side === "q",
      values = (now.values = new Float64Array(out ? N : T));
    const first = out ? Math.max(0, rowOf(now.from)) : 0,
      last = out ? Math.min(T - 1, rowOf(now.to)) : T - 1,
      count = Math.max(0, last - first + 1);
    run(
      "text",
      count,
      n => {
        if (out)
          R.math.weights(p, h, first + n).forEach((w, j) => {
            values[j] += w / count;
          });
        else
          for (let j = now.from; j <= Math.min(now.to, N - 1); j++)
            if (R.math.visible(p, h, n, j)) values[n] += R.math.cell(p, h, n, j).weight;
      },
      (n, done) => {
        status.textContent = done ? said() : t("text.working", { n, of: count });
        paint();
      },
    );
  };
  const said = () => {
    const tokens = tokensOf(now.side),
      text = tokens.slice(now.from, Math.min(now.to + 1, now.from + 8)).join(" ") + (now.to - now.from > 7 ? " …" : "");
    const n = now.to - now.from + 1;
    if (n === 1) return t(now.side === "q" ? "text.looks_one" : "text.looked_at_one", { text });
    return t(now.side === "q" ? "text.looks" : "text.looked_at", { n, text });
  };
  const shareOf = (side, token) => {
    // the weight that colours a token
    if (!now.values || (one() ? false : side === now.side)) return NaN;
    return now.side === "q"
      ? token < place().N
        ? now.values[token]
        : NaN
      : usable("q", token)
        ? now.values[rowOf(token)]
        : NaN;
  };

  // ---- a pane: a list of lines, of which only the visible ones are in the DOM
  const pane = side => {
    let lines = [],
      width = 0,
      held = null,
      tokens = null;
    const word = (token, at) =>
      el("span", { class: "word token", role: "option", "data-token": at, dir: "auto" }, token);
    const list = R.ui.rows({
      class: "lens",
      id: `text-${side}`,
      ariaLabel: t(side === "q" ? "text.queries" : "text.keys"),
      ariaMultiSelectable: "true",
      height: HEIGHT,
      count: () => lines.length,
      make: n =>
        el("div", { class: "textline" }, ...tokens.slice(...lines[n]).map((token, x) => word(token, lines[n][0] + x))),
      dress: node => {
        for (const each of node.children) dress(each, Number(each.dataset.token));
      },
    });
    const room = list.node;
    const draw = () => {
      const chars = Math.max(8, Math.floor((room.clientWidth - 24) / LETTER));
      if (chars !== width || tokens !== tokensOf(side)) {
        width = chars;
        tokens = tokensOf(side);
        lines = panels.lines(tokens, chars);
        list.clear();
      }
      list.draw();
    };
    const top = () => (now.relative && now.values ? now.values.reduce((a, b) => Math.max(a, b), 0) || 1 : 1);
    let reach = 1;
    const dress = (word, token) => {
      const share = shareOf(side, token),
        t01 = Number.isFinite(share) ? Math.sqrt(share / reach) : 0,
        dark = R.theme() === "dark";
      const mine = (one() || side === now.side) && token >= now.from && token <= now.to;
      word.style.backgroundColor = Number.isFinite(share) && share > 0 ? R.shade("weights", t01) : "";
      word.style.color = Number.isFinite(share) && t01 > 0.5 ? (dark ? "#14161b" : "#ffffff") : "";
      const isHit = hits.has(token) && (one() || side === searchedSide),
        inside = usable(side, token) || (one() && usable(now.side, token));
      word.className = "word token";
      if (mine) word.classList.add("chosen", now.side);
      word.classList.toggle("found", isHit);
      word.classList.toggle("out", !inside);
      word.setAttribute("aria-selected", String(mine));
    };
    const tokenAt = e => {
      const word = document.elementFromPoint(e.clientX, e.clientY)?.closest?.("[data-token]");
      return word && room.contains(word) ? Number(word.dataset.token) : null;
    };
    const select = (from, to) => {
      if (!one()) now.side = side;
      Object.assign(now, { from: Math.min(from, to), to: Math.max(from, to) });
      refresh();
    };
    room.addEventListener("pointerdown", e => {
      const token = tokenAt(e);
      if (token === null || e.button) return;
      held = e.shiftKey ? now.from : token;
      room.setPointerCapture(e.pointerId);
      select(held, token);
    });
    room.addEventListener("pointermove", e => {
      const token = tokenAt(e);
      if (held !== null && token !== null) select(held, token);
      else if (token !== null) R.showTip(() => (room.offsetParent ? tipOf(side, token) : ""), e.clientX, e.clientY);
    });
    const release = () => {
      if (held === null) return;
      held = null;
      if (now.side === "q" && usable("q", now.to)) R.set({ i: rowOf(now.to) });
      if (now.side === "k" && usable("k", now.to)) R.set({ j: now.to });
    };
    room.addEventListener("pointerup", release);
    room.addEventListener("pointercancel", release);
    room.addEventListener("pointerleave", R.hideTip);
    room.addEventListener("keydown", e => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
      if (by === undefined) return;
      e.preventDefault();
      const to = Math.min(tokens.length - 1, Math.max(0, now.to + by));
      select(e.shiftKey ? now.from : to, to);
      show(to);
    });
    const show = token => {
      const n = lines.findIndex(([from, to]) => token >= from && token < to);
      if (n >= 0) list.show(n);
    };
    return {
      node: room,
      draw: () => {
        reach = top();
        draw();
      },
      show,
    };
  };
  const tipOf = (side, token) => {
    const share = shareOf(side, token),
      name = tokensOf(side)[token];
    return Number.isFinite(share)
      ? `${token} ${name}\n${t(now.side === "q" ? "text.gets" : "text.gives")} ${exact(share)}`
      : `${token} ${name}`;
  };

  const paint = () => {
    panes.forEach(x => x.draw());
    const { place: p, head: h } = R.state;
    if (!R.math.has(p, h)) {
      list.replaceChildren(R.notExact(p, h));
      overview.replaceChildren();
      status.textContent = "";
      return;
    }
    const to = n => {
      const side = panes[panes.length - 1],
        back = now.side === "k" && !one();
      (back ? panes[0] : side).show(now.side === "q" ? n : n + place().q_first);
    };
    overview.replaceChildren(across(to));
    const top = panels.topOf(now.values.length, n => now.values[n], 8),
      name = n => (now.side === "q" ? R.keyName(p, n) : R.rowName(p, n));
    list.replaceChildren(
      el("h3", {}, t(now.side === "q" ? "text.top_keys" : "text.top_queries")),
      ...top.map(n =>
        line(name(n), num(now.values[n]), now.values[n] / now.values[top[0]], {
          tip: exact(now.values[n]),
          pick: () => to(n),
        }),
      ),
      top.length ? "" : soft(t("text.nothing")),
    );
    const reach = now.relative && top.length ? now.values[top[0]] : 1;
    legend.textContent = t("text.scale", { top: num(reach) });
  };
  const across = to => {
    // the weights over the whole text, the largest of each bin
    const n = now.values.length,
      size = Math.max(1, Math.ceil(n / 1024)),
      bins = Float64Array.from({ length: Math.ceil(n / size) }, (_, b) =>
        now.values.subarray(b * size, (b + 1) * size).reduce((a, v) => Math.max(a, v), 0),
      );
    return R.ui.curve(bins, {
      label: t("text.overview"),
      low: "0",
      high: String(n - 1),
      pick: b => to(b * size),
      text: b => t("text.bin", { from: b * size, to: Math.min(n, (b + 1) * size) - 1, share: num(bins[b]) }),
    });
  };
  const refresh = () => {
    compute();
    paint();
  };
  const searchFor = (text, step = 0) => {
    const matches = panels.search(tokensOf((searchedSide = one() ? "q" : now.side)), text.trim());
    marked = matches ?? [];
    hits = new Set(marked);
    at = marked.length ? (step ? (at + step + marked.length) % marked.length : -1) : -1;
    found.textContent =
      matches === null
        ? t("panel.bad_pattern")
        : text.trim()
          ? t("text.found", { n: marked.length, at: at < 0 ? "–" : at + 1 })
          : "";
    if (at >= 0) {
      Object.assign(now, { from: marked[at], to: marked[at] });
      panes[one() || searchedSide === "q" ? 0 : 1].show(marked[at]);
    }
    refresh();
  };

  R.view({
    name: "text",
    title: "text.title",
    mount: node => {
      bar = R.ui.bar("text", false);
      const side = which =>
        R.button(
          {
            id: `text-side-${which}`,
            onclick: () => {
              now.side = which;
              refresh();
              sides();
            },
          },
          t(which === "q" ? "text.where_it_looks" : "text.who_looks"),
        );
      const buttons = ["q", "k"].map(side),
        sides = () => buttons.forEach((b, n) => b.setAttribute("aria-pressed", String(now.side === "qk"[n])));
      const searchField = el("input", {
        type: "search",
        id: "text-search",
        placeholder: t("text.search"),
        ariaLabel: t("text.search"),
        oninput: e => searchFor(e.target.value),
        onkeydown: e => {
          if (e.key === "Enter") searchFor(e.target.value, e.shiftKey ? -1 : 1);
        },
      });
      const relative = el("input", {
        type: "checkbox",
        id: "text-relative",
        checked: now.relative,
        onchange: e => {
          now.relative = e.target.checked;
          paint();
        },
      });
      found = el("span", { class: "soft", id: "text-found", role: "status" });
      status = el("p", { id: "text-says", role: "status", class: "says" });
      list = el("div", { class: "card" });
      overview = el("div", { class: "overview" });
      jump = true;
      legend = el("span", { class: "soft" });
      panes = (one() ? ["q"] : ["q", "k"]).map(pane);
      Object.assign(now, { side: "q", from: R.state.i + place().q_first, to: R.state.i + place().q_first, key: "" });
      sides();
      node.replaceChildren(
        bar.node,
        el("div", { class: "controls" }, ...buttons, searchField, found, el("label", {}, relative, t("text.relative"))),
        status,
        ...panes.map(x => x.node),
        el("div", { class: "controls" }, legend),
        overview,
        soft(t("text.help")),
        list,
      );
    },
    update: changed => {
      bar.update();
      if (changed.has("place")) now.key = "";
      if (changed.has("i") && now.side === "q" && rowOf(now.to) !== R.state.i) {
        Object.assign(now, { from: R.state.i + place().q_first, to: R.state.i + place().q_first });
        jump = true;
      }
      refresh();
      if (jump) panes[0].show(now.to);
      jump = false;
    },
  });
}
