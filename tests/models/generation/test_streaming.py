"""Text in the context of the ids before it: streamed, decoded and encoded, for every kind of
tokenizer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers

import regard
from regard.models import Model
from regard.models.families import family
from regard.models.tokenizer import Tokenizer
from tests.models import small

llama = family("llama")

WORDS = ["▁the", "▁", "he", "▁▁a", "x", "▁né", "你", "▁qu", "ick", "▁the▁", "."]
SAID = ["▁say", "▁Hello", "▁Block", "Q", "Block"]


def sentencepiece(prefix: str | None, words: list[str] = WORDS) -> Tokenizer:
    """As the vocabularies of Llama 2, Mistral and Gemma: words, and bytes for what is no word; the
    space before a text comes from the normalizer ("Prepend"), from Metaspace, or from nowhere.
    """
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.model.ignore_merges = True
    space = normalizers.Replace(" ", "▁")
    if prefix == "Prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        # the file has no rule for words; here one lets them be tokens without merges
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("▁*[^▁]*"), "isolated")
    else:
        scheme = prefix or "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix is not None:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


PREFIXES = ["Prepend", "first", "always"]


@pytest.mark.parametrize("kind", [*PREFIXES, None])
def test_a_continuation_is_encoded_in_its_context(kind: str | None) -> None:
    """decode(encode(text)) after any ids is the text, and a beginning stays one after <s>."""
    tokenizer = sentencepiece(kind)
    texts = [" the quick", "the", "  a", "ick the né", " 你🙂 x", "the  ", " "]
    before = tokenizer.encode("the x")
    for text in texts:
        ids = tokenizer.encode(text, after=before)
        assert tokenizer.decode(ids, after=before) == text
        begun = tokenizer.encode(text, after=list(tokenizer.special.values()))
        assert begun == tokenizer.encode(text)
    as_beginning = tokenizer.decode(tokenizer.encode("the"), after=before)
    assert (as_beginning != "the") == (kind is not None), "control: a second beginning"


def saying(kind: str | None, answer: list[str]) -> Model:
    """A model that says fixed words after "say", whatever came before: the stream keeps the
    embedding, and the head maps each token to the next.
    """
    tokenizer = sentencepiece(kind, SAID)
    vocabulary = tokenizer.vocabulary()
    V = len(vocabulary)
    config = small.config(vocab_size=V, hidden_size=V + V % 2)
    decoder = llama.build(config).eval().requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        parameter.fill_(float(parameter.ndim == 1))
        if name.startswith("embed"):
            parameter.copy_(torch.eye(V, config.hidden_size))
    head = decoder.head
    assert head is not None
    chain = [vocabulary[token] for token in ["▁say", *answer, "</s>"]]
    for token, following in pairwise(chain):
        head.weight[following, token] = 1
    return Model(decoder, tokenizer, config, eos_ids=[vocabulary["</s>"]])


@pytest.mark.parametrize("kind", PREFIXES)
def test_an_answer_keeps_its_first_space_in_every_way_to_generate(kind: str) -> None:
    model = saying(kind, ["▁Hello", "▁Block", "Q"])
    prefix = model.cache_prefix("say")
    prompt = model.encode("say")
    assert model.decode(prompt) == ["say"]
    batch = model.generate(["say", "Hello say"], max_tokens=5)
    list(batch)
    texts = [
        "".join(model.generate("say", max_tokens=5)),
        "".join(model.generate(prompt, max_tokens=5)),
        "".join(model.generate("", prefix=prefix, max_tokens=5)),
        "".join(model.generate(" say", prefix=prefix, max_tokens=5)),
        model.beam_search("say", beams=1, max_tokens=5)[0].text.removesuffix("</s>"),
        *(row.text for row in batch.rows),
    ]
    assert texts == [" Hello BlockQ"] * len(texts)
    stopped = model.generate("say", max_tokens=5, stop=" Hello Bl")
    assert ("".join(stopped), stopped.finished) == ("", "stop")
    assert model.generate("Block", prefix=prefix).prompt_tokens == 1
    assert model.tokenizer.pieces(stopped.ids) == ["·Hello", "·Block"]


def test_the_answer_that_is_measured_continues_the_text() -> None:
    model = saying("Prepend", ["▁Hello"])
    lens = regard.inspect.logit_lens(model, "say", answer=" Hello")
    assert lens is not None
    with pytest.raises(regard.ArgumentError, match="is 5 tokens"):
        regard.inspect.logit_lens(model, "say", answer="Hello")


def test_a_prompt_that_ends_in_half_a_character() -> None:
    tokenizer = sentencepiece("first")
    first, second = (1 + byte for byte in "é".encode())
    stream = tokenizer.stream([257, first])
    assert stream.push(second) == "é" == tokenizer.decode([second], after=[257, first])
    assert tokenizer.decode([258], after=tokenizer.encode("the �")) == " "


def test_a_step_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, sizes = sentencepiece("first"), []
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
