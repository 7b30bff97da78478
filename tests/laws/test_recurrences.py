"""Laws of the recurrences: relations between calls that hold for every one, in every form."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard.linear
import regard.memory

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

    def draw(self) -> dict[str, Tensor]:
        """Ordinary arguments: keys of length 1, gates in (0, 1), decays from weak to strong."""
        make = torch.Generator().manual_seed(0)
        drawn = {}
        for name, letters in self.shapes.items():
            sizes = [SIZES[letter] for letter in letters]
            x = torch.randn(sizes, generator=make, dtype=torch.float32)
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
        axis = [i for i, letter in enumerate(self.shapes[name]) if letter in "TS"]
        return x.narrow(axis[0], 0, CUT) if axis else x

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


def test_every_recurrence_is_found() -> None:
    found = {name.split()[0] for name in CASES}
    assert {"delta_rule", "titans_memory", "short_convolution", "infini_attention"} <= found
    assert len(found) >= 16
