"""One Chinese word for one idea, in pages, in what commands print, and in figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from regard.language import catalogue

ROOT = Path(__file__).parents[2]
OTHER_WORDS = {
    "潜向量": ("隐向量", "潜变量", "潜在向量"),
    "分数": ("(?<![记值取懂])得分(?![开清])", "打分值"),
    "内核": (r"(?<=[\u4e00-\u9fff]) ?kernels?(?![\w(])", "算核", "核函数"),
    "键值头": ("键/值头", "(?i:kv) 头"),
    "位置插值": ("线性插值", "位置内插"),
    "隐藏状态": ("隐状态", "隐含状态"),
    "掩码": ("遮罩", "蒙版"),
    "窗口": ("滑窗",),
    "归一化": ("规范化", "正规化"),
    "检查点": ("快照",),
    "环形缓存": ("循环缓存",),
    "注意力图": ("注意力图样", "注意力图案", "注意力模式"),
    "循环": ("递推", "递归"),
    "格子": ("单元格", "方格"),
    "成本": ("(?<!额外)开销",),
}
"""The word of the glossary or the course, and patterns of words that mean the same."""


def chinese_texts() -> Iterator[tuple[str, str]]:
    """Where a text stands, and the text without code and links."""
    for path in sorted((ROOT / "docs").rglob("*.zh-CN.md")):
        text = re.sub(
            r"(?ms)^```.*?^```$|`[^`\n]*`|\]\([^)\s]*\)|<[^>]*>", "", path.read_text("utf-8")
        )
        yield path.name, text
    for folder in ("src/regard", "docs", "benchmarks", "experiments"):
        for path in sorted((ROOT / folder / "strings" / "zh").glob("*.json")):
            values = json.loads(path.read_text("utf-8")).values()
            yield path.name, re.sub(r"`[^`\n]*`", "", "\n".join(map(str, values)))
    for path in sorted((ROOT / "src" / "regard" / "view").rglob("zh.json")):
        values = json.loads(path.read_text("utf-8")).values()
        yield path.relative_to(ROOT).as_posix(), "\n".join(map(str, values))
    for path in sorted((ROOT / "docs" / "images" / "zh").glob("*.svg")):
        words = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text("utf-8"))
        yield path.name, "\n".join(words)


def wrong_words(text: str) -> list[str]:
    """The words of a text that have another name."""
    found = []
    for word, others in OTHER_WORDS.items():
        for other in others:
            found += [f"{x[0]}: write {word}" for x in re.finditer(other, text)]
    return found


def test_one_idea_has_one_word() -> None:
    texts = list(chinese_texts())
    assert len(texts) > 70
    wrong = {name: words for name, text in texts if (words := wrong_words(text))}
    assert wrong == {}


@pytest.mark.parametrize("word", OTHER_WORDS)
def test_each_word_is_in_use(word: str) -> None:
    assert sum(word in text for _, text in chinese_texts()) >= 2


def test_the_glossary_has_the_words() -> None:
    meanings = list(catalogue("regard", "zh").values())
    for word in ("潜向量", "分数", "内核", "掩码", "窗口"):
        assert any(x.startswith(f"{word}：") for x in meanings), word


def test_another_word_is_found() -> None:
    text = "隐向量的得分由 kernel 算，每个 kernel 记得分开算键/值头"
    found = wrong_words(text)
    assert [x.partition(":")[0].strip() for x in found] == [
        "隐向量",
        "得分",
        "kernel",
        "kernel",
        "键/值头",
    ]
