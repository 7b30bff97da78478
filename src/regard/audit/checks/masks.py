"""Checks of masks and padding: True, rows, hidden tokens, and rows without a key."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.audit.adapters.base import (
    CallInputs,
    CheckNotApplicable,
    CheckNotPossible,
    TargetAdapter,
    influence,
)
from regard.audit.adapters.call_arguments import CallKeywords, MaskFormat
from regard.audit.check_context import CheckContext
from regard.audit.findings import Finding, finding
from regard.audit.graph_checks import mask_sets_scores_to_zero
from regard.language import Phrase

_FAULT_BY_VERDICT = {
    "inverted": ("mask-polarity", "{name} hides the keys that it should show"),
    "ignored": ("mask-ignored", "{name} changes nothing"),
    "added": ("mask-added", "{name} changes the output, and hides no key"),
    "kept": (
        "mask-kept",
        "The {name} of the first call is used in a later call with another mask.",
    ),
    "overflow": ("mask-value-overflow", "{name} cannot be applied"),
}
_MEANING = {
    "keep": "True = may attend",
    "block": "True = hidden",
    "ones": "1 = may attend",
    "additive": "0 and finfo.min, added",
}


PADDING_LENGTH = 3
"""The number of padded slots in front of a row."""


def check_masks(context: CheckContext) -> list[Finding]:
    """Check that masks have the claimed meaning."""
    findings = []
    behaviors = context.notes.get("mask_behavior", {})
    if not behaviors:
        raise CheckNotApplicable("it takes no mask")
    for role, behavior in behaviors.items():
        if behavior.verdict not in _FAULT_BY_VERDICT or behavior.mask_format is None:
            continue
        name, template = _FAULT_BY_VERDICT[behavior.verdict]
        kind = behavior.mask_format.kind
        keywords: CallKeywords = getattr(context.adapter, "keywords")  # noqa: B009  # every adapter with mask behavior has them
        argument = getattr(keywords, role) or keywords.padding
        sentence = Phrase(
            "{what}: {meaning} was expected (give --mask if the code has another convention).",
            what=Phrase(template, name=argument),
            meaning=Phrase(_MEANING[kind]),
        )
        if behavior.verdict == "overflow":
            findings.append(
                overflow_finding(context.adapter, Phrase("{name}: a number", name=argument))
            )
        elif behavior.verdict == "kept":
            numbers = {"T": 5, "calls": 2}, "the second mask", "the first mask"
            findings.append(finding(name, Phrase(template, name=argument), *numbers))
        else:
            effect = _effect_of_hidden_key(context, role, kind)
            if behavior.verdict == "added" and _is_zeroed(context, behavior.mask_format):
                name = "mask-zeroed"
                sentence = Phrase(
                    "{name} sets hidden scores to about 0, which hides no key.", name=argument
                )
            findings.append(finding(name, sentence, *effect))
    if all(behavior.verdict == "refused" for behavior in behaviors.values()):
        raise CheckNotPossible(
            "no mask format that was tried is accepted and has the effect of a mask; give an "
            "adapter that passes the mask"
        )
    return findings


def _is_zeroed(context: CheckContext, mask_format: MaskFormat) -> bool:
    """Whether a mask in this format sets hidden scores to about 0."""
    adapter: Any = context.exact_adapter
    masked_adapter = adapter.with_conventions(
        replace(adapter.keywords, mask_format=mask_format), adapter.output_format
    )
    x = context.random_tokens(1, 5)
    return mask_sets_scores_to_zero(
        masked_adapter, x, CallInputs(torch.ones(1, 5, 5).tril().bool())
    )


def overflow_finding(adapter: TargetAdapter, what: str) -> Finding:
    """Return the finding of a number that the dtype cannot hold."""
    name = str(adapter.dtype).removeprefix("torch.")
    most = torch.finfo(adapter.dtype).max
    sentence = Phrase(
        "{what} that is written in the code does not fit in {name}, and the call raises an error.",
        what=what,
        name=name,
    )
    expected = Phrase("at most {most:.6g}", most=most)
    example = {"T": 5, "dtype": name}
    return finding("mask-value-overflow", sentence, example, expected, "RuntimeError")


def _effect_of_hidden_key(
    context: CheckContext, role: str, kind: str
) -> tuple[dict[str, object], float, float]:
    """Replace key 0, which the claimed mask hides from the last query, and measure the effect."""
    adapter: Any = context.exact_adapter
    keywords = adapter.keywords
    shape = (
        getattr(keywords, f"{role}_format") or context.notes["mask_behavior"][role].mask_format
    ).shape
    masked_adapter = adapter.with_conventions(
        replace(keywords, **{f"{role}_format": MaskFormat(shape, kind)}), adapter.output_format
    )
    for T in (2, 3, 4):
        x, keep = context.random_tokens(1, T), torch.ones(1, T, T).tril().bool()
        keep[0, -1, 0] = False
        inputs = (
            CallInputs(tokens=torch.arange(T)[None] > 0) if role == "padding" else CallInputs(keep)
        )
        measured = influence(partial(_output, masked_adapter, inputs), x, context.replace_token)
        amount = float(measured.amount[T - 1, 0])
        if amount > measured.threshold:
            break
    return {"T": T, "query": T - 1, "hidden key": 0}, 0.0, amount


def _output(adapter: TargetAdapter, inputs: CallInputs, x: Tensor) -> Tensor:
    """Return the output of a call."""
    return adapter.call(x, inputs).out


def check_mask_rows(context: CheckContext, T: int = 4) -> list[Finding]:
    """Check that two rows with different masks in one batch give what each gives alone."""
    if not context.adapter.accepts & {"rows", "padding"}:
        raise CheckNotApplicable("it takes no mask for each row of a batch")
    mask = context.expected_mask(T, T)
    tokens = torch.arange(T) != torch.tensor([[1], [2]])  # each row hides another key
    by_keys = "rows" not in context.adapter.accepts
    x = torch.cat([context.random_tokens(1, T)] * 2)

    def run_rows(adapter: TargetAdapter, x: Tensor, rows: slice) -> Tensor:
        if by_keys:
            return context.call(x[rows], tokens=tokens[rows], adapter=adapter).out
        return adapter.call(x[rows], CallInputs(keep=(mask & tokens[:, None])[rows])).out

    def together(adapter: TargetAdapter, x: Tensor) -> Tensor:
        return run_rows(adapter, x, slice(None))[1:, T - 1 :]

    def alone(adapter: TargetAdapter, x: Tensor) -> Tensor:
        return run_rows(adapter, x, slice(1, 2))[:, T - 1 :]

    mismatch = context.compare(x, together, alone)
    if mismatch is None:
        return []
    sentence = Phrase(
        "Token {t} of row 1 gives another result beside a row with another mask.", t=T - 1
    )
    return [finding("mask-rows", sentence, {"B": 2, "T": T}, mismatch.expected, mismatch.got)]


def _require_padding_mask(context: CheckContext) -> None:
    """Raise `CheckNotApplicable` if the code takes no mask that can mark padding."""
    if not context.adapter.accepts & {"padding", "rows", "mask"}:
        raise CheckNotApplicable("it takes no mask that could mark padding")


def check_padding_content(context: CheckContext, T: int = 6) -> list[Finding]:
    """Check that replacing a padded token, in front or at the end, changes no other token."""
    _require_padding_mask(context)
    adapter = context.exact_adapter
    x = context.random_tokens(1, T)
    for pad in (0, T - 1):
        tokens = torch.arange(T)[None] != pad

        def run(x: Tensor, tokens: Tensor = tokens) -> Tensor:
            return context.call(x, tokens=tokens, adapter=adapter).out

        measured = influence(run, x, context.replace_token)
        affected = measured.visible[:, pad].clone()
        affected[pad] = False
        if bool(affected.any()):
            i = int(affected.to(torch.int64).argmax())
            amount = float(measured.amount[i, pad])
            numbers = {"T": T, "padding": pad, "query": i}, 0.0, amount
            if _hides_query(context, x, tokens, pad):
                sentence = Phrase(
                    "The padding mask changes query {pad}, which is padding, and hides its key "
                    "from no query.",
                    pad=pad,
                )
                return [finding("padding-on-queries", sentence, *numbers)]
            zeroed = "padding" in adapter.accepts and mask_sets_scores_to_zero(
                adapter, x, CallInputs(tokens=tokens)
            )
            sentence = Phrase(
                "Token {i} changes with the content of the padding at {pad}.", i=i, pad=pad
            )
            return [finding("mask-zeroed" if zeroed else "padding-leak", sentence, *numbers)]
    return []


def _hides_query(context: CheckContext, x: Tensor, tokens: Tensor, pad: int) -> bool:
    """Whether the padding mask changes the output of the padded token and of no other."""
    with_mask = context.call(x, tokens=tokens, adapter=context.exact_adapter).out
    without = context.exact_output(x)
    difference = (with_mask - without).abs().amax(-1)[0]
    difference = torch.where(difference.isnan(), torch.inf, difference)
    least = float(without.abs().max()) * torch.finfo(without.dtype).eps ** 0.5
    others = torch.arange(difference.shape[0]) != pad
    return bool(difference[pad] > least) and bool((difference[others] <= least).all())


def check_nan_behind_mask(context: CheckContext, T: int = 4) -> list[Finding]:
    """Check that NaN in a padded slot reaches no token."""
    if not context.strict:
        raise CheckNotApplicable(
            "it is only made with --strict: plain softmax code multiplies hidden values by 0"
        )
    _require_padding_mask(context)
    x = context.random_tokens(1, T)
    if not x.is_floating_point():
        raise CheckNotApplicable("tokens are ids, which cannot be NaN")
    x[0, 0] = float("nan")
    out = context.call(x, tokens=torch.arange(T)[None] > 0).out[0, 1:]
    if bool(out.isfinite().all()):
        return []
    i = int((~out.isfinite()).any(-1).to(torch.int64).argmax()) + 1
    sentence = Phrase("NaN in the padded slot 0 makes token {i} NaN.", i=i)
    example = {"T": T, "padding": 0, "query": i}
    return [finding("garbage-leak", sentence, example, "finite", "nan")]


def check_left_padding(context: CheckContext, T: int = 4) -> list[Finding]:
    """Check that a row with padding in front, beside a longer row, gives what it gives alone."""
    takes = context.adapter.accepts
    if not takes & {"padding", "rows"}:
        raise CheckNotApplicable("it takes no mask for each row of a batch that could mark padding")
    n = T + PADDING_LENGTH
    x = context.random_tokens(2, n)
    tokens = torch.ones(2, n, dtype=torch.bool)
    tokens[0, :PADDING_LENGTH] = False

    def padded(adapter: TargetAdapter, x: Tensor) -> Tensor:
        return context.call(x, tokens=tokens, adapter=adapter).out[:1, PADDING_LENGTH:]

    def alone(adapter: TargetAdapter, x: Tensor) -> Tensor:
        return context.call(x[:1, PADDING_LENGTH:], adapter=adapter).out

    mismatch = context.compare(x, padded, alone)
    if mismatch is None:
        return []
    t = mismatch.position[1] if mismatch.position else 0
    sentence = Phrase(
        "Token {t} of a row of {T} differs from the same row without {PADDING_LENGTH} padded "
        "slots in front.",
        t=t,
        T=T,
        PADDING_LENGTH=PADDING_LENGTH,
    )
    example = {"B": 2, "T": n, "padding": PADDING_LENGTH, "token": t}
    return [finding("left-padding-shift", sentence, example, mismatch.expected, mismatch.got)]


def check_empty_rows(context: CheckContext, T: int = 3) -> list[Finding]:
    """Check that a query without keys affects no other, and gives 0 under --strict."""
    takes, adapter = context.adapter.accepts, context.adapter
    if not takes & {"mask", "padding"}:
        raise CheckNotApplicable("it takes no mask that could hide every key")
    x = context.random_tokens(1, T)
    tokens = keep = None
    if "mask" in takes:
        keep = context.expected_mask(T, T)[None] & (torch.arange(T) > 0)[:, None]
    else:
        tokens = torch.arange(T)[None] > 0
    out = adapter.call(x, CallInputs(keep=keep, tokens=tokens)).out[0]
    not_finite = ~out.isfinite().all(-1)
    other_not_finite = not_finite[1:] if context.causal or keep is not None else not_finite[:0]
    if bool(other_not_finite.any()) or (context.strict and bool(not_finite.any())):
        others = bool(other_not_finite.any())
        i = int((other_not_finite if others else not_finite).to(torch.int64).argmax()) + others
        sentence = Phrase(
            "Query {i} is NaN in a call in which every key is hidden from query 0.", i=i
        )
        return [finding("empty-row", sentence, {"T": T, "query": i}, "finite", "nan")]
    if bool(not_finite.any()):
        raise CheckNotApplicable(
            "query 0 is NaN if a mask hides every key from it, and no result is claimed for such "
            "rows (--strict)"
        )
    if not context.strict or context.causal is False:
        return []
    try:
        o = adapter.projections()[0].o
    except CheckNotPossible:
        return []
    bias = None if o is None else o[1]
    expected = torch.zeros_like(out[0]) if bias is None else bias.to(out)
    difference = (out[0] - expected).abs()
    if float(difference.max()) <= torch.finfo(out.dtype).eps ** 0.5:
        return []
    position = int(difference.argmax())
    fault = "Every key is hidden from query 0, and its output is an average of all values."
    numbers = {"T": T, "query": 0}, float(expected[position]), float(out[0, position])
    return [finding("empty-row", fault, *numbers)]
