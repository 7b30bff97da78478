"""What tokens look like: visible glyphs, and the bytes behind the letters of byte-level BPE."""

from __future__ import annotations

import unicodedata

_GLYPHS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def visible(text: str) -> str:
    """`text` with what a page would hide or obey shown as glyphs: spaces, controls, marks.

    >>> visible(" a\\x00\\u202e")
    '·a␀‹U+202E›'
    """
    return "".join(_glyph(letter) for letter in text)


def _glyph(letter: str) -> str:
    if letter in _GLYPHS:
        return _GLYPHS[letter]
    kind = unicodedata.category(letter)
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    if kind[0] == "C" or kind[0] == "Z":
        return f"‹U+{ord(letter):04X}›"
    return f"◌{letter}" if kind[0] == "M" else letter


def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte: printable bytes are themselves, the others follow from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(moved)}


BYTE_OF = _byte_alphabet()
