"""The shape of DeepSeek-V2 and V3: latent attention, dense layers below mixtures of experts."""

from __future__ import annotations

from regard.cost.config.keys import Keys
from regard.cost.mixers import Dense, Experts, FeedForward, Latent, Weights
from regard.cost.model import Layer, Model

TYPES = ("deepseek_v2", "deepseek_v3")


def read(keys: Keys, name: str) -> Model:
    """The model of a config with one of these types."""
    M, layers = keys.size("hidden_size"), keys.size("num_hidden_layers")
    mixer = Latent(
        M, keys.size("num_attention_heads"), keys.size("kv_lora_rank"), keys.size("qk_nope_head_dim"),
        keys.size("qk_rope_head_dim"), keys.size("v_head_dim"), keys.optional("q_lora_rank"),
        bias=keys.flag("attention_bias", default=False),
    )  # fmt: skip
    dense: FeedForward = Dense(M, keys.size("intermediate_size"))
    count, width = keys.size("n_routed_experts"), keys.size("moe_intermediate_size")
    # V3's correction of its choice is one number per expert
    correction = count if keys.get("model_type") == "deepseek_v3" else 0
    experts: FeedForward = Experts(
        Dense(M, width), count, keys.size("num_experts_per_tok"),
        Dense(M, width * keys.size("n_shared_experts")), correction,
    )  # fmt: skip
    first = keys.size("first_k_dense_replace", least=0)
    norms = Weights(norms=2 * M)
    return Model(
        name, keys.size("vocab_size"), M,
        tuple(Layer(mixer, dense if i < first else experts, norms) for i in range(layers)),
        norms=Weights(norms=M), tied=keys.flag("tie_word_embeddings", default=False), dtype=keys.dtype,
    )  # fmt: skip
