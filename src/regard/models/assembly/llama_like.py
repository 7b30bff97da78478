"""Decoders like Llama: the network and the checkpoint names of a `DecoderRecipe`, which says in
which parts a family differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from regard import masks
from regard.configs.rope import RopeSettings
from regard.configs.rotary_decoder import DecoderRecipe, Experts, RotaryDecoderConfig
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import activation, initialize_weights
from regard.models.checkpoint.family import (
    Family,
    NameEntry,
    NameTable,
    TensorRule,
    reshaped,
    stacked_rows,
    weights_and_biases,
)
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    ExpertGroups,
    FeedForward,
    InputEmbedding,
    OffsetRMSNorm,
    OutputNorm,
    PreNorm,
    QueryTemperature,
    RMSNorm,
    SandwichNorm,
    ScaledPreNorm,
    SharedNormBlock,
    SigmoidRouter,
    SoftmaxRouter,
    SwiGLU,
    WeightlessRMSNorm,
)
from regard.nn.blocks.blocks import Residual
from regard.nn.blocks.embedding import CappedLogits, ScaledLogits
from regard.nn.blocks.experts import MoE
from regard.nn.blocks.feed_forward import ClippedSwiGLU, GatedFeedForward, GatedSharedExpert
from regard.nn.blocks.norms import OffsetLayerNorm
from regard.nn.blocks.routers import Router, SparseMixerRouter
from regard.nn.mixer import Mixer
from regard.nn.projections.steps import Clip
from regard.nn.weights import Linear, scaled_map
from regard.positions import Rotary

STORED_LAYER, MODEL_LAYER = "model.layers.{}.", "layers.{}."
EMBEDDING_AND_HEAD = {
    "model.embed_tokens.weight": "embed.embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
ATTENTION = weights_and_biases(
    {f"self_attn.{part}_proj": f"attention.project.{part}.linear" for part in "qkv"}
    | {"self_attn.o_proj": "attention.output"},
    STORED_LAYER,
    MODEL_LAYER,
)
FEED_FORWARD = weights_and_biases(
    {f"mlp.{part}_proj": f"feed_forward.{part}" for part in ("gate", "up", "down")},
    STORED_LAYER,
    MODEL_LAYER,
)
FLAT_NORMS = {
    f"{STORED_LAYER}self_attn.{part}_norm.weight": f"{MODEL_LAYER}attention.project.{part}.flat"
    ".weight"
    for part in "qk"
}
"""Norms over all heads together."""
HEAD_NORMS = {theirs: ours.replace("flat", "steps.0") for theirs, ours in FLAT_NORMS.items()}
"""Norms on each head, before the rotation."""
NORM_PARTS = {
    "before": {
        "input_layernorm": "attention_residual.norm",
        "post_attention_layernorm": "feed_forward_residual.norm",
    },
    "after": {
        "post_attention_layernorm": "attention_residual.norm",
        "post_feedforward_layernorm": "feed_forward_residual.norm",
    },
    "around": {
        "input_layernorm": "attention_residual.norm",
        "post_attention_layernorm": "attention_residual.after",
        "pre_feedforward_layernorm": "feed_forward_residual.norm",
        "post_feedforward_layernorm": "feed_forward_residual.after",
    },
}
"""Where the norms are -> the names of the norms of a layer."""
PRE_NORMS = weights_and_biases(NORM_PARTS["before"], STORED_LAYER, MODEL_LAYER)
FUSED: NameTable = {
    f"{STORED_LAYER}{stored}.weight": stacked_rows(*(f"{MODEL_LAYER}{x}.weight" for x in parts))
    for stored, parts in {
        "self_attn.qkv_proj": [f"attention.project.{part}.linear" for part in "qkv"],
        "mlp.gate_up_proj": ["feed_forward.gate", "feed_forward.up"],
    }.items()
}
"""Several maps in one stored matrix."""

PREFIXES, HEAD = ("model.",), "lm_head.weight"
"""The prefix of names, and the stored name of the head; a base model saved alone lacks both."""
BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""Patterns of tensors that older versions stored, and that are computed from the config."""

Layer: TypeAlias = Callable[[Any, int, Rotary | None, int | None], Block]
"""(config, number of the layer, rotary module, window) -> the layer."""


def recipe_names(recipe: DecoderRecipe) -> NameTable:
    """Return the name table of a recipe: {} is the layer, a second one the expert."""
    table: dict[str, NameEntry] = {
        **EMBEDDING_AND_HEAD,
        "model.norm.bias": "norm.bias",
        "lm_head.bias": "head.bias",
        **ATTENTION,
        **(FLAT_NORMS if recipe.head_norms == "all heads" else HEAD_NORMS),
        **weights_and_biases(NORM_PARTS[recipe.norms], STORED_LAYER, MODEL_LAYER),
        **FEED_FORWARD,
    }
    if recipe.norm_rotated:
        table = {k: _behind(v) if k in HEAD_NORMS else v for k, v in table.items()}
    if recipe.sinks:
        table[STORED_LAYER + "self_attn.sinks"] = MODEL_LAYER + "attention.sink"
    if recipe.activation == "xielu":
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            activated = f"{MODEL_LAYER}feed_forward.activation.{name}"
            table[f"{STORED_LAYER}mlp.act_fn.{name}"] = activated
    if recipe.experts is not None:
        table |= expert_names(recipe.experts)
    for fused in recipe.fused:
        name = next(name for name in FUSED if f".{fused}." in name)
        rule = FUSED[name]
        assert isinstance(rule, TensorRule)
        table = {k: v for k, v in table.items() if v not in rule.parameters} | {name: rule}
    if not recipe.stored:
        return table
    own = recipe.stored
    pattern = re.compile("|".join(re.escape(name) for name in own))
    return {pattern.sub(lambda match: own[match[0]], k): v for k, v in table.items()}


def _behind(name: NameEntry) -> str:
    """Return the name of a norm that is the second step of its heads, behind the rotation."""
    assert isinstance(name, str)
    return name.replace("steps.0", "steps.1")


def expert_names(experts: Experts) -> dict[str, NameEntry]:
    """Return the names of a router, its experts, and an expert for all tokens."""
    theirs, ours = f"{STORED_LAYER}{experts.stored}.", MODEL_LAYER + "feed_forward."
    parts = ("gate", "up", "down")
    table: dict[str, NameEntry] = {
        theirs + "gate.weight": ours + "router.linear.weight",
        theirs + "gate.e_score_correction_bias": ours + "router.correction",
    }
    if experts.router == "corrected softmax":  # ERNIE stores a matrix of one row
        del table[theirs + "gate.e_score_correction_bias"]
        rule = reshaped(ours + "router.correction", 1, -1)
        table[theirs + "moe_statics.e_score_correction_bias"] = rule
    for part, stored in zip(parts, experts.parts, strict=True):
        table[f"{theirs}experts.{{}}.{stored}.weight"] = f"{ours}experts.{{}}.{part}.weight"
    shared, place = (
        ("shared_expert", "shared.expert") if experts.shared_gate else ("shared_experts", "shared")
    )
    maps = {f"{shared}.{part}_proj": f"{place}.{part}" for part in parts}
    table |= weights_and_biases(maps, theirs, ours)
    if experts.shared_gate:
        table[theirs + "shared_expert_gate.weight"] = ours + "shared.gate.weight"
    return table


def rename_language_model(name: str) -> str:
    """Return the name of a tensor without the prefix that models with image input add."""
    name = re.sub(r"^model\.language_model\.", "model.", name)
    return name.removeprefix("language_model.")


def tower_tensors(towers: str) -> tuple[str, ...]:
    """Return the pattern of the tensors of networks for images and sound, if there are any."""
    return (rf"(model\.)?({'|'.join(towers.split())})\..*",) if towers else ()


def family(
    config: type[RotaryDecoderConfig],
    layer: Layer | None = None,
    names: NameTable | None = None,
    **more: Any,
) -> Family:
    """Return the family of a config with a recipe; `layer` builds layers of another form, and
    `names` and `more` replace what follows from the recipe.
    """
    experts = config.recipe.experts
    corrected = experts is not None and experts.router in ("sigmoid", "corrected softmax")
    buffers = (*BUFFERS, *config.buffers, *more.pop("buffers", ()), *tower_tensors(config.towers))
    if config.towers:
        more.setdefault("rename_stored", rename_language_model)
    build = more.pop("build", partial(decoder, layer=layer or recipe_layer))
    usual: dict[str, Any] = {
        "check": check,
        "prefixes": PREFIXES,
        "head": HEAD,
        "buffers": buffers,
        # rounding this bias would change which experts are selected
        "keep_float32": ("*.router.correction",) if corrected else (),
    }
    return Family(
        config,
        build,
        recipe_names(config.recipe) if names is None else names,
        **usual | more,
    )


def check(config: RotaryDecoderConfig) -> None:
    """Check the numbers of the rotary scaling of every layer, and the sizes of the router."""
    rotary_modules(config)
    if config.recipe.experts is not None:
        with torch.device("meta"):  # only sizes are checked, and nothing is allocated
            router(config)


def rotary_modules(config: RotaryDecoderConfig) -> list[Rotary | None]:
    """Return the rotary module of each layer; layers with equal settings share one."""
    built: list[tuple[RopeSettings, Rotary]] = []
    modules: list[Rotary | None] = []
    for settings in config.ropes():
        if settings is None:
            modules.append(None)
            continue
        module = next((rotary for known, rotary in built if known == settings), None)
        if module is None:
            module = building_blocks.rotary_module(settings)
            built.append((settings, module))
        modules.append(module)
    return modules


def decoder(config: RotaryDecoderConfig, layer: Layer | None = None) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    recipe, value = config.recipe, config.value
    embedding, head = embedding_and_head(config)
    rows = zip(rotary_modules(config), config.windows(), strict=True)
    build = layer or recipe_layer
    layers = [build(config, i, rotary, window) for i, (rotary, window) in enumerate(rows)]
    embed = InputEmbedding(
        embedding,
        scale=value(recipe.embedding_scale),
        norm=norm(config) if recipe.embedding_norm else None,
    )
    return initialize_weights(Decoder(embed, layers, norm(config), head))


def embedding_and_head(config: RotaryDecoderConfig) -> tuple[nn.Embedding, nn.Linear]:
    """Build the embedding [V, M], and the head with its cap or its factor; tied ones share it."""
    M, V, recipe, value = config.hidden_size, config.vocab_size, config.recipe, config.value
    embedding = nn.Embedding(V, M)
    scale, cap = value(recipe.logit_scale), value(recipe.logit_cap)
    if cap is not None:
        head: nn.Linear = CappedLogits(M, V, cap=cap)
    else:
        head = Linear(M, V, bias=value(recipe.head_bias))
    if scale != 1:
        head = ScaledLogits(M, V, scale=scale)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    return embedding, head


def recipe_layer(
    config: RotaryDecoderConfig, layer: int, rotary: Rotary | None, window: int | None
) -> Block:
    """Build a layer of attention and a feed-forward network, as the recipe says."""
    return block(config, attention(config, rotary, window), feed_forward(config, layer))


def attention(
    config: RotaryDecoderConfig,
    rotary: Rotary | None,
    window: int | None = None,
    *,
    q_steps: Sequence[nn.Module] = (),
    mask: masks.Mask | None = None,
) -> Attention:
    """Build causal grouped-query attention, with a window or another mask if there is one."""
    recipe, value = config.recipe, config.value
    M, shape = config.hidden_size, config.head_shape(window)
    H, G, D, E = shape.heads, shape.groups, shape.head_dim, shape.value_dim
    mask = mask if window is None else masks.Window(window)
    k_steps: Sequence[nn.Module] = ()
    q_flat, k_flat = None, None
    if recipe.temperature is not None and (numbers := value(recipe.temperature)) is not None:
        scale, length = numbers
        q_steps = [QueryTemperature("ministral3", scale=scale, length=length)]
    if config.head_norms == "each head" and not recipe.norm_rotated:
        q_steps, k_steps = [norm(config, D)], [norm(config, D)]
    if config.head_norms == "all heads":
        q_flat, k_flat = norm(config, H * D), norm(config, G * D)
    limit = value(recipe.clip)
    if limit is not None:
        q_flat, k_flat = Clip(limit), Clip(limit)
    project = building_blocks.rotary_heads(
        M,
        H,
        G,
        D,
        rotary,
        q_steps=q_steps,
        k_steps=k_steps,
        q_flat=q_flat,
        k_flat=k_flat,
        bias=config.has_bias("qkv_bias"),
        value_dim=E,
    )
    project.v.linear = scaled_map(project.v.linear, value(recipe.value_scale) or 1)
    if limit is not None:
        project.v.flat = Clip(limit)
    if recipe.value_norm:
        project.v.steps.append(WeightlessRMSNorm(eps=value(recipe.eps)))
    if config.head_norms == "each head" and recipe.norm_rotated:
        for part in (project.q, project.k):
            part.steps.append(norm(config, D))
    return Attention(
        project,
        Linear(H * E, M, bias=config.has_bias("output_bias")),
        mask=masks.Causal() if mask is None else masks.Causal() & mask,
        scale=value(recipe.score_scale),
        softcap=value(recipe.score_cap),
        sink=nn.Parameter(torch.zeros(H)) if config.has_sinks(window) else None,
    )


def feed_forward(config: RotaryDecoderConfig, layer: int = 0) -> nn.Module:
    """Build the feed-forward network of a layer, or its mixture of experts."""
    M, recipe, experts = config.hidden_size, config.recipe, config.recipe.experts
    if experts is not None and config.has_experts(layer):
        shared: nn.Module | None = None
        router_module = router(config)
        if config.shared_width is not None:
            shared = _swiglu(config, layer, config.shared_width)
            shared = GatedSharedExpert(M, shared) if experts.shared_gate else shared
        width = config.value(experts.width)
        count = range(router_module.experts)
        every = [_swiglu(config, layer, width, expert=True) for _ in count]
        return MoE(router_module, every, shared)
    bias, name = config.has_bias("ff_bias"), getattr(config, "hidden_act", recipe.activation)
    width = config.value(recipe.width)
    if recipe.gated and name == "silu":
        return _swiglu(config, layer, width)
    kind = GatedFeedForward if recipe.gated else FeedForward
    return kind(M, width, activation(name), bias=bias)


def _swiglu(
    config: RotaryDecoderConfig, layer: int, width: int, *, expert: bool = False
) -> nn.Module:
    """Build a gated network of a layer, whose hidden numbers have the limits of the config."""
    bias = not expert and config.has_bias("ff_bias")
    limits = config.limits(layer, expert=expert)
    if limits is None:
        return SwiGLU(config.hidden_size, width, bias=bias)
    return ClippedSwiGLU(config.hidden_size, width, bias=bias, **limits)


def router(config: RotaryDecoderConfig) -> Router:
    """Build the router of a mixture of experts."""
    M, experts = config.hidden_size, config.recipe.experts
    assert experts is not None, "the recipe has no experts"
    count, active = config.value(experts.count), config.value(experts.active)
    if experts.router == "sparse_mixer":
        return SparseMixerRouter(M, count, tolerance=config.value("router_jitter_noise"))
    normalize = config.value(experts.normalized)
    if experts.router.endswith("softmax"):
        corrected = experts.router == "corrected softmax"
        return SoftmaxRouter(M, count, active, normalize=normalize, corrected=corrected)
    groups = getattr(config, "n_group", 1)
    return SigmoidRouter(
        M,
        count,
        active,
        normalize=normalize,
        groups=None if groups == 1 else ExpertGroups(groups, config.value("topk_group"), 2),
        scale=getattr(config, "routed_scaling_factor", 1.0),
        eps=experts.eps,
    )


def block(config: RotaryDecoderConfig, mixer: Mixer, network: nn.Module) -> Block:
    """Build a block with the norms of the recipe."""
    if config.value(config.recipe.parallel):
        return SharedNormBlock(mixer, network, PreNorm(norm(config)))
    return Block(mixer, network, *(_residual(config) for _ in range(2)))


def sandwich(config: RotaryDecoderConfig) -> SandwichNorm:
    """Build a residual connection with norms before and after its sublayer."""
    return SandwichNorm(norm(config), norm(config))


def _residual(config: RotaryDecoderConfig) -> Residual:
    recipe = config.recipe
    if recipe.norms == "around":
        return sandwich(config)
    if recipe.norms == "after":
        return OutputNorm(norm(config))
    if recipe.residual_scale is not None:
        return ScaledPreNorm(norm(config), config.value(recipe.residual_scale))
    return PreNorm(norm(config))


def norm(config: RotaryDecoderConfig, dim: int | None = None) -> nn.Module:
    """Build a norm of the model dim, or of another dim, with the config's eps."""
    kinds: dict[str, Callable[..., nn.Module]] = {
        "rms": RMSNorm,
        "rms 1 + w": OffsetRMSNorm,
        "rms, bare": bare_rms,
        "layer": nn.LayerNorm,
        "layer 1 + w": OffsetLayerNorm,
        "layer, no bias": partial(nn.LayerNorm, bias=False),
        "layer, bare": partial(nn.LayerNorm, elementwise_affine=False),
    }
    kind = kinds[config.recipe.norm]
    return kind(config.hidden_size if dim is None else dim, eps=config.value(config.recipe.eps))


def bare_rms(_: int, *, eps: float) -> nn.Module:
    """Build an RMS norm without weights, which fits any dim."""
    return WeightlessRMSNorm(eps=eps)


def mixture(dim: int, hidden: int, router: Router, shared: nn.Module | None = None) -> MoE:
    """Build a mixture of SwiGLU experts with a hidden size, and a module for all tokens."""
    return MoE(router, [SwiGLU(dim, hidden) for _ in range(router.experts)], shared)


def stacked_experts(stored: str, *, transposed: bool = False) -> NameTable:
    """Return the entries of two tensors with the matrices of all experts."""
    return {
        f"{stored}experts.{name}": experts_in_one_tensor(*parts, transposed=transposed)
        for name, parts in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items()
    }


def experts_in_one_tensor(*parts: str, transposed: bool = False) -> TensorRule:
    """Return the rule for a tensor [n, rows, columns] of n experts, parts one above the other."""

    def unpack(stored: Tensor, _: Sequence[torch.Size]) -> list[Tensor]:
        matrices = stored.mT if transposed else stored
        return [matrix for part in matrices.chunk(len(parts), 1) for matrix in part]

    def pack(parameters: Sequence[Tensor]) -> Tensor:
        matrices = torch.cat(torch.stack(list(parameters)).chunk(len(parts)), 1)
        return matrices.mT if transposed else matrices

    stem = MODEL_LAYER + "feed_forward.experts.*."
    return TensorRule(tuple(f"{stem}{part}.weight" for part in parts), unpack, pack)
