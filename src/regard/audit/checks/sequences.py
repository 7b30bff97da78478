"""Checks of long texts, of steps with a cache, and of positions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.audit.adapters.base import (
    CallInputs,
    CheckNotApplicable,
    CheckNotPossible,
    TargetAdapter,
)
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
    """Return a finding if the output at length T differs from that of `variant`."""
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
        sentence = Phrase("Query {t} of {tokens} gets no output.", t=t, tokens=counted(T, "token"))
        numbers = {"T": T, "query": t}, "an output", "nothing, or zeros"
        return finding("queries-dropped", sentence, *numbers)
    inputs = reference_inputs(context, interpretation, x, torch.float64)
    for block in BLOCK_SIZES:
        for rescaled in ("neither", "sum", "values"):
            ref = _blockwise_output(inputs, variant, block, rescaled)
            if ref is None:
                continue
            plains = same_dtype_references(context, interpretation, variant, x)
            if worst_mismatch(out, plains, ref) is None:
                return _unrescaled_blocks(context, interpretation, variant, block, mismatch)
    shorter = _shortest_failing_length(context, interpretation, variant, T)
    x = context.random_tokens(1, shorter, turn=3)
    inputs, out = (
        reference_inputs(context, interpretation, x, torch.float64),
        context.call(x).out,
    )
    ref = reference_attention(inputs, variant)
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

    `rescaled` is "neither", "sum" (of weights) or "values"; None for a variant with sinks or bias.
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
    """Check that a few queries with many keys, as with a cache, give the last rows of all."""
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
    ref = reference_attention(reference_inputs(context, interpretation, x, torch.float64), variant)
    plains = same_dtype_references(context, interpretation, variant, x)
    mismatch = worst_mismatch(out, [p[:, -FEW_QUERIES:] for p in plains], ref[:, -FEW_QUERIES:])
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


LENGTH_WITHOUT_WINDOW = 7
"""The number of tokens in tests of a cache without a window."""
MANY_TOKENS = 40
"""Chunkings with many short chunks are left out for more tokens than this."""
LONGEST = 400
"""The largest number of tokens in tests of a cache with a window."""
SHIFT = 11
"""The number by which `check_position_shift` shifts all positions."""


def tested_length(context: CheckContext) -> int:
    """Return the number of tokens for tests of the cache: three windows and one token.

    Without a window it is `LENGTH_WITHOUT_WINDOW`; if these are too many, `MANY_TOKENS`.
    """
    W = context.adapter.cache_window
    return (
        LENGTH_WITHOUT_WINDOW if W is None else 3 * W + 1 if 3 * W + 1 <= LONGEST else MANY_TOKENS
    )


def chunkings(T: int, W: int | None, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield ways to cut T tokens into chunks, as tuples of lengths.

    Single tokens; a prompt and two tokens; equal chunks; one and the rest; all but one and the
    last; two random cuts. W is the window, or None.
    """
    if T <= MANY_TOKENS:
        yield (1,) * T
    yield (T - 2, 1, 1)
    for n in dict.fromkeys((*((2, 3) if T <= MANY_TOKENS else ()), W or 2, (W or 2) + 1)):
        yield (*(n,) * (T // n), *((T % n,) if T % n else ()))
    yield (1, T - 1)
    yield (T - 1, 1)
    draw = random.Random(seed)  # noqa: S311  # not for secrets
    for _ in range(2):
        cuts = sorted(draw.sample(range(1, T), min(T - 1, 3)))
        yield tuple(b - a for a, b in zip([0, *cuts], [*cuts, T], strict=True))


def check_cache(context: CheckContext, T: int | None = None) -> list[Finding]:
    """Check that every chunking gives the result of one pass, or report the shortest failure."""
    if "memory" not in context.adapter.accepts:
        raise CheckNotApplicable("it takes no cache")
    if getattr(context.adapter, "causal_flag", False):
        raise CheckNotApplicable(
            "its causal flag does not say which positions the queries have if there are more keys "
            "than queries"
        )
    if not context.causal:
        raise CheckNotApplicable(
            "it is bidirectional, so that later tokens change all earlier results"
        )
    longest = T or tested_length(context)
    W = context.adapter.cache_window
    finding, refused = _first_failure(context, longest)
    if finding is None:
        n = len(set(chunkings(longest, W, context.seed)))
        if refused:
            refusals = Phrase(
                "{failed} of {n} chunkings raised {error}",
                failed=len(refused),
                n=n,
                error=refused[0],
            )
            if len(refused) == n:
                raise CheckNotPossible(refusals)
            raise CheckNotApplicable(
                Phrase(
                    "{refusals}, and the other {others} agree",
                    refusals=refusals,
                    others=n - len(refused),
                )
            )
        if W and longest <= W:
            raise CheckNotPossible(
                Phrase(
                    "{tokens} agree, but three windows of {W} are too long to test",
                    tokens=counted(longest, "token"),
                    W=W,
                )
            )
        return []
    for shorter in range(2, longest):
        smaller, _ = _first_failure(context, shorter)
        if smaller is not None:
            return [smaller]
    return [finding]


def _first_failure(context: CheckContext, T: int) -> tuple[Finding | None, list[str]]:
    """Return the first chunking of T tokens that fails, and the errors that calls raised."""
    x, W = context.random_tokens(2, T), context.adapter.cache_window
    refused: list[str] = []
    one_pass = context.reference_outputs(x, lambda adapter, x: context.call(x, adapter=adapter).out)
    for chunks in dict.fromkeys(chunkings(T, W, context.seed)):
        if min(chunks) < 1:
            continue
        try:
            finding = _check_chunking(context, x, chunks, one_pass)
        except CheckNotPossible:
            raise
        except Exception as error:  # the code refuses such chunks, which is not a wrong result
            refused.append(f"{type(error).__name__}: {str(error)[:160]}")
            continue
        if finding is not None:
            return finding, refused
    return None, refused


def _check_chunking(
    context: CheckContext, x: Tensor, chunks: tuple[int, ...], one_pass: tuple[list[Tensor], Tensor]
) -> Finding | None:
    """Return a finding if chunks of these lengths differ from one pass."""
    T, (plains, ref) = x.shape[1], one_pass
    out, _ = context.run_cached(x, chunks, context.adapter)
    if out.shape[1] != T:
        sentence = Phrase(
            "Chunks of {chunks} give {outputs} for {tokens}.",
            chunks=_token_counts(chunks),
            outputs=counted(out.shape[1], "output"),
            tokens=counted(T, "token"),
        )
        example = {"T": T, "chunks": list(chunks)}
        return finding("cache-output-length", sentence, example, float(T), float(out.shape[1]))
    mismatch = worst_mismatch(out, plains, ref)
    if mismatch is None:
        return None
    error = (out.double() - ref).abs().transpose(0, 1).flatten(1).amax(1)
    t = int((~(error <= mismatch.allowed)).to(torch.int64).argmax())
    sentence = Phrase(
        "In chunks of {chunks}, output {t} differs from that of one pass of {T}.",
        chunks=_token_counts(chunks),
        t=t,
        T=T,
    )
    example = {"T": T, "chunks": list(chunks), "token": t}
    return finding("cache-differs", sentence, example, mismatch.expected, mismatch.got)


def check_cache_growth(context: CheckContext, T: int | None = None) -> list[Finding]:
    """Check that the cache of a layer with a window stops growing."""
    W = context.adapter.claims.window
    if W is None:
        raise CheckNotApplicable("no window is claimed (--window W)")
    if "memory" not in context.adapter.accepts:
        raise CheckNotApplicable("it takes no cache")
    if isinstance(context.adapter, FunctionAdapter):
        raise CheckNotApplicable("a function keeps no cache of its own")
    longest = T or min(6 * W, 64)
    x = context.random_tokens(1, longest)
    sizes = []
    for n in (longest // 2, longest):
        _, memory = context.run_cached(x[:, :n], (1,) * n, context.adapter)
        sizes.append(context.adapter.cache_size(memory))
    if sizes[1] <= sizes[0] or longest // 2 <= W + 1:
        return []
    sentence = Phrase(
        "The cache of a window of {W} holds {numbers} after {tokens} and {n} after {longest}.",
        W=W,
        numbers=counted(sizes[0], "number"),
        tokens=counted(longest // 2, "token"),
        n=sizes[1],
        longest=longest,
    )
    example = {"T": longest, "window": W}
    return [finding("cache-grows", sentence, example, *map(float, sizes))]


def _token_counts(chunks: tuple[int, ...]) -> str:
    """Write the lengths of chunks as "2 + 3 tokens"."""
    *first, last = chunks
    return Phrase(
        "{first} + {last}", first=" + ".join(map(str, first)), last=counted(last, "token")
    )


def check_position_shift(context: CheckContext, T: int = 5) -> list[Finding]:
    """Check that shifting all positions by one number changes nothing."""
    adapter = context.adapter
    if "positions" not in adapter.accepts:
        raise CheckNotApplicable("it takes no positions")
    if getattr(adapter, "positions_index_cache", False):
        raise CheckNotApplicable("its positions are indices into a cache that it holds")
    if not adapter.relative:
        raise CheckNotApplicable("its results may depend on absolute positions")
    x = context.random_tokens(1, T)
    keep = context.expected_mask(T, T)[None] if context.masked else None

    def run_from(start: int, adapter: TargetAdapter, x: Tensor) -> Tensor:
        positions = torch.arange(start, start + T)[None]
        return adapter.call(x, CallInputs(keep=keep, positions=positions)).out

    mismatch = context.compare(
        x, lambda a, x: run_from(SHIFT, a, x), lambda a, x: run_from(0, a, x)
    )
    if mismatch is None:
        return []
    sentence = Phrase(
        "Positions {SHIFT} to {last} give other results than positions 0 to {t}.",
        SHIFT=SHIFT,
        last=SHIFT + T - 1,
        t=T - 1,
    )
    example = {"T": T, "shift": SHIFT, "output": list(mismatch.position)}
    return [finding("position-shift", sentence, example, mismatch.expected, mismatch.got)]
