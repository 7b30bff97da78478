"""One softmax attention call as checked data, and the protocol that every kernel follows."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

from regard import argument_checks, biases, masks, tracing
from regard.biases import Bias
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Mask
from regard.process_state import is_compiling
from regard.span import EMPTY, Positions, Span, slot_count


def last(keys: Positions, T: int) -> Positions:
    """The default query positions: the last T of the keys' ones (bottom-right alignment).

    Raises:
        ArgumentError: there are not so many keys at stored positions; or fewer queries than keys,
            and a row of keys that ends in empty slots, in which its queries would stand.

    >>> last(Span(0, 5), 2), last(Span(0, 2), 3)
    (Span(start=3, length=2), Span(start=-1, length=3, tokens=True))
    """
    if isinstance(keys, Span):
        return Span(keys.stop - T, T, tokens=keys.stop < T)
    if keys.shape[1] < T:
        raise ArgumentError(
            f"{T} queries for {keys.shape[1]} keys at given k_positions: give q_positions as well"
        )
    if 0 < T < keys.shape[1] and not is_compiling():
        _check_ends(keys, T)
    return keys[:, keys.shape[1] - T :]


def _check_ends(keys: Tensor, T: int) -> None:
    """The last tokens of a row stand at its end, so that they may be the queries."""
    ends = (keys[:, -1] <= EMPTY) & (keys > EMPTY).any(1)
    if bool(ends.any()):
        raise ArgumentError(
            f"k_positions of row {int(ends.nonzero()[0])} end in an empty slot (-1), and {T} "
            f"queries for {keys.shape[1]} keys "
            "would stand there by default, where a query sees nothing: give q_positions as well"
        )


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """None is Full(), a bool tensor is Dense(tensor)."""
    if mask is None:
        return masks.Full()
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.is_floating_point():
            raise ArgumentTypeError(
                f"mask is {str(mask.dtype).removeprefix('torch.')}; a mask is bool, True = may "
                "attend: "
                "use regard.masks.from_additive(mask), or pass it as bias="
            )
        dense = masks.Dense(mask)
        _warn_if_inverted(mask)
        return dense
    raise ArgumentTypeError(_no_mask(mask))


def _no_mask(given: object) -> str:
    if isinstance(given, type):
        return f"mask is the class {given.__name__}; make one: {given.__name__}(...)"
    return f"mask is {type(given).__name__}; it must be a regard.masks mask, a bool tensor or None"


def check_rules(
    mask: Mask, bias: Bias | None, sizes: tuple[int, int], q: Positions, k: Positions
) -> None:
    """What a caller's own function or class says is for as many rows of the batch and heads as the
    call has.

    Ours know these sizes (`require`). Of others one pair is asked for: most kernels would take
    another size for a batch to broadcast to, and compiled ones for the last row or head.

    Raises:
        ArgumentError: it is for another number of them.
    """
    if slot_count(q) == 0 or slot_count(k) == 0:
        return
    one = slice(0, 1)
    for name, rule in (("mask", mask), ("bias", bias)):
        if rule is None or not _foreign(rule):
            continue
        found = tuple(rule.block(q, k, one, one).shape[:2])
        if any(n not in (1, size) for n, size in zip(found, sizes, strict=True)):
            raise ArgumentError(
                f"{name} {rule} is for batch {found[0]} and {found[1]} heads, but the call has "
                f"batch {sizes[0]} and "
                f"{sizes[1]} heads; it must give 1 or as many of each"
            )


_FAMILIAR = "_familiar"
"""Where a rule that was looked through remembers it: a model asks with the same one for every layer
and token.
"""


def _foreign(rule: Mask | Bias) -> bool:
    """Whether a function or class of the caller is in it."""
    if _FAMILIAR in rule.__dict__:
        return False
    if isinstance(rule, (masks.Fn, biases.FnBias)) or not type(rule).__module__.startswith(
        "regard."
    ):
        return True
    values = [getattr(rule, x.name) for x in fields(rule)]
    inner = [y for x in values for y in (x if isinstance(x, tuple) else (x,))]
    found = any(_foreign(x) for x in inner if isinstance(x, (Mask, Bias)))
    if not found and not is_compiling():
        rule.__dict__[_FAMILIAR] = True
    return found


def as_bias(bias: Bias | Tensor | None) -> Bias | None:
    """A float tensor is Dense(tensor)."""
    if bias is None or isinstance(bias, Bias):
        return bias
    if isinstance(bias, Tensor):
        return biases.DenseBias(bias)
    raise ArgumentTypeError(
        f"bias is {type(bias).__name__}; it must be a regard.biases bias, a float tensor or None"
    )


def _warn_if_inverted(mask: Tensor) -> None:
    """A square mask that hides every query's own key is nearly always one of the other polarity."""
    square = mask.shape[-1] == mask.shape[-2] > 1
    if is_compiling() or not square:
        return
    if not bool(mask.diagonal(dim1=-2, dim2=-1).any()) and bool(mask.any()):
        warnings.warn(
            "mask hides each query's own key: is it inverted? True = may attend; "
            "regard.masks.from_drop(mask) takes a mask with True = drop, and a mask that means it "
            "is regard.masks.Dense(mask)",
            stacklevel=5,
        )


class Options(TypedDict, total=False):
    """What every softmax function takes by keyword.

    mask: a rule on positions (`regard.masks`), a bool tensor [T,S] or [B or 1, H or 1, T, S] with
        True = may attend, or
        None: every key whose position is >= 0.
    bias: added to scores after the softcap: `regard.biases`, or a float tensor of the shapes of a
        mask; learnable.
    scale: None is 1/sqrt(D); finite, not 0.
    softcap: c of c tanh(s / c), greater than 0; None is off.
    sink: [H], one logit per head that takes part in the denominator only.
    dropout: the probability with which a weight is dropped, the rest scaled by 1/(1-p). It knows no
        training mode.
    q_positions, k_positions: a `Span` or an integer tensor [B or 1, length], -1 = a slot that holds
        nothing: such a key is never seen, and such a query sees nothing. Default: keys 0..S-1,
        queries the last T of them.
    """

    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    dropout: float
    q_positions: Positions | None
    k_positions: Positions | None


class Partial(NamedTuple):
    """Attention over a part of the keys: what `merge` joins.

    out: [B,H,T,E], the weighted mean of the values of that part; 0 for a row that sees none of
        them.
    lse: [B,H,T], natural log of the sum of exp(score), fp32 (fp64 for fp64); -inf for such a row.
    """

    out: Tensor
    lse: Tensor


class Work(NamedTuple):
    """What a kernel would do with a call: query-key pairs that it visits over all B and H, and its
    peak extra bytes.
    """

    pairs: int
    bytes: int


class Result(NamedTuple):
    """What a kernel returns; lse may be None when the call did not ask for it. The sink is in
    `out`, never in `lse`.

    scores, pattern: [B,H,T,S], only where an open trace edited them: they no longer follow from the
        call.
    """

    out: Tensor
    lse: Tensor | None
    scores: Tensor | None = None
    pattern: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: q [B,H,T,D], k [B,G,S,D], v [B,G,S,E], and how to score them.

    What every kernel asks is found out once, when the call is made: the sizes, whether something
    in it wants a gradient, and whether this thread compiles a graph.
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
    B: int = field(init=False)
    H: int = field(init=False)
    G: int = field(init=False)
    T: int = field(init=False)
    S: int = field(init=False)
    D: int = field(init=False)
    E: int = field(init=False)
    has_gradient: bool = field(init=False)
    compiling: bool = field(init=False)
    _known: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        B, H, T, D = self.q.shape
        _, G, S, E = self.v.shape
        for letter, size in zip("BHGTSDE", (B, H, G, T, S, D, E), strict=True):
            put(self, letter, size)
        put(self, "has_gradient", torch.is_grad_enabled() and self._learns())
        put(self, "compiling", is_compiling())

    def _learns(self) -> bool:
        """Whether a tensor of the call wants a gradient."""
        return (
            self.q.requires_grad
            or self.k.requires_grad
            or self.v.requires_grad
            or (self.sink is not None and self.sink.requires_grad)
            or (self.bias is not None and any(x.requires_grad for x in self.bias.tensors()))
        )

    @property
    def score_dtype(self) -> torch.dtype:
        """Scores and softmax are fp32, or fp64 for fp64."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def sees_everything(self) -> bool:
        """Every query sees every key, known without reading a tensor."""
        return (
            isinstance(self.mask, masks.Full)
            and isinstance(self.q_positions, Span)
            and self.q_positions.all_tokens
            and isinstance(self.k_positions, Span)
            and (self.k_positions.start >= 0)
        )

    @property
    def finite(self) -> bool:
        """q, k and v hold no NaN and no infinity."""
        return self.all_finite("k", "v", "q")

    @property
    def score_bound(self) -> float:
        """No |scale q k| is larger: |scale| times the longest query and the longest key of a head
        that it reads.

        Infinite where nobody may look: in a compiled graph, and on another device than a CPU, which
        would be waited for.
        """
        if self.compiling or not self.q.is_cpu:
            return math.inf
        if 0 in (self.B, self.T, self.S):
            return 0.0
        if "bound" not in self._known:  # read once a call, however many kernels ask
            q, k = (_longest(x) for x in (self.q, self.k))  # [B,H], [B,G]
            longest = (torch.unflatten(q, 1, (self.G, -1)) * k[:, :, None]).amax()
            self._known["bound"] = abs(self.scale) * longest.item()
        return self._known["bound"]

    def all_finite(self, *names: str) -> bool:
        """Those of q, k and v hold no NaN and no infinity. Not read while compiling: assumed
        there.
        """
        if self.compiling:
            return True
        for name in names:
            if name not in self._known:  # read once a call, however many kernels ask
                self._known[name] = _finite(getattr(self, name))
        return all(bool(self._known[name]) for name in names)


@runtime_checkable
class Kernel(Protocol):
    """One way to run a call. It declares what it can do (`why_not` is a whitelist) and how early it
    wants to be asked (`priority`); `regard.register_kernel` takes any object with these names.

    name: what `backend=` and `regard.plan` call it.
    selects: whether what is masked is never read, not even to be multiplied by 0.
    """

    name: str
    selects: bool

    def why_not(self, call: Call) -> list[str]:
        """Give the reasons against running this call on this machine: what the machine lacks (a
        device, a package), and what the call asks for that the kernel cannot do. Empty if it can.
        """

    def priority(self, call: Call) -> float | None:
        """Say how early `backend="auto"` asks this kernel: the largest number first, at equal
        numbers the kernel that was registered first. None: only a caller who names it gets it.

        It must read no tensor, because every kernel is asked for every call. Ours give
        100 or 90 where they were measured to be faster than torch's fused kernel,
        80 for torch's fused kernel itself,
        75 to 60 for what comes next where that one refuses,
        50 to 20 for what is right but was measured to be slower, and
        10 for the definition, which runs everything.
        """

    def run(self, call: Call) -> Result:
        """Run it."""

    def work(self, call: Call) -> Work:
        """What running it costs; nothing is computed."""


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    q_positions: Positions | None = None,
    k_positions: Positions | None = None,
    wants_lse: bool = False,
) -> Call:
    """Check every argument, fill in the defaults, and say what taps are listened to."""
    argument_checks.check_query_key_value(q, k, v)
    if scale is not None:
        argument_checks.check_number("scale", scale, -math.inf, math.inf, "finite and not 0")
        if scale == 0:
            raise ArgumentError("scale is 0; it must be finite and not 0: None is 1/sqrt(D)")
    if softcap is not None:
        argument_checks.check_number(
            "softcap", softcap, 0, math.inf, "greater than 0: None turns it off"
        )
    if type(dropout) is not float or dropout:
        argument_checks.check_number("dropout", dropout, -1e-300, 1, "at least 0 and less than 1")
    (B, H, T, D), S = q.shape, k.shape[2]
    if sink is not None:
        argument_checks.check_sink(sink, H, q)
    if k_positions is not None:
        argument_checks.check_positions("k_positions", k_positions, B, S)
    if q_positions is not None:
        argument_checks.check_positions("q_positions", q_positions, B, T)
    elif k_positions is not None:
        q_positions = last(k_positions, T)
    else:
        q_positions = Span(S - T, T, S < T)  # as `last` says
    k_positions = Span(0, S) if k_positions is None else k_positions
    mask, bias = as_mask(mask), None if bias is None else as_bias(bias)
    mask.require(B, H, T, S)
    if bias is not None:
        bias.require(B, H, T, S)
    if bias is not None or _FAMILIAR not in mask.__dict__:
        check_rules(mask, bias, (B, H), q_positions, k_positions)
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
    if not call.compiling and argument_checks.finite_checks_enabled():
        argument_checks.check_finite(query=q, key=k, value=v)
    return call


SMALL_SCORES = 6.0
"""Up to this bound on |scale q k| every kernel's gradient rounds as plain math does.

Then scores of a row differ by at most 12, so that no weight is lost beside another in fp32 (e^-12 >
2^-24): the terms of p (dp - sum p dp) do not cancel to nothing. A kernel that computes p = exp(s -
lse) from a rounded lse is off by some roundings of the largest score: measured (LOG.md), torch's
breaks the error rule now and then from 7 on.
"""


def _longest(x: Tensor) -> Tensor:
    """The length of the longest vector [B,h] of x [B,h,n,D], in fp32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    lengths: Tensor = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide)
    return lengths.amax(-1)


LARGE = 1e17
"""Numbers up to here have finite products and sums in fp32."""


def _finite(x: Tensor) -> bool:
    # One cheap pass that keeps every NaN and infinity. Larger numbers count as infinite: behind a
    # mask they may be anything, and -inf + inf is NaN in a kernel that masks by adding.
    if x.numel() == 0:
        return True
    low, high = torch.aminmax(x.detach() if x.requires_grad else x)
    return low.item() >= -LARGE and high.item() <= LARGE
