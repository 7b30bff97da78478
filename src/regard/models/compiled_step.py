"""`PreparedDecoder`: a decoder that computes one token per row, or a few of one row, in one
compiled call, where `regard.ops.cpu.step` knows its modules and nothing observes or changes what
they compute.

Who owns a loop over tokens prepares the decoder at its beginning (`regard.models.generation`). The
modules are read once: a part that is replaced afterwards is used by the next preparation. Numbers
that change in place are used at once, and a new hook of any module makes it read the modules again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from regard.caches import Cache
from regard.caches.base import OpenSlot
from regard.models.step_reader import DecoderReader, Unsupported
from regard.ops.cpu import arguments
from regard.ops.cpu.attention import is_readable
from regard.ops.cpu.instruction_sets import why_none
from regard.ops.cpu.step import DecodeStep, Fields, Indices
from regard.ops.softmax.cpu import causal_positions, visible_ranges
from regard.ops.softmax.dispatch import KERNELS, all_kernels
from regard.process_state import finite_checks_enabled, is_compiling, is_transformed
from regard.sequence_scope import current_scope
from regard.span import Positions, Span, as_tensor, concat_positions, slot_count
from regard.tracing import is_tracing
from regard.units import plural

if TYPE_CHECKING:
    from regard.models.decoder import Decoder

MAX_TOKENS = 8
"""The most tokens of one row that are computed at once, as generation verifies proposed ones."""


class PreparedDecoder:
    """A decoder that is called as before, and computes single tokens, or the logits of a few tokens
    of one row, in one compiled call where it can.

    Args:
        decoder: the decoder.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._hooks = -1  # nothing is read before it is needed
        self._lock = threading.RLock()  # the structs serve one call at a time

    def __call__(
        self,
        ids: Tensor,
        positions: Positions | None = None,
        caches: Sequence[Cache] | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Compute the logits for the token after each given token, as the decoder does."""
        few = ids.ndim == 2 and (
            ids.shape[1] == 1 or (len(ids) == 1 and last is None and ids.shape[1] <= MAX_TOKENS)
        )
        if caches and few and not is_compiling():
            with self._lock:
                logits = self._try_step(ids, positions, caches)
            if logits is not None:
                return logits if ids.shape[1] == 1 else logits.transpose(0, 1)
        result: Tensor = self.decoder(ids, positions, caches, last=last)
        return result

    def why_not(self, caches: Sequence[Cache], rows: int = 1) -> list[str]:
        """Return the reasons why the decoder does not use the compiled step now."""
        with self._lock:
            if self._hooks != RemovableHandle.next_id:
                self._read()
            unfit = self._reason
            if unfit is None:
                opened = self._open_slots(caches[0].next(1) if caches else Span(0, 1), caches)
                unfit = opened if isinstance(opened, str) else self._why_not_memory(rows, 1, opened)
        return [*_state_reasons(), *([] if unfit is None else [unfit])]

    def _read(self) -> None:
        """Read the modules into structs, or note the reason why not."""
        self._hooks = RemovableHandle.next_id  # changes when a hook is registered at any module
        self._reason: str | None = None
        self._memory: list[ReferenceType[Any]] = []  # of the caches of the last step
        self._place_of: list[int] = []
        try:
            self._reader = reader = DecoderReader(self.decoder)
        except Unsupported as reason:
            self._reason = str(reason)
            return
        layers = reader.layers
        self._step = DecodeStep(reader.fields, layers, reader.dtype, reader.width, reader.V)
        self._sizes = [
            (x.fields["k"]["n"], x.fields["k"]["size"], x.fields["v"]["size"]) for x in layers
        ]
        self._of_mask = _indices([x.mask for x in layers])
        self._of_rotary = _indices([x.rotary for x in layers])

    def _try_step(
        self, ids: Tensor, positions: Positions | None, caches: Sequence[Cache]
    ) -> Tensor | None:
        """Compute the logits in one call, and append to the caches; None: the modules must."""
        if self._hooks != RemovableHandle.next_id:
            self._read()
        if self._reason is not None or _state_reasons():
            return None
        (B, T), reader, step = ids.shape, self._reader, self._step
        new = caches[0].next(T) if positions is None else positions
        opened = self._open_slots(new, caches)
        if isinstance(opened, str) or (T > 1 and not isinstance(new, Span)):
            return None
        # tokens of one row are computed like rows that share their memory, [T,1]
        rows = as_tensor(new)[0][:, None] if T > 1 else new
        ranges = [visible_ranges(mask, rows) for mask in reader.masks]
        if self._why_not_memory(B, T, opened) is not None or None in ranges:
            return None
        x: Tensor = self.decoder.embed(ids, new)
        fits = type(x) is Tensor and x.dtype == reader.dtype and x.shape[2] == reader.width
        if not (fits and x.is_cpu):
            return None
        self._set_memory(opened)
        joined = self._set_places(opened, new, B, T)
        now: Fields = {"q_positions": causal_positions(rows)[0]}
        step.set(slice(None), {"attention": now, "codes": now})
        for mask, layers in self._of_mask:
            now = dict(zip(("starts", "stops"), ranges[mask], strict=True))  # type: ignore[arg-type]
            step.set(layers, {"attention": now, "codes": now})
        for i, layers in self._of_rotary:
            rotary = reader.rotaries[i]
            cos, sin = (y.reshape(-1, y.shape[-1]).contiguous() for y in rotary.tables(x, new))
            n, pairs = cos.shape
            interleaved = rotary.layout == "interleaved"
            now = {"cos": cos, "sin": sin, "tables": n, "pairs": pairs}
            step.set(layers, {**now, "interleaved": interleaved})
        x = x.contiguous() if T == 1 else x.transpose(0, 1).contiguous()  # [B T,1,M]
        logits = step.run(x)
        for cache, slot, after in zip(caches, opened, joined, strict=True):
            cache.close_slot(slot, after)
        return logits if reader.cap is None else reader.cap * torch.tanh(logits / reader.cap)

    # ---- the caches

    def _open_slots(self, positions: Positions, caches: Sequence[Cache]) -> list[OpenSlot] | str:
        """Open one slot in each cache, or return the reason why that is not possible."""
        if isinstance(positions, Span):
            if not positions.all_tokens:
                return "the token has no position"
        elif not isinstance(positions, Tensor) or positions.ndim != 2 or not positions.is_cpu:
            return "the positions are not a tensor [B, 1] on a CPU"
        opened: list[OpenSlot] = []
        for i, cache in enumerate(caches):
            slot = cache.open_slot(positions)
            if slot is None:
                return f"the {type(cache).__name__} cache of layer {i} opens no slot for one token"
            opened.append(slot)
        if len(opened) != len(self._reader.layers):
            return "there is not one cache for each layer"
        return opened

    def _why_not_memory(self, B: int, T: int, opened: Sequence[OpenSlot]) -> str | None:
        """Return why the step does not suit T tokens of B rows in these caches, or None."""
        most, dtype = self._reader.max_rows, self._reader.dtype
        most = most if T == 1 else max(most, MAX_TOKENS)
        if not 0 < B * T <= most:
            return (
                f"{plural(B * T, 'row')} of {dtype}: torch's products of matrices are faster for "
                f"more than {most}"
            )
        memory = _memory(opened)
        if len(memory) == len(self._memory) and all(
            known() is x for known, x in zip(self._memory, memory, strict=True)
        ):
            return None if opened[0].buffers[0].shape[0] == B else "the caches have other rows"
        self._memory = []
        if all(_fits(x, slot, B, dtype) for x, slot in zip(self._sizes, opened, strict=True)):
            return None
        return f"a cache holds other parts than keys and values of {dtype}"

    def _set_memory(self, opened: Sequence[OpenSlot]) -> None:
        """Set where keys and values are, if that has changed."""
        if self._memory:
            return
        for i, slot in enumerate(opened):
            # with a distance of 0 between rows, the only row serves all of its new tokens
            alone = slot.pages is None and len(slot.buffers[0]) == 1
            buffers = [x.expand(2, -1, -1, -1) for x in slot.buffers] if alone else slot.buffers
            fields = dict(zip("kv", buffers, strict=True))
            pages, size = (
                (arguments.NO_POSITIONS, 1) if slot.pages is None else (slot.pages, slot.page_size)
            )
            self._step.set(i, {"attention": {**fields, "pages": pages, "page_size": size}})
            if slot.coded is not None:
                self._step.set_codes(i, slot.coded.parts)
        self._memory = list(map(ref, _memory(opened)))

    def _set_places(
        self, opened: Sequence[OpenSlot], new: Positions, B: int, T: int
    ) -> list[Positions]:
        """Set where the keys are and where the new ones go; return the positions with the new
        tokens, of each cache. Many caches have the same place.
        """
        different: list[tuple[object, ...]] = []
        place_of, firsts = [], []
        for slot in opened:
            place = _place(slot)
            known = (i for i, x in enumerate(different) if all(map(_same, place, x)))
            i = next(known, len(different))
            if i == len(different):
                different.append(place)
                firsts.append(slot)
            place_of.append(i)
        if place_of != self._place_of:
            self._place_of, self._of_place = place_of, _indices(place_of)
        joined = [
            concat_positions(x.positions, new) if x.after is None else x.after for x in firsts
        ]
        for i, layers in self._of_place:
            self._step.set(layers, _place_fields(firsts[i], joined[i], B, T))
        return [joined[i] for i in place_of]


def _state_reasons() -> list[str]:
    """Return the reasons in the state of the process and this thread."""
    states = (
        (torch.is_grad_enabled(), "gradients are recorded: use torch.inference_mode()"),
        (is_tracing(), "a trace is open"),
        (is_compiling(), "a graph is traced or compiled"),
        (torch.is_autocast_enabled("cpu"), "autocast is on"),
        (is_transformed(), "a transform of torch.func is active"),
        (torch._C._len_torch_dispatch_stack() > 0, "a dispatch mode of torch is active"),
        (_in_function_mode(), "a function mode of torch is active"),
        (current_scope() is not None, "attention runs over several ranks"),
        (finite_checks_enabled(), "regard.checks(finite=True) looks at every input"),
        (len(all_kernels()) != len(KERNELS), "another attention kernel is registered"),
        (why_none() is not None, str(why_none())),
    )
    return [reason for holds, reason in states if holds]


def _in_function_mode() -> bool:
    """Return whether a mode sees or changes torch's functions; a default device changes only where
    a tensor is made without a device.
    """
    return torch._C._len_torch_function_stack() > 0 and any(
        type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()
    )


def _indices(values: Sequence[int | None]) -> list[tuple[int, Indices]]:
    """Return for each value except None its indices, or a slice if it stands everywhere."""
    known = sorted({x for x in values if x is not None})
    if len(known) == 1 and None not in values:
        return [(known[0], slice(None))]
    return [(x, [i for i, y in enumerate(values) if y == x]) for x in known]


def _memory(opened: Sequence[OpenSlot]) -> list[object]:
    """Return the objects that hold the memory of caches."""
    return [
        arguments.NO_POSITIONS if x is None else x
        for slot in opened
        for x in (*slot.buffers, slot.coded, slot.pages)
    ]


def _place(slot: OpenSlot) -> tuple[object, ...]:
    """Return which positions a cache holds, and where the new token goes."""
    positions = slot.positions if slot.after is None else None
    coded = slot.coded and slot.coded.slots
    return slot.slot, coded, positions, slot.after, slot.slots


def _same(a: object, b: object) -> bool:
    """Return whether two numbers, spans or tensors are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    return type(a) is type(b) and a == b


def _place_fields(slot: OpenSlot, positions: Positions, B: int, T: int) -> Fields:
    """Return the fields of layers whose caches have these positions, the new token's included."""
    slots, coded = slot.slots, 0 if slot.coded is None else slot.coded.slots
    if slots is None and T == 1:
        slots = arguments.full((B,), slot.slot, dtype=torch.int64)
    elif slots is None:
        slots = arguments.arange(slot.slot, slot.slot + T)
    S = slot_count(positions) - coded
    start, own, others = 0, arguments.NO_POSITIONS, arguments.NO_POSITIONS
    if isinstance(positions, Span):
        start = positions.start
    else:
        others = positions.long().contiguous()
        own = others[:, coded:].contiguous()
    return {
        "slots": slots,
        "attention": {"S": S, "origin": start + coded, "k_positions": own},
        "codes": {"S": coded, "origin": start, "k_positions": others},
    }


def _fits(sizes: tuple[int, int, int], slot: OpenSlot, B: int, dtype: torch.dtype) -> bool:
    """Return whether a cache holds keys and values of a layer, where compiled code reads them.
    sizes: (the number of key/value heads, the sizes of keys and of values).
    """
    G, *dims = sizes
    coded = () if slot.coded is None else slot.coded.parts
    return (
        len(slot.buffers) == 2
        and all(
            x.shape[:2] == (B, G)
            and x.shape[2] > slot.slot
            and x.shape[3] == size
            and x.dtype == dtype
            and x.is_cpu
            and x.stride(3) == 1
            for x, size in zip(slot.buffers, dims, strict=True)
        )
        and len(coded) in (0, 2)
        and all(
            x.axis == axis
            and x.recent.shape == (B, G, 0, size)
            and x.groups.scale.dtype == dtype
            and x.groups.codes.is_cpu
            and is_readable(x)
            for x, axis, size in zip(coded, ("channel", "token"), dims, strict=False)
        )
    )
