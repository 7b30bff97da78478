// Figures: the canvases of a view with a caption that describes them, saved as PNG or SVG.

const figures = (() => {
  // returns a full description of what was drawn and how weights were pooled, so that it can be reproduced; extra(say)
  // adds the facts of a view.
  // say(key, values) returns a sentence: in the page's language for the caption, in English for the JSON inside an SVG
  const recipe = (extra, say = R.t) => {
    const s = R.state,
      place = R.place(),
      rule = R.math.rule(s.place, s.i);
    return {
      model: R.source(s.place).model,
      place: place.name,
      head: s.head,
      rows: place.T,
      columns: place.N,
      kernel: rule.kernel,
      dtype: place.dtype,
      mask: rule.text,
      score_scale: rule.scale,
      statistic: say(`stat.${s.stat}`),
      scale: say(`scale.${s.scale}`),
      sinks: say(s.sinks ? "recipe.sinks_shown" : "recipe.sinks_hidden", { n: fields.FIRST }),
      ...extra(say),
    };
  };
  const english = (key, values) => R.tIn("en", key, values);
  const words = extra =>
    Object.entries(recipe(extra))
      .filter(([, v]) => v !== "" && v !== null && v !== undefined)
      .map(([name, v]) => `${R.t(`recipe.${name}`)} ${v}`)
      .join(" · ");
  const EM = 7.3; // pixels of a letter of the caption, 12 pixels high
  const wrapped = (text, width) => {
    // lines of a width in pixels, broken at the dots if possible
    const most = Math.max(20, Math.floor(width / EM)),
      lines = [""];
    for (const part of text.split(" · ")) {
      const last = lines[lines.length - 1],
        joined = last ? `${last} · ${part}` : part;
      if ([...joined].length <= most) {
        lines[lines.length - 1] = joined;
        continue;
      }
      const letters = [...part],
        cut = [];
      for (let n = 0; n < letters.length; n += most) cut.push(letters.slice(n, n + most).join(""));
      if (last) lines.push(...cut);
      else lines.splice(-1, 1, ...cut);
    }
    return lines;
  };
  const save = (blob, name) => {
    const url = URL.createObjectURL(blob),
      link = R.el("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
    R.saved = { name, size: blob.size, blob };
  };
  const LINE = 16,
    LEGEND = 22,
    MONO = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace';
  const legend = scale => `${R.SCALES[scale].low} … ${R.SCALES[scale].high}   ${R.t("map.masked")}: ╱╱`;
  const png = canvases => {
    // draws the heatmaps side by side, with the caption below them
    const dpr = devicePixelRatio || 1,
      all = canvases(),
      text = words(all.extra),
      gap = 16 * dpr;
    const width = all.reduce((sum, c) => sum + c.width + gap, 0) + gap,
      high = all.reduce((most, c) => Math.max(most, c.height), 0) + LEGEND * dpr;
    const lines = [R.meta.title, ...wrapped(text, width / dpr - 32)],
      sheet = document.createElement("canvas");
    sheet.width = width;
    sheet.height = high + (lines.length * LINE + 24) * dpr;
    const pen = sheet.getContext("2d");
    pen.fillStyle = R.css("--page");
    pen.fillRect(0, 0, sheet.width, sheet.height);
    let at = gap;
    pen.font = `${12 * dpr}px ${MONO}`;
    all.forEach((c, n) => {
      pen.drawImage(c, at, 8 * dpr);
      pen.drawImage(R.ramp(all.scales[n]), at, c.height + 12 * dpr, 120 * dpr, 9 * dpr);
      pen.fillStyle = R.css("--soft");
      pen.fillText(legend(all.scales[n]), at + 128 * dpr, c.height + 20 * dpr);
      at += c.width + gap;
    });
    lines.forEach((line, n) => {
      pen.fillStyle = R.css(n ? "--soft" : "--ink");
      pen.fillText(line, gap, high + (24 + n * LINE) * dpr);
    });
    return new Promise(done => {
      sheet.toBlob(done, "image/png");
    });
  };
  const svg = canvases => {
    // embeds the heatmaps as images; legends and caption are text
    const NS = "http://www.w3.org/2000/svg",
      node = (tag, attributes, text) => {
        const x = document.createElementNS(NS, tag);
        for (const [name, value] of Object.entries(attributes)) x.setAttribute(name, value);
        if (text !== undefined) x.textContent = text;
        return x;
      };
    const dpr = devicePixelRatio || 1,
      all = canvases(),
      made = recipe(all.extra, english),
      width = all.reduce((sum, c) => sum + c.width / dpr + 16, 16),
      high = all.reduce((most, c) => Math.max(most, c.height / dpr), 0) + LEGEND;
    const lines = [R.meta.title, ...wrapped(words(all.extra), width - 32)],
      height = high + lines.length * LINE + 24;
    const root = node("svg", {
      xmlns: NS,
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      "font-family": "ui-monospace, Menlo, Consolas, monospace",
      "font-size": 12,
    });
    root.append(
      node("title", {}, R.meta.title),
      node("desc", {}, JSON.stringify(made)),
      node("rect", { width, height, fill: R.css("--page") }),
    );
    let at = 16;
    all.forEach((c, n) => {
      root.append(
        node("image", {
          x: at,
          y: 8,
          width: c.width / dpr,
          height: c.height / dpr,
          href: c.toDataURL("image/png"),
          "image-rendering": "pixelated",
        }),
        node("image", {
          x: at,
          y: c.height / dpr + 12,
          width: 120,
          height: 9,
          preserveAspectRatio: "none",
          href: R.ramp(all.scales[n]).toDataURL("image/png"),
        }),
        node("text", { x: at + 128, y: c.height / dpr + 20, fill: R.css("--soft") }, legend(all.scales[n])),
      );
      at += c.width / dpr + 16;
    });
    lines.forEach((line, n) =>
      root.append(node("text", { x: 16, y: high + 24 + n * LINE, fill: R.css(n ? "--soft" : "--ink") }, line)),
    );
    return Promise.resolve(new Blob([new XMLSerializer().serializeToString(root)], { type: "image/svg+xml" }));
  };
  // returns two buttons; canvases() -> the canvases of the view, as an array with the properties `extra` (see above)
  // and `scales` (one per canvas)
  const buttons = (name, canvases) => {
    const { el, t } = R,
      make = { png, svg };
    return el(
      "span",
      { class: "controls" },
      ...["png", "svg"].map(kind =>
        R.button(
          {
            id: `save-${name}-${kind}`,
            onclick: () => make[kind](canvases).then(blob => save(blob, `regard-${name}.${kind}`)),
          },
          t(`export.${kind}`),
        ),
      ),
    );
  };
  return { recipe, words, buttons };
})();
