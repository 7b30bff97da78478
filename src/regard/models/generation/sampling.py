"""From logits to a token: what a sampler leaves of a distribution, and the draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.argument_checks import check_number
from regard.errors import ArgumentError, ArgumentTypeError


class Choices(TypedDict, total=False):
    """The arguments of `Sampling`, by keyword."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    seed: int


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; the steps are taken in this order, which is transformers'.

    1. repetition_penalty: of every id that was seen, prompt included: x <- x / r if x > 0, else x r
    2. temperature t: x <- x / t;  0 takes the likeliest token, and the steps below change nothing
    3. top_k: the k likeliest tokens stay
    4. top_p: the likeliest tokens stay whose sum first reaches p
    5. min_p: tokens of at least min_p times the probability of the likeliest stay

    Equal logits are ordered by their id, so that exactly k tokens stay, and never none.

    Args:
        temperature: 0 or more.
        top_k: at least 1; None keeps all.
        top_p: above 0 and at most 1; None keeps all.
        min_p: 0 to 1; None keeps all.
        repetition_penalty: above 0; 1 changes nothing, more discourages what was said.
        seed: of the first row of a batch; row i has seed + i.

    Raises:
        ArgumentError, ArgumentTypeError: a number is out of its range.

    >>> Sampling(temperature=0.8, top_p=0.9).greedy
    False

    Source: top_k: Fan et al. 2018 (arXiv 1805.04833); top_p: Holtzman et al. 2020 (arXiv
    1904.09751); min_p: Nguyen et al. 2024 (arXiv 2407.01082); repetition_penalty: Keskar et al.
    2019 (arXiv 1909.05858), section 4.1.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        inf, least = math.inf, -1e-300
        check_number("temperature", self.temperature, least, inf, "0 or more")
        check_number("top_p", self.top_p, 0, 1 + 1e-15, "above 0 and at most 1, or None")
        check_number("min_p", self.min_p, least, 1 + 1e-15, "0 to 1, or None")
        check_number("repetition_penalty", self.repetition_penalty, 0, inf, "above 0")
        for name, x in (("top_k", self.top_k), ("seed", self.seed)):
            if x is not None and (isinstance(x, bool) or not isinstance(x, int)):
                raise ArgumentTypeError(f"{name} is {type(x).__name__}; it must be an int")
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError(f"top_k is {self.top_k}; it must be at least 1, or None")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    def check(self, vocabulary: int) -> None:
        """See that top_k is no more than there are tokens.

        Raises:
            ArgumentError: it is.
        """
        if self.top_k is not None and self.top_k > vocabulary:
            raise ArgumentError(f"top_k is {self.top_k}; it must be 1 to {vocabulary}, or None")


def distribution(
    logits: Float[Tensor, "B V"], sampling: Sampling, seen: Bool[Tensor, "B V"] | None = None
) -> Float[Tensor, "B V"]:
    """The probabilities [B,V] from which a sampler draws, in fp32 or better; what it leaves out has
    0.

    p = softmax(steps(logits)), the steps of `Sampling` in their order

    transformers' TopKLogitsWarper keeps every token that ties with the k-th, and so more than k;
    here k stay.

    Args:
        logits: -inf is a token that cannot come.
        sampling: the steps.
        seen: True for ids that stand in the row already; None is none.

    Raises:
        ArgumentError: a row has NaN or +inf, or nothing above -inf.

    >>> sampling = Sampling(temperature=1.0, top_k=2)
    >>> distribution(torch.tensor([[1.0, 3.0, 2.0]]), sampling).argsort().tolist()
    [[0, 2, 1]]
    >>> distribution(torch.tensor([[1.0, 3.0, 2.0]]), Sampling()).tolist()
    [[0.0, 1.0, 0.0]]
    """
    x = logits if logits.dtype == torch.float64 else logits.float()
    if seen is not None and sampling.repetition_penalty != 1:
        r = sampling.repetition_penalty
        x = torch.where(seen, torch.where(x < 0, x * r, x / r), x)
    largest, best = x.max(1)
    check_largest(largest)
    if sampling.greedy:
        return F.one_hot(best, x.shape[1]).to(x.dtype)
    # behind the subtraction no temperature overflows, and the smallest normal number is no 0
    x = (x - largest[:, None]) / max(sampling.temperature, torch.finfo(x.dtype).tiny)
    if sampling.top_k is not None and sampling.top_k < x.shape[1]:
        x = _only(x, top(x, sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        x = _nucleus(x, sampling.top_p)
    if sampling.min_p is not None:
        x = x.masked_fill(x.exp() < sampling.min_p, -math.inf)  # the likeliest has exp(0)
    return x.softmax(1)


def top(x: Float[Tensor, "B V"], k: int) -> Int[Tensor, "B k"]:
    """The ids of the k largest of each row, largest first; of equal ones the lower ids come first.

    >>> top(torch.tensor([[1.0, 5.0, 1.0, 1.0]]), 3).tolist()
    [[1, 0, 2]]
    """
    least = x.topk(k).values[:, -1:]
    above, tied = x > least, x == least
    kept = above | (tied & (tied.cumsum(1) <= k - above.sum(1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(-1, k)
    return ids.gather(1, x.gather(1, ids).argsort(dim=1, descending=True, stable=True))


def check_largest(largest: Float[Tensor, " B"]) -> None:
    """See that the largest logit of each row is a number: NaN is larger than all others.

    Raises:
        ArgumentError: it is not.
    """
    for row, x in enumerate(largest.tolist()):
        if not math.isfinite(x):
            raise ArgumentError(
                f"the largest logit of row {row} is {x}, and no token can be chosen; "
                "regard.checks(finite=True) names the first attention call that was given such a "
                "number"
            )


class Sampler:
    """Draws a token for each row of a batch, each row from a generator of its own: no row depends
    on the others.

    Args:
        sampling: how.
        prompts: the ids of each row so far: seen by the repetition penalty.
        vocabulary: V.

    Raises:
        ArgumentError: top_k is more than V.

    >>> Sampler(Sampling(), [[0], [0]], 3)(torch.tensor([[1.0, 3.0, 2.0], [9.0, 0.0, 0.0]]))
    [1, 0]
    """

    def __init__(
        self, sampling: Sampling, prompts: Sequence[Sequence[int]], vocabulary: int
    ) -> None:
        sampling.check(vocabulary)
        self.sampling = sampling
        self._generators = [
            torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))
        ]
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
            for row, ids in enumerate(prompts):
                self._seen[row, list(ids)] = True

    def __call__(self, logits: Float[Tensor, "B V"]) -> list[int]:
        """A token for each row of logits [B,V]."""
        if self.sampling.greedy and self._seen is None:
            largest, best = logits.max(1)
            check_largest(largest)
            found: list[int] = best.tolist()
            return found
        p = distribution(logits.cpu(), self.sampling, self._seen)
        if self.sampling.greedy:
            found = p.argmax(1).tolist()
        else:
            rows = zip(p, self._generators, strict=True)
            found = [int(torch.multinomial(row, 1, generator=make)) for row, make in rows]
        if self._seen is not None:
            self._seen[torch.arange(len(found)), found] = True
        return found

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._generators = [self._generators[row] for row in rows]
        self._seen = None if self._seen is None else self._seen[list(rows)]


def _only(x: Tensor, ids: Tensor) -> Tensor:
    """x at these ids, -inf elsewhere."""
    return torch.full_like(x, -math.inf).scatter(1, ids, x.gather(1, ids))


def _nucleus(x: Tensor, top_p: float) -> Tensor:
    """x of the likeliest tokens whose sum first reaches top_p, -inf elsewhere."""
    p = x.softmax(1)
    few = min(p.shape[1], 1024)  # enough for most rows, and much cheaper than to sort all
    ids = top(p, few)
    if bool((p.gather(1, ids).sum(1) < top_p).any()):
        ids = p.argsort(dim=1, descending=True, stable=True)
    before = F.pad(p.gather(1, ids).cumsum(1)[:, :-1], (1, 0))
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(1, ids, before < top_p)
    return x.masked_fill(~kept, -math.inf)
