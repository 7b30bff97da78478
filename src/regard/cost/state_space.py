"""Count state-space layers, linear attention whose decay depends on the token (B is the key, C the
query, x the value), and linear layers of published hybrid models. Source: arXiv 2405.21060, section
3.
"""

from __future__ import annotations

from regard.cost.fixed_state import DeltaSpec, LinearSpec, ShortConvolution
from regard.cost.spec import HeadShape, ParameterCounts


def mamba(
    dim: int,
    inner: int,
    state: int,
    kernel: int,
    rank: int,
    *,
    bias: bool = False,
    conv_bias: bool = True,
    norms: bool = False,
) -> LinearSpec:
    """Return the spec of Mamba: each of `inner` channels has a state of its own, and B and C are
    shared. Source: Gu & Dao 2023 (arXiv 2312.00752), section 3.
    """
    matrices = 3 * dim * inner + inner * (rank + 2 * state) + rank * inner + inner * kernel
    # the bias of the step sizes, the decay of every channel and state, and the skip weights
    biases = inner + inner * state + inner
    biases += (inner if conv_bias else 0) + (2 * inner + dim if bias else 0)
    weights = ParameterCounts(matrices, biases, rank + 2 * state if norms else 0)
    shape = HeadShape(1, 1, state, 1, inner)
    convolution = ShortConvolution(inner, kernel)
    return LinearSpec(weights, (), shape, "Mamba", decayed=True, convolution=convolution)


def mamba2(
    dim: int,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    kernel: int,
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    conv_bias: bool = True,
    norm: bool = True,
) -> LinearSpec:
    """Return the spec of Mamba-2: one decay per head, and B and C shared by the heads of a group.
    Source: Dao & Gu 2024 (arXiv 2405.21060), section 7.
    """
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    projection = inner + channels + heads  # of the gate, of the convolution's input, of step sizes
    matrices = dim * projection + inner * dim + channels * kernel
    output_bias = bias if output_bias is None else output_bias
    biases = 3 * heads + (channels if conv_bias else 0)
    biases += (projection if bias else 0) + (dim if output_bias else 0)
    shape = HeadShape(groups, groups, state, head_dim, heads)
    return LinearSpec(
        ParameterCounts(matrices, biases, inner if norm else 0),
        (),
        shape,
        "Mamba-2",
        decayed=True,
        convolution=ShortConvolution(channels, kernel),
    )


def convolved_gated_delta_net(dim: int, shape: HeadShape, kernel: int) -> DeltaSpec:
    """Return the spec of the Gated DeltaNet of Qwen3-Next, with a convolution over queries, keys
    and values. Source: Yang et al. 2024 (arXiv 2412.06464); the published code of Qwen3-Next.
    """
    N, E = shape.states, shape.value_dim
    channels = (shape.heads + shape.groups) * shape.head_dim + N * E
    gates = dim * (2 * N + N * E)  # beta and decay of every head, and the output gate
    weights = ParameterCounts(gates + channels * kernel, 2 * N, E)
    convolution = ShortConvolution(channels, kernel)
    return DeltaSpec(shape.maps(dim) + weights, (), shape, gated=True, convolution=convolution)


def kimi_delta_attention(dim: int, heads: int, head_dim: int, kernel: int) -> DeltaSpec:
    """Return the spec of Kimi Delta Attention: the delta rule with a decay for each channel, whose
    decay and output gate are computed through a bottleneck of the width of a head. Source: Kimi
    Team 2025 (arXiv 2510.26692), section 3.
    """
    shape, inner = HeadShape(heads, heads, head_dim, head_dim), heads * head_dim
    bottlenecks = 2 * head_dim * (dim + inner)
    matrices = bottlenecks + dim * heads + 3 * inner * kernel
    weights = ParameterCounts(matrices, inner + heads, head_dim)
    convolution = ShortConvolution(3 * inner, kernel)
    return DeltaSpec(shape.maps(dim) + weights, (), shape, gated=True, convolution=convolution)


def lightning_attention(dim: int, heads: int, head_dim: int) -> LinearSpec:
    """Return the spec of the lightning attention of MiniMax-01: linear attention with a fixed decay
    per head, an output gate, and one norm. Source: MiniMax 2025 (arXiv 2501.08313), section 2.2.
    """
    shape, inner = HeadShape(heads, heads, head_dim, head_dim), heads * head_dim
    weights = shape.maps(dim) + ParameterCounts(dim * inner, norms=inner)
    return LinearSpec(weights, (), shape, "lightning attention", decayed=True)
