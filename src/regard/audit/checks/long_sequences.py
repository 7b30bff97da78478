"""Check the definition at lengths that no block size divides, and with more keys than queries: code
that is correct for a few tokens can be wrong for many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.audit.adapters.base import CheckNotApplicable
from regard.audit.adapters.functions import FunctionAdapter
from regard.audit.check_context import LONG_LENGTHS, CheckContext, Mismatch, worst_mismatch
from regard.audit.checks.definition import check_by_operations, largest_difference
from regard.audit.fault_search import (
    WeightInterpretation,
    reference_inputs,
    same_dtype_references,
)
from regard.audit.findings import Finding, finding
from regard.audit.reference import (
    AttentionVariant,
    ReferenceInputs,
    join_and_project,
    products_and_values,
    reference_attention,
    score_scale,
)
from regard.language import Phrase, counted

FEW_QUERIES = 7
"""The number of queries in a test with more keys than queries."""
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
"""The block sizes that are tried to explain a wrong output for many tokens."""


def check_long_sequences(context: CheckContext) -> list[Finding]:
    """Check the definition at a length that no block divides, and with more keys than queries."""
    if context.notes.get("differs"):
        raise CheckNotApplicable("the code differs from the definition at small lengths already")
    interpretation, variant = context.notes.get("interpretation"), context.notes.get("variant")
    if interpretation is None or variant is None:
        if not context.notes.get("checked by operations"):
            raise CheckNotApplicable(
                "the code could not be compared with the definition at small lengths"
            )
        return _check_long_by_operations(context)
    if variant.faults:
        raise CheckNotApplicable("the code has a known fault, which is reported already")
    length_error = None
    for T in LONG_LENGTHS:
        try:
            findings = _check_length(context, interpretation, variant, T)
        except Exception as error:  # the code has a maximum length
            length_error = error
            continue
        if not findings and isinstance(context.adapter, FunctionAdapter):
            findings = _check_more_keys(context, context.adapter, interpretation, variant, T)
        context.notes["long definition holds"] = not findings
        return findings
    raise CheckNotApplicable(
        Phrase(
            "it accepts no long sequences: {kind}: {error}",
            kind=type(length_error).__name__,
            error=str(length_error)[:200],
        )
    )


def _check_long_by_operations(context: CheckContext) -> list[Finding]:
    """Check the operations at the longest length that the code takes."""
    for T in LONG_LENGTHS:
        try:
            x = context.random_tokens(1, T, turn=3)
            context.call(x)
        except Exception:  # noqa: S112  # the code has a maximum length
            continue
        return check_by_operations(context, T)
    raise CheckNotApplicable("it accepts no long sequences")


def _check_length(
    context: CheckContext, interpretation: WeightInterpretation, variant: AttentionVariant, T: int
) -> list[Finding]:
    """Return a finding if the output at length T differs from that of `variant`, which reproduced
    the outputs at small lengths.
    """
    x = context.random_tokens(1, T, turn=3)
    mismatch = _mismatch(context, interpretation, variant, x, context.call(x).out)
    if mismatch is None:
        return []
    return [_long_sequence_fault(context, interpretation, variant, x, mismatch)]


def _mismatch(
    context: CheckContext,
    interpretation: WeightInterpretation,
    variant: AttentionVariant,
    x: Tensor,
    out: Tensor,
) -> Mismatch | None:
    """Return where an output differs from a variant, or None."""
    ref = reference_attention(reference_inputs(context, interpretation, x, torch.float64), variant)
    return worst_mismatch(out, same_dtype_references(context, interpretation, variant, x), ref)


def _long_sequence_fault(
    context: CheckContext,
    interpretation: WeightInterpretation,
    variant: AttentionVariant,
    x: Tensor,
    mismatch: Mismatch,
) -> Finding:
    """Return the finding of an output that is correct for few tokens and wrong for many."""
    T, out = x.shape[1], context.call(x).out
    has_output = (out != 0).any(-1)[0] & out.isfinite().all(-1)[0]
    if out.shape[1] < T or not bool(has_output.all()):
        t = out.shape[1] if out.shape[1] < T else int((~has_output).to(torch.int64).argmax())
        return finding(
            "queries-dropped",
            Phrase("Query {t} of {tokens} gets no output.", t=t, tokens=counted(T, "token")),
            {"T": T, "query": t},
            "an output",
            "nothing, or zeros",
        )
    for block in BLOCK_SIZES:
        for rescaled in ("neither", "sum", "values"):
            ref = _blockwise_output(
                reference_inputs(context, interpretation, x, torch.float64),
                variant,
                block,
                rescaled,
            )
            if (
                ref is not None
                and worst_mismatch(
                    out, same_dtype_references(context, interpretation, variant, x), ref
                )
                is None
            ):
                return _unrescaled_blocks(context, interpretation, variant, block, mismatch)
    shorter = _shortest_failing_length(context, interpretation, variant, T)
    x = context.random_tokens(1, shorter, turn=3)
    ref, out = (
        reference_attention(reference_inputs(context, interpretation, x, torch.float64), variant),
        context.call(x).out,
    )
    sentence = Phrase(
        "The output is correct for few tokens, and wrong for {shorter}.", shorter=shorter
    )
    return finding("definition-differs", sentence, *largest_difference(out, ref, interpretation))


def _unrescaled_blocks(
    context: CheckContext,
    interpretation: WeightInterpretation,
    variant: AttentionVariant,
    block: int,
    mismatch: Mismatch,
) -> Finding:
    """Return the finding of blocks that are joined without rescaling."""
    T = block + 1
    x = context.random_tokens(1, T, turn=3)
    short_mismatch = _mismatch(context, interpretation, variant, x, context.call(x).out)
    reported = mismatch if short_mismatch is None else short_mismatch
    example = {
        "T": LONG_LENGTHS[0] if short_mismatch is None else T,
        "block": block,
        "output": list(reported.position),
    }
    sentence = Phrase(
        "Blocks of {keys} are joined without rescaling, which reproduces the output.",
        keys=counted(block, "key"),
    )
    return finding("softmax-not-rescaled", sentence, example, reported.expected, reported.got)


def _blockwise_output(
    numbers: ReferenceInputs, variant: AttentionVariant, block: int, rescaled: str
) -> Tensor | None:
    """Compute an online softmax in which a new maximum does not rescale all earlier sums.

    `rescaled` says which sums are rescaled: "neither", "sum" (of the weights), or "values" (the
    weighted sum of the values). The result is None for a variant with sinks or a bias.
    """
    if numbers.maps.sinks is not None or variant.bias != "none":
        return None
    products, v = products_and_values(numbers, variant)
    scores = (products * score_scale(numbers, variant)).masked_fill(~numbers.keep, -torch.inf)
    T = scores.shape[-1]
    block_maxima = (
        torch.stack([s.amax(-1) for s in torch.split(scores, block, -1)], -1).cummax(-1).values
    )
    running = block_maxima.repeat_interleave(block, -1)[..., :T]
    running_weights = torch.exp(scores - running.masked_fill(running == -torch.inf, 0.0))
    correct_weights = torch.exp(scores - block_maxima[..., -1:])
    numerator_weights, denominator_weights = {
        "neither": (running_weights, running_weights),
        "sum": (running_weights, correct_weights),
        "values": (correct_weights, running_weights),
    }[rescaled]
    return join_and_project(
        numbers, variant, (numerator_weights @ v) / denominator_weights.sum(-1, keepdim=True)
    )


def _shortest_failing_length(
    context: CheckContext, interpretation: WeightInterpretation, variant: AttentionVariant, T: int
) -> int:
    """Return a short length at which the output differs, by bisection between 1 and T tokens."""
    low, high = 1, T
    while high - low > 1:
        middle = (low + high) // 2
        x = context.random_tokens(1, middle, turn=3)
        if _mismatch(context, interpretation, variant, x, context.call(x).out) is None:
            low = middle
        else:
            high = middle
    return high


def _check_more_keys(
    context: CheckContext,
    adapter: FunctionAdapter,
    interpretation: WeightInterpretation,
    variant: AttentionVariant,
    T: int,
) -> list[Finding]:
    """Check a few queries with many keys, as with a cache: their outputs must be the last rows of
    the output of all queries.
    """
    if "flag" in context.notes and adapter.causal_flag:
        return []  # a causal flag does not say which positions the queries have
    x = context.random_tokens(1, T, turn=3)
    keep = (
        context.expected_mask(FEW_QUERIES, T, causal=interpretation.causal)[None]
        if context.masked
        else None
    )
    if interpretation.causal and not context.masked and not context.causal:
        return []
    out = adapter.call_last_queries(x, FEW_QUERIES, keep)
    ref = reference_attention(reference_inputs(context, interpretation, x, torch.float64), variant)[
        :, -FEW_QUERIES:
    ]
    mismatch = worst_mismatch(
        out,
        [p[:, -FEW_QUERIES:] for p in same_dtype_references(context, interpretation, variant, x)],
        ref,
    )
    if mismatch is None:
        return []
    example = {"T": FEW_QUERIES, "S": T, "output": list(mismatch.position)}
    sentence = Phrase(
        "{queries} against {keys} give other results than the last {FEW_QUERIES} of all {T}.",
        queries=counted(FEW_QUERIES, "query", "queries"),
        keys=counted(T, "key"),
        FEW_QUERIES=FEW_QUERIES,
        T=T,
    )
    name = "cache-differs" if interpretation.causal else "definition-differs"
    return [finding(name, sentence, example, mismatch.expected, mismatch.got)]
