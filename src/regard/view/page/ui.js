// Elements that the panels share: the bar that selects head, query and key; strips, bars and curves; rows of keys.

R.ui = (() => {
  const { el, t, num, exact } = R;
  const soft = (...text) => el("p", { class: "soft" }, ...text);
  const mono = (text, kind = "") => el("span", { class: `num ${kind}` }, text);
  const card = (label, value, tip) => {
    const node = el("div", { class: "fact" }, el("span", { class: "soft" }, label), el("b", { class: "num" }, value));
    return tip ? R.tipped(node, () => tip) : node;
  };
  const cards = (...all) => el("div", { class: "cards" }, ...all);
  const svg = (tag, attributes = {}, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };

  // ---- the bar: selects head, query and key; only embedded heads can be selected here
  const bar = (view, withKey = true) => {
    const heads = el("select", {
      id: `${view}-head`,
      ariaLabel: t("panel.head"),
      onchange: e => {
        const [place, head] = e.target.value.split(".").map(Number);
        R.set({ place, head });
      },
    });
    const number = (name, kind, token, words) => {
      const input = el("input", {
        type: "number",
        id: `${view}-${name}`,
        min: 0,
        step: 1,
        inputMode: "numeric",
        class: "index",
        onchange: e => R.set({ [name]: Math.max(0, Math.trunc(Number(e.target.value)) || 0) }),
      });
      const said = el("b", { class: `token ${kind}`, dir: "auto" });
      const go = (by, sign, label) =>
        R.button(
          { class: "small", ariaLabel: t(label), onclick: () => R.set({ [name]: Math.max(0, R.state[name] + by) }) },
          sign,
        );
      const node = el(
        "span",
        { class: "pick" },
        R.labelled(t(words[0]), go(-1, "‹", words[1]), input, go(1, "›", words[2])),
        said,
      );
      const update = () => {
        input.value = R.state[name];
        input.max = (name === "i" ? R.place().T : R.place().N) - 1;
        said.textContent = token();
      };
      return { node, update };
    };
    const query = number("i", "q", () => R.rowToken(R.state.place, R.state.i), [
      "panel.query",
      "panel.q_before",
      "panel.q_after",
    ]);
    const key = number("j", "k", () => R.keyToken(R.state.place, R.state.j), [
      "panel.key",
      "panel.k_before",
      "panel.k_after",
    ]);
    const node = el(
      "div",
      { class: "controls pickbar" },
      R.labelled(t("panel.head"), heads),
      query.node,
      withKey ? key.node : null,
    );
    const update = () => {
      const { place, head } = R.state,
        all = R.exactHeads();
      if (!R.math.has(place, head)) all.unshift([place, head]);
      heads.replaceChildren(
        ...all.map(([p, h]) =>
          el("option", { value: `${p}.${h}`, selected: p === place && h === head }, R.headName(p, h)),
        ),
      );
      query.update();
      key.update();
    };
    return { node, update };
  };

  // ---- a vector as a strip of cells, its scale below it, its numbers in a closed list
  const strip = (label, kind, values, name = d => t("panel.dim", { d })) => {
    const n = values.length,
      { min, max, norm } = panels.summary(values),
      top = Math.max(Math.abs(min), Math.abs(max)) || 1;
    const cells = svg("svg", {
      viewBox: `0 0 ${n} 1`,
      preserveAspectRatio: "none",
      class: "strip",
      role: "img",
      "aria-label": label,
    });
    values.forEach((v, d) =>
      cells.append(svg("rect", { x: d, y: 0, width: 1, height: 1, fill: R.shade("signed", 0.5 + v / top / 2) })),
    );
    hover(cells, n, d => `${name(d)}\n${exact(values[d])}`);
    return el(
      "figure",
      { class: "vector" },
      el(
        "figcaption",
        {},
        el("b", { class: kind }, label),
        " ",
        mono(t("panel.summary", { n, min: num(min), max: num(max), norm: num(norm) }), "soft"),
      ),
      cells,
      scaleLine("signed", `−${num(top)}`, num(top)),
      numbers(values),
    );
  };
  const scaleLine = (ramp, low, high) => {
    const line = svg("svg", {
      viewBox: "0 0 32 1",
      preserveAspectRatio: "none",
      class: "scale",
      "aria-hidden": "true",
    });
    for (let x = 0; x < 32; x++)
      line.append(svg("rect", { x, y: 0, width: 1.02, height: 1, fill: R.shade(ramp, x / 31) }));
    return el("div", { class: "scaleline num soft" }, low, line, high);
  };
  const numbers = values => {
    const box = el("details", { class: "numbers" }, el("summary", {}, t("panel.numbers")));
    box.addEventListener("toggle", () => {
      if (box.open && box.childElementCount === 1)
        box.append(el("pre", { class: "num", tabIndex: 0 }, `[${Array.from(values, v => String(v)).join(", ")}]`));
    });
    return box;
  };
  // returns the column, of n equal ones, under the pointer or selected by the arrow keys
  const hover = (node, n, text, pick) => {
    let d = 0;
    const shown = () => (node.isConnected ? text(d) : "");
    const at = e => {
      const box = node.getBoundingClientRect();
      return Math.min(n - 1, Math.max(0, Math.floor(((e.clientX - box.left) / box.width) * n)));
    };
    node.setAttribute("tabindex", "0");
    node.addEventListener("pointermove", e => {
      d = at(e);
      R.showTip(shown, e.clientX, e.clientY);
    });
    node.addEventListener("pointerleave", R.hideTip);
    node.addEventListener("blur", R.hideTip);
    if (pick) node.addEventListener("click", e => pick(at(e)));
    node.addEventListener("keydown", e => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
      if (e.key === "Enter" && pick) pick(d);
      if (by === undefined) return;
      d = Math.min(n - 1, Math.max(0, d + by));
      const box = node.getBoundingClientRect();
      R.showTip(shown, box.left + ((d + 0.5) / n) * box.width, box.top + box.height / 2);
      e.preventDefault();
    });
    return node;
  };

  // ---- signed bars around a middle line, with an optional line over them, such as a running sum
  const bars = (values, { label, kind = "s", line = null, text, low = "", high = "", lit = -1 }) => {
    const n = values.length,
      size = x => x.reduce((top, v) => (Number.isFinite(v) ? Math.max(top, Math.abs(v)) : top), 0) || 1,
      top = size(values);
    const chart = svg("svg", {
      viewBox: `0 0 ${n} 100`,
      preserveAspectRatio: "none",
      class: `bars ${kind}`,
      role: "img",
      "aria-label": label,
    });
    values.forEach((v, d) => {
      const h = (48 * Math.abs(v)) / top;
      if (h > 0)
        chart.append(
          svg("rect", {
            x: d + 0.08,
            y: v < 0 ? 50 : 50 - h,
            width: 0.84,
            height: h,
            class: `${v < 0 ? "down" : "up"}${d === lit ? " lit" : ""}`,
          }),
        );
    });
    chart.append(svg("line", { x1: 0, x2: n, y1: 50, y2: 50, class: "zero" }));
    if (line) {
      const reach = size(line);
      chart.append(
        svg("polyline", {
          points: Array.from(line, (v, d) => `${d + 0.5},${50 - (48 * v) / reach}`).join(" "),
          class: "over",
        }),
      );
    }
    return el(
      "figure",
      { class: "vector" },
      el("figcaption", {}, el("b", { class: kind }, label), " ", mono(`±${num(top)}`, "soft")),
      hover(chart, n, text),
      el("div", { class: "ends num soft" }, el("span", {}, low), el("span", {}, high)),
    );
  };
  // a monotonic curve in [0, top], with a tooltip for each column
  const curve = (
    values,
    { label, kind = "s", top = null, text, low = "", high = "", names = null, steps = false, pick },
  ) => {
    const n = values.length,
      reach = top ?? (values.reduce((a, v) => (Number.isFinite(v) ? Math.max(a, v) : a), 0) || 1);
    const chart = svg("svg", {
      viewBox: `0 0 ${Math.max(n, 1)} 100`,
      preserveAspectRatio: "none",
      class: `curve ${kind}`,
      role: "img",
      "aria-label": label,
    });
    if (steps)
      values.forEach((v, d) => {
        if (v > 0)
          chart.append(
            svg("rect", { x: d + 0.06, y: 100 - (98 * v) / reach, width: 0.88, height: (98 * v) / reach, class: "up" }),
          );
      });
    else
      chart.append(
        svg("polyline", {
          points: Array.from(values, (v, d) => `${d + 0.5},${Number.isFinite(v) ? 99 - (98 * v) / reach : 99}`).join(
            " ",
          ),
          class: "over",
        }),
      );
    chart.append(svg("line", { x1: 0, x2: Math.max(n, 1), y1: 100, y2: 100, class: "zero" }));
    return el(
      "figure",
      { class: "vector" },
      el("figcaption", {}, el("b", { class: kind }, label), " ", mono(t("panel.top", { top: num(reach) }), "soft")),
      n ? hover(chart, n, text, pick) : chart,
      names
        ? el("div", { class: "names num soft" }, ...names.map(x => el("span", {}, x)))
        : el("div", { class: "ends num soft" }, el("span", {}, low), el("span", {}, high)),
    );
  };

  // ---- a line of a list: a name, a number, a bar; a click or Enter calls a function
  const line = (name, value, share, { kind = "s", tip = null, here = false, pick = null, more = null } = {}) => {
    const mark = el("span", { class: `mark ${kind}${share < 0 ? " negative" : ""}` });
    mark.style.width = `${100 * Math.min(1, Math.abs(share) || 0)}%`;
    const node = el(
      pick ? "button" : "div",
      { class: `listrow${here ? " here" : ""}`, ...(pick ? { type: "button", onclick: pick } : {}) },
      el("span", { class: "token", dir: "auto" }, name),
      el("span", { class: "num" }, value),
      el("span", { class: "track" }, mark),
      more ? el("span", { class: "num soft" }, more) : null,
    );
    return tip ? R.tipped(node, () => tip) : node;
  };
  const others = (n, mass) => soft(t(n === 1 ? "panel.other" : "panel.others", { n, mass: num(mass) }));
  const table = (head, rows, label) =>
    el(
      "div",
      { class: "scroll", tabIndex: 0, role: "region", ariaLabel: label },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...head.map(x => el("th", { scope: "col" }, x)))),
        el("tbody", {}, ...rows),
      ),
    );
  const tr = (cells, properties = {}) =>
    el(
      "tr",
      properties,
      ...cells.map(x => el("td", { class: typeof x !== "string" ? "" : panels.wide(x) > 34 ? "num wrap" : "num" }, x)),
    );
  // a list of count() rows of `height` pixels, of which only those in sight are in the page: make(n) builds one,
  // dress(node, n) brings it up to date
  const rows = ({ height, count, make, dress, ...properties }) => {
    const inner = el("div", { class: "lines" }),
      node = el("div", { tabIndex: 0, role: "listbox", ...properties }, inner),
      nodes = new Map();
    const clear = () => {
      nodes.forEach(x => x.remove());
      nodes.clear();
    };
    const draw = () => {
      const first = Math.max(0, Math.floor(node.scrollTop / height) - 4),
        last = Math.min(count(), Math.ceil((node.scrollTop + node.clientHeight) / height) + 4);
      inner.style.height = `${count() * height}px`;
      for (const [n, x] of nodes)
        if (n < first || n >= last) {
          x.remove();
          nodes.delete(n);
        }
      for (let n = first; n < last; n++) {
        if (!nodes.has(n)) {
          const x = make(n);
          x.style.top = `${n * height}px`;
          nodes.set(n, x);
          inner.append(x);
        }
        dress(nodes.get(n), n);
      }
    };
    const show = n => {
      const y = n * height;
      if (y < node.scrollTop || y + height > node.scrollTop + node.clientHeight)
        node.scrollTop = Math.max(0, y - node.clientHeight / 2);
    };
    node.addEventListener("scroll", () => requestAnimationFrame(draw));
    return { node, draw, show, clear };
  };
  // runs long work in slices, so that the page stays responsive; starting other work of the same name cancels it
  const running = {};
  const run = (name, count, work, done) => {
    const mine = (running[name] = {});
    let n = 0;
    const slice = () => {
      if (running[name] !== mine) return;
      for (const until = performance.now() + 24; n < count && performance.now() < until; n++) work(n);
      done(n, n >= count);
      if (n < count) setTimeout(slice);
    };
    slice();
  };
  return { soft, mono, card, cards, svg, bar, strip, hover, bars, curve, line, others, table, tr, rows, run };
})();

// ---- controls of the maps: every head, of which those that are embedded exactly are marked; the value of a block, the
// scale, the sinks
R.headSelect = (id, get, set, properties = {}) => {
  const { el, t } = R;
  const select = el("select", { id, ...properties, onchange: e => set(...e.target.value.split(" ").map(Number)) });
  const option = (p, h) => el("option", { value: `${p} ${h}` }, `${R.headName(p, h)}${R.math.has?.(p, h) ? " ●" : ""}`);
  const group = (place, p) => {
    const source = R.meta.sources.length > 1 ? `${"①②"[place.source]} · ` : "";
    return el("optgroup", { label: `${source}${place.name}` }, ...place.heads.map(h => option(p, h)));
  };
  const fill = () => {
    const now = `${R.state.lang} ${R.meta.places.length}`;
    if (select.dataset.filled !== now) select.replaceChildren(...R.meta.places.map(group));
    select.dataset.filled = now;
    select.value = get().join(" ");
  };
  const step = by => {
    const all = R.heads(),
      at = all.findIndex(([p, h]) => p === get()[0] && h === get()[1]);
    set(...all[(at + by + all.length) % all.length]);
  };
  const arrow = (by, sign, key) => R.button({ class: "small", ariaLabel: t(key), onclick: () => step(by) }, sign);
  const node = el(
    "span",
    { class: "controls" },
    arrow(-1, "‹", "map.head_before"),
    select,
    arrow(1, "›", "map.head_after"),
  );
  return { node, select, fill };
};
R.lookSelects = (ids, scales = ["log", "linear", "lift"]) => {
  const stats = ["mass", "max"].map(x => [x, R.t(`stat.${x}`)]),
    names = scales.map(x => [x, R.t(`scale.${x}`)]);
  return [R.chooser("stat", stats, { id: ids("stat") }), R.chooser("scale", names, { id: ids("scale") })];
};
R.lookControls = (prefix, scales) => {
  const { el, t } = R,
    selects = R.lookSelects(name => `${prefix}-${name}`, scales);
  const box = el("input", {
    type: "checkbox",
    id: `${prefix}-sinks`,
    onchange: e => R.set({ sinks: !e.target.checked }),
  });
  const node = [
    R.labelled(t("map.stat"), selects[0]),
    R.labelled(t("map.scale"), selects[1]),
    el("label", {}, box, t("map.hide_sinks", { n: fields.FIRST })),
  ];
  const fill = () => {
    selects[0].value = R.state.stat;
    selects[1].value = R.state.scale;
    box.checked = !R.state.sinks;
  };
  return { node, fill };
};
// Keyboard of the panels: q and Q for the next and previous query, k and K for the key; ignored in input fields
addEventListener("keydown", e => {
  if (!["cell", "row", "text", "diagnostics"].includes(R.state.view) || e.altKey || e.ctrlKey || e.metaKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) return;
  const by = { q: ["i", 1], Q: ["i", -1], k: ["j", 1], K: ["j", -1] }[e.key];
  if (by) R.set({ [by[0]]: Math.max(0, R.state[by[0]] + by[1]) });
});
