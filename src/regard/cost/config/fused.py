"""The shape of GPT-2, GPT-NeoX, BLOOM and MPT: as many keys as queries, LayerNorms, two matrices per feed-forward layer."""

from __future__ import annotations

from regard.cost.config.keys import Keys
from regard.cost.mixers import Dense, Heads, Weights
from regard.cost.model import Layer, Model

TYPES = ("gpt2", "gpt_neox", "bloom", "mpt")


def read(keys: Keys, name: str) -> Model:
    """The model of a config with one of these types."""
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
        Heads(M, H, H, D, D, bias=own_bias, output_bias=own_bias),
        Dense(M, hidden, gated=False, bias=bias), norm + norm,
    )  # fmt: skip
    positions = keys.size("n_positions", "max_position_embeddings") if kind == "gpt2" else 0
    return Model(
        name, V, M, (layer,) * layers,
        positions=positions * M, rows=1 if positions else 0, longest=positions or None,
        norms=norm + norm if kind == "bloom" else norm,
        tied=keys.flag("tie_word_embeddings", default=kind != "gpt_neox"), dtype=keys.dtype,
    )  # fmt: skip
