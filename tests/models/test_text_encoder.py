"""An encoder as it is held: texts to ids, states, vectors; what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

import regard
from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.models import HeadedEncoder, Model, Seq2Seq, TextEncoder
from regard.models.families import family
from regard.models.save import save
from regard.models.sentence_settings import Pooling
from regard.models.tokenizer import Tokenizer
from tests.parity.layers import assert_near

bert = family("bert")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]
CONFIG = bert.config(len(WORDS), 12, 2, 3, 16, 10)
TEXTS = ["a b c", "d", "e f g h a b", "", "b a"]


def tokenizer() -> Tokenizer:
    """A word is a token; it pads to 9 and truncates to 4, as files do that were once used so."""
    made = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(WORDS[:4])
    made.enable_padding(length=9)
    made.enable_truncation(4)
    return Tokenizer(made)


@pytest.fixture(scope="module")
def network() -> HeadedEncoder:
    torch.manual_seed(2)
    made = bert.build(CONFIG).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.fixture
def model(network: HeadedEncoder) -> TextEncoder:
    return TextEncoder(network, tokenizer(), CONFIG, max_seq_length=10)


def test_texts_beside_one_another(model: TextEncoder) -> None:
    """All of each text, padded to the longest behind its end: what the tokenizer's file says of
    lengths does not count.
    """
    ids, positions, segments = model.encode(TEXTS)
    words = [["[CLS]", *text.split(), "[SEP]"] for text in TEXTS]
    longest = max(map(len, words))
    for row, (found, where) in zip(
        words, zip(ids.tolist(), positions.tolist(), strict=True), strict=True
    ):
        assert found == [*map(WORDS.index, row), *[0] * (longest - len(row))]
        assert where == [*range(len(row)), *[-1] * (longest - len(row))]
    assert not segments.any()
    assert model.encode("d").ids.tolist() == [[2, 7, 3]]
    assert model.encode(["d"]).ids.tolist() == [[2, 7, 3]]


def test_pairs(model: TextEncoder) -> None:
    ids, positions, segments = model.encode(["a b", "c"], ["d", "e"])
    assert ids.tolist() == [[2, 4, 5, 3, 7, 3], [2, 6, 3, 8, 3, 0]]
    assert segments.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, -1]]
    states = model.hidden(ids, positions, segments)
    alone = model.hidden(*model.encode("c", "e"))
    assert_near(states[1:, :5], alone)
    wrong = model.hidden(ids, positions)
    assert float((wrong - states)[positions >= 0].abs().max()) > 0.01, "segments left out"


def test_a_special_token_in_a_text_is_text_unless_asked(model: TextEncoder) -> None:
    for special, count in ((False, 1), (True, 2)):
        assert model.encode("[SEP]", special=special).ids[0].tolist().count(3) == count
    with pytest.warns(UserWarning, match=r"\[SEP\].*the name of a special token"):
        assert model.encode("[SEP]").ids[0].tolist().count(3) == 1
    assert model.encode("[SEP]").ids[0].tolist().count(3) == 1  # warned once


def test_vectors_of_ids(model: TextEncoder) -> None:
    rows = [model.encode(text).ids[0].tolist() for text in TEXTS]
    assert torch.equal(model.embed(rows), model.embed(TEXTS))
    assert torch.equal(model.embed(torch.tensor(rows[:1])), model.embed(rows[:1]))
    with pytest.raises(ArgumentTypeError, match="no chat template"):
        model.embed([{"role": "user", "content": "a"}])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="token id"):
        model.embed([[10**6]])


def test_vectors(model: TextEncoder) -> None:
    """One for each text, in order; alone or beside others, however many at once; of length 1."""
    alone = torch.cat([model.embed(text) for text in TEXTS])
    for batch in (1, 2, 3, 32):
        assert_near(model.embed(TEXTS, batch_size=batch), alone)
    assert_near(alone.norm(dim=1), torch.ones(5))
    assert model.embed("a").shape == (1, 12)
    shuffled = [TEXTS[i] for i in (3, 0, 4, 2, 1)]
    assert_near(model.embed(shuffled), alone[[3, 0, 4, 2, 1]])
    assert not model.embed(TEXTS).requires_grad
    assert not model.embed(TEXTS).is_inference(), "it may be learned from"


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len"])
def test_the_models_own_pooling_and_another(network: HeadedEncoder, mode: Any) -> None:
    made = TextEncoder(network, tokenizer(), CONFIG, pooling=Pooling(mode, normalize=False))
    tokens = made.encode("a b c")
    states = made.hidden(*tokens)[0].double()
    exact = {
        "cls": states[0],
        "max": states.amax(0),
        "mean": states.sum(0) / 5,
        "mean_sqrt_len": states.sum(0) / math.sqrt(5),
    }
    assert_near(made.embed("a b c")[0].double(), exact[mode])
    for other, wanted in exact.items():
        chosen: Any = other
        assert_near(made.pool(states[None], tokens.positions, mode=chosen)[0], wanted)
        assert_near(
            made.pool(states[None], tokens.positions, mode=chosen, normalize=True)[0],
            wanted / wanted.norm(),
        )
    wrong: Any = "median"
    with pytest.raises(regard.ArgumentError, match="mode is 'median'"):
        made.pool(states[None], mode=wrong)


def test_what_is_too_long(model: TextEncoder, network: HeadedEncoder) -> None:
    """Refused, or without its end; what the tokenizer puts behind a text stays."""
    long = "a b c d e f g h a b"
    with pytest.raises(regard.ArgumentError, match="text 1 has 12 tokens, and this model reads"):
        model.embed(["a", long])
    ids = model.encode(["a", long], truncate=True).ids
    assert ids[1].tolist() == [2, *range(4, 12), 3]
    assert torch.equal(model.embed(long, truncate=True), model.embed("a b c d e f g h"))
    with pytest.raises(regard.ArgumentError, match="text 0 has 12 tokens, and this model reads"):
        model.encode("a b c d e", "f g h a", truncate=True)
    tiny = TextEncoder(network, tokenizer(), CONFIG, max_seq_length=1)
    with pytest.raises(regard.ArgumentError, match="max_seq_length is 1, less than the number"):
        tiny.encode("a", truncate=True)
    free = TextEncoder(network, tokenizer(), CONFIG)
    with pytest.raises(regard.ArgumentError, match="position 11 has no vector"):
        free.embed(long)


def test_errors(model: TextEncoder) -> None:
    texts: Any = ["a", 3]
    cases = [
        (lambda: model.encode([]), regard.ArgumentError, "texts is empty; give at least one text"),
        (lambda: model.embed(()), regard.ArgumentError, "texts is empty; give at least one text"),
        (lambda: model.encode(texts), regard.ArgumentTypeError, "texts[1] is int; it must be str"),
        (lambda: model.encode("a", texts), regard.ArgumentTypeError, "seconds[1] is int; it must"),
        (lambda: model.encode(["a", "b"], ["c"]), regard.ArgumentError, "2 texts and 1 second"),
        (lambda: model.embed("a", batch_size=0), regard.ArgumentError, "batch_size is 0; it must"),
        (lambda: model.hidden(torch.tensor([[12]])), regard.ArgumentError, "token id 12 at [0, 0]"),
    ]
    for make, kind, message in cases:
        with pytest.raises(kind) as error:
            make()
        assert str(error.value).startswith(message)
    assert model.hidden(torch.tensor([[4, 99]]), torch.tensor([[0, -1]])).shape == (1, 2, 12)


def test_a_folder_of_sentences(network: HeadedEncoder, tmp_path: Path) -> None:
    """What regard.load makes of it; and of one without its tokenizer."""
    save(network, CONFIG, tmp_path)
    bare = regard.load(tmp_path)
    assert isinstance(bare, TextEncoder)
    assert bare.pooling == Pooling()
    assert bare.max_seq_length == 10
    with pytest.raises(FileError, match="this model has no tokenizer: its folder holds no"):
        bare.embed("a")
    tokenizer().save(tmp_path)
    modules = [
        {"type": f"sentence_transformers.models.{k}", "path": p}
        for k, p in (("Transformer", ""), ("Pooling", "1_Pooling"))
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules), "utf-8")
    (tmp_path / "1_Pooling").mkdir()
    said = {"word_embedding_dimension": 12, "pooling_mode_cls_token": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said), "utf-8")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 6}', "utf-8")
    made = regard.load(tmp_path, kind=TextEncoder)
    assert made.pooling == Pooling("cls", normalize=False)
    assert made.max_seq_length == 6
    assert_near(made.embed("a b")[0], network(torch.tensor([[2, 4, 5, 3]]))[0, 0])
    with pytest.raises(regard.ArgumentError, match="has 8 tokens, and this model reads at most 6"):
        made.embed(TEXTS)


@pytest.mark.parametrize("packed", [True, False])
def test_the_settings_of_a_folder_shape_its_vectors(
    network: HeadedEncoder, tmp_path: Path, packed: bool
) -> None:
    """Prompts, tokens that do not count, dimensions that are left out, and small letters, against
    states that are pooled by hand; sentence-transformers 6.2 gave the same on such folders.
    """
    pooling = Pooling("mean", include_prompt=False, truncate_dim=5)
    prompts = {"q": "a b ", "other": "h "}
    made = TextEncoder(
        network, tokenizer(), CONFIG, pooling=pooling, prompts=prompts, default_prompt_name="q"
    )
    folder = made.save(tmp_path / "model")
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    loaded = regard.load(folder, kind=TextEncoder)
    if not packed:
        loaded.network.register_forward_hook(lambda *_: None)
    assert (loaded.why_not_packed() is None) == packed

    def by_hand(ids: list[int], skipped: int) -> torch.Tensor:
        states = network(torch.tensor([[2, *ids, 3]]))[0]
        mean = states[skipped:].mean(0)
        return (mean / mean.norm())[:5]

    wanted = torch.stack([by_hand([4, 5, 6, 7], 3), by_hand([4, 5, 8], 3)])
    found = loaded.embed(["C d", "E"])
    assert_near(found, wanted)
    assert_near(loaded.embed(["C d", "E"], normalize=True), wanted / wanted.norm(dim=1)[:, None])
    other = by_hand([11, 6, 7], 2)
    assert_near(loaded.embed("c d", prompt_name="other")[0], other)
    for wrong in (by_hand([4, 5, 6, 7], 0), by_hand([6, 7], 0), by_hand([4, 5, 1, 7], 3)):
        assert float((found[0] - wrong).abs().max()) > 1e-3, "control: a setting that is ignored"
    with pytest.raises(regard.ArgumentError, match=r"prompt_name is 'othr'.*other"):
        loaded.embed("c d", prompt_name="othr")


@pytest.mark.parametrize("kind", [Model, Seq2Seq])
def test_who_can_use_another_kind_only(kind: Any, network: HeadedEncoder, tmp_path: Path) -> None:
    save(network, CONFIG, tmp_path)
    with pytest.raises(
        FileError,
        match="model_type bert is an architecture of kind 'encoder', which loads as a "
        f"TextEncoder, and a {kind.__name__} is needed here",
    ):
        regard.load(tmp_path, kind=kind)
    with pytest.raises(FileError, match="model_type llama is an architecture of kind 'decoder'"):
        regard.load("tiny", kind=TextEncoder)


def test_missing_weights_are_named(network: HeadedEncoder, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(network, CONFIG, tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {n: x for n, x in load_file(file).items() if "output.dense.bias" not in n}
    save_file(kept, file)
    made = regard.load(tmp_path, kind=TextEncoder, allow_missing=["*output.dense.bias"])
    assert len(made.newly_initialized) == 4
    assert "bert.encoder.layer.0.output.dense.bias" in made.newly_initialized
