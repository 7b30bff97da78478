"""What every function of this folder checks of a call, and what it makes of padding, of the state
and of the form.
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
)
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Positions, find_empty_slots

FORMS = ("auto", "recurrent", "chunk", "parallel")
"""How a recurrence can be computed: token by token, in chunks, as one chunk; all give the same."""
FEW = 8
"""Up to so many tokens `auto` goes token by token."""


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    positions: Positions | None,
    form: str,
    chunk: int,
) -> None:
    """q, k and v fit one another, are of the same tokens, and the options are known."""
    check_query_key_value(q, k, v)
    if q.shape[2] != k.shape[2]:
        raise ArgumentError(
            f"query length {q.shape[2]} != key length {k.shape[2]}: a recurrence reads and writes "
            "token by token; "
            "pass what came before as state"
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


def check_shape(
    name: str, x: Tensor, allowed: tuple[tuple[int, ...], ...], meaning: str, like: Tensor
) -> None:
    """x is a floating tensor of one of the allowed shapes, where the keys are."""
    check_tensor(name, x)
    check_device(name, x, like, "key")
    if tuple(x.shape) not in allowed:
        shapes = " or ".join(str(shape) for shape in allowed)
        raise ArgumentError(f"{name} is {tuple(x.shape)}; it must be {shapes}, {meaning}")


def chunk_of(form: str, chunk: int, T: int) -> int | None:
    """How many tokens a chunk has in this form; None is token by token.

    >>> chunk_of("auto", 64, 1000), chunk_of("parallel", 64, 1000), chunk_of("auto", 64, 1)
    (64, 1000, None)
    """
    if form == "recurrent" or (form == "auto" and T <= FEW):
        return None
    return max(1, T) if form == "parallel" else chunk


def empty_slots(positions: Positions | None, q: Tensor) -> Bool[Tensor, "#B T"] | None:
    """Which slots are no tokens; None where none is, and that is known without reading a tensor."""
    return None if positions is None else find_empty_slots(positions, q.device)


def emptied(x: Float[Tensor, "B n T d"], empty: Tensor | None) -> Float[Tensor, "B n T d"]:
    """x with 0 in the empty slots: selected, not multiplied, so that whatever stood there is
    gone.
    """
    return x if empty is None else x.masked_fill(empty[:, None, :, None], 0)


def state_dtype(k: Tensor) -> Dtype:
    """What sums over a whole text are held in."""
    return float64 if k.dtype == float64 else float32


def first_state(
    state: tuple[Tensor, ...] | None, sizes: dict[str, tuple[int, ...]], like: Tensor
) -> tuple[Tensor, ...]:
    """The state in front of the first token: what was given, held against its sizes by name, or
    zeros.

    Raises:
        ArgumentError, ArgumentTypeError: a given state is not what a call with these sizes returns.
    """
    dtype = state_dtype(like)
    if state is None:
        return tuple(like.new_zeros(size, dtype=dtype) for size in sizes.values())
    if not isinstance(state, tuple) or not all(isinstance(x, Tensor) for x in state):
        raise ArgumentTypeError(
            f"state is {type(state).__name__}; it must be {_named(sizes)} as a call before this "
            "one returned it, or None"
        )
    if len(state) != len(sizes):
        raise ArgumentError(
            f"state has {len(state)} tensor{'s' * (len(state) != 1)}; it must be {_named(sizes)} "
            "as a call with the same "
            "options returned it, or None"
        )
    for x, size in zip(state, sizes.values(), strict=True):
        if tuple(x.shape) != size or x.dtype != dtype:
            raise ArgumentError(
                f"state is {x.dtype} {tuple(x.shape)}; it must be {dtype} {size}: "
                "pass on what a call with the same sizes returned"
            )
        check_device("state", x, like, "key")
    return state


def _named(sizes: dict[str, tuple[int, ...]]) -> str:
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
