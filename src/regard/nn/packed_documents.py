"""Packed text in a recurrence: the computation starts anew, with an empty state, at the first token
of every document.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.caches import Parts
from regard.masks import Document
from regard.span import Positions, Span, slice_positions

Tensors: TypeAlias = tuple[Tensor, ...]


class Piece(NamedTuple):
    """Neighbouring tokens of a call, in which no row begins a document after the first token.

    Attributes:
        begins: which rows begin a document with the first token, bool [B or 1]; None if no row
            does.
    """

    start: int
    stop: int
    begins: Bool[Tensor, "#B"] | None


def split_at_documents(documents: Document, positions: Positions, length: int) -> list[Piece]:
    """Split the tokens of a call where a row begins a document.

    A token begins a document if its position is one of the bounds. What stands outside of all
    bounds is text of its own.

    >>> from regard.span import Span
    >>> [piece[:2] for piece in split_at_documents(Document((0, 3, 5)), Span(1, 4), 4)]
    [(0, 2), (2, 4)]
    """
    everywhere = torch.ones(1, dtype=torch.bool, device="cpu")
    if isinstance(positions, Span) and isinstance(documents.bounds[0], int):
        # integers of Python, which a compiled graph can compare
        starts = {b - positions.start: everywhere for b in documents.bounds if isinstance(b, int)}
        begins = {i: starts[i] for i in sorted(starts) if 0 <= i < length}
    else:
        first = documents.begins(positions)
        begins = {i: first[:, i] for i in first.any(0).nonzero().flatten().tolist()}
    edges = [0, *(i for i in begins if i), length]
    pieces = [Piece(i, stop, begins.get(i)) for i, stop in pairwise(edges)]
    return pieces


def over_documents(
    documents: Document | None,
    run: Callable[[Tensors, Positions, Parts | None], tuple[Tensors, Parts]],
    inputs: Tensors,
    positions: Positions,
    state: Parts | None,
) -> tuple[Tensors, Parts]:
    """Run a computation with a state over the documents of a call, each from an empty state."""
    if documents is None:
        return run(inputs, positions, state)
    B, T = inputs[0].shape[0], inputs[0].shape[-2]
    documents.require(B, 1, T, T)
    results: list[Tensors] = []
    for start, stop, begins in split_at_documents(documents, positions, T):
        if begins is not None and state is not None:
            empty = run(
                tuple(x[..., :0, :] for x in inputs), slice_positions(positions, slice(0, 0)), None
            )[1]
            rows = begins.to(inputs[0].device)
            state = tuple(
                torch.where(rows.view(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(empty, state, strict=True)
            )
        part = tuple(x[..., start:stop, :] for x in inputs)
        outputs, state = run(part, slice_positions(positions, slice(start, stop)), state)
        results.append(outputs)
    assert state is not None, "there is at least one piece"
    return tuple(torch.cat(parts, -2) for parts in zip(*results, strict=True)), state
