"""Published config.json files without their weights, and folders that are saved and read again:
what every family has.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import regard
from regard.configs.reader import parse
from regard.models.checkpoint.family import bind_names
from regard.models.checkpoint.weights import map_names as place
from regard.models.families import family
from regard.models.generation.decode_session import DecodeSession
from regard.models.model import Model
from regard.models.save import save
from tests.parity.families.harness import assert_near, ids_of

DATA = Path(__file__).parents[2] / "data" / "published_configs.json"
PUBLISHED: dict[str, dict[str, Any]] = json.loads(DATA.read_text("utf-8"))
"""Each file, or what differs from the file that it is like, and the parameters of the model, if the
test of them is not elsewhere.

Those of gemma-3-4b are the report's 3209M and the embedding's 262208 x 2560, without the 420M that
see; those of gemma-4-26B-A4B are transformers' on "meta" and its 30 numbers of layers; those of
opus-mt-en-de are the file's without two tables of sinusoids.
"""


def published(name: str) -> dict[str, Any]:
    """A config.json as it was published."""
    entry = PUBLISHED[name]
    return (published(entry["like"]) if "like" in entry else {}) | entry["config"]


def build(raw: dict[str, Any]) -> tuple[Any, nn.Module]:
    """The config of a config.json, and its model without memory."""
    found = family(raw["model_type"])
    config = parse(found.config, raw)
    with torch.device("meta"):
        return config, found.build(config)


def count(network: nn.Module) -> int:
    """Parameters, a shared one once."""
    return sum(p.numel() for p in network.parameters())


def layer(raw: dict[str, Any], network: nn.Module, number: int = 0) -> dict[str, tuple[int, ...]]:
    """Stored names of a layer, without what stands in front of them, and the shapes that a file
    must have.
    """
    found = family(raw["model_type"])
    parameters = dict(network.named_parameters(remove_duplicate=False))
    shapes = {}
    for name, binding in bind_names(network, found.names).items():
        front, _, rest = name.partition(f".{number}.")
        if rest and not any(part.isdigit() for part in front.split(".")):
            stored = binding.rule.pack([parameters[ours].detach() for ours in binding.parameters])
            shapes[rest] = tuple(stored.shape)
    return shapes


def placed(raw: dict[str, Any], network: nn.Module, *names: str) -> list[str | None]:
    """Where stored names go: the names of the table that they are found under."""
    found = family(raw["model_type"])
    known = bind_names(network, found.names)
    table = place(Path("folder"), names, found, known.__contains__).names
    return [table.get(name) for name in names]


def assert_saved(mine: Model, model: Any, folder: Path, *, start: int = 0) -> None:
    """Saving, loading and saving again gives the same bytes, and transformers reads what was
    saved.
    """
    first, second = folder / "first", folder / "second"
    for network, config, where in ((mine.decoder, mine.config, first), (None, None, second)):
        where.mkdir()
        if network is None:
            again = regard.load(first)
            network, config = again.decoder, again.config
        save(network, config, where)
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    read = (
        type(model)
        .from_pretrained(
            first,
            attn_implementation="eager",
            dtype=torch.float32,
            pad_token_id=model.config.pad_token_id,  # Phi 3's default is beyond a small vocabulary
        )
        .eval()
    )
    ids = ids_of(model)
    where = torch.arange(start, start + ids.shape[1])[None].expand(len(ids), -1)
    with torch.no_grad():
        old, new = (
            m(input_ids=ids, position_ids=where, use_cache=False).logits for m in (model, read)
        )
    assert torch.equal(old, new)


def assert_following(model: Any, folder: Path, change_at: int) -> Model:
    """Frequencies that follow the length: whole passes on both sides of the change, decoding across
    it, padded rows.

    Each row has the frequencies of its own length here, and those of the longest in transformers.
    """
    model.save_pretrained(folder)
    mine = regard.load(folder)
    ids = ids_of(model)

    def exact(rows: torch.Tensor) -> torch.Tensor:
        # a fresh copy: their dynamic frequencies remember the longest input so far
        return copy.deepcopy(model)(input_ids=rows, use_cache=False).logits

    for length in (change_at - 1, change_at, change_at + 1, ids.shape[1]):
        assert_near(mine(ids[:, :length]), exact(ids[:, :length]))
    prefix, context, at = regard.nn.PrefixRecomputer(mine.decoder), DecodeSession(mine.decoder), 0
    while at < ids.shape[1]:
        size = {0: 7, 7: 1, 8: 3}.get(at, 1)
        at += size
        want = exact(ids[:, :at])
        assert_near(prefix(ids[:, at - size : at]), want[:, -size:])
        assert_near(context.append(ids[:, at - size : at]), want[:, -1])  # what generation does
    assert prefix.reruns >= 1
    pad, length = 6, ids.shape[1]
    both = torch.cat([torch.cat([torch.full((1, pad), 2), ids[:1, :-pad]], 1), ids[1:]])
    positions = torch.stack([torch.arange(length) - pad, torch.arange(length)]).clamp(min=-1)
    found = mine(both, positions)
    assert_near(found[:1, pad:], exact(ids[:1, :-pad]))
    assert_near(found[1:], exact(ids[1:]))
    return mine
