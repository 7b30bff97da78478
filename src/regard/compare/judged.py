"""What came of training: the best learning rate of each mechanism, and how good it is there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from regard.compare.experiment import Numbers
from regard.compare.lessons import Lesson
from regard.compare.quality import Pupil, job_name


def judged(
    lesson: Lesson, name: str, pupil: Pupil, seeds: Sequence[int], done: Mapping[str, Numbers]
) -> Numbers | None:
    """What came of a mechanism in a lesson: its best rate by the mean validation loss, and there the measure over seeds.

    Returns:
        `rate`, `validation` (rate -> mean loss; None where a seed diverged), `mean`, `low`, `high`, `seeds`, `steps`,
        `tokens`; None while a run is missing; `diverged` where no rate was survived.
    """
    runs = {
        rate: [done.get(job_name(lesson.name, name, rate, seed)) for seed in seeds]
        for rate in pupil.rates
    }
    if any(one is None for found in runs.values() for one in found):
        return None
    whole = {rate: [one for one in found if one is not None] for rate, found in runs.items()}
    losses = {
        rate: None if any("diverged" in one for one in found)
        else statistics.fmean(one["validation"] for one in found)
        for rate, found in whole.items()
    }  # fmt: skip
    told = {
        "validation": {f"{rate:g}": loss for rate, loss in losses.items()},
        "seeds": list(seeds),
    }
    alive = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not alive:
        return {**told, "diverged": True}
    best = min(alive, key=lambda rate: alive[rate])
    values = [one[lesson.measure] for one in whole[best]]
    return {
        **told, "rate": best, "mean": statistics.fmean(values), "low": min(values), "high": max(values),
        "steps": whole[best][0]["steps"], "tokens": whole[best][0]["tokens"],
    }  # fmt: skip
