"""More contracts of the cache of every mechanism in the catalogue: what is cropped, saved and
loaded, and read in chunks of low precision, goes on as if nothing had happened.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from regard.caches import Growing, load, save
from regard.errors import ArgumentError
from tests.nn.catalogue import CAUSAL, example, tokens
from tests.nn.test_catalogue import T, assert_close, forward, in_chunks
from tests.rules import assert_close_rule


@pytest.mark.full(keep=11)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_cropped_cache_goes_on_or_refuses_and_stays(name: str) -> None:
    module, x, y = example(CAUSAL[name]), tokens(T), tokens(T, seed=1)
    cache, kept, refusal = module.new_cache(), 5, ""
    with torch.no_grad():
        module(x[:, :9], None, cache)
        try:
            cache.crop(kept)
        except ArgumentError as error:
            kept, refusal = 9, str(error)
        assert not (refusal and isinstance(cache, Growing)), "it holds every token"
        assert not refusal or len(refusal) > 40, "it says why, and what to do instead"
        assert_close(
            module(y[:, kept:], None, cache),
            forward(module, torch.cat([x[:, :kept], y[:, kept:]], 1))[:, kept:],
            name,
        )


@pytest.mark.full(keep=11)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_saved_cache_goes_on(name: str, tmp_path: Path) -> None:
    module, x = example(CAUSAL[name]), tokens(T)
    cache = module.new_cache()
    with torch.no_grad():
        module(x[:, :9], None, cache)
        save(cache, tmp_path / "cache")
        again = load(tmp_path / "cache")
        assert type(again) is type(cache)
        assert torch.equal(module(x[:, 9:], None, again), module(x[:, 9:], None, cache))


@pytest.mark.full(keep=11)
@pytest.mark.parametrize("name", CAUSAL)
def test_chunks_in_low_precision(name: str) -> None:
    """The error of bf16 in chunks, the last of single tokens, is that of one plain pass."""
    x, module = tokens(T, dtype=torch.bfloat16), example(CAUSAL[name], dtype=torch.bfloat16)
    wide = copy.deepcopy(module).double()
    with torch.no_grad():
        plain = module(x, backend="reference")
        found = in_chunks(module, x, [7, 5, 1, 1, 1, 1, 1], module.new_cache())
        assert_close_rule(found, [plain], wide(x.double()), what=name)
    assert found.dtype == torch.bfloat16
