"""Searches for likely texts: greedy search, which takes the likeliest token at each step, and beam
search, with its use by a model that continues a prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from regard.argument_checks import check_number
from regard.errors import ArgumentError
from regard.models.generation.context import Context, LanguageModel, encoded, padded
from regard.models.generation.generate import Options
from regard.models.generation.room import Room
from regard.models.generation.sampling import check_largest, top


@torch.no_grad()
def greedy(
    step: Callable[[Tensor], Tensor], first: Int[Tensor, " B"], *, end: int, limit: int
) -> Int[Tensor, "B n"]:
    """Feed each row its own likeliest token until every row has said `end`, or `limit` tokens are
    there.

    y_t = argmax step(y_{t-1})

    Args:
        step: from ids [B,1] to logits [B,1,V]; it keeps what it needs from one call to the next.
        first: the ids that start the rows.
        end: the id that ends a row; a row that has ended is filled with it.
        limit: the most tokens, at least 1.

    Returns:
        [B, n] with n <= limit, without `first`.

    Raises:
        ArgumentError: limit is less than 1, or first is not one id per row.

    >>> def count(ids):  # what follows n is n + 1
    ...     return torch.nn.functional.one_hot(ids + 1, 10).double()
    >>> greedy(count, torch.tensor([0, 2]), end=4, limit=9).tolist()
    [[1, 2, 3, 4], [3, 4, 4, 4]]
    """
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; it must be at least 1")
    if first.ndim != 1:
        raise ArgumentError(f"first is {tuple(first.shape)}; it must be one id per row, [batch]")
    ids, done, found = first, torch.zeros_like(first, dtype=torch.bool), []
    for _ in range(limit):
        ids = step(ids[:, None])[:, -1].argmax(-1).masked_fill(done, end)
        found.append(ids)
        done = done | (ids == end)
        if bool(done.all()):
            break
    return torch.stack(found, 1)


class Hypothesis(NamedTuple):
    """A text that beam search has found.

    Attributes:
        ids: its tokens, without the one that ended it.
        score: sum of log p over its tokens, the end included, divided by their number to the power
            of length_penalty.
        ended: whether it ended by itself, and not at the limit.
    """

    ids: tuple[int, ...]
    score: float
    ended: bool


@torch.no_grad()
def beam_search(
    step: Callable[[Tensor], Tensor],
    first: Int[Tensor, " B"],
    *,
    end: int | Collection[int],
    limit: int,
    reorder: Callable[[Tensor], None],
    beams: int = 4,
    length_penalty: float = 1.0,
) -> list[list[Hypothesis]]:
    """The best texts behind each row, best first: `beams` beginnings are kept at every step.

    score(y) = (sum_t log p(y_t | y_<t)) / n^length_penalty, n tokens, the end included

    Of the continuations of all beginnings of a row the likeliest are ranked: one that ends is kept
    if it is among the first `beams`, and the first `beams` that do not end go on. A row is done
    when it has `beams` texts and no beginning can reach the score of the worst of them. This is
    transformers' search with early_stopping="never"; Wu et al. 2016 divide by ((5 + n) / 6)^alpha
    instead. One beam ends with its first text: it is `greedy`.

    Args:
        step: from ids [rows,1] to logits [rows,1,V]; it keeps what it needs from one call to the
            next.
        first: the id that starts each row.
        end: the id, or ids, that end a text.
        limit: the most tokens of a text, at least 1.
        reorder: called with rows [n]: what the step keeps for row i must become what it kept for
            row rows[i]. The first call makes the B rows n = B * beams: `Cache.select`, not
            `Cache.reorder`.
        beams: how many.
        length_penalty: 0 ranks by probability, more favours long texts.

    Returns:
        for each row at most `beams` hypotheses.

    Raises:
        ArgumentError: limit or beams is less than 1, first is not one id per row, a logit is NaN.

    >>> def count(ids):  # what follows n is n + 1, or 9
    ...     logits = torch.full((*ids.shape, 10), -torch.inf)
    ...     logits = logits.scatter(-1, (ids + 1).clamp(max=9)[..., None], 0.0)
    ...     return logits.index_fill(-1, torch.tensor(9), -1.0)
    >>> first = torch.tensor([6])
    >>> (found,) = beam_search(count, first, end=9, limit=5, reorder=lambda rows: None, beams=2)
    >>> [(hypothesis.ids, round(hypothesis.score, 3)) for hypothesis in found]
    [((7, 8), -0.209), ((7,), -0.813)]

    Source: Graves 2012 (arXiv 1211.3711), section 2.5; the length penalty: Wu et al. 2016 (arXiv
    1609.08144), section 7.
    """
    _check(first, limit, beams, length_penalty)
    ends = torch.tensor([end] if isinstance(end, int) else sorted(end), dtype=torch.int64)
    search = _Search(len(first), beams, limit, length_penalty, ends.to(first.device))
    ids = first
    while True:
        logits = step(ids[:, None])[:, -1]
        rows, ids = search.take(logits)
        if search.done:
            return search.found
        reorder(rows)


def _check(first: Tensor, limit: int, beams: int, length_penalty: float) -> None:
    for name, n in (("limit", limit), ("beams", beams)):
        if n < 1:
            raise ArgumentError(f"{name} is {n}; it must be at least 1")
    check_number("length_penalty", length_penalty, -math.inf, math.inf, "finite")
    if first.ndim != 1:
        raise ArgumentError(f"first is {tuple(first.shape)}; it must be one id per row, [batch]")


class _Search:
    """The beginnings [B,R,n] of each row with the sums [B,R] of their log probabilities, and the
    texts found.
    """

    def __init__(
        self, rows: int, beams: int, limit: int, length_penalty: float, ends: Tensor
    ) -> None:
        self.beams, self.limit, self.length_penalty, self.ends = beams, limit, length_penalty, ends
        self.found: list[list[Hypothesis]] = [[] for _ in range(rows)]
        self.tokens = ends.new_zeros(rows, 1, 0)
        self.sums: Tensor | None = None
        self._open = [True] * rows

    @property
    def done(self) -> bool:
        """Whether nothing better can come."""
        return self.tokens.shape[2] == self.limit or not any(self._open)

    def take(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """One token further, by logits [B*R,V]: the rows that go on, and their new ids, both
        [B*R'].
        """
        check_largest(logits.amax(1))
        x = logits if logits.dtype == torch.float64 else logits.float()
        B, R, n = self.tokens.shape
        p, V = x.log_softmax(1).view(B, R, -1), x.shape[1]
        total = (p if self.sums is None else p + self.sums[..., None]).flatten(1)
        best = top(total, min((len(self.ends) + 1) * self.beams, total.shape[1]))
        value, parent, token = total.gather(1, best), best // V, best % V
        texts = torch.cat([_beams(self.tokens, parent), token[..., None]], 2)
        ended = torch.isin(token, self.ends)
        self._keep(texts, value, ended | (n + 1 == self.limit), ended)
        alive = value.masked_fill(ended, -math.inf)
        kept = alive.argsort(dim=1, descending=True, stable=True)[:, : self.beams]
        self.sums, self.tokens = alive.gather(1, kept), _beams(texts, kept)
        self._close()
        rows = parent.gather(1, kept) + R * torch.arange(B, device=kept.device)[:, None]
        return rows.flatten(), token.gather(1, kept).flatten()

    def _keep(self, texts: Tensor, value: Tensor, whole: Tensor, ended: Tensor) -> None:
        """Of the first `beams` continuations those that are whole texts; a row remembers its best
        ones.
        """
        size = texts.shape[2] ** self.length_penalty
        for b, found in enumerate(self.found):
            if not self._open[b]:
                continue
            for j in whole[b, : self.beams].nonzero().flatten().tolist():
                score, last = float(value[b, j]), bool(ended[b, j])
                if score > -math.inf:
                    ids = texts[b, j].tolist()
                    found.append(Hypothesis(tuple(ids[:-1] if last else ids), score / size, last))
            found.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the earlier first
            del found[self.beams :]

    def _close(self) -> None:
        """Close the rows whose beginnings cannot reach the worst of their texts."""
        assert self.sums is not None
        # log p only falls: a text scores best when it is as long as it can be, or as it is
        n = self.limit if self.length_penalty > 0 else self.tokens.shape[2]
        best = (self.sums.amax(1) / n**self.length_penalty).tolist()
        for b, found in enumerate(self.found):
            enough = len(found) == self.beams and (self.beams == 1 or best[b] <= found[-1].score)
            self._open[b] &= not enough and best[b] > -math.inf


def _beams(x: Tensor, which: Tensor) -> Tensor:
    """x [B,R,n] of the beams [B,K]: [B,K,n]."""
    return x.gather(1, which[..., None].expand(-1, -1, x.shape[2]))


class Found(NamedTuple):
    """A text that beam search found behind a prompt.

    Attributes:
        text: the new text.
        ids: its ids, without the one that ended it.
        score: sum of log p / n^length_penalty, as `beam_search` has it.
        ended: whether it ended by itself, and not at max_tokens.
    """

    text: str
    ids: tuple[int, ...]
    score: float
    ended: bool


@dataclass(frozen=True)
class Search:
    """What a beam search found, and what it cost.

    Attributes:
        found: at most `beams` texts, best first.
        seconds: the time it took.
        prefill_seconds, prompt_tokens: the part of it that reading the prompt took, and how many
            tokens that were: all but the last, with which the search begins.
        steps: how many times all beams went on by a token.
        cache_bytes: what the caches of all beams held at the end.
    """

    found: list[Found]
    seconds: float
    prefill_seconds: float
    prompt_tokens: int
    steps: int
    cache_bytes: int


@torch.inference_mode()
def search(
    model: LanguageModel,
    prompt: str,
    options: Options,
    *,
    beams: int = 4,
    length_penalty: float = 1.0,
) -> Search:
    """The best continuations of a prompt, best first, as `beam_search` ranks them.

    Args:
        model: the model; the prompt is read once, and its caches are then shared out to the beams.
        prompt: not empty.
        options: max_tokens, at least 1; chunk; room. Sampling and stop strings are for `Batch`.
        beams: how many beginnings are kept.
        length_penalty: 0 ranks by probability, more favours long texts.

    Raises:
        ArgumentError: as `beam_search` and `Room`; the prompt is empty; or options name a sampler
            or a stop string.

    >>> import regard
    >>> found = search(regard.load("tiny"), "Return the", Options(max_tokens=3), beams=2).found
    >>> len(found), found[0].score >= found[1].score
    (2, True)
    """
    if not options.sampling.greedy or options.sampling.repetition_penalty != 1 or options.stop:
        raise ArgumentError(
            "beam search takes no sampler and no stop string; leave out temperature, "
            "repetition_penalty and stop, or beams"
        )
    room, ids = options.room or Room(), encoded(model, prompt, begun=False)
    room = room.sized(len(ids), options.max_tokens)
    start = time.perf_counter()
    context = Context(model.decoder, room, beams)
    if ids[:-1]:
        context.read(padded([ids[:-1]])[0].to(context.device), chunk=options.chunk)

    read, steps = time.perf_counter() - start, 0

    def step(last: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return context.read(last)[:, None]

    first = torch.tensor(ids[-1:], device=context.device)
    (best,) = beam_search(
        step,
        first,
        end=model.ends,
        limit=options.max_tokens,
        reorder=context.select,
        beams=beams,
        length_penalty=length_penalty,
    )
    found = [Found(model.tokenizer.decode(x.ids), *x) for x in best]
    return Search(found, time.perf_counter() - start, read, len(ids) - 1, steps, context.bytes)
