"""Compare the context extensions of one checkpoint: perplexity, retrieval, and caches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.compare.experiment import Numbers, ReportProgress, ignore_progress
from regard.errors import ArgumentError
from regard.models.convert.attention_maps import Checkpoint
from regard.models.convert.rotary_positions import Extension, extend_context
from regard.models.decoder import Decoder
from regard.models.model import Model
from regard.nn import Attention, PrefixRecomputer
from regard.nn.projections.dynamic_rotary import PreRopeQKV, RecomputedQKV, ReRotatedQKV
from regard.nn.projections.heads import SeparateQKV
from regard.positions import Rotary, critical_dimension, rope_frequencies
from regard.process_state import random_generator
from regard.timing import describe_machine
from regard.units import plural

UNSCALED = "unscaled"
"""The name of the model without a context extension."""
METHODS = (UNSCALED, *get_args(Extension))
"""The model without an extension, and the methods of `regard convert --scaling`."""


@dataclass(frozen=True)
class LengthTest:
    """The context lengths at which a model is tested, and the sizes of the tests.

    >>> LengthTest((128, 256)).depths
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
    """Return the first rotary embedding of a network."""
    for module in network.modules():
        if isinstance(module, Rotary):
            return module
    raise ArgumentError(
        "the model has no rotary positions, which a context extension scales; give another model"
    )


def extended_decoder(model: Model, method: str, target: int) -> Decoder:
    """Return a decoder with the weights of a model and a context that a method extends."""
    if method not in METHODS:
        raise ArgumentError(
            f"the method is {method!r}; it must be one of {', '.join(METHODS)}",
            argument="method",
            value=method,
        )
    if method == UNSCALED:
        return model.decoder
    converted, _ = extend_context(Checkpoint(model.decoder, model.config), target, method)  # type: ignore[arg-type]
    return converted.network


def rotary_spectrum(network: nn.Module, length: int) -> Numbers:
    """Return how fast rotary pairs turn, and how the similarity decays with distance.

    theta_i in radians per position; decay(m) = f^2 (2 / d) sum_i cos(m theta_i) with the rotary
    factor f
    """
    rotary = rotary_of(network)
    theta, factor, _ = rope_frequencies(
        rotary.dim, rotary.base, length=length, **_rotary_options(rotary)
    )
    distances = range(0, length + 1, max(1, length // 128))
    m = torch.tensor(distances, dtype=torch.float64)
    decay = factor**2 * (m[:, None] * theta).cos().mean(-1)
    return {
        "theta": theta.tolist(),
        "rotary_factor": factor,
        "decay": [[d, b] for d, b in zip(distances, decay.tolist(), strict=True)],
    }


def evaluate_lengths(
    network: nn.Module,
    ids: Int[Tensor, " N"],
    test: LengthTest,
    report: ReportProgress = ignore_progress,
) -> Numbers:
    """Return the loss and the perplexity at every length, and the passage retrieval at every length
    and depth.

    >>> flat = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> found = evaluate_lengths(flat, torch.arange(200) % 4, LengthTest((96,), trials=1))
    >>> round(found["by_length"][0]["perplexity"], 4), len(found["by_length"][0]["needle"])
    (4.0, 5)
    """
    result_rows = []
    for length in test.lengths:
        report(plural(length, "token"))
        (loss,) = losses_by_length(
            network, ids, [length], counted=test.counted, windows=test.windows
        )
        nats = float(loss)
        sizes = {"trials": test.trials, "key": test.key, "mark": test.mark}
        needles = needle_in_haystack(network, ids, length, test.depths, seed=test.seed, **sizes)
        result_rows.append(
            {
                "length": length,
                "nats": nats,
                "perplexity": min(perplexity(nats), 1e9),
                "needle": [one._asdict() for one in needles],
            }
        )
    return {"by_length": result_rows}


def rotary_metadata(model: Model) -> dict[str, Any]:
    """Return the trained length, the rotary width, the base, and how many dims turn once."""
    rotary, trained = rotary_of(model.decoder), int(model.config.max_position_embeddings)
    turning = 2 * len(rotary.inv_freq)
    return {
        "trained": trained,
        "rotary_dim": turning,
        "base": rotary.base,
        "critical_dimension": critical_dimension(turning, rotary.base, trained),
    }


def default_lengths(trained: int, target: int) -> tuple[int, ...]:
    """Return half the trained length, it, its doubles below the target, and the target."""
    lengths: Sequence[int] = [trained // 2, trained]
    while lengths[-1] * 2 < target:
        lengths = [*lengths, lengths[-1] * 2]
    return (*lengths, target)


CachePolicy: TypeAlias = Literal["stale", "pre_rope", "re_rotate", "frozen", "recompute"]
POLICIES: tuple[CachePolicy, ...] = ("stale", "pre_rope", "re_rotate", "frozen", "recompute")
"""What is done with cached keys that were rotated for a shorter length: they are used as they are
("stale"), or one of the policies of `regard.nn.projections.dynamic_rotary` applies.
"""


def with_cache_policy(network: Decoder, policy: CachePolicy, target: int) -> Decoder:
    """Return a decoder with a cache policy, which shares all weights but q's and k's."""
    decoder = copy.copy(network)
    decoder._modules = dict(network._modules)
    decoder.layers = copy.deepcopy(network.layers, {id(p): p for p in network.layers.parameters()})
    for layer in decoder.layers:
        attention = layer.attention
        project = attention.project if isinstance(attention, Attention) else None
        if not isinstance(attention, Attention) or not isinstance(project, RecomputedQKV):
            raise ArgumentError(
                "the frequencies of this model do not depend on the length, so that it needs no "
                "cache policy; policies are for the method dynamic"
            )
        attention.project = _projection_with_policy(project, policy, target)
    return decoder.eval()


def _projection_with_policy(
    project: RecomputedQKV, policy: CachePolicy, target: int
) -> SeparateQKV:
    if policy == "recompute":
        return project
    if policy in ("pre_rope", "re_rotate"):
        kind = PreRopeQKV if policy == "pre_rope" else ReRotatedQKV
        return kind(project.q, project.k, project.v, project.key_transform)
    for column_heads in (project.q, project.k):
        column_heads.steps.append(
            _rotary_of_length(project.key_transform.rotary, target if policy == "frozen" else None)
        )
    projection = SeparateQKV(project.q, project.k, project.v)
    projection.cache_unsafe_reason = None  # allow caches, so that their error can be measured
    return projection


def _rotary_of_length(old: Rotary, length: int | None) -> Rotary:
    """Return the same rotary embedding, with frequencies of a fixed or each call's length."""
    options: dict[str, Any] = {"length": "current" if length is None else length}
    return Rotary(old.dim, old.base, layout=old.layout, **options, **_rotary_options(old))


def _rotary_options(rotary: Rotary) -> dict[str, Any]:
    """Return what the frequencies of a rotary embedding depend on, besides width and base."""
    return {name: getattr(rotary, name) for name in ("scaling", "rotary_dim", "proportional")}


@torch.inference_mode()
def cache_consistency(network: Decoder, ids: Int[Tensor, "1 N"], start: int) -> Numbers:
    """Compare cached decoding with one pass over the sequence, for each token from `start` on."""
    if not 1 <= start < ids.shape[1]:
        raise ArgumentError(
            f"start is {start}; it must be 1 to {ids.shape[1] - 1}, for "
            f"{plural(ids.shape[1], 'token')}",
            argument="start",
        )
    step, prefix = _cached_step(network)
    step(ids[:, :start])
    largest_difference, agreements = 0.0, 0
    for position in range(start, ids.shape[1]):
        cached = step(ids[:, position : position + 1])[0, -1]
        uncached = network(ids[:, : position + 1])[0, -1]
        largest_difference = max(
            largest_difference, float((cached - uncached).abs().max() / uncached.std())
        )
        agreements += int(cached.argmax() == uncached.argmax())
    count = ids.shape[1] - start
    return {
        "steps": count,
        "difference": largest_difference,
        "agreement": agreements / count,
        "reruns": prefix.reruns if prefix else 0,
    }


def _cached_step(network: Decoder) -> tuple[Callable[[Tensor], Any], PrefixRecomputer | None]:
    if any(isinstance(module, RecomputedQKV) for module in network.modules()):
        prefix = PrefixRecomputer(network)
        return prefix, prefix
    caches = network.new_caches()
    return lambda ids: network(ids, None, caches), None


def consistency_by_policy(
    network: Decoder, ids: Int[Tensor, "1 N"], start: int, target: int
) -> dict[str, Numbers]:
    """Return `cache_consistency` of the model, for every policy if frequencies vary."""
    rotary = rotary_of(network)
    if not rotary.follows_length:
        return {"as it is": cache_consistency(network, ids, start)}
    return {
        policy: cache_consistency(with_cache_policy(network, policy, target), ids, start)
        for policy in POLICIES
    }


@dataclass(frozen=True)
class ExtensionOptions:
    """The options of `regard extend`."""

    length: int | None = None
    methods: tuple[str, ...] = ()
    windows: int = 8
    trials: int = 6
    steps: int = 24
    seed: int = 0


@dataclass(frozen=True)
class ExtensionResults:
    """The results of all extensions."""

    metadata: Mapping[str, Any]
    methods: Mapping[str, Numbers]

    def as_dict(self, command: str) -> dict[str, object]:
        """Return the results as plain values, with the command that reproduces them."""
        return {"command": command, **self.metadata, "methods": dict(self.methods)}


def extend_all(
    model: Model,
    ids: Int[Tensor, " N"],
    options: ExtensionOptions,
    names: Mapping[str, str],
    report: ReportProgress = ignore_progress,
) -> ExtensionResults:
    """Test every method at every length."""
    metadata, device = rotary_metadata(model), model.device
    ids = ids.to(device)
    trained = metadata["trained"]
    target = options.length or 4 * trained
    methods = (UNSCALED, *(m for m in dict.fromkeys(options.methods or METHODS) if m != UNSCALED))
    networks = {
        method: extended_decoder(model, method, target) for method in methods
    }  # raises before anything is measured
    start = max(1, trained - options.steps // 2)
    needed_tokens = max(target, start + options.steps) + 1
    if len(ids) < needed_tokens:
        raise ArgumentError(
            f"the text has {plural(len(ids), 'token')}, but {needed_tokens} are needed for a "
            f"length of {target}: give a longer text, or a smaller length",
            argument="text",
        )
    test = _length_test(default_lengths(trained, target), options)
    results: dict[str, Numbers] = {}
    for method, network in networks.items():
        report(f"{method}: {', '.join(map(str, test.lengths))} tokens, and cached decoding")
        cache = consistency_by_policy(network, ids[None, : start + options.steps], start, target)
        results[method] = {
            **evaluate_lengths(network, ids, test),
            **rotary_spectrum(network, target),
            "cache": cache,
        }
    result_metadata = {
        **names,
        **metadata,
        "target": target,
        "lengths": list(test.lengths),
        "depths": list(test.depths),
        "windows": test.windows,
        "counted": test.counted,
        "trials": test.trials,
        "key": test.key,
        "mark": test.mark,
        "seed": test.seed,
        "steps": options.steps,
        "machine": describe_machine(device),
    }
    return ExtensionResults(result_metadata, results)


def _length_test(lengths: tuple[int, ...], options: ExtensionOptions) -> LengthTest:
    """Return the sizes of the tests, smaller if the shortest length demands it."""
    shortest = lengths[0]
    passage = max(2, min(20, (shortest + 1) // 3))
    key = max(1, passage * 2 // 5)
    return LengthTest(
        lengths,
        counted=max(1, min(64, shortest // 2)),
        windows=options.windows,
        trials=options.trials,
        key=key,
        mark=passage - key,
        seed=options.seed,
    )


class NeedleResult(NamedTuple):
    """How well a model retrieves a passage from one depth of a text.

    >>> NeedleResult(0.5, 0.75, 0.25, 1.5).saved
    1.5
    """

    depth: float
    right: float
    guessed: float
    saved: float


@torch.inference_mode()
def losses_by_length(
    model: nn.Module,
    ids: Int[Tensor, " N"],
    lengths: Sequence[int],
    *,
    counted: int = 32,
    windows: int = 8,
) -> Float[Tensor, " n"]:
    """Return the mean loss in nats of the same tokens after contexts of each length.

    loss(L) = mean over ends e, i < counted of  -log p(x_{e-i} | x_{e-L} .. x_{e-i-1})

    Lengths differ only in the tokens before the targets. Sums are in fp64.
    """
    if min(lengths) < counted or counted < 1 or windows < 1:
        raise ArgumentError(
            f"lengths are {list(lengths)}, counted is {counted} and windows is {windows}; each "
            "length must be at least counted, and counted and windows must be at least 1",
            argument="lengths",
        )
    longest = max(lengths)
    if len(ids) <= longest:
        raise ArgumentError(
            f"the text has {plural(len(ids), 'token')}, but a context of {longest} needs "
            f"{longest + 1}; give a longer text, or shorter lengths"
        )
    window_ends = sorted(set(torch.linspace(longest, len(ids) - 1, windows).long().tolist()))
    totals = torch.zeros(len(lengths), dtype=torch.float64)
    for i, length in enumerate(lengths):
        for end in window_ends:
            row = ids[end - length : end + 1][None]
            logits = model(row[:, :-1])[0, -counted:].double()
            totals[i] += F.cross_entropy(logits, row[0, -counted:])
    return totals / len(window_ends)


@torch.inference_mode()
def needle_in_haystack(
    model: nn.Module,
    ids: Int[Tensor, " N"],
    length: int,
    depths: Sequence[float],
    *,
    trials: int = 8,
    key: int = 8,
    mark: int = 12,
    seed: int = 0,
) -> list[NeedleResult]:
    """Test how often a model retrieves a passage from each depth, and how the loss falls.

    with the passage:    text .. cue answer .. text cue -> answer
    without the passage: text .. text cue -> answer

    The cue of `mark` tokens and the answer of `key` tokens are of the text itself, so that any
    model can be tested. What it gets right without the passage is what it can guess.
    """
    passage_length = key + mark
    text_length = length - 2 * passage_length + 1
    if (
        text_length < passage_length
        or len(ids) < length
        or not all(0 <= depth <= 1 for depth in depths)
    ):
        raise ArgumentError(
            f"a passage of {plural(passage_length, 'token')} cannot be placed twice in {length} of "
            f"{plural(len(ids), 'token')} at the depths {list(depths)}; the length must be at "
            f"least {3 * passage_length - 1} and at most that of the text, and depths must be in "
            "0..1"
        )
    generator = random_generator(seed)
    starts = torch.randint(
        len(ids) - text_length - passage_length + 1, (trials,), generator=generator
    )
    pieces = [
        (ids[s : s + text_length], ids[s + text_length : s + text_length + passage_length])
        for s in starts.tolist()
    ]
    passage_starts = torch.randint(
        len(ids) - passage_length + 1, (trials,), generator=generator
    ).tolist()
    passages = [ids[a : a + passage_length] for a in passage_starts]
    without_passage = torch.stack(
        [torch.cat((*piece, passage)) for piece, passage in zip(pieces, passages, strict=True)]
    )
    without, guessed = _loss_and_accuracy(model, without_passage, key)
    results = []
    for depth in depths:
        split = round(depth * text_length)
        with_passage = torch.stack(
            [
                torch.cat((text[:split], passage, text[split:], passage))
                for (text, _), passage in zip(pieces, passages, strict=True)
            ]
        )
        nats, right = _loss_and_accuracy(model, with_passage, key)
        results.append(NeedleResult(depth, right, guessed, without - nats))
    return results


def _loss_and_accuracy(model: nn.Module, rows: Tensor, key: int) -> tuple[float, float]:
    """Return the mean loss in nats of the last `key` tokens, and the share that is right."""
    logits = model(rows[:, :-1])[:, -key:].double()
    right = (logits.argmax(-1) == rows[:, -key:]).double().mean()
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, -key:].flatten())), float(right)


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats per token; infinity if no float can hold it."""
    return math.exp(loss) if loss < 700 else math.inf
