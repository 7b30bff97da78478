"""What a conversion costs on a text: perplexity before and after, and how far the logits moved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.model import Model

TEXT = """\
Return the number of items in a container. The argument may be a sequence (such as a string, bytes, tuple, list, or range) or
a collection (such as a dictionary, set, or frozen set). If the object does not define its own length, an exception of type
TypeError is raised. Objects are compared by value, unless they are compared by identity.

A function returns a value to its caller. It may also take one or more arguments, which can be used in the execution of the
body. A method is a function that is defined inside a class body. If called as an attribute of an instance of that class, the
method will get the instance object as its first argument.

The following example opens a file, reads every line of it, and closes it again. If the file does not exist, an error is
raised, and the message says which file was not found. Lines end in a newline character, and the last one may lack it.
"""
"""What is measured on, if no text is given."""

SHORTEST = 2


@dataclass(frozen=True)
class Measured:
    """Two models on the same ids.

    Attributes:
        tokens: that were predicted; 0 where there is no text.
        rows, length: how the ids were read: so many windows of so many tokens, each on its own.
        loss_before, loss_after: mean nats per token; NaN where there is no text.
        largest: the largest absolute difference of a logit.
        relative: the norm of the differences over that of the logits, both without the mean of each row, which softmax does
            not see.
        divergence: mean KL(before | after), nats per token.
        agreement: how often both think the same token likeliest.
    """

    tokens: int
    rows: int
    length: int
    loss_before: float
    loss_after: float
    largest: float
    relative: float
    divergence: float
    agreement: float

    @property
    def perplexity_before(self) -> float:
        """exp of the loss before."""
        return _exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        """exp of the loss after."""
        return _exp(self.loss_after)


def windows(
    model: Model, text: str | None, length: int, limit: int
) -> tuple[Int[Tensor, "N T"], bool]:
    """Ids to measure on, and whether they are a text: without a tokenizer they are drawn, and perplexity has no meaning.

    Args:
        model: whose tokenizer reads the text.
        text: None is the built-in one.
        length: the most tokens of a window.
        limit: at most so many tokens.

    Raises:
        ArgumentError: the text has fewer than two tokens, or length or limit is less than 2.

    >>> import regard
    >>> ids, is_text = windows(regard.load("tiny"), None, 64, 128)
    >>> ids.shape, is_text
    (torch.Size([2, 64]), True)
    """
    for name, value in (("length", length), ("tokens", limit)):
        if value < SHORTEST:
            raise ArgumentError(
                f"{name} is {value}; it must be at least {SHORTEST}, to predict one token"
            )
    if not model.has_tokenizer and text is None:
        make = torch.Generator().manual_seed(0)
        drawn = torch.randint(model.config.vocab_size, (limit,), generator=make)
        return _rows(drawn, length), False
    ids = model.encode(TEXT if text is None else text)[0][:limit]
    if len(ids) < SHORTEST:
        raise ArgumentError(f"the text has {len(ids)} tokens; give at least {SHORTEST}")
    return _rows(ids, length), True


@torch.inference_mode()
def measure(
    before: nn.Module, after: nn.Module, ids: Int[Tensor, "N T"], *, is_text: bool = True
) -> Measured:
    """Both models on the same windows, each window on its own; sums are in fp64.

    >>> import regard
    >>> decoder = regard.load("tiny").decoder
    >>> found = measure(decoder, decoder, torch.arange(64)[None])
    >>> found.tokens, found.largest, found.agreement, found.perplexity_before == found.perplexity_after
    (63, 0.0, 1.0, True)
    """
    losses, moved, whole, divergence = torch.zeros(2), 0.0, 0.0, 0.0
    losses = losses.double()
    largest, same = 0.0, 0
    for row in ids:
        old, new = (model(row[None])[0, :-1].double() for model in (before, after))
        largest = max(largest, float((new - old).abs().max()))
        old, new = (x.log_softmax(-1) for x in (old, new))
        losses -= torch.stack([x.gather(-1, row[1:, None]).sum() for x in (old, new)])
        divergence += float((old.exp() * (old - new)).sum())
        centred = [x - x.mean(-1, keepdim=True) for x in (old, new)]
        moved += float((centred[1] - centred[0]).square().sum())
        whole += float(centred[0].square().sum())
        same += int((old.argmax(-1) == new.argmax(-1)).sum())
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    means = (losses / tokens).tolist() if is_text else [math.nan, math.nan]
    return Measured(
        tokens, ids.shape[0], ids.shape[1], means[0], means[1], largest, (moved / whole) ** 0.5 if whole else 0.0,
        max(0.0, divergence / tokens), same / tokens,
    )  # fmt: skip


def _rows(ids: Tensor, length: int) -> Tensor:
    """As few windows as hold all ids, of one length that is at most the given one."""
    rows = -(-len(ids) // length)
    each = len(ids) // rows
    return ids[: rows * each].view(rows, each)


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)
