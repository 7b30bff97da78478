"""What torch does to modules, tried on every mechanism of the catalogue and every cache."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.caches import Cross, Memory, State
from regard.errors import ArgumentError
from regard.integrations.pytorch import with_torch_linears
from regard.masks import Causal
from regard.nn import CappedLogits, Linear, OffsetRMSNorm, RMSNorm
from regard.nn.variants import VARIANTS, build
from regard.span import Span
from tests.caches.kinds import KINDS
from tests.integrations.pytorch.matrix.things import decoder, randn


def options(name: str) -> dict[str, Tensor]:
    """The second sequence of cross-attention."""
    cross = VARIANTS[name].family in ("cross", "additive")
    return {"memory": randn(2, 7, 32)} if cross else {}


@pytest.mark.full(keep=8)
@pytest.mark.parametrize("name", VARIANTS)
def test_pickles_and_copies_of_mechanisms_and_their_caches_go_on(name: str) -> None:
    module, x, given = VARIANTS[name].example().eval(), randn(2, 5, 32), options(name)
    with torch.no_grad():
        right = module(x, **given)
        for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            assert torch.equal(twin(x, **given), right)
        mask = getattr(module, "mask", Causal())
        if name == "longformer" or mask is None or mask.causal_from() != 0:
            return  # it sees later tokens, and takes them in one call only
        cache = module.new_cache()
        module(x, None, cache, **given)
        twins = (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache))
        following = module(x[:, :2], None, cache)
        for twin in twins:
            assert type(twin) is type(cache)
            assert torch.equal(module(x[:, :2], None, twin), following)


@pytest.mark.parametrize("name", KINDS)
def test_pickles_and_copies_of_caches_hold_the_same(name: str) -> None:
    kind = KINDS[name]
    cache = kind.make()
    parts = tuple(randn(2, n, 3, d) for n, d in kind.shapes)
    cache.update(parts, Span(0, 3))
    twins = (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache))
    new = tuple(randn(2, n, 1, d) for n, d in kind.shapes)
    memory, positions = cache.update(new, Span(3, 1))
    for twin in twins:
        again, others = twin.update(new, Span(3, 1))
        assert all(torch.equal(x, y) for x, y in zip(again, memory, strict=True))
        same = torch.equal(others, positions) if isinstance(others, Tensor) else others == positions
        assert same


def test_every_kind_of_cache_was_pickled() -> None:
    tried = {type(kind.make()) for kind in KINDS.values()}
    tried |= {type(x.example().new_cache()) for x in VARIANTS.values() if x.name != "longformer"}
    assert {Cross, Memory, State} < tried


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", VARIANTS)
def test_checkpoints_of_mechanisms_give_the_same_gradients(name: str) -> None:
    module, given = VARIANTS[name].example().eval(), options(name)
    x = randn(2, 5, 32).requires_grad_()

    def call(x: Tensor) -> Tensor:
        out: Tensor = module(x, **given)
        return out

    call(x).sum().backward()
    usual = [y.grad for y in (x, *module.parameters())]
    for reentrant in (True, False):
        x.grad = None
        module.zero_grad()
        checkpoint(call, x, use_reentrant=reentrant).sum().backward()
        for y, right in zip((x, *module.parameters()), usual, strict=True):
            assert (y.grad is None and right is None) or torch.equal(y.grad, right)  # type: ignore[arg-type]


# torch.ao


@pytest.fixture
def deprecated() -> Iterator[None]:
    """torch.ao is deprecated; its warnings of that are not about us."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor, .*deprecated", UserWarning)
        yield


@pytest.mark.full(keep=4)
@pytest.mark.usefixtures("deprecated")
@pytest.mark.parametrize("name", VARIANTS)
def test_mechanisms_run_with_quantized_layers(name: str) -> None:
    module, x, given = VARIANTS[name].example().eval(), randn(2, 5, 32), options(name)
    count = sum(type(part) in (Linear, nn.Linear) for part in module.modules())
    linears = with_torch_linears(copy.deepcopy(module))
    small = torch.ao.quantization.quantize_dynamic(linears, {nn.Linear})
    kind = torch.ao.nn.quantized.dynamic.Linear
    assert sum(isinstance(part, kind) for part in small.modules()) == count
    with torch.no_grad():
        right = module(x, **given)
        assert torch.allclose(linears(x, **given), right, atol=1e-5)
        error = (small(x, **given) - right).abs().max() / right.abs().max()
        # int8 has seven bits of a number; a mechanism that selects keys may select others
        assert error < (0.5 if VARIANTS[name].family in ("selected", "linear") else 0.1)
        assert count == 0 or error > 0


@pytest.mark.usefixtures("deprecated")
def test_a_layer_that_torch_passes_over_says_so() -> None:
    layer = build("gqa", 32, 4, groups=2)
    with pytest.warns(UserWarning, match=r"leaves a regard.nn.Linear as it is: quantize regard"):
        torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})


def test_torch_linears_share_what_they_replace() -> None:
    module = build("gpt", 32, 4)
    weight, right = module.output.weight, module(randn(1, 5, 32))
    assert with_torch_linears(module) is module
    assert type(module.output) is nn.Linear
    assert module.output.weight is weight
    assert torch.allclose(module(randn(1, 5, 32)), right, atol=1e-6)
    assert type(with_torch_linears(Linear(3, 2))) is nn.Linear
    shared = Linear(3, 3)
    twice = with_torch_linears(nn.ModuleList([shared, None, shared]))
    assert [type(part) for part in twice] == [nn.Linear, type(None), nn.Linear]
    assert type(with_torch_linears(CappedLogits(3, 2, cap=1.0))) is CappedLogits


@pytest.mark.usefixtures("deprecated")
def test_quantized_latents_cannot_be_absorbed() -> None:
    module = VARIANTS["mla"].example()
    module.project.form = "absorb"
    small = torch.ao.quantization.quantize_dynamic(with_torch_linears(module), {nn.Linear})
    with pytest.raises(ArgumentError, match=r"without a weight tensor, so that it cannot be abso"):
        small(randn(1, 5, 32))


# torch.fx


@pytest.mark.full(keep=8)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_mechanism_is_one_node_of_a_symbolic_trace(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = VARIANTS[name].example()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.part(2 * x, **options(name)) + 1
            return out

    model, x = Model().eval(), randn(2, 5, 32)
    graph = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["part"]
    assert torch.equal(graph(x), model(x))


def test_a_trace_of_layers_beside_ours() -> None:
    model = nn.Sequential(
        Linear(8, 8), RMSNorm(8), nn.ReLU(), OffsetRMSNorm(8), CappedLogits(8, 3, cap=2.0)
    )
    graph, x = torch.fx.symbolic_trace(model), randn(2, 5, 8)
    assert torch.equal(graph(x), model(x))
    assert {"0", "1", "3"} < {node.target for node in graph.graph.nodes}


def test_a_trace_that_cannot_be_made_says_what_to_do() -> None:
    for root in (build("gqa", 32, 4, groups=2), decoder()):
        name = type(root).__name__
        with pytest.raises(ArgumentError, match=rf"symbolic_trace was given a {name}"):
            torch.fx.symbolic_trace(root)

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = build("gqa", 32, 4, groups=2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.part(x, None, self.part.new_cache())
            return out

    with pytest.raises(ArgumentError, match=r"a call of Attention with a cache, which a graph"):
        torch.fx.symbolic_trace(Cached())

    class Scaled(RMSNorm):
        def forward(self, x: Tensor, positions: object = None) -> Tensor:
            return 2 * super().forward(x, positions)

    with pytest.raises(ArgumentError, match=r"Scaled.forward, which calls the forward of its base"):
        torch.fx.symbolic_trace(nn.Sequential(Scaled(8)))
