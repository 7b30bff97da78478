"""Bad arguments: type and whole message, before any kernel is reached, with inputs and random state
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
    kind: type[Exception],
    message: str,
    inputs: list[Any],
    without: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Every function refuses, in the same words, and touches nothing."""
    for name, function in FUNCTIONS.items():
        if name in without:
            continue
        tensors = [*inputs, *options.values()]
        before, state = [digest(x) for x in tensors], torch.get_rng_state()
        with pytest.raises(kind) as error:
            function(*inputs, **options)
        assert str(error.value) == message, name
        assert isinstance(error.value, regard.RegardError)
        assert [digest(x) for x in tensors] == before
        assert torch.equal(torch.get_rng_state(), state)


pytestmark = pytest.mark.usefixtures("no_kernel")
NO_VALUES = ("attention_weights",)


# Shapes. Row 1: torch's CPU kernel would cut the keys, or read past them.


@pytest.mark.parametrize("S, other", [(3, 6), (6, 3), (0, 1), (16, 17)])
def test_key_and_value_lengths(S: int, other: int) -> None:
    q, k, v = make(S=S, T=2)
    v = torch.randn(1, 2, other, 8)
    message = (
        f"key length {S} != value length {other} (key (1, 2, {S}, 8), value (1, 2, {other}, 8))"
    )
    assert_refused(ArgumentError, message, [q, k, v], NO_VALUES)


def test_batches_do_not_broadcast() -> None:
    """Row 14."""
    q, k, v = make(B=2)
    words = (
        "batch 1 != query batch 2; batches do not broadcast: if one {0} serves all rows, pass "
        "{0}.expand(2, -1, -1, -1)"
    )
    assert_refused(ArgumentError, "key " + words.format("key"), [q, k[:1], v])
    assert_refused(ArgumentError, "value " + words.format("value"), [q, k, v[:1]], NO_VALUES)
    assert regard.plan(q, k[:1].expand(2, -1, -1, -1), v).kernel


def test_dims_and_heads() -> None:
    q, k, v = make()
    assert_refused(
        ArgumentError,
        "query dim 8 and key dim 7 must be equal and at least 1 (query (1, 2, 4, 8), key (1, 2, "
        "4, 7))",
        [q, k[..., :7], v],
    )
    assert_refused(
        ArgumentError,
        "query dim 0 and key dim 0 must be equal and at least 1 (query (1, 2, 4, 0), key (1, 2, "
        "4, 0))",
        [q[..., :0], k[..., :0], v],
    )
    assert_refused(
        ArgumentError,
        "key heads 2 != value heads 1 (key (1, 2, 4, 8), value (1, 1, 4, 8))",
        [q, k, v[:, :1]],
        NO_VALUES,
    )


@pytest.mark.parametrize(
    "H, G, allowed",
    [
        (3, 2, "1, 3"),
        (4, 3, "1, 2, 4"),
        (1, 2, "1"),
        (12, 5, "1, 2, 3, 4, 6, 12"),
        (2, 0, "1, 2"),
        (0, 1, "none"),
    ],
)
def test_groups_divide_heads(H: int, G: int, allowed: str) -> None:
    """Row 13, at the call and at construction."""
    message = (
        f"{H} query heads are not divisible by {G} key/value heads; allowed key/value "
        f"heads: {allowed}"
    )
    assert_refused(ArgumentError, message, make(H=H, G=G))
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        check_groups(H, G)
    if min(H, G) > 0:
        with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
            regard.nn.SeparateQKV(*(regard.nn.HeadProjection(8, n, 2) for n in (H, G, G)))


def test_four_dimensions() -> None:
    q, k, v = make()
    rest = "it must be [batch, heads, length, dim]"
    assert_refused(
        ArgumentError,
        f"query has 3 dimensions, (2, 4, 8); {rest}: add a batch dimension with [None]",
        [q[0], k, v],
    )
    assert_refused(
        ArgumentError, f"key has 2 dimensions, (4, 8); {rest}: reshape it", [q, k[0, 0], v]
    )
    assert_refused(
        ArgumentError,
        f"value has 5 dimensions, (1, 1, 2, 4, 8); {rest}",
        [q, k, v[None]],
        NO_VALUES,
    )


def test_types_and_dtypes() -> None:
    q, k, v = make()
    assert_refused(ArgumentTypeError, "query is list; it must be a torch tensor", [[1.0], k, v])
    assert_refused(
        ArgumentTypeError, "key is ndarray; it must be a torch tensor", [q, k.numpy(), v]
    )
    assert_refused(
        ArgumentTypeError, "value is NoneType; it must be a torch tensor", [q, k, None], NO_VALUES
    )
    floats = "it must be float64, float32, bfloat16 or float16"
    assert_refused(
        ArgumentTypeError, f"query is int64; {floats}: use query.float()", [q.long(), k, v]
    )
    assert_refused(ArgumentTypeError, f"key is bool; {floats}: use key.float()", [q, k.bool(), v])
    assert_refused(
        ArgumentTypeError,
        f"value is complex64; {floats}: use value.float()",
        [q, k, v.to(torch.complex64)],
        NO_VALUES,
    )
    one = "all must have one dtype: convert one with .to()"
    assert_refused(
        ArgumentTypeError, f"query is float32 and key is bfloat16; {one}", [q, k.bfloat16(), v]
    )
    assert_refused(
        ArgumentTypeError,
        f"query is float32 and value is float64; {one}",
        [q, k, v.double()],
        NO_VALUES,
    )


def test_devices() -> None:
    q, k, v = make()
    assert_refused(
        ArgumentError, "query is on cpu and key on meta; move one with .to()", [q, k.to("meta"), v]
    )
    assert_refused(
        ArgumentError,
        "query is on cpu and value on meta; move one with .to()",
        [q, k, v.to("meta")],
        NO_VALUES,
    )


# Numbers. Row 18.


@pytest.mark.parametrize("value", [0, 0.0, -0.0])
def test_scale_of_zero(value: float) -> None:
    assert_refused(
        ArgumentError,
        f"scale is {value}; it must be finite and not 0; None means 1/sqrt(D)".replace(
            f"{value};", "0;"
        ),
        make(),
        scale=value,
    )


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("scale", NAN, "finite and not 0"),
        ("scale", INF, "finite and not 0"),
        ("scale", -INF, "finite and not 0"),
        *(("softcap", x, "greater than 0: None turns it off") for x in (0.0, -1.0, NAN, INF)),
        *(("dropout", x, "at least 0 and less than 1") for x in (-0.1, 1.0, 1.5, NAN)),
    ],
)
def test_numbers_out_of_range(name: str, value: float, allowed: str) -> None:
    without = ("attend_partial", "attention_weights") if name == "dropout" else ()
    assert_refused(
        ArgumentError, f"{name} is {value}; it must be {allowed}", make(), without, **{name: value}
    )


@pytest.mark.parametrize("value", ["0.5", True, torch.tensor(0.5)], ids=["str", "bool", "tensor"])
@pytest.mark.parametrize(
    "name, allowed",
    [("scale", "finite and not 0"), ("softcap", "greater than 0: None turns it off")],
)
def test_numbers_of_a_wrong_type(name: str, allowed: str, value: Any) -> None:
    message = f"{name} is {type(value).__name__}; it must be a number, {allowed}"
    assert_refused(ArgumentTypeError, message, make(), **{name: value})


def test_check_number_takes_none_and_what_lies_inside() -> None:
    """Both bounds are outside."""
    refused = []
    for x in (None, 0, 1e-9, 0.5, 1, 2 - 1e-9, 2):
        try:
            check_number("x", x, 0, 2, "between 0 and 2")
        except ArgumentError:
            refused.append(x)
    assert refused == [0, 2]


def test_sinks() -> None:
    q, k, v = make()
    without = ("attend_partial",)
    assert_refused(
        ArgumentError,
        "sink is (3,); it holds one logit per query head, (2,)",
        [q, k, v],
        without,
        sink=torch.zeros(3),
    )
    assert_refused(
        ArgumentError,
        "sink is (1, 2); it holds one logit per query head, (2,)",
        [q, k, v],
        without,
        sink=torch.zeros(1, 2),
    )
    assert_refused(
        ArgumentTypeError, "sink is float; it must be a torch tensor", [q, k, v], without, sink=0.5
    )
    message = "sink is int64; it must be float64, float32, bfloat16 or float16: use sink.float()"
    assert_refused(
        ArgumentTypeError, message, [q, k, v], without, sink=torch.zeros(2, dtype=torch.int64)
    )


def test_attend_partial_takes_no_sink_and_no_dropout() -> None:
    q, k, v = make()
    for options, message in (
        (
            {"sink": torch.zeros(2)},
            "attend_partial does not accept sink; pass it to regard.merge, which counts it once",
        ),
        ({"dropout": 0.5}, "attend_partial does not accept dropout; use regard.attend"),
    ):
        with pytest.raises(ArgumentTypeError) as error:
            regard.attend_partial(q, k, v, **options)  # type: ignore[arg-type]
        assert str(error.value) == message


# Masks and biases. Rows 10, 11, and the shapes.


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
def test_integer_masks(dtype: torch.dtype) -> None:
    q, k, v = make()
    name = str(dtype).removeprefix("torch.")
    for function in FUNCTIONS.values():
        with pytest.raises(ArgumentTypeError, match=rf"^mask is {name}.*mask\.bool\(\)"):
            function(q, k, v, mask=torch.ones(4, 4, dtype=dtype))


def test_float_masks_and_other_things() -> None:
    q, k, v = make()
    for dtype in (torch.float32, torch.bfloat16):
        message = (
            f"mask is {str(dtype).removeprefix('torch.')}; a mask must be bool, with True = may "
            "attend: convert it with regard.masks.from_additive(mask), or pass it as bias="
        )
        assert_refused(ArgumentTypeError, message, [q, k, v], mask=torch.zeros(4, 4, dtype=dtype))
    allowed = "it must be a regard.masks mask, a bool tensor or None"
    assert_refused(ArgumentTypeError, f"mask is str; {allowed}", [q, k, v], mask="causal")
    assert_refused(ArgumentTypeError, f"mask is bool; {allowed}", [q, k, v], mask=True)
    allowed = "it must be a regard.biases bias, a float tensor or None"
    assert_refused(ArgumentTypeError, f"bias is float; {allowed}", [q, k, v], bias=0.5)
    assert_refused(
        ArgumentTypeError,
        "bias is int64; it must be float64, float32, bfloat16 or float16: use bias.float()",
        [q, k, v],
        bias=torch.zeros(4, 4, dtype=torch.int64),
    )


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


# Positions.


def test_positions() -> None:
    inputs = make(B=2, T=3, S=5)
    assert_refused(
        ArgumentError,
        "q_positions is Span(start=0, length=5) but there are 3 slots; give Span(0, 3)",
        inputs,
        q_positions=Span(0, 5),
    )
    assert_refused(
        ArgumentError,
        "k_positions is Span(start=2, length=3) but there are 5 slots; give Span(2, 5)",
        inputs,
        k_positions=Span(2, 3),
        q_positions=Span(0, 3),
    )
    for wrong in (torch.arange(5), torch.arange(4)[None], torch.zeros(3, 5, dtype=torch.int64)):
        assert_refused(
            ArgumentError,
            f"k_positions is {tuple(wrong.shape)}; it must be (2, 5) or (1, 5)",
            inputs,
            k_positions=wrong,
            q_positions=Span(0, 3),
        )
    for dtype in (torch.float32, torch.bool, torch.complex64):
        name = str(dtype).removeprefix("torch.")
        assert_refused(
            ArgumentTypeError,
            f"q_positions is {name}; positions are integers: use .long()",
            inputs,
            q_positions=torch.zeros(1, 3, dtype=dtype),
        )
    for wrong in ([0, 1, 2], range(3), 3):
        message = (
            f"q_positions is {type(wrong).__name__}; it must be a regard.Span or an integer "
            "tensor [batch, length]"
        )
        assert_refused(ArgumentTypeError, message, inputs, q_positions=wrong)
    assert_refused(
        ArgumentError,
        "4 queries for 2 keys with k_positions: pass q_positions as well",
        make(T=4, S=2),
        k_positions=torch.tensor([[0, 1]]),
    )
    check_positions("x", torch.zeros(1, 3, dtype=torch.int32), 2, 3)


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
    inputs = make(T=3, S=5)
    message = (
        "{} has {}, first at {}; find the operation that produced it "
        "(regard.checks(finite=True) enables this check)"
    )
    for i, name in enumerate(("query", "key", "value")):
        for bad, n in ((NAN, 1), (INF, 2), (-INF, 1)):
            changed = [x.clone() for x in inputs]
            changed[i][0, 1, 2, 3] = bad
            if n == 2:
                changed[i][0, 1, 2, 5] = bad
            count = f"{n} non-finite value" + "s" * (n > 1)
            with regard.checks(finite=True):
                assert_refused(
                    ArgumentError,
                    message.format(name, count, "[0, 1, 2, 3]"),
                    changed,
                    NO_VALUES if name == "value" else (),
                )
            with regard.checks():
                with regard.checks(finite=False):
                    assert regard.plan(*changed).kernel
                with pytest.raises(ArgumentError):
                    regard.plan(*changed)
            assert regard.plan(*changed).kernel
    with regard.checks():
        assert regard.plan(*inputs).kernel


def test_checks_end_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), regard.checks():
        raise ZeroDivisionError
    q, k, v = make()
    q[0, 0, 0, 0] = NAN
    assert regard.plan(q, k, v).kernel


def test_a_mask_that_is_a_class_is_told_to_be_made() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind(0)
    with pytest.raises(ArgumentTypeError) as caught:
        regard.attend(q, k, v, mask=regard.masks.Causal)  # type: ignore[arg-type]
    assert str(caught.value) == "mask is the class Causal; pass an instance, Causal(...)"
