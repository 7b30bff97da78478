"""The figures of the model `tiny` that the pages quote, and the lines in which they stand.

`python -m tests.docs.tiny_figures` measures them again with the commands of the pages, in about
15 minutes on one thread, and writes docs/tiny.json. `python -m tests.docs.tiny_figures lines`
prints the lines, from which the pages are corrected; tests/docs/test_tiny_figures.py compares.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "tiny.json"
RESULTS = {
    "longer": "`tiny` without an extension is {:.2f} nats worse at four times its trained length.",
    "longer-linear": "It is {:.2f} nats worse, without fine-tuning.",
    "longer-ntk": "It is {:.2f} nats worse.",
    "longer-dynamic": "It is {:.2f} nats worse; the small model finds the key at twice its length "
    "{last:.2f} times as often.",
    "longer-yarn": "It is {:.2f} nats worse; the key is found {last:.2f} times as often.",
    "longer-llama3": "It is {:.2f} nats worse; the key is found {last:.2f} times as often.",
    "yarn-tuning": "Without fine-tuning it is within {:.2f} nats.",
    "features": "The best dim separates tokens with a feature from others with an accuracy of "
    "{:.0%}, and the best direction with {second:.0%}.",
}
"""The result of each claim about `tiny`, as docs/claims.md words it."""
CHINESE_RESULTS = {
    "longer": "不做扩展的 `tiny` 在四倍训练长度处差 {:.2f} nat。",
    "longer-linear": "不微调时差 {:.2f} nat。",
    "longer-ntk": "差 {:.2f} nat。",
    "longer-dynamic": "差 {:.2f} nat；小模型在两倍长度处找到钥匙的次数是原来的 {last:.2f}。",
    "longer-yarn": "差 {:.2f} nat；找到钥匙的次数是原来的 {last:.2f}。",
    "longer-llama3": "差 {:.2f} nat；找到钥匙的次数是原来的 {last:.2f}。",
    "yarn-tuning": "不微调，差别也在 {:.2f} nat 以内。",
    "features": "最好的一维区分有无某特征的词元，准确率 {:.0%}，最好的方向 {second:.0%}。",
}
VERDICTS = {x: x for x in ("holds", "holds with limits", "does not hold", "undecided")}
CHINESE_VERDICTS = dict(zip(VERDICTS, ("成立", "有限度地成立", "不成立", "无法判定"), strict=True))
CONVERSIONS = (
    "--to mla --rank 96",
    "--kv-heads 2 --groups svd",
    "--kv-heads 2 --groups mean",
)
HEALED = "--tokens 10240 --length 256 --heal 20 --lr 3e-4 --batch 2"
SCALED = ("dynamic", "yarn", "llama3")


def measure() -> dict[str, Any]:
    """Run the commands, and keep what the pages quote."""
    extended = printed_json("regard extend tiny --threads 1")
    methods = {
        name: {
            "perplexity": {row["length"]: row["perplexity"] for row in method["by_length"]},
            "saved": {
                row["length"]: [x["saved"] for x in row["needle"] if x["depth"] in (0.25, 0.75)]
                for row in method["by_length"]
            },
        }
        for name, method in extended["methods"].items()
    }
    claims = {}
    for claim in RESULTS:
        (found,) = printed_json(f"experiments {claim}")["claims"]
        values = [check["value"] for check in found["checks"]]
        claims[claim] = {"verdict": found["verdict"], "values": values}
    conversions = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, options in enumerate(CONVERSIONS):
            found = printed_json(f"regard convert tiny {folder}/{number} {options} {HEALED}")
            keys = ("loss_before", "held_before", "loss_after", "held_after")
            conversions[options] = [found["finetuning"][key] for key in keys]
    return {
        "weights": digest(),
        "machine": extended["machine"],
        "methods": methods,
        "cache": extended["methods"]["dynamic"]["cache"],
        "claims": claims,
        "conversions": conversions,
        "tiny_loss": found["measured"]["loss_before"],
    }


def digest() -> str:
    """The SHA-256 of the weights of `tiny`."""
    weights = ROOT / "src" / "regard" / "assets" / "tiny" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def printed_json(line: str) -> dict[str, Any]:
    """What a program, such as `regard cost tiny`, prints as JSON."""
    command = [sys.executable, "-m", *line.split(), "--json"]
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def lines(figures: dict[str, Any]) -> dict[str, list[str]]:
    """The lines of each page, as they must stand there."""
    methods, cache = figures["methods"], figures["cache"]
    pages: dict[str, list[str]] = {}
    for end, unscaled, interpolation, ntk, dynamic in (
        ("md", "unscaled", "interpolation", "NTK-aware", "dynamic NTK"),
        ("zh-CN.md", "不缩放", "插值", "NTK-aware", "动态 NTK"),
    ):
        named = {"unscaled": unscaled}
        course = {"linear": interpolation, "ntk": ntk, "dynamic": dynamic, "yarn": "YaRN"}
        pages[f"extend.{end}"] = [
            row(named.get(name, name), *(f"{x:.1f}" for x in method["perplexity"].values()))
            for name, method in methods.items()
        ] + [
            row(
                named.get(name, name),
                *(saved(x) for x in list(methods[name]["saved"].values())[1:]),
            )
            for name in ("unscaled", *SCALED)
        ]
        pages[f"learn/11-long-contexts.{end}"] = [
            row(word, *(f"{x:.1f}" for x in list(methods[name]["perplexity"].values())[1:]))
            for name, word in (named | course).items()
        ]
        pages[f"convert.{end}"] = [
            row(f"`{options}`", f"{a:.3f} / {b:.3f}", f"{c:.3f} / {d:.3f}")
            for options, (a, b, c, d) in figures["conversions"].items()
        ]
    stale, rotated, frozen, again = (
        f"{cache[name]['difference']:.2g}" for name in ("stale", "re_rotate", "frozen", "recompute")
    )
    frozen, again = (
        x.replace("e-0", "e-") for x in (f"{float(frozen):.0e}", f"{float(again):.0e}")
    )
    agree, reruns = (
        f"{cache['stale']['agreement']:.0%}".replace("%", " %"),
        cache["recompute"]["reruns"],
    )
    pages["extend.md"] += [
        row(
            "stale: keys stay as they were rotated (refused by regard)",
            f"{stale} deviations",
            agree,
            0,
        ),
        row("pre_rope, re_rotate: keys are rotated again", rotated, "100 %", 0),
        row("frozen: the frequencies of 1024 for every position", frozen, "100 %", 0),
        row("recompute: the default for such a checkpoint", again, "100 %", reruns),
    ]
    pages["extend.zh-CN.md"] += [
        row("stale：键保持当时的旋转（regard 拒绝）", f"{stale} 个标准差", agree, 0),
        row("pre_rope、re_rotate：重新旋转键", rotated, "100 %", 0),
        row("frozen：所有位置都用 1024 的频率", frozen, "100 %", 0),
        row("recompute：这类检查点的默认做法", again, "100 %", reruns),
    ]
    pages["convert.md"].append(f"`tiny` itself has {figures['tiny_loss']:.3f} on all of them")
    pages["convert.zh-CN.md"].append(f"`tiny` 本身在全部词元上是 {figures['tiny_loss']:.3f}")
    pages["claims.md"] = claim_rows(figures["claims"], VERDICTS, RESULTS)
    pages["claims.zh-CN.md"] = claim_rows(figures["claims"], CHINESE_VERDICTS, CHINESE_RESULTS)
    return pages


def claim_rows(
    claims: dict[str, Any], verdicts: dict[str, str], results: dict[str, str]
) -> list[str]:
    """The rows of claims: the verdict, and the first, the second or the last measured number."""
    rows = []
    for name, result in results.items():
        values = claims[name]["values"]
        words = result.format(values[0], second=values[1], last=values[-1]).replace("%", " %")
        rows.append(row(f"`{name}`", verdicts[claims[name]["verdict"]], words))
    return rows


def row(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def saved(depths: list[float]) -> str:
    """The nats saved at both depths."""
    return " / ".join(f"{x:.2f}" for x in depths)


if __name__ == "__main__":
    if sys.argv[1:] == ["lines"]:
        for page, texts in lines(json.loads(FILE.read_text("utf-8"))).items():
            print(f"\n{page}", *texts, sep="\n")
    else:
        FILE.write_text(json.dumps(measure(), indent=1) + "\n", "utf-8")
