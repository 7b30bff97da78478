"""Which model `regard train` makes: a Llama, or a decoder with any mechanism of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError
from regard.models.assembly.mechanism import decoders, entry_of
from regard.models.families import family, llama, regard, type_of
from regard.nn.variants import VARIANTS
from regard.nn.variants.options import names, parse, required
from regard.process import seeded
from regard.train.losses import next_token_loss

KV_HEADS = 2
"""Key/value heads where they are not given."""
_ONLY = {"position": "--position", "window": "--window", "set": "--set"}


def config_of(options: Mapping[str, Any], vocab_size: int) -> Any:
    """The config of a family, from the command's options by name.

    Without `attention`, a Llama. With it, a decoder of our own: `kv_heads` is the mechanism's option `groups`, `window`
    is its own option where it has one, and `set` has the others as name=value.

    Raises:
        ArgumentError: a flag that the mechanism cannot take, by its name; or what the family's config refuses.

    >>> options = dict(dim=32, layers=2, heads=4, hidden=None, context=16, tie=False)
    >>> config_of({**options, "attention": "gqa", "kv_heads": 1, "window": 8}, 257).attention_options
    {'groups': 1}
    """
    o = options
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": o["dim"],
        "intermediate_size": o["hidden"] or -(-o["dim"] * 8 // 3 // 32) * 32,
        "num_hidden_layers": o["layers"],
        "num_attention_heads": o["heads"],
        "max_position_embeddings": o["context"],
        "tie_word_embeddings": o["tie"],
    }
    if o.get("attention") is None:
        for name, flag in _ONLY.items():
            if o.get(name):
                raise ArgumentError(
                    f"{flag} is for a mechanism of the catalogue; name one, such as --attention gqa"
                )
        groups = o.get("kv_heads") or KV_HEADS
        return llama.Config(**sizes, num_key_value_heads=groups, head_dim=o["dim"] // o["heads"])
    chosen, window = _options(o)
    position = o.get("position") or "catalogue"
    return regard.Config(
        **sizes,
        attention=o["attention"],
        attention_options=chosen,
        position=position,
        window=window,
    )


def model_of(config: Any, seed: int) -> nn.Module:
    """A fresh model of a config; the global random state is set to the seed.

    >>> config = config_of(dict(dim=32, layers=1, heads=4, hidden=None, context=16, tie=False), 257)
    >>> sum(p.numel() for p in model_of(config, 0).parameters())
    28832
    """
    found = family(type_of(config))
    assert found is not None
    torch.manual_seed(seed)
    return found.build(config)


def unreached(model: nn.Module, vocab_size: int, length: int) -> tuple[str, ...]:
    """The parameters that the loss on the next token has no gradient for: they stay as they were drawn.

    They choose what others read, such as the indexer of "dsa", which its paper trains by another loss.

    >>> config = config_of(dict(dim=32, layers=1, heads=4, hidden=None, context=16, tie=False), 257)
    >>> unreached(model_of(config, 0), 257, 8)
    ()
    """
    device = next(model.parameters()).device
    with seeded(None, [device] if device.type == "cuda" else ()):
        rows = torch.arange(length + 1, device=device)[None] % vocab_size
        next_token_loss(model, rows).backward()
    missed = tuple(name for name, p in model.named_parameters() if p.grad is None)
    model.zero_grad(set_to_none=True)
    return missed


def _options(o: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The mechanism's own options, and the window that is put over it."""
    name = o["attention"]
    entry = entry_of(name)
    own, chosen = names(entry), parse(o.get("set") or (), entry)
    for key, flag, value in (
        ("groups", "--kv-heads", o.get("kv_heads")), ("window", "--window", o.get("window")),
    ):  # fmt: skip
        if value is not None and key in chosen and chosen[key] != value:
            raise ArgumentError(f"{flag} is {value} and --set {key}={chosen[key]}; keep one")
        if value is not None and key in own:
            chosen[key] = value
        elif value is not None and key == "groups":
            able = [n for n in decoders() if key in names(VARIANTS[n])]
            raise ArgumentError(
                f"{flag} does not go with {name}, whose key/value heads are fixed; it goes with {', '.join(able)}"
            )
    if "groups" in required(entry):
        chosen.setdefault("groups", KV_HEADS)
    if missing := [n for n in required(entry) if n not in chosen]:
        raise ArgumentError(
            f"{name} needs {', '.join(missing)}: give {' '.join(f'--set {n}=...' for n in missing)}"
        )
    return chosen, None if "window" in own else o.get("window")
