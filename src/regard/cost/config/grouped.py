"""The shape of Llama and its relatives: grouped queries, gated feed-forward layers or experts, RMS norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regard.cost.config.keys import REQUIRED, Keys
from regard.cost.config.windows import windows
from regard.cost.mixers import Dense, Experts, FeedForward, Heads, Weights
from regard.cost.model import Layer, Model
from regard.errors import ArgumentError
from regard.foreign import shown

Windows = Callable[[Keys, int], tuple[int | None, ...]]


def _none(_: Keys, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _everywhere(default: int | None) -> Windows:
    def found(keys: Keys, layers: int) -> tuple[int | None, ...]:
        said = keys.raw.get("sliding_window", default)
        return (said if said is None else keys.size("sliding_window", default=default),) * layers

    return found


def _patterned(width: int, pattern: int) -> Windows:
    def found(keys: Keys, layers: int) -> tuple[int | None, ...]:
        none = keys.raw.get("sliding_window", width) is None
        said = None if none else keys.size("sliding_window", default=width)
        each = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=pattern)
        return windows(keys, layers, said, pattern=None if said is None else each)

    return found


def _from_a_layer_on(keys: Keys, layers: int) -> tuple[int | None, ...]:
    if not keys.flag("use_sliding_window", default=False):
        return (None,) * layers
    first = keys.size("max_window_layers", default=28, least=0)
    return windows(keys, layers, keys.size("sliding_window", default=4096), first=first)


@dataclass(frozen=True)
class Shape:
    """How a `model_type` differs from Llama.

    Attributes:
        bias: whether queries, keys and values have biases; None: as attention_bias says.
        output_bias: whether the output has; None: as attention_bias says.
        head_dim: of a file that names none; None is M / H.
        head_norms: "" for none, "head" for one per head dim, "flat" for one over all heads.
        norms: RMS norms of a block.
        windows: the window of each layer.
        tied: of a file that does not say.
        experts: the layer with experts, where the file has some.
    """

    bias: bool | None = None
    output_bias: bool | None = None
    head_dim: int | None = None
    head_norms: str = ""
    norms: int = 2
    windows: Windows = _none
    tied: bool = False
    experts: Callable[[Keys, int], FeedForward] | None = None
    sinks: bool = False


def _clipped(keys: Keys, dim: int) -> FeedForward:
    count = keys.size("num_local_experts", default=128)
    active = keys.size("num_experts_per_tok", "experts_per_token", default=4)
    expert = Dense(dim, keys.size("intermediate_size"), bias=True)
    return Experts(expert, count, active, router_bias=count)


def _mixtral(keys: Keys, dim: int) -> FeedForward:
    expert = Dense(dim, keys.size("intermediate_size"))
    return Experts(expert, keys.size("num_local_experts"), keys.size("num_experts_per_tok"))


def _qwen3_moe(keys: Keys, dim: int) -> FeedForward:
    expert = Dense(dim, keys.size("moe_intermediate_size"))
    return Experts(expert, keys.size("num_experts"), keys.size("num_experts_per_tok"))


_QWEN3 = Shape(head_dim=128, head_norms="head", windows=_from_a_layer_on)
SHAPES: dict[str, Shape] = {
    "llama": Shape(),
    "mistral": Shape(bias=False, output_bias=False, windows=_everywhere(4096)),
    "mixtral": Shape(bias=False, output_bias=False, windows=_everywhere(None), experts=_mixtral),
    "qwen2": Shape(bias=True, output_bias=False, windows=_from_a_layer_on),
    "qwen3": _QWEN3,
    "qwen3_moe": Shape(head_dim=128, head_norms="head", windows=_from_a_layer_on, experts=_qwen3_moe),
    "gemma": Shape(head_dim=256, tied=True),
    "gemma2": Shape(head_dim=256, norms=4, windows=_patterned(4096, 2), tied=True),
    "gemma3_text": Shape(
        head_dim=256, head_norms="head", norms=4, windows=_patterned(4096, 6), tied=True
    ),
    "olmo2": Shape(head_norms="flat"),
    "phi3": Shape(bias=False, output_bias=False, windows=_everywhere(None)),
    "gpt_oss": Shape(
        bias=True, output_bias=True, head_dim=64, windows=_patterned(128, 2), experts=_clipped, sinks=True
    ),
}  # fmt: skip


def read(keys: Keys, name: str) -> Model:
    """The model of a config with one of these types."""
    shape = SHAPES[keys.get("model_type")]
    M, V, layers = keys.size("hidden_size"), keys.size("vocab_size"), keys.size("num_hidden_layers")
    feed = _feed_forward(keys, M, shape)
    norms = Weights(norms=shape.norms * M)
    return Model(
        name, V, M,
        tuple(Layer(_heads(keys, M, shape, w), feed, norms) for w in shape.windows(keys, layers)),
        norms=Weights(norms=M), tied=keys.flag("tie_word_embeddings", default=shape.tied),
        dtype=keys.dtype,
    )  # fmt: skip


def _feed_forward(keys: Keys, dim: int, shape: Shape) -> FeedForward:
    if shape.experts is not None:
        return shape.experts(keys, dim)
    bias = keys.get("model_type") == "llama" and keys.flag("mlp_bias", default=False)
    return Dense(dim, keys.size("intermediate_size"), bias=bias)


def _heads(keys: Keys, dim: int, shape: Shape, window: int | None) -> Heads:
    H = keys.size("num_attention_heads")
    G = keys.size("num_key_value_heads", default=H)
    keys.heads(H, G)
    D = keys.optional("head_dim", default=shape.head_dim) or keys.divided(dim, H)
    said = keys.flag("attention_bias", default=False)
    sizes = {"": 0, "head": 2 * D, "flat": (H + G) * D}
    return Heads(
        dim, H, G, D, D,
        bias=said if shape.bias is None else shape.bias,
        output_bias=said if shape.output_bias is None else shape.output_bias,
        norms=sizes[shape.head_norms], extra=H if shape.sinks else 0, window=window,
    )  # fmt: skip


def nested(raw: Any) -> dict[str, Any]:
    """The language model in the config of a Gemma 3 that also sees pictures, with what such files leave out.

    >>> nested({"text_config": {"hidden_size": 2560}})["num_attention_heads"]
    8
    """
    sizes = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
    text = Keys(raw, "config.json").get("text_config", default=REQUIRED)
    if not isinstance(text, dict):
        raise ArgumentError(f"config.json: text_config is {shown(text)}; it must be an object")
    return {**sizes, **text, "model_type": "gemma3_text"}
