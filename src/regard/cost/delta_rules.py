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


def _channel_gates(dim: int, shape: HeadShape, rank: int) -> ParameterCounts:
    """Return the parameters of a decay per channel and of an output gate, in bottlenecks."""
    channels, gates = shape.states * shape.head_dim, shape.outputs * shape.value_dim
    return ParameterCounts(rank * (2 * dim + channels + gates), channels + shape.states)


def kimi_delta(dim: int, shape: HeadShape, kernel: int, rank: int) -> DeltaSpec:
    """Return the spec of Kimi Delta Attention. Source: Kimi Team 2025 (arXiv 2510.26692), section
    3.
    """
    own = _channel_gates(dim, shape, rank) + ParameterCounts(dim * shape.states)
    return DeltaSpec(
        _weights(dim, shape, kernel, own),
        (),
        shape,
        gated=True,
        mechanism="Kimi delta",
        convolution=convolution_of(shape, kernel),
    )


def gated_delta_2(dim: int, shape: HeadShape, kernel: int, rank: int) -> DeltaSpec:
    """Return the spec of Gated DeltaNet-2, with a gate for each channel of keys and of values.
    Source: arXiv 2605.22791.
    """
    gates = ParameterCounts(dim * shape.states * (shape.head_dim + shape.value_dim))
    own = _channel_gates(dim, shape, rank) + gates
    return DeltaSpec(
        _weights(dim, shape, kernel, own),
        (),
        shape,
        gated=True,
        mechanism="Gated DeltaNet-2",
        convolution=convolution_of(shape, kernel),
    )


def comba(dim: int, shape: HeadShape, kernel: int) -> DeltaSpec:
    """Return the spec of Comba. Source: Hu et al. 2025 (arXiv 2506.02475)."""
    N = shape.states
    gates = dim * (2 * N + shape.outputs * shape.value_dim)
    own = ParameterCounts(gates, 2 * N + 2 * shape.heads)
    return DeltaSpec(
        _weights(dim, shape, kernel, own),
        (),
        shape,
        gated=True,
        mechanism="Comba",
        convolution=convolution_of(shape, kernel),
    )


def _counted(
    weights: ParameterCounts, shape: HeadShape, mechanism: str, state: Quantity, work: Quantity
) -> CountedSpec:
    """Return the spec of a recurrence from the state of one value head and the FLOPs of a token."""
    N, D, E = shape.states, shape.head_dim, shape.value_dim
    letter = "G" if shape.groups == N else "N"
    formula = f"{letter} {state.formula}, {letter} = {N}, D = {D}, E = {E}"
    return CountedSpec(weights, (), shape, mechanism, Quantity(N * state.value, formula), work)


def preconditioned_delta(dim: int, shape: HeadShape, kernel: int, rank: int) -> CountedSpec:
    """Return the spec of preconditioned Kimi Delta Attention. Source: arXiv 2604.21100."""
    N = shape.states
    own = _channel_gates(dim, shape, rank) + ParameterCounts(3 * dim * N, 3 * N)
    spec = preconditioned_spec(_weights(dim, shape, kernel, own), shape)
    return replace(spec, convolution=convolution_of(shape, kernel))


def preconditioned_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of the preconditioned delta rule, with a second state [D] per key head."""
    N, D, E = shape.states, shape.head_dim, shape.value_dim
    flops = N * (7 * D * E + 2 * E + 12 * D)
    formula = f"{N} x (7 D E + 2 E + 12 D), D = {D}, E = {E}"
    name = "preconditioned delta rule"
    return _counted(
        weights, shape, name, Quantity(D * (E + 1), "D (E + 1)"), Quantity(flops, formula)
    )


def delta_product(dim: int, shape: HeadShape, kernel: int, writes: int) -> CountedSpec:
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
    return _counted(
        weights, shape, "DeltaProduct", Quantity(D * E, "D E"), Quantity(flops, formula)
    )


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
    N, D, E = shape.states, shape.head_dim, shape.value_dim
    work = N * (9 * D * E + 3 * D + 2 * E)
    formula = f"{N} x (9 D E + 3 D + 2 E), D = {D}, E = {E}"
    state = Quantity(N * D * E, f"G D E = {N} x {D} x {E}")
    return CountedSpec(
        weights, (), shape, "RWKV-7", state, Quantity(work, formula), convolution=convolution
    )


def mesa(dim: int, shape: HeadShape, kernel: int) -> CountedSpec:
    """Return the spec of the Mesa layer, with its gates and its regularization per channel. Source:
    von Oswald et al. 2025 (arXiv 2506.05233).
    """
    H = shape.heads
    own = ParameterCounts(2 * dim * H, H * (shape.head_dim + 2))
    spec = mesa_spec(_weights(dim, shape, kernel, own), shape)
    return replace(spec, convolution=convolution_of(shape, kernel))


def mesa_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of the Mesa rule: two states, and a Cholesky solve per token and head."""
    H, D, E = shape.heads, shape.head_dim, shape.value_dim
    flops = H * (5 * D * D + 5 * D * E + D**3 // 3)
    formula = f"{H} x (5 D^2 + 5 D E + D^3 / 3), D = {D}, E = {E}"
    return _counted(
        weights, shape, "Mesa", Quantity(D * (D + E), "D (D + E)"), Quantity(flops, formula)
    )


def titans_linear(dim: int, shape: HeadShape, kernel: int) -> CountedSpec:
    """Return the spec of the linear memory of Titans, with its three gates per head. Source:
    Behrouz et al. 2024 (arXiv 2501.00663).
    """
    own = ParameterCounts(3 * dim * shape.heads, 2 * shape.heads)
    spec = titans_spec(_weights(dim, shape, kernel, own), shape)
    return replace(spec, convolution=convolution_of(shape, kernel))


def titans_spec(weights: ParameterCounts, shape: HeadShape) -> CountedSpec:
    """Return the spec of the rule of Titans with these parameters: the memory and its momentum."""
    H, D, E = shape.heads, shape.head_dim, shape.value_dim
    formula = f"{H} x (9 D E + 2 E), D = {D}, E = {E}"
    flops = H * (9 * D * E + 2 * E)
    return _counted(
        weights, shape, "Titans linear", Quantity(2 * D * E, "2 D E"), Quantity(flops, formula)
    )


def short_convolution(dim: int, kernel: int, *, bias: bool = False) -> ConvolutionSpec:
    """Return the spec of a short convolution between two gates, as in LFM2. Source: Liquid AI 2025
    (arXiv 2511.23404).
    """
    weights = ParameterCounts(dim * (4 * dim + kernel), 5 * dim if bias else 0)
    shape = HeadShape(1, 1, dim, dim)
    return ConvolutionSpec(weights, (), shape, convolution=ShortConvolution(dim, kernel))
