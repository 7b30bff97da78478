"""The same row under other mechanisms: what changes in its weights, and what a cache would keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from regard.biases import ALiBi
from regard.cost import Description, attention_flops
from regard.cost.latent import latent_values
from regard.cost.softmax import attention_bytes
from regard.inspect.explain.explanation import Array, Cost, Elsewhere, Held
from regard.inspect.explain.row import KernelRow, ScoreFunction, softmax
from regard.span import Span

TOP, CAP = 4, 5.0
"""The keys that top-k leaves, and a cap: small, so that a short text shows them."""


def counterfactuals(row: KernelRow, weights: Array, z: Array, key: int) -> tuple[Elsewhere, ...]:
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
    >>> half = np.array([0.5, 0.5])
    >>> found = compared("first", "", np.array([1.0, 0.0]), half, v, half, 0)
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


def _others(row: KernelRow) -> Iterator[tuple[str, str, Array | None]]:
    chain, sink = row.chain, row.sink
    at, mine = row.call.keys.numpy(), row.call.position
    wide = small_window(int(chain.visible.sum()))
    near = (at >= 0) & (np.abs(mine - at) < wide)

    def of(changed: ScoreFunction, less: float | None = sink) -> Array:
        return softmax(changed.steps()[-1].values, less).weights

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


def _top(chain: ScoreFunction) -> NDArray[np.bool_]:
    s = chain.steps()[-1].values
    keep = np.zeros(len(s), bool)
    keep[np.argsort(-s, kind="stable")[:TOP]] = True
    found: NDArray[np.bool_] = keep & chain.visible
    return found


def _alibi(row: KernelRow, at: Array, mine: int) -> Array:
    """-m_h (i - j), with the slope of the head."""
    slopes = ALiBi(row.call.place.H).block(Span(1, 1), Span(0, 1))[0, :, 0, 0]
    found: Array = float(slopes[row.head]) * np.abs(mine - at)
    return found


def _linear(chain: ScoreFunction) -> Array:
    """Linear attention by elu + 1, over what the mask allows."""
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (chain.q, chain.k))
    a = np.where(chain.visible, np.where(chain.visible[:, None], k, 0) @ q, 0.0)
    total = float(a.sum())
    return a / total if total > 0 else a


def row_cost(attention: nn.Module, sizes: dict[str, int], keys: int, itemsize: int) -> Cost:
    """The cost of one query against `keys` visible keys of S, and caches of S tokens of this layer.

    MLA stands beside with the sizes of its paper: a latent of 4 D and a rotary key of D / 2.

    >>> cost = row_cost(nn.Identity(), {"H": 4, "G": 2, "S": 100, "D": 8, "E": 8}, 50, 2)
    >>> cost.flops, [(kept.name, kept.bytes) for kept in cost.kept][:2]
    (1600, [('MHA', 12800), ('GQA, G = 2', 6400)])

    Source: sizes of MLA from DeepSeek-AI 2024 (arXiv 2405.04434), section 3.1.2.
    """
    H, G, S, D, E = (sizes[letter] for letter in "HGSDE")
    described = _described(attention, S)
    kept = [
        _kept("MHA", H * (D + E), S, itemsize),
        *([_kept(f"GQA, G = {G}", G * (D + E), S, itemsize)] if 1 < G < H else []),
        _kept("MQA", D + E, S, itemsize),
        _kept("MLA", latent_values(4 * D, D // 2), S, itemsize),
        _kept(f"window {small_window(S)}", G * (D + E), small_window(S), itemsize),
    ]
    if described is not None:
        numbers, tokens = described.kv_per_token.value, described.kv_tokens.value
        whole = described.cached_values * itemsize
        kept.append(Held("this layer", numbers, tokens, whole, here=True))
    flops = described.flops_per_token if described is not None else None
    return Cost(
        keys,
        attention_flops(keys, D, E),
        0 if flops is None else flops.value,
        "" if flops is None else flops.formula,
        attention_bytes(B=1, H=1, G=1, T=1, S=keys, D=D, E=E, itemsize=itemsize),
        tuple(kept),
    )


def _kept(name: str, numbers: int, tokens: int, itemsize: int) -> Held:
    return Held(name, numbers, tokens, numbers * tokens * itemsize, here=False)


def _described(attention: Any, context: int) -> Description | None:
    """What the module says of itself, if it does."""
    if not hasattr(attention, "describe"):
        return None
    found: Description = attention.describe(context)
    return found
