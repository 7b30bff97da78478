"""Checks of the tokens that influence an output, and of visible keys that do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.audit.adapters.base import (
    NEW_CACHE,
    CheckNotApplicable,
    CheckNotPossible,
    Influence,
    TargetAdapter,
    influence,
)
from regard.audit.adapters.functions import CustomAdapter, FunctionAdapter
from regard.audit.adapters.modules import ModuleAdapter
from regard.audit.check_context import LONG_LENGTHS, CheckContext, position_of_largest
from regard.audit.findings import Finding, finding
from regard.language import Phrase, counted

FUTURE_LENGTH = 9
"""The number of tokens in tests of later tokens."""
_PATH_WORDS = {
    "weights": " when the weights are returned",
    "padding": " when padding is marked",
    "memory": " when it fills a cache",
    "flag": " although its causal flag is set",
}
TESTED_KEYS = (0, 20, 70, 135, 200, 283, 290)
"""The keys that are tested in long sequences: in the first, middle and last blocks."""


def check_future(context: CheckContext, T: int | None = None) -> list[Finding]:
    """Check that no token depends on a later one: plain, with weights, padding or cache."""
    if context.notes.get("unclear"):
        return _check_unclear(context, T or FUTURE_LENGTH)
    if not context.causal:
        raise CheckNotApplicable("it is bidirectional")
    paths = {"", *context.adapter.accepts, *({"flag"} & context.notes.keys())}
    for path in ("", "weights", "padding", "memory", "flag"):
        if path in paths and (findings := _check_path(context, T or FUTURE_LENGTH, path)):
            return findings
    return []


def _check_unclear(context: CheckContext, T: int) -> list[Finding]:
    """Check unclear code, in which an inverted causal mask is wrong in any case."""
    findings = [f for f in _check_path(context, T, "") if f.name == "mask-polarity"]
    if not findings:
        raise CheckNotPossible(
            "some of its outputs depend on later tokens, and others do not; give --causal or "
            "--bidirectional"
        )
    return findings


def _check_path(context: CheckContext, T: int, path: str) -> list[Finding]:
    """Return a finding if a query sees a later key on this path."""
    measured = influence_of(context, T, path)
    later = torch.ones(T, T).triu(1).bool()
    if not bool((measured.visible & later).any()):
        return []
    # with an inverted mask the last query sees no key; if hidden scores are -1e9, it averages all
    # values
    earlier = later.T & (torch.arange(T) < T - 1)[:, None] if T > 2 else later.T
    i, j, amount = measured.strongest(later)
    example = {"T": T, "query": i, "key": j}
    if T > 1 and not bool((measured.visible & earlier).any()) and not path:
        sentence = Phrase(
            "Query {i} sees the later key {j}, and no query but the last sees an earlier one.",
            i=i,
            j=j,
        )
        return [finding("mask-polarity", sentence, example, 0.0, amount)]
    words = Phrase(_PATH_WORDS.get(path, ""))
    sentence = Phrase("Query {i} changes with token {j}{path}.", i=i, j=j, path=words)
    return [finding("future-leak", sentence, example, 0.0, amount)]


def influence_of(
    context: CheckContext, T: int, path: str = "", columns: tuple[int, ...] | None = None
) -> Influence:
    """Return the influence of T tokens, or of some `columns`, in float64 where it runs."""
    adapter = context.exact_adapter
    if path == "flag":
        adapter = context.notes["flag"].to_dtype(adapter.dtype)
    x = context.random_tokens(1, T)
    tokens = None
    if path == "padding":
        tokens = torch.ones(1, T, dtype=torch.bool)
        tokens[0, -1] = T == 1

    def run(x: Tensor) -> Tensor:
        if path == "flag":
            return adapter.call(x).out
        memory = NEW_CACHE if path == "memory" else None
        reply = context.call(
            x, tokens=tokens, memory=memory, weights=path == "weights", adapter=adapter
        )
        return reply.out if reply.out.shape[1] == T else reply.out.expand(-1, T, -1) * 0

    return influence(run, x, context.replace_token, columns)


def check_keys_used(context: CheckContext, T: int | None = None) -> list[Finding]:
    """Check with small tokens, whose weights are nearly equal, that every visible key counts."""
    if not _mask_is_inferred(context.adapter):
        raise CheckNotApplicable(
            "it declares its mask, which need not be inferred from its outputs"
        )
    if context.notes.get("unclear"):
        return _check_without_known_mask(context, T or 6)
    long_lengths: tuple[int, ...] = LONG_LENGTHS
    if getattr(context.adapter, "query_keys", None) is not None:  # a call for each query
        long_lengths = LONG_LENGTHS[-1:]
    if context.notes.get("long definition holds"):  # the whole output has been compared
        long_lengths = ()
    for n in (T,) if T else (6, *long_lengths):
        try:
            findings = _unused_key(
                context, n, range(n) if n < 30 else [j for j in TESTED_KEYS if j < n - 2]
            )
        except Exception:
            if n < 30:
                raise
            continue  # the code has a maximum length
        if findings or n >= 30:
            return findings
    return []


def _check_without_known_mask(context: CheckContext, T: int) -> list[Finding]:
    """Return a finding for a key that no query uses, if another one is used by all."""
    x = 0.3 * context.random_tokens(1, T)
    visible = influence(context.exact_output, x, context.replace_token).visible
    others = ~torch.eye(T, dtype=torch.bool)
    unused = ~(visible & others).any(0)
    if not bool((visible | ~others).all(0).any()) or not bool(unused.any()):
        raise CheckNotApplicable(
            "some of its outputs depend on later tokens, and others do not, by a rule that is not "
            "claimed"
        )
    j = int(unused.to(torch.int64).argmax())
    sentence = Phrase("No query uses key {j}, although all queries use other keys.", j=j)
    return [finding("keys-ignored", sentence, {"T": T, "key": j}, "a weight", 0.0)]


def _mask_is_inferred(adapter: TargetAdapter) -> bool:
    """Whether the code declares no mask, so that its mask must be found out."""
    return isinstance(adapter, (FunctionAdapter, ModuleAdapter, CustomAdapter))


def _unused_key(context: CheckContext, T: int, tested_keys: Sequence[int]) -> list[Finding]:
    """Return a finding for the first key that no query uses although it is visible."""
    x, run = 0.3 * context.random_tokens(1, T), context.exact_output
    visible = influence(run, x, context.replace_token, list(tested_keys)).visible
    own_visible = influence(run, x, context.replace_token, [T - 1]).visible[-1, 0]
    if not bool(own_visible):
        sentence = Phrase(
            "Query {t} of {T} does not depend on its own token: it gets no output.", t=T - 1, T=T
        )
        return [finding("queries-dropped", sentence, {"T": T, "query": T - 1}, "an output", 0.0)]
    expected = context.expected_mask(T, T)[:, list(tested_keys)]
    own_key = torch.arange(T)[:, None] == torch.tensor(list(tested_keys))
    allowed = expected & ~own_key
    hidden_pairs = allowed & ~visible
    # a query whose only key is its own is not counted
    unused_keys = allowed.any(0) & ~(allowed & visible).any(0)
    if T >= 30:
        unused_keys = unused_keys | hidden_pairs[-1]
    if not bool(unused_keys.any()):
        return []
    n = int(unused_keys.to(torch.int64).argmax())
    j = list(tested_keys)[n]
    i = int(hidden_pairs[:, n].nonzero()[-1])
    sentence = Phrase(
        "Query {i} does not use key {j}, which nothing hides (give --window if this is intended).",
        i=i,
        j=j,
    )
    return [finding("keys-ignored", sentence, {"T": T, "query": i, "key": j}, "a weight", 0.0)]


def check_window(context: CheckContext, T: int | None = None) -> list[Finding]:
    """Check that a query sees the W keys that end with its own."""
    W = context.adapter.claims.window
    if W is None or not context.causal:
        raise CheckNotApplicable("no window is claimed (--window W)")
    T = T or W + 2
    i = T - 1  # the last query; tested are its last visible key and the two keys before that
    columns = {"within": i - W + 1, "edge": i - W, "beyond": i - W - 1}
    columns = {name: j for name, j in columns.items() if j >= 0}
    if not columns:
        raise CheckNotPossible(
            Phrase("{tokens} are fewer than the window", tokens=counted(T, "token"))
        )
    visible_keys = influence_of(context, T, columns=tuple(columns.values())).visible[i].tolist()
    visible = dict(zip(columns, visible_keys, strict=True))
    example = {"T": T, "query": i}
    if visible.get("beyond"):
        sentence = Phrase(
            "Query {i} sees key {beyond}, that is {keys} with its own; the window is {W}.",
            i=i,
            beyond=columns["beyond"],
            keys=counted(W + 2, "key"),
            W=W,
        )
        return [finding("window-ignored", sentence, example, float(W), float(W + 2))]
    if visible.get("edge") or not visible["within"]:
        count = W + 1 if visible.get("edge") else W - 1
        key = columns["edge"] if visible.get("edge") else columns["within"]
        sentence = Phrase(
            "Query {i} sees key {key}: {keys} with its own; the window is {W}, its own included."
            if visible.get("edge")
            else "Query {i} does not see key {key}: {keys} with its own; the window is {W}, its "
            "own included.",
            i=i,
            key=key,
            keys=counted(count, "key"),
            W=W,
        )
        return [finding("window-off-by-one", sentence, example, float(W), float(count))]
    return []


def check_batch_rows(context: CheckContext, T: int = 5) -> list[Finding]:
    """Check that a row of the batch does not depend on other rows."""
    x = context.random_tokens(3, T)
    changed_x = x.clone()
    changed_x[0] = context.random_tokens(1, T, turn=9)[0]
    outputs, changed_outputs = map(context.exact_output, (x, changed_x))
    amounts = (changed_outputs - outputs)[1:].abs()
    scale = (
        float(outputs[outputs.isfinite()].abs().max()) if bool(outputs.isfinite().any()) else 1.0
    )
    amounts = torch.where(changed_outputs[1:].isnan() & outputs[1:].isnan(), 0.0, amounts)
    if float(amounts.max()) <= scale * torch.finfo(outputs.dtype).eps ** 0.5:
        return []
    b, t, _ = position_of_largest(amounts)
    sentence = Phrase("Token {t} of row {row} changes with row 0.", t=t, row=b + 1)
    return [finding("batch-mixing", sentence, {"B": 3, "T": T}, 0.0, float(amounts.max()))]
