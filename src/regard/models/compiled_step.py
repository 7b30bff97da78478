"""The compiled decoding step of a decoder: `try_step` computes one token per row by
`regard.ops.decode_step`, if the loops know its modules and nothing observes or changes what they
compute; otherwise it returns None. A plan holds for a decoder and a thread until something in the
decoder changes.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from regard.argument_checks import finite_checks_enabled
from regard.caches import Cache
from regard.caches.base import OpenSlot
from regard.caches.quantization import CodedSlots
from regard.models.step_reader import ModelReader, Unsupported
from regard.nn.module_calls import classes_of, methods_of
from regard.nn.weights.stored import StoredWeightMixin
from regard.ops.cpu.decode import is_readable
from regard.ops.decode_step import (
    DecodeStep,
    KeyPlace,
    RotaryTables,
    SameObjects,
    StepInputs,
    StepLayer,
)
from regard.ops.jit import has_numba, launch
from regard.ops.softmax.cpu import causal_positions, visible_ranges
from regard.ops.softmax.dispatch import KERNELS, all_kernels
from regard.positions import Rotary
from regard.process_state import is_compiling, is_transformed
from regard.sequence_scope import current_scope
from regard.span import Positions, Span, concat_positions, slot_count
from regard.tracing import is_tracing
from regard.units import plural

if TYPE_CHECKING:
    from regard.models.decoder import Decoder


def try_step(
    decoder: Decoder, ids: Tensor, positions: Positions, caches: Sequence[Cache]
) -> Tensor | None:
    """Compute the logits of one token per row in one compiled call, and append to the caches."""
    if torch.is_grad_enabled() or _state_reasons():
        return None
    plan = _plan_of(decoder)
    if plan.reason is not None:
        return None
    opened = _open_slots(plan, positions, caches)
    return None if isinstance(opened, str) else plan.run(decoder, ids, positions, caches, opened)


def why_not(decoder: Decoder, caches: Sequence[Cache], rows: int = 1) -> list[str]:
    """Return the reasons why a decoder does not use the compiled step now."""
    reasons = _state_reasons()
    if torch.is_grad_enabled():
        reasons.append("gradients are recorded: use torch.no_grad() or torch.inference_mode()")
    plan = _plan_of(decoder)
    if plan.reason is not None:
        return [*reasons, plan.reason]
    opened = _open_slots(plan, caches[0].next(1) if caches else Span(0, 1), caches)
    if isinstance(opened, str):
        return [*reasons, opened]
    unfit = plan.why_not_rows(rows, opened)
    return [*reasons, *([] if unfit is None else [unfit])]


def _state_reasons() -> list[str]:
    """Return the reasons in the state of the process and this thread."""
    states = (
        (is_tracing(), "a trace is open"),
        (is_compiling(), "a graph is traced or compiled"),
        (torch.is_autocast_enabled("cpu"), "autocast is on"),
        (is_transformed(), "a transform of torch.func is active"),
        (torch._C._len_torch_dispatch_stack() > 0, "a dispatch mode of torch is active"),
        (_in_function_mode(), "a function mode of torch is active"),
        (current_scope() is not None, "attention runs over several ranks"),
        (finite_checks_enabled(), "regard.checks(finite=True) looks at every input"),
        (len(all_kernels()) != len(KERNELS), "another attention kernel is registered"),
        (not has_numba(), "Numba is not installed: pip install numba"),
    )
    return [reason for holds, reason in states if holds]


def _in_function_mode() -> bool:
    """Return whether a mode sees or changes torch's functions; a default device changes only where
    a tensor is made without a device.
    """
    return torch._C._len_torch_function_stack() > 0 and any(
        type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()
    )


def _open_slots(plan: _Plan, positions: Positions, caches: Sequence[Cache]) -> list[OpenSlot] | str:
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
    return opened if len(opened) == len(plan.layers) else "there is not one cache for each layer"


def _same_place(one: OpenSlot, other: OpenSlot) -> bool:
    """Return whether two caches hold the same positions, and get the new token in the same slot."""
    if one.slot != other.slot or not _same_tensor(one.after, other.after):
        return False
    if _coded_slots(one) != _coded_slots(other) or not _same_tensor(one.slots, other.slots):
        return False
    if one.after is not None:
        return True
    a, b = one.positions, other.positions
    if isinstance(a, Span) or isinstance(b, Span):
        return isinstance(a, Span) and isinstance(b, Span) and a == b
    return a is b or torch.equal(a, b)


def _same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors hold the same numbers, or both are None."""
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _coded_slots(opened: OpenSlot) -> int:
    """Return the number of slots that a cache holds as codes."""
    return 0 if opened.coded is None else opened.coded.slots


def _places(opened: Sequence[OpenSlot], new: Positions) -> tuple[list[Positions], list[int]]:
    """Return the different positions of keys with new tokens, and each cache's index."""
    different: list[OpenSlot] = []
    place_of: list[int] = []
    for slot in opened:
        known = (i for i, other in enumerate(different) if _same_place(slot, other))
        i = next(known, len(different))
        if i == len(different):
            different.append(slot)
        place_of.append(i)
    joined = [concat_positions(x.positions, new) if x.after is None else x.after for x in different]
    return joined, place_of


def _key_place(opened: OpenSlot, positions: Positions, B: int) -> KeyPlace:
    """Return the place of keys at these positions, the new token's slot included, for B rows."""
    slots = opened.slots
    if slots is None:
        slots = launch.full((B,), opened.slot, dtype=torch.int64)
    coded = _coded_slots(opened)
    S = slot_count(positions) - coded
    if isinstance(positions, Span):
        start = positions.start
        return KeyPlace(
            slots, S, launch.NO_POSITIONS, start + coded, coded, launch.NO_POSITIONS, start
        )
    positions = positions.long().contiguous()
    own = positions[:, coded:].contiguous()
    return KeyPlace(slots, S, own, 0, coded, positions, 0)


class _Plans(threading.local):
    """The plans of one thread: the scratch memory of a plan serves one call at a time."""

    def __init__(self) -> None:
        self.by_decoder: WeakKeyDictionary[Decoder, _Plan] = WeakKeyDictionary()


_plans = _Plans()


def _plan_of(decoder: Decoder) -> _Plan:
    """Return the plan of a decoder in this thread, made anew if the decoder has changed."""
    plan = _plans.by_decoder.get(decoder)
    if plan is None or not plan.guards.hold(decoder):
        plan = _plans.by_decoder[decoder] = _Plan(decoder)
    return plan


class _Plan:
    """How a decoder runs in the compiled step, or the reason why it does not."""

    def __init__(self, decoder: Decoder) -> None:
        self.guards = _Guards(decoder)
        self.reason: str | None = None
        self.layers: tuple[StepLayer, ...] = ()
        self._checked = SameObjects()
        try:
            reader = ModelReader(decoder)
        except Unsupported as reason:
            self.reason = str(reason)
            return
        self.layers, self.masks, self.rotaries = reader.layers, reader.masks, reader.rotaries
        self.dtype, self.width, self.cap = reader.dtype, reader.width, reader.cap
        self.max_rows = reader.max_rows
        self.step = DecodeStep(reader.model)

    def run(
        self,
        decoder: Decoder,
        ids: Tensor,
        positions: Positions,
        caches: Sequence[Cache],
        opened: list[OpenSlot],
    ) -> Tensor | None:
        """Run the step, or return None if the sizes of the call do not suit it."""
        if self.why_not_rows(ids.shape[0], opened) is not None:
            return None
        ranges = [visible_ranges(mask, positions) for mask in self.masks]
        if None in ranges:
            return None
        x: Tensor = decoder.embed(ids, positions)
        fits = type(x) is Tensor and x.dtype == self.dtype and x.shape[2] == self.width
        if not (fits and x.is_cpu):
            return None
        x = x.contiguous()
        joined, place_of = _places(opened, positions)
        places = [_key_place(opened[place_of.index(i)], p, len(x)) for i, p in enumerate(joined)]
        tables = [_tables(rotary, x, positions) for rotary in self.rotaries]
        logits = self.step.run(
            StepInputs(
                x,
                [slot.buffers for slot in opened],  # type: ignore[misc]
                places,
                tuple(place_of),
                [slot.coded for slot in opened],
                [None if x.pages is None else (x.pages, x.page_size) for x in opened],
                causal_positions(positions)[0],
                ranges,  # type: ignore[arg-type]
                tables,
            )
        )
        for cache, slot, i in zip(caches, opened, place_of, strict=True):
            cache.close_slot(slot, joined[i])
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def why_not_rows(self, B: int, opened: list[OpenSlot]) -> str | None:
        """Return why the step does not suit a batch of B rows in these caches, or None."""
        if not 0 < B <= self.max_rows:
            return (
                f"{plural(B, 'row')} of {self.dtype}: torch's products of matrices are faster for "
                f"more than {self.max_rows}"
            )
        buffers = [x for slot in opened for x in slot.buffers]
        codes = [slot.coded for slot in opened if slot.coded is not None]
        if self._checked.are([*buffers, *codes]):
            return None if buffers[0].shape[0] == B else "the caches have other rows"
        for layer, slot in zip(self.layers, opened, strict=True):
            if not _fits(layer, slot, B, self.dtype):
                return f"a cache holds other parts than keys and values of {self.dtype}"
        self._checked.remember([*buffers, *codes])
        return None


def _fits(layer: StepLayer, slot: OpenSlot, B: int, dtype: torch.dtype) -> bool:
    """Return whether the buffers of a cache are keys and values of a layer."""
    sizes = (layer.D, layer.E)
    if slot.coded is not None and not _codes_fit(layer, slot.coded, B, dtype):
        return False
    return len(slot.buffers) == 2 and all(
        x.shape[:2] == (B, layer.G)
        and x.shape[2] > slot.slot
        and x.shape[3] == size
        and x.dtype == dtype
        and x.is_cpu
        and x.stride(3) == 1
        for x, size in zip(slot.buffers, sizes, strict=True)
    )


def _codes_fit(layer: StepLayer, coded: CodedSlots, B: int, dtype: torch.dtype) -> bool:
    """Return whether codes of a cache are keys and values of a layer that compiled code reads."""
    wanted = (("channel", layer.D), ("token", layer.E))
    return len(coded.parts) == 2 and all(
        x.axis == axis
        and x.recent.shape == (B, layer.G, 0, size)
        and x.groups.scale.dtype == dtype
        and x.groups.codes.is_cpu
        and is_readable(x)
        for x, (axis, size) in zip(coded.parts, wanted, strict=True)
    )


def _tables(rotary: Rotary, x: Tensor, positions: Positions) -> RotaryTables:
    """Return the cos and sin of the new tokens."""
    cos, sin = rotary.tables(x, positions)
    pairs = cos.shape[-1]
    return RotaryTables(
        cos.reshape(-1, pairs).contiguous(),
        sin.reshape(-1, pairs).contiguous(),
        rotary.layout == "interleaved",
    )


class _Guards:
    """What a plan relies on, recorded so that a change is found in a fraction of a millisecond:
    only what can change its result, by value (sizes, addresses) or by identity, as every look costs
    a read from memory.
    """

    def __init__(self, decoder: nn.Module) -> None:
        # not the decoder itself: its plan must not keep it alive
        self._modules = list(decoder.modules())[1:]
        everything = [decoder, *self._modules]
        self._dicts: list[Any] = [
            x for m in everything for x in (m.__dict__, m._forward_hooks, m._forward_pre_hooks)
        ]
        self._dicts += [m._modules for m in everything if isinstance(m, _LISTS)]
        classes = dict.fromkeys(x for m in everything for x in classes_of(m))
        self._dicts += map(vars, classes)
        parts = [x for m in everything for x in (m._modules, m._parameters, m._buffers) if x]
        self._values = [x.values() for x in parts]
        named: list[tuple[Any, list[str]]] = [(m.__dict__, _names(m)) for m in everything]
        named += [(vars(x), methods_of(x)) for x in classes]
        self._owners = [owner for owner, names in named if names]
        # itemgetter gives a tuple for two names or more
        self._getters = [itemgetter(*names, names[0]) for _, names in named if names]
        records = [m.stored_weight for m in everything if isinstance(m, StoredWeightMixin)]
        stored = [x for y in records for x in y.tensors().values()]
        members = [x for m in everything for y in (m._parameters, m._buffers) for x in y.values()]
        self._tensors: list[Tensor] = [*stored, *(x for x in members if x is not None)]
        self._known = self._fingerprint(decoder)
        self._objects = list(self._present())

    def hold(self, decoder: nn.Module) -> bool:
        """Return whether nothing has changed."""
        try:
            return self._fingerprint(decoder) == self._known and all(
                map(operator.is_, self._present(), self._objects)
            )
        except KeyError:  # an attribute in the place of another one
            return False

    def _present(self) -> Iterator[object]:
        """Return the objects of now: methods, parts, and attributes of modules."""
        attributes = map(operator.call, self._getters, self._owners)
        return chain.from_iterable(chain(self._values, attributes))

    def _fingerprint(self, decoder: nn.Module) -> tuple[object, ...]:
        """Return what is compared by value: sizes, classes, addresses, layouts, global hooks."""
        return (
            sum(map(len, self._dicts)),
            bool(torch_module._has_any_global_hook()),
            type(decoder),
            list(map(type, self._modules)),
            launch.places(self._tensors),
            list(map(Tensor.stride, self._tensors)),
            list(map(Tensor.numel, self._tensors)),
            list(map(_dtype, self._tensors)),
        )


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""The classes of modules whose computation depends on the number of their parts."""

_BOOKKEEPING = {*nn.Module().__dict__, "_last"} - {"training"}
_dtype = attrgetter("dtype")


def _names(module: nn.Module) -> list[str]:
    """Return a module's attributes; training matters only where something is dropped."""
    drops = "dropout" in module.__dict__ or "dropout" in module._modules
    ignored = _BOOKKEEPING if drops else _BOOKKEEPING | {"training"}
    return [x for x in module.__dict__ if x not in ignored]
