"""The numbers that two public teaching notes print, through the public functions:
tests/data/golden.json.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.masks import Causal, Mask
from regard.nn import Attention, HeadProjection, SeparateQKV
from tests.golden import (
    CAUSAL,
    DATA,
    ENTRIES,
    WALK,
    computed,
    difference,
    expected,
    one,
    parameters,
    tensor,
)

RUN = DATA["run"]
VALUE = DATA["tolerance"]["value"]
# half a unit of the last printed digit; what was printed had been computed in fp32
PRINTED = 0.5 * 10.0 ** -DATA["tolerance"]["printed_digits"] + torch.finfo(torch.float32).eps


# --- the walk from a dot product to multi-head attention


def test_every_entry_is_computed() -> None:
    assert set(computed("regard", torch.float64)) == set(ENTRIES)
    assert len(ENTRIES) == 25
    assert all(entry["reproduces"] for entry in ENTRIES.values())


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_has_its_shape_its_print_and_its_value(name: str) -> None:
    x = computed("regard", torch.float64)[name]
    assert list(x.shape) == ENTRIES[name]["shape"]
    # the values of dropout come from a run in fp32
    in_fp32 = name.startswith("dropout.") * difference(computed("formula", torch.float32)[name], x)
    assert difference(x, expected(name, "value")) <= VALUE + 2 * in_fp32
    assert difference(x, expected(name, "printed")) <= PRINTED


@pytest.mark.parametrize("name", ENTRIES)
def test_in_fp32_an_entry_is_as_exact_as_the_plain_formula(name: str) -> None:
    x, plain = computed("regard", torch.float32)[name], computed("formula", torch.float32)[name]
    reference = computed("formula", torch.float64)[name]
    assert x.dtype == torch.float32
    last = reference.float()
    rounding = (last + 0.3 - 0.3 - last).masked_fill(last.isinf(), 0).abs().max()
    assert difference(x, reference) <= 2 * difference(plain, reference) + 2 * float(rounding)
    assert difference(x, expected(name, "printed", x.dtype)) <= PRINTED


@pytest.mark.parametrize("name", CAUSAL)
def test_the_inverted_mask_does_not_reproduce_it(name: str) -> None:
    x = computed("inverted", torch.float64)[name]
    assert not difference(x, tensor(ENTRIES[name]["printed"])) <= PRINTED


def test_another_scale_does_not_reproduce_the_trained_walk() -> None:
    x = tensor(WALK["inputs"])
    q, k, v = (one(x @ w) for w in parameters("SelfAttention_v1", x.dtype))
    unscaled = regard.attend(q, k, v, scale=1.0)[0, 0]
    assert difference(unscaled, tensor(ENTRIES["SelfAttention_v1"]["printed"])) > PRINTED


def test_the_example_by_hand_and_the_printed_shapes() -> None:
    x = tensor(WALK["inputs"])
    hand = WALK["hand_example"]
    score = computed("regard", torch.float64)["simple.scores"][1, 0]
    assert abs(float(score) - hand["value"]) <= VALUE
    assert abs(float(score) - hand["printed"]) <= PRINTED
    assert WALK["printed_shapes"]["batch"] == list(torch.stack([x, x]).shape)
    _, k, v = (x @ w for w in parameters("SelfAttention_v1", x.dtype))
    assert [list(k.shape), list(v.shape)] == [WALK["printed_shapes"][n] for n in ("keys", "values")]


@pytest.mark.parametrize("name", ["simple.weights", "causal.weights", "causal.weights_before_mask"])
def test_rows_sum_to_one(name: str) -> None:
    rows = computed("regard", torch.float64)[name].sum(-1)
    assert difference(rows, torch.ones(6)) <= 6 * torch.finfo(torch.float64).eps


# --- the same entries from their seeds, by the module


def attention(n: int, d: int, mask: Mask | None = None, projected: bool = False) -> Attention:
    """n heads of dim d over the three numbers of a token; the order of the draws is q, k, v,
    output.
    """
    project = SeparateQKV(HeadProjection(3, n, d), HeadProjection(3, n, d), HeadProjection(3, n, d))
    return Attention(project, nn.Linear(n * d, n * d) if projected else nn.Identity(), mask=mask)


def matrices(module: Attention) -> list[Tensor]:
    parts = (module.project.q, module.project.k, module.project.v)
    return [part.linear.weight.detach() for part in parts]


def test_the_seeds_draw_the_listed_parameters() -> None:
    torch.manual_seed(123)
    for drawn in parameters("SelfAttention_v1", torch.float32):
        assert torch.equal(torch.rand(3, 2), drawn)
    for name, seed in (("SelfAttention_v2", 789), ("CausalAttention", 123)):
        torch.manual_seed(seed)
        drawn = zip(matrices(attention(1, 2)), parameters(name, torch.float32), strict=True)
        assert all(torch.equal(x, y) for x, y in drawn)


@pytest.mark.parametrize(
    "name, seed, mask",
    [("SelfAttention_v2", 789, None), ("CausalAttention", 123, Causal())],
)
def test_one_head_by_the_module(name: str, seed: int, mask: Mask | None) -> None:
    torch.manual_seed(seed)
    module = attention(1, 2, mask)
    x = tensor(WALK["inputs"], torch.float32)
    out = module(torch.stack([x, x])) if mask else module(x[None])[0]
    assert difference(out, tensor(ENTRIES[name]["printed"])) <= PRINTED


def test_several_heads_by_the_module() -> None:
    x = tensor(WALK["inputs"], torch.float32)
    batch = torch.stack([x, x])
    torch.manual_seed(123)
    wrapped = [attention(1, 2, Causal()) for _ in range(2)]
    torch.manual_seed(123)
    split = attention(2, 1, Causal(), projected=True)
    out = torch.cat([head(batch) for head in wrapped], -1)
    printed = tensor(ENTRIES["MultiHeadAttentionWrapper"]["printed"])
    assert difference(out, printed) <= PRINTED
    assert difference(split(batch), tensor(ENTRIES["MultiHeadAttention"]["printed"])) <= PRINTED
    # the two are one function when the heads' matrices are stacked and the output is the identity
    joined = attention(2, 2, Causal())
    own = (joined.project.q, joined.project.k, joined.project.v)
    stacked = zip(own, *map(matrices, wrapped), strict=True)
    with torch.no_grad():
        for part, first, second in stacked:
            part.linear.weight.copy_(torch.cat([first, second]))
    assert difference(joined(batch), printed) <= PRINTED


def test_relations_within_the_walk() -> None:
    c = computed("regard", torch.float64)
    exact = 4 * torch.finfo(torch.float64).eps
    assert difference(c["trainable.context_of_x2"], c["SelfAttention_v1"][1]) <= exact
    assert difference(c["causal.weights"], c["causal.weights_renormalized"]) <= exact
    assert difference(c["causal.weights"][-1], c["causal.weights_before_mask"][-1]) <= exact
    assert torch.equal(c["dropout.of_causal_weights"], c["causal.weights"] * c["dropout.of_ones"])
    assert difference(c["MultiHeadAttentionWrapper"][..., :2], c["CausalAttention"]) <= exact
    for name in ("CausalAttention", "MultiHeadAttentionWrapper", "MultiHeadAttention"):
        assert torch.equal(c[name][0], c[name][1])
    assert len(WALK["relations"]) == 7


def test_the_first_class_with_the_transposed_weights_of_the_second_is_the_second() -> None:
    x = tensor(WALK["inputs"])
    linear = parameters("SelfAttention_v2", x.dtype)
    q, k, v = (one(x @ w.T.contiguous()) for w in linear)
    out = regard.attend(q, k, v)[0, 0]
    assert difference(out, tensor(ENTRIES["SelfAttention_v2"]["value"])) <= VALUE
    own = computed("regard", torch.float64)["SelfAttention_v1"]
    assert difference(own, tensor(ENTRIES["SelfAttention_v2"]["printed"])) > PRINTED


# --- the run that prints one mask in two polarities


def given(name: str, field: str = "printed") -> Tensor:
    return tensor(RUN[name][field])


def over_raw_scores(mask: Mask | None, bias: Tensor | None = None) -> Tensor:
    """Weights of given scores: they come in as a bias on queries and keys that are zero."""
    zero = torch.zeros(1, 8, 4, 1, dtype=torch.float64)
    bias = given("raw_scores") if bias is None else bias
    return regard.attention_weights(zero, zero, mask=mask, bias=bias[None])[0]


def test_the_causal_mask_over_the_raw_scores() -> None:
    weights = over_raw_scores(Causal())
    assert list(weights.shape) == RUN["weights_correct_causal"]["shape"]
    assert difference(weights, given("weights_correct_causal", "value")) <= VALUE
    zero, eye = torch.zeros(1, 8, 4, 1).double(), torch.eye(4).double().expand(1, 8, 4, 4)
    out = regard.attend(zero, zero, eye, mask=Causal(), bias=given("raw_scores")[None])[0]
    assert difference(out, given("weights_correct_causal", "value")) <= VALUE


def test_the_mask_of_the_run_says_what_is_blocked() -> None:
    blocked = given("mask").bool()
    four = regard.Span(0, 4)
    assert torch.equal(masks.from_drop(blocked).block(four, four), Causal().block(four, four))
    assert torch.equal((~Causal()).block(four, four)[0, 0], blocked)
    assert torch.equal(over_raw_scores(masks.from_drop(blocked)), over_raw_scores(Causal()))


def test_what_the_run_prints_is_the_inverted_mask() -> None:
    wrong = given("weights_wrong_without_dropout", "value")
    inverted = over_raw_scores(~Causal())
    assert difference(inverted[:, :3], wrong[:, :3]) <= VALUE
    # the last row may see nothing: ours is 0; -1e9 in the place of a mask hides that behind a
    # uniform row
    assert not inverted[:, 3].any()
    past = torch.ones(4, 4, dtype=torch.bool).tril()
    filled = over_raw_scores(None, given("raw_scores").masked_fill(past, -1e9))
    assert difference(filled, wrong) <= VALUE
    kept = torch.tensor(RUN["weights_printed"]["kept"])
    assert difference(filled * kept / 0.9, given("weights_printed")) <= 9e-8  # as its recipe says
    sums = (filled * kept / 0.9).sum(-1)
    assert difference(sums, given("weights_printed", "row_sums")) <= 4 * 9e-8


def test_the_right_mask_does_not_reproduce_what_the_run_prints() -> None:
    weights = over_raw_scores(Causal())
    assert difference(weights, given("weights_wrong_without_dropout", "value")) > 0.1
    assert difference(over_raw_scores(~Causal()), given("weights_correct_causal", "value")) > 0.1
    assert (weights.triu(1) == 0).all()
    assert (given("weights_printed").triu(1)[:, :3].sum(-1) > 0.7).all()  # weight on the future


def test_the_masked_scores_of_the_run() -> None:
    printed = given("masked_scores")
    zero = torch.zeros(1, 8, 4, 1, dtype=torch.float64)
    for row, bias, mask in ((0, given("raw_scores"), Causal()), (1, printed[1], None)):
        with regard.Trace("scores") as trace:
            regard.attend(zero, zero, zero, mask=mask, bias=bias[None])
        assert difference(trace["scores"][0], printed[row]) <= 2e-8  # as its recipe says
    # the second sequence was printed without any mask
    assert [int(row.isinf().sum()) for row in printed] == [48, 0]
    assert torch.equal(printed[0], printed[0].masked_fill(given("mask").bool(), -math.inf))


def test_the_shapes_of_the_run() -> None:
    shapes = RUN["shapes"]
    M, n, d = shapes["input_q"][-1], shapes["heads"], shapes["head_dim"]
    parts = [HeadProjection(M, n, d) for _ in range(3)]
    module = Attention(SeparateQKV(*parts), nn.Linear(n * d, M, bias=False), mask=Causal())
    with regard.Trace("pattern") as trace:
        out = module(torch.randn(shapes["input_q"]))
    assert list(out.shape) == shapes["output"]
    assert list(trace["pattern"].shape) == [shapes["batch"], *RUN["raw_scores"]["shape"]]
