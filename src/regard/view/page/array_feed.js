// The feed of a report: arrays in the page itself, from which every number is computed.

const unpack = async () => {
  const text = document.getElementById("arrays").textContent.trim(),
    raw = atob(text),
    bytes = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) bytes[n] = raw.charCodeAt(n);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
};

R.atlas({
  intro: () => {
    const exact = R.exactHeads().length,
      all = R.heads().length;
    return R.t(exact === all ? "atlas.intro_all" : "atlas.intro", { exact, all });
  },
  paint: (canvas, p, h) => {
    const field = fields.small(p, h),
      view = { i0: 0, i1: field.T, j0: 0, j1: field.N },
      picture = fields.image(field.blocks(view, ...field.size, { ...fields.look(), sinks: true }), R.state.scale);
    canvas.width = picture.width;
    canvas.height = picture.height;
    canvas.getContext("2d").drawImage(picture, 0, 0);
  },
  note: (p, h) => R.t(R.math.has(p, h) ? "atlas.exact" : "atlas.thumb_only"),
  pinned: (p, h) => R.math.has(p, h) && R.exactHeads().length < R.heads().length,
  pick: (place, head) => R.set({ place, head, view: "map" }),
  chosen: { x: "sink", y: "entropy" },
});
R.views.unshift(R.views.pop()); // the atlas stands first

const feed = {
  load: async () => {
    Object.assign(R.arrays, readArrays(R.meta.arrays, await unpack()));
    R.math = makeMath(R.meta, R.arrays);
  },
  switches: () => [],
  facts: () => {
    const { el } = R,
      several = R.meta.sources.length > 1;
    return [
      el(
        "ul",
        { class: "facts" },
        ...R.meta.sources.flatMap((source, n) =>
          Object.entries(source.metadata).map(([name, value]) =>
            el(
              "li",
              {},
              several ? `${"①②"[n]} · ` : "",
              el("span", { class: "soft" }, `${R.word(`metadata.${name}`, name)} `),
              el("b", {}, String(value)),
            ),
          ),
        ),
      ),
    ];
  },
  footer: () => ["core.caution", "core.keys"].map(key => R.el("p", { class: "soft" }, R.t(key))),
  more: () => [],
  shown: () => {},
  keys: { "[": () => R.stepView(-1), "]": () => R.stepView(1) },
};
