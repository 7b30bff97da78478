"""OLMo Hybrid: three pre-norm layers of Gated DeltaNet, then one with the attention of OLMo 3,
which has norms after its sublayers, with rotary positions or without. Source: Ai2 2026, "OLMo
Hybrid"; Yang et al. 2024 (arXiv 2412.06464); negative eigenvalues: Grazzi et al. 2024 (arXiv
2411.12537).
"""

from __future__ import annotations

from regard.configs.base import FULL
from regard.configs.olmo import OlmoHybridConfig
from regard.models.assembly import gated_delta, llama_like
from regard.models.assembly.gated_delta import (
    DECAY,
    DECAYS,
    GATE,
    MIXER,
    QKV,
    STORED_DELTA,
    STRENGTH,
    filters,
)
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable, as_stored
from regard.nn import Block, PreNorm, Recurrent
from regard.nn.recurrence.projections import CausalConvolution, JoinedConvolution
from regard.positions import Rotary

EPS = 1e-5
"""The epsilon of the norms in layers of Gated DeltaNet, which no key of the config changes."""


def _layer(
    config: OlmoHybridConfig, layer: int, rotary: Rotary | None, window: int | None
) -> Block:
    if config.kinds()[layer] == FULL:
        return llama_like.recipe_layer(config, layer, rotary, window)
    norms = (PreNorm(llama_like.norm(config)) for _ in range(2))
    return Block(_delta_net(config), llama_like.feed_forward(config), *norms)


def _delta_net(config: OlmoHybridConfig) -> Recurrent:
    G, N = config.linear_num_key_heads, config.linear_num_value_heads
    D, E = config.linear_key_head_dim, config.linear_value_head_dim
    filters = [
        CausalConvolution(channels, config.linear_conv_kernel_dim)
        for channels in (G * D, G * D, N * E)
    ]
    return gated_delta.delta_net(
        config,
        JoinedConvolution(filters),
        max_beta=2.0 if config.linear_allow_neg_eigval else 1.0,
        eps=EPS,
    )


FLAT_NORM = MIXER + "project.q.flat.weight"
FIRST, SECOND = (
    MODEL_LAYER + f"{part}_residual.norm.weight" for part in ("attention", "feed_forward")
)
FILTERS = MIXER + "project.convolution.parts."
MAPS = {f"{part}_proj.weight": parameter for part, parameter in zip("qkv", QKV, strict=True)} | {
    "o_proj.weight": MIXER + "output.weight"
}
"""Maps that layers of both kinds have, under the same names."""
OF_ATTENTION: NameTable = {
    **llama_like.ATTENTION,
    **llama_like.FLAT_NORMS,
    **{
        STORED_LAYER + f"self_attn.{name}": as_stored(parameter, requires=FLAT_NORM)
        for name, parameter in MAPS.items()
    },
}
OF_DELTA: NameTable = {
    **{
        STORED_DELTA + name: as_stored(parameter, requires=STRENGTH)
        for name, parameter in MAPS.items()
    },
    **{
        STORED_DELTA + f"{part}_conv1d.weight": filters(f"{FILTERS}{i}.weight")
        for i, part in enumerate("qkv")
    },
    STORED_DELTA + "g_proj.weight": GATE,
    STORED_DELTA + "b_proj.weight": STRENGTH,
    STORED_DELTA + "a_proj.weight": DECAY,
    STORED_DELTA + "A_log": MIXER + "rule.decay.A_log",
    STORED_DELTA + "dt_bias": MIXER + "rule.decay.dt_bias",
    STORED_DELTA + "o_norm.weight": MIXER + "norm.weight",
}
NORMS: NameTable = {
    STORED_LAYER + "attention_layer_norm.weight": as_stored(FIRST, requires=STRENGTH),
    STORED_LAYER + "post_attention_layernorm.weight": as_stored(FIRST, requires=FLAT_NORM),
    STORED_LAYER + "post_feedforward_layernorm.weight": as_stored(SECOND, requires=FLAT_NORM),
    # transformers writes the norm behind the attention under the second meaning of this name
    STORED_LAYER + "feedforward_layer_norm.weight": (
        as_stored(SECOND, requires=STRENGTH),
        as_stored(FIRST, requires=FLAT_NORM),
    ),
}
NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.FEED_FORWARD,
    **NORMS,
    **OF_ATTENTION,
    **OF_DELTA,
}
FAMILIES = {"olmo_hybrid": llama_like.family(OlmoHybridConfig, _layer, NAMES, keep_float32=DECAYS)}
