"""Numbers that other mechanisms with a memory keep, as Infini-attention's paper compares them; and how far a mask reaches."""

from __future__ import annotations


def segment_cache(groups: int, D: int, E: int, tokens: int, layers: int = 1) -> int:
    """Numbers of keys and values of so many earlier tokens, as Transformer-XL keeps them: (D + E) G N l.

    >>> segment_cache(8, 128, 128, 2048, 12)  # "50M (3.7x)"
    50331648

    Source: Dai et al. 2019 (arXiv 1901.02860); the comparison: arXiv 2404.07143, tables 1 and 2.
    """
    return layers * groups * (D + E) * tokens


def memorizing_cache(groups: int, D: int, E: int, tokens: int, memory: int, layers: int = 1) -> int:
    """The same, and one layer's keys and values of a large memory, as the Memorizing Transformer keeps them.

    >>> memorizing_cache(8, 128, 128, 2048, 65000, 12)  # "183M": 65K means 65,000
    183451648

    Source: Wu et al. 2022 (arXiv 2203.08913); the comparison: arXiv 2404.07143, tables 1 and 2.
    """
    return segment_cache(groups, D, E, tokens, layers) + segment_cache(groups, D, E, memory)


def summary_tokens(dim: int, tokens: int, layers: int = 1) -> int:
    """Numbers of memory tokens that are read and written in each layer, as RMT has them: 2 M p l.

    >>> summary_tokens(1024, 100, 12)  # "2.5M (73x)"
    2457600

    Source: Bulatov et al. 2022 (arXiv 2207.06881); the comparison: arXiv 2404.07143, tables 1 and 2.
    """
    return 2 * dim * tokens * layers


def window_reach(window: int, layers: int) -> int:
    """How far information travels through layers with a window, the token's own place included at each: W l.

    >>> window_reach(4096, 32)  # Mistral 7B
    131072

    Source: Jiang et al. 2023 (arXiv 2310.06825), section 2.
    """
    return window * layers


def bigbird_dense(block: int, random: int) -> int:
    """The longest text for which blocks of window, both ends and random ones are everything: (5 + 2 r) b tokens.

    >>> bigbird_dense(64, 3)  # the released configuration
    704

    Source: Zaheer et al. 2020 (arXiv 2007.14062), section 2, and its implementation.
    """
    return (5 + 2 * random) * block
