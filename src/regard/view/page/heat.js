// A heatmap on a canvas: rulers with tokens, marginals, zoom, pan, crosshair, keyboard. The map view has one heatmap; the compare view has three, which zoom and pan together.

// options:
//   field() -> the field to draw (pixels.js); scale() -> a name of R.SCALES
//   view: the visible rows and columns {i0, i1, j0, j1}; heatmaps that zoom and pan together share this object
//   mark() -> {i, j}, the selected cell; pick(i, j) selects a cell; open() opens it
//   label(i, j) -> text of the tooltip; alt() -> description for screen readers; names: {row(i), col(j)} -> text of a token
//   side: largest width in pixels; marginals: whether to draw them; moved() is called after zooming and panning
const heat = options => {
  const { el } = R, canvas = el("canvas", { tabIndex: 0, role: "application", class: "heat" }), pen = canvas.getContext("2d"), view = options.view;
  let shape = null, base = null, pointer = null, hover = null, turn = 0, progress = 1;
  const LABELLED = 10; // pixels that a token label needs
  const MONO = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace';

  const layout = () => {
    const around = options.around ? options.around() : canvas.parentElement, beside = innerWidth > 860 && options.beside ? options.beside : 0;
    const room = around ? around.clientWidth - beside : 0, narrow = room < 520;
    const bar = options.marginals ? (narrow ? 16 : 30) : 0, tall = Math.max(360, innerHeight - 250);
    const rows = view.i1 - view.i0, cols = Math.max(1, view.j1 - view.j0), most = Math.min(room, options.side || 720, tall * Math.max(1, cols / rows));
    const named = (most - (narrow ? 56 : 92) - bar) / cols >= LABELLED, left = named ? (narrow ? 56 : 92) : 38, top = named ? (narrow ? 44 : 66) : 20;
    const width = Math.max(80, most - left - bar - 2), height = Math.round(width * Math.min(1, Math.max(cols > 4 * rows ? 0.1 : 0.3, rows / cols)));
    const dpr = devicePixelRatio || 1;
    shape = { left, top, bar, width, height, dpr };
    return room > 0;
  };
  const x = j => (j - view.j0) / (view.j1 - view.j0) * shape.width, y = i => (i - view.i0) / (view.i1 - view.i0) * shape.height;

  // at most one block per pixel; block sizes are powers of two
  const blocking = (cells, pixels) => { let n = 1; while (cells / n > pixels) n *= 2; return n; };
  const pooled = () => { // pools the rows that are computed so far
    const field = options.field(), { width, height, dpr } = shape;
    const a = blocking(view.i1 - view.i0, height * dpr), b = blocking(view.j1 - view.j0, width * dpr), found = field.blocks(view, a, b, fields.look());
    progress = field.sampled(view);
    base = { found, picture: fields.image(found, options.scale()), a, b, field };
    if (options.drawn) options.drawn({ a, b, progress, field });
  };
  // computes a slice of the rows in each frame; the picture is redrawn less and less often, because that takes time as well
  const compute = () => {
    let done = options.field().work(view, 14), wait = 60, last = performance.now();
    pooled();
    turn += 1;
    const mine = turn, more = () => {
      if (mine !== turn || !canvas.isConnected || !canvas.offsetParent) return;
      done = options.field().work(view, 14);
      if (done || performance.now() - last > wait) {
        pooled();
        draw();
        wait *= 2;
        last = performance.now();
      }
      if (!done) requestAnimationFrame(more);
    };
    if (!done) requestAnimationFrame(more);
  };

  const clipped = (text, room) => {
    if (pen.measureText(text).width <= room) return text;
    let shown = [...text];
    while (shown.length > 1 && pen.measureText(`${shown.join("")}…`).width > room) shown.pop();
    return `${shown.join("")}…`;
  };
  const ruler = (count, from, size, name, mark, across) => {
    const { left, top, dpr } = shape, each = size / count, every = each >= LABELLED ? 1 : 2 ** Math.ceil(Math.log2((across ? 34 : 16) / each));
    pen.font = `${Math.min(11, Math.max(9, each)) * dpr}px ${MONO}`;
    pen.textBaseline = "middle";
    for (let n = Math.ceil(from / every) * every; n < from + count; n += every) {
      const at = (n - from + 0.5) * each;
      pen.fillStyle = R.css(mark === n ? (across ? "--k" : "--q") : "--soft");
      const text = every === 1 ? name(n) : String(n);
      pen.save();
      if (across) {
        pen.translate((left + at) * dpr, (top - 6) * dpr);
        if (every === 1) pen.rotate(-Math.PI / 2);
        pen.textAlign = every === 1 ? "left" : "center";
        pen.fillText(every === 1 ? clipped(text, (top - 10) * dpr) : text, 0, every === 1 ? 0 : -4 * dpr);
      } else {
        pen.textAlign = "right";
        pen.fillText(clipped(text, (left - 10) * dpr), (left - 6) * dpr, (top + at) * dpr);
      }
      pen.restore();
    }
  };
  // below: mean weight that a key receives from the visible rows; right: entropy of each row
  const marginals = () => {
    const { left, top, bar, width, height, dpr } = shape, { found, field } = base;
    const columns = new Float64Array(found.cols), seen = new Float64Array(found.cols);
    for (let I = 0; I < found.rows; I++) for (let J = 0; J < found.cols; J++) {
      const w = found.values[I * found.cols + J];
      if (w >= 0) { columns[J] += w; seen[J]++; }
    }
    const means = columns.map((s, J) => seen[J] ? s / seen[J] : 0);
    base.means = means;
    const most = means.reduce((m, v) => Math.max(m, v), 0) || 1;
    pen.fillStyle = R.css("--k");
    means.forEach((m, J) => { // drawn below the picture
      const h = bar * m / most * dpr, from = x(view.j0 + J * base.b), to = x(Math.min(view.j0 + (J + 1) * base.b, view.j1));
      pen.fillRect((left + from) * dpr, (top + height + 2) * dpr, Math.max(1, (to - from) * dpr - (to - from > 5 ? 1 : 0)), h);
    });
    if (!field.spread) return;
    pen.fillStyle = R.css("--q");
    const step = Math.max(1, Math.floor((view.i1 - view.i0) / (height * dpr)));
    for (let i = view.i0; i < view.i1; i += step) {
      if (!field.have[i]) continue;
      const each = (y(i + step) - y(i)) * dpr;
      pen.fillRect((left + width + 2) * dpr, (top + y(i)) * dpr, bar * field.spread[i] * dpr, Math.max(1, each - (each > 5 ? 1 : 0)));
    }
  };
  const line = (i, j, ink, whole) => {
    const { left, top, width, height, dpr } = shape;
    pen.strokeStyle = R.css(ink);
    pen.lineWidth = Math.max(1, 1.5 * dpr);
    const box = (from, to, a, b) => pen.strokeRect((left + from) * dpr, (top + a) * dpr, Math.max((to - from) * dpr, 1), Math.max((b - a) * dpr, 1));
    if (whole) {
      pen.strokeStyle = R.css("--q");
      if (i >= view.i0 && i < view.i1) box(0, width, y(i), y(i + 1));
      pen.strokeStyle = R.css("--k");
      if (j >= view.j0 && j < view.j1) box(x(j), x(j + 1), 0, height);
    } else {
      box(x(j), x(j + 1), y(i), y(i + 1));
    }
  };
  const draw = () => {
    if (!base || !shape) return;
    hover = pointer && cellAt(pointer); // the cell under a pointer that rests changes with the view
    const { left, top, bar, width, height, dpr } = shape, W = Math.round((left + width + bar + 2) * dpr), H = Math.round((top + height + bar + 2) * dpr);
    if (canvas.width !== W || canvas.height !== H) {
      canvas.width = W;
      canvas.height = H;
      canvas.style.width = `${W / dpr}px`;
      canvas.style.height = `${H / dpr}px`;
    }
    pen.clearRect(0, 0, W, H);
    pen.fillStyle = fields.hatch(pen, dpr);
    pen.fillRect(left * dpr, top * dpr, width * dpr, height * dpr);
    pen.imageSmoothingEnabled = false;
    const { picture, a, b } = base;
    pen.save();
    pen.beginPath();
    pen.rect(left * dpr, top * dpr, width * dpr, height * dpr);
    pen.clip();
    pen.drawImage(picture, left * dpr, top * dpr, x(view.j0 + picture.width * b) * dpr, y(view.i0 + picture.height * a) * dpr);
    const mark = options.mark();
    line(mark.i, mark.j, "--ink", true);
    if (hover) line(hover[0], hover[1], "--ink", false);
    pen.restore();
    pen.strokeStyle = R.css("--line");
    pen.lineWidth = dpr;
    pen.strokeRect(left * dpr, top * dpr, width * dpr, height * dpr);
    ruler(view.i1 - view.i0, view.i0, height, options.names.row, mark.i, false);
    ruler(view.j1 - view.j0, view.j0, width, options.names.col, mark.j, true);
    if (bar) marginals();
  };
  const paint = () => {
    if (!layout()) return;
    canvas.setAttribute("aria-label", options.alt());
    canvas.style.touchAction = zoomed() ? "none" : "pan-y";
    compute();
    draw();
  };

  // ---- pan and zoom
  const zoomed = () => { const f = options.field(); return view.i1 - view.i0 < f.T || view.j1 - view.j0 < f.N; };
  const show = (i0, j0, rows, cols) => {
    const f = options.field();
    rows = Math.round(Math.min(Math.max(rows, Math.min(4, f.T)), f.T));
    cols = Math.round(Math.min(Math.max(cols, Math.min(4, f.N)), f.N));
    view.i0 = Math.round(Math.min(Math.max(i0, 0), f.T - rows));
    view.j0 = Math.round(Math.min(Math.max(j0, 0), f.N - cols));
    view.i1 = view.i0 + rows;
    view.j1 = view.j0 + cols;
    options.moved();
  };
  const zoom = (by, i, j) => {
    const rows = (view.i1 - view.i0) * by, cols = (view.j1 - view.j0) * by;
    show(i - (i - view.i0) * by, j - (j - view.j0) * by, rows, cols);
  };
  const whole = () => { const f = options.field(); show(0, 0, f.T, f.N); };
  const reveal = (i, j) => { // moves only as far as needed
    const rows = view.i1 - view.i0, cols = view.j1 - view.j0;
    const i0 = i < view.i0 ? i : i >= view.i1 ? i - rows + 1 : view.i0, j0 = j < view.j0 ? j : j >= view.j1 ? j - cols + 1 : view.j0;
    if (i0 !== view.i0 || j0 !== view.j0) show(i0, j0, rows, cols);
  };
  const cellAt = e => {
    if (!shape) return null;
    const box = canvas.getBoundingClientRect(), u = (e.clientX - box.left - shape.left) / shape.width, v = (e.clientY - box.top - shape.top) / shape.height;
    if (u < 0 || v < 0 || u >= 1 || v >= 1) return null;
    return [Math.floor(view.i0 + v * (view.i1 - view.i0)), Math.floor(view.j0 + u * (view.j1 - view.j0))];
  };
  // the tooltip of the marginal of a row or a column
  const beside = e => {
    if (!shape || !shape.bar || !base) return "";
    const box = canvas.getBoundingClientRect(), u = (e.clientX - box.left - shape.left) / shape.width, v = (e.clientY - box.top - shape.top) / shape.height;
    const j = Math.floor(view.j0 + u * (view.j1 - view.j0)), i = Math.floor(view.i0 + v * (view.i1 - view.i0));
    if (u >= 0 && u < 1 && v >= 1 && base.means) return `${options.names.col(j)}\n${R.t("map.margin_key", { mean: R.num(base.means[Math.floor((j - view.j0) / base.b)]) })}`;
    if (v >= 0 && v < 1 && u >= 1 && base.field.spread && base.field.have[i]) return `${options.names.row(i)}\n${R.t("map.margin_row", { spread: R.num(base.field.spread[i], 3) })}`;
    return "";
  };
  // the tooltip of what lies under a place of the screen: a cell, or the marginal of a row or a column
  const under = at => () => {
    if (!canvas.offsetParent) return "";
    const cell = cellAt(at);
    return cell ? options.label(...cell) : beside(at);
  };
  const see = e => {
    pointer = e && { clientX: e.clientX, clientY: e.clientY };
    draw();
    if (e) R.showTip(under(pointer), e.clientX, e.clientY); else R.hideTip();
    if (options.hovered) options.hovered(hover);
  };

  const fingers = new Map();
  let drag = null;
  canvas.addEventListener("pointerdown", e => {
    fingers.set(e.pointerId, e);
    drag = { x: e.clientX, y: e.clientY, i0: view.i0, j0: view.j0, moved: false };
    if (fingers.size > 1 || zoomed()) canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener("pointermove", e => {
    const before = fingers.get(e.pointerId);
    if (!before) {
      see(e);
      return;
    }
    if (fingers.size === 2) { // pinch: the cell between the fingers keeps its place
      const [a, b] = [...fingers.values()], was = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
      fingers.set(e.pointerId, e);
      const [c, d] = [...fingers.values()], now = Math.hypot(c.clientX - d.clientX, c.clientY - d.clientY);
      const middle = cellAt({ clientX: (c.clientX + d.clientX) / 2, clientY: (c.clientY + d.clientY) / 2 });
      drag.moved = true;
      if (middle && now > 0) zoom(was / now, middle[0], middle[1]);
      return;
    }
    fingers.set(e.pointerId, e);
    const dx = e.clientX - drag.x, dy = e.clientY - drag.y;
    if (Math.hypot(dx, dy) < 5 && !drag.moved) return;
    drag.moved = true;
    R.hideTip();
    if (zoomed()) show(drag.i0 - dy / shape.height * (view.i1 - view.i0), drag.j0 - dx / shape.width * (view.j1 - view.j0), view.i1 - view.i0, view.j1 - view.j0);
  });
  const lift = e => {
    fingers.delete(e.pointerId);
    if (e.type === "pointerup" && drag && !drag.moved) {
      const cell = cellAt(e);
      if (cell) { options.pick(...cell); see(e); }
    }
    if (!fingers.size) drag = null;
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => { if (!fingers.size) see(null); });
  canvas.addEventListener("blur", () => see(null));
  canvas.addEventListener("dblclick", e => { if (cellAt(e)) options.open(); });
  canvas.addEventListener("wheel", e => {
    const cell = cellAt(e);
    if (!cell || (!e.ctrlKey && !zoomed() && e.deltaY > 0)) return;
    e.preventDefault();
    zoom(2 ** (Math.max(-120, Math.min(120, e.deltaY)) / 240), ...cell);
  }, { passive: false });
  canvas.addEventListener("keydown", e => {
    const { i, j } = options.mark(), f = options.field(), far = e.shiftKey ? 10 : 1;
    const to = { ArrowUp: [i - far, j], ArrowDown: [i + far, j], ArrowLeft: [i, j - far], ArrowRight: [i, j + far], Home: [i, 0], End: [i, f.N - 1], PageUp: [i - 16, j], PageDown: [i + 16, j] }[e.key];
    if (to) {
      const row = clip(to[0], f.T), col = clip(to[1], f.N);
      options.pick(row, col);
      reveal(row, col);
      const box = canvas.getBoundingClientRect();
      R.showTip(() => canvas.offsetParent ? options.label(options.mark().i, options.mark().j) : "", box.left + shape.left + x(col + 0.5), box.top + shape.top + y(row + 0.5));
    } else if (e.key === "+" || e.key === "=") zoom(0.5, i, j);
    else if (e.key === "-") zoom(2, i, j);
    else if (e.key === "0") whole();
    else if (e.key === "Enter") options.open();
    else return;
    e.preventDefault();
  });
  return { canvas, paint, draw, zoom, whole, reveal, show, state: () => ({ ...base, shape, progress }) };
};
