// Figures of the course that a reader changes: one head, masks, the cache, positions. Each takes the place of the
// picture in an element with data-figure, and needs no server. Without this script the pictures stay.
"use strict";

(() => {
  const language = document.documentElement.lang.startsWith("zh") ? 1 : 0;
  const DATA = globalThis.regardData; // docs/interactive.json

  // ---- texts, English and Chinese
  const TEXT = {
    model: ["Model", "模型"],
    minilm: ["a sentence model: MiniLM, layer 0, head 1", "句子模型 MiniLM，第 0 层第 1 头"],
    smollm2: ["a language model: SmolLM2, layer 23, head 0", "语言模型 SmolLM2，第 23 层第 0 头"],
    gemma3: ["a language model that reads Chinese: Gemma 3, layer 12, head 1", "语言模型 Gemma 3，第 12 层第 1 头"],
    reads: ["“{query}” reads “{key}”: {p} of its attention", "“{query}”最关注“{key}”：权重 {p}"],
    own: ["The numbers are the model's.", "这些是模型自己的数值。"],
    changed: ["You changed a number: the weights follow.", "数值已改动，权重随之变化。"],
    choose: [
      "Choose a word, or drag over the words (keys ← →): it asks.",
      "点选一个词，或在词上拖动（也可用 ← → 键）：由它提问。",
    ],
    query: ["query", "查询"],
    key: ["key", "键"],
    weight: ["weight", "权重"],
    steps: ["steps", "步骤"],
    step1: ["1 dot product", "1 点积"],
    step2: ["2 scale", "2 缩放"],
    step3: ["3 mask", "3 掩码"],
    step4: ["4 softmax", "4 softmax"],
    step5: ["5 weighted sum", "5 加权和"],
    say1: [
      "The query of “{query}” and the key of “{key}” have {d} numbers each. Multiplied pair by pair, and added: {dot}.",
      "“{query}”的查询与“{key}”的键各有 {d} 个数。逐对相乘再相加：q·k = {dot}。",
    ],
    say2: [
      "Times the scale {scale}: the score of “{key}” is {s}. Write another score into the table, or move the slider.",
      "乘以缩放系数 {scale}，“{key}”的分数是 {s}。可以在表中改写分数，也可以拖动滑块。",
    ],
    say3: ["No mask: “{query}” may read all {n} tokens.", "没有掩码：“{query}”可以看到全部 {n} 个词元。"],
    say3c: [
      "Causal mask: “{query}” may read itself and what stands before it; {hidden} of {n} keys are hidden.",
      "因果掩码：“{query}”只能看到自己和前面的词元；{n} 个键中有 {hidden} 个被遮住。",
    ],
    say4: [
      "Softmax: {e} / {sum} = {p}. Each score becomes e^(s − largest), divided by the sum of all; weights sum to 1.",
      "softmax：{e} / {sum} = {p}。每个分数变为 e^(s − 最大值)，再除以该列之和；权重之和为 1。",
    ],
    say5: [
      "The output is the sum of all values, each times its weight. Its first number: {terms} = {z}.",
      "输出是所有值按权重求和。第一个数：{terms} = {z}。",
    ],
    product: ["product", "乘积"],
    others: ["others", "其余"],
    output: ["output", "输出"],
    times: ["scale × {x}", "缩放系数 × {x}"],
    causal: ["causal mask", "因果掩码"],
    reset: ["Reset", "复位"],
    scoreOf: ["score of {word}", "{word} 的分数"],
    rule: ["Rule", "规则"],
    tokens: ["tokens: {x}", "词元数：{x}"],
    size: ["size: {x}", "大小：{x}"],
    extra: ["sinks, gap or global tokens: {x}", "汇聚词元、间隔或全局词元：{x}"],
    pairs: ["{count} of {all} pairs are visible ({share})", "{all} 对中可见 {count} 对（{share}）"],
    sees: ["Query {i} sees {count} keys: {keys}", "查询 {i} 看到 {count} 个键：{keys}"],
    axes: ["rows: queries, columns: keys; choose a row (keys ↑ ↓)", "行是查询，列是键；点选一行（也可用 ↑ ↓ 键）"],
    full: ["Full", "全可见"],
    full_say: ["Every token sees every token, as in BERT.", "每个词元看到所有词元，如 BERT。"],
    causal_: ["Causal", "因果"],
    causal_say: ["A token sees itself and everything before it, as in GPT.", "词元看到自己和前面的全部词元，如 GPT。"],
    window: ["Window", "窗口"],
    window_say: [
      "A token sees the last {w} tokens, itself included, as in Mistral 7B.",
      "词元看到最近的 {w} 个词元（含自己），如 Mistral 7B。",
    ],
    sinks: ["Window and sinks", "窗口加汇聚词元"],
    sinks_say: [
      "The last {w} tokens and the first {g}, as in StreamingLLM.",
      "最近的 {w} 个词元和开头的 {g} 个，如 StreamingLLM。",
    ],
    prefix: ["Prefix", "前缀"],
    prefix_say: [
      "The first {w} tokens see one another; the rest is causal, as in a prefix language model.",
      "前 {w} 个词元互相可见，其余为因果，如前缀语言模型。",
    ],
    chunk: ["Blocks", "分块"],
    chunk_say: [
      "A token sees the earlier tokens of its own block of {w}.",
      "词元只看到自己所在块（大小 {w}）中更早的词元。",
    ],
    dilated: ["Dilated", "空洞"],
    dilated_say: [
      "{w} tokens, each {g} apart: a window with gaps, as in Longformer.",
      "相隔 {g} 的 {w} 个词元：带空洞的窗口，如 Longformer。",
    ],
    strided: ["Strided", "跨步"],
    strided_say: [
      "The last {w} tokens, and every {w}-th before, as in the Sparse Transformer.",
      "最近的 {w} 个词元，以及之前每隔 {w} 个的一个，如 Sparse Transformer。",
    ],
    global: ["Window with global tokens", "窗口加全局词元"],
    global_say: [
      "{w} tokens on each side; the first {g} see all and are seen by all, as in Longformer.",
      "两侧各 {w} 个词元（含自己）；前 {g} 个词元与所有词元互相可见，如 Longformer。",
    ],
    documents: ["Documents", "文档"],
    documents_say: [
      "Two texts in one row, cut at token {w}: neither sees the other.",
      "一行中有两篇文本，在词元 {w} 处分开，互不可见。",
    ],
    heads: ["query heads H: {x}", "查询头 H：{x}"],
    groups: ["key/value heads G of GQA: {x}", "GQA 的键值头 G：{x}"],
    layers: ["layers: {x}", "层数：{x}"],
    dim: ["head size D: {x}", "头维度 D：{x}"],
    length: ["context, tokens: {x}", "上下文词元数：{x}"],
    windowSize: ["window, tokens: {x}", "窗口词元数：{x}"],
    precision: ["numbers", "数值格式"],
    card: ["card", "显卡"],
    mechanism: ["mechanism", "机制"],
    cache: ["cache of one text", "一条文本的缓存"],
    fits: ["texts that fit on the card", "单卡可容纳条数"],
    cacheSay: [
      "One token of GQA takes {bytes} over all layers. The last column counts caches alone: weights need room, too. " +
        "MLA stores a latent of 512 and a key of 64 numbers (DeepSeek-V2); layers with a window keep 16 bits or more.",
      "GQA 每个词元在所有层共占 {bytes}。最后一列只计缓存，权重还要另占空间。MLA 存 512 维潜向量和 64 维键（DeepSeek-V2）；窗口层至少保留 16 位。",
    ],
    method: ["Method", "方法"],
    plain: ["RoPE, not scaled", "RoPE，不缩放"],
    pi: ["position interpolation", "位置插值"],
    ntk: ["NTK-aware", "NTK 感知"],
    yarn: ["YaRN", "YaRN"],
    factor: ["factor s: {x}", "扩展倍数 s：{x}"],
    distance: ["distance, tokens: {x}", "距离（词元）：{x}"],
    pair: ["pair {i}", "第 {i} 对"],
    turns: ["{x} turns", "{x} 圈"],
    ropeSay: [
      "Each pair of numbers turns by distance × frequency; grey is what 4,096 trained tokens reached. {beyond} of 64 " +
        "pairs stand at an angle that training never saw. Queries and keys are multiplied by {mscale}.",
      "每对数旋转“距离 × 频率”的角度；灰色是训练的 4,096 个词元到过的范围。64 对中有 {beyond} 对处在训练从未见过的角度。查询和键各乘 {mscale}。",
    ],
    head: ["head", "头"],
    slope: ["slope m", "斜率 m"],
    penalty: ["−m × distance", "−m × 距离"],
    left: ["weight times", "权重乘以"],
    alibiSay: [
      "ALiBi: a key at this distance loses m × distance of its score: its weight is multiplied by e^(−m × distance).",
      "ALiBi：在这一距离上，分数减去 m × 距离，权重相当于乘以 e^(−m × 距离)。",
    ],
  };
  const t = (key, values = {}) => TEXT[key][language].replace(/\{(\w+)\}/g, (_, name) => values[name]);

  // ---- numbers
  const number = (x, digits = 4) =>
    (Number.isFinite(x) ? Number(x.toPrecision(digits)).toString() : "−∞").replace("-", "−");
  const fixed = (x, digits = 3) => (Number.isFinite(x) ? x.toFixed(digits) : "−∞").replace("-", "−");
  const percent = x => `${(100 * x).toFixed(1)}%`;
  const whole = x => x.toLocaleString("en-US");
  const bytes = x => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    const unit = x < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(x) / 10));
    const half = { minimumSignificantDigits: 3, maximumSignificantDigits: 3, roundingMode: "halfEven" };
    const value = x / 1024 ** unit;
    return `${unit ? value.toLocaleString("en-US", half) : x} ${units[unit]}`;
  };
  const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

  // ---- what the figures compute; tests/docs/test_interactive.py compares it with the package
  const softmax = scores => {
    const largest = Math.max(...scores);
    const e = scores.map(s => Math.exp(s - largest));
    const sum = e.reduce((a, b) => a + b);
    return { e, sum, p: e.map(x => x / sum) };
  };

  const attend = ({ q, k, v, scale }, query, causal, factor = 1, changed = {}) => {
    const dots = k.map(key => dot(q[query], key));
    const scaled = dots.map((x, j) => changed[j] ?? x * scale * factor);
    const scores = scaled.map((s, j) => (causal && j > query ? -Infinity : s));
    const { e, sum, p } = softmax(scores);
    const z = v[0].map((_, c) => p.reduce((total, weight, j) => total + weight * v[j][c], 0));
    return { dots, scaled, scores, e, sum, p, z };
  };

  const RULES = {
    causal_: { text: () => "causal", sees: (i, j) => j <= i },
    full: { text: () => "full", sees: () => true },
    window: { text: w => `causal & window(${w})`, sees: (i, j, w) => j <= i && i - j < w },
    sinks: {
      text: (w, g) => `causal & (window(${w}) | sinks(${g}))`,
      sees: (i, j, w, g) => j <= i && (i - j < w || j < g),
    },
    prefix: { text: w => `causal | prefix(${w})`, sees: (i, j, w) => j <= i || j < w },
    chunk: { text: w => `causal & chunk(${w})`, sees: (i, j, w) => j <= i && Math.floor(i / w) === Math.floor(j / w) },
    dilated: {
      text: (w, g) => `causal & dilated(${w}, ${g})`,
      sees: (i, j, w, g) => j <= i && (i - j) % g === 0 && i - j < w * g,
    },
    strided: { text: w => `causal & strided(${w})`, sees: (i, j, w) => j <= i && (i - j < w || (i - j) % w === 0) },
    global: {
      text: (w, g) => `window(${w}, ahead=${w - 1}) | global((${[...Array(g).keys()].map(x => `${x},`).join(" ")}))`,
      sees: (i, j, w, g) => Math.abs(i - j) < w || i < g || j < g,
    },
    documents: {
      text: (w, g, n) => `causal & document((0, ${w}, ${n}))`,
      sees: (i, j, w) => j <= i && i < w === j < w,
    },
  };
  const maskRows = (rule, n, w, g) =>
    Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => RULES[rule].sees(i, j, w, g)));

  // bytes of one text: codes of integers have a scale and a zero of 16 bits for each 32 values, and their last 128
  // tokens stay exact; fp8 has a scale for each head and token; layers with a window keep 16 bits
  const BITS = { fp32: 32, fp16: 16, fp8: 8, int8: 8, int4: 4 };
  const cacheBytes = (kind, { heads, groups, layers, dim, length, window, precision }) => {
    const sharing = { mha: heads, gqa: groups, mqa: 1, window: groups }[kind];
    const parts = kind === "mla" ? [[1, 576]] : [[sharing, dim], [sharing, dim]]; // prettier-ignore
    const values = parts.reduce((sum, [n, d]) => sum + n * d, 0);
    const scales = parts.reduce((sum, [n]) => sum + 16 * n, 0);
    const bits = BITS[precision];
    if (kind === "window") return layers * Math.ceil((values * Math.max(16, bits) * Math.min(length, window)) / 8);
    if (precision === "fp8") return layers * Math.ceil(((values * 8 + scales) * length) / 8);
    if (bits >= 16) return layers * Math.ceil((values * bits * length) / 8);
    const coded = Math.floor(Math.max(0, length - 128) / 32) * 32;
    return layers * Math.ceil((values * ((bits + 1) * coded + 16 * (length - coded))) / 8);
  };

  const TRAINED = 4096, PAIRS = 64; // prettier-ignore
  const frequencies = (method, s) => {
    const d = 2 * PAIRS;
    const base = method === "ntk" ? 10000 * s ** (d / (d - 2)) : 10000;
    const plain = Array.from({ length: PAIRS }, (_, i) => base ** ((-2 * i) / d));
    if (method === "pi") return plain.map(x => x / s);
    if (method !== "yarn") return plain;
    const index = turns => (d * Math.log(TRAINED / (2 * Math.PI * turns))) / (2 * Math.log(10000));
    const [low, high] = [Math.floor(index(32)), Math.ceil(index(1))];
    const ramp = i => Math.min(1, Math.max(0, (i - low) / (high - low)));
    return plain.map((x, i) => x * (1 - ramp(i)) + (x / s) * ramp(i));
  };
  const yarnFactor = (method, s) => (method === "yarn" ? 0.1 * Math.log(s) + 1 : 1);
  const slopes = heads => Array.from({ length: heads }, (_, h) => 2 ** ((-8 * (h + 1)) / heads));

  // ---- elements
  const make = (namespace, tag, attributes, children) => {
    const node = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.flat().filter(child => child !== null && child !== undefined));
    return node;
  };
  const el = (tag, attributes = {}, ...children) => make(null, tag, attributes, children);
  const svg = (tag, attributes = {}, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, children);
  const table = (heads, rows, attributes = {}) =>
    el(
      "table",
      attributes,
      el("thead", {}, el("tr", {}, heads)),
      el(
        "tbody",
        {},
        rows.map(cells => el("tr", {}, cells)),
      ),
    );
  const bar = share =>
    el("span", { class: "rf-track" }, el("span", { class: "rf-fill", style: `width:${100 * share}%` }));

  // a row of cells: blue is positive, orange negative, and the strength is linear in the value
  const strip = (name, values, top) =>
    el(
      "div",
      { class: "rf-strip" },
      el("span", {}, name),
      svg(
        "svg",
        { viewBox: `0 0 ${values.length} 2`, preserveAspectRatio: "none", role: "img", "aria-label": name },
        values.map((x, i) =>
          svg("rect", { x: i, width: 1, height: 2, class: x < 0 ? "minus" : "plus", "fill-opacity": Math.abs(x) / top },
            svg("title", {}, `${i}: ${number(x)}`)),
        ),
      ),
    ); // prettier-ignore

  const select = (label, options, value, change) =>
    el(
      "label",
      {},
      el("span", {}, label),
      el("select", { onchange: event => change(event.target.value) },
        options.map(([key, text]) => el("option", { value: key, selected: key === value }, text))),
    ); // prettier-ignore
  // a slider over the values of a list, with its text beside it
  const slider = (name, key, values, value, change) => {
    const text = el("span", {}, t(key, { x: whole(value) }));
    const moved = event => {
      text.textContent = t(key, { x: whole(values[event.target.value]) });
      change(values[event.target.value]);
    };
    const range = { type: "range", name, min: 0, max: values.length - 1, value: values.indexOf(value), oninput: moved };
    return el("label", {}, text, el("input", { ...range, "aria-label": t(key, { x: "" }) }));
  };
  const powers = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => 2 ** (from + i));
  const upTo = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i);

  // ---- one head, step by step
  const STEPS = [1, 2, 3, 4, 5];
  const head = (place, name) => {
    const state = { name: name || "minilm", step: 1, factor: 1, changed: {} };
    const data = () => DATA.heads[state.name];
    const start = () =>
      Object.assign(state, { query: data().query, key: data().key, causal: data().causal, factor: 1, changed: {} });
    const words = el("div", { class: "rf-words", role: "group", "aria-label": t("query") });
    const lead = el("p", { class: "rf-lead", "aria-live": "polite" });
    const body = el("div");
    const controls = el("div", { class: "rf-controls" });

    const ask = query => {
      if (query === state.query || !(query in data().words)) return;
      Object.assign(state, { query, changed: {} });
      state.key = attend(data(), query, state.causal, state.factor).p.reduce(
        (best, x, j, p) => (x > p[best] ? j : best),
        0,
      );
      draw();
    };
    const under = event => document.elementFromPoint(event.clientX, event.clientY)?.closest(".rf-words button");
    words.addEventListener("pointermove", event => {
      const word = event.buttons ? under(event) : null;
      if (word && words.contains(word)) ask(Number(word.dataset.index));
    });
    words.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      ask(state.query + move);
      words.querySelector("[aria-pressed=true]").focus();
    });

    const arcs = p => {
      words.querySelector("svg")?.remove();
      const box = words.getBoundingClientRect();
      const middle = j => {
        const word = words.querySelector(`[data-index="${j}"]`).getBoundingClientRect();
        return [word.left + word.width / 2 - box.left, word.top - box.top];
      };
      const [x0, y0] = middle(state.query);
      const path = (weight, j) => {
        const [x, y] = middle(j);
        if (y !== y0) return null; // an arc to another line would cross its words
        const up = y0 - Math.min(44, 10 + Math.abs(x - x0) / 6);
        const d = `M${x0} ${y0}C${x0} ${up} ${x} ${up} ${x} ${y0}`;
        return svg("path", { d, "stroke-width": 1 + 12 * weight, "stroke-opacity": Math.min(1, 0.15 + 1.5 * weight) });
      };
      const drawn = p.map((weight, j) => (weight >= 0.02 && j !== state.query ? path(weight, j) : null));
      words.append(svg("svg", { class: "rf-arcs", width: box.width, height: box.height, "aria-hidden": true }, drawn));
    };

    const sentence = run => {
      const { query, key, step } = state;
      const at = { query: data().words[query], key: data().words[key], n: run.p.length, d: data().q[0].length };
      const largest = [...run.p.keys()].sort((a, b) => run.p[b] - run.p[a]).slice(0, 2);
      const value = j => fixed(data().v[j][0]);
      return t(step === 3 && state.causal ? "say3c" : `say${step}`, {
        ...at,
        dot: fixed(run.dots[key]),
        scale: number(data().scale * state.factor),
        s: fixed(run.scaled[key]),
        hidden: run.scores.filter(s => s === -Infinity).length,
        e: fixed(run.e[key]),
        sum: fixed(run.sum),
        p: percent(run.p[key]),
        terms: `${largest.map(j => `${fixed(run.p[j])} × ${value(j)}`).join(" + ")} + …`.replaceAll("+ −", "− "),
        z: fixed(run.z[0]),
      });
    };

    const strips = run => {
      const { q, k, v, words: names } = data();
      if (state.step === 1) {
        const product = q[state.query].map((x, i) => x * k[state.key][i]);
        const rows = [["q", q[state.query]], ["k", k[state.key]], [t("product"), product]]; // prettier-ignore
        return rows.map(([name, row]) => strip(name, row, Math.max(...row.map(Math.abs))));
      }
      if (state.step < 5) return [];
      const order = [...run.p.keys()].sort((a, b) => run.p[b] - run.p[a]);
      const shown = order.slice(0, 4).map(j => [`${fixed(run.p[j], 2)} × ${names[j]}`, v[j].map(x => x * run.p[j])]);
      const rest = run.z.map((x, c) => x - shown.reduce((sum, [, row]) => sum + row[c], 0));
      const rows = [...shown, [t("others"), rest], [t("output"), run.z]];
      const top = Math.max(...rows.flatMap(([, row]) => row.map(Math.abs)));
      return rows.map(([name, row]) => strip(name, row, top));
    };

    const update = () => {
      const { query, key } = state;
      const run = attend(data(), query, state.causal, state.factor, state.changed);
      const original = state.factor === 1 && state.causal === data().causal && !Object.keys(state.changed).length;
      const best = run.p.indexOf(Math.max(...run.p));
      lead.replaceChildren(
        el("strong", {}, t("reads", { query: data().words[query], key: data().words[best], p: percent(run.p[best]) })),
        " ",
        el("span", { class: original ? "" : "rf-changed" }, t(original ? "own" : "changed")),
      );
      for (const word of words.querySelectorAll("button")) {
        const j = Number(word.dataset.index);
        word.setAttribute("aria-pressed", j === query);
        word.tabIndex = j === query ? 0 : -1;
        word.style.setProperty("--weight", run.p[j]);
        word.lastChild.textContent = run.scores[j] === -Infinity ? "–" : percent(run.p[j]);
      }
      arcs(run.p);
      body.querySelector(".rf-say").textContent = sentence(run);
      body.querySelector(".rf-strips").replaceChildren(...strips(run));
      for (const row of body.querySelectorAll("tbody tr")) {
        const j = row.rowIndex - 1;
        row.className = j === key ? "rf-key" : "";
        row.querySelector(".dot").textContent = fixed(run.dots[j]);
        const input = row.querySelector("input");
        if (input !== document.activeElement) input.value = run.scaled[j].toFixed(3);
        row.querySelector(".masked").textContent = fixed(run.scores[j]);
        row.querySelector(".exp").textContent = fixed(run.e[j]);
        row.querySelector(".rf-fill").style.width = percent(run.p[j]);
        row.querySelector(".p").textContent = percent(run.p[j]);
      }
    };

    const draw = () => {
      const { words: names } = data();
      words.replaceChildren(
        ...names.map((word, j) =>
          el("button", { type: "button", "data-index": j, onpointerdown: () => ask(j), onclick: () => ask(j) },
            el("span", {}, word), el("small", {}))),
      ); // prettier-ignore
      const tab = step =>
        el(
          "button",
          { type: "button", "aria-pressed": `${step === state.step}`, onclick: () => go(step) },
          t(`step${step}`),
        );
      const heads = [
        t("key"),
        "q·k",
        "× " + number(data().scale * state.factor),
        t("step3").slice(2),
        "e^(s−max)",
        t("weight"),
      ];
      const row = (word, j) => {
        const choose = () => Object.assign(state, { key: j }) && update();
        const write = event => {
          if (event.target.value === "") return;
          state.changed[j] = Number(event.target.value);
          state.key = j;
          update();
        };
        const score = { type: "number", step: 0.1, "aria-label": t("scoreOf", { word }), oninput: write };
        return [
          el("th", { scope: "row" }, el("button", { type: "button", onclick: choose }, word)),
          el("td", { class: "c1 dot" }),
          el("td", { class: "c2" }, el("input", score)),
          el("td", { class: "c3 masked" }),
          el("td", { class: "c4 exp" }),
          el("td", { class: "c5" }, bar(0), el("span", { class: "p" })),
        ];
      };
      body.replaceChildren(
        el("div", { class: "rf-steps", role: "group", "aria-label": t("steps") }, STEPS.map(tab)),
        el("p", { class: "rf-say", "aria-live": "polite" }),
        el("div", { class: "rf-strips" }),
        table(
          heads.map((text, i) => el("th", { scope: "col", class: `c${i}` }, text)),
          names.map(row),
          { "data-step": state.step },
        ),
      ); // prettier-ignore
      controls.replaceChildren(
        slider("factor", "times", upTo(0, 40).map(x => x / 10), state.factor, x => {
          state.factor = x;
          state.changed = {};
          body.querySelector("th.c2").textContent = "× " + number(data().scale * x);
          update();
        }),
        el("label", { class: "rf-check" },
          el("input", { type: "checkbox", checked: state.causal, onchange: event => {
            state.causal = event.target.checked;
            update();
          } }), el("span", {}, t("causal"))),
        el("button", { type: "button", class: "rf-reset", onclick: () => start() && draw() }, t("reset")),
      ); // prettier-ignore
      update();
    };
    const go = step => {
      state.step = step;
      draw();
      body.querySelectorAll(".rf-steps button")[step - 1].focus({ preventScroll: true });
    };
    const models = Object.keys(DATA.heads).map(key => [key, t(key)]);
    const choice = select(
      t("model"),
      models,
      state.name,
      value => Object.assign(state, { name: value }) && start() && draw(),
    );
    place.append(
      lead,
      words,
      el("p", { class: "rf-hint" }, t("choose")),
      body,
      controls,
      el("div", { class: "rf-controls" }, choice),
    );
    start();
    draw();
    new ResizeObserver(() => update()).observe(words);
  };

  // ---- masks
  const runs = keys =>
    keys
      .reduce((found, j) => {
        const last = found.at(-1);
        if (last && last[1] === j - 1) last[1] = j;
        else found.push([j, j]);
        return found;
      }, [])
      .map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`))
      .join(", ");
  const masks = place => {
    const state = { rule: place.dataset.rule || "causal_", n: 16, w: 4, g: 2, row: 9 };
    const say = el("p", { class: "rf-lead", "aria-live": "polite" });
    const code = el("code");
    const sees = el("p", { class: "rf-say", "aria-live": "polite" });
    const grid = svg("svg", { class: "rf-grid", tabindex: 0, role: "img" });
    const draw = () => {
      const { rule, n, w, g } = state;
      state.row = Math.max(0, Math.min(n - 1, state.row));
      const used = RULES[rule].text.length;
      for (const name of ["w", "g"])
        place.querySelector(`[name=${name}]`).parentNode.hidden =
          used < (name === "w" ? 1 : 2) || (name === "g" && used > 2);
      const rows = maskRows(rule, n, w, g);
      const count = rows.flat().filter(Boolean).length;
      const pairs = t("pairs", { count: whole(count), all: whole(n * n), share: percent(count / (n * n)) });
      say.replaceChildren(el("strong", {}, pairs), ` ${t(rule === "causal_" ? "causal_say" : `${rule}_say`, state)}`);
      code.textContent = RULES[rule].text(w, g, n);
      const keys = [...rows[state.row].keys()].filter(j => rows[state.row][j]);
      sees.textContent = t("sees", { i: state.row, count: keys.length, keys: runs(keys) });
      grid.setAttribute("viewBox", `-0.5 -0.5 ${n + 1} ${n + 1}`);
      grid.setAttribute("aria-label", pairs);
      const cell = (visible, i, j) =>
        svg("rect", {
          x: j + 0.06,
          y: i + 0.06,
          width: 0.88,
          height: 0.88,
          rx: 0.12,
          class: visible ? "plus" : "none",
        });
      grid.replaceChildren(
        ...rows.flatMap((row, i) => row.map((visible, j) => cell(visible, i, j))),
        svg("rect", { class: "rf-frame", x: -0.08, y: state.row - 0.08, width: n + 0.16, height: 1.16, rx: 0.2 }),
      );
    };
    const row = event => {
      const box = grid.getBoundingClientRect();
      state.row = Math.floor(((event.clientY - box.top) / box.height) * (state.n + 1) - 0.5);
      draw();
    };
    grid.addEventListener("pointerdown", row);
    grid.addEventListener("pointermove", event => event.buttons && row(event));
    grid.addEventListener("keydown", event => {
      const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      state.row += move;
      draw();
    });
    const set = name => x => {
      state[name] = x;
      draw();
    };
    place.append(
      el("div", { class: "rf-controls" },
        select(t("rule"), Object.keys(RULES).map(key => [key, t(key)]), state.rule, set("rule")),
        slider("n", "tokens", upTo(8, 32), state.n, set("n")),
        slider("w", "size", upTo(1, 16), state.w, set("w")),
        slider("g", "extra", upTo(1, 4), state.g, set("g"))),
      say, el("p", { class: "rf-hint" }, code), grid, sees, el("p", { class: "rf-hint" }, t("axes")),
    ); // prettier-ignore
    draw();
  };

  // ---- the cache
  const KINDS = ["mha", "gqa", "mqa", "mla", "window"];
  const cache = place => {
    const state = { heads: 32, groups: 8, layers: 32, dim: 128, length: 32768, window: 4096, precision: "fp16" };
    state.card = "rtx-4090";
    const rows = el("div");
    const say = el("p", { class: "rf-say", "aria-live": "polite" });
    const draw = () => {
      state.groups = Math.min(state.groups, state.heads);
      const found = KINDS.map(kind => cacheBytes(kind, state));
      const top = Math.max(...found);
      const names = { gqa: `GQA, G = ${state.groups}`, window: `GQA + ${t("window")}` };
      const heads = [t("mechanism"), t("cache"), t("fits")].map(text => el("th", { scope: "col" }, text));
      const cells = KINDS.map((kind, i) => [
        el("th", { scope: "row" }, names[kind] || kind.toUpperCase()),
        el("td", { "data-bytes": found[i] }, bar(found[i] / top), el("span", { class: "p" }, bytes(found[i]))),
        el("td", {}, whole(Math.floor(DATA.cards[state.card] / found[i]))),
      ]);
      rows.replaceChildren(table(heads, cells, { class: "rf-cache" }));
      say.textContent = t("cacheSay", { bytes: bytes(found[1] / state.length) });
    };
    const set = name => x => {
      state[name] = x;
      if (name === "heads" || name === "groups") state.groups = Math.min(state.groups, state.heads);
      draw();
    };
    const one = (name, key, values) => slider(name, key, values, state[name], set(name));
    const cards = Object.keys(DATA.cards).map(card => [card, `${card}, ${bytes(DATA.cards[card])}`]);
    place.append(
      el("div", { class: "rf-controls" },
        one("heads", "heads", powers(0, 7)),
        one("groups", "groups", powers(0, 7)),
        one("layers", "layers", upTo(1, 128)),
        one("dim", "dim", [32, 64, 96, 128, 192, 256]),
        one("length", "length", powers(9, 20)),
        one("window", "windowSize", powers(7, 15)),
        select(t("precision"), Object.keys(BITS).map(key => [key, key]), state.precision, set("precision")),
        select(t("card"), cards, state.card, set("card"))),
      rows, say,
    ); // prettier-ignore
    draw();
  };

  // ---- positions
  const positions = (place, method) => {
    const state = { method: method || "plain", s: 16, distance: method ? 65536 : 64 };
    const dials = el("div", { class: "rf-dials" });
    const say = el("p", { class: "rf-say", "aria-live": "polite" });
    const bias = el("div");
    const draw = () => {
      const trained = frequencies("plain", 1).map(x => x * TRAINED);
      const angles = frequencies(state.method, state.s).map(x => x * state.distance);
      const isNew = angles.map((angle, i) => trained[i] < 2 * Math.PI && angle > trained[i] * (1 + 1e-12));
      const at = angle => `${20 * Math.cos(angle)} ${-20 * Math.sin(angle)}`;
      const dial = i => {
        const seen = Math.min(trained[i], 2 * Math.PI - 1e-3);
        const sector = `M0 0L20 0A20 20 0 ${seen > Math.PI ? 1 : 0} 0 ${at(seen)}Z`;
        return el(
          "div",
          { class: isNew[i] ? "rf-new" : "", "data-angle": angles[i] },
          svg("svg", { viewBox: "-22 -22 44 44", role: "img", "aria-label": t("pair", { i }) },
            svg("path", { class: "rf-seen", d: sector }),
            svg("circle", { r: 20 }),
            svg("path", { class: "rf-hand", d: `M0 0L${at(angles[i])}` })),
          el("span", {}, t("pair", { i })),
          el("small", {}, t("turns", { x: number(angles[i] / (2 * Math.PI), 3) })),
        ); // prettier-ignore
      };
      dials.replaceChildren(...[0, 9, 18, 27, 36, 45, 54, 63].map(dial));
      say.textContent = t("ropeSay", {
        beyond: isNew.filter(Boolean).length,
        mscale: fixed(yarnFactor(state.method, state.s), 4),
      });
      const heads = [t("head"), t("slope"), t("penalty"), t("left")].map(text => el("th", { scope: "col" }, text));
      const rows = slopes(8).map((m, h) => {
        const left = Math.exp(-m * state.distance);
        return [
          el("th", { scope: "row" }, h),
          el("td", {}, number(m)),
          el("td", {}, number(-m * state.distance)),
          el(
            "td",
            {},
            bar(left),
            el(
              "span",
              { class: "p" },
              left === 0 ? "≈ 0" : left < 1e-4 ? left.toExponential(0).replace("-", "−") : fixed(left, 4),
            ),
          ),
        ];
      });
      if (!method)
        bias.replaceChildren(table(heads, rows, { class: "rf-bias" }), el("p", { class: "rf-say" }, t("alibiSay")));
    };
    const set = name => x => {
      state[name] = x;
      draw();
    };
    const distances = [...new Set([0, ...upTo(0, 68).map(x => Math.round(2 ** (x / 4)))])];
    place.append(
      el("div", { class: "rf-controls" },
        select(t("method"), ["plain", "pi", "ntk", "yarn"].map(key => [key, t(key)]), state.method, set("method")),
        slider("s", "factor", powers(0, 6), state.s, set("s")),
        slider("distance", "distance", distances, state.distance, set("distance"))),
      dials, say, bias,
    ); // prettier-ignore
    draw();
  };

  // ---- the places of a page
  const FIGURES = { head, masks, cache, positions };
  for (const place of document.querySelectorAll("[data-figure]")) {
    const [kind, name] = place.dataset.figure.split(" ");
    for (const child of place.children) child.hidden = true;
    const figure = el("div", { class: "rf" });
    Object.assign(figure.dataset, place.dataset);
    place.append(figure);
    FIGURES[kind](figure, name);
  }
  globalThis.regardFigures = { attend, maskRows, RULES, cacheBytes, frequencies, yarnFactor, slopes };
})();
