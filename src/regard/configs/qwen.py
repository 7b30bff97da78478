"""The configs of Qwen 2 to 3.5, with and without experts, and of Qwen4-Exp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from regard.argument_checks import check_choice
from regard.configs.base import FULL, Raw
from regard.configs.hybrid import LINEAR, GatedDeltaConfig
from regard.configs.rotary_decoder import SILU, DecoderRecipe, Experts, GroupedQueryConfig
from regard.cost.fixed_state import ShortConvolution
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.ngrams import NGramSizes, NGramSpec
from regard.cost.selected import PooledSelection, SelectedSpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class Qwen2Config(GroupedQueryConfig):
    """Qwen 2 and 2.5: Llama with a bias on queries, keys and values; the upper layers may have a
    sliding window. Source: Yang et al. 2024 (arXiv 2407.10671).
    """

    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    model_types = ("qwen2",)
    recipe = DecoderRecipe(qkv_bias=True)
    fixed = {**SILU, "use_mrope": (False,)}


DENSE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
"""The only values of keys that would leave out the experts of some layers."""


SHARING_EXPERTS = Experts(
    "num_experts",
    "moe_intermediate_size",
    normalized="norm_topk_prob",
    shared="shared_expert_intermediate_size",
    shared_gate=True,
)
"""A mixture of experts with an expert for all tokens behind a gate."""


@dataclass(frozen=True)
class Qwen2MoeConfig(Qwen2Config):
    """Qwen1.5-MoE and Qwen2-57B: Qwen 2 with a mixture of experts in every layer, and an expert for
    all tokens behind a gate. Source: Yang et al. 2024 (arXiv 2407.10671), section 2.2.2.
    """

    moe_intermediate_size: int = field(kw_only=True)
    shared_expert_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    norm_topk_prob: bool = field(kw_only=True, default=False)

    model_types = ("qwen2_moe",)
    recipe = DecoderRecipe(
        qkv_bias=True,
        experts=SHARING_EXPERTS,
    )
    fixed = {**SILU, **DENSE, "qkv_bias": (True,)}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Qwen 2; a window of 0 is none."""
        keys = super().normalize_keys(raw)
        if keys.get("sliding_window") == 0 and not keys.get("use_sliding_window"):
            keys["sliding_window"] = None
        return keys


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """Qwen 3: Qwen 2 with a norm on each head of queries and keys, before they are rotated, in
    place of the bias. Source: Yang et al. 2025 (arXiv 2505.09388).
    """

    attention_bias: bool = False

    model_types = ("qwen3",)
    recipe = DecoderRecipe(head_norms="each head")
    fixed = SILU


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """Qwen 3 with a mixture of experts in every layer. Source: Yang et al. 2025 (arXiv 2505.09388),
    section 2.
    """

    moe_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)
    norm_topk_prob: bool = field(kw_only=True, default=False)

    model_types = ("qwen3_moe",)
    recipe = replace(
        Qwen3Config.recipe,
        experts=Experts("num_experts", "moe_intermediate_size", normalized="norm_topk_prob"),
    )
    renamed = {"num_local_experts": "num_experts"}
    fixed = {**SILU, **DENSE}


FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "use_sliding_window": (False,),
}
"""Key -> the only values that Qwen3-Next and Qwen3.5 support."""


@dataclass(frozen=True)
class QwenHybridConfig(GatedDeltaConfig):
    """The keys of Qwen3-Next and Qwen3.5: a layer of gated attention after some of Gated
    DeltaNet.
    """

    max_position_embeddings: int = 32768
    partial_rotary_factor: float = 0.25
    full_attention_interval: int = 4

    family_file = "qwen"
    towers = "visual"
    buffers = (r"mtp\..*",)  # the layer for a second token
    fixed = FIXED
    recipe = DecoderRecipe(norm="rms 1 + w", head_norms="each head")

    def usual_kinds(self) -> tuple[str, ...]:
        """Return the kinds of `full_attention_interval`."""
        n = self.full_attention_interval
        return tuple(FULL if (i + 1) % n == 0 else LINEAR for i in range(self.num_hidden_layers))

    def attention(self, window: int | None = None) -> SoftmaxSpec:
        """Return the sizes of attention with an output gate."""
        spec = super().attention(window)
        gate = self.hidden_size * self.num_attention_heads * self.head_dim
        return replace(spec, weights=spec.weights + ParameterCounts(gate))


@dataclass(frozen=True)
class QwenHybridMoeConfig(QwenHybridConfig):
    """The keys of Qwen3-Next and of Qwen3.5 with experts: a mixture of experts in every layer, with
    an expert for all tokens behind a gate.
    """

    moe_intermediate_size: int = field(kw_only=True)
    shared_expert_intermediate_size: int = field(kw_only=True)
    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)

    recipe = replace(
        QwenHybridConfig.recipe,
        experts=replace(SHARING_EXPERTS, normalized=True),
    )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for the dense model; intermediate_size may be missing."""
        width = raw.get("moe_intermediate_size")
        return super().normalize_keys({"intermediate_size": width, **raw})


@dataclass(frozen=True)
class Qwen3NextConfig(QwenHybridMoeConfig):
    """The keys of Qwen3-Next; by default the expert weights of a token sum to 1."""

    norm_topk_prob: bool = True

    model_types = ("qwen3_next",)
    recipe = replace(QwenHybridConfig.recipe, experts=SHARING_EXPERTS)


PICTURES = frozenset(
    {
        "text_config",
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    }
)
"""Keys of a model that also reads images, which the language model does not have."""


AXES = ("mrope_section", "mrope_interleaved")
"""Keys that say which rotary pairs follow which axis of an image; all axes of a text are equal."""


def _language_model(raw: Raw) -> dict[str, object]:
    """Return the config of the language model, from that of a model that also reads images."""
    text = raw.get("text_config")
    keys = dict(raw)
    if isinstance(text, Mapping):
        keys = {key: value for key, value in raw.items() if key not in PICTURES} | dict(text)
    for name in ("rope_parameters", "rope_scaling"):
        settings = keys.get(name)
        if isinstance(settings, Mapping):
            keys[name] = {key: value for key, value in settings.items() if key not in AXES}
    return keys


_IGNORED = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
"""Another code's dtype of the state, and the layer that predicts a second token: not loaded."""


@dataclass(frozen=True)
class Qwen35Config(QwenHybridConfig):
    """The keys of Qwen3.5 with dense layers, in `text_config` if the model reads images."""

    model_types = ("qwen3_5_text", "qwen3_5")
    ignored = _IGNORED

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model, as for Qwen3-Next."""
        return super().normalize_keys(_language_model(raw))


@dataclass(frozen=True)
class Qwen35MoeConfig(QwenHybridMoeConfig):
    """The keys of the language model of Qwen3.5 with experts."""

    model_types = ("qwen3_5_moe_text", "qwen3_5_moe")
    ignored = _IGNORED
    fixed = FIXED | {"norm_topk_prob": (True,)}

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model, as for Qwen3-Next."""
        return super().normalize_keys(_language_model(raw))


INDEXED = "indexed_attention"
"""The name that transformers gives to layers of attention with an indexer."""
MAX_TABLES, MAX_TABLE_ROWS = 1 << 12, 1 << 28
"""The largest numbers of tables of n-grams in a model, and of rows in the smallest of them."""


@dataclass(frozen=True)
class Qwen4ExpConfig(QwenHybridMoeConfig):
    """The keys of the language model of Qwen4-Exp: Qwen3.5 with experts, whose layers read several
    gated streams, attend to the tokens of chosen blocks, and may add hashed n-grams.
    """

    norm_topk_prob: bool = True
    hc_count: int = 4
    hc_lowrank: int = 320
    indexer_n_heads: int = field(kw_only=True)
    indexer_kv_heads: int = 1
    indexer_head_dim: int = field(kw_only=True)
    indexer_budget: int = field(kw_only=True)
    indexer_compress_ratio: int = field(kw_only=True)
    output_gate_type: str = "silu"
    ple_layer_ids: tuple[int, ...] = ()
    ple_embed_dim: int = field(kw_only=True)
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234
    split_ngram_parts: int = 512
    eos_token_id: int | None = None
    partial_rotary_factor: float = 1.0

    model_types = ("qwen4_exp_text", "qwen4_exp")
    zero = (*QwenHybridMoeConfig.zero, "eos_token_id", "seed")
    recipe = replace(QwenHybridConfig.recipe, experts=SHARING_EXPERTS)
    ignored = _IGNORED | {"number_of_conv_states"}  # how another code caches

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("output_gate_type", self.output_gate_type, ("silu", "sigmoid"))
        if self.indexer_kv_heads != 1:
            raise ArgumentError(
                f"indexer_kv_heads is {self.indexer_kv_heads}; only 1 is supported, as in the "
                "published model"
            )
        if self.indexer_budget % self.indexer_compress_ratio:
            raise ArgumentError(
                f"indexer_budget is {self.indexer_budget}; it must be a multiple of "
                f"indexer_compress_ratio, {self.indexer_compress_ratio}"
            )
        self._check_ngrams()

    def _check_ngrams(self) -> None:
        """Check the layers and the tables of n-grams."""
        kinds = self.kinds()
        for number in self.ple_layer_ids:
            if not 1 <= number <= len(kinds) or kinds[number - 1] != LINEAR:
                raise ArgumentError(
                    f"ple_layer_ids has {number}; it must have numbers of layers, from 1 to "
                    f"{len(kinds)}, whose kind is {LINEAR}"
                )
        if not self.ple_layer_ids:
            return
        if self.eos_token_id is None:
            raise ArgumentError(
                "eos_token_id is missing; layers with n-grams (ple_layer_ids) need the id that "
                "ends a text"
            )
        tables = (self.ngram_size - 1) * self.heads_per_ngram
        if tables < 1 or self.ple_embed_dim % tables or self.ngram_size > 1 << 8:
            raise ArgumentError(
                f"ngram_size is {self.ngram_size} and heads_per_ngram {self.heads_per_ngram}, "
                f"{tables} tables; ngram_size must be from 2 to 256, and the tables must divide "
                f"ple_embed_dim, {self.ple_embed_dim}"
            )
        tables *= len(self.ple_layer_ids)
        if tables > MAX_TABLES or self.ngram_vocab_size_base > MAX_TABLE_ROWS:
            raise ArgumentError(
                f"ngram_vocab_size_base is {self.ngram_vocab_size_base}, for "
                f"{plural(tables, 'table')} in all layers; it must be at most {MAX_TABLE_ROWS}, "
                f"for at most {MAX_TABLES} tables"
            )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model, with the kinds of layers as for Qwen3.5."""
        keys = super().normalize_keys(_language_model(raw))
        names = keys.get("layer_types")
        if isinstance(names, (list, tuple)):
            keys["layer_types"] = [FULL if name == INDEXED else name for name in names]
        end, numbers = keys.get("eos_token_id"), keys.get("ple_layer_ids")
        if isinstance(end, (list, tuple)):
            keys["eos_token_id"] = end[0] if end else None
        if isinstance(numbers, (list, tuple)):  # transformers sorts them, too
            whole = [x for x in numbers if isinstance(x, int)]
            keys["ple_layer_ids"] = sorted(set(whole)) if len(whole) == len(numbers) else numbers
        defaults: dict[str, object] = {"output_gate_type": "silu", "ple_layer_ids": []}
        defaults["ple_embed_dim"] = keys.get("hidden_size")
        return keys | {key: x for key, x in defaults.items() if keys.get(key) is None}

    def mixer(self, layer: int, window: int | None) -> Spec:
        """Return the sizes of attention to chosen blocks, or of Gated DeltaNet."""
        if self.kinds()[layer] != FULL:
            return self.recurrent()
        full, M, d = self.attention(), self.hidden_size, self.indexer_head_dim
        J, block = self.indexer_n_heads, self.indexer_compress_ratio
        return SelectedSpec(
            full.weights + ParameterCounts(M * d * (J + 1), norms=2 * d),
            (*full.parts, (1, d)),
            full.shape,
            PooledSelection(J, d, block, self.indexer_budget // block, d),
        )

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """Return the sizes of the mixture of experts, with the maps of the streams."""
        spec, M, n = super().feed_forward(layer), self.hidden_size, self.hc_count
        assert isinstance(spec, MoESpec)
        assert isinstance(spec.shared, DenseSpec)
        streams = ParameterCounts(4 * n * M * self.hc_lowrank + 2 * n * n * M)
        return replace(spec, shared=replace(spec.shared, beside=streams))

    def ngrams(self, layer: int) -> NGramSizes | None:
        """Return the sizes of the n-grams of a layer, or None."""
        if layer + 1 not in self.ple_layer_ids:
            return None
        assert self.eos_token_id is not None
        return NGramSizes(
            self.ple_embed_dim,
            self.ngram_size,
            self.heads_per_ngram,
            self.ngram_vocab_size_base,
            self.make_ngram_vocab_size_divisible_by,
            self.vocab_size,
            self.eos_token_id,
            self.ple_layer_ids.index(layer + 1),
            self.seed,
            self.split_ngram_parts,
        )

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder; the tables of n-grams count as embeddings."""
        M, n, r = self.hidden_size, self.hc_count, self.hc_lowrank
        gate = ParameterCounts(2 * n * M * r, norms=n * M)
        around = ParameterCounts(norms=2 * n * M)
        filters = ShortConvolution(n * M, self.ple_conv_kernel_size, self.ngram_size)
        P = self.ple_embed_dim
        maps = P * (n * M + M) + n * M * self.ple_conv_kernel_size
        numbers = self.ngram_size + 2 * (self.ngram_size - 1) * self.heads_per_ngram
        weights = ParameterCounts(maps, numbers, 3 * n * M)
        added = NGramSpec(weights, (), filters, self.ngram_size)
        grams = [self.ngrams(layer) for layer in range(self.num_hidden_layers)]
        layers = tuple(
            LayerSpec(
                self.mixer(layer, None),
                self.feed_forward(layer),
                around,
                parallel=None if grams[layer] is None else added,
            )
            for layer in range(self.num_hidden_layers)
        )
        tables = [x for x in grams if x is not None]
        used = sum(x.tables for x in tables)
        width = P // tables[0].tables if tables else 0
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            layers,
            token_tables=(sum(x.all_rows() for x in tables), width, used),
            norms=gate,
            tied=self.tie_word_embeddings,
        )
