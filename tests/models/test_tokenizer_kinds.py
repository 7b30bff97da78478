"""Text out of every kind of tokenizer, against the library `tokenizers` itself: streams, stop
strings, and texts that continue others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from regard.errors import FileError
from regard.models.tokenizer import Tokenizer

TEXTS = [
    "the quick brown fox jumps over the lazy dog, né 你好 🙂!",
    "don't stop. it is the key of a query , and a value",
    "  two spaces,\nlines and 你 again 🙂🙂 end",
]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
Backend = tokenizers.Tokenizer


def byte_level() -> Backend:
    return Tokenizer.train(TEXTS[:2], vocab_size=300)._backend


def byte_fallback() -> Backend:
    """As the tokenizer of Llama 2: a space before the text, bytes for what is no letter."""
    letters = [c for c in sorted(set("".join(TEXTS[:2]))) if c.isascii() and c != " "]
    vocabulary = {x: i for i, x in enumerate(["<unk>", *BYTES, "▁", *letters, "▁t", "▁th", "▁the"])}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def sentencepiece(scheme: str) -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=90, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    return backend


def unigram_with_bytes() -> Backend:
    letters = [c for c in sorted(set("".join(TEXTS[:2]))) if c.isascii() and c != " "]
    scores = [("<unk>", 0.0), *((x, -9.0) for x in BYTES)]
    scores += [("▁", -3.0), *((x, -4.0) for x in letters), ("▁the", -2.0)]
    backend = Backend(models.Unigram(scores, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    )
    return backend


def word_piece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level BPE": byte_level,
    "byte fallback": byte_fallback,
    "SentencePiece with a space before": lambda: sentencepiece("always"),
    "SentencePiece without": lambda: sentencepiece("never"),
    "Unigram with bytes": unigram_with_bytes,
    "WordPiece": word_piece,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_a_piece_that_would_kill_the_process_is_refused(tmp_path: Path) -> None:
    """The library frees the tree of a unigram model by recursion, and 70,000 levels by a crash."""
    content = json.loads(unigram_with_bytes().to_str())
    file = tmp_path / "tokenizer.json"
    for length, refused in ((4096, False), (4097, True), (70_000, True)):
        content["model"]["vocab"][-1] = ["é" * length, -1.0]
        file.write_text(json.dumps(content))
        expected = pytest.raises(FileError, match=f"has {length} characters; .* at most 4096")
        with expected if refused else nullcontext():
            Tokenizer.load(file)


@cache
def pair(kind: str) -> tuple[Tokenizer, Backend]:
    """The tokenizer, and the library's own of the same file."""
    text = KINDS[kind]().to_str()
    return Tokenizer(Backend.from_str(text)), Backend.from_str(text)


def texts_of(kind: str, count: int = 25) -> list[str]:
    """Texts of words in any order, which break tokens and characters in many places."""
    draw, words = random.Random(kind), " ".join(TEXTS).split(" ")
    return TEXTS + [" ".join(draw.choices(words, k=9)) for _ in range(count)]


def streamed(tokenizer: Tokenizer, ids: list[int], after: list[int] | None = None) -> list[str]:
    stream = tokenizer.stream(after or [])
    return [*(stream.push(i) for i in ids), stream.flush()]


@every_kind
def test_streamed_pieces_join_to_the_text_of_the_library(kind: str) -> None:
    tokenizer, library = pair(kind)
    broken = 0
    for text in texts_of(kind):
        ids = library.encode(text, add_special_tokens=False).ids
        whole = library.decode(ids, skip_special_tokens=False)
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces) == whole
        assert not any("�" in piece for piece in pieces)
        broken += "".join(library.decode([i], skip_special_tokens=False) for i in ids) != whole
    # control: ids that are decoded alone give another text, where tokens depend on one another
    assert bool(broken) == (kind != "SentencePiece without")


@every_kind
def test_a_stream_goes_on_after_any_ids(kind: str) -> None:
    tokenizer, library = pair(kind)
    for text in texts_of(kind, 6):
        ids = library.encode(text, add_special_tokens=False).ids
        whole = library.decode(ids, skip_special_tokens=False)
        for i in range(1, len(ids)):
            before = library.decode(ids[:i], skip_special_tokens=False)
            if not before.endswith("�"):
                assert before + "".join(streamed(tokenizer, ids[i:], ids[:i])) == whole


@every_kind
def test_any_ids_stream_to_the_text_of_the_library(kind: str) -> None:
    tokenizer, library = pair(kind)
    draw = random.Random(kind)
    whole_tokens = [i for i in range(library.get_vocab_size()) if tokenizer.token_bytes(i) is None]
    for _ in range(50):
        ids = draw.choices(whole_tokens or range(library.get_vocab_size()), k=12)
        assert "".join(streamed(tokenizer, ids)) == library.decode(ids, skip_special_tokens=False)


@every_kind
def test_a_text_continues_the_ids_before_it(kind: str) -> None:
    """What follows ids is read without the space that begins a text."""
    tokenizer, library = pair(kind)
    for first, second in (("the fox", " jumps over"), ("the quick", "ly, and"), ("a", " dog, né")):
        before = library.encode(first, add_special_tokens=False).ids
        ids = tokenizer.encode(second, after=before)
        told = library.decode([*before, *ids], skip_special_tokens=False)
        if kind == "WordPiece":  # which cannot say whether a word goes on
            second = " " + second.strip()
            assert told.replace(" ", "") == (first + second).replace(" ", "")
        else:
            assert told == first + second
