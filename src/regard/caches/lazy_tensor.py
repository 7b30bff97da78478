"""Tensors whose values are computed from a stored form when an operation needs them."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch._C import _disabled_torch_function_impl
from torch.utils._pytree import tree_map_only


class LazyTensor(Tensor):
    """A tensor of known shape, dtype and device whose values are computed from a stored form.

    The first torch operation computes them, once; a kernel may read the stored form instead. A
    subclass makes instances with `Tensor._make_wrapper_subclass` and defines `compute_numbers`.
    """

    is_inexact: ClassVar[bool] = False
    """Whether the stored form has fewer digits than what was stored."""

    _numbers: Tensor | None = None

    # Operations are handled in __torch_dispatch__, below autograd, so that properties stay as fast
    # as those of any tensor.
    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @abstractmethod
    def compute_numbers(self) -> Tensor:
        """Compute the values from the stored form."""

    @property
    def is_stored(self) -> bool:
        """Whether the values have not been computed."""
        return self._numbers is None

    def numbers(self) -> Tensor:
        """Return the values as a plain tensor, the same one in each call."""
        if self._numbers is None:
            # Another thread may have stored its result first. That one stays, because it may have
            # been modified, or its address may be in use.
            self.__dict__.setdefault("_numbers", self.compute_numbers())
        numbers: Tensor = self.__dict__["_numbers"]
        return numbers

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run any torch operation on the values."""
        new_args, new_kwargs = tree_map_only(
            LazyTensor, lambda x: x.numbers(), (tuple(args), dict(kwargs or {}))
        )
        return func(*new_args, **new_kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.numbers().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.numbers().tolist()

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.numbers().data_ptr()

    def untyped_storage(self) -> Any:
        """Return the storage of the values."""
        return self.numbers().untyped_storage()

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return copy.deepcopy(self.numbers(), memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.numbers().__reduce_ex__(protocol)
