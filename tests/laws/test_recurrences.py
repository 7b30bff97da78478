"""Laws of the recurrences: relations between calls that hold for every one, in every form."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard.linear
import regard.memory
from regard.span import Span

CUT, SIZE = 9, 32
"""The first token that is changed, and the number of tokens in a chunk."""
SIZES = {"B": 1, "H": 2, "G": 2, "N": 2, "T": 40, "S": 40, "D": 32, "E": 5, "n": 2, "m": 6,
    "c": 8, "L": 4, "1": 1,
}  # fmt: skip
UNIT, FRACTION = ("k", "a", "c"), ("beta", "step", "decay")
OPTIONS = {"segment": 8, "backend": "reference"}


class Recurrence:
    """A public recurrence with the shapes of its tensors, in letters of `SIZES`."""

    def __init__(self, call: Callable[..., Any], shapes: dict[str, list[str]]) -> None:
        self.call, self.shapes = call, shapes
        names = inspect.signature(call).parameters
        self.forms = ["recurrent", "chunk", "parallel"] if "form" in names else [""]
        self.options = {name: x for name, x in OPTIONS.items() if name in names}

    def draw(self, dtype: torch.dtype = torch.float32, **other: int) -> dict[str, Tensor]:
        """Ordinary arguments: keys of length 1, gates in (0, 1), decays from weak to strong."""
        make = torch.Generator().manual_seed(0)
        drawn = {}
        for name, letters in self.shapes.items():
            sizes = [(SIZES | other)[letter] for letter in letters]
            x = torch.randn(sizes, generator=make, dtype=dtype)
            if name in UNIT:
                x = x / x.norm(dim=-1, keepdim=True)
            elif name in FRACTION:
                x = x.sigmoid()
            elif name.startswith("log_") and name != "log_input":
                x = -x.exp() / 4
            drawn[name] = x.exp() if name == "ridge" else x
        return drawn

    def early(self, name: str, x: Tensor) -> Tensor:
        """What belongs to the tokens before the cut; all of x without tokens."""
        axis = self.axis(name)
        return x if axis is None else x.narrow(axis, 0, CUT)

    def axis(self, name: str) -> int | None:
        """The dimension of the tokens."""
        return next((i for i, x in enumerate(self.shapes[name]) if x in ("T", "S")), None)

    def of_slots(self, name: str, x: Tensor, slots: Tensor) -> Tensor:
        axis = self.axis(name)
        return x if axis is None else x.index_select(axis, slots)

    def at(self, arguments: dict[str, Tensor], slots: Tensor) -> dict[str, Tensor]:
        """The arguments of some slots, in their order."""
        return {name: self.of_slots(name, x, slots) for name, x in arguments.items()}

    def go(self, arguments: dict[str, Tensor], form: str, **more: Any) -> tuple[Tensor, Any]:
        """The output [..., T, E] in chunks of 4, and the state."""
        chosen: dict[str, Any] = {"form": form, "chunk": 4} if form else {}
        out, state, *_ = self.call(**arguments, **chosen, **self.options, **more)
        return out, state

    @property
    def where(self) -> str:
        """The parameter that takes positions."""
        names = inspect.signature(self.call).parameters
        return next(name for name in ("k_positions", "positions") if name in names)

    def run(self, arguments: dict[str, Tensor], form: str) -> tuple[Tensor, dict[str, Tensor]]:
        """The outputs of the tokens before the cut, and the gradients of what they read."""
        leaves = {name: x.clone().requires_grad_() for name, x in arguments.items()}
        chosen: dict[str, Any] = {"form": form} if form else {}
        if form == "chunk":
            chosen["chunk"] = SIZE
        out = self.call(**leaves, **chosen, **self.options)[0]
        out = out.narrow(out.ndim - 2, 0, CUT)
        grads = torch.autograd.grad(out.sum(), [*leaves.values()], allow_unused=True)
        found = dict(zip(leaves, grads, strict=True))
        return out.detach(), {
            name: self.early(name, x) for name, x in found.items() if x is not None
        }


def recurrences() -> Iterator[tuple[str, Recurrence]]:
    """Every public function with a state, found by its annotations; once for each choice of a
    tensor that may have several shapes, or be missing.
    """
    for module in (regard.linear, regard.memory):
        for name in module.__all__:
            call = getattr(module, name)
            names = inspect.signature(call).parameters if inspect.isfunction(call) else {}
            if "state" not in names or names["state"].default is not None:
                continue
            shapes: dict[str, list[str]] = {}
            for key, x in names.items():
                found = re.findall(r"Tensor, '([^']*)'", x.annotation)
                if found and key != "state" and not key.endswith("_rotated"):
                    wide = [y.replace("#D", "1") for y in found if "#D" in y]
                    shapes[key] = [y.replace("#", "") for y in found] + wide
                    shapes[key] += [""] * (x.default is None)
            for choice in itertools.product(*shapes.values()):
                letters = {key: x.split() for key, x in zip(shapes, choice, strict=True) if x}
                several = [
                    f"{key}[{len(x)}]" + "1" * (x[-1] == "1")
                    for key, x in letters.items()
                    if len(shapes[key]) > 1
                ]
                yield " ".join([name, *several]), Recurrence(call, letters)


CASES = dict(recurrences())
TOKENWISE = [name for name in CASES if not name.startswith("infini")]
"""Those whose state may end at any token; that of Infini-attention ends with a segment."""
SPREADING = ("gated_slots", "mesa", "mlstm", "rwkv4", "rwkv6")
"""Whose products over a chunk take a NaN to the gradients of earlier tokens."""


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CASES)
def test_a_large_later_token_changes_no_bit_of_an_earlier_one(name: str) -> None:
    """Nor of its gradients, where those of the form token by token are finite."""
    law, ordinary = CASES[name], CASES[name].draw()
    right = {form: law.run(ordinary, form) for form in law.forms}
    of_tokens = [key for key, x in law.shapes.items() if {*x} & {"T", "S"}]
    vectors = [key for key in of_tokens if not key.startswith("log_")]
    for size in (3.0, 1e3, 1e20, 1e30):
        for changed in (*([key] for key in of_tokens), vectors):
            large = {key: x.clone() for key, x in ordinary.items()}
            for key in changed:
                law.early(key, large[key])  # a view of the tokens that stay
                kept = law.early(key, ordinary[key])
                large[key].fill_(-size if key.startswith("log_") else size)
                law.early(key, large[key]).copy_(kept)
            finite: dict[str, bool] = {}
            for form in law.forms:
                out, grads = law.run(large, form)
                where = f"{changed} of {size} in the form {form!r}"
                assert torch.equal(out, right[form][0]), where
                for key, x in grads.items():
                    if finite.setdefault(key, bool(x.isfinite().all())):
                        assert torch.equal(x, right[form][1][key]), f"gradient of {key}, {where}"


def assert_near(x: Tensor, y: Tensor, what: str) -> None:
    """fp64 against fp64: sums of a few hundred products of order 1."""
    assert x.shape == y.shape, what
    assert float((x - y).detach().abs().max()) < 1e-10 * (1 + float(y.detach().abs().max())), what


@pytest.mark.parametrize("name", TOKENWISE)
def test_a_state_splits_a_run_anywhere(name: str) -> None:
    """And a state that is given is not changed."""
    law = CASES[name]
    given = law.draw(torch.float64, T=13)
    for form in law.forms:
        whole = law.go(given, form)[0]
        for cuts in ([0, 0, 1, 12, 13, 13], [0, 8, 13], [*range(14)]):
            state, parts = None, []
            for start, stop in itertools.pairwise(cuts):
                before = copy.deepcopy(state)
                where = {law.where: Span(start, stop - start)}
                part = law.at(given, torch.arange(start, stop))
                out, after = law.go(part, form, state=state, **where)
                parts.append(out)
                if before is not None:
                    assert all(map(torch.equal, tensors(before), tensors(state)))
                    owned = {x.data_ptr() for x in tensors(state) if x.numel() and start < stop}
                    assert not owned & {x.data_ptr() for x in tensors(after)}
                state = after
            assert_near(torch.cat(parts, -2), whole, f"{form} {cuts}")


def tensors(state: Any) -> list[Tensor]:
    return [x for x in state if isinstance(x, Tensor)]


PADDED = torch.tensor([[-1] * 4 + [*range(9)], [0, 1, -1, 2, 3, 4, -1, -1, 5, 6, 7, -1, -1]])


@pytest.mark.parametrize("garbage", [math.nan, 7.0])
@pytest.mark.parametrize("name", TOKENWISE)
def test_an_empty_slot_is_no_token(name: str, garbage: float) -> None:
    """On the left, between and on the right: it writes nothing, decays nothing, gives 0 and gets no
    gradient.
    """
    law = CASES[name]
    given = law.draw(torch.float64, B=2, T=13)
    for key, x in given.items():
        if (axis := law.axis(key)) is not None:
            x.movedim(axis, 1)[PADDED < 0] = -garbage if key.startswith("log_") else garbage
    leaves = {key: x.requires_grad_() for key, x in given.items()}
    for form in law.forms:
        out, state = law.go(leaves, form, **{law.where: PADDED})
        then, _ = law.go(leaves, form, state=state, **{law.where: PADDED + 9 * (PADDED >= 0)})
        for b, row in enumerate(PADDED):
            own = {k: x[b : b + 1] if law.shapes[k][0] == "B" else x for k, x in leaves.items()}
            own = law.at(own, (row >= 0).nonzero()[:, 0])
            right, last = law.go(own, form)
            n = int((row >= 0).sum())
            again, _ = law.go(own, form, state=last, **{law.where: Span(n, n)})
            for found, exact in ((out, right), (then, again)):
                assert not bool(found[b, ..., row < 0, :].any()), form
                assert_near(found[b, ..., row >= 0, :], exact[0], form)
        loss = out.sum() + then.sum()
        grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
        for key, x in zip(leaves, grads, strict=True):
            if x is not None:
                assert x.isfinite().all(), f"gradient of {key}, {form}"
                if (axis := law.axis(key)) is not None:
                    assert not x.movedim(axis, 1)[PADDED < 0].any(), f"gradient of {key}, {form}"


@pytest.mark.parametrize("name", TOKENWISE)
def test_a_nan_reaches_what_it_must_and_nothing_in_front_of_it(name: str) -> None:
    """Every form sends it where the form without products over tokens does; other heads and earlier
    tokens keep their values and their gradients.
    """
    law = CASES[name]
    for key in (key for key in law.shapes if law.axis(key) is not None):
        spoilt = law.draw(torch.float64, T=13)
        usual = None
        at = spoilt[key].movedim(law.axis(key) or 0, 0)[CUT]
        at[(0, 1, *[0] * (at.ndim - 2))] = math.nan
        for form in law.forms:
            what = f"{key} {form}"
            clean = law.go(law.draw(torch.float64, T=13), form)[0]
            leaves = {name: x.detach().requires_grad_() for name, x in spoilt.items()}
            out, state = law.go(leaves, form)
            found = [out.isnan(), *(x.isnan() for x in tensors(state))]
            usual = usual or found
            assert all(map(torch.equal, found, usual)), what
            assert any(x.any() for x in found), what
            heads = (..., 0) if out.ndim == 3 else (0, 0)
            assert_near(out[heads], clean[heads], what)
            assert_near(out[..., :CUT, :], clean[..., :CUT, :], what)
            # the loop's own autograd multiplies 0 by NaN
            if form in ("chunk", "parallel") and name.split()[0] not in SPREADING:
                early = out[..., :CUT, :].sum()
                grads = torch.autograd.grad(early, [*leaves.values()], allow_unused=True)
                for k, x in zip(leaves, grads, strict=True):
                    assert x is None or law.early(k, x).isfinite().all(), f"gradient of {k}, {what}"


@pytest.mark.parametrize("name", TOKENWISE)
def test_positions_of_a_span_and_of_one_row_for_all(name: str) -> None:
    """-2 and -1 are no positions of tokens."""
    law = CASES[name]
    given = law.draw(T=5)
    found = law.go(given, law.forms[0], **{law.where: Span(-2, 5)})[0]
    row = torch.tensor([[-1, -1, 0, 1, 2]])
    assert torch.equal(found, law.go(given, law.forms[0], **{law.where: row})[0])
    assert not bool(found[..., :2, :].any())


SHARING = [name for name in TOKENWISE if "N" in str(CASES[name].shapes) and name != "log_linear"]
"""Those with value heads of their own; log-linear attention has a rule of its own for them."""
HEADS = [(2, 2, 6), (1, 1, 4), (4, 2, 4), (8, 2, 4), (2, 1, 4), (2, 1, 2)]
"""Query, key and value heads: shared queries, queries of their own, and several for each state."""


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("name", SHARING)
def test_value_heads_are_repeated_queries_and_keys(name: str) -> None:
    """Output o reads state o // (O/N) with query o // (O/H), and state n has key n // (N/G); their
    gradients are sums over the heads that share them.
    """
    law = CASES[name]
    for H, G, N in HEADS:
        given = law.draw(torch.float64, H=H, G=G, N=N, T=11)
        leaves = {key: x.requires_grad_() for key, x in given.items()}
        own = dict(leaves)
        for key, x in leaves.items():
            for letter, count, wanted in (("H", H, max(H, N)), ("G", G, N)):
                if letter in law.shapes[key]:
                    own[key] = x.repeat_interleave(wanted // count, law.shapes[key].index(letter))
        right = want = None
        for form in law.forms:
            for arguments in (own, leaves):
                out, state = law.go(arguments, form)
                weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
                loss = (out * weight).sum() + tensors(state)[0].square().sum()
                found = torch.autograd.grad(loss, [*leaves.values()])
                right, want = (out, found) if right is None else (right, want)
                assert_near(out, right, f"{form} {H} {G} {N}")
                for key, x, y in zip(leaves, found, want or (), strict=True):
                    assert_near(x, y, f"gradient of {key}, {form} {H} {G} {N}")


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in TOKENWISE if "v" in CASES[name].shapes])
def test_low_precision_is_summed_in_fp32(name: str, dtype: torch.dtype) -> None:
    law = CASES[name]
    low = law.draw(dtype, T=20)
    wide = {key: x.float() for key, x in low.items()}
    gates = {key: x if key in "qkv" else wide[key] for key, x in low.items()}
    for form in law.forms:
        right, ends = law.go(wide, form)
        for given in (low, gates):  # gates may be wider than q, k, v
            out, state = law.go(given, form)
            assert out.dtype == dtype
            assert torch.equal(out, right.to(dtype))
            assert all(x.dtype in (torch.float32, torch.int64) for x in tensors(state))
            assert all(map(torch.equal, tensors(state), tensors(ends)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(law.go(wide, form)[0], right)


@pytest.mark.full
@pytest.mark.parametrize("name", TOKENWISE)
def test_it_compiles_without_a_break(name: str) -> None:
    torch._dynamo.reset()
    law = CASES[name]
    given = law.draw(T=12)
    for form in law.forms[:2]:
        for where in (torch.arange(12)[None], torch.arange(12)[None] - 3):
            compiled = torch.compile(law.go, fullgraph=True, backend="eager")
            (out, state), (right, ends) = (
                go(given, form, **{law.where: where}) for go in (compiled, law.go)
            )
            for x, y in zip((out, *tensors(state)), (right, *tensors(ends)), strict=True):
                assert float((x - y).abs().max()) < 1e-5


def test_every_recurrence_is_found() -> None:
    found = {name.split()[0] for name in CASES}
    assert {"delta_rule", "titans_memory", "short_convolution", "infini_attention"} <= found
    assert len(found) >= 16
