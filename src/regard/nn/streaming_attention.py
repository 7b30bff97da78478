"""StreamingLLM: the first tokens and the last ones, with positions inside what is kept."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal, Sinks, Window
from regard.masks.base import whole
from regard.nn.attention import Attention
from regard.nn.explainable import ComputationStep, InputSteps, ProjectionQuery
from regard.nn.projections import SeparateQKV
from regard.ops.softmax import attend_partial, merge
from regard.positions import Rotary, rotate
from regard.span import Positions, Span, as_tensor
from regard.tap import needed


class StreamingAttention(Attention):
    """Attention to s first tokens and the R last ones, numbered as if nothing had stood between
    them.

    A query at position p sees the keys p - R < j <= p at their distance p - j, and the sinks j < s
    at the distance min(p, s + R - 1) - j: that is where they stand in a cache of s + R tokens whose
    slots are numbered from 0.

    The paper keeps keys without rotation and rotates all of them by their slots at every step. A
    rotary score depends on the distance only; so keys are kept rotated, where they stand, and a
    query that looks at sinks is turned back by the number of tokens that were evicted. Scores are
    the same in any chunks, and no key is rotated twice.

    It lets a model run on without end and stay fluent; it does not extend what the model remembers.

    Args:
        project: a `SeparateQKV` whose query and key heads end with one and the same `Rotary`.
        output: a module [B,T,H*E] -> [B,T,M].
        sinks: s, how many first tokens are kept for ever; with 0 it is a sliding window.
        recent: R, how many last tokens are kept, the query's own included.
        scale, softcap, sink: as in `Attention`; `sink` is a learned logit per head, and no token.

    Raises:
        ArgumentError, ArgumentTypeError: sinks is not an int of at least 0, or recent of at least
            1; the rotary is not the last step on queries and keys, or follows the length; scale or
            softcap is out of range.

    >>> from regard.nn import HeadProjection
    >>> rotary = Rotary(2)
    >>> project = SeparateQKV(HeadProjection(8, 4, 2, rotary), HeadProjection(8, 2, 2, rotary), HeadProjection(8, 2, 2))
    >>> attention = StreamingAttention(project, nn.Linear(8, 8), sinks=2, recent=4)
    >>> cache = attention.new_cache()
    >>> attention(torch.zeros(1, 50, 8), cache=cache).shape, len(cache)
    (torch.Size([1, 50, 8]), 6)

    Source: Xiao et al. 2024 (arXiv 2309.17453), section 3.2.
    """

    def __init__(
        self,
        project: SeparateQKV,
        output: nn.Module,
        *,
        sinks: int,
        recent: int,
        scale: float | None = None,
        softcap: float | None = None,
        sink: nn.Parameter | None = None,
    ) -> None:
        whole("sinks", sinks, 0)
        whole("recent", recent, 1, "a query always sees itself")
        mask = Causal() & (Window(recent) | Sinks(sinks))
        check_shared_rotary(project)
        super().__init__(project, output, mask=mask, scale=scale, softcap=softcap, sink=sink)
        self.sinks, self.recent = sinks, recent
        self._recent, self._pinned = (
            Causal() & Window(recent) & ~Sinks(sinks),
            Causal() & Sinks(sinks),
        )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, seen: Positions, backend: str
    ) -> Tensor:
        """One softmax while nothing is evicted; else one over the sinks and one over the rest,
        joined exactly.
        """
        evicted = self._evicted(q, positions)
        if evicted is None:
            return super()._attend(q, k, v, positions, seen, backend)
        far = rotate(q, -evicted, self._rotary.inv_freq, layout=self._rotary.layout)
        if not needed().isdisjoint(("scores", "pattern")):
            q, k = stack_query_forms(q, far, k, seen, self.sinks)
            return super()._attend(q, k, v, positions, seen, backend)
        over = partial(
            attend_partial,
            scale=self.scale,
            softcap=self.softcap,
            q_positions=positions,
            backend=backend,
        )
        rest = over(q, k, v, mask=self._recent, k_positions=seen)
        k, v, seen = slots_below(k, v, seen, self.sinks)
        pinned = over(far, k, v, mask=self._pinned, k_positions=seen)
        return merge([rest, pinned], sink=self.sink).out

    def _evicted(self, q: Tensor, positions: Positions) -> Tensor | None:
        """How many tokens in front of each query are gone, [B or 1, T]; None where it is known to
        be none.
        """
        kept = self.sinks + self.recent
        if self.sinks == 0 or (isinstance(positions, Span) and positions.stop <= kept):
            return None
        return (as_tensor(positions, q.device) - (kept - 1)).clamp(min=0)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """The steps of the projection; in the call that sees the sinks, the query is turned back
        by the tokens that were evicted, so that the sinks stand where the cache has them.
        """
        made = super().explain_inputs(query)
        if not query.call_index:
            return made
        evicted = (as_tensor(query.positions) - (self.sinks + self.recent - 1)).clamp(min=0)
        q = made.q[-1].values[None]
        back = rotate(q, -evicted.to(q.device), self._rotary.inv_freq, layout=self._rotary.layout)
        how = f"q_i ← R(-{int(evicted[0, query.row])}) q_i, the tokens that were evicted"
        return made._replace(q=(*made.q, ComputationStep("turned back", how, back[0])))

    @property
    def _rotary(self) -> Rotary:
        """The last step on queries and keys."""
        assert isinstance(self.project, SeparateQKV), "the constructor takes no other"
        step = self.project.q.steps[-1]
        assert isinstance(step, Rotary), "checked by the constructor"
        return step


def slots_below(k: Tensor, v: Tensor, seen: Positions, n: int) -> tuple[Tensor, Tensor, Positions]:
    """At most n slots among which all at positions below n are; others may fill them up."""
    if isinstance(seen, Span):
        stop = min(max(n - seen.start, 0), seen.length)
        return k[:, :, :stop], v[:, :, :stop], seen[:stop]
    there = torch.where((seen >= 0) & (seen < n), seen, n)
    slots = there.topk(min(n, seen.shape[1]), dim=1, largest=False).indices  # [B or 1, n]
    index = slots.to(k.device)[:, None, :, None].expand(k.shape[0], k.shape[1], -1, 1)
    return (
        k.gather(2, index.expand(-1, -1, -1, k.shape[3])),
        v.gather(2, index.expand(-1, -1, -1, v.shape[3])),
        seen.gather(1, slots),
    )


def stack_query_forms(
    q: Tensor, far: Tensor, k: Tensor, seen: Positions, n: int
) -> tuple[Tensor, Tensor]:
    """Both queries in one of twice the dims, and every key in the half that its query is for: one
    pattern, for a trace.

    q . k for a key at n or later and far . k for a sink, for the cost of twice the dims.
    """
    seen = as_tensor(seen, q.device).to(q.device)
    pinned = (seen < n)[:, None, :, None]
    halves = (torch.where(pinned, 0, k), torch.where(pinned, k, 0))
    return torch.cat((q, far), -1), torch.cat(halves, -1)


def check_shared_rotary(project: SeparateQKV) -> None:
    """Queries and keys end with one and the same rotary, whose frequencies stay.

    Raises:
        ArgumentError: they do not.
    """
    if not isinstance(project, SeparateQKV):
        raise ArgumentTypeError(f"project is {type(project).__name__}; it must be a SeparateQKV")
    ends = [heads.steps[-1] if len(heads.steps) else None for heads in (project.q, project.k)]
    if not isinstance(ends[0], Rotary) or ends[0] is not ends[1]:
        raise ArgumentError(
            f"the last step on queries is {ends[0]}, and on keys {ends[1]}; both must be one and "
            "the same Rotary: "
            "a query that looks at sinks is turned back"
        )
    if project.key_transform is not None:
        raise ArgumentError(
            f"project has the key_transform {project.key_transform}; keys are kept rotated here"
        )
    if project.cache_unsafe_reason:
        raise ArgumentError(project.cache_unsafe_reason)
