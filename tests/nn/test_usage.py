"""The table of who uses each mechanism: complete, buildable at real sizes, and every symbol of
every equation explained.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from regard.errors import RegardError
from regard.nn.blocks.norms import HeadNorm, JoinedHeadsRMSNorm, RMSNorm
from regard.nn.projections.steps import WeightlessRMSNorm
from regard.nn.variants import VARIANTS, Variant, build
from regard.nn.variants.registry import equation_symbols, option_names, required_options
from regard.positions import LinearScaling
from tests.annotations import AnnotationMismatch


@pytest.mark.parametrize("name", VARIANTS)
def test_every_mechanism_has_a_row(name: str) -> None:
    entry = VARIANTS[name]
    assert entry.summary.endswith(".")
    assert re.search(r"\d{4}", entry.source), "a source has a year"
    assert entry.users
    assert entry.choose
    assert entry.avoid
    assert set(entry.published_options) >= set(required_options(entry))
    with torch.device("meta"):
        entry.build(4096, 32, **entry.published_options)
    symbols = equation_symbols(entry)
    assert all(symbols.values())
    assert set(entry.symbols) - set(symbols) == set(), "a symbol that its equation does not have"
    assert tuple(entry.option_meanings) == option_names(entry)
    assert all(entry.option_meanings.values())


@pytest.mark.parametrize(
    "name", [name for name, entry in VARIANTS.items() if "norm(" in entry.equation]
)
def test_the_norm_of_an_equation_is_the_norm_of_the_module(name: str) -> None:
    """The words say which norm it is, and whether it is over one head, all heads or a latent."""
    with torch.device("meta"):
        module = VARIANTS[name].build(4096, 32, **VARIANTS[name].published_options)
    kinds = {type(each) for each in module.modules()}
    word = equation_symbols(VARIANTS[name])["norm"]
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


def symbols_of(name: str, equation: str) -> dict[str, str]:
    return equation_symbols(replace(VARIANTS[name], equation=equation))


def test_a_symbol_without_a_meaning_is_found() -> None:
    with pytest.raises(KeyError, match="zeta in the equation of gqa"):
        symbols_of("gqa", "z_h = softmax(zeta q_h) v_g")


def test_symbols_have_the_meaning_of_their_mechanism() -> None:
    assert symbols_of("sliding_window", "i - W")["W"].startswith("the window")
    assert symbols_of("delta_net", "W x")["W"] == "a learned matrix"
    of_gqa = equation_symbols(VARIANTS["gqa"])
    assert of_gqa["g"] == "index of a key/value head"
    assert "g" in equation_symbols(VARIANTS["gated_delta_net"])


def traits(entry: Variant, options: dict[str, object]) -> list[object]:
    """What a constructor gives its parts: their plain attributes and their initial weights."""
    torch.manual_seed(0)
    module = entry.build(32, 4, **{**entry.example_options, **options})
    parts = [*module.named_modules()]
    parts += [("bias", bias)] if (bias := getattr(module, "bias", None)) else []
    plain = [
        (name, type(part).__name__, key, repr(x))
        for name, part in parts
        for key, x in vars(part).items()
        if key not in vars(nn.Module()) and " at 0x" not in repr(x)
    ]
    weights = [(name, x.shape, float(x.sum())) for name, x in module.state_dict().items()]
    return [*plain, *weights]


VALUES = [*range(1, 9), 16, 40, None, True, False, 0.25, 0.5, 2.0, -1.0, (1,), (0, 3), (1, 2, 1)]
VALUES += [(0, 2, 64), (0.5,) * 4, "relu", "dot", LinearScaling(2.0)]
BRANCHES: dict[str, dict[str, object]] = {
    "irope": {"layer": 3, "temperature": "llama4"},
    "lightning": {"layer": 1},
    "local_global": {"layer": 5},
    "luong": {"score": "concat"},
    "rwkv7": {"layer": 1},
    "value_residual": {"layer": 1},
}
"""Options that another option needs to have an effect."""


def choices(annotation: object) -> list[object]:
    """The values of the `Literal`s in an annotation."""
    parts = [choices(x) if get_args(x) else [x] for x in get_args(annotation)]
    return [x for part in parts for x in part]


@pytest.mark.full(keep=20)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_option_reaches_the_module(name: str) -> None:
    entry, without_effect = VARIANTS[name], []
    for option, parameter in list(signature(entry.build).parameters.items())[2:]:
        for base in ({}, BRANCHES.get(name, {})):
            before = traits(entry, base)
            for value in (*VALUES, *choices(parameter.annotation)):
                with suppress(AnnotationMismatch, AttributeError, TypeError, ValueError):
                    if traits(entry, {**base, option: value}) != before:
                        break
            else:
                continue
            break
        else:
            without_effect.append(option)
    assert without_effect == []


@pytest.mark.parametrize(
    ("name", "heads", "options", "message"),
    [
        ("gqaa", 4, {}, r"no mechanism is named 'gqaa'; did you mean 'gqa'\?"),
        ("gqa", 4, {"groops": 2}, r"gqa\(\) has no argument 'groops'; did you mean 'groups'\?"),
        ("gqa", 4, {}, r"gqa\(\) needs a value for groups"),
        ("gqa", 4, {"groups": None}, "groups of gqa is None; it must be int"),
        ("gqa", 4, {"groups": 3}, "not divisible by 3 key/value heads"),
        ("gqa", 5, {"groups": 1}, "dim 32 is not divisible by 5 heads; give head_dim"),
    ],
)
def test_wrong_names_and_options_are_refused(
    name: str, heads: int, options: dict[str, object], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        build(name, 32, heads, **options)


def test_a_constructor_shows_all_its_options() -> None:
    """What `help` and editors read: the set's options beside its own, with types and defaults."""
    gqa = VARIANTS["gqa"].build
    assert str(signature(gqa)).startswith(
        "(dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0,"
    )
    text = gqa.__doc__ or ""
    for part in ("z_h = softmax(", "groups: the key/value heads G", "Raises:", ">>> ", "Source:"):
        assert part in text
    assert get_type_hints(gqa)["groups"] is int
