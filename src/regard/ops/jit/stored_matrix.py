"""The struct of a stored matrix for the loops of this package, which `decode_step` still calls."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from regard.ops.jit.argument_structs import STORED_MATRIX_STRUCT
from regard.ops.jit.code_files import compiled_entry
from regard.ops.stored_weights import FORMS, StoredWeight

_STRUCTS: WeakKeyDictionary[StoredWeight, tuple[Any, Any]] = WeakKeyDictionary()


def matrix_struct(weight: StoredWeight) -> Any:
    """Return the STORED_MATRIX_STRUCT of a record, packed once for its layout."""
    new = weight.matrix_struct
    assert new is not None
    assert weight.layout is not None
    if weight not in _STRUCTS or _STRUCTS[weight][0] is not new:
        form = FORMS[new[2]]
        rows = compiled_entry("stored_weight_loops", "rows_address", form, weight.scale_dtype)
        _STRUCTS[weight] = new, STORED_MATRIX_STRUCT.pack_numbers(rows, *weight.layout[2:])
    return _STRUCTS[weight][1]
