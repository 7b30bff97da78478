// The atlas: a thumbnail of every head of every layer, sorted and coloured by a metric; a click opens the map.
{
  const { el, t } = R;
  let grid,
    topSlider,
    topLabel,
    paintedKey = "",
    shownTop = Infinity,
    showAllLayers = true,
    scatter;
  const buttons = new Map();
  const key = (p, h) => `${p} ${h}`;
  const order = name =>
    R.heads().sort(([p, h], [a, b]) => (R.metric(name, a, b) ?? -Infinity) - (R.metric(name, p, h) ?? -Infinity));
  const metricRange = name => {
    const all = R.heads()
      .map(([p, h]) => R.metric(name, p, h))
      .filter(v => v !== null);
    return [Math.min(...all), Math.max(...all)];
  };

  const paint = (canvas, p, h) => {
    const field = fields.small(p, h),
      look = fields.look(),
      scale = look.scale;
    const view = { i0: 0, i1: field.T, j0: 0, j1: field.N },
      [a, b] = field.size;
    const picture = fields.image(field.blocks(view, a, b, { ...look, sinks: true }), scale);
    canvas.width = picture.width;
    canvas.height = picture.height;
    canvas.getContext("2d").drawImage(picture, 0, 0);
  };
  const button = (p, h) => {
    const name = R.headName(p, h),
      tooltip = () =>
        `${name}\n${Object.keys(R.meta.metrics)
          .map(m => `${R.word(`metric.${m}`, m)} ${R.num(R.metric(m, p, h))}`)
          .join("\n")}\n${t(R.math.has(p, h) ? "atlas.exact" : "atlas.thumb_only")}`;
    const node = R.button(
      {
        class: "thumb",
        tabIndex: -1,
        "data-head": key(p, h),
        ariaLabel: name,
        onclick: () => {
          R.set({ place: p, head: h, view: "map" });
        },
      },
      el("canvas", { class: "hatched" }),
      el("span", { class: "meter" }, el("span", {})),
      el("span", { class: "num value" }),
    );
    buttons.set(key(p, h), node);
    return R.tipped(node, tooltip);
  };
  const arrange = () => {
    const { sort, metric } = R.state,
      ranked = order(metric),
      top = new Set(ranked.slice(0, shownTop).map(([p, h]) => key(p, h)));
    const nodes = [];
    if (sort === "metric") {
      const line = el(
        "div",
        { class: "thumbs" },
        ...ranked.slice(0, shownTop).map(([p, h]) => {
          const node = buttons.get(key(p, h));
          return el("figure", {}, el("figcaption", { class: "soft" }, R.headName(p, h)), node);
        }),
      );
      nodes.push(line);
    } else {
      let hidden = 0;
      R.meta.places.forEach((place, p) => {
        const heads = place.heads.map(h => [p, h]);
        if (!showAllLayers && !heads.some(([, h]) => top.has(key(p, h)))) {
          hidden++;
          return;
        }
        const layer = /^\d+$/.test(place.label) ? t("atlas.layer", { layer: place.label }) : place.label;
        const label = `${R.meta.sources.length > 1 ? `${"①②"[place.source]} · ` : ""}${layer}`;
        nodes.push(
          el(
            "div",
            { class: "layer" },
            el("span", { class: "soft label", title: place.name }, label),
            el("div", { class: "thumbs" }, ...heads.map(([, h]) => buttons.get(key(p, h)))),
          ),
        );
      });
      if (hidden) nodes.push(el("p", { class: "soft" }, t("atlas.hidden_layers", { n: hidden })));
    }
    grid.replaceChildren(...nodes);
    const [low, high] = metricRange(metric),
      everyExact = R.exactHeads().length === R.heads().length;
    for (const [p, h] of R.heads()) {
      const node = buttons.get(key(p, h)),
        v = R.metric(metric, p, h),
        share = v === null || high === low ? 0 : (v - low) / (high - low);
      node.querySelector(".meter span").style.width = `${100 * share}%`;
      node.querySelector(".value").textContent = R.num(v, 2);
      node.classList.toggle("faint", !top.has(key(p, h)));
      node.classList.toggle("pinned", !everyExact && R.math.has(p, h));
    }
    const all = R.heads().length;
    topSlider.value = Math.min(shownTop, all);
    topLabel.textContent = t("atlas.top", { n: Math.min(shownTop, all), all });
  };
  const focused = () => {
    const { place, head } = R.state;
    for (const [name, node] of buttons) {
      const here = name === key(place, head);
      node.tabIndex = here ? 0 : -1;
      if (here) node.setAttribute("aria-current", "true");
      else node.removeAttribute("aria-current");
    }
  };
  const walk = e => {
    // the arrow keys move by position on the page
    const all = [...grid.querySelectorAll(".thumb")],
      at = all.indexOf(document.activeElement);
    if (at < 0 || !/^(Arrow|Home|End)/.test(e.key)) return;
    const here = all[at].getBoundingClientRect(),
      middle = here.left + here.width / 2;
    const row = (rows, best) => (rows.length ? rows.reduce((a, b) => (best(a) <= best(b) ? a : b)) : null);
    const boxes = all.map(node => ({ node, box: node.getBoundingClientRect() }));
    const near = ({ box }) => Math.abs(box.top - here.top) * 4 + Math.abs(box.left + box.width / 2 - middle);
    const to = {
      ArrowLeft: () => all[at - 1],
      ArrowRight: () => all[at + 1],
      Home: () => all[0],
      End: () => all[all.length - 1],
      ArrowUp: () =>
        row(
          boxes.filter(x => x.box.top < here.top - 4),
          near,
        )?.node,
      ArrowDown: () =>
        row(
          boxes.filter(x => x.box.top > here.top + 4),
          near,
        )?.node,
    }[e.key];
    const next = to && to();
    if (!next) return;
    e.preventDefault();
    const [place, head] = next.dataset.head.split(" ").map(Number);
    R.set({ place, head });
    focused();
    next.focus();
  };

  R.view({
    name: "atlas",
    title: "atlas.title",
    mount(node) {
      buttons.clear();
      paintedKey = "";
      const all = R.heads(),
        names = Object.keys(R.meta.metrics);
      const select = (name, options, label) => R.labelled(t(label), R.chooser(name, options, { id: `atlas-${name}` }));
      topSlider = el("input", {
        type: "range",
        id: "atlas-top",
        min: 1,
        max: all.length,
        value: all.length,
        ariaLabel: t("atlas.top_label"),
        oninput: e => {
          shownTop = Number(e.target.value);
          arrange();
        },
      });
      topLabel = el("span", { class: "num" });
      grid = el("div", { class: "grid", onkeydown: walk });
      const legend = el("div", { class: "legendbox" });
      all.forEach(([p, h]) => button(p, h));
      scatter = R.scatter({
        names,
        title: m => R.word(`metric.${m}`, m),
        value: R.metric,
        heads: R.heads,
        facts: (p, h, axes) => axes.map(m => `${R.word(`metric.${m}`, m)} ${R.num(R.metric(m, p, h))}`).join("\n"),
        pick: (place, h) => R.set({ place, head: h, view: "map" }),
        chosen: {
          x: names.includes("sink") ? "sink" : names[0],
          y: names.includes("entropy") ? "entropy" : names[names.length - 1],
        },
      });
      node.append(
        el(
          "p",
          { class: "soft" },
          R.exactHeads().length === all.length
            ? t("atlas.intro_all", { all: all.length })
            : t("atlas.intro", { exact: R.exactHeads().length, all: all.length }),
        ),
        el(
          "div",
          { class: "controls" },
          select(
            "metric",
            names.map(m => [m, R.word(`metric.${m}`, m)]),
            "atlas.metric",
          ),
          select(
            "sort",
            [
              ["layers", t("atlas.by_layers")],
              ["metric", t("atlas.by_metric")],
            ],
            "atlas.sort",
          ),
          select(
            "stat",
            [
              ["mass", t("stat.mass")],
              ["max", t("stat.max")],
            ],
            "map.stat",
          ),
          select(
            "scale",
            ["log", "linear", "lift"].map(x => [x, t(`scale.${x}`)]),
            "map.scale",
          ),
          R.labelled(t("atlas.show"), topSlider, topLabel),
          el(
            "label",
            {},
            el("input", {
              type: "checkbox",
              id: "atlas-dull",
              checked: showAllLayers,
              onchange: e => {
                showAllLayers = e.target.checked;
                arrange();
              },
            }),
            t("atlas.dull"),
          ),
        ),
        el("p", { class: "soft", id: "atlas-means" }),
        legend,
        grid,
        scatter.node,
      );
      node.legend = legend;
    },
    update(changed) {
      const { stat, scale, metric } = R.state,
        node = document.getElementById("view-atlas"),
        now = `${stat} ${scale} ${R.theme()}`;
      for (const name of ["metric", "sort", "stat", "scale"])
        document.getElementById(`atlas-${name}`).value = R.state[name];
      document.getElementById("atlas-means").textContent = R.word(`metric.${metric}.means`, "");
      if (now !== paintedKey) {
        paintedKey = now;
        for (const [p, h] of R.heads()) paint(buttons.get(key(p, h)).querySelector("canvas"), p, h);
        node.legend.replaceChildren(R.legend(scale, t("atlas.legend", { side: 64 })));
      }
      if (!grid.childElementCount || ["metric", "sort", "start", "lang"].some(x => changed.has(x))) arrange();
      focused();
      scatter.update();
    },
  });
}
