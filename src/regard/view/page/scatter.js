// Every head as a point: one metric against another. Arrow keys walk to the nearest point, a click or Enter opens it.

// names: metrics; title(name) -> its words; value(name, p, h) -> a number, or null or NaN where there is none
// heads() -> [[p, h], ...] that are shown; facts(p, h) -> more lines of the tooltip pick(p, h, shift) opens a head;
// chosen: {x, y}, names of metrics
R.scatter = ({ names, title, value, heads, facts, pick, chosen, open = false }) => {
  const { el, t } = R,
    { svg } = R.ui,
    H = 380,
    PAD = { left: 64, right: 14, top: 12, bottom: 40 };
  let W = 620; // at most; it follows the width of the window
  const box = el("div", { class: "scatter" });
  const choose = axis => {
    const pick = name => {
      chosen[axis] = name;
      draw();
    };
    const options = names.map(m => [m, title(m)]);
    return R.labelled(t(`scatter.${axis}`), R.select(`scatter-${axis}`, options, chosen[axis], pick));
  };
  const node = el(
    "details",
    { class: "card", id: "scatter", open, ontoggle: () => draw() },
    el("summary", {}, t("scatter.title")),
    el("div", { class: "controls" }, choose("x"), choose("y")),
    box,
  );
  const span = values => {
    const low = values.reduce((a, b) => Math.min(a, b)),
      high = values.reduce((a, b) => Math.max(a, b)),
      room = (high - low || Math.abs(high) || 1) * 0.04;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  };
  const walk = (e, dot) => {
    // moves to the nearest point in that direction
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
    if (!way) return;
    e.preventDefault();
    const at = x => [Number(x.getAttribute("cx")), Number(x.getAttribute("cy"))],
      [x0, y0] = at(dot);
    const far = x => {
      const [x1, y1] = at(x),
        ahead = (x1 - x0) * way[0] + (y1 - y0) * way[1],
        aside = Math.abs((x1 - x0) * way[1]) + Math.abs((y1 - y0) * way[0]);
      return ahead > 0 ? ahead + 2 * aside : Infinity;
    };
    const next = [...box.querySelectorAll(".dot")].reduce((a, b) => (far(a) <= far(b) ? a : b));
    if (far(next) === Infinity) return;
    dot.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  };
  const axes = (X, Y, [x0, x1], [y0, y1]) =>
    [0, 0.25, 0.5, 0.75, 1].flatMap(part => {
      const u = x0 + (x1 - x0) * part,
        v = y0 + (y1 - y0) * part;
      return [
        svg("line", { x1: X(u), x2: X(u), y1: PAD.top, y2: H - PAD.bottom, class: "rule" }),
        svg("line", { y1: Y(v), y2: Y(v), x1: PAD.left, x2: W - PAD.right, class: "rule" }),
        svg("text", { x: X(u), y: H - PAD.bottom + 16, "text-anchor": "middle" }, R.num(u, 3)),
        svg("text", { x: PAD.left - 6, y: Y(v) + 4, "text-anchor": "end" }, R.num(v, 3)),
      ];
    });
  const point = ({ p, h, x, y }, X, Y, first) => {
    const here = p === R.state.place && h === R.state.head,
      kinds = [R.math.has?.(p, h) ? " pinned" : "", here ? " here" : "", R.meta.places[p].source ? " second" : ""];
    const dot = svg("circle", {
      cx: X(x),
      cy: Y(y),
      r: here ? 7 : 4.5,
      class: `dot${kinds.join("")}`,
      tabindex: here || first ? 0 : -1,
      role: "button",
      "aria-label": R.headName(p, h),
      "data-head": `${p} ${h}`,
    });
    dot.addEventListener("click", e => pick(p, h, e.shiftKey));
    dot.addEventListener("keydown", e => {
      if (e.key === "Enter" || e.key === " ") pick(p, h, e.shiftKey);
      else walk(e, dot);
    });
    return R.tipped(dot, () => `${R.headName(p, h)}\n${facts(p, h, [chosen.x, chosen.y])}`);
  };
  let drawn = "";
  const draw = () => {
    // redraws only if the content changes, so that the keyboard focus stays on its point
    W = Math.min(620, Math.max(300, innerWidth - 70));
    const all = heads(),
      now = `${W} ${chosen.x} ${chosen.y} ${R.state.place} ${R.state.head} ${all.join(" ")}`;
    if (!node.open || now === drawn) return;
    drawn = now;
    const points = all
      .map(([p, h]) => ({ p, h, x: value(chosen.x, p, h), y: value(chosen.y, p, h) }))
      .filter(d => Number.isFinite(d.x) && Number.isFinite(d.y));
    const missing = all.length - points.length,
      picture = svg("svg", {
        viewBox: `0 0 ${W} ${H}`,
        class: "plot",
        role: "img",
        "aria-label": `${title(chosen.x)}, ${title(chosen.y)}`,
      });
    if (points.length) {
      const xs = span(points.map(d => d.x)),
        ys = span(points.map(d => d.y)),
        none = !points.some(d => d.p === R.state.place && d.h === R.state.head);
      const X = v => PAD.left + ((v - xs[0]) / (xs[1] - xs[0])) * (W - PAD.left - PAD.right),
        Y = v => H - PAD.bottom - ((v - ys[0]) / (ys[1] - ys[0])) * (H - PAD.top - PAD.bottom);
      picture.append(
        ...axes(X, Y, xs, ys),
        svg("text", { x: W - PAD.right, y: H - 6, "text-anchor": "end", class: "name" }, title(chosen.x)),
        svg("text", { x: PAD.left + 4, y: PAD.top + 10, class: "name" }, title(chosen.y)),
        ...points.map((d, n) => point(d, X, Y, none && n === 0)),
      );
    }
    box.replaceChildren(
      picture,
      ...(missing ? [el("p", { class: "soft" }, t("scatter.missing", { n: missing }))] : []),
    );
    node.dataset.drawn = points.length;
  };
  return { node, update: draw };
};
