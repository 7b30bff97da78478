"""Checks of numbers: large scores, sums of weights, finite parameters, and what is saved."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.audit.adapters.base import CheckNotApplicable, CheckNotPossible
from regard.audit.check_context import CheckContext
from regard.audit.findings import Finding, finding
from regard.language import Phrase, counted

FACTORS = (4.0, 16.0, 64.0)
"""The factors on standard normal tokens that give large scores."""


def check_large_scores(context: CheckContext, T: int = 4) -> list[Finding]:
    """Check that large tokens, whose scaled scores fit in the dtype, give finite outputs."""
    x = context.random_tokens(1, T)
    if not x.is_floating_point():
        raise CheckNotApplicable("its tokens are ids, which cannot be scaled")
    for factor in _factors(context, x):
        out = context.call(x * factor).out
        if bool(out.isfinite().all()):
            continue
        i = int((~out.isfinite()).any(-1)[0].to(torch.int64).argmax())
        sentence = Phrase(
            "Standard normal tokens times {factor:.4g} make output {i} NaN or infinite.",
            factor=factor,
            i=i,
        )
        return [
            finding(
                "softmax-overflow",
                sentence,
                {"T": T, "times": factor, "query": i},
                "finite",
                "nan or inf",
            )
        ]
    return []


def _factors(context: CheckContext, x: Tensor) -> tuple[float, ...]:
    """Return factors on the tokens; in float16 scores reach half of the largest number."""
    if context.adapter.dtype != torch.float16:
        return FACTORS
    maps = context.adapter.projections()[0]
    q, k = (x @ w.double().T for w, _ in (maps.q, maps.k))
    q, k = (torch.unflatten(t, -1, (-1, maps.head_dim)).transpose(1, 2) for t in (q, k))
    scores = q @ k.repeat_interleave(maps.heads // maps.groups, 1).mT * maps.head_dim**-0.5
    half = torch.finfo(torch.float16).max / 2
    return ((half / float(scores.abs().max())) ** 0.5,)


def check_finite_parameters(context: CheckContext) -> list[Finding]:
    """Check that every parameter is finite."""
    state = context.adapter.state_tensors()
    if not state:
        raise CheckNotApplicable("it has no weights")
    for name, x in state.items():
        if x.is_floating_point() and not bool(x.isfinite().all()):
            n = int((~x.isfinite()).sum())
            sentence = Phrase(
                "{values} of {n} in {name} is not finite."
                if n == 1
                else "{values} of {n} in {name} are not finite.",
                values=counted(n, "value"),
                n=x.numel(),
                name=name,
            )
            return [
                finding(
                    "parameters-not-finite",
                    sentence,
                    {"tensor": name},
                    0.0,
                    float(n),
                )
            ]
    return []


def check_state_dict(context: CheckContext, T: int = 16) -> list[Finding]:
    """Check that no mask and no cache is among the saved tensors."""
    state = context.adapter.state_tensors()
    if state is None:
        raise CheckNotApplicable("it saves nothing")
    original = getattr(context.adapter, "original", None)
    learned = (
        {name for name, _ in original.named_parameters()} if original is not None else set(state)
    )
    extra = {
        name: x
        for name, x in state.items()
        if name not in learned and not _is_tied(name, x, state, learned)
    }
    written: frozenset[str] = getattr(context.adapter, "written_tensors", frozenset())
    for name, x in extra.items():
        if name in written or _is_mask(x, T):
            size = x.numel() * x.element_size()
            return [
                finding(
                    "cache-in-state-dict",
                    Phrase(
                        "{name} {shape} is saved with the weights: {size} bytes.",
                        name=name,
                        shape=list(x.shape),
                        size=size,
                    ),
                    {"tensor": name},
                    0.0,
                    float(size),
                )
            ]
    return []


def _is_mask(x: Tensor, T: int) -> bool:
    """Whether x [..., N, N] has two values and shows the past, or a window of it."""
    if x.ndim < 2 or not x.shape[-1] == x.shape[-2] >= T:
        return False
    later = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    hidden, visible = x[..., :1, 1:2], x[..., :1, :1]
    return (
        bool((hidden != visible).all())
        and bool(((x == hidden) | (x == visible)).all())
        and bool((x[..., 1:, 1:] == x[..., :-1, :-1]).all())
        and bool((x[..., 1:, :1][..., :1, :] == visible).all())
        and bool((torch.where(later, x, hidden) == hidden).all())
    )


def _is_tied(name: str, x: torch.Tensor, state: dict[str, torch.Tensor], learned: set[str]) -> bool:
    """Whether a tensor is a parameter under a second name, as tied weights are."""
    return any(
        x.data_ptr() == state[other].data_ptr()
        for other in learned
        if other in state and other != name
    )


def check_weight_sums(context: CheckContext, T: int = 4) -> list[Finding]:
    """Check that each row of the returned weights sums to 1."""
    if "weights" not in context.adapter.accepts:
        raise CheckNotApplicable("it returns no weights")
    x = context.random_tokens(1, T)
    weights = context.call(x, weights=True).weights
    if weights is None:
        raise CheckNotPossible("it returned no weights in a call that requests them")
    rows = weights.double().sum(-1)
    deviation = (rows - 1).abs()
    # the rounding error of a sum of T numbers of at most 1
    if float(deviation.max()) <= 2 * T * torch.finfo(weights.dtype).eps and bool(
        (weights >= 0).all()
    ):
        return []
    b, h, i = (int(n) for n in torch.unravel_index(deviation.argmax(), deviation.shape))
    columns = weights.double().sum(-2)
    columns_sum_to_one = float((columns - 1).abs().max()) <= 2 * T * torch.finfo(weights.dtype).eps
    # all weights are 1 if the softmax runs over an axis of size 1, such as the batch
    all_ones = T > 1 and bool((weights == 1).all())
    name = "softmax-axis" if columns_sum_to_one or all_ones else "weights-sum"
    rest = (
        ", and those of each key to 1."
        if columns_sum_to_one
        else ": each of them is 1."
        if all_ones
        else "."
    )
    total = float(rows[b, h, i])
    text = "The weights of query {i}, head {h} sum to {total:.6g}{rest}"
    sentence = Phrase(text, i=i, h=h, total=total, rest=Phrase(rest))
    return [finding(name, sentence, {"T": T, "head": h, "query": i}, 1.0, float(rows[b, h, i]))]
