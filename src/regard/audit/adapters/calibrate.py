"""Find out how code wants its masks: give it masks, and see which tokens reach which outputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.audit.adapters.arguments import Form, Keywords, Reading
from regard.audit.adapters.functions import Function
from regard.audit.adapters.modules import Module
from regard.audit.subject import Ask, Subject, influence
from regard.process_state import ignore_warnings

T = 5
KEEP = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 0, 1, 0], [0, 1, 0, 1, 1]]
).bool()  # causal, every row sees its own key, and rows 2 to 4 lack an earlier one
HIDDEN = ~KEEP
VISIBLE = torch.ones(T, T).tril(-1).bool() & KEEP


BLOCKING = ("src_mask", "tgt_mask")
"""Names under which torch documents True = may not attend, as in `nn.MultiheadAttention`."""


OTHER = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 1, 1, 0], [1, 0, 1, 0, 1]]
).bool()
"""Another mask, which shows what KEEP hides."""


class Heard(NamedTuple):
    """What a mask does.

    "works", "inverted", "ignored", "added" (it changes the output and hides nothing), "kept" (the
    first one serves every call), "overflow" (the code writes a number that the dtype cannot hold),
    "refused".
    """

    verdict: str
    form: Form | None = None


def calibrated(subject: Module | Function) -> tuple[Subject, dict[str, Heard]]:
    """The subject, told how to read its replies and write its masks; and what its masks did."""
    told = subject.told(subject.keywords, _reading(subject))
    heard: dict[str, Heard] = {}
    keywords = told.keywords
    if keywords.mask:
        heard["mask"], form = _mask(told)
        keywords = replace(keywords, mask_form=form)
    if keywords.padding:
        heard["padding"], form = _padding(told.told(keywords, told.reading))
        keywords = replace(keywords, padding_form=form)
    if keywords.mask and keywords.mask_form is None and not keywords.padding:
        keywords, heard = _tokens_only(told, keywords, heard)
    return told.told(keywords, told.reading), heard


def _reading(subject: Module | Function) -> Reading:
    """Where weights stand in the reply, asked for at two lengths that are no size of the module."""
    if (
        isinstance(subject, Module) and subject.pair is not None
    ):  # one query at a time: told apart by their shapes
        return Reading(None if subject.ask(subject.inputs(2, T, 0)).weights is None else 1)
    sizes = {subject.width, subject.claim.head_dim, subject.claim.heads}
    lengths = [n for n in range(3, 20) if n not in sizes][:2]
    found: dict[int, Any] = {}
    for n in lengths:
        found[n] = _raw(subject, subject.inputs(2, n, 0), Ask(weights=True))
    return Reading.of(found, 2)


def _raw(subject: Module | Function, x: Tensor, ask: Ask) -> Any:
    """Everything that the code returned."""
    caught: list[Any] = []

    class Spy(Reading):
        def read(self, given: Any) -> Any:
            caught.append(given)
            return super().read(given)

    subject.told(subject.keywords, Spy()).ask(x, ask)
    return caught[0]


def _mask(subject: Module | Function) -> tuple[Heard, Form | None]:
    """Try shapes and kinds; the first that works by what is claimed, else the first that works the
    other way round.
    """
    known = subject.keywords
    like_torch = known.mask == "attn_mask" or known.padding == "key_padding_mask"
    named = isinstance(subject, Module) and (
        bool(subject.three and like_torch) or known.mask in BLOCKING
    )
    claimed = subject.claim.mask or ("block" if named else None)
    kinds = [claimed] if claimed else ["keep", "ones", "additive"]
    shapes = ["TS"] if named else ["B1TS", "BTS", "TS"]
    if isinstance(subject, Function) and subject.flat:
        shapes = ["BTS", "TS"]
    verdicts = []
    for kind, shape in product(kinds, shapes):
        form = Form(shape, kind)
        verdict = _hear(subject, form)
        if verdict == "works":
            return Heard("kept" if _kept(subject, form) else "works", form), form
        verdicts.append(Heard(verdict, form))
    for wanted in ("inverted", "added", "ignored", "overflow"):
        found = next((h for h in verdicts if h.verdict == wanted), None)
        if found is not None and found.form is not None:
            return found, _turned(subject, found) if wanted in ("inverted", "ignored") else None
    return Heard("refused"), None


def _turned(subject: Module | Function, found: Heard) -> Form | None:
    """A form that works although the claimed one does not, so that the other checks can go on."""
    shape = found.form.shape if found.form else "TS"
    for kind in ("block", "keep", "additive"):
        if _hear(subject, Form(shape, kind)) == "works":
            return Form(shape, kind)
    return None


def overflows(error: Exception) -> bool:
    """Whether an error says that a number does not fit in a dtype, as masked_fill(-1e9) does in
    float16.
    """
    return "without overflow" in str(error)


def _kept(subject: Module | Function, form: Form) -> bool:
    """Whether a second mask of the same shape does nothing, since the first one is kept."""
    told = subject.told(replace(subject.keywords, mask_form=form), subject.reading)
    x = subject.inputs(1, T, 11)
    try:
        told.ask(x, Ask(keep=KEEP[None]))
        seen = influence(lambda x: told.ask(x, Ask(keep=OTHER[None])).out, x, _changed).seen
    except Exception:  # it refuses what is no fault of masks
        return False
    return bool((seen & ~OTHER).any()) and not bool((seen & ~KEEP).any())


def _hear(subject: Module | Function, form: Form) -> str:
    """What a mask in this form does."""
    told = subject.told(replace(subject.keywords, mask_form=form), subject.reading)
    x = subject.inputs(1, T, 11)

    def run(x: Tensor) -> Tensor:
        return told.ask(x, Ask(keep=KEEP[None])).out

    try:
        with ignore_warnings():
            seen = influence(run, x, _changed).seen
            moved = not torch.equal(run(x), told.ask(x).out)
    except Exception as error:  # the code's own way to say that it wants another form
        return "overflow" if overflows(error) else "refused"
    if not bool((seen & HIDDEN).any()):
        return "works" if bool(seen[VISIBLE].all()) else "refused"
    if not bool((seen & VISIBLE).any()):
        return "inverted"
    return "added" if moved else "ignored"


def _padding(subject: Module | Function) -> tuple[Heard, Form | None]:
    """Whether True in a padding mask is a token or padding."""
    block = Form("BS", "block")
    expected = subject.claim.mask or (
        "keep" if subject.keywords.padding == "padding_mask" else "block"
    )
    if not (isinstance(subject, Module) and subject.three) and subject.claim.mask is None:
        expected = "block" if "key" in str(subject.keywords.padding) else expected
    order = [Form("BS", "keep"), block] if expected == "keep" else [block, Form("BS", "keep")]
    for form in order:
        if _hear_tokens(replace(subject.keywords, padding_form=form), subject):
            verdict = "works" if form is order[0] else "inverted"
            return Heard(verdict, order[0]), form
    told = subject.told(replace(subject.keywords, padding_form=order[0]), subject.reading)
    x, tokens = subject.inputs(1, T, 12), torch.ones(1, T, dtype=torch.bool)
    tokens[0, 1] = False
    try:
        moved = not torch.equal(told.ask(x).out, told.ask(x, Ask(tokens=tokens)).out)
    except Exception:
        return Heard("refused"), None
    return (Heard("leaks", order[0]), order[0]) if moved else (Heard("ignored", order[0]), None)


def _hear_tokens(keywords: Keywords, subject: Module | Function) -> bool:
    """Whether padding, marked in this form, is hidden from every other token, row by row."""
    told = subject.told(keywords, subject.reading)
    tokens = torch.ones(2, T, dtype=torch.bool)
    tokens[0, 1] = tokens[1, 2] = False
    x = subject.inputs(2, T, 12)

    def run(x: Tensor) -> Tensor:
        return told.ask(x, Ask(tokens=tokens)).out

    try:
        with ignore_warnings():
            seen = [influence(lambda x, b=b: run(x)[b : b + 1], x, _changed).seen for b in (0, 1)]  # type: ignore[misc]
    except Exception:
        return False
    return not any(bool(seen[b][j + 1 :, j].any()) for b, j in ((0, 1), (1, 2))) and bool(
        seen[0][3:, 2].all()
    )


def _tokens_only(
    subject: Module | Function, keywords: Keywords, heard: dict[str, Heard]
) -> tuple[Keywords, dict[str, Heard]]:
    """An argument named mask that is [B,S] in truth: it marks padding."""
    for kind in ("keep", "ones", "block"):
        tried = replace(keywords, padding=keywords.mask, mask=None, padding_form=Form("BS", kind))
        if _hear_tokens(tried, subject):
            verdict = "inverted" if kind == "block" and subject.claim.mask != "block" else "works"
            return tried, {"padding": Heard(verdict, Form("BS", "keep"))}
    return keywords, heard


def _changed(x: Tensor, j: int) -> Tensor:
    make = torch.Generator().manual_seed(j)
    other = x.clone()
    other[:, j] = torch.randn(x[:, j].shape, generator=make, dtype=x.dtype) - x[:, j]
    return other
