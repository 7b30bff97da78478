"""The names by which generation asks for caches, and what each class makes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import typer
from typer.testing import CliRunner

import regard
from regard.caches import (
    CACHES,
    BoundedPages,
    Cache,
    Evicting,
    Fixed,
    Growing,
    LayerSize,
    Paged,
    make_full_cache,
)
from regard.caches.base import check_same_layout, check_update
from regard.caches.quantization import QuantizedGroups, dequantize, group_shapes
from regard.cli.generate import generate
from regard.masks import Sinks, Window, reach
from regard.registry import is_builtin
from regard.span import Span

NAMES = {
    "growing": (LayerSize(), {}, None),
    "fixed": (LayerSize(9), {"capacity": 9}, None),
    "paged": (LayerSize(17, rows=2), {"page_size": 16, "pages": 4}, None),
    "quantized": (
        LayerSize(widths=(80, 80)),
        {"bits": 8, "group": 20, "residual": 128, "axes": ["channel", "token"]},
        None,
    ),
    "fp8": (LayerSize(widths=(80, 80)), {"format": "e4m3"}, None),
    "ring": (None, None, Window(9)),
    "streaming": (None, None, Window(5) | Sinks(4)),
}


def test_the_names() -> None:
    builtin = {name: kind for name, kind in CACHES if is_builtin(kind)}
    chooses = {x for x, kind in builtin.items() if issubclass(kind, Evicting | BoundedPages)}
    assert set(builtin) - chooses == set(NAMES)
    evicting = chooses - {"quest"}
    assert evicting == {"h2o", "tova", "snapkv", "key_norm", "keydiff"} | {
        "adakv",
        "pyramidkv",
        "expected_attention",
    }
    assert builtin["quest"].evicts
    assert builtin["quest"].min_context == 32, "two pages"
    assert all(builtin[name].evicts and builtin[name].min_context == 8 for name in evicting)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_makes(name: str) -> None:
    size, settings, mask = NAMES[name]
    kind = CACHES.find(name)
    assert kind.narrowing_mask(9) == mask
    assert kind.evicts == (mask is not None)
    if size is not None:
        made = kind.for_layer(size)
        assert type(made) is kind
        assert made.settings == settings
        again = make_full_cache(name, size.slots, rows=size.rows, widths=size.widths)
        assert (type(again), again.settings) == (kind, settings)
        assert kind.needs_slots == (size.slots is not None)
    else:
        assert reach(mask).tokens == 9, "a cache that forgets keeps max_context tokens"
        assert kind.min_context == (5 if "sinks" in str(mask) else 1)


@pytest.mark.parametrize("name", ["fixed", "paged"])
def test_a_cache_that_is_allocated_once_needs_its_slots(name: str) -> None:
    message = f"a {name} cache needs slots, the largest number of slots per row"
    with pytest.raises(regard.ArgumentError, match=message):
        make_full_cache(name)


def test_the_command_names_every_cache() -> None:
    app = typer.Typer()
    app.command()(generate)
    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).stdout
    assert all(name in text for name in NAMES)


@pytest.mark.parametrize("make", [Growing, lambda: Fixed(20), lambda: Paged(4, 9)])
def test_a_row_is_repeated(make: Callable[[], Cache]) -> None:
    cache = make()
    cache.update((torch.arange(5.0).view(1, 1, 5, 1),), Span(0, 5))
    for rows in (1, 3):
        other = cache.repeated(rows, 20)
        (memory,), _ = other.update((torch.full((rows, 1, 1, 1), 9.0),), Span(5, 1))
        assert memory.flatten(1).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 9.0]] * rows
        assert len(cache) == 5


def test_an_empty_paged_cache_has_no_rows_to_select() -> None:
    cache = Paged(4, 9)
    cache.select(torch.tensor([0, 0]))
    assert len(cache) == 0


@pytest.mark.parametrize(
    "positions, error, message",
    [
        ([0, 1], regard.ArgumentTypeError, "positions are list; they must be a regard.Span or"),
        (torch.zeros(1, 2), regard.ArgumentTypeError, "positions are torch.float32; they must be"),
        (torch.zeros(2).long(), regard.ArgumentError, r"positions are \(2,\); they must be \[bat"),
        (Span(0, 3), regard.ArgumentError, r"memory 0 is \(1, 1, 2, 4\) at 3 positions"),
        (torch.zeros(3, 2).long(), regard.ArgumentError, r"positions are \(3, 2\) for memory of"),
    ],
)
def test_positions_that_do_not_fit(positions: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        check_update((torch.zeros(1, 1, 2, 4),), positions)  # type: ignore[arg-type]


def test_memory_that_does_not_fit() -> None:
    one, two = torch.zeros(1, 1, 2, 4), torch.zeros(2, 1, 2, 4)
    with pytest.raises(regard.ArgumentError, match="memory has parts of batch 1 and 2"):
        check_update((one, two), Span(0, 2))
    with pytest.raises(regard.ArgumentError, match="memory 0 is on meta, and the cache holds it"):
        check_same_layout((one,), (one.to("meta"),))


def test_a_part_that_is_not_quantized_is_its_own_code() -> None:
    x = torch.randn(1, 2, 5, 4)
    none = x.new_zeros(1, 0)
    made = QuantizedGroups(x, none, none, torch.zeros(1, 0, dtype=torch.int64), none)
    assert dequantize(made, "exact", (1, 2, 5, 4), bits=8) is x
    assert group_shapes((1, 2, 5, 4), "exact", bits=8, group=4)[0] == x.shape
