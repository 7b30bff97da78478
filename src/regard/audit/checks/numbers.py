"""Numbers: large scores, low precision, what is saved, and the sums of returned weights."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.audit.findings import Finding, finding
from regard.audit.probe import Probe
from regard.audit.subject import CannotTry, NotApplicable

FACTORS = (4.0, 16.0, 64.0)


def overflow(probe: Probe, T: int = 4) -> list[Finding]:
    """Larger tokens, whose scores the dtype holds when they are scaled, give finite outputs."""
    x = probe.inputs(1, T)
    if not x.is_floating_point():
        raise NotApplicable("tokens are ids, whose size is the model's own")
    for factor in _factors(probe, x):
        out = probe.ask(x * factor).out
        if bool(out.isfinite().all()):
            continue
        i = int((~out.isfinite()).any(-1)[0].to(torch.int64).argmax())
        sentence = (
            f"Tokens of {factor:.4g} times a standard normal make output {i} NaN or infinite."
        )
        return [
            finding(
                "softmax-overflow",
                sentence,
                {"T": T, "times": factor, "query": i},
                "finite",
                "nan or inf",
            )
        ]
    return []


def _factors(probe: Probe, x: Tensor) -> tuple[float, ...]:
    """Factors on tokens; in float16 the one whose scores, once scaled, are half of the largest
    number.
    """
    if probe.subject.dtype != torch.float16:
        return FACTORS
    maps = probe.subject.projections()[0]
    q, k = (x @ w.double().T for w, _ in (maps.q, maps.k))
    q, k = (torch.unflatten(t, -1, (-1, maps.head_dim)).transpose(1, 2) for t in (q, k))
    scores = q @ k.repeat_interleave(maps.heads // maps.groups, 1).mT * maps.head_dim**-0.5
    half = torch.finfo(torch.float16).max / 2
    return ((half / float(scores.abs().max())) ** 0.5,)


def finite(probe: Probe) -> list[Finding]:
    """Every weight is a number."""
    state = probe.subject.state()
    if not state:
        raise NotApplicable("it has no weights")
    for name, x in state.items():
        if x.is_floating_point() and not bool(x.isfinite().all()):
            n = int((~x.isfinite()).sum())
            return [
                finding(
                    "parameters-not-finite",
                    f"{name} has {n} of {x.numel()} values that are not finite.",
                    {"tensor": name},
                    0.0,
                    float(n),
                )
            ]
    return []


def saved(probe: Probe, T: int = 16) -> list[Finding]:
    """No mask and no cache is among the tensors that are saved."""
    state = probe.subject.state()
    if state is None:
        raise NotApplicable("it saves nothing")
    original = getattr(probe.subject, "original", None)
    learned = (
        {name for name, _ in original.named_parameters()} if original is not None else set(state)
    )
    extra = {
        name: x
        for name, x in state.items()
        if name not in learned and not _alias(name, x, state, learned)
    }
    for name, x in extra.items():
        if any(word in name for word in ("cache", "mask")) or _is_mask(x, T):
            size = x.numel() * x.element_size()
            return [
                finding(
                    "cache-in-state-dict",
                    f"{name} {list(x.shape)} is saved with the weights: {size} bytes.",
                    {"tensor": name},
                    0.0,
                    float(size),
                )
            ]
    return []


def _is_mask(x: Tensor, T: int) -> bool:
    """Whether x is square, of at least T, and says yes or no."""
    if x.ndim < 2 or not x.shape[-1] == x.shape[-2] >= T:
        return False
    return bool(((x == 0) | (x == 1) | (x == float("-inf"))).all())


def _alias(name: str, x: torch.Tensor, state: dict[str, torch.Tensor], learned: set[str]) -> bool:
    """Whether it is a parameter under a second name, as tied weights are."""
    return any(
        x.data_ptr() == state[other].data_ptr()
        for other in learned
        if other in state and other != name
    )


def sums(probe: Probe, T: int = 4) -> list[Finding]:
    """Each row of the returned weights sums to 1."""
    if "weights" not in probe.subject.takes:
        raise NotApplicable("it returns no weights")
    x = probe.inputs(1, T)
    weights = probe.ask(x, weights=True).weights
    if weights is None:
        raise CannotTry("it returned no weights when asked")
    rows = weights.double().sum(-1)
    off = (rows - 1).abs()
    # a sum of T rounded numbers, each at most 1
    if float(off.max()) <= 2 * T * torch.finfo(weights.dtype).eps and bool((weights >= 0).all()):
        return []
    b, h, i = (int(n) for n in torch.unravel_index(off.argmax(), off.shape))
    columns = weights.double().sum(-2)
    evenly = float((columns - 1).abs().max()) <= 2 * T * torch.finfo(weights.dtype).eps
    alone = T > 1 and bool((weights == 1).all())  # over an axis of size 1, such as the batch
    name = "softmax-axis" if evenly or alone else "weights-sum"
    sentence = f"The weights of query {i}, head {h} sum to {float(rows[b, h, i]):.6g}"
    sentence += (
        ", and those of each key to 1." if evenly else ": each of them is 1." if alone else "."
    )
    return [finding(name, sentence, {"T": T, "head": h, "query": i}, 1.0, float(rows[b, h, i]))]
