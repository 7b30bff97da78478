"""A loaded decoder under each context extension: its networks, the spectra of their rotations, and what each reads.

A method says how fast each pair of dims turns; no weight changes. All are made for one target length, s = target / trained,
and read at every length, so that what they lose within the trained length shows as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.compare.experiment import Numbers, Tell, silent
from regard.compare.reach import losses, needles, perplexity
from regard.errors import ArgumentError
from regard.models.convert.checkpoint import Checkpoint
from regard.models.convert.context import Extension, to_context
from regard.models.decoder import Decoder
from regard.models.model import Model
from regard.positions import Rotary, critical_dimension, rope_frequencies

UNSCALED = "unscaled"
METHODS = (UNSCALED, *get_args(Extension))
"""As it is, and the ways of `regard convert --context`."""


@dataclass(frozen=True)
class Reading:
    """How an extended model is asked.

    Attributes:
        lengths: tokens that it reads.
        counted, windows: as `regard.compare.reach.losses`.
        depths, trials, key, mark: as `regard.compare.reach.needles`.
        seed: of the needles.

    >>> Reading((128, 256)).depths
    (0.0, 0.25, 0.5, 0.75, 1.0)
    """

    lengths: tuple[int, ...]
    counted: int = 64
    windows: int = 8
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 6
    key: int = 8
    mark: int = 12
    seed: int = 0


def rotary_of(network: nn.Module) -> Rotary:
    """The first rotary of a network.

    Raises:
        ArgumentError: it has none.

    >>> import regard
    >>> rotary_of(regard.load("tiny").decoder).dim
    32
    """
    for module in network.modules():
        if isinstance(module, Rotary):
            return module
    raise ArgumentError("the model has no rotary positions; a context extension has nothing to scale")  # fmt: skip


def extended(model: Model, method: str, target: int) -> Decoder:
    """The decoder of a model under a method; it shares the weights.

    Args:
        model: with rotary positions, not scaled yet.
        method: of `METHODS`.
        target: tokens to reach, more than the trained length.

    Raises:
        ArgumentError: the method is unknown, or as `regard.models.convert.context.to_context`.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> rotary_of(extended(tiny, "linear", 1024)).scaling
    Linear(factor=4.0)
    """
    if method not in METHODS:
        raise ArgumentError(f"the method is {method!r}; it is one of {', '.join(METHODS)}")
    if method == UNSCALED:
        return model.decoder
    found, _ = to_context(Checkpoint(model.decoder, model.config), target, method)  # type: ignore[arg-type]
    return found.network


def spectrum(network: nn.Module, length: int) -> Numbers:
    """How fast each pair turns in a sequence of a length, and how much of a match is left at a distance.

    theta_i in radians per position; decay(m) = f^2 (2 / d) sum_i cos(m theta_i) with the rotary factor f

    Args:
        network: with a rotary.
        length: of the sequence, for the methods that follow it; distances go up to it.

    >>> import regard
    >>> found = spectrum(regard.load("tiny").decoder, 256)
    >>> found["theta"][0], found["decay"][0]
    (1.0, [0, 1.0])
    """
    rotary = rotary_of(network)
    theta, factor, _ = rope_frequencies(
        rotary.dim, rotary.base, scaling=rotary.scaling, rotary_dim=rotary.rotary_dim,
        proportional=rotary.proportional, length=length,
    )  # fmt: skip
    distances = range(0, length + 1, max(1, length // 128))
    m = torch.tensor(distances, dtype=torch.float64)
    decay = factor**2 * (m[:, None] * theta).cos().mean(-1)
    return {
        "theta": theta.tolist(), "rotary_factor": factor,
        "decay": [[d, b] for d, b in zip(distances, decay.tolist(), strict=True)],
    }  # fmt: skip


def read(network: nn.Module, ids: Int[Tensor, " N"], how: Reading, tell: Tell = silent) -> Numbers:
    """Loss and perplexity at every length, and the needle at every length and depth.

    Args:
        network: ids [B,T] -> logits [B,T,V].
        ids: a text.
        how: what is asked.
        tell: told of each length.

    >>> flat = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> found = read(flat, torch.arange(200) % 4, Reading((96,), trials=1))
    >>> round(found["by_length"][0]["perplexity"], 4), len(found["by_length"][0]["needle"])
    (4.0, 5)
    """
    rows = []
    for length in how.lengths:
        tell(f"{length} tokens")
        nats = float(losses(network, ids, [length], counted=how.counted, windows=how.windows)[0])
        found = needles(network, ids, length, how.depths, trials=how.trials, key=how.key, mark=how.mark, seed=how.seed)  # fmt: skip
        rows.append({"length": length, "nats": nats, "perplexity": min(perplexity(nats), 1e9), "needle": [one._asdict() for one in found]})  # fmt: skip
    return {"by_length": rows}


def about(model: Model) -> dict[str, Any]:
    """What an extension starts from: the trained length, the head, the base, and how many dims have turned fully.

    >>> import regard
    >>> about(regard.load("tiny"))["critical_dimension"]
    14
    """
    rotary, trained = rotary_of(model.decoder), int(model.config.max_position_embeddings)
    turning = 2 * len(rotary.inv_freq)
    return {
        "trained": trained, "rotary_dim": turning, "base": rotary.base,
        "critical_dimension": critical_dimension(turning, rotary.base, trained),
    }  # fmt: skip


def lengths_for(trained: int, target: int) -> tuple[int, ...]:
    """Half the trained length, itself, and its doubles up to the target, which is the last.

    >>> lengths_for(256, 1024), lengths_for(256, 600)
    ((128, 256, 512, 1024), (128, 256, 512, 600))
    """
    found: Sequence[int] = [trained // 2, trained]
    while found[-1] * 2 < target:
        found = [*found, found[-1] * 2]
    return (*found, target)
