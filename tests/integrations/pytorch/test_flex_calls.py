"""`flex_attention` under `accelerate` and `record`: equal to torch's eager function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

import regard
from regard.inspect import record
from regard.integrations.pytorch.flex_calls import convert_score_mod
from tests.rules import assert_close_rule

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")

T = 16
DOCUMENTS = torch.tensor([0] * 5 + [1] * 7 + [2] * 4)
LENGTHS = torch.tensor([12, 16])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < 3


def document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[q] == DOCUMENTS[k]


def padding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < LENGTHS[b]


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k < 3 + h) & (q >= k)


def later(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q > k  # the first query sees nothing


MASKS: dict[str, tuple[Any, str]] = {
    "none": (None, "full"),
    "causal": (causal, "causal"),
    "window": (and_masks(causal, window), "causal & window(3)"),
    "documents": (document, "document((0, 5, 12, 16))"),
    "causal documents": (and_masks(causal, document), "causal & document((0, 5, 12, 16))"),
    "padding": (padding, "padding((((0, 12),), ((0, 16),)))"),
    "heads": (
        by_head,
        "heads((causal & window(3), causal & window(4), causal & window(5), causal & window(6)))",
    ),
    "later": (later, "dense(1x1x16x16)"),
}


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, T, 8, dtype=dtype) for n in (4, 2, 2))
    return q, k, v


def make_mask(mask_mod: Any) -> BlockMask | None:
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, 2, 4, T, T, device="cpu")


class Flex(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_module.flex_attention(q, k, v, enable_gqa=True, **self.options)


@pytest.mark.full(keep=["documents"])
@pytest.mark.parametrize("name", MASKS)
def test_a_block_mask_means_what_torch_means_by_it(name: str) -> None:
    q, k, v = tensors()
    mask_mod, rule = MASKS[name]
    options = {"block_mask": make_mask(mask_mod), "return_aux": AuxRequest(lse=True)}
    plain, aux = Flex(**options)(q, k, v)
    exact, exact_aux = Flex(**options)(q.double(), k.double(), v.double())
    with regard.accelerate() as calls:
        z, ours = Flex(**options)(q, k, v)
    assert sum(calls.taken.values()) == 1, str(calls)
    assert not calls.left
    assert_close_rule(z, [plain, plain + 0], exact)
    assert_close_rule(ours.lse, aux.lse, exact_aux.lse, 4.0)
    found = record(Flex(block_mask=options["block_mask"]), q, k, v)
    assert str(found[0].steps[0].mask) == rule
    assert (found[0].H, found[0].G) == (4, 2)
    assert found.sound


def alibi(slopes: Tensor) -> Callable[..., Tensor]:
    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + slopes[h] * (k - q)

    return mod


@pytest.mark.full(keep=["True"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_score_mod_that_changes_scores_runs_here(masked: bool) -> None:
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    options: dict[str, Any] = {"block_mask": make_mask(window) if masked else None}
    options |= {"score_mod": alibi(slopes), "return_aux": AuxRequest(lse=True)}
    plain, aux = Flex(**options)(q, k, v)
    wide = options | {"score_mod": alibi(slopes.double())}
    exact, exact_aux = Flex(**wide)(q.double(), k.double(), v.double())
    with regard.accelerate() as calls:
        z, ours = Flex(**options)(q, k, v)
    assert not calls.left
    assert_close_rule(z, [plain, plain + 0], exact)
    assert_close_rule(ours.lse, aux.lse, exact_aux.lse, 4.0)


def test_the_gradients_of_a_score_mod() -> None:
    # torch 2.13 has no backward pass of flex_attention on a CPU
    q, k, v = (x.requires_grad_() for x in tensors(torch.float64))
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    with regard.accelerate() as calls:
        z = Flex(score_mod=alibi(slopes), block_mask=make_mask(causal))(q, k, v)
    assert not calls.left
    bias = slopes[:, None, None] * (torch.arange(T) - torch.arange(T)[:, None])
    bias = bias.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ keys.mT / 8**0.5 + bias
    exact = scores.softmax(-1) @ values
    draw = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ours = torch.autograd.grad(z, (q, k, v, slopes), draw)
    theirs = torch.autograd.grad(exact, (q, k, v, slopes), draw)
    for x, y in zip((z, *ours), (exact, *theirs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_score_mod_in_a_recording() -> None:
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    found = record(Flex(score_mod=alibi(slopes)), q, k, v)
    assert str(found[0].steps[0].score) == "fn(mod)"
    assert found.sound
    exact = q.double() @ k.double().repeat_interleave(2, 1).mT / 8**0.5
    exact += slopes.double()[:, None, None] * (torch.arange(T) - torch.arange(T)[:, None])
    assert (found.weights(0, head=3, batch=1) - exact.softmax(-1)[1, 3]).abs().max() < 1e-6


def test_what_is_not_done_here_is_handed_back_with_the_reason() -> None:
    q, k, v = tensors()

    def branches(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score if q > k else 2 * score

    with regard.accelerate() as calls, pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        Flex(score_mod=branches)(q, k, v)
    reason = "its score_mod cannot be mapped over all scores by torch.vmap (RuntimeError)"
    assert dict(calls.left) == {reason: 1}
    with regard.accelerate() as calls:
        Flex(score_mod=lambda score, b, h, q, k: score)(q, k, v)
    assert not calls.left


def test_a_score_mod_that_returns_its_argument_changes_nothing() -> None:
    def added(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score += 1
        return score

    def refused(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise ValueError

    assert convert_score_mod(lambda score, b, h, q, k: score) is None
    assert str(convert_score_mod(added)) == "fn(added)"
    assert str(convert_score_mod(refused)).endswith("(ValueError)")


def test_blocks_that_say_less_than_the_function_are_left_to_torch() -> None:
    blocks = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
        BLOCK_SIZE=8,
        seq_lengths=(T, T),
    )
    q, k, v = tensors()
    plain = Flex(block_mask=blocks)(q, k, v)
    with regard.accelerate() as calls:
        z = Flex(block_mask=blocks)(q, k, v)
    assert torch.equal(z, plain)
    assert [why.partition(",")[0] for why in calls.left] == [
        "the blocks of its BlockMask leave out keys that its mask_mod allows"
    ]


def test_a_mask_is_evaluated_again_when_its_tensors_change() -> None:
    q, k, v = tensors()
    limit = torch.tensor(9)

    def up_to(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < limit

    mask = make_mask(up_to)
    assert mask is not None
    results = []
    for n in (9, 9, 4):
        limit.fill_(n)
        if n == 4:
            mask = make_mask(up_to)
        with regard.accelerate(always=True) as calls:
            results.append(Flex(block_mask=mask)(q, k, v))
        assert not calls.left
    assert torch.equal(results[0], results[1])
    assert (results[2] - Flex(block_mask=mask)(q, k, v)).abs().max() < 1e-5
    assert not torch.equal(results[0], results[2])


@pytest.mark.full
def test_a_function_that_a_model_holds_compiled_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, backend="eager")
    q, k, v = tensors()
    mask = make_mask(causal)

    class Holds(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, block_mask=mask, enable_gqa=True)

    found = record(Holds(), q, k, v)
    assert str(found[0].steps[0].mask) == "causal"
    assert found.sound


def test_the_kernel_flex_still_calls_the_function_of_torch() -> None:
    q, k, v = tensors()
    with regard.accelerate(always=True) as calls:
        z = regard.attend(q, k, v, mask=regard.masks.Causal(), backend="flex")
    assert not calls.taken
    assert (z - regard.attend(q, k, v, mask=regard.masks.Causal())).abs().max() < 1e-5


def test_wrong_arguments_get_the_errors_of_torch() -> None:
    q, k, v = tensors()
    with regard.accelerate(), pytest.raises(ValueError, match="same number of heads"):
        flex_module.flex_attention(q, k, v)
    with regard.accelerate(), pytest.raises(ValueError, match="block_mask was created for"):
        Flex(block_mask=make_mask(causal))(q[:, :, :4], k, v)
