"""Everything that writes files which somebody needs afterwards: what stands before, how it is
written, and whether what is there is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import regard
from regard.caches import Growing
from regard.cli.app import run
from regard.models.tokenizer import Tokenizer
from regard.span import Span
from regard.train import checkpoints
from tests.fuzz.targets import TEXT

OLD, NEW, NOTHING = "old", "new", "nothing"
TRAIN = ["train", "text.txt", "--out", "out", "--steps", "4", "--batch", "2", "--context", "8"]
TRAIN += ["--dim", "16", "--layers", "1", "--heads", "2", "--vocab", "280", "--save-every", "1"]
TRAIN += ["--threads", "1"]
CONVERT = ["convert", "tiny", "out", "--to", "mqa", "--tokens", "16", "--text", "text.txt"]
VIEW = ["view", "tiny", "to", "--save", "run.safetensors"]
PAGE = ["explain", "to", "--attention", "mqa", "--html", "page.html"]


@dataclass(frozen=True)
class Writer:
    """What writes in the current folder.

    before: writes what stands there first, or nothing.
    write: writes what is new; a command gives its exit code, a number.
    found: `OLD`, `NEW` or `NOTHING`; raises where something torn stands under the name.
    serves: whether the command goes on after it has written, until Ctrl-C.
    never_overwrites: whether the command refuses where something new stands.
    """

    before: Callable[[], object]
    write: Callable[[], object]
    found: Callable[[], str]
    serves: bool = False
    never_overwrites: bool = False


def _save_cache(tokens: int) -> None:
    cache = Growing()
    x = _numbered(tokens)
    cache.update((x, x), Span(0, tokens))
    regard.caches.save(cache, Path("cache.safetensors"))


def _numbered(tokens: int) -> torch.Tensor:
    """A tensor [1, 2, tokens, 64] whose numbers say where they stand."""
    return torch.arange(tokens * 128.0).reshape(1, 2, tokens, 64)


def _cache_found() -> str:
    cache = regard.caches.load(Path("cache.safetensors"))
    where = cache.next(1)
    assert isinstance(where, Span)
    tokens = where.start
    stored = cache.update((_numbered(1),) * 2, Span(tokens, 1))
    assert bool((stored[0][0][:, :, :tokens] == _numbered(tokens)).all())
    return {60: OLD, 900: NEW}[tokens]


def _record(text: str) -> None:
    found = regard.inspect.record(regard.load("tiny"), text)
    regard.inspect.save(found, Path("run.safetensors"))


def _recording_found() -> str:
    found = regard.inspect.load(Path("run.safetensors"))
    next(iter(found.places.values()))
    return {"be": OLD, "to": NEW}["".join(found.pieces).strip()]


def _train() -> int:
    _write_text(90)
    some = Path("out").is_dir() and any(Path("out").iterdir())
    return run([*TRAIN, "--resume"] if some else TRAIN)


def _train_found() -> str:
    if not Path("out").is_dir():
        return NOTHING
    found = checkpoints.latest(Path("out/checkpoints"))
    if Path("out/config.json").exists():
        regard.load("out")
        return NEW
    return NOTHING if found is None else OLD


def _convert() -> int:
    """With a short text: without one it takes six times as long, and writes the same files."""
    _write_text(9)
    return run(CONVERT)


def _write_text(lines: int) -> None:
    numbered = "".join(f"Line {i}, written {i * i} times.\n" for i in range(lines))
    Path("text.txt").write_text(numbered)


def _convert_found() -> str:
    if not Path("out").is_dir():
        return NOTHING
    regard.load("out")
    return NEW


def _page_found() -> str:
    page = Path("page.html").read_text()
    if page == "old":
        return OLD
    assert page.rstrip().endswith("</html>")
    return NEW


def _tokenizer_found() -> str:
    return {280: OLD, 300: NEW}[Tokenizer.load(".").vocab_size]


def _nothing() -> None:
    """There is nothing before."""


WRITERS = {
    "train": Writer(_nothing, _train, _train_found),
    "convert": Writer(_nothing, _convert, _convert_found, never_overwrites=True),
    "cache": Writer(lambda: _save_cache(60), lambda: _save_cache(900), _cache_found),
    "recording": Writer(lambda: _record("be"), lambda: _record("to"), _recording_found),
    "view --save": Writer(lambda: _record("be"), lambda: run(VIEW), _recording_found, serves=True),
    "page": Writer(lambda: Path("page.html").write_text("old"), lambda: run(PAGE), _page_found),
    "tokenizer": Writer(
        lambda: Tokenizer.train(TEXT, vocab_size=280).save("."),
        lambda: Tokenizer.train(TEXT, vocab_size=300).save("."),
        _tokenizer_found,
    ),
}
