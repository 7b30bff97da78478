"""One layer stage by stage: every number by loops, the notes' own scores through it, and what
cannot be shown.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import explain
from regard.inspect.explain.layer_stages import (
    MAX_SCORES,
    LayerStages,
    run_block_stages,
    run_layers,
    run_stages,
    summarize_layer,
)
from regard.masks import Causal
from regard.nn import Attention
from regard.nn.variants import cross_attention, mha
from regard.view.explanation_text import page
from regard.view.layer_text import sections, table, text
from tests.golden import DATA, difference, tensor
from tests.inspect.small_model import TEXT, model

RUN = DATA["run"]
NAMES = ["q", "k", "v", "scores", "masked", "weights", "z", "out", "block"]


def noted() -> tuple[Attention, Tensor]:
    """A layer of the notes' sizes, and four tokens on which its scores are those that the note
    prints.
    """
    raw = tensor(RUN["raw_scores"]["printed"])  # [8, 4, 4], divided by sqrt(64)
    module, x = mha(512, 8, is_causal=True).double(), torch.zeros(2, 4, 512, dtype=torch.float64)
    x[:, range(4), range(4)] = 1  # token i is the i-th unit vector
    with torch.no_grad():
        q, k = (
            part.linear.weight.zero_().view(8, 64, 512)
            for part in (module.project.q, module.project.k)
        )
        q[:, :4, :4] = 8 * raw.mT  # row i of head h is 8 raw[h, i]
        k[:, :4, :4] = torch.eye(4, dtype=torch.float64)
    return module, x


def test_the_notes_scores_give_the_weights_that_the_note_should_have_printed() -> None:
    module, x = noted()
    found = LayerStages("mha", x, module.mask, run_block_stages(module, x))
    assert [stage.name for stage in found.stages] == NAMES
    values = {stage.name: stage.values for stage in found.stages}
    assert difference(values["scores"][0], tensor(RUN["raw_scores"]["printed"])) < 1e-14
    assert difference(values["masked"][0], tensor(RUN["masked_scores"]["printed"])[0]) < 2e-8
    right = tensor(RUN["weights_correct_causal"]["value"])
    for sequence in values["weights"]:  # the mask acts on both, as it did not in the note
        assert difference(sequence, right) <= DATA["tolerance"]["value"]
    assert (1 - found.allowed).tolist() == RUN["mask"]["printed"], "the note has 1 = hidden"
    assert list(values["out"].shape) == RUN["shapes"]["output"]
    told = text(found.as_dict())
    assert "[[1 0 0 0]\n [1 1 0 0]\n [1 1 1 0]\n [1 1 1 1]]" in told
    assert "[-0.0122 -0.5505 -0.3771  0.3907]" in told  # the first raw row of the note
    assert "[-0.0122    -inf    -inf    -inf]" in told
    # the third row of weights, in place of 1.1111 on the future
    assert "[0.2445 0.3189 0.4366 0.    ]" in told
    assert told.count("-inf") == 2 * 48


def test_every_stage_by_loops() -> None:
    (found,) = run_layers(
        ["gqa"], dim=8, heads=4, batch=1, tokens=3, mask=Causal(), seed=2, options={"groups": 2}
    )
    values = {stage.name: stage.values for stage in found.stages}
    q, k, v = (values[name].double() for name in "qkv")
    assert (q.shape[1], k.shape[1]) == (4, 2)
    for h in range(4):
        for i in range(3):
            row = [float(q[0, h, i] @ k[0, h // 2, j]) / math.sqrt(2) for j in range(3)]
            assert values["scores"][0, h, i].tolist() == pytest.approx(row, abs=1e-6)
            seen = [math.exp(s) for s in row[: i + 1]]
            weights = [e / sum(seen) for e in seen] + [0.0] * (2 - i)
            assert values["weights"][0, h, i].tolist() == pytest.approx(weights, abs=1e-6)
            z = sum(w * v[0, h // 2, j] for j, w in enumerate(weights))
            assert values["z"][0, h, i].tolist() == pytest.approx(z.tolist(), abs=1e-6)
    block = (found.x + values["out"]).double()
    size = (block.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    block = (block - block.mean(-1, keepdim=True)) / size
    assert difference(values["block"].double(), block) < 1e-5


def test_the_numbers_of_a_stage_are_those_of_its_finite_entries() -> None:
    (found,) = run_layers(["mha"], dim=8, heads=2, mask=Causal())
    masked = found.stage("masked")
    kept = [x for x in masked.values.flatten().tolist() if math.isfinite(x)]
    mean = sum(kept) / len(kept)
    told = masked.summary()
    assert len(kept) == 2 * 2 * 10
    assert told.mean == pytest.approx(mean, rel=1e-6)
    spread = math.sqrt(sum((x - mean) ** 2 for x in kept) / len(kept))
    assert told.std == pytest.approx(spread, rel=1e-6)
    assert told.shape == (2, 2, 4, 4)
    assert told.seconds is not None
    assert told.seconds > 0


def test_mha_gpt_and_mla_stand_side_by_side() -> None:
    made = run_layers(["mha", "gpt", "mla"], dim=16, heads=2, tokens=3, mask=Causal())
    told = [one.as_dict() for one in made]
    lines = table(told).splitlines()
    assert lines[0].split() == ["stage", "shape", "mean", "std", "ms"]
    assert len(lines) == 1 + 3 * len(NAMES)
    assert [line.split()[0] for line in lines[1:]] == ["mha"] * 9 + ["gpt"] * 9 + ["mla"] * 9
    assert "2 x 2 x 3 x 12" in next(line for line in lines if line.startswith("mla  q"))
    shown = sections(told)
    assert [one.title.partition(":")[0] for one in shown[:2]] == ["Stages", "Mask"]
    for word in ("<th>mean</th>", "<th>std</th>", "<th>ms</th>", "<td>mla</td><td>block</td>"):
        assert word in shown[0].html()


def test_training_mode_comes_back_and_nothing_is_dropped() -> None:
    module = mha(8, 2, dropout=0.9).train()
    x = torch.randn(1, 5, 8)
    weights = {stage.name: stage.values for stage in run_stages(module, x)}["weights"]
    assert module.training
    assert difference(weights.sum(-1), torch.ones(1, 2, 5)) < 1e-6


def test_what_has_no_such_stages_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="attention is a CrossAttention; stages"):
        run_stages(cross_attention(8, 2), torch.zeros(1, 3, 8))
    with pytest.raises(ArgumentError, match="retention is a Recurrent, not a softmax"):
        run_layers(["retention"], dim=8, heads=2)


def test_explain_tells_the_tensors_of_the_layer_in_text() -> None:
    found = explain(model(), TEXT, layer=1, head=0)
    names = [one.name for one in found.tensors]
    assert names == NAMES[:-1]
    by = {one.name: one for one in found.tensors}
    assert by["weights"].mean * found.sizes["S"] == pytest.approx(1, rel=1e-5)
    assert by["out"].shape == (1, found.sizes["T"], found.sizes["M"])
    assert by["z"].seconds
    lines = [line.plain for line in page(found.as_dict())]
    start = next(i for i, line in enumerate(lines) if "the layer's tensors" in line)
    assert lines[start + 1].split() == ["stage", "shape", "mean", "std", "ms"]
    assert [line.split()[0] for line in lines[start + 2 : start + 10]] == names
    assert max(map(len, lines)) <= 80


def test_long_texts_make_no_scores_and_other_mechanisms_have_no_times() -> None:
    x = torch.zeros(3, 8)
    module = mha(8, 2)
    few = summarize_layer(module, {"x": x}, {"q": torch.zeros(2, 3, 4)}, own=True)
    assert [one.name for one in few] == NAMES[:-1]
    long = summarize_layer(module, {"x": x}, {"q": torch.zeros(2, 3, 4)}, own=True, most_pairs=17)
    assert [one.name for one in long] == ["q", "k", "v", "z", "out"]
    other = summarize_layer(module, {"x": x}, {"q": torch.ones(2, 3, 4)}, own=False)
    assert [(one.name, one.mean, one.std, one.seconds) for one in other] == [("q", 1.0, 0.0, None)]
    assert MAX_SCORES == 2**22
