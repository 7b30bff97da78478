"""Projections: how hidden states become queries, what a cache stores, and how stored memory becomes
keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast, get_args, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_groups, check_number
from regard.caches import Parts
from regard.cost.softmax import SoftmaxSpec, VisibleKeys
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.explain import (
    Explainable,
    InputSteps,
    Link,
    Links,
    ProjectionQuery,
    first_rotary,
    projected,
    run_steps,
)
from regard.nn.linear import Linear, linear
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

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """The result of attention [B,H,T,E] -> the heads that the output joins. x [B,T,M] are the
        hidden states that the queries were made from.
        """

    @property
    def shape(self) -> ProjectionShape:
        """The sizes that its queries, keys, values and memory have."""

    @property
    def cache_unsafe_reason(self) -> str | None:
        """Why a cache must not keep what it remembers, or None if it may."""


@runtime_checkable
class HasForms(Projection, Protocol):
    """A projection with several forms that are equal in exact arithmetic; the lengths of a call
    decide which is used. Latents, for example, are expanded or not.

    All forms remember the same, so that they share a cache.
    """

    def select_form(self, queries: int, keys: int) -> Projection:
        """The form for so many queries against so many keys in memory."""

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """The cost of attention through this projection, by the form that has fewer FLOPs."""


def select_form(project: Projection, queries: int, keys: int) -> Projection:
    """The form of a projection for so many queries against so many keys: itself, unless it
    `HasForms`.
    """
    # asked of the class, since isinstance would evaluate every property
    has_forms = hasattr(type(project), "select_form")
    return cast("HasForms", project).select_form(queries, keys) if has_forms else project


@runtime_checkable
class AdjustsQuery(Projection, Protocol):
    """A projection whose queries depend on where the keys in memory stand, such as rotary
    frequencies that follow the length.
    """

    def adjust_query(self, q: Tensor, positions: Positions, seen: Positions) -> Tensor:
        """Queries [B,H,T,D] at positions -> those for keys at the positions seen."""


def adjust_query(project: Projection, q: Tensor, positions: Positions, seen: Positions) -> Tensor:
    """Queries for keys at the positions seen: as they are, unless the projection adjusts them
    (`AdjustsQuery`).
    """
    adjusts = hasattr(type(project), "adjust_query")
    return cast("AdjustsQuery", project).adjust_query(q, positions, seen) if adjusts else q


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


def attention_spec(project: Projection, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
    """The cost of softmax attention through a projection.

    Args:
        project: the projection; one with several forms says its cost itself.
        weights: the parameters of the layer, counted.
        visible: the keys that a query sees.
    """
    if isinstance(project, HasForms):
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
            ArgumentError, ArgumentTypeError: x is not [batch, length, dim] of the dim and dtype of
                the map.
        """
        if x.ndim != 3:
            raise ArgumentError(f"x is {tuple(x.shape)}; it must be [batch, length, dim]")
        parts: dict[str, Any] = self._modules  # asked directly: much quicker than `self.linear`
        y, flat = parts["linear"](x), parts["flat"]
        if type(flat) is not nn.Identity or flat._forward_hooks or flat._forward_pre_hooks:
            y = flat(y)
        y = y.reshape(*x.shape[:2], self.heads, self.head_dim).transpose(1, 2)
        for step in parts["steps"]._modules.values():
            y = step(y, positions)
        result: Float[Tensor, "B n L d"] = y
        return result

    def explain_steps(
        self, x: Tensor, positions: Positions, letter: Literal["q", "k", "v"]
    ) -> Links:
        """The linear map, then each step on the heads, each [n,L,d] of x [1,L,M]."""
        heads = self.flat(self.linear(x)).unflatten(-1, (self.heads, self.head_dim))
        flat = "" if isinstance(self.flat, nn.Identity) else f"{type(self.flat).__name__.lower()} "
        first = projected(letter, heads.transpose(1, 2)[0], flat)
        return run_steps(self.steps, (first,), positions, letter)

    def extra_repr(self) -> str:
        """The number of heads and their size."""
        return f"{self.heads} heads of {self.head_dim}"


class Separate(Explainable, nn.Module):
    """Queries, keys and values each from heads of their own; keys and values are remembered as the
    heads made them.

    Args:
        q: `Heads` that make H query heads.
        k, v: `Heads` that make G key and value heads; G divides H.
        key_transform: a step on keys when they are recalled, such as a rotary whose frequencies
            follow the length: keys are then remembered without it (`regard.nn.dynamic_rotary`).

    Raises:
        ArgumentError: k and v differ in heads, G does not divide H, or q and k differ in head dim.

    >>> import torch
    >>> project = Separate(Heads(8, 4, 2), Heads(8, 2, 2), Heads(8, 2, 2))
    >>> [m.shape[1] for m in project.remember(torch.zeros(1, 5, 8), None)]
    [2, 2]
    """

    def __init__(
        self, q: Heads, k: Heads, v: Heads, *, key_transform: nn.Module | None = None
    ) -> None:
        super().__init__()
        check_groups(q.heads, k.heads)
        if k.heads != v.heads or q.head_dim != k.head_dim:
            raise ArgumentError(
                f"q is {q.extra_repr()}, k is {k.extra_repr()}, v is {v.extra_repr()}: "
                "k and v need the same number of heads, q and k the same head dim"
            )
        self.q, self.k, self.v, self.key_transform = q, k, v, key_transform
        # keys rotated by frequencies of the present length go stale when it grows
        self.cache_unsafe_reason = cache_unsafe_reason(k)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """q [B,H,T,D]."""
        parts: dict[str, Any] = self._modules  # asked directly: much quicker than `self.q`
        q: Tensor = parts["q"](x, positions)
        return q

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """k [B,G,S,D], before `key_transform`, and v [B,G,S,E]."""
        parts: dict[str, Any] = self._modules
        return parts["k"](x, positions), parts["v"](x, positions)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys, after `key_transform`, and values."""
        k, v = memory
        return (k if self.key_transform is None else self.key_transform(k, positions)), v

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Heads as attention gave them."""
        return z

    @property
    def shape(self) -> ProjectionShape:
        """H, G, D, E, and what a token takes: G D and G E numbers."""
        G, D, E = self.k.heads, self.k.head_dim, self.v.head_dim
        return ProjectionShape(self.q.heads, G, D, E, (G * D, G * E))

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """The heads' own steps, and the late step behind those of queries and keys."""
        q = self.q.explain_steps(query.x, query.positions, "q")
        k = self.k.explain_steps(query.memory, query.k_positions, "k")
        v = self.v.explain_steps(query.memory, query.k_positions, "v")
        late = [] if self.key_transform is None else [self.key_transform]
        q = run_steps(late, q, query.positions, "q")
        k = run_steps(late, k, query.k_positions, "k")
        return InputSteps(q, k, v, first_rotary([*self.q.steps, *late]))


def cache_unsafe_reason(heads: nn.Module) -> str | None:
    """Why a cache must not keep the keys of these heads, or None if it may."""
    for step in heads.modules():
        if isinstance(step, Rotary) and step.follows:
            return (
                f"{step} follows the length of each call, so that keys rotated before are stale; "
                "freeze its length, or "
                "remember keys before they are rotated (regard.nn.dynamic_rotary)"
            )
    return None


Order: TypeAlias = Literal["parts", "heads", "groups"]
"""How the rows of a fused matrix are laid out: [all q | all k | all v] as in GPT-2 and Phi-3, [q k
v] head by head as in GPT-NeoX and BLOOM, or [its queries, k, v] group by group as in Falcon-40B.
The shapes are equal: only the order tells."""


class Unprojected(nn.Module):
    """Queries, keys and values are the tokens themselves, one head as wide as the model: attention
    without weights.

    q = k = v = x

    Args:
        dim: the model dim M.

    >>> Unprojected(3).query(torch.ones(1, 2, 3), None).shape
    torch.Size([1, 1, 2, 3])

    Source: Raschka 2024, "Build a Large Language Model (From Scratch)", section 3.3.
    """

    cache_unsafe_reason: str | None = None

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

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """The head as it is."""
        return z

    @property
    def shape(self) -> ProjectionShape:
        """One head of M; a token takes M numbers."""
        return ProjectionShape(1, 1, self.dim, self.dim, (self.dim,))


class PerHead(Heads):
    """Heads with a linear map each, side by side: the same function as `Heads`, which stacks their
    matrices.

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
        """The same heads from one matrix, the heads' rows below one another; the steps are
        shared.
        """
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


class Fused(Explainable, nn.Module):
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
        ArgumentError: a size is less than 1, G does not divide H, the order is unknown, or is
            "heads" with G != H.

    >>> fused = Fused(8, 4, 2, 2)
    >>> fused.linear.weight.shape
    torch.Size([16, 8])
    """

    cache_unsafe_reason: str | None = None

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
                f'order "heads" has one key and value per query head, not {groups} for {heads}; '
                'use "groups"'
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

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Heads as attention gave them."""
        return z

    @property
    def shape(self) -> ProjectionShape:
        """H, G, D = E; a token takes 2 G D numbers."""
        D = self.head_dim
        return ProjectionShape(self.heads, self.groups, D, D, (self.groups * D,) * 2)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """The rows of the matrix that make each of them, and the steps on queries and keys."""
        q = (projected("q", self._heads(query.x, 0)[0]),)
        k = (projected("k", self._heads(query.memory, 1)[0]),)
        v = (projected("v", self._heads(query.memory, 2)[0]),)
        return InputSteps(
            run_steps(self.steps, q, query.positions, "q"),
            run_steps(self.steps, k, query.k_positions, "k"),
            v,
            first_rotary(self.steps),
        )

    def _heads(self, x: Tensor, which: int) -> Tensor:
        """The heads of one of q, k, v: [B,n,L,D]."""
        D, rows = self.head_dim, self._rows[which]
        if self.order == "parts":  # a run of rows: a view
            first, n = rows[0] * D, len(rows)
            weight = self.linear.weight[first : first + n * D]
            bias = self.linear.bias[first : first + n * D] if self.linear.bias is not None else None
        else:
            weight = torch.unflatten(self.linear.weight, 0, (-1, D))[rows].flatten(0, 1)
            bias = self.linear.bias
            bias = None if bias is None else torch.unflatten(bias, 0, (-1, D))[rows].flatten()
        return torch.unflatten(linear(x, weight, bias), -1, (len(rows), D)).transpose(1, 2)

    def _run(self, x: Tensor, positions: Positions | None) -> Tensor:
        for step in self.steps:
            x = step(x, positions)
        return x

    def extra_repr(self) -> str:
        """The heads and the order of the rows."""
        return f"{self.heads} and {self.groups} heads of {self.head_dim}, order={self.order!r}"


def _rows(heads: int, groups: int, order: Order) -> tuple[list[int], list[int], list[int]]:
    """Which heads of the fused matrix are queries, keys and values, in the order of their own
    heads.
    """
    if order == "parts":
        marks = [0] * heads + [1] * groups + [2] * groups
    else:
        marks = ([0] * (heads // groups) + [1, 2]) * groups
    q, k, v = ([i for i, mark in enumerate(marks) if mark == part] for part in range(3))
    return q, k, v


class Clipped(Fused):
    """A `Fused` projection whose queries, keys and values are clipped before the steps.

    [q; k; v] = clip(W x + b, -c, c)

    Args:
        dim, heads, groups, head_dim, order, steps, bias: as for `Fused`.
        limit: c, above 0.

    Raises:
        ArgumentError: limit is not above 0; or as `Fused`.

    >>> import torch
    >>> clipped = Clipped(8, 4, 4, 2, limit=0.5, bias=False)
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
        order: Order = "parts",
        steps: Sequence[nn.Module] = (),
        bias: bool = True,
    ) -> None:
        check_number("limit", limit, 0, float("inf"), "above 0: leave the clipping out otherwise")
        super().__init__(dim, heads, groups, head_dim, order=order, steps=steps, bias=bias)
        self.limit = limit

    def _heads(self, x: Tensor, which: int) -> Tensor:
        return super()._heads(x, which).clamp(-self.limit, self.limit)

    def extra_repr(self) -> str:
        """The heads, the order of the rows and the limit."""
        return f"{super().extra_repr()}, limit={self.limit:g}"


class States(Explainable, nn.Module):
    """Values are the remembered states themselves; keys are too, unless they have a map of their
    own.

    q = query map(x);  k = key map(h), or h;  v = h; each split into heads.

    Args:
        query: the size of x, or a module [B,T,M] -> [B,T,H*D], such as a linear map.
        states: the size of one state h.
        heads: H; every size is divided among them. The papers have one.
        key: a linear map of h to H*D, or None: keys are the states, and a cache keeps them once.

    Raises:
        ArgumentError: a size is not a multiple of heads, or queries and keys differ in size.

    >>> import torch
    >>> states = States(nn.Linear(6, 8), 8)  # h_t^T W h_s: W may stand on the query's side
    >>> states.query(torch.ones(1, 2, 6), None).shape, states.shape.memory
    (torch.Size([1, 1, 2, 8]), (8,))

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), section 3.1; Luong et al. 2015 (arXiv
    1508.04025), equation 8.
    """

    cache_unsafe_reason: str | None = None

    def __init__(
        self, query: int | nn.Linear, states: int, *, heads: int = 1, key: nn.Linear | None = None
    ) -> None:
        super().__init__()
        made = query if isinstance(query, int) else query.out_features
        keys = states if key is None else key.out_features
        if made != keys:
            raise ArgumentError(
                f"queries have {made} numbers and keys {keys}; give a linear map to {keys} for "
                "the query, or a key map"
            )
        if heads < 1 or made < 1 or made % heads or states % heads:
            raise ArgumentError(
                f"{heads} heads for keys of {keys} and states of {states}; both must be multiples "
                "of heads, at least 1"
            )
        if key is not None and key.in_features != states:
            raise ArgumentError(
                f"the key map takes {key.in_features} numbers, but states have {states}"
            )
        self.q: nn.Module = nn.Identity() if isinstance(query, int) else query
        self.k, self.heads, self.made, self.states = key, heads, made, states

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """q [B,H,T,D]."""
        _check_last("x", x, self.q.in_features if isinstance(self.q, nn.Linear) else self.made)
        return self._split(self.q(x))

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """The states [B,H,S,E], behind the keys [B,H,S,D] where those are something else."""
        _check_last("memory", x, self.states)
        states = self._split(x)
        return (states,) if self.k is None else (self._split(self.k(x)), states)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return memory[0], memory[-1]

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Heads as attention gave them."""
        return z

    @property
    def shape(self) -> ProjectionShape:
        """H heads of keys and of states; a token takes one state, and its keys where they have a
        map.
        """
        memory = (self.states,) if self.k is None else (self.made, self.states)
        H = self.heads
        return ProjectionShape(H, H, self.made // H, self.states // H, memory)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """The maps of queries and keys; the values are the states."""
        k, v = self.recall(self.remember(query.memory, None), None)
        return InputSteps(
            (Link("projected", "q_i = W_Q s_i", self.query(query.x, None)[0]),),
            (Link("projected", "k_j = W_K h_j", k[0]),),
            (Link("state", "v_j = h_j", v[0]),),
        )

    def _split(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Heads and sizes."""
        return f"{self.heads} heads, keys of {self.made}, states of {self.states}"


def _check_last(name: str, x: Tensor, dim: int) -> None:
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ArgumentError(f"{name} is {tuple(x.shape)}; it must be [batch, length, {dim}]")
