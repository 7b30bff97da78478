"""The class `Spec`, the cost of one layer of a mechanism from its sizes alone, without torch, and
the records that its methods return.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from regard.errors import ArgumentError
from regard.language import Phrase


@dataclass(frozen=True)
class Quantity:
    """A number together with the formula that gives it.

    Args:
        value: the number.
        formula: the formula, with its numbers filled in; empty if there is none.
    """

    value: int
    formula: str

    def __str__(self) -> str:
        return f"{self.value:,}" if not self.formula else f"{self.value:,} = {self.formula}"


NO_QUANTITY = Quantity(0, "")


@dataclass(frozen=True)
class Description:
    """The cost of one layer at a context, for batch 1, as `describe()` returns it.

    Args:
        name: the mechanism.
        context: the number of tokens up to and including the decoded one.
        parameters: the number of parameters of the layer.
        kv_per_token: values cached per token; 0 if nothing is cached by token.
        kv_tokens: how many tokens are cached at this context.
        state: cached values whose number does not depend on the length.
        flops_per_token: FLOPs of one decoded token at this context, linear maps included.
        read: cached values that one decoded token reads at most; None is all of them.

    >>> kv = Quantity(32, "2 G D = 2 x 2 x 8")
    >>> none = Quantity(0, "")
    >>> layer = Description("gqa", 100, none, kv, Quantity(100, "S"), none, none)
    >>> layer.cached_values
    3200
    """

    name: str
    context: int
    parameters: Quantity
    kv_per_token: Quantity
    kv_tokens: Quantity
    state: Quantity
    flops_per_token: Quantity
    read: Quantity | None = None

    @property
    def cached_values(self) -> int:
        """The number of values that a cache stores at this context."""
        return self.kv_per_token.value * self.kv_tokens.value + self.state.value

    def __str__(self) -> str:
        rows = (
            ("parameters", self.parameters),
            ("values cached per token", self.kv_per_token),
            ("tokens cached", self.kv_tokens),
            ("values of the state", self.state),
            ("FLOPs per decoded token", self.flops_per_token),
            *((("values read per token", self.read),) if self.read is not None else ()),
        )
        lines = [f"{label:<26}{figure}" for label, figure in rows]
        return "\n".join([f"{self.name}, context {self.context:,}", *lines])


@dataclass(frozen=True)
class ParameterCounts:
    """How many parameters a layer has, by kind.

    Attributes:
        biases: values of biases; sinks and gates count as biases.
        counted_separately: how many of the values in `matrices` a decoded token does not multiply
            exactly once. Their FLOPs depend on the context, and `Spec.step` counts them.
    """

    matrices: int = 0
    biases: int = 0
    norms: int = 0
    counted_separately: int = 0

    def __add__(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(
            self.matrices + other.matrices,
            self.biases + other.biases,
            self.norms + other.norms,
            self.counted_separately + other.counted_separately,
        )

    @property
    def total(self) -> int:
        """The number of all parameters."""
        return self.matrices + self.biases + self.norms

    @property
    def multiplied_once(self) -> int:
        """The number of matrix values that every token multiplies exactly once."""
        return self.matrices - self.counted_separately


@dataclass(frozen=True)
class CacheContents:
    """The contents of the cache of one sequence: the same parts for each cached token, and a state
    of fixed size.

    Attributes:
        state: cached values whose number does not depend on the length.
        from_source: whether the tokens are those of another sequence, so that a generated token
            adds nothing.
        others: further contents with another number of tokens.
    """

    parts: tuple[tuple[int, int], ...] = ()
    tokens: int = 0
    state: int = 0
    bounded: bool = False
    from_source: bool = False
    others: tuple[CacheContents, ...] = ()

    @property
    def values_per_token(self) -> int:
        """The number of cached values of one token."""
        return sum(heads * dims for heads, dims in self.parts)

    @property
    def values(self) -> int:
        """The number of all cached values, the state included."""
        own = self.values_per_token * self.tokens + self.state
        return own + sum(other.values for other in self.others)


@dataclass(frozen=True)
class HeadShape:
    """The heads of a mechanism: H query heads of width D, G key heads of width D, and G value heads
    of width E; a recurrence may have N value heads, more than G.
    """

    heads: int
    groups: int
    head_dim: int
    value_dim: int
    value_heads: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, G, D and E."""
        return self.heads, self.groups, self.head_dim, self.value_dim

    @property
    def states(self) -> int:
        """The number of value heads N, each of which has a state in a recurrence."""
        return self.groups if self.value_heads is None else self.value_heads

    @property
    def states_letter(self) -> str:
        """The letter of the number of states in formulas: G, or N with more value heads."""
        return "G" if self.states == self.groups else "N"

    @property
    def outputs(self) -> int:
        """The number of heads of the result, max(H, N)."""
        return max(self.heads, self.states)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The keys and the values of one token, in the form of `CacheContents.parts`."""
        return (self.groups, self.head_dim), (self.states, self.value_dim)

    def query_maps(self, dim: int) -> int:
        """Return the values of query and output matrices: M (H D + max(H, N) E)."""
        return dim * (self.heads * self.head_dim + self.outputs * self.value_dim)

    def key_maps(self, dim: int) -> int:
        """Return the values of key and value matrices: M (G D + N E)."""
        return dim * (self.groups * self.head_dim + self.states * self.value_dim)

    def maps(self, dim: int) -> ParameterCounts:
        """Return the parameters of all four matrices, without biases."""
        return ParameterCounts(self.query_maps(dim) + self.key_maps(dim))

    @property
    def label(self) -> str:
        """MHA, GQA or MQA, with the numbers of heads and their width."""
        if self.heads == self.groups:
            kind = "MHA"
        else:
            kind = "MQA" if self.groups == 1 else "GQA"
        return Phrase(
            "{name} {heads}/{groups} heads of {dim}",
            name=kind,
            heads=self.heads,
            groups=self.groups,
            dim=self.head_dim,
        )


@dataclass(frozen=True)
class Spec(ABC):
    """The cost of one layer of a mechanism, as a function of its sizes and of the context.

    Args:
        weights: the parameters, computed from sizes by `of`, or counted in a built module.
        parts: heads and their width for each cached part of a token; empty without such.
    """

    weights: ParameterCounts
    parts: tuple[tuple[int, int], ...]

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the mechanism, with the sizes that distinguish layers of one model."""

    @abstractmethod
    def step(self, context: int) -> Quantity:
        """Return the FLOPs of the decoded token at position context - 1, without linear maps.

        Args:
            context: the number of tokens up to and including the decoded one.

        Returns:
            The number of FLOPs and its formula.
        """

    @abstractmethod
    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of the first `context` tokens at once, without linear maps.

        Args:
            context: the number of tokens.

        Returns:
            The number of FLOPs.
        """

    @property
    def values_per_token(self) -> Quantity:
        """How many values a cache stores for one token."""
        sizes = [heads * dims for heads, dims in self.parts]
        return Quantity(sum(sizes), " + ".join(map(str, sizes)))

    def tokens(self, context: int) -> Quantity:
        """Return how many tokens are cached after `context` tokens.

        Args:
            context: the number of tokens.

        Returns:
            The number of cached tokens and its formula.
        """
        return Quantity(context, "S") if self.parts else NO_QUANTITY

    @property
    def state(self) -> Quantity:
        """How many cached values do not depend on the length."""
        return NO_QUANTITY

    @property
    def bounded(self) -> bool:
        """Whether a cache drops old tokens."""
        return False

    @property
    def query_heads(self) -> int | None:
        """How many heads tensor parallelism divides among cards; None if it is not known."""
        return None

    def cache_shares(self, cards: int) -> int:
        """Return into how many parts tensor parallelism divides the cache: at most one for each
        head, so that a latent, which all heads share, is whole on every card.

        Args:
            cards: the number of cards.

        Returns:
            The number of parts.
        """
        return min(cards, min((heads for heads, _ in self.parts), default=1))

    @property
    def forms(self) -> tuple[str, ...]:
        """The names of equivalent forms with different FLOPs; empty if the mechanism has only one
        form.
        """
        return ()

    def cached(self, context: int) -> CacheContents:
        """Return the contents of a cache after `context` tokens.

        Args:
            context: the number of tokens.

        Returns:
            The cached parts, tokens and state.
        """
        return CacheContents(self.parts, self.tokens(context).value, self.state.value, self.bounded)

    def read(self, context: int) -> CacheContents:
        """Return the part of the cache that the decoded token at position context - 1 reads.

        Args:
            context: the number of tokens up to and including the decoded one.

        Returns:
            The parts, tokens and state that are read.
        """
        return self.cached(context)

    def decode_flops(self, context: int, form: str | None = None) -> int:
        """Return the FLOPs of `step`, optionally in another form of the mechanism.

        Args:
            context: the number of tokens up to and including the decoded one.
            form: one of `forms`; None is the form of this spec.

        Returns:
            The number of FLOPs.
        """
        return self.step(context).value

    def describe(self, context: int, name: str | None = None) -> Description:
        """Return all figures at a context.

        Args:
            context: the number of tokens up to and including the decoded one.
            name: the name of the layer in the description; None is `self.name`.

        Returns:
            The number of parameters, cached values and FLOPs, each with its formula.

        Raises:
            ArgumentError: the context is less than 1.
        """
        if context < 1:
            raise ArgumentError(f"context is {context}; it must be at least 1", argument="context")
        mapped, step = self.weights.multiplied_once, self.step(context)
        return Description(
            self.name if name is None else name,
            context,
            Quantity(self.weights.total, ""),
            self.values_per_token,
            self.tokens(context),
            self.state,
            Quantity(2 * mapped + step.value, f"2 x {mapped} ({self._maps}) + {step.formula}"),
        )

    _maps = "matrices"
    """The name of `weights.multiplied_once` in the formulas of `describe`."""


class SteadySpec(Spec):
    """A layer that caches no tokens, and whose FLOPs are the same for each token."""

    @property
    def bounded(self) -> bool:
        """True, because nothing is cached by token."""
        return True

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of `context` steps, one for each token."""
        return context * self.step(1).value
