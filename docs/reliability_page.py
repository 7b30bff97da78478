"""The tables of docs/reliability.md: the last figures, and the known faults of dependencies.

    python -m docs.reliability_page           # write the tables of both pages again
    python -m docs.reliability_page --probe   # look for each fault in the installed versions first

The figures are read from docs/reliability/*.json, which the commands of the page write.
"""

# ruff: noqa: E501  (texts of the ledger)
from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs/reliability"
PAGES = {"en": ROOT / "docs/reliability.md", "zh": ROOT / "docs/reliability.zh-CN.md"}
PART = re.compile(
    r"(<!-- (\w+): made by docs/reliability_page\.py -->\n).*?(<!-- end -->)", re.DOTALL
)


@dataclass(frozen=True)
class Fault:
    """A fault of a dependency.

    probe: whether the installed version has it.
    what, ours: what happens there, and what regard does, in English and Chinese.
    """

    package: str
    probe: Callable[[], bool]
    what: tuple[str, str]
    ours: tuple[str, str]


def _nan_becomes_zero() -> bool:
    import torch

    x = torch.ones(1, 1, 3, 8)
    q = x.clone()
    q[0, 0, 0, 0] = torch.nan
    out = torch.nn.functional.scaled_dot_product_attention(q, x, x)
    return bool((out[0, 0, 0] == 0).all())


def _values_are_cut() -> bool:
    import torch

    q, k, v = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 6, 8), torch.ones(1, 1, 3, 8)
    try:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    except RuntimeError:
        return False
    return True


def _module_gives_nan() -> bool:
    import torch

    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, hidden = torch.ones(1, 3, 8), torch.ones(1, 3, dtype=torch.bool)
    out, _ = layer(x, x, x, key_padding_mask=hidden, need_weights=True)
    return bool(out.isnan().any())


def _encoder_gives_nan() -> bool:
    import torch

    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x, hidden = torch.ones(2, 3, 8), torch.tensor([[False] * 3, [True] * 3])
    with torch.inference_mode():
        return bool(layer(x, src_key_padding_mask=hidden)[1].isnan().any())


def _sentinels_pass_gradients() -> bool:
    import torch

    q, k, v = (torch.randn(1, 1, 2, 8, requires_grad=True) for _ in range(3))
    mask = torch.full((2, 2), torch.finfo(torch.float32).min)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out.sum().backward()
    assert v.grad is not None
    return bool(v.grad.abs().sum() > 0)


def _fork_hangs() -> bool:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.ones(600, 600)
    (x @ x).exp()
    child = os.fork()
    if child == 0:
        (x @ x).exp()
        os._exit(0)
    until = time.monotonic() + 20
    ended = False
    while not ended and time.monotonic() < until:
        ended = os.waitpid(child, os.WNOHANG)[0] == child
        time.sleep(0.05)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    torch.set_num_threads(before)
    return not ended


def _duplicates_are_read() -> bool:
    from safetensors import SafetensorError, safe_open

    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = f'{{"a":{entry},"a":{entry}}}'.encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.safetensors")
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"x")
        try:
            with safe_open(path, framework="numpy"):
                return True
        except SafetensorError:
            return False


def _long_pieces_kill() -> bool:
    """In a process of its own, which it ends."""
    code = "from tokenizers.models import Unigram; Unigram([('é' * 70000, 0.0)], 0)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode < 0  # noqa: S603 (our own code)


def _join_forgets_a_thread() -> bool:
    thread = threading.Thread(target=time.sleep, args=(1.5,))
    thread.start()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with contextlib.suppress(KeyboardInterrupt):
        thread.join(1.0)
    begin = time.monotonic()
    thread.join()
    return time.monotonic() - begin < 0.3


def _accept_floods() -> bool:
    import ast
    import inspect
    import textwrap
    from asyncio.selector_events import BaseSelectorEventLoop

    # after the first refusal of the system, does the loop over the backlog go on?
    source = textwrap.dedent(inspect.getsource(BaseSelectorEventLoop._accept_connection))
    refused = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.If)]
    branch = next(n for n in refused if "EMFILE" in ast.unparse(n.test))
    return not any(isinstance(n, ast.Return | ast.Break) for n in branch.body)


REFUSED = ("refused before any kernel runs", "在任何内核运行之前拒绝")
LEDGER = {
    "nan-becomes-zero": Fault(
        "torch",
        _nan_becomes_zero,
        ("the CPU kernel of scaled_dot_product_attention turns NaN in a query into an output of 0 where there are few keys",
         "键很少时，scaled_dot_product_attention 的 CPU 内核把查询中的 NaN 变成输出 0"),
        ("NaN in visible data propagates; the kernel is not given such calls", "可见数据中的 NaN 会传播；这类调用不交给该内核"),
    ),
    "values-are-cut": Fault(
        "torch",
        _values_are_cut,
        ("scaled_dot_product_attention on a CPU accepts fewer values than keys", "CPU 上的 scaled_dot_product_attention 接受比键少的值"),
        REFUSED,
    ),
    "module-gives-nan": Fault(
        "torch",
        _module_gives_nan,
        ("MultiheadAttention with need_weights=True gives NaN for a row that sees no key", "need_weights=True 的 MultiheadAttention 对看不到任何键的行给出 NaN"),
        ("output 0, weights 0, gradient 0", "输出 0，权重 0，梯度 0"),
    ),
    "encoder-gives-nan": Fault(
        "torch",
        _encoder_gives_nan,
        ("TransformerEncoderLayer in evaluation gives NaN for a text that is all padding", "评估模式的 TransformerEncoderLayer 对全是填充的文本给出 NaN"),
        ("output 0 of the attention, as above", "注意力输出 0，同上"),
    ),
    "sentinels-pass-gradients": Fault(
        "torch",
        _sentinels_pass_gradients,
        ("a row of finfo.min is no mask: the output is the mean of the values, and gradients flow into them", "一整行 finfo.min 不是掩码：输出是各值的平均，梯度会流入它们"),
        ("the converter of additive masks takes entries of at most finfo.min / 2 for hidden", "加性掩码的转换器把不大于 finfo.min / 2 的项当作被隐藏"),
    ),
    "fork-hangs": Fault(
        "torch",
        _fork_hangs,
        ("a process that was forked after threads of OpenMP ran waits for ever in its first parallel loop", "在 OpenMP 线程运行之后 fork 出的进程，会在它的第一个并行循环里一直等待"),
        ("regard.parallel forks its ranks from a server that has run nothing (forkserver); where you fork, call torch.set_num_threads(1) before", "regard.parallel 从一个什么都没运行过的服务进程（forkserver）派生各个 rank；如果你自己 fork，请先调用 torch.set_num_threads(1)"),
    ),
    "duplicates-are-read": Fault(
        "safetensors",
        _duplicates_are_read,
        ("a header that names a tensor twice is accepted", "接受两次命名同一张量的文件头"),
        ("refused with the name", "拒绝，并说出名字"),
    ),
    "long-pieces-kill": Fault(
        "tokenizers",
        _long_pieces_kill,
        ("a unigram model with a token of 70,000 characters kills the process when it is freed, by a recursion of that depth", "unigram 模型若有一个 70,000 个字符的词元，释放它时函数层层调用自身，会使进程崩溃"),
        ("tokens of more than 4,096 characters are refused", "拒绝超过 4,096 个字符的词元"),
    ),
    "join-forgets-a-thread": Fault(
        "Python",
        _join_forgets_a_thread,
        ("Thread.join that Ctrl-C interrupts takes a running thread for one that has ended", "被 Ctrl-C 打断的 Thread.join 把仍在运行的线程当作已结束"),
        ("the server waits for an event", "服务器等待一个事件"),
    ),
    "accept-floods": Fault(
        "Python",
        _accept_floods,
        ("asyncio, without free file descriptors, writes one error for each connection that it could wait for, again and again", "没有空闲文件描述符时，asyncio 为每个可等待的连接各写一条错误，反复不止"),
        ("regard view accepts one connection at a time, holds a bounded number, and bounds its log", "regard view 每次只接受一个连接，连接数有上限，日志也有上限"),
    ),
}  # fmt: skip


def probe() -> None:
    """Look for every fault, and write what was found with the versions."""
    import platform

    versions = {"Python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "safetensors", "tokenizers")}
    found = {name: fault.probe() for name, fault in LEDGER.items()}
    facts = {"date": f"{dt.date.today()}", "versions": versions, "found": found}
    (FIGURES / "dependencies.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


def read(name: str) -> dict[str, Any] | None:
    """The figures of a command, or None where they were not measured."""
    path = FIGURES / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def faults(*, chinese: bool) -> str:
    """The counts of `python -m tests.faults`."""
    found = read("faults")
    if found is None:
        return "未测量。" if chinese else "Not measured."
    head = [
        "writer",
        "fault",
        "cases",
        "the old, or nothing",
        "the new",
        "torn, blocked or left behind",
    ]
    if chinese:
        head = ["写入者", "故障", "次数", "旧的，或没有", "新的", "残缺、受阻或有残留"]
    rows = []
    for row in found["rows"]:
        before = row["nothing"] + row["old"]
        cases = before + row["new"] + row["torn"]
        counts = [str(x) for x in (cases, before, row["new"], row["wrong"])]
        rows.append([row["writer"], row["fault"], *counts])
    return f"{found['date']}:\n\n{table(head, rows)}"


def fuzz(*, chinese: bool) -> str:
    """The counts of `python -m tests.fuzz.guided`."""
    found = read("fuzz")
    if found is None:
        return "未测量。" if chinese else "Not measured."
    counts = found["counts"]
    head = ["readers", "files", "loaded", "refused", "anything else", "branches", "slowest"]
    if chinese:
        head = ["读取者", "文件", "已载入", "已拒绝", "其他", "分支", "最慢"]
    other = found["cases"] - counts.get("loaded", 0) - counts.get("refused", 0)
    row = [found["readers"], found["cases"], counts.get("loaded", 0), counts.get("refused", 0)]
    row += [other, found["branches"], f"{found['slowest_seconds']} s"]
    return f"{found['date']}:\n\n{table(head, [[str(x) for x in row]])}"


def mutants(*, chinese: bool) -> str:
    """How many mutants of each package the tests noticed."""
    found = read("mutants")
    if found is None:
        return "未测量。" if chinese else "Not measured."
    head = ["package", "mutants", "killed by the quick run", "by the full run", "equivalent"]
    head += ["survived, or not run"]
    if chinese:
        head = ["包", "变异体", "被快速运行发现", "被完整运行发现", "等价", "未发现或未运行"]
    statuses = ("killed", "killed by the full selection", "equivalent")
    rows, packages = [], sorted({name.partition(".")[0] for name in found["rows"]})
    for package in [*packages, ""]:
        mine = [x["status"] for name, x in found["rows"].items() if name.startswith(package)]
        counts = [mine.count(status) for status in statuses]
        name = package or ("合计" if chinese else "all")
        rows.append([name, *map(str, [len(mine), *counts, len(mine) - sum(counts)])])
    return f"{found['date']}, {found['commit']}:\n\n{table(head, rows)}"


def machines(*, chinese: bool) -> str:
    """What became of the tests on each other machine."""
    found = read("machines")
    if found is None:
        return "未测量。" if chinese else "Not measured."
    head = ["machine", "Python", "kernels", "commands", "passed", "failed", "skipped", "commit"]
    if chinese:
        head = ["机器", "Python", "内核", "命令", "通过", "失败", "跳过", "提交"]
    keys = ("python", "kernels", "commands", "passed", "failed", "skipped", "commit")
    rows = []
    for name, row in found["rows"].items():
        absent = [row["not_here"], *[""] * 5, row["commit"]]
        rows.append([name, *(absent if row["not_here"] else [str(row[key]) for key in keys])])
    return f"{found['date']}:\n\n{table(head, rows)}"


def endurance(*, chinese: bool) -> str:
    """What a process held at the start and at the end of many texts."""
    found = read("endurance")
    if found is None:
        return "未测量。" if chinese else "Not measured."
    head = ["model", "seconds", "texts", "tensors", "Python's objects", "resident MiB"]
    if chinese:
        head = ["模型", "秒", "文本", "张量", "Python 对象", "常驻内存 MiB"]
    held = [", ".join(map(str, found[key])) for key in ("tensors", "objects", "resident MiB")]
    row = [found["model"], str(found["seconds"]), str(found["texts"]), *held]
    return f"{found['date']}:\n\n{table(head, [row])}"


def ledger(*, chinese: bool) -> str:
    """The known faults of dependencies, with the versions in which they were looked for."""
    facts = read("dependencies") or {"found": {}, "versions": {}}
    head = ["fault", "looked for in", "there", "here"]
    if chinese:
        head = ["缺陷", "所查版本", "那里", "这里"]
    words = (
        {True: "有", False: "没有", None: "未查"}
        if chinese
        else {True: "yes", False: "no", None: "not looked for"}
    )
    rows = [
        [fault.what[int(chinese)], f"{fault.package} {facts['versions'].get(fault.package, '')}", words[facts["found"].get(name)], fault.ours[int(chinese)]]
        for name, fault in LEDGER.items()
    ]  # fmt: skip
    return table(head, rows)


TABLES = {
    "faults": faults,
    "fuzz": fuzz,
    "mutants": mutants,
    "machines": machines,
    "endurance": endurance,
    "ledger": ledger,
}


def filled(text: str, *, chinese: bool) -> str:
    """A page with its tables made again."""
    return PART.sub(lambda m: f"{m[1]}\n{TABLES[m[2]](chinese=chinese)}\n\n{m[3]}", text)


def main() -> None:
    """Write the tables of both pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", action="store_true")
    if parser.parse_args().probe:
        probe()
    for language, path in PAGES.items():
        path.write_text(filled(path.read_text("utf-8"), chinese=language == "zh"), "utf-8")


if __name__ == "__main__":
    main()
