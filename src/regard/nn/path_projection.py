"""Projections whose scores depend on other tokens than the pair: products of reflections between a
key and a query (PaTH), and keys that earlier queries masked (selective attention).

Both compute what they add to the plain score as a bias, in one dense table for a call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.biases import Bias, DenseBias
from regard.caches import Parts
from regard.errors import ArgumentError
from regard.nn.data_bias import ProjectionWithMemory
from regard.nn.linear import Linear
from regard.nn.projections import HeadProjection, ProjectionShape
from regard.process_state import is_exporting_onnx
from regard.scores.base import stable_argsort
from regard.span import Positions, as_tensor


def path_scores(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, q_at: Tensor, k_at: Tensor
) -> Tensor:
    """Compute the scores of PaTH without the scale: q_i^T H_i ... H_{j+1} k_j, with the reflections
    H_t = I - beta_t w_t w_t^T of the tokens after j up to i.

    The product is never formed. The vectors w of all tokens are made independent of one another by
    one triangular system X (I + L) = Q W^T, where L has the products beta_t w_t . w_l of earlier
    tokens l; X Diag(beta) W K^T is what the reflections take from the scores.

    >>> one = torch.ones(1, 1, 2, 1)
    >>> q_at = torch.arange(2)[None]
    >>> path_scores(one, one, one, torch.full((1, 1, 2), 0.5), q_at, q_at)[0, 0].tolist()
    [[1.0, 1.0], [0.5, 1.0]]

    Source: Yang et al. 2025 (arXiv 2505.16381), section 3.2.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, w, beta = (x.to(wide) for x in (q, k, w, beta))
    S = k.shape[2]
    system = (beta[..., None] * (w @ w.transpose(-1, -2))).tril(-1) + torch.eye(
        S, dtype=wide, device=q.device
    )
    # what token l takes from key j on the way to later tokens, j before l
    taken = (beta[..., None] * (w @ k.transpose(-1, -2))).tril(-1)
    is_visible = k_at[:, None, None, :] <= q_at[:, None, :, None]
    of_query = torch.where(is_visible, q @ w.transpose(-1, -2), 0)
    # the system is solved for the queries, of which a decoding step has one
    solved = torch.linalg.solve_triangular(
        system, of_query, upper=False, left=False, unitriangular=True
    )
    scores: Tensor = q @ k.transpose(-1, -2) - solved @ taken
    return scores


class PathProjection(ProjectionWithMemory):
    """A projection with PaTH positions: every token reflects the keys before it.

    s_ij = scale q_i^T H_i ... H_{j+1} k_j, H_t = I - beta_t w_t w_t^T,
    w_t = W_w x_t normed to length 1, beta_t = 2 sigmoid(W_b x_t + b)

    A cache stores w and beta of each token beside its key and value, so that it can be cropped,
    forked and joined as any other. A decoded token solves one triangular system over all keys; the
    paper instead rewrites all cached keys in each step.

    >>> q, k, v, w = (HeadProjection(8, heads, 2) for heads in (4, 2, 2, 2))
    >>> PathProjection(q, k, v, w, 8).shape.memory
    (4, 4, 4, 2)

    Source: Yang et al. 2025 (arXiv 2505.16381), equations 2 and 3.
    """

    def __init__(
        self, q: HeadProjection, k: HeadProjection, v: HeadProjection, w: HeadProjection, dim: int
    ) -> None:
        super().__init__(q, k, v)
        if (w.heads, w.head_dim) != (k.heads, k.head_dim):
            raise ArgumentError(
                f"w is {w.extra_repr()} and k is {k.extra_repr()}; both must have the same heads"
            )
        self.w, self.beta = w, Linear(dim, k.heads, bias=True)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys, the values, the unit vectors [B,G,S,D] and beta [B,G,S,1]."""
        w = F.normalize(self.w(x, positions), dim=-1)
        beta = 2 * torch.sigmoid(self.beta(x)).transpose(-1, -2)[..., None]
        return *super().remember(x, positions), w, beta

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias:
        """Return what the reflections add to the scores, [B,H,T,S]."""
        if is_exporting_onnx():
            raise ArgumentError(
                "torch.onnx.export was given a PathProjection, which solves triangular systems: "
                "ONNX has no such operator; use torch.export.export, or another mechanism"
            )
        k, _, w, beta = memory
        B, (H, G) = q.shape[0], (q.shape[1], k.shape[1])
        q_at, k_at = (as_tensor(p, q.device).expand(B, -1) for p in (positions, k_positions))
        order = stable_argsort(k_at)
        empty = (k_at < 0)[:, None, :, None]
        k, w, beta = (
            _in_order(torch.where(empty, 0, y), order).repeat_interleave(H // G, dim=1)
            for y in (k, w, beta)
        )
        k_at = k_at.gather(-1, order)
        q = torch.where((q_at < 0)[:, None, :, None], 0, q)
        (k, w, beta), bad = _without_non_finite(k, w, beta)
        scores = path_scores(q, k, w, beta[..., 0], q_at, k_at)
        added = scores - (q.to(scores.dtype) @ k.to(scores.dtype).transpose(-1, -2))
        added = _with_nan(added, bad, k_at[:, None, :] <= q_at[:, :, None])
        back = stable_argsort(order)[:, None, None, :].expand(added.shape)
        return DenseBias(added.gather(-1, back) * q.shape[-1] ** -0.5)

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of `SeparateQKV`; a cache stores G D + G more values per token."""
        own = super().shape
        return own._replace(memory=(*own.memory, own.G * own.D, own.G))


class SelectiveProjection(ProjectionWithMemory):
    """A projection in which a token may hide earlier tokens from all later ones.

    s'_ij = s_ij - sum over j < l < i of max(0, s0_lj),  s0 = scale q0_l . k0_j of the first head;
    the first token is never hidden

    A cache stores the queries of the first head beside keys and values, from which the sums of all
    earlier tokens are computed again.

    >>> q, k, v = (HeadProjection(8, heads, 2) for heads in (4, 2, 2))
    >>> SelectiveProjection(q, k, v).shape.memory
    (4, 4, 2)

    Source: Leviathan et al. 2024 (arXiv 2410.02703), section 3.
    """

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys, the values, and the queries of the first head [B,1,S,D]."""
        return *super().remember(x, positions), self.query(x, positions)[:, :1]

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias:
        """Return what earlier tokens take from the score of each key, [B,1,T,S]."""
        k, _, q0 = memory
        B, scale = q.shape[0], q.shape[-1] ** -0.5
        q_at, k_at = (as_tensor(p, q.device).expand(B, -1) for p in (positions, k_positions))
        empty = (k_at < 0)[:, None, :, None]
        k0, q0 = torch.where(empty, 0, k[:, :1]), torch.where(empty, 0, q0)
        wide = torch.promote_types(q.dtype, torch.float32)
        (k0, q0), bad = _without_non_finite(k0, q0)
        hidden = F.relu(
            q0.to(wide) * scale @ k0.to(wide).transpose(-1, -2)
        )  # [B,1,S,S]: token l, key j
        before = (k_at[:, None, :] < k_at[:, :, None]) & (k_at > 0)[:, None, :]
        hidden = torch.where(before[:, None], hidden, 0)
        earlier = (k_at[:, None, :] < q_at[:, :, None]) & (k_at >= 0)[:, None, :]  # [B,T,S]
        return DenseBias(_with_nan(-(earlier[:, None].to(wide) @ hidden), bad, earlier))

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of `SeparateQKV`; a cache stores D more values per token."""
        own = super().shape
        return own._replace(memory=(*own.memory, own.D))


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """Return x [B,G,S,d] with its keys in the order [B,S]."""
    return x.gather(2, order[:, None, :, None].expand(x.shape))


def _without_non_finite(*parts: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the parts [B,n,S,d] with 0 in the tokens that have a NaN or an infinity, and a bool
    [B,S] that says which these are: 0 times NaN would bring them to earlier queries.
    """
    finite = torch.stack([y.isfinite().all(-1).all(1) for y in parts]).all(0)
    return tuple(torch.where(finite[:, None, :, None], y, 0) for y in parts), ~finite


def _with_nan(bias: Tensor, bad: Tensor, reads: Tensor) -> Tensor:
    """Return the bias [B,H,T,S] with NaN in the rows that read a bad token [B,S]; reads: which
    tokens each query reads [B,T,S].
    """
    return bias.masked_fill((reads & bad[:, None]).any(-1)[:, None, :, None], torch.nan)
