"""DeepSeek-V4 of transformers, saved by it and loaded here: hyper-connections, hash routing, window
and entries. Wrong variants must be far; the released configs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.configs.deepseek_v4 import DeepseekV4Config
from regard.configs.reader import parse
from regard.models.checkpoint.family import bind_names
from regard.models.families import family
from regard.models.families.deepseek_v4 import makers_name
from regard.nn import WeightlessRMSNorm
from regard.nn.blocks import residual_streams
from regard.positions import Rotary, TrailingRotary
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import drop, named, put, zeros
from tests.parity.families.harness import assert_near, ids_of, saved, transformers
from tests.parity.families.published import build, count, published

WINDOW, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 9,
    "partial_rotary_factor": 0.25,
    "o_groups": 2,
    "o_lora_rank": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "index_n_heads": 16,  # with few heads, many scores are 0, and the order of equal ones is open
    "index_head_dim": 8,
    "index_topk": 3,
    "sliding_window": 6,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "swiglu_limit": 0.8,
    "compress_rates": {CSA: 4, HCA: 6},
    "layer_types": [WINDOW, HCA, CSA, HCA],
    "num_hash_layers": 2,
    "pad_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def rotaries(network: nn.Module) -> list[TrailingRotary]:
    return [m for m in network.modules() if isinstance(m, TrailingRotary)]


def first_dims(network: Any) -> None:
    """The first dims of a head are rotated, not the last ones."""
    for step in rotaries(network):
        step.forward = (
            lambda x, at, r=step.rotary: torch.cat(  # type: ignore[method-assign]
                [r(x[..., : r.dim], at), x[..., r.dim :]], -1
            )
        )


def one_base(network: Any) -> None:
    """Layers with entries have the base of those with a window."""
    for step in rotaries(network):
        step.rotary = Rotary(step.rotary.dim, 1e4, layout="interleaved")


def a_factor(network: Any) -> None:
    """The factor of YaRN, which DeepSeek-V4 leaves out."""
    for step in rotaries(network):
        step.rotary.rotary_factor, step.rotary._last = 1.2772588722239782, None


def results_keep_their_rotation(network: Any) -> None:
    for attention in changes.attentions(network):
        attention.project = attention.project.project


def scored(scoring: str) -> changes.Change:
    return put("layers.*.feed_forward.router", scoring=scoring)


def hashed(value: int) -> changes.Change:
    """The table of experts, moved by some token ids."""

    def change(network: Any) -> None:
        for block in network.layers[:2]:
            table = block.feed_forward.router.table
            table.data = table.data.roll(value, 0)

    return named(f"table rolled by {value}", change)


def other_sinkhorn(network: Any) -> None:
    """The sums of rows first."""
    for module in network.modules():
        if isinstance(module, residual_streams.HyperConnection):
            module.iterations = 1


def streams_exchanged(network: Any) -> None:
    """What a stream keeps of another one, the other way round: rows and columns of the matrix."""
    n = SIZES["hc_mult"]
    for module in network.modules():
        if isinstance(module, residual_streams.HyperConnection):
            rows = torch.arange(n * n).view(n, n).T.flatten() + 2 * n
            for x in (module.mixes.linear.weight, module.mixes.base):
                x.data[2 * n :] = x.data[rows]


def no_overlap(network: Any) -> None:
    """An entry pools the second halves of its own block alone."""
    for block in network.layers[2:3]:
        for pooling in block.attention.poolings:
            pooling.places.data[:, : pooling.width] = -30.0


CASES = {
    "window, HCA, CSA; hash routing": Case(
        "DeepseekV4",
        SIZES,
        (
            changes.halves,
            changes.norms_swapped,
            first_dims,
            one_base,
            results_keep_their_rotation,
            scored("sigmoid"),
            hashed(1),
            other_sinkhorn,
            streams_exchanged,
            no_overlap,
            zeros("layers.*.attention.sink"),
            zeros("layers.*.feed_forward.router.linear.weight"),
            put("layers.*.feed_forward.router", scale=1.0),
            put("layers.*.feed_forward.experts.*", limit=10.0),
            put("layers.*.feed_forward.experts.*", offset=1.0),
            put("layers.*.feed_forward", shared=None),
            drop("layers.*.attention.project.project.q.up", WeightlessRMSNorm),
            put("layers.2.attention.indexer", topk=4),
        ),
    ),
    "no hash routing, YaRN, other rates": Case(
        "DeepseekV4",
        SIZES
        | {
            "num_hash_layers": 0,
            "rope_scaling": YARN,
            "layer_types": [CSA, HCA, CSA, CSA],
            "compress_rates": {CSA: 3, HCA: 5},
        },
        (zeros("layers.*.feed_forward.router.correction"), a_factor),
        length=43,
    ),
    "windows alone, two streams": Case(
        "DeepseekV4",
        SIZES
        | {"layer_types": [WINDOW] * 2, "num_hidden_layers": 2, "hc_mult": 2, "index_topk": 100},
        length=37,
    ),
}


test_deepseek_v4, test_wrong_variants_are_far = parity_tests(CASES, keep=1, keep_wrong=1)


def test_chunks_of_every_size(tmp_path: Path) -> None:
    """Blocks close within, at the ends and across of calls, in layers of all three kinds."""
    model, mine = CASES["window, HCA, CSA; hash routing"].load(tmp_path)
    ids = ids_of(model, length=29)
    exact = model(input_ids=ids, use_cache=False).logits
    for size in (1, 2, 3, 5, 8, 12):
        caches = mine.new_caches()
        found = [mine(part, caches=caches) for part in ids.split(size, 1)]
        assert_near(torch.cat(found, 1), exact)


def test_a_layer_alone_needs_token_ids(tmp_path: Path) -> None:
    mine = CASES["window, HCA, CSA; hash routing"].load(tmp_path)[1]
    block, x = mine.decoder.layers[0], torch.zeros(1, 3, 120)
    with pytest.raises(regard.ArgumentError, match="chooses experts by token ids, and got none"):
        block(x)
    assert block(x, ids=torch.tensor([[1, 2, 3]])).shape == x.shape


def test_empty_slots_may_hold_any_id(tmp_path: Path) -> None:
    mine = CASES["window, HCA, CSA; hash routing"].load(tmp_path)[1].decoder
    ids = torch.tensor([[-7, 1_000_000, 5, 6, 7]])
    at = torch.tensor([[-1, -1, 0, 1, 2]])
    assert torch.allclose(mine(ids, at)[:, 2:], mine(ids[:, 2:]), atol=1e-5)


# Files of the makers.

RELEASED = published("deepseek-v4-flash")


def their_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of transformers' module, in the makers' spelling, expert by expert."""
    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**raw))
    shapes = {}
    for name, x in model.state_dict().items():
        plain, shape = makers_name(name), tuple(x.shape)
        if plain.endswith("experts.gate_up_proj"):
            for i in range(shape[0]):
                for part in ("w1", "w3"):
                    stem = plain.removesuffix("gate_up_proj")
                    shapes[f"{stem}{i}.{part}.weight"] = (shape[1] // 2, shape[2])
        elif plain.endswith("experts.down_proj"):
            for i in range(shape[0]):
                shapes[f"{plain.removesuffix('down_proj')}{i}.w2.weight"] = shape[1:]
        else:
            shapes[plain] = shape
    return shapes


@pytest.mark.full
def test_released_config_and_names() -> None:
    """Every tensor of the first four layers, and all parameters of V4-Flash: 284 billion."""
    raw = RELEASED | {"num_hidden_layers": 4}
    config, network = build(raw)
    assert config.layer_types == (WINDOW, WINDOW, CSA, HCA)
    assert config.mlp_layer_types == ("hash_moe",) * 3 + ("moe",)
    parameters = dict(network.named_parameters())
    found = {
        name: tuple(binding.rule.pack([parameters[n].detach() for n in binding.parameters]).shape)
        for name, binding in bind_names(network, family("deepseek_v4").names).items()
    }
    assert found == their_shapes(raw)
    each = [sum(p.numel() for p in layer.parameters()) for layer in network.layers]
    tables = [layer.feed_forward.router.table.numel() for layer in network.layers[:3]]
    csa, hca = each[2] - tables[2] + 256, each[3]  # without a table, with a correction
    assert count(network) + 20 * csa + 19 * hca == 284_334_567_511


def test_files_of_the_makers(tmp_path: Path) -> None:
    """Their keys and names, maps of 8-bit floats with a power of two for a block, experts of 4-bit
    floats, and layers for a second token; dequantized by loops here.
    """
    sizes = SIZES | {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    model = Case("DeepseekV4", sizes | {"layer_types": [CSA, HCA]}).model(
        compress_rates={CSA: 4, HCA: 128}
    )
    tensors = {makers_name(name): x for name, x in load_file(saved(model, tmp_path) / FILE).items()}
    state, packed = dict(tensors), {"mtp.0.norm.weight": torch.ones(64)}
    make = torch.Generator().manual_seed(1)
    for name, x in tensors.items():
        scale = name.removesuffix("weight") + "scale"
        if ".experts." in name:
            codes = torch.randint(0, 256, (x.shape[0], x.shape[1] // 2), generator=make)
            powers = torch.randint(122, 126, (x.shape[0], x.shape[1] // 32), generator=make)
            nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7] * (
                1 - (nibbles >> 3) * 2
            )
            state[name] = values * 2.0 ** (powers - 127).repeat_interleave(32, 1)
            packed[name] = codes.to(torch.uint8).view(torch.int8)
            packed[scale] = powers.to(torch.uint8).view(torch.float8_e8m0fnu)
        elif name.endswith((".wq_b.weight", ".wo_a.weight")) and "indexer" not in name:
            packed[name] = (x / 2.0**-3).to(torch.float8_e4m3fn)
            state[name] = packed[name].float() * 2.0**-3
            grid = torch.full((-(-x.shape[0] // 128), -(-x.shape[1] // 128)), 124)
            packed[scale] = grid.to(torch.uint8).view(torch.float8_e8m0fnu)
        else:
            packed[name] = x
    keys = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"):
        del keys[key]
    keys |= {"compress_ratios": [4, 128, 0], "num_hash_layers": 1, "expert_dtype": "fp4"}
    theirs = {"scale_fmt": "ue8m0", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    found = []
    for name, files, more in (
        ("plain", state, {}),
        ("packed", packed, {"quantization_config": theirs | {"quant_method": "fp8"}}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        own = {k: v for k, v in files.items() if not (k.endswith("bias") and ".0." in k)}
        if "layers.1.ffn.gate.tid2eid" in own:
            own["layers.1.ffn.gate.bias"] = torch.zeros(8)
            del own["layers.1.ffn.gate.tid2eid"]
        save_file({k: v.contiguous() for k, v in own.items()}, folder / FILE)
        (folder / "config.json").write_text(json.dumps(keys | more))
        found.append(regard.load(folder))
    ids = ids_of(model)
    assert torch.equal(found[0](ids), found[1](ids))
    assert (found[1].config.layer_types, found[1].config.qk_rope_head_dim) == ((CSA, HCA), 4)
    assert found[1].config.mlp_layer_types == ("hash_moe", "moe")


FILE = "model.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0, 8]}, r"compress_ratios has \[8\]; supported are \[0, 4, 128\]"),
        ({"compress_ratios": [0, 4]}, "layer_types has 2 entries and num_hidden_layers is 43"),
        ({"layer_types": [WINDOW] * 43}, "layer_types is .*, and compress_ratios means .*; keep"),
        ({"compress_ratios": None, "layer_types": ["csa"] * 43}, r"layer_types\[0\] is 'csa'"),
        ({"compress_rates": {CSA: 4}}, "compress_rates.'heavily_compressed_attention'. is None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor means 256; keep one"),
        ({"qk_rope_head_dim": 256}, "at most head_dim and index_head_dim, 128"),
        ({"o_groups": 7}, "o_groups is 7; it must divide"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only 'sqrtsoftplus'"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; only 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "whose frequencies depend on"),
        (
            {
                "rope_scaling": None,
                "rope_parameters": {"main": YARN | {"rope_theta": 1e4}, "compress": {}},
            },
            "layers with only a window must have",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(regard.ArgumentError, match=message):
        parse(DeepseekV4Config, RELEASED | change)


def test_a_table_of_experts_stays_whole_numbers(tmp_path: Path) -> None:
    """Also in a narrow dtype; one of floats is refused."""
    model = CASES["window, HCA, CSA; hash routing"].model()
    narrow = regard.load(saved(model, tmp_path), dtype=torch.bfloat16)
    router: Any = narrow.decoder.layers[0].feed_forward.router
    assert torch.equal(router.table, model.model.layers[0].mlp.gate.tid2eid)
    mixes: Any = narrow.decoder.layers[0].attention_residual
    assert mixes.mixes.linear.weight.dtype == torch.float32
    tensors = load_file(tmp_path / FILE)
    name = next(n for n in tensors if n.endswith("layers.0.ffn.gate.tid2eid"))
    save_file(tensors | {name: tensors[name].float()}, tmp_path / FILE)
    with pytest.raises(regard.FileError, match=r"is torch\.float32; a weight must be an integer"):
        regard.load(tmp_path)
