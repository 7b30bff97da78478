"""The mechanisms that are compared, as decoders of equal width or equal parameter count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from regard.errors import ArgumentError
from regard.models.assembly.mechanism import decoders, entry_of
from regard.models.decoder import Decoder
from regard.models.families.regard import Config, build
from regard.nn.variants.registry import parse
from regard.suggest import suggest

SINKS = 4
"""First tokens that "sinks" never forgets (arXiv 2309.17453, section 3.2)."""

RECURRENT_FAMILIES = ("linear", "memory")
"""Families of the catalogue whose memory is a state: several learning rates are tried for each."""


@dataclass(frozen=True)
class Shape:
    """The sizes that all mechanisms share.

    Attributes:
        dim, layers, heads: M, blocks, and query heads H.
        hidden: the width of the feed-forward layers; None is 8/3 of dim, up to a multiple of 32.
        vocabulary: ids; 256 is enough for bytes and for the words of the recall tasks.
        window: the tokens that a window, a segment or a stream of recent tokens has.

    Raises:
        ArgumentError: dim / heads is no even number: it is the width of a head, and rotary turns
            pairs; window is too small.

    >>> Shape(dim=64, heads=4).head_dim
    16
    """

    dim: int = 128
    layers: int = 2
    heads: int = 4
    hidden: int | None = None
    vocabulary: int = 256
    window: int = 16

    def __post_init__(self) -> None:
        if self.heads < 1 or self.dim % (2 * self.heads):
            raise ArgumentError(
                f"dim {self.dim} / heads {self.heads} must be even: it is a head's width; change "
                "one of them"
            )
        if self.window < 2 * SINKS:
            raise ArgumentError(
                f"window is {self.window}; it must be at least {2 * SINKS}: {SINKS} are sinks in "
                "one of the mechanisms"
            )

    @property
    def head_dim(self) -> int:
        """D."""
        return self.dim // self.heads

    @property
    def width(self) -> int:
        """The width of the feed-forward layers."""
        return self.hidden or -(-self.dim * 8 // 3 // 32) * 32


@dataclass(frozen=True)
class Candidate:
    """A mechanism of the catalogue with its options, under the name that tables show.

    Attributes:
        name: what it is called here.
        attention: the name in the catalogue.
        options: its own, as plain values.

    >>> Candidate("mha", "gqa", {"groups": 4}).config(Shape(dim=32)).attention_options
    {'groups': 4}
    """

    name: str
    attention: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recurrent(self) -> bool:
        """Whether its memory is a state of fixed size."""
        return entry_of(self.attention).family in RECURRENT_FAMILIES

    def config(self, shape: Shape) -> Config:
        """A decoder with this mechanism in every layer.

        Raises:
            ArgumentError: the mechanism does not take these options or sizes.
        """
        return Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.dim,
            intermediate_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            attention=self.attention,
            attention_options=dict(self.options),
        )


def _mla(shape: Shape) -> dict[str, Any]:
    """Return the proportions of DeepSeek-V2: D for nope and value, D/2 for rotary. The latent has
    2 D, since there are few heads here.
    """
    D = shape.head_dim
    rope = max(2, D // 4 * 2)
    return {"kv_rank": 2 * D, "nope_dim": D, "rope_dim": rope, "value_dim": D}


def _nsa(shape: Shape) -> dict[str, Any]:
    """Small blocks, so that a token reads S/d compressed tokens, a window's worth of selected ones,
    and half a window.
    """
    stride = max(2, shape.window // 8)
    return {
        "groups": _groups(shape),
        "compress": 2 * stride,
        "stride": stride,
        "select": 2 * stride,
        "count": 4,
        "window": shape.window // 2,
    }


def _groups(shape: Shape) -> int:
    """Half as many key/value heads as query heads, or one."""
    return shape.heads // 2 if shape.heads % 2 == 0 else 1


_DEFAULT: dict[str, Callable[[Shape], tuple[str, dict[str, Any]]]] = {
    "mha": lambda s: ("gqa", {"groups": s.heads}),
    "gqa": lambda s: ("gqa", {"groups": _groups(s)}),
    "mqa": lambda s: ("mqa", {}),
    "mla": lambda s: ("mla", _mla(s)),
    "window": lambda s: ("sliding_window", {"groups": s.heads, "window": s.window}),
    "sinks": lambda s: ("streaming", {"sinks": SINKS, "recent": s.window - SINKS}),
    "linear": lambda s: ("linear_attention", {}),
    "gated-delta": lambda s: ("gated_delta_net", {}),
    "infini": lambda s: ("infini", {"segment": s.window}),
    "nsa": lambda s: ("nsa", _nsa(s)),
}

DEFAULT_NAMES = tuple(_DEFAULT)
"""The mechanisms that are compared when none is named: each of all heads, rotary where it has
positions.
"""


def candidates(names: Sequence[str] | None, shape: Shape) -> list[Candidate]:
    """The mechanisms of these names.

    Args:
        names: of `DEFAULT_NAMES`; or of the catalogue, with options behind a colon: "gqa:groups=1",
            "retention". None is `DEFAULT_NAMES`.
        shape: the sizes that their options follow.

    Raises:
        ArgumentError: a name is not known or comes twice, an option is not its own, or a size does
            not fit.

    >>> [c.options for c in candidates(["mqa", "gqa:groups=4"], Shape(dim=64))]
    [{}, {'groups': 4}]
    """
    found = [_contestant(name, shape) for name in names or DEFAULT_NAMES]
    known = [one.name for one in found]
    if twice := sorted({name for name in known if known.count(name) > 1}):
        raise ArgumentError(f"{', '.join(twice)} stands there twice; name each mechanism once")
    for one in found:
        one.config(shape)  # refuses what does not fit, before anything is measured
    return found


def _contestant(name: str, shape: Shape) -> Candidate:
    if name in _DEFAULT:
        attention, options = _DEFAULT[name](shape)
        return Candidate(name, attention, options)
    attention, _, settings = name.partition(":")
    if attention not in decoders():
        known = (*DEFAULT_NAMES, *decoders())
        hint = suggest(attention, known, otherwise=".")
        raise ArgumentError(
            f"{name!r} is no mechanism that a decoder can have{hint} The default set is "
            f"{', '.join(DEFAULT_NAMES)}; "
            "regard describe lists the catalogue, whose options stand behind a colon: gqa:groups=1"
        )
    parts = [part for part in settings.split(",") if part]
    return Candidate(name, attention, parse(parts, entry_of(attention)))


def count_parameters(config: Config) -> int:
    """How many numbers a model trains, without building it.

    >>> count_parameters(Candidate("mqa", "mqa").config(Shape(dim=32, layers=1)))
    28256
    """
    with torch.device("meta"):
        return sum(p.numel() for p in build(config).parameters())


def build_decoder(config: Config, seed: int = 0) -> Decoder:
    """A fresh model; the global random state is set to the seed.

    >>> len(build_decoder(Candidate("mqa", "mqa").config(Shape(dim=32, layers=3))).layers)
    3
    """
    torch.manual_seed(seed)
    return build(config)


MATCHED_BY = ("sizes", "count_parameters")
"""What all have in common: width, depth and feed-forward width; or the number of parameters."""


def same_parameters(config: Config, wanted: int) -> Config:
    """The config with the feed-forward width at which the model has as many parameters as wanted,
    or as near as may be.

    Args:
        config: a model's.
        wanted: how many parameters.

    Raises:
        ArgumentError: without any feed-forward layer it has too many already; or the nearest is
            more than 1 % away.

    >>> shape = Shape(dim=64)
    >>> wanted = count_parameters(Candidate("mha", "gqa", {"groups": 4}).config(shape))
    >>> found = same_parameters(Candidate("mqa", "mqa").config(shape), wanted)
    >>> found.intermediate_size > shape.width, abs(count_parameters(found) / wanted - 1) < 0.01
    (True, True)
    """
    one, two = (count_parameters(replace(config, intermediate_size=n)) for n in (1, 2))
    hidden = 1 + round((wanted - one) / (two - one))
    if hidden >= 1:
        found = replace(config, intermediate_size=hidden)
        if abs(count_parameters(found) - wanted) <= 0.01 * wanted:
            return found
    raise ArgumentError(
        f"{config.attention} has {one:,} parameters with a feed-forward width of 1, and each unit "
        f"more has {two - one:,}: "
        f"{wanted:,} cannot be met within 1 %; give wider or more layers, or compare at the same "
        "sizes"
    )


def configs(found: Sequence[Candidate], shape: Shape, same: str = "sizes") -> dict[str, Config]:
    """The config of each mechanism by its name.

    Args:
        found: the mechanisms; with "parameters", the first is the measure of the others.
        shape: the sizes.
        same: a word of `MATCHED_BY`.

    Raises:
        ArgumentError: `same` is another word; or as `same_parameters`.

    >>> from regard.compare.mechanisms import candidates
    >>> found = configs(candidates(["mha", "mqa"], Shape(dim=64)), Shape(dim=64))
    >>> [c.intermediate_size for c in found.values()]
    [192, 192]
    """
    if same not in MATCHED_BY:
        raise ArgumentError(f"same is {same!r}; it must be {' or '.join(MATCHED_BY)}")
    made = {one.name: one.config(shape) for one in found}
    if same == "sizes":
        return made
    wanted = count_parameters(next(iter(made.values())))
    return {name: same_parameters(config, wanted) for name, config in made.items()}
