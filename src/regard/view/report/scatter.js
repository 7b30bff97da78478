// Every head as a point: one metric against another.

R.scatter = () => {
  const { el, t } = R, names = Object.keys(R.meta.metrics), chosen = { x: names.includes("sink") ? "sink" : names[0], y: names.includes("entropy") ? "entropy" : names[names.length - 1] };
  const NS = "http://www.w3.org/2000/svg", W = 620, H = 380, PAD = { left: 64, right: 14, top: 12, bottom: 40 };
  const svg = (tag, attributes, text) => {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const box = el("div", { class: "scatter" });
  const choose = axis => el("label", {}, t(`scatter.${axis}`), " ", el("select", { id: `scatter-${axis}`, onchange: e => { chosen[axis] = e.target.value; draw(); } },
    ...names.map(m => el("option", { value: m, selected: chosen[axis] === m }, R.word(`metric.${m}`, m)))));
  const node = el("details", { class: "card", id: "scatter", ontoggle: () => draw() }, el("summary", {}, t("scatter.title")), el("div", { class: "controls" }, choose("x"), choose("y")), box);
  const span = values => {
    const low = Math.min(...values), high = Math.max(...values), room = (high - low || Math.abs(high) || 1) * 0.04;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  };
  const walk = (e, dot) => { // moves to the nearest point in that direction
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
    if (!way) return;
    e.preventDefault();
    const at = x => [Number(x.getAttribute("cx")), Number(x.getAttribute("cy"))], [x0, y0] = at(dot);
    const far = x => { const [x1, y1] = at(x), ahead = (x1 - x0) * way[0] + (y1 - y0) * way[1], aside = Math.abs((x1 - x0) * way[1]) + Math.abs((y1 - y0) * way[0]); return ahead > 0 ? ahead + 2 * aside : Infinity; };
    const next = [...box.querySelectorAll(".dot")].reduce((a, b) => far(a) <= far(b) ? a : b);
    if (far(next) === Infinity) return;
    dot.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  };
  let drawn = "";
  const draw = () => { // redraws only if the content changes, so that the keyboard focus stays on its point
    const now = `${chosen.x} ${chosen.y} ${R.state.place} ${R.state.head}`;
    if (!node.open || now === drawn) return;
    drawn = now;
    const points = R.heads().map(([p, h]) => ({ p, h, x: R.metric(chosen.x, p, h), y: R.metric(chosen.y, p, h) })).filter(d => d.x !== null && d.y !== null);
    const missing = R.heads().length - points.length, picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "plot", role: "img", "aria-label": `${R.word(`metric.${chosen.x}`, chosen.x)}, ${R.word(`metric.${chosen.y}`, chosen.y)}` });
    if (points.length) {
      const [x0, x1] = span(points.map(d => d.x)), [y0, y1] = span(points.map(d => d.y));
      const X = v => PAD.left + (v - x0) / (x1 - x0) * (W - PAD.left - PAD.right), Y = v => H - PAD.bottom - (v - y0) / (y1 - y0) * (H - PAD.top - PAD.bottom);
      for (let n = 0; n <= 4; n++) {
        const u = x0 + (x1 - x0) * n / 4, v = y0 + (y1 - y0) * n / 4;
        picture.append(svg("line", { x1: X(u), x2: X(u), y1: PAD.top, y2: H - PAD.bottom, class: "rule" }), svg("line", { y1: Y(v), y2: Y(v), x1: PAD.left, x2: W - PAD.right, class: "rule" }),
          svg("text", { x: X(u), y: H - PAD.bottom + 16, "text-anchor": "middle" }, R.num(u, 3)), svg("text", { x: PAD.left - 6, y: Y(v) + 4, "text-anchor": "end" }, R.num(v, 3)));
      }
      picture.append(svg("text", { x: W - PAD.right, y: H - 6, "text-anchor": "end", class: "name" }, R.word(`metric.${chosen.x}`, chosen.x)), svg("text", { x: PAD.left + 4, y: PAD.top + 10, class: "name" }, R.word(`metric.${chosen.y}`, chosen.y)));
      for (const d of points) {
        const here = d.p === R.state.place && d.h === R.state.head, dot = svg("circle", { cx: X(d.x), cy: Y(d.y), r: here ? 7 : 4.5, class: `dot${R.math.has(d.p, d.h) ? " pinned" : ""}${here ? " here" : ""}`, tabindex: here || (!points.some(x => x.p === R.state.place && x.h === R.state.head) && d === points[0]) ? 0 : -1, role: "button", "aria-label": R.headName(d.p, d.h) });
        const open = () => R.set({ place: d.p, head: d.h, view: "map" });
        dot.addEventListener("click", open);
        dot.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") open(); else walk(e, dot); });
        picture.append(R.tipped(dot, () => `${R.headName(d.p, d.h)}\n${R.word(`metric.${chosen.x}`, chosen.x)} ${R.num(d.x)}\n${R.word(`metric.${chosen.y}`, chosen.y)} ${R.num(d.y)}`));
      }
    }
    box.replaceChildren(picture, ...(missing ? [el("p", { class: "soft" }, t("scatter.missing", { n: missing }))] : []));
  };
  return { node, update: draw };
};
