"""Models that mix layers of Gated DeltaNet and layers of gated attention, of transformers, saved by
it and loaded here; wrong variants of each must be far.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import regard
from regard.nn import CausalConvolution, OutputNorm, PreNorm
from regard.nn.blocks.norms import L2Norm, OffsetRMSNorm
from regard.positions import Rotary
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import Change, drop, named, put, zeros
from tests.parity.families.harness import (
    assert_generates,
    assert_near,
    assert_refused,
    ids_of,
    saved,
    without,
)
from tests.parity.families.test_llama_relatives import SIZES as RELATIVES
from tests.parity.families.test_llama_relatives import (
    gate_and_up_swapped,
    no_shared_gate,
    one_expert_less,
    other_weights_of_experts,
)

SIZES: dict[str, Any] = {
    **RELATIVES,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-2,  # a norm of a small result would amplify roundings
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14,
}


def gates(network: Any) -> list[Any]:
    """The output gates of the layers with attention."""
    return [block.attention.project for block in network.layers if hasattr(block.attention, "mask")]


def rotate(dims: int) -> Change:
    """Another number of rotated dims in the layers with attention."""

    def change(network: Any) -> None:
        for gated in gates(network):
            made = Rotary(16, rotary_dim=dims)
            for part in (gated.project.q, gated.project.k):
                part.steps[-1] = made

    return named(f"{dims} dims rotated", change)


def gates_head_by_head(network: Any) -> None:
    """The rows of queries and gates read as all queries, then all gates."""
    for gated in gates(network):
        q, gate = gated.project.q.linear.weight, gated.gate.linear.weight
        rows = torch.cat([x.data.unflatten(0, (6, -1)) for x in (q, gate)], 1).flatten(0, 1)
        q.data, gate.data = (x.clone() for x in rows.chunk(2))


def other_value_heads(network: Any) -> None:
    """Value head n with key head n % G."""
    for mixer in changes.recurrences(network):
        for linear in (mixer.project.v.linear, mixer.gate.linear):
            linear.weight.data = linear.weight.data.unflatten(0, (2, 2, -1)).transpose(0, 1)
            linear.weight.data = linear.weight.data.flatten(0, 2).contiguous()


def filters_reversed(network: Any) -> None:
    for convolution in (m for m in network.modules() if isinstance(m, CausalConvolution)):
        convolution.weight.data = convolution.weight.data.flip(1)


def norms_in_front(network: Any) -> None:
    """Norms before the attention and the feed-forward layer, where they stand behind them."""
    for block in network.layers:
        if isinstance(block.attention_residual, OutputNorm):
            for name in ("attention_residual", "feed_forward_residual"):
                setattr(block, name, PreNorm(getattr(block, name).norm))


OF_DELTA: tuple[Change, ...] = (
    changes.norms_swapped,
    other_value_heads,
    changes.no_decay,
    changes.no_convolution,
    filters_reversed,
    drop("layers.*.attention.project.k", L2Norm),
    put("layers.*.attention", gate_before_norm=True),
    put("layers.*.attention", gate_activation="sigmoid"),
)
OF_QWEN = (
    *OF_DELTA,
    changes.without_the_one,
    changes.interleave,
    rotate(16),
    drop("layers.*.attention.project.project.q", OffsetRMSNorm),
    zeros("layers.*.attention.project.gate.linear.weight"),
    gates_head_by_head,
)
OF_EXPERTS = (
    *OF_QWEN,
    gate_and_up_swapped,
    one_expert_less,
    no_shared_gate,
    other_weights_of_experts,
)
# transformers writes the filters in three equal parts, whatever their sizes, so they must be equal
OLMO = {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "head_dim": 6}
NO_POSITIONS = {"rope_type": "default", "rope_theta": None}
OF_OLMO = (*OF_DELTA, norms_in_front, put("layers.*.attention.rule", max_beta=1.0))
FAMILIES = {
    "qwen3_next": Case("Qwen3Next", EXPERTS, OF_EXPERTS),
    "qwen3_5_text": Case("Qwen3_5", {}, OF_QWEN, kind="TextConfig"),
    "olmo_hybrid": Case("OlmoHybrid", OLMO | {"rope_parameters": NO_POSITIONS}, OF_OLMO, seed=5),
    "olmo_hybrid, rotary": Case("OlmoHybrid", OLMO, (*OF_OLMO, changes.interleave), seed=5),
    "qwen3_5_moe_text": Case("Qwen3_5Moe", EXPERTS, OF_EXPERTS[:-1], kind="TextConfig"),
}


CASES = {name: case._replace(keys=SIZES | case.keys, start=1000) for name, case in FAMILIES.items()}


test_every_family, test_wrong_variants_are_far = parity_tests(CASES)


@pytest.mark.full
def test_generation_with_states(tmp_path: Path) -> None:
    """With caches of two kinds; a state is never cut."""
    model = CASES["qwen3_next"].model(vocab_size=1024)
    options = ({"cache": cache, "max_context": 128} for cache in ("growing", "ring"))
    mine = assert_generates(model, tmp_path, *options)
    ids = mine.encode("def add(a, b): return a")
    caches = mine.new_caches()
    mine(ids, caches=caches)
    with pytest.raises(regard.ArgumentError, match="crop to 3, but the state sums over 9"):
        caches[0].crop(3)


def test_experts_in_one_tensor_and_the_layer_for_a_second_token(tmp_path: Path) -> None:
    """As Qwen3.5 is published; without one of the tensors, the folder is refused."""
    model = CASES["qwen3_5_moe_text"].model()
    folder = saved(model, tmp_path)
    expected = regard.load(folder)(ids_of(model))
    tensors = {name: x.contiguous() for name, x in model.state_dict().items()}
    fused = [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]
    assert len(fused) == 8
    tensors["mtp.fc.weight"] = torch.zeros(2, 3)
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(regard.load(folder)(ids_of(model)), expected)
    message = r"10 missing .*experts.0.gate_proj.weight"
    assert_refused(folder, message, without(tensors, fused[0]))


def test_filters_of_different_sizes(tmp_path: Path) -> None:
    """As OLMo Hybrid is published: filters of queries, keys and values, each in its own tensor, and
    norms by the names of its makers. Null for rope_theta means no positions.
    """
    sizes = {"linear_key_head_dim": 6, "linear_value_head_dim": 10, "head_dim": 6}
    model = CASES["olmo_hybrid"].model(**sizes)
    folder = saved(model, tmp_path)
    tensors = {}
    for name, x in model.state_dict().items():
        if ".conv1d." in name:
            for part, own in zip("qkv", x.split([12, 12, 40]), strict=True):
                tensors[name.replace("conv1d", f"{part}_conv1d")] = own.contiguous()
            continue
        if ".0." in name or ".2." in name:  # layers of Gated DeltaNet
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[name] = x
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config | {"rope_parameters": None, "rope_theta": None})
    (folder / "config.json").write_text(text)
    mine = regard.load(folder)
    ids = ids_of(model)
    assert_near(mine(ids), model(input_ids=ids, use_cache=False).logits)
    assert [m.norm.eps for m in changes.recurrences(mine.decoder)] == [1e-5, 1e-5]
    assert not any(isinstance(m, Rotary) for m in mine.decoder.modules())
