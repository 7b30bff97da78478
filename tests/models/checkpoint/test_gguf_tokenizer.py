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


def test_unigram(tmp_path: Path) -> None:
    """XLM-RoBERTa: the most likely pieces, with a table of spellings that changes no letter."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "▁the", "▁key", "▁", "k", "e", "y", "s", "▁ke", "ys"]
    scores = [0.0, 0.0, 0.0, 0.0, -2.0, -3.0, -5.0, -6.0, -6.0, -6.0, -6.0, -4.0, -4.5]
    table = [*(1024).to_bytes(4, "little"), *([0] * 1024)]
    keys: dict[str, Any] = {
        "model": "t5",
        "tokens": words,
        "scores": scores,
        "token_type": [3, 3, 3, 2, *[1] * 9],
        "precompiled_charsmap": table,
    }
    keys |= {"bos_token_id": 0, "eos_token_id": 2, "add_bos_token": True, "add_eos_token": True}
    made = read(tmp_path, keys)
    assert made is not None
    # "▁ke" and "ys" have the sum -8.5, "▁key" and "s" -9
    assert made.encode("the  keys", template=True) == [0, 4, 11, 12, 2]
    assert made.decode(made.encode("the keys")) == "the keys"
    assert made.encode("中") == [6, 3]
    keys["scores"] = [*scores[:10], -5.0, *scores[11:]]
    other = read(tmp_path, keys)
    assert other is not None
    assert other.encode("keys") == [5, 10]
    ends = {k: x for k, x in keys.items() if not k.endswith("_token_id")}
    named = read(tmp_path, {**ends, "cls_token_id": 0, "seperator_token_id": 2})
    assert named is not None
    assert named.encode("key", template=True) == [0, 5, 2]
    with pytest.raises(FileError, match="no token of type 2"):
        read(tmp_path, {**keys, "token_type": [3, 3, 3, *[1] * 10]})
    with pytest.raises(FileError, match="tokens has a token of 70000 characters; 4096 are the"):
        read(tmp_path, {**keys, "tokens": [*words[:-1], "y" * 70_000]})
    with pytest.raises(FileError, match="tokens are refused"):
        read(tmp_path, {**keys, "precompiled_charsmap": [9, 9]})


def test_pieces_by_merges(tmp_path: Path) -> None:
    """Gemma 4: SentencePiece's pieces, whose merges the file lists."""
    own, keys = sentencepiece()
    merges = json.loads(own._backend.to_str())["model"]["merges"]
    listed = {"merges": [" ".join(pair) for pair in merges], "add_space_prefix": False}
    without_scores = {k: x for k, x in keys.items() if k != "scores"} | listed
    made = read(tmp_path, {**without_scores, "model": "gemma4"})
    assert made is not None
    for text in TEXTS:
        assert made.decode(made.encode(text)) == text
    same = read(tmp_path, {**keys, "add_space_prefix": False})
    assert same is not None
    assert [made.encode(x, template=True) for x in TEXTS] == [
        same.encode(x, template=True) for x in TEXTS
    ]
    fewer = read(tmp_path, {**without_scores, "model": "gemma4", "merges": listed["merges"][:9]})
    assert fewer is not None
    assert fewer.encode(TEXTS[0]) != made.encode(TEXTS[0])


TEXT = "It's 12345 DON'T aBC\n\n   x=½é;  中文字\u0e01\r\n/`"
WORDS = {
    "It|'s| 12345| DON|'|T| aBC|\n\n  | x|=|½|é|;| | 中文字\u0e01|\r|\n|/`": (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum mpt olmo "
        "modern-bert jina-v1-en jina-v2-code roberta-bpe jais trillion granite-docling "
        "exaone4"
    ),
    "It|'s| |1|2|3|4|5| DON|'|T| aBC|\n\n  | x|=|½|é|;| | 中文字\u0e01|\r|\n|/`": (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"
    ),
    "It|'s| |123|45| DON|'T| aBC|\n\n|  | x|=|½|é|;| | 中文字\u0e01|\r\n|/`": (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx "
        "smaug-bpe glm4 chatglm-bpe jais-2 minicpm5"
    ),
    "It|'s| |1|2|3|4|5| DON|'T| aBC|\n\n|  | x|=|½|é|;| | 中文字\u0e01|\r\n|/`": (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2 "
        "qwen35 bailingmoe bailingmoe2 llada-moe seed-coder ufakzeka exaone-moe"
    ),
    "It|'|s| |123|45| DON|'|T| aBC|\n\n  | x|=|½|é|;| | 中文字\u0e01|\r\n|/|`": ("default"),
    "It|'|s| |123|45| DON|'|T| aBC|\n\n  | x|=|½|é|;| | 中文字\u0e01|\r\n|/`": ("falcon"),
    "It's| 12345| DON'T| aBC|\n\n  | x=½é;| | 中文字\u0e01|\r\n|/`": (
        "poro-chat bloom gpt3-finnish"
    ),
    "It's| |1|2|3|4|5| DON'T| aBC|\n\n  | x=|½|é;| | 中文字\u0e01|\r\n|/`": ("viking"),
    "It|'|s| |1|2|3|4|5| DON|'|T| aBC|\n|\n|  | x|=|½|é|;| | |中文字\u0e01|\r|\n|/|`": (
        "deepseek-coder"
    ),
    "It|'|s| |12345| DON|'|T| aBC|\n|\n|  | x|=|½|é|;|  |中文字\u0e01|\r|\n|/`": ("deepseek-llm"),
    "It|'s| |123|45| DON|'T| aBC|\n\n|  | x|=|½|é|;|  |中文字|\u0e01|\r\n|/`": (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4"
    ),
    "It|'s| |1|2|3|4|5| DON|'T| aBC|\n|\n|  | x|=|½|é|;|  |中文字|\u0e01|\r|\n|/`": ("spark2_5"),
    "It's| |1|2|3|4|5| DON'T| a|BC|\n\n|  | x|=|½|é|;|  |中文字|\u0e01|\r\n|/`": ("youtu"),
    "It|'s| |1|2|3|4|5| DON|'T| a|BC|\n\n|  | x|=|½|é|;| | 中文字\u0e01|\r\n|/`": ("tekken"),
    "It's| |123|45| DON'T| a|BC|\n\n|  | x|=|½|é|;| | 中文字\u0e01|\r\n|/`": (
        "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m"
    ),
    "It's| |12|345| DON'T| a|BC|\n\n|  | x|=|½|é|;| | 中文字\u0e01|\r\n|/`": (
        "tiny_aya cohere2moe"
    ),
    "It|'|s| |1|2|3|4|5| DON|'|T| aBC|\n|\n|  | x|=|½|é|;|  |中文字\u0e01|\r|\n|/|`": ("chameleon"),
    "It's| |123|45| DON'T| a|BC|\n\n|  | x|=|½|é|;| | |中文字|\u0e01|\r\n|/`": ("kimi-k2"),
    "It's |12|345| DON'T aBC\n\n   x=|½|é;  中文字\u0e01\r\n/`": ("superbpe"),
    "It|'s| |12|345| DON|'T| aBC|\n\n|  | x|=|½|é|;|  |中文字|\u0e01|\r\n|/`": ("afmoe"),
    "It|'s| |1|2|3|4|5| DON|'T| aBC|\n\n|  | x|=|½|é|;| | 中文字\u0e01|\r|\n|/`": ("laguna"),
}
"""The words into which llama.cpp (xllamacpp 2026.10) splits the text -> the rules. For
youtu, tiny_aya, cohere2moe and kimi-k2 it does not begin a word before a capital, as the patterns
of these models do.
"""


def test_every_rule_splits_words_where_llama_cpp_does(tmp_path: Path) -> None:
    _, keys = byte_level()
    keys["bos_token_id"] = 0
    assert {name for names in WORDS.values() for name in names.split()} == PATTERNS.keys()
    for words, names in WORDS.items():
        for i, name in enumerate(names.split()):
            if i and PATTERNS[name] == PATTERNS[names.split()[0]]:
                continue
            made = read(tmp_path, {**keys, "pre": name})
            assert made is not None
            split = made._backend.pre_tokenizer.pre_tokenize_str(TEXT)
            assert [TEXT[slice(*place)] for _, place in split] == words.split("|"), name
            begins = made.encode("9", template=True) != made.encode("9")
            assert begins == (name in ("llama3", "tekken", "chameleon")), name


def test_ends_are_found_by_their_texts(tmp_path: Path) -> None:
    tokens = ["a", "<|im_end|>", "<|end|>", "</s>", "<|file_sep|>", "b"]
    keys = {"model": "gpt2", "tokens": tokens, "eos_token_id": 5}

    def ends(*more: str) -> set[int] | frozenset[int] | None:
        read(tmp_path, {**keys, "tokens": [*tokens, *more], "pre": "gpt-2", "merges": ["a b"]})
        return gguf_eos_ids(read_gguf_header(tmp_path / "a.gguf"))

    tokens.append("ab")
    assert ends() == {1, 2, 3, 4, 5}
    assert ends("<|return|>", "<|call|>") == {1, 3, 4, 5, 7, 8}  # parts of an answer of gpt-oss
    assert ends("<|tool_response>") == {1, 2, 4, 5, 7}


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_a_streamed_token_costs_the_same_at_any_length(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the ids that are decoded for each further token of a text."""
    tokenizer = read(tmp_path, kind()[1])
    assert tokenizer is not None
    ids = tokenizer.encode(" ".join(TEXTS) * 12)
    decoded: list[int] = []
    plain = tokenizer._decode
    monkeypatch.setattr(tokenizer, "_decode", lambda x: (decoded.append(len(x)), plain(x))[1])
    stream, costs, text = tokenizer.stream(), [], ""
    for index in ids:
        before = sum(decoded)
        text += stream.push(index)
        costs.append(sum(decoded) - before)
    assert text + stream.flush() == tokenizer.decode(ids)
    half = len(costs) // 2
    assert half > 500
    # a character has at most four tokens, which are decoded again with each of them
    assert max(costs[half:]) <= max(costs[:half]) <= 12


def test_user_defined_tokens_are_whole(tmp_path: Path) -> None:
    _, keys = sentencepiece()
    tokens = [*keys["tokens"], "\n\n\n"]
    change = {"scores": [*keys["scores"], 0.0], "token_type": [*keys["token_type"], 4]}
    made = read(tmp_path, {**keys, "tokens": tokens, **change})
    assert made is not None
    assert len(tokens) - 1 in made.encode("a\n\n\nb")


def test_tokenizer_json_beside_the_file(tmp_path: Path) -> None:
    own, keys = byte_level("a-rule-of-its-own")
    with pytest.raises(FileError, match=r"splits words by the rule 'a-rule-of-its-own'.*Put"):
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
    "a kind": ({"model": "rwkv"}, "its tokenizer is of the kind 'rwkv'; built are gpt2, llama"),
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
