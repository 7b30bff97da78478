"""The operators of attention: in compiled and exported graphs, under dispatch modes, and with
torch's counter of FLOPs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import masks
from regard.cost.softmax import training_flops
from regard.masks import Causal, Mask, Window
from regard.ops.softmax.call import make_call
from regard.ops.softmax.packed_call import pack, unpackable_parts
from regard.span import Span
from tests.kernels import require_backend, require_kernels
from tests.ops.softmax.cases import CONTRACT, Case, Made, make
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import GRADIENT, assert_close_rule

MASK = Causal() & Window(5)
FIFTH = masks.Fn(lambda q, k: (q + k) % 5 != 0, "fifth")


class Seen(TorchDispatchMode):
    """A dispatch mode that lists the names of this package's operators that run in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "regard":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def inputs(
    T: int = 6, S: int | None = None, *, G: int = 2, D: int = 8, gradient: bool = False
) -> list[Tensor]:
    """Seeded q [1,4,T,D], k and v [1,G,S,D]."""
    generator = torch.Generator().manual_seed(T)
    sizes = ((4, T), (G, S or T), (G, S or T))
    made = [torch.randn(1, heads, n, D, generator=generator) for heads, n in sizes]
    return [x.requires_grad_(gradient) for x in made]


@pytest.fixture(autouse=True)
def fresh_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def targets(graph: torch.fx.GraphModule) -> list[str]:
    """The names of the operators of this package in a graph."""
    names = [str(node.target).removesuffix(".default") for node in graph.graph.nodes]
    return [name for name in names if name.startswith("regard.")]


class Graphs:
    """A backend of `torch.compile` that notes what each graph holds of this package, and the types
    of the constants there, and runs the graphs through AOT autograd.
    """

    def __init__(self) -> None:
        self.held: list[list[str]] = []
        self.constants: set[type] = set()

    def __call__(self, graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.held.append(targets(graph))
        for node in graph.graph.nodes:
            if str(node.target).startswith("regard."):
                self.constants |= {type(x) for x in tree_leaves(node.args)}
        return aot_eager(graph, example)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=True, fullgraph=True, backend=self)


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_an_operator_gives_the_numbers_of_the_call(case: Case) -> None:
    made = make(case, torch.float32)
    expected = regard.attend(made.q, made.k, made.v, **made.options)
    with Seen() as seen:
        found = regard.attend(made.q, made.k, made.v, **made.options)
    held = not unpackable_parts(made.call())
    assert held == ("fn" not in (case.mask, case.bias))
    assert seen.names == ["attention"] * held
    assert torch.equal(found, expected)


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_an_operator_gives_the_gradients_of_the_call(case: Case) -> None:
    def gradients(made: Made, z: Tensor) -> tuple[Tensor, ...]:
        leaves = [x for x in made.leaves if x.requires_grad]
        return torch.autograd.grad(z, leaves, torch.cos(z.detach().double()).to(z.dtype), True)

    made = make(case, torch.float32, gradient=True)
    plains = several_plains(made.q, made.k, made.v, **made.plain())
    plain = [gradients(made, z) for z, _ in plains]
    high = make(case, torch.float64, like=torch.float32, gradient=True)
    exact = gradients(high, plain_attention(high.q, high.k, high.v, **high.plain())[0])
    with Seen() as seen:
        found = gradients(made, regard.attend(made.q, made.k, made.v, **made.options))
    if "fn" not in (case.mask, case.bias):
        assert seen.names == ["attention_with_gradient", "attention_backward"]
    for i, (x, y) in enumerate(zip(found, exact, strict=True)):
        assert_close_rule(x, [each[i] for each in plain], y, GRADIENT)


@pytest.mark.nightly(keep=4)
@pytest.mark.full
@pytest.mark.parametrize("bias", [None, "fixed", "learned"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("wants_lse", [False, True])
def test_opcheck(bias: str | None, gradient: bool, wants_lse: bool) -> None:
    if bias == "learned" and not gradient:
        pytest.skip("a learned bias has a gradient")
    table = None if bias is None else torch.randn(1, 4, 40, 40).requires_grad_(bias == "learned")
    call = make_call(*inputs(40, gradient=gradient), mask=MASK, bias=table, wants_lse=wants_lse)
    name = "attention_with_gradient" if gradient else "attention"
    op = getattr(torch.ops.regard, name).default
    results = torch.library.opcheck(op, tuple(pack(call, "auto")), atol=1e-5, rtol=1e-5)
    assert len(results) == 4
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_of_the_backward_operator() -> None:
    packed = pack(make_call(*inputs(40), mask=MASK, wants_lse=True), "auto")
    out, lse, *saved = torch.ops.regard.attention_with_gradient(*packed)
    arguments = (out.cos(), lse.cos(), out, *saved, *packed)
    results = torch.library.opcheck(
        torch.ops.regard.attention_backward.default, arguments, atol=1e-5, rtol=1e-5
    )
    assert set(results.values()) == {"SUCCESS"}


LENGTHS = range(1, 41, 2)


@pytest.mark.full
@pytest.mark.parametrize("mask", [None, MASK], ids=str)
@pytest.mark.parametrize("decoding", [False, True])
def test_one_graph_serves_many_lengths(mask: Mask | None, decoding: bool) -> None:
    require_kernels()
    graphs = Graphs()
    compiled = graphs.compile(lambda q, k, v: regard.attend(q, k, v, mask=mask))
    for n in LENGTHS:
        args = inputs(1 if decoding else n, n)
        assert torch.equal(compiled(*args), regard.attend(*args, mask=mask))
    assert 1 <= len(graphs.held) <= 3
    assert all(held == ["regard.attention"] for held in graphs.held)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["auto", "gemm"])
def test_gradients_in_a_graph_are_the_right_ones(backend: str) -> None:
    require_kernels()
    graphs = Graphs()
    sink = torch.randn(4, generator=torch.Generator().manual_seed(1))
    visible = MASK.block(Span(0, 70), Span(0, 70))

    def attend(*args: Tensor) -> Tensor:
        return regard.attend(*args[:3], mask=MASK, sink=args[3], backend=backend)

    def plain(*args: Tensor) -> list[Tensor]:
        n = args[0].shape[2]
        plains = several_plains(*args[:3], visible=visible[..., :n, :n], sink=args[3])
        return [z for z, _ in plains]

    def gradients(z: Tensor, args: list[Tensor], *, keep: bool = True) -> tuple[Tensor, ...]:
        return torch.autograd.grad(z, args, torch.cos(z.detach().double()).to(z.dtype), keep)

    compiled = graphs.compile(attend)
    for n in (17, 40, 70):
        args = [*inputs(n, gradient=True), sink.clone().requires_grad_()]
        high = [x.detach().double().requires_grad_() for x in args]
        exact = gradients(plain(*high)[0], high)
        usual = [gradients(z, args) for z in plain(*args)]
        found = gradients(compiled(*args), args, keep=False)
        for i, (x, y) in enumerate(zip(found, exact, strict=True)):
            assert_close_rule(x, [each[i] for each in usual], y, GRADIENT)
    assert len(graphs.held) <= 2
    assert graphs.held[0] == ["regard.attention_with_gradient"]


def test_a_graph_holds_no_python_object() -> None:
    require_kernels()
    graphs = Graphs()
    documents = masks.Document((0, 11, 40)) & Causal()
    bias = regard.biases.ALiBi(4)
    graphs.compile(lambda *x: regard.attend(*x, mask=documents, bias=bias))(*inputs(40))
    assert graphs.held[-1] == ["regard.attention"]
    assert torch.fx.Node in graphs.constants
    assert graphs.constants <= {torch.fx.Node, int, float, str, bool, type(None)}


def test_positions_in_tensors_and_quantized_inputs() -> None:
    q, k, v = inputs(1, 30)
    positions = torch.arange(30)[None].clone()
    positions[0, 7] = -1
    k[:, :, 7] = torch.nan
    options: dict[str, Any] = {"mask": MASK, "k_positions": positions}
    options["q_positions"] = torch.tensor([[9]])
    compiled = Graphs().compile(lambda *x: regard.attend(*x, **options))
    expected = regard.attend(q, k, v, **options)
    assert expected.isfinite().all()
    assert torch.equal(compiled(q, k, v), expected)


class Attend(nn.Module):
    """Attention on one kernel, as a module."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attend(q, k, v, mask=MASK, backend=self.backend)


@pytest.mark.full
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_holds_the_operator_by_name_only(strict: bool) -> None:
    require_kernels()
    length = torch.export.Dim("length", min=1, max=4096)
    shapes = {name: {2: length} for name in "qkv"}

    def exported(backend: str) -> torch.export.ExportedProgram:
        args = tuple(inputs())
        return torch.export.export(Attend(backend), args, dynamic_shapes=shapes, strict=strict)

    assert targets(exported("auto").graph_module) == []  # runs without this package
    program = exported("gemm")
    assert targets(program.graph_module) == ["regard.attention"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for each in (program, torch.export.load(file)):
        for n in (1, 16, 70):
            assert torch.equal(each.module()(*inputs(n)), Attend("gemm")(*inputs(n)))


@pytest.mark.full
def test_a_graph_refuses_what_it_cannot_hold() -> None:
    reasons: dict[str, list[str]] = {}

    @torch.compile(backend="eager", fullgraph=True)
    def ask(q: Tensor) -> Tensor:
        for kernel in regard.ops.softmax.dispatch.KERNELS:
            if kernel.name in ("cpu", "gemm"):
                reasons[kernel.name] = kernel.why_not(make_call(q, q, q, mask=FIFTH))
        return q + 1

    ask(torch.randn(1, 1, 20, 4))
    held = "a graph cannot hold the function in fifth"
    assert reasons == {"cpu": [held], "gemm": [held]}
    q, k, v = inputs(40)
    compiled = torch.compile(
        lambda *x: regard.attend(*x, mask=FIFTH), fullgraph=True, backend="aot_eager"
    )
    assert torch.allclose(compiled(q, k, v), regard.attend(q, k, v, mask=FIFTH), atol=1e-5)


def test_a_kernel_refuses_a_call_when_the_graph_runs() -> None:
    require_kernels()
    compiled = Graphs().compile(lambda *x: regard.attend(*x, backend="cpu"))
    q, k, v = inputs(3, 40)
    assert torch.equal(compiled(q, k, v), regard.attend(q, k, v, backend="cpu"))
    with pytest.raises(regard.KernelRefusal, match="20 queries"):
        compiled(*inputs(20, 40))


def test_shapes_without_values() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), Seen() as seen:
        q, k, v = (torch.empty(x.shape, dtype=torch.bfloat16) for x in inputs(40))
        partial = regard.attend_partial(q, k, v, mask=MASK)
    assert seen.names == ["attention"]
    assert (partial.out.shape, partial.out.dtype) == ((1, 4, 40, 8), torch.bfloat16)
    assert (partial.lse.shape, partial.lse.dtype) == ((1, 4, 40), torch.float32)


FLOP_MASKS: dict[str, Mask] = {
    "full": masks.Full(),
    "causal": Causal(),
    "window": Causal() & Window(100),
    "sinks": Causal() & (Window(64) | masks.Sinks(4)),
    "chunk": masks.Chunk(64),
    "document": masks.Document((0, 150, 300)) & Causal(),
}


def counted(run: Callable[[], object]) -> int:
    """The FLOPs that torch counts."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("mask", FLOP_MASKS.values(), ids=FLOP_MASKS)
@pytest.mark.parametrize("backend", ["auto", "cpu", "sdpa", "tiled", "gemm", "reference"])
def test_torch_counts_the_flops_of_the_plan(mask: Mask, backend: str) -> None:
    require_backend(backend)
    q, k, v = inputs(4 if backend == "cpu" else 300, 300, D=16)
    plan = regard.plan(q, k, v, mask=mask, backend=backend)
    planned = plan[plan.kernel].flops
    assert 0 < planned <= plan.flops
    assert counted(lambda: regard.attend(q, k, v, mask=mask, backend=backend)) == planned
    if backend in ("tiled", "gemm") and mask != masks.Full():
        assert planned < plan.flops


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("mask", FLOP_MASKS.values(), ids=FLOP_MASKS)
@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "gemm", "reference"])
def test_torch_counts_the_flops_of_training(mask: Mask, backend: str) -> None:
    require_backend(backend)
    q, k, v = (0.3 * x.detach() for x in inputs(300, D=16))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plan = regard.plan(q, k, v, mask=mask, backend=backend)
    pairs = plan[plan.kernel].work.pairs  # type: ignore[union-attr]
    found = counted(
        lambda: torch.autograd.grad(
            regard.attend(q, k, v, mask=mask, backend=backend).sum(), leaves
        )
    )
    assert found == training_flops(pairs, 16, 16)


def test_torch_counts_in_a_compiled_graph_and_on_meta() -> None:
    require_kernels()
    q, k, v = inputs(300, D=16)
    # while a dispatch mode is open, torch runs compiled functions eagerly
    compiled = torch.compile(
        lambda *x: regard.attend(*x, mask=MASK, backend="gemm"), backend="aot_eager"
    )
    planned = regard.plan(q, k, v, mask=MASK, backend="gemm")["gemm"].flops
    compiled(q, k, v)
    assert counted(lambda: compiled(q, k, v)) == planned
    meta = [x.to("meta") for x in (q, k, v)]
    plan = regard.plan(*meta, mask=Causal())
    assert counted(lambda: regard.attend(*meta, mask=Causal())) == plan[plan.kernel].flops > 0


def test_second_derivatives_under_a_mode_are_those_outside() -> None:
    def second(*args: Tensor) -> tuple[Tensor, ...]:
        z = regard.attend(*args, mask=MASK)
        first = torch.autograd.grad(z.square().sum(), args, create_graph=True)
        return torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), args)

    args = inputs(20, gradient=True)
    exact = second(*(x.detach().double().requires_grad_() for x in args))
    plain = second(*args)
    with Seen() as seen:
        found = second(*args)
    assert seen.names[0] == "attention_with_gradient"
    for x, y, z in zip(found, plain, exact, strict=True):
        assert_close_rule(x, y, z, GRADIENT)
