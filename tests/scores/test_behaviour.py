"""What score rules share, what they refuse, and what stays hidden from them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import regard
from regard import biases, caches, masks, scores
from regard.errors import ArgumentError, ArgumentTypeError, FileError, KernelRefusal
from regard.nn import Attention, HeadProjection, SeparateQKV
from regard.ops.softmax import Kernel, KernelResult, WorkEstimate
from regard.scores import ScoreBlock, ScoreRule
from regard.span import Span
from tests.rules import assert_close_rule
from tests.scores import rules

H, D = rules.H, rules.D
NAMES = [*rules.MADE]
F64 = torch.float64


def tensors(dtype: torch.dtype = F64, T: int = 6, S: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = (2, H, T, D), (2, 2, S, D), (2, 2, S, 3)
    q, k, v = (torch.randn(*shape, generator=draw, dtype=F64).to(dtype) for shape in shapes)
    return q, k, v


def rule_of(name: str) -> ScoreRule:
    return rules.make(name, rules.tensors_for(name, 7)).rule


@dataclass(frozen=True, eq=False, repr=False)
class Projected(ScoreRule):
    """A normalizer of a user: the projection of the scores onto the simplex."""

    stages: ClassVar[Any] = ("normalizer",)

    def normalize(self, s: Tensor, block: ScoreBlock) -> Tensor:
        z = s.sort(-1, descending=True).values
        n = torch.arange(1, s.shape[-1] + 1)
        total = z.masked_fill(z.isneginf(), 0).cumsum(-1)
        support = (1 + n * z > total).sum(-1, keepdim=True).clamp(min=1)
        return (s - (total.gather(-1, support - 1) - 1) / support).clamp(min=0)


@dataclass(frozen=True, eq=False, repr=False)
class Halved(ScoreRule):
    """Half of each weight."""

    stages: ClassVar[Any] = ("pattern",)
    scope: ClassVar[Any] = "pair"

    def change_pattern(self, p: Tensor, block: ScoreBlock) -> Tensor:
        return p / 2


@pytest.mark.parametrize("name", NAMES)
def test_equality_text_and_other_tensors(name: str) -> None:
    made = rules.tensors_for(name, 7)
    rule = rules.make(name, made).rule
    assert rule.with_tensors(made) == rule
    assert hash(rule.with_tensors(made)) == hash(rule)
    assert (rule.with_tensors([x.clone() for x in made]) == rule) is (not made)
    assert rule != 8
    assert str(rule) == repr(rule)
    assert all(step.kind in str(rule) for step in rule.steps())
    with pytest.raises(ArgumentError, match=r"tensors? and got"):
        rule.with_tensors([*made, torch.ones(1)])


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", NAMES)
def test_some_heads_are_a_part_of_all_of_them(name: str) -> None:
    rule, (q, k, v) = rule_of(name), tensors()
    if rule.scope == "heads" or any(x.kind in ("fn", "talkingheads") for x in rule.steps()):
        with pytest.raises(ArgumentError, match="cannot be split by heads"):
            rule.select_heads(slice(2, 4))
        return
    whole = regard.attend(q, k, v, mask=masks.Causal(), score=rule)
    part = regard.attend(
        q[:, 2:], k[:, 1:], v[:, 1:], mask=masks.Causal(), score=rule.select_heads(slice(2, 4))
    )
    torch.testing.assert_close(part, whole[:, 2:], rtol=0, atol=1e-14)


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_masked_reaches_neither_results_nor_gradients(name: str) -> None:
    q, k, v = tensors()
    rule, mask = rule_of(name), masks.Causal() & masks.Window(3)
    clean = regard.attend(q, k, v, mask=mask, score=rule)
    k[:, :, 0], v[:, :, 0] = torch.nan, torch.inf  # the first query is at position 3
    for backend in ("auto", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *rule.tensors())]
        out = regard.attend(
            *leaves[:3], mask=mask, score=rule.with_tensors(leaves[3:]), backend=backend
        )
        torch.testing.assert_close(out.detach(), clean, rtol=0, atol=1e-14)
        for x in torch.autograd.grad(out.sum(), leaves):
            assert x.isfinite().all()
    v[:, :, 4, 0] = torch.nan  # a query that sees it gives NaN
    out = regard.attend(q, k, v, mask=mask, score=rule)
    expected = torch.zeros(6, dtype=torch.bool)
    expected[1:4] = True
    if name != "top":  # which leaves keys out
        assert torch.equal(out[0, 0, :, 0].isnan(), expected)


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", NAMES)
def test_a_query_that_sees_nothing_gets_zero(name: str) -> None:
    q, k, v = tensors()
    at = torch.tensor([[-1, 4, 5, 6, 7, 8], [3, 4, -1, 6, 7, 8]])
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *rule_of(name).tensors())]
    score = rule_of(name).with_tensors(leaves[3:])
    for mask in (masks.Causal(), ~masks.Full()):
        out = regard.attend(*leaves[:3], mask=mask, score=score, q_positions=at)
        assert not out[0, :, 0].any()
        assert not out[1, :, 2].any()
        found = torch.autograd.grad(out.sum(), leaves)
        assert not found[0][0, :, 0].any()
        assert all(x.isfinite().all() for x in found)


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", NAMES)
def test_keys_in_other_slots_give_the_same(name: str) -> None:
    rule, (q, k, v) = rule_of(name), tensors()
    order = torch.tensor([4, 8, 0, 2, 7, 1, 3, 6, 5])
    options: dict[str, Any] = {"mask": masks.Causal(), "score": rule}
    whole = regard.attend(q, k, v, **options)
    turned = regard.attend(
        q,
        k[:, :, order],
        v[:, :, order],
        k_positions=order[None],
        q_positions=Span(3, 6),
        **options,
    )
    torch.testing.assert_close(turned, whole, rtol=0, atol=1e-13)


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_the_pattern_are_what_was_computed(name: str) -> None:
    rule, (q, k, v) = rule_of(name), tensors()
    options: dict[str, Any] = {"mask": masks.Causal(), "score": rule}
    with regard.Trace("scores", "pattern") as trace:
        out = regard.attend(q, k, v, **options)
    pattern = regard.attention_weights(q, k, **options)
    torch.testing.assert_close(trace["pattern"], pattern, rtol=0, atol=1e-14)
    block = regard.attention_weights(q, k, rows=slice(2, 4), columns=slice(1, 5), **options)
    torch.testing.assert_close(block, pattern[:, :, 2:4, 1:5], rtol=0, atol=1e-14)
    by_hand = torch.einsum("bhij,bhje->bhie", pattern, v.repeat_interleave(2, 1))
    torch.testing.assert_close(out, by_hand, rtol=0, atol=1e-13)
    assert trace["scores"].isneginf()[..., 0, 4:].all()
    with regard.Trace("pattern", missing="ignore") as trace:
        regard.attention_weights(q, k, **options)
    assert "pattern" not in trace


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("way", ["compile", "vmap", "grad", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_rules_under_transforms(name: str, way: str) -> None:
    rule, (q, k, v) = rule_of(name), tensors()

    def run(q: Tensor) -> Tensor:
        here = rule.with_tensors([x.to(q.device) for x in rule.tensors()])
        return regard.attend(q, k.to(q.device), v.to(q.device), mask=masks.Causal(), score=here)

    if way == "meta":
        assert run(q.to("meta")).shape == (2, H, 6, 3)
    elif way == "compile":
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q), run(q), rtol=0, atol=1e-14)
    elif way == "vmap":
        found = torch.func.vmap(run)(torch.stack([q, 2 * q]))
        torch.testing.assert_close(found, torch.stack([run(q), run(2 * q)]), rtol=0, atol=1e-14)
    else:
        leaf = q.clone().requires_grad_()
        (right,) = torch.autograd.grad(run(leaf).sum(), leaf)
        found = torch.func.grad(lambda q: run(q).sum())(q)
        torch.testing.assert_close(found, right, rtol=0, atol=1e-13)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fn", "by-head", "sigmoid-by-head"])
def test_second_derivatives(name: str) -> None:
    q, k, v = (x[:1, :, :3].clone().requires_grad_() for x in tensors())
    made = [x.clone().requires_grad_() for x in rules.tensors_for(name, 7)]

    def run(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        rule = rules.make(name, list(own)).rule
        return regard.attend(q, k, v, mask=masks.Causal(), score=rule, backend="tiled")

    assert torch.autograd.gradgradcheck(run, (q, k, v, *made))


def test_top_k_keeps_the_smaller_position_of_equal_scores() -> None:
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 2.0, 1.0, 1.0]).view(1, 1, 4, 1)
    at = torch.tensor([[3, 2, 0, 1]])
    options: dict[str, Any] = {"k_positions": at, "q_positions": Span(9, 1)}
    rule = scores.TopK(2)
    weights = regard.attention_weights(q, k, score=rule, **options).flatten()
    assert (weights > 0).tolist() == [False, True, True, False]
    all_keys = regard.attention_weights(q, k, score=scores.TopK(4), **options)
    assert torch.equal(all_keys, regard.attention_weights(q, k, **options))


def test_a_soft_clamp_is_the_softcap_where_there_is_no_bias() -> None:
    q, k, v = tensors()
    clamp, mask = scores.SoftClamp(0.5), masks.Causal()
    found = regard.attend(q, k, v, mask=mask, score=clamp, backend="reference")
    right = regard.attend(q, k, v, mask=mask, softcap=0.5, backend="reference")
    torch.testing.assert_close(found, right, rtol=0, atol=1e-15)
    bias = biases.ALiBi(H)
    with_bias = [
        regard.attend(q, k, v, mask=mask, bias=bias, **x)
        for x in ({"score": clamp}, {"softcap": 0.5})
    ]
    assert (with_bias[0] - with_bias[1]).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_without_rules_get_the_call_that_means_the_same(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype, 6, 40)
    tau = rules.tensors_for("by-head", 7)[0]
    rule = scores.Temperature(0.5) >> scores.Temperature(tau)
    exact, plain = (
        torch.softmax(
            (
                q.to(d)
                @ k.to(d).repeat_interleave(2, 1).mT
                / D**0.5
                / 0.5
                / tau[:, None, None].to(d)
            ),
            -1,
        )
        @ v.to(d).repeat_interleave(2, 1)
        for d in (F64, dtype)
    )
    for backend in ("sdpa", "tiled", "reference"):
        found = regard.attend(q, k, v, score=rule, backend=backend)
        assert_close_rule(found, plain, exact, what=backend)
    report = regard.plan(q, k, v, score=rule)
    assert report.kernel == "sdpa"
    assert "score temperature(0.5) >> temperature(4)" in report.title
    more = regard.plan(q, k, v, score=rule >> scores.TopK(2))
    assert more.kernel == "reference"
    assert more["sdpa"].reasons == (
        "no score rule (temperature(0.5) >> temperature(4) >> topk(2))",
    )
    assert more["tiled"].reasons == ("the score rule topk(2) needs all keys of a row at once",)
    with pytest.raises(KernelRefusal, match="the scores of all heads at once"):
        regard.attend(q, k, v, score=scores.TalkingHeads(torch.eye(H)), backend="tiled")
    with pytest.raises(KernelRefusal, match=r"no score_mod for sigmoid\(-1\)"):
        regard.attend(q, k, v, score=scores.Sigmoid(-1.0), backend="flex")


def test_a_registered_kernel_gets_no_rule_that_it_does_not_know() -> None:
    class Plain(Kernel):
        name, selects = "plain", True

        def why_not(self, call: Any) -> list[str]:
            return []

        def priority(self, call: Any) -> float:
            return 1000

        def run(self, call: Any) -> KernelResult:
            assert call.score is None
            return KernelResult(call.q[..., :3] * call.scale, None)

        def work(self, call: Any) -> WorkEstimate:
            return WorkEstimate(0, 0)

    q, k, v = tensors()
    with regard.register_kernel(Plain()):
        assert regard.plan(q, k, v).kernel == "plain"
        assert regard.plan(q, k, v, score=scores.TopK(2)).kernel == "reference"
        assert torch.equal(
            regard.attend(q, k, v, scale=2.0, score=scores.Temperature(4.0)), q[..., :3] / 2
        )
        with pytest.raises(KernelRefusal, match=r"plain \(no score rule \(topk\(2\)\)\)"):
            regard.attend(q, k, v, score=scores.TopK(2), backend="plain")


def relative(score, b, h, q_idx, kv_idx):
    return score + 0.25 * (q_idx - kv_idx) * (h + 1)


def masking(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, torch.tanh(score), -float("inf"))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("mod", [relative, masking])
@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_score_mod_means_what_it_means_in_torch(mod: Any, dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype, 9)
    theirs = flex_attention(q, k, v, score_mod=mod, enable_gqa=True)
    exact = flex_attention(*(x.double() for x in (q, k, v)), score_mod=mod, enable_gqa=True)
    for backend in ("reference", "tiled", "flex"):
        ours = regard.attend(q, k, v, score=scores.from_score_mod(mod), backend=backend)
        if dtype == torch.float32:
            assert_close_rule(ours, theirs, exact)
        else:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
    back = scores.to_score_mod(scores.from_score_mod(mod), Span(0, 9), Span(0, 9))
    again = flex_attention(q, k, v, score_mod=back, enable_gqa=True)
    assert torch.equal(again, theirs)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_rule_as_a_score_mod() -> None:
    q, k, v = tensors(torch.float32)
    rule = rule_of("clamp-then-head") >> scores.FnScore(rules.wave)
    q_at, k_at = torch.arange(3, 9).flip(0).repeat(2, 1), torch.arange(9).repeat(2, 1)
    mod = scores.to_score_mod(rule, q_at, k_at)
    theirs = flex_attention(q, k, v, score_mod=mod, enable_gqa=True)
    ours = regard.attend(q, k, v, score=rule, q_positions=q_at, k_positions=k_at)
    wide = (x.double() for x in (q, k, v))
    exact = regard.attend(*wide, score=rule, q_positions=q_at, k_positions=k_at)
    assert_close_rule(ours, theirs, exact)
    with pytest.raises(ArgumentError, match=r"topk\(2\) cannot be a score_mod"):
        scores.to_score_mod(scores.TopK(2), q_at, k_at)


def test_a_rule_of_a_user() -> None:
    q, k, v = tensors()
    weights = regard.attention_weights(q, k, mask=masks.Causal(), score=Projected())
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, 6, dtype=F64))
    assert (weights == 0).any()
    assert not weights[..., 0, 4:].any()
    with pytest.raises(KernelRefusal, match=r"the score rule projected\(\) needs all keys"):
        regard.attend(q, k, v, score=Projected(), backend="tiled")
    with pytest.raises(KernelRefusal, match=r"halved\(\) changes weights after"):
        regard.attend(q, k, v, score=Halved(), backend="tiled")
    halved = regard.attend(q, k, v, score=Halved())
    torch.testing.assert_close(2 * halved, regard.attend(q, k, v, score=None))
    chain = scores.Temperature(0.1) >> Projected() >> scores.TalkingHeads(after=torch.eye(H))
    sharp = regard.attention_weights(q, k, mask=masks.Causal(), score=chain)
    assert (sharp > 0).sum() < (weights > 0).sum()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: regard.attend(q, k, v, mask=masks.Causal(), score=Projected()), leaves
    )


EYE = torch.eye(2)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: scores.FnScore(3), ArgumentTypeError, r"fn is int; it must be a function"),
    (lambda: scores.FnScore(relative, (3,)), ArgumentTypeError, r"parameters\[0\] is int"),
    (lambda: scores.SoftClamp(0), ArgumentError, "cap is 0; it must be a number greater than 0"),
    (lambda: scores.SoftClamp(None), ArgumentTypeError, "cap is None"),
    (lambda: scores.Temperature(-1.0), ArgumentError, "tau is -1.0"),
    (lambda: scores.Temperature(torch.ones(2).long()), ArgumentTypeError, "use .float()"),
    (lambda: scores.Temperature(torch.ones(1, 1, 1)), ArgumentError, r"it must be \[H\]"),
    (lambda: scores.TalkingHeads(), ArgumentError, "no matrix; give before, after or both"),
    (lambda: scores.TalkingHeads(3), ArgumentTypeError, "before is int"),
    (lambda: scores.TalkingHeads(torch.ones(2, 3)), ArgumentError, r"it must be \[H, H\]"),
    (lambda: scores.TalkingHeads(EYE, torch.eye(3)), ArgumentError, "for the same H"),
    (lambda: scores.CoPE(3), ArgumentTypeError, "embedding is int"),
    (lambda: scores.CoPE(torch.ones(3)), ArgumentError, r"it must be \[N, D\]"),
    (lambda: scores.TopK(2.0), ArgumentTypeError, "k is float"),
    (lambda: scores.TopK(0), ArgumentError, "k is 0; it must be at least 1"),
    (lambda: scores.Sigmoid(float("nan")), ArgumentError, "bias is nan"),
    (lambda: scores.Sigmoid(EYE), ArgumentError, r"bias is \(2, 2\); it must be \[H\]"),
    (lambda: scores.Sigmoid(torch.ones(2).long()), ArgumentTypeError, "use .float()"),
    (lambda: scores.Chain(()), ArgumentError, "a chain has no rules"),
    (lambda: scores.Chain((3,)), ArgumentTypeError, "a chain has a rule of type int"),
    (lambda: scores.Sigmoid() >> scores.Temperature(2.0), ArgumentError, r"temperature\(2\)"),
    (lambda: scores.Sigmoid() >> Projected(), ArgumentError, "with one normalizer"),
    (lambda: scores.TopK(2) >> scores.SoftClamp(1.0), ArgumentError, "stands after topk"),
    (lambda: scores.TalkingHeads(EYE, EYE) >> scores.TopK(1), ArgumentError, "stands after talk"),
]


@pytest.mark.parametrize("n", range(len(REFUSED)))
def test_rules_that_make_no_sense_are_refused(n: int) -> None:
    make, error, message = REFUSED[n]
    with pytest.raises(error, match=message):
        make()


SECRET = torch.ones(3, requires_grad=True)
REFUSED_CALLS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (3, {}, ArgumentTypeError, "score is int; it must be a rule of regard.scores or None"),
    (scores.TopK, {}, ArgumentTypeError, "score is the class TopK"),
    (relative, {}, ArgumentTypeError, "score is function"),
    (scores.Temperature(torch.ones(3)), {}, ArgumentError, "is for 3 heads and the query has 4"),
    (scores.Temperature(torch.ones(1, 8)), {}, ArgumentError, "8 positions and a query has the po"),
    (
        scores.Temperature(torch.ones(1, 8)),
        {"q_positions": torch.arange(3, 9)[None]},
        ArgumentError,
        "a query has the position 8",
    ),
    (scores.CoPE(torch.ones(3, 5)), {}, ArgumentError, "vectors of 5 numbers"),
    (scores.Sigmoid(), {"sink": torch.zeros(H)}, ArgumentError, "which has no denominator"),
    (
        scores.FnScore(lambda s, b, h, q, k: s * SECRET[0]),
        {},
        ArgumentError,
        "reads a tensor that requires a gradient",
    ),
    (scores.FnScore(lambda s, b, h, q, k: 1.0), {}, ArgumentTypeError, "returned float"),
    (scores.FnScore(lambda s, b, h, q, k: s.sum()), {}, ArgumentError, "one number per score"),
]


@pytest.mark.parametrize("n", range(len(REFUSED_CALLS)))
def test_calls_that_a_rule_does_not_fit_are_refused(n: int) -> None:
    rule, options, error, message = REFUSED_CALLS[n]
    q, k, v = tensors(torch.float32)
    with pytest.raises(error, match=message):
        regard.attend(q, k, v, score=rule, **options)


def test_parts_merge_where_the_rule_has_a_log_sum_exp() -> None:
    q, k, v = tensors()
    for name in ("fn", "by-place", "before"):
        rule, at = rule_of(name), Span(3, 6)
        parts = [
            regard.attend_partial(
                q,
                k[:, :, a:b],
                v[:, :, a:b],
                score=rule,
                q_positions=at,
                k_positions=Span(a, b - a),
            )
            for a, b in ((0, 4), (4, 9))
        ]
        whole = regard.attend(q, k, v, score=rule)
        torch.testing.assert_close(regard.merge(parts).out, whole, rtol=0, atol=1e-14)
    for name, reason in {
        "cope": "needs all keys of a row at once",
        "top": "needs all keys of a row at once",
        "sigmoid": "has no log-sum-exp",
        "after": "changes the weights after the softmax",
        "long": "has no log-sum-exp",
    }.items():
        with pytest.raises(ArgumentError, match=reason):
            regard.attend_partial(q, k, v, score=rule_of(name))


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", NAMES)
def test_a_recording_holds_what_was_computed(name: str, tmp_path: Any) -> None:
    rule, (q, k, v) = rule_of(name), tensors(torch.float32)
    options: dict[str, Any] = {"mask": masks.Causal(), "score": rule}
    with regard.inspect.Recorder() as recorder:
        out = regard.attend(q, k, v, **options)
    assert torch.equal(out, regard.attend(q, k, v, **options))
    recording = recorder.recording()
    weights = regard.attention_weights(q, k, **options)
    place = recording[0]
    for h in range(H):
        assert torch.equal(recording.weights(0, h, batch=1), weights[1, h].double())
    assert regard.inspect.row_sums(place).sound
    regard.inspect.save(recording, tmp_path / "run.safetensors")
    again = regard.inspect.load(tmp_path / "run.safetensors")
    read = again[0].steps[0].score
    assert str(read) == str(rule)
    assert torch.equal(again.weights(0, 2), recording.weights(0, 2))
    if name in ("fn", "wave"):
        with pytest.raises(ArgumentError, match="was recorded as text only"):
            regard.attend(q, k, v, score=read)
    else:
        torch.testing.assert_close(regard.attend(q, k, v, mask=masks.Causal(), score=read), out)
    with pytest.raises(ArgumentError, match=r"has the score rule .*: a page computes"):
        regard.inspect.report(recording)


def module(score: ScoreRule | None) -> Attention:
    torch.manual_seed(0)
    project = SeparateQKV(*(HeadProjection(8, heads, D) for heads in (H, 2, 2)))
    made = Attention(project, nn.Linear(16, 8), mask=masks.Causal(), score=score)
    return made.double()


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_with_a_rule(name: str) -> None:
    own = [nn.Parameter(x) for x in rules.tensors_for(name, 7)]
    layer, x = module(rules.make(name, own).rule), torch.randn(2, 7, 8, dtype=F64)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert len(layer.state_dict()) == 5 + len(own)
    assert f"score={layer.score}" in repr(layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        whole = layer(x)
        for p in other.score_tensors if own else ():
            p.mul_(1.5)
        assert torch.equal(layer(x), whole)
        assert torch.equal(other(x), whole) is (not own)
        for cache in (layer.new_cache(), caches.Growing()):
            parts = [layer(x[:, a:b], Span(a, b - a), cache) for a, b in ((0, 3), (3, 4), (4, 7))]
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-13)


def test_a_layer_refuses_a_mix_of_parameters_and_tensors() -> None:
    mixed = scores.TalkingHeads(nn.Parameter(torch.eye(H)), torch.eye(H))
    with pytest.raises(ArgumentError, match="mixes parameters with plain tensors"):
        module(mixed)
    assert module(None).score is None


def test_a_model_with_a_rule_is_recorded_and_explained() -> None:
    model = regard.load("tiny")
    layer = next(x for x in model.decoder.modules() if isinstance(x, Attention))
    layer.score = scores.TopK(2)
    recording = regard.inspect.record(model, "to be or not to be")
    assert ((recording.weights(0, 0) > 0).sum(-1) <= 2).all()
    assert recording[0].steps[0].score == scores.TopK(2)
    assert recording[1].steps[0].score is None
    found = regard.inspect.explain(model, "to be or not to be", layer=0)
    assert "topk(2)" in str(found.score)


def test_a_file_with_a_rule_and_no_weights_is_refused(tmp_path: Any) -> None:
    q, k, v = tensors(torch.float32)
    with regard.inspect.Recorder() as recorder:
        regard.attend(q, k, v, score=scores.TopK(2))
    recording = recorder.recording()
    place = recording[0]
    step = replace(place.steps[0], pattern=None)
    wrong = replace(recording, places={place.name: replace(place, steps=(step,))})
    regard.inspect.save(wrong, tmp_path / "run.safetensors")
    with pytest.raises(FileError, match=r"has the score rule topk\(2\) without its weights"):
        regard.inspect.load(tmp_path / "run.safetensors")


@dataclass(frozen=True, eq=False, repr=False)
class Recent(scores.PairRule):
    """A caller's own rule on pairs: later keys score higher."""

    def pair(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + 0.125 * k


def test_a_pair_rule_of_the_caller_runs_tile_by_tile() -> None:
    q, k, v = torch.randn(3, 1, 2, 130, 8).double().unbind(0)
    bias = 0.125 * torch.arange(130).double().expand(130, 130)
    assert isinstance(Recent(), scores.PairRule)
    expected = regard.attend(q, k, v, mask=masks.Causal(), bias=bias, backend="reference")
    for backend in ("tiled", "reference"):
        z = regard.attend(q, k, v, mask=masks.Causal(), score=Recent(), backend=backend)
        torch.testing.assert_close(z, expected)
