"""Count what recurrences with decayed sums store and compute per token, without gates: lightning
attention, HGRN2, LightNet, RWKV-4, RWKV-6, xLSTM, gated slots, kernels of the score, and the
state-space layers Mamba and Mamba-2 (B is the key, C the query, x the value).
"""

from __future__ import annotations

from dataclasses import replace

from regard.cost.fixed_state import CountedSpec, LinearSpec, ShortConvolution, matrix_state
from regard.cost.spec import HeadShape, ParameterCounts, Quantity
from regard.units import plural


def rwkv4_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of RWKV-4: per channel bonus (1), token to both sums (3), division (1),
    decays (2), token (3), receptance (1). Source: Peng et al. 2023 (arXiv 2305.13048), equations 20
    to 25.
    """
    G, D = shape.groups, shape.head_dim
    state = Quantity(3 * G * D, f"3 G D = 3 x {G} x {D}")
    return CountedSpec(
        weights, (), shape, "RWKV-4", state, Quantity(11 * G * D, f"11 G D = 11 x {G} x {D}")
    )


def channel_mix_spec(weights: ParameterCounts, dim: int, hidden: int) -> CountedSpec:
    """Return the cost of a channel mix: two mixes (3 M each), a squared ReLU (2 F), a gate (M)."""
    shape, work = HeadShape(1, 1, dim, dim), 7 * dim + 2 * hidden
    return CountedSpec(
        weights,
        (),
        shape,
        "channel mix",
        Quantity(0, "0"),
        Quantity(work, f"7 M + 2 F = 7 x {dim} + 2 x {hidden}"),
        convolution=ShortConvolution(dim, 2),
    )


def rwkv6_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of RWKV-6: a read is 2 D E, the token itself 3 D + 2 E, a write 3 D E.
    Source: Peng et al. 2024 (arXiv 2404.05892), equation 18.
    """
    O, N, D, E = shape.outputs, shape.states, shape.head_dim, shape.value_dim
    flops = O * (2 * D * E + 3 * D + 2 * E) + N * 3 * D * E
    formula = f"{O} x (2 D E + 3 D + 2 E) + {N} x 3 D E, D = {D}, E = {E}"
    values, work = matrix_state(shape), Quantity(flops, formula)
    return CountedSpec(weights, (), shape, "RWKV-6", values, work)


def mlstm_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of xLSTM's matrix memory: a read (C^T q, n . q, a division) takes 2 D E + 2 D
    + E, a write 3 D E + 3 D. Source: Beck et al. 2024 (arXiv 2405.04517), equations 19 to 27.
    """
    O, N, D, E = shape.outputs, shape.states, shape.head_dim, shape.value_dim
    letter = shape.states_letter
    state = Quantity(N * (D * E + D + 1), f"{letter} (D E + D + 1) = {N} x ({D} x {E} + {D} + 1)")
    work = O * (2 * D * E + 2 * D + E) + N * (3 * D * E + 3 * D)
    formula = f"{O} x (2 D E + 2 D + E) + {N} x (3 D E + 3 D), D = {D}, E = {E}"
    return CountedSpec(weights, (), shape, "mLSTM", state, Quantity(work, formula))


def slots_spec(
    weights: ParameterCounts, shape: HeadShape, slots: int, *, summed: bool = False
) -> CountedSpec:
    """Return the spec of gated slots, m keys and values per head: two reads per query head, 2 m (D
    + E), and two writes per key/value head, 3 m (D + E). Source: arXiv 2409.07146, section 3.
    """
    H, G, D, E, m = shape.heads, shape.groups, shape.head_dim, shape.value_dim, slots
    each = f"(D + E{' + 1' if summed else ''})"
    numbers = f"({D} + {E}{' + 1' if summed else ''})"
    state = Quantity(G * m * (D + E + summed), f"G m {each} = {G} x {m} x {numbers}")
    work = (2 * H + 3 * G) * m * (D + E)
    formula = f"(2 H + 3 G) m (D + E) = (2 x {H} + 3 x {G}) x {m} x ({D} + {E})"
    return CountedSpec(
        weights,
        (),
        shape,
        f"{m} {'ABC' if summed else 'gated'} slots",
        state,
        Quantity(work, formula),
    )


def lightnet_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of LightNet: the state of gated linear attention, and a running log-sum-exp
    per key channel. Source: Qin et al. 2024 (arXiv 2405.21022), section 3.
    """
    H, G, D, E = shape.heads, shape.groups, shape.head_dim, shape.value_dim
    state = Quantity(G * D * (E + 1), f"G D (E + 1) = {G} x {D} x ({E} + 1)")
    work = Quantity((2 * H + 3 * G) * D * E, f"(2 H + 3 G) D E = (2 x {H} + 3 x {G}) x {D} x {E}")
    return CountedSpec(weights, (), shape, "LightNet", state, work)


def log_linear_spec(weights: ParameterCounts, shape: HeadShape, levels: int) -> CountedSpec:
    """Return the spec of log-linear Mamba-2: L levels and the number of tokens. A token decays all
    levels (L D E), writes one and merges one (2 D E), and reads their weighted sum (2 L D E + 2 D
    E). Source: Guo et al. 2025 (arXiv 2506.04761), section 3.
    """
    N, D, E, L = shape.states, shape.head_dim, shape.value_dim, levels
    state = Quantity(N * L * D * E + 1, f"N L D E + 1 = {N} x {L} x {D} x {E} + 1")
    work = Quantity(N * (3 * L + 4) * D * E, f"N (3 L + 4) D E = {N} x (3 x {L} + 4) x {D} x {E}")
    return CountedSpec(weights, (), shape, f"log-linear Mamba-2, {plural(L, 'level')}", state, work)


def lightning(dim: int, shape: HeadShape, *, mechanism: str = "retention") -> LinearSpec:
    """Return the spec of lightning attention: linear attention with a fixed decay per head, an
    output gate, and a norm over all heads. Source: MiniMax 2025 (arXiv 2501.08313), section 2.2.
    """
    values = shape.outputs * shape.value_dim
    weights = shape.maps(dim) + ParameterCounts(dim * values, norms=values)
    return LinearSpec(weights, (), shape, mechanism, decayed=True)


def hgrn2(dim: int, shape: HeadShape) -> LinearSpec:
    """Return the spec of HGRN2: the maps, and a norm over all heads. Source: Qin et al. 2024 (arXiv
    2404.07904).
    """
    weights = shape.maps(dim) + ParameterCounts(norms=shape.outputs * shape.value_dim)
    return LinearSpec(weights, (), shape, "HGRN2", decayed=True)


def lightnet(dim: int, shape: HeadShape) -> CountedSpec:
    """Return the spec of LightNet: an output gate, and one norm that all heads share. Source: Qin
    et al. 2024 (arXiv 2405.21022).
    """
    gates = dim * shape.outputs * shape.value_dim
    return lightnet_spec(shape.maps(dim) + ParameterCounts(gates, norms=shape.value_dim), shape)


def rwkv4(dim: int, shape: HeadShape) -> CountedSpec:
    """Return the spec of RWKV-4: a share of the present token in each channel of three inputs, and
    a decay and a bonus in each channel. Source: Peng et al. 2023 (arXiv 2305.13048).
    """
    own = ParameterCounts(biases=3 * dim + 2 * shape.groups * shape.head_dim)
    return replace(rwkv4_spec(shape.maps(dim) + own, shape), convolution=ShortConvolution(dim, 2))


def rwkv6(dim: int, shape: HeadShape, rank: int = 64) -> CountedSpec:
    """Return the spec of RWKV-6: as RWKV-4, with decays through a bottleneck of size `rank`, an
    output gate, and a norm with weight and bias per head. Source: Peng et al. 2024 (arXiv
    2404.05892).
    """
    channels = shape.groups * shape.head_dim
    own = ParameterCounts(
        matrices=dim * channels + rank * (dim + channels),
        biases=3 * dim + 2 * channels,
        norms=2 * channels,
    )
    return replace(rwkv6_spec(shape.maps(dim) + own, shape), convolution=ShortConvolution(dim, 2))


def mlstm(dim: int, shape: HeadShape) -> CountedSpec:
    """Return the spec of the matrix memory of xLSTM: two gates with bias per head, an output gate,
    and a norm with weight and bias per head. Source: Beck et al. 2025 (arXiv 2503.13427).
    """
    H, values = shape.heads, shape.heads * shape.value_dim
    own = ParameterCounts(dim * (values + 2 * H), 2 * H, 2 * values)
    return mlstm_spec(shape.maps(dim) + own, shape)


def slots(dim: int, shape: HeadShape, slots: int = 64, *, summed: bool = False) -> CountedSpec:
    """Return the spec of gated slots, with one norm that all heads share, or with `summed` of ABC,
    without a norm. Source: Zhang et al. 2024 (arXiv 2409.07146); Peng et al. 2021 (arXiv
    2110.02488).
    """
    norms = 0 if summed else shape.value_dim
    own = ParameterCounts(dim * shape.groups * slots, norms=norms)
    return slots_spec(shape.maps(dim) + own, shape, slots, summed=summed)


def kernel_attention(dim: int, shape: HeadShape, features: int, *, norms: int = 0) -> LinearSpec:
    """Return the spec of normalized linear attention with F features per head. Source:
    Katharopoulos et al. 2020 (arXiv 2006.16236).
    """
    weights = shape.maps(dim) + ParameterCounts(norms=norms)
    return LinearSpec(weights, (), shape, normalized=True, features=features)


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
