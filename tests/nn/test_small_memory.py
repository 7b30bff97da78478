"""TPA, MFA, GTA, grouped latents and MLRA: their definitions, what their caches hold, and the
mechanisms that they are with other sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.caches import Quantized
from regard.errors import ArgumentError
from regard.nn.projections.factored import (
    LowRankHeads,
    TensorProductHeads,
    TensorProductProjection,
    TiedProjection,
)
from regard.nn.projections.heads import HeadProjection
from regard.nn.projections.latent import GroupedLatentProjection
from regard.nn.variants import VARIANTS, build
from regard.positions import Rotary
from tests.nn.catalogue import example, tokens
from tests.oracles import small_memory as oracle
from tests.rules import GRADIENT, assert_close_rule


def listed(module: nn.Module, **names: str) -> dict[str, Any]:
    return {key: module.get_parameter(name).tolist() for key, name in names.items()}


def definition(name: str, module: Any, x: Tensor, seed: int = 0) -> Tensor:
    """The mechanism of the catalogue in plain loops, for one sequence x [T,M]."""
    rows = x.tolist()
    out = {"out": "output.weight"}
    if name == "tpa":
        names = {f"{s}{f}": f"project.{s}.{f}" for s in "qkv" for f in "ab"}
        names = {k: f"{v}{'.linear' if k[1] == 'b' else ''}.weight" for k, v in names.items()}
        found = oracle.tensor_products(rows, listed(module, **names, **out), 4, 3, 2)
    elif name == "mfa":
        names = {"k": "project.k.linear.weight", "v": "project.v.linear.weight"}
        names |= {part: f"project.q.linear.{part}.weight" for part in ("down", "up")}
        norm = module.project.q.linear.norm.weight.tolist()
        found = oracle.low_rank_queries(rows, listed(module, **names, **out), norm, 4)
    elif name == "gta":
        names = {"q": "q", "v": "v", "r": "rotated"}
        names = {k: f"project.{v}.linear.weight" for k, v in names.items()}
        found = oracle.tied(rows, listed(module, **names, **out), 4, 2)
    else:
        project = module.project
        names = {"q_down": "q.down", "q_up": "q.up.linear", "down": "kv_down"}
        names = {k: f"project.{v}.weight" for k, v in names.items()}
        norms = [m.weight.tolist() for m in (project.q.norm, *project.kv_norms)]
        found = oracle.grouped_latents(
            rows,
            listed(module, **names, **out),
            norms,
            [m.weight.tolist() for m in project.kv_ups],
            heads=4,
            branches=project.branches,
            nope=8,
            rope=4,
            value=8,
        )
    return torch.tensor(found, dtype=torch.float64)


NAMES = ("tpa", "mfa", "gta", "grouped_latent", "mlra")


@pytest.mark.parametrize("name", NAMES)
def test_the_mechanism_is_its_definition(name: str) -> None:
    module, x = example(VARIANTS[name]), tokens(6, B=1)
    found, right = module(x)[0].detach(), definition(name, module, x[0])
    assert (found - right).abs().max() < 1e-12
    assert (module(x.flip(1))[0].detach() - right).abs().max() > 0.01, "negative control"


@pytest.mark.parametrize("name", ["grouped_latent", "mlra"])
def test_both_forms_agree_forwards_and_backwards(name: str) -> None:
    expand, absorb = (
        build(name, 32, 4, **VARIANTS[name].example_options, form=form).double()
        for form in ("expand", "absorb")
    )
    absorb.load_state_dict(expand.state_dict())
    found = []
    for module in (expand, absorb):
        x = tokens(9).requires_grad_()
        out = module(x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    low = [copy_of(module, torch.float32) for module in (expand, absorb)]
    for i, factor in ((0, 2.0), (1, GRADIENT)):
        assert (found[0][i] - found[1][i]).abs().max() < 1e-10 * found[0][i].abs().max()
        assert_close_rule(low[1][i], low[0][i], found[0][i], factor, name)


def copy_of(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    x = tokens(9, dtype=dtype).requires_grad_()
    out = module.to(dtype)(x)
    out.square().sum().backward()
    return out.detach(), x.grad


def test_what_the_caches_hold_at_real_sizes() -> None:
    with torch.device("meta"):
        values = {
            "tpa": build("tpa", 4096, 32, rank=2).describe(8).kv_per_token.value,
            "gta": build("gta", 4096, 32, groups=8).describe(8).kv_per_token.value,
            "mfa": build("mfa", 4096, 32, q_rank=8, head_dim=256).describe(8).kv_per_token.value,
        }
    assert values == {"tpa": 640, "gta": 1088, "mfa": 512}


def test_a_quantized_cache_knows_the_widths_of_the_parts() -> None:
    from regard.models.generation import cache_config

    layer = nn.Module()
    layer.attention = example(VARIANTS["gta"], dtype=torch.float32)
    made = cache_config.CacheConfig("quantized")._layer_cache(layer, 1)
    assert isinstance(made, Quantized)
    x = tokens(200, B=1, dtype=torch.float32)
    with torch.no_grad():
        near, exact = layer.attention(x, None, made), layer.attention(x)
    assert (near - exact).abs().max() < 0.1 * near.abs().max()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="each must be at least 1"):
        TensorProductHeads(8, 4, 6, 0)
    with pytest.raises(ArgumentError, match="must have the same number of heads"):
        TensorProductProjection(*(TensorProductHeads(8, n, 6, 2) for n in (4, 4, 2)))
    with pytest.raises(ArgumentError, match="rank is 0; it must be at least 1"):
        LowRankHeads(8, 4, 6, rank=0)
    with pytest.raises(ArgumentError, match="rotated and rotary half of it in one head"):
        TiedProjection(
            HeadProjection(8, 4, 8), HeadProjection(8, 2, 8), HeadProjection(8, 1, 8), Rotary(8)
        )
    with pytest.raises(ArgumentError, match="it must be a multiple of 4"):
        build("gta", 24, 4, groups=2)
    sizes = {"kv_rank": 8, "nope_dim": 8, "value_dim": 8}
    with pytest.raises(ArgumentError, match="branches must divide latents"):
        GroupedLatentProjection(32, 4, Rotary(4), latents=3, **sizes)
    with pytest.raises(ArgumentError, match="latents is 0; it must be at least 1"):
        GroupedLatentProjection(32, 4, Rotary(4), latents=0, **sizes)
    with pytest.raises(ArgumentError, match="form is 'naive'; it must be one of"):
        GroupedLatentProjection(32, 4, Rotary(4), latents=2, form="naive", **sizes)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="rope_dim is 3; it must be even"):
        build("grouped_latent", 32, 4, q_rank=24, rope_dim=3, **sizes)
    project = GroupedLatentProjection(32, 4, Rotary(4), latents=2, form="absorb", **sizes)
    project.kv_ups[0] = nn.Identity()
    project.kv_ups[0].weight = None
    with pytest.raises(ArgumentError, match="without a weight tensor"):
        project.up()
