"""Decoders with grouped queries and rotary positions, of transformers, saved by it and loaded here;
wrong variants of each must be far.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard.caches import Ring
from regard.masks import Causal, Window
from regard.nn import Block, PreNorm, QueryTemperature
from regard.nn.blocks.norms import OffsetLayerNorm
from regard.nn.projections.steps import Clip
from regard.positions import Rotary
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import Change, drop, each, put, swap, zeros
from tests.parity.families.harness import theirs
from tests.parity.families.published import assert_following

H, G, D, M, WINDOW = 6, 2, 8, 36, 8
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": M,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
HEAD_DIM = {"head_dim": D}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
LAYERED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "attention_factor": 1.2,
}


def positions_everywhere(network: Any) -> None:
    """The rotary of the first layer that has one, in every layer."""
    rotary = next(changes.rotaries(network))
    for attention in changes.attentions(network):
        for part in (attention.project.q, attention.project.k):
            if not any(isinstance(step, Rotary) for step in part.steps):
                part.steps.append(rotary)


def other_layout(network: Any) -> None:
    for rotary in changes.rotaries(network):
        rotary.layout = "half" if rotary.layout == "interleaved" else "interleaved"
        rotary._last = None


def other_activation(network: Any) -> None:
    changes.activation(nn.Tanh())(network)


def experts_of(network: Any) -> Iterable[Any]:
    return (block.feed_forward for block in network.layers if hasattr(block.feed_forward, "router"))


def other_weights_of_experts(network: Any) -> None:
    """Weights over all experts where they are over the chosen ones, and the reverse."""
    for mixture in experts_of(network):
        mixture.router.normalize = not mixture.router.normalize


def gate_and_up_swapped(network: Any) -> None:
    for mixture in experts_of(network):
        for expert in mixture.experts:
            expert.gate, expert.up = expert.up, expert.gate


def one_expert_less(network: Any) -> None:
    for mixture in experts_of(network):
        mixture.router.k -= 1


def no_shared_gate(network: Any) -> None:
    for mixture in experts_of(network):
        mixture.shared = mixture.shared.expert


def one_after_the_other(network: Any) -> None:
    for i, block in enumerate(network.layers):
        path = block.attention_residual
        network.layers[i] = Block(block.attention, block.feed_forward, path, PreNorm(path.norm))


def norms_in_front(network: Any) -> None:
    for block in network.layers:
        block.attention_residual = PreNorm(block.attention_residual.norm)


def no_head_norms(network: Any) -> None:
    for attention in changes.attentions(network):
        q = attention.project.q
        q.flat = nn.Identity()
        q.steps = nn.ModuleList(x for x in q.steps if isinstance(x, Rotary))


def without_the_one(network: Any) -> None:
    for norm in (m for m in network.modules() if isinstance(m, OffsetLayerNorm)):
        norm.weight.data -= 1


def not_clipped(network: Any) -> None:
    for clip in (m for m in network.modules() if isinstance(m, Clip)):
        clip.limit = 1e9


def rotation_behind_the_norm(network: Any) -> None:
    for attention in changes.attentions(network):
        for part in (attention.project.q, attention.project.k):
            part.steps = nn.ModuleList(reversed(part.steps))


MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
NO_QUERY_BIAS = zeros("layers.*.attention.project.q.linear.bias")
NO_CORRECTION = zeros("layers.*.feed_forward.router.correction")
OTHER_SCALE = each("another scale", scale=0.11)


class HeadByHead(nn.Module):
    """The norm of Qwen 3, with the weights of OLMo 2."""

    def __init__(self, norm: Any, head_dim: int) -> None:
        super().__init__()
        self.norm, self.head_dim = norm, head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, self.head_dim))
        mean = heads.square().mean(-1, keepdim=True)
        return (heads * (mean + self.norm.eps).rsqrt()).flatten(-2) * self.norm.weight


def norm_head_by_head(network: Any) -> None:
    for attention in changes.attentions(network):
        attention.project.q.flat = HeadByHead(attention.project.q.flat, D)


def no_key_norm(network: Any) -> None:
    for attention in changes.attentions(network):
        k = attention.project.k
        k.flat = nn.Identity()
        k.steps = nn.ModuleList(x for x in k.steps if isinstance(x, Rotary))


def no_key_bias(network: Any) -> None:
    """Without rotary it would change nothing: a softmax does not see what all keys have in
    common.
    """
    for attention in changes.attentions(network):
        attention.project.k.linear.bias = None


def bias_behind(network: Any) -> None:
    """The values' bias once more, behind the output."""
    for attention in changes.attentions(network):
        attention.output.bias = nn.Parameter(torch.ones(M), requires_grad=False)


SLIDING = HEAD_DIM | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW}
NORMED = HEAD_DIM | {"rms_norm_eps": 1e-2}
QWEN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
NORMS_OF_OLMO2 = (norm_head_by_head, norms_in_front, no_key_norm, changes.norms_swapped)
NORMS_OF_QWEN3 = (
    swap("layers.*.attention.project.[qk]", "steps.0", "steps.1"),
    swap("layers.*.attention.project", "q.steps.0", "k.steps.0"),
    no_key_norm,
    put("layers.*.attention.project.[qk].steps.0", eps=1e-6),
    changes.interleave,
)
COMMON: tuple[Change, ...] = (
    changes.other_groups,
    OTHER_SCALE,
    drop("layers.*.attention.project.[qk]", Rotary),
)
FAMILIES: dict[str, Case] = {
    "apertus": Case(
        "Apertus",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        (
            other_activation,
            zeros("layers.*.feed_forward.activation.alpha_p"),
            zeros("layers.*.feed_forward.activation.alpha_n"),
            no_head_norms,
        ),
    ),
    "arcee": Case("Arcee", HEAD_DIM, (other_activation, changes.interleave)),
    "cohere": Case(
        "Cohere",
        {"logit_scale": 0.25, "layer_norm_eps": 1e-2},
        (other_layout, one_after_the_other, put("head", scale=0.5)),
    ),
    "cohere2": Case(
        "Cohere2",
        {"num_hidden_layers": 3, "layer_types": LAYERED, "sliding_window": WINDOW},
        (
            other_layout,
            positions_everywhere,
            changes.windows(WINDOW + 1, None, WINDOW),
            changes.windows(WINDOW, WINDOW, WINDOW),
        ),
    ),
    "ernie4_5": Case("Ernie4_5", HEAD_DIM | {"use_bias": True}, (other_layout, NO_QUERY_BIAS)),
    "ernie4_5_moe": Case(
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 12,
            "moe_num_shared_experts": 2,
            "moe_layer_end_index": 1,
        },
        (other_layout, NO_CORRECTION, other_weights_of_experts, one_expert_less),
    ),
    "ernie4_5_moe, biases": Case(
        "Ernie4_5_Moe",
        {
            "use_bias": True,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 12,
            "moe_num_shared_experts": 2,
        },
        (
            zeros("layers.*.feed_forward.shared.down.bias"),
            zeros("layers.0.feed_forward.up.bias"),
            zeros("layers.*.attention.output.bias"),
            zeros("head.bias"),
        ),
    ),
    "exaone4": Case(
        "Exaone4",
        {
            "num_hidden_layers": 4,
            "layer_types": [*LAYERED, "sliding_attention"],
            "sliding_window": WINDOW,
        },
        (positions_everywhere, norms_in_front, no_head_norms),
    ),
    "exaone4, no window": Case(
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        (norms_in_front,),
    ),
    "exaone_moe": Case(
        "ExaoneMoe",
        {
            "num_hidden_layers": 4,
            "layer_types": [*LAYERED, "full_attention"],
            "sliding_window": WINDOW,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "n_group": 2,
        },
        (
            positions_everywhere,
            NO_CORRECTION,
            other_weights_of_experts,
            no_head_norms,
            changes.windows(WINDOW + 1, None, WINDOW, None),
        ),
    ),
    "glm": Case("Glm", HEAD_DIM, (other_layout, NO_QUERY_BIAS, changes.rotate(slice(None), D))),
    "glm4": Case(
        "Glm4",
        HEAD_DIM | {"rms_norm_eps": 1e-2},
        (other_layout, NO_QUERY_BIAS, swap("layers.*.attention_residual", "norm", "after")),
    ),
    "glm4_moe": Case(
        "Glm4Moe",
        HEAD_DIM
        | {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
        (other_weights_of_experts, one_expert_less, NO_CORRECTION, no_head_norms, NO_QUERY_BIAS),
    ),
    "granite": Case(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
        },
        (
            put("embed", scale=1.0),
            put("head", scale=1.0),
            put("layers.*.attention_residual", scale=1.0),
            put("layers.*.feed_forward_residual", scale=1.0),
        ),
    ),
    "granite_swa": Case(
        "GraniteSWA",
        {
            "num_hidden_layers": 3,
            "layer_types": LAYERED,
            "layer_rope_theta": [1e4, 0, 1e6],
            "sliding_window": WINDOW,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.4,
        },
        (
            positions_everywhere,
            each("no sinks", sink=None),
            changes.windows(WINDOW + 1, None, WINDOW),
            changes.rotate(slice(2, 3), M // H, 1e4),
        ),
    ),
    "granitemoe": Case(
        "GraniteMoe",
        LOCAL_EXPERTS | {"residual_multiplier": 0.4, "attention_multiplier": 0.25},
        (other_weights_of_experts, gate_and_up_swapped, one_expert_less),
    ),
    "helium": Case("Helium", {"head_dim": M // H}, (other_layout,)),
    "hunyuan_v1_dense": Case(
        "HunYuanDenseV1",
        HEAD_DIM
        | {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 50.0,
            }
        },
        (
            rotation_behind_the_norm,
            changes.rotate(slice(None), D, first=True),
            put("layers.*.attention.project.[qk]", steps=nn.ModuleList()),
        ),
    ),
    "ministral3": Case(
        "Ministral3",
        HEAD_DIM | {"rope_parameters": MINISTRAL},
        (drop("layers.*.attention.project.q", QueryTemperature), changes.rotate(slice(None), D)),
    ),
    "minimax_m2": Case(
        "MiniMaxM2",
        HEAD_DIM | LOCAL_EXPERTS | {"rotary_dim": 4},
        (NO_CORRECTION, no_head_norms, gate_and_up_swapped, changes.rotate(slice(None), D)),
    ),
    "mixtral": Case(
        "Mixtral",
        LOCAL_EXPERTS | {"sliding_window": WINDOW},
        (other_weights_of_experts, gate_and_up_swapped, one_expert_less, changes.windows(9, 8)),
    ),
    "mistral": Case(
        "Mistral",
        HEAD_DIM | {"sliding_window": WINDOW},
        (
            changes.interleave,
            changes.windows(WINDOW + 1, WINDOW + 1),
            changes.windows(WINDOW - 1, WINDOW - 1),
            changes.windows(None, None),
            changes.windows(WINDOW, None),
        ),
    ),
    "mistral, no window": Case(
        "Mistral",
        HEAD_DIM | {"sliding_window": None, "rope_parameters": {"rope_theta": 1e6}},
        (changes.windows(WINDOW, WINDOW), changes.interleave),
    ),
    "nanochat": Case(
        "NanoChat",
        {},
        (
            other_activation,
            put("embed", norm=nn.Identity()),
            put("head", cap=30.0),
            changes.rotate(slice(None), M // H, first=True),
        ),
    ),
    "nemotron": Case(
        "Nemotron", HEAD_DIM, (other_activation, without_the_one, changes.rotate(slice(None), D))
    ),
    "olmo": Case("Olmo", {"clip_qkv": 0.7}, (not_clipped, changes.interleave)),
    "olmo2": Case("Olmo2", NORMED, NORMS_OF_OLMO2),
    "olmo2, biases": Case(
        "Olmo2", NORMED | {"attention_bias": True, "tie_word_embeddings": True}, NORMS_OF_OLMO2
    ),
    "olmo3": Case(
        "Olmo3",
        {
            "num_hidden_layers": 3,
            "layer_types": LAYERED,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        (
            norms_in_front,
            no_head_norms,
            changes.rotate(slice(1, 2), M // H, 5e5),
            changes.windows(WINDOW, None, WINDOW + 1),
        ),
    ),
    "olmoe": Case("Olmoe", EXPERTS, (other_weights_of_experts, gate_and_up_swapped, no_head_norms)),
    "phi": Case(
        "Phi",
        {"hidden_size": 48, "hidden_act": "gelu_new"},
        (one_after_the_other, zeros("head.bias"), NO_QUERY_BIAS, changes.rotate(slice(None), 8)),
    ),
    "qwen2": Case(
        "Qwen2",
        HEAD_DIM | {"rope_parameters": QWEN_YARN, "tie_word_embeddings": True},
        (
            put("layers.*.attention.project.[qkv].linear", bias=None),
            no_key_bias,
            bias_behind,
            changes.windows(WINDOW, WINDOW),
        ),
    ),
    "qwen2, upper layers slide": Case(
        "Qwen2",
        SLIDING | {"max_window_layers": 1},
        (
            changes.windows(WINDOW, WINDOW, None),
            changes.windows(WINDOW, WINDOW, WINDOW),
            changes.windows(None, WINDOW + 1, WINDOW + 1),
        ),
    ),
    "qwen2, layers are named": Case(
        "Qwen2",
        SLIDING | {"max_window_layers": 2, "layer_types": LAYERED},
        (
            changes.windows(None, WINDOW, WINDOW),
            changes.windows(WINDOW, WINDOW, WINDOW),
            changes.windows(WINDOW + 1, None, WINDOW + 1),
        ),
    ),
    # their angles are fp32: at 1000 that alone is 0.98 of the bound
    "qwen3": Case("Qwen3", NORMED, NORMS_OF_QWEN3, 500),
    "qwen3, biases": Case(
        "Qwen3", NORMED | {"attention_bias": True, "tie_word_embeddings": True}, NORMS_OF_QWEN3, 500
    ),
    "qwen3, upper layers slide": Case(
        "Qwen3", NORMED | SLIDING | {"max_window_layers": 1}, NORMS_OF_QWEN3, 500
    ),
    "qwen2_moe": Case(
        "Qwen2Moe",
        EXPERTS | {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 14},
        (other_weights_of_experts, no_shared_gate, NO_QUERY_BIAS),
    ),
    "qwen3_moe": Case(
        "Qwen3Moe",
        HEAD_DIM | EXPERTS | {"moe_intermediate_size": 12, "norm_topk_prob": True},
        (other_weights_of_experts, no_head_norms, one_expert_less),
    ),
    "seed_oss": Case("SeedOss", HEAD_DIM, (NO_QUERY_BIAS, changes.interleave)),
    "smollm3": Case(
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
        (positions_everywhere, changes.interleave),
    ),
    "stablelm": Case(
        "StableLm",
        {"hidden_size": 48, "use_qkv_bias": True},
        (NO_QUERY_BIAS, changes.norms_swapped),
    ),
    "stablelm, parallel": Case(
        "StableLm", {"hidden_size": 48, "use_parallel_residual": True}, (one_after_the_other,)
    ),
    "starcoder2": Case(
        "Starcoder2",
        {"sliding_window": WINDOW},
        (
            NO_QUERY_BIAS,
            other_activation,
            changes.norms_swapped,
            changes.windows(WINDOW + 1, WINDOW),
        ),
    ),
}


CASES = {
    name: case._replace(keys=SIZES | case.keys, wrong=COMMON + case.wrong, start=case.start or 1000)
    for name, case in FAMILIES.items()
}


QUICK = ["arcee", "ernie4_5_moe", "ministral3", "nanochat"]
test_every_family, test_wrong_variants_are_far = parity_tests(CASES, keep=QUICK, keep_wrong=1)


def test_layers_with_equal_rotary_settings_share_a_module(tmp_path: Path) -> None:
    network = CASES["olmo3"].load(tmp_path)[1].decoder
    first, second, third = (block.attention.project.q.steps[-1] for block in network.layers)
    assert first is third
    assert first.scaling is None
    assert second.scaling is not None
    masks = [block.attention.mask for block in network.layers]
    assert masks == [Causal() & Window(WINDOW), Causal(), Causal() & Window(WINDOW)]


WINDOWS = {
    "mistral": (WINDOW, WINDOW),
    "mistral, no window": (None, None),
    "qwen2": (None, None),
    "qwen2, upper layers slide": (None, WINDOW, WINDOW),
    "qwen2, layers are named": (WINDOW, None, WINDOW),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_are_those_of_the_config(case: str, tmp_path: Path) -> None:
    mine = CASES[case].load(tmp_path)[1]
    assert mine.config.windows() == WINDOWS[case]
    rings = [isinstance(cache, Ring) for cache in mine.new_caches()]
    assert rings == [window is not None for window in WINDOWS[case]]


@pytest.mark.full
@pytest.mark.parametrize("name", ["Qwen3", "Olmo2"])
def test_norms_stand_before_a_rotary_that_follows_the_length(name: str, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    sizes = SIZES | NORMED | {"max_position_embeddings": 30, "rope_parameters": rope}
    assert_following(theirs(name, sizes), tmp_path, 30)
