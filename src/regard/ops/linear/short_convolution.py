"""The short causal convolution over the last few tokens, in front of a recurrence."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_positions, check_sizes, check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Positions, find_empty_slots

Activation: TypeAlias = Literal["silu"] | None
"""The function after a short convolution."""


def short_convolution(
    x: Float[Tensor, "B T c"],
    weight: Float[Tensor, "c n"],
    bias: Float[Tensor, " c"] | None = None,
    *,
    activation: Activation = None,
    state: tuple[Float[Tensor, "B n1 c"], ...] | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "B T c"], tuple[Float[Tensor, "B n1 c"]]]:
    """Compute a causal convolution over the last n tokens, with one filter per channel.

    y_t = activation(bias + sum_{i < n} weight[:, n - 1 - i] * x_{t - i})

    The weights are in the order of `torch.nn.Conv1d`: the last column is the present token's. The
    filters reach over empty slots, of which nothing enters.

    Args:
        x: the channels of T tokens `[B, T, c]`.
        weight: the filters `[c, n]`, in the dtype of x.
        bias: a number per channel `[c]`, in the dtype of x, or None.
        activation: "silu" for x sigmoid(x), or None.
        state: (past,) of an earlier call: the last n - 1 tokens `[B, n - 1, c]` in the dtype of x,
            the newest one last; None: zeros.
        positions: positions of the tokens; slots at -1 are empty, and their outputs are 0.

    Returns:
        The output `[B, T, c]` in the dtype of x, and the state after the last token. Sums are in
        fp32 (fp64 for fp64 inputs).

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.

    >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
    >>> y, (past,) = short_convolution(x, torch.tensor([[10.0, 1.0]]))
    >>> y.flatten().tolist(), past.flatten().tolist()
    ([1.0, 12.0, 23.0], [3.0])

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 7; Yang et al. 2024 (arXiv 2406.06484),
    section 3.3.
    """
    _check(x, weight, bias, activation, state, positions)
    n = weight.shape[1]
    past = x.new_zeros(x.shape[0], n - 1, x.shape[2]) if state is None else state[0]
    empty = None if positions is None else find_empty_slots(positions, x.device)
    if empty is None:
        full = torch.cat([past, x], 1)
        y = _convolve(full, weight, bias, activation)
        return y, (full[:, x.shape[1] :],)
    # Empty slots move to the front, so that every token follows the tokens before it.
    empty = empty.expand(x.shape[0], -1)
    order = empty.int().argsort(dim=1, descending=True, stable=True)[..., None].expand_as(x)
    tokens = x.masked_fill(empty[..., None], 0).gather(1, order)
    # The past stands right before the first token: [empty slots, past, tokens] of each row.
    count = empty.sum(1)[:, None]
    where = torch.arange(tokens.shape[1] + n - 1, device=x.device) - count
    shifted = torch.cat([past, tokens], 1).gather(
        1, _index_of_shifted(where, count, n)[..., None].expand(-1, -1, x.shape[2])
    )
    y = _convolve(shifted, weight, bias, activation)
    y = torch.zeros_like(y).scatter(1, order, y)
    return y.masked_fill(empty[..., None], 0), (shifted[:, x.shape[1] :],)


def _index_of_shifted(where: Tensor, count: Tensor, n: int) -> Tensor:
    """Return which column of [past, empty slots, tokens] is in [empty slots, past, tokens]."""
    column = where + count
    is_empty, is_past = where < 0, (where >= 0) & (where < n - 1)
    return torch.where(is_empty, column + n - 1, torch.where(is_past, where, column))


def _convolve(full: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """Convolve `[B, n - 1 + T, c]`, the past and the tokens, to `[B, T, c]`."""
    dtype, n = full.dtype, weight.shape[1]
    T = full.shape[1] - n + 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.autocast(full.device.type, enabled=False):
        full, weight = full.to(wide), weight.to(wide)
        y = full[:, :T] * weight[:, 0]
        for i in range(1, n):
            y = torch.addcmul(y, full[:, i : i + T], weight[:, i])
        y = y if bias is None else y + bias.to(wide)
        return (F.silu(y) if activation == "silu" else y).to(dtype)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    state: tuple[Tensor, ...] | None,
    positions: Positions | None,
) -> None:
    """Check the arguments of `short_convolution`."""
    tensors = {"x": (x, "B T c"), "weight": (weight, "c n")}
    tensors |= {} if bias is None else {"bias": (bias, "c")}
    for name, (tensor, _) in tensors.items():
        check_tensor(name, tensor)
    sizes = check_sizes(**tensors)
    if activation not in ("silu", None):
        raise ArgumentError(f"activation is {activation!r}; it must be 'silu' or None")
    if sizes["n"] < 1:
        raise ArgumentError("weight has no column; a filter has at least the present token")
    if state is not None:
        if not isinstance(state, tuple) or len(state) != 1 or not isinstance(state[0], Tensor):
            raise ArgumentTypeError(
                f"state is {type(state).__name__}; it must be (past,), as an earlier call returned "
                "it, or None"
            )
        right = (sizes["B"], sizes["n"] - 1, sizes["c"])
        if tuple(state[0].shape) != right or state[0].device != x.device:
            raise ArgumentError(
                f"past is {tuple(state[0].shape)} on {state[0].device}; it must be {right} on "
                f"{x.device}: the tokens that the filters still reach"
            )
        tensors["past"] = (state[0], "")
    for name, (tensor, _) in tensors.items():
        if tensor.dtype != x.dtype:
            raise ArgumentTypeError(
                f"{name} is {tensor.dtype} and x is {x.dtype}; convert one with .to()"
            )
    if positions is not None:
        check_positions("positions", positions, sizes["B"], sizes["T"])
