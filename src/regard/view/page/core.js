// The core of the page: its data, its state in the URL, its texts, and the registry of views.

const R = {
  meta: JSON.parse(document.getElementById("data").textContent),
  arrays: {},
  views: [],
  plots: {},
  math: null,
};

// ---- elements; text is inserted as text, never as markup
R.el = (tag, properties = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [property, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (property === "class") node.className = value;
    else if (property.startsWith("on")) node.addEventListener(property.slice(2), value);
    else if (property in node && property !== "list") node[property] = value;
    else node.setAttribute(property, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined));
  return node;
};

// options: [value, text]; pick(value) is called with what a reader chooses
R.select = (id, options, value, pick, properties = {}) =>
  R.el(
    "select",
    { id, onchange: e => pick(e.target.value), ...properties },
    ...options.map(([name, text]) => R.el("option", { value: name, selected: String(name) === String(value) }, text)),
  );
R.chooser = (name, options, { id = name, ...properties } = {}) =>
  // chooses a part of the state
  R.select(id, options, R.state[name], value => R.set({ [name]: value }), properties);
R.button = (properties, ...children) => R.el("button", { type: "button", ...properties }, ...children);
R.labelled = (text, ...nodes) => R.el("label", {}, text, " ", ...nodes);

// ---- texts: every visible sentence comes from the catalogue of the language
R.t = (key, values = {}) => R.tIn(R.state.lang, key, values);
R.tIn = (lang, key, values = {}) => {
  const text = R.meta.strings[lang]?.[key] ?? R.meta.strings.en[key];
  if (text === undefined) {
    if (!R.missing.has(key)) console.error(`no sentence is named ${key}`);
    R.missing.add(key);
    return `⟨${key}⟩`;
  }
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
};
R.missing = new Set();
R.word = (key, otherwise) => (key in R.meta.strings.en ? R.t(key) : otherwise);
R.why = reasons =>
  reasons
    .map(x => R.t(x.key, x.values))
    .filter((x, n, all) => all.indexOf(x) === n)
    .join(R.t("and"));

// ---- numbers
R.num = (v, digits = 4) => {
  if (v === null || v === undefined) return "–";
  if (!Number.isFinite(v)) return Number.isNaN(v) ? "NaN" : v < 0 ? "−∞" : "∞";
  const tiny = v !== 0 && Math.abs(v) < 1e-3,
    huge = Math.abs(v) >= 1e6;
  return (tiny || huge ? v.toExponential(Math.max(digits - 2, 0)) : String(Number(v.toPrecision(digits)))).replace(
    /^-/,
    "−",
  );
};
R.exact = v => (Number.isFinite(v) ? String(Number(v.toPrecision(9))).replace(/^-/, "−") : R.num(v));
R.percent = (v, digits = 3) => (Number.isFinite(v) ? `${R.num(100 * v, digits)} %` : R.num(v));

// ---- places, heads and tokens
R.place = () => R.meta.places[R.state.place];
R.source = p => R.meta.sources[R.meta.places[p].source];
R.rowToken = (p, i) => R.meta.texts[R.meta.places[p].q_text][i + R.meta.places[p].q_first] ?? "";
R.keyToken = (p, j) => R.meta.texts[R.meta.places[p].k_text][j] ?? "";
R.rowName = (p, i) => `${R.math.qPosition(p, i)} ${R.rowToken(p, i)}`;
R.keyName = (p, j) => `${R.math.kPosition(p, j)} ${R.keyToken(p, j)}`;
R.headName = (p, h) =>
  (R.meta.sources.length > 1 ? `${"①②"[R.meta.places[p].source]} ` : "") +
  R.t(/^\d+$/.test(R.meta.places[p].label) ? "core.head_name" : "core.place_head", {
    layer: R.meta.places[p].label,
    place: R.meta.places[p].label,
    head: h,
  });
R.heads = () => R.meta.places.flatMap((x, p) => x.heads.map(h => [p, h]));
R.stepHead = by => {
  const all = R.heads(),
    at = all.findIndex(([p, h]) => p === R.state.place && h === R.state.head),
    [place, head] = all[(at + by + all.length) % all.length];
  R.set({ place, head });
};
R.exactHeads = () => R.heads().filter(([p, h]) => R.math.has(p, h));
R.metric = (name, p, h) => R.meta.metrics[name].of[p][R.meta.places[p].heads.indexOf(h)];
R.notExact = (p, h) =>
  R.el(
    "p",
    { class: "card" },
    R.t("core.not_exact", { head: R.headName(p, h) }),
    " ",
    R.el("code", {}, R.command(p, h)),
  );
R.command = (p, h) => {
  // a part of a place, such as "layers.3 · latents", is selected by its place
  const { name, label } = R.meta.places[p],
    where = /^\d+$/.test(label) ? `--layer ${label}` : `--place ${name.split(" · ")[0]}`;
  return `regard explain TEXT ${where} --head ${h} --html FILE`;
};

// ---- state: the selected head, query and key; it is stored in the URL
const clip = (x, count) => Math.min(Math.max(x, 0), count - 1);
R.state = {
  view: "atlas",
  place: 0,
  head: 0,
  i: 0,
  j: 0,
  stat: "mass",
  scale: "log",
  sinks: true,
  theme: "auto",
  lang: "en",
  b: null,
  m: "",
  z: "",
  sort: "layers",
  metric: Object.keys(R.meta.metrics)[0],
  least: "", // heads with a smaller metric are faint
  ...R.meta.start,
};
if (R.state.lang === "browser") {
  const languages = (navigator.languages || []).map(x => x.slice(0, 2).toLowerCase());
  R.state.lang = languages.find(x => x in R.meta.strings) || "en";
}
const followers = [],
  NAMES = {
    view: "v",
    i: "i",
    j: "j",
    stat: "stat",
    scale: "scale",
    theme: "theme",
    lang: "lang",
    m: "m",
    z: "z",
    sort: "sort",
    metric: "metric",
    pins: "pins",
    diff: "diff",
  };
R.on = fn => {
  followers.push(fn);
};
R.set = patch => {
  const changed = new Set();
  for (const [name, value] of Object.entries(patch)) {
    if (JSON.stringify(R.state[name]) === JSON.stringify(value)) continue;
    R.state[name] = value;
    changed.add(name);
  }
  if (!changed.size) return;
  bounded();
  history.replaceState(null, "", hash());
  if (changed.has("lang") || changed.has("theme")) look();
  followers.forEach(fn => fn(changed));
  R.draw(changed);
};
const bounded = () => {
  const s = R.state;
  s.place = clip(s.place, R.meta.places.length);
  const { heads, T, N } = R.place();
  s.head = heads.includes(s.head)
    ? s.head
    : heads.reduce((best, h) => (Math.abs(h - s.head) < Math.abs(best - s.head) ? h : best));
  s.i = clip(s.i, T);
  s.j = clip(s.j, N);
  if (s.b) {
    s.b.place = clip(s.b.place, R.meta.places.length);
    if (!R.meta.places[s.b.place].heads.includes(s.b.head)) s.b.head = R.meta.places[s.b.place].heads[0];
  }
};
// #L15H22&i=812&j=31: L is the index of the place on the page, H the head
const hash = () => {
  const s = R.state,
    parts = [`L${s.place}H${s.head}`];
  for (const [name, short] of Object.entries(NAMES))
    if (s[name] !== R.defaults[name]) parts.push(`${short}=${s[name]}`);
  if (!s.sinks) parts.push("sinks=0");
  if (s.b) parts.push(`b=L${s.b.place}H${s.b.head}`);
  return `#${parts.join("&")}`;
};
const whole = text => (/^\d{1,9}$/.test(text) ? Number(text) : 0);
const readHash = () => {
  const found = {},
    allowed = {
      stat: ["mass", "max"],
      scale: ["log", "linear", "lift"],
      theme: ["auto", "light", "dark"],
      lang: Object.keys(R.meta.strings),
      view: R.views.map(x => x.name),
      sort: ["layers", "metric"],
      metric: Object.keys(R.meta.metrics),
    };
  for (const part of location.hash.slice(1).split("&")) {
    const at = part.match(/^(b=)?L(\d{1,6})H(\d{1,6})$/);
    if (at && at[1]) found.b = { place: Number(at[2]), head: Number(at[3]) };
    else if (at) Object.assign(found, { place: Number(at[2]), head: Number(at[3]) });
    const [short, value = ""] = part.split("="),
      name = Object.keys(NAMES).find(x => NAMES[x] === short);
    if (short === "sinks") found.sinks = value !== "0";
    else if (name === "i" || name === "j") found[name] = whole(value);
    else if (name === "m" && /^[a-z]{1,12}(:\d{1,6}(\.\d{1,6})?)?$/.test(value)) found.m = value;
    else if (name === "z" && /^\d{1,9}(\.\d{1,9}){2}$/.test(value))
      found.z = value; // the visible part of a map of tiles
    else if (name === "pins" && /^\d{1,6}\.\d{1,6}(_\d{1,6}\.\d{1,6}){0,6}$/.test(value))
      found.pins = value; // heads beside the map of tiles
    else if (name === "diff" && value === "1") found.diff = value;
    else if (name && allowed[name] && allowed[name].includes(value)) found[name] = value;
  }
  return found;
};

// ---- colours: light and dark, by the system setting or by the switch
const system = matchMedia("(prefers-color-scheme: dark)");
R.theme = () => (R.state.theme === "auto" ? (system.matches ? "dark" : "light") : R.state.theme);
R.css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const look = () => {
  document.documentElement.dataset.theme = R.theme();
  document.documentElement.lang = R.state.lang === "zh" ? "zh-Hans" : R.state.lang;
};

// ---- views: R.view({name, title: a key, mount(el), update(changed)}); only the open view is drawn
R.view = view => {
  R.views.push({ ...view, node: null });
};
let waiting = null;
R.draw = changed => {
  // all changes are drawn together, in the next frame
  if (waiting) {
    changed.forEach(x => waiting.add(x));
    return;
  }
  waiting = new Set(changed);
  requestAnimationFrame(() => {
    const all = waiting;
    waiting = null;
    if (all.has("lang")) R.frame();
    R.show(all);
    R.refreshTip();
  });
};
R.redraw = () => R.draw(new Set(["size"]));
