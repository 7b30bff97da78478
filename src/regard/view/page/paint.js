// The tooltip, and colours: ramps for weights and for signed numbers, the hatch of masked cells, and the legend of a
// scale.

// ---- the tooltip: `text` is a function, which is asked again at every drawing, so that what it says is never older
// than the page
const tip = document.getElementById("tip");
let tipOf = null;
R.showTip = (text, left, top) => {
  tipOf = { text, left, top };
  R.refreshTip();
};
R.hideTip = () => {
  tipOf = null;
  tip.hidden = true;
};
R.refreshTip = () => {
  if (!tipOf) return;
  const text = tipOf.text();
  tip.hidden = !text;
  if (!text) return;
  if (tip.textContent !== text) tip.textContent = text;
  const { left, top } = tipOf,
    box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(left + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${top + 18 + box.height > innerHeight ? Math.max(6, top - box.height - 12) : top + 18}px`;
};
R.tipped = (node, text) => {
  const shown = () => (node.isConnected ? text() : "");
  node.addEventListener("pointermove", e => R.showTip(shown, e.clientX, e.clientY));
  node.addEventListener("pointerleave", R.hideTip);
  node.addEventListener("focus", () => {
    const box = node.getBoundingClientRect();
    R.showTip(shown, box.left, box.bottom - 12);
  });
  node.addEventListener("blur", R.hideTip);
  return node;
};

// ---- ramps: 256 colours each, as numbers for pixels and as text for strokes
const ramp = stops =>
  Array.from({ length: 256 }, (_, n) => {
    const at = (n / 255) * (stops.length - 1),
      i = Math.min(Math.floor(at), stops.length - 2);
    return stops[i].map((low, c) => Math.round(low + (stops[i + 1][c] - low) * (at - i)));
  });
const RAMPS = Object.fromEntries(
  ["weights", "signed"].map(name => [
    name,
    { light: ramp(R.meta.palette[name].light), dark: ramp(R.meta.palette[name].dark) },
  ]),
);
const place256 = t => (Number.isFinite(t) ? Math.round(255 * Math.min(Math.max(t, 0), 1)) : 255);
R.shade = (which, t) => `rgb(${RAMPS[which][R.theme()][place256(t)].join()})`;
const little = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;
const packed = ([r, g, b]) =>
  little ? ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0 : ((r << 24) | (g << 16) | (b << 8) | 255) >>> 0;
R.lut = which => Uint32Array.from(RAMPS[which][R.theme()], packed);
const hex = name => {
  const x = R.css(name);
  return [1, 3, 5].map(n => parseInt(x.slice(n, n + 2), 16));
};
R.pixel = name => packed(hex(name));

// returns an image of blocks; `unit(n)` gives the place of a block in the ramp, 0 to 1, NaN for a wrong number, null
// for a masked block, through which the hatch shows, or "hidden" for one that is left out
R.paintBlocks = (rows, cols, ramp, unit) => {
  const image = new ImageData(Math.max(cols, 1), Math.max(rows, 1)),
    pixels = new Uint32Array(image.data.buffer),
    lut = R.lut(ramp),
    wrong = R.pixel("--bad"),
    away = R.pixel("--page");
  for (let n = 0; n < rows * cols; n++) {
    const u = unit(n);
    if (u === null) continue;
    pixels[n] = u === "hidden" ? away : Number.isNaN(u) ? wrong : lut[u <= 0 ? 0 : u >= 1 ? 255 : Math.round(255 * u)];
  }
  return image;
};
R.picture = (rows, cols, ramp, unit, canvas = document.createElement("canvas")) => {
  // the same on a canvas
  const image = R.paintBlocks(rows, cols, ramp, unit);
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
};
let hatchTile = null,
  hatchOf = "";
R.hatch = (pen, dpr) => {
  // the pattern of masked cells
  const now = `${R.theme()} ${dpr}`,
    n = Math.round(8 * dpr);
  if (hatchOf !== now) {
    hatchTile = R.el("canvas", { width: n, height: n });
    hatchOf = now;
    const ink = hatchTile.getContext("2d");
    ink.fillStyle = R.css("--card");
    ink.fillRect(0, 0, n, n);
    ink.strokeStyle = R.css("--line");
    ink.lineWidth = 1.5 * dpr;
    for (const shift of [-n, 0, n]) {
      ink.beginPath();
      ink.moveTo(shift, n);
      ink.lineTo(shift + n, 0);
      ink.stroke();
    }
  }
  return pen.createPattern(hatchTile, "repeat");
};

// ---- scales: a number -> 0..1 on a fixed domain, and the labels of its ends
// log: 2^-16..1; linear: 0..1; lift: weight times the keys that the query sees, 2^-8..2^8; signed: -1..1, linear or by
// the logarithm of its size; ratio: log2 of a ratio, -8..8
R.SCALES = {
  log: { ramp: "weights", low: "2⁻¹⁶", high: "1", at: w => (w <= 0 ? 0 : 1 + Math.log2(w) / 16) },
  linear: { ramp: "weights", low: "0", high: "1", at: w => w },
  lift: { ramp: "signed", low: "2⁻⁸", high: "2⁸", at: w => (w <= 0 ? 0 : 0.5 + Math.log2(w) / 16) },
  signed: { ramp: "signed", low: "−1", high: "1", at: w => 0.5 + w / 2 },
  signedlog: {
    ramp: "signed",
    low: "−1",
    high: "1",
    at: w => 0.5 + (Math.sign(w) * Math.max(0, 1 + Math.log2(Math.abs(w)) / 16)) / 2,
  },
  ratio: { ramp: "signed", low: "2⁻⁸", high: "2⁸", at: w => 0.5 + w / 16 },
};
R.ramp = scale => {
  // returns a canvas with the colours of a scale from low to high, one pixel each
  const canvas = R.el("canvas", {
    class: "ramp",
    width: 256,
    height: 1,
    role: "img",
    ariaLabel: `${R.SCALES[scale].low} … ${R.SCALES[scale].high}`,
  });
  const pen = canvas.getContext("2d"),
    image = pen.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(R.lut(R.SCALES[scale].ramp));
  pen.putImageData(image, 0, 0);
  return canvas;
};
R.legend = (scale, note = "") => {
  const { el } = R,
    { low, high } = R.SCALES[scale];
  return el(
    "div",
    { class: "legend" },
    el("span", {}, low),
    R.ramp(scale),
    el("span", {}, high),
    el("span", { class: "soft" }, note),
    el(
      "span",
      { class: "soft maskkey" },
      el("span", { class: "swatch hatched", ariaHidden: "true" }),
      " ",
      R.t("map.masked"),
    ),
  );
};
