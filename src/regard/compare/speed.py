"""The speed of each mechanism: prompts, decoding steps and training steps, timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from regard import units
from regard.bench.machine import free_memory
from regard.bench.timing import interleaved, median, median_ratio, quartiles
from regard.caches import Cache
from regard.compare.experiment import Experiment, Numbers
from regard.compare.mechanisms import decoder
from regard.errors import ArgumentError, RegardError
from regard.models.decoder import Decoder
from regard.models.families.regard import Config
from regard.models.generation.room import Room
from regard.tap import Trace
from regard.train.losses import next_token_loss
from regard.train.settings import Settings, make_optimizer

Step = Callable[[], object]
RATE = 1e-4
"""Learning rate of timed steps: weights must move, not far."""

ITEM = 4
"""Bytes of a number: all is measured in fp32."""


class Kernels(Trace):
    """Notes which kernel computes each call of softmax attention.

    >>> from regard import attend
    >>> with Kernels() as seen:
    ...     _ = attend(*torch.zeros(3, 1, 1, 2, 4), backend="reference")
    >>> seen.names
    ['reference']
    """

    watches: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def saw(self, call: Any, result: Any, kernel: str) -> None:
        """One call more."""
        name = kernel.partition(",")[0]
        if name not in self.names:
            self.names.append(name)


def ids(config: Config, batch: int, length: int) -> Int[Tensor, "batch length"]:
    """Random tokens [B,T], the same for a length each time.

    >>> from regard.compare.mechanisms import Contestant, Shape
    >>> ids(Contestant("mqa", "mqa").config(Shape(dim=32)), 2, 3).shape
    torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(length)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def read(model: Decoder, prompt: Int[Tensor, "B T"], room: int | None = None) -> list[Cache]:
    """Caches that hold a prompt [B,T]; those that keep all are allocated once, for `room` tokens.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> [type(c).__name__ for c in read(decoder(config), ids(config, 1, 3), 4)]
    ['Fixed']
    """
    rows, length = prompt.shape
    caches = Room("fixed", room or length).caches(model, rows)
    with torch.inference_mode():
        model(prompt, None, caches, last=1)
    return caches


def prefill(model: Decoder, config: Config, context: int, batch: int = 1) -> Step:
    """Read a prompt of `context` tokens into new caches, and give the logits behind its last.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> len(prefill(decoder(config), config, 5)())
    1
    """
    prompt = ids(config, batch, context)
    return lambda: read(model, prompt)


def decode(model: Decoder, config: Config, context: int, batch: int = 1) -> Step:
    """Decode the token at position context - 1, behind caches that hold all before; then take it
    back.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> step = decode(decoder(config), config, 5)
    >>> bool((step() == step()).all())
    True
    """
    prompt = ids(config, batch, context)
    caches = read(model, prompt[:, : context - 1], context) if context > 1 else model.new_caches()
    last = prompt[:, context - 1 :]

    def step() -> Tensor:
        marks = [cache.mark() for cache in caches]
        with torch.inference_mode():
            logits: Tensor = model(last, None, caches)
            for cache, mark in zip(caches, marks, strict=True):
                cache.restore(mark)
        return logits

    return step


def training(model: Decoder, config: Config, length: int, batch: int) -> Step:
    """One optimiser step on rows of `length` predicted tokens: forward, backward, AdamW.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> step = training(decoder(config), config, 5, 2)
    >>> step() > step()
    True
    """
    rows = ids(config, batch, length + 1)
    update = make_optimizer(model, Settings(steps=1, lr=RATE))

    def step() -> float:
        update.zero_grad(set_to_none=True)
        loss = next_token_loss(model, rows)
        torch.autograd.backward(loss)
        update.step()
        return loss.item()

    return step


def kernels(step: Step) -> list[str]:
    """The kernels of softmax attention that a step runs; empty where it runs none, as a recurrence
    does.

    >>> kernels(lambda: None)
    []
    """
    with Kernels() as seen:
        step()
    return seen.names


def cache_bytes(model: Decoder, config: Config, context: int, batch: int = 1) -> int:
    """Bytes that the caches of all layers really hold behind so many tokens, each of the kind that
    suits its layer.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> cache_bytes(decoder(config), config, 10)  # one key and one value of 8 numbers, 4 bytes each
    640
    """
    caches = model.new_caches()
    with torch.inference_mode():
        model(ids(config, batch, context), None, caches, last=1)
    return sum(cache.bytes for cache in caches)


def described_bytes(model: Decoder, context: int, batch: int = 1) -> int:
    """Bytes that caches hold in fp32 by the formulas of `regard describe`.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> described_bytes(decoder(config), 10)
    640
    """
    layers = [layer.get_submodule("attention") for layer in model.layers]
    return batch * sum(ITEM * layer.describe(context).kept for layer in layers)  # type: ignore[operator]


KINDS = ("prefill", "decode", "training")
"""What is timed."""

MACHINE = ("processor", "cores", "threads", "capability", "torch", "regard")
"""What of a machine a time depends on: a kept one counts on the same only."""


@dataclass(frozen=True)
class Timing:
    """How long is measured, and on what.

    Attributes:
        contexts: tokens of prompts, and of texts in which a token is decoded, its own included.
        length, batch: tokens and rows of a training step.
        rounds: each times every mechanism once.
        seconds: of rounds per experiment; no new round begins behind them.
        sample: seconds of one timing: short calls are repeated.

    Raises:
        ArgumentError: there is no context, or a number is less than 1.

    >>> Timing(contexts=(512,)).rounds
    7
    """

    contexts: tuple[int, ...] = (512, 2048, 8192)
    length: int = 256
    batch: int = 8
    rounds: int = 7
    seconds: float = 20.0
    sample: float = 0.02

    def __post_init__(self) -> None:
        if not self.contexts:
            raise ArgumentError("contexts is empty; give at least one")
        for name in ("length", "batch", "rounds"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if min(self.contexts) < 1:
            raise ArgumentError(f"contexts are {self.contexts}; each must be 1 or more")


def experiments(
    configs: Mapping[str, Config], timing: Timing, machine: Mapping[str, Any]
) -> list[Experiment]:
    """Prompts and decoding at every context, and training steps: all mechanisms in turns within
    each, so that a drift of the machine hits all; so one more mechanism is a new measurement of
    all.

    Args:
        configs: name -> model.
        timing: how long, and at which sizes.
        machine: `regard.bench.machine.machine`.

    >>> from regard.compare.mechanisms import Contestant, Shape
    >>> made = {"mqa": Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))}
    >>> [one.name for one in experiments(made, Timing(contexts=(4, 8)), {})]
    ['prefill/4', 'decode/4', 'prefill/8', 'decode/8', 'training/256']
    """
    on = {name: machine.get(name) for name in MACHINE}
    shared = {"models": {name: asdict(config) for name, config in configs.items()}, "machine": on}
    jobs = [(kind, context) for context in timing.contexts for kind in KINDS[:2]]
    jobs.append(("training", timing.length))
    found = []
    for kind, length in jobs:
        own = {"kind": kind, "length": length, "batch": timing.batch if kind == "training" else 1}
        limits = {"rounds": timing.rounds, "seconds": timing.seconds, "sample": timing.sample}
        found.append(
            Experiment(
                f"{kind}/{length}",
                {**shared, **own, **limits},
                lambda kind=kind, length=length: measure(configs, kind, length, timing),  # type: ignore[misc]
                timing.seconds,
            )
        )
    return found


def measure(configs: Mapping[str, Config], kind: str, length: int, timing: Timing) -> Numbers:
    """Time one kind of work of all mechanisms in turns.

    Returns:
        {"rows": name -> row}; a row has `seconds` (median of a call), `quartiles`, `ratio` (the
        median over rounds of its time by the first mechanism's), `rounds`, `kernels`; of decoding,
        `kv_bytes` and `kv_bytes_formula` too; or, where it cannot be run, `why`.

    Raises:
        ArgumentError: the kind is not of `KINDS`; or caches need more memory than is free.

    >>> from regard.compare.mechanisms import Contestant, Shape
    >>> made = {"mqa": Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))}
    >>> measure(made, "decode", 10, Timing(rounds=2, sample=0.0))["rows"]["mqa"]["kv_bytes"]
    640
    """
    if kind not in KINDS:
        raise ArgumentError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    rows: dict[str, Numbers] = {}
    steps: dict[str, Step] = {}
    for name, config in configs.items():
        try:
            rows[name], steps[name] = _ready(config, kind, length, timing.batch)
        except RegardError as error:
            rows[name] = {"why": str(error)}
    times = interleaved(steps, rounds=timing.rounds, sample=timing.sample, limit=timing.seconds)
    first = next(iter(times), "")
    for name, found in times.items():
        rows[name] |= {
            "seconds": median(found),
            "quartiles": list(quartiles(found)),
            "ratio": median_ratio(times, name, first),
            "rounds": len(found),
        }
    return {"rows": rows}


def _ready(config: Config, kind: str, length: int, batch: int) -> tuple[Numbers, Step]:
    """What is known of the work before it is timed, and the work."""
    model = decoder(config)
    row: Numbers = {}
    if kind == "training":
        step = training(model, config, length, batch)
    else:
        model.eval().requires_grad_(False)
        _check_room(described_bytes(model, length), length)
        make: Callable[..., Step] = prefill if kind == "prefill" else decode
        step = make(model, config, length)
        if kind == "decode":
            row["kv_bytes"] = cache_bytes(model, config, length)
            row["kv_bytes_formula"] = described_bytes(model, length)
    return {**row, "kernels": kernels(step)}, step


def _check_room(needed: int, length: int) -> None:
    """See that the caches of one mechanism fit twice: held, and being made."""
    there = free_memory(torch.device("cpu"))
    if there and 2 * needed > there:
        raise ArgumentError(
            f"caches of {length:,} tokens need {units.size(needed)} ({ITEM} bytes a number), "
            f"{units.size(there)} are free: choose shorter contexts"
        )
