// The sections of the page, in the order of the computation.

const page = document.getElementById("page");
const soft = text => el("p", { class: "soft" }, text);
const mono = text => el("span", { class: "num" }, text);
const fact = (label, value) => el("li", {}, `${label} `, el("b", {}, String(value)));
const card = (label, value) => el("div", {}, el("span", {}, label), el("b", { class: "num" }, value));
const inBox = canvas => el("div", {}, canvas);

// A paragraph whose parts change with the focus.
const dynamic = (draw, tag = "p") => {
  const node = el(tag);
  follow(() => node.replaceChildren(...draw()));
  return node;
};

let count = 0;
const section = (title, equations, ...children) => {
  count += 1;
  const lines = equations.map(key => formula(x.equations[key]));
  page.append(el("section", { id: `step-${count}` }, el("h2", {}, el("span", { class: "n" }, String(count)), title),
    lines.length ? el("div", { class: "formulas" }, ...lines) : null, ...children));
};

const row = (here, label, share, text, bar, tipText) => {
  bar.style.width = `${100 * share}%`;
  return tipped(el("div", { class: `row${here ? " here" : ""}` }, el("span", { class: "name num", dir: "ltr" }, label),
    el("span", { class: "num" }, text), el("span", {}, bar)), () => tipText);
};

// ---- the head of the page, and the tokens that stay in sight
page.replaceChildren(
  el("h1", {}, "One query, step by step"),
  soft("Every number on this page was computed by the model for this text. Rows are queries, columns are keys."),
  el("ul", { class: "facts" }, fact("model", x.model), fact("layer", `${x.layer} of 0…${n.layers - 1}`),
    fact("head", `${x.head} of 0…${n.H - 1}`), fact("key/value head", `${x.group} of 0…${n.G - 1}`),
    fact("query", nameOf(x.query)), fact("D", n.D), fact("M", n.M)),
  ...(x.chosen_by ? [soft(`How layer and head were chosen: ${x.chosen_by}.`)] : []),
  ...x.notes.map(note => soft(`Note: ${note}.`)));

const chips = x.pieces.map((piece, j) => {
  const kind = (j === x.query ? "query " : "") + (visible(j) ? "" : "masked");
  const chip = el("button", { type: "button", dir: "ltr", class: kind }, piece);
  chip.addEventListener("click", () => setFocus(j));
  painters.push(() => { if (visible(j)) chip.style.borderBottomColor = byWeight(x.weights[j]); });
  return tipped(chip, () => `token ${nameOf(j)}\nid ${x.ids[j]}, position ${x.positions[j]}\n${j === x.query ? "the query\n" : ""}` +
    (visible(j) ? `weight ${exact(x.weights[j])}` : `masked: ${x.masked[j]}`));
});
const tokens = el("div", { class: "tokens", role: "group", ariaLabel: "tokens of the text; choose one as the key" }, ...chips);
const reveal = (box, node, above) => { // scroll a box, not the page, until one of its nodes is in sight
  const highest = node.offsetTop - above, lowest = node.offsetTop + node.offsetHeight - box.clientHeight;
  box.scrollTop = Math.max(Math.min(box.scrollTop, highest), lowest);
};
followers.push(() => {
  chips.forEach((chip, j) => chip.setAttribute("aria-pressed", String(j === focus)));
  reveal(tokens, chips[focus], 4);
});
page.append(el("div", { class: "sticky" }, tokens, dynamic(() => [
  "query ", el("b", { class: "q" }, nameOf(x.query)), " looks at key ", el("b", { class: "k" }, nameOf(focus)), " with weight ",
  mono(num(x.weights[focus])), visible(focus) ? "" : ` (masked: ${x.masked[focus]})`,
])));

// ---- the steps
section("Tokens", ["tokens"],
  el("p", {}, `${n.T} tokens. The stripe below each token is its weight for the query; choose a token to follow it as the key.`),
  weightScale("weight, coloured by its square root"));

section("Hidden state of the query", ["hidden"], strip("embedding of the token", "", () => x.embedding),
  strip(`h: entering layer ${x.layer}`, "", () => x.entering), strip("x: after the layer's norm", "", () => x.normed));

const angles = x.angles[x.query];
const angleLine = (a, i) => `pair ${i}: query ${num(a)} rad, key ${num(x.angles[focus][i])} rad`;
section("Query, key and value", angles.length ? ["project", "rotate"] : ["project"],
  ...x.q.map(step => strip(`q of ${nameOf(x.query)}, ${step.name}`, "q", () => step.values)),
  ...x.k.map(step => strip(() => `k of ${nameOf(focus)}, ${step.name}`, "k", () => step.values[focus])),
  strip(() => `v of ${nameOf(focus)}`, "v", () => x.v[focus]),
  angles.length ? el("details", {}, el("summary", {}, `the angle of each of ${angles.length} pairs (layout: ${x.layout})`),
    dynamic(() => [angles.map(angleLine).join("\n")], "pre")) : null);

// ---- scores: a row per key
const products = () => last(x.q).map((q, d) => q * last(x.k)[focus][d]);
const productLine = () => {
  const all = products(), largest = all.map((_, d) => d).sort((a, b) => Math.abs(all[b]) - Math.abs(all[a])).slice(0, 3);
  const rest = sum(all) - sum(largest.map(d => all[d]));
  const terms = largest.map(d => `${num(all[d])} (dim ${d})`).join(" + ");
  return `${terms} + ${num(rest)} (${all.length - largest.length} others) = ${num(sum(all))};  × scale ${num(x.scale)} = ${num(x.scale * sum(all))}`;
};
const chain = x.scores.slice(0, -1), topWeight = Math.max(...x.weights) || 1;
const scoreRow = (piece, j) => {
  const bar = el("span", { class: "bar" }), weight = x.weights[j];
  bar.style.width = `${100 * weight / topWeight}%`;
  const line = el("tr", { class: visible(j) ? "" : "masked" },
    el("td", { class: "num" }, String(j)), el("td", { class: "token", dir: "ltr" }, piece),
    ...chain.map(step => tipped(el("td", { class: "num s" }, num(step.values[j])), () => `${step.name}: ${exact(step.values[j])}`)),
    el("td", { class: "num" }, visible(j) ? num(last(x.scores)[j]) : `-∞ ${x.masked[j]}`), el("td", { class: "num" }, num(x.exps[j])),
    tipped(el("td", { class: "num" }, num(weight)), () => `weight: ${exact(weight)}`),
    el("td", { class: "wide" }, weight > 5e-4 * topWeight ? bar : null));
  line.addEventListener("click", () => setFocus(j));
  return line;
};
const scoreRows = x.pieces.map(scoreRow);
const titles = ["key", "token", ...chain.map(step => step.name), "masked", "exp(s − m)", "weight p", ""];
const scores = el("div", { class: "scroll", tabIndex: 0, role: "region", ariaLabel: "scores of every key" }, el("table", {},
  el("thead", {}, el("tr", {}, ...titles.map((title, i) => el("th", { class: i === 1 ? "left" : "", scope: "col" }, title)))),
  el("tbody", {}, ...scoreRows)));
followers.push(() => {
  scoreRows.forEach((line, j) => line.classList.toggle("focus", j === focus));
  reveal(scores, scoreRows[focus], 40);
});
section("Scores", ["dot", ...x.scores.slice(1).map(step => step.name)],
  strip(() => `products q·k for key ${nameOf(focus)}, by dim`, "s", products), dynamic(() => [mono(productLine())]), scores);

const oneWeight = () => {
  const s = last(x.scores)[focus], p = num(x.weights[focus]);
  if (s === null) return [`Key ${nameOf(focus)} is masked (${x.masked[focus]}): exp(-∞) = 0.`];
  if (x.sink !== null) return [mono(`key ${focus}: exp(${num(s)} − ${num(x.row_max)}) / (${num(x.total)} + exp(sink − m)) = ${p}`)];
  return [mono(`key ${focus}: exp(${num(s)} − ${num(x.row_max)}) / ${num(x.total)} = exp(${num(s)} − ${num(x.lse)}) = ${p}`)];
};
section("Softmax", ["softmax"], el("div", { class: "cards" },
  card("m, the largest score", exact(x.row_max)), card("Σ exp(s − m)", exact(x.total)), card("lse = m + ln Σ", exact(x.lse)),
  x.sink === null ? null : card("sink: one more term below", exact(x.sink)), card("Σ p", String(Number(sum(x.weights).toPrecision(9))))),
  dynamic(oneWeight));

// ---- values and heads
const sizes = x.contributions.map(norm), bySize = order.slice().sort((a, b) => sizes[b] - sizes[a]);
const giving = bySize.filter((j, i) => i < 3 || (i < 12 && sizes[j] > 0.01 * sizes[bySize[0]])), others = bySize.slice(giving.length);
const largest = Math.max(...giving.map(j => size(x.contributions[j])), 0), mixScale = signedScale();
mixScale.size(largest);
const mix = grid({ rows: Math.max(giving.length, 1), cols: n.E, cell: 22, fixed: true, down: giving.map(nameOf), pick: r => setFocus(giving[r]),
  alt: "weighted values: a row per key, a column per dim", color: bySign(largest),
  value: (r, c) => giving.length ? x.contributions[giving[r]][c] : null,
  label: (r, c) => giving.length ? `key ${nameOf(giving[r])}, dim ${c}\np ${exact(x.weights[giving[r]])}\np v ${exact(x.contributions[giving[r]][c])}` : "" });
section("Weighted values", ["mix"], el("h3", { class: "v" }, "p v: a row per key, the largest vectors first"), inBox(mix), mixScale.node,
  soft(`Norms from the top: ${giving.map(j => num(sizes[j])).join(", ")}.` +
    (others.length ? ` ${others.length} others share a weight of ${num(sum(others.map(j => x.weights[j])))}.` : "")),
  strip("z: the sum of all", "z", () => x.z));

const joinedScale = signedScale(), joinedTop = size(x.joined), topShare = size(x.shares) || 1;
joinedScale.size(joinedTop);
const joined = grid({ rows: n.H, cols: n.E, cell: 18, fixed: true, down: x.shares.map((_, h) => `head ${h}`), mark: () => ({ row: x.head }),
  alt: "z of every head: a row per head, a column per dim", value: (r, c) => x.joined[r * n.E + c], color: bySign(joinedTop),
  label: (r, c) => `head ${r}, dim ${c}: ${exact(x.joined[r * n.E + c])}` });
section("Heads joined, output projection", ["output"],
  el("h3", { class: "z" }, `z of all heads: ${n.H} × ${n.E} = ${n.H * n.E} numbers, a row per head`), inBox(joined), joinedScale.node,
  el("h3", {}, "What each head writes into out: (out of the head · out) / (out · out)"),
  ...x.shares.map((share, h) => row(h === x.head, `head ${h}`, Math.abs(share) / topShare, `${(100 * share).toFixed(1)} %`,
    el("span", { class: `bar z${share < 0 ? " negative" : ""}` }), `head ${h}: ${exact(share)} of out`)),
  strip(`head ${x.head} writes`, "z", () => x.head_out), strip("out: all heads write", "z", () => x.out),
  strip("h + out: the hidden state", "", () => x.residual));

// ---- patterns
const cellText = v => v === null ? "masked" : `weight ${exact(v)}`;
const large = grid({ rows: n.T, cols: n.T, square: 760, fixed: true, down: x.pieces.map((_, j) => nameOf(j)), across: x.pieces.map((_, j) => nameOf(j)),
  alt: `pattern of head ${x.head}: ${n.T} queries by ${n.T} keys; the arrow keys move, Enter chooses the key`, value: (r, c) => x.pattern[r][c],
  color: byWeight, mark: () => ({ row: x.query, col: focus }), start: () => [x.query, focus], pick: (_, c) => setFocus(c),
  label: (r, c) => `query ${nameOf(r)}\nkey ${nameOf(c)}\n${cellText(x.pattern[r][c])}` });
const small = x.patterns.map((cells, h) => {
  const canvas = grid({ rows: cells.length, cols: cells.length, square: 150, fixed: true, alt: `pattern of head ${h}, small`,
    value: (r, c) => cells[r][c], color: byWeight,
    label: (r, c) => `head ${h}\nqueries from ${r * x.pool}, keys from ${c * x.pool}\n${x.pool > 1 ? "largest " : ""}${cellText(cells[r][c])}` });
  return el("figure", { class: h === x.head ? "here" : "" }, el("figcaption", {}, `head ${h}`), inBox(canvas));
});
section("The whole pattern", ["pattern"], inBox(large), weightScale("weight, coloured by its square root; hatched: masked"),
  soft("Framed: the row of the query, and the column of the key. Hover, or focus and use the arrow keys, for exact weights."),
  el("h3", {}, `Every head of layer ${x.layer}${x.pool > 1 ? `; each cell is the largest weight of ${x.pool} × ${x.pool}` : ""}`),
  el("div", { class: "heads" }, ...small));

section("Next token", ["predict"], ...x.predictions.map(guess => row(false, guess.piece, guess.probability,
  `${(100 * guess.probability).toFixed(2)} %`, el("span", { class: "bar z" }), `${guess.piece}\nid ${guess.id}, probability ${exact(guess.probability)}`)));

section("Check", [],
  el("p", {}, "Recomputed from captured tensors, and compared with what the model computed. The largest difference: ",
    el("span", { class: "num good" }, num(x.check, 3))),
  el("div", { class: "cards" }, ...Object.entries(x.checks).map(([label, value]) => card(label, num(value, 3)))));

// ---- paint
new ResizeObserver(repaint).observe(page);
dark.addEventListener("change", repaint);
addEventListener("keydown", e => { if (e.key === "Escape") hideTip(); });
setFocus(focus);
