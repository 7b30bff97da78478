"""Modules of other code: lists with empty entries, blocks that run twice, what a metric gets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.inspect import ablate, attribute, knockout, logit_lens, patch, record, rollout
from tests.inspect.interventions.test_interventions import CLEAN, CORRUPT, foreign
from tests.inspect.small_model import PAIR, difference, model


class Stacked(nn.Module):
    """A decoder of another library, with empty entries in its lists; its first block may run again
    at the end, as all do in ALBERT.
    """

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        first, second = (StackedBlock() for _ in range(2))
        self.layers = nn.ModuleList([first, None, second, *[first] * again])

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x if layer is None else layer(x)
        return SimpleNamespace(logits=self.head(x))


class StackedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16), None, nn.LayerNorm(16)])
        self.attention_in, self.attention_out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.ff = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention_in(self.norms[0](x)).unflatten(-1, (3, 4, 4))
        q, k, v = heads.movedim(-3, 0).transpose(2, 3)
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(z.transpose(1, 2).flatten(2))
        return x + self.ff(self.norms[2](x))


def test_a_foreign_stack_with_empty_entries() -> None:
    network = Stacked().eval()
    table = attribute(network, CLEAN, PAIR)
    with torch.no_grad():
        assert abs(table.values[:-1].sum() - float(difference(network(CLEAN).logits))) < 1e-5
    assert {"layers.0.head.3", "layers.2.mlp"} <= {*table.rows}
    assert logit_lens(network, CLEAN).rows == ("embed", "layers.0", "layers.2")
    assert ablate(network, CLEAN, PAIR).rows == ("layers.0", "layers.2")


REPEATED: dict[str, Callable[[nn.Module], object]] = {
    "states": lambda m: patch(m, CLEAN, CORRUPT, PAIR),
    "heads": lambda m: patch(m, CLEAN, CORRUPT, PAIR, what="heads"),
    "paths": lambda m: patch(m, CLEAN, CORRUPT, PAIR, what="paths"),
    "mean": lambda m: ablate(m, CLEAN, PAIR, method="mean"),
    "reference": lambda m: ablate(m, CLEAN, PAIR, method="resample", reference=CORRUPT),
    "direct": lambda m: attribute(m, CLEAN, PAIR),
    "gradient": lambda m: attribute(m, CLEAN, PAIR, method="gradient"),
    "integrated": lambda m: attribute(m, CLEAN, PAIR, method="integrated_gradients"),
    "lens": lambda m: logit_lens(m, CLEAN),
}


@pytest.mark.parametrize("task", REPEATED)
def test_a_block_that_runs_twice_has_no_single_activation(task: str) -> None:
    """The value of one run must not be put into the other."""
    with pytest.raises(ArgumentError, match="2 times, because one module runs several times"):
        REPEATED[task](Stacked(again=True).eval())


def test_zeros_reach_every_run_of_a_block() -> None:
    network = Stacked(again=True).eval()
    table = ablate(network, CLEAN, PAIR, layers=[0], heads=[1])
    with torch.no_grad():
        base = float(difference(network(CLEAN).logits))
        network.layers[0].attention_out.weight[:, 4:8] = 0
        wanted = float(difference(network(CLEAN).logits)) - base
    assert abs(table.values[0, 0] - wanted) < 1e-5 < abs(wanted)
    assert "one run passes layers.0.z 2 times; each is changed" in str(table.notes[0])
    hidden = knockout(network, CLEAN, PAIR, keys=[1], layers=[0])
    assert "layers.0.pattern 2 times" in str(hidden.notes[0])


class Hidden(nn.Module):
    """One block, whose states leave it in one form or another."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers, self.form = nn.ModuleList([StackedBlock()]), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layers[0](x))


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda y: y,
    "a tuple": lambda y: (y, None),
    "a mapping": lambda y: {"last_hidden_state": y},
    "an attribute": lambda y: SimpleNamespace(logits=y),
}
METRIC_TASKS: dict[str, Callable[..., object]] = {
    "ablate": lambda f, m, clean, _: ablate(m, clean, f, heads=[0]),
    "patch": lambda f, m, clean, corrupt: patch(m, clean, corrupt, f, layers=[-1]),
    "heads": lambda f, m, clean, corrupt: patch(m, clean, corrupt, f, what="heads", heads=[0]),
    "knockout": lambda f, m, clean, _: knockout(m, clean, f, keys=[1]),
    "gradient": lambda f, m, clean, _: attribute(m, clean, f, method="gradient"),
}


@pytest.mark.parametrize("kind", ["a Model", "transformers", *FORMS])
def test_a_metric_gets_one_tensor_from_every_kind_of_model(kind: str) -> None:
    """In each task it gets that of the unchanged run first, and others of its shape."""
    if kind in FORMS:
        clean = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1))
        network: Any = Hidden(FORMS[kind]).eval()
        wanted, corrupt = network.layers[0](clean), -clean
    elif kind == "a Model":
        network, clean, corrupt = model(), CLEAN, CORRUPT
        wanted = network.forward(clean)
    else:
        network, clean, corrupt = foreign("Granite"), CLEAN, CORRUPT
        wanted = network(clean).logits
    for task, run in METRIC_TASKS.items():
        got: list[Tensor] = []

        def number(output: Tensor, seen: list[Tensor] = got) -> Tensor:
            seen.append(output)
            return output[0, -1, 3]

        run(number, network, clean, corrupt)
        assert {type(each) for each in got} == {Tensor}, task
        assert {each.shape for each in got} == {wanted.shape}, task
        torch.testing.assert_close(got[0].detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
        assert task == "gradient" or not torch.equal(got[0], got[-1]), task


def test_an_output_without_a_known_name_is_refused() -> None:
    with pytest.raises(ArgumentError, match="wrap the model in a module that returns the tensor"):
        ablate(Nameless().eval(), CLEAN, lambda y: y.sum())


class Nameless(Stacked):
    """A model whose output has no name that is known."""

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(scores=super().forward(input_ids).logits)


def test_rollout_says_which_attention_is_missing() -> None:
    class WrittenOut(StackedBlock):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
            z = (heads @ heads.mT).softmax(-1) @ heads
            return x + z.transpose(1, 2).flatten(2)

    network = Stacked().eval()
    assert len(rollout(network, CLEAN).notes) == 1
    network.layers[1] = WrittenOut()
    assert not record(network, CLEAN).sound
    assert "missing here: layers.1" in str(rollout(network, CLEAN).notes[1])
