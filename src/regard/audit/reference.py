"""The definition of attention, in which every step can be replaced by a known fault."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from regard.audit.adapters.base import LinearMap, Projections


@dataclass(frozen=True)
class AttentionVariant:
    """One way to compute attention: each field is one step, and its default is correct."""

    roles: str = "named"
    rotary: str = "none"
    base: float = 10000.0
    rotary_divisor: int = 1
    scale: str = "head_dim"
    factor: float = 0.0
    bias: str = "none"
    sink: str = "right"
    groups: str = "adjacent"
    mask: str = "right"
    softmax: str = "keys"
    split: str = "heads"
    join: str = "heads"
    output: str = "mapped"

    @property
    def faults(self) -> tuple[str, ...]:
        """The names of the fields that have a faulty value."""
        return tuple(
            f.name
            for f in fields(self)
            if f.name in FAULTY_VALUES and getattr(self, f.name) in FAULTY_VALUES[f.name]
        )


CORRECT_ROTARY = ("none", "half", "interleaved")
ROTARY_DIVISORS = (2, 4)
"""A rotary may rotate only the first half or the first quarter of a head."""
FAULTY_VALUES: dict[str, tuple[str, ...]] = {
    "roles": ("keys-values", "queries-keys", "queries-values"),
    "rotary": (
        *("mixed", "mixed-back"),
        *(
            f"{part}-{layout}"
            for part in ("each", "heads", "values", "queries", "opposite")
            for layout in ("half", "interleaved")
        ),
    ),
    "scale": ("none", "twice", "model_dim", "length", "inverted", "fitted"),
    "bias": ("alibi-grows", "given-negated"),
    "sink": ("renormalized",),
    "groups": ("tiled",),
    "softmax": (
        *("queries", "heads", "absent", "linear"),
        *("unnormalized", "exponentials", "sigmoid", "uniform"),
    ),
    "mask": (
        "inverted",
        "own-hidden",
        "own-hidden-first",
        "own-hidden-zero",
        "next-seen",
        "one-more",
        "one-less",
        "unmasked",
        "zeroed",
        "after",
    ),
    "split": ("rows",),
    "join": ("rows",),
    "output": ("absent",),
}
"""The faulty values of each field. These names need an explanation:

rotary: "mixed", "mixed-back": angles in one layout and pairs in the other. "each-*": queries in
    this layout, keys in the other. "heads-*": rotation by the index of the head. "values-*": values
    are rotated, too. "queries-*": only queries are. "opposite-*": keys are rotated backwards.
bias: "alibi-grows", "given-negated": ALiBi, or the given bias, with the wrong sign.
mask: "own-hidden": a query does not see its own key; "-first" excepts the first query, and with
    "-zero" queries without keys have weights of 0. "next-seen": it sees one later key. "one-more",
    "one-less": the window has one key too many or too few. "zeroed": hidden scores are 0.
    "after": weights are set to 0 after the softmax.
split, join: "rows": a reshape without the transpose.
"""


@dataclass(eq=False)
class ReferenceInputs:
    """The inputs of the reference, and intermediate results that several variants share."""

    x: Tensor
    maps: Projections
    keep: Tensor
    scale: float | None = None
    window: int | None = None
    bias: Tensor | None = None
    rounded: bool = False
    softcap: float | None = None
    memo: dict[Hashable, object] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], object]) -> Any:
        """Return the result of `make`, computed once for each key."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


def reference_attention(inputs: ReferenceInputs, variant: AttentionVariant) -> Tensor:
    """Compute self-attention of x [B, T, M] by a variant; the result is [B, T, M] in the dtype of
    x.

    q, k, v = heads of x Wq, x Wk, x Wv;  out = join(softmax(mask(scale(q k^T) + bias)) v) Wo
    """
    products, v = products_and_values(inputs, variant)
    scores = products * score_scale(inputs, variant)
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    bias = _bias(inputs, variant)
    if bias is not None:
        scores = scores + bias
    z = _attention_weights(scores, inputs, variant) @ v
    return join_and_project(inputs, variant, z)


def products_and_values(
    inputs: ReferenceInputs, variant: AttentionVariant
) -> tuple[Tensor, Tensor]:
    """Return the products q k^T [B, H, T, T] before the scale, and v [B, H, T, D]."""
    key = (
        variant.roles,
        variant.rotary,
        variant.base,
        variant.rotary_divisor,
        variant.split,
        variant.groups,
    )

    def make() -> tuple[Tensor, Tensor]:
        q, k, v = _heads(inputs, variant)
        return q @ k.transpose(-1, -2), v

    result: tuple[Tensor, Tensor] = inputs.once(("qk", key), make)
    return result


def _heads(inputs: ReferenceInputs, variant: AttentionVariant) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, H, T, D], and k and v with as many heads."""
    maps = inputs.maps
    H, G, D = maps.heads, maps.groups, maps.head_dim

    def split() -> tuple[Tensor, ...]:
        maps_and_heads = ((maps.q, H), (maps.k, G), (maps.v, G))
        return tuple(_split(_linear(inputs.x, m), n, D, variant.split) for m, n in maps_and_heads)

    q, k, v = inputs.once(("split", variant.split), split)
    if variant.roles == "keys-values":
        k, v = v, k
    elif variant.roles == "queries-keys":
        q, k = k, q
    elif variant.roles == "queries-values":
        q, v = v, q
    q, k, v = _rotate_heads(q, k, v, variant, rounded=inputs.rounded)
    if G != H:
        k, v = (_repeat_heads(t, H // G, variant.groups) for t in (k, v))
    return q, k, v


def join_and_project(inputs: ReferenceInputs, variant: AttentionVariant, z: Tensor) -> Tensor:
    """Join the heads z [B, H, T, D] and map them to the output [B, T, M]."""
    B, H, T, D = z.shape
    joined = (z if variant.join == "rows" else z.transpose(1, 2)).reshape(B, T, H * D)
    maps = inputs.maps
    if maps.o is None or variant.output == "absent":
        return joined
    out = _linear(joined, maps.o)
    if maps.norm is None:
        return out
    weight, bias, eps = maps.norm
    norm_arguments = (
        out + inputs.x,
        (inputs.x.shape[-1],),
        weight.to(out.dtype),
        bias.to(out.dtype),
        eps,
    )
    return torch.nn.functional.layer_norm(*norm_arguments)


def score_scale(inputs: ReferenceInputs, variant: AttentionVariant) -> float:
    """Return the factor by which a variant multiplies the products."""
    D, M = inputs.maps.head_dim, inputs.x.shape[-1]
    correct = D**-0.5 if inputs.scale is None else inputs.scale
    factors = {
        "none": 1.0,
        "twice": correct * correct,
        "model_dim": M**-0.5,
        "length": inputs.x.shape[1] ** -0.5,
        "inverted": 1 / correct,
        "fitted": variant.factor,
    }
    scale: float = factors.get(variant.scale, correct)
    return scale


def alibi_slopes(H: int) -> Tensor:
    """Return ALiBi's slopes for H heads: a geometric series, interleaved if H is not a power of 2.

    Source: Press, Smith and Lewis 2022 (arXiv 2108.12409), section 3.
    """

    def series(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]

    power = 2 ** (H.bit_length() - 1)
    values = series(power) + series(2 * power)[::2][: H - power]
    return torch.tensor(values, dtype=torch.float64)


def alibi_bias(H: int, T: int) -> Tensor:
    """Return -slope * distance for each head, [1, H, T, T]."""
    i = torch.arange(T, dtype=torch.float64)
    return -alibi_slopes(H)[None, :, None, None] * (i[:, None] - i).abs()


def _bias(inputs: ReferenceInputs, variant: AttentionVariant) -> Tensor | None:
    """Return the bias on the scores of a variant, or None."""
    if variant.bias in ("alibi", "alibi-grows"):
        bias: Tensor = inputs.once(
            "alibi", lambda: alibi_bias(inputs.maps.heads, inputs.x.shape[1])
        )
        return (bias if variant.bias == "alibi" else -bias).to(inputs.x.dtype)
    if inputs.bias is None:
        return None
    return inputs.bias.to(inputs.x.dtype) * (-1 if variant.bias == "given-negated" else 1)


def _linear(x: Tensor, weights: LinearMap) -> Tensor:
    """Apply a linear map to x in the dtype of x."""
    weight, bias = weights
    out = x @ weight.to(x.dtype).T
    return out if bias is None else out + bias.to(x.dtype)


def _split(x: Tensor, heads: int, D: int, layout: str) -> Tensor:
    """Split [B, T, heads * D] into [B, heads, T, D]; "rows" is the fault without transpose."""
    B, T, _ = x.shape
    if layout == "rows":  # view as [B,H,T,D] without a transpose
        return x.reshape(B, heads, T, D)
    return x.reshape(B, T, heads, D).transpose(1, 2)


def _repeat_heads(x: Tensor, times: int, order: str) -> Tensor:
    """Repeat each key/value head `times` times, or all in turn for the fault "tiled"."""
    B, G, T, D = x.shape
    if order == "tiled":
        return x.repeat(1, times, 1, 1)
    return x[:, :, None].expand(B, G, times, T, D).reshape(B, G * times, T, D)


def _mask(inputs: ReferenceInputs, how: str) -> Tensor:
    """Return the mask of a variant, bool [T, T]."""
    keep = inputs.keep
    T = keep.shape[0]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    window = T if inputs.window is None else inputs.window
    masks = {
        "inverted": ~keep,
        "own-hidden": keep & (i != j),
        "next-seen": keep | (j == i + 1),
        "own-hidden-first": keep & ((i != j) | (i == 0)),
        "own-hidden-zero": keep & (i != j),
        "unmasked": torch.ones_like(keep),
        "one-more": keep | (i - j == window),
        "one-less": keep & (i - j != window - 1),
    }
    return masks.get(how, keep)


def _attention_weights(
    scores: Tensor, inputs: ReferenceInputs, variant: AttentionVariant
) -> Tensor:
    """Return the weights of scores [B, H, T, S]; a hidden row is uniform, as hidden is -1e9."""
    keep: Tensor = inputs.once(("mask", variant.mask), lambda: _mask(inputs, variant.mask))
    axis = {"queries": -2, "heads": 1}.get(variant.softmax, -1)
    if variant.mask == "zeroed":  # hidden scores become 0 instead of -inf
        return torch.softmax(scores.masked_fill(~keep, 0.0), axis)
    if variant.mask == "after":  # weights are set to 0 after the softmax
        return torch.softmax(scores, axis).masked_fill(~keep, 0.0)
    if variant.softmax in SOFTMAX_REPLACEMENTS:
        return SOFTMAX_REPLACEMENTS[variant.softmax](scores, keep)
    low = -1e9 if scores.dtype != torch.float16 else -6e4
    hidden = scores.masked_fill(~keep, low)
    if inputs.maps.sinks is not None:
        hidden = torch.cat([hidden, _sinks(inputs, scores)], -1)
        weights = torch.softmax(hidden, -1)[..., :-1]
        renormalized = variant.sink == "renormalized"
        return weights / weights.sum(-1, keepdim=True) if renormalized else weights
    weights = torch.softmax(hidden, axis)
    return weights.masked_fill(~keep, 0.0) if variant.mask == "own-hidden-zero" else weights


def _sinks(inputs: ReferenceInputs, scores: Tensor) -> Tensor:
    """Return the sink logits as one more column of scores, [B, H, T, 1]."""
    assert inputs.maps.sinks is not None  # checked by the caller
    B, H, T, _ = scores.shape
    return inputs.maps.sinks.to(scores.dtype).view(1, H, 1, 1).expand(B, H, T, 1)


def _linearly(scores: Tensor, keep: Tensor) -> Tensor:
    """Divide the visible scores by their sum."""
    shown = scores.masked_fill(~keep, 0.0)
    return shown / shown.sum(-1, keepdim=True)


def _exponentials(scores: Tensor, keep: Tensor) -> Tensor:
    """Return exp(score - maximum) without dividing by the sum."""
    shown = scores.masked_fill(~keep, -torch.inf)
    return torch.exp(shown - shown.amax(-1, keepdim=True))


def _evenly(scores: Tensor, keep: Tensor) -> Tensor:
    """Give every visible key the same weight."""
    shown = keep.to(scores.dtype).expand_as(scores)
    return shown / shown.sum(-1, keepdim=True)


SOFTMAX_REPLACEMENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "absent": lambda scores, keep: scores.masked_fill(~keep, 0.0),
    "linear": _linearly,
    "unnormalized": _exponentials,
    "exponentials": lambda scores, keep: scores.exp().masked_fill(~keep, 0.0),
    "sigmoid": lambda scores, keep: torch.sigmoid(scores).masked_fill(~keep, 0.0),
    "uniform": _evenly,
}
"""The functions that faulty code uses instead of a softmax, by `AttentionVariant.softmax`."""


def _rotate_heads(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, *, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the rotary of a variant, correct or faulty, to q, k and v."""
    if variant.rotary == "none":
        return q, k, v
    rotated_part, _, layout = variant.rotary.rpartition("-")
    if variant.rotary in ("mixed", "mixed-back"):
        rotated_part, layout = "", variant.rotary
    axis = 1 if rotated_part == "heads" else 2

    def rotate_head(x: Tensor, how: str = layout, sign: int = 1) -> Tensor:
        n = x.shape[-1] // variant.rotary_divisor
        turned = rotate(x[..., :n], variant.base, how, axis, sign, rounded=rounded)
        return turned if n == x.shape[-1] else torch.cat([turned, x[..., n:]], -1)

    if rotated_part == "queries":
        return rotate_head(q), k, v
    if rotated_part == "each":  # queries have one layout, keys the other
        return rotate_head(q), rotate_head(k, "interleaved" if layout == "half" else "half"), v
    if rotated_part == "opposite":  # keys are rotated in the opposite direction
        return rotate_head(q), rotate_head(k, sign=-1), v
    return rotate_head(q), rotate_head(k), rotate_head(v) if rotated_part == "values" else v


def rotate(
    x: Tensor, base: float, layout: str, axis: int, sign: int = 1, *, rounded: bool = False
) -> Tensor:
    """Rotate the features of x by the positions along an axis: x cos + turn(x) sin."""
    D = x.shape[-1]
    if D % 2:
        raise ValueError("rotary needs an even head dim")
    angle_dtype = torch.float32 if rounded else torch.float64
    inv_freq = base ** (-torch.arange(0, D, 2, dtype=angle_dtype) / D)
    angles = sign * torch.arange(x.shape[axis], dtype=angle_dtype)[:, None] * inv_freq
    interleaved_angles = layout in ("interleaved", "mixed")
    angles = (
        angles.repeat_interleave(2, -1) if interleaved_angles else torch.cat([angles, angles], -1)
    )
    if axis == 1:
        angles = angles[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    interleaved_pairs = layout in ("interleaved", "mixed-back")
    if interleaved_pairs:
        rotated = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        rotated = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * cos + rotated * sin
