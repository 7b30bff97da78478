"""GPT-2 and the decoders that follow it, of transformers, saved by it and loaded here; wrong
variants of each must be far.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard.biases.distance import alibi_slopes
from regard.errors import ArgumentError
from regard.nn import Block, FusedQKV, ParallelBlock, PreNorm
from regard.nn.blocks.blocks import NormedResidual
from regard.span import Span
from tests.parity.families import changes
from tests.parity.families.cases import Case, assert_case, assert_wrong, with_wrong
from tests.parity.families.changes import put, zeros
from tests.parity.families.harness import (
    LENGTH,
    assert_decoder,
    assert_refused,
    ids_of,
    saved,
    transformers,
)
from tests.parity.families.test_llama_relatives import (
    OTHER_SCALE,
    WINDOW,
    one_after_the_other,
    other_activation,
    other_layout,
)

P, H, CLIP = 48, 6, 0.7
SPECIAL = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1}
GPT2: dict[str, Any] = SPECIAL | {"n_embd": 36, "n_head": 3, "n_layer": 2, "n_positions": P}
NEOX: dict[str, Any] = SPECIAL | {
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "rotary_pct": 0.5,
}
BLOOM: dict[str, Any] = SPECIAL | {"hidden_size": 48, "n_head": H, "n_layer": 2}
NORMED = BLOOM | {"apply_residual_connection_post_layernorm": True, "n_head": 3}
MPT: dict[str, Any] = SPECIAL | {"d_model": 48, "n_heads": H, "n_layers": 2, "max_seq_len": 64}
SIZES: dict[str, Any] = SPECIAL | {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
}
FALCON = SIZES | {"max_position_embeddings": 2048}
FALCON_GROUPS = FALCON | {"new_decoder_architecture": True}


@pytest.fixture(autouse=True)
def steepness_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes the slopes for any alibi_bias_max, and asks for 8: here it is asked for
    the config's.
    """
    model = transformers.models.mpt.modeling_mpt.MptModel
    right = model.build_mpt_alibi_tensor

    def build(self: Any, heads: int, length: int, device: Any = None) -> Any:
        return right(self, heads, length, self.config.attn_config.alibi_bias_max, device)

    monkeypatch.setattr(model, "build_mpt_alibi_tensor", build)


def untransposed(network: Any) -> None:
    """The square matrix [in, out] taken for [out, in]."""
    for attention in changes.attentions(network):
        attention.output.weight.data = attention.output.weight.data.T


def later_positions(network: Any) -> None:
    table = network.embed.positional.weight
    table.data = table.data.roll(-1, 0)


class Backwards(nn.Module):
    """Positions counted from the end."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, positions: Any) -> Tensor:
        found: Tensor = self.inner(Span(0, LENGTH))
        return found.flip(1)


def backwards(network: Any) -> None:
    network.embed.positional = Backwards(network.embed.positional)


def layers_from_zero(network: Any) -> None:
    for i, attention in enumerate(changes.attentions(network)):
        attention.scale = 12**-0.5 / max(i, 1)


def in_turn(network: Any) -> None:
    """One sublayer after the other, each behind its own norm."""
    for i, block in enumerate(network.layers):
        paths = (block.attention_residual, block.feed_forward_residual)
        network.layers[i] = Block(block.attention, block.feed_forward, *paths)


def one_norm(network: Any) -> None:
    """Both sublayers behind the first norm, as in GPT-J."""
    for block in network.layers:
        block.feed_forward_residual.norm = block.attention_residual.norm


def other_paths(network: Any) -> None:
    for block in network.layers:
        for name in ("attention_residual", "feed_forward_residual"):
            old = getattr(block, name)
            other = PreNorm if isinstance(old, NormedResidual) else NormedResidual
            setattr(block, name, other(old.norm))


def clipped_values_only(network: Any) -> None:
    for attention in changes.attentions(network):
        project = attention.project
        project._heads = lambda x, which, p=project: (
            type(p)._heads(p, x, which) if which == 2 else FusedQKV._heads(p, x, which)
        )


def biased_norms(network: Any) -> None:
    """As if the norms had a bias that was left where it was."""
    for module in network.modules():
        if isinstance(module, nn.LayerNorm):
            module.bias = nn.Parameter(0.1 * module.weight.data, requires_grad=False)


def other_rows(network: Any) -> None:
    """[q k v] of each group read as [all q | all k | all v], or the reverse."""
    for attention in changes.attentions(network):
        old = attention.project
        if old.groups == 1:  # both orders are the same: queries, then the key and the value
            sizes = old.linear.weight.data.split(old.head_dim)
            for n, row in enumerate([*sizes[:-2], sizes[-1].clone(), sizes[-2].clone()]):
                old.linear.weight.data[n * old.head_dim : (n + 1) * old.head_dim] = row
        else:
            changes.reorder(attention, "parts" if old.order == "groups" else "groups")


def shifted_positions(network: Any) -> None:
    table = network.embed.positional.weight
    table.data = table.data.roll(1, 0)


def rotate(*arguments: Any, **options: Any) -> changes.Change:
    return changes.rotate(slice(None), *arguments, **options)


EVERY = (OTHER_SCALE, other_activation)
ACTIVATION = changes.activation(nn.SiLU())
SLOPES = (
    changes.slopes("slopes from 2^0", [2.0**-h for h in range(H)]),
    changes.slopes("slopes 2^(-8h/6)", [2.0 ** (-8 * (h + 1) / H) for h in range(H)]),
)
CASES: dict[str, Case] = {
    "gpt2": Case(
        "GPT2",
        GPT2,
        (
            untransposed,
            later_positions,
            backwards,
            changes.head_by_head,
            changes.keys_for_values,
            changes.norms_swapped,
            changes.each("no scale", scale=1.0),
            changes.each("scale of the model", scale=6.0**-1),
            ACTIVATION,
        ),
        head="LMHeadModel",
        other_gelu=True,
    ),
    "gpt2, scale by layer, untied, wide": Case(
        "GPT2",
        GPT2
        | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 50, "tie_word_embeddings": False},
        (put("layers.*.attention", scale=12**-0.5), layers_from_zero),
        head="LMHeadModel",
    ),
    "gpt2, no scale, relu": Case(
        "GPT2",
        GPT2 | {"scale_attn_weights": False, "activation_function": "relu"},
        head="LMHeadModel",
    ),
    "gpt2, erf": Case(
        "GPT2",
        GPT2 | {"activation_function": "gelu", "n_head": 6},
        (ACTIVATION,),
        head="LMHeadModel",
        other_gelu=True,
    ),
    "gpt_neox": Case(
        "GPTNeoX",
        NEOX,
        (
            changes.head_by_head,
            rotate(16),
            rotate(16, rotary_dim=4),
            rotate(16, rotary_dim=8, layout="interleaved"),
            rotate(16, 500.0, rotary_dim=8),
            in_turn,
            one_norm,
            changes.norms_swapped,
            ACTIVATION,
            changes.each("scale of the model", scale=48**-0.5),
        ),
        start=1000,
        other_gelu=True,
    ),
    "gpt_neox, one after the other, no biases": Case(
        "GPTNeoX",
        NEOX | {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    ),
    "gpt_neox, tied, all of it turns, linear": Case(
        "GPTNeoX",
        NEOX
        | {
            "tie_word_embeddings": True,
            "rotary_pct": 1.0,
            "rotary_emb_base": 500,
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        },
    ),
    "bloom": Case(
        "Bloom",
        BLOOM,
        (
            changes.head_by_head,
            put("embed", norm=nn.Identity()),
            other_paths,
            changes.no_bias,
            *SLOPES,
            changes.slopes("slopes sorted", sorted(alibi_slopes(H), reverse=True)),
            changes.norms_swapped,
            ACTIVATION,
        ),
        other_gelu=True,
    ),
    "bloom, normed path, three heads": Case("Bloom", NORMED, (other_paths,)),
    "bloom, untied, four heads": Case("Bloom", BLOOM | {"tie_word_embeddings": False, "n_head": 4}),
    "mpt": Case(
        "Mpt",
        MPT,
        (
            changes.head_by_head,
            changes.keys_for_values,
            changes.no_bias,
            biased_norms,
            changes.norms_swapped,
            *SLOPES,
            ACTIVATION,
        ),
        other_gelu=True,
    ),
    "mpt, clipped, own scale, flatter": Case(
        "Mpt",
        MPT | {"attn_config": {"clip_qkv": CLIP, "softmax_scale": 0.6, "alibi_bias_max": 4}},
        (
            put("layers.*.attention.project", __class__=FusedQKV),
            clipped_values_only,
            changes.each("usual scale", scale=None),
            changes.slopes("usual slopes", alibi_slopes(H)),
            changes.slopes("twice", [slope**2 for slope in alibi_slopes(H)]),
        ),
        other_gelu=True,
    ),
    "mpt, untied, four heads": Case("Mpt", MPT | {"tie_word_embeddings": False, "n_heads": 4}),
    "falcon": Case("Falcon", FALCON, (*EVERY, other_rows, other_layout, one_after_the_other)),
    "falcon, groups": Case(
        "Falcon",
        FALCON_GROUPS | {"num_kv_heads": 2, "bias": True},
        (*EVERY, other_rows, other_layout),
    ),
    "falcon, groups, one norm": Case(
        "Falcon",
        FALCON_GROUPS | {"num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
        (*EVERY, other_rows, one_after_the_other),
    ),
    "gpt_bigcode": Case(
        "GPTBigCode", SIZES, (*EVERY, other_rows, shifted_positions, changes.norms_swapped)
    ),
    "gpt_bigcode, all keys": Case(
        "GPTBigCode", SIZES | {"multi_query": False}, (*EVERY, changes.head_by_head)
    ),
    "gpt_neo": Case(
        "GPTNeo",
        SIZES | {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
        (
            *EVERY,
            shifted_positions,
            changes.norms_swapped,
            changes.windows(None, WINDOW + 1),
            changes.windows(WINDOW, None),
        ),
    ),
    "gptj": Case(
        "GPTJ",
        SIZES | {"rotary_dim": 4},
        (*EVERY, one_after_the_other, zeros("head.bias"), other_layout),
    ),
    "opt": Case("OPT", SIZES | {"ffn_dim": 40}, (*EVERY, shifted_positions, changes.norms_swapped)),
}


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, tmp_path: Path) -> None:
    mine = assert_case(CASES[case], tmp_path)
    if "neox" in case:
        kind = Block if "one after" in case else ParallelBlock
        assert all(type(block) is kind for block in mine.decoder.layers)


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("case", with_wrong(CASES))
def test_wrong_variants_are_far(case: str, tmp_path: Path) -> None:
    assert_wrong(CASES[case], tmp_path)


def test_a_shared_norm_is_stored_under_its_own_name(tmp_path: Path) -> None:
    shared, own = (CASES[c].load(tmp_path / c)[1] for c in ("falcon", "falcon, groups"))
    one, two = shared.decoder.layers[0], own.decoder.layers[0]
    assert isinstance(one.feed_forward_residual.norm, nn.Identity)
    assert isinstance(two.feed_forward_residual.norm, nn.LayerNorm)


def test_another_order_of_rounding_is_the_same_model(tmp_path: Path) -> None:
    model = CASES["gpt2"].model(reorder_and_upcast_attn=True)
    assert_decoder(model, tmp_path)


def test_names_of_the_hub_of_gpt2(tmp_path: Path) -> None:
    """Without the prefix, and with the masks that older versions stored."""
    model = CASES["gpt2"].model()
    ids = ids_of(model)
    exact = regard.load(saved(model, tmp_path))(ids)
    file = tmp_path / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = torch.ones(P, P).tril()[None, None]
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    file.unlink()
    save_file(tensors, file)
    assert torch.equal(regard.load(tmp_path)(ids), exact)


def test_there_are_no_positions_beyond_the_last(tmp_path: Path) -> None:
    mine = regard.load(saved(CASES["gpt2"].model(), tmp_path))
    with pytest.raises(
        ArgumentError, match=f"position {P} has no vector: .* positions 0 to {P - 1}"
    ):
        mine(torch.full((1, P + 1), 3))
    caches = mine.new_caches()
    mine(torch.full((1, P), 3), caches=caches)
    with pytest.raises(ArgumentError, match=f"position {P} has no vector"):
        mine(torch.full((1, 1), 3), caches=caches)
    assert [len(cache) for cache in caches] == [P, P]


def test_names_of_older_and_newer_files(tmp_path: Path) -> None:
    """With the masks and frequencies that older versions stored, and with the head's newer name."""
    model = CASES["gpt_neox"].model()
    ids = ids_of(model)
    exact = regard.load(saved(model, tmp_path))(ids)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    for i in range(2):
        front = f"gpt_neox.layers.{i}.attention."
        tensors[front + "bias"] = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
        tensors[front + "masked_bias"] = torch.tensor(-1e9)
        tensors[front + "rotary_emb.inv_freq"] = torch.ones(3)
    file.unlink()
    save_file(tensors, file)
    assert torch.equal(regard.load(tmp_path)(ids), exact)
    del tensors["lm_head.weight"]
    file.unlink()
    assert_refused(tmp_path, r"1 missing \['embed_out.weight'\]", tensors)


def test_older_and_newer_keys(tmp_path: Path) -> None:
    """transformers 4 wrote both names of the base and of the part that turns; they must agree."""
    model = CASES["gpt_neox"].model()
    path = saved(model, tmp_path) / "config.json"
    config = regard.load(tmp_path).config
    raw = {k: v for k, v in json.loads(path.read_text()).items() if k != "rope_parameters"}
    both = {
        "rotary_pct": 0.5,
        "partial_rotary_factor": 0.5,
        "rotary_emb_base": 10000,
        "rope_theta": 1e4,
    }
    path.write_text(json.dumps(raw | both))
    assert regard.load(tmp_path).config == config
    message = "rotary_emb_base is 10000 and rope_theta is 500"
    assert_refused(tmp_path, message, rope_theta=500.0)
    path.write_text(json.dumps(raw))
    assert regard.load(tmp_path).config.rotary_pct == 0.25


def test_the_hubs_form_of_bloom(tmp_path: Path) -> None:
    """Names without the prefix, and older names of sizes."""
    model = CASES["bloom"].model()
    ids = ids_of(model)
    exact = regard.load(saved(model, tmp_path))(ids)
    file = tmp_path / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    file.unlink()
    save_file(tensors, file)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["n_embed"], raw["num_attention_heads"] = raw.pop("hidden_size"), raw.pop("n_head")
    path.write_text(json.dumps(raw))
    assert torch.equal(regard.load(tmp_path)(ids), exact)


REFUSED: dict[str, dict[str, Any]] = {
    "attn_config.alibi is False; only True is supported": {"attn_config": {"alibi": False}},
    "attn_config.attn_type is 'multiquery_attention'": {
        "attn_config": {"attn_type": "multiquery_attention"}
    },
    "attn_config.prefix_lm is True": {"attn_config": {"prefix_lm": True}},
    "attn_config.qk_ln is True": {"attn_config": {"qk_ln": True}},
    "attn_config has the unknown key 'clip_qvk'": {"attn_config": {"clip_qvk": 1.0}},
    "attn_config.clip_qkv is -1.0; it must be above 0": {"attn_config": {"clip_qkv": -1.0}},
    "attn_config.alibi_bias_max is null": {"attn_config": {"alibi_bias_max": None}},
    "attn_config is 'alibi'; it must be an object": {"attn_config": "alibi"},
    "no_bias is False": {"no_bias": False},
    "logit_scale is 'inv_sqrt_d_model'": {"logit_scale": "inv_sqrt_d_model"},
    "expansion_ratio is 8": {"expansion_ratio": 8},
    "norm_type is 'rmsnorm'": {"norm_type": "rmsnorm"},
    "dim 48 is not divisible by 5 heads": {"n_heads": 5},
    "hidden_size is 36 and d_model is 48; they mean the same": {"hidden_size": 36},
}


def test_what_is_refused_of_mpt(tmp_path: Path) -> None:
    saved(CASES["mpt"].model(), tmp_path)
    for message, change in REFUSED.items():
        assert_refused(tmp_path, message, **change)
