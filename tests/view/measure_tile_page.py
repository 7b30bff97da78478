"""Measures the page of `regard view` against the bars of its design, in Chromium:

python -m tests.view.measure_tile_page [--tokens 131072] [--pan 60] [--heads 1024]

It makes a recording of one head with a planted needle, serves it by the command in a process of its
own, and reports wall times and processor times of the server, frame rates, the heap of the page and
the memory of the server. It is no test: nothing here fails on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import regard
from regard import masks
from regard.inspect import OverviewRecorder, Recorder, Recording
from regard.inspect.tile_server.exact_tiles import HeadTiles
from regard.inspect.tile_server.head_overviews import head_overview
from regard.tracing import named_scope
from tests.view.browser import Tab, chromium

TICK = os.sysconf("SC_CLK_TCK")
FRAMES = """(seconds, move) => new Promise(done => {
    const gaps = []; let last = performance.now(); const end = last + 1000 * seconds;
    const step = now => {
        gaps.push(now - last); last = now; move(gaps.length);
        if (now < end) requestAnimationFrame(step);
        else done({ fps: 1000 * gaps.length / gaps.reduce((a, b) => a + b), worst: Math.max(...gaps.slice(2)) });
    };
    requestAnimationFrame(step);
})"""  # noqa: E501
PANNING = """n => { const v = R.map.view;
    if (n % 600 === 0) R.map.center(Math.floor(Math.random() * R.place().T), Math.floor(Math.random() * R.place().N), 2 ** (Math.floor(n / 600) % 4));
    else R.map.center((v.i0 + v.i1) / 2 + 3 * v.s, (v.j0 + v.j1) / 2 + 5 * v.s); }"""  # noqa: E501
ZOOMING = """n => R.map.zoom(n % 120 < 60 ? 1 / 1.06 : 1.06, Math.floor(R.place().T / 2), Math.floor(R.place().N / 3))"""  # noqa: E501


def needle_recording(tokens: int) -> Recording:
    """Make a recording of one causal head, in which one cell has nearly all of its row."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, tokens, 128, generator=draw) for _ in range(2))
    q[0, 0, tokens * 9 // 10], k[0, 0, tokens // 3] = 0, 0
    q[0, 0, tokens * 9 // 10, 0], k[0, 0, tokens // 3, 0] = 15.0, 14.0
    with torch.inference_mode(), Recorder(keep=()) as recorder:
        regard.attend(q, k, k, mask=masks.Causal())
    words = (" the", " cat", " sat", " on", " a", " mat", "\n", " garden")
    pieces = tuple(" needle" if n % 516 == 7 else words[n * n % 8] for n in range(tokens))
    return replace(recorder.recording(), pieces=pieces, ids=torch.arange(tokens)[None])


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def resident(pid: int) -> float:
    """Return the memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6


def say(name: str, measured: str, bar: str = "") -> None:
    """Print a line of the table."""
    print(f"| {name} | {bar} | {measured} |", flush=True)


@contextmanager
def served(path: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run the command, and end it afterwards; yields its process, address and token."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", "view", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        address, _, token = process.stdout.readline().strip().partition("/#token=")
        link, cpu = time.perf_counter() - began, processor_seconds(process.pid)
        ask = asker(address, token)
        top = json.loads(ask("/meta"))["places"][0]["top"]
        ask(f"/tile/0/0/{top}/0/0")
        first, whole = time.perf_counter() - began, processor_seconds(process.pid)
        say(
            "command to first tile",
            f"{first:.1f} s ({whole:.1f} s CPU); {first - link:.2f} s ({whole - cpu:.2f} s CPU) "
            "after the link",
            "1 s",
        )
        yield process, address, token
    finally:
        process.terminate()
        process.wait(20)


def asker(address: str, token: str) -> Callable[[str], bytes]:
    """Return a function that asks the server as the page does."""

    def ask(path: str) -> bytes:
        request = urllib.request.Request(
            address + path, headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    return ask


def latencies(ask: Callable[[str], bytes], pid: int, paths: list[str]) -> str:
    """Return median, 95th percentile and processor time of requests."""
    walls, before = [], processor_seconds(pid)
    for path in paths:
        since = time.perf_counter()
        ask(path)
        walls.append(1e3 * (time.perf_counter() - since))
    cpu = 1e3 * (processor_seconds(pid) - before) / len(paths)
    p95 = sorted(walls)[int(0.95 * (len(walls) - 1))]
    return f"median {statistics.median(walls):.0f} ms, p95 {p95:.0f} ms; CPU {cpu:.0f} ms each"


def server_table(ask: Callable[[str], bytes], pid: int, tokens: int) -> None:
    """Measure tiles, rows, columns and cells, before a browser has asked for exact parts."""
    draw = torch.Generator().manual_seed(1)

    def below(n: int, times: int) -> list[int]:
        return [int(x) for x in torch.randint(n, (times,), generator=draw)]

    for level, bar in ((0, "40 ms"), (2, "80 ms"), (3, "200 ms")):
        tiles = max(1, tokens // (256 << level))
        places = [(i, int(i * 0.7)) for i in below(tiles, 40)]
        paths = [f"/tile/0/0/{level}/{i}/{j}" for i, j in dict.fromkeys(places)]
        say(f"tile of level {level}", latencies(ask, pid, paths), bar)
    rows = below(tokens, 30)
    say("row", latencies(ask, pid, [f"/row/0/0/{i}" for i in rows]), "60 ms")
    cells = [f"/cell/0/0/{i}/{i // 2}" for i in below(tokens, 30)]
    say("cell of a new row", latencies(ask, pid, cells), "30 ms")
    again = [f"/cell/0/0/{rows[-1]}/{j}" for j in below(rows[-1] + 1, 30)]
    say("cell of the same row", latencies(ask, pid, again), "30 ms")
    say("column", latencies(ask, pid, [f"/column/0/0/{j}" for j in below(tokens, 30)]))


def heap(tab: Tab) -> float:
    """Return the heap of the page after a collection, with its buffers and pictures, in MB."""
    tab.call("HeapProfiler.collectGarbage")
    used = tab.call("Runtime.getHeapUsage")
    pictures = tab.js(
        "[...source.kept.values()].reduce((n, x) => n + (x.picture ? 4 * x.rows * x.cols : 0), 0)"
    )
    return float(used["usedSize"] + used.get("backingStorageSize", 0) + pictures) / 1e6


def page_table(tab: Tab, address: str, token: str, pid: int, pan: float, recorded: float) -> None:
    """Measure what a reader does in the page."""
    empty = tab.js(f"({FRAMES})(2, () => {{}})")
    tab.open(f"{address}/#token={token}")
    tab.wait('document.documentElement.dataset.ready === "yes"')
    tab.wait('document.querySelector("#peaks button") !== null', 300)
    where = 'R.state.i + ", " + R.state.j'
    place = tab.js(where)
    tab.wait(
        "Number(document.documentElement.dataset.computed) >= 1 || source.get(`0/0/${"
        "R.place().top}/0/0`).peaks.some(x => x.w > 0.8)",
        600,
    )
    tab.wait('document.querySelector("#peaks button .num").textContent > "0.8"', 60)
    tab.click("#peaks button")
    say("needle", f"1 click from {place} to {tab.js(where)}", "4 clicks")
    took = tab.js("""(() => { const x = document.getElementById("search"); x.value = "needle";
        x.dispatchEvent(new Event("input")); return [R.searchTook, R.hits.length]; })()""")
    say("search", f"{took[0]:.1f} ms, {took[1]} hits", "100 ms")
    tab.js("R.map.whole()")
    for name, move in (("zoom", ZOOMING), ("pan", PANNING)):
        found = tab.js(f"({FRAMES})(5, {move})")
        say(
            name,
            f"{found['fps']:.0f} fps, worst gap {found['worst']:.0f} ms (empty page "
            f"{empty['fps']:.0f} fps, {empty['worst']:.0f} ms)",
            "30 fps, 120 ms",
        )
    sizes, since = [heap(tab)], time.perf_counter()
    server = [resident(pid)]
    while time.perf_counter() - since < pan:
        tab.js(f"({FRAMES})({min(10.0, pan)}, {PANNING})")
        sizes.append(heap(tab))
        server.append(resident(pid))
    half = len(sizes) // 2
    grown = (sizes[-1] - sizes[half]) / max(1e-9, (len(sizes) - 1 - half) * 10 / 600)
    asked = tab.js("source.times.length")
    say(
        "heap of the page",
        f"{sizes[0]:.0f} MB, after {pan:.0f} s of panning ({asked} tiles) {sizes[-1]:.0f} MB, most "
        f"{max(sizes):.0f}; the second half's slope gives {sizes[-1] + max(0.0, grown):.0f} MB "
        "after 10 minutes",
        "150 MB",
    )
    say(
        "memory of the server",
        f"{server[0]:.0f} MB, then {server[-1]:.0f}, most {max(server):.0f}; the recording has "
        f"{recorded:.0f} MB",
        "recording + 600 MB",
    )


def atlas_table(tab: Tab, heads: int, tokens: int) -> None:
    """Measure the atlas of many heads of a short text, and the making of overviews at length."""
    whole = needle_recording(tokens)
    tiles, times = HeadTiles(whole[0], 0), []
    for _ in range(4):
        since = time.process_time()
        head_overview(tiles)
        times.append(time.process_time() - since)
    each = statistics.median(times[1:])
    say(
        f"overviews of {heads} heads",
        f"{1e3 * each:.0f} ms of CPU a head of {tokens} tokens, so {each * heads:.0f} s",
        "60 s",
    )
    draw, layers = torch.Generator().manual_seed(2), -(-heads // 32)
    with torch.inference_mode(), Recorder(keep=()) as recorder, OverviewRecorder() as reducer:
        for n in range(layers):
            q, k = torch.randn(2, 1, 32, 512, 8, generator=draw)
            with named_scope("layers"), named_scope(str(n)):
                regard.attend(q, k, k, mask=masks.Causal())
    with regard.inspect.view(recorder.recording(), overviews=reducer.overviews) as server:
        tab.open("about:blank")
        tab.open(server.url)
        tab.wait('document.documentElement.dataset.ready === "yes"')
        tab.js('R.set({ view: "heads" })')
        tab.wait(f'document.querySelector("#atlas")?.dataset.drawn === "{32 * layers}"', 60)
        all_new = tab.js("""new Promise(done => { R.set({ scale: "linear" });
            setTimeout(() => done(R.atlasTook), 1500); })""")
        again = tab.js("""new Promise(done => { R.set({ sortBy: "entropy" });
            setTimeout(() => done(R.atlasTook), 1500); })""")
        say(
            f"atlas of {32 * layers} heads",
            f"{all_new:.0f} ms with all pictures coloured anew, {again:.0f} ms in another order",
            "300 ms",
        )


def main() -> None:
    """Make the recording, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--pan", type=float, default=60.0)
    parser.add_argument("--heads", type=int, default=1024)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        path = Path(folder) / "run.safetensors"
        regard.inspect.save(needle_recording(given.tokens), path)
        print(
            f"load of the machine: {os.getloadavg()[0]:.1f}\n\n"
            "| measure | bar | measured |\n|---|---|---|"
        )
        with served(path) as (process, address, token):
            server_table(asker(address, token), process.pid, given.tokens)
            tab = browser.tab(1024, 768)
            page_table(tab, address, token, process.pid, given.pan, path.stat().st_size / 1e6)
            say("errors of the page", "; ".join(tab.errors) or "none", "none")
        atlas_table(browser.tab(1280, 860), given.heads, given.tokens)
        print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
