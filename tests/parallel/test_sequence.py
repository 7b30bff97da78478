"""Unchanged models on a sequence that lies on several ranks equal one process."""

from __future__ import annotations

import shutil
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.caches import Cache
from regard.parallel import spawn
from regard.span import Span
from tests.parallel import sequence_ranks
from tests.parallel.ranks import LENGTHS, S
from tests.parallel.sequence_ranks import MECHANISMS, hidden_states, mechanism, prompt
from tests.rules import GRADIENT, assert_close_rule, in_orders

QUICK = [("gqa", "zigzag"), ("retention", "zigzag"), ("infini", "uneven"), ("learned_sink", "even")]
ALL = [(name, lengths) for name in MECHANISMS for lengths in LENGTHS]


def forward_and_backward(module: nn.Module, chunks: int) -> list[Tensor]:
    """Output and gradients of one process, which reads the sequence in chunks."""
    dtype = next(module.parameters()).dtype
    x = hidden_states().to(dtype).requires_grad_()
    if chunks == 1:
        z = module(x)
    else:
        cache: Cache = module.new_cache()
        z = torch.cat([module(part, None, cache) for part in x.chunk(chunks, 1)], 1)
    loss = (z * hidden_states(1).to(dtype)).sum()
    gradients = torch.autograd.grad(loss, [x, *module.parameters()], allow_unused=True)
    found = [torch.zeros_like(p) for p in (x, *module.parameters())]
    return [z.detach(), *(y if g is None else g for g, y in zip(gradients, found, strict=True))]


@cache
def references(name: str) -> tuple[list[list[Tensor]], list[Tensor]]:
    """What one process computes in several orders, and what is exact."""
    usual = [
        run
        for chunks in (1, 2, 3, 4, 6)
        for run in in_orders(partial(forward_and_backward, mechanism(name), chunks))
    ]
    return usual, forward_and_backward(mechanism(name, torch.float64), 1)


@pytest.mark.parametrize(
    "W, cases, recompute",
    [
        (2, QUICK, False),
        pytest.param(2, QUICK, True, marks=pytest.mark.full),
        pytest.param(2, ALL, False, marks=pytest.mark.full),
        pytest.param(3, ALL, False, marks=pytest.mark.full),
    ],
    ids=["quick", "recomputed", "two ranks", "three ranks"],
)
def test_mechanisms(W: int, cases: list[tuple[str, str]], recompute: bool) -> None:
    results = spawn(sequence_ranks.mechanisms_over_ranks, W, cases, recompute)
    for n, (name, lengths) in enumerate(cases):
        usual, exact = references(name)
        shards = LENGTHS[lengths](W)
        whole = [shards.join([rank[n][i] for rank in results], 1) for i in range(2)]
        gradients = zip(*(rank[n][2] for rank in results), strict=True)
        whole += [torch.stack(parts).sum(0) for parts in gradients]
        for i, x in enumerate(whole):
            assert_close_rule(
                x,
                [run[i] for run in usual],
                exact[i],
                factor=GRADIENT if i else 2.0,
                what=f"{name}, {lengths}, result {i}",
            )


def test_a_state_that_is_not_passed_on_is_noticed() -> None:
    """The negative control of the test above: the second half begins with an empty state."""
    exact = forward_and_backward(mechanism("retention", torch.float64), 1)[0]
    usual = forward_and_backward(mechanism("retention"), 1)[0]
    module, halves = mechanism("retention"), hidden_states().chunk(2, 1)
    with torch.no_grad():
        z = torch.cat([module(halves[0]), module(halves[1], Span(S // 2, S // 2))], 1)
    with pytest.raises(AssertionError):
        assert_close_rule(z, usual, exact)


def tiny_in_one_process(dtype: torch.dtype, chunks: int, steps: int) -> list[Tensor]:
    """Logits of the prompt and of each next token."""
    model = regard.load("tiny")
    model.decoder.to(dtype)
    caches = model.decoder.new_caches()
    with torch.no_grad():
        parts = [model(ids, None, caches) for ids in prompt().chunk(chunks, 1)]
        steps_logits = [model(torch.tensor([[7 + i]]), None, caches) for i in range(steps)]
    return [torch.cat(parts, 1), *steps_logits]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("W, lengths", [(2, "zigzag"), (3, "even"), (3, "uneven")])
def test_a_model_reads_a_prompt_and_decodes_over_ranks(W: int, lengths: str) -> None:
    steps = 4
    results = spawn(sequence_ranks.decode_tiny, W, lengths, steps)
    exact = tiny_in_one_process(torch.float64, 1, steps)
    usual = [tiny_in_one_process(torch.float32, chunks, steps) for chunks in (1, 2, 3)]
    shards = LENGTHS[lengths](W)
    whole = shards.join([rank[0] for rank in results], 1)
    assert_close_rule(whole, [run[0] for run in usual], exact[0])
    for i in range(steps):
        for rank in results:
            assert_close_rule(rank[1][i], [run[1 + i] for run in usual], exact[1 + i])
    stored = [rank[2] for rank in results]
    assert [sum(x) for x in zip(*stored, strict=True)] == [S + 1 + i for i in range(steps)]
    assert stored[S % W][0] == shards.count(S % W) + 1  # the ranks take new tokens in turns


@pytest.mark.full
@pytest.mark.parametrize("lengths", ["even", "zigzag"])
def test_a_model_of_transformers(lengths: str) -> None:
    pytest.importorskip("transformers")
    results = spawn(sequence_ranks.llama_over_ranks, 2, lengths)
    runs = {}
    for dtype in (torch.float32, torch.float64):
        model = sequence_ranks.llama(dtype)
        logits = model(prompt() % 64).logits
        logits.sin().sum().backward()
        runs[dtype] = [logits.detach(), *(p.grad for p in model.parameters())]
    whole = [LENGTHS[lengths](2).join([rank[0] for rank in results], 1)]
    whole += [
        torch.stack([rank[1][j] for rank in results]).sum(0) for j in range(len(results[0][1]))
    ]
    for i, x in enumerate(whole):
        factor = GRADIENT if i else 2.0
        assert_close_rule(x, runs[torch.float32][i], runs[torch.float64][i], factor=factor)


@pytest.mark.full
def test_weights_that_fsdp_cuts_among_the_same_ranks() -> None:
    results = spawn(sequence_ranks.sharded_weights_over_ranks, 2, "zigzag")
    usual = forward_and_backward(mechanism("gqa"), 1)
    exact = forward_and_backward(mechanism("gqa", torch.float64), 1)
    z = LENGTHS["zigzag"](2).join([rank[0] for rank in results], 1)
    assert_close_rule(z, usual[0], exact[0])
    for _, gradients in results:
        for x, plain, reference in zip(gradients, usual[2:], exact[2:], strict=True):
            assert_close_rule(x, plain, reference, factor=GRADIENT)


@pytest.mark.full
def test_weights_that_fsdp_cuts_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    whole = spawn(sequence_ranks.train_sharded_weights, 2, str(tmp_path / "whole"), 0, 4)[0]
    first = spawn(sequence_ranks.train_sharded_weights, 2, str(tmp_path / "cut"), 0, 2)[0]
    for W in (2, 3):
        folder = tmp_path / str(W)
        shutil.copytree(tmp_path / "cut", folder)
        read = spawn(sequence_ranks.train_sharded_weights, W, str(folder), 2, 2)[0]
        for x, saved in zip(read, first, strict=True):
            assert torch.equal(x, saved)  # the state does not depend on the number of ranks
        for x, reference in zip(
            spawn(sequence_ranks.train_sharded_weights, W, str(folder), 2, 4)[0], whole, strict=True
        ):
            if W == 2:
                assert torch.equal(x, reference)
            else:  # another number of ranks adds in another order
                torch.testing.assert_close(x, reference)
    assert not torch.equal(first[0], whole[0])


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("lengths", ["zigzag", "even"])
def test_a_module_that_calls_the_function_of_torch(lengths: str) -> None:
    results = spawn(sequence_ranks.accelerated_over_ranks, 2, lengths)
    runs = {}
    for dtype in (torch.float32, torch.float64):
        module = sequence_ranks.plain_attention(dtype)
        z = module(hidden_states().to(dtype), torch.arange(S)[None])
        (z * hidden_states(1).to(dtype)).sum().backward()
        runs[dtype] = [z.detach(), *(p.grad for p in module.parameters())]
    whole = [LENGTHS[lengths](2).join([rank[0] for rank in results], 1)]
    gradients = zip(*(rank[1] for rank in results), strict=True)
    whole += [torch.stack(parts).sum(0) for parts in gradients]
    for i, x in enumerate(whole):
        factor = GRADIENT if i else 2.0
        assert_close_rule(x, runs[torch.float32][i], runs[torch.float64][i], factor=factor)
    for _, _, texts in results:
        for text, words in zip(
            texts, ["fused inference path", "must be causal", "only self-attention"], strict=True
        ):
            assert words in text


EXPECTED = {
    "no positions": "Attention got no positions",
    "other positions": "must give the model its tokens at the positions of its shard",
    "no attend": "NSA cannot run over several ranks",
    "dropout": "dropout over several ranks",
    "a score rule": "the score rule topk(2) cannot run over several ranks",
    "weights": "attention_weights sees the keys of this rank only",
    "a cache of a state": "and no cache",
    "a pattern": "scores and patterns cannot be captured",
    "a partial": "attend_partial cannot run inside regard.parallel.sequence",
    "a gradient of a new token": "decode computes no gradients",
    "cross-attention": "CrossAttention cannot run over several ranks",
}


def test_what_cannot_run_over_ranks_is_refused_by_name() -> None:
    for texts in spawn(sequence_ranks.refusals, 2):
        for name, text in EXPECTED.items():
            assert text in texts[name], f"{name}: {texts[name]}"


def test_ranks_that_run_different_layers_are_told() -> None:
    for text in spawn(sequence_ranks.different_layers, 2):
        assert "the ranks differ in the mechanism" in text
