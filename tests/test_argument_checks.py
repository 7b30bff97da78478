"""Bad arguments: type and first words, before any kernel is reached, with inputs and random state
as they were.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import ArgumentError, ArgumentTypeError, Span, biases, masks
from regard.argument_checks import check_groups, check_number, check_positions
from regard.ops.softmax import dispatch

NAN, INF = float("nan"), float("inf")


def make(
    B: int = 1, H: int = 2, G: int | None = None, T: int = 4, S: int = 4, D: int = 8
) -> list[Tensor]:
    G = H if G is None else G
    return [torch.randn(B, H, T, D), torch.randn(B, G, S, D), torch.randn(B, G, S, D)]


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is reached, whatever the order of checks and computation."""

    def reached(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel was reached with bad arguments")

    for kernel in dispatch.KERNELS:
        monkeypatch.setattr(type(kernel), "run", reached)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", reached)


def digest(x: Any) -> str:
    """The bits of a tensor that has some."""
    if not isinstance(x, Tensor) or x.is_meta:
        return ""
    raw = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return hashlib.sha256(raw).hexdigest()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attend": regard.attend,
    "attend_partial": regard.attend_partial,
    "plan": regard.plan,
    "attention_weights": lambda q, k, v, **options: regard.attention_weights(q, k, **options),
}


def assert_refused(
    function: Callable[..., Any],
    kind: type[Exception],
    words: str,
    inputs: list[Any],
    options: dict[str, Any],
) -> str:
    """The message of a call that is refused and touches nothing."""
    tensors = [*inputs, *options.values()]
    before, state = [digest(x) for x in tensors], torch.get_rng_state()
    with pytest.raises(kind, match=f"^{re.escape(words)}") as error:
        function(*inputs, **options)
    assert isinstance(error.value, regard.RegardError)
    assert [digest(x) for x in tensors] == before
    assert torch.equal(torch.get_rng_state(), state)
    return str(error.value)


pytestmark = pytest.mark.usefixtures("no_kernel")


Q, K, V = make(B=2, T=3, S=5)
ZEROS = torch.zeros
FLOATS = "it must be float64, float32, bfloat16 or float16: use "
REFUSED: list[tuple[str, type[Exception], dict[str, Any]]] = [
    # shapes: torch's CPU kernel would cut the keys, or read past them
    ("key length 5 != value length 4", ArgumentError, {"value": V[:, :, :4]}),
    ("key length 5 != value length 6", ArgumentError, {"value": ZEROS(2, 2, 6, 8)}),
    ("key batch 1 != query batch 2; batches do not broadcast", ArgumentError, {"key": K[:1]}),
    ("value batch 1 != query batch 2", ArgumentError, {"value": V[:1]}),
    ("query dim 8 and key dim 7 must be equal", ArgumentError, {"key": K[..., :7]}),
    ("query dim 0 and key dim 8", ArgumentError, {"query": Q[..., :0]}),
    ("key heads 2 != value heads 1", ArgumentError, {"value": V[:, :1]}),
    ("query has 3 dimensions, (2, 3, 8); it must be [batch", ArgumentError, {"query": Q[0]}),
    ("key has 2 dimensions", ArgumentError, {"key": K[0, 0]}),
    ("value has 5 dimensions", ArgumentError, {"value": V[None]}),
    # types, dtypes, devices
    ("query is list; it must be a torch tensor", ArgumentTypeError, {"query": [1.0]}),
    ("key is ndarray", ArgumentTypeError, {"key": K.numpy()}),
    ("value is NoneType", ArgumentTypeError, {"value": None}),
    (f"query is int64; {FLOATS}query.float()", ArgumentTypeError, {"query": Q.long()}),
    ("key is bool", ArgumentTypeError, {"key": K.bool()}),
    ("value is complex64", ArgumentTypeError, {"value": V.to(torch.complex64)}),
    ("query is float32 and key is bfloat16", ArgumentTypeError, {"key": K.bfloat16()}),
    ("query is float32 and value is float64", ArgumentTypeError, {"value": V.double()}),
    ("query is on cpu and key on meta", ArgumentError, {"key": K.to("meta")}),
    ("query is on cpu and value on meta", ArgumentError, {"value": V.to("meta")}),
    # numbers
    *(
        (f"scale is {x}; it must be finite and not 0", ArgumentError, {"scale": x})
        for x in (0, NAN, INF, -INF)
    ),
    *(
        (f"softcap is {x}; it must be greater than 0", ArgumentError, {"softcap": x})
        for x in (0.0, -1.0, NAN, INF)
    ),
    *(
        (f"dropout is {x}; it must be at least 0 and less than 1", ArgumentError, {"dropout": x})
        for x in (-0.1, 1.0, 1.5, NAN)
    ),
    *(
        (f"{n} is {type(x).__name__}; it must be a number", ArgumentTypeError, {n: x})
        for n in ("scale", "softcap")
        for x in ("0.5", True, torch.tensor(0.5))
    ),
    # sinks
    ("sink is (3,); it holds one logit per query head, (2,)", ArgumentError, {"sink": ZEROS(3)}),
    ("sink is (1, 2)", ArgumentError, {"sink": ZEROS(1, 2)}),
    ("sink is float; it must be a torch tensor", ArgumentTypeError, {"sink": 0.5}),
    ("sink is int64", ArgumentTypeError, {"sink": ZEROS(2).long()}),
    # masks and biases
    *(
        (f"mask is {str(x).removeprefix('torch.')}", ArgumentTypeError, {"mask": ZEROS(3, 5).to(x)})
        for x in (torch.int64, torch.uint8, torch.int32, torch.float32, torch.bfloat16)
    ),
    ("mask is str; it must be a regard.masks mask", ArgumentTypeError, {"mask": "causal"}),
    ("mask is bool", ArgumentTypeError, {"mask": True}),
    ("mask is the class Causal; pass an instance", ArgumentTypeError, {"mask": masks.Causal}),
    ("bias is float; it must be a regard.biases bias", ArgumentTypeError, {"bias": 0.5}),
    (f"bias is int64; {FLOATS}bias.float()", ArgumentTypeError, {"bias": ZEROS(3, 5).long()}),
    # positions
    ("q_positions is Span(start=0, length=5) but", ArgumentError, {"q_positions": Span(0, 5)}),
    ("k_positions is Span(start=2, length=3) but", ArgumentError, {"k_positions": Span(2, 3)}),
    *(
        (f"k_positions is {tuple(x.shape)}; it must be (2, 5)", ArgumentError, {"k_positions": x})
        for x in (torch.arange(5), torch.arange(4)[None], ZEROS(3, 5).long())
    ),
    *(
        ("q_positions is ", ArgumentTypeError, {"q_positions": x})
        for x in (ZEROS(1, 3), ZEROS(1, 3).bool(), [0, 1, 2], range(3), 3)
    ),
    (
        "3 queries for 2 keys with k_positions: pass q_positions as well",
        ArgumentError,
        {"key": K[:, :, :2], "value": V[:, :, :2], "k_positions": torch.tensor([[0, 1]])},
    ),
]
UNKNOWN = {
    "attend_partial": {"dropout", "sink"},
    "attention_weights": {"dropout", "value"},
}
"""What a function does not take."""


@pytest.mark.parametrize("words, kind, given", REFUSED, ids=[words for words, _, _ in REFUSED])
def test_refused(words: str, kind: type[Exception], given: dict[str, Any]) -> None:
    """Every function refuses, in the same words, and touches nothing."""
    inputs = {"query": Q, "key": K, "value": V, **given}
    options = {k: x for k, x in given.items() if k not in ("query", "key", "value")}
    if "k_positions" in given and len(given) == 1:
        options["q_positions"] = Span(0, 3)
    asked = [f for n, f in FUNCTIONS.items() if not UNKNOWN.get(n, set()) & given.keys()]
    assert asked
    assert (
        len({assert_refused(f, kind, words, [*inputs.values()][:3], options) for f in asked}) == 1
    )


def test_scales_of_negative_zero_are_zero() -> None:
    with pytest.raises(ArgumentError, match=r"^scale is 0; it must"):
        regard.attend(Q, K, V, scale=-0.0)


@pytest.mark.parametrize(
    "H, G, allowed",
    [
        (3, 2, "1, 3"),
        (4, 3, "1, 2, 4"),
        (12, 5, "1, 2, 3, 4, 6, 12"),
        (2, 0, "1, 2"),
        (0, 1, "none"),
    ],
)
def test_groups_divide_heads(H: int, G: int, allowed: str) -> None:
    """At the call and at construction."""
    message = rf"^{H} query heads are not divisible by {G} key.*: {allowed}$"
    for function in FUNCTIONS.values():
        with pytest.raises(ArgumentError, match=message):
            function(*make(H=H, G=G))
    with pytest.raises(ArgumentError, match=message):
        check_groups(H, G)
    if min(H, G) > 0:
        with pytest.raises(ArgumentError, match=message):
            regard.nn.SeparateQKV(*(regard.nn.HeadProjection(8, n, 2) for n in (H, G, G)))


def test_check_number_takes_none_and_what_lies_inside() -> None:
    """Both bounds are outside."""
    refused = []
    for x in (None, 0, 1e-9, 0.5, 1, 2 - 1e-9, 2):
        try:
            check_number("x", x, 0, 2, "between 0 and 2")
        except ArgumentError:
            refused.append(x)
    assert refused == [0, 2]


def test_attend_partial_takes_no_sink_and_no_dropout() -> None:
    with pytest.raises(ArgumentTypeError, match=r"does not accept sink; .* regard\.merge"):
        regard.attend_partial(Q, K, V, sink=ZEROS(2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"does not accept dropout; use regard\.attend"):
        regard.attend_partial(Q, K, V, dropout=0.5)  # type: ignore[arg-type]


# Masks and biases. Rows 10, 11, and the shapes.


@pytest.mark.parametrize("shape", [(4, 4, 4), (4,), (), (1, 1, 1, 4, 4)], ids=str)
def test_masks_and_biases_of_other_than_two_or_four_dimensions(shape: tuple[int, ...]) -> None:
    inputs = make(B=4)
    for function in FUNCTIONS.values():
        with pytest.raises(ArgumentError, match=f"^mask .*{re.escape(str(shape))}"):
            function(*inputs, mask=torch.ones(shape, dtype=torch.bool))
        with pytest.raises(
            ArgumentError, match=f"^bias has {len(shape)} dimensions, {re.escape(str(shape))}"
        ):
            function(*inputs, bias=torch.zeros(shape))


@pytest.mark.parametrize(
    "shape",
    [(2, 6), (4, 5), (6, 4), (3, 1, 4, 6), (1, 3, 4, 6), (1, 1, 3, 6), (1, 1, 4, 1)],
    ids=str,
)
def test_masks_and_biases_of_another_shape(shape: tuple[int, ...]) -> None:
    """Row 11: a mask [B, S] is no mask [T, S]; both candidates are printed. Row 12: nothing is
    broadcast along keys.
    """
    inputs = make(B=2, T=4, S=6)
    for function in FUNCTIONS.values():
        with pytest.raises(ArgumentError, match=f"^mask is {re.escape(str(shape))}.*") as error:
            function(*inputs, mask=torch.ones(shape, dtype=torch.bool))
        assert "(4, 6)" in str(error.value)
        with pytest.raises(ArgumentError) as error:
            function(*inputs, bias=torch.zeros(shape))
        assert (
            str(error.value)
            == f"bias is {shape}; for this call it must be (4, 6) or (2 or 1, 2 or 1, 4 or 1, 6)"
        )


def test_masks_of_another_batch_or_heads() -> None:
    inputs = make(B=2, H=2)
    for mask in (
        masks.Padding.right([4, 3, 2]),
        masks.Heads((masks.Causal(),) * 3),
        masks.Causal() & masks.Padding.right([1, 1, 1]),
        ~masks.Heads((masks.Full(),) * 4),
        masks.Dense(torch.ones(3, 1, 4, 4, dtype=torch.bool)),
    ):
        for function in FUNCTIONS.values():
            with pytest.raises(ArgumentError, match=r"\b[34]\b"):
                function(*inputs, mask=mask)
    with pytest.raises(ArgumentError, match="heads"):
        regard.attend(*inputs, bias=biases.ALiBi(3))


def test_positions_may_be_any_integers() -> None:
    assert check_positions("x", torch.zeros(1, 3, dtype=torch.int32), 2, 3) is None  # type: ignore[func-returns-value]


def test_unknown_options_and_positional_options() -> None:
    for function in FUNCTIONS.values():
        with pytest.raises(TypeError, match="is_causal"):
            function(*make(), is_causal=True)
    with pytest.raises(TypeError, match="positional"):
        regard.attend(*make(), masks.Causal())  # type: ignore[misc]


# Row 16, an explicit backend; row 19, memory.


def test_an_explicit_backend_never_drops_an_option() -> None:
    q, k, v = make(T=20, S=20)
    with pytest.raises(regard.KernelRefusal) as refusal:
        regard.attend(q, k, v, softcap=30.0, backend="sdpa")
    assert str(refusal.value).startswith(
        "this call cannot run on sdpa (no softcap); backends that can: "
    )
    assert "reference" in str(refusal.value)


def test_bytes_are_told_before_they_are_allocated() -> None:
    q = torch.zeros(1, 3, 1, 4).expand(1, 3, 53_936, 4)
    with regard.Trace("scores", missing="ignore"), pytest.raises(regard.KernelRefusal) as refusal:
        regard.attend(q, q, q, backend="reference")
    assert str(refusal.value) == (
        "this call cannot run on reference (would allocate 32.5 GiB for scores (1, 3, 53936, "
        "53936); limit 4.00 GiB: "
        "regard.attention_weights gives any block of them); no other backend can"
    )
    plan = regard.plan(q, q, q, mask=masks.Causal())
    for kernel in {plan.kernel, "sdpa"}:
        work = plan[kernel].work
        assert work is not None
        assert work.bytes < 53_936 * 1024, "causal never materializes: linear in length"


# Row 2: NaN, and the check that names it.


def test_checks_finite() -> None:
    for i, name in enumerate(("query", "key", "value")):
        for bad, n in ((NAN, 1), (INF, 2), (-INF, 1)):
            changed = [x.clone() for x in (Q, K, V)]
            changed[i][0, 1, 2, 3 : 3 + n] = bad
            words = f"{name} has {n} non-finite value{'s' * (n > 1)}, first at [0, 1, 2, 3]"
            asked = [f for x, f in FUNCTIONS.items() if name not in UNKNOWN.get(x, ())]
            for function in asked:
                with regard.checks(finite=True):
                    assert_refused(function, ArgumentError, words, changed, {})
            with regard.checks():
                with regard.checks(finite=False):
                    assert regard.plan(*changed).kernel
                with pytest.raises(ArgumentError):
                    regard.plan(*changed)
            assert regard.plan(*changed).kernel
    with regard.checks():
        assert regard.plan(Q, K, V).kernel


def test_checks_end_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), regard.checks():
        raise ZeroDivisionError
    q, k, v = make()
    q[0, 0, 0, 0] = NAN
    assert regard.plan(q, k, v).kernel
