"""The claims by id."""

from __future__ import annotations

from difflib import get_close_matches

from regard.compare.claims import (
    decode_mask,
    dropout,
    features,
    forgetting,
    fused,
    groups,
    growth,
    heads,
    infini,
    kv_cache,
    latent,
    longer,
    minus_infinity,
    positions,
    scale,
    values,
)
from regard.compare.claims.base import Claim
from regard.errors import ArgumentError

CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        scale.CLAIM, minus_infinity.CLAIM, dropout.CLAIM, forgetting.CLAIM, growth.ORDER, heads.CLAIM, fused.CLAIM,
        latent.CLAIM, kv_cache.CLAIM, groups.CLAIM, growth.CLAIM, positions.CLAIM, longer.CLAIM, values.CLAIM,
        decode_mask.CLAIM, infini.CLAIM, features.CLAIM,
    )
}  # fmt: skip
"""Id -> claim, in the order in which they are listed."""


def find_claim(name: str) -> Claim:
    """The claim of an id.

    Raises:
        ArgumentError: there is none; names the near ones.

    >>> find_claim("scale").seeds
    ('S1.10', 'S2.3', 'S3.18', 'E2.1', 'X3')
    """
    if name not in CLAIMS:
        near = get_close_matches(name, CLAIMS, 2) or list(CLAIMS)
        raise ArgumentError(
            f"there is no claim {name!r}; did you mean {' or '.join(near)}? --list tells them all"
        )
    return CLAIMS[name]
