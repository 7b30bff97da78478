"""Sampling: conversion of logits to probabilities, and a random choice of a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.argument_checks import check_number, check_seed
from regard.errors import ArgumentError, ArgumentTypeError


class SamplingKeywords(TypedDict, total=False):
    """The keyword arguments of `SamplingParams`, as a typed dictionary."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    seed: int


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen; the steps are in the order of transformers.

    1. repetition_penalty r, for every id in the row, prompt included: x <- x / r if x > 0, else x r
    2. temperature t: x <- x / t;  0 chooses the most likely token, and ends the steps
    3. top_k: keep the k most likely tokens
    4. top_p: keep the most likely tokens until their sum reaches p
    5. min_p: keep tokens with at least min_p times the probability of the most likely one

    Equal logits are ordered by id, so that exactly k tokens remain, and at least one.

    Args:
        temperature: 0 or more.
        top_k: at least 1; None keeps all.
        top_p: above 0 and at most 1; None keeps all.
        min_p: 0 to 1; None keeps all.
        repetition_penalty: above 0; 1 changes nothing.
        seed: random seed of the first row of a batch, 0 to 2^32 - 1; row i has seed + i.

    Raises:
        ArgumentError, ArgumentTypeError: a number is out of its range, or of another type.

    >>> SamplingParams(temperature=0.8, top_p=0.9).greedy
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
        check_seed(self.seed)
        top_k = self.top_k
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int)):
            raise ArgumentTypeError(f"top_k is {type(top_k).__name__}; it must be an int")
        if top_k is not None and top_k < 1:
            raise ArgumentError(
                f"top_k is {self.top_k}; it must be at least 1, or None", argument="top_k"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen, which is temperature 0."""
        return self.temperature == 0

    def check(self, vocabulary: int) -> None:
        """Check that top_k is at most the number of tokens.

        Args:
            vocabulary: the number of tokens V.

        Raises:
            ArgumentError: top_k is larger.
        """
        if self.top_k is not None and self.top_k > vocabulary:
            raise ArgumentError(
                f"top_k is {self.top_k}; it must be 1 to {vocabulary}, or None", argument="top_k"
            )


def distribution(
    logits: Float[Tensor, "B V"],
    sampling: SamplingParams,
    seen_ids: Bool[Tensor, "B V"] | None = None,
) -> Float[Tensor, "B V"]:
    """Compute the probabilities from which a token is drawn, in fp32 or better.

    p = softmax(steps(logits)), with the steps of `SamplingParams` in their order

    Exactly k tokens remain; transformers' TopKLogitsWarper also keeps those that tie with the k-th.

    Args:
        logits: logits [B, V]; a token with -inf cannot be drawn.
        sampling: the steps.
        seen_ids: mask [B, V], True for ids that occur in the row; None is no id.

    Returns:
        Probabilities [B, V], 0 for tokens that the steps remove.

    Raises:
        ArgumentError: a row has NaN or +inf, or nothing above -inf.

    >>> sampling = SamplingParams(temperature=1.0, top_k=2)
    >>> distribution(torch.tensor([[1.0, 3.0, 2.0]]), sampling).argsort().tolist()
    [[0, 2, 1]]
    >>> distribution(torch.tensor([[1.0, 3.0, 2.0]]), SamplingParams()).tolist()
    [[0.0, 1.0, 0.0]]
    """
    x = _penalized(logits, sampling, seen_ids)
    check_largest(x.amax(1))
    return _distribution(x, sampling)


def _penalized(logits: Tensor, sampling: SamplingParams, seen_ids: Tensor | None) -> Tensor:
    """Return the logits in fp32 or better after the repetition penalty."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    if seen_ids is not None and sampling.repetition_penalty != 1:
        r = sampling.repetition_penalty
        x = torch.where(seen_ids, torch.where(x < 0, x * r, x / r), x)
    return x


def _distribution(x: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the probabilities after the penalty; other devices are not read."""
    largest, best = x.max(1)
    if sampling.greedy:
        return F.one_hot(best, x.shape[1]).to(x.dtype)
    # after the subtraction no temperature overflows, and the smallest normal number is not 0
    x = (x - largest[:, None]) / max(sampling.temperature, torch.finfo(x.dtype).tiny)
    if sampling.top_k is not None and sampling.top_k < x.shape[1]:
        x = _keep_ids(x, top_ids(x, sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        x = _nucleus(x, sampling.top_p)
    if sampling.min_p is not None:
        x = x.masked_fill(x.exp() < sampling.min_p, -math.inf)  # the most likely one has exp(0)
    return x.softmax(1)


def top_ids(x: Float[Tensor, "B V"], k: int) -> Int[Tensor, "B k"]:
    """Return the ids [B, k] of the k largest values of each row, largest first, ties by id."""
    if not x.is_cpu:  # `nonzero` would wait for the device
        return x.argsort(dim=1, descending=True, stable=True)[:, :k]
    least = x.topk(k).values[:, -1:]
    above, tied = x > least, x == least
    chosen = above | (tied & (tied.cumsum(1) <= k - above.sum(1, keepdim=True)))
    ids = chosen.nonzero()[:, 1].view(-1, k)
    return ids.gather(1, x.gather(1, ids).argsort(dim=1, descending=True, stable=True))


def check_largest(largest: Float[Tensor, " B"]) -> None:
    """Check that the largest logit [B] of each row is finite; NaN counts as the largest."""
    _check_finite(largest.tolist())


def _check_finite(largest: list[float]) -> None:
    """Raise unless the largest logit of each row is finite."""
    for row, x in enumerate(largest):
        if not math.isfinite(x):
            raise ArgumentError(
                f"the largest logit of row {row} is {x}, and no token can be chosen; "
                "regard.checks(finite=True) names the first attention call that was given such a "
                "number"
            )


class Sampler:
    """Draws a token for each row of a batch, each from a random generator of its own.

    Args:
        sampling: how a token is chosen.
        prompts: the ids of each row so far, for the repetition penalty.
        vocabulary: the number of tokens V.

    Raises:
        ArgumentError: top_k is more than V.

    >>> Sampler(SamplingParams(), [[0], [0]], 3)(torch.tensor([[1.0, 3.0, 2.0], [9.0, 0.0, 0.0]]))
    [1, 0]
    """

    def __init__(
        self, sampling: SamplingParams, prompts: Sequence[Sequence[int]], vocabulary: int
    ) -> None:
        sampling.check(vocabulary)
        self.sampling = sampling
        # on the CPU, so that a seed gives the same draws on every device
        self._generators = [
            torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))
        ]
        self._seen_ids: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen_ids = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device="cpu")
            for row, ids in enumerate(prompts):
                self._seen_ids[row, list(ids)] = True

    def __call__(self, logits: Float[Tensor, "B V"]) -> list[int]:
        """Draw a token for each row of logits [B, V]."""
        if not logits.is_cpu:
            return self._draw_on_device(logits)
        if self.sampling.greedy and self._seen_ids is None:
            largest, best = logits.max(1)
            check_largest(largest)
            most_likely: list[int] = best.tolist()
            return most_likely
        p = distribution(logits, self.sampling, self._seen_ids)
        if self.sampling.greedy:
            tokens = p.argmax(1).tolist()
        else:
            rows = zip(p, self._generators, strict=True)
            tokens = [
                int(torch.multinomial(row, 1, generator=generator)) for row, generator in rows
            ]
        if self._seen_ids is not None:
            self._seen_ids[torch.arange(len(tokens), device="cpu"), tokens] = True
        return tokens

    def _draw_on_device(self, logits: Tensor) -> list[int]:
        """Draw on the logits' device, and read it once: the largest p / e, as `torch.multinomial`,
        with e drawn by the generator.
        """
        device, rows = logits.device, logits.shape[0]
        if self._seen_ids is not None and self._seen_ids.device != device:
            self._seen_ids = self._seen_ids.to(device)
        x = _penalized(logits, self.sampling, self._seen_ids)
        largest, best = x.max(1)
        if not self.sampling.greedy:
            p = _distribution(x, self.sampling)
            noise = [
                torch.empty(p.shape[1], dtype=p.dtype, device="cpu").exponential_(
                    generator=generator
                )
                for generator in self._generators
            ]
            best = (p / torch.stack(noise).to(device, non_blocking=True)).argmax(1)
        if self._seen_ids is not None:
            self._seen_ids.scatter_(1, best[:, None], True)
        # numbers of tokens are exact in fp64
        numbers: list[float] = torch.cat([largest.double(), best.double()]).tolist()
        _check_finite(numbers[:rows])
        return [int(token) for token in numbers[rows:]]

    def copy(self) -> Sampler:
        """Return another sampler that draws as this one will.

        Returns:
            A sampler with copies of the generators and of the ids that were seen.
        """
        other = copy(self)
        other._generators = [generator.clone_state() for generator in self._generators]
        other._seen_ids = None if self._seen_ids is None else self._seen_ids.clone()
        return other

    def select(self, rows: Sequence[int]) -> None:
        """Keep the given rows, in this order.

        Args:
            rows: indices of rows.
        """
        self._generators = [self._generators[row] for row in rows]
        if self._seen_ids is not None:
            indices = torch.tensor(list(rows), device="cpu").to(
                self._seen_ids.device, non_blocking=True
            )
            self._seen_ids = self._seen_ids.index_select(0, indices)


def _keep_ids(x: Tensor, ids: Tensor) -> Tensor:
    """Return x at these ids [B, k], and -inf at all others."""
    return torch.full_like(x, -math.inf).scatter(1, ids, x.gather(1, ids))


def _nucleus(x: Tensor, top_p: float) -> Tensor:
    """Return x for the most likely tokens up to the sum top_p, and -inf for the others."""
    p = x.softmax(1)
    # on a CPU these are enough for most rows, and much cheaper than a full sort
    few = min(p.shape[1], 1024) if p.is_cpu else p.shape[1]
    ids = top_ids(p, few)
    if few < p.shape[1] and bool((p.gather(1, ids).sum(1) < top_p).any()):
        ids = p.argsort(dim=1, descending=True, stable=True)
    before = F.pad(p.gather(1, ids).cumsum(1)[:, :-1], (1, 0))
    nucleus = torch.zeros_like(p, dtype=torch.bool).scatter(1, ids, before < top_p)
    return x.masked_fill(~nucleus, -math.inf)
