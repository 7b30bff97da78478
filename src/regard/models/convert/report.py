"""What a conversion did, as figures."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from regard.models.convert.checkpoint import Step
from regard.models.convert.measure import Measured


@dataclass(frozen=True)
class Healing:
    """A few training steps after a conversion.

    Attributes:
        steps, lr, batch, length, seed: how: the peak learning rate, rows of so many tokens, and their order.
        tokens: of the text that was trained on.
        loss_before, loss_after: mean nats per token of that text.
        held_tokens: of its last part, which was not trained on; 0 where the text is too short for one.
        held_before, held_after: mean nats per token of that part, NaN where there is none.
    """

    steps: int
    lr: float
    batch: int
    length: int
    seed: int
    tokens: int
    loss_before: float
    loss_after: float
    held_tokens: int
    held_before: float
    held_after: float


@dataclass(frozen=True)
class Sizes:
    """A model's family, dtype, parameters, and the numbers that one token takes in its caches, over all layers."""

    model_type: str
    dtype: str
    parameters: int
    kept: int


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
        source, out: the folders.
        steps: the conversions, in their order.
        before, after: the two models.
        measured: both on a text; the second as it was loaded from the folder that was written.
        healing: None where nothing was trained.
        ignored: what the source's folder holds and was passed over; the result is without it.
    """

    source: str
    out: str
    steps: tuple[Step, ...]
    before: Sizes
    after: Sizes
    measured: Measured
    healing: Healing | None
    ignored: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        """Plain values for JSON; null where there is no number."""
        steps = [
            {
                "what": step.what,
                "weight_error": [error._asdict() for error in step.layers],
                "error_by_rank": {str(rank): error for rank, error in step.curve.items()},
                "notes": list(step.notes),
            }
            for step in self.steps
        ]
        measured = asdict(self.measured) | {
            "perplexity_before": self.measured.perplexity_before,
            "perplexity_after": self.measured.perplexity_after,
        }
        found = {
            "source": self.source, "out": self.out, "steps": steps, "before": asdict(self.before),
            "after": asdict(self.after), "measured": measured,
            "healing": None if self.healing is None else asdict(self.healing),
            "ignored": list(self.ignored),
        }  # fmt: skip
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
