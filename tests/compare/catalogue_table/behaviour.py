"""What each mechanism computes beside softmax attention over all earlier tokens, and what becomes of
it in texts longer than those of its training.

A mechanism that no group names is exact; its positions are the rotary angles that its module has,
or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from regard.nn.variants import VARIANTS


@dataclass(frozen=True)
class Behaviour:
    """A group of mechanisms: the words of its column, and what they mean, in both languages."""

    words: tuple[str, str]
    meaning: tuple[str, str]
    names: tuple[str, ...] = ()


EXACT = Behaviour(
    ("exact", "精确"),
    (
        "softmax over every earlier token, with no approximation; the scores may have more terms",
        "对之前的每个词元做 softmax，没有近似；分数可以有更多的项",
    ),
)
RESULTS = (
    EXACT,
    Behaviour(
        ("exact, fewer tokens", "精确，词元较少"),
        (
            "exact softmax over the tokens that a fixed mask leaves",
            "对固定掩码留下的词元做精确的 softmax",
        ),
        ("sliding_window", "local_global", "chunked", "packed", "longformer", "dilated")
        + ("bigbird", "sparse_strided", "sparse_fixed", "streaming", "lm_infinite"),
    ),
    Behaviour(
        ("chosen tokens", "选出的词元"),
        (
            "exact softmax over the tokens that a score chooses for this query; all stay in the "
            "cache (`nsa` adds a result over means of blocks)",
            "对分数为该查询选出的词元做精确的 softmax；所有词元都留在缓存里（`nsa` 再加上块平均值上的结果）",
        ),
        ("nsa", "moba", "dsa", "dynamic_mask", "top_k"),
    ),
    Behaviour(
        ("drops tokens", "丢弃词元"),
        (
            "exact until the budget is full; then tokens that the rule drops are gone for every "
            "later query",
            "在预算用完之前是精确的；之后，规则丢弃的词元对以后的查询都不存在",
        ),
        ("h2o", "tova", "snapkv", "key_norm", "keydiff"),
    ),
    Behaviour(
        ("other weights", "其他权重"),
        (
            "every earlier token, exactly, but the weights are not those of one softmax",
            "精确地使用之前的每个词元，但权重不是一个 softmax 的权重",
        ),
        ("sigmoid_attention", "relu_attention", "softpick", "entmax", "signed_softmax")
        + ("stick_breaking", "talking_heads", "differential", "differential_v2"),
    ),
    Behaviour(
        ("a state", "状态"),
        (
            "all earlier tokens are summed in a state of fixed size; there is no softmax",
            "之前的所有词元都累加进大小固定的状态；没有 softmax",
        ),
        ("linear_attention", "retention", "gated_linear", "delta_net", "gated_delta_net")
        + ("kimi_delta", "gated_delta_2", "comba", "delta_product", "preconditioned_delta")
        + ("mesa", "titans_linear", "lightning", "hgrn2", "lightnet", "mamba2", "rwkv4", "rwkv6")
        + ("mlstm", "gsa", "abc", "rebased", "power_attention", "cosformer"),
    ),
    Behaviour(
        ("approximation", "近似"),
        (
            "a state whose features approximate the exponential of softmax attention",
            "状态的特征近似 softmax 注意力中的指数函数",
        ),
        ("performer", "based"),
    ),
    Behaviour(
        ("segment and state", "分段加状态"),
        (
            "exact inside a segment; all earlier segments are summed in a state of fixed size",
            "在一个分段内是精确的；更早的分段都累加进大小固定的状态",
        ),
        ("infini", "infini_delta"),
    ),
    Behaviour(
        ("a filter", "滤波器"),
        (
            "a filter over the last 3 tokens; no token chooses another",
            "作用于最后 3 个词元的滤波器；词元之间没有选择",
        ),
        ("short_convolution",),
    ),
)

NEW_ANGLES = Behaviour(
    ("new angles", "新的角度"),
    (
        "rotary angles beyond those of training are new to the model, and quality falls, unless "
        "they are scaled (`regard extend`)",
        "超出训练长度的旋转角度是模型没有见过的，质量会下降，除非缩放角度（`regard extend`）",
    ),
    ("transformer_xl",),
)
NO_POSITIONS = Behaviour(
    ("no positions of its own", "自身没有位置"),
    (
        "nothing in the layer depends on the length; a learned or sinusoidal position in the "
        "embedding, if there is one, is the limit, and weights spread over more tokens",
        "层中没有任何部分取决于长度；若嵌入里有可学习的或正弦的位置，限制来自那里；权重会分散到更多词元上",
    ),
)
BEYOND = (
    NEW_ANGLES,
    NO_POSITIONS,
    Behaviour(
        ("last tokens only", "只看最后的词元"),
        (
            "any length at the same cost; what is older reaches a token only through the layers "
            "below, and exact recall of it is lost",
            "任意长度，代价不变；更旧的内容只能经由下面的层传来，失去对它的精确回忆",
        ),
        ("sliding_window", "dilated", "short_convolution"),
    ),
    Behaviour(
        ("own part only", "只看自己的部分"),
        (
            "a token sees nothing before its chunk or document",
            "词元看不到自己的块或文档之前的任何内容",
        ),
        ("chunked", "packed"),
    ),
    Behaviour(
        ("first and last tokens", "最前和最后的词元"),
        (
            "any length, with distances that stay within those of training; the tokens between "
            "are lost",
            "任意长度，距离保持在训练过的范围内；中间的词元会丢失",
        ),
        ("streaming", "lm_infinite"),
    ),
    Behaviour(
        ("new angles in some layers", "部分层有新的角度"),
        (
            "layers with windows, or without positions, meet nothing new; the others meet new "
            "angles",
            "有窗口或没有位置的层不会遇到新情况；其余的层会遇到新的角度",
        ),
        ("local_global", "irope"),
    ),
    Behaviour(
        ("sharper with length", "随长度变尖锐"),
        (
            "the scores grow with the length, so that the softmax does not become flat; rotary "
            "angles are still new",
            "分数随长度增大，使 softmax 不会变平；旋转角度仍是新的",
        ),
        ("position_temperature", "scalable_softmax"),
    ),
    Behaviour(
        ("distances repeat", "距离重复"),
        (
            "made for this: a trained model meets no new distance, but the order of far tokens "
            "becomes coarse or is lost",
            "为此设计：训练好的模型不会遇到新的距离，但远处词元的顺序变粗或丢失",
        ),
        ("dual_chunk", "self_extend", "rerope"),
    ),
    Behaviour(
        ("far tokens fade", "远处的词元变弱"),
        (
            "a penalty grows with the distance, or with gates between the tokens: nothing is new, "
            "and far tokens get little weight",
            "惩罚随距离或词元之间的门增长：没有新情况，但远处的词元权重很小",
        ),
        ("alibi", "kerple", "forgetting", "cable", "stick_breaking"),
    ),
    Behaviour(
        ("far tokens look alike", "远处的词元无法区分"),
        (
            "all distances beyond a limit share one bias, or are scaled into a fixed range",
            "超过某个界限的所有距离共用一个偏置，或被缩放到固定范围",
        ),
        ("t5", "shaw", "deberta", "relative_logits", "fire", "cope"),
    ),
    Behaviour(
        ("positions from the tokens", "位置来自词元"),
        (
            "positions are products of maps that the tokens between give: no number of the length "
            "enters, and long products fade",
            "位置是由中间词元给出的映射之积：不含长度的数值，长的乘积会变弱",
        ),
        ("path",),
    ),
    Behaviour(
        ("fixed pattern", "固定模式"),
        (
            "every query sees a part of the distances only; what falls between is seen through "
            "other layers",
            "每个查询只看到部分距离；其间的内容要经由其他层才能看到",
        ),
        ("longformer", "bigbird", "sparse_strided", "sparse_fixed"),
    ),
    Behaviour(
        ("older text fades", "较旧的内容变弱"),
        (
            "any length at the same cost; a decay or a gate forgets, and exact recall of one "
            "earlier token is lost",
            "任意长度，代价不变；衰减或门会遗忘，失去对某个早先词元的精确回忆",
        ),
        ("retention", "gated_linear", "gated_delta_net", "kimi_delta", "gated_delta_2", "comba")
        + ("delta_product", "preconditioned_delta", "mesa", "titans_linear", "lightning", "hgrn2")
        + ("lightnet", "mamba2", "rwkv4", "rwkv6", "mlstm", "gsa", "abc"),
    ),
    Behaviour(
        ("the state fills up", "状态被填满"),
        (
            "any length at the same cost; nothing decays, so that more tokens than the state has "
            "rows disturb one another",
            "任意长度，代价不变；没有衰减，词元多于状态的行数时会互相干扰",
        ),
        ("linear_attention", "delta_net", "based", "rebased", "power_attention", "performer")
        + ("cosformer", "infini", "infini_delta"),
    ),
    Behaviour(
        ("what was dropped is lost", "丢弃的内容会丢失"),
        (
            "any length within one budget; a later question about a dropped token has no answer; "
            "rotary angles are those of the text",
            "任意长度都在一个预算之内；以后关于被丢弃词元的问题没有答案；旋转角度仍按原文本计算",
        ),
        ("h2o", "tova", "snapkv", "key_norm", "keydiff"),
    ),
    Behaviour(
        ("a choice may miss", "选择可能遗漏"),
        (
            "a token reads a fixed number of others, and a wrong choice misses one; rotary angles "
            "are new",
            "每个词元读取固定数量的其他词元，错误的选择会遗漏；旋转角度是新的",
        ),
        ("nsa", "moba", "dsa", "dynamic_mask", "top_k"),
    ),
    Behaviour(
        ("the other sequence", "另一个序列"),
        (
            "the length of the second sequence decides; positions are those of its encoder",
            "由第二个序列的长度决定；位置来自它的编码器",
        ),
        ("cross_attention", "bahdanau", "luong"),
    ),
)


def result_of(name: str) -> Behaviour:
    """What a mechanism computes."""
    return next((group for group in RESULTS if name in group.names), EXACT)


def beyond_training(name: str) -> Behaviour:
    """What becomes of a mechanism in texts longer than those of its training."""
    for group in BEYOND:
        if name in group.names:
            return group
    module = VARIANTS[name].example()
    return NEW_ANGLES if has_angles(module) else NO_POSITIONS


def has_angles(module: nn.Module) -> bool:
    """Whether queries and keys are rotated by their positions."""
    return any("Rotary" in type(part).__name__ for part in module.modules())
