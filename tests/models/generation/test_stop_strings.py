"""Stop strings: whatever the pieces are, the text is the one that its letters say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.models.generation import StopStrings


def letter_by_letter(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: after each letter, is some stop complete? The one that began first."""
    for n in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:n].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: n - len(longest)], longest
    return text, None


@given(
    st.text("abc", max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=14, max_size=14),
)
def test_the_text_does_not_depend_on_the_pieces(
    text: str, names: list[str], sizes: list[int]
) -> None:
    stops, shown, at = StopStrings(names), "", 0
    wanted, found = letter_by_letter(text, names)
    for size in sizes:
        piece = stops.push(text[at : at + size])
        shown, at = shown + piece, at + size
        assert wanted.startswith(shown), "nothing is shown that must be taken back"
        assert stops.matched is None or text.startswith(wanted + stops.matched)
    assert shown + stops.flush() == wanted
    assert stops.matched == found


def test_what_may_be_a_beginning_is_held_back() -> None:
    stops = StopStrings(["né 你", "\n\n"])
    pieces = ["a n", "é", " ", "x\n", "y\n", "\nz"]
    assert [stops.push(piece) for piece in pieces] == ["a ", "", "", "né x", "\ny", ""]
    assert stops.matched == "\n\n"
    assert stops.push("more") == stops.flush() == ""


def test_a_beginning_at_the_end_is_text() -> None:
    stops = StopStrings("END")
    assert stops.push("the EN") == "the "
    assert stops.flush() == "EN"
    assert stops.matched is None
    assert StopStrings().push("anything") == "anything"


def test_errors() -> None:
    with pytest.raises(regard.ArgumentError, match="a stop string is empty, and every text"):
        StopStrings(["a", ""])
    with pytest.raises(regard.ArgumentTypeError, match="a stop string is int; it must be a str"):
        StopStrings([3])  # type: ignore[list-item]
