"""What a row costs, by the formulas of `regard.cost`: the head's FLOPs and bytes, and what caches
would keep instead.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.cost import Description, attention_flops
from regard.cost.latent import latent_numbers
from regard.cost.softmax import attention_bytes
from regard.inspect.elsewhere import small_window
from regard.inspect.parts import Cost, Held


def price(attention: nn.Module, sizes: dict[str, int], keys: int, itemsize: int) -> Cost:
    """The cost of one query against `keys` visible keys of S, and caches of S tokens of this layer.

    MLA stands beside with the sizes of its paper: a latent of 4 D and a rotary key of D / 2.

    >>> cost = price(nn.Identity(), {"H": 4, "G": 2, "S": 100, "D": 8, "E": 8}, 50, 2)
    >>> cost.flops, [(kept.name, kept.bytes) for kept in cost.kept][:2]
    (1600, [('MHA', 12800), ('GQA, G = 2', 6400)])

    Source: sizes of MLA from DeepSeek-AI 2024 (arXiv 2405.04434), section 3.1.2.
    """
    H, G, S, D, E = (sizes[letter] for letter in "HGSDE")
    described = _described(attention, S)
    kept = [
        _kept("MHA", H * (D + E), S, itemsize),
        *([_kept(f"GQA, G = {G}", G * (D + E), S, itemsize)] if 1 < G < H else []),
        _kept("MQA", D + E, S, itemsize),
        _kept("MLA", latent_numbers(4 * D, D // 2), S, itemsize),
        _kept(f"window {small_window(S)}", G * (D + E), small_window(S), itemsize),
    ]
    if described is not None:
        numbers, tokens = described.kv_per_token.value, described.kv_tokens.value
        whole = described.kept * itemsize
        kept.append(Held("this layer", numbers, tokens, whole, here=True))
    flops = described.flops_per_token if described is not None else None
    return Cost(
        keys,
        attention_flops(keys, D, E),
        0 if flops is None else flops.value,
        "" if flops is None else flops.formula,
        attention_bytes(B=1, H=1, G=1, T=1, S=keys, D=D, E=E, itemsize=itemsize),
        tuple(kept),
    )


def _kept(name: str, numbers: int, tokens: int, itemsize: int) -> Held:
    return Held(name, numbers, tokens, numbers * tokens * itemsize, here=False)


def _described(attention: Any, context: int) -> Description | None:
    """What the module says of itself, if it does."""
    if not hasattr(attention, "describe"):
        return None
    found: Description = attention.describe(context)
    return found
