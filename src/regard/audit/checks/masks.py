"""Masks and padding that are given: their polarity, their rows, and what happens behind them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.audit.adapters.arguments import Form
from regard.audit.findings import Finding, finding
from regard.audit.probe import Probe
from regard.audit.subject import Ask, CannotTry, NotApplicable, Subject, influence

_SAID = {
    "inverted": ("mask-polarity", "{name} hides the keys that it should show"),
    "ignored": ("mask-ignored", "{name} changes nothing"),
    "added": ("mask-added", "{name} changes the output, and hides no key"),
    "kept": ("mask-kept", "The first {name} serves a later call with another"),
    "overflow": ("mask-value-overflow", "{name} cannot be applied"),
}
_MEANS = {
    "keep": "True = may attend",
    "block": "True = hidden",
    "ones": "1 = may attend",
    "additive": "0 and finfo.min, added",
}


PADS = 3


def heard(probe: Probe) -> list[Finding]:
    """Masks do what is claimed of them."""
    found = []
    told = probe.notes.get("heard", {})
    if not told:
        raise NotApplicable("it takes no mask")
    for role, said in told.items():
        if said.verdict not in _SAID or said.form is None:
            continue
        name, words = _SAID[said.verdict]
        kind = said.form.kind
        keywords: Any = getattr(probe.subject, "keywords")  # noqa: B009  # those who hear masks have them
        argument = getattr(keywords, role) or keywords.padding
        sentence = (
            f"{words.format(name=argument)}: {_MEANS[kind]} was expected (say --mask if "
            "another is meant)."
        )
        if said.verdict == "overflow":
            found.append(overflow(probe.subject, f"{argument}: a number"))
        elif said.verdict == "kept":
            example = {"T": 5, "calls": 2}
            found.append(
                finding(
                    name,
                    f"{words.format(name=argument)}.",
                    example,
                    "the second mask",
                    "the first mask",
                )
            )
        else:
            found.append(finding(name, sentence, *_numbers(probe, role, kind)))
    if all(said.verdict == "refused" for said in told.values()):
        raise CannotTry(
            "no form of mask that was tried is accepted, or does what a mask does: give an adapter"
        )
    return found


def overflow(subject: Subject, what: str) -> Finding:
    """The finding of a number that the dtype cannot hold."""
    name = str(subject.dtype).removeprefix("torch.")
    most = torch.finfo(subject.dtype).max
    sentence = f"{what} that is written in the code does not fit in {name}, and the call raises."
    return finding(
        "mask-value-overflow",
        sentence,
        {"T": 5, "dtype": name},
        f"at most {most:.6g}",
        "RuntimeError",
    )


def _numbers(probe: Probe, role: str, kind: str) -> tuple[dict[str, Any], float, float]:
    """How much the last query changes with key 0, hidden from it by a mask as it is claimed to be
    written.
    """
    subject: Any = probe.wide or probe.subject
    keywords = subject.keywords
    shape = (getattr(keywords, f"{role}_form") or probe.notes["heard"][role].form).shape
    told = subject.told(replace(keywords, **{f"{role}_form": Form(shape, kind)}), subject.reading)
    for T in (2, 3, 4):
        x, keep = probe.inputs(1, T), torch.ones(1, T, T).tril().bool()
        keep[0, -1, 0] = False
        ask = Ask(tokens=torch.arange(T)[None] > 0) if role == "padding" else Ask(keep)
        got = influence(partial(_out, told, ask), x, probe.changed)
        amount = float(got.amount[T - 1, 0])
        if amount > got.least:
            break
    return {"T": T, "query": T - 1, "hidden key": 0}, 0.0, amount


def _out(subject: Subject, ask: Ask, x: Tensor) -> Tensor:
    return subject.ask(x, ask).out


def rows(probe: Probe, T: int = 4) -> list[Finding]:
    """Two rows of the batch with masks of their own give what each gives alone."""
    if not probe.subject.takes & {"rows", "padding"}:
        raise NotApplicable("it takes no mask for each row of a batch")
    keeps = torch.stack([probe.pattern(T, T), probe.pattern(T, T)])
    tokens = torch.ones(2, T, dtype=torch.bool)
    tokens[0, 1] = False  # each row hides another key
    tokens[1, 2] = False
    by_keys = "rows" not in probe.subject.takes
    x = probe.inputs(1, T)
    x = torch.cat([x, x])

    def asked(subject: Subject, x: Tensor, rows: slice) -> Tensor:
        if by_keys:
            return probe.ask(x[rows], tokens=tokens[rows], subject=subject).out
        return subject.ask(x[rows], Ask(keep=(keeps & tokens[:, None])[rows])).out

    def together(subject: Subject, x: Tensor) -> Tensor:
        return asked(subject, x, slice(None))[1:, T - 1 :]

    def alone(subject: Subject, x: Tensor) -> Tensor:
        return asked(subject, x, slice(1, 2))[:, T - 1 :]

    off = probe.differs(x, together, alone)
    if off is None:
        return []
    return [
        finding(
            "mask-rows",
            f"Token {T - 1} of row 1 gives another result beside a row with another mask.",
            {"B": 2, "T": T},
            off.expected,
            off.got,
        )
    ]


def _need_padding(probe: Probe) -> None:
    if not probe.subject.takes & {"padding", "rows", "mask"}:
        raise NotApplicable("it takes no mask that could mark padding")


def content(probe: Probe, T: int = 6) -> list[Finding]:
    """Changing a padded token, in front or behind, changes no token."""
    _need_padding(probe)
    subject = probe.wide or probe.subject
    x = probe.inputs(1, T)
    for pad in (0, T - 1):
        tokens = torch.ones(1, T, dtype=torch.bool)
        tokens[0, pad] = False

        def run(x: Tensor, tokens: Tensor = tokens) -> Tensor:
            return probe.ask(x, tokens=tokens, subject=subject).out

        got = influence(run, x, probe.changed)
        hit = got.seen[:, pad].clone()
        hit[pad] = False
        if bool(hit.any()):
            i = int(hit.to(torch.int64).argmax())
            amount = float(got.amount[i, pad])
            if _hides_query(probe, x, tokens, pad):
                sentence = (
                    f"The mask of padding changes query {pad}, which is padding, and hides "
                    "its key from nobody."
                )
                return [
                    finding(
                        "padding-on-queries",
                        sentence,
                        {"T": T, "padding": pad, "query": i},
                        0.0,
                        amount,
                    )
                ]
            return [
                finding(
                    "padding-leak",
                    f"Token {i} changes with what stands in the padding at {pad}.",
                    {"T": T, "padding": pad, "query": i},
                    0.0,
                    amount,
                )
            ]
    return []


def _hides_query(probe: Probe, x: Tensor, tokens: Tensor, pad: int) -> bool:
    """Whether the mask changes what the padded token gets, and no other one."""
    subject = probe.wide or probe.subject
    with_mask, without = (
        probe.ask(x, tokens=tokens, subject=subject).out,
        probe.ask(x, subject=subject).out,
    )
    off = (with_mask - without).abs().amax(-1)[0]
    off = torch.where(off.isnan(), torch.inf, off)
    least = float(without.abs().max()) * torch.finfo(without.dtype).eps ** 0.5
    others = torch.arange(off.shape[0]) != pad
    return bool(off[pad] > least) and bool((off[others] <= least).all())


def garbage(probe: Probe, T: int = 4) -> list[Finding]:
    """NaN in a padded slot reaches no token."""
    if not probe.strict:
        raise NotApplicable(
            "it is asked for by --strict: plain softmax code multiplies 0 by what is hidden"
        )
    _need_padding(probe)
    x = probe.inputs(1, T)
    if not x.is_floating_point():
        raise NotApplicable("tokens are ids, which cannot be NaN")
    tokens = torch.ones(1, T, dtype=torch.bool)
    tokens[0, 0] = False
    x[0, 0] = float("nan")
    out = probe.ask(x, tokens=tokens).out[0, 1:]
    if bool(out.isfinite().all()):
        return []
    i = int((~out.isfinite()).any(-1).to(torch.int64).argmax()) + 1
    return [
        finding(
            "garbage-leak",
            f"NaN in the padded slot 0 makes token {i} NaN.",
            {"T": T, "padding": 0, "query": i},
            "finite",
            "nan",
        )
    ]


def left(probe: Probe, T: int = 4) -> list[Finding]:
    """A row behind padding gives what it gives alone, beside a longer row in the batch."""
    takes = probe.subject.takes
    if not takes & {"padding", "rows"}:
        raise NotApplicable("it takes no mask for each row of a batch that could mark padding")
    n = T + PADS
    x = probe.inputs(2, n)
    tokens = torch.ones(2, n, dtype=torch.bool)
    tokens[0, :PADS] = False

    def padded(subject: Subject, x: Tensor) -> Tensor:
        return probe.ask(x, tokens=tokens, subject=subject).out[:1, PADS:]

    def alone(subject: Subject, x: Tensor) -> Tensor:
        return probe.ask(x[:1, PADS:], subject=subject).out

    off = probe.differs(x, padded, alone)
    if off is None:
        return []
    t = off.at[1] if off.at else 0
    sentence = (
        f"Token {t} of a row of {T} differs from the same row without {PADS} padded slots in front."
    )
    return [
        finding(
            "left-padding-shift",
            sentence,
            {"B": 2, "T": n, "padding": PADS, "token": t},
            off.expected,
            off.got,
        )
    ]


def empty(probe: Probe, T: int = 3) -> list[Finding]:
    """A query that may see nothing harms no other one; with --strict, it gives what no weight at
    all gives.
    """
    takes, subject = probe.subject.takes, probe.subject
    if not takes & {"mask", "padding"}:
        raise NotApplicable("it takes no mask that could hide every key")
    x = probe.inputs(1, T)
    tokens = keep = None
    if "mask" in takes:
        keep = probe.pattern(T, T)[None].clone()
        keep[0, 0] = False
    else:
        tokens = torch.ones(1, T, dtype=torch.bool)
        tokens[0, 0] = False
    out = subject.ask(x, Ask(keep=keep, tokens=tokens)).out[0]
    bad = ~out.isfinite().all(-1)
    spread = bad[1:] if probe.causal or keep is not None else bad[:0]
    if bool(spread.any()) or (probe.strict and bool(bad.any())):
        i = (
            int(bad.to(torch.int64).argmax())
            if not bool(spread.any())
            else int(spread.to(torch.int64).argmax()) + 1
        )
        return [
            finding(
                "empty-row",
                f"Query {i} is NaN in a call in which query 0 may see nothing.",
                {"T": T, "query": i},
                "finite",
                "nan",
            )
        ]
    if bool(bad.any()):
        raise NotApplicable(
            "query 0 is NaN where a mask hides every key from it, and nothing claims such rows "
            "(--strict)"
        )
    if not probe.strict or probe.causal is False:
        return []
    try:
        o = subject.projections()[0].o
    except CannotTry:
        return []
    bias = None if o is None else o[1]
    expected = torch.zeros_like(out[0]) if bias is None else bias.to(out)
    off = (out[0] - expected).abs()
    if float(off.max()) <= torch.finfo(out.dtype).eps ** 0.5:
        return []
    at = int(off.argmax())
    return [
        finding(
            "empty-row",
            "Query 0 may see nothing, and gives an average of all values.",
            {"T": T, "query": 0},
            float(expected[at]),
            float(out[0, at]),
        )
    ]
