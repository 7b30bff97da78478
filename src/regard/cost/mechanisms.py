"""Mechanisms by the names and options that they have in the catalogue (`regard describe`), as sizes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from regard.arguments import divisors
from regard.cost.mixers import NSA, Heads, Infini, Latent, Mixer, recurrent
from regard.errors import ArgumentError
from regard.foreign import shown

FREE = frozenset(
    {"base", "scaling", "empty", "feature_map", "dropout", "temperature", "most", "normalise_keys"}
)
"""Options of the catalogue that cost nothing."""
LARGEST = 1 << 40
"""No size of any model is larger."""
Numbers = Mapping[str, Any]


@dataclass(frozen=True)
class Mechanism:
    """How the sizes of a layer are made.

    Attributes:
        build: (M, H, options) -> the layer.
        needs, takes: options that must, and that may be given.
    """

    build: Callable[[int, int, Numbers], Mixer]
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()


def _heads(dim: int, heads: int, options: Numbers, *, wide: int = 1, halves: int = 1) -> Heads:
    """H, G, D, E: D is M / (halves H), E is `wide` times D, if they are not given."""
    groups, D = options.get("groups", heads), options.get("head_dim")
    if heads % groups:
        allowed = ", ".join(map(str, divisors(heads)))
        raise ArgumentError(
            f"{heads} query heads are not divisible by {groups} key/value heads; allowed are {allowed}"
        )
    if D is None:
        if dim % (halves * heads):
            raise ArgumentError(
                f"dim {dim} is not divisible by {halves * heads}, {heads} heads; give head_dim"
            )
        D = dim // (halves * heads)
    E = options.get("value_dim", wide * D)
    return Heads(dim, heads, groups, D, E, window=options.get("window"))


def _multi(dim: int, heads: int, options: Numbers) -> Mixer:
    return _heads(dim, heads, {**options, "groups": 1})


def _latent(dim: int, heads: int, o: Numbers) -> Mixer:
    form = o.get("form", "auto")
    if form not in ("auto", "expand", "absorb"):
        raise ArgumentError(f"form is {form!r}; counted are auto, expand and absorb")
    return Latent(
        dim, heads, o["kv_rank"], o["nope_dim"], o["rope_dim"], o["value_dim"], o.get("q_rank"), form=form
    )  # fmt: skip


def _nsa(dim: int, heads: int, options: Numbers) -> Mixer:
    own = {
        k: options[k] for k in ("compress", "stride", "select", "count", "window") if k in options
    }
    return NSA(_heads(dim, heads, {**options, "window": None}), **own)


def _gated_linear(dim: int, heads: int, options: Numbers) -> Mixer:
    sizes = _heads(dim, heads, options, wide=2, halves=2)
    return recurrent.gated_linear(sizes, options.get("rank", 16))


def _infini(*, delta: bool) -> Mechanism:
    def build(dim: int, heads: int, options: Numbers) -> Mixer:
        return Infini(_heads(dim, heads, options), options.get("segment", 2048), delta)

    return Mechanism(build, takes=frozenset({"groups", "head_dim", "segment"}))


_SIZES = frozenset({"groups", "head_dim", "value_dim"})
MECHANISMS: dict[str, Mechanism] = {
    "mha": Mechanism(_heads, takes=frozenset({"head_dim", "window"})),
    "gqa": Mechanism(_heads, frozenset({"groups"}), frozenset({"head_dim", "window"})),
    "mqa": Mechanism(_multi, takes=frozenset({"head_dim", "window"})),
    "sliding_window": Mechanism(_heads, frozenset({"groups", "window"}), frozenset({"head_dim"})),
    "mla": Mechanism(
        _latent, frozenset({"kv_rank", "nope_dim", "rope_dim", "value_dim"}), frozenset({"q_rank", "form"})
    ),
    "linear_attention": Mechanism(lambda *a: recurrent.linear_attention(_heads(*a)), takes=_SIZES),
    "retention": Mechanism(lambda *a: recurrent.retention(_heads(*a, wide=2)), takes=_SIZES),
    "gated_linear": Mechanism(_gated_linear, takes=_SIZES | {"rank"}),
    "delta_net": Mechanism(lambda *a: recurrent.delta_net(_heads(*a)), takes=_SIZES),
    "gated_delta_net": Mechanism(lambda *a: recurrent.gated_delta_net(_heads(*a)), takes=_SIZES),
    "infini": _infini(delta=False),
    "infini_delta": _infini(delta=True),
    "nsa": Mechanism(
        _nsa, frozenset({"groups"}),
        frozenset({"head_dim", "compress", "stride", "select", "count", "window"}),
    ),
}  # fmt: skip
"""Name in the catalogue -> how it is made of sizes."""


def mechanism(name: str, dim: int, heads: int, options: Numbers) -> Mixer:
    """One layer of a mechanism.

    Args:
        name: in the catalogue.
        dim, heads: M and H.
        options: its sizes there; None is as if it were not given.

    Raises:
        ArgumentError: the name is not counted here, an option is missing or is another mechanism's, or sizes do not fit.

    >>> mechanism("mla", 32, 4, {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}).name
    'MLA 4 heads, latent 16 + 4'
    """
    if name not in MECHANISMS:
        close = difflib.get_close_matches(name[:60], MECHANISMS, 1, 0.5)
        better = f"; did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(
            f"attention {shown(name)} is not counted{better} Known are {', '.join(MECHANISMS)}; "
            "regard describe NAME tells one layer of every mechanism"
        )
    made, given = MECHANISMS[name], {k: v for k, v in options.items() if v is not None}
    if missing := sorted(made.needs - given.keys()):
        raise ArgumentError(f"attention {name!r} needs {', '.join(missing)}: give it")
    if extra := sorted(given.keys() - made.needs - made.takes - FREE):
        takes = ", ".join(sorted(made.needs | made.takes))
        raise ArgumentError(
            f"attention {name!r} has no {', '.join(extra)}; it takes {takes}: leave out the rest, or choose another"
        )
    for key, value in given.items():
        if (
            key not in FREE
            and key != "form"
            and not (isinstance(value, int) and 1 <= value <= LARGEST)
        ):
            raise ArgumentError(
                f"{key} is {shown(value)}; it must be an integer of at least 1 and at most {LARGEST}"
            )
    return made.build(dim, heads, given)
