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
from regard.errors import ArgumentError
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
    "heads": (by_head, "dense(1x4x16x16)"),
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


def test_what_is_not_done_here_is_handed_back_with_the_reason() -> None:
    q, k, v = tensors()

    def doubled(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 2 * score

    plain = Flex(score_mod=doubled)(q, k, v)
    with regard.accelerate() as calls:
        z = Flex(score_mod=doubled)(q, k, v)
        Flex(score_mod=lambda score, b, h, q, k: score)(q, k, v)
    assert torch.equal(z, plain)
    assert dict(calls.left) == {"its score_mod is a function that has no equivalent here": 1}
    assert sum(calls.taken.values()) == 1
    with pytest.raises(ArgumentError, match="its score_mod is a function that has no equivalent"):
        record(Flex(score_mod=doubled), q, k, v)


def test_a_score_mod_that_changes_its_argument_in_place_is_no_identity() -> None:
    def added(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score += 1
        return score

    def refused(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise ValueError

    assert convert_score_mod(added) is not None
    assert convert_score_mod(refused) is not None


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
