"""An encoder-decoder as it is held: a text in, a text out; alone, in batches, with beams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from torch import Tensor

import regard
from regard.cli.app import run
from regard.errors import FileError
from regard.models import EncoderDecoder, Seq2Seq
from regard.models.families import family
from regard.models.save import save
from regard.models.tokenizer import Tokenizer

t5 = family("t5")

WORDS = ["<pad>", "</s>", "<unk>", *"abcdefgh"]
CONFIG = t5.config(
    len(WORDS),
    12,
    5,
    16,
    2,
    3,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
)
TEXTS = ["a b c", "d", "e f g h a b"]


def tokenizer(template: str = "$A </s>") -> Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single=template, pair="$A $B", special_tokens=[("</s>", 1)]
    )
    made.add_special_tokens(WORDS[:3])
    return Tokenizer(made)


@pytest.fixture(scope="module")
def network() -> EncoderDecoder:
    """Random, so that it says something; the end is made likely enough to be reached."""
    torch.manual_seed(5)
    made = t5.build(CONFIG).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.fixture
def model(network: EncoderDecoder) -> Seq2Seq:
    return Seq2Seq(network, tokenizer(), CONFIG, start=0, eos_ids=[1])


def by_hand(model: Seq2Seq, text: str, limit: int) -> list[int]:
    """The likeliest token at each step, every time from the whole target, without a cache."""
    ids, said = model.encode(text)[0], [model.start]
    while len(said) <= limit:
        token = int(model(ids, torch.tensor([said]))[0, -1].argmax())
        if token in model.eos_ids:
            break
        said.append(token)
    return said[1:]


@pytest.mark.full
def test_one_beam_is_the_likeliest_token_at_each_step(model: Seq2Seq) -> None:
    """In a batch of other lengths, too; from caches; up to the end or the limit."""
    found = model.beam_search(*model.encode(TEXTS), max_tokens=9)
    for row, text in zip(found, TEXTS, strict=True):
        exact = by_hand(model, text, 9)
        assert list(row[0].ids) == exact
        assert row[0].ended == (len(exact) < 9)
        assert list(model.beam_search(model.encode(text)[0], max_tokens=9)[0][0].ids) == exact
    texts = model.generate(TEXTS, max_tokens=9)
    assert texts == [model.generate(text, max_tokens=9) for text in TEXTS]
    assert texts == [model.tokenizer.decode(by_hand(model, t, 9), skip_special=True) for t in TEXTS]
    assert len(set(texts)) > 1, "what is said depends on the text"


@pytest.mark.full
def test_more_beams_find_likelier_texts(model: Seq2Seq) -> None:
    """Scores are those of the definition, from whole passes; more beams are never worse here."""
    for text in TEXTS:
        ids = model.encode(text)[0]
        best = []
        for beams in (1, 2, 5):
            found = model.beam_search(ids, max_tokens=5, beams=beams, length_penalty=0.0)[0]
            assert len(found) <= beams
            assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
            for x in found:
                target = [model.start, *x.ids, *[1] * x.ended]
                log_p = model(ids, torch.tensor([target[:-1]])).double().log_softmax(-1)
                exact = sum(float(log_p[0, i, token]) for i, token in enumerate(target[1:]))
                assert abs(x.score - exact) < 1e-5 * abs(exact)
            best.append(found[0].score)
        assert best[2] >= best[0] - 1e-6
        said = model.generate(text, max_tokens=5, beams=5, length_penalty=0.0)
        assert said == model.tokenizer.decode(found[0].ids, skip_special=True)


def test_padding_on_the_left_is_the_same(model: Seq2Seq) -> None:
    ids, positions = model.encode(TEXTS)
    turned, at = torch.full_like(ids, 500), torch.full_like(ids, -1)
    for row, where in enumerate(positions):
        n = int((where >= 0).sum())
        turned[row, -n:], at[row, -n:] = ids[row, :n], torch.arange(n)
    found, other = (
        model.beam_search(*given, max_tokens=6, beams=3)
        for given in ((ids, positions), (turned, at))
    )
    assert [[x.ids for x in row] for row in found] == [[x.ids for x in row] for row in other]


def test_ids_of_texts(model: Seq2Seq) -> None:
    ids, positions = model.encode(["a b", "c"])
    assert ids.tolist() == [[3, 4, 1], [5, 1, 0]]
    assert positions.tolist() == [[0, 1, 2], [0, 1, -1]]


def test_a_source_that_is_not_read_is_found(model: Seq2Seq) -> None:
    """Negative control: cross-attention that reads another source gives another answer."""
    ids = model.encode(TEXTS[0])[0]
    other = ids.flip(1).roll(1)
    target = torch.tensor([[0, 3, 4]])
    assert float((model(ids, target) - model(other, target)).abs().max()) > 0.01


def test_folders(network: EncoderDecoder, tmp_path: Path) -> None:
    """What regard.load makes of one: start and end from config.json, or what they are by
    default.
    """
    save(network, CONFIG, tmp_path)
    bare = regard.load(tmp_path)
    assert isinstance(bare, Seq2Seq)
    assert (bare.start, bare.eos_ids) == (0, frozenset({1}))
    assert len(bare.beam_search(torch.tensor([[3, 4, 1]]), max_tokens=2)[0][0].ids) <= 2
    with pytest.raises(FileError, match="this model has no tokenizer"):
        bare.generate("a")
    tokenizer().save(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text("utf-8")
    assert '"decoder_start_token_id": null' in text
    changed = text.replace('"decoder_start_token_id": null', '"decoder_start_token_id": 4')
    file.write_text(changed.replace('  "eos_token_id": 1,\n', ""), "utf-8")
    made = regard.load(tmp_path, kind=Seq2Seq)
    assert (made.start, made.eos_ids) == (4, frozenset({1}))
    assert isinstance(made.generate("a b", max_tokens=3), str)


def test_the_command_reads_it_by_beams_and_refuses_what_only_a_decoder_has(
    network: EncoderDecoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(network, CONFIG, tmp_path)
    tokenizer().save(tmp_path)
    command = ["generate", "a b", "d", "--model", str(tmp_path), "--max-tokens", "3"]
    assert run([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in told["rows"]] == regard.load(tmp_path).generate(
        ["a b", "d"], max_tokens=3
    )
    for options, said in (
        (["--temperature", "0.5"], "takes no sampler"),
        (["--cuda-graph"], "captures the step of a decoder"),
        (["--speculate", "lookup"], "propose tokens to a decoder"),
    ):
        assert run([*command, *options]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_errors(model: Seq2Seq, network: EncoderDecoder) -> None:
    bare = Seq2Seq(network, tokenizer("$A"), CONFIG, start=0, eos_ids=[1])
    ids = torch.tensor([[3, 4, 1]])
    cases: list[tuple[Any, str]] = [
        (lambda: model.generate([]), "texts is empty; give at least one text"),
        (lambda: bare.generate(["a", ""]), "text 1 has no tokens; give at least one character"),
        (lambda: model.beam_search(ids, max_tokens=0), "limit is 0; it must be at least 1"),
        (lambda: model.beam_search(ids, beams=0), "beams is 0; it must be at least 1"),
        (lambda: model.beam_search(torch.tensor([[11]])), "token id 11 at [0, 0] lies outside [0,"),
        (lambda: model(ids, torch.tensor([[0, -3]])), "token id -3 at [0, 1] lies outside [0,"),
    ]
    for make, message in cases:
        with pytest.raises(regard.ArgumentError) as error:
            make()
        assert str(error.value).startswith(message)


@pytest.mark.full
def test_it_can_be_trained() -> None:
    """A released start, and a few steps: the loss of a pair falls to nearly nothing; the shared
    tables move.
    """
    torch.manual_seed(3)
    network = t5.build(CONFIG)
    source, target = (
        torch.tensor([[3, 4, 5, 1], [6, 7, 8, 1]]),
        torch.tensor([[0, 8, 9, 1], [0, 10, 3, 1]]),
    )
    table = network.layers[0].attention.bias_tensors[0]
    before = table.detach().clone()
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    losses = []
    for _ in range(40):
        logits: Tensor = network(source, target[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1
    assert losses[-1] < 0.05
    assert not torch.equal(table, before)
