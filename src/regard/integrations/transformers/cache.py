"""A cache for transformers' models whose memory is allocated ahead: a step writes its own tokens
and copies no others.
"""

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


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one layer, in buffers with room behind the last slot; what is given out
    are views of them.

    Args:
        window: how many keys a query may see, its own included; None is all. Older ones are
            forgotten when the buffer is
            full: the last window - 1 tokens go to the front of a new one, once in at least as many
                steps.
        max_length: slots to allocate at once. None: room doubles when it is used up.
        spare: slots that are allocated beyond what is needed, at least.

    Raises:
        ArgumentError: max_length or window below 1; more than max_length tokens; a crop that needs
            forgotten tokens.

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
        self._seen = 0
        self._since = 0  # tokens that a crop may take back

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first update allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys [B,G,n,D] and values [B,G,n,E]; return views of all that the new queries may
        see.
        """
        n = key_states.shape[2]
        length, _ = self.get_mask_sizes(n)
        slots = self._room(n)
        (keys, values), _ = slots.update((key_states, value_states), Span(self._seen, n))
        self._seen += n
        self._since = self._since + n if self.record_past else 0
        start = keys.shape[2] - length
        self.keys, self.values = keys[:, :, start:], values[:, :, start:]
        self.is_initialized = True
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys an update with so many tokens gives out, and the position of the first."""
        old = self._seen if self.window is None else min(self._seen, self.window - 1)
        return old + query_length, self._seen - old

    def get_seq_length(self) -> int:
        """How many tokens were seen."""
        return self._seen

    def get_max_length(self) -> int:
        """The most tokens; -1 without a bound."""
        return -1 if self.max_length is None else self.max_length

    def reset(self) -> None:
        """Forget everything."""
        self._slots, self._seen, self._since = None, 0, 0
        self.keys = self.values = None
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """From now on a windowed layer forgets nothing that came after the last crop, so that it
        can be taken back.
        """
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; their number is given negative, as transformers does."""
        n, self._since = -tokens_to_remove, 0
        if n < 0:
            raise ArgumentError(
                f"crop({tokens_to_remove}): give the number of tokens to take back as a negative "
                "one"
            )
        if n == 0 or self._slots is None:
            return
        left = max(0, self._seen - n)
        needed = left if self.window is None else min(left, self.window - 1)
        held = len(self._slots) - (self._seen - left)
        if held < needed:
            raise ArgumentError(
                f"crop({tokens_to_remove}) needs {needed} tokens in front, and {max(held, 0)} are "
                "held; call "
                "activate_past_recording() before the tokens that are to be taken back"
            )
        self._slots.crop(left)
        self._seen = left
        self._show()

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Row i becomes what row beam_idx[i] was."""
        if self._slots is not None and not _same(beam_idx):
            self._slots.select(beam_idx)
            self._show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        if self._slots is not None and self._slots.batch is not None:
            self._slots.select(torch.arange(self._slots.batch).repeat_interleave(repeats))
            self._show()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows: their numbers, or a bool for each."""
        if self._slots is not None and self._slots.batch is not None:
            self._slots.select(torch.arange(self._slots.batch, device=indices.device)[indices])
            self._show()

    def _room(self, n: int) -> Fixed:
        """Slots with room for n more: the same ones, or new ones with what is still needed."""
        old = self._slots
        held = 0 if old is None else len(old)
        if old is not None and held + n <= old.capacity:
            return old
        kept = held if self.window is None else min(held, self.window - 1 + self._since)
        slots = Fixed(self._size(kept, n))
        if old is not None and kept:
            found = old.contents()
            memory = {k: x[:, :, held - kept :] for k, x in found.items() if isinstance(x, Tensor)}
            slots.fill({**memory, "positions": Span(self._seen - kept, kept)})
        self._slots = slots
        return slots

    def _size(self, kept: int, n: int) -> int:
        """How many slots to allocate for n new tokens behind those that are kept."""
        size = kept + n + max(kept, self.spare)
        if self.max_length is None:
            return size
        if self.window is not None:
            return min(size, max(self.max_length, kept + n))
        if kept + n > self.max_length:
            raise ArgumentError(
                f"the cache was made for max_length={self.max_length} tokens, and {kept + n} "
                "come; make a longer one, "
                "or give no max_length"
            )
        return self.max_length

    def _show(self) -> None:
        """The views that other code may look at: what the next token will see."""
        assert self._slots is not None
        shown = min(len(self._slots), self.get_mask_sizes(0)[0])
        found = [x for x in self._slots.contents().values() if isinstance(x, Tensor)]
        self.keys, self.values = (x[:, :, x.shape[2] - shown :] for x in found)


class PreallocatedCache(DynamicCache):
    """`past_key_values` of a transformers model, under any attention implementation: a
    `PreallocatedLayer` for each layer.

    Layers that are no plain or windowed attention (recurrences, indexers) keep transformers' own
    cache.

    Args:
        config: the model's: it says which layers have windows.
        max_length: tokens to allocate room for at once, a prompt and what follows. None: room
            doubles when it is used up.

    Raises:
        ArgumentError: max_length below 1.

    >>> from transformers import LlamaConfig
    >>> cache = PreallocatedCache(LlamaConfig(num_hidden_layers=2), max_length=64)
    >>> len(cache), cache.get_max_length(), cache.get_seq_length()
    (2, 64, 0)
    """

    def __init__(self, config: PretrainedConfig, max_length: int | None = None) -> None:
        super().__init__(config=config)
        self.layers = [_preallocated(layer, max_length) for layer in self.layers]


def _preallocated(layer: Any, max_length: int | None) -> Any:
    if type(layer) is DynamicLayer:
        return PreallocatedLayer(None, max_length)
    if type(layer) is DynamicSlidingWindowLayer:
        return PreallocatedLayer(layer.sliding_window, max_length)
    return layer


def _same(rows: Tensor) -> bool:
    """Every row stays where it is; not asked off the CPU, where the answer is waited for."""
    return rows.device.type == "cpu" and rows.tolist() == list(range(len(rows)))
