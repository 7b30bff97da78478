"""The table of who uses each mechanism: complete, buildable at real sizes, and every symbol of
every equation explained.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.nn.head_steps import WeightlessRMSNorm
from regard.nn.norms import HeadNorm, JoinedHeadsRMSNorm, RMSNorm
from regard.nn.variants import VARIANTS
from regard.nn.variants.registry import option_meanings, option_names, required_options
from regard.nn.variants.usage import USAGE, equation_symbols


@pytest.mark.parametrize("name", VARIANTS)
def test_every_mechanism_has_a_row(name: str) -> None:
    usage, entry = USAGE[name], VARIANTS[name]
    assert usage.models
    assert usage.choose
    assert usage.avoid
    assert set(usage.options) >= set(required_options(entry))
    with torch.device("meta"):
        assert sum(x.numel() for x in entry.build(4096, 32, **usage.options).parameters()) >= 0
    symbols = equation_symbols(name, entry.equation)
    assert all(symbols.values())
    assert set(usage.symbols) - set(symbols) == set(), "a symbol that its equation does not have"
    meanings = option_meanings(entry)
    assert tuple(meanings) == option_names(entry)
    assert all(meanings.values())


@pytest.mark.parametrize(
    "name", [name for name, entry in VARIANTS.items() if "norm(" in entry.equation]
)
def test_the_norm_of_an_equation_is_the_norm_of_the_module(name: str) -> None:
    """The words say which norm it is, and whether it is over one head, all heads or a latent."""
    with torch.device("meta"):
        module = VARIANTS[name].build(4096, 32, **USAGE[name].options)
    kinds = {type(each) for each in module.modules()}
    word = equation_symbols(name, VARIANTS[name].equation)["norm"]
    kind, _, where = word.partition(" norm of ")
    assert {
        "RMS": {RMSNorm, JoinedHeadsRMSNorm, WeightlessRMSNorm},
        "group": {HeadNorm},
        "layer": {nn.LayerNorm},
    }[kind] & kinds
    assert (where == "all heads together") == (
        JoinedHeadsRMSNorm in kinds or name == "qk_norm_flat"
    )
    assert (where == "a latent") == (name in {"mla", "mfa", "grouped_latent", "mlra"})


def test_no_row_is_left_of_a_mechanism_that_is_gone() -> None:
    assert set(USAGE) == set(VARIANTS)


def test_a_symbol_without_a_meaning_is_found() -> None:
    with pytest.raises(KeyError, match="zeta in the equation of gqa"):
        equation_symbols("gqa", "z_h = softmax(zeta q_h) v_g")


def test_symbols_have_the_meaning_of_their_mechanism() -> None:
    assert equation_symbols("sliding_window", "i - W")["W"].startswith("the window")
    assert equation_symbols("delta_net", "W x")["W"] == "a learned matrix"
    of_gqa = equation_symbols("gqa", VARIANTS["gqa"].equation)
    assert of_gqa["g"] == "index of a key/value head"
    assert "g" in equation_symbols("gated_delta_net", VARIANTS["gated_delta_net"].equation)


def test_a_meaning_that_stands_elsewhere_is_looked_up() -> None:
    assert (
        option_meanings(VARIANTS["longformer"])["bias"]
        == (option_meanings(VARIANTS["mha"])["bias"])
    )
