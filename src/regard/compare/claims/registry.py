"""The claims by id."""

from __future__ import annotations

from regard.compare.claims import (
    decode_mask,
    dropout,
    features,
    forgetting,
    fused,
    groups,
    growth,
    heads,
    image_text,
    infini,
    kv_cache,
    latent,
    longer,
    loops,
    minus_infinity,
    order,
    order_information,
    positions,
    scale,
    values,
)
from regard.compare.claims.base import Claim
from regard.errors import ArgumentError
from regard.suggest import suggest

CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        scale.CLAIM,
        scale.VANISH,
        scale.EXPLODE,
        scale.TRAINING,
        minus_infinity.CLAIM,
        minus_infinity.HIDES,
        minus_infinity.LARGE,
        dropout.CLAIM,
        dropout.SUMS,
        dropout.HALF,
        forgetting.CLAIM,
        forgetting.BEGINNING,
        forgetting.BACK,
        order.STEPS,
        order.TIME,
        order.GENERATION,
        loops.CLAIM,
        heads.CLAIM,
        heads.TEXT,
        heads.WIDE,
        heads.MORE,
        fused.CLAIM,
        fused.MLA_TIME,
        fused.WORK,
        fused.MASK,
        latent.CACHE,
        latent.WORK,
        latent.ABSORBED,
        latent.STEP,
        kv_cache.CLAIM,
        groups.CACHE,
        groups.LINEAR,
        groups.QUALITY,
        growth.FULL,
        growth.SPARSE,
        growth.LINEAR,
        growth.SPARSE_TIME,
        order_information.CLAIM,
        positions.CLAIM,
        positions.DISTANCE,
        *longer.CLAIMS,
        values.CLAIM,
        values.INVERSE,
        decode_mask.CLAIM,
        decode_mask.ALWAYS,
        decode_mask.TRAINING,
        infini.CLAIM,
        infini.FREE,
        features.CLAIM,
        image_text.CLAIM,
    )
}
"""Id -> claim, in the order in which they are listed."""


def find_claim(name: str) -> Claim:
    """The claim of an id.

    Raises:
        ArgumentError: there is none; names the near ones.

    >>> find_claim("scale").seeds
    ('S1.10', 'S2.3', 'S3.18')
    """
    if name not in CLAIMS:
        hint = suggest(name, CLAIMS, most=2, otherwise=";")
        raise ArgumentError(f"there is no claim {name!r}{hint} --list tells them all")
    return CLAIMS[name]
