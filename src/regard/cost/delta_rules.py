"""Count the layers of the delta rules with a short convolution and gates per channel, of those that
fit a regression, and of the short convolution alone.
"""

from __future__ import annotations

from dataclasses import replace

from regard.cost.fixed_state import (
    ConvolutionSpec,
    CountedSpec,
    DeltaSpec,
    ShortConvolution,
    matrix_state,
)
from regard.cost.spec import HeadShape, ParameterCounts, Quantity


def convolution_of(shape: HeadShape, kernel: int) -> ShortConvolution:
    """Return the convolution over the queries, keys and values of a layer."""
    keys = (shape.heads + shape.groups) * shape.head_dim
    return ShortConvolution(keys + shape.states * shape.value_dim, kernel)


def _weights(dim: int, shape: HeadShape, kernel: int, own: ParameterCounts) -> ParameterCounts:
    """Return the parameters of the maps, of the convolution and of one norm, and the others."""
    filters = convolution_of(shape, kernel).channels * kernel
    return shape.maps(dim) + ParameterCounts(filters, norms=shape.value_dim) + own


def _channel_gates(dim: int, shape: HeadShape, rank: int | None) -> ParameterCounts:
    """Return the parameters of a decay per channel and of an output gate, in bottlenecks of the
    width of a head, or of `rank`.
    """
    channels, gates = shape.states * shape.head_dim, shape.outputs * shape.value_dim
    matrices = (rank or shape.head_dim) * (2 * dim + channels + gates)
    return ParameterCounts(matrices, channels + shape.states)


def _gated_delta(
    dim: int, shape: HeadShape, kernel: int, own: ParameterCounts, mechanism: str = "delta rule"
) -> DeltaSpec:
    """Return the spec of a gated delta rule with a convolution, one norm and its own parameters."""
    weights, convolution = _weights(dim, shape, kernel, own), convolution_of(shape, kernel)
    return DeltaSpec(weights, (), shape, mechanism, gated=True, convolution=convolution)


def gated_delta_net(dim: int, shape: HeadShape, kernel: int | None = None) -> DeltaSpec:
    """Return the spec of Gated DeltaNet: one beta and one decay per value head, an output gate, one
    norm that all heads share, and in Qwen3-Next a convolution over queries, keys and values.
    Source: Yang et al. 2024 (arXiv 2412.06464); the published code of Qwen3-Next.
    """
    gates = dim * (2 * shape.states + shape.outputs * shape.value_dim)
    own = ParameterCounts(gates, 2 * shape.states)
    if kernel is not None:
        return _gated_delta(dim, shape, kernel, own)
    weights = shape.maps(dim) + own + ParameterCounts(norms=shape.value_dim)
    return DeltaSpec(weights, (), shape, gated=True)


def kimi_delta(
    dim: int,
    shape: HeadShape,
    kernel: int = 4,
    rank: int | None = None,
    *,
    mechanism: str = "Kimi delta",
) -> DeltaSpec:
    """Return the spec of Kimi Delta Attention: the delta rule with a decay for each channel.
    Source: Kimi Team 2025 (arXiv 2510.26692), section 3.
    """
    own = _channel_gates(dim, shape, rank) + ParameterCounts(dim * shape.states)
    return _gated_delta(dim, shape, kernel, own, mechanism)


def gated_delta_2(
    dim: int, shape: HeadShape, kernel: int = 4, rank: int | None = None
) -> DeltaSpec:
    """Return the spec of Gated DeltaNet-2, with a gate for each channel of keys and of values.
    Source: arXiv 2605.22791.
    """
    gates = ParameterCounts(dim * shape.states * (shape.head_dim + shape.value_dim))
    own = _channel_gates(dim, shape, rank) + gates
    return _gated_delta(dim, shape, kernel, own, "Gated DeltaNet-2")


def comba(dim: int, shape: HeadShape, kernel: int = 4) -> DeltaSpec:
    """Return the spec of Comba. Source: Hu et al. 2025 (arXiv 2506.02475)."""
    N = shape.states
    gates = dim * (2 * N + shape.outputs * shape.value_dim)
    own = ParameterCounts(gates, 2 * N + 2 * shape.heads)
    return _gated_delta(dim, shape, kernel, own, "Comba")


def _counted(
    weights: ParameterCounts, shape: HeadShape, mechanism: str, state: Quantity, work: Quantity
) -> CountedSpec:
    """Return the spec of a recurrence from the state of one value head and the FLOPs of a token."""
    N, D, E, letter = shape.states, shape.head_dim, shape.value_dim, shape.states_letter
    formula = f"{letter} {state.formula}, {letter} = {N}, D = {D}, E = {E}"
    return CountedSpec(weights, (), shape, mechanism, Quantity(N * state.value, formula), work)


def _each(shape: HeadShape, flops: int, formula: str) -> Quantity:
    """Return the FLOPs of a token in all value heads from those in one of them."""
    N, D, E = shape.states, shape.head_dim, shape.value_dim
    return Quantity(N * flops, f"{N} x ({formula}), D = {D}, E = {E}")


def preconditioned_delta(
    dim: int, shape: HeadShape, kernel: int = 4, rank: int | None = None
) -> CountedSpec:
    """Return the spec of preconditioned Kimi Delta Attention. Source: arXiv 2604.21100."""
    N = shape.states
    own = _channel_gates(dim, shape, rank) + ParameterCounts(3 * dim * N, 3 * N)
    spec = preconditioned_spec(_weights(dim, shape, kernel, own), shape)
    return replace(spec, convolution=convolution_of(shape, kernel))


def preconditioned_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of the preconditioned delta rule, with a second state [D] per key head."""
    D, E = shape.head_dim, shape.value_dim
    work = _each(shape, 7 * D * E + 2 * E + 12 * D, "7 D E + 2 E + 12 D")
    state = Quantity(D * (E + 1), "D (E + 1)")
    return _counted(weights, shape, "preconditioned delta rule", state, work)


def delta_product(dim: int, shape: HeadShape, kernel: int = 4, writes: int = 2) -> CountedSpec:
    """Return the spec of DeltaProduct with `writes` keys and values per token. Source: Siems et al.
    2025 (arXiv 2502.10297).
    """
    N, more = shape.states, (writes - 1) * shape.key_maps(1)
    gates = dim * (N * (writes + 1) + shape.outputs * shape.value_dim)
    own = ParameterCounts(gates + more * (dim + kernel), 2 * N)
    channels = convolution_of(shape, kernel).channels + more
    spec = delta_product_spec(_weights(dim, shape, kernel, own), shape, writes)
    return replace(spec, convolution=ShortConvolution(channels, kernel))


def delta_product_spec(weights: ParameterCounts, shape: HeadShape, writes: int) -> CountedSpec:
    """Return the spec of DeltaProduct with these parameters: one decay and several corrections."""
    O, N, D, E = shape.outputs, shape.states, shape.head_dim, shape.value_dim
    flops = O * 2 * D * E + N * (writes * (4 * D * E + 2 * E) + D * E)
    formula = f"{O} x 2 D E + {N} x ({writes} x (4 D E + 2 E) + D E), D = {D}, E = {E}"
    state, work = Quantity(D * E, "D E"), Quantity(flops, formula)
    return _counted(weights, shape, "DeltaProduct", state, work)


def rwkv7(
    dim: int, shape: HeadShape, *, ranks: tuple[int, int, int], is_first: bool
) -> CountedSpec:
    """Return the spec of the time mixing of RWKV-7. Source: Peng et al. 2025 (arXiv 2503.14456)."""
    rank, value_rank, gate_rank = ranks
    channels = shape.heads * shape.head_dim
    inner = 2 * rank + gate_rank + (0 if is_first else value_rank)
    own = ParameterCounts(
        matrices=inner * (dim + channels),
        # six shares per channel of x; two biases, two scales and the bonus per channel of heads
        biases=6 * dim + (5 if is_first else 6) * channels,
        norms=2 * channels,
    )
    return rwkv7_spec(shape.maps(dim) + own, shape, ShortConvolution(dim, 2))


def rwkv7_spec(
    weights: ParameterCounts, shape: HeadShape, convolution: ShortConvolution
) -> CountedSpec:
    """Return the spec of the rule of RWKV-7 with these parameters: a removal of 5 D E, a write of
    2 D E, a read of 2 D E, and the token itself, 3 D + 2 E.
    """
    D, E, state = shape.head_dim, shape.value_dim, matrix_state(shape)
    work = _each(shape, 9 * D * E + 3 * D + 2 * E, "9 D E + 3 D + 2 E")
    return CountedSpec(weights, (), shape, "RWKV-7", state, work, convolution=convolution)


def mesa(dim: int, shape: HeadShape, kernel: int = 4) -> CountedSpec:
    """Return the spec of the Mesa layer, with its gates and its regularization per channel. Source:
    von Oswald et al. 2025 (arXiv 2506.05233).
    """
    H = shape.heads
    own = ParameterCounts(2 * dim * H, H * (shape.head_dim + 2))
    spec = mesa_spec(_weights(dim, shape, kernel, own), shape)
    return replace(spec, convolution=convolution_of(shape, kernel))


def mesa_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of the Mesa rule: two states, and a Cholesky solve per token and head."""
    D, E = shape.head_dim, shape.value_dim
    work = _each(shape, 5 * D * D + 5 * D * E + D**3 // 3, "5 D^2 + 5 D E + D^3 / 3")
    return _counted(weights, shape, "Mesa", Quantity(D * (D + E), "D (D + E)"), work)


def titans_linear(dim: int, shape: HeadShape, kernel: int = 4) -> CountedSpec:
    """Return the spec of the linear memory of Titans, with its three gates per head. Source:
    Behrouz et al. 2024 (arXiv 2501.00663).
    """
    own = ParameterCounts(3 * dim * shape.heads, 2 * shape.heads)
    spec = titans_spec(_weights(dim, shape, kernel, own), shape)
    return replace(spec, convolution=convolution_of(shape, kernel))


def titans_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of the rule of Titans with these parameters: the memory and its momentum."""
    D, E = shape.head_dim, shape.value_dim
    work = _each(shape, 9 * D * E + 2 * E, "9 D E + 2 E")
    return _counted(weights, shape, "Titans linear", Quantity(2 * D * E, "2 D E"), work)


def short_convolution(dim: int, kernel: int, *, bias: bool = False) -> ConvolutionSpec:
    """Return the spec of a short convolution between two gates, as in LFM2. Source: Liquid AI 2025
    (arXiv 2511.23404).
    """
    weights = ParameterCounts(dim * (4 * dim + kernel), 5 * dim if bias else 0)
    shape = HeadShape(1, 1, dim, dim)
    return ConvolutionSpec(weights, (), shape, convolution=ShortConvolution(dim, kernel))
