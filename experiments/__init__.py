"""Statements about attention, each tested by an experiment that anyone can run.

A `Claim` is one sentence from public notes, with a measurement and bounds that would confirm it.
The verdict is one of: holds, holds with limits, undecided, does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments import (
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
from experiments.claim import VERDICTS, Claim, Criterion, Outcome
from regard import __version__
from regard.compare.experiment import Experiment, Numbers, Session
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.language import add_texts
from regard.process_state import seeded

__all__ = [
    "CLAIMS",
    "VERDICTS",
    "Claim",
    "Criterion",
    "Outcome",
    "experiments",
    "find_claim",
    "run_claims",
]

add_texts(Path(__file__).with_name("strings"))

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
"""The claims by id, in the order in which they are listed."""


def find_claim(name: str) -> Claim:
    """Return the claim of an id, which is a key of `CLAIMS`."""
    if name not in CLAIMS:
        hint = suggest(name, CLAIMS, most=2, otherwise=";")
        raise ArgumentError(
            f"there is no claim {name!r}{hint} --list shows all claims",
            argument="claim",
            value=name,
        )
    return CLAIMS[name]


def experiments(claims: Sequence[Claim], budget: float = 1.0, seed: int = 0) -> list[Experiment]:
    """Return the experiments that measure claims, shared where claims share one, as claim/<id>.

    Args:
        budget: 1 takes at most about two minutes per experiment on two cores; 2 doubles steps and
            rounds.
        seed: the random seed for weights, data and order.
    """
    if not (budget > 0 and math.isfinite(budget)):
        raise ArgumentError(
            f"budget is {budget}; it must be above 0, and 1 is the default", argument="budget"
        )
    all_experiments = [_experiment(claim, budget, seed) for claim in claims]
    return list({experiment.name: experiment for experiment in all_experiments}.values())


def run_claims(
    session: Session, claims: Sequence[Claim], budget: float = 1.0, seed: int = 0
) -> list[Outcome]:
    """Measure claims, or take the numbers of an earlier run of this budget and seed."""
    outcomes = []
    for claim in claims:
        (experiment,) = experiments([claim], budget, seed)
        numbers = session.run([experiment])[experiment.name]
        outcomes.append(
            Outcome(claim, numbers, budget, seed, reused=experiment.name in session.reused_names)
        )
    return outcomes


def _experiment(claim: Claim, budget: float, seed: int) -> Experiment:
    """Return the experiment that measures a claim."""

    def measure() -> Numbers:
        with seeded(seed):
            return claim.measure(budget, seed)

    settings = {"budget": budget, "seed": seed, "torch": torch.__version__, "regard": __version__}
    return Experiment(f"claim/{claim.measured_with or claim.id}", settings, measure)
