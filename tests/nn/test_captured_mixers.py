"""A step of every mechanism with a static cache can be captured: recorded on the pretended device,
and run again without Python. A mechanism that cannot says so.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.caches.base import StaticSize
from regard.caches.joined import Joined
from regard.caches.static import to_static
from regard.nn.mixer import Mixer
from tests.nn.catalogue import CAUSAL, example, tokens
from tests.pretended_device import SelectingKernel, pretended_cuda

PROMPT, T = 5, 17
"""Tokens that are read before, and all of them: three windows of the small examples."""

CHOOSES, EVICTS = (
    "depends on lengths or on the order of the slots",
    "Python counts the tokens of a row",
)
REFUSED = {
    **dict.fromkeys(
        ("infini", "infini_delta", "nsa", "moba", "quest", "msa", "dsa", "hca", "csa"), CHOOSES
    ),
    **dict.fromkeys(("qsa", "dsa_pools"), CHOOSES),
    **dict.fromkeys(
        ("h2o", "tova", "snapkv", "key_norm", "keydiff", "adakv", "expected_attention"), EVICTS
    ),
    "mrope": "coordinates of the last token",
}
"""The mechanisms that cannot, and words of the reason."""


def refusal(module: nn.Module) -> str | None:
    """The first reason of a part of a mechanism, or of its cache."""
    assert isinstance(module, Mixer)
    caches = [module.new_cache()]
    while isinstance(caches[0], Joined):
        caches[:1] = caches[0].parts
    reasons = [getattr(part, "static_step_refusal", None) for part in module.modules()]
    reasons += [cache.static_step_refusal for cache in caches]
    return next((x for x in reasons if x is not None), None)


def ordinary(module: nn.Module, x: Tensor) -> Tensor:
    """The outputs of the steps, on the CPU."""
    cache = module.new_cache()  # type: ignore[operator]
    module(x[:, :PROMPT], None, cache)
    return torch.cat([module(x[:, i : i + 1], None, cache) for i in range(PROMPT, T)], 1)


def captured(module: nn.Module, x: Tensor) -> Tensor:
    """The same from one captured step, on the pretended device."""
    found = []
    with pretended_cuda() as device, regard.register_kernel(SelectingKernel(device)):
        device.put_module(module)
        with device.reads():
            before = module.new_cache()  # type: ignore[operator]
            there = device.put(x)
            module(there[:, :PROMPT], None, before)
            size = StaticSize(T, len(x), there.device)
            (cache,) = to_static([before], size)
        given = device.put(x[:, PROMPT : PROMPT + 1].clone())
        first = module(given, None, cache)  # constants travel to the device
        replay, out = device.capture(lambda: module(given, None, cache))
        found.append(device.get(first).clone())
        for i in range(PROMPT + 1, T):
            given.copy_(device.put(x[:, i : i + 1]))
            replay()
            found.append(device.get(out).clone())
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.full(keep=["gqa", "gated_delta_net"])
def test_a_captured_step_of_a_mechanism(name: str) -> None:
    module, x = example(CAUSAL[name]), tokens(T)
    with torch.inference_mode():
        expected = ordinary(module, x)
        if (reason := refusal(module)) is not None:
            assert REFUSED[name] in reason
            return
        assert name not in REFUSED
        found = captured(copy.deepcopy(module), x)
    error = float((found - expected).abs().max())
    assert error <= 1e-10 * max(1.0, float(expected.abs().max()))
