"""What additive attention computes."""

from __future__ import annotations


def additive_flops(pairs: int, A: int, E: int) -> int:
    """FLOPs of additive scores and of the mix for a number of query-key pairs, over all batch rows and heads.

    A additions and 2 A for the vector that reads the hidden layer, and 2 E for p v; tanh and softmax are not counted.

    >>> additive_flops(pairs=30, A=1000, E=2000)  # a sentence of 30 words, one step
    210000

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), appendix A.1.2.
    """
    return pairs * (3 * A + 2 * E)
