// The map: tiles at any zoom on one canvas, rulers with tokens, a crosshair, the largest cells, an inset of the whole, keyboard; and
// pinned heads beside it, which show the same rows and columns, or the difference to the selected head.
{
  const { el, t } = R, SIDE = 256, LABELLED = 10, MOST_PANES = 7, MONO = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", "Noto Sans Mono CJK SC", monospace';
  let canvas, pen, inset, insetPen, badge, live, legend, peaksList, minusButton, shape = { left: 70, top: 54, width: 100, height: 100, dpr: 1 }, pointer = null, hover = null, asked = "", waiting = false;
  const view = { x: 0, y: 0, s: 1 }; // first column, first row, cells per pixel
  // what is drawn: the selected head on the large map, or a pinned head in a pane (p, h, canvas, pen, view, shape)
  const main = { view, get p() { return R.state.place; }, get h() { return R.state.head; }, get canvas() { return canvas; }, get pen() { return pen; }, get shape() { return shape; } };
  const place = (m = main) => R.meta.places[m.p];
  const code = (level, i, j, m = main) => source.name(m.p, m.h, level, i, j);
  const levelNow = (m = main) => Math.min(Math.max(0, Math.ceil(Math.log2(m.view.s / m.shape.dpr) - 1e-9)), place(m).top);
  const fit = () => Math.max(place().N / shape.width, place().T / shape.height);
  const bound = () => {
    const { T, N } = place(), most = fit();
    view.s = Math.min(Math.max(view.s, 1 / 40), most);
    const w = shape.width * view.s, h = shape.height * view.s;
    view.x = w >= N ? (N - w) / 2 : Math.min(Math.max(view.x, 0), N - w);
    view.y = h >= T ? (T - h) / 2 : Math.min(Math.max(view.y, 0), T - h);
    if (w >= N) view.x = 0;
    if (h >= T) view.y = 0;
  };
  const layout = () => {
    const box = canvas.parentElement.getBoundingClientRect(), narrow = innerWidth < 700, dpr = devicePixelRatio || 1;
    const left = narrow ? 46 : 84, top = narrow ? 40 : 62, width = Math.max(120, Math.floor(box.width) - left - 2), height = Math.max(160, Math.floor(box.height) - top - 2);
    const changed = shape.width !== width || shape.height !== height || shape.dpr !== dpr, wasWhole = view.s >= fit() * 0.999;
    shape = { left, top, width, height, dpr };
    if (changed && wasWhole) view.s = fit();
    if (changed || canvas.width !== Math.round((left + width + 2) * dpr)) {
      canvas.width = Math.round((left + width + 2) * dpr);
      canvas.height = Math.round((top + height + 2) * dpr);
      canvas.style.width = `${left + width + 2}px`;
      canvas.style.height = `${top + height + 2}px`;
    }
  };

  // ---- colours: once per tile and look
  R.weightText = (w, digits) => w === 0 ? "< 1.2e−38" : R.num(w, digits); // the smallest weight that the server can send
  // returns blocks as a picture; `unit` gives the place of a block in the ramp, 0 to 1, NaN for a wrong number, null for a masked block
  R.paintBlocks = (rows, cols, ramp, unit) => {
    const image = new ImageData(cols, rows), pixels = new Uint32Array(image.data.buffer), lut = R.lut(ramp), wrong = R.pixel("--bad");
    for (let n = 0; n < pixels.length; n++) {
      const u = unit(n);
      if (u === null) continue; // masked: the hatch shows
      pixels[n] = Number.isNaN(u) ? wrong : lut[u <= 0 ? 0 : u >= 1 ? 255 : Math.round(255 * u)];
    }
    return image;
  };
  const asCanvas = (image, canvas = document.createElement("canvas")) => {
    canvas.width = image.width;
    canvas.height = image.height;
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  };
  const lookNow = () => `${R.state.stat} ${R.state.scale} ${R.theme()}`;
  const paintTile = tile => {
    const look = lookNow();
    if (tile.look === look) return tile.picture;
    const { stat } = R.state, { ramp, at } = R.SCALES[R.state.scale], { cols } = tile, plane = tile[stat], size = 2 ** tile.level, isLift = R.state.scale === "lift";
    const uniform = n => tile.keys[Math.floor(n / cols)] / (stat === "mass" ? (tile.visible ? tile.visible[n] : 1) * size : 1); // 1 / what a block has if all visible keys are equal
    tile.picture = asCanvas(R.paintBlocks(tile.rows, cols, ramp, n => plane[n] < 0 ? null : at(isLift ? plane[n] * uniform(n) : plane[n])), tile.picture || undefined);
    tile.look = look;
    return tile.picture;
  };

  // ---- the difference of two heads, block by block: the selected head minus the pinned one; a masked block counts as 0
  const paintDifference = (from, tile) => {
    const look = `${lookNow()} ${from.key} ${from.at} ${tile.at}`;
    if (tile.difference?.look === look) return tile.difference.picture;
    const { rows, cols } = tile.empty ? from : tile, { at } = R.SCALES[signedScale()];
    const read = x => x.empty ? () => -1 : n => x[R.state.stat][n];
    const a = read(from), b = read(tile), part = w => w < 0 ? 0 : w;
    const image = R.paintBlocks(rows, cols, "signed", n => a(n) < 0 && b(n) < 0 ? null : at(part(a(n)) - part(b(n))));
    tile.difference = { look, picture: asCanvas(image, tile.difference?.picture) };
    return tile.difference.picture;
  };
  const signedScale = () => R.state.scale === "linear" ? "signed" : "signedlog";

  // ---- pinned heads, beside the large map; all show the same rows and columns
  let panes = [], maps = null;
  const comparable = m => place(m).T === place().T && place(m).N === place().N && (m.p !== main.p || m.h !== main.h);
  const pinned = () => R.state.pins.split("_").filter(Boolean).map(x => x.split(".").map(Number)).filter(([p, h]) => R.meta.places[p]?.heads.includes(h));
  R.pin = (p = R.state.place, h = R.state.head) => { // pins a head, or takes it away
    const name = `${p}.${h}`, all = pinned().map(x => x.join(".")), next = all.includes(name) ? all.filter(x => x !== name) : [...all, name].slice(-MOST_PANES);
    R.set({ pins: next.join("_") });
  };
  const makePanes = () => {
    for (const m of panes) m.node.remove();
    panes = pinned().map(([p, h]) => {
      const one = el("canvas", { class: "heat", role: "img", ariaLabel: R.headName(p, h) }), note = el("span", { class: "soft" });
      const node = el("div", { class: "pane", "data-pin": `${p}.${h}` }, el("div", { class: "panetitle" },
        el("button", { type: "button", class: "small", title: t("live.open_pin"), onclick: () => R.set({ place: p, head: h }) }, R.headName(p, h)), note,
        el("button", { type: "button", class: "small unpin", ariaLabel: t("live.unpin"), title: t("live.unpin"), onclick: () => R.pin(p, h) }, "×")), el("div", { class: "panebox" }, one));
      const m = { p, h, node, note, canvas: one, pen: one.getContext("2d"), view: { x: 0, y: 0, s: 1 }, shape: { left: 1, top: 1, width: 100, height: 100, dpr: 1 } };
      listen(m);
      maps.append(node);
      return m;
    });
    const n = panes.length + 1, columns = innerWidth < 700 || n === 1 ? 1 : n <= 4 ? 2 : 3;
    maps.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    maps.dataset.panes = panes.length;
    canvas.closest(".mapbox").classList.toggle("shared", panes.length > 0);
  };
  const layoutPanes = () => {
    const dpr = devicePixelRatio || 1;
    for (const m of panes) {
      const box = m.canvas.parentElement.getBoundingClientRect(), width = Math.max(60, Math.floor(box.width) - 2), height = Math.max(60, Math.floor(box.height) - 2);
      m.shape = { left: 1, top: 1, width, height, dpr };
      if (m.canvas.width === Math.round((width + 2) * dpr) && m.canvas.height === Math.round((height + 2) * dpr)) continue;
      m.canvas.width = Math.round((width + 2) * dpr);
      m.canvas.height = Math.round((height + 2) * dpr);
      m.canvas.style.width = `${width + 2}px`;
      m.canvas.style.height = `${height + 2}px`;
    }
  };
  const linkPanes = () => { // the centre of the large map, at the zoom at which all that it shows has room
    for (const m of panes) {
      const { width, height } = m.shape, s = Math.max(shape.width / width, shape.height / height) * view.s;
      m.view = { s, x: view.x + (shape.width * view.s - width * s) / 2, y: view.y + (shape.height * view.s - height * s) / 2 };
      if (view.x === 0 && shape.width * view.s >= place().N) m.view.x = 0;
      if (view.y === 0 && shape.height * view.s >= place().T) m.view.y = 0;
    }
  };
  const drawPane = m => {
    m.pen.clearRect(0, 0, m.canvas.width, m.canvas.height);
    const found = drawTiles(m), words = [found.computed < 1 ? t("live.short_preview", { share: R.percent(found.computed, 2) }) : t("live.exact")];
    if (R.state.diff) words.unshift(t(comparable(m) ? "live.difference_of" : m.p === main.p && m.h === main.h ? "live.same_head" : "live.other_size"));
    if (!found.known) words.push(t("live.loading"));
    if (m.note.textContent !== words.join(" · ")) m.note.textContent = words.join(" · ");
    m.node.dataset.known = found.known;
    m.node.dataset.computed = found.computed;
  };

  // ---- which tiles are visible, nearest to the pointer first; then those one level up
  const visible = (level, m = main) => {
    const size = SIDE * 2 ** level, { T, N } = place(m), found = [], { view, shape } = m;
    const i0 = Math.max(0, Math.floor(view.y / size)), i1 = Math.min(Math.ceil(T / size) - 1, Math.floor((view.y + shape.height * view.s) / size));
    const j0 = Math.max(0, Math.floor(view.x / size)), j1 = Math.min(Math.ceil(N / size) - 1, Math.floor((view.x + shape.width * view.s) / size));
    for (let i = i0; i <= i1; i++) for (let j = j0; j <= j1; j++) found.push([i, j]);
    const [y, x] = hover || [view.y + shape.height * view.s / 2, view.x + shape.width * view.s / 2];
    return found.sort((a, b) => Math.hypot((a[0] + 0.5) * size - y, (a[1] + 0.5) * size - x) - Math.hypot((b[0] + 0.5) * size - y, (b[1] + 0.5) * size - x));
  };
  const request = () => {
    linkPanes();
    const level = levelNow(), top = place().top, keys = visible(level).map(([i, j]) => code(level, i, j));
    if (level < top) keys.push(...visible(level + 1).map(([i, j]) => code(level + 1, i, j)));
    if (!keys.includes(code(top, 0, 0))) keys.push(code(top, 0, 0));
    for (const m of panes) {
      const level = levelNow(m), there = visible(level, m);
      keys.push(...there.map(([i, j]) => code(level, i, j, m)));
      if (R.state.diff && comparable(m)) keys.push(...there.map(([i, j]) => code(level, i, j)));
    }
    const now = keys.join();
    if (now !== asked || keys.some(k => !source.get(k) || source.get(k).computed < 1)) source.want(keys);
    asked = now;
  };
  const px = (j, m = main) => (j - m.view.x) / m.view.s, py = (i, m = main) => (i - m.view.y) / m.view.s;

  const drawTiles = (m = main) => {
    const { shape, view, pen } = m, { left, top, width, height, dpr } = shape, level = levelNow(m), { T, N } = place(m), minus = m !== main && R.state.diff && comparable(m);
    let computed = 1, sampled = 0, known = true, seen = 0;
    pen.save();
    pen.beginPath();
    const x0 = Math.max(0, px(0, m)), y0 = Math.max(0, py(0, m));
    pen.rect((left + x0) * dpr, (top + y0) * dpr, Math.max(0, Math.min(width, px(N, m)) - x0) * dpr, Math.max(0, Math.min(height, py(T, m)) - y0) * dpr);
    pen.clip();
    pen.fillStyle = hatch(pen);
    pen.fillRect(left * dpr, top * dpr, width * dpr, height * dpr);
    pen.imageSmoothingEnabled = false;
    const peaks = [];
    for (const [i, j] of visible(level, m)) {
      let tile = source.touch(code(level, i, j, m)), up = level, a = i, b = j;
      while (!tile && !minus && up < place(m).top) { up++; a >>= 1; b >>= 1; tile = source.get(code(up, a, b, m)); }
      const size = SIDE * 2 ** level, x0 = Math.round((left + px(j * size, m)) * dpr), y0 = Math.round((top + py(i * size, m)) * dpr);
      const x1 = Math.round((left + px(Math.min((j + 1) * size, N), m)) * dpr), y1 = Math.round((top + py(Math.min((i + 1) * size, T), m)) * dpr), from = minus ? source.touch(code(level, i, j)) : null;
      seen++;
      if (!tile || minus && !from) { known = false; pen.fillStyle = R.css("--hint"); pen.fillRect(x0, y0, x1 - x0, y1 - y0); continue; }
      if (up !== level) known = false;
      for (const x of minus ? [tile, from] : [tile]) { computed = Math.min(computed, x.computed); if (x.computed < 1) sampled = Math.max(sampled, x.sampled); }
      if (minus ? tile.empty && from.empty : tile.empty) continue;
      if (!minus) peaks.push(...tile.peaks);
      const picture = minus ? paintDifference(from, tile) : paintTile(tile), block = 2 ** up, rows = (Math.min((i + 1) * size, T) - i * size) / block, cols = (Math.min((j + 1) * size, N) - j * size) / block;
      pen.drawImage(picture, (j * size - b * SIDE * block) / block, (i * size - a * SIDE * block) / block, cols, rows, x0, y0, x1 - x0, y1 - y0);
    }
    if (view.s <= 1 / 14 && !minus) drawNumbers(m);
    drawMarks(peaks, m);
    pen.restore();
    return { level, computed, sampled, known, peaks, seen };
  };
  let pattern = null, patternOf = "";
  const hatch = pen => {
    const now = `${R.theme()} ${shape.dpr}`;
    if (patternOf === now) return pattern;
    patternOf = now;
    const n = Math.round(8 * shape.dpr), one = el("canvas", { width: n, height: n }), ink = one.getContext("2d");
    ink.fillStyle = R.css("--card");
    ink.fillRect(0, 0, n, n);
    ink.strokeStyle = R.css("--line");
    ink.lineWidth = shape.dpr;
    for (const shift of [-n, 0, n]) { ink.beginPath(); ink.moveTo(shift, n); ink.lineTo(shift + n, 0); ink.stroke(); }
    return pattern = pen.createPattern(one, "repeat");
  };
  const drawNumbers = m => { // weights as numbers where a cell has room for them
    const { view, shape, pen } = m, { left, top, dpr } = shape, each = 1 / view.s;
    if (each < 34) return;
    pen.font = `${Math.min(12, each / 3.4) * dpr}px ${MONO}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const { T, N } = place(m);
    for (let i = Math.max(0, Math.floor(view.y)); i < Math.min(T, view.y + shape.height * view.s); i++) for (let j = Math.max(0, Math.floor(view.x)); j < Math.min(N, view.x + shape.width * view.s); j++) {
      const v = value(i, j, m);
      if (!v || v.masked || v.level > 0) continue;
      const u = R.SCALES[R.state.scale].at(v.max);
      pen.fillStyle = (R.theme() === "dark") === (u > 0.6) ? "#15171c" : "#f7f7f5";
      if (u <= 0.6) pen.fillStyle = R.css("--ink");
      pen.fillText(R.num(v.max, 2), (left + px(j + 0.5, m)) * dpr, (top + py(i + 0.5, m)) * dpr);
    }
  };
  const drawMarks = (peaks, m) => {
    const { view, shape, pen } = m, { left, top, width, height, dpr } = shape, { i, j } = R.state;
    pen.lineWidth = 1.5 * dpr;
    const line = (ink, x, y, w, h) => { pen.strokeStyle = R.css(ink); pen.strokeRect((left + x) * dpr, (top + y) * dpr, w * dpr, h * dpr); };
    const wide = Math.max(1 / view.s, 1);
    pen.globalAlpha = 0.75;
    line("--q", -4, py(i, m), width + 8, wide);
    line("--k", px(j, m), -4, wide, height + 8);
    pen.globalAlpha = 1;
    if (view.s > 1 / 3) for (const peak of peaks.filter(x => x.w >= 0.02)) { // a ring around each of the largest cells
      pen.strokeStyle = R.css("--bad");
      pen.beginPath();
      pen.arc((left + px(peak.j + 0.5, m)) * dpr, (top + py(peak.i + 0.5, m)) * dpr, 6 * dpr, 0, 7);
      pen.stroke();
    }
    if (hover) line("--ink", px(hover[1], m), py(hover[0], m), Math.max(1 / view.s, 1), Math.max(1 / view.s, 1));
  };

  // ---- rulers
  const clipped = (text, room) => {
    if (pen.measureText(text).width <= room) return text;
    let shown = [...text].slice(0, 24);
    while (shown.length > 1 && pen.measureText(`${shown.join("")}…`).width > room) shown.pop();
    return `${shown.join("")}…`;
  };
  const ruler = across => {
    const { left, top, width, height, dpr } = shape, { T, N } = place(), p = R.state.place, length = across ? width : height, from = across ? view.x : view.y, count = across ? N : T;
    const each = 1 / view.s, named = each >= LABELLED, every = named ? 1 : 10 ** Math.ceil(Math.log10((across ? 56 : 26) * view.s)), half = !named && every * each > (across ? 130 : 70) ? every / 2 : every;
    const step = Math.max(1, half);
    pen.font = `${(named ? Math.min(12, Math.max(10, each * 0.8)) : 11) * dpr}px ${named ? MONO : "system-ui, sans-serif"}`;
    pen.textBaseline = "middle";
    const marked = across ? R.state.j : R.state.i;
    for (let n = Math.ceil(from / step) * step; n < Math.min(count, from + length * view.s); n += step) {
      const at = (n + (named ? 0.5 : 0) - from) * each, text = named ? (across ? R.keyToken(p, n) : R.rowToken(p, n)) || String(n) : n.toLocaleString("en");
      pen.fillStyle = R.css(marked === n ? (across ? "--k" : "--q") : "--soft");
      pen.save();
      if (across) {
        pen.translate((left + at) * dpr, (top - 5) * dpr);
        if (named) pen.rotate(-Math.PI / 2);
        pen.textAlign = named ? "left" : "center";
        if (!named) { pen.fillRect(-0.5 * dpr, 0, dpr, 4 * dpr); pen.fillText(text, 0, -7 * dpr); } else pen.fillText(clipped(text, (top - 8) * dpr), 0, 0);
      } else {
        pen.textAlign = "right";
        if (!named) pen.fillRect((left - 5) * dpr, (top + at) * dpr - 0.5 * dpr, 4 * dpr, dpr);
        pen.fillText(clipped(text, (left - 10) * dpr), (left - 7) * dpr, (top + at) * dpr);
      }
      pen.restore();
    }
    const hits = R.hits || []; // hits of the search tick both rulers
    pen.fillStyle = R.css("--z");
    for (let n = lower(hits, from); n < hits.length && hits[n] < from + length * view.s; n++) {
      const at = (hits[n] - from) * each;
      if (across) pen.fillRect((left + at) * dpr, (top - 4) * dpr, Math.max(dpr, each * dpr), 4 * dpr); else pen.fillRect((left - 4) * dpr, (top + at) * dpr, 4 * dpr, Math.max(dpr, each * dpr));
    }
    pen.fillStyle = R.css(across ? "--k" : "--q");
    const at = ((across ? R.state.j : R.state.i) + 0.5 - from) * each;
    if (at >= 0 && at <= length) { pen.beginPath(); if (across) { pen.moveTo((left + at) * dpr, top * dpr); pen.lineTo((left + at - 4) * dpr, (top - 6) * dpr); pen.lineTo((left + at + 4) * dpr, (top - 6) * dpr); } else { pen.moveTo(left * dpr, (top + at) * dpr); pen.lineTo((left - 6) * dpr, (top + at - 4) * dpr); pen.lineTo((left - 6) * dpr, (top + at + 4) * dpr); } pen.fill(); }
  };
  const lower = (sorted, x) => { let a = 0, b = sorted.length; while (a < b) { const m = a + b >> 1; if (sorted[m] < x) a = m + 1; else b = m; } return a; };

  const draw = () => {
    waiting = false;
    if (!canvas || !canvas.isConnected || !canvas.offsetParent) return;
    const { left, top, width, height, dpr } = shape;
    hover = pointer && cellAt(pointer.at, pointer.m); // the cell under a pointer that rests changes with the view
    pen.clearRect(0, 0, canvas.width, canvas.height);
    const found = drawTiles();
    pen.strokeStyle = R.css("--line");
    pen.lineWidth = dpr;
    pen.strokeRect(left * dpr, top * dpr, Math.min(width, place().N / view.s) * dpr, Math.min(height, place().T / view.s) * dpr);
    ruler(false);
    ruler(true);
    pen.font = `${10.5 * dpr}px system-ui, sans-serif`;
    const narrow = left < 60; // the names of the axes then begin at the edge, above the numbers of the ruler
    pen.textAlign = narrow ? "left" : "right";
    pen.fillStyle = R.css("--k");
    pen.fillText(t("live.keys_axis"), (narrow ? 1 : left - 8) * dpr, (top - (narrow ? 33 : 26)) * dpr);
    pen.fillStyle = R.css("--q");
    pen.fillText(t("live.queries_axis"), (narrow ? 1 : left - 8) * dpr, (top - (narrow ? 21 : 11)) * dpr);
    drawInset();
    say(found);
    linkPanes();
    panes.forEach(drawPane);
    R.refreshTip();
  };
  const redraw = () => { if (!waiting) { waiting = true; requestAnimationFrame(draw); } };
  let said = "";
  const say = ({ level, computed, sampled, known, peaks }) => {
    const size = 2 ** level, words = [computed < 1 ? t("live.preview", { rows: sampled, of: size, share: R.percent(computed, 2) }) : t("live.exact")];
    if (size > 1) words.push(t("live.pooled", { size, stat: t(`stat.${R.state.stat}`) }));
    if (!known) words.push(t("live.loading"));
    const best = peaks.sort((a, b) => b.w * Math.log(1 + b.n) - a.w * Math.log(1 + a.n)).slice(0, 4), now = `${words.join()} ${best.map(x => [x.i, x.j]).join(" ")} ${R.state.lang}`;
    if (now === said) return;
    said = now;
    badge.textContent = words.join(" · ");
    badge.className = `badge ${computed < 1 ? "sampled" : size > 1 ? "pooled" : "exact"}`;
    peaksList.replaceChildren(...best.map(x => el("button", { type: "button", class: "small peak", onclick: () => open(x.i, x.j) },
      el("span", { class: "num s" }, R.num(x.w, 3)), " ", el("bdi", { class: "token q" }, R.rowName(R.state.place, x.i)), " → ", el("bdi", { class: "token k" }, R.keyName(R.state.place, x.j)))));
    document.documentElement.dataset.level = level;
    document.documentElement.dataset.computed = computed;
    document.documentElement.dataset.known = known;
  };
  const drawInset = () => {
    const tile = source.get(code(place().top, 0, 0)), { T, N } = place(), w = 132, h = Math.max(20, Math.round(w * Math.min(1.5, T / N)));
    inset.width = w;
    inset.height = h;
    insetPen.imageSmoothingEnabled = false;
    insetPen.clearRect(0, 0, w, h);
    if (tile && !tile.empty) insetPen.drawImage(paintTile(tile), 0, 0, w, h);
    insetPen.strokeStyle = R.css("--ink");
    insetPen.lineWidth = 1.5;
    insetPen.strokeRect(view.x / N * w + 0.5, view.y / T * h + 0.5, Math.max(4, Math.min(1, shape.width * view.s / N) * w - 1), Math.max(4, Math.min(1, shape.height * view.s / T) * h - 1));
  };

  // ---- the number under the pointer: of the finest tile that is here
  const value = (i, j, m = main) => {
    for (let level = levelNow(m); level <= place(m).top; level++) {
      const size = 2 ** level, tile = source.get(code(level, Math.floor(i / size / SIDE), Math.floor(j / size / SIDE), m));
      if (!tile) continue;
      if (tile.empty) return { masked: true, level };
      const n = (Math.floor(i / size) % SIDE) * tile.cols + Math.floor(j / size) % SIDE;
      if (tile.max[n] < 0) return { masked: true, level };
      return { level, mass: tile.mass[n], max: tile.max[n], computed: tile.computed };
    }
    return null;
  };
  const label = (i, j, m = main) => {
    const v = value(i, j, m), p = m.p, lines = [`${t("map.query")} ${R.rowName(p, i)}`, `${t("map.key")} ${R.keyName(p, j)}`];
    if (m !== main) lines.unshift(R.headName(m.p, m.h));
    if (!v) lines.push(t("live.loading"));
    else if (v.masked) lines.push(t("map.masked"));
    else if (v.level === 0) lines.push(`${t("map.weight")} ${R.weightText(v.max, 4)}`);
    else lines.push(t("live.block", { size: 2 ** v.level, max: R.weightText(v.max, 3), mass: R.weightText(v.mass, 3) }));
    return lines.join("\n");
  };

  // ---- pan and zoom
  const moved = () => { bound(); canvas.style.cursor = "crosshair"; request(); redraw(); remember(); };
  let later = 0;
  const remember = () => { clearTimeout(later); later = setTimeout(() => { if (canvas) R.set({ z: `${Math.round(view.y)}.${Math.round(view.x)}.${Math.round(view.s * 1000)}` }); }, 250); };
  const zoom = (by, i, j) => {
    const before = view.s, x = px(j), y = py(i);
    view.s *= by;
    view.s = Math.min(Math.max(view.s, 1 / 40), fit());
    if (view.s === before) return;
    view.x = j - x * view.s;
    view.y = i - y * view.s;
    moved();
  };
  const whole = () => { view.s = fit(); view.x = view.y = 0; moved(); };
  const center = (i, j, s = view.s) => { view.s = s; view.x = j + 0.5 - shape.width * s / 2; view.y = i + 0.5 - shape.height * s / 2; moved(); };
  const open = (i, j) => { R.set({ i, j, tab: "cell" }); center(i, j, 1 / 24); canvas.focus({ preventScroll: true }); };
  const reveal = (i, j) => {
    const w = shape.width * view.s, h = shape.height * view.s;
    if (j < view.x || j >= view.x + w || i < view.y || i >= view.y + h) center(i, j); else redraw();
  };
  const cellAt = (e, m = main) => {
    const { shape, view } = m, box = m.canvas.getBoundingClientRect(), u = e.clientX - box.left - shape.left, v = e.clientY - box.top - shape.top;
    if (u < 0 || v < 0 || u >= shape.width || v >= shape.height) return null;
    const i = Math.floor(view.y + v * view.s), j = Math.floor(view.x + u * view.s);
    return i >= 0 && j >= 0 && i < place(m).T && j < place(m).N ? [i, j] : null;
  };
  const nearPeak = (e, m) => {
    const { shape, view } = m;
    if (view.s <= 1 / 3) return null;
    const box = m.canvas.getBoundingClientRect(), u = e.clientX - box.left - shape.left, v = e.clientY - box.top - shape.top, level = levelNow(m);
    const all = visible(level, m).flatMap(([i, j]) => source.get(code(level, i, j, m))?.peaks || []).filter(x => x.w >= 0.02);
    return all.find(x => Math.hypot(px(x.j + 0.5, m) - u, py(x.i + 0.5, m) - v) < 9) || null;
  };
  const listen = m => { // pan, zoom and choice of a cell, on the large map and in every pane
    const fingers = new Map(), { canvas } = m;
    let drag = null;
    canvas.addEventListener("pointerdown", e => { fingers.set(e.pointerId, e); drag = { x: e.clientX, y: e.clientY, vx: view.x, vy: view.y, moved: false }; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointermove", e => {
      if (!fingers.has(e.pointerId)) {
        const at = { clientX: e.clientX, clientY: e.clientY };
        pointer = { at, m };
        R.showTip(() => { const cell = m.canvas.offsetParent && cellAt(at, m); return cell ? label(...cell, m) : ""; }, at.clientX, at.clientY);
        redraw();
        return;
      }
      if (fingers.size === 2) {
        const [a, b] = [...fingers.values()], was = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
        fingers.set(e.pointerId, e);
        const [c, d] = [...fingers.values()], now = Math.hypot(c.clientX - d.clientX, c.clientY - d.clientY), middle = cellAt({ clientX: (c.clientX + d.clientX) / 2, clientY: (c.clientY + d.clientY) / 2 }, m);
        if (drag) drag.moved = true;
        if (middle && now > 0) zoom(was / now, ...middle);
        return;
      }
      fingers.set(e.pointerId, e);
      const dx = e.clientX - drag.x, dy = e.clientY - drag.y;
      if (!drag.moved && Math.hypot(dx, dy) < 5) return;
      drag.moved = true;
      pointer = null;
      R.hideTip();
      view.x = drag.vx - dx * m.view.s;
      view.y = drag.vy - dy * m.view.s;
      moved();
    });
    const lift = e => {
      fingers.delete(e.pointerId);
      if (e.type === "pointerup" && drag && !drag.moved) {
        const peak = nearPeak(e, m), cell = cellAt(e, m);
        if (peak) open(peak.i, peak.j); else if (cell) R.set({ i: cell[0], j: cell[1] });
      }
      if (!fingers.size) drag = null;
    };
    canvas.addEventListener("pointerup", lift);
    canvas.addEventListener("pointercancel", lift);
    canvas.addEventListener("pointerleave", () => { pointer = null; R.hideTip(); redraw(); });
    canvas.addEventListener("dblclick", e => { const cell = cellAt(e, m); if (cell) zoom(1 / 8, ...cell); });
    canvas.addEventListener("wheel", e => {
      const cell = cellAt(e, m);
      if (!cell) return;
      e.preventDefault();
      zoom(2 ** (Math.max(-120, Math.min(120, e.deltaY)) / 200), ...cell);
    }, { passive: false });
  };
  const listenToKeys = () => {
    canvas.addEventListener("keydown", e => {
      const { i, j } = R.state, screen = Math.max(1, Math.floor(shape.width * view.s * 0.9)), far = e.shiftKey ? screen : 1, { T, N } = place();
      const to = { ArrowUp: [i - far, j], ArrowDown: [i + far, j], ArrowLeft: [i, j - far], ArrowRight: [i, j + far], Home: [i, 0], End: [i, N - 1], PageUp: [i - screen, j], PageDown: [i + screen, j] }[e.key];
      if (to && !e.ctrlKey && !e.metaKey && !e.altKey) {
        R.set({ i: clip(to[0], T), j: clip(to[1], N) });
        reveal(R.state.i, R.state.j);
        live.textContent = label(R.state.i, R.state.j).replaceAll("\n", ", ");
      } else if (e.key === "+" || e.key === "=") zoom(0.5, i, j);
      else if (e.key === "-") zoom(2, i, j);
      else if (e.key === "0") whole();
      else if (e.key === "Enter") open(i, j);
      else return;
      e.preventDefault();
    });
    inset.addEventListener("pointerdown", e => jump(e));
    inset.addEventListener("pointermove", e => { if (e.buttons) jump(e); });
    const jump = e => { const box = inset.getBoundingClientRect(); center((e.clientY - box.top) / box.height * place().T, (e.clientX - box.left) / box.width * place().N); };
  };

  R.map = { view, zoom, whole, center, open, reveal, redraw, request, value, shape: () => shape, level: levelNow, panes: () => panes };
  R.mapPanel = () => {
    canvas = el("canvas", { id: "map", tabIndex: 0, role: "img", class: "heat" });
    pen = canvas.getContext("2d");
    inset = el("canvas", { class: "mini", id: "inset", ariaHidden: "true" });
    insetPen = inset.getContext("2d");
    badge = el("span", { class: "badge", id: "badge", role: "status" });
    live = el("p", { class: "hidden", role: "status", ariaLive: "polite", id: "live" });
    legend = el("div", { class: "legendbox" });
    peaksList = el("div", { class: "peaks", id: "peaks", role: "group", ariaLabel: t("live.largest") });
    const select = (name, options) => el("label", { title: t(`map.${name}`) }, el("span", { class: "hidden" }, t(`map.${name}`)), el("select", { id: `${name}`, onchange: e => R.set({ [name]: e.target.value }) }, ...options.map(([value, text]) => el("option", { value, selected: R.state[name] === value }, text))));
    const heads = el("select", { id: "head", ariaLabel: t("map.head"), onchange: e => { const [p, h] = e.target.value.split(" ").map(Number); R.set({ place: p, head: h }); } },
      ...R.meta.places.map((x, p) => el("optgroup", { label: x.name }, ...x.heads.map(h => el("option", { value: `${p} ${h}` }, R.headName(p, h))))));
    const press = (id, label, act) => el("button", { type: "button", id, class: "tool", ariaLabel: t(`map.${id}`), title: t(`map.${id}`), onclick: act }, label);
    const middle = () => [view.y + shape.height * view.s / 2, view.x + shape.width * view.s / 2];
    const node = el("section", { class: "mappanel", ariaLabel: t("map.title") },
      el("div", { class: "controls" }, heads, select("stat", [["max", t("stat.max")], ["mass", t("stat.mass")]]), select("scale", ["log", "linear", "lift"].map(x => [x, t(`scale.${x}`)])),
        el("span", { class: "controls" }, press("in", "+", () => zoom(0.5, ...middle())), press("out", "−", () => zoom(2, ...middle())), press("whole", t("map.fit"), whole)),
        el("span", { class: "controls" }, el("button", { type: "button", id: "pin", title: t("live.pin_title"), onclick: () => R.pin() }, t("live.pin")), minusButton = el("button", { type: "button", id: "diff", title: t("live.minus_title"), onclick: () => R.set({ diff: R.state.diff ? "" : "1" }) }, t("live.minus")))),
      el("div", { class: "controls" }, badge, legend), maps = el("div", { class: "maps" }, el("div", { class: "mapbox" }, canvas, inset)), el("div", { class: "controls under" }, el("span", { class: "soft" }, t("live.largest")), peaksList), live);
    listen(main);
    listenToKeys();
    said = "";
    asked = "";
    panes = [];
    madePins = null;
    return node;
  };
  let first = true, madePins = null, shownSize = "";
  R.mapUpdate = changed => {
    if (madePins !== R.state.pins || changed.has("size")) { madePins = R.state.pins; makePanes(); changed.add("pins"); }
    if (["scale", "theme", "lang", "start", "diff", "pins"].some(x => changed.has(x)) || !legend.childElementCount) legend.replaceChildren(R.legend(R.state.scale, t(R.state.scale === "log" ? "live.log_means" : `scale.${R.state.scale}.means`)),
      R.state.diff && panes.length ? R.legend(signedScale(), t("live.difference_means")) : "");
    layout();
    layoutPanes();
    if (first || changed.has("start")) {
      first = false;
      const z = (R.state.z || "").match(/^(\d+)\.(\d+)\.(\d+)$/);
      if (z) Object.assign(view, { y: Number(z[1]), x: Number(z[2]), s: Number(z[3]) / 1000 }); else Object.assign(view, { x: 0, y: 0, s: fit() });
    }
    const size = `${place().T} ${place().N}`; // a place of the same size keeps the rows and columns that are shown
    if (changed.has("place") && size !== shownSize) Object.assign(view, { x: 0, y: 0, s: fit() });
    shownSize = size;
    bound();
    if (changed.has("head") || changed.has("place")) said = "";
    if (["place", "head", "size", "start", "lang", "pins", "diff"].some(x => changed.has(x))) request();
    document.getElementById("head").value = `${R.state.place} ${R.state.head}`;
    for (const name of ["stat", "scale"]) document.getElementById(name).value = R.state[name];
    document.getElementById("pin").setAttribute("aria-pressed", pinned().some(([p, h]) => p === R.state.place && h === R.state.head));
    minusButton.hidden = !panes.length;
    minusButton.setAttribute("aria-pressed", R.state.diff !== "");
    canvas.setAttribute("aria-label", t("map.alt", { head: R.headName(R.state.place, R.state.head), rows: place().T, columns: place().N }));
    redraw();
  };
}
