"""C structs that carry the arguments of a call to compiled code.

A Numba dispatcher inspects the type of every array argument, which takes longer than a short call
itself. A compiled entry therefore takes a single argument: the address of a C struct of 8-byte
fields. Each struct is defined by one list of fields in this file: `StructLayout.pack` fills it, and
Numba reads it as the numpy dtype `StructLayout.dtype` (`entry_points.struct_at`).

Every struct begins with two counters that all threads of a call share: `taken` is the number of the
next task, which a thread takes when it has finished its last one, and `done` counts finished tasks.
Where tasks read a matrix, `MAX_RUNS` more counters follow (`entry_points.take_next`), and `taken`
counts the threads instead.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from regard.ops.jit import converts_float16
from regard.ops.jit.launch import address

PackedStruct: TypeAlias = array  # type: ignore[type-arg]  # array is not generic in Python 3.11
"""A struct in memory, as an array of 8-byte integers."""

MAX_RUNS = 14
"""The largest number of runs of neighbouring tasks, each of which has a counter of its own; with
`taken` and `done` these are two cache lines.
"""

_COUNTER_FIELDS = 2
_LEADING_ONES = tuple((1,) * (4 - n) for n in range(5))


class StructField:
    """One argument: its name, and the C fields that it takes ("q" is an int64, "d" a float64).

    Args:
        name: the name of the argument.
        *parts: for each C field its name, its kind "q" or "d", and how many numbers it has.
    """

    def __init__(self, name: str, *parts: tuple[str, str, int]) -> None:
        self.name, self.parts = name, parts

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class IntField(StructField):
    """An integer, a bool, or the address of contiguous memory; 0 where there is none."""

    def __init__(self, name: str) -> None:
        super().__init__(name, (name, "q", 1))


class FloatField(StructField):
    """A floating-point number, stored as a float64."""

    def __init__(self, name: str) -> None:
        super().__init__(name, (name, "d", 1))


class ArrayField(StructField):
    """A contiguous tensor of a dtype and of up to four dimensions: its address, and its shape as
    `<name>_shape`, padded to four dimensions with leading ones.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name, (name, "q", 1), (f"{name}_shape", "q", 4))
        self.dtype = dtype


class StridedField(StructField):
    """Keys or values `[B, G, S, d]` of any strides: the address, and the strides of B, G and S as
    `<name>_steps`; the last dimension is contiguous.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, (name, "q", 1), (f"{name}_steps", "q", 3))


class QuantizedField(StructField):
    """Keys or values that are stored as codes `[B, G, R, lines, bytes]` of a few bits.

    The C fields are the address of the codes and their strides of B, G, R and lines; the addresses
    of the scales and of the zeros `[B, G, R, lines, 1]` and their common strides; the number of
    codes in a line (`<name>_group`); and the number of bits of a code.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            (name, "q", 1),
            (f"{name}_steps", "q", 4),
            (f"{name}_scale", "q", 1),
            (f"{name}_zero", "q", 1),
            (f"{name}_scale_steps", "q", 4),
            (f"{name}_group", "q", 1),
            (f"{name}_bits", "q", 1),
        )


class StructLayout:
    """The layout of a C struct, defined by a list of fields; `dtype` is the same layout as a numpy
    structured dtype.

    Args:
        *fields: the arguments after the counters.
        has_runs: whether there are counters for runs of tasks.

    >>> layout = StructLayout(IntField("n"), FloatField("scale"), ArrayField("x", torch.float32))
    >>> layout.dtype.names
    ('taken', 'done', 'n', 'scale', 'x', 'x_shape')
    >>> list(layout.pack(n=7, scale=0.0, x=torch.zeros(2, 3)))[2:4], layout.dtype.fields["x"][1]
    ([7, 0], 32)
    """

    def __init__(self, *fields: StructField, has_runs: bool = False) -> None:
        runs = [StructField("taken_of_runs", ("taken_of_runs", "q", MAX_RUNS))] if has_runs else []
        self.fields = (IntField("taken"), IntField("done"), *runs, *fields)
        self._zeros = (0,) * (_COUNTER_FIELDS + MAX_RUNS * has_runs)
        parts = [part for field in self.fields for part in field.parts]
        self._struct = struct.Struct("=" + "".join(n * kind for _, kind, n in parts))
        self.dtype = np.dtype(
            [(name, kind) if n == 1 else (name, kind, (n,)) for name, kind, n in parts]
        )
        self._arguments: list[tuple[str, type, Any]] = [
            (x.name, type(x), getattr(x, "dtype", None)) for x in fields
        ]

    def pack(self, **arguments: float | Tensor | Sequence[int]) -> PackedStruct:
        """Return a struct in memory, with its counters at 0.

        Args:
            **arguments: the value of each field by name: a number for an `IntField` or a
                `FloatField`; a contiguous tensor for an `ArrayField`; a sequence of all numbers for
                a `StridedField` or a `QuantizedField`. The caller must keep the tensors alive as
                long as the struct is read.
        """
        numbers: list[Any] = [*self._zeros]
        for name, field_type, dtype in self._arguments:
            value: Any = arguments[name]
            if field_type is ArrayField:
                shape = value.shape
                numbers += (address(value, dtype), *_LEADING_ONES[len(shape)], *shape)
            elif field_type is IntField or field_type is FloatField:
                numbers.append(value)
            else:
                numbers += value
        return array("q", self._struct.pack(*numbers))

    def pack_numbers(self, *numbers: float) -> PackedStruct:
        """Return a struct whose fields are all numbers, given in the order of the fields.

        `pack` would take half a microsecond longer for its keyword arguments, which is a tenth of
        the time of a short call.
        """
        return array("q", self._struct.pack(*self._zeros, *numbers))


_DECODE_FIELDS = (
    IntField("T"),  # the number of queries; row r of q is query r % T of head g H/G + r // T
    IntField("origin"),  # the position of key 0, where the positions are contiguous
    FloatField("softcap"),  # 0: none
    IntField("symmetric"),  # whether ALiBi is symmetric
    FloatField("scale"),
    ArrayField("q", torch.float32),  # [B,G,R,D]
    ArrayField("out", torch.float32),  # [B G,P,R,E], an output: the result of each of P splits
    ArrayField("lse", torch.float32),  # [B,G,P,R], an output
    ArrayField("k_positions", torch.int64),  # [b,S], or [1,0] for positions from `origin` on
    ArrayField("starts", torch.int64),  # [b,h,t,n]: starts of the ranges that a query sees
    ArrayField("stops", torch.int64),  # [b,h,t,n]: one past the ends of these ranges
    ArrayField("visible", torch.bool),  # [b,h,t,S]: in place of ranges, which keys it sees, or [0]
    ArrayField("slopes", torch.float32),  # [H], the slopes of ALiBi, or empty
    ArrayField("bias", torch.float32),  # [b,h,t,S], any other bias, or empty
    ArrayField("q_positions", torch.int64),  # [b,T]
    IntField("S"),  # the number of keys
)
DECODE_STRUCT = StructLayout(
    *_DECODE_FIELDS,
    ArrayField("pages", torch.int64),  # [b,n], the pages of each row in order, or [1,0] without
    IntField("page_size"),  # the number of slots of a page
    StridedField("k"),
    StridedField("v"),
)
"""The arguments of decoding over keys and values in full precision, packed by `decode`. With pages,
slot s of row b is slot pages[b, s // page_size] page_size + s % page_size in memory.
"""

DECODE_QUANTIZED_STRUCT = StructLayout(*_DECODE_FIELDS, QuantizedField("k"), QuantizedField("v"))
"""The arguments of decoding over quantized keys and values."""

NORM_PARTS = ("w", "eps", "offset")
"""What a struct holds of an RMS norm."""

MAP_PARTS = ("w", "b", "stored")
"""What a struct holds of a linear map."""

GEMV_STRUCT = StructLayout(
    IntField("R"),  # the number of vectors
    IntField("M"),  # the size of a vector of x
    IntField("N"),  # the size of a vector of y
    IntField("x"),  # the address of the vectors [R,M]
    IntField("w"),  # the address of the weight [N,M]
    IntField("b"),  # the address of the bias [N], or 0 without one
    IntField("y"),  # the address of the output [R,N]
    IntField("runs"),  # the number of runs of tasks
    has_runs=True,
)
"""The arguments of y = W x + b for a few vectors x, packed by `regard.ops.gemv`."""

STORED_MATRIX_STRUCT = StructLayout(
    IntField("multiply"),  # the address of the entry that computes some rows, STORED_ROWS_STRUCT
    IntField("width"),  # the number of columns of the matrix in memory
    IntField("group"),  # the number of columns for each scale
    IntField("row_bytes"),  # the size in bytes of a row of codes
    IntField("row_scales"),  # the number of scales, and zeros, of a row
    IntField("codes"),  # the address of the matrix
    IntField("scales"),  # the address of the scales
)
"""A matrix that is stored in fewer bits, packed by `regard.ops.stored_linear`."""

STORED_ROWS_STRUCT = StructLayout(
    IntField("matrix"),  # the address of a STORED_MATRIX_STRUCT
    IntField("first"),  # the first row of the matrix
    IntField("last"),  # one past the last row
    IntField("R"),  # the number of vectors
    IntField("vectors"),  # the address of the vectors in fp32
    IntField("distance"),  # the number of numbers from one vector to the next
    IntField("sums"),  # the address of the output in fp32; row i of vector r is number
    IntField("sums_distance"),  # r * sums_distance + i - first
    IntField("scratch"),  # the address of memory that the entry may use from one call to the next
    IntField("packed"),  # which digits of the vectors the entry has written to the scratch memory:
    # their width, for 8-bit codes another number below 0; 0 where the vectors are other ones
)
"""The arguments of some rows of W x, which one compiled loop passes to another."""

STORED_WEIGHT_STRUCT = StructLayout(
    IntField("R"),  # the number of vectors
    IntField("M"),  # the size of a vector of x
    IntField("N"),  # the size of a vector of y
    IntField("x"),  # the address of the vectors [R,M]
    IntField("matrix"),  # the address of a STORED_MATRIX_STRUCT
    IntField("b"),  # the address of the bias [N], or 0 without one
    IntField("y"),  # the address of the output [R,N]
    IntField("runs"),  # the number of runs of tasks
    has_runs=True,
)
"""The arguments of y = W x + b for a matrix that is stored in fewer bits, packed by
`regard.ops.stored_linear`.
"""

DEQUANTIZE_STRUCT = StructLayout(
    IntField("N"),  # the number of rows
    IntField("M"),  # the number of columns
    IntField("group"),  # the number of columns for each scale
    IntField("row_bytes"),  # the size in bytes of a row of codes
    IntField("row_scales"),  # the number of scales, and zeros, of a row
    IntField("codes"),  # the address of the matrix
    IntField("scales"),  # the address of the scales
    IntField("y"),  # the address of the output [N,M]
)
"""The arguments of the conversion of rows of codes, packed by `regard.ops.stored_linear`."""

RMS_NORM_STRUCT = StructLayout(
    IntField("R"),  # the number of rows
    IntField("M"),  # the size of a row
    IntField("x"),  # the address of the rows [R,M]
    IntField("w"),  # the address of the weight [M]
    IntField("y"),  # the address of the output [R,M]
    FloatField("eps"),  # added to the mean square
    FloatField("offset"),  # added to the weight
)
"""The arguments of the RMS norm of a few rows, packed by `regard.ops.rms_norm`."""

GATED_PRODUCT_STRUCT = StructLayout(
    IntField("n"),  # the number of elements, a multiple of 16
    IntField("gate"),  # the address of the arguments of the activation [n]
    IntField("up"),  # the address of the other factors [n]
    IntField("out"),  # the address of the output [n]
)
"""The arguments of silu(gate) * up, packed by `regard.ops.gated_product`."""

STEP_STRUCT = StructLayout(
    IntField("B"),  # the number of rows of the batch, each with one token
    IntField("L"),  # the number of layers
    IntField("M"),  # the model dim
    IntField("V"),  # the number of logits
    IntField("layers"),  # the address of L structs STEP_LAYER_STRUCT
    IntField("attend"),  # the address of the entry of `decode_loops`
    IntField("attention"),  # the address of L structs DECODE_STRUCT, its arguments
    IntField("attend_codes"),  # the address of the entry of `decode_quantized_loops`
    IntField("codes"),  # the address of L structs DECODE_QUANTIZED_STRUCT: S is 0 without codes
    IntField("width"),  # the largest number of numbers in a vector of a step
    IntField("head"),  # the largest size of a head
    IntField("counters"),  # the address of the counters of the phases: at most 6 L + 1
    IntField("runs"),  # the number of runs of tasks in a phase
    IntField("embedded"),  # the address of the hidden states before the first layer [B,M]
    IntField("x"),  # the address of the hidden states before the attention of a layer [B,M]
    IntField("x_mid"),  # the address of the hidden states before its feed-forward layer [B,M]
    IntField("y"),  # the address of the result of a sublayer [B,M]
    IntField("hidden"),  # the address of the hidden units of a feed-forward layer [B,F]; of a
    # mixture those of each pair of an expert and a token [B k,F], then those of the shared network
    IntField("router_logits"),  # the address of the logits of the experts in fp32 [B,n], then of
    # those of the gate of the shared network [B]
    IntField("shares"),  # the address of the weights of the pairs in fp32 [B k]
    IntField("parts"),  # the address of the results of the pairs [B k,M], then of the shared [B,M]
    IntField("logits"),  # the address of the output [B,V]
    *(IntField(f"norm_{x}") if x == "w" else FloatField(f"norm_{x}") for x in NORM_PARTS),
    *(IntField(f"head_{part}") for part in MAP_PARTS),
    IntField("extensions"),  # the address of L structs STEP_EXTENSION_STRUCT, or 0
    IntField("last_norm"),  # the address of the STEP_NORM_STRUCT before the head, or 0
    FloatField("logit_scale"),  # the factor on the hidden states before the head
    IntField("raw"),  # the address of queries and keys before a norm over all heads [B,raw_width]
    IntField("raw_width"),
)
"""The arguments of a decoding step of a whole model, packed by `regard.ops.decode_step`. The last
five fields are read by `step_extended_loops` only, which has the norm before the head from there.
"""

STEP_NETWORK_STRUCT = StructLayout(
    IntField("F"),  # the number of hidden units
    IntField("activation"),  # the number of the activation, in `decode_step.ACTIVATIONS`
    FloatField("limit"),  # the limits of an activation that clips
    FloatField("alpha"),  # its factor inside the sigmoid
    *(IntField(f"{x}_{part}") for x in ("gate", "up", "down") for part in MAP_PARTS),
)
"""A gated feed-forward network of a decoding step."""

STEP_MIXTURE_STRUCT = StructLayout(
    IntField("n"),  # the number of experts
    IntField("k"),  # how many of them a token uses
    IntField("sigmoid"),  # whether scores are sigmoids of the logits; otherwise a softmax
    IntField("normalize"),  # whether the weights of a token are divided by their sum
    FloatField("scale"),  # the factor on the weights
    IntField("groups"),  # the number of groups of experts; 0: no groups
    IntField("group_topk"),  # how many groups a token may use
    IntField("group_best"),  # how many experts of a group make up its score
    IntField("correction"),  # the address of a correction of the scores [n], or 0
    IntField("wide_correction"),  # whether the correction is fp32, otherwise of the step's dtype
    *(IntField(f"router_{part}") for part in MAP_PARTS),
    IntField("routing"),  # the address of the 3 B k + 2 numbers of `choose_experts`, an output
    IntField("networks"),  # the address of n STEP_NETWORK_STRUCT
    IntField("shared"),  # the address of the STEP_NETWORK_STRUCT for all tokens, or 0
    IntField("gated"),  # whether a gate weighs its result
    *(IntField(f"shared_gate_{part}") for part in MAP_PARTS),
)
"""A mixture of experts of a decoding step."""

_STEP_NORMS = ("before", "q_norm", "k_norm", "after", "ff_before", "ff_after")
_STEP_MAPS = ("q", "k", "v", "out")
STEP_LAYER_STRUCT = StructLayout(
    *(IntField(x) for x in ("H", "G", "D", "E")),  # heads, key/value heads, their sizes
    IntField("network"),  # the address of a STEP_NETWORK_STRUCT, or 0
    IntField("mixture"),  # the address of a STEP_MIXTURE_STRUCT in its place, or 0
    IntField("pairs"),  # the number of rotary pairs of a head; 0: no rotation
    IntField("interleaved"),  # whether pair i are the dims 2i, 2i + 1; otherwise i, i + pairs
    IntField("tables"),  # the number of rows of cos and sin: B, or 1 for all
    IntField("cos"),  # the address of cos [tables,pairs], in the dtype of the weights
    IntField("sin"),
    IntField("slots"),  # the address of the slots of keys and values that the step writes [B]
    IntField("sink"),  # the address of the sinks [H], in the dtype of the weights; 0: none
    *(IntField(f"{x}_{part}") for x in _STEP_MAPS for part in MAP_PARTS),  # address or 0
    *(
        IntField(f"{x}_{part}") if part == "w" else FloatField(f"{x}_{part}")
        for x in _STEP_NORMS
        for part in NORM_PARTS
    ),
)
"""The arguments of one layer of a decoding step. Of a linear map x they are the addresses `x_w` of
the weight, `x_b` of the bias, and `x_stored` of a STORED_MATRIX_STRUCT in place of the weight; of
an RMS norm x the address `x_w` of its weight (0: no norm), the number `x_eps` that is added to the
mean square, and `x_offset` that is added to the weight.
"""

STEP_NORM_STRUCT = StructLayout(
    IntField("kind"),  # the number of the kind, in `decode_step.NORM_KINDS`
    IntField("w"),  # the address of the weight, or 0
    IntField("b"),  # the address of the bias, or 0
    FloatField("eps"),  # added to the mean square, or to the variance
    FloatField("offset"),  # added to the weight; or the factor of the kind "scale"
)
"""A norm of any kind of a decoding step, or a factor in its place."""

EXTENDED_NORMS = (*_STEP_NORMS, "q_flat", "k_flat")
"""The norms of a layer of `step_extended_loops`."""

STEP_EXTENSION_STRUCT = StructLayout(
    *(IntField(x) for x in EXTENDED_NORMS),  # the address of a STEP_NORM_STRUCT, or 0 for none
    IntField("parallel"),  # whether both sublayers read the same hidden states
    FloatField("clip"),  # the limit of queries, keys and values before the steps; 0: none
    *(IntField(f"{x}_{part}") for x in "qkv" for part in ("first", "run", "step")),
)
"""What `step_extended_loops` reads of a layer besides its STEP_LAYER_STRUCT. Head i of the queries,
the keys or the values x is block x_first + i // x_run x_step + i % x_run of the rows of its matrix.
"""

DTYPES = (torch.float32, torch.bfloat16, *([torch.float16] if converts_float16() else []))
"""The dtypes that compiled code supports for keys, values, weights and the scales of codes."""


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Return why compiled code does not support a dtype, or None if it does."""
    if dtype in DTYPES:
        return None
    without = dtype == torch.float16
    return f"no {str(dtype).removeprefix('torch.')}{' without F16C' * without}"
