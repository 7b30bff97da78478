"""Both ends of a language model: the embedding, and the head that may share its matrix."""

from __future__ import annotations

from torch import nn

from regard.nn.linear import Linear


def embedding_and_head(vocabulary: int, dim: int, *, tied: bool) -> tuple[nn.Embedding, nn.Linear]:
    """An embedding [V, M] and a head from M to V without bias; if tied, both have one matrix.

    Args:
        vocabulary: how many tokens V there are.
        dim: the model dim M.
        tied: whether the head is the embedding.

    >>> embedding, head = embedding_and_head(7, 4, tied=True)
    >>> embedding.weight is head.weight
    True

    Source: Press and Wolf 2016 (arXiv 1608.05859), section 3.
    """
    embedding, head = nn.Embedding(vocabulary, dim), Linear(dim, vocabulary, bias=False)
    if tied:
        head.weight = embedding.weight
    return embedding, head
