"""The cost of grouped-query attention with steps on heads or on their results: gates, norms, shared
keys and values, and differences of heads.
"""

from __future__ import annotations

from collections.abc import Callable

from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts

HeadParts = Callable[[int, HeadShape], SoftmaxSpec]
"""A function of M and of H, G, D that returns the spec of a mechanism."""


def _with(
    dim: int,
    shape: HeadShape,
    *,
    matrices: int = 0,
    biases: int = 0,
    norms: int = 0,
    parts: tuple[tuple[int, int], ...] | None = None,
) -> SoftmaxSpec:
    """Return the spec of `gqa` with more parameters, and another cache if `parts` are given."""
    weights = shape.maps(dim) + ParameterCounts(matrices, biases, norms)
    return SoftmaxSpec(weights, shape.parts if parts is None else parts, shape)


def plain(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec of `gqa`."""
    return _with(dim, shape)


def head_gate(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec of `gqa` with one gate per head: M H more values."""
    return _with(dim, shape, matrices=dim * shape.heads)


def biased_gate(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec of `gqa` with one gate per channel, and one bias per head."""
    return _with(dim, shape, matrices=dim * shape.heads * shape.head_dim, biases=shape.heads)


def differential_v2(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec of 2 H query heads whose differences are H heads."""
    H, D = shape.heads, shape.head_dim
    pairs = HeadShape(2 * H, shape.groups, D, D)
    # the output map has H heads, not 2 H
    return _with(dim, pairs, matrices=dim * H - dim * H * D)


def two_norms(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec of `gqa` with a norm of D weights on queries, and one on keys."""
    return _with(dim, shape, norms=2 * shape.head_dim)


def keys_as_values(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec without the matrix of the values; the cache stores both."""
    G, D = shape.groups, shape.head_dim
    return _with(dim, shape, matrices=-dim * G * D, norms=2 * D)


def shared_kv(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec of one vector as key and value, which the cache stores once."""
    G, D = shape.groups, shape.head_dim
    return _with(dim, shape, matrices=-dim * G * D, norms=2 * D, parts=((1, G * D),))


def l2_clip(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec of `gqa` with H D learned factors on queries."""
    return _with(dim, shape, biases=shape.heads * shape.head_dim)


def ngpt(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec of `gqa` with learned factors on queries and keys."""
    return _with(dim, shape, norms=(shape.heads + shape.groups) * shape.head_dim)


def mrope(dim: int, shape: HeadShape) -> SoftmaxSpec:
    """Return the spec of `gqa` whose cache stores one number more per token."""
    G, D = shape.groups, shape.head_dim
    return _with(dim, shape, parts=((1, G * D), (1, G * D), (1, 1)))


HEAD_PARTS: dict[str, HeadParts] = {
    "nope": plain,
    "exclusive": plain,
    "clip_qkv": plain,
    "head_gate": head_gate,
    "softplus_gate": head_gate,
    "biased_gate": biased_gate,
    "differential_v2": differential_v2,
    "value_norm": two_norms,
    "keys_as_values": keys_as_values,
    "shared_kv": shared_kv,
    "l2_clip": l2_clip,
    "ngpt": ngpt,
    "mrope": mrope,
}
"""The mechanisms, by their names in the catalogue."""
