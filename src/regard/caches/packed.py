"""Memory in codes that looks like a tensor of numbers: who can read codes does, and for all others it opens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.caches.codes import Axis, Codes, check_codes, dequantise


class Coded(NamedTuple):
    """What a kernel that reads codes needs: older slots in codes, and behind them the recent ones [B,n,l,d] as they came."""

    made: Codes
    axis: Axis
    bits: int
    recent: Tensor


class Packed(Tensor):
    """A tensor [B,n,S,d] of which the older slots are codes still.

    Shape, dtype and device are those of the numbers. Any operation of torch makes the numbers first, once; from then on it
    is they that are read and written, and `coded` is None. A kernel that reads codes asks for `coded` instead.

    >>> from regard.caches.codes import quantise
    >>> x = torch.randn(1, 2, 8, 4)
    >>> made = quantise(x, torch.ones(1, 8, dtype=torch.bool), "channel", bits=8, group=8)
    >>> packed = Packed.of(Coded(made, "channel", 8, x[:, :, :1]))
    >>> packed.shape, packed.coded is None
    (torch.Size([1, 2, 9, 4]), False)
    >>> type(packed * 1).__name__, packed.coded is None
    ('Tensor', True)
    """

    _coded: Coded
    _numbers: Tensor | None = None

    # operations arrive at __torch_dispatch__, below autograd; properties cost what they cost on any tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, coded: Coded) -> Packed:
        """The tensor that these codes, and the recent slots behind them, are.

        Raises:
            ArgumentError: their sizes, dtypes or devices do not go together; a kernel reads codes by their address.
        """
        recent = coded.recent
        B, n, length, d = recent.shape
        codes, group = coded.made.codes, coded.made.codes.shape[-1] * 8 // coded.bits
        older = codes.shape[2] * (group if coded.axis == "channel" else 1)
        check_codes(coded.made, recent, coded.axis, older, bits=coded.bits, group=group)
        made = Tensor._make_wrapper_subclass(
            cls, (B, n, older + length, d), dtype=recent.dtype, device=recent.device
        )
        made._coded = coded
        return made

    @property
    def coded(self) -> Coded | None:
        """The codes, unless the numbers have been made, or there are some that codes do not hold."""
        codes_say_all = self._numbers is None and not self._coded.made.odd.shape[1]
        return self._coded if codes_say_all else None

    def numbers(self) -> Tensor:
        """The numbers as a plain tensor, always the same one."""
        if self._numbers is None:
            made, axis, bits, recent = self._coded
            older = (*recent.shape[:2], self.shape[2] - recent.shape[2], recent.shape[3])
            held = dequantise(made, axis, older, bits=bits)
            # Another thread may have made them meanwhile, and somebody may have written to those or know their address:
            # the first ones stay.
            self.__dict__.setdefault("_numbers", torch.cat([held, recent], dim=2))
        found: Tensor = self.__dict__["_numbers"]
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Any operation: on the numbers."""
        opened = tree_map_only(Packed, Packed.numbers, (tuple(args), dict(kwargs or {})))
        return func(*opened[0], **opened[1])

    def numpy(self, *, force: bool = False) -> Any:
        """The numbers as an array."""
        return self.numbers().numpy(force=force)

    def tolist(self) -> Any:
        """The numbers as lists."""
        return self.numbers().tolist()

    def data_ptr(self) -> int:
        """Where the numbers are."""
        return self.numbers().data_ptr()

    def untyped_storage(self) -> Any:
        """The memory of the numbers."""
        return self.numbers().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.numbers(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "codes" if self._numbers is None else "numbers"
        return f"Packed({tuple(self.shape)}, {self.dtype}, in {state})"
