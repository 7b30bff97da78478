"""The parts of an explanation around the weights of a row: how q, k and v were computed, the
weighted values, what each head adds to the output, whole patterns, the same row under other
mechanisms, and its cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.biases import ALiBi
from regard.cost import Description, attention_flops
from regard.cost.latent import latent_values
from regard.cost.softmax import attention_bytes
from regard.inspect.explain.attention_row import (
    Checks,
    KernelRow,
    ScoreFunction,
    max_difference,
    softmax,
    to_array,
    visible_values,
)
from regard.inspect.explain.captured_run import CapturedRun, QueryCall
from regard.inspect.explain.explanation import (
    Array,
    CacheCost,
    ComputationStep,
    Counterfactual,
    HeadOutput,
    HeadPatterns,
    HiddenStates,
    InputChain,
    RotaryAngles,
    RowCost,
)
from regard.inspect.model_run import AttentionSite
from regard.language import Phrase
from regard.nn.explainable import Explainable, InputSteps, MechanismSteps, ProjectionQuery
from regard.positions import Rotary
from regard.span import Positions, Span, as_tensor

MAX_PATTERN_TOKENS = 512
"""Number of tokens up to which an explanation contains the whole pattern; for a longer text it
contains the row and a pooled pattern.
"""
MAX_CELLS = 32  # cells along a side of a small pattern
QUERIES_PER_CHUNK = 256
"""Number of queries whose weights are computed together."""
MAX_PATTERN_PAIRS = 2**25
"""The largest number of query-key pairs, over all heads, for which a pattern is drawn."""


def input_chain(
    described: InputSteps,
    query: ProjectionQuery,
    heads: tuple[int, int, int],
    recorded: tuple[Array, Array, Array],
    columns: Tensor,
) -> tuple[InputChain, Checks]:
    """Return the steps of q, k and v, and how far the last ones are from the recorded inputs."""
    steps: dict[str, tuple[ComputationStep, ...]] = {}
    checks: Checks = {}
    for name, described_steps, head, recorded_values in zip(
        "qkv", (described.q, described.k, described.v), heads, recorded, strict=True
    ):
        chain = _steps_of_head(described_steps, head, row=query.row if name == "q" else None)
        has_more = name != "q" and bool(chain) and len(chain[-1].values) > len(recorded_values)
        if has_more and int(columns.min()) >= 0:  # the call had only some of the keys
            chain = tuple(s._replace(values=s.values[columns]) for s in chain)
        matches = bool(chain) and chain[-1].values.shape == recorded_values.shape
        if matches:
            checks[name] = max_difference(chain[-1].values, recorded_values)
        index = "i" if name == "q" else "j"
        steps[name] = chain if matches else (input_step(f"{name}_{index}", recorded_values),)
    angles, angle_error = _rotary_angles(described, query, len(recorded[0]))
    if angles.layout:
        checks["angles"] = angle_error
    return InputChain(steps["q"], steps["k"], steps["v"], recorded[2], angles), checks


def input_step(name: str, values: Array) -> ComputationStep:
    """Return the first step of q, k or v where nothing is known of how it was computed."""
    return ComputationStep("input", Phrase("{name}, the input of attention", name=name), values)


def _steps_of_head(
    links: MechanismSteps, head: int, row: int | None = None
) -> tuple[ComputationStep, ...]:
    """Select one head, and optionally one row, from each step."""

    def part(x: Tensor) -> Array:
        own = x[head % len(x)]
        return to_array(own if row is None else own[row])

    return tuple(ComputationStep(link.name, link.equation, part(link.values)) for link in links)


def _rotary_angles(
    described: InputSteps, query: ProjectionQuery, D: int
) -> tuple[RotaryAngles, float]:
    """Return the rotary pairs and angles, and their error against the module's own rotation."""
    rotary, k_positions = described.rotary, as_tensor(query.k_positions)[0]
    n = len(k_positions)
    if rotary is None:
        return RotaryAngles("", np.zeros((n, 0)), np.zeros(0), (-1,) * D), 0.0
    query_position = float(as_tensor(query.positions)[0, query.row])
    of_queries, factor = _measured_angles(rotary, query.positions)
    measured = of_queries[query.row]
    error = 0.0
    if rotary.follows_length:  # the frequencies depend on the call; only the module has them
        angle, angles = measured, _measured_angles(rotary, query.k_positions)[0]
    else:
        inv_freq = to_array(rotary.inv_freq)
        angle, angles = query_position * inv_freq, to_array(k_positions)[:, None] * inv_freq
        error = float(np.abs(np.exp(1j * measured) - np.exp(1j * angle)).max(initial=0.0))
        error = max(error, abs(factor - rotary.rotary_factor))
    pairs, count = [-1] * D, len(angle)
    for pair in range(count):
        both = (pair, pair + count) if rotary.layout == "half" else (2 * pair, 2 * pair + 1)
        for dim in both:
            pairs[D - rotary.dim + dim] = pair
    return RotaryAngles(rotary.layout, angles, angle, tuple(pairs)), error


def _measured_angles(rotary: Rotary, positions: Positions) -> tuple[Array, float]:
    """Return the angles `[T, pairs]` and the factor of the rotation of the pairs (1, 0)."""
    n, T = rotary.inv_freq.shape[0], as_tensor(positions).shape[1]
    unit_pairs = rotary.inv_freq.new_zeros(1, 1, T, rotary.dim, dtype=torch.float32)
    first = slice(0, n) if rotary.layout == "half" else slice(0, 2 * n, 2)
    second = slice(n, 2 * n) if rotary.layout == "half" else slice(1, 2 * n, 2)
    unit_pairs[..., first] = 1
    rotated = to_array(rotary(unit_pairs, positions)[0, 0])
    pairs = rotated[:, first] + 1j * rotated[:, second]
    return np.angle(pairs), float(np.abs(pairs).max(initial=1.0))


def head_output(
    mechanism: Explainable, weights: Array, v: Array, run: CapturedRun, head: int, i: int
) -> tuple[HeadOutput, Checks]:
    """Compute the weighted values, their sum, the head's output, and what it adds to `out`."""
    contributions = np.where(weights[:, None] != 0, weights[:, None] * v, 0.0)
    joined = run.taps["z"][:, i]
    slot = head % joined.shape[0]
    out = to_array(run.taps["out"][i])
    written, bias = _head_contributions(mechanism.output, joined)
    return HeadOutput(
        contributions,
        contributions.sum(0),
        to_array(joined[slot]),
        to_array(joined).reshape(-1),
        written[slot],
        written @ out / max(float(out @ out), np.finfo(float).tiny),
        out,
    ), {"out": max_difference(written.sum(0) + bias, out)}


def _head_contributions(output: nn.Module, joined: Tensor) -> tuple[Array, Array]:
    """Return what each head alone adds to the output, `[H, M]`, and the bias, `[M]`."""
    # [H, H*E]: row h contains head h, and 0 for the other heads
    alone = torch.diag_embed(joined.T).permute(1, 2, 0).flatten(1)
    rows = torch.cat([alone, torch.zeros_like(alone[:1])])
    outputs = to_array(output(rows[:, None])[:, 0])
    return outputs[:-1] - outputs[-1], outputs[-1]


def hidden_states(run: CapturedRun, site: AttentionSite, i: int) -> tuple[HiddenStates, Checks]:
    """Return the hidden states of the query token, and the error of the residual path."""
    hidden, checks = run.hidden, Checks()
    empty: Array = np.zeros(0)
    entering = residual = empty
    if site.residual_path is not None and "entering" in hidden:
        entering, residual = (to_array(hidden[name][i]) for name in ("entering", "residual"))
        out = run.taps["out"][None]
        checks["residual"] = max_difference(
            to_array(site.residual_path(hidden["entering"][None], lambda _: out)[0, i]), residual
        )
    embedding, normed = (
        to_array(hidden[name][i]) if name in hidden and len(hidden[name]) > i else empty
        for name in ("embedding", "x")
    )
    return HiddenStates(embedding, entering, normed, residual), checks


def head_patterns(call: QueryCall, head: int) -> HeadPatterns:
    """Return the pattern of the head if it is short, and pooled patterns of all heads.

    Of a longer text only the explained head is pooled, some rows at a time; of a very long one,
    none.
    """
    step = call.step
    H, T, S = len(call.weights), step.T, len(call.keys)
    short = max(T, S) <= MAX_PATTERN_TOKENS
    heads = range(H) if short else range(head, head + 1)
    if len(heads) * T * S > MAX_PATTERN_PAIRS:
        return HeadPatterns()
    n = max(1, -(-max(T, S) // MAX_CELLS))
    shape = (H, -(-T // n), -(-S // n))
    small, full = np.full(shape, np.nan), np.zeros((T if short else 0, S))
    tall = QUERIES_PER_CHUNK // n * n or n
    for start in range(0, T, tall):
        rows = slice(start, min(start + tall, T))
        s, p = (x[0].numpy() for x in call.place.step_block(step, rows, slice(0, S), tuple(heads)))
        part = np.where(np.isneginf(s), np.nan, p)
        small[list(heads), rows.start // n : -(-rows.stop // n)] = pool_largest(part, n)
        if short:
            full[rows] = part[head]
    return HeadPatterns(full, n, small)


def pool_largest(blocks: Array, n: int) -> Array:
    """Pool patterns `[H, T, S]` by the maximum over n x n cells; NaN marks masked cells."""
    H, T, S = blocks.shape
    t, s = -(-T // n), -(-S // n)
    padded = np.full((H, t * n, s * n), np.nan)
    padded[:, :T, :S] = blocks
    filled = np.where(np.isnan(padded), -np.inf, padded).reshape(H, t, n, s, n).max((2, 4))
    return np.where(np.isneginf(filled), np.nan, filled)


TOP_K, SOFTCAP = 4, 5.0
"""Number of keys that top-k keeps, and the softcap: small, so that a short text shows their
effect.
"""


def counterfactuals(
    row: KernelRow, weights: Array, z: Array, key: int
) -> tuple[Counterfactual, ...]:
    """Compute the weights of the row under other rules, each of which changes one thing."""
    v = visible_values(row)
    return tuple(compare_weights(*rule, weights, v, z, key) for rule in _other_rules(row))


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


def _other_rules(row: KernelRow) -> Iterator[tuple[str, str, Array]]:
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
    best = np.argsort(-chain.steps()[-1].values, kind="stable")[:TOP_K]
    visible_top: NDArray[np.bool_] = np.isin(np.arange(len(chain.visible)), best) & chain.visible
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


def row_sizes(layers: int, H: int, G: int, T: int, k: Array, v: Array, M: int) -> dict[str, int]:
    """Return the letters of an explanation, for keys `[S, D]` and values `[S, E]`."""
    S, D = k.shape
    return {"layers": layers, "H": H, "G": G, "T": T, "S": S, "D": D, "E": v.shape[1], "M": M}


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
    describe: Any = getattr(attention, "describe", None)
    described: Description | None = None if describe is None else describe(S)
    window, grouped = small_window(S), [(Phrase("GQA, G = {G}", G=G), G * (D + E), S)]
    kinds = [
        ("MHA", H * (D + E), S),
        *(grouped if 1 < G < H else []),
        ("MQA", D + E, S),
        ("MLA", latent_values(4 * D, D // 2), S),
        (f"window {window}", G * (D + E), window),
    ]
    caches = [CacheCost(name, n, T, n * T * itemsize, is_this_layer=False) for name, n, T in kinds]
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
