"""Conversion of score rules from and to the `score_mod` of `torch.nn.attention.flex_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from regard.errors import ArgumentError, ArgumentTypeError
from regard.scores.base import PairRule, ScoreRule
from regard.scores.rules import FnScore
from regard.span import Positions, as_tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of a score, and of the indices of its batch row, query head, query and key."""


def from_score_mod(
    score_mod: Callable[..., Tensor], parameters: Sequence[Tensor] = (), name: str = ""
) -> FnScore:
    """Convert a `score_mod` of FlexAttention to a rule.

    s'_ij = score_mod(s_ij, b, h, i, j, *parameters), with the indices i and j of query and key in
    the call

    The function is mapped over all scores by `torch.vmap`. A tensor that it reads and that requires
    a gradient becomes a parameter. A -inf hides a key; give a mask as well, so that kernels can
    skip.

    Args:
        score_mod: the function `(score, b, h, q_idx, kv_idx) -> score`.
        parameters: tensors with gradients that it takes as further arguments.
        name: the text of the rule in messages.

    Returns:
        The rule, for `attend(..., score=rule)`.

    Raises:
        ArgumentTypeError: the function is not callable, or a parameter is not a tensor.

    >>> import torch, regard
    >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score + slopes[h] * (kv_idx - q_idx)
    >>> q = torch.randn(1, 2, 5, 8)
    >>> regard.attend(q, q, q, score=regard.scores.from_score_mod(alibi)).sum().backward()
    >>> slopes.grad.shape
    torch.Size([2])

    Source: `flex_attention` of torch 2.13, whose eager mode maps the function with `torch.vmap`.
    """
    if not callable(score_mod):
        raise ArgumentTypeError(
            f"score_mod is {type(score_mod).__name__}; it must be a function (score, b, h, q_idx, "
            "kv_idx) -> score"
        )
    own = tuple(parameters)
    function = _MappedScoreMod(score_mod, len(own))
    if all(isinstance(x, Tensor) for x in own):  # FnScore refuses anything else
        own += function.find_tensors(own)
    return FnScore(function, own, slots=True, name=name or function.__name__)


def to_score_mod(rule: ScoreRule, q_positions: Positions, k_positions: Positions) -> ScoreMod:
    """Convert a rule to a `score_mod` of FlexAttention, for calls with these positions.

    FlexAttention has no softcap and no bias of its own: they are not part of the rule.

    Args:
        rule: a rule of the scope "pair" that changes scores only, such as `Temperature`.
        q_positions, k_positions: a `Span`, or a tensor `[B or 1, T]` or `[B or 1, S]`.

    Returns:
        The function `(score, b, h, q_idx, kv_idx) -> score`.

    Raises:
        ArgumentError: a step of the rule is of another kind.

    >>> import torch, regard
    >>> rule = regard.scores.Temperature(2.0)
    >>> mod = regard.scores.to_score_mod(rule, regard.Span(0, 4), regard.Span(0, 4))
    >>> mod(torch.tensor(3.0), *torch.zeros(4, dtype=torch.int64)).item()
    1.5
    """
    steps = []
    for step in rule.steps():
        if not isinstance(step, PairRule):
            raise ArgumentError(
                f"{step} cannot be a score_mod, which is given one score at a time; pass the rule "
                "to regard.attend(score=...)"
            )
        steps.append(step)
    q, k = as_tensor(q_positions), as_tensor(k_positions)
    q_row, k_row = int(q.shape[0] > 1), int(k.shape[0] > 1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for step in steps:
            if step.by_slot:
                score = step.pair(score, b, h, q_idx, kv_idx)
            else:
                score = step.pair(score, b, h, q[b * q_row, q_idx], k[b * k_row, kv_idx])
        return score

    return score_mod


class _MappedScoreMod:
    """A `score_mod` as a function of whole tensors, the `fn` of a `FnScore`.

    Its tensors, in a closure, are replaced in the operations that read them. `own` is the number of
    its parameters.
    """

    def __init__(self, score_mod: Callable[..., Tensor], own: int) -> None:
        self._score_mod, self._own = score_mod, own
        self._read: tuple[Tensor, ...] = ()
        self._changes_score = False
        self.__name__ = getattr(score_mod, "__name__", type(score_mod).__name__)

    def find_tensors(self, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors with a gradient that the function reads, in the order of their use.

        The function is called for one score; where that fails, it has none.
        """
        score, index = (
            torch.zeros((), dtype=torch.float32, device="cpu"),
            torch.zeros((), dtype=torch.int64, device="cpu"),
        )
        with torch.enable_grad(), _ReadTensors((score, index, *own)) as read:
            try:
                self._score_mod(score, index, index, index, index, *own)
            except Exception:
                return ()
        self._read, self._changes_score = tuple(read.noted), score._version > 0
        return self._read

    def __call__(
        self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor
    ) -> Tensor:
        own, read = tensors[: self._own], tensors[self._own :]
        pairs = zip(self._read, read, strict=True)
        replaced = {id(x): y for x, y in pairs if x is not y}

        def one(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if not replaced:
                return self._score_mod(s, b, h, q, k, *own)
            with _ReplacedTensors(replaced):
                return self._score_mod(s, b, h, q, k, *own)

        if not s.ndim:  # FlexAttention itself maps the function
            return one(s, b, h, q, k)
        if not s.numel():
            return s
        s = s.clone() if self._changes_score else s
        mapped: Callable[..., Tensor] = one
        for i in (4, 3, 2, 1):  # the innermost map is over the keys
            in_dims = (0, *(0 if i == n else None for n in range(1, 5)))
            mapped = torch.vmap(mapped, in_dims=in_dims)
        return mapped(s, b.flatten(), h.flatten(), q.flatten(), k.flatten())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _MappedScoreMod)
            and (self._score_mod, self._own) == (other._score_mod, other._own)
            and list(map(id, self._read)) == list(map(id, other._read))
        )

    def __hash__(self) -> int:
        return hash((_MappedScoreMod, self._score_mod))

    def __deepcopy__(self, memo: Any) -> _MappedScoreMod:
        return self  # like a function: copied tensors would not be those of the closure

    def __reduce__(self) -> tuple[Any, ...]:
        if self._read:
            raise ArgumentError(
                f"{self.__name__} reads tensors from its closure, which cannot be pickled with it; "
                "pass them as parameters=(tensor,), which it receives as its last arguments"
            )
        return _MappedScoreMod, (self._score_mod, self._own)


class _ReadTensors(TorchFunctionMode):
    """Notes the tensors with a gradient that operations read and that none of them returned."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.noted: list[Tensor] = []
        self._known = list(known)  # kept, so that no id is used again

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {id(x) for x in (*self._known, *self.noted)}
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.requires_grad and id(x) not in known:
                self.noted.append(x)
                known.add(id(x))
        out = function(*args, **(kwargs or {}))
        self._known += [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out


class _ReplacedTensors(TorchFunctionMode):
    """Gives operations other tensors than those that they read."""

    def __init__(self, tensors: dict[int, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(
            Tensor, lambda x: self._tensors.get(id(x), x), (args, kwargs or {})
        )
        return function(*args, **kwargs)
