"""One row of a recording of any module, explained: every number against fp64 arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError
from regard.inspect import Recording, explain, record, report
from regard.view.explanation_text import page as text_page
from regard.view.page import report_page

WORDS, FRAMES = [f"word{i}" for i in range(6)], [f"frame{i}" for i in range(9)]
CROSS = "decoder.layers.0.multihead_attn"
CAUSAL = "decoder.layers.0.self_attn"


@pytest.fixture(scope="module")
def model() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(16, 4, 1, 1, 32, batch_first=True).eval()


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 9, 16), torch.randn(2, 6, 16)


@pytest.fixture(scope="module")
def recording(model: nn.Transformer, inputs: tuple[Tensor, Tensor]) -> Recording:
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.arange(9) >= torch.tensor([9, 7])[:, None]
    given = {"tgt_mask": mask, "memory_key_padding_mask": padding}
    return record(model, *inputs, **given, labels=(WORDS, FRAMES))


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("place", [CROSS, CAUSAL])
def test_the_five_steps_have_the_numbers_of_the_definition(
    recording: Recording, place: str, batch: int
) -> None:
    row = explain(recording, place=place, head=2, query=3, batch=batch)
    at = recording[place].steps[0]
    q, k = at.q[batch, 2, 3].double(), recording[place].k[batch, 2].double()
    v = recording[place].values(at)
    assert v is not None
    dot = k @ q
    visible = torch.arange(len(k)) <= 3 if place == CAUSAL else torch.arange(9) < 9 - 2 * batch
    scores = (dot / math.sqrt(4)).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(0)
    z = weights @ v[batch, 2].double()
    assert [step.name for step in row.scores] == ["dot", "scaled", "masked"]
    for got, want in (
        (row.scores[0].values, dot),
        (row.scores[1].values, dot / 2),
        (row.weights, weights),
        (row.mixed, z),
    ):
        assert (torch.from_numpy(got) - want).abs().max() < 1e-9
    assert abs(row.lse - float(scores.logsumexp(0))) < 1e-9
    assert row.check < 1e-5
    assert [bool(reason) for reason in row.masked] == (~visible).tolist()
    if place == CAUSAL and batch == 0:
        assert set(row.masked[4:]) == {"future"}
    assert row.out.size == 0  # the projections around it are not recorded
    text = "\n".join(line.plain for line in text_page(row.as_dict()))
    assert "output projection" not in text


def test_queries_and_keys_by_label(recording: Recording) -> None:
    row = explain(recording, place=CROSS, query="word3", key="frame5")
    assert (row.query, row.key, row.query_piece) == (3, 5, "word3")
    assert row.pieces == tuple(FRAMES)
    assert row.row_pieces == tuple(WORDS)
    strongest = explain(recording, place=CROSS, query="word3")
    assert strongest.key == int(recording.row(CROSS, 0, 3).argmax())
    assert strongest.key_chosen_by == "the key with the largest weight"


def test_a_module_is_recorded_and_explained(
    model: nn.Transformer, inputs: tuple[Tensor, Tensor]
) -> None:
    source, target = inputs
    row = explain(model, (source, target), place=CROSS, head=1, query=-1, labels=(WORDS, FRAMES))
    assert row.mechanism == "MultiheadAttention"
    assert row.query_piece == "word5"
    same = explain(model, {"src": source, "tgt": target}, layer=-1, head=1)
    assert same.place == CROSS
    assert (torch.from_numpy(same.weights - row.weights)).abs().max() == 0


def test_a_bias_is_a_step() -> None:
    class Biased(nn.Module):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)

    torch.manual_seed(2)
    x, bias = torch.randn(2, 2, 5, 4), torch.randn(2, 1, 5, 5)
    for batch in (0, 1):
        row = explain(Biased(), (x, bias), query=4, batch=batch)
        assert [step.name for step in row.scores] == ["dot", "scaled", "biased", "masked"]
        added = row.scores[2].values - row.scores[1].values
        assert (torch.from_numpy(added) - bias[batch, 0, 4].double()).abs().max() < 1e-6
        assert row.check < 1e-5


def test_a_page_holds_the_labels_and_the_explanation(recording: Recording) -> None:
    row = explain(recording, place=CROSS, head=2, query="word3")
    data = report(recording, choice=(CROSS, 2), query=3, explanation=row.as_dict())
    html = report_page(data)
    assert "frame5" in html
    assert data["meta"]["texts"] == [FRAMES, WORDS]
    assert data["meta"]["start"]["j"] == row.key


@pytest.mark.parametrize(
    "options, message",
    [
        ({"place": "decoder"}, "'decoder' was not recorded; recorded: encoder.layers.0.self_attn"),
        ({"place": CROSS, "head": 4}, "head is 4; there are 4 heads"),
        ({"place": CROSS, "query": 6}, "query is 6; there are 6 queries"),
        ({"place": CROSS, "query": "frame1"}, "query is 'frame1', which is no label; the labels"),
        ({"place": CROSS, "batch": 2}, "batch is 2; there are 2 batch rows"),
        ({"call": 1}, "call does not apply to a Recording; leave it out"),
        ({"labels": WORDS}, "text and labels do not apply to a Recording"),
    ],
)
def test_what_does_not_exist_is_refused(
    recording: Recording, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError) as error:
        explain(recording, **options)
    assert message in str(error.value)


def test_a_part_of_a_recording_is_refused(
    model: nn.Transformer, inputs: tuple[Tensor, Tensor]
) -> None:
    part = record(model, *inputs, heads=[1], rows=1, keep=())
    with pytest.raises(ArgumentError, match="recorded without all heads, all rows, v, out, which"):
        explain(part)
    with regard.Trace(edit={"encoder.layers.0.self_attn.pattern": torch.clone}):
        edited = record(model, *inputs)
    with pytest.raises(ArgumentError, match=r"pattern of encoder\.layers\.0\.self_attn were edit"):
        explain(edited)
    for options in ({"labels": WORDS}, {"batch": 1}):
        with pytest.raises(ArgumentError, match="does not apply to a Model; leave it out"):
            explain(regard.load("tiny"), "to be", **options)  # type: ignore[arg-type]
