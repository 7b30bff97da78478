"""Checks of caches and positions: cached chunks and shifted positions must agree with one pass."""

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
from regard.audit.check_context import CheckContext, worst_mismatch
from regard.audit.findings import Finding, finding
from regard.language import Phrase, counted

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

    Without a window it is `LENGTH_WITHOUT_WINDOW`; if three windows are too long, `MANY_TOKENS`.
    """
    W = context.adapter.cache_window
    return (
        LENGTH_WITHOUT_WINDOW if W is None else 3 * W + 1 if 3 * W + 1 <= LONGEST else MANY_TOKENS
    )


def chunkings(T: int, W: int | None, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield ways to cut T tokens into chunks, as tuples of lengths.

    They are: single tokens; a prompt and two single tokens; equal chunks; one token and the rest;
    all but one token and the last; and two random cuts. W is the window, or None.
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
    """Check that every chunking gives the result of one pass; report the shortest failing
    length.
    """
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
        return finding(
            "cache-output-length",
            sentence,
            {"T": T, "chunks": list(chunks)},
            float(T),
            float(out.shape[1]),
        )
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
    return finding(
        "cache-differs",
        sentence,
        {"T": T, "chunks": list(chunks), "token": t},
        mismatch.expected,
        mismatch.got,
    )


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
    return [
        finding(
            "cache-grows", sentence, {"T": longest, "window": W}, float(sizes[0]), float(sizes[1])
        )
    ]


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
        return adapter.call(
            x, CallInputs(keep=keep, positions=torch.arange(start, start + T)[None])
        ).out

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
    return [
        finding(
            "position-shift",
            sentence,
            {"T": T, "shift": SHIFT, "output": list(mismatch.position)},
            mismatch.expected,
            mismatch.got,
        )
    ]
