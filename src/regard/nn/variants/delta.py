"""Delta rules with a short convolution and gates of their own, maps that are fitted while the layer
reads (Mesa, Titans), and the short convolution alone.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, Unpack

from regard.argument_checks import resolve_head_dim
from regard.errors import ArgumentError
from regard.nn.blocks.norms import L2Norm, RMSNorm
from regard.nn.projections.heads import HeadProjection
from regard.nn.recurrence.delta import (
    BottleneckProjection,
    ChannelLogDecay,
    CombaRule,
    DeltaProductRule,
    DeltaRule,
    EraseRule,
    MesaRule,
    PreconditionedDeltaRule,
    SeveralKeysQKV,
    TitansRule,
)
from regard.nn.recurrence.projections import CausalConvolution, ConvolvedQKV
from regard.nn.recurrence.recurrent import GatedConvolution, RecurrenceRule, Recurrent
from regard.nn.recurrence.rwkv import RWKV7
from regard.nn.variants.options import HeadSize, Option, Valued
from regard.nn.variants.projections import ValueHeadStart, is_first_layer
from regard.nn.variants.registry import variant


class Convolved(Valued, total=False):
    """Heads behind a short convolution."""

    kernel: Annotated[
        int, Option("the tokens of the short causal convolution over queries, keys and values.", 4)
    ]


class ConvolvedValues(Convolved, total=False):
    """Heads behind a short convolution, of which value heads may be more than key heads."""

    value_heads: Annotated[
        int | None,
        Option("the value heads N, each with its own state; H divides N. None is H.", None),
    ]


Rank: TypeAlias = Annotated[
    int | None,
    Option("the size of the bottlenecks of the decay and of the output gate; None is D.", None),
]
LowerBound: TypeAlias = Annotated[
    float | None,
    Option(
        "the least logarithm of a decay, below 0, as in GLM-5: g = lower_bound sigmoid(exp(A) "
        "(W_2 W_1 x + b)). None is the form of Kimi Linear, without a bound.",
        None,
    ),
]


def _convolved(
    dim: int, heads: int, *, kernel: int, **sizes: Any
) -> tuple[ValueHeadStart, ConvolvedQKV]:
    """Return the sizes, and maps with a short convolution, to queries and keys of length 1."""
    start = ValueHeadStart(dim, heads, **sizes)
    return start, start.convolved(kernel, L2Norm())


def _with_sigmoid_gate(
    start: ValueHeadStart, project: ConvolvedQKV, rule: RecurrenceRule, rank: int | None
) -> Recurrent:
    """Build a recurrence with a norm and an output gate through a bottleneck, after a sigmoid."""
    return Recurrent(
        project,
        rule,
        start.output(),
        norm=RMSNorm(start.E),
        gate=BottleneckProjection(start.dim, rank or start.D, start.outputs, start.E),
        gate_activation="sigmoid",
    )


@variant(
    "delta_rules",
    "S' = diag(exp(g)) S; S <- S' + beta k (v - S'^T k)^T; z = norm(S^T q / sqrt(D)) * "
    "sigmoid(W_g x); g = -exp(A) softplus(W_2 W_1 x + b); q, k, v after a convolution",
    "Kimi Team 2025 (arXiv 2510.26692), section 3; the bound: the published code of GLM-5",
    users="Kimi Linear, in three of four layers; GLM-5 Next, with a lower bound of the decay",
    choose=(
        "long contexts with a state of fixed size, where each channel must forget at its own speed"
    ),
    avoid="as the only mechanism, where exact recall matters; or one decay per head is enough",
    where="A: learned rate of the decay, one for each head; g: logarithm of the decay",
)
def kimi_delta(
    dim: int,
    heads: int,
    *,
    rank: Rank = None,
    lower_bound: LowerBound = None,
    **options: Unpack[ConvolvedValues],
) -> Recurrent:
    """Kimi Delta Attention: the delta rule on a state in which each key channel decays by a gate of
    its own.

    A cache stores H D E values at any length, and the last inputs of the convolution.

    Args:
        heads: the query and key heads H.
    """
    start, project = _convolved(dim, heads, **options)
    sizes = (dim, start.value_heads, start.D, rank or start.D)
    decay = ChannelLogDecay(*sizes, lower_bound=lower_bound)
    rule = DeltaRule(dim, start.value_heads, decay=decay)
    return _with_sigmoid_gate(start, project, rule, rank)


@variant(
    "delta_rules",
    "S' = diag(exp(g)) S; S <- S' + k (w * v - S'^T (e * k))^T; z = norm(S^T q / sqrt(D)) * "
    "sigmoid(W_g x); e = sigmoid(W_e x), w = sigmoid(W_w x); q, k, v after a convolution",
    "Gated DeltaNet-2, 2026 (arXiv 2605.22791); the code of flash-linear-attention",
    users="none that is released",
    choose="to study whether erasing and writing need gates of their own",
    avoid="a released model with a known quality is wanted: take kimi_delta",
    where=(
        "W_e: learned matrix of the erase gate; W_w: learned matrix of the write gate; e: gate of "
        "each key channel that is erased; g: logarithm of the decay; w: gate of each value "
        "channel that is written"
    ),
)
def gated_delta_2(
    dim: int, heads: int, *, rank: Rank = None, **options: Unpack[ConvolvedValues]
) -> Recurrent:
    """Gated DeltaNet-2: the delta rule with one gate for each channel that is erased and another
    one for each channel that is written.

    A cache stores H D E values at any length, and the last inputs of the convolution.
    """
    start, plain = _convolved(dim, heads, **options)
    sizes, write = (dim, start.value_heads, start.D), start.values()
    project = ConvolvedQKV(plain.q, plain.k, plain.v, plain.convolution, value_gate=write)
    rule = EraseRule(*sizes, decay=ChannelLogDecay(*sizes, rank or start.D))
    return _with_sigmoid_gate(start, project, rule, rank)


@variant(
    "delta_rules",
    "S' = exp(g) S; S <- S' + beta k (v - S'^T p)^T; z = norm(S^T (q - c p) / sqrt(D)) * "
    "sigmoid(W_g x); p = sigmoid(d) k; q, k, v after a convolution",
    "Hu et al. 2025 (arXiv 2506.02475), section 3; the code of flash-linear-attention",
    users="none that is released",
    choose="to study a delta rule with feedback to its queries, at the cost of gated_delta_net",
    avoid="a released model with a known quality is wanted: take gated_delta_net",
    where=(
        "c: learned share of p in the queries, one for each head; d: learned share of the key "
        "that is erased, one for each head; g: logarithm of the decay; p: key that is erased"
    ),
)
def comba(dim: int, heads: int, **options: Unpack[ConvolvedValues]) -> Recurrent:
    """Comba: the gated delta rule whose erased key is a learned share of the key, and whose queries
    are corrected by it.

    A cache stores H D E values at any length, and the last inputs of the convolution.
    """
    start, project = _convolved(dim, heads, **options)
    return Recurrent(
        project,
        CombaRule(dim, heads, start.value_heads),
        start.output(),
        norm=RMSNorm(start.E),
        gate=start.gate(),
        gate_activation="sigmoid",
    )


@variant(
    "delta_rules",
    "S' = exp(g) S; S' <- S' + beta_i k_i (v_i - S'^T k_i)^T for i = 1..n; S = S'; z = norm(S^T q "
    "/ sqrt(D)) * silu(W_g x); q, k, v after a convolution",
    "Siems et al. 2025 (arXiv 2502.10297), section 3",
    users="none that is released",
    choose="states must be tracked, as in permutations, which one correction cannot follow",
    avoid="speed matters: two corrections cost nearly twice as much as gated_delta_net",
    where=(
        "S': the state after its decay and some corrections; g: logarithm of the decay; i: index "
        "of a correction; n: number of corrections per token"
    ),
)
def delta_product(
    dim: int,
    heads: int,
    *,
    writes: int = 2,
    max_beta: float = 2.0,
    **options: Unpack[ConvolvedValues],
) -> Recurrent:
    """DeltaProduct: the gated delta rule with several corrections of the state per token, so that a
    token can rotate what is stored.

    A cache stores H D E values at any length, and the last inputs of the convolution.

    Args:
        writes: the keys and values of a token, each with a beta of its own.
        max_beta: the upper bound of beta, above 0 and at most 2; at 2 a correction can be a
            reflection.
    """
    kernel = options.pop("kernel")
    start = ValueHeadStart(dim, heads, **options)
    N, D, E = start.value_heads, start.D, start.E
    rule = DeltaProductRule(dim, N, writes=writes, max_beta=max_beta)
    project = SeveralKeysQKV(
        start.q(L2Norm()),
        HeadProjection(dim, heads, writes * D),
        HeadProjection(dim, N, writes * E),
        CausalConvolution(heads * D + writes * (heads * D + N * E), kernel),
        writes=writes,
    )
    return Recurrent(project, rule, start.output(), norm=RMSNorm(E), gate=start.gate())


@variant(
    "delta_rules",
    "A <- exp(h) A + a k^2; S' = diag(exp(g)) S; S <- S' + beta (mu * k) (v - S'^T k)^T; z = "
    "norm(S^T q / sqrt(D)) * sigmoid(W_g x); mu = 1.5^(-r / (1 + abs(r))), r = ln(A) - c; q, k, v "
    "after a convolution",
    "Preconditioned DeltaNet, 2026 (arXiv 2604.21100); the code of flash-linear-attention",
    users="none that is released",
    choose="keys are badly scaled, so that some channels learn faster than others",
    avoid="a released model with a known quality is wanted: take kimi_delta",
    where=(
        "A: decayed sum of the squares of the keys; a: share of a key in A; c: learned centre, "
        "one for each head; g: logarithm of the decay; h: logarithm of the decay of A; mu: factor "
        "of each written key channel; r: logarithm of A, less its centre"
    ),
)
def preconditioned_delta(
    dim: int,
    heads: int,
    *,
    rank: Rank = None,
    lower_bound: LowerBound = None,
    **options: Unpack[Convolved],
) -> Recurrent:
    """Preconditioned Kimi Delta Attention: key channels in which past keys were large are written
    with smaller steps.

    A cache stores H D (E + 1) values at any length, and the last inputs of the convolution.
    """
    start, project = _convolved(dim, heads, **options)
    decay = ChannelLogDecay(dim, heads, start.D, rank or start.D, lower_bound=lower_bound)
    rule = PreconditionedDeltaRule(dim, heads, decay=decay)
    return _with_sigmoid_gate(start, project, rule, rank)


@variant(
    "delta_rules",
    "S <- diag(w) S - (a * r) (S^T r)^T + k v^T; z = (norm(S^T q) + (q . (u * k)) v) * g; w = "
    "exp(-exp(-1/2) sigmoid(b + W_2 tanh(W_1 y))), a = sigmoid(c + W_2 W_1 y), r = k' / |k'|; v "
    "mixed with v1 of the first layer",
    "Peng et al. 2025 (arXiv 2503.14456), section 4",
    users="RWKV-7 Goose and G1, of up to 13.3B parameters",
    choose="a state of fixed size must also forget single keys, and tokens say how fast",
    avoid="exact recall over long texts matters: take some layers of full attention beside it",
    where=(
        "W_1: first matrix of a vector that needs two; W_2: second matrix of a vector that needs "
        "two; a: rate, between 0 and 1, at which each key channel is removed; b: learned bias of "
        "the decays; c: learned bias of the rates; g: output gate; k: written key: the projected "
        "key, made smaller where a is small; k': projected key with a learned factor for each "
        "channel; norm: group norm of a head; r: removal key, of length 1; u: learned weight of "
        "the token itself, one for each key channel; v1: values of the first layer; w: decay of "
        "each key channel; y: mix of the token and the one before, another one for each vector"
    ),
    example={"rank": 3, "gate_rank": 5},
)
def rwkv7(
    dim: int,
    heads: int,
    *,
    layer: int = 0,
    rank: int = 64,
    value_rank: int = 32,
    gate_rank: int = 128,
    **options: Unpack[HeadSize],
) -> RWKV7:
    """RWKV-7 (Goose): a generalized delta rule, which removes what the state holds for one key at a
    rate per channel, and writes another key; layers behind the first one mix in its values.

    This is the time mixing of one layer. A cache stores H D D values and the last token, at any
    length. A layer behind the first one runs in a `Decoder`, which passes the values of the first
    layer.

    Args:
        layer: the index of the layer, from 0; layer 0 gives its values, and the others read them.
        rank: the rank of the maps to the decays and to the rates.
        value_rank: the rank of the map to the share of the first layer's values.
        gate_rank: the rank of the map to the output gate.
    """
    D, is_first = resolve_head_dim(dim, heads, options["head_dim"]), is_first_layer(layer)
    return RWKV7(
        dim, heads, D, is_first=is_first, rank=rank, value_rank=value_rank, gate_rank=gate_rank
    )


@variant(
    "regression",
    "A <- exp(g) A + beta k k^T; C <- exp(g) C + beta k v^T; z = norm(C^T y), (A + diag(r)) y = "
    "q; q, k, v after a convolution",
    "von Oswald et al. 2025 (arXiv 2506.05233), section 3",
    users="none that is released; the paper trained models of 1B parameters",
    choose="the best linear map from past keys to values is wanted at every token",
    avoid="speed matters: every token solves a system of D equations in every head",
    where=(
        "A: decayed sum of the products of keys; C: decayed sum of the products of keys and "
        "values; beta: weight of a token in the regression; g: logarithm of the decay; r: learned "
        "regularization of each key channel; y: solution of the system"
    ),
)
def mesa(dim: int, heads: int, **options: Unpack[Convolved]) -> Recurrent:
    """Mesa layer: each token solves the regression from all past keys to their values, and applies
    the solution to its query.

    A cache stores H D (D + E) values at any length, and the last inputs of the convolution. The
    systems are solved exactly, by Cholesky factors. The convolution runs over queries, keys and
    values, where the authors' code leaves out the values.
    """
    start, project = _convolved(dim, heads, **options)
    output, rule = start.output(), MesaRule(dim, heads, start.D)
    return Recurrent(project, rule, output, norm=RMSNorm(start.E))


@variant(
    "regression",
    "N <- exp(e) N + beta k (v - S^T k)^T; S <- exp(g) S + N; z = norm(S^T q / sqrt(D)); q, k, v "
    "after a convolution",
    "Behrouz et al. 2024 (arXiv 2501.00663), section 3.1",
    users="none that is released",
    choose="to study momentum and forgetting in a memory that learns while it reads",
    avoid="momentum is not needed: gated_delta_net has half its state",
    where=(
        "N: momentum of the memory; beta: step size of a token; e: logarithm of what remains of "
        "the momentum; g: logarithm of the decay"
    ),
)
def titans_linear(dim: int, heads: int, **options: Unpack[Convolved]) -> Recurrent:
    """Linear memory of Titans: each token moves the memory by a step of gradient descent with
    momentum, and the memory forgets.

    A cache stores 2 H D E values at any length, and the last inputs of the convolution. The memory
    of the paper's larger models is a network of several layers, which has no form as a recurrence
    of matrices.
    """
    start, project = _convolved(dim, heads, **options)
    output, rule = start.output(), TitansRule(dim, heads)
    return Recurrent(project, rule, output, norm=RMSNorm(start.E))


@variant(
    "regression",
    "out = W_o (c * y); y_t = sum_l f_l * (e * u)_(t-l); e, c, u = W x",
    "Liquid AI 2025, LFM2 (arXiv 2511.23404), section 2; the published code of LFM2",
    users="LFM2 and LFM3, in most layers",
    choose="small models on small devices, beside layers of attention that look further back",
    avoid="as the only mechanism: nothing beyond the last few tokens reaches the result",
    where=(
        "c: gate of the result; e: gate of the input; f: learned filters, one for each channel; "
        "l: distance to an earlier token; u: input of the convolution; y: result of the "
        "convolution"
    ),
)
def short_convolution(dim: int, heads: int, *, kernel: int = 3) -> GatedConvolution:
    """Short convolution between two gates: every channel is a weighted sum over the last few tokens
    only.

    A cache stores the last kernel - 1 inputs of M channels.

    Args:
        heads: the heads H of the attention layers beside it; a convolution has none, because each
            channel has a filter of its own.
        kernel: the tokens that a filter reaches, the present one included.
    """
    if heads < 1:
        raise ArgumentError(f"heads is {heads}; it must be at least 1", argument="heads")
    return GatedConvolution(dim, kernel)
