"""The same q, k and v of a row under another mechanism: what changes in the weights and in what
they mix.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from regard.biases import ALiBi
from regard.inspect.parts import Array, Elsewhere
from regard.inspect.row import Chain, Row, softmax
from regard.span import Span

TOP, CAP = 4, 5.0
"""The keys that top-k leaves, and a cap: small, so that a short text shows them."""


def elsewhere(row: Row, weights: Array, z: Array, key: int) -> tuple[Elsewhere, ...]:
    """The row as it is, under other rules: each a change of one thing.

    weights [n], z [E]: of the row as it is. key: the one that is followed.
    """
    return tuple(
        compared(
            name, equation, other, weights, np.where(row.chain.visible[:, None], row.v, 0.0), z, key
        )
        for name, equation, other in _others(row)
        if other is not None
    )


def compared(
    name: str, equation: str, other: Array, weights: Array, v: Array, z: Array, key: int
) -> Elsewhere:
    """What another row of weights changes.

    >>> v = np.eye(2)
    >>> found = compared("first", "", np.array([1.0, 0.0]), np.array([0.5, 0.5]), v, np.array([0.5, 0.5]), 0)
    >>> found.p, found.moved, round(found.apart, 6)
    (1.0, 0.5, 1.0)
    """
    positive = other[other > 0]
    entropy = -float((positive * np.log(positive)).sum())
    size = float(np.linalg.norm(z)) or 1.0
    top = int(other.argmax())
    return Elsewhere(
        name,
        equation,
        float(other[key]),
        top,
        float(other[top]),
        float(np.exp(entropy)),
        float(np.abs(other - weights).sum()) / 2,
        float(np.linalg.norm(other @ v - z)) / size,
        other,
    )


def small_window(keys: int) -> int:
    """A window for so many keys: 8, or less, so that it leaves some out.

    >>> small_window(4096), small_window(6)
    (8, 3)
    """
    return min(8, max(1, keys // 2))


def _others(row: Row) -> Iterator[tuple[str, str, Array | None]]:
    chain, sink = row.chain, row.sink
    at, mine = row.call.keys.numpy(), row.call.position
    wide = small_window(int(chain.visible.sum()))
    near = (at >= 0) & (np.abs(mine - at) < wide)

    def of(changed: Chain, less: float | None = sink) -> Array:
        found: Array = softmax(changed.steps()[-1].values, less)["weights"]
        return found

    yield (
        f"window {wide}",
        f"only |i - j| < {wide}",
        of(chain._replace(visible=chain.visible & near)),
    )
    yield f"top {TOP}", f"only the {TOP} largest scores", of(chain._replace(visible=_top(chain)))
    alibi = _alibi(row, at, mine)
    yield (
        "ALiBi",
        "s_ij - m (i - j)",
        of(chain._replace(bias=alibi if chain.bias is None else chain.bias + alibi)),
    )
    if chain.softcap is None:
        yield f"softcap {CAP:g}", f"s ← {CAP:g} tanh(s / {CAP:g})", of(chain._replace(softcap=CAP))
    else:
        yield "no softcap", "s as it is", of(chain._replace(softcap=None))
    yield "temperature 2", "s / 2", of(chain._replace(scale=chain.scale / 2))
    yield "no scaling", "scale 1", of(chain._replace(scale=1.0))
    if chain.bias is not None:
        yield "no bias", "s without b_ij", of(chain._replace(bias=None))
    if sink is not None:
        yield "no sink", "Σ exp without the sink's term", of(chain, None)
    yield "linear", "φ(q_i) · φ(k_j) / Σ,  φ = elu + 1", _linear(chain)


def _top(chain: Chain) -> Array:
    s = chain.steps()[-1].values
    keep = np.zeros(len(s), bool)
    keep[np.argsort(-s, kind="stable")[:TOP]] = True
    found: Array = keep & chain.visible
    return found


def _alibi(row: Row, at: Array, mine: int) -> Array:
    """-m_h (i - j), with the slope of the head."""
    slopes = ALiBi(row.call.place.H).block(Span(1, 1), Span(0, 1))[0, :, 0, 0]
    found: Array = float(slopes[row.head]) * np.abs(mine - at)
    return found


def _linear(chain: Chain) -> Array:
    """Linear attention by elu + 1, over what the mask allows."""
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (chain.q, chain.k))
    a = np.where(chain.visible, np.where(chain.visible[:, None], k, 0) @ q, 0.0)
    total = float(a.sum())
    return a / total if total > 0 else a
