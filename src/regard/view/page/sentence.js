// The sentence above the steps of a cell: whole words, an arc from the query to each key whose width is linear in the
// weight, and the heads in which this query has its largest weights.

R.ui.reading = (() => {
  const { el, t } = R,
    { svg } = R.ui,
    MAX_WORDS = 400,
    MAX_ROWS = 300_000, // weights that are computed to find the strongest heads
    HEADS = 6,
    ARC = 14; // pixels of an arc of weight 1
  const percent = p => R.percent(p, p < 0.1 ? 1 : 2);
  const same = place => place.q_text === place.k_text;

  // words of the text that the keys are: [start, stop, text]; without them each token stands alone
  const wordsOf = place => {
    const known = R.meta.explanation?.words ?? [],
      tokens = R.meta.texts[place.k_text];
    const fits = same(place) && R.meta.places[0].k_text === place.k_text && known.at(-1)?.stop === place.N;
    return fits
      ? known.map(w => [w.start, w.stop, w.text])
      : Array.from({ length: place.N }, (_, j) => [j, j + 1, tokens[j] ?? String(j)]);
  };
  const ofWord = (weights, [from, to]) => weights.slice(from, to).reduce((a, b) => a + b, 0);
  // the key with the largest weight, without the first token, the query and its neighbours if another one has any
  const strongest = (place, weights, i) => {
    const at = same(place) ? i + place.q_first : -9,
      best = far => {
        let found = 0;
        weights.forEach((w, j) => {
          if (j > 0 && Math.abs(j - at) > far && (found === 0 || w > weights[found])) found = j;
        });
        return found;
      };
    const key = best(1);
    return weights[key] > 0 ? key : best(0);
  };

  const strip = (p, h, i, j) => {
    const place = R.meta.places[p],
      words = wordsOf(place);
    if (words.length > MAX_WORDS) return null;
    const weights = R.math.weights(p, h, i),
      query = same(place) ? i + place.q_first : -1,
      arcs = svg("svg", { class: "arcs", "aria-hidden": "true" });
    const nodes = words.map(word => {
      const [from, to, text] = word,
        share = ofWord(weights, word),
        isQuery = query >= from && query < to,
        node = R.button(
          {
            class: `said${isQuery ? " q" : j >= from && j < to ? " k" : ""}`,
            disabled: !same(place) || to - 1 < place.q_first,
            onclick: () => {
              const row = to - 1 - place.q_first;
              R.set({ i: row, j: strongest(place, R.math.weights(p, h, row), row) });
            },
          },
          el("span", { class: "token", dir: "auto" }, text),
          el("span", { class: "num" }, share >= 0.005 ? percent(share) : ""),
        );
      node.style.setProperty("--share", share);
      return node;
    });
    const node = el("div", { class: "sentence", id: "cell-sentence" }, arcs, ...nodes);
    const draw = () => {
      arcs.replaceChildren();
      const at = words.findIndex(([from, to]) => query >= from && query < to),
        lines = new Set(nodes.map(x => x.offsetTop));
      node.classList.toggle("arched", lines.size === 1 && at >= 0);
      if (lines.size !== 1 || at < 0) return; // arcs would cross the words of the lines between
      const middle = x => x.offsetLeft + x.offsetWidth / 2,
        top = nodes[0].offsetTop - 2,
        far = Math.max(...nodes.map(x => Math.abs(middle(x) - middle(nodes[at]))));
      words.forEach((word, n) => {
        const share = ofWord(weights, word);
        if (n === at || share < 0.005) return;
        const [a, b] = [middle(nodes[at]), middle(nodes[n])],
          high = top - 1.33 * (20 + ((top - 40) * Math.abs(a - b)) / far);
        const path = svg("path", { d: `M${a} ${top}C${a} ${high} ${b} ${high} ${b} ${top}` });
        path.style.strokeWidth = `${ARC * share}px`;
        arcs.append(path);
      });
    };
    return { node, draw };
  };

  // the heads with the largest weights of this query on a word that is no neighbour; the shown one comes first
  const heads = (p, h, i) => {
    const here = R.meta.places[p],
      all = R.exactHeads().filter(([q]) => {
        const place = R.meta.places[q];
        return place.T === here.T && place.N === here.N && place.k_text === here.k_text;
      });
    if (all.length * here.N > MAX_ROWS) return null;
    const found = all.map(([place, head]) => {
      const weights = R.math.weights(place, head, i),
        key = strongest(R.meta.places[place], weights, i);
      return { place, head, key, weight: weights[key] };
    });
    const shown = x => x.place === p && x.head === h;
    found.sort((a, b) => shown(b) - shown(a) || b.weight - a.weight || a.place - b.place || a.head - b.head);
    const words = wordsOf(here),
      name = key => words.find(([from, to]) => key >= from && key < to)?.[2] ?? "";
    return el(
      "div",
      { class: "controls", id: "cell-heads", role: "group", ariaLabel: t("cell.heads") },
      el("span", { class: "soft" }, t("cell.heads")),
      ...found.slice(0, HEADS).map(x =>
        R.button(
          {
            class: "small",
            ariaPressed: String(shown(x)),
            onclick: () => R.set({ place: x.place, head: x.head, j: x.key }),
          },
          `${R.headName(x.place, x.head)} · ${name(x.key)} ${percent(x.weight)}`,
        ),
      ),
    );
  };
  return { strip, heads };
})();
