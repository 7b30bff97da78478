"""Checks of numbers and of calls: large scores, sums of weights, what is saved, equal calls."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from regard.audit.adapters.base import (
    CallInputs,
    CheckNotApplicable,
    CheckNotPossible,
    TargetAdapter,
    influence,
)
from regard.audit.adapters.call_arguments import ARGUMENT_NAMES
from regard.audit.check_context import CheckContext, position_of_largest
from regard.audit.findings import Finding, finding
from regard.language import Phrase, counted
from regard.process_state import seeded

FACTORS = (4.0, 16.0, 64.0)
"""The factors on standard normal tokens that give large scores."""


def _number_differs(
    name: str,
    sentence: str,
    example: dict[str, object],
    expected: Tensor,
    got: Tensor,
    *,
    tensor: str = "output",
    position: tuple[int, ...] | None = None,
) -> list[Finding]:
    """Return the finding of a number at a position, by default that of the largest difference."""
    position = position or position_of_largest((got - expected).abs())
    example = {**example, tensor: list(position)}
    return [finding(name, sentence, example, float(expected[position]), float(got[position]))]


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
        example = {"T": T, "times": factor, "query": i}
        return [finding("softmax-overflow", sentence, example, "finite", "nan or inf")]
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
            return [finding("parameters-not-finite", sentence, {"tensor": name}, 0.0, float(n))]
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
            sentence = Phrase(
                "{name} {shape} is saved with the weights: {size} bytes.",
                name=name,
                shape=list(x.shape),
                size=x.nbytes,
            )
            example = {"tensor": name}
            return [finding("cache-in-state-dict", sentence, example, 0.0, float(x.nbytes))]
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
    b, h, i = position_of_largest(deviation)
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


CALLS = 6
"""The number of equal calls that are compared."""


def check_repeatable(context: CheckContext, T: int = 8) -> list[Finding]:
    """Check that equal calls give bitwise equal results; dropout depends on random seeds."""
    x = context.random_tokens(2, T)
    with seeded(None):
        outs = []
        for turn in range(CALLS):
            torch.manual_seed(turn)
            outs.append(context.call(x).out)
        torch.manual_seed(0)
        same_seed = context.call(x).out
    differences = [(out - outs[0]).abs() for out in outs]
    worst = max(differences, key=lambda each: float(each.max()))
    if all(_equal(out, outs[0]) for out in outs):
        return []
    differing = next(out for out, each in zip(outs, differences, strict=True) if each is worst)
    name, why = "dropout-in-eval", "the random seed alone changes the result, in evaluation mode"
    if not _equal(same_seed, outs[0]):
        fresh_outputs = [
            context.call(x, adapter=context.adapter.to_dtype(context.adapter.dtype)).out
            for _ in range(2)
        ]
        # if copies that were never called before agree, the first call has changed the state
        state_changed = _equal(fresh_outputs[0], fresh_outputs[1])
        name = "state-kept" if state_changed else "not-repeatable"
        why = "a second call differs from the first" if state_changed else "equal calls differ"
    sentence = Phrase("For one input, {why}.", why=Phrase(why))
    return _number_differs(name, sentence, {"T": T}, outs[0], differing)


def check_input_unchanged(context: CheckContext, T: int = 4) -> list[Finding]:
    """Check that a call does not change its input."""
    if hasattr(context.adapter, "call_function"):
        return _check_heads_unchanged(context, T)
    x = context.random_tokens(1, T)
    x = x.to(context.adapter.dtype) if x.is_floating_point() else x
    before = x.clone()
    context.call(x)
    return _input_changed("The call changes its tokens.", T, "input", before, x)


def _input_changed(
    sentence: str, T: int, tensor: str, before: Tensor, after: Tensor
) -> list[Finding]:
    """Return the finding of the first number of an input that a call has changed, if any."""
    if torch.equal(before, after):
        return []
    first = tuple(int(i) for i in (before != after).nonzero()[0])
    return _number_differs(
        "input-changed", sentence, {"T": T}, before, after, tensor=tensor, position=first
    )


def _check_heads_unchanged(context: CheckContext, T: int) -> list[Finding]:
    """Check that a function does not change q, k and v."""
    adapter = context.adapter
    heads = adapter.project_heads(context.random_tokens(1, T).to(adapter.dtype))  # type: ignore[attr-defined]
    before = [h.clone() for h in heads]
    keep = context.expected_mask(T, T)[None] if context.masked else None
    adapter.call_function(*heads, CallInputs(keep))  # type: ignore[attr-defined]
    for name, original, current in zip("qkv", before, heads, strict=True):
        sentence = Phrase("The call changes {name}.", name=name)
        if changed := _input_changed(sentence, T, name, original, current):
            return changed
    return []


def check_stateless(context: CheckContext, T: int = 5) -> list[Finding]:
    """Check that calls with other lengths and batches in between change nothing."""
    x = context.random_tokens(2, T)
    outputs = context.call(x).out
    context.call(context.random_tokens(2, T, turn=1))
    context.call(context.random_tokens(1, T + 3, turn=2))
    repeated = context.call(x).out
    if outputs.shape == repeated.shape and _equal(outputs, repeated):
        return _check_other_length(context, T)
    if outputs.shape != repeated.shape:
        shapes = (str(tuple(out.shape)) for out in (outputs, repeated))
        return [finding("state-kept", "The shape of the output changes.", {"T": T}, *shapes)]
    sentence = "The same call gives another result after calls with other tokens."
    return _number_differs("state-kept", sentence, {"T": T}, outputs, repeated)


def _check_other_length(context: CheckContext, T: int) -> list[Finding]:
    """Check that an earlier call of another length changes nothing."""
    n = T + 3
    used_adapter, new_adapter = (context.adapter.to_dtype(context.adapter.dtype) for _ in range(2))
    x = context.random_tokens(1, n, turn=2)
    context.call(context.random_tokens(1, T, turn=1), adapter=used_adapter)

    def run(adapter: TargetAdapter, x: Tensor) -> Tensor:
        return context.call(x, adapter=adapter).out

    later, alone = run(used_adapter, x), run(new_adapter, x)
    if later.shape != alone.shape or later.isnan().any() or alone.isnan().any():
        return []
    if float((later - alone).abs().max()) <= 1e-3 * float(alone.abs().max()):
        return []
    masked = torch.ones(n, n).triu(1).bool()
    visible, visible_alone = (
        influence(partial(run, adapter), x, context.replace_token).visible
        for adapter in (used_adapter, new_adapter)
    )
    mask_reused = bool((visible != visible_alone)[masked].any())
    name = "mask-kept" if mask_reused else "state-kept"
    sentence = Phrase(
        "A call of {tokens} after a call of {T} gives another result than alone.",
        tokens=counted(n, "token"),
        T=T,
    )
    return _number_differs(name, sentence, {"T": n, "before": T}, alone, later)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, with NaN at the same places."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def check_arguments(context: CheckContext) -> list[Finding]:
    """Check that some call has passed each argument of the code."""
    untried = context.adapter.untried_arguments()
    if untried is None:
        raise CheckNotApplicable("its adapter decides what is passed")
    if not untried:
        return []
    why = Phrase(
        "no call has passed {names}; give an adapter that passes what matters",
        names=", ".join(untried),
    )
    steps = {n for role in ("start", "positions", "memory") for n in ARGUMENT_NAMES[role]}
    is_open = not steps.isdisjoint(untried)
    raise CheckNotPossible(why) if is_open else CheckNotApplicable(why)
