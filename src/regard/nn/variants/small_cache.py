"""Mechanisms with a smaller cache: fewer values per token (tensor products, tied keys, latents), a
fixed number of tokens (streams, evictions), or a memory of the segments before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Required, TypedDict, Unpack, get_args

from regard.caches.eviction import (
    AcrossHeads,
    EvictionRule,
    ExpectedAttention,
    HeavyHitters,
    KeyDifference,
    LastQuery,
    ObservedWindow,
    SmallKeyNorm,
)
from regard.cost.latent import Form
from regard.errors import ArgumentError
from regard.masks import Causal
from regard.nn.attention.attention import Attention
from regard.nn.attention.evicting import EvictingAttention
from regard.nn.attention.infini import InfiniAttention
from regard.nn.attention.windowed import StreamingAttention
from regard.nn.projections.factored import (
    LowRankHeads,
    TensorProductHeads,
    TensorProductProjection,
    TiedProjection,
)
from regard.nn.projections.heads import HeadProjection, SeparateQKV
from regard.nn.projections.latent import (
    GroupedLatentProjection,
    LatentProjection,
    NaiveLatentProjection,
)
from regard.nn.variants.options import Base, HeadSize, Option, Rotated, RotatedShared, SharedHeads
from regard.nn.variants.projections import Start, output_projection
from regard.nn.variants.registry import variant
from regard.ops.infini_attention import EmptyMemoryRule, UpdateRule
from regard.positions import Rotary, Scaling


class Latents(TypedDict, total=False):
    """Latents from which heads compute keys and values."""

    q_rank: Annotated[
        int | None,
        Option(
            "the size of the latent of queries; None computes queries directly from x.",
            None,
            example=24,
            published=1536,
        ),
    ]
    kv_rank: Required[Annotated[int, Option("the size r of one latent.")]]
    nope_dim: Required[
        Annotated[
            int,
            Option(
                "the dims of a query and key head without rotary positions, d_nope.",
                example=8,
                published=128,
            ),
        ]
    ]
    rope_dim: Required[
        Annotated[
            int,
            Option(
                "the dims of a query and key head with rotary positions, d_rope; even.",
                example=4,
                published=64,
            ),
        ]
    ]
    value_dim: Required[Annotated[int, Option("the value dim E.", example=8, published=128)]]
    base: Base


class Segments(SharedHeads, total=False):
    """A memory of the segments before the present one."""

    segment: Annotated[int, Option("the number of positions N in a segment.", 2048)]
    base: Annotated[
        float,
        Option(
            "the base of the rotary positions of the softmax attention; the memory uses no "
            "positions.",
            10000.0,
        ),
    ]
    empty: Annotated[
        EmptyMemoryRule,
        Option(
            'how the gate treats the empty memory in the first segment: "zero" reads zeros, "skip" '
            "uses the softmax only.",
            "zero",
        ),
    ]


class Budget(RotatedShared, total=False):
    """A cache with a budget of tokens."""

    budget: Annotated[
        int,
        Option(
            "the number of tokens per key/value head that stay after an eviction; a cache has "
            "budget + interval slots, and what was evicted is lost for all later queries.",
            960,
        ),
    ]
    interval: Annotated[
        int, Option("the number of tokens between two evictions; 1 evicts one at every step.", 64)
    ]


class Observed(Budget, total=False):
    """A cache with a budget, for which the last queries decide."""

    window: Annotated[int, Option("the number w of last queries, whose own tokens stay.", 32)]
    pool: Annotated[int, Option("the number of neighbours in the mean, odd.", 5)]


@variant(
    "small_cache",
    "z_h = softmax(q_h k_h^T / sqrt(D) + causal) v_h, k_h = sum_r a_rh rotary(b_r) / R, a = W_a "
    "x, b = W_b x; the same for q and v",
    "Zhang et al. 2025 (arXiv 2501.06425), section 3",
    users="T6; none that is widely used",
    choose="the cache must be small at many heads, and keys may be computed again at every step",
    avoid="decoding is limited by compute, as on CPUs: every cached key is multiplied out again",
    where=(
        "R: number of products; W_a: learned matrix of the first factors; W_b: learned matrix of "
        "the second factors; a: first factors; a_rh: first factor: the share of product r in head "
        "h; b: second factors; b_r: second factor of product r, a vector of the head's width; "
        "sum_r: sum over the products"
    ),
    example={"rank": 2, "q_rank": 3},
)
def tpa(
    dim: int,
    heads: int,
    *,
    rank: int = 2,
    q_rank: int | None = 6,
    base: float = 10000.0,
    **options: Unpack[HeadSize],
) -> Attention:
    """Tensor product attention: keys and values of all heads are sums of a few products of two
    small factors, and a cache stores the factors.

    A cache stores 2 R (H + D) values per token.

    Args:
        rank: the number of products R of keys and of values.
        q_rank: the number of products of queries; None computes queries by one matrix.
        base: the base of the rotary positions, which rotate the second factor.
    """
    start = Start(dim, heads, base=base, **options)
    products = partial(TensorProductHeads, dim, heads, start.D)
    q = start.q(*start.rotary) if q_rank is None else products(q_rank, *start.rotary)
    k, v = products(rank, *start.rotary), products(rank)
    return start.attention(TensorProductProjection(q, k, v))


@variant(
    "small_cache",
    "z_h = softmax(q_h k^T / sqrt(D) + causal) v, q_h = rotary(W_q,h norm(W_c x)), k = rotary(W_k "
    "x), v = W_v x",
    "Hu et al. 2024 (arXiv 2412.19255), section 3.2",
    users="Step-3",
    choose="the cache must be as small as that of mqa, with the capacity of many wide heads",
    avoid="query FLOPs are the limit: H D is larger than the model",
    where=(
        "W_c: learned matrix from hidden states to the latent of queries; norm: RMS norm of a "
        "latent"
    ),
    example={"q_rank": 24, "head_dim": 16},
    published={"head_dim": 256, "q_rank": 2048},
)
def mfa(dim: int, heads: int, *, q_rank: int, head_dim: int, base: Base = 10000.0) -> Attention:
    """Multi-matrix factorization attention: many wide query heads through one low-rank map, and one
    key/value head, as in Step-3.

    A cache stores 2 D values per token.

    Args:
        heads: the query heads H; H D may be larger than M.
        q_rank: the size of the latent of queries.
        head_dim: the head dim D, usually 256.
    """
    start = Start(dim, heads, groups=1, head_dim=head_dim, base=base)
    q = LowRankHeads(dim, heads, head_dim, *start.rotary, rank=q_rank)
    return start.attention(SeparateQKV(q, start.kv(*start.rotary), start.kv()))


@variant(
    "small_cache",
    "z_h = softmax(q_h k_g^T / sqrt(D) + causal) v_g, k_g = concat(v_g[0 : D / 2], rotary(W_r "
    "x)), v_g = W_v x, g = h / (H / G)",
    "Zadouri et al. 2025 (arXiv 2505.21487), section 3.3.1",
    users="none that is released; the paper trained models of up to 1.5B parameters",
    choose="a cache half as large as that of gqa is needed without latents",
    avoid="checkpoints of gqa are to be converted: its keys are not tied to values",
    where="W_r: learned matrix of the rotated half of the keys",
)
def gta(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Grouped-tied attention: the first half of a key is the first half of its value, and one
    rotated half serves all key heads.

    A cache stores G D + D/2 values per token.

    Args:
        head_dim: the head dim D, a multiple of 4; None is M / H.
    """
    start = Start(dim, heads, groups=options["groups"], head_dim=options["head_dim"])
    if start.D % 4:
        raise ArgumentError(
            f"head_dim is {start.D}; it must be a multiple of 4, because half of it has rotary "
            "positions",
            argument="head_dim",
        )
    q, v, rotated = start.q(), start.kv(), HeadProjection(dim, 1, start.D // 2)
    return start.attention(TiedProjection(q, v, rotated, Rotary(start.D // 2, options["base"])))


def _with_latents(
    dim: int,
    heads: int,
    projection: Callable[..., LatentProjection | GroupedLatentProjection],
    options: Latents,
    *,
    scaling: Scaling | None = None,
    **own: Any,
) -> Attention:
    """Build causal attention with a projection through latents, which has options of its own."""
    rope_dim, value_dim = options["rope_dim"], options["value_dim"]
    if rope_dim < 2 or rope_dim % 2:
        raise ArgumentError(
            f"rope_dim is {rope_dim}; it must be even and at least 2, since rotary positions "
            f"rotate pairs; use for example {max(2, rope_dim + 1)}",
            argument="rope_dim",
        )
    project = projection(
        dim,
        heads,
        Rotary(rope_dim, options["base"], scaling=scaling, layout="interleaved"),
        q_rank=options["q_rank"],
        kv_rank=options["kv_rank"],
        nope_dim=options["nope_dim"],
        value_dim=value_dim,
        **own,
    )
    output = output_projection(dim, heads, value_dim)
    return Attention(project, output, mask=Causal(), scale=project.scale)


@variant(
    "latents",
    "c = norm(W_dkv x), k_r = R_s W_kr x; z_h = softmax(([W_uk,h^T q_h; q_r,h]^T [c; k_r]) scale "
    "+ causal) c W_uv,h^T",
    "DeepSeek-AI 2024 (arXiv 2405.04434), equations 37 to 47; V3 (arXiv 2412.19437)",
    users="DeepSeek-V2, V3 and R1, Kimi K2, MiniCPM3",
    choose="the cache decides how many users fit, and the quality of mha is wanted",
    avoid="compute is the limit, as on CPUs; or the runtime has no kernel for it",
    where=(
        "R_s: rotation to position s; W_dkv: learned matrix from hidden states to latents; W_uk: "
        "learned matrix from latents to keys, one for each head; W_uv: learned matrix from "
        "latents to values, one for each head; c: latent of a token; norm: RMS norm of a latent"
    ),
    example={"kv_rank": 16},
    published={"kv_rank": 512},
)
def mla(
    dim: int,
    heads: int,
    *,
    scaling: Scaling | None = None,
    form: Form | Literal["naive"] = "auto",
    **options: Unpack[Latents],
) -> Attention:
    """Multi-head latent attention: all heads compute keys and values from one latent and one rotary
    key per token.

    A cache stores r + d_rope values per token. As in DeepSeek-V2 and V3, rotary pairs are
    interleaved, both latents are normalized, and the scale is 1/sqrt(d_nope + d_rope), times
    f(mscale_all_dim)^2 of a `YaRN` scaling.

    Args:
        scaling: a scaling of the rotary frequencies (`regard.positions`), or None.
        form: "naive" caches the keys and values of each head; "expand", "absorb" and "auto" cache
            latents (`LatentProjection`).
        kv_rank: the size r of the latent of keys and values.
        q_rank: the size of the latent of queries; None computes queries directly from x (V2-Lite).
    """
    forms = ("naive", *get_args(Form))
    if form not in forms:
        raise ArgumentError(
            f"form is {form!r}; it must be one of {', '.join(forms)}", argument="form"
        )
    kind, inner = LatentProjection, form
    if form == "naive":
        kind, inner = NaiveLatentProjection, "expand"
    return _with_latents(dim, heads, kind, options, scaling=scaling, form=inner)


@variant(
    "latents",
    "c_i = norm(W_c,i x), k_r = rotary(W_kr x); z_h = softmax(concat(W_uk,h^T q_h, q_r)^T "
    "concat(c_i, k_r) scale + causal) c_i W_uv,h^T, i = h / (H / n)",
    "Zadouri et al. 2025 (arXiv 2505.21487), section 3.3.2",
    users="none that is released; the paper trained models of up to 1.5B parameters",
    choose="mla is to be split over devices: each device then has one latent and its heads",
    avoid="one device holds the model; mla then caches as much and shares more",
    where=(
        "W_uk: learned matrix from a latent to keys, one for each head; W_uv: learned matrix from "
        "a latent to values, one for each head; c_i: latent number i of a token; i: index of the "
        "latent that serves head h; n: number of latents; norm: RMS norm of a latent"
    ),
    example={"latents": 2, "kv_rank": 8},
    published={"kv_rank": 256},
)
def grouped_latent(
    dim: int, heads: int, *, latents: int = 2, form: Form = "auto", **options: Unpack[Latents]
) -> Attention:
    """Grouped latent attention: several small latents per token, each of which serves some of the
    heads, so that tensor parallelism can split them.

    A cache stores n r + d_rope values per token.

    Args:
        latents: the number of latents n, which divides H; 1 is MLA.
        form: "expand", "absorb" or "auto", as for `mla`.
    """
    kind = GroupedLatentProjection
    return _with_latents(dim, heads, kind, options, latents=latents, form=form)


@variant(
    "latents",
    "c_i = norm(W_c,i x), k_r = rotary(W_kr x); z_h = sum_j softmax(q_h concat(W_uk,j,h c_i, "
    "k_r)^T scale + causal) W_uv,j,h c_i / sqrt(m)",
    "Liu et al. 2026 (arXiv 2603.02188), and its published code",
    users="none that is widely used; the paper's checkpoints of 3B parameters",
    choose="mla is to be split over devices, and each head is to read all latents",
    avoid="compute is the limit: each head attends once in every branch",
    where=(
        "W_uk: learned matrix from a latent to keys, one for each head and branch; W_uv: learned "
        "matrix from a latent to values, one for each head and branch; c_i: latent number i of a "
        "token; i: index of the latent that serves head h in branch j; j: index of the branch; m: "
        "number of branches; norm: RMS norm of a latent; sum_j: sum over the branches"
    ),
    example={"latents": 4, "branches": 2, "kv_rank": 8},
    published={"kv_rank": 128},
)
def mlra(
    dim: int,
    heads: int,
    *,
    latents: int = 4,
    branches: int = 4,
    form: Form = "auto",
    **options: Unpack[Latents],
) -> Attention:
    """Multi-head low-rank attention: every head attends once in each of several branches, which
    read different latents, and adds the results.

    A cache stores n r + d_rope values per token. With n latents and m branches, a latent serves m H
    / n heads; MLRA-4 has 4 of both, MLRA-2 has 4 latents and 2 branches.

    Args:
        latents: the number of latents n, which divides m H.
        branches: the number of branches m, which divides n.
        form: "expand", "absorb" or "auto", as for `mla`.
    """
    kind = partial(GroupedLatentProjection, branches=branches)
    return _with_latents(dim, heads, kind, options, latents=latents, form=form)


def _infini(
    dim: int,
    heads: int,
    update: UpdateRule,
    *,
    segment: int,
    empty: EmptyMemoryRule,
    base: float,
    groups: int | None,
    head_dim: int | None,
) -> InfiniAttention:
    """Build Infini-attention with one of the two update rules."""
    start = Start(dim, heads, groups=groups, head_dim=head_dim)
    rotary = Rotary(start.D, base)
    return InfiniAttention(
        start.qkv(), start.output(), segment=segment, rotary=rotary, update=update, empty=empty
    )


@variant(
    "memory",
    "z = sigmoid(g) sigma(q) M / (sigma(q) n) + (1 - sigmoid(g)) softmax(q k^T / sqrt(D) over j "
    "<= i in the same segment) v; after each segment M += sigma(k)^T v, n += sum sigma(k); sigma "
    "= elu + 1",
    "Munkhdalai et al. 2024 (arXiv 2404.07143), equations 4 to 8 and 10",
    users="none that is released; the paper trained models of 1B and 8B parameters",
    choose="a stream without end must be read with memory of a fixed size",
    avoid="exact recall of single tokens matters, or a window with global layers is enough",
    where=(
        "M: memory of the earlier segments, a matrix for each head; g: learned gate between "
        "memory and segment, one for each head; n: sum of the keys in the memory"
    ),
    example={"segment": 8, "groups": 2},
)
def infini(dim: int, heads: int, **options: Unpack[Segments]) -> InfiniAttention:
    """Infini-attention: softmax inside a segment, and a memory of fixed size for all earlier
    segments.

    A cache stores G D (E + 1) values, and 2 G D for each token of one segment.
    """
    return _infini(dim, heads, "linear", **options)


@variant(
    "memory",
    "as infini, with M += sigma(k)^T (v - sigma(k) M / (sigma(k) n))",
    "Munkhdalai et al. 2024 (arXiv 2404.07143), equations 4 to 7, 9 and 10",
    users="none that is released; the paper trained models of 1B and 8B parameters",
    choose="as infini, where the same keys come again with other values",
    avoid="as infini; a segment also costs one more read of the memory",
    where="M: the memory, a matrix for each head; n: sum of the keys",
    example={"segment": 8, "groups": 2},
)
def infini_delta(dim: int, heads: int, **options: Unpack[Segments]) -> InfiniAttention:
    """Infini-attention with the delta rule: a segment writes only the difference between its values
    and the values that the memory already returns for its keys.

    A cache stores as many values as for `infini`. If a value is written twice under one key, the
    memory returns half of it.
    """
    return _infini(dim, heads, "delta", **options)


@variant(
    "streaming",
    "z = softmax(q R(d_j) k_j^T / sqrt(D)) v over the keys p - R < j <= p, with d_j = p - j, and "
    "the sinks j < s, with d_j = min(p, s + R - 1) - j",
    "Xiao et al. 2024 (arXiv 2309.17453), section 3.2; sinks and recent as in its code",
    users="no model is trained with it; it runs Llama 2, MPT, Falcon and others without end",
    choose="a trained model must read a stream without end, and only the recent tokens matter",
    avoid="the answer is further back than the recent tokens: those keys are gone",
    where=(
        "R: rotation to a position; alone, the number of recent tokens; d: position of a key "
        "inside the cache; p: position of the query; s: number of first tokens that stay; sinks: "
        "the first tokens, which stay in the cache"
    ),
    example={"sinks": 2, "recent": 6, "groups": 2},
)
def streaming(
    dim: int, heads: int, *, sinks: int = 4, recent: int = 2000, **options: Unpack[RotatedShared]
) -> StreamingAttention:
    """StreamingLLM: attention to a few first tokens and to the last ones, with positions counted
    inside the cache.

    A cache stores 2 G D values for each of s + R tokens.

    Args:
        sinks: the number s of first tokens that are always kept.
        recent: the number R of last tokens that are kept, the query's own included.
    """
    start = Start(dim, heads, **options)
    return StreamingAttention(start.qkv(), start.output(), sinks=sinks, recent=recent)


def _evicting(dim: int, heads: int, rule: EvictionRule, options: Budget) -> EvictingAttention:
    """Build grouped-query attention whose cache evicts tokens by a rule."""
    start = Start(
        dim, heads, groups=options["groups"], head_dim=options["head_dim"], base=options["base"]
    )
    return EvictingAttention(
        start.qkv(),
        start.output(),
        rule=rule,
        budget=options["budget"],
        interval=options["interval"],
    )


@variant(
    "eviction",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = all j > t - n, and the j with the largest sum_t "
    "p_tj",
    "Zhang et al. 2023 (arXiv 2306.14048), algorithm 1",
    users="a cache policy of serving systems, on models that were trained without it",
    choose=(
        "the cache must stay small on a trained model, and some tokens matter throughout the text"
    ),
    avoid="later questions may need any token: what was evicted cannot be found again",
    where=(
        "n: how many of the newest tokens stay; sum_t: sum over all queries so far; t: position "
        "of a query, the last one in j > t - n"
    ),
    example={"groups": 2, "budget": 5, "interval": 2, "newest": 2},
)
def h2o(dim: int, heads: int, *, newest: int = 256, **options: Unpack[Budget]) -> EvictingAttention:
    """H2O: the cache keeps the tokens that got the most attention so far, and the newest ones.

    Args:
        newest: the number n of newest tokens that always stay.
    """
    return _evicting(dim, heads, HeavyHitters(newest), options)


@variant(
    "eviction",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the j with the largest p_tj",
    "Oren et al. 2024 (arXiv 2401.06104), section 3.2",
    users="a cache policy of serving systems, on models that were trained without it",
    choose="as h2o, where what matters changes along the text",
    avoid="as h2o; one query decides alone what is lost",
    where="p_tj: weight that the last query t gave to key j",
    example={"groups": 2, "budget": 5, "interval": 2},
)
def tova(dim: int, heads: int, **options: Unpack[Budget]) -> EvictingAttention:
    """TOVA: the cache keeps the tokens to which the last query attends most."""
    return _evicting(dim, heads, LastQuery(), options)


@variant(
    "eviction",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = all j > t - w, and the j with the largest "
    "mean(sum_t p_tj)",
    "Li et al. 2024 (arXiv 2404.14469), section 4",
    users="a cache policy of serving systems, on models that were trained without it",
    choose="a long prompt ends with the question: its last tokens say what matters",
    avoid="the question comes later than the eviction: its tokens cannot be known",
    where=(
        "mean: mean over the neighbours of key j; sum_t: sum over the last w queries; t: position "
        "of a query, the last one in j > t - w; w: number of last queries, which decide"
    ),
    example={"groups": 2, "budget": 5, "interval": 2, "window": 2, "pool": 3},
)
def snapkv(dim: int, heads: int, **options: Unpack[Observed]) -> EvictingAttention:
    """SnapKV: the cache keeps the tokens to which the last queries attend most, smoothed over
    neighbours.
    """
    rule = ObservedWindow(options["window"], options["pool"])
    return _evicting(dim, heads, rule, options)


@variant(
    "eviction",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the j with the largest -abs(k_j)",
    "Devoto et al. 2024 (arXiv 2406.11430), section 3",
    users="a cache policy of serving systems, on models that were trained without it",
    choose="no attention weights are at hand, as with fused kernels",
    avoid="the model has QK-norm: all its keys have about the same norm",
    where="k_j: key j",
    example={"groups": 2, "budget": 5, "interval": 2},
)
def key_norm(dim: int, heads: int, **options: Unpack[Budget]) -> EvictingAttention:
    """Small key norms: the cache keeps the tokens whose keys have the smallest norm."""
    return _evicting(dim, heads, SmallKeyNorm(), options)


@variant(
    "eviction",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the j with the largest -k_j c / abs(k_j), c = "
    "mean(k_j / abs(k_j))",
    "Park et al. 2025 (arXiv 2504.15364), section 3",
    users="a cache policy of serving systems, on models that were trained without it",
    choose="no attention weights are at hand, and a prompt is read in pieces",
    avoid="as h2o; similar keys may hold different values",
    where="c: mean direction of the held keys; k_j: key j",
    example={"groups": 2, "budget": 5, "interval": 2},
)
def keydiff(dim: int, heads: int, **options: Unpack[Budget]) -> EvictingAttention:
    """KeyDiff: the cache keeps the tokens whose keys differ most in direction from the mean."""
    return _evicting(dim, heads, KeyDifference(), options)


@variant(
    "eviction",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = all j > t - w, and the j of any head with the "
    "largest mean(sum_t p_tj)",
    "Feng et al. 2024 (arXiv 2407.11550), algorithm 1 and section 3.3",
    users="a cache policy of serving systems, on models that were trained without it",
    choose="as snapkv, where some heads spread their attention and others do not",
    avoid="as snapkv; one head may take the budget of the others, down to their share",
    where=(
        "mean: mean over the neighbours of key j; sum_t: sum over the last w queries; t: position "
        "of a query, the last one in j > t - w; w: number of last queries, which decide"
    ),
    example={"groups": 2, "budget": 5, "interval": 2, "window": 2, "pool": 3},
)
def adakv(
    dim: int, heads: int, *, floor: float = 0.2, **options: Unpack[Observed]
) -> EvictingAttention:
    """Ada-KV: SnapKV where the heads of a layer share one budget, so that heads with spread
    attention keep more tokens.

    A cache has G (budget + interval) slots for all heads together, and what was evicted is lost for
    all later queries.

    Args:
        floor: the share of the budget that every head keeps; 1 is `snapkv`.
    """
    rule = AcrossHeads(ObservedWindow(options["window"], options["pool"]), floor)
    return _evicting(dim, heads, rule, options)


@variant(
    "eviction",
    "z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the j with the largest softmax_j(m k_j + k_j C k_j "
    "/ 2) abs(v_j)",
    "Devoto et al. 2025 (arXiv 2510.00636), section 3",
    users="a cache policy of serving systems, on models that were trained without it",
    choose="later questions are not known when tokens are evicted, and heads end with rotary",
    avoid="the queries change their kind along the text: the moments are those of the past",
    where=(
        "C: covariance of the queries so far, rotated to the next positions; k_j: key j, times 1 "
        "/ sqrt(D); m: mean of the queries so far, rotated to the next positions; v_j: value j"
    ),
    example={"groups": 2, "budget": 5, "interval": 2, "future": 8, "sinks": 1},
)
def expected_attention(
    dim: int, heads: int, *, future: int = 512, sinks: int = 4, **options: Unpack[Budget]
) -> EvictingAttention:
    """Expected attention: the cache keeps the tokens whose values should count most for the next
    queries, by the mean and covariance of the queries so far.

    A cache has budget + interval slots per key/value head and H D (D + 1) values for the moments,
    and what was evicted is lost for all later queries.

    Args:
        future: the number of next positions for which queries are expected.
        sinks: the number of first tokens that always stay.
    """
    return _evicting(dim, heads, ExpectedAttention(future, sinks), options)
