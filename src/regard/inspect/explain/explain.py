"""Explain one query and one key of one head, in the numbers that the kernel computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.errors import ArgumentError
from regard.foreign import shown, whole
from regard.inspect.explain.additive import additive
from regard.inspect.explain.capture import (
    Call,
    Capture,
    calls_at,
    capture,
    counting,
    main_call,
)
from regard.inspect.explain.choose import KEY_RULE, find_token
from regard.inspect.explain.counterfactuals import counterfactuals, row_cost
from regard.inspect.explain.effective import recurrent
from regard.inspect.explain.explanation import EQUATIONS, Array, Explanation
from regard.inspect.explain.layer import tensors_of
from regard.inspect.explain.mask_reasons import why_masked
from regard.inspect.explain.mixture import mixture
from regard.inspect.explain.reading import Reading, Site, Source, Tokens, check_index, reading
from regard.inspect.explain.softmax_row import (
    Checks,
    Fields,
    Row,
    apart,
    finish_online,
    row_of,
    scored,
    values_seen,
)
from regard.inspect.explain.steps import Ask, mixed, patterns, projected
from regard.nn.cross import AdditiveAttention
from regard.nn.recurrent import Recurrent
from regard.span import Positions, Span, as_tensor
from regard.tap import NAMES, edited

PREDICTIONS = 5


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


def call_names(site: Site, calls: Sequence[Call]) -> tuple[str, ...]:
    """What each call is called: the branch that it is at, else its number."""
    found = []
    for n, call in enumerate(calls):
        branch = call.place.name[len(site.place) + 1 :]
        found.append(branch if branch and not branch.startswith("part") else f"call {n}")
    return tuple(found)


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


def keys_of(at: Target, positions: Sequence[int], *, blocks: bool = False) -> Fields:
    """ids, pieces and positions of keys, by where they stand; a block of keys is called by its last
    token.
    """
    tokens, ids, pieces = at.columns, [], []
    for n, p in enumerate(positions):
        real = 0 <= p < len(tokens.ids)
        ids.append(tokens.ids[p] if real else -1)
        name = tokens.pieces[p] if real else "‹empty›"
        pieces.append(f"block {n} …{name}" if blocks and real else name)
    return {"ids": np.array(ids), "pieces": tuple(pieces), "positions": np.array(positions)}


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


def sizes_of(at: Target, found: Capture, call: Call, row: Row) -> dict[str, int]:
    """The letters of the call."""
    return {
        "layers": len(at.read.main),
        "H": len(call.weights),
        "G": call.groups,
        "T": len(at.rows.ids),
        "S": len(call.keys),
        "D": row.chain.k.shape[1],
        "E": row.v.shape[1],
        "M": found.taps["out"].shape[1],
    }


def row_pieces(at: Target, call: Call) -> tuple[str, ...]:
    """The pieces of all queries of the call."""
    at_rows = as_tensor(call.step.q_positions)[0].tolist()
    known = at.rows.pieces
    return tuple(known[p] if 0 <= p < len(known) else "‹empty›" for p in at_rows)


def metadata(at: Target, found: Capture) -> Fields:
    """What was run, and where to look."""
    read, site, i = at.read, at.site, at.i
    T, trained, notes = len(at.rows.ids), read.trained, []
    if trained is not None and trained < T:
        notes.append(f"the text has {T} tokens; the model was trained on at most {trained}")
    return {
        "model": read.name,
        "text": read.text,
        "place": site.place,
        "layer": site.layer,
        "query": i,
        "mechanism": type(site.attention).__name__,
        "query_piece": at.rows.pieces[i],
        "query_position": i,
        "notes": (*read.notes, *notes),
        "predictions": predictions(at, found),
    }


def predictions(at: Target, found: Capture) -> tuple[tuple[str, int, float], ...]:
    """The likeliest tokens for the query, where the network says any."""
    read = at.read
    if read.predict is None or at.site.rows != read.predicts or "last" not in found.hidden:
        return ()
    logits = read.predict(found.hidden["last"][None, at.i : at.i + 1])[0, 0]
    likely = logits.double().softmax(-1).topk(min(PREDICTIONS, logits.shape[-1]))
    ids = likely.indices.tolist()
    return tuple(zip(read.names(ids), ids, likely.values.tolist(), strict=True))


MOST_TOKENS = 512
"""The longest text whose whole pattern is kept; of longer ones the row is, and a small picture."""


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
    with torch.inference_mode():
        found = capture(read, site)
        if isinstance(site.attention, Recurrent):
            parts = _recurrent(at, found, head, key)
        elif isinstance(site.attention, AdditiveAttention):
            parts = _additive(at, found, head, key)
        else:
            parts = _softmax(at, found, head, key, call)
        fields, checks = parts
        told = metadata(at, found)
        tensors = tensors_of(site.attention, found.hidden, found.taps, own=at.own)
    checks["the network without an observer"] = found.apart
    drawn = {name: value for name, value in fields.items() if name not in _INNER}
    return Explanation(
        **{**told, **drawn}, checks=checks, equations=dict(EQUATIONS), tensors=tensors
    )


_INNER = ("visible",)


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


def _softmax(
    at: Target, found: Capture, head: int, key: int | str | None, call: int | str | None
) -> tuple[Fields, Checks]:
    calls = calls_at(found, at.site, at.i)
    if not calls:
        raise ArgumentError(
            f"{at.site.place} is a {type(at.site.attention).__name__}, which ran no softmax for "
            f"query {at.i}; "
            "choose another layer or place"
        )
    # a branch of the place has a name of its own, under which it may be edited
    if inner := sorted({name for each in calls for name in each.step.edited}):
        raise ArgumentError(_cannot_show(inner, at.site))
    names = call_names(at.site, calls)
    head = check_index("head", head, len(calls[0].weights), "head", "heads")
    counted = counting(at.site, calls)
    chosen = main_call(counted, head) if call is None else calls[which_call(call, names)]
    row = row_of(chosen, head)
    fields, checks = scored(row)
    named = keys_of(at, chosen.keys.tolist(), blocks=chosen.place.name.endswith(".compressed"))
    j, rule = find_key(at, key, fields["weights"], chosen.keys.tolist(), row.chain.visible)
    ask = _ask_of(at, found, row, calls.index(chosen))
    made, made_checks = projected(ask, row.chain.q, row.chain.k, row.v)
    after, after_checks = mixed(fields["weights"], values_seen(row), found, at.site, head, at.i)
    lse, z = finish_online(fields["online"], row.sink)
    checks["online softmax"] = max(
        apart(np.array(lse), np.array(fields["lse"])), apart(z, after["mixed"])
    )
    fields |= named | made | after | patterns(chosen, head, MOST_TOKENS)
    fields |= {
        "head": head,
        "key": j,
        "key_chosen_by": rule,
        "call": calls.index(chosen),
        "calls": names,
    }
    fields["mixture"] = mixture(found, at.site, calls, chosen, head, at.i, len(at.columns.ids))
    return fields | _told(at, found, row, j, fields), {**made_checks, **checks, **after_checks}


def _told(at: Target, found: Capture, row: Row, key: int, fields: Fields) -> Fields:
    """What a row says beside its numbers: sizes, reasons, costs, and other mechanisms."""
    step, chain, sizes = row.call.step, row.chain, sizes_of(at, found, row.call, row)
    return {
        "group": row.group,
        "sizes": sizes,
        "kernel": step.kernel,
        "dtype": str(step.q.dtype)[6:],
        "keys_are": row.call.place.held,
        "products": chain.q * chain.k[key],
        "masked": why_masked(
            step.mask, step.q_positions, row.call.row, chain.visible, row.head, step.k_positions
        ),
        "elsewhere": counterfactuals(row, fields["weights"], fields["mixed"], key),
        "cost": row_cost(at.site.attention, sizes, int(chain.visible.sum()), step.q.element_size()),
        "row_pieces": row_pieces(at, row.call),
    }


def _ask_of(at: Target, found: Capture, row: Row, branch: int) -> Ask:
    step, width = row.call.step, row.chain.k.shape[1]
    where = (step.q_positions, step.k_positions)
    return _ask(at, found, *where, row.head, row.group, branch, width)


def _recurrent(
    at: Target, found: Capture, head: int, key: int | str | None
) -> tuple[Fields, Checks]:
    assert isinstance(at.site.attention, Recurrent)
    head = check_index("head", head, found.taps["q"].shape[0], "head", "heads")
    fields, checks = recurrent(at.site.attention, found.rule, head, at.i)
    return _plain(at, found, head, key, fields, checks)


def _additive(
    at: Target, found: Capture, head: int, key: int | str | None
) -> tuple[Fields, Checks]:
    assert isinstance(at.site.attention, AdditiveAttention)
    head = check_index("head", head, found.taps["q"].shape[0], "head", "heads")
    fields, checks = additive(at.site.attention, found, head, at.i)
    return _plain(at, found, head, key, fields, checks)


def _plain(
    at: Target, found: Capture, head: int, key: int | str | None, fields: Fields, checks: Checks
) -> tuple[Fields, Checks]:
    """What mechanisms without a recorded call have: one head, keys in the order of their tokens,
    and no other mechanism beside.
    """
    q, k, v, visible, read = (fields.pop(n) for n in ("q_row", "k_rows", "v", "visible", "read"))
    H, G, S = found.taps["q"].shape[0], found.taps["k"].shape[0], len(k)
    group, positions = head // (H // G), list(range(S))
    j, rule = find_key(at, key, fields["weights"], positions, visible)
    T = len(at.read.sides[at.site.rows].ids)
    ask = _ask(at, found, Span(0, T), Span(0, S), head, group, 0, k.shape[1])
    made, made_checks = projected(ask, q, k, v)
    after, after_checks = mixed(fields["weights"], v, found, at.site, head, at.i)
    checks["output of the mechanism"] = apart(after["mixed"], read)
    sizes = {
        "layers": len(at.read.main),
        "H": H,
        "G": G,
        "T": T,
        "S": S,
        "D": k.shape[1],
        "E": v.shape[1],
        "M": len(after["out"]),
    }
    fields.setdefault("products", q * k[j])
    fields |= (
        keys_of(at, positions)
        | made
        | after
        | {
            "head": head,
            "group": group,
            "key": j,
            "key_chosen_by": rule,
            "sizes": sizes,
            "kernel": "the module's own",
            "dtype": str(found.taps["q"].dtype)[6:],
            "masked": tuple("" if seen else "future" for seen in visible),
            "pattern": np.zeros((0, 0)),
            "pool": 0,
            "patterns": np.zeros((0, 0, 0)),
            "elsewhere": (),
            "cost": row_cost(
                at.site.attention, sizes, int(visible.sum()), found.taps["q"].element_size()
            ),
            "row_pieces": at.read.sides[at.site.rows].pieces,
        }
    )
    if callable(fields["products"]):
        fields["products"] = fields["products"](j)
    return fields, {**made_checks, **checks, **after_checks}


def _ask(
    at: Target,
    found: Capture,
    q: Positions,
    k: Positions,
    head: int,
    group: int,
    branch: int,
    width: int,
) -> Ask:
    x = found.hidden["x"]
    memory = x if at.own else found.hidden.get("memory")
    if memory is None:  # a cache gave it: states of an encoder, which are the values
        memory = found.taps["v"].transpose(0, 1).flatten(1)
    T = Span(0, x.shape[0])  # a call of some rows only was made of them
    return Ask(
        at.site.attention,
        x,
        T if at.own else q,
        at.i,
        memory,
        Span(0, memory.shape[0]),
        head,
        group,
        branch,
        width,
        as_tensor(k)[0],
    )
