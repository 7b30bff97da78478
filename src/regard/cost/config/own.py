"""The shape of regard's own models: pre-norm blocks of any mechanism that is counted, and SwiGLU."""

from __future__ import annotations

from regard.cost.config.keys import REQUIRED, Keys
from regard.cost.mechanisms import mechanism
from regard.cost.mixers import Dense, Weights
from regard.cost.model import Layer, Model
from regard.errors import ArgumentError
from regard.foreign import shown

CAUSAL = ("is_causal", "bidirectional")
"""Options that a decoder gives itself."""


def read(keys: Keys, name: str) -> Model:
    """The model of a config.json that `regard train` has written.

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
    options = {k: v for k, v in given.items() if k not in CAUSAL}
    if (window := keys.optional("window")) is not None:
        options["window"] = window
    if kind == "mha" and options.pop("bias", False):
        raise ArgumentError(f"{keys.where}: mha with bias is not counted; gpt2 has the same shape")
    layer = Layer(
        mechanism(kind, M, H, options), Dense(M, keys.size("intermediate_size")), Weights(norms=2 * M)
    )  # fmt: skip
    learned = keys.get("position") == "learned"
    rows = keys.size("max_position_embeddings", default=2048) if learned else 0
    return Model(
        name, keys.size("vocab_size"), M, (layer,) * keys.size("num_hidden_layers"),
        positions=rows * M, rows=int(learned), longest=rows or None, norms=Weights(norms=M),
        tied=keys.flag("tie_word_embeddings", default=False), dtype="fp32",
    )  # fmt: skip
