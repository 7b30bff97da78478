"""Masks that are given: their polarity, whether they do anything, and whether each row of the batch
has its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.inspect.audit.adapters.keywords import Form
from regard.inspect.audit.faults import finding
from regard.inspect.audit.influence import influence
from regard.inspect.audit.probe import Probe
from regard.inspect.audit.result import Finding
from regard.inspect.audit.subject import Ask, CannotTry, NotApplicable, Subject

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
