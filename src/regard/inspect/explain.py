"""One query token and one key, step by step, in the numbers that the kernel that ran really
computed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from regard.errors import ArgumentError
from regard.inspect.about import (
    At,
    about,
    call_names,
    find_key,
    keys_of,
    row_pieces,
    sizes_of,
    which_call,
)
from regard.inspect.additive import additive
from regard.inspect.calls import calls_at, counting, main_call
from regard.inspect.capture import Capture, capture
from regard.inspect.choose import check_index, find_token
from regard.inspect.effective import recurrent
from regard.inspect.elsewhere import elsewhere
from regard.inspect.equations import EQUATIONS
from regard.inspect.explanation import Explanation
from regard.inspect.inputs import Ask
from regard.inspect.mixture import mixture
from regard.inspect.price import price
from regard.inspect.readers import Source, reading
from regard.inspect.reading import Reading, Site
from regard.inspect.reasons import why_masked
from regard.inspect.row import (
    Checks,
    Fields,
    Row,
    apart,
    finish_online,
    row_of,
    scored,
    values_seen,
)
from regard.inspect.stages import tensors_of
from regard.inspect.steps import mixed, patterns, projected
from regard.nn.cross import AdditiveAttention
from regard.nn.recurrent import Recurrent
from regard.span import Positions, Span, as_tensor
from regard.tap import NAMES, edited

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

    embedding -> norm -> q, k, v -> q_i . k_j -> scaled -> masked -> softmax -> sum_j p_ij v_j -> heads joined -> W_O -> + h

    The model runs on the kernels that it uses anyway, observed: queries, keys, values and the lse
    are those that the kernel got and gave. What is in between is computed again from them, in
    float64, by the definition; what is in front (a query before its rotation, say) by the model's
    own modules. Each recomputed step is compared with what the model went on with:
    `Explanation.checks`. The model runs once more without an observer, and the outputs are
    compared.

    Args:
        model: from `regard.load`: a decoder, a text encoder or an encoder-decoder; a
            `regard.inspect.reading.Words`; or a reading of one of these, such as
            `regard.inspect.specimen.specimen`, a mechanism with random weights.
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
    at = At(read, site, find_token(read.sides[site.rows], query))
    with torch.inference_mode():
        found = capture(read, site)
        if isinstance(site.attention, Recurrent):
            parts = _recurrent(at, found, head, key)
        elif isinstance(site.attention, AdditiveAttention):
            parts = _additive(at, found, head, key)
        else:
            parts = _softmax(at, found, head, key, call)
        fields, checks = parts
        told = about(at, found)
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
    at: At, found: Capture, head: int, key: int | str | None, call: int | str | None
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


def _told(at: At, found: Capture, row: Row, key: int, fields: Fields) -> Fields:
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
        "elsewhere": elsewhere(row, fields["weights"], fields["mixed"], key),
        "cost": price(at.site.attention, sizes, int(chain.visible.sum()), step.q.element_size()),
        "row_pieces": row_pieces(at, row.call),
    }


def _ask_of(at: At, found: Capture, row: Row, branch: int) -> Ask:
    step, width = row.call.step, row.chain.k.shape[1]
    where = (step.q_positions, step.k_positions)
    return _ask(at, found, *where, row.head, row.group, branch, width)


def _recurrent(at: At, found: Capture, head: int, key: int | str | None) -> tuple[Fields, Checks]:
    assert isinstance(at.site.attention, Recurrent)
    head = check_index("head", head, found.taps["q"].shape[0], "head", "heads")
    fields, checks = recurrent(at.site.attention, found.rule, head, at.i)
    return _plain(at, found, head, key, fields, checks)


def _additive(at: At, found: Capture, head: int, key: int | str | None) -> tuple[Fields, Checks]:
    assert isinstance(at.site.attention, AdditiveAttention)
    head = check_index("head", head, found.taps["q"].shape[0], "head", "heads")
    fields, checks = additive(at.site.attention, found, head, at.i)
    return _plain(at, found, head, key, fields, checks)


def _plain(
    at: At, found: Capture, head: int, key: int | str | None, fields: Fields, checks: Checks
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
            "cost": price(
                at.site.attention, sizes, int(visible.sum()), found.taps["q"].element_size()
            ),
            "row_pieces": at.read.sides[at.site.rows].pieces,
        }
    )
    if callable(fields["products"]):
        fields["products"] = fields["products"](j)
    return fields, {**made_checks, **checks, **after_checks}


def _ask(
    at: At,
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
