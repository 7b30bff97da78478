"""The options of a call of softmax attention, and the checked call as data."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from regard import argument_checks, biases, masks, tracing
from regard.biases import Bias
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Mask
from regard.process_state import (
    check_finite,
    finite_checks_enabled,
    is_compiling,
    is_exporting_onnx,
    values_are_readable,
)
from regard.scores import ScoreRule
from regard.span import EMPTY, Positions, Span, slot_count
from regard.units import plural


def default_query_positions(keys: Positions, T: int) -> Positions:
    """Return the default positions of T queries: the last T positions of the keys."""
    if isinstance(keys, Span):
        return Span(keys.stop - T, T, tokens=keys.stop < T)
    if keys.shape[1] < T:
        raise ArgumentError(
            f"{plural(T, 'query', 'queries')} for {plural(keys.shape[1], 'key')} with k_positions: "
            "pass q_positions as well"
        )
    if 0 < T < keys.shape[1] and not is_compiling():
        _check_rows_end_in_tokens(keys, T)
    return keys[:, keys.shape[1] - T :]


def _check_rows_end_in_tokens(keys: Tensor, T: int) -> None:
    """Check that no row of positions with tokens ends in an empty slot, a query's position."""
    ends_empty = (keys[:, -1] <= EMPTY) & (keys > EMPTY).any(1)
    if bool(ends_empty.any()):
        raise ArgumentError(
            f"row {int(ends_empty.nonzero()[0])} of k_positions ends in an empty slot (-1). By "
            f"default the last {T} of its {plural(keys.shape[1], 'slot')} are the queries, and a "
            "query in an empty slot sees nothing: pass q_positions as well"
        )


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """Return the mask of an argument: `Full()` for None, `Dense(tensor)` for a bool tensor."""
    if mask is None:
        return masks.Full()
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.is_floating_point():
            raise ArgumentTypeError(
                f"mask is {str(mask.dtype).removeprefix('torch.')}; a mask must be bool, with "
                "True = may "
                "attend: convert it with regard.masks.from_additive(mask), or pass it as bias="
            )
        dense = masks.Dense(mask)
        _warn_if_inverted(mask)
        return dense
    raise ArgumentTypeError(_wrong_mask_type_message(mask))


def _wrong_mask_type_message(mask: object) -> str:
    """Return the error message for an argument that is neither a mask nor a tensor."""
    if isinstance(mask, type):
        return f"mask is the class {mask.__name__}; pass an instance, {mask.__name__}(...)"
    return f"mask is {type(mask).__name__}; it must be a regard.masks mask, a bool tensor or None"


def check_custom_rules(
    mask: Mask, bias: Bias | None, sizes: tuple[int, int], q: Positions, k: Positions
) -> None:
    """Check custom masks and biases on one pair, as most kernels broadcast wrong sizes."""
    if slot_count(q) == 0 or slot_count(k) == 0:
        return
    first_slot = slice(0, 1)
    for name, rule in (("mask", mask), ("bias", bias)):
        if rule is None or not rule.has_custom_code:
            continue
        block_sizes = tuple(rule.block(q, k, first_slot, first_slot).shape[:2])
        if any(n not in (1, size) for n, size in zip(block_sizes, sizes, strict=True)):
            raise ArgumentError(
                f"{name} {rule} is for batch {block_sizes[0]} and "
                f"{plural(block_sizes[1], 'head')}, but the "
                f"call has batch {sizes[0]} and {plural(sizes[1], 'head')}; each must be 1 or equal"
            )


def as_bias(bias: Bias | Tensor | None) -> Bias | None:
    """Return the bias of an argument: `Dense(tensor)` for a float tensor, else unchanged."""
    if bias is None or isinstance(bias, Bias):
        return bias
    if isinstance(bias, Tensor):
        return biases.DenseBias(bias)
    raise ArgumentTypeError(
        f"bias is {type(bias).__name__}; it must be a regard.biases bias, a float tensor or None"
    )


def as_score(score: ScoreRule, call: Call) -> ScoreRule:
    """Check the score rule of a call whose other arguments have been checked, and return it."""
    argument: object = score  # of any type, whatever the annotation says
    if not isinstance(argument, ScoreRule):
        name = type(argument).__name__
        if isinstance(argument, type):
            name = f"the class {argument.__name__}"
        raise ArgumentTypeError(
            f"score is {name}; it must be a rule of regard.scores or None: pass an instance of a "
            "class, and wrap a function as regard.scores.FnScore(fn)"
        )
    score.require(call.H, call.D, call.q_positions, call.q.device)
    reason = score.why_not_partial() if call.wants_lse else ""
    if reason:
        raise ArgumentError(
            f"attention with the score rule {score} cannot be merged from parts: {reason}; use "
            "regard.attend on all keys"
        )
    if call.sink is not None and score.normalizer is not None:
        raise ArgumentError(
            f"a sink was given with {score.normalizer}, which has no denominator; leave one out"
        )
    return score


def _warn_if_inverted(mask: Tensor) -> None:
    """Warn if a square mask hides from every query its own key, as an inverted one does."""
    square = mask.shape[-1] == mask.shape[-2] > 1
    if is_compiling() or not square:
        return
    if not bool(mask.diagonal(dim1=-2, dim2=-1).any()) and bool(mask.any()):
        warnings.warn(
            "the mask hides from every query its own key; it may be inverted, because True must "
            "mean that the query may attend to the key. Convert a mask in which True means masked "
            "with regard.masks.from_drop(mask); if this mask is intended, pass "
            "regard.masks.Dense(mask)",
            stacklevel=5,
        )


class AttentionOptions(TypedDict, total=False):
    """The options of a call of softmax attention, which `help(regard.attend)` shows.

    Args:
        mask: which keys each query may see: a mask of `regard.masks`, or a bool tensor `[T, S]` or
            `[B or 1, H or 1, T, S]`, True where it may. None: every key at a position of at least
            0.
        bias: a term after the softcap: a bias of `regard.biases`, or a float tensor `[T, S]` or `[B
            or 1, H or 1, T, S]`. None: no bias.
        score: a rule of `regard.scores` between bias and mask, such as `regard.scores.TopK(64)`.
            None: no rule.
        scale: the factor on q . k, finite and not 0. None: 1/sqrt(D).
        softcap: the bound c > 0 in c tanh(s / c). None: no bound.
        sink: one logit per query head, `[H]`, in the softmax denominator only. None: no sink.
        dropout: the probability that a weight is set to 0, in [0, 1); the others are divided by 1 -
            dropout. It applies in every call, also in inference.
        q_positions: the position of each query: a `regard.Span`, or integers `[B or 1, T]`; -1
            marks an empty slot, which sees nothing. None: the last T positions of the keys.
        k_positions: likewise of each key, `[B or 1, S]`. None: 0 to S - 1.
    """

    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    score: ScoreRule | None
    scale: float | None
    softcap: float | None
    sink: Float[Tensor, " H"] | None
    dropout: float
    q_positions: Positions | None
    k_positions: Positions | None


class Partial(NamedTuple):
    """Attention over some of the keys, which `merge` joins to attention over others.

    Args:
        out: `[B, H, T, E]`, the weighted mean of this part's values; 0 without a visible key.
        lse: `[B, H, T]`, ln sum_j exp(s_ij) over its keys, in fp32 or fp64; -inf without any.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call whose arguments have been checked and whose defaults are filled in.

    The sizes B, H, G, T, S, D and E are attributes as well, and so are `has_gradient`, `compiling`
    (this thread compiles, exports or traces a graph) and `readable` (Python can read the values of
    the tensors: not in a graph, under `torch.func`, or on "meta").

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, S, D]`.
        v: values `[B, G, S, E]`.
        mask: the mask; `Full()` where none was given.
        bias: the bias, or None.
        scale: the factor on q . k.
        softcap: the bound on the scores, or None.
        sink: one logit per head, `[H]`, or None.
        dropout: the dropout probability; 0 is none.
        q_positions, k_positions: the positions of queries and keys.
        wants_lse: whether the result must include the lse.
        needs: what an open trace captures or edits of "scores" and "pattern" (the weights).
        score: the rule, or None. A kernel is asked about it in `why_not_score`.
        original: the call with a score rule that this one without a rule replaces, or None.
        out_dtype: the dtype of the output, that of the scores or (None) of q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    bias: Bias | None
    scale: float
    softcap: float | None
    sink: Tensor | None
    dropout: float
    q_positions: Positions
    k_positions: Positions
    wants_lse: bool = False
    needs: frozenset[str] = frozenset()
    score: ScoreRule | None = None
    original: Call | None = None
    out_dtype: torch.dtype | None = None
    B: int = field(init=False)
    H: int = field(init=False)
    G: int = field(init=False)
    T: int = field(init=False)
    S: int = field(init=False)
    D: int = field(init=False)
    E: int = field(init=False)
    has_gradient: bool = field(init=False)
    compiling: bool = field(init=False)
    readable: bool = field(init=False)
    _known: dict[str, float] = field(default_factory=dict, init=False)
    _largest: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        B, H, T, D = self.q.shape
        _, G, S, E = self.v.shape
        for letter, size in zip("BHGTSDE", (B, H, G, T, S, D, E), strict=True):
            put(self, letter, size)
        learns = torch.is_grad_enabled() and self._learns() and not is_exporting_onnx()
        put(self, "has_gradient", learns)
        put(self, "compiling", is_compiling())
        readable = not self.compiling and values_are_readable(self.q, self.k, self.v)
        put(self, "readable", readable)

    def _learns(self) -> bool:
        """Return whether an input tensor requires a gradient."""
        return (
            self.q.requires_grad
            or self.k.requires_grad
            or self.v.requires_grad
            or (self.sink is not None and self.sink.requires_grad)
            or (self.bias is not None and any(x.requires_grad for x in self.bias.tensors()))
            or (self.score is not None and any(x.requires_grad for x in self.score.tensors()))
        )

    @property
    def bias_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the bias; none without one."""
        return () if self.bias is None else self.bias.tensors()

    @property
    def score_dtype(self) -> torch.dtype:
        """The dtype of the scores and the softmax: fp32, or fp64 for fp64 inputs."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self.q.dtype if self.out_dtype is None else self.out_dtype

    @property
    def sees_everything(self) -> bool:
        """Whether every query sees every key, as far as that is known without reading a tensor."""
        return (
            isinstance(self.mask, masks.Full)
            and isinstance(self.q_positions, Span)
            and self.q_positions.all_tokens
            and isinstance(self.k_positions, Span)
            and (self.k_positions.start >= 0)
        )

    @property
    def finite(self) -> bool:
        """Whether q, k and v contain neither NaN nor infinity."""
        return self.all_finite("k", "v", "q")

    @property
    def score_bound(self) -> float:
        """An upper bound on |scale q . k| from the largest norms of a head; infinite where reading
        them would synchronize or a graph cannot.
        """
        if not (self.readable and self.q.is_cpu):
            return math.inf
        if 0 in (self.B, self.T, self.S):
            return 0.0
        if "bound" not in self._known:  # computed once per call
            q_norms, k_norms = self._norms("q"), self._norms("k")  # [B,H], [B,G]
            largest_product = (
                torch.unflatten(q_norms, 1, (self.G, -1)) * k_norms[:, :, None]
            ).amax()
            self._known["bound"] = abs(self.scale) * largest_product.item()
        return self._known["bound"]

    def all_finite(self, *names: str) -> bool:
        """Return whether some of the inputs contain neither NaN nor infinity.

        Args:
            *names: which inputs to check: "q", "k" or "v".

        Returns:
            True if none has NaN, infinity, or a number above `MAX_FINITE`, or none can be read.
        """
        if not self.readable:
            return True
        for name in names:
            if name not in self._known:  # computed once per call
                self._known[name] = self._has_small_norms(name) or _all_entries_finite(
                    getattr(self, name)
                )
        return all(bool(self._known[name]) for name in names)

    def _norms(self, name: str) -> Tensor:
        """Return the largest norms of "q" or "k", see `_largest_norms`; computed once per call."""
        if name not in self._largest:
            self._largest[name] = _largest_norms(getattr(self, name))
        return self._largest[name]

    def _has_small_norms(self, name: str) -> bool:
        """Return whether norms that a kernel needs anyway show that "q" or "k" is finite."""
        if name == "v" or not self.has_gradient or not self.q.is_cpu or 0 in (self.B, self.D):
            return False
        if 0 in (self.T, self.S):
            return False
        return self._norms(name).amax().item() <= MAX_FINITE


CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that autocast converts; it leaves float64 as it is."""


def cast_for_autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Convert q, k and v to the dtype of `torch.autocast` if enabled, as torch's attention does."""
    kind = q.device.type if isinstance(q, Tensor) else "meta"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return q, k, v
    wanted = torch.get_autocast_dtype(kind)

    def cast(x: Any) -> Any:
        return x.to(wanted) if isinstance(x, Tensor) and x.dtype in CASTABLE else x

    return cast(q), cast(k), cast(v)


def _positions_of(
    sizes: tuple[int, int, int], q_positions: Positions | None, k_positions: Positions | None
) -> tuple[Positions, Positions]:
    """Check the positions of a call of sizes B, T and S, and fill in the defaults."""
    B, T, S = sizes
    if k_positions is not None:
        argument_checks.check_positions("k_positions", k_positions, B, S)
    if q_positions is not None:
        argument_checks.check_positions("q_positions", q_positions, B, T)
    elif k_positions is not None:
        q_positions = default_query_positions(k_positions, T)
    elif is_compiling():  # the same, without a comparison of lengths, which would specialize
        q_positions = Span(S - T, T, tokens=True)
    else:
        q_positions = Span(S - T, T, S < T)  # as in `default_query_positions`
    if k_positions is None:
        k_positions = Span(0, S, tokens=is_compiling())
    return q_positions, k_positions


def make_call(
    q: Tensor, k: Tensor, v: Tensor, *, wants_lse: bool = False, **options: Unpack[AttentionOptions]
) -> Call:
    """Check all arguments of an attention call; see `checked_call`."""
    return checked_call(q, k, v, options, wants_lse=wants_lse)


_OPTION_NAMES = AttentionOptions.__optional_keys__


def checked_call(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, wants_lse: bool = False
) -> Call:
    """Check all arguments of a call, fill in the defaults, and record what traces need."""
    if not _OPTION_NAMES.issuperset(options):
        names = list(AttentionOptions.__annotations__)
        argument_checks.check_keyword_names("attend", options, names)
    scale, softcap = options.get("scale"), options.get("softcap")
    sink, dropout = options.get("sink"), options.get("dropout", 0.0)
    given_bias, score = options.get("bias"), options.get("score")
    q, k, v = cast_for_autocast(q, k, v)
    argument_checks.check_query_key_value(q, k, v)
    if scale is not None:
        argument_checks.check_number("scale", scale, -math.inf, math.inf, "finite and not 0")
        if scale == 0:
            raise ArgumentError("scale is 0; it must be finite and not 0; None means 1/sqrt(D)")
    if softcap is not None:
        argument_checks.check_number(
            "softcap", softcap, 0, math.inf, "greater than 0: None turns it off"
        )
    if type(dropout) is not float or dropout:
        argument_checks.check_number("dropout", dropout, -1e-300, 1, "at least 0 and less than 1")
    (B, H, T, D), S = q.shape, k.shape[2]
    if sink is not None:
        argument_checks.check_sink(sink, H, q)
    q_positions, k_positions = _positions_of(
        (B, T, S), options.get("q_positions"), options.get("k_positions")
    )
    mask, bias = as_mask(options.get("mask")), None if given_bias is None else as_bias(given_bias)
    mask.require(B, H, T, S)
    if bias is not None:
        bias.require(B, H, T, S)
    if bias is not None or mask.has_custom_code:
        check_custom_rules(mask, bias, (B, H), q_positions, k_positions)
    call = Call(
        q,
        k,
        v,
        mask,
        bias,
        D**-0.5 if scale is None else float(scale),
        softcap,
        sink,
        dropout,
        q_positions,
        k_positions,
        wants_lse,
        tracing.requested_taps() & {"scores", "pattern"},
    )
    if score is not None:
        call = replace(call, score=as_score(score, call))
    if call.readable and finite_checks_enabled():
        check_finite(query=q, key=k, value=v)
    return call


SMALL_SCORE_BOUND = 6.0
"""The bound on |scale q . k| up to which the gradient of every kernel is as accurate as plain math.
Up to 6, no weight is negligible beside another in fp32 (e^-12 > 2^-24); from 7 on, torch's kernel,
which recomputes p from a rounded lse, broke the error rule in a few cases (LOG.md).
"""


def _largest_norms(x: Tensor) -> Tensor:
    """Return the largest vector norm `[B, h]` of each head of x `[B, h, n, D]`, in fp32 or fp64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    lengths: Tensor = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide)
    return lengths.amax(-1)


MAX_FINITE = 1e17
"""Products of two numbers up to this absolute value are finite in fp32, and so are their sums."""


def _all_entries_finite(x: Tensor) -> bool:
    """Return whether x has no NaN, infinity or number above `MAX_FINITE`, in one pass."""
    if x.numel() == 0:
        return True
    x = x.detach() if x.requires_grad else x
    if not x.is_contiguous():  # torch would copy heads [B,h,n,d] that lie in memory as [B,n,h,d]
        x = x.transpose(1, 2)
    low, high = torch.aminmax(x)
    if not low.is_cpu:  # one read, because each waits for the device
        return bool((low >= -MAX_FINITE) & (high <= MAX_FINITE))
    return low.item() >= -MAX_FINITE and high.item() <= MAX_FINITE
