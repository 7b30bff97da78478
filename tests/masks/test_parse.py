"""Masks from text: what they mean, and what is refused where."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import masks
from regard.errors import ArgumentError
from regard.masks import Causal, Mask, Sinks, Window, parse

KNOWN = (
    "prefix, document, padding, blockcausal, blockdiffusion, heads, full, causal, window, chunk, "
    "earlierchunks, dilated, sinks, global, strided, bigbird, neighborhood"
)


@pytest.mark.parametrize(
    "text, mask",
    [
        ("causal", Causal()),
        ("causal()", Causal()),
        ("  causal & window(4)|sinks(1)\n", Causal() & Window(4) | Sinks(1)),
        ("causal & (window(4) | sinks(n=1))", Causal() & (Window(4) | Sinks(1))),
        ("~causal & ~~full", ~Causal() & ~~masks.Full()),
        ("window(size=9, ahead=8) | globals_", None),
        ("prefix((1, 2))", masks.Prefix((1, 2))),
        ("prefix([1, 2])", masks.Prefix((1, 2))),
        ("bigbird(64, 8, causal=True)", masks.BigBird(64, 8, causal=True)),
        ("window(4, ahead=None)", Window(4)),
        ("global((0, 1))", masks.Global((0, 1))),
        ("dilated(3, 2, ahead=2)", masks.Dilated(3, 2, ahead=2)),
        ("BlockDiffusion(4, 16)", masks.BlockDiffusion(4, 16)),
        (
            "neighborhood((8, 8), 3, dilation=(1, 2), is_causal=(True, False))",
            masks.Neighborhood((8, 8), 3, dilation=(1, 2), is_causal=(True, False)),
        ),
        ("heads((causal, causal & window(4)))", masks.Heads((Causal(), Causal() & Window(4)))),
    ],
)
def test_meaning(text: str, mask: Mask | None) -> None:
    if mask is None:
        with pytest.raises(ArgumentError):
            parse(text)
    else:
        assert parse(text) == mask


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "causal & windw(4)",
            (
                "unknown mask \"windw\"; did you mean 'window'?\n  causal & windw(4)\n           ^ "
                "column 10"
            ),
        ),
        ("foo", 'unknown mask "foo"\n  foo\n  ^ column 1'),
        ("", "the expression is empty"),
        ("   ", "the expression is empty"),
        ("causal &", "not a mask expression: invalid syntax\n  causal &\n          ^ column 9"),
        ("causal + full", "a mask is expected here\n  causal + full\n  ^ column 1"),
        ("causal and full", "a mask is expected here\n  causal and full\n  ^ column 1"),
        (
            "causal & not full",
            "not a mask expression: invalid syntax\n  causal & not full\n           ^ column 10",
        ),
        ("-causal", "a mask is expected here\n  -causal\n  ^ column 1"),
        ("3", "a mask is expected here\n  3\n  ^ column 1"),
        (
            "window(0)",
            (
                "Window size is 0; it must be 1 or more: a query always sees itself; leave the "
                "window out to see all\n  window(0)\n  ^ column 1"
            ),
        ),
        (
            "causal & window(-3)",
            (
                "Window size is -3; it must be 1 or more: a query always sees itself; leave the "
                "window out to see all\n  causal & window(-3)\n           ^ column 10"
            ),
        ),
        ("window", "window: missing 1 required argument: 'size'\n  window\n  ^ column 1"),
        ("causal(4)", "causal: takes 1 argument but 2 were given"),
        ("window(4, 5, 6)", "window: takes from 2 to 3 arguments but 4 were given"),
        (
            "window(width=4)",
            "window: got an unexpected keyword argument 'width'\n  window(width=4)\n  ^ column 1",
        ),
        (
            "window(4.5)",
            (
                "only whole numbers, tuples and masks are allowed here\n  window(4.5)\n         ^ "
                "column 8"
            ),
        ),
        ("window('4')", "only whole numbers, tuples and masks are allowed here"),
        ("window(-(1,))", "only whole numbers, tuples and masks are allowed here"),
        ("window(True)", "Window size is bool True; it must be an int, 1 or more"),
        ("window(**{})", "** is not allowed\n  window(**{})\n  ^ column 1"),
        ("window(*(4,))", "only whole numbers, tuples and masks are allowed here"),
        ("masks.causal", "a mask is expected here\n  masks.causal\n  ^ column 1"),
        ("__import__('os').system('true')", "a mask is expected here"),
        ("(lambda: 0)()", "a mask is expected here"),
        ("[causal][0]", "a mask is expected here"),
        ("é & causal", 'unknown mask "é"\n  é & causal\n  ^ column 1'),
        ("causal & é", 'unknown mask "é"\n  causal & é\n           ^ column 10'),
        ("full & (causal\n| foo)", 'unknown mask "foo"'),
        ("full\nfull", "not a mask expression: invalid syntax"),
        ("\x00", "not a mask expression: "),
        ("heads((causal, 3))", "Heads masks[1] is int; it takes masks of regard.masks"),
        ("heads(causal)", "Heads masks is Causal; it must be a sequence of masks"),
        ("document(((0, 2), 3))", "Document bounds is int 3; it must be a sequence of ints"),
        ("padding(3)", "Padding runs is int 3; it must be one tuple of (start, stop) pairs per"),
        ("padding((3, 4))", "Padding runs is tuple (3, 4); it must be one tuple of (start, stop)"),
        ("causal|" * 9400 + "full", "the expression has 65804 characters; at most 65536 are"),
        ("heads((" + "full," * 520 + "))", "the expression has more than 512 masks"),
        ("window(9007199254740993)", "the number is larger than 9007199254740992\n  window(900719"),
        ("~" * 60 + "causal", "the expression is nested deeper than 50 levels"),
        ("(" * 300 + "causal" + ")" * 300, "not a mask expression: "),
        ("window(" + "(" * 60 + "1" + ",)" * 60 + ")", "the expression is nested deeper than 50"),
    ],
)
def test_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(text)
    assert str(caught.value).startswith(message)
    known, joined = str(caught.value).split("\n  known masks: ")[1].split("; ")
    assert set(known.split(", ")) >= set(KNOWN.split(", "))
    assert joined.endswith("for example: causal & window(4) | sinks(1)")


@given(st.text(alphabet="caus window(4)&|~,\n0-#'\"\\é", max_size=30))
def test_any_text_is_a_mask_or_an_argument_error(text: str) -> None:
    try:
        mask = parse(text)
    except ArgumentError:  # and nothing else
        return
    assert parse(str(mask)) == mask


def test_a_parser_that_another_thread_disturbed_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, failures = ast.parse, [SystemError("AST constructor recursion depth mismatch")] * 2

    def disturbed(*args: object, **options: object) -> ast.AST:
        if failures:
            raise failures.pop()
        return real(*args, **options)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert parse("causal & window(4)") == Causal() & Window(4)
    assert not failures
    failures += [SystemError("AST constructor recursion depth mismatch")] * 100
    with pytest.raises(SystemError):
        parse("causal")
