"""The base class `ScoreRule`, what a rule is given (`ScoreBlock`), and rules in a row (`Chain`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import is_exporting_onnx
from regard.registry import Registry
from regard.serialization import RuleWithTensors
from regard.span import Positions
from regard.units import plural

SCORES: Registry[ScoreRule] = Registry("score rule")
"""All classes of score rules by their `kind`, the name that recordings store."""

Stage: TypeAlias = Literal["scores", "selection", "normalizer", "pattern"]
STAGES: tuple[Stage, ...] = ("scores", "selection", "normalizer", "pattern")
"""The stages of a row in order: scores, a selection (others get -inf), weights, and after."""

Scope: TypeAlias = Literal["pair", "heads", "row"]


class ScoreBlock(NamedTuple):
    """What a rule knows about a block of scores besides the scores.

    Args:
        query: the queries of the block `[B, H, t, D]`, without the scale, in the dtype of the call.
        visible: bool, broadcastable to `[B, H, t, s]`: which keys the mask lets each query see.
        b, h: the indices of batch rows `[B, 1, 1, 1]` and query heads `[1, H, 1, 1]`.
        q, k: the positions of queries `[B or 1, 1, t, 1]` and keys `[B or 1, 1, 1, s]`.
        i, j: their indices in the call, `[1, 1, t, 1]` and `[1, 1, 1, s]`.
        key_count: how many keys each query sees, broadcastable to `[B, H, t, 1]`, if `needs_count`.
    """

    query: Tensor
    visible: Tensor
    b: Tensor
    h: Tensor
    q: Tensor
    k: Tensor
    i: Tensor
    j: Tensor
    key_count: Tensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ScoreRule(RuleWithTensors):
    """Base class of score rules: steps between the scores and the weights of attention.

    s = softcap(scale q_i . k_j) + bias_ij
    s' = change_scores(s), then the mask
    p = normalize(s'), by default softmax
    p' = change_pattern(p), and out_i = sum_j p'_ij v_j

    A rule is a subclass, decorated with `@dataclass(frozen=True, eq=False, repr=False)`, with
    `stages`, `scope`, and the methods of its stages. A query's result must not depend on the other
    queries. What the mask hides has no effect: a hidden score is replaced first, and a hidden
    weight is 0. Methods are differentiable operations that change no argument.

    Rules compare and hash by their fields (tensors by identity), and print as an expression. Files
    store a class by its name or `kind`.

    Attributes:
        stages: the stages that the rule changes, in their order.
        scope: what one result depends on. "row": the scores of all keys. "heads": those of all
            heads for this pair. "pair": this score only, for kernels that compute tiles.
        is_same_for_heads: whether some of the heads have the same rule as all of them.

    >>> from regard import scores
    >>> scores.Temperature(2.0) >> scores.TopK(8)
    temperature(2) >> topk(8)
    """

    stages: ClassVar[tuple[Stage, ...]] = ("scores",)
    scope: ClassVar[Scope] = "row"
    is_same_for_heads: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = cls.__dict__.get("kind", cls.__name__).lower()
        SCORES.register(cls.kind, cls)

    def change_scores(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return the scores after this rule.

        Args:
            s: scores `[B, H, t, s]`, finite where `block.visible` is False.
            block: what else is known; with the scope "row", of all keys.

        Returns:
            Scores of the same shape; those of hidden pairs have no effect.
        """
        return s

    def normalize(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return the weights of scores; only a rule with the stage "normalizer" defines this.

        Args:
            s: scores `[B, H, t, s]`, -inf where a key is hidden.
            block: what else is known about these scores.

        Returns:
            Weights of the same shape; those of hidden pairs have no effect.
        """
        raise NotImplementedError

    def change_pattern(self, p: Tensor, block: ScoreBlock) -> Tensor:
        """Return the weights after this rule; only a rule with the stage "pattern" defines this.

        Args:
            p: weights `[B, H, t, s]`, 0 where a key is hidden.
            block: what else is known about these weights.

        Returns:
            Weights of the same shape; those of hidden pairs have no effect.
        """
        return p

    def steps(self) -> tuple[ScoreRule, ...]:
        """Return the single rules that this one consists of.

        Returns:
            The rules of a chain in their order; for any other rule the rule alone.
        """
        return (self,)

    def select_heads(self, heads: slice) -> Self:
        """Return the rule of some of the query heads; this one if it is the same for every head."""
        return self if self.is_same_for_heads else super().select_heads(heads)

    @property
    def normalizer(self) -> ScoreRule | None:
        """The rule that replaces the softmax, or None."""
        return next((x for x in self.steps() if "normalizer" in x.stages), None)

    @property
    def needs_count(self) -> bool:
        """Whether the rule reads `ScoreBlock.key_count`."""
        return any(rule.needs_count for rule in self.steps() if rule is not self)

    @property
    def is_pairwise_softmax(self) -> bool:
        """Whether the lse of a row gives any of its weights."""
        return self.scope == "pair" and self.stages == ("scores",)

    def why_not_partial(self) -> str:
        """Return why attention over parts of the keys cannot be merged.

        Returns:
            The reason in a few words, or "" if it can be merged.
        """
        for rule in self.steps():
            if "normalizer" in rule.stages:
                return f"{rule} has no log-sum-exp, by which parts could be merged"
            if "pattern" in rule.stages:
                return f"{rule} changes the weights after the softmax"
            if rule.needs_count:
                return f"{rule} needs the number of keys that a query sees in all parts"
            if rule.scope == "row":
                return f"{rule} needs all keys of a row at once"
        return ""

    def require(self, H: int, D: int, q_positions: Positions, device: torch.device) -> None:
        """Check that the rule fits an attention call.

        Args:
            H, D: the number of query heads, and of their dimensions.
            q_positions: positions of the queries.
            device: the device of the call.

        Raises:
            ArgumentError: a size does not fit.
        """
        own = self._heads()
        if own not in (None, H):
            raise ArgumentError(
                f"{self} is for {plural(own, 'head')} and the query has {H}; make a rule for {H}"
            )

    def __rshift__(self, other: object) -> ScoreRule:
        if not isinstance(other, ScoreRule):
            return NotImplemented
        return Chain((*self.steps(), *other.steps()))

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(_short_text(getattr(self, x.name)) for x in fields(self))})"

    def _heads(self) -> int | None:
        """Return the number of heads for which the rule stores numbers, or None for any."""
        return None


@dataclass(frozen=True, eq=False, repr=False)
class PairRule(ScoreRule):
    """Base class of rules in which a score depends on itself, its head and its place only.

    s'_ij = pair(s_ij, b, h, q_i, k_j)

    `pair` has elementwise operations that broadcast, for a call, a tile or one score.
    """

    scope: ClassVar[Scope] = "pair"

    by_slot: ClassVar[bool] = False
    """Whether `pair` is given indices in the call instead of positions."""

    def pair(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return scores after this rule.

        Args:
            s: scores.
            b, h: the indices of batch row and query head, which broadcast to `s`.
            q, k: the positions of query and key (indices in the call with `by_slot`).

        Returns:
            Scores of the shape of `s`.
        """
        raise NotImplementedError

    def change_scores(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Apply `pair` to the whole block."""
        q, k = (block.i, block.j) if self.by_slot else (block.q, block.k)
        return self.pair(s, block.b, block.h, q, k)


@dataclass(frozen=True, eq=False, repr=False)
class Chain(ScoreRule):
    """Several rules, one after another; `a >> b` creates it.

    A normalizer follows all rules that change scores, and rules that change weights follow it.

    Args:
        rules: the rules in their order.

    Raises:
        ArgumentError, ArgumentTypeError: there are no rules, or not in order of stages.

    >>> from regard import scores
    >>> scores.SoftClamp(30.0) >> scores.Sigmoid(-2.0)
    softclamp(30) >> sigmoid(-2)
    """

    rules: tuple[ScoreRule, ...]

    def __post_init__(self) -> None:
        for rule in self.rules:
            if not isinstance(rule, ScoreRule):
                raise ArgumentTypeError(
                    f"a chain has a rule of type {type(rule).__name__}; every rule must be a "
                    "ScoreRule"
                )
        flat = tuple(x for rule in self.rules for x in rule.steps())
        if not flat:
            raise ArgumentError("a chain has no rules; give at least one")
        object.__setattr__(self, "rules", flat)
        last, reached = flat[0], 0
        for rule in flat:
            first = STAGES.index(rule.stages[0])
            if first < reached or (reached == first == STAGES.index("normalizer")):
                raise ArgumentError(
                    f"{rule} works on the {rule.stages[0]} and stands after {last}, which works on "
                    f"the {last.stages[-1]}; the order is {', '.join(STAGES)}, with one normalizer"
                )
            last, reached = rule, STAGES.index(rule.stages[-1])

    @property
    def stages(self) -> tuple[Stage, ...]:  # type: ignore[override]
        """The stages that some rule changes, in their order."""
        return tuple(x for x in STAGES if any(x in rule.stages for rule in self.rules))

    @property
    def scope(self) -> Scope:  # type: ignore[override]
        """The widest scope of the rules."""
        scopes = {rule.scope for rule in self.rules}
        return "row" if "row" in scopes else "heads" if "heads" in scopes else "pair"

    def steps(self) -> tuple[ScoreRule, ...]:
        """Return the rules of the chain, in their order."""
        return self.rules

    def normalize(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Apply the normalizer of the chain."""
        normalizer = self.normalizer
        assert normalizer is not None, "callers ask for a normalizer first"
        return normalizer.normalize(s, block)

    def change_pattern(self, p: Tensor, block: ScoreBlock) -> Tensor:
        """Apply the rules that change weights, in their order."""
        for rule in self.rules:
            p = rule.change_pattern(p, block)
        return p

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of all rules."""
        return tuple(x for rule in self.rules for x in rule.tensors())

    def with_tensors(self, tensors: Sequence[Tensor]) -> Chain:
        """Return the same rules with other tensors."""
        self._check_count(tensors, len(self.tensors()))
        rules, start = [], 0
        for rule in self.rules:
            stop = start + len(rule.tensors())
            rules.append(rule.with_tensors(tensors[start:stop]))
            start = stop
        return Chain(tuple(rules))

    def select_heads(self, heads: slice) -> Chain:
        """Apply `select_heads` to each rule."""
        return Chain(tuple(rule.select_heads(heads) for rule in self.rules))

    def require(self, H: int, D: int, q_positions: Positions, device: torch.device) -> None:
        """Check that each rule fits the call."""
        for rule in self.rules:
            rule.require(H, D, q_positions, device)

    def __str__(self) -> str:
        return " >> ".join(map(str, self.rules))


def change_scores(rule: ScoreRule, s: Tensor, block: ScoreBlock, *, hides: bool = True) -> Tensor:
    """Return scores after all steps of a rule that change scores.

    A hidden score is first replaced by the largest visible one, without its gradient, so that what
    a hidden key holds reaches nothing.
    """
    for step in rule.steps():
        s = step.change_scores(_replace_hidden(s, block.visible) if hides else s, block)
    return s


def _replace_hidden(s: Tensor, visible: Tensor) -> Tensor:
    """Replace hidden scores by the largest visible one of their row, or by 0."""
    if s.shape[-1] == 0:
        return s
    largest = s.detach().masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
    return torch.where(visible, s, torch.where(largest.isfinite(), largest, 0))


def along_keys(x: Tensor, order: Tensor) -> Tensor:
    """Return x `[B, H, t, s]` with its keys in the order `[B or 1, 1, 1, s]`."""
    return x.gather(-1, order.expand(x.shape))


def stable_argsort(x: Tensor, *, descending: bool = False) -> Tensor:
    """Return the order of the numbers in the last dimension, the earlier of equal ones first."""
    if is_exporting_onnx():  # its sort is stable, and the exporters write no other
        return x.sort(dim=-1, descending=descending).indices
    return x.argsort(dim=-1, descending=descending, stable=True)


def _short_text(value: object) -> str:
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    return f"{value:g}" if isinstance(value, float) else str(value)
