"""Context extensions of one checkpoint: perplexity by length, passkeys, spectra and cache
consistency.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.bench.machine import describe_machine
from regard.compare.experiment import Numbers, Tell, silent
from regard.compare.reach import losses, needles, perplexity
from regard.errors import ArgumentError
from regard.models.convert.context import Extension, to_context
from regard.models.convert.layer import Checkpoint
from regard.models.decoder import Decoder
from regard.models.model import Model
from regard.nn import Attention, Prefix
from regard.nn.dynamic_rotary import PreRope, Recomputed, ReRotate
from regard.nn.projections import Separate
from regard.positions import Rotary, critical_dimension, rope_frequencies
from regard.table import table as aligned
from regard.view import html
from regard.view.charts import Line, Picture

UNSCALED = "unscaled"
METHODS = (UNSCALED, *get_args(Extension))
"""No extension, and the ways of `regard convert --context`."""


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
    raise ArgumentError(
        "the model has no rotary positions; a context extension has nothing to scale"
    )


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
    """How fast each pair turns in a sequence of a length, and how much of a match is left at a
    distance.

    theta_i in radians per position; decay(m) = f^2 (2 / d) sum_i cos(m theta_i) with the rotary
    factor f

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
        rotary.dim,
        rotary.base,
        scaling=rotary.scaling,
        rotary_dim=rotary.rotary_dim,
        proportional=rotary.proportional,
        length=length,
    )
    distances = range(0, length + 1, max(1, length // 128))
    m = torch.tensor(distances, dtype=torch.float64)
    decay = factor**2 * (m[:, None] * theta).cos().mean(-1)
    return {
        "theta": theta.tolist(),
        "rotary_factor": factor,
        "decay": [[d, b] for d, b in zip(distances, decay.tolist(), strict=True)],
    }


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
        found = needles(
            network,
            ids,
            length,
            how.depths,
            trials=how.trials,
            key=how.key,
            mark=how.mark,
            seed=how.seed,
        )
        rows.append(
            {
                "length": length,
                "nats": nats,
                "perplexity": min(perplexity(nats), 1e9),
                "needle": [one._asdict() for one in found],
            }
        )
    return {"by_length": rows}


def about(model: Model) -> dict[str, Any]:
    """What an extension starts from: the trained length, the head, the base, and how many dims have
    turned fully.

    >>> import regard
    >>> about(regard.load("tiny"))["critical_dimension"]
    14
    """
    rotary, trained = rotary_of(model.decoder), int(model.config.max_position_embeddings)
    turning = 2 * len(rotary.inv_freq)
    return {
        "trained": trained,
        "rotary_dim": turning,
        "base": rotary.base,
        "critical_dimension": critical_dimension(turning, rotary.base, trained),
    }


def lengths_for(trained: int, target: int) -> tuple[int, ...]:
    """Half the trained length, itself, and its doubles up to the target, which is the last.

    >>> lengths_for(256, 1024), lengths_for(256, 600)
    ((128, 256, 512, 1024), (128, 256, 512, 600))
    """
    found: Sequence[int] = [trained // 2, trained]
    while found[-1] * 2 < target:
        found = [*found, found[-1] * 2]
    return (*found, target)


Keeping: TypeAlias = Literal["stale", "pre_rope", "re_rotate", "frozen", "recompute"]
POLICIES: tuple[Keeping, ...] = ("stale", "pre_rope", "re_rotate", "frozen", "recompute")
"""What to do with cached keys that were rotated for a shorter length: keep them as they are, or one
of the ways of `regard.nn.dynamic_rotary`.
"""


def under(network: Decoder, policy: Keeping, target: int) -> Decoder:
    """A decoder whose frequencies follow the length, under a policy; it shares all weights but
    those of queries and keys.

    Args:
        network: as a family makes it, under "recompute".
        policy: above.
        target: the length whose frequencies "frozen" has for every position.

    Raises:
        ArgumentError: a layer's frequencies do not follow the length.
    """
    made = copy.copy(network)
    made._modules = dict(network._modules)
    made.layers = copy.deepcopy(network.layers, {id(p): p for p in network.layers.parameters()})
    for layer in made.layers:
        attention = layer.attention
        project = attention.project if isinstance(attention, Attention) else None
        if not isinstance(project, Recomputed):
            raise ArgumentError(
                "the frequencies of this model do not follow the length, and any cache suits it; "
                "policies are for the method dynamic"
            )
        cast("Attention", attention).project = _project(project, policy, target)
    return made.eval()


def _project(project: Recomputed, policy: Keeping, target: int) -> Separate:
    if policy == "recompute":
        return project
    if policy in ("pre_rope", "re_rotate"):
        kind = PreRope if policy == "pre_rope" else ReRotate
        return kind(project.q, project.k, project.v, project.key_transform)
    for heads in (project.q, project.k):
        heads.steps.append(
            _rotary(project.key_transform.rotary, target if policy == "frozen" else None)
        )
    found = Separate(project.q, project.k, project.v)
    found.cache_unsafe_reason = None  # to show what is refused otherwise
    return found


def _rotary(old: Rotary, length: int | None) -> Rotary:
    """The same, frozen at a length, or following each call."""
    return Rotary(
        old.dim,
        old.base,
        scaling=old.scaling,
        rotary_dim=old.rotary_dim,
        proportional=old.proportional,
        layout=old.layout,
        length="current" if length is None else length,
    )


@torch.inference_mode()
def consistency(network: Decoder, ids: Int[Tensor, "1 N"], start: int) -> Numbers:
    """How far cached decoding is from passes over everything, from token `start` on.

    Args:
        network: a decoder; one that follows the length under "recompute" is run through
            `regard.nn.Prefix`.
        ids: N tokens, of which `start` are read at once and the others one by one.
        start: at least 1 and less than N.

    Returns:
        steps: how many; difference: the largest of a logit, in deviations of the logits; agreement:
            the share of steps in which both think the same token likeliest; reruns: how often the
            prefix was read again.

    Raises:
        ArgumentError: start is out of range.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> consistency(tiny.decoder, torch.arange(12)[None], 8)["agreement"]
    1.0
    """
    if not 1 <= start < ids.shape[1]:
        raise ArgumentError(
            f"start is {start}; it must be 1 to {ids.shape[1] - 1}, of {ids.shape[1]} tokens"
        )
    step, prefix = _stepper(network)
    step(ids[:, :start])
    apart, same = 0.0, 0
    for n in range(start, ids.shape[1]):
        cached = step(ids[:, n : n + 1])[0, -1]
        whole = network(ids[:, : n + 1])[0, -1]
        apart = max(apart, float((cached - whole).abs().max() / whole.std()))
        same += int(cached.argmax() == whole.argmax())
    count = ids.shape[1] - start
    return {
        "steps": count,
        "difference": apart,
        "agreement": same / count,
        "reruns": prefix.reruns if prefix else 0,
    }


def _stepper(network: Decoder) -> tuple[Callable[[Tensor], Any], Prefix | None]:
    if any(isinstance(module, Recomputed) for module in network.modules()):
        prefix = Prefix(network)
        return prefix, prefix
    caches = network.new_caches()
    return lambda ids: network(ids, None, caches), None


def policies(
    network: Decoder, ids: Int[Tensor, "1 N"], start: int, target: int
) -> dict[str, Numbers]:
    """`consistency` under every policy where the frequencies follow the length; else of the model
    as it is.

    Args:
        network: a decoder with rotary positions.
        ids, start: as `consistency`.
        target: as `under`.
    """
    rotary = rotary_of(network)
    if not rotary.follows:
        return {"as it is": consistency(network, ids, start)}
    return {policy: consistency(under(network, policy, target), ids, start) for policy in POLICIES}


@dataclass(frozen=True)
class Asked:
    """What the command asks for.

    Attributes:
        length: tokens to reach; None is four times the trained length.
        methods: extensions; none are all. The model as it is always stands beside them.
        windows, trials, seed: as `Reading`.
        steps: tokens that are decoded one by one across the trained length.
    """

    length: int | None = None
    methods: tuple[str, ...] = ()
    windows: int = 8
    trials: int = 6
    steps: int = 24
    seed: int = 0


@dataclass(frozen=True)
class Extended:
    """What was found.

    Attributes:
        start: model, text, trained length, head, base, critical dimension, machine, and how it was
            asked.
        methods: name -> by_length, theta, rotary_factor, decay, cache.
    """

    start: Mapping[str, Any]
    methods: Mapping[str, Numbers]

    def as_dict(self, command: str) -> dict[str, Any]:
        """Return plain values, with the command that makes them again."""
        return {"command": command, **self.start, "methods": dict(self.methods)}


def extend_all(
    model: Model,
    ids: Int[Tensor, " N"],
    asked: Asked,
    names: Mapping[str, str],
    tell: Tell = silent,
) -> Extended:
    """Every method, read at every length.

    Args:
        model: with rotary positions that are not scaled yet.
        ids: a text, longer than the length to reach.
        asked: above.
        names: what model and text are called.
        tell: told what is being done.

    Raises:
        ArgumentError: a method is unknown, the text is too short, or the model cannot be extended.
    """
    facts = about(model)
    trained = facts["trained"]
    target = asked.length or 4 * trained
    methods = (UNSCALED, *(m for m in dict.fromkeys(asked.methods or METHODS) if m != UNSCALED))
    networks = {
        method: extended(model, method, target) for method in methods
    }  # refuses before anything is measured
    start = max(1, trained - asked.steps // 2)
    need = max(target, start + asked.steps) + 1
    if len(ids) < need:
        raise ArgumentError(
            f"the text has {len(ids)} tokens, and {need} are needed for a length of {target}: "
            "give a longer text, or a smaller length"
        )
    how = _reading(lengths_for(trained, target), asked)
    found: dict[str, Numbers] = {}
    for method, network in networks.items():
        tell(f"{method}: {', '.join(map(str, how.lengths))} tokens, and a cache")
        cache = policies(network, ids[None, : start + asked.steps], start, target)
        found[method] = {**read(network, ids, how), **spectrum(network, target), "cache": cache}
    told = {
        **names,
        **facts,
        "target": target,
        "lengths": list(how.lengths),
        "depths": list(how.depths),
        "windows": how.windows,
        "counted": how.counted,
        "trials": how.trials,
        "key": how.key,
        "mark": how.mark,
        "seed": how.seed,
        "steps": asked.steps,
        "machine": describe_machine(torch.device("cpu")),
    }
    return Extended(told, found)


def _reading(lengths: tuple[int, ...], asked: Asked) -> Reading:
    """How models are asked: less of each where the shortest length has no room for it."""
    shortest = lengths[0]
    passage = max(2, min(20, (shortest + 1) // 3))
    key = max(1, passage * 2 // 5)
    return Reading(
        lengths,
        counted=max(1, min(64, shortest // 2)),
        windows=asked.windows,
        trials=asked.trials,
        key=key,
        mark=passage - key,
        seed=asked.seed,
    )


def rows(found: Extended) -> list[list[str]]:
    """A row for each method: perplexity at each length, the passage, and the cache."""
    table = []
    for name, numbers in found.methods.items():
        by = numbers["by_length"]
        saved = [sum(n["saved"] for n in one["needle"]) / len(one["needle"]) for one in by]
        cache = numbers["cache"]
        kept = cache.get("recompute") or next(iter(cache.values()))  # as a loaded model does it
        table.append(
            [
                name,
                *(f"{one['perplexity']:.4g}" for one in by),
                *(f"{s:+.2f}" for s in saved),
                f"{kept['difference']:.1g}",
            ]
        )
    return table


def heads(found: Extended) -> list[str]:
    """The heads of `rows`."""
    lengths = found.start["lengths"]
    return ["", *(f"ppl {n}" for n in lengths), *(f"saved {n}" for n in lengths), "cache"]


def table(found: Extended) -> str:
    """What came of each method, for a terminal."""
    s = found.start
    m = s["machine"]
    lines = [
        (
            f"{s['model']}: trained on {s['trained']} tokens, base {s['base']:g}, "
            f"{s['critical_dimension']} of {s['rotary_dim']} rotary dims have turned fully"
        ),
        (
            f"extended to {s['target']}; {s['windows']} windows of {s['text']}, the last "
            f"{s['counted']} tokens counted; {s['trials']} passages for each depth, "
            f"seed {s['seed']}"
        ),
        f"{m['processor']}, {m['threads']} threads, torch {m['torch']}, regard {m['regard']}",
        "",
    ]
    lines.append(aligned([heads(found), *rows(found)]))
    lines += [
        "",
        (
            "ppl: perplexity of the same tokens; saved: nats per token less when a passage stood "
            "before, mean over depths;"
        ),
        (
            "cache, as the model is loaded: the largest difference of a logit from a pass over "
            "everything, in deviations"
        ),
    ]
    for name, numbers in found.methods.items():
        if len(numbers["cache"]) > 1:
            lines += [
                "",
                (
                    f"{name} follows the length: cached decoding of {s['steps']} tokens across "
                    f"{s['trained']}"
                ),
            ]
            shown = [["policy", "difference", "same token", "read again"], *cache_rows(numbers)]
            lines.append(aligned(shown))
    return "\n".join(lines)


def cache_rows(numbers: Mapping[str, Any]) -> list[list[str]]:
    """A row for each policy of a method."""
    return [
        [policy, f"{one['difference']:.1g}", f"{one['agreement']:.0%}", str(one["reruns"])]
        for policy, one in numbers["cache"].items()
    ]


def pictures(found: Extended) -> list[Picture]:
    """Perplexity, passages, spectrum and decay."""
    s, trained = found.start, float(found.start["trained"])
    named = found.methods.items()

    def per_length(value: Any) -> tuple[Line, ...]:
        return tuple(
            Line(name, tuple((float(one["length"]), value(one)) for one in numbers["by_length"]))
            for name, numbers in named
        )

    turns = tuple(
        Line(
            name,
            tuple(
                (float(i), max(trained, 1) * theta / math.tau)
                for i, theta in enumerate(numbers["theta"])
            ),
        )
        for name, numbers in named
    )
    decay = tuple(
        Line(name, tuple((float(m), b) for m, b in numbers["decay"])) for name, numbers in named
    )
    longest = [
        Line(
            name, tuple((one["depth"], one["saved"]) for one in numbers["by_length"][-1]["needle"])
        )
        for name, numbers in named
    ]
    return [
        Picture(
            f"{s['model']}: perplexity of the same tokens behind more context",
            "tokens read",
            "perplexity",
            per_length(lambda one: one["perplexity"]),
            "xy",
            trained,
        ),
        Picture(
            "A passage found again: nats per token saved, mean over depths",
            "tokens read",
            "nats",
            per_length(lambda one: sum(n["saved"] for n in one["needle"]) / len(one["needle"])),
            "x",
            trained,
        ),
        Picture(f"... by depth, at {s['target']} tokens", "depth", "nats", tuple(longest)),
        Picture(
            f"How often each pair turns in {s['trained']} tokens",
            "pair of dims",
            "turns",
            turns,
            "y",
        ),
        Picture(
            "What is left of a match at a distance: f^2 (2 / d) sum cos(m theta)",
            "distance",
            "share",
            decay,
            "",
            trained,
        ),
    ]


def page(found: Extended, command: str) -> str:
    """The page: HTML that needs nothing else."""
    s, m = found.start, found.start["machine"]
    drawn = pictures(found)
    facts = {
        "model": str(s["model"]),
        "trained": f"{s['trained']} tokens",
        "extended to": str(s["target"]),
        "turned fully": f"{s['critical_dimension']} of {s['rotary_dim']} dims",
        "windows": str(s["windows"]),
        "passages": str(s["trials"]),
        "seed": str(s["seed"]),
        "machine": f"{m['processor']}, {m['threads']} threads, torch {m['torch']}",
    }
    sections = [
        html.Section(
            "Every method",
            heads=heads(found),
            rows=rows(found),
            pictures=drawn[:1],
            texts={"text": str(s["text"])},
        ),
        html.Section(
            "A passage found again",
            pictures=drawn[1:3],
            heads=["", *(f"{n}, depth {d:g}" for n in s["lengths"][-1:] for d in s["depths"])],
            rows=[
                [
                    name,
                    *(
                        f"{n['right']:.0%} right, {n['guessed']:.0%} guessed"
                        for n in numbers["by_length"][-1]["needle"]
                    ),
                ]
                for name, numbers in found.methods.items()
            ],
        ),
        html.Section("The rotations", pictures=drawn[3:]),
    ]
    for name, numbers in found.methods.items():
        if len(numbers["cache"]) > 1:
            sections.append(
                html.Section(
                    f"{name}: cached decoding",
                    heads=["policy", "difference", "same token", "read again"],
                    rows=cache_rows(numbers),
                )
            )
    return html.page(
        "Context extensions",
        "One checkpoint, its rotary positions scaled in every way, no weight changed.",
        facts,
        command,
        sections,
    )
