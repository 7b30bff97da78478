"""The output against the definition of attention: scale, softmax, heads, rotary and mask, named by
the fewest faults that reproduce it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.audit.adapters.functions import Function
from regard.audit.adapters.projections import unread
from regard.audit.definition import Given, Steps, attend, factor, finished, qk
from regard.audit.diagnosis import LENGTH, Reading, Search, given, plains
from regard.audit.findings import FAULTS, Finding, finding
from regard.audit.probe import Gap, Probe, gap
from regard.audit.subject import CannotTry, NotApplicable, Subject
from regard.audit.trace import Seen, rotary, softcap, traced

NAMES = {
    ("scale", "none"): "scale-missing",
    ("scale", "twice"): "scale-twice",
    ("scale", "length"): "scale-wrong-dim",
    ("scale", "model_dim"): "scale-wrong-dim",
    ("scale", "inverted"): "scale-inverted",
    ("scale", "fitted"): "scale-wrong",
    ("roles", "keys-values"): "keys-values-exchanged",
    ("roles", "queries-keys"): "queries-keys-exchanged",
    ("roles", "queries-values"): "queries-values-exchanged",
    ("groups", "tiled"): "gqa-head-order",
    ("mask", "inverted"): "mask-polarity",
    ("mask", "own-hidden"): "own-key-hidden",
    ("mask", "own-hidden-first"): "own-key-hidden",
    ("mask", "own-hidden-zero"): "own-key-hidden",
    ("mask", "next-seen"): "future-leak",
    ("mask", "unmasked"): "future-leak",
    ("mask", "one-more"): "window-off-by-one",
    ("mask", "one-less"): "window-off-by-one",
    ("mask", "zeroed"): "mask-zeroed",
    ("mask", "after"): "mask-after-softmax",
    ("softmax", "queries"): "softmax-axis",
    ("softmax", "heads"): "softmax-axis",
    ("softmax", "absent"): "softmax-missing",
    ("softmax", "linear"): "softmax-missing",
    ("softmax", "unnormalised"): "softmax-missing",
    ("softmax", "sigmoid"): "softmax-missing",
    ("softmax", "uniform"): "weights-uniform",
    ("bias", "alibi-grows"): "bias-sign",
    ("bias", "given-back"): "bias-sign",
    ("sink", "renormalised"): "sink-renormalised",
    ("split", "rows"): "heads-split",
    ("join", "rows"): "heads-joined",
    ("output", "absent"): "output-missing",
    ("rotary", "mixed"): "rotary-mixed",
    ("rotary", "mixed-back"): "rotary-mixed",
}
_ROTARY = {
    "heads": "rotary-axis",
    "values": "rotary-values",
    "queries": "rotary-one-sided",
    "each": "rotary-mixed",
    "apart": "rotary-not-relative",
}


LONGEST = 64
"""A longer window is not reached at few tokens; the checks of windows and caches are."""
LONG = (293, 149, 75, 37)
"""Lengths that no block divides; the first that the code takes."""
FEW = 7
"""Queries that are fewer than the keys."""
BLOCKS = (8, 16, 32, 64, 128, 256)


def name_of(field: str, value: str) -> str:
    """The fault's name.

    >>> name_of("rotary", "values-half"), name_of("scale", "none")
    ('rotary-values', 'scale-missing')
    """
    if (field, value) in NAMES:
        return NAMES[field, value]
    return _ROTARY[value.partition("-")[0]]


def explained(probe: Probe, T: int = LENGTH) -> list[Finding]:
    """The output is that of the definition with the code's own weights.

    Where the weights can be read, it is computed from them. Where nothing reproduces it, the
    operations of a module are traced instead, which shows whether other steps (a norm, a gate, a
    latent) stand around attention that is right.

    Raises:
        CannotTry: neither the weights nor the operations can be read.
    """
    W = probe.subject.claim.window
    if W and W + 2 <= LONGEST:
        T = max(T, W + 2)
    if probe.notes.get("by trace"):
        return _traced(probe, T)
    try:
        search = Search(probe, T)
    except NotApplicable:
        raise
    except CannotTry as unread_why:
        return _without_weights(probe, T, str(unread_why))
    if probe.notes.get("differs"):  # a smaller example of an output that nothing explains
        return _differs(search)
    if "softcap" not in probe.notes:
        probe.notes["softcap"] = _softcap(probe)
        search.memo.clear()
    found = search.found()
    if found is not None:
        reading, steps = found
        hidden = [] if steps.wrong or steps.rotary != "none" else _turned(probe)
        if hidden:
            return hidden
        if steps.wrong and _shown(probe, search, reading, steps) is None:
            raise CannotTry(f"{T} tokens show no difference")
        probe.notes.setdefault("reading", reading)
        probe.notes.setdefault("steps", steps)
        return _named(probe, search, reading, steps)
    return _unexplained(probe, search, T)


def _softcap(probe: Probe) -> float | None:
    subject = probe.wide or probe.subject
    return softcap(subject, probe.inputs(1, 3)) if isinstance(subject, Function) else None


def _named(probe: Probe, search: Search, reading: Reading, steps: Steps) -> list[Finding]:
    """A finding for each fault of these steps."""
    shown = _shown(probe, search, reading, steps)
    if shown is None:
        return []
    example, expected, got = shown
    return [
        finding(
            name_of(field, getattr(steps, field)),
            _sentence(steps, field, search, reading),
            example,
            expected,
            got,
        )
        for field in steps.wrong
    ]


def _shown(
    probe: Probe, search: Search, reading: Reading, steps: Steps
) -> tuple[dict[str, int], float, float] | None:
    """Where the output is furthest from what the right steps give, or None where they give the
    same.
    """
    x, out = search.asked[0]
    mended: dict[str, Any] = {name: _right(name, steps) for name in steps.wrong}
    right = Steps(**{**_fields(steps), **mended})
    ref = attend(search.given(reading, x, torch.float64), right)
    if ref.shape == out.shape and gap(out, plains(probe, reading, right, x)[:1], ref) is None:
        return None
    return _furthest(out, ref, reading)


def _furthest(out: Tensor, ref: Tensor, reading: Reading) -> tuple[dict[str, int], float, float]:
    T = out.shape[1]
    sizes = {"heads": reading.maps.heads, "head_dim": reading.maps.head_dim}
    if ref.shape != out.shape:
        return {"T": T, **sizes}, float(ref.numel()), float(out.numel())
    error = (out.double() - ref).abs()
    b, t, c = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return (
        {"T": T, "row": b, "query": t, "feature": c, **sizes},
        float(ref[b, t, c]),
        float(out[b, t, c]),
    )


def _fields(steps: Steps) -> dict[str, Any]:
    return dict(vars(steps))


def _right(name: str, steps: Steps) -> str:
    if name != "rotary":
        return (
            str(getattr(Steps(), name)) if name != "bias" or "alibi" not in steps.bias else "alibi"
        )
    return "interleaved" if steps.rotary.endswith(("interleaved", "mixed")) else "half"


def _sentence(steps: Steps, field: str, search: Search, reading: Reading) -> str:
    others = [name_of(f, getattr(steps, f)) for f in steps.wrong if f != field]
    beside = f" together with {', '.join(others)}" if others else ""
    what = FAULTS[name_of(field, getattr(steps, field))].what.rstrip(".")
    if field == "scale":
        x = search.asked[0][0]
        numbers = search.given(reading, x, torch.float64)
        right = factor(numbers, Steps())
        what += (
            f" ({factor(numbers, steps):.6g} instead of {right:.6g}, with heads of "
            f"{reading.maps.head_dim})"
        )
    return (
        f"{what}: the definition with this fault{beside} reproduces the output, and without it "
        "does not."
    )


# -- outputs that nothing explains


def _unexplained(probe: Probe, search: Search, T: int) -> list[Finding]:
    """No combination of known faults: rounded numbers, other steps, or another fault."""
    rounded = _rounded(probe, search)
    if rounded:
        return rounded
    others = []
    if probe.subject.traced() is not None:
        try:
            return _traced(probe, T)
        except CannotTry as why:
            others = unread(probe.subject.original, [r.maps for r in search.readings])  # type: ignore[attr-defined]
            if others:
                raise CannotTry(
                    "its projections were read, and no plain attention with them reproduces its "
                    "output: it has other "
                    f"steps ({', '.join(others[:3])}), and {why}"
                ) from why
    elif not isinstance(probe.subject, Function):
        raise CannotTry(
            "its projections were read, and no plain attention with them reproduces its output"
        )
    probe.notes["differs"] = True
    return _differs(search)


def _differs(search: Search) -> list[Finding]:
    """The output is none that right steps give."""
    for reading in search.readings:
        for steps in search.rights(reading):
            if search.fits(reading, steps):
                return []
    reading, steps = search.nearest()
    x, out = search.asked[0]
    ref = attend(search.given(reading, x, torch.float64), steps)
    sentence = (
        "No right attention with these weights gives this output, and none with the faults "
        "that have names."
    )
    return [finding("definition-differs", sentence, *_furthest(out, ref, reading))]


def _rounded(probe: Probe, search: Search) -> list[Finding]:
    """Whether the output is right but for numbers that were rounded to half precision on the
    way.
    """
    subject = probe.subject
    if subject.dtype not in (torch.float32, torch.float64):
        return []
    reading, steps = search.nearest()
    x, out = search.asked[-1]
    ref = attend(search.given(reading, x, torch.float64), steps)
    if ref.shape != out.shape:
        return []
    off = out.double() - ref
    size = float(off.abs().max()) / float(ref.abs().max())
    # from the rounding of weights in float16 to that of scores in bfloat16
    if not torch.finfo(torch.float16).eps / 32 <= size <= 4 * torch.finfo(torch.bfloat16).eps:
        return []
    # a small change of the tokens moves a fault a little, and rounding by as much as there is
    make = torch.Generator().manual_seed(5)
    other = x * (1 + 3e-3 * torch.randn(x.shape, generator=make, dtype=x.dtype))
    moved = probe.ask(other).out.double() - attend(
        given(probe, reading, other, torch.float64), steps
    )
    if float((moved - off).abs().max()) < 0.3 * float(off.abs().max()):
        return []
    name = str(subject.dtype).removeprefix("torch.")
    sentence = (
        f"In {name} the output is off by {size:.2g} of its size, as if numbers were "
        "rounded to half precision."
    )
    return [finding("precision-lost", sentence, *_furthest(out, ref, reading))]


def _without_weights(probe: Probe, T: int, why: str) -> list[Finding]:
    """The operations alone, where the weights cannot be read."""
    if why == "its output is not finite":
        return _not_finite(probe, T)
    if probe.subject.traced() is None:
        raise CannotTry(why)
    try:
        return _traced(probe, T)
    except CannotTry as also:
        raise CannotTry(f"{why}; and {also}") from also


def _not_finite(probe: Probe, T: int) -> list[Finding]:
    x = probe.inputs(2, T, turn=3) * 1.5
    out = probe.ask(x).out
    if bool(out.isfinite().all()):
        out = probe.ask(probe.inputs(2, T + 2, turn=3) * 1.5).out
    bad = ~out.isfinite().all(-1)
    t = int(bad.any(0).to(torch.int64).argmax())
    return [
        finding(
            "output-not-finite",
            f"Token {t} of {out.shape[1]} ordinary tokens is NaN or infinite.",
            {"T": out.shape[1], "query": t},
            "finite",
            "nan or inf",
        )
    ]


def _traced(probe: Probe, T: int) -> list[Finding]:
    """What the operations show, at this length; two tokens at least."""
    subject = probe.wide or probe.subject
    x = probe.inputs(1, max(T, 2), turn=3)
    whole = getattr(subject, "pair", None) is None
    if not whole and _weighs_tokens(subject, x):
        probe.notes["by trace"] = True
        return []
    seen = traced(subject, x, subject.claim.scale, subject.width, whole=whole)
    if not seen and whole:
        seen = rotary(subject, x[:, :1].expand(-1, 6, -1).clone())
    probe.notes["by trace"] = True
    return [_told(each, x.shape[1]) for each in seen]


def _weighs_tokens(subject: Subject, x: Tensor) -> bool:
    """Whether the output is the sum of tokens by weights that are returned and sum to 1."""
    reply = subject.ask(x)
    if reply.weights is None or reply.out.shape != x.shape:
        return False
    weights = reply.weights[:, 0]
    close = torch.finfo(weights.dtype).eps ** 0.5
    even = bool(((weights.sum(-1) - 1).abs() < close).all())
    return even and bool(((weights @ x.to(weights.dtype) - reply.out).abs() < close).all())


def _turned(probe: Probe) -> list[Finding]:
    """A rotary that turns by heads cancels where each head has its own keys: the output shows no
    position at all.
    """
    subject = probe.wide or probe.subject
    if subject.traced() is None:
        return []
    x = probe.inputs(1, 1, turn=3).expand(-1, 7, -1).clone()
    try:
        return [_told(each, 7) for each in rotary(subject, x) if each.name == "rotary-axis"]
    except CannotTry:
        return []


def _told(seen: Seen, T: int) -> Finding:
    return finding(seen.name, seen.sentence, {"T": T}, seen.expected, seen.got)


# -- long texts


def long(probe: Probe) -> list[Finding]:
    """The definition holds at a length that no block divides, and with more keys than queries.

    Raises:
        CannotTry: the definition was not found at few tokens, or the code takes no more.
    """
    if probe.notes.get("differs"):
        raise NotApplicable("the definition differs at few tokens already")
    reading, steps = probe.notes.get("reading"), probe.notes.get("steps")
    if reading is None or steps is None:
        if not probe.notes.get("by trace"):
            raise NotApplicable("the definition could not be tried at few tokens")
        return _long_trace(probe)
    if steps.wrong:
        raise NotApplicable("the definition has a fault that is told already")
    refused = None
    for T in LONG:
        try:
            found = _at(probe, reading, steps, T)
        except Exception as error:  # a limit on the length that it tells
            refused = error
            continue
        if not found and isinstance(probe.subject, Function):
            found = _more_keys(probe, probe.subject, reading, steps, T)
        probe.notes["long holds"] = not found
        return found
    raise NotApplicable(f"it takes no long texts: {type(refused).__name__}: {str(refused)[:200]}")


def _long_trace(probe: Probe) -> list[Finding]:
    for T in LONG:
        try:
            x = probe.inputs(1, T, turn=3)
            probe.ask(x)
        except Exception:  # noqa: S112  # a limit on the length that it tells
            continue
        return _traced(probe, T)
    raise NotApplicable("it takes no long texts")


def _at(probe: Probe, reading: Reading, steps: Steps, T: int) -> list[Finding]:
    x = probe.inputs(1, T, turn=3)
    off = _off(probe, reading, steps, x, probe.ask(x).out)
    if off is None:
        return []
    return [_why(probe, reading, steps, x, off)]


def _off(probe: Probe, reading: Reading, steps: Steps, x: Tensor, out: Tensor) -> Gap | None:
    ref = attend(given(probe, reading, x, torch.float64), steps)
    return gap(out, plains(probe, reading, steps, x), ref)


def _why(probe: Probe, reading: Reading, steps: Steps, x: Tensor, off: Gap) -> Finding:
    """The fault of a long text."""
    T, out = x.shape[1], probe.ask(x).out
    answered = (out != 0).any(-1)[0] & out.isfinite().all(-1)[0]
    if out.shape[1] < T or not bool(answered.all()):
        t = out.shape[1] if out.shape[1] < T else int((~answered).to(torch.int64).argmax())
        return finding(
            "queries-dropped",
            f"Query {t} of {T} tokens gets no answer.",
            {"T": T, "query": t},
            "an answer",
            "nothing, or zeros",
        )
    for block in BLOCKS:
        for how in ("neither", "sum", "values"):
            ref = _in_blocks(given(probe, reading, x, torch.float64), steps, block, how)
            if ref is not None and gap(out, plains(probe, reading, steps, x), ref) is None:
                return _blocked(probe, reading, steps, block, off)
    shorter = _shortest(probe, reading, steps, T)
    x = probe.inputs(1, shorter, turn=3)
    ref, out = attend(given(probe, reading, x, torch.float64), steps), probe.ask(x).out
    sentence = f"The definition holds for few tokens, and not for {shorter}."
    return finding("definition-differs", sentence, *_furthest(out, ref, reading))


def _blocked(probe: Probe, reading: Reading, steps: Steps, block: int, off: Gap) -> Finding:
    T = block + 1
    x = probe.inputs(1, T, turn=3)
    smaller = _off(probe, reading, steps, x, probe.ask(x).out)
    told = off if smaller is None else smaller
    example = {"T": LONG[0] if smaller is None else T, "block": block, "output": list(told.at)}
    sentence = (
        f"Blocks of {block} keys are joined without rescaling: the output is what that gives."
    )
    return finding("softmax-not-rescaled", sentence, example, told.expected, told.got)


def _in_blocks(numbers: Given, steps: Steps, block: int, how: str) -> Tensor | None:
    """What an online softmax gives when a new maximum does not rescale what was summed before."""
    if numbers.maps.sinks is not None or steps.bias != "none":
        return None
    products, v = qk(numbers, steps)
    scores = (products * factor(numbers, steps)).masked_fill(~numbers.keep, -torch.inf)
    T = scores.shape[-1]
    tops = torch.stack([s.amax(-1) for s in torch.split(scores, block, -1)], -1).cummax(-1).values
    running = tops.repeat_interleave(block, -1)[..., :T]
    kept = torch.exp(scores - running.masked_fill(running == -torch.inf, 0.0))
    right = torch.exp(scores - tops[..., -1:])
    above, below = {"neither": (kept, kept), "sum": (kept, right), "values": (right, kept)}[how]
    return finished(numbers, steps, (above @ v) / below.sum(-1, keepdim=True))


def _shortest(probe: Probe, reading: Reading, steps: Steps, T: int) -> int:
    """A short length that differs: halving, between one that agrees and one that does not."""
    low, high = 1, T
    while high - low > 1:
        middle = (low + high) // 2
        x = probe.inputs(1, middle, turn=3)
        if _off(probe, reading, steps, x, probe.ask(x).out) is None:
            low = middle
        else:
            high = middle
    return high


def _more_keys(
    probe: Probe, subject: Function, reading: Reading, steps: Steps, T: int
) -> list[Finding]:
    """A few queries against many keys, as with a cache: the last rows of the whole."""
    if "flag" in probe.notes and subject.flag:
        return []  # a flag alone does not say where the queries stand
    x = probe.inputs(1, T, turn=3)
    keep = probe.pattern(FEW, T, causal=reading.causal)[None] if probe.masked else None
    if reading.causal and not probe.masked and not probe.causal:
        return []
    out = subject.last(x, FEW, keep)
    ref = attend(given(probe, reading, x, torch.float64), steps)[:, -FEW:]
    off = gap(out, [p[:, -FEW:] for p in plains(probe, reading, steps, x)], ref)
    if off is None:
        return []
    example = {"T": FEW, "S": T, "output": list(off.at)}
    sentence = (
        f"{FEW} queries against {T} keys give other results than the last {FEW} of {T} queries."
    )
    name = "cache-differs" if reading.causal else "definition-differs"
    return [finding(name, sentence, example, off.expected, off.got)]
