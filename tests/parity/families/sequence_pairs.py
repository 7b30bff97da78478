"""A model that reads a source and writes a target, of transformers, beside ours with its weights:
the checks that every such family has.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard.models.save import save
from regard.models.seq2seq import Seq2Seq
from tests.parity.families.harness import assert_far, assert_near, saved, transformers


class Pair:
    """A model of theirs, ours with its weights, sources and targets.

    Args:
        model: of transformers.
        folder: where it is saved.
        lengths: of sources and of targets.
        least: the first id of a text.
        wide: whether theirs answers in fp64.
    """

    def __init__(
        self,
        model: Any,
        folder: Path,
        lengths: tuple[int, int],
        *,
        least: int = 3,
        wide: bool = False,
    ) -> None:
        self.theirs = model
        self.mine = regard.load(saved(model, folder), kind=Seq2Seq)
        self.judge = copy.deepcopy(model).double() if wide else model
        make = torch.Generator().manual_seed(7)
        self.source, self.target = (
            torch.randint(least, 96, (3, length), generator=make) for length in lengths
        )

    def exact(self, source: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        found: Tensor = self.judge(
            input_ids=self.source if source is None else source,
            decoder_input_ids=self.target if target is None else target,
            use_cache=False,
        ).logits
        return found

    def wrong(self, change: Callable[[Any], None]) -> Tensor:
        """Our logits after a change of a copy."""
        network: Any = copy.deepcopy(self.mine.network)
        change(network)
        found: Tensor = network(self.source, self.target)
        return found


def assert_logits(pair: Pair, *chunks: Sequence[int]) -> None:
    """Whole, in rows alone, and the decoder in any chunks."""
    mine, exact = pair.mine, pair.exact()
    assert_near(mine(pair.source, pair.target), exact)
    assert_near(mine(pair.source, pair.target, backend="reference"), exact)
    assert_near(mine(pair.source[1:2], pair.target[1:2]), exact[1:2])
    for sizes in chunks:
        caches, found, at = mine.network.new_caches(), [], 0
        memory = mine.network.run_encoder(pair.source)
        for size in sizes:
            given = {} if at else {"memory": memory}
            found.append(mine.network.run_decoder(pair.target[:, at : at + size], caches, **given))
            at += size
        assert at == pair.target.shape[1]
        assert_near(torch.cat(found, 1), exact)


def assert_padded(pair: Pair, *sizes: tuple[int, int], left: bool) -> None:
    """Rows of these lengths, of source and target, at once and with caches: each is what it is
    alone.
    """
    given = []
    for ids, side in ((pair.source, 0), (pair.target, 1)):
        length = ids.shape[1]
        padded, positions = torch.full_like(ids, 10_000), torch.full_like(ids, -1)
        for i, n in enumerate(size[side] for size in sizes):
            at = slice(length - n, length) if left else slice(0, n)
            padded[i, at], positions[i, at] = ids[i, :n], torch.arange(n)
        given.append((padded, positions))
    (source, at), (target, to) = given
    network = pair.mine.network
    found = pair.mine(source, target, at, to)
    caches, memory = network.new_caches(), network.run_encoder(source, at)
    parts = []
    for t in range(target.shape[1]):
        first = {} if t else {"memory": memory, "memory_positions": at}
        part = slice(t, t + 1)
        parts.append(network.run_decoder(target[:, part], caches, positions=to[:, part], **first))
    for i, (n, m) in enumerate(sizes):
        alone = pair.exact(pair.source[i : i + 1, :n], pair.target[i : i + 1, :m])
        assert_near(found[i][to[i] >= 0], alone[0])
        assert_near(torch.cat(parts, 1)[i][to[i] >= 0], alone[0])


def assert_search(pair: Pair, sizes: Sequence[int], beams: int) -> None:
    """A batch of padded sources, on our side; theirs row by row. With beams, their
    early_stopping="never".
    """
    length, end = pair.source.shape[1], pair.theirs.config.eos_token_id
    at = torch.arange(length).expand(3, -1)
    at = at.where(at < torch.tensor(sizes)[:, None], -1)
    found = pair.mine.beam_search(pair.source, at, max_tokens=12, beams=beams)
    for i, n in enumerate(sizes):
        more = {"early_stopping": "never", "length_penalty": 1.0} if beams > 1 else {}
        exact = pair.theirs.generate(
            pair.source[i : i + 1, :n], max_new_tokens=12, num_beams=beams, do_sample=False, **more
        )[0].tolist()
        exact = exact[1:]
        exact = exact[: exact.index(end)] if end in exact else exact
        assert list(found[i][0].ids) == exact
        alone = pair.mine.beam_search(pair.source[i : i + 1, :n], max_tokens=12, beams=beams)[0]
        assert [x.ids for x in alone] == [x.ids for x in found[i]]
        assert math.isclose(alone[0].score, found[i][0].score, rel_tol=1e-5)


def saved_twice(model: Any, folder: Path) -> tuple[Any, Path]:
    """Ours, saved, loaded and saved again in the same bytes; and the first folder."""
    names, again = [folder / name for name in ("first", "second")], model
    for name in names:
        name.mkdir()
        save(again.network, again.config, name)
        again = regard.load(name, kind=type(model))
    for file in ("model.safetensors", "config.json"):
        first, second = ((name / file).read_bytes() for name in names)
        assert first == second
    return again, names[0]


def assert_saved_again(pair: Pair, folder: Path) -> None:
    """Saving gives the same file again, and transformers reads it."""
    model, first = saved_twice(pair.mine, folder)
    assert model(pair.source, pair.target).equal(pair.mine(pair.source, pair.target))
    kind = getattr(transformers, type(pair.theirs).__name__)
    again = kind.from_pretrained(first, attn_implementation="eager").eval().requires_grad_(False)
    exact = again(input_ids=pair.source, decoder_input_ids=pair.target).logits
    assert_near(model(pair.source, pair.target), exact)


def assert_wrong(pair: Pair, change: Callable[[Any], None]) -> None:
    """The right one is near, the changed one far."""
    assert_near(pair.mine.network(pair.source, pair.target), pair.exact())
    assert_far(pair.wrong(change), pair.exact())
