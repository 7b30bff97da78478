"""A preallocated cache for transformers' models: a step copies no old tokens."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from regard.caches import Fixed
from regard.errors import ArgumentError
from regard.span import Span
from regard.units import plural


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one layer, in buffers with free space behind the last slot.

    Updates return views of the buffers.

    Args:
        window: the number of keys that a query sees, its own included; None means all. When the
            buffer is full, older keys are dropped: the last window - 1 tokens are copied to the
            front of a new buffer. Unless `max_length` is short, this happens at most once in
            window - 1 steps.
        max_length: the number of slots to allocate at once. None doubles the buffer when it is
            full.
        spare: the minimum number of slots to allocate beyond those that are needed.

    Raises:
        ArgumentError: max_length or window is below 1; more than max_length tokens are added; or a
            crop needs tokens that were dropped.

    >>> layer = PreallocatedLayer()
    >>> keys, _ = layer.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2))
    >>> more, _ = layer.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    >>> more.shape, more.data_ptr() == keys.data_ptr()
    (torch.Size([1, 1, 4, 2]), True)
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self, window: int | None = None, max_length: int | None = None, spare: int = 256
    ) -> None:
        for name, size in (("window", window), ("max_length", max_length)):
            if size is not None and size < 1:
                raise ArgumentError(f"{name} is {size}; it must be at least 1, or None")
        super().__init__()  # type: ignore[no-untyped-call]
        self.window, self.max_length, self.spare = window, max_length, spare
        self.is_sliding = window is not None
        self.record_past = False
        self._slots: Fixed | None = None
        self._length = 0
        self._tokens_since_crop = 0  # kept beyond the window, so that a crop can remove them

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first update allocates the buffers."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values, and return views of all that the new queries may see.

        Args:
            key_states: the new keys, [B, G, n, D].
            value_states: the new values, [B, G, n, E].

        Returns:
            The visible keys and values, [B, G, S, D] and [B, G, S, E].
        """
        n = key_states.shape[2]
        length, _ = self.get_mask_sizes(n)
        slots = self._ensure_capacity(n)
        (keys, values), _ = slots.update((key_states, value_states), Span(self._length, n))
        self._length += n
        self._tokens_since_crop = self._tokens_since_crop + n if self.record_past else 0
        start = keys.shape[2] - length
        self.keys, self.values = keys[:, :, start:], values[:, :, start:]
        self.is_initialized = True
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that an update with `query_length` tokens returns, and the
        position of the first.
        """
        old = self._length if self.window is None else min(self._length, self.window - 1)
        return old + query_length, self._length - old

    def get_seq_length(self) -> int:
        """Return how many tokens were added."""
        return self._length

    def get_max_length(self) -> int:
        """Return the maximum number of tokens, or -1 if there is none."""
        return -1 if self.max_length is None else self.max_length

    def reset(self) -> None:
        """Remove all tokens and free the buffers."""
        self._slots, self._length, self._tokens_since_crop = None, 0, 0
        self.keys = self.values = None
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """From now on keep every token that is added after the last crop, so that a crop can remove
        it.
        """
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: minus the number of tokens, as transformers gives it.

        Raises:
            ArgumentError: the number is positive, or the window before the remaining tokens was
                dropped.
        """
        n, self._tokens_since_crop = -tokens_to_remove, 0
        if n < 0:
            raise ArgumentError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative "
                "number"
            )
        if n == 0 or self._slots is None:
            return
        remaining = max(0, self._length - n)
        needed = remaining if self.window is None else min(remaining, self.window - 1)
        available = len(self._slots) - (self._length - remaining)
        if available < needed:
            raise ArgumentError(
                f"crop({tokens_to_remove}) needs {plural(needed, 'token')} before the remaining "
                f"ones, but has {max(available, 0)}; call activate_past_recording() before adding "
                "tokens that may be removed"
            )
        self._slots.crop(remaining)
        self._length = remaining
        self._update_views()

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Replace row i by row beam_idx[i], for every i."""
        if self._slots is not None and not _is_identity(beam_idx):
            self._slots.select(beam_idx)
            self._update_views()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch.

        Args:
            repeats: how many copies of each row to make.
        """
        if self._slots is not None and self._slots.batch is not None:
            self._slots.select(
                torch.arange(self._slots.batch, device="cpu").repeat_interleave(repeats)
            )
            self._update_views()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows of the batch.

        Args:
            indices: the numbers of the rows, or a bool for each row.
        """
        if self._slots is not None and self._slots.batch is not None:
            self._slots.select(torch.arange(self._slots.batch, device=indices.device)[indices])
            self._update_views()

    def _ensure_capacity(self, n: int) -> Fixed:
        """Return buffers with space for n more tokens: the present ones, or larger copies."""
        old_slots = self._slots
        old_length = 0 if old_slots is None else len(old_slots)
        if old_slots is not None and old_length + n <= old_slots.capacity:
            return old_slots
        remaining = (
            old_length
            if self.window is None
            else min(old_length, self.window - 1 + self._tokens_since_crop)
        )
        slots = Fixed(self._size(remaining, n))
        if old_slots is not None and remaining:
            old_tensors = old_slots.contents()
            memory = {
                k: x[:, :, old_length - remaining :]
                for k, x in old_tensors.items()
                if isinstance(x, Tensor)
            }
            slots.fill({**memory, "positions": Span(self._length - remaining, remaining)})
        self._slots = slots
        return slots

    def _size(self, remaining: int, n: int) -> int:
        """Return the number of slots for the remaining tokens, n new ones, and free space."""
        size = remaining + n + max(remaining, self.spare)
        if self.max_length is None:
            return size
        if self.window is not None:
            return min(size, max(self.max_length, remaining + n))
        if remaining + n > self.max_length:
            raise ArgumentError(
                f"the cache has max_length={self.max_length}, but needs "
                f"{plural(remaining + n, 'token')}; "
                "make a cache with a larger max_length, or give no max_length"
            )
        return self.max_length

    def _update_views(self) -> None:
        """Set `keys` and `values` to views of what the next token will see."""
        assert self._slots is not None
        visible_length = min(len(self._slots), self.get_mask_sizes(0)[0])
        tensors = [x for x in self._slots.contents().values() if isinstance(x, Tensor)]
        self.keys, self.values = (x[:, :, x.shape[2] - visible_length :] for x in tensors)


class PreallocatedCache(DynamicCache):
    """`past_key_values` of a transformers model, with a `PreallocatedLayer` for each layer.

    It works with any attention implementation. Layers that are not plain or windowed attention
    (recurrences, indexers) keep transformers' own cache.

    Args:
        config: the configuration of the model, which says which layers have windows.
        max_length: the number of tokens to allocate at once, for the prompt and what follows. None
            doubles the buffers when they are full.

    Raises:
        ArgumentError: max_length is below 1.

    >>> from transformers import LlamaConfig
    >>> cache = PreallocatedCache(LlamaConfig(num_hidden_layers=2), max_length=64)
    >>> len(cache), cache.get_max_length(), cache.get_seq_length()
    (2, 64, 0)
    """

    def __init__(self, config: PretrainedConfig, max_length: int | None = None) -> None:
        super().__init__(config=config)
        self.layers = [_preallocated(layer, max_length) for layer in self.layers]


def _preallocated(layer: object, max_length: int | None) -> Any:
    """Return the preallocated layer for a layer of transformers, or else that layer."""
    if type(layer) is DynamicLayer:
        return PreallocatedLayer(None, max_length)
    if type(layer) is DynamicSlidingWindowLayer:
        return PreallocatedLayer(layer.sliding_window, max_length)
    return layer


def _is_identity(rows: Tensor) -> bool:
    """Whether every row stays in place; False off the CPU, where reading rows would wait."""
    return rows.device.type == "cpu" and rows.tolist() == list(range(len(rows)))
