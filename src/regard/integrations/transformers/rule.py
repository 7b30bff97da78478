"""A mask of regard's that travels through a transformers model in the place of a dense one.

transformers makes a mask once a forward pass and hands it from module to module as a tensor. `MaskRule` is such a tensor:
it has the shape, dtype and device of the dense bool mask [B,1,T,S], but a single element of memory, and carries the rule.
Whatever a model does with it on the way is done with the dense mask instead, so that nothing can go wrong silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.masks import Mask
from regard.span import Span

_SHAPE = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
    ),
    *(
        getattr(Tensor, name)
        for name in ("size", "stride", "storage_offset", "dim", "numel", "is_floating_point")
    ),
    Tensor.get_device,
    Tensor.__len__,
}
"""What is asked about a mask without looking at its values."""

_SAME = {Tensor.detach, Tensor.contiguous, Tensor.clone, Tensor.bool}
"""What gives the same mask again."""


class MaskRule(Tensor):
    """The dense bool mask [B,1,T,S] of a rule at the positions of a call, True = may attend, not yet made.

    rule: the mask; q_positions, k_positions: where the queries and the keys stand.

    An operation on it makes the dense mask and works on that. Adding it to scores is refused: a model that does so has
    its own attention, for which True would be a number.

    >>> from regard.masks import Causal
    >>> mask = MaskRule.make(Causal(), Span(0, 2), Span(0, 2))
    >>> mask.shape, mask
    (torch.Size([1, 1, 2, 2]), MaskRule(causal))
    >>> mask[0, 0].int().tolist()
    [[1, 0], [1, 1]]
    """

    rule: Mask
    q_positions: Span
    k_positions: Span

    @classmethod
    def make(
        cls,
        rule: Mask,
        q_positions: Span,
        k_positions: Span,
        batch: int = 1,
        device: torch.device | str = "cpu",
    ) -> MaskRule:
        """The mask of a batch.

        Raises:
            ArgumentError: the rule does not fit the shape.
        """
        shape = (batch, 1, len(q_positions), len(k_positions))
        rule.require(*shape)
        one = torch.zeros((), dtype=torch.bool, device=device)
        mask = one.expand(shape).as_subclass(cls)
        mask.rule, mask.q_positions, mask.k_positions = rule, q_positions, k_positions
        return mask

    def dense(self) -> Tensor:
        """The dense mask, bool [B,1,T,S]."""
        found = self.rule.block(self.q_positions, self.k_positions, device=self.device)
        return found.expand(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MaskRule({self.rule})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SAME and len(args) == 1:
            return args[0]
        if func is Tensor.to:
            return _moved(*args, **kwargs)
        if getattr(func, "__name__", "") in ("add", "add_"):
            raise ArgumentError(  # of a TypeError Python would make its own
                "the model adds its mask to the scores itself: it does not take its attention from "
                'transformers\' AttentionInterface; use model.set_attn_implementation("eager")'
            )
        return func(*_dense(args), **_dense(kwargs))


def _moved(mask: MaskRule, *args: Any, **kwargs: Any) -> Tensor:
    """mask.to(...): the rule on another device."""
    one = torch.zeros((), dtype=torch.bool, device=mask.device).to(*args, **kwargs)
    if one.is_floating_point():
        raise ArgumentError(
            f"a mask of True and False is wanted as {one.dtype}, as if it could be added to scores; "
            'use model.set_attn_implementation("eager")'
        )
    if one.dtype != torch.bool:
        return mask.dense().to(*args, **kwargs)
    where = mask.q_positions, mask.k_positions
    return MaskRule.make(mask.rule, *where, mask.shape[0], one.device)


def _dense(x: Any) -> Any:
    """x with every rule in it made dense."""
    if isinstance(x, MaskRule):
        return x.dense()
    if isinstance(x, (list, tuple)):
        return type(x)(_dense(item) for item in x)
    if isinstance(x, Mapping):
        return {name: _dense(item) for name, item in x.items()}
    return x
