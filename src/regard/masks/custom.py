"""Masks that the caller supplies: one per head, a tensor, or a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Mask, Reach, last_causal_from, widest_reach
from regard.masks.tiling import (
    CallSlice,
    Intervals,
    SlotPair,
    broadcast,
    broadcast_shape,
    stack_heads,
    to_4d,
)
from regard.span import slot_count
from regard.units import plural


@dataclass(frozen=True, eq=False)
class Heads(Mask):
    """A separate mask for each query head.

    Args:
        masks: one mask per query head.

    Raises:
        ArgumentError, ArgumentTypeError: there are no masks, or not one per head in a call.

    >>> from regard.masks import Causal, Window
    >>> from regard.span import Span
    >>> Heads((Causal(), Causal() & Window(2))).visible(Span(0, 4), Span(0, 4)).tolist()
    [[[1, 2, 3, 4], [1, 2, 2, 2]]]
    """

    masks: Sequence[Mask]

    def __post_init__(self) -> None:
        masks: object = self.masks
        if not isinstance(masks, (tuple, list)):
            raise ArgumentTypeError(
                f"Heads masks is {type(masks).__name__}; it must be a sequence of masks"
            )
        if not masks:
            raise ArgumentError("Heads got no masks; give one mask per query head")
        for i, mask in enumerate(masks):
            if not isinstance(mask, Mask):
                raise ArgumentTypeError(
                    f"Heads masks[{i}] is {type(mask).__name__}; it takes masks of regard.masks"
                )
        object.__setattr__(self, "masks", tuple(masks))

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return the rule of each head's mask, joined along the head dimension."""
        q, k = to_4d(q), to_4d(k)
        return _join_heads([to_4d(mask.allows(q, k)) for mask in self.masks])

    def _block(self, part: CallSlice) -> Tensor:
        return _join_heads([mask._block(part) for mask in self.masks])

    def _allows_pair(self, slot: SlotPair) -> Tensor:
        heads = torch.stack([mask._allows_pair(slot) for mask in self.masks])
        return heads[slot.h]

    def _intervals(self, q: Tensor) -> Intervals | None:
        heads = []
        for h, mask in enumerate(self.masks):
            ranges = mask._ranges(q[:, 0, :, 0])
            if ranges is None:
                return None
            heads.append(Intervals(*(_select_head(x, h) for x in ranges)))
        return stack_heads(heads)

    def _states_without_intervals(self, part: CallSlice, bk: int) -> Tensor:
        return _join_heads([mask._states(part, bk) for mask in self.masks])

    def select_heads(self, heads: slice) -> Mask:
        """Return the masks of these heads."""
        chosen = range(*heads.indices(len(self.masks)))
        return Heads(tuple(self.masks[h].select_heads(slice(h, h + 1)) for h in chosen))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that there is one mask per query head."""
        if len(self.masks) != H:
            raise ArgumentError(
                f"Heads holds {plural(len(self.masks), 'mask')}, but the call has "
                f"{plural(H, 'query head')}; give one mask per head"
            )
        for mask in self.masks:
            mask.require(B, H, T, S)

    def causal_from(self) -> int | None:
        """Return the largest position of the heads' masks."""
        return last_causal_from(self.masks)

    def reach(self) -> Reach:
        """Return a reach that covers the mask of every head."""
        return widest_reach([mask.reach() for mask in self.masks])

    def __str__(self) -> str:
        return f"heads(({', '.join(map(str, self.masks))}{',' * (len(self.masks) == 1)}))"


def _select_head(x: Tensor, h: int) -> Tensor:
    """Return head h of a tensor `[B, H or 1, ...]`."""
    return x[:, h : h + 1] if x.shape[1] > 1 else x


def _join_heads(tensors: list[Tensor]) -> Tensor:
    """Join head h of the h-th tensor along the head dimension."""
    heads = broadcast(*(_select_head(x, h) for h, x in enumerate(tensors)))
    return torch.cat(heads, 1)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A bool tensor over the queries and keys of one call; True means that the query may attend.

    Rows and columns are indices in the call, not positions.

    Args:
        table: bool `[T, S]`, or `[B or 1, H or 1, T or 1, S]`.

    Raises:
        ArgumentError, ArgumentTypeError: the tensor does not fit, or `allows` is called.

    >>> from regard.span import Span
    >>> Dense(torch.ones(3, 3).tril().bool()).visible(Span(0, 3), Span(0, 3)).tolist()
    [[[1, 2, 3]]]
    """

    has_text: ClassVar[bool] = False
    why_hidden = ("not allowed by the given matrix", "given")

    table: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor):
            raise ArgumentTypeError(
                f"mask is {type(self.table).__name__}; it must be a bool tensor"
            )
        x = self.table
        if x.dtype != torch.bool:
            name = str(x.dtype).removeprefix("torch.")
            advice = "regard.masks.from_additive(mask)" if x.is_floating_point() else "mask.bool()"
            raise ArgumentTypeError(
                f"mask is {name}; it must be bool, True = may attend: use {advice}"
            )
        if x.ndim not in (2, 4):
            hint = "mask[:, None] if the first is the batch, mask[None] if it is the heads"
            raise ArgumentError(
                f"mask is {tuple(x.shape)}; it must be [queries, keys] or [batch or 1, heads or 1, "
                "queries or 1, keys]" + (f": use {hint}" if x.ndim == 3 else "")
            )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Raise, because the tensor is indexed by slots of one call, not by positions."""
        raise ArgumentError(
            "a Dense mask is indexed by the slots of one call, not by positions: call "
            "mask.block(q_positions, k_positions), or write the rule as Fn(rule, name)"
        )

    def _block(self, part: CallSlice) -> Tensor:
        x = self.table if self.table.ndim == 4 else self.table[None, None]
        rows = part.rows if x.shape[2] > 1 or slot_count(part.q_positions) == 1 else slice(None)
        return x[:, :, rows, part.columns].to(part.device)

    def select_heads(self, heads: slice) -> Mask:
        """Return the table of these heads if there is one per head."""
        one = self.table.ndim == 2 or self.table.shape[1] == 1
        return self if one else replace(self, table=self.table[:, heads])

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the shape of the table fits the call."""
        shape = tuple(self.table.shape)
        fits = shape == (T, S)
        if len(shape) == 4:
            fits = (
                shape[0] in (1, B) and shape[1] in (1, H) and shape[2] in (1, T) and shape[3] == S
            )
        if not fits:
            padding = "; a padding mask over keys is Padding.from_keep(mask) or mask[:, None, None]"
            raise ArgumentError(
                f"mask is {shape}; it must be {(T, S)} or [{B} or 1, {H} or 1, {T} or 1, {S}]"
                + padding * (shape == (B, S))
            )

    def _allows_pair(self, slot: SlotPair) -> Tensor:
        x = self.table if self.table.ndim == 4 else self.table[None, None]
        indices = (slot.b, slot.h, slot.q_idx)
        return x[*(i * (n > 1) for i, n in zip(indices, x.shape, strict=False)), slot.kv_idx]

    @property
    def by_slot(self) -> bool:
        """True, because columns of the tensor are indices of keys in the call."""
        return True

    def __str__(self) -> str:
        return f"dense({'x'.join(map(str, self.table.shape))})"

    def __repr__(self) -> str:
        return f"Dense(bool{list(self.table.shape)})"


@dataclass(frozen=True, eq=False)
class Fn(Mask):
    """A mask given by a function of positions.

    Args:
        rule: a function of q `[B or 1, 1, T, 1]` and k `[B or 1, 1, 1, S]` to bools.
        name: the text of the mask in messages.

    Raises:
        ArgumentTypeError: the rule is not a function, or its result is not a bool tensor.
        ArgumentError: the shape of the result does not broadcast to `[B, H, T, S]`.

    >>> from regard.span import Span
    >>> even = Fn(lambda q, k: k % 2 == 0, "even keys")
    >>> print(even, even.count(Span(0, 3), Span(0, 3)))
    even keys 6
    """

    has_text: ClassVar[bool] = False
    why_hidden = ("not allowed by the given function", "given")

    rule: Callable[[Tensor, Tensor], Tensor]
    name: str = "fn"

    def __post_init__(self) -> None:
        if not callable(self.rule):
            raise ArgumentTypeError(
                f"Fn rule is {type(self.rule).__name__}; it must be a function of q and k positions"
            )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Call the function and check its result."""
        out = self.rule(q, k)
        if not isinstance(out, Tensor) or out.dtype != torch.bool:
            got = out.dtype if isinstance(out, Tensor) else type(out).__name__
            raise ArgumentTypeError(
                f"Fn {self.name} returned {got}; it must return a bool tensor, True = may attend"
            )
        pair = broadcast_shape(q.shape, k.shape)
        if out.ndim > 4 or any(
            n not in (1, of) for n, of in zip(out.shape[:-3:-1], pair[::-1], strict=False)
        ):
            raise ArgumentError(
                f"Fn {self.name} returned {tuple(out.shape)} for positions {tuple(q.shape)} and "
                f"{tuple(k.shape)}; it must return a shape that broadcasts to [batch, heads, "
                "queries, keys]"
            )
        return out

    def __str__(self) -> str:
        return self.name
