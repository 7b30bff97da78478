"""The recognized masks of dense tensors, which layers share, by storage and version."""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from regard.masks.recognition import RecognizedMask, recognize_mask

MAX_CACHED_MASKS = 32
"""The number of recognized tensors in the cache; a model has one or two kinds of mask per step."""


class RecognizedMaskCache:
    """A cache of recognized masks by storage and version."""

    def __init__(self, size: int = MAX_CACHED_MASKS) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[object, ...], tuple[StorageWeakRef, RecognizedMask]] = (
            OrderedDict()
        )
        self.misses = 0
        """The number of masks that were not in the cache."""

    def recognize(self, mask: Tensor, T: int, S: int) -> RecognizedMask:
        """Return `recognize_mask` of these arguments, computed once for an unchanged tensor."""
        if mask.is_inference():  # inference tensors have no version counter
            self.misses += 1
            return recognize_mask(mask, T, S)
        storage = mask.untyped_storage()
        key = (
            storage._cdata,
            mask.storage_offset(),
            mask._version,
            mask.dtype,
            tuple(mask.shape),
            mask.stride(),
            T,
            S,
        )
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None and not entry[0].expired():
            return entry[1]
        recognized = recognize_mask(mask, T, S)
        self.misses += 1
        with self._lock:
            self._entries[key] = (StorageWeakRef(storage), recognized)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return recognized
