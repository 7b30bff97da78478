"""Which keys and values the decoding kernel reads as a cache stores them; no triton is imported."""

from __future__ import annotations

from typing import TypeAlias

from regard.ops.softmax.call import Call
from regard.ops.softmax.triton.block_sizes import MAX_HEAD_DIM
from regard.ops.stored_slots import (
    CodedMemory,
    Float8Memory,
    PagedSlots,
    coded_memory,
    float8_memory,
    paged_memory,
)
from regard.units import plural

StoredForm: TypeAlias = CodedMemory | Float8Memory | tuple[PagedSlots, PagedSlots]
"""Codes with the slots behind them, 8-bit floats, or the pages of keys and values."""


def stored_form(call: Call) -> StoredForm | None:
    """Return the codes, 8-bit numbers or pages of a call, or None for plain tensors."""
    coded = coded_memory(call.k, call.v)
    if coded is not None:
        fits = max(call.D, call.E) <= MAX_HEAD_DIM and coded.keys.bits == coded.values.bits
        return coded if coded.slots and fits else None
    float8 = float8_memory(call.k, call.v)
    if float8 is not None:
        return float8
    return paged_memory(call.k, call.v)


def describe_stored_form(call: Call) -> str:
    """Return how the decoding kernel reads the keys and values; "" for plain tensors."""
    stored = stored_form(call)
    if stored is None:
        return ""
    if isinstance(stored, CodedMemory):
        recent = plural(call.S - stored.slots, "recent slot")
        return (
            f"it reads {plural(stored.slots, 'slot')} of keys and values as codes of "
            f"{stored.keys.bits} bits, and {recent} in full precision"
        )
    if isinstance(stored, Float8Memory):
        return f"it reads keys and values as {stored.keys.format}, and widens them in registers"
    size = stored[0].pages.shape[1]
    return f"it reads keys and values in pages of {plural(size, 'slot')}, and gathers none"
