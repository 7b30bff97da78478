"""The examples that the notes give, shown; docs/seeds.md lists where each note has them."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.inspect import explain
from regard.models.text_encoder import TextEncoder
from regard.nn.variants import mha
from regard.positions import sinusoidal
from regard.timing import torch_threads
from regard.train import Settings, fit
from regard.train.losses import Seq2SeqLoss
from regard.train.tasks import Example
from regard.train.tasks.evaluate import alignment, answer_examples
from regard.train.tasks.task import Task, TaskBatches, Vocabulary
from regard.train.tasks.task_training import Recipe, build
from tests.models.small import named_model

# --- "The cat is on the mat.", and where a translation looks at "mat"

THINGS = {"cat": "猫", "mat": "垫子", "dog": "狗", "box": "箱子", "bird": "鸟", "bed": "床"}
PLACES = {"on": "上", "under": "下", "behind": "后"}


def sentence(first: str, place: str, second: str) -> Example:
    """ "the cat is on the mat ." -> 猫 在 垫子 上 。: the place changes sides with the thing."""
    source = ("the", first, "is", place, "the", second, ".")
    return Example(source, (THINGS[first], "在", THINGS[second], PLACES[place], "。"))


def _draw(random: Random, _: int) -> Example:
    first, second = random.sample(list(THINGS), 2)
    return sentence(first, random.choice(list(PLACES)), second)


WORDS = ("the", "is", ".", *THINGS, *PLACES, "在", "。", *THINGS.values(), *PLACES.values())
SENTENCES = Task(
    name="places",
    description="Where things are, in English and Chinese",
    reference="after seed note 1",
    kind="seq2seq",
    vocabulary=Vocabulary(WORDS),
    draw=_draw,
    lengths=(7, 7, 8),
)


@pytest.mark.full
def test_a_translation_looks_at_the_source_word_and_its_neighbours() -> None:
    asked = sentence("cat", "on", "mat")
    every = [sentence(a, p, b) for a in THINGS for b in THINGS if a != b for p in PLACES]
    given = [one for one in every if one.source != asked.source]
    torch.manual_seed(0)
    model = build(SENTENCES, "lstm+bahdanau", Recipe(dim=16, hidden=24, layers=1))
    settings = Settings(steps=120, lr=0.02, warmup=10, weight_decay=0.0)
    with torch_threads(1):  # a second one costs products as small as these more than it gives
        fit(
            model,
            TaskBatches(SENTENCES, batch=16, examples=given),
            settings,
            loss=Seq2SeqLoss(0.05),
        )
    (said,) = answer_examples(model.eval(), SENTENCES, [asked])
    assert said.correct, "the sentence itself was not trained on"
    found = alignment(model, SENTENCES, said)
    assert found is not None
    at = dict(zip(said.predicted, found.weights, strict=False))[
        "垫子"
    ]  # over: the cat is on the mat .
    assert int(at.argmax()) in (4, 5, 6), "mat, or the states right beside it"
    assert float(at[3:].sum()) > 0.8, "on the mat"


# --- pieces of words


def test_a_word_is_cut_into_pieces_that_join_to_it() -> None:
    tiny = regard.load("tiny")
    pieces = [tiny.tokenizer.decode([i]) for i in tiny.encode("unhappiness")[0].tolist()]
    assert pieces == ["un", "h", "a", "pp", "ine", "ss"], (
        "a vocabulary of 1024 knows no 'happiness'"
    )
    assert "".join(pieces) == "unhappiness"


# --- positions, because order matters


def middle(words: list[str], *, positions: bool) -> Tensor:
    """What attention without a mask makes of "hit", which stands in the middle."""
    names = ["I", "hit", "him"]
    table = torch.randn(3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(1)
    layer = mha(16, 2).double()
    x = torch.stack([table[names.index(word)] for word in words])
    if positions:
        x = x + sinusoidal(3, 16).double()
    with torch.no_grad():
        return layer(x[None])[0, 1]


def test_without_positions_i_hit_him_is_he_hits_me() -> None:
    order, other = ["I", "hit", "him"], ["him", "hit", "I"]
    blind = (middle(order, positions=False) - middle(other, positions=False)).abs().max()
    told = (middle(order, positions=True) - middle(other, positions=True)).abs().max()
    assert float(blind) < 1e-15
    assert float(told) > 0.01


# --- "a fluffy blue creature"


def test_creature_reads_fluffy() -> None:
    """Layer 0, head 1 of the sentence model: scores, weights, and what is mixed into "creature"."""
    model = named_model("minilm", TextEncoder)
    found = explain(
        model, "a fluffy blue creature", layer=0, head=1, query="creature", key="fluffy"
    )
    at = {piece: j for j, piece in enumerate(found.pieces)}
    p = {piece: float(found.weights[j]) for piece, j in at.items()}
    assert p["fluffy"] == pytest.approx(0.517, abs=5e-4) == max(p.values())
    assert p["a"] == pytest.approx(0.023, abs=5e-4)
    assert p["blue"] == pytest.approx(0.005, abs=5e-4), "this head does not read both adjectives"
    assert float(found.weights.sum()) == pytest.approx(1, abs=1e-12)
    scores = found.scores[-1].values
    assert scores[at["fluffy"]] - scores[at["a"]] == pytest.approx(
        torch.tensor(p["fluffy"] / p["a"]).log().item(), abs=1e-6
    )
    sizes = [float(torch.tensor(row).norm()) for row in found.contributions]
    assert max(sizes) == sizes[at["fluffy"]], "most of what is mixed in comes from fluffy"
    assert found.check < 1e-5


# --- LayerNorm with a bias


def test_layer_norm_by_hand() -> None:
    """y = (x - mean) / sqrt(var + eps) * weight + bias, over the last axis, with the variance of n,
    not of n - 1.
    """
    norm = nn.LayerNorm(4, bias=True).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        norm.bias.copy_(torch.tensor([0.5, 0.0, -0.5, 1.0]))
    x = [3.0, -1.0, 2.0, 8.0]
    mean = sum(x) / 4  # 3
    variance = sum((a - mean) ** 2 for a in x) / 4  # (0 + 16 + 1 + 25) / 4 = 10.5
    wanted = [
        (a - mean) / (variance + 1e-5) ** 0.5 * w + b
        for a, w, b in zip(x, (1, 2, 3, 4), (0.5, 0.0, -0.5, 1.0), strict=True)
    ]
    got = norm(torch.tensor([x], dtype=torch.float64))[0]
    assert got.tolist() == pytest.approx(wanted, rel=1e-14)
    assert got[0].item() == 0.5, "what is at the mean gives the bias"
