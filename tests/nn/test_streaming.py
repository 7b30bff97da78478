"""StreamingLLM against the paper's procedure, token by token: evict, number the slots from 0,
rotate, attend.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.caches import Growing, Streaming
from regard.nn import Attention, HeadProjection, SeparateQKV, StreamingAttention
from regard.nn.variants import streaming
from regard.positions import DynamicNTK, Rotary, YaRN
from regard.span import Span
from tests.nn.catalogue import random
from tests.oracles import infini as oracle
from tests.rules import assert_close_rule, assert_refused


def build(sinks: int = 2, recent: int = 5, rotary: Rotary | None = None, **options: Any) -> Any:
    rotary = Rotary(6) if rotary is None else rotary
    project = SeparateQKV(
        HeadProjection(12, 4, 6, rotary), HeadProjection(12, 2, 6, rotary), HeadProjection(12, 2, 5)
    )
    module = StreamingAttention(
        project, nn.Linear(20, 12), sinks=sinks, recent=recent, **options
    ).double()
    return random(module).requires_grad_(False)


def tokens(B: int = 2, T: int = 24) -> Tensor:
    return torch.randn(B, T, 12, dtype=torch.float64) * 0.5


def by_hand(module: Any, x: Tensor, sinks: int, recent: int, **wrong: bool) -> Tensor:
    """From the weights alone."""
    rows = []
    for row in x:
        q, k, v = (
            (row @ part.linear.weight.T).unflatten(-1, (part.heads, part.head_dim))
            for part in (module.project.q, module.project.k, module.project.v)
        )
        z = oracle.streaming(q, k, v, sinks, recent, 10000.0, **wrong)
        rows.append(z.flatten(1) @ module.output.weight.T + module.output.bias)
    return torch.stack(rows)


def near(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) < 1e-11  # sums of some dozen products of weights of size 1


@pytest.mark.full(keep=2)
@pytest.mark.parametrize(("sinks", "recent"), [(2, 5), (1, 1), (0, 4), (3, 8), (4, 30)])
def test_is_the_procedure_of_the_paper(sinks: int, recent: int) -> None:
    module, x = build(sinks, recent), tokens()
    exact = by_hand(module, x, sinks, recent)
    assert near(module(x), exact)
    assert near(module(x, torch.arange(24)[None]), exact)
    for cache in (module.new_cache(), Growing()):
        steps = [module(x[:, t : t + 1], cache=cache) for t in range(24)]
        assert near(torch.cat(steps, 1), exact)


def test_what_it_is_not() -> None:
    """Negative controls: positions as they were, a window more or less, a sink more or less, no
    sinks.
    """
    module, x = build(), tokens()
    right, exact = module(x), by_hand(module, x, 2, 5)
    wrongs = [by_hand(module, x, 2, 5, original=True)]
    wrongs += [by_hand(module, x, *sizes) for sizes in ((2, 6), (2, 4), (3, 5), (1, 5), (0, 7))]
    original = Attention(module.project, module.output, mask=module.mask)
    assert near(original(x), wrongs[0]), "the mask alone leaves positions as they were"
    for wrong in wrongs:
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(wrong, right, exact)


def test_a_trace_sees_one_pattern() -> None:
    module, x = build(softcap=3.0), tokens()
    out = module(x)
    with regard.Trace("pattern", "v", "z") as trace:
        assert near(module(x), out)
    pattern, v = trace["pattern"], trace["v"].repeat_interleave(2, 1)
    assert near(pattern.sum(-1), torch.ones(2, 4, 24))
    assert near(pattern @ v, trace["z"])
    seen = module.mask.block(Span(0, 24), Span(0, 24)).expand(2, 4, -1, -1)
    assert torch.equal(pattern > 0, seen)


def test_scale_softcap_and_a_learned_sink_are_passed_on() -> None:
    """Against the doubled dims of a trace, which is one softmax, and with a sink that takes all."""
    x = tokens()
    for options in ({"scale": 0.3}, {"softcap": 0.5}, {"sink": nn.Parameter(torch.zeros(4))}):
        module, usual = build(**options), build()
        with regard.Trace("pattern"):
            one = module(x)
        assert near(module(x), one)
        assert not near(module(x), usual(x))
    module.sink.data.fill_(1e4)
    assert torch.equal(module(x), module.output.bias.expand_as(x))


def test_a_rotary_with_a_factor_turns_back_without_it() -> None:
    """YaRN multiplies cos and sin; turning back must not do so again."""
    rotary = Rotary(6, scaling=YaRN(4.0, 8))
    assert rotary.rotary_factor != 1
    module, x = build(rotary=rotary), tokens(1, 12)
    q, k, v = (part.linear(x) for part in (module.project.q, module.project.k, module.project.v))
    q, k, v = (y.unflatten(-1, (n, -1)).transpose(1, 2) for y, n in ((q, 4), (k, 2), (v, 2)))
    kept = [0, 1, 7, 8, 9, 10, 11]
    z = regard.attend(
        rotary(q[:, :, 11:], Span(6, 1)), rotary(k[:, :, kept], Span(0, 7)), v[:, :, kept]
    )
    exact = module.output(z.transpose(1, 2).flatten(2))
    assert near(module(x)[:, 11:], exact)


def test_what_it_costs() -> None:
    module = streaming(64, 8, groups=2, sinks=4, recent=20)
    told = module.describe(1000)
    assert (told.kv_per_token.value, told.kv_tokens.value) == (2 * 2 * 8, 24)
    matrices = 64 * 64 * 2 + 64 * 16 * 2
    assert told.flops_per_token.value == 2 * matrices + 8 * 24 * 2 * (8 + 8)
    cache = module.new_cache()
    assert isinstance(cache, Streaming)
    module(torch.randn(1, 100, 64), cache=cache)
    assert cache.bytes == 4 * told.cached_values


def test_errors() -> None:
    follows = Rotary(6, scaling=DynamicNTK(2.0, 8), length="current")
    rotary = Rotary(6)

    def other(q: list[nn.Module], k: list[nn.Module], **options: Any) -> StreamingAttention:
        project = SeparateQKV(
            HeadProjection(12, 4, 6, *q),
            HeadProjection(12, 2, 6, *k),
            HeadProjection(12, 2, 5),
            **options,
        )
        return StreamingAttention(project, nn.Linear(20, 12), sinks=1, recent=2)

    same = "both must be the same Rotary object, which rotates queries back for the sinks"
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: build(-1), regard.ArgumentError, "sinks is -1; it must be 0 or more"),
        (lambda: build(1, 0), regard.ArgumentError, "recent is 0; it must be 1 or more: a query"),
        (lambda: build(1.5), regard.ArgumentTypeError, "sinks is float 1.5; it must be an int, 0"),
        (lambda: build(softcap=0.0), regard.ArgumentError, "softcap is 0.0"),
        (lambda: build(rotary=follows), regard.ArgumentError, "give it a fixed length=<number>"),
        (
            lambda: other([], []),
            regard.ArgumentError,
            f"the last step on queries is None, and on keys None; {same}",
        ),
        (lambda: other([rotary], [Rotary(6)]), regard.ArgumentError, same),
        (
            lambda: other([rotary, nn.Identity()], [rotary]),
            regard.ArgumentError,
            (
                "the last step on queries is Identity(), and on keys Rotary(6, base=10000.0, "
                f"layout='half'); {same}"
            ),
        ),
        (
            lambda: other([rotary], [rotary], key_transform=rotary),
            regard.ArgumentError,
            "project has key_transform=Rotary",
        ),
        (
            lambda: StreamingAttention(nn.Identity(), nn.Identity(), sinks=1, recent=2),  # type: ignore[arg-type]
            regard.ArgumentTypeError,
            "project is Identity; it must be a SeparateQKV",
        ),
    ]
    assert_refused(cases)
