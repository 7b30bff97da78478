"""What a bias is: numbers that are added to scores, from positions alone, for any block of a
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.registry import Registry
from regard.serialization import Serializable
from regard.span import Positions, as_tensor, slice_positions

ALL_SLOTS = slice(None)

BIASES: Registry[Bias] = Registry("bias")
"""Every class of biases by its `kind`, by which recordings are read back."""


@dataclass(frozen=True, eq=False, repr=False)
class Bias(Serializable):
    """Base of the biases. One rule, `values`; the rest follows from it.

    A new bias is a subclass, `@dataclass(frozen=True, eq=False, repr=False)`, here or in your own
    code, that writes `values`, and `_heads` where it has numbers for each head. Files know the
    class by its name in small letters, or by `kind = "..."`.

    score_ij = softcap(scale q_i . k_j) + bias_ij, then mask and softmax

    Biases add up with `+`, compare and hash by their numbers (a tensor by identity), and print as
    an expression. What a bias says at an empty slot (position -1) means nothing, and is finite.

    >>> from regard.biases import ALiBi
    >>> ALiBi(8) + ALiBi(8, symmetric=True)
    alibi(8) + alibi(8, symmetric)
    >>> ALiBi(8) == ALiBi(8)
    True
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = cls.__dict__.get("kind", cls.__name__).lower()
        BIASES.enter(cls.kind, cls)

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias [B or 1, H or 1, t or 1, s or 1] of query positions q [B or 1,1,t,1] and key
        positions k [B or 1,1,1,s].

        In any float dtype; it need not be more exact than `dtype`, which is fp32 or fp64.
        """
        raise NotImplementedError

    def block(
        self,
        q_positions: Positions,
        k_positions: Positions,
        rows: slice = ALL_SLOTS,
        columns: slice = ALL_SLOTS,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """The bias [B or 1, H or 1, t, s] of some rows (queries) and columns (keys) of a call, in a
        dtype.
        """
        q = as_tensor(slice_positions(q_positions, rows), device)[:, None, :, None]
        k = as_tensor(slice_positions(k_positions, columns), device)[:, None, None, :]
        values = self.values(q, k, torch.promote_types(dtype, torch.float32)).to(dtype)
        return values.expand(*values.shape[:2], q.shape[2], k.shape[3])

    @property
    def by_slot(self) -> bool:
        """Whether it has a number for each place in the call, as a dense tensor does, and not for
        positions.
        """
        return False

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors inside, which may want a gradient."""
        return tuple(getattr(self, name) for name in self._tensor_names())

    def with_tensors(self, tensors: Sequence[Tensor]) -> Bias:
        """The same bias over other tensors, in the order of `tensors()`.

        Raises:
            ArgumentError: there are not as many tensors as the bias has.
        """
        names = self._tensor_names()
        self._check_count(tensors, len(names))
        return replace(self, **dict(zip(names, tensors, strict=True)))

    def select_heads(self, heads: slice) -> Bias:
        """The bias of some of the query heads.

        Raises:
            ArgumentError: this kind of bias cannot be cut by heads.
        """
        raise ArgumentError(
            f"{self} cannot be cut by heads; write `select_heads` for its class, or use another "
            "method"
        )

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Raise if the bias cannot serve a call of B rows, H query heads, T queries and S keys.

        Raises:
            ArgumentError: a size does not fit.
        """
        own = self._heads()
        if own not in (None, H):
            raise ArgumentError(
                f"{self} has {own} heads and the query has {H}; make the bias for {H} heads"
            )

    def __add__(self, other: object) -> Bias:
        return Sum((*_terms(self), *_terms(other))) if isinstance(other, Bias) else NotImplemented

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Bias) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        shown = ", ".join(_short_text(getattr(self, x.name)) for x in fields(self))
        return self.kind + f"({shown})" * bool(shown)

    def _heads(self) -> int | None:
        """How many heads it has numbers for; None if for any."""
        return None

    def _tensor_names(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor))

    def _key(self) -> tuple[object, ...]:
        values = (getattr(self, f.name) for f in fields(self))
        return (type(self), *(_identity(value) for value in values))

    def _check_count(self, tensors: Sequence[Tensor], n: int) -> None:
        if len(tensors) != n:
            raise ArgumentError(
                f"{self} has {n} tensors and got {len(tensors)}; give one for each of tensors()"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Bias):
    """Several biases added up; `a + b` makes it.

    >>> from regard.biases import ALiBi
    >>> from regard.span import Span
    >>> both = ALiBi(2) + ALiBi(slopes=(1.0, 0.0))
    >>> float(both.block(Span(3, 1), Span(1, 1))[0, 0])
    -2.125
    """

    terms: tuple[Bias, ...]

    def __post_init__(self) -> None:
        wrong = [type(x).__name__ for x in self.terms if not isinstance(x, Bias)]
        if wrong:
            raise ArgumentTypeError(f"a sum of biases has a {wrong[0]}; its terms are biases")
        if not self.terms:
            raise ArgumentError("a sum of biases has no terms; give at least one")

    @property
    def by_slot(self) -> bool:
        """Whether a term has a number for each place in the call."""
        return any(term.by_slot for term in self.terms)

    def block(
        self,
        q_positions: Positions,
        k_positions: Positions,
        rows: slice = ALL_SLOTS,
        columns: slice = ALL_SLOTS,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """The sum of the terms' blocks."""
        first, *others = (
            term.block(q_positions, k_positions, rows, columns, dtype=dtype, device=device)
            for term in self.terms
        )
        for other in others:
            first = first + other
        return first

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the terms, in order."""
        return tuple(x for term in self.terms for x in term.tensors())

    def with_tensors(self, tensors: Sequence[Tensor]) -> Sum:
        """Each term over its share of the tensors."""
        self._check_count(tensors, len(self.tensors()))
        terms, start = [], 0
        for term in self.terms:
            stop = start + len(term.tensors())
            terms.append(term.with_tensors(tensors[start:stop]))
            start = stop
        return Sum(tuple(terms))

    def select_heads(self, heads: slice) -> Sum:
        """Every term's."""
        return Sum(tuple(term.select_heads(heads) for term in self.terms))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Raise if a term cannot serve the call."""
        for term in self.terms:
            term.require(B, H, T, S)

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


def _terms(bias: Bias) -> tuple[Bias, ...]:
    return bias.terms if isinstance(bias, Sum) else (bias,)


def _short_text(value: object) -> str:
    return "x".join(map(str, value.shape)) if isinstance(value, Tensor) else repr(value)


def _identity(value: object) -> object:
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    return tuple(map(_identity, value)) if isinstance(value, tuple) else value
