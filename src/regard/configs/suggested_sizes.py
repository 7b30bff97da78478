"""Sizes of a mechanism that a user of `regard cost --mechanisms`, `train`, `compare` or `layer`
leaves out, and of a model that one of `cost` does, taken from published models of about that width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from regard.argument_checks import divisors
from regard.configs.published import PUBLISHED_MODELS, model_of
from regard.cost.head_parts import HEAD_PARTS
from regard.cost.latent import LatentSpec
from regard.cost.mechanism_table import (
    MechanismCost,
    mechanism_cost,
    replace_attention,
    replace_mixers,
)
from regard.cost.mechanisms import MECHANISMS, Sizes
from regard.cost.model import ModelSpec
from regard.cost.report import Setting
from regard.cost.roofline import Machine
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import Spec
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.units import plural
from regard.untrusted_text import short_repr

REFERENCE_MODELS = (
    "qwen2.5-0.5b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "qwen2.5-14b",
    "llama-3.1-70b",
    "llama-3.1-405b",
)
"""Published dense models with grouped-query attention, one for each width."""
MODELS_WITH_LATENTS = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3")
MODELS_WITH_LOCAL_LAYERS = ("gemma-3-1b", "gemma-3-4b", "gpt-oss-20b", "gemma-3-12b", "gemma-3-27b")
LATENT_HEADS, LATENT_HEAD_DIM = 16, 128
"""The fewest heads, and their width, in the published models with latents."""
WINDOW_MODEL = "mistral-7b-v0.1"
"""The published model in which every layer has a window."""
NARROWEST_MODEL = "smollm2-135m"
"""A model narrower than this one is an experiment with short texts: its windows have M/8 tokens."""
SHORT_TEXTS = "M / 8, for short texts"
TOKENS = {**dict.fromkeys(("window", "chunk", "stride", "segment"), 1), "length": 2}
"""The options that are as long as the window of short texts, and how many times."""
NSA_PAPER = "Yuan et al. 2025 (arXiv 2502.11089), section 4.1"
SINKS_PAPER = "Xiao et al. 2023 (arXiv 2309.17453), section 3.2"
INFINI_PAPER = "Munkhdalai et al. 2024 (arXiv 2404.07143), section 3"
LOW_RANK_MODEL = "the config.json of Step-3"
GATED_DELTA_MODEL = "the config.json of Qwen3-Next-80B-A3B"

ALIASES = {
    "window": "sliding_window",
    "linear": "linear_attention",
    "gated_delta": "gated_delta_net",
}
"""Short names of `--mechanisms`, with the names of the catalogue."""
MAIN_OPTION = {
    "gqa": "groups",
    "value_residual": "groups",
    "sliding_window": "window",
    "local_global": "window",
    "mla": "kv_rank",
    "tpa": "rank",
    "mfa": "q_rank",
    "gta": "groups",
    "grouped_latent": "latents",
    "mlra": "latents",
    "nsa": "count",
    "infini": "segment",
    "infini_delta": "segment",
    "chunked": "chunk",
    "longformer": "window",
    "dilated": "window",
    "sparse_strided": "stride",
    "sparse_fixed": "stride",
    "streaming": "recent",
    **dict.fromkeys(("h2o", "tova", "snapkv", "key_norm", "keydiff"), "budget"),
    **dict.fromkeys(("adakv", "expected_attention"), "budget"),
}
"""The option whose value may follow the name of a mechanism without its own name."""
MECHANISM_CHOICES = ("local_global", *MECHANISMS)
"""The names that `--mechanisms` takes."""


@dataclass(frozen=True)
class SizedMechanism:
    """A mechanism with a value for each size that it needs.

    Attributes:
        attention: its name in `regard.cost.mechanisms.MECHANISMS`.
        evidence: its name in `regard.cost.evidence.QUALITY_EVIDENCE`.
        suggested: the options that were not given, with the source of their values.
    """

    label: str
    attention: str
    evidence: str
    options: Mapping[str, int]
    global_every: int | None
    suggested: Mapping[str, str]

    @property
    def sizes(self) -> dict[str, int]:
        """All options, and `every`, the distance of two global layers, where there are any."""
        every = {} if self.global_every is None else {"every": self.global_every}
        return {**self.options, **every}


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes from which those of a mechanism follow: M, H, G, and the tokens of a window where
    texts are short.
    """

    dim: int
    heads: int
    groups: int
    window: int | None

    @classmethod
    def of(
        cls, dim: int, heads: int, groups: int | None = None, window: int | None = None
    ) -> DecoderSizes:
        """Return sizes whose missing ones are those of a published model, or of short texts."""
        if window is None and dim < model_of(NARROWEST_MODEL).dim:
            window = max(8, dim // 64 * 8)
        return cls(
            dim, heads, groups or _groups_like(model_of(reference_model(dim)), heads), window
        )

    def suggest(self, name: str, published: Suggestion | None = None) -> Suggestion:
        """Return the sizes of a mechanism, which may have published ones of its own."""
        sizes = {**(published or {}), **_SUGGESTIONS.get(name, _no_suggestion)(self)}
        if self.window is None:
            return sizes
        short = {k: (self.window * TOKENS[k], SHORT_TEXTS) for k in sizes if k in TOKENS}
        return {**sizes, **short, **_SHORT.get(name, _no_suggestion)(self)}


@dataclass(frozen=True)
class MechanismChoice:
    """The name of a mechanism, and the sizes that a user gave with it."""

    label: str
    name: str
    sizes: Mapping[str, int]

    def sized(self, sizes: DecoderSizes) -> SizedMechanism:
        """Return the mechanism with a value for each size that was not given."""
        suggestion = sizes.suggest(self.name)
        missing = {k: v for k, v in suggestion.items() if k not in self.sizes}
        values = {**{k: v for k, (v, _) in missing.items()}, **self.sizes}
        global_every = values.pop("every", None)
        return SizedMechanism(
            self.label,
            "gqa" if self.name == "local_global" else self.name,
            self.name,
            values,
            global_every,
            {k: source for k, (_, source) in missing.items()},
        )


def split_mechanism(text: str) -> tuple[str, list[str]]:
    """Return the name in a text such as "window:4096" or "mla:kv_rank=64,q_rank=96", as the
    catalogue spells it, and its options as name=value.
    """
    first, *values = re.split(r":|,(?=\w+=)", text.strip())
    spelled = first.lower().replace("-", "_")
    name = ALIASES.get(spelled, spelled)
    main = MAIN_OPTION.get(name, "")
    return name, [x if "=" in x else f"{main}={x}" if main else x for x in values]


def parse_mechanism(text: str, *, any_name: bool = False) -> MechanismChoice:
    """Return the mechanism that a text such as "gqa:8" or "mla:kv_rank=256:q_rank=768" names."""
    name, values = split_mechanism(text)
    first = text.strip().partition(":")[0]
    if name not in MECHANISM_CHOICES and not any_name:
        hint = suggest(first, [*ALIASES, *MECHANISM_CHOICES], cutoff=0.5, otherwise=".")
        raise ArgumentError(
            f"{short_repr(first)} is not a mechanism whose cost is known{hint} Choose among "
            f"{', '.join([*ALIASES, *MECHANISM_CHOICES])}"
        )
    known: dict[str, int] = {}
    for value in values:
        option, _, number = value.rpartition("=")
        if not option or not number.isdecimal() or int(number) < 1:
            form = f"{first}:{MAIN_OPTION[name]}=8" if name in MAIN_OPTION else f"{first}:option=8"
            raise ArgumentError(
                f"{short_repr(value)} in {short_repr(text)} is not a size of {first}; write "
                f"for example {form}, with a whole number of at least 1",
                argument="mechanisms",
            )
        if option in known:
            raise ArgumentError(f"{option} is given twice in {short_repr(text)}; give it once")
        known[option] = int(number)
    return MechanismChoice(text.strip(), name, known)


@dataclass(frozen=True)
class CountedLayer:
    """What a layer of a mechanism costs, its sizes, and the source of those in `suggested`."""

    name: str
    spec: Spec
    options: Mapping[str, int]
    suggested: Mapping[str, str]


LayerCounter: TypeAlias = Callable[["MechanismChoice", "BaseModel"], "CountedLayer"]
"""Counts a mechanism that is not in `MECHANISM_CHOICES`; it builds the layer, which needs torch."""


def reference_model(dim: int, layers: int | None = None) -> str:
    """Return the name of the published dense model whose width is nearest to `dim`."""
    return _nearest(REFERENCE_MODELS, dim, layers)


@dataclass(frozen=True)
class BaseModel:
    """A decoder whose attention is to be replaced, its H and G, and the source of other sizes."""

    model: ModelSpec
    heads: int
    groups: int
    suggested: str = ""

    @property
    def sizes(self) -> DecoderSizes:
        """The sizes from which those of a mechanism follow."""
        return DecoderSizes.of(self.model.dim, self.heads, self.groups)

    @classmethod
    def of(cls, model: ModelSpec) -> BaseModel:
        """Return a model with its own numbers of heads."""
        return cls(model, *_heads_of(model))


def base_model(known: Mapping[str, Any], groups: int | None = None) -> BaseModel:
    """Return a decoder of these sizes; missing ones are those of a published dense model."""
    name = reference_model(known["dim"], known.get("layers"))
    missing = {k: v for k, v in _sizes_like(name, known["dim"]).items() if k not in known}
    sizes = Sizes(**{**missing, **known})
    listed = ", ".join(f"{option} {value:,}" for option, value in missing.items())
    return BaseModel(
        sizes.model("model"),
        sizes.heads,
        groups or _groups_like(model_of(name), sizes.heads),
        f"as {name}: {listed}" if missing else "",
    )


def mechanism_costs(
    names: Iterable[str],
    base: BaseModel,
    setting: Setting,
    machine: Machine | None = None,
    *,
    count_layer: LayerCounter | None = None,
) -> list[MechanismCost]:
    """Return the cost of one model with each of several attention mechanisms."""
    any_name = count_layer is not None
    choices = [parse_mechanism(name, any_name=any_name) for name in names if name.strip()]
    if not choices:
        raise ArgumentError(
            "no mechanism is named; name some, such as mha,gqa:8,mla", argument="mechanisms"
        )
    labels = [choice.label for choice in choices]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ArgumentError(f"{twice[0]} is named twice; name it once")
    return [_row(choice, base, setting, machine, count_layer) for choice in choices]


def _row(
    choice: MechanismChoice,
    base: BaseModel,
    setting: Setting,
    machine: Machine | None,
    count_layer: LayerCounter | None,
) -> MechanismCost:
    """Return the cost of the model with one mechanism."""
    if choice.name in MECHANISM_CHOICES or count_layer is None:
        sized = choice.sized(base.sizes)
        every = sized.global_every
        model = replace_attention(base.model, sized.attention, base.heads, sized.options, every)
        evidence, sizes, suggested = sized.evidence, sized.sizes, sized.suggested
    else:
        layer = count_layer(choice, base)
        model = replace_mixers(base.model, layer.spec)
        evidence, sizes, suggested = layer.name, dict(layer.options), layer.suggested
    return mechanism_cost(
        choice.label,
        model,
        setting,
        machine,
        evidence=evidence,
        options=sizes,
        suggested=suggested,
    )


def _sizes_like(name: str, dim: int) -> dict[str, int]:
    """Return the sizes of a model of width M that is built like a published model."""
    model = model_of(name)
    heads, _ = _heads_of(model)
    width = model.dim // heads
    feed = PUBLISHED_MODELS[name].config["intermediate_size"]
    assert isinstance(feed, int)
    return {
        "layers": len(model.layers),
        "heads": dim // width if dim % width == 0 else heads,
        "ff": feed * dim // model.dim,
        "vocab": model.vocab,
    }


def _heads_of(model: ModelSpec) -> tuple[int, int]:
    """Return H and G, the numbers of query heads and of key/value heads, of a published model."""
    for mixer in model.mixers:
        if isinstance(mixer, SoftmaxSpec):
            return mixer.shape.heads, mixer.shape.groups
        if isinstance(mixer, LatentSpec):
            return mixer.heads, mixer.heads
    raise ArgumentError(
        f"the layers of {model.name} are {', '.join(model.attention_kinds)}; --mechanisms needs a "
        "model with softmax attention, or sizes given as options"
    )


def _groups_like(model: ModelSpec, heads: int) -> int:
    """Return the number of key/value heads for H query heads: the divisor of H that is nearest to
    the number in a published model.
    """
    groups = [x.shape.groups for x in model.mixers if isinstance(x, SoftmaxSpec)]
    wanted = groups[0] if groups else heads
    return min(divisors(heads), key=lambda g: (abs(math.log(g / wanted)), g))


def _nearest(names: Iterable[str], dim: int, layers: int | None = None) -> str:
    def distance(name: str) -> float:
        model = model_of(name)
        depth = 0.0 if layers is None else 0.1 * abs(math.log(layers / len(model.layers)))
        return abs(math.log(dim / model.dim)) + depth

    return min(names, key=distance)


Suggestion = dict[str, tuple[int, str]]
"""Option -> its value and the source of the value."""


def _no_suggestion(sizes: DecoderSizes) -> Suggestion:  # noqa: ARG001
    return {}


def suggested_groups(sizes: DecoderSizes) -> Suggestion:
    """Return the number of key/value heads with its source, as mechanisms take it."""
    model = reference_model(sizes.dim)
    own = next(iter(model_of(model).mixers))
    same = isinstance(own, SoftmaxSpec) and own.shape.groups == sizes.groups
    source = model if same else f"the nearest to {model} that divides {plural(sizes.heads, 'head')}"
    return {"groups": (sizes.groups, source)}


def _window(sizes: DecoderSizes) -> Suggestion:
    layer = next(iter(model_of(WINDOW_MODEL).mixers))
    return {**suggested_groups(sizes), "window": (layer.cached(1 << 40).tokens, WINDOW_MODEL)}


def _local_global(sizes: DecoderSizes) -> Suggestion:
    name = _nearest(MODELS_WITH_LOCAL_LAYERS, sizes.dim)
    cached = [mixer.cached(1 << 40) for mixer in model_of(name).mixers]
    every = 1 + [x.bounded for x in cached].index(False)
    window = next(x.tokens for x in cached if x.bounded)
    return {**suggested_groups(sizes), "window": (window, name), "every": (every, name)}


def _latents(sizes: DecoderSizes, latents: int = 1) -> Suggestion:
    """Return the sizes of MLA with its latent divided into n latents; narrower heads have narrower
    latents, and few heads half of that.
    """
    name = _nearest(MODELS_WITH_LATENTS, sizes.dim)
    config, D = PUBLISHED_MODELS[name].config, sizes.dim // sizes.heads
    narrow = D < LATENT_HEAD_DIM
    few = 1 if sizes.heads >= LATENT_HEADS else 2
    keys = {
        "kv_rank": ("kv_lora_rank", latents * few),
        "q_rank": ("q_lora_rank", few),
        "nope_dim": ("qk_nope_head_dim", 1),
        "rope_dim": ("qk_rope_head_dim", 1),
        "value_dim": ("v_head_dim", 1),
    }
    scaled_sizes: Suggestion = {}
    for option, (key, parts) in keys.items():
        value = config.get(key)
        if isinstance(value, int):
            scaled = value * min(D, LATENT_HEAD_DIM) // (LATENT_HEAD_DIM * parts)
            share = f"{D}/{LATENT_HEAD_DIM * parts}" if narrow else f"1/{parts}"
            source = name if scaled == value else f"{share} of {name}"
            scaled_sizes[option] = (max(2, scaled // 2 * 2), source)
    return scaled_sizes


def _low_rank_query(sizes: DecoderSizes) -> Suggestion:
    rank, width = (2048, 256)
    if sizes.dim >= rank:
        return {"q_rank": (rank, LOW_RANK_MODEL), "head_dim": (width, LOW_RANK_MODEL)}
    D = sizes.dim // sizes.heads
    return {"q_rank": (sizes.dim, "M"), "head_dim": (2 * D, "2 M / H")}


def _selected_blocks(sizes: DecoderSizes) -> Suggestion:
    H = sizes.heads
    shared = min(divisors(H), key=lambda g: (abs(math.log(16 * g / H)), g))
    blocks = {"compress": 32, "stride": 16, "select": 64, "count": 16, "window": 512}
    return {k: (v, NSA_PAPER) for k, v in {"groups": shared, **blocks}.items()}


def _short_blocks(sizes: DecoderSizes) -> Suggestion:
    W = sizes.window or 0
    stride = max(2, W // 8)
    blocks = {"compress": 2 * stride, "stride": stride, "select": 2 * stride, "count": 4}
    return {k: (v, SHORT_TEXTS) for k, v in {**blocks, "window": W // 2}.items()}


def _short_stream(sizes: DecoderSizes) -> Suggestion:
    return {"sinks": (4, SINKS_PAPER), "recent": ((sizes.window or 0) - 4, SHORT_TEXTS)}


def _gated_delta(sizes: DecoderSizes) -> Suggestion:
    return {"value_heads": (2 * sizes.heads, GATED_DELTA_MODEL)}


def _segment(sizes: DecoderSizes) -> Suggestion:  # noqa: ARG001
    return {"segment": (2048, INFINI_PAPER)}


_SHORT: dict[str, Callable[[DecoderSizes], Suggestion]] = {
    "nsa": _short_blocks,
    "streaming": _short_stream,
}
"""What differs where texts are short."""
_SUGGESTIONS: dict[str, Callable[[DecoderSizes], Suggestion]] = {
    "gqa": suggested_groups,
    "value_residual": suggested_groups,
    "sliding_window": _window,
    "local_global": _local_global,
    "mla": _latents,
    "mfa": _low_rank_query,
    "gta": suggested_groups,
    "grouped_latent": partial(_latents, latents=2),
    "mlra": partial(_latents, latents=4),
    "nsa": _selected_blocks,
    "gated_delta_net": _gated_delta,
    "infini": _segment,
    "infini_delta": _segment,
    **{name: suggested_groups for name in HEAD_PARTS if name != "shared_kv"},
}
