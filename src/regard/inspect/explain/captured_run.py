"""One run of a network on its own kernels, with its attention calls recorded.

`capture_site` also keeps the tensors around one attention. `QueryCall` is one query in one recorded
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.caches.cross_layer import split_first_values
from regard.inspect.explain.explanation import Array
from regard.inspect.model_run import AttentionSite, ModelRun
from regard.inspect.record.recorded_place import PatternBlock, Place
from regard.inspect.record.recorder import Recorder
from regard.inspect.record.recording import Recording
from regard.nn.explainable import explainable
from regard.span import as_tensor

if TYPE_CHECKING:
    from regard.inspect.record.recorded_place import RecordedStep

TAPS = ("q", "k", "v", "z", "out")
"""Tensors of the explained attention that are kept, by their names in `regard.tracing`. Keeping
them does not change which kernel is chosen.
"""


@dataclass(frozen=True, eq=False)
class QueryCall:
    """One query of a sequence in one recorded call: row `row` of step `number` of a place.

    `branch` is "window" for "layers.3.window", and "" where the place is no branch.
    """

    place: Place
    number: int
    row: int
    branch: str = ""

    @property
    def step(self) -> RecordedStep:
        """Return the recorded call as a step."""
        return self.place.steps[self.number]

    @property
    def groups(self) -> int:
        """Return G, the number of key/value heads of the call."""
        return self.place.keys(self.step).shape[1]

    @cached_property
    def keys(self) -> Tensor:
        """Return the positions of the keys, `[n]`; -1 is an empty slot."""
        return as_tensor(self.step.k_positions)[0].cpu()

    @property
    def position(self) -> int:
        """Return the position of the query."""
        return int(as_tensor(self.step.q_positions)[0, self.row])

    @cached_property
    def scores(self) -> Array:
        """Compute the masked scores, `[H, n]`, in the order of the call's keys."""
        scores: Array = self._part.scores[0, :, 0].numpy()
        return scores

    @cached_property
    def weights(self) -> Array:
        """Compute the weights exp(s - lse), `[H, n]`, with the lse and the sink of the kernel."""
        weights: Array = self._part.weights[0, :, 0].numpy()
        return weights

    @cached_property
    def _part(self) -> PatternBlock:
        """Compute scores and weights of this query over all keys of the call."""
        rows, keys = slice(self.row, self.row + 1), slice(0, len(self.keys))
        return self.place.step_block(self.step, rows, keys, self.place.heads)

    def by_key(self, length: int) -> Tensor:
        """Return the weights by the position of the key, `[H, length]`, without empty slots."""
        by_position = torch.zeros(len(self.weights), length, dtype=torch.float64)
        has_token = (self.keys >= 0) & (self.keys < length)
        by_position[:, self.keys[has_token]] = torch.from_numpy(self.weights)[:, has_token]
        return by_position


def calls_for_query(run: CapturedRun, site: AttentionSite, query: int) -> list[QueryCall]:
    """Return the calls at a site that contain query i, in the order of the run."""
    calls = []
    for name, place in run.recording.places.items():
        if name == site.place or name.startswith(site.place + "."):
            calls += _calls_at_place(place, query, name[len(site.place) + 1 :])
    return calls


def _calls_at_place(place: Place, query: int, branch: str) -> list[QueryCall]:
    """Return the calls of one recorded place that contain a query."""
    if len(place.steps) > 1 and all(step.T == 1 for step in place.steps):
        return [QueryCall(place, query, 0, branch)] if query < len(place.steps) else []
    return [
        QueryCall(place, number, row, branch)
        for number, step in enumerate(place.steps)
        if len(step.columns)  # a branch without a complete block has no keys
        for row in (as_tensor(step.q_positions)[0] == query).nonzero()[:1, 0].tolist()
    ]


def effective_calls(site: AttentionSite, calls: list[QueryCall]) -> list[QueryCall]:
    """Return the calls whose results are used: the last one if `replaces_calls`, else all."""
    return calls[-1:] if explainable(site.attention).replaces_calls else calls


def main_call(calls: list[QueryCall], head: int) -> QueryCall:
    """Return the call in which the head has its largest weight on one key."""
    return max(calls, key=lambda call: float(call.weights[head].max(initial=0.0)))


def main_call_weights(calls: list[QueryCall], length: int) -> Tensor:
    """Return the weights by the key's position, `[H, length]`, for each head from its main call."""
    heads = range(len(calls[0].weights))
    return torch.stack([main_call(calls, head).by_key(length)[head] for head in heads])


@dataclass(frozen=True, eq=False)
class CapturedRun:
    """What one run computed.

    Args:
        recording: the recorded attention calls at the requested sites.
        taps: tensors at the explained site, by tap name, without the batch dimension: q, z `[H, T,
            .]`, k, v `[G, S, .]`, out `[T, M]`.
        hidden: hidden states by name: `x` `[T, M]`, the input of the attention; `memory` `[S, M3]`,
            where there is one; `first_values` `[T, G*E]`, the values of the first layer, where
            the decoder passed them to this one; `entering` and `residual` `[T, M]`, before and
            after its residual path; `embedding`; `last`, after the last block.
        observer_difference: the largest difference between the output of this run and that of a run
            without recording.
    """

    recording: Recording
    taps: dict[str, Tensor] = field(default_factory=dict)
    hidden: dict[str, Tensor] = field(default_factory=dict)
    observer_difference: float = 0.0


class SiteRecorder(Recorder):
    """A recorder of some attention sites, which also keeps the taps of one of them."""

    def __init__(self, sites: Sequence[AttentionSite], site: AttentionSite | None = None) -> None:
        super().__init__()
        self.missing = "ignore"  # a recurrence calls no softmax, and not every site has every tap
        self._prefixes = tuple(s.place for s in sites)
        if site is not None:
            self.wants = frozenset(f"{site.place}.{name}" for name in TAPS)

    def on_attention_call(self, call: object, result: object, kernel: str) -> None:
        """Record a call if it is at one of the sites, or at a branch of one."""
        here = self.where
        if any(here == place or here.startswith(place + ".") for place in self._prefixes):
            super().on_attention_call(call, result, kernel)


def record_sites(run: ModelRun, sites: Sequence[AttentionSite]) -> CapturedRun:
    """Run the network once, and record the attention calls at some sites."""
    with torch.inference_mode(), SiteRecorder(sites) as recorder:
        run.call()
    return CapturedRun(recorder.recording())


def record_run(run: ModelRun) -> Recording:
    """Run the network once, and record every softmax attention call, for pages and files."""
    recorder = Recorder()
    recorder.missing = "ignore"  # the page and the file raise an error for an empty recording
    with torch.inference_mode(), recorder:
        run.call()
    sequence, source_sequence = run.sequences[run.predicted], run.sequences.get("source")
    recording = recorder.recording(
        ids=torch.tensor([sequence.ids]), pieces=sequence.pieces, model=run.name, text=run.text
    )
    if source_sequence is None:
        return recording
    ids = torch.tensor([source_sequence.ids])
    return replace(recording, source_ids=ids, source_pieces=source_sequence.pieces)


def capture_site(run: ModelRun, site: AttentionSite) -> CapturedRun:
    """Run the network twice: with the tensors of one site kept, and without any recording."""
    recorded_states: dict[str, list[Tensor]] = {}
    with torch.inference_mode(), ExitStack() as hooks:
        for handle in _hooks(run, site, recorded_states):
            hooks.callback(handle.remove)
        with SiteRecorder((site,), site) as recorder:
            output = run.call()
        hooks.close()
        difference = float((run.call().double() - output.double()).abs().max())
    hidden = {name: torch.cat(parts, 1)[0] for name, parts in recorded_states.items()}
    taps = {name: _tap_over_calls(recorder, f"{site.place}.{name}") for name in TAPS}
    return CapturedRun(
        recorder.recording(model=run.name),
        {n: x for n, x in taps.items() if x is not None},
        hidden,
        difference,
    )


def _tap_over_calls(recorder: SiteRecorder, name: str) -> Tensor | None:
    """Return a tap over all calls, or None: q, z and out joined, k and v of the last call."""
    if name not in list(recorder):
        return None
    parts = recorder.every(name)
    letter = name.rpartition(".")[2]
    if letter in ("k", "v") or len(parts) == 1:
        return parts[-1][0]
    return torch.cat(parts, 1 if letter == "out" else 2)[0]


def _hooks(
    run: ModelRun, site: AttentionSite, recorded_states: dict[str, list[Tensor]]
) -> list[RemovableHandle]:
    """Register hooks that keep the inputs and outputs of the modules around a site."""
    thread, path = get_ident(), site.residual_path

    def keep(name: str, x: object) -> None:
        x = x[0] if isinstance(x, tuple) else x
        if isinstance(x, Tensor) and get_ident() == thread:  # other threads may run the model, too
            recorded_states.setdefault(name, []).append(x.detach())

    def keep_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep("x", args[0])
        keep("memory", kwargs.get("memory"))
        first = split_first_values(args[2] if len(args) > 2 else kwargs.get("cache"))[1]
        keep("first_values", None if first is None else first.values)

    def after(name: str) -> Callable[..., None]:
        return lambda _module, _args, out: keep(name, out)

    hooks = [site.attention.register_forward_pre_hook(keep_inputs, with_kwargs=True)]
    if path is not None:
        hooks.append(path.register_forward_pre_hook(lambda _, args: keep("entering", args[0])))
    for module, name in ((run.last, "last"), (run.embed, "embedding"), (path, "residual")):
        if module is not None:
            hooks.append(module.register_forward_hook(after(name)))
    return hooks
