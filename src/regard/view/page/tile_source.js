// The source of the page's numbers: the server. Every request carries the token of the link; tiles are decoded from
// little-endian bytes.

const source = (() => {
  const MOST = 4; // requests in flight
  const KEPT = 110; // tiles that are kept
  const token = (() => {
    // the token leaves the address at once, and stays in this tab
    const given = location.hash.match(/token=([\w-]{20,})/);
    if (given) sessionStorage.setItem("regard-token", given[1]);
    return given ? given[1] : sessionStorage.getItem("regard-token") || "";
  })();
  if (/token=/.test(location.hash))
    history.replaceState(null, "", location.pathname + location.hash.replace(/^#?token=[\w-]*&?/, "#"));

  const ask = async (path, signal) => {
    const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, signal, credentials: "omit" });
    if (!answer.ok)
      throw Object.assign(new Error((await answer.json().catch(() => ({}))).error || `${answer.status}`), {
        status: answer.status,
      });
    return answer;
  };
  const json = async (path, signal) => (await ask(path, signal)).json();
  const bytes = async (path, signal) => (await ask(path, signal)).arrayBuffer();

  // ---- the one encoding of weights (page_answers.py): below 0 is masked
  const HEADER = 24;
  const decode = (buffer, from = 0) => {
    const view = new DataView(buffer, from),
      kind = view.getUint8(4),
      level = view.getUint8(5);
    if (view.getUint32(0) !== 0x52475431) throw new Error("not a tile");
    const size = HEADER + view.getUint32(20, true);
    if (kind === 0) return { empty: true, level, computed: 1, peaks: [], size };
    const rows = view.getUint16(6, true),
      cols = view.getUint16(8, true),
      peaks = [],
      planes = view.getUint8(11),
      n = rows * cols;
    let at = HEADER;
    for (let k = 0; k < view.getUint8(10); k++, at += 16)
      peaks.push({
        i: view.getUint32(at, true),
        j: view.getUint32(at + 4, true),
        w: view.getFloat32(at + 8, true),
        n: view.getFloat32(at + 12, true),
      });
    const keys = new Float32Array(buffer, from + at, rows);
    const plane = k => new Float32Array(buffer, from + at + 4 * (rows + n * k), n);
    return {
      empty: false,
      level,
      rows,
      cols,
      peaks,
      sampled: view.getUint32(12, true),
      computed: view.getFloat32(16, true),
      size,
      keys,
      mass: plane(0),
      max: planes > 1 ? plane(1) : plane(0),
      visible: planes > 2 ? plane(2) : null,
    };
  };
  const decodeWeights = buffer => new Float32Array(buffer, HEADER);

  // ---- tiles: the newest are kept; wanted ones are asked for in order, and those that left the screen are given up
  const kept = new Map(),
    flying = new Map();
  let wanted = [],
    arrived = () => {},
    failed = () => {};
  const name = (p, h, level, i, j) => `${p}/${h}/${level}/${i}/${j}`;
  const get = key => kept.get(key);
  const touch = key => {
    const x = kept.get(key);
    if (x) {
      kept.delete(key);
      kept.set(key, x);
    }
    return x;
  };
  const keep = (key, tile) => {
    kept.delete(key);
    kept.set(key, tile);
    for (const old of kept.keys()) {
      if (kept.size <= KEPT) break;
      kept.delete(old);
    }
  };
  const stale = key => {
    const x = kept.get(key);
    return !x || (x.computed < 1 && performance.now() - x.at > 450);
  };
  const pump = () => {
    for (const key of wanted) {
      if (flying.size >= MOST) return;
      if (flying.has(key) || !stale(key)) continue;
      const stop = new AbortController();
      flying.set(key, stop);
      bytes(`/tile/${key}`, stop.signal).then(
        buffer => {
          const tile = { ...decode(buffer), key, at: performance.now(), picture: null, look: "" };
          keep(key, tile);
          flying.delete(key);
          arrived(tile);
          pump();
        },
        error => {
          flying.delete(key);
          if (error.name !== "AbortError") {
            failed(error);
            if (error.status === 429) setTimeout(pump, 300);
          } else pump();
        },
      );
    }
    if (
      wanted.some(key => {
        const x = kept.get(key);
        return x && x.computed < 1;
      })
    ) {
      clearTimeout(pump.later);
      pump.later = setTimeout(pump, 500);
    }
  };
  const want = keys => {
    wanted = keys;
    for (const [key, stop] of flying)
      if (!keys.includes(key)) {
        stop.abort();
        flying.delete(key);
      }
    pump();
  };
  return {
    json,
    bytes,
    decode,
    decodeWeights,
    name,
    get,
    touch,
    want,
    flying,
    kept,
    on: (tile, error) => {
      arrived = tile;
      failed = error;
    },
    hasToken: () => token !== "",
  };
})();
