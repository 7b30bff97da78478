"""Is a mask needed when a model decodes? Every kind of step, with its mask and without any.

A step is right without a mask exactly when its queries may see every key that it is given: one query, and no more keys
than the mask shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from regard import attend
from regard.caches import Cache, Fixed, Growing, Ring
from regard.compare.claims.base import Check, Claim
from regard.compare.experiment import Numbers
from regard.masks import Causal, Mask, Window
from regard.nn import Attention
from regard.nn.variants import mha
from regard.span import Span, as_tensor
from regard.view.curves import Line, Picture

WINDOW = Causal() & Window(4)
STEPS: dict[str, tuple[Callable[[], Cache], tuple[int, ...], Mask, bool]] = {
    "one token, all keys kept": (Growing, (6, 1), Causal(), False),
    "one token, a ring of the window": (lambda: Ring(4), (9, 1), WINDOW, False),
    "three tokens at once": (Growing, (6, 3), Causal(), True),
    "a prompt in chunks": (Growing, (4, 4, 4), Causal(), True),
    "one token under a window, all keys kept": (Growing, (9, 1), WINDOW, True),
    "one token, a buffer with empty slots": (lambda: Fixed(16), (6, 1), Causal(), True),
}
"""Name -> cache, tokens of each call, the right mask, and whether the last call needs it."""
MOST = 24


def _step(cache: Cache, parts: tuple[int, ...], mask: Mask, x: Tensor, *, slots: bool) -> float:
    """How far the last call is from right when it has no mask: all keys that are stored count as seen."""
    module = mha(8, 2).double()
    at = 0
    for part in x[:, : sum(parts)].split(list(parts), 1):
        where = Span(at, part.shape[1])
        memory, held = cache.update(module.project.remember(part, where), where)
        at += part.shape[1]
    q, (k, v) = module.project.query(part, where), module.project.recall(memory, held)
    right = attend(q, k, v, mask=mask, q_positions=where, k_positions=held)
    if slots:  # the whole buffer, as a fixed shape would give it: zeros where nothing was written
        k, v = _buffer(k), _buffer(v)
    else:
        hole = (as_tensor(held, q.device) < 0)[:, None, :, None]
        k, v = k.masked_fill(hole, 0), v.masked_fill(hole, 0)
    return _apart(attend(q, k, v), right)


def _buffer(x: Tensor) -> Tensor:
    """Sixteen slots, the first of which hold x."""
    whole = x.new_zeros(*x.shape[:2], 16, x.shape[3])
    whole[:, :, : x.shape[2]] = x
    return whole


def _without_cache(layers: int, x: Tensor) -> float:
    """All tokens again for each new one: what the last row loses when the mask is left out."""
    stack = [mha(8, 2, is_causal=True).double() for _ in range(layers)]

    def last(mask: Mask | None) -> Tensor:
        y = x
        for module in stack:
            module.mask = mask
            y = y + 4 * module(y)
        return y[:, -1]

    return _apart(last(None), last(Causal()))


def _padded(x: Tensor) -> tuple[float, float]:
    """A row behind padding, with positions that say so and without."""
    module: Attention = mha(8, 2, is_causal=True).double()
    alone = module(x)[:, -1]
    row = torch.cat([x.flip(1)[:, :3], x], 1)
    where = torch.cat((torch.full((1, 3), -1), torch.arange(x.shape[1])[None]), 1)
    return _apart(module(row, where)[:, -1], alone), _apart(module(row)[:, -1], alone)


@torch.no_grad()
def _measure(_budget: float, seed: int) -> Numbers:
    make = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(1, MOST, 8, generator=make, dtype=torch.float64)
    found = [
        {"step": name, "error": _step(cache(), parts, mask, x, slots="empty slots" in name), "needs": needs}
        for name, (cache, parts, mask, needs) in STEPS.items()
    ]  # fmt: skip
    told, untold = _padded(x[:, :6])
    layers = [{"layers": n, "error": _without_cache(n, 2 * x)} for n in (1, 2, 3)]
    return {"steps": found, "no_cache": layers, "padded": told, "padded_without_positions": untold}


def _apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    found = [
        Check(f"{row['step']}: right without a mask", row["error"], high=1e-13, essential=not row["needs"])
        for row in numbers["steps"]
    ]  # fmt: skip
    one, *more = numbers["no_cache"]
    return [
        *found,
        Check("without a cache, one layer: the last row is right", one["error"], high=1e-12),
        Check("without a cache, more layers: it is too", max(r["error"] for r in more), high=1e-12, essential=False),
        Check("padding on the left, positions told: nothing changes", numbers["padded"], high=1e-13),
        Check("... and not told: nothing changes", numbers["padded_without_positions"], high=1e-13, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    points = tuple((float(r["layers"]), r["error"]) for r in numbers["no_cache"])
    return Picture("Decoding without a cache and without a mask", "layers", "error of the last row", (Line("no mask", points),), "y")  # fmt: skip


CLAIM = Claim(
    id="decode-mask",
    seeds=("S1.12", "S4.27", "E1.6", "E4.5", "X2"),
    says="With a cache a step of decoding needs no mask; other notes say that it does.",
    predicts="None is needed for one query against exactly the keys that it may see, and for no other kind of step.",
    scale="Exact statements; the sizes of the errors are those of random weights.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="Several tokens at once, a window over a longer cache, empty slots, padding, and no cache at all: each needs its mask.",
)
"""S1.12."""
