"""The transforms of torch: the rows of the tables in docs/pytorch.md. Each is a function that
raises an `AssertionError` for a wrong result, and one of regard's errors for a refusal.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from regard.errors import ParallelError, RegardError
from tests.integrations.pytorch.matrix.things import Thing, outputs, wide
from tests.rules import GRADIENT, assert_close_rule

LENGTHS = (1, 6, 19)


@dataclass(frozen=True)
class Transform:
    """A row of the tables.

    Attributes:
        name: the first cell of the row.
        try_on: checks it on a thing.
        layers_only: whether it is about parameters, which calls of `attend` have not.
        slow: whether a cell takes more than about half a second.
    """

    name: str
    try_on: Callable[[Thing], None]
    layers_only: bool
    slow: bool


TRANSFORMS: dict[str, Transform] = {}
"""The rows, in the order of the tables."""


def transform(
    name: str, *, layers_only: bool = False, slow: bool = False
) -> Callable[[Callable[[Thing], None]], Callable[[Thing], None]]:
    """Add a row: decorate the function that checks it on a thing."""

    def add(function: Callable[[Thing], None]) -> Callable[[Thing], None]:
        TRANSFORMS[name] = Transform(name, function, layers_only, slow)
        return function

    return add


def cells() -> list[tuple[str, Thing]]:
    """All cells: each row with the columns for which it has a meaning."""
    from tests.integrations.pytorch.matrix.things import THINGS

    every = [(x, y) for x in TRANSFORMS.values() for y in THINGS]
    return [(x.name, y) for x, y in every if y.layer or not x.layers_only]


def run(name: str, thing: Thing) -> str:
    """Check one cell: "works", or the refusal."""
    try:
        TRANSFORMS[name].try_on(thing)
    except Exception as error:
        reason = refusal(error)
        if reason is None:
            raise
        return f"refused: {reason}"
    return "works"


def refusal(error: BaseException | None) -> str | None:
    """The message of the error of ours that lies below an error of torch."""
    while error is not None:
        # a process that failed is no refusal
        if isinstance(error, RegardError) and not isinstance(error, ParallelError):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def assert_follows(
    thing: Thing, found: Callable[..., Any], lengths: Sequence[int] = LENGTHS
) -> None:
    """A function gives what the definition gives, by the error rule, for several lengths, which are
    compared together: a single token has too few numbers to know its usual error.
    """
    module = thing.make()
    seen: tuple[list[list[Tensor]], ...] = ([], [], [])
    for n in lengths:
        args = thing.inputs(n)
        with torch.no_grad():
            results = outputs(found(*args))
        plain, exact = thing.plain(module, args), thing.exact(module, args)
        assert [x.shape for x in results] == [x.shape for x in exact]
        for i, xs in enumerate((results, plain, exact)):
            seen[i].append([x.flatten() for x in xs])
    joined = [[torch.cat(xs) for xs in zip(*group, strict=True)] for group in seen]
    for x, y, z in zip(*joined, strict=True):
        assert_close_rule(x, y, z, what=str(lengths))


# graphs


@transform("torch.compile(fullgraph=True), dynamic lengths", slow=True)
def assert_compiles(thing: Thing) -> None:
    torch._dynamo.reset()
    module = torch.compile(thing.make(), fullgraph=True, backend="eager")

    def function(*args: Tensor) -> Any:
        for x, (axis, _) in zip(args, thing.axes, strict=True):
            torch._dynamo.mark_dynamic(x, axis)
        return module(*args)

    try:
        assert_follows(thing, function, (6, 19))
    finally:
        torch._dynamo.reset()


def dims(thing: Thing) -> tuple[dict[int, Any], ...]:
    """The dynamic dimensions of a thing's inputs."""
    named = {name: torch.export.Dim(name, min=1, max=4096) for _, name in thing.axes}
    each = tuple({axis: named[name]} for axis, name in thing.axes)
    # the tensors after the first input of WithPast are one parameter, `*past`
    return (each[0], each[1:]) if thing.axes[-1][1] == "S" else each  # type: ignore[return-value]


@transform("torch.export.export(strict=False)", slow=True)
def assert_exports(thing: Thing, *, strict: bool = False) -> None:
    program = torch.export.export(
        thing.make(), thing.inputs(6), dynamic_shapes=dims(thing), strict=strict
    )
    assert_follows(thing, program.module())


@transform("torch.export.export(strict=True)", slow=True)
def assert_exports_strictly(thing: Thing) -> None:
    assert_exports(thing, strict=True)


@transform("torch.jit.trace", slow=True)
def assert_traces(thing: Thing) -> None:
    with warnings.catch_warnings():
        # torch deprecates tracing, and warns of each Python number that a trace keeps
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        module = thing.make().requires_grad_(False)
        function = torch.jit.trace(module, thing.inputs(6), check_trace=False)
        assert_follows(thing, function)


@transform("torch.onnx.export(dynamo=True)", slow=True)
def assert_exports_to_onnx(thing: Thing) -> None:
    file = onnx_file(thing.make(), thing.inputs(6), dims(thing))
    assert_follows(thing, onnx_session(file))


@transform("torch.onnx.export(dynamo=False)", slow=True)
def assert_traces_to_onnx(thing: Thing) -> None:
    file = traced_onnx_file(thing.make(), thing.inputs(6), thing.axes)
    assert_follows(thing, onnx_session(file))


def onnx_file(
    module: nn.Module, args: tuple[Tensor, ...], dynamic: Any, opset: int = 23
) -> io.BytesIO:
    """The file of the exporter that builds on `torch.export`."""
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        # onnxscript and torch call parts of each other that are deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        # two inputs with one length: the file names it once
        warnings.filterwarnings("ignore", "# The axis name", UserWarning)
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            dynamic_shapes=dynamic,
            opset_version=opset,
            verbose=False,
        )
        assert program is not None
        file = io.BytesIO()
        program.save(file)
    return file


def traced_onnx_file(
    module: nn.Module, args: tuple[Tensor, ...], axes: Sequence[tuple[int, str]]
) -> io.BytesIO:
    """The file of the exporter that builds on `torch.jit.trace`."""
    pytest.importorskip("onnx")
    names = [f"x{i}" for i in range(len(args))]
    file = io.BytesIO()
    with warnings.catch_warnings():
        # the exporter is deprecated, and warns of each Python number that a trace keeps
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        # it does not fold slices with steps, which changes no result
        warnings.filterwarnings("ignore", "Constant folding", UserWarning)
        # it would index wrongly by negative numbers, which the comparison of the results would show
        warnings.filterwarnings("ignore", "Exporting aten::index operator", UserWarning)
        torch.onnx.export(
            module,
            args,
            file,
            dynamo=False,
            input_names=names,
            dynamic_axes={name: dict([axis]) for name, axis in zip(names, axes, strict=True)},
        )
    return file


def onnx_session(file: io.BytesIO) -> Callable[..., tuple[Tensor, ...]]:
    """A function that runs a file in ONNX Runtime."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(file.getvalue(), options, ["CPUExecutionProvider"])

    def function(*args: Tensor) -> tuple[Tensor, ...]:
        named = zip((x.name for x in session.get_inputs()), args, strict=True)
        found = session.run(None, {name: x.numpy() for name, x in named})
        return tuple(torch.from_numpy(x) for x in found)

    return function


@transform("torch.fx.symbolic_trace")
def assert_traces_symbolically(thing: Thing) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = thing.make()

        def forward(self, *args: Tensor) -> Any:
            return self.part(*args)

    # a graph has as many inputs as the signature says
    count = len(thing.inputs(1))
    if count == 1:
        Model.forward = lambda self, a: self.part(a)  # type: ignore[assignment,method-assign]
    else:
        Model.forward = lambda self, a, b, c: self.part(a, b, c)  # type: ignore[assignment,method-assign]
    graph = torch.fx.symbolic_trace(Model())
    assert_follows(thing, graph)


# functions of functions


@transform("torch.func.vmap")
def assert_maps(thing: Thing) -> None:
    module = thing.make()
    many = [thing.inputs(6), tuple(x.flip(-1) for x in thing.inputs(6))]
    stacked = tuple(torch.stack(x) for x in zip(*many, strict=True))
    with torch.no_grad():
        found = outputs(vmap(module)(*stacked))
    for i, args in enumerate(many):
        plain, exact = thing.plain(module, args), thing.exact(module, args)
        for x, y, z in zip(found, plain, exact, strict=True):
            assert_close_rule(x[i], y, z)


def state_of(thing: Thing) -> tuple[nn.Module, dict[str, Tensor], tuple[Tensor, ...]]:
    """A module, what derivatives are taken by (parameters, or the inputs of a call), its inputs."""
    module, args = thing.make(), thing.inputs(6)
    if thing.layer:
        return module, {n: x.detach() for n, x in module.named_parameters()}, args
    return module, {str(i): x for i, x in enumerate(args)}, args


def loss_of(
    thing: Thing, module: nn.Module, args: tuple[Tensor, ...]
) -> Callable[[dict[str, Tensor]], Tensor]:
    """A scalar function of the parameters, or of the inputs of a call."""

    def loss(by: dict[str, Tensor]) -> Tensor:
        if thing.layer:
            found = functional_call(module, by, args)
        else:
            found = module(*by.values())
        return sum((x.square().sum() for x in outputs(found)), torch.zeros(()))  # type: ignore[return-value]

    return loss


def assert_derivative(thing: Thing, derivative: Callable[..., dict[str, Tensor]]) -> None:
    """A derivative of the loss is that of the definition, by the error rule."""
    from regard import Trace

    module, by, args = state_of(thing)
    found = derivative(loss_of(thing, module, args), by)
    with Trace("pattern"):
        plain = derivative(loss_of(thing, module, args), by)
        double = copy.deepcopy(module).double()
        exact = derivative(
            loss_of(thing, double, wide(args)), {n: x.double() for n, x in by.items()}
        )
    for name, x in found.items():
        assert_close_rule(x, plain[name], exact[name], GRADIENT, name)


@transform("torch.func.grad")
def assert_gradient(thing: Thing) -> None:
    assert_derivative(thing, lambda loss, by: grad(loss)(by))


@transform("torch.func.jvp")
def assert_forward_mode(thing: Thing) -> None:
    def tangent(loss: Callable[..., Tensor], by: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"": jvp(loss, (by,), ({n: x.cos() for n, x in by.items()},))[1]}

    assert_derivative(thing, tangent)


@transform("second derivatives by autograd")
def assert_second_derivative(thing: Thing) -> None:
    def twice(loss: Callable[..., Tensor], by: dict[str, Tensor]) -> dict[str, Tensor]:
        by = {n: x.clone().requires_grad_() for n, x in by.items()}
        first = torch.autograd.grad(loss(by), list(by.values()), create_graph=True)
        total = sum((x.square().sum() for x in first), torch.zeros(()))
        return dict(zip(by, torch.autograd.grad(total, list(by.values())), strict=True))  # type: ignore[arg-type]

    assert_derivative(thing, twice)


@transform("gradients per sample: vmap(grad)", layers_only=True)
def assert_gradients_per_sample(thing: Thing) -> None:
    module, by, args = state_of(thing)

    def loss(by: dict[str, Tensor], *sample: Tensor) -> Tensor:
        return loss_of(thing, module, tuple(x[None] for x in sample))(by)

    found = vmap(grad(loss), in_dims=(None, *(0 for _ in args)))(by, *args)
    for i in range(2):
        rows = tuple(x[i : i + 1] for x in args)
        plain = grad(loss_of(thing, module, rows))(by)
        double = copy.deepcopy(module).double()
        exact = grad(loss_of(thing, double, wide(rows)))({n: x.double() for n, x in by.items()})
        for name, x in found.items():
            assert_close_rule(x[i], plain[name], exact[name], GRADIENT, name)


# tensors without numbers, other dtypes


@transform('device "meta"')
def assert_shapes_on_meta(thing: Thing) -> None:
    module, args = thing.make(), thing.inputs(40)
    found = outputs(copy.deepcopy(module).to("meta")(*(x.to("meta") for x in args)))
    assert [(x.shape, x.dtype) for x in found] == [
        (x.shape, x.dtype) for x in outputs(module(*args))
    ]
    assert all(x.is_meta for x in found)


@transform("FakeTensorMode")
def assert_fake_shapes(thing: Thing) -> None:
    from torch._subclasses import FakeTensorMode

    module, args = thing.make(), thing.inputs(40)
    right = [(x.shape, x.dtype) for x in outputs(module(*args))]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = outputs(module(*(mode.from_tensor(x) for x in args)))
    assert [(x.shape, x.dtype) for x in found] == right


@transform("torch.autocast")
def assert_autocasts(thing: Thing) -> None:
    module, args = thing.make(), thing.inputs(19)
    if thing.layer:  # the past comes from earlier calls under autocast
        args = (args[0], *(x.bfloat16() for x in args[1:]))
    with torch.autocast("cpu", torch.bfloat16):
        plain = thing.plain(module, args)
        with torch.no_grad():
            found = outputs(module(*args))
    assert found[0].dtype == torch.bfloat16
    for x, y, z in zip(found, plain, thing.exact(module, args), strict=True):
        assert_close_rule(x, y, z)


# what is done to modules


@transform("copy.deepcopy")
def assert_copies(thing: Thing) -> None:
    module, args = thing.make(), thing.inputs(19)
    twin = copy.deepcopy(module)
    for x, y in zip(outputs(twin(*args)), outputs(module(*args)), strict=True):
        assert torch.equal(x, y)
    for parameter in twin.parameters():
        torch.nn.init.zeros_(parameter)
    assert not thing.layer or not torch.equal(outputs(twin(*args))[0], outputs(module(*args))[0])


@transform("pickle, torch.save")
def assert_pickles(thing: Thing) -> None:
    module, args = thing.make(), thing.inputs(19)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        for x, y in zip(outputs(twin(*args)), outputs(module(*args)), strict=True):
            assert torch.equal(x, y)


@transform("torch.utils.checkpoint, reentrant or not")
def assert_recomputes(thing: Thing) -> None:
    from torch.utils.checkpoint import checkpoint

    def gradients(module: nn.Module, args: tuple[Tensor, ...], run: Any) -> list[Tensor]:
        leaves = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in args)
        outputs(run(module, *leaves))[0].square().sum().backward()
        every = [x.grad for x in (*leaves, *module.parameters()) if x.requires_grad]
        module.zero_grad()
        return [x for x in every if x is not None]

    def as_usual(module: nn.Module, *args: Tensor) -> Any:
        return module(*args)

    module, args = thing.make(), thing.inputs(6)
    plain = gradients(module, args, as_usual)
    exact = gradients(copy.deepcopy(module).double(), wide(args), as_usual)
    # the reentrant form needs an input that wants a gradient
    for mode in (True, False) if args[0].is_floating_point() else (False,):
        found = gradients(module, args, partial(checkpoint, use_reentrant=mode))
        for x, y, z in zip(found, plain, exact, strict=True):
            # the reentrant form computes the output without gradients, perhaps on another kernel
            assert_close_rule(x, y, z, GRADIENT)


@transform("hooks of state_dict and load_state_dict", layers_only=True)
def assert_hooks_run(thing: Thing) -> None:
    module, twin, args, seen = thing.make(), thing.make(), thing.inputs(6), []
    for parameter in twin.parameters():
        torch.nn.init.zeros_(parameter)
    module.register_state_dict_post_hook(lambda *given: seen.append("saved"))
    twin.register_load_state_dict_pre_hook(lambda *given: seen.append("loading"))
    twin.register_load_state_dict_post_hook(lambda *given: seen.append("loaded"))
    missing = twin.load_state_dict(module.state_dict())
    assert seen == ["saved", "loading", "loaded"]
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    assert torch.equal(outputs(twin(*args))[0], outputs(module(*args))[0])


@transform("torch.ao quantize_dynamic, after with_torch_linears", layers_only=True)
def assert_quantizes(thing: Thing) -> None:
    from regard.integrations.pytorch import with_torch_linears

    module, args = thing.make(), thing.inputs(6)
    layers = [x for x in module.modules() if isinstance(x, nn.Linear)]
    with warnings.catch_warnings():
        # torch deprecates torch.ao and its quantized tensors
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor, .*deprecated", UserWarning)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "torch.ao.quantization finds layers", UserWarning)
            found = torch.ao.quantization.quantize_dynamic(
                with_torch_linears(copy.deepcopy(module)), {nn.Linear}
            )
        kind = torch.ao.nn.quantized.dynamic.Linear
        assert sum(isinstance(x, kind) for x in found.modules()) == len(layers) > 0
        # our layers, each with the product of torch's quantized layer of the same weights
        for x in layers:
            torchs = nn.Linear(x.in_features, x.out_features, bias=x.bias is not None)
            torchs.load_state_dict(x.state_dict())
            pair = torch.ao.quantization.quantize_dynamic(nn.Sequential(torchs), {nn.Linear})
            x.forward = pair[0].forward  # type: ignore[method-assign]
    with torch.no_grad():
        for y, right in zip(outputs(found(*args)), outputs(module(*args)), strict=True):
            assert torch.equal(y, right)
        assert not torch.equal(outputs(found(*args))[0], outputs(thing.make()(*args))[0])


@transform("FSDP2 fully_shard, 2 processes", layers_only=True, slow=True)
def assert_shards(thing: Thing) -> None:
    from tests.integrations.pytorch.matrix import ranks

    ranks.assert_trains_as_one("fsdp", thing)


@transform("DTensor weights (tensor parallel), 2 processes", layers_only=True, slow=True)
def assert_runs_tensor_parallel(thing: Thing) -> None:
    from tests.integrations.pytorch.matrix import ranks

    ranks.assert_trains_as_one("dtensor", thing)
