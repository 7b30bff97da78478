"""Checks of calls: equal ones agree, inputs stay, and each argument was passed."""

from __future__ import annotations

from functools import partial

import torch

from regard.audit.adapters.base import (
    CallInputs,
    CheckNotApplicable,
    CheckNotPossible,
    TargetAdapter,
    influence,
)
from regard.audit.adapters.call_arguments import MEMORY_NAMES, POSITIONS_NAMES, START_NAMES
from regard.audit.check_context import CheckContext
from regard.audit.findings import Finding, finding
from regard.language import Phrase, counted
from regard.process_state import seeded

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
    position = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
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
    return [
        finding(
            name,
            Phrase("For one input, {why}.", why=Phrase(why)),
            {"T": T, "output": list(position)},
            float(outs[0][position]),
            float(differing[position]),
        )
    ]


def check_input_unchanged(context: CheckContext, T: int = 4) -> list[Finding]:
    """Check that a call does not change its input."""
    x = (
        context.random_tokens(1, T).to(context.adapter.dtype)
        if _takes_floats(context)
        else context.random_tokens(1, T)
    )
    before = x.clone()
    call_function = getattr(context.adapter, "call_function", None)
    if call_function is not None:
        return _check_heads_unchanged(context, T)
    context.call(x)
    if torch.equal(before, x):
        return []
    position = tuple(int(i) for i in (before != x).nonzero()[0])
    return [
        finding(
            "input-changed",
            "The call changes its tokens.",
            {"T": T, "input": list(position)},
            float(before[position]),
            float(x[position]),
        )
    ]


def _check_heads_unchanged(context: CheckContext, T: int) -> list[Finding]:
    """Check that a function does not change q, k and v."""
    adapter = context.adapter
    heads = adapter.project_heads(context.random_tokens(1, T).to(adapter.dtype))  # type: ignore[attr-defined]
    before = [h.clone() for h in heads]
    keep = context.expected_mask(T, T)[None] if context.masked else None
    adapter.call_function(*heads, CallInputs(keep))  # type: ignore[attr-defined]
    for name, original, current in zip("qkv", before, heads, strict=True):
        if not torch.equal(original, current):
            position = tuple(int(i) for i in (original != current).nonzero()[0])
            return [
                finding(
                    "input-changed",
                    Phrase("The call changes {name}.", name=name),
                    {"T": T, name: list(position)},
                    float(original[position]),
                    float(current[position]),
                )
            ]
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
        return [
            finding(
                "state-kept",
                "The shape of the output changes.",
                {"T": T},
                str(tuple(outputs.shape)),
                str(tuple(repeated.shape)),
            )
        ]
    difference = (repeated - outputs).abs()
    position = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    sentence = "The same call gives another result after calls with other tokens."
    return [
        finding(
            "state-kept",
            sentence,
            {"T": T, "output": list(position)},
            float(outputs[position]),
            float(repeated[position]),
        )
    ]


def _output(context: CheckContext, adapter: TargetAdapter, x: torch.Tensor) -> torch.Tensor:
    """Return the output of the code under audit through another adapter."""
    return context.call(x, adapter=adapter).out


def _check_other_length(context: CheckContext, T: int) -> list[Finding]:
    """Check that an earlier call of another length changes nothing."""
    n = T + 3
    used_adapter, new_adapter = (context.adapter.to_dtype(context.adapter.dtype) for _ in range(2))
    x = context.random_tokens(1, n, turn=2)
    context.call(context.random_tokens(1, T, turn=1), adapter=used_adapter)
    later, alone = (
        context.call(x, adapter=used_adapter).out,
        context.call(x, adapter=new_adapter).out,
    )
    if later.shape == alone.shape and float((later - alone).abs().max()) <= 1e-3 * float(
        alone.abs().max()
    ):
        return []
    if later.shape != alone.shape or later.isnan().any() or alone.isnan().any():
        return []
    difference = (later - alone).abs()
    position = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    masked = torch.ones(n, n).triu(1).bool()
    visibilities = [
        influence(partial(_output, context, adapter), x, context.replace_token).visible
        for adapter in (used_adapter, new_adapter)
    ]
    mask_reused = bool((visibilities[0] != visibilities[1])[masked].any())
    name = "mask-kept" if mask_reused else "state-kept"
    sentence = Phrase(
        "A call of {tokens} after a call of {T} gives another result than alone.",
        tokens=counted(n, "token"),
        T=T,
    )
    return [
        finding(
            name,
            sentence,
            {"T": n, "before": T, "output": list(position)},
            float(alone[position]),
            float(later[position]),
        )
    ]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, with NaN at the same places."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _takes_floats(context: CheckContext) -> bool:
    """Whether the code takes floating-point tokens rather than ids."""
    return context.random_tokens(1, 1).is_floating_point()


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
    is_open = any(n in (*START_NAMES, *POSITIONS_NAMES, *MEMORY_NAMES) for n in untried)
    raise CheckNotPossible(why) if is_open else CheckNotApplicable(why)
