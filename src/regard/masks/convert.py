"""Conversion of masks from and to the conventions of other libraries."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Lengths, Mask, check_int
from regard.masks.batched import Padding
from regard.masks.custom import Dense
from regard.masks.patterns import Causal, Window


def from_drop(drop: Bool[Tensor, "*shape"]) -> Dense:
    """Convert a bool mask in which True means drop, as `nn.MultiheadAttention` takes it.

    Args:
        drop: bool `[T, S]` or `[B or 1, H or 1, T or 1, S]`, True where a query may not attend.

    Returns:
        The mask, in which True means that the query may attend.

    Raises:
        ArgumentTypeError: not a bool tensor.

    >>> print(from_drop(torch.tensor([[False, True], [False, False]])).table.int().tolist())
    [[1, 0], [1, 1]]
    """
    _check_bool("drop", drop)
    return Dense(~drop)


def to_drop(keep: Bool[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Convert a bool mask in which True means attend to one in which True means drop.

    Args:
        keep: a bool tensor of any shape, such as `mask.block(...)`.

    Returns:
        The negated tensor.

    Raises:
        ArgumentTypeError: not a bool tensor.

    >>> to_drop(torch.tensor([True, False])).tolist()
    [False, True]
    """
    _check_bool("keep", keep)
    return ~keep


def from_additive(mask: Float[Tensor, "*shape"]) -> Dense:
    """Convert a float mask of 0 where a query may attend, and -inf or `finfo.min` where it may not.

    Entries <= finfo.min / 2 are masked.

    Args:
        mask: a float tensor `[T, S]` or `[B or 1, H or 1, T or 1, S]`.

    Returns:
        The mask as a bool tensor.

    Raises:
        ArgumentTypeError: `mask` is not a float tensor.
        ArgumentError: an entry is neither 0 nor masked; such a tensor is a bias.

    >>> from_additive(torch.tensor([[0.0, float("-inf")]])).table.tolist()
    [[True, False]]
    """
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        got = (
            str(mask.dtype).removeprefix("torch.")
            if isinstance(mask, Tensor)
            else type(mask).__name__
        )
        raise ArgumentTypeError(
            f"additive mask is {got}; it must be a float tensor; for a bool mask, use Dense(mask)"
        )
    dropped = mask <= torch.finfo(mask.dtype).min / 2
    other = ~dropped & (mask != 0)
    if bool(other.any()):
        index = other.nonzero()[0].tolist()
        raise ArgumentError(
            f"additive mask has {float(mask[tuple(index)])} at {index}; it must be 0 or at most "
            "finfo.min / 2: numbers in between are a bias, pass them as bias="
        )
    return Dense(~dropped)


def to_additive(
    keep: Bool[Tensor, "*shape"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*shape"]:
    """Convert a bool mask to a float one: 0 where a query may attend, and -inf where it may not.

    Args:
        keep: a bool tensor of any shape, True = may attend, such as `mask.block(...)`.
        dtype: the floating dtype of the result.

    Returns:
        A float tensor of the same shape.

    Raises:
        ArgumentTypeError: not a bool tensor, or a dtype that is not floating.

    >>> to_additive(torch.tensor([True, False])).tolist()
    [0.0, -inf]
    """
    _check_bool("keep", keep)
    if not dtype.is_floating_point:
        raise ArgumentTypeError(
            f"dtype is {dtype}; an additive mask needs a floating dtype, such as torch.float32"
        )
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(
        ~keep, float("-inf")
    )


def from_lengths(lengths: Lengths) -> Padding:
    """Build the mask of a batch that is padded on the right.

    FlashAttention calls these lengths `seqused_k`, and ONNX `nonpad_kv_seqlen`.

    Args:
        lengths: the number of real tokens of each row.

    Returns:
        The padding mask.

    Raises:
        ArgumentError, ArgumentTypeError: a length is below 0 or not an int.

    >>> from_lengths([2, 3])
    Padding(runs=(((0, 2),), ((0, 3),)))
    """
    return Padding.right(lengths)


def from_window_size(left: int, right: int = 0) -> Mask | None:
    """Convert FlashAttention's `window_size=(left, right)`.

    Args:
        left: how many keys before the query are visible, its own key not counted; -1 is no limit.
        right: how many keys after the query are visible; -1 is no limit.

    Returns:
        The mask; None if neither side is limited.

    Raises:
        ArgumentError, ArgumentTypeError: a side is below -1 or not an int.

    >>> print(from_window_size(3), "|", from_window_size(-1), "|", from_window_size(8, 8))
    causal & window(4) | causal | window(9, ahead=8)
    """
    check_int("left", left, -1, "-1 is no limit")
    check_int("right", right, -1, "-1 is no limit")
    if right == 0:
        return Causal() if left < 0 else Causal() & Window(left + 1)
    if left < 0:
        return None if right < 0 else Window(_UNLIMITED_WINDOW, ahead=right)
    return Window(left + 1, ahead=None if right < 0 else right)


def from_sliding_window(size: int | None) -> Mask:
    """Convert the `sliding_window` of a transformers configuration.

    Args:
        size: the number of visible keys, the query's own included; None is no limit.

    Returns:
        The causal mask with this window.

    Raises:
        ArgumentError, ArgumentTypeError: the size is below 1 or not an int.

    >>> print(from_sliding_window(4096))
    causal & window(4096)
    """
    return Causal() if size is None else Causal() & Window(size)


_UNLIMITED_WINDOW = 1 << 40
"""A window longer than any sequence, and small enough that sums with positions fit into int64."""


def _check_bool(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        got = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentTypeError(f"{name} is {got}; it must be a bool tensor: use {name}.bool()")
