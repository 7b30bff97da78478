"""Text as ids arrive, for tokenizers that are not byte-level: the parts are the whole, and a step
does not grow.
"""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import decoders, models

from regard.models.tokenizer import Tokenizer

WORDS = ["▁the", "▁", "he", "▁▁a", "x", "▁né", "你", "▁qu", "ick", "▁the▁", "."]


def metaspace() -> Tokenizer:
    """As the sentencepiece vocabularies of Llama 2 and Gemma: words, and bytes for what is no
    word.
    """
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def wordpiece() -> Tokenizer:
    names = ["[UNK]", "the", "##se", "fox", "##es", "né", "你", "##x"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)


@pytest.mark.parametrize("make", [metaspace, wordpiece])
def test_the_parts_are_the_whole(make: object) -> None:
    tokenizer, draw = make(), random.Random(0)  # type: ignore[operator]
    spelled = [1 + byte for byte in "né 你🙂".encode()] if make is metaspace else []
    first = (
        257 if make is metaspace else 0
    )  # stray bytes change what was shown: a run of them is text or is not
    for _ in range(40):
        ids = [draw.randrange(first, tokenizer.vocab_size) for _ in range(draw.randrange(12))]
        at = draw.randrange(len(ids) + 1)
        ids[at:at] = spelled
        stream = tokenizer.stream()
        pieces = [stream.push(i) for i in ids]
        rest = stream.flush()
        whole = tokenizer.decode(ids)
        assert "".join(pieces) + rest == whole, ids
        assert not any(piece.endswith("�") for piece in pieces)


def test_a_step_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, sizes = metaspace(), []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int], **options: bool) -> str:
        sizes.append(len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    stream = tokenizer.stream()
    for i in range(300):
        stream.push(257 + i % len(WORDS))
    assert max(sizes) <= 2
    assert len(sizes) <= 600
