"""Greedy search and beam search over any step function, and beam search for a model's prompt."""

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
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.decode_session import DecodeSession, pad_left
from regard.models.generation.generate import GenerationOptions
from regard.models.generation.sampling import check_largest, top_ids
from regard.models.prompts import LanguageModel, Prompt, encode_prompt


@torch.no_grad()
def greedy(
    step: Callable[[Tensor], Tensor], first: Int[Tensor, " B"], *, end: int, limit: int
) -> Int[Tensor, "B n"]:
    """Extend each row by its most likely token until all rows have ended.

    y_t = argmax step(y_{t-1})

    Args:
        step: a function from ids [B, 1] to logits [B, 1, V]; it keeps its own state between calls.
        first: the ids [B] that start the rows.
        end: the id that ends a row; a row that has ended is filled with it.
        limit: the largest number of tokens, at least 1.

    Returns:
        Ids [B, n], n <= limit, without `first`.

    Raises:
        ArgumentError: limit is less than 1, or first is not one id per row.

    >>> def count(ids):  # the next token after n is n + 1
    ...     return torch.nn.functional.one_hot(ids + 1, 10).double()
    >>> greedy(count, torch.tensor([0, 2]), end=4, limit=9).tolist()
    [[1, 2, 3, 4], [3, 4, 4, 4]]
    """
    _check(first, limit)
    ids, done, columns = first, torch.zeros_like(first, dtype=torch.bool), []
    for _ in range(limit):
        ids = step(ids[:, None])[:, -1].argmax(-1).masked_fill(done, end)
        columns.append(ids)
        done = done | (ids == end)
        if bool(done.all()):
            break
    return torch.stack(columns, 1)


class Hypothesis(NamedTuple):
    """A text that beam search found.

    Attributes:
        ids: the ids of its tokens, without the one that ended it.
        score: the sum of log p over its tokens and its end, over their number ** length_penalty.
        ended: True if an end id ended the text, False if the text reached the limit.
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
    """Search the best texts of each row, keeping `beams` candidates at every step.

    score(y) = (sum_t log p(y_t | y_<t)) / n^length_penalty, for n tokens with the end

    The most likely continuations of a row's candidates are ranked: one that ends is a result if it
    is among the first `beams`, and the first `beams` that do not end are the next candidates. A row
    is done when it has `beams` results that no candidate can reach. This is transformers' search
    with early_stopping="never"; Wu et al. divide by ((5 + n) / 6)^alpha. One beam equals `greedy`.

    Args:
        step: a function from ids [rows, 1] to logits [rows, 1, V] with a state of its own.
        first: the id [B] that starts each row.
        end: the id, or ids, that end a text.
        limit: the largest number of tokens of a text, at least 1.
        reorder: called with row indices [n]; the state of row i must become that of row rows[i].
            The first call makes n = B * beams rows of B: use `Cache.select`, not `Cache.reorder`.
        beams: the number of candidates per row.
        length_penalty: 0 ranks by probability, a larger value favours long texts.

    Returns:
        For each row at most `beams` hypotheses, best first.

    Raises:
        ArgumentError: limit or beams is less than 1, first is not one id per row, a logit is NaN.

    >>> def count(ids):  # the next token after n is n + 1, or 9
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
    end_ids = torch.tensor(
        [end] if isinstance(end, int) else sorted(end), dtype=torch.int64, device="cpu"
    )
    search = _BeamSearch(len(first), beams, limit, length_penalty, end_ids.to(first.device))
    ids = first
    while True:
        logits = step(ids[:, None])[:, -1]
        rows, ids = search.advance(logits)
        if search.done:
            return search.hypotheses
        reorder(rows)


def _check(first: Tensor, limit: int, beams: int = 1, length_penalty: float = 1.0) -> None:
    for name, n in (("limit", limit), ("beams", beams)):
        if n < 1:
            raise ArgumentError(f"{name} is {n}; it must be at least 1", argument=name, value=n)
    check_number("length_penalty", length_penalty, -math.inf, math.inf, "finite")
    if first.ndim != 1:
        raise ArgumentError(f"first is {tuple(first.shape)}; it must be one id per row, [batch]")


class _BeamSearch:
    """The state of a beam search: candidates [B, R, n], log probabilities [B, R], found texts."""

    def __init__(
        self, rows: int, beams: int, limit: int, length_penalty: float, end_ids: Tensor
    ) -> None:
        self.beams, self.limit = beams, limit
        self.length_penalty, self.end_ids = length_penalty, end_ids
        self.hypotheses: list[list[Hypothesis]] = [[] for _ in range(rows)]
        self.tokens = end_ids.new_zeros(rows, 1, 0)
        self.sums: Tensor | None = None
        self._open = [True] * rows

    @property
    def done(self) -> bool:
        """Whether no better text can be found."""
        return self.tokens.shape[2] == self.limit or not any(self._open)

    def advance(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Extend the candidates by one token."""
        check_largest(logits.amax(1))
        x = logits if logits.dtype == torch.float64 else logits.float()
        B, R, n = self.tokens.shape
        p, V = x.log_softmax(1).view(B, R, -1), x.shape[1]
        total = (p if self.sums is None else p + self.sums[..., None]).flatten(1)
        best = top_ids(total, min((len(self.end_ids) + 1) * self.beams, total.shape[1]))
        value, parent, token = total.gather(1, best), best // V, best % V
        texts = torch.cat([_select_beams(self.tokens, parent), token[..., None]], 2)
        ended = torch.isin(token, self.end_ids)
        self._keep(texts, value, ended | (n + 1 == self.limit), ended)
        alive = value.masked_fill(ended, -math.inf)
        next_beams = alive.argsort(dim=1, descending=True, stable=True)[:, : self.beams]
        self.sums, self.tokens = alive.gather(1, next_beams), _select_beams(texts, next_beams)
        self._close()
        rows = parent.gather(1, next_beams)
        rows = rows + R * torch.arange(B, device=rows.device)[:, None]
        return rows.flatten(), token.gather(1, next_beams).flatten()

    def _keep(self, texts: Tensor, value: Tensor, whole: Tensor, ended: Tensor) -> None:
        """Store the complete texts among the first `beams`; a row keeps its best ones."""
        size = texts.shape[2] ** self.length_penalty
        for b, best_texts in enumerate(self.hypotheses):
            if not self._open[b]:
                continue
            for j in whole[b, : self.beams].nonzero().flatten().tolist():
                score, last = float(value[b, j]), bool(ended[b, j])
                if score > -math.inf:
                    ids = texts[b, j].tolist()
                    best_texts.append(
                        Hypothesis(tuple(ids[:-1] if last else ids), score / size, last)
                    )
            best_texts.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the earlier first
            del best_texts[self.beams :]

    def _close(self) -> None:
        """Stop searching in rows whose candidates cannot reach the score of their worst text."""
        assert self.sums is not None
        # log p only decreases, so a text scores best at its largest length, or at its present one
        n = self.limit if self.length_penalty > 0 else self.tokens.shape[2]
        best = (self.sums.amax(1) / n**self.length_penalty).tolist()
        for b, best_texts in enumerate(self.hypotheses):
            enough = len(best_texts) == self.beams and (
                self.beams == 1 or best[b] <= best_texts[-1].score
            )
            self._open[b] &= not enough and best[b] > -math.inf


def _select_beams(x: Tensor, beams: Tensor) -> Tensor:
    """Return the beams with indices [B, K] of x [B, R, n]: [B, K, n]."""
    return x.gather(1, beams[..., None].expand(-1, -1, x.shape[2]))


class BeamCompletion(NamedTuple):
    """A continuation of a prompt that beam search found.

    Attributes:
        text: the new text.
        ids: its ids, without the one that ended it.
        score: sum of log p / n^length_penalty, as in `beam_search`.
        ended: True if an id of `eos_ids` ended the text, False if it reached max_tokens.
    """

    text: str
    ids: tuple[int, ...]
    score: float
    ended: bool


@dataclass(frozen=True)
class BeamSearchResult:
    """The result of a beam search for a prompt, with its cost.

    Attributes:
        prefill_seconds, prompt_tokens: the time for reading the prompt, and the number of tokens
            read: all but the last, with which the search begins.
        cache_bytes: the number of bytes in the caches of all beams at the end.
    """

    completions: list[BeamCompletion]
    seconds: float
    prefill_seconds: float
    prompt_tokens: int
    steps: int
    cache_bytes: int


def check_beam_options(options: GenerationOptions) -> None:
    """Raise if the options name what beams do not have."""
    sampling = options.sampling
    unused = {
        "temperature": not sampling.greedy,
        "top_k": sampling.top_k is not None,
        "top_p": sampling.top_p is not None,
        "min_p": sampling.min_p is not None,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "stop": bool(options.stop),
    }
    for name in (name for name, is_set in unused.items() if is_set):
        raise ArgumentError(
            f"beam search takes no sampler and no stop string; leave out {name}",
            argument=name,
        )
    options.refuse_proposals("beam search writes several")
    if options.cuda_graph:
        raise ArgumentError(
            "cuda_graph captures steps whose rows stay in their places, and beam search moves "
            "them; leave out cuda_graph",
            argument="cuda_graph",
        )


@torch.inference_mode()
def beam_search_text(
    model: LanguageModel,
    prompt: Prompt,
    options: GenerationOptions,
    *,
    beams: int = 4,
    length_penalty: float = 1.0,
) -> BeamSearchResult:
    """Search the best continuations of a prompt, ranked as in `beam_search`.

    Args:
        model: the model; it reads the prompt once, and all beams share those caches.
        prompt: the text to continue, its ids, or messages; not empty.
        options: max_tokens, at least 1; chunk; cache_config. Sampling, stop strings and cuda_graph
            raise.
        beams: the number of candidates.
        length_penalty: 0 ranks by probability, a larger value favours long texts.

    Returns:
        The texts, best first, and the cost of the search.

    Raises:
        ArgumentError: as in `beam_search` and `CacheConfig`; the prompt is empty; or options name
            what beams do not have.

    >>> import regard
    >>> options = GenerationOptions(max_tokens=3)
    >>> result = beam_search_text(regard.load("tiny"), "Return the", options, beams=2)
    >>> best, second = result.completions
    >>> best.score >= second.score
    True
    """
    check_beam_options(options)
    ids = encode_prompt(model, prompt, special=options.special)
    cache_config = options.cache_config or CacheConfig()
    cache_config = cache_config.with_capacity(len(ids), options.max_tokens)
    start = time.perf_counter()
    session = DecodeSession(model.decoder, cache_config, beams)
    session.prepare()
    if ids[:-1]:
        session.append(pad_left([ids[:-1]])[0].to(session.device), chunk=options.chunk)

    prefill_seconds, steps = time.perf_counter() - start, 0

    def step(last: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return session.append(last)[:, None]

    first = torch.tensor(ids[-1:], device=session.device)
    (best,) = beam_search(
        step,
        first,
        end=model.eos_ids,
        limit=options.max_tokens,
        reorder=session.select,
        beams=beams,
        length_penalty=length_penalty,
    )
    has_text = model.has_tokenizer
    texts = [model.tokenizer.decode(x.ids, after=ids) if has_text else "" for x in best]
    completions = [BeamCompletion(text, *x) for text, x in zip(texts, best, strict=True)]
    return BeamSearchResult(
        completions,
        time.perf_counter() - start,
        prefill_seconds,
        len(ids) - 1,
        steps,
        session.bytes,
    )
