"""`DecodeStep`: one decoded token through a whole model in one compiled call.

Between matrix products a model of small operations computes long in Python. Here the weights are
packed once as the structs of `csrc/arguments.h`, by the names of their fields; a step sets the
fields that change and calls the entry of `csrc/step.cpp` once. `regard.models.compiled_step`
decides where, and has checked everything.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from regard.ops.cpu import arguments, threads
from regard.ops.cpu.arguments import MAX_RUNS, struct_layout
from regard.ops.cpu.attention import quantized_numbers, split_count
from regard.ops.cpu.library import entry
from regard.ops.stored_weights import StoredWeight

if TYPE_CHECKING:
    from regard.caches.quantization import QuantizedAndRecent

ACTIVATIONS = ("silu", "gelu_tanh", "relu", "clipped_silu", "gelu", "relu_squared")
"""The activations of networks, in the order of their numbers."""

NORM_KINDS = ("none", "rms", "layer", "scale")
"""The kinds of norms, in the order of their numbers; "scale" is a factor in the place of a norm."""

PHASES = 6
"""The largest number of phases of a layer that have counters; attention has its own."""

Fields: TypeAlias = Mapping[str, Any]
"""Values of the fields of a struct by name: numbers, tensors, records of stored weights (for a
`StoredMatrix`), Fields of a struct inside; what is None, or not there, is 0.
"""

Indices: TypeAlias = int | slice | Sequence[int]


class Records:
    """Structs of `arguments.h` in memory, whose fields are set by name.

    >>> records = Records("Step", 2)
    >>> records.put(1, {"R": 3, "norm": {"eps": 0.5}})
    >>> records.columns["norm_eps"].tolist(), records.columns["R"].tolist()
    ([0.0, 0.5], [0, 3])
    """

    def __init__(self, name: str, count: int) -> None:
        self._layout = struct_layout(name)
        dtype = self._layout.dtype
        self.packed = array("q", bytes(dtype.itemsize * count))
        memory = np.frombuffer(self.packed, dtype)
        self.columns = {x: memory[x] for x in dtype.names or ()}
        self._size = dtype.itemsize

    def address(self, i: int = 0) -> int:
        """Return the address of a struct."""
        return self.packed.buffer_info()[0] + i * self._size

    def put_numbers(self, i: int, name: str, numbers: Sequence[int]) -> None:
        """Set a field of several integers of one struct."""
        first = i * self._size // 8 + self._layout.place(name)
        self.packed[first : first + len(numbers)] = array("q", numbers)

    def put(self, where: Indices, fields: Fields, prefix: str = "") -> None:
        """Set some fields of one struct, or of several; the caller keeps tensors alive.

        Of a tensor these are the address, and its shape or strides if there are fields for them.
        """
        columns = self.columns
        for short, value in fields.items():
            name = prefix + short
            if isinstance(value, Tensor):
                if (steps := columns.get(f"{name}_steps")) is not None:
                    columns[name][where] = arguments.row_address(value, value.dtype)
                    steps[where] = value.stride()[: steps.shape[1]]
                    continue
                columns[name][where] = arguments.address(value, value.dtype)
                if (shape := columns.get(f"{name}_shape")) is not None:
                    shape[where] = (*(1,) * (4 - value.ndim), *value.shape)
            elif isinstance(value, Mapping):
                self.put(where, value, f"{name}_")
            elif isinstance(value, StoredWeight):
                matrix = value.matrix_struct
                assert matrix is not None
                columns[name][where] = matrix.buffer_info()[0]
            elif value is not None:
                columns[name][where] = value


class StepLayer(NamedTuple):
    """One layer: the fields of `StepLayer`, those of its experts, and the numbers of its mask and
    its rotary among those of the model; None: no rotation.
    """

    fields: Fields
    experts: Sequence[Fields]
    mask: int
    rotary: int | None


class DecodeStep:
    """The packed structs and the scratch memory of a model; one thread at a time runs it.

    Args:
        fields: `norm`, `scale` and `head_map` of the struct `Step`.
        layers: the layers.
        dtype: the dtype of the weights.
        M, V: the model dim, and the number of logits.

    The structs hold addresses of the weights, which the fields keep alive.
    """

    def __init__(
        self, fields: Fields, layers: Sequence[StepLayer], dtype: torch.dtype, M: int, V: int
    ) -> None:
        self._owned, self._dtype, self._M, self._V = (fields, layers), dtype, M, V
        self._layers = Records("StepLayer", len(layers))
        self._experts = Records("StepNetwork", sum(len(x.experts) for x in layers))
        self._step = Records("Step", 1)
        self._step.put(0, {**fields, "L": len(layers), "M": M, "V": V})
        columns, first, self._units, self._width = self._layers.columns, 0, 0, M
        for i, layer in enumerate(layers):
            self._layers.put(i, layer.fields)
            for j, expert in enumerate(layer.experts, first):
                self._experts.put(j, expert)
            columns["mixture_experts"][i] = self._experts.address(first)
            first += len(layer.experts)
            own = layer.experts[0]["F"] if layer.experts else columns["network_F"][i]
            shared, k = columns["mixture_shared_F"][i], columns["mixture_k"][i]
            self._units = max(self._units, int(max(1, k) * own + shared))
            self._width = max(self._width, int(own), int(shared))
        # for each layer: heads, groups, the sizes of keys and values
        self._sizes = np.stack([columns[x] for x in ("q_n", "k_n", "k_size", "v_size")], 1)
        self._width = max(self._width, int((columns["q_n"] * columns["v_size"]).max()))
        self._rows = self._room = self._splits = 0
        self._memory: list[Tensor] = []
        self._used: list[object] = []
        self.set(slice(None), _CONSTANTS)

    def set(self, layers: Indices, fields: Fields) -> None:
        """Set fields of some layers, whose tensors live until the end of the next run."""
        self._used.append(fields)
        self._layers.put(layers, fields)

    def set_codes(self, layer: int, parts: Sequence[QuantizedAndRecent]) -> None:
        """Set where keys and values of a layer are that are stored as codes."""
        for name, x in zip(("k", "v"), parts, strict=True):
            groups = x.groups
            numbers = quantized_numbers(groups.codes, groups.scale, groups.zero, x.bits)
            self._layers.put_numbers(layer, f"codes_{name}", numbers)

    def run(self, x: Tensor) -> Tensor:
        """Compute the logits of the embedded tokens `[B, 1, M]`, and write their keys and values
        to the caches.
        """
        B, workers = x.shape[0], threads.thread_count()
        self._prepare_memory(B)
        logits = arguments.empty(B, 1, self._V, dtype=self._dtype)
        self._counters.zero_()
        for name in ("attention_taken", "attention_done", "codes_taken", "codes_done"):
            self._layers.columns[name].fill(0)
        now = {"taken": 0, "runs": min(workers, MAX_RUNS), "embedded": x, "logits": logits}
        self._step.put(0, now)
        threads.run_entry(entry("step", self._dtype), self._step.packed, workers)
        self._used.clear()
        return logits

    def _prepare_memory(self, B: int) -> None:
        """Allocate the memory for a number of rows, if there is less, and divide the keys into
        splits, exactly as `regard.ops.cpu.attention` does.
        """
        columns = self._layers.columns
        lengths = {kind: columns[f"{kind}_S"].tolist() for kind in ("attention", "codes")}
        known = {S: split_count(S) for S in {*lengths["attention"], *lengths["codes"]}}
        if self._room < B or max(known.values()) > self._splits:
            self._allocate(max(B, self._room), max(*known.values(), self._splits))
        self._shape(B)
        for kind, counts in lengths.items():
            of_layers = [known[S] for S in counts]
            columns[f"{kind}_out_shape"][:, 1] = columns[f"{kind}_lse_shape"][:, 2] = of_layers

    def _shape(self, B: int) -> None:
        """Set the shapes of the memory for B rows, where they are others."""
        if self._rows == B:
            return
        H, G, D, E = self._sizes.T
        one, columns = np.ones_like(H), self._layers.columns
        for kind in ("attention", "codes"):
            for name, shape in (
                ("q", (B * one, G, H // G, D)),
                ("out", (B * G, one, H // G, E)),
                ("lse", (B * one, G, one, H // G)),
            ):
                columns[f"{kind}_{name}_shape"][:] = np.stack(shape, 1)
        self._step.put(0, {"R": B})
        self._rows = B

    def _allocate(self, B: int, splits: int) -> None:
        """Allocate the memory for at most B rows, whose keys are in so many splits."""
        H, G, D, E = self._sizes.T
        columns, L = self._layers.columns, len(H)
        experts, k = int(columns["mixture_n"].max()), int(columns["mixture_k"].max())
        flat = columns["q_flat_kind"] + columns["k_flat_kind"] > 0
        raw_width = int(((H + G) * D * flat).max())

        def numbers(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            self._memory.append(arguments.empty(*shape, dtype=dtype))
            return self._memory[-1]

        fp32, self._memory = torch.float32, []
        states = {name: numbers(B, self._M) for name in ("x", "x_mid", "y")}
        self._counters = numbers(PHASES * L + 1, 2 + MAX_RUNS, dtype=torch.int64)
        more = {
            "hidden": numbers(B, self._units),
            "raw": numbers(B, raw_width),
            "router_logits": numbers(B, experts + 1, dtype=fp32),
            "shares": numbers(B, k, dtype=fp32),
            "parts": numbers(B * (k + 1), self._M),
            "counters": self._counters,
        }
        sizes = {"width": self._width, "head": int(max(D.max(), E.max())), "flat": raw_width}
        self._step.put(0, {**states, **more, **sizes, "layers": self._layers.address()})
        for i in range(L):
            self._layers.put(i, {"mixture_routing": numbers(3 * B * k + 2, dtype=torch.int64)})
        q = numbers(B, int((H * D).max()), dtype=fp32)
        for kind in ("attention", "codes"):
            out = numbers(B, splits, int((H * E).max()), dtype=fp32)
            lse = numbers(B, splits, int(H.max()), dtype=fp32)
            self._layers.put(slice(None), {kind: {"q": q, "out": out, "lse": lse}})
        self._room, self._splits, self._rows = B, splits, 0


_CONSTANTS = {
    name: {"T": 1, "visible": arguments.NO_VISIBLE, "bias": arguments.NO_BIAS}
    for name in ("attention", "codes")
}
"""What the calls of attention of all layers have in common."""
