"""Speculative decoding: several tokens are proposed, and the model reads all of them in one pass.

A token is chosen as without proposals, from the model's own logits, with its own random numbers; a
proposal that is the chosen token saves a pass. So each seed gives the text that it gives without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.caches import Cache
from regard.caches.bounded_pages import BoundedPages
from regard.caches.eviction import Evicting
from regard.errors import ArgumentError
from regard.models.compiled_step import MAX_TOKENS
from regard.models.generation.decode_session import DecodeSession
from regard.models.generation.sampling import Sampler
from regard.models.prompts import LanguageModel
from regard.nn.weights import count_parameters, weight_tensors
from regard.sequence_scope import current_scope

COSTS: Mapping[int, tuple[float, ...]] = MappingProxyType(
    {
        1: (1.0, 1.25, 1.45, 1.75, 2.15, 2.4, 2.75, 3.05),
        2: (1.0, 1.3, 1.3, 1.55, 1.8, 1.8, 1.95, 2.2),
        4: (1.0, 1.2, 1.25, 1.4, 1.4, 1.5, 1.6, 1.6),
    }
)
"""The bytes of a weight, at least 1 -> the time of a pass over 1 to 8 tokens, in passes over one:
SmolLM2-135M on one core. With few bytes, computing takes longer than reading.
"""

LEAST_COST = 0.1
"""The least time of a pass of a draft, because any takes a millisecond."""

MATCHES = (16, 8, 4, 3)
"""The lengths of the ends of a text that are looked up in it, in this order."""


class Proposer(Protocol):
    """What proposes tokens, which may be wrong: `Lookup` or `DraftModel`."""

    cost: float
    """The time of a proposed token, in passes of the model over one token."""

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """Return at most so many tokens that may follow the ids."""
        ...


class Lookup:
    """Proposes what followed the last tokens of the text where they occurred before.

    The last 16, 8, 4 or 3 tokens are looked up, whichever is the first that occurred, where it
    occurred last. A continuation that reaches the end of the text goes on with itself.

    >>> Lookup().propose([7, 1, 2, 3, 9, 1, 2, 3], 5), Lookup().propose([1, 2, 1, 2, 1], 4)
    ([9, 1, 2, 3, 9], [2, 1, 2, 1])

    Source: Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    cost = 0.0

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # where the text after these tokens begins
        self._known = 0

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """Return at most so many tokens; the ids are those of the last call, and more."""
        for end in range(self._known + 1, len(ids)):  # the end itself is not its own continuation
            for n in MATCHES:
                if n <= end:
                    self._after[tuple(ids[end - n : end])] = end
        self._known = max(self._known, len(ids) - 1)
        places = (self._after.get(tuple(ids[-n:])) for n in MATCHES if n < len(ids))
        start = next((x for x in places if x is not None), None)
        if start is None:
            return []
        period = len(ids) - start
        return [ids[start + i % period] for i in range(most)]


class DraftModel:
    """Proposes what a smaller model chooses, with the random numbers with which the model will.

    Two models that draw with the same exponential noise, argmax_v p(v) / e(v), often draw the same
    token: with probability at least (1 - d) / (1 + d), where d is the total variation between them.

    Args:
        model: the model that generates.
        draft: another model with the same tokens.
        sampler: how the model chooses, of one row; a copy of it chooses for the draft.

    Raises:
        ArgumentError: the models have other tokens, or the caches of the draft cannot be cut off.

    Source: Daliri, Musco and Suresh 2025 (arXiv 2408.07978), section 3.
    """

    def __init__(self, model: LanguageModel, draft: LanguageModel, sampler: Sampler) -> None:
        sizes = draft.config.vocab_size, model.config.vocab_size
        tokens = (
            draft.has_tokenizer
            and model.has_tokenizer
            and draft.tokenizer is not model.tokenizer
            and draft.tokenizer.vocabulary() != model.tokenizer.vocabulary()
        )
        if sizes[0] != sizes[1] or tokens:
            raise ArgumentError(
                f"draft has other tokens than the model ({sizes[0]} and {sizes[1]}), so that its "
                "proposals mean something else; give a smaller model of the same family, or "
                'speculate="lookup"',
                argument="draft",
            )
        self._session = DecodeSession(draft.decoder)
        check_proposals(self._session, "draft")
        if not all(cache.crop_is_exact for cache in self._session.caches):
            raise ArgumentError(
                "draft has a layer whose cache cannot be cut off, such as a recurrent state; give "
                'a model of attention layers that keep every token, or speculate="lookup"',
                argument="draft",
            )
        self._session.prepare()
        self._sampler, self._eos_ids = sampler, model.eos_ids
        self._read: list[int] = []
        read = [sum(x.nbytes for x in weight_tensors(y.decoder)) for y in (draft, model)]
        self.cost = min(1.0, max(LEAST_COST, read[0] / max(1, read[1])))

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """Return at most so many tokens, fewer if one of them ends the text."""
        session, known = self._session, self._read
        pairs = enumerate(zip(known, ids, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(known), len(ids) - 1))
        session.crop(shared)
        sampler, tokens = self._sampler.copy(), list(ids[shared:])
        self._read, proposed = list(ids), []
        logits = session.append(_row(tokens, session), chunk=512)
        while True:
            (token,) = sampler(logits)
            proposed.append(token)
            if len(proposed) == most or token in self._eos_ids:
                return proposed
            logits = session.append(_row([token], session))
            self._read.append(token)


class Speculation:
    """How many tokens are proposed, from what became of those before.

    With the probability a that a proposed token is chosen, a pass over k proposals gives
    (1 - a^(k+1)) / (1 - a) tokens on average; the k with the most tokens for its time is taken, if
    they are more than without. What passes have cost more than they gave stays below `allowed`.

    Args:
        cost: the time of a proposed token, in passes over one token.
        weight_bytes: a key of `COSTS`.

    Attributes:
        proposed, accepted, passes: the tokens that were proposed, those of them that were chosen,
            and the passes that read proposals.
    """

    before = 2.0, 1.0
    """The proposals that were chosen, and those that were not, before anything is known."""
    allowed = 1.0, 0.01
    """The time that proposals may lose, in passes over one token: at first, and for each token."""

    def __init__(self, cost: float, weight_bytes: int) -> None:
        self.proposed = self.accepted = self.passes = 0
        (self._hits, self._misses), self._spare = self.before, self.allowed[0]
        read = LEAST_COST if cost else 0.0  # a draft first reads what was chosen without it
        first, *more = COSTS[weight_bytes]
        self._times = [first, *(time + n * cost + read for n, time in enumerate(more, 1))]

    def length(self) -> int:
        """Return how many tokens to propose now; 0 if that does not pay."""
        self._spare += self.allowed[1]
        a = self._hits / (self._hits + self._misses)
        best, speed = 0, 1.0
        for k in range(1, MAX_TOKENS):
            tokens, time = sum(a**i for i in range(k + 1)), self._times[k]
            if tokens / time > speed and time - 1 <= self._spare:
                best, speed = k, tokens / time
        if not best:  # what was counted is forgotten, so that it is tried again later
            self._hits, self._misses = (
                0.95 * x + 0.05 * y
                for x, y in ((self._hits, self.before[0]), (self._misses, self.before[1]))
            )
        return best

    def learn(self, proposed: int, accepted: int) -> None:
        """Take into account a pass over some proposals, the first of which were accepted."""
        weight = 0.95**proposed
        self._hits = self._hits * weight + accepted
        self._misses = self._misses * weight + (accepted < proposed)
        gain = accepted + 1 - self._times[proposed]
        self._spare = min(self._spare + gain, 4 * self.allowed[0])


class SpeculativeSession:
    """A `DecodeSession` of one row that has read its prompt, and reads proposed tokens ahead.

    Args:
        session: the session, which may hold proposed tokens behind the text after each `append`.
        ids: all ids that it has read.
        most: the largest number of tokens that it may hold.
        proposer: what proposes tokens.

    Attributes:
        speculation: the counts.
    """

    def __init__(
        self, session: DecodeSession, ids: Sequence[int], most: int, proposer: Proposer
    ) -> None:
        check_proposals(session, "speculate")
        self._session, self._ids, self._most, self._proposer = session, list(ids), most, proposer
        self.speculation = Speculation(proposer.cost, weight_bytes(session.decoder))
        self.device = session.device
        self._crops = all(cache.crop_is_exact for cache in session.caches)
        self._marks: list[object] = []  # of the caches before the last pass, if they do not crop
        self._marked = len(ids)
        self._pending: list[int] = []  # the proposals that were read and not yet reached
        self._logits: Tensor | None = None
        self._used = 0

    @property
    def bytes(self) -> int:
        """The number of bytes in the caches of all layers."""
        return self._session.bytes

    @property
    def caches(self) -> list[Cache]:
        """The caches, one per layer."""
        return self._session.caches

    def append(self, ids: Int[Tensor, "1 1"]) -> Float[Tensor, "1 V"]:
        """Read the next token of the text, unless it was read as a proposal; return the logits.

        Args:
            ids: the token [1, 1].

        Returns:
            Logits [1, V] for the token after it.
        """
        token = int(ids)
        if self._logits is not None and self._pending[self._used : self._used + 1] == [token]:
            self._used += 1
            self.speculation.accepted += 1
            self._ids.append(token)
            return self._logits[self._used : self._used + 1]
        unread = self._take_back()
        self._ids.append(token)
        new = [*unread, token]
        most = min(self.speculation.length(), self._most - len(self._ids))
        pending = self._proposer.propose(self._ids, most) if most > 0 else []
        if not pending and len(new) == 1:
            return self._session.append(ids)
        if not self._crops:
            self._marks = [cache.mark() for cache in self._session.caches]
            self._marked = len(self._ids) - len(new)
        logits = self._session.read(_row([*new, *pending], self._session))[0, len(unread) :]
        self._pending, self._used, self._logits = pending, 0, logits
        self.speculation.proposed += len(pending)
        self.speculation.passes += bool(pending)
        return logits[:1]

    def _take_back(self) -> list[int]:
        """Remove the proposals that are not in the text from the caches; return the tokens of the
        text that went with them.
        """
        if self._logits is None:
            return []
        proposed, used, self._logits = len(self._pending), self._used, None
        if proposed:
            self.speculation.learn(proposed, used)
        if used == proposed:
            return []
        if self._crops:
            self._session.crop(len(self._ids))
            return []
        for cache, mark in zip(self._session.caches, self._marks, strict=True):
            cache.restore(mark)
        return self._ids[self._marked :]


def weight_bytes(decoder: nn.Module) -> int:
    """Return the key of `COSTS` that is nearest to the bytes of a weight."""
    mean = sum(x.nbytes for x in weight_tensors(decoder)) / max(1, count_parameters(decoder))
    return min(COSTS, key=lambda size: abs(size - mean))


def check_proposals(session: DecodeSession, argument: str) -> None:
    """Check that a session can take back tokens that it has read."""
    if current_scope() is not None:
        raise ArgumentError(
            f"{argument} reads ahead in one process, and several ranks run this model; leave it "
            "out inside regard.parallel.generation",
            argument=argument,
        )
    if session.follows_length:
        raise ArgumentError(
            f"{argument} takes back tokens, and the rotary frequencies of this model depend on the "
            "length, so that earlier keys change with each token; leave it out",
            argument=argument,
        )
    for i, cache in enumerate(session.caches):
        for part in getattr(cache, "parts", (cache,)):
            if isinstance(part, Evicting | BoundedPages):
                raise ArgumentError(
                    f"{argument} reads several tokens at once, and the cache of layer {i}, "
                    f"{type(part).__name__}, chooses tokens by each query; leave it out, or choose "
                    'another cache, such as "growing"',
                    argument=argument,
                )


def _row(ids: Sequence[int], session: DecodeSession) -> Tensor:
    """Return ids as a batch of one row [1, T] on the device of a session."""
    return torch.tensor([ids], device="cpu").to(session.device, non_blocking=True)
