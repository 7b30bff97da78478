"""Biases supplied by the caller: `DenseBias` (a tensor) and `FnBias` (a function of positions)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.biases.base import ALL_SLOTS, Bias
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Positions, slot_count


@dataclass(frozen=True, eq=False, repr=False)
class DenseBias(Bias):
    """A bias given by a tensor: bias_ij = tensor[..., i, j].

    i and j are indices of the query and the key in the call, not positions.

    Args:
        tensor: a float tensor `[T, S]` or `[B or 1, H or 1, T or 1, S]`, not of three dimensions.

    Raises:
        ArgumentError: the tensor is not 2-D or 4-D; in a call, the shape does not fit.
        ArgumentTypeError: `tensor` is not a float tensor.

    >>> from regard.span import Span
    >>> DenseBias(torch.arange(6.0).view(2, 3)).block(Span(0, 2), Span(0, 3), slice(1, 2)).tolist()
    [[[[3.0, 4.0, 5.0]]]]
    """

    kind: ClassVar[str] = "dense"

    tensor: Tensor

    def __post_init__(self) -> None:
        check_tensor("bias", self.tensor)
        if self.tensor.ndim not in (2, 4):
            raise ArgumentError(
                f"bias has {self.tensor.ndim} dimensions, {tuple(self.tensor.shape)}; it must be "
                "[T, S] or [B or 1, H or 1, T or 1, S]: index with [:, None] if it is [B, T, S], "
                "with [None] if it is [H, T, S]"
            )

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
        """Return the rows and columns of the tensor."""
        x = self.tensor if self.tensor.ndim == 4 else self.tensor[None, None]
        if x.shape[2] == 1:
            x = x.expand(-1, -1, slot_count(q_positions), -1)
        return x[:, :, rows, columns].to(device=device, dtype=dtype)

    @property
    def by_slot(self) -> bool:
        """True, because columns of the tensor are indices of keys in the call."""
        return True

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the shape of the tensor fits the call."""
        shape = tuple(self.tensor.shape)
        if self.tensor.ndim == 2:
            fits = shape == (T, S)
        else:
            b, h, t, s = shape
            fits = b in (1, B) and h in (1, H) and t in (1, T) and s == S
        if not fits:
            raise ArgumentError(
                f"bias is {shape}; for this call it must be ({T}, {S}) or ({B} or 1, {H} or 1, {T} "
                f"or 1, {S})"
            )

    def __str__(self) -> str:
        return f"dense({'x'.join(map(str, self.tensor.shape))})"


@dataclass(frozen=True, eq=False, repr=False)
class FnBias(Bias):
    """A bias given by a function of positions: bias_ij = fn(q, k, *parameters).

    Args:
        fn: a function of the positions q `[B or 1, 1, t, 1]` and k `[B or 1, 1, 1, s]` and of the
            parameters to a 4-D float tensor that broadcasts to `[B, H, t, s]`, pair by pair.
        parameters: tensors that are passed to `fn` and that receive gradients.

    Raises:
        ArgumentTypeError: an argument or the result has a wrong type.
        ArgumentError: the result has another shape.

    >>> from regard.span import Span
    >>> bias = FnBias(lambda q, k, w: w * (q - k), (torch.tensor(-0.5),))
    >>> bias.block(Span(2, 1), Span(0, 3)).tolist()
    [[[[-1.0, -0.5, -0.0]]]]
    """

    kind: ClassVar[str] = "fn"

    fn: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ArgumentTypeError(
                f"fn is {type(self.fn).__name__}; it must be a function fn(q, k, ...)"
            )
        for i, x in enumerate(self.parameters):
            if not isinstance(x, Tensor):
                raise ArgumentTypeError(
                    f"parameters[{i}] is {type(x).__name__}; it must be a tensor"
                )
        object.__setattr__(self, "parameters", tuple(self.parameters))

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Call the function and check its result."""
        x = self.fn(q, k, *self.parameters)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentTypeError(f"{self} returned {got}; it must return a float tensor")
        if x.ndim != 4 or x.shape[2] not in (1, q.shape[2]) or x.shape[3] not in (1, k.shape[3]):
            raise ArgumentError(
                f"{self} returned {tuple(x.shape)} for positions {tuple(q.shape)} and "
                f"{tuple(k.shape)}; it must return [B or 1, H or 1, t or 1, s or 1]"
            )
        return x.to(dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the parameters of the function."""
        return self.parameters

    def with_tensors(self, tensors: Sequence[Tensor]) -> FnBias:
        """Return the same function with other parameters."""
        self._check_count(tensors, len(self.parameters))
        return replace(self, parameters=tuple(tensors))

    def __str__(self) -> str:
        return f"fn({getattr(self.fn, '__name__', type(self.fn).__name__)})"
