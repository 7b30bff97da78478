"""Time and memory of mechanisms in turns, and whether a real model's sizes fit this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard import units
from regard.caches import Cache
from regard.compare.experiment import Experiment, Numbers
from regard.compare.mechanisms import Shape, build_decoder, count_parameters
from regard.configs.published import model_of
from regard.cost.latent import LatentSpec
from regard.cost.model import DenseSpec
from regard.cost.softmax import SoftmaxSpec
from regard.errors import ArgumentError, RegardError
from regard.models.compiled_step import PreparedDecoder
from regard.models.decoder import Decoder
from regard.models.families.regard import Config
from regard.models.generation.cache_config import CacheConfig
from regard.nn.weights import device_of
from regard.timing import (
    call_in_subprocess,
    free_memory,
    interleaved,
    median,
    median_ratio,
    peak_bytes_on,
    quartiles,
    wait_for,
)
from regard.tracing import Trace
from regard.train.losses import next_token_loss
from regard.train.settings import Settings, make_optimizer

Step = Callable[[], object]
LEARNING_RATE = 1e-4
"""Learning rate of timed training steps, at which weights change a little."""

BYTES_PER_VALUE = 4
"""Bytes of a value; everything is measured in fp32."""


class KernelRecorder(Trace):
    """A trace that records the names of the kernels that compute softmax attention.

    >>> from regard import attend
    >>> with KernelRecorder() as recorder:
    ...     _ = attend(*torch.zeros(3, 1, 1, 2, 4), backend="reference")
    >>> recorder.names
    ['reference']
    """

    observes_calls: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def on_attention_call(self, call: object, result: object, kernel: str) -> None:
        """Record the kernel of one call."""
        name = kernel.partition(",")[0]
        if name not in self.names:
            self.names.append(name)


def random_ids(config: Config, batch: int, length: int) -> Int[Tensor, "batch length"]:
    """Return random token ids [B,T]; the seed is the length, so equal sizes give equal ids."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def _ids_on(model: nn.Module, ids: Tensor) -> Tensor:
    """Return ids on the device of a model."""
    return ids.to(device_of(model))


def prefill_caches(
    model: Decoder, prompt: Int[Tensor, "B T"], capacity: int | None = None
) -> list[Cache]:
    """Return caches that contain a prompt [B,T].

    Caches that keep all tokens are allocated once, for `capacity` tokens (default: those of
    the prompt).

    >>> from regard.compare.mechanisms import Candidate, Shape, build_decoder
    >>> config = Candidate("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> caches = prefill_caches(build_decoder(config), random_ids(config, 1, 3), 4)
    >>> [type(cache).__name__ for cache in caches]
    ['Fixed']
    """
    rows, length = prompt.shape
    caches = CacheConfig("fixed", capacity or length).new_caches(model, rows)
    with torch.inference_mode():
        model(prompt, None, caches, last=1)
    return caches


def prefill_step(model: Decoder, config: Config, context: int, batch: int = 1) -> Step:
    """Return a function that reads a prompt into new caches and computes the last logits."""
    prompt = _ids_on(model, random_ids(config, batch, context))
    return lambda: prefill_caches(model, prompt)


def decode_step(model: Decoder, config: Config, context: int, batch: int = 1) -> Step:
    """Return a function that decodes the token at context - 1 and restores the caches."""
    prompt = _ids_on(model, random_ids(config, batch, context))
    caches = (
        prefill_caches(model, prompt[:, : context - 1], context)
        if context > 1
        else model.new_caches()
    )
    last, prepared = prompt[:, context - 1 :], PreparedDecoder(model)

    def step() -> Tensor:
        marks = [cache.mark() for cache in caches]
        with torch.inference_mode():
            logits = prepared(last, None, caches)
            for cache, mark in zip(caches, marks, strict=True):
                cache.restore(mark)
        return logits

    return step


def training_step(model: Decoder, config: Config, length: int, batch: int) -> Step:
    """Return a function that makes one AdamW step on rows of `length` predicted tokens."""
    rows = _ids_on(model, random_ids(config, batch, length + 1))
    update = make_optimizer(model, Settings(steps=1, lr=LEARNING_RATE))

    def step() -> float:
        update.zero_grad(set_to_none=True)
        loss = next_token_loss(model, rows)
        torch.autograd.backward(loss)
        update.step()
        return loss.item()

    return step


def kernels_used(step: Step) -> list[str]:
    """Return the kernels of softmax attention that a step runs, if any."""
    with KernelRecorder() as recorder:
        step()
    return recorder.names


def cache_bytes(model: Decoder, config: Config, context: int, batch: int = 1) -> int:
    """Return the bytes that default caches of all layers take after `context` tokens."""
    caches = model.new_caches()
    with torch.inference_mode():
        model(_ids_on(model, random_ids(config, batch, context)), None, caches, last=1)
    return sum(cache.bytes for cache in caches)


def cache_bytes_by_formula(model: Decoder, context: int, batch: int = 1) -> int:
    """Return the bytes that caches take in fp32 by the formulas of `regard describe`.

    >>> from regard.compare.mechanisms import Candidate, Shape, build_decoder
    >>> config = Candidate("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> cache_bytes_by_formula(build_decoder(config), 10)
    640
    """
    layers = [layer.get_submodule("attention") for layer in model.layers]
    return batch * sum(BYTES_PER_VALUE * layer.describe(context).cached_values for layer in layers)  # type: ignore[operator]


KINDS = ("prefill", "decode", "training")
"""The kinds of work that are timed."""

MACHINE_KEYS = ("processor", "cores", "threads", "capability", "torch", "regard")
"""The facts of a machine that times depend on; a saved time is used only if they are equal."""


@dataclass(frozen=True)
class Timing:
    """How long and at which sizes times are measured."""

    contexts: tuple[int, ...] = (512, 2048, 8192)
    length: int = 256
    batch: int = 8
    rounds: int = 7
    seconds: float = 20.0
    sample: float = 0.02
    training: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.contexts:
            raise ArgumentError("contexts is empty; give at least one context", argument="contexts")
        for name in ("length", "batch", "rounds"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if min(self.contexts) < 1:
            raise ArgumentError(
                f"contexts are {self.contexts}; each must be 1 or more", argument="contexts"
            )


def timing_experiments(
    configs: Mapping[str, Config], timing: Timing, machine: Mapping[str, object]
) -> list[Experiment]:
    """Return the experiments of prompts, of decoding, and of training steps.

    All mechanisms are timed in turns, so that one more means that all are measured again.
    """
    models = {name: asdict(config) for name, config in configs.items()}
    shared = {"models": models, "machine": _machine_facts(machine)}
    jobs = [(kind, context) for context in timing.contexts for kind in KINDS[:2]]
    if timing.training:
        jobs.append(("training", timing.length))
    limits = {"rounds": timing.rounds, "seconds": timing.seconds, "sample": timing.sample}
    experiments = []
    for kind, length in jobs:
        batch = timing.batch if kind == "training" else 1
        sizes = {"kind": kind, "length": length, "batch": batch}
        experiments.append(
            Experiment(
                f"{kind}/{length}",
                {**shared, **sizes, **limits},
                lambda kind=kind, length=length: time_in_turns(configs, kind, length, timing),  # type: ignore[misc]
                timing.seconds,
            )
        )
    return experiments


def _machine_facts(machine: Mapping[str, object]) -> dict[str, object]:
    """Return the facts that measurements depend on; the device unless it is the CPU."""
    facts = {name: machine.get(name) for name in MACHINE_KEYS}
    if machine.get("device", "cpu") != "cpu":
        facts |= {name: machine.get(name) for name in ("device", "gpu")}
    return facts


def time_in_turns(configs: Mapping[str, Config], kind: str, length: int, timing: Timing) -> Numbers:
    """Time one kind of work of all mechanisms in turns."""
    if kind not in KINDS:
        raise ArgumentError(
            f"kind is {kind!r}; it must be one of {', '.join(KINDS)}", argument="kind"
        )
    rows: dict[str, Numbers] = {}
    steps: dict[str, Step] = {}
    for name, config in configs.items():
        try:
            rows[name], steps[name] = _prepare(config, kind, length, timing)
        except RegardError as error:
            rows[name] = {"why": str(error)}
    times = interleaved(
        steps,
        rounds=timing.rounds,
        sample=timing.sample,
        limit=timing.seconds,
        synchronize=partial(wait_for, torch.device(timing.device)),
    )
    first = next(iter(times), "")
    for name, seconds in times.items():
        rows[name] |= {
            "seconds": median(seconds),
            "quartiles": list(quartiles(seconds)),
            "ratio": median_ratio(times, name, first),
            "rounds": len(seconds),
        }
    return {"rows": rows}


def _prepare(config: Config, kind: str, length: int, timing: Timing) -> tuple[Numbers, Step]:
    """Build a model, and return what is known before timing, and the function to time."""
    device = torch.device(timing.device)
    model = build_decoder(config).to(device)
    row: Numbers = {}
    if kind == "training":
        step = training_step(model, config, length, timing.batch)
    else:
        model.eval().requires_grad_(False)
        _check_memory(cache_bytes_by_formula(model, length), length, device)
        make: Callable[..., Step] = prefill_step if kind == "prefill" else decode_step
        step = make(model, config, length)
        if kind == "decode":
            row["kv_bytes"] = cache_bytes(model, config, length)
            row["kv_bytes_formula"] = cache_bytes_by_formula(model, length)
    return {**row, "kernels": kernels_used(step)}, step


def _check_memory(needed: int, length: int, device: torch.device) -> None:
    """Require free memory for twice the caches: they are copied while they grow."""
    free_bytes = free_memory(device)
    if free_bytes and 2 * needed > free_bytes:
        raise ArgumentError(
            f"the caches of {units.plural(length, 'token')} need {units.size(needed)} at "
            f"{BYTES_PER_VALUE} bytes per value, and twice that while they grow, but only "
            f"{units.size(free_bytes)} of memory is free; choose shorter contexts"
        )


MEMORY_METHOD = (
    "the peak resident memory (VmHWM) of a separate process during the work, minus its resident "
    "memory before the work, so that weights are not counted; the work runs once before it is "
    "measured, so that kernels are already compiled; on a GPU, the peak bytes that torch allocated"
)
"""How peak memory is measured, as reports print it."""


def memory_experiments(
    configs: Mapping[str, Config], timing: Timing, machine: Mapping[str, object]
) -> list[Experiment]:
    """Return an experiment per mechanism: the peak memory of a prompt and a training step."""
    shared: Numbers = {"machine": _machine_facts(machine), "context": max(timing.contexts)}
    shared |= {"length": timing.length, "batch": timing.batch, "threads": torch.get_num_threads()}
    if not timing.training:
        shared["training"] = False
    if timing.device != "cpu":
        shared["device"] = timing.device
    experiments = []
    for name, config in configs.items():
        settings = {"model": asdict(config), **shared}
        measure = partial(measure_peaks, settings)
        experiments.append(Experiment(f"memory/{name}", settings, measure, 10.0))
    return experiments


def measure_peaks(settings: Mapping[str, object], command: Sequence[str] | None = None) -> Numbers:
    """Return the peak memory of a prompt and of a training step, measured in a new process."""
    numbers: Numbers = call_in_subprocess(
        "regard.compare.speed_and_memory:peaks",
        settings,
        advice="--no-memory skips this measurement",
        command=command,
    )
    return numbers


def peaks(settings: Numbers) -> Numbers:
    """Return the peak bytes of a prompt and of a training step, each after one run."""
    torch.set_num_threads(settings["threads"])
    config = Config(**settings["model"])
    device = torch.device(settings.get("device", "cpu"))
    model = build_decoder(config).to(device)
    peak_of = partial(peak_bytes_on, device)

    def step() -> None:
        training_step(model, config, settings["length"], settings["batch"])()

    step_peak = None
    if settings.get("training", True):
        step()
        model.zero_grad(set_to_none=True)
        step_peak = peak_of(step)
        model.zero_grad(set_to_none=True)
    model.eval().requires_grad_(False)
    prompt = prefill_step(model, config, settings["context"])
    prompt()
    return {"prefill": peak_of(prompt), "training": step_peak}


BYTES_TO_RUN = 4
"""Bytes of a parameter in float32."""
BYTES_TO_TRAIN = 16
"""Bytes of a parameter with its gradient and the two moments of AdamW, all in float32."""
LOGITS_IN_TRAINING = 3
"""How many tensors as large as the logits a training step holds: logits, probabilities and their
gradient.
"""


def shape_like(name: str, window: int | None = None) -> Shape:
    """Return the sizes of a published model, or of a config.json, for a comparison."""
    model = model_of(name)
    feeds = {layer.feed_forward for layer in model.layers}
    (feed,) = feeds if len(feeds) == 1 else (None,)
    if not isinstance(feed, DenseSpec):
        raise ArgumentError(
            f"{model.name} does not have one dense feed-forward layer for all layers, as the "
            "decoders of regard compare have; give the sizes as --dim --layers --heads --hidden"
        )
    mixers = list(model.mixers)
    heads = {_heads(mixer) for mixer in mixers}
    (sizes,) = heads if len(heads) == 1 else (None,)
    if sizes is None:
        raise ArgumentError(
            f"the layers of {model.name} are {', '.join(model.attention_kinds)}, and regard "
            "compare replaces attention by one mechanism with the same heads in every layer; give "
            "the sizes as --dim --layers --heads --hidden"
        )
    H, G, D = sizes
    if model.dim != D * H:
        raise ArgumentError(
            f"{model.name} has heads of {D}, but the decoders of regard compare have heads of dim "
            f"/ heads = {model.dim} / {H}; give another model, or the sizes as --dim --layers "
            "--heads --hidden"
        )
    windows = [m.window for m in mixers if isinstance(m, SoftmaxSpec) and m.window is not None]
    own = windows[0] if windows else None
    return Shape(
        model.dim,
        len(model.layers),
        H,
        feed.hidden,
        vocabulary=model.vocab,
        window=own if window is None else window,
        groups=G,
        tied=model.tied,
        like=model.name,
    )


def _heads(mixer: object) -> tuple[int, int, int] | None:
    """Return H, G and the width of a head; None for a mechanism without such heads."""
    if isinstance(mixer, SoftmaxSpec):
        return mixer.shape.heads, mixer.shape.groups, mixer.shape.head_dim
    if isinstance(mixer, LatentSpec):
        return mixer.heads, mixer.heads, mixer.value_dim
    return None


def needed_memory(configs: Mapping[str, Config], timing: Timing) -> int:
    """Return an estimate of the bytes that a comparison of models in memory needs.

    That is 4 bytes a parameter, or 16 in a training step, with one model's logits; not caches.
    """
    parameters = sum(map(count_parameters, configs.values()))
    if not timing.training:
        return BYTES_TO_RUN * parameters
    vocabulary = max(config.vocab_size for config in configs.values())
    logits = BYTES_TO_RUN * LOGITS_IN_TRAINING * timing.batch * timing.length * vocabulary
    return BYTES_TO_TRAIN * parameters + logits


def check_fits(
    configs: Mapping[str, Config], timing: Timing, name: str, free: int | None = None
) -> None:
    """Check that the machine has the memory for a comparison at the sizes of a model."""
    free = free_memory(torch.device(timing.device)) if free is None else free
    needed = needed_memory(configs, timing)
    if free and needed > free:
        rest = needed_memory(configs, Timing(training=False))
        less = f"without training steps (--no-training) {units.size(rest)}, and "
        raise ArgumentError(
            f"{units.plural(len(configs), 'model')} like {name} need {units.size(needed)} of "
            f"memory at once, and {units.size(free)} is free; {less if timing.training else ''}"
            "fewer mechanisms at a time need less"
        )
