"""Name tables: numbers of layers, numbers that a name has anyway, and as many as there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.models.checkpoint.family import (
    HeadRows,
    NameTable,
    TensorRule,
    bind_names,
    stacked_rows,
    transposed,
)
from regard.nn import HeadProjection


def chain(layers: int, parts: int) -> nn.Module:
    """layers.{}.steps.{}: linear maps of 2, without bias."""
    network = nn.Module()
    network.layers = nn.ModuleList(nn.Module() for _ in range(layers))
    for layer in network.layers:
        layer.steps = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(parts))
    return network


def test_a_number_in_our_name_is_itself() -> None:
    """A norm that is the first step of a head, in each of 11 layers."""
    names: NameTable = {
        "h.{}.first": "layers.{}.steps.0.weight",
        "h.{}.last": transposed("layers.{}.steps.1.weight"),
    }
    found = bind_names(chain(11, 2), names)
    assert {name: binding.parameters for name, binding in found.items()} == {
        f"h.{i}.{place}": (f"layers.{i}.steps.{part}.weight",)
        for i in range(11)
        for part, place in enumerate(("first", "last"))
    }


def test_a_number_for_each_brace() -> None:
    found = bind_names(chain(2, 3), {"h.{}.p.{}": "layers.{}.steps.{}.weight"})
    assert len(found) == 6
    assert found["h.1.p.2"].parameters == ("layers.1.steps.2.weight",)


def test_a_star_is_as_many_as_there_are() -> None:
    def join(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts)

    stacked = TensorRule(("layers.{}.steps.*.weight",), lambda stored, _: stored.unbind(), join)  # type: ignore[arg-type]
    found = bind_names(chain(2, 3), {"h.{}": stacked})
    assert found["h.1"].parameters == tuple(f"layers.1.steps.{i}.weight" for i in range(3))
    outer = TensorRule(("layers.*.steps.0.weight",), lambda stored, _: stored.unbind(), join)  # type: ignore[arg-type]
    found = bind_names(chain(12, 1), {"all": outer})
    assert found["all"].parameters == tuple(f"layers.{i}.steps.0.weight" for i in range(12))


def test_several_below_one_another() -> None:
    found = bind_names(
        chain(2, 2), {"h.{}": stacked_rows("layers.{}.steps.0.weight", "layers.{}.steps.1.weight")}
    )
    assert found["h.1"].parameters == ("layers.1.steps.0.weight", "layers.1.steps.1.weight")


def test_a_parameter_without_a_name_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match=r"the name table lacks \['layers.0.steps.1.weight'\]"):
        bind_names(chain(1, 2), {"h.{}": "layers.{}.steps.0.weight"})


def test_rows_head_by_head() -> None:
    """The heads are those of a module of the same layer: 2 in the first layer, 3 in the other."""
    network = nn.Module()
    network.layers = nn.ModuleList(
        nn.ModuleDict({"q": HeadProjection(1, n, 2), "gate": HeadProjection(1, n, 1)})
        for n in (2, 3)
    )
    rows = HeadRows(("layers.{}.q.linear.weight", "layers.{}.gate.linear.weight"), "layers.{}.q")
    found = bind_names(network, {"h.{}": rows})
    for name, order in (
        ("h.0", [0, 1, 10, 2, 3, 11]),
        ("h.1", [0, 1, 10, 2, 3, 11, 4, 5, 12]),
    ):
        shapes = [network.get_parameter(p).shape for p in found[name].parameters]
        parts = [torch.arange(s[0])[:, None] + 10 * i for i, s in enumerate(shapes)]
        stored = found[name].rule.pack(parts)
        assert stored.flatten().tolist() == order
        back = found[name].rule.unpack(stored, shapes)
        assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))
