"""Projections of hidden states to queries and stored memory, and of memory to keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, cast

from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_groups, check_positive_sizes
from regard.biases import Bias
from regard.caches import Parts
from regard.caches.cross_layer import FirstValues
from regard.cost.softmax import SoftmaxSpec, VisibleKeys
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.explainable import (
    Explainable,
    InputSteps,
    MechanismSteps,
    ProjectionQuery,
    first_rotary,
    projection_step,
    run_steps,
)
from regard.nn.module_calls import is_plain
from regard.nn.weights import Linear
from regard.positions import Rotary
from regard.span import Positions
from regard.units import plural


class Projection(Explainable):
    """Base class of projections: queries and memory from states, keys and values from memory.

    A subclass, usually also an `nn.Module`, writes `remember` and `shape`, `recall` if it stores
    other parts than keys and values, and `query` if the queries are more than those of a map `q`.
    It may have several forms, equal in exact arithmetic (`has_forms`): MLA expands latents to keys
    and values, or multiplies queries by the expansion matrix. All forms store the same memory.
    """

    cache_unsafe_reason: str | None = None
    """The reason why a cache must not store the result of `remember`; None if it may."""

    has_forms: bool = False
    """Whether `select_form` may return another projection than this one."""

    carries_values: bool = False
    """Whether the projection gives the values of the first layer, or mixes them in."""

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
            The queries [B,H,T,D]; by default those of the map `q`.
        """
        q: Tensor = cast("Any", self).q(x, positions)
        return q

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Compute what a cache stores for hidden states.

        Args:
            x: hidden states [B,S,M].
            positions: positions of their tokens.

        Returns:
            The parts, each [B,n,S,d]: keys and values, or for MLA one latent.
        """
        raise NotImplementedError

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Compute keys and values from stored memory.

        Args:
            memory: the parts that `remember` returned, possibly of several calls.
            positions: positions of their tokens.

        Returns:
            The keys [B,G,S,D] and the values [B,G,S,E]; by default the first and the last part.
        """
        return memory[0], memory[-1]

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Transform the result of attention before the output map, for example by a gate.

        Args:
            z: the result of attention [B,H,T,E].
            x: the hidden states [B,T,M] that the queries were computed from.

        Returns:
            The heads [B,H',T,E'] for the output map; by default z.
        """
        return z

    def postprocess_at(self, z: Tensor, x: Tensor, positions: Positions) -> Tensor:
        """Transform the result of attention at the queries' positions, as by a rotation back.

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
        """Adjust queries to the positions of the keys, as rotary frequencies need it.

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
            The cost, in the form of fewer FLOPs; by default that of softmax attention.
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
        """(heads, dim) of each part that a cache stores per token, for `regard.cost`."""
        if self.memory == (self.G * self.D, self.G * self.E):
            return self.heads.parts
        return tuple((1, size) for size in self.memory)


class HeadProjection(nn.Module):
    """A linear map whose output is split into heads, followed by a list of steps on each head.

    x [B,L,M] -> W x + b -> flat(.) -> split into heads [B,n,L,d] -> step(., positions) -> ...

    The steps run in the given order, such as `RMSNorm(D), rotary`.

    Args:
        dim: the model dim M.
        heads: the number of heads n.
        head_dim: the size of one head d; heads * head_dim need not be M.
        *steps: modules called as step(x [B,n,L,d], positions), such as a norm or a `Rotary`.
        flat: a module on [B,L,n*d] before the split, such as a norm over all heads; or None.
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
        """Apply the linear map, split its output into heads, and run the steps.

        Args:
            x: hidden states [B,L,M].
            positions: positions of their tokens, for the steps; None if no step needs them.

        Returns:
            The heads [B,n,L,d].

        Raises:
            ArgumentError, ArgumentTypeError: x is not [batch, length, dim] of the map's dtype.
        """
        if x.ndim != 3:
            raise ArgumentError(f"x is {tuple(x.shape)}; it must be [batch, length, dim]")
        parts: dict[str, Any] = self._modules  # much faster than nn.Module's attribute access
        y, flat = parts["linear"](x), parts["flat"]
        if not is_plain(flat, nn.Identity):
            y = flat(y)
        # [B,L,n d] -> [B,n,L,d]; tensor parallelism leaves some of the heads to each process
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


def _of_project(name: str) -> Any:
    """Return a member of a wrapper that is the member of the wrapped projection."""
    doc = f"The `{name}` of the wrapped projection."
    return property(lambda wrapper: getattr(wrapper.project, name), doc=doc)


def run_on_heads(steps: Iterable[nn.Module], heads: Tensor, positions: Positions | None) -> Tensor:
    """Apply steps such as norms and rotary embeddings to heads [B,n,L,d], one after the other."""
    for step in steps:
        heads = step(heads, positions)
    return heads


class WrappedProjection(Projection, nn.Module):
    """A projection around another one, which changes only the result of attention (`finish`)."""

    shape = _of_project("shape")
    cache_unsafe_reason = _of_project("cache_unsafe_reason")
    query = _of_project("query")
    adjust_query = _of_project("adjust_query")
    remember = _of_project("remember")
    remember_carried = _of_project("remember_carried")
    carries_values = _of_project("carries_values")
    recall = _of_project("recall")
    data_bias = _of_project("data_bias")
    adds_bias = _of_project("adds_bias")
    has_forms = _of_project("has_forms")
    spec = _of_project("spec")

    def __init__(self, project: Projection) -> None:
        super().__init__()
        self.project = project

    def finish(self, z: Tensor, x: Tensor, positions: Positions | None) -> Tensor:
        """Change heads z [B,H,T,E] behind the last step of the wrapped projection."""
        raise NotImplementedError

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
    """A projection with separate linear maps, of which a cache stores keys and values.

    Args:
        q: a `HeadProjection` to H query heads.
        k, v: `HeadProjection`s to G key heads and G value heads; G divides H.
        key_transform: a module on keys [B,G,S,D] when they are read from memory, such as a rotary
            whose frequencies follow the length; or None.

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
        """Raise unless the heads of values and keys, and the dims of q and k, are equal."""
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
        """Return the keys [B,G,S,D], after `key_transform`, and the values [B,G,S,E], which are
        the first two parts of the memory.
        """
        k, v = memory[0], memory[1]
        return (k if self.key_transform is None else self.key_transform(k, positions)), v

    @property
    def shape(self) -> ProjectionShape:
        """H, G, D and E; a cache stores G D + G E values per token."""
        G, D, E = self.k.heads, self.k.head_dim, self.v.head_dim
        return ProjectionShape(self.q.heads, G, D, E, (G * D, G * E))

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the three projections, with `key_transform` as the last one."""
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
                "or cache keys before they are rotated (regard.nn.projections.dynamic_rotary)"
            )
    return None


def check_shared_rotary(project: SeparateQKV) -> None:
    """Check that the last step on queries and keys is the same rotary of fixed frequencies."""
    if not isinstance(project, SeparateQKV):
        raise ArgumentTypeError(f"project is {type(project).__name__}; it must be a SeparateQKV")

    last_steps = [heads.steps[-1] if len(heads.steps) else None for heads in (project.q, project.k)]
    if not isinstance(last_steps[0], Rotary) or last_steps[0] is not last_steps[1]:
        raise ArgumentError(
            f"the last step on queries is {last_steps[0]}, and on keys {last_steps[1]}; both "
            "must be the same Rotary object, which rotates queries back for the sinks"
        )
    if project.key_transform is not None:
        raise ArgumentError(
            f"project has key_transform={project.key_transform}; it must be None, because the "
            "cache stores rotated keys"
        )
    if project.cache_unsafe_reason:
        raise ArgumentError(project.cache_unsafe_reason)


def shared_rotary(project: Projection) -> Rotary:
    """Return the last step on queries and keys, which `check_shared_rotary` has checked."""
    assert isinstance(project, SeparateQKV)
    step = project.q.steps[-1]
    assert isinstance(step, Rotary)
    return step
