"""Rotary embeddings whose frequencies follow the length, and policies for cached keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.argument_checks import check_choice
from regard.caches import Cache, Parts
from regard.errors import ArgumentError
from regard.nn.projections.heads import HeadProjection, ProjectionShape, SeparateQKV
from regard.positions import Rotary, rope_frequencies
from regard.positions.rotary import apply_rotary
from regard.positions.scalings import Scaling
from regard.span import Positions, Span, as_tensor, concat_positions, next_positions

RowLengths: TypeAlias = tuple[int, ...]
"""One more than the largest position of each row; a single number if all rows share positions."""


def row_lengths(positions: Positions) -> RowLengths:
    """Return one more than the largest position of each row, at least 0."""
    if isinstance(positions, Span):
        return (max(0, positions.stop) if positions.length else 0,)
    if not positions.shape[1]:
        return (0,) * positions.shape[0]
    return tuple((positions.amax(1) + 1).clamp(min=0).tolist())


def broadcast_lengths(lengths: RowLengths, rows: int) -> RowLengths:
    """Repeat a single length for every row."""
    return lengths * rows if len(lengths) == 1 else lengths


def frequencies_change(module: nn.Module, old: RowLengths, new: RowLengths) -> bool:
    """Return whether a rotary of a module has other frequencies for the new lengths."""
    rows = max(len(old), len(new))
    pairs = set(zip(broadcast_lengths(old, rows), broadcast_lengths(new, rows), strict=True))
    rotaries = [m for m in module.modules() if isinstance(m, PerRowRotary)]
    return any(not rotary.same_frequencies(a, b) for rotary in rotaries for a, b in pairs)


class PerRowRotary(nn.Module):
    """A rotary embedding with the frequencies of the length of each row of the batch.

    angle = position * inv_freq_i(length of the row)
    """

    static_step_refusal = "reads the length of each row, on which its frequencies depend"
    """Why a step cannot be captured as a CUDA graph, as words that follow the name of the class."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Rotate x [B,H,L,D] by its positions, with each row's frequencies."""
        inv_freq, factor = self._table(row_lengths(positions))
        return self._rotate(x, positions, inv_freq[:, None], factor[:, None])

    def rerotate(
        self,
        x: Float[Tensor, "B H L D"],
        positions: Positions,
        old: Int[Tensor, "b L"] | Int[Tensor, "b 1"],
        new: RowLengths,
    ) -> Float[Tensor, "B H L D"]:
        """Rotate x further: R(p f_new) = R(p (f_new - f_old)) R(p f_old), from lengths `old` to
        `new`.
        """
        # Once frequencies have changed, they never return to those of length 0. If the new lengths
        # have those, then so have the old lengths, which are shorter.
        if all(self.same_frequencies(0, n) for n in new):
            return x
        lengths, index = torch.unique(old, return_inverse=True)
        old_freq, old_factor = self._table(tuple(lengths.tolist()))
        new_freq, new_factor = self._table(new)
        difference = new_freq[:, None] - old_freq[index.to(old_freq.device)]
        ratio = new_factor[:, None] / old_factor[index.to(old_factor.device)]
        return self._rotate(x, positions, difference, ratio)

    def same_frequencies(self, old: int, new: int) -> bool:
        """Return whether the frequencies and the rotary factor are the same for two lengths."""
        (first, a), (second, b) = self._frequencies(old), self._frequencies(new)
        return a == b and torch.equal(first, second)

    def _rotate(self, x: Tensor, positions: Positions, inv_freq: Tensor, factor: Tensor) -> Tensor:
        """Rotate x by position * inv_freq [b,L or 1,n], in fp64, times factor [b,L or 1]."""
        device = torch.device("cpu") if x.device.type == "mps" else x.device  # mps has no fp64
        p = as_tensor(positions, device).to(device, torch.float64)
        angle, factor = p[..., None] * inv_freq.to(device), factor.to(device)[..., None]
        cos, sin = ((y * factor)[:, None].to(x.device, x.dtype) for y in (angle.cos(), angle.sin()))
        return apply_rotary(x, cos, sin, self.rotary.layout)

    def _table(self, rows: RowLengths) -> tuple[Tensor, Tensor]:
        """Return inv_freq [R,n] and the factor [R] of R lengths, in fp64."""
        inv_freq, factor = zip(*(self._frequencies(n) for n in rows), strict=True)
        return torch.stack(inv_freq), torch.tensor(factor, dtype=torch.float64, device="cpu")

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        """Return the frequencies and the factor of one length."""
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
    """Return the frequencies and the rotary factor of a scheme at one length."""
    frequencies = rope_frequencies(
        dim, base, scaling=scaling, rotary_dim=rotary_dim, proportional=proportional, length=length
    )
    return frequencies.inv_freq, frequencies.rotary_factor


KeyPolicy: TypeAlias = Literal["pre_rope", "re_rotate", "frozen", "recompute"]
"""The treatment of cached keys that were rotated for a shorter length; see `rotary_projection`."""


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
    """Build a projection whose rotary may follow the length, with a policy for cached keys.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G.
        head_dim: the head dim D.
        rotary: the rotary embedding, with length="current" if its scaling depends on the length
            (length=<number> for "frozen").
        policy: for cached keys, when frequencies change. "pre_rope": they are cached before
            rotation; "re_rotate": they are rotated further; "frozen": frequencies never change;
            "recompute": an error, and `PrefixRecomputer` runs the prefix again.
        q_steps, k_steps: steps before the rotation, such as norms.
        value_dim: the value dim E; None is D.
        bias: whether the linear maps have a bias.

    Returns:
        The projection.

    Raises:
        ArgumentError: the policy is unknown, or the rotary or the heads do not suit it.

    >>> from regard.positions import DynamicNTK
    >>> rotary = Rotary(8, scaling=DynamicNTK(2.0, 16), length="current")
    >>> project = rotary_projection(32, 4, 2, 8, rotary, policy="re_rotate")
    >>> project.cache_unsafe_reason, project.shape.memory
    (None, (16, 16, 1))

    Source: section 3.3 of Peng et al. 2023 (arXiv 2309.00071): cache keys before they are rotated.
    """
    check_choice("policy", policy, get_args(KeyPolicy))
    if rotary.dim != head_dim:
        raise ArgumentError(f"rotary has dim {rotary.dim}; it must be the head_dim {head_dim}")
    needs_length = rotary.scaling is not None and rotary.scaling.needs_length
    if needs_length and rotary.follows_length == (policy == "frozen"):
        length = "length=<number>" if policy == "frozen" else 'length="current"'
        raise ArgumentError(f"{rotary} does not suit policy {policy!r}; construct it with {length}")
    rotary_step = (rotary,) if policy == "frozen" else ()
    q = HeadProjection(dim, heads, head_dim, *q_steps, *rotary_step, bias=bias)
    k = HeadProjection(dim, groups, head_dim, *k_steps, *rotary_step, bias=bias)
    v = HeadProjection(dim, groups, value_dim or head_dim, bias=bias)
    if policy == "frozen":
        return SeparateQKV(q, k, v)
    classes = {"pre_rope": PreRopeQKV, "re_rotate": ReRotatedQKV, "recompute": RecomputedQKV}
    return classes[policy](q, k, v, PerRowRotary(rotary))


class PreRopeQKV(SeparateQKV):
    """A projection that caches keys before rotation: the last query gets one call's result."""

    key_transform: PerRowRotary

    def __init__(
        self, q: HeadProjection, k: HeadProjection, v: HeadProjection, rotary: PerRowRotary
    ) -> None:
        super().__init__(q, k, v, key_transform=rotary)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return queries [B,H,T,D], rotated for the largest position of the call."""
        result: Tensor = self.key_transform(self.q(x, positions), _require_positions(positions))
        return result

    def adjust_query(self, q: Tensor, positions: Positions, k_positions: Positions) -> Tensor:
        """Rotate queries further to the frequencies for the largest key position."""
        old, new = row_lengths(positions), row_lengths(k_positions)
        rows = max(len(old), len(new))
        if broadcast_lengths(old, rows) == broadcast_lengths(new, rows):
            return q
        return self.key_transform.rerotate(
            q, positions, torch.tensor(old, device=q.device)[:, None], new
        )


class ReRotatedQKV(PreRopeQKV):
    """A projection that caches rotated keys with their length. When read, they are rotated further
    by R(new - old), which equals `PreRopeQKV` in real arithmetic, and costs nothing up to the
    trained length.
    """

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return rotated keys [B,G,S,D], values [B,G,S,E], and the lengths [B,1,S,1]."""
        positions = _require_positions(positions)
        k, v = super().remember(x, positions)
        length = torch.tensor(row_lengths(positions), device=x.device)[:, None, None, None]
        return self.key_transform(k, positions), v, length.expand(x.shape[0], 1, x.shape[1], 1)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the keys, rotated further for the present length, and the values."""
        k, v, length = memory
        positions = _require_positions(positions)
        return self.key_transform.rerotate(
            k, positions, length[:, 0, :, 0], row_lengths(positions)
        ), v

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of a `SeparateQKV`, with one more cached value per token for the length."""
        shape = super().shape
        return shape._replace(memory=(*shape.memory, 1))


class RecomputedQKV(ReRotatedQKV):
    """A projection that caches rotated keys, and raises once they are out of date."""

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return keys and values as they were stored."""
        k, v, length = memory
        positions = _require_positions(positions)
        now = row_lengths(positions)
        if not all(self.key_transform.same_frequencies(0, n) for n in now):
            rotated_for = torch.where(as_tensor(positions, k.device) >= 0, length[:, 0, :, 0], -1)
            for row, n in zip(
                rotated_for.tolist(), broadcast_lengths(now, len(rotated_for)), strict=True
            ):
                for old in set(row) - {-1}:
                    if not self.key_transform.same_frequencies(old, n):
                        raise ArgumentError(
                            f"a cached key was rotated for length {old}, but length {n} has other "
                            "frequencies; run the whole prefix again "
                            "(regard.nn.PrefixRecomputer), or choose another policy"
                        )
        return k, v


def _require_positions(positions: Positions | None) -> Positions:
    """Return the positions, or raise an `ArgumentError` if they are None."""
    if positions is None:
        raise ArgumentError(
            "positions is None; a projection with rotary positions needs them: pass a Span or "
            "integers [batch, length]"
        )
    return positions


class PrefixRecomputer:
    """A model with its caches, for the policy "recompute" of `rotary_projection`.

    The logits of every call equal those of one pass. A call that changes the frequencies runs the
    whole prefix: once with `LongRoPE`, but with `DynamicNTK` for every token after the trained
    length.

    Args:
        model: a `Decoder`, or another module with the same `forward` and `new_caches`.

    Attributes:
        caches: the caches of the prefix so far.
        reruns: how often the prefix was run again.

    >>> from regard.models.decoder import Decoder
    >>> from regard.nn.blocks.embedding import InputEmbedding
    >>> embed = InputEmbedding(nn.Embedding(7, 4))
    >>> prefix = PrefixRecomputer(Decoder(embed, [], nn.Identity(), nn.Linear(4, 7)))
    >>> prefix(torch.tensor([[1, 2]]), Span(0, 2)).shape, prefix.reruns
    (torch.Size([1, 2, 7]), 0)

    Source: the code released with Phi-3 (arXiv 2404.14219), which drops its cache.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.reruns = model, 0
        self.caches: list[Cache] = model.new_caches()  # type: ignore[operator]
        self._ids: Tensor | None = None
        self._positions: Positions = Span(0, 0)

    def __call__(
        self, ids: Int[Tensor, "B T"], positions: Positions | None = None, **options: object
    ) -> Tensor:
        """Append tokens to the prefix and return the logits after each of them."""
        T = ids.shape[1]
        positions = next_positions(self._positions, T) if positions is None else positions
        logits: Tensor
        if self._ids is None:
            logits = self.model(ids, positions, self.caches, **options)
            all_ids, all_positions = ids, positions
        else:
            all_ids, all_positions = (
                torch.cat([self._ids, ids], 1),
                concat_positions(self._positions, positions),
            )
            if frequencies_change(
                self.model, row_lengths(self._positions), row_lengths(all_positions)
            ):
                caches = self.model.new_caches()  # type: ignore[operator]
                logits = self.model(all_ids, all_positions, caches, **options)[:, -T:]
                self.caches, self.reruns = caches, self.reruns + 1
            else:
                logits = self.model(ids, positions, self.caches, **options)
        self._ids, self._positions = all_ids, all_positions
        return logits

    def fork(self) -> PrefixRecomputer:
        """Copy the prefix.

        Returns:
            A copy for the same model; appending tokens to one does not change the other.
        """
        copy = type(self)(self.model)
        copy.caches = [cache.fork() for cache in self.caches]
        copy._ids, copy._positions = self._ids, self._positions
        return copy

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep some rows of the batch, in the given order, as `Cache.select` does.

        Args:
            rows: the indices of the rows.
        """
        for cache in self.caches:
            cache.select(rows)
        if self._ids is None:
            return
        batch = self._ids.shape[0]
        self._ids = self._ids[rows.to(self._ids.device)]
        if isinstance(self._positions, Tensor) and self._positions.shape[0] == batch:
            self._positions = self._positions[rows.to(self._positions.device)]
