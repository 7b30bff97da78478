"""Projections: modules that turn hidden states into queries, into the parts that a cache stores
("memory"), and stored memory back into keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_groups, check_number, check_positive_sizes
from regard.biases import Bias
from regard.caches import Parts
from regard.caches.cross_layer import FirstValues
from regard.cost.softmax import SoftmaxSpec, VisibleKeys
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.explainable import (
    Explainable,
    InputSteps,
    MechanismStep,
    MechanismSteps,
    ProjectionQuery,
    first_rotary,
    projection_step,
    run_steps,
)
from regard.nn.linear import Linear, linear
from regard.nn.module_calls import is_plain
from regard.ops.stored_linear import stored_linear
from regard.positions import Rotary
from regard.positions.constant_tensor import ConstantTensor
from regard.span import Positions
from regard.units import plural


class Projection(Explainable):
    """Base class of projections, which compute queries and memory from hidden states, and keys and
    values from memory.

    A subclass, which is usually also an `nn.Module`, writes `query`, `remember`, `recall` and
    `shape`. The other methods have defaults for what most projections do not do.

    A projection may have several forms that are equal in exact arithmetic (`has_forms`). That of
    MLA, for example, either expands the cached latents to keys and values, or multiplies the
    queries by the expansion matrix and uses the latents as they are. All forms store the same
    memory, so they can share a cache.
    """

    cache_unsafe_reason: str | None = None
    """The reason why a cache must not store the result of `remember`; None if it may."""

    @property
    def has_forms(self) -> bool:
        """Whether `select_form` may return another projection than this one."""
        return False

    @property
    def carries_values(self) -> bool:
        """Whether the projection gives the values of the first layer to the later layers of a
        decoder, or mixes them with its own.
        """
        return False

    @property
    def adds_bias(self) -> bool:
        """Whether the projection computes a bias from the tokens (`data_bias`)."""
        return type(self).data_bias is not Projection.data_bias

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of its queries, keys, values and memory."""
        raise NotImplementedError

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Compute the queries of hidden states.

        Args:
            x: hidden states [B,T,M].
            positions: positions of their tokens.

        Returns:
            The queries [B,H,T,D].
        """
        raise NotImplementedError

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Compute what a cache stores for hidden states.

        Args:
            x: hidden states [B,S,M].
            positions: positions of their tokens.

        Returns:
            The parts that a cache stores, each [B,n,S,d]: keys and values, or for MLA one latent.
        """
        raise NotImplementedError

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Compute keys and values from stored memory.

        Args:
            memory: the parts that `remember` returned, possibly of several calls.
            positions: positions of their tokens.

        Returns:
            The keys [B,G,S,D] and the values [B,G,S,E].
        """
        raise NotImplementedError

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Transform the result of attention before the output map, for example by a gate.

        Args:
            z: the result of attention [B,H,T,E].
            x: the hidden states [B,T,M] that the queries were computed from.

        Returns:
            The heads [B,H',T,E'] that the output map concatenates and projects; by default z.
        """
        return z

    def postprocess_at(self, z: Tensor, x: Tensor, positions: Positions) -> Tensor:
        """Transform the result of attention at the positions of the queries, for example by a
        rotation back.

        Args:
            z: the result of attention [B,H,T,E].
            x: the hidden states [B,T,M] that the queries were computed from.
            positions: positions of their tokens.

        Returns:
            The heads [B,H',T,E']; by default those of `postprocess`.
        """
        return self.postprocess(z, x)

    def remember_carried(self, x: Tensor, positions: Positions, first: FirstValues) -> Parts:
        """Compute what a cache stores, and give or take the values of the first layer.

        Args:
            x: hidden states [B,S,M].
            positions: positions of their tokens.
            first: the values of the first layer in this call.

        Returns:
            The parts that a cache stores; by default those of `remember`.
        """
        return self.remember(x, positions)

    def adjust_query(self, q: Tensor, positions: Positions, k_positions: Positions) -> Tensor:
        """Adjust queries to the positions of the keys in memory, for example because rotary
        frequencies change with the length of the text.

        Args:
            q: queries [B,H,T,D].
            positions: positions of the queries.
            k_positions: positions of the keys.

        Returns:
            The adjusted queries; by default q.
        """
        return q

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias | None:
        """Compute a bias on the scores from the tokens of a call.

        It is an ordinary bias of the attention call, so that every kernel that takes one serves
        such a projection, and recordings and explanations show it.

        Args:
            x: the hidden states [B,T,M] of the queries.
            q: queries [B,H,T,D].
            memory: the visible memory, parts [B,n,S,d].
            positions: positions of the queries.
            k_positions: positions of the keys.

        Returns:
            The bias; None if the projection has none.
        """
        return None

    def select_form(self, queries: int, keys: int) -> Projection:
        """Select the form for a call.

        Args:
            queries: the number of queries T.
            keys: the number of keys S in memory.

        Returns:
            The form; by default this projection.
        """
        return self

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Describe the cost of attention through this projection.

        Args:
            weights: the number of parameters of the layer.
            visible: the number of keys that a query sees.

        Returns:
            The cost, in the form that needs fewer FLOPs; by default that of softmax attention.
        """
        return SoftmaxSpec(weights, self.shape.parts, self.shape.heads, visible)


def check_adds_no_bias(project: Projection, mechanism: str) -> None:
    """Check that a projection computes no bias, for a mechanism that would not add it."""
    if project.adds_bias:
        raise ArgumentError(
            f"project is {type(unwrapped(project)).__name__}, which computes a bias from the "
            f"tokens, and {mechanism} adds none; use regard.nn.Attention, which does"
        )


class ProjectionShape(NamedTuple):
    """The sizes of the tensors that a projection computes."""

    H: int
    G: int
    D: int
    E: int
    memory: tuple[int, ...]

    @property
    def heads(self) -> HeadShape:
        """The sizes of the heads, in the type that `regard.cost` uses."""
        return HeadShape(self.H, self.G, self.D, self.E)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(heads, dim) of each part that a cache stores per token, in the type that `regard.cost`
        uses.
        """
        if self.memory == (self.G * self.D, self.G * self.E):
            return self.heads.parts
        return tuple((1, size) for size in self.memory)


class HeadProjection(nn.Module):
    """A linear map whose output is split into heads, followed by a list of steps on each head.

    x [B,L,M] -> W x + b -> flat(.) -> split into heads [B,n,L,d] -> step(., positions) -> ...

    The steps run in the given order: `HeadProjection(M, H, D, RMSNorm(D), rotary)` normalises
    before it rotates, `HeadProjection(M, H, D, rotary, RMSNorm(D))` after.

    Args:
        dim: the model dim M.
        heads: the number of heads n.
        head_dim: the size of one head d; heads * head_dim need not be M.
        *steps: modules called as step(x [B,n,L,d], positions), such as a norm or a `Rotary`.
        flat: a module on [B,L,n*d] that is applied before the split, such as a norm over all heads;
            None applies none.
        bias: whether the linear map has a bias.

    Raises:
        ArgumentError: a size is less than 1.

    >>> import torch
    >>> HeadProjection(8, 4, 3)(torch.zeros(1, 5, 8), None).shape
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
        check_positive_sizes("HeadProjection", dim=dim, heads=heads, head_dim=head_dim)
        self.heads, self.head_dim = heads, head_dim
        self.linear = Linear(dim, heads * head_dim, bias=bias)
        self.flat = flat if flat is not None else nn.Identity()
        self.steps = nn.ModuleList(steps)

    def forward(
        self, x: Float[Tensor, "B L M"], positions: Positions | None
    ) -> Float[Tensor, "B n L d"]:
        """Apply the linear map, split its output into heads, and run the steps."""
        if x.ndim != 3:
            raise ArgumentError(f"x is {tuple(x.shape)}; it must be [batch, length, dim]")
        parts: dict[str, Any] = self._modules  # much faster than nn.Module's attribute access
        y, flat = parts["linear"](x), parts["flat"]
        if not is_plain(flat, nn.Identity):
            y = flat(y)
        # tensor parallelism leaves some of the heads to each process
        y = y.reshape(*x.shape[:2], y.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)
        for step in parts["steps"]._modules.values():
            y = step(y, positions)
        result: Float[Tensor, "B n L d"] = y
        return result

    def explain_steps(
        self, x: Tensor, positions: Positions, letter: Literal["q", "k", "v"]
    ) -> MechanismSteps:
        """Compute the linear map and each step on the heads, for an explanation.

        Args:
            x: hidden states of one sequence [1,L,M].
            positions: positions of their tokens.
            letter: whether the heads are queries, keys or values.

        Returns:
            The steps, each with its values [n,L,d].
        """
        heads = self.flat(self.linear(x)).unflatten(-1, (self.heads, self.head_dim))
        flat = "" if isinstance(self.flat, nn.Identity) else type(self.flat).__name__.lower()
        first = projection_step(letter, heads.transpose(1, 2)[0], self.linear, flat)
        return run_steps(self.steps, (first,), positions, letter)

    def extra_repr(self) -> str:
        """Return the number of heads and the head dim."""
        return f"{plural(self.heads, 'head')} of {self.head_dim}"


class WrappedProjection(Projection, nn.Module):
    """A projection around another one, which changes only the result of attention (`finish`)."""

    def __init__(self, project: Projection) -> None:
        super().__init__()
        self.project = project

    def finish(self, z: Tensor, x: Tensor, positions: Positions | None) -> Tensor:
        """Change heads z [B,H,T,E] behind the last step of the wrapped projection."""
        raise NotImplementedError

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the queries [B,H,T,D] of the wrapped projection."""
        return self.project.query(x, positions)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the memory parts of the wrapped projection."""
        return self.project.remember(x, positions)

    def remember_carried(self, x: Tensor, positions: Positions, first: FirstValues) -> Parts:
        """Return the memory parts of the wrapped projection, which gives or takes values."""
        return self.project.remember_carried(x, positions, first)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the wrapped projection."""
        return self.project.recall(memory, positions)

    def adjust_query(self, q: Tensor, positions: Positions, k_positions: Positions) -> Tensor:
        """Adjust queries as the wrapped projection does."""
        return self.project.adjust_query(q, positions, k_positions)

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias | None:
        """Return the bias that the wrapped projection computes from the tokens, or None."""
        return self.project.data_bias(x, q, memory, positions, k_positions)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Finish the heads without positions."""
        return self.finish(self.project.postprocess(z, x), x, None)

    def postprocess_at(self, z: Tensor, x: Tensor, positions: Positions) -> Tensor:
        """Finish the heads of queries at these positions."""
        return self.finish(self.project.postprocess_at(z, x, positions), x, positions)

    def select_form(self, queries: int, keys: int) -> Projection:
        """Return the form of the wrapped projection, with the same last step."""
        form = self.project.select_form(queries, keys)
        return self if form is self.project else FinishedForm(form, self)

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention through the wrapped projection."""
        return self.project.spec(weights, visible)

    @property
    def has_forms(self) -> bool:
        """Whether the wrapped projection has several forms."""
        return self.project.has_forms

    @property
    def adds_bias(self) -> bool:
        """Whether the wrapped projection computes a bias from the tokens."""
        return self.project.adds_bias

    @property
    def carries_values(self) -> bool:
        """Whether the wrapped projection gives or takes the values of the first layer."""
        return self.project.carries_values

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of the wrapped projection."""
        return self.project.shape

    @property
    def cache_unsafe_reason(self) -> str | None:  # type: ignore[override]
        """The reason why a cache must not store the memory of the wrapped projection, or None."""
        return self.project.cache_unsafe_reason


def unwrapped(project: Projection) -> Projection:
    """Return the projection inside of gates and other wrappers."""
    while isinstance(project, WrappedProjection):
        project = project.project
    return project


class FinishedForm(Projection):
    """One form of a wrapped projection, with the last step of the wrapper on its result."""

    def __init__(self, form: Projection, wrapper: WrappedProjection) -> None:
        self.form, self.wrapper = form, wrapper
        self.query, self.recall = form.query, form.recall  # type: ignore[method-assign]

    def postprocess_at(self, z: Tensor, x: Tensor, positions: Positions) -> Tensor:
        """Postprocess the heads by the form, then finish them."""
        return self.wrapper.finish(self.form.postprocess_at(z, x, positions), x, positions)

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of the form."""
        return self.form.shape


class SeparateQKV(Projection, nn.Module):
    """A projection with separate linear maps for queries, keys and values. A cache stores the keys
    and the values.

    Args:
        q: a `HeadProjection` to H query heads.
        k, v: `HeadProjection`s to G key heads and G value heads; G divides H.
        key_transform: a module that is applied to keys [B,G,S,D] when they are read from memory,
            not before they are stored, such as a rotary whose frequencies follow the length
            (`regard.nn.dynamic_rotary`). None applies none.

    Raises:
        ArgumentError: k and v differ in heads, G does not divide H, or q and k differ in head dim.

    >>> import torch
    >>> q, k, v = (HeadProjection(8, heads, 2) for heads in (4, 2, 2))
    >>> project = SeparateQKV(q, k, v)
    >>> [part.shape[1] for part in project.remember(torch.zeros(1, 5, 8), None)]
    [2, 2]
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        *,
        key_transform: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_groups(q.heads, k.heads)
        self._check_heads(q, k, v)
        self.q, self.k, self.v, self.key_transform = q, k, v, key_transform
        # Cached keys become wrong if their rotary frequencies change with the length of the text.
        self.cache_unsafe_reason = cache_unsafe_reason(k)

    def _check_heads(self, q: HeadProjection, k: HeadProjection, v: HeadProjection) -> None:
        """Raise unless there are as many value heads as key heads, and q and k have one head
        dim.
        """
        if k.heads != v.heads or q.head_dim != k.head_dim:
            raise ArgumentError(
                f"q is {q.extra_repr()}, k is {k.extra_repr()}, v is {v.extra_repr()}; "
                "k and v must have the same number of heads, and q and k the same head dim"
            )

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the queries [B,H,T,D] of hidden states x."""
        parts: dict[str, Any] = self._modules  # much faster than nn.Module's attribute access
        q: Tensor = parts["q"](x, positions)
        return q

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys [B,G,S,D], before `key_transform`, and the values [B,G,S,E]."""
        parts: dict[str, Any] = self._modules
        return parts["k"](x, positions), parts["v"](x, positions)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the keys [B,G,S,D], after `key_transform`, and the values [B,G,S,E]."""
        k, v = memory
        return (k if self.key_transform is None else self.key_transform(k, positions)), v

    @property
    def shape(self) -> ProjectionShape:
        """H, G, D and E; a cache stores G D + G E values per token."""
        G, D, E = self.k.heads, self.k.head_dim, self.v.head_dim
        return ProjectionShape(self.q.heads, G, D, E, (G * D, G * E))

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the three projections, with `key_transform` as the last one of
        queries and keys.
        """
        q = self.q.explain_steps(query.x, query.positions, "q")
        k = self.k.explain_steps(query.memory, query.k_positions, "k")
        v = self.v.explain_steps(query.memory, query.k_positions, "v")
        transforms = [] if self.key_transform is None else [self.key_transform]
        q = run_steps(transforms, q, query.positions, "q")
        k = run_steps(transforms, k, query.k_positions, "k")
        return InputSteps(q, k, v, first_rotary([*self.q.steps, *transforms]))


def cache_unsafe_reason(heads: nn.Module) -> str | None:
    """Return why a cache must not store the keys of a projection, or None if it may."""
    for step in heads.modules():
        if isinstance(step, Rotary) and step.follows_length:
            return (
                f"the frequencies of {step} follow the length of each call, so cached keys would "
                "be rotated by other frequencies than new ones; give it a fixed length=<number>, "
                "or cache keys before they are rotated (regard.nn.dynamic_rotary)"
            )
    return None


QKVRowOrder: TypeAlias = Literal["parts", "heads", "groups"]
"""The order of the rows in a fused QKV matrix. "parts": all queries, all keys, all values, as in
GPT-2 and Phi-3; "heads": q, k, v of each head in turn, as in GPT-NeoX and BLOOM; "groups": the
queries, the key and the value of each group in turn, as in Falcon-40B. All three have one shape, so
the order cannot be inferred from it."""


class IdentityProjection(Projection, nn.Module):
    """A projection without weights: queries, keys and values are the hidden states themselves, in
    one head.

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
        return self._head(x)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return x once, as one head [B,1,S,M]; it serves as key and as value."""
        return (self._head(x),)

    def _head(self, x: Tensor) -> Tensor:
        """Check that x is [batch, length, dim] and insert a head axis."""
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ArgumentError(f"x is {tuple(x.shape)}; it must be [batch, length, {self.dim}]")
        return x[:, None]

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the stored states as keys and as values."""
        return memory[0], memory[0]

    @property
    def shape(self) -> ProjectionShape:
        """One head of size M; a cache stores M values per token."""
        return ProjectionShape(1, 1, self.dim, self.dim, (self.dim,))


class PerHeadProjection(HeadProjection):
    """A `HeadProjection` with a separate linear map for each head. It computes the same function as
    a `HeadProjection`, which stacks these matrices into one.

    x [B,L,M] -> [W_1 x; ...; W_n x] as [B,n,L,d], then the steps

    Args:
        dim, heads, head_dim, bias: as for `HeadProjection`.
        *steps: as for `HeadProjection`.

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
            A `HeadProjection` that computes the same heads; it has copies of the matrices and
            shares the steps.
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
        ArgumentError: a size is less than 1, G does not divide H, the order is unknown, or is
            "heads" with G != H.

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
        return self._run_steps(self._heads(x, 0), positions)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys [B,G,S,D] and the values [B,G,S,D]."""
        return self._run_steps(self._heads(x, 1), positions), self._heads(x, 2)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return keys and values as they were stored."""
        k, v = memory
        return k, v

    @property
    def shape(self) -> ProjectionShape:
        """H, G and D, with E = D; a cache stores 2 G D values per token."""
        D = self.head_dim
        return ProjectionShape(self.heads, self.groups, D, D, (self.groups * D,) * 2)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the linear map of queries, keys and values, followed by the steps on queries and
        keys.
        """
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
            return torch.unflatten(y, -1, (-1, D)).transpose(1, 2)
        stored: object = self.linear.weight
        if not isinstance(stored, Tensor):
            # another layer in its place, such as torch's quantised one, has no rows to choose
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
            weight = torch.unflatten(weight, 0, (-1, D))[index].flatten(0, 1)
            bias = None if bias is None else torch.unflatten(bias, 0, (-1, D))[index].flatten()
        return torch.unflatten(linear(x, weight, bias), -1, (len(rows), D)).transpose(1, 2)

    def _run_steps(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Apply the steps to heads x [B,n,L,D]."""
        for step in self.steps:
            x = step(x, positions)
        return x

    def extra_repr(self) -> str:
        """Return the numbers of heads, the head dim and the order of the rows."""
        heads = f"{plural(self.heads, 'query head')} and {plural(self.groups, 'key/value head')}"
        return f"{heads} of {self.head_dim}, order={self.order!r}"


def _head_rows(
    heads: int, groups: int, order: QKVRowOrder
) -> tuple[list[int], list[int], list[int]]:
    """Return the indices of the query, the key and the value heads among the H + 2 G heads of a
    fused matrix.
    """
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

    >>> import torch
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
        return super()._heads(x, part).clamp(-self.limit, self.limit)

    def extra_repr(self) -> str:
        """Return the numbers of heads, the head dim, the order of the rows and the limit."""
        return f"{super().extra_repr()}, limit={self.limit:g}"


class Clip(nn.Module):
    """Clip numbers to [-limit, limit], as a step of a `HeadProjection`.

    Source: Groeneveld et al. 2024 (arXiv 2402.00838): `clip_qkv` of the released code.
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        check_number("limit", limit, 0, float("inf"), "above 0")
        self.limit = limit

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Clip x [..., D]; positions are ignored."""
        return x.clamp(-self.limit, self.limit)

    def extra_repr(self) -> str:
        """Return the limit of the absolute values."""
        return f"limit={self.limit:g}"


class EncoderStateProjection(Projection, nn.Module):
    """A projection for attention to an encoder. The values are the encoder states themselves; the
    keys are the states, or a linear map of them.

    q = query map(x), or x;  k = key map(h), or h;  v = h; each split into heads

    Args:
        query: a linear map [B,T,M] -> [B,T,H*D]; or the size of x, if x itself is the query.
        states: the size of one encoder state h.
        heads: the number of heads H, which divides every size. The papers use one.
        key: a linear map of h to H*D; None uses the states as keys, and a cache stores them once.

    Raises:
        ArgumentError: a size is not a multiple of heads, or queries and keys differ in size.

    >>> import torch
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
        """Return the states [B,H,S,E]; if keys have a linear map, return the keys [B,H,S,D] and the
        states.
        """
        _check_width("memory", x, self.states)
        states = self._split(x)
        return (states,) if self.k is None else (self._split(self.k(x)), states)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values."""
        return memory[0], memory[-1]

    @property
    def shape(self) -> ProjectionShape:
        """H heads of keys and of states; a cache stores one state per token, and also its key if
        keys have a linear map.
        """
        memory = (self.states,) if self.k is None else (self.key_dim, self.states)
        H = self.heads
        return ProjectionShape(H, H, self.key_dim // H, self.states // H, memory)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries and keys, which are linear maps; the values are the
        states.
        """
        k, v = self.recall(self.remember(query.memory, None), None)
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
