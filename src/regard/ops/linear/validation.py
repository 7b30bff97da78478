"""Argument checks that the linear recurrences share, and their handling of empty slots, of the
initial state, and of the form of computation.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, float32, float64
from torch import dtype as Dtype

from regard.argument_checks import (
    check_device,
    check_number,
    check_positions,
    check_query_key_value,
    check_tensor,
    check_value_heads,
)
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Positions, find_empty_slots
from regard.units import plural

FORMS = ("auto", "recurrent", "chunk", "parallel")
"""The forms in which a recurrence can be computed: "recurrent" token by token, "chunk" in
chunks, "parallel" as one chunk, and "auto". All give the same result.
"""
MAX_RECURRENT_TOKENS = 8
"""The largest number of tokens for which "auto" computes token by token."""


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    positions: Positions | None,
    form: str,
    chunk: int,
) -> None:
    """Check that q, k and v fit together and have the same number of tokens, and that the
    options are valid.
    """
    check_query_key_value(q, k, v, check_heads=check_value_heads)
    if q.shape[2] != k.shape[2]:
        raise ArgumentError(
            f"query length {q.shape[2]} != key length {k.shape[2]}: a recurrence needs a query for "
            "each key; pass the result of earlier tokens as state"
        )
    check_number("scale", scale, float("-inf"), float("inf"), "finite")
    if positions is not None:
        check_positions("k_positions", positions, k.shape[0], k.shape[2])
    if form not in FORMS:
        raise ArgumentError(f"form is {form!r}; it must be one of {', '.join(FORMS)}")
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise ArgumentTypeError(f"chunk is {type(chunk).__name__}; it must be an int, at least 1")
    if chunk < 1:
        raise ArgumentError(f"chunk is {chunk}; it must be at least 1")


def check_tensor_shape(
    name: str, x: Tensor, allowed: tuple[tuple[int, ...], ...], meaning: str, like: Tensor
) -> None:
    """Check that x is a floating-point tensor of one of the allowed shapes, on the device of the
    keys.

    Args:
        name: the name of the tensor in error messages.
        x: the tensor.
        allowed: the allowed shapes.
        meaning: what the tensor holds, for error messages.
        like: the keys, whose device the tensor must be on.
    """
    check_tensor(name, x)
    check_device(name, x, like, "key")
    if tuple(x.shape) not in allowed:
        shapes = " or ".join(str(shape) for shape in allowed)
        raise ArgumentError(f"{name} is {tuple(x.shape)}; it must be {shapes}, {meaning}")


def chunk_size(form: str, chunk: int, T: int) -> int | None:
    """Return the number of tokens per chunk for one of the `FORMS`; None for computation token by
    token.

    >>> chunk_size("auto", 64, 1000), chunk_size("parallel", 64, 1000), chunk_size("auto", 64, 1)
    (64, 1000, None)
    """
    if form == "recurrent" or (form == "auto" and T <= MAX_RECURRENT_TOKENS):
        return None
    return max(1, T) if form == "parallel" else chunk


def empty_slot_mask(positions: Positions | None, q: Tensor) -> Bool[Tensor, "#B T"] | None:
    """Return a mask `[B or 1, T]` that is True in empty slots (position -1); None if it is known,
    without reading a tensor, that no slot is empty.
    """
    return None if positions is None else find_empty_slots(positions, q.device)


def zero_empty_slots(x: Float[Tensor, "B n T d"], empty: Tensor | None) -> Float[Tensor, "B n T d"]:
    """Return x with 0 in the empty slots, even where they contain NaN."""
    return x if empty is None else x.masked_fill(empty[:, None, :, None], 0)


def state_dtype(k: Tensor) -> Dtype:
    """Return the dtype of a state and of all sums: fp32, or fp64 for fp64 keys."""
    return float64 if k.dtype == float64 else float32


def initial_state(
    state: tuple[Tensor, ...] | None, shapes: dict[str, tuple[int, ...]], like: Tensor
) -> tuple[Tensor, ...]:
    """Return the state before the first token: the given state, after a check of its sizes and
    dtypes, or zeros.

    Args:
        state: the state that an earlier call returned, or None.
        shapes: the name and shape of each tensor of the state.
        like: the keys, whose device and dtype determine those of the state.

    Raises:
        ArgumentError, ArgumentTypeError: a given state has other sizes or another dtype.
    """
    dtype = state_dtype(like)
    if state is None:
        return tuple(like.new_zeros(shape, dtype=dtype) for shape in shapes.values())
    if not isinstance(state, tuple) or not all(isinstance(x, Tensor) for x in state):
        raise ArgumentTypeError(
            f"state is {type(state).__name__}; it must be {_state_names(shapes)}, as an "
            "earlier call returned it, or None"
        )
    if len(state) != len(shapes):
        raise ArgumentError(
            f"state has {plural(len(state), 'tensor')}; it must be {_state_names(shapes)}, as a "
            "call with the same options returned it, or None"
        )
    for x, shape in zip(state, shapes.values(), strict=True):
        if tuple(x.shape) != shape or x.dtype != dtype:
            raise ArgumentError(
                f"state is {x.dtype} {tuple(x.shape)}; it must be {dtype} {shape}: "
                "pass the state that a call with the same sizes returned"
            )
        check_device("state", x, like, "key")
    return state


def _state_names(sizes: dict[str, tuple[int, ...]]) -> str:
    """Return the names of the tensors of a state, formatted as a tuple: "(S,)" or "(S, z)"."""
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
