"""Rotary frequencies that follow the length, and a cache: what becomes of keys that were rotated for a shorter one.

`DynamicNTK`, `DynamicYaRN` and `LongRoPE` change the frequencies as a sequence grows. A key that was rotated with the
old ones, scored by a query that is rotated with the new, is no longer a function of their distance. Four policies:

=============  =============================  ===========================================  ==========================
policy         remembered                     cost of a step at n tokens                   equal to one pass at length n
=============  =============================  ===========================================  ==========================
"pre_rope"     keys before rotation           rotates n keys                               in one layer, the last query
"re_rotate"    rotated keys, and their length rotates n keys where frequencies changed,    in one layer, the last query
               (one number per token more)    else nothing
"frozen"       rotated keys                   nothing                                      the whole model, always: one
                                                                                           length for all positions
"recompute"    rotated keys, and their length the model over all n tokens again, where     the whole model, the last
               (one number per token more)    frequencies changed; else nothing            tokens (`regard.nn.Prefix`)
=============  =============================  ===========================================  ==========================

Under "pre_rope" and "re_rotate" a model of several layers does not equal one pass: what layer 1 gave for an early token
was computed at the length of that time, and layer 2 remembers it. No cache of keys can mend that; "recompute" starts
again, and "frozen" never changes. Frequencies follow each row's own largest key position, where `Rotary` with
length="current" takes the largest of the batch: here a row does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from regard.caches import Parts
from regard.errors import ArgumentError
from regard.nn.project import Heads, ProjectionShape, Separate
from regard.nn.row_rotary import RowRotary, by_row, lengths
from regard.positions import Rotary
from regard.span import Positions, as_tensor

Policy: TypeAlias = Literal["pre_rope", "re_rotate", "frozen", "recompute"]
"""What becomes of keys that were rotated for a shorter length."""


def rotary_heads(
    dim: int,
    heads: int,
    groups: int,
    head_dim: int,
    rotary: Rotary,
    *,
    policy: Policy = "pre_rope",
    q_steps: Sequence[nn.Module] = (),
    k_steps: Sequence[nn.Module] = (),
    value_dim: int | None = None,
    bias: bool = False,
) -> Separate:
    """Rotary queries, keys and values under a policy for a cache; all policies have the same parameters.

    Args:
        dim, heads, groups, head_dim: M, H, G and D.
        rotary: with length="current" where its scaling depends on the length; with a number for "frozen".
        policy: above.
        q_steps, k_steps: steps on queries and keys in front of the rotation, such as norms.
        value_dim: E; None is D.
        bias: whether the linear maps have one.

    Raises:
        ArgumentError: the policy is unknown, the rotary is for another head dim, or its length is not one for the policy;
            or what `Separate` refuses.

    >>> from regard.positions import DynamicNTK
    >>> rotary = Rotary(8, scaling=DynamicNTK(2.0, 16), length="current")
    >>> project = rotary_heads(32, 4, 2, 8, rotary, policy="re_rotate")
    >>> project.stale, project.shape.memory
    (None, (16, 16, 1))

    Source: section 3.3 of Peng et al. 2023 (arXiv 2309.00071): cache keys before they are rotated.
    """
    if policy not in get_args(Policy):
        raise ArgumentError(
            f"policy is {policy!r}; it must be one of {', '.join(get_args(Policy))}"
        )
    if rotary.dim != head_dim:
        raise ArgumentError(f"rotary is for heads of {rotary.dim}, and head_dim is {head_dim}")
    needs = rotary.scaling is not None and rotary.scaling.needs_length
    if needs and rotary.follows == (policy == "frozen"):
        wanted = "length=<number>" if policy == "frozen" else 'length="current"'
        raise ArgumentError(f"{rotary} does not go with policy {policy!r}; make it with {wanted}")
    last = (rotary,) if policy == "frozen" else ()
    q = Heads(dim, heads, head_dim, *q_steps, *last, bias=bias)
    k = Heads(dim, groups, head_dim, *k_steps, *last, bias=bias)
    v = Heads(dim, groups, value_dim or head_dim, bias=bias)
    if policy == "frozen":
        return Separate(q, k, v)
    kinds = {"pre_rope": PreRope, "re_rotate": ReRotate, "recompute": Recomputed}
    return kinds[policy](q, k, v, RowRotary(rotary))


class PreRope(Separate):
    """Keys are remembered before rotation, and rotated on recall with the frequencies of the length of that moment.

    For one layer with given keys and values, what the last query finds equals one pass at its length. See the module.

    Args:
        q, k, v: `Heads` without a rotary.
        rotary: the rotary.

    >>> from regard.span import Span
    >>> rotary = RowRotary(Rotary(4))
    >>> project = PreRope(Heads(8, 4, 4), Heads(8, 2, 4), Heads(8, 2, 4), rotary)
    >>> x = torch.randn(1, 3, 8)
    >>> torch.equal(project.remember(x, Span(5, 3))[0], project.k(x, None))
    True
    """

    late: RowRotary

    def __init__(self, q: Heads, k: Heads, v: Heads, rotary: RowRotary) -> None:
        super().__init__(q, k, v, late=rotary)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """q [B,H,T,D], rotated for the length that the call itself shows."""
        return self.late(self.q(x, positions), _given(positions))

    def aim(self, q: Tensor, positions: Positions, seen: Positions) -> Tensor:
        """Queries rotated with the frequencies of the largest key position, where that is another length than their own."""
        old, new = lengths(positions), lengths(seen)
        rows = max(len(old), len(new))
        if by_row(old, rows) == by_row(new, rows):
            return q
        return self.late.again(q, positions, torch.tensor(old, device=q.device)[:, None], new)


class ReRotate(PreRope):
    """Keys are remembered rotated, with the length that they were rotated for; recall turns them by R(new - old).

    Equal to `PreRope` in real arithmetic. While the frequencies stay (up to the trained length), recall costs nothing.
    What is remembered is never replaced, so that roundings do not add up.

    Args:
        q, k, v, rotary: as `PreRope`.

    >>> from regard.span import Span
    >>> project = ReRotate(Heads(8, 4, 4), Heads(8, 2, 4), Heads(8, 2, 4), RowRotary(Rotary(4)))
    >>> [m.shape for m in project.remember(torch.randn(1, 3, 8), Span(5, 3))]
    [torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 3, 4]), torch.Size([1, 1, 3, 1])]
    """

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """k [B,G,S,D] rotated, v [B,G,S,E], and the length [B,1,S,1] that k was rotated for."""
        positions = _given(positions)
        k, v = super().remember(x, positions)
        length = torch.tensor(lengths(positions), device=x.device)[:, None, None, None]
        return self.late(k, positions), v, length.expand(x.shape[0], 1, x.shape[1], 1)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys as one pass would rotate them now, and values."""
        k, v, length = memory
        positions = _given(positions)
        return self.late.again(k, positions, length[:, 0, :, 0], lengths(positions)), v

    @property
    def shape(self) -> ProjectionShape:
        """As `Separate`, and one number per token more."""
        whole = super().shape
        return whole._replace(memory=(*whole.memory, 1))


class Recomputed(ReRotate):
    """Keys are remembered rotated, and refused once the frequencies have changed: the prefix has to be run again (`regard.nn.Prefix`).

    Args:
        q, k, v, rotary: as `PreRope`.

    Raises:
        ArgumentError: from `recall`, when a key was rotated with other frequencies than those of the length now.

    >>> from regard.span import Span
    >>> project = Recomputed(Heads(8, 4, 4), Heads(8, 2, 4), Heads(8, 2, 4), RowRotary(Rotary(4)))
    >>> memory = project.remember(torch.randn(1, 3, 8), Span(0, 3))
    >>> torch.equal(project.recall(memory, Span(0, 3))[0], memory[0])
    True
    """

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys and values as they were remembered."""
        k, v, length = memory
        positions = _given(positions)
        now = lengths(positions)
        if not all(self.late.same(0, n) for n in now):
            held = torch.where(as_tensor(positions, k.device) >= 0, length[:, 0, :, 0], -1)
            for row, n in zip(held.tolist(), by_row(now, len(held)), strict=True):
                for old in set(row) - {-1}:
                    if not self.late.same(old, n):
                        raise ArgumentError(
                            f"a key was rotated for length {old}, and the frequencies of length {n} are others; run the whole "
                            "prefix again (regard.nn.Prefix), or choose another policy"
                        )
        return k, v


def _given(positions: Positions | None) -> Positions:
    if positions is None:
        raise ArgumentError("positions are None; rotary heads need them")
    return positions
