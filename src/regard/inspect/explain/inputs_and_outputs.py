"""The steps before and after the weights of a row: how q, k and v were computed, the weighted
values, the contribution of each head to the output, and whole patterns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from regard.inspect.explain.attention_row import Checks, max_difference, to_array
from regard.inspect.explain.captured_run import CapturedRun, QueryCall
from regard.inspect.explain.explanation import (
    Array,
    ComputationStep,
    HeadOutput,
    HeadPatterns,
    HiddenStates,
    InputChain,
    RotaryAngles,
)
from regard.inspect.explain.prepared_run import AttentionSite
from regard.language import Phrase
from regard.nn.explainable import Explainable, InputSteps, MechanismSteps, ProjectionQuery
from regard.positions import Rotary
from regard.span import Positions, as_tensor

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
    """Return the steps of q, k and v as the mechanism describes them, and compare the last ones
    with the recorded inputs.
    """
    steps: dict[str, tuple[ComputationStep, ...]] = {}
    checks: Checks = {}
    for name, described_steps, head, recorded_values in zip(
        "qkv", (described.q, described.k, described.v), heads, recorded, strict=True
    ):
        if name == "q":
            chain = _steps_of_head(described_steps, head, row=query.row)
        else:
            chain = _steps_of_head(described_steps, head)
            if (
                described_steps
                and len(chain[-1].values) > len(recorded_values)
                and int(columns.min()) >= 0
            ):
                # the call had only some of the keys
                chain = tuple(s._replace(values=s.values[columns]) for s in chain)
        matches = bool(chain) and chain[-1].values.shape == recorded_values.shape
        if matches:
            checks[name] = max_difference(chain[-1].values, recorded_values)
        index = "i" if name == "q" else "j"
        steps[name] = (
            chain
            if matches
            else (
                ComputationStep(
                    "input",
                    Phrase("{name}_{index}, the input of attention", name=name, index=index),
                    recorded_values,
                ),
            )
        )
    angles, angle_error = _rotary_angles(described, query, len(recorded[0]))
    if angles.layout:
        checks["angles"] = angle_error
    return InputChain(steps["q"], steps["k"], steps["v"], recorded[2], angles), checks


def _steps_of_head(
    links: MechanismSteps, head: int, row: int | None = None
) -> tuple[ComputationStep, ...]:
    """Select one head, and optionally one row, from each step; a step shared by all heads has
    one head.
    """

    def part(x: Tensor) -> Array:
        own = x[head % len(x)]
        return to_array(own if row is None else own[row])

    return tuple(ComputationStep(link.name, link.equation, part(link.values)) for link in links)


def _rotary_angles(
    described: InputSteps, query: ProjectionQuery, D: int
) -> tuple[RotaryAngles, float]:
    """Return the rotary pairs and angles, and the error of these angles against the module's own
    rotation.
    """
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
            if described.rotary_start + dim < D:
                pairs[described.rotary_start + dim] = pair
    return RotaryAngles(rotary.layout, angles, angle, tuple(pairs)), error


def _measured_angles(rotary: Rotary, positions: Positions) -> tuple[Array, float]:
    """Measure the rotation at positions by applying the module to the pairs (1, 0): the angles
    `[T, pairs]` and the factor.
    """
    n, T = rotary.inv_freq.shape[0], as_tensor(positions).shape[1]
    unit_pairs = torch.zeros(
        1, 1, T, rotary.dim, dtype=torch.float32, device=rotary.inv_freq.device
    )
    first = slice(0, n) if rotary.layout == "half" else slice(0, 2 * n, 2)
    second = slice(n, 2 * n) if rotary.layout == "half" else slice(1, 2 * n, 2)
    unit_pairs[..., first] = 1
    rotated = to_array(rotary(unit_pairs, positions)[0, 0])
    pairs = rotated[:, first] + 1j * rotated[:, second]
    return np.angle(pairs), float(np.abs(pairs).max(initial=1.0))


def head_output(
    mechanism: Explainable, weights: Array, v: Array, run: CapturedRun, head: int, i: int
) -> tuple[HeadOutput, Checks]:
    """Compute the weighted values, their sum, the output of the head, and what the head adds
    through the output projection.
    """
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
    """Return the contribution of each head alone to the output, `[H, M]`, and the output for
    zero input (the bias), `[M]`.
    """
    # [H, H*E]: row h contains head h, and 0 for the other heads
    alone = torch.diag_embed(joined.T).permute(1, 2, 0).flatten(1)
    rows = torch.cat([alone, torch.zeros_like(alone[:1])])
    outputs = to_array(output(rows[:, None])[:, 0])
    return outputs[:-1] - outputs[-1], outputs[-1]


def hidden_states(run: CapturedRun, site: AttentionSite, i: int) -> tuple[HiddenStates, Checks]:
    """Return the hidden states of the query token, and the error of the recomputed residual
    path.
    """
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


def head_patterns(call: QueryCall, head: int, whole: int) -> HeadPatterns:
    """Return the pattern of the head, if it has at most `whole` queries and keys, and pooled
    patterns of all heads.

    For a longer text only the pooled pattern of the explained head is computed, some rows at a
    time; for a very long text, none.
    """
    step = call.step
    H, T, S = len(call.weights), step.T, len(call.keys)
    short = max(T, S) <= whole
    heads = range(H) if short else range(head, head + 1)
    if len(heads) * T * S > MAX_PATTERN_PAIRS:
        return HeadPatterns()
    n = max(1, -(-max(T, S) // MAX_CELLS))
    shape = (H, -(-T // n), -(-S // n))
    small, full = np.full(shape, np.nan), np.zeros((T if short else 0, S))
    for start in range(0, T, QUERIES_PER_CHUNK // n * n or n):
        rows = slice(start, min(start + (QUERIES_PER_CHUNK // n * n or n), T))
        s, p = (x[0].numpy() for x in call.place.step_block(step, rows, slice(0, S), tuple(heads)))
        part = np.where(np.isneginf(s), np.nan, p)
        small[list(heads), rows.start // n : -(-rows.stop // n)] = pool_largest(part, n)
        if short:
            full[rows] = part[head]
    return HeadPatterns(full, n, small)


def pool_largest(blocks: Array, n: int) -> Array:
    """Pool patterns `[H, T, S]` to `[H, t, s]` by the maximum over n x n cells; NaN marks masked
    cells.

    >>> pool_largest(np.eye(4)[None], 2).tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    H, T, S = blocks.shape
    t, s = -(-T // n), -(-S // n)
    padded = np.full((H, t * n, s * n), np.nan)
    padded[:, :T, :S] = blocks
    filled = np.where(np.isnan(padded), -np.inf, padded).reshape(H, t, n, s, n).max((2, 4))
    return np.where(np.isneginf(filled), np.nan, filled)
