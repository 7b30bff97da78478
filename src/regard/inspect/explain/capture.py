"""One run of a network on its own kernels: the recorded calls of its attention, what surrounds one
of them, and one query in one call.
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

from regard.inspect.explain.explanation import Array
from regard.inspect.explain.reading import Reading, Site
from regard.inspect.record.place import Block, Place
from regard.inspect.record.recorder import Recorder
from regard.inspect.record.recording import Recording
from regard.nn.explainable import explainable
from regard.span import as_tensor

if TYPE_CHECKING:
    from regard.inspect.explain.reading import Site
    from regard.inspect.record.place import Step


TAPS = ("q", "k", "v", "z", "out")
"""What is kept at the site that is looked at; none of these makes a fused kernel refuse."""


@dataclass(frozen=True, eq=False)
class QueryCall:
    """Query i of a sequence in one call at a place: row `row` of step `number`.

    branch: what the place's name has behind that of the site, such as "window"; "" of the site
        itself.
    """

    place: Place
    number: int
    row: int
    branch: str = ""

    @property
    def step(self) -> Step:
        """The call that was recorded."""
        return self.place.steps[self.number]

    @property
    def groups(self) -> int:
        """Its key/value heads G."""
        return self.place.keys(self.step).shape[1]

    @cached_property
    def keys(self) -> Tensor:
        """Positions of the keys [n], -1 = a slot that held nothing."""
        return as_tensor(self.step.k_positions)[0].cpu()

    @property
    def position(self) -> int:
        """Of the query."""
        return int(as_tensor(self.step.q_positions)[0, self.row])

    @cached_property
    def scores(self) -> Array:
        """Masked scores [H,n] in the order of the call's keys, recomputed from the recorded q and
        k.
        """
        found: Array = self._part.scores[0, :, 0].numpy()
        return found

    @cached_property
    def weights(self) -> Array:
        """Weights [H,n] = exp(s - lse), lse and sink as the kernel had them."""
        found: Array = self._part.weights[0, :, 0].numpy()
        return found

    @cached_property
    def _part(self) -> Block:
        rows, keys = slice(self.row, self.row + 1), slice(0, len(self.keys))
        return self.place.part(self.step, rows, keys, self.place.heads)

    def by_key(self, length: int) -> Tensor:
        """Weights [H,length] by the key's position; a slot that held nothing, and a key behind
        `length`, are left out.
        """
        found = torch.zeros(len(self.weights), length, dtype=torch.float64)
        real = (self.keys >= 0) & (self.keys < length)
        found[:, self.keys[real]] = torch.from_numpy(self.weights)[:, real]
        return found


def calls_at(capture: Capture, site: Site, query: int) -> list[QueryCall]:
    """The calls at a site that query i takes part in, in the order of the run; in calls of one
    token each it is the i-th.
    """
    found = []
    for name, place in capture.recording.places.items():
        if name == site.place or name.startswith(site.place + "."):
            found += _of(place, query, name[len(site.place) + 1 :])
    return found


def _of(place: Place, query: int, branch: str) -> list[QueryCall]:
    if len(place.steps) > 1 and all(step.T == 1 for step in place.steps):
        return [QueryCall(place, query, 0, branch)] if query < len(place.steps) else []
    return [
        QueryCall(place, number, row, branch)
        for number, step in enumerate(place.steps)
        if len(step.columns)  # a branch without a complete block has no keys
        for row in (as_tensor(step.q_positions)[0] == query).nonzero()[:1, 0].tolist()
    ]


def counting(site: Site, calls: list[QueryCall]) -> list[QueryCall]:
    """The calls whose answers go on: the last of several, where the mechanism says that it replaces
    the others.
    """
    return calls[-1:] if explainable(site.attention).replaces_calls else calls


def main_call(calls: list[QueryCall], head: int) -> QueryCall:
    """Of several calls the one in which the head has the largest weight on one key; of one,
    that.
    """
    return max(calls, key=lambda call: float(call.weights[head].max(initial=0.0)))


def looks_of(calls: list[QueryCall], length: int) -> Tensor:
    """Weights [H,length] by the key's position, each head's of its main call."""
    heads = range(len(calls[0].weights))
    return torch.stack([main_call(calls, head).by_key(length)[head] for head in heads])


@dataclass(frozen=True, eq=False)
class Capture:
    """What one run computed.

    recording: the calls of attention at the sites that were asked for.
    taps: at the site that is looked at, by name, without their batch dimension: q, z [H,T,.], k, v
        [G,S,.], out [T,M].
    hidden: `x` [T,M], what the attention was given, and where there is one, `memory` [S,M3];
        `entering` and `residual` [T,M], in front of its residual path and behind it; `embedding`;
        `last`, behind the last block.
    apart: the largest difference of the network's output to that of a run that nobody looked at.
    """

    recording: Recording
    taps: dict[str, Tensor] = field(default_factory=dict)
    hidden: dict[str, Tensor] = field(default_factory=dict)
    apart: float = 0.0


class Watch(Recorder):
    """A recorder of some sites, which also keeps the taps of one."""

    def __init__(self, sites: Sequence[Site], site: Site | None = None) -> None:
        super().__init__()
        self.missing = "ignore"  # a recurrence calls no softmax, and not every site has every tap
        self._prefixes = tuple(s.place for s in sites)
        if site is not None:
            self.wants = frozenset(f"{site.place}.{name}" for name in TAPS)

    def saw(self, call: Any, result: Any, kernel: str) -> None:
        """One call more, if it is at one of the sites, or at a branch of one."""
        here = self.where
        if any(here == place or here.startswith(place + ".") for place in self._prefixes):
            super().saw(call, result, kernel)


def look(read: Reading, sites: Sequence[Site]) -> Capture:
    """Run once, and record the calls of attention at some sites."""
    with torch.inference_mode(), Watch(sites) as watch:
        read.run()
    return Capture(watch.recording())


def recorded(read: Reading) -> Recording:
    """Run once, and record every softmax attention: what pages and files are made of.

    >>> import regard
    >>> from regard.inspect.explain.reading import reading
    >>> list(recorded(reading(regard.load("tiny"), "to be")).places)[0]
    'layers.0'
    """
    recorder = Recorder()
    recorder.missing = "ignore"  # the page and the file refuse an empty recording by name
    with torch.inference_mode(), recorder:
        read.run()
    own, source = read.sides[read.predicts], read.sides.get("source")
    found = recorder.recording(
        ids=torch.tensor([own.ids]), pieces=own.pieces, model=read.name, text=read.text
    )
    if source is None:
        return found
    ids = torch.tensor([source.ids])
    return replace(found, source_ids=ids, source_pieces=source.pieces)


def capture(read: Reading, site: Site) -> Capture:
    """Run twice, once with everything at one site kept, and once as when nobody looks."""
    kept: dict[str, list[Tensor]] = {}
    with torch.inference_mode(), ExitStack() as hooks:
        for handle in _hooks(read, site, kept):
            hooks.callback(handle.remove)
        with Watch((site,), site) as watch:
            seen = read.run()
        hooks.close()
        apart = float((read.run().double() - seen.double()).abs().max())
    hidden = {name: torch.cat(parts, 1)[0] for name, parts in kept.items()}
    taps = {name: _joined(watch, f"{site.place}.{name}") for name in TAPS}
    return Capture(
        watch.recording(model=read.name),
        {n: x for n, x in taps.items() if x is not None},
        hidden,
        apart,
    )


def _joined(watch: Watch, name: str) -> Tensor | None:
    """A tap of all calls: one behind the other where each had some rows, the last where each had
    all keys.
    """
    if name not in list(watch):
        return None
    parts = watch.every(name)
    letter = name.rpartition(".")[2]
    if letter in ("k", "v") or len(parts) == 1:
        return parts[-1][0]
    return torch.cat(parts, 1 if letter == "out" else 2)[0]


def _hooks(read: Reading, site: Site, kept: dict[str, list[Tensor]]) -> list[RemovableHandle]:
    """Hooks that keep what enters and leaves the modules around a site."""
    attention, thread = site.attention, get_ident()
    hooks: list[RemovableHandle] = []

    def keep(name: str, x: Any) -> None:
        x = x[0] if isinstance(x, tuple) else x
        if isinstance(x, Tensor) and get_ident() == thread:  # others may run the model as well
            kept.setdefault(name, []).append(x.detach())

    def given(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep("x", args[0])
        keep("memory", kwargs.get("memory"))

    hooks.append(attention.register_forward_pre_hook(given, with_kwargs=True))
    hooks.append(read.last.register_forward_hook(_after(keep, "last")))
    if read.embed is not None:
        hooks.append(read.embed.register_forward_hook(_after(keep, "embedding")))
    if site.around is not None:
        hooks.append(
            site.around.register_forward_pre_hook(lambda _, args: keep("entering", args[0]))
        )
        hooks.append(site.around.register_forward_hook(_after(keep, "residual")))
    return hooks


def _after(keep: Callable[[str, Any], None], name: str) -> Callable[..., None]:
    return lambda _module, _args, out: keep(name, out)
