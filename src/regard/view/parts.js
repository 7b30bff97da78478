// Parts of the page: its data, elements, numbers, formulas, the tip, and colours. Text reaches the page as text only.

const data = JSON.parse(document.getElementById("data").textContent);
const { explanation: x, weights: WEIGHTS, signed: SIGNED } = data;
const n = x.sizes, dark = matchMedia("(prefers-color-scheme: dark)");
const visible = j => !x.masked[j];
const last = steps => steps[steps.length - 1].values;
const order = x.pieces.map((_, j) => j).filter(visible).sort((a, b) => x.weights[b] - x.weights[a]);
let focus = order.length ? order[0] : x.query; // the key that the page follows

const el = (tag, properties = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [property, value] of Object.entries(properties)) {
    if (property === "class") node.className = value;
    else if (property in node) node[property] = value;
    else node.setAttribute(property, value);
  }
  node.append(...children.filter(child => child !== null));
  return node;
};

// ---- numbers and words
const num = (v, digits = 4) => {
  if (v === null) return "-∞";
  const tiny = v !== 0 && Math.abs(v) < 1e-3, huge = Math.abs(v) >= 1e6;
  return (tiny || huge ? v.toExponential(digits - 2) : String(Number(v.toPrecision(digits)))).replace(/^-/, "−");
};
const exact = v => v === null ? "-∞" : String(v);
const norm = values => Math.hypot(...values);
const size = values => values.reduce((top, v) => Math.max(top, Math.abs(v)), 0);
const sum = values => values.reduce((total, v) => total + v, 0);
const nameOf = j => `${j} ${x.pieces[j]}`;

const ROLES = { q: "q", k: "k", v: "v", s: "s", p: "s", z: "z" };
const formula = text => {
  const line = el("span", { class: "formula" });
  for (const part of text.split(/([A-Za-z]+_[A-Za-z]+|(?<![A-Za-z])[qkvspz](?![A-Za-z]))/)) {
    const [letter, sub] = part.split("_");
    if (sub === undefined && !ROLES[letter]) line.append(part);
    else line.append(el("span", { class: ROLES[letter] || "" }, letter, sub ? el("sub", {}, sub) : null));
  }
  return line;
};

// ---- the tip: exact numbers under the pointer, or under the keyboard's cursor
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
  node.addEventListener("focus", () => {
    const box = node.getBoundingClientRect();
    showTip(text(), box.left, box.bottom - 12);
  });
  node.addEventListener("blur", hideTip);
  return node;
};

// ---- what is painted on a change of size or colours, and what follows the key in focus
const painters = [], followers = [];
let waiting = false;
const repaint = () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    painters.forEach(paint => paint());
  });
};
const follow = draw => {
  followers.push(draw);
  draw();
};
const setFocus = j => {
  focus = j;
  followers.forEach(draw => draw());
  repaint();
};

// ---- colours
const theme = () => dark.matches ? "dark" : "light";
const css = variable => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
const along = (stops, t) => {
  const at = t * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
  return `rgb(${stops[i].map((low, c) => Math.round(low + (stops[i + 1][c] - low) * (at - i))).join()})`;
};
const table = stops => Array.from({ length: 256 }, (_, i) => along(stops, i / 255));
const TABLES = { light: [table(WEIGHTS.light), table(SIGNED.light)], dark: [table(WEIGHTS.dark), table(SIGNED.dark)] };
const shade = (which, t) => TABLES[theme()][which][Math.round(255 * Math.min(Math.max(t, 0), 1))];
const byWeight = v => shade(0, Math.sqrt(v)); // the square root shows small weights too; the scale says so
const bySign = top => v => shade(1, top ? (v / top + 1) / 2 : 0.5);
