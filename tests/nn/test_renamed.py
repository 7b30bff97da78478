"""Former names: they still work, with a warning, and weights saved under them still load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
import regard.nn
import regard.positions
from regard.cli.app import run as run_command
from regard.models.families.regard import Config
from regard.models.families.regard import build as make_network
from regard.models.save import save
from regard.nn import Block, DecoderBlock, ExpertGroups, PreNorm
from regard.nn.longformer import Longformer
from regard.nn.renamed_weights import RENAMED_WEIGHTS, current_weight_name
from regard.nn.variants import build, cross_attention, mha
from regard.nn.variants.projections import separate_qkv
from regard.nn.variants.registry import VARIANTS, check_options, parse_options
from regard.positions import Rotary

OLD_CLASSES = {
    "Clipped": "ClippedQKV",
    "Differential": "DifferentialProjection",
    "Embed": "InputEmbedding",
    "Fused": "FusedQKV",
    "Gated": "GatedProjection",
    "Groups": "ExpertGroups",
    "Heads": "HeadProjection",
    "Latent": "LatentProjection",
    "NormedPath": "NormedResidual",
    "PerHead": "PerHeadProjection",
    "Prefix": "PrefixRecomputer",
    "Sandwich": "SandwichNorm",
    "Separate": "SeparateQKV",
    "Sinusoidal": "SinusoidalPositions",
    "States": "EncoderStateProjection",
    "Unprojected": "IdentityProjection",
    "rotary_heads": "rotary_projection",
}


@pytest.mark.parametrize(("old", "new"), OLD_CLASSES.items())
def test_old_names_of_nn_warn_and_are_the_same_object(old: str, new: str) -> None:
    assert old not in regard.nn.__all__
    with pytest.warns(DeprecationWarning, match=rf"regard\.nn\.{old} is now regard\.nn\.{new};"):
        assert getattr(regard.nn, old) is getattr(regard.nn, new)


@pytest.mark.parametrize(
    ("old", "new"), [("Linear", "LinearScaling"), ("Learned", "LearnedPositions")]
)
def test_old_names_of_positions_warn_and_are_the_same_object(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"positions\.{old} is now .*positions\.{new};"):
        assert getattr(regard.positions, old) is getattr(regard.positions, new)


def test_old_parameters_and_attributes_warn() -> None:
    residuals = [PreNorm(nn.LayerNorm(8)) for _ in range(3)]
    with pytest.warns(DeprecationWarning, match="attention_residual"):
        block = Block(
            mha(8, 2),
            nn.Linear(8, 8),
            around_attention=residuals[0],
            feed_forward_residual=residuals[1],
        )
    with pytest.warns(DeprecationWarning, match="attention_residual"):
        assert block.around_attention is block.attention_residual is residuals[0]
    with pytest.warns(DeprecationWarning, match="cross_residual"):
        decoder = DecoderBlock(
            mha(8, 2),
            cross_attention(8, 2),
            nn.Linear(8, 8),
            residuals[0],
            around_cross=residuals[1],
            feed_forward_residual=residuals[2],
        )
    caches = decoder.new_caches()
    with pytest.warns(DeprecationWarning, match="self_attention"):
        assert caches.own is caches.self_attention
    with pytest.warns(DeprecationWarning, match="follows_length"):
        assert Rotary(4).follows is False
    with pytest.warns(DeprecationWarning, match="topk"):
        assert ExpertGroups(4, kept=2) == ExpertGroups(4, 2)
    with pytest.warns(DeprecationWarning, match="topk"):
        assert ExpertGroups(4, 2).kept == 2
    with pytest.warns(DeprecationWarning, match="local_project"):
        layer = Longformer(
            local=separate_qkv(8, 2, 2, 4),
            global_project=separate_qkv(8, 2, 2, 4),
            output=nn.Linear(8, 8),
            window=3,
        )
    with pytest.warns(DeprecationWarning, match="global_project"):
        assert layer.globally is layer.global_project
    with pytest.warns(DeprecationWarning, match="summary"):
        assert VARIANTS["mqa"].sentence == VARIANTS["mqa"].summary


def test_the_old_option_of_the_delta_rule_is_taken_everywhere() -> None:
    entry = VARIANTS["delta_net"]
    with pytest.warns(DeprecationWarning, match="max_beta"):
        layer: Any = build("delta_net", 32, 4, most=1.5)
    assert layer.rule.max_beta == 1.5
    assert parse_options(["most=1.5"], entry) == check_options(entry, {"most": 1.5})
    assert check_options(entry, {"most": 1.5}) == {"max_beta": 1.5}
    assert run_command(["describe", "delta_net", "--set", "most=1.5"]) == 0


def old_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a module under its former names."""
    former = {
        "attention_residual.": "around_attention.",
        "cross_residual.": "around_cross.",
        "feed_forward_residual.": "around_feed_forward.",
        "rule.beta_proj.": "rule.strength.",
        "decay.A_log": "decay.rate",
        "decay.dt_bias": "decay.shift",
        "selector.": "select.",
        "local_project.": "local.",
        "global_project.": "globally.",
    }
    state = {}
    for name, tensor in module.state_dict().items():
        for new, old in former.items():
            name = re.sub(rf"(^|\.){re.escape(new)}", rf"\g<1>{old}", name)
        state[name] = tensor.clone()
    return state


def block(name: str) -> Block:
    entry = VARIANTS[name]
    residuals = [PreNorm(nn.LayerNorm(32)) for _ in range(2)]
    return Block(entry.example(), nn.Linear(32, 32), *residuals)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gated_delta_net", "delta_net", "dsa", "longformer", "mqa"])
def test_a_state_dict_with_old_names_loads(name: str) -> None:
    saved, loaded = block(name), block(name)
    state = old_names(saved)
    assert state.keys() != saved.state_dict().keys()
    assert {current_weight_name(n) for n in state} == saved.state_dict().keys()
    loaded.load_state_dict(state)
    for key, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def test_a_decoder_block_with_old_names_loads() -> None:
    def make() -> DecoderBlock:
        residuals = [PreNorm(nn.LayerNorm(8)) for _ in range(3)]
        return DecoderBlock(mha(8, 2), cross_attention(8, 2), nn.Linear(8, 8), *residuals)

    saved, loaded = make(), make()
    state = old_names(saved)
    assert any("around_cross" in n for n in state)
    loaded.load_state_dict(state)
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in saved.state_dict().items())


def test_every_former_pattern_is_a_name_that_no_module_has_now() -> None:
    names = {
        name
        for entry in VARIANTS.values()
        for name in nn.ModuleDict({"attention": entry.example()}).state_dict()
    }
    assert all(current_weight_name(name) == name for name in names)
    assert len(RENAMED_WEIGHTS) == 9


def test_a_folder_that_an_earlier_release_saved_loads(tmp_path: Path) -> None:
    options = {"groups": 2, "value_dim": 8}
    config = Config(19, 32, 48, 2, 4, "gated_delta_net", attention_options=options)
    network = make_network(config)
    save(network, config, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    state = old_names(network)
    assert len(state.keys() - tensors.keys()) == 2 * 5, "two norms, A_log, dt_bias and beta_proj"
    save_file(state, path)
    loaded = regard.load(str(tmp_path))
    filled = loaded.decoder.state_dict()
    assert all(torch.equal(filled[name], value) for name, value in network.state_dict().items())


def test_a_folder_with_old_and_new_names_of_one_weight_is_refused(tmp_path: Path) -> None:
    config = Config(19, 32, 48, 1, 4, "mqa")
    network = make_network(config)
    save(network, config, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | old_names(network), path)
    with pytest.raises(regard.FileError, match=r"are two names of layers\.0\.\w+_residual"):
        regard.load(str(tmp_path))
