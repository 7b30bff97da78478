// The atlas: a picture of every head on one canvas, made from exact sampled rows; a click opens the head.
{
  const { el, t } = R, SIDE = 64, GAP = 10, LABEL = 16;
  let canvas, pen, sorter, tip, order = [], columns = 1, each = 84, loading = null, looked = "", sheet = null, done = 0;
  const heads = []; // {p, h, metrics, rows, cols, mass, max}
  const list = () => R.meta.places.flatMap((x, p) => x.heads.map(h => [p, h]));
  const load = async () => {
    const all = list();
    while (heads.length < all.length) {
      const buffer = await source.bytes(`/heads/${heads.length}`), view = new DataView(buffer), n = view.getUint32(0, true), m = view.getUint32(4, true);
      let at = 8;
      for (let k = 0; k < n; k++) {
        const [p, h] = all[heads.length], rows = view.getUint16(at, true), cols = view.getUint16(at + 2, true), metrics = {};
        at += 4;
        R.meta.metricNames.forEach((name, x) => { metrics[name] = view.getFloat32(at + 4 * x, true); });
        at += 4 * m;
        heads.push({ p, h, metrics, rows, cols, mass: new Uint8Array(buffer, at, rows * cols), max: new Uint8Array(buffer, at + rows * cols, rows * cols) });
        at += 2 * rows * cols;
      }
      arrange();
    }
  };
  const lutOf = () => { // one byte is a logarithm from 2^-24 to 1
    const { ramp, at } = R.SCALES[R.state.scale === "lift" ? "log" : R.state.scale], lut = R.lut(ramp);
    return Uint32Array.from({ length: 256 }, (_, b) => b === 0 ? 0 : lut[Math.round(255 * Math.min(1, Math.max(0, at(2 ** (24 * ((b - 1) / 254 - 1))))))]);
  };
  const arrange = () => {
    if (!canvas || !canvas.isConnected) return;
    const width = canvas.parentElement.clientWidth, dpr = devicePixelRatio || 1, name = R.state.sortBy;
    if (!width) return;
    each = width < 600 ? 56 : 76;
    columns = Math.max(1, Math.floor((width + GAP) / (each + GAP)));
    order = heads.map((_, n) => n);
    if (name !== "layers") order.sort((a, b) => (heads[b].metrics[name] || 0) - (heads[a].metrics[name] || 0));
    const rows = Math.ceil(order.length / columns);
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.max(1, Math.round(rows * (each + GAP + LABEL) * dpr));
    canvas.style.width = `${width}px`;
    canvas.style.height = `${canvas.height / dpr}px`;
    draw();
  };
  const draw = () => {
    const since = performance.now(), dpr = devicePixelRatio || 1, lut = lutOf(), look = `${R.theme()} ${R.state.scale} ${R.state.stat}`;
    if (looked !== look || !sheet || sheet.height < Math.ceil(heads.length / 32) * SIDE) { looked = look; sheet = el("canvas", { width: 32 * SIDE, height: Math.ceil(list().length / 32) * SIDE }); done = 0; }
    const ink = sheet.getContext("2d");
    for (; done < heads.length; done++) { // every picture once, on one sheet
      const { rows, cols } = heads[done], image = ink.createImageData(cols, rows), pixels = new Uint32Array(image.data.buffer), plane = heads[done][R.state.stat];
      for (let n = 0; n < plane.length; n++) pixels[n] = lut[plane[n]];
      ink.putImageData(image, done % 32 * SIDE, Math.floor(done / 32) * SIDE);
    }
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.imageSmoothingEnabled = false;
    pen.font = `${11 * dpr}px system-ui, sans-serif`;
    pen.textBaseline = "top";
    order.forEach((n, k) => {
      const { p, h, rows, cols } = heads[n], x = k % columns * (each + GAP) * dpr, y = Math.floor(k / columns) * (each + GAP + LABEL) * dpr, w = each * dpr;
      pen.fillStyle = R.css("--card");
      pen.fillRect(x, y, w, w);
      pen.drawImage(sheet, n % 32 * SIDE, Math.floor(n / 32) * SIDE, cols, rows, x, y, w, w);
      const here = p === R.state.place && h === R.state.head;
      pen.strokeStyle = R.css(here ? "--s" : "--line");
      pen.lineWidth = (here ? 3 : 1) * dpr;
      pen.strokeRect(x, y, w, w);
      pen.fillStyle = R.css(here ? "--s" : "--soft");
      pen.fillText(`${R.meta.places[p].label}.${h}${R.state.sortBy === "layers" ? "" : ` ${R.num(heads[n].metrics[R.state.sortBy], 2)}`}`, x, y + w + 3 * dpr);
    });
    R.atlasTook = performance.now() - since;
    canvas.dataset.drawn = order.length;
  };
  const at = e => {
    const box = canvas.getBoundingClientRect(), c = Math.floor((e.clientX - box.left) / (each + GAP)), r = Math.floor((e.clientY - box.top) / (each + GAP + LABEL)), k = r * columns + c;
    return c < columns && k < order.length ? heads[order[k]] : null;
  };
  R.view({
    name: "heads", title: "live.heads",
    mount(node) {
      canvas = el("canvas", { id: "atlas", tabIndex: 0, role: "img", ariaLabel: t("live.heads") });
      pen = canvas.getContext("2d");
      sorter = el("select", { id: "sortBy", onchange: e => R.set({ sortBy: e.target.value }) }, el("option", { value: "layers" }, t("atlas.by_layers")), ...R.meta.metricNames.map(m => el("option", { value: m }, t(`live.metric_${m}`))));
      sorter.value = R.state.sortBy;
      canvas.addEventListener("pointermove", e => { const x = at(e); if (x) R.showTip(`${R.headName(x.p, x.h)}\n${R.meta.metricNames.map(m => `${t(`live.metric_${m}`)} ${R.num(x.metrics[m], 3)}`).join("\n")}`, e.clientX, e.clientY); else R.hideTip(); });
      canvas.addEventListener("pointerleave", R.hideTip);
      canvas.addEventListener("click", e => { const x = at(e); if (x) { R.hideTip(); R.set({ place: x.p, head: x.h, view: "map" }); } });
      canvas.addEventListener("keydown", e => {
        const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[e.key], here = order.findIndex(n => heads[n].p === R.state.place && heads[n].h === R.state.head);
        if (by && here >= 0) { const next = heads[order[Math.min(Math.max(here + by, 0), order.length - 1)]]; R.set({ place: next.p, head: next.h }); e.preventDefault(); } else if (e.key === "Enter") R.set({ view: "map" });
      });
      node.append(el("p", { class: "soft" }, t("live.heads_intro", { rows: SIDE }), R.meta.notKept ? ` ${t("live.not_kept", { n: R.meta.notKept })}` : ""), el("div", { class: "controls" }, el("label", {}, t("atlas.sort"), " ", sorter)), el("div", {}, canvas));
    },
    update(changed) {
      if (!loading) loading = load().catch(error => { document.getElementById("view-heads").append(el("p", { class: "bad" }, error.message)); });
      if (["size", "sortBy", "start", "view", "lang"].some(x => changed.has(x))) arrange(); else if (heads.length) draw();
    },
  });
}
