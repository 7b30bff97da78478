"""The tokenizer: round trips, what tokens look like, streaming, control tokens as text, damaged
files.
"""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.models.tokenizer import END_OF_TEXT, Tokenizer, display_text

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "el zorro marrón salta; 狐狸跳过了懒狗 🦊",
] * 5
TOKENIZER = Tokenizer.train(TEXTS, vocab_size=320)
# text as users have it, and text as nobody should: controls, marks, other planes, names of control
# tokens
MARKS = [" ", "\n", "é", "e\u0301", "\u202e", "\x00", "🦊", END_OF_TEXT, "Ġ", " the", "\r\n"]
text = st.one_of(st.text(), st.lists(st.sampled_from(MARKS)).map("".join))


@pytest.mark.full
@given(text)
def test_decode_of_encode_is_the_text(words: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(words)) == words


@given(text)
def test_control_tokens_in_text_are_literal(words: str) -> None:
    assert TOKENIZER.end_of_text not in TOKENIZER.encode(words)


@given(text, text)
def test_control_tokens_count_when_asked(left: str, right: str) -> None:
    ids = TOKENIZER.encode(left + END_OF_TEXT + right, special=True)
    named = (left + END_OF_TEXT + right).count(END_OF_TEXT)
    assert ids.count(TOKENIZER.end_of_text) == named
    assert TOKENIZER.decode(ids) == left + END_OF_TEXT + right
    hidden = TOKENIZER.decode(ids, skip_special=True)
    assert hidden == (left + END_OF_TEXT + right).replace(END_OF_TEXT, "")


def named_specials(prefix: str | None, draw: random.Random) -> tokenizers.Tokenizer:
    """A tokenizer whose special tokens take spaces around them, in every combination."""
    letters = ["▁", *"abcs<>/x1", "▁a", "▁b"]
    vocabulary = {letter: i for i, letter in enumerate(["?", *letters])}
    model = tokenizers.models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="?")
    backend = tokenizers.Tokenizer(model)
    if prefix == "Prepend":
        of = tokenizers.normalizers
        backend.normalizer = of.Sequence([of.Prepend("▁"), of.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prefix)
    backend.decoder = tokenizers.decoders.Metaspace()
    for name in ("<s>", "</s>", "<s", "ab", "x1"):
        options = {key: draw.random() < 0.5 for key in ("lstrip", "rstrip", "single_word")}
        normalized = draw.random() < 0.3
        backend.add_special_tokens([tokenizers.AddedToken(name, normalized=normalized, **options)])
    return backend


@pytest.mark.parametrize("prefix", ["Prepend", "first", "always", "never"])
def test_special_tokens_are_those_of_the_library(prefix: str) -> None:
    draw, ordinary = random.Random(0), 0
    for _ in range(12):
        backend = named_specials(prefix, draw)
        oracle = tokenizers.Tokenizer.from_str(backend.to_str())
        tokenizer = Tokenizer(backend)
        for _ in range(40):
            words = draw.choices(["<s>", "</s>", "ab", "x1", " ", "  ", "a", "b", "s", ">"], k=9)
            text = "".join(words)
            ids = oracle.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, special=True) == ids, (text, backend.to_str())
            ordinary += tokenizer.encode(text) != ids
    assert ordinary > 100, "control: names in ordinary text are no tokens"


def test_special_tokens_are_found_in_one_pass_of_the_library() -> None:
    """The library is called once for a text, however many names the tokenizer has."""
    backend = tokenizers.Tokenizer.from_str(TOKENIZER._backend.to_str())
    backend.add_special_tokens([f"<|name {i}|>" for i in range(256)])
    tokenizer = Tokenizer(backend)
    text = "the fox <|name 7|>" * 2000
    ids = tokenizer.encode(text, special=True)
    assert ids.count(tokenizer.special["<|name 7|>"]) == 2000
    assert tokenizer.decode(ids) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_streamed_parts_join_to_the_text_of_any_ids(ids: list[int]) -> None:
    stream = TOKENIZER.stream()
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.flush() == TOKENIZER.decode(ids)


@given(st.text(min_size=1))
def test_stream_never_gives_half_a_character(words: str) -> None:
    words = words.replace("\ufffd", "")
    stream = TOKENIZER.stream()
    given_out = ""
    for i in TOKENIZER.encode(words):
        given_out += stream.push(i)
        assert words.startswith(given_out)  # a replacement character would break this
    assert given_out == words
    assert stream.flush() == ""


def test_control_for_the_stream_decoding_each_token_alone_breaks_characters() -> None:
    ids = TOKENIZER.encode("ж")
    assert len(ids) == 2
    assert "".join(TOKENIZER.decode([i]) for i in ids) != "ж"


def test_a_stream_goes_on_behind_half_a_character() -> None:
    tokenizer = Tokenizer.train(["x"], vocab_size=257)  # every byte is a token
    ids = tokenizer.encode("🦊")
    for n in (1, 2, 3):
        stream = tokenizer.stream(ids[:n])
        assert "".join(map(stream.push, ids[n:])) + stream.flush() == "🦊"
        cut = tokenizer.stream(ids[:n])
        assert cut.push(tokenizer.encode("x")[0]) == "x", "the half is no text of what follows"


def test_pieces_are_visible_and_show_bytes_of_split_characters() -> None:
    shown = ["the", "·the", "⏎", "⇥", "ж‹1/2›", "ж‹2/2›"]
    assert TOKENIZER.pieces(TOKENIZER.encode("the the\n\tж")) == shown
    assert TOKENIZER.pieces([0]) == [END_OF_TEXT]
    fox = [
        next(i for i in range(257) if TOKENIZER.token_bytes(i) == bytes([b])) for b in "🦊".encode()
    ]
    assert TOKENIZER.pieces(fox) == [f"🦊‹{n}/4›" for n in (1, 2, 3, 4)]
    assert TOKENIZER.pieces(fox[:3]) == ["‹F0›", "‹9F›", "‹A6›"], "the rest is not there"
    assert TOKENIZER.pieces(fox[2:] + fox) == [
        "‹A6›",
        "‹8A›",
        *(f"🦊‹{n}/4›" for n in (1, 2, 3, 4)),
    ]


@given(text)
def test_pieces_hold_nothing_that_a_page_would_obey(words: str) -> None:
    ids = TOKENIZER.encode(words)
    pieces = TOKENIZER.pieces(ids)
    assert len(pieces) == len(ids)
    outside = [re.sub("‹[^›]*›", "", piece) for piece in pieces]  # bytes are shown as ‹E5 8A›
    assert all(piece.isprintable() and " " not in piece for piece in outside)


@pytest.mark.parametrize(
    ("hidden", "shown"),
    [
        ("a b", "a·b"),
        ("\x00\x1b", "␀␛"),
        ("\u202e\u2028\ufeff", "‹U+202E›‹U+2028›‹U+FEFF›"),
        ("\u0301", "◌\u0301"),
        ("\u00a0", "‹U+00A0›"),
        ("</script>", "</script>"),  # escaping is the page's work; here it only has to be seen
    ],
)
def test_visible(hidden: str, shown: str) -> None:
    assert display_text(hidden) == shown


def test_training_is_deterministic_and_keeps_every_byte() -> None:
    again = Tokenizer.train(TEXTS, vocab_size=320)
    assert again._backend.to_str() == TOKENIZER._backend.to_str()
    assert again.vocab_size == 320
    assert again.special == {END_OF_TEXT: 0}
    assert {again.token_bytes(i) for i in range(1, 257)} == {bytes([b]) for b in range(256)}


def test_end_of_text_in_training_texts_is_no_token_of_its_own() -> None:
    trained = Tokenizer.train([f"x{END_OF_TEXT}y"] * 50, vocab_size=300)
    assert trained.encode(END_OF_TEXT) != [0]
    assert trained.decode(trained.encode(END_OF_TEXT)) == END_OF_TEXT


def test_batch_equals_one_by_one() -> None:
    assert TOKENIZER.encode_batch([*TEXTS, ""]) == [TOKENIZER.encode(t) for t in [*TEXTS, ""]]


def test_threads_agree() -> None:
    with ThreadPoolExecutor(16) as pool:
        rows = list(pool.map(lambda _: TOKENIZER.encode(TEXTS[1], special=True), range(200)))
    assert all(row == TOKENIZER.encode(TEXTS[1]) for row in rows)


def test_save_and_load(tmp_path: Path) -> None:
    assert TOKENIZER.save(tmp_path) == tmp_path / "tokenizer.json"
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        back = Tokenizer.load(source)
        assert back.encode(TEXTS[1] + END_OF_TEXT) == TOKENIZER.encode(TEXTS[1] + END_OF_TEXT)
        assert back.special == TOKENIZER.special


def test_other_kinds_of_tokenizer_decode_and_stream(tmp_path: Path) -> None:
    """A byte-fallback tokenizer, as Llama's: pieces of a character come as <0x..> tokens."""
    bytes_needed = {f"<0x{b:02X}>": i + 3 for i, b in enumerate("é".encode())}
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, **bytes_needed, "▁": 5}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    backend, of = tokenizers.Tokenizer(model), tokenizers.decoders
    backend.decoder = of.Sequence([of.Replace("▁", " "), of.ByteFallback(), of.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.token_bytes(1) is None
    assert tokenizer.end_of_text is None
    stream = tokenizer.stream()
    assert [stream.push(i) for i in [1, 3, 4, 2]] == [" a", "", "é", "b"]
    assert stream.flush() == ""
    assert tokenizer.pieces([1, 3]) == ["·a", "‹C3›"]


@pytest.mark.parametrize("bad", [-1, 320, 2**31, 2**40])
def test_unknown_ids(bad: int) -> None:
    for use in (lambda: TOKENIZER.decode([5, bad]), lambda: TOKENIZER.pieces([bad])):
        with pytest.raises(ArgumentError, match=rf"token id {bad} is outside \[0, 320\)"):
            use()


@pytest.mark.parametrize("use", ["encode", "encode_batch", "train"])
def test_lone_surrogate_is_named_with_its_offset(use: str) -> None:
    bad = "ab\ud800c"
    calls = {
        "encode": lambda: TOKENIZER.encode(bad),
        "encode_batch": lambda: TOKENIZER.encode_batch(["fine", bad]),
        "train": lambda: Tokenizer.train([bad], vocab_size=300),
    }
    with pytest.raises(ArgumentError, match=r"lone surrogate U\+D800 at offset 2"):
        calls[use]()


def test_text_must_be_str() -> None:
    with pytest.raises(ArgumentTypeError, match="text is bytes; it must be str"):
        TOKENIZER.encode(b"abc")  # type: ignore[arg-type]


def test_vocabulary_below_the_bytes() -> None:
    with pytest.raises(ArgumentError, match=r"vocab_size is 256; .* at least 257"):
        Tokenizer.train(["a"], vocab_size=256)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"version": "1.0",\n  oops}', "line 2 column 3.*is the download complete"),
        (b"\xff\xfe", "is not JSON: .*byte 0xff in position 0"),
        (b"<!DOCTYPE html>", "is not JSON: .*line 1 column 1"),
        (b"[]", "is a JSON list; it must be an object"),
        (b'{"model": {}}', "no 'decoder' at the top level"),
        (b"[" * 100_000, "is nested too deep"),
        (b'{"version": "9.0", "decoder": null, "model": {}}', r"package [\d.]+ cannot read"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(FileError, match=f"(?s)tokenizer.json:? .*{message}"):
        Tokenizer.load(tmp_path)


def test_missing_and_unwritable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none.json is missing"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(FileError, match="cannot write the tokenizer: No such file"):
        TOKENIZER.save(tmp_path / "none" / "tokenizer.json")


def test_mutated_files_raise_our_error_or_load(tmp_path: Path) -> None:
    small = Tokenizer.train(["ab"], vocab_size=258)
    whole = json.dumps(json.loads(small._backend.to_str()))
    draw = random.Random(0)
    file = tmp_path / "tokenizer.json"
    refused = 0
    for _ in range(100):
        at = draw.randrange(len(whole))
        cut = whole[:at] + draw.choice(["", "}", "9", '"', "\\"]) + whole[at + draw.randrange(3) :]
        file.write_text(cut, "utf-8")
        try:
            Tokenizer.load(file)
        except FileError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("place", ["vocab", "added_tokens"])
@pytest.mark.parametrize("index", [2**31, 1 << 22, -1, True, 1.5, "7"])
def test_ids_that_no_vocabulary_has(tmp_path: Path, place: str, index: object) -> None:
    """The backend makes a table up to the largest id: 8 GiB for one of 2^31."""
    content = json.loads(TOKENIZER._backend.to_str())
    if place == "vocab":
        content["model"]["vocab"]["a"] = index
    else:
        content["added_tokens"][0]["id"] = index
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"a token has the id .*; ids are from 0 to 4194303"):
        Tokenizer.load(tmp_path)
