"use strict";
// Draws the page of one explanation from the JSON that it carries. Text reaches the page as text only: no markup is parsed.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { explanation: x, weights: WEIGHTS, signed: SIGNED } = data;
  const n = x.sizes, dark = matchMedia("(prefers-color-scheme: dark)");
  const visible = j => !x.masked[j];
  const last = steps => steps[steps.length - 1].values;
  const order = x.pieces.map((_, j) => j).filter(visible).sort((a, b) => x.weights[b] - x.weights[a]);
  let focus = order.length ? order[0] : x.query;

  // ---- small parts -------------------------------------------------------------------------------------------------
  const el = (tag, properties = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "class") node.className = value;
      else if (name in node && name !== "list") node[name] = value;
      else node.setAttribute(name, value);
    }
    node.append(...children.filter(child => child !== null && child !== undefined));
    return node;
  };
  const num = (v, digits = 4) => {
    if (v === null || v === undefined) return "-∞";
    const size = Math.abs(v);
    if (size && (size < 1e-3 || size >= 1e6)) return v.toExponential(digits - 2).replace("-", "−").replace("e−", "e-");
    return Number(v.toPrecision(digits)).toString().replace("-", "−");
  };
  const exact = v => v === null || v === undefined ? "-∞" : String(v);
  const norm = values => Math.hypot(...values);
  const size = values => values.reduce((top, v) => Math.max(top, Math.abs(v)), 0);
  const name = j => `${j} ${x.pieces[j]}`;
  const roles = { q: "q", k: "k", v: "v", s: "s", p: "s", z: "z" };
  const formula = text => {
    const line = el("span", { class: "formula" });
    for (const part of text.split(/([A-Za-z]+_[A-Za-zφ]+|(?<![A-Za-z])[qkvspz](?![A-Za-z]))/)) {
      const [letter, sub] = part.split("_");
      const role = roles[letter];
      if (sub === undefined && !role) line.append(part);
      else line.append(el("span", { class: role || "" }, letter, sub ? el("sub", {}, sub) : null));
    }
    return line;
  };

  const tip = document.getElementById("tip");
  const showTip = (text, left, top) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(left + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${top + 18 + box.height > innerHeight ? top - box.height - 12 : top + 18}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  const tipped = (node, text) => {
    node.addEventListener("pointermove", e => showTip(text(), e.clientX, e.clientY));
    node.addEventListener("pointerleave", hideTip);
    node.addEventListener("focus", () => { const b = node.getBoundingClientRect(); showTip(text(), b.left, b.bottom - 12); });
    node.addEventListener("blur", hideTip);
    return node;
  };

  // What is painted on a change of size or colours, and what follows the key in focus.
  const painters = [], followers = [];
  let waiting = false;
  const repaint = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; painters.forEach(paint => paint()); });
  };
  const follow = draw => { followers.push(draw); draw(); };
  const setFocus = j => { focus = j; followers.forEach(draw => draw()); };

  // ---- colours -----------------------------------------------------------------------------------------------------
  const ramp = (stops, t) => {
    const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
    const i = Math.min(Math.floor(at), stops.length - 2);
    return `rgb(${stops[i].map((low, c) => Math.round(low + (stops[i + 1][c] - low) * (at - i))).join()})`;
  };
  const theme = () => dark.matches ? "dark" : "light";
  const byWeight = v => ramp(WEIGHTS[theme()], Math.sqrt(v)); // the square root shows small weights too; the scale says so
  const bySign = top => v => ramp(SIGNED[theme()], top ? (v / top + 1) / 2 : 0.5);
  const css = variable => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

  // ---- a grid of numbers on a canvas -------------------------------------------------------------------------------
  // options: rows, cols, value(r, c), color(v), label(r, c), cell (height), square, pick(r, c), mark() -> {row, col}, alt,
  // down and across: names of the rows and columns, written in a margin where there is room.
  const grid = options => {
    const { rows, cols, value, color, label } = options;
    const canvas = el("canvas", { tabIndex: 0, role: "img", ariaLabel: options.alt });
    const pen = canvas.getContext("2d");
    let width = 0, height = 0, cursor = null, margin = { left: 0, top: 0 };
    const edge = (i, count, length) => Math.round(i * length / count);
    const write = (text, x0, y0, room, ink) => {
      pen.fillStyle = css(ink);
      let shown = text;
      while (shown.length > 1 && pen.measureText(shown).width > room) shown = shown.slice(0, -2) + "…";
      pen.fillText(shown, x0, y0);
    };
    const names = (dpr, W, H, mark) => {
      pen.font = `${11 * dpr}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      if (margin.left) options.down.forEach((text, r) => write(text, -6 * dpr, (edge(r, rows, H) + edge(r + 1, rows, H)) / 2, (margin.left - 8) * dpr, mark.row === r ? "--q" : "--soft"));
      if (!margin.top) return;
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "left";
      options.across.forEach((text, c) => write(text, 6 * dpr, (edge(c, cols, W) + edge(c + 1, cols, W)) / 2, (margin.top - 8) * dpr, mark.col === c ? "--k" : "--soft"));
      pen.rotate(Math.PI / 2);
    };
    const paint = () => {
      const room = canvas.parentElement ? canvas.parentElement.clientWidth : 0;
      if (!room) return;
      const most = options.square ? Math.min(room, options.square) : room;
      const named = !options.square || most / cols >= 15;
      margin = { left: options.down && named ? Math.min(84, room / 5) : 0, top: options.across && named ? 64 : 0 };
      width = options.square ? Math.min(most - margin.left, Math.max(cols * 26, 96)) : room - margin.left;
      height = options.square ? Math.round(width * rows / cols) : rows * (options.cell || 26);
      const dpr = devicePixelRatio || 1, W = Math.round(width * dpr), H = Math.round(height * dpr);
      canvas.width = W + margin.left * dpr; canvas.height = H + margin.top * dpr;
      canvas.style.width = `${width + margin.left}px`; canvas.style.height = `${height + margin.top}px`;
      const mark = options.mark ? options.mark() : {};
      pen.setTransform(1, 0, 0, 1, margin.left * dpr, margin.top * dpr);
      names(dpr, W, H, mark);
      const gap = W / cols > 7 * dpr && H / rows > 7 * dpr ? Math.round(dpr) : 0;
      for (let r = 0; r < rows; r++) {
        for (let c = 0; c < cols; c++) {
          const left = edge(c, cols, W), top = edge(r, rows, H), v = value(r, c);
          const w = edge(c + 1, cols, W) - left - gap, h = edge(r + 1, rows, H) - top - gap;
          pen.fillStyle = v === null ? hatch(pen) : color(v);
          pen.fillRect(left, top, w, h);
        }
      }
      const box = (r, c, down, across, line, ink) => {
        const left = edge(c, cols, W), top = edge(r, rows, H);
        pen.strokeStyle = css(ink); pen.lineWidth = line * dpr;
        pen.strokeRect(left + dpr / 2, top + dpr / 2, edge(c + across, cols, W) - left - dpr - gap, edge(r + down, rows, H) - top - dpr - gap);
      };
      if (mark.row !== undefined) box(mark.row, 0, 1, cols, 2, "--q");
      if (mark.col !== undefined) box(0, mark.col, rows, 1, 2, "--k");
      if (cursor) box(cursor[0], cursor[1], 1, 1, 2, "--ink");
    };
    const at = e => {
      const b = canvas.getBoundingClientRect();
      const r = Math.floor((e.clientY - b.top - margin.top) / height * rows), c = Math.floor((e.clientX - b.left - margin.left) / width * cols);
      return r >= 0 && r < rows && c >= 0 && c < cols ? [r, c] : null;
    };
    const see = (cell, left, top) => { cursor = cell; paint(); if (cell) showTip(label(...cell), left, top); else hideTip(); };
    canvas.addEventListener("pointermove", e => see(at(e), e.clientX, e.clientY));
    canvas.addEventListener("pointerdown", e => see(at(e), e.clientX, e.clientY));
    canvas.addEventListener("pointerleave", () => see(null));
    canvas.addEventListener("blur", () => see(null));
    canvas.addEventListener("click", e => { const cell = at(e); if (cell && options.pick) options.pick(...cell); });
    canvas.addEventListener("keydown", e => {
      const [r, c] = cursor || (options.start ? options.start() : [0, 0]);
      const to = { ArrowUp: [r - 1, c], ArrowDown: [r + 1, c], ArrowLeft: [r, c - 1], ArrowRight: [r, c + 1], Home: [r, 0], End: [r, cols - 1] }[e.key];
      if ((e.key === "Enter" || e.key === " ") && cursor && options.pick) { options.pick(r, c); e.preventDefault(); }
      if (e.key === "Escape") see(null);
      if (!to) return;
      e.preventDefault();
      const cell = cursor ? [Math.min(Math.max(to[0], 0), rows - 1), Math.min(Math.max(to[1], 0), cols - 1)] : [r, c];
      const b = canvas.getBoundingClientRect();
      see(cell, b.left + margin.left + (cell[1] + 0.5) * width / cols, b.top + margin.top + (cell[0] + 0.5) * height / rows);
    });
    painters.push(paint);
    return { canvas, paint };
  };
  const hatch = pen => {
    const tile = document.createElement("canvas");
    if (pen.hatched && pen.hatchedFor === theme()) return pen.hatched;
    tile.width = tile.height = 8;
    const ink = tile.getContext("2d");
    ink.strokeStyle = css("--line"); ink.lineWidth = 1.5;
    for (const shift of [-8, 0, 8]) { ink.beginPath(); ink.moveTo(shift, 8); ink.lineTo(shift + 8, 0); ink.stroke(); }
    pen.hatchedFor = theme();
    pen.hatched = pen.createPattern(tile, "repeat");
    return pen.hatched;
  };

  const scale = (color, low, high, note) => {
    const bar = grid({ rows: 1, cols: 48, cell: 8, alt: `colour scale from ${low} to ${high}`, label: () => `${low} to ${high}`,
      value: (_, c) => c / 47, color: t => color(t) });
    bar.canvas.tabIndex = -1;
    const room = el("span", { class: "ramp" }, bar.canvas);
    return el("div", { class: "scale" }, low, room, high, note ? ` ${note}` : null);
  };
  const signedScale = top => scale(t => bySign(1)(2 * t - 1), `−${num(top)}`, `+${num(top)}`);

  // A vector as a strip: `values()` may change with the focus.
  const strip = (title, role, values, { dim = "dim", top = null } = {}) => {
    const caption = el("span", { class: role }), range = el("span", { class: "range num" }), holder = el("div");
    const length = values().length;
    const full = () => top === null ? size(values()) : top;
    const bar = grid({ rows: 1, cols: length, cell: 28, alt: "", value: (_, c) => values()[c], color: v => bySign(full())(v),
      label: (_, c) => `${caption.textContent}\n${dim} ${c}: ${exact(values()[c])}` });
    const legend = el("div");
    follow(() => {
      const v = values();
      caption.textContent = typeof title === "function" ? title() : title;
      range.textContent = `min ${num(Math.min(...v))}  max ${num(Math.max(...v))}  norm ${num(norm(v))}`;
      bar.canvas.ariaLabel = `${caption.textContent}: ${length} numbers, ${range.textContent}`;
      legend.replaceChildren(signedScale(full()));
      repaint();
    });
    holder.append(bar.canvas);
    const numbers = el("pre", { class: "num" });
    const more = el("details", {}, el("summary", {}, `the ${length} numbers`), numbers);
    const fill = () => { if (more.open) numbers.textContent = values().map(exact).join("  "); };
    more.addEventListener("toggle", fill);
    followers.push(fill);
    return el("figure", {}, el("figcaption", {}, caption, range), holder, el("div", { class: "below" }, legend, more));
  };

  // ---- sections ----------------------------------------------------------------------------------------------------
  const page = document.getElementById("page");
  let count = 0;
  const section = (title, equations, ...children) => {
    count += 1;
    page.append(el("section", { id: `step-${count}` }, el("h2", {}, el("span", { class: "n" }, String(count)), title),
      equations.length ? el("div", { class: "formulas" }, ...equations.map(key => formula(x.equations[key]))) : "", ...children.filter(Boolean)));
  };
  const soft = (...text) => el("p", { class: "soft" }, ...text);
  const dynamic = draw => { const node = el("p"); follow(() => { node.replaceChildren(...[draw()].flat()); }); return node; };
  const mono = text => el("span", { class: "num" }, text);

  const fact = (label, value) => el("li", {}, `${label} `, el("b", {}, String(value)));
  page.replaceChildren(...[
    el("h1", {}, "One query, step by step"),
    soft("Every number on this page was computed by the model for this text. Rows are queries, columns are keys."),
    el("ul", { class: "facts" }, fact("model", x.model), fact("layer", `${x.layer} of 0…${n.layers - 1}`), fact("head", `${x.head} of 0…${n.H - 1}`),
      fact("key/value head", `${x.group} of 0…${n.G - 1}`), fact("query", name(x.query)), fact("D", n.D), fact("M", n.M)),
    x.chosen_by ? soft(`Layer and head were chosen by a rule: ${x.chosen_by}.`) : null,
    ...x.notes.map(note => soft(`Note: ${note}.`)),
  ].filter(Boolean));
  const tokens = el("div", { class: "tokens", role: "group", ariaLabel: "tokens of the text; choose one as the key" });
  x.pieces.forEach((piece, j) => {
    const chip = el("button", { type: "button", dir: "ltr", class: (j === x.query ? "query " : "") + (visible(j) ? "" : "masked") }, piece);
    tipped(chip, () => `token ${j} ${piece}\nid ${x.ids[j]}, position ${x.positions[j]}\n` +
      (j === x.query ? "the query\n" : "") + (visible(j) ? `weight ${exact(x.weights[j])}` : `masked: ${x.masked[j]}`));
    chip.addEventListener("click", () => setFocus(j));
    painters.push(() => { if (visible(j)) chip.style.borderBottomColor = byWeight(x.weights[j]); });
    followers.push(() => { chip.setAttribute("aria-pressed", String(j === focus)); });
    tokens.append(chip);
  });
  page.append(el("div", { class: "sticky" }, tokens, dynamic(() => [
    "query ", el("b", { class: "q" }, name(x.query)), "  looks at key ", el("b", { class: "k" }, name(focus)),
    visible(focus) ? " with weight " : ` with weight 0 (masked: ${x.masked[focus]}) `, visible(focus) ? mono(num(x.weights[focus])) : null,
  ].filter(part => part !== null))));

  section("Tokens", ["tokens"],
    el("p", {}, `${n.T} tokens. The stripe below each token is its weight for the query; choose a token to follow it as the key.`),
    scale(t => byWeight(t), "0", "1", "weight, coloured by its square root"));

  section("Hidden state of the query", ["hidden"],
    strip("embedding of the token", "", () => x.embedding), strip(`h: entering layer ${x.layer}`, "", () => x.entering),
    strip("x: after the layer's norm", "", () => x.normed));

  const angles = x.angles[x.query];
  section("Query, key and value", ["project", ...(angles.length ? ["rotate"] : [])],
    ...x.q.map(step => strip(`q of ${name(x.query)}, ${step.name}`, "q", () => step.values)),
    ...x.k.map(step => strip(() => `k of ${name(focus)}, ${step.name}`, "k", () => step.values[focus])),
    strip(() => `v of ${name(focus)}`, "v", () => x.v[focus]),
    angles.length ? el("details", {}, el("summary", {}, `the angle of each of ${angles.length} pairs (layout: ${x.layout})`),
      dynamic(() => [mono(angles.map((a, i) => `pair ${i}: query ${num(a)} rad, key ${num(x.angles[focus][i])} rad`).join("\n"))].map(node => el("pre", {}, node)))) : null);

  const products = () => last(x.q).map((q, d) => q * last(x.k)[focus][d]);
  const chain = x.scores.slice(0, -1), rowOf = [];
  const body = el("tbody");
  const topWeight = Math.max(...x.weights) || 1;
  x.pieces.forEach((piece, j) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${100 * x.weights[j] / topWeight}%`;
    const row = el("tr", { class: visible(j) ? "" : "masked" }, el("td", { class: "num" }, String(j)), el("td", { class: "token", dir: "ltr" }, piece),
      ...chain.map(step => tipped(el("td", { class: "num s" }, num(step.values[j])), () => `${step.name}: ${exact(step.values[j])}`)),
      el("td", { class: "num" }, visible(j) ? num(last(x.scores)[j]) : `-∞ ${x.masked[j]}`),
      el("td", { class: "num" }, num(x.exps[j])), tipped(el("td", { class: "num" }, num(x.weights[j])), () => `weight: ${exact(x.weights[j])}`),
      el("td", { class: "wide" }, x.weights[j] > 5e-4 * topWeight ? bar : null));
    row.addEventListener("click", () => setFocus(j));
    rowOf.push(row);
    body.append(row);
  });
  const scores = el("div", { class: "scroll", tabIndex: 0, role: "region", ariaLabel: "scores of every key" });
  followers.push(() => {
    rowOf.forEach((row, j) => row.classList.toggle("focus", j === focus));
    const row = rowOf[focus], above = row.offsetTop - 40, below = row.offsetTop + row.offsetHeight - scores.clientHeight;
    scores.scrollTop = Math.max(Math.min(scores.scrollTop, above), below);
  });
  const heads = ["key", "token", ...chain.map(step => step.name), "masked", "exp(s − m)", "weight p", ""];
  section("Scores", ["dot", ...x.scores.slice(1).map(step => step.name)],
    strip(() => `products q·k for key ${name(focus)}, by dim`, "s", products),
    dynamic(() => {
      const all = products(), sorted = all.map((_, d) => d).sort((a, b) => Math.abs(all[b]) - Math.abs(all[a])).slice(0, 3);
      const sum = all.reduce((a, b) => a + b, 0), rest = sum - sorted.reduce((a, d) => a + all[d], 0);
      return [mono(`${sorted.map(d => `${num(all[d])} (dim ${d})`).join(" + ")} + ${num(rest)} (${all.length - sorted.length} others) = ${num(sum)}`),
        mono(`;  × scale ${num(x.scale)} = ${num(x.scale * sum)}`)];
    }),
    scores);
  scores.append(el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head, i) => el("th", { class: i === 1 ? "left" : "", scope: "col" }, head)))), body));

  const card = (label, value) => el("div", {}, el("span", {}, label), el("b", { class: "num" }, exact(value)));
  section("Softmax", ["softmax"],
    el("div", { class: "cards" }, card("m, the largest score", x.row_max), card("Σ exp(s − m)", x.total), card("lse = m + ln Σ", x.lse),
      x.sink === null ? null : card("sink, one more term below", x.sink), card("Σ p", Number(x.weights.reduce((a, b) => a + b, 0).toPrecision(9)))),
    dynamic(() => {
      const s = last(x.scores)[focus];
      if (s === null) return [`Key ${name(focus)} is masked (${x.masked[focus]}): exp(-∞) = 0.`];
      if (x.sink !== null) return [mono(`key ${focus}: p = ${num(x.weights[focus])}`)];
      return [mono(`key ${focus}: exp(${num(s)} − ${num(x.row_max)}) / ${num(x.total)} = exp(${num(s)} − ${num(x.lse)}) = ${num(x.weights[focus])}`)];
    }));

  const sizes = x.contributions.map(norm);
  const bySize = order.slice().sort((a, b) => sizes[b] - sizes[a]);
  const giving = bySize.filter((j, i) => i < 3 || (i < 12 && sizes[j] > 0.01 * sizes[bySize[0]]));
  const largest = Math.max(...giving.map(j => size(x.contributions[j])), 0);
  const others = order.length - giving.length;
  const mix = el("div");
  mix.append(grid({ rows: Math.max(giving.length, 1), cols: n.E, cell: 22, alt: "weighted values: a row per key, a column per dim", down: giving.map(name),
    value: (r, c) => giving.length ? x.contributions[giving[r]][c] : null, color: v => bySign(largest)(v), pick: r => setFocus(giving[r]),
    label: (r, c) => `key ${name(giving[r])}, dim ${c}\np ${exact(x.weights[giving[r]])}\np·v ${exact(x.contributions[giving[r]][c])}` }).canvas);
  section("Weighted values", ["mix"],
    el("h3", { class: "v" }, "p v: a row per key, the largest vectors first"), mix, signedScale(largest),
    soft(`Norms from the top: ${giving.map(j => num(sizes[j])).join(", ")}.` + (others > 0 ? ` ${others} others share a weight of ${num(bySize.slice(giving.length).reduce((sum, j) => sum + x.weights[j], 0))}.` : "")),
    strip("z: their sum", "z", () => x.z));

  const joined = el("div"), joinedTop = size(x.joined);
  joined.append(grid({ rows: n.H, cols: n.E, cell: 18, alt: "z of every head: a row per head, a column per dim", mark: () => ({ row: x.head }), down: x.shares.map((_, h) => `head ${h}`),
    value: (r, c) => x.joined[r * n.E + c], color: v => bySign(joinedTop)(v), label: (r, c) => `head ${r}, dim ${c}: ${exact(x.joined[r * n.E + c])}` }).canvas);
  const topShare = size(x.shares) || 1;
  const shares = x.shares.map((share, h) => {
    const bar = el("span", { class: `bar z${share < 0 ? " negative" : ""}` });
    bar.style.width = `${100 * Math.abs(share) / topShare}%`;
    return tipped(el("div", { class: `row${h === x.head ? " here" : ""}` }, el("span", {}, `head ${h}`),
      el("span", { class: "num" }, `${(100 * share).toFixed(1)} %`), el("span", {}, bar)), () => `head ${h}: ${exact(share)} of out`);
  });
  section("Heads joined, output projection", ["output"],
    el("h3", { class: "z" }, `z of all heads: ${n.H} × ${n.E} = ${n.H * n.E} numbers, a row per head`), joined, signedScale(joinedTop),
    el("h3", {}, "What each head writes into out: (out of the head · out) / (out · out)"), ...shares,
    strip(`head ${x.head} writes`, "z", () => x.head_out), strip("out: all heads write", "z", () => x.out),
    strip("h + out: the hidden state", "", () => x.residual));

  const large = el("div");
  large.append(grid({ rows: n.T, cols: n.T, square: 760, down: x.pieces.map((_, j) => name(j)), across: x.pieces.map((_, j) => name(j)), alt: `pattern of head ${x.head}: ${n.T} queries by ${n.T} keys; arrow keys move`,
    value: (r, c) => x.pattern[r][c], color: byWeight, mark: () => ({ row: x.query, col: focus }), pick: (_, c) => setFocus(c),
    start: () => [x.query, focus], label: (r, c) => `query ${name(r)}\nkey ${name(c)}\n` + (x.pattern[r][c] === null ? "masked" : `weight ${exact(x.pattern[r][c])}`) }).canvas);
  const small = el("div", { class: "heads" }, ...x.patterns.map((cells, h) => {
    const holder = el("div");
    holder.append(grid({ rows: cells.length, cols: cells.length, square: 150, alt: `pattern of head ${h}, small`, value: (r, c) => cells[r][c], color: byWeight,
      label: (r, c) => `head ${h}\nqueries from ${r * x.pool}, keys from ${c * x.pool}\n` + (cells[r][c] === null ? "masked" : `largest weight ${exact(cells[r][c])}`) }).canvas);
    return el("figure", { class: h === x.head ? "here" : "" }, el("figcaption", {}, `head ${h}`), holder);
  }));
  section("The whole pattern", ["pattern"], large, scale(t => byWeight(t), "0", "1", "weight, coloured by its square root; hatched: masked"),
    soft("Framed: the row of the query, and the column of the key. Hover, or focus and use the arrow keys, for exact weights."),
    el("h3", {}, `Every head of layer ${x.layer}` + (x.pool > 1 ? `; each cell is the largest weight of ${x.pool} × ${x.pool}` : "")), small);

  section("Next token", ["predict"], ...x.predictions.map(guess => {
    const bar = el("span", { class: "bar z" });
    bar.style.width = `${100 * guess.probability}%`;
    return tipped(el("div", { class: "row" }, el("span", { class: "name num", dir: "ltr" }, guess.piece), el("span", { class: "num" }, `${(100 * guess.probability).toFixed(2)} %`),
      el("span", {}, bar)), () => `${guess.piece}\nid ${guess.id}, probability ${exact(guess.probability)}`);
  }));

  section("Check", [], el("p", {}, "Recomputed from captured tensors, and compared with what the model computed. The largest difference: ",
    el("span", { class: "num good" }, num(x.check, 3))),
    el("div", { class: "cards" }, ...Object.entries(x.checks).map(([label, value]) => card(label, num(value, 3)))));

  followers.push(repaint);
  new ResizeObserver(repaint).observe(page);
  dark.addEventListener("change", repaint);
  addEventListener("keydown", e => { if (e.key === "Escape") hideTip(); });
  setFocus(focus);
})();
