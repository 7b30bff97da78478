"""Mamba-2, RWKV-4 and models of transformers that mix states with attention, saved by it and loaded
here; wrong variants of each must be far.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.models.save import save
from regard.nn import FeedForward, MoE
from regard.nn.blocks.norms import JoinedHeadsRMSNorm
from regard.positions import Rotary
from tests.parity.families import changes
from tests.parity.families.cases import Case, assert_wrong, parity_tests
from tests.parity.families.changes import Change, each, named, norms_swapped, on, put, zeros
from tests.parity.families.harness import (
    assert_decoder,
    assert_refused,
    ids_of,
    saved,
    transformers,
)
from tests.parity.families.test_llama_relatives import (
    gate_and_up_swapped,
    other_weights_of_experts,
)

COMMON_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SIZES: dict[str, Any] = {
    **COMMON_SIZES,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-3,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
}
NEMOTRON: dict[str, Any] = {
    **COMMON_SIZES,
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
}
JAMBA: dict[str, Any] = {
    **COMMON_SIZES,
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
}
LFM2: dict[str, Any] = {
    **{k: v for k, v in SIZES.items() if "mamba" not in k and k != "rms_norm_eps"},
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-3,
}
MOE_OF_LFM2 = {
    "num_dense_layers": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "conv_bias": True,
    "routed_scaling_factor": 1.5,
}
LIMITS = {"time_step_limit": (0.4, 0.9)}
LAYERS = ["mamba", "attention", "mamba"]
MAMBA2: dict[str, Any] = {
    **COMMON_SIZES,
    "num_hidden_layers": 2,
    "num_heads": 6,
    "head_dim": 8,
    "expand": 2,
    "state_size": 5,
    "n_groups": 2,
    "conv_kernel": 3,
    "layer_norm_epsilon": 1e-3,
}
RWKV: dict[str, Any] = {
    **COMMON_SIZES,
    "num_hidden_layers": 3,
    "attention_hidden_size": 20,
    "intermediate_size": 28,
    "context_length": 64,
    "rescale_every": 2,
    "layer_norm_epsilon": 1e-2,
}


def part(place: str, change: Callable[[Any], Any]) -> Change:
    """A change of one part of every layer."""

    def apply(network: Any) -> None:
        for mixer in changes.recurrences(network):
            change(mixer.get_submodule(place) if place else mixer)

    return named(f"{change.__name__} {place}", apply)


def zero(name: str) -> Callable[[nn.Module], Any]:
    return named(f"no {name}", lambda module: getattr(module, name).data.zero_())


def swap_b_and_c(mixer: Any) -> None:
    project = mixer.project
    project.q, project.k = project.k, project.q


def reverse_filters(convolution: Any) -> None:
    convolution.weight.data = convolution.weight.data.flip(1)


def one_group_of_the_norm(mixer: Any) -> None:
    old = mixer.norm
    norm = JoinedHeadsRMSNorm(old.heads, old.head_dim, eps=old.eps)
    norm.weight = mixer.norm.weight
    mixer.norm = norm


def other_groups(mixer: Any) -> None:
    """Head h with the group h % G instead of h // (N/G)."""
    shape = mixer.heads
    N, E = shape.outputs, shape.value_dim
    order = torch.arange(N).view(shape.groups, -1).T.flatten()
    for linear in (mixer.project.v.linear, mixer.gate.linear):
        linear.weight.data = linear.weight.data.unflatten(0, (N, E))[order].flatten(0, 1)


def no_limits(rule: Any) -> None:
    rule.step_limits = (0.0, 9e9)


COMMON = (
    part("", swap_b_and_c),
    part("", one_group_of_the_norm),
    part("", other_groups),
    part("project.convolution", reverse_filters),
    part("rule", zero("skip")),
    part("rule", zero("A_log")),
    part("rule", zero("dt_bias")),
    part("rule", no_limits),
)
"""Of a model with several groups of heads, and with limits of step sizes."""


def other_scale(network: Any) -> None:
    for attention in changes.softmax_layers(network):
        attention.scale = 0.11


def positions_removed(network: Any) -> None:
    for attention in changes.softmax_layers(network):
        for heads in (attention.project.q, attention.project.k):
            heads.steps = nn.ModuleList(x for x in heads.steps if not isinstance(x, Rotary))


def positions_added(network: Any) -> None:
    for attention in changes.softmax_layers(network):
        for heads in (attention.project.q, attention.project.k):
            heads.steps.append(Rotary(heads.head_dim))


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


def no_steps(heads: Any) -> None:
    heads.steps = nn.ModuleList(x for x in heads.steps if isinstance(x, Rotary))


def first_parts_exchanged(linear: Any) -> None:
    """c * conv(b * y) read as b * conv(c * y)."""
    b, c, y = linear.weight.data.chunk(3)
    linear.weight.data = torch.cat([c, b, y])


def gate_for_values(mixer: Any) -> None:
    mixer.gate.linear, mixer.project.v.linear = mixer.project.v.linear, mixer.gate.linear


def no_norm(rule: Any) -> None:
    rule.norm = None


def one_decay_per_channel(rule: Any) -> None:
    """As in Mamba-2: the same for all values of the state."""
    rule.A_log.data[:] = rule.A_log.data.mean(1, keepdim=True)


def shares_exchanged(network: Any) -> None:
    """The share of the token before for that of the present one."""
    for block in network.layers:
        for mix in (block.attention.project.mix_k, block.feed_forward.mix_k):
            mix.data.copy_(1 - mix.data)


def one_epsilon(network: Any) -> None:
    """As without `rescale_every`."""
    for norm in (network.norm, *(b.attention_residual.norm for b in network.layers)):
        norm.eps = 1e-2


def no_norm_of_the_embedding(network: Any) -> None:
    network.embed.norm.weight.data.fill_(1)


ATTENTION: tuple[Change, ...] = (other_scale, changes.other_groups)
FAMILIES: dict[str, Case] = {
    "mamba2": Case(
        "Mamba2",
        {"use_bias": True, "time_step_limit": (0.4, 0.9)},
        (
            *COMMON,
            part("project.convolution", zero("bias")),
            part("rule.linear", zero("bias")),
            each("the gate behind the norm", gate_before_norm=False),
        ),
    ),
    "mamba2, no biases": Case(
        "Mamba2",
        {"use_conv_bias": False, "residual_in_fp32": False, "n_groups": 1},
        (part("", swap_b_and_c), each("another gate", gate_activation="sigmoid")),
    ),
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
            put("embed", scale=1.0),
            put("head", scale=1.0),
            put("layers.*.attention_residual", scale=1.0),
            put("layers.*.feed_forward_residual", scale=1.0),
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
            put("embed", scale=1.0),
            put("head", scale=1.0),
            put("layers.*.attention", in_scales=(0.7, 0.7)),
            put("layers.*.attention", out_scales=(1.6, 1.6)),
            put("layers.*.attention.mixers.1.gate.linear", scale=1.0),
            put("layers.*.attention.mixers.1.project.q.linear", scale=0.7),
            put("layers.*.attention.mixers.1.project.k.linear", scale=1.6),
            put("layers.*.attention.mixers.1.project.v.linear", scale=1.0),
            put("layers.*.attention.mixers.1.rule.linear", scale=1.0),
            put("layers.*.feed_forward.gate", scale=1.0),
            put("layers.*.feed_forward.down", scale=1.0),
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
            put("layers.*.attention.mixers.1", gate_before_norm=True),
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
    "mamba": Case(
        "Mamba",
        {},
        (
            part("", swap_b_and_c),
            part("", gate_for_values),
            part("project.convolution", reverse_filters),
            part("rule", zero("A_log")),
            part("rule", zero("skip")),
            part("rule", zero("dt_bias")),
        ),
    ),
    "falcon_mamba": Case(
        "FalconMamba",
        {"use_bias": True, "tie_word_embeddings": False},
        (
            part("", swap_b_and_c),
            part("rule", no_norm),
            part("project.q", no_steps),
            part("project.k", no_steps),
            part("output", zero("bias")),
        ),
    ),
    "lfm2": Case(
        "Lfm2",
        LFM2 | {"intermediate_size": 30, "block_multiple_of": 8},
        (
            *ATTENTION,
            on("layers.*.attention.convolution", "reversed", reverse_filters),
            on("layers.*.attention.input", "gates", first_parts_exchanged),
            on("layers.*.attention.project.q", "no norm", no_steps),
            norms_swapped,
        ),
    ),
    "lfm2_moe": Case(
        "Lfm2Moe",
        LFM2 | MOE_OF_LFM2,
        (
            mixture(no_correction),
            mixture(other_weights),
            mixture(one_expert_less),
            zeros("layers.*.attention.convolution.bias"),
        ),
    ),
    "falcon_h1, no norm": Case(
        "FalconH1", {"mamba_d_ssm": None}, (put("layers.*.attention", out_scales=(1.0, 0)),)
    ),
}


MAMBA = {k: v for k, v in MAMBA2.items() if k not in ("num_heads", "head_dim", "n_groups")} | {
    "time_step_rank": 4
}
SIZES_OF = {
    "NemotronH": NEMOTRON,
    "Jamba": JAMBA,
    "Mamba2": MAMBA2,
    "Mamba": MAMBA,
    "FalconMamba": MAMBA | {"mixer_rms_eps": 1e-3},
    "Lfm2": {},
    "Lfm2Moe": {},
}
CASES = {
    name: case._replace(
        keys=SIZES_OF.get(case.name, SIZES) | case.keys,
        start=0 if case.name in ("Mamba", "FalconMamba", "Mamba2") else 1000,
    )
    for name, case in FAMILIES.items()
}


test_every_family, test_wrong_variants_are_far = parity_tests(CASES, keep=4, keep_wrong=4)


def test_infinity_as_python_writes_it(tmp_path: Path) -> None:
    """Older files have the constant Infinity, newer ones an object in its place."""
    model = Case("Mamba2", MAMBA2).model()
    first = regard.load(saved(model, tmp_path)).config
    file = tmp_path / "config.json"
    keys = json.loads(file.read_text())
    assert keys["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    keys["time_step_limit"] = [0.0, float("inf")]
    file.write_text(json.dumps(keys))
    assert "Infinity]" in file.read_text()
    assert regard.load(tmp_path).config == first
    for wrong in ([0.5, 0.1], [0.1], [-1.0, 1.0], [0.0, {"__float__": "NaN"}]):
        message = r"time_step_limit is .*; it must be two"
        assert_refused(tmp_path, message, time_step_limit=wrong)


def test_the_residual_stream_stays_in_float32(tmp_path: Path) -> None:
    """As the key says: with weights in bf16, the sum is in fp32 and every sublayer in bf16."""
    model = Case("Mamba2", MAMBA2).model()
    mine = regard.load(saved(model, tmp_path), dtype=torch.bfloat16)
    ids = ids_of(model)
    with torch.no_grad(), regard.Trace("layers.*.residual", "layers.*.out") as trace:
        logits = mine(ids)
    assert {trace[f"layers.{i}.residual"].dtype for i in range(2)} == {torch.float32}
    assert {trace[f"layers.{i}.out"].dtype for i in range(2)} == {torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    exact = model(input_ids=ids, use_cache=False).logits
    narrow = model.bfloat16()(input_ids=ids, use_cache=False).logits.float()
    error, theirs_error = (float((x - exact).abs().max()) for x in (logits.float(), narrow))
    assert error <= 2 * theirs_error


RWKV4 = Case(
    "Rwkv",
    RWKV,
    (
        part("rule", zero("decay")),
        part("rule", zero("bonus")),
        shares_exchanged,
        one_epsilon,
        no_norm_of_the_embedding,
        zeros("layers.*.feed_forward.receptance.weight"),
        norms_swapped,
    ),
)


def test_rwkv(tmp_path: Path) -> None:
    """The rwkv of transformers changes its own weights as it runs: a fresh one reads what was
    saved.
    """
    model = RWKV4.model()
    mine = assert_decoder(model, tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    save(mine.decoder, mine.config, first)
    again = regard.load(first)
    save(again.decoder, again.config, second)
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    fresh, read = RWKV4.model(), transformers.RwkvForCausalLM.from_pretrained(first)
    ids = ids_of(model)
    assert torch.equal(*(m.eval()(input_ids=ids, use_cache=False).logits for m in (fresh, read)))


def test_wrong_variants_of_rwkv_are_far(tmp_path: Path) -> None:
    assert_wrong(RWKV4, tmp_path)


def test_a_token_cannot_be_taken_back(tmp_path: Path) -> None:
    mine = RWKV4.load(tmp_path)[1]
    caches = mine.new_caches()
    mine(torch.arange(3, 7)[None], None, caches)
    with pytest.raises(regard.ArgumentError, match="a part of the sum cannot be removed"):
        caches[0].crop(2)
