"""Models of transformers that mix Mamba-2 with attention, saved by it and loaded here; wrong
variants of each must be far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import regard
from regard.nn import FeedForward, MoE
from tests.parity.families.changes import Change, named, norms_swapped
from tests.parity.families.harness import assert_decoder, assert_differs, saved, theirs
from tests.parity.families.published import assert_saved
from tests.parity.families.state_space_changes import (
    COMMON,
    one_group_of_the_norm,
    other_key_heads,
    other_scale,
    part,
    positions_added,
    positions_removed,
    reverse_filters,
    swap_b_and_c,
    zero,
)
from tests.parity.families.test_llama_relatives import (
    attribute,
    gate_and_up_swapped,
    other_weights_of_experts,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-3,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
}
NEMOTRON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 20,
    "layers_block_type": ["mlp", "mamba", "attention", "moe", "mamba"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_norm_epsilon": 1e-3,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 5,
    "conv_kernel": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 14,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
JAMBA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_dt_rank": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LIMITS = {"time_step_limit": (0.4, 0.9)}
LAYERS = ["mamba", "attention", "mamba"]


class Case(NamedTuple):
    """A family: its name in transformers, further keys, and its own wrong variants."""

    name: str
    keys: dict[str, Any]
    wrong: tuple[Change, ...]


def one_after_the_other(network: Any) -> None:
    """Attention reads what Mamba-2 has added."""
    for block in network.layers:
        mixers = block.attention

        def mix(x: Any, positions: Any, cache: Any, backend: str, mixers: Any = mixers) -> Any:
            first, second = mixers.mixers
            y = second(x * mixers.in_scales[1], positions) * mixers.out_scales[1]
            return y + first((x + y) * mixers.in_scales[0], positions) * mixers.out_scales[0]

        mixers.mix = mix


def mixture(change: Change) -> Change:
    """A change of every mixture of experts."""

    def apply(network: Any) -> None:
        for module in network.modules():
            if isinstance(module, MoE):
                change(module)

    return named(change.__name__, apply)


def other_weights(mixture: Any) -> None:
    mixture.router.normalize = not mixture.router.normalize


def no_correction(mixture: Any) -> None:
    mixture.router.correction.data.zero_()


def one_expert_less(mixture: Any) -> None:
    mixture.router.k -= 1


def no_shared(mixture: Any) -> None:
    mixture.shared = None


def other_activation(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, FeedForward):
            module.activation = nn.ReLU()


def gate_for_values(mixer: Any) -> None:
    mixer.gate.linear, mixer.project.v.linear = mixer.project.v.linear, mixer.gate.linear


def no_norm(rule: Any) -> None:
    rule.norm = None


def one_decay_per_channel(rule: Any) -> None:
    """As in Mamba-2: the same for all values of the state."""
    rule.A_log.data[:] = rule.A_log.data.mean(1, keepdim=True)


ATTENTION: tuple[Change, ...] = (other_scale, other_key_heads)
CASES: dict[str, Case] = {
    "bamba": Case(
        "Bamba",
        LIMITS | {"attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True},
        (*COMMON, *ATTENTION, positions_removed, norms_swapped),
    ),
    "bamba, biases": Case(
        "Bamba",
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_groups": 1},
        (part("", swap_b_and_c), part("rule.linear", zero("bias"))),
    ),
    "granitemoehybrid": Case(
        "GraniteMoeHybrid",
        LIMITS
        | {
            "layer_types": LAYERS,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 14,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
        },
        (
            *COMMON,
            *ATTENTION,
            positions_added,
            other_weights_of_experts,
            gate_and_up_swapped,
            mixture(one_expert_less),
            attribute("embed", "scale", 1.0),
            attribute("head", "scale", 1.0),
            attribute("layers.attention_residual", "scale", 1.0),
            attribute("layers.feed_forward_residual", "scale", 1.0),
        ),
    ),
    "granitemoehybrid, dense": Case(
        "GraniteMoeHybrid",
        {
            "layer_types": LAYERS,
            "num_local_experts": 0,
            "shared_intermediate_size": 14,
            "position_embedding_type": "rope",
            "attention_bias": True,
        },
        (*ATTENTION, positions_removed),
    ),
    "falcon_h1": Case(
        "FalconH1",
        LIMITS
        | {
            "mamba_d_ssm": 48,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.3,
            "attention_in_multiplier": 0.7,
            "attention_out_multiplier": 1.6,
            "key_multiplier": 0.6,
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.5, 1.3, 0.7, 1.6, 0.4],
            "mlp_multipliers": [1.7, 0.6],
        },
        (
            *COMMON,
            *ATTENTION,
            positions_removed,
            norms_swapped,
            attribute("embed", "scale", 1.0),
            attribute("head", "scale", 1.0),
            attribute("layers.attention", "in_scales", (0.7, 0.7)),
            attribute("layers.attention", "out_scales", (1.6, 1.6)),
            attribute("layers.attention.mixers.1.gate.linear", "scale", 1.0),
            attribute("layers.attention.mixers.1.project.q.linear", "scale", 0.7),
            attribute("layers.attention.mixers.1.project.k.linear", "scale", 1.6),
            attribute("layers.attention.mixers.1.project.v.linear", "scale", 1.0),
            attribute("layers.attention.mixers.1.rule.linear", "scale", 1.0),
            attribute("layers.feed_forward.gate", "scale", 1.0),
            attribute("layers.feed_forward.down", "scale", 1.0),
            one_after_the_other,
        ),
    ),
    "falcon_h1, biases": Case(
        "FalconH1",
        {
            "mamba_d_ssm": 36,
            "mamba_d_head": 6,
            "mamba_rms_norm": True,
            "attention_bias": True,
            "mlp_bias": True,
            "projectors_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "ssm_multipliers": [0.5, 1.3, 0.7, 1.6, 0.4],
        },
        (
            part("", one_group_of_the_norm),
            attribute("layers.attention.mixers.1", "gate_before_norm", True),
            part("output", zero("bias")),
        ),
    ),
    "nemotron_h": Case(
        "NemotronH",
        {},
        (
            *COMMON[:-1],
            *ATTENTION,
            positions_added,
            mixture(other_weights),
            mixture(no_correction),
            mixture(one_expert_less),
            mixture(no_shared),
            other_activation,
        ),
    ),
    "nemotron_h, biases": Case(
        "NemotronH",
        {
            "layers_block_type": ["mamba", "mlp", "mamba", "moe"],
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
            "n_group": 1,
            "n_groups": 1,
        },
        (part("", swap_b_and_c), part("rule.linear", zero("bias")), mixture(other_weights)),
    ),
    "jamba": Case(
        "Jamba",
        {},
        (
            *ATTENTION,
            positions_added,
            part("", swap_b_and_c),
            part("", gate_for_values),
            part("project.convolution", reverse_filters),
            part("project.convolution", zero("bias")),
            part("rule", zero("A_log")),
            part("rule", zero("skip")),
            part("rule", zero("dt_bias")),
            part("rule", no_norm),
            part("rule", one_decay_per_channel),
            mixture(other_weights),
            mixture(one_expert_less),
            norms_swapped,
        ),
    ),
    "jamba, biases": Case(
        "Jamba",
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "num_experts": 1},
        (part("", swap_b_and_c), part("output", zero("bias"))),
    ),
    "falcon_h1, no norm": Case(
        "FalconH1", {"mamba_d_ssm": None}, (attribute("layers.attention", "out_scales", (1.0, 0)),)
    ),
}


def model_of(case: str) -> Any:
    sizes = {"NemotronH": NEMOTRON, "Jamba": JAMBA}.get(CASES[case].name, SIZES)
    model = theirs(CASES[case].name, sizes | CASES[case].keys)
    make = torch.Generator().manual_seed(4)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=make))
    return model


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_every_hybrid(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    mine = assert_decoder(model, tmp_path, start=1000)
    assert_saved(mine, model, tmp_path, start=1000)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_wrong_variants_are_far(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    mine = regard.load(saved(model, tmp_path))
    for change in CASES[case].wrong:
        assert_differs(mine, model, change, start=1000)
