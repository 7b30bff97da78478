"""One call of a recurrence: its checks, the state before it, and the call for kernels.

With H query, G key and N value heads, each value head has a state. Value head h uses key head h //
(N/G), and output o of O = max(H, N) reads state o // (O/N) with query head o // (O/H), as in
Qwen3-Next (16 query and key heads, 32 value heads).

Inside, tensors have G key heads and P = N/G value heads as two dimensions, of which the second is 1
where it is shared.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import torch
from jaxtyping import Bool, Float
from torch import Tensor, float32, float64
from torch import dtype as Dtype

from regard.argument_checks import (
    check_device,
    check_keyword_names,
    check_number,
    check_positions,
    check_query_key_value,
    check_tensor,
    check_value_heads,
)
from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import check_finite
from regard.span import Positions, find_empty_slots
from regard.units import plural

FORMS = ("auto", "recurrent", "chunk", "parallel")
"""The forms of a recurrence, of one result: by token, in chunks, as one chunk, or chosen."""
FORMS_WITH_TRITON = (*FORMS, "triton")
"""The forms of the recurrences that have kernels in Triton as well."""

MAX_RECURRENT_TOKENS = 8
"""The largest number of tokens for which "auto" computes token by token."""

SHARED_ARGUMENTS = {
    "q": "queries `[B, H, T, D]`.",
    "k": "keys `[B, G, T, D]` of the same T tokens; G divides H.",
    "v": "values `[B, N, T, E]`; G divides N.",
    "beta": "the fraction of the correction that is written, `[B, N, T]` or `[B, N, T, 1]`, of any "
    "floating dtype.",
    "scale": "the factor on the queries; None: 1/sqrt(D).",
    "state": "(S,) as an earlier call returned it, S `[B, N, D, E]` in fp32 (fp64 for fp64 "
    "inputs); None: zeros. It is not changed.",
    "k_positions": "positions of the tokens; slots at -1 are empty: they write nothing and decay "
    "nothing, and their outputs are 0.",
    "form": '"recurrent" is the definition, token by token; "chunk" uses matrix products over '
    'chunks; "parallel" is one chunk of length T; "auto" takes "recurrent" for up to 8 tokens, '
    'else "chunk". All give the same result.',
    "chunk": "the number of tokens in a chunk, at least 1; T need not be a multiple. With a decay "
    "per channel it is rounded up to a power of 2.",
    "Returns": "The output `[B, max(H, N), T, E]` in the dtype of q, and the state after the last "
    "token. Sums are in fp32 (fp64 for fp64 inputs).",
    "Raises": "ArgumentError, ArgumentTypeError: an argument is invalid; raised before anything is "
    "computed.",
}
"""The meanings of the arguments that all recurrences share."""

SHARED_ARGUMENTS_WITH_TRITON = {
    **SHARED_ARGUMENTS,
    "form": '"recurrent" is the definition, token by token; "chunk" uses matrix products over '
    'chunks; "parallel" is one chunk of length T; "triton" uses kernels for GPUs with chunks of '
    'their own size; "auto" takes "recurrent" for up to 8 tokens, else "triton" on a GPU where it '
    'serves the call, else "chunk". All give the same result.',
    "Raises": SHARED_ARGUMENTS["Raises"]
    + '\nKernelRefusal: form is "triton", which cannot run the call; the message says why.',
}
"""The same for the recurrences that have kernels in Triton."""


DECAY_PER_CHANNEL = "one number per key channel and token, or one for all channels"
"""What a decay is, in an error."""


class ScaledOptions(TypedDict, total=False):
    """The options of most recurrences, which `help` shows; `SHARED_ARGUMENTS` explains them."""

    scale: float | None
    state: tuple[Tensor, ...] | None
    k_positions: Positions | None
    form: str
    chunk: int


class RecurrenceOptions(TypedDict, total=False):
    """The same without the scale, for recurrences with one of their own."""

    state: tuple[Tensor, ...] | None
    k_positions: Positions | None
    form: str
    chunk: int


class TokenInputs:
    """The checked tokens of a recurrence, with 0 in empty slots, and its options.

    Args:
        q, k, v: `[B, H, T, D]`, `[B, G, T, D]` and `[B, N, T, E]`.
        options: those of the recurrence, with a form that is one of `forms`.
        one_state_per_head: what needs as many key and value heads as query heads, or "".
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: ScaledOptions,
        *,
        forms: tuple[str, ...] = FORMS,
        one_state_per_head: str = "",
    ) -> None:
        names = ScaledOptions.__optional_keys__
        if not names.issuperset(options):
            check_keyword_names("this recurrence", options, names)
        scale, positions = options.get("scale"), options.get("k_positions")
        form, chunk = options.get("form", "auto"), options.get("chunk", 64)
        _check_call(q, k, v, scale, positions, form, chunk, forms)
        self.form, self.chunk, self.before = form, chunk, options.get("state")
        if one_state_per_head and not q.shape[1] == k.shape[1] == v.shape[1]:
            raise ArgumentError(
                f"q has {plural(q.shape[1], 'head')}, k {k.shape[1]} and v {v.shape[1]}; "
                f"{one_state_per_head} has as many key and value heads as query heads: repeat them"
            )
        self.empty = empty_slot_mask(positions, q)
        self.q, self.k, self.v = (zero_empty_slots(x, self.empty) for x in (q, k, v))
        check_finite(query=self.q, key=self.k, value=self.v)
        (B, self.G, self.T, D), (self.N, E) = k.shape, v.shape[1::2]
        sizes = {"B": B, "H": q.shape[1], "G": self.G, "N": self.N, "T": self.T, "D": D, "E": E}
        self.sizes = {**sizes, "1": 1}
        self.scale = D**-0.5 if scale is None else scale
        self.chunk_size = chunk_size(form, chunk, self.T)
        self.dtype = state_dtype(k)

    def shape(self, letters: str, **others: int) -> tuple[int, ...]:
        """Return the sizes of dimensions, such as "B N T 1"; `others` has other letters."""
        sizes = {**self.sizes, **others} if others else self.sizes
        return tuple([sizes[x] for x in letters.split()])

    def check(self, name: str, x: Tensor, shapes: str, meaning: str, **others: int) -> None:
        """Check that x is a float tensor of one of the shapes, such as "B N T | B N T 1"."""
        check_tensor(name, x)
        check_device(name, x, self.k, "key")
        allowed = shapes.split("|")
        if all(tuple(x.shape) != self.shape(letters, **others) for letters in allowed):
            wanted = " or ".join(str(self.shape(letters, **others)) for letters in allowed)
            raise ArgumentError(f"{name} is {tuple(x.shape)}; it must be {wanted}, {meaning}")

    def gate(self, name: str, x: Tensor, shapes: str, meaning: str, **others: int) -> Tensor:
        """Return a checked number per token or channel, `[B, n, T, 1 or d]`, 0 in empty slots."""
        self.check(name, x, shapes, meaning, **others)
        return zero_empty_slots(x if x.ndim == 4 else x.unsqueeze(-1), self.empty)

    def state(self, *, sizes: dict[str, int] | None = None, **shapes: str) -> tuple[Tensor, ...]:
        """Return the state before the first token, of shapes such as S="B N D E"."""
        expected = {name: self.shape(x, **(sizes or {})) for name, x in shapes.items()}
        return initial_state(self.before, expected, self.k)

    def output(self, out: Tensor) -> Tensor:
        """Return outputs in the dtype of the queries, with 0 in empty slots."""
        return zero_empty_slots(out.to(self.q.dtype), self.empty)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which torch computes in the dtypes of the tensors, on the device of x."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    positions: Positions | None,
    form: str,
    chunk: int,
    forms: tuple[str, ...],
) -> None:
    """Check that q, k and v fit together, and that the options are valid."""
    check_query_key_value(q, k, v, check_heads=check_value_heads)
    if q.shape[2] != k.shape[2]:
        raise ArgumentError(
            f"query length {q.shape[2]} != key length {k.shape[2]}: a recurrence needs a query for "
            "each key; pass the result of earlier tokens as state"
        )
    check_number("scale", scale, float("-inf"), float("inf"), "finite")
    if positions is not None:
        check_positions("k_positions", positions, k.shape[0], k.shape[2])
    if form not in forms:
        raise ArgumentError(f"form is {form!r}; it must be one of {', '.join(forms)}")
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise ArgumentTypeError(f"chunk is {type(chunk).__name__}; it must be an int, at least 1")
    if chunk < 1:
        raise ArgumentError(f"chunk is {chunk}; it must be at least 1")


def chunk_size(form: str, chunk: int, T: int) -> int | None:
    """Return the number of tokens per chunk for one of the `FORMS`, or None."""
    if form == "recurrent" or (form == "auto" and T <= MAX_RECURRENT_TOKENS):
        return None
    return max(1, T) if form == "parallel" else chunk


def empty_slot_mask(positions: Positions | None, q: Tensor) -> Bool[Tensor, "#B T"] | None:
    """Return a mask `[B or 1, T]`, True in empty slots, or None if none can be empty."""
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
    """Return the state before the first token: the given one, checked, or zeros."""
    dtype = state_dtype(like)
    if state is None:
        return tuple(like.new_zeros(shape, dtype=dtype) for shape in shapes.values())
    names = f"({', '.join(shapes)}{',' * (len(shapes) == 1)})"  # "(S,)" or "(S, z)"
    if not isinstance(state, tuple) or not all(isinstance(x, Tensor) for x in state):
        raise ArgumentTypeError(
            f"state is {type(state).__name__}; it must be {names}, as an earlier call returned "
            "it, or None"
        )
    if len(state) != len(shapes):
        raise ArgumentError(
            f"state has {plural(len(state), 'tensor')}; it must be {names}, as a call with the "
            "same options returned it, or None"
        )
    for x, shape in zip(state, shapes.values(), strict=True):
        if tuple(x.shape) != shape or x.dtype != dtype:
            raise ArgumentError(
                f"state is {x.dtype} {tuple(x.shape)}; it must be {dtype} {shape}: "
                "pass the state that a call with the same sizes returned"
            )
        check_device("state", x, like, "key")
    return state


@dataclass(frozen=True, eq=False)
class RecurrenceCall:
    """One checked recurrence, S <- diag(exp(g)) S + k u^T and o = scale S^T q.

    u is v, or for the delta rules beta (v - S^T k); heads are as in `value_heads`.

    Args:
        state: S before the first token, `[B, N, D, E]`.
        beta, log_decay: `[B, N, T, 1]` and `[B or 1, N, T, 1 or D]`, or None.
        dtype: that of the results; in half precision, products read 10 bits of fraction.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    beta: Tensor | None = None
    log_decay: Tensor | None = None
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32

    @property
    def outputs(self) -> int:
        """The number of output heads, O = max(H, N)."""
        return max(self.q.shape[1], self.v.shape[1])

    @property
    def exact(self) -> bool:
        """Whether products need all digits of fp32."""
        return self.dtype.itemsize > 2

    @property
    def decay_form(self) -> int:
        """0 without a decay, 1 with one for all channels of a token, 2 with one for each."""
        return 0 if self.log_decay is None else 1 + (self.log_decay.shape[3] > 1)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What may have a gradient."""
        return self.q, self.k, self.v, self.beta, self.log_decay, self.state

    def with_tensors(self, tensors: tuple[Tensor | None, ...]) -> RecurrenceCall:
        """Return the same recurrence of other tensors, in the order of `tensors`."""
        q, k, v, beta, log_decay, state = tensors
        if q is None or k is None or v is None or state is None:
            raise AssertionError("only beta and the decay may be missing")
        return replace(self, q=q, k=k, v=v, state=state, beta=beta, log_decay=log_decay)


class GroupedHeads(NamedTuple):
    """Queries, keys and values with the value heads of a key head as a dimension.

    Attributes:
        q: queries `[B, G, P or 1, R, T, D]`, where R query heads read each state.
        k, v: `[B, G, 1, T, D]` and `[B, G, P, T, E]`.
    """

    q: Float[Tensor, "B G #P R T D"]
    k: Float[Tensor, "B G 1 T D"]
    v: Float[Tensor, "B G P T E"]


def group_heads(
    q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G T D"], v: Float[Tensor, "B N T E"]
) -> GroupedHeads:
    """Split heads into key heads and their value heads, after `check_value_heads`."""
    H, G, N = q.shape[1], k.shape[1], v.shape[1]
    if H == G:
        queries = q[:, :, None, None]
    else:
        repeated = q.repeat_interleave(N // H, 1) if H < N else q
        queries = torch.unflatten(torch.unflatten(repeated, 1, (N, -1)), 1, (G, -1))
    return GroupedHeads(queries, k[:, :, None], split_value_heads(v, G))


def split_value_heads(x: Tensor, groups: int) -> Tensor:
    """Split the dimension of N value heads: `[B, N, ...]` to `[B, G, P, ...]`."""
    return torch.unflatten(x, 1, (groups, -1))


def shared_matmul(
    a: Float[Tensor, "B G #P i j"], b: Float[Tensor, "B G P j l"]
) -> Float[Tensor, "B G P i l"]:
    """Return the matrix products a @ b, where the value heads of a key head may share a.

    `torch.matmul` would copy a shared a for each value head.
    """
    if a.shape[2] == 1 and b.shape[2] > 1:
        return torch.einsum("bgij,bgpjl->bgpil", a[:, :, 0], b)
    return a @ b
