"""Projections: what a query is, what is worth remembering, and how memory becomes keys and
values.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_groups
from regard.caches import Parts
from regard.cost.softmax import SoftmaxSpec, Visible
from regard.cost.spec import HeadShape, Spec, Weights
from regard.errors import ArgumentError
from regard.nn.linear import Linear
from regard.positions import Rotary
from regard.span import Positions


@runtime_checkable
class Projection(Protocol):
    """From hidden states to queries, to memory, and from memory to keys and values."""

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """x [B,T,M] -> q [B,H,T,D]."""

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """x [B,S,M] -> what a cache stores per position, parts [B,n,S,d]."""

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """What was remembered, and where it stands -> k [B,G,S,D], v [B,G,S,E]."""

    def finish(self, z: Tensor, x: Tensor) -> Tensor:
        """What attention gave, [B,H,T,E] -> the heads that the output joins; x [B,T,M] is where the
        queries came from.
        """

    @property
    def shape(self) -> ProjectionShape:
        """The sizes that its queries, keys, values and memory have."""

    @property
    def stale(self) -> str | None:
        """Why what it remembers goes stale in a cache, or None if it does not."""


@runtime_checkable
class Forms(Projection, Protocol):
    """A projection with several forms, equal in exact arithmetic, of which lengths decide: latents,
    expanded or not.

    All forms remember the same, so that they share a cache.
    """

    def facing(self, queries: int, keys: int) -> Projection:
        """The form for so many queries against so many keys in memory."""

    def spec(self, weights: Weights, visible: Visible) -> Spec:
        """The cost of attention through this projection, by the form that has fewer FLOPs."""


def facing(project: Projection, queries: int, keys: int) -> Projection:
    """The form of a projection for so many queries against so many keys: itself, unless it has
    `Forms`.
    """
    has_forms = hasattr(
        type(project), "facing"
    )  # as isinstance, which would evaluate every property
    return cast("Forms", project).facing(queries, keys) if has_forms else project


@runtime_checkable
class Aims(Projection, Protocol):
    """A projection whose queries depend on where the keys in memory stand, such as rotary
    frequencies that follow the length.
    """

    def aim(self, q: Tensor, positions: Positions, seen: Positions) -> Tensor:
        """Queries [B,H,T,D] at positions -> those for keys at the positions seen."""


def aimed(project: Projection, q: Tensor, positions: Positions, seen: Positions) -> Tensor:
    """Queries for keys at the positions seen: as they are, unless the projection `Aims` them."""
    aims = hasattr(type(project), "aim")
    return cast("Aims", project).aim(q, positions, seen) if aims else q


class ProjectionShape(NamedTuple):
    """The sizes of what a projection makes.

    Attributes:
        H, G, D, E: query heads, key/value heads, query/key dim, value dim.
        memory: numbers that one token takes in a cache, part by part.

    >>> ProjectionShape(H=4, G=2, D=8, E=8, memory=(16, 16)).memory
    (16, 16)
    """

    H: int
    G: int
    D: int
    E: int
    memory: tuple[int, ...]

    @property
    def heads(self) -> HeadShape:
        """The heads, as `regard.cost` has them."""
        return HeadShape(self.H, self.G, self.D, self.E)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """What a cache holds of one token, as `regard.cost` has it."""
        if self.memory == (self.G * self.D, self.G * self.E):
            return self.heads.parts
        return tuple((1, size) for size in self.memory)


def attention_spec(project: Projection, weights: Weights, visible: Visible) -> Spec:
    """The cost of softmax attention through a projection.

    Args:
        project: the projection; one with several forms says its cost itself.
        weights: the parameters of the layer, counted.
        visible: the keys that a query sees.
    """
    if isinstance(project, Forms):
        return project.spec(weights, visible)
    return SoftmaxSpec(weights, project.shape.parts, project.shape.heads, visible)


class Heads(nn.Module):
    """A linear map, split into heads, then steps on each head in the order given.

    x [B,L,M] -> W x + b -> (flat norm) -> [B,n,L,d] -> step(., positions) -> ...

    Order is data: `Heads(M, H, D, RMSNorm(D), rotary)` norms before it rotates, `Heads(M, H, D,
    rotary, RMSNorm(D))` after.

    Args:
        dim: the model dim M.
        heads: the number of heads n.
        head_dim: the size of one head d; heads * head_dim need not be M.
        *steps: modules called as step(x [B,n,L,d], positions).
        flat: a module on [B,L,n*d] before the split, such as a norm over all heads.
        bias: whether the linear map has one.

    Raises:
        ArgumentError: a size is less than 1.

    >>> import torch
    >>> Heads(8, 4, 3)(torch.zeros(1, 5, 8), None).shape
    torch.Size([1, 4, 5, 3])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        *steps: nn.Module,
        flat: nn.Module | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if min(dim, heads, head_dim) < 1:
            raise ArgumentError(
                f"Heads(dim={dim}, heads={heads}, head_dim={head_dim}): each must be at least 1"
            )
        self.heads, self.head_dim = heads, head_dim
        self.linear = Linear(dim, heads * head_dim, bias=bias)
        self.flat = flat if flat is not None else nn.Identity()
        self.steps = nn.ModuleList(steps)

    def forward(
        self, x: Float[Tensor, "B L M"], positions: Positions | None
    ) -> Float[Tensor, "B n L d"]:
        """Project, split, and run the steps.

        Raises:
            ArgumentError, ArgumentTypeError: x is not [batch, length, dim] of the dim and dtype of the map.
        """
        if x.ndim != 3:
            raise ArgumentError(f"x is {tuple(x.shape)}; it must be [batch, length, dim]")
        x = self.flat(self.linear(x)).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        for step in self.steps:
            x = step(x, positions)
        return x

    def extra_repr(self) -> str:
        """The number of heads and their size."""
        return f"{self.heads} heads of {self.head_dim}"


class Separate(nn.Module):
    """Queries, keys and values each from heads of their own; keys and values are remembered as the
    heads made them.

    Args:
        q: `Heads` that make H query heads.
        k, v: `Heads` that make G key and value heads; G divides H.
        late: a step on keys when they are recalled, such as a rotary whose frequencies follow the
            length: keys are then remembered without it (`regard.nn.policy`).

    Raises:
        ArgumentError: k and v differ in heads, G does not divide H, or q and k differ in head dim.

    >>> import torch
    >>> project = Separate(Heads(8, 4, 2), Heads(8, 2, 2), Heads(8, 2, 2))
    >>> [m.shape[1] for m in project.remember(torch.zeros(1, 5, 8), None)]
    [2, 2]
    """

    def __init__(self, q: Heads, k: Heads, v: Heads, *, late: nn.Module | None = None) -> None:
        super().__init__()
        check_groups(q.heads, k.heads)
        if k.heads != v.heads or q.head_dim != k.head_dim:
            raise ArgumentError(
                f"q is {q.extra_repr()}, k is {k.extra_repr()}, v is {v.extra_repr()}: "
                "k and v need the same number of heads, q and k the same head dim"
            )
        self.q, self.k, self.v, self.late = q, k, v, late
        # keys rotated by frequencies of the present length go stale when it grows
        self.stale = stale(k)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """q [B,H,T,D]."""
        return self.q(x, positions)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """k [B,G,S,D], without the late step, and v [B,G,S,E]."""
        return self.k(x, positions), self.v(x, positions)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys, behind the late step, and values."""
        k, v = memory
        return (k if self.late is None else self.late(k, positions)), v

    def finish(self, z: Tensor, x: Tensor) -> Tensor:
        """Heads as attention gave them."""
        return z

    @property
    def shape(self) -> ProjectionShape:
        """H, G, D, E, and what a token takes: G D and G E numbers."""
        G, D, E = self.k.heads, self.k.head_dim, self.v.head_dim
        return ProjectionShape(self.q.heads, G, D, E, (G * D, G * E))


def stale(heads: nn.Module) -> str | None:
    """Why keys of these heads go stale in a cache, or None."""
    for step in heads.modules():
        if isinstance(step, Rotary) and step.follows:
            return (
                f"{step} follows the length of each call, so that keys rotated before are stale; "
                "freeze its length, or "
                "remember keys before they are rotated (regard.nn.policy)"
            )
    return None
