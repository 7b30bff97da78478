"""One softmax attention call as data, checked, and what a kernel is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

from regard import arguments, masks, tap
from regard.biases import Bias
from regard.errors import ArgumentError
from regard.masks import Mask
from regard.ops.softmax.given import as_bias, as_mask, check_rules, last
from regard.process import is_compiling
from regard.span import Positions, Span


class Options(TypedDict, total=False):
    """What every softmax function takes by keyword.

    mask: a rule on positions (`regard.masks`), a bool tensor [T,S] or [B or 1, H or 1, T, S] with True = may attend, or
        None: every key whose position is >= 0.
    bias: added to scores after the softcap: `regard.biases`, or a float tensor of the shapes of a mask; learnable.
    scale: None is 1/sqrt(D); finite, not 0.
    softcap: c of c tanh(s / c), greater than 0; None is off.
    sink: [H], one logit per head that takes part in the denominator only.
    dropout: the probability with which a weight is dropped, the rest scaled by 1/(1-p). It knows no training mode.
    q_positions, k_positions: a `Span` or an integer tensor [B or 1, length], -1 = a slot that holds nothing: such a key is
        never seen, and such a query sees nothing. Default: keys 0..S-1, queries the last T of them.
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

    out: [B,H,T,E], the weighted mean of the values of that part; 0 for a row that sees none of them.
    lse: [B,H,T], natural log of the sum of exp(score), fp32 (fp64 for fp64); -inf for such a row.
    """

    out: Tensor
    lse: Tensor


class Work(NamedTuple):
    """What a kernel would do with a call: query-key pairs that it visits over all B and H, and its peak extra bytes."""

    pairs: int
    bytes: int


class Result(NamedTuple):
    """What a kernel returns; lse may be None when the call did not ask for it. The sink is in `out`, never in `lse`.

    scores, pattern: [B,H,T,S], only where an open trace edited them: they no longer follow from the call.
    """

    out: Tensor
    lse: Tensor | None
    scores: Tensor | None = None
    pattern: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: q [B,H,T,D], k [B,G,S,D], v [B,G,S,E], and how to score them."""

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
    _known: dict[str, float] = field(default_factory=dict, init=False)

    @property
    def B(self) -> int:
        return self.q.shape[0]

    @property
    def H(self) -> int:
        return self.q.shape[1]

    @property
    def G(self) -> int:
        return self.k.shape[1]

    @property
    def T(self) -> int:
        return self.q.shape[2]

    @property
    def S(self) -> int:
        return self.k.shape[2]

    @property
    def D(self) -> int:
        return self.q.shape[3]

    @property
    def E(self) -> int:
        return self.v.shape[3]

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
    def has_gradient(self) -> bool:
        """Something in the call wants a gradient."""
        tensors = [self.q, self.k, self.v, *(() if self.sink is None else (self.sink,))]
        learned = () if self.bias is None else self.bias.tensors()
        return torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *learned))

    @property
    def finite(self) -> bool:
        """q, k and v hold no NaN and no infinity."""
        return self.all_finite("k", "v", "q")

    @property
    def score_bound(self) -> float:
        """No |scale q k| is larger: |scale| times the longest query and the longest key of a head that it reads.

        Infinite where nobody may look: in a compiled graph, and on another device than a CPU, which would be waited for.
        """
        if is_compiling() or not self.q.is_cpu:
            return math.inf
        if 0 in (self.B, self.T, self.S):
            return 0.0
        if "bound" not in self._known:  # read once a call, however many kernels ask
            q, k = (_longest(x) for x in (self.q, self.k))  # [B,H], [B,G]
            longest = (q.unflatten(1, (self.G, -1)) * k[:, :, None]).amax()
            self._known["bound"] = abs(self.scale) * longest.item()
        return self._known["bound"]

    def all_finite(self, *names: str) -> bool:
        """Those of q, k and v hold no NaN and no infinity. Not read while compiling: assumed there."""
        if is_compiling():
            return True
        for name in names:
            if name not in self._known:  # read once a call, however many kernels ask
                self._known[name] = _finite(getattr(self, name))
        return all(bool(self._known[name]) for name in names)


@runtime_checkable
class Kernel(Protocol):
    """One way to run a call. It declares what it can do: `why_not` is a whitelist.

    selects: whether what is masked is never read, not even to be multiplied by 0.
    """

    name: str
    selects: bool

    def why_not(self, call: Call) -> list[str]:
        """The reasons against running this call; empty if it can."""

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
    arguments.check_query_key_value(q, k, v)
    arguments.check_number("scale", scale, -math.inf, math.inf, "finite and not 0")
    if scale == 0:
        raise ArgumentError("scale is 0; it must be finite and not 0: None is 1/sqrt(D)")
    arguments.check_number("softcap", softcap, 0, math.inf, "greater than 0: None turns it off")
    arguments.check_number("dropout", dropout, -1e-300, 1, "at least 0 and less than 1")
    (B, H, T, D), S = q.shape, k.shape[2]
    arguments.check_sink(sink, H, q)
    k_positions = Span(0, S) if k_positions is None else k_positions
    arguments.check_positions("k_positions", k_positions, B, S)
    if q_positions is None:
        q_positions = last(k_positions, T)
    arguments.check_positions("q_positions", q_positions, B, T)
    mask, bias = as_mask(mask), as_bias(bias)
    mask.require(B, H, T, S)
    if bias is not None:
        bias.require(B, H, T, S)
    check_rules(mask, bias, (B, H), q_positions, k_positions)
    arguments.check_finite(query=q, key=k, value=v)
    return Call(
        q, k, v, mask, bias, D**-0.5 if scale is None else float(scale), softcap, sink, dropout,
        q_positions, k_positions, wants_lse, tap.needed() & {"scores", "pattern"},
    )  # fmt: skip


SMALL_SCORES = 6.0
"""Up to this bound on |scale q k| every kernel's gradient rounds as plain math does.

Then scores of a row differ by at most 12, so that no weight is lost beside another in fp32 (e^-12 > 2^-24): the terms of
p (dp - sum p dp) do not cancel to nothing. A kernel that computes p = exp(s - lse) from a rounded lse is off by some roundings
of the largest score: measured (LOG.md), torch's breaks the error rule now and then from 7 on.
"""


def _longest(x: Tensor) -> Tensor:
    """The length of the longest vector [B,h] of x [B,h,n,D], in fp32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide).amax(-1)


LARGE = 1e17
"""Numbers up to here have finite products and sums in fp32."""


def _finite(x: Tensor) -> bool:
    # One cheap pass that keeps every NaN and infinity. Larger numbers count as infinite: behind a mask they may be
    # anything, and -inf + inf is NaN in a kernel that masks by adding.
    if x.numel() == 0:
        return True
    low, high = torch.aminmax(x.detach() if x.requires_grad else x)
    return low.item() >= -LARGE and high.item() <= LARGE
