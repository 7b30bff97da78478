"""How far a decoder reads: its loss on the same tokens behind ever more context, and whether it
finds what stands at a depth.
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


class NeedleResult(NamedTuple):
    """What came of a passage at a depth.

    Attributes:
        depth: 0 at the beginning of the text, 1 at its end.
        right: the share of its tokens that are thought likeliest when they are asked for.
        guessed: the same when the passage did not stand in the text.
        saved: nats per token less than without it.

    >>> NeedleResult(0.5, 0.75, 0.25, 1.5).saved
    1.5
    """

    depth: float
    right: float
    guessed: float
    saved: float


@torch.inference_mode()
def losses(
    model: nn.Module,
    ids: Int[Tensor, " N"],
    lengths: Sequence[int],
    *,
    counted: int = 32,
    windows: int = 8,
) -> Float[Tensor, " n"]:
    """Mean nats of the same tokens behind contexts of each length.

    loss(L) = mean over ends e, i < counted of  -log p(x_{e-i} | x_{e-L} .. x_{e-i-1})

    The targets are the last `counted` of windows that end at the same places, so that lengths
    differ in nothing but what stands before. Sums are in fp64.

    Args:
        model: ids [B,T] -> logits [B,T,V].
        ids: a text.
        lengths: how many tokens are read, each more than `counted`.
        counted: tokens of a window that are predicted.
        windows: how many ends, spread over the text.

    Raises:
        ArgumentError: a length is not more than counted, or the text is shorter than the longest
            and one more.

    >>> flat = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> found = losses(flat, torch.zeros(99, dtype=torch.long), [40, 80])
    >>> [round(x / math.log(4), 4) for x in found.tolist()]
    [1.0, 1.0]
    """
    if min(lengths) < counted or counted < 1 or windows < 1:
        raise ArgumentError(
            f"lengths are {list(lengths)}, and {counted} tokens of {windows} windows are counted; "
            "each length must have them"
        )
    longest = max(lengths)
    if len(ids) <= longest:
        raise ArgumentError(
            f"the text has {len(ids)} tokens, and {longest} of context need {longest + 1}; give a "
            "longer text, or shorter lengths"
        )
    ends = sorted(set(torch.linspace(longest, len(ids) - 1, windows).long().tolist()))
    found = torch.zeros(len(lengths), dtype=torch.float64)
    for i, length in enumerate(lengths):
        for end in ends:
            row = ids[end - length : end + 1][None]
            logits = model(row[:, :-1])[0, -counted:].double()
            found[i] += F.cross_entropy(logits, row[0, -counted:])
    return found / len(ends)


@torch.inference_mode()
def needles(
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
    """Whether a model finds a passage again that stands at a depth: how often it is right, and how
    many nats that saves.

    text ... mark key ... text mark -> key, each token given those before it; and the same without
    the first mark and key

    Mark and key are a passage from elsewhere in the text, so that a model that was never taught a
    passkey can show what it finds. What it could guess without looking back is the share right
    without it, and saves nothing.

    Args:
        model: ids [B,T] -> logits [B,T,V].
        ids: a text, whose pieces surround the passage.
        length: tokens that are read.
        depths: where the passage stands, 0 at the beginning and 1 at the end of the text.
        trials: for each depth.
        key, mark: tokens of the passage that are asked for, and those before them.
        seed: of pieces and passages.

    Raises:
        ArgumentError: the text or the length has no room for it, or a depth lies outside 0..1.

    >>> flat = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> [one.saved for one in needles(flat, torch.arange(99) % 4, 60, [0.0, 1.0], trials=2)]
    [0.0, 0.0]
    """
    n = key + mark
    room = length - 2 * n + 1
    if room < n or len(ids) < length or not all(0 <= depth <= 1 for depth in depths):
        raise ArgumentError(
            f"a passage of {n} tokens twice in {length} tokens, of a text of {len(ids)}, at "
            f"depths {list(depths)}: "
            f"the length must be at least {3 * n - 1} and at most the text's, depths in 0..1"
        )
    make = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - room - n + 1, (trials,), generator=make)
    pieces = [(ids[s : s + room], ids[s + room : s + room + n]) for s in starts.tolist()]
    told = torch.randint(len(ids) - n + 1, (trials,), generator=make).tolist()
    passages = [ids[a : a + n] for a in told]
    bare = torch.stack(
        [torch.cat((*piece, said)) for piece, said in zip(pieces, passages, strict=True)]
    )
    without, guessed = _loss_and_accuracy(model, bare, key)
    found = []
    for depth in depths:
        cut = round(depth * room)
        whole = torch.stack(
            [
                torch.cat((text[:cut], said, text[cut:], said))
                for (text, _), said in zip(pieces, passages, strict=True)
            ]
        )
        nats, right = _loss_and_accuracy(model, whole, key)
        found.append(NeedleResult(depth, right, guessed, without - nats))
    return found


def _loss_and_accuracy(model: nn.Module, rows: Tensor, key: int) -> tuple[float, float]:
    """Mean nats of the last tokens of rows, and the share of them that are thought likeliest."""
    logits = model(rows[:, :-1])[:, -key:].double()
    right = (logits.argmax(-1) == rows[:, -key:]).double().mean()
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, -key:].flatten())), float(right)


def perplexity(loss: float) -> float:
    """exp of nats per token; infinite where no float holds it.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf
