"""The mechanisms that are compared, as decoders of equal sizes or of equal parameter count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from regard.configs.suggested_sizes import DecoderSizes, split_mechanism
from regard.did_you_mean import suggest
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.models.decoder import Decoder
    from regard.models.families.regard import Config

SINKS = 4
"""How many first tokens the mechanism "sinks" always keeps (arXiv 2309.17453, section 3.2)."""

RECURRENT_FAMILIES = ("linear", "memory")
"""Families of the catalogue whose memory is a recurrent state; their models are trained with
several learning rates each.
"""


RECALL_TASKS = {"mqar": 8, "passkey": 4}
"""Recall task -> divisor. The longest rows of a task have the length of a row of text divided by
this number; they are so short that a small model learns the task in a few hundred steps.
"""


@dataclass(frozen=True)
class Shape:
    """The sizes that all compared models share.

    Args:
        dim: M, the width of the model.
        heads: H, the number of query heads.
        hidden: the width of the feed-forward layers; None is 8/3 of dim, rounded up to a multiple
            of 32.
        vocabulary: the number of token ids; 256 is enough for bytes and for the words of the recall
            tasks.
        window: the number of tokens in a sliding window, in a segment of Infini-attention, or in
            the cache of streaming attention (sinks and recent tokens); None is that which `regard
            cost --mechanisms` suggests.
        groups: G, the number of key/value heads; None is that which `regard cost --mechanisms`
            suggests.
        tied: whether the output head is the embedding.
        like: the name of the model that has these sizes; None if they were given.

    Raises:
        ArgumentError: dim / heads, the width of a head, is not an even number, which rotary
            positions need; or the window is too small.

    >>> Shape(dim=64, heads=4).head_dim
    16
    """

    dim: int = 128
    layers: int = 2
    heads: int = 4
    hidden: int | None = None
    vocabulary: int = 256
    window: int | None = None
    groups: int | None = None
    tied: bool = False
    like: str | None = None

    def __post_init__(self) -> None:
        if self.heads < 1 or self.dim % (2 * self.heads):
            raise ArgumentError(
                f"dim {self.dim} / heads {self.heads} is the width of a head and must be an even "
                "number; change one of them",
                argument="dim",
                value=self.dim,
            )
        if self.window is not None and self.window < 2 * SINKS:
            raise ArgumentError(
                f"window is {self.window}; it must be at least {2 * SINKS}, because the mechanism "
                f"sinks keeps the first {SINKS} tokens in it",
                argument="window",
            )

    @property
    def head_dim(self) -> int:
        """D, the width of a head."""
        return self.dim // self.heads

    @property
    def width(self) -> int:
        """The width of the feed-forward layers."""
        return self.hidden or -(-self.dim * 8 // 3 // 32) * 32


@dataclass(frozen=True)
class Candidate:
    """A mechanism of the catalogue with its options, under the name that tables show.

    Args:
        options: its options, as plain values.

    >>> Candidate("mha", "gqa", {"groups": 4}).config(Shape(dim=32)).attention_options
    {'groups': 4}
    """

    name: str
    attention: str
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def recurrent(self) -> bool:
        """Whether its memory is a recurrent state of fixed size."""
        from regard.models.assembly.catalogue_mixer import find_decoder_variant

        return find_decoder_variant(self.attention).family in RECURRENT_FAMILIES

    def config(self, shape: Shape) -> Config:
        """Return the config of a decoder with this mechanism in every layer.

        Args:
            shape: the sizes of the decoder.

        Returns:
            The config, from which `build_decoder` makes the model.

        Raises:
            ArgumentError: the mechanism does not take these options or sizes.
        """
        from regard.models.families.regard import Config

        return Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.dim,
            intermediate_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            attention=self.attention,
            attention_options=dict(self.options),
            tie_word_embeddings=shape.tied,
        )


DEFAULT_MECHANISMS = {
    "mha": "gqa",
    "gqa": "gqa",
    "mqa": "mqa",
    "mla": "mla",
    "window": "sliding_window",
    "sinks": "streaming",
    "linear": "linear_attention",
    "gated-delta": "gated_delta_net",
    "infini": "infini",
    "nsa": "nsa",
}
"""Name -> the mechanism of the catalogue; "mha" has a key/value head for each query head."""

DEFAULT_NAMES = tuple(DEFAULT_MECHANISMS)
"""The mechanisms that are compared if none is named. Each uses all heads, and rotary positions if
it has positions.
"""


def candidates(names: Sequence[str] | None, shape: Shape) -> list[Candidate]:
    """Return the mechanisms of these names.

    Args:
        names: names in `DEFAULT_NAMES`, or in the catalogue with options after a colon:
            "gqa:groups=1", "retention". None is `DEFAULT_NAMES`.
        shape: the sizes from which default options are computed.

    Returns:
        One candidate for each name, in the same order.

    Raises:
        ArgumentError: a name is not known or is given twice, an option does not belong to its
            mechanism, or a size does not fit.

    >>> [c.options for c in candidates(["mqa", "gqa:groups=4"], Shape(dim=64))]
    [{}, {'groups': 4}]
    """
    chosen = [_candidate(name, shape) for name in names or DEFAULT_NAMES]
    chosen_names = [one.name for one in chosen]
    if duplicates := sorted({name for name in chosen_names if chosen_names.count(name) > 1}):
        raise ArgumentError(f"{', '.join(duplicates)} is given twice; name each mechanism once")
    for one in chosen:
        one.config(shape)  # raises if options or sizes do not fit, before anything is measured
    return chosen


def _candidate(text: str, shape: Shape) -> Candidate:
    from regard.models.assembly.catalogue_mixer import decoder_variants
    from regard.nn.variants.registry import named_options, sized_options

    first, colon, settings = text.partition(":")
    attention = split_mechanism(DEFAULT_MECHANISMS.get(first, first))[0]
    if attention not in decoder_variants():
        known = (*DEFAULT_NAMES, *decoder_variants())
        hint = suggest(first, known, otherwise=".")
        raise ArgumentError(
            f"{text!r} is not a mechanism that a decoder can have{hint} The default mechanisms are "
            f"{', '.join(DEFAULT_NAMES)}; regard describe lists the catalogue; options follow a "
            "colon, as in gqa:groups=1",
            argument="names",
        )
    entry, options = named_options(attention + colon + settings)
    if first == "mha":
        options = {"groups": shape.heads, **options}
    sizes = DecoderSizes.of(shape.dim, shape.heads, shape.groups, shape.window)
    return Candidate(text, entry.name, sized_options(entry, options, sizes))


def count_parameters(config: Config) -> int:
    """Return how many parameters a model trains, without building it."""
    import torch

    from regard.models.families.regard import build

    with torch.device("meta"):
        return sum(p.numel() for p in build(config).parameters())


def build_decoder(config: Config, seed: int = 0) -> Decoder:
    """Return a newly initialized model; the global random state is set to the seed."""
    from regard.models.families.regard import build
    from regard.process_state import set_seed

    set_seed(seed)
    return build(config)


MATCHED_BY = ("sizes", "parameters")
"""What all models have in common: their sizes (width, depth and feed-forward width), or their
number of parameters.
"""


def same_parameters(config: Config, wanted: int) -> Config:
    """Return the config with the feed-forward width that gives the model `wanted` parameters, or as
    near as possible.

    Args:
        config: the config of a model.

    Returns:
        The same config with another `intermediate_size`.

    Raises:
        ArgumentError: the model has too many parameters even without feed-forward layers, or the
            nearest number is more than 1 % away.

    >>> shape = Shape(dim=64)
    >>> wanted = count_parameters(Candidate("mha", "gqa", {"groups": 4}).config(shape))
    >>> config = same_parameters(Candidate("mqa", "mqa").config(shape), wanted)
    >>> config.intermediate_size > shape.width, abs(count_parameters(config) / wanted - 1) < 0.01
    (True, True)
    """
    one, two = (count_parameters(replace(config, intermediate_size=n)) for n in (1, 2))
    hidden = 1 + round((wanted - one) / (two - one))
    if hidden >= 1:
        resized = replace(config, intermediate_size=hidden)
        if abs(count_parameters(resized) - wanted) <= 0.01 * wanted:
            return resized
    raise ArgumentError(
        f"{config.attention} has {one:,} parameters with a feed-forward width of 1, and "
        f"{two - one:,} more for each further unit, so that no width gives {wanted:,} within 1 %; "
        "give wider or more layers, or compare models of the same sizes"
    )


def configs(
    mechanisms: Sequence[Candidate], shape: Shape, same: str = "sizes"
) -> dict[str, Config]:
    """Return the config of each mechanism by its name.

    Args:
        mechanisms: the mechanisms; with "parameters", the others get as many parameters as the
            first.
        same: a word of `MATCHED_BY`: "sizes" or "parameters".

    Returns:
        The config of each model, by the name of its mechanism.

    Raises:
        ArgumentError: `same` is another word, or `same_parameters` raises.

    >>> from regard.compare.mechanisms import candidates
    >>> by_name = configs(candidates(["mha", "mqa"], Shape(dim=64)), Shape(dim=64))
    >>> [c.intermediate_size for c in by_name.values()]
    [192, 192]
    """
    if same not in MATCHED_BY:
        raise ArgumentError(
            f"same is {same!r}; it must be {' or '.join(MATCHED_BY)}", argument="same"
        )
    by_name = {one.name: one.config(shape) for one in mechanisms}
    if same == "sizes":
        return by_name
    wanted = count_parameters(next(iter(by_name.values())))
    return {name: same_parameters(config, wanted) for name, config in by_name.items()}
