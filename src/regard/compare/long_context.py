"""Long-context tests of a decoder: the loss on the same tokens after more and more context, and the
retrieval of a passage from a given depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.units import plural


class NeedleResult(NamedTuple):
    """How well a model retrieves a passage from one depth of a text.

    >>> NeedleResult(0.5, 0.75, 0.25, 1.5).saved
    1.5
    """

    depth: float
    right: float
    guessed: float
    saved: float


@torch.inference_mode()
def losses_by_length(
    model: nn.Module,
    ids: Int[Tensor, " N"],
    lengths: Sequence[int],
    *,
    counted: int = 32,
    windows: int = 8,
) -> Float[Tensor, " n"]:
    """Return the mean loss in nats of the same tokens after contexts of each length.

    loss(L) = mean over ends e, i < counted of  -log p(x_{e-i} | x_{e-L} .. x_{e-i-1})

    The targets are the last `counted` tokens of windows that end at the same positions, so that
    lengths differ only in the tokens before them. Sums are in fp64.
    """
    if min(lengths) < counted or counted < 1 or windows < 1:
        raise ArgumentError(
            f"lengths are {list(lengths)}, counted is {counted} and windows is {windows}; each "
            "length must be at least counted, and counted and windows must be at least 1",
            argument="lengths",
        )
    longest = max(lengths)
    if len(ids) <= longest:
        raise ArgumentError(
            f"the text has {plural(len(ids), 'token')}, but a context of {longest} needs "
            f"{longest + 1}; give a longer text, or shorter lengths"
        )
    window_ends = sorted(set(torch.linspace(longest, len(ids) - 1, windows).long().tolist()))
    totals = torch.zeros(len(lengths), dtype=torch.float64)
    for i, length in enumerate(lengths):
        for end in window_ends:
            row = ids[end - length : end + 1][None]
            logits = model(row[:, :-1])[0, -counted:].double()
            totals[i] += F.cross_entropy(logits, row[0, -counted:])
    return totals / len(window_ends)


@torch.inference_mode()
def needle_in_haystack(
    model: nn.Module,
    ids: Int[Tensor, " N"],
    length: int,
    depths: Sequence[float],
    *,
    trials: int = 8,
    key: int = 8,
    mark: int = 12,
    seed: int = 0,
) -> list[NeedleResult]:
    """Test whether a model retrieves a passage from each depth: how often it is right, and how much
    that lowers the loss.

    with the passage:    text .. cue answer .. text cue -> answer
    without the passage: text .. text cue -> answer

    The passage is a cue of `mark` tokens and an answer of `key` tokens. It is a piece of the text
    itself, so that a model that was never trained on passkeys can be tested. Each token of the
    answer is predicted from all tokens before it. The share of right tokens without the passage is
    the share that the model can guess.
    """
    passage_length = key + mark
    text_length = length - 2 * passage_length + 1
    if (
        text_length < passage_length
        or len(ids) < length
        or not all(0 <= depth <= 1 for depth in depths)
    ):
        raise ArgumentError(
            f"a passage of {plural(passage_length, 'token')} cannot be placed twice in {length} of "
            f"{plural(len(ids), 'token')} at the depths {list(depths)}; the length must be at "
            "least "
            f"{3 * passage_length - 1} and at most that of the text, and depths must be in 0..1"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(
        len(ids) - text_length - passage_length + 1, (trials,), generator=generator
    )
    pieces = [
        (ids[s : s + text_length], ids[s + text_length : s + text_length + passage_length])
        for s in starts.tolist()
    ]
    passage_starts = torch.randint(
        len(ids) - passage_length + 1, (trials,), generator=generator
    ).tolist()
    passages = [ids[a : a + passage_length] for a in passage_starts]
    without_passage = torch.stack(
        [torch.cat((*piece, passage)) for piece, passage in zip(pieces, passages, strict=True)]
    )
    without, guessed = _loss_and_accuracy(model, without_passage, key)
    results = []
    for depth in depths:
        split = round(depth * text_length)
        with_passage = torch.stack(
            [
                torch.cat((text[:split], passage, text[split:], passage))
                for (text, _), passage in zip(pieces, passages, strict=True)
            ]
        )
        nats, right = _loss_and_accuracy(model, with_passage, key)
        results.append(NeedleResult(depth, right, guessed, without - nats))
    return results


def _loss_and_accuracy(model: nn.Module, rows: Tensor, key: int) -> tuple[float, float]:
    """Return the mean loss in nats of the last `key` tokens of each row, and the share of them that
    are the model's first choice.
    """
    logits = model(rows[:, :-1])[:, -key:].double()
    right = (logits.argmax(-1) == rows[:, -key:]).double().mean()
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, -key:].flatten())), float(right)


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats per token; infinity if no float can hold it."""
    return math.exp(loss) if loss < 700 else math.inf
