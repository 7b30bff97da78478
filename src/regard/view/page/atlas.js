// The atlas: a picture of every head of every layer, sorted, filtered and marked by a metric; a click opens the map.

// intro() -> a text; paint(canvas, p, h) draws the picture of a head, and returns false while there is none
// scale(name) -> the scale that the pictures have; note(p, h) -> a line of the tooltip, or ""
// pinned(p, h): whether a head is marked; pick(p, h, shift) opens it; chosen: {x, y}, the metrics of the scatter
R.atlas = ({ intro, paint, scale = x => x, note = () => "", pinned = () => false, pick, chosen, open }) => {
  const { el, t } = R,
    all = () => R.heads(),
    key = (p, h) => `${p} ${h}`,
    word = m => R.word(`metric.${m}`, m),
    number = (name, p, h) => R.metric(name, p, h) ?? NaN,
    rank = v => (Number.isFinite(v) ? v : -Infinity);
  const buttons = new Map();
  let grid,
    topSlider,
    topLabel,
    means,
    legend,
    paintedKey = "",
    todo = [],
    shownTop = Infinity,
    showAllLayers = true,
    scatter,
    kept = [];
  const order = name => all().sort(([p, h], [a, b]) => rank(number(name, a, b)) - rank(number(name, p, h)));
  // NaN passes no limit
  const passes = ([p, h]) => R.state.least === "" || number(R.state.metric, p, h) >= Number(R.state.least);
  const facts = (p, h, names) => names.map(m => `${word(m)} ${R.num(R.metric(m, p, h))}`).join("\n");

  const button = (p, h) => {
    const name = R.headName(p, h),
      tooltip = () => [name, facts(p, h, Object.keys(R.meta.metrics)), note(p, h)].filter(Boolean).join("\n");
    const node = R.button(
      { class: "thumb", tabIndex: -1, "data-head": key(p, h), ariaLabel: name, onclick: e => pick(p, h, e.shiftKey) },
      el("canvas", { class: "hatched" }),
      el("span", { class: "meter" }, el("span", {})),
      el("span", { class: "num value" }),
    );
    buttons.set(key(p, h), node);
    return R.tipped(node, tooltip);
  };
  const byLayer = top => {
    const nodes = [];
    let hidden = 0;
    R.meta.places.forEach((place, p) => {
      if (!showAllLayers && !place.heads.some(h => top.has(key(p, h)))) {
        hidden++;
        return;
      }
      const layer = /^\d+$/.test(place.label) ? t("atlas.layer", { layer: place.label }) : place.label,
        label = `${R.meta.sources.length > 1 ? `${"①②"[place.source]} · ` : ""}${layer}`;
      nodes.push(
        el(
          "div",
          { class: "layer" },
          el("span", { class: "soft label", title: place.name }, label),
          el("div", { class: "thumbs" }, ...place.heads.map(h => buttons.get(key(p, h)))),
        ),
      );
    });
    if (hidden) nodes.push(el("p", { class: "soft" }, t("atlas.hidden_layers", { n: hidden })));
    return nodes;
  };
  const inOrder = () => [
    el(
      "div",
      { class: "thumbs" },
      ...kept.map(([p, h]) =>
        el("figure", {}, el("figcaption", { class: "soft" }, R.headName(p, h)), buttons.get(key(p, h))),
      ),
    ),
  ];
  const arrange = () => {
    const { sort, metric } = R.state,
      heads = all(),
      values = heads.map(([p, h]) => number(metric, p, h)).filter(Number.isFinite),
      low = Math.min(...values),
      high = Math.max(...values);
    kept = order(metric).filter(passes).slice(0, shownTop);
    const top = new Set(kept.map(([p, h]) => key(p, h)));
    grid.replaceChildren(...(sort === "metric" ? inOrder() : byLayer(top)));
    for (const [p, h] of heads) {
      const node = buttons.get(key(p, h)),
        v = number(metric, p, h),
        share = high > low ? Math.max(0, (v - low) / (high - low)) : 0;
      node.querySelector(".meter span").style.width = `${100 * share}%`;
      node.querySelector(".value").textContent = R.num(R.metric(metric, p, h), 2);
      node.classList.toggle("faint", !top.has(key(p, h)));
      node.classList.toggle("pinned", pinned(p, h));
    }
    topSlider.value = kept.length;
    topLabel.textContent = t("atlas.top", { n: kept.length, all: heads.length });
    grid.dataset.kept = kept.length;
  };
  const focused = () => {
    const here = key(R.state.place, R.state.head);
    for (const [name, node] of buttons) {
      node.tabIndex = name === here ? 0 : -1;
      if (name === here) node.setAttribute("aria-current", "true");
      else node.removeAttribute("aria-current");
    }
  };
  const walk = e => {
    // the arrow keys move by position on the page
    const nodes = [...grid.querySelectorAll(".thumb")],
      at = nodes.indexOf(document.activeElement);
    if (at < 0 || !/^(Arrow|Home|End)/.test(e.key)) return;
    const here = nodes[at].getBoundingClientRect(),
      middle = here.left + here.width / 2,
      boxes = nodes.map(node => ({ node, box: node.getBoundingClientRect() })),
      far = ({ box }) => Math.abs(box.top - here.top) * 4 + Math.abs(box.left + box.width / 2 - middle),
      nearest = rows => (rows.length ? rows.reduce((a, b) => (far(a) <= far(b) ? a : b)).node : null);
    const next = {
      ArrowLeft: () => nodes[at - 1],
      ArrowRight: () => nodes[at + 1],
      Home: () => nodes[0],
      End: () => nodes[nodes.length - 1],
      ArrowUp: () => nearest(boxes.filter(x => x.box.top < here.top - 4)),
      ArrowDown: () => nearest(boxes.filter(x => x.box.top > here.top + 4)),
    }[e.key]?.();
    if (!next) return;
    e.preventDefault();
    const [place, head] = next.dataset.head.split(" ").map(Number);
    R.set({ place, head });
    focused();
    next.focus();
  };
  const paintAll = () => {
    todo = todo.filter(([p, h]) => paint(buttons.get(key(p, h)).querySelector("canvas"), p, h) === false);
    grid.dataset.drawn = all().length - todo.length;
  };

  const mount = node => {
    const heads = all(),
      names = Object.keys(R.meta.metrics),
      known = { x: names[0], y: names[names.length - 1] },
      chooser = (name, options, label) => R.labelled(t(label), R.chooser(name, options, { id: `atlas-${name}` }));
    for (const axis of ["x", "y"]) if (!names.includes(chosen[axis])) chosen[axis] = known[axis];
    buttons.clear();
    paintedKey = "";
    topSlider = el("input", {
      type: "range",
      id: "atlas-top",
      min: 0,
      max: heads.length,
      value: heads.length,
      ariaLabel: t("atlas.top_label"),
      oninput: e => {
        shownTop = Number(e.target.value);
        arrange();
        scatter.update();
      },
    });
    topLabel = el("span", { class: "num" });
    const least = el("input", {
      type: "number",
      id: "least",
      step: "any",
      placeholder: "–",
      value: R.state.least,
      oninput: e => R.set({ least: e.target.value }),
    });
    const dull = el("input", {
      type: "checkbox",
      id: "atlas-dull",
      checked: showAllLayers,
      onchange: e => {
        showAllLayers = e.target.checked;
        arrange();
      },
    });
    grid = el("div", { class: "grid", id: "atlas", onkeydown: walk });
    legend = el("div", { class: "legendbox" });
    means = el("p", { class: "soft", id: "atlas-means" });
    heads.forEach(([p, h]) => button(p, h));
    scatter = R.scatter({ names, title: word, value: number, heads: () => kept, facts, pick, chosen, open });
    node.append(
      el("p", { class: "soft" }, intro()),
      el(
        "div",
        { class: "controls" },
        chooser(
          "metric",
          names.map(m => [m, word(m)]),
          "atlas.metric",
        ),
        chooser(
          "sort",
          ["layers", "metric"].map(x => [x, t(`atlas.by_${x}`)]),
          "atlas.sort",
        ),
        chooser(
          "stat",
          ["mass", "max"].map(x => [x, t(`stat.${x}`)]),
          "map.stat",
        ),
        chooser(
          "scale",
          ["log", "linear", "lift"].map(x => [x, t(`scale.${x}`)]),
          "map.scale",
        ),
        R.labelled(t("atlas.show"), topSlider, topLabel),
        R.labelled(t("atlas.least"), least),
        el("label", {}, dull, t("atlas.dull")),
      ),
      means,
      legend,
      grid,
      scatter.node,
    );
  };
  const update = changed => {
    const { stat, metric } = R.state,
      look = scale(R.state.scale),
      now = `${stat} ${look} ${R.theme()}`;
    for (const name of ["metric", "sort", "stat", "scale"])
      document.getElementById(`atlas-${name}`).value = R.state[name];
    means.textContent = R.word(`metric.${metric}.means`, "");
    const fresh = all().filter(([p, h]) => !buttons.has(key(p, h))); // of layers that have just run
    fresh.forEach(([p, h]) => button(p, h));
    todo.push(...fresh);
    topSlider.max = all().length;
    if (now !== paintedKey) {
      paintedKey = now;
      todo = all();
      legend.replaceChildren(R.legend(look, t("atlas.legend", { side: 64 })));
    }
    paintAll();
    const redrawn = ["metric", "sort", "least", "start", "lang", "heads"];
    if (fresh.length || !grid.childElementCount || redrawn.some(x => changed.has(x))) arrange();
    focused();
    scatter.update();
  };
  R.view({ name: "atlas", title: "atlas.title", mount, update });
};
