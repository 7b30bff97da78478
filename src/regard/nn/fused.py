"""Other ways to make queries, keys and values: not at all, head by head, or from one fused matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_groups
from regard.caches import Parts
from regard.errors import ArgumentError
from regard.nn.linear import Linear, linear
from regard.nn.project import Heads, ProjectionShape
from regard.span import Positions

Order: TypeAlias = Literal["parts", "heads", "groups"]
"""How the rows of a fused matrix are laid out: [all q | all k | all v] as in GPT-2 and Phi-3, [q k v] head by head as in
GPT-NeoX and BLOOM, or [its queries, k, v] group by group as in Falcon-40B. The shapes are equal: only the order tells."""


class Unprojected(nn.Module):
    """Queries, keys and values are the tokens themselves, one head as wide as the model: attention without weights.

    q = k = v = x

    Args:
        dim: the model dim M.

    >>> Unprojected(3).query(torch.ones(1, 2, 3), None).shape
    torch.Size([1, 1, 2, 3])

    Source: Raschka 2024, "Build a Large Language Model (From Scratch)", section 3.3.
    """

    stale: str | None = None

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 1:
            raise ArgumentError(f"dim is {dim}; it must be at least 1")
        self.dim = dim

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """x as one head [B,1,T,M]."""
        return self._head(x)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """x, once: it serves as key and as value."""
        return (self._head(x),)

    def _head(self, x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ArgumentError(f"x is {tuple(x.shape)}; it must be [batch, length, {self.dim}]")
        return x[:, None]

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """What was remembered, twice."""
        return memory[0], memory[0]

    def finish(self, z: Tensor, x: Tensor) -> Tensor:
        """The head as it is."""
        return z

    @property
    def shape(self) -> ProjectionShape:
        """One head of M; a token takes M numbers."""
        return ProjectionShape(1, 1, self.dim, self.dim, (self.dim,))


class PerHead(Heads):
    """Heads with a linear map each, side by side: the same function as `Heads`, which stacks their matrices.

    x [B,L,M] -> [W_1 x; ...; W_n x] as [B,n,L,d], then the steps

    Args:
        dim, heads, head_dim, bias: as for `Heads`.
        *steps: as for `Heads`.

    Raises:
        ArgumentError: as for `Heads`.

    >>> split = PerHead(6, 2, 3)
    >>> x = torch.randn(1, 4, 6)
    >>> torch.allclose(split(x, None), split.stack()(x, None), atol=1e-6)
    True

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2: W_i^Q, W_i^K, W_i^V of each head.
    """

    linear: SideBySide  # type: ignore[assignment]  # in place of one matrix

    def __init__(
        self, dim: int, heads: int, head_dim: int, *steps: nn.Module, bias: bool = False
    ) -> None:
        super().__init__(dim, heads, head_dim, *steps, bias=bias)
        self.linear = SideBySide(Linear(dim, head_dim, bias=bias) for _ in range(heads))

    def stack(self) -> Heads:
        """The same heads from one matrix, the heads' rows below one another; the steps are shared."""
        maps = self.linear.maps()
        weight, bias = maps[0].weight, maps[0].bias is not None
        heads = Heads(weight.shape[1], self.heads, self.head_dim, *self.steps, bias=bias).to(weight)
        with torch.no_grad():
            heads.linear.weight.copy_(torch.cat([m.weight for m in maps]))
            if bias:
                heads.linear.bias.copy_(torch.cat([m.bias for m in maps]))
        return heads


class SideBySide(nn.ModuleList):
    """Several linear maps of one input; what they give stands side by side.

    >>> SideBySide([nn.Linear(3, 2), nn.Linear(3, 4)])(torch.zeros(5, 3)).shape
    torch.Size([5, 6])
    """

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L N"]:
        """x [..., M] -> [..., sum of the widths]."""
        return torch.cat([linear(x) for linear in self], dim=-1)

    def maps(self) -> list[nn.Linear]:
        """The linear maps."""
        return [linear for linear in self if isinstance(linear, nn.Linear)]


class Fused(nn.Module):
    """Queries, keys and values from the rows of one matrix.

    [q; k; v] = W x + b, with the rows in the given order

    Args:
        dim: the model dim M.
        heads, groups: query heads H, and key/value heads G that divide them.
        head_dim: the size of one head.
        order: how the rows are laid out.
        steps: modules on query heads and on key heads, called as step(x [B,n,L,d], positions).
        bias: whether the linear map has one.

    Raises:
        ArgumentError: a size is less than 1, G does not divide H, the order is unknown, or is "heads" with G != H.

    >>> fused = Fused(8, 4, 2, 2)
    >>> fused.linear.weight.shape
    torch.Size([16, 8])
    """

    stale: str | None = None

    def __init__(
        self,
        dim: int,
        heads: int,
        groups: int,
        head_dim: int,
        *,
        order: Order = "parts",
        steps: Sequence[nn.Module] = (),
        bias: bool = True,
    ) -> None:
        super().__init__()
        if min(dim, head_dim) < 1:
            raise ArgumentError(f"dim is {dim} and head_dim {head_dim}; each must be at least 1")
        check_groups(heads, groups)
        if order not in get_args(Order):
            raise ArgumentError(f"order is {order!r}; it is one of {', '.join(get_args(Order))}")
        if order == "heads" and heads != groups:
            raise ArgumentError(
                f'order "heads" has one key and value per query head, not {groups} for {heads}; use "groups"'
            )
        self.heads, self.groups, self.head_dim, self.order = heads, groups, head_dim, order
        self.linear = Linear(dim, (heads + 2 * groups) * head_dim, bias=bias)
        self.steps = nn.ModuleList(steps)
        self._rows = _rows(heads, groups, order)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """q [B,H,T,D]."""
        return self._run(self._heads(x, 0), positions)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """k [B,G,S,D] and v [B,G,S,D]."""
        return self._run(self._heads(x, 1), positions), self._heads(x, 2)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys and values, as remembered."""
        k, v = memory
        return k, v

    def finish(self, z: Tensor, x: Tensor) -> Tensor:
        """Heads as attention gave them."""
        return z

    @property
    def shape(self) -> ProjectionShape:
        """H, G, D = E; a token takes 2 G D numbers."""
        D = self.head_dim
        return ProjectionShape(self.heads, self.groups, D, D, (self.groups * D,) * 2)

    def _heads(self, x: Tensor, which: int) -> Tensor:
        """The heads of one of q, k, v: [B,n,L,D]."""
        D, rows = self.head_dim, self._rows[which]
        if self.order == "parts":  # a run of rows: a view
            first, n = rows[0] * D, len(rows)
            weight = self.linear.weight[first : first + n * D]
            bias = self.linear.bias[first : first + n * D] if self.linear.bias is not None else None
        else:
            weight = self.linear.weight.unflatten(0, (-1, D))[rows].flatten(0, 1)
            bias = self.linear.bias
            bias = None if bias is None else bias.unflatten(0, (-1, D))[rows].flatten()
        return linear(x, weight, bias).unflatten(-1, (len(rows), D)).transpose(1, 2)

    def _run(self, x: Tensor, positions: Positions | None) -> Tensor:
        for step in self.steps:
            x = step(x, positions)
        return x

    def extra_repr(self) -> str:
        """The heads and the order of the rows."""
        return f"{self.heads} and {self.groups} heads of {self.head_dim}, order={self.order!r}"


def _rows(heads: int, groups: int, order: Order) -> tuple[list[int], list[int], list[int]]:
    """Which heads of the fused matrix are queries, keys and values, in the order of their own heads."""
    if order == "parts":
        marks = [0] * heads + [1] * groups + [2] * groups
    else:
        marks = ([0] * (heads // groups) + [1, 2]) * groups
    q, k, v = ([i for i, mark in enumerate(marks) if mark == part] for part in range(3))
    return q, k, v
