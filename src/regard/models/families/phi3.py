"""Phi 3, 3.5 and 4-mini: Llama whose queries, keys and values, and whose gate and up, are stored
below one another.

Source: Abdin et al. 2024 (arXiv 2404.14219); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost import layer_types
from regard.errors import ArgumentError
from regard.models.assembly import grouped, rope
from regard.models.assembly.grouped import OURS, THEIRS
from regard.models.checkpoint.family import Family
from regard.models.checkpoint.names import Names, rows
from regard.models.decoder import Decoder
from regard.positions import Rotary


@dataclass(frozen=True)
class Config(grouped.Config):
    """The keys of a Phi 3 config.json that shape the model.

    Raises:
        ArgumentError: as `regard.models.assembly.grouped.Config`; or rope_scaling is of a type that
            Phi 3 does not have.
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None

    def rotary(self) -> Rotary:
        """Part of each head turns; with LongRoPE by one list up to the trained length, by another
        beyond it.
        """
        kind = "default" if self.rope_scaling is None else self.rope_scaling.get("rope_type")
        if kind not in ("default", "longrope"):
            raise ArgumentError(
                f"rope_scaling.rope_type is {kind!r}; phi3 has longrope (once called su) or none"
            )
        return rope.rotary(
            self.head_dim,
            self.rope_theta,
            self.rope_scaling,
            self.max_position_embeddings,
            partial=self.partial_rotary_factor,
            original=self.original_max_position_embeddings,
        )

    def windows(self) -> tuple[int | None, ...]:
        """One window for all layers, or none."""
        return layer_types.windows(self.num_hidden_layers, sliding_window=self.sliding_window)


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    return grouped.decoder(
        config,
        lambda rotary, window: grouped.block(config, grouped.attention(config, rotary, window)),
    )


IN = OURS + "attention.project."
FUSED: Names = {
    THEIRS + "self_attn.qkv_proj.weight": rows(*(f"{IN}{part}.linear.weight" for part in "qkv")),
    THEIRS + "self_attn.o_proj.weight": OURS + "attention.output.weight",
    THEIRS + "mlp.gate_up_proj.weight": rows(
        OURS + "feed_forward.gate.weight", OURS + "feed_forward.up.weight"
    ),
    THEIRS + "mlp.down_proj.weight": OURS + "feed_forward.down.weight",
}
FAMILY = Family(
    Config,
    build,
    {**grouped.OUTSIDE, **grouped.PRE_NORMS, **FUSED},
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "lm_head_bias": (False,),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
    code="Phi3",
    plain=grouped.plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
