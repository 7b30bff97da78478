"""Who is compared, at which sizes, and with how many parameters."""

from __future__ import annotations

import pytest

from regard.compare.mechanisms import (
    DEFAULT_NAMES,
    Candidate,
    Shape,
    build_decoder,
    candidates,
    configs,
    count_parameters,
    same_parameters,
)
from regard.compare.speed_and_memory import random_ids
from regard.errors import ArgumentError
from regard.train.losses import next_token_loss
from tests.compare.small import SHAPE


def test_the_default_set() -> None:
    states = {one.name for one in candidates(None, SHAPE) if one.recurrent}
    assert states == {"linear", "gated-delta", "infini"}
    softmax = {"mha", "mqa", "gqa", "mla", "window", "sinks", "nsa"}
    assert softmax | states == set(DEFAULT_NAMES)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("dim,heads,window", [(128, 4, 16), (64, 4, 16), (32, 2, 8), (96, 3, 64)])
def test_every_mechanism_can_be_built_and_trained_at_other_sizes(
    dim: int, heads: int, window: int
) -> None:
    shape = Shape(dim=dim, layers=1, heads=heads, window=window)
    made = configs(candidates(None, shape), shape)
    for name, config in made.items():
        model = build_decoder(config)
        loss = next_token_loss(model, random_ids(config, 1, 9))
        loss.backward()
        assert loss.isfinite(), name
        assert sum(p.numel() for p in model.parameters()) == count_parameters(config)


@pytest.mark.nightly(keep=1)
@pytest.mark.full
@pytest.mark.parametrize("shape", [Shape(), Shape(dim=64, layers=3), SHAPE])
def test_the_same_parameters_within_one_per_cent(shape: Shape) -> None:
    found = configs(candidates(None, shape), shape, "parameters")
    counts = {
        name: sum(p.numel() for p in build_decoder(config).parameters())
        for name, config in found.items()
    }
    assert max(abs(n / counts["mha"] - 1) for n in counts.values()) <= 0.01
    hidden = {name: config.intermediate_size for name, config in found.items()}
    assert hidden["mqa"] > hidden["gqa"] > hidden["mha"] == shape.width
    plain = {
        name: count_parameters(c) for name, c in configs(candidates(None, shape), shape).items()
    }
    assert plain["mqa"] < 0.99 * plain["mha"]  # what the width makes up for


def test_the_nearest_width_is_taken() -> None:
    config = Candidate("mqa", "mqa").config(SHAPE)
    for wanted in range(30_000, 30_300, 50):
        best = min(range(1, 400), key=lambda n: abs(_with(config, n) - wanted))
        assert same_parameters(config, wanted).intermediate_size == best


def _with(config: object, hidden: int) -> int:
    return 256 * 32 * 2 + 3 * 32 + 32 * (32 + 8 + 8 + 32) + 3 * 32 * hidden


def test_parameters_that_cannot_be_met() -> None:
    config = Candidate("mha", "gqa", {"groups": 4}).config(SHAPE)
    with pytest.raises(ArgumentError, match=r"gqa has .* with a feed-forward width of 1.*no width"):
        same_parameters(config, 10_000)
    with pytest.raises(ArgumentError, match="same is 'size'; it must be sizes or parameters"):
        configs(candidates(["mha"], SHAPE), SHAPE, "size")


def test_names_of_the_catalogue_with_options() -> None:
    names = ["mha", "retention", "gqa:groups=1", "sliding_window:groups=2,window=3"]
    found = candidates(names, SHAPE)
    options = [{"groups": 4}, {}, {"groups": 1}, {"groups": 2, "window": 3}]
    assert [one.options for one in found] == options
    assert found[1].recurrent
    assert not found[2].recurrent


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["mhaa"], "'mhaa' is not a mechanism that a decoder can have; did you mean 'mha'"),
        (["bahdanau"], "'bahdanau' is not a mechanism that a decoder can have"),
        (["mha", "mha"], "mha is given twice; name each mechanism once"),
        (["gqa:group=2"], "gqa has no option group; did you mean 'groups'"),
        (["gqa"], None),
        (["packed"], "packed needs a value for bounds"),
        (["gqa:groups=3"], "4 query heads are not divisible by 3"),
    ],
)
def test_names_that_are_refused(names: list[str], message: str | None) -> None:
    if message is None:
        assert candidates(names, SHAPE)[0].options == {"groups": 2}
        return
    with pytest.raises(ArgumentError, match=message):
        candidates(names, SHAPE)


def test_sizes_that_are_refused() -> None:
    with pytest.raises(ArgumentError, match="dim 20 / heads 4 is the width of a head and must be"):
        Shape(dim=20)
    with pytest.raises(ArgumentError, match="window is 7; it must be at least 8"):
        Shape(window=7)
