"""What reaches a token wrongly: later tokens, padding, other rows, keys beyond the window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.audit.adapters.functions import Custom, Function
from regard.audit.adapters.modules import Module
from regard.audit.findings import Finding, finding
from regard.audit.probe import Probe
from regard.audit.subject import NEW, CannotTry, Influence, NotApplicable, Subject, influence

LONGEST = 9


_WORDS = {
    "weights": " when its weights are wanted",
    "padding": " when padding is marked",
    "memory": " when it fills a cache",
    "flag": " although its causal flag is set",
}
FAR = (293, 149, 75, 37)
"""Lengths that no block divides; the first that the code takes."""
PLACES = (0, 20, 70, 135, 200, 283, 290)


def future(probe: Probe, T: int | None = None) -> list[Finding]:
    """No token sees a later one, on any path: plain, with weights wanted, with padding marked, into
    a cache.
    """
    if probe.notes.get("unclear"):
        return _unclear(probe, T or LONGEST)
    if not probe.causal:
        raise NotApplicable("it is bidirectional")
    lengths = [T] if T else [LONGEST]
    found: list[Finding] = []
    for path in ("", "weights", "padding", "memory", "flag"):
        if path and path not in probe.subject.takes and path != "flag":
            continue
        if path == "flag" and "flag" not in probe.notes:
            continue
        for n in lengths:
            found = found or _future(probe, n, path)
    return found


def _unclear(probe: Probe, T: int) -> list[Finding]:
    """Nothing is claimed: tokens that see nothing but later ones are wrong whatever was meant."""
    found = [f for f in _future(probe, T, "") if f.name == "mask-polarity"]
    if not found:
        raise CannotTry("it shows some later tokens and not all; say --causal or --bidirectional")
    return found


def _future(probe: Probe, T: int, path: str) -> list[Finding]:
    got = reach(probe, T, path)
    later = torch.ones(T, T).triu(1).bool()
    if not bool((got.seen & later).any()):
        return []
    # the last query of an inverted mask sees nothing, which -1e9 makes an average of everything
    earlier = later.T & (torch.arange(T) < T - 1)[:, None] if T > 2 else later.T
    i, j, amount = got.worst(later)
    example = {"T": T, "query": i, "key": j}
    if T > 1 and not bool((got.seen & earlier).any()) and not path:
        return [
            finding(
                "mask-polarity",
                f"Query {i} sees the later key {j}, and no query but the last sees an earlier one.",
                example,
                0.0,
                amount,
            )
        ]
    return [
        finding(
            "future-leak",
            f"Query {i} changes with token {j}{_WORDS.get(path, '')}.",
            example,
            0.0,
            amount,
        )
    ]


def reach(
    probe: Probe, T: int, path: str = "", columns: tuple[int, ...] | None = None
) -> Influence:
    """Influence of T tokens, or of those in columns, in float64 where the code runs there."""
    subject = probe.wide or probe.subject
    if path == "flag":
        subject = probe.notes["flag"].at(subject.dtype)
    x = probe.inputs(1, T)
    tokens = None
    if path == "padding":
        tokens = torch.ones(1, T, dtype=torch.bool)
        tokens[0, -1] = T == 1

    def run(x: Tensor) -> Tensor:
        if path == "flag":
            return subject.ask(x).out
        memory = NEW if path == "memory" else None
        reply = probe.ask(
            x, tokens=tokens, memory=memory, weights=path == "weights", subject=subject
        )
        return reply.out if reply.out.shape[1] == T else reply.out.expand(-1, T, -1) * 0

    return influence(run, x, probe.changed, columns)


def keys(probe: Probe, T: int | None = None) -> list[Finding]:
    """Every key that the claim shows reaches some query, in a short text and in a long one.

    Tokens are small, so that weights are nearly even and every key counts.
    """
    if not _plain(probe.subject):
        raise NotApplicable("its mask is declared, and not found out")
    if probe.notes.get("unclear"):
        return _columns(probe, T or 6)
    far: tuple[int, ...] = (
        FAR if getattr(probe.subject, "pair", None) is None else FAR[-1:]
    )  # a call for each query
    if probe.notes.get("long holds"):  # the whole output was computed again from its definition
        far = ()
    for n in (T,) if T else (6, *far):
        try:
            found = _unused(probe, n, range(n) if n < 30 else [j for j in PLACES if j < n - 2])
        except Exception:
            if n < 30:
                raise
            continue  # a limit on the length that it tells
        if found or n >= 30:
            return found
    return []


def _columns(probe: Probe, T: int) -> list[Finding]:
    """Find a key that no query uses although every query uses another one, in code whose mask is
    not known.
    """
    x = 0.3 * probe.inputs(1, T)
    subject = probe.wide or probe.subject
    got = influence(lambda x: probe.ask(x, subject=subject).out, x, probe.changed).seen
    others = ~torch.eye(T, dtype=torch.bool)
    unused = ~(got & others).any(0)
    if not bool((got | ~others).all(0).any()) or not bool(unused.any()):
        raise NotApplicable("it shows some later tokens and not all, by rules that are not claimed")
    j = int(unused.to(torch.int64).argmax())
    return [
        finding(
            "keys-ignored",
            f"No query uses key {j}, and all use others.",
            {"T": T, "key": j},
            "a weight",
            0.0,
        )
    ]


def _plain(subject: Subject) -> bool:
    return isinstance(subject, (Function, Module, Custom))


def _unused(probe: Probe, T: int, places: Sequence[int]) -> list[Finding]:
    """The first key that no query uses though it may."""
    subject = probe.wide or probe.subject
    x = 0.3 * probe.inputs(1, T)

    def run(x: Tensor) -> Tensor:
        return probe.ask(x, subject=subject).out

    got = influence(run, x, probe.changed, list(places)).seen
    mine = influence(run, x, probe.changed, [T - 1]).seen[-1, 0]
    if not bool(mine):
        sentence = f"Query {T - 1} of {T} does not depend on its own token: it gets no answer."
        return [finding("queries-dropped", sentence, {"T": T, "query": T - 1}, "an answer", 0.0)]
    shown = probe.pattern(T, T)[:, list(places)]
    own = torch.arange(T)[:, None] == torch.tensor(list(places))
    may = shown & ~own
    if T < 30:
        missing = may & ~got
        # a query alone sees nothing when its own key is all that it has
        lost = may.any(0) & ~(may & got).any(0)
    else:
        lost = may.any(0) & ~(may & got).any(0)
        missing = may & ~got
        late = may[-1] & ~got[-1]
        lost = lost | late
    if not bool(lost.any()):
        return []
    n = int(lost.to(torch.int64).argmax())
    j = list(places)[n]
    i = int(missing[:, n].nonzero()[-1])
    sentence = (
        f"Query {i} does not use key {j}, which nothing hides (say --window if that is meant)."
    )
    return [finding("keys-ignored", sentence, {"T": T, "query": i, "key": j}, "a weight", 0.0)]


def window(probe: Probe, T: int | None = None) -> list[Finding]:
    """A query sees the W keys that end with its own."""
    W = probe.subject.claim.window
    if W is None or not probe.causal:
        raise NotApplicable("no window is claimed (--window W)")
    T = T or W + 2
    i = T - 1  # the last query; the keys at the edge, the first one beyond, and the one behind that
    columns = {"within": i - W + 1, "edge": i - W, "beyond": i - W - 1}
    columns = {name: j for name, j in columns.items() if j >= 0}
    if not columns:
        raise CannotTry(f"{T} tokens are fewer than the window")
    got = reach(probe, T, columns=tuple(columns.values())).seen[i].tolist()
    seen = dict(zip(columns, got, strict=True))
    example = {"T": T, "query": i}
    if seen.get("beyond"):
        sentence = (
            f"Query {i} sees key {columns['beyond']}, {W + 2} keys with its own; the window is {W}."
        )
        return [finding("window-ignored", sentence, example, float(W), float(W + 2))]
    if seen.get("edge") or not seen["within"]:
        n = W + 1 if seen.get("edge") else W - 1
        words = "sees" if seen.get("edge") else "does not see"
        key = columns["edge"] if seen.get("edge") else columns["within"]
        sentence = (
            f"Query {i} {words} key {key}: {n} keys with its own; the window is {W}, its "
            "own included."
        )
        return [finding("window-off-by-one", sentence, example, float(W), float(n))]
    return []


def rows(probe: Probe, T: int = 5) -> list[Finding]:
    """A row of the batch does not depend on the other rows."""
    subject = probe.wide or probe.subject
    x = probe.inputs(3, T)
    other = x.clone()
    other[0] = probe.inputs(1, T, turn=9)[0]
    before, behind = (probe.ask(each, subject=subject).out for each in (x, other))
    amounts = (behind - before)[1:].abs()
    scale = float(before[before.isfinite()].abs().max()) if bool(before.isfinite().any()) else 1.0
    amounts = torch.where(behind[1:].isnan() & before[1:].isnan(), 0.0, amounts)
    if float(amounts.max()) <= scale * torch.finfo(before.dtype).eps ** 0.5:
        return []
    b, t, _ = (int(i) for i in torch.unravel_index(amounts.argmax(), amounts.shape))
    return [
        finding(
            "batch-mixing",
            f"Token {t} of row {b + 1} changes with row 0.",
            {"B": 3, "T": T},
            0.0,
            float(amounts.max()),
        )
    ]
