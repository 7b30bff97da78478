// The atlas: a picture of every head on one canvas, made from exact sampled rows; a filter by a metric; a scatter of
// the heads by two metrics; a click opens the head, with Shift it pins the head beside the map.
{
  const { el, t } = R,
    SIDE = 64,
    GAP = 10,
    LABEL = 16;
  let canvas,
    pen,
    sorter,
    scatter,
    counted,
    order = [],
    columns = 1,
    each = 84,
    loading = null,
    looked = "",
    sheet = null,
    done = 0;
  const chosen = { x: "entropy", y: "previous_token" };
  const heads = []; // {p, h, metrics, rows, cols, mass, max}: the decoded blocks
  const byName = new Map(); // place and head -> one of them
  const value = (n, name) => heads[n].metrics[name];
  // NaN passes no limit
  const passes = n => R.state.least === "" || value(n, R.state.filterBy) >= Number(R.state.least);
  const pick = (x, pin) => {
    R.hideTip();
    if (pin) R.pin(x.p, x.h);
    else R.set({ place: x.p, head: x.h, view: "map" });
  };
  const facts = x => R.meta.metricNames.map(m => `${t(`live.metric_${m}`)} ${R.num(x.metrics[m], 3)}`).join("\n");
  const load = async () => {
    const all = R.heads();
    while (heads.length < all.length) {
      const buffer = await source.bytes(`/heads/${heads.length}`),
        view = new DataView(buffer),
        n = view.getUint32(0, true),
        m = view.getUint32(4, true);
      let at = 8;
      for (let k = 0; k < n; k++) {
        const [p, h] = all[heads.length],
          metrics = {};
        R.meta.metricNames.forEach((name, x) => {
          metrics[name] = view.getFloat32(at + 4 * x, true);
        });
        at += 4 * m;
        const blocks = source.decode(buffer, at);
        const one = { p, h, metrics, ...blocks };
        heads.push(one);
        byName.set(`${p} ${h}`, one);
        at += blocks.size;
      }
      arrange();
    }
  };
  const arrange = () => {
    if (!canvas || !canvas.isConnected) return;
    const width = canvas.parentElement.clientWidth,
      dpr = devicePixelRatio || 1,
      name = R.state.sortBy;
    if (!width) return;
    each = width < 600 ? 56 : 76;
    columns = Math.max(1, Math.floor((width + GAP) / (each + GAP)));
    order = heads.map((_, n) => n).filter(passes);
    counted.textContent = t("live.heads_shown", { n: order.length, of: R.heads().length });
    if (name !== "layers") order.sort((a, b) => (heads[b].metrics[name] || 0) - (heads[a].metrics[name] || 0));
    const rows = Math.ceil(order.length / columns);
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.max(1, Math.round(rows * (each + GAP + LABEL) * dpr));
    canvas.style.width = `${width}px`;
    canvas.style.height = `${canvas.height / dpr}px`;
    draw();
  };
  const draw = () => {
    const since = performance.now(),
      dpr = devicePixelRatio || 1,
      { ramp, at } = R.SCALES[R.state.scale === "lift" ? "log" : R.state.scale],
      look = `${R.theme()} ${R.state.scale} ${R.state.stat}`;
    if (looked !== look || !sheet || sheet.height < Math.ceil(heads.length / 32) * SIDE) {
      looked = look;
      sheet = el("canvas", { width: 32 * SIDE, height: Math.ceil(R.heads().length / 32) * SIDE });
      done = 0;
    }
    const ink = sheet.getContext("2d");
    for (; done < heads.length; done++) {
      // every picture once, on one sheet
      const { rows, cols } = heads[done],
        plane = heads[done][R.state.stat];
      ink.putImageData(
        R.paintBlocks(rows, cols, ramp, n => (plane[n] < 0 ? null : at(plane[n]))),
        (done % 32) * SIDE,
        Math.floor(done / 32) * SIDE,
      );
    }
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.imageSmoothingEnabled = false;
    pen.font = `${11 * dpr}px system-ui, sans-serif`;
    pen.textBaseline = "top";
    order.forEach((n, k) => {
      const { p, h, rows, cols } = heads[n],
        x = (k % columns) * (each + GAP) * dpr,
        y = Math.floor(k / columns) * (each + GAP + LABEL) * dpr,
        w = each * dpr;
      pen.fillStyle = R.css("--card");
      pen.fillRect(x, y, w, w);
      pen.drawImage(sheet, (n % 32) * SIDE, Math.floor(n / 32) * SIDE, cols, rows, x, y, w, w);
      const here = p === R.state.place && h === R.state.head;
      pen.strokeStyle = R.css(here ? "--s" : "--line");
      pen.lineWidth = (here ? 3 : 1) * dpr;
      pen.strokeRect(x, y, w, w);
      pen.fillStyle = R.css(here ? "--s" : "--soft");
      pen.fillText(
        `${R.meta.places[p].label}.${h}` +
          (R.state.sortBy === "layers" ? "" : ` ${R.num(value(n, R.state.sortBy), 2)}`),
        x,
        y + w + 3 * dpr,
      );
    });
    R.atlasTook = performance.now() - since;
    scatter.update();
    canvas.dataset.drawn = order.length;
    R.refreshTip();
  };
  const at = e => {
    const box = canvas.getBoundingClientRect(),
      c = Math.floor((e.clientX - box.left) / (each + GAP)),
      r = Math.floor((e.clientY - box.top) / (each + GAP + LABEL)),
      k = r * columns + c;
    return c < columns && k < order.length ? heads[order[k]] : null;
  };
  R.view({
    name: "heads",
    title: "live.heads",
    mount(node) {
      canvas = el("canvas", { id: "atlas", tabIndex: 0, role: "img", ariaLabel: t("live.heads") });
      pen = canvas.getContext("2d");
      const named = R.meta.metricNames.map(m => [m, t(`live.metric_${m}`)]);
      sorter = R.chooser("sortBy", [["layers", t("atlas.by_layers")], ...named]);
      scatter = R.scatter({
        names: R.meta.metricNames,
        title: m => t(`live.metric_${m}`),
        value: (m, p, h) => byName.get(`${p} ${h}`).metrics[m],
        heads: () => order.map(n => [heads[n].p, heads[n].h]),
        facts: (p, h) => facts(byName.get(`${p} ${h}`)),
        pick: (p, h, pin) => pick({ p, h }, pin),
        chosen,
        open: true,
      });
      canvas.addEventListener("pointermove", e => {
        const place = { clientX: e.clientX, clientY: e.clientY };
        R.showTip(
          () => {
            const x = canvas.offsetParent && at(place);
            return x ? `${R.headName(x.p, x.h)}\n${facts(x)}` : "";
          },
          e.clientX,
          e.clientY,
        );
      });
      canvas.addEventListener("pointerleave", R.hideTip);
      canvas.addEventListener("click", e => {
        const x = at(e);
        if (x) pick(x, e.shiftKey);
      });
      canvas.addEventListener("keydown", e => {
        const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[e.key],
          here = order.findIndex(n => heads[n].p === R.state.place && heads[n].h === R.state.head);
        if (by && here >= 0) {
          const next = heads[order[Math.min(Math.max(here + by, 0), order.length - 1)]];
          R.set({ place: next.p, head: next.h });
          e.preventDefault();
        } else if (e.key === "Enter") R.set({ view: "map" });
      });
      counted = el("span", { class: "soft num", id: "heads-shown", role: "status" });
      const least = el("input", {
        type: "number",
        id: "least",
        step: "any",
        ariaLabel: t("live.least"),
        placeholder: "–",
        value: R.state.least,
        oninput: e => R.set({ least: e.target.value }),
      });
      node.append(
        el(
          "p",
          { class: "soft" },
          t("live.heads_intro", { rows: SIDE }),
          R.meta.notKept ? ` ${t("live.not_kept", { n: R.meta.notKept })}` : "",
        ),
        el(
          "div",
          { class: "controls" },
          R.labelled(t("atlas.sort"), sorter),
          R.labelled(t("live.filter"), R.chooser("filterBy", named)),
          el("span", {}, "≥"),
          least,
          counted,
        ),
        scatter.node,
        el("div", {}, canvas),
      );
    },
    update(changed) {
      if (!loading)
        loading = load().catch(error => {
          document.getElementById("view-heads").append(el("p", { class: "bad" }, error.message));
        });
      if (["size", "sortBy", "start", "view", "lang", "filterBy", "least"].some(x => changed.has(x))) arrange();
      else if (heads.length) draw();
    },
  });
}
