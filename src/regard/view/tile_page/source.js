// The source of the page's numbers: the server. Every request carries the token of the link; tiles are decoded from little-endian bytes.

const source = (() => {
  const MOST = 4; // requests in flight
  const KEPT = 110; // tiles that are kept
  const token = (() => { // the token leaves the address at once, and stays in this tab
    const given = location.hash.match(/token=([\w-]{20,})/);
    if (given) sessionStorage.setItem("regard-token", given[1]);
    return given ? given[1] : sessionStorage.getItem("regard-token") || "";
  })();
  if (/token=/.test(location.hash)) history.replaceState(null, "", location.pathname + location.hash.replace(/^#?token=[\w-]*&?/, "#"));

  const ask = async (path, signal) => {
    const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, signal, credentials: "omit" });
    if (!answer.ok) throw Object.assign(new Error((await answer.json().catch(() => ({}))).error || `${answer.status}`), { status: answer.status });
    return answer;
  };
  const json = async (path, signal) => (await ask(path, signal)).json();
  const bytes = async (path, signal) => (await ask(path, signal)).arrayBuffer();

  // ---- fp16: a table of all 65,536 numbers, and of their logarithms
  const HALF = new Float32Array(65536), LOG2 = new Float32Array(65536);
  for (let n = 0; n < 65536; n++) {
    const e = n >> 10 & 31, m = n & 1023, sign = n & 32768 ? -1 : 1;
    HALF[n] = sign * (e === 0 ? m * 2 ** -24 : e === 31 ? (m ? NaN : Infinity) : (1 + m / 1024) * 2 ** (e - 15));
    LOG2[n] = HALF[n] > 0 ? Math.log2(HALF[n]) : HALF[n] === 0 ? -Infinity : NaN;
  }
  const decode = buffer => {
    const view = new DataView(buffer), kind = view.getUint8(4), level = view.getUint8(5);
    if (view.getUint32(0) !== 0x52475431) throw new Error("not a tile");
    if (kind === 0) return { empty: true, level, computed: 1, peaks: [] };
    const rows = view.getUint16(6, true), cols = view.getUint16(8, true), peaks = [], planes = view.getUint8(11), n = rows * cols;
    let at = 32;
    for (let k = 0; k < view.getUint8(10); k++, at += 16) peaks.push({ i: view.getUint32(at, true), j: view.getUint32(at + 4, true), w: view.getFloat32(at + 8, true), n: view.getFloat32(at + 12, true) });
    const keys = new Float32Array(buffer, at, rows);
    const plane = k => new Uint16Array(buffer, at + 4 * rows + 2 * n * k, n);
    return { empty: false, level, rows, cols, peaks, sampled: view.getUint32(12, true), computed: view.getFloat32(16, true), factor: { mass: view.getFloat32(20, true), max: view.getFloat32(24, true) },
      keys, mass: plane(0), max: plane(1), visible: planes > 2 ? plane(2) : null };
  };
  const decodeWeights = buffer => {
    const view = new DataView(buffer), factor = view.getFloat32(20, true), halves = new Uint16Array(buffer, 32);
    return Float32Array.from(halves, h => HALF[h] < 0 ? -1 : HALF[h] / factor);
  };

  // ---- tiles: the newest are kept; wanted ones are asked for in order, and those that left the screen are given up
  const kept = new Map(), flying = new Map();
  let wanted = [], arrived = () => {}, failed = () => {};
  const name = (p, h, level, i, j) => `${p}/${h}/${level}/${i}/${j}`;
  const get = key => kept.get(key);
  const touch = key => { const x = kept.get(key); if (x) { kept.delete(key); kept.set(key, x); } return x; };
  const keep = (key, tile) => {
    kept.delete(key);
    kept.set(key, tile);
    for (const old of kept.keys()) { if (kept.size <= KEPT) break; kept.delete(old); }
  };
  const stale = key => { const x = kept.get(key); return !x || (x.computed < 1 && performance.now() - x.at > 450); };
  const pump = () => {
    for (const key of wanted) {
      if (flying.size >= MOST) return;
      if (flying.has(key) || !stale(key)) continue;
      const stop = new AbortController(), since = performance.now();
      flying.set(key, stop);
      bytes(`/tile/${key}`, stop.signal).then(buffer => {
        const tile = { ...decode(buffer), key, at: performance.now(), took: performance.now() - since, picture: null, look: "" };
        keep(key, tile);
        flying.delete(key);
        source.times.push([tile.level, tile.took]);
        arrived(tile);
        pump();
      }, error => {
        flying.delete(key);
        if (error.name !== "AbortError") { failed(error); if (error.status === 429) setTimeout(pump, 300); } else pump();
      });
    }
    if (wanted.some(key => { const x = kept.get(key); return x && x.computed < 1; })) { clearTimeout(pump.later); pump.later = setTimeout(pump, 500); }
  };
  const want = keys => {
    wanted = keys;
    for (const [key, stop] of flying) if (!keys.includes(key)) { stop.abort(); flying.delete(key); }
    pump();
  };
  return { json, bytes, decode, decodeWeights, HALF, LOG2, name, get, touch, want, flying, kept, times: [], on: (tile, error) => { arrived = tile; failed = error; }, hasToken: () => token !== "" };
})();
