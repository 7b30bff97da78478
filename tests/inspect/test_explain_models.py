"""Explanations of encoders, of encoder-decoders, of trained tasks, of a really trained BERT, and of
long texts.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import Trace
from regard.cli.explain import read_text
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import explain
from regard.inspect.explain.captured_run import record_run
from regard.inspect.explain.explanation_parts import QUERIES_PER_CHUNK
from regard.inspect.model_run import PretokenizedInput, prepare_run
from regard.inspect.record.recorded_place import Place
from regard.inspect.report import report
from regard.models import recurrent
from regard.models.families import family
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from tests.inspect.small_model import TEXT, model, tokenizer
from tests.models.small import named_model

bert = family("bert")
t5 = family("t5")


def wild(network: Any, seed: int = 0) -> Any:
    """Weights large enough that patterns are not uniform."""
    make = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=1.2 * parameter.shape[-1] ** -0.5, generator=make)
    return network.eval().requires_grad_(requires_grad=False)


def encoder() -> TextEncoder:
    config = bert.config(tokenizer().vocab_size, 16, 2, 4, 32, 64)
    return TextEncoder(wild(bert.build(config)), tokenizer(), config, max_seq_length=64)


def seq2seq() -> Seq2Seq:
    config = t5.config(tokenizer().vocab_size, 16, 4, 32, 2, 4)
    return Seq2Seq(wild(t5.build(config)), tokenizer(), config, start=0, eos_ids=[1])


def alignment(attention: str) -> PretokenizedInput:
    """Three tokens of an answer to four of a source."""
    network = wild(recurrent(20, 8, 12, attention=attention))
    source, target = ((3, 4, 5, 2), tuple("abc.")), ((1, 7, 8), ("<bos>", "x", "y"))
    return PretokenizedInput(network, source, target)


def test_an_encoder_looks_both_ways() -> None:
    m = encoder()
    found = explain(m, TEXT, layer=1, head=2, query="blue", key=-1)
    tokens = m.encode(TEXT)
    with Trace("pattern") as trace:
        m.hidden(*tokens)
    pattern = trace["layers.1.pattern"][0, 2]
    assert found.weights == pytest.approx(pattern[found.query].tolist(), abs=1e-6)
    assert found.weights[found.key] > 0
    assert found.key == len(found.pieces) - 1 > found.query
    assert set(found.masked) == {""}
    assert found.pattern == pytest.approx(pattern.double().numpy(), abs=1e-6)
    assert found.predictions == ()
    assert found.check < 1e-5


def test_every_attention_of_an_encoder_decoder_has_its_place() -> None:
    m = seq2seq()
    read = prepare_run(m, TEXT, "the forest")
    parts = [f"decoder.layers.{i}.{part}" for i in (0, 1) for part in ("attention", "cross")]
    assert [site.place for site in read.sites] == ["encoder.layers.0", "encoder.layers.1", *parts]
    source, target = read.sequences["source"], read.sequences["target"]
    with torch.inference_mode(), Trace("pattern") as trace:
        read.call()
    for site in read.sites:
        found = explain(m, TEXT, place=site.place, head=1, query=1, target="the forest")
        expected = trace[f"{site.place}.pattern"][0, 1, 1]
        assert found.weights == pytest.approx(expected.tolist(), abs=1e-6), site.place
        assert found.pieces == read.sequences[site.key_sequence].pieces
        assert found.query_piece == read.sequences[site.query_sequence].pieces[1]
        assert found.check < 1e-4
        assert bool(found.predictions) == (site.query_sequence == "target")
    assert explain(m, TEXT, layer=1, target="the forest").place == "decoder.layers.1.cross"
    assert len(target.ids) == 1 + len(m.tokenizer.encode("the forest"))
    assert len(source.ids) == len(m.encode(TEXT)[0][0])


@pytest.mark.full
def test_the_recording_of_a_reading_has_what_is_explained() -> None:
    """Of every kind of network: the same weights, under the names of both texts, as plain data of a
    page.
    """
    for each in (
        prepare_run(model(), TEXT),
        prepare_run(encoder(), TEXT),
        prepare_run(seq2seq(), TEXT, "the forest"),
        prepare_run(alignment("luong")),
    ):
        recording = record_run(each)
        assert recording.sound
        for site in each.sites:
            found = explain(each, place=site.place, query=1)
            row = recording.row(site.place, found.head, 1)
            assert found.weights == pytest.approx(row.tolist(), abs=1e-6)
            rows, columns = recording.labels(site.place)
            if site.place != "decoder":
                assert rows == each.sequences[site.query_sequence].pieces
                assert columns == each.sequences[site.key_sequence].pieces
            at = list(recording.places).index(site.place)
            data = report(recording, choice=(at, found.head), query=1, explanation=found.as_dict())
            assert data["meta"]["explanation"]["place"] == data["meta"]["places"][at]["name"]


def test_an_encoder_decoder_is_asked_for_its_answer() -> None:
    m = seq2seq()
    m.ends = frozenset(range(1, m.config.vocab_size, 3))  # it ends soon
    said = [x for x in m.beam_search(*m.encode(TEXT), max_tokens=64)[0][0].ids if x not in m.ends]
    assert list(prepare_run(m, TEXT).sequences["target"].ids) == [0, *said]


@pytest.mark.parametrize("attention", ["bahdanau", "luong"])
def test_alignments_of_recurrent_decoders_are_those_of_the_taps(attention: str) -> None:
    words = alignment(attention)
    with torch.inference_mode(), Trace("pattern") as trace:
        words.network(torch.tensor([[3, 4, 5, 2]]), torch.tensor([[1, 7, 8]]))
    rows = torch.cat(trace.every("decoder.pattern"), 2)[0, 0]
    for i in range(3):
        found = explain(words, query=i)
        assert found.weights == pytest.approx(rows[i].tolist(), abs=1e-6)
        assert found.kind == ("additive" if attention == "bahdanau" else "softmax")
        assert found.pieces == ("a", "b", "c", ".")
        assert found.k[-1].name == "projected"
        assert found.check < 1e-5
    assert explain(words, query="y", key="b").key == 1
    assert rows[0].tolist() != rows[2].tolist(), "negative control: the rows differ"


def test_a_network_without_attention_is_refused() -> None:
    plain = PretokenizedInput(recurrent(20, 8, 12), ((3,), ("a",)), ((1,), ("<bos>",)), name="gru")
    with pytest.raises(ArgumentError, match="gru has no attention; there is nothing to explain"):
        explain(plain)
    with pytest.raises(ArgumentError, match="row has no attention"):
        explain(PretokenizedInput(torch.nn.Linear(2, 2), ((3,), ("a",)), name="row"))
    with pytest.raises(ArgumentTypeError, match="text is NoneType; it must be str"):
        explain(model())


@pytest.mark.full(keep=2)
@pytest.mark.parametrize(
    ("task", "name", "text", "place"),
    [
        ("translate", "transformer", "forty two, seven", "decoder.layers.0.cross"),
        ("translate", "lstm+bahdanau", "forty two", "decoder"),
        ("copy", "gru+luong", "a b c", "decoder"),
        ("induction", "decoder", None, "layers.0"),
    ],
)
def test_a_trained_task_is_explained_in_its_own_words(
    task: str, name: str, text: str | None, place: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_model

    from regard.train.tasks import find_task
    from regard.train.tasks.task_training import build, recipe

    known = find_task(task)
    sizes = recipe(known, name).with_overrides({"dim": 16, "hidden": 16, "layers": 1})
    save_model(wild(build(known, name, sizes)), str(tmp_path / "model.safetensors"))
    held = {"task": task, "model": name, "sizes": vars(sizes) | {"set": []}}
    (tmp_path / "task.json").write_text(json.dumps(held))
    example = known.examples("validation", 1)[0].source
    text = known.source_separator.join(example) if text is None else text
    found = explain(read_text(text, str(tmp_path)), query=0)
    assert found.place == place
    assert found.model == tmp_path.name
    assert found.pieces[:2] == known.tokenize(text)[:2]
    assert found.weights.sum() == pytest.approx(1)
    assert found.predictions[0][0] in (*known.vocabulary.words, "<eos>", "<pad>", "<bos>")
    if known.kind == "seq2seq":
        assert found.pieces[-1] == "<eos>"
        assert found.query_piece == "<bos>"
        target = known.target_separator.join(known.vocabulary.words[-2:])
        said = explain(read_text(text, str(tmp_path), target=target), query=-1)
        assert said.query_piece == known.vocabulary.words[-1]


@pytest.mark.full
def test_a_long_text_needs_no_matrix_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 tokens: no block of scores is larger than some rows of them; the row equals a softmax of
    the recorded q and k.
    """
    largest, honest = [0], Place.score_inputs

    def counted(self: Place, step: Any, own: slice, slots: Any, heads: Any, **rest: Any) -> Any:
        largest[0] = max(largest[0], (own.stop - own.start) * len(heads))
        return honest(self, step, own, slots, heads, **rest)

    monkeypatch.setattr(Place, "score_inputs", counted)
    m = model(max_position_embeddings=8192)
    text = "".join("ab"[(n * n) % 7 % 2] for n in range(4096))
    found = explain(m, text, layer=1, head=1, query=4000, key=17)
    assert found.sizes["T"] >= 2048
    assert largest[0] <= QUERIES_PER_CHUNK
    assert found.pattern.size == 0
    assert found.patterns.shape[1] <= 32
    assert found.check < 1e-4
    i, q, k = found.query, found.q[-1].values, found.k[-1].values
    s = [float(q @ k[j]) / math.sqrt(8) for j in range(i + 1)]
    e = [math.exp(x - max(s)) for x in s]
    assert found.weights[: i + 1] == pytest.approx([x / sum(e) for x in e], rel=1e-4, abs=1e-12)
    assert found.weights[i + 1 :].tolist() == [0.0] * (len(k) - i - 1)
    assert len(found.online) <= 16
    picture = found.patterns[1]
    assert np.nanmax(picture[i // found.pool]) >= found.weights.max() - 1e-6


def trained() -> TextEncoder:
    return named_model("minilm", TextEncoder)


def test_a_decoder_in_half_precision_is_told_so() -> None:
    m = model()
    m.decoder.to(torch.bfloat16)
    found = explain(m, TEXT, layer=0, head=0)
    assert found.dtype == "bfloat16"
    assert found.checks["weights against exp(s - lse) of the kernel"] < 1e-4
    assert found.checks["output of the kernel"] < 0.02 * np.abs(found.v).max()


def test_a_notebook_shows_the_page_as_inert_text() -> None:
    found = explain(model(), TEXT, layer=1, head=0)
    hostile = replace(found.where, model="<script>alert(1)</script>")
    shown = replace(found, where=hostile)._repr_html_()
    assert shown.startswith("<pre")
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "the same q and k under other mechanisms" in shown


def test_a_trained_encoder_finds_what_a_pronoun_means() -> None:
    """Layer 3, head 1 of MiniLM: "it" looks at the animal, "she" at the woman; the first head of
    the first layer does not.
    """
    m = trained()
    for text, pronoun, meant, other in (
        ("The animal did not cross the street because it was too tired.", "it", "animal", "street"),
        ("Anna lost her keys because she was in a hurry.", "she", "Anna", "keys"),
    ):
        found = explain(m, text, layer=3, head=1, query=pronoun, key=meant)
        weights = dict(zip(found.pieces, found.weights, strict=True))
        assert found.weights[found.key] == found.weights.max() > 0.5
        assert weights[meant.lower()] > 5 * weights[other]
        plain = explain(m, text, layer=0, head=0, query=pronoun, key=meant)
        assert plain.weights[plain.key] < 0.5
