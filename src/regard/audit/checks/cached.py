"""Cached steps and shifted positions against one pass over the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.audit.adapters.functions import Function
from regard.audit.findings import Finding, finding
from regard.audit.probe import Probe, gap
from regard.audit.subject import Ask, CannotTry, NotApplicable, Subject

SHORTEST, SLOW, LONGEST = 7, 40, 400


SHIFT = 11


def length(probe: Probe) -> int:
    """Three windows and one token, or a few tokens where there is no window, or one that is too
    long.
    """
    W = probe.subject.reach
    return SHORTEST if W is None else 3 * W + 1 if 3 * W + 1 <= LONGEST else SLOW


def chunkings(T: int, W: int | None, seed: int) -> Iterator[tuple[int, ...]]:
    """Ways to cut T tokens: steps, prompt and steps, equal chunks, a long chunk behind a short one,
    ragged ones.
    """
    if T <= SLOW:
        yield (1,) * T
    yield (T - 2, 1, 1)
    for n in dict.fromkeys((*((2, 3) if T <= SLOW else ()), W or 2, (W or 2) + 1)):
        yield (*(n,) * (T // n), *((T % n,) if T % n else ()))
    yield (1, T - 1)
    yield (T - 1, 1)
    draw = random.Random(seed)  # noqa: S311  # not for secrets
    for _ in range(2):
        cuts = sorted(draw.sample(range(1, T), min(T - 1, 3)))
        yield tuple(b - a for a, b in zip([0, *cuts], [*cuts, T], strict=True))


def differs(probe: Probe, T: int | None = None) -> list[Finding]:
    """Every chunking gives what one pass gives; the smallest failing length and chunking is
    told.
    """
    if "memory" not in probe.subject.takes:
        raise NotApplicable("it takes no cache")
    if getattr(probe.subject, "flag", False):
        raise NotApplicable("its causal flag does not say where fewer queries than keys stand")
    if not probe.causal:
        raise NotApplicable("it is bidirectional, and so has nothing to cache")
    most = T or length(probe)
    W = probe.subject.reach
    bad, refused = _first(probe, most)
    if bad is None:
        n = len(set(chunkings(most, W, probe.seed)))
        if refused:
            told = f"{len(refused)} of {n} chunkings raised {refused[0]}"
            if len(refused) == n:
                raise CannotTry(told)
            raise NotApplicable(f"{told}, and the other {n - len(refused)} agree")
        if W and most <= W:
            raise CannotTry(f"{most} tokens agree, but three windows of {W} are too long to try")
        return []
    for shorter in range(2, most):
        smaller, _ = _first(probe, shorter)
        if smaller is not None:
            return [smaller]
    return [bad]


def _first(probe: Probe, T: int) -> tuple[Finding | None, list[str]]:
    """The first chunking of T tokens that fails, and what calls raised."""
    x, W = probe.inputs(2, T), probe.subject.reach
    refused: list[str] = []
    standard = probe.standard(x, lambda subject, x: probe.ask(x, subject=subject).out)
    for chunks in dict.fromkeys(chunkings(T, W, probe.seed)):
        if min(chunks) < 1:
            continue
        try:
            found = _one(probe, x, chunks, standard)
        except CannotTry:
            raise
        except Exception as error:  # it does not serve such chunks, which is no wrong number
            refused.append(f"{type(error).__name__}: {str(error)[:160]}")
            continue
        if found is not None:
            return found, refused
    return None, refused


def _one(
    probe: Probe, x: Tensor, chunks: tuple[int, ...], standard: tuple[list[Tensor], Tensor]
) -> Finding | None:
    T, (plains, ref) = x.shape[1], standard
    out, _ = probe.steps(x, chunks, probe.subject)
    if out.shape[1] != T:
        sentence = f"Chunks of {_say(chunks)} tokens give {out.shape[1]} outputs for {T} tokens."
        return finding(
            "cache-output-length",
            sentence,
            {"T": T, "chunks": list(chunks)},
            float(T),
            float(out.shape[1]),
        )
    off = gap(out, plains, ref)
    if off is None:
        return None
    error = (out.double() - ref).abs().transpose(0, 1).flatten(1).amax(1)
    t = int((~(error <= off.allowed)).to(torch.int64).argmax())
    sentence = (
        f"In chunks of {_say(chunks)} tokens, output {t} differs from that of one pass of {T}."
    )
    return finding(
        "cache-differs",
        sentence,
        {"T": T, "chunks": list(chunks), "token": t},
        off.expected,
        off.got,
    )


def grows(probe: Probe, T: int | None = None) -> list[Finding]:
    """The cache of a layer with a window stops growing."""
    W = probe.subject.claim.window
    if W is None:
        raise NotApplicable("no window is claimed (--window W)")
    if "memory" not in probe.subject.takes:
        raise NotApplicable("it takes no cache")
    if isinstance(probe.subject, Function):
        raise NotApplicable("a function keeps no cache of its own")
    longest = T or min(6 * W, 64)
    x = probe.inputs(1, longest)
    sizes = []
    for n in (longest // 2, longest):
        _, memory = probe.steps(x[:, :n], (1,) * n, probe.subject)
        sizes.append(probe.subject.held(memory))
    if sizes[1] <= sizes[0] or longest // 2 <= W + 1:
        return []
    sentence = (
        f"After {longest // 2} and {longest} tokens the cache of a window of {W} holds "
        f"{sizes[0]} and {sizes[1]} numbers."
    )
    return [
        finding(
            "cache-grows", sentence, {"T": longest, "window": W}, float(sizes[0]), float(sizes[1])
        )
    ]


def _say(chunks: tuple[int, ...]) -> str:
    return " + ".join(str(n) for n in chunks)


def shift(probe: Probe, T: int = 5) -> list[Finding]:
    """All positions moved by a number change nothing."""
    subject = probe.subject
    if "positions" not in subject.takes:
        raise NotApplicable("it takes no positions")
    if getattr(subject, "addressed", False):
        raise NotApplicable("its positions address the cache that it keeps")
    if not subject.relative:
        raise NotApplicable("whether positions are relative is not claimed")
    x = probe.inputs(1, T)
    keep = probe.pattern(T, T)[None] if probe.masked else None

    def at(start: int, subject: Subject, x: Tensor) -> Tensor:
        return subject.ask(x, Ask(keep=keep, positions=torch.arange(start, start + T)[None])).out

    off = probe.differs(x, lambda s, x: at(SHIFT, s, x), lambda s, x: at(0, s, x))
    if off is None:
        return []
    sentence = f"Positions {SHIFT} to {SHIFT + T - 1} give other results than 0 to {T - 1}."
    return [
        finding(
            "position-shift",
            sentence,
            {"T": T, "shift": SHIFT, "output": list(off.at)},
            off.expected,
            off.got,
        )
    ]
