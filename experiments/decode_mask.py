"""Claims about whether a model needs a mask when it decodes, and when it trains.

A step without a mask gives the right output if and only if the mask allows every pair of a query
and a key of that step. This is so for a single query and a cache without masked keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from experiments.claim import DEEPSEEK_NOTE, OVERVIEW, Claim, Criterion, NoteSection, num_steps
from experiments.small_training import BYTES, byte_loss, small_decoder, train_on_bytes
from regard import attend
from regard.caches import Cache, Fixed, Growing, Ring
from regard.compare.experiment import Numbers
from regard.language import Phrase
from regard.masks import Causal, Mask, Window
from regard.nn import Attention
from regard.nn.variants import mha
from regard.span import Span, as_tensor
from regard.view.charts import Line, Picture

WINDOW = Causal() & Window(4)
STEPS: dict[str, tuple[Callable[[], Cache], tuple[int, ...], Mask, bool]] = {
    "one token, all keys cached": (Growing, (6, 1), Causal(), False),
    "one token, a ring of the window": (lambda: Ring(4), (9, 1), WINDOW, False),
    "three tokens at once": (Growing, (6, 3), Causal(), True),
    "a prompt in chunks": (Growing, (4, 4, 4), Causal(), True),
    "one token under a window, all keys cached": (Growing, (9, 1), WINDOW, True),
    "one token, a buffer with empty slots": (lambda: Fixed(16), (6, 1), Causal(), True),
}
"""The kinds of step: the cache, the tokens of each call, the right mask, and whether the last call
needs the mask.
"""
NUM_TOKENS = 24


def _step(cache: Cache, parts: tuple[int, ...], mask: Mask, x: Tensor, *, slots: bool) -> float:
    """Return the last call's error without a mask, with tokens x `[1, N, 8]` or 16 `slots`."""
    module = mha(8, 2).double()
    start = 0
    for part in x[:, : sum(parts)].split_with_sizes(parts, 1):
        positions = Span(start, part.shape[1])
        memory, memory_positions = cache.update(module.project.remember(part, positions), positions)
        start += part.shape[1]
    q, (k, v) = (
        module.project.query(part, positions),
        module.project.recall(memory, memory_positions),
    )
    expected = attend(q, k, v, mask=mask, q_positions=positions, k_positions=memory_positions)
    if slots:
        k, v = _buffer(k), _buffer(v)
    else:
        is_empty = (as_tensor(memory_positions, q.device) < 0)[:, None, :, None]
        k, v = k.masked_fill(is_empty, 0), v.masked_fill(is_empty, 0)
    return _max_difference(attend(q, k, v), expected)


def _buffer(x: Tensor) -> Tensor:
    """Return a buffer of sixteen slots whose first slots hold x."""
    whole = x.new_zeros(*x.shape[:2], 16, x.shape[3])
    whole[:, :, : x.shape[2]] = x
    return whole


def _without_cache(layers: int, x: Tensor) -> float:
    """Return the last row's error without mask and cache: each token computes all rows."""
    stack = [mha(8, 2, is_causal=True).double() for _ in range(layers)]

    def last(mask: Mask | None) -> Tensor:
        y = x
        for module in stack:
            module.mask = mask
            y = y + 4 * module(y)
        return y[:, -1]

    return _max_difference(last(None), last(Causal()))


def _padded(x: Tensor) -> tuple[float, float]:
    """Return the errors of a row after padding: with the right positions, and without positions."""
    module: Attention = mha(8, 2, is_causal=True).double()
    alone = module(x)[:, -1]
    padded_row = torch.cat([x.flip(1)[:, :3], x], 1)
    positions = torch.cat((torch.full((1, 3), -1), torch.arange(x.shape[1])[None]), 1)
    return _max_difference(module(padded_row, positions)[:, -1], alone), _max_difference(
        module(padded_row)[:, -1], alone
    )


@torch.no_grad()
def _measure(_budget: float, seed: int) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(1, NUM_TOKENS, 8, generator=generator, dtype=torch.float64)
    rows = [
        {
            "step": name,
            "error": _step(cache(), parts, mask, x, slots="empty slots" in name),
            "needs": needs,
        }
        for name, (cache, parts, mask, needs) in STEPS.items()
    ]
    with_positions, without_positions = _padded(x[:, :6])
    layers = [{"layers": n, "error": _without_cache(n, 2 * x)} for n in (1, 2, 3)]
    return {
        "steps": rows,
        "no_cache": layers,
        "padded": with_positions,
        "padded_without_positions": without_positions,
    }


def _max_difference(x: Tensor, y: Tensor) -> float:
    """Return the largest absolute difference of two tensors."""
    return float((x - y).abs().max())


def _checks(numbers: Numbers) -> list[Criterion]:
    step_criteria = [
        Criterion(
            Phrase("{step}: error without a mask", step=Phrase(row["step"])),
            row["error"],
            high=1e-13,
            role="limit" if row["needs"] else "claim",
        )
        for row in numbers["steps"]
    ]
    return [
        *step_criteria,
        Criterion(
            "one token after padding on the left, with positions of -1 for padding: error",
            numbers["padded"],
            role="reported",
        ),
        Criterion(
            "one token after padding on the left, without positions: error",
            numbers["padded_without_positions"],
            high=1e-13,
            role="limit",
        ),
    ]


def _checks_always(numbers: Numbers) -> list[Criterion]:
    plain = [row for row in numbers["steps"] if not row["needs"]]
    one, *more = numbers["no_cache"]
    return [
        *(
            Criterion(
                Phrase("{step}: error without a mask", step=Phrase(row["step"])),
                row["error"],
                low=1e-6,
            )
            for row in plain
        ),
        Criterion(
            "without a cache (the whole prefix is computed again), one layer: error of the last "
            "row",
            one["error"],
            role="reported",
        ),
        Criterion(
            "without a cache, two or three layers: smallest error",
            min(r["error"] for r in more),
            role="reported",
        ),
    ]


def _picture(numbers: Numbers) -> Picture:
    points = tuple((float(r["layers"]), r["error"]) for r in numbers["no_cache"])
    return Picture(
        "Decoding without a cache and without a mask",
        "layers",
        "error of the last row",
        (Line("no mask", points),),
        "y",
    )


_EXACT = "Exact; the sizes of the errors depend on the random weights."

CLAIM = Claim(
    id="decode-mask",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.3"),),
    statement="With a cache of keys and values a decoding step needs no mask.",
    prediction="A step gives the same output with and without the mask.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    measured_with="decode-mask",
    takeaway="True of one query with exactly the keys that it may see. Several tokens at once, a "
    "window over a longer cache, empty slots and padding need a mask.",
)

ALWAYS = Claim(
    id="decode-mask-always",
    sources=(NoteSection(OVERVIEW, "6"),),
    statement="At inference each step needs the causal mask, to hide the tokens that are not "
    "generated yet.",
    prediction="Without the mask a step of one token has an error.",
    scope=_EXACT,
    measure=_measure,
    checks=_checks_always,
    picture=_picture,
    measured_with="decode-mask",
    takeaway="Such tokens do not exist yet, so with a cache there is nothing to hide. Without a "
    "cache the mask hides later tokens from earlier ones, whose outputs the second layer reads.",
)

STEPS_OF_TRAINING = 120


def _measure_training(budget: float, seed: int) -> Numbers:
    rows = []
    for name in ("causal", "none"):
        _, model = small_decoder(BYTES, dim=48, layers=2, heads=2, seed=seed)
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        causal_masks = [layer.mask for layer in layers]
        if name == "none":
            for layer in layers:
                layer.mask = None
        last_loss = train_on_bytes(
            model, num_steps(budget, STEPS_OF_TRAINING), context=48, seed=seed
        )
        loss_as_trained = byte_loss(model, 48, rows=16)
        for layer, mask in zip(layers, causal_masks, strict=True):
            layer.mask = mask
        rows.append(
            {
                "trained": name,
                "last": last_loss,
                "as_trained": loss_as_trained,
                "in_use": byte_loss(model, 48, rows=16),
            }
        )
    return {"steps": num_steps(budget, STEPS_OF_TRAINING), "by_mask": rows}


def _checks_training(numbers: Numbers) -> list[Criterion]:
    causal, none = numbers["by_mask"]
    return [
        Criterion(
            "loss with the causal mask, in nats per byte: trained without the mask minus trained "
            "with it",
            none["in_use"] - causal["in_use"],
            high=0.05,
        ),
        Criterion(
            "trained and evaluated without the mask (the next byte is visible): nats per byte",
            none["as_trained"],
            role="reported",
        ),
        Criterion(
            "trained and evaluated with the mask: nats per byte", causal["in_use"], role="reported"
        ),
    ]


def _picture_training(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(
            f"trained {'without a mask' if r['trained'] == 'none' else 'with the causal mask'}",
            ((0.0, r["as_trained"]), (1.0, r["in_use"])),
        )
        for r in numbers["by_mask"]
    )
    return Picture(
        "Loss on text that was not trained on",
        "0 evaluated as trained, 1 evaluated with the causal mask",
        "nats per byte",
        lines,
    )


TRAINING = Claim(
    id="training-mask",
    sources=(NoteSection(DEEPSEEK_NOTE, "1.1.3"),),
    statement="Training needs no mask.",
    prediction="A language model that was trained without a mask predicts the next token equally "
    "well.",
    scope="Two layers of width 48 and 120 steps on bytes.",
    measure=_measure_training,
    checks=_checks_training,
    picture=_picture_training,
    takeaway="A causal language model needs the mask most in training: without it, the model "
    "learns to copy the next token, which it can see.",
)

CLAIMS = (CLAIM, ALWAYS, TRAINING)
