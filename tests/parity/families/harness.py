"""A whole model of transformers beside ours with the same weights: the checks that every family
has.

The model is made small and random by transformers, saved by it as a folder, and loaded by
`regard.load`: config, names, layouts and computation are compared at once, on logits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import regard
from regard.errors import FileError
from regard.models.model import Model
from regard.span import Span
from tests.parity.layers import FAR, assert_far, assert_near, distance

__all__ = ["FAR", "assert_far", "assert_near", "distance"]  # of the layers' harness
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="parity needs the transformers extra")

LENGTH = 40
"""Tokens of the comparisons: windows are less than a third of it."""


def theirs(
    name: str,
    config: dict[str, Any],
    *,
    seed: int = 3,
    head: str = "ForCausalLM",
    kind: str = "Config",
) -> Any:
    """A small random model: `<name><kind>` and `<name><head>`, every parameter drawn, norms, biases
    and sinks, too.
    """
    made = getattr(transformers, f"{name}{kind}")(**config)
    made._attn_implementation = "eager"
    model = getattr(transformers, f"{name}{head}")(made).eval().requires_grad_(False)
    draw(model, seed)
    return model


def draw(model: nn.Module, seed: int) -> None:
    """Norm weights around 1 (and around 0 where 1 is added), matrices such that nothing saturates,
    biases that matter.
    """
    make = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=make)
        if parameter.ndim == 1:
            was_one = bool((parameter == 1).all())
            parameter.data.copy_(was_one + 0.3 * noise)
        else:
            parameter.data.copy_(noise * parameter.shape[-1] ** -0.5)


def saved(model: Any, folder: Path) -> Path:
    """The model as transformers writes it."""
    model.save_pretrained(folder)
    return folder


def assert_refused(
    folder: Path, message: str, tensors: Mapping[str, Tensor] | None = None, **keys: Any
) -> None:
    """A folder with these tensors, and for this once with other keys in its config.json, does not
    load.
    """
    config = folder / "config.json"
    raw = config.read_text()
    if tensors is not None:
        save_file(dict(tensors), folder / "model.safetensors")
    config.write_text(json.dumps(json.loads(raw) | keys))
    with pytest.raises(FileError, match=message):
        regard.load(folder)
    config.write_text(raw)


def without(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors whose names do not contain a part."""
    return {name: x for name, x in tensors.items() if part not in name}


def assert_generates(model: Any, folder: Path, *options: dict[str, Any]) -> Model:
    """Chunked prompts with each of some options, copied prefixes, batches and beams give what
    transformers generates.
    """
    saved(model, folder)
    regard.load("tiny").tokenizer.save(folder)
    mine = regard.load(folder)
    text, more = "def add(a, b):", " return a"
    ids = mine.encode(text + more)
    with torch.no_grad():
        whole = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    wanted = mine.tokenizer.decode(whole[0, ids.shape[1] :].tolist())
    for more_options in options or ({},):
        pieces = mine.generate(text + more, max_tokens=8, chunk=3, **more_options)
        assert "".join(pieces) == wanted
    prefix = mine.cache_prefix(text)
    for _ in range(2):  # the prefix is copied, not changed
        assert "".join(mine.generate(more, max_tokens=8, prefix=prefix)) == wanted
    pieces = mine.generate([text + more, "x"], max_tokens=8)
    assert "".join(piece for row, piece in pieces if row == 0) == wanted
    assert mine.beam_search(text + more, beams=1, max_tokens=8)[0].text == wanted
    return mine


def ids_of(model: Any, batch: int = 2, length: int = LENGTH, seed: int = 5) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randint(
        3, model.config.get_text_config().vocab_size, (batch, length), generator=make
    )


def assert_decoder(model: Any, folder: Path, *, start: int = 0, length: int = LENGTH) -> Model:
    """Prefill, ragged chunks, decode token by token, left-padded rows with explicit positions, rows
    alone.

    Args:
        model: of transformers; it is saved to the folder and loaded from there.
        folder: an empty one.
        start: the position of the first token: rotary mistakes are invisible at 0.
        length: how many tokens.
    """
    mine = regard.load(saved(model, folder))
    ids = ids_of(model, length=length)
    where = torch.arange(start, start + length)[None].expand(len(ids), -1)
    positions = {} if start == 0 else {"position_ids": where}
    exact = model(input_ids=ids, use_cache=False, **positions).logits
    assert_near(mine(ids, Span(start, length)), exact)
    for sizes in ([7, 1, 13, length - 21], [5] + [1] * (length - 5)):
        caches, found, at = mine.new_caches(), [], 0
        for size in sizes:
            found.append(mine(ids[:, at : at + size], Span(start + at, size), caches))
            at += size
        assert_near(torch.cat(found, 1), exact)
    _assert_padded(mine, model, ids, length)
    assert_near(mine(ids[1:], Span(start, length)), exact[1:])
    return mine


def _assert_padded(mine: Model, model: Any, ids: Tensor, length: int) -> None:
    """Row 0 has 6 slots of padding in front: each row is what it is alone, whole and with a
    cache.
    """
    pad = 6
    row = torch.cat([torch.full((1, pad), 2), ids[:1, :-pad]], 1)
    where = torch.cat([torch.full((1, pad), -1), torch.arange(length - pad)[None]], 1)
    both = torch.cat([row, ids[1:]])
    positions = torch.cat([where, torch.arange(length)[None]])
    alone = [model(input_ids=x, use_cache=False).logits for x in (ids[:1, :-pad], ids[1:])]
    found = mine(both, positions)
    assert_near(found[:1, pad:], alone[0])
    assert_near(found[1:], alone[1])
    caches = mine.new_caches()
    parts = [mine(both[:, :17], positions[:, :17], caches)]
    parts += [mine(both[:, i : i + 1], positions[:, i : i + 1], caches) for i in range(17, length)]
    found = torch.cat(parts, 1)
    assert_near(found[:1, pad:], alone[0])
    assert_near(found[1:], alone[1])


def assert_differs(
    mine: Model, model: Any, change: Callable[[nn.Module], Any], *, start: int = 0
) -> None:
    """A wrong variant: after `change` of a copy of our network, the logits are far from theirs."""
    import copy

    ids = ids_of(model)
    where = torch.arange(start, start + LENGTH)[None].expand(len(ids), -1)
    exact = (
        model(input_ids=ids, use_cache=False, position_ids=where).logits
        if start
        else model(input_ids=ids, use_cache=False).logits
    )
    network = copy.deepcopy(mine.decoder)
    replaced = change(network)
    network = replaced if isinstance(replaced, nn.Module) else network
    assert_far(network(ids, Span(start, LENGTH)), exact)
