"""Makes a `Spec` from the name and the options of a mechanism in the catalogue of `regard.nn`.

The names and options are those of `regard describe`; `MECHANISMS` has those that can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from regard.argument_checks import divisors
from regard.cost import recurrent
from regard.cost.infini import InfiniSpec
from regard.cost.latent import LatentSpec
from regard.cost.selected import NSASpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, Spec
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.untrusted_text import short_repr

FREE = frozenset(
    {"base", "scaling", "empty", "feature_map", "dropout", "temperature", "most", "normalise_keys"}
)
"""Options of the catalogue that do not change the cost."""
LARGEST = 1 << 40
"""No size of any model is larger."""
Numbers = Mapping[str, Any]


@dataclass(frozen=True)
class Mechanism:
    """How the spec of a mechanism is made.

    Attributes:
        build: a function of M, H and the options that returns the spec.
        needs, takes: the options that must be given, and those that may be given.
    """

    build: Callable[[int, int, Numbers], Spec]
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()


def _shape(dim: int, heads: int, options: Numbers, *, wide: int = 1, halves: int = 1) -> HeadShape:
    """H, G, D, E: D is M / (halves H), E is `wide` times D, if they are not given."""
    groups, D = options.get("groups", heads), options.get("head_dim")
    if heads % groups:
        allowed = ", ".join(map(str, divisors(heads)))
        raise ArgumentError(
            f"{heads} query heads are not divisible by {groups} key/value heads; allowed are "
            f"{allowed}"
        )
    if D is None:
        if dim % (halves * heads):
            raise ArgumentError(
                f"dim {dim} is not divisible by {halves * heads}, {heads} heads; give head_dim"
            )
        D = dim // (halves * heads)
    return HeadShape(heads, groups, D, options.get("value_dim", wide * D))


def _softmax(dim: int, heads: int, options: Numbers) -> Spec:
    return SoftmaxSpec.of(dim, _shape(dim, heads, options), window=options.get("window"))


def _mqa(dim: int, heads: int, options: Numbers) -> Spec:
    return _softmax(dim, heads, {**options, "groups": 1})


def _latent(dim: int, heads: int, o: Numbers) -> Spec:
    form = o.get("form", "auto")
    if form not in ("auto", "expand", "absorb"):
        raise ArgumentError(f"form is {form!r}; counted are auto, expand and absorb")
    sizes = {name: o[name] for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim")}
    return LatentSpec.of(dim, heads, **sizes, q_rank=o.get("q_rank"), form=form)


def _nsa(dim: int, heads: int, options: Numbers) -> Spec:
    blocks = ("compress", "stride", "select", "count", "window")
    own = {name: options[name] for name in blocks if name in options}
    return NSASpec.of(dim, _shape(dim, heads, options), **own)


def _linear_attention(dim: int, heads: int, options: Numbers) -> Spec:
    return recurrent.linear_attention(dim, _shape(dim, heads, options))


def _retention(dim: int, heads: int, options: Numbers) -> Spec:
    return recurrent.retention(dim, _shape(dim, heads, options, wide=2))


def _gated_linear(dim: int, heads: int, options: Numbers) -> Spec:
    shape = _shape(dim, heads, options, wide=2, halves=2)
    return recurrent.gated_linear(dim, shape, options.get("rank", 16))


def _delta_net(dim: int, heads: int, options: Numbers) -> Spec:
    return recurrent.delta_net(dim, _shape(dim, heads, options))


def _gated_delta_net(dim: int, heads: int, options: Numbers) -> Spec:
    return recurrent.gated_delta_net(dim, _shape(dim, heads, options))


def _infini(*, delta: bool) -> Mechanism:
    def build(dim: int, heads: int, options: Numbers) -> Spec:
        segment = options.get("segment", 2048)
        return InfiniSpec.of(dim, _shape(dim, heads, options), segment, delta=delta)

    return Mechanism(build, takes=frozenset({"groups", "head_dim", "segment"}))


_SIZES = frozenset({"groups", "head_dim", "value_dim"})
MECHANISMS: dict[str, Mechanism] = {
    "mha": Mechanism(_softmax, takes=frozenset({"head_dim", "window"})),
    "gqa": Mechanism(_softmax, frozenset({"groups"}), frozenset({"head_dim", "window"})),
    "mqa": Mechanism(_mqa, takes=frozenset({"head_dim", "window"})),
    "sliding_window": Mechanism(_softmax, frozenset({"groups", "window"}), frozenset({"head_dim"})),
    "mla": Mechanism(
        _latent,
        frozenset({"kv_rank", "nope_dim", "rope_dim", "value_dim"}),
        frozenset({"q_rank", "form"}),
    ),
    "linear_attention": Mechanism(_linear_attention, takes=_SIZES),
    "retention": Mechanism(_retention, takes=_SIZES),
    "gated_linear": Mechanism(_gated_linear, takes=_SIZES | {"rank"}),
    "delta_net": Mechanism(_delta_net, takes=_SIZES),
    "gated_delta_net": Mechanism(_gated_delta_net, takes=_SIZES),
    "infini": _infini(delta=False),
    "infini_delta": _infini(delta=True),
    "nsa": Mechanism(
        _nsa,
        frozenset({"groups"}),
        frozenset({"head_dim", "compress", "stride", "select", "count", "window"}),
    ),
}
"""The mechanisms that can be counted, by their names in the catalogue."""


def mechanism(name: str, dim: int, heads: int, options: Numbers) -> Spec:
    """The spec of one layer of a mechanism.

    Args:
        name: the name in the catalogue.
        dim, heads: M and H.
        options: the options there; one that is None counts as not given.

    Raises:
        ArgumentError: the mechanism cannot be counted, an option is missing or unknown, or
            sizes do not fit one another.

    >>> mechanism("mla", 32, 4, {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}).name
    'MLA 4 heads, latent 16 + 4'
    """
    if name not in MECHANISMS:
        hint = suggest(name, MECHANISMS, cutoff=0.5, otherwise=".")
        raise ArgumentError(
            f"attention {short_repr(name)} is not counted{hint} Known are {', '.join(MECHANISMS)}; "
            "regard describe NAME tells one layer of every mechanism"
        )
    made, given = MECHANISMS[name], {k: v for k, v in options.items() if v is not None}
    if missing := sorted(made.needs - given.keys()):
        raise ArgumentError(f"attention {name!r} needs {', '.join(missing)}: give it")
    if extra := sorted(given.keys() - made.needs - made.takes - FREE):
        takes = ", ".join(sorted(made.needs | made.takes))
        raise ArgumentError(
            f"attention {name!r} has no {', '.join(extra)}; it takes {takes}: leave out the rest, "
            "or choose another"
        )
    for key, value in given.items():
        if (
            key not in FREE
            and key != "form"
            and not (isinstance(value, int) and 1 <= value <= LARGEST)
        ):
            raise ArgumentError(
                f"{key} is {short_repr(value)}; it must be an integer of at least 1 and at most "
                f"{LARGEST}"
            )
    return made.build(dim, heads, given)
