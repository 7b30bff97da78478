"""Reads a config.json into a `Model` of sizes, without torch.

There is one reader for each group of similar architectures; `READERS` names them. They read only
the keys that change sizes, so that configs with other keys work as well. `regard.load` checks every
key instead (`regard.models.families`), and a test compares the parameters that both make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.cost import layer_types
from regard.cost.feed_forward import Dense, Experts, FeedForward
from regard.cost.latent import LatentSpec
from regard.cost.mechanisms import LARGEST, mechanism
from regard.cost.model import Layer, Model
from regard.cost.softmax import CrossSpec, SoftmaxSpec
from regard.cost.spec import HeadShape, Weights
from regard.errors import ArgumentError, FileError
from regard.files.strict import read_json
from regard.foreign import inert, shown, told
from regard.suggest import suggest

REQUIRED = object()
"""The default of a key that must be there."""
MOST_LAYERS = 1 << 12
"""The most layers of a model: each is counted."""


class Keys:
    """A parsed config.json, read key by key.

    Args:
        raw: what the file holds.
        where: for messages.

    >>> Keys({"n_layer": 2}, "config.json").size("n_layer")
    2
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that is there and not null, or the default.

        Raises:
            ArgumentError: the default is REQUIRED.
        """
        for name in names:
            if (value := self.raw.get(name)) is not None:
                return value
        if default is REQUIRED:
            raise ArgumentError(
                f"{self.where}: {' or '.join(names)} is missing; it is needed to count parameters"
            )
        return default

    def size(self, *names: str, default: Any = REQUIRED, least: int = 1) -> int:
        """The same, an integer from `least` to what any model could have.

        Raises:
            ArgumentError: it is not, or is missing.
        """
        value = self.get(*names, default=default)
        most = MOST_LAYERS if "layer" in names[0] else LARGEST
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ArgumentError(
                f"{self.where}: {names[0]} is {shown(value)}; it must be an integer of at least "
                f"{least} and at most {most}"
            )
        return value

    def optional(self, *names: str, default: int | None = None) -> int | None:
        """A size, or None where it is null or missing."""
        value = self.get(*names, default=default)
        return None if value is None else self.size(*names, default=default)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false.

        Raises:
            ArgumentError: it is something else.
        """
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise ArgumentError(
                f"{self.where}: {names[0]} is {shown(value)}; it must be true or false"
            )
        return value

    def heads(self, heads: int, groups: int) -> None:
        """Check that the query heads are divisible by the key/value heads.

        Raises:
            ArgumentError: they do not.
        """
        if heads % groups:
            raise ArgumentError(
                f"{self.where}: {heads} query heads are not divisible by {groups} key/value heads"
            )

    def divided(self, dim: int, heads: int) -> int:
        """The head dim that a file leaves out.

        Raises:
            ArgumentError: it is not whole.
        """
        if dim % heads:
            raise ArgumentError(
                f"{self.where}: a width of {dim} is not divisible by {heads} heads, and head_dim "
                "is not given"
            )
        return dim // heads

    def width(self, default: int | None) -> int | None:
        """The width of the sliding window; a file that says null has none."""
        if self.raw.get("sliding_window", default) is None:
            return None
        return self.size("sliding_window", default=default)

    def windows(self, layers: int, **rules: Any) -> tuple[int | None, ...]:
        """The window of each layer, by `regard.cost.layer_types.windows`.

        Raises:
            ArgumentError: the keys contradict one another.
        """
        kinds = rules.get("layer_types")
        if kinds is not None and not isinstance(kinds, list):
            raise ArgumentError(f"{self.where}: layer_types is {shown(kinds)}; it must be a list")
        try:
            return layer_types.windows(layers, **rules)
        except ArgumentError as error:
            raise ArgumentError(f"{self.where}: {told(error)}") from None

    @property
    def dtype(self) -> str:
        """The format of the weights, a name in `regard.cost.kv_formats.BITS`; bf16 by default."""
        names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        return names.get(str(self.get("dtype", "torch_dtype")).removeprefix("torch."), "bf16")


Windows = Callable[[Keys, int], tuple[int | None, ...]]
"""A function of the keys and the number of layers that returns the window of each layer."""


def _no_windows(_: Keys, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _same_window(default: int | None) -> Windows:
    """Every layer has the same window, or none."""

    def windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
        return keys.windows(layers, sliding_window=keys.width(default))

    return windows


def _pattern(default: int, pattern: int) -> Windows:
    """Every layer has a window but each `pattern`-th, unless layer_types or a key say otherwise."""

    def windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
        width, kinds = keys.width(default), keys.get("layer_types")
        each = keys.optional("sliding_window_pattern", "_sliding_window_pattern")
        if each is None and kinds is None:
            each = pattern
        return keys.windows(
            layers,
            sliding_window=width,
            layer_types=kinds,
            sliding_window_pattern=None if width is None else each,
        )

    return windows


def _upper_layers(keys: Keys, layers: int) -> tuple[int | None, ...]:
    """The layers from max_window_layers on have a window, if use_sliding_window is true."""
    return keys.windows(
        layers,
        sliding_window=keys.width(4096),
        layer_types=keys.get("layer_types"),
        max_window_layers=keys.size("max_window_layers", default=28, least=0),
        use_sliding_window=keys.flag("use_sliding_window", default=False),
    )


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
    windows: Windows = _no_windows
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


_QWEN3 = Shape(head_dim=128, head_norms="head", windows=_upper_layers)
SHAPES: dict[str, Shape] = {
    "llama": Shape(),
    "mistral": Shape(bias=False, output_bias=False, windows=_same_window(4096)),
    "mixtral": Shape(bias=False, output_bias=False, windows=_same_window(None), experts=_mixtral),
    "qwen2": Shape(bias=True, output_bias=False, windows=_upper_layers),
    "qwen3": _QWEN3,
    "qwen3_moe": Shape(head_dim=128, head_norms="head", windows=_upper_layers, experts=_qwen3_moe),
    "gemma": Shape(head_dim=256, tied=True),
    "gemma2": Shape(head_dim=256, norms=4, windows=_pattern(4096, 2), tied=True),
    "gemma3_text": Shape(
        head_dim=256, head_norms="head", norms=4, windows=_pattern(4096, 6), tied=True
    ),
    "olmo2": Shape(head_norms="flat"),
    "phi3": Shape(bias=False, output_bias=False, windows=_same_window(None)),
    "gpt_oss": Shape(
        bias=True,
        output_bias=True,
        head_dim=64,
        windows=_pattern(128, 2),
        experts=_clipped,
        sinks=True,
    ),
}


def _llama_like(keys: Keys, name: str) -> Model:
    """Llama and its relatives: grouped queries, gated feed-forward layers or experts, RMS norms."""
    shape = SHAPES[keys.get("model_type")]
    M, V, layers = keys.size("hidden_size"), keys.size("vocab_size"), keys.size("num_hidden_layers")
    feed = _feed_forward(keys, M, shape)
    norms = Weights(norms=shape.norms * M)
    return Model(
        name,
        V,
        M,
        tuple(Layer(_heads(keys, M, shape, w), feed, norms) for w in shape.windows(keys, layers)),
        norms=Weights(norms=M),
        tied=keys.flag("tie_word_embeddings", default=shape.tied),
        dtype=keys.dtype,
    )


def _feed_forward(keys: Keys, dim: int, shape: Shape) -> FeedForward:
    if shape.experts is not None:
        return shape.experts(keys, dim)
    bias = keys.get("model_type") == "llama" and keys.flag("mlp_bias", default=False)
    return Dense(dim, keys.size("intermediate_size"), bias=bias)


def _heads(keys: Keys, dim: int, shape: Shape, window: int | None) -> SoftmaxSpec:
    H = keys.size("num_attention_heads")
    G = keys.size("num_key_value_heads", default=H)
    keys.heads(H, G)
    D = keys.optional("head_dim", default=shape.head_dim) or keys.divided(dim, H)
    said = keys.flag("attention_bias", default=False)
    sizes = {"": 0, "head": 2 * D, "flat": (H + G) * D}
    return SoftmaxSpec.of(
        dim,
        HeadShape(H, G, D, D),
        bias=said if shape.bias is None else shape.bias,
        output_bias=said if shape.output_bias is None else shape.output_bias,
        norms=sizes[shape.head_norms],
        extra=H if shape.sinks else 0,
        window=window,
    )


def text_config(raw: Any) -> dict[str, Any]:
    """The language model's part of the config of a multimodal Gemma 3, with its default sizes.

    >>> text_config({"text_config": {"hidden_size": 2560}})["num_attention_heads"]
    8
    """
    sizes = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
    text = Keys(raw, "config.json").get("text_config", default=REQUIRED)
    if not isinstance(text, dict):
        raise ArgumentError(f"config.json: text_config is {shown(text)}; it must be an object")
    return {**sizes, **text, "model_type": "gemma3_text"}


GPT_TYPES = ("gpt2", "gpt_neox", "bloom", "mpt")


def _gpt_like(keys: Keys, name: str) -> Model:
    """GPT-2, GPT-NeoX, BLOOM and MPT: multi-head attention, LayerNorms, and plain MLPs."""
    kind = keys.get("model_type")
    V, M = keys.size("vocab_size"), keys.size("n_embd", "hidden_size", "n_embed", "d_model")
    H = keys.size("n_head", "num_attention_heads", "n_heads")
    layers = keys.size("n_layer", "num_hidden_layers", "n_layers")
    D = keys.divided(M, H)
    bias = kind != "mpt"
    own_bias = keys.flag("attention_bias", default=True) if kind == "gpt_neox" else bias
    inner = {"gpt2": ("n_inner",), "gpt_neox": ("intermediate_size",)}.get(kind, ())
    hidden = keys.size(*inner, default=4 * M) if inner else 4 * M
    norm = Weights(norms=2 * M if bias else M)
    layer = Layer(
        SoftmaxSpec.of(M, HeadShape(H, H, D, D), bias=own_bias, output_bias=own_bias),
        Dense(M, hidden, gated=False, bias=bias),
        norm + norm,
    )
    positions = keys.size("n_positions", "max_position_embeddings") if kind == "gpt2" else 0
    return Model(
        name,
        V,
        M,
        (layer,) * layers,
        positions=positions * M,
        rows=1 if positions else 0,
        longest=positions or None,
        norms=norm + norm if kind == "bloom" else norm,
        tied=keys.flag("tie_word_embeddings", default=kind != "gpt_neox"),
        dtype=keys.dtype,
    )


DEEPSEEK_TYPES = ("deepseek_v2", "deepseek_v3")


def _deepseek(keys: Keys, name: str) -> Model:
    """DeepSeek-V2 and V3: latent attention, and dense layers below mixtures of experts."""
    M, layers = keys.size("hidden_size"), keys.size("num_hidden_layers")
    mixer = LatentSpec.of(
        M,
        keys.size("num_attention_heads"),
        keys.size("kv_lora_rank"),
        keys.size("qk_nope_head_dim"),
        keys.size("qk_rope_head_dim"),
        keys.size("v_head_dim"),
        keys.optional("q_lora_rank"),
        bias=keys.flag("attention_bias", default=False),
    )
    dense: FeedForward = Dense(M, keys.size("intermediate_size"))
    count, width = keys.size("n_routed_experts"), keys.size("moe_intermediate_size")
    # V3's correction of its choice is one number per expert
    correction = count if keys.get("model_type") == "deepseek_v3" else 0
    experts: FeedForward = Experts(
        Dense(M, width),
        count,
        keys.size("num_experts_per_tok"),
        Dense(M, width * keys.size("n_shared_experts")),
        correction,
    )
    first = keys.size("first_k_dense_replace", least=0)
    norms = Weights(norms=2 * M)
    return Model(
        name,
        keys.size("vocab_size"),
        M,
        tuple(Layer(mixer, dense if i < first else experts, norms) for i in range(layers)),
        norms=Weights(norms=M),
        tied=keys.flag("tie_word_embeddings", default=False),
        dtype=keys.dtype,
    )


def _bert(keys: Keys, name: str) -> Model:
    """BERT: an encoder with tables of positions and segments, and a pooler."""
    M, H = keys.size("hidden_size"), keys.size("num_attention_heads")
    D, norm = keys.divided(M, H), Weights(norms=2 * M)
    layer = Layer(
        SoftmaxSpec.of(M, HeadShape(H, H, D, D), bias=True, output_bias=True, causal=False),
        Dense(M, keys.size("intermediate_size"), gated=False, bias=True),
        norm + norm,
    )
    longest = keys.size("max_position_embeddings")
    rows = longest + keys.size("type_vocab_size", default=2)
    return Model(
        name,
        keys.size("vocab_size"),
        M,
        (layer,) * keys.size("num_hidden_layers"),
        positions=rows * M,
        rows=2,
        norms=norm,
        head=False,
        top=Weights(M * M, M),
        decodes=False,
        longest=longest,
        dtype=keys.dtype,
    )


def _t5(keys: Keys, name: str) -> Model:
    """T5: an encoder and a decoder, each with one table of relative position biases per head."""
    M, H, D = keys.size("d_model"), keys.size("num_heads"), keys.size("d_kv")
    layers = keys.size("num_layers")
    gated = str(keys.get("feed_forward_proj", default="relu")).startswith("gated-")
    feed = Dense(M, keys.size("d_ff"), gated=gated)
    buckets = keys.size("relative_attention_num_buckets", default=32) * H
    norm, shape = Weights(norms=M), HeadShape(H, H, D, D)
    reader = Layer(SoftmaxSpec.of(M, shape, causal=False), feed, norm + norm)
    writer = Layer(SoftmaxSpec.of(M, shape), feed, norm + norm + norm, CrossSpec.of(M, shape))
    return Model(
        name,
        keys.size("vocab_size"),
        M,
        (writer,) * keys.size("num_decoder_layers", default=layers),
        (reader,) * layers,
        norms=norm + norm + Weights(biases=2 * buckets),
        tied=keys.flag("tie_word_embeddings", default=True),
        dtype=keys.dtype,
        notes=("the prompt is the encoder's; the decoder's text is counted at the same length",),
    )


_DECODER_OPTIONS = ("is_causal", "bidirectional")
"""Options that a decoder sets itself."""


def _regard(keys: Keys, name: str) -> Model:
    """A model that `regard train` wrote: pre-norm blocks of any mechanism in `MECHANISMS`.

    Raises:
        ArgumentError: its mechanism is not counted here.
    """
    M, H = keys.size("hidden_size"), keys.size("num_attention_heads")
    kind, given = keys.get("attention", default=REQUIRED), keys.get("attention_options", default={})
    if not isinstance(kind, str) or not isinstance(given, dict):
        raise ArgumentError(
            f"{keys.where}: attention is {shown(kind)} and attention_options {shown(given)}; "
            "they must be a text and an object"
        )
    options = {k: v for k, v in given.items() if k not in _DECODER_OPTIONS}
    if (window := keys.optional("window")) is not None:
        options["window"] = window
    if kind == "mha" and options.pop("bias", False):
        raise ArgumentError(f"{keys.where}: mha with bias is not counted; gpt2 has the same shape")
    layer = Layer(
        mechanism(kind, M, H, options),
        Dense(M, keys.size("intermediate_size")),
        Weights(norms=2 * M),
    )
    learned = keys.get("position") == "learned"
    rows = keys.size("max_position_embeddings", default=2048) if learned else 0
    return Model(
        name,
        keys.size("vocab_size"),
        M,
        (layer,) * keys.size("num_hidden_layers"),
        positions=rows * M,
        rows=int(learned),
        longest=rows or None,
        norms=Weights(norms=M),
        tied=keys.flag("tie_word_embeddings", default=False),
        dtype="fp32",
    )


READERS: dict[str, Callable[[Keys, str], Model]] = {
    **dict.fromkeys(SHAPES, _llama_like),
    **dict.fromkeys(GPT_TYPES, _gpt_like),
    **dict.fromkeys(DEEPSEEK_TYPES, _deepseek),
    "bert": _bert,
    "t5": _t5,
    "regard": _regard,
}
"""The function that reads the keys of each model_type."""
UNDERSTOOD: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "moe_layer_freq": (None, 1),
}
"""Keys that change sizes: any other value than these is refused."""


def read(raw: Mapping[str, Any], name: str, where: str = "config.json") -> Model:
    """The model of a parsed config.json.

    Args:
        raw: the keys of Hugging Face; those that do not change sizes are ignored.
        name: what the model is called.
        where: for messages.

    Raises:
        ArgumentError: model_type is not known, or a key is missing, of a wrong type, or has a value
            that is not counted.

    >>> sizes = {"n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
    >>> read({"model_type": "gpt2", "vocab_size": 50257, **sizes}, "gpt2").parameters
    124439808
    """
    kind = raw.get("model_type")
    if kind == "gemma3":
        kind, raw = "gemma3_text", text_config(raw)
    if not isinstance(kind, str) or kind not in READERS:
        hint = suggest(kind, READERS, otherwise=".")
        raise ArgumentError(
            f"{where}: model_type {shown(kind)} is not known{hint} Known are "
            f"{', '.join(sorted(READERS))}; "
            "for another one give the sizes as flags: --layers --dim --heads ..."
        )
    for key, values in UNDERSTOOD.items():
        if raw.get(key) not in values:
            raise ArgumentError(
                f"{where}: {key} is {shown(raw[key])}; only {values[-1]!r} is counted: give the "
                "sizes "
                "as flags"
            )
    return READERS[kind](Keys(raw, where), name)


def read_file(path: Path) -> Model:
    """The model of a config.json, or of the folder that it is in.

    Raises:
        FileError: it is not there, too large, or no JSON object.
        ArgumentError: as `read`.
    """
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise FileError(f"{path} is no file; give a config.json, or the folder that it is in")
    try:
        return read(read_json(path), inert(path.parent.name) or str(path), str(path))
    except FileError:
        raise
    except ArgumentError as error:
        raise ArgumentError(told(error, 2000)) from error
