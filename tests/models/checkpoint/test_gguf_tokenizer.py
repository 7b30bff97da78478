"""Tokenizers in GGUF files: they give the ids of the tokenizer that the file was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, trainers

from regard.errors import FileError
from regard.files.gguf_files import read_gguf_header
from regard.models.checkpoint.gguf_tokenizer import PATTERNS, gguf_eos_ids, gguf_tokenizer
from regard.models.tokenizer import Tokenizer
from tests.models import small
from tests.models.checkpoint import gguf_writer as gguf

TEXTS = [*small.TEXT, "  two  spaces\nand 12345 lines\t", "", " ", "naïve 中文 🙂 don't", "x" * 40]


def read(tmp_path: Path, keys: dict[str, Any]) -> Tokenizer | None:
    made = {f"tokenizer.ggml.{key}": x for key, x in keys.items()}
    return gguf_tokenizer(read_gguf_header(gguf.write(tmp_path / "a.gguf", made, {})))


def byte_level(pre: str = "gpt-2") -> tuple[Tokenizer, dict[str, Any]]:
    trained = Tokenizer.train(TEXTS, vocab_size=330)
    content = json.loads(trained._backend.to_str())
    vocabulary = sorted(trained.vocabulary(), key=trained.vocabulary().__getitem__)
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    special = [3 if x == "<|endoftext|>" else 1 for x in vocabulary]
    keys = {"model": "gpt2", "pre": pre, "tokens": vocabulary, "merges": merges}
    return trained, {
        **keys,
        "token_type": special,
        "eos_token_id": vocabulary.index("<|endoftext|>"),
    }


def sentencepiece() -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer as Llama 2's, whose scores are the negative order of the merges."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=names, show_progress=False, max_token_length=8
    )
    backend.train_from_iterator(["the key of a query", "a value of the key"] * 9, trainer)
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    # a byte is no special token in the file's own tokenizer
    content = json.loads(backend.to_str())
    content["added_tokens"] = [x for x in content["added_tokens"] if x["id"] < 3]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    own = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))
    scores = [0.0 if kind != 1 else -float(i) for i, kind in enumerate(kinds)]
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    return own, {**keys, "bos_token_id": 1, "eos_token_id": 2}


def test_byte_level(tmp_path: Path) -> None:
    own, keys = byte_level()
    made = read(tmp_path, keys)
    assert made is not None
    for text in TEXTS:
        assert made.encode(text) == own.encode(text)
        assert made.decode(made.encode(text)) == text
    assert made.special == own.special
    end = own.special["<|endoftext|>"]
    assert gguf_eos_ids(read_gguf_header(tmp_path / "a.gguf")) == {end}
    assert made.encode("a", template=True) == made.encode("a")
    keys |= {"add_bos_token": True, "bos_token_id": end, "add_eos_token": True}
    both = read(tmp_path, keys)
    assert both is not None
    assert both.encode("a", template=True) == [end, *made.encode("a"), end]


def test_sentencepiece(tmp_path: Path) -> None:
    own, keys = sentencepiece()
    made = read(tmp_path, keys)
    assert made is not None
    for text in TEXTS:
        assert made.encode(text, template=True) == own.encode(text, template=True)
        assert made.decode(made.encode(text)) == text
    assert any(len(made.encode(text)) < len(text) - 4 for text in TEXTS[:3])
    assert made.encode("🙂")[-1] < 259  # bytes
    bare = read(tmp_path, {**keys, "add_bos_token": False, "add_space_prefix": False})
    assert bare is not None
    assert bare.encode("key", template=True) != own.encode("key")
    assert bare.decode(bare.encode(" key")) == " key"


def test_patterns(tmp_path: Path) -> None:
    """Numbers are split after three digits by Llama 3's pattern, and after each by Qwen 2's."""
    pieces = {}
    for name in PATTERNS:
        _, keys = byte_level(name)
        tokens = [*keys["tokens"], "98", "987", "9876"]
        merges = [*keys["merges"], "9 8", "98 7", "987 6"]
        kinds = [*keys["token_type"], 1, 1, 1]
        change = {"tokens": tokens, "merges": merges, "token_type": kinds, "bos_token_id": 0}
        made = read(tmp_path, {**keys, **change})
        assert made is not None
        pieces[name] = made.pieces(made.encode("9876"))
        begins = made.encode("9", template=True) != made.encode("9")
        assert begins == (PATTERNS[name] == PATTERNS["llama3"])  # as in llama.cpp
    assert pieces["gpt-2"] == ["9876"]
    assert pieces["llama-bpe"] == ["987", "6"]
    assert pieces["qwen2"] == ["9", "8", "7", "6"]


def test_user_defined_tokens_are_whole(tmp_path: Path) -> None:
    _, keys = sentencepiece()
    tokens = [*keys["tokens"], "\n\n\n"]
    change = {"scores": [*keys["scores"], 0.0], "token_type": [*keys["token_type"], 4]}
    made = read(tmp_path, {**keys, "tokens": tokens, **change})
    assert made is not None
    assert len(tokens) - 1 in made.encode("a\n\n\nb")


def test_tokenizer_json_beside_the_file(tmp_path: Path) -> None:
    own, keys = byte_level("a-rule-of-its-own")
    with pytest.raises(
        FileError, match=r"splits words by the rule 'a-rule-of-its-own'.*Put tokeni"
    ):
        read(tmp_path, keys)
    own.save(tmp_path / "tokenizer.json")
    made = read(tmp_path, keys)
    assert made is not None
    assert made.encode("a query") == own.encode("a query")
    shifted = ["<extra>", *keys["tokens"]]
    with pytest.raises(FileError, match=r"tokenizer\.json beside it has the token"):
        read(tmp_path, {**keys, "tokens": shifted, "token_type": [1, *keys["token_type"]]})
    with pytest.raises(FileError, match=r"tokenizer\.json beside it has more tokens"):
        read(tmp_path, {**keys, "tokens": keys["tokens"][:-1], "token_type": [1] * 329})
    assert read(tmp_path, {"model": "none"}) is not None


def test_no_tokenizer(tmp_path: Path) -> None:
    assert read(tmp_path, {}) is None
    assert gguf_eos_ids(read_gguf_header(tmp_path / "a.gguf")) is None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a kind": ({"model": "t5"}, "its tokenizer is of the kind 't5'; built are gpt2 and llama"),
    "no rule": ({"pre": 3}, "splits words by the rule 3"),
    "tokens": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of strings"),
    "a token twice": ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
    "merges": ({"merges": ["a b c"]}, "which are not two tokens"),
    "merges of nothing": ({"merges": ["zz yy"]}, "which are not two tokens"),
    "types": ({"token_type": [1, 2]}, "tokenizer.ggml.token_type has 2 values for 3"),
    "types of text": ({"token_type": "no"}, "tokenizer.ggml.token_type must be a list of numbers"),
    "an id": ({"add_bos_token": True, "bos_token_id": 1 << 30}, "bos_token_id is 1073741824"),
}


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("case", BAD)
def test_refused_tokenizers(case: str, tmp_path: Path) -> None:
    change, says = BAD[case]
    _, keys = byte_level()
    with pytest.raises(FileError, match=says):
        read(tmp_path, {**keys, **change})
