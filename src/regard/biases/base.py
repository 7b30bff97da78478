"""The base class `Bias` of all biases, and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.registry import Registry
from regard.serialization import RuleWithTensors
from regard.span import Positions, as_tensor, slice_positions
from regard.units import plural

ALL_SLOTS = slice(None)

BIASES: Registry[Bias] = Registry("bias")
"""All bias classes by their `kind`, the name that recordings store."""


class Pairs(NamedTuple):
    """The arguments of `Bias.block`: some queries and keys of a call, and the result's dtype."""

    q_positions: Positions
    k_positions: Positions
    rows: slice
    columns: slice
    dtype: torch.dtype
    device: torch.device | str | None

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the queries `[B or 1, 1, t, 1]` and keys `[B or 1, 1, 1, s]`."""
        q = as_tensor(slice_positions(self.q_positions, self.rows), self.device)
        k = as_tensor(slice_positions(self.k_positions, self.columns), self.device)
        return q[:, None, :, None], k[:, None, None, :]


@dataclass(frozen=True, eq=False, repr=False)
class Bias(RuleWithTensors):
    """Base class of biases: numbers that are added to the scores and depend on positions.

    score_ij = softcap(scale q_i . k_j) + bias_ij, then mask and softmax

    A new bias is a subclass, decorated with `@dataclass(frozen=True, eq=False, repr=False)`, with
    `values`, and `_heads` if it stores numbers per head. Files store its name or `kind`.

    Biases are added with `+`, compare and hash by their fields (tensors by identity), and print as
    an expression. The value at an empty slot (position -1) is finite, without a meaning.

    >>> from regard.biases import ALiBi
    >>> ALiBi(8) + ALiBi(8, symmetric=True)
    alibi(8) + alibi(8, symmetric)
    >>> ALiBi(8) == ALiBi(8)
    True
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = cls.__dict__.get("kind", cls.__name__).lower()
        BIASES.register(cls.kind, cls)

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias of pairs of positions.

        Args:
            q: positions of queries, `[B or 1, 1, t, 1]`.
            k: positions of keys, `[B or 1, 1, 1, s]`.
            dtype: float32 or float64: the precision that the caller needs.

        Returns:
            A tensor `[B or 1, H or 1, t or 1, s or 1]` of any float dtype.
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
        """Return the bias of some queries and keys of an attention call.

        Args:
            q_positions, k_positions: positions of all T queries and all S keys of the call.
            rows, columns: the t queries and s keys to include; all by default.
            dtype: the dtype of the result.
            device: where to compute; by default the device of the positions.

        Returns:
            A tensor `[B or 1, H or 1, t, s]`.
        """
        return self._block(Pairs(q_positions, k_positions, rows, columns, dtype, device))

    def _block(self, pairs: Pairs) -> Tensor:
        """Return what `block` returns, by default the `values` of positions."""
        q, k = pairs.positions()
        values = self.values(q, k, torch.promote_types(pairs.dtype, torch.float32)).to(pairs.dtype)
        return values.expand(*values.shape[:2], q.shape[2], k.shape[3])

    by_slot: ClassVar[bool] = False
    """Whether the values belong to indices in the call, and not to positions."""

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the bias fits an attention call of this shape.

        Args:
            B, H, T, S: batch size, query heads, queries and keys.

        Raises:
            ArgumentError: a size does not fit.
        """
        own = self._heads()
        if own is not None and own != H:  # dynamo cannot look for a variable size in a tuple
            raise ArgumentError(
                f"{self} has {plural(own, 'head')} and the query has {H}; create the bias with "
                f"heads={H}"
            )

    def __add__(self, other: object) -> Bias:
        return Sum((*_terms(self), *_terms(other))) if isinstance(other, Bias) else NotImplemented

    def __str__(self) -> str:
        shown = ", ".join(_short_text(getattr(self, x.name)) for x in fields(self))
        return self.kind + f"({shown})" * bool(shown)

    def _heads(self) -> int | None:
        """Return the number of heads for which the bias stores numbers, or None for any."""
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Bias):
    """The sum of several biases; `a + b` creates it.

    Args:
        terms: the biases to add.

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
            raise ArgumentTypeError(
                f"a sum of biases has a term of type {wrong[0]}; every term must be a Bias"
            )
        if not self.terms:
            raise ArgumentError("a sum of biases has no terms; give at least one")

    @property
    def by_slot(self) -> bool:  # type: ignore[override]
        """Whether the values of a term belong to indices in the call."""
        return any(term.by_slot for term in self.terms)

    def _block(self, pairs: Pairs) -> Tensor:
        """Return the sum of the blocks of the terms."""
        first, *others = (term.block(**pairs._asdict()) for term in self.terms)
        for other in others:
            first = first + other
        return first

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of all terms, in order."""
        return tuple(x for term in self.terms for x in term.tensors())

    def with_tensors(self, tensors: Sequence[Tensor]) -> Sum:
        """Replace the tensors of each term."""
        self._check_count(tensors, len(self.tensors()))
        terms, start = [], 0
        for term in self.terms:
            stop = start + len(term.tensors())
            terms.append(term.with_tensors(tensors[start:stop]))
            start = stop
        return Sum(tuple(terms))

    def select_heads(self, heads: slice) -> Sum:
        """Apply `select_heads` to each term."""
        return Sum(tuple(term.select_heads(heads) for term in self.terms))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that each term fits the call."""
        for term in self.terms:
            term.require(B, H, T, S)

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


def _terms(bias: Bias) -> tuple[Bias, ...]:
    return bias.terms if isinstance(bias, Sum) else (bias,)


def _short_text(value: object) -> str:
    return "x".join(map(str, value.shape)) if isinstance(value, Tensor) else repr(value)
