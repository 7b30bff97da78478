"""Explain one query and one key of one head, in the numbers that the kernel computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.errors import ArgumentError
from regard.foreign import shown, whole
from regard.inspect.explain.capture import (
    Capture,
    QueryCall,
    calls_at,
    capture,
    counting,
    main_call,
)
from regard.inspect.explain.choose import KEY_RULE, find_token
from regard.inspect.explain.counterfactuals import counterfactuals, row_cost
from regard.inspect.explain.explanation import (
    Array,
    Elsewhere,
    Explanation,
    HeadPatterns,
    Location,
    RowTokens,
    ScoreChain,
    SoftmaxRow,
    State,
)
from regard.inspect.explain.layer import tensors_of
from regard.inspect.explain.mask_reasons import why_masked
from regard.inspect.explain.reading import Reading, Site, Source, Tokens, check_index, reading
from regard.inspect.explain.row import (
    Checks,
    KernelRow,
    apart,
    array,
    layer_run,
    mixture,
    own_scores,
    row_of,
    scored,
    state_of,
)
from regard.inspect.explain.steps import hidden_states, mixed, patterns, projected
from regard.nn.explainable import Explainable, ProjectionQuery, explainable
from regard.span import Positions, Span, as_tensor
from regard.tap import NAMES, edited

PREDICTIONS = 5


MOST_TOKENS = 512
"""The longest text whose whole pattern is kept; of longer ones the row is, and a small picture."""


@dataclass(frozen=True, eq=False)
class Target:
    """Where to look: an attention of what is read, and the index of the query."""

    read: Reading
    site: Site
    i: int

    @property
    def columns(self) -> Tokens:
        """The keys' sequence."""
        return self.read.sides[self.site.columns]

    @property
    def rows(self) -> Tokens:
        """The queries' sequence."""
        return self.read.sides[self.site.rows]

    @property
    def own(self) -> bool:
        """Queries and keys are of one sequence."""
        return self.site.rows == self.site.columns


def call_names(calls: Sequence[QueryCall]) -> tuple[str, ...]:
    """What each call is called: the branch that it is at, else its number."""
    return tuple(
        call.branch if call.branch and not call.branch.startswith("part") else f"call {n}"
        for n, call in enumerate(calls)
    )


def which_call(call: int | str, names: Sequence[str]) -> int:
    """The number of a call, by number or name.

    Raises:
        ArgumentError: there is none such.

    >>> which_call("window", ["compressed", "selected", "window"])
    2
    """
    number = whole(call) if isinstance(call, str) else call
    if number is not None:
        return check_index("call", number, len(names), "call", "calls")
    if call in names:
        return names.index(str(call))
    raise ArgumentError(f"call is {shown(call)}; the calls for this query are {', '.join(names)}")


def tokens_of(
    at: Target, positions: Sequence[int], rows: Sequence[str], *, blocks: bool = False
) -> RowTokens:
    """The tokens of keys by where they stand, and those of the queries; a block of keys is called
    by its last token.
    """
    tokens, ids, pieces = at.columns, [], []
    for n, p in enumerate(positions):
        real = 0 <= p < len(tokens.ids)
        ids.append(tokens.ids[p] if real else -1)
        name = tokens.pieces[p] if real else "‹empty›"
        pieces.append(f"block {n} …{name}" if blocks and real else name)
    return RowTokens(
        np.array(ids),
        tuple(pieces),
        np.array(positions),
        at.rows.pieces[at.i],
        at.i,
        tuple(rows),
    )


def find_key(
    at: Target,
    key: int | str | None,
    weights: Array,
    positions: Sequence[int],
    visible: NDArray[Any],
) -> tuple[int, str]:
    """The index of the key among those of the call, and the rule that chose it, or ""."""
    if key is not None:
        token = find_token(at.columns, key, "key")
        if token not in positions:
            raise ArgumentError(
                f"key is token {token}, which this call does not hold; it holds {len(positions)} "
                "keys, at positions "
                f"{', '.join(map(str, list(positions)[:8]))}{', ...' if len(positions) > 8 else ''}"
            )
        return list(positions).index(token), ""
    looks = np.where(visible, np.abs(weights), -1.0)
    others = looks.copy()
    if at.own:
        others[[p in (0, at.i) for p in positions]] = -1
    best = others if others.max(initial=-1) > 0 else looks
    rule = KEY_RULE if best is others and at.own else "the strongest key"
    return int(best.argmax()), rule


def row_pieces(at: Target, call: QueryCall) -> tuple[str, ...]:
    """The pieces of all queries of the call."""
    at_rows = as_tensor(call.step.q_positions)[0].tolist()
    known = at.rows.pieces
    return tuple(known[p] if 0 <= p < len(known) else "‹empty›" for p in at_rows)


def predictions(at: Target, found: Capture) -> tuple[tuple[str, int, float], ...]:
    """The likeliest tokens for the query, where the network says any."""
    read = at.read
    if read.predict is None or at.site.rows != read.predicts or "last" not in found.hidden:
        return ()
    logits = read.predict(found.hidden["last"][None, at.i : at.i + 1])[0, 0]
    likely = logits.double().softmax(-1).topk(min(PREDICTIONS, logits.shape[-1]))
    ids = likely.indices.tolist()
    return tuple(zip(read.names(ids), ids, likely.values.tolist(), strict=True))


def explain(
    model: Source | Reading,
    text: str | None = None,
    *,
    layer: int | None = None,
    head: int = 0,
    query: int | str = -1,
    key: int | str | None = None,
    place: str | None = None,
    call: int | str | None = None,
    target: str | None = None,
) -> Explanation:
    """Run a text through a model and keep every number of one query and one key in one head.

    embedding -> norm -> q, k, v -> q_i . k_j -> scaled -> masked -> softmax -> sum_j p_ij v_j
    -> heads joined -> W_O -> + h

    The model runs on the kernels that it uses anyway, observed: queries, keys, values and the lse
    are those that the kernel got and gave. What is in between is computed again from them, in
    float64, by the definition; what is in front (a query before its rotation, say) by the model's
    own modules. Each recomputed step is compared with what the model went on with:
    `Explanation.checks`. The model runs once more without an observer, and the outputs are
    compared.

    Args:
        model: from `regard.load`: a decoder, a text encoder or an encoder-decoder; a
            `regard.inspect.explain.reading.Words`; or a reading of one of these, such as
            `regard.inspect.explain.random_model.random_model`, a mechanism with random weights.
        text: at least one token; None for what has its own.
        layer, head: where to look; negative counts from the end. Layers of an encoder-decoder are
            those that read the source.
        query, key: the index of a token (negative counts from the end), or a word of the text: its
            last token. The key that is not given is the strongest one that is neither the query nor
            the first token.
        place: the attention by its name instead of `layer`: "decoder.layers.0.attention", say.
        call: of several calls at a place, which: a number or its name; None is the one with the
            largest weight.
        target: what an encoder-decoder is to have said; None is its own answer.

    Raises:
        ArgumentError: the text is empty, or the layer, place, head, call, query or key does not
            exist.
        ArgumentTypeError: an argument has a wrong type.

    >>> import regard
    >>> found = explain(regard.load("tiny"), "to be or not to be", layer=1, head=2)
    >>> bool(abs(found.weights.sum() - 1) < 1e-6), found.check < 1e-3
    (True, True)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.
    """
    read = model if isinstance(model, Reading) else reading(model, text, target)
    site = read.site(layer, place)
    read = _noted(read, site)
    at = Target(read, site, find_token(read.sides[site.rows], query))
    mechanism = explainable(site.attention)
    with torch.inference_mode():
        found = capture(read, site)
        if mechanism.has_own_row:
            walk = _own_row(at, mechanism, found, head, key)
        else:
            walk = _recorded_row(at, found, head, key, call)
        return _explanation(at, mechanism, found, walk)


@dataclass(frozen=True, eq=False)
class _Walk:
    """A row that is explained, whether a kernel's call or the mechanism itself gave it."""

    head: int
    group: int
    key: int
    key_chosen_by: str
    positions: Sequence[int]
    row_pieces: tuple[str, ...]
    q: Array
    k: Array
    v: Array
    score: ScoreChain
    softmax: SoftmaxRow
    visible: NDArray[np.bool_]
    query: ProjectionQuery
    columns: Tensor
    dtype: torch.dtype
    checks: Checks
    kind: str = "softmax"
    kernel: str = "the module's own"
    keys_are: str = "keys"
    call: int = 0
    calls: tuple[str, ...] = ("",)
    recorded: tuple[KernelRow, tuple[QueryCall, ...]] | None = None
    state: State | None = None


def _explanation(at: Target, mechanism: Explainable, found: Capture, walk: _Walk) -> Explanation:
    """What stands in front of the row and behind it, and the whole."""
    site, head, row = at.site, walk.head, walk.softmax
    given = (walk.q, walk.k, walk.v)
    told = mechanism.explain_inputs(walk.query)
    inputs, checks = projected(told, walk.query, head, walk.group, given, walk.columns)
    tokens = tokens_of(at, walk.positions, walk.row_pieces, blocks=told.keys_are_blocks)
    seen_values = np.where(walk.visible[:, None], walk.v, 0.0)
    output, output_checks = mixed(mechanism, row.weights, seen_values, found, head, at.i)
    hidden, hidden_checks = hidden_states(found, site, at.i)
    elsewhere: tuple[Elsewhere, ...] = ()
    heads, mix = HeadPatterns(), None
    if walk.recorded is not None:
        one, calls = walk.recorded
        H, G = one.call.place.H, one.call.groups
        elsewhere = counterfactuals(one, row.weights, output.mixed, walk.key)
        heads = patterns(one.call, head, MOST_TOKENS)
        mix = mixture(mechanism, found, calls, one.call, head, at.i, len(at.columns.ids))
    else:
        H, G = (len(found.taps[name]) for name in "qk")
    sizes = {
        "layers": len(at.read.main),
        "H": H,
        "G": G,
        "T": len(at.rows.ids),
        "S": len(walk.k),
        "D": walk.k.shape[1],
        "E": walk.v.shape[1],
        "M": found.taps["out"].shape[1],
    }
    where = Location(
        model=at.read.name,
        text=at.read.text,
        place=site.place,
        mechanism=type(site.attention).__name__,
        layer=site.layer,
        head=head,
        group=walk.group,
        query=at.i,
        key=walk.key,
        sizes=sizes,
        kind=walk.kind,
        kernel=walk.kernel,
        dtype=str(walk.dtype)[6:],
        keys_are=walk.keys_are,
        call=walk.call,
        calls=walk.calls,
        key_chosen_by=walk.key_chosen_by,
        notes=_notes(at),
    )
    checks = {**checks, **walk.checks, **output_checks, **hidden_checks}
    checks["the network without an observer"] = found.apart
    return Explanation(
        where=where,
        tokens=tokens,
        hidden=hidden,
        inputs=inputs,
        score=walk.score,
        softmax=row,
        output=output,
        heads=heads,
        checks=checks,
        cost=row_cost(site.attention, sizes, int(walk.visible.sum()), walk.dtype.itemsize),
        mixture=mix,
        state=walk.state,
        elsewhere=elsewhere,
        predictions=predictions(at, found),
        tensors=tensors_of(site.attention, found.hidden, found.taps, own=at.own),
    )


def _notes(at: Target) -> tuple[str, ...]:
    """What a reader should know of the run."""
    T, trained = len(at.rows.ids), at.read.trained
    if trained is None or trained >= T:
        return at.read.notes
    return (
        *at.read.notes,
        f"the text has {T} tokens; the model was trained on at most {trained}",
    )


def _noted(read: Reading, site: Site) -> Reading:
    """A reading that says what open traces edit at the site: steps that are computed again in front
    of an edit differ.

    Raises:
        ArgumentError: scores or patterns are edited, which the chain from q and k to the weights
            cannot show.
    """
    changed = [name for name in NAMES if edited(site.place, name)]
    inner = [name for name in changed if name in ("scores", "pattern")]
    if inner:
        raise ArgumentError(_cannot_show(inner, site))
    if not changed:
        return read
    note = (
        f"an open trace edits {', '.join(changed)} at {site.place}: what the kernel was given is "
        "edited, what is computed again "
        "in front of it is not"
    )
    return replace(read, notes=(*read.notes, note))


def _cannot_show(edited_names: Collection[str], site: Site) -> str:
    """Why scores or patterns that were edited are not explained, and what to do."""
    return (
        f"an open trace edits {' and '.join(edited_names)} at {site.place}: an explanation "
        "computes both from q and k, and would "
        "show others; explain another place, edit q, k, v, z or out, or record(...) the run, "
        "which keeps what was edited"
    )


def _recorded_row(
    at: Target, found: Capture, head: int, key: int | str | None, call: int | str | None
) -> _Walk:
    """The row of a call that a softmax kernel answered."""
    calls = calls_at(found, at.site, at.i)
    if not calls:
        raise ArgumentError(
            f"{at.site.place} is a {type(at.site.attention).__name__}, which ran no softmax for "
            f"query {at.i}; "
            "choose another layer or place, or let the mechanism say its rows "
            "(regard.nn.explainable.Explainable.explain_row)"
        )
    # a branch of the place has a name of its own, under which it may be edited
    if inner := sorted({name for each in calls for name in each.step.edited}):
        raise ArgumentError(_cannot_show(inner, at.site))
    names = call_names(calls)
    head = check_index("head", head, len(calls[0].weights), "head", "heads")
    counted = counting(at.site, calls)
    chosen = main_call(counted, head) if call is None else calls[which_call(call, names)]
    number, row, step = calls.index(chosen), row_of(chosen, head), chosen.step
    steps, softmax, checks = scored(row)
    chain = row.chain
    positions = chosen.keys.tolist()
    j, rule = find_key(at, key, softmax.weights, positions, chain.visible)
    reasons = why_masked(
        step.mask, step.q_positions, chosen.row, chain.visible, head, step.k_positions
    )
    query, columns = _query(
        at, found, step.q_positions, step.k_positions, chosen.branch, number, len(chain.q)
    )
    return _Walk(
        head,
        row.group,
        j,
        rule,
        positions,
        row_pieces(at, chosen),
        chain.q,
        chain.k,
        row.v,
        ScoreChain(chain.scale, steps, chain.q * chain.k[j], reasons),
        softmax,
        chain.visible,
        query,
        columns,
        step.q.dtype,
        checks,
        kernel=step.kernel,
        keys_are=chosen.place.held,
        call=number,
        calls=names,
        recorded=(row, tuple(calls)),
    )


def _own_row(
    at: Target, mechanism: Explainable, found: Capture, head: int, key: int | str | None
) -> _Walk:
    """The row that a mechanism tells itself, because no softmax kernel ran: keys in the order of
    their tokens.
    """
    run = layer_run(found)
    if missing := [name for name in ("q", "k", "v", "z") if name not in run.taps]:
        raise ArgumentError(
            f"{at.site.place} is a {type(at.site.attention).__name__}, which tells its rows itself "
            f"and has no tap {', '.join(missing)}; pass q, k, v and z through regard.tap.tap"
        )
    head = check_index("head", head, run.q.shape[1], "head", "heads")
    told = mechanism.explain_row(run, head, at.i)
    assert told is not None, "has_own_row"
    group, S = run.group(head), run.k.shape[2]
    q, k, v = (array(x) for x in (run.q[0, head, at.i], run.k[0, group], run.v[0, group]))
    steps, softmax = own_scores(told)
    visible = ~np.isneginf(steps[-1].values)
    j, rule = find_key(at, key, softmax.weights, range(S), visible)
    products = q * k[j] if told.products is None else array(told.products[j])
    reasons = tuple("" if seen else "future" for seen in visible)
    T = len(at.rows.ids)
    query, columns = _query(at, found, Span(0, T), Span(0, S), "", 0, k.shape[1])
    read = softmax.weights @ np.where(visible[:, None], v, 0.0)
    return _Walk(
        head,
        group,
        j,
        rule,
        range(S),
        at.rows.pieces,
        q,
        k,
        v,
        ScoreChain(told.scale, steps, products, reasons),
        softmax,
        visible,
        query,
        columns,
        run.q.dtype,
        {"output of the mechanism": apart(read, told.output), **told.checks},
        kind=told.kind,
        state=None if told.state is None else state_of(*told.state),
    )


def _query(
    at: Target,
    found: Capture,
    q: Positions,
    k: Positions,
    branch: str,
    number: int,
    head_dim: int,
) -> tuple[ProjectionQuery, Tensor]:
    """What the mechanism is asked about the inputs of a call, and which rows of its memory the
    call's keys are.
    """
    x = found.hidden["x"]
    memory = x if at.own else found.hidden.get("memory")
    if memory is None:  # a cache gave it: states of an encoder, which are the values
        memory = found.taps["v"].transpose(0, 1).flatten(1)
    # a call of some rows only was made of all
    positions = Span(0, x.shape[0]) if at.own else q
    where = Span(0, memory.shape[0])
    query = ProjectionQuery(x[None], positions, memory[None], where, at.i, branch, number, head_dim)
    return query, as_tensor(k)[0]
