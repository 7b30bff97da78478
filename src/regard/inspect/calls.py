"""One query in one call of attention: what the kernel was given, and what it answered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.inspect.parts import Array
from regard.inspect.place import Block, Place
from regard.nn.longformer import Longformer
from regard.span import as_tensor

if TYPE_CHECKING:
    from regard.inspect.capture import Capture
    from regard.inspect.kept import Step
    from regard.inspect.reading import Site


@dataclass(frozen=True, eq=False)
class Call:
    """Query i of a sequence in one call at a place: row `row` of step `number`."""

    place: Place
    number: int
    row: int

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


def calls_at(capture: Capture, site: Site, query: int) -> list[Call]:
    """The calls at a site that query i takes part in, in the order of the run; in calls of one
    token each it is the i-th.
    """
    found = []
    for name, place in capture.recording.places.items():
        if name == site.place or name.startswith(site.place + "."):
            found += _of(place, query)
    return found


def _of(place: Place, query: int) -> list[Call]:
    if len(place.steps) > 1 and all(step.T == 1 for step in place.steps):
        return [Call(place, query, 0)] if query < len(place.steps) else []
    return [
        Call(place, number, row)
        for number, step in enumerate(place.steps)
        if len(step.columns)  # a branch without a complete block has no keys
        for row in (as_tensor(step.q_positions)[0] == query).nonzero()[:1, 0].tolist()
    ]


def counting(site: Site, calls: list[Call]) -> list[Call]:
    """The calls whose answers go on: of a global query of Longformer the last, which replaces the
    local one.
    """
    return calls[-1:] if isinstance(site.attention, Longformer) else calls


def main_call(calls: list[Call], head: int) -> Call:
    """Of several calls the one in which the head has the largest weight on one key; of one,
    that.
    """
    return max(calls, key=lambda call: float(call.weights[head].max(initial=0.0)))


def looks_of(calls: list[Call], length: int) -> Tensor:
    """Weights [H,length] by the key's position, each head's of its main call."""
    heads = range(len(calls[0].weights))
    return torch.stack([main_call(calls, head).by_key(length)[head] for head in heads])
