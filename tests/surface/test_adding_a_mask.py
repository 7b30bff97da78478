"""A new mask, bias or cache is one file: everything that works with those of the package works with
it, whether the file lies in the package or in a user's own code.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

import regard
from regard import biases, caches, masks
from regard.biases import BIASES
from regard.cli.show import show
from regard.errors import ArgumentError
from regard.inspect import Recorder, Recording, explain, load, report, save
from regard.masks import MASKS, Mask, Reach
from regard.masks.base import RefusalKey
from regard.ops.cpu.library import has_kernels
from regard.span import Span
from tests.caches import contract
from tests.caches.kinds import CAUSAL, KINDS, stored
from tests.inspect.small_model import TEXT, model
from tests.masks.brute import Case, covered
from tests.masks.test_registered import assert_mask, uncovered
from tests.oracles.plain import plain_attention
from tests.rules import assert_close_rule

TOYS = Path(__file__).parent / "toys"


@pytest.fixture
def toys() -> Iterator[types.SimpleNamespace]:
    """The toys, as a user would define them; they are forgotten again behind each test."""
    with ExitStack() as stack:
        for registry in (MASKS, BIASES, caches.CACHES):
            stack.enter_context(registry.temporary())
        found = {}
        for path in sorted(TOYS.glob("*.py")):
            spec = importlib.util.spec_from_file_location(f"toy_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            stack.callback(sys.modules.pop, spec.name)
            found[path.stem] = module
        yield types.SimpleNamespace(
            Band=found["band"].Band,
            Logarithmic=found["logarithmic"].Logarithmic,
            Listed=found["listed"].Listed,
        )


def qkv(T: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [1,4,T,16], k and v [1,2,S,16]."""
    make = torch.Generator().manual_seed(T)
    return tuple(torch.randn(1, n, L, 16, generator=make) for n, L in ((4, T), (2, S), (2, S)))  # type: ignore[return-value]


def kernels_that_agree(mask: Mask | None, bias: biases.Bias | None, dense: Any) -> set[str]:
    """The kernels that take a mask and a bias, in prefill and decoding; each gives the definition.

    dense: (visible [T,S], bias [T,S]) of so many queries and keys, in float64.
    """
    ran = set()
    for T, S in ((40, 40), (1, 40)):
        q, k, v = qkv(T, S)
        visible, added = dense(T, S)
        plain, _ = plain_attention(q, k, v, visible=visible, bias=added.float())
        exact, _ = plain_attention(
            q.double(), k.double(), v.double(), visible=visible, bias=added.double()
        )
        for choice in regard.plan(q, k, v, mask=mask, bias=bias).choices:
            if not choice.reasons:
                out = regard.attend(q, k, v, mask=mask, bias=bias, backend=choice.kernel)
                assert_close_rule(out, plain, exact, what=choice.kernel)
                ran.add(choice.kernel)
    return ran


def band(q: int, k: int, b: int, h: int) -> bool:
    return 2 <= q - k < 6


def in_band(T: int, S: int) -> tuple[Tensor, Tensor]:
    visible = [[band(S - T + i, j, 0, 0) for j in range(S)] for i in range(T)]
    return torch.tensor(visible), torch.zeros(T, S)


def recorded(mask: Mask | None = None, bias: biases.Bias | None = None) -> Recording:
    """A recording of one call."""
    with Recorder() as recorder:
        regard.attend(*qkv(9, 9), mask=mask, bias=bias)
    return recorder.recording(pieces=tuple("abcdefghi"))


def there_and_back(recording: Recording, path: Path) -> Recording:
    """The recording from its file."""
    save(recording, path)
    return load(path)


@pytest.mark.full
def test_every_kernel_that_takes_intervals_takes_a_new_mask(toys: types.SimpleNamespace) -> None:
    ran = kernels_that_agree(toys.Band(2, 6), None, in_band)
    compiled = {"cpu", "gemm"} if has_kernels() else set()
    assert ran >= {"reference", "tiled", "sdpa", "flex"} | compiled


def test_a_new_mask_keeps_every_promise(toys: types.SimpleNamespace) -> None:
    assert_mask(Case(toys.Band(2, 6), band))


def test_a_new_mask_that_is_wrong_is_caught(toys: types.SimpleNamespace) -> None:
    with pytest.raises(AssertionError):
        assert_mask(Case(toys.Band(2, 7), band))
    with pytest.raises(AssertionError):
        kernels_that_agree(toys.Band(3, 6), None, in_band)


def test_text_names_a_new_mask(toys: types.SimpleNamespace) -> None:
    assert masks.parse("causal & band(2, far=6)") == masks.Causal() & toys.Band(2, 6)
    with pytest.raises(ArgumentError, match="Band far is 0; it must be 1 or more"):
        masks.parse("band(0, 0)")
    app = typer.Typer()
    app.command()(show)
    shown = CliRunner().invoke(app, ["band(2, 6)", "--queries", "12", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["pairs"] == sum(
        band(q, k, 0, 0) for q in range(12) for k in range(q)
    )


def test_a_new_mask_says_how_far_it_looks(toys: types.SimpleNamespace) -> None:
    mask = masks.Causal() & (toys.Band(2, 6) | masks.Sinks(1))
    assert mask.reach() == Reach(6, 1)
    attention = model().decoder.layers[0].attention
    before, attention.mask = attention.mask, mask
    try:
        cache = attention.new_cache()
        assert isinstance(cache, caches.Streaming)
        assert cache.settings == {"sinks": 1, "recent": 6, "rewind": 0}
    finally:
        attention.mask = before


def test_an_explanation_says_why_a_new_mask_says_no(toys: types.SimpleNamespace) -> None:
    held = model()
    attention = held.decoder.layers[1].attention
    before, attention.mask = attention.mask, masks.Causal() & toys.Band(0, 3)
    try:
        found = explain(held, TEXT, layer=1, head=3, query=7).as_dict()
    finally:
        attention.mask = before
    assert "outside band(0, 3)" in json.dumps(found, default=str)


def test_a_recording_of_a_new_mask_is_read_back(
    toys: types.SimpleNamespace, tmp_path: Path
) -> None:
    mask = masks.Causal() & toys.Band(2, 6)
    found = there_and_back(recorded(mask), tmp_path / "run.safetensors")
    assert found[0].steps[0].mask == mask


def test_a_reader_without_the_class_gets_the_mask_written_out(
    toys: types.SimpleNamespace, tmp_path: Path
) -> None:
    mask, table = toys.Band(2, 6), masks.Dense(torch.ones(9, 9).bool())
    for n, rule in enumerate((mask, mask & table, masks.Causal() | mask)):
        save(recorded(rule), tmp_path / f"{n}.safetensors")
    with MASKS.temporary():
        MASKS.remove(toys.Band)
        for n in range(3):
            found = load(tmp_path / f"{n}.safetensors")[0].steps[0].mask
            rule = (mask, mask & table, masks.Causal() | mask)[n]
            assert found.block(Span(0, 9), Span(0, 9)).equal(rule.block(Span(0, 9), Span(0, 9)))


def test_a_page_has_a_new_mask_and_a_sentence_for_every_mask(
    toys: types.SimpleNamespace,
) -> None:
    page = json.dumps(report(recorded(masks.Causal() & toys.Band(2, 6)))["meta"], default=str)
    assert '"band(2, 6)"' in page
    folder = Path(regard.view.__file__).parent / "page" / "strings"
    files = sorted(folder.glob("*.json"))
    assert {path.stem for path in files} == {"en", "zh"}
    for path in files:
        assert {f"why.{key}" for key in get_args(RefusalKey)} <= set(json.loads(path.read_text()))


def test_a_name_of_the_package_is_not_given_away(toys: types.SimpleNamespace) -> None:
    with pytest.raises(ArgumentError, match="Causal cannot be the mask 'causal', because"):

        class Causal(toys.Band):  # type: ignore[misc,name-defined]
            """A name that is taken."""

    class Mine(toys.Band):  # type: ignore[misc,name-defined]
        """A name that is free."""

        kind = "Causal_Band"

    assert MASKS.find("causal_band") is Mine


def logarithmic(T: int, S: int) -> tuple[Tensor, Tensor]:
    i, j = torch.arange(S - T, S).double()[:, None], torch.arange(S).double()
    return torch.ones(T, S).bool(), -0.5 * (1 + (i - j).abs()).log()


def test_a_new_bias(toys: types.SimpleNamespace, tmp_path: Path) -> None:
    bias = toys.Logarithmic(0.5)
    compiled = {"cpu"} if has_kernels() else set()
    ran = kernels_that_agree(None, bias, logarithmic)
    assert ran >= {"reference", "tiled", "sdpa"} | compiled
    with pytest.raises(AssertionError):
        kernels_that_agree(None, toys.Logarithmic(0.6), logarithmic)
    assert str(bias + biases.ALiBi(4)) == "logarithmic(0.5) + alibi(4)"
    both = bias + biases.ALiBi(slopes=(0.1, 0.2, 0.3, 0.4))
    recording = recorded(masks.Causal(), both)
    page = json.dumps(report(recording)["meta"], default=str)
    assert "logarithmic(0.5)" in page
    found = there_and_back(recording, tmp_path / "run.safetensors")[0].steps[0].bias
    assert found is not None
    assert type(found.terms[0]) is toys.Logarithmic  # type: ignore[attr-defined]
    span = Span(0, 9)
    assert found.block(span, span).equal(both.block(span, span))
    with BIASES.temporary():
        BIASES.remove(toys.Logarithmic)
        found = load(tmp_path / "run.safetensors")[0].steps[0].bias
        assert found is not None
        assert found.block(span, span).equal(both.block(span, span))


def test_a_new_cache(toys: types.SimpleNamespace, tmp_path: Path) -> None:
    held, asked = model(), {"max_tokens": 6, "temperature": 0.0}
    usual = held.generate(TEXT, **asked).text
    assert held.generate(TEXT, cache="listed", **asked).text == usual
    with pytest.raises(ArgumentError, match="cache is 'listd'"):
        held.generate(TEXT, cache="listd", **asked)
    cache = toys.Listed()
    cache.update((torch.randn(1, 2, 3, 4),), Span(0, 3))
    caches.save(cache, tmp_path / "cache")
    again = caches.load(tmp_path / "cache")
    assert type(again) is toys.Listed
    assert torch.equal(again.contents()["memory.0"], cache.contents()["memory.0"])
    kind = replace(KINDS["growing"], name="listed", make=toys.Listed, mask=CAUSAL)
    steps: list[contract.Step] = [3, [[False, True], [True, True]], 1, 9]
    contract.assert_any_chunks_are_one_pass(kind, steps)
    contract.assert_a_crop_forgets(kind, steps, [1, 2], 4)
    contract.assert_copies_are_apart(kind, steps, [1])
    contract.assert_a_failed_update_is_taken_back(kind, steps, 2)


def test_a_cache_that_forgets_nothing_on_a_crop_is_caught(toys: types.SimpleNamespace) -> None:
    class Forgetful(toys.Listed):  # type: ignore[misc,name-defined]
        """A crop that does nothing."""

        def crop(self, length: int) -> None:
            del length

    kind = replace(KINDS["growing"], make=Forgetful)
    with pytest.raises(AssertionError):
        contract.assert_a_crop_forgets(kind, [3, 4], [1], 4)


@pytest.fixture(scope="module")
def with_toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, in which each toy is one more file and nothing else is changed."""
    root = tmp_path_factory.mktemp("src")
    package, source = root / "regard", Path(regard.__file__).parent
    package.mkdir()
    homes = {"masks": "band", "biases": "logarithmic", "caches": "listed"}
    for path in source.iterdir():
        if path.name not in homes and path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for home, toy in homes.items():
        (package / home).mkdir()
        for path in (*(source / home).glob("*.py"), TOYS / f"{toy}.py"):
            (package / home / path.name).symlink_to(path)
    return root


def run(root: Path, *arguments: str) -> str:
    """What a fresh Python with that package prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_one_file_in_the_package_is_enough(with_toys: Path) -> None:
    shown = run(with_toys, "-m", "regard", "show", "causal & band(2, 6)", "--json")
    assert json.loads(shown)["mask"] == "causal & band(2, 6)"
    told = run(
        with_toys,
        "-c",
        "from regard import biases, caches, masks; print(masks.Band(2, 6), "
        "biases.Logarithmic(0.5), caches.make_full_cache('listed').settings, "
        "masks.Band(2, 6).is_static)",
    )
    assert told.split("\n")[0] == "band(2, 6) logarithmic(0.5) {} True"


def test_a_file_in_the_package_needs_a_case(toys: types.SimpleNamespace) -> None:
    """What the suites demand of a new class of the package, said of toys that pretend to be one."""
    toys.Band.__module__ = "regard.masks.band"
    assert uncovered() == {"band"}
    assert "band" in covered({"band": Case(toys.Band(2, 6), band)})
    toys.Listed.__module__ = "regard.caches.listed"
    assert stored() - {type(kind.make()).__name__ for kind in KINDS.values()} == {"Listed"}
