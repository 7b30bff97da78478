"""The sentences of the one screen of `regard explain`, by language.

They have the form of the page's catalogues: {key: sentence}, with placeholders `{name}`, and every
language has the same keys with the same placeholders. A sentence with a count has its singular and
its plural, with a bar between them; a language without a plural has one form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.text import Text

from regard.view.report import PLACEHOLDER, check_language

SENTENCES: dict[str, dict[str, str]] = {
    "en": {
        "count.head": "{n} head|{n} heads",
        "count.key": "{n} key|{n} keys",
        "count.layer": "{n} layer|{n} layers",
        "count.number": "{n} number|{n} numbers",
        "count.other_key": "{n} other key|{n} other keys",
        "count.more_token": "{n} more token|{n} more tokens",
        "head.call": "call {name} of {calls}",
        "head.chosen": "This is {rule}.",
        "head.factor": "factor {n}",
        "head.note": "note: {note}",
        "head.place": "{layer}, {head} of {model} ({layers} of {heads}): ",
        "head.place_head": "head {n}",
        "head.place_layer": "Layer {n}",
        "head.reads": "{query} (token {i}) reads {key} (token {j}): {share}",
        "head.share": "{p} of its attention",
        "heads.columns": "  layer head  weight                           key token",
        "heads.title": "Largest weight of query {query} in each head, leaving out the first token",
        "keys.factor": "factor a",
        "keys.hidden": "{keys} hidden ({reasons})",
        "keys.rest": "{keys}: {sum} together",
        "keys.score_weight": "score s  weight p",
        "keys.separator": "; ",
        "keys.title": "What this query reads most (first {n}):",
        "link.additive": "additive score",
        "link.biased": "bias added",
        "link.capped": "capped",
        "link.dot": "dot product",
        "link.masked": "masked",
        "link.scaled": "scaled",
        "list.separator": ", ",
        "next.checked": "Checked: {numbers} computed again differ from the model's by {difference} "
        "at most",
        "next.choose": "--query --key --layer --head choose; [n]: section n of {page}",
        "next.go_on": "Go on: ",
        "next.options": "--full every step; --html FILE a page with all heads; --list all heads;",
        "note.edited": "an active Trace edits {taps} at {place}: the inputs of the kernel are "
        "edited, but the recomputed steps before them are not",
        "note.no_projection": "the recording has q, k, v and the output of each head, but not the "
        "projections around them",
        "note.random": "the weights are random, from seed {seed}: the computation is exact, but "
        "the attention pattern has no meaning",
        "note.trained": "the text has {n} tokens; the model was trained on at most {most}",
        "rule.first_alone": "the first head: there is no other token",
        "rule.first_key": "the first head: no head has weight on the key",
        "rule.first_mechanism": "the first head: this mechanism has no softmax weights to compare "
        "heads by",
        "rule.for_key": "the head with the largest weight of the query on the key",
        "rule.largest": "the head with the largest weight of the query on one key, leaving out the "
        "first token, the query itself and its neighbours",
        "sentence.more": "... {tokens}",
        "step.inputs": "inputs",
        "step.mask": "mask",
        "step.output": "output",
        "step.score": "score",
        "step.softmax": "softmax",
        "steps.additive": "s = w · tanh(q + k), w is learned: {links}",
        "steps.hidden": "the query may not see this key ({reason}): s = -∞",
        "steps.hidden_weight": "the weight of a hidden key is 0",
        "steps.inputs": "x is the state of a token, W_Q and W_K are learned: query q = W_Q x of ▶, "
        "key k = W_K x of ◆; their lengths are {q} and {k}",
        "steps.linear_factor": "none: the factor of this value is {p}",
        "steps.linear_score": "no score: this mechanism weights each value by a recurrence",
        "steps.links": "q · k, the products of their numbers summed, then: {links}",
        "steps.output": "z = Σ p v over keys, value v = W_V x: of z, length {z}, this key gives "
        "{row}",
        "steps.output_linear": "z = Σ a v over keys, value v = W_V x: of z, length {z}, this key "
        "gives {row}",
        "steps.output_share": "; the head gives {share} of the layer's output",
        "steps.score": "s = q · k (dot product) × scale = {dot} × {scale} = {s}",
        "steps.sink": "p = exp(s) / (sum of exp over all visible keys and the sink) = {p}",
        "steps.softmax": "p = exp(s) / Σ exp(s) over visible keys = exp({s} - {lse}) = {p}; {lse} "
        "is the logarithm of that sum",
        "steps.title": "How the number is computed: ",
        "steps.vectors": "{p}, from vectors of {numbers}",
        "steps.visible": "this key is visible; {hidden} of {keys} are hidden from the query",
        "why.and": "{a} and {b}",
        "why.after": "after the first {n}",
        "why.chunk": "other chunk of {n}",
        "why.document": "other document",
        "why.function": "not allowed by the given function",
        "why.future": "future",
        "why.inside": "inside {mask}",
        "why.kernel": "the kernel",
        "why.later_block": "later block of {n}",
        "why.matrix": "not allowed by the given matrix",
        "why.not_global": "not global",
        "why.outside_blocks": "outside the blocks of {mask}",
        "why.outside_steps": "outside the steps of {mask}",
        "why.outside": "outside {mask}",
        "why.padding": "padding",
        "why.selected": "not selected",
    },
    "zh": {
        "count.head": "{n} 个头",
        "count.key": "{n} 个键",
        "count.layer": "{n} 层",
        "count.number": "{n} 个数",
        "count.other_key": "其余 {n} 个键",
        "count.more_token": "还有 {n} 个 token",
        "head.call": "第 {name} 次调用，全部调用为 {calls}",
        "head.chosen": "选它的理由：{rule}。",
        "head.factor": "系数 {n}",
        "head.note": "注意：{note}",
        "head.place": "{model}（{layers}，每层 {heads}）的{layer} {head}：",
        "head.place_head": "头 {n}",
        "head.place_layer": "第 {n} 层",
        "head.reads": "{query}（第 {i} 个 token）读取 {key}（第 {j} 个 token）：{share}",
        "head.share": "占其注意力的 {p}",
        "heads.columns": "     层   头  权重                              键 token",
        "heads.title": "查询 {query} 在每个头里的最大权重（不计首个 token）",
        "keys.factor": "系数 a",
        "keys.hidden": "{keys}被遮住（{reasons}）",
        "keys.rest": "{keys}合计 {sum}",
        "keys.score_weight": "得分 s   权重 p",
        "keys.separator": "；",
        "keys.title": "这个查询读得最多的键（前 {n} 个）：",
        "link.additive": "加性得分",
        "link.biased": "加偏置",
        "link.capped": "软上限",
        "link.dot": "点积",
        "link.masked": "加掩码",
        "link.scaled": "缩放",
        "list.separator": "、",
        "next.checked": "核对：重新计算的 {numbers}与模型自己的数最多相差 {difference}",
        "next.choose": "--query、--key、--layer、--head 选择对象；[n]：见 {page} 第 n 节",
        "next.go_on": "接下来：",
        "next.options": "--full 全部步骤；--html FILE 所有头的网页；--list 列出各头；",
        "note.edited": "打开的 Trace 改动了 {place} 处的 {taps}：内核的输入已改动，"
        "此前重新计算的各步没有改动",
        "note.no_projection": "记录里有 q、k、v 和各头的输出，没有它们前后的投影",
        "note.random": "权重是随机的（种子 {seed}）：计算是精确的，但注意力图样没有意义",
        "note.trained": "文本有 {n} 个 token；模型训练时最长为 {most} 个",
        "rule.first_alone": "第一个头，因为没有其他 token",
        "rule.first_key": "第一个头，因为没有头对这个键有权重",
        "rule.first_mechanism": "第一个头，因为这种机制没有可供比较的 softmax 权重",
        "rule.for_key": "该查询对这个键权重最大的头",
        "rule.largest": "该查询对单个键权重最大的头（不计首个 token、查询自身及其相邻的 token）",
        "sentence.more": "……{tokens}",
        "step.inputs": "输入",
        "step.mask": "掩码",
        "step.output": "输出",
        "step.score": "得分",
        "step.softmax": "softmax",
        "steps.additive": "s = w · tanh(q + k)，w 由训练得到：{links}",
        "steps.hidden": "该查询不能看到这个键（{reason}）：s = -∞",
        "steps.hidden_weight": "被遮住的键权重为 0",
        "steps.inputs": "x 是一个 token 的状态，W_Q、W_K 由训练得到：查询 q = W_Q x（▶ 的 x），"
        "键 k = W_K x（◆ 的 x）；长度分别为 {q} 和 {k}",
        "steps.linear_factor": "没有：这个值的系数是 {p}",
        "steps.linear_score": "没有得分：这种机制用递推为每个值加权",
        "steps.links": "q · k（逐维相乘再求和），然后：{links}",
        "steps.output": "z = Σ p v（对各键求和），值 v = W_V x：z 的长度为 {z}，其中这个键贡献 "
        "{row}",
        "steps.output_linear": "z = Σ a v（对各键求和），值 v = W_V x：z 的长度为 {z}，"
        "其中这个键贡献 {row}",
        "steps.output_share": "；这个头占本层输出的 {share}",
        "steps.score": "s = q · k（点积）× scale = {dot} × {scale} = {s}",
        "steps.sink": "p = exp(s) /（所有可见的键与 sink 的 exp 之和）= {p}",
        "steps.softmax": "p = exp(s) / Σ exp(s)（对可见的键求和）= exp({s} - {lse}) = {p}；{lse} "
        "是这个和的自然对数",
        "steps.title": "这个数是怎样算出来的：",
        "steps.vectors": "{p}，来自 {numbers}组成的向量",
        "steps.visible": "这个键可见；{keys}中有 {hidden} 个对该查询不可见",
        "why.and": "{a}且{b}",
        "why.after": "在前 {n} 个之后",
        "why.chunk": "属于另一个分块（每块 {n} 个）",
        "why.document": "属于另一篇文档",
        "why.function": "被给定的函数排除",
        "why.future": "位于未来",
        "why.inside": "在 {mask} 之内",
        "why.kernel": "被内核排除",
        "why.later_block": "属于之后的块（每块 {n} 个）",
        "why.matrix": "被给定的矩阵排除",
        "why.not_global": "不是全局 token",
        "why.outside_blocks": "在 {mask} 的块之外",
        "why.outside_steps": "不在 {mask} 的步长上",
        "why.outside": "在 {mask} 之外",
        "why.padding": "属于填充",
        "why.selected": "未被选中",
    },
}
"""{language: {key: sentence}}."""


class Sentences:
    """The sentences in one language.

    Args:
        lang: "en" or "zh".

    Raises:
        ArgumentError: there is no such language.

    >>> Sentences("en").count("head", 1), Sentences("zh").count("head", 2)
    ('1 head', '2 个头')
    """

    def __init__(self, lang: str) -> None:
        self.lang = check_language(lang)
        self._sentences: Mapping[str, str] = SENTENCES[lang]

    def __call__(self, key: str, /, **values: str) -> str:
        """Return a sentence with its placeholders filled in."""
        return PLACEHOLDER.sub(lambda match: values[match[1]], self._sentences[key])

    def styled(self, key: str, /, **values: str | Text) -> Text:
        """Return a sentence as styled text; values may bring their own style."""
        text = Text()
        # a split by a pattern with one group has its placeholders at the odd places
        for n, part in enumerate(PLACEHOLDER.split(self._sentences[key])):
            text.append(values[part] if n % 2 else part)
        return text

    def named(self, group: str, name: str) -> str:
        """Return the sentence of a name within a group; the name itself if it has none."""
        return self._sentences.get(f"{group}.{name}", name)

    def count(self, noun: str, n: int) -> str:
        """Return a count with its noun."""
        one, _, many = self._sentences[f"count.{noun}"].partition("|")
        return (many if many and n != 1 else one).replace("{n}", f"{n:,}")

    def translated(self, group: str, english: str) -> str:
        """Return a text that other parts of the package made in English.

        Args:
            group: the first part of the keys that are tried, such as "rule".
            english: the text. One that no English sentence of the group can have made is returned
                as it is, such as the name of a mask that the user wrote.

        >>> Sentences("zh").translated("why", "outside window 4")
        '在 window 4 之外'
        """
        for key, sentence in SENTENCES["en"].items():
            if key.startswith(f"{group}.") and (values := _values(sentence, english)) is not None:
                if key == "why.and":
                    values = {name: self.translated(group, x) for name, x in values.items()}
                return self(key, **values)
        return english


def _values(sentence: str, text: str) -> dict[str, str] | None:
    """Return the values of the placeholders with which a sentence is the text; None if none are.

    >>> _values("a {x} c", "a b c"), _values("a {x}", "b")
    ({'x': 'b'}, None)
    """
    parts = PLACEHOLDER.split(sentence)
    pattern = "".join(f"(?P<{x}>.+)" if n % 2 else re.escape(x) for n, x in enumerate(parts))
    match = re.fullmatch(pattern, text)
    return None if match is None else match.groupdict()
