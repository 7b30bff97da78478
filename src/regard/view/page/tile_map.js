// The map of tiles: any zoom on one canvas, the largest cells, a small picture of the whole; and pinned heads beside
// it, which show the same rows and columns, or the difference to the selected head.
{
  const { el, t } = R,
    SIDE = 256,
    MOST_PANES = 7,
    FINEST = 1 / 40; // cells per pixel at the largest zoom
  const MONO = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", "Noto Sans Mono CJK SC", monospace';
  let main = null,
    shape = null,
    mini,
    badge,
    live,
    legend,
    peaksList,
    minusButton,
    heads,
    maps,
    panes = [],
    asked = "",
    waiting = false;
  const view = { i0: 0, i1: 1, j0: 0, j1: 1, s: 1 },
    group = { pointer: null, hover: null }; // s: cells per pixel
  // the large map shows the selected head, a pane its pin: m.pin is [place, head]
  const headOf = m => m.pin || [R.state.place, R.state.head];
  const place = (m = main) => R.meta.places[headOf(m)[0]];
  const code = (level, i, j, m = main) => source.name(...headOf(m), level, i, j);
  const levelNow = (m = main) =>
    Math.min(Math.max(0, Math.ceil(Math.log2(m.view.s / m.shape.dpr) - 1e-9)), place(m).top);
  const fit = () => Math.max(place().N / shape.width, place().T / shape.height);
  const look = (i0, j0, s) => {
    // moves the view within the bounds of the head
    const { T, N } = place();
    view.s = Math.min(Math.max(s, FINEST), fit());
    const w = shape.width * view.s,
      h = shape.height * view.s;
    view.j0 = w >= N ? 0 : Math.min(Math.max(j0, 0), N - w);
    view.i0 = h >= T ? 0 : Math.min(Math.max(i0, 0), T - h);
    view.j1 = view.j0 + w;
    view.i1 = view.i0 + h;
  };
  const sized = (m, left, top, least) => {
    const box = m.canvas.parentElement.getBoundingClientRect();
    m.shape = {
      left,
      top,
      width: Math.max(least[0], Math.floor(box.width) - left - 2),
      height: Math.max(least[1], Math.floor(box.height) - top - 2),
      dpr: devicePixelRatio || 1,
    };
    return m.shape;
  };
  const layout = () => {
    const narrow = innerWidth < 700,
      wasWhole = !shape || view.s >= fit() * 0.999;
    shape = sized(main, narrow ? 46 : 84, narrow ? 40 : 62, [120, 160]);
    look(view.i0, view.j0, wasWhole ? fit() : view.s);
  };

  // ---- colours: once per tile and look
  // the smallest weight that the server can send
  R.weightText = (w, digits) => (w === 0 ? "< 1.2e−38" : R.num(w, digits));
  const lookNow = () => `${R.state.stat} ${R.state.scale} ${R.theme()}`;
  const paintTile = tile => {
    const now = lookNow();
    if (tile.look === now) return tile.picture;
    const { stat } = R.state,
      { ramp, at } = R.SCALES[R.state.scale],
      { cols } = tile,
      plane = tile[stat],
      size = 2 ** tile.level,
      isLift = R.state.scale === "lift";
    const uniform = n =>
      // 1 / what a block has if all visible keys are equal
      tile.keys[Math.floor(n / cols)] / (stat === "mass" ? (tile.visible ? tile.visible[n] : 1) * size : 1);
    tile.picture = R.picture(
      tile.rows,
      cols,
      ramp,
      n => (plane[n] < 0 ? null : at(isLift ? plane[n] * uniform(n) : plane[n])),
      tile.picture || undefined,
    );
    tile.look = now;
    return tile.picture;
  };

  // ---- the difference of two heads, block by block: the selected head minus the pinned one; a masked block counts as
  // 0
  const paintDifference = (from, tile) => {
    const now = `${lookNow()} ${from.key} ${from.at} ${tile.at}`;
    if (tile.difference?.look === now) return tile.difference.picture;
    const { rows, cols } = tile.empty ? from : tile,
      { at } = R.SCALES[signedScale()];
    const read = x => (x.empty ? () => -1 : n => x[R.state.stat][n]),
      a = read(from),
      b = read(tile),
      part = w => (w < 0 ? 0 : w);
    const picture = R.picture(
      rows,
      cols,
      "signed",
      n => (a(n) < 0 && b(n) < 0 ? null : at(part(a(n)) - part(b(n)))),
      tile.difference?.picture,
    );
    tile.difference = { look: now, picture };
    return picture;
  };
  const signedScale = () => (R.state.scale === "linear" ? "signed" : "signedlog");

  // ---- pinned heads, beside the large map; all show the same rows and columns
  const isSelected = m => headOf(m).join() === headOf(main).join();
  const comparable = m => place(m).T === place().T && place(m).N === place().N && !isSelected(m);
  const pinned = () =>
    R.state.pins
      .split("_")
      .filter(Boolean)
      .map(x => x.split(".").map(Number))
      .filter(([p, h]) => R.meta.places[p]?.heads.includes(h));
  R.pin = (p = R.state.place, h = R.state.head) => {
    // pins a head, or takes it away
    const name = `${p}.${h}`,
      all = pinned().map(x => x.join(".")),
      next = all.includes(name) ? all.filter(x => x !== name) : [...all, name].slice(-MOST_PANES);
    R.set({ pins: next.join("_") });
  };
  const makePanes = () => {
    for (const m of panes) m.node.remove();
    panes = pinned().map(([p, h]) => {
      const m = tiles({
        pin: [p, h],
        names: null,
        axes: false,
        canvas: { role: "img", ariaLabel: R.headName(p, h) },
        view: { i0: 0, i1: 1, j0: 0, j1: 1, s: 1 },
        target: () => main,
      });
      m.note = el("span", { class: "soft" });
      m.node = el(
        "div",
        { class: "pane", "data-pin": `${p}.${h}` },
        el(
          "div",
          { class: "panetitle" },
          R.button(
            { class: "small", title: t("live.open_pin"), onclick: () => R.set({ place: p, head: h }) },
            R.headName(p, h),
          ),
          m.note,
          R.button(
            { class: "small unpin", ariaLabel: t("live.unpin"), title: t("live.unpin"), onclick: () => R.pin(p, h) },
            "×",
          ),
        ),
        el("div", { class: "panebox" }, m.canvas),
      );
      maps.append(m.node);
      return m;
    });
    const n = panes.length + 1,
      columns = innerWidth < 700 || n === 1 ? 1 : n <= 4 ? 2 : 3;
    maps.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    maps.dataset.panes = panes.length;
    main.canvas.closest(".mapbox").classList.toggle("shared", panes.length > 0);
  };
  const linkPanes = () => {
    // the centre of the large map, at the zoom at which all that it shows has room
    for (const m of panes) {
      const { width, height } = m.shape,
        s = Math.max(shape.width / width, shape.height / height) * view.s;
      const start = (from, length, n, room) => (from === 0 && length >= n ? 0 : from + (length - room) / 2);
      const i0 = start(view.i0, shape.height * view.s, place().T, height * s),
        j0 = start(view.j0, shape.width * view.s, place().N, width * s);
      Object.assign(m.view, { s, i0, i1: i0 + height * s, j0, j1: j0 + width * s });
    }
  };
  const drawPane = m => {
    m.draw();
    const { found } = m,
      words = [found.computed < 1 ? t("live.short_preview", { share: R.percent(found.computed, 2) }) : t("live.exact")];
    if (R.state.diff)
      words.unshift(t(comparable(m) ? "live.difference_of" : isSelected(m) ? "live.same_head" : "live.other_size"));
    if (!found.known) words.push(t("live.loading"));
    if (m.note.textContent !== words.join(" · ")) m.note.textContent = words.join(" · ");
    m.node.dataset.known = found.known;
    m.node.dataset.computed = found.computed;
  };

  // ---- which tiles are visible, nearest to the pointer first; then those one level up
  const visible = (level, m = main) => {
    const size = SIDE * 2 ** level,
      { T, N } = place(m),
      found = [],
      { i0, i1, j0, j1 } = m.view,
      first = from => Math.max(0, Math.floor(from / size)),
      last = (to, n) => Math.min(Math.ceil(n / size) - 1, Math.floor(to / size));
    for (let i = first(i0); i <= last(i1, T); i++) for (let j = first(j0); j <= last(j1, N); j++) found.push([i, j]);
    const [y, x] = group.hover || [(view.i0 + view.i1) / 2, (view.j0 + view.j1) / 2],
      far = ([i, j]) => Math.hypot((i + 0.5) * size - y, (j + 0.5) * size - x);
    return found.sort((a, b) => far(a) - far(b));
  };
  const request = () => {
    linkPanes();
    const level = levelNow(),
      top = place().top,
      keys = visible(level).map(([i, j]) => code(level, i, j));
    if (level < top) keys.push(...visible(level + 1).map(([i, j]) => code(level + 1, i, j)));
    if (!keys.includes(code(top, 0, 0))) keys.push(code(top, 0, 0));
    for (const m of panes) {
      const level = levelNow(m),
        there = visible(level, m);
      keys.push(...there.map(([i, j]) => code(level, i, j, m)));
      if (R.state.diff && comparable(m)) keys.push(...there.map(([i, j]) => code(level, i, j)));
    }
    const now = keys.join();
    if (now !== asked || keys.some(k => !source.get(k) || source.get(k).computed < 1)) source.want(keys);
    asked = now;
  };

  // paints the tiles of a map, coarser ones where those of its level are not here; returns what the badge says about
  // them
  const drawTiles = m => {
    const { pen, view, x, y } = m,
      { left, top, width, height, dpr } = m.shape,
      level = levelNow(m),
      { T, N } = place(m),
      minus = m.pin && R.state.diff && comparable(m),
      size = SIDE * 2 ** level;
    const found = { level, computed: 1, sampled: 0, known: true, peaks: [] };
    for (const [i, j] of visible(level, m)) {
      let tile = source.touch(code(level, i, j, m)),
        up = level,
        a = i,
        b = j;
      while (!tile && !minus && up < place(m).top) {
        up++;
        a >>= 1;
        b >>= 1;
        tile = source.get(code(up, a, b, m));
      }
      const i1 = Math.min((i + 1) * size, T),
        j1 = Math.min((j + 1) * size, N),
        from = minus ? source.touch(code(level, i, j)) : null;
      const x0 = Math.round((left + x(j * size)) * dpr),
        y0 = Math.round((top + y(i * size)) * dpr),
        box = [x0, y0, Math.round((left + x(j1)) * dpr) - x0, Math.round((top + y(i1)) * dpr) - y0];
      if (up !== level || !tile || (minus && !from)) found.known = false;
      if (!tile || (minus && !from)) {
        pen.fillStyle = R.css("--hint");
        pen.fillRect(...box);
        continue;
      }
      for (const one of minus ? [tile, from] : [tile]) {
        found.computed = Math.min(found.computed, one.computed);
        if (one.computed < 1) found.sampled = Math.max(found.sampled, one.sampled);
      }
      if (tile.empty && (!minus || from.empty)) continue;
      if (!minus) found.peaks.push(...tile.peaks);
      const block = 2 ** up,
        cells = n => n / block;
      pen.drawImage(
        minus ? paintDifference(from, tile) : paintTile(tile),
        cells(j * size - b * SIDE * block),
        cells(i * size - a * SIDE * block),
        cells(j1 - j * size),
        cells(i1 - i * size),
        ...box,
      );
    }
    if (view.s <= 1 / 34 && !minus) drawNumbers(m);
    return found;
  };
  const drawNumbers = m => {
    // weights as numbers, because a cell has room for them
    const { view, pen, x, y } = m,
      { left, top, dpr } = m.shape,
      { T, N } = place(m);
    pen.font = `${Math.min(12, 1 / view.s / 3.4) * dpr}px ${MONO}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let i = Math.floor(view.i0); i < Math.min(T, view.i1); i++)
      for (let j = Math.floor(view.j0); j < Math.min(N, view.j1); j++) {
        const v = value(i, j, m);
        if (!v || v.masked || v.level > 0) continue;
        const u = R.SCALES[R.state.scale].at(v.max);
        pen.fillStyle = u <= 0.6 ? R.css("--ink") : R.theme() === "dark" ? "#15171c" : "#f7f7f5";
        pen.fillText(R.num(v.max, 2), (left + x(j + 0.5)) * dpr, (top + y(i + 0.5)) * dpr);
      }
  };
  const isRing = (peak, m) => m.view.s > 1 / 3 && peak.w >= 0.02;
  const drawRings = m => {
    // around each of the largest cells
    const { pen, x, y } = m,
      { left, top, dpr } = m.shape;
    pen.strokeStyle = R.css("--bad");
    pen.lineWidth = 1.5 * dpr;
    for (const peak of m.found.peaks.filter(one => isRing(one, m))) {
      pen.beginPath();
      pen.arc((left + x(peak.j + 0.5)) * dpr, (top + y(peak.i + 0.5)) * dpr, 6 * dpr, 0, 7);
      pen.stroke();
    }
  };
  const openRing = (e, m) => {
    // opens the cell whose ring is under the pointer, if there is one
    const box = m.canvas.getBoundingClientRect(),
      { left, top } = m.shape,
      far = one =>
        Math.hypot(m.x(one.j + 0.5) + left - e.clientX + box.left, m.y(one.i + 0.5) + top - e.clientY + box.top);
    const peak = (m.found?.peaks || []).find(one => isRing(one, m) && far(one) < 9);
    if (peak) open(peak.i, peak.j);
    return Boolean(peak);
  };

  const draw = () => {
    waiting = false;
    if (!main || !main.canvas.offsetParent) return;
    main.draw();
    mini.draw();
    say(main.found);
    linkPanes();
    panes.forEach(drawPane);
    R.refreshTip();
  };
  const redraw = () => {
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(draw);
    }
  };
  let said = "";
  const say = ({ level, computed, sampled, known, peaks }) => {
    const size = 2 ** level,
      words = [
        computed < 1 ? t("live.preview", { rows: sampled, of: size, share: R.percent(computed, 2) }) : t("live.exact"),
      ];
    if (size > 1) words.push(t("live.pooled", { size, stat: t(`stat.${R.state.stat}`) }));
    if (!known) words.push(t("live.loading"));
    const best = peaks.sort((a, b) => b.w * Math.log(1 + b.n) - a.w * Math.log(1 + a.n)).slice(0, 4),
      now = `${words.join()} ${best.map(x => [x.i, x.j]).join(" ")} ${R.state.lang}`;
    if (now === said) return;
    said = now;
    badge.textContent = words.join(" · ");
    badge.className = `badge ${computed < 1 ? "sampled" : size > 1 ? "pooled" : "exact"}`;
    peaksList.replaceChildren(
      ...best.map(x =>
        R.button(
          { class: "small peak", onclick: () => open(x.i, x.j) },
          el("span", { class: "num s" }, R.num(x.w, 3)),
          " ",
          el("bdi", { class: "token q" }, R.rowName(R.state.place, x.i)),
          " → ",
          el("bdi", { class: "token k" }, R.keyName(R.state.place, x.j)),
        ),
      ),
    );
    document.documentElement.dataset.level = level;
    document.documentElement.dataset.computed = computed;
    document.documentElement.dataset.known = known;
  };
  // ---- the number under the pointer: of the finest tile that is here
  const value = (i, j, m = main) => {
    for (let level = levelNow(m); level <= place(m).top; level++) {
      const size = 2 ** level,
        tile = source.get(code(level, Math.floor(i / size / SIDE), Math.floor(j / size / SIDE), m));
      if (!tile) continue;
      if (tile.empty) return { masked: true, level };
      const n = (Math.floor(i / size) % SIDE) * tile.cols + (Math.floor(j / size) % SIDE);
      if (tile.max[n] < 0) return { masked: true, level };
      return { level, mass: tile.mass[n], max: tile.max[n], computed: tile.computed };
    }
    return null;
  };
  const label = (i, j, m = main) => {
    const v = value(i, j, m),
      [p, h] = headOf(m),
      lines = [`${t("map.query")} ${R.rowName(p, i)}`, `${t("map.key")} ${R.keyName(p, j)}`];
    if (m.pin) lines.unshift(R.headName(p, h));
    const { stat } = R.state,
      minus = m.pin && R.state.diff && comparable(m),
      other = minus && value(i, j, main),
      part = x => (x.masked ? 0 : x[stat]);
    if (!v || (minus && !other)) lines.push(t("live.loading"));
    else if (v.masked && (!minus || other.masked)) lines.push(t("map.masked"));
    else {
      // the number that has the colour: of a cell or of a block, of a head or the difference of two
      const shown = minus ? R.num(part(other) - part(v), 4) : R.weightText(v[stat], 4),
        size = 2 ** v.level;
      if (minus) lines.push(t("live.difference_of"));
      lines.push(v.level ? t(`live.block_${stat}`, { size, weight: shown }) : `${t("map.weight")} ${shown}`);
    }
    return lines.join("\n");
  };

  // ---- pan and zoom
  const moved = () => {
    request();
    redraw();
    remember();
  };
  let later = 0;
  const remember = () => {
    clearTimeout(later);
    later = setTimeout(
      () => R.set({ z: `${Math.round(view.i0)}.${Math.round(view.j0)}.${Math.round(view.s * 1000)}` }),
      250,
    );
  };
  const show = (i0, j0, rows, cols) => {
    look(i0, j0, Math.max(rows / shape.height, cols / shape.width));
    moved();
  };
  const center = (i, j, s = view.s) =>
    show(i + 0.5 - (shape.height * s) / 2, j + 0.5 - (shape.width * s) / 2, shape.height * s, shape.width * s);
  const open = (i, j) => {
    R.set({ i, j, tab: "cell" });
    center(i, j, 1 / 24);
    main.canvas.focus({ preventScroll: true });
  };
  const reveal = (i, j) => {
    if (j < view.j0 || j >= view.j1 || i < view.i0 || i >= view.i1) center(i, j);
    else redraw();
  };
  const tiles = options => {
    // a heat map of tiles: the large map, or a pane
    const m = heat({
      group,
      redraw,
      show,
      open,
      size: () => [place(m).T, place(m).N],
      mark: () => ({ i: R.state.i, j: R.state.j }),
      pick: (i, j) => R.set({ i, j }),
      label: (i, j) => label(i, j, m),
      limit: by => Math.min(Math.max(view.s * by, FINEST), fit()) / view.s,
      twice: (i, j) => main.zoom(1 / 8, i, j),
      clicked: e => openRing(e, m),
      body: () => {
        m.found = drawTiles(m);
      },
      over: () => drawRings(m),
      steps: () => Array(2).fill(Math.max(1, Math.floor(shape.width * view.s * 0.9))),
      walked: (i, j) => {
        live.textContent = label(i, j).replaceAll("\n", ", ");
      },
      ...options,
    });
    m.pin = options.pin;
    return m;
  };

  R.map = {
    view,
    center,
    open,
    reveal,
    redraw,
    request,
    value,
    zoom: (...at) => main.zoom(...at),
    whole: () => main.whole(),
    shape: () => shape,
    level: () => levelNow(),
    panes: () => panes,
  };
  R.mapPanel = () => {
    const names = { row: i => R.rowToken(R.state.place, i), col: j => R.keyToken(R.state.place, j) };
    main = tiles({ view, names, axes: true, canvas: { id: "map", role: "img" }, hits: () => R.hits || [] });
    main.shape = shape;
    const whole = () => {
      const tile = source.get(code(place().top, 0, 0));
      return tile && !tile.empty ? paintTile(tile) : null;
    };
    mini = miniature(main, { id: "inset", size: () => [place().T, place().N], picture: whole, wide: 96, tall: 1 });
    badge = el("span", { class: "badge", id: "badge", role: "status" });
    live = el("p", { class: "hidden", role: "status", ariaLive: "polite", id: "live" });
    legend = el("div", { class: "legendbox" });
    peaksList = el("div", { class: "peaks", id: "peaks", role: "group", ariaLabel: t("live.largest") });
    const hiddenLabel = (name, node) =>
      el("label", { title: t(`map.${name}`) }, el("span", { class: "hidden" }, t(`map.${name}`)), node);
    const [stat, scale] = R.lookSelects(name => name);
    heads = R.headSelect(
      "head",
      () => headOf(main),
      (p, h) => R.set({ place: p, head: h }),
      { ariaLabel: t("map.head") },
    );
    const press = (id, label, onclick) =>
      R.button({ id, class: "tool", ariaLabel: t(`map.${id}`), title: t(`map.${id}`), onclick }, label);
    const middle = () => [(view.i0 + view.i1) / 2, (view.j0 + view.j1) / 2];
    const node = el(
      "section",
      { class: "mappanel", ariaLabel: t("map.title") },
      // beside the controls, where it covers nothing
      el(
        "div",
        { class: "maphead" },
        el(
          "div",
          {},
          el(
            "div",
            { class: "controls" },
            heads.select,
            hiddenLabel("stat", stat),
            hiddenLabel("scale", scale),
            el(
              "span",
              { class: "controls" },
              press("in", "+", () => main.zoom(0.5, ...middle())),
              press("out", "−", () => main.zoom(2, ...middle())),
              press("whole", t("map.fit"), main.whole),
            ),
            el(
              "span",
              { class: "controls" },
              R.button({ id: "pin", title: t("live.pin_title"), onclick: () => R.pin() }, t("live.pin")),
              (minusButton = R.button(
                { id: "diff", title: t("live.minus_title"), onclick: () => R.set({ diff: R.state.diff ? "" : "1" }) },
                t("live.minus"),
              )),
            ),
          ),
          el("div", { class: "controls" }, badge, legend),
        ),
        mini.canvas,
      ),
      (maps = el("div", { class: "maps" }, el("div", { class: "mapbox" }, main.canvas))),
      el("div", { class: "controls under" }, el("span", { class: "soft" }, t("live.largest")), peaksList),
      live,
    );
    said = "";
    asked = "";
    panes = [];
    madePins = null;
    return node;
  };
  let first = true,
    madePins = null,
    shownSize = "";
  R.mapUpdate = changed => {
    if (madePins !== R.state.pins || changed.has("size")) {
      madePins = R.state.pins;
      makePanes();
      changed.add("pins");
    }
    if (["scale", "theme", "lang", "start", "diff", "pins"].some(x => changed.has(x)) || !legend.childElementCount)
      legend.replaceChildren(
        R.legend(R.state.scale, t(R.state.scale === "log" ? "live.log_means" : `scale.${R.state.scale}.means`)),
        R.state.diff && panes.length ? R.legend(signedScale(), t("live.difference_means")) : "",
      );
    layout();
    for (const m of panes) sized(m, 1, 1, [60, 60]);
    if (first || changed.has("start")) {
      first = false;
      const z = (R.state.z || "").match(/^(\d+)\.(\d+)\.(\d+)$/);
      if (z) look(Number(z[1]), Number(z[2]), Number(z[3]) / 1000);
      else look(0, 0, fit());
    }
    const size = `${place().T} ${place().N}`; // a place of the same size keeps the rows and columns that are shown
    if (changed.has("place") && size !== shownSize) look(0, 0, fit());
    shownSize = size;
    look(view.i0, view.j0, view.s);
    if (changed.has("head") || changed.has("place")) said = "";
    if (["place", "head", "size", "start", "lang", "pins", "diff"].some(x => changed.has(x))) request();
    heads.fill();
    for (const name of ["stat", "scale"]) document.getElementById(name).value = R.state[name];
    document.getElementById("pin").setAttribute(
      "aria-pressed",
      pinned().some(([p, h]) => p === R.state.place && h === R.state.head),
    );
    minusButton.hidden = !panes.length;
    minusButton.setAttribute("aria-pressed", R.state.diff !== "");
    main.canvas.setAttribute(
      "aria-label",
      t("map.alt", { head: R.headName(R.state.place, R.state.head), rows: place().T, columns: place().N }),
    );
    redraw();
  };
}
