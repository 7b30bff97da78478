"""All claims by id, and running them as experiments whose numbers are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from regard import __version__
from regard.claims import (
    complexity,
    cross_attention,
    decode_mask,
    dropout,
    embeddings,
    extrapolation,
    grouped_query,
    heads,
    infini_attention,
    latent_attention,
    mha_gpt_mla,
    minus_infinity,
    parallelism,
    positions,
    score_scale,
)
from regard.claims.claim import Claim, Outcome
from regard.compare.experiment import Experiment, Numbers, Session
from regard.errors import ArgumentError
from regard.process import seeded
from regard.suggest import suggest

CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        *score_scale.CLAIMS,
        *minus_infinity.CLAIMS,
        *dropout.CLAIMS,
        *cross_attention.CLAIMS,
        *parallelism.CLAIMS,
        *heads.CLAIMS,
        *mha_gpt_mla.CLAIMS,
        *latent_attention.CLAIMS,
        *grouped_query.CLAIMS,
        *complexity.CLAIMS,
        *positions.CLAIMS,
        *extrapolation.CLAIMS,
        *decode_mask.CLAIMS,
        *infini_attention.CLAIMS,
        *embeddings.CLAIMS,
    )
}
"""Id -> claim, in the order in which they are listed."""


def find_claim(name: str) -> Claim:
    """The claim of an id.

    Raises:
        ArgumentError: there is none; names the near ones.

    >>> str(find_claim("scale").sources[1])
    'AttnJourney, section 3.1'
    """
    if name not in CLAIMS:
        hint = suggest(name, CLAIMS, most=2, otherwise=";")
        raise ArgumentError(f"there is no claim {name!r}{hint} --list tells them all")
    return CLAIMS[name]


def experiments(claims: Sequence[Claim], budget: float = 1.0, seed: int = 0) -> list[Experiment]:
    """The experiments of claims, each under the name claim/<id>; claims that share one have it
    once.

    Args:
        claims: which.
        budget: 1 is at most about two minutes for each on two cores; 2 is twice the steps and
            rounds.
        seed: of weights, data and order.

    Raises:
        ArgumentError: the budget is not above 0 and finite.

    >>> from regard.claims import find_claim
    >>> [one.name for one in experiments([find_claim("scale")], budget=0.01)]
    ['claim/scale']
    """
    if not (budget > 0 and math.isfinite(budget)):
        raise ArgumentError(f"budget is {budget}; it must be above 0, and 1 is the default")
    made = [_experiment(claim, budget, seed) for claim in claims]
    return list({one.name: one for one in made}.values())


def run_claims(
    session: Session, claims: Sequence[Claim], budget: float = 1.0, seed: int = 0
) -> list[Outcome]:
    """Run claims, or find what an earlier run of the same budget and seed has kept.

    Args:
        session: with its store.
        claims, budget, seed: as `experiments`.

    Raises:
        ArgumentError: as `experiments`.

    >>> from regard.compare import Session, Store
    >>> from regard.claims import find_claim
    >>> [one.verdict for one in run_claims(Session(Store(None)), [find_claim("minus-infinity")])]
    ['holds with limits']
    """
    found = []
    for claim in claims:
        (one,) = experiments([claim], budget, seed)
        numbers = session.run([one])[one.name]
        found.append(Outcome(claim, numbers, budget, seed, reused=one.name in session.kept))
    return found


def _experiment(claim: Claim, budget: float, seed: int) -> Experiment:
    def measure() -> Numbers:
        with seeded(seed):
            return claim.measure(budget, seed)

    settings = {"budget": budget, "seed": seed, "torch": torch.__version__, "regard": __version__}
    return Experiment(f"claim/{claim.measured_with or claim.id}", settings, measure)
