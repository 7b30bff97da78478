"""Is a mask needed when a model decodes? Every kind of step, with its mask and without any.

A step is right without a mask exactly when its queries may see every key that it is given: one
query, and no more keys than the mask shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from regard import attend
from regard.caches import Cache, Fixed, Growing, Ring
from regard.claims.claim import DEEPSEEK_NOTE, OVERVIEW, Claim, Criterion, NoteSection, num_steps
from regard.claims.small_training import BYTES, byte_loss, small_decoder, train_on_bytes
from regard.compare.experiment import Numbers
from regard.masks import Causal, Mask, Window
from regard.nn import Attention
from regard.nn.variants import mha
from regard.span import Span, as_tensor
from regard.view.charts import Line, Picture

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
    """How far the last call is from right when it has no mask: all keys that are stored count as
    seen.
    """
    module = mha(8, 2).double()
    at = 0
    for part in x[:, : sum(parts)].split_with_sizes(parts, 1):
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
        {
            "step": name,
            "error": _step(cache(), parts, mask, x, slots="empty slots" in name),
            "needs": needs,
        }
        for name, (cache, parts, mask, needs) in STEPS.items()
    ]
    told, untold = _padded(x[:, :6])
    layers = [{"layers": n, "error": _without_cache(n, 2 * x)} for n in (1, 2, 3)]
    return {"steps": found, "no_cache": layers, "padded": told, "padded_without_positions": untold}


def _apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())


def _checks(numbers: Mapping[str, Any]) -> list[Criterion]:
    found = [
        Criterion(
            f"{row['step']}: error without a mask",
            row["error"],
            high=1e-13,
            role="limit" if row["needs"] else "claim",
        )
        for row in numbers["steps"]
    ]
    return [
        *found,
        Criterion(
            "one token, padding on the left whose positions are told: error",
            numbers["padded"],
            role="reported",
        ),
        Criterion(
            "... and not told: error", numbers["padded_without_positions"], high=1e-13, role="limit"
        ),
    ]


def _checks_always(numbers: Mapping[str, Any]) -> list[Criterion]:
    plain = [row for row in numbers["steps"] if not row["needs"]]
    one, *more = numbers["no_cache"]
    return [
        *(
            Criterion(f"{row['step']}: what goes wrong without a mask", row["error"], low=1e-6)
            for row in plain
        ),
        Criterion(
            "no cache, the whole prefix again, one layer: error of the last row",
            one["error"],
            role="reported",
        ),
        Criterion(
            "... from two layers on: the least error",
            min(r["error"] for r in more),
            role="reported",
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    points = tuple((float(r["layers"]), r["error"]) for r in numbers["no_cache"])
    return Picture(
        "Decoding without a cache and without a mask",
        "layers",
        "error of the last row",
        (Line("no mask", points),),
        "y",
    )


_EXACT = "Exact statements; the sizes of the errors are those of random weights."

CLAIM = Claim(
    id="decode-mask",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.3"),),
    statement="With a cache of keys and values a step of decoding needs no mask.",
    prediction="Without the mask a step gives what it gives with it.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    measured_with="decode-mask",
    takeaway="True of one query against exactly the keys that it may see; several tokens at once, a "
    "window over a longer cache, empty slots and padding need one.",
)

ALWAYS = Claim(
    id="decode-mask-always",
    sources=(NoteSection(OVERVIEW, "6"),),
    statement="At inference each step needs the causal mask, to hide the tokens that are not generated "
    "yet.",
    prediction="Without the mask a step of one token goes wrong.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks_always,
    picture=_picture,
    measured_with="decode-mask",
    takeaway="Such tokens do not exist: with a cache nothing is hidden. Without a cache the mask "
    "hides later tokens from earlier ones, which a second layer reads.",
)

STEPS_OF_TRAINING = 120


def _measure_training(budget: float, seed: int) -> Numbers:
    rows = []
    for name in ("causal", "none"):
        _, model = small_decoder(BYTES, dim=48, layers=2, heads=2, seed=seed)
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        right_masks = [layer.mask for layer in layers]
        if name == "none":
            for layer in layers:
                layer.mask = None
        found = train_on_bytes(model, num_steps(budget, STEPS_OF_TRAINING), context=48, seed=seed)
        as_trained = byte_loss(model, 48, rows=16)
        for layer, mask in zip(layers, right_masks, strict=True):
            layer.mask = mask
        rows.append(
            {
                "trained": name,
                "last": found,
                "as_trained": as_trained,
                "in_use": byte_loss(model, 48, rows=16),
            }
        )
    return {"steps": num_steps(budget, STEPS_OF_TRAINING), "by_mask": rows}


def _checks_training(numbers: Mapping[str, Any]) -> list[Criterion]:
    causal, none = numbers["by_mask"]
    return [
        Criterion(
            "nats per byte lost in use, where each token sees what is before it: trained without "
            "the mask less trained with it",
            none["in_use"] - causal["in_use"],
            high=0.05,
        ),
        Criterion(
            "what it seemed to have learned, with the next byte in sight: nats per byte",
            none["as_trained"],
            role="reported",
        ),
        Criterion("what the other has learned: nats per byte", causal["in_use"], role="reported"),
    ]


def _picture_training(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(
            f"trained {'without a mask' if r['trained'] == 'none' else 'with the causal mask'}",
            ((0.0, r["as_trained"]), (1.0, r["in_use"])),
        )
        for r in numbers["by_mask"]
    )
    return Picture(
        "Loss on text that was not trained on",
        "0 masked as in training, 1 masked as in use",
        "nats per byte",
        lines,
    )


TRAINING = Claim(
    id="training-mask",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.3"),),
    statement="Training needs no mask.",
    prediction="A language model that was trained without one predicts the next token as well.",
    scope="Two layers of width 48 and 120 steps on bytes.",
    measure=_measure_training,
    checks=_checks_training,
    picture=_picture_training,
    takeaway="Training is where a causal language model needs it most: without it, it learns to "
    "copy the answer that it can see.",
)

CLAIMS = (CLAIM, ALWAYS, TRAINING)
