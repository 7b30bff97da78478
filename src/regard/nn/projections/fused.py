"""Projections by one fused matrix, a matrix for each head, none, or to an encoder's states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_groups, check_number
from regard.caches import Parts
from regard.errors import ArgumentError
from regard.nn.explainable import (
    InputSteps,
    MechanismStep,
    ProjectionQuery,
    first_rotary,
    projection_step,
    run_steps,
)
from regard.nn.projections.heads import HeadProjection, Projection, ProjectionShape, run_on_heads
from regard.nn.weights import Linear, linear
from regard.ops.stored_linear import stored_linear
from regard.ops.tokenwise import clip
from regard.process_state import ConstantTensor
from regard.span import Positions
from regard.units import plural

QKVRowOrder: TypeAlias = Literal["parts", "heads", "groups"]
"""The order of the rows in a fused QKV matrix, as in GPT-2 and Phi-3 ("parts"), GPT-NeoX and BLOOM
("heads") and Falcon-40B ("groups"); it cannot be inferred from the shape.
"""


class IdentityProjection(Projection, nn.Module):
    """A projection without weights: queries, keys and values are the hidden states, in one head.

    q = k = v = x

    Args:
        dim: the model dim M.

    >>> IdentityProjection(3).query(torch.ones(1, 2, 3), None).shape
    torch.Size([1, 1, 2, 3])

    Source: Raschka 2024, "Build a Large Language Model (From Scratch)", section 3.3.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 1:
            raise ArgumentError(f"dim is {dim}; it must be at least 1")
        self.dim = dim

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return x as one head [B,1,T,M]."""
        _check_width("x", x, self.dim)
        return x[:, None]

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return x once, as one head [B,1,S,M]; it serves as key and as value."""
        return (self.query(x, positions),)

    @property
    def shape(self) -> ProjectionShape:
        """One head of size M; a cache stores M values per token."""
        return ProjectionShape(1, 1, self.dim, self.dim, (self.dim,))


class PerHeadProjection(HeadProjection):
    """A `HeadProjection` with a separate linear map for each head.

    x [B,L,M] -> [W_1 x; ...; W_n x] as [B,n,L,d], then the steps

    Args:
        dim, heads, head_dim, *steps, bias: as for `HeadProjection`.

    Raises:
        ArgumentError: a size is less than 1.

    >>> split = PerHeadProjection(6, 2, 3)
    >>> x = torch.randn(1, 4, 6)
    >>> torch.allclose(split(x, None), split.stack()(x, None), atol=1e-6)
    True

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2: W_i^Q, W_i^K, W_i^V of each head.
    """

    linear: ConcatenatedLinears  # type: ignore[assignment]  # instead of one matrix

    def __init__(
        self, dim: int, heads: int, head_dim: int, *steps: nn.Module, bias: bool = False
    ) -> None:
        super().__init__(dim, heads, head_dim, *steps, bias=bias)
        self.linear = ConcatenatedLinears(Linear(dim, head_dim, bias=bias) for _ in range(heads))

    def stack(self) -> HeadProjection:
        """Stack the matrices of the heads into one.

        Returns:
            A `HeadProjection` of the same heads, with copies of the matrices and the same steps.
        """
        maps = self.linear.maps()
        weight, bias = maps[0].weight, maps[0].bias is not None
        heads = HeadProjection(
            weight.shape[1], self.heads, self.head_dim, *self.steps, bias=bias
        ).to(weight)
        with torch.no_grad():
            heads.linear.weight.copy_(torch.cat([m.weight for m in maps]))
            if bias:
                heads.linear.bias.copy_(torch.cat([m.bias for m in maps]))
        return heads


class ConcatenatedLinears(nn.ModuleList):
    """Several linear maps of the same input, whose outputs are concatenated."""

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L N"]:
        """Map x [..., M] to [..., N], where N is the sum of the output widths."""
        return torch.cat([linear(x) for linear in self], dim=-1)

    def maps(self) -> list[nn.Linear]:
        """Return the linear maps as a list."""
        return [linear for linear in self if isinstance(linear, nn.Linear)]


class FusedQKV(Projection, nn.Module):
    """A projection that computes queries, keys and values by one weight matrix.

    [q; k; v] = W x + b, with the rows in the given order

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H.
        head_dim: the size of one head D.
        order: the order of the rows of the matrix: "parts" (all queries, all keys, all values),
            "heads" (q, k, v of each head in turn) or "groups" (the queries, the key and the value
            of each group in turn).
        steps: modules on query heads and on key heads, called as step(x [B,n,L,d], positions).
        bias: whether the linear map has a bias.

    Raises:
        ArgumentError: a size is less than 1, G does not divide H, or the order does not fit.

    >>> fused = FusedQKV(8, 4, 2, 2)
    >>> fused.linear.weight.shape
    torch.Size([16, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        groups: int,
        head_dim: int,
        *,
        order: QKVRowOrder = "parts",
        steps: Sequence[nn.Module] = (),
        bias: bool = True,
    ) -> None:
        super().__init__()
        if min(dim, head_dim) < 1:
            raise ArgumentError(f"dim is {dim} and head_dim {head_dim}; each must be at least 1")
        check_groups(heads, groups)
        check_choice("order", order, get_args(QKVRowOrder))
        if order == "heads" and heads != groups:
            raise ArgumentError(
                f'order "heads" has one key and value per query head, not {groups} for {heads}; '
                'use "groups"'
            )
        self.heads, self.groups, self.head_dim, self.order = heads, groups, head_dim, order
        self.linear = Linear(dim, (heads + 2 * groups) * head_dim, bias=bias)
        self.steps = nn.ModuleList(steps)
        self._head_rows = _head_rows(heads, groups, order)
        self._row_indices = [ConstantTensor(torch.tensor(x, device="cpu")) for x in self._head_rows]

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the queries [B,H,T,D] of hidden states x."""
        return run_on_heads(self.steps, self._heads(x, 0), positions)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys [B,G,S,D] and the values [B,G,S,D]."""
        return run_on_heads(self.steps, self._heads(x, 1), positions), self._heads(x, 2)

    @property
    def shape(self) -> ProjectionShape:
        """H, G and D, with E = D; a cache stores 2 G D values per token."""
        D = self.head_dim
        return ProjectionShape(self.heads, self.groups, D, D, (self.groups * D,) * 2)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the linear map of queries, keys and values, followed by the steps."""
        q = (projection_step("q", self._heads(query.x, 0)[0], self.linear),)
        k = (projection_step("k", self._heads(query.memory, 1)[0], self.linear),)
        v = (projection_step("v", self._heads(query.memory, 2)[0], self.linear),)
        return InputSteps(
            run_steps(self.steps, q, query.positions, "q"),
            run_steps(self.steps, k, query.k_positions, "k"),
            v,
            first_rotary(self.steps),
        )

    def _heads(self, x: Tensor, part: int) -> Tensor:
        """Compute the queries (`part` 0), the keys (1) or the values (2): [B,n,L,D]."""
        D, rows = self.head_dim, self._head_rows[part]
        record = getattr(self.linear, "stored_weight", None)  # torch's own class has none
        if record is not None and self.order == "parts":
            first, n = rows[0] * D, len(rows) * D
            own = None if self.linear.bias is None else self.linear.bias[first : first + n]
            y = stored_linear(x, record.rows(first, first + n), own)
            return torch.unflatten(y, -1, (-1, D)).transpose(1, 2)  # [B,L,n D] -> [B,n,L,D]
        stored: object = self.linear.weight
        if not isinstance(stored, Tensor):
            # another layer in its place, such as torch's quantized one, has no rows to choose
            y = torch.unflatten(self.linear(x), -1, (-1, D))
            return y[..., rows, :].transpose(1, 2)
        if self.order == "parts":  # the rows are contiguous, so a slice needs no copy
            first, n = rows[0] * D, len(rows)
            weight = self.linear.weight[first : first + n * D]
            bias = self.linear.bias[first : first + n * D] if self.linear.bias is not None else None
        else:
            weight, bias = self.linear.weight, self.linear.bias
            # a list as an index would be copied to another device in every call
            index = rows if weight.is_cpu else self._row_indices[part].on(weight.device)
            weight = torch.unflatten(weight, 0, (-1, D))[index].flatten(0, 1)  # [n D,M]
            bias = None if bias is None else torch.unflatten(bias, 0, (-1, D))[index].flatten()
        return torch.unflatten(linear(x, weight, bias), -1, (len(rows), D)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the numbers of heads, the head dim and the order of the rows."""
        heads = f"{plural(self.heads, 'query head')} and {plural(self.groups, 'key/value head')}"
        return f"{heads} of {self.head_dim}, order={self.order!r}"


def _head_rows(
    heads: int, groups: int, order: QKVRowOrder
) -> tuple[list[int], list[int], list[int]]:
    """Return the indices of query, key and value heads among the H + 2 G heads."""
    if order == "parts":
        kinds = [0] * heads + [1] * groups + [2] * groups
    else:
        kinds = ([0] * (heads // groups) + [1, 2]) * groups
    q, k, v = ([i for i, kind in enumerate(kinds) if kind == part] for part in range(3))
    return q, k, v


class ClippedQKV(FusedQKV):
    """A `FusedQKV` projection whose queries, keys and values are clipped before the steps.

    [q; k; v] = clip(W x + b, -c, c)

    Args:
        dim, heads, groups, head_dim, order, steps, bias: as for `FusedQKV`.
        limit: the limit c, above 0.

    Raises:
        ArgumentError: limit is not above 0, or an argument does not suit `FusedQKV`.

    >>> clipped = ClippedQKV(8, 4, 4, 2, limit=0.5, bias=False)
    >>> float(clipped.query(1e6 * torch.ones(1, 3, 8), None).detach().abs().max())
    0.5

    Source: MosaicML 2023, "Introducing MPT-7B": `clip_qkv` of its released code.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        groups: int,
        head_dim: int,
        *,
        limit: float,
        order: QKVRowOrder = "parts",
        steps: Sequence[nn.Module] = (),
        bias: bool = True,
    ) -> None:
        check_number("limit", limit, 0, float("inf"), "above 0; use FusedQKV for no clipping")
        super().__init__(dim, heads, groups, head_dim, order=order, steps=steps, bias=bias)
        self.limit = limit

    def _heads(self, x: Tensor, part: int) -> Tensor:
        return clip(super()._heads(x, part), -self.limit, self.limit)

    def extra_repr(self) -> str:
        """Return the numbers of heads, the head dim, the order of the rows and the limit."""
        return f"{super().extra_repr()}, limit={self.limit:g}"


class EncoderStateProjection(Projection, nn.Module):
    """A projection for attention to an encoder, whose values are the encoder states themselves.

    q = query map(x), or x;  k = key map(h), or h;  v = h; each split into heads

    Args:
        query: a linear map [B,T,M] -> [B,T,H*D]; or the size of x, if x itself is the query.
        states: the size of one encoder state h.
        heads: the number of heads H, which divides every size.
        key: a linear map of h to H*D; None uses the states as keys, and a cache stores them once.

    Raises:
        ArgumentError: a size is not a multiple of heads, or queries and keys differ in size.

    >>> states = EncoderStateProjection(nn.Linear(6, 8), 8)  # the score h_t^T W h_s
    >>> states.query(torch.ones(1, 2, 6), None).shape, states.shape.memory
    (torch.Size([1, 1, 2, 8]), (8,))

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), section 3.1; Luong et al. 2015 (arXiv
    1508.04025), equation 8.
    """

    def __init__(
        self, query: int | nn.Linear, states: int, *, heads: int = 1, key: nn.Linear | None = None
    ) -> None:
        super().__init__()
        width = query if isinstance(query, int) else query.out_features
        keys = states if key is None else key.out_features
        if width != keys:
            raise ArgumentError(
                f"queries have size {width} and keys have size {keys}; pass a linear map to {keys} "
                "as query, or a linear map as key"
            )
        if heads < 1 or width < 1 or width % heads or states % heads:
            raise ArgumentError(
                f"heads is {heads}; it must be at least 1 and divide the key size {keys} and the "
                f"state size {states}"
            )
        if key is not None and key.in_features != states:
            raise ArgumentError(
                f"the key map has in_features={key.in_features}; it must be the state size {states}"
            )
        self.q: nn.Module = nn.Identity() if isinstance(query, int) else query
        self.k, self.heads, self.key_dim, self.states = key, heads, width, states

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the queries [B,H,T,D] of hidden states x."""
        _check_width("x", x, self.q.in_features if isinstance(self.q, nn.Linear) else self.key_dim)
        return self._split(self.q(x))

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the states [B,H,S,E], after the keys [B,H,S,D] if these have a map."""
        _check_width("memory", x, self.states)
        states = self._split(x)
        return (states,) if self.k is None else (self._split(self.k(x)), states)

    @property
    def shape(self) -> ProjectionShape:
        """The sizes; a cache stores a state per token, and its key if keys have a map."""
        memory = (self.states,) if self.k is None else (self.key_dim, self.states)
        H = self.heads
        return ProjectionShape(H, H, self.key_dim // H, self.states // H, memory)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries and keys, which are linear maps."""
        k, v = self.recall(self.remember(query.memory, None), query.k_positions)
        return InputSteps(
            (MechanismStep("projected", "q_i = W_Q s_i", self.query(query.x, None)[0]),),
            (MechanismStep("projected", "k_j = W_K h_j", k[0]),),
            (MechanismStep("state", "v_j = h_j", v[0]),),
        )

    def _split(self, x: Tensor) -> Tensor:
        """Split the last dimension of x [B,L,n] into heads [B,H,L,n/H]."""
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the number of heads and the sizes of keys and states."""
        return f"{plural(self.heads, 'head')}, keys of {self.key_dim}, states of {self.states}"


def _check_width(name: str, x: Tensor, dim: int) -> None:
    """Check that x is [batch, length, dim] with this dim."""
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ArgumentError(f"{name} is {tuple(x.shape)}; it must be [batch, length, {dim}]")
