"""The check of annotations under pytest: that it is on, that it finds what is wrong, that it
changes nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import regard
from regard.span import Span, as_tensor, concat_positions
from tests import annotations

THIS = sys.modules[__name__]


def add(
    x: Float[Tensor, "B L"], y: Float[Tensor, "B L"], *, times: float = 1.0
) -> Float[Tensor, "B L"]:
    if x.ndim != 2:
        raise regard.ArgumentError(f"x has {x.ndim} dimensions")
    return x + y * times


def wrong_result(x: Float[Tensor, "B L"]) -> Float[Tensor, "L B"]:
    return x


class Options(TypedDict, total=False):
    scale: float | None


def with_options(x: Tensor, **options: Unpack[Options]) -> Any:
    return options.get("scale")


def test_what_fits_passes() -> None:
    x = torch.ones(2, 3)
    assert annotations.checked(add, THIS)(x, x, times=2).tolist() == [[3.0] * 3] * 2


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.ones(2, 3), torch.ones(1, 3)),
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)),
        (torch.ones(2, 3), 1.0),
    ],
)
def test_what_does_not_fit_is_found(x: Tensor, y: Tensor) -> None:
    with pytest.raises(annotations.AnnotationMismatch, match=r"add: y is .*, not"):
        annotations.checked(add, THIS)(x, y)


def test_the_quick_run_compares_the_first_calls_and_then_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(annotations, "sampled", True)

    def product(x: Float[Tensor, "B L"], y: Float[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        return x * y

    wrapped, found = annotations.checked(product, THIS), []
    wrapped(torch.ones(2, 3), torch.ones(2, 3))
    for i in range(1, 97):
        try:
            wrapped(torch.ones(2, 3), torch.ones(1, 3))
        except annotations.AnnotationMismatch:
            found.append(i)
    assert found == [*range(1, 64), 79, 95]


def kept(x: Tensor | None, sizes: tuple[int, ...] = (), *more: int) -> int:
    return len(sizes) + len(more)


def test_a_call_like_one_before_is_checked_where_its_types_do_not_decide() -> None:
    """What was found to fit is remembered by types; shapes and elements are always looked at."""
    wrapped, add_ = annotations.checked(kept, THIS), annotations.checked(add, THIS)
    x = torch.ones(2, 3)
    assert [wrapped(x, (1, 2)), wrapped(x, (1,)), wrapped(None)] == [2, 1, 0]
    assert wrapped(x, (1,), 2) == 2
    add_(x, x)
    for call, message in [
        (lambda: wrapped(x, ("a", "b")), r"kept: sizes is tuple \('a', 'b'\), not"),
        (lambda: wrapped(1, (1, 2)), "kept: x is int 1, not"),  # type: ignore[arg-type]
        (lambda: wrapped(x, (1,), "a"), "kept: more is str 'a', not"),  # type: ignore[arg-type]
        (lambda: add_(x, torch.ones(1, 3)), r"add: y is torch.float32 \(1, 3\), not"),
        (lambda: add_(x, x, times=torch.ones(())), r"add: times is torch.float32 \(\), not"),
    ]:
        with pytest.raises(annotations.AnnotationMismatch, match=message):
            call()


def test_unpacked_options_are_checked() -> None:
    wrapped = annotations.checked(with_options, THIS)
    assert wrapped(torch.ones(2), scale=1) == 1
    with pytest.raises(annotations.AnnotationMismatch, match="with_options: scale is str 'x', not"):
        wrapped(torch.ones(2), scale="x")


def test_a_wrong_result_is_found() -> None:
    with pytest.raises(annotations.AnnotationMismatch, match=r"wrong_result: return is .*\(2, 3\)"):
        annotations.checked(wrong_result, THIS)(torch.ones(2, 3))


def test_a_refused_argument_meets_our_own_error() -> None:
    with pytest.raises(regard.ArgumentError, match="x has 1 dimension"):
        annotations.checked(add, THIS)(torch.ones(3), torch.ones(3))


def test_the_package_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "sampled", False)  # other tests have called it often
    assert concat_positions(Span(0, 3), Span(3, 2)) == Span(0, 5)
    with pytest.raises(annotations.AnnotationMismatch, match=r"span.as_tensor: positions is str"):
        as_tensor("positions")  # type: ignore[arg-type]


def test_a_compiled_graph_sees_the_plain_function() -> None:
    def shifted(x: Tensor) -> Tensor:
        return as_tensor(x) + 1

    compiled = torch.compile(shifted, fullgraph=True, backend="eager")
    assert compiled(torch.arange(3)[None]).tolist() == [[1, 2, 3]]


def test_a_compiled_graph_may_make_our_objects() -> None:
    def sums(x: Tensor) -> Tensor:
        return x + Span(int(x.shape[0]), 2).stop

    assert (
        torch.compile(sums, fullgraph=True, backend="eager")(torch.zeros(3)).tolist() == [5.0] * 3
    )


def test_the_hook_comes_first() -> None:
    with pytest.raises(RuntimeError, match=r"imported before the hook: \['regard"):
        annotations.install("regard")


def modules() -> list[types.ModuleType]:
    package = Path(regard.__file__).parent
    names = [
        ".".join(("regard", *path.relative_to(package).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for path in sorted(package.rglob("*.py"))
        if path.name != "__main__.py"
    ]
    left_out = list(annotations.LEFT_OUT)
    if importlib.util.find_spec("triton") is None:  # an extra, which its kernels import
        left_out += ["regard.ops.softmax.triton", "regard.ops.linear.triton"]
    for package in ("lm_eval", "sentence_transformers"):  # bases of classes
        if importlib.util.find_spec(package) is None:
            left_out.append(f"regard.integrations.{package}")
    return [importlib.import_module(name) for name in names if not name.startswith(tuple(left_out))]


@pytest.mark.full
def test_every_annotation_can_be_resolved() -> None:
    for module in modules():
        for _, _, member in annotations._functions(module):
            function = annotations._plain(member)
            assert function is not None
            annotations.resolve(function, module)
    assert annotations.unresolved == {}


@pytest.mark.parametrize("make", [torch.empty, torch.ones(1).new_empty])
def test_uninitialized_memory_is_poisoned(make) -> None:
    assert make(5).isnan().all()
    assert make(2, dtype=torch.int8).tolist() == [127, 127]
    assert torch.empty_like(torch.ones(2, 2)).isnan().all()


def test_the_seed_is_the_same_in_every_test() -> None:
    first = torch.randn(3)
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(3))
    assert np.random.rand() == np.random.RandomState(0).rand()  # noqa: NPY002
