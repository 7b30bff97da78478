"""The compiled step with caches that keep a window: rings, and rings behind sinks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard import masks
from regard.caches import Cache, Fixed, Growing, Ring, Streaming
from regard.models.decoder import Decoder
from tests.kernels import require_kernels
from tests.models.step_models import V, assert_contents, assert_same_contents, llama, step, why_not
from tests.rules import assert_close_rule

require_kernels()

WINDOW = masks.Causal() & masks.Window(7)
STREAM = masks.Causal() & (masks.Window(5) | masks.Sinks(2))
CASES: dict[str, tuple[masks.Mask, Cache]] = {
    "ring": (WINDOW, Ring(7)),
    "rewind": (WINDOW, Ring(7, rewind=3)),
    "sinks": (STREAM, Streaming(2, 5)),
}
IDS = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(1))


def new_caches(kind: str) -> list[Cache]:
    """A ring for the first layer, and all tokens for the others."""
    cache = CASES[kind][1]
    return [type(cache)(**cache.settings), Growing(), Fixed(64)]


def decode(decoder: Decoder, caches: list[Cache], first: int, *, backend: str = "auto") -> Tensor:
    with torch.inference_mode():
        step(decoder, IDS[:, :first], caches)
        steps = [
            step(decoder, IDS[:, t : t + 1], caches, backend) for t in range(first, IDS.shape[1])
        ]
    return torch.cat(steps, 1)


@pytest.mark.full(keep=["rewind-3", "sinks-12"])
@pytest.mark.parametrize("first", [3, 12])
@pytest.mark.parametrize("kind", CASES)
def test_rings_past_several_windows(kind: str, first: int, steps: list[int]) -> None:
    """Prompts shorter and longer than the window, then more than three windows; the layers hold
    different numbers of keys.
    """
    decoder = llama(H=8, G=4, mask=CASES[kind][0], layers=3, activation=nn.ReLU(), bias=True)
    caches, plain_caches = new_caches(kind), new_caches(kind)
    found = decode(decoder, caches, first)
    assert len(steps) == 40 - first
    plain = decode(decoder, plain_caches, first, backend="cpu")
    assert torch.equal(found, plain)
    assert_same_contents(caches, plain_caches)
    for one, other in zip(caches, plain_caches, strict=True):
        assert len(one) == len(other)
        assert one.next(1) == other.next(1)
    with torch.inference_mode():
        whole = decoder.double()(IDS)[:, first:]
    assert_close_rule(found, plain, whole)


def test_another_window_fails() -> None:
    """Negative control: a ring that keeps one key less than the mask sees."""
    decoder = llama(mask=WINDOW, layers=3)
    whole = decode(decoder, new_caches("ring"), 12)
    caches = new_caches("ring")
    caches[0] = Ring(6)
    assert not torch.allclose(decode(decoder, caches, 12), whole, rtol=1e-4, atol=1e-4)


def test_a_step_in_a_ring_is_undone_and_cropped(steps: list[int]) -> None:
    decoder = llama(mask=WINDOW, layers=3)
    caches = new_caches("rewind")
    decode(decoder, caches, 12)
    ring = caches[0]
    before = {k: x.clone() if isinstance(x, Tensor) else x for k, x in ring.contents().items()}
    mark, count = ring.mark(), len(steps)
    token = torch.tensor([[1], [2]])
    with torch.inference_mode():
        assert why_not(decoder, caches, 2) == []
        first = step(decoder, token, caches)
        assert len(steps) == count + 1
        ring.restore(mark)
        assert_contents(ring, before)
        caches[1].crop(40)
        caches[2].crop(40)
        assert torch.equal(step(decoder, token, caches), first)
        for cache in caches:
            cache.crop(38)
        again = [step(decoder, IDS[:, t : t + 1], caches) for t in (38, 39)]
        assert torch.equal(step(decoder, token, caches), first)
    assert len(again) == 2


def test_rows_with_different_positions_are_left_to_the_modules(steps: list[int]) -> None:
    decoder = llama(mask=WINDOW, layers=3)
    caches = new_caches("ring")
    positions = torch.tensor([[-1, 0, 1], [0, 1, 2]])
    with torch.inference_mode():
        decoder(IDS[:, :3], positions, caches)
        (said,) = why_not(decoder, caches, 2)
        step(decoder, IDS[:, 3:4], caches)
    assert "the Ring cache of layer 0 opens no slot" in said
    assert steps == []
