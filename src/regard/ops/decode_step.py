"""`DecodeStep`: one decoded token through a whole model in one compiled call.

Between matrix products a model of small operations computes long in Python. Here the weights are
packed once as C structs (`StepModel`); a step sets the fields that change and calls
`regard.ops.jit.step_loops` once. `regard.models.compiled_step` decides where, and has checked
everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from regard.ops.jit import launch, openmp
from regard.ops.jit.argument_structs import (
    DECODE_QUANTIZED_STRUCT,
    DECODE_STRUCT,
    EXTENDED_NORMS,
    MAP_PARTS,
    MAX_RUNS,
    STEP_EXTENSION_STRUCT,
    STEP_LAYER_STRUCT,
    STEP_MIXTURE_STRUCT,
    STEP_NETWORK_STRUCT,
    STEP_NORM_STRUCT,
    STEP_STRUCT,
    QuantizedField,
)
from regard.ops.jit.code_files import compiled_entry
from regard.ops.jit.decode import (
    ELEMENTS_PER_THREAD,
    quantized_numbers,
    split_count,
)
from regard.ops.jit.stored_matrix import matrix_struct
from regard.ops.stored_slots import QuantizedSlots
from regard.ops.stored_weights import StoredWeight

ACTIVATIONS = ("silu", "gelu_tanh", "relu", "clipped_silu", "gelu", "relu_squared")
"""The activations that the compiled step supports, in the order of their numbers."""

GATED_ACTIVATIONS = ACTIVATIONS[:4]
"""The activations of networks with a gate; networks without one have all but "clipped_silu"."""

NORM_KINDS = ("rms", "layer", "scale")
"""The kinds of norms, in the order of their numbers."""

PHASES = 6
"""The largest number of phases of a layer that have counters; attention has its own."""

COUNTER_WORDS = 2 + MAX_RUNS
"""The 8-byte integers between the counters of two phases, `step_loops.COUNTER_BYTES` / 8."""

Indices: TypeAlias = np.ndarray | slice

_step_entry = partial(compiled_entry, "step_loops", "entry_address")
_extended_entry = partial(compiled_entry, "step_extended_loops", "entry_address")
_attend_entry = partial(compiled_entry, "decode_loops", "entry_address")
_codes_entry = partial(compiled_entry, "decode_quantized_loops", "entry_address")


@dataclass(frozen=True, eq=False)
class StepMap:
    """A linear map W x + b of the compiled step.

    `weight` is `[N, M]`, contiguous, or a record with a `matrix_struct`; bias `[N]` or None.
    """

    weight: Tensor | StoredWeight
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StepNorm:
    """A norm of the compiled step, or a factor in its place.

    "rms": x / sqrt(mean(x^2) + eps) * (weight + offset)
    "layer": (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (weight + offset) + bias
    "scale": x * offset

    `weight` and `bias` are `[M]`, contiguous, or None; a missing weight of "layer" is 1.
    """

    weight: Tensor | None
    eps: float
    offset: float
    bias: Tensor | None = None
    kind: str = "rms"


@dataclass(frozen=True, eq=False)
class StepNetwork:
    """A feed-forward network of the compiled step, down (f(gate x) * up x), or down f(up x).

    `gate` may be None; `limit` and `alpha` are those of `regard.nn.ClippedSwiGLU`.
    """

    gate: StepMap | None
    up: StepMap
    down: StepMap
    activation: str
    limit: float = 0.0
    alpha: float = 0.0


@dataclass(frozen=True, eq=False)
class StepMixture:
    """A mixture of experts of the compiled step, as `regard.nn.MoE` defines it.

    Args:
        router, shared_gate: the maps to the logits of experts, and of the shared weight.
        sigmoid: whether scores are sigmoids of the logits; otherwise a softmax.
        correction: `[n]`, added to the scores for the choice, in fp32 or the weights' dtype.
        groups: the number of groups, how many a token may use, and how many scores count.
    """

    router: StepMap
    experts: tuple[StepNetwork, ...]
    k: int
    sigmoid: bool
    normalize: bool
    scale: float
    correction: Tensor | None = None
    groups: tuple[int, int, int] = (0, 0, 0)
    shared: StepNetwork | None = None
    shared_gate: StepMap | None = None

    @property
    def networks(self) -> tuple[StepNetwork, ...]:
        """All networks; the one for all tokens is the last."""
        return self.experts if self.shared is None else (*self.experts, self.shared)


class HeadBlocks(NamedTuple):
    """Where the heads of queries, keys or values are in a matrix: head i is block
    first + i // run * step + i % run of its rows, of which each block is one head.
    """

    first: int
    run: int
    step: int


@dataclass(frozen=True, eq=False)
class StepLayer:
    """One layer of the compiled step: attention, and a feed-forward layer after it or beside it.

    Args:
        q, k, v, out, network and norms: the parts, None where there is no norm.
        softcap, clip: the bounds on scores, and on queries, keys and values; 0: none.
        rotary, mask: the numbers of tables in `StepInputs.tables` and `StepInputs.ranges`.
        sink, slopes: the logits of sinks and the fp32 slopes of ALiBi, `[H]`, or None.
        q_flat, k_flat: the norm over all heads of queries and of keys; None: no norm.
        blocks: the places of the heads of q, k and v, if they share a matrix; or None.
        parallel: whether the feed-forward layer reads the states before the attention.
    """

    H: int
    G: int
    D: int
    E: int
    q: StepMap
    k: StepMap
    v: StepMap
    out: StepMap
    network: StepNetwork | StepMixture
    before: StepNorm | None
    after: StepNorm | None
    ff_before: StepNorm | None
    ff_after: StepNorm | None
    q_norm: StepNorm | None
    k_norm: StepNorm | None
    scale: float
    softcap: float
    rotary: int | None
    mask: int
    sink: Tensor | None = None
    slopes: Tensor | None = None
    symmetric: bool = False
    q_flat: StepNorm | None = None
    k_flat: StepNorm | None = None
    blocks: tuple[HeadBlocks, HeadBlocks, HeadBlocks] | None = None
    clip: float = 0.0
    parallel: bool = False


@dataclass(frozen=True, eq=False)
class StepModel:
    """A model of the compiled step: its layers, the norm after them, and the head.

    The `logit_scale` is the factor on the hidden states before the head.
    """

    layers: tuple[StepLayer, ...]
    norm: StepNorm | None
    head: StepMap
    logit_scale: float = 1.0


class RotaryTables(NamedTuple):
    """Cos and sin of the angles of the new tokens, each `[B or 1, n]` in the dtype of the weights.

    Pair i of `interleaved` tables are the dims 2i and 2i + 1, otherwise i and i + n.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


class KeyPlace(NamedTuple):
    """Where the keys of some layers are, and where the new tokens go.

    Args:
        slots: the slot that the new token of each row takes, int64 `[B]`.
        S: the number of slots, from 0 on, that hold keys.
        k_positions, origin: the positions of these slots `[B or 1, S]`, or `[1, 0]` and the
            position of slot 0 where they are contiguous.
        coded, coded_positions, coded_origin: the same of the slots that are stored as codes.
    """

    slots: Tensor
    S: int
    k_positions: Tensor
    origin: int
    coded: int
    coded_positions: Tensor
    coded_origin: int


class StepCodes(Protocol):
    """Protocol of the slots of a layer that are stored as codes."""

    @property
    def parts(self) -> Sequence[QuantizedSlots]:
        """The codes of keys and of values, which compiled code can read where they are."""


class StepInputs(NamedTuple):
    """What changes from one step to the next.

    Args:
        x: the embedded tokens `[B, 1, M]`, contiguous.
        buffers, place_of: for each layer keys `[B, G, c, D]` and values, contiguous in the last
            dimension, and the index of its place in `places`.
        codes: for each layer the slots that are stored as codes, or None.
        pages: for each layer the pages `[B, n]` of its rows and their size, or None.
        q_positions: the positions of the new tokens `[B or 1, 1]`.
        ranges: for each mask the starts and stops of visible ranges, int64 `[b, h, 1, n]`.
        tables: for each different rotary its tables.
    """

    x: Tensor
    buffers: Sequence[tuple[Tensor, Tensor]]
    places: Sequence[KeyPlace]
    place_of: tuple[int, ...]
    codes: Sequence[StepCodes | None]
    pages: Sequence[tuple[Tensor, int] | None]
    q_positions: Tensor
    ranges: Sequence[tuple[Tensor, Tensor]]
    tables: Sequence[RotaryTables]


class SameObjects:
    """Remembers objects without keeping them alive, to find out whether others are the same.

    >>> known, x = SameObjects(), torch.ones(2)
    >>> known.remember([x])
    >>> known.are([x]), known.are([x.clone()])
    (True, False)
    """

    def __init__(self) -> None:
        self._known: list[ReferenceType[Any]] = []

    def remember(self, objects: Sequence[object]) -> None:
        """Remember these objects instead of the last ones."""
        self._known = list(map(ref, objects))

    def are(self, objects: Sequence[object]) -> bool:
        """Return whether these are the remembered objects, in the same order."""
        return len(objects) == len(self._known) and all(
            known() is x for known, x in zip(self._known, objects, strict=True)
        )


class DecodeStep:
    """The packed structs and the scratch memory of a model. One thread at a time may use it.

    The structs hold addresses of the weights, which must stay where they are.
    """

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.dtype = model.head.weight.dtype
        self._layers = np.zeros(len(model.layers), STEP_LAYER_STRUCT.dtype)
        networks = [layer.network for layer in model.layers]
        self._networks = _Networks(self._layers, networks, self.dtype)
        self._extensions = _Extensions(model) if _is_extended(model) else None
        self._attention = np.zeros(len(model.layers), DECODE_STRUCT.dtype)
        self._codes = np.zeros(len(model.layers), DECODE_QUANTIZED_STRUCT.dtype)
        for i, layer in enumerate(model.layers):
            _pack_layer(self._layers[i], layer, self.dtype)
            _set_pages(self._attention[i], None)
            for record in (self._attention[i], self._codes[i]):
                record["T"], record["scale"], record["softcap"] = 1, layer.scale, layer.softcap
        widths = (model.head.weight.shape[1], self._networks.width)
        self._width = max(*widths, *(layer.H * layer.E for layer in model.layers))
        self._head = max(max(layer.D, layer.E) for layer in model.layers)
        self._counters = np.zeros((PHASES * len(model.layers) + 1, COUNTER_WORDS), np.int64)
        self._by_mask = _numbers_by_value([layer.mask for layer in model.layers])
        self._place_of: tuple[int, ...] = ()
        self._by_place: list[tuple[int, Indices]] = []
        self._by_rotary = _numbers_by_value([layer.rotary for layer in model.layers])
        self._head_numbers = (
            *_norm_numbers(model.norm, self.dtype),
            *_map_numbers(model.head, self.dtype),
        )
        self._scratch: tuple[Tensor, ...] = ()
        self._scratch_addresses: tuple[int, ...] = ()
        self._rows = self._splits = 0
        self._buffers, self._last_codes = SameObjects(), SameObjects()
        self._last_pages = SameObjects()

    def run(self, inputs: StepInputs) -> Tensor:
        """Compute the logits of the new tokens, and write their keys and values to the buffers."""
        B, model = inputs.x.shape[0], self.model
        workers = openmp.thread_count()
        self._prepare_memory(B, workers)
        self._set_buffers(inputs)
        self._set_places(inputs)
        self._set_splits(B, workers)
        self._set_positions(inputs)
        logits = launch.empty(B, 1, model.head.weight.shape[0], dtype=self.dtype)
        self._counters.fill(0)
        for calls in (self._attention, self._codes):
            calls["taken"] = calls["done"] = 0
        extensions = self._extensions
        step_entry = _step_entry if extensions is None else _extended_entry
        has_codes = any(x is not None for x in inputs.codes)
        record = STEP_STRUCT.pack_numbers(
            B,
            len(model.layers),
            inputs.x.shape[2],
            logits.shape[2],
            self._layers.ctypes.data,
            _attend_entry(self.dtype),
            self._attention.ctypes.data,
            _codes_entry(self.dtype) if has_codes else 0,
            self._codes.ctypes.data,
            self._width,
            self._head,
            self._counters.ctypes.data,
            min(workers, MAX_RUNS),
            launch.address(inputs.x, self.dtype),
            *self._scratch_addresses,
            launch.address(logits, self.dtype),
            *self._head_numbers,
            *(_NOT_EXTENDED if extensions is None else extensions.numbers),
        )
        has_mixtures = self._networks.logits > 0
        openmp.run_entry(step_entry(self.dtype, has_mixtures), record, workers)
        return logits

    def _prepare_memory(self, B: int, workers: int) -> None:
        """Allocate the scratch memory for a number of rows and threads, if that has changed."""
        layers = self.model.layers
        splits = max(-(-8 * workers // (B * layer.G)) for layer in layers) if workers > 1 else 1
        if self._rows == B and splits <= self._splits:
            return
        M = self.model.head.weight.shape[1]
        states = [launch.empty(B, M, dtype=self.dtype) for _ in range(3)]
        pairs = self._networks.prepare(B)
        if self._extensions is not None:
            self._extensions.prepare(B)
        hidden = launch.empty(B, self._networks.units, dtype=self.dtype)
        logits = launch.empty(B, self._networks.logits, dtype=torch.float32)
        shares = launch.empty(pairs, dtype=torch.float32)
        parts = launch.empty(pairs, M, dtype=self.dtype)
        q = launch.empty(B, max(layer.H * layer.D for layer in layers), dtype=torch.float32)
        # in the order of their fields in STEP_STRUCT
        named = *states, hidden, logits, shares, parts
        self._scratch_addresses = tuple(launch.address(x, x.dtype) for x in named)
        self._scratch = *named, q
        self._rows, self._splits = B, splits
        for calls in (self._attention, self._codes):
            sizes = (max(layer.H * layer.E for layer in layers), max(layer.H for layer in layers))
            out, lse = (launch.empty(B, splits, n, dtype=torch.float32) for n in sizes)
            self._scratch += out, lse
            for record, layer in zip(calls, layers, strict=True):
                for name, x in (("q", q), ("out", out), ("lse", lse)):
                    record[name] = launch.address(x, torch.float32)
                record["q_shape"] = B, layer.G, layer.H // layer.G, layer.D
                record["out_shape"] = 0
                record["symmetric"] = layer.symmetric
                slopes = launch.NO_SLOPES if layer.slopes is None else layer.slopes
                for name, x, dtype in (
                    ("visible", launch.NO_VISIBLE, torch.bool),
                    ("slopes", slopes, torch.float32),
                    ("bias", launch.NO_BIAS, torch.float32),
                ):
                    record[name], record[f"{name}_shape"] = launch.address(x, dtype), _shape_4d(x)

    def _set_buffers(self, inputs: StepInputs) -> None:
        """Set the addresses of the buffers and of the codes, if they changed."""
        codes = [_ABSENT if x is None else x for x in inputs.codes]
        if not self._last_codes.are(codes):
            for record, x in zip(self._codes, inputs.codes, strict=True):
                if x is not None:
                    _set_codes(record, x)
            self._last_codes.remember(codes)
        tensors = [x for pair in inputs.buffers for x in pair]
        if self._buffers.are(tensors):
            return
        for record, (k, v) in zip(self._attention, inputs.buffers, strict=True):
            for name, buffer in (("k", k), ("v", v)):
                record[name] = launch.row_address(buffer, self.dtype)
                record[f"{name}_steps"] = buffer.stride()[:3]
        self._buffers.remember(tensors)

    def _set_places(self, inputs: StepInputs) -> None:
        """Set where the keys of each layer are."""
        if inputs.place_of != self._place_of:
            self._place_of = inputs.place_of
            self._by_place = _numbers_by_value(inputs.place_of)
        records = self._attention
        pages = [_ABSENT if x is None else x[0] for x in inputs.pages]
        if not self._last_pages.are(pages):
            for record, own in zip(records, inputs.pages, strict=True):
                _set_pages(record, own)
            self._last_pages.remember(pages)
        for i, layers in self._by_place:
            place = inputs.places[i]
            records["S"][layers], records["origin"][layers] = place.S, place.origin
            self._layers["slots"][layers] = launch.address(place.slots, torch.int64)
            records["k_positions"][layers] = launch.address(place.k_positions, torch.int64)
            records["k_positions_shape"][layers] = _shape_4d(place.k_positions)
            codes, positions = self._codes, place.coded_positions
            codes["S"][layers], codes["origin"][layers] = place.coded, place.coded_origin
            codes["k_positions"][layers] = launch.address(positions, torch.int64)
            codes["k_positions_shape"][layers] = _shape_4d(positions)

    def _set_splits(self, B: int, workers: int) -> None:
        """Divide the keys into splits, exactly as `regard.ops.jit.decode` does."""
        several = zip(self._attention, self._codes, self.model.layers, strict=True)
        for record, layer in ((x, layer) for *both, layer in several for x in both):
            heads, S = B * layer.G, int(record["S"])
            work = heads * S * (layer.D + layer.E)
            used = min(workers, max(1, work // ELEMENTS_PER_THREAD))
            splits = split_count(heads, S, used) if used > 1 else 1
            if record["out_shape"][1] != splits or record["out_shape"][0] != heads:
                R = layer.H // layer.G
                record["out_shape"] = heads, splits, R, layer.E
                record["lse_shape"] = B, layer.G, splits, R

    def _set_positions(self, inputs: StepInputs) -> None:
        """Set the positions of the queries, the ranges that they see, and the rotations."""
        for records in (self._attention, self._codes):
            x = inputs.q_positions
            records["q_positions"] = launch.address(x, torch.int64)
            records["q_positions_shape"] = _shape_4d(x)
            for i, layers in self._by_mask:
                for name, x in zip(("starts", "stops"), inputs.ranges[i], strict=True):
                    records[name][layers] = launch.address(x, torch.int64)
                    records[f"{name}_shape"][layers] = _shape_4d(x)
        for i, layers in self._by_rotary:
            cos, sin, interleaved = inputs.tables[i]
            for name, number in (
                ("cos", launch.address(cos, self.dtype)),
                ("sin", launch.address(sin, self.dtype)),
                ("tables", cos.shape[0]),
                ("pairs", cos.shape[1]),
                ("interleaved", interleaved),
            ):
                self._layers[name][layers] = number


def _set_pages(record: np.void, pages: tuple[Tensor, int] | None) -> None:
    """Write the pages of a layer to a struct."""
    table, size = (launch.NO_POSITIONS, 1) if pages is None else pages
    record["pages"] = launch.address(table, torch.int64)
    record["pages_shape"] = _shape_4d(table)
    record["page_size"] = size


def _set_codes(record: np.void, codes: StepCodes) -> None:
    """Write the addresses and sizes of codes to a struct."""
    for name, x in zip(("k", "v"), codes.parts, strict=True):
        groups = x.groups
        numbers = iter(quantized_numbers(groups.codes, groups.scale, groups.zero, x.bits))
        for field, _, n in QuantizedField(name).parts:
            record[field] = next(numbers) if n == 1 else tuple(islice(numbers, n))


_ABSENT = launch.NO_POSITIONS
"""Stands for the codes or the pages that a layer does not have."""


def _numbers_by_value(values: Sequence[int | None]) -> list[tuple[int, Indices]]:
    """Return for each value except None its indices, or a slice if it stands everywhere."""
    known = sorted({x for x in values if x is not None})
    if len(known) == 1 and None not in values:
        return [(known[0], slice(None))]
    return [(x, np.array([i for i, y in enumerate(values) if y == x])) for x in known]


def _shape_4d(x: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, padded to four dimensions with leading ones."""
    return (*(1,) * (4 - x.ndim), *x.shape)


def _norm_numbers(norm: StepNorm | None, dtype: torch.dtype) -> tuple[int, float, float]:
    """Return the fields of an RMS norm; zeros for none and for other norms."""
    if norm is None or norm.kind != "rms" or norm.weight is None:
        return 0, 0.0, 0.0
    return launch.address(norm.weight, dtype), norm.eps, norm.offset


def _map_numbers(linear_map: StepMap, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the addresses of the weight, bias and struct of a linear map, or 0."""
    weight = linear_map.weight
    bias = _address_or_0(linear_map.bias, dtype)
    if isinstance(weight, Tensor):
        return launch.address(weight, dtype), bias, 0
    return 0, bias, matrix_struct(weight).buffer_info()[0]


def _address_or_0(x: Tensor | None, dtype: torch.dtype) -> int:
    """Return the address of a parameter, or 0 where there is none."""
    return 0 if x is None else launch.address(x, dtype)


class _Networks:
    """The packed structs of the feed-forward layers, to which the structs of the layers refer.

    Of the hidden units, `width` is the most of a network, `units` the most of a token; `logits` are
    those of experts and gate.
    """

    def __init__(
        self,
        layers: np.ndarray,
        networks: Sequence[StepNetwork | StepMixture],
        dtype: torch.dtype,
    ) -> None:
        mixtures = [x for x in networks if isinstance(x, StepMixture)]
        several = [x.networks if isinstance(x, StepMixture) else (x,) for x in networks]
        self.width = max(_hidden_units(x) for each in several for x in each)
        self.logits = max((len(x.experts) + 1 for x in mixtures), default=0)
        self.units, self._pairs = 0, max((x.k + 1 for x in mixtures), default=0)
        self._networks = np.zeros(sum(map(len, several)), STEP_NETWORK_STRUCT.dtype)
        self._mixtures = np.zeros(len(mixtures), STEP_MIXTURE_STRUCT.dtype)
        self._routing = np.zeros((0, 0), np.int64)
        first = i = 0
        for layer, network, own in zip(layers, networks, several, strict=True):
            place = _address(self._networks[first:])
            for record, x in zip(self._networks[first:], own, strict=False):
                _pack_network(record, x, dtype)
            units = _hidden_units(own[0])
            if isinstance(network, StepMixture):
                _pack_mixture(self._mixtures[i], network, place, dtype)
                layer["mixture"] = _address(self._mixtures[i:])
                units = network.k * units
                units += 0 if network.shared is None else _hidden_units(network.shared)
                i += 1
            else:
                layer["network"] = place
            self.units = max(self.units, units)
            first += len(own)

    def prepare(self, B: int) -> int:
        """Allocate memory for the choice of experts for B tokens; return the most results."""
        self._routing = np.zeros((len(self._mixtures), 3 * B * self._pairs + 2), np.int64)
        for record, x in zip(self._mixtures, self._routing, strict=True):
            record["routing"] = _address(x)
        return B * self._pairs


class _Extensions:
    """The packed structs of the parts that only `step_extended_loops` computes."""

    def __init__(self, model: StepModel) -> None:
        layers = model.layers
        norms = {x: _norms_of(x) for x in layers}
        self._norms = np.zeros(1 + sum(map(len, norms.values())), STEP_NORM_STRUCT.dtype)
        self._layers = np.zeros(len(layers), STEP_EXTENSION_STRUCT.dtype)
        self._dtype = model.head.weight.dtype
        self._raw = launch.empty(0, dtype=self._dtype)
        flat = [(x.H + x.G) * x.D for x in layers if x.q_flat is not None or x.k_flat is not None]
        self._width = max(flat, default=0)
        used = 0
        for record, layer in zip(self._layers, layers, strict=True):
            for name, norm in norms[layer].items():
                _pack_norm(self._norms[used], norm, self._dtype)
                record[name] = _address(self._norms[used:])
                used += 1
            record["parallel"], record["clip"] = layer.parallel, layer.clip
            own = tuple(HeadBlocks(0, n, n) for n in (layer.H, layer.G, layer.G))
            for name, block in zip("qkv", layer.blocks or own, strict=True):
                for part, number in block._asdict().items():
                    record[f"{name}_{part}"] = number
        last = 0
        if model.norm is not None:
            _pack_norm(self._norms[used], model.norm, self._dtype)
            last = _address(self._norms[used:])
        self._last, self._scale = last, model.logit_scale

    @property
    def numbers(self) -> tuple[float, ...]:
        """The last fields of STEP_STRUCT."""
        raw = launch.address(self._raw, self._dtype)
        return _address(self._layers), self._last, self._scale, raw, self._width

    def prepare(self, B: int) -> None:
        """Allocate the memory for queries and keys of B tokens before a norm over all heads."""
        self._raw = launch.empty(B, self._width, dtype=self._dtype)


_NOT_EXTENDED = (0, 0, 1.0, 0, 0)
"""The last fields of STEP_STRUCT for models that `step_loops` computes."""


def _norms_of(layer: StepLayer) -> dict[str, StepNorm]:
    """Return the norms that a layer has, by name."""
    norms = ((name, getattr(layer, name)) for name in EXTENDED_NORMS)
    return {name: norm for name, norm in norms if norm is not None}


def _is_extended(model: StepModel) -> bool:
    """Return whether a model has parts that only `step_extended_loops` computes."""
    norms = [x for layer in model.layers for x in _norms_of(layer).values()]
    norms += [] if model.norm is None else [model.norm]
    return (
        model.logit_scale != 1
        or any(x.kind != "rms" for x in norms)
        or any(
            x.parallel
            or x.clip
            or x.blocks is not None
            or not (x.q_flat is None and x.k_flat is None)
            or (isinstance(x.network, StepNetwork) and x.network.gate is None)
            for x in model.layers
        )
    )


def _pack_norm(record: np.void, norm: StepNorm, dtype: torch.dtype) -> None:
    """Write a norm of any kind to its struct."""
    record["kind"], record["eps"] = NORM_KINDS.index(norm.kind), norm.eps
    record["offset"] = norm.offset
    record["w"] = _address_or_0(norm.weight, dtype)
    record["b"] = _address_or_0(norm.bias, dtype)


def _address(x: np.ndarray) -> int:
    """Return the address of the first element of an array."""
    address: int = x.ctypes.data
    return address


def _hidden_units(network: StepNetwork) -> int:
    """Return the number of hidden units of a network."""
    return network.down.weight.shape[1]


def _pack_network(record: np.void, network: StepNetwork, dtype: torch.dtype) -> None:
    """Write a network to its struct."""
    record["F"] = _hidden_units(network)
    record["activation"] = ACTIVATIONS.index(network.activation)
    record["limit"], record["alpha"] = network.limit, network.alpha
    names = ("up", "down") if network.gate is None else ("gate", "up", "down")
    _pack_maps(record, network, names, dtype)


def _pack_mixture(record: np.void, mixture: StepMixture, networks: int, dtype: torch.dtype) -> None:
    """Write a mixture to its struct; its networks lie one after the other at an address."""
    record["n"], record["k"], record["networks"] = len(mixture.experts), mixture.k, networks
    record["sigmoid"], record["normalize"] = mixture.sigmoid, mixture.normalize
    record["scale"] = mixture.scale
    record["groups"], record["group_topk"], record["group_best"] = mixture.groups
    correction = mixture.correction
    if correction is not None:
        wide = correction.dtype == torch.float32
        record["wide_correction"] = wide
        record["correction"] = launch.address(correction, torch.float32 if wide else dtype)
    _pack_maps(record, mixture, ("router",), dtype)
    if mixture.shared is not None:
        record["shared"] = networks + len(mixture.experts) * STEP_NETWORK_STRUCT.dtype.itemsize
    if mixture.shared_gate is not None:
        record["gated"] = True
        _pack_maps(record, mixture, ("shared_gate",), dtype)


def _pack_maps(record: np.void, owner: object, names: Sequence[str], dtype: torch.dtype) -> None:
    """Write the linear maps of these names to a struct."""
    for name in names:
        numbers = _map_numbers(getattr(owner, name), dtype)
        for part, number in zip(MAP_PARTS, numbers, strict=True):
            record[f"{name}_{part}"] = number


def _pack_layer(record: np.void, layer: StepLayer, dtype: torch.dtype) -> None:
    """Write a layer to its struct, except for its feed-forward layer."""
    record["H"], record["G"], record["D"], record["E"] = layer.H, layer.G, layer.D, layer.E
    record["sink"] = _address_or_0(layer.sink, dtype)
    _pack_maps(record, layer, ("q", "k", "v", "out"), dtype)
    for name in ("before", "q_norm", "k_norm", "after", "ff_before", "ff_after"):
        numbers = _norm_numbers(getattr(layer, name), dtype)
        record[f"{name}_w"], record[f"{name}_eps"], record[f"{name}_offset"] = numbers
