"""Projections that compute a bias from the tokens (`Projection.data_bias`)."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_number, check_positions, check_positive_sizes
from regard.biases import Bias, DenseBias, ForgetBias
from regard.biases.tables import RelativeLogits
from regard.caches import Parts
from regard.errors import ArgumentError
from regard.nn.explainable import InputSteps, MechanismStep, ProjectionQuery
from regard.nn.mixer import check_recorded_graph
from regard.nn.projections.heads import HeadProjection, ProjectionShape, SeparateQKV
from regard.nn.weights import Linear
from regard.process_state import is_exporting_onnx
from regard.scores.base import stable_argsort
from regard.span import Positions, Span, as_tensor
from regard.units import plural

ForgetGate: TypeAlias = Literal["sigmoid", "softplus"]
"""How a forget gate is computed: ln sigmoid(f), as in FoX, or -softplus(f), as in CABLE."""


class ForgettingProjection(SeparateQKV):
    """A projection whose keys fade: a token's forget gate multiplies all earlier weights.

    g_t = ln sigmoid(f_t) or -softplus(f_t), f_t = W_f x_t + b_f,
    s_ij = scale q_i . k_j + c_i - c_j, c_t = g_1 + ... + g_t

    c_i cancels in the softmax: the bias is one number per key, in fp64 and in the order of
    positions. A cache stores g, not the sum, in fp32 or better, so that it may drop tokens.

    Source: Lin et al. 2025 (arXiv 2503.02130), equations 6 to 8; Veisi et al. 2025 (arXiv
    2503.08067).
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        dim: int,
        *,
        gate: ForgetGate = "sigmoid",
    ) -> None:
        super().__init__(q, k, v)
        check_choice("gate", gate, get_args(ForgetGate))
        self.gate = gate
        self.f = Linear(dim, q.heads, bias=True)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys, the values, and the logarithm of each token's gate [B,H,S,1]."""
        f = self.f(x).transpose(-1, -2)[..., None]
        f = f.to(torch.promote_types(f.dtype, torch.float32))
        g = F.logsigmoid(f) if self.gate == "sigmoid" else -F.softplus(f)
        return *super().remember(x, positions), g

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias:
        """Return c_i - c_j of all queries and keys."""
        return ForgetBias(*sums_up_to(memory[2][..., 0], positions, k_positions))

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of `SeparateQKV`; a cache stores H more values per token."""
        own = super().shape
        return own._replace(memory=(*own.memory, own.H))

    def extra_repr(self) -> str:
        """Return how the gate is computed."""
        return f"gate={self.gate}"


def sums_up_to(g: Tensor, positions: Positions, k_positions: Positions) -> tuple[Tensor, Tensor]:
    """Return for each query and for each key the sum of g over the keys up to its position."""
    g = g.double()
    if isinstance(k_positions, Span) and isinstance(positions, Span) and k_positions.start >= 0:
        c, first = g.cumsum(-1), positions.start - k_positions.start
        if first >= 0 and first + positions.length <= k_positions.length:
            return c[..., first : first + positions.length], c
    B, H, S = g.shape
    k_at, q_at = (
        as_tensor(x, g.device).expand(B, -1).contiguous() for x in (k_positions, positions)
    )
    order = stable_argsort(k_at)
    g = torch.where(k_at[:, None] < 0, 0, g)
    c = g.gather(-1, order[:, None].expand(B, H, S)).cumsum(-1)
    # the sum before the first key is 0
    upto = torch.searchsorted(k_at.gather(-1, order), q_at, right=True)
    of_queries = F.pad(c, (1, 0)).gather(-1, upto[:, None].expand(B, H, -1))
    return of_queries, c.gather(-1, stable_argsort(order)[:, None].expand(B, H, S))


class RelativeKeyProjection(SeparateQKV):
    """A projection with a learned vector for every distance, which is added to the key.

    s_ij = scale q_i . (k_j + a[clip(j - i, -left, right)])

    Source: Shaw et al. 2018 (arXiv 1803.02155), equations 4 and 5, without relative values.
    """

    def __init__(
        self, q: HeadProjection, k: HeadProjection, v: HeadProjection, *, left: int, right: int
    ) -> None:
        super().__init__(q, k, v)
        if min(left, right) < 0:
            raise ArgumentError(f"left is {left} and right is {right}; each must be at least 0")
        self.left, self.right = left, right
        # row n is the vector of the distance j - i = right - n
        self.table = nn.Parameter(torch.randn(left + right + 1, q.head_dim) * q.head_dim**-0.5)

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias:
        """Return the products of each query with the vectors, [B,H,T,left + right + 1]."""
        return RelativeLogits(q @ self.table.transpose(-1, -2) * q.shape[-1] ** -0.5, self.right)

    def extra_repr(self) -> str:
        """Return the distances with a vector of their own."""
        return f"left={self.left}, right={self.right}"


class RelativeLogitProjection(SeparateQKV):
    """A projection in which every token mixes learned profiles of biases by distance.

    s_ij = scale q_i . k_j + (r_i P)[i - j] for 0 <= i - j < extent,  r_i = W_r x_i

    Source: Inkling 2026, `InklingRelativeLogits` of transformers.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        r: HeadProjection,
        *,
        extent: int,
    ) -> None:
        super().__init__(q, k, v)
        if r.heads != q.heads or extent < 1:
            raise ArgumentError(
                f"r is {r.extra_repr()} and extent is {extent}; r must have "
                f"{plural(q.heads, 'head')}, as q, and extent must be at least 1"
            )
        self.r, self.extent = r, extent
        self.profiles = nn.Parameter(torch.randn(r.head_dim, extent) * r.head_dim**-0.5)

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias:
        """Return the profile of each query [B,H,T,extent], and 0 for other distances."""
        return RelativeLogits(self.r(x, positions) @ self.profiles, outside="zero")

    def extra_repr(self) -> str:
        """Return the number of distances."""
        return f"extent={self.extent}"


class DisentangledProjection(SeparateQKV):
    """DeBERTa's projection: content to content, content to position, position to content.

    s_ij = (q_i . k_j + q_i . K_r[d(i - j)] + k_j . Q_r[d(i - j)]) / sqrt(3 D)

    d is `deberta_bucket`, clipped to the table. The paper writes the last index as d(j - i); the
    released models have d(i - j), and so has this class.

    Source: He et al. 2020 (arXiv 2006.03654), equation 4; log buckets: the released DeBERTa-v2.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        dim: int,
        *,
        buckets: int,
        max_distance: int,
    ) -> None:
        super().__init__(q, k, v)
        if q.heads != k.heads:
            raise ArgumentError(
                f"q is {q.extra_repr()} and k is {k.extra_repr()}; disentangled attention has one "
                "key head per query head"
            )
        check_positive_sizes("DisentangledProjection", dim=dim, buckets=buckets)
        self.buckets, self.max_distance = buckets, max_distance
        self.embedding = nn.Parameter(torch.randn(2 * buckets, dim))
        self.relative_k = HeadProjection(dim, q.heads, q.head_dim, bias=True)
        self.relative_q = HeadProjection(dim, q.heads, q.head_dim, bias=True)
        # the bias checks the sizes
        self._bias(torch.zeros(1, 1, 1, 2 * buckets), of_keys=False)

    def _bias(self, logits: Tensor, *, of_keys: bool) -> RelativeLogits:
        return RelativeLogits(
            logits, self.buckets, of_keys, buckets=self.buckets, max_distance=self.max_distance
        )

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias:
        """Return the sum of both position terms, from tables [B,H,T,2 n] and [B,H,S,2 n]."""
        scale = (3 * q.shape[-1]) ** -0.5
        relative_k, relative_q = (
            one(self.embedding[None], None) for one in (self.relative_k, self.relative_q)
        )
        own, of_keys = (
            q @ relative_k.transpose(-1, -2) * scale,
            memory[0] @ relative_q.transpose(-1, -2) * scale,
        )
        return self._bias(own, of_keys=False) + self._bias(of_keys, of_keys=True)

    def extra_repr(self) -> str:
        """Return the number of buckets and the largest distance."""
        return f"buckets={self.buckets}, max_distance={self.max_distance}"


class SinusoidKeyProjection(SeparateQKV):
    """Transformer-XL's projection: products with the key and a map of the distance's sinusoid.

    s_ij = scale ((q_i + u) . k_j + (q_i + w) . W_r r[i - j]),
    r[d] = (sin(d f_1), ..., sin(d f_n), cos(d f_1), ..., cos(d f_n)), f_m = base^(-2 m / R)

    The second term is itself a dot product of vectors of the query and of the key's position, which
    are appended: every kernel computes it with heads of D + R, without a largest distance.

    Source: Dai et al. 2019 (arXiv 1901.02860), section 3.3.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        *,
        size: int,
        base: float = 10000.0,
    ) -> None:
        super().__init__(q, k, v)
        check_number("base", base, 0, float("inf"), "above 0")
        if size < 2 or size % 2:
            raise ArgumentError(f"size is {size}; it must be even, and at least 2")
        H, D = q.heads, q.head_dim
        self.size, self.base = size, base
        self.u, self.w = (nn.Parameter(torch.zeros(H, D)) for _ in range(2))
        self.relative = nn.Parameter(torch.randn(H, D, size) * size**-0.5)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the queries with u, and their vectors for the sinusoids of key positions."""
        q = super().query(x, positions)
        y = (q + self.w[:, None]) @ self.relative  # [B,H,T,R]
        sin, cos = self._sinusoids(positions, y)
        a, b = y.chunk(2, dim=-1)
        return torch.cat([q + self.u[:, None], a * sin + b * cos, b * sin - a * cos], dim=-1)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the keys with the sinusoids of their positions, and the values."""
        k, v = super().recall(memory, positions)
        sin, cos = self._sinusoids(positions, k)
        own = torch.cat([cos, sin], dim=-1).expand(*k.shape[:3], -1)
        channels = k, own  # of each key
        return torch.cat(channels, dim=-1), v

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of `SeparateQKV`, and the sinusoids as the last ones."""
        own = super().explain_inputs(query)
        q = self.query(query.x, query.positions)[0]
        k, _ = self.recall(self.remember(query.memory, query.k_positions), query.k_positions)
        return own._replace(
            q=(*own.q, MechanismStep("sinusoids", "q_i ← (q_i + u, W_r^T (q_i + w) at i)", q)),
            k=(*own.k, MechanismStep("sinusoids", "k_j ← (k_j, cos j f, sin j f)", k[0])),
        )

    def _sinusoids(self, positions: Positions | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sines and the cosines [B or 1,1,L,R/2] of positions, computed in fp64."""
        assert positions is not None, "the module gives positions"
        check_positions("positions", positions, like.shape[0], like.shape[2])
        place = positions.tensor(like.device) if isinstance(positions, Span) else positions
        even = torch.arange(0, self.size, 2, device=like.device, dtype=torch.float64)
        angle = place.to(like.device)[:, None, :, None] * self.base ** (-even / self.size)
        return angle.sin().to(like.dtype), angle.cos().to(like.dtype)

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of `SeparateQKV`, with heads of D + R for the scores."""
        own = super().shape
        return own._replace(D=own.D + self.size)

    def extra_repr(self) -> str:
        """Return the number of sinusoids."""
        return f"size={self.size}, base={self.base:g}"


class DynamicMaskProjection(SeparateQKV):
    """A projection that gives every key a bias from its values.

    s_ij = scale q_i . k_j + exp(a_g softplus(W_g v_j + b_g))

    g is the key/value head. With more than `keep` keys, a query sees only the `keep` keys up to its
    position with the largest biases; of equal ones, but for the last 6 bits, the earlier slots. The
    selection knows no mask of the module.

    Source: Shi et al. 2025 (arXiv 2508.02124); `DogeAttention` of transformers.
    """

    def __init__(
        self, q: HeadProjection, k: HeadProjection, v: HeadProjection, *, keep: int = 2048
    ) -> None:
        super().__init__(q, k, v)
        if keep < 1:
            raise ArgumentError(f"keep is {keep}; it must be at least 1")
        self.keep = keep
        self.a = nn.Parameter(torch.zeros(v.heads))
        self.delta = Linear(v.heads * v.head_dim, v.heads, bias=False)

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias:
        """Return the bias of each key [B,H,1,S]; with a selection [B,H,T,S]."""
        check_recorded_graph(self, "selects keys only if there are more than `keep` of them")
        delta = self.delta(memory[1].transpose(1, 2).flatten(2)).transpose(-1, -2)  # [B,G,S]
        bias = torch.exp(self.a[:, None] * F.softplus(delta))[:, :, None]
        if bias.shape[-1] > self.keep:
            q_at, k_at = (
                as_tensor(p, q.device).expand(len(q), -1) for p in (positions, k_positions)
            )
            visible = (k_at[:, None] <= q_at[:, :, None]) & (k_at >= 0)[:, None]  # [B,T,S]
            bias = _largest(bias, visible[:, None], self.keep)
        return DenseBias(bias.repeat_interleave(self.q.heads // self.v.heads, dim=1))

    def extra_repr(self) -> str:
        """Return the number of keys that a query sees."""
        return f"keep={self.keep}"


def _largest(bias: Tensor, visible: Tensor, keep: int) -> Tensor:
    """Return the bias [B,G,1,S] for each query, -inf for all but the largest that it sees."""
    with torch.no_grad():
        # Equal tokens have equal biases but for rounding, which differs between a chunk and a whole
        # pass. Without the last 6 bits they are equal, and the earlier slot comes first.
        mantissa, exponent = torch.frexp(bias.float() if bias.element_size() < 4 else bias)
        steps = 2.0**-6 / torch.finfo(mantissa.dtype).eps
        rounded = torch.ldexp((mantissa * steps).round() / steps, exponent)
        among = torch.where(visible, rounded, -torch.inf)
        order = among.sort(dim=-1, descending=True, stable=True).indices[..., :keep]
        is_kept = torch.zeros_like(among, dtype=torch.bool).scatter(-1, order, True)
    return torch.where(is_kept | ~visible, bias, -torch.inf)


def path_scores(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, q_at: Tensor, k_at: Tensor
) -> Tensor:
    """Compute the scores of PaTH, q_i^T H_i ... H_{j+1} k_j, with H_t = I - beta_t w_t w_t^T.

    By one triangular system X (I + L) = Q W^T, where L has the products beta_t w_t . w_l of earlier
    tokens l; X Diag(beta) W K^T is what the reflections take from the scores.

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


class PathProjection(SeparateQKV):
    """A projection with PaTH positions: every token reflects the keys before it.

    s_ij = scale q_i^T H_i ... H_{j+1} k_j, H_t = I - beta_t w_t w_t^T,
    w_t = W_w x_t normed to length 1, beta_t = 2 sigmoid(W_b x_t + b)

    A cache stores w and beta of each token beside key and value. A decoded token solves one
    triangular system over all keys; the paper rewrites all cached keys instead.

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


class SelectiveProjection(SeparateQKV):
    """A projection in which a token may hide earlier tokens from all later ones.

    s'_ij = s_ij - sum over j < l < i of max(0, s0_lj),  s0 = scale q0_l . k0_j of the first head;
    the first token is never hidden

    A cache also stores the queries of the first head, from which the sums are computed.

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
    """Return the parts [B,n,S,d] with 0 in tokens that are not finite, and which [B,S]."""
    finite = torch.stack([y.isfinite().all(-1).all(1) for y in parts]).all(0)
    return tuple(torch.where(finite[:, None, :, None], y, 0) for y in parts), ~finite


def _with_nan(bias: Tensor, bad: Tensor, reads: Tensor) -> Tensor:
    """Return the bias [B,H,T,S] with NaN in rows that read [B,T,S] a bad token [B,S]."""
    return bias.masked_fill((reads & bad[:, None]).any(-1)[:, None, :, None], torch.nan)
