"""Phi 3, 3.5 and 4-mini: Llama whose queries, keys and values, and whose gate and up, are stored
below one another.

Source: Abdin et al. 2024 (arXiv 2404.14219); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Phi3Config
from regard.models.assembly import grouped
from regard.models.assembly.grouped import OURS, THEIRS
from regard.models.checkpoint.family import Family
from regard.models.checkpoint.names import Names, rows
from regard.models.decoder import Decoder

Config = Phi3Config


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
    check=grouped.check,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
