"""The code under audit behind one way to call it, tokens in and mixed tokens out, and which token
reaches which output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError

NEW = object()
"""As `Ask.memory`: begin a new cache."""


@dataclass(frozen=True)
class Claim:
    """What the code says it is; what is None is found out, or not judged.

    Attributes:
        dim, heads, kv_heads, head_dim: M, H, G, D.
        causal: whether a token may see the future; None: whatever it does without a mask.
        window: how many keys a query sees, its own included.
        scale: of the scores; None is 1/sqrt(D).
        mask: what True in a mask means, "keep" or "block", or "additive"; None is what works,
            "block" for `nn.MultiheadAttention` and its like.
        layout: of a function's arguments: "BHTD" or "BTHD".

    >>> Claim(heads=4).groups
    4
    """

    dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool | None = None
    window: int | None = None
    scale: float | None = None
    mask: str | None = None
    layout: str = "BHTD"

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "kv_heads", "head_dim", "window"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least 1")
        for name, allowed in (
            ("mask", (None, "keep", "block", "additive")),
            ("layout", ("BHTD", "BTHD")),
        ):
            if getattr(self, name) not in allowed:
                words = ", ".join(str(a) for a in allowed)
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; it must be one of {words}")
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ArgumentError(
                f"{self.heads} query heads are not divisible by {self.kv_heads} key/value heads"
            )

    @property
    def groups(self) -> int | None:
        """G, which is H unless something else is claimed."""
        return self.kv_heads or self.heads


class Ask(NamedTuple):
    """What one call is given besides tokens.

    Attributes:
        keep: bool [B or 1, T, S], True = may attend, or None.
        tokens: bool [B, S], False = padding, or None.
        positions: [B, T] int, or None: the code's own.
        memory: a cache that holds what came before, or None; NEW asks for an empty one.
        weights: whether the weights are wanted.
    """

    keep: Tensor | None = None
    tokens: Tensor | None = None
    positions: Tensor | None = None
    memory: Any = None
    weights: bool = False


class Reply(NamedTuple):
    """What one call gave: out [B,T,N], weights [B,H or 1,T,S] or None, and the cache to go on
    with.
    """

    out: Tensor
    weights: Tensor | None = None
    memory: Any = None


class CannotTry(Exception):
    """A check could not be made, so that a fault may hide there; the message says why."""


class NotApplicable(CannotTry):
    """There is nothing to check: the code has no cache, takes no mask, claims no window."""


Map: TypeAlias = tuple[Tensor, Tensor | None]
"""The weight [out, in] and the bias [out] of a linear map."""


@dataclass(frozen=True)
class Projections:
    """The linear maps of a module, read from it: what a definition needs besides its mask.

    Attributes:
        q, k, v: weight [out, in] and bias [out] or None.
        o: the output map, or None where the module has none.
        heads, groups: H and G.
        bases: rotary bases that it may use.
        named: whether queries, keys and values have names of their own, so that exchanging them is
            a fault.
        sinks: a logit for each head, [H], or None.
        norm: weight, bias and eps of a layer norm over the output and the input, as BERT has it, or
            None.
        standard: whether faults are looked for under this reading; another order of a fused map is
            tried as right only.
    """

    q: Map
    k: Map
    v: Map
    o: Map | None
    heads: int
    groups: int
    bases: tuple[float, ...] = (10000.0,)
    named: bool = True
    sinks: Tensor | None = None
    norm: tuple[Tensor, Tensor, float] | None = None
    standard: bool = True

    @property
    def head_dim(self) -> int:
        """D."""
        return self.q[0].shape[0] // self.heads


class Subject(ABC):
    """Code under audit.

    Attributes:
        name: what it is called.
        called: how it is called, for the reader.
        claim: what it says it is.
        takes: of "mask", "rows" (a mask for each row of the batch), "padding", "positions",
            "memory", "weights".
        dtype: that it computes in.
        width: M, or the size of a vocabulary.
        relative: whether its positions should count by their differences alone.
    """

    name: str
    called: str
    claim: Claim
    takes: frozenset[str]
    dtype: torch.dtype
    width: int
    relative = False

    @abstractmethod
    def ask(self, x: Tensor, ask: Ask = Ask()) -> Reply:  # noqa: B008  # a NamedTuple does not change
        """Call it on tokens x [B,T,M] (or ids [B,T])."""

    @abstractmethod
    def at(self, dtype: torch.dtype) -> Subject:
        """The same code and weights in another dtype."""

    def inputs(self, B: int, T: int, seed: int) -> Tensor:
        """Tokens [B,T,M] in float64: randn, a seed for each row."""
        rows = []
        for b in range(B):
            make = torch.Generator().manual_seed(seed * 1000 + b)
            rows.append(torch.randn(T, self.width, generator=make, dtype=torch.float64))
        return torch.stack(rows)

    def projections(self) -> tuple[Projections, ...]:
        """The ways to read its linear maps: one, or several where its weights do not say which part
        is which.

        Raises:
            CannotTry: they cannot be read; the message says what is missing.
        """
        raise CannotTry(f"the linear maps of {self.name} cannot be read")

    def shown(self, T: int) -> Tensor | None:
        """What the mask that the code declares shows, bool [T,T], where it declares one."""
        del T
        return None

    def bias(self, T: int) -> Tensor | None:
        """The bias [1,H,T,T] that every call of T tokens is given, where the code takes one."""
        del T
        return None

    def traced(self) -> tuple[nn.Module, Subject] | None:
        """The module whose operations a trace may record, and the subject that calls this very
        module.
        """
        return None

    def smaller(self) -> Iterator[Subject]:
        """The same code with fewer heads and dims, smallest first; nothing where sizes are
        fixed.
        """
        yield from ()

    @property
    def reach(self) -> int | None:
        """The window that caches are tried beyond: the claimed one."""
        return self.claim.window

    def state(self) -> dict[str, Tensor] | None:
        """Tensors that it would save, or None where it saves nothing."""
        return None

    def held(self, memory: Any) -> int:
        """How many numbers a cache holds."""
        return numbers(memory)


def numbers(x: Any, seen: set[int] | None = None) -> int:
    """How many numbers tensors hold, anywhere inside x.

    >>> numbers({"k": [torch.ones(2, 3)], "v": torch.ones(4)})
    10
    """
    seen = set() if seen is None else seen
    if id(x) in seen or isinstance(x, (str, bytes, int, float, nn.Parameter)):
        return 0
    seen.add(id(x))
    if isinstance(x, Tensor):
        return x.numel()
    if isinstance(x, dict):
        return sum(numbers(value, seen) for value in x.values())
    if isinstance(x, (list, tuple, set)):
        return sum(numbers(value, seen) for value in x)
    inside = getattr(x, "__dict__", None)
    return numbers(inside, seen) if isinstance(inside, dict) else 0


class Influence(NamedTuple):
    """Amounts [T,S]: how much output i changes with token j; and the smallest amount that counts as
    a change.
    """

    amount: Tensor
    least: float

    @property
    def seen(self) -> Tensor:
        """bool [T,S]: token j reaches output i."""
        return ~(self.amount <= self.least)  # NaN is an influence

    def worst(self, where: Tensor) -> tuple[int, int, float]:
        """The first output with an influence in `where`, its strongest token, and the amount."""
        amounts = torch.where(where & self.seen, self.amount, 0.0)
        i = int((amounts > 0).any(1).to(torch.int64).argmax())
        j = int(amounts[i].argmax())
        return i, j, float(amounts[i, j])


def influence(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    changed: Callable[[Tensor, int], Tensor],
    tokens: Sequence[int] | None = None,
) -> Influence:
    """Run on x, and on x with each token changed, or each of `tokens`.

    A change is what exceeds sqrt(eps) of the dtype, in units of the output: between rounding and
    any weight that a softmax over mild scores gives.

    >>> x = torch.randn(1, 3, 2)
    >>> other = lambda x, j: x.index_fill(1, torch.tensor([j]), 5.0)
    >>> influence(lambda x: x.cumsum(1), x, other).seen
    tensor([[ True, False, False],
            [ True,  True, False],
            [ True,  True,  True]])
    """
    base = run(x)
    columns = []
    for j in range(x.shape[1]) if tokens is None else tokens:
        other = run(changed(x, j))
        difference = (other - base).abs().double()
        difference = torch.where(other.isnan() & base.isnan(), 0.0, difference)  # it says nothing
        columns.append(difference.transpose(0, 1).flatten(1).amax(1))
    finite = base[base.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return Influence(torch.stack(columns, 1), scale * torch.finfo(base.dtype).eps ** 0.5)
