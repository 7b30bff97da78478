// A heat map of numbers in the page: a field (pixels.js) pools them for any zoom; the rows of a large pattern are
// computed in slices.

// options beside those of heat.js:
//   field() -> the field to draw; scale() -> a name of R.SCALES; alt() -> description for screen readers
//   side: largest width in pixels; around() -> the element that gives the room
//   beside: pixels of that room that something else takes; marginals: whether to draw them
//   drawn({a, b, progress, field}) is called after pooling; moved() after zooming and panning
const arrayHeat = options => {
  const { view } = options;
  let base = null,
    turn = 0,
    progress = 1;

  const layout = () => {
    const around = options.around ? options.around() : plot.canvas.parentElement,
      beside = innerWidth > 860 && options.beside ? options.beside : 0;
    const room = around ? around.clientWidth - beside : 0,
      narrow = room < 520;
    const bar = options.marginals ? (narrow ? 16 : 30) : 0,
      tall = Math.max(360, innerHeight - 250);
    const rows = view.i1 - view.i0,
      cols = Math.max(1, view.j1 - view.j0),
      most = Math.min(room, options.side || 720, tall * Math.max(1, cols / rows));
    const named = (most - (narrow ? 56 : 92) - bar) / cols >= 10,
      left = named ? (narrow ? 56 : 92) : 42,
      top = named ? (narrow ? 60 : 66) : 20;
    const width = Math.max(80, most - left - bar - 2),
      height = Math.round(width * Math.min(1, Math.max(cols > 4 * rows ? 0.1 : 0.3, rows / cols)));
    plot.shape = { left, top, bar, width, height, dpr: devicePixelRatio || 1 };
    return room > 0;
  };

  // at most one block per pixel; block sizes are powers of two
  const blocking = (cells, pixels) => {
    let n = 1;
    while (cells / n > pixels) n *= 2;
    return n;
  };
  const pooled = () => {
    // pools the rows that are computed so far
    const field = options.field(),
      { width, height, dpr } = plot.shape;
    const a = blocking(view.i1 - view.i0, height * dpr),
      b = blocking(view.j1 - view.j0, width * dpr),
      found = field.blocks(view, a, b, fields.look());
    progress = field.sampled(view);
    base = { found, picture: fields.image(found, options.scale()), a, b, field };
    if (options.drawn) options.drawn({ a, b, progress, field });
  };
  // computes a slice of the rows in each frame; the picture is redrawn less and less often, because that takes time as
  // well
  const compute = () => {
    let done = options.field().work(view, 14),
      wait = 60,
      last = performance.now();
    pooled();
    turn += 1;
    const mine = turn,
      more = () => {
        if (mine !== turn || !plot.canvas.isConnected || !plot.canvas.offsetParent) return;
        done = options.field().work(view, 14);
        if (done || performance.now() - last > wait) {
          pooled();
          plot.draw();
          wait *= 2;
          last = performance.now();
        }
        if (!done) requestAnimationFrame(more);
      };
    if (!done) requestAnimationFrame(more);
  };
  const body = () => {
    const { picture, a, b } = base,
      { left, top, dpr } = plot.shape;
    plot.pen.drawImage(
      picture,
      left * dpr,
      top * dpr,
      plot.x(view.j0 + picture.width * b) * dpr,
      plot.y(view.i0 + picture.height * a) * dpr,
    );
  };

  // ---- marginals: below, the mean weight that a key receives from the visible rows; right, the entropy of each row
  const marginals = () => {
    const { pen, x, y } = plot,
      { left, top, bar, width, height, dpr } = plot.shape,
      { found, field } = base;
    const columns = new Float64Array(found.cols),
      seen = new Float64Array(found.cols);
    for (let I = 0; I < found.rows; I++)
      for (let J = 0; J < found.cols; J++) {
        const w = found.values[I * found.cols + J];
        if (w >= 0) {
          columns[J] += w;
          seen[J]++;
        }
      }
    const means = columns.map((s, J) => (seen[J] ? s / seen[J] : 0)),
      most = means.reduce((m, v) => Math.max(m, v), 0) || 1;
    base.means = means;
    pen.fillStyle = R.css("--k");
    means.forEach((m, J) => {
      const from = x(view.j0 + J * base.b),
        to = x(Math.min(view.j0 + (J + 1) * base.b, view.j1));
      pen.fillRect(
        (left + from) * dpr,
        (top + height + 2) * dpr,
        Math.max(1, (to - from) * dpr - (to - from > 5 ? 1 : 0)),
        ((bar * m) / most) * dpr,
      );
    });
    if (!field.spread) return;
    pen.fillStyle = R.css("--q");
    const step = Math.max(1, Math.floor((view.i1 - view.i0) / (height * dpr)));
    for (let i = view.i0; i < view.i1; i += step) {
      if (!field.have[i]) continue;
      const each = (y(i + step) - y(i)) * dpr;
      pen.fillRect(
        (left + width + 2) * dpr,
        (top + y(i)) * dpr,
        bar * field.spread[i] * dpr,
        Math.max(1, each - (each > 5 ? 1 : 0)),
      );
    }
  };
  const beside = e => {
    // the tooltip of the marginal of a row or a column
    if (!plot.shape || !plot.shape.bar || !base) return "";
    const [v, u] = plot.share(e),
      j = Math.floor(view.j0 + u * (view.j1 - view.j0)),
      i = Math.floor(view.i0 + v * (view.i1 - view.i0)),
      { spread, have } = base.field;
    if (u >= 0 && u < 1 && v >= 1 && base.means) {
      const mean = R.num(base.means[Math.floor((j - view.j0) / base.b)]);
      return `${options.names.col(j)}\n${R.t("map.margin_key", { mean })}`;
    }
    if (v >= 0 && v < 1 && u >= 1 && spread && have[i])
      return `${options.names.row(i)}\n${R.t("map.margin_row", { spread: R.num(spread[i], 3) })}`;
    return "";
  };

  const show = (i0, j0, rows, cols) => {
    // whole cells only
    const f = options.field(),
      height = Math.round(Math.min(Math.max(rows, Math.min(4, f.T)), f.T)),
      width = Math.round(Math.min(Math.max(cols, Math.min(4, f.N)), f.N));
    view.i0 = Math.round(Math.min(Math.max(i0, 0), f.T - height));
    view.j0 = Math.round(Math.min(Math.max(j0, 0), f.N - width));
    view.i1 = view.i0 + height;
    view.j1 = view.j0 + width;
    options.moved();
  };
  const walked = (i, j) => {
    const box = plot.canvas.getBoundingClientRect(),
      { left, top } = plot.shape,
      mark = () => {
        const at = options.mark();
        return options.label(at.i, at.j);
      };
    R.showTip(
      () => (plot.canvas.offsetParent ? mark() : ""),
      box.left + left + plot.x(j + 0.5),
      box.top + top + plot.y(i + 0.5),
    );
  };
  const plot = heat({
    ...options,
    canvas: { role: "application" },
    size: () => [options.field().T, options.field().N],
    body,
    after: () => {
      if (plot.shape.bar) marginals();
    },
    beside,
    show,
    walked,
    steps: () => [10, 16],
    twice: options.open,
  });
  const paint = () => {
    if (!layout()) return;
    plot.canvas.setAttribute("aria-label", options.alt());
    plot.canvas.style.touchAction = plot.zoomed() ? "none" : "pan-y";
    compute();
    plot.draw();
  };
  return Object.assign(plot, { paint, state: () => ({ ...base, shape: plot.shape, progress }) });
};
