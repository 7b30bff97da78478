"""Rotary embeddings whose frequencies depend on the length of the text, used together with a
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.caches import Cache, Parts
from regard.errors import ArgumentError
from regard.nn.projections import HeadProjection, ProjectionShape, SeparateQKV
from regard.positions import Rotary, rope_frequencies
from regard.positions.rotary import apply_rotary
from regard.positions.scalings import Scaling
from regard.span import Positions, Span, after, as_tensor, follow

RowLengths: TypeAlias = tuple[int, ...]
"""One past the largest position of each row; one number where all rows have the same positions."""


def row_lengths(positions: Positions) -> RowLengths:
    """One past the largest position of each row, at least 0.

    >>> row_lengths(Span(3, 4)), row_lengths(torch.tensor([[-1, 0, 1], [4, 5, 6]]))
    ((7,), (2, 7))
    """
    if isinstance(positions, Span):
        return (max(0, positions.stop) if positions.length else 0,)
    if not positions.shape[1]:
        return (0,) * positions.shape[0]
    return tuple((positions.amax(1) + 1).clamp(min=0).tolist())


def broadcast_lengths(lengths: RowLengths, rows: int) -> RowLengths:
    """A length for each row.

    >>> broadcast_lengths((5,), 2)
    (5, 5)
    """
    return lengths * rows if len(lengths) == 1 else lengths


def frequencies_change(module: nn.Module, old: RowLengths, new: RowLengths) -> bool:
    """Whether a rotary of the module has other frequencies for the new lengths of the rows than for
    the old.

    >>> from regard.positions import LongRoPE
    >>> scaling = LongRoPE((1.0, 2.0), (4.0, 8.0), 16, 2.0)
    >>> rotary = PerRowRotary(Rotary(4, scaling=scaling, length="current"))
    >>> [frequencies_change(rotary, (n,), (n + 1,)) for n in (8, 16, 17)]
    [False, True, False]
    """
    rows = max(len(old), len(new))
    pairs = set(zip(broadcast_lengths(old, rows), broadcast_lengths(new, rows), strict=True))
    rotaries = [m for m in module.modules() if isinstance(m, PerRowRotary)]
    return any(not rotary.same_frequencies(a, b) for rotary in rotaries for a, b in pairs)


class PerRowRotary(nn.Module):
    """A rotary whose frequencies are those of the length of each row.

    angle = position * inv_freq_i(length of the row)

    Args:
        rotary: the scheme; its own length plays no part.

    >>> from regard.positions import DynamicNTK
    >>> turned = PerRowRotary(Rotary(4, scaling=DynamicNTK(2.0, 4), length="current"))
    >>> x = torch.ones(2, 1, 2, 4)
    >>> both = turned(x, torch.tensor([[2, 3], [8, 9]]))
    >>> torch.equal(both[:1], turned(x[:1], torch.tensor([[2, 3]])))
    True
    """

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Turn x by its positions, with the frequencies of the largest position of each row."""
        inv_freq, factor = self._table(row_lengths(positions))
        return self._turn(x, positions, inv_freq[:, None], factor[:, None])

    def rerotate(
        self,
        x: Float[Tensor, "B H L D"],
        positions: Positions,
        old: Int[Tensor, "b L"] | Int[Tensor, "b 1"],
        new: RowLengths,
    ) -> Float[Tensor, "B H L D"]:
        """x was turned for the lengths `old`: turn it by what is missing to those of its rows now.

        R(p f_new) = R(p (f_new - f_old)) R(p f_old), in real arithmetic; x is rounded once more.
        """
        if all(
            self.same_frequencies(0, n) for n in new
        ):  # frequencies that changed do not come back
            return x
        known, where = torch.unique(old, return_inverse=True)
        before, scale = self._table(tuple(known.tolist()))
        after, factor = self._table(new)
        turned = after[:, None] - before[where.to(before.device)]
        return self._turn(x, positions, turned, factor[:, None] / scale[where.to(scale.device)])

    def same_frequencies(self, old: int, new: int) -> bool:
        """Whether two lengths have the same frequencies and factor."""
        (first, a), (second, b) = self._frequencies(old), self._frequencies(new)
        return a == b and torch.equal(first, second)

    def _turn(self, x: Tensor, positions: Positions, inv_freq: Tensor, factor: Tensor) -> Tensor:
        """By position * inv_freq [b,L or 1,n], times factor [b,L or 1]; angles in fp64."""
        device = torch.device("cpu") if x.device.type == "mps" else x.device  # mps has no fp64
        p = as_tensor(positions, device).to(device, torch.float64)
        angle, factor = p[..., None] * inv_freq.to(device), factor.to(device)[..., None]
        cos, sin = ((y * factor)[:, None].to(x.device, x.dtype) for y in (angle.cos(), angle.sin()))
        return apply_rotary(x, cos, sin, self.rotary.layout)

    def _table(self, rows: RowLengths) -> tuple[Tensor, Tensor]:
        """inv_freq [R,n] and factor [R] of so many lengths, fp64."""
        inv_freq, factor = zip(*(self._frequencies(n) for n in rows), strict=True)
        return torch.stack(inv_freq), torch.tensor(factor, dtype=torch.float64)

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        r = self.rotary
        return _cached_frequencies(
            r.dim, r.base, r.scaling, r.rotary_dim, proportional=r.proportional, length=length
        )


@lru_cache(maxsize=1 << 16)
def _cached_frequencies(
    dim: int,
    base: float,
    scaling: Scaling | None,
    rotary_dim: int | None,
    *,
    proportional: bool,
    length: int,
) -> tuple[Tensor, float]:
    found = rope_frequencies(
        dim, base, scaling=scaling, rotary_dim=rotary_dim, proportional=proportional, length=length
    )
    return found.inv_freq, found.rotary_factor


KeyPolicy: TypeAlias = Literal["pre_rope", "re_rotate", "frozen", "recompute"]
"""What becomes of keys that were rotated for a shorter length."""


def rotary_projection(
    dim: int,
    heads: int,
    groups: int,
    head_dim: int,
    rotary: Rotary,
    *,
    policy: KeyPolicy = "pre_rope",
    q_steps: Sequence[nn.Module] = (),
    k_steps: Sequence[nn.Module] = (),
    value_dim: int | None = None,
    bias: bool = False,
) -> SeparateQKV:
    """Rotary queries, keys and values under a policy for a cache; all policies have the same
    parameters.

    Args:
        dim, heads, groups, head_dim: M, H, G and D.
        rotary: with length="current" where its scaling depends on the length; with a number for
            "frozen".
        policy: above.
        q_steps, k_steps: steps on queries and keys in front of the rotation, such as norms.
        value_dim: E; None is D.
        bias: whether the linear maps have one.

    Raises:
        ArgumentError: the policy is unknown, the rotary is for another head dim, or its length is
            not one for the policy; or what `SeparateQKV` refuses.

    >>> from regard.positions import DynamicNTK
    >>> rotary = Rotary(8, scaling=DynamicNTK(2.0, 16), length="current")
    >>> project = rotary_projection(32, 4, 2, 8, rotary, policy="re_rotate")
    >>> project.cache_unsafe_reason, project.shape.memory
    (None, (16, 16, 1))

    Source: section 3.3 of Peng et al. 2023 (arXiv 2309.00071): cache keys before they are rotated.
    """
    if policy not in get_args(KeyPolicy):
        raise ArgumentError(
            f"policy is {policy!r}; it must be one of {', '.join(get_args(KeyPolicy))}"
        )
    if rotary.dim != head_dim:
        raise ArgumentError(f"rotary is for heads of {rotary.dim}, and head_dim is {head_dim}")
    needs = rotary.scaling is not None and rotary.scaling.needs_length
    if needs and rotary.follows_length == (policy == "frozen"):
        wanted = "length=<number>" if policy == "frozen" else 'length="current"'
        raise ArgumentError(f"{rotary} does not go with policy {policy!r}; make it with {wanted}")
    last = (rotary,) if policy == "frozen" else ()
    q = HeadProjection(dim, heads, head_dim, *q_steps, *last, bias=bias)
    k = HeadProjection(dim, groups, head_dim, *k_steps, *last, bias=bias)
    v = HeadProjection(dim, groups, value_dim or head_dim, bias=bias)
    if policy == "frozen":
        return SeparateQKV(q, k, v)
    kinds = {"pre_rope": PreRopeQKV, "re_rotate": ReRotatedQKV, "recompute": RecomputedQKV}
    return kinds[policy](q, k, v, PerRowRotary(rotary))


class PreRopeQKV(SeparateQKV):
    """Keys are remembered before rotation, and rotated on recall with the frequencies of the length
    of that moment.

    For one layer with given keys and values, what the last query finds equals one pass at its
    length. See the module.

    Args:
        q, k, v: `HeadProjection` without a rotary.
        rotary: the rotary.

    >>> from regard.span import Span
    >>> rotary = PerRowRotary(Rotary(4))
    >>> project = PreRopeQKV(HeadProjection(8, 4, 4), HeadProjection(8, 2, 4), HeadProjection(8, 2, 4), rotary)
    >>> x = torch.randn(1, 3, 8)
    >>> torch.equal(project.remember(x, Span(5, 3))[0], project.k(x, None))
    True
    """

    key_transform: PerRowRotary

    def __init__(
        self, q: HeadProjection, k: HeadProjection, v: HeadProjection, rotary: PerRowRotary
    ) -> None:
        super().__init__(q, k, v, key_transform=rotary)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """q [B,H,T,D], rotated for the length that the call itself shows."""
        result: Tensor = self.key_transform(self.q(x, positions), _require_positions(positions))
        return result

    def adjust_query(self, q: Tensor, positions: Positions, seen: Positions) -> Tensor:
        """Queries rotated with the frequencies of the largest key position, where that is another
        length than their own.
        """
        old, new = row_lengths(positions), row_lengths(seen)
        rows = max(len(old), len(new))
        if broadcast_lengths(old, rows) == broadcast_lengths(new, rows):
            return q
        return self.key_transform.rerotate(
            q, positions, torch.tensor(old, device=q.device)[:, None], new
        )


class ReRotatedQKV(PreRopeQKV):
    """Keys are remembered rotated, with the length that they were rotated for; recall turns them by
    R(new - old).

    Equal to `PreRopeQKV` in real arithmetic. While the frequencies stay (up to the trained length),
    recall costs nothing. What is remembered is never replaced, so that roundings do not add up.

    Args:
        q, k, v, rotary: as `PreRopeQKV`.

    >>> from regard.span import Span
    >>> project = ReRotatedQKV(HeadProjection(8, 4, 4), HeadProjection(8, 2, 4), HeadProjection(8, 2, 4), PerRowRotary(Rotary(4)))
    >>> [m.shape for m in project.remember(torch.randn(1, 3, 8), Span(5, 3))]
    [torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 3, 4]), torch.Size([1, 1, 3, 1])]
    """

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """k [B,G,S,D] rotated, v [B,G,S,E], and the length [B,1,S,1] that k was rotated for."""
        positions = _require_positions(positions)
        k, v = super().remember(x, positions)
        length = torch.tensor(row_lengths(positions), device=x.device)[:, None, None, None]
        return self.key_transform(k, positions), v, length.expand(x.shape[0], 1, x.shape[1], 1)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys as one pass would rotate them now, and values."""
        k, v, length = memory
        positions = _require_positions(positions)
        return self.key_transform.rerotate(
            k, positions, length[:, 0, :, 0], row_lengths(positions)
        ), v

    @property
    def shape(self) -> ProjectionShape:
        """As `SeparateQKV`, and one number per token more."""
        whole = super().shape
        return whole._replace(memory=(*whole.memory, 1))


class RecomputedQKV(ReRotatedQKV):
    """Keys are remembered rotated, and refused once the frequencies have changed: the prefix has to
    be run again (`regard.nn.PrefixRecomputer`).

    Args:
        q, k, v, rotary: as `PreRopeQKV`.

    Raises:
        ArgumentError: from `recall`, when a key was rotated with other frequencies than those of
            the length now.

    >>> from regard.span import Span
    >>> project = RecomputedQKV(HeadProjection(8, 4, 4), HeadProjection(8, 2, 4), HeadProjection(8, 2, 4), PerRowRotary(Rotary(4)))
    >>> memory = project.remember(torch.randn(1, 3, 8), Span(0, 3))
    >>> torch.equal(project.recall(memory, Span(0, 3))[0], memory[0])
    True
    """

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys and values as they were remembered."""
        k, v, length = memory
        positions = _require_positions(positions)
        now = row_lengths(positions)
        if not all(self.key_transform.same_frequencies(0, n) for n in now):
            held = torch.where(as_tensor(positions, k.device) >= 0, length[:, 0, :, 0], -1)
            for row, n in zip(held.tolist(), broadcast_lengths(now, len(held)), strict=True):
                for old in set(row) - {-1}:
                    if not self.key_transform.same_frequencies(old, n):
                        raise ArgumentError(
                            f"a key was rotated for length {old}, and the frequencies of length "
                            f"{n} are others; run the whole "
                            "prefix again (regard.nn.Prefix), or choose another policy"
                        )
        return k, v


def _require_positions(positions: Positions | None) -> Positions:
    if positions is None:
        raise ArgumentError("positions are None; rotary heads need them")
    return positions


class PrefixRecomputer:
    """A model and its caches under the policy "recompute" (`regard.nn.dynamic_rotary`): the whole
    prefix is run again whenever the frequencies change.

    For every call, the logits of its tokens equal those of one pass over the prefix. A call whose
    length changes the frequencies costs a pass over all n tokens: with `LongRoPE` once, at L -> L +
    1; with `DynamicNTK` at every token behind L, so that N tokens cost about N^2 / 2 tokens of
    work. A call that raises changes nothing.

    Args:
        model: a `Decoder`, or what has its `forward` and `new_caches`.

    Attributes:
        caches: those of the prefix so far.
        reruns: how often the prefix was run again.

    >>> from regard.models.decoder import Decoder
    >>> from regard.nn.embedding import InputEmbedding
    >>> prefix = PrefixRecomputer(Decoder(InputEmbedding(nn.Embedding(7, 4)), [], nn.Identity(), nn.Linear(4, 7)))
    >>> prefix(torch.tensor([[1, 2]]), Span(0, 2)).shape, prefix.reruns
    (torch.Size([1, 2, 7]), 0)

    Source: the code released with Phi-3 (arXiv 2404.14219) drops its cache when LongRoPE changes
    lists.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.reruns = model, 0
        self.caches: list[Cache] = model.new_caches()  # type: ignore[operator]
        self._ids: Tensor | None = None
        self._positions: Positions = Span(0, 0)

    def __call__(
        self, ids: Int[Tensor, "B T"], positions: Positions | None = None, **options: Any
    ) -> Tensor:
        """Logits [B,T,V] for the token after each of ids [B,T], which continue the prefix; options
        are the model's.
        """
        T = ids.shape[1]
        positions = after(self._positions, T) if positions is None else positions
        logits: Tensor
        if self._ids is None:
            logits = self.model(ids, positions, self.caches, **options)
            whole, where = ids, positions
        else:
            whole, where = torch.cat([self._ids, ids], 1), follow(self._positions, positions)
            if frequencies_change(self.model, row_lengths(self._positions), row_lengths(where)):
                caches = self.model.new_caches()  # type: ignore[operator]
                logits = self.model(whole, where, caches, **options)[:, -T:]
                self.caches, self.reruns = caches, self.reruns + 1
            else:
                logits = self.model(ids, positions, self.caches, **options)
        self._ids, self._positions = whole, where
        return logits

    def fork(self) -> PrefixRecomputer:
        """Another prefix of the same model; what is done to one does not change the other."""
        other = type(self)(self.model)
        other.caches = [cache.fork() for cache in self.caches]
        other._ids, other._positions = self._ids, self._positions
        return other

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows of the batch, in this order, as `Cache.select` does."""
        for cache in self.caches:
            cache.select(rows)
        if self._ids is None:
            return
        batch = self._ids.shape[0]
        self._ids = self._ids[rows.to(self._ids.device)]
        if isinstance(self._positions, Tensor) and self._positions.shape[0] == batch:
            self._positions = self._positions[rows.to(self._positions.device)]
