"""Step-3.5 and Step-3.7: a gate for each head of attention, and experts in stacked tensors."""

from __future__ import annotations

from regard.configs.step import StepConfig
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable
from regard.nn import Attention, Block, FinishedProjection, HeadGate
from regard.positions import Rotary


def _layer(config: StepConfig, layer: int, rotary: Rotary | None, window: int | None) -> Block:
    plain = llama_like.attention(config, rotary, window)
    gate = HeadGate(config.hidden_size, config.head_shape(window).heads)
    project = FinishedProjection(plain.project, gate)
    mixer = Attention(project, plain.output, mask=plain.mask, scale=plain.scale)
    return llama_like.block(config, mixer, llama_like.feed_forward(config, layer))


PROJECT = MODEL_LAYER + "attention.project."
NAMES: NameTable = {
    **{
        stored: entry.replace(PROJECT, PROJECT + "project.") if isinstance(entry, str) else entry
        for stored, entry in llama_like.recipe_names(StepConfig.recipe).items()
        if "experts.{}" not in stored
    },
    STORED_LAYER + "self_attn.g_proj.weight": PROJECT + "finishes.0.linear.weight",
    **{
        f"{STORED_LAYER}moe.{part}_proj.weight": llama_like.experts_in_one_tensor(part)
        for part in ("gate", "up", "down")
    },
}
FAMILIES = {"step3p5": llama_like.family(StepConfig, _layer, NAMES)}
