// A grid of numbers on a canvas, its colour scale, and a vector as a strip.

// options: rows, cols; value(r, c) -> number, or null where masked; color(v); label(r, c), the exact text; alt;
// cell: the height of a row, or square: the widest side; fixed: the values never change;
// down, across: names of the rows and columns, written in a margin where there is room;
// mark() -> {row, col} to frame; pick(r, c) on a click; start() -> where the keyboard begins.
const grid = options => {
  const { rows, cols, value, color, label } = options;
  const canvas = el("canvas", { tabIndex: 0, role: "application", ariaLabel: options.alt });
  const pen = canvas.getContext("2d"), base = document.createElement("canvas");
  let shape = {}, drawn = "", cursor = null;

  const layout = () => {
    const room = canvas.parentElement ? canvas.parentElement.clientWidth : 0;
    const most = options.square ? Math.min(room, options.square) : room;
    const named = !options.square || most / cols >= 15;
    const left = options.down && named ? Math.min(84, Math.round(room / 5)) : 0;
    const top = options.across && named ? 64 : 0;
    const width = options.square ? Math.min(most - left, Math.max(cols * 26, 96)) : room - left;
    const height = options.square ? Math.round(width * rows / cols) : rows * (options.cell || 26);
    const dpr = devicePixelRatio || 1, W = Math.round(width * dpr), H = Math.round(height * dpr);
    const gap = W / cols > 7 * dpr && H / rows > 7 * dpr ? Math.round(dpr) : 0;
    shape = { left, top, width, height, dpr, W, H, gap };
    return room > 0;
  };
  const across = c => Math.round(c * shape.W / cols), down = r => Math.round(r * shape.H / rows);

  const drawBase = () => { // every cell, once for each size and theme
    base.width = shape.W;
    base.height = shape.H;
    const brush = base.getContext("2d"), masked = hatch(brush);
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c < cols; c++) {
        const v = value(r, c), x0 = across(c), y0 = down(r);
        brush.fillStyle = v === null ? masked : color(v);
        brush.fillRect(x0, y0, across(c + 1) - x0 - shape.gap, down(r + 1) - y0 - shape.gap);
      }
    }
  };
  const write = (text, x0, y0, room, ink) => {
    let shown = text;
    while (shown.length > 1 && pen.measureText(shown).width > room) shown = `${shown.slice(0, -2)}…`;
    pen.fillStyle = css(ink);
    pen.fillText(shown, x0, y0);
  };
  const drawNames = mark => {
    const { left, top, dpr } = shape;
    pen.font = `${11 * dpr}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (let r = 0; left && r < rows; r++) {
      write(options.down[r], -6 * dpr, (down(r) + down(r + 1)) / 2, (left - 8) * dpr, mark.row === r ? "--q" : "--soft");
    }
    pen.textAlign = "left";
    pen.rotate(-Math.PI / 2);
    for (let c = 0; top && c < cols; c++) {
      write(options.across[c], 6 * dpr, (across(c) + across(c + 1)) / 2, (top - 8) * dpr, mark.col === c ? "--k" : "--soft");
    }
    pen.rotate(Math.PI / 2);
  };
  const frame = (r, c, toRow, toCol, ink) => {
    const { dpr, gap } = shape, x0 = across(c) + dpr / 2, y0 = down(r) + dpr / 2;
    pen.strokeStyle = css(ink);
    pen.lineWidth = 2 * dpr;
    pen.strokeRect(x0, y0, across(toCol) - x0 - dpr / 2 - gap, down(toRow) - y0 - dpr / 2 - gap);
  };
  const drawOver = () => { // the cells, with names and frames over them: what changes under the pointer
    if (!shape.W) return;
    const { left, top, dpr, W, H } = shape, mark = options.mark ? options.mark() : {};
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.setTransform(1, 0, 0, 1, left * dpr, top * dpr);
    pen.drawImage(base, 0, 0, W, H);
    drawNames(mark);
    if (mark.row !== undefined) frame(mark.row, 0, mark.row + 1, cols, "--q");
    if (mark.col !== undefined) frame(0, mark.col, rows, mark.col + 1, "--k");
    if (cursor) frame(cursor[0], cursor[1], cursor[0] + 1, cursor[1] + 1, "--ink");
  };
  const paint = () => {
    if (!layout()) return;
    const { left, top, width, height, dpr, W, H } = shape, now = `${W} ${H} ${theme()}`;
    if (!options.fixed || now !== drawn) drawBase();
    drawn = now;
    canvas.width = W + Math.round(left * dpr);
    canvas.height = H + Math.round(top * dpr);
    canvas.style.width = `${width + left}px`;
    canvas.style.height = `${height + top}px`;
    drawOver();
  };

  const cellAt = e => {
    const box = canvas.getBoundingClientRect();
    const r = Math.floor((e.clientY - box.top - shape.top) / shape.height * rows);
    const c = Math.floor((e.clientX - box.left - shape.left) / shape.width * cols);
    return r >= 0 && r < rows && c >= 0 && c < cols ? [r, c] : null;
  };
  const see = (cell, x0, y0) => {
    cursor = cell;
    drawOver();
    if (cell) showTip(label(...cell), x0, y0);
    else hideTip();
  };
  const step = key => {
    const [r, c] = cursor || (options.start ? options.start() : [0, 0]);
    const to = { ArrowUp: [r - 1, c], ArrowDown: [r + 1, c], ArrowLeft: [r, c - 1], ArrowRight: [r, c + 1],
      Home: [r, 0], End: [r, cols - 1] }[key];
    if (!to) return false;
    const [row, col] = cursor ? [clip(to[0], rows), clip(to[1], cols)] : [r, c];
    const box = canvas.getBoundingClientRect();
    see([row, col], box.left + shape.left + (col + 0.5) * shape.width / cols, box.top + shape.top + (row + 0.5) * shape.height / rows);
    return true;
  };
  const pick = cell => { if (cell && options.pick) options.pick(...cell); };
  for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, e => see(cellAt(e), e.clientX, e.clientY));
  for (const kind of ["pointerleave", "blur"]) canvas.addEventListener(kind, () => see(null));
  canvas.addEventListener("click", e => pick(cellAt(e)));
  canvas.addEventListener("keydown", e => {
    if (e.key === "Escape") see(null);
    const chosen = cursor && (e.key === "Enter" || e.key === " ");
    if (chosen) pick(cursor);
    if (chosen || step(e.key)) e.preventDefault();
  });
  painters.push(paint);
  return canvas;
};

const clip = (i, count) => Math.min(Math.max(i, 0), count - 1);

const hatch = brush => {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const ink = tile.getContext("2d");
  ink.strokeStyle = css("--line");
  ink.lineWidth = 1.5;
  for (const shift of [-8, 0, 8]) {
    ink.beginPath();
    ink.moveTo(shift, 8);
    ink.lineTo(shift + 8, 0);
    ink.stroke();
  }
  return brush.createPattern(tile, "repeat");
};

// A colour scale with its ends; `ends(low, high)` renames them.
const scale = (color, low, high, note = "") => {
  const start = el("span", {}, low), stop = el("span", {}, high);
  const ramp = grid({ rows: 1, cols: 48, cell: 8, alt: "colour scale", fixed: true, value: (_, c) => c / 47, color,
    label: () => `${start.textContent} to ${stop.textContent}` });
  ramp.tabIndex = -1;
  ramp.setAttribute("role", "img");
  const node = el("div", { class: "scale" }, start, el("span", { class: "ramp" }, ramp), stop, note);
  return { node, ends: (first, second) => { start.textContent = first; stop.textContent = second; } };
};
const weightScale = note => scale(byWeight, "0", "1", note).node;
const signedScale = () => {
  const found = scale(t => bySign(1)(2 * t - 1), "", "");
  return { node: found.node, size: top => found.ends(`−${num(top)}`, `+${num(top)}`) };
};

// A vector as a strip; what `title()` and `values()` give may change with the key in focus.
const strip = (title, role, values) => {
  const caption = el("span", { class: role }), range = el("span", { class: "range num" }), numbers = el("pre", { class: "num" });
  const length = values().length, legend = signedScale();
  const canvas = grid({ rows: 1, cols: length, cell: 28, alt: "", value: (_, c) => values()[c], color: v => bySign(size(values()))(v),
    label: (_, c) => `${caption.textContent}\ndim ${c}: ${exact(values()[c])}` });
  const more = el("details", {}, el("summary", {}, `the ${length} numbers`), numbers);
  const fill = () => { if (more.open) numbers.textContent = values().map(exact).join("  "); };
  more.addEventListener("toggle", fill);
  follow(() => {
    const v = values();
    caption.textContent = typeof title === "function" ? title() : title;
    range.textContent = `min ${num(Math.min(...v))}  max ${num(Math.max(...v))}  norm ${num(norm(v))}`;
    canvas.ariaLabel = `${caption.textContent}: ${length} numbers, ${range.textContent}`;
    legend.size(size(v));
    fill();
  });
  return el("figure", {}, el("figcaption", {}, caption, range), el("div", {}, canvas), el("div", { class: "below" }, legend.node, more));
};
