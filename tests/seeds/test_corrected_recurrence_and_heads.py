"""What Deepseek_based_llm_note, chapter 1.1 (the first note) gets wrong, done right.

docs/seeds.md lists each error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.masks import Causal
from regard.nn.blocks.rnn import run_rnn
from regard.nn.variants import mha
from regard.span import Span
from tests.golden import DATA, tensor

RUN = DATA["run"]
ZERO = torch.zeros(1, 8, 4, 1, dtype=torch.float64)


def given(name: str, field: str = "printed") -> Tensor:
    return tensor(RUN[name][field])


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64)


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).detach().abs().max())


# --- one sequence unmasked; rows that are no distribution


def test_every_sequence_of_a_batch_is_masked() -> None:
    printed = given("masked_scores")
    assert [int(row.isinf().sum()) for row in printed] == [48, 0]
    visible = torch.stack([given("raw_scores"), printed[1]])  # both without a mask
    zero = ZERO.expand(2, -1, -1, -1)
    with regard.Trace("scores") as trace:
        regard.attend(zero, zero, zero, mask=Causal(), bias=visible)
    assert [int(row.isneginf().sum()) for row in trace["scores"]] == [48, 48]
    weights = regard.attention_weights(zero, zero, mask=Causal(), bias=visible)
    assert bool((weights.triu(1) == 0).all())


def test_rows_of_the_run_are_no_distributions_and_ours_are() -> None:
    sums = given("weights_printed").sum(-1).flatten()
    whole = (
        sums - 1 / 0.9
    ).abs() < 4 * 9e-8  # 9e-8: what the recipe of the data says of each weight
    assert int(whole.sum()) == 24
    assert round(float(sums[~whole].min()), 4) >= 0.7736
    assert round(float(sums[~whole].max()), 4) <= 0.8773
    assert int((~torch.tensor(RUN["weights_printed"]["kept"])).sum()) == 8
    assert bool((given("weights_printed")[:, 3].max(-1).values - 0.25 / 0.9).abs().max() < 9e-8)
    ours = regard.attention_weights(ZERO, ZERO, mask=Causal(), bias=given("raw_scores")[None])
    assert float((ours.sum(-1) - 1).abs().max()) <= 4 * torch.finfo(torch.float64).eps


# --- the scale is part of what is called a score


def test_a_score_is_scaled_once() -> None:
    q, k = draw(1, 2, 5, 64), draw(1, 2, 5, 64)
    raw = torch.tensor(
        [
            [[sum(float(a) * float(b) for a, b in zip(x, y, strict=True)) for y in ks] for x in qs]
            for qs, ks in zip(q[0], k[0], strict=True)
        ],
        dtype=torch.float64,
    )
    for scale, factor in ((None, 1 / 8), (1.0, 1.0)):
        with regard.Trace("scores") as trace:
            regard.attend(q, k, k, scale=scale)
        assert apart(trace["scores"][0], raw * factor) <= 64 * torch.finfo(torch.float64).eps * 64
    # the run's weights follow from its "original" scores as they are; divided by 8 once more they
    # do not
    wrong = given("weights_wrong_without_dropout", "value")[:, :3]
    for divisor, fits in ((1.0, True), (8.0, False)):
        made = regard.attention_weights(
            ZERO, ZERO, mask=~Causal(), bias=given("raw_scores")[None] / divisor
        )
        assert (apart(made[0, :, :3], wrong) < 1e-8) == fits


# --- -inf and -1e9


def test_a_large_negative_number_differs_from_a_mask_exactly_where_nothing_is_seen() -> None:
    q, k = draw(1, 1, 40, 16, scale=3), draw(1, 1, 8, 16, scale=3)
    allowed = torch.rand(40, 8) < 0.3
    allowed[::5] = False
    blind = ~allowed.any(-1)
    assert 8 <= int(blind.sum()) < 40
    masked = regard.attention_weights(q, k, mask=allowed)[0, 0]
    fill = torch.zeros(40, 8, dtype=torch.float64).masked_fill(~allowed, -1e9)
    filled = regard.attention_weights(q, k, bias=fill)[0, 0]
    # added to a score, 1e9 leaves 7 digits behind the point of what decides between hidden keys
    assert apart(filled[~blind], masked[~blind]) <= 1e-12
    assert bool((masked[blind] == 0).all())
    assert float((filled[blind].sum(-1) - 1).abs().max()) < 1e-12, "an undefined row as an answer"
    replaced = regard.attention_weights(
        torch.zeros_like(q), k, bias=torch.full((40, 8), -1e9, dtype=torch.float64)
    )
    assert apart(replaced, torch.full_like(replaced, 1 / 8)) < 1e-12, "uniform, as in the note"


# --- forgetting, vanishing, and who weighs how much in a state


def one_unit(w: float, u: float) -> nn.RNN:
    """h_t = tanh(w h_{t-1} + u x_t)."""
    rnn = nn.RNN(1, 1, bias=False, batch_first=True).double()
    with torch.no_grad():
        rnn.weight_hh_l0.fill_(w)
        rnn.weight_ih_l0.fill_(u)
    return rnn


def test_forgetting_and_vanishing_gradients_are_two_things() -> None:
    """A latch remembers its first input for ever while its gradient vanishes; a sum has gradient 1
    and cannot tell.
    """
    x = torch.zeros(2, 60, 1, dtype=torch.float64)
    x[0, 0], x[1, 0] = 1.0, -1.0
    x.requires_grad_()
    states, (final,) = run_rnn(one_unit(5.0, 5.0), x)
    assert states[:, -1, 0].detach().sign().tolist() == [1.0, -1.0]
    assert float(states[:, -1].detach().abs().min()) > 0.999, "nothing is forgotten"
    (slope,) = torch.autograd.grad(final.sum(), x)
    assert float(slope[:, 0].abs().max()) < 1e-100, "and nothing is learnt"
    # h_t = h_{t-1} + x_t, in the range where tanh is a line
    small = 1e-6 * torch.tensor([[3.0, 0, 0, 0], [0, 0, 3.0, 0]], dtype=torch.float64)[..., None]
    small.requires_grad_()
    _, (final,) = run_rnn(one_unit(1.0, 1.0), small)
    (slope,) = torch.autograd.grad(final.sum(), small)
    assert apart(slope, torch.ones_like(slope)) < 1e-9, "the gradient is whole"
    assert apart(final[0, 0], final[0, 1]) < 1e-15, "which input it was is forgotten"


def influence(rnn: nn.RNNBase, x: Tensor) -> Tensor:
    """How much each input moves what is carried at the end."""
    x = x.clone().requires_grad_()
    _, carried = run_rnn(rnn, x)
    (slope,) = torch.autograd.grad(carried[-1].sum(), x)
    return slope.abs().amax((0, 2))


def test_a_state_is_dominated_by_recent_input_and_a_gate_can_change_that() -> None:
    recent = influence(nn.GRU(4, 8, batch_first=True).double(), draw(4, 40, 4))
    assert float(recent[-1]) > 1e3 * float(recent[0])
    assert float(recent[-5:].sum()) > 10 * float(recent[:-5].sum() - recent[-10:-5].sum())
    for forget, ratio in ((40.0, 1.0), (0.0, 0.5**39)):
        lstm = nn.LSTM(4, 8, batch_first=True).double()
        with torch.no_grad():
            for name, parameter in lstm.named_parameters():
                if "weight_hh" in name:
                    parameter.zero_()  # gates look at the input only
                if "bias" in name:
                    parameter.zero_()
            lstm.weight_ih_l0[8:16].zero_()
            lstm.bias_ih_l0[8:16] = forget  # input, forget, cell, output
        same = draw(1, 1, 4).expand(1, 40, 4)
        kept = influence(lstm, same)
        assert math.isclose(float(kept[0] / kept[-1]), ratio, rel_tol=1e-9)


# --- what is called the output of attention


def test_out_is_the_projected_heads_and_nothing_more() -> None:
    module, x = mha(8, 2).double(), draw(2, 5, 8)
    with regard.Trace("z", "out") as trace:
        out = module(x)
    assert torch.equal(out, trace["out"])
    joined = torch.cat(list(trace["z"].unbind(1)), -1)
    assert apart(out, joined @ module.output.weight.T) <= 1e-14
    behind = nn.functional.layer_norm(out + x, (8,))  # what the note prints under the same name
    assert apart(out, behind) > 0.1
    assert [name for name, _ in module.named_children()] == ["project", "output", "bias_tensors"]


def test_polarity_is_printed_with_the_mask() -> None:
    """There is one polarity, which masks say; foreign ones are turned round once, by name."""
    blocked = given("mask").bool()
    for keep in (
        masks.from_drop(blocked),
        masks.from_additive(blocked.double().masked_fill(blocked, -math.inf)),
    ):
        assert torch.equal(keep.block(Span(0, 4), Span(0, 4))[0, 0], ~blocked)
    assert "True = may attend" in " ".join(str(masks.__doc__).split())
    assert (str(Causal()), str(~Causal())) == ("causal", "~causal")
