"""`T5Config`: the keys of a T5 config.json."""

from __future__ import annotations

from dataclasses import dataclass

from regard.configs.base import ModelConfig, Raw, check_activation, check_sizes
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.softmax import CrossSpec, SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError


@dataclass(frozen=True)
class T5Config(ModelConfig):
    """The keys of a T5 config.json that change the network."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_decoder_layers: int | None = None
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool = True
    pad_token_id: int = 0
    eos_token_id: int = 1
    decoder_start_token_id: int | None = None

    model_types = ("t5",)
    family_file = "t5"
    ignored = frozenset({"n_positions"})
    fixed = {"is_encoder_decoder": (True,)}

    def __post_init__(self) -> None:
        check_sizes(self, zero={"pad_token_id", "eos_token_id", "decoder_start_token_id"})
        check_activation(self.activation[1], "feed_forward_proj")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys without the newer ones that repeat feed_forward_proj; tie_word_embeddings
        stands in for scale_decoder_outputs.
        """
        keys = dict(raw)
        proj = str(keys.get("feed_forward_proj", "relu"))
        for key, value in zip(("is_gated_act", "dense_act_fn"), _activation(proj), strict=True):
            if keys.pop(key, value) != value:
                raise ArgumentError(
                    f"{key} is {raw[key]!r}, and feed_forward_proj {proj!r} means {value!r}; "
                    "keep one"
                )
        keys.setdefault("scale_decoder_outputs", keys.get("tie_word_embeddings") is not False)
        return keys

    @property
    def activation(self) -> tuple[bool, str]:
        """Whether the feed-forward layers have a gate, and the name of their nonlinearity."""
        return _activation(self.feed_forward_proj)

    @property
    def decoder_layers(self) -> int:
        """The number of layers of the decoder; num_layers if the file does not give it."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of both stacks, each with one table of relative position biases."""
        M, H, D = self.d_model, self.num_heads, self.d_kv
        feed = DenseSpec(M, self.d_ff, gated=self.activation[0])
        buckets = self.relative_attention_num_buckets * H
        norm, shape = ParameterCounts(norms=M), HeadShape(H, H, D, D)
        encoder_layer = LayerSpec(SoftmaxSpec.of(M, shape, causal=False), feed, norm + norm)
        decoder_layer = LayerSpec(
            SoftmaxSpec.of(M, shape), feed, norm + norm + norm, CrossSpec.of(M, shape)
        )
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (decoder_layer,) * self.decoder_layers,
            (encoder_layer,) * self.num_layers,
            norms=norm + norm + ParameterCounts(biases=2 * buckets),
            tied=self.tie_word_embeddings,
            notes=(
                "the encoder reads the prompt; the decoder's text is counted with the same length",
            ),
        )


def _activation(proj: str) -> tuple[bool, str]:
    """Return whether there is a gate, and the nonlinearity; gated-gelu is the tanh form."""
    name = proj.removeprefix("gated-")
    return name != proj, "gelu_new" if proj == "gated-gelu" else name
