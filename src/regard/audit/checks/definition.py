"""Compare the output with the definition, and name the fewest faults that explain it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters.base import CheckNotApplicable, CheckNotPossible, TargetAdapter
from regard.audit.adapters.functions import FunctionAdapter
from regard.audit.adapters.projections import unused_parameters
from regard.audit.check_context import CheckContext, position_of_largest, worst_mismatch
from regard.audit.fault_search import (
    LENGTH,
    FaultSearch,
    WeightInterpretation,
    reference_inputs,
    same_dtype_references,
)
from regard.audit.findings import FAULTS, Finding, finding
from regard.audit.graph_checks import GraphFault, check_operations, check_rotary, find_softcap
from regard.audit.reference import (
    AttentionVariant,
    reference_attention,
    score_scale,
)
from regard.language import Phrase, counted

_FAULTY_VALUES_BY_NAME: dict[str, tuple[str, ...]] = {
    "scale-missing": ("scale", "none"),
    "scale-twice": ("scale", "twice"),
    "scale-wrong-dim": ("scale", "length", "model_dim"),
    "scale-inverted": ("scale", "inverted"),
    "scale-wrong": ("scale", "fitted"),
    "keys-values-exchanged": ("roles", "keys-values"),
    "queries-keys-exchanged": ("roles", "queries-keys"),
    "queries-values-exchanged": ("roles", "queries-values"),
    "gqa-head-order": ("groups", "tiled"),
    "mask-polarity": ("mask", "inverted"),
    "own-key-hidden": ("mask", "own-hidden", "own-hidden-first", "own-hidden-zero"),
    "future-leak": ("mask", "next-seen", "unmasked"),
    "window-off-by-one": ("mask", "one-more", "one-less"),
    "mask-zeroed": ("mask", "zeroed"),
    "mask-after-softmax": ("mask", "after"),
    "softmax-axis": ("softmax", "queries", "heads"),
    "softmax-missing": ("softmax", "absent", "linear", "unnormalized", "exponentials", "sigmoid"),
    "weights-uniform": ("softmax", "uniform"),
    "bias-sign": ("bias", "alibi-grows", "given-negated"),
    "sink-renormalized": ("sink", "renormalized"),
    "heads-split": ("split", "rows"),
    "heads-joined": ("join", "rows"),
    "output-missing": ("output", "absent"),
    "rotary-mixed": ("rotary", "mixed", "mixed-back"),
}
FAULT_NAMES = {
    (field, value): name
    for name, (field, *values) in _FAULTY_VALUES_BY_NAME.items()
    for value in values
}
"""(Field, faulty value) of `AttentionVariant` -> name of the fault."""
_ROTARY_FAULTS = {
    "heads": "rotary-axis",
    "values": "rotary-values",
    "queries": "rotary-one-sided",
    "each": "rotary-mixed",
    "opposite": "rotary-not-relative",
}
LONGEST_WINDOW = 64
"""The definition is checked with tokens beyond the window if the window is at most this long."""


def name_of(field: str, value: str) -> str:
    """Return the name of the fault for a faulty value of a field of `AttentionVariant`."""
    if (field, value) in FAULT_NAMES:
        return FAULT_NAMES[field, value]
    return _ROTARY_FAULTS[value.partition("-")[0]]


def check_definition(context: CheckContext, T: int = LENGTH) -> list[Finding]:
    """Check that the output is that of the definition with the code's own weights.

    If no variant reproduces it, a module's recorded operations show whether other steps (a norm,
    a gate, a latent) surround correct attention.
    """
    W = context.adapter.claims.window
    if W and W + 2 <= LONGEST_WINDOW:
        T = max(T, W + 2)
    if context.notes.get("checked by operations"):
        return check_by_operations(context, T)
    try:
        search = FaultSearch(context, T)
    except CheckNotApplicable:
        raise
    except CheckNotPossible as reason:
        return _check_without_weights(context, T, reason.args[0])
    if context.notes.get("differs"):  # a smaller example of an output that no variant reproduces
        return _definition_differs(search)
    if "softcap" not in context.notes:
        context.notes["softcap"] = _softcap(context)
        search.inputs_cache.clear()
    match = search.simplest()
    if match is not None:
        interpretation, variant = match
        rotary_findings = (
            [] if variant.faults or variant.rotary != "none" else _rotary_by_head(context)
        )
        if rotary_findings:
            return rotary_findings
        if (
            variant.faults
            and _difference_from_correct(context, search, interpretation, variant) is None
        ):
            raise CheckNotPossible(
                Phrase("{tokens} show no difference", tokens=counted(T, "token"))
            )
        context.notes.setdefault("interpretation", interpretation)
        context.notes.setdefault("variant", variant)
        return _findings_of_faults(context, search, interpretation, variant)
    return _not_reproduced(context, search, T)


def _softcap(context: CheckContext) -> float | None:
    """Return the softcap of a function, or None."""
    adapter = context.exact_adapter
    is_function = isinstance(adapter, FunctionAdapter)
    return find_softcap(adapter, context.random_tokens(1, 3)) if is_function else None


def _findings_of_faults(
    context: CheckContext,
    search: FaultSearch,
    interpretation: WeightInterpretation,
    variant: AttentionVariant,
) -> list[Finding]:
    """Return a finding for each fault of a variant that reproduces the output."""
    difference = _difference_from_correct(context, search, interpretation, variant)
    if difference is None:
        return []
    example, expected, got = difference
    return [
        finding(
            name_of(field, getattr(variant, field)),
            _sentence(variant, field, search, interpretation),
            example,
            expected,
            got,
        )
        for field in variant.faults
    ]


def _difference_from_correct(
    context: CheckContext,
    search: FaultSearch,
    interpretation: WeightInterpretation,
    variant: AttentionVariant,
) -> tuple[dict[str, int], float, float] | None:
    """Return (example, expected, actual) where the correct variant differs most, or None."""
    x, out = search.runs[0]
    corrected: dict[str, Any] = {name: _correct_value(name, variant) for name in variant.faults}
    correct = replace(variant, **corrected)
    ref = reference_attention(search.inputs_for(interpretation, x, torch.float64), correct)
    if (
        ref.shape == out.shape
        and worst_mismatch(out, same_dtype_references(context, interpretation, correct, x)[:1], ref)
        is None
    ):
        return None
    return largest_difference(out, ref, interpretation)


def largest_difference(
    out: Tensor, ref: Tensor, interpretation: WeightInterpretation
) -> tuple[dict[str, int], float, float]:
    """Return the example, the expected number and the actual number of the largest difference."""
    T = out.shape[1]
    sizes = {"heads": interpretation.maps.heads, "head_dim": interpretation.maps.head_dim}
    if ref.shape != out.shape:
        return {"T": T, **sizes}, float(ref.numel()), float(out.numel())
    error = (out.double() - ref).abs()
    b, t, c = position_of_largest(error)
    example = {"T": T, "row": b, "query": t, "feature": c, **sizes}
    return example, float(ref[b, t, c]), float(out[b, t, c])


def _correct_value(name: str, variant: AttentionVariant) -> str:
    """Return the correct value of a field, for a variant in which it is faulty."""
    if name == "rotary":
        return "interleaved" if variant.rotary.endswith(("interleaved", "mixed")) else "half"
    is_alibi = name == "bias" and "alibi" in variant.bias
    return "alibi" if is_alibi else str(getattr(AttentionVariant(), name))


def _sentence(
    variant: AttentionVariant, field: str, search: FaultSearch, interpretation: WeightInterpretation
) -> str:
    """Return the sentence of a finding: the fault, and that it reproduces the output."""
    others = [name_of(f, getattr(variant, f)) for f in variant.faults if f != field]
    with_others = Phrase(" together with {others}", others=", ".join(others)) if others else ""
    scale = ""
    if field == "scale":
        x = search.runs[0][0]
        numbers = search.inputs_for(interpretation, x, torch.float64)
        correct_scale = score_scale(numbers, AttentionVariant())
        scale = Phrase(
            " It is {scale:.6g} instead of {correct_scale:.6g}, with heads of {head_dim}.",
            scale=score_scale(numbers, variant),
            correct_scale=correct_scale,
            head_dim=interpretation.maps.head_dim,
        )
    return Phrase(
        "{summary}{scale} Attention with this fault{with_others} reproduces the output, and "
        "correct attention does not.",
        summary=Phrase(FAULTS[name_of(field, getattr(variant, field))].summary),
        scale=scale,
        with_others=with_others,
    )


def _not_reproduced(context: CheckContext, search: FaultSearch, T: int) -> list[Finding]:
    """Return the findings of an output that no variant reproduces."""
    rounded = _rounded_to_half(context, search)
    if rounded:
        return rounded
    others = []
    if context.adapter.traced_module() is not None:
        try:
            return check_by_operations(context, T)
        except CheckNotPossible as why:
            original: nn.Module = getattr(context.adapter, "original")  # noqa: B009
            others = unused_parameters(original, [r.maps for r in search.interpretations])
            if others:
                raise CheckNotPossible(
                    Phrase(
                        "its projections were read, and no plain attention with them reproduces "
                        "its output: it has other steps ({others}), and {why}",
                        others=", ".join(others[:3]),
                        why=why.args[0],
                    )
                ) from why
    elif not isinstance(context.adapter, FunctionAdapter):
        raise CheckNotPossible(
            "its projections were read, and no plain attention with them reproduces its output"
        )
    context.notes["differs"] = True
    return _definition_differs(search)


def _definition_differs(search: FaultSearch) -> list[Finding]:
    """Return the finding of an output that no correct variant gives."""
    for interpretation in search.interpretations:
        for variant in search.correct_variants(interpretation):
            if search.reproduces(interpretation, variant):
                return []
    interpretation, variant = search.nearest_correct()
    x, out = search.runs[0]
    ref = reference_attention(search.inputs_for(interpretation, x, torch.float64), variant)
    sentence = (
        "The output is not that of attention with these weights, and no known fault explains it."
    )
    return [finding("definition-differs", sentence, *largest_difference(out, ref, interpretation))]


def _rounded_to_half(context: CheckContext, search: FaultSearch) -> list[Finding]:
    """Return a finding if the output is only rounded to half precision on the way."""
    adapter = context.adapter
    if adapter.dtype not in (torch.float32, torch.float64):
        return []
    interpretation, variant = search.nearest_correct()
    x, out = search.runs[-1]
    ref = reference_attention(search.inputs_for(interpretation, x, torch.float64), variant)
    if ref.shape != out.shape:
        return []
    difference = out.double() - ref
    relative_error = float(difference.abs().max()) / float(ref.abs().max())
    # between the rounding error of weights in float16 and that of scores in bfloat16
    if (
        not torch.finfo(torch.float16).eps / 32
        <= relative_error
        <= 4 * torch.finfo(torch.bfloat16).eps
    ):
        return []
    # if the tokens change a little, the effect of a fault changes a little, whereas rounding errors
    # change completely
    generator = torch.Generator().manual_seed(5)
    perturbed = x * (1 + 3e-3 * torch.randn(x.shape, generator=generator, dtype=x.dtype))
    moved_difference = context.call(perturbed).out.double() - reference_attention(
        reference_inputs(context, interpretation, perturbed, torch.float64), variant
    )
    if float((moved_difference - difference).abs().max()) < 0.3 * float(difference.abs().max()):
        return []
    name = str(adapter.dtype).removeprefix("torch.")
    sentence = Phrase(
        "In {name} the output has a relative error of {relative_error:.2g}, as if intermediate "
        "results were rounded to half precision.",
        name=name,
        relative_error=relative_error,
    )
    return [finding("precision-lost", sentence, *largest_difference(out, ref, interpretation))]


def _check_without_weights(context: CheckContext, T: int, why: str) -> list[Finding]:
    """Check the operations alone if the weights cannot be read."""
    if why == "its output is not finite":
        return _not_finite(context, T)
    if context.adapter.traced_module() is None:
        raise CheckNotPossible(why)
    try:
        return check_by_operations(context, T)
    except CheckNotPossible as second:
        raise CheckNotPossible(
            Phrase("{why}; and {second}", why=why, second=second.args[0])
        ) from second


def _not_finite(context: CheckContext, T: int) -> list[Finding]:
    """Return the finding of an output with NaN or infinities."""
    x = context.random_tokens(2, T, turn=3) * 1.5
    out = context.call(x).out
    if bool(out.isfinite().all()):
        out = context.call(context.random_tokens(2, T + 2, turn=3) * 1.5).out
    bad = ~out.isfinite().all(-1)
    t = int(bad.any(0).to(torch.int64).argmax())
    n = out.shape[1]
    sentence = Phrase("Token {t} of {n} ordinary tokens is NaN or infinite.", t=t, n=n)
    example = {"T": n, "query": t}
    return [finding("output-not-finite", sentence, example, "finite", "nan or inf")]


def check_by_operations(context: CheckContext, T: int) -> list[Finding]:
    """Check the recorded operations at this length, with at least two tokens."""
    adapter = context.exact_adapter
    x = context.random_tokens(1, max(T, 2), turn=3)
    all_queries = getattr(adapter, "query_keys", None) is None
    if not all_queries and _output_is_weighted_tokens(adapter, x):
        context.notes["checked by operations"] = True
        return []
    faults = check_operations(
        adapter, x, adapter.claims.scale, adapter.width, all_queries=all_queries
    )
    if not faults and all_queries:
        faults = check_rotary(adapter, x[:, :1].expand(-1, 6, -1).clone())
    context.notes["checked by operations"] = True
    return [_finding_of(each, x.shape[1]) for each in faults]


def _output_is_weighted_tokens(adapter: TargetAdapter, x: Tensor) -> bool:
    """Whether the output is the sum of the tokens with the returned weights, which sum to 1."""
    reply = adapter.call(x)
    if reply.weights is None or reply.out.shape != x.shape:
        return False
    weights = reply.weights[:, 0]
    close = torch.finfo(weights.dtype).eps ** 0.5
    sums_are_one = bool(((weights.sum(-1) - 1).abs() < close).all())
    return sums_are_one and bool(((weights @ x.to(weights.dtype) - reply.out).abs() < close).all())


def _rotary_by_head(context: CheckContext) -> list[Finding]:
    """Return a finding if a rotary turns by the index of the head.

    With a key per head it cancels in every score, so that only recorded operations show it.
    """
    adapter = context.exact_adapter
    if adapter.traced_module() is None:
        return []
    x = context.random_tokens(1, 1, turn=3).expand(-1, 7, -1).clone()
    try:
        return [
            _finding_of(each, 7) for each in check_rotary(adapter, x) if each.name == "rotary-axis"
        ]
    except CheckNotPossible:
        return []


def _finding_of(fault: GraphFault, T: int) -> Finding:
    """Turn a fault of the operations at length T into a finding."""
    return finding(fault.name, fault.sentence, {"T": T}, fault.expected, fault.got)
