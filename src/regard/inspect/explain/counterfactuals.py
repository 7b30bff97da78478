"""The same row under other attention mechanisms: how its weights would change. Also the cost of the
row, and the sizes of caches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import nn

from regard.biases import ALiBi
from regard.cost import Description, attention_flops
from regard.cost.latent import latent_values
from regard.cost.softmax import attention_bytes
from regard.inspect.explain.attention_row import KernelRow, ScoreFunction, softmax
from regard.inspect.explain.explanation import Array, CacheCost, Counterfactual, RowCost
from regard.language import Phrase
from regard.span import Span

TOP_K, SOFTCAP = 4, 5.0
"""Number of keys that top-k keeps, and the softcap: small, so that a short text shows their
effect.
"""


def counterfactuals(
    row: KernelRow, weights: Array, z: Array, key: int
) -> tuple[Counterfactual, ...]:
    """Compute the weights of the row under other rules, each of which changes one thing."""
    return tuple(
        compare_weights(
            name,
            equation,
            weights_of_rule,
            weights,
            np.where(row.chain.visible[:, None], row.v, 0.0),
            z,
            key,
        )
        for name, equation, weights_of_rule in _other_rules(row)
        if weights_of_rule is not None
    )


def compare_weights(
    name: str, equation: str, other: Array, weights: Array, v: Array, z: Array, key: int
) -> Counterfactual:
    """Compare other weights of a row with the actual ones.

    >>> v = np.eye(2)
    >>> half = np.array([0.5, 0.5])
    >>> comparison = compare_weights("first", "", np.array([1.0, 0.0]), half, v, half, 0)
    >>> comparison.weight, comparison.total_variation, round(comparison.relative_change, 6)
    (1.0, 0.5, 1.0)
    """
    positive = other[other > 0]
    entropy = -float((positive * np.log(positive)).sum())
    size = float(np.linalg.norm(z)) or 1.0
    top = int(other.argmax())
    return Counterfactual(
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
    """Return a window size for a number of keys: 8, or less, so that it excludes some of them.

    >>> small_window(4096), small_window(6)
    (8, 3)
    """
    return min(8, max(1, keys // 2))


def _other_rules(row: KernelRow) -> Iterator[tuple[str, str, Array | None]]:
    """Generate (name, equation, weights) of each counterfactual."""
    chain, sink = row.chain, row.sink
    positions, position = row.call.keys.numpy(), row.call.position
    size = small_window(int(chain.visible.sum()))
    inside_window = (positions >= 0) & (np.abs(position - positions) < size)

    def weights_of(changed: ScoreFunction, sink_logit: float | None = sink) -> Array:
        return softmax(changed.steps()[-1].values, sink_logit).weights

    yield (
        f"window {size}",
        f"only |i - j| < {size}",
        weights_of(chain._replace(visible=chain.visible & inside_window)),
    )
    yield (
        f"top {TOP_K}",
        Phrase("only the {TOP_K} largest scores", TOP_K=TOP_K),
        weights_of(chain._replace(visible=_top_k_visible(chain))),
    )
    alibi = _alibi(row, positions, position)
    yield (
        "ALiBi",
        "s_ij - m (i - j)",
        weights_of(chain._replace(bias=alibi if chain.bias is None else chain.bias + alibi)),
    )
    if chain.softcap is None:
        yield (
            f"softcap {SOFTCAP:g}",
            f"s ← {SOFTCAP:g} tanh(s / {SOFTCAP:g})",
            weights_of(chain._replace(softcap=SOFTCAP)),
        )
    else:
        yield "no softcap", "s as it is", weights_of(chain._replace(softcap=None))
    yield "temperature 2", "s / 2", weights_of(chain._replace(scale=chain.scale / 2))
    yield "no scaling", "scale 1", weights_of(chain._replace(scale=1.0))
    if chain.bias is not None:
        yield "no bias", "s without b_ij", weights_of(chain._replace(bias=None))
    if sink is not None:
        yield "no sink", "Σ exp without the sink's term", weights_of(chain, None)
    yield "linear", "φ(q_i) · φ(k_j) / Σ,  φ = elu + 1", _linear_attention(chain)


def _top_k_visible(chain: ScoreFunction) -> NDArray[np.bool_]:
    """Return which visible keys are among the `TOP_K` largest scores."""
    s = chain.steps()[-1].values
    keep = np.zeros(len(s), bool)
    keep[np.argsort(-s, kind="stable")[:TOP_K]] = True
    visible_top: NDArray[np.bool_] = keep & chain.visible
    return visible_top


def _alibi(row: KernelRow, positions: Array, position: int) -> Array:
    """Return the ALiBi bias -m_h (i - j), with the slope of the head."""
    slopes = ALiBi(row.call.place.H).block(Span(1, 1), Span(0, 1))[0, :, 0, 0]
    bias: Array = float(slopes[row.head]) * np.abs(position - positions)
    return bias


def _linear_attention(chain: ScoreFunction) -> Array:
    """Return the weights of linear attention with elu + 1, over the keys that the mask allows."""
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (chain.q, chain.k))
    a = np.where(chain.visible, np.where(chain.visible[:, None], k, 0) @ q, 0.0)
    total = float(a.sum())
    return a / total if total > 0 else a


def row_cost(attention: nn.Module, sizes: dict[str, int], keys: int, itemsize: int) -> RowCost:
    """Compute the cost of one query against `keys` visible keys, and the size of caches for S
    tokens of this layer.

    MLA is listed with the sizes of its paper: a latent of 4 D and a rotary key of D / 2.

    >>> cost = row_cost(nn.Identity(), {"H": 4, "G": 2, "S": 100, "D": 8, "E": 8}, 50, 2)
    >>> cost.flops, [(cache.name, cache.bytes) for cache in cost.caches][:2]
    (1600, [('MHA', 12800), ('GQA, G = 2', 6400)])

    Source: sizes of MLA from DeepSeek-AI 2024 (arXiv 2405.04434), section 3.1.2.
    """
    H, G, S, D, E = (sizes[letter] for letter in "HGSDE")
    described = _describe(attention, S)
    caches = [
        _cache_cost("MHA", H * (D + E), S, itemsize),
        *(
            [_cache_cost(Phrase("GQA, G = {G}", G=G), G * (D + E), S, itemsize)]
            if 1 < G < H
            else []
        ),
        _cache_cost("MQA", D + E, S, itemsize),
        _cache_cost("MLA", latent_values(4 * D, D // 2), S, itemsize),
        _cache_cost(f"window {small_window(S)}", G * (D + E), small_window(S), itemsize),
    ]
    if described is not None:
        numbers, tokens = described.kv_per_token.value, described.kv_tokens.value
        whole = described.cached_values * itemsize
        caches.append(CacheCost("this layer", numbers, tokens, whole, is_this_layer=True))
    flops = described.flops_per_token if described is not None else None
    return RowCost(
        keys,
        attention_flops(keys, D, E),
        0 if flops is None else flops.value,
        "" if flops is None else flops.formula,
        attention_bytes(B=1, H=1, G=1, T=1, S=keys, D=D, E=E, itemsize=itemsize),
        tuple(caches),
    )


def _cache_cost(name: str, numbers: int, tokens: int, itemsize: int) -> CacheCost:
    return CacheCost(name, numbers, tokens, numbers * tokens * itemsize, is_this_layer=False)


def _describe(attention: object, context: int) -> Description | None:
    """Return the module's description of its cost, if it has one."""
    if not hasattr(attention, "describe"):
        return None
    description: Description = attention.describe(context)
    return description
