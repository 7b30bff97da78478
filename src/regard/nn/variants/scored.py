"""Softmax attention with other steps from scores to weights, or with biases on the scores:
sigmoid, entmax and stick-breaking weights, forget gates, dynamic masks, relative vectors.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn

from regard.argument_checks import check_positive_sizes
from regard.biases import FIRE, Kerple
from regard.masks import Causal, Full, Window
from regard.nn.attention.attention import Attention
from regard.nn.blocks.norms import RMSNorm
from regard.nn.projections.data_bias import (
    DisentangledProjection,
    DynamicMaskProjection,
    ForgettingProjection,
    PathProjection,
    RelativeKeyProjection,
    RelativeLogitProjection,
    SelectiveProjection,
    SinusoidKeyProjection,
)
from regard.nn.projections.heads import HeadProjection
from regard.nn.variants.options import Grouped, HeadSize, Rotated
from regard.nn.variants.projections import Start
from regard.nn.variants.registry import variant
from regard.scores import (
    CoPE,
    Entmax,
    ReLU,
    ScalableSoftmax,
    Sigmoid,
    SignedSoftmax,
    Softpick,
    StickBreaking,
    TalkingHeads,
    TopK,
)


@variant(
    "weights",
    "p_ij = sigmoid(s_ij - ln(n)); z = sum_j p_ij v_j",
    "Ramapuram et al. 2024 (arXiv 2409.04431), equation 3 and section 4",
    users="none that is released; the paper trained models of 1B and 7B parameters",
    choose=(
        "rows should not compete for weight, and results should not depend on how keys are split"
    ),
    avoid="a public kernel or checkpoint is needed",
    where="n: number of keys that the query sees",
)
def sigmoid_attention(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Sigmoid attention: each key gets a weight by its own score, without competition between
    keys.
    """
    return Start(dim, heads, **options).attention(score=Sigmoid())


@variant(
    "weights",
    "p_ij = relu(s_ij) / n; z = sum_j p_ij v_j",
    "Wortsman et al. 2023 (arXiv 2309.08586), section 3",
    users="none that is released; studied in vision transformers",
    choose="hardware without a fast exponential function, or weights that are exactly 0",
    avoid="language models are trained from scratch: there it is less studied than softmax",
    where="n: number of keys that the query sees",
)
def relu_attention(
    dim: int, heads: int, *, power: float = 1.0, **options: Unpack[Rotated]
) -> Attention:
    """ReLU attention: the weight of a key is its rectified score, divided by the number of keys.

    Args:
        power: the exponent of the rectified score; 2 is squared ReLU.
    """
    return Start(dim, heads, **options).attention(score=ReLU(power))


@variant(
    "weights",
    "p_ij = relu(exp(s_ij) - 1) / sum_l abs(exp(s_il) - 1)",
    "Zuhri et al. 2025 (arXiv 2504.20966), equation 4",
    users="none that is released; the paper trained models of 340M and 1.8B parameters",
    choose="activations must have no outliers, and heads should rest without a sink",
    avoid="contexts are long: the paper reports weights that become small there",
)
def softpick(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Softpick: a rectified softmax in which a head may give no weight at all; it needs no sink."""
    return Start(dim, heads, **options).attention(score=Softpick())


@variant(
    "weights",
    "p_i = max over p of p s_i + H_a(p); z = sum_j p_ij v_j",
    "Peters et al. 2019 (arXiv 1905.05702), equation 9",
    users="none that is released; translation models of 2019",
    choose="weights must be exactly 0 for most keys, to be read by people",
    avoid="speed matters: the threshold needs a sort of each row, and no fused kernel has it",
    where=(
        "H_a: Tsallis entropy of order alpha; p: weights of a row that sum to 1; p_i: weights of "
        "query i; s_i: scores of query i"
    ),
)
def entmax(dim: int, heads: int, *, alpha: float = 1.5, **options: Unpack[Rotated]) -> Attention:
    """Entmax: weights that sum to 1 and are exactly 0 for keys with small scores.

    Args:
        alpha: 1.5, or 2 for sparsemax.
    """
    return Start(dim, heads, **options).attention(score=Entmax(alpha))


@variant(
    "weights",
    "p_ij = sign(s_ij) exp(abs(s_ij)) / sum_l exp(abs(s_il)); z = sum_j p_ij v_j",
    "Lv et al. 2024 (arXiv 2411.07176), equation 4",
    users="none that is released; the paper trained small language models",
    choose="a head should be able to subtract values as well as to add them",
    avoid="weights must be a mean of values, or fused kernels matter",
    where=(
        "sign: 1 for a positive score, -1 for a negative one; sum_j: sum over the visible keys; "
        "sum_l: sum over the visible keys; v_j: values of key j"
    ),
)
def signed_softmax(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Signed attention weights (Cog attention): a key with a negative score takes its values
    away.
    """
    return Start(dim, heads, **options).attention(score=SignedSoftmax())


@variant(
    "weights",
    "p_ij = sigmoid(s_ij) product_l (1 - sigmoid(s_il)), j < l < i",
    "Tan et al. 2024 (arXiv 2410.17980), equations 1 to 3",
    users="none that is released; the paper trained models of 1B and 3B parameters",
    choose="the nearest matching key should win, and texts grow longer than those of training",
    avoid="rows need a sum of 1, or a fused kernel other than the authors' own",
    where="l: position of a key between j and i; product_l: product over these keys",
)
def stick_breaking(dim: int, heads: int, **options: Unpack[Grouped]) -> Attention:
    """Stick-breaking attention: from the nearest key to the farthest, each takes a share of what is
    left.

    A token sees the tokens before it, and not itself. There are no position encodings: the order of
    the keys is part of the weights.
    """
    mask = Causal() & ~Window(1)
    return Start(dim, heads, **options).attention(score=StickBreaking(), mask=mask)


@variant(
    "weights",
    "z_h = softmax(a_h ln(n) q_h k_g^T / sqrt(D) + causal) v_g",
    "Nakanishi 2025 (arXiv 2501.19399), equation 2",
    users="none that is released with learned factors; Llama 4 scales queries by their position",
    choose="contexts become much longer than those of training",
    avoid="a checkpoint trained without it is used as it is",
    where="a_h: learned factor of a head; n: number of keys that the query sees",
)
def scalable_softmax(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Scalable-Softmax: scores grow with the logarithm of the number of keys, so that weights do
    not fade in long texts.

    The factor of each head is learned, from 0.43 on.
    """
    factors = nn.Parameter(torch.full((heads,), 0.43))
    return Start(dim, heads, **options).attention(score=ScalableSoftmax(factors))


@variant(
    "weights",
    "p_h = sum_g A_hg softmax(sum_m B_gm s_m)",
    "Shazeer et al. 2020 (arXiv 2003.02436), section 3",
    users="CaiT; translation and language models of the paper",
    choose="quality at a fixed number of heads matters more than speed",
    avoid="fused kernels matter: all heads of a pair are needed at once",
    where=(
        "A_hg: learned mixture of weights; B_gm: learned mixture of scores; p_h: weights of head "
        "h; s_m: scores of head m"
    ),
)
def talking_heads(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Talking-heads attention: heads mix their scores before the softmax, and their weights after
    it.

    Both mixtures begin as the identity, which is `gqa`.
    """
    mixes = (nn.Parameter(torch.eye(heads)) for _ in range(2))
    return Start(dim, heads, **options).attention(score=TalkingHeads(*mixes))


@variant(
    "weights",
    "z = softmax(topk of s_ij + causal) v",
    "Zhao et al. 2019 (arXiv 1912.11637), equation 3",
    users=(
        "none that is released for language; the rule is common in inference with a trained model"
    ),
    choose="most of a row's weight is noise, and weights must be concentrated",
    avoid="speed is the aim: all scores are computed first; take dsa or nsa",
    example={"top": 3},
)
def top_k(dim: int, heads: int, *, top: int = 32, **options: Unpack[Rotated]) -> Attention:
    """Top-k attention: the softmax runs over the k largest scores of each row.

    Args:
        top: the number of keys that keep their weight.
    """
    return Start(dim, heads, **options).attention(score=TopK(top))


@variant(
    "weights",
    "p_ij = sum_l sigmoid(s_il), j <= l <= i; z = softmax(s_ij + q_i e[p_ij] + causal) v",
    "Golovneva et al. 2024 (arXiv 2405.18719), equations 3 to 6",
    users="none that is released; the paper trained small language models",
    choose="positions should count words, sentences or chosen tokens instead of all tokens",
    avoid="speed matters: each row needs all its scores before the positions are known",
    where=(
        "e: learned embeddings, one for each number; l: position of a key from j to i; p_ij: "
        "number of keys from j to i that the gates of query i choose; q_i: query i; sum_l: sum "
        "over the keys from j to i"
    ),
    example={"positions": 6},
)
def cope(dim: int, heads: int, *, positions: int = 64, **options: Unpack[Grouped]) -> Attention:
    """Contextual position encoding: a query counts the keys that its gates choose, and adds the
    embedding of that number to the score.

    The embeddings are shared by all heads.

    Args:
        positions: the number of embeddings; larger numbers share the last one.
    """
    start = Start(dim, heads, **options)
    check_positive_sizes("cope", positions=positions, head_dim=start.D)
    table = nn.Parameter(torch.randn(positions, start.D) * start.D**-0.5)
    return start.attention(score=CoPE(table))


@variant(
    "biases",
    "z = softmax(q_i k_j / sqrt(D) + sum_l ln(sigmoid(f_l)) + causal) v, j < l <= i",
    "Lin et al. 2025 (arXiv 2503.02130), equations 6 to 8",
    users="none that is released as an assistant; the paper trained models up to 760M parameters",
    choose="recent text should count more, by gates that the tokens compute, and without positions",
    avoid="old tokens must be found exactly wherever they are, or positions are needed",
    where=(
        "f_l: forget gate of token l; k_j: key j; l: position of a token after j, up to i; q_i: "
        "query i; sum_l: sum over the tokens after j, up to i"
    ),
)
def forgetting(dim: int, heads: int, **options: Unpack[Grouped]) -> Attention:
    """Forgetting attention (FoX): every token has a forget gate, which multiplies the weights of
    all earlier tokens.

    There are no position encodings. A cache stores one more number per token and head.
    """
    start = Start(dim, heads, **options)
    return start.attention(ForgettingProjection(*start.maps(), dim, gate="sigmoid"))


@variant(
    "biases",
    "z = softmax(q_i k_j / sqrt(D) - sum_l softplus(f_l) + causal) v, j < l <= i",
    "Veisi et al. 2025 (arXiv 2503.08067)",
    users="none that is released; the paper trained small language models",
    choose="as forgetting: ALiBi is wanted, with slopes that depend on the text",
    avoid="as forgetting, which is the same mechanism with another sign of the gate",
    where=(
        "f_l: slope of token l; k_j: key j; l: position of a token after j, up to i; q_i: query "
        "i; sum_l: sum over the tokens after j, up to i"
    ),
)
def cable(dim: int, heads: int, **options: Unpack[Grouped]) -> Attention:
    """CABLE: ALiBi whose slope every token computes; forgetting attention with another sign of the
    gate.

    Causal, without position encodings.
    """
    start = Start(dim, heads, **options)
    return start.attention(ForgettingProjection(*start.maps(), dim, gate="softplus"))


@variant(
    "biases",
    "z_h = softmax(q_h k_g^T / sqrt(D) - r1_h ln(1 + r2_h (i - j)) + causal) v_g",
    "Chi et al. 2022 (arXiv 2205.09921), section 4",
    users="none that is released; the paper trained GPT models of 162M parameters",
    choose=(
        "a model must run beyond its training length, and far keys must not vanish as with ALiBi"
    ),
    avoid="the order of far tokens matters exactly: the penalty hardly changes there",
    where=(
        "r1_h: learned size of the penalty of head h; r2_h: learned growth of the penalty near "
        "the query"
    ),
)
def kerple(dim: int, heads: int, **options: Unpack[Grouped]) -> Attention:
    """KERPLE: a learned penalty that grows with the logarithm of the distance replaces position
    embeddings.

    Both numbers of each head begin at 1.
    """
    r1, r2 = (nn.Parameter(torch.ones(heads)) for _ in range(2))
    return Start(dim, heads, **options).attention(bias=Kerple(r1, r2))


@variant(
    "biases",
    "z = softmax(s_ij + mlp(ln(c (i - j) + 1) / ln(c max(i, L) + 1)) + causal) v",
    "Li et al. 2023 (arXiv 2310.04418), equations 6 and 19",
    users="none that is released; the paper trained models up to 350M parameters",
    choose="a model must run beyond its training length with a learned function of the distance",
    avoid="speed matters: every pair runs a small network",
    where=(
        "L: learned position up to which the divisor is constant; c: learned growth of small "
        "distances; mlp: learned network with one hidden layer and one result per head"
    ),
    example={"hidden": 3},
)
def fire(dim: int, heads: int, *, hidden: int = 32, **options: Unpack[Grouped]) -> Attention:
    """FIRE: a small network of the distance, relative to the position of the query, replaces
    position embeddings.

    The threshold L begins at 512, and c at 0.1.

    Args:
        hidden: the number of hidden units of the network.
    """
    check_positive_sizes("fire", heads=heads, hidden=hidden)
    tensors = (
        torch.tensor([0.1]),
        torch.tensor([512.0]),
        torch.randn(hidden),
        torch.zeros(hidden),
        torch.randn(heads, hidden) * hidden**-0.5,
        torch.zeros(heads),
    )
    return Start(dim, heads, **options).attention(bias=FIRE(*map(nn.Parameter, tensors)))


@variant(
    "biases",
    "z = softmax(q_i (k_j + a[clip(j - i)]) / sqrt(D) + causal) v",
    "Shaw et al. 2018 (arXiv 1803.02155), equations 4 and 5",
    users="Music Transformer; Wav2Vec2-BERT; translation models of the paper",
    choose="short distances matter each for itself, and far ones only as far",
    avoid="a text is long: all tokens beyond the table look equally far",
    where=(
        "a: learned vectors, one for each distance; clip: the nearest distance that has a vector; "
        "k_j: key j; q_i: query i"
    ),
    example={"reach": 3},
)
def shaw(dim: int, heads: int, *, reach: int = 64, **options: Unpack[Grouped]) -> Attention:
    """Shaw's relative positions: a learned vector for each distance is added to the key.

    The vectors are shared by all heads. An encoder assembles `RelativeKeyProjection` with vectors
    for both directions.

    Args:
        reach: the largest distance with a vector of its own; larger ones share it.
    """
    start = Start(dim, heads, **options)
    return start.attention(RelativeKeyProjection(*start.maps(), left=reach, right=0))


@variant(
    "biases",
    "z = softmax(((q_i + u) k_j + (q_i + w) W_r r[i - j]) / sqrt(D) + causal) v",
    "Dai et al. 2019 (arXiv 1901.02860), section 3.3; XLNet: Yang et al. 2019 (arXiv 1906.08237)",
    users="Transformer-XL, XLNet",
    choose="an old checkpoint needs it, or distances need no largest value",
    avoid=(
        "speed matters: rotary positions cost nothing per pair, and this one doubles heads or more"
    ),
    where=(
        "W_r: learned map of sinusoids to keys of distances; k_j: key j; q_i: query i; r: "
        "sinusoids of a distance; u: learned vector, added to the query for content; w: learned "
        "vector, added to the query for positions"
    ),
    example={"size": 6},
)
def transformer_xl(
    dim: int, heads: int, *, size: int | None = None, **options: Unpack[Rotated]
) -> Attention:
    """Relative positions of Transformer-XL and XLNet: a product with a map of the sinusoid of the
    distance is added to the score.

    The sinusoids are appended to queries and keys, so that every kernel computes the mechanism,
    with heads of D + size.

    Args:
        size: the number of sinusoids R, an even number; None is the model dim, as in the paper.
        base: the base of the frequencies.
    """
    start = Start(dim, heads, groups=options["groups"], head_dim=options["head_dim"])
    size, base = dim if size is None else size, options["base"]
    project = SinusoidKeyProjection(*start.maps(), size=size, base=base)
    return start.attention(project, scale=start.D**-0.5)


@variant(
    "biases",
    "z = softmax((q_i k_j + q_i K_r[d(i - j)] + k_j Q_r[d(i - j)]) / sqrt(3 D)) v",
    "He et al. 2020 (arXiv 2006.03654), equation 4; log buckets: the released DeBERTa-v2",
    users="DeBERTa, DeBERTa-v2 and v3, mDeBERTa",
    choose="an encoder must understand word order well, as in question answering and tagging",
    avoid="text is generated, or fused kernels matter: each pair needs two products more",
    where=(
        "K_r: keys of the buckets of distances; Q_r: queries of the buckets of distances; d: "
        "bucket of a distance; k_j: key j; q_i: query i"
    ),
    example={"buckets": 4, "max_distance": 12},
    causal=False,
)
def deberta(
    dim: int,
    heads: int,
    *,
    buckets: int = 256,
    max_distance: int = 512,
    **options: Unpack[HeadSize],
) -> Attention:
    """Disentangled attention of DeBERTa: content meets content, and content meets position in both
    directions.

    Every token sees every token.

    Args:
        buckets: the number of buckets of distances in one direction.
        max_distance: the distance of the last bucket.
    """
    start = Start(dim, heads, bias=True, **options)
    project = DisentangledProjection(*start.maps(), dim, buckets=buckets, max_distance=max_distance)
    return start.attention(project, mask=Full(), scale=(3 * start.D) ** -0.5)


@variant(
    "biases",
    "z = softmax(q_i k_j / sqrt(D) + (r_i P)[i - j] + causal) v",
    "Inkling 2026, `InklingRelativeLogits` of transformers",
    users="Inkling",
    choose="every token should choose which distances it looks at",
    avoid="distances beyond the extent must have different biases",
    where=(
        "P: learned profiles of biases by distance; k_j: key j; q_i: query i; r_i: mixture of "
        "profiles that token i computes"
    ),
    example={"extent": 5},
)
def relative_logits(
    dim: int, heads: int, *, profiles: int = 16, extent: int = 1024, **options: Unpack[Grouped]
) -> Attention:
    """Relative logits of Inkling: every token mixes learned profiles of biases by distance.

    A key at a distance of `extent` or more has no bias.

    Args:
        profiles: the number of profiles.
        extent: the number of distances with a bias.
    """
    start = Start(dim, heads, **options)
    r = HeadProjection(dim, heads, profiles)
    return start.attention(RelativeLogitProjection(*start.maps(), r, extent=extent))


@variant(
    "biases",
    "z = softmax(s_ij + e_j + causal, topk of e) v, e_j = exp(a_g softplus(W v_j))",
    "Shi et al. 2025 (arXiv 2508.02124); `DogeAttention` of transformers",
    users="Doge",
    choose="tokens should say themselves how important they are for all later ones",
    avoid="a key may become important only for some queries: its bias is the same for all",
    where=(
        "a_g: learned factor of key/value head g; e: biases of the keys up to the query; e_j: "
        "bias of key j; v_j: values of token j, of all heads"
    ),
    example={"keep": 6},
)
def dynamic_mask(
    dim: int, heads: int, *, keep: int = 2048, **options: Unpack[Rotated]
) -> Attention:
    """Dynamic mask attention of Doge: the values of a token give its key a bias, and a query sees
    the keys with the largest biases.

    Heads are normed before the rotation.

    Args:
        keep: the number of keys that a query sees.
    """
    start = Start(dim, heads, **options)
    q, k = (each(RMSNorm(start.D), *start.rotary) for each in (start.q, start.kv))
    return start.attention(DynamicMaskProjection(q, k, start.kv(), keep=keep))


@variant(
    "biases",
    "z = softmax(q_i^T (product_l H_l) k_j / sqrt(D) + causal) v, H_l = E - b_l w_l w_l^T",
    "Yang et al. 2025 (arXiv 2505.16381), equations 2 and 3",
    users="none that is released; the paper trained models of 760M parameters",
    choose="states must be tracked over a text, which rotary positions cannot do",
    avoid="long texts are decoded: each token solves a system over all keys",
    where=(
        "E: the identity matrix; H_l: reflection of token l, after j and up to i; b_l: strength "
        "of the reflection, between 0 and 2; k_j: key j; product_l: product over the tokens after "
        "j, up to i, the last one first; q_i: query i; w_l: unit vector that token l computes"
    ),
)
def path(dim: int, heads: int, **options: Unpack[Grouped]) -> Attention:
    """PaTH: every token between a key and a query changes the key by a reflection that it computes.

    The reflections replace position encodings.
    """
    start = Start(dim, heads, **options)
    w = start.kv()
    return start.attention(PathProjection(*start.maps(), w, dim))


@variant(
    "biases",
    "z = softmax(s_ij - sum_l relu(s0_lj) + causal) v, j < l < i",
    "Leviathan et al. 2024 (arXiv 2410.02703), section 3",
    users="none that is released; the paper trained small language models",
    choose="tokens become useless once others have replaced them, and no parameters may be added",
    avoid="long texts are decoded: the sums of all earlier tokens are computed again in each step",
    where=(
        "l: position of a token after j and before i; s0_lj: score of query l and key j in the "
        "first head; sum_l: sum over the tokens after j and before i"
    ),
)
def selective(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Selective attention: the scores of the first head say which earlier tokens a token hides from
    all later ones.

    It has no parameters of its own.
    """
    start = Start(dim, heads, **options)
    return start.attention(SelectiveProjection(*start.maps()))
