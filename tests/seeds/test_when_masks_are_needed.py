"""When decoding, padding and training need a mask: two of the notes contradict each other here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard.caches import Cache, Fixed, Growing, Ring
from regard.masks import Causal, Mask, Window
from regard.nn.variants import mha
from regard.span import Span, as_tensor


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64)


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).detach().abs().max())


def decoded(cache: Cache, steps: list[int], mask: Mask) -> tuple[Tensor, Tensor]:
    """The last of these steps with mask and positions, and as if every slot that the cache gave
    were a token to see.
    """
    module = mha(8, 2).double()
    at = 0
    for x in draw(2, sum(steps), 8, scale=2).split(steps, 1):
        where = Span(at, x.shape[1])
        memory, held = cache.update(module.project.remember(x, where), where)
        at += x.shape[1]
    q, (k, v) = module.project.query(x, where), module.project.recall(memory, held)
    right = regard.attend(q, k, v, mask=mask, q_positions=where, k_positions=held)
    empty = (as_tensor(held, q.device) < 0)[:, None, :, None]
    k, v = (t.masked_fill(empty, 0) for t in (k, v))  # what a fresh buffer holds
    return right, regard.attend(q, k, v)


WINDOW = Causal() & Window(4)
CASES: dict[str, tuple[Callable[[], Cache], list[int], Mask, bool]] = {
    # name: cache, steps, the right mask, is the last step right with no mask at all?
    "one query, exact cache": (Growing, [6, 1], Causal(), True),
    "one query, the filled slots of a buffer": (lambda: Fixed(16), [6, 1], Causal(), True),
    "one query, a ring of the window alone": (lambda: Ring(4), [9, 1], WINDOW, True),
    "one query, a ring that is not yet full": (lambda: Ring(8), [3, 1], Causal() & Window(8), True),
    "a draft of three tokens": (Growing, [6, 3], Causal(), False),
    "a prompt in chunks": (Growing, [4, 4, 4], Causal(), False),
    "a window, all keys kept": (Growing, [9, 1], WINDOW, False),
    "a full ring with room to rewind": (lambda: Ring(4, rewind=3), [9, 1], WINDOW, False),
}


@pytest.mark.parametrize("name", CASES)
def test_when_a_step_needs_its_mask(name: str) -> None:
    make, steps, mask, needless = CASES[name]
    right, bare = decoded(make(), steps, mask)
    if needless:
        assert torch.equal(bare, right), "the same to the last bit"
    else:
        assert apart(bare, right) > 0.05


def test_the_empty_slots_of_a_buffer_need_their_positions() -> None:
    q, k, v = draw(1, 2, 1, 8), draw(1, 2, 16, 8), draw(1, 2, 16, 8)
    k[:, :, 7:], v[:, :, 7:] = 0, 0
    slots = torch.arange(16)[None]
    right = regard.attend(q, k[:, :, :7], v[:, :, :7])
    told = regard.attend(
        q, k, v, k_positions=torch.where(slots < 7, slots, -1), q_positions=Span(6, 1)
    )
    assert apart(told, right) <= 1e-15
    assert apart(regard.attend(q, k, v), right) > 0.05, "zeros are keys too"


def test_left_padding_needs_its_positions() -> None:
    module, x = mha(8, 2, is_causal=True).double(), draw(1, 5, 8, scale=2)
    padded = torch.cat([draw(1, 3, 8, scale=2), x], 1)
    where = torch.tensor([[-1, -1, -1, 0, 1, 2, 3, 4]])
    assert apart(module(padded, where)[:, 3:], module(x)) <= 1e-14
    assert apart(module(padded)[:, -1:], module(x)[:, -1:]) > 0.05


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_without_a_cache_one_layer_hides_the_missing_mask_and_two_show_it(layers: int) -> None:
    stack = [mha(8, 2, is_causal=True).double() for _ in range(layers)]
    x = draw(1, 12, 8, scale=4)

    def last(mask: Mask | None) -> Tensor:
        y = x
        for module in stack:
            module.mask = mask
            y = y + 4 * module(y)
        return y[:, -1]

    if layers == 1:
        assert apart(last(None), last(Causal())) <= 1e-13
    else:
        assert apart(last(None), last(Causal())) > 1, "a difference of order 1"


def test_training_is_where_a_language_model_needs_its_mask() -> None:
    """Without it the answer stands in the input: row t depends on what comes behind t."""
    module, x = mha(8, 2).double(), draw(1, 6, 8)

    def leak(mask: Mask | None) -> float:
        module.mask = mask
        (slope,) = torch.autograd.grad(module(x.requires_grad_())[0, 2].sum(), x)
        return float(slope[0, 3:].abs().max())

    assert leak(None) > 1e-3
    assert leak(Causal()) == 0
