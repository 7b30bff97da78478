"""The config of DeepSeek-V4: attention to compressed tokens, several residual streams, and mixtures
of experts in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.argument_checks import check_number
from regard.configs.base import SLIDING, ModelConfig, Raw, check_sizes
from regard.configs.hybrid import check_layer_names
from regard.configs.rope import RopeSettings, normalize_rope, shorten
from regard.configs.rotary_decoder import SILU, check_experts
from regard.cost.compressed import CompressedSpec
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.softmax import CausalKeys, SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.errors import ArgumentError

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
HASHED, ROUTED = "hash_moe", "moe"
RATIOS = {0: SLIDING, 4: CSA, 128: HCA}
"""Entry of `compress_ratios` in the makers' files -> the kind of the layer."""
KINDS = {"layer_types": (SLIDING, CSA, HCA), "mlp_layer_types": (HASHED, ROUTED)}
RATES = {CSA: 4, HCA: 128}


@dataclass(frozen=True)
class DeepseekV4Config(ModelConfig):
    """The keys of DeepSeek-V4 that change the network."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    head_dim: int = 512
    q_lora_rank: int = 1024
    qk_rope_head_dim: int = 64
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_rates: Mapping[str, object] = field(default_factory=lambda: dict(RATES))
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    n_routed_experts: int = 256
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: Mapping[str, object] | None = None
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False

    model_types = ("deepseek_v4",)
    family_file = "deepseek_v4"
    code = "Deepseek"
    # the layers that predict a second token are not loaded, and tensors say how they are stored
    ignored = frozenset({"num_nextn_predict_layers", "expert_dtype"})
    fixed = {
        **SILU,
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "n_shared_experts": (1,),
        "norm_topk_prob": (True,),
        "num_key_value_heads": (1,),
        "scoring_func": ("sqrtsoftplus",),
        "topk_method": ("noaux_tc",),
    }

    def __post_init__(self) -> None:
        check_sizes(self)
        check_experts("n_routed_experts", self.n_routed_experts, self.num_experts_per_tok)
        check_number("swiglu_limit", self.swiglu_limit, 0, float("inf"), "above 0")
        for key, allowed in KINDS.items():
            check_layer_names(key, getattr(self, key), self.num_hidden_layers, allowed)
        for kind in (CSA, HCA):
            self.block(kind)
        if self.num_attention_heads * self.head_dim % self.o_groups:
            raise ArgumentError(
                f"o_groups is {self.o_groups}; it must divide num_attention_heads x head_dim, "
                f"{self.num_attention_heads} x {self.head_dim}"
            )
        least = min(self.head_dim, self.index_head_dim)
        if self.qk_rope_head_dim > least or self.qk_rope_head_dim % 2:
            raise ArgumentError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}; it must be even, and at most "
                f"head_dim and index_head_dim, {least}"
            )
        for kind in (SLIDING, CSA):
            if self.rope(kind).is_length_dependent:
                raise ArgumentError(
                    f"rope_scaling is {dict(self.rope_scaling or {})}, whose frequencies depend on "
                    "the length of the text, but a cache stores rotated keys: supported are yarn, "
                    "linear, llama3 and none"
                )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys in transformers' spelling, with the kinds of all layers, and the rotary
        settings of the layers with entries as rope_scaling.
        """
        keys = _normalize_ropes(raw)
        ratios, layers = keys.pop("compress_ratios", None), keys.get("num_hidden_layers")
        if not isinstance(layers, int):
            return keys
        if isinstance(ratios, list):
            # the makers' list also has the layers that predict a second token
            if unknown := [x for x in ratios if x not in RATIOS]:
                raise ArgumentError(
                    f"compress_ratios has {shorten(unknown)}; supported are {sorted(RATIOS)}"
                )
            keys = _with(
                keys, "compress_ratios", "layer_types", [RATIOS[x] for x in ratios[:layers]]
            )
        default = [HCA if i < 2 or i % 2 == 0 else CSA for i in range(layers)]
        keys = _with_default(keys, "layer_types", default)
        hashed = keys.pop("num_hash_layers", None)
        if isinstance(hashed, int):
            first = min(layers, hashed)
            kinds = [HASHED] * first + [ROUTED] * (layers - first)
            keys = _with(keys, "num_hash_layers", "mlp_layer_types", kinds)
        default = [HASHED if i < 3 else ROUTED for i in range(layers)]
        return _with_default(keys, "mlp_layer_types", default)

    def block(self, kind: str) -> int:
        """Return the number of positions per entry in layers of a kind."""
        rate = self.compress_rates.get(kind)
        if isinstance(rate, bool) or not isinstance(rate, int) or rate < 1:
            raise ArgumentError(
                f"compress_rates[{kind!r}] is {shorten(rate)}; it must be a number of at least 1"
            )
        return rate

    def rope(self, kind: str) -> RopeSettings:
        """Return the rotary settings of the last dims in layers of a kind: only layers with entries
        have a scaling, and YaRN multiplies nothing by a factor.
        """
        scaling, theta = self.rope_scaling, self.compress_rope_theta
        if kind == SLIDING:
            scaling, theta = None, self.rope_theta
        elif scaling is not None and scaling.get("rope_type") == "yarn":
            scaling = {"attention_factor": 1.0, **scaling}
        rotated = self.qk_rope_head_dim
        return RopeSettings(
            rotated, theta, scaling, self.max_position_embeddings, layout="interleaved"
        )

    def mixer(self, layer: int) -> Spec:
        """Return the sizes of the attention of a layer."""
        M, H, D = self.hidden_size, self.num_attention_heads, self.head_dim
        rank, d, J = self.q_lora_rank, self.index_head_dim, self.index_n_heads
        kind = self.layer_types[layer]
        maps = rank * (M + H * D) + M * D + self.o_lora_rank * (H * D + self.o_groups * M)
        weights = ParameterCounts(maps, biases=H, norms=rank + D)
        parts = ((1, D),)
        if kind == SLIDING:
            shape = HeadShape(H, 1, D, D)
            return SoftmaxSpec(weights, parts, shape, CausalKeys(self.sliding_window))
        m, sparse = self.block(kind), kind == CSA
        for width in (D, d) if sparse else (D,):
            rows = 2 * width if sparse else width
            weights += ParameterCounts(2 * M * rows, biases=m * rows, norms=width)
        if sparse:
            weights += ParameterCounts(J * (M + rank * d))
        return CompressedSpec(
            weights,
            parts,
            heads=H,
            head_dim=D,
            block=m,
            window=self.sliding_window,
            overlap=sparse,
            index_heads=J if sparse else 0,
            index_dim=d if sparse else 0,
            topk=self.index_topk if sparse else None,
        )

    def feed_forward(self, layer: int) -> MoESpec:
        """Return the sizes of the mixture of experts of a layer, with the maps of the streams."""
        M, n, k = self.hidden_size, self.hc_mult, self.num_experts_per_tok
        numbers = n * (n + 2)
        streams = ParameterCounts(2 * numbers * n * M, biases=2 * (numbers + 3))
        hashed = self.mlp_layer_types[layer] == HASHED
        return MoESpec(
            DenseSpec(M, self.moe_intermediate_size),
            self.n_routed_experts,
            k,
            DenseSpec(M, self.moe_intermediate_size, beside=streams),
            self.vocab_size * k if hashed else self.n_routed_experts,
        )

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, layer by layer."""
        M, n = self.hidden_size, self.hc_mult
        norms = ParameterCounts(norms=2 * M)
        layers = tuple(
            LayerSpec(self.mixer(layer), self.feed_forward(layer), norms)
            for layer in range(self.num_hidden_layers)
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            layers,
            norms=ParameterCounts(n * n * M, biases=n + 1, norms=M),
            tied=self.tie_word_embeddings,
        )


def _with_default(keys: Mapping[str, object], key: str, value: object) -> dict[str, object]:
    """Return the keys with a value for one that is absent or null."""
    return {**keys, key: value} if keys.get(key) is None else dict(keys)


def _with(keys: Mapping[str, object], source: str, key: str, value: object) -> dict[str, object]:
    """Return the keys with the value that another key means, unless they contradict it."""
    if value is None:
        return dict(keys)
    if keys.get(key) not in (None, value):
        raise ArgumentError(
            f"{key} is {shorten(keys[key])}, and {source} means {shorten(value)}; keep one"
        )
    return {**keys, key: value}


def _normalize_ropes(raw: Raw) -> dict[str, object]:
    """Return the keys with rope_theta of the layers with a window only, compress_rope_theta and
    rope_scaling of those with entries, and qk_rope_head_dim.
    """
    nested: Any = raw.get("rope_parameters")
    rest = dict(raw)
    if isinstance(nested, Mapping) and {"main", "compress"} <= nested.keys():
        del rest["rope_parameters"]
        main, other = (
            normalize_rope({"rope_parameters": nested[kind]}) for kind in ("main", "compress")
        )
        if main["rope_scaling"] is not None:
            raise ArgumentError(
                f"rope_parameters.main is {shorten(nested['main'])}; layers with only a window "
                "must have the rope_type 'default'"
            )
        flat_keys = {
            "rope_theta": (main, "rope_theta"),
            "compress_rope_theta": (other, "rope_theta"),
            "rope_scaling": (other, "rope_scaling"),
            "partial_rotary_factor": (other, "partial_rotary_factor"),
        }
        for key, (settings, name) in flat_keys.items():
            rest = _with(rest, "rope_parameters", key, settings.get(name))
        keys: dict[str, Any] = {"rope_scaling": None, **rest}
    else:
        keys = normalize_rope(rest)
    share, D = keys.pop("partial_rotary_factor", None), keys.get("head_dim", 512)
    if share is not None and isinstance(D, int):
        keys = _with(keys, "partial_rotary_factor", "qk_rope_head_dim", int(D * share))
    return keys
