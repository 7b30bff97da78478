// A heat map on a canvas: rulers with tokens, the hatch of masked cells, crosshair, tooltip, zoom, pan, pinch,
// keyboard. A feed paints what is inside: array_heat.js from numbers in the page, tile_map.js from tiles of a server.

// options:
//   view: the visible rows and columns {i0, i1, j0, j1}, real numbers; heat maps that zoom and pan together share it
//   size() -> [T, N], the rows and columns of the head; mark() -> {i, j}, the selected cell
//   body(): paints the picture; over(): paints on the picture, below the crosshair; after(): paints outside of it
//   show(i0, j0, rows, cols): moves the view, within bounds; limit(by) -> a factor of zoom that is allowed
//   pick(i, j) selects a cell; open(i, j) opens it; twice(i, j) is called after a double click
//   label(i, j) -> text of the tooltip; beside(e) -> the same outside of the cells
//   names: {row(i), col(j)} -> text of a token, for rulers; null draws none; axes: whether the axes are named
//   hits() -> rows or columns that the rulers tick
//   steps() -> [rows of an arrow key with Shift, rows of PageUp]; walked(i, j) is called after an arrow key
//   clicked(e) -> true if a click meant something else than a cell
//   group: {pointer, hover}, shared by heat maps that mark the cell under one pointer; redraw(): draws them all
//   target(): the heat map that gestures move
const heat = options => {
  const { el } = R,
    canvas = el("canvas", { tabIndex: options.names ? 0 : -1, class: "heat", ...options.canvas }),
    pen = canvas.getContext("2d");
  const { view, group = { pointer: null, hover: null } } = options,
    LABELLED = 10; // pixels that a token label needs
  const MONO = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", "Noto Sans Mono CJK SC", monospace';
  const rows = () => view.i1 - view.i0,
    cols = () => view.j1 - view.j0;
  const x = j => ((j - view.j0) / cols()) * plot.shape.width,
    y = i => ((i - view.i0) / rows()) * plot.shape.height;
  const redraw = () => (options.redraw || draw)();

  // ---- rulers: tokens where they have room, else numbers at round places
  const clipped = (text, room) => {
    if (pen.measureText(text).width <= room) return text;
    let shown = [...text].slice(0, 24);
    while (shown.length > 1 && pen.measureText(`${shown.join("")}…`).width > room) shown.pop();
    return `${shown.join("")}…`;
  };
  const spacing = (each, across, end) => {
    // 1, 2, 5, 10, 20, ...: the first at which the numbers have room
    const room = (each >= LABELLED ? 0 : across ? 14 + 7 * Math.ceil(end).toLocaleString("en").length : 22) / each,
      power = 10 ** Math.floor(Math.log10(Math.max(1, room)));
    return [1, 2, 5, 10].find(n => n * power >= room) * power;
  };
  const ruler = across => {
    const { left, top, width, height, dpr } = plot.shape,
      [T, N] = options.size(),
      length = across ? width : height,
      from = across ? view.j0 : view.i0;
    const each = length / (across ? cols() : rows()),
      end = Math.min(across ? N : T, from + length / each),
      named = each >= LABELLED,
      every = spacing(each, across, end);
    const name = across ? options.names.col : options.names.row,
      { i, j } = options.mark(),
      marked = across ? j : i,
      ink = across ? "--k" : "--q";
    const size = named ? Math.min(12, Math.max(10, each * 0.8)) : 11;
    pen.font = `${size * dpr}px ${named ? MONO : "system-ui, sans-serif"}`;
    pen.textBaseline = "middle";
    for (let n = Math.ceil(from / every) * every; n < end; n += every) {
      const at = (n + 0.5 - from) * each,
        text = named ? name(n) || String(n) : n.toLocaleString("en");
      pen.fillStyle = R.css(marked === n ? ink : "--soft");
      pen.save();
      if (across) {
        pen.translate((left + at) * dpr, (top - 5) * dpr);
        if (named) pen.rotate(-Math.PI / 2);
        pen.textAlign = named ? "left" : "center";
        if (!named) pen.fillRect(-0.5 * dpr, 0, dpr, 4 * dpr);
        pen.fillText(named ? clipped(text, (top - 8) * dpr) : text, 0, named ? 0 : -7 * dpr);
      } else {
        pen.textAlign = "right";
        if (!named) pen.fillRect((left - 5) * dpr, (top + at) * dpr - 0.5 * dpr, 4 * dpr, dpr);
        pen.fillText(clipped(text, (left - 10) * dpr), (left - 7) * dpr, (top + at) * dpr);
      }
      pen.restore();
    }
    // ticks of the search, and a pointer to the selected row or column; x runs along the ruler, y away from the map
    pen.save();
    pen.translate(left * dpr, top * dpr);
    pen.scale(dpr, dpr);
    if (across) pen.scale(1, -1);
    else {
      pen.rotate(Math.PI / 2);
    }
    const hits = options.hits ? options.hits() : [];
    pen.fillStyle = R.css("--z");
    for (let n = lower(hits, from); n < hits.length && hits[n] < end; n++)
      pen.fillRect((hits[n] - from) * each, 0, Math.max(1, each), 4);
    pen.fillStyle = R.css(ink);
    const at = (marked + 0.5 - from) * each;
    if (at >= 0 && at <= length) {
      pen.beginPath();
      [
        [at, 0],
        [at - 4, 6],
        [at + 4, 6],
      ].forEach(([u, v], n) => (n ? pen.lineTo(u, v) : pen.moveTo(u, v)));
      pen.fill();
    }
    pen.restore();
  };
  const lower = (sorted, value) => {
    let a = 0,
      b = sorted.length;
    while (a < b) {
      const m = (a + b) >> 1;
      if (sorted[m] < value) a = m + 1;
      else b = m;
    }
    return a;
  };
  const axes = () => {
    const { left, top, dpr } = plot.shape,
      narrow = left < 60; // the names of the axes then begin at the edge, above the numbers of the ruler
    pen.font = `${10.5 * dpr}px system-ui, sans-serif`;
    pen.textAlign = narrow ? "left" : "right";
    for (const [key, ink, up] of [
      ["live.keys_axis", "--k", narrow ? 33 : 26],
      ["live.queries_axis", "--q", narrow ? 21 : 11],
    ]) {
      pen.fillStyle = R.css(ink);
      pen.fillText(R.t(key), (narrow ? 1 : left - 8) * dpr, (top - up) * dpr);
    }
  };

  // ---- drawing
  const outline = (ink, from, to, a, b) => {
    const { left, top, dpr } = plot.shape;
    pen.strokeStyle = R.css(ink);
    pen.lineWidth = Math.max(1, 1.5 * dpr);
    pen.strokeRect((left + from) * dpr, (top + a) * dpr, Math.max((to - from) * dpr, 1), Math.max((b - a) * dpr, 1));
  };
  const fit = () => {
    // the canvas has the size of the picture, its rulers and what is beside it
    const { left, top, bar = 0, width, height, dpr } = plot.shape,
      W = Math.round((left + width + bar + 2) * dpr),
      H = Math.round((top + height + bar + 2) * dpr);
    if (canvas.width === W && canvas.height === H) return;
    canvas.width = W;
    canvas.height = H;
    canvas.style.width = `${W / dpr}px`;
    canvas.style.height = `${H / dpr}px`;
  };
  const draw = () => {
    if (!plot.shape) return;
    // the cell under a pointer that rests changes with the view
    group.hover = group.pointer && group.pointer.plot.cellAt(group.pointer.at);
    fit();
    const { left, top, width, height, dpr } = plot.shape,
      [T, N] = options.size(),
      { i, j } = options.mark();
    const from = Math.max(0, x(0)),
      to = Math.min(width, x(N)),
      high = Math.max(0, y(0)),
      low = Math.min(height, y(T)),
      box = [left + from, top + high, Math.max(0, to - from), Math.max(0, low - high)].map(n => n * dpr);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.save();
    pen.beginPath();
    pen.rect(...box);
    pen.clip();
    pen.fillStyle = R.hatch(pen, dpr);
    pen.fillRect(...box);
    pen.imageSmoothingEnabled = false;
    options.body();
    if (options.over) options.over();
    outline("--q", -4, width + 4, y(i), y(i + 1));
    outline("--k", x(j), x(j + 1), -4, height + 4);
    if (group.hover)
      outline("--ink", x(group.hover[1]), x(group.hover[1] + 1), y(group.hover[0]), y(group.hover[0] + 1));
    pen.restore();
    pen.strokeStyle = R.css("--line");
    pen.lineWidth = dpr;
    pen.strokeRect(...box);
    if (options.names) [false, true].forEach(ruler);
    if (options.axes) axes();
    if (options.after) options.after();
  };

  // ---- pan and zoom
  const target = () => (options.target ? options.target() : plot);
  const zoomed = () => {
    const [T, N] = options.size();
    return rows() < 0.999 * T || cols() < 0.999 * N;
  };
  const zoom = (factor, i, j) => {
    const by = options.limit ? options.limit(factor) : factor;
    if (by !== 1) options.show(i - (i - view.i0) * by, j - (j - view.j0) * by, rows() * by, cols() * by);
  };
  const whole = () => {
    const [T, N] = options.size();
    options.show(0, 0, T, N);
  };
  const reveal = (i, j) => {
    // moves only as far as needed
    const i0 = i < view.i0 ? i : i >= view.i1 ? i - rows() + 1 : view.i0,
      j0 = j < view.j0 ? j : j >= view.j1 ? j - cols() + 1 : view.j0;
    if (i0 !== view.i0 || j0 !== view.j0) options.show(i0, j0, rows(), cols());
    else redraw();
  };
  const share = e => {
    // the place of a pointer as shares of the height and width of the map
    const box = canvas.getBoundingClientRect(),
      { left, top, width, height } = plot.shape;
    return [(e.clientY - box.top - top) / height, (e.clientX - box.left - left) / width];
  };
  const cellAt = e => {
    if (!plot.shape) return null;
    const [v, u] = share(e),
      [T, N] = options.size(),
      i = Math.floor(view.i0 + v * rows()),
      j = Math.floor(view.j0 + u * cols());
    return u >= 0 && v >= 0 && u < 1 && v < 1 && i >= 0 && j >= 0 && i < T && j < N ? [i, j] : null;
  };
  // the tooltip of what lies under a place of the screen
  const under = at => () => {
    if (!canvas.offsetParent) return "";
    const cell = cellAt(at);
    return cell ? options.label(...cell) : options.beside ? options.beside(at) : "";
  };
  const see = e => {
    group.pointer = e && { plot, at: { clientX: e.clientX, clientY: e.clientY } };
    redraw();
    if (e) R.showTip(under(group.pointer.at), e.clientX, e.clientY);
    else R.hideTip();
  };

  const fingers = new Map();
  let drag = null;
  canvas.addEventListener("pointerdown", e => {
    fingers.set(e.pointerId, e);
    drag = { x: e.clientX, y: e.clientY, i0: target().view.i0, j0: target().view.j0, moved: false };
    if (fingers.size > 1 || target().zoomed()) canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener("pointermove", e => {
    if (!fingers.has(e.pointerId)) {
      see(e);
      return;
    }
    const apart = () => {
      const [a, b] = [...fingers.values()];
      return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
    };
    if (fingers.size === 2) {
      // pinch: the cell between the fingers keeps its place
      const was = apart();
      fingers.set(e.pointerId, e);
      const [c, d] = [...fingers.values()],
        middle = cellAt({ clientX: (c.clientX + d.clientX) / 2, clientY: (c.clientY + d.clientY) / 2 });
      drag.moved = true;
      if (middle && apart() > 0) target().zoom(was / apart(), ...middle);
      return;
    }
    fingers.set(e.pointerId, e);
    const dx = e.clientX - drag.x,
      dy = e.clientY - drag.y,
      { width, height } = plot.shape;
    if (Math.hypot(dx, dy) < 5 && !drag.moved) return;
    drag.moved = true;
    group.pointer = null;
    R.hideTip();
    if (target().zoomed()) target().show(drag.i0 - (dy / height) * rows(), drag.j0 - (dx / width) * cols());
  });
  const lift = e => {
    fingers.delete(e.pointerId);
    if (e.type === "pointerup" && drag && !drag.moved) {
      const cell = cellAt(e);
      if (options.clicked && options.clicked(e)) R.hideTip();
      else if (cell) {
        options.pick(...cell);
        see(e);
      }
    }
    if (!fingers.size) drag = null;
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => {
    if (!fingers.size) see(null);
  });
  canvas.addEventListener("blur", () => see(null));
  canvas.addEventListener("dblclick", e => {
    const cell = cellAt(e);
    if (cell) options.twice(...cell);
  });
  canvas.addEventListener(
    "wheel",
    e => {
      const cell = cellAt(e);
      if (!cell || (!e.ctrlKey && !target().zoomed() && e.deltaY > 0)) return;
      e.preventDefault();
      target().zoom(2 ** (Math.max(-120, Math.min(120, e.deltaY)) / 240), ...cell);
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", e => {
    const { i, j } = options.mark(),
      [T, N] = options.size(),
      [shifted, screen] = options.steps(),
      far = e.shiftKey ? shifted : 1;
    const to = {
      ArrowUp: [i - far, j],
      ArrowDown: [i + far, j],
      ArrowLeft: [i, j - far],
      ArrowRight: [i, j + far],
      Home: [i, 0],
      End: [i, N - 1],
      PageUp: [i - screen, j],
      PageDown: [i + screen, j],
    }[e.key];
    if (to && !e.ctrlKey && !e.metaKey && !e.altKey) {
      const cell = [clip(to[0], T), clip(to[1], N)];
      options.pick(...cell);
      reveal(...cell);
      options.walked(...cell);
    } else if (e.key === "+" || e.key === "=") zoom(0.5, i, j);
    else if (e.key === "-") zoom(2, i, j);
    else if (e.key === "0") whole();
    else if (e.key === "Enter") options.open(i, j);
    else return;
    e.preventDefault();
  });
  const show = (i0, j0, height = rows(), width = cols()) => options.show(i0, j0, height, width);
  const plot = { canvas, pen, view, shape: null, x, y, draw, show, zoom, zoomed, whole, reveal, share, cellAt };
  return plot;
};

// ---- a small picture of the whole pattern, with a frame around what a heat map shows; a click moves the heat map.
// picture() -> an image or null; wide: its width in pixels; tall: its largest height, as a multiple of the width
const miniature = (plot, { size, picture, wide, tall, id = null }) => {
  const canvas = R.el("canvas", { class: "mini hatched", id, tabIndex: -1, ariaHidden: "true" }),
    pen = canvas.getContext("2d");
  const draw = () => {
    const [T, N] = size(),
      image = picture(),
      { i0, i1, j0, j1 } = plot.view,
      part = (from, to, n, length) => [
        (from / n) * length + 1,
        Math.max(3, ((Math.min(to, n) - from) / n) * length - 2),
      ];
    canvas.width = wide;
    canvas.height = Math.max(16, Math.round(wide * Math.min(tall, T / N)));
    pen.imageSmoothingEnabled = false;
    if (image) pen.drawImage(image, 0, 0, canvas.width, canvas.height);
    pen.strokeStyle = R.css("--ink");
    pen.lineWidth = 2;
    const [left, width] = part(j0, j1, N, canvas.width),
      [top, height] = part(i0, i1, T, canvas.height);
    pen.strokeRect(left, top, width, height);
  };
  const go = e => {
    const box = canvas.getBoundingClientRect(),
      [T, N] = size(),
      { i0, i1, j0, j1 } = plot.view;
    plot.show(
      ((e.clientY - box.top) / box.height) * T - (i1 - i0) / 2,
      ((e.clientX - box.left) / box.width) * N - (j1 - j0) / 2,
    );
  };
  canvas.addEventListener("pointerdown", go);
  canvas.addEventListener("pointermove", e => {
    if (e.buttons) go(e);
  });
  return { canvas, draw };
};
