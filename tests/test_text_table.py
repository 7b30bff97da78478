"""Tables of text: columns stand under one another, also with Chinese characters and short rows."""

from __future__ import annotations

from regard.text_table import display_width, format_table


def test_names_stand_left_and_numbers_right() -> None:
    rows = [["", "cache", "kernel"], ["mha", "16.0 MiB", "cpu"], ["gated-delta", "-", "state"]]
    assert format_table(rows, left=(0, 2)).splitlines() == [
        "                cache  kernel",
        "mha          16.0 MiB  cpu",
        "gated-delta         -  state",
    ]


def test_all_to_the_right_with_an_indent_and_a_gap() -> None:
    assert (
        format_table([["1", "10"], ["100", "1"]], left=(), indent="> ", gap=1)
        == ">   1 10\n> 100  1"
    )


def test_wide_characters_take_two_columns() -> None:
    lines = format_table([["名", "1"], ["ab", "22"]]).splitlines()
    assert lines == ["名   1", "ab  22"]
    assert {display_width(line) for line in lines} == {6}
    assert display_width("名") != len("名"), "negative control"
    assert (display_width("Ａ"), display_width("ｱ"), display_width("e\u0301")) == (2, 1, 1)


def test_columns_that_do_not_fit_stand_below() -> None:
    rows = [["", "a", "b", "c"], ["x", "10", "20", "30"]]
    assert format_table(rows, width=13) == "    a   b   c\nx  10  20  30"
    assert format_table(rows, width=12) == "    a   b\nx  10  20\n\n    c\nx  30"


def test_a_short_row_ends_early() -> None:
    assert format_table([["a", "b", "c"], ["long"]]).splitlines() == ["a     b  c", "long"]
    assert format_table([]) == ""
