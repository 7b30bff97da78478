"""The shapes with an encoder: BERT, which decodes nothing, and T5, which reads one text and writes another."""

from __future__ import annotations

from regard.cost.config.keys import Keys
from regard.cost.mixers import Cross, Dense, Heads, Weights
from regard.cost.model import Layer, Model

TYPES = ("bert", "t5")


def read(keys: Keys, name: str) -> Model:
    """The model of a config with one of these types."""
    return bert(keys, name) if keys.get("model_type") == "bert" else t5(keys, name)


def bert(keys: Keys, name: str) -> Model:
    """Encoder, tables of positions and segments, and a pooler, as a config alone says."""
    M, H = keys.size("hidden_size"), keys.size("num_attention_heads")
    D, norm = keys.divided(M, H), Weights(norms=2 * M)
    layer = Layer(
        Heads(M, H, H, D, D, bias=True, output_bias=True, causal=False),
        Dense(M, keys.size("intermediate_size"), gated=False, bias=True), norm + norm,
    )  # fmt: skip
    longest = keys.size("max_position_embeddings")
    rows = longest + keys.size("type_vocab_size", default=2)
    return Model(
        name, keys.size("vocab_size"), M, (layer,) * keys.size("num_hidden_layers"),
        positions=rows * M, rows=2, norms=norm, head=False, top=Weights(M * M, M), decodes=False,
        longest=longest, dtype=keys.dtype,
    )  # fmt: skip


def t5(keys: Keys, name: str) -> Model:
    """Two stacks, each with one table of distance buckets per head."""
    M, H, D = keys.size("d_model"), keys.size("num_heads"), keys.size("d_kv")
    layers = keys.size("num_layers")
    gated = str(keys.get("feed_forward_proj", default="relu")).startswith("gated-")
    feed = Dense(M, keys.size("d_ff"), gated=gated)
    buckets = keys.size("relative_attention_num_buckets", default=32) * H
    norm, heads = Weights(norms=M), Heads(M, H, H, D, D)
    reader = Layer(Heads(M, H, H, D, D, causal=False), feed, norm + norm)
    writer = Layer(heads, feed, norm + norm + norm, Cross(heads))
    return Model(
        name, keys.size("vocab_size"), M, (writer,) * keys.size("num_decoder_layers", default=layers),
        (reader,) * layers, norms=norm + norm + Weights(biases=2 * buckets),
        tied=keys.flag("tie_word_embeddings", default=True), dtype=keys.dtype,
        notes=("the prompt is the encoder's; the decoder's text is counted at the same length",),
    )  # fmt: skip
