// Runs math.js as the page does, under node: a page's data and questions on stdin, answers on stdout.
// {meta, table, arrays: base64 of gzip, ask: [[name, ...arguments]]} -> [answer]; numbers that JSON lacks are words.

"use strict";
const zlib = require("node:zlib");
const { makeMath, readArrays } = require(process.argv[2]);

const plain = x => {
  if (typeof x === "number" && !Number.isFinite(x)) return String(x);
  if (ArrayBuffer.isView(x) || Array.isArray(x)) return Array.from(x, plain);
  if (x && typeof x === "object") return Object.fromEntries(Object.entries(x).map(([name, value]) => [name, plain(value)]));
  return x;
};
let text = "";
process.stdin.on("data", part => { text += part; });
process.stdin.on("end", () => {
  const { meta, table, arrays, ask } = JSON.parse(text), bytes = zlib.gunzipSync(Buffer.from(arrays, "base64"));
  const math = makeMath(meta, readArrays(table, new Uint8Array(bytes).buffer));
  process.stdout.write(JSON.stringify(ask.map(([name, ...given]) => plain(math[name](...given)) ?? null)));
});
